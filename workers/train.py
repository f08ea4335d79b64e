"""A `train` job: one training, taken up where the attempt before left it.

It has its place and its steps from a `Seat`: by itself, or in a population with those of other jobs (`workers.together`).
"""

from __future__ import annotations

import logging
import time
from typing import Any, Self

from loopcore.device import resolve_device
from loopcore.errors import CheckpointNotWritten, InputError
from loopcore.specs import TrainJob, TrainSpec
from loopcore.training import Progress, Training
from services.registry import LeaseLost, RegistryUnavailable, RunState
from workers.feed import Feed
from workers.lease import HeldJob, Released, Stop
from workers.recording import COMPLETE, Recording, flat, newest_state, pure, trained_run

__all__ = ["Seat", "run"]

TELL_S = 0.25  # seconds between two words about progress
MLFLOW_AFTER_S = 30.0  # seconds that MLflow has to catch up once the training is over
MLFLOW_STOPPED_S = 3.0  # and once the job was told to stop

_log = logging.getLogger(__name__)


class Seat:
    """Where a training is and who makes its steps: this one it has to itself. While it is entered, steps may be asked for."""

    training: Training

    def take(self, held: HeldJob, spec: TrainSpec, device: str) -> Training:
        """Makes the training, before its first step. Raises what `Training` does."""
        self.training = Training(spec, device=device, threads=held.threads)
        return self.training

    def advance(self) -> Progress:
        """As `Training.advance`."""
        return self.training.advance()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def run(held: HeldJob, seat: Seat | None = None) -> dict[str, Any]:
    """Trains to the end of the spec; gives the final figures and where the last checkpoint is.

    A diverged training is a result, not an error: `outcome` says so. Raises what ends a job, after a last checkpoint.
    """
    assert isinstance(held.spec, TrainJob)
    spec = pure(held.spec)
    seat = seat or Seat()
    records = held.registry.records
    row = held.write(
        lambda: records.open_run(held.fence, kind="train", spec=spec.resolved(), provenance=dict(held.job.provenance))
    )
    recording = Recording(held, row)
    with Feed(held) as feed:
        feed.follow(row, name=held.job.name or f"train {held.job.id}", params=flat(spec.resolved()))
        if row.state in COMPLETE:  # the attempt before died between its last two writes
            figures = row.figures or {}
            state = row.state
        else:
            device = resolve_device(spec.device, granted_gpu=held.granted_gpu)
            training = seat.take(held, spec, device.type)
            try:
                with seat:
                    _train(held, seat, recording)
                saved = recording.save(training)
            except (LeaseLost, RegistryUnavailable):
                raise
            except Released:
                _last_checkpoint(recording, training)
                raise
            except Exception as error:
                state = RunState.CANCELLED if isinstance(error, Stop) else RunState.FAILED
                if isinstance(error, Stop):
                    place = _last_checkpoint(recording, training)
                    held.result = {"run": row.id, **training.figures(), "checkpoint": place}
                recording.finish(state, training.figures())
                feed.end(row, state, training.figures())
                feed.finish(MLFLOW_STOPPED_S)
                raise
            figures = training.figures() | {"checkpoint": str(saved.path), "device": device.type}
            state = RunState.DIVERGED if training.outcome == "diverged" else RunState.FINISHED
            recording.finish(state, figures)
        feed.end(row, state, figures)
        complete = feed.finish(MLFLOW_AFTER_S)
        return {"run": row.id, **figures, "mlflow_run": feed.mlflow_run(row), "mlflow_complete": complete}


def _train(held: HeldJob, seat: Seat, recording: Recording) -> None:
    training = seat.training
    spec = training.spec
    saved_at = recording.resume(training)
    if spec.start_from is not None and not saved_at:
        _warm_start(held, training, spec.start_from)
    told_at = 0.0
    while not training.finished:
        held.check()
        progress = seat.advance()
        recording.add(progress.step, progress.metrics)
        if progress.evaluated:
            _log.info("%s", _words(training))
        if progress.step - saved_at >= spec.checkpoint_every and not training.finished:
            recording.save(training)
            saved_at = progress.step
        if time.monotonic() - told_at >= TELL_S or training.finished:
            told_at = time.monotonic()
            held.progress(progress.step, spec.steps, _words(training))


def _warm_start(held: HeldJob, training: Training, job: int) -> None:
    """Gives the training the weights of another job's run. Raises InputError where it has none that fit."""
    parent = trained_run(held, job)
    loaded = newest_state(held, parent)
    if loaded is None:
        raise InputError(f"no checkpoint of job {job} (run {parent.id}) can be used to start from; train that job again")
    training.start_weights(loaded.state, trained_by=loaded.spec)
    _log.info("starts from the weights of job %d at step %d", job, loaded.step)


def _last_checkpoint(recording: Recording, training: Training) -> str | None:
    """Where a training that was told to stop keeps what it came to; None if the disk does not take it."""
    try:
        place = str(recording.save(training).path)
    except CheckpointNotWritten as error:
        _log.error("%s", error)
        return None
    _log.info("stopped at step %d; the next attempt or a retry goes on from %s", training.step_count, place)
    return place


def _words(training: Training) -> str:
    stages, found = training.stages, training.evaluation
    stage = f"stage {stages.index + 1} of {len(training.spec.contract.lengths)}, length {stages.length}, {stages.loops} loops"
    if found is None:
        return stage
    accuracy = f", accuracy {found['token_accuracy']:.3f}" if training.task.score != "loss" else ""
    return f"{stage}; at step {found['step']}, length {found['length']}: held-out loss {found['loss']:.4f}{accuracy}"
