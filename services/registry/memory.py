"""The registry as plain Python in memory: for tests of what uses it, and the model that the real one is checked against.

Written apart from the SQL, in the plainest way: it goes over all jobs where the database uses an index.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from services.registry.engine import clean_text, kept_json
from services.registry.errors import IllegalTransition, JobNotFound, KeyConflict, LeaseLost
from services.registry.leases import CUT_NOTE, EXPIRED, LOG_CHUNK, LOG_MOST_BYTES
from services.registry.memory_records import MemoryRecords
from services.registry.memory_studies import MemoryStudies
from services.registry.rows import (
    Attempt,
    Beat,
    DispatcherRow,
    Fence,
    Job,
    LogChunk,
    Served,
    Submission,
    Submitted,
)
from services.registry.states import (
    STARTS,
    WITHOUT_SUCCESS,
    AttemptOutcome,
    JobState,
    after_error,
    after_loss,
    after_release,
    backoff_s,
    blocked_reason,
    check_transition,
    failure_reason,
    loss_reason,
    release_reason,
)

__all__ = ["MemoryQueue", "MemoryRegistry"]


class MemoryQueue:
    """The same methods as `Queue`, with the same errors."""

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

    # What people ask for

    def submit(self, submission: Submission) -> Submitted:
        return self.submit_many([submission])[0]

    def submit_many(self, submissions: Sequence[Submission]) -> list[Submitted]:
        with self._lock:
            wanted = sorted({need for one in submissions for need in one.needs})
            newest = {need: self._newest(self.job(need)).id for need in wanted}
            taken: dict[str, str] = {}
            for one in submissions:
                holder = self._holder(one.key)
                if holder is not None and holder.digest != one.digest:
                    raise KeyConflict(holder.key or "", holder.id)
                if one.key is not None and holder is None and taken.setdefault(one.key, one.digest) != one.digest:
                    raise ValueError(f"key {one.key!r} stands twice in one call with two specs; expected one spec a key")
            answers: list[Submitted] = []
            for one in submissions:
                holder = self._holder(one.key)
                if holder is not None:
                    answers.append(Submitted(holder, created=False))
                else:
                    needs = {newest[need] for need in one.needs}
                    answers.append(Submitted(self._new(one, needs, origin=None, retry_of=None), created=True))
            return answers

    def cancel(self, job: int) -> Job:
        with self._lock:
            found = self.job(job)
            if found.state is JobState.CANCELLED or (found.state is JobState.RUNNING and found.cancel_requested_at is not None):
                return found
            check_transition(f"cancel job {job}", found.state, JobState.CANCELLED)
            now = self._now()
            if found.state is JobState.RUNNING:
                return self._set(job, cancel_requested_at=now)
            self._set(job, cancel_requested_at=now, finished_at=now, state=JobState.CANCELLED, reason="cancelled before it began")
            self._settle()
            return self._jobs[job]

    def retry(self, job: int) -> Job:
        with self._lock:
            old = self.job(job)
            newest = self._newest(old)
            if newest.id != job:
                raise IllegalTransition(
                    f"retry job {job}",
                    f"{old.state} and was retried as job {newest.id}",
                    expected=f"job {newest.id}, the newest of the chain",
                )
            if old.state not in (JobState.FAILED, JobState.CANCELLED):
                raise IllegalTransition(f"retry job {job}", old.state, expected="failed or cancelled")
            holder = self._holder(old.key)
            if holder is not None:
                raise KeyConflict(holder.key or "", holder.id)
            again = Submission(
                kind=old.kind,
                spec=old.spec,
                digest=old.digest,
                name=old.name,
                priority=old.priority,
                user=old.user,
                key=old.key,
                cpus=old.cpus,
                gpus=old.gpus,
                memory_gb=old.memory_gb,
                error_budget=old.error_budget,
                loss_budget=old.loss_budget,
                time_limit_s=old.time_limit_s,
                provenance=old.provenance,
                study_id=old.study_id,
            )
            needs = {self._newest(self._jobs[need]).id for need in self._needs[job]}
            made = self._new(again, needs, origin=old.origin, retry_of=job)
            for waiting, its in self._needs.items():
                if job in its and self._jobs[waiting].state in STARTS:
                    its.remove(job)
                    its.add(made.id)
            self._settle()
            return self._jobs[made.id]

    def prune(self, older_than_s: float) -> int:
        with self._lock:
            cutoff = self._now() - older_than_s
            chains: dict[int, list[Job]] = {}
            for job in self._jobs.values():
                chains.setdefault(job.origin, []).append(job)
            gone: set[int] = set()
            for chain in chains.values():
                numbers = {job.id for job in chain}
                old = all(job.ended and job.finished_at is not None and job.finished_at < cutoff for job in chain)
                needed = any(its & numbers for waiting, its in self._needs.items() if not self._jobs[waiting].ended)
                if old and not needed:
                    gone |= numbers
            origins = {self._jobs[number].origin for number in gone}
            for number in gone:
                del self._jobs[number], self._needs[number]
                self._logs.pop(number, None)
            self._attempts = {place: row for place, row in self._attempts.items() if place[0] not in gone}
            for its in self._needs.values():
                its -= gone
            for tell in self.pruned:
                tell(origins)
            return len(gone)

    # What attempts do

    def claim(
        self,
        dispatcher: str,
        *,
        cpus: float,
        gpus: float,
        memory_gb: float,
        lease_s: float = 90.0,
        kinds: Sequence[str] | None = None,
    ) -> Job | None:
        with self._lock:
            for job in self.waiting(len(self._jobs)):
                fits = job.cpus <= cpus and job.gpus <= gpus and job.memory_gb <= memory_gb
                if fits and (kinds is None or job.kind in kinds):
                    now = self._now()
                    number = job.attempt + 1
                    self._attempts[job.id, number] = Attempt(
                        job=job.id,
                        attempt=number,
                        node=None,
                        pid=None,
                        dispatcher=dispatcher,
                        started_at=now,
                        finished_at=None,
                        outcome=None,
                        error=None,
                    )
                    return self._set(
                        job.id,
                        state=JobState.RUNNING,
                        attempt=number,
                        dispatcher=dispatcher,
                        node=None,
                        reason=None,
                        started_at=now,
                        lease_until=now + lease_s,
                        deadline_at=None if job.time_limit_s is None else now + job.time_limit_s,
                    )
            return None

    def begin(self, fence: Fence, node: str, pid: int) -> Job:
        with self._lock:
            job = self.held(fence)
            attempt = self._attempts[fence.job, fence.attempt]
            if attempt.pid is not None and (attempt.node, attempt.pid) != (node, pid):
                raise LeaseLost(fence.job, fence.attempt, "another process has begun it")
            self._attempts[fence.job, fence.attempt] = replace(attempt, node=node, pid=pid)
            deadline = None if job.time_limit_s is None else self._now() + job.time_limit_s
            return self._set(fence.job, node=node, deadline_at=deadline)

    def beat(self, fence: Fence, *, lease_s: float = 90.0, progress: dict[str, Any] | None = None) -> Beat:
        with self._lock:
            job = self.held(fence)
            now = self._now()
            job = self._set(
                fence.job, lease_until=now + lease_s, progress=job.progress if progress is None else kept_json(progress)
            )
            late = job.deadline_at is not None and job.deadline_at <= now
            return Beat(job.cancel_requested_at is not None, now + lease_s, late)

    def succeed(self, fence: Fence, result: dict[str, Any] | None = None) -> Job:
        with self._lock:
            self.held(fence)
            return self._leave(fence, JobState.SUCCEEDED, AttemptOutcome.SUCCEEDED, result=kept_json(result), reason=None)

    def fail(self, fence: Fence, error: str, *, retry: bool = True) -> Job:
        with self._lock:
            job = self.held(fence)
            error = clean_text(error)
            errors = job.errors + 1
            asked = job.cancel_requested_at is not None
            target = after_error(errors, job.error_budget, retry=retry, cancel_requested=asked)
            values: dict[str, Any] = {"errors": errors, "reason": failure_reason(fence.attempt, error, target)}
            if target is JobState.QUEUED:
                values["run_after"] = self._now() + backoff_s(errors)
            else:
                values["error"] = error
            return self._leave(fence, target, AttemptOutcome.FAILED, attempt_error=error, **values)

    def cancelled(self, fence: Fence, result: dict[str, Any] | None = None) -> Job:
        with self._lock:
            job = self.held(fence)
            asked = self._now() if job.cancel_requested_at is None else job.cancel_requested_at
            values: dict[str, Any] = {"result": kept_json(result), "reason": "stopped on request", "cancel_requested_at": asked}
            return self._leave(fence, JobState.CANCELLED, AttemptOutcome.CANCELLED, **values)

    def lose(self, fence: Fence, reason: str) -> Job:
        with self._lock:
            job = self.held(fence, alive=False)
            reason = clean_text(reason)
            losses = job.losses + 1
            target = after_loss(losses, job.loss_budget, cancel_requested=job.cancel_requested_at is not None)
            why = loss_reason(fence.attempt, losses, reason, target)
            return self._leave(fence, target, AttemptOutcome.LOST, attempt_error=reason, losses=losses, reason=why)

    def release(self, fence: Fence, reason: str) -> Job:
        with self._lock:
            job = self.held(fence, alive=False)
            reason = clean_text(reason)
            target = after_release(cancel_requested=job.cancel_requested_at is not None)
            why = release_reason(fence.attempt, reason, target)
            return self._leave(fence, target, AttemptOutcome.RELEASED, attempt_error=reason, reason=why)

    def rescue(self, *, limit: int = 1000) -> list[Job]:
        with self._lock:
            now = self._now()
            silent = [job for job in self._jobs.values() if job.lease_until is not None and job.lease_until <= now]
            silent.sort(key=lambda job: (job.lease_until, job.id))
            return [self.lose(job.fence, EXPIRED) for job in silent[:limit]]

    def overdue(self, grace_s: float) -> list[Job]:
        with self._lock:
            before = self._now() - grace_s
            return [
                job
                for job in self.live()
                if (job.cancel_requested_at is not None and job.cancel_requested_at <= before)
                or (job.deadline_at is not None and job.deadline_at <= before)
            ]

    def log(self, fence: Fence, text: str) -> None:
        with self._lock:
            if not text:
                return
            self.held(fence)
            text = clean_text(text)
            place = (fence.job, fence.attempt)
            size = len(text.encode())
            before = self._log_bytes.get(place, 0)
            self._log_bytes[place] = before + size
            room = LOG_MOST_BYTES - before
            kept = text if size <= room else text.encode()[: max(room, 0)].decode("utf-8", "ignore")
            rows = [kept[at : at + LOG_CHUNK] for at in range(0, len(kept), LOG_CHUNK)]
            if 0 < room < size:
                rows.append(CUT_NOTE)
            for row in rows:
                self._last_log += 1
                chunk = LogChunk(self._last_log, self._now(), fence.attempt, row)
                self._logs.setdefault(fence.job, []).append(chunk)

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

    # Who is up

    def announce(self, dispatcher: str, host: str, pid: int, cluster: dict[str, Any]) -> None:
        with self._lock:
            self._dispatchers[dispatcher] = DispatcherRow(dispatcher, host, pid, self._now(), 0.0, kept_json(cluster))

    def dispatchers(self) -> list[DispatcherRow]:
        with self._lock:
            rows = [replace(row, age_s=self._now() - row.seen_at) for row in self._dispatchers.values()]
            return sorted(rows, key=lambda row: (-row.seen_at, row.id))

    def serve(self, model: str, replicas: int, *, job: int | None = None) -> Served:
        if replicas < 1:
            raise ValueError(f"{replicas} replicas of {model}; expected at least 1 (none: unserve)")
        with self._lock:
            self._served[model] = Served(model, replicas, job, self._now())
            return self._served[model]

    def unserve(self, model: str) -> bool:
        with self._lock:
            return self._served.pop(model, None) is not None

    def served(self) -> list[Served]:
        with self._lock:
            return [self._served[model] for model in sorted(self._served)]

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


class MemoryRegistry:
    """The same surface as `Registry`, without a database; `now` is its clock in epoch seconds."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.place = "memory"
        self.queue = MemoryQueue(now)
        self.records = MemoryRecords(self.queue, now)
        self.studies = MemoryStudies(self.queue, self.records, now)

    def ping(self) -> float:
        return self._now()

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""

    def __enter__(self) -> MemoryRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
