"""One figure at every number of blocks and loops, and its exponents: the frame of the measurements that scale with depth.

L = physical blocks, T = loops (visits of each block), executed depth M = L T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments.accuracy import Words
from loopcore.instruments.fits import PowerFit, finite, fit_power, mean_interval, row
from loopcore.instruments.speed import MIN_POINTS
from loopcore.model import LoopedTransformer, Sized, build_model
from loopcore.specs.contract import FixedLoops
from loopcore.specs.train import TrainSpec

__all__ = ["Along", "Depth", "DepthTable", "Source", "reshaped", "start_of", "sweep_depths"]

Along = Literal["loops", "blocks"]
_Result = TypeVar("_Result")


class Source(Words, Sized, Protocol):
    """What the instruments ask of a task that they build models for: its sizes and seeded batches."""


class Depth(NamedTuple):
    """L physical blocks visited T times."""

    blocks: int
    loops: int

    @property
    def executed(self) -> int:
        """M = L T."""
        return self.blocks * self.loops


def reshaped(
    spec: TrainSpec,
    *,
    width: int | None = None,
    blocks: int | None = None,
    loops: int | None = None,
    seed: int | None = None,
    tied: bool | None = None,
) -> TrainSpec:
    """`spec` at another shape or seed, the scaling rule following. What is left out stays.

    A wider model gets more heads, not wider ones, as muP asks. Loops are T at every length, for the contract, the scaling
    rule and an untied model's weights. Raises ValueError for a shape that cannot be.
    """
    content = spec.resolved()
    if width is not None:
        head_width = spec.model.width // spec.model.heads
        if width % head_width:
            raise InputError(f"a width in steps of the head width {head_width} was expected, got {width}")
        content["model"] |= {"width": width, "heads": width // head_width}
    if blocks is not None:
        content["model"]["blocks"] = blocks
    if loops is not None:
        content["contract"]["loops"] = FixedLoops(count=loops).resolved()
        content["scaling"]["loops"] = loops
        content["model"]["untied_loops"] = None
    if tied is not None:
        content["model"] |= {"tied": tied, "untied_loops": None}
    if seed is not None:
        content["seed"] = seed
    return TrainSpec.model_validate(content)


def start_of(spec: TrainSpec, task: Source, device: torch.device | str) -> tuple[LoopedTransformer, Tensor, Tensor]:
    """The model of `spec` as initialised, and the first batch it would train on: (model, tokens_BN, targets_BN).

    Raises InputError for a recall convnet, which has no scaling rule to measure.
    """
    model = build_model(spec, task)
    if not isinstance(model, LoopedTransformer):
        raise InputError("the instruments of scaling measure transformers; got the architecture recall_conv")
    model = model.to(device)
    batch = task.random_batch(seed=spec.seed, split="train", index=0, size=spec.batch, length=spec.contract.longest)
    return model, batch.tokens.to(device), batch.targets.to(device)


@dataclass(frozen=True)
class DepthTable:
    """A figure at every (blocks, loops) measured, once a seed."""

    instrument: str
    figure: str
    seeds: tuple[int, ...]
    values: dict[Depth, tuple[float, ...]]
    """One value a seed, in the order of `seeds`."""
    axes: dict[str, Any] = field(default_factory=dict)
    """What else its rows say about themselves."""
    confidence: float = 0.95

    def exponent(self, along: Along, at: int) -> PowerFit:
        """How the figure grows along loops at `at` blocks, or along blocks at `at` loops.

        Raises Undecided for fewer than three depths on that line, and for values that are not positive and finite.
        """
        other: Along = "blocks" if along == "loops" else "loops"
        line = sorted(depth for depth in self.values if getattr(depth, other) == at)
        curves = [[self.values[depth][s] for depth in line] for s in range(len(self.seeds))]
        return fit_power([getattr(depth, along) for depth in line], curves, confidence=self.confidence)

    def lines(self) -> list[tuple[Along, int]]:
        """The lines of three depths or more: (along, at)."""
        blocks, loops = [depth.blocks for depth in self.values], [depth.loops for depth in self.values]
        along_loops: list[tuple[Along, int]] = [("loops", at) for at in sorted(set(blocks)) if blocks.count(at) >= MIN_POINTS]
        along_blocks: list[tuple[Along, int]] = [("blocks", at) for at in sorted(set(loops)) if loops.count(at) >= MIN_POINTS]
        return along_loops + along_blocks

    def fits(self) -> tuple[dict[tuple[Along, int], PowerFit], dict[tuple[Along, int], str]]:
        """The exponent of every line, and of those without one the reason."""
        fits: dict[tuple[Along, int], PowerFit] = {}
        undecided: dict[tuple[Along, int], str] = {}
        for line in self.lines():
            try:
                fits[line] = self.exponent(*line)
            except Undecided as reason:
                undecided[line] = str(reason)
        return fits, undecided

    def rows(self) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes, value, low, high. What diverged or is undecided has no row."""
        rows: list[dict[str, Any]] = []
        for depth, values in self.values.items():
            mean, low, high = mean_interval(values, self.confidence)
            if math.isfinite(mean):
                axes = {"of": self.figure, "blocks": depth.blocks, "loops": depth.loops, **self.axes}
                rows.append(row(self.instrument, axes, mean, low, high))
        for (along, at), fit in self.fits()[0].items():
            axes = {"of": f"{self.figure}_exponent", "along": along, "at": at, **self.axes}
            rows.append(row(self.instrument, axes, fit.exponent, fit.low, fit.high))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        fits, undecided = self.fits()
        return {
            "figure": self.figure,
            "axes": dict(self.axes),
            "seeds": list(self.seeds),
            "values": [
                {"blocks": depth.blocks, "loops": depth.loops, "by_seed": [finite(value) for value in values]}
                for depth, values in self.values.items()
            ],
            "exponents": [{"along": along, "at": at, **fit.to_json()} for (along, at), fit in fits.items()],
            "undecided": [{"along": along, "at": at, "reason": reason} for (along, at), reason in undecided.items()],
        }


def sweep_depths(
    spec: TrainSpec,
    task: Source,
    measure: Callable[[TrainSpec, LoopedTransformer, Tensor, Tensor], _Result],
    *,
    blocks: Sequence[int],
    loops: Sequence[int],
    seeds: Sequence[int],
    device: torch.device | str = "cpu",
) -> dict[Depth, tuple[_Result, ...]]:
    """measure(spec, model, tokens_BN, targets_BN) of freshly initialised models at every blocks x loops, once a seed.

    A seed draws weights and batch; the same seed draws the same batch at every depth. Raises InputError for an empty axis.
    """
    if not (blocks and loops and seeds):
        raise InputError("expected at least one number of blocks, one of loops and one seed")
    return {
        Depth(L, T): tuple(
            measure(at := reshaped(spec, blocks=L, loops=T, seed=seed), *start_of(at, task, device)) for seed in seeds
        )
        for L in blocks
        for T in loops
    }
