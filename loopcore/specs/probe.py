"""What to measure on a trained model."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator, model_validator

from loopcore.specs.base import PositiveInt, Probability, Spec

__all__ = ["SPEED_LEVEL", "Instrument", "ProbeSpec"]

Instrument = Literal[
    "frontier",
    "tau",
    "halting",
    "accuracy",
    "damage",
    "tail",
    "schedules",
    "calibration",
    "perturbation",
    "kappa",
    "growth",
    "plateau",
]

SPEED_LEVEL = 0.8
"""Where v_hat is read. The accuracy of the position that is just being solved is .85 to .97 in trained models (S3, T = n = 8,
four seeds), so a level of .9 cuts through it: the same position counts at one loop and in one seed and not in the next, and over
eight loops that makes the slope anything from .81 to 1.02 (R2 from .957 up). At .8 the same runs give 1.00 to 1.11 (R2 from
.985)."""


class ProbeSpec(Spec):
    """Measure a trained run: how its solved prefix grows with loops, when each position converges, when it may stop; and how
    models of its spec scale with loops."""

    job: int = Field(ge=1)
    """The `train` job whose run is measured; the probe waits for it."""
    instruments: tuple[Instrument, ...] = Field(default=("frontier", "tau", "halting"), min_length=1)
    """`frontier`: longest solved prefix per loop and v_hat from its slope. `tau`: convergence time of every position and v_hat
    from its slope. `halting`: burn-in of T* = ceil(n / v_hat), the curve of accuracy against loops, and the words that stopping
    early loses, which `calibrated:eps` halts by. `accuracy`: accuracy by loops at each of `lengths` (at `length` it is always
    measured). `damage`: damage cones and the speed of their edge. `tail`: the four metrics of the end of the loop, at T(n).
    `schedules`: accuracy with the contract's input schedule, and with all inputs visible. `calibration`: in how many of 20
    calibrations, each on words of its own, `calibrated:0.01` keeps its promise. `perturbation`: change of the logits after one
    update (SGD and sign) of models of the run's spec as initialised, at 1 to 16 loops, with tied and untied weights. `kappa`:
    kappa_R of every block and matrix at the contract's most loops, of the run as initialised and as trained. `growth`: how far
    the residual stream is from its start over 32 visits, and over loops with the rule's multipliers of each, tied and untied,
    as initialised. `plateau`: held-out loss at T(n) beside that of the best constant prediction. What a model or task has no
    trace of is undecided, with the reason."""
    length: PositiveInt | None = None
    """Word length n. Empty: the longest length of the run's contract."""
    lengths: tuple[PositiveInt, ...] | None = Field(default=None, min_length=1, max_length=16)
    """Word lengths of `accuracy`, each watched for `loops_factor` T(n). Empty: `length` alone."""
    words: PositiveInt = Field(default=512, le=100_000)
    """Held-out words measured."""
    calibration_words: PositiveInt = Field(default=4096, le=1_000_000)
    """Held-out words behind `calibrated:eps`, others than those that v_hat is measured on: with n of them an eps of 3 / n or
    more can be promised, and from some 40 / n on the promise costs few loops."""
    loops_factor: float = Field(default=1.5, ge=1.0, le=4.0)
    """Loops watched, as a multiple of the contract's T(n); of an untied model at most those it has. Past about 2 T
    overthinking makes solved words look unsolved."""
    levels: tuple[Probability, ...] = Field(default=(0.8, 0.9, 0.95), min_length=1)
    """Accuracies q that a position must reach to count as solved; the one nearest .8 gives v_hat (at .9 the position that
    is just being solved falls now on one side, now on the other)."""
    bootstrap: PositiveInt = Field(default=1000, le=100_000)
    """Resamples of the words behind each interval."""
    confidence: Probability = 0.95
    seed: int = Field(default=0, ge=0, lt=2**31)
    device: Literal["auto", "cpu", "cuda"] = "auto"

    @field_validator("instruments")
    @classmethod
    def _each_once(cls, value: tuple[Instrument, ...]) -> tuple[Instrument, ...]:
        if len(set(value)) != len(value):
            raise ValueError(f"name each instrument once, got {list(value)}")
        return value

    @model_validator(mode="after")
    def _lengths_are_of_accuracy(self) -> ProbeSpec:
        if self.lengths is not None and "accuracy" not in self.instruments:
            raise ValueError("lengths are those of the instrument accuracy: add it to instruments, or give length alone")
        if self.lengths is not None and len(set(self.lengths)) != len(self.lengths):
            raise ValueError(f"name each length once, got {list(self.lengths)}")
        return self

    @model_validator(mode="after")
    def _halting_needs_speed(self) -> ProbeSpec:
        if "halting" in self.instruments and "frontier" not in self.instruments:
            raise ValueError("the halting instrument needs v_hat: add frontier to instruments")
        if "calibration" in self.instruments and "halting" not in self.instruments:
            raise ValueError("the calibration instrument needs T*: add frontier and halting to instruments")
        return self
