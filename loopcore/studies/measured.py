"""What was measured on the cells of a study, and how it is read. Whatever is missing is said, never guessed.

The rows that are read, by instrument and axes (the instruments of `loopcore.instruments` write them so):

    speed, speed_r2     estimator: frontier (q), tau_p90, tau_median, tau_mean, cone
    frontier            q, loop
    tau                 statistic, position
    accuracy            of: token, exact, last, position (position); loop; length (the cell's own where it is not named)
    cone_ratio          against: tau_mean
    damage_onset        patched, distance
    tail                of: one of the four metrics; loop
    schedules           schedule: streaming or all; of: token, exact, last; loop
    calibration         of: kept, draws, loops, fixed_loops; of: margin, risk, by draw
    perturbation        of: logit_change; loops; update; tied
    kappa               of: F_largest, F_bound; of: F, block, matrix (F max_normalised or norm_weighted); at: start, end
    growth              of: exponent; of: final_displacement; loops; tied
    plateau             of: loss, constant, below
"""

from __future__ import annotations

import functools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from loopcore.errors import Undecided
from loopcore.specs.probe import SPEED_LEVEL
from loopcore.statistics import wilson
from loopcore.studies.base import AxisValue, Cell
from loopcore.studies.verdicts import Estimate

__all__ = ["LEARNED", "CellResult", "Measured", "Row", "Run", "Sample", "sample"]

LEARNED = 0.97  # token accuracy at the contract's last length: where the recipe begins to cool a run down (OptimizerSpec)


@dataclass(frozen=True)
class Row:
    """One figure of an instrument."""

    instrument: str
    axes: Mapping[str, Any]
    value: float
    low: float | None = None
    high: float | None = None

    @property
    def estimate(self) -> Estimate:
        return Estimate(self.value, self.low, self.high)


@dataclass(frozen=True)
class CellResult:
    """What has come of a cell so far."""

    state: str = "queued"
    """Of its training: `succeeded` means that it ran to its end (solved, unsolved or diverged)."""
    seconds: float = 0.0
    """Wall seconds of its training and its probes."""
    figures: Mapping[str, Any] = field(default_factory=dict)
    """`Training.figures()`."""
    curves: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    """Name to (step, value), as far as somebody wants to draw it: `held_out_token_accuracy`."""
    rows: tuple[Row, ...] = ()
    """Of all of its probes."""
    missing: Mapping[str, str] = field(default_factory=dict)
    """What has no rows (`speed: 3 of 512 words are solved`, `far: cancelled`): the probe or figure, and why."""


class Run:
    """A cell with what was measured on it. Readers raise Undecided, whose message says what is missing and why."""

    def __init__(self, cell: Cell, result: CellResult) -> None:
        self.cell, self.result = cell, result
        self.axes = cell.axes
        self.length = cell.train.contract.longest
        """N, the longest trained length."""

    def __repr__(self) -> str:
        return f"Run({self.cell.name!r}, {self.result.state})"

    def loops_for(self, length: int) -> int:
        """T(n) of the contract."""
        return self.cell.train.contract.loops.loops(length)

    @property
    def loops(self) -> int:
        """T_train, at the longest trained length."""
        return self.loops_for(self.length)

    @property
    def demand(self) -> float:
        """n_train / T_train, positions a loop."""
        return self.length / self.loops

    def trained(self) -> Estimate:
        """Token accuracy at the end of training: 0 for a run that never came to its longest length. Wilson's interval, a held-out
        word (not a position) being the independent unit."""
        if self.result.state != "succeeded":
            raise Undecided(f"its training is {self.result.state}")
        figures = self.result.figures
        accuracy = figures.get("token_accuracy")
        if figures.get("outcome") == "diverged" or accuracy is None or figures.get("length") != self.length:
            accuracy = 0.0
        return Estimate(accuracy, *wilson(accuracy, self.cell.train.evaluate_on))

    @property
    def learned(self) -> bool:
        """Whether training ended at LEARNED or above. Raises Undecided where it did not end."""
        return self.trained().value >= LEARNED

    def require_learned(self) -> None:
        """Raises Undecided for a run that did not learn its task: it has no speed of its own."""
        if not self.learned:
            raise Undecided(f"it did not learn its task ({self.trained().value:.3f} at length {self.length}, {LEARNED} counts)")

    @property
    def steps(self) -> int:
        return int(self.result.figures.get("steps", 0))

    def speed(self, estimator: str = "frontier", q: float = SPEED_LEVEL) -> Estimate:
        """v_hat in positions a loop."""
        return self._one("speed", f"no speed by {estimator}", self._estimator(estimator, q)).estimate

    def r2(self, estimator: str = "frontier", q: float = SPEED_LEVEL) -> float:
        """Share of the variance that the straight line of `speed` explains."""
        return self._one("speed_r2", f"no speed by {estimator}", self._estimator(estimator, q)).value

    def planned_loops(self, length: int) -> int:
        """T* = ceil(n / v_hat), the published rule, without a burn-in."""
        return max(1, math.ceil(length / self.speed().value - 1e-9))

    def frontier(self, q: float = SPEED_LEVEL) -> list[tuple[int, float]]:
        """(loop, positions solved) after every loop."""
        return sorted((row.axes["loop"], row.value) for row in self._rows("frontier", q=q))

    def tau(self, statistic: str = "p90") -> list[tuple[int, float]]:
        """(position, loops) of every position but the first: with BOS, positions 0 and 1 are both right after loop 1."""
        found = sorted((row.axes["position"], row.value) for row in self._rows("tau", statistic=statistic))
        if not found:
            raise Undecided(self._why("tau", "no convergence times"))
        return [(position, value) for position, value in found if position > 0]

    def accuracy(self, length: int, of: str = "token") -> dict[int, Estimate]:
        """Loop to accuracy on words of `length`, over all loops watched."""
        found = {
            row.axes["loop"]: row.estimate
            for row in self._rows("accuracy", of=of)
            if row.axes.get("length", self.length) == length
        }
        if not found:
            raise Undecided(self._why("accuracy", f"no accuracy on words of length {length}"))
        return found

    def accuracy_at(self, length: int, loops: int, of: str = "token", *, or_last: bool = False) -> Estimate:
        """Accuracy after `loops` loops; `or_last` takes the last loop watched where there are fewer (an untied model's last)."""
        found = self.accuracy(length, of)
        if or_last:
            loops = min(loops, max(found))
        if loops not in found:
            raise Undecided(f"words of length {length} were watched for {max(found)} loops, and {loops} are needed")
        return found[loops]

    def by_position(self, length: int) -> dict[tuple[float, float], float]:
        """(loop, position) to accuracy; empty where it was not kept."""
        return {
            (row.axes["loop"], row.axes["position"]): row.value
            for row in self._rows("accuracy", of="position")
            if row.axes.get("length", self.length) == length
        }

    def tail(self, metric: str) -> Estimate:
        """A tail metric at the last loop measured."""
        found = self._rows("tail", of=metric)
        if not found:
            raise Undecided(self._why("tail", f"no {metric}"))
        return max(found, key=lambda row: row.axes["loop"]).estimate

    def under_schedule(self, schedule: str, of: str = "token") -> Estimate:
        """Accuracy at T(N) loops with the input shown as `schedule` says: streaming, or all from the first loop."""
        found = {row.axes.get("loop", self.loops): row for row in self._rows("schedules", schedule=schedule, of=of)}
        if self.loops not in found:
            raise Undecided(self._why("schedules", f"no accuracy with the schedule {schedule} after {self.loops} loops"))
        return found[self.loops].estimate

    def calibration(self, of: str) -> list[float]:
        """A figure of `calibrated:eps` over its draws; `risk` and `margin` by draw."""
        found = sorted((row.axes.get("draw", 0), row.value) for row in self._rows("calibration", of=of))
        if not found:
            raise Undecided(self._why("calibration", "no calibrations"))
        return [value for _, value in found]

    def cone_ratio(self) -> Estimate:
        """Speed of the damage cone's edge over v by the mean of tau."""
        return self._one("cone_ratio", "no damage cone", {}).estimate

    def cone_points(self) -> list[tuple[int, int, float]]:
        """(damaged position, distance behind it, mean loops until the change) of the cone's edge."""
        return sorted((row.axes["patched"], row.axes["distance"], row.value) for row in self._rows("damage_onset"))

    def loss(self) -> float:
        """Held-out loss at the end of training, nats a position."""
        if self.result.state != "succeeded":
            raise Undecided(f"its training is {self.result.state}")
        found = self.result.figures.get("loss")
        if self.diverged:
            raise Undecided("it diverged")
        if found is None:
            raise Undecided("it has no held-out loss")
        return found

    @property
    def diverged(self) -> bool:
        """Whether a loss or a gradient was not finite."""
        return self.result.figures.get("outcome") == "diverged"

    def figure(self, instrument: str, **axes: Any) -> Estimate:
        """The one figure of an instrument with these axes."""
        return self._one(instrument, f"no {instrument}", axes).estimate

    def over_loops(self, instrument: str, **axes: Any) -> list[tuple[int, float]]:
        """(loops, figure) of an instrument that measures models of several loop counts."""
        found = sorted((row.axes["loops"], row.value) for row in self._rows(instrument, **axes))
        if not found:
            raise Undecided(self._why(instrument, f"no {instrument}"))
        return found

    def curve(self, name: str = "held_out_token_accuracy") -> Sequence[tuple[int, float]]:
        """(step, value) of a training curve; empty where it was not kept."""
        return self.result.curves.get(name, ())

    @functools.cached_property
    def _by_instrument(self) -> dict[str, list[Row]]:
        found: dict[str, list[Row]] = defaultdict(list)
        for row in self.result.rows:
            if math.isfinite(row.value):
                found[row.instrument].append(row)
        return found

    def _rows(self, instrument: str, **axes: Any) -> list[Row]:
        return [
            row
            for row in self._by_instrument.get(instrument, ())
            if all(row.axes.get(name) == value for name, value in axes.items())
        ]

    def _one(self, instrument: str, what: str, axes: dict[str, Any]) -> Row:
        found = self._rows(instrument, **axes)
        if not found:
            raise Undecided(self._why(instrument, what))
        return found[0]

    @staticmethod
    def _estimator(estimator: str, q: float) -> dict[str, Any]:
        return {"estimator": estimator} | ({"q": q} if estimator == "frontier" else {})

    def _why(self, instrument: str, what: str) -> str:
        if self.result.state != "succeeded":
            return f"its training is {self.result.state}"
        reasons = self.result.missing
        why = reasons.get(instrument) or "; ".join(f"{name}: {reason}" for name, reason in sorted(reasons.items()))
        return f"{what} ({why})" if why else f"{what} was measured"


@dataclass(frozen=True)
class Measured:
    """A study's cells with what has come of them; a cell without a result has not been started."""

    cells: tuple[Cell, ...]
    results: Mapping[str, CellResult]

    def runs(self, role: str, **axes: AxisValue | Callable[[Any], bool]) -> list[Run]:
        """Runs that a study reads, in the order of the cells; `axes` are values, or conditions on them."""

        def fits(cell: Cell) -> bool:
            return role in cell.roles and all(
                wanted(cell.axes.get(name)) if callable(wanted) else cell.axes.get(name) == wanted
                for name, wanted in axes.items()
            )

        return [Run(cell, self.results.get(cell.name, CellResult("not started"))) for cell in self.cells if fits(cell)]


@dataclass(frozen=True)
class Sample:
    """One figure over many runs, and the runs that have none."""

    used: tuple[tuple[Run, Estimate], ...]
    left_out: tuple[tuple[Run, str], ...]

    @property
    def runs(self) -> list[Run]:
        return [run for run, _ in self.used]

    @property
    def estimates(self) -> list[Estimate]:
        return [estimate for _, estimate in self.used]

    @property
    def values(self) -> list[float]:
        return [estimate.value for estimate in self.estimates]

    @property
    def seeds(self) -> int:
        return len({run.cell.seed for run in self.runs})

    @property
    def seconds(self) -> float:
        return sum(run.result.seconds for run in {run.cell.name: run for run in self._all()}.values())

    def absent(self) -> str:
        """A sentence on what was left out and why, to put behind a reason; empty where nothing was."""
        if not self.left_out:
            return ""
        why = Counter(reason for _, reason in self.left_out)
        shown = "; ".join(f"{count} x {reason}" if count > 1 else reason for reason, count in why.most_common(3))
        more = f"; {len(why) - 3} other reasons" if len(why) > 3 else ""
        names = ", ".join(run.cell.name for run, _ in self.left_out[:3])
        others = f" and {len(self.left_out) - 3} more" if len(self.left_out) > 3 else ""
        return f" Left out {len(self.left_out)} of {len(self._all())} runs ({names}{others}): {shown}{more}."

    def _all(self) -> list[Run]:
        return [*self.runs, *(run for run, _ in self.left_out)]


def sample(runs: Iterable[Run], read: Callable[[Run], Estimate]) -> Sample:
    """`read` of every run; where it raises Undecided the run is left out with that reason."""
    used, left_out = [], []
    for run in runs:
        try:
            used.append((run, read(run)))
        except Undecided as reason:
            left_out.append((run, str(reason)))
    return Sample(tuple(used), tuple(left_out))
