"""Studies in the registry, on SQLite, PostgreSQL and in memory: what is queued, shared, retried, cancelled and found again."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from services.registry import (
    CurvePoint,
    Fence,
    Job,
    JobState,
    Measurement,
    MemoryRegistry,
    Registry,
    Started,
    StudyNotFound,
    Work,
    migrate,
)
from tests.integration.registries import ROOM, AnyRegistry, Clock, submission

KINDS = ("sqlite", "postgresql", "memory")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
def registry(request: pytest.FixtureRequest, clock: Clock, tmp_path: str) -> Iterator[AnyRegistry]:
    if request.param == "memory":
        yield MemoryRegistry(now=clock)
        return
    url = f"sqlite:///{tmp_path}/registry.db" if request.param == "sqlite" else request.getfixturevalue("fresh_postgres")
    migrate(url)
    with Registry.open(url, now=clock) as opened:
        yield opened


def train(cell: str, key: str, after: str | None = None) -> Work:
    def job(parent: int | None) -> object:
        return submission(name=cell, digest=key, key=f"study/{key}", needs=() if parent is None else (parent,))

    return Work(cell=cell, probe="", key=key, after=after, submission=job)  # type: ignore[arg-type]


def probe(cell: str, of: str) -> Work:
    def job(parent: int | None) -> object:
        assert parent is not None
        return submission(kind="probe", name=f"{cell} speed", digest=f"{of}-speed", key=f"study/{of}-speed", needs=(parent,))

    return Work(cell=cell, probe="speed", key=f"{of}-speed", after=of, submission=job)  # type: ignore[arg-type]


def begin(registry: AnyRegistry, name: str, *works: Work, scale: str = "smoke") -> Started:
    return registry.studies.start(name, scale, {"seeds": 1}, works, user="ada", provenance={"commit": "c1"})


def counted(started: Started) -> tuple[int, int, int, int]:
    return started.created, started.retried, started.shared, started.kept


def claim(registry: AnyRegistry) -> Job:
    job = registry.queue.claim("d", **ROOM)
    assert job is not None
    return job


def fails(registry: AnyRegistry, fence: Fence) -> None:
    registry.queue.fail(fence, "boom")


def states(registry: AnyRegistry, study: int) -> dict[tuple[str, str], str]:
    return {(one.cell, one.probe): one.job.state.value for one in registry.studies.works(study)}


def test_work_is_queued_behind_what_it_builds_on(registry: AnyRegistry) -> None:
    started = begin(registry, "law", train("a", "ka"), probe("a", "ka"), train("b", "kb", after="ka"))
    assert counted(started) == (3, 0, 0, 0)
    study = started.study
    assert (study.id, study.name, study.scale, study.asked, study.user) == (1, "law", "smoke", {"seeds": 1}, "ada")
    assert study.jobs == {"queued": 3}
    assert [registry.queue.needs(number) for number in (1, 2, 3)] == [(), (1,), (1,)]
    assert [registry.queue.job(number).study_id for number in (1, 2, 3)] == [1, 1, 1]
    assert claim(registry).id == 1
    assert registry.queue.claim("d", **ROOM) is None


def test_the_same_study_again_is_the_same_one(registry: AnyRegistry, clock: Clock) -> None:
    works = (train("a", "ka"), probe("a", "ka"))
    begin(registry, "law", *works)
    clock.pass_s(5)
    again = begin(registry, "law", *works)
    assert (again.study.id, counted(again)) == (1, (0, 0, 0, 2))
    assert again.study.started_at - again.study.created_at == 5
    assert begin(registry, "law", *works, scale="cpu").study.id == 2
    assert [study.id for study in registry.studies.studies()] == [2, 1]
    assert [study.id for study in registry.studies.studies(before_id=2)] == [1]
    assert registry.studies.studies(name="other") == []


def test_another_study_shares_work_that_is_done_or_under_way(registry: AnyRegistry) -> None:
    begin(registry, "law", train("a", "ka"), train("b", "kb"))
    registry.queue.succeed(claim(registry).fence)
    claim(registry)
    other = begin(registry, "halting", train("a", "ka"), train("b2", "kb"), train("c", "kc"))
    assert counted(other) == (1, 0, 2, 0)
    assert states(registry, other.study.id) == {("a", ""): "succeeded", ("b2", ""): "running", ("c", ""): "queued"}
    assert [one.job.id for one in registry.studies.works(other.study.id)] == [1, 2, 3]
    assert registry.queue.job(1).study_id == 1
    assert registry.queue.job(3).study_id == other.study.id


def test_what_failed_is_tried_anew_and_what_waited_goes_on(registry: AnyRegistry) -> None:
    works = (train("a", "ka"), probe("a", "ka"), train("b", "kb"))
    begin(registry, "law", *works)
    fails(registry, claim(registry).fence)
    assert states(registry, 1) == {("a", ""): "failed", ("a", "speed"): "blocked", ("b", ""): "queued"}
    again = begin(registry, "law", *works)
    assert counted(again) == (0, 1, 0, 2)
    assert states(registry, 1) == {("a", ""): "queued", ("a", "speed"): "queued", ("b", ""): "queued"}
    retried = registry.queue.job(4)
    assert (retried.origin, retried.retry_of, retried.study_id) == (1, 1, 1)
    (waits,) = [one.job.id for one in registry.studies.works(1) if one.probe]
    assert registry.queue.needs(waits) == (4,)


def test_two_names_for_one_piece_of_work_are_one_job(registry: AnyRegistry) -> None:
    started = begin(registry, "law", train("a", "ka"), train("same", "ka"))
    assert counted(started) == (1, 0, 0, 0)
    assert [(one.cell, one.job.id) for one in registry.studies.works(1)] == [("a", 1), ("same", 1)]


def test_work_that_is_another_one_now_is_queued(registry: AnyRegistry) -> None:
    """A cell of the same name whose recipe changed: the old figures are not those of the new cell."""
    begin(registry, "law", train("a", "ka"))
    registry.queue.succeed(claim(registry).fence)
    again = begin(registry, "law", train("a", "ka2"))
    assert counted(again) == (1, 0, 0, 0)
    assert states(registry, 1) == {("a", ""): "queued"}


def test_cancelled_is_what_no_other_study_needs(registry: AnyRegistry) -> None:
    begin(registry, "law", train("a", "ka"), train("b", "kb"), probe("b", "kb"))
    begin(registry, "halting", train("a", "ka"))
    cancelled = registry.studies.cancel(1)
    assert cancelled.cancelled_at is not None
    assert states(registry, 1) == {("a", ""): "queued", ("b", ""): "cancelled", ("b", "speed"): "cancelled"}
    registry.studies.cancel(2)
    assert states(registry, 2) == {("a", ""): "cancelled"}
    again = begin(registry, "law", train("a", "ka"), train("b", "kb"), probe("b", "kb"))
    assert counted(again) == (0, 3, 0, 0)
    assert again.study.cancelled_at is None
    assert again.study.jobs == {"queued": 3}


def test_what_was_found_comes_with_its_run_its_curve_and_its_cost(registry: AnyRegistry, clock: Clock) -> None:
    works = (train("a", "ka"), probe("a", "ka"))
    begin(registry, "law", *works)
    first = claim(registry)
    run = registry.records.open_run(first.fence, kind="train", spec={})
    registry.records.add_points(first.fence, run.id, [CurvePoint(1, "loss", 2.0), CurvePoint(1, "accuracy", 0.5)])
    clock.pass_s(10)
    fails(registry, first.fence)
    begin(registry, "law", *works)
    clock.pass_s(100)
    second = claim(registry)
    assert second.origin == first.id
    assert registry.records.open_run(second.fence, kind="train", spec={}).id == run.id
    registry.records.add_points(second.fence, run.id, [CurvePoint(2, "accuracy", 0.75)])
    registry.records.measure(second.fence, run.id, [Measurement("speed", {"q": 0.8}, 1.0, 0.9, 1.1)])
    clock.pass_s(7)
    registry.queue.succeed(second.fence)
    trained, probed = sorted(registry.studies.works(1, curve="accuracy"), key=lambda one: one.probe)
    assert (trained.job.id, trained.seconds) == (second.id, 17.0)
    assert trained.run is not None
    assert trained.run.id == run.id
    assert [(point.step, point.value) for point in trained.curve] == [(1, 0.5), (2, 0.75)]
    assert [(row.instrument, row.axes, row.value, row.low, row.high) for row in trained.measurements] == [
        ("speed", {"q": 0.8}, 1.0, 0.9, 1.1)
    ]
    assert (probed.run, probed.curve, probed.measurements, probed.seconds) == (None, [], [], 0.0)


def test_a_study_that_is_not_there(registry: AnyRegistry) -> None:
    for number in (1, 0, -1, 2**63):
        with pytest.raises(StudyNotFound, match="there is no study"):
            registry.studies.study(number)
    with pytest.raises(StudyNotFound):
        registry.studies.cancel(1)
    with pytest.raises(StudyNotFound):
        registry.studies.works(1)


def test_pruned_work_is_done_anew(registry: AnyRegistry, clock: Clock) -> None:
    begin(registry, "law", train("a", "ka"))
    registry.queue.succeed(claim(registry).fence)
    clock.pass_s(1000)
    assert registry.queue.prune(10) == 1
    assert registry.studies.works(1) == []
    assert counted(begin(registry, "law", train("a", "ka"))) == (1, 0, 0, 0)


def test_started_by_many_at_once_it_is_queued_once(registry: AnyRegistry) -> None:
    works = [train(f"c{number}", f"k{number}") for number in range(20)]
    found: list[Started] = []
    threads = [
        threading.Thread(target=lambda name=name: found.append(begin(registry, name, *works)))
        for name in ("law", "law", "halting", "walls")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(started.created for started in found) == 20
    assert len({started.study.id for started in found}) == 3
    assert registry.queue.counts()[JobState.QUEUED] == 20
