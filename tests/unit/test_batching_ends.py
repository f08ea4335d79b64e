"""How a row may end without the answer of its rule: refused, cancelled, late, failed, shed under pressure."""

from __future__ import annotations

import pytest
import torch

from loopcore.batching import (
    Finished,
    LoopBatchEngine,
    ModelStepper,
    Recorded,
    Request,
    Ticket,
    TraceStepper,
    VirtualClock,
)
from loopcore.errors import InputError, LengthError, UnknownSymbol
from loopcore.model import LoopedTransformer
from loopcore.specs import HaltingSpec, parse_halting
from tests.unit.loop_rows import (
    PROFILE,
    RULES,
    VOCABULARY,
    alone,
    both,
    drain,
    stepper,
    tiny_model,
)


@both
def test_what_the_model_cannot_take_is_refused_at_the_border(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_loops=lambda n: 9, max_length=5)
    bad: list[tuple[Request, type[Exception], str]] = [
        (Request(()), LengthError, "1 to 5 tokens, got 0"),
        (Request((1,) * 6), LengthError, "got 6"),
        (Request((0, VOCABULARY)), UnknownSymbol, "0 to 5, got 6"),
        (Request((0, -1)), UnknownSymbol, "got -1"),
        (Request((1,)), InputError, "needs a measured speed"),
        (Request((1,), parse_halting("fixed:10")), InputError, "at most 9"),
        (Request((1,), parse_halting("fixed:3"), accuracy_floor=1.5), InputError, "between 0 and 1"),
        (Request((1,), parse_halting("fixed:3"), deadline_s=0.0), InputError, "above 0"),
    ]
    for request, error, message in bad:
        with pytest.raises(error, match=message):
            engine.submit(request)
    assert not engine.busy
    assert engine.stats.submitted == 0
    with pytest.raises(UnknownSymbol):
        engine.run([Request((1,), parse_halting("fixed:3")), Request((99,), parse_halting("fixed:3"))])
    assert not engine.busy
    with pytest.raises(InputError, match="max_rows"):
        LoopBatchEngine(stepper(kind), max_rows=0)


def test_an_untied_model_has_no_more_loops_than_weights() -> None:
    engine = LoopBatchEngine(stepper("untied"), max_loops=lambda n: 1000)
    with pytest.raises(InputError, match="at most 30"):
        engine.submit(Request((1,), parse_halting("fixed:31")))


@both
def test_cancelling_frees_the_place_at_the_next_tick(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_rows=2, max_loops=lambda n: 20)
    first, second, third = (engine.submit(Request((i, 1), parse_halting("fixed:9"))) for i in range(3))
    engine.tick()
    assert engine.cancel(first)
    assert engine.cancel(first)  # still open until the tick
    (said,) = engine.tick()
    assert isinstance(said, Finished)
    assert (said.ticket, said.exit_reason, said.outputs, said.loops_used) == (first, "cancelled", None, 1)
    assert engine.live == 2  # the third joined
    assert not engine.cancel(first)
    answers = {one.ticket: one for one in drain(engine)}
    assert answers[second].outputs == alone(kind, Request((1, 1), parse_halting("fixed:9"))).outputs
    assert answers[third].outputs == alone(kind, Request((2, 1), parse_halting("fixed:9"))).outputs
    waiting = engine.submit(Request((1,), parse_halting("fixed:9")))
    assert engine.cancel(waiting)
    assert [one.loops_used for one in drain(engine)] == [0]


@both
def test_a_deadline_ends_waiting_and_live_rows_without_an_answer(kind: str) -> None:
    clock = VirtualClock(100.0)
    engine = LoopBatchEngine(stepper(kind), max_rows=1, max_loops=lambda n: 20, clock=clock)
    live = engine.submit(Request((1, 2), parse_halting("fixed:20"), deadline_s=2.5))
    waits = engine.submit(Request((1, 2), parse_halting("fixed:20"), deadline_s=1.5))
    fine = engine.submit(Request((1, 2), parse_halting("fixed:1"), deadline_s=60.0))
    ended: dict[Ticket, Finished] = {}
    while engine.busy:
        ended |= {event.ticket: event for event in engine.tick() if isinstance(event, Finished)}
        clock.advance(1.0)
    assert [(ended[one].exit_reason, ended[one].loops_used) for one in (live, waits, fine)] == [
        ("deadline", 3),
        ("deadline", 0),
        ("fixed", 1),
    ]
    assert ended[live].outputs is None
    assert (ended[live].queue_s, ended[live].compute_s) == (0.0, 3.0)
    assert ended[waits].queue_s == 2.0
    assert ended[fine].queue_s == 3.0


def test_a_row_that_raises_ends_alone() -> None:
    def behaviour(word: tuple[int, ...]) -> Recorded:
        return Recorded(exit=4, outputs=word, fails_at=2 if word[0] == 5 else None)

    engine = LoopBatchEngine(TraceStepper(behaviour, vocabulary=VOCABULARY), max_loops=lambda n: 9)
    answers = engine.run(Request((first, 1), parse_halting("fixed:4")) for first in (1, 5, 2, 5, 3))
    assert [one.exit_reason for one in answers] == ["fixed", "error", "fixed", "error", "fixed"]
    assert [one.loops_used for one in answers] == [4, 1, 4, 1, 4]
    assert answers[1].error == "RuntimeError: recorded failure of (5, 1)"
    assert answers[2].outputs == (2, 1)


def test_a_row_that_cannot_be_admitted_ends_alone() -> None:
    known = {(1, 1): Recorded(2, (3, 3)), (2, 2): Recorded(2, (4, 4))}
    engine = LoopBatchEngine(TraceStepper(known, vocabulary=VOCABULARY), max_loops=lambda n: 9)
    answers = engine.run(Request(word, parse_halting("fixed:2")) for word in [(1, 1), (5, 5), (2, 2)])
    assert [one.outputs for one in answers] == [(3, 3), None, (4, 4)]
    assert answers[1].error is not None
    assert answers[1].error.startswith("KeyError")


@pytest.mark.parametrize("rule", ["fixed:4", "converged", "kl", "argmax_stable:9"])
def test_a_row_that_is_no_longer_finite_ends_alone(rule: str) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.embedding_VD[5] = float("nan")
    spec = parse_halting(rule).model_copy(update={"max_loops": 6})
    engine = LoopBatchEngine(ModelStepper(model), max_loops=lambda n: 9)
    answers = engine.run(Request(word, spec) for word in [(1, 2), (5, 2), (3, 4)])
    assert answers[1].exit_reason == "error"
    assert answers[1].outputs is None
    assert "not finite" in str(answers[1].error)
    for word, answer in (((1, 2), answers[0]), ((3, 4), answers[2])):
        assert answer.outputs == LoopBatchEngine(ModelStepper(model), max_loops=lambda n: 9).run([Request(word, spec)])[0].outputs


class Crowded(LoopedTransformer):
    """Cannot compute more than two rows at once, as a device that is out of memory."""

    def loop(self, h_BPD: torch.Tensor, e_BPD: torch.Tensor, t: int) -> torch.Tensor:
        if h_BPD.shape[0] > 2:
            raise MemoryError("too many rows")
        return super().loop(h_BPD, e_BPD, t)


def test_a_pass_that_fails_for_the_batch_is_repeated_row_by_row() -> None:
    model = tiny_model()
    model.__class__ = Crowded
    asked = [Request((i % 6, 1), RULES[4]) for i in range(5)]
    answers = LoopBatchEngine(ModelStepper(model), profile=PROFILE, max_loops=lambda n: 20).run(asked)
    assert [(one.outputs, one.loops_used) for one in answers] == [
        (alone("pre", one).outputs, alone("pre", one).loops_used) for one in asked
    ]


def shed_engine(kind: str, crowded: bool) -> LoopBatchEngine:
    return LoopBatchEngine(stepper(kind), profile=PROFILE, pressure=lambda engine: crowded)


@both
def test_under_pressure_rows_that_allow_it_leave_at_their_floor(kind: str) -> None:
    """Token accuracy of a word of eight is measured as t / 8 after t loops; T* is 9."""
    asked = [Request((1,) * 8, accuracy_floor=floor) for floor in (0.5, 0.8, 1.0, None)]
    calm = shed_engine(kind, False).run(asked)
    assert [(one.exit_reason, one.loops_used) for one in calm] == [("rule", 9)] * 4
    crowded = shed_engine(kind, True).run(asked)
    assert [(one.exit_reason, one.loops_used, one.expected_accuracy) for one in crowded] == [
        ("shed", 4, 0.5),
        ("shed", 7, 0.875),
        ("shed", 8, 1.0),
        ("rule", 9, 1.0),
    ]
    assert crowded[0].loops_planned == 9
    assert crowded[0].outputs == alone(kind, Request((1,) * 8, parse_halting("fixed:4"))).outputs


@both
def test_nothing_is_shed_where_nothing_was_measured(kind: str) -> None:
    asked = [Request((1,) * 9, accuracy_floor=0.1), Request((1,) * 8, HaltingSpec(min_loops=6), accuracy_floor=0.1)]
    answers = shed_engine(kind, True).run(asked)
    assert [(one.exit_reason, one.loops_used, one.expected_accuracy) for one in answers] == [
        ("rule", 10, None),
        ("shed", 6, 0.75),
    ]
    unmeasured = LoopBatchEngine(stepper(kind), pressure=lambda engine: True, max_loops=lambda n: 9)
    answer = unmeasured.run([Request((1, 2), parse_halting("fixed:5"), accuracy_floor=0.0)])[0]
    assert (answer.exit_reason, answer.loops_used, answer.expected_accuracy) == ("fixed", 5, None)


@both
def test_pressure_is_a_line_half_full(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, queue_limit=8)
    for _ in range(4):
        engine.submit(Request((1,) * 8, accuracy_floor=0.25))
    engine.tick()
    assert engine.waiting == 3
    assert [one.exit_reason for one in drain(engine)] == ["rule"] * 4
    for _ in range(6):
        engine.submit(Request((1,) * 8, accuracy_floor=0.25))
    # Five wait while the first loops, four while the second does; then the line is no longer half full.
    assert [one.exit_reason for one in drain(engine)] == ["shed", "shed", "rule", "rule", "rule", "rule"]
