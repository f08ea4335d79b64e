"""The looped transformer: what it may look at, its loops, its weights, what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from loopcore.block import ADDRESSED, Block
from loopcore.errors import InputError, LengthError
from loopcore.model import LoopedTransformer, build_model
from loopcore.scaling import multipliers
from loopcore.specs import ModelSpec, ScalingSpec, TrainSpec
from tests.unit.small_models import CLASSES, changed_at, make, some_tokens

EVERY_POSITION = ["none", "learned", "rope", "scan_offset"]


# What may depend on what


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", EVERY_POSITION)
def test_a_causal_model_never_looks_ahead(positions: str, tied: bool) -> None:
    model = make(positions=positions, tied=tied, blocks=2)
    tokens_BN = some_tokens(8)
    before_BNV = model(tokens_BN, 4)
    for position in (0, 3, 7):
        after_BNV = model(changed_at(tokens_BN, position), 4)
        assert torch.equal(before_BNV[:, :position], after_BNV[:, :position])
        assert not torch.equal(before_BNV[:, position], after_BNV[:, position])


def test_a_model_that_is_not_causal_looks_ahead() -> None:
    model, tokens_BN = make(causal=False), some_tokens(8)
    assert not torch.equal(model(tokens_BN, 1)[:, 0], model(changed_at(tokens_BN, 7), 1)[:, 0])


def test_equal_tokens_can_only_be_counted_with_bos() -> None:
    """Without positions, attention over a, a a, a a a is one and the same average, unless something else comes first."""
    tokens_BN = torch.full((1, 6), 2)
    without = make(bos=False)(tokens_BN, 3)[0]
    torch.testing.assert_close(without, without[:1].expand_as(without), atol=1e-5, rtol=1e-5)
    with_bos = make(bos=True)(tokens_BN, 3)[0]
    assert all((after - before).abs().max() > 1e-3 for before, after in pairwise(with_bos))


def test_bos_is_dropped_from_the_answer() -> None:
    assert make(bos=True)(some_tokens(6), 2).shape == (3, 6, CLASSES)
    assert make(bos=False)(some_tokens(6), 2).shape == (3, 6, CLASSES)


def test_scan_offset_marks_exactly_the_position_two_to_the_t_before() -> None:
    model = make(positions="scan_offset")
    for t, marked in [
        (0, {(1, 0), (2, 1), (3, 2), (4, 3), (5, 4)}),
        (1, {(2, 0), (3, 1), (4, 2), (5, 3)}),
        (2, {(4, 0), (5, 1)}),
        (3, set()),
        (40, set()),
    ]:
        addressed_PP = model.sight(6, torch.device("cpu"), t).addressed_PP
        assert addressed_PP is not None
        assert {tuple(pair) for pair in addressed_PP.nonzero().tolist()} == marked
    block = model.blocks[0]
    assert isinstance(block, Block)
    assert block.address_H.tolist() == [ADDRESSED, 0.0]


def test_scan_offset_taken_to_its_limit_is_a_scan() -> None:
    """With a large score a position hears itself and i - 2^t alone, and three loops carry all of 8 inputs to the last."""
    model = make(positions="scan_offset")
    with torch.no_grad():
        model.blocks[0].address_H.fill_(1e6)  # pyright: ignore
    generator = torch.Generator().manual_seed(4)
    for t in range(3):
        h_BPD = torch.randn(1, 9, 16, generator=generator, requires_grad=True)
        out_BPD = model.loop(h_BPD, torch.zeros_like(h_BPD), t)
        for i in range(2**t, 9):
            (slope_BPD,) = torch.autograd.grad(out_BPD[0, i].square().sum(), h_BPD, retain_graph=True)
            assert set(slope_BPD[0].abs().sum(-1).nonzero().flatten().tolist()) == {i, i - 2**t}
    h_BPD = torch.randn(1, 8, 16, generator=generator, requires_grad=True)
    state = h_BPD
    for t in range(3):
        state = model.loop(state, torch.zeros_like(state), t)
    (slope_BPD,) = torch.autograd.grad(state[0, 7].square().sum(), h_BPD)
    assert (slope_BPD[0].abs().sum(-1) > 0).all()


@pytest.mark.parametrize(
    ("reveal", "first_state"),
    [
        # State k has been through loops 0 .. k-1; loop t shows the first floor(r (t + 1)) inputs; state 0 shows what loop 0 does.
        (1.0, [0, 2, 3, 4, 5, 6]),
        (0.5, [2, 4, 6, None, None, None]),
        (2.0, [0, 0, 2, 2, 3, 3]),
    ],
)
@pytest.mark.parametrize("injection", ["add", "linear"])
def test_a_streamed_input_is_invisible_until_its_loop(reveal: float, first_state: list[int | None], injection: str) -> None:
    """First state that differs when input i is another token; the model looks ahead, so nothing but the schedule hides it."""
    model, tokens_BN = make(causal=False, injection=injection), some_tokens(6)
    states = model(tokens_BN, 6, reveal_per_loop=reveal, trace=True).states
    for i, expected in enumerate(first_state):
        others = model(changed_at(tokens_BN, i), 6, reveal_per_loop=reveal, trace=True).states
        differing = [k for k, (one, other) in enumerate(zip(states, others, strict=True)) if not torch.equal(one, other)]
        assert differing == ([] if expected is None else list(range(expected, 7)))


def test_a_schedule_that_has_shown_everything_is_no_schedule() -> None:
    model, tokens_BN = make(), some_tokens(6)
    assert torch.equal(model(tokens_BN, 3, reveal_per_loop=6.0), model(tokens_BN, 3))


# Loops


def test_a_tied_model_has_the_same_weights_at_every_loop_count() -> None:
    model = make(blocks=2)
    assert len(model.blocks) == 2
    few, many = (model(some_tokens(5), loops, trace=True).states for loops in (3, 6))
    assert all(torch.equal(one, other) for one, other in zip(few, many[:4], strict=True))


def test_an_untied_model_has_blocks_of_its_own_for_every_loop() -> None:
    model = make(tied=False, blocks=2, loops=3)
    assert len(model.blocks) == 6
    assert len({block.query.weight[0, 0].item() for block in model.blocks}) == 6  # pyright: ignore
    tied = make(tied=True, blocks=2, loops=3)
    count = {model: sum(p.numel() for p in model.parameters()) for model in (model, tied)}
    # Width 16: 12 * 256 in matrices and 4 * 16 in norms a block, 2 * 256 in an injection.
    assert count[model] - count[tied] == 4 * (12 * 256 + 64) + 2 * 512


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("positions", EVERY_POSITION)
def test_loop_by_loop_is_the_forward_pass(positions: str, tied: bool) -> None:
    model, tokens_BN = make(positions=positions, tied=tied, blocks=2), some_tokens(5)
    e_BPD = model.embed(tokens_BN)
    h_BPD = model.start(e_BPD)
    states = [h_BPD]
    for t in range(4):
        h_BPD = model.loop(h_BPD, e_BPD, t)
        states.append(h_BPD)
    trace = model(tokens_BN, 4, trace=True)
    assert torch.equal(model.readout(h_BPD), model(tokens_BN, 4))
    assert torch.equal(trace.logits_BNV, model(tokens_BN, 4))
    assert len(trace.states) == 5
    assert trace.states[0].shape == (3, 6, 16)
    for streamed in (trace.states, model.iterate(tokens_BN, 4)):
        assert all(torch.equal(one, other) for one, other in zip(streamed, states, strict=True))


@pytest.mark.parametrize(
    ("fields", "free"),
    [({}, True), ({"positions": "rope"}, True), ({"positions": "scan_offset"}, False), ({"tied": False}, False)],
)
def test_a_loop_that_ignores_its_number_says_so(fields: dict[str, Any], free: bool) -> None:
    model = make(**fields)
    assert model.position_free_of_loop is free
    e_BPD = model.embed(some_tokens(5))
    assert torch.equal(model.loop(e_BPD, e_BPD, 0), model.loop(e_BPD, e_BPD, 2)) is free


# Seeds and precision


def test_weights_depend_on_the_seed_and_on_nothing_else() -> None:
    def weights(seed: int) -> Tensor:
        return torch.cat([p.detach().flatten() for p in make(seed=seed, positions="learned", blocks=2).parameters()])

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = weights(0)
    assert torch.equal(torch.rand(3), expected), "making a model must not use the global generator"
    assert torch.equal(first, weights(0))
    assert not torch.equal(first, weights(1))
    assert first.isfinite().all()


def test_the_model_of_a_run_is_a_function_of_its_spec() -> None:
    class Sizes:
        vocabulary, classes = 6, 6

    spec = TrainSpec.model_validate({"seed": 3, "model": {"tied": False}, "scaling": {"rule": "loop_mup"}})
    one, other = build_model(spec, Sizes()), build_model(spec, Sizes())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
    # The contract's longest word is 8, at one loop a position: 8 loops, whose multiplier is 1/8.
    assert (one.untied_loops, one.scale.branch, len(one.blocks)) == (8, 1 / 8, 8)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("positions", ["rope", "scan_offset"])
def test_the_state_stays_in_full_precision_under_autocast(positions: str, norm: str) -> None:
    model, tokens_BN = make(positions=positions, norm=norm), some_tokens(5)
    exact = model(tokens_BN, 3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = model(tokens_BN, 3, trace=True)
    assert {state.dtype for state in trace.states} == {torch.float32}
    torch.testing.assert_close(trace.logits_BNV.float(), exact, atol=0.15, rtol=0.1)
    trace.logits_BNV.float().square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


# What is refused


@pytest.mark.parametrize(
    ("fields", "call", "error", "message"),
    [
        ({}, lambda model: model(some_tokens(3), 0), InputError, "at least 1 loop, got 0"),
        ({}, lambda model: model.iterate(some_tokens(3), -1), InputError, "at least 1 loop, got -1"),
        ({}, lambda model: model(some_tokens(3)[:, :0], 1), LengthError, "input is empty"),
        (
            {"positions": "learned", "max_length": 4},
            lambda model: model(some_tokens(5), 1),
            LengthError,
            "5 tokens, the model's learned positions reach 4",
        ),
        ({"tied": False}, lambda model: model(some_tokens(3), 5), LengthError, "weights for 4 loops, 5 were asked for"),
        (
            {"tied": False},
            lambda model: model.loop(model.embed(some_tokens(3)), model.embed(some_tokens(3)), 4),
            LengthError,
            "weights for 4 loops, 5 were asked for",
        ),
        ({"injection": "none"}, lambda model: model(some_tokens(3), 2, reveal_per_loop=1.0), InputError, "and an injection"),
        ({}, lambda model: model(some_tokens(3), 2, reveal_per_loop=0.0), InputError, "positive number of inputs a loop"),
    ],
)
def test_what_cannot_be_is_refused(
    fields: dict[str, Any], call: Callable[[LoopedTransformer], object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(make(**fields))


def test_the_longest_input_and_the_last_loop_are_taken() -> None:
    assert make(positions="learned", max_length=4)(some_tokens(4), 1).shape == (3, 4, CLASSES)
    assert make(tied=False)(some_tokens(4), 4).shape == (3, 4, CLASSES)


def test_an_untied_model_without_a_loop_count_is_refused() -> None:
    spec = ModelSpec(tied=False)
    scale = multipliers(ScalingSpec(), spec, 2)
    with pytest.raises(InputError, match="needs its number of loops"):
        LoopedTransformer(spec, vocabulary=3, classes=3, multipliers=scale)
    with pytest.raises(InputError, match="a tied one takes none"):
        LoopedTransformer(ModelSpec(), vocabulary=3, classes=3, multipliers=scale, untied_loops=2)
