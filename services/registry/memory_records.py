"""What jobs found out, kept in memory; the other half of `MemoryRegistry`."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from services.registry.engine import finite, kept_json
from services.registry.errors import RunNotFound
from services.registry.records import COMPLETE, position_of
from services.registry.rows import CheckpointRow, CurvePoint, Fence, Job, Measurement, Run
from services.registry.states import LEFT_OPEN, RunState

if TYPE_CHECKING:
    from services.registry.memory import MemoryQueue

__all__ = ["MemoryRecords"]


class MemoryRecords:
    """The same methods as `Records`, with the same errors."""

    def __init__(self, queue: MemoryQueue, now: Callable[[], float]) -> None:
        self._queue = queue
        self._now = now
        self._lock = queue._lock
        self._runs: dict[int, Run] = {}
        self._curves: dict[int, dict[tuple[int, str], float | None]] = {}
        self._checkpoints: dict[int, dict[int, CheckpointRow]] = {}
        self._measurements: dict[int, dict[tuple[str, str], Measurement]] = {}
        self._last_run = 0
        queue.pruned.append(self._forget)
        queue.ended.append(self._end)

    def open_run(
        self, fence: Fence, *, key: str = "", kind: str, spec: dict[str, Any], provenance: dict[str, Any] | None = None
    ) -> Run:
        with self._lock:
            origin = self._queue.held(fence).origin
            old = next((run for run in self._runs.values() if (run.origin, run.key) == (origin, key)), None)
            if old is not None:
                complete = old.state in COMPLETE
                again: dict[str, Any] = {} if complete else {"state": RunState.RUNNING, "finished_at": None}
                self._runs[old.id] = replace(old, job=fence.job, **again)
                return self.run(old.id)
            self._last_run += 1
            self._runs[self._last_run] = Run(
                id=self._last_run,
                job=fence.job,
                origin=origin,
                key=key,
                kind=kind,
                spec=kept_json(spec),
                provenance=kept_json(provenance or {}),
                state=RunState.RUNNING,
                mlflow_run=None,
                mlflow_step=-1,
                checkpoint_step=None,
                checkpoint=None,
                figures=None,
                started_at=self._now(),
                finished_at=None,
            )
            return self._runs[self._last_run]

    def run(self, run: int) -> Run:
        with self._lock:
            if run not in self._runs:
                raise RunNotFound(run)
            newest = max(self._checkpoints.get(run, {}).values(), key=lambda row: row.step, default=None)
            if newest is None:
                return self._runs[run]
            return replace(self._runs[run], checkpoint_step=newest.step, checkpoint=newest.place)

    def runs(
        self, job_id: int | None = None, *, kind: str | None = None, before_id: int | None = None, limit: int = 1000
    ) -> list[Run]:
        with self._lock:
            found = [
                self.run(run.id)
                for run in self._runs.values()
                if (kind is None or run.kind == kind) and (before_id is None or run.id < before_id)
            ]
            if job_id is None:
                return found[::-1][:limit]
            origin = self._queue.job(job_id).origin
            return [run for run in found if run.origin == origin][:limit]

    def set_mlflow(self, fence: Fence, run_id: int, mlflow_run: str) -> None:
        self._change(fence, run_id, mlflow_run=mlflow_run)

    def mark_mlflow(self, fence: Fence, run_id: int, step: int) -> None:
        self._change(fence, run_id, mlflow_step=step)

    def finish_run(self, fence: Fence, run_id: int, state: RunState | str, figures: dict[str, Any] | None = None) -> Run:
        ended = RunState(state)
        if ended is RunState.RUNNING:
            raise ValueError("a run cannot finish as running; expected " + ", ".join(RunState)[len("running, ") :])
        return self._change(fence, run_id, state=ended, figures=kept_json(figures), finished_at=self._now())

    def add_points(self, fence: Fence, run_id: int, points: Iterable[CurvePoint]) -> None:
        with self._lock:
            new = {(point.step, point.name): finite(point.value) for point in points}
            if new:
                self._own(fence, run_id)
                self._curves.setdefault(run_id, {}).update(new)

    def curve(self, run_id: int, name: str | None = None, *, after_step: int = -1) -> list[CurvePoint]:
        with self._lock:
            self.run(run_id)
            return [
                CurvePoint(step, its, value)
                for (step, its), value in sorted(self._curves.get(run_id, {}).items(), key=lambda entry: entry[0])
                if step > after_step and (name is None or its == name)
            ]

    def add_checkpoint(self, fence: Fence, run_id: int, step: int, place: str, digest: str) -> None:
        with self._lock:
            self._own(fence, run_id)
            self._checkpoints.setdefault(run_id, {})[step] = CheckpointRow(run_id, step, place, digest, self._now())

    def checkpoints(self, run_id: int) -> list[CheckpointRow]:
        with self._lock:
            self.run(run_id)
            return sorted(self._checkpoints.get(run_id, {}).values(), key=lambda row: -row.step)

    def forget_checkpoints(self, fence: Fence, run_id: int, *, keep: int) -> None:
        with self._lock:
            self._own(fence, run_id)
            self._checkpoints[run_id] = {row.step: row for row in self.checkpoints(run_id)[:keep]}

    def measure(self, fence: Fence, run_id: int, found: Iterable[Measurement]) -> None:
        with self._lock:
            new = {
                (item.instrument, position_of(item.axes)): Measurement(
                    item.instrument, kept_json(item.axes), finite(item.value), finite(item.low), finite(item.high), run_id
                )
                for item in found
            }
            if new:
                self._own(fence, run_id)
                self._measurements.setdefault(run_id, {}).update(new)

    def measurements(
        self, run_id: int | None = None, *, job_id: int | None = None, instrument: str | None = None
    ) -> list[Measurement]:
        with self._lock:
            numbers = [self.run(run_id).id] if run_id is not None else sorted(run.id for run in self.runs(job_id))
            return [
                replace(rows[place], axes=json.loads(place[1]))
                for rows in (self._measurements.get(number, {}) for number in numbers)
                for place in sorted(rows)
                if instrument is None or place[0] == instrument
            ]

    def _own(self, fence: Fence, run_id: int) -> Run:
        """The run, if this attempt holds its job. Raises LeaseLost, RunNotFound."""
        job = self._queue.held(fence)
        if run_id not in self._runs or self._runs[run_id].origin != job.origin:
            raise RunNotFound(run_id, fence.job)
        return self._runs[run_id]

    def _change(self, fence: Fence, run_id: int, **values: Any) -> Run:
        with self._lock:
            self._runs[run_id] = replace(self._own(fence, run_id), **values)
            return self.run(run_id)

    def _end(self, job: Job) -> None:
        for run in self._runs.values():
            if run.job == job.id and run.state is RunState.RUNNING:
                self._runs[run.id] = replace(run, state=LEFT_OPEN[job.state], finished_at=job.finished_at)

    def _forget(self, origins: set[int]) -> None:
        for run in [run for run in self._runs.values() if run.origin in origins]:
            del self._runs[run.id]
            for kept in (self._curves, self._checkpoints, self._measurements):
                kept.pop(run.id, None)
