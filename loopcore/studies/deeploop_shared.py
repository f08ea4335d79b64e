"""What the findings of the DeepLoop study share: how near is near, and what is said of what is missing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from loopcore.errors import Undecided
from loopcore.statistics import Line, power_line
from loopcore.studies.drawings import Series
from loopcore.studies.measured import Run, Sample
from loopcore.studies.verdicts import Estimate, mean_of

__all__ = ["NEAR", "absent", "by_loops", "less", "line", "mean_series", "seconds_of", "slope"]

NEAR = 0.15  # between a measured exponent and the predicted one


def line(points: Iterable[tuple[float, float]]) -> Line:
    """The straight line of log y over log x of one seed's curve, whose slope is its exponent.

    Raises Undecided for fewer than three points, and values that have no logarithm.
    """
    ordered = sorted(points)
    return power_line([x for x, _ in ordered], [y for _, y in ordered])


def slope(points: Iterable[tuple[float, float]]) -> Estimate:
    """The exponent of one seed. No interval of its own: how the points bend about their line is the same in every seed."""
    return Estimate(line(points).slope)


def less(estimate: Estimate, by: float) -> Estimate:
    """The estimate less a number that is known."""
    low, high = (None if end is None else end - by for end in (estimate.low, estimate.high))
    return Estimate(estimate.value - by, low, high)


def mean_series(name: str, by_x: Mapping[int, Sequence[float]]) -> Series:
    """Means over seeds with their intervals, by x."""
    x = sorted(by_x)
    means = [mean_of([Estimate(value) for value in by_x[at]]) for at in x]
    return Series(name, x, [mean.value for mean in means], [mean.low for mean in means], [mean.high for mean in means])


def by_loops(runs: Iterable[Run], instrument: str, **axes: object) -> dict[int, list[float]]:
    """Loops to the figures of all runs that have them."""
    found: dict[int, list[float]] = {}
    for run in runs:
        try:
            points = run.over_loops(instrument, **axes)
        except Undecided:
            continue
        for loops, value in points:
            found.setdefault(loops, []).append(value)
    return found


def absent(samples: Iterable[Sample]) -> str:
    """The longest of the sentences on what was left out: samples of one study mostly miss the same runs."""
    return max((found.absent() for found in samples), key=len, default="")


def seconds_of(samples: Iterable[Sample]) -> float:
    """Of all runs behind several samples, each once."""
    runs = {run.cell.name: run for found in samples for run in (*found.runs, *(run for run, _ in found.left_out))}
    return sum(run.result.seconds for run in runs.values())
