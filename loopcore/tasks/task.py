"""What a task is to the rest of the house. Shapes: B sequences, N positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

__all__ = ["Batch", "Split", "Task", "generator"]

Split = Literal["train", "held_out"]


class Batch(NamedTuple):
    """Inputs and what is right at each of their positions: int64, [B, N] both, on the CPU."""

    tokens: Tensor
    targets: Tensor


class Task(Protocol):
    """Sequences with a right answer at every position.

    An installed package brings its own by the entry-point group `loopcore.tasks`: a callable that takes the task's spec and
    gives back an object of this shape.
    """

    @property
    def name(self) -> str:
        """A short name for people."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of input tokens; a model adds its BOS by itself."""
        ...

    @property
    def classes(self) -> int:
        """Number of answers a position can have."""
        ...

    @property
    def score(self) -> Literal["exact", "loss"]:
        """`exact`: every position has one right answer, so a run can solve the task. `loss`: only the loss counts."""
        ...

    @property
    def fingerprint(self) -> str:
        """The same for two tasks only if they draw the same batches: a run is not resumed on other data."""
        ...

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """Batch `index` of a stream: a pure function of its arguments, so that a stream is resumed by its index alone."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokens of what a person typed. Raises UnknownSymbol, or LengthError where there are none."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of tokens or of answers; the inverse of `encode`."""
        ...


def generator(*key: int | str) -> torch.Generator:
    """A generator that depends on `key` alone: streams of different keys are independent, whatever order they are read in."""
    digest = hashlib.blake2b("\0".join(map(str, key)).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
