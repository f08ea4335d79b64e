"""Figures of what the instruments measured, by matplotlib's object interface: no display, no global state.

Every function returns a `Figure`; `save` writes it. Palette and axes are those of `loopcore.figures`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from loopcore.figures import COLOURS, LINES, colour, new_axes, note, save, whole_numbers
from loopcore.instruments.frontier import FrontierResult

__all__ = ["TransferPoint", "accuracy_figure", "frontier_figure", "save", "transfer_figure"]


@dataclass(frozen=True)
class TransferPoint:
    """One trial of a learning-rate study."""

    rule: str
    loops: int
    log2_lr: float
    loss: float | None
    """Final loss; None (or not finite) for a trial that diverged."""
    seed: int = 0


def frontier_figure(result: FrontierResult, *, trained_loops: int | None = None, title: str = "") -> Figure:
    """Accuracy over loops x positions, the frontier at v_hat's level on it, and the line whose slope is v.

    The line covers the loops it was fitted on. Without a measurable speed the reason stands in its place.
    """
    figure, axes = new_axes(title, "loop", "position", width=6.4)
    extent = (0.5, result.loops + 0.5, 0.5, result.length + 0.5)
    columns = [[row[i] for row in result.accuracy_TN] for i in range(result.length)]
    image = axes.imshow(columns, origin="lower", aspect="auto", extent=extent, vmin=0.0, vmax=1.0, cmap="Greys")
    figure.colorbar(image, ax=axes, label="accuracy")
    reached = result.frontiers[result.level]
    loops = range(1, result.loops + 1)
    axes.step(loops, [r + 0.5 for r in reached], where="mid", color=COLOURS[0], lw=2, label=f"frontier, q = {result.level:g}")
    speed = result.speeds.get(result.level)
    if speed is None:
        note(axes, "no speed: " + result.undecided[result.level])
    else:
        fitted = range(1, speed.points + 1)
        middle, height = sum(fitted) / speed.points, sum(reached[: speed.points]) / speed.points
        label = f"v = {speed.v:.2f}{_interval(speed.low, speed.high)} positions a loop, R2 = {speed.r2:.3f}"
        axes.plot(fitted, [height + speed.v * (t - middle) + 0.5 for t in fitted], color=COLOURS[1], ls="--", lw=2, label=label)
    if trained_loops is not None:
        axes.axvline(trained_loops, color=COLOURS[2], ls=":", lw=1.5, label=f"trained loops, T = {trained_loops}")
    axes.set_xlim(0.5, result.loops + 0.5)
    axes.set_ylim(0.5, result.length + 0.5 + 0.02 * result.length)
    whole_numbers(axes, result.loops, result.length)
    axes.legend(loc="lower right", fontsize="small", framealpha=0.9)
    return figure


def accuracy_figure(
    curves: dict[str, Sequence[float]], *, trained_loops: int | None = None, planned_loops: int | None = None, title: str = ""
) -> Figure:
    """Accuracy against test loops, a curve a name (`{"token": ..., "last position": ...}`, value t for t + 1 loops).

    T_train and T* are drawn where given; each curve's best loop is marked.
    """
    figure, axes = new_axes(title, "loops", "accuracy")
    for number, (name, curve) in enumerate(curves.items()):
        loops = range(1, len(curve) + 1)
        axes.plot(loops, curve, color=colour(number), ls=LINES[number % len(LINES)], lw=2, marker=".", label=name)
        best = max(range(len(curve)), key=curve.__getitem__)
        axes.plot([best + 1], [curve[best]], color=colour(number), marker="*", ms=12, ls="none")
    if trained_loops is not None:
        axes.axvline(trained_loops, color=COLOURS[2], ls=":", lw=1.5, label=f"T_train = {trained_loops}")
    if planned_loops is not None:
        axes.axvline(planned_loops, color=COLOURS[4], ls="-.", lw=1.5, label=f"T* = {planned_loops}")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize="small")
    return figure


def transfer_figure(
    points: Iterable[TransferPoint], optima: Mapping[tuple[str, int], float] | None = None, *, title: str = ""
) -> Figure:
    """log2 of the learning rate against loss: a panel a rule, a curve a loop count, seeds as a band around their mean.

    Every curve's minimum is marked by a star, hollow where it lies at the edge of the grid and the optimum may be beyond it.
    `optima` are fitted ones, log2 of the rate by rule and loop count: a dotted line each. Learning rates at which a seed
    diverged are crosses along the top.
    """
    trials: dict[str, dict[int, dict[float, list[float | None]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for point in points:
        loss = point.loss if point.loss is not None and math.isfinite(point.loss) else None
        trials[point.rule][point.loops][point.log2_lr].append(loss)
    if not trials:
        raise ValueError("expected at least one trial to draw, got none")
    figure = Figure(figsize=(max(4.8, 4.2 * len(trials)), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(1, len(trials), sharey=True, squeeze=False)[0]
    every_loops = sorted({loops for by_loops in trials.values() for loops in by_loops})
    for axes, (rule, by_loops) in zip(panels, trials.items(), strict=True):
        for loops, by_rate in sorted(by_loops.items()):
            number = every_loops.index(loops)
            _transfer_curve(axes, by_rate, number, f"T = {loops}", height=1.0 - 0.04 * (number + 1))
            if (fitted := (optima or {}).get((rule, loops))) is not None:
                axes.axvline(fitted, color=colour(number), ls=":", lw=1)
        axes.set_title(rule)
        axes.set_xlabel("log2 learning rate")
        axes.grid(alpha=0.25)
        axes.legend(fontsize="small")
    panels[0].set_ylabel("loss")
    low, high = panels[0].get_ylim()
    panels[0].set_ylim(low, high + 0.06 * (len(every_loops) + 1) * (high - low))  # the crosses stand above every curve
    return figure


def _transfer_curve(axes: Axes, by_rate: dict[float, list[float | None]], number: int, label: str, height: float) -> None:
    hue = colour(number)
    grid = sorted(by_rate)
    kept = {rate: [loss for loss in by_rate[rate] if loss is not None] for rate in grid}
    rates = [rate for rate in grid if kept[rate]]
    means = [sum(kept[rate]) / len(kept[rate]) for rate in rates]
    axes.plot(rates, means, color=hue, ls=LINES[number % len(LINES)], marker="o", ms=4, label=label)
    if any(len(kept[rate]) > 1 for rate in rates):
        axes.fill_between(
            rates, [min(kept[rate]) for rate in rates], [max(kept[rate]) for rate in rates], color=hue, alpha=0.15, lw=0
        )
    if rates:
        best = min(range(len(rates)), key=means.__getitem__)
        face = "none" if rates[best] in (grid[0], grid[-1]) else hue
        axes.plot([rates[best]], [means[best]], marker="*", ms=15, mec=hue, mfc=face, ls="none", zorder=3)
    diverged = [rate for rate in grid if None in by_rate[rate]]
    if diverged:
        # x in learning rates, y as a share of the panel's height: a divergence has no loss to stand at.
        at = axes.get_xaxis_transform()
        axes.plot(
            diverged,
            [height] * len(diverged),
            marker="x",
            ms=8,
            mew=2,
            color=hue,
            ls="none",
            transform=at,
            label=f"{label}, diverged",
        )


def _interval(low: float | None, high: float | None) -> str:
    return "" if low is None or high is None else f" [{low:.2f}, {high:.2f}]"
