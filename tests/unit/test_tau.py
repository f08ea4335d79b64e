"""Convergence times and the speed they give."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loopcore.errors import Undecided
from loopcore.instruments import convergence_times, measure_tau, solved_words
from loopcore.instruments.tau import _statistics


def converging(tau_BN: np.ndarray, loops: int) -> torch.Tensor:
    """correct_TBN of words whose position i is right from loop tau_BN[b, i] on."""
    return torch.from_numpy(np.arange(1, loops + 1)[:, None, None] >= tau_BN)


def test_tau_is_the_first_loop_of_the_last_right_stretch() -> None:
    right = torch.tensor([[0, 0, 1, 1], [1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0], [1, 1, 1, 0], [0, 1, 0, 1]], dtype=torch.bool)
    assert convergence_times(right.T.unsqueeze(-1)).squeeze(-1).tolist() == [3, 4, 1, 5, 5, 4]


@given(st.integers(1, 6), st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_tau_by_the_definition(loops: int, length: int, seed: int) -> None:
    correct = np.random.default_rng(seed).random((loops, 3, length)) < 0.7
    tau_BN = convergence_times(torch.from_numpy(correct))
    for b in range(3):
        for i in range(length):
            expected = next((t + 1 for t in range(loops) if correct[t:, b, i].all()), loops + 1)
            assert tau_BN[b, i] == expected


def test_two_positions_a_loop_are_a_speed_of_two() -> None:
    tau_N = (np.arange(12) // 2) + 1  # 1 1 2 2 3 3 ...
    result = measure_tau(converging(np.tile(tau_N, (10, 1)), 9), bootstrap=50)
    assert result.solved == 10
    for statistic in ("p90", "median", "mean"):
        assert result.tau[statistic] == tuple(float(t) for t in tau_N)
        # Pairs of equal tau make a staircase, whose slope over positions 1..11 is 1 / 2 up to its ends.
        slope = np.polyfit(np.arange(1, 12), tau_N[1:], 1)[0]
        assert result.speed_by(statistic).v == pytest.approx(1 / slope)
        assert result.speed_by(statistic).v == pytest.approx(2.0, rel=0.02)
    assert result.speed == result.speed_by("p90")
    assert result.speed.low == result.speed.high == result.speed.v


def test_position_zero_is_left_out() -> None:
    """BOS gives positions 0 and 1 both at loop 1; with position 0 in the fit the line would not be exact."""
    tau_N = np.array([1, 1, 2, 3, 4, 5, 6, 7])
    speed = measure_tau(converging(np.tile(tau_N, (8, 1)), 10), bootstrap=0).speed
    assert (speed.v, speed.r2, speed.points) == (1.0, 1.0, 7)


def test_lucky_guesses_that_stick_make_the_mean_fast_and_leave_the_ninetieth_percentile() -> None:
    tau_BN = np.tile(np.arange(1, 13), (100, 1))
    tau_BN[:20, 6:] = 5  # a fifth of the words guess the late positions early
    result = measure_tau(converging(tau_BN, 16), bootstrap=0)
    assert result.speed_by("p90").v == pytest.approx(1.0)
    assert result.speed_by("mean").v > 1.1


def test_fewer_than_eight_solved_words_are_undecided() -> None:
    tau_BN = np.tile(np.arange(1, 7), (20, 1))
    tau_BN[7:, -1] = 99
    result = measure_tau(converging(tau_BN, 8))
    assert result.solved == 7
    assert set(result.undecided) == {"p90", "median", "mean"}
    with pytest.raises(Undecided, match="7 of 20 words"):
        _ = result.speed
    json.dumps(result.to_json(), allow_nan=False)
    assert [row["value"] for row in result.rows()] == [pytest.approx(7 / 20)]
    with pytest.raises(Undecided):
        solved_words(torch.full((8, 3), 9), loops=8)
    tau_BN[7, -1] = 6
    assert measure_tau(converging(tau_BN, 8), bootstrap=0).speed.v == pytest.approx(1.0)


def test_unsolved_words_do_not_move_tau() -> None:
    tau_BN = np.tile(np.arange(1, 7), (20, 1))
    tau_BN[10:] = 99
    result = measure_tau(converging(tau_BN, 8), bootstrap=0)
    assert result.solved == 10
    assert result.tau["mean"] == (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


def test_all_positions_at_once_have_no_serial_speed() -> None:
    result = measure_tau(converging(np.full((10, 6), 3), 5), bootstrap=0)
    assert "does not grow" in result.undecided["p90"]
    assert not result.speeds


def test_words_too_short_for_a_slope_are_undecided() -> None:
    result = measure_tau(converging(np.tile(np.arange(1, 4), (10, 1)), 5), bootstrap=0)
    assert "at least 3 positions" in result.undecided["p90"]


@settings(max_examples=50)
@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_statistics_from_counts_are_those_of_numpy(words: int, loops: int, seed: int) -> None:
    tau_B = np.random.default_rng(seed).integers(1, loops + 1, words)
    counts_RNT = torch.from_numpy(np.bincount(tau_B - 1, minlength=loops)).view(1, 1, loops)
    found = {name: float(value[0, 0]) for name, value in _statistics(counts_RNT).items()}
    assert found["p90"] == pytest.approx(np.quantile(tau_B, 0.9))
    assert found["median"] == pytest.approx(np.median(tau_B))
    assert found["mean"] == pytest.approx(tau_B.mean())


def test_bootstrap_agrees_with_resampling_word_by_word() -> None:
    generator = np.random.default_rng(2)
    tau_BN = np.arange(1, 11) + np.cumsum(generator.integers(0, 2, (40, 10)), 1)
    speed = measure_tau(converging(tau_BN, 30), bootstrap=2000, seed=4).speed_by("mean")
    speeds = []
    for _ in range(2000):
        mean_N = tau_BN[generator.integers(40, size=40)].mean(0)
        speeds.append(1 / np.polyfit(np.arange(1, 10), mean_N[1:], 1)[0])
    low, high = np.quantile(speeds, [0.025, 0.975])
    assert speed.low == pytest.approx(low, abs=0.01)
    assert speed.high == pytest.approx(high, abs=0.01)


def test_rows_name_their_estimator() -> None:
    result = measure_tau(converging(np.tile(np.arange(1, 7), (9, 1)), 8), bootstrap=20)
    speeds = {row["axes"]["estimator"]: row for row in result.rows() if row["instrument"] == "speed"}
    assert set(speeds) == {"tau_p90", "tau_median", "tau_mean"}
    assert speeds["tau_p90"]["value"] == speeds["tau_p90"]["low"] == pytest.approx(1.0)
