"""Does the best learning rate stay where it is when loops are added? The arithmetic of a transfer study (PAPERS.md, loop-muP).

For each rule and loop count T: where on the grid the loss is lowest, how many octaves (factors of two) that is from the
optimum at the base T, and what keeping the base's learning rate costs in loss. A trial that diverged is a point without a
loss; a learning rate at which a seed diverged is not one to recommend, so it is never an optimum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from loopcore.specs import TuneSpec
from loopcore.specs.tune import TrialPoint

__all__ = ["TransferRow", "Trial", "transfer_table"]

TIE = 1e-12  # losses nearer than this are equal, and the smaller learning rate is taken


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
    """One rule at one loop count. None where the trials do not say."""

    rule: str
    loops: int
    optimum_log2_lr: float | None
    """log2 of the learning rate with the lowest loss, averaged over seeds."""
    best_loss: float | None
    """That loss."""
    low: float | None
    """Lowest loss of a seed there."""
    high: float | None
    drift_octaves: float | None
    """Octaves from the optimum at the base T: above 0 where more loops want a larger learning rate."""
    regret: float | None
    """Loss at the base's optimum less the best loss; None where a seed diverged there or the base has no optimum."""
    at_edge: bool
    """The optimum is at an end of the grid, so the true one may lie beyond."""
    base_diverged: bool
    """A seed diverged at the base's optimum: the learning rate does not transfer at all."""
    diverged: int
    """Trials that diverged."""
    trials: int
    losses: tuple[tuple[float, float | None], ...]
    """(log2 lr, mean loss over seeds, None where one diverged), by learning rate."""

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data."""
        return asdict(self) | {"losses": [list(pair) for pair in self.losses]}


def transfer_table(spec: TuneSpec, trials: Iterable[Trial]) -> list[TransferRow]:
    """A row a rule and loop count, in the spec's order. Trials that stand for several points count for each of them.

    Points without a trial (a study that was stopped) are left out; a row without any has no optimum.
    """
    found = {trial.point: trial for trial in trials}
    rows: list[TransferRow] = []
    for rule in spec.rules:
        base: float | None = None
        for loops in spec.loops:
            by_rate: dict[float, list[Trial]] = {}
            for log2_lr in sorted(spec.log2_lrs):
                points = [TrialPoint(rule=rule, loops=loops, log2_lr=log2_lr, seed=seed) for seed in spec.seeds]
                ran = [found[work] for point in points if (work := spec.stands_for(point)) in found]
                if ran:
                    by_rate[log2_lr] = ran
            row = _row(rule, loops, by_rate, base, is_base=loops == spec.loops[0], ends=(min(spec.log2_lrs), max(spec.log2_lrs)))
            if loops == spec.loops[0]:
                base = row.optimum_log2_lr
            rows.append(row)
    return rows


def _row(
    rule: str,
    loops: int,
    by_rate: dict[float, list[Trial]],
    base: float | None,
    *,
    is_base: bool,
    ends: tuple[float, float],
) -> TransferRow:
    means = {rate: _mean(trials) for rate, trials in by_rate.items()}
    decided = {rate: mean for rate, mean in means.items() if mean is not None}
    optimum, best = None, None
    for rate, mean in decided.items():
        if best is None or mean < best - TIE:
            optimum, best = rate, mean
    if is_base:
        base = optimum
    at_base = None if base is None else decided.get(base)
    seeds = [] if optimum is None else [trial.loss for trial in by_rate[optimum] if trial.loss is not None]
    return TransferRow(
        rule=rule,
        loops=loops,
        optimum_log2_lr=optimum,
        best_loss=best,
        low=min(seeds, default=None),
        high=max(seeds, default=None),
        drift_octaves=None if optimum is None or base is None else optimum - base,
        regret=None if at_base is None or best is None else at_base - best,
        at_edge=optimum in ends,
        base_diverged=base is not None and base in means and means[base] is None,
        diverged=sum(trial.diverged for trials in by_rate.values() for trial in trials),
        trials=sum(len(trials) for trials in by_rate.values()),
        losses=tuple(means.items()),
    )


def _mean(trials: list[Trial]) -> float | None:
    """Mean loss over seeds; None where one of them diverged."""
    losses = [trial.loss for trial in trials if trial.loss is not None and not trial.diverged]
    return math.fsum(losses) / len(losses) if len(losses) == len(trials) else None
