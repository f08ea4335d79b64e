"""A small looped transformer and tokens for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from loopcore.model import LoopedTransformer
from loopcore.scaling import multipliers
from loopcore.specs import ModelSpec, ScalingSpec

VOCABULARY, CLASSES = 7, 5


def make(
    *, rule: str = "standard", loops: int = 4, seed: int = 0, exponent: float | None = None, **fields: Any
) -> LoopedTransformer:
    """A small model with a readout that is not zero, its multipliers computed for `loops`."""
    spec = ModelSpec.model_validate({"width": 16, "heads": 2, "readout_init": "normal", **fields})
    scaling = ScalingSpec.model_validate({"rule": rule, "base_width": 16, "exponent": exponent})
    return LoopedTransformer(
        spec,
        vocabulary=VOCABULARY,
        classes=CLASSES,
        multipliers=multipliers(scaling, spec, loops),
        untied_loops=None if spec.tied else loops,
        seed=seed,
    )


def some_tokens(length: int, rows: int = 3, seed: int = 1) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def changed_at(tokens_BN: Tensor, position: int) -> Tensor:
    """The same tokens with another one at `position`, in every row."""
    other_BN = tokens_BN.clone()
    other_BN[:, position] = (other_BN[:, position] + 1) % VOCABULARY
    return other_BN
