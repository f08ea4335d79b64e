"""How the residual stream grows with visits, and whether one visit's increment points where the last one's did.

At initialisation distinct blocks add nearly uncorrelated increments, so the stream moves away from its start as
(visits)^(1/2); a shared block adds nearly the same increment at every visit, so it moves as (visits)^1. That is why a rule
that takes loops for layers, (L T)^(-1/2), over-counts them, and 1 / (T sqrt(L)) does not (Loop-muP; no public text, nearest is
arXiv 2606.18524). The distance ||h_v - h_0|| shows it; ||h_v|| hides it behind ||h_0|| at small v.

Norms are root mean squares over positions of the state's Euclidean norm.

Shapes: B batch, N input positions, P positions with BOS, D width, V visits (L T of them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments.depth import Depth, DepthTable, Source, reshaped, start_of, sweep_depths
from loopcore.instruments.fits import PowerFit, finite, fit_power, mean_interval, row
from loopcore.instruments.visits import Activation, watch_calls
from loopcore.model import LoopedTransformer
from loopcore.specs.train import TrainSpec

__all__ = ["GrowthCurve", "GrowthResult", "measure_growth", "sweep_displacement", "sweep_growth"]


@dataclass(frozen=True)
class GrowthCurve:
    """One model's residual stream after every visit of a block."""

    depth: Depth
    displacement: tuple[float, ...]
    """||h_v - h_0|| after visit v = 1 .. V."""
    norm: tuple[float, ...]
    """||h_v||."""
    cosine: tuple[float, ...]
    """Cosine between the increments of visits v and v + 1, mean over positions: V - 1 of them."""


@dataclass(frozen=True)
class GrowthResult:
    """Growth of the stream over visits, over seeds."""

    seeds: tuple[int, ...]
    curves: tuple[GrowthCurve, ...]
    """One a seed, all of the same depth."""
    tied: bool
    rule: str
    confidence: float = 0.95

    @property
    def fit(self) -> PowerFit:
        """||h_v - h_0|| as a power of v. Raises Undecided for fewer than three visits, or a stream that does not move."""
        visits = range(1, self.curves[0].depth.executed + 1)
        return fit_power(visits, [curve.displacement for curve in self.curves], confidence=self.confidence)

    @property
    def cosine(self) -> tuple[float, float | None, float | None]:
        """Mean cosine of adjacent increments over all visits: (mean, low, high) over seeds. Raises Undecided for one visit."""
        if not self.curves[0].cosine:
            raise Undecided("adjacent increments need at least 2 visits, got 1; measure more loops or blocks")
        return mean_interval([sum(curve.cosine) / len(curve.cosine) for curve in self.curves], self.confidence)

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. What is undecided has no row."""
        depth = self.curves[0].depth
        axes = {"rule": self.rule, "tied": self.tied, "blocks": depth.blocks, "loops": depth.loops}
        rows = []
        for figure in ("displacement", "norm", "cosine"):
            for v, by_seed in enumerate(zip(*(getattr(curve, figure) for curve in self.curves), strict=True), 1):
                rows.append(row("growth", {"of": figure, "visit": v, **axes}, *mean_interval(by_seed, self.confidence)))
        if isinstance(fit := self._fit_or_reason(), PowerFit):
            rows.append(row("growth", {"of": "exponent", **axes}, fit.exponent, fit.low, fit.high))
        if depth.executed > 1:
            rows.append(row("growth", {"of": "mean_cosine", **axes}, *self.cosine))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data. `exponent` is the reason as text where there is none."""
        fit, depth = self._fit_or_reason(), self.curves[0].depth
        return {
            "seeds": list(self.seeds),
            "tied": self.tied,
            "rule": self.rule,
            "blocks": depth.blocks,
            "loops": depth.loops,
            "exponent": fit.to_json() if isinstance(fit, PowerFit) else fit,
            "curves": [
                {name: [finite(value) for value in getattr(curve, name)] for name in ("displacement", "norm", "cosine")}
                for curve in self.curves
            ],
        }

    def _fit_or_reason(self) -> PowerFit | str:
        try:
            return self.fit
        except Undecided as reason:
            return str(reason)


@torch.no_grad()
def measure_growth(model: LoopedTransformer, tokens_BN: Tensor, *, loops: int) -> GrowthCurve:
    """The stream after every visit of every block, from one pass. Holds three states at a time, whatever the loops.

    Raises InputError for loops < 1, LengthError for more loops than an untied model has.
    """
    displacement: list[float] = []
    norm: list[float] = []
    cosine: list[float] = []
    states = model.iterate(tokens_BN, loops)
    start_BPD = next(states)
    last_BPD: Tensor | None = None

    def see(activation: Activation, before_BPD: Tensor, after_BPD: Tensor) -> None:
        nonlocal last_BPD
        if activation.name != "block":
            return
        increment_BPD = after_BPD - before_BPD
        displacement.append(_norm(after_BPD - start_BPD))
        norm.append(_norm(after_BPD))
        if last_BPD is not None:
            cosine.append(float(torch.cosine_similarity(last_BPD, increment_BPD, dim=-1).double().mean()))
        last_BPD = increment_BPD

    with watch_calls(model, see):
        for _ in states:
            pass
    assert len(norm) == model.spec.blocks * loops, "a visit was not seen"
    return GrowthCurve(Depth(model.spec.blocks, loops), tuple(displacement), tuple(norm), tuple(cosine))


def sweep_growth(
    spec: TrainSpec,
    task: Source,
    *,
    loops: int = 32,
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
) -> GrowthResult:
    """Growth over the visits of models of `spec` at initialisation: of shared blocks, or distinct ones where it is not tied."""
    curves = []
    for seed in seeds:
        model, tokens_BN, _ = start_of(reshaped(spec, loops=loops, seed=seed), task, device)
        curves.append(measure_growth(model, tokens_BN, loops=loops))
    return GrowthResult(tuple(seeds), tuple(curves), spec.model.tied, spec.scaling.rule, confidence)


def sweep_displacement(
    spec: TrainSpec,
    task: Source,
    *,
    blocks: Sequence[int] = (1,),
    loops: Sequence[int] = (1, 2, 4, 8, 16, 32),
    seeds: Sequence[int] = (0, 1, 2, 3, 4),
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
) -> DepthTable:
    """||h_V - h_0|| after the last visit, over blocks x loops, the scaling rule computed for each: flat where the rule holds.

    Under loop_mup flat in both; under depth_mup flat in blocks and as T^(1/2) in loops; under standard as L^(1/2) and as T.
    """

    def measure(at: TrainSpec, model: LoopedTransformer, tokens_BN: Tensor, _targets_BN: Tensor) -> float:
        return measure_growth(model, tokens_BN, loops=at.contract.most_loops).displacement[-1]

    values = sweep_depths(spec, task, measure, blocks=blocks, loops=loops, seeds=seeds, device=device)
    axes = {"rule": spec.scaling.rule, "tied": spec.model.tied}
    return DepthTable("growth", "final_displacement", tuple(seeds), values, axes, confidence)


def _norm(x_BPD: Tensor) -> float:
    return float(torch.linalg.vector_norm(x_BPD, dim=-1, dtype=torch.float64).square().mean().sqrt())
