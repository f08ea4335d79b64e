"""MLflow's copy of a job's runs, made beside the work by one thread that reads the registry.

The registry has every point first; a cursor in the run's row says up to which step MLflow has them. MLflow that is down, slow
or lost therefore costs the job nothing: what is missing stays to be seen by the cursor, and is sent when it is back.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.registry import LeaseLost, RegistryUnavailable, Run, RunState
from services.tracking import Tracking, TrackingError
from workers.lease import HeldJob, Released, Stop

__all__ = ["STATUS", "Feed", "copy_key"]

EVERY_S = 3.0  # seconds between two looks for new points
BACKOFF_MOST_S = 60.0  # seconds between two tries at an MLflow that does not answer
PATIENCE_S = 3.0  # seconds that one call is tried again
LAST_S = 3.0  # seconds that MLflow has to catch up with a job that failed before it could say what its runs came to

# What MLflow calls the end of a run.
STATUS: dict[RunState, str] = {
    RunState.FINISHED: "FINISHED",
    RunState.DIVERGED: "FINISHED",
    RunState.FAILED: "FAILED",
    RunState.CANCELLED: "KILLED",
}

_log = logging.getLogger(__name__)


def copy_key(run: Run) -> str:
    """What an MLflow run is tagged with that copies this one: its number, and which registry's it is."""
    return f"{run.id}@{run.started_at:.3f}"


@dataclass
class _Followed:
    """A run of the registry, and how far its copy is."""

    run: Run
    name: str
    parent: int | None
    params: dict[str, Any]
    tags: dict[str, str]
    mlflow_run: str | None
    step: int  # newest that MLflow has
    opened: bool = False  # whether this process has found or made the copy
    files: list[tuple[Path, str | None]] = field(default_factory=list)
    end: tuple[RunState, dict[str, Any]] | None = None
    done: bool = False


class Feed:
    """Keeps MLflow up to date with the runs it was told to follow, until `finish`."""

    def __init__(self, held: HeldJob) -> None:
        self._held = held
        self._tracking = Tracking(held.settings, patience_s=PATIENCE_S)
        self._followed: dict[int, _Followed] = {}
        self._lock = threading.Lock()
        self._hurry = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=copy_context().run, args=[self._work], name="mlflow-feed", daemon=True)

    def __enter__(self) -> Feed:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Ends what was not ended where the job failed; of one that lost its lease or was released, another attempt may."""
        if isinstance(error, Exception) and not isinstance(error, LeaseLost | RegistryUnavailable | Released):
            state = RunState.CANCELLED if isinstance(error, Stop) else RunState.FAILED
            unsaid = [followed.run for followed in self._followed.values() if followed.end is None]
            for run in unsaid:
                self.end(run, state)
            if unsaid:
                self.finish(LAST_S)
        self._over.set()
        self._hurry.set()

    def follow(self, run: Run, *, name: str, params: dict[str, Any] | None = None, parent: Run | None = None) -> None:
        """Opens the run's copy, or goes on with it. `parent` is a run that is followed already, shown above this one."""
        job = self._held.job
        tags = {"loop.job": str(job.id), "loop.kind": run.kind, "loop.key": run.key}
        tags |= {f"loop.{name}": str(job.provenance[name]) for name in ("commit", "dirty") if job.provenance.get(name)}
        with self._lock:
            self._followed[run.id] = _Followed(
                run, name, parent.id if parent else None, params or {}, tags, run.mlflow_run, run.mlflow_step
            )

    def attach(self, run: Run, files: Iterable[Path], folder: str | None = None) -> None:
        """Has files copied to the run's artifacts."""
        with self._lock:
            self._followed[run.id].files.extend((path, folder) for path in files)

    def end(self, run: Run, state: RunState, figures: dict[str, Any] | None = None) -> None:
        """Has the run ended once all of it is there."""
        with self._lock:
            self._followed[run.id].end = state, figures or {}

    def finish(self, patience_s: float) -> bool:
        """Waits for all that is followed to be complete, at most so long; gives whether it is."""
        ends = time.monotonic() + patience_s
        self._hurry.set()
        while time.monotonic() < ends and self._thread.is_alive() and not self._complete():
            time.sleep(0.05)
        complete = self._complete()
        if not complete:
            behind = [str(followed.run.id) for followed in self._followed.values() if not followed.done]
            _log.warning("MLflow has not got all of run %s; the registry has, see the runs' mlflow_step", ", ".join(behind))
        return complete

    def mlflow_run(self, run: Run) -> str | None:
        """The copy's id, once it is open."""
        with self._lock:
            return self._followed[run.id].mlflow_run

    def _complete(self) -> bool:
        with self._lock:
            return all(followed.done for followed in self._followed.values() if followed.end is not None)

    def _work(self) -> None:
        pause_s, away = EVERY_S, False
        while not self._over.is_set():
            try:
                with self._lock:
                    waiting = [followed for followed in self._followed.values() if not followed.done]
                for followed in waiting:
                    self._update(followed)
                if away:
                    _log.info("MLflow answers again")
                pause_s, away = EVERY_S, False
            except LeaseLost:
                return
            except TrackingError as error:
                if not away:
                    _log.warning("%s; the job goes on without it", error)
                away = True
                pause_s = min(2 * pause_s, BACKOFF_MOST_S)
            except Exception:
                _log.exception("MLflow could not be fed; the job goes on without it")
                pause_s = min(2 * pause_s, BACKOFF_MOST_S)
            if self._hurry.wait(pause_s):
                self._hurry.clear()
                if away:
                    self._hurry.wait(0.5)  # in a hurry, but not in a tight loop
                    self._hurry.set()

    def _update(self, followed: _Followed) -> None:
        """Brings one copy up to date. Every part of it can be done twice."""
        held, records, tracking = self._held, self._held.registry.records, self._tracking
        run = followed.run
        with self._lock:
            end, files = followed.end, list(followed.files)
        origin_ms = round(run.started_at * 1000)
        if not followed.opened:
            parent = None if followed.parent is None else self._followed[followed.parent].mlflow_run
            copy = tracking.start_run(
                followed.name,
                followed.params,
                followed.tags,
                key=copy_key(run),
                parent=parent,
                started_at=run.started_at,
            )
            if copy != followed.mlflow_run:
                followed.step = -1  # a new copy has nothing yet, whatever an older one had
                held.write(lambda: records.set_mlflow(held.fence, run.id, copy))
            with self._lock:
                followed.mlflow_run, followed.opened = copy, True
        mlflow_run = followed.mlflow_run
        assert mlflow_run is not None
        points = held.write(lambda: records.curve(run.id, after_step=followed.step))
        if points:
            tracking.log_points(mlflow_run, points, origin_ms=origin_ms)
            newest = points[-1].step
            held.write(lambda: records.mark_mlflow(held.fence, run.id, newest))
            followed.step = newest
        for path, folder in files:
            tracking.log_artifacts(mlflow_run, path, folder)
            with self._lock:
                followed.files.remove((path, folder))
        if end is not None:
            state, figures = end
            tracking.log_figures(mlflow_run, figures, step=max(followed.step, 0), origin_ms=origin_ms)
            tracking.end_run(mlflow_run, STATUS[state])
            with self._lock:
                followed.done = not followed.files
