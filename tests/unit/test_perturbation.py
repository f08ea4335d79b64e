"""The one-step change: by hand on one visit, and its exponents in loops and blocks against the theory."""

from __future__ import annotations

import json
import math

import pytest
import torch

from loopcore.errors import InputError, Undecided
from loopcore.instruments.depth import reshaped, start_of
from loopcore.instruments.fits import fit_power, mean_interval, student_quantile
from loopcore.instruments.perturbation import Update, measure_step, predicted_exponent, sweep_perturbation
from loopcore.instruments.visits import cross_entropy
from tests.unit.noise import Noise, noise_spec

TASK = Noise()


@pytest.mark.parametrize("update", ["sgd", "sign"])
def test_the_change_is_that_of_a_step_taken_by_hand(update: Update) -> None:
    spec = reshaped(noise_spec("loop_mup", blocks=2), loops=3, width=64)
    model, tokens_BN, targets_BN = start_of(spec, TASK, "cpu")
    loss = cross_entropy(targets_BN)
    change = measure_step(model, tokens_BN, loss, loops=3, update=update, lr=0.02)

    logits_BNV = model(tokens_BN, 3)
    loss(logits_BNV).backward()
    lr_hidden = 0.5 * 2**-0.5  # width over base 2, loop_mup over L = 2
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith("blocks") and parameter.ndim == 2:
                assert parameter.grad is not None
                parameter -= 0.02 * (parameter.grad if update == "sgd" else lr_hidden * parameter.grad.sign())
        moved_BNV = model(tokens_BN, 3) - logits_BNV
    assert change == pytest.approx(float(moved_BNV.pow(2).mean().sqrt()), rel=1e-4)


def test_small_steps_are_of_first_order() -> None:
    model, tokens_BN, targets_BN = start_of(reshaped(noise_spec("deeploop"), loops=4), TASK, "cpu")
    model.double()
    changes = [measure_step(model, tokens_BN, cross_entropy(targets_BN), loops=4, lr=lr) for lr in (1e-3, 1e-2)]
    assert changes[1] / changes[0] == pytest.approx(10.0, rel=0.01)


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, tokens_BN, targets_BN = start_of(reshaped(noise_spec(), loops=2), TASK, "cpu")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    measure_step(model, tokens_BN, cross_entropy(targets_BN), loops=2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None


@pytest.mark.parametrize("p", [0.25, 0.35, 0.5, 0.6])
def test_exponent_in_loops(p: float) -> None:
    """2 - 4p for plain descent; 1 - 2p for a sign step. Published at width 64: .90, .49, -.08, -.46."""
    result = sweep_perturbation(noise_spec("deeploop", exponent=p), TASK)
    assert result.predicted("loops") == pytest.approx(2 - 4 * p)
    assert result.table.exponent("loops", 1).exponent == pytest.approx(2 - 4 * p, abs=0.15)
    signed = sweep_perturbation(noise_spec("deeploop", exponent=p), TASK, update="sign")
    assert signed.predicted("loops") == pytest.approx(1 - 2 * p)
    assert signed.table.exponent("loops", 1).exponent == pytest.approx(1 - 2 * p, abs=0.1)


@pytest.mark.parametrize(("rule", "expected"), [("deepnorm", 0.0), ("deeploop", -1.0)])
def test_weights_of_their_own_lose_one_power(rule: str, expected: float) -> None:
    result = sweep_perturbation(noise_spec(rule, tied=False), TASK, loops=(1, 2, 4, 8))
    assert result.predicted("loops") == expected
    assert result.table.exponent("loops", 1).exponent == pytest.approx(expected, abs=0.2)


@pytest.mark.parametrize(("rule", "expected"), [("deepnorm", 0.0), ("deeploop", -1.0)])
def test_exponent_in_blocks(rule: str, expected: float) -> None:
    result = sweep_perturbation(noise_spec(rule), TASK, blocks=(1, 2, 4), loops=(2,))
    assert result.predicted("blocks") == expected
    assert result.table.lines() == [("blocks", 2)]
    assert result.table.exponent("blocks", 2).exponent == pytest.approx(expected, abs=0.25)


def test_loop_mup_is_flat_where_standard_grows() -> None:
    flat = sweep_perturbation(noise_spec("loop_mup"), TASK).table.exponent("loops", 1)
    grows = sweep_perturbation(noise_spec("standard"), TASK).table.exponent("loops", 1)
    assert abs(flat.exponent) < 0.2
    assert grows.exponent > 0.7


def test_predictions() -> None:
    assert predicted_exponent(0.5) == 0.0
    assert predicted_exponent(0.25) == 1.0
    assert predicted_exponent(0.25, tied=False) == 0.0
    assert predicted_exponent(0.5, along="blocks") == -1.0
    assert predicted_exponent(0.25, update="sign") == 0.5
    assert sweep_perturbation(noise_spec(), TASK, loops=(1,), seeds=(0,)).predicted("loops") is None


def test_a_readout_of_zero_is_refused_with_what_to_do() -> None:
    with pytest.raises(Undecided, match=r"model\.readout_init to normal"):
        sweep_perturbation(noise_spec(readout_init="zero"), TASK)


def test_a_rate_of_zero_is_refused() -> None:
    model, tokens_BN, targets_BN = start_of(noise_spec(), TASK, "cpu")
    with pytest.raises(InputError, match="above 0"):
        measure_step(model, tokens_BN, cross_entropy(targets_BN), loops=1, lr=0.0)


def test_a_step_that_diverges_is_a_point_without_a_row() -> None:
    result = sweep_perturbation(noise_spec(), TASK, loops=(1, 2, 3), seeds=(0, 1), lr=1e38)
    assert not all(math.isfinite(value) for values in result.table.values.values() for value in values)
    assert all(math.isfinite(row["value"]) for row in result.rows())
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["exponents"] == []
    assert "positive, finite" in content["undecided"][0]["reason"]


def test_rows_and_json() -> None:
    result = sweep_perturbation(noise_spec("deeploop", exponent=0.35), TASK, loops=(1, 2, 4), seeds=(0, 1))
    rows = result.rows()
    axes = {"rule": "deeploop", "update": "sgd", "tied": True, "p": 0.35}
    assert [row["axes"] for row in rows] == [
        {"of": "logit_change", "blocks": 1, "loops": 1, **axes},
        {"of": "logit_change", "blocks": 1, "loops": 2, **axes},
        {"of": "logit_change", "blocks": 1, "loops": 4, **axes},
        {"of": "logit_change_exponent", "along": "loops", "at": 1, **axes},
        {"of": "predicted_exponent", "along": "loops", **axes},
    ]
    assert rows[-1]["value"] == pytest.approx(0.6)
    for row in rows[:-1]:
        assert row["low"] <= row["value"] <= row["high"]
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["predicted"]["loops"] == pytest.approx(0.6)
    assert len(content["values"]) == 3


def test_power_fit_of_exact_powers() -> None:
    x = [1.0, 2.0, 4.0, 8.0]
    fit = fit_power(x, [[3 * v**1.5 for v in x], [3 * v**0.5 for v in x]])
    assert fit.exponent == pytest.approx(1.0)
    assert fit.prefactor == pytest.approx(3.0)
    assert fit.r2 == pytest.approx(1.0)
    # Two slopes 1.5 and .5: standard error .5, t(1) at 95 % is 12.706.
    assert fit.low == pytest.approx(1.0 - 12.706 * 0.5, abs=1e-3)
    assert fit.high == pytest.approx(1.0 + 12.706 * 0.5, abs=1e-3)


def test_power_fit_of_one_seed_takes_its_scatter() -> None:
    """log2 y = 0, 1.5, 1.5, 3 over log2 x = 0..3: slope .9, residual sum of squares .45, so s = sqrt(.225 / 5); t(2) = 4.3027."""
    fit = fit_power([1, 2, 4, 8], [[1.0, 2**1.5, 2**1.5, 8.0]])
    assert fit.exponent == pytest.approx(0.9)
    assert fit.low == pytest.approx(0.9 - 4.3027 * math.sqrt(0.225 / 5), abs=1e-4)
    assert fit.high == pytest.approx(0.9 + 4.3027 * math.sqrt(0.225 / 5), abs=1e-4)


def test_power_fit_refuses_what_has_no_exponent() -> None:
    with pytest.raises(Undecided, match="at least 3 different points, got 2"):
        fit_power([1, 2], [[1.0, 2.0]])
    with pytest.raises(Undecided, match="1 of 3 are not"):
        fit_power([1, 2, 3], [[1.0, 0.0, 2.0]])
    with pytest.raises(Undecided, match="1 of 3 are not"):
        fit_power([1, 2, 3], [[1.0, math.nan, 2.0]])


@pytest.mark.parametrize(
    ("confidence", "freedom", "t"),
    [
        (0.95, 1, 12.706205),
        (0.95, 2, 4.302653),
        (0.95, 5, 2.570582),
        (0.9, 9, 1.833113),
        (0.99, 30, 2.749996),
        (0.5, 4, 0.740697),
    ],
)
def test_student_quantiles_as_tabulated(confidence: float, freedom: int, t: float) -> None:
    assert student_quantile(confidence, freedom) == pytest.approx(t, abs=1e-6)


def test_mean_intervals() -> None:
    assert mean_interval([2.0]) == (2.0, None, None)
    mean, low, high = mean_interval([1.0, 2.0, 3.0])
    assert (mean, low, high) == (2.0, pytest.approx(2 - 4.302653 / 3**0.5), pytest.approx(2 + 4.302653 / 3**0.5))
    assert mean_interval([1.0, math.inf])[1:] == (None, None)
    with pytest.raises(InputError, match="between 0 and 1"):
        student_quantile(1.0, 3)
