"""Continuous loop batching (no Ray, no HTTP): `LoopBatchEngine` decides, a `Stepper` computes.

`ModelStepper` runs a model and loads torch; it is imported on first use, so that a scheduler over `TraceStepper` needs none.
"""

from typing import TYPE_CHECKING, Any

from loopcore.batching.engine import LoopBatchEngine
from loopcore.batching.requests import Event, ExitReason, Finished, LoopEvent, Request, Ticket
from loopcore.batching.stats import Stats
from loopcore.batching.stepper import Reading, Stepper
from loopcore.batching.trace_stepper import Recorded, TraceStepper, VirtualClock

if TYPE_CHECKING:
    from loopcore.batching.model_stepper import ModelStepper

__all__ = [
    "Event",
    "ExitReason",
    "Finished",
    "LoopBatchEngine",
    "LoopEvent",
    "ModelStepper",
    "Reading",
    "Recorded",
    "Request",
    "Stats",
    "Stepper",
    "Ticket",
    "TraceStepper",
    "VirtualClock",
]


def __getattr__(name: str) -> Any:
    if name == "ModelStepper":
        from loopcore.batching.model_stepper import ModelStepper

        return ModelStepper
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
