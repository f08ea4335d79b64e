"""D6 to D8: what trains and how well: failure shares over the exponent, and losses against standard scaling (arXiv 2607.13491).

A run that does not train need not diverge: it may sit on the loss of a constant prediction. So what counts as training is read
from held-out losses, that of the run and that of the best constant on the same words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import median
from typing import Any

from loopcore.errors import Undecided
from loopcore.statistics import fit_line, student_quantile, wilson
from loopcore.studies.base import Claim, Finding
from loopcore.studies.deeploop_cells import EXPONENTS, NAME
from loopcore.studies.deeploop_shared import absent, mean_series, seconds_of
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, difference, judge, mean_of

__all__ = ["GAIN", "NEUTRAL", "SHARES", "runs_findings", "seeds_needed"]

TRAINS = 0.1  # nats below the best constant prediction: a run that is not so far below has learned little else [?]
FEWEST_SEEDS = 6  # of a share
TOLERANCE = 0.005  # nats; the published differences at R = 1 are .0004 and .0011
PUBLISHED = {1: -0.0004, 3: 0.0160, 5: 0.0231, 7: 0.0186}  # GPT-2 small: standard less DeepLoop, nats [N]
LOW_P, HIGH_P = 0.25, 0.5  # DeepNorm's and DeepLoop's

SHARES = Claim(
    id="D6",
    title="What share of seeds trains",
    statement="At a rate that is high for it, p = 1/2 trains in more seeds than p = 1/4: a failure is a silent plateau.",
    published="trained at rate .03, R = 7: p = .25 1/6, .35 4/6, .5 2/6, .6 6/6; a longer warm-up rescues most [M]",
    unit=f"share of seeds trained at p = {HIGH_P:g} less that at p = {LOW_P:g}, shorter warm-up",
    rule=f"the 95 % interval of the difference (Wilson's, combined as Newcombe does) lies above 0, with at least {FEWEST_SEEDS} "
    f"seeds of both; a run trains where the interval of its loss lies {TRAINS} nats below the best constant's",
)
NEUTRAL = Claim(
    id="D7",
    title="Neutral without loops",
    statement="At R = 1 DeepLoop loses and gains nothing against standard scaling (here: pre-norm).",
    published="2.8631 against 2.8627 (small), 2.6264 against 2.6253 (medium) [N]",
    unit="nats: loss of standard scaling less DeepLoop's, each at its best rate",
    rule=f"the 95 % interval of the difference's mean over seeds lies within {TOLERANCE}",
)
GAIN = Claim(
    id="D8",
    title="Gain with loops",
    statement="With loops DeepLoop is better than standard scaling, and the more the more loops there are.",
    published="small: .0160, .0231, .0186 at R = 3, 5, 7; medium: .0152, .0196, .0278 [N]",
    unit="nats a loop: slope of the gain over R",
    rule="the 95 % intervals of the gain's mean over seeds at every R > 1, and of its slope over R, lie above 0",
)


def runs_findings(measured: Measured) -> list[Finding]:
    sweep, loops = measured.runs(NAME, family="sweep"), measured.runs(NAME, family="loops")
    longest = max((int(run.axes["steps"]) for run in loops), default=0)
    return [_shares(sweep), *_gains([run for run in loops if run.axes["steps"] == longest])]


# --- D6


def _below(run: Run) -> Estimate:
    """How far below the best constant prediction a run ends; no figure of one that diverged."""
    run.loss()
    return run.figure("plateau", of="below")


def _shares(runs: list[Run]) -> Finding:
    warmups = sorted({int(run.axes["warmup"]) for run in runs})
    if not warmups:
        return SHARES.finding(Verdict.UNDECIDED, "No run of the exponent sweep was asked for.")
    shares: dict[tuple[float, int], Estimate] = {}
    trials: dict[tuple[float, int], int] = {}
    rows: list[dict[str, Any]] = []
    samples: list[Sample] = []
    for warmup in warmups:
        for p in EXPONENTS:
            own = [run for run in runs if run.axes["p"] == p and run.axes["warmup"] == warmup]
            diverged = [run for run in own if run.result.state == "succeeded" and run.diverged]
            found = sample([run for run in own if run not in diverged], _below)
            samples.append(found)
            verdicts = [judge(estimate, low=TRAINS) for estimate in found.estimates]
            trained, silent = verdicts.count(Verdict.SHOWN), verdicts.count(Verdict.NOT_SHOWN)
            decided = trained + silent + len(diverged)
            trials[p, warmup] = decided
            if decided:
                share = trained / decided
                shares[p, warmup] = Estimate(share, *wilson(share, decided))
            losses = [run.loss() for run in found.runs]
            constants = sample(found.runs, lambda run: run.figure("plateau", of="constant")).values
            rows.append(
                {"p": p, "warmup": warmup, "trained": trained, "plateau": silent, "diverged": len(diverged)}
                | {"unclear": len(verdicts) - trained - silent, "share": shares[p, warmup].value if decided else None}
                | {"low": shares[p, warmup].low if decided else None, "high": shares[p, warmup].high if decided else None}
                | {"median_loss": median(losses) if losses else None, "constant_loss": median(constants) if constants else None}
            )
    first = warmups[0]
    high, low = shares.get((HIGH_P, first)), shares.get((LOW_P, first))
    gap = difference(high, low) if high is not None and low is not None else None
    fewest = min(trials[HIGH_P, first], trials[LOW_P, first])
    spoken = "; ".join(
        f"warm-up {warmup}: "
        + ", ".join(f"p {row['p']:g} {row['trained']}/{trials[row['p'], warmup]}" for row in rows if row["warmup"] == warmup)
        for warmup in warmups
    )
    short = "" if fewest >= FEWEST_SEEDS else f" {fewest} seeds are too few for a share: {FEWEST_SEEDS} are needed."
    silent, diverged = sum(row["plateau"] for row in rows), sum(row["diverged"] for row in rows)
    return SHARES.finding(
        judge(gap, low=0.0) if fewest >= FEWEST_SEEDS else Verdict.UNDECIDED,
        f"Seeds that train, {spoken}. Of those that do not, {silent} sit on a plateau with finite losses and {diverged} "
        f"diverged.{short}{absent(samples)}",
        estimate=gap,
        seeds=fewest,
        seconds=sum(run.result.seconds for run in runs),
        detail={"shares": rows, "plots": _share_plots(rows, samples, warmups)},
    )


def _share_plots(rows: list[dict[str, Any]], samples: list[Sample], warmups: list[int]) -> list[XY]:
    shares, losses = [], []
    for warmup in warmups:
        own = [row for row in rows if row["warmup"] == warmup and row["share"] is not None]
        if own:
            x, share, low, high = ([row[name] for row in own] for name in ("p", "share", "low", "high"))
            shares.append(Series(f"warm-up {warmup}", x, share, low, high))
        ended = [run for found in samples for run in found.runs if run.axes["warmup"] == warmup]
        if ended:
            at = [float(run.axes["p"]) for run in ended]
            losses.append(Series(f"warm-up {warmup}", at, [run.loss() for run in ended], style="points"))
    constants = [row["constant_loss"] for row in rows if row["constant_loss"] is not None]
    marks = [Mark("y", constants[0], "best constant prediction")] if constants else []
    plots = []
    if shares:
        plots.append(XY("Share of seeds that train", "exponent p", "share", shares))
    if losses:
        plots.append(XY("Where runs end", "exponent p", "held-out loss (nats)", losses, marks))
    return plots


# --- D7, D8


def _gains(runs: list[Run]) -> list[Finding]:
    counts = sorted({int(run.axes["loops"]) for run in runs})
    compared = [run for run in runs if run.axes["rule"] in ("standard", "deeploop")]
    found = sample(compared, lambda run: Estimate(run.loss()))
    rows = [row for loops in counts for rule in ("standard", "deeploop") if (row := _best(found, rule, loops))]
    best = {(row["rule"], row["loops"]): row["by_seed"] for row in rows}
    gains = {
        loops: {
            seed: best["standard", loops][seed] - best["deeploop", loops][seed]
            for seed in sorted(best["standard", loops].keys() & best["deeploop", loops].keys())
        }
        for loops in counts
        if ("standard", loops) in best and ("deeploop", loops) in best
    }
    means = {loops: _mean(by_seed.values()) for loops, by_seed in gains.items()}
    detail = {
        "best_rates": [{name: value for name, value in row.items() if name != "by_seed"} for row in rows],
        "gains": [
            {"loops": loops, "measured": mean.value, "low": mean.low, "high": mean.high, "published": PUBLISHED.get(loops)}
            for loops, mean in means.items()
            if mean is not None
        ],
        "plots": _gain_plots(rows, gains),
    }
    seconds = seconds_of([found])
    return [_neutral(gains, means, found, seconds), _gain(gains, means, found, seconds, detail)]


def _best(found: Sample, rule: str, loops: int) -> dict[str, Any] | None:
    """The rate with the lowest mean loss, of those at which most seeds ended, with its losses by seed."""
    by_rate: dict[float, dict[int, float]] = {}
    for run, loss in found.used:
        if (run.axes["rule"], run.axes["loops"]) == (rule, loops):
            by_rate.setdefault(float(run.axes["rate"]), {})[run.cell.seed] = loss.value
    if not by_rate:
        return None
    most = max(map(len, by_rate.values()))
    means = {rate: sum(losses.values()) / most for rate, losses in by_rate.items() if len(losses) == most}
    rate = min(means, key=lambda one: means[one])
    losses = by_rate[rate]
    return {
        "rule": rule,
        "loops": loops,
        "rate": rate,
        "rates": len(by_rate),
        "at_edge": rate in (min(by_rate), max(by_rate)),
        "loss": means[rate],
        "lowest": min(losses.values()),
        "highest": max(losses.values()),
        "seeds": most,
        "by_seed": losses,
    }


def _mean(values: Iterable[float]) -> Estimate | None:
    estimates = [Estimate(value) for value in values]
    return mean_of(estimates) if estimates else None


def _neutral(
    gains: dict[int, dict[int, float]],
    means: dict[int, Estimate | None],
    found: Sample,
    seconds: float,
) -> Finding:
    mean = means.get(1)
    verdict = judge(mean, -TOLERANCE, TOLERANCE)
    return NEUTRAL.finding(
        verdict,
        f"Standard less DeepLoop at R = 1: {mean or 'not measured'} nats.{_needed(verdict, gains.get(1), TOLERANCE)}"
        f"{found.absent()}",
        estimate=mean,
        seeds=len(gains.get(1, {})),
        seconds=seconds,
        detail={"gains": [{"seed": seed, "gain": gain} for seed, gain in gains.get(1, {}).items()]},
    )


def _gain(
    gains: dict[int, dict[int, float]],
    means: dict[int, Estimate | None],
    found: Sample,
    seconds: float,
    detail: dict[str, Any],
) -> Finding:
    looped = {loops: mean for loops, mean in means.items() if loops > 1}
    slope = _mean(_slopes(gains))
    parts = [judge(mean, low=0.0) for mean in (*looped.values(), slope)]
    verdict = all_of(parts)
    spoken = ", ".join(
        f"R = {loops} {mean or 'not measured'}" + (f" ({PUBLISHED[loops]:.4f} published)" if loops in PUBLISHED else "")
        for loops, mean in looped.items()
    )
    last = max(looped, default=0)
    needed = _needed(verdict, gains.get(last), PUBLISHED.get(last, PUBLISHED[3]))
    return GAIN.finding(
        verdict,
        f"Gain in nats: {spoken or 'not measured'}; slope over R {slope or 'not measured'}.{needed}{found.absent()}",
        estimate=slope,
        seeds=min((len(by_seed) for by_seed in gains.values()), default=0),
        seconds=seconds,
        detail=detail,
    )


def _slopes(gains: dict[int, dict[int, float]]) -> list[float]:
    """Of each seed that has every R."""
    seeds = set.intersection(*(set(by_seed) for by_seed in gains.values())) if gains else set()
    slopes = []
    for seed in sorted(seeds):
        try:
            slopes.append(fit_line(list(gains), [by_seed[seed] for by_seed in gains.values()]).slope)
        except Undecided:
            continue
    return slopes


def _needed(verdict: Verdict, gains: dict[int, float] | None, effect: float) -> str:
    """A sentence on what it would take to decide; empty where it is decided."""
    if verdict is not Verdict.UNDECIDED:
        return ""
    if gains is None or len(gains) < 2:
        return " At least 2 seeds are needed to know their spread."
    mean = sum(gains.values()) / len(gains)
    spread = math.sqrt(sum((gain - mean) ** 2 for gain in gains.values()) / (len(gains) - 1))
    return (
        f" The difference spreads by {spread:.3g} nats over seeds (standard deviation): about {seeds_needed(spread, effect)} "
        f"seeds bring its interval to +-{effect:g}, the size of what was published; {len(gains)} were run."
    )


def seeds_needed(spread: float, effect: float) -> int:
    """Fewest seeds at which the 95 % interval of a mean with this standard deviation reaches no farther than `effect`."""
    seeds = max(2, math.ceil((1.96 * spread / effect) ** 2))
    while student_quantile(0.95, seeds - 1) * spread / math.sqrt(seeds) > effect:
        seeds += 1
    return seeds


def _gain_plots(rows: list[dict[str, Any]], gains: dict[int, dict[int, float]]) -> list[XY]:
    losses = []
    for rule in ("standard", "deeploop"):
        if own := [row for row in rows if row["rule"] == rule]:
            x, loss, low, high = ([row[name] for row in own] for name in ("loops", "loss", "lowest", "highest"))
            losses.append(Series(f"{rule}, lowest to highest seed", x, loss, low, high))
    plots = [XY("Losses at the best rate", "loops R", "held-out loss (nats)", losses)] if losses else []
    if any(gains.values()):
        here = mean_series("here", {loops: list(by_seed.values()) for loops, by_seed in gains.items() if by_seed})
        published = Series("published, GPT-2 small [N]", list(PUBLISHED), list(PUBLISHED.values()), style="points")
        plots.append(XY("Gain of DeepLoop", "loops R", "standard less DeepLoop (nats)", [here, published], [Mark("y", 0.0, "0")]))
    return plots
