"""D3, D4: kappa_R against the visits R, as initialised and over training, and the bound that it implies (arXiv 2607.13491).

An exponent is the slope of log figure against log R of one seed; its interval is over seeds.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

from loopcore.errors import Undecided
from loopcore.studies.base import Claim, Finding
from loopcore.studies.deeploop_cells import NAME, RULES
from loopcore.studies.deeploop_shared import NEAR, absent, mean_series, seconds_of, slope
from loopcore.studies.drawings import XY
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, all_of, judge, mean_of

__all__ = ["ALIGNED", "BOUND", "kappa_findings"]

FORMS = ("max_normalised", "norm_weighted")
START = 0  # steps of a run as initialised

ALIGNED = Claim(
    id="D3",
    title="kappa_R at initialisation",
    statement="The visits of a tied block pull in one direction: kappa_R grows as R^g with g = 1 under DeepLoop, which asks for "
    "p = (1 + g) / 4 = 1/2.",
    published="1 where visits decorrelate, R where they align [N]; not measured in the paper; g = 1.00 [M]",
    unit="g under DeepLoop, norm-weighted",
    rule=f"the 95 % interval of g under DeepLoop lies within {NEAR} of 1 in the max-normalised and in the norm-weighted form [?]",
)
BOUND = Claim(
    id="D4",
    title="The bound M kappa_R (b/a)^2",
    statement="Under DeepLoop M kappa_R (b/a)^2 does not grow with R, at initialisation and over training; under DeepNorm it "
    "does.",
    published="O(1) is what stability asks for [N]; after 100 steps g falls from .97 to .64 (DeepNorm), 1.00 to .72 (DeepLoop) "
    "[M]",
    unit="growth exponent of the bound in R under DeepLoop, norm-weighted, the largest over training",
    rule=f"in both forms the 95 % interval of the bound's exponent lies below {NEAR} under DeepLoop at initialisation and after "
    f"every number of steps, and above {NEAR} under DeepNorm at initialisation",
)


def kappa_findings(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME, family="loops")
    lowest = min((float(run.axes["rate"]) for run in runs), default=0.0)  # where every rule trains
    runs = [run for run in runs if run.axes["rate"] == lowest]
    return [_aligned(runs, measured.runs(NAME, family="blocks")), _bound(runs)]


def _steps_seen(runs: list[Run]) -> list[int]:
    return [START, *sorted({int(run.axes["steps"]) for run in runs})]


def _kappas(runs: Iterable[Run], rule: str, steps: int, of: str) -> Sample:
    """A figure of kappa_R as initialised (steps 0), or at the end of the runs of that many steps.

    How a run starts does not depend on how long it is trained: of those with one seed and loop count the first is taken.
    """
    chosen: dict[tuple[Any, ...], Run] = {}
    for run in runs:
        if run.axes["rule"] == rule and (steps == START or run.axes["steps"] == steps):
            chosen.setdefault((run.axes["loops"], run.axes["blocks"], run.cell.seed), run)

    def read(run: Run) -> Estimate:
        if steps != START and run.diverged:
            raise Undecided("it diverged")
        return run.figure("kappa", of=of, at="start" if steps == START else "end")

    return sample(chosen.values(), read)


def _exponent(found: Sample) -> Estimate | None:
    """Growth in R: the mean over seeds of each seed's slope; None where no seed has every R."""
    every = {int(run.axes["loops"]) for run in found.runs}
    by_seed: dict[int, list[tuple[int, float]]] = defaultdict(list)
    for run, estimate in found.used:
        by_seed[run.cell.seed].append((int(run.axes["loops"]), estimate.value))
    slopes = []
    for points in by_seed.values():
        if len(points) < len(every):
            continue
        try:
            slopes.append(slope(points))
        except Undecided:
            continue
    return mean_of(slopes) if slopes else None


Growth = dict[tuple[str, int, str], Estimate | None]
"""Rule, steps and form to an exponent in R."""


def _told(growth: Growth, rule: str, steps: int, form: str) -> str:
    return str(growth[rule, steps, form] or "not measured")


def _exponents(runs: list[Run], steps: list[int], of: str) -> Iterator[tuple[str, int, str, Sample, Estimate | None]]:
    """(rule, step, form, the measured kappas, their exponent in R) for every rule, step and form; `of`: `largest` or `bound`."""
    for rule, step, form in itertools.product(RULES, steps, FORMS):
        found = _kappas(runs, rule, step, f"{form}_{of}")
        yield rule, step, form, found, _exponent(found)


def _aligned(runs: list[Run], of_blocks: list[Run]) -> Finding:
    steps = _steps_seen(runs)
    growth: Growth = {}
    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for rule, step, form, found, exponent in _exponents(runs, steps, "largest"):
        samples.append(found)
        growth[rule, step, form] = exponent
        rows.append(
            {"rule": rule, "steps": step, "form": form, "exponent": exponent and exponent.value}
            | {"low": exponent and exponent.low, "high": exponent and exponent.high}
            | {"implied_p": exponent and (1 + exponent.value) / 4, "seeds": found.seeds}
        )
    mine = {form: growth["deeploop", START, form] for form in FORMS}
    spoken = [f"{rule} {_told(growth, rule, START, FORMS[0])} and {_told(growth, rule, START, FORMS[1])}" for rule in RULES]
    last = steps[-1]
    after = [f"{rule} {_told(growth, rule, last, FORMS[1])}" for rule in RULES]
    return ALIGNED.finding(
        all_of([judge(mine[form], 1 - NEAR, 1 + NEAR) for form in FORMS]),
        f"Growth exponent g of kappa_R at initialisation, max-normalised and norm-weighted: {'; '.join(spoken)}. After {last} "
        f"steps, norm-weighted: {'; '.join(after)}.{absent(samples)}",
        estimate=mine["norm_weighted"],
        seeds=min((found.seeds for found in samples if found.used), default=0),
        seconds=seconds_of(samples),
        detail={
            "growth": rows,
            "blocks": _by_block([*runs, *of_blocks]),
            "plots": [
                *_kappa_plots(runs, START),
                *_kappa_plots(runs, last),
                *_training_plots(runs, steps),
            ],
        },
    )


def _by_block(runs: list[Run]) -> list[dict[str, Any]]:
    """kappa_R of each physical block, all its matrices as one, means over seeds: as initialised and as trained."""
    kinds = {(str(run.axes["rule"]), int(run.axes["blocks"]), int(run.axes["loops"]), int(run.axes["steps"])) for run in runs}
    rows = []
    for rule, blocks, loops, steps in sorted(kinds, key=lambda kind: (RULES.index(kind[0]), *kind[1:])):  # type: ignore[arg-type]
        own = [
            run
            for run in runs
            if (run.axes["rule"], run.axes["blocks"], run.axes["loops"], run.axes["steps"]) == (rule, blocks, loops, steps)
        ]
        for block in range(blocks):
            row: dict[str, Any] = {"rule": rule, "blocks": blocks, "loops": loops, "steps": steps, "block": block}
            for at in ("start", "end"):
                for form in FORMS:
                    found = sample(own, lambda run, f=form, b=block, a=at: run.figure("kappa", of=f, block=b, matrix="all", at=a))
                    row[f"{form}_{at}"] = mean_of(found.estimates).value if found.used else None
            if any(row[f"{form}_start"] is not None for form in FORMS):
                rows.append(row)
    return rows


def _kappa_plots(runs: list[Run], steps: int) -> list[XY]:
    plots = []
    for form in FORMS:
        series = []
        for rule in RULES:
            by_loops: dict[int, list[float]] = defaultdict(list)
            for run, estimate in _kappas(runs, rule, steps, f"{form}_largest").used:
                by_loops[int(run.axes["loops"])].append(estimate.value)
            if by_loops:
                series.append(mean_series(rule, by_loops))
        if series:
            when = "at initialisation" if steps == START else f"after {steps} steps"
            plots.append(XY(f"kappa_R {when}, {form.replace('_', '-')}", "visits R", "kappa_R", series, log=True))
    return plots


def _training_plots(runs: list[Run], steps: list[int]) -> list[XY]:
    """kappa_R of the most loops against the steps that it was trained for."""
    most = max((int(run.axes["loops"]) for run in runs), default=0)
    series = []
    for rule in RULES:
        by_step = {
            step: [one.value for run, one in _kappas(runs, rule, step, "norm_weighted_largest").used if run.axes["loops"] == most]
            for step in steps
        }
        if known := {step: values for step, values in by_step.items() if values}:
            series.append(mean_series(rule, known))
    if not series:
        return []
    return [XY(f"kappa_R over training, R = {most}, norm-weighted", "steps of the run", "kappa_R", series)]


def _bound(runs: list[Run]) -> Finding:
    steps = _steps_seen(runs)
    growth: Growth = {}
    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for rule, step, form, found, exponent in _exponents(runs, steps, "bound"):
        samples.append(found)
        growth[rule, step, form] = exponent
        most = max((int(run.axes["loops"]) for run in found.runs), default=0)
        at_most = [Estimate(one.value) for run, one in found.used if run.axes["loops"] == most]
        rows.append(
            {"rule": rule, "steps": step, "form": form, "exponent": exponent and exponent.value}
            | {"low": exponent and exponent.low, "high": exponent and exponent.high}
            | {"loops": most, "bound": mean_of(at_most).value if at_most else None}
        )
    mine = {key: one for key, one in growth.items() if key[0] == "deeploop"}
    parts = [judge(one, high=NEAR) for one in mine.values()]
    parts += [judge(growth["deepnorm", START, form], low=NEAR) for form in FORMS]
    spoken = [
        f"{rule} " + ", ".join(f"{_told(growth, rule, step, FORMS[1])} after {step} steps" for step in steps)
        for rule in ("deepnorm", "deeploop")
    ]
    weighted = [one for key, one in mine.items() if key[2] == "norm_weighted" and one is not None]
    return BOUND.finding(
        all_of(parts),
        f"Growth exponent in R of M kappa_R (b/a)^2, norm-weighted: {'; '.join(spoken)}.{absent(samples)}",
        estimate=max(weighted, key=lambda one: one.value, default=None),
        seeds=min((found.seeds for found in samples if found.used), default=0),
        seconds=seconds_of(samples),
        detail={"growth": rows},
    )
