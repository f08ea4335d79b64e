"""The words that instruments which reach into the loop are given, and whether a model has the loops they need.

Shapes: B words, N positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from loopcore.errors import InputError
from loopcore.instruments.accuracy import Words
from loopcore.looped import Steppable

__all__ = ["Drawn", "drawn_words", "with_loops"]


class Drawn(NamedTuple):
    """One batch of the words measured, on the model's device."""

    batch: int
    first: int
    """Number of its first word among all that are measured."""
    tokens_BN: Tensor
    targets_BN: Tensor


def drawn_words(model: Steppable, task: Words, *, words: int, length: int, seed: int, split: str, batch: int) -> Iterator[Drawn]:
    """The same words, in the same batches, as `correct_by_loop` measures. Raises InputError for counts below 1."""
    if min(words, length, batch) < 1:
        raise InputError(f"expected words, length and batch of at least 1, got {words}, {length} and {batch}")
    weight = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    device = None if weight is None else weight.device
    for number, first in enumerate(range(0, words, batch)):
        size = min(batch, words - first)
        drawn = task.random_batch(seed=seed, split=split, index=number, size=size, length=length)
        yield Drawn(number, first, drawn.tokens.to(device), drawn.targets.to(device))


def with_loops(model: Steppable, loops: int) -> str | None:
    """Why the model cannot take `loops` loops; None where it can."""
    limit: int | None = getattr(model, "untied_loops", None)
    if limit is None or loops <= limit:
        return None
    return f"the instrument needs {loops} loops and this untied model has weights for {limit}"
