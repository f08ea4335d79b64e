"""What goes into the engine and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from loopcore.specs.halting import HaltingSpec

__all__ = ["Event", "ExitReason", "Finished", "LoopEvent", "Request", "Ticket"]

ExitReason = Literal[
    "rule",  # T* loops, as measured for the model
    "fixed",  # the loops that were asked for
    "calibrated",  # the fewest loops that were promised to lose less than eps
    "converged",  # a rule that watches the row, by its name
    "entropy",
    "kl",
    "cosine",
    "argmax_stable",
    "max_loops",  # the bound on loops came before the rule's own exit
    "shed",  # left early under pressure, by permission, at or above its accuracy floor
    "deadline",  # its time was over: no answer
    "cancelled",  # nobody waits for it any more: no answer
    "error",  # this row failed: no answer
]


@dataclass(frozen=True)
class Request:
    """One word to be answered."""

    tokens: tuple[int, ...]
    halting: HaltingSpec = field(default_factory=HaltingSpec)
    """The rule, and min and max loops."""
    deadline_s: float | None = None
    """Seconds from submission after which an answer is of no use."""
    accuracy_floor: float | None = None
    """Allows degrading: under pressure the row may leave once the model's measured token accuracy is at this floor."""
    trace: bool = False
    """An event after every loop; pays for a readout at each."""
    logits: bool = False
    """Hand the logits back with the answer."""


@dataclass(frozen=True)
class Ticket:
    """A request that was accepted."""

    id: int
    length: int
    planned_loops: int | None
    """Loops after which it leaves, where the rule knows that beforehand."""
    submitted_at: float
    """By the engine's clock, in seconds."""


@dataclass(frozen=True)
class LoopEvent:
    """A traced row after one more loop."""

    ticket: Ticket
    loop: int
    prediction: tuple[int, ...]
    settled: int
    """Length of the prefix whose prediction did not change in this loop; 0 after the first."""
    residual: float
    """Largest relative change of the state over the row's positions, as the rule `converged` sees it."""


@dataclass(frozen=True)
class Finished:
    """The last word on a request."""

    ticket: Ticket
    exit_reason: ExitReason
    outputs: tuple[int, ...] | None
    """Predicted class at each position; None where there is no answer."""
    loops_used: int
    queue_s: float
    """Seconds between submission and the first loop (or the end, for a row that never looped)."""
    compute_s: float
    """Seconds between the first loop and the end."""
    expected_accuracy: float | None = None
    """Measured token accuracy after `loops_used` loops at this length, where the model's profile covers it."""
    logits: Any = None
    """Numpy array [N, V], where they were asked for."""
    error: str | None = None

    @property
    def loops_planned(self) -> int | None:
        """Loops that were planned when the request came in; None for rules that watch the row."""
        return self.ticket.planned_loops


Event = LoopEvent | Finished
