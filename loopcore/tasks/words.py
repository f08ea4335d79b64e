"""Word problems over a finite group: tokens g_1 .. g_N, the target at position i is the product g_1 ... g_i (arXiv 2607.20594).

Products run from left to right. Shapes: B words, N positions, G elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from loopcore.errors import LengthError, UnknownSymbol
from loopcore.specs.task import WordTask
from loopcore.tasks.groups import finite_group
from loopcore.tasks.task import Batch, Split, generator

__all__ = ["WordProblem"]


class WordProblem:
    """The word problem of `spec.group`. Raises UnknownGroup.

    Words are uniform. The held-out stream is another stream, not another set: a group of G elements has G^N words of length
    N, so that the short ones of a small group are all seen in training, and of the long ones next to none.
    """

    score: Literal["exact"] = "exact"

    def __init__(self, spec: WordTask) -> None:
        self.spec = spec
        self.group = finite_group(spec.group)
        self.name = f"words of {spec.group}"
        self.vocabulary = self.classes = self.group.order
        self.fingerprint = f"word/{spec.group}/1"

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """`size` uniform words of `length` elements, and their running products: a pure function of the arguments."""
        stream = generator("word", seed, split, index, length)
        tokens_BN = torch.randint(self.group.order, (size, length), generator=stream)
        return Batch(tokens_BN, self.products(tokens_BN))

    def pairs(self, rows_B: Tensor) -> Batch:
        """Pairs of elements by number, words of length 2: pair g |G| + h is (g, h), and all are 0 .. |G|^2 - 1."""
        tokens_B2 = torch.stack([rows_B // self.group.order, rows_B % self.group.order], dim=-1)
        return Batch(tokens_B2, self.products(tokens_B2))

    def products(self, tokens_BN: Tensor) -> Tensor:
        """Running products g_1 ... g_i at every position, by the group's table."""
        flat = self.group.table_GG.flatten()
        targets_BN = torch.empty_like(tokens_BN)
        product_B = torch.zeros_like(tokens_BN[:, 0])
        for i in range(tokens_BN.shape[1]):
            product_B = flat[product_B * self.group.order + tokens_BN[:, i]]
            targets_BN[:, i] = product_B
        return targets_BN

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The right answer: the product of every prefix. Raises as `check` does."""
        self.check(tokens)
        return self.products(torch.tensor([tokens]))[0].tolist()

    def check(self, tokens: Sequence[int]) -> None:
        """Raises LengthError for an empty word, UnknownSymbol for a token that is no element."""
        if not tokens:
            raise LengthError(f"the word is empty; give at least one element of {self.spec.group}, for example {self._example}")
        for token in tokens:
            if not 0 <= token < self.group.order:
                raise UnknownSymbol(f"token {token} is no element of {self.spec.group}; expected 0 to {self.group.order - 1}")

    def encode(self, text: str) -> list[int]:
        """Elements separated by spaces, as symbols or numbers. Raises UnknownSymbol and LengthError."""
        tokens = [self.group.parse(symbol) for symbol in text.split()]
        self.check(tokens)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Symbols separated by spaces. Raises UnknownSymbol and LengthError."""
        self.check(tokens)
        return " ".join(self.group.symbols[token] for token in tokens)

    @property
    def _example(self) -> str:
        return repr(" ".join(self.group.symbols[-2:]))
