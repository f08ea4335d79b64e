"""A learning-rate search, over scaling rules and loop counts: does the optimum stay where it is when loops are added?"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from loopcore.specs.base import PositiveInt, Spec
from loopcore.specs.contract import FixedLoops
from loopcore.specs.model import Rule
from loopcore.specs.train import TrainSpec

__all__ = ["HIGHEST_LOG2_LR", "LOWEST_LOG2_LR", "MOST_TRIALS", "TrialPoint", "TuneSpec"]

MOST_TRIALS = 2000  # of one study; a longer list is a mistake, or several studies

LOWEST_LOG2_LR, HIGHEST_LOG2_LR = -64.0, 4.0
POST_NORM: frozenset[Rule] = frozenset({"deepnorm", "deeploop"})

Log2 = Annotated[float, Field(ge=LOWEST_LOG2_LR, le=HIGHEST_LOG2_LR)]


class TrialPoint(Spec):
    """Where one trial stands on the study's axes."""

    rule: Rule
    loops: PositiveInt
    log2_lr: Log2
    """log2 of the base learning rate."""
    seed: int = Field(ge=0)


class TuneSpec(Spec):
    """Train `train` at every point of rules x loops x learning rates x seeds."""

    train: TrainSpec
    """The run that every trial varies."""
    rules: tuple[Rule, ...] = Field(default=("standard", "loop_mup"), min_length=1)
    loops: tuple[PositiveInt, ...] = Field(default=(1, 4), min_length=1)
    """Loop counts T; the first is the base that drift and regret are measured against."""
    log2_lrs: tuple[Log2, ...] = Field(default=(-3.0, -4.0, -5.0, -6.0, -7.0), min_length=3)
    """log2 of the base learning rates searched."""
    seeds: tuple[Annotated[int, Field(ge=0, lt=2**31)], ...] = Field(default=(0,), min_length=1)
    search: Literal["grid"] = "grid"
    max_trials: PositiveInt | None = None
    """Most trials. Where the lowest loss of a curve is at an end of its grid, or a neighbour is more than an octave away, more
    learning rates are tried, an octave at a time, as far as this allows. Empty: twice the grid's; the grid's own number: no more.
    """
    trial_cpus: float = Field(default=1.0, gt=0.0)
    """CPUs, and torch threads, of one trial; as many trials run at once as fit in the job's CPUs."""

    @model_validator(mode="after")
    def _axes(self) -> TuneSpec:
        for name in ("rules", "loops", "log2_lrs", "seeds"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} names a value twice: {list(values)}")
        if (trials := len(self.rules) * len(self.loops) * len(self.log2_lrs) * len(self.seeds)) > MOST_TRIALS:
            raise ValueError(f"{trials} trials; expected at most {MOST_TRIALS}: make several studies of it")
        norms = {"post" if rule in POST_NORM else "pre" for rule in self.rules if rule != "standard"}
        if len(norms) > 1:
            raise ValueError(f"rules {list(self.rules)} mix pre-norm and post-norm; search them in two studies")
        if self.train.start_from is not None:
            raise ValueError("every trial starts from weights of its own; leave train.start_from out")
        if self.max_trials is not None and not len(self.points()) <= self.max_trials <= MOST_TRIALS:
            raise ValueError(
                f"max_trials counts the {len(self.points())} trials of the grid too: expected that to {MOST_TRIALS}, "
                f"got {self.max_trials}"
            )
        for point in self.points():
            self.trial(point)  # raises what the trial's own spec would raise, before anything is queued
        return self

    def points(self) -> tuple[TrialPoint, ...]:
        """The grid's trials, each piece of work once: at T = 1 and base blocks all pre-norm rules are one and the same run."""
        found: dict[TrialPoint, None] = {}
        for rule in self.rules:
            for loops in self.loops:
                for log2_lr in self.log2_lrs:
                    for seed in self.seeds:
                        found[self.stands_for(TrialPoint(rule=rule, loops=loops, log2_lr=log2_lr, seed=seed))] = None
        return tuple(found)

    def stands_for(self, point: TrialPoint) -> TrialPoint:
        """The trial that does the work of `point`, on the grid or off it."""
        scaling = self.train.scaling
        unscaled = point.loops == 1 and self.train.model.blocks == scaling.base_blocks == 1 and point.rule not in POST_NORM
        if not unscaled:
            return point
        return point.model_copy(update={"rule": next(rule for rule in self.rules if rule not in POST_NORM)})

    @property
    def trials_at_most(self) -> int:
        """`max_trials`, or what it is where it is left empty."""
        return self.max_trials or min(MOST_TRIALS, 2 * len(self.points()))

    def trial(self, point: TrialPoint) -> TrainSpec:
        """The training run at `point`."""
        content = self.train.resolved()
        content["scaling"] |= {"rule": point.rule, "loops": point.loops}
        content["contract"]["loops"] = FixedLoops(count=point.loops).resolved()
        content["optimizer"]["lr"] = 2.0**point.log2_lr
        content["seed"] = point.seed
        return TrainSpec.model_validate(content)
