"""The lease a worker keeps: renewed while it can be, given up in time, output carried along. No cluster, no database."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from loopcore.errors import InputError, LoopcoreError, Undecided
from services.registry import Fence, Job, LeaseLost, MemoryRegistry, RegistryUnavailable, Submission
from services.settings import Settings
from workers import lease
from workers.capture import PENDING_MOST, Captured
from workers.keeper import Keeper
from workers.lease import CancelRequested, DeadlinePassed, HeldJob

LEASE_S = 1.2


class Away:
    """A queue that can be cut off."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.cut = False
        self.beats: list[dict[str, Any] | None] = []

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if self.cut:
                raise RegistryUnavailable("cut off by the test")
            if name == "beat":
                self.beats.append(named.get("progress"))
            return getattr(self._queue, name)(*arguments, **named)

        return call


class Line:
    """A registry behind a line that can be cut."""

    def __init__(self, registry: MemoryRegistry) -> None:
        self.queue = Away(registry.queue)
        self.records = registry.records


class Setup:
    """A claimed job and its keeper, which notes in `ended` what would have ended the process."""

    def __init__(self, tmp_path: Path, **submission: Any) -> None:
        self.registry = MemoryRegistry()
        self.line = Line(self.registry)
        self.settings = Settings(home=tmp_path, lease_s=LEASE_S, heartbeat_s=0.3, cancel_grace_s=1.0)
        self.registry.queue.submit(Submission(kind="train", spec={}, digest="d", **submission))
        job = self.registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8, lease_s=LEASE_S)
        assert job is not None
        self.job = self.registry.queue.begin(job.fence, "here", 1)
        self.fence: Fence = job.fence
        self.ended: list[str] = []
        self.captured = Captured()
        self.keeper = Keeper(self.line, self.fence, self.settings, self.captured, end=self.ended.append)  # type: ignore[arg-type]
        self.held = HeldJob(self.job, self.settings, self.line, self.keeper)  # type: ignore[arg-type]

    def now(self) -> Job:
        return self.registry.queue.job(self.fence.job)


@pytest.fixture
def begun(tmp_path: Path) -> Iterator[Setup]:
    setup = Setup(tmp_path)
    with setup.keeper:
        yield setup


Eventually = Callable[..., object]


def test_a_job_that_works_keeps_its_lease(begun: Setup) -> None:
    time.sleep(2 * LEASE_S)
    begun.held.check()
    assert begun.ended == []
    lease_until = begun.now().lease_until
    assert lease_until is not None
    assert lease_until > time.time()


def test_progress_is_told_between_heartbeats_and_once(begun: Setup, eventually: Eventually) -> None:
    begun.held.progress(3, 12, "so far", unit="steps")
    eventually(lambda: begun.now().progress is not None)
    assert begun.now().progress == {"done": 3, "total": 12, "unit": "steps", "rate": None, "left_s": None, "note": "so far"}
    assert sum(told is not None for told in begun.line.queue.beats) == 1


def test_rate_and_time_left_are_over_the_last_seconds(begun: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    at, told = [100.0], []
    monkeypatch.setattr(lease, "seconds", lambda: at[0])
    monkeypatch.setattr(begun.keeper, "tell", told.append)
    for done in (0, 100, 200, 260):  # ten a second, then two
        begun.held.progress(done, 300)
        at[0] += 10.0 if done < 200 else 30.0
    assert [progress["rate"] for progress in told] == [None, 10.0, 10.0, 2.0]
    assert told[-1]["left_s"] == 20.0


def test_a_cancel_request_is_seen_well_within_its_grace(begun: Setup, eventually: Eventually) -> None:
    begun.registry.queue.cancel(begun.fence.job)
    eventually(lambda: begun.held.stopping, within_s=begun.settings.cancel_grace_s)
    with pytest.raises(CancelRequested):
        begun.held.check()


def test_a_time_limit_ends_the_job_with_words_for_people(tmp_path: Path, eventually: Eventually) -> None:
    setup = Setup(tmp_path, time_limit_s=0.2)
    with setup.keeper:
        eventually(lambda: setup.held.stopping)
        with pytest.raises(DeadlinePassed, match=r"time limit of 0\.2 s; raise time_limit_s"):
            setup.held.check()


def test_a_lease_that_somebody_took_stops_the_job_at_once(begun: Setup, eventually: Eventually) -> None:
    begun.registry.queue.lose(begun.fence, "thought dead")
    eventually(lambda: begun.held.stopping)
    with pytest.raises(LeaseLost):
        begun.held.check()
    assert begun.ended == []  # it has a while to stop by itself


def test_a_registry_that_stays_away_ends_the_process_and_not_before_the_lease_does(begun: Setup, eventually: Eventually) -> None:
    began = time.monotonic()
    begun.line.queue.cut = True
    eventually(lambda: begun.held.stopping, within_s=2 * LEASE_S)
    with pytest.raises(LeaseLost, match="could not be renewed in time"):
        begun.held.check()
    eventually(lambda: begun.ended, within_s=2 * LEASE_S)
    assert begun.ended == [f"the lease of attempt 1 at job {begun.fence.job} is over"]
    # The last heartbeat before the cut was at most one heartbeat ago.
    assert time.monotonic() - began > LEASE_S - begun.settings.heartbeat_s - 0.1


def test_a_registry_that_comes_back_in_time_costs_nothing(begun: Setup, eventually: Eventually) -> None:
    begun.line.queue.cut = True
    time.sleep(0.5 * LEASE_S)
    begun.line.queue.cut = False
    time.sleep(LEASE_S)
    begun.held.check()
    assert begun.ended == []


def test_a_database_that_does_not_answer_does_not_stop_the_watchdog(tmp_path: Path, eventually: Eventually) -> None:
    """The keeper waits in a call that does not come back; the process ends all the same."""
    setup = Setup(tmp_path)
    with setup.keeper:
        setup.line.queue._queue = type("Stuck", (), {"beat": lambda *_, **__: time.sleep(2.5 * LEASE_S)})()
        eventually(lambda: setup.ended, within_s=2 * LEASE_S)


def test_writes_wait_for_the_registry_as_long_as_the_lease_lasts(begun: Setup) -> None:
    begun.line.queue.cut = True
    with pytest.raises(LeaseLost, match="the registry is away"):
        begun.held.write(lambda: begun.line.queue.log(begun.fence, "x"))
    assert begun.held.stopping


def test_the_error_of_a_job_says_who_can_do_something_about_it() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        _ = 1 / 0
    text, retry = lease._told(caught.value)
    assert text.startswith("Traceback")
    assert retry
    assert lease._told(InputError("expected another")) == ("expected another", False)
    assert lease._told(DeadlinePassed("too long")) == ("too long", False)
    assert lease._told(Undecided("too few")) == ("too few", True)
    assert isinstance(InputError("x"), LoopcoreError)


def test_output_is_kept_in_order_and_still_written(capsys: pytest.CaptureFixture[str]) -> None:
    captured = Captured()
    with captured:
        print("one")
        sys.stderr.write("two\n")
        logging.getLogger("somebody").info("three")
        logging.getLogger("somebody").debug("not this")
    print("after")
    text = captured.take()
    assert text.startswith("one\ntwo\n")
    assert text.endswith("INFO somebody: three\n")
    assert captured.take() == ""
    out, err = capsys.readouterr()
    assert (out, err.startswith("two\n")) == ("one\nafter\n", True)


def test_output_that_could_not_be_kept_comes_first_the_next_time() -> None:
    captured = Captured()
    captured.write("a")
    first = captured.take()
    captured.write("b")
    captured.put_back(first)
    assert captured.take() == "ab"


def test_output_that_comes_too_fast_is_counted_and_not_kept() -> None:
    captured = Captured()
    captured.write("x" * PENDING_MOST)
    captured.write("y" * 7)
    text = captured.take()
    assert text.startswith("x" * PENDING_MOST)
    assert "y" not in text.split("\n")[0]
    assert "[7 characters left out here" in text


def test_output_waits_while_the_registry_is_away(begun: Setup, eventually: Eventually) -> None:
    begun.line.queue.cut = True
    begun.captured.write("kept\n")
    begun.keeper.flush()
    begun.line.queue.cut = False
    eventually(lambda: [chunk.text for chunk in begun.registry.queue.logs(begun.fence.job)] == ["kept\n"])
