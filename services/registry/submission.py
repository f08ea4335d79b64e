"""How jobs come into the queue, are asked to stop, and are tried anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database, clean_text
from services.registry.errors import IllegalTransition, JobNotFound, KeyConflict
from services.registry.graph import (
    begin_state,
    chunks,
    has_dependants,
    lock_states,
    move_dependants,
    newest_of_chains,
    settle,
)
from services.registry.rows import Job, Submission, Submitted
from services.registry.statements import end_runs
from services.registry.states import ENDED, JobState, check_transition
from services.registry.tables import job_needs, jobs

__all__ = ["Submissions", "job_from", "known"]

_UNFINISHED = [state.value for state in JobState if state not in ENDED]


_NAMES = tuple(column.name for column in jobs.c)
_REALS = tuple(column.name for column in jobs.c if isinstance(column.type, sa.Double))


def known(number: int) -> int:
    """The number, if any job could have it. Raises JobNotFound."""
    if not 0 < number < 2**63:
        raise JobNotFound(number)
    return number


def job_from(row: sa.Row[Any]) -> Job:
    """The record of a row of `jobs`."""
    values = {name: row._mapping[name] for name in _NAMES}
    values["state"] = JobState(values["state"])
    if values["origin"] is None:
        values["origin"] = values["id"]
    for name in _REALS:  # SQLite gives whole numbers back as integers where a statement returns what it wrote
        if values[name] is not None:
            values[name] = float(values[name])
    return Job(**values)


class Submissions:
    """The part of the queue that people speak to."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def submit(self, submission: Submission) -> Submitted:
        """Queues a job, or gives the unfinished one that holds the same key with the same spec.

        A job whose needs cannot succeed as they are begins `blocked`. Raises KeyConflict, and JobNotFound for a need.
        """
        return self.submit_many([submission])[0]

    def submit_many(self, submissions: Sequence[Submission]) -> list[Submitted]:
        """Queues all of them in one transaction, or none; the answers are in the order of what was given.

        Raises KeyConflict, and JobNotFound for a need.
        """
        for submission in submissions:
            for need in submission.needs:
                known(need)
        # Plain jobs touch no other job's row. Keys are looked up before they are taken, so their holders must keep still.
        graph = any(submission.needs or submission.key is not None for submission in submissions)
        return self._database.write(lambda connection: self.submit_in(connection, submissions), graph=graph)

    def submit_in(self, connection: sa.Connection, submissions: Sequence[Submission]) -> list[Submitted]:
        """`submit_many` as a part of a transaction that holds the graph lock."""
        newest = newest_of_chains(connection, (need for submission in submissions for need in submission.needs))
        states = lock_states(connection, newest.values())
        holders = self._holders(connection, {submission.key for submission in submissions if submission.key is not None})

        fresh: list[dict[str, Any]] = []
        fresh_needs: list[list[int]] = []
        places: list[int | Job] = []  # for each submission: its row among the fresh ones, or the job that holds its key
        keyed: dict[str, int] = {}  # keys that this very call takes
        for submission in submissions:
            key = submission.key
            if key is not None and (holder := holders.get(key)) is not None:
                if holder.digest != submission.digest:
                    raise KeyConflict(key, holder.id)
                places.append(holder)
                continue
            if key is not None and key in keyed:
                if fresh[keyed[key]]["digest"] != submission.digest:
                    raise ValueError(f"key {key!r} stands twice in one call with two specs; expected one spec a key")
                places.append(keyed[key])
                continue
            needs = sorted({newest[need] for need in submission.needs})
            if key is not None:
                keyed[key] = len(fresh)
            places.append(len(fresh))
            fresh.append(_new_row(submission) | dict(zip(("state", "reason", "unmet"), begin_state(needs, states), strict=True)))
            fresh_needs.append(needs)

        made = self._insert(connection, fresh, fresh_needs)
        answers: list[Submitted] = []
        told: set[int] = set()
        for place in places:
            if isinstance(place, Job):
                answers.append(Submitted(place, created=False))
            else:
                answers.append(Submitted(made[place], created=place not in told))
                told.add(place)
        return answers

    def _insert(self, connection: sa.Connection, rows: list[dict[str, Any]], needs: list[list[int]]) -> list[Job]:
        if not rows:
            return []
        now = self._database.now()
        delays = [row.pop("delay_s") for row in rows]
        started = connection.scalar(sa.select(now))
        for row, delay in zip(rows, delays, strict=True):
            row |= {"created_at": started, "run_after": started + delay}
        statement = sa.insert(jobs).returning(jobs, sort_by_parameter_order=True)
        made = [job_from(row) for row in connection.execute(statement, rows)]
        edges = [{"job": job.id, "needs": need} for job, all_needs in zip(made, needs, strict=True) for need in all_needs]
        if edges:
            connection.execute(sa.insert(job_needs), edges)
        return made

    def _holders(self, connection: sa.Connection, keys: set[str]) -> dict[str, Job]:
        holders: dict[str, Job] = {}
        ordered = sorted(keys)
        for at in range(0, len(ordered), 500):
            query = sa.select(jobs).where(jobs.c.key.in_(ordered[at : at + 500]), jobs.c.state.in_(_UNFINISHED))
            holders |= {row.key: job_from(row) for row in connection.execute(query)}
        return holders

    def cancel(self, job: int) -> Job:
        """Cancels a job that has not begun; asks a running one to stop. Asking twice changes nothing.

        Raises JobNotFound, and IllegalTransition for a job that succeeded or failed.
        """
        known(job)

        def work(connection: sa.Connection) -> Job:
            found = self._locked(connection, job)
            if found.state is JobState.CANCELLED or (found.state is JobState.RUNNING and found.cancel_requested_at is not None):
                return found
            check_transition(f"cancel job {job}", found.state, JobState.CANCELLED)
            now = self._database.now()
            values: dict[str, Any] = {"cancel_requested_at": now}
            if found.state is not JobState.RUNNING:
                values |= {"state": JobState.CANCELLED.value, "finished_at": now, "reason": "cancelled before it began"}
            changed = sa.update(jobs).where(jobs.c.id == job, jobs.c.state == found.state.value).values(values).returning(jobs)
            answer = job_from(connection.execute(changed).one())
            if answer.state is JobState.CANCELLED:
                end_runs(connection, job, answer.state, answer.finished_at or 0.0)
                if has_dependants(connection, job):
                    settle(connection, [job])
            return answer

        return self._database.write(work, graph=True)

    def retry(self, job: int) -> Job:
        """Queues a new job with the spec of one that failed or was cancelled; those that waited for the old one wait for it.

        Raises JobNotFound, KeyConflict, and IllegalTransition unless `job` is the newest of its chain and failed or cancelled.
        """
        known(job)
        return self._database.write(lambda connection: self.retry_in(connection, job), graph=True)

    def retry_in(self, connection: sa.Connection, job: int) -> Job:
        """`retry` as a part of a transaction that holds the graph lock."""
        old = self._locked(connection, job)
        newest = newest_of_chains(connection, [job])[job]
        if newest != job:
            raise IllegalTransition(
                f"retry job {job}",
                f"{old.state} and was retried as job {newest}",
                expected=f"job {newest}, the newest of the chain",
            )
        if old.state not in (JobState.FAILED, JobState.CANCELLED):
            raise IllegalTransition(f"retry job {job}", old.state, expected="failed or cancelled")
        if old.key is not None and (holder := self._holders(connection, {old.key}).get(old.key)) is not None:
            raise KeyConflict(old.key, holder.id)
        needed = connection.scalars(sa.select(job_needs.c.needs).where(job_needs.c.job == job)).all()
        needs = sorted(set(newest_of_chains(connection, needed).values()))
        state, reason, unmet = begin_state(needs, lock_states(connection, needs))
        row = {name: getattr(old, name) for name in _COPIED} | _BLANK
        row |= {"state": state.value, "reason": reason, "unmet": unmet, "delay_s": 0.0, "origin": old.origin, "retry_of": job}
        (made,) = self._insert(connection, [row], [needs])
        move_dependants(connection, job, made.id)
        settle(connection, [made.id])
        return made

    def _locked(self, connection: sa.Connection, job: int) -> Job:
        row = connection.execute(sa.select(jobs).where(jobs.c.id == job).with_for_update()).one_or_none()
        if row is None:
            raise JobNotFound(job)
        return job_from(row)

    def prune(self, older_than_s: float) -> int:
        """Deletes jobs that ended that long ago, with their attempts, logs, runs and measurements; gives their number.

        A chain of retries goes as a whole or not at all, and stays while an unfinished job needs any of it.
        """
        cutoff = self._database.ping() - older_than_s
        deleted, after = 0, 0
        while True:
            some, after = self._database.write(lambda connection, after=after: _prune_some(connection, cutoff, after), graph=True)
            deleted += some
            if after < 0:
                return deleted


def _prune_some(connection: sa.Connection, cutoff: float, after: int) -> tuple[int, int]:
    """Looks at the next few old jobs past number `after`; gives how many rows went and where to go on, -1 at the end."""
    old = sa.and_(jobs.c.state.in_([state.value for state in ENDED]), jobs.c.finished_at < cutoff)
    page = connection.execute(
        sa.select(jobs.c.id, jobs.c.origin).where(old, jobs.c.id > after).order_by(jobs.c.id).limit(500)
    ).all()
    if not page:
        return 0, -1
    roots = sorted({row.origin or row.id for row in page})
    chains: dict[int, list[int]] = {root: [] for root in roots}
    kept: set[int] = set()
    members = sa.select(jobs.c.id, jobs.c.origin, old.label("old")).where(sa.or_(jobs.c.id.in_(roots), jobs.c.origin.in_(roots)))
    for row in connection.execute(members):
        chains[row.origin or row.id].append(row.id)
        if not row.old:
            kept.add(row.origin or row.id)
    root_of = {member: root for root, all_members in chains.items() for member in all_members}
    waiting = jobs.alias("waiting")
    for chunk in chunks(root_of):
        needed = (
            sa.select(job_needs.c.needs)
            .join(waiting, waiting.c.id == job_needs.c.job)
            .where(job_needs.c.needs.in_(chunk), waiting.c.state.in_(_UNFINISHED))
        )
        kept |= {root_of[need] for need in connection.scalars(needed)}
    goes = [member for member, root in root_of.items() if root not in kept]
    for chunk in chunks(goes):
        connection.execute(sa.delete(jobs).where(jobs.c.id.in_(chunk)))
    return len(goes), page[-1].id


# What a retry takes over from the job before it.
_COPIED = (
    *("kind", "name", "spec", "digest", "priority", "user", "key", "cpus", "gpus", "memory_gb"),
    *("error_budget", "loss_budget", "time_limit_s", "provenance", "study_id"),
)

# What is the same in every new row.
_BLANK: dict[str, Any] = {"attempt": 0, "errors": 0, "losses": 0, "origin": None, "retry_of": None}


def _new_row(submission: Submission) -> dict[str, Any]:
    row = {name: getattr(submission, name) for name in _COPIED} | _BLANK
    for name in ("kind", "name", "digest", "user", "key"):
        row[name] = None if row[name] is None else clean_text(row[name])
    for name in ("cpus", "gpus", "memory_gb"):
        row[name] = float(row[name])
    return row | {"delay_s": submission.delay_s}
