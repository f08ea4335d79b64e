"""What the instruments of a probe find on one model: rows for the registry, figures, and a reason for what has none.

An instrument that a model or a task has no trace of is undecided with the reason; none of them fails the others.

Shapes: T loops, B words, N positions.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from loopcore.calibration import Calibration, count_lost, measure_promise, planned
from loopcore.contract import Stages
from loopcore.errors import InputError, Undecided
from loopcore.halting import HaltingProfile, measure_halting
from loopcore.instruments import (
    AccuracyByLoop,
    FrontierResult,
    Speed,
    correct_by_loop,
    measure_accuracy,
    measure_cones,
    measure_frontier,
    measure_plateau,
    measure_tail,
    measure_tau,
)
from loopcore.specs import ProbeSpec, TrainSpec
from loopcore.tasks import Task
from workers import scaling
from workers.scaling import Scaled

__all__ = ["Probed", "measure"]

DAMAGED = (1, 2)  # positions, from 0: of the early ones most positions are left behind them
POSITIONS_AT_ONCE = 65_536  # of one batch of words: bounds the memory that long words take
WORDS_AT_ONCE = 256
APART = 2**30  # between the seed of the words that v_hat is measured on and those of calibrations
PROMISED = 0.01  # eps of which rows are kept, and of the instrument calibration
DRAWS = 20  # calibrations of that instrument
TRUTH = 10  # times as many words, to measure what their margins lose

Tell = Callable[[int, int, str], None]


@dataclass
class Probed:
    """What was found so far."""

    length: int
    trained_loops: int
    """T(n) of the contract."""
    watched: int
    """Loops measured; fewer than were asked for where an untied model has no more."""
    accuracy: AccuracyByLoop
    frontier: FrontierResult | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    """Instrument, or instrument and figure joined by a dot, to the reason why it has no value."""


class _Probe:
    """One model under the instruments of one spec."""

    def __init__(self, model: Any, task: Task, train: TrainSpec, spec: ProbeSpec) -> None:
        self.model, self.task, self.train, self.spec = model, task, train, spec
        self.stages = Stages(train.contract)
        self.length = spec.length or train.contract.longest
        self.trained_loops = self.stages.loops_for(self.length)
        self.correct_TBN, clipped = self.correct(self.length)
        self.found = Probed(self.length, self.trained_loops, len(self.correct_TBN), measure_accuracy(self.correct_TBN))
        if clipped:
            self.found.undecided["loops"] = clipped
        self.speed: Speed | None = None
        self.profile: HaltingProfile | None = None
        self.note: Callable[[str], None] = lambda _: None

    @property
    def squares(self) -> bool:
        """Whether a length is the side of a square, whose positions, row by row, are in no order of solving."""
        return getattr(self.task, "grid", 1) == 2

    def batch(self, length: int) -> int:
        positions = length**2 if self.squares else length
        return max(1, min(WORDS_AT_ONCE, POSITIONS_AT_ONCE // positions))

    def correct(self, length: int, *, all_visible: bool = False) -> tuple[Tensor, str | None]:
        """correct_TBN over `loops_factor` T(n) loops, or all that an untied model has: then with a sentence that says so."""
        wanted = max(1, math.ceil(self.spec.loops_factor * self.stages.loops_for(length)))
        limit: int | None = getattr(self.model, "untied_loops", None)
        clipped = None
        if limit is not None and wanted > limit:
            clipped = f"{wanted} loops were to be watched at length {length} and this untied model has weights for {limit}"
        correct_TBN = correct_by_loop(
            self.model,
            self.task,
            words=self.spec.words,
            length=length,
            loops=wanted if limit is None else min(wanted, limit),
            seed=self.spec.seed,
            reveal_per_loop=None if all_visible else self.stages.reveal_per_loop,
            batch=self.batch(length),
        )
        return correct_TBN, clipped

    def lost(self, draw: int, words: int) -> Calibration:
        """Words lost against the fixed budget, over words of draw number `draw`, which no other draw and no instrument has.

        Draws are independent, which is what the bound asks for: of a task with few words two draws may share some.
        """
        budget = max(self.train.contract.most_loops, self.trained_loops)
        limit: int | None = getattr(self.model, "untied_loops", None)
        correct_TBN = correct_by_loop(
            self.model,
            self.task,
            words=words,
            length=self.length,
            loops=budget if limit is None else min(budget, limit),
            seed=(self.spec.seed + APART + draw) % 2**31,
            reveal_per_loop=self.stages.reveal_per_loop,
            batch=self.batch(self.length),
        )
        return count_lost(correct_TBN)

    def at(self, length: int) -> dict[str, int]:
        """The length as an axis: rows that name none are read as those of the contract's longest."""
        return {} if length == self.train.contract.longest else {"length": length}

    def measure(self, tell: Tell) -> Probed:
        found, accuracy = self.found, self.found.accuracy
        at = min(self.trained_loops, found.watched) - 1
        found.rows += accuracy.rows(axes=self.at(self.length))
        found.figures |= {
            "accuracy": accuracy.token_T[at],
            "exact_accuracy": accuracy.exact_T[at],
            "best_loops": accuracy.best_loops,
        }
        named = {
            "frontier": self.frontier,
            "tau": self.tau,
            "halting": self.halting,
            "accuracy": self.lengths,
            "damage": self.damage,
            "tail": self.tail,
            "schedules": self.schedules,
            "calibration": self.calibration,
            "perturbation": functools.partial(self.scaled, scaling.perturbation),
            "kappa": functools.partial(self.scaled, scaling.kappa),
            "growth": functools.partial(self.scaled, scaling.growth),
            "plateau": self.plateau,
        }
        asked = [name for name in named if name in self.spec.instruments]
        for done, name in enumerate(asked, 1):
            self.note = functools.partial(tell, done, len(asked) + 1)
            self.note(name)
            try:
                named[name]()
            except Undecided as reason:
                found.undecided[name] = str(reason)
        if any(not math.isfinite(row["value"]) for row in found.rows):
            found.undecided["not finite"] = "some figures are no numbers: the states are not finite at the loops watched"
            found.rows = [row for row in found.rows if math.isfinite(row["value"])]
        return found

    def frontier(self) -> None:
        self.require_an_order()
        spec, found = self.spec, self.found
        frontier = measure_frontier(
            self.correct_TBN, levels=spec.levels, bootstrap=spec.bootstrap, confidence=spec.confidence, seed=spec.seed
        )
        found.frontier = frontier
        found.rows += frontier.rows()
        found.figures["level"] = frontier.level
        self.speed = frontier.speed
        found.figures |= {"v": self.speed.v, "v_low": self.speed.low, "v_high": self.speed.high, "r2": self.speed.r2}

    def tau(self) -> None:
        self.require_an_order()
        spec, found = self.spec, self.found
        tau = measure_tau(self.correct_TBN, bootstrap=spec.bootstrap, confidence=spec.confidence, seed=spec.seed)
        found.rows += tau.rows()
        found.undecided |= {f"tau.{statistic}": reason for statistic, reason in tau.undecided.items()}
        found.figures |= {
            "solved": tau.solved,
            "tau": {statistic: speed.to_json() for statistic, speed in tau.speeds.items()},
        }

    def halting(self) -> None:
        if self.speed is None:
            raise Undecided("there is no speed to plan loops by: see frontier")
        causal = self.train.model.looks_back_only
        lost = self.lost(0, self.spec.calibration_words)
        self.profile = profile = measure_halting(self.correct_TBN, self.speed, causal=causal, calibration=lost)
        axes = {"length": self.length}
        self.found.rows.append({"instrument": "burn_in", "axes": axes, "value": profile.burn_in, "low": None, "high": None})
        margin: int | None = None
        try:
            margin = lost.margin(planned(profile), PROMISED)
        except Undecided as reason:
            self.found.undecided["halting.margin"] = str(reason)
        else:
            axes = {"eps": PROMISED, **axes}
            self.found.rows.append({"instrument": "margin", "axes": axes, "value": margin, "low": None, "high": None})
        self.found.figures |= {
            "burn_in": profile.burn_in,
            "planned_loops": profile.planned_loops(self.length),
            "margin": margin,
            "within_tolerance": profile.within_tolerance,
            "profile": profile.to_json(),
        }

    def lengths(self) -> None:
        """Accuracy at the other lengths; single positions are left out there, which would be tens of thousands of rows."""
        at_lengths: dict[str, float] = {}
        for length in self.spec.lengths or ():
            accuracy = self.found.accuracy
            if length != self.length:
                self.note(f"accuracy at length {length}")
                try:
                    correct_TBN, clipped = self.correct(length)
                except InputError as reason:
                    self.found.undecided[f"accuracy.{length}"] = str(reason)
                    continue
                if clipped:
                    self.found.undecided[f"accuracy.{length}"] = f"{clipped}: measured up to those"
                accuracy = measure_accuracy(correct_TBN)
                self.found.rows += accuracy.rows(axes=self.at(length), positions=False)
            at = min(self.stages.loops_for(length), len(accuracy.token_T)) - 1
            at_lengths[str(length)] = accuracy.token_T[at]
        if at_lengths:
            self.found.figures["accuracy_at_lengths"] = at_lengths

    def damage(self) -> None:
        self.require_an_order()
        self.require_all_visible("damage")
        spec, positions = self.spec, tuple(p for p in DAMAGED if p < self.length)
        if not positions:
            raise Undecided(f"words of length {self.length} have no position behind a damaged one; measure longer words")
        cones = measure_cones(
            self.model,
            self.task,
            words=spec.words,
            length=self.length,
            loops=self.found.watched,
            positions=positions,
            after=self.trained_loops,
            correct_TBN=self.correct_TBN,
            bootstrap=spec.bootstrap,
            confidence=spec.confidence,
            seed=spec.seed,
            batch=self.batch(self.length),
        )
        self.found.rows += cones.rows()
        self.found.undecided |= {f"damage.{figure}": reason for figure, reason in cones.undecided.items()}
        self.found.figures["damage"] = {
            "cone": cones.speeds["cone"].to_json() if "cone" in cones.speeds else None,
            "ratio": None if cones.ratio is None else list(cones.ratio),
        }

    def tail(self) -> None:
        self.require_all_visible("tail")
        spec = self.spec
        tail = measure_tail(
            self.model,
            self.task,
            words=spec.words,
            length=self.length,
            loops=min(self.trained_loops, self.found.watched),
            confidence=spec.confidence,
            seed=spec.seed,
            batch=self.batch(self.length),
        )
        self.found.rows += tail.rows()
        self.found.undecided |= {f"tail.{metric}": reason for metric, reason in tail.undecided.items()}
        self.found.figures["tail"] = {metric: value for metric, (value, _, _) in tail.end.items()}

    def schedules(self) -> None:
        """Accuracy as the contract shows the input and, where that is in stages, with all of it visible."""
        own = self.train.contract.input_schedule
        shown = {own: self.found.accuracy}
        if own != "all":
            shown["all"] = measure_accuracy(self.correct(self.length, all_visible=True)[0])
        at = min(self.trained_loops, self.found.watched) - 1
        for schedule, accuracy in shown.items():
            axes = {"schedule": schedule, **self.at(self.length)}
            self.found.rows += accuracy.rows(instrument="schedules", axes=axes, positions=False)
        self.found.figures["schedules"] = {schedule: accuracy.token_T[at] for schedule, accuracy in shown.items()}

    def calibration(self) -> None:
        """Whether margins chosen on independent draws of words lose no more than they promise, on many other words."""
        if self.profile is None:
            raise Undecided("there is no T* to set margins by: see halting")
        drawn: list[Calibration] = []
        for draw in range(1, DRAWS + 1):
            self.note(f"calibration {draw} of {DRAWS}")
            drawn.append(self.lost(draw, self.spec.calibration_words))
        truth = self.lost(DRAWS + 1, TRUTH * self.spec.calibration_words)
        promise = measure_promise(drawn, truth, planned(self.profile), PROMISED)
        self.found.rows += promise.rows(self.at(self.length))
        self.found.figures["calibration"] = {
            "eps": PROMISED,
            "kept": promise.kept,
            "draws": DRAWS,
            "loops": promise.loops,
            "fixed_loops": promise.fixed_loops,
            "worst_risk": max(promise.risks_D),
            "words": truth.words,
        }

    def scaled(self, instrument: Callable[[Any, Task, TrainSpec], Scaled]) -> None:
        name = instrument.__name__
        self.require_all_visible(name)
        found = instrument(self.model, self.task, self.train)
        self.found.rows += found.rows
        self.found.figures[name] = found.figure

    def plateau(self) -> None:
        self.require_all_visible("plateau")
        spec = self.spec
        plateau = measure_plateau(
            self.model,
            self.task,
            words=spec.words,
            length=self.length,
            loops=self.trained_loops,
            confidence=spec.confidence,
            seed=spec.seed,
            batch=self.batch(self.length),
        )
        self.found.rows += plateau.rows()
        self.found.figures["plateau"] = plateau.to_json()

    def require_an_order(self) -> None:
        if self.squares:
            raise Undecided("the positions of a square are in no order in which they are solved: a speed is one along a word")

    def require_all_visible(self, instrument: str) -> None:
        if self.stages.reveal_per_loop is not None:
            raise Undecided(f"{instrument} is measured with all inputs visible, and this run was trained on a streaming contract")


def measure(model: Any, task: Task, train: TrainSpec, spec: ProbeSpec, *, tell: Tell = lambda *_: None) -> Probed:
    """Runs the instruments of `spec` on the model of `train`. `tell(done, total, name)` is called before each of them.

    Accuracy by loop at the measured length is always among the rows. Raises InputError where that length itself cannot be
    measured: one beyond learned positions, a side that no maze has.
    """
    return _Probe(model, task, train, spec).measure(tell)
