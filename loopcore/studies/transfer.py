"""Does the best learning rate stay where it is when loops are added? The arithmetic of a transfer study (PAPERS.md, loop-muP).

For each rule and loop count T: the learning rate with the lowest loss, how many octaves (factors of two) that is from the
optimum at the base T, and what keeping the base's learning rate costs in loss, each with its interval over seeds. A trial that
diverged is a point without a loss; a learning rate at which a seed diverged is not one to recommend, so it is never an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from loopcore.specs import TrialPoint, TuneSpec
from loopcore.specs.model import Rule
from loopcore.studies.transfer_curve import Curve, Seeds, bootstrap
from loopcore.studies.verdicts import Estimate

__all__ = ["TransferRow", "Trial", "curve_of", "drift", "rates_of", "transfer_table"]


@dataclass(frozen=True)
class Trial:
    """What one trial came to."""

    point: TrialPoint
    loss: float | None
    """Final validation loss; None, or not finite, where it diverged."""

    @property
    def diverged(self) -> bool:
        return self.loss is None or not math.isfinite(self.loss)


@dataclass(frozen=True)
class TransferRow:
    """One rule at one loop count. None where the trials do not say; ends of intervals are None where too few seeds ran."""

    rule: str
    loops: int
    best_log2_lr: float | None
    """The learning rate tried that has the lowest loss, averaged over seeds, as log2."""
    best_loss: float | None
    """That loss."""
    low: float | None
    """Lowest loss of a seed there."""
    high: float | None
    optimum_log2_lr: float | None
    """The minimum of a parabola through that point and its neighbours; None where the grid does not bracket it."""
    optimum_low: float | None
    optimum_high: float | None
    drift_octaves: float | None
    """Octaves from the optimum at the base T: above 0 where more loops want a larger learning rate."""
    drift_low: float | None
    drift_high: float | None
    regret: float | None
    """Loss at the base's best learning rate less the best loss; None where a seed diverged there or the base has none."""
    regret_low: float | None
    regret_high: float | None
    bracketed: bool
    """Whether the lowest loss has learning rates on both sides, and not only diverged ones."""
    open_because: str | None
    """Why it is not bracketed."""
    base_diverged: bool
    """A seed diverged at the base's best learning rate: it does not transfer at all."""
    diverged: int
    """Trials that diverged."""
    trials: int
    losses: tuple[tuple[float, float | None], ...]
    """(log2 lr, mean loss over seeds, None where one diverged), by learning rate."""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return asdict(self) | {"losses": [list(pair) for pair in self.losses]}


def rates_of(spec: TuneSpec, found: Mapping[TrialPoint, Trial], rule: Rule, loops: int) -> dict[float, list[Trial]]:
    """log2 lr, rising, to the trials there, on the grid or off it, in the order of the seeds. What has not run is left out."""
    off_grid = {point.log2_lr for point in found if point.loops == loops}
    by_rate: dict[float, list[Trial]] = {}
    for rate in sorted({*spec.log2_lrs, *off_grid}):
        points = (TrialPoint(rule=rule, loops=loops, log2_lr=rate, seed=seed) for seed in spec.seeds)
        if ran := [found[work] for work in map(spec.stands_for, points) if work in found]:
            by_rate[rate] = ran
    return by_rate


def curve_of(spec: TuneSpec, found: Mapping[TrialPoint, Trial], rule: Rule, loops: int) -> Curve:
    """Learning rates all of whose seeds have run."""
    by_rate = {rate: ran for rate, ran in rates_of(spec, found, rule, loops).items() if len(ran) == len(spec.seeds)}
    losses_RS = tuple(tuple(None if trial.diverged else trial.loss for trial in ran) for ran in by_rate.values())
    return Curve(tuple(by_rate), losses_RS)


def drift(curve: Curve, base: Curve) -> Estimate | None:
    """Octaves from the optimum of `base` to that of `curve`, seeds drawn together: a seed has the same batches in both.

    None where either is not bracketed. No interval where there is no parabola: a grid point has no spread to see.
    """
    if curve.open_because or base.open_because:
        return None
    if curve == base:
        return Estimate(0.0, 0.0, 0.0)
    found = bootstrap(lambda seeds: _between(base.optimum(seeds), curve.optimum(seeds)), curve.seeds)
    return found if found is None or (curve.fitted and base.fitted) else Estimate(found.value)


def transfer_table(spec: TuneSpec, trials: Iterable[Trial]) -> list[TransferRow]:
    """A row a rule and loop count, in the spec's order. Trials that stand for several points count for each of them.

    Points without a trial (a study that was stopped) are left out; a row without any has no optimum.
    """
    found = {trial.point: trial for trial in trials}
    rows: list[TransferRow] = []
    for rule in spec.rules:
        base = curve_of(spec, found, rule, spec.loops[0])
        for loops in spec.loops:
            ran = [trial for some in rates_of(spec, found, rule, loops).values() for trial in some]
            rows.append(_row(rule, loops, curve_of(spec, found, rule, loops), base, ran))
    return rows


def _row(rule: str, loops: int, curve: Curve, base: Curve, ran: list[Trial]) -> TransferRow:
    at, theirs, open_because = curve.lowest(), base.lowest(), curve.open_because
    seeds = [] if at is None else [loss for loss in curve.losses_RS[at] if loss is not None]
    optimum = None if open_because else bootstrap(curve.optimum, curve.seeds)
    if optimum is not None and not curve.fitted:
        optimum = Estimate(optimum.value)
    moved = drift(curve, base)

    def regret_of(seeds: Seeds | None) -> float | None:
        return curve.regret(base, seeds)

    regret = bootstrap(regret_of, curve.seeds, least=0.0)
    at_base = None if theirs is None else base.rates_R[theirs]
    return TransferRow(
        rule=rule,
        loops=loops,
        best_log2_lr=None if at is None else curve.rates_R[at],
        best_loss=None if at is None else curve.mean(at),
        low=min(seeds, default=None),
        high=max(seeds, default=None),
        **_ends("optimum", optimum, value="optimum_log2_lr"),
        **_ends("drift", moved, value="drift_octaves"),
        **_ends("regret", regret, value="regret"),
        bracketed=open_because is None,
        open_because=open_because,
        base_diverged=at_base in curve.rates_R and curve.mean(curve.rates_R.index(at_base)) is None,
        diverged=sum(trial.diverged for trial in ran),
        trials=len(ran),
        losses=tuple((rate, curve.mean(number)) for number, rate in enumerate(curve.rates_R)),
    )


def _ends(name: str, found: Estimate | None, *, value: str) -> dict[str, float | None]:
    if found is None:
        found_value = low = high = None
    else:
        found_value, low, high = found.value, found.low, found.high
    return {value: found_value, f"{name}_low": low, f"{name}_high": high}


def _between(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else b - a
