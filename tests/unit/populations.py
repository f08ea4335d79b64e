"""What tests of populations share: small specs of every shape, and how far two models or states are apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from loopcore.specs import TrainSpec
from loopcore.training import Training

TOLERANCE = 1e-5  # relative, fp32, after 50 steps


def specs(members: int = 3, *, rules: Sequence[str] = ("standard",), **fields: Any) -> list[TrainSpec]:
    """Small runs that differ in seed, rule and every number of the optimizer; rates at which rounding does not grow in 50 steps
    (at .002 a run alone leaves itself by 1e-4 if its first weights are off by one rounding)."""
    model = {"width": 16, "heads": 2} | fields.pop("model", {})
    optimizer = fields.pop("optimizer", {})
    content = {"contract": {"lengths": [5]}, "batch": 8, "evaluate_every": 10, "evaluate_on": 24, "steps": 200} | fields
    return [
        TrainSpec.model_validate(
            content
            | {
                "model": model,
                "seed": [3, 4, 3][number % 3] + number // 3,
                "scaling": {"rule": rules[number % len(rules)], "base_width": [8, 16, 32][number % 3]},
                "optimizer": {
                    "lr": [5e-4, 3e-4, 4e-4][number % 3],
                    "weight_decay": [0.0, 0.01, 0.3][number % 3],
                    "epsilon": [1e-8, 1e-7, 1e-6][number % 3],
                    "betas": [(0.9, 0.98), (0.8, 0.99), (0.9, 0.95)][number % 3],
                    "clip": [1.0, 0.05, None][number % 3],
                    "warmup": [10, 20, 0][number % 3],
                }
                | optimizer,
            }
        )
        for number in range(members)
    ]


PRE = ("standard", "loop_mup", "depth_mup")
POST = ("standard", "deepnorm", "deeploop")
SHAPES: dict[str, list[TrainSpec]] = {
    "pre-norm": specs(rules=PRE),
    "post-norm": specs(rules=POST, model={"norm": "post"}),
    "two blocks, rope, no injection": specs(
        rules=PRE, model={"blocks": 2, "positions": "rope", "injection": "none", "readout_init": "normal"}
    ),
    "post-norm, learned positions, added input": specs(
        rules=POST, model={"norm": "post", "blocks": 2, "positions": "learned", "injection": "add", "readout_init": "normal"}
    ),
    "addressed positions": specs(rules=PRE, model={"positions": "scan_offset"}),
    "untied, a loop never trained": specs(rules=PRE, model={"tied": False, "untied_loops": 6, "blocks": 2}),
    "no BOS, all positions seen": specs(rules=PRE, model={"bos": False, "causal": False, "positions": "learned"}),
    "inputs one by one": specs(rules=PRE, contract={"lengths": [5], "input_schedule": "streaming"}),
    "loops drawn by member": specs(rules=PRE, contract={"lengths": [5], "extra_loops": 2.0}),
    "loops drawn, untied": specs(rules=PRE, contract={"lengths": [4], "extra_loops": 1.5}, model={"tied": False}),
    "pairs first": specs(rules=PRE, contract={"lengths": [2, 4], "operator_first": True}),
    "text": specs(
        rules=PRE,
        task={"kind": "text"},
        contract={"lengths": [12], "loops": {"kind": "fixed", "count": 3}},
        model={"positions": "rope", "injection": "none"},
        optimizer={"decay": "linear"},
    ),
}


def apart(one: nn.Module, other: nn.Module) -> float:
    """Largest relative distance of a parameter of the one from that of the other."""
    others = dict(other.named_parameters())
    with torch.no_grad():
        return max(
            float((weight - others[name]).norm() / weight.norm().clamp_min(1e-12)) for name, weight in one.named_parameters()
        )


def same(one: Any, other: Any) -> bool:
    """Whether two states are the same, bit for bit and key by key."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return torch.equal(one, other) and one.dtype == other.dtype if isinstance(one, Tensor) else one == other


def going_on() -> list[TrainSpec]:
    """Four runs that are promoted at every evaluation, each at its own: they end at steps 18, 27, 36 and, cut off, at 12."""
    of_four = specs(
        4,
        contract={"lengths": [2, 3, 4], "promote_at": 0.0},
        task={"kind": "word", "group": "Z3"},
        optimizer={"cooldown": 6, "cooldown_at": 0.0},
    )
    rhythms = ({"evaluate_every": 4}, {"evaluate_every": 7}, {"evaluate_every": 10}, {"evaluate_every": 5, "steps": 12})
    return [spec.model_copy(update=rhythm) for spec, rhythm in zip(of_four, rhythms, strict=True)]


def to_the_end(run: Training) -> list[Any]:
    found = []
    while not run.finished:
        found.append(run.advance())
    return found


def outline(state: Any) -> Any:
    """Keys, shapes and types of a state."""
    if isinstance(state, dict):
        return {key: outline(value) for key, value in state.items()}
    return (state.shape, state.dtype, str(state.device)) if isinstance(state, Tensor) else type(state)
