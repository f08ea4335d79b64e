"""Draws the plots of `loopcore.studies.drawings` in their JSON form, by matplotlib's object interface.

A plot is a dict of the kind `xy` or `heat`; any field of it may be missing or null. The legend stands below the axes, where it
hides no data; seeds of one kind of run share a colour and an entry.
"""

from __future__ import annotations

import functools
import io
import json
import threading
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.transforms import ScaledTranslation, Transform

from loopcore.figures import COLOURS, LINES, MARKERS, colour
from loopcore.reports.axes import (
    DASHES,
    GRID,
    INK,
    MUTED,
    PAPER,
    WIDTH,
    add_legend,
    is_whole,
    legend_label,
    legend_layout,
    limits,
    new_plot,
    set_log_ticks,
    set_whole_ticks,
)
from loopcore.reports.heat import draw_heat
from loopcore.reports.series import (
    MOST_ENTRIES,
    Curve,
    Plot,
    curves_of,
    drawn_text,
    kinds_of,
    mark_label,
    marks_of,
    names_on_x,
    text_of,
)

__all__ = ["draw", "to_png", "to_svg"]

MOST_MARKERS = 40  # points of a line that carry a marker each
FEW = 4  # and where a line is one of many
BEYOND = "more loops than T*"

# matplotlib's settings are the process's own: one figure at a time is written under those that make the bytes the same again.
_ONE_AT_A_TIME = threading.Lock()


def draw(plot: Plot, *, titled: bool = True) -> Figure:
    """The figure of a plot; `titled` writes its title and note on it. Raises ValueError for a kind it does not know."""
    drawers = {"xy": _draw_xy, "heat": draw_heat}
    kind = plot.get("kind")
    if kind not in drawers:
        raise ValueError(f"expected a plot of the kind xy or heat, got {kind!r}")
    figure = drawers[kind](plot, titled)
    layout = figure.get_layout_engine()
    assert layout is not None
    # Once is enough: saving would lay it out twice more, and takes as long again each time.
    layout.execute(figure)
    figure.set_layout_engine("none")
    return figure


def to_svg(plot: Plot, *, titled: bool = True) -> str:
    """An SVG document: text is text, the same plot gives the same bytes, and it refers to nothing outside itself."""
    return _svg(json.dumps(plot, sort_keys=True), titled)


@functools.lru_cache(maxsize=256)  # of some 20 kB: a page that is asked for again is not drawn again
def _svg(plot: str, titled: bool) -> str:
    buffer = io.StringIO()
    settings: dict[Any, Any] = {"svg.hashsalt": "loopcore", "svg.fonttype": "none"}
    with _ONE_AT_A_TIME, warnings.catch_warnings(), matplotlib.rc_context(settings):
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the reader's own font draws the text
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(json.loads(plot), titled=titled).savefig(buffer, format="svg", metadata=nothing, dpi=144)
    text = buffer.getvalue()
    return "\n".join(line.rstrip() for line in text[text.index("<svg") :].splitlines()) + "\n"


def to_png(plot: Plot, *, titled: bool = True, dpi: int = 150) -> bytes:
    """The plot as a PNG image."""
    buffer = io.BytesIO()
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        draw(plot, titled=titled).savefig(buffer, format="png", metadata={"Software": None}, dpi=dpi)
    return buffer.getvalue()


def _draw_xy(plot: Plot, titled: bool) -> Figure:
    curves, marks = curves_of(plot), marks_of(plot)
    log, named = bool(plot.get("log")), names_on_x(curves)
    kinds = kinds_of(curves)
    labels = [legend_label(label) for label, members in kinds if not (named and members[0].style == "points")]
    labels += [legend_label(mark_label(mark)) for mark in marks]
    beyond = None if log else next((mark["at"] for mark in marks if mark.get("label") == "T*" and mark.get("axis") == "x"), None)
    labels += [] if beyond is None else [BEYOND]
    labels = labels[:MOST_ENTRIES] + ([""] if len(labels) > MOST_ENTRIES else [])
    columns, rows = legend_layout(labels)
    figure, axes = new_plot(plot, titled, rows)
    axes.grid(color=GRID, lw=0.7)
    if log:
        axes.set_xscale("log")
        axes.set_yscale("log")
    entries = []
    shift = _shifts(curves)
    lines = 0
    fits = any(curve.style == "points" for curve in curves)
    for number, (label, members) in enumerate(kinds):
        handle = None
        for member in members:
            if member.style == "points":
                handle = _draw_points(axes, member, number, shift)
            else:
                handle = _draw_line(axes, member, number, LINES[lines % len(LINES)], many=len(members) > 1, marked=not fits)
        lines += members[0].style != "points"
        if not (named and members[0].style == "points"):
            entries.append((handle, legend_label(label)))
    for number, mark in enumerate(marks):
        line = axes.axvline if mark.get("axis") == "x" else axes.axhline
        handle = line(mark["at"], color=MUTED, ls=DASHES[number % len(DASHES)], lw=1.4, zorder=1.5)
        entries.append((handle, legend_label(mark_label(mark))))
    if beyond is not None:
        entries.append((Rectangle((0, 0), 1, 1, color=MUTED, alpha=0.12, lw=0), BEYOND))
    if len(entries) > MOST_ENTRIES:
        more = Rectangle((0, 0), 0, 0, alpha=0)
        entries = [*entries[:MOST_ENTRIES], (more, f"and {len(entries) - MOST_ENTRIES} more")]
    if not any(curve.drawn.any() for curve in curves):
        axes.text(0.5, 0.5, "nothing measured yet", transform=axes.transAxes, ha="center", va="center", color=MUTED)
        axes.set_xticks([])
        axes.set_yticks([])
    else:
        aside = max(map(abs, shift.values()), default=0.0) / (72 * WIDTH)
        _finish(axes, plot, curves, marks, log=log, named=named, aside=aside)
        if beyond is not None and beyond < axes.get_xlim()[1]:
            axes.axvspan(beyond, axes.get_xlim()[1], color=MUTED, alpha=0.12, lw=0, zorder=0)
    add_legend(figure, entries, columns)
    return figure


def _finish(
    axes: Axes,
    plot: Plot,
    curves: Sequence[Curve],
    marks: Sequence[Mapping[str, Any]],
    *,
    log: bool,
    named: bool,
    aside: float,
) -> None:
    """Limits and ticks; `aside` is the share of the width by which points stand beside their place."""
    points = [curve for curve in curves if curve.style == "points"]
    x = np.concatenate([curve.x[curve.drawn] for curve in curves])
    y = np.concatenate([curve.y[curve.drawn] for curve in curves])
    ends = [end[curve.drawn] for curve in curves for end in (curve.low, curve.high) if end is not None]
    at = {axis: [mark["at"] for mark in marks if mark.get("axis") == axis] for axis in ("x", "y")}
    low, high = limits(np.concatenate([y, *ends, at["y"]]), log, 0.07)
    if not log and "accuracy" in text_of(plot.get("y_label")) and y.min() >= 0 and y.max() <= 1:
        low, high = min(low, -0.04), max(high, 1.04)
    axes.set_ylim(low, high)
    axes.set_xlim(*((0.5, len(points) + 0.5) if named else limits(np.concatenate([x, at["x"]]), log, 0.05 + 1.3 * aside)))
    if log:
        set_log_ticks(axes)
    elif named:
        axes.set_xticks(range(1, len(points) + 1), [drawn_text(curve.name, 12 if len(points) > 3 else 18) for curve in points])
        axes.grid(visible=False, axis="x")
    elif is_whole(x):
        set_whole_ticks(axes, "x")


def _shifts(curves: Sequence[Curve]) -> dict[tuple[int, int], float]:
    """(curve, point) to points of paper to the side, for points that share their x: drawn over one another they hide each other.

    The data stay where they are; only clouds over a few places are spread.
    """
    places: dict[float, list[tuple[int, int]]] = defaultdict(list)
    for curve in curves:
        if curve.style == "points":
            for i in np.flatnonzero(curve.drawn):
                places[float(curve.x[i])].append((id(curve), int(i)))
    count = sum(map(len, places.values()))
    if not places or len(places) > (8 if count < 2 * len(places) else 24):
        return {}
    found = {}
    room = min(30.0, 45.0 * WIDTH / len(places))
    for together in places.values():
        step = min(6.0, room / len(together))
        for rank, key in enumerate(together):
            found[key] = (rank - (len(together) - 1) / 2) * step
    return found


def _look(number: int) -> tuple[str, str]:
    """Colour and marker of a plot's series by its number."""
    hue = colour(number)
    return INK if hue == COLOURS[-1] else hue, MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]


def _draw_line(axes: Axes, curve: Curve, number: int, dash: str, *, many: bool, marked: bool) -> Any:
    """Draws a line, or one of `many` of a kind, and returns what stands for it in a legend; `marked` shows its points."""
    hue, marker = _look(number)
    drawn = curve.drawn
    markers = marker if marked and drawn.sum() <= (FEW if many else MOST_MARKERS) else ""
    style: dict[str, Any] = {"color": hue, "ls": dash, "lw": 1.3 if many else 1.9, "alpha": 0.85 if many else 1.0}
    if curve.low is not None and curve.high is not None and curve.style == "line":
        axes.fill_between(curve.x, curve.low, curve.high, color=hue, alpha=0.15, lw=0)
    if curve.style == "step":
        style["drawstyle"] = "steps-mid"
    (line,) = axes.plot(curve.x, curve.y, marker=markers, ms=4, **style)
    if not markers:
        # A point between two gaps has no line to be seen by.
        before, after = np.concatenate([[False], drawn[:-1]]), np.concatenate([drawn[1:], [False]])
        alone = drawn & ~before & ~after
        if alone.any():
            axes.plot(curve.x[alone], curve.y[alone], marker=marker, ms=4, ls="none", color=hue)
    return line


def _draw_points(axes: Axes, curve: Curve, number: int, shifts: Mapping[tuple[int, int], float]) -> Any:
    """Draws a cloud with its error bars and returns what stands for it in a legend."""
    hue, marker = _look(number)
    by_shift: dict[float, list[int]] = defaultdict(list)
    for i in np.flatnonzero(curve.drawn):
        by_shift[shifts.get((id(curve), int(i)), 0.0)].append(int(i))
    crowd = curve.drawn.sum() > 30
    handle = None
    for shift, places in by_shift.items():
        at: Transform = axes.transData
        if shift:
            figure = axes.get_figure(root=True)
            assert figure is not None
            at = at + ScaledTranslation(shift / 72, 0, figure.dpi_scale_trans)
        handle = axes.errorbar(
            curve.x[places],
            curve.y[places],
            yerr=_reach(curve, places),
            fmt=marker,
            ms=4.5 if crowd else 6,
            mec=PAPER,
            mew=0.5,
            color=hue,
            alpha=0.8 if crowd else 0.95,
            elinewidth=1.1,
            capsize=2.5,
            transform=at,
            zorder=3,
        )
    if handle is None:
        (handle,) = axes.plot([], [], marker=marker, ls="none", color=hue)
    return handle


def _reach(curve: Curve, places: Sequence[int]) -> np.ndarray | None:
    """Lengths of the error bars below and above [2, points]; 0 for a point without an interval."""
    if curve.low is None and curve.high is None:
        return None
    y = curve.y[list(places)]
    ends = [y if end is None else end[list(places)] for end in (curve.low, curve.high)]
    reach = np.nan_to_num(np.array([y - ends[0], ends[1] - y]), nan=0.0)
    return np.clip(reach, 0.0, None)
