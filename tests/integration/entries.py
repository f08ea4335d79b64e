"""Small jobs that tests of the queue's machinery run in place of trainings: what they do stands in their spec."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

from loopcore.errors import InputError
from workers.feed import Feed
from workers.lease import CancelRequested, HeldJob


def work(held: HeldJob) -> dict[str, Any]:
    """Does `steps` steps of `step_s` seconds; a line in the file `diary` for each attempt, step and end."""
    spec = held.job.spec
    _note(held, f"begin {os.getpid()}")
    for step in range(spec.get("steps", 1)):
        held.progress(step, spec.get("steps", 1))
        if not spec.get("deaf"):
            try:
                held.check()
            except CancelRequested:
                held.result = {"stopped_at": step}
                raise
        if spec.get("error_at") == step:
            raise ZeroDivisionError("the spec asked for this")
        if spec.get("input_error_at") == step:
            raise InputError("expected something else")
        time.sleep(spec.get("step_s", 0.05))
    print("printed by the job")
    logging.getLogger("entries").info("logged by the job")
    _note(held, "end")
    return {"attempt": held.fence.attempt, "threads": held.threads, "node": held.job.node}


def mirrored(held: HeldJob) -> dict[str, Any]:
    """Opens a run here and in MLflow, then does not listen any more; with `error`, fails before it can say what came of it."""
    row = held.registry.records.open_run(held.fence, kind="mirrored", spec={})
    with Feed(held) as feed:
        feed.follow(row, name="mirrored")
        while feed.mlflow_run(row) is None:
            time.sleep(0.05)
        held.progress(1, 1)
        if held.job.spec.get("error"):
            raise ZeroDivisionError("the spec asked for this")
        time.sleep(3600)
    return {}


def _note(held: HeldJob, text: str) -> None:
    diary = held.job.spec.get("diary")
    if diary:
        with Path(diary).open("a") as file:
            file.write(f"{held.fence.attempt} {text}\n")
