"""What becomes of running jobs when the stack goes down, by a dispatcher without a cluster and a real registry."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.dispatcher import __main__ as process
from services.dispatcher.actors import Phase, Watch
from services.dispatcher.loop import Dispatcher
from services.registry import Job, JobState, LeaseLost, Registry, RegistryUnavailable, Submission, migrate
from services.settings import Settings
from services.stack import control, parts, state, supervisor

GRACE_S = 1.0


@pytest.fixture
def dispatcher(tmp_path: Path) -> Iterator[Dispatcher]:
    settings = Settings(home=tmp_path, cancel_grace_s=GRACE_S, lease_s=60.0)
    migrate(settings.registry_url)
    dispatcher = Dispatcher(settings, start_anew=lambda: pytest.fail("it has no cluster to lose"))
    yield dispatcher
    dispatcher._registry.close()


@pytest.fixture
def registry(dispatcher: Dispatcher, tmp_path: Path) -> Iterator[Registry]:
    with Registry.open(Settings(home=tmp_path).registry_url) as registry:
        yield registry


def running(dispatcher: Dispatcher, registry: Registry, *, begun: bool) -> Job:
    """A job that the dispatcher claimed and watches, as if its actor were on the cluster."""
    registry.queue.submit(Submission(kind="train", spec={}, digest="d"))
    job = registry.queue.claim(dispatcher.name, cpus=8.0, gpus=0.0, memory_gb=8.0)
    assert job is not None
    dispatcher._actors.watched[job.fence] = Watch((job.fence,), None, Phase.ALIVE if begun else Phase.PENDING, None)
    return registry.queue.begin(job.fence, "node", 1) if begun else job


def outcome(registry: Registry, job: Job) -> tuple[str, str | None, int]:
    (attempt,) = registry.queue.attempts(job.id)
    return str(attempt.outcome), attempt.error, registry.queue.job(job.id).losses


def test_one_that_does_not_listen_is_given_back_when_the_time_is_over(dispatcher: Dispatcher, registry: Registry) -> None:
    """It holds up nobody and waits for no lease afterwards; one that listens has all of the time, one that has not begun none."""
    deaf = running(dispatcher, registry, begun=True)
    listens = running(dispatcher, registry, begun=True)
    pending = running(dispatcher, registry, begun=False)
    elsewhere = running(dispatcher, registry, begun=True)
    del dispatcher._actors.watched[elsewhere.fence]  # on a cluster that stays up
    at: dict[int, float] = {}
    began = time.monotonic()

    def see() -> None:
        while len(at) < 3:
            at.update({job.id: time.monotonic() - began for job in (deaf, listens, pending) if job.id not in at and over(job)})
            if pending.id in at and listens.id not in at:
                registry.queue.release(listens.fence, "a last checkpoint is written")
            time.sleep(0.02)

    def over(job: Job) -> bool:
        return registry.queue.job(job.id).state is JobState.QUEUED

    thread = threading.Thread(target=see)
    thread.start()
    dispatcher._give_back()
    thread.join(10.0)
    assert outcome(registry, pending) == ("released", "its cluster is shut down, and its process had not begun", 0)
    assert outcome(registry, listens) == ("released", "a last checkpoint is written", 0)
    assert outcome(registry, deaf) == ("released", "its cluster is shut down, and it wrote no last checkpoint in time", 0)
    assert at[pending.id] <= at[listens.id] <= at[deaf.id]
    assert at[deaf.id] >= GRACE_S
    with pytest.raises(LeaseLost):  # should its process live on, it can change nothing
        registry.queue.beat(deaf.fence)
    assert registry.queue.job(elsewhere.id).state is JobState.RUNNING
    assert registry.queue.claim("next", cpus=8.0, gpus=0.0, memory_gb=8.0) is not None, "the next stack waits for nothing"


def test_a_cancel_request_outlives_it(dispatcher: Dispatcher, registry: Registry) -> None:
    job = running(dispatcher, registry, begun=True)
    registry.queue.cancel(job.id)
    dispatcher._give_back()
    assert registry.queue.job(job.id).state is JobState.CANCELLED


def test_a_registry_that_is_away_for_a_moment_does_not_cut_it_short(
    dispatcher: Dispatcher, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(dispatcher, registry, begun=True)
    look, calls = dispatcher._queue.live, []

    def live() -> list[Job]:
        calls.append(1)
        if len(calls) <= 4:
            raise RegistryUnavailable("away by the test")
        return look()

    monkeypatch.setattr(dispatcher._queue, "live", live)
    began = time.monotonic()
    dispatcher._give_back()
    assert time.monotonic() - began >= GRACE_S
    assert outcome(registry, job)[0] == "released"


def test_a_registry_that_stays_away_does_not_keep_the_stack_up(
    dispatcher: Dispatcher, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = running(dispatcher, registry, begun=True)

    def away() -> list[Job]:
        raise RegistryUnavailable("away by the test")

    monkeypatch.setattr(dispatcher._queue, "live", away)
    dispatcher._give_back()  # returns
    assert registry.queue.job(job.id).state is JobState.RUNNING  # its lease runs out, and it is tried again then


def test_whoever_waits_for_another_waits_longer_than_that_one_takes() -> None:
    dispatcher_s = supervisor.STOP_S + state.GIVE_BACK_S
    assert dispatcher_s > process.STOP_S + state.GIVE_BACK_S
    ray_s = supervisor.STOP_S + 2 * parts.KEEPER_GRACE_S
    sweep_s = 2.0
    own = dispatcher_s + supervisor.STOP_S + ray_s + sweep_s
    joined = supervisor.RELEASE_S + supervisor.STOP_S + supervisor.STOP_S + sweep_s
    assert max(own, joined) < control.DOWN_S
