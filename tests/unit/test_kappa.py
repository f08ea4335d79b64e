"""kappa_R against cases with a known answer, finite differences, the tied gradient, and its growth under every rule."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from loopcore.errors import InputError, LengthError, Undecided
from loopcore.instruments.depth import reshaped, start_of
from loopcore.instruments.kappa import FORMS, Form, KappaResult, implied_exponent, measure_kappa, sweep_kappa
from loopcore.instruments.visits import (
    Place,
    cross_entropy,
    places,
    run_visits,
    visit_copies,
    visit_gradients,
)
from loopcore.model import LoopedTransformer
from loopcore.specs import ModelSpec, TrainSpec
from tests.unit.noise import Noise, noise_spec

TASK = Noise()


def started(spec: TrainSpec, loops: int) -> tuple[LoopedTransformer, Tensor, Tensor]:
    """Model and batch at `loops` loops, in double precision."""
    model, tokens_BN, targets_BN = start_of(reshaped(spec, loops=loops), TASK, "cpu")
    return model.double(), tokens_BN, targets_BN


def measured(model: LoopedTransformer, batch: tuple[Tensor, Tensor], loops: int, **options: Any) -> KappaResult:
    return measure_kappa(model, batch[0], cross_entropy(batch[1]), loops=loops, **options)


class Parallel(LoopedTransformer):
    """Every visit sees the same input and adds to the same place: the visits are identical."""

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        block: Any = self.blocks[0]
        sight = self.sight(h_BPD.shape[1], h_BPD.device, t)
        return h_BPD + 0.3 * block.attention(e_BPD, sight) + 0.3 * block.feedforward(e_BPD)


class Apart(LoopedTransformer):
    """Visit t reads and writes channels of its own: no entry of a matrix has a gradient in two visits."""

    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        block: Any = self.blocks[0]
        D = h_BPD.shape[-1]
        own_D = torch.zeros(D, dtype=h_BPD.dtype)
        own_D[t * D // 4 : (t + 1) * D // 4] = 1.0
        sight = self.sight(h_BPD.shape[1], h_BPD.device, t)
        h_BPD = h_BPD + own_D * block.attention(own_D * h_BPD, sight)
        return h_BPD + (t + 1) * own_D * block.feedforward(own_D * h_BPD)


def toy(kind: type[LoopedTransformer], seed: int = 0) -> tuple[LoopedTransformer, tuple[Tensor, Tensor]]:
    spec = noise_spec()
    like, tokens_BN, targets_BN = start_of(spec, TASK, "cpu")
    model = kind(spec.model, vocabulary=32, classes=32, multipliers=like.scale, seed=seed)
    return model.double(), (tokens_BN, targets_BN)


def test_identical_visits_read_the_number_of_visits() -> None:
    model, batch = toy(Parallel)
    result = measured(model, batch, 4)
    assert len(result.kappas) == 7
    for kappa in result.kappas:
        assert kappa.max_normalised == pytest.approx(4.0, rel=1e-9), kappa.matrix
        assert kappa.norm_weighted == pytest.approx(4.0, rel=1e-9), kappa.matrix
        assert kappa.output_ratio == pytest.approx(1.0, rel=1e-9)
        assert kappa.gradient_ratio == pytest.approx(1.0, rel=1e-9)


def test_orthogonal_visits_read_one_whatever_their_norms() -> None:
    model, batch = toy(Apart)
    result = measured(model, batch, 4)
    for kappa in result.kappas:
        assert kappa.norm_weighted == pytest.approx(1.0, rel=1e-9), kappa.matrix
        # What the max-normalised form makes of it, from the norms alone: it reads low as far as they differ.
        u, g = (math.sqrt(sum(x * x for x in norms)) / max(norms) for norms in (kappa.output_norms, kappa.gradient_norms))
        assert kappa.max_normalised == pytest.approx(u * g / 4, rel=1e-9)
    feedforward = next(kappa for kappa in result.matrices if kappa.matrix == "down")
    assert feedforward.output_ratio > 1.5
    assert feedforward.max_normalised < 0.8


def test_one_visit_is_aligned_with_itself() -> None:
    model, *batch = started(noise_spec(), 1)
    for kappa in measured(model, (batch[0], batch[1]), 1).kappas:
        assert kappa.max_normalised == pytest.approx(1.0)
        assert kappa.norm_weighted == pytest.approx(1.0)


@pytest.mark.parametrize("shape", [{}, {"blocks": 2, "injection": "linear"}, {"norm": "post", "positions": "scan_offset"}])
def test_visit_gradients_add_up_to_the_tied_gradient(shape: dict[str, Any]) -> None:
    """In fp32, as they are measured: 1e-6 of the gradient's norm."""
    spec = reshaped(noise_spec(**shape), loops=5)
    model, tokens_BN, targets_BN = start_of(spec, TASK, "cpu")
    copies = visit_copies(model, 5)
    loss = cross_entropy(targets_BN)
    found = visit_gradients(loss(model.readout(run_visits(model, tokens_BN, copies))), copies)
    loss(model(tokens_BN, 5)).backward()
    for place in places(model):
        tied = dict(model.named_parameters())[f"blocks.{place.block}.{place.matrix}"].grad
        assert tied is not None
        total = torch.stack([gradients[place] for gradients in found]).sum(0)
        assert float((total - tied).norm() / tied.norm()) < 1e-6, place


def test_visit_gradients_of_an_untied_model_are_its_own() -> None:
    model, tokens_BN, targets_BN = started(noise_spec(tied=False, blocks=2), 3)
    copies = visit_copies(model, 3)
    loss = cross_entropy(targets_BN)
    found = visit_gradients(loss(model.readout(run_visits(model, tokens_BN, copies))), copies)
    loss(model(tokens_BN, 3)).backward()
    for t, gradients in enumerate(found):
        for place, gradient in gradients.items():
            own = model.blocks[2 * t + place.block].get_parameter(place.matrix).grad
            torch.testing.assert_close(gradient, own)


def test_against_finite_differences() -> None:
    """Every entry of one matrix in every visit, moved by itself: kappa from the slopes of loss and projected state."""
    spec = noise_spec().model_copy(update={"model": ModelSpec(width=4, heads=1, norm="pre", readout_init="normal"), "batch": 2})
    model, tokens_BN, targets_BN = started(spec, 3)
    place, step = Place(0, "out.weight"), 1e-6
    loss = cross_entropy(targets_BN)
    generator = torch.Generator().manual_seed(7)
    state = (*tokens_BN.shape, 4)
    v = [torch.randn(state, generator=generator, dtype=torch.float64) / tokens_BN.numel() ** 0.5 for _ in range(4)]

    def figures(copies: list[dict[Place, Tensor]]) -> Tensor:
        with torch.no_grad():
            h_BPD = run_visits(model, tokens_BN, copies)
            z_BND = model.normalised(h_BPD)
            return torch.stack([loss(model.readout(h_BPD)), *((z_BND * v_BND).sum() for v_BND in v)])

    slopes = torch.empty(3, 16, 5, dtype=torch.float64)
    for visit in range(3):
        for entry in range(16):
            ends = []
            for sign in (1.0, -1.0):
                copies = [dict(copy) for copy in visit_copies(model, 3)]
                moved = copies[visit][place].detach().clone()
                moved.view(-1)[entry] += sign * step
                copies[visit][place] = moved
                ends.append(figures(copies))
            slopes[visit, entry] = (ends[0] - ends[1]) / (2 * step)

    def alignments(x_REK: Tensor) -> tuple[float, float]:
        norm_R = x_REK.flatten(1).norm(dim=1)
        total = x_REK.sum(0).norm()
        return float(total / norm_R.square().sum().sqrt()), float(total / norm_R.max())

    (g_weighted, g_max), (u_weighted, u_max) = alignments(slopes[..., :1]), alignments(slopes[..., 1:])
    result = measured(model, (tokens_BN, targets_BN), 3, projections=4, seed=7)
    kappa = next(kappa for kappa in result.matrices if kappa.matrix == "out")
    assert kappa.gradient_alignment == pytest.approx(g_weighted, rel=1e-6)
    assert kappa.output_alignment == pytest.approx(u_weighted, rel=1e-6)
    assert kappa.norm_weighted == pytest.approx(g_weighted * u_weighted, rel=1e-6)
    assert kappa.max_normalised == pytest.approx(g_max * u_max / 3, rel=1e-6)
    assert kappa.gradient_norms == pytest.approx(slopes[..., 0].norm(dim=1).tolist(), rel=1e-6)


def test_projections_estimate_the_whole_jacobian() -> None:
    """||U_r|| from 400 projections within 5 % of the Jacobian of every coordinate of the state, four of kappa within .1."""
    spec = noise_spec(width=8, heads=1).model_copy(update={"batch": 2})
    model, tokens_BN, targets_BN = started(spec, 2)
    copies = visit_copies(model, 2)
    z_BND = model.normalised(run_visits(model, tokens_BN, copies))
    rows = [visit_gradients(coordinate, copies, keep=True) for coordinate in z_BND.flatten()]
    place = Place(0, "value.weight")
    jacobian_RXE = torch.stack([torch.stack([gradients[t][place].flatten() for gradients in rows]) for t in range(2)])
    exact_R = jacobian_RXE.flatten(1).norm(dim=1) / tokens_BN.numel() ** 0.5
    aligned = float(jacobian_RXE.sum(0).norm() / jacobian_RXE.norm())

    def of(projections: int) -> Any:
        result = measured(model, (tokens_BN, targets_BN), 2, projections=projections)
        return next(kappa for kappa in result.matrices if kappa.matrix == "value")

    assert of(400).output_norms == pytest.approx(exact_R.tolist(), rel=0.05)
    assert of(400).output_alignment == pytest.approx(aligned, abs=0.01)
    assert of(4).output_alignment == pytest.approx(aligned, abs=0.1)


@pytest.mark.parametrize("rule", ["standard", "deeploop"])
def test_forms_are_ordered_and_bounded(rule: str) -> None:
    model, *batch = started(noise_spec(rule, blocks=2), 4)
    result = measured(model, (batch[0], batch[1]), 4)
    assert [(kappa.block, kappa.matrix) for kappa in result.blocks] == [(0, "all"), (1, "all")]
    for kappa in result.kappas:
        assert 0.0 < kappa.max_normalised <= kappa.norm_weighted <= 4.0 + 1e-9
        assert kappa.norm_weighted == pytest.approx(kappa.output_alignment * kappa.gradient_alignment)
    for form in FORMS:
        assert result.largest(form) == max(getattr(kappa, form) for kappa in result.kappas if kappa.matrix != "all")


@pytest.mark.parametrize(
    ("rule", "blocks", "loops", "factor"),
    [
        # M (c b/a)^2 by hand. deeploop: a^2 = 2M, 1/b^2 = 8M, so M / (16 M^2). deepnorm: a^2 = (2M)^(1/2), so M / (16 M^2)^(1/2).
        ("deeploop", 2, 4, 1 / 128),
        ("deepnorm", 2, 4, 1 / 4),
        # loop_mup: L T / (T^2 L) = 1/T; depth_mup: L T / (L T) = 1; standard: M.
        ("loop_mup", 2, 4, 1 / 4),
        ("depth_mup", 2, 4, 1.0),
        ("standard", 2, 4, 8.0),
        ("deeploop", 1, 2, 1 / 32),
    ],
)
def test_bound_by_hand(rule: str, blocks: int, loops: int, factor: float) -> None:
    model, *batch = started(noise_spec(rule, blocks=blocks), loops)
    result = measured(model, (batch[0], batch[1]), loops)
    for form in FORMS:
        assert result.bound(form) == pytest.approx(factor * result.largest(form))


def test_implied_exponent() -> None:
    assert implied_exponent(0.0) == 0.25
    assert implied_exponent(1.0) == 0.5


@pytest.mark.parametrize(
    ("rule", "norm_weighted", "max_normalised"),
    [
        # Public reproduction at width 64 on text: .66, .95, .99, 1.00 and .07, .82, .97, 1.00. Depth muP was not given.
        ("standard", (0.66, 0.12), (0.07, 0.25)),
        ("loop_mup", (0.95, 0.05), (0.82, 0.12)),
        ("deepnorm", (0.99, 0.03), (0.97, 0.05)),
        ("deeploop", (1.00, 0.01), (1.00, 0.01)),
    ],
)
def test_growth_with_loops(rule: str, norm_weighted: tuple[float, float], max_normalised: tuple[float, float]) -> None:
    sweep = sweep_kappa(noise_spec(rule), TASK, loops=(1, 2, 4, 8), seeds=(0, 1, 2))
    expected: dict[Form, tuple[float, float]] = {"norm_weighted": norm_weighted, "max_normalised": max_normalised}
    for form, (value, within) in expected.items():
        fit = sweep.kappa[form].exponent("loops", 1)
        assert fit.exponent == pytest.approx(value, abs=within)
        assert fit.low is not None
        assert fit.high is not None
        assert fit.low <= fit.exponent <= fit.high
        assert (fit.seeds, fit.points) == (3, 4)
    json.dumps(sweep.to_json(), allow_nan=False)
    assert {row["instrument"] for row in sweep.rows()} == {"kappa"}


def test_untied_blocks_stay_near_one() -> None:
    sweep = sweep_kappa(noise_spec("deeploop", tied=False), TASK, loops=(2, 4, 8), seeds=(0, 1))
    assert abs(sweep.kappa["norm_weighted"].exponent("loops", 1).exponent) < 0.15
    for values in sweep.kappa["norm_weighted"].values.values():
        assert all(0.9 < value < 1.9 for value in values)


def test_a_readout_of_zero_is_refused_with_what_to_do() -> None:
    model, *batch = started(noise_spec(readout_init="zero"), 2)
    with pytest.raises(Undecided, match=r"set model\.readout_init to normal"):
        measured(model, (batch[0], batch[1]), 2)


def test_what_is_not_finite_is_refused() -> None:
    model, *batch = started(noise_spec(), 2)
    with torch.no_grad():
        model.readout_matrix.weight.fill_(math.inf)
    with pytest.raises(Undecided, match="not finite"):
        measured(model, (batch[0], batch[1]), 2)


def test_arguments_out_of_range() -> None:
    model, *batch = started(noise_spec(tied=False), 2)
    with pytest.raises(LengthError, match="untied_loops"):
        measured(model, (batch[0], batch[1]), 3)
    with pytest.raises(InputError, match="at least 1 projection"):
        measured(model, (batch[0], batch[1]), 2, projections=0)
    with pytest.raises(InputError, match="at least one number of blocks"):
        sweep_kappa(noise_spec(), TASK, loops=())


def test_measuring_leaves_the_model_as_it_was() -> None:
    model, *batch = started(noise_spec(), 2)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():  # a caller's own setting does not matter
        first = measured(model, (batch[0], batch[1]), 2)
    assert first == measured(model, (batch[0], batch[1]), 2)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.grad is None
        assert parameter.requires_grad


def test_rows_and_json() -> None:
    model, *batch = started(noise_spec(), 2)
    result = measured(model, (batch[0], batch[1]), 2)
    rows = result.rows()
    assert len(rows) == 7 * 6 + 4  # six matrices and the whole, six figures each; largest and bound in two forms
    assert {tuple(row) for row in rows} == {("instrument", "axes", "value", "low", "high")}
    keys = [json.dumps(row["axes"], sort_keys=True) for row in rows]
    assert len(set(keys)) == len(keys)
    content = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert content["executed_depth"] == 2
    assert content["kappas"][0]["matrix"] == "query"
    assert len(content["kappas"][0]["gradient_norms"]) == 2
