"""What only a real database can show: its own clock, its plans with many ended jobs, and a worker that stops in mid-write."""

from __future__ import annotations

import threading
import time
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy import event

from services.registry import Fence, JobState, LeaseLost, Registry, Run, RunState, migrate
from services.registry.engine import Database
from services.registry.tables import jobs
from tests.integration.registries import ROOM, submission


def test_times_are_the_databases(registry_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process whose clock is five minutes off writes the same times as any other."""
    migrate(registry_url)
    right = time.time()
    monkeypatch.setattr(time, "time", lambda: right + 300.0)
    with Registry.open(registry_url) as registry:
        assert abs(registry.ping() - right) < 60.0
        registry.queue.submit(submission(time_limit_s=10.0))
        job = registry.queue.claim("d", **ROOM, lease_s=90.0)
        assert job is not None
        assert job.started_at is not None
        assert job.lease_until == pytest.approx(job.started_at + 90.0, abs=0.1)
        assert job.deadline_at == pytest.approx(job.started_at + 10.0, abs=0.1)
        assert abs(job.created_at - right) < 60.0
        done = registry.queue.succeed(job.fence)
        assert done.finished_at is not None
        assert job.created_at <= job.started_at <= done.finished_at


def test_a_lease_runs_out_by_the_databases_clock(registry_url: str) -> None:
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit(submission())
        job = registry.queue.claim("d", **ROOM, lease_s=0.3)
        assert job is not None
        registry.queue.beat(job.fence, lease_s=0.3)
        time.sleep(0.5)
        with pytest.raises(LeaseLost, match="run out"):
            registry.queue.succeed(job.fence)
        assert [(one.id, one.losses) for one in registry.queue.rescue()] == [(job.id, 1)]


@pytest.mark.parametrize(
    ("ask", "index"),
    [
        (lambda queue: queue.claim("d", **ROOM), "ix_jobs_claimable"),
        (lambda queue: queue.waiting(), "ix_jobs_claimable"),
        (lambda queue: queue.live(), "ix_jobs_leases"),
        (lambda queue: queue.overdue(10.0), "ix_jobs_leases"),
        (lambda queue: queue.rescue(), "ix_jobs_leases"),
    ],
    ids=["claim", "waiting", "live", "overdue", "rescue"],
)
def test_what_a_dispatcher_asks_all_the_time_does_not_see_what_has_ended(registry_url: str, ask: Any, index: str) -> None:
    """By the plan of the statement itself: only a small index of living jobs is walked."""
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit_many([submission(priority=at % 7) for at in range(2000)])
        database = registry._database
        end = sa.update(jobs).where(jobs.c.id % 40 > 0).values(state="succeeded", finished_at=database.now())
        database.write(lambda connection: connection.execute(end))
        registry.queue.claim("d", **ROOM)
        statements: list[tuple[str, Any]] = []

        def note(_connection: object, _cursor: object, statement: str, parameters: Any, *_: object) -> None:
            statements.append((statement, parameters))

        event.listen(database.engine, "before_cursor_execute", note)
        ask(registry.queue)
        event.remove(database.engine, "before_cursor_execute", note)
        asked, parameters = next((text, values) for text, values in statements if "jobs" in text)
        if not database.sqlite:
            database.write(lambda connection: connection.execute(sa.text("ANALYZE jobs")))
        with database.reading() as connection:
            how = "EXPLAIN QUERY PLAN " if database.sqlite else "EXPLAIN "
            plan = " ".join(str(row) for row in connection.exec_driver_sql(how + asked, parameters))
    assert index in plan
    assert "Seq Scan" not in plan
    assert "TEMP B-TREE" not in plan
    if "UPDATE jobs" in asked:
        assert "Sort" not in plan
        assert ("FOR UPDATE SKIP LOCKED" in asked) is not database.sqlite


@pytest.mark.postgres
def test_a_claim_passes_by_a_row_that_another_holds(fresh_postgres: str) -> None:
    migrate(fresh_postgres)
    with Registry.open(fresh_postgres) as registry, psycopg.connect(fresh_postgres) as other:
        registry.queue.submit_many([submission(), submission()])
        other.execute("SELECT id FROM jobs WHERE id = 1 FOR UPDATE")
        job = registry.queue.claim("d", **ROOM)
        assert job is not None
        assert job.id == 2
        assert registry.queue.claim("d", **ROOM) is None


def test_a_rescue_waits_for_a_write_under_way_and_the_other_way_round(registry_url: str) -> None:
    """A fenced write that has begun is kept whole before the job can move on; one that comes after is refused."""
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit(submission())
        job = registry.queue.claim("d", **ROOM)
        assert job is not None
        inside, go_on = threading.Event(), threading.Event()
        hold = registry.queue.hold

        def slow_hold(connection: sa.Connection, fence: Fence) -> None:
            hold(connection, fence)
            inside.set()
            assert go_on.wait(10)

        registry.queue.hold = slow_hold  # type: ignore[method-assign]
        writer = threading.Thread(target=registry.queue.log, args=(job.fence, "under way"))
        writer.start()
        assert inside.wait(10)
        lost: list[JobState] = []
        loser = threading.Thread(target=lambda: lost.append(registry.queue.lose(job.fence, "gone").state))
        loser.start()
        time.sleep(0.3)
        assert lost == []
        go_on.set()
        writer.join(10)
        loser.join(10)
        assert lost == [JobState.QUEUED]
        assert [chunk.text for chunk in registry.queue.logs(job.id)] == ["under way"]
        with pytest.raises(LeaseLost):
            registry.queue.log(job.fence, "late")


@pytest.mark.postgres
def test_a_run_that_is_being_opened_when_its_job_ends_is_closed_with_it(fresh_postgres: str) -> None:
    """The end waits for the opening, which its own statement's view of the database does not have yet."""
    migrate(fresh_postgres)
    with Registry.open(fresh_postgres) as registry, psycopg.connect(fresh_postgres, autocommit=True) as watcher:
        registry.queue.submit(submission(loss_budget=0))
        job = registry.queue.claim("d", **ROOM)
        assert job is not None
        opened, go_on = threading.Event(), threading.Event()
        read = registry.records._run

        def slow_read(connection: sa.Connection, run: int) -> Run:
            opened.set()  # the last thing that open_run does is to read what it wrote
            assert go_on.wait(20)
            return read(connection, run)

        registry.records._run = slow_read  # type: ignore[method-assign]
        opener = threading.Thread(target=lambda: registry.records.open_run(job.fence, kind="train", spec={}))
        opener.start()
        assert opened.wait(10)
        loser = threading.Thread(target=registry.queue.lose, args=(job.fence, "gone"))
        loser.start()
        waits = "SELECT count(*) FROM pg_locks WHERE NOT granted"
        while watcher.execute(waits).fetchone() != (1,):
            assert loser.is_alive()
            time.sleep(0.02)
        go_on.set()
        opener.join(10)
        loser.join(10)
        registry.records._run = read  # type: ignore[method-assign]
        ended = registry.queue.job(job.id)
        assert ended.state is JobState.FAILED
        assert [(run.state, run.finished_at) for run in registry.records.runs()] == [(RunState.FAILED, ended.finished_at)]


@pytest.mark.postgres
def test_a_process_that_stops_in_mid_write_is_cut_off(fresh_postgres: str) -> None:
    """Its row lock would keep the job from being rescued; PostgreSQL ends a transaction in which nothing happens."""
    migrate(fresh_postgres)
    database = Database(fresh_postgres)
    with database.reading() as connection:
        assert connection.scalar(sa.text("SHOW idle_in_transaction_session_timeout")) == "30s"
    database.close()


def test_threads_share_a_registry(registry_url: str) -> None:
    """A worker's heartbeat and its training write at the same time."""
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit(submission())
        job = registry.queue.claim("d", **ROOM)
        assert job is not None
        errors: list[BaseException] = []

        def guarded(work: object) -> None:
            assert callable(work)
            try:
                for at in range(30):
                    work(at)
            except BaseException as error:
                errors.append(error)

        works = [
            lambda at: registry.queue.beat(job.fence, progress={"step": at}),
            lambda at: registry.queue.log(job.fence, f"a{at}\n"),
            lambda at: registry.queue.log(job.fence, f"b{at}\n"),
            lambda at: registry.records.open_run(job.fence, key=str(at % 3), kind="train", spec={}),
        ]
        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        lines = [chunk.text for chunk in registry.queue.logs(job.id)]
        assert [line for line in lines if line[0] == "a"] == [f"a{at}\n" for at in range(30)]
        assert len(lines) == 60
        assert len(registry.records.runs(job.id)) == 3
