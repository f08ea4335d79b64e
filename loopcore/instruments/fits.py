"""Exponents and means with intervals over seeds: what the instruments of scaling share.

Shapes: S seeds, X points of a curve.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from loopcore.errors import InputError, Undecided
from loopcore.instruments.speed import MIN_POINTS, fit_lines

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


def mean_interval(values_S: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None, float | None]:
    """(mean, low, high) of independent values by Student's t; no interval of one value or of values that are not all finite."""
    seeds = len(values_S)
    mean = sum(values_S) / seeds
    if seeds < 2 or not all(map(math.isfinite, values_S)):
        return mean, None, None
    spread = math.sqrt(sum((value - mean) ** 2 for value in values_S) / (seeds - 1) / seeds)
    reach = student_quantile(confidence, seeds - 1) * spread
    return mean, mean - reach, mean + reach


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


def row(
    instrument: str, axes: dict[str, Any], value: float, low: float | None = None, high: float | None = None
) -> dict[str, Any]:
    """One figure as the registry takes it."""
    return {"instrument": instrument, "axes": axes, "value": value, "low": low, "high": high}


def finite(value: float | None) -> float | None:
    """The value as JSON can hold it: None in place of infinities and what is no number."""
    return value if value is not None and math.isfinite(value) else None
