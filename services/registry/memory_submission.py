"""What people ask of the queue in memory: to submit, cancel, retry and prune jobs."""

from __future__ import annotations

from collections.abc import Sequence

from services.registry.errors import IllegalTransition, KeyConflict
from services.registry.memory_jobs import MemoryJobs
from services.registry.rows import Job, Submission, Submitted
from services.registry.states import STARTS, JobState, check_transition

__all__ = ["MemorySubmissions"]


class MemorySubmissions(MemoryJobs):
    """The same methods as `Submissions`, with the same errors."""

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
