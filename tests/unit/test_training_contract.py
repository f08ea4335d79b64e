"""What a contract asks of training beyond lengths: extra loops, and a group's operator first."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from loopcore.contract import Stages
from loopcore.specs import ContractSpec, TrainSpec
from loopcore.training import Training


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def small(contract: dict[str, Any], **fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {
            "model": {"width": 16, "heads": 2},
            "contract": contract,
            "optimizer": {"warmup": 5, "cooldown": 10},
            "steps": 40,
            "batch": 9,
            "evaluate_every": 10,
            "evaluate_on": 16,
        }
        | fields
    )


def trained(run: Training, steps: int) -> list[dict[str, float]]:
    return [run.advance().metrics for _ in range(steps)]


def same(one: Training, other: Training) -> bool:
    weights, others = one.model.state_dict(), other.model.state_dict()
    return all(torch.equal(value, others[name]) for name, value in weights.items())


@pytest.mark.parametrize(
    "spec",
    [
        small({"lengths": [4], "extra_loops": 2.0}),
        small(
            {"lengths": [2, 3], "operator_first": True, "operator_at": 0.1, "extra_loops": 1.5},
            task={"group": "Z3", "kind": "word"},
        ),
    ],
)
def test_taken_up_bit_for_bit(spec: TrainSpec) -> None:
    whole, first = Training(spec), Training(spec)
    curve = trained(whole, 37)
    begun = trained(first, 13)
    second = Training(spec)
    second.load_state_dict(first.state_dict())
    assert begun + trained(second, 24) == curve
    assert same(whole, second)


def test_extra_loops_are_uniform_and_evaluation_stays_at_the_contract() -> None:
    run = Training(small({"lengths": [4], "extra_loops": 1.5}, steps=150, model={"width": 4, "heads": 1}, evaluate_every=50))
    curve = trained(run, 150)
    seen = Counter(step["loops"] for step in curve)
    assert set(seen) == {4, 5, 6}
    # 50 each expected, standard deviation 5.8.
    assert all(30 <= count <= 70 for count in seen.values())
    assert {step["held_out_loops"] for step in curve if "held_out_loops" in step} == {4}


def test_without_extra_loops_every_step_takes_the_contracts() -> None:
    assert {step["loops"] for step in trained(Training(small({"lengths": [4]})), 12)} == {4}


def test_an_untied_model_has_weights_for_the_extra_loops() -> None:
    spec = small({"lengths": [4], "extra_loops": 1.5}, model={"width": 4, "heads": 1, "tied": False})
    assert (spec.untied_loops, spec.scaling_loops) == (6, 4)
    trained(Training(spec), 10)
    with pytest.raises(ValidationError, match="untied model with 5 loops of weights cannot meet a contract of 6 loops"):
        small({"lengths": [4], "extra_loops": 1.5}, model={"tied": False, "untied_loops": 5})


def test_the_operator_stage_trains_each_pair_once_in_a_pass() -> None:
    run = Training(small({"lengths": [2, 3], "operator_first": True, "operator_at": 1.0}, batch=9))  # S3: 36 pairs, 4 batches
    seen: list[tuple[int, ...]] = []
    for _ in range(8):
        batch = run._training_batch()
        seen += [tuple(row) for row in batch.tokens.tolist()]
        assert torch.equal(batch.targets[:, 0], batch.tokens[:, 0])
        table = run.task.group.table_GG  # pyright: ignore[reportAttributeAccessIssue]
        assert torch.equal(batch.targets[:, 1], table[batch.tokens[:, 0], batch.tokens[:, 1]])
        run.step()
    every = {(g, h) for g in range(6) for h in range(6)}
    assert (len(seen[:36]), set(seen[:36])) == (36, every)
    assert set(seen[36:]) == every
    assert seen[:36] != seen[36:]


def test_the_operator_stage_ends_by_all_pairs_and_the_next_one_by_token_accuracy() -> None:
    run = Training(small({"lengths": [2, 3], "operator_first": True}))
    assert run.stages.operator
    assert not run.stages.reached(0.99)
    assert run.stages.reached(0.995)
    with torch.no_grad():  # a constant answer: the first position is right in 1 of 6 pairs, the second in 1 of 6 of those
        run.model.readout_matrix.weight.zero_()
    assert run.pair_accuracy() == 1 / 36
    run.stages.advance(0.995)
    assert (run.stages.operator, run.stages.length) == (False, 3)
    assert run.stages.reached(0.98)


def test_a_small_group_learns_its_operator_and_goes_on() -> None:
    spec = small(
        {"lengths": [2, 3], "operator_first": True},
        task={"kind": "word", "group": "Z2"},
        steps=400,
        evaluate_every=20,
        optimizer={"warmup": 5, "lr": 3e-3},
    )
    run = Training(spec)
    curve = []
    while run.stages.operator and not run.finished:
        curve.append(run.advance().metrics)
    assert run.stages.length == 3
    assert curve[-1]["pair_accuracy"] == 1.0
    assert all(step.get("pair_accuracy", 0.0) < 0.995 for step in curve[:-1])


@pytest.mark.parametrize(
    ("contract", "fields", "message"),
    [
        ({"lengths": [2], "operator_first": True}, {}, "give a longer length after 2"),
        ({"lengths": [3, 4], "operator_first": True}, {}, "lengths must begin with 2"),
        ({"lengths": [2, 4], "operator_first": True}, {"task": {"kind": "parity"}}, "it takes a word task, got 'parity'"),
        (
            {"lengths": [2, 4], "operator_first": True},
            {"task": {"kind": "word", "group": "S7"}},
            r"25,401,600 of S7; expected at most 1,000,000",
        ),
        ({"lengths": [2], "extra_loops": 0.5}, {}, "greater than or equal to 1"),
    ],
)
def test_refused(contract: dict[str, Any], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        small(contract, **fields)


def test_most_drawn_rounds_down_but_not_by_rounding_errors() -> None:
    assert ContractSpec(extra_loops=1.5).most_drawn(5) == 7
    assert ContractSpec(extra_loops=1.1).most_drawn(10) == 11
    assert not Stages(ContractSpec()).operator
