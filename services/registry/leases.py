"""How an attempt takes a job, holds it and lets go of it.

Every write of a worker shows its fence and is kept only while that attempt holds a live lease by the database's clock: once
the lease has run out nothing is written any more, whether or not somebody has rescued the job yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database, clean_text
from services.registry.errors import LeaseLost
from services.registry.graph import free, has_dependants, settle
from services.registry.rows import Beat, Fence, Job
from services.registry.statements import BusyStatements, end_runs, held, running
from services.registry.states import (
    ENDED,
    AttemptOutcome,
    JobState,
    after_error,
    after_loss,
    after_release,
    backoff_s,
    check_transition,
    failure_reason,
    loss_reason,
    release_reason,
)
from services.registry.submission import job_from
from services.registry.tables import attempts, jobs, logs

__all__ = ["CUT_NOTE", "LOG_CHUNK", "LOG_MOST_BYTES", "Leases", "lease_lost"]

LOG_MOST_BYTES = 4 * 1024 * 1024  # bytes kept of what one attempt writes
LOG_CHUNK = 16_384  # characters in one row
CUT_NOTE = f"\n[log cut here: an attempt's log keeps {LOG_MOST_BYTES // 1024 // 1024} MiB; what came after is not kept]\n"

EXPIRED = "its lease ran out without a heartbeat"


def lease_lost(connection: sa.Connection, fence: Fence) -> LeaseLost:
    """The error of a write whose fence did not hold, with what is there instead."""
    row = connection.execute(sa.select(jobs.c.state, jobs.c.attempt).where(jobs.c.id == fence.job)).one_or_none()
    if row is None:
        found = "there is no such job"
    elif row.state != JobState.RUNNING:
        found = f"it is {row.state}"
    elif row.attempt != fence.attempt:
        found = f"attempt {row.attempt} runs"
    else:
        found = "the lease has run out"
    return LeaseLost(fence.job, fence.attempt, found)


class Leases:
    """The part of the queue that dispatchers and workers speak to."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._busy = BusyStatements(database)

    def claim(
        self,
        dispatcher: str,
        *,
        cpus: float,
        gpus: float,
        memory_gb: float,
        lease_s: float = 90.0,
        kinds: Sequence[str] | None = None,
        among: Sequence[int] | None = None,
    ) -> Job | None:
        """Takes the best job that fits into what is free, or None: highest priority first, then oldest.

        `kinds` and `among` (numbers of jobs) say which to choose from, all if empty.
        The new attempt begins under a lease of `lease_s` seconds; its time limit counts from here until `begin` sets it anew.
        """
        values: dict[str, Any] = {
            "by": dispatcher,
            "lease_s": lease_s,
            "room_cpus": cpus,
            "room_gpus": gpus,
            "room_memory": memory_gb,
        }
        if kinds is not None:
            values["kinds"] = list(kinds)
        if among is not None:
            values["among"] = list(among)

        def work(connection: sa.Connection) -> Job | None:
            row = self._busy.claim(connection, values)
            return None if row is None else job_from(row)

        return self._database.write(work)

    def begin(self, fence: Fence, node: str, pid: int) -> Job:
        """Says where the attempt runs and starts its time limit. Raises LeaseLost, also if another process began it."""
        now = self._database.now()
        one = sa.and_(attempts.c.job == fence.job, attempts.c.attempt == fence.attempt)
        free_or_mine = sa.or_(attempts.c.pid.is_(None), sa.and_(attempts.c.pid == pid, attempts.c.node == node))

        def work(connection: sa.Connection) -> Job:
            start = (
                sa.update(jobs).where(held(fence, now)).values(node=node, deadline_at=now + jobs.c.time_limit_s).returning(jobs)
            )
            row = connection.execute(start).one_or_none()
            if row is None:
                raise lease_lost(connection, fence)
            noted = connection.execute(sa.update(attempts).where(one, free_or_mine).values(node=node, pid=pid))
            if noted.rowcount == 0:
                raise LeaseLost(fence.job, fence.attempt, "another process has begun it")
            return job_from(row)

        return self._database.write(work)

    def beat(self, fence: Fence, *, lease_s: float = 90.0, progress: dict[str, Any] | None = None) -> Beat:
        """Renews the lease for `lease_s` seconds from now and leaves the progress, if given. Raises LeaseLost."""
        now = self._database.now()
        values: dict[str, Any] = {"lease_until": now + lease_s}
        if progress is not None:
            values["progress"] = progress
        late = sa.func.coalesce(jobs.c.deadline_at <= now, sa.false())
        renew = (
            sa.update(jobs)
            .where(held(fence, now))
            .values(values)
            .returning(jobs.c.cancel_requested_at, jobs.c.lease_until, late.label("late"))
        )

        def work(connection: sa.Connection) -> Beat:
            row = connection.execute(renew).one_or_none()
            if row is None:
                raise lease_lost(connection, fence)
            return Beat(row.cancel_requested_at is not None, row.lease_until, bool(row.late))

        return self._database.write(work)

    def succeed(self, fence: Fence, result: dict[str, Any] | None = None) -> Job:
        """Ends the job with its result and frees those that need it. Raises LeaseLost."""
        return self._database.write(
            lambda connection: self._leave(connection, fence, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, gives=result)
        )

    def fail(self, fence: Fence, error: str, *, retry: bool = True) -> Job:
        """Ends the attempt by the job's own error (a traceback). Raises LeaseLost.

        The job is tried again after a pause while its error budget lasts, unless `retry` is False (the error would only come
        back) or a cancel was requested.
        """
        error = clean_text(error)

        def work(connection: sa.Connection) -> Job:
            job = self._held(connection, fence, alive=True)
            errors = job.errors + 1
            asked = job.cancel_requested_at is not None
            target = after_error(errors, job.error_budget, retry=retry, cancel_requested=asked)
            again = target is JobState.QUEUED
            return self._leave(
                connection,
                fence,
                target,
                AttemptOutcome.FAILED,
                attempt_error=error,
                add_errors=1,
                pause_s=backoff_s(errors) if again else None,
                final_error=None if again else error,
                says=failure_reason(fence.attempt, error, target),
            )

        return self._database.write(work)

    def cancelled(self, fence: Fence, result: dict[str, Any] | None = None) -> Job:
        """Ends the job because its attempt stopped on request. Raises LeaseLost."""
        return self._database.write(
            lambda connection: self._leave(
                connection,
                fence,
                JobState.CANCELLED,
                AttemptOutcome.CANCELLED,
                gives=result,
                says="stopped on request",
                asked=True,
            )
        )

    def lose(self, fence: Fence, reason: str) -> Job:
        """Ends an attempt whose worker or node went away, which is not the job's fault. Raises LeaseLost if it ended before.

        For dispatchers: needs no live lease. The job is tried again while its loss budget lasts, unless a cancel was requested.
        """
        return self._lose(fence, clean_text(reason), expired_only=False)

    def _lose(self, fence: Fence, reason: str, *, expired_only: bool) -> Job:
        def work(connection: sa.Connection) -> Job:
            job = self._held(connection, fence, alive=False)
            now = self._database.now()
            if expired_only and connection.scalar(sa.select(sa.literal(job.lease_until) > now)):
                raise LeaseLost(fence.job, fence.attempt, "its lease lives")
            losses = job.losses + 1
            target = after_loss(losses, job.loss_budget, cancel_requested=job.cancel_requested_at is not None)
            says = loss_reason(fence.attempt, losses, reason, target)
            return self._leave(
                connection, fence, target, AttemptOutcome.LOST, alive=False, attempt_error=reason, add_losses=1, says=says
            )

        return self._database.write(work)

    def release(self, fence: Fence, reason: str) -> Job:
        """Ends an attempt with which nothing is wrong, because its cluster is shut down. Raises LeaseLost if it ended before.

        Needs no live lease. The job goes on with another attempt and no budget is spent, unless a cancel was requested.
        """
        reason = clean_text(reason)

        def work(connection: sa.Connection) -> Job:
            job = self._held(connection, fence, alive=False)
            target = after_release(cancel_requested=job.cancel_requested_at is not None)
            says = release_reason(fence.attempt, reason, target)
            return self._leave(connection, fence, target, AttemptOutcome.RELEASED, alive=False, attempt_error=reason, says=says)

        return self._database.write(work)

    def rescue(self, *, limit: int = 1000) -> list[Job]:
        """Loses every attempt whose lease has run out, oldest first; gives the jobs as they are now.

        Any number of dispatchers may do this at once: each attempt is lost by one of them.
        """
        now = self._database.now()
        expired = (
            sa.select(jobs.c.id, jobs.c.attempt)
            .where(running(), jobs.c.lease_until <= now)
            .order_by(jobs.c.lease_until, jobs.c.id)
            .limit(limit)
        )
        with self._database.reading() as connection:
            fences = [Fence(row.id, row.attempt) for row in connection.execute(expired)]
        rescued: list[Job] = []
        for fence in fences:
            try:
                rescued.append(self._lose(fence, EXPIRED, expired_only=True))
            except LeaseLost:
                continue  # another dispatcher was faster
        return rescued

    def overdue(self, grace_s: float) -> list[Job]:
        """Running jobs that were to stop more than `grace_s` seconds ago: by a cancel request or by their time limit."""
        before = self._database.now() - grace_s
        late = sa.or_(jobs.c.cancel_requested_at <= before, jobs.c.deadline_at <= before)
        with self._database.reading() as connection:
            found = [job_from(row) for row in connection.execute(sa.select(jobs).where(running(), late))]
        return sorted(found, key=lambda job: job.id)

    def log(self, fence: Fence, text: str) -> None:
        """Keeps a piece of the attempt's output, up to LOG_MOST_BYTES an attempt; says so where it was cut. Raises LeaseLost."""
        text = clean_text(text)
        size = len(text.encode())
        one = sa.and_(attempts.c.job == fence.job, attempts.c.attempt == fence.attempt)

        def work(connection: sa.Connection) -> None:
            self.hold(connection, fence)
            # Counting first makes writers of one attempt wait for each other, so the numbers grow in the order of commits.
            count = sa.update(attempts).where(one).values(log_bytes=attempts.c.log_bytes + size).returning(attempts.c.log_bytes)
            before = connection.execute(count).scalar_one() - size
            for row in _log_rows(text, size, before):
                stamped = {"job": fence.job, "attempt": fence.attempt, "at": self._database.now(), "text": row}
                connection.execute(sa.insert(logs).values(stamped))

        if text:
            self._database.write(work)

    def hold(self, connection: sa.Connection, fence: Fence) -> None:
        """Keeps the job with this attempt until the transaction is over. Raises LeaseLost."""
        query = sa.select(jobs.c.id).where(held(fence, self._database.now())).with_for_update(read=True)
        if connection.execute(query).one_or_none() is None:
            raise lease_lost(connection, fence)

    def _held(self, connection: sa.Connection, fence: Fence, *, alive: bool) -> Job:
        condition = held(fence, self._database.now() if alive else None)
        row = connection.execute(sa.select(jobs).where(condition).with_for_update()).one_or_none()
        if row is None:
            raise lease_lost(connection, fence)
        return job_from(row)

    def _leave(
        self,
        connection: sa.Connection,
        fence: Fence,
        target: JobState,
        outcome: AttemptOutcome,
        *,
        alive: bool = True,
        **said: Any,
    ) -> Job:
        """Moves a running job to `target`, closes its attempt and what it left open, and tells those that need it.

        `said` as in BusyStatements.leave.
        """
        check_transition(f"end attempt {fence.attempt} of job {fence.job}", JobState.RUNNING, target)
        ends = target in ENDED
        values = {**_SAYS_NOTHING, "to_state": target.value, "outcome": outcome.value, "ends": ends, **said}
        row = self._busy.leave(connection, fence, values, alive=alive)
        if row is None:
            raise lease_lost(connection, fence)
        if ends:
            end_runs(connection, fence.job, target, row.finished_at)
        if ends and has_dependants(connection, fence.job):
            self._database.want_graph(connection)
            if target is JobState.SUCCEEDED:
                free(connection, fence.job)
            else:
                settle(connection, [fence.job])
        return job_from(row)


# What an end of an attempt says where nothing else is said.
_SAYS_NOTHING: dict[str, Any] = {
    "add_errors": 0,
    "add_losses": 0,
    "pause_s": None,
    "says": None,
    "gives": None,
    "final_error": None,
    "asked": False,
    "attempt_error": None,
}


def _log_rows(text: str, size: int, before: int) -> list[str]:
    """The rows to keep of `text` (`size` bytes) after `before` bytes were written."""
    room = LOG_MOST_BYTES - before
    if room <= 0:
        return []
    note = ""
    if size > room:
        text = text.encode()[:room].decode("utf-8", "ignore")
        note = CUT_NOTE
    rows = [text[at : at + LOG_CHUNK] for at in range(0, len(text), LOG_CHUNK)]
    return [*rows, note] if note else rows
