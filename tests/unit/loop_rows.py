"""What tests of loop batching share: small models, a recorded trace in their place, and a row computed alone."""

from __future__ import annotations

from typing import Any

import pytest

from loopcore.batching import (
    Finished,
    LoopBatchEngine,
    LoopEvent,
    ModelStepper,
    Recorded,
    Request,
    Stepper,
    TraceStepper,
)
from loopcore.halting import HaltingProfile
from loopcore.model import LoopedTransformer
from loopcore.scaling import multipliers
from loopcore.specs import HaltingSpec, ModelSpec, ScalingSpec, parse_halting

VOCABULARY = 6
PROFILE = HaltingProfile(
    v=1.0,
    v_low=0.9,
    v_high=1.1,
    burn_in=1,
    lengths=(1, 8),
    accuracy_TN=tuple(tuple(min(1.0, (t + 1) / (i + 1)) for i in range(8)) for t in range(12)),
    exact_TN=tuple(tuple(float(t >= i) for i in range(8)) for t in range(12)),
    words=64,
)


def tiny_model(**fields: Any) -> LoopedTransformer:
    spec = ModelSpec(width=16, heads=2, readout_init="normal", **fields)
    scale = multipliers(ScalingSpec(base_width=16, rule="deeploop" if spec.norm == "post" else "standard"), spec, 8)
    return LoopedTransformer(
        spec, vocabulary=VOCABULARY, classes=VOCABULARY, multipliers=scale, seed=3, untied_loops=None if spec.tied else 30
    )


MODELS = {
    "pre": tiny_model(),
    "post": tiny_model(norm="post", injection="add"),
    "bidirectional": tiny_model(causal=False, norm="post"),
    "learned": tiny_model(positions="learned", max_length=9),
    "untied": tiny_model(tied=False, positions="scan_offset"),
}


def recorded(word: tuple[int, ...]) -> Recorded:
    """A behaviour that depends on the word alone."""
    return Recorded(exit=1 + (7 * sum(word) + len(word)) % 9, outputs=tuple(reversed(word)))


def stepper(kind: str) -> Stepper:
    if kind == "trace":
        return TraceStepper(recorded, vocabulary=VOCABULARY, pads=True)
    return ModelStepper(MODELS[kind])


EVERY_KIND = ["trace", *MODELS]
both = pytest.mark.parametrize("kind", ["trace", "pre"])
RULES = [
    HaltingSpec(kind="rule"),
    HaltingSpec(kind="rule", min_loops=4, max_loops=5),
    parse_halting("fixed:1"),
    parse_halting("fixed:7"),
    HaltingSpec(kind="converged", threshold=0.2, max_loops=12),
    HaltingSpec(kind="converged", threshold=0.4, check_every=2, min_loops=2),
    HaltingSpec(kind="cosine", threshold=0.05, max_loops=15),
    HaltingSpec(kind="entropy", threshold=0.02, max_loops=15),
    HaltingSpec(kind="kl", threshold=0.01, min_loops=3, max_loops=15),
    HaltingSpec(kind="argmax_stable", threshold=2, max_loops=15),
    HaltingSpec(kind="argmax_stable", threshold=3, check_every=2, max_loops=15),
]


def alone(kind: str, request: Request) -> Finished:
    return LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, max_loops=lambda n: 20).run([request])[0]


def told_alone(kind: str, request: Request) -> list[LoopEvent]:
    engine = LoopBatchEngine(stepper(kind), profile=PROFILE, max_rows=1, max_loops=lambda n: 20)
    engine.submit(request)
    return [event for _ in range(20) for event in engine.tick() if isinstance(event, LoopEvent)]


def drain(engine: LoopBatchEngine) -> list[Finished]:
    found: list[Finished] = []
    for _ in range(10_000):
        if not engine.busy:
            return found
        found.extend(event for event in engine.tick() if isinstance(event, Finished))
    raise AssertionError("the engine does not come to an end")
