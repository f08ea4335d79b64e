"""A training as the registry sees it: its run, its curve in batches, its checkpoints."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from loopcore import checkpoint
from loopcore.errors import CheckpointCorrupt, InputError
from loopcore.specs import TrainSpec
from loopcore.training import Training
from services.registry import CurvePoint, Run, RunState
from workers.lease import HeldJob

__all__ = ["COMPLETE", "Recording", "flat", "newest_state", "pure", "trained_run"]

FLUSH_S = 1.0  # seconds between two writes of curve points
KEEP = 2  # checkpoints of a run that stay on disk
COMPLETE = (RunState.FINISHED, RunState.DIVERGED)  # nothing is left to do

# What every step gives that does not change from step to step; it is kept with the evaluations.
LEFT_OUT = frozenset({"length", "loops"})

_log = logging.getLogger(__name__)


def pure(spec: TrainSpec) -> TrainSpec:
    """The training's own spec, without the fields of the queue that a job adds."""
    return TrainSpec.model_validate(spec.model_dump(include=set(TrainSpec.model_fields)))


def flat(content: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested data as one level, names joined by dots."""
    found: dict[str, Any] = {}
    for name, value in content.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def trained_run(held: HeldJob, job: int) -> Run:
    """The run of a `train` job (or of its retries). Raises InputError where it has none with a checkpoint."""
    runs = held.write(lambda: held.registry.records.runs(job, kind="train"))
    found = [run for run in runs if run.checkpoint is not None]
    if not found:
        kind = held.registry.queue.job(job).kind
        raise InputError(f"job {job} is a {kind} job without a trained checkpoint; expected the number of a train job that ended")
    return found[-1]


def newest_state(held: HeldJob, run: Run) -> checkpoint.Loaded | None:
    """The run's newest checkpoint that is whole and right; None where there is none."""
    for row in held.write(lambda: held.registry.records.checkpoints(run.id)):
        try:
            return checkpoint.load(row.place, row.digest)
        except CheckpointCorrupt as error:
            _log.warning("%s", error)
    return None


class Recording:
    """Writes one run of one job. Every write is fenced; points are kept back for at most about a second."""

    def __init__(self, held: HeldJob, run: Run) -> None:
        self.run = run
        self._held = held
        self._points: list[CurvePoint] = []
        self._flushed_at = time.monotonic()

    @property
    def directory(self) -> Path:
        """Where this run's checkpoints are; no other run's, also after the registry was begun anew."""
        return self._held.settings.checkpoints / f"run-{self.run.id}-{self.run.started_at:.0f}"

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds all that a step gave; a step is never split between two writes."""
        self._points.extend(CurvePoint(step, name, value) for name, value in metrics.items() if name not in LEFT_OUT)
        if time.monotonic() - self._flushed_at >= FLUSH_S:
            self.flush()

    def add_point(self, point: CurvePoint) -> None:
        """Adds one value, to be written by the next `flush`."""
        self._points.append(point)

    def flush(self) -> None:
        """Writes the points that are left. Raises LeaseLost."""
        held, points, self._points = self._held, self._points, []
        self._flushed_at = time.monotonic()
        if points:
            held.write(lambda: held.registry.records.add_points(held.fence, self.run.id, points))

    def save(self, training: Training) -> checkpoint.Saved:
        """Publishes a checkpoint, the curve up to it first. Raises CheckpointNotWritten, LeaseLost."""
        self.flush()
        held, records = self._held, self._held.registry.records
        saved = checkpoint.save(self.directory, training.state_dict(), spec=training.spec, step=training.step_count)
        held.write(lambda: records.add_checkpoint(held.fence, self.run.id, saved.step, str(saved.path), saved.digest))
        checkpoint.prune(self.directory, keep=KEEP)
        held.write(lambda: records.forget_checkpoints(held.fence, self.run.id, keep=KEEP))
        return saved

    def resume(self, training: Training) -> int:
        """Takes up the newest checkpoint that is whole and right; gives its step, 0 where there is none."""
        loaded = newest_state(self._held, self.run)
        if loaded is None:
            return 0
        training.load_state_dict(loaded.state)
        _log.info("goes on from step %d", loaded.step)
        return loaded.step

    def finish(self, state: RunState, figures: dict[str, Any]) -> None:
        """Says what the run came to. Raises LeaseLost."""
        self.flush()
        held = self._held
        held.write(lambda: held.registry.records.finish_run(held.fence, self.run.id, state, figures))
