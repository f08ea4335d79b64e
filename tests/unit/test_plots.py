"""Figures say what was measured: read back from what was drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from loopcore.instruments import measure_frontier
from loopcore.plots import TransferPoint, accuracy_figure, frontier_figure, save, transfer_figure


def advancing(v: int, length: int, loops: int) -> torch.Tensor:
    reach_T = v * torch.arange(1, loops + 1).view(-1, 1, 1)
    return (torch.arange(length) < reach_T).expand(loops, 10, length)


def xs(line: Line2D) -> list[float]:
    return np.asarray(line.get_xdata(), dtype=float).tolist()


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata(), dtype=float).tolist()


def marked(axes: Axes, marker: str) -> list[tuple[float, float]]:
    lines = [line for line in axes.lines if line.get_marker() == marker]
    return [point for line in lines for point in zip(xs(line), ys(line), strict=True)]


def legend(axes: Axes) -> list[str]:
    found = axes.get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_frontier_figure_shows_accuracy_frontier_and_speed(tmp_path: Path) -> None:
    result = measure_frontier(advancing(2, 10, 7), bootstrap=20)
    figure = frontier_figure(result, trained_loops=5, title="S3")
    axes = figure.axes[0]
    drawn = axes.images[0].get_array()
    assert drawn is not None
    assert drawn.shape == (10, 7)
    assert drawn[:, 0].tolist() == [1.0, 1.0] + [0.0] * 8
    frontier, fitted, trained = axes.lines
    assert ys(frontier) == [2.5, 4.5, 6.5, 8.5, 10.5, 10.5, 10.5]
    assert xs(fitted) == [1, 2, 3, 4, 5]
    assert ys(fitted) == pytest.approx([2.5, 4.5, 6.5, 8.5, 10.5])
    assert xs(trained) == [5, 5]
    assert any("v = 2.00 [2.00, 2.00]" in text for text in legend(axes))
    written = save(figure, tmp_path / "deep" / "frontier.png")
    assert written.read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in save(figure, tmp_path / "frontier.svg").read_bytes()[:1000]


def test_frontier_figure_of_an_unlearned_model_says_why(tmp_path: Path) -> None:
    figure = frontier_figure(measure_frontier(advancing(0, 6, 6)))
    assert "0 of 6 positions" in figure.axes[0].texts[0].get_text()
    save(figure, tmp_path / "none.png")


def test_accuracy_figure_marks_the_best_and_both_loop_counts(tmp_path: Path) -> None:
    figure = accuracy_figure({"token": [0.2, 0.9, 1.0, 0.7], "exact": [0.0, 0.5, 0.4, 0.1]}, trained_loops=2, planned_loops=3)
    axes = figure.axes[0]
    assert marked(axes, "*") == [(3.0, 1.0), (2.0, 0.5)]
    assert legend(axes) == ["token", "exact", "T_train = 2", "T* = 3"]
    save(figure, tmp_path / "accuracy.png")


def points() -> list[TransferPoint]:
    losses = {
        ("standard", 1): {-2.0: 2.8, -3.0: 2.0, -4.0: 2.2},
        ("standard", 4): {-2.0: None, -3.0: 2.6, -4.0: 2.1},
        ("loop_mup", 4): {-2.0: 2.5, -3.0: 1.9, -4.0: float("nan")},
    }
    return [TransferPoint(rule, loops, rate, loss) for (rule, loops), curve in losses.items() for rate, loss in curve.items()]


def test_transfer_figure_marks_every_minimum_and_every_divergence(tmp_path: Path) -> None:
    figure = transfer_figure(points(), {("standard", 1): -3.4, ("loop_mup", 4): -3.1}, title="transfer")
    standard, scaled = figure.axes
    assert (standard.get_title(), scaled.get_title()) == ("standard", "loop_mup")
    assert sorted(marked(standard, "*")) == [(-4.0, 2.1), (-3.0, 2.0)]
    assert marked(scaled, "*") == [(-3.0, 1.9)]
    dotted = {
        axes: [xs(line) for line in axes.lines if line.get_linestyle() == ":" and xs(line)[0] == xs(line)[-1]]
        for axes in (standard, scaled)
    }
    assert dotted == {standard: [[-3.4, -3.4]], scaled: [[-3.1, -3.1]]}
    faces = {xs(line)[0]: line.get_markerfacecolor() for line in standard.lines if line.get_marker() == "*"}
    assert faces[-4.0] == "none"  # at the edge of the grid: the optimum may be beyond
    assert faces[-3.0] != "none"
    assert [x for x, _ in marked(standard, "x")] == [-2.0]
    assert [x for x, _ in marked(scaled, "x")] == [-4.0]
    assert legend(standard) == ["T = 1", "T = 4", "T = 4, diverged"]
    save(figure, tmp_path / "transfer.png")


def test_seeds_are_a_band_around_their_mean(tmp_path: Path) -> None:
    seeds = [
        TransferPoint("standard", 2, rate, 2.0 + abs(rate + 3) + 0.2 * seed, seed)
        for rate in (-2.0, -3.0, -4.0)
        for seed in (0, 1)
    ]
    figure = transfer_figure(seeds)
    axes = figure.axes[0]
    assert marked(axes, "*") == [(-3.0, pytest.approx(2.1))]
    assert len(axes.collections) == 1
    save(figure, tmp_path / "seeds.png")


def test_a_curve_that_only_diverged_is_still_shown(tmp_path: Path) -> None:
    figure = transfer_figure([TransferPoint("standard", 8, rate, None) for rate in (-1.0, -2.0, -3.0)])
    assert [x for x, _ in marked(figure.axes[0], "x")] == [-3.0, -2.0, -1.0]
    save(figure, tmp_path / "all.png")
    with pytest.raises(ValueError, match="at least one trial"):
        transfer_figure([])
