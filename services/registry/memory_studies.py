"""Studies kept in memory; a part of `MemoryRegistry`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from services.registry.engine import kept_json
from services.registry.errors import StudyNotFound
from services.registry.rows import Job, Started, Study, Work, WorkDone
from services.registry.states import ENDED
from services.registry.studies import RETRIED, best_of

if TYPE_CHECKING:
    from services.registry.memory import MemoryQueue
    from services.registry.memory_records import MemoryRecords

__all__ = ["MemoryStudies"]


@dataclass(frozen=True)
class _Row:
    cell: str
    probe: str
    key: str
    job: int


class MemoryStudies:
    """The same methods as `Studies`, with the same errors."""

    def __init__(self, queue: MemoryQueue, records: MemoryRecords, now: Callable[[], float]) -> None:
        self._queue = queue
        self._records = records
        self._now = now
        self._lock = queue._lock
        self._studies: dict[int, Study] = {}
        self._rows: dict[int, list[_Row]] = {}
        queue.pruned.append(self._forget)

    def start(
        self,
        name: str,
        scale: str,
        asked: dict[str, Any],
        works: Sequence[Work],
        *,
        user: str | None = None,
        provenance: dict[str, Any] | None = None,
    ) -> Started:
        with self._lock:
            asked, origin, now = kept_json(asked), kept_json(provenance or {}), self._now()
            question = (name, scale, asked)
            old = next((one for one in self._studies.values() if (one.name, one.scale, one.asked) == question), None)
            if old is None:
                old = Study(
                    id=len(self._studies) + 1,
                    name=name,
                    scale=scale,
                    asked=asked,
                    user=user,
                    provenance=origin,
                    created_at=now,
                    started_at=now,
                    cancelled_at=None,
                    jobs={},
                )
            self._studies[old.id] = replace(old, started_at=now, cancelled_at=None, provenance=origin)
            had = {row.key for row in self._rows.get(old.id, [])}
            doing = [(row.key, self._newest(row.job)) for rows in self._rows.values() for row in rows]
            done: dict[str, int] = {}
            counts: Counter[str] = Counter()
            rows: list[_Row] = []
            for one in works:
                found = best_of(job for key, job in doing if key == one.key)
                if one.key in done:
                    pass
                elif found is None:
                    made = self._queue.submit(one.submission(None if one.after is None else done[one.after])).job
                    done[one.key] = made.id
                    counts["created"] += 1
                elif found.state in RETRIED:
                    done[one.key] = self._queue.retry(found.id).id
                    counts["retried"] += 1
                else:
                    done[one.key] = found.id
                    counts["kept" if one.key in had else "shared"] += 1
                rows.append(_Row(one.cell, one.probe, one.key, done[one.key]))
            self._rows[old.id] = rows
            for row in rows:
                if self._queue.job(row.job).study_id is None:
                    self._queue._set(row.job, study_id=old.id)
            return Started(study=self.study(old.id), **{kind: counts[kind] for kind in ("created", "retried", "shared", "kept")})

    def study(self, study: int) -> Study:
        with self._lock:
            if study not in self._studies:
                raise StudyNotFound(study)
            newest = {job.id: job.state.value for row in self._rows[study] for job in [self._newest(row.job)]}
            return replace(self._studies[study], jobs=dict(Counter(newest.values())))

    def studies(self, *, name: str | None = None, before_id: int | None = None, limit: int = 50) -> list[Study]:
        with self._lock:
            numbers = sorted((number for number in self._studies if before_id is None or number < before_id), reverse=True)
            return [self.study(number) for number in numbers if name in (None, self._studies[number].name)][:limit]

    def cancel(self, study: int) -> Study:
        with self._lock:
            self.study(study)
            self._studies[study] = replace(self._studies[study], cancelled_at=self._now())
            wanted = {
                self._queue.job(row.job).origin
                for other, rows in self._rows.items()
                for row in rows
                if self._studies[other].cancelled_at is None
            }
            mine = {job.id: job for row in self._rows[study] if (job := self._newest(row.job)).state not in ENDED}
            for job in sorted(mine.values(), key=lambda one: -one.id):
                if job.origin not in wanted and self._queue.job(job.id).state not in ENDED:
                    self._queue.cancel(job.id)
            return self.study(study)

    def works(self, study: int, *, found: bool = True, curve: str | None = None) -> list[WorkDone]:
        with self._lock:
            self.study(study)
            answers: list[WorkDone] = []
            for row in sorted(self._rows[study], key=lambda one: (one.job, one.cell, one.probe)):
                newest = self._newest(row.job)
                runs = [run for run in self._records.runs(newest.id) if found and not run.key]
                run = runs[-1] if runs else None
                tries = [one for job in self._chain(newest.origin) for one in self._queue.attempts(job.id)]
                answers.append(
                    WorkDone(
                        cell=row.cell,
                        probe=row.probe,
                        key=row.key,
                        job=newest,
                        seconds=sum(one.finished_at - one.started_at for one in tries if one.finished_at is not None),
                        run=run,
                        curve=self._records.curve(run.id, curve) if run is not None and curve is not None else [],
                        measurements=self._records.measurements(run.id) if run is not None else [],
                    )
                )
            return answers

    def _chain(self, origin: int) -> list[Job]:
        return [job for job in self._queue._jobs.values() if job.origin == origin]

    def _newest(self, job: int) -> Job:
        return self._queue._newest(self._queue.job(job))

    def _forget(self, _: set[int]) -> None:
        for study, rows in self._rows.items():
            self._rows[study] = [row for row in rows if row.job in self._queue._jobs]
