"""Made-up measurements of studies: whatever a test wants a cell to have come to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from loopcore.specs import TrainSpec
from loopcore.specs.probe import SPEED_LEVEL
from loopcore.studies import Cell, CellResult, Finding, Measured, Row, Study

SECONDS = 10.0  # of every cell that ran


def train_figures(train: TrainSpec, accuracy: float, steps: int = 1000, **figures: Any) -> dict[str, Any]:
    length = train.contract.longest
    return {
        "outcome": "solved" if accuracy >= 0.98 else "unsolved",
        "steps": steps,
        "length": length,
        "loops": train.contract.loops.loops(length),
        "token_accuracy": accuracy,
    } | figures


def speed_rows(v: float, reach: float = 0.01, r2: float = 0.99, **others: float) -> list[Row]:
    """v by the frontier at three levels and by tau; `others` replace single estimators (tau_p90=1.2)."""
    rows = []
    for estimator in ("frontier", "tau_p90", "tau_mean"):
        value = others.get(estimator, v)
        for axes in [{"q": q} for q in (0.8, 0.9, 0.95)] if estimator == "frontier" else [{}]:
            place = {"estimator": estimator, **axes}
            rows.append(Row("speed", place, value, value - reach, value + reach))
            rows.append(Row("speed_r2", place, others.get(f"r2_{estimator}", r2)))
    return rows


def tau_rows(cell: Cell, tau: Callable[[int], float]) -> list[Row]:
    """tau of the prefix of n positions, by position from 0."""
    return [Row("tau", {"statistic": "p90", "position": i}, tau(i + 1)) for i in range(cell.train.contract.longest)]


def accuracy_rows(
    length: int,
    loops: int,
    accuracy: Callable[[int], float],
    reach: float = 0.005,
    kinds: tuple[str, ...] = ("token", "last", "exact"),
) -> list[Row]:
    """Accuracy after 1 .. loops loops, the same for every kind."""
    return [
        Row(
            "accuracy",
            {"of": of, "loop": t, "length": length},
            accuracy(t),
            max(0.0, accuracy(t) - reach),
            min(1.0, accuracy(t) + reach),
        )
        for of in kinds
        for t in range(1, loops + 1)
    ]


def position_rows(length: int, loops: int, v: float) -> list[Row]:
    """A sharp frontier of v positions a loop."""
    heat = [
        Row("accuracy", {"of": "position", "loop": t, "position": i}, float(i < v * t))
        for t in range(1, loops + 1)
        for i in range(length)
    ]
    return heat + [Row("frontier", {"q": SPEED_LEVEL, "loop": t}, min(length, v * t)) for t in range(1, loops + 1)]


def tail_rows(**metrics: float) -> list[Row]:
    """The four metrics at loop 12, above a worse value at loop 1 that must not be read."""
    return [
        Row(
            "tail",
            {"of": name, "loop": loop},
            value if loop == 12 else 0.0,
            *((value - 0.001, value + 0.001) if loop == 12 else ()),
        )
        for name, value in metrics.items()
        for loop in (1, 12)
    ]


def result(cell: Cell, accuracy: float = 1.0, rows: list[Row] | None = None, **figures: Any) -> CellResult:
    return CellResult("succeeded", SECONDS, train_figures(cell.train, accuracy, **figures), rows=tuple(rows or ()))


def findings(study: Study, cells: tuple[Cell, ...], come_to: Callable[[Cell], CellResult | None]) -> dict[str, Finding]:
    """The findings by id; a cell that comes to None has not been started."""
    results = {cell.name: one for cell in cells if (one := come_to(cell)) is not None}
    return {finding.id: finding for finding in study.summarize(Measured(cells, results))}
