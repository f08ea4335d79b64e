"""Heat maps of a report: shares over loops and positions, with curves on top."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from loopcore.figures import COLOURS, MARKERS
from loopcore.reports.axes import (
    DASHES,
    GRID,
    INK,
    MUTED,
    PAPER,
    add_legend,
    is_whole,
    legend_label,
    legend_layout,
    new_plot,
    set_whole_ticks,
)
from loopcore.reports.series import Curve, Plot, curves_of, grid_of, mark_label, marks_of, numbers, text_of

__all__ = ["draw_heat"]

# From nothing right (pale) to all right (dark): one hue, so that it also reads in grey.
SHADES = LinearSegmentedColormap.from_list("share", ["#f4f7fb", "#c3d7eb", "#7fb0d6", "#3480b9", "#0b4a86", "#062f5c"])


def draw_heat(plot: Plot, titled: bool) -> Figure:
    """The figure of a heat map, before its layout; places without a value are hatched."""
    x, y, grid = numbers(plot.get("x")), numbers(plot.get("y")), grid_of(plot)
    curves, marks = curves_of(plot), marks_of(plot)
    labels = [legend_label(curve.name) for curve in curves] + [legend_label(mark_label(mark)) for mark in marks]
    empty = not grid.size or not np.isfinite(grid).any()
    holes = not empty and not np.isfinite(grid).all()
    columns, rows = legend_layout([*labels, *(["not measured"] if holes else [])])
    figure, axes = new_plot(plot, titled, rows)
    if empty:
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set_xticks([])
        axes.set_yticks([])
        return figure
    across, up = _edges(x), _edges(y)
    entries: list[tuple[Any, str]] = []
    if holes:
        hole = Rectangle((0, 0), 1, 1, transform=axes.transAxes, fc=PAPER, ec=GRID, hatch="////", lw=0, zorder=0)
        axes.add_patch(hole)
    mesh = axes.pcolormesh(across, up, np.ma.masked_invalid(grid), cmap=SHADES, vmin=0.0, vmax=1.0, rasterized=True, zorder=1)
    bar = figure.colorbar(mesh, ax=axes, pad=0.02, aspect=24)
    bar.ax.tick_params(colors=INK, labelsize=9)
    bar.outline.set_visible(False)
    bar.set_label("accuracy" if "accuracy" in text_of(plot.get("title")).lower() else "value", color=INK, fontsize=9.5)
    for number, curve in enumerate(curves):
        entries.append((_over_heat(axes, curve, number, across, up), legend_label(curve.name)))
    for number, mark in enumerate(marks):
        line = axes.axvline if mark.get("axis") == "x" else axes.axhline
        casing = [withStroke(linewidth=4, foreground=PAPER)]
        handle = line(mark["at"], color=INK, ls=DASHES[number % len(DASHES)], lw=1.6, path_effects=casing, zorder=3)
        entries.append((handle, legend_label(mark_label(mark))))
    if holes:
        entries.append((Rectangle((0, 0), 1, 1, fc=PAPER, ec=MUTED, hatch="////", lw=0), "not measured"))
    axes.set_xlim(across[0], across[-1])
    axes.set_ylim(up[0], up[-1])
    for which, values in (("x", x), ("y", y)):
        if is_whole(values):
            set_whole_ticks(axes, which)
    add_legend(figure, entries, columns)
    return figure


def _edges(centres: np.ndarray) -> np.ndarray:
    """Borders of the cells about their centres, halfway between neighbours."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def _over_heat(axes: Axes, curve: Curve, number: int, across: np.ndarray, up: np.ndarray) -> Any:
    """A curve on a heat map. Steps are frontiers: y counts what is solved, so that they run along the upper borders of cells and
    from the first column's left edge to the last one's right."""
    hue = COLOURS[(1, 4, 3, 2)[number % 4]]
    style: dict[str, Any] = {"color": hue, "lw": 2.2, "zorder": 4, "path_effects": [withStroke(linewidth=4, foreground=PAPER)]}
    x, y = curve.x, curve.y
    if curve.style == "step" and x.size:
        half = (up[1] - up[0]) / 2
        x = np.concatenate([[min(across[0], x[0])], x, [max(across[-1], x[-1])]])
        y = np.concatenate([[y[0]], y, [y[-1]]]) + half
        style["drawstyle"] = "steps-mid"
    elif curve.style == "points":
        style |= {"ls": "none", "marker": MARKERS[number % len(MARKERS)]}
    (line,) = axes.plot(x, y, **style)
    return line
