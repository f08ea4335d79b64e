"""The coordinate check: the size of every activation after a few optimizer steps, against width, blocks or loops.

Under a rule that transfers, mean |x| stays of one order as the axis grows, at initialisation and after each of the first
steps; a slope that grows with the steps is a learning rate that does not transfer. Every visit of a reused module is
recorded, not only its last one: a stream that grows with the loops is invisible at any single visit.

Sizes are read on one fixed batch while the optimizer of `loopcore.optim` trains on the stream at its full learning rate:
neither the schedule nor clipping belongs to the rule under test, so both are left out. `out` and `down` are before their
branch's multiplier, `block` is the stream after it, `logits` are after the readout's multiplier.

Standard scaling beside it is the rule `standard` for blocks and loops; width is scaled alike in every rule, so there it is
`control`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.depth import Source, reshaped, start_of
from loopcore.instruments.fits import PowerFit, finite, fit_power, mean_interval, row
from loopcore.instruments.speed import MIN_POINTS
from loopcore.instruments.visits import Activation, cross_entropy, watch_calls
from loopcore.model import LoopedTransformer
from loopcore.optim import make_optimizer
from loopcore.specs.train import TrainSpec

__all__ = ["Axis", "CoordinateCheck", "activation_sizes", "check_coordinates"]

Axis = Literal["width", "blocks", "loops"]
LAST = "last"


@dataclass(frozen=True)
class CoordinateCheck:
    """Mean |x| of every activation, over an axis, steps and seeds."""

    axis: Axis
    values: tuple[int, ...]
    """Places on the axis, ascending."""
    steps: int
    """Optimizer steps taken: sizes are there after 0, 1, ..., `steps` of them."""
    seeds: tuple[int, ...]
    rule: str
    control: bool
    """Whether the rule's base width went along with the width, so that width was not scaled at all."""
    sizes: dict[Activation, dict[tuple[int, int], tuple[float, ...]]]
    """Activation to (place on the axis, step) to one value a seed. Deeper or more looped models have activations of their own."""
    confidence: float = 0.95

    def activations(self) -> list[Activation]:
        """Every activation recorded, and for each name inside the blocks its `last` visit in the last block, wherever that is."""
        inside = dict.fromkeys(activation.name for activation in self.sizes if activation.visit is not None)
        return [*self.sizes, *(Activation(name, LAST, LAST) for name in inside)]

    def size(self, activation: Activation, value: int, step: int) -> tuple[float, ...] | None:
        """Mean |x| a seed at one place and step; None for an activation that this place does not have."""
        if activation.visit == LAST:
            there = [found for found, by in self.sizes.items() if found.name == activation.name and (value, step) in by]
            if not there:
                return None
            activation = max(there, key=_order)
        return self.sizes[activation].get((value, step))

    def slope(self, activation: Activation, step: int) -> PowerFit:
        """Slope of log2 mean |x| against log2 of the axis, at one step; its interval is over seeds.

        Raises Undecided for an activation at fewer than three places, and for sizes that are zero or not finite.
        """
        found = [(value, sizes) for value in self.values if (sizes := self.size(activation, value, step)) is not None]
        curves = [[sizes[s] for _, sizes in found] for s in range(len(self.seeds))]
        return fit_power([value for value, _ in found], curves, confidence=self.confidence)

    def slopes(self) -> Iterator[tuple[Activation, int, PowerFit | str]]:
        """(activation, step, slope) of what is at three places or more; the reason in place of a slope that is undecided."""
        for activation in self.activations():
            for step in range(self.steps + 1):
                if sum(self.size(activation, value, step) is not None for value in self.values) < MIN_POINTS:
                    continue
                try:
                    yield activation, step, self.slope(activation, step)
                except Undecided as reason:
                    yield activation, step, str(reason)

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. What diverged or is undecided has no row."""
        rows: list[dict[str, Any]] = []
        for activation, by_place in self.sizes.items():
            for (value, step), sizes in by_place.items():
                mean, low, high = mean_interval(sizes, self.confidence)
                if math.isfinite(mean):
                    rows.append(
                        row("coordinates", self._axes(activation, step) | {"of": "size", self.axis: value}, mean, low, high)
                    )
        for activation, step, slope in self.slopes():
            if isinstance(slope, PowerFit):
                axes = self._axes(activation, step) | {"of": "slope", "against": self.axis}
                rows.append(row("coordinates", axes, slope.exponent, slope.low, slope.high))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data. A size of None is not finite; `slope` is the reason as text where there is none."""
        return {
            "axis": self.axis,
            "values": list(self.values),
            "steps": self.steps,
            "seeds": list(self.seeds),
            "rule": self.rule,
            "control": self.control,
            "sizes": [
                {**activation._asdict(), "at": value, "step": step, "by_seed": [finite(size) for size in sizes]}
                for activation, by_place in self.sizes.items()
                for (value, step), sizes in by_place.items()
            ],
            "slopes": [
                {**activation._asdict(), "step": step, "slope": slope.to_json() if isinstance(slope, PowerFit) else slope}
                for activation, step, slope in self.slopes()
            ],
        }

    def _axes(self, activation: Activation, step: int) -> dict[str, Any]:
        where = {"block": activation.block, "visit": activation.visit}
        return {
            "activation": activation.name,
            **{name: index for name, index in where.items() if index is not None},
            "step": step,
            "rule": self.rule,
            **({"control": True} if self.control else {}),
        }


@torch.no_grad()
def activation_sizes(model: LoopedTransformer, tokens_BN: Tensor, loops: int) -> dict[Activation, float]:
    """Mean |x| of every submodule's output at every visit, of the embedded input and of the logits, from one pass."""
    sizes: dict[Activation, float] = {}

    def see(activation: Activation, _before: Tensor, after: Tensor) -> None:
        sizes[activation] = _size(after)

    embedded = Activation("embedding", None, None)
    sizes[embedded] = _size(model.embed(tokens_BN))
    with watch_calls(model, see):
        logits_BNV = model(tokens_BN, loops)
    # The matrix's own output is before the readout's multiplier, which is half of the rule that the logits obey.
    sizes.pop(Activation("readout", None, None), None)
    sizes[Activation("logits", None, None)] = _size(logits_BNV)
    assert sum(activation.name == "block" for activation in sizes) == model.spec.blocks * loops, "a visit was not seen"
    return sizes


def check_coordinates(
    spec: TrainSpec,
    task: Source,
    *,
    axis: Axis,
    values: Sequence[int],
    steps: int = 4,
    seeds: Sequence[int] = (0, 1, 2),
    control: bool = False,
    device: torch.device | str = "cpu",
    confidence: float = 0.95,
) -> CoordinateCheck:
    """Sizes after 0 .. `steps` optimizer steps of models of `spec` with `axis` at each of `values`, the scaling rule following.

    The learning rate is the spec's base rate as the rule scales it; `control` takes every width for the base, so that
    nothing is scaled with it. Raises InputError for an empty axis, steps < 0 and a control of another axis, and ValueError for
    a shape that cannot be.
    """
    if not (values and seeds) or steps < 0:
        raise InputError("expected at least one value and one seed, and steps of at least 0")
    if control and axis != "width":
        raise InputError(f"control is standard scaling of width; along {axis} it is the rule standard: set scaling.rule to it")
    places = tuple(sorted(set(values)))
    sizes: dict[Activation, dict[tuple[int, int], tuple[float, ...]]] = {}
    for value in places:
        for seed in seeds:
            at = _shape(spec, axis, value, seed)
            if control:
                at = at.model_copy(update={"scaling": at.scaling.model_copy(update={"base_width": value})})
            model, tokens_BN, _ = start_of(at, task, device)
            for step, found in enumerate(_first_steps(at, model, task, tokens_BN, steps)):
                for activation, size in found.items():
                    by_place = sizes.setdefault(activation, {})
                    by_place[value, step] = (*by_place.get((value, step), ()), size)
    return CoordinateCheck(axis, places, steps, tuple(seeds), spec.scaling.rule, control, sizes, confidence)


def _shape(spec: TrainSpec, axis: Axis, value: int, seed: int) -> TrainSpec:
    match axis:
        case "width":
            return reshaped(spec, width=value, seed=seed)
        case "blocks":
            return reshaped(spec, blocks=value, seed=seed)
        case "loops":
            return reshaped(spec, loops=value, seed=seed)


def _first_steps(
    spec: TrainSpec, model: LoopedTransformer, task: Source, tokens_BN: Tensor, steps: int
) -> Iterator[dict[Activation, float]]:
    """Sizes on `tokens_BN` before training and after each step."""
    optimizer, loops = make_optimizer(model, spec), spec.contract.most_loops
    yield activation_sizes(model, tokens_BN, loops)
    for index in range(steps):
        batch = task.random_batch(seed=spec.seed, split="train", index=index, size=spec.batch, length=spec.contract.longest)
        with torch.enable_grad():
            loss = cross_entropy(batch.targets.to(tokens_BN.device))(model(batch.tokens.to(tokens_BN.device), loops))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
        optimizer.step()
        yield activation_sizes(model, tokens_BN, loops)


def _order(activation: Activation) -> tuple[int, int]:
    """By visit, then by block: the order in which they are computed."""
    return int(activation.visit or 0), int(activation.block or 0)


def _size(x: Tensor) -> float:
    return float(x.abs().mean(dtype=torch.float64))
