"""Exponents and means with intervals over seeds: what the instruments of scaling share.

Shapes: S seeds, X points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from loopcore.errors import Undecided
from loopcore.instruments.speed import MIN_POINTS, fit_lines
from loopcore.statistics import mean_interval, student_quantile

__all__ = ["PowerFit", "finite", "fit_power", "mean_interval", "row", "student_quantile"]


@dataclass(frozen=True)
class PowerFit:
    """y = prefactor * x^exponent, by least squares of log y on log x."""

    exponent: float
    """Mean over the seeds of each seed's slope."""
    low: float | None
    high: float | None
    """Student-t interval over the seeds' slopes; of one seed, from the scatter of its points about the line. It holds what
    seeds decide: a curve that is no power law bends all seeds alike, which only `r2` shows."""
    prefactor: float
    """y at x = 1 on the mean line."""
    r2: float
    """Share of the variance of log y that the line explains, mean over the seeds."""
    points: int
    seeds: int
    confidence: float

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return asdict(self)


def fit_power(x_X: Sequence[float], y_SX: Sequence[Sequence[float]], *, confidence: float = 0.95) -> PowerFit:
    """The exponent of y in x over seeds, from one curve a seed.

    Raises Undecided for fewer than three different x, and for a y that is not positive and finite: it has no logarithm.
    """
    if len(set(x_X)) < MIN_POINTS:
        raise Undecided(f"an exponent needs at least {MIN_POINTS} different points, got {len(set(x_X))}; measure more of them")
    x = torch.tensor(x_X, dtype=torch.float64)
    y = torch.tensor(y_SX, dtype=torch.float64)
    assert y.ndim == 2, "one curve a seed"
    assert y.shape[1] == len(x), "one value a point"
    if not bool((y > 0).all() and torch.isfinite(y).all() and (x > 0).all()):
        bad = y[~((y > 0) & torch.isfinite(y))]
        raise Undecided(
            f"an exponent needs positive, finite values, and {bad.numel()} of {y.numel()} are not (the first is "
            f"{float(bad[0]) if bad.numel() else float(x.min()):g}); leave out what diverged or is exactly zero"
        )
    log_x, log_y = x.log(), y.log()
    slope_S, r2_S, _ = fit_lines(log_x, log_y, torch.ones_like(log_y))
    exponent, low, high = mean_interval(slope_S.tolist(), confidence)
    intercept_S = log_y.mean(-1) - slope_S * log_x.mean()
    if len(y) == 1:
        residual_X = log_y[0] - intercept_S[0] - slope_S[0] * log_x
        freedom = len(x) - 2
        spread = float((residual_X.square().sum() / freedom / (log_x - log_x.mean()).square().sum()).sqrt())
        reach = student_quantile(confidence, freedom) * spread
        low, high = exponent - reach, exponent + reach
    return PowerFit(exponent, low, high, math.exp(float(intercept_S.mean())), float(r2_S.mean()), len(x), len(y), confidence)


def row(
    instrument: str, axes: dict[str, Any], value: float, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """One figure as the registry takes it."""
    return {"instrument": instrument, "axes": axes, "value": value, "low": low, "high": high}


def finite(value: float | None) -> float | None:
    """The value as JSON can hold it: None in place of infinities and what is no number."""
    return value if value is not None and math.isfinite(value) else None
