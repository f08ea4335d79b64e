"""The answers of the batching engine: one suite that a real model and a recorded trace both pass."""

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
    Request,
    Ticket,
)
from loopcore.specs import HaltingSpec, parse_halting
from tests.unit.loop_rows import (
    EVERY_KIND,
    MODELS,
    PROFILE,
    RULES,
    VOCABULARY,
    alone,
    both,
    stepper,
    told_alone,
)


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


def test_scheduling_needs_no_torch(run_python: Callable[[str], Any]) -> None:
    code = "import sys; from loopcore.batching import LoopBatchEngine, TraceStepper; sys.exit('torch' in sys.modules)"
    assert run_python(code).returncode == 0


def test_every_exported_name_is_there() -> None:
    import loopcore.batching as public

    names: Sequence[str] = public.__all__
    assert all(hasattr(public, name) for name in names)
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = public.Nothing  # pyright: ignore[reportAttributeAccessIssue]
