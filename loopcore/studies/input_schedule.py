"""4b: is seriality mandatable by the input schedule? (arXiv 2607.20594)

The masking is exact: the embedding of input i (from 1) is zero before loop i, so that T = n loops show all of a word. The claim
does not say how the result is looked at, so both ways are: with the schedule the model was trained on, and with all inputs
visible from the first loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, difference, judge, mean_of

__all__ = ["INPUT_SCHEDULE"]

NAME = "input-schedule"
FAILS = 0.05  # token accuracy below free training: 5 % is the margin that every study here allows [?]

MANDATED = Claim(
    id="4b",
    title="Not mandatable",
    statement="Imposing seriality through the input schedule fails where free training succeeds.",
    published="fails [A]; learned fast under its own schedule in our prototype [M]",
    unit="token accuracy at N: free training less streaming training, each under its own schedule",
    rule=f"the 95 % interval of the difference lies above {FAILS}",
)


def work(ask: Ask) -> Iterator[Cell]:
    for group in ask.groups_or(("S3",), ("S3",), ("S3", "A4")):
        for seed in ask.seed_range():
            yield recipes.free(ask, NAME, group, seed)
            yield recipes.streaming(ask, NAME, group, seed, (recipes.SPEED, recipes.SCHEDULES))


def summary(measured: Measured) -> list[Finding]:
    streamed = measured.runs(NAME, family="streaming")
    free = sample(measured.runs(NAME, family="free"), lambda run: run.trained())
    own = sample(streamed, lambda run: run.trained())
    return [_mandated(free, own, sample(streamed, lambda run: run.under_schedule("all")))]


def _mandated(free: Sample, own: Sample, visible: Sample) -> Finding:
    seconds = free.seconds + own.seconds
    if not free.used or not own.used:
        reason = f"Both kinds of training are needed.{free.absent()}{own.absent()}"
        return MANDATED.finding(Verdict.UNDECIDED, reason, seconds=seconds)
    of_free, of_own = mean_of(free.estimates), mean_of(own.estimates)
    behind = difference(of_free, of_own)
    beside: Estimate | str = mean_of(visible.estimates) if visible.used else "not measured"
    series = [
        _points("free training", free),
        _points("streaming, own schedule", own),
        _points("streaming, all inputs visible", visible),
    ]
    plot = XY("Token accuracy by seed", "seed", "token accuracy at N", [one for one in series if one.x])
    return MANDATED.finding(
        judge(behind, low=FAILS),
        f"Free training comes to {of_free}, streaming training to {of_own} under its own schedule (input i at loop i, zeros "
        f"before) and to {beside} with all inputs visible.{free.absent()}{own.absent()}{visible.absent()}",
        estimate=behind,
        seeds=min(free.seeds, own.seeds),
        seconds=seconds,
        detail={
            "rows": [_row(run, estimate, visible) for found in (free, own) for run, estimate in found.used],
            "all_visible": None if isinstance(beside, str) else vars(beside),
            "plots": [plot],
        },
    )


def _points(name: str, found: Sample) -> Series:
    return Series(
        name,
        [run.cell.seed for run in found.runs],
        found.values,
        [estimate.low for estimate in found.estimates],
        [estimate.high for estimate in found.estimates],
        style="points",
    )


def _row(run: Run, own: Estimate, visible: Sample) -> dict[str, Any]:
    all_visible = next((estimate.value for other, estimate in visible.used if other.cell.name == run.cell.name), None)
    return {"cell": run.cell.name, "family": run.axes["family"], "steps": run.steps, "own": own.value, "all_visible": all_visible}


INPUT_SCHEDULE = Study(NAME, "Seriality imposed by the input schedule", (MANDATED,), work, summary)
