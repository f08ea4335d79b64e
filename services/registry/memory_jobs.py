"""Jobs in memory: what is kept of them, what one can see, and the rules that every change of one goes through."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.registry.engine import clean_text, kept_json
from services.registry.errors import JobNotFound, LeaseLost
from services.registry.rows import Attempt, DispatcherRow, Fence, Job, LogChunk, Served, Submission
from services.registry.states import (
    STARTS,
    WITHOUT_SUCCESS,
    AttemptOutcome,
    JobState,
    blocked_reason,
    check_transition,
)

__all__ = ["MemoryJobs"]


class MemoryJobs:
    """The tables of `MemoryQueue` and what its parts have in common."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.RLock()
        self._jobs: dict[int, Job] = {}
        self._needs: dict[int, set[int]] = {}
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._logs: dict[int, list[LogChunk]] = {}
        self._log_bytes: dict[tuple[int, int], int] = {}
        self._dispatchers: dict[str, DispatcherRow] = {}
        self._served: dict[str, Served] = {}
        self._last_job = 0
        self._last_log = 0
        self.pruned: list[Callable[[set[int]], None]] = []  # told which chains are gone
        self.ended: list[Callable[[Job], None]] = []  # told which job has ended

    # What one can see

    def job(self, job: int) -> Job:
        with self._lock:
            if job not in self._jobs:
                raise JobNotFound(job)
            return self._jobs[job]

    def jobs(
        self,
        *,
        state: JobState | str | None = None,
        kind: str | None = None,
        user: str | None = None,
        before_id: int | None = None,
        limit: int = 50,
    ) -> list[Job]:
        with self._lock:
            wanted = None if state is None else JobState(state)
            found = [
                job
                for job in sorted(self._jobs.values(), key=lambda job: -job.id)
                if (wanted is None or job.state is wanted)
                and (kind is None or job.kind == kind)
                and (user is None or job.user == user)
                and (before_id is None or job.id < before_id)
            ]
            return found[:limit]

    def counts(self) -> dict[JobState, int]:
        with self._lock:
            return {state: sum(job.state is state for job in self._jobs.values()) for state in JobState}

    def needs(self, job: int) -> tuple[int, ...]:
        with self._lock:
            self.job(job)
            return tuple(sorted(self._needs[job]))

    def attempts(self, job: int) -> list[Attempt]:
        with self._lock:
            self.job(job)
            return [self._attempts[place] for place in sorted(self._attempts) if place[0] == job]

    def waiting(self, limit: int = 50) -> list[Job]:
        with self._lock:
            now = self._now()
            able = [job for job in self._jobs.values() if job.state is JobState.QUEUED and not job.unmet and job.run_after <= now]
            return sorted(able, key=lambda job: (-job.priority, job.id))[:limit]

    def live(self, dispatcher: str | None = None) -> list[Job]:
        with self._lock:
            running = [job for job in self._jobs.values() if job.state is JobState.RUNNING]
            return [job for job in running if dispatcher is None or job.dispatcher == dispatcher]

    def set_reason(self, job: int, text: str) -> None:
        with self._lock:
            if job in self._jobs and self._jobs[job].state is JobState.QUEUED:
                self._set(job, reason=clean_text(text))

    def logs(self, job: int, *, after_seq: int = 0, limit: int = 1000) -> list[LogChunk]:
        with self._lock:
            self.job(job)
            return [chunk for chunk in self._logs.get(job, []) if chunk.seq > after_seq][:limit]

    # The rules behind them

    def held(self, fence: Fence, *, alive: bool = True) -> Job:
        """The job, if this attempt holds it. Raises LeaseLost."""
        job = self._jobs.get(fence.job)
        if job is None:
            raise LeaseLost(fence.job, fence.attempt, "there is no such job")
        if job.state is not JobState.RUNNING:
            raise LeaseLost(fence.job, fence.attempt, f"it is {job.state}")
        if job.attempt != fence.attempt:
            raise LeaseLost(fence.job, fence.attempt, f"attempt {job.attempt} runs")
        if alive and job.lease_until is not None and job.lease_until <= self._now():
            raise LeaseLost(fence.job, fence.attempt, "the lease has run out")
        return job

    def _set(self, job: int, **values: Any) -> Job:
        before = self._jobs[job]
        if "state" in values and values["state"] is not before.state:
            check_transition(f"change job {job}", before.state, values["state"])
        self._jobs[job] = after = replace(before, **values)
        if after.ended and not before.ended:
            for tell in self.ended:
                tell(after)
        return after

    def _leave(
        self, fence: Fence, target: JobState, outcome: AttemptOutcome, *, attempt_error: str | None = None, **values: Any
    ) -> Job:
        now = self._now()
        attempt = self._attempts[fence.job, fence.attempt]
        self._attempts[fence.job, fence.attempt] = replace(attempt, finished_at=now, outcome=outcome, error=attempt_error)
        if target is not JobState.QUEUED:
            values["finished_at"] = now
        self._set(fence.job, state=target, lease_until=None, deadline_at=None, **values)
        self._settle()
        return self._jobs[fence.job]

    def _settle(self) -> None:
        """Makes every waiting job's count, state and reason what its needs say, until nothing changes."""
        changed = True
        while changed:
            waiting = [job.id for job in self._jobs.values() if job.state in STARTS and self._needs[job.id]]
            changed = sum(self._settle_one(job) for job in waiting) > 0

    def _settle_one(self, number: int) -> bool:
        job = self._jobs[number]
        needs = [self._jobs[need] for need in sorted(self._needs[number])]
        bad = next((need for need in needs if need.state in WITHOUT_SUCCESS), None)
        values: dict[str, Any] = {"unmet": sum(need.state is not JobState.SUCCEEDED for need in needs)}
        if bad is not None:
            values |= {"state": JobState.BLOCKED, "reason": blocked_reason(bad.id, bad.state)}
        elif job.state is JobState.BLOCKED:
            values |= {"state": JobState.QUEUED, "reason": None}
        return self._set(number, **values) != job

    def _new(self, one: Submission, needs: set[int], *, origin: int | None, retry_of: int | None) -> Job:
        self._last_job += 1
        number = self._last_job
        now = self._now()
        self._jobs[number] = Job(
            id=number,
            kind=one.kind,
            name=None if one.name is None else clean_text(one.name),
            state=JobState.QUEUED,
            spec=kept_json(one.spec),
            digest=one.digest,
            priority=one.priority,
            user=one.user,
            key=one.key,
            cpus=float(one.cpus),
            gpus=float(one.gpus),
            memory_gb=float(one.memory_gb),
            attempt=0,
            errors=0,
            losses=0,
            error_budget=one.error_budget,
            loss_budget=one.loss_budget,
            unmet=0,
            reason=None,
            progress=None,
            result=None,
            error=None,
            created_at=now,
            run_after=now + one.delay_s,
            started_at=None,
            finished_at=None,
            lease_until=None,
            deadline_at=None,
            time_limit_s=one.time_limit_s,
            cancel_requested_at=None,
            origin=origin or number,
            retry_of=retry_of,
            dispatcher=None,
            node=None,
            provenance=kept_json(one.provenance),
            study_id=one.study_id,
        )
        self._needs[number] = needs
        self._settle_one(number)
        return self._jobs[number]

    def _holder(self, key: str | None) -> Job | None:
        if key is None:
            return None
        return next((job for job in self._jobs.values() if job.key == key and not job.ended), None)

    def _newest(self, job: Job) -> Job:
        return max((other for other in self._jobs.values() if other.origin == job.origin), key=lambda other: other.id)
