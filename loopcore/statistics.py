"""Intervals, lines and rank tests in plain Python: what instruments and studies share. Imports no torch.

Shapes: S seeds (or runs), X points.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from loopcore.errors import InputError, Undecided

__all__ = [
    "Line",
    "auroc",
    "fit_line",
    "mean_interval",
    "permutation_p",
    "power_line",
    "ranks",
    "spearman",
    "student_quantile",
    "wilson",
]

MIN_POINTS = 3  # two points lie on a line whatever they are


def student_quantile(confidence: float, freedom: int) -> float:
    """t such that a Student variable with `freedom` degrees of freedom lies in [-t, t] with probability `confidence`.

    By bisection of the closed form for a whole number of degrees (Abramowitz and Stegun 26.7.3 and 26.7.4). Raises
    InputError for a confidence outside (0, 1).
    """
    if not 0.0 < confidence < 1.0:
        raise InputError(f"a confidence lies between 0 and 1, got {confidence:g}")
    assert freedom >= 1
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halvings: past the last bit of a double
        middle = (low + high) / 2
        low, high = (middle, high) if _student_within(middle, freedom) < confidence else (low, middle)
    return math.sqrt(freedom) * math.tan((low + high) / 2)


def _student_within(angle: float, freedom: int) -> float:
    """P(|t| <= sqrt(freedom) tan(angle))."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2
    term, total = (cosine, 0.0) if odd else (1.0, 0.0)
    for k in range(odd, freedom - 1, 2):
        total += term
        term *= cosine * cosine * (k + 1) / (k + 2)
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def mean_interval(values_S: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of independent values by Student's t; no interval of one value or of values that are not all finite."""
    seeds = len(values_S)
    mean = sum(values_S) / seeds
    if seeds < 2 or not all(map(math.isfinite, values_S)):
        return mean, None, None
    spread = math.sqrt(sum((value - mean) ** 2 for value in values_S) / (seeds - 1) / seeds)
    reach = student_quantile(confidence, seeds - 1) * spread
    return mean, mean - reach, mean + reach


def wilson(share: float, trials: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson score interval of a share seen in `trials` independent trials; z = 1.96 is 95 %."""
    spread = z * (share * (1 - share) / trials + z * z / (4 * trials * trials)) ** 0.5
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


@dataclass(frozen=True)
class Line:
    """y = intercept + slope x by least squares over X points."""

    slope: float
    intercept: float
    low: float
    """Student-t interval of the slope from the scatter of the points about the line."""
    high: float
    r2: float
    """Share of the variance that the line explains; 0 for a constant y, which no line explains better than its mean."""
    points: int

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


def fit_line(x_X: Sequence[float], y_X: Sequence[float], confidence: float = 0.95) -> Line:
    """Raises Undecided for fewer than three points, or fewer than two different x."""
    points = len(x_X)
    assert points == len(y_X), "one y an x"
    if points < MIN_POINTS or len(set(x_X)) < 2:
        raise Undecided(
            f"a line with an interval needs at least {MIN_POINTS} points at 2 different places, got {points} at {len(set(x_X))}"
        )
    mean_x, mean_y = sum(x_X) / points, sum(y_X) / points
    sxx = sum((x - mean_x) ** 2 for x in x_X)
    sxy = sum((x - mean_x) * (y - mean_y) for x, y in zip(x_X, y_X, strict=True))
    syy = sum((y - mean_y) ** 2 for y in y_X)
    slope = sxy / sxx
    intercept = mean_y - slope * mean_x
    left = sum((y - intercept - slope * x) ** 2 for x, y in zip(x_X, y_X, strict=True))
    reach = student_quantile(confidence, points - 2) * math.sqrt(left / (points - 2) / sxx)
    r2 = min(1.0, sxy * sxy / (sxx * syy)) if syy > 0 else 0.0
    return Line(slope, intercept, slope - reach, slope + reach, r2, points)


def power_line(x_X: Sequence[float], y_X: Sequence[float], confidence: float = 0.95) -> Line:
    """The line through (ln x, ln y): its slope is the exponent, every point counting once. Undecided also for values <= 0."""
    bad = [value for value in (*x_X, *y_X) if not (value > 0 and math.isfinite(value))]
    if bad:
        raise Undecided(f"an exponent needs positive, finite values, got {bad[0]:g}")
    return fit_line([math.log(x) for x in x_X], [math.log(y) for y in y_X], confidence)


def ranks(values_S: Sequence[float]) -> list[float]:
    """Rank of each value from 1; equal values share their mean rank."""
    order = sorted(range(len(values_S)), key=values_S.__getitem__)
    found = [0.0] * len(values_S)
    first = 0
    while first < len(order):
        last = first
        while last + 1 < len(order) and values_S[order[last + 1]] == values_S[order[first]]:
            last += 1
        for place in range(first, last + 1):
            found[order[place]] = (first + last) / 2 + 1
        first = last + 1
    return found


def spearman(x_S: Sequence[float], y_S: Sequence[float]) -> float:
    """Spearman's rank correlation, ties by mean ranks. Raises Undecided where one side is constant."""
    a_S, b_S = _centred(ranks(x_S)), _centred(ranks(y_S))
    scale = math.sqrt(sum(a * a for a in a_S) * sum(b * b for b in b_S))
    if scale == 0.0:
        raise Undecided("a rank correlation needs values that differ, and one side has the same value in every run")
    return sum(a * b for a, b in zip(a_S, b_S, strict=True)) / scale


def permutation_p(x_S: Sequence[float], y_S: Sequence[float], *, permutations: int = 4999, seed: int = 0) -> float:
    """Two-sided p of Spearman's correlation: the share of shuffles of y that correlate with x as much, itself counted."""
    a_S, b_S = _centred(ranks(x_S)), _centred(ranks(y_S))
    seen = abs(sum(a * b for a, b in zip(a_S, b_S, strict=True))) - 1e-9  # rounding must not break a tie
    stream = random.Random(seed)  # noqa: S311 - not for secrets
    as_extreme = 1
    for _ in range(permutations):
        stream.shuffle(b_S)
        as_extreme += abs(sum(map(float.__mul__, a_S, b_S))) >= seen
    return as_extreme / (permutations + 1)


def auroc(score_S: Sequence[float], label_S: Sequence[bool]) -> float:
    """Probability that a run with the label scores above one without, ties half. Raises Undecided where all labels agree."""
    yes = [score for score, label in zip(score_S, label_S, strict=True) if label]
    no = [score for score, label in zip(score_S, label_S, strict=True) if not label]
    if not yes or not no:
        raise Undecided("an AUROC needs runs of both fates, and all have the same")
    return sum((a > b) + (a == b) / 2 for a in yes for b in no) / (len(yes) * len(no))


def _centred(values_S: list[float]) -> list[float]:
    mean = sum(values_S) / len(values_S)
    return [value - mean for value in values_S]
