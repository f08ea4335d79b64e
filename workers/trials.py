"""One trial of a study, as Ray Tune runs it: a training in a process of its own, that tells its curve as it goes.

It writes nothing itself. What it tells goes to the study's process, which holds the job's lease.
"""

from __future__ import annotations

import json
import time
from typing import Any

from ray import tune

from loopcore.specs import TrainSpec, TrialPoint, TuneSpec
from loopcore.training import Training

__all__ = ["TrialRun", "config_of", "key_of"]

TELL_S = 1.0  # seconds of training between two words to the study

# Kept of every step; the rest of what a step gives follows from the trial's own spec.
KEPT = frozenset({"loss"})


def key_of(point: TrialPoint) -> str:
    """What tells a trial's run from the study's others, the same in every attempt."""
    return f"{point.rule} T={point.loops} lr=2^{point.log2_lr:g} seed={point.seed}"


def config_of(spec: TuneSpec, point: TrialPoint) -> str:
    """All a trial needs to know, as one value of Tune's search space."""
    return json.dumps({"key": key_of(point), "spec": spec.trial(point).resolved()})


class TrialRun(tune.Trainable):
    """Trains `config["trial"]` on `config["threads"]` threads, about a second a result."""

    def setup(self, config: dict[str, Any]) -> None:
        self._begin(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        """Takes up another trial in this process."""
        self._begin(new_config)
        return True

    def step(self) -> dict[str, Any]:
        training, points = self._training, []
        ends = time.monotonic() + TELL_S
        while not training.finished and time.monotonic() < ends:
            progress = training.advance()
            points.extend(
                (progress.step, name, value)
                for name, value in progress.metrics.items()
                if name in KEPT or name.startswith("held_out_")
            )
        told: dict[str, Any] = {"points": points, "step": training.step_count, "done": training.finished}
        if training.finished:
            told["figures"] = training.figures()
        return told

    def _begin(self, config: dict[str, Any]) -> None:
        spec = TrainSpec.model_validate(json.loads(config["trial"])["spec"])
        self._training = Training(spec, device=config["device"], threads=config["threads"])
