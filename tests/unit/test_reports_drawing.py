"""Plots of reports: what is drawn is what the plot says, whatever is missing from it."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import QuadMesh
from matplotlib.container import ErrorbarContainer

from loopcore.reports import draw, to_png, to_svg
from loopcore.reports.drawing import _svg
from loopcore.reports.series import MOST_ENTRIES, describe
from loopcore.studies.base import plain
from loopcore.studies.drawings import XY, Heat, Mark, Series

Plot = dict[str, Any]


def xy(*series: Series, **fields: Any) -> Plot:
    return plain(XY("Title", "loops", "accuracy", series, **fields))


def heat(columns: int, rows: int, **fields: Any) -> Plot:
    """Position i is right from loop i on."""
    data: dict[str, Any] = {
        "x": list(range(1, columns + 1)),
        "y": list(range(1, rows + 1)),
        "values": [[1.0 if i < t else 0.0 for t in range(1, columns + 1)] for i in range(rows)],
    }
    return plain(Heat("Accuracy", "loop", "position", **(data | fields)))


def axes_of(plot: Plot) -> Axes:
    return draw(plot).axes[0]


def legend(plot: Plot) -> list[str]:
    figure = draw(plot)
    assert len(figure.legends) == 1
    return [text.get_text().strip() for text in figure.legends[0].get_texts()]


def test_points_with_their_intervals() -> None:
    axes = axes_of(xy(Series("S3", [1, 2], [0.5, 0.75], [0.25, None], [1.25, None], style="points")))
    (bars,) = [one for one in axes.containers if isinstance(one, ErrorbarContainer)]
    data, _, (reach,) = bars.lines
    assert data is not None
    assert np.asarray(data.get_xydata()).tolist() == [[1, 0.5], [2, 0.75]]
    assert [segment[:, 1].tolist() for segment in reach.get_segments()] == [[0.25, 1.25], [0.75, 0.75]]
    low, high = axes.get_ylim()
    assert low < 0.25 < 1.25 < high, "an end of an interval is cut off"


def test_a_gap_stays_a_gap_and_a_point_between_two_is_seen() -> None:
    y = [None if i in (3, 5) else 0.5 for i in range(60)]
    line, alone = axes_of(xy(Series("curve", list(range(60)), y))).lines
    assert np.flatnonzero(np.isnan(np.asarray(line.get_ydata(), dtype=float))).tolist() == [3, 5]
    assert np.asarray(alone.get_xdata()).tolist() == [4]
    assert alone.get_marker() != "None"


def test_marks_are_drawn_and_told() -> None:
    marks = [Mark("x", 12, "T_train"), Mark("x", 15, "T*"), Mark("y", 0.5, "published: 0.50")]
    plot = xy(Series("all positions", [1, 20], [0.1, 0.9]), marks=marks)
    axes = axes_of(plot)
    assert [np.asarray(line.get_xdata()).tolist() for line in axes.lines[1:3]] == [[12, 12], [15, 15]]
    assert np.asarray(axes.lines[3].get_ydata()).tolist() == [0.5, 0.5]
    assert legend(plot) == ["all positions", "T_train (12)", "T* (15)", "published: 0.50", "more loops than T*"]
    beyond = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    assert (beyond.x0, beyond.x1) == pytest.approx((15, axes.get_xlim()[1]))


def test_seeds_share_a_look_and_an_entry() -> None:
    series = [Series(f"{kind}, seed {seed}", [0, 100], [0, seed]) for kind in ("direct", "first") for seed in range(3)]
    plot = xy(*series, Series("warm/S3/s0", [0, 1], [0, 1]))
    assert legend(plot) == ["direct, 3 seeds", "first, 3 seeds", "warm/S3/s0"]
    looks = [(line.get_color(), line.get_linestyle()) for line in axes_of(plot).lines]
    assert looks[0] == looks[1] == looks[2] != looks[3] == looks[4] == looks[5] != looks[6]


def test_a_legend_hides_no_data_and_has_an_end() -> None:
    figure = draw(xy(*(Series(f"series number {k} by its name", [1, 2], [k, k]) for k in range(40))))
    below, above = figure.legends[0].get_window_extent(), figure.axes[0].get_tightbbox()
    assert above is not None
    assert below.y1 <= above.y0
    assert below.x0 >= 0
    assert below.x1 <= figure.bbox.x1
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert len(names) == MOST_ENTRIES + 1
    assert names[-1] == f"and {40 - MOST_ENTRIES} more"


def test_series_that_x_only_numbers_stand_by_their_names() -> None:
    groups = [Series(group, [i, i, i], [0.9, 1.0, 1.1], style="points") for i, group in enumerate(("S3", "A4", "A5"), 1)]
    plot = xy(*groups, marks=[Mark("y", 1.0, "published: 1.00")])
    assert [label.get_text() for label in axes_of(plot).get_xticklabels()] == ["S3", "A4", "A5"]
    assert legend(plot) == ["published: 1.00"]


def test_points_over_one_another_stand_side_by_side() -> None:
    axes = axes_of(xy(Series("S3", [1, 1, 2], [0.5, 0.5, 0.5], style="points"), Series("A4", [1], [0.5], style="points")))
    points = [line for line in axes.lines if line.get_marker() in ("o", "s")]
    places = [place for line in points for place in line.get_transform().transform(np.asarray(line.get_xydata()))]
    assert min(b - a for a, b in pairwise(sorted(x for x, _ in places))) > 3  # pixels
    assert sorted(x for line in points for x in np.asarray(line.get_xdata())) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    ("x", "ticks"),
    [
        ([0.25, 0.5, 1, 2, 4], ["0.25", "0.5", "1", "2", "4"]),
        ([1, 1000], ["1", "10", "100", "1000"]),
        ([0.9, 1.1], ["0.9", "0.95", "1", "1.05", "1.1"]),
    ],
)
def test_ticks_of_logarithmic_axes_are_plain_numbers(x: list[float], ticks: list[str]) -> None:
    axes = axes_of(xy(Series("v", x, x), log=True))
    assert axes.get_xscale() == axes.get_yscale() == "log"
    draw_ticks = [axes.xaxis.get_major_formatter()(tick) for tick in axes.get_xticks()]
    assert draw_ticks == ticks


def test_a_logarithm_has_no_place_for_zero() -> None:
    axes = axes_of(xy(Series("v", [0, 1, 2, 4], [1, 0, 2, 4], [0, 0, 0, 3], [2, 2, 3, 5], style="points"), log=True))
    (data, *_) = axes.lines
    assert np.asarray(data.get_xydata()).tolist() == [[2, 2], [4, 4]]
    assert 0 < axes.get_ylim()[0] < 2


def test_a_heat_map_with_its_frontier() -> None:
    plot = heat(
        6, 4, series=[Series("frontier", [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 4, 4], style="step")], marks=[Mark("x", 4, "T_train")]
    )
    axes = axes_of(plot)
    (mesh,) = [one for one in axes.collections if isinstance(one, QuadMesh)]
    values = np.asarray(mesh.get_array())
    assert values.shape == (4, 6)
    assert values[2].tolist() == [0, 0, 1, 1, 1, 1]  # position 3 is right from loop 3 on
    assert (axes.get_xlim(), axes.get_ylim()) == ((0.5, 6.5), (0.5, 4.5))
    frontier, trained = axes.lines
    assert np.asarray(frontier.get_ydata()).tolist() == [1.5, 1.5, 2.5, 3.5, 4.5, 4.5, 4.5, 4.5]  # along the cells' upper borders
    assert np.asarray(frontier.get_xdata())[[0, -1]].tolist() == [0.5, 6.5]
    assert np.asarray(trained.get_xdata()).tolist() == [4, 4]
    assert legend(plot) == ["frontier", "T_train (4)"]


def test_places_of_a_heat_map_without_a_value_are_told_from_zeros() -> None:
    plot = heat(2, 2, values=[[0.0, None], [None, 1.0]])
    (mesh,) = [one for one in axes_of(plot).collections if isinstance(one, QuadMesh)]
    assert np.ma.getmaskarray(mesh.get_array()).tolist() == [[False, True], [True, False]]
    assert legend(plot) == ["not measured"]


PLOTS: dict[str, Plot] = {
    "one point": xy(Series("a", [1], [0.5], style="points")),
    "one point of a line": xy(Series("a", [1], [0.5])),
    "one logarithmic point": xy(Series("a", [1], [1], [0], [2], style="points"), log=True),
    "sixty points": xy(Series("a", list(range(60)), [math.sin(i) for i in range(60)], [-1] * 60, [1] * 60)),
    "steps": xy(Series("a", [1, 2, 3], [0, None, 1], style="step")),
    "nothing": xy(),
    "nothing but gaps": xy(Series("a", [1, 2], [None, None], [None, None], [None, None], style="points")),
    "no fields": {"kind": "xy"},
    "nulls": dict.fromkeys(("title", "x_label", "y_label", "series", "marks", "log", "note")) | {"kind": "xy"},
    "a series of nulls": {"kind": "xy", "series": [dict.fromkeys(("name", "x", "y", "low", "high", "style"))]},
    "a shorter y": {"kind": "xy", "series": [{"name": "a", "x": [1, 2, 3], "y": [1, 2]}]},
    "a mark without a place": {"kind": "xy", "series": [{"name": "a", "x": [1], "y": [2]}], "marks": [{"axis": "x", "at": None}]},
    "40 x 40": heat(40, 40),
    "1 x 1": heat(1, 1),
    "uneven loops": heat(3, 2, x=[1, 2, 8]),
    "an empty heat map": heat(0, 0, values=[]),
    "a heat map of nulls": heat(2, 2, values=[[None, None], [None, None]]),
    "a heat map with no fields": {"kind": "heat"},
    "a short row": {"kind": "heat", "x": [1, 2], "y": [1, 2], "values": [[0.5]]},
    "hostile text": {
        "kind": "xy",
        "title": "</text><script>alert(1)</script> $\\frac$ \x00\x1b & \u202e \U0001f600 \u6f22",
        "note": "]]> <!-- ",
        "x_label": "$$",
        "series": [{"name": "_hidden <b>", "x": [1, 2], "y": [1, 2]}],
        "marks": [{"axis": "x", "at": 1, "label": "_$\\$"}],
    },
}


@pytest.mark.parametrize("name", PLOTS)
def test_every_plot_is_an_image_that_stands_alone(name: str) -> None:
    svg = to_svg(PLOTS[name])
    root = ET.fromstring(svg)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert not [one for one in root.iter() if one.tag.rpartition("}")[2] in ("script", "metadata", "foreignObject")]
    links = [value for one in root.iter() for key, value in one.attrib.items() if key.rpartition("}")[2] in ("href", "src")]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert "nan" not in "".join(root.itertext()).lower()
    _svg.cache_clear()
    assert to_svg(PLOTS[name]) == svg
    assert describe(PLOTS[name])


def test_text_is_drawn_as_it_stands() -> None:
    plot = xy(Series("_v $x^2$ <b>", [1, 2], [1, 2]), note="of \\$ and $")
    root = ET.fromstring(to_svg(plot))
    told = [(one.text or "").strip() for one in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "_v $x^2$ <b>" in told
    assert "of \\$ and $" in told


def test_a_plot_in_words() -> None:
    plot = xy(Series("S3", [1, 2, 4], [0.5, None, 2]), marks=[Mark("x", 2, "T_train")], log=True)
    assert describe(plot) == (
        "Title: accuracy against loops, both axes logarithmic. Series S3 (2 points, 0.5 to 2). Marked T_train (2)."
    )
    assert describe(heat(6, 4)) == "Accuracy: position against loop. Heat map of 6 by 4, values from 0 to 1."


def test_png() -> None:
    assert to_png(PLOTS["one point"], dpi=50).startswith(b"\x89PNG")


def test_another_kind_of_plot() -> None:
    with pytest.raises(ValueError, match="expected a plot of the kind xy or heat, got 'pie'"):
        draw({"kind": "pie"})
