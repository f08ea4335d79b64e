"""One request from submission to its end, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from loopcore.batching.requests import ExitReason, Finished, LoopEvent, Request, Ticket
from loopcore.batching.stepper import Reading
from loopcore.halting import Halting, HaltingProfile, Plan, Watch

__all__ = ["Row"]

UNANSWERED = frozenset({"deadline", "cancelled", "error"})


@dataclass(eq=False, slots=True)
class Row:
    """A request with its rule, its bounds and where it stands. Once `leaving` is set it loops no more."""

    ticket: Ticket
    request: Request
    halting: Halting
    plan: Plan
    watch: Watch | None
    bucket: int
    loop: int = 0
    started_at: float | None = None
    told: tuple[int, ...] | None = None  # the prediction in the last event
    leaving: ExitReason | None = None
    error: str | None = None

    @property
    def remember(self) -> bool:
        """Whether something looks at the states before the current one."""
        return self.request.trace or self.halting.needs_states

    @property
    def due(self) -> bool:
        """Whether its rule has to look at it after this loop."""
        return self.watch is not None and self.watch.due(self.loop)

    def fail(self, error: Exception | str) -> None:
        """Ends without an answer, alone."""
        self.leaving, self.error = "error", error if isinstance(error, str) else f"{type(error).__name__}: {error}"

    def judge(self, residual: float) -> None:
        """Takes what its rule saw in this loop."""
        assert self.watch is not None
        if self.watch.judge(self.loop, residual):
            self.leaving = self.leaving or cast("ExitReason", self.halting.spec.kind)
        elif residual != residual and self.halting.needs_states:
            self.fail("the state of this row is not finite")
        elif self.loop >= self.plan.max_loops:
            self.leaving = self.leaving or "max_loops"

    def bound(self, shed: bool, profile: HaltingProfile | None) -> None:
        """Ends it at its known exit or its most loops, or under pressure where it allows that."""
        if self.leaving:
            return
        if self.loop == self.plan.known_exit:
            self.leaving = cast("ExitReason", self.plan.reason)
        elif shed and self._good_enough(profile):
            self.leaving = "shed"
        elif self.loop >= self.plan.max_loops and not (self.halting.needs_logits and self.due):
            self.leaving = "max_loops"  # a rule that is still to see this loop's prediction may give a better reason

    def _good_enough(self, profile: HaltingProfile | None) -> bool:
        floor = self.request.accuracy_floor
        if floor is None or profile is None or self.loop < self.plan.min_loops:
            return False
        expected = profile.expected_accuracy(self.ticket.length, self.loop)
        return expected is not None and expected >= floor

    def event(self, prediction: tuple[int, ...], change: float) -> LoopEvent:
        """What a traced row tells after a loop."""
        settled = 0
        if self.told is not None:
            pairs = enumerate(zip(prediction, self.told, strict=True))
            settled = next((i for i, (now, before) in pairs if now != before), len(prediction))
        self.told = prediction
        return LoopEvent(self.ticket, self.loop, prediction, settled, change)

    def finished(self, now: float, reading: Reading | None, profile: HaltingProfile | None) -> Finished:
        """The last word on it."""
        assert self.leaving is not None
        answer = None if self.leaving in UNANSWERED else reading
        assert answer is not None or self.leaving in UNANSWERED, f"{self.leaving} without a reading"
        started = now if self.started_at is None else self.started_at
        return Finished(
            ticket=self.ticket,
            exit_reason=self.leaving,
            outputs=answer.prediction if answer else None,
            loops_used=self.loop,
            queue_s=started - self.ticket.submitted_at,
            compute_s=now - started,
            expected_accuracy=profile.expected_accuracy(self.ticket.length, self.loop) if answer and profile else None,
            logits=answer.logits if answer and self.request.logits else None,
            error=self.error,
        )
