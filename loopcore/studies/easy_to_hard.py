"""6: the account replicates on easy-to-hard prefix sums (arXiv 2607.20594 on the benchmark of 2202.05826)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, any_of, judge, mean_of

__all__ = ["EASY_TO_HARD"]

NAME = "easy-to-hard"
SOLVES = 0.9  # exact match on the hard length: nine words of ten right at every position [?]
ARCHITECTURES = {"transformer": "looped transformer", "recall_conv": "recall convnet"}

REPLICATES = Claim(
    id="6",
    title="Easy to hard",
    statement="The account replicates on easy-to-hard: trained on short prefix sums, T* = ceil(n / v_hat) loops solve long ones.",
    published="prefix sums, 32 to 512 bits [N]",
    unit="exact match on the hard length after T*: the better architecture",
    rule=f"the 95 % interval of one architecture's mean lies above {SOLVES}",
)


def work(ask: Ask) -> Iterator[Cell]:
    yield from recipes.easy_to_hard(ask, NAME)


def summary(measured: Measured) -> list[Finding]:
    found = {name: sample(measured.runs(NAME, architecture=name), _hard) for name in ARCHITECTURES}
    return [_replicates(found)]


def _hard(run: Run) -> Estimate:
    run.require_learned()
    length = int(run.axes["hard"])
    return run.accuracy_at(length, run.planned_loops(length), "exact")


def _replicates(found: dict[str, Sample]) -> Finding:
    means = {name: mean_of(one.estimates) for name, one in found.items() if one.used}
    seconds = sum(one.seconds for one in found.values())
    absent = "".join(one.absent() for one in found.values())
    rows = [_row(run) for one in found.values() for run in [*one.runs, *(run for run, _ in one.left_out)]]
    if not means:
        return REPLICATES.finding(Verdict.UNDECIDED, f"No run to judge by.{absent}", seconds=seconds, detail={"rows": rows})
    best = max(means, key=lambda name: means[name].value)
    spoken = []
    for name, mean in means.items():
        run = found[name].runs[0]
        speeds = [one.speed().value for one in found[name].runs]
        spoken.append(
            f"{ARCHITECTURES[name]} {run.length} to {run.axes['hard']} bits: {mean} exact after T* "
            f"(v {sum(speeds) / len(speeds):.2f}), {_at_trained(found[name])} after T_train"
        )
    return REPLICATES.finding(
        any_of([judge(means.get(name), low=SOLVES) for name in found]),
        f"{'; '.join(spoken)}.{absent}",
        estimate=means[best],
        seeds=found[best].seeds,
        seconds=seconds,
        detail={
            "rows": rows,
            "architectures": {name: vars(mean) for name, mean in means.items()},
            "plots": _plots([run for one in found.values() for run in one.runs]),
        },
    )


def _at_trained(found: Sample) -> str:
    before = sample(found.runs, lambda run: run.accuracy_at(int(run.axes["hard"]), run.loops, "exact"))
    return f"{sum(before.values) / len(before.values):.2f}" if before.used else "not measured"


def _row(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {"cell": run.cell.name, "architecture": run.axes["architecture"], "steps": run.steps}
    length = int(run.axes["hard"])
    readers: dict[str, Any] = {
        "trained": lambda: run.trained().value,
        "v": lambda: run.speed().value,
        "T_star": lambda: run.planned_loops(length),
        "exact": lambda: run.accuracy_at(length, run.planned_loops(length), "exact").value,
        "token": lambda: run.accuracy_at(length, run.planned_loops(length)).value,
    }
    for name, read in readers.items():
        try:
            row[name] = read()
        except Undecided:
            row[name] = None
    return row


def _plots(runs: list[Run]) -> list[XY]:
    """Accuracy on the hard length against loops, of the first seed of each architecture."""
    plots: list[XY] = []
    for architecture, name in ARCHITECTURES.items():
        run = next((run for run in runs if run.axes["architecture"] == architecture), None)
        if run is None:
            continue
        length = int(run.axes["hard"])
        series = []
        for of in ("token", "exact"):
            curve = sorted(run.accuracy(length, of).items())
            series.append(Series(of, [loop for loop, _ in curve], [estimate.value for _, estimate in curve]))
        marks = [Mark("x", run.loops, "T_train"), Mark("x", run.planned_loops(length), "T*")]
        plots.append(XY(f"{name}: {run.length} to {length} bits", "test loops", "accuracy", series, marks))
    return plots


EASY_TO_HARD = Study(NAME, "Prefix sums, easy to hard", (REPLICATES,), work, summary, takes_groups=False)
