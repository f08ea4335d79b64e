"""When a served row may stop looping."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from loopcore.specs.base import PositiveInt, Probability, Spec

__all__ = ["HALTING_DEFAULTS", "HaltingSpec", "parse_halting"]

# Smallest change that still counts as moving, per rule; for argmax_stable: checks in a row without a change.
HALTING_DEFAULTS = {"converged": 0.03, "entropy": 1e-3, "kl": 1e-3, "cosine": 1e-3, "argmax_stable": 5.0}

HaltingKind = Literal["rule", "fixed", "calibrated", "converged", "entropy", "kl", "cosine", "argmax_stable"]


class HaltingSpec(Spec):
    """A halting rule and its bounds. A rule looks at one row's own valid positions, never at its batch-mates."""

    kind: HaltingKind = "rule"
    """`rule`: T* = ceil(n / v_hat) + burn-in, as measured by a probe (arXiv 2607.20594). `fixed`: `loops` loops.
    `calibrated`: T* and the smallest margin that loses under a share `eps` of the words that the loops of the training contract
    get right, with confidence 95 % (arXiv 2110.01052), as counted by a probe; for words of the lengths that it counted.
    `converged`: relative change of the row's state (and of its step) under `threshold`. `entropy`, `kl`, `cosine`: change of the
    prediction's entropy, divergence from the loop before, or 1 - cosine of the state with the loop before, under `threshold`.
    `argmax_stable`: prediction unchanged for `threshold` checks. `entropy`, `kl` and `argmax_stable` pay for a readout at each
    check."""
    loops: PositiveInt | None = None
    """Loop count of `fixed`."""
    eps: Probability | None = None
    """Share of words that `calibrated` may lose."""
    threshold: float | None = Field(default=None, gt=0.0)
    """Empty: converged .03, entropy 1e-3, kl 1e-3, cosine 1e-3, argmax_stable 5."""
    min_loops: PositiveInt = 1
    max_loops: PositiveInt | None = None
    """Never more loops than this. Empty: what the service allows for the word's length."""
    check_every: PositiveInt = 1
    """Loops between checks of a rule that watches the row."""

    @model_validator(mode="after")
    def _consistent(self) -> HaltingSpec:
        if (self.kind == "fixed") != (self.loops is not None):
            raise ValueError("the rule 'fixed' takes loops, and only that rule: write fixed:T, for example fixed:12")
        if (self.kind == "calibrated") != (self.eps is not None):
            raise ValueError("the rule 'calibrated' takes eps, and only that rule: write calibrated:eps, such as calibrated:0.01")
        if self.max_loops is not None and self.max_loops < self.min_loops:
            raise ValueError(f"max_loops must be at least min_loops, got {self.max_loops} and {self.min_loops}")
        return self

    @property
    def watches(self) -> bool:
        """Whether the rule looks at the word as it loops; the others know the exit beforehand."""
        return self.kind in HALTING_DEFAULTS

    @property
    def effective_threshold(self) -> float | None:
        """`threshold`, or the rule's default; None for rules that have none."""
        return self.threshold if self.threshold is not None else HALTING_DEFAULTS.get(self.kind)


def parse_halting(text: str) -> HaltingSpec:
    """The short form of a rule: `rule`, `converged`, `converged:0.05`, `fixed:12`, `calibrated:0.01`.

    Raises pydantic's ValidationError (a ValueError) for an unknown rule or a value that is no number.
    """
    kind, _, value = text.partition(":")
    fields = {"kind": kind}
    if value:
        fields[{"fixed": "loops", "calibrated": "eps"}.get(kind, "threshold")] = value
    return HaltingSpec.model_validate(fields)
