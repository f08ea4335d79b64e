"""What the engine asks of whatever does the work. `ModelStepper` runs a model, `TraceStepper` follows a record."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

__all__ = ["Reading", "Stepper"]


@dataclass(frozen=True)
class Reading:
    """One row's prediction now."""

    prediction: tuple[int, ...]
    finite: bool = True
    """False where the row's logits are not finite numbers: it has no answer."""
    logits: Any = None
    """Numpy array [N, V], where asked for."""


class Stepper(Protocol):
    """Rows in slots 0, 1, ... of buckets, a bucket a length; the engine decides, the stepper computes.

    Every call takes slots of one bucket and gives one value a slot, in their order. A call that raises has changed
    nothing, so the engine may repeat it for each slot alone to find the row at fault.
    """

    @property
    def vocabulary(self) -> int:
        """Tokens are 0 .. vocabulary - 1."""
        ...

    @property
    def max_length(self) -> int | None:
        """Longest word; None where there is no bound."""
        ...

    @property
    def max_loops(self) -> int | None:
        """Most loops; None where there is no bound."""
        ...

    @property
    def pads(self) -> bool:
        """Whether a word may stand in a longer bucket, padded on the right, with the same answer (a causal model's may)."""
        ...

    def admit(self, bucket: int, slots: Sequence[int], words: Sequence[Sequence[int]], *, remember: bool) -> None:
        """Embeds words into free slots. With `remember`, the states before the current one are kept from here on."""
        ...

    def step(self, bucket: int, slots: Sequence[int], loops: Sequence[int], *, remember: bool) -> None:
        """One loop for every slot; `loops` are those each has done."""
        ...

    def readout(self, bucket: int, slots: Sequence[int], *, logits: bool) -> list[Reading]:
        """Predictions of the slots' words."""
        ...

    def residuals(self, bucket: int, slots: Sequence[int], kind: str) -> list[float]:
        """How far each row is from standing still, as halting rule `kind` sees it.

        A rule that watches the prediction compares the readout of this loop, which must have been taken, with the one at
        its check before; a row's first check gives a value without meaning.
        """
        ...

    def leave(self, bucket: int, slots: Sequence[int], moves: Sequence[tuple[int, int]]) -> None:
        """Rows in `slots` are gone; then each (source, target) row moves into a place that this freed."""
        ...

    def close(self, bucket: int) -> None:
        """Nothing is left in the bucket: its memory may go."""
        ...
