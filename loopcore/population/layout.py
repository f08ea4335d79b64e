"""Where the members' parameters lie: one row a member, all of a model's parameters side by side in it.

Shapes in names: M members, C columns (values of a model's parameters), S stretches.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from loopcore.model import LoopedTransformer
from loopcore.optim import GROUPS, Group, group_of

__all__ = ["Layout", "Place", "Storage", "Stretch"]


class Place(NamedTuple):
    """Columns of one parameter."""

    name: str
    start: int
    stop: int
    shape: torch.Size
    stretch: int
    """Number of the stretch it is in."""


class Stretch(NamedTuple):
    """Columns that AdamW treats alike: one parameter group, first used in one loop."""

    group: Group
    loop: int
    """A step of t loops trains the stretch if loop < t. 0 but for the later loops of an untied model."""
    start: int
    stop: int


class Layout:
    """Columns of the parameters of models such as `model`, sorted by group and, in an untied model, by loop."""

    def __init__(self, model: LoopedTransformer) -> None:
        found: dict[tuple[int, int], list[tuple[str, torch.Size]]] = {}
        for name, parameter in model.named_parameters():
            key = GROUPS.index(group_of(name, parameter)), _first_loop(name, model)
            found.setdefault(key, []).append((name, parameter.shape))
        places: list[Place] = []
        stretches: list[Stretch] = []
        column = 0
        for (group, loop), parameters in sorted(found.items()):
            first = column
            for name, shape in parameters:
                places.append(Place(name, column, column + math.prod(shape), shape, len(stretches)))
                column = places[-1].stop
            stretches.append(Stretch(GROUPS[group], loop, first, column))
        self.places, self.stretches, self.columns = tuple(places), tuple(stretches), column

    def stacked(self, rows_RC: Tensor) -> dict[str, Tensor]:
        """Every parameter with the rows as its first axis, [R, ...]. One split, whose backward writes every gradient once."""
        parts = rows_RC.split([place.stop - place.start for place in self.places], dim=1)
        return {place.name: part.unflatten(1, place.shape) for place, part in zip(self.places, parts, strict=True)}

    def views(self, row_C: Tensor) -> dict[str, Tensor]:
        """Every parameter of one row, sharing its memory."""
        return {place.name: row_C[place.start : place.stop].view(place.shape) for place in self.places}


@dataclass(frozen=True)
class Storage:
    """What AdamW changes, of all members."""

    layout: Layout
    weights_MC: Tensor
    averages_MC: Tensor
    """First moments of the gradients."""
    squares_MC: Tensor
    """Second moments."""
    steps_MS: Tensor
    """Optimizer steps that each stretch has had; fp32 on the CPU, as torch's AdamW counts them."""

    @classmethod
    def empty(cls, layout: Layout, members: int, device: torch.device) -> Storage:
        weights_MC, averages_MC, squares_MC = (torch.zeros(members, layout.columns, device=device) for _ in range(3))
        return cls(layout, weights_MC, averages_MC, squares_MC, torch.zeros(members, len(layout.stretches)))

    def rows(self, rows: list[int]) -> Tensor:
        """Weights [R, C] of some members; where those are all of them in order, the storage itself."""
        return self.weights_MC if rows == list(range(len(self.weights_MC))) else self.weights_MC[rows]


def _first_loop(name: str, model: LoopedTransformer) -> int:
    owner, *rest = name.split(".")
    if model.untied_loops is None or owner not in ("blocks", "injections"):
        return 0
    return int(rest[0]) // (model.spec.blocks if owner == "blocks" else 1)
