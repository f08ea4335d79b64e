"""5a to 5d: instruments at the end of the loop saturate, tau and damage cones read the speed, and only what is read at the
head predicts what becomes of a model out of distribution (arXiv 2607.20594).

The population is every kind of word model that the other studies train: demands, groups, tied and untied, with scan addressing
and with random loop counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.statistics import auroc, fit_line, permutation_p, spearman
from loopcore.studies.architecture_prior import MATCHES
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.budget_law import DEMANDS, frontier_heat
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge, mean_of

__all__ = ["HEAD", "INSTRUMENTS", "TAIL"]

NAME = "instruments"

SATURATED = 0.9  # of 1, which each tail metric takes at a fixed point [?]
AGREES = (0.85, 1.15)  # within 15 % [?], for cones against tau; tau against the frontier is held to the same
STRAIGHT = 0.9  # R2 of tau against the position [?]
SIGNIFICANT = 0.05  # p of a rank correlation, divided by the number of metrics of its kind (Bonferroni)
FEWEST_RUNS = 10  # runs below which a rank correlation is not read: at 8 even |rho| = .8 is barely significant [?]
OUT = 1.5  # times N: out of distribution, where RECIPES found rescue partial, so that fates differ

TAIL = ("one_step_skip", "adjacent_cosine", "asymptotic_alignment", "jacobian_alignment")

SATURATION = Claim(
    id="5a",
    title="Tail metrics saturate",
    statement="Standard instruments (one-step skip, cross-step Jacobian alignment, adjacent-loop cosine, asymptotic alignment) "
    "saturate at the fixed point.",
    published="all four [A], names [N]; no figure at hand",
    unit="smallest of the four at the end of the loop (1 at a fixed point)",
    rule=f"the 95 % interval of each metric's mean over solved runs lies above {SATURATED}",
)
HEAD_TIME = Claim(
    id="5b",
    title="tau(n, i)",
    statement="The convergence time of position i grows linearly, and 1 / slope is the speed.",
    published="v = 1 / slope [A]",
    unit="v by tau (90th percentile) over v by the frontier",
    rule=f"the 95 % interval of the mean ratio lies in [{AGREES[0]}, {AGREES[1]}], and that of tau's R2 above {STRAIGHT}",
)
CONES = Claim(
    id="5c",
    title="Damage cones",
    statement="A damaged state spreads in a cone whose slope is v.",
    published="slope v [A]; 1 of 12 tests agreed in [R]",
    unit="speed of the cone's edge over v by the mean of tau",
    rule=f"the 95 % interval of the mean ratio lies in [{AGREES[0]}, {AGREES[1]}]",
)
FATE = Claim(
    id="5d",
    title="The head predicts the fate",
    statement="In-distribution head metrics predict out-of-distribution fate, tail metrics do not.",
    published="Spearman and AUROC up to 1.00 for head, not significant for tail [N]",
    unit="|Spearman| with accuracy out of distribution: best head metric",
    rule=f"with at least {FEWEST_RUNS} runs: the best head metric has p < {SIGNIFICANT} and no tail metric has, each p times "
    "the number of metrics of its kind",
)


def work(ask: Ask) -> Iterator[Cell]:
    probes = (recipes.SPEED, recipes.FAR, recipes.INSIDE)
    groups = ask.groups_or(("S3",), ("S3", "A4"), ("S3", "A4", "S4"))
    for demand in DEMANDS[ask.scale]:
        for group in groups:
            for seed in ask.seed_range():
                yield recipes.free(ask, NAME, group, seed, demand, probes)
    for seed in ask.seed_range():
        if ask.scale != "smoke" and ask.groups is None:
            yield recipes.free(ask, NAME, "A5", seed, probes=probes)
        yield recipes.with_extra_loops(ask, NAME, groups[0], seed, probes)
        yield recipes.scanning(ask, NAME, groups[0], seed, scan=True, probes=probes)
        for matched in MATCHES:
            yield recipes.untied(ask, NAME, groups[0], seed, matched, probes)


def summary(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME)
    tied = [run for run in runs if run.cell.train.model.tied]
    return [_saturation(tied), _head_time(tied), _cones(tied), _fate(runs)]


# --- 5a


def _saturation(runs: list[Run]) -> Finding:
    samples = {metric: sample(runs, lambda run, metric=metric: _of_learned(run, metric)) for metric in TAIL}
    means = {metric: mean_of(found.estimates) for metric, found in samples.items() if found.used}
    seconds = next(iter(samples.values())).seconds
    absent = _worst_absent(samples.values())
    if not means:
        return SATURATION.finding(Verdict.UNDECIDED, f"No tail metric to judge by.{absent}", seconds=seconds)
    lowest = min(means, key=lambda metric: means[metric].value)
    spoken = ", ".join(f"{metric.replace('_', ' ')} {mean}" for metric, mean in means.items())
    series = [
        Series(metric.replace("_", " "), [i] * len(found.used), found.values, style="points")
        for i, (metric, found) in enumerate(samples.items(), 1)
    ]
    return SATURATION.finding(
        all_of([judge(means.get(metric), low=SATURATED) for metric in TAIL]),
        f"At the end of the loop: {spoken}.{absent}",
        estimate=means[lowest],
        seeds=samples[lowest].seeds,
        seconds=seconds,
        detail={
            "metrics": {metric: vars(mean) for metric, mean in means.items()},
            "plots": [XY("Tail metrics of solved runs", "metric", "value at T", series, [Mark("y", 1.0, "fixed point")])],
        },
    )


def _of_learned(run: Run, metric: str) -> Estimate:
    run.require_learned()
    return run.tail(metric)


def _worst_absent(samples: Any) -> str:
    return max((found.absent() for found in samples), key=len, default="")


# --- 5b


def _tau_ratio(run: Run) -> Estimate:
    run.require_learned()
    by_tau, by_frontier = run.speed("tau_p90"), run.speed()
    ends = (None if end is None else end / by_frontier.value for end in (by_tau.low, by_tau.high))
    return Estimate(by_tau.value / by_frontier.value, *ends)


def _head_time(runs: list[Run]) -> Finding:
    found = sample(runs, _tau_ratio)
    if not found.used:
        return HEAD_TIME.finding(Verdict.UNDECIDED, f"No run to judge by.{found.absent()}", seconds=found.seconds)
    ratio = mean_of(found.estimates)
    r2 = mean_of([Estimate(run.r2("tau_p90")) for run in found.runs])
    # The means of single runs have no interval of their own: one run leaves the straightness to the eye.
    straight = judge(r2, low=STRAIGHT) if len(found.used) > 1 else Verdict.SHOWN if r2.value >= STRAIGHT else Verdict.UNDECIDED
    rows = [
        {"cell": run.cell.name, "v_frontier": run.speed().value, "v_tau_p90": run.speed("tau_p90").value}
        | {"r2_tau": run.r2("tau_p90"), "ratio": estimate.value}
        for run, estimate in found.used
    ]
    return HEAD_TIME.finding(
        all_of([judge(ratio, *AGREES), straight]),
        f"v by tau is {ratio} times v by the frontier over {len(found.used)} runs; tau is a line with R2 {r2}.{found.absent()}",
        estimate=ratio,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={"rows": rows, "plots": [*_tau_plots(found.runs), *frontier_heat(found.runs)]},
    )


def _first_of_kind(runs: list[Run]) -> Iterator[Run]:
    seen: set[tuple[Any, ...]] = set()
    for run in runs:
        kind = tuple(run.axes.get(name) for name in ("family", "group", "loops", "matched"))
        if kind not in seen:
            seen.add(kind)
            yield run


def _tau_plots(runs: list[Run]) -> list[XY]:
    plots: list[XY] = []
    for run in _first_of_kind(runs):
        try:
            tau = run.tau()
            x, y = [position + 1 for position, _ in tau], [value for _, value in tau]
            line = fit_line(x, y)
        except Undecided:
            continue
        series = [
            Series("tau, 90th percentile", x, y, style="points"),
            Series(f"v = {run.speed('tau_p90').value:.2f}", x, [line.at(at) for at in x]),
        ]
        plots.append(XY(f"Convergence times: {run.cell.name}", "position", "loops", series))
    return plots


# --- 5c


def _cone(run: Run) -> Estimate:
    run.require_learned()
    return run.cone_ratio()


def _cones(runs: list[Run]) -> Finding:
    found = sample(runs, _cone)
    if not found.used:
        return CONES.finding(Verdict.UNDECIDED, f"No cone to judge by.{found.absent()}", seconds=found.seconds)
    ratio = mean_of(found.estimates)
    against = sample(found.runs, lambda run: Estimate(run.speed("cone").value / run.speed().value))
    beside = f"; against the frontier {mean_of(against.estimates)}" if against.used else ""
    within = sum(AGREES[0] <= value <= AGREES[1] for value in found.values)
    rows = [
        {"cell": run.cell.name, "ratio": estimate.value, "low": estimate.low, "high": estimate.high}
        for run, estimate in found.used
    ]
    return CONES.finding(
        judge(ratio, *AGREES),
        f"The cone's edge runs at {ratio} times v by the mean of tau over {len(found.used)} runs, {within} of them within "
        f"15 %{beside}.{found.absent()}",
        estimate=ratio,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={"rows": rows, "plots": _cone_plots(found.runs)},
    )


def _cone_plots(runs: list[Run]) -> list[XY]:
    plots: list[XY] = []
    for run in _first_of_kind(runs):
        points = run.cone_points()
        if not points:
            continue
        series = [
            Series(
                f"position {p} damaged",
                [distance for at, distance, _ in points if at == p],
                [onset for at, _, onset in points if at == p],
                style="points",
            )
            for p in sorted({p for p, _, _ in points})
        ]
        try:
            line = fit_line([distance for _, distance, _ in points], [onset for _, _, onset in points])
        except Undecided:
            pass
        else:
            distances = sorted({distance for _, distance, _ in points})
            series.append(Series(f"edge, v = {1 / line.slope:.2f}", distances, [line.at(d) for d in distances]))
        plots.append(XY(f"Damage cone: {run.cell.name}", "positions behind the damage", "loops until the change", series))
    return plots


# --- 5d

Metric = Callable[[Run], float]


def _speed_price(run: Run) -> float:
    return run.speed().value / run.demand


def _saturates(run: Run) -> float:
    """Loops to spare: how early in the contract's time the whole word is solved."""
    frontier = run.frontier()
    if not frontier:
        raise Undecided("its frontier was not measured")
    full = next((loop for loop, solved in frontier if solved >= run.length), None)
    if full is None:
        raise Undecided("its frontier never reaches the end of the word")
    return -full / run.loops


# What is read while the answer is being made, all of it on the trained length [?: the paper's list is not at hand].
HEAD: dict[str, Metric] = {
    "v over demand, frontier": _speed_price,
    "v over demand, tau p90": lambda run: run.speed("tau_p90").value / run.demand,
    "R2 of the frontier": lambda run: run.r2(),
    "R2 of tau": lambda run: run.r2("tau_p90"),
    "loops to spare": _saturates,
}


def _out(run: Run) -> Estimate:
    """Token accuracy at 1.5 N after T*, or after all the loops an untied model has."""
    run.trained()
    length = recipes.far_lengths(run.length)[2]
    if run.cell.train.model.tied:
        return run.accuracy_at(length, run.planned_loops(length))
    return run.accuracy_at(length, run.loops, or_last=True)


def _fate(runs: list[Run]) -> Finding:
    fates = sample(runs, _out)
    seeds, seconds = fates.seeds, fates.seconds
    if len(fates.used) < FEWEST_RUNS:
        reason = f"{len(fates.used)} runs have an accuracy at {OUT:g} N, a rank correlation needs {FEWEST_RUNS}.{fates.absent()}"
        return FATE.finding(Verdict.UNDECIDED, reason, seeds=seeds, seconds=seconds)
    head = {name: _predicts(metric, fates, len(HEAD)) for name, metric in HEAD.items()}
    tail = {name: _predicts(lambda run, name=name: run.tail(name).value, fates, len(TAIL)) for name in TAIL}
    best = _best(head)
    if best is None:
        return FATE.finding(Verdict.UNDECIDED, f"No head metric can be read.{fates.absent()}", seeds=seeds, seconds=seconds)
    rival = _best(tail)
    predicts = Verdict.SHOWN if head[best]["p"] < SIGNIFICANT else Verdict.NOT_SHOWN
    silent = Verdict.UNDECIDED
    if rival is not None:
        silent = Verdict.NOT_SHOWN if tail[rival]["p"] < SIGNIFICANT else Verdict.SHOWN
    spoken = [f"head: {_spoken(best, head[best])}", f"tail: {_spoken(rival, tail[rival])}" if rival else "tail: not measured"]
    rho = head[best]["spearman"]
    low, high = _spearman_interval(abs(rho), head[best]["runs"])
    return FATE.finding(
        all_of([predicts, silent]),
        f"Of {len(fates.used)} runs the best predictors of token accuracy at {OUT:g} N are, {'; '.join(spoken)} (p times the "
        f"number of metrics of the kind).{fates.absent()}",
        estimate=Estimate(abs(rho), low, high),
        seeds=seeds,
        seconds=seconds,
        detail={"head": head, "tail": tail, "plots": _fate_plots(fates)},
    )


def _predicts(metric: Metric, fates: Sample, tried: int) -> dict[str, Any]:
    """How well a metric orders the runs' fates; `undecided` with the reason where it cannot be said."""
    values, outs = [], []
    for run, out in fates.used:
        try:
            values.append(metric(run))
        except Undecided:
            continue
        outs.append(out.value)
    if len(values) < FEWEST_RUNS:
        return {"undecided": f"{len(values)} runs have it, {FEWEST_RUNS} are needed", "runs": len(values)}
    try:
        rho = spearman(values, outs)
    except Undecided as reason:
        return {"undecided": str(reason), "runs": len(values)}
    found = {"spearman": rho, "p": min(1.0, tried * permutation_p(values, outs)), "runs": len(values)}
    try:
        # Good fate: better than the median run, so that there are both kinds whatever the lengths. Either direction may predict.
        area = auroc(values, [out > median(outs) for out in outs])
        found["auroc"] = max(area, 1.0 - area)
    except Undecided as reason:
        found["no_auroc"] = str(reason)
    return found


def _best(metrics: dict[str, dict[str, Any]]) -> str | None:
    known = {name: found for name, found in metrics.items() if "spearman" in found}
    return min(known, key=lambda name: (known[name]["p"], -abs(known[name]["spearman"])), default=None)


def _spoken(name: str, found: dict[str, Any]) -> str:
    area = f", AUROC {found['auroc']:.2f}" if "auroc" in found else ""
    return f"{name.replace('_', ' ')}, Spearman {found['spearman']:.2f}, p {found['p']:.3f}{area}"


def _spearman_interval(rho: float, runs: int) -> tuple[float, float]:
    """By Fisher's transformation with the variance 1.06 / (n - 3) of rank correlations (Fieller, Hartley, Pearson 1957)."""
    at = math.atanh(min(rho, 1.0 - 1e-9))
    reach = 1.96 * math.sqrt(1.06 / (runs - 3))
    return max(0.0, math.tanh(at - reach)), math.tanh(at + reach)


def _fate_plots(fates: Sample) -> list[XY]:
    metrics: dict[str, Metric] = {
        **{f"head: {name}": metric for name, metric in HEAD.items()},
        **{f"tail: {name.replace('_', ' ')}": (lambda run, name=name: run.tail(name).value) for name in TAIL},
    }
    plots = []
    for title, metric in metrics.items():
        found = sample(fates.runs, lambda run, metric=metric: Estimate(metric(run)))
        out = {run.cell.name: estimate for run, estimate in fates.used}
        families = list(dict.fromkeys(str(run.axes["family"]) for run in found.runs))
        series = [
            Series(
                family,
                [estimate.value for run, estimate in found.used if run.axes["family"] == family],
                [out[run.cell.name].value for run in found.runs if run.axes["family"] == family],
                style="points",
            )
            for family in families
        ]
        if series:
            plots.append(XY(title, title.split(": ")[1], f"token accuracy at {OUT:g} N", series))
    return plots


INSTRUMENTS = Study(NAME, "What the instruments see", (SATURATION, HEAD_TIME, CONES, FATE), work, summary)
