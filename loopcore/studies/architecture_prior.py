"""2a, 2b, 2c: what tying the weights does. Untied standard-depth models learn a parallel scan, tied ones a serial frontier
(arXiv 2607.20594).

Which of the two a model runs is read from its convergence times: tau ~ n / v of a serial frontier against tau ~ log2 n of a
scan, n being the length of the prefix. Both lines are fitted to the same times; the difference of their R2 says which fits.
An untied model is compared twice, apart: at the looped model's executed depth and width, and at its parameter count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.statistics import Line, fit_line
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Series
from loopcore.studies.measured import LEARNED, Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, difference, judge, mean_of

__all__ = ["ARCHITECTURE_PRIOR"]

NAME = "architecture-prior"
MATCHES = ("depth", "parameters")
LONGER = 2  # times N: 2c is read there, and shown at 4 N as well
PATIENCE = 2.0  # times the steps the tied model took: below that an untied run that is not there yet is slow, not failed [?]
SERIAL = "R2 of tau ~ n less R2 of tau ~ log2 n"

PRIOR = Claim(
    id="2a",
    title="Architecture prior",
    statement="Untied standard-depth models learn a parallel scan; tying flips it to the serial frontier.",
    published="stated without a figure at hand [A]",
    unit=f"{SERIAL}: tied less untied at matched depth",
    rule="the 95 % interval of that margin lies above 0 for tied models, and below 0 for untied ones at matched depth and at "
    "matched parameters",
)
ADDRESSED = Claim(
    id="2b",
    title="The prior against addressing",
    statement="The flip holds even with positional addressing for a log-depth scan (position i - 2^t exposed at loop t [?]).",
    published="stated without a figure at hand [A]",
    unit=f"{SERIAL}: tied, with scan addressing",
    rule="the 95 % interval of the margin of tied models with scan addressing lies above 0",
)
EXTRAPOLATION = Claim(
    id="2c",
    title="Untied models extrapolate worst",
    statement="Untied models at matched depth and at matched parameters extrapolate worst and fail A5.",
    published="stated without a figure at hand [A]",
    unit=f"token accuracy at {LONGER} N: tied less the better of the untied",
    rule="the 95 % intervals of the difference to both untied kinds lie above 0, and that of untied accuracy on A5 below "
    f"{LEARNED} after at least {PATIENCE:g} times the tied model's steps",
)


def work(ask: Ask) -> Iterator[Cell]:
    probes = (recipes.SPEED, recipes.FAR)
    for group in ask.groups_or(("S3",), ("S3",), ("S3", "S4")):
        for seed in ask.seed_range():
            yield recipes.scanning(ask, NAME, group, seed, probes=probes)
            for matched in MATCHES:
                yield recipes.untied(ask, NAME, group, seed, matched, probes)
            yield recipes.scanning(ask, NAME, group, seed, scan=True, probes=probes)
            yield recipes.scanning(ask, NAME, group, seed, scan=True, log=True, probes=probes)
            yield recipes.scanning(ask, NAME, group, seed, tied=False, scan=True, probes=probes)
    if ask.scale != "smoke" and ask.groups is None:
        # An untied A5 run costs over five minutes: one seed of it on a CPU, unless more are asked for.
        for seed in ask.seed_range(cpu=1):
            yield recipes.free(ask, NAME, "A5", seed, probes=probes)
            yield recipes.untied(ask, NAME, "A5", seed, "depth", probes)


def summary(measured: Measured) -> list[Finding]:
    small = _not("A5")
    tied = measured.runs(NAME, family="free", group=small)
    untied = {matched: measured.runs(NAME, family="untied", matched=matched, group=small) for matched in MATCHES}
    return [
        _prior(sample(tied, _margin), {matched: sample(runs, _margin) for matched, runs in untied.items()}),
        _addressed(
            sample(measured.runs(NAME, family="scan", log=False), _margin),
            sample(measured.runs(NAME, family="scan", log=True), _margin),
            sample(measured.runs(NAME, family="untied-scan"), _margin),
        ),
        _extrapolation(
            tied,
            untied,
            measured.runs(NAME, family="free", group="A5"),
            measured.runs(NAME, family="untied", group="A5"),
        ),
    ]


def _not(group: str) -> Any:
    return lambda value: value != group


def _lines(run: Run) -> tuple[Line, Line]:
    """(serial, scan): tau against the length of the prefix and against its log2."""
    tau = run.tau()
    if len({value for _, value in tau}) < 2:
        raise Undecided("tau is the same at every position: it fits neither a serial frontier nor a scan")
    prefix = [position + 1 for position, _ in tau]
    times = [value for _, value in tau]
    return fit_line(prefix, times), fit_line([math.log2(n) for n in prefix], times)


def _margin(run: Run) -> Estimate:
    run.trained()  # a run that is not over has no architecture to speak for
    serial, scan = _lines(run)
    return Estimate(serial.r2 - scan.r2)


def _mean(found: Sample) -> Estimate | None:
    return mean_of(found.estimates) if found.used else None


def _prior(tied: Sample, untied: dict[str, Sample]) -> Finding:
    samples = [tied, *untied.values()]
    seconds = sum(found.seconds for found in samples)
    of_tied, of_untied = _mean(tied), {matched: _mean(found) for matched, found in untied.items()}
    parts = [judge(of_tied, low=0.0), *(judge(margin, high=0.0) for margin in of_untied.values())]
    deep = of_untied["depth"]
    estimate = difference(of_tied, deep) if of_tied and deep else None
    spoken = [f"tied {of_tied or 'not measured'}"]
    spoken += [f"untied at matched {matched} {margin or 'not measured'}" for matched, margin in of_untied.items()]
    return PRIOR.finding(
        all_of(parts),
        f"{SERIAL}: {'; '.join(spoken)}.{''.join(found.absent() for found in samples)}",
        estimate=estimate,
        seeds=min(found.seeds for found in samples),
        seconds=seconds,
        detail={"rows": _rows(samples), "plots": _plots([run for found in samples for run in found.runs])},
    )


def _addressed(tied: Sample, log: Sample, untied: Sample) -> Finding:
    margin = _mean(tied)
    beside = [
        f"{name} {_mean(found) or 'not measured'}"
        for name, found in (("with ceil(log2 n) + 1 loops", log), ("untied with the same addressing", untied))
    ]
    learned = [f"{sum(_solved(run) for run in log.runs)} of {len(log.used)} runs learned the task in ceil(log2 n) + 1 loops"]
    return ADDRESSED.finding(
        judge(margin, low=0.0),
        f"{SERIAL}: tied at T = n {margin or 'not measured'}; beside it {'; '.join(beside)}; {learned[0]}."
        f"{tied.absent()}{log.absent()}{untied.absent()}",
        estimate=margin,
        seeds=tied.seeds,
        seconds=tied.seconds + log.seconds + untied.seconds,
        detail={"rows": _rows([tied, log, untied]), "plots": _plots([*tied.runs, *log.runs, *untied.runs])},
    )


def _solved(run: Run) -> bool:
    return run.learned


def _longer(times: int) -> Any:
    """Token accuracy at `times` N: after T* of a tied model, after all the loops an untied one has."""

    def read(run: Run) -> Estimate:
        run.trained()
        length = times * run.length
        if not run.cell.train.model.tied:
            return run.accuracy_at(length, run.loops, or_last=True)
        run.require_learned()
        return run.accuracy_at(length, run.planned_loops(length))

    return read


def _extrapolation(tied: list[Run], untied: dict[str, list[Run]], tied_a5: list[Run], untied_a5: list[Run]) -> Finding:
    at_longer = sample(tied, _longer(LONGER))
    of_untied = {matched: sample(runs, _longer(LONGER)) for matched, runs in untied.items()}
    base = _mean(at_longer)
    margins = {
        matched: difference(base, other) if base and (other := _mean(found)) else None for matched, found in of_untied.items()
    }
    known = [margin for margin in margins.values() if margin is not None]
    estimate = min(known, key=lambda margin: margin.value) if len(known) == len(margins) else None
    a5 = sample(untied_a5, lambda run: run.trained())
    fails, on_a5 = _fails(a5, tied_a5)
    every = [at_longer, *of_untied.values()]
    spoken = [f"{_mean(at_longer) or 'not measured'} tied"]
    spoken += [f"{_mean(found) or 'not measured'} untied at matched {matched}" for matched, found in of_untied.items()]
    unmet = sum(not _solved(run) for found in of_untied.values() for run in found.runs)
    cut = f" {unmet} untied runs ended below {LEARNED} on their own length." if unmet else ""
    return EXTRAPOLATION.finding(
        all_of([*(judge(margin, low=0.0) for margin in margins.values()), fails]),
        f"Token accuracy at {LONGER} N: {', '.join(spoken)}.{cut} {on_a5}{''.join(found.absent() for found in [*every, a5])}",
        estimate=estimate,
        seeds=min(found.seeds for found in every),
        seconds=sum(found.seconds for found in every) + a5.seconds + sample(tied_a5, lambda run: run.trained()).seconds,
        detail={"rows": _accuracy_rows([*tied, *(run for runs in untied.values() for run in runs), *tied_a5, *untied_a5])},
    )


def _fails(untied: Sample, tied: list[Run]) -> tuple[Verdict, str]:
    """Whether untied models fail A5, and a sentence."""
    if not untied.used:
        return Verdict.UNDECIDED, "A5 was not trained untied."
    accuracy = mean_of(untied.estimates)
    learned = sample(tied, lambda run: run.trained())
    needed = [run.steps for run in learned.runs if run.learned]
    took = min(run.steps for run in untied.runs)
    verdict = judge(accuracy, high=LEARNED)
    sentence = f"On A5 untied models come to {accuracy} in {took} steps"
    if not needed:
        return Verdict.UNDECIDED, f"{sentence}; no tied run learned A5 to compare with."
    most = max(needed)
    if verdict is Verdict.SHOWN and took < PATIENCE * most:
        return (
            Verdict.UNDECIDED,
            f"{sentence}, fewer than {PATIENCE:g} times the {most} a tied one took: slower, not shown to fail.",
        )
    return verdict, f"{sentence}; tied ones learned it in {most} at most."


def _rows(samples: list[Sample]) -> list[dict[str, Any]]:
    rows = []
    for found in samples:
        for run, margin in found.used:
            serial, scan = _lines(run)
            rows.append(
                {"cell": run.cell.name, "accuracy": run.trained().value, "r2_serial": serial.r2, "r2_log2": scan.r2}
                | {"margin": margin.value}
            )
    return rows


def _accuracy_rows(runs: list[Run]) -> list[dict[str, Any]]:
    rows = []
    for run in runs:
        row: dict[str, Any] = {"cell": run.cell.name}
        for name, read in (("trained", Run.trained), ("2 N", _longer(2)), ("4 N", _longer(4))):
            try:
                row[name] = read(run).value
            except Undecided:
                row[name] = None
        rows.append(row)
    return rows


def _plots(runs: list[Run]) -> list[XY]:
    """tau against position with both curves, of the first run of each kind."""
    plots: list[XY] = []
    seen: set[tuple[Any, ...]] = set()
    for run in runs:
        kind = tuple(run.axes.get(name) for name in ("family", "matched", "group", "log"))
        if kind in seen:
            continue
        seen.add(kind)
        tau = run.tau()
        serial, scan = _lines(run)
        prefix = [position + 1 for position, _ in tau]
        series = [
            Series("tau, 90th percentile", prefix, [value for _, value in tau], style="points"),
            Series(f"serial, R2 {serial.r2:.3f}", prefix, [serial.at(n) for n in prefix]),
            Series(f"log2, R2 {scan.r2:.3f}", prefix, [scan.at(math.log2(n)) for n in prefix]),
        ]
        plots.append(XY(f"Convergence times: {run.cell.name}", "position", "loops", series))
    return plots


ARCHITECTURE_PRIOR = Study(NAME, "What tying the weights does", (PRIOR, ADDRESSED, EXTRAPOLATION), work, summary)
