"""Who waits for whom: the edges between jobs, and what an end or a retry means for those behind it.

All functions run inside a transaction that holds the graph lock (`Database.write(..., graph=True)`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import sqlalchemy as sa

from services.registry.errors import JobNotFound
from services.registry.states import STARTS, WITHOUT_SUCCESS, JobState, blocked_reason
from services.registry.tables import job_needs, jobs

__all__ = [
    "ROOT",
    "begin_state",
    "chunks",
    "free",
    "has_dependants",
    "lock_states",
    "move_dependants",
    "newest_of_chains",
    "settle",
]

Value = TypeVar("Value", int, str)

CHUNK = 500  # numbers in one statement; SQLite takes 32,766

# The first job of a job's chain of retries.
ROOT = sa.func.coalesce(jobs.c.origin, jobs.c.id)

_WAITING = jobs.c.state.in_([state.value for state in sorted(STARTS)])


def chunks(values: Iterable[Value]) -> Iterable[list[Value]]:
    """Numbers or keys in lists short enough for one statement."""
    left = iter(values)
    while chunk := list(islice(left, CHUNK)):
        yield chunk


def newest_of_chains(connection: sa.Connection, numbers: Iterable[int]) -> dict[int, int]:
    """For each job the newest one of its chain of retries: the one that may still succeed. Raises JobNotFound."""
    wanted = sorted(set(numbers))
    root: dict[int, int] = {}
    newest: dict[int, int] = {}
    for chunk in chunks(wanted):
        root |= {
            row.id: row.root for row in connection.execute(sa.select(jobs.c.id, ROOT.label("root")).where(jobs.c.id.in_(chunk)))
        }
    for number in wanted:
        if number not in root:
            raise JobNotFound(number)
    for chunk in chunks(sorted(set(root.values()))):
        last = (
            sa.select(jobs.c.origin, sa.func.max(jobs.c.id).label("last")).where(jobs.c.origin.in_(chunk)).group_by(jobs.c.origin)
        )
        newest |= {row.origin: row.last for row in connection.execute(last)}
    return {number: newest.get(root[number], root[number]) for number in wanted}


def lock_states(connection: sa.Connection, numbers: Iterable[int]) -> dict[int, JobState]:
    """States that stay as they are until the transaction is over. Raises JobNotFound for a job pruned meanwhile."""
    states: dict[int, JobState] = {}
    wanted = sorted(set(numbers))
    for chunk in chunks(wanted):
        query = sa.select(jobs.c.id, jobs.c.state).where(jobs.c.id.in_(chunk)).order_by(jobs.c.id).with_for_update(read=True)
        states |= {row.id: JobState(row.state) for row in connection.execute(query)}
    for number in wanted:
        if number not in states:
            raise JobNotFound(number)
    return states


def begin_state(needs: Sequence[int], states: dict[int, JobState]) -> tuple[JobState, str | None, int]:
    """State, reason and count of unmet needs that a job which needs these begins with."""
    unmet = sum(states[need] is not JobState.SUCCEEDED for need in needs)
    bad = min((need for need in needs if states[need] in WITHOUT_SUCCESS), default=None)
    if bad is None:
        return JobState.QUEUED, None, unmet
    return JobState.BLOCKED, blocked_reason(bad, states[bad]), unmet


def has_dependants(connection: sa.Connection, job: int) -> bool:
    """Whether any job was ever told to wait for this one."""
    return connection.scalar(sa.select(job_needs.c.job).where(job_needs.c.needs == job).limit(1)) is not None


def free(connection: sa.Connection, job: int) -> None:
    """Counts a job that succeeded as met for those that need it."""
    behind = sa.select(job_needs.c.job).where(job_needs.c.needs == job)
    connection.execute(sa.update(jobs).where(jobs.c.id.in_(behind), _WAITING).values(unmet=jobs.c.unmet - 1))


def move_dependants(connection: sa.Connection, old: int, new: int) -> None:
    """Lets the jobs that wait for `old` wait for its retry `new` instead."""
    waiting = sa.select(jobs.c.id).where(_WAITING)
    connection.execute(sa.update(job_needs).where(job_needs.c.needs == old, job_needs.c.job.in_(waiting)).values(needs=new))


def settle(connection: sa.Connection, changed: Iterable[int]) -> None:
    """Blocks and unblocks what stands behind jobs that changed to or from a state without success, level by level.

    A job is blocked while any of its needs is failed, cancelled or blocked; the lowest number among them gives the reason.
    """
    while changed := list(changed):
        moved: list[int] = []
        for chunk in chunks(changed):
            behind = sa.select(job_needs.c.job).where(job_needs.c.needs.in_(chunk))
            waiting = sa.select(jobs.c.id, jobs.c.state, jobs.c.reason).where(jobs.c.id.in_(behind), _WAITING).order_by(jobs.c.id)
            found = {row.id: row for row in connection.execute(waiting)}
            for dependants in chunks(found):
                bad = _lowest_bad_needs(connection, dependants)
                updates: dict[tuple[JobState, str | None], list[int]] = defaultdict(list)
                for job in dependants:
                    state, reason = (JobState.BLOCKED, blocked_reason(*bad[job])) if job in bad else (JobState.QUEUED, None)
                    if state is JobState.QUEUED and found[job].state == state:
                        continue  # keeps the reason that a dispatcher gave
                    if (state, reason) != (found[job].state, found[job].reason):
                        updates[state, reason].append(job)
                    if state != found[job].state:
                        moved.append(job)
                for (state, reason), members in updates.items():
                    connection.execute(
                        sa.update(jobs).where(jobs.c.id.in_(members), _WAITING).values(state=state.value, reason=reason)
                    )
        changed = moved


def _lowest_bad_needs(connection: sa.Connection, dependants: list[int]) -> dict[int, tuple[int, JobState]]:
    needed = jobs.alias("needed")
    query = (
        sa.select(job_needs.c.job, needed.c.id, needed.c.state)
        .join(needed, needed.c.id == job_needs.c.needs)
        .where(job_needs.c.job.in_(dependants), needed.c.state.in_([state.value for state in sorted(WITHOUT_SUCCESS)]))
        .order_by(needed.c.id.desc())
    )
    return {row.job: (row.id, JobState(row.state)) for row in connection.execute(query)}
