"""A model version as the service finds it: real weights of a small looped model, and a profile written by hand."""

from __future__ import annotations

import json
from pathlib import Path

from loopcore import checkpoint
from loopcore.calibration import Calibration
from loopcore.halting import HaltingProfile
from loopcore.model import LoopedTransformer, build_model
from loopcore.specs import TrainSpec
from loopcore.tasks import load_task
from services.inference.sources import Found

__all__ = ["PROFILE", "publish", "small_model", "small_spec"]

# One position a loop and a burn-in of 1. A word of 4 is right at .5, .7, .9, .99 of its positions after 1, 2, 3, 4 loops.
PROFILE = HaltingProfile(
    v=1.0,
    v_low=0.9,
    v_high=1.1,
    burn_in=1,
    lengths=(1, 4),
    accuracy_TN=((0.9, 0.8, 0.6, 0.5), (1.0, 0.9, 0.8, 0.7), (1.0, 1.0, 0.95, 0.9), (1.0, 1.0, 1.0, 0.99), (1.0, 1.0, 1.0, 1.0)),
    exact_TN=((0.9, 0.6, 0.2, 0.1), (1.0, 0.8, 0.5, 0.2), (1.0, 1.0, 0.8, 0.6), (1.0, 1.0, 1.0, 0.9), (1.0, 1.0, 1.0, 1.0)),
    words=256,
    # Of 512 words one may be lost at eps .01: a loop less than T* passes, two less do not.
    calibration=Calibration(512, ((1, 200, 300, 400), (0, 1, 200, 300), (0, 0, 1, 200), (0, 0, 0, 0))),
)


def small_spec(*, seed: int = 0, group: str = "S3") -> TrainSpec:
    """Trained on words of 2 and 4, T = n. Its readout starts from noise, so that an untrained model says something."""
    return TrainSpec.model_validate(
        {
            "model": {"width": 16, "heads": 2, "readout_init": "normal"},
            "contract": {"lengths": [2, 4]},
            "task": {"kind": "word", "group": group},
            "seed": seed,
        }
    )


def small_model(spec: TrainSpec) -> LoopedTransformer:
    return build_model(spec, load_task(spec.task)).eval()


def publish(
    folder: Path, model: str = "s3@demo", version: str = "1", *, seed: int = 0, group: str = "S3", probed: bool = True
) -> Found:
    """Writes a version's files below `folder`, as a model folder of MLflow has them."""
    spec = small_spec(seed=seed, group=group)
    weights = folder / f"{model}-{version}" / "checkpoint"
    checkpoint.save(weights, {"model": small_model(spec).state_dict()}, spec=spec, step=1)
    profile = weights.with_name("profile.json")
    if probed:
        profile.write_text(json.dumps({"halting": PROFILE.to_json(), "run": 1}))
    return Found(model, version, weights, profile if probed else None)
