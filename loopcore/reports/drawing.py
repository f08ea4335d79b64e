"""Draws the plots of `loopcore.studies.drawings` in their JSON form, by matplotlib's object interface.

A plot is a dict of the kind `xy` or `heat`; any field of it may be missing or null. The legend stands below the axes, where it
hides no data; seeds of one kind of run share a colour and an entry.
"""

from __future__ import annotations

import functools
import io
import json
import math
import re
import textwrap
import threading
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator
from matplotlib.transforms import ScaledTranslation, Transform

from loopcore.figures import COLOURS, LINES, MARKERS, colour, new_axes

__all__ = ["describe", "draw", "to_png", "to_svg"]

Plot = Mapping[str, Any]

WIDTH, HEIGHT = 5.6, 3.5  # inches, without the legend's rows
ROW = 0.19  # inches of a legend row
LETTERS = 78  # that fit across a legend of that width
MOST_ENTRIES = 24  # of a legend; what is left out is counted in a last entry
MOST_MARKERS = 40  # points of a line that carry a marker each
FEW = 4  # and where a line is one of many
SMALL = 8.5  # points

# Ink and paper. A page that follows the reader's colour scheme replaces them by variables of its own.
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
# From nothing right (pale) to all right (dark): one hue, so that it also reads in grey.
SHADES = LinearSegmentedColormap.from_list("share", ["#f4f7fb", "#c3d7eb", "#7fb0d6", "#3480b9", "#0b4a86", "#062f5c"])
BEYOND = "more loops than T*"
DASHES: tuple[Any, ...] = ("--", (0, (1, 1.5)), "-.", (0, (6, 2, 1, 2, 1, 2)))

_SEED = re.compile(r"^(?P<kind>.+?)(?:, seed |/s)(?P<seed>\d+)$")
# matplotlib's settings are the process's own: one figure at a time is written under those that make the bytes the same again.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True)
class _Curve:
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


def draw(plot: Plot, *, titled: bool = True) -> Figure:
    """The figure of a plot; `titled` writes its title and note on it. Raises ValueError for a kind it does not know."""
    drawers = {"xy": _draw_xy, "heat": _draw_heat}
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


def describe(plot: Plot) -> str:
    """The plot in words, for those who do not see it: axes, series with their ranges, marks."""
    title = _text(plot.get("title")) or "Plot"
    axes = f"{_text(plot.get('y_label')) or 'y'} against {_text(plot.get('x_label')) or 'x'}"
    parts = [f"{title}: {axes}{', both axes logarithmic' if plot.get('log') else ''}"]
    if plot.get("kind") == "heat":
        rows = _grid(plot)
        known = rows[np.isfinite(rows)]
        span = f", values from {known.min():.3g} to {known.max():.3g}" if known.size else ", without values"
        parts.append(f"heat map of {rows.shape[1]} by {rows.shape[0]}{span}")
    curves = [curve for curve in _curves(plot) if curve.drawn.any()]
    shown = [
        f"{curve.name} ({int(curve.drawn.sum())} points, {np.nanmin(curve.y):.3g} to {np.nanmax(curve.y):.3g})"
        for curve in curves[:MOST_ENTRIES]
    ]
    more = [f"{len(curves) - len(shown)} more"] if len(curves) > len(shown) else []
    parts += [f"series {'; '.join(shown + more)}"] if shown else []
    marks = [_mark_label(mark) for mark in _marks(plot)]
    parts += [f"marked {', '.join(marks)}"] if marks else []
    return ". ".join(parts) + "."


# --- reading


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _plain(value: Any, width: int | None = None) -> str:
    """Text that matplotlib draws as it stands: no mathematics, no characters that XML does not have."""
    text = "".join(one if one.isprintable() else " " for one in _text(value))
    text = text.replace("$", r"\$")
    return text if width is None else "\n".join(textwrap.wrap(text, width)[:3])


def _number(value: Any) -> float:
    """NaN for what is no finite number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if math.isfinite(value) else math.nan


def _numbers(values: Any, count: int | None = None) -> np.ndarray:
    found = np.array([_number(value) for value in (values or ())], dtype=float)
    if count is None:
        return found
    return np.concatenate([found[:count], np.full(max(0, count - len(found)), math.nan)])


def _curves(plot: Plot) -> list[_Curve]:
    """The series; points without an x, and on logarithmic axes those that are not above 0, are gaps."""
    log = bool(plot.get("log"))
    curves = []
    for one in plot.get("series") or ():
        x = _numbers(one.get("x"))
        y = _numbers(one.get("y"), len(x))
        ends = [None if one.get(end) is None else _numbers(one[end], len(x)) for end in ("low", "high")]
        if log:
            y[~(y > 0)] = math.nan
            x[~(x > 0)] = math.nan
        kept = np.isfinite(x)
        low, high = (None if end is None else end[kept] for end in ends)
        curves.append(_Curve(_text(one.get("name")), _text(one.get("style")) or "line", x[kept], y[kept], low, high))
    return curves


def _marks(plot: Plot) -> list[Mapping[str, Any]]:
    log = bool(plot.get("log"))
    found = [mark for mark in plot.get("marks") or () if math.isfinite(_number(mark.get("at")))]
    return [mark for mark in found if not log or mark["at"] > 0]


def _mark_label(mark: Mapping[str, Any]) -> str:
    label = _text(mark.get("label"))
    return label if any(one.isdigit() for one in label) else f"{label} ({mark['at']:.4g})".strip()


def _grid(plot: Plot) -> np.ndarray:
    """values[row of y][column of x], NaN where there is none."""
    columns, rows = len(plot.get("x") or ()), len(plot.get("y") or ())
    values = plot.get("values") or ()
    return np.array([_numbers(values[row] if row < len(values) else (), columns) for row in range(rows)]).reshape(rows, columns)


# --- axes


def _new(plot: Plot, titled: bool, entries: int) -> tuple[Figure, Axes]:
    title = _plain(plot.get("title"), 64) if titled else ""
    note = _plain(plot.get("note"), 86) if titled else ""
    lines = note.count("\n") + 1 if note else 0
    height = HEIGHT + ROW * entries + (0.2 * (title.count("\n") + 1) if title else 0) + 0.17 * lines
    figure, axes = new_axes("", _plain(plot.get("x_label"), 70), _plain(plot.get("y_label"), 42), WIDTH, height)
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


def _legend(figure: Figure, entries: Sequence[tuple[Any, str]], columns: int) -> None:
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


def _layout(labels: Sequence[str]) -> tuple[int, int]:
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


def _label(text: str) -> str:
    """A legend's entry: matplotlib leaves out those that begin with an underscore."""
    label = _plain(text, 68) or "unnamed"
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


def _log_axes(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        low, high = axis.get_view_interval()
        axis.set_major_locator(FixedLocator(_log_ticks(low, high)))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))


def _whole(values: np.ndarray) -> bool:
    return values.size > 0 and bool(np.all(values == np.round(values)))


def _whole_ticks(axes: Axes, which: str, few: int = 10) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    axis.set_major_locator(MaxNLocator(few, integer=True, min_n_ticks=1))


# --- curves and points


def _kinds(curves: Sequence[_Curve]) -> list[tuple[str, list[_Curve]]]:
    """Curves that differ in their seed alone stand together, under one label."""
    found: dict[str, list[_Curve]] = defaultdict(list)
    for number, curve in enumerate(curves):
        match = _SEED.match(curve.name)
        found[match["kind"] if match else f"{number} {curve.name}"].append(curve)
    kinds = []
    for kind, members in found.items():
        seeds = f"{kind}, {len(members)} seeds"
        kinds.append((members[0].name if len(members) == 1 else seeds, members))
    return kinds


def _names_on_x(curves: Sequence[_Curve]) -> bool:
    """Whether x only numbers the series, from 1 in their order: then their names belong on the axis."""
    points = [curve for curve in curves if curve.style == "points"]
    return len(points) > 1 and all(curve.x.size and np.all(curve.x == i) for i, curve in enumerate(points, 1))


def _draw_xy(plot: Plot, titled: bool) -> Figure:
    curves, marks = _curves(plot), _marks(plot)
    log, named = bool(plot.get("log")), _names_on_x(curves)
    kinds = _kinds(curves)
    labels = [_label(label) for label, members in kinds if not (named and members[0].style == "points")]
    labels += [_label(_mark_label(mark)) for mark in marks]
    beyond = None if log else next((mark["at"] for mark in marks if mark.get("label") == "T*" and mark.get("axis") == "x"), None)
    labels += [] if beyond is None else [BEYOND]
    labels = labels[:MOST_ENTRIES] + ([""] if len(labels) > MOST_ENTRIES else [])
    columns, rows = _layout(labels)
    figure, axes = _new(plot, titled, rows)
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
            entries.append((handle, _label(label)))
    for number, mark in enumerate(marks):
        line = axes.axvline if mark.get("axis") == "x" else axes.axhline
        handle = line(mark["at"], color=MUTED, ls=DASHES[number % len(DASHES)], lw=1.4, zorder=1.5)
        entries.append((handle, _label(_mark_label(mark))))
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
    _legend(figure, entries, columns)
    return figure


def _finish(
    axes: Axes,
    plot: Plot,
    curves: Sequence[_Curve],
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
    low, high = _limits(np.concatenate([y, *ends, at["y"]]), log, 0.07)
    if not log and "accuracy" in _text(plot.get("y_label")) and y.min() >= 0 and y.max() <= 1:
        low, high = min(low, -0.04), max(high, 1.04)
    axes.set_ylim(low, high)
    axes.set_xlim(*((0.5, len(points) + 0.5) if named else _limits(np.concatenate([x, at["x"]]), log, 0.05 + 1.3 * aside)))
    if log:
        _log_axes(axes)
    elif named:
        axes.set_xticks(range(1, len(points) + 1), [_plain(curve.name, 12 if len(points) > 3 else 18) for curve in points])
        axes.grid(visible=False, axis="x")
    elif _whole(x):
        _whole_ticks(axes, "x")


def _limits(values: np.ndarray, log: bool, margin: float) -> tuple[float, float]:
    """From the smallest to the largest finite value, with a share of the way as a margin at both ends."""
    known = values[np.isfinite(values) & ((values > 0) | (not log))]
    low, high = float(known.min()), float(known.max())
    if log:
        low, high = _limits(np.log(known), False, margin)
        return math.exp(low), math.exp(high)
    reach = (high - low) * margin if high - low > 1e-9 * max(1.0, abs(high)) else 0.5
    return low - reach, high + reach


def _shifts(curves: Sequence[_Curve]) -> dict[tuple[int, int], float]:
    """(curve, point) to points of paper to the side, for points that share their x: drawn over one another they hide each other.

    The data stay where they are; only clouds over a few places are spread.
    """
    places: dict[float, list[tuple[int, int]]] = defaultdict(list)
    for curve in curves:
        if curve.style == "points":
            for i in np.flatnonzero(curve.drawn):
                places[float(curve.x[i])].append((id(curve), int(i)))
    if not places or len(places) > 8:
        return {}
    found = {}
    for together in places.values():
        step = min(6.0, 30.0 / len(together))
        for rank, key in enumerate(together):
            found[key] = (rank - (len(together) - 1) / 2) * step
    return found


def _look(number: int) -> tuple[str, str]:
    """Colour and marker of a plot's series by its number."""
    hue = colour(number)
    return INK if hue == COLOURS[-1] else hue, MARKERS[(number + number // len(MARKERS)) % len(MARKERS)]


def _draw_line(axes: Axes, curve: _Curve, number: int, dash: str, *, many: bool, marked: bool) -> Any:
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


def _draw_points(axes: Axes, curve: _Curve, number: int, shifts: Mapping[tuple[int, int], float]) -> Any:
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


def _reach(curve: _Curve, places: Sequence[int]) -> np.ndarray | None:
    """Lengths of the error bars below and above [2, points]; 0 for a point without an interval."""
    if curve.low is None and curve.high is None:
        return None
    y = curve.y[list(places)]
    ends = [y if end is None else end[list(places)] for end in (curve.low, curve.high)]
    reach = np.nan_to_num(np.array([y - ends[0], ends[1] - y]), nan=0.0)
    return np.clip(reach, 0.0, None)


# --- heat maps


def _edges(centres: np.ndarray) -> np.ndarray:
    """Borders of the cells about their centres, halfway between neighbours."""
    if len(centres) == 1:
        return np.array([centres[0] - 0.5, centres[0] + 0.5])
    middle = (centres[1:] + centres[:-1]) / 2
    return np.concatenate([[2 * centres[0] - middle[0]], middle, [2 * centres[-1] - middle[-1]]])


def _draw_heat(plot: Plot, titled: bool) -> Figure:
    x, y, grid = _numbers(plot.get("x")), _numbers(plot.get("y")), _grid(plot)
    curves, marks = _curves(plot), _marks(plot)
    labels = [_label(curve.name) for curve in curves] + [_label(_mark_label(mark)) for mark in marks]
    empty = not grid.size or not np.isfinite(grid).any()
    holes = not empty and not np.isfinite(grid).all()
    columns, rows = _layout([*labels, *(["not measured"] if holes else [])])
    figure, axes = _new(plot, titled, rows)
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
    bar.set_label("accuracy" if "accuracy" in _text(plot.get("title")).lower() else "value", color=INK, fontsize=9.5)
    for number, curve in enumerate(curves):
        entries.append((_over_heat(axes, curve, number, across, up), _label(curve.name)))
    for number, mark in enumerate(marks):
        line = axes.axvline if mark.get("axis") == "x" else axes.axhline
        casing = [withStroke(linewidth=4, foreground=PAPER)]
        handle = line(mark["at"], color=INK, ls=DASHES[number % len(DASHES)], lw=1.6, path_effects=casing, zorder=3)
        entries.append((handle, _label(_mark_label(mark))))
    if holes:
        entries.append((Rectangle((0, 0), 1, 1, fc=PAPER, ec=MUTED, hatch="////", lw=0), "not measured"))
    axes.set_xlim(across[0], across[-1])
    axes.set_ylim(up[0], up[-1])
    for which, values in (("x", x), ("y", y)):
        if _whole(values):
            _whole_ticks(axes, which)
    _legend(figure, entries, columns)
    return figure


def _over_heat(axes: Axes, curve: _Curve, number: int, across: np.ndarray, up: np.ndarray) -> Any:
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
