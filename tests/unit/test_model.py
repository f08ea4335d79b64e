"""The looped transformer: what it computes, what it may look at, how it starts."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from loopcore.block import ADDRESSED, Block, Sight, attend, rotate, rotation
from loopcore.errors import InputError, LengthError
from loopcore.model import LoopedTransformer, build_model
from loopcore.scaling import multipliers
from loopcore.specs import ModelSpec, ScalingSpec, TrainSpec

VOCABULARY, CLASSES = 7, 5
EVERY_POSITION = ["none", "learned", "rope", "scan_offset"]


def make(
    *, rule: str = "standard", loops: int = 4, seed: int = 0, exponent: float | None = None, **fields: Any
) -> LoopedTransformer:
    """A small model with a readout that is not zero, its multipliers computed for `loops`."""
    spec = ModelSpec.model_validate({"width": 16, "heads": 2, "readout_init": "normal", **fields})
    scaling = ScalingSpec.model_validate({"rule": rule, "base_width": 16, "exponent": exponent})
    return LoopedTransformer(
        spec,
        vocabulary=VOCABULARY,
        classes=CLASSES,
        multipliers=multipliers(scaling, spec, loops),
        untied_loops=None if spec.tied else loops,
        seed=seed,
    )


def some_tokens(length: int, rows: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def changed_at(tokens_BN: Tensor, position: int) -> Tensor:
    """The same tokens with another one at `position`, in every row."""
    other_BN = tokens_BN.clone()
    other_BN[:, position] = (other_BN[:, position] + 1) % VOCABULARY
    return other_BN


# Attention


def test_equal_scores_average_what_is_visible() -> None:
    q_BHPK = torch.zeros(1, 1, 3, 1)
    v_BHPK = torch.tensor([3.0, 9.0, 0.0]).view(1, 1, 3, 1)
    assert attend(q_BHPK, q_BHPK, v_BHPK, causal=True).flatten().tolist() == [3.0, 6.0, 4.0]
    assert attend(q_BHPK, q_BHPK, v_BHPK, causal=False).flatten().tolist() == [4.0, 4.0, 4.0]


def test_scores_are_divided_by_the_root_of_the_head_width() -> None:
    """K = 4, q = k_1 = (1, 1, 1, 1), k_0 = 0: scores 0 and 4 / 2, so position 1 weighs e^2 against 1."""
    q_BHPK = torch.ones(1, 1, 2, 4)
    k_BHPK = torch.stack([torch.zeros(4), torch.ones(4)]).view(1, 1, 2, 4)
    v_BHPK = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 4)
    weight = math.e**2 / (1 + math.e**2)
    assert attend(q_BHPK, k_BHPK, v_BHPK, causal=False)[0, 0, 1, 0].item() == pytest.approx(weight)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("positions", [9, 520])
def test_every_way_of_attending_is_the_formula(
    positions: int, dtype: torch.dtype, tolerance: float, with_bias: bool, causal: bool
) -> None:
    """Values and gradients against the formula in double precision; the cases take the fused kernel and the written-out one."""
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(1, 2, positions, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3)]
    biases = [torch.randn(2, positions, positions, generator=generator).requires_grad_()] if with_bias else []
    exact = [x.detach().double().requires_grad_() for x in inputs + biases]

    scores = exact[0] @ exact[1].mT / math.sqrt(8) + (exact[3] if with_bias else 0.0)
    if causal:
        scores = scores.masked_fill(~torch.ones(positions, positions).tril().bool(), -math.inf)
    expected = scores.softmax(-1) @ exact[2]
    got = attend(*inputs, causal=causal, bias_HPP=biases[0] if with_bias else None)

    torch.testing.assert_close(got.double(), expected, atol=tolerance, rtol=tolerance)
    expected.square().sum().backward()
    got.square().sum().backward()
    for x, x_exact in zip(inputs + biases, exact, strict=True):
        assert x.grad is not None
        assert x_exact.grad is not None
        torch.testing.assert_close(x.grad.double(), x_exact.grad, atol=10 * tolerance, rtol=10 * tolerance)


def test_rotary_turns_by_the_position_in_radians() -> None:
    """K = 2 has one frequency, 1: at position p the vector (1, 0) becomes (cos p, sin p)."""
    turned = rotate(torch.tensor([1.0, 0.0]).expand(1, 1, 3, 2), rotation(3, 2, torch.device("cpu")))[0, 0]
    expected = torch.tensor([[1.0, 0.0], [math.cos(1), math.sin(1)], [math.cos(2), math.sin(2)]])
    torch.testing.assert_close(turned, expected)


def test_rotary_frequencies_fall_from_one_to_one_in_ten_thousand() -> None:
    """K = 4: frequencies 1 and 10000^(-1/2) = 1/100."""
    cos_PK, sin_PK = rotation(3, 4, torch.device("cpu"))
    torch.testing.assert_close(cos_PK[2], torch.tensor([math.cos(2), math.cos(0.02)]))
    torch.testing.assert_close(sin_PK[2], torch.tensor([math.sin(2), math.sin(0.02)]))


def test_rotary_scores_depend_on_the_shift_only() -> None:
    generator = torch.Generator().manual_seed(0)
    q_K, k_K = torch.randn(8, generator=generator), torch.randn(8, generator=generator)
    turns = rotation(12, 8, torch.device("cpu"))
    scores_PP = rotate(q_K.expand(1, 1, 12, 8), turns)[0, 0] @ rotate(k_K.expand(1, 1, 12, 8), turns)[0, 0].T
    for shift in range(-11, 12):
        along = scores_PP.diagonal(shift)
        torch.testing.assert_close(along, along[0].expand_as(along), atol=1e-4, rtol=1e-4)
    assert scores_PP.diagonal(1)[0].item() != pytest.approx(scores_PP.diagonal(-1)[0].item(), abs=1e-3)


# The block


def written_out(block: Block, h_PD: Tensor, *, pre: bool, skip: float, branch: float) -> Tensor:
    """The block's formula for one row, causal, in plain matrix algebra and double precision; fresh norms have gain 1, bias 0."""
    weights = {name: value.double() for name, value in block.state_dict().items()}
    heads, (P, D) = block.heads, h_PD.shape

    def norm(x_PD: Tensor) -> Tensor:
        centred = x_PD - x_PD.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()

    def attention(x_PD: Tensor) -> Tensor:
        mixed = []
        for head in range(heads):
            rows = slice(head * D // heads, (head + 1) * D // heads)
            q, k, v = (x_PD @ weights[f"{name}.weight"][rows].T for name in ("query", "key", "value"))
            scores = (q @ k.T) / math.sqrt(D // heads)
            for i in range(P):
                scores[i, i + 1 :] = -math.inf
            mixed.append(scores.softmax(-1) @ v)
        return torch.cat(mixed, -1) @ weights["out.weight"].T

    def feedforward(x_PD: Tensor) -> Tensor:
        inner = x_PD @ weights["up.weight"].T
        return (inner * 0.5 * (1 + torch.erf(inner / math.sqrt(2)))) @ weights["down.weight"].T

    h = h_PD.double()
    if pre:
        h = h + branch * attention(norm(h))
        return h + branch * feedforward(norm(h))
    h = norm(skip * h + attention(h))
    return norm(skip * h + feedforward(h))


@pytest.mark.parametrize(
    ("rule", "norm", "skip", "branch"),
    [
        ("standard", "pre", 1.0, 1.0),
        ("standard", "post", 1.0, 1.0),
        ("depth_mup", "pre", 1.0, 0.25),  # L T = 2 * 8 = 16
        ("loop_mup", "pre", 1.0, 0.08838834764831845),  # 1 / (8 sqrt 2)
        ("deepnorm", "post", 2.378414230005442, 1.0),  # 32^(1/4)
        ("deeploop", "post", 5.656854249492381, 1.0),  # 32^(1/2)
    ],
)
def test_a_block_is_its_formula(rule: str, norm: str, skip: float, branch: float) -> None:
    model = make(rule=rule, norm=norm, blocks=2, loops=8)
    block = model.blocks[1]
    assert isinstance(block, Block)
    h_BPD = torch.randn(1, 6, 16, generator=torch.Generator().manual_seed(2))
    got = block(h_BPD, Sight(causal=True))[0].double()
    expected = written_out(block, h_BPD[0], pre=norm == "pre", skip=skip, branch=branch)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    if skip != 1.0:  # alpha on the branch instead of the skip, the first of three ways DeepNorm was got wrong, is told apart
        wrong = written_out(block, h_BPD[0], pre=False, skip=1 / skip, branch=1.0)
        assert (got - wrong).abs().max() > 0.1


@pytest.mark.parametrize(("rule", "gain"), [("deepnorm", 0.29730177875068026), ("deeploop", 0.08838834764831845)])
def test_beta_is_on_v_o_and_feedforward_and_not_on_q_and_k(rule: str, gain: float) -> None:
    """M = 16; the other two ways it was got wrong. 128 x 128 entries know their deviation to .6 %."""
    model = make(rule=rule, norm="post", width=128, blocks=2, loops=8)
    for block in model.blocks:
        assert isinstance(block, Block)
        for matrix in (block.query, block.key):
            assert matrix.weight.std().item() == pytest.approx(128**-0.5, rel=0.03)
        for matrix in (block.value, block.out, block.up):
            assert matrix.weight.std().item() == pytest.approx(gain * 128**-0.5, rel=0.03)
        assert block.down.weight.std().item() == pytest.approx(gain * 512**-0.5, rel=0.03)


@pytest.mark.parametrize("rule", ["standard", "depth_mup", "loop_mup"])
def test_pre_norm_rules_start_from_variance_one_over_fan_in(rule: str) -> None:
    model = make(rule=rule, width=128, blocks=2, loops=8)
    for name, parameter in model.blocks.named_parameters():
        if parameter.ndim == 2:
            assert parameter.std().item() == pytest.approx(parameter.shape[1] ** -0.5, rel=0.03), name


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


# What enters, and how the state grows


def silenced(model: LoopedTransformer) -> LoopedTransformer:
    """Without the blocks' branches, only the injection moves the state."""
    with torch.no_grad():
        for block in model.blocks:
            block.out.weight.zero_()  # pyright: ignore
            block.down.weight.zero_()  # pyright: ignore
    return model


@pytest.mark.parametrize(
    ("rule", "injection", "total"),
    [
        ("standard", "none", 1.0),
        ("standard", "add", 9.0),  # 1 + T
        ("standard", "linear", 1.8),  # 1 + .1 T
        ("depth_mup", "add", 1 + 8**0.5),  # 1 + T T^(-1/2)
        ("depth_mup", "linear", 1 + 0.1 * 8**0.5),
        ("loop_mup", "add", 2.0),  # 1 + T / T
        ("loop_mup", "linear", 1.1),
    ],
)
def test_what_eight_injections_add_to_the_input(rule: str, injection: str, total: float) -> None:
    model = silenced(make(rule=rule, injection=injection, loops=8, blocks=2))
    states = model(some_tokens(4), 8, trace=True).states
    torch.testing.assert_close(states[8], total * states[0])


def test_the_linear_injection_starts_at_identity_and_a_tenth() -> None:
    weight = make(injection="linear").injections[0].weight
    assert isinstance(weight, Tensor)
    torch.testing.assert_close(weight, torch.cat([torch.eye(16), 0.1 * torch.eye(16)], dim=1))


def slope_of_logs(counts: list[int], values: list[float]) -> float:
    x, y = torch.tensor(counts).log(), torch.tensor(values).log()
    return (((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()).item()


def grown(model: LoopedTransformer, loops: int) -> list[float]:
    """||h_t - h_0|| at every t, root mean square."""
    with torch.no_grad():
        states = model(some_tokens(24, rows=4), loops, trace=True).states
    return [(state - states[0]).square().mean().sqrt().item() for state in states]


SEEDS = 3
COUNTS = [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize(
    ("tied", "low", "high"),
    [pytest.param(True, 0.95, 1.2, id="shared"), pytest.param(False, 0.45, 0.7, id="distinct")],
)
def test_residual_growth_along_the_loops(tied: bool, low: float, high: float) -> None:
    """At initialisation a shared block's increments line up, and distinct blocks' are near independent."""
    for seed in range(SEEDS):
        model = make(width=64, heads=4, tied=tied, injection="none", loops=32, seed=seed)
        growth = grown(model, 32)
        assert low < slope_of_logs(COUNTS, [growth[t] for t in COUNTS]) < high


@pytest.mark.parametrize(
    ("rule", "tied", "low", "high"),
    [
        ("standard", True, 0.95, 1.2),
        ("depth_mup", True, 0.4, 0.65),  # over-counts: T T^(-1/2)
        ("loop_mup", True, -0.05, 0.05),
        ("depth_mup", False, -0.1, 0.15),
    ],
)
def test_final_state_against_the_loop_count(rule: str, tied: bool, low: float, high: float) -> None:
    """Each T with its own multipliers: only the rule that fits the sharing keeps the sum of T loops where it is."""
    for seed in range(SEEDS):
        final = [grown(make(rule=rule, width=64, heads=4, tied=tied, injection="none", loops=T, seed=seed), T)[T] for T in COUNTS]
        assert low < slope_of_logs(COUNTS, final) < high


def test_logits_start_at_zero_or_with_the_width_multiplier() -> None:
    assert not make(readout_init="zero")(some_tokens(4), 2).any()
    # Width 64 over base 16 is m = 4. The normalised state has variance 1, so W h has it too at variance 1/64.
    logits_BNV = make(width=64, heads=4).readout(torch.randn(8, 33, 64, generator=torch.Generator().manual_seed(0)))
    assert logits_BNV.std().item() == pytest.approx(1 / 4, rel=0.2)


def test_a_pre_norm_state_is_read_without_its_size() -> None:
    model = make()
    h_BPD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.readout(3 * h_BPD + 1), model.readout(h_BPD), atol=1e-4, rtol=1e-3)


def test_a_post_norm_state_is_read_as_it_is() -> None:
    model = make(norm="post", rule="deeploop")
    h_BPD = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model.readout(3 * h_BPD), 3 * model.readout(h_BPD))


@pytest.mark.parametrize(("norm", "bos", "value"), [("pre", True, 1.0), ("pre", False, 1.0), ("post", True, 7.0)])
def test_what_the_readout_matrix_reads(norm: str, bos: bool, value: float) -> None:
    """Entries 3 and 7 by turns have mean 5 and deviation 2: normalised they are -1 and 1."""
    model = make(norm=norm, bos=bos)
    h_BPD = torch.tensor([3.0, 7.0]).repeat(2, 4, 8)
    z_BND = model.normalised(h_BPD)
    assert z_BND.shape == (2, 3 if bos else 4, 16)
    torch.testing.assert_close(z_BND[..., 1::2], torch.full_like(z_BND[..., 1::2], value))
    torch.testing.assert_close(model.readout(h_BPD), model.scale.readout * z_BND @ model.readout_matrix.weight.T)


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
