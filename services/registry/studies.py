"""Studies: which work each needs, which job does it, and what came of it.

A piece of work has a key, which says what it is and not who asks for it. A study that needs work which another one's job does or
did takes that job; only work that nobody did, or that failed or was cancelled, is queued.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database
from services.registry.errors import IllegalTransition, StudyNotFound
from services.registry.graph import ROOT, chunks
from services.registry.queue import Queue
from services.registry.records import Records
from services.registry.rows import CurvePoint, Job, Measurement, Run, Started, Study, Work, WorkDone
from services.registry.states import ENDED, JobState
from services.registry.submission import job_from
from services.registry.tables import attempts, curves, jobs, measurements, runs, studies, study_works

__all__ = ["RETRIED", "Studies", "best_of", "study_digest"]

AT_ONCE = 32  # works queued together: enough to be quick, few enough that what is asked for first is also measured first

RETRIED = (JobState.FAILED, JobState.CANCELLED)


def study_digest(name: str, scale: str, asked: dict[str, Any]) -> str:
    """Tells studies apart: the same question asked again is the same study."""
    text = json.dumps([name, scale, asked], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def best_of(found: Iterable[Job]) -> Job | None:
    """Of the jobs that do one piece of work the one to build on: done before under way before given up, then the oldest."""

    def order(job: Job) -> tuple[int, int]:
        return (0 if job.state is JobState.SUCCEEDED else 1 if job.state not in ENDED else 2, job.id)

    return min(found, key=order, default=None)


class _Doing:
    """Which job does each piece of work, while a study is being started. A part of a transaction that holds the graph lock."""

    def __init__(self, queue: Queue, connection: sa.Connection, known: dict[str, list[Job]]) -> None:
        self._queue, self._connection, self._known = queue, connection, known
        self.job: dict[str, int] = {}
        self.how: dict[str, str] = {}  # created, retried or found

    def queue_what_is_missing(self, works: Iterable[Work]) -> None:
        """Together what can be: a job's number must be known before what builds on it can name it."""
        left = {one.key: one for one in works if one.key not in self.job}
        while left:
            ready = [one for one in left.values() if one.after is None or one.after in self.job]
            fresh = [one for one in ready if not self._found(one)]
            made = self._queue.submit_in(
                self._connection, [one.submission(None if one.after is None else self.job[one.after]) for one in fresh]
            )
            for one, answer in zip(fresh, made, strict=True):
                self._note(one, answer.job.id, "created")
            left = {key: one for key, one in left.items() if key not in self.job}

    def _found(self, work: Work) -> bool:
        found = best_of(self._known.get(work.key, ()))
        if found is None:
            return False
        if found.state in RETRIED:
            self._note(work, self._queue.retry_in(self._connection, found.id).id, "retried")
        else:
            self._note(work, found.id, "found")
        return True

    def _note(self, work: Work, job: int, how: str) -> None:
        self.job[work.key], self.how[work.key] = job, how


class Studies:
    """All that the registry knows of studies. Safe to share between threads."""

    def __init__(self, database: Database, queue: Queue, records: Records) -> None:
        self._database = database
        self._queue = queue
        self._records = records

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
        """Queues what is missing of a study's work, in one transaction; the same study again goes on where it was.

        Work stands behind the work that it builds on. What failed or was cancelled is queued anew as a retry, which takes up the
        newest checkpoint. Raises what `Queue.submit` raises.
        """
        digest = study_digest(name, scale, asked)

        def work(connection: sa.Connection) -> tuple[int, Counter[str]]:
            now = self._database.now()
            # The graph lock is held, so nobody else begins the same one between the two statements.
            again = sa.update(studies).where(studies.c.digest == digest)
            again = again.values(started_at=now, cancelled_at=None, provenance=provenance or {}).returning(studies.c.id)
            study = connection.scalar(again)
            if study is None:
                fresh = {"name": name, "scale": scale, "asked": asked, "digest": digest, "user": user}
                fresh |= {"provenance": provenance or {}, "created_at": now, "started_at": now}
                study = connection.execute(sa.insert(studies).values(fresh).returning(studies.c.id)).scalar_one()
            had = set(connection.scalars(sa.select(study_works.c.key).where(study_works.c.study == study)))
            known = self._by_key(connection, [one.key for one in works])
            doing = _Doing(self._queue, connection, known)
            counts: Counter[str] = Counter()
            for at in range(0, len(works), AT_ONCE):
                doing.queue_what_is_missing(works[at : at + AT_ONCE])
            rows = [
                {"study": study, "cell": one.cell, "probe": one.probe, "key": one.key, "job": doing.job[one.key]} for one in works
            ]
            for key, how in doing.how.items():
                mine = how == "found" and key in had
                counts["kept" if mine else "shared" if how == "found" else how] += 1
            connection.execute(sa.delete(study_works).where(study_works.c.study == study))
            if rows:
                connection.execute(sa.insert(study_works), rows)
            for some in chunks(row["job"] for row in rows):
                mine = sa.update(jobs).where(jobs.c.id.in_(some), jobs.c.study_id.is_(None))
                connection.execute(mine.values(study_id=study))
            return study, counts

        study, counts = self._database.write(work, graph=True)
        return Started(study=self.study(study), **{kind: counts[kind] for kind in ("created", "retried", "shared", "kept")})

    def study(self, study: int) -> Study:
        """Raises StudyNotFound."""
        found = self._studies(studies.c.id == study if 0 < study < 2**63 else sa.false(), limit=1)
        if not found:
            raise StudyNotFound(study)
        return found[0]

    def studies(self, *, name: str | None = None, before_id: int | None = None, limit: int = 50) -> list[Study]:
        """Newest first."""
        wanted = [studies.c.name == name] if name is not None else []
        if before_id is not None:
            wanted.append(studies.c.id < min(before_id, 2**63 - 1))
        return self._studies(sa.and_(sa.true(), *wanted), limit=limit)

    def cancel(self, study: int) -> Study:
        """Cancels the unfinished jobs of a study, but for those that another study, not cancelled, needs too.

        Starting it again goes on where it was. Raises StudyNotFound.
        """
        self.study(study)
        mark = sa.update(studies).where(studies.c.id == study).values(cancelled_at=self._database.now())
        self._database.write(lambda connection: connection.execute(mark))
        others = (
            sa.select(ROOT)
            .join(study_works, study_works.c.job == jobs.c.id)
            .join(studies, studies.c.id == study_works.c.study)
            .where(studies.c.id != study, studies.c.cancelled_at.is_(None))
        )
        with self._database.reading() as connection:
            wanted = set(connection.scalars(others))
            mine = [job for _, job in self._jobs(connection, study) if not job.ended and job.origin not in wanted]
        for job in sorted(mine, key=lambda one: -one.id):  # what waits first, so that nothing is blocked on the way
            with suppress(IllegalTransition):  # it ended meanwhile
                self._queue.cancel(job.id)
        return self.study(study)

    def works(self, study: int, *, found: bool = True, curve: str | None = None) -> list[WorkDone]:
        """Each piece of the study's work with its job and, with `found`, its run, that curve of it and all measurements.

        Raises StudyNotFound.
        """
        self.study(study)
        with self._database.reading() as connection:
            done = self._jobs(connection, study)
            origins = sorted({job.origin for _, job in done})
            seconds = self._seconds(connection, origins)
            run_of = self._runs(connection, origins) if found else {}
            numbers = sorted(run.id for run in run_of.values())
            rows = self._measurements(connection, numbers)
            points = {} if curve is None else self._curves(connection, numbers, curve)
        answers: list[WorkDone] = []
        for row, job in done:
            run = run_of.get(job.origin)
            number = 0 if run is None else run.id
            answers.append(
                WorkDone(
                    cell=row.cell,
                    probe=row.probe,
                    key=row.key,
                    job=job,
                    seconds=seconds.get(job.origin, 0.0),
                    run=run,
                    curve=points.get(number, []),
                    measurements=rows.get(number, []),
                )
            )
        return answers

    def _studies(self, wanted: sa.ColumnElement[bool], *, limit: int) -> list[Study]:
        query = sa.select(studies).where(wanted).order_by(studies.c.id.desc()).limit(limit)
        with self._database.reading() as connection:
            rows = connection.execute(query).all()
            counts = {row.id: self._counts(connection, row.id) for row in rows}
        columns = [column.name for column in studies.c if column.name != "digest"]
        return [Study(**{name: getattr(row, name) for name in columns}, jobs=counts[row.id]) for row in rows]

    def _jobs(self, connection: sa.Connection, study: int) -> list[tuple[Any, Job]]:
        """Rows of the study's work with the newest job of each chain, in the order of the jobs."""
        named = jobs.alias("named")
        root = sa.func.coalesce(named.c.origin, named.c.id)
        query = (
            sa.select(study_works.c.cell, study_works.c.probe, study_works.c.key, root.label("root"))
            .join(named, named.c.id == study_works.c.job)
            .where(study_works.c.study == study)
            .order_by(named.c.id, study_works.c.cell, study_works.c.probe)
        )
        rows = connection.execute(query).all()
        newest = self._newest(connection, {row.root for row in rows})
        return [(row, newest[row.root]) for row in rows]

    def _counts(self, connection: sa.Connection, study: int) -> dict[str, int]:
        """State to number of jobs, without reading whole rows: somebody may ask every second."""
        named = jobs.alias("named")
        its = sa.select(sa.func.coalesce(named.c.origin, named.c.id)).join(study_works, study_works.c.job == named.c.id)
        states: dict[int, str] = {}
        for some in chunks(set(connection.scalars(its.where(study_works.c.study == study)))):
            members = sa.select(ROOT.label("root"), jobs.c.state).where(sa.or_(jobs.c.id.in_(some), jobs.c.origin.in_(some)))
            states |= {row.root: row.state for row in connection.execute(members.order_by(jobs.c.id))}
        return dict(Counter(states.values()))

    def _newest(self, connection: sa.Connection, roots: Iterable[int]) -> dict[int, Job]:
        found: dict[int, Job] = {}
        for some in chunks(sorted(set(roots))):
            members = sa.select(jobs).where(sa.or_(jobs.c.id.in_(some), jobs.c.origin.in_(some))).order_by(jobs.c.id)
            for row in connection.execute(members):
                job = job_from(row)
                found[job.origin] = job
        return found

    def _by_key(self, connection: sa.Connection, keys: Sequence[str]) -> dict[str, list[Job]]:
        """Jobs that do or did the work of each key, the newest of every chain."""
        roots: dict[str, set[int]] = defaultdict(set)
        for some in chunks(sorted(set(keys))):
            query = (
                sa.select(study_works.c.key, ROOT.label("root"))
                .join(jobs, jobs.c.id == study_works.c.job)
                .where(study_works.c.key.in_(some))
            )
            for row in connection.execute(query):
                roots[row.key].add(row.root)
        newest = self._newest(connection, {root for some in roots.values() for root in some})
        return {key: [newest[root] for root in some] for key, some in roots.items()}

    def _seconds(self, connection: sa.Connection, origins: Sequence[int]) -> dict[int, float]:
        found: dict[int, float] = {}
        for some in chunks(origins):
            query = (
                sa.select(ROOT.label("root"), sa.func.sum(attempts.c.finished_at - attempts.c.started_at).label("seconds"))
                .join(attempts, attempts.c.job == jobs.c.id)
                .where(sa.or_(jobs.c.id.in_(some), jobs.c.origin.in_(some)), attempts.c.finished_at.is_not(None))
                .group_by(ROOT)
            )
            found |= {row.root: float(row.seconds) for row in connection.execute(query)}
        return found

    def _runs(self, connection: sa.Connection, origins: Sequence[int]) -> dict[int, Run]:
        """The run of each chain: trainings and probes have one, whose key is empty."""
        found: dict[int, Run] = {}
        for some in chunks(origins):
            for run in self._records.select_runs(connection, sa.and_(runs.c.origin.in_(some), runs.c.key == "")):
                found[run.origin] = run
        return found

    def _measurements(self, connection: sa.Connection, numbers: Sequence[int]) -> dict[int, list[Measurement]]:
        found: dict[int, list[Measurement]] = defaultdict(list)
        for some in chunks(numbers):
            query = sa.select(measurements).where(measurements.c.run.in_(some))
            query = query.order_by(measurements.c.run, measurements.c.instrument, measurements.c.position)
            for row in connection.execute(query):
                found[row.run].append(
                    Measurement(row.instrument, json.loads(row.position), row.value, row.low, row.high, row.run)
                )
        return found

    def _curves(self, connection: sa.Connection, numbers: Sequence[int], name: str) -> dict[int, list[CurvePoint]]:
        found: dict[int, list[CurvePoint]] = defaultdict(list)
        for some in chunks(numbers):
            query = sa.select(curves).where(curves.c.run.in_(some), curves.c.name == name).order_by(curves.c.run, curves.c.step)
            for row in connection.execute(query):
                found[row.run].append(CurvePoint(row.step, row.name, row.value))
        return found
