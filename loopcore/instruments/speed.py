"""A speed in positions per loop, with its fit and its bootstrap interval over words. What frontier and tau share.

Shapes: R resamples, B words, X points of a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from loopcore.errors import Undecided

__all__ = ["MIN_POINTS", "Speed", "fit_lines", "interval", "resampled"]

MIN_POINTS = 3  # two points lie on a line whatever they are: no fit quality, no evidence of a constant speed
_CHUNK = 4_000_000  # entries of the largest matrix held while resampling


@dataclass(frozen=True)
class Speed:
    """v in positions per loop, as one estimator sees it."""

    v: float
    r2: float
    """Share of the variance that the straight line explains."""
    points: int
    """Loops (frontier) or positions (tau) that the line goes through."""
    low: float | None = None
    high: float | None = None
    """Percentile bootstrap over words; None where no resampling was asked for."""
    resamples: int = 0
    """Resamples that gave a speed and so stand behind the interval."""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return asdict(self)


def fit_lines(x_X: Tensor, y_RX: Tensor, use_RX: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(slope_R, r2_R, points_R): R least-squares lines at once, each through its own points; slope 0 and r2 0 where undefined.

    r2 is the squared correlation, which for a line with intercept is the share of variance explained.
    """
    use_RX = use_RX.double()
    x_RX, y_RX = x_X.double().expand_as(y_RX), y_RX.double()
    points_R = use_RX.sum(-1)
    count_R1 = points_R.clamp_min(1.0).unsqueeze(-1)
    dx_RX = (x_RX - (x_RX * use_RX).sum(-1, keepdim=True) / count_R1) * use_RX
    dy_RX = (y_RX - (y_RX * use_RX).sum(-1, keepdim=True) / count_R1) * use_RX
    sxx_R, sxy_R, syy_R = (dx_RX * dx_RX).sum(-1), (dx_RX * dy_RX).sum(-1), (dy_RX * dy_RX).sum(-1)
    defined_R = (sxx_R > 0) & (syy_R > 0)
    one = torch.ones_like(sxx_R)
    slope_R = torch.where(sxx_R > 0, sxy_R / torch.where(sxx_R > 0, sxx_R, one), 0.0 * one)
    r2_R = torch.where(defined_R, sxy_R * sxy_R / torch.where(defined_R, sxx_R * syy_R, one), 0.0 * one)
    return slope_R, r2_R, points_R.long()


def resampled(values_BX: Tensor, resamples: int, seed: int) -> Iterator[Tensor]:
    """Chunks of counts_RX, float32: how often each 0/1 value was set among the words of a resample drawn with replacement.

    A resample is a row of counts W_RB and its sums are W_RB @ values_BX: exact in float32 up to 2^24 words, and one matrix
    product instead of R gathers.
    """
    words, width = values_BX.shape
    generator = torch.Generator().manual_seed(seed)
    values_BX = values_BX.float()
    chunk = max(1, min(resamples, _CHUNK // max(words, width)))
    for first in range(0, resamples, chunk):
        size = min(chunk, resamples - first)
        drawn_RB = torch.randint(words, (size, words), generator=generator)
        counts_RB = torch.zeros(size, words).scatter_add_(1, drawn_RB, torch.ones(size, words))
        yield counts_RB @ values_BX


def interval(speed: Speed, v_R: Tensor, decided_R: Tensor, confidence: float) -> Speed:
    """`speed` with the percentile interval of the resamples that gave one.

    Raises Undecided when half of them or more did not: then the words do not support an interval. The interval always
    holds the estimate itself, which percentiles of a stepwise statistic need not.
    """
    kept = v_R[decided_R].double()
    if kept.numel() * 2 <= v_R.numel():
        raise Undecided(
            f"only {kept.numel()} of {v_R.numel()} resamples of the words have a measurable speed: the estimate hangs on a few "
            f"words; measure more words or train the model further"
        )
    tail = (1.0 - confidence) / 2
    low, high = torch.quantile(kept, torch.tensor([tail, 1.0 - tail], dtype=torch.float64)).tolist()
    return Speed(speed.v, speed.r2, speed.points, min(low, speed.v), max(high, speed.v), kept.numel())
