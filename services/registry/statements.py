"""The conditions that leases stand on, and the statements of a queue's busy paths, which are built once and not for each job.

PostgreSQL does each in one round trip: what is written beside the job stands in the same statement as a common table expression.
"""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database
from services.registry.rows import Fence
from services.registry.states import LEFT_OPEN, JobState, RunState
from services.registry.tables import Json, Time, attempts, jobs, runs

__all__ = ["BusyStatements", "claimable", "end_runs", "held", "running"]

# As literals, not parameters: a partial index serves only a statement that shows its condition.
_QUEUED = sa.literal(JobState.QUEUED.value, literal_execute=True)
_RUNNING = sa.literal(JobState.RUNNING.value, literal_execute=True)
_ZERO = sa.literal(0, literal_execute=True)

Number = sa.ColumnElement[int] | int


def claimable(now: sa.ColumnElement[float]) -> sa.ColumnElement[bool]:
    """Jobs that could start if there were room."""
    return sa.and_(jobs.c.state == _QUEUED, jobs.c.unmet == _ZERO, jobs.c.run_after <= now)


def running() -> sa.ColumnElement[bool]:
    """Jobs that an attempt holds, found by the index of leases: sort them in Python, or the planner walks over all jobs."""
    return sa.and_(jobs.c.state == _RUNNING, jobs.c.lease_until > _ZERO)


def held(fence: Fence, now: sa.ColumnElement[float] | None) -> sa.ColumnElement[bool]:
    """The job's row if this attempt holds it; with `now`, only under a lease that has not run out."""
    return _held(fence.job, fence.attempt, now)


def _held(job: Number, attempt: Number, now: sa.ColumnElement[float] | None) -> sa.ColumnElement[bool]:
    mine = [jobs.c.id == job, jobs.c.attempt == attempt, jobs.c.state == _RUNNING]
    return sa.and_(*mine) if now is None else sa.and_(*mine, jobs.c.lease_until > now)


_END_RUNS = (
    sa.update(runs)
    .where(runs.c.job == sa.bindparam("ended_job", type_=sa.BigInteger()), runs.c.state == RunState.RUNNING.value)
    .values(state=sa.bindparam("end_state", type_=sa.Text()), finished_at=sa.bindparam("ended_at", type_=Time))
)


def end_runs(connection: sa.Connection, job: int, state: JobState, at: float) -> None:
    """Closes the runs of a job that ended in `state` and that nobody has closed.

    A statement of its own, after the one that moved the job: only that sees a run whose opening the job's row had to wait for.
    """
    connection.execute(_END_RUNS, {"ended_job": job, "end_state": LEFT_OPEN[state].value, "ended_at": at})


class BusyStatements:
    """Claiming a job and ending an attempt, with the attempt's own row written along."""

    def __init__(self, database: Database) -> None:
        self._one_statement = not database.sqlite
        now = database.now()
        self._claims = {
            (kinds, among): _claim(now, kinds=kinds, among=among, skip_locked=not database.sqlite)
            for kinds in (False, True)
            for among in (False, True)
        }
        self._leaves = {alive: _leave(now, alive=alive) for alive in (False, True)}
        if self._one_statement:
            self._claims = {some: _with_new_attempt(claim) for some, claim in self._claims.items()}
            self._leaves = {alive: _with_closed_attempt(leave) for alive, leave in self._leaves.items()}

    def claim(self, connection: sa.Connection, values: dict[str, Any]) -> sa.Row[Any] | None:
        """The row of the job now claimed.

        `values`: `by`, `room_cpus`, `room_gpus`, `room_memory`, `lease_s`, perhaps `kinds` and `among`.
        """
        row = connection.execute(self._claims["kinds" in values, "among" in values], values).one_or_none()
        if row is not None and not self._one_statement:
            connection.execute(
                sa.insert(attempts),
                {
                    "job": row.id,
                    "attempt": row.attempt,
                    "dispatcher": row.dispatcher,
                    "started_at": row.started_at,
                    "log_bytes": 0,
                },
            )
        return row

    def leave(self, connection: sa.Connection, fence: Fence, values: dict[str, Any], *, alive: bool) -> sa.Row[Any] | None:
        """The row of the job after the attempt that held it ended, or None if it held it no more.

        `values`: `to_state`, `ends`, `add_errors`, `add_losses`, `pause_s`, `says`, `gives`, `final_error`, `asked`, `outcome`,
        `attempt_error`.
        """
        values = {"held_job": fence.job, "held_attempt": fence.attempt, **values}
        row = connection.execute(self._leaves[alive], values).one_or_none()
        if row is not None and not self._one_statement:
            connection.execute(
                sa.update(attempts)
                .where(attempts.c.job == fence.job, attempts.c.attempt == fence.attempt)
                .values(outcome=values["outcome"], error=values["attempt_error"], finished_at=row.changed_at)
            )
        return row


def _claim(now: sa.ColumnElement[float], *, kinds: bool, among: bool, skip_locked: bool) -> Any:
    fits = [
        claimable(now),
        jobs.c.cpus <= sa.bindparam("room_cpus", type_=sa.Double()),
        jobs.c.gpus <= sa.bindparam("room_gpus", type_=sa.Double()),
        jobs.c.memory_gb <= sa.bindparam("room_memory", type_=sa.Double()),
    ]
    if kinds:
        fits.append(jobs.c.kind.in_(sa.bindparam("kinds", expanding=True)))
    if among:
        fits.append(jobs.c.id.in_(sa.bindparam("among", expanding=True)))
    best = sa.select(jobs.c.id).where(*fits).order_by(jobs.c.priority.desc(), jobs.c.id).limit(1)
    if skip_locked:  # SQLite has no such thing and needs none: there, writers take turns
        best = best.with_for_update(skip_locked=True)
    return (
        sa.update(jobs)
        .where(jobs.c.id == best.scalar_subquery())
        .values(
            state=JobState.RUNNING.value,
            attempt=jobs.c.attempt + 1,
            dispatcher=sa.bindparam("by", type_=sa.Text()),
            node=None,
            reason=None,
            started_at=now,
            lease_until=now + sa.bindparam("lease_s", type_=Time),
            deadline_at=now + jobs.c.time_limit_s,
        )
        .returning(jobs)
    )


def _with_new_attempt(claim: Any) -> Any:
    taken = claim.cte("taken")
    columns = ["job", "attempt", "dispatcher", "started_at", "log_bytes"]
    begun = sa.select(taken.c.id, taken.c.attempt, taken.c.dispatcher, taken.c.started_at, sa.literal(0, sa.BigInteger()))
    return sa.select(taken).add_cte(sa.insert(attempts).from_select(columns, begun).cte("begun"))


def _leave(now: sa.ColumnElement[float], *, alive: bool) -> Any:
    pause = sa.bindparam("pause_s", type_=Time)
    held_job, held_attempt = (sa.bindparam(name, type_=sa.BigInteger()) for name in ("held_job", "held_attempt"))
    asked = sa.case(
        (sa.bindparam("asked", type_=sa.Boolean()), sa.func.coalesce(jobs.c.cancel_requested_at, now)),
        else_=jobs.c.cancel_requested_at,
    )
    return (
        sa.update(jobs)
        .where(_held(held_job, held_attempt, now if alive else None))
        .values(
            state=sa.bindparam("to_state", type_=sa.Text()),
            lease_until=None,
            deadline_at=None,
            finished_at=sa.case((sa.bindparam("ends", type_=sa.Boolean()), now), else_=sa.null()),
            errors=jobs.c.errors + sa.bindparam("add_errors", type_=sa.Integer()),
            losses=jobs.c.losses + sa.bindparam("add_losses", type_=sa.Integer()),
            run_after=sa.func.coalesce(now + pause, jobs.c.run_after),
            reason=sa.bindparam("says", type_=sa.Text()),
            result=sa.bindparam("gives", type_=Json),
            error=sa.bindparam("final_error", type_=sa.Text()),
            cancel_requested_at=asked,
        )
        .returning(jobs, now.label("changed_at"))
    )


def _with_closed_attempt(leave: Any) -> Any:
    left = leave.cte("left_job")
    closed = (
        sa.update(attempts)
        .where(attempts.c.job == left.c.id, attempts.c.attempt == left.c.attempt)
        .values(
            outcome=sa.bindparam("outcome", type_=sa.Text()),
            error=sa.bindparam("attempt_error", type_=sa.Text()),
            finished_at=left.c.changed_at,
        )
    )
    return sa.select(left).add_cte(closed.cte("closed"))
