"""What training demands: which lengths, and how many loops each of them gets (the *contract* of arXiv 2607.20594)."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from loopcore.specs.base import PositiveInt, Spec, UnitInterval

__all__ = ["ContractSpec", "FixedLoops", "LogLoops", "LoopRule", "ProportionalLoops"]


class ProportionalLoops(Spec):
    """T = ceil(k n): k loops a position, a demand of 1/k positions a loop."""

    kind: Literal["proportional"] = "proportional"
    per_position: float = Field(default=1.0, gt=0.0, le=64.0)
    """k, loops a position; 1 asks for one position a loop, 0.5 for two, 2 for half a position."""

    def loops(self, length: int) -> int:
        # ceil(k n) is asked of products such as 0.1 * 30 = 3.0000000000000004: an error of rounding is not a loop.
        return max(1, math.ceil(self.per_position * length - 1e-9))


class FixedLoops(Spec):
    """T loops whatever the length."""

    kind: Literal["fixed"] = "fixed"
    count: PositiveInt = 8
    """T."""

    def loops(self, length: int) -> int:
        return self.count


class LogLoops(Spec):
    """T = ceil(log2 n) + extra: the depth of a parallel scan."""

    kind: Literal["log"] = "log"
    extra: int = Field(default=0, ge=0)
    """Loops on top of ceil(log2 n)."""

    def loops(self, length: int) -> int:
        return max(1, math.ceil(math.log2(max(length, 1))) + self.extra)


LoopRule = Annotated[ProportionalLoops | FixedLoops | LogLoops, Field(discriminator="kind")]


class ContractSpec(Spec):
    """Lengths, loops per length, and how the input is shown.

    Training goes through `lengths` in order, at a fixed length per stage (a causal model's prefixes supply the shorter
    ones), and moves on when held-out token accuracy reaches `promote_at`.
    """

    lengths: tuple[PositiveInt, ...] = Field(default=(2, 4, 6, 8), min_length=1, max_length=64)
    """Word length of each stage (text: the context length, one stage)."""
    loops: LoopRule = ProportionalLoops()
    """Loops T as a function of length n."""
    input_schedule: Literal["all", "streaming"] = "all"
    """`streaming` shows input i from loop i on and zeros before: an imposed seriality, which takes at least n loops."""
    extra_loops: float = Field(default=1.0, ge=1.0, le=4.0)
    """Above 1 every training step draws its loops uniformly from T to `extra_loops` T, both included, which keeps more loops than
    T from hurting; evaluation and promotion stay at T."""
    operator_first: bool = False
    """The first stage, of length 2, trains the pairs of elements of a group, all of them equally often, and ends when
    `operator_at` of all pairs are right."""
    operator_at: UnitInterval = 0.995
    """Share of all pairs, right at both positions, that ends the stage of `operator_first`. At a constant learning rate .995 was
    reached on S5 and .999 never."""
    promote_at: UnitInterval = 0.98
    """Held-out token accuracy that ends a stage; on the last one, what a run has to end with to have solved its task."""

    @model_validator(mode="after")
    def _lengths_grow(self) -> ContractSpec:
        if any(after <= before for before, after in zip(self.lengths, self.lengths[1:], strict=False)):
            raise ValueError(f"lengths must grow from stage to stage, got {list(self.lengths)}")
        return self

    @model_validator(mode="after")
    def _an_operator_is_of_pairs(self) -> ContractSpec:
        if self.operator_first and self.lengths[0] != 2:
            raise ValueError(f"operator_first begins with pairs, so lengths must begin with 2, got {list(self.lengths)}")
        if self.operator_first and len(self.lengths) == 1:
            raise ValueError("operator_first is a first stage: give a longer length after 2")
        return self

    @model_validator(mode="after")
    def _streaming_shows_every_input(self) -> ContractSpec:
        short = next((n for n in self.lengths if self.loops.loops(n) < n), None)
        if self.input_schedule == "streaming" and short is not None:
            raise ValueError(
                f"streaming shows input i at loop i, so length {short} needs {short} loops or more, got "
                f"{self.loops.loops(short)}; give the contract more loops, or show all inputs"
            )
        return self

    @property
    def longest(self) -> int:
        """Largest trained length n."""
        return self.lengths[-1]

    @property
    def most_loops(self) -> int:
        """Largest T(n) of the trained lengths."""
        return max(self.loops.loops(length) for length in self.lengths)

    def most_drawn(self, loops: int) -> int:
        """Most loops that a training step at T = `loops` may draw: floor(extra_loops T)."""
        return math.floor(self.extra_loops * loops + 1e-9)
