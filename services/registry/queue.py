"""The queue: what people ask for (submission), what attempts do (leases), who is up (fleet), and what one can see of it."""

from __future__ import annotations

import sqlalchemy as sa

from services.registry.engine import Database, clean_text
from services.registry.errors import JobNotFound
from services.registry.fleet import Fleet
from services.registry.leases import Leases
from services.registry.rows import Attempt, Job, LogChunk
from services.registry.statements import claimable, running
from services.registry.states import AttemptOutcome, JobState
from services.registry.submission import Submissions, job_from, known
from services.registry.tables import attempts, job_needs, jobs, logs

__all__ = ["Queue"]


class Queue(Submissions, Leases, Fleet):
    """All of the queue. Safe to share between threads."""

    def __init__(self, database: Database) -> None:
        Leases.__init__(self, database)  # the other two keep only the database

    def job(self, job: int) -> Job:
        """Raises JobNotFound."""
        with self._database.reading() as connection:
            row = connection.execute(sa.select(jobs).where(jobs.c.id == known(job))).one_or_none()
        if row is None:
            raise JobNotFound(job)
        return job_from(row)

    def jobs(
        self,
        *,
        state: JobState | str | None = None,
        kind: str | None = None,
        user: str | None = None,
        before_id: int | None = None,
        limit: int = 50,
    ) -> list[Job]:
        """Newest first; `before_id` is the last number of the page before. Raises ValueError for an unknown state."""
        query = sa.select(jobs).order_by(jobs.c.id.desc()).limit(limit)
        if state is not None:
            query = query.where(jobs.c.state == JobState(state).value)
        if kind is not None:
            query = query.where(jobs.c.kind == kind)
        if user is not None:
            query = query.where(jobs.c.user == user)
        if before_id is not None:
            query = query.where(jobs.c.id < min(before_id, 2**63 - 1))
        with self._database.reading() as connection:
            return [job_from(row) for row in connection.execute(query)]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state."""
        with self._database.reading() as connection:
            found = connection.execute(sa.select(jobs.c.state, sa.func.count().label("jobs")).group_by(jobs.c.state)).all()
        return dict.fromkeys(JobState, 0) | {JobState(row.state): row.jobs for row in found}

    def needs(self, job: int) -> tuple[int, ...]:
        """The jobs that this one needs, each the newest of its chain of retries when it was noted. Raises JobNotFound."""
        self.job(job)
        with self._database.reading() as connection:
            query = sa.select(job_needs.c.needs).where(job_needs.c.job == job).order_by(job_needs.c.needs)
            return tuple(connection.scalars(query))

    def attempts(self, job: int) -> list[Attempt]:
        """All tries at a job, oldest first. Raises JobNotFound."""
        self.job(job)
        columns = [column for column in attempts.c if column.name != "log_bytes"]
        with self._database.reading() as connection:
            found = connection.execute(sa.select(*columns).where(attempts.c.job == job).order_by(attempts.c.attempt)).all()
        return [
            Attempt(**{**row._mapping, "outcome": None if row.outcome is None else AttemptOutcome(row.outcome)}) for row in found
        ]

    def waiting(self, limit: int = 50) -> list[Job]:
        """Jobs that could start if there were room, in the order in which they would be claimed."""
        query = sa.select(jobs).where(claimable(self._database.now())).order_by(jobs.c.priority.desc(), jobs.c.id).limit(limit)
        with self._database.reading() as connection:
            return [job_from(row) for row in connection.execute(query)]

    def live(self, dispatcher: str | None = None) -> list[Job]:
        """Running jobs, oldest first; those that one dispatcher claimed, or all."""
        query = sa.select(jobs).where(running())
        if dispatcher is not None:
            query = query.where(jobs.c.dispatcher == dispatcher)
        with self._database.reading() as connection:
            found = [job_from(row) for row in connection.execute(query)]
        return sorted(found, key=lambda job: job.id)

    def set_reason(self, job: int, text: str) -> None:
        """Says why a queued job waits; does nothing to a job in any other state, or with the same reason."""
        text = clean_text(text)
        change = sa.update(jobs).where(
            jobs.c.id == job, jobs.c.state == JobState.QUEUED.value, jobs.c.reason.is_distinct_from(text)
        )
        self._database.write(lambda connection: connection.execute(change.values(reason=text)))

    def logs(self, job: int, *, after_seq: int = 0, limit: int = 1000) -> list[LogChunk]:
        """What its attempts wrote, in order, after the piece `after_seq`. Raises JobNotFound."""
        self.job(job)
        query = (
            sa.select(logs.c.seq, logs.c.at, logs.c.attempt, logs.c.text)
            .where(logs.c.job == job, logs.c.seq > after_seq)
            .order_by(logs.c.seq)
            .limit(limit)
        )
        with self._database.reading() as connection:
            return [LogChunk(**row._mapping) for row in connection.execute(query)]
