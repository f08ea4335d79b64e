"""The batching engine: one suite that a real model and a recorded trace both pass, then what each shows best."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopcore.batching import (
    Finished,
    LoopBatchEngine,
    LoopEvent,
    ModelStepper,
    Recorded,
    Request,
    Stepper,
    Ticket,
    TraceStepper,
    VirtualClock,
)
from loopcore.batching.admission import Waiting
from loopcore.errors import InputError, LengthError, QueueFull, UnknownSymbol
from loopcore.halting import HaltingProfile
from loopcore.model import LoopedTransformer
from loopcore.scaling import multipliers
from loopcore.specs import HaltingSpec, ModelSpec, ScalingSpec, parse_halting

VOCABULARY = 6
PROFILE = HaltingProfile(
    v=1.0,
    v_low=0.9,
    v_high=1.1,
    burn_in=1,
    lengths=(1, 8),
    accuracy_TN=tuple(tuple(min(1.0, (t + 1) / (i + 1)) for i in range(8)) for t in range(12)),
    exact_TN=tuple(tuple(float(t >= i) for i in range(8)) for t in range(12)),
    words=64,
)


def tiny_model(**fields: Any) -> LoopedTransformer:
    spec = ModelSpec(width=16, heads=2, readout_init="normal", **fields)
    scale = multipliers(ScalingSpec(base_width=16, rule="deeploop" if spec.norm == "post" else "standard"), spec, 8)
    return LoopedTransformer(
        spec, vocabulary=VOCABULARY, classes=VOCABULARY, multipliers=scale, seed=3, untied_loops=None if spec.tied else 30
    )


MODELS = {
    "pre": tiny_model(),
    "post": tiny_model(norm="post", injection="add"),
    "bidirectional": tiny_model(causal=False, norm="post"),
    "learned": tiny_model(positions="learned", max_length=9),
    "untied": tiny_model(tied=False, positions="scan_offset"),
}


def recorded(word: tuple[int, ...]) -> Recorded:
    """A behaviour that depends on the word alone."""
    return Recorded(exit=1 + (7 * sum(word) + len(word)) % 9, outputs=tuple(reversed(word)))


def stepper(kind: str) -> Stepper:
    if kind == "trace":
        return TraceStepper(recorded, vocabulary=VOCABULARY, pads=True)
    return ModelStepper(MODELS[kind])


EVERY_KIND = ["trace", *MODELS]
both = pytest.mark.parametrize("kind", ["trace", "pre"])
RULES = [
    HaltingSpec(kind="rule"),
    HaltingSpec(kind="rule", min_loops=4, max_loops=5),
    parse_halting("fixed:1"),
    parse_halting("fixed:7"),
    HaltingSpec(kind="converged", threshold=0.2, max_loops=12),
    HaltingSpec(kind="converged", threshold=0.4, check_every=2, min_loops=2),
    HaltingSpec(kind="cosine", threshold=0.05, max_loops=15),
    HaltingSpec(kind="entropy", threshold=0.02, max_loops=15),
    HaltingSpec(kind="kl", threshold=0.01, min_loops=3, max_loops=15),
    HaltingSpec(kind="argmax_stable", threshold=2, max_loops=15),
    HaltingSpec(kind="argmax_stable", threshold=3, check_every=2, max_loops=15),
]


def alone(kind: str, request: Request) -> Finished:
    return LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, max_loops=lambda n: 20).run([request])[0]


def told_alone(kind: str, request: Request) -> list[LoopEvent]:
    engine = LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, max_loops=lambda n: 20)
    engine.submit(request)
    return [event for _ in range(20) for event in engine.tick() if isinstance(event, LoopEvent)]


def drain(engine: LoopBatchEngine) -> list[Finished]:
    found: list[Finished] = []
    for _ in range(10_000):
        if not engine.busy:
            return found
        found.extend(event for event in engine.tick() if isinstance(event, Finished))
    raise AssertionError("the engine does not come to an end")


@dataclasses.dataclass(frozen=True)
class Arrival:
    tick: int
    request: Request
    cancelled_after: int | None


tokens = st.integers(0, VOCABULARY - 1)
words = st.lists(tokens, min_size=1, max_size=8).map(tuple) | st.lists(tokens, min_size=3, max_size=3).map(tuple)  # some to share
requests = st.builds(Request, tokens=words, halting=st.sampled_from(RULES), trace=st.booleans(), logits=st.booleans())
arrivals = st.lists(
    st.builds(Arrival, tick=st.integers(0, 12), request=requests, cancelled_after=st.none() | st.integers(0, 6)),
    min_size=1,
    max_size=12,
)


@pytest.mark.parametrize("kind", EVERY_KIND)
@settings(max_examples=25, deadline=None)
@given(
    arrivals=arrivals,
    max_rows=st.integers(1, 12),
    refill=st.booleans(),
    width=st.integers(1, 4),
    bypass=st.integers(0, 3),
)
def test_an_answer_is_that_of_the_row_alone(
    kind: str, arrivals: list[Arrival], max_rows: int, refill: bool, width: int, bypass: int
) -> None:
    """Whatever arrives before, with and after it, whatever leaves: same loops, same reason, same prediction, same logits."""
    engine = LoopBatchEngine(
        stepper(kind),
        profile=PROFILE,
        max_rows=max_rows,
        refill=refill,
        bucket_width=width,
        bypass_limit=bypass,
        max_loops=lambda n: 20,
    )
    asked: dict[Ticket, Arrival] = {}
    cancels: dict[int, list[Ticket]] = {}
    finished: dict[Ticket, Finished] = {}
    traced: dict[Ticket, list[LoopEvent]] = {}
    for now in range(400):
        for arrival in arrivals:
            if arrival.tick == now:
                ticket = engine.submit(arrival.request)
                asked[ticket] = arrival
                if arrival.cancelled_after is not None:
                    cancels.setdefault(now + arrival.cancelled_after, []).append(ticket)
        for ticket in cancels.get(now, ()):
            assert engine.cancel(ticket) == (ticket not in finished)
        for event in engine.tick():
            if isinstance(event, LoopEvent):
                assert event.ticket not in finished
                traced.setdefault(event.ticket, []).append(event)
            else:
                assert event.ticket not in finished, "finished twice"
                finished[event.ticket] = event
        assert engine.live <= max_rows
        if now > 12 and not engine.busy:
            break
    assert finished.keys() == asked.keys()

    for ticket, got in finished.items():
        if got.exit_reason == "cancelled":
            assert asked[ticket].cancelled_after is not None
            assert got.outputs is None
            continue
        expected = alone(kind, asked[ticket].request)
        assert (got.outputs, got.loops_used, got.exit_reason) == (expected.outputs, expected.loops_used, expected.exit_reason)
        assert got.error is None
        if expected.logits is not None:
            assert got.logits.shape == (ticket.length, VOCABULARY)
            np.testing.assert_allclose(got.logits, expected.logits, atol=1e-5, rtol=0)
        if asked[ticket].request.trace:
            told, reference = traced[ticket], told_alone(kind, asked[ticket].request)
            assert [(one.loop, one.prediction, one.settled) for one in told] == [
                (i.loop, i.prediction, i.settled) for i in reference
            ]
            assert [one.residual for one in told] == pytest.approx([one.residual for one in reference], abs=1e-5)
            assert [one.loop for one in told] == list(range(1, got.loops_used + 1))
            assert told[-1].prediction == got.outputs
        else:
            assert ticket not in traced

    if width == 1 or kind == "bidirectional":
        assert engine.stats.padded_token_loops == 0
    assert sum(engine.stats.reasons.values()) == len(asked)
    assert sum(engine.stats.exits.values()) == sum(one.outputs is not None for one in finished.values())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("loops", [1, 4, 9])
def test_the_answer_is_that_of_the_model_called_directly(name: str, loops: int) -> None:
    generator = random.Random(loops)
    asked = [tuple(generator.choices(range(VOCABULARY), k=generator.randint(1, 8))) for _ in range(17)]
    engine = LoopBatchEngine(ModelStepper(MODELS[name]), max_rows=5, max_loops=lambda n: 9)
    answers = engine.run(Request(word, parse_halting(f"fixed:{loops}"), logits=True) for word in asked)
    for word, answer in zip(asked, answers, strict=True):
        with torch.no_grad():
            logits_NV = MODELS[name](torch.tensor([word]), loops)[0]
        assert answer.outputs == tuple(logits_NV.argmax(-1).tolist())
        np.testing.assert_allclose(answer.logits, logits_NV.numpy(), atol=1e-5, rtol=0)


def by_hand(name: str, word: tuple[int, ...], spec: HaltingSpec) -> int:
    """The loop a rule ends at, from a plain forward pass and the rule's words."""
    with torch.no_grad():
        states = MODELS[name](torch.tensor([word]), 15, trace=True).states
        logits = [MODELS[name].readout(h_BPD)[0] for h_BPD in states]
    h = [h_BPD[0, 1:] for h_BPD in states]
    p = [logits_NV.softmax(-1) for logits_NV in logits]
    entropy = [-(p_NV * p_NV.log()).sum(-1) for p_NV in p]
    threshold, quiet = spec.effective_threshold, 0
    assert threshold is not None
    for t in range(1, 16):
        before = t - spec.check_every
        if t % spec.check_every or (before < 1 and spec.kind in ("entropy", "kl", "argmax_stable")):
            continue
        if spec.kind == "converged":
            step = h[t] - h[t - 1]
            turn = step - (h[t - 1] - h[t - 2]) if t > 1 else step
            change = (torch.stack([step.norm(dim=-1), turn.norm(dim=-1)]) / h[t - 1].norm(dim=-1)).max()
        elif spec.kind == "cosine":
            change = 1 - torch.cosine_similarity(h[t], h[t - 1], dim=-1).min()
        elif spec.kind == "entropy":
            change = (entropy[t] - entropy[before]).abs().max()
        elif spec.kind == "kl":
            change = torch.nn.functional.kl_div(p[before].log(), p[t], reduction="none").sum(-1).max()
        else:
            quiet = quiet + 1 if torch.equal(p[t].argmax(-1), p[before].argmax(-1)) else 0
            change = torch.tensor(threshold - 1 if quiet >= threshold else threshold)
        if change < threshold and t >= spec.min_loops:
            return t
    return 15


@pytest.mark.parametrize("name", ["pre", "post", "bidirectional"])
def test_every_rule_ends_a_row_where_its_words_say(name: str) -> None:
    generator = random.Random(7)
    asked = [
        Request(
            tuple(generator.choices(range(VOCABULARY), k=generator.randint(1, 6))),
            HaltingSpec(kind=kind, threshold=threshold, check_every=every, max_loops=15),  # pyright: ignore[reportArgumentType]
        )
        for kind, thresholds in {
            "converged": (0.5, 0.2, 0.1),
            "cosine": (0.1, 0.01, 0.003),
            "entropy": (0.1, 0.02, 0.003),
            "kl": (0.1, 0.01, 0.001),
            "argmax_stable": (1, 2, 5),
        }.items()
        for threshold in thresholds
        for every in (1, 2, 3)
        for _ in range(2)
    ]
    answers = LoopBatchEngine(ModelStepper(MODELS[name]), max_rows=7, max_loops=lambda n: 15).run(asked)
    used = [one.loops_used for one in answers]
    assert used == [by_hand(name, one.tokens, one.halting) for one in asked]
    assert len(set(used)) > 6  # the thresholds tell rows apart


@both
def test_known_exits_need_no_check_and_one_readout(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), profile=PROFILE)
    answers = engine.run([Request((1, 2, 3)), Request((3, 2, 1, 0)), Request((2, 2, 2), parse_halting("fixed:2"))])
    # T* = n / 1 + 1.
    assert [(one.loops_used, one.loops_planned, one.exit_reason) for one in answers] == [
        (4, 4, "rule"),
        (5, 5, "rule"),
        (2, 2, "fixed"),
    ]
    assert engine.stats.check_rows == 0
    assert engine.stats.readout_rows == 3
    assert engine.stats.exits == {4: 1, 5: 1, 2: 1}


@both
def test_a_rule_that_looks_at_predictions_reads_out_when_it_is_due(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_loops=lambda n: 12)
    answer = engine.run([Request((1, 2, 3), HaltingSpec(kind="argmax_stable", threshold=50, check_every=4))])[0]
    assert (answer.loops_used, answer.exit_reason) == (12, "max_loops")
    assert engine.stats.check_rows == 3
    assert engine.stats.readout_rows == 3
    engine = LoopBatchEngine(stepper(kind), max_loops=lambda n: 12)
    engine.run([Request((1, 2, 3), HaltingSpec(kind="converged", threshold=1e-9, check_every=4, max_loops=3))])
    assert (engine.stats.check_rows, engine.stats.readout_rows) == (0, 1)


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


@both
def test_a_traced_row_tells_every_loop(kind: str) -> None:
    engine = LoopBatchEngine(stepper(kind), max_loops=lambda n: 9)
    engine.submit(Request((1, 2, 3), parse_halting("fixed:4")))
    traced = engine.submit(Request((3, 2, 1), parse_halting("fixed:5"), trace=True))
    events = [event for _ in range(6) for event in engine.tick() if event.ticket == traced]
    told, last = events[:-1], events[-1]
    assert isinstance(last, Finished)
    before: tuple[int, ...] | None = None
    for loop, event in enumerate(told, 1):
        assert isinstance(event, LoopEvent)
        assert event.loop == loop
        settled = 0
        while before is not None and settled < 3 and before[settled] == event.prediction[settled]:
            settled += 1
        assert event.settled == settled
        before = event.prediction
        if kind == "pre":
            with torch.no_grad():
                states = MODELS["pre"](torch.tensor([[3, 2, 1]]), loop, trace=True).states
            h, h1, h2 = states[-1], states[-2], states[-3] if loop > 1 else states[-2]
            step, turn = (h - h1)[0, 1:].norm(dim=-1), (h - 2 * h1 + h2)[0, 1:].norm(dim=-1)
            assert event.residual == pytest.approx(float((torch.maximum(step, turn) / h1[0, 1:].norm(dim=-1)).max()), rel=1e-4)
    assert len(told) == 5
    assert last.outputs == before


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


def test_scheduling_needs_no_torch(run_python: Callable[[str], Any]) -> None:
    code = "import sys; from loopcore.batching import LoopBatchEngine, TraceStepper; sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def test_every_exported_name_is_there() -> None:
    import loopcore.batching as public

    names: Sequence[str] = public.__all__
    assert all(hasattr(public, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = public.Nothing  # pyright: ignore[reportAttributeAccessIssue]
