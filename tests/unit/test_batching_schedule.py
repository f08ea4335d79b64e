"""Which rows share a pass: batches, refills, padding, the line and its order, and what a schedule costs."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopcore.batching import (
    Finished,
    LoopBatchEngine,
    ModelStepper,
    Request,
    Ticket,
    TraceStepper,
    VirtualClock,
)
from loopcore.batching.admission import Waiting
from loopcore.errors import LengthError, QueueFull
from loopcore.specs import parse_halting
from tests.unit.loop_rows import (
    MODELS,
    PROFILE,
    VOCABULARY,
    alone,
    both,
    drain,
    recorded,
    stepper,
)


@both
def test_all_rows_of_a_length_share_one_pass_whatever_their_loop(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_loops=lambda n: 9)
    for late in range(4):
        engine.submit(Request((late, 1, 2), parse_halting("fixed:5")))
        engine.tick()
    assert engine.live == 4
    before = engine.stats.passes
    engine.tick()
    assert engine.stats.passes - before == 1
    assert engine.stats.refills == 3
    drain(engine)
    # Four rows of three tokens, five loops each.
    assert engine.stats.useful_token_loops == 4 * 3 * 5
    assert engine.stats.useful_share == 1.0
    assert engine.stats.most_live_rows == 4
    assert engine.stats.ticks == 8


@both
def test_a_waiting_row_takes_the_place_of_one_that_left(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_rows=2, max_loops=lambda n: 9)
    for loops in (1, 6, 2):
        engine.submit(Request((1, 2), parse_halting(f"fixed:{loops}")))
    finished = {}
    for now in range(1, 10):
        finished |= {event.ticket.id: now for event in engine.tick() if isinstance(event, Finished)}
    assert finished == {0: 1, 2: 3, 1: 6}


@both
def test_without_refill_nobody_joins_a_batch(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_rows=2, refill=False, max_loops=lambda n: 9)
    for loops in (1, 6, 2):
        engine.submit(Request((1, 2), parse_halting(f"fixed:{loops}")))
    finished = {}
    for now in range(1, 10):
        finished |= {event.ticket.id: now for event in engine.tick() if isinstance(event, Finished)}
    assert finished == {0: 1, 1: 6, 2: 8}
    assert engine.stats.refills == 0


@both
def test_words_share_a_padded_bucket_only_where_that_is_asked_for(kind: str) -> None:
    asked = [Request((1,) * length, parse_halting("fixed:3")) for length in (1, 2, 3, 4)]
    engine = LoopBatchEngine(stepper(kind), bucket_width=4)
    engine.run(asked)
    assert engine.stats.passes == 3
    assert engine.stats.useful_token_loops == 30
    assert engine.stats.padded_token_loops == (3 + 2 + 1) * 3
    engine = LoopBatchEngine(stepper(kind))
    engine.run(asked)
    assert engine.stats.passes == 12
    assert engine.stats.padded_token_loops == 0


def test_padding_stops_at_the_learned_positions() -> None:
    engine = LoopBatchEngine(stepper("learned"), bucket_width=8)
    answer = engine.run([Request((1,) * 9, parse_halting("fixed:2"))])[0]
    assert answer.outputs is not None
    assert engine.stats.padded_token_loops == 0
    with pytest.raises(LengthError, match="1 to 9 tokens, got 10"):
        engine.submit(Request((1,) * 10))


@both
def test_a_full_line_says_so_and_loses_nothing(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, queue_limit=2)
    for _ in range(2):
        engine.submit(Request((1, 2)))
    with pytest.raises(QueueFull, match="2 requests are waiting and 2 may"):
        engine.submit(Request((1, 2)))
    assert engine.stats.rejected == 1
    engine.tick()  # one leaves the line
    engine.submit(Request((1, 2)))
    assert len(drain(engine)) == 3
    assert len(engine.run([Request((1, 2))] * 20)) == 20  # feeds the line as it drains


@pytest.mark.parametrize("limit", [0, 1, 5])
def test_a_lone_length_is_not_starved_by_a_busy_one(limit: int) -> None:
    """A stream of words of length 2 keeps its batch running; a word of length 7 is passed at most `limit` times."""
    engine = LoopBatchEngine(
        TraceStepper(recorded, vocabulary=VOCABULARY), max_rows=1, bypass_limit=limit, queue_limit=100, max_loops=lambda n: 9
    )
    stream = Request((1, 2), parse_halting("fixed:1"))
    engine.submit(stream)
    engine.submit(stream)
    lone = engine.submit(Request((1,) * 7, parse_halting("fixed:1")))
    order: list[Ticket] = []
    for _ in range(30):
        engine.submit(stream)
        order.extend(event.ticket for event in engine.tick() if isinstance(event, Finished))
    younger = [ticket for ticket in order[: order.index(lone)] if ticket.id > lone.id]
    assert len(younger) <= limit


@settings(max_examples=300, deadline=None)
@given(st.data(), st.integers(0, 4))
def test_no_row_in_line_is_passed_more_often_than_allowed(data: st.DataObject, limit: int) -> None:
    line: Waiting[int] = Waiting(limit=30, bypass_limit=limit)
    waits: dict[int, int] = {}  # key -> batch, oldest first
    passed: dict[int, int] = {}
    for key in range(data.draw(st.integers(1, 60))):
        match data.draw(st.sampled_from(["push", "push", "pop", "withdraw"])):
            case "push" if len(waits) < 30:
                batch = data.draw(st.integers(0, 3))
                line.push(batch, key, key)
                waits[key], passed[key] = batch, 0
            case "pop":
                running = data.draw(st.sets(st.integers(0, 3)))
                taken = line.pop(running)
                assert (taken is None) == (not waits)
                if taken:
                    batch, popped = taken
                    assert waits.pop(popped) == batch
                    assert popped < min(waits, default=popped + 1) or batch in running
                    for older in waits:
                        if older < popped:
                            passed[older] += 1
                            assert passed[older] <= limit
            case "withdraw" if waits:
                gone = data.draw(st.sampled_from(sorted(waits)))
                assert line.withdraw(waits.pop(gone), gone)
                assert not line.withdraw(0, gone)
        assert len(line) == len(waits)
        assert list(line) == list(waits)


def test_rows_of_a_running_length_join_first() -> None:
    """Fuller passes: with three places, two more words of length 2 join before the word of length 3 that came before them."""
    trace = TraceStepper(recorded, vocabulary=VOCABULARY)
    engine = LoopBatchEngine(trace, max_rows=3, max_loops=lambda n: 9)
    for word in [(1, 1), (1, 1, 1), (2, 2), (3, 3)]:
        engine.submit(Request(word, parse_halting("fixed:2")))
    engine.tick()
    assert trace.passes == [(2, 3)]


def test_buffers_of_lengths_no_longer_used_are_let_go() -> None:
    work = ModelStepper(MODELS["pre"])
    engine = LoopBatchEngine(work, max_loops=lambda n: 9)
    for length in range(1, 30):
        engine.run([Request((1,) * length, parse_halting("fixed:1"))])
    assert len(work._buckets) == 8
    again = engine.run([Request((1,) * length, parse_halting("fixed:2"), logits=True) for length in range(1, 30)])
    assert all(one.outputs == alone("pre", Request((1,) * one.ticket.length, parse_halting("fixed:2"))).outputs for one in again)


def test_a_schedule_can_be_timed_without_a_model() -> None:
    """Ten rows of one length, a pass of 1 ms and .1 ms a row: two loops of ten rows, on a clock that only passes take."""
    clock = VirtualClock()
    trace = TraceStepper(recorded, clock=clock, cost_s=lambda rows, length: 0.001 + 0.0001 * rows)
    engine = LoopBatchEngine(trace, clock=clock, max_loops=lambda n: 9)
    answers = engine.run([Request((1, 2, 3), parse_halting("fixed:2"))] * 10)
    assert clock.now == pytest.approx(0.004)
    assert [one.compute_s for one in answers] == pytest.approx([0.004] * 10)
    assert engine.stats.tick_s == pytest.approx(0.004)
    assert engine.stats.longest_tick_s == pytest.approx(0.002)
    figures = engine.stats.to_json()
    assert figures["exits"] == {"2": 10}
    assert figures["reasons"] == {"fixed": 10}
