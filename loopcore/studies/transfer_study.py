"""Does a learning rate tuned at one loop stay best at more? Three scaling rules beside each other (PAPERS.md, Loop-muP).

The work is cells like any other study's, not one `tune` job: each run is a job of its own that the queue places wherever there
is room, a killed worker costs one run, and runs are shared by key. The price is that the learning rates are chosen beforehand,
from the optima in RECIPES with at least an octave to spare on each side. A curve whose lowest loss is at an end of them is told
as not bracketed and gives no optimum; `loop tune`, which plans in rounds, is what extends a grid. The arithmetic is the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from loopcore.specs import ContractSpec, ModelSpec, OptimizerSpec, ResourceSpec, TextTask, TrainSpec, TrialPoint, TuneSpec
from loopcore.specs.model import Rule, ScalingSpec
from loopcore.studies.base import Ask, Cell, Claim, Finding, Scale, Study
from loopcore.studies.drawings import XY, Mark, Series
from loopcore.studies.measured import Measured, Run
from loopcore.studies.transfer import TransferRow, Trial, curve_of, drift, rates_of, transfer_table
from loopcore.studies.transfer_curve import Curve, Seeds, bootstrap
from loopcore.studies.verdicts import Estimate, Verdict, all_of, judge

__all__ = ["TRANSFER"]

NAME = "transfer"

RULES: dict[Scale, tuple[Rule, ...]] = {
    "smoke": ("standard", "loop_mup"),
    "cpu": ("standard", "depth_mup", "loop_mup"),
    "gpu": ("standard", "depth_mup", "loop_mup"),
}
LOOPS: dict[Scale, tuple[int, ...]] = {"smoke": (1, 4), "cpu": (1, 2, 4, 8), "gpu": (1, 2, 4, 8)}
STEPS: dict[Scale, int] = {"smoke": 100, "cpu": 300, "gpu": 4000}
# log2 of the base rates. In RECIPES the optima are -4 to -6 under standard scaling and -3 to -5 under the others.
STANDARD: dict[Scale, range] = {"smoke": range(-6, -2), "cpu": range(-8, -2), "gpu": range(-10, -1)}
SCALED: dict[Scale, range] = {"smoke": range(-6, -2), "cpu": range(-7, -1), "gpu": range(-10, -1)}
SECONDS = (4.57, 4.43)  # of one thread for 300 steps: a + b T through the 9 s at T = 1 and the 40 s at T = 8 of RECIPES

HALF = 0.5  # octaves: half of the grid's step. An optimum that moves less has not drifted, by the eye of this grid [?]
ABOVE_0 = math.nextafter(0.0, 1.0)  # equal is not less: curves that agree in every draw show no difference
STAYS = 1.0  # octaves: "within one octave" of RECIPES

DRIFTS = Claim(
    id="M1",
    title="Standard scaling drifts",
    statement="Without a multiplier the best learning rate falls as loops are added.",
    published="optimum drifts [N]; two octaves from T = 1 to T = 8, one seed [M]",
    unit="octaves from the base T to the most loops",
    rule=f"the 95 % interval of the drift lies below -{HALF} octaves",
)
STAY = Claim(
    id="M2",
    title="Loop-muP transfers",
    statement="With residual branches multiplied by 1/T the best learning rate does not depend on T.",
    published="the base learning rate stays best for T up to 8 [A]; within an octave, one seed [M]",
    unit="octaves, the loop count that drifts most",
    rule=f"at every T the 95 % interval of the drift lies in [-{STAYS:g}, {STAYS:g}] octaves",
)
LESS = Claim(
    id="M3",
    title="Loop-muP drifts less than standard scaling",
    statement="The optimum moves less under loop_mup than under standard scaling.",
    published="optimum drifts under standard scaling and stays under loop_mup [A]",
    unit="octaves of drift, standard less loop_mup, at the most loops",
    rule="the 95 % interval of |drift| under standard less |drift| under loop_mup lies above 0",
)
REGRET = Claim(
    id="M4",
    title="Keeping the base's rate costs less",
    statement="Training at the base's best learning rate costs less loss under loop_mup than under standard scaling.",
    published="the base learning rate stays best [A]; all arms had the same optimum in an independent run [R]",
    unit="nats of regret, standard less loop_mup, at the most loops",
    rule="the 95 % interval of the difference of regrets lies above 0",
)
OVERCOUNTS = Claim(
    id="M5",
    title="Counting loops as depth drifts more",
    statement="depth_mup, which takes T loops for T distinct layers, moves the optimum more than loop_mup.",
    published="over-counts loops [N]; one seed decides nothing between the two [M]",
    unit="octaves of drift, depth_mup less loop_mup, at the most loops",
    rule="the 95 % interval of |drift| under depth_mup less |drift| under loop_mup lies above 0",
)
BETTER = Claim(
    id="M6",
    title="1/T trains better than no multiplier",
    statement="At its own best learning rate loop_mup ends at a lower loss than standard scaling.",
    published="4.5801 unscaled, 4.5579 at T^-1/2, 4.5465 at 1/T (d 384, T = 4) [R]",
    unit="nats, best loss of standard less that of loop_mup, at the most loops",
    rule="the 95 % interval of the difference of best losses lies above 0",
)

CLAIMS = (DRIFTS, STAY, LESS, REGRET, OVERCOUNTS, BETTER)


def work(ask: Ask) -> Iterator[Cell]:
    """The grid: rules x loop counts x learning rates x seeds, seed by seed, the shared runs of the base first."""
    for seed in ask.seed_range(smoke=2, cpu=3, gpu=5):
        for loops in LOOPS[ask.scale]:
            for rule in RULES[ask.scale]:
                # What the rules share at T = 1 has the rates of both.
                rates = sorted({rate for one in RULES[ask.scale] if one == rule or loops == 1 for rate in _rates(ask.scale, one)})
                spec = _spec(_train(ask.scale), (rule,) if loops > 1 else RULES[ask.scale], (1, loops), rates, (seed,))
                for rate in rates:
                    point = spec.stands_for(TrialPoint(rule=rule, loops=loops, log2_lr=rate, seed=seed))
                    yield _cell(ask.scale, spec, point)


def _rates(scale: Scale, rule: Rule) -> list[float]:
    return [float(rate) for rate in (STANDARD if rule == "standard" else SCALED)[scale]]


def _train(scale: Scale) -> TrainSpec:
    """RECIPES' text run; at gpu a model of 4 times the width on 4 times the context, tuned at its own width."""
    on_gpu = scale == "gpu"
    return TrainSpec(
        task=TextTask(),
        model=ModelSpec(
            width=256 if on_gpu else 64, heads=4, positions="rope", bos=False, injection="none", readout_init="normal"
        ),
        contract=ContractSpec(lengths=(256 if on_gpu else 64,)),
        scaling=ScalingSpec(base_width=256 if on_gpu else 64),
        optimizer=OptimizerSpec(betas=(0.9, 0.95), weight_decay=0.0, warmup=200 if on_gpu else 20, decay="linear"),
        batch=64 if on_gpu else 32,
        steps=STEPS[scale],
        evaluate_every=STEPS[scale],
        checkpoint_every=STEPS[scale],
    )


def _spec(
    train: TrainSpec, rules: tuple[Rule, ...], loops: tuple[int, ...], rates: list[float], seeds: tuple[int, ...]
) -> TuneSpec:
    return TuneSpec(train=train, rules=rules, loops=tuple(dict.fromkeys(loops)), log2_lrs=tuple(rates), seeds=seeds)


def _cell(scale: Scale, spec: TuneSpec, point: TrialPoint) -> Cell:
    on_gpu = scale == "gpu"
    return Cell(
        name=f"transfer/{scale}/{point.rule}/T{point.loops}/lr{point.log2_lr:g}/s{point.seed}",
        train=spec.trial(point),
        axes={**point.resolved(), "family": NAME, "scale": scale},
        roles=(NAME,),
        resources=ResourceSpec(cpus=1.0, gpus=1 / 4 if on_gpu else 0.0),
        expected_s=None if on_gpu else (SECONDS[0] + SECONDS[1] * point.loops) * STEPS[scale] / 300,
    )


class _Found:
    """The study's runs as curves."""

    def __init__(self, runs: list[Run]) -> None:
        self.runs = runs
        points = [_point(run) for run in runs]
        self.spec = _spec(
            runs[0].cell.train,
            tuple(dict.fromkeys(point.rule for point in points)),
            tuple(sorted({point.loops for point in points})),
            sorted({point.log2_lr for point in points}),
            tuple(sorted({point.seed for point in points})),
        )
        self.trials = {trial.point: trial for run in runs if (trial := _trial(run)) is not None}
        self._curves = {
            (rule, loops): curve_of(self.spec, self.trials, rule, loops) for rule in self.spec.rules for loops in self.spec.loops
        }
        self.rows = transfer_table(self.spec, self.trials.values())
        self.base, self.most = self.spec.loops[0], self.spec.loops[-1]
        self.seconds = sum(run.result.seconds for run in runs)
        self.seeds = len({point.seed for point in self.trials})

    def curve(self, rule: Rule, loops: int) -> Curve:
        return self._curves[rule, loops]

    def row(self, rule: Rule, loops: int) -> TransferRow:
        return next(row for row in self.rows if (row.rule, row.loops) == (rule, loops))

    def missing(self, *rules: Rule, loops: int | None = None) -> str | None:
        """Why these rules cannot be compared at `loops` (the most loops); None where they can."""
        if absent := [rule for rule in rules if rule not in self.spec.rules]:
            return f"{absent[0]} is not trained at this scale"
        reasons = [
            f"{row.rule} at T = {row.loops}: {row.open_because}"
            for rule in rules
            for row in (self.row(rule, self.base), self.row(rule, loops or self.most))
            if row.open_because
        ]
        return "; ".join(dict.fromkeys(reasons)) or None

    def moved(self, rule: Rule, seeds: Seeds | None) -> float | None:
        """|drift| in octaves at the most loops."""
        here, there = self.curve(rule, self.most).optimum(seeds), self.curve(rule, self.base).optimum(seeds)
        return None if here is None or there is None else abs(here - there)


def _point(run: Run) -> TrialPoint:
    return TrialPoint.model_validate({name: run.axes[name] for name in TrialPoint.model_fields})


def _trial(run: Run) -> Trial | None:
    """None for a run that is not over, or was not evaluated at its end."""
    diverged, loss = run.result.figures.get("outcome") == "diverged", run.result.figures.get("loss")
    if run.result.state != "succeeded" or (loss is None and not diverged):
        return None
    return Trial(_point(run), None if diverged else loss)


def summary(measured: Measured) -> list[Finding]:
    runs = measured.runs(NAME)
    if not runs:
        return [claim.finding(Verdict.UNDECIDED, "No runs were asked for.") for claim in CLAIMS]
    found = _Found(runs)
    return [
        _standard_drifts(found),
        _loop_mup_stays(found),
        _compared(found, LESS, "standard", "loop_mup"),
        _regret(found),
        _compared(found, OVERCOUNTS, "depth_mup", "loop_mup"),
        _better(found),
    ]


def _standard_drifts(found: _Found) -> Finding:
    missing = found.missing("standard")
    moved = None if missing else drift(found.curve("standard", found.most), found.curve("standard", found.base))
    bracketed = sum(row.bracketed for row in found.rows)
    told = f"{bracketed} of {len(found.rows)} minima are bracketed."
    reason = f"No drift: {missing}. {told}" if missing else f"{moved} octaves from T = {found.base} to {found.most}. {told}"
    detail = {"rows": [_shown(row) for row in found.rows], "plots": [_plot(found, rule) for rule in found.spec.rules]}
    return _finding(found, DRIFTS, judge(moved, high=-HALF), reason, moved, detail)


def _loop_mup_stays(found: _Found) -> Finding:
    loops = [one for one in found.spec.loops if one != found.base]
    base = found.curve("loop_mup", found.base)
    moved = {one: drift(found.curve("loop_mup", one), base) for one in loops}
    known = {one: estimate for one, estimate in moved.items() if estimate is not None}
    farthest = max(known.values(), key=lambda one: abs(one.value), default=None)
    missing = "; ".join(why for one in loops if (why := found.missing("loop_mup", loops=one)))
    told = ", ".join(f"{estimate} at T = {one}" for one, estimate in known.items())
    reason = (f"Octaves from T = {found.base}: {told}." if told else "No drift.") + (f" Left out: {missing}." if missing else "")
    return _finding(found, STAY, all_of(judge(one, -STAYS, STAYS) for one in moved.values()), reason, farthest)


def _compared(found: _Found, claim: Claim, more: Rule, less: Rule) -> Finding:
    """|drift| of `more` less that of `less`, seeds drawn together."""
    if missing := found.missing(more, less):
        return _finding(found, claim, Verdict.UNDECIDED, f"No comparison: {missing}.")

    def gap(seeds: Seeds | None) -> float | None:
        a, b = found.moved(more, seeds), found.moved(less, seeds)
        return None if a is None or b is None else a - b

    estimate = bootstrap(gap, len(found.spec.seeds))
    assert estimate is not None, "both minima are bracketed"
    if not all(found.curve(rule, loops).fitted for rule in (more, less) for loops in (found.base, found.most)):
        estimate = Estimate(estimate.value)  # a grid point has no spread to see
    return _finding(found, claim, judge(estimate, low=ABOVE_0), f"{estimate} octaves at T = {found.most}.", estimate)


def _regret(found: _Found) -> Finding:
    standard, scaled = found.row("standard", found.most), found.row("loop_mup", found.most)
    curves = {rule: (found.curve(rule, found.most), found.curve(rule, found.base)) for rule in ("standard", "loop_mup")}

    def gap(seeds: Seeds | None) -> float | None:
        a, b = (curve.regret(base, seeds) for curve, base in curves.values())
        return None if a is None or b is None else a - b

    estimate = bootstrap(gap, len(found.spec.seeds))
    if estimate is None:
        why = [f"under {row.rule} a seed diverged at the base's best rate" for row in (standard, scaled) if row.base_diverged]
        return _finding(found, REGRET, Verdict.UNDECIDED, f"No regret: {'; '.join(why) or 'runs are missing'}.")
    told = ", ".join(f"{row.regret:.4f} under {row.rule}" for row in (standard, scaled) if row.regret is not None)
    return _finding(found, REGRET, judge(estimate, low=ABOVE_0), f"At T = {found.most}: {told}.", estimate)


def _better(found: _Found) -> Finding:
    rows = {rule: found.row(rule, found.most) for rule in found.spec.rules}

    def gap(seeds: Seeds | None) -> float | None:
        curves = [found.curve(rule, found.most) for rule in ("standard", "loop_mup")]
        a, b = (None if (at := curve.lowest(seeds)) is None else curve.mean(at, seeds) for curve in curves)
        return None if a is None or b is None else a - b

    estimate = bootstrap(gap, len(found.spec.seeds))
    told = ", ".join(f"{row.best_loss:.4f} under {rule}" for rule, row in rows.items() if row.best_loss is not None)
    edges = [f"{rule}: {rows[rule].open_because}" for rule in ("standard", "loop_mup") if rows[rule].open_because]
    reason = f"At T = {found.most}: {told or 'no losses'}." + (f" It may go lower ({'; '.join(edges)})." if edges else "")
    # A best loss at the end of a grid is none: the true one may lie beyond it.
    return _finding(found, BETTER, Verdict.UNDECIDED if edges else judge(estimate, low=ABOVE_0), reason, estimate)


def _finding(
    found: _Found,
    claim: Claim,
    verdict: Verdict,
    reason: str,
    estimate: Estimate | None = None,
    detail: dict[str, object] | None = None,
) -> Finding:
    left = len(found.runs) - len(found.trials)
    reason += f" {left} of {len(found.runs)} runs have not ended." if left else ""
    return claim.finding(verdict, reason, estimate=estimate, seeds=found.seeds, seconds=found.seconds, detail=detail)


def _shown(row: TransferRow) -> dict[str, object]:
    return {name: value for name, value in row.to_json().items() if name != "losses"}


def _plot(found: _Found, rule: Rule) -> XY:
    """Loss against log2 of the learning rate, a curve a loop count with its seeds as a band; diverged rates along the top."""
    series: list[Series] = []
    marks: list[Mark] = []
    tops = [loss for row in found.rows for _, loss in row.losses if loss is not None]
    for row in (row for row in found.rows if row.rule == rule and row.losses):
        ran = rates_of(found.spec, found.trials, rule, row.loops)
        kept = {rate: [one.loss for one in ran[rate] if one.loss is not None and not one.diverged] for rate, _ in row.losses}
        rates, means = [rate for rate, _ in row.losses], [loss for _, loss in row.losses]
        low, high = ([end(kept[rate]) if mean is not None else None for rate, mean in row.losses] for end in (min, max))
        series.append(Series(f"T = {row.loops}", rates, means, low, high))
        if fallen := [rate for rate, mean in row.losses if mean is None]:
            series.append(
                Series(f"T = {row.loops}, diverged", fallen, [max(tops, default=math.nan)] * len(fallen), style="points")
            )
        if row.optimum_log2_lr is not None:
            marks.append(Mark("x", row.optimum_log2_lr, f"optimum at T = {row.loops}: {row.optimum_log2_lr:.2f}"))
        elif row.best_log2_lr is not None:
            marks.append(Mark("x", row.best_log2_lr, f"lowest at T = {row.loops}, not bracketed"))
    note = "Lines across are the minima of parabolas through the lowest point and its neighbours; bands are from seed to seed."
    return XY(f"Transfer under {rule}", "log2 of the base learning rate", "held-out loss, nats", series, marks, note=note)


TRANSFER = Study(
    NAME,
    "Does the best learning rate stay when loops are added?",
    CLAIMS,
    work,
    summary,
    takes_groups=False,
)
