"""When a row may stop looping: what a probe measured about it, and the rules a request may ask for.

`rule` is the published one, T* = ceil(n / v_hat) (arXiv 2607.20594), plus a burn-in measured on held-out words. `fixed`
stops after a given number of loops; `calibrated` after T* and a margin that was tested (see `loopcore.calibration`). These
three know the exit beforehand and cost nothing to check. The others watch the row:
`converged` and `cosine` its state, `entropy`, `kl` and `argmax_stable` its prediction, and these three pay a readout at
every check. A row is judged by the worst of its own valid positions, never by its batch-mates.

Importing this module loads no torch: a scheduler plans with it, and only the two residual functions touch tensors.
Shapes: T loops, B rows, N positions (BOS left out), D width, V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from loopcore.calibration import Calibration, calibrated_loops
from loopcore.errors import InputError, Undecided
from loopcore.specs.halting import HaltingSpec

if TYPE_CHECKING:
    from torch import Tensor

    from loopcore.instruments.speed import Speed

__all__ = [
    "BURN_IN_TOLERANCE",
    "BurnIn",
    "Halting",
    "HaltingProfile",
    "Plan",
    "Watch",
    "default_max_loops",
    "logits_residual",
    "measure_burn_in",
    "measure_halting",
    "planned_loops",
    "state_residual",
]

PROFILE_VERSION = 2  # 1 had no calibration, and is read still
BURN_IN_TOLERANCE = 0.005  # token accuracy that a burn-in may leave below the best over all loops watched
STATE_RULES = frozenset({"converged", "cosine"})
LOGITS_RULES = frozenset({"entropy", "kl", "argmax_stable"})
_TINY = 1e-12  # keeps a relative change of a zero state finite


def _loops_for(length: int, v: float) -> int:
    # n / v is asked of quotients such as 12 / 0.8 = 15.000000000000002: an error of rounding is not a loop.
    return max(1, math.ceil(length / v - 1e-9))


@dataclass(frozen=True)
class HaltingProfile:
    """What a probe measured about when a model is ready, and a model version carries. JSON through `to_json`, `from_json`."""

    v: float
    """Speed in positions per loop."""
    v_low: float
    v_high: float
    burn_in: int
    """Loops on top of ceil(n / v)."""
    lengths: tuple[int, int]
    """Shortest and longest word length the curves hold for. A causal model's prefixes are words themselves: (1, n)."""
    accuracy_TN: tuple[tuple[float, ...], ...]
    """Token accuracy of words of length i + 1 after loop t + 1: the mean over the first i + 1 positions."""
    exact_TN: tuple[tuple[float, ...], ...]
    """Share of words of length i + 1 that are right at every position after loop t + 1."""
    words: int
    """Held-out words behind the curves."""
    r2: float = 1.0
    """Fit quality of v."""
    best_loops: int = 0
    """Loops with the best token accuracy at the longest length."""
    within_tolerance: bool = True
    """Whether T* at the longest length comes within `BURN_IN_TOLERANCE` of that best."""
    calibration: Calibration | None = None
    """What `calibrated:eps` halts by."""
    version: int = PROFILE_VERSION

    def __post_init__(self) -> None:
        if not (self.v > 0.0 and math.isfinite(self.v)):
            raise InputError(f"a halting profile needs a speed above 0 positions per loop, got {self.v}")
        if self.burn_in < 0:
            raise InputError(f"a burn-in is a number of loops on top of n / v, got {self.burn_in}")

    @property
    def accuracy_by_loops(self) -> tuple[float, ...]:
        """Token accuracy after loop t + 1 at the longest measured length."""
        return tuple(row[self.lengths[1] - 1] for row in self.accuracy_TN)

    @property
    def watched(self) -> int:
        """Loops the curves reach."""
        return len(self.accuracy_TN)

    def planned_loops(self, length: int) -> int:
        """T* = ceil(n / v) + burn-in, for any length: past the measured ones it is the law that is trusted."""
        return _loops_for(length, self.v) + self.burn_in

    def covers(self, length: int) -> bool:
        """Whether words of this length were measured."""
        return self.lengths[0] <= length <= self.lengths[1]

    def expected_accuracy(self, length: int, loops: int, *, exact: bool = False) -> float | None:
        """Measured accuracy (of tokens, or of whole words) after `loops` loops; None where nothing was measured."""
        if not self.covers(length) or not 1 <= loops <= self.watched:
            return None
        return (self.exact_TN if exact else self.accuracy_TN)[loops - 1][length - 1]

    def loops_for_accuracy(self, length: int, floor: float) -> int | None:
        """The fewest loops after which token accuracy was measured at `floor` or above; None where it never was."""
        if not self.covers(length):
            return None
        return next((t for t, row in enumerate(self.accuracy_TN, 1) if row[length - 1] >= floor), None)

    def to_json(self) -> dict[str, Any]:
        """JSON-compatible data; accuracies to four decimals, which is finer than their error."""
        content = asdict(self) | {"lengths": list(self.lengths)}
        for name in ("accuracy_TN", "exact_TN"):
            content[name] = [[round(value, 4) for value in row] for row in getattr(self, name)]
        return content

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> HaltingProfile:
        """The inverse of `to_json`. Raises InputError for another version and for missing or unknown fields."""
        version = content.get("version")
        if version == 1:
            content = content | {"calibration": None, "version": PROFILE_VERSION}
        elif version != PROFILE_VERSION:
            raise InputError(
                f"expected a halting profile of version {PROFILE_VERSION}, got version {version!r}; probe the run again with "
                f"this Loopcore, or update it"
            )
        wrong = {field.name for field in fields(cls)} ^ content.keys()
        if wrong:
            raise InputError(f"a halting profile with missing or unknown fields: {', '.join(sorted(wrong))}; probe the run again")
        known: dict[str, Any] = content | {"lengths": tuple(content["lengths"])}
        for name in ("accuracy_TN", "exact_TN"):
            known[name] = tuple(tuple(row) for row in content[name])
        if known["calibration"] is not None:
            known["calibration"] = Calibration.from_json(known["calibration"])
        return cls(**known)


def planned_loops(length: int, profile: HaltingProfile) -> int:
    """T* = ceil(n / v) + burn-in."""
    return profile.planned_loops(length)


def default_max_loops(profile: HaltingProfile | None) -> Callable[[int], int]:
    """Most loops for a length where nobody names any [?]: T* and a half (overthinking starts near 2 T), or 2 n + 8 unmeasured."""
    if profile is None:
        return lambda length: 2 * length + 8
    return lambda length: math.ceil(1.5 * profile.planned_loops(length)) + 1


@dataclass(frozen=True)
class BurnIn:
    """What `measure_burn_in` found, at the longest length asked for."""

    burn_in: int
    loops: int
    """ceil(n / v) + burn_in."""
    accuracy: float
    """Token accuracy there."""
    best_loops: int
    best_accuracy: float
    within_tolerance: bool
    """False where no loop from ceil(n / v) on comes near the best one: v is then too slow, or the model overthinks at once."""
    accuracy_T: tuple[float, ...]


def measure_burn_in(
    correct_TBN: Tensor, v: float, lengths: int | Sequence[int] | None = None, *, tolerance: float = BURN_IN_TOLERANCE
) -> BurnIn:
    """The smallest b for which token accuracy at ceil(n / v) + b is within `tolerance` of the best over all loops watched.

    `lengths` are prefixes of the words to measure at (of a causal model, whose prefixes are words): the largest b of them
    all is taken. Empty: the whole words alone. Where overthinking leaves no loop from ceil(n / v) on within tolerance,
    the best of those stands for the best of all and `within_tolerance` is False. Raises Undecided where ceil(n / v)
    was not watched.
    """
    longest = correct_TBN.shape[2]
    if lengths is None or isinstance(lengths, int):
        lengths = (lengths or longest,)
    found = [_burn_in_at(_token_accuracy(correct_TBN, length), length, v, tolerance) for length in sorted(lengths)]
    burn_in = max(one.burn_in for one in found)
    last = found[-1]
    loops = min(last.loops - last.burn_in + burn_in, len(last.accuracy_T))
    within = last.best_accuracy - last.accuracy_T[loops - 1] <= tolerance
    return BurnIn(burn_in, loops, last.accuracy_T[loops - 1], last.best_loops, last.best_accuracy, within, last.accuracy_T)


def _token_accuracy(correct_TBN: Tensor, length: int) -> tuple[float, ...]:
    return tuple(float(correct_BN[:, :length].double().mean()) for correct_BN in correct_TBN)


def _burn_in_at(accuracy_T: tuple[float, ...], length: int, v: float, tolerance: float) -> BurnIn:
    base = _loops_for(length, v)
    if base > len(accuracy_T):
        raise Undecided(
            f"words of length {length} need ceil({length} / {v:.3g}) = {base} loops and {len(accuracy_T)} were watched; "
            f"raise loops_factor"
        )
    best = max(accuracy_T)
    from_base = accuracy_T[base - 1 :]
    # Where the best loop came before ceil(n / v), what follows is compared with its own best: noise must not buy loops.
    burn_in = next(b for b, accuracy in enumerate(from_base) if max(from_base) - accuracy <= tolerance)
    reached = from_base[burn_in]
    return BurnIn(burn_in, base + burn_in, reached, accuracy_T.index(best) + 1, best, best - reached <= tolerance, accuracy_T)


def measure_halting(
    correct_TBN: Tensor,
    speed: Speed,
    *,
    causal: bool,
    calibration: Calibration | None = None,
    tolerance: float = BURN_IN_TOLERANCE,
) -> HaltingProfile:
    """The profile of a model from `correct_by_loop` and its speed; `calibration` is of other words, over the fixed budget.

    Raises Undecided where ceil(n / v) was not watched.
    """
    from loopcore.instruments.accuracy import exact_by_prefix

    loops, words, length = correct_TBN.shape
    lengths = range(1, length + 1) if causal else (length,)
    found = measure_burn_in(correct_TBN, speed.v, lengths, tolerance=tolerance)
    by_prefix = [_token_accuracy(correct_TBN, prefix) for prefix in range(1, length + 1)]
    return HaltingProfile(
        v=speed.v,
        v_low=speed.v if speed.low is None else speed.low,
        v_high=speed.v if speed.high is None else speed.high,
        burn_in=found.burn_in,
        lengths=(lengths[0], length),
        accuracy_TN=tuple(tuple(curve_T[t] for curve_T in by_prefix) for t in range(loops)),
        exact_TN=tuple(tuple(row) for row in exact_by_prefix(correct_TBN).tolist()),
        words=words,
        r2=speed.r2,
        best_loops=found.best_loops,
        within_tolerance=found.within_tolerance,
        calibration=calibration,
    )


@dataclass(frozen=True)
class Plan:
    """What is known of a row's exit before its first loop."""

    known_exit: int | None
    """Loops after which it leaves whatever happens; None for rules that watch the row."""
    min_loops: int
    max_loops: int
    reason: str
    """Why it leaves at `known_exit`: the rule's name, or `max_loops` where that bound comes first."""


class Halting:
    """A rule ready to be applied: its spec, the model's profile, and the most loops that are allowed for a length."""

    def __init__(
        self, spec: HaltingSpec, profile: HaltingProfile | None = None, *, allowed: Callable[[int], int] | None = None
    ) -> None:
        """Raises InputError where `rule` is asked of a model that was never probed."""
        if spec.kind == "rule" and profile is None:
            raise InputError(
                "the rule 'rule' needs a measured speed and this model has none; probe its run and register it with that probe, "
                "or ask for fixed:T or converged"
            )
        self.spec = spec
        self.profile = profile
        self.allowed = allowed or default_max_loops(profile)

    @property
    def needs_logits(self) -> bool:
        """Whether every check pays for a readout."""
        return self.spec.kind in LOGITS_RULES

    @property
    def needs_states(self) -> bool:
        """Whether a check looks at the states before this one."""
        return self.spec.kind in STATE_RULES

    def plan(self, length: int) -> Plan:
        """Bounds and, for rules that do not watch, the exit. Raises InputError for a demand above what is allowed for the length,
        and for an eps that cannot be promised."""
        spec, most = self.spec, self.allowed(length)
        calibrated = None if spec.eps is None else calibrated_loops(self.profile, length, spec.eps)
        for name, asked in (("fixed", spec.loops), ("calibrated", calibrated), ("min_loops", spec.min_loops)):
            if asked is not None and asked > most:
                raise InputError(
                    f"{name} asks for {asked} loops, at most {most} are allowed for a word of length {length}; ask for fewer"
                )
        max_loops = min(most, spec.max_loops or most)
        if spec.kind == "fixed":
            wanted = spec.loops
        elif spec.kind == "rule":
            assert self.profile is not None
            wanted = self.profile.planned_loops(length)
        elif spec.kind == "calibrated":
            wanted = calibrated
        else:
            return Plan(None, spec.min_loops, max_loops, spec.kind)
        assert wanted is not None
        wanted = max(wanted, spec.min_loops)
        return Plan(min(wanted, max_loops), spec.min_loops, max_loops, spec.kind if wanted <= max_loops else "max_loops")

    def watch(self) -> Watch | None:
        """A fresh memory for one row, or None where the exit is known."""
        return Watch(self.spec) if self.needs_logits or self.needs_states else None


class Watch:
    """One row's memory of its checks: when the next is due, and whether a residual ends the row."""

    def __init__(self, spec: HaltingSpec) -> None:
        threshold = spec.effective_threshold
        assert threshold is not None, f"{spec.kind} does not watch"
        self.spec, self.threshold = spec, threshold
        self.counts = spec.kind == "argmax_stable"
        self.compares = spec.kind in LOGITS_RULES  # with the check before: the first one can end nothing
        history = math.ceil(threshold) if self.counts else int(self.compares)
        self.first = spec.min_loops - history * spec.check_every
        self.checks = 0
        self.quiet = 0

    def due(self, loop: int) -> bool:
        """Whether the row is checked after its loop `loop` (from 1): at multiples of check_every, as early as min_loops needs."""
        return loop % self.spec.check_every == 0 and loop >= self.first

    def judge(self, loop: int, residual: float) -> bool:
        """Takes the residual of a due check; True ends the row."""
        first, self.checks = self.checks == 0, self.checks + 1
        if first and self.compares:
            return False
        if self.counts:
            self.quiet = self.quiet + 1 if residual == 0 else 0
            return self.quiet >= self.threshold and loop >= self.spec.min_loops
        return residual < self.threshold and loop >= self.spec.min_loops


def state_residual(kind: str, h_BND: Tensor, before_BND: Tensor, before2_BND: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """residual_B of the rules that watch the state, from it and the two before it; the worst valid position speaks for the row.

    `converged`: the larger of |step| / |h| and |step - step before| / |h|, so that slow steady motion and a step that only
    turns both count as moving. `cosine`: 1 - cos(h, h before). A pre-norm word model trained on its last loop alone has no
    fixed point: its solved states drift on by about .2 a loop, so that it never meets the default of .03, and .5 ends it near T*.
    """
    h_BND, before_BND = h_BND.float(), before_BND.float()
    size_BN = before_BND.norm(dim=-1).clamp_min(_TINY)
    if kind == "cosine":
        worst_BN = 1.0 - (h_BND * before_BND).sum(-1) / (size_BN * h_BND.norm(dim=-1).clamp_min(_TINY))
    else:
        assert kind == "converged", kind
        step_BND = h_BND - before_BND
        turn_BND = step_BND - (before_BND - before2_BND.float())
        worst_BN = step_BND.norm(dim=-1).maximum(turn_BND.norm(dim=-1)) / size_BN
    return _worst(worst_BN, valid_BN)


def logits_residual(kind: str, logits_BNV: Tensor, before_BNV: Tensor, valid_BN: Tensor | None = None) -> Tensor:
    """residual_B of the rules that watch the prediction, from it and the one at the check before; the worst position counts.

    `entropy`: change of the entropy, in nats. `kl`: KL(now || before), in nats. `argmax_stable`: positions whose argmax changed.
    """
    if kind == "argmax_stable":
        changed_BN = logits_BNV.argmax(-1) != before_BNV.argmax(-1)
        return (changed_BN if valid_BN is None else changed_BN & valid_BN).sum(-1).float()
    now_BNV, before_BNV = logits_BNV.float().log_softmax(-1), before_BNV.float().log_softmax(-1)
    if kind == "kl":
        return _worst((now_BNV.exp() * (now_BNV - before_BNV)).sum(-1), valid_BN)
    assert kind == "entropy", kind
    entropies = [-(log_p.exp() * log_p).sum(-1) for log_p in (now_BNV, before_BNV)]
    return _worst((entropies[0] - entropies[1]).abs(), valid_BN)


def _worst(residual_BN: Tensor, valid_BN: Tensor | None) -> Tensor:
    return (residual_BN if valid_BN is None else residual_BN.masked_fill(~valid_BN, 0.0)).amax(-1)
