"""What every figure of the house shares: the palette, axes without a display or global state, whole-number ticks, saving.

Colours are the palette of Okabe and Ito, which colour-blind readers can tell apart; what a colour says, a marker, a line style
or a label says too.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["COLOURS", "LINES", "MARKERS", "colour", "new_axes", "note", "save", "whole_numbers"]

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINES = ("-", "--", ":", "-.")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")


def colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def new_axes(title: str, x: str, y: str, width: float = 6.0, height: float = 4.2) -> tuple[Figure, Axes]:
    """A figure of `width` x `height` inches with one pair of axes."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    return figure, axes


def whole_numbers(axes: Axes, columns: int, rows: int) -> None:
    """Ticks from 1 at whole numbers, about twelve on each axis."""
    axes.set_xticks(range(1, columns + 1, max(1, columns // 12)))
    axes.set_yticks(range(1, rows + 1, max(1, rows // 12)))


def note(axes: Axes, text: str) -> None:
    axes.text(0.02, 0.98, text, transform=axes.transAxes, va="top", fontsize="small", color=COLOURS[1], wrap=True)


def save(figure: Figure, path: Path | str, *, dpi: int = 150) -> Path:
    """Writes the figure in the format of the path's suffix."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=dpi)
    return path
