"""Bit strings: running parity, increment of a binary number, and the easy-to-hard benchmark's prefix sums.

Parity and increment are findings of arXiv 2607.20594; prefix sums are those of arXiv 2106.04537 and 2202.05826, with the sets
generated here. Shapes: B strings, N positions, M strings of a set.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from loopcore.errors import LengthError, UnknownSymbol
from loopcore.specs.task import IncrementTask, ParityTask, PrefixSumTask
from loopcore.tasks.pools import rows_of_batch
from loopcore.tasks.task import Batch, Split, generator

__all__ = ["Increment", "Parity", "PrefixSums", "incremented", "running_parity"]

DISTINCT_BELOW = 24  # bits: sets of shorter strings are drawn without replacement, as in the benchmark
TRAIN_SHARE = 0.8  # of a prefix-sum set, as in the public code of arXiv 2202.05826


def running_parity(tokens_BN: Tensor) -> Tensor:
    """targets_BN: the sum of the bits so far, mod 2."""
    return tokens_BN.cumsum(-1) % 2


def incremented(tokens_BN: Tensor) -> Tensor:
    """targets_BN: the number plus one mod 2^N, least significant bit first. Bit i flips where all bits before it are 1."""
    carry_BN = torch.ones_like(tokens_BN)
    carry_BN[:, 1:] = tokens_BN[:, :-1].cumprod(-1)
    return tokens_BN ^ carry_BN


class _Bits(ABC):
    """What the three have in common: two tokens, two answers, text of zeros and ones."""

    score: Literal["exact"] = "exact"
    vocabulary = classes = 2
    grid = 1
    palette = ((-0.5,), (0.5,))
    """The benchmark's raw input of a convnet, by token: one channel, the bit minus one half."""

    @abstractmethod
    def targets(self, tokens_BN: Tensor) -> Tensor:
        """targets_BN: the right answers to strings of bits."""

    def answer(self, tokens: Sequence[int]) -> list[int]:
        """The right answer at every position. Raises as `check` does."""
        self.check(tokens)
        return self.targets(torch.tensor([tokens]))[0].tolist()

    def check(self, tokens: Sequence[int]) -> None:
        """Raises LengthError for an empty string, UnknownSymbol for a token that is no bit."""
        if not tokens:
            raise LengthError("the bit string is empty; give at least one bit, for example 0110")
        for token in tokens:
            if token not in (0, 1):
                raise UnknownSymbol(f"token {token} is no bit; expected 0 or 1")

    def encode(self, text: str) -> list[int]:
        """Zeros and ones, with or without spaces between. Raises UnknownSymbol and LengthError."""
        symbols = "".join(text.split())
        for symbol in symbols:
            if symbol not in "01":
                raise UnknownSymbol(f"{symbol!r} is no bit; expected 0 or 1, for example 0110")
        tokens = [int(symbol) for symbol in symbols]
        self.check(tokens)
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Zeros and ones without spaces. Raises UnknownSymbol and LengthError."""
        self.check(tokens)
        return "".join(map(str, tokens))


class Parity(_Bits):
    """Running parity of an endless stream of uniform bits; the held-out stream is another stream, not another set."""

    name = "running parity"
    fingerprint = "parity/1"

    def __init__(self, spec: ParityTask) -> None:
        self.spec = spec

    def targets(self, tokens_BN: Tensor) -> Tensor:
        return running_parity(tokens_BN)

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """`size` uniform strings of `length` bits: a pure function of the arguments."""
        tokens_BN = torch.randint(2, (size, length), generator=generator("parity", seed, split, index, length))
        return Batch(tokens_BN, running_parity(tokens_BN))


class Increment(_Bits):
    """A binary number plus one, least significant bit first; an endless stream, the held-out one another."""

    name = "increment, least significant bit first"

    def __init__(self, spec: IncrementTask) -> None:
        self.spec = spec
        self.fingerprint = f"increment/{spec.carries}/1"

    def targets(self, tokens_BN: Tensor) -> Tensor:
        return incremented(tokens_BN)

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """`size` numbers of `length` bits, their carries as the spec says: a pure function of the arguments."""
        stream = generator("increment", self.spec.carries, seed, split, index, length)
        tokens_BN = torch.randint(2, (size, length), generator=stream)
        if self.spec.carries == "uniform":
            # k ones and a zero, then uniform bits: the carry runs into position k and no further.
            carry_B1 = torch.randint(length + 1, (size, 1), generator=stream)
            at_N = torch.arange(length)
            tokens_BN[at_N < carry_B1] = 1
            tokens_BN[at_N == carry_B1] = 0
        return Batch(tokens_BN, incremented(tokens_BN))


class PrefixSums(_Bits):
    """The benchmark's prefix sums: for each length one set of strings, of which four fifths train.

    The two splits of a length share no string below 24 bits, unless it has no more strings than the set would hold: then both
    have all of them. From 24 bits on strings are drawn independently, as in the benchmark; at 24 bits a set of 10,000 repeats
    about three of them, at 32 none.
    """

    name = "prefix sums mod 2"

    def __init__(self, spec: PrefixSumTask) -> None:
        self.spec = spec
        self.fingerprint = f"prefix_sum/{spec.examples}/{spec.data_seed}/1"

    def targets(self, tokens_BN: Tensor) -> Tensor:
        return running_parity(tokens_BN)

    def examples(self, split: Split, length: int) -> Tensor:
        """Every string of a split, uint8 [M, N]. Raises LengthError for length < 1."""
        if length < 1:
            raise LengthError(f"expected a length of at least 1 bit, got {length}")
        strings_MN = _prefix_sum_set(self.spec.examples, self.spec.data_seed, length)
        if 2**length <= self.spec.examples:
            return strings_MN
        train = int(TRAIN_SHARE * len(strings_MN))
        return strings_MN[:train] if split == "train" else strings_MN[train:]

    def random_batch(self, *, seed: int, split: Split, index: int, size: int, length: int) -> Batch:
        """Batch `index` of a stream that goes through the split epoch by epoch: a pure function of the spec and the arguments."""
        strings_MN = self.examples(split, length)
        rows_B = rows_of_batch(len(strings_MN), "prefix_sum", seed, split, length, index=index, size=size)
        tokens_BN = strings_MN[rows_B].long()
        return Batch(tokens_BN, running_parity(tokens_BN))


@functools.lru_cache(maxsize=16)
def _prefix_sum_set(examples: int, data_seed: int, length: int) -> Tensor:
    """uint8 [M, N]: min(examples, 2^N) distinct strings below 24 bits, `examples` independent ones from there on."""
    stream = generator("prefix_sum set", data_seed, length)
    if length >= DISTINCT_BELOW:
        return torch.randint(2, (examples, length), generator=stream, dtype=torch.uint8)
    number_M = torch.randperm(2**length, generator=stream)[:examples]
    return (number_M.unsqueeze(-1) >> torch.arange(length) & 1).to(torch.uint8)
