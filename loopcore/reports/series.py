"""Reads a plot in its JSON form: series, marks and grids as numbers, and the whole in words. Any field may be missing or null."""

from __future__ import annotations

import math
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "MOST_ENTRIES",
    "Curve",
    "Plot",
    "curves_of",
    "describe",
    "drawn_text",
    "grid_of",
    "kinds_of",
    "mark_label",
    "marks_of",
    "names_on_x",
    "numbers",
    "text_of",
]

Plot = Mapping[str, Any]

MOST_ENTRIES = 24  # series told by name; what is left out is counted in a last entry

_SEED = re.compile(r"^(?P<kind>.+?)(?:, seed |/s)(?P<seed>\d+)$")


@dataclass(frozen=True)
class Curve:
    """One series of a plot: a line, steps or points."""

    name: str
    style: str
    x: np.ndarray
    """Finite numbers."""
    y: np.ndarray
    """NaN leaves a gap."""
    low: np.ndarray | None
    high: np.ndarray | None

    @property
    def drawn(self) -> np.ndarray:
        """Which points there are."""
        return np.isfinite(self.y)


def describe(plot: Plot) -> str:
    """The plot in words, for those who do not see it: axes, series with their ranges, marks."""
    title = text_of(plot.get("title")) or "Plot"
    axes = f"{text_of(plot.get('y_label')) or 'y'} against {text_of(plot.get('x_label')) or 'x'}"
    parts = [f"{title}: {axes}{', both axes logarithmic' if plot.get('log') else ''}"]
    if plot.get("kind") == "heat":
        rows = grid_of(plot)
        known = rows[np.isfinite(rows)]
        span = f", values from {known.min():.3g} to {known.max():.3g}" if known.size else ", without values"
        parts.append(f"Heat map of {rows.shape[1]} by {rows.shape[0]}{span}")
    curves = [curve for curve in curves_of(plot) if curve.drawn.any()]
    shown = [
        f"{curve.name} ({_count(int(curve.drawn.sum()))}, {np.nanmin(curve.y):.3g} to {np.nanmax(curve.y):.3g})"
        for curve in curves[:MOST_ENTRIES]
    ]
    more = [f"{len(curves) - len(shown)} more"] if len(curves) > len(shown) else []
    parts += [f"Series {'; '.join(shown + more)}"] if shown else []
    marks = [mark_label(mark) for mark in marks_of(plot)]
    parts += [f"Marked {', '.join(marks)}"] if marks else []
    return ". ".join(parts) + "."


def _count(points: int) -> str:
    return f"{points} point" if points == 1 else f"{points} points"


def text_of(value: Any) -> str:
    """Empty for null."""
    return "" if value is None else str(value)


def drawn_text(value: Any, width: int | None = None) -> str:
    """Text that matplotlib draws as it stands: no mathematics, no characters that XML does not have."""
    text = "".join(one if one.isprintable() else " " for one in text_of(value))
    text = text.replace("$", r"\$")
    return text if width is None else "\n".join(textwrap.wrap(text, width)[:3])


def finite(value: Any) -> float:
    """NaN for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def numbers(values: Any, count: int | None = None) -> np.ndarray:
    """As floats, NaN for what is none; cut or filled up to `count` of them."""
    found = np.array([finite(value) for value in (values or ())], dtype=float)
    if count is None:
        return found
    return np.concatenate([found[:count], np.full(max(0, count - len(found)), math.nan)])


def curves_of(plot: Plot) -> list[Curve]:
    """The series; points without an x, and on logarithmic axes those that are not above 0, are gaps."""
    log = bool(plot.get("log"))
    curves = []
    for one in plot.get("series") or ():
        x = numbers(one.get("x"))
        y = numbers(one.get("y"), len(x))
        ends = [None if one.get(end) is None else numbers(one[end], len(x)) for end in ("low", "high")]
        if log:
            y[~(y > 0)] = math.nan
            x[~(x > 0)] = math.nan
        kept = np.isfinite(x)
        low, high = (None if end is None else end[kept] for end in ends)
        curves.append(Curve(text_of(one.get("name")), text_of(one.get("style")) or "line", x[kept], y[kept], low, high))
    return curves


def marks_of(plot: Plot) -> list[Mapping[str, Any]]:
    """The marks that have a place on the plot."""
    log = bool(plot.get("log"))
    found = [mark for mark in plot.get("marks") or () if math.isfinite(finite(mark.get("at")))]
    return [mark for mark in found if not log or mark["at"] > 0]


def mark_label(mark: Mapping[str, Any]) -> str:
    """The mark's label, with its place where the label has no number of its own."""
    label = text_of(mark.get("label"))
    return label if any(one.isdigit() for one in label) else f"{label} ({mark['at']:.4g})".strip()


def grid_of(plot: Plot) -> np.ndarray:
    """values[row of y][column of x], NaN where there is none."""
    columns, rows = len(plot.get("x") or ()), len(plot.get("y") or ())
    values = plot.get("values") or ()
    return np.array([numbers(values[row] if row < len(values) else (), columns) for row in range(rows)]).reshape(rows, columns)


def kinds_of(curves: Sequence[Curve]) -> list[tuple[str, list[Curve]]]:
    """Curves that differ in their seed alone stand together, under one label."""
    found: dict[str, list[Curve]] = defaultdict(list)
    for number, curve in enumerate(curves):
        match = _SEED.match(curve.name)
        found[match["kind"] if match else f"{number} {curve.name}"].append(curve)
    kinds = []
    for kind, members in found.items():
        seeds = f"{kind}, {len(members)} seeds"
        kinds.append((members[0].name if len(members) == 1 else seeds, members))
    return kinds


def names_on_x(curves: Sequence[Curve]) -> bool:
    """Whether x only numbers the series, from 1 in their order: then their names belong on the axis."""
    points = [curve for curve in curves if curve.style == "points"]
    return len(points) > 1 and all(curve.x.size and np.all(curve.x == i) for i, curve in enumerate(points, 1))
