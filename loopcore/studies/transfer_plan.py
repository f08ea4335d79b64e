"""Which trials a learning-rate study needs: its grid, then further rates until every curve's minimum is bracketed.

The plan goes in rounds, and a round depends on nothing but the losses of those before it. So a study that was killed and is
taken up again, or one whose trials end in another order, comes to the same trials.
"""

from __future__ import annotations

from collections.abc import Mapping

from loopcore.specs import TrialPoint, TuneSpec
from loopcore.specs.model import Rule
from loopcore.specs.tune import HIGHEST_LOG2_LR, LOWEST_LOG2_LR
from loopcore.studies.transfer import Trial, curve_of

__all__ = ["planned"]

STEP = 1.0  # octaves from a minimum within which it has to have a neighbour on each side


def planned(spec: TuneSpec, done: Mapping[TrialPoint, Trial]) -> tuple[TrialPoint, ...]:
    """All trials that are known to be needed, those that are done included: the rounds that are over, and the one to be run."""
    rates: dict[tuple[Rule, int], set[float]] = {(rule, loops): set(spec.log2_lrs) for rule in spec.rules for loops in spec.loops}
    points = dict.fromkeys(spec.points())
    while all(point in done for point in points):
        known = {point: done[point] for point in points}
        fresh = len(points)
        for (rule, loops), tried in rates.items():
            for rate in _wanted(spec, known, rule, loops, tried):
                trials = dict.fromkeys(
                    spec.stands_for(TrialPoint(rule=rule, loops=loops, log2_lr=rate, seed=seed)) for seed in spec.seeds
                )
                # Whole rates only: one without all of its seeds has no mean.
                if len(points | trials) <= spec.trials_at_most:
                    points |= trials
                    tried.add(rate)
        if len(points) == fresh:
            break
    return tuple(points)


def _wanted(spec: TuneSpec, known: Mapping[TrialPoint, Trial], rule: Rule, loops: int, tried: set[float]) -> list[float]:
    """Rates to be tried next on one curve, in rising order."""
    curve = curve_of(spec, known, rule, loops)
    at = curve.lowest()
    if at is None:  # everything diverged: that is what too large a rate does
        wanted = {min(tried) - STEP}
    else:
        middle = curve.rates_R[at]
        wanted = set()
        if not any(middle - STEP <= rate < middle for rate in tried):
            wanted.add(middle - STEP)
        if not any(middle < rate <= middle + STEP for rate in tried):
            wanted.add(middle + STEP)
        # The regret of keeping the base's optimum is measured, so it has to be tried here too.
        base = curve_of(spec, known, rule, spec.loops[0])
        if (theirs := base.lowest()) is not None:
            wanted.add(base.rates_R[theirs])
    return sorted(rate for rate in wanted - tried if LOWEST_LOG2_LR <= rate <= HIGHEST_LOG2_LR)
