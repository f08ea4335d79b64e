"""Loss against the learning rate: where the minimum is, whether the grid brackets it, and how sure that is over seeds.

Shapes: R learning rates of the grid, S seeds. Rates are log2 of the base learning rate, so that a distance is in octaves.

The optimum is the vertex of the parabola through the lowest point of the seed mean and its two neighbours. It lies between the
midpoints to these neighbours, so a fit never leaves what was measured. Intervals are from a bootstrap over seeds: whole seeds
are drawn with replacement, the minimum found and fitted anew in each draw. With three seeds the percentiles of a bootstrap are
the lowest and the highest seed and cover too seldom; its standard error, times Student's quantile and sqrt(S / (S - 1)), gives
for a mean just the usual Student interval, and that is what is used (compare Hesterberg 2015, "What teachers should know about
the bootstrap", on narrowness). One seed has no interval.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from loopcore.statistics import student_quantile
from loopcore.studies.verdicts import Estimate

__all__ = ["Curve", "bootstrap", "draws_of", "vertex"]

TIE = 1e-12  # losses nearer than this are equal, and the smaller learning rate is taken
EXACT_TO = 5  # seeds to which all S^S draws are taken; above, DRAWS of them
DRAWS = 2000

Seeds = Sequence[int]
"""Indices of seeds, each as often as it was drawn."""


@dataclass(frozen=True)
class Curve:
    """One rule at one loop count."""

    rates_R: tuple[float, ...]
    """Ascending, each once."""
    losses_RS: tuple[tuple[float | None, ...], ...]
    """Final losses, None where a run diverged; every rate has all seeds."""

    @property
    def seeds(self) -> int:
        return len(self.losses_RS[0]) if self.losses_RS else 0

    def mean(self, at: int, seeds: Seeds | None = None) -> float | None:
        """Mean loss of rate number `at`; None where a seed diverged, drawn or not: such a rate is not one to recommend."""
        losses_S = [loss for loss in self.losses_RS[at] if loss is not None]
        if not losses_S or len(losses_S) < self.seeds:
            return None
        chosen = losses_S if seeds is None else [losses_S[seed] for seed in seeds]
        return math.fsum(chosen) / len(chosen)

    def lowest(self, seeds: Seeds | None = None) -> int | None:
        """Number of the rate with the lowest mean loss; None where every rate diverged."""
        best, found = math.inf, None
        for at in range(len(self.rates_R)):
            mean = self.mean(at, seeds)
            if mean is not None and mean < best - TIE:
                best, found = mean, at
        return found

    @property
    def open_because(self) -> str | None:
        """Why the grid does not bracket the minimum; None where it does: the lowest mean has rates on both sides, and not only
        diverged ones."""
        at = self.lowest()
        if at is None:
            return "every learning rate diverged" if self.rates_R else "no learning rate has all of its trials"
        lowest = f"the lowest loss is at 2^{self.rates_R[at]:g}"
        if len(self.rates_R) == 1:
            return f"{lowest}, the only learning rate"
        if at == 0:
            return f"{lowest}, the smallest learning rate tried"
        if at == len(self.rates_R) - 1:
            return f"{lowest}, the largest learning rate tried"
        if self.mean(at - 1) is None and self.mean(at + 1) is None:
            return f"{lowest}, and the learning rates on both sides diverged"
        return None

    @property
    def fitted(self) -> bool:
        """Whether there is a parabola: a neighbour that diverged closes the bracket but has no loss to fit."""
        at = self.lowest()
        return at is not None and self._neighbours(at) is not None

    def optimum(self, seeds: Seeds | None = None) -> float | None:
        """log2 of the best learning rate: the parabola's vertex, or the lowest rate of the grid where there is none."""
        at = self.lowest(seeds)
        if at is None:
            return None
        beside = self._neighbours(at, seeds)
        if beside is None:
            return self.rates_R[at]
        middle = self.mean(at, seeds)
        assert middle is not None
        return vertex(self.rates_R[at - 1 : at + 2], (beside[0], middle, beside[1]))

    def regret(self, base: Curve, seeds: Seeds | None = None) -> float | None:
        """Mean loss at the lowest rate of `base` less the lowest mean loss; None where either is not known."""
        at, theirs = self.lowest(seeds), base.lowest(seeds)
        if at is None or theirs is None or base.rates_R[theirs] not in self.rates_R:
            return None
        kept, best = self.mean(self.rates_R.index(base.rates_R[theirs]), seeds), self.mean(at, seeds)
        return None if kept is None or best is None else kept - best

    def _neighbours(self, at: int, seeds: Seeds | None = None) -> tuple[float, float] | None:
        if not 0 < at < len(self.rates_R) - 1:
            return None
        below, above = self.mean(at - 1, seeds), self.mean(at + 1, seeds)
        return None if below is None or above is None else (below, above)


def vertex(x_3: Sequence[float], y_3: Sequence[float]) -> float:
    """x of the lowest point of the parabola through three points whose middle one is no higher than the others."""
    (a, b, c), (ya, yb, yc) = x_3, y_3
    # Newton's form: the slopes of the two chords hold at their midpoints, and the vertex is where the slope is 0. A tie may have
    # left a neighbour lower by a rounding.
    left, right = (b - a) * max(0.0, yc - yb), (c - b) * max(0.0, ya - yb)
    return b if left + right == 0.0 else ((a + b) * left + (b + c) * right) / (2 * (left + right))


@functools.cache
def draws_of(seeds: int) -> tuple[tuple[int, ...], ...]:
    """Draws of S seeds from S with replacement: all of them to EXACT_TO seeds, else DRAWS by a fixed stream."""
    if seeds <= EXACT_TO:
        return tuple(itertools.product(range(seeds), repeat=seeds))
    stream = random.Random(0)  # noqa: S311 - not for secrets
    return tuple(tuple(stream.randrange(seeds) for _ in range(seeds)) for _ in range(DRAWS))


def bootstrap(
    figure: Callable[[Seeds | None], float | None], seeds: int, *, confidence: float = 0.95, least: float = -math.inf
) -> Estimate | None:
    """The figure of all seeds with its interval; `least` is a bound that it cannot pass.

    None where the figure is None; no interval of one seed, and none where a draw leaves the figure unknown.
    """
    value = figure(None)
    if value is None:
        return None
    found = [figure(draw) for draw in draws_of(seeds)] if seeds > 1 else []
    known = [one for one in found if one is not None]
    if not known or len(known) < len(found):
        return Estimate(value)
    mean = math.fsum(known) / len(known)
    error = math.sqrt(math.fsum((one - mean) ** 2 for one in known) / len(known) * seeds / (seeds - 1))
    reach = student_quantile(confidence, seeds - 1) * error
    return Estimate(value, max(least, value - reach), value + reach)
