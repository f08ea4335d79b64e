"""A study on a real stack whose workers are killed at random: its report is that of a study nobody disturbed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.stack import Stack

KILLS = 3
ASKED = ("--scale", "smoke", "--groups", "S3", "--demands", "1", "--seeds", "1")

# The same study without stack, queue and workers: the cell's training and probe in a process of its own.
UNDISTURBED = """
import json
import torch
from loopcore.studies import find_study
from loopcore.tasks import load_task
from loopcore.training import Training
from workers.measuring import measure
torch.set_num_threads(1)
study = find_study("budget-law")
(cell,) = study.cells("smoke", seeds=1, groups=["S3"], demands=[1.0])
training = Training(cell.train, threads=1)
while not training.finished:
    training.advance()
rows = []
for probe in cell.probes:
    found = measure(training.model, load_task(cell.train.task), cell.train, probe.spec(1), tell=lambda *_: None)
    rows += found.rows
print(json.dumps({"figures": training.figures(), "rows": rows, "undecided": found.undecided}))
"""


@pytest.mark.timeout(600)
def test_workers_killed_at_random_change_no_figure(stack: Stack) -> None:
    from loopcore.studies import CellResult, Measured, Row, find_study

    started = stack.json("study", "budget-law", *ASKED)
    study = started["study"]["id"]
    with _undisturbed() as alone:
        killed = _kill_at_random(stack, study)
        report = stack.json("study", "budget-law", *ASKED, "--wait", timeout_s=400)
        found = json.loads(alone.communicate(timeout=100)[0])
    works = stack.get(f"/v1/studies/{study}").json()["works"]
    jobs = [stack.get(f"/v1/jobs/{work['job']}").json() for work in works]
    assert sum(job["losses"] for job in jobs) == killed == KILLS
    assert {job["state"] for job in jobs} == {"succeeded"}

    law = find_study("budget-law")
    cells = law.cells("smoke", seeds=1, groups=["S3"], demands=[1.0])
    rows = tuple(Row(**row) for row in found["rows"])
    result = CellResult(state="succeeded", figures=found["figures"], rows=rows, missing=found["undecided"])
    expected = [finding.to_json() for finding in law.summarize(Measured(cells, {cells[0].name: result}))]
    assert _without_cost(report["findings"]) == _without_cost(json.loads(json.dumps(expected)))
    assert any(finding["measured"] is not None for finding in report["findings"])


def _kill_at_random(stack: Stack, study: int) -> int:
    """SIGKILLs the processes of running trainings, each once it has got somewhere; gives how many."""
    draw = random.Random(7)
    killed: set[int] = set()
    ends = time.monotonic() + 200
    while len(killed) < KILLS and time.monotonic() < ends:
        time.sleep(draw.uniform(1.0, 4.0))
        works = stack.get(f"/v1/studies/{study}").json()["works"]
        running = [work["job"] for work in works if work["state"] == "running"]
        if not running:
            continue
        attempts = stack.get(f"/v1/jobs/{draw.choice(running)}/attempts").json()["attempts"]
        pid = attempts[-1]["pid"]
        if pid is None or pid in killed:
            continue
        os.kill(pid, signal.SIGKILL)
        killed.add(pid)
    return len(killed)


def _undisturbed() -> subprocess.Popen[str]:
    root = Path(__file__).resolve().parents[2]
    return subprocess.Popen([sys.executable, "-c", UNDISTURBED], stdout=subprocess.PIPE, text=True, cwd=root)


def _without_cost(findings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in finding.items() if name != "seconds"} for finding in findings]
