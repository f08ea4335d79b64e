"""What enters a looped transformer, how its state grows with the loops, and how it is read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from loopcore.model import LoopedTransformer
from tests.unit.small_models import make, some_tokens


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
