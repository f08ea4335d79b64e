"""From intervals to verdicts. The thresholds come from the claims; nothing here knows what is measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from loopcore.statistics import mean_interval

__all__ = ["Estimate", "Verdict", "all_of", "any_of", "difference", "judge", "mean_of", "span"]


class Verdict(StrEnum):
    """What a finding comes to."""

    SHOWN = "shown"  # the whole interval lies where the claim says
    NOT_SHOWN = "not shown"  # the whole interval lies where it does not
    UNDECIDED = "undecided"  # the interval reaches both sides, or there is none


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval. No ends: one measurement, of which nobody knows how far off it is."""

    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" [{_text(self.low)}, {_text(self.high)}]"
        return _text(self.value) + interval


def judge(estimate: Estimate | None, low: float = -math.inf, high: float = math.inf) -> Verdict:
    """Whether the estimate lies in [low, high]: shown where all of its interval does, not shown where none of it does."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return Verdict.UNDECIDED
    if low <= estimate.low and estimate.high <= high:
        return Verdict.SHOWN
    if estimate.high < low or estimate.low > high:
        return Verdict.NOT_SHOWN
    return Verdict.UNDECIDED


def all_of(verdicts: Iterable[Verdict]) -> Verdict:
    """A claim of several parts: one that is not shown is enough to break it; none at all decide nothing."""
    found = set(verdicts)
    if Verdict.NOT_SHOWN in found:
        return Verdict.NOT_SHOWN
    return Verdict.SHOWN if found == {Verdict.SHOWN} else Verdict.UNDECIDED


def any_of(verdicts: Iterable[Verdict]) -> Verdict:
    """A claim that one of several parts is enough for."""
    found = set(verdicts)
    if Verdict.SHOWN in found:
        return Verdict.SHOWN
    return Verdict.NOT_SHOWN if found == {Verdict.NOT_SHOWN} else Verdict.UNDECIDED


def mean_of(estimates: Sequence[Estimate]) -> Estimate:
    """Mean over runs, with Student's interval over them; of one run its own interval.

    Never narrower than the runs' own intervals allow: seeds that agree to the last digit (a speed of 1 by a frontier that
    moves in whole positions) do not make a figure exact.
    """
    assert estimates, "a mean of nothing"
    if len(estimates) == 1:
        return estimates[0]
    mean, low, high = mean_interval([one.value for one in estimates])
    assert low is not None
    assert high is not None
    below = math.sqrt(sum((one.value - one.low) ** 2 for one in estimates if one.low is not None)) / len(estimates)
    above = math.sqrt(sum((one.high - one.value) ** 2 for one in estimates if one.high is not None)) / len(estimates)
    return Estimate(mean, min(low, mean - below), max(high, mean + above))


def span(estimates: Sequence[Estimate]) -> Estimate:
    """For a claim about every seed: the mean, and from the lowest to the highest end of the runs' own intervals."""
    assert estimates, "a span of nothing"
    mean = sum(one.value for one in estimates) / len(estimates)
    lows = [one.low for one in estimates if one.low is not None]
    highs = [one.high for one in estimates if one.high is not None]
    if len(lows) < len(estimates) or len(highs) < len(estimates):
        return Estimate(mean)
    return Estimate(mean, min(lows), max(highs))


def difference(a: Estimate, b: Estimate) -> Estimate:
    """a - b of independent estimates: the reaches of their intervals add in squares."""
    value = a.value - b.value
    if a.low is None or a.high is None or b.low is None or b.high is None:
        return Estimate(value)
    below = math.hypot(a.value - a.low, b.high - b.value)
    above = math.hypot(a.high - a.value, b.value - b.low)
    return Estimate(value, value - below, value + above)


def _text(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
