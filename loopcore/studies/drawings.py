"""Plots as data: what a report draws, whatever it draws with. Two kinds: curves and points over x, and a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["XY", "Heat", "Mark", "Plot", "Series", "heat_of"]


@dataclass(frozen=True)
class Series:
    """One curve or one cloud of points."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    """None leaves a gap."""
    low: Sequence[float | None] | None = None
    high: Sequence[float | None] | None = None
    """Ends of the intervals, where there are any."""
    style: Literal["points", "line", "step"] = "line"


@dataclass(frozen=True)
class Mark:
    """A straight line across the plot, with a label: T_train, T*, chance."""

    axis: Literal["x", "y"]
    at: float
    label: str


@dataclass(frozen=True)
class XY:
    """Series over one pair of axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    marks: Sequence[Mark] = ()
    log: bool = False
    """Both axes logarithmic."""
    note: str = ""
    kind: Literal["xy"] = field(default="xy", init=False)


@dataclass(frozen=True)
class Heat:
    """Values in [0, 1] over loops (x) and positions (y), with curves on top."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float]
    y: Sequence[float]
    values: Sequence[Sequence[float | None]]
    """values[row of y][column of x]."""
    series: Sequence[Series] = ()
    marks: Sequence[Mark] = ()
    note: str = ""
    kind: Literal["heat"] = field(default="heat", init=False)


Plot = XY | Heat


def heat_of(cells: Mapping[tuple[float, float], float]) -> dict[str, Any]:
    """x, y and values of a Heat from {(x, y): value}; places without a value stay empty."""
    xs, ys = sorted({x for x, _ in cells}), sorted({y for _, y in cells})
    return {"x": xs, "y": ys, "values": [[cells.get((x, y)) for x in xs] for y in ys]}
