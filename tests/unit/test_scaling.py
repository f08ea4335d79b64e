"""The scaling table, cell by cell, against numbers worked out on paper."""

from __future__ import annotations

import dataclasses

import pytest

from loopcore.errors import InputError
from loopcore.scaling import RULES, Multipliers, hidden_init_std, multipliers
from loopcore.specs import ModelSpec, ScalingSpec
from loopcore.specs.model import Rule

ROOT_HALF = 0.7071067811865476  # 2^(-1/2)
ROOT_EIGHTH = 0.3535533905932738  # 8^(-1/2)
ROOT_128TH = 0.08838834764831845  # 128^(-1/2)

# L = 2, T = 8, width 256 over base 64 (m = 4), L_base = 1: executed depth 16, 2M = 32, 8M = 128.
DEEP = {
    "standard": Multipliers(
        branch=1, skip=1, init_gain=1, injection=1, readout=1 / 4,
        lr_embedding=1, lr_hidden=1 / 4, lr_vector=1, lr_injection=1 / 4, lr_readout=1,
        epsilon_embedding=1 / 4, epsilon_hidden=1 / 4, epsilon_vector=1 / 4, epsilon_injection=1 / 4, epsilon_readout=1 / 4,
    ),
    # (L T)^(-1/2) = 16^(-1/2) = 1/4; the injection's T^(-1/2) = 8^(-1/2)
    "depth_mup": Multipliers(
        branch=1 / 4, skip=1, init_gain=1, injection=ROOT_EIGHTH, readout=1 / 4,
        lr_embedding=1, lr_hidden=1 / 16, lr_vector=1 / 4, lr_injection=ROOT_128TH, lr_readout=1,
        epsilon_embedding=1 / 4, epsilon_hidden=1 / 16, epsilon_vector=1 / 16, epsilon_injection=ROOT_128TH,
        epsilon_readout=1 / 4,
    ),
    # 1 / (8 sqrt 2) = 128^(-1/2); L^(-1/2) = 2^(-1/2), over m: .17678
    "loop_mup": Multipliers(
        branch=ROOT_128TH, skip=1, init_gain=1, injection=1 / 8, readout=1 / 4,
        lr_embedding=1, lr_hidden=0.1767766952966369, lr_vector=ROOT_HALF, lr_injection=1 / 4, lr_readout=1,
        epsilon_embedding=1 / 4, epsilon_hidden=0.1767766952966369, epsilon_vector=0.1767766952966369,
        epsilon_injection=1 / 4, epsilon_readout=1 / 4,
    ),
    # 32^(1/4) = 2^(5/4), 128^(-1/4) = 2^(-7/4); epsilon 2^(-1/2) / 4
    "deepnorm": Multipliers(
        branch=1, skip=2.378414230005442, init_gain=0.29730177875068026, injection=1, readout=1 / 4,
        lr_embedding=1, lr_hidden=1 / 4, lr_vector=1, lr_injection=1 / 4, lr_readout=1,
        epsilon_embedding=1 / 4, epsilon_hidden=0.1767766952966369, epsilon_vector=0.1767766952966369,
        epsilon_injection=1 / 4, epsilon_readout=1 / 4,
    ),
    # 32^(1/2) = 4 sqrt 2, 128^(-1/2); epsilon 2^(-1) / 4
    "deeploop": Multipliers(
        branch=1, skip=5.656854249492381, init_gain=ROOT_128TH, injection=1, readout=1 / 4,
        lr_embedding=1, lr_hidden=1 / 4, lr_vector=1, lr_injection=1 / 4, lr_readout=1,
        epsilon_embedding=1 / 4, epsilon_hidden=1 / 8, epsilon_vector=1 / 8, epsilon_injection=1 / 4, epsilon_readout=1 / 4,
    ),
}  # fmt: skip

# L = 4, T = 2, width 32 over base 64 (m = 1/2), L_base = 4: executed depth 8, 2M = 16, 8M = 64.
NARROW = {
    "standard": Multipliers(
        branch=1, skip=1, init_gain=1, injection=1, readout=2,
        lr_embedding=1, lr_hidden=2, lr_vector=1, lr_injection=2, lr_readout=1,
        epsilon_embedding=2, epsilon_hidden=2, epsilon_vector=2, epsilon_injection=2, epsilon_readout=2,
    ),
    # branch 8^(-1/2); (L T / L_base)^(-1/2) = 2^(-1/2)
    "depth_mup": Multipliers(
        branch=ROOT_EIGHTH, skip=1, init_gain=1, injection=ROOT_HALF, readout=2,
        lr_embedding=1, lr_hidden=2**0.5, lr_vector=ROOT_HALF, lr_injection=2**0.5, lr_readout=1,
        epsilon_embedding=2, epsilon_hidden=2**0.5, epsilon_vector=2**0.5, epsilon_injection=2**0.5, epsilon_readout=2,
    ),
    # 1 / (2 sqrt 4) = 1/4; L = L_base, so nothing but width is left in the learning rates
    "loop_mup": Multipliers(
        branch=1 / 4, skip=1, init_gain=1, injection=1 / 2, readout=2,
        lr_embedding=1, lr_hidden=2, lr_vector=1, lr_injection=2, lr_readout=1,
        epsilon_embedding=2, epsilon_hidden=2, epsilon_vector=2, epsilon_injection=2, epsilon_readout=2,
    ),
    # 16^(1/4) = 2, 64^(-1/4) = 8^(-1/2)
    "deepnorm": Multipliers(
        branch=1, skip=2, init_gain=ROOT_EIGHTH, injection=1, readout=2,
        lr_embedding=1, lr_hidden=2, lr_vector=1, lr_injection=2, lr_readout=1,
        epsilon_embedding=2, epsilon_hidden=2, epsilon_vector=2, epsilon_injection=2, epsilon_readout=2,
    ),
    # 16^(1/2) = 4, 64^(-1/2) = 1/8
    "deeploop": Multipliers(
        branch=1, skip=4, init_gain=1 / 8, injection=1, readout=2,
        lr_embedding=1, lr_hidden=2, lr_vector=1, lr_injection=2, lr_readout=1,
        epsilon_embedding=2, epsilon_hidden=2, epsilon_vector=2, epsilon_injection=2, epsilon_readout=2,
    ),
}  # fmt: skip

CELLS = [field.name for field in dataclasses.fields(Multipliers)]


def norm_of(rule: Rule) -> str:
    return "post" if rule in ("deepnorm", "deeploop") else "pre"


def at(rule: Rule, *, blocks: int, loops: int, width: int, base_blocks: int = 1, exponent: float | None = None) -> Multipliers:
    model = ModelSpec.model_validate({"width": width, "blocks": blocks, "norm": norm_of(rule)})
    return multipliers(ScalingSpec(rule=rule, base_width=64, base_blocks=base_blocks, exponent=exponent), model, loops)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("rule", RULES)
def test_every_cell_of_a_deep_wide_model(rule: Rule, cell: str) -> None:
    got = at(rule, blocks=2, loops=8, width=256)
    assert getattr(got, cell) == pytest.approx(getattr(DEEP[rule], cell), rel=1e-12)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("rule", RULES)
def test_every_cell_of_a_narrow_model_with_a_deep_base(rule: Rule, cell: str) -> None:
    got = at(rule, blocks=4, loops=2, width=32, base_blocks=4)
    assert getattr(got, cell) == pytest.approx(getattr(NARROW[rule], cell), rel=1e-12)


@pytest.mark.parametrize("rule", ["standard", "depth_mup", "loop_mup"])
def test_pre_norm_rules_are_one_at_the_base(rule: Rule) -> None:
    """At base width, one block and one loop nothing is scaled: a learning-rate search runs that row once for all of them."""
    assert at(rule, blocks=1, loops=1, width=64) == Multipliers()


def test_loop_mup_learning_rates_do_not_see_the_loops() -> None:
    few, many = at("loop_mup", blocks=3, loops=1, width=128), at("loop_mup", blocks=3, loops=64, width=128)
    for cell in CELLS:
        if cell not in ("branch", "injection"):
            assert getattr(few, cell) == getattr(many, cell)
    assert few.branch == pytest.approx(64 * many.branch)


@pytest.mark.parametrize("rule", ["deepnorm", "deeploop"])
def test_exponent_replaces_the_rules_own(rule: Rule) -> None:
    """p = .35 at M = 16: 32^.35 = e^(.35 * 3.4657359) and 128^-.35 = e^(-.35 * 4.8520303); epsilon 2^-.7 / 4."""
    got = at(rule, blocks=2, loops=8, width=256, exponent=0.35)
    assert got.skip == pytest.approx(3.3635856610148585)
    assert got.init_gain == pytest.approx(0.18301071199, rel=1e-9)
    assert got.epsilon_hidden == pytest.approx(0.15389305166811, rel=1e-9)


def test_deeploop_is_deepnorm_at_exponent_one_half() -> None:
    assert at("deepnorm", blocks=2, loops=3, width=64, exponent=0.5) == at("deeploop", blocks=2, loops=3, width=64)


def test_hidden_variance_is_one_over_fan_in() -> None:
    assert hidden_init_std(256) == 1 / 16


@pytest.mark.parametrize("loops", [0, -3])
def test_no_loops_is_refused(loops: int) -> None:
    with pytest.raises(InputError, match=f"at least 1 loop, got {loops}"):
        multipliers(ScalingSpec(), ModelSpec(), loops)
