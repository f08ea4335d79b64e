"""A `probe` job: what a trained run computes and when, measured on held-out words.

A figure that the data do not support is no failure: the result says `undecided`, with the reason.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import torch

from loopcore.checkpoint import load_model
from loopcore.device import resolve_device
from loopcore.errors import CheckpointCorrupt
from loopcore.model import LoopedTransformer
from loopcore.plots import accuracy_figure, frontier_figure, save
from loopcore.recall import RecallNet
from loopcore.specs import ProbeJob, TrainSpec
from loopcore.tasks import load_task
from services.registry import CheckpointRow, LeaseLost, Measurement, RegistryUnavailable, Run, RunState
from workers.feed import Feed
from workers.lease import HeldJob, Released, Stop
from workers.measuring import Probed, measure
from workers.recording import flat, trained_run

__all__ = ["newest_good", "run"]

MLFLOW_AFTER_S = 30.0  # seconds that MLflow has to catch up once all is measured
MLFLOW_STOPPED_S = 3.0  # and once the job was told to stop

_log = logging.getLogger(__name__)


def run(held: HeldJob) -> dict[str, Any]:
    """Measures the newest good checkpoint of the run of `spec.job`.

    Raises InputError where there is nothing to measure, CheckpointCorrupt where no checkpoint can be trusted.
    """
    spec = held.spec
    assert isinstance(spec, ProbeJob)
    records = held.registry.records
    row = held.write(
        lambda: records.open_run(held.fence, kind="probe", spec=spec.resolved(), provenance=dict(held.job.provenance))
    )
    with Feed(held) as feed:
        feed.follow(row, name=held.job.name or f"probe {held.job.id}", params=flat(spec.resolved()))
        try:
            figures, plots = _measure(held, spec, row)
        except (LeaseLost, RegistryUnavailable, Released):
            raise
        except Exception as error:
            state = RunState.CANCELLED if isinstance(error, Stop) else RunState.FAILED
            held.write(lambda: records.finish_run(held.fence, row.id, state))
            feed.end(row, state)
            feed.finish(MLFLOW_STOPPED_S)
            raise
        held.write(lambda: records.finish_run(held.fence, row.id, RunState.FINISHED, figures))
        feed.attach(row, plots)
        feed.end(row, RunState.FINISHED, {name: value for name, value in figures.items() if not isinstance(value, dict | list)})
        complete = feed.finish(MLFLOW_AFTER_S)
        return {"run": row.id, **figures, "mlflow_run": feed.mlflow_run(row), "mlflow_complete": complete}


def newest_good(
    held: HeldJob, trained: Run, device: torch.device
) -> tuple[CheckpointRow, LoopedTransformer | RecallNet, TrainSpec]:
    """The run's newest checkpoint that is whole and right, and its model. Raises CheckpointCorrupt where none is."""
    problem: CheckpointCorrupt | None = None
    for row in held.write(lambda: held.registry.records.checkpoints(trained.id)):
        try:
            model, spec = load_model(row.place, device=device, expected_digest=row.digest)
        except CheckpointCorrupt as error:
            _log.warning("%s", error)
            problem = problem or error
            continue
        return row, model, spec
    raise problem or CheckpointCorrupt(f"run {trained.id} has no checkpoint; train it again")


def _measure(held: HeldJob, spec: ProbeJob, row: Run) -> tuple[dict[str, Any], list[Path]]:
    """All figures, and the files that go with them."""
    device = resolve_device(spec.device, granted_gpu=held.granted_gpu)
    trained = trained_run(held, spec.job)
    checkpoint, model, train = newest_good(held, trained, device)
    asked = len(spec.instruments) + 1
    held.progress(0, asked, f"{spec.words} words", unit="instruments")
    held.check()

    def tell(done: int, total: int, name: str) -> None:
        held.progress(done, total, name, unit="instruments")
        held.check()

    found = measure(model, load_task(train.task), train, spec, tell=tell)
    held.write(lambda: held.registry.records.measure(held.fence, row.id, [Measurement(**one) for one in found.rows]))
    figures: dict[str, Any] = {
        "trained_run": trained.id,
        "job": spec.job,
        "checkpoint": checkpoint.place,
        "step": checkpoint.step,
        "length": found.length,
        "trained_loops": found.trained_loops,
        "loops": found.watched,
        "words": spec.words,
        **dict.fromkeys(("v", "v_low", "v_high", "r2", "level", "solved")),
        "tau": {},
        **dict.fromkeys(("burn_in", "planned_loops", "within_tolerance", "profile")),
        **found.figures,
        "undecided": found.undecided,
        "measurements": len(found.rows),
    }
    for what, reason in found.undecided.items():
        _log.info("undecided: %s: %s", what, reason)
    folder = held.settings.artifacts / f"job-{held.job.id}"
    files = _draw(folder, figures, found)
    held.progress(asked, asked, unit="instruments")
    return figures | {"plots": [str(file) for file in files if file.suffix == ".png"]}, files


def _draw(folder: Path, figures: dict[str, Any], found: Probed) -> list[Path]:
    """Writes the plots and the figures behind them; gives their places."""
    what = f"job {figures['job']}, length {figures['length']}"
    curves = accuracy_figure(
        {"token": found.accuracy.token_T, "last position": found.accuracy.last_T},
        trained_loops=figures["trained_loops"],
        planned_loops=figures["planned_loops"],
        title=f"accuracy against loops, {what}",
    )
    files = [save(curves, folder / "accuracy.png")]
    if found.frontier is not None:
        figure = frontier_figure(found.frontier, trained_loops=figures["trained_loops"], title=f"frontier, {what}")
        files.append(save(figure, folder / "frontier.png"))
    written = folder / "probe.json"
    written.write_text(json.dumps(figures, indent=1, allow_nan=False) + "\n")
    return [*files, written]
