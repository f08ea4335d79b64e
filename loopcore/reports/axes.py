"""Axes, ticks and legends of the plots of a report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from loopcore.figures import new_axes
from loopcore.reports.series import Plot, drawn_text

__all__ = [
    "DASHES",
    "GRID",
    "INK",
    "MUTED",
    "PAPER",
    "WIDTH",
    "add_legend",
    "is_whole",
    "legend_label",
    "legend_layout",
    "limits",
    "new_plot",
    "set_log_ticks",
    "set_whole_ticks",
]

WIDTH, HEIGHT = 5.6, 3.5  # inches, without the legend's rows
ROW = 0.19  # inches of a legend row
LETTERS = 78  # that fit across a legend of that width
SMALL = 8.5  # points

# Ink and paper. A page that follows the reader's colour scheme replaces them by variables of its own.
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
DASHES: tuple[Any, ...] = ("--", (0, (1, 1.5)), "-.", (0, (6, 2, 1, 2, 1, 2)))


def new_plot(plot: Plot, titled: bool, entries: int) -> tuple[Figure, Axes]:
    """Axes with the plot's labels, and its title and note where it is `titled`; high enough for `entries` rows of a legend."""
    title = drawn_text(plot.get("title"), 54) if titled else ""
    note = drawn_text(plot.get("note"), 86) if titled else ""
    lines = note.count("\n") + 1 if note else 0
    height = HEIGHT + ROW * entries + (0.2 * (title.count("\n") + 1) if title else 0) + 0.17 * lines
    figure, axes = new_axes("", drawn_text(plot.get("x_label"), 70), drawn_text(plot.get("y_label"), 42), WIDTH, height)
    axes.set_title(title or (" " if note else ""), loc="left", fontsize=10.5, fontweight="bold", color=INK, pad=6 + 12 * lines)
    if note:
        above = {"xy": (0, 1), "xytext": (0, 5), "xycoords": "axes fraction", "textcoords": "offset points"}
        # The title's distance makes room for it; its width is its own.
        axes.annotate(note, **above, fontsize=SMALL, color=MUTED, linespacing=1.15).set_in_layout(False)
    for label in (axes.xaxis.label, axes.yaxis.label):
        label.set_color(INK)
        label.set_fontsize(9.5)
    axes.tick_params(colors=INK, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_color(MUTED)
        spine.set_visible(side in ("left", "bottom"))
    axes.set_axisbelow(True)
    return figure, axes


def add_legend(figure: Figure, entries: Sequence[tuple[Any, str]], columns: int) -> None:
    """A legend of (what stands for it, label) below the axes."""
    if entries:
        handles, labels = zip(*entries, strict=True)
        figure.legend(
            handles,
            labels,
            loc="outside lower center",
            ncols=columns,
            fontsize=SMALL,
            frameon=False,
            labelcolor=INK,
            handlelength=2.4,
            columnspacing=1.4,
        )


def legend_layout(labels: Sequence[str]) -> tuple[int, int]:
    """(columns, rows) of a legend with these labels: as few rows as its width allows. Columns are filled one after another."""
    lengths = [len(label) + 7 for label in labels]
    fitting = [
        columns
        for columns in range(1, min(4, len(lengths)) + 1)
        if sum(int(part.max()) for part in np.array_split(lengths, columns)) <= LETTERS
    ]
    rows = {columns: -(-len(lengths) // columns) for columns in fitting or [1]}
    columns = min(rows, key=lambda columns: (rows[columns], columns))
    return columns, rows[columns]


def legend_label(text: str) -> str:
    """A legend's entry: matplotlib leaves out those that begin with an underscore."""
    label = drawn_text(text, 68) or "unnamed"
    return f" {label}" if label.startswith("_") else label


def _log_ticks(low: float, high: float) -> list[float]:
    """Places on a logarithmic axis that read as plain numbers: powers of 10, of 2, or even steps, by how far the axis goes."""
    if high / low > 256:
        ticks = [10.0**k for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    elif high / low >= 4:
        ticks = [2.0**k for k in range(math.floor(math.log2(low)), math.ceil(math.log2(high)) + 1)]
    else:
        ticks = [float(tick) for tick in MaxNLocator(5, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)]
    found = [tick for tick in ticks if low <= tick <= high]
    return found[:: max(1, len(found) // 8)]


def set_log_ticks(axes: Axes) -> None:
    """Plain numbers on both axes, within their limits."""
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(FixedLocator(_log_ticks(low, high)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def is_whole(values: np.ndarray) -> bool:
    """Whether there are values, all of them whole numbers."""
    return values.size > 0 and bool(np.all(values == np.round(values)))


def set_whole_ticks(axes: Axes, which: str, few: int = 10) -> None:
    """Ticks of the axis `x` or `y` at whole numbers alone, about as many as `few`."""
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(few, integer=True, min_n_ticks=1))


def limits(values: np.ndarray, log: bool, margin: float) -> tuple[float, float]:
    """From the smallest to the largest finite value, with a share of the way as a margin at both ends."""
    known = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = float(known.min()), float(known.max())
    if log:
        low, high = limits(np.log(known), False, margin)
        return math.exp(low), math.exp(high)
    reach = (high - low) * margin if high - low > 1e-9 * max(1.0, abs(high)) else 0.5
    return low - reach, high + reach
