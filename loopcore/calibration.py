"""How much earlier than the fixed budget a model may stop, with a promise about what that loses.

A word is lost at an exit if every position of it is right after the fixed budget of loops and not every one at the exit. The
loss is 0 or 1, so that its count over words is binomial and the test exact, and its mean bounds the accuracy that stopping
early costs: words which only the exit gets right are not set against those it loses.

A margin says how many loops an exit lies after T*(n), never past the budget. Margins are tested one after the other from
the largest down, and the smallest before the first one that fails is taken: fixed-sequence testing, as in Learn then Test
(arXiv 2110.01052), which keeps the chance of any false promise at DELTA however many margins there are. It asks that the
order be fixed before the words are seen: v_hat and the burn-in in T*(n) come from other words. At a margin every length is
tested by itself and the worst decides, so the promise holds for words of each length; no correction is due for that either,
since the null hypothesis (some length loses more) is rejected only where each of its parts is.

Shapes: T loops of the budget, B words, N positions (BOS left out).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopcore.errors import InputError, LengthError, Undecided

if TYPE_CHECKING:
    from torch import Tensor

    from loopcore.halting import HaltingProfile

__all__ = [
    "DELTA",
    "Calibration",
    "Promise",
    "calibrated_loops",
    "count_lost",
    "measure_promise",
    "most_lost",
    "p_value",
    "planned",
    "words_needed",
]

DELTA = 0.05  # chance of a promise that is not kept: 95 % confidence


@dataclass(frozen=True)
class Calibration:
    """Words lost by length and exit, counted on held-out words of their own. All that a margin for any eps is read from."""

    words: int
    lost_TN: tuple[tuple[int, ...], ...]
    """Of the words of length i + 1, those that are right after all T loops and not right after loop t + 1."""

    def __post_init__(self) -> None:
        counts = [count for row in self.lost_TN for count in row]
        even = len({len(row) for row in self.lost_TN}) == 1
        if not (even and counts and self.words >= 1 and all(0 <= count <= self.words for count in counts)):
            raise InputError(
                "expected the calibration of a profile to count lost words, a row a loop and a column a length, each from 0 to "
                "the number of words; probe the run again"
            )

    @property
    def budget(self) -> int:
        """Loops of the fixed budget that exits are compared with."""
        return len(self.lost_TN)

    def exit(self, planned: int, margin: int) -> int:
        """Loops at which a word leaves: `margin` after those planned, at least one and at most the budget."""
        return max(1, min(planned + margin, self.budget))

    def lost(self, length: int, loops: int) -> int:
        """Words of `length` lost by leaving after `loops` loops."""
        return self.lost_TN[loops - 1][length - 1]

    def margin(self, planned_N: Mapping[int, int], eps: float) -> int:
        """The smallest margin that loses under a share `eps` of the words of every length in `planned_N`, with confidence 95 %.

        `planned_N` is T*(n) by length n. Raises Undecided where these words are too few to promise that of the budget itself.
        """
        allowed = most_lost(self.words, eps)
        if allowed is None:
            raise Undecided(
                f"{self.words} words are too few to promise that under {eps:g} of them are lost with {1 - DELTA:.0%} confidence: "
                f"it takes {words_needed(eps)}, and more where some are lost"
            )
        certified = self.budget - min(planned_N.values())  # every length at the budget, where nothing is lost
        for margin in range(certified - 1, -max(planned_N.values()), -1):
            if any(self.lost(n, self.exit(loops, margin)) > allowed for n, loops in planned_N.items()):
                break
            certified = margin
        return certified

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> Calibration:
        """The inverse of dataclasses.asdict. Raises InputError for counts that cannot be."""
        return cls(content["words"], tuple(tuple(row) for row in content["lost_TN"]))


def planned(profile: HaltingProfile) -> dict[int, int]:
    """T*(n) by length n, of the lengths that were measured."""
    first, last = profile.lengths
    return {n: profile.planned_loops(n) for n in range(first, last + 1)}


def calibrated_loops(profile: HaltingProfile | None, length: int, eps: float) -> int:
    """Loops of `calibrated:eps` for a word. Raises InputError where nothing was counted or eps cannot be promised, LengthError
    for a length that was not counted."""
    calibration = None if profile is None else profile.calibration
    if profile is None or calibration is None:
        raise InputError(
            f"calibrated:{eps:g} needs a count of the words that stopping early loses, and this model has none; probe its run "
            "and register it with that probe, or ask for fixed:T or converged"
        )
    if not profile.covers(length):
        first, last = profile.lengths
        raise LengthError(
            f"calibrated:{eps:g} holds for the lengths it was counted on, {first} to {last}, and the word has {length} symbols; "
            "ask for rule, fixed:T or converged"
        )
    planned_N = planned(profile)
    try:
        return calibration.exit(planned_N[length], calibration.margin(planned_N, eps))
    except Undecided as reason:
        raise InputError(
            f"calibrated:{eps:g} cannot be promised: {reason}; ask for a larger eps, or probe the run again with more "
            "calibration_words and register it with that probe"
        ) from None


def p_value(lost: int, words: int, eps: float) -> float:
    """P(at most `lost` of `words` words) where each is lost with probability `eps`: that of the hypothesis that the risk is
    eps or more. Exact, from the binomial distribution."""
    _check_eps(eps)
    yes, no, all_ = math.log(eps), math.log1p(-eps), math.lgamma(words + 1)
    return min(
        1.0,
        math.fsum(
            math.exp(all_ - math.lgamma(k + 1) - math.lgamma(words - k + 1) + k * yes + (words - k) * no)
            for k in range(min(lost, words) + 1)
        ),
    )


@functools.lru_cache(maxsize=256)
def most_lost(words: int, eps: float) -> int | None:
    """The most lost words for which a risk of `eps` or more is still rejected at DELTA; None where none at all are too many."""
    if words < words_needed(eps):
        return None
    low, high = 0, words  # rejected at low, not at high: p is 1 there
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if p_value(middle, words, eps) <= DELTA else (low, middle)
    return low


def words_needed(eps: float) -> int:
    """Words that reject a risk of `eps` if none of them is lost: (1 - eps)^n <= DELTA."""
    _check_eps(eps)
    return math.ceil(math.log(DELTA) / math.log1p(-eps))


def _check_eps(eps: float) -> None:
    if not 0.0 < eps < 1.0:
        raise InputError(f"eps is the share of words that may be lost, between 0 and 1, got {eps:g}")


def count_lost(correct_TBN: Tensor) -> Calibration:
    """From `correct_by_loop` over the budget's loops; a prefix stands for a word of its length, as in a causal model."""
    import torch

    kept_BN = correct_TBN[-1].long().cumprod(-1).bool()
    lost_TN = [(kept_BN & ~correct_BN.long().cumprod(-1).bool()).sum(0) for correct_BN in correct_TBN]
    return Calibration(correct_TBN.shape[1], tuple(tuple(row) for row in torch.stack(lost_TN).tolist()))


@dataclass(frozen=True)
class Promise:
    """What became of a promise over independent calibrations, D of them."""

    eps: float
    margins_D: tuple[int, ...]
    risks_D: tuple[float, ...]
    """Share of other held-out words that the margin loses, at the length that loses most."""
    loops_D: tuple[float, ...]
    """Loops that words of the calibrated lengths take, the mean of the lengths."""
    fixed_loops: int
    """Loops of the fixed budget."""

    @property
    def kept(self) -> int:
        """Calibrations whose margin loses no more than was promised."""
        return sum(risk <= self.eps for risk in self.risks_D)

    @property
    def loops(self) -> float:
        return sum(self.loops_D) / len(self.loops_D)

    def rows(self, axes: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
        """One row a figure, for the registry."""

        def row(value: float, **at: Any) -> dict[str, Any]:
            place = {**at, "eps": self.eps, **(axes or {})}
            return {"instrument": "calibration", "axes": place, "value": float(value), "low": None, "high": None}

        whole = {"kept": self.kept, "draws": len(self.risks_D), "loops": self.loops, "fixed_loops": self.fixed_loops}
        by_draw = {"margin": self.margins_D, "risk": self.risks_D}
        return [row(value, of=of) for of, value in whole.items()] + [
            row(value, of=of, draw=draw) for of, values_D in by_draw.items() for draw, value in enumerate(values_D)
        ]


def measure_promise(drawn: Sequence[Calibration], truth: Calibration, planned_N: Mapping[int, int], eps: float) -> Promise:
    """Lets each calibration choose its margin, and measures on the words of `truth` what that margin loses.

    Raises Undecided where a calibration has too few words to promise anything.
    """
    margins = [calibration.margin(planned_N, eps) for calibration in drawn]
    exits = [{n: truth.exit(loops, margin) for n, loops in planned_N.items()} for margin in margins]
    return Promise(
        eps=eps,
        margins_D=tuple(margins),
        risks_D=tuple(max(truth.lost(n, loops) for n, loops in exit_.items()) / truth.words for exit_ in exits),
        loops_D=tuple(sum(exit_.values()) / len(exit_) for exit_ in exits),
        fixed_loops=truth.budget,
    )
