"""How attempts take jobs of the queue in memory, hold them and let go of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from services.registry.engine import clean_text, kept_json
from services.registry.errors import LeaseLost
from services.registry.leases import CUT_NOTE, EXPIRED, LOG_CHUNK, LOG_MOST_BYTES
from services.registry.memory_jobs import MemoryJobs
from services.registry.rows import Attempt, Beat, Fence, Job, LogChunk
from services.registry.states import (
    AttemptOutcome,
    JobState,
    after_error,
    after_loss,
    after_release,
    backoff_s,
    failure_reason,
    loss_reason,
    release_reason,
)

__all__ = ["MemoryLeases"]


class MemoryLeases(MemoryJobs):
    """The same methods as `Leases`, with the same errors."""

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
        with self._lock:
            for job in self.waiting(len(self._jobs)):
                fits = job.cpus <= cpus and job.gpus <= gpus and job.memory_gb <= memory_gb
                if fits and (kinds is None or job.kind in kinds) and (among is None or job.id in among):
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
