"""Which position is right after which loop: the one measurement that frontier, tau and halting are all read from.

Shapes: T loops, B words, N positions, P = N + BOS, D width, V classes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from loopcore.errors import InputError
from loopcore.instruments.fits import row
from loopcore.statistics import wilson

__all__ = ["AccuracyByLoop", "correct_by_loop", "exact_by_prefix", "measure_accuracy", "wilson"]


class Looped(Protocol):
    """What the instruments ask of a model: the state before the first loop and after each, as they come, and the readout."""

    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Iterator[Tensor]: ...
    def readout(self, h_BPD: Tensor) -> Tensor: ...


class Words(Protocol):
    """What the instruments ask of a task: seeded batches with targets."""

    def random_batch(self, *, seed: int, split: Any, index: int, size: int, length: int) -> Any: ...


def correct_by_loop(
    model: Looped,
    task: Words,
    *,
    words: int,
    length: int,
    loops: int,
    seed: int = 0,
    split: str = "held_out",
    reveal_per_loop: float | None = None,
    batch: int = 256,
) -> Tensor:
    """correct_TBN, bool on the CPU: whether position i of word b is right when the readout is taken after loop t + 1.

    N is what the task makes of `length`: as many, or its square where it is the side of one. Logits that are no numbers are a
    wrong answer. The loops are streamed, one state at a time, so memory does not grow with `loops` beyond the answer itself
    (one byte an entry). `reveal_per_loop` shows the input as a streaming contract does; leave it out to show all of it.
    """
    if min(words, length, loops, batch) < 1:
        raise InputError(f"expected words, length, loops and batch of at least 1, got {words}, {length}, {loops}, {batch}")
    weight = next(model.parameters(), None) if isinstance(model, torch.nn.Module) else None
    device = None if weight is None else weight.device
    correct_TBN: Tensor | None = None
    with torch.inference_mode():  # the answer itself is an ordinary tensor, made outside
        for index, first in enumerate(range(0, words, batch)):
            size = min(batch, words - first)
            drawn = task.random_batch(seed=seed, split=split, index=index, size=size, length=length)
            targets_BN = drawn.targets.to(device)
            if correct_TBN is None:
                with torch.inference_mode(False):
                    correct_TBN = torch.empty(loops, words, targets_BN.shape[1], dtype=torch.bool)
            states = model.iterate(drawn.tokens.to(device), loops, reveal_per_loop=reveal_per_loop)
            for t, h_BPD in enumerate(states):
                if t:  # the first state is the one before any loop
                    best_BN, answer_BN = model.readout(h_BPD).max(-1)
                    right_BN = (answer_BN == targets_BN) & best_BN.isfinite()
                    correct_TBN[t - 1, first : first + size] = right_BN.cpu()
    assert correct_TBN is not None
    return correct_TBN


def exact_by_prefix(correct_TBN: Tensor) -> Tensor:
    """exact_TN, float64: the share of words whose first n positions are all right after loop t + 1 (n = 1..N)."""
    exact_TN = torch.empty(correct_TBN.shape[0], correct_TBN.shape[2], dtype=torch.float64)
    for t, correct_BN in enumerate(correct_TBN):  # a loop at a time: cumprod widens every entry to eight bytes
        exact_TN[t] = correct_BN.long().cumprod(-1).double().mean(0)
    return exact_TN


@dataclass(frozen=True)
class AccuracyByLoop:
    """Accuracy after loop t + 1, in the four ways that are too easily mixed up."""

    words: int
    token_T: tuple[float, ...]
    """Share of right positions."""
    exact_T: tuple[float, ...]
    """Share of words right at every position."""
    last_T: tuple[float, ...]
    """Share of words right at the last position."""
    position_TN: tuple[tuple[float, ...], ...]
    """Share of words right at each position."""
    token_interval_T: tuple[tuple[float, float], ...]

    @property
    def best_loops(self) -> int:
        """The loop count with the highest token accuracy; the smallest of several."""
        return max(range(len(self.token_T)), key=self.token_T.__getitem__) + 1

    def rows(
        self, *, instrument: str = "accuracy", axes: Mapping[str, Any] | None = None, positions: bool = True
    ) -> list[dict[str, Any]]:
        """One row a figure, for the registry: instrument, axes (the given ones too), value, low, high. Without `positions` the
        rows of single positions, T N of them, are left out."""
        rows: list[dict[str, Any]] = []
        for t, per_position in enumerate(self.position_TN):
            low, high = self.token_interval_T[t]
            at = {**(axes or {}), "loop": t + 1}
            rows.append(row(instrument, {"of": "token", **at}, self.token_T[t], low, high))
            rows.append(row(instrument, {"of": "exact", **at}, self.exact_T[t], *wilson(self.exact_T[t], self.words)))
            rows.append(row(instrument, {"of": "last", **at}, self.last_T[t], *wilson(self.last_T[t], self.words)))
            for i, share in enumerate(per_position if positions else ()):
                rows.append(row(instrument, {"of": "position", **at, "position": i}, share, *wilson(share, self.words)))
        return rows

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return {
            "words": self.words,
            "token": list(self.token_T),
            "exact": list(self.exact_T),
            "last": list(self.last_T),
            "position": [list(row) for row in self.position_TN],
        }


def measure_accuracy(correct_TBN: Tensor) -> AccuracyByLoop:
    """Accuracy against loops. The 95 % interval of token accuracy takes a word, not a position, as the independent unit."""
    words = correct_TBN.shape[1]
    by_word_TB = torch.stack([correct_BN.double().mean(-1) for correct_BN in correct_TBN])
    token_T = by_word_TB.mean(1)
    error_T = by_word_TB.std(1, correction=0) / words**0.5
    low_T, high_T = (token_T - 1.96 * error_T).clamp_min(0.0), (token_T + 1.96 * error_T).clamp_max(1.0)
    position_TN = torch.stack([correct_BN.double().mean(0) for correct_BN in correct_TBN])
    return AccuracyByLoop(
        words=words,
        token_T=tuple(token_T.tolist()),
        exact_T=tuple(exact_by_prefix(correct_TBN)[:, -1].tolist()),
        last_T=tuple(position_TN[:, -1].tolist()),
        position_TN=tuple(tuple(row) for row in position_TN.tolist()),
        token_interval_T=tuple(zip(low_T.tolist(), high_T.tolist(), strict=True)),
    )
