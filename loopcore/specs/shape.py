"""Which trainings can be members of one population: those whose specs have one shape."""

from __future__ import annotations

import hashlib
import json

from loopcore.specs.train import TrainSpec

__all__ = ["OF_SHAPE", "shape_key"]

OF_SHAPE = ("model", "task", "contract", "batch", "evaluate_on", "precision", "device")
"""Fields of a `TrainSpec` that members share; they may differ in all others."""


def shape_key(spec: TrainSpec) -> str | None:
    """Digest (hex) of the fields in OF_SHAPE: trainings with one key can be one population. None for one that trains alone."""
    if spec.model.architecture != "transformer" or spec.progressive:
        return None
    text = json.dumps(spec.model_dump(mode="json", include=set(OF_SHAPE)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
