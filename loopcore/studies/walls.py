"""3a, 3b, 3c: A5 generalizes, S5's operator deadlocks joint learning, and learning the operator first dissolves that wall
(arXiv 2607.20594).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge, mean_of, span

__all__ = ["WALLS"]

NAME = "walls"

FULLY = 0.95  # token accuracy on held-out words: 5 % is the margin that every study here allows [?]
STUCK = 0.1  # of the way from chance to 1: a run that has learned more than this is not at a wall [?]

GENERALIZES = Claim(
    id="3a",
    title="A5 generalizes",
    statement="A5, whose word problem is NC1-complete, generalizes fully.",
    published="stated without a figure at hand [A]; not reproduced by [R]",
    unit="token accuracy on held-out words of length N",
    rule=f"the 95 % interval of the mean lies above {FULLY}",
)
DEADLOCK = Claim(
    id="3b",
    title="The S5 wall",
    statement="S5's 120 x 120 operator deadlocks joint learning.",
    published="stated without a figure at hand [A]",
    unit="share of the way from chance to 1, trained at the full length",
    rule=f"in every seed the 95 % interval lies below {STUCK}",
)
CURRICULUM = Claim(
    id="3c",
    title="Operator first",
    statement="An operator-first curriculum dissolves the wall in every seed (all pairs at n = 2 until exact, then longer [?]).",
    published="every seed [A]",
    unit="token accuracy on held-out words of length N",
    rule=f"in every seed the 95 % interval lies above {FULLY}",
)


def work(ask: Ask) -> Iterator[Cell]:
    probes = (recipes.SPEED, recipes.FAR)
    for seed in ask.seed_range():
        yield recipes.free(ask, NAME, "A5", seed, probes=probes)
    for seed in ask.seed_range():
        yield recipes.operator_first(ask, NAME, "S5", seed, curriculum=False, probes=(recipes.FAR,))
        yield recipes.operator_first(ask, NAME, "S5", seed, curriculum=True, probes=probes)


def summary(measured: Measured) -> list[Finding]:
    direct = sample(measured.runs(NAME, family="direct"), _way)
    first = sample(measured.runs(NAME, family="operator-first"), _accuracy)
    return [
        _generalizes(sample(measured.runs(NAME, family="free"), _accuracy)),
        _deadlock(direct, first),
        _dissolves(direct, first),
    ]


def _accuracy(run: Run) -> Estimate:
    """At N after T_train loops: the probe's, whose interval takes a word as the unit; the trainer's where it has none."""
    trained = run.trained()
    try:
        return run.accuracy_at(run.length, run.loops)
    except Undecided:
        return trained


def _way(run: Run) -> Estimate:
    chance = recipes.chance(str(run.axes["group"]), run.length)
    found = _accuracy(run)
    value, low, high = (None if end is None else (end - chance) / (1 - chance) for end in (found.value, found.low, found.high))
    assert value is not None
    return Estimate(value, low, high)


def _generalizes(found: Sample) -> Finding:
    if not found.used:
        return GENERALIZES.finding(Verdict.UNDECIDED, f"No run to judge by.{found.absent()}", seconds=found.seconds)
    accuracy = mean_of(found.estimates)
    verdict = judge(accuracy, low=FULLY)
    short = ""
    if any(run.axes["scale"] == "smoke" for run in found.runs) and verdict is Verdict.NOT_SHOWN:
        verdict, short = Verdict.UNDECIDED, " The smoke budget is too short to tell slow from failed."
    beyond = _beyond(found.runs)
    return GENERALIZES.finding(
        verdict,
        f"A5 comes to {accuracy} at n = {found.runs[0].length} over {len(found.used)} runs; {beyond}.{short}{found.absent()}",
        estimate=accuracy,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={"rows": _rows(found), "plots": [_learning("A5", {"A5": found.runs}, recipes.chance("A5", found.runs[0].length))]},
    )


def _beyond(runs: list[Run]) -> str:
    """Accuracy past the trained length, in words."""
    spoken = []
    for times, index in ((1.25, 1), (1.5, 2), (2, 3)):
        read = sample(runs, lambda run, index=index: _at_planned(run, recipes.far_lengths(run.length)[index]))
        if read.used:
            spoken.append(f"{sum(read.values) / len(read.values):.2f} at {times:g} N")
    return ("after T* " + ", ".join(spoken)) if spoken else "longer words were not measured"


def _at_planned(run: Run, length: int) -> Estimate:
    return run.accuracy_at(length, run.planned_loops(length))


def _short(run: Run) -> bool:
    """Whether the run's budget is too short to tell slow from stuck."""
    return not run.axes.get("full", True)


def _deadlock(direct: Sample, first: Sample) -> Finding:
    if not direct.used:
        return DEADLOCK.finding(Verdict.UNDECIDED, f"No run to judge by.{direct.absent()}", seconds=direct.seconds)
    every = span(direct.estimates)
    verdict = all_of(judge(way, high=STUCK) for way in direct.estimates)
    short = ""
    if verdict is Verdict.SHOWN and any(map(_short, direct.runs)):
        verdict, short = Verdict.UNDECIDED, " The smoke budget is too short to tell slow from stuck."
    elif verdict is Verdict.SHOWN and _outrun(direct, first):
        short = " The curriculum took more steps than these runs had."
    steps = max(run.steps for run in direct.runs)
    stuck = sum(way.value < STUCK for way in direct.estimates)
    group, length = str(direct.runs[0].axes["group"]), direct.runs[0].length
    return DEADLOCK.finding(
        verdict,
        f"{stuck} of {len(direct.used)} runs at n = {length} are stuck after {steps} steps: {every} of the way from chance "
        f"({recipes.chance(group, length):.3f}) to 1.{short}{direct.absent()}",
        estimate=every,
        seeds=direct.seeds,
        seconds=direct.seconds,
        detail={"rows": _rows(direct), "plots": [_both(direct, first)]},
    )


def _outrun(direct: Sample, first: Sample) -> bool:
    solved = [run.steps for run in first.runs if run.learned]
    return bool(solved) and max(run.steps for run in direct.runs) < min(solved)


def _dissolves(direct: Sample, first: Sample) -> Finding:
    if not first.used:
        return CURRICULUM.finding(Verdict.UNDECIDED, f"No run to judge by.{first.absent()}", seconds=first.seconds)
    every = span(first.estimates)
    verdict = all_of(judge(accuracy, low=FULLY) for accuracy in first.estimates)
    short = ""
    if verdict is Verdict.NOT_SHOWN and any(map(_short, first.runs)):
        verdict, short = Verdict.UNDECIDED, " The smoke budget is shorter than the curriculum takes."
    solved = sum(accuracy.value >= FULLY for accuracy in first.estimates)
    return CURRICULUM.finding(
        verdict,
        f"{solved} of {len(first.used)} runs are solved at n = {first.runs[0].length}: {every} after at most "
        f"{max(run.steps for run in first.runs)} steps.{short}{first.absent()}",
        estimate=every,
        seeds=first.seeds,
        seconds=first.seconds,
        detail={"rows": _rows(first), "plots": [_both(direct, first)]},
    )


def _both(direct: Sample, first: Sample) -> XY:
    runs = [*direct.runs, *first.runs]
    chance = recipes.chance(str(runs[0].axes["group"]), runs[0].length)
    return _learning("S5 with and without the curriculum", {"direct": direct.runs, "operator first": first.runs}, chance)


def _learning(title: str, kinds: dict[str, list[Run]], chance: float) -> XY:
    """Learning curves, one a seed: held-out token accuracy at the stage's own length."""
    series = [
        Series(f"{kind}, seed {run.cell.seed}", [step for step, _ in run.curve()], [value for _, value in run.curve()])
        for kind, runs in kinds.items()
        for run in runs
        if run.curve()
    ]
    note = "Accuracy at the length of each stage: it falls where a stage ends."
    return XY(title, "optimizer step", "held-out token accuracy", series, [Mark("y", chance, "chance at N")], note=note)


def _rows(found: Sample) -> list[dict[str, Any]]:
    return [
        {"cell": run.cell.name, "seed": run.cell.seed, "accuracy": _accuracy(run).value, "steps": run.steps}
        | {"value": estimate.value, "low": estimate.low, "high": estimate.high, "seconds": run.result.seconds}
        for run, estimate in found.used
    ]


WALLS = Study(
    NAME, "A5, the S5 wall and what dissolves it", (GENERALIZES, DEADLOCK, CURRICULUM), work, summary, takes_groups=False
)
