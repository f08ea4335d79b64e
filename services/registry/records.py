"""What jobs found out: runs with their curves, checkpoints and measurements.

A run belongs to a chain of retries, so that a second attempt or a retried job goes on where the one before it stopped.
Every write shows its fence, like those of the queue.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database, finite
from services.registry.errors import JobNotFound, RunNotFound
from services.registry.graph import ROOT
from services.registry.leases import lease_lost
from services.registry.rows import CheckpointRow, CurvePoint, Fence, Measurement, Run
from services.registry.statements import held
from services.registry.states import RunState
from services.registry.submission import known
from services.registry.tables import checkpoints, curves, jobs, measurements, runs

__all__ = ["Records", "position_of"]

# What `open_run` does not begin again: these need no more work.
COMPLETE = (RunState.FINISHED, RunState.DIVERGED)


def position_of(axes: dict[str, Any]) -> str:
    """The axes as text that is the same for the same axes."""
    return json.dumps(axes, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _run_columns() -> list[sa.ColumnElement[Any]]:
    newest = checkpoints.alias("newest")
    last = sa.select(newest.c.step).where(newest.c.run == runs.c.id).order_by(newest.c.step.desc()).limit(1)
    place = sa.select(newest.c.place).where(newest.c.run == runs.c.id).order_by(newest.c.step.desc()).limit(1)
    return [*runs.c, last.scalar_subquery().label("checkpoint_step"), place.scalar_subquery().label("checkpoint")]


def _run_from(row: sa.Row[Any]) -> Run:
    return Run(**{**row._mapping, "state": RunState(row.state)})


class Records:
    """All that the registry keeps of what jobs found out. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def open_run(
        self, fence: Fence, *, key: str = "", kind: str, spec: dict[str, Any], provenance: dict[str, Any] | None = None
    ) -> Run:
        """The job's run of this key: a new one, or the one that an attempt or a job before it in its chain began.

        One that is finished or diverged is given as it is; any other is running again. Raises LeaseLost.
        """

        def work(connection: sa.Connection) -> Run:
            root = self._hold(connection, fence)
            now = self._database.now()
            fresh = {
                "job": fence.job,
                "origin": root,
                "key": key,
                "kind": kind,
                "spec": spec,
                "provenance": provenance or {},
                "state": RunState.RUNNING.value,
                "mlflow_step": -1,
                "started_at": now,
            }
            complete = runs.c.state.in_([state.value for state in COMPLETE])
            again = {
                "job": fence.job,
                "state": sa.case((complete, runs.c.state), else_=RunState.RUNNING.value),
                "finished_at": sa.case((complete, runs.c.finished_at), else_=sa.null()),
            }
            # Looked for first, so that numbers are not used up by runs that are there; two threads may still both find nothing.
            reopened = sa.update(runs).where(runs.c.origin == root, runs.c.key == key).values(again).returning(runs.c.id)
            number = connection.scalar(reopened)
            if number is None:
                opened = self._database.insert(runs).values(fresh)
                opened = opened.on_conflict_do_update(index_elements=[runs.c.origin, runs.c.key], set_=again)
                number = connection.execute(opened.returning(runs.c.id)).scalar_one()
            return self._run(connection, number)

        return self._database.write(work)

    def run(self, run: int) -> Run:
        """Raises RunNotFound."""
        with self._database.reading() as connection:
            return self._run(connection, run)

    def runs(
        self, job_id: int | None = None, *, kind: str | None = None, before_id: int | None = None, limit: int = 1000
    ) -> list[Run]:
        """Runs of a job's whole chain of retries, oldest first; or of all jobs, newest first. Raises JobNotFound."""
        query = sa.select(*_run_columns()).limit(limit)
        if kind is not None:
            query = query.where(runs.c.kind == kind)
        if before_id is not None:
            query = query.where(runs.c.id < before_id)
        with self._database.reading() as connection:
            if job_id is None:
                return [_run_from(row) for row in connection.execute(query.order_by(runs.c.id.desc()))]
            root = connection.scalar(sa.select(ROOT).where(jobs.c.id == known(job_id)))
            if root is None:
                raise JobNotFound(job_id)
            return [_run_from(row) for row in connection.execute(query.where(runs.c.origin == root).order_by(runs.c.id))]

    def select_runs(self, connection: sa.Connection, wanted: sa.ColumnElement[bool]) -> list[Run]:
        """Runs that fit a condition, oldest first, as a part of a transaction."""
        return [_run_from(row) for row in connection.execute(sa.select(*_run_columns()).where(wanted).order_by(runs.c.id))]

    def set_mlflow(self, fence: Fence, run_id: int, mlflow_run: str) -> None:
        """Notes which MLflow run mirrors this one. Raises LeaseLost, RunNotFound."""
        self._change(fence, run_id, mlflow_run=mlflow_run)

    def mark_mlflow(self, fence: Fence, run_id: int, step: int) -> None:
        """Notes up to which step MLflow has the curves. Raises LeaseLost, RunNotFound."""
        self._change(fence, run_id, mlflow_step=step)

    def finish_run(self, fence: Fence, run_id: int, state: RunState | str, figures: dict[str, Any] | None = None) -> Run:
        """Says what the run came to, with its final figures. Raises LeaseLost, RunNotFound, ValueError for no such state."""
        ended = RunState(state)
        if ended is RunState.RUNNING:
            raise ValueError("a run cannot finish as running; expected " + ", ".join(RunState)[len("running, ") :])
        return self._change(fence, run_id, state=ended.value, figures=figures, finished_at=self._database.now())

    def add_points(self, fence: Fence, run_id: int, points: Iterable[CurvePoint]) -> None:
        """Adds to the run's curves; a step that is there already gets the new value. Raises LeaseLost, RunNotFound.

        Values that are not finite are kept as None.
        """
        # The newest value of each place, in one order, so that two writers cannot wait for each other.
        newest = {(point.name, point.step): finite(point.value) for point in points}
        rows = [{"run": run_id, "name": name, "step": step, "value": newest[name, step]} for name, step in sorted(newest)]
        if not rows:
            return
        add = self._database.insert(curves)
        add = add.on_conflict_do_update(index_elements=list(curves.primary_key), set_={"value": add.excluded.value})
        self._write(fence, run_id, lambda connection: connection.execute(add, rows))

    def curve(self, run_id: int, name: str | None = None, *, after_step: int = -1) -> list[CurvePoint]:
        """One curve of a run or all of them, by step and name. Raises RunNotFound."""
        query = sa.select(curves.c.step, curves.c.name, curves.c.value).where(curves.c.run == run_id, curves.c.step > after_step)
        if name is not None:
            query = query.where(curves.c.name == name)
        with self._database.reading() as connection:
            self._run(connection, run_id)
            return [CurvePoint(**row._mapping) for row in connection.execute(query.order_by(curves.c.step, curves.c.name))]

    def add_checkpoint(self, fence: Fence, run_id: int, step: int, place: str, digest: str) -> None:
        """Notes a published checkpoint; one of the same step takes the older one's row. Raises LeaseLost, RunNotFound."""
        values = {"place": place, "digest": digest, "at": self._database.now()}
        add = self._database.insert(checkpoints).values(run=run_id, step=step, **values)
        add = add.on_conflict_do_update(index_elements=list(checkpoints.primary_key), set_=values)
        self._write(fence, run_id, lambda connection: connection.execute(add))

    def checkpoints(self, run_id: int) -> list[CheckpointRow]:
        """Newest first. Raises RunNotFound."""
        query = sa.select(checkpoints).where(checkpoints.c.run == run_id).order_by(checkpoints.c.step.desc())
        with self._database.reading() as connection:
            self._run(connection, run_id)
            return [CheckpointRow(**row._mapping) for row in connection.execute(query)]

    def forget_checkpoints(self, fence: Fence, run_id: int, *, keep: int) -> None:
        """Drops the rows of all but the newest `keep` checkpoints, whose files are gone. Raises LeaseLost, RunNotFound."""
        newest = sa.select(checkpoints.c.step).where(checkpoints.c.run == run_id).order_by(checkpoints.c.step.desc()).limit(keep)
        drop = sa.delete(checkpoints).where(checkpoints.c.run == run_id, checkpoints.c.step.not_in(newest))
        self._write(fence, run_id, lambda connection: connection.execute(drop))

    def measure(self, fence: Fence, run_id: int, found: Iterable[Measurement]) -> None:
        """Keeps measurements; one of the same instrument and axes takes the older one's place. Raises LeaseLost, RunNotFound.

        Values that are not finite are kept as None. Raises ValueError for an axis that is no finite number or text.
        """
        newest = {(item.instrument, position_of(item.axes)): item for item in found}
        rows = [
            {
                "run": run_id,
                "instrument": instrument,
                "position": position,
                "value": finite(item.value),
                "low": finite(item.low),
                "high": finite(item.high),
            }
            for (instrument, position), item in sorted(newest.items(), key=lambda entry: entry[0])
        ]
        if not rows:
            return
        add = self._database.insert(measurements)
        values = {name: add.excluded[name] for name in ("value", "low", "high")}
        add = add.on_conflict_do_update(index_elements=list(measurements.primary_key), set_=values)
        self._write(fence, run_id, lambda connection: connection.execute(add, rows))

    def measurements(
        self, run_id: int | None = None, *, job_id: int | None = None, instrument: str | None = None
    ) -> list[Measurement]:
        """Of one run, or of a job's whole chain of retries; by run, instrument and axes. Raises RunNotFound, JobNotFound."""
        numbers = [self.run(run_id).id] if run_id is not None else [run.id for run in self.runs(job_id)]
        query = sa.select(measurements).where(measurements.c.run.in_(numbers))
        if instrument is not None:
            query = query.where(measurements.c.instrument == instrument)
        ordered = query.order_by(measurements.c.run, measurements.c.instrument, measurements.c.position)
        with self._database.reading() as connection:
            return [
                Measurement(row.instrument, json.loads(row.position), row.value, row.low, row.high, row.run)
                for row in connection.execute(ordered)
            ]

    def _run(self, connection: sa.Connection, run: int) -> Run:
        row = None
        if 0 < run < 2**63:
            row = connection.execute(sa.select(*_run_columns()).where(runs.c.id == run)).one_or_none()
        if row is None:
            raise RunNotFound(run)
        return _run_from(row)

    def _hold(self, connection: sa.Connection, fence: Fence) -> int:
        """Keeps the job with this attempt until the transaction is over; gives its chain's first job. Raises LeaseLost."""
        query = sa.select(ROOT).where(held(fence, self._database.now())).with_for_update(read=True)
        root = connection.scalar(query)
        if root is None:
            raise lease_lost(connection, fence)
        return root

    def _write(self, fence: Fence, run_id: int, work: Any) -> Any:
        """Runs `work` if this attempt holds the job and the run is one of its chain's. Raises LeaseLost, RunNotFound."""

        def fenced(connection: sa.Connection) -> Any:
            root = self._hold(connection, fence)
            if connection.scalar(sa.select(runs.c.id).where(runs.c.id == run_id, runs.c.origin == root)) is None:
                raise RunNotFound(run_id, fence.job)
            return work(connection)

        return self._database.write(fenced)

    def _change(self, fence: Fence, run_id: int, **values: Any) -> Run:
        def work(connection: sa.Connection) -> Run:
            connection.execute(sa.update(runs).where(runs.c.id == run_id).values(values))
            return self._run(connection, run_id)

        return self._write(fence, run_id, work)
