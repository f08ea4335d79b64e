"""AdamW with one parameter group for each row of the width table in `loopcore.scaling`, and the learning-rate schedule.

Weight decay is torch.optim.AdamW's: each step multiplies a weight by 1 - lr * weight_decay with the *group's* lr, and the spec's
`weight_decay` is the same number in every group that decays. So the decay a step shrinks with the group's learning rate: a hidden
matrix m times wider forgets m times more slowly. (The other convention holds lr * weight_decay fixed over width; get it
by setting weight_decay to m times the base's.) Decay may move the optimum as much as the rule does: sweep it.
Gains, biases and scan_offset's scores do not decay.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import nn

from loopcore.model import LoopedTransformer
from loopcore.recall import RecallNet
from loopcore.scaling import Multipliers
from loopcore.specs.train import OptimizerSpec, TrainSpec

__all__ = ["GROUPS", "group_of", "learning_rate_factor", "make_optimizer", "parameter_groups"]

Group = Literal["embedding", "hidden", "vector", "injection", "readout"]
LoopedModel = LoopedTransformer | RecallNet

GROUPS: tuple[Group, ...] = ("embedding", "hidden", "vector", "injection", "readout")


def group_of(name: str, parameter: nn.Parameter) -> Group:
    """The group of a parameter of `LoopedTransformer`, by its name there."""
    owner = name.split(".")[0]
    match owner:
        case "embedding_VD" | "position_PD":
            return "embedding"
        case "injections":
            return "injection"
        case "readout_matrix":
            return "readout"
        case "blocks":
            return "hidden" if parameter.ndim == 2 else "vector"
    raise AssertionError(f"no rule says how {name} scales")


def parameter_groups(model: LoopedModel, spec: TrainSpec) -> list[dict[str, Any]]:
    """Parameter groups for torch.optim.AdamW, in the order of `GROUPS`, empty ones left out.

    Each has `name` (the group), `names` (its parameters', in the order of `params`), `params`, `lr` and `eps` as the rule
    gives them, `base_lr` (equal to `lr`: what a schedule multiplies) and `weight_decay`. A recall convnet has one group,
    `convolution`, with the base values.
    """
    optimizer = spec.optimizer
    if isinstance(model, RecallNet):
        names, weights = zip(*model.named_parameters(), strict=True)
        rates = {"lr": optimizer.lr, "base_lr": optimizer.lr, "eps": optimizer.epsilon, "weight_decay": optimizer.weight_decay}
        return [{"name": "convolution", "names": list(names), "params": list(weights), **rates}]
    scale = model.scale
    members: dict[Group, list[tuple[str, nn.Parameter]]] = {group: [] for group in GROUPS}
    for name, parameter in model.named_parameters():
        members[group_of(name, parameter)].append((name, parameter))
    return [
        {
            "name": group,
            "names": [name for name, _ in found],
            "params": [parameter for _, parameter in found],
            "lr": optimizer.lr * _factor(scale, "lr", group),
            "base_lr": optimizer.lr * _factor(scale, "lr", group),
            "eps": optimizer.epsilon * _factor(scale, "epsilon", group),
            "weight_decay": 0.0 if group == "vector" else optimizer.weight_decay,
        }
        for group, found in members.items()
        if found
    ]


def make_optimizer(model: LoopedModel, spec: TrainSpec) -> torch.optim.AdamW:
    """AdamW over `parameter_groups(model, spec)`. Move the model to its device first."""
    return torch.optim.AdamW(parameter_groups(model, spec), betas=spec.optimizer.betas, fused=True)


def learning_rate_factor(step: int, optimizer: OptimizerSpec, *, steps: int, cooldown_from: int | None = None) -> float:
    """What multiplies every group's `base_lr` at optimizer step `step` (from 0), in [0, 1].

    Warm-up is linear and reaches 1 at its last step: (step + 1) / warmup. Then, by `optimizer.decay`:
    `none` stays at 1; `linear` goes to 0 at `steps`, the number of steps of the run; `cooldown` stays at 1 until step
    `cooldown_from` (None: not decided yet) and reaches 0 `optimizer.cooldown` steps later. A cool-down that starts during the
    warm-up multiplies it.
    """
    warmup = min(1.0, (step + 1) / optimizer.warmup) if optimizer.warmup else 1.0
    match optimizer.decay:
        case "linear":
            rest = max(1, steps - optimizer.warmup)
            return warmup * min(1.0, max(0.0, (steps - step) / rest))
        case "cooldown" if cooldown_from is not None and step >= cooldown_from:
            return warmup * max(0.0, 1.0 - (step - cooldown_from) / optimizer.cooldown)
    return warmup


def _factor(scale: Multipliers, what: Literal["lr", "epsilon"], group: Group) -> float:
    return getattr(scale, f"{what}_{group}")
