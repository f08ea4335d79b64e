"""1c, 1d, 1e: more loops than ever trained rescue late positions, T* = ceil(n / v_hat) says how many, and too many hurt
(arXiv 2607.20594). Beyond the paper: a training option that takes the hurt away.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import loopcore.studies.recipes as recipes
from loopcore.errors import Undecided
from loopcore.studies.base import Ask, Cell, Claim, Finding, Study
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run, Sample, sample
from loopcore.studies.verdicts import Estimate, Verdict, all_of, difference, judge, mean_of

__all__ = ["HALTING"]

NAME = "halting"

RESCUED = 0.5  # most of the late errors: more than half of them
RESCUE_AT = 1.25  # length over N: RECIPES found rescue clean there, partial at 1.5, gone at 2
NOTHING_LATE = 0.98  # last-position accuracy at T_train from which there is nothing left to rescue (the promotion line)
GAP = 0.02  # token accuracy below the best: what the contract's own promotion line leaves open
NEAR = 2.0  # loops: T* counts as right within 2 loops of the best [?]
PLATEAU = 0.005  # token accuracy within which loops count as equally good (halting.BURN_IN_TOLERANCE)
HURT = 0.05  # token accuracy lost from T* to 3 T*: the line for "removed" [?]
FAR = 3  # times T*
KEPT = 0.95  # share of calibrations that have to keep their promise
SAME_SPEED = (0.9, 1.1)  # v with the remedy over v without: unchanged within 10 % [?]

RESCUE = Claim(
    id="1c",
    title="Rescue",
    statement="More loops than ever trained rescue late positions at fixed length.",
    published="n = 32, demand 2: late accuracy .05 at 8 loops, .99 at 16-17 [R]: .99 of the late errors put right",
    unit=f"share of last-position errors at T_train put right at T*, length {RESCUE_AT:g} N",
    rule=f"the 95 % interval of the mean share lies above {RESCUED}",
)
RULE = Claim(
    id="1d",
    title="Halting rule",
    statement="T* = ceil(n / v_hat) is where to stop.",
    published="the rule itself [A]; no figure at hand",
    unit="token accuracy lost at T* against the best loop count",
    rule=f"the 95 % intervals lie below {GAP} for the accuracy lost and below {NEAR:g} loops for the distance to the best "
    f"(within {PLATEAU} of it)",
)
OVERTHINKING = Claim(
    id="1e",
    title="Overthinking",
    statement="Too many loops hurt.",
    published=".99 falls to .17-.63 at 32 loops [R]",
    unit=f"token accuracy lost from T* to {FAR} T*, length N",
    rule=f"the 95 % interval of the mean loss lies above {HURT}",
)


def work(ask: Ask) -> Iterator[Cell]:
    groups = ask.groups_or(("S3",), ("S3", "A4"), ("S3", "A4"))
    for demand in (1.0,) if ask.scale == "smoke" else (0.5, 1.0, 2.0):
        for group in groups:
            for seed in ask.seed_range():
                probes = [recipes.SPEED, recipes.FAR]
                if demand == 1.0 and group == groups[0] and ask.scale != "gpu":
                    probes.append(recipes.CALIBRATION)
                yield recipes.free(ask, NAME, group, seed, demand, probes)
    for seed in ask.seed_range():
        yield recipes.with_extra_loops(ask, NAME, groups[0], seed, (recipes.SPEED, recipes.FAR))


def summary(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME, family="free")
    return [_rescue(runs), _rule(runs), _overthinking(runs, measured.runs(NAME, family="extra"))]


def _late(run: Run) -> int:
    return recipes.far_lengths(run.length)[1]


def _rescued(run: Run) -> Estimate:
    run.require_learned()
    length = _late(run)
    before = run.accuracy_at(length, run.loops, "last")
    after = run.accuracy_at(length, run.planned_loops(length), "last")
    if before.value >= NOTHING_LATE:
        raise Undecided(f"nothing is left to rescue at length {length}: the last position is right in {before.value:.3f}")
    open_ = 1.0 - before.value
    # One run's interval takes the error left at T_train as it is: what is uncertain is how much of it is put right.
    low, high = (None if end is None else (end - before.value) / open_ for end in (after.low, after.high))
    return Estimate((after.value - before.value) / open_, low, high)


def _rescue(runs: list[Run]) -> Finding:
    found = sample(runs, _rescued)
    if not found.used:
        return RESCUE.finding(Verdict.UNDECIDED, f"No run to judge by.{found.absent()}", seconds=found.seconds)
    share = mean_of(found.estimates)
    pairs = [
        (run.accuracy_at(_late(run), run.loops, "last").value, run.accuracy_at(_late(run), _planned(run), "last").value)
        for run in found.runs
    ]
    before, after = (sum(values) / len(pairs) for values in zip(*pairs, strict=True))
    rows = [
        {"cell": run.cell.name, "length": _late(run), "T_train": run.loops, "T_star": _planned(run), "before": a, "after": b}
        | {"share": estimate.value}
        for (run, estimate), (a, b) in zip(found.used, pairs, strict=True)
    ]
    return RESCUE.finding(
        judge(share, low=RESCUED),
        f"At {RESCUE_AT:g} N the last position goes from {before:.2f} at T_train to {after:.2f} at T*; of the errors {share} are "
        f"put right, over {len(found.used)} runs.{found.absent()}",
        estimate=share,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={"rows": rows, "plots": _curves(found.runs, lambda run: _late(run), ("token", "last"))},
    )


def _planned(run: Run) -> int:
    return run.planned_loops(_late(run))


def _lost(run: Run) -> Estimate:
    """Token accuracy below the best, the mean of lengths N and 1.25 N."""
    run.require_learned()
    return mean_of([_lost_at(run, length)[0] for length in (run.length, _late(run))])


def _lost_at(run: Run, length: int) -> tuple[Estimate, int]:
    """(accuracy below the best, loops to the nearest loop count within PLATEAU of the best)."""
    curve = run.accuracy(length)
    planned = run.planned_loops(length)
    at = run.accuracy_at(length, planned)
    best = max(estimate.value for estimate in curve.values())
    reach = min(abs(loop - planned) for loop, estimate in curve.items() if estimate.value >= best - PLATEAU)
    low, high = (None if end is None else max(0.0, best - end) for end in (at.high, at.low))
    return Estimate(best - at.value, low, high), reach


def _distance(run: Run) -> Estimate:
    run.require_learned()
    reaches = [_lost_at(run, length)[1] for length in (run.length, _late(run))]
    return Estimate(sum(reaches) / len(reaches))


def _saved(run: Run) -> float:
    """Loops that the rule saves on words of every length up to N, against T*(N) for each of them."""
    return 1.0 - sum(run.planned_loops(n) for n in range(1, run.length + 1)) / (run.length * run.planned_loops(run.length))


def _kept(run: Run) -> Estimate:
    run.require_learned()
    return Estimate(run.calibration("kept")[0])


def _calibrated(runs: list[Run]) -> dict[str, Any]:
    """Whether `calibrated:0.01` keeps its promise, and at how many loops (not in the paper)."""
    asked = [run for run in runs if any(probe.name == recipes.CALIBRATION for probe in run.cell.probes)]
    if not asked:
        return {"verdict": Verdict.UNDECIDED, "reason": "Nothing was calibrated at this scale.", "kept": None, "draws": 0}
    found = sample(asked, _kept)
    if not found.used:
        return {"verdict": Verdict.UNDECIDED, "reason": f"Nothing was calibrated.{found.absent()}", "kept": None, "draws": 0}
    counts = [{of: run.calibration(of)[0] for of in ("kept", "draws", "loops", "fixed_loops")} for run in found.runs]
    rows = [
        {"cell": run.cell.name, **count, "worst_risk": max(run.calibration("risk")), "margins": run.calibration("margin")}
        for run, count in zip(found.runs, counts, strict=True)
    ]
    kept, draws = (int(sum(count[of] for count in counts)) for of in ("kept", "draws"))
    loops, fixed = (sum(count[of] for count in counts) / len(counts) for of in ("loops", "fixed_loops"))
    good = all(count["kept"] >= KEPT * count["draws"] and count["loops"] < count["fixed_loops"] for count in counts)
    return {
        "verdict": Verdict.SHOWN if good else Verdict.NOT_SHOWN,
        "reason": f"calibrated:0.01 keeps its promise in {kept} of {draws} calibrations, with {loops:.1f} loops a word, the mean "
        f"of all lengths to N, where the fixed budget has {fixed:.1f}.{found.absent()}",
        "kept": kept,
        "draws": draws,
        "loops": loops,
        "fixed_loops": fixed,
        "seeds": found.seeds,
        "rows": rows,
    }


def _rule(runs: list[Run]) -> Finding:
    found, calibrated = sample(runs, _lost), _calibrated(runs)
    if not found.used:
        reason = f"No run to judge by.{found.absent()} {calibrated['reason']}"
        return RULE.finding(Verdict.UNDECIDED, reason, seconds=found.seconds, detail={"calibrated": calibrated})
    lost, distance = mean_of(found.estimates), mean_of([_distance(run) for run in found.runs])
    saved = sum(map(_saved, found.runs)) / len(found.runs)
    rows: list[dict[str, Any]] = []
    for run in found.runs:
        for length in (run.length, _late(run)):
            gap, reach = _lost_at(run, length)
            rows.append(
                {
                    "cell": run.cell.name,
                    "length": length,
                    "T_star": run.planned_loops(length),
                    "lost": gap.value,
                    "loops_off": reach,
                }
            )
    return RULE.finding(
        all_of([judge(lost, high=GAP), judge(distance, high=NEAR)]),
        f"At T* token accuracy is {lost} below the best, and T* is {distance} loops from it, at N and {RESCUE_AT:g} N over "
        f"{len(found.used)} runs; words of all lengths to N take {saved:.0%} fewer loops than T*(N) for each.{found.absent()} "
        f"{calibrated['reason']}",
        estimate=lost,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={"rows": rows, "loops_off": vars(distance), "loops_saved": saved, "calibrated": calibrated},
    )


def _drop(run: Run) -> Estimate:
    run.require_learned()
    planned = run.planned_loops(run.length)
    return difference(run.accuracy_at(run.length, planned), run.accuracy_at(run.length, FAR * planned))


def _overthinking(runs: list[Run], remedied: list[Run]) -> Finding:
    found = sample(runs, _drop)
    remedy = _remedy(sample(remedied, _drop), [run for run in runs if run.axes["demand"] == 1.0])
    if not found.used:
        reason = f"No run to judge by.{found.absent()}"
        return OVERTHINKING.finding(Verdict.UNDECIDED, reason, seconds=found.seconds, detail={"remedy": remedy})
    drop = mean_of(found.estimates)
    rows = [_drop_row(run, estimate) for run, estimate in found.used]
    return OVERTHINKING.finding(
        judge(drop, low=HURT),
        f"From T* to {FAR} T* token accuracy falls by {drop} over {len(found.used)} runs.{found.absent()} {remedy['reason']}",
        estimate=drop,
        seeds=found.seeds,
        seconds=found.seconds,
        detail={
            "rows": rows,
            "remedy": remedy,
            "plots": _curves([*found.runs, *remedied], lambda run: run.length, ("token",)),
        },
    )


def _drop_row(run: Run, drop: Estimate) -> dict[str, Any]:
    planned = run.planned_loops(run.length)
    return {
        "cell": run.cell.name,
        "T_star": planned,
        "far": FAR * planned,
        "lost": drop.value,
        "low": drop.low,
        "high": drop.high,
    }


def _remedy(found: Sample, control: list[Run]) -> dict[str, Any]:
    """Training with random extra loops: what is lost by FAR T*, and what it does to the speed (not in the paper)."""
    title = "With loops drawn from [T, 1.5 T] in training"
    if not found.used:
        verdict, reason = Verdict.UNDECIDED, f"{title}: no run to judge by.{found.absent()}"
        return {"verdict": verdict, "reason": reason, "measured": None, "low": None, "high": None, "seeds": 0}
    drop = mean_of(found.estimates)
    group = found.runs[0].axes["group"]
    plain = sample([run for run in control if run.axes["group"] == group], lambda run: run.speed())
    ratio = None
    if plain.used:
        base = mean_of(plain.estimates).value
        v = mean_of([run.speed() for run in found.runs])
        # The control's own spread is in 1b; here it only sets the scale.
        ratio = Estimate(v.value / base, *(None if end is None else end / base for end in (v.low, v.high)))
    verdict = all_of([judge(drop, high=HURT), judge(ratio, *SAME_SPEED)])
    speed = "its speed has no control to be compared with" if ratio is None else f"v is {ratio} times the control's"
    return {
        "verdict": verdict,
        "reason": f"{title} it falls by {drop}, and {speed}.{found.absent()}",
        "measured": drop.value,
        "low": drop.low,
        "high": drop.high,
        "speed_ratio": None if ratio is None else vars(ratio),
        "seeds": found.seeds,
        "rows": [_drop_row(run, estimate) for run, estimate in found.used],
    }


def _curves(runs: list[Run], length_of: Any, kinds: tuple[str, ...]) -> list[XY]:
    """Accuracy against test loops of the first seed of each kind of run, T_train and T* drawn."""
    plots: list[XY] = []
    seen: set[tuple[Any, ...]] = set()
    for run in runs:
        kind = (run.axes["family"], run.axes["group"], run.axes["loops"])
        if kind in seen:
            continue
        length = length_of(run)
        try:
            series = []
            for of in kinds:
                curve = sorted(run.accuracy(length, of).items())
                series.append(
                    Series(
                        {"token": "all positions", "last": "last position"}[of],
                        [loop for loop, _ in curve],
                        [estimate.value for _, estimate in curve],
                        [estimate.low for _, estimate in curve],
                        [estimate.high for _, estimate in curve],
                    )
                )
            marks = [Mark("x", run.loops, "T_train"), Mark("x", run.planned_loops(length), "T*")]
        except Undecided:
            continue
        seen.add(kind)
        plots.append(XY(f"Words of length {length}: {run.cell.name}", "test loops", "accuracy", series, marks))
    return plots


HALTING = Study(NAME, "More loops, how many, and too many", (RESCUE, RULE, OVERTHINKING), work, summary)
