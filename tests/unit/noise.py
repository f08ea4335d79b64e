"""A task without structure: uniform tokens, uniform answers. What is measured at initialisation asks for no more."""

from __future__ import annotations

from typing import Any

import torch

from loopcore.specs import TrainSpec
from loopcore.tasks import Batch
from loopcore.tasks.task import generator


class Noise:
    vocabulary = classes = 32

    def random_batch(self, *, seed: int, split: str, index: int, size: int, length: int) -> Batch:
        drawn = torch.randint(self.vocabulary, (2, size, length), generator=generator("noise", seed, split, index))
        return Batch(drawn[0], drawn[1])


def noise_spec(rule: str = "standard", *, exponent: float | None = None, **model: Any) -> TrainSpec:
    """A model of width 32 without injection, its readout not zero, post-norm where the rule asks for it."""
    norm = "post" if rule in ("deepnorm", "deeploop") else "pre"
    shape = {"width": 32, "heads": 2, "injection": "none", "readout_init": "normal", "norm": norm} | model
    return TrainSpec.model_validate(
        {
            "model": shape,
            "contract": {"lengths": [12]},
            "scaling": {"rule": rule, "exponent": exponent, "base_width": 32},
            "batch": 8,
        }
    )
