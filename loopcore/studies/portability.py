"""4a: a warm start across contracts transfers the algorithm and re-prices its speed (arXiv 2607.20594)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import LEARNED, Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge, mean_of

__all__ = ["PORTABILITY"]

NAME = "portability"
DEMANDS = (0.5, 2.0)  # from a demand-1 checkpoint, as published
REPRICED = 0.5  # nearer to the new contract's price than to the old one's, on a log scale

PORTABLE = Claim(
    id="4a",
    title="Portable",
    statement="A warm start across contracts transfers the algorithm in every seed and re-prices its speed.",
    published="every seed [A]; no figure of the speed at hand",
    unit="share of the way, in log v, from the old contract's price to the new one's",
    rule=f"every warm start learns the new contract (token accuracy {LEARNED}), and the 95 % interval of the mean share lies "
    f"above {REPRICED}; one that does not learn in as many steps as its parent took from scratch is not transferred",
)


def work(ask: Ask) -> Iterator[Cell]:
    for group in ask.groups_or(("S3",), ("S3", "A4"), ("S3", "A4", "A5")):
        for seed in ask.seed_range():
            parent = recipes.free(ask, NAME, group, seed)
            yield parent
            for demand in DEMANDS:
                yield recipes.warm(ask, NAME, parent, demand, (recipes.SPEED,))


def summary(measured: Measured) -> list[Finding]:
    parents = {run.cell.name: run for run in measured.runs(NAME, family="free")}
    warm = measured.runs(NAME, family="warm")

    def share(run: Run) -> Estimate:
        return _share(run, parents[str(run.axes["parent"])])

    return [_portable(sample(warm, share), sample(warm, lambda run: run.trained()), parents)]


def _share(run: Run, parent: Run) -> Estimate:
    run.require_learned()
    parent.require_learned()
    moved = math.log(run.demand / parent.demand)
    old, new = parent.speed(), run.speed()
    value = math.log(new.value / old.value) / moved
    if None in (old.low, old.high, new.low, new.high):
        return Estimate(value)
    assert old.low is not None
    assert old.high is not None
    assert new.low is not None
    assert new.high is not None
    # The two runs are measured apart: their reaches in log v add in squares.
    below = math.hypot(math.log(new.value / new.low), math.log(old.high / old.value)) / abs(moved)
    above = math.hypot(math.log(new.high / new.value), math.log(old.value / old.low)) / abs(moved)
    return Estimate(value, value - below, value + above) if moved > 0 else Estimate(value, value - above, value + below)


def _transfers(run: Run, parents: dict[str, Run]) -> Verdict:
    """Whether the warm start learned; a failure counts once it had as long as its parent took from scratch."""
    if run.learned:
        return Verdict.SHOWN
    return Verdict.NOT_SHOWN if run.steps >= parents[str(run.axes["parent"])].steps else Verdict.UNDECIDED


def _portable(shares: Sample, ended: Sample, parents: dict[str, Run]) -> Finding:
    seconds = ended.seconds
    if not ended.used:
        return PORTABLE.finding(Verdict.UNDECIDED, f"No warm start to judge by.{ended.absent()}", seconds=seconds)
    # A parent that never learned has nothing to transfer.
    tried = [run for run in ended.runs if _learned(parents[str(run.axes["parent"])])]
    transfers = {run.cell.name: _transfers(run, parents) for run in tried}
    share = mean_of(shares.estimates) if shares.used else None
    learned = sum(verdict is Verdict.SHOWN for verdict in transfers.values())
    spoken = []
    for group, demand in sorted({(str(run.axes["group"]), run.demand) for run in tried}):
        of_kind = [run for run in tried if (run.axes["group"], run.demand) == (group, demand)]
        speeds = [run.speed().value for run in shares.runs if run in of_kind]
        v = f"v {sum(speeds) / len(speeds):.2f}" if speeds else "no speed"
        spoken.append(f"{group} to demand {demand:g}: {sum(map(_learned, of_kind))} of {len(of_kind)}, {v}")
    rows = [
        {"cell": run.cell.name, "demand": run.demand, "accuracy": run.trained().value, "steps": run.steps}
        | {"parent": str(run.axes["parent"]), "parent_steps": parents[str(run.axes["parent"])].steps}
        | {"parent_v": _v(parents[str(run.axes["parent"])]), "v": _v(run)}
        for run in ended.runs
    ]
    left = shares.absent() if len(shares.left_out) > len(tried) - learned else ended.absent()
    return PORTABLE.finding(
        all_of([*transfers.values(), judge(share, low=REPRICED)]),
        f"{learned} of {len(tried)} warm starts learn the new contract ({'; '.join(spoken)}); speed goes "
        f"{share or 'an unknown share'} of the way to the new price.{left}",
        estimate=share,
        seeds=len({run.cell.seed for run in tried}),
        seconds=seconds,
        detail={"rows": rows, "plots": [_plot(shares, parents)]},
    )


def _learned(run: Run) -> bool:
    try:
        return run.learned
    except Undecided:
        return False


def _v(run: Run) -> float | None:
    try:
        return run.speed().value
    except Undecided:
        return None


def _plot(shares: Sample, parents: dict[str, Run]) -> XY:
    """Speed before and after, a line a warm start."""
    series: list[Any] = []
    for run in shares.runs:
        parent = parents[str(run.axes["parent"])]
        x, y = [parent.demand, run.demand], [parent.speed().value, run.speed().value]
        series.append(Series(run.cell.name, x, y))
    demands = sorted({demand for one in series for demand in one.x})
    if demands:
        series.append(Series("v = demand", demands, demands))
    marks = [Mark("x", 1.0, "the parents' contract")]
    return XY("Speed of warm starts", "demand n / T", "v, positions a loop", series, marks, log=True)


PORTABILITY = Study(NAME, "A warm start under another contract", (PORTABLE,), work, summary)
