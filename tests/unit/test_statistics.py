"""Intervals, lines and rank tests against values worked out by hand or tabulated."""

from __future__ import annotations

import math

import pytest

from loopcore.errors import Undecided
from loopcore.statistics import auroc, fit_line, permutation_p, power_line, ranks, spearman


def test_line_by_hand() -> None:
    # x = 0, 1, 2, y = 0, 1, 3: slope 3/2, intercept -1/6, residuals 1/6, -1/3, 1/6, whose squares sum to 1/6.
    line = fit_line([0, 1, 2], [0, 1, 3])
    assert line.slope == pytest.approx(1.5)
    assert line.intercept == pytest.approx(-1 / 6)
    assert line.r2 == pytest.approx(1 - (1 / 6) / (14 / 3))
    # One degree of freedom: t = 12.706, standard error sqrt((1/6) / 1 / 2).
    assert line.high - line.slope == pytest.approx(12.7062 * math.sqrt(1 / 12), rel=1e-5)
    assert line.slope - line.low == pytest.approx(line.high - line.slope)
    assert line.at(4) == pytest.approx(6 - 1 / 6)


def test_a_constant_is_no_line() -> None:
    assert fit_line([0, 1, 2], [5, 5, 5]).r2 == 0.0


@pytest.mark.parametrize(("x", "y"), [([1, 2], [1, 2]), ([1, 1, 1], [1, 2, 3])])
def test_too_little_for_a_line(x: list[float], y: list[float]) -> None:
    with pytest.raises(Undecided, match="at least 3 points at 2 different places"):
        fit_line(x, y)


def test_exponent() -> None:
    line = power_line([0.5, 1, 2, 4], [3 * x**0.9 for x in (0.5, 1, 2, 4)])
    assert line.slope == pytest.approx(0.9)
    assert math.exp(line.intercept) == pytest.approx(3)
    assert line.r2 == pytest.approx(1)


@pytest.mark.parametrize("y", [0.0, -1.0, math.nan, math.inf])
def test_no_exponent_without_logarithms(y: float) -> None:
    with pytest.raises(Undecided, match="positive, finite"):
        power_line([1, 2, 3], [1, 2, y])


def test_ranks_share_ties() -> None:
    assert ranks([10, 30, 20, 30, 5]) == [2, 4.5, 3, 4.5, 1]


def test_spearman_by_hand() -> None:
    # Squared rank differences 1, 1, 4, 4, 0: 1 - 6 * 10 / (5 * 24).
    assert spearman([1, 2, 3, 4, 5], [2, 1, 5, 2.5, 7]) == pytest.approx(1 - 6 * (1 + 1 + 1 + 1) / (5 * 24))
    assert spearman([1, 2, 3], [9, 4, 1]) == pytest.approx(-1)
    with pytest.raises(Undecided, match="same value in every run"):
        spearman([1, 1, 1], [1, 2, 3])


def test_permutation_p_of_four_ordered_runs() -> None:
    # Of 24 orders two correlate perfectly, one in each direction.
    assert permutation_p([1, 2, 3, 4], [10, 20, 30, 40], permutations=9999) == pytest.approx(2 / 24, abs=0.01)
    assert permutation_p(range(10), range(10)) == pytest.approx(1 / 5000)
    assert permutation_p([1, 2, 3, 4, 5, 6], [3, 1, 2, 3, 1, 2]) > 0.5


def test_auroc_by_hand() -> None:
    # Pairs (yes, no): .35 > .1, .35 < .4, .8 > .1, .8 > .4.
    assert auroc([0.1, 0.4, 0.35, 0.8], [False, False, True, True]) == 0.75
    assert auroc([1, 1], [True, False]) == 0.5
    with pytest.raises(Undecided, match="both fates"):
        auroc([1, 2], [True, True])
