"""Parameter groups against the scaling table, what AdamW then does, and the schedule step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from loopcore.model import LoopedTransformer, build_model
from loopcore.optim import group_of, learning_rate_factor, make_optimizer, parameter_groups
from loopcore.specs import OptimizerSpec, TrainSpec


class Sizes:
    vocabulary, classes = 6, 6


def run(**content: Any) -> tuple[LoopedTransformer, TrainSpec]:
    """Width 256 over base 64, two blocks over base one, T = 8, loop_mup, unless said otherwise."""
    spec = TrainSpec.model_validate(
        {
            "model": {"width": 256, "blocks": 2, "positions": "learned"} | content.pop("model", {}),
            "scaling": {"rule": "loop_mup"} | content.pop("scaling", {}),
            "optimizer": {"lr": 0.01, "epsilon": 1e-6, "weight_decay": 0.1} | content.pop("optimizer", {}),
            **content,
        }
    )
    return build_model(spec, Sizes()), spec


def test_every_parameter_is_in_one_group_by_its_role() -> None:
    model, spec = run(model={"blocks": 1, "positions": "learned"})
    groups = parameter_groups(model, spec)
    assert {group["name"]: group["names"] for group in groups} == {
        "embedding": ["embedding_VD", "position_PD"],
        "hidden": [f"blocks.0.{name}.weight" for name in ("query", "key", "value", "out", "up", "down")],
        "vector": [f"blocks.0.norm_{part}.{kind}" for part in ("attention", "feedforward") for kind in ("weight", "bias")],
        "injection": ["injections.0.weight"],
        "readout": ["readout_matrix.weight"],
    }
    by_name = dict(model.named_parameters())
    for group in groups:
        assert all(by_name[name] is parameter for name, parameter in zip(group["names"], group["params"], strict=True))
    assert sum(len(group["params"]) for group in groups) == len(by_name)


def test_learning_rates_epsilons_and_decay_by_hand() -> None:
    """m = 4, L / L_base = 2, T = 8: blocks' part 2^(-1/2)."""
    groups = {group["name"]: group for group in parameter_groups(*run())}
    expected = {
        "embedding": (0.01, 2.5e-7, 0.1),
        "hidden": (0.0017677669529663688, 1.7677669529663688e-7, 0.1),
        "vector": (0.007071067811865476, 1.7677669529663688e-7, 0.0),
        "injection": (0.0025, 2.5e-7, 0.1),
        "readout": (0.01, 2.5e-7, 0.1),
    }
    assert groups.keys() == expected.keys()
    for name, (lr, eps, decay) in expected.items():
        group = groups[name]
        assert (group["lr"], group["eps"], group["weight_decay"]) == pytest.approx((lr, eps, decay))
        assert group["base_lr"] == group["lr"]


def test_without_a_linear_injection_its_group_is_left_out() -> None:
    names = [group["name"] for group in parameter_groups(*run(model={"injection": "add"}))]
    assert names == ["embedding", "hidden", "vector", "readout"]


def test_scan_offset_scores_are_vectors() -> None:
    model, spec = run(model={"positions": "scan_offset"})
    vectors = next(group for group in parameter_groups(model, spec) if group["name"] == "vector")
    assert {"blocks.0.address_H", "blocks.1.address_H"} <= set(vectors["names"])


def test_a_parameter_without_a_rule_is_noticed() -> None:
    with pytest.raises(AssertionError, match=r"no rule says how extra\.weight scales"):
        group_of("extra.weight", nn.Parameter(torch.zeros(2, 2)))


def test_the_first_step_moves_each_group_by_its_learning_rate() -> None:
    """Adam's first step is lr g / (|g| + eps): lr times the gradient's sign while eps is small; after decay by 1 - lr * decay."""
    model, spec = run(optimizer={"epsilon": 1e-12})
    optimizer = make_optimizer(model, spec)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, -1.0)
    optimizer.step()
    after = dict(model.named_parameters())
    lr_of = {name: group["lr"] for group in optimizer.param_groups for name in group["names"]}
    decay_of = {name: group["weight_decay"] for group in optimizer.param_groups for name in group["names"]}
    for name, old in before.items():
        expected = old * (1 - lr_of[name] * decay_of[name]) + lr_of[name]
        torch.testing.assert_close(after[name].detach(), expected, msg=lambda text, name=name: f"{name}: {text}")
    assert lr_of["blocks.1.up.weight"] == pytest.approx(0.0017677669529663688)


def test_epsilon_damps_a_gradient_of_its_own_size_by_half() -> None:
    """g = eps: lr g / (g + eps) = lr / 2. The blocks' epsilon is smaller than the embedding's, by the rule."""
    model, spec = run(optimizer={"epsilon": 1e-3, "weight_decay": 0.0})
    optimizer = make_optimizer(model, spec)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.full_like(parameter, -group["eps"])
    optimizer.step()
    for group in optimizer.param_groups:
        for name, parameter in zip(group["names"], group["params"], strict=True):
            moved = (parameter.detach() - before[name]).double().mean().item()
            assert moved == pytest.approx(group["lr"] / 2, rel=1e-2)


def test_betas_come_from_the_spec() -> None:
    model, spec = run(optimizer={"betas": (0.8, 0.95)})
    assert {group["betas"] for group in make_optimizer(model, spec).param_groups} == {(0.8, 0.95)}


def test_group_names_survive_a_round_trip() -> None:
    model, spec = run()
    first, second = make_optimizer(model, spec), make_optimizer(model, spec)
    second.load_state_dict(first.state_dict())
    assert [group["name"] for group in second.param_groups] == ["embedding", "hidden", "vector", "injection", "readout"]


@pytest.mark.parametrize(
    ("fields", "cooldown_from", "expected"),
    [
        # Warm-up of 4: quarters, reaching 1 at its last step; 12 steps in all.
        ({"decay": "none", "warmup": 4}, None, {0: 0.25, 1: 0.5, 3: 1.0, 4: 1.0, 11: 1.0, 100: 1.0}),
        ({"decay": "none", "warmup": 0}, None, {0: 1.0, 5: 1.0}),
        # Linear: 8 steps from 1 at step 4 to 0 at step 12.
        ({"decay": "linear", "warmup": 4}, None, {0: 0.25, 3: 1.0, 4: 1.0, 5: 0.875, 8: 0.5, 11: 0.125, 12: 0.0, 20: 0.0}),
        # Cool-down of 10 steps, not decided yet, and from step 6 on.
        ({"decay": "cooldown", "warmup": 4, "cooldown": 10}, None, {0: 0.25, 4: 1.0, 500: 1.0}),
        ({"decay": "cooldown", "warmup": 4, "cooldown": 10}, 6, {5: 1.0, 6: 1.0, 7: 0.9, 11: 0.5, 15: 0.1, 16: 0.0, 99: 0.0}),
        # Decided within the warm-up: the product of both.
        ({"decay": "cooldown", "warmup": 4, "cooldown": 10}, 1, {0: 0.25, 1: 0.5, 2: 0.675, 3: 0.8, 4: 0.7}),
    ],
)
def test_schedule(fields: dict[str, Any], cooldown_from: int | None, expected: dict[int, float]) -> None:
    optimizer = OptimizerSpec.model_validate(fields)
    got = {step: learning_rate_factor(step, optimizer, steps=12, cooldown_from=cooldown_from) for step in expected}
    assert got == pytest.approx(expected)


def test_a_run_shorter_than_its_warmup_never_leaves_it() -> None:
    optimizer = OptimizerSpec(decay="linear", warmup=10)
    assert [learning_rate_factor(step, optimizer, steps=4) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])
