"""Accuracy by loop and the frontier, on models whose speed is known by construction."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from loopcore.errors import InputError, Undecided
from loopcore.instruments import correct_by_loop, exact_by_prefix, fit_speed, frontier, measure_accuracy, measure_frontier
from loopcore.instruments.accuracy import wilson
from loopcore.instruments.frontier import speed_level
from loopcore.instruments.speed import fit_lines, resampled
from loopcore.model import LoopedTransformer
from loopcore.scaling import multipliers
from loopcore.specs import ModelSpec, ScalingSpec

CLASSES = 5


class Batch(NamedTuple):
    tokens: Tensor
    targets: Tensor


class Copying:
    """Words whose target is the word itself."""

    def random_batch(self, *, seed: int, split: str, index: int, size: int, length: int) -> Batch:
        generator = torch.Generator().manual_seed(seed * 1000 + index)
        tokens_BN = torch.randint(CLASSES, (size, length), generator=generator)
        return Batch(tokens_BN, tokens_BN)


class Advancing:
    """Right at the first `reach(t)` positions after t loops and wrong at all others."""

    def __init__(self, reach: Callable[[int], int]) -> None:
        self.reach = reach
        self.alive: list[weakref.ref[Tensor]] = []
        self.most_alive = 0

    def iterate(self, tokens_BN: Tensor, loops: int, *, reveal_per_loop: float | None = None) -> Iterator[Tensor]:
        for t in range(loops + 1):
            wrong_BN = (tokens_BN + 1) % CLASSES
            reached_N = torch.arange(tokens_BN.shape[1]) < self.reach(t)
            h_BPD = torch.nn.functional.one_hot(torch.where(reached_N, tokens_BN, wrong_BN), CLASSES).float()
            self.alive.append(weakref.ref(h_BPD))
            self.most_alive = max(self.most_alive, sum(state() is not None for state in self.alive))
            yield h_BPD
            del h_BPD

    def readout(self, h_BPD: Tensor) -> Tensor:
        return h_BPD


def observed(reach: Callable[[int], int], *, length: int, loops: int, words: int = 20) -> Tensor:
    return correct_by_loop(Advancing(reach), Copying(), words=words, length=length, loops=loops, batch=8)


def test_two_positions_a_loop_are_a_speed_of_two() -> None:
    result = measure_frontier(observed(lambda t: 2 * t, length=10, loops=8), bootstrap=50)
    assert result.frontiers[0.9] == (2, 4, 6, 8, 10, 10, 10, 10)
    assert result.saturated_at == 5
    speed = result.speed
    assert (speed.v, speed.r2, speed.points, speed.low, speed.high) == (2.0, 1.0, 5, 2.0, 2.0)


def test_one_position_a_loop_is_a_speed_of_exactly_one() -> None:
    result = measure_frontier(observed(lambda t: t, length=12, loops=12), bootstrap=10)
    assert result.frontiers[0.9] == tuple(range(1, 13))
    assert result.speed.v == 1.0
    assert result.speed.r2 == 1.0


def test_a_doubling_scan_is_not_a_line() -> None:
    result = measure_frontier(observed(lambda t: 2 ** (t - 1), length=32, loops=8), bootstrap=0)
    assert result.frontiers[0.9] == (1, 2, 4, 8, 16, 32, 32, 32)
    # Through (1, 1) .. (6, 32): sxy = 321 - 6 * 3.5 * 10.5 = 100.5, sxx = 17.5, syy = 1365 - 6 * 10.5^2 = 703.5.
    assert result.speed.v == pytest.approx(100.5 / 17.5)
    assert result.speed.r2 == pytest.approx(100.5**2 / (17.5 * 703.5))


def test_a_model_that_never_learned_is_undecided_with_a_reason() -> None:
    result = measure_frontier(observed(lambda t: 0, length=6, loops=6))
    assert not result.speeds
    with pytest.raises(Undecided, match="0 of 6 positions"):
        _ = result.speed
    json.dumps(result.to_json(), allow_nan=False)
    assert {row["instrument"] for row in result.rows()} == {"frontier"}


def test_saturation_in_two_loops_is_undecided() -> None:
    with pytest.raises(Undecided, match="measure longer words"):
        fit_speed(torch.tensor([4, 8, 8, 8]), 8)


def test_a_stalled_frontier_is_fitted_up_to_where_it_stalls() -> None:
    speed = fit_speed(torch.tensor([1, 2, 3, 4, 5, 5, 5, 5, 5]), 8)
    assert (speed.v, speed.points) == (1.0, 5)


def test_frontier_is_the_contiguous_prefix_made_monotone() -> None:
    accuracy_TN = torch.tensor([[1.0, 0.5, 1.0, 1.0], [0.9, 0.9, 0.89, 1.0], [1.0, 0.2, 1.0, 1.0], [1.0, 1.0, 1.0, 0.9]])
    assert frontier(accuracy_TN, 0.9).tolist() == [1, 2, 2, 4]
    assert frontier(torch.stack([accuracy_TN, torch.zeros(4, 4)]), 0.9).tolist() == [[1, 2, 2, 4], [0, 0, 0, 0]]


@pytest.mark.parametrize(("right", "words", "q"), [(9, 10, 0.9), (19, 20, 0.95), (4, 5, 0.8), (27, 30, 0.9)])
def test_an_accuracy_of_exactly_q_counts(right: int, words: int, q: float) -> None:
    correct_TBN = (torch.arange(words) < right).view(1, words, 1).expand(3, words, 1)
    assert measure_frontier(correct_TBN, levels=(q,), bootstrap=0).frontiers[q] == (1, 1, 1)


def test_levels_are_apart_and_the_one_nearest_eight_tenths_speaks() -> None:
    # Nine words in ten advance one position a loop, the tenth stands still.
    moving = observed(lambda t: t, length=8, loops=10, words=9)
    still = observed(lambda t: 0, length=8, loops=10, words=1)
    result = measure_frontier(torch.cat([moving, still], 1), bootstrap=0)
    assert set(result.speeds) == {0.8, 0.9}
    assert set(result.undecided) == {0.95}
    assert result.level == 0.8
    assert speed_level((0.9, 0.7)) == 0.9  # equally near: the first one
    assert speed_level((0.5, 0.95, 0.9)) == 0.9


def test_an_interval_that_hangs_on_a_few_words_is_undecided() -> None:
    """Each of the first four positions is wrong in one word of ten: just q = .9. A resample keeps a slope only where none of the
    first three words is drawn twice or more, which happens in about .74^3 = .4 of them."""
    correct_TBN = observed(lambda t: t, length=8, loops=10, words=10)
    correct_TBN[:, range(4), range(4)] = False
    result = measure_frontier(correct_TBN, levels=(0.8, 0.9), bootstrap=400)
    assert "of 400 resamples" in result.undecided[0.9]
    assert result.speeds[0.8].v == 1.0
    assert measure_frontier(correct_TBN, levels=(0.9,), bootstrap=0).speed.v == 1.0


def test_bootstrap_agrees_with_resampling_word_by_word() -> None:
    """Slow and fast words mixed: the vectorised interval is that of a plain loop over resamples with another generator."""
    generator = np.random.default_rng(5)
    words, length, loops = 60, 10, 16
    reach_TB = np.arange(1, loops + 1)[:, None] * generator.uniform(0.7, 1.6, words)
    correct = reach_TB[:, :, None] >= np.arange(1, length + 1)
    speed = measure_frontier(torch.from_numpy(correct), levels=(0.8,), bootstrap=2000, seed=1).speed

    slopes = []
    for _ in range(2000):
        accuracy = correct[:, generator.integers(words, size=words)].mean(1)
        reached = np.maximum.accumulate(np.cumprod(accuracy >= 0.8 - 1e-9, axis=1).sum(1))
        until = int(np.argmax(reached == reached.max())) + 1
        slopes.append(np.polyfit(np.arange(1, until + 1), reached[:until], 1)[0])
    low, high = np.quantile(slopes, [0.025, 0.975])
    assert speed.low == pytest.approx(low, abs=0.03)
    assert speed.high == pytest.approx(high, abs=0.03)
    assert speed.low is not None
    assert speed.high is not None
    assert speed.low <= speed.v <= speed.high
    again = measure_frontier(torch.from_numpy(correct), levels=(0.8,), bootstrap=2000, seed=1).speed
    assert again == speed


def test_resamples_keep_the_number_of_words() -> None:
    values_BX = torch.eye(7)
    chunks = list(resampled(values_BX, 30, seed=3))
    counts_RX = torch.cat(chunks)
    assert counts_RX.shape == (30, 7)
    assert counts_RX.sum(1).tolist() == [7.0] * 30


@given(st.lists(st.integers(0, 50), min_size=3, max_size=12))
def test_lines_are_those_of_numpy(values: list[int]) -> None:
    x = np.arange(len(values), dtype=float)
    slope_R, r2_R, points_R = fit_lines(torch.from_numpy(x), torch.tensor([values]), torch.ones(1, len(values)))
    assert float(slope_R[0]) == pytest.approx(np.polyfit(x, values, 1)[0], abs=1e-9)
    assert int(points_R[0]) == len(values)
    if len(set(values)) > 1:
        assert float(r2_R[0]) == pytest.approx(np.corrcoef(x, values)[0, 1] ** 2, abs=1e-9)
    else:
        assert float(r2_R[0]) == 0.0


def test_lines_leave_out_what_is_masked() -> None:
    y_RX = torch.tensor([[1.0, 3.0, 5.0, 99.0], [7.0, 7.0, 7.0, 7.0]])
    use_RX = torch.tensor([[True, True, True, False], [False, False, False, False]])
    slope_R, r2_R, points_R = fit_lines(torch.arange(4), y_RX, use_RX)
    assert slope_R.tolist() == [2.0, 0.0]
    assert r2_R.tolist() == [1.0, 0.0]
    assert points_R.tolist() == [3, 0]


def test_states_are_streamed() -> None:
    model = Advancing(lambda t: t)
    correct_by_loop(model, Copying(), words=8, length=4, loops=40, batch=8)
    assert model.most_alive <= 2


def test_words_of_the_last_short_batch_are_there_too() -> None:
    correct_TBN = observed(lambda t: t, length=3, loops=3, words=21)
    assert correct_TBN.shape == (3, 21, 3)
    assert correct_TBN.sum().item() == 21 * (1 + 2 + 3)


def test_the_readout_after_each_loop_is_that_of_a_run_of_as_many_loops() -> None:
    spec = ModelSpec(width=16, heads=2, readout_init="normal")
    scale = multipliers(ScalingSpec(base_width=16), spec, 4)
    model = LoopedTransformer(spec, vocabulary=CLASSES, classes=CLASSES, multipliers=scale, seed=1)
    correct_TBN = correct_by_loop(model, Copying(), words=6, length=5, loops=4, seed=2, batch=6)
    batch = Copying().random_batch(seed=2, split="held_out", index=0, size=6, length=5)
    with torch.no_grad():
        for loops in range(1, 5):
            right_BN = model(batch.tokens, loops).argmax(-1) == batch.targets
            assert torch.equal(correct_TBN[loops - 1], right_BN)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(InputError, match="at least 1"):
        correct_by_loop(Advancing(lambda t: t), Copying(), words=0, length=3, loops=3)


def test_token_exact_and_last_accuracy_are_kept_apart() -> None:
    # Two words of three positions, one loop: right everywhere, and right at the first only.
    correct_TBN = torch.tensor([[[True, True, True], [True, False, False]]])
    accuracy = measure_accuracy(correct_TBN)
    assert accuracy.token_T == (pytest.approx(4 / 6),)
    assert accuracy.exact_T == (0.5,)
    assert accuracy.last_T == (0.5,)
    assert accuracy.position_TN == ((1.0, 0.5, 0.5),)
    assert exact_by_prefix(correct_TBN).tolist() == [[1.0, 0.5, 0.5]]
    assert accuracy.best_loops == 1
    json.dumps(accuracy.to_json(), allow_nan=False)
    for row in accuracy.rows():
        assert 0.0 <= row["low"] <= row["value"] <= row["high"] <= 1.0


def test_wilson_interval() -> None:
    # 8 of 10 at 95 %: (.490, .943), as tabulated for the score interval.
    assert wilson(0.8, 10) == (pytest.approx(0.490, abs=1e-3), pytest.approx(0.943, abs=1e-3))
    assert wilson(1.0, 10)[1] == 1.0
