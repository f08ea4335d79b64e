"""D1, D2: how one update moves the logits, against loops, tied and untied (arXiv 2607.13491).

The sharpest test of a residual rule at small size: a = (2M)^p on the skip, b = (8M)^-p on the initial weights, M executed depth.
"""

from __future__ import annotations

from typing import Any

from loopcore.studies.base import Claim, Finding
from loopcore.studies.deeploop_cells import EXPONENTS, NAME
from loopcore.studies.deeploop_shared import NEAR, absent, by_loops, less, line, mean_series, seconds_of, slope
from loopcore.studies.drawings import XY
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge, mean_of

__all__ = ["CONTROLS", "ONE_STEP", "one_step_findings"]

ONE_STEP = Claim(
    id="D1",
    title="One step, tied weights",
    statement="After one SGD step the logits of a tied model change as R^(2 - 4p) in its loops R, for a = (2M)^p, b = (8M)^-p.",
    published="2 - 4p from M kappa_R (b/a)^2 with aligned visits [N]; p = .25 .90, .35 .49, .5 -.08, .6 -.46 [M]",
    unit="exponent in R, less 2 - 4p: the farthest of the four p",
    rule=f"for each of four p the 95 % interval of the exponent's mean over seeds lies within {NEAR} of 2 - 4p",
)
CONTROLS = Claim(
    id="D2",
    title="One step, weights of their own and Adam's step",
    statement="With weights of its own for every loop the exponent is 1 - 4p, and of a sign step (Adam's first) 1 - 2p, tied or "
    "not [?].",
    published="0 and -1 untied for p = 1/4 and 1/2 [N], measured -.15 and -1.13 [M]; sign step .45 and -.03 tied [M]",
    unit="exponent in R, less the predicted one: the farthest of the twelve",
    rule=f"for each of four p, of untied SGD and of sign steps tied and untied, the 95 % interval of the mean lies within {NEAR}",
)


def one_step_findings(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME, family="sweep")
    shortest = min((int(run.axes["warmup"]) for run in runs), default=0)  # how a model starts does not depend on its warm-up
    runs = [run for run in runs if run.axes["warmup"] == shortest]
    return [
        _stepped(ONE_STEP, runs, (("sgd", True),)),
        _stepped(CONTROLS, runs, (("sgd", False), ("sign", True), ("sign", False))),
    ]


def _predicted(p: float, update: str, tied: bool) -> float:
    if update == "sign":
        return 1 - 2 * p
    return (2 if tied else 1) - 4 * p


def _points(run: Run, update: str, tied: bool) -> list[tuple[int, float]]:
    return run.over_loops("perturbation", of="logit_change", update=update, tied=tied)


def _stepped(claim: Claim, runs: list[Run], kinds: tuple[tuple[str, bool], ...]) -> Finding:
    rows: list[dict[str, Any]] = []
    off: list[Estimate] = []
    parts: list[Verdict] = []
    samples: list[Sample] = []
    for update, tied in kinds:
        for p in EXPONENTS:
            own = [run for run in runs if run.axes["p"] == p]
            found = sample(own, lambda run, update=update, tied=tied: slope(_points(run, update, tied)))
            samples.append(found)
            predicted = _predicted(p, update, tied)
            if not found.used:
                parts.append(Verdict.UNDECIDED)
                continue
            mean = mean_of(found.estimates)
            off.append(less(mean, predicted))
            parts.append(judge(off[-1], -NEAR, NEAR))
            rows.append(
                {"update": update, "tied": tied, "p": p, "predicted": predicted, "exponent": mean.value, "low": mean.low}
                | {"high": mean.high, "r2": _r2(found, update, tied), "seeds": found.seeds, "verdict": parts[-1].value}
            )
    if not off:
        reason = f"No one-step change to judge by.{absent(samples)}"
        return claim.finding(Verdict.UNDECIDED, reason, seconds=seconds_of(samples))
    spoken = "; ".join(
        f"{row['update']}, {'tied' if row['tied'] else 'untied'}, p {row['p']:g}: "
        f"{Estimate(row['exponent'], row['low'], row['high'])} for {row['predicted']:g}"
        for row in rows
    )
    within = sum(row["verdict"] == Verdict.SHOWN.value for row in rows)
    return claim.finding(
        all_of(parts),
        f"Exponents over R = 1 to 16: {spoken}. {within} of {len(parts)} lie within {NEAR} with their interval.{absent(samples)}",
        estimate=max(off, key=lambda one: abs(one.value)),
        seeds=min(found.seeds for found in samples if found.used),
        seconds=seconds_of(samples),
        detail={"exponents": rows, "plots": _step_plots(runs, kinds)},
    )


def _r2(found: Sample, update: str, tied: bool) -> float:
    """Mean over seeds: what it lacks to 1 is the curve's bend, which no number of seeds averages out."""
    lines = [line(_points(run, update, tied)) for run in found.runs]
    return sum(one.r2 for one in lines) / len(lines)


def _step_plots(runs: list[Run], kinds: tuple[tuple[str, bool], ...]) -> list[XY]:
    plots = []
    for update, tied in kinds:
        series = []
        for p in EXPONENTS:
            own = [run for run in runs if run.axes["p"] == p]
            if found := by_loops(own, "perturbation", of="logit_change", update=update, tied=tied):
                series.append(mean_series(f"p = {p:g}, {_predicted(p, update, tied):g} predicted", found))
        if series:
            title = f"One {update} step, {'tied' if tied else 'untied'}"
            plots.append(XY(title, "loops R", "change of the logits", series, log=True))
    return plots
