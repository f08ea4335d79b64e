"""Held-out loss beside the best constant prediction, by values worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from loopcore.errors import Undecided
from loopcore.instruments import measure_plateau
from loopcore.tasks import Batch


class Halves:
    """Two words of four answers: 0 0 0 1 and 0 0 1 1, so 0 is right in 5 of 8 places."""

    def random_batch(self, *, seed: int, split: str, index: int, size: int, length: int) -> Batch:
        assert (size, length, split) == (2, 4, "held_out")
        return Batch(torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]), torch.tensor([[0, 0, 0, 1], [0, 0, 1, 1]]))


class Says:
    """A loop that adds 1 to the logit of its input, so that after t loops it is ahead by t; with `scale` 0 it knows nothing."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def iterate(self, tokens_BN: Tensor, loops: int) -> Iterator[Tensor]:
        known_BNV = torch.nn.functional.one_hot(tokens_BN, 2).double()
        for t in range(loops + 1):
            yield self.scale * t * known_BNV

    def readout(self, h_BND: Tensor) -> Tensor:
        return h_BND


ENTROPY = -(5 / 8 * math.log(5 / 8) + 3 / 8 * math.log(3 / 8))


def test_a_model_that_knows_its_answers() -> None:
    found = measure_plateau(Says(1.0), Halves(), words=2, length=4, loops=3)  # type: ignore[arg-type]
    right = math.log(1 + math.exp(-3.0))  # ahead by 3 everywhere
    assert found.loss[0] == pytest.approx(right)
    assert found.constant[0] == pytest.approx(ENTROPY)
    assert found.below[0] == pytest.approx(ENTROPY - right)
    # Word by word the constant costs 3 and 2 answers 0: means apart by (ln 8/3 - ln 8/5) / 4, half of it to each side.
    apart = math.log(5 / 3) / 4
    low, high = found.below[1:]
    assert low is not None
    assert high is not None
    assert high - low == pytest.approx(2 * 12.7062 * apart / 2, rel=1e-4)  # Student's t with one degree of freedom
    assert {row["axes"]["of"] for row in found.rows()} == {"loss", "constant", "below"}


def test_a_model_that_knows_nothing_is_not_below() -> None:
    found = measure_plateau(Says(0.0), Halves(), words=2, length=4, loops=3)  # type: ignore[arg-type]
    assert found.loss[0] == pytest.approx(math.log(2))
    assert found.below[0] < 0


def test_what_diverged_has_no_loss() -> None:
    with pytest.raises(Undecided, match="not finite"):
        measure_plateau(Says(math.inf), Halves(), words=2, length=4, loops=1)  # type: ignore[arg-type]
