"""One suite for the registry on SQLite, on PostgreSQL and in memory: what holds on one holds on all."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from services.registry import (
    AttemptOutcome,
    CurvePoint,
    Fence,
    IllegalTransition,
    Job,
    JobNotFound,
    JobState,
    KeyConflict,
    LeaseLost,
    Measurement,
    MemoryRegistry,
    Registry,
    RunNotFound,
    RunState,
    migrate,
)
from tests.integration.registries import ROOM, AnyRegistry, Clock, empty, submission

CLOCK = Clock()  # of all registries here, set back before each test


@pytest.fixture
def clock() -> Clock:
    CLOCK.__init__()
    return CLOCK


@pytest.fixture(scope="module")
def sqlite_registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Registry]:
    yield from opened(f"sqlite:///{tmp_path_factory.mktemp('registry') / 'registry.db'}")


@pytest.fixture(scope="module")
def postgresql_registry(postgres_server: str) -> Iterator[Registry]:
    base, _, _ = postgres_server.rpartition("/")
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("CREATE DATABASE conformance")
    yield from opened(f"{base}/conformance")
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute("DROP DATABASE conformance WITH (FORCE)")


def opened(url: str) -> Iterator[Registry]:
    migrate(url)
    with Registry.open(url, now=CLOCK) as registry:
        yield registry


@pytest.fixture(params=["memory", "sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def registry(request: pytest.FixtureRequest, clock: Clock) -> AnyRegistry:
    if request.param == "memory":
        return MemoryRegistry(now=clock)
    kept: Registry = request.getfixturevalue(f"{request.param}_registry")
    empty(kept)
    return kept


def submit(registry: AnyRegistry, **values: Any) -> Job:
    return registry.queue.submit(submission(**values)).job


def claim(registry: AnyRegistry, **values: Any) -> Job:
    job = registry.queue.claim("d", **(ROOM | values))
    assert job is not None
    return job


def claim_number(registry: AnyRegistry, **values: Any) -> int | None:
    job = registry.queue.claim("d", **(ROOM | values))
    return None if job is None else job.id


# Order and room


def test_highest_priority_first_then_oldest(registry: AnyRegistry) -> None:
    for priority in (0, 5, 0, 5, -1):
        submit(registry, priority=priority)
    assert [claim_number(registry) for _ in range(6)] == [2, 4, 1, 3, 5, None]


def test_a_claim_takes_the_best_that_fits(registry: AnyRegistry) -> None:
    submit(registry, gpus=1.0, priority=9)
    submit(registry, cpus=4.0)
    submit(registry, memory_gb=16.0)
    submit(registry, cpus=2.0)
    assert claim_number(registry, cpus=2.0, gpus=0.0, memory_gb=1.0) == 4
    assert claim_number(registry, cpus=2.0, gpus=0.0, memory_gb=1.0) is None
    assert [job.id for job in registry.queue.waiting()] == [1, 2, 3]
    assert claim_number(registry, cpus=1.0, gpus=1.0, memory_gb=0.0) == 1


def test_a_claim_can_ask_for_kinds(registry: AnyRegistry) -> None:
    submit(registry, kind="tune")
    submit(registry, kind="probe")
    assert claim_number(registry, kinds=("train",)) is None
    assert claim_number(registry, kinds=("train", "probe")) == 2


def test_a_claim_can_choose_from_some_jobs_only(registry: AnyRegistry) -> None:
    for cpus, priority in ((1, 0), (1, 5), (4, 9), (1, 7)):
        registry.queue.submit(submission(cpus=cpus, priority=priority))
    assert claim_number(registry, among=[]) is None
    assert claim_number(registry, among=[1, 2, 3], cpus=1.0) == 2
    assert claim_number(registry, among=[2], kinds=("train",)) is None
    assert claim_number(registry, among=[1, 4], kinds=("probe",)) is None
    assert claim_number(registry) == 3


def test_a_delayed_job_waits_for_its_time(registry: AnyRegistry, clock: Clock) -> None:
    job = submit(registry, delay_s=60.0)
    assert job.run_after == clock.at + 60
    clock.pass_s(59)
    assert claim_number(registry) is None
    assert registry.queue.waiting() == []
    clock.pass_s(1)
    assert claim_number(registry) == job.id


def test_a_claimed_job_says_who_has_it_until_when(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, time_limit_s=50.0)
    job = claim(registry, lease_s=30.0)
    assert (job.state, job.attempt, job.dispatcher, job.started_at) == (JobState.RUNNING, 1, "d", clock.at)
    assert (job.lease_until, job.deadline_at) == (clock.at + 30, clock.at + 50)
    assert registry.queue.job(job.id) == job
    clock.pass_s(7)
    begun = registry.queue.begin(job.fence, "node-a", 4711)
    assert (begun.node, begun.deadline_at, begun.lease_until) == ("node-a", clock.at + 50, job.lease_until)
    (attempt,) = registry.queue.attempts(job.id)
    assert (attempt.node, attempt.pid, attempt.dispatcher, attempt.outcome) == ("node-a", 4711, "d", None)
    assert attempt.started_at == job.started_at


def test_what_was_submitted_comes_back(registry: AnyRegistry, clock: Clock) -> None:
    asked = submission(
        kind="probe", name="näme", priority=3, user="ada", key="k", cpus=2, gpus=0.5, memory_gb=4, error_budget=2,
        loss_budget=7, time_limit_s=9.0, provenance={"commit": "abc"}, study_id=4,
        spec={"b": [1, 2.5, None, "ü"], "a": {"c": True}},
    )  # fmt: skip
    job = registry.queue.submit(asked).job
    assert registry.queue.job(job.id) == job
    assert job == Job(
        id=1, kind="probe", name="näme", state=JobState.QUEUED, spec={"b": [1, 2.5, None, "ü"], "a": {"c": True}}, digest="d1",
        priority=3, user="ada", key="k", cpus=2.0, gpus=0.5, memory_gb=4.0, attempt=0, errors=0, losses=0, error_budget=2,
        loss_budget=7, unmet=0, reason=None, progress=None, result=None, error=None, created_at=clock.at, run_after=clock.at,
        started_at=None, finished_at=None, lease_until=None, deadline_at=None, time_limit_s=9.0, cancel_requested_at=None,
        origin=1, retry_of=None, dispatcher=None, node=None, provenance={"commit": "abc"}, study_id=4,
    )  # fmt: skip
    assert list(job.spec) == ["b", "a"]
    assert (type(job.cpus), type(job.memory_gb)) == (float, float)


# Unique keys


def test_one_unfinished_job_a_key(registry: AnyRegistry) -> None:
    first = registry.queue.submit(submission(key="a"))
    again = registry.queue.submit(submission(key="a", priority=9))
    assert (first.created, again.created) == (True, False)
    assert again.job == first.job
    with pytest.raises(KeyConflict, match="job 1"):
        submit(registry, key="a", digest="d2")
    assert submit(registry, key="b", digest="d2").id == 2
    assert len(registry.queue.jobs()) == 2


def test_a_key_is_free_again_when_its_job_ended(registry: AnyRegistry) -> None:
    submit(registry, key="a")
    registry.queue.succeed(claim(registry).fence)
    other = registry.queue.submit(submission(key="a", digest="d2"))
    assert other.created
    assert other.job.id == 2


def test_a_retry_needs_its_key(registry: AnyRegistry) -> None:
    old = submit(registry, key="a")
    registry.queue.cancel(old.id)
    holder = submit(registry, key="a", digest="d2")
    with pytest.raises(KeyConflict, match=f"job {holder.id}"):
        registry.queue.retry(old.id)
    registry.queue.cancel(holder.id)
    assert registry.queue.retry(old.id).key == "a"


def test_a_batch_is_all_or_nothing_and_in_order(registry: AnyRegistry) -> None:
    submit(registry, key="a")
    batch = [submission(name=str(at), key="a" if at == 3 else "b" if at in (5, 7) else None) for at in range(9)]
    answers = registry.queue.submit_many(batch)
    assert [answer.created for answer in answers] == [True, True, True, False, True, True, True, False, True]
    assert [answer.job.name for answer in answers] == ["0", "1", "2", None, "4", "5", "6", "5", "8"]
    assert [answer.job.id for answer in answers] == [2, 3, 4, 1, 5, 6, 7, 6, 8]
    with pytest.raises(KeyConflict):
        registry.queue.submit_many([submission(), submission(key="a", digest="d2")])
    with pytest.raises(JobNotFound):
        registry.queue.submit_many([submission(), submission(needs=(99,))])
    with pytest.raises(ValueError, match="twice"):
        registry.queue.submit_many([submission(key="c"), submission(key="c", digest="d2")])
    assert len(registry.queue.jobs()) == 8
    assert registry.queue.submit_many([]) == []


def test_many_at_once_keep_their_order(registry: AnyRegistry) -> None:
    answers = registry.queue.submit_many([submission(name=str(at)) for at in range(2500)])
    assert [(answer.job.id, answer.job.name) for answer in answers] == [(at + 1, str(at)) for at in range(2500)]


# Who waits for whom


def test_a_job_waits_for_all_it_needs(registry: AnyRegistry) -> None:
    a, b = submit(registry), submit(registry)
    c = submit(registry, needs=(b.id, a.id, a.id), priority=9)
    assert (c.unmet, registry.queue.needs(c.id)) == (2, (a.id, b.id))
    first, second = claim(registry), claim(registry)
    assert (first.id, second.id, claim_number(registry)) == (a.id, b.id, None)
    registry.queue.succeed(second.fence)
    assert (registry.queue.job(c.id).unmet, claim_number(registry)) == (1, None)
    registry.queue.succeed(first.fence)
    assert registry.queue.job(c.id).unmet == 0
    assert claim_number(registry) == c.id
    assert submit(registry, needs=(a.id,)).unmet == 0


def test_a_failed_job_blocks_those_behind_it_by_name(registry: AnyRegistry) -> None:
    a = submit(registry)
    b = submit(registry, needs=(a.id,))
    c = submit(registry, needs=(b.id,))
    registry.queue.fail(claim(registry).fence, "boom")
    b, c = registry.queue.job(b.id), registry.queue.job(c.id)
    assert (b.state, c.state) == (JobState.BLOCKED, JobState.BLOCKED)
    assert b.reason == "needs job 1, which failed; retry job 1 or cancel this one"
    assert c.reason == "needs job 2, which is itself blocked; retry job 2 or cancel this one"
    assert claim_number(registry) is None
    late = submit(registry, needs=(a.id,))
    assert (late.state, late.unmet) == (JobState.BLOCKED, 1)


def test_a_retry_takes_over_those_that_waited(registry: AnyRegistry) -> None:
    a = submit(registry, priority=4, user="ada", cpus=2.0)
    b = submit(registry, needs=(a.id,))
    c = submit(registry, needs=(b.id,))
    registry.queue.fail(claim(registry).fence, "boom")
    again = registry.queue.retry(a.id)
    assert (again.id, again.retry_of, again.origin, again.attempt, again.errors) == (4, a.id, a.id, 0, 0)
    assert (again.priority, again.user, again.cpus, again.spec, again.error) == (4, "ada", 2.0, a.spec, None)
    assert [registry.queue.job(number).state for number in (b.id, c.id)] == [JobState.QUEUED, JobState.QUEUED]
    assert registry.queue.job(b.id).reason is None
    assert registry.queue.needs(b.id) == (again.id,)
    registry.queue.succeed(claim(registry).fence)
    assert claim_number(registry) == b.id
    assert registry.queue.job(a.id).state is JobState.FAILED


def test_a_retry_of_a_retry_stays_in_the_chain(registry: AnyRegistry) -> None:
    a = submit(registry)
    for _ in range(2):
        registry.queue.cancel(registry.queue.jobs(limit=1)[0].id)
        registry.queue.retry(registry.queue.jobs(limit=1)[0].id)
    third = registry.queue.jobs(limit=1)[0]
    assert (third.id, third.retry_of, third.origin) == (3, 2, a.id)
    with pytest.raises(IllegalTransition, match="retried as job 3"):
        registry.queue.retry(a.id)
    waits = submit(registry, needs=(a.id,))
    assert registry.queue.needs(waits.id) == (3,)
    assert waits.state is JobState.QUEUED


def test_two_bad_needs_block_until_both_are_retried(registry: AnyRegistry) -> None:
    a, b = submit(registry), submit(registry)
    c = submit(registry, needs=(a.id, b.id))
    registry.queue.cancel(b.id)
    assert registry.queue.job(c.id).reason == "needs job 2, which was cancelled; retry job 2 or cancel this one"
    registry.queue.cancel(a.id)
    assert registry.queue.job(c.id).reason == "needs job 1, which was cancelled; retry job 1 or cancel this one"
    registry.queue.retry(a.id)
    assert registry.queue.job(c.id).state is JobState.BLOCKED
    registry.queue.retry(b.id)
    c = registry.queue.job(c.id)
    assert (c.state, c.reason, c.unmet) == (JobState.QUEUED, None, 2)


def test_a_cancelled_dependant_is_left_alone(registry: AnyRegistry) -> None:
    a = submit(registry)
    b = submit(registry, needs=(a.id,))
    c = submit(registry, needs=(b.id,))
    cancelled = registry.queue.cancel(b.id)
    assert registry.queue.job(c.id).state is JobState.BLOCKED
    registry.queue.fail(claim(registry).fence, "boom")
    registry.queue.retry(a.id)
    assert registry.queue.job(b.id) == cancelled
    again = registry.queue.retry(b.id)
    assert registry.queue.needs(again.id) == (4,)
    assert registry.queue.job(c.id).state is JobState.QUEUED


def test_hundreds_behind_one_job(registry: AnyRegistry) -> None:
    a = submit(registry)
    registry.queue.submit_many([submission(needs=(a.id,)) for _ in range(700)])
    registry.queue.fail(claim(registry).fence, "boom")
    assert registry.queue.counts()[JobState.BLOCKED] == 700
    registry.queue.retry(a.id)
    assert registry.queue.counts()[JobState.BLOCKED] == 0
    registry.queue.succeed(claim(registry).fence)
    assert len(registry.queue.waiting(1000)) == 700


def test_an_unknown_need_is_refused(registry: AnyRegistry) -> None:
    for number in (7, 0, -1, 2**63, 2**70):
        with pytest.raises(JobNotFound, match=str(number)):
            submit(registry, needs=(number,))
    assert registry.queue.jobs() == []


# Leases and fences

WRITES: dict[str, Callable[[AnyRegistry, Fence, int], object]] = {
    "begin": lambda registry, fence, run: registry.queue.begin(fence, "n", 1),
    "beat": lambda registry, fence, run: registry.queue.beat(fence, progress={"step": 9}),
    "succeed": lambda registry, fence, run: registry.queue.succeed(fence, {"x": 1}),
    "fail": lambda registry, fence, run: registry.queue.fail(fence, "boom"),
    "cancelled": lambda registry, fence, run: registry.queue.cancelled(fence),
    "log": lambda registry, fence, run: registry.queue.log(fence, "late"),
    "open_run": lambda registry, fence, run: registry.records.open_run(fence, key="late", kind="train", spec={}),
    "set_mlflow": lambda registry, fence, run: registry.records.set_mlflow(fence, run, "late"),
    "mark_mlflow": lambda registry, fence, run: registry.records.mark_mlflow(fence, run, 9),
    "add_points": lambda registry, fence, run: registry.records.add_points(fence, run, [CurvePoint(9, "loss", 1.0)]),
    "add_checkpoint": lambda registry, fence, run: registry.records.add_checkpoint(fence, run, 9, "late", "x"),
    "forget_checkpoints": lambda registry, fence, run: registry.records.forget_checkpoints(fence, run, keep=0),
    "measure": lambda registry, fence, run: registry.records.measure(fence, run, [Measurement("late", {}, 1.0)]),
    "finish_run": lambda registry, fence, run: registry.records.finish_run(fence, run, "finished", {"late": 1}),
}


def everything(registry: AnyRegistry, job: int, run: int) -> list[object]:
    return [
        *(registry.queue.job(job), registry.queue.attempts(job), registry.queue.logs(job), registry.records.runs(job)),
        *(registry.records.curve(run), registry.records.checkpoints(run), registry.records.measurements(run)),
    ]


@pytest.fixture
def working(registry: AnyRegistry) -> tuple[Job, int]:
    """A running job with a run that has something of everything; its lease is 30 s."""
    submit(registry, error_budget=5)
    job = claim(registry, lease_s=30.0)
    run = registry.records.open_run(job.fence, kind="train", spec={})
    registry.queue.log(job.fence, "hello")
    registry.records.add_points(job.fence, run.id, [CurvePoint(1, "loss", 2.0)])
    registry.records.add_checkpoint(job.fence, run.id, 1, "/c/1", "aa")
    registry.records.measure(job.fence, run.id, [Measurement("tau", {"i": 1}, 3.0)])
    return job, run.id


@pytest.mark.parametrize("write", WRITES)
def test_every_write_is_kept_under_a_live_lease(registry: AnyRegistry, working: tuple[Job, int], write: str) -> None:
    job, run = working
    before = everything(registry, job.id, run)
    WRITES[write](registry, job.fence, run)
    assert everything(registry, job.id, run) != before


@pytest.mark.parametrize("write", WRITES)
def test_no_write_is_kept_once_the_lease_is_gone(
    registry: AnyRegistry, clock: Clock, working: tuple[Job, int], write: str
) -> None:
    job, run = working
    clock.pass_s(30)
    stages: list[tuple[str, Callable[[], object]]] = [
        ("the lease has run out", lambda: None),
        ("it is queued", registry.queue.rescue),
        ("attempt 2 runs", lambda: claim(registry)),
        ("it is succeeded", lambda: registry.queue.succeed(Fence(job.id, 2))),
    ]
    for found, reach in stages:
        reach()
        before = everything(registry, job.id, run)
        with pytest.raises(LeaseLost, match=found):
            WRITES[write](registry, job.fence, run)
        assert everything(registry, job.id, run) == before
    with pytest.raises(LeaseLost, match="no such job"):
        WRITES[write](registry, Fence(77, 1), run)


def test_a_heartbeat_holds_the_lease(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    job = claim(registry, lease_s=30.0)
    for _ in range(5):
        clock.pass_s(29)
        assert registry.queue.beat(job.fence, lease_s=30.0).lease_until == clock.at + 30
        assert registry.queue.rescue() == []
    registry.queue.beat(job.fence, lease_s=30.0, progress={"step": 3, "loss": math.nan})
    registry.queue.beat(job.fence, lease_s=30.0)
    assert registry.queue.job(job.id).progress == {"step": 3, "loss": None}


def test_a_heartbeat_tells_of_cancel_and_time_limit(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, time_limit_s=40.0)
    job = claim(registry)
    clock.pass_s(39)
    beat = registry.queue.beat(job.fence)
    assert (beat.cancel_requested, beat.deadline_passed) == (False, False)
    clock.pass_s(1)
    registry.queue.cancel(job.id)
    beat = registry.queue.beat(job.fence)
    assert (beat.cancel_requested, beat.deadline_passed) == (True, True)


def test_an_attempt_begins_in_one_process(registry: AnyRegistry) -> None:
    submit(registry)
    job = claim(registry)
    registry.queue.begin(job.fence, "a", 1)
    registry.queue.begin(job.fence, "a", 1)
    for node, pid in (("a", 2), ("b", 1)):
        with pytest.raises(LeaseLost, match="another process"):
            registry.queue.begin(job.fence, node, pid)
    assert registry.queue.job(job.id).node == "a"


def test_overdue_after_the_grace_only(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, time_limit_s=10.0)
    submit(registry)
    submit(registry)
    for _ in range(3):
        claim(registry)
    registry.queue.cancel(2)
    clock.pass_s(9)
    assert registry.queue.overdue(10.0) == []
    clock.pass_s(1)
    assert [job.id for job in registry.queue.overdue(10.0)] == [2]
    clock.pass_s(10)
    assert [job.id for job in registry.queue.overdue(10.0)] == [1, 2]


# Ends and tries


def test_success_keeps_the_result(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    job = claim(registry)
    clock.pass_s(5)
    done = registry.queue.succeed(job.fence, {"loss": 0.5, "bad": math.inf})
    assert (done.state, done.result, done.finished_at) == (JobState.SUCCEEDED, {"loss": 0.5, "bad": None}, clock.at)
    assert (done.lease_until, done.deadline_at, done.reason, done.error) == (None, None, None, None)
    (attempt,) = registry.queue.attempts(job.id)
    assert (attempt.outcome, attempt.finished_at) == (AttemptOutcome.SUCCEEDED, clock.at)


def test_errors_are_tried_again_after_growing_pauses(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, error_budget=2, loss_budget=0)
    for number, pause in ((1, 5.0), (2, 10.0)):
        job = claim(registry)
        after = registry.queue.fail(job.fence, f"Traceback ...\nValueError: no {number}\n")
        assert (after.state, after.errors, after.run_after) == (JobState.QUEUED, number, clock.at + pause)
        assert (after.error, after.lease_until) == (None, None)
        assert after.reason == f"attempt {number} failed: ValueError: no {number}; it is tried again"
        clock.pass_s(pause - 1)
        assert claim_number(registry) is None
        clock.pass_s(1)
    after = registry.queue.fail(claim(registry).fence, "ValueError: no 3")
    assert (after.state, after.errors, after.losses, after.error) == (JobState.FAILED, 3, 0, "ValueError: no 3")
    assert after.reason == "attempt 3 failed: ValueError: no 3"
    outcomes = [(attempt.attempt, attempt.outcome, attempt.error) for attempt in registry.queue.attempts(1)]
    assert outcomes == [
        (1, AttemptOutcome.FAILED, "Traceback ...\nValueError: no 1\n"),
        (2, AttemptOutcome.FAILED, "Traceback ...\nValueError: no 2\n"),
        (3, AttemptOutcome.FAILED, "ValueError: no 3"),
    ]


def test_an_error_that_would_come_back_is_not_tried_again(registry: AnyRegistry) -> None:
    submit(registry, error_budget=9)
    assert registry.queue.fail(claim(registry).fence, "no such device", retry=False).state is JobState.FAILED


def test_losses_have_their_own_budget(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, error_budget=0, loss_budget=2)
    for number in (1, 2):
        job = claim(registry)
        after = registry.queue.lose(job.fence, "node b went away")
        assert (after.state, after.losses, after.errors, after.run_after) == (JobState.QUEUED, number, 0, clock.at)
        assert after.reason == f"attempt {number} was lost: node b went away; it is tried again"
    after = registry.queue.lose(claim(registry).fence, "node b went away")
    assert (after.state, after.losses, after.errors, after.error) == (JobState.FAILED, 3, 0, None)
    assert after.reason == "lost 3 times, more than its budget allows; the last time: node b went away"
    assert {attempt.outcome for attempt in registry.queue.attempts(1)} == {AttemptOutcome.LOST}
    with pytest.raises(LeaseLost):
        registry.queue.lose(Fence(1, 3), "again")


def test_an_attempt_that_is_released_costs_nothing(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, error_budget=0, loss_budget=0)
    behind = submit(registry, needs=(1,))
    for number in (1, 2, 3):  # as often as it likes
        job = claim(registry, lease_s=30.0)
        run = registry.records.open_run(job.fence, kind="train", spec={})
        clock.pass_s(40 if number == 3 else 4)  # also when its lease has run out and nobody has noticed yet
        after = registry.queue.release(job.fence, "the cluster is shut down")
        assert (after.state, after.attempt, after.losses, after.errors) == (JobState.QUEUED, number, 0, 0)
        assert (after.lease_until, after.deadline_at, after.finished_at, after.error) == (None, None, None, None)
        assert after.run_after <= clock.at
        assert after.reason == f"attempt {number} ended: the cluster is shut down; it goes on with another"
        assert registry.records.run(run.id) == run
        attempt = registry.queue.attempts(job.id)[-1]
        assert (attempt.outcome, attempt.finished_at) == (AttemptOutcome.RELEASED, clock.at)
        for late in (registry.queue.release, registry.queue.lose, registry.queue.log):
            with pytest.raises(LeaseLost, match="it is queued"):
                late(job.fence, "again")
    assert registry.queue.rescue() == []
    assert registry.queue.job(behind.id).state is JobState.QUEUED
    registry.queue.succeed(claim(registry).fence)
    assert claim_number(registry) == behind.id


def test_one_that_is_released_when_it_was_to_stop_is_cancelled(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    behind = submit(registry, needs=(1,))
    job = claim(registry)
    run = registry.records.open_run(job.fence, kind="train", spec={})
    registry.queue.cancel(job.id)
    clock.pass_s(1)
    after = registry.queue.release(job.fence, "the cluster is shut down")
    assert (after.state, after.finished_at, after.losses) == (JobState.CANCELLED, clock.at, 0)
    assert after.reason == "attempt 1 ended: the cluster is shut down; cancelled as requested"
    assert registry.records.run(run.id).state is RunState.CANCELLED
    assert registry.queue.job(behind.id).state is JobState.BLOCKED


def test_rescue_takes_back_what_is_silent(registry: AnyRegistry, clock: Clock) -> None:
    for _ in range(3):
        submit(registry)
    claim(registry, lease_s=20.0)
    claim(registry, lease_s=10.0)
    claim(registry, lease_s=90.0)
    clock.pass_s(9)
    assert registry.queue.rescue() == []
    clock.pass_s(11)
    assert [(job.id, job.state, job.losses) for job in registry.queue.rescue()] == [
        (2, JobState.QUEUED, 1),
        (1, JobState.QUEUED, 1),
    ]
    assert registry.queue.rescue() == []
    assert [job.id for job in registry.queue.live()] == [3]
    assert claim(registry).attempt == 2


# Cancel


def test_cancel_before_it_begins(registry: AnyRegistry, clock: Clock) -> None:
    job = submit(registry)
    clock.pass_s(3)
    cancelled = registry.queue.cancel(job.id)
    assert (cancelled.state, cancelled.finished_at, cancelled.attempt) == (JobState.CANCELLED, clock.at, 0)
    assert registry.queue.cancel(job.id) == cancelled
    assert claim_number(registry) is None


def test_cancel_of_a_running_job_is_a_request(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    job = claim(registry)
    asked = registry.queue.cancel(job.id)
    assert (asked.state, asked.cancel_requested_at) == (JobState.RUNNING, clock.at)
    clock.pass_s(5)
    assert registry.queue.cancel(job.id) == asked
    registry.queue.log(job.fence, "final checkpoint written")
    done = registry.queue.cancelled(job.fence, {"step": 7})
    assert (done.state, done.result, done.cancel_requested_at) == (JobState.CANCELLED, {"step": 7}, clock.at - 5)
    assert [chunk.text for chunk in registry.queue.logs(job.id)] == ["final checkpoint written"]
    assert registry.queue.attempts(job.id)[0].outcome is AttemptOutcome.CANCELLED


@pytest.mark.parametrize(
    ("end", "state"),
    [
        (lambda queue, fence: queue.succeed(fence, {}), JobState.SUCCEEDED),
        (lambda queue, fence: queue.fail(fence, "boom"), JobState.CANCELLED),
        (lambda queue, fence: queue.fail(fence, "boom", retry=False), JobState.FAILED),
        (lambda queue, fence: queue.lose(fence, "gone"), JobState.CANCELLED),
    ],
    ids=["succeed", "fail with tries left", "fail", "lose"],
)
def test_a_cancel_request_takes_the_place_of_another_try(registry: AnyRegistry, end: Any, state: JobState) -> None:
    submit(registry, error_budget=3)
    job = claim(registry)
    registry.queue.cancel(job.id)
    assert end(registry.queue, job.fence).state is state
    assert claim_number(registry) is None


# Ended states

ENDS: dict[JobState, Callable[[AnyRegistry, Fence], object]] = {
    JobState.SUCCEEDED: lambda registry, fence: registry.queue.succeed(fence, {"x": 1}),
    JobState.FAILED: lambda registry, fence: registry.queue.fail(fence, "boom"),
    JobState.CANCELLED: lambda registry, fence: registry.queue.cancelled(fence),
}


@pytest.mark.parametrize("state", ENDS)
def test_no_ended_state_is_overwritten(registry: AnyRegistry, clock: Clock, state: JobState) -> None:
    job = submit(registry)
    fence = claim(registry).fence
    ENDS[state](registry, fence)
    ended = registry.queue.job(job.id)
    assert (ended.state, ended.ended) == (state, True)
    attempts = registry.queue.attempts(job.id)
    clock.pass_s(1000)
    for write in ENDS.values():
        with pytest.raises(LeaseLost):
            write(registry, fence)
    with pytest.raises(LeaseLost):
        registry.queue.lose(fence, "gone")
    registry.queue.set_reason(job.id, "late")
    assert registry.queue.rescue() == []
    if state is JobState.CANCELLED:
        registry.queue.cancel(job.id)
    else:
        with pytest.raises(IllegalTransition, match=f"it is {state}"):
            registry.queue.cancel(job.id)
    assert registry.queue.job(job.id) == ended
    assert registry.queue.attempts(job.id) == attempts


def test_only_what_ended_without_success_is_retried(registry: AnyRegistry) -> None:
    job = submit(registry)
    with pytest.raises(IllegalTransition, match="it is queued; expected failed or cancelled"):
        registry.queue.retry(job.id)
    fence = claim(registry).fence
    with pytest.raises(IllegalTransition, match="it is running"):
        registry.queue.retry(job.id)
    registry.queue.succeed(fence)
    with pytest.raises(IllegalTransition, match="it is succeeded"):
        registry.queue.retry(job.id)


@pytest.mark.parametrize("number", [0, -4, 99, 2**63 - 1, 2**63, 10**30])
def test_a_number_that_no_job_has(registry: AnyRegistry, number: int) -> None:
    submit(registry)
    for ask in (
        registry.queue.job,
        registry.queue.cancel,
        registry.queue.retry,
        registry.queue.logs,
        registry.queue.attempts,
        registry.queue.needs,
        registry.records.runs,
    ):
        with pytest.raises(JobNotFound, match=f"no job {number};"):
            ask(number)
    with pytest.raises(RunNotFound):
        registry.records.run(number)


# Logs


def test_logs_are_read_on_from_where_one_was(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    submit(registry)
    first, second = claim(registry), claim(registry)
    registry.queue.log(first.fence, "a\n")
    registry.queue.log(second.fence, "other\n")
    clock.pass_s(2)
    registry.queue.log(first.fence, "")
    registry.queue.log(first.fence, "b\n")
    chunks = registry.queue.logs(first.id)
    assert [(chunk.text, chunk.attempt, chunk.at) for chunk in chunks] == [("a\n", 1, clock.at - 2), ("b\n", 1, clock.at)]
    assert registry.queue.logs(first.id, after_seq=chunks[0].seq) == chunks[1:]
    assert registry.queue.logs(first.id, limit=1) == chunks[:1]
    registry.queue.lose(first.fence, "gone")
    again = claim(registry)
    registry.queue.log(again.fence, "c\n")
    assert [(chunk.text, chunk.attempt) for chunk in registry.queue.logs(first.id)] == [("a\n", 1), ("b\n", 1), ("c\n", 2)]


def test_a_long_log_is_kept_in_pieces_and_cut(registry: AnyRegistry) -> None:
    submit(registry)
    job = claim(registry)
    piece = "0123456789abcdef" * 65_536  # 1 MiB
    for _ in range(3):
        registry.queue.log(job.fence, piece)
    registry.queue.log(job.fence, "ü" * 600_000)  # 1.2 MB where 1 MiB is left: 524,288 characters of two bytes
    registry.queue.log(job.fence, "nobody will read this")
    chunks = registry.queue.logs(job.id, limit=10_000)
    assert max(len(chunk.text) for chunk in chunks) <= 16_384
    text = "".join(chunk.text for chunk in chunks)
    assert text.startswith(piece * 3 + "ü" * 524_288 + "\n[log cut here")
    assert text.count("log cut here") == 1
    assert "nobody" not in text
    registry.queue.lose(job.fence, "gone")
    registry.queue.log(claim(registry).fence, "a new attempt has its own room")
    assert registry.queue.logs(job.id, limit=10_000)[-1].text == "a new attempt has its own room"


def test_text_that_no_database_takes_is_kept_readable(registry: AnyRegistry) -> None:
    submit(registry, name="a\x00b")
    job = claim(registry)
    assert job.name == "a\ufffdb"
    registry.queue.log(job.fence, "x\x00y \udce9 ü \x1b[31m\r\n")
    assert registry.queue.logs(job.id)[0].text == "x\ufffdy ? ü \x1b[31m\r\n"
    assert registry.queue.fail(job.fence, "\udcff\x00").error == "?\ufffd"


# Lists


def test_jobs_are_listed_page_by_page(registry: AnyRegistry) -> None:
    for at in range(5):
        submit(registry, kind="probe" if at % 2 else "train", user="ada" if at < 3 else "eve")
    claim(registry)
    page = registry.queue.jobs(limit=2)
    assert [job.id for job in page] == [5, 4]
    assert [job.id for job in registry.queue.jobs(limit=2, before_id=page[-1].id)] == [3, 2]
    assert [job.id for job in registry.queue.jobs(kind="probe")] == [4, 2]
    assert [job.id for job in registry.queue.jobs(user="ada", kind="train")] == [3, 1]
    assert [job.id for job in registry.queue.jobs(state="running")] == [1]
    assert registry.queue.counts() == {state: {"running": 1, "queued": 4}.get(state, 0) for state in JobState}
    with pytest.raises(ValueError, match="nonsense"):
        registry.queue.jobs(state="nonsense")


def test_live_jobs_by_dispatcher(registry: AnyRegistry) -> None:
    submit(registry)
    submit(registry)
    registry.queue.claim("a", **ROOM)
    registry.queue.claim("b", **ROOM)
    assert [job.id for job in registry.queue.live()] == [1, 2]
    assert [job.id for job in registry.queue.live("b")] == [2]


def test_only_a_waiting_job_is_given_a_reason(registry: AnyRegistry) -> None:
    job = submit(registry)
    registry.queue.set_reason(job.id, "waiting: needs 1 GPU, the cluster has 0")
    assert registry.queue.job(job.id).reason == "waiting: needs 1 GPU, the cluster has 0"
    claim(registry)
    registry.queue.set_reason(job.id, "late")
    assert registry.queue.job(job.id).reason is None
    registry.queue.set_reason(99, "nobody")


def test_dispatchers_say_that_they_live(registry: AnyRegistry, clock: Clock) -> None:
    registry.queue.announce("a", "host-1", 10, {"CPU": 2.0})
    clock.pass_s(5)
    registry.queue.announce("b", "host-2", 20, {})
    registry.queue.announce("a", "host-1", 11, {"CPU": 4.0})
    clock.pass_s(5)
    rows = [(row.id, row.host, row.pid, row.age_s, row.cluster) for row in registry.queue.dispatchers()]
    assert rows == [("a", "host-1", 11, 5.0, {"CPU": 4.0}), ("b", "host-2", 20, 5.0, {})]


def test_served_models(registry: AnyRegistry, clock: Clock) -> None:
    registry.queue.serve("s3@demo", 1, job=4)
    registry.queue.serve("a5@champion", 2)
    registry.queue.serve("s3@demo", 3, job=6)
    assert [(row.model, row.replicas, row.job) for row in registry.queue.served()] == [
        ("a5@champion", 2, None),
        ("s3@demo", 3, 6),
    ]
    assert registry.queue.served()[0].since == clock.at
    assert registry.queue.unserve("a5@champion")
    assert not registry.queue.unserve("a5@champion")
    with pytest.raises(ValueError, match="at least 1"):
        registry.queue.serve("x@y", 0)


# Records


def test_attempts_and_retries_share_a_run(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry)
    job = claim(registry)
    run = registry.records.open_run(job.fence, kind="train", spec={"a": 1}, provenance={"commit": "abc"})
    assert (run.job, run.origin, run.state, run.mlflow_step, run.spec) == (1, 1, RunState.RUNNING, -1, {"a": 1})
    other = registry.records.open_run(job.fence, key="trial-3", kind="trial", spec={})
    assert other.id != run.id
    registry.records.finish_run(job.fence, other.id, RunState.DIVERGED, {"step": 5})
    registry.queue.lose(job.fence, "gone")
    job = claim(registry)
    assert registry.records.open_run(job.fence, kind="train", spec={"a": 1}).id == run.id
    registry.records.finish_run(job.fence, run.id, "failed")
    registry.queue.fail(job.fence, "boom")
    clock.pass_s(9)
    again = registry.queue.retry(job.id)
    job = claim(registry)
    reopened = registry.records.open_run(job.fence, kind="train", spec={"a": 1})
    assert (reopened.id, reopened.job, reopened.origin) == (run.id, again.id, 1)
    assert (reopened.state, reopened.finished_at, reopened.started_at) == (RunState.RUNNING, None, run.started_at)
    kept = registry.records.open_run(job.fence, key="trial-3", kind="trial", spec={})
    assert (kept.id, kept.state, kept.figures) == (other.id, RunState.DIVERGED, {"step": 5})
    assert [row.id for row in registry.records.runs(1)] == [run.id, other.id]
    assert registry.records.runs(again.id) == registry.records.runs(1)
    assert [row.id for row in registry.records.runs(kind="trial")] == [other.id]
    assert [row.id for row in registry.records.runs()] == [other.id, run.id]


# Every way in which a job that has begun can end, and what then becomes of a run that its process left open.
LAST_WORDS: dict[str, tuple[Callable[[AnyRegistry, Clock, Job], object], JobState, RunState]] = {
    "succeeded": (lambda registry, clock, job: registry.queue.succeed(job.fence), JobState.SUCCEEDED, RunState.FINISHED),
    "failed": (lambda registry, clock, job: registry.queue.fail(job.fence, "boom"), JobState.FAILED, RunState.FAILED),
    "past its time limit": (
        lambda registry, clock, job: registry.queue.fail(job.fence, "too slow", retry=False),
        JobState.FAILED,
        RunState.FAILED,
    ),
    "lost too often": (lambda registry, clock, job: registry.queue.lose(job.fence, "gone"), JobState.FAILED, RunState.FAILED),
    "silent": (
        lambda registry, clock, job: (clock.pass_s(91), registry.queue.rescue()),
        JobState.FAILED,
        RunState.FAILED,
    ),
    "cancelled": (lambda registry, clock, job: registry.queue.cancelled(job.fence), JobState.CANCELLED, RunState.CANCELLED),
    "lost when it was to stop": (
        lambda registry, clock, job: (registry.queue.cancel(job.id), registry.queue.lose(job.fence, "gone")),
        JobState.CANCELLED,
        RunState.CANCELLED,
    ),
}


@pytest.mark.parametrize("way", LAST_WORDS)
def test_a_job_that_ends_leaves_no_run_open(registry: AnyRegistry, clock: Clock, way: str) -> None:
    submit(registry, loss_budget=0)
    submit(registry)
    job, other = claim(registry), claim(registry, lease_s=900.0)
    left = registry.records.open_run(job.fence, kind="tune", spec={})
    failed, finished, diverged = (
        registry.records.open_run(job.fence, key=key, kind="trial", spec={}) for key in ("failed", "finished", "diverged")
    )
    for run in (failed, finished, diverged):
        registry.records.finish_run(job.fence, run.id, run.key, {"why": run.key})
    stranger = registry.records.open_run(other.fence, kind="train", spec={})
    clock.pass_s(5)
    act, state, becomes = LAST_WORDS[way]
    act(registry, clock, job)
    ended = registry.queue.job(job.id)
    assert ended.state is state
    run = registry.records.run(left.id)
    assert (run.state, run.finished_at, run.figures) == (becomes, ended.finished_at, None)
    for before in (failed, finished, diverged):  # what was said stands
        after = registry.records.run(before.id)
        assert (after.state, after.figures, after.finished_at) == (before.key, {"why": before.key}, before.started_at)
    assert registry.records.run(stranger.id) == stranger


def test_a_job_that_is_tried_again_keeps_its_run_open_until_it_is_cancelled(registry: AnyRegistry, clock: Clock) -> None:
    submit(registry, error_budget=1)
    job = claim(registry)
    run = registry.records.open_run(job.fence, kind="train", spec={})
    registry.queue.lose(job.fence, "gone")
    assert registry.records.run(run.id) == run
    job = claim(registry)
    registry.queue.fail(job.fence, "boom")
    assert registry.records.run(run.id) == run
    clock.pass_s(2)
    registry.queue.cancel(job.id)  # it waits for its next attempt: no process is there to say anything
    ended = registry.records.run(run.id)
    assert (ended.state, ended.finished_at) == (RunState.CANCELLED, clock.at)
    again = registry.queue.retry(job.id)
    assert registry.records.run(run.id) == ended
    reopened = registry.records.open_run(claim(registry).fence, kind="train", spec={})
    assert (reopened.id, reopened.job, reopened.state, reopened.finished_at) == (run.id, again.id, RunState.RUNNING, None)


def test_a_run_of_another_job_is_out_of_reach(registry: AnyRegistry) -> None:
    submit(registry)
    submit(registry)
    first, second = claim(registry), claim(registry)
    run = registry.records.open_run(first.fence, kind="train", spec={})
    for write in ("set_mlflow", "mark_mlflow", "add_points", "add_checkpoint", "measure", "finish_run"):
        with pytest.raises(RunNotFound, match="of job 2"):
            WRITES[write](registry, second.fence, run.id)
    assert registry.records.run(run.id) == run


def test_curves(registry: AnyRegistry, working: tuple[Job, int]) -> None:
    job, run = working
    points = [
        CurvePoint(2, "loss", 1.5),
        CurvePoint(2, "lr", 0.1),
        CurvePoint(3, "loss", math.nan),
        CurvePoint(4, "loss", -math.inf),
    ]
    registry.records.add_points(job.fence, run, points)
    registry.records.add_points(job.fence, run, [CurvePoint(2, "loss", 1.25), CurvePoint(2, "loss", 1.75)])
    registry.records.add_points(job.fence, run, [])
    assert registry.records.curve(run) == [
        CurvePoint(1, "loss", 2.0),
        CurvePoint(2, "loss", 1.75),
        CurvePoint(2, "lr", 0.1),
        CurvePoint(3, "loss", None),
        CurvePoint(4, "loss", None),
    ]
    assert registry.records.curve(run, "lr") == [CurvePoint(2, "lr", 0.1)]
    assert [point.step for point in registry.records.curve(run, "loss", after_step=2)] == [3, 4]
    value = 0.1 + 0.2  # every bit of it comes back
    registry.records.add_points(job.fence, run, [CurvePoint(5, "loss", value)])
    assert registry.records.curve(run, after_step=4)[0].value == value
    with pytest.raises(RunNotFound):
        registry.records.curve(99)


def test_checkpoints_newest_first(registry: AnyRegistry, working: tuple[Job, int], clock: Clock) -> None:
    job, run = working
    for step, place in ((20, "/c/20"), (10, "/c/10"), (20, "/d/20")):
        registry.records.add_checkpoint(job.fence, run, step, place, "digest")
    assert [(row.step, row.place) for row in registry.records.checkpoints(run)] == [(20, "/d/20"), (10, "/c/10"), (1, "/c/1")]
    found = registry.records.run(run)
    assert (found.checkpoint_step, found.checkpoint) == (20, "/d/20")
    registry.records.forget_checkpoints(job.fence, run, keep=2)
    assert [row.step for row in registry.records.checkpoints(run)] == [20, 10]


def test_measurements_of_one_place_replace_each_other(registry: AnyRegistry, working: tuple[Job, int]) -> None:
    job, run = working
    registry.records.measure(
        job.fence,
        run,
        [
            Measurement("v", {}, 0.97, 0.91, math.inf),
            Measurement("tau", {"n": 8, "i": 2}, 4.0),
            Measurement("tau", {"i": 2, "n": 8}, 5.0, 4.0, 6.0),
            Measurement("tau", {"i": 1}, math.nan),
        ],
    )
    assert registry.records.measurements(run) == [
        Measurement("tau", {"i": 1}, None, None, None, run),
        Measurement("tau", {"i": 2, "n": 8}, 5.0, 4.0, 6.0, run),
        Measurement("v", {}, 0.97, 0.91, None, run),
    ]
    assert registry.records.measurements(job_id=job.id) == registry.records.measurements(run)
    assert [row.instrument for row in registry.records.measurements(instrument="v")] == ["v"]
    with pytest.raises(JobNotFound):
        registry.records.measurements(job_id=99)


def test_mlflow_is_noted_and_runs_end(registry: AnyRegistry, working: tuple[Job, int], clock: Clock) -> None:
    job, run = working
    registry.records.set_mlflow(job.fence, run, "abc123")
    registry.records.mark_mlflow(job.fence, run, 400)
    clock.pass_s(3)
    registry.records.finish_run(job.fence, run, "finished", {"loss": math.nan, "steps": 3})
    found = registry.records.run(run)
    assert (found.mlflow_run, found.mlflow_step, found.state) == ("abc123", 400, RunState.FINISHED)
    assert (found.figures, found.finished_at) == ({"loss": None, "steps": 3}, clock.at)
    for bad in ("running", "nonsense"):
        with pytest.raises(ValueError, match=bad):
            registry.records.finish_run(job.fence, run, bad)


# Prune


def test_prune_takes_what_ended_long_ago_and_all_of_it(registry: AnyRegistry, clock: Clock, working: tuple[Job, int]) -> None:
    job, run = working
    registry.queue.succeed(job.fence)
    clock.pass_s(100)
    young = submit(registry)
    registry.queue.cancel(young.id)
    waits = submit(registry)
    assert registry.queue.prune(101.0) == 0
    assert registry.queue.prune(99.0) == 1
    assert [row.id for row in registry.queue.jobs()] == [waits.id, young.id]
    for ask in (registry.queue.job, registry.queue.logs, registry.queue.attempts):
        with pytest.raises(JobNotFound):
            ask(job.id)
    with pytest.raises(RunNotFound):
        registry.records.run(run)
    assert registry.records.measurements() == []
    assert submit(registry).id == waits.id + 1


def test_prune_leaves_what_is_still_needed(registry: AnyRegistry, clock: Clock) -> None:
    failed = submit(registry)
    registry.queue.fail(claim(registry).fence, "boom")
    met = submit(registry)
    registry.queue.succeed(claim(registry).fence)
    cancelled = submit(registry)
    registry.queue.cancel(cancelled.id)
    retried = registry.queue.retry(cancelled.id)
    blocked = submit(registry, needs=(failed.id, met.id))
    clock.pass_s(100)
    assert registry.queue.prune(10.0) == 0
    registry.queue.cancel(blocked.id)
    registry.queue.cancel(retried.id)
    clock.pass_s(100)
    assert registry.queue.prune(10.0) == 5
    assert registry.queue.jobs() == []


def test_records_are_frozen(registry: AnyRegistry) -> None:
    job = submit(registry)
    with pytest.raises(dataclasses.FrozenInstanceError):
        job.state = JobState.SUCCEEDED  # type: ignore[misc]
    assert registry.queue.job(job.id).state is JobState.QUEUED
