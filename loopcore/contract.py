"""Where a run stands in its contract: the stage's length and loops, and when the next stage begins (arXiv 2607.20594)."""

from __future__ import annotations

from typing import Any

from loopcore.errors import InputError
from loopcore.specs.contract import ContractSpec

__all__ = ["Stages"]


class Stages:
    """The curriculum of `spec`, counted from stage 0."""

    def __init__(self, spec: ContractSpec) -> None:
        self.spec = spec
        self.index = 0

    @property
    def length(self) -> int:
        """Length n that this stage trains, in positions."""
        return self.spec.lengths[self.index]

    @property
    def loops(self) -> int:
        """Loops T that this stage trains."""
        return self.loops_for(self.length)

    @property
    def last(self) -> bool:
        return self.index == len(self.spec.lengths) - 1

    @property
    def operator(self) -> bool:
        """Whether this is the stage that trains all pairs of a group's elements."""
        return self.spec.operator_first and self.index == 0

    @property
    def reveal_per_loop(self) -> float | None:
        """Inputs that the input schedule shows a loop; None where all are there from the first."""
        return 1.0 if self.spec.input_schedule == "streaming" else None

    def loops_for(self, length: int) -> int:
        """T(n) of the contract, at any length."""
        return self.spec.loops.loops(length)

    def reached(self, accuracy: float) -> bool:
        """Whether an accuracy is what the contract asks of this stage: held-out token accuracy, or, where the stage trains all
        pairs, the share of them that are right."""
        return accuracy >= (self.spec.operator_at if self.operator else self.spec.promote_at)

    def advance(self, accuracy: float) -> bool:
        """Goes to the next stage if there is one and the accuracy is enough (see `reached`); says whether it did."""
        promoted = not self.last and self.reached(accuracy)
        self.index += promoted
        return promoted

    def state_dict(self) -> dict[str, Any]:
        return {"stage": self.index}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises InputError for a stage that this contract does not have."""
        stage = state["stage"]
        if not 0 <= stage < len(self.spec.lengths):
            raise InputError(f"the state is at stage {stage}, this contract has stages 0 to {len(self.spec.lengths) - 1}")
        self.index = stage
