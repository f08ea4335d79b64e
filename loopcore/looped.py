"""What every looped model is: the input embedded once, one map taken T times, a readout. A model says what its parts do.

Shapes in names: B batch, N input positions, P positions of the state (BOS included, where there is one), D width, V classes,
T loops. States are h_BPD, embedded inputs e_BPD (whose last axis may be of another size than the states').
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Literal, NamedTuple, Protocol, overload

import torch
from torch import Tensor, nn

from loopcore.errors import InputError

__all__ = ["LoopedModule", "Steppable", "Trace"]


class Trace(NamedTuple):
    """A forward pass with the states it went through."""

    logits_BNV: Tensor
    states: list[Tensor]
    """h_BPD before the first loop and after each: T + 1 of them."""


class Steppable(Protocol):
    """A model whose loops can be taken one by one. A `LoopedModule` is one; so is whatever has these five."""

    def embed(self, tokens_BN: Tensor) -> Tensor: ...
    def start(self, e_BPD: Tensor) -> Tensor: ...
    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor: ...
    def readout(self, h_BPD: Tensor) -> Tensor: ...
    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Iterator[Tensor]: ...


class LoopedModule(nn.Module, ABC):
    """The loop around a model's parts: what it shows of the input, the states as they come, and the whole pass."""

    vocabulary: int
    classes: int
    untied_loops: int | None = None
    """Loops that an untied model has weights for; None where any number may be asked for."""
    always_shown: int = 0
    """Positions before the first input, which an input schedule never hides: BOS."""
    injects: bool = True
    """Whether the input re-enters at every loop, so that an input schedule can show parts of it later."""

    @property
    def position_free_of_loop(self) -> bool:
        """Whether `loop` is the same map at every t, so that rows at different loops can share one call."""
        return True

    @abstractmethod
    def admit(self, loops: int) -> None:
        """Raises InputError for loops < 1, LengthError for more loops than an untied model has weights for."""

    @abstractmethod
    def embed(self, tokens_BN: Tensor) -> Tensor:
        """The embedded input e_BPD. Raises LengthError for an input that does not fit the model."""

    @abstractmethod
    def start(self, e_BPD: Tensor) -> Tensor:
        """State h_BPD before the first loop."""

    @abstractmethod
    def loop(self, h_BPD: Tensor, e_BPD: Tensor, t: int) -> Tensor:
        """One loop, h_BPD to h_BPD. `t` counts from 0."""

    @abstractmethod
    def readout(self, h_BPD: Tensor) -> Tensor:
        """Logits [B, N, V]."""

    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Iterator[Tensor]:
        """Yields the state h_BPD before the first loop and after each of `loops` loops: T + 1 states, one in memory at a time.

        `reveal_per_loop` = r imposes an input schedule: loop t = 0, 1, ... sees the first floor(r (t + 1)) inputs, and zeros in
        place of the others' embeddings; BOS is always there. At r = 1 input i (from 1) counts from loop i (from 1) on.
        Raises InputError for loops < 1 and a schedule that cannot be, LengthError for more loops than an untied model has or an
        input that does not fit.
        """
        self.admit(loops)
        if reveal_per_loop is not None and not (self.injects and reveal_per_loop > 0):
            raise InputError(
                "an input schedule needs a positive number of inputs a loop and an injection, since inputs after the first loop "
                f"enter by it; got {reveal_per_loop:g} and a model {'with' if self.injects else 'without'} injection"
            )
        return self._states(self.embed(tokens_BN), loops, reveal_per_loop)

    def _states(self, e_BPD: Tensor, loops: int, reveal_per_loop: float | None) -> Iterator[Tensor]:
        h_BPD = self.start(self.revealed(e_BPD, 0, reveal_per_loop))
        yield h_BPD
        for t in range(loops):
            h_BPD = self.loop(h_BPD, self.revealed(e_BPD, t, reveal_per_loop), t)
            yield h_BPD

    def revealed(self, e_BPD: Tensor, t: int, reveal_per_loop: float | None) -> Tensor:
        """The embedded input as loop t sees it: zeros in place of the inputs that the schedule has not shown yet."""
        if reveal_per_loop is None:
            return e_BPD
        # An error of rounding in r (t + 1) must not hide an input for a loop.
        visible = int(reveal_per_loop * (t + 1) + 1e-9) + self.always_shown
        shown_P = torch.arange(e_BPD.shape[1], device=e_BPD.device) < visible
        return torch.where(shown_P[:, None], e_BPD, 0.0)

    @overload
    def forward(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Tensor: ...

    @overload
    def forward(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None, trace: Literal[True]) -> Trace: ...

    def forward(
        self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None, trace: bool = False
    ) -> Tensor | Trace:
        """Logits [B, N, V] after `loops` loops, or with `trace` those and every loop's state, from the same pass.

        Arguments and errors as in `iterate`.
        """
        states, h_BPD = [], None
        for h_BPD in self.iterate(tokens_BN, loops, reveal_per_loop=reveal_per_loop):
            if trace:
                states.append(h_BPD)
        assert h_BPD is not None
        logits_BNV = self.readout(h_BPD)
        return Trace(logits_BNV, states) if trace else logits_BNV
