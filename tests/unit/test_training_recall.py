"""The recall convnet as a run's model, the progressive loss, and specs in which model and task cannot go together."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from loopcore.batching import LoopBatchEngine, ModelStepper, Request
from loopcore.checkpoint import load_model, save
from loopcore.errors import InputError
from loopcore.instruments.depth import start_of
from loopcore.model import LoopedTransformer, build_model
from loopcore.optim import parameter_groups
from loopcore.recall import RecallNet, progressive_draw, progressive_loss
from loopcore.specs import HaltingSpec, InstalledTask, ModelSpec, ProbeSpec, TrainSpec, TuneSpec
from loopcore.tasks import load_task
from loopcore.tasks.task import generator
from loopcore.training import Training
from workers.measuring import measure

CONV = {"architecture": "recall_conv", "width": 6}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spec(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {
            "model": CONV,
            "task": {"kind": "prefix_sum", "examples": 100},
            "contract": {"lengths": [8]},
            "steps": 40,
            "batch": 8,
            "evaluate_every": 10,
            "evaluate_on": 20,
        }
        | fields
    )


@pytest.mark.parametrize("progressive", [0.0, 0.5])
def test_a_convnet_trains_and_is_taken_up_bit_for_bit(progressive: float, tmp_path: Path) -> None:
    run = Training(spec(progressive=progressive))
    assert isinstance(run.model, RecallNet)
    begun = [run.advance().metrics for _ in range(7)]
    assert begun[0]["loops"] == 8
    saved = save(tmp_path, run.state_dict(), spec=run.spec, step=7)
    again = Training(run.spec)
    again.load_state_dict(run.state_dict())
    assert [run.advance().metrics for _ in range(13)] == [again.advance().metrics for _ in range(13)]
    model, _ = load_model(saved.path)
    assert isinstance(model, RecallNet)


def test_its_weights_are_of_the_seed_and_its_rates_are_the_base_ones() -> None:
    task = load_task(spec().task)
    model = build_model(spec(seed=4), task)
    net = RecallNet.for_task(task, width=6, seed=4)
    assert all(torch.equal(one, other) for one, other in zip(model.parameters(), net.parameters(), strict=True))
    [group] = parameter_groups(model, spec(optimizer={"lr": 0.01, "weight_decay": 0.2}))
    assert (group["name"], group["lr"], group["base_lr"], group["weight_decay"]) == ("convolution", 0.01, 0.01, 0.2)
    assert len(group["params"]) == len(group["names"]) == len(list(model.parameters()))


def test_the_progressive_loss_is_that_of_its_draw() -> None:
    run = Training(spec(progressive=1.0, model={"width": 8, "heads": 2, "readout_init": "normal"}, seed=5))
    for _ in range(3):
        run.step()
    n, k = progressive_draw(8, generator("progressive", 5, 3))
    batch = run.task.random_batch(seed=5, split="train", index=3, size=8, length=8)
    expected = progressive_loss(run.model, batch.tokens, batch.targets, loops=8, alpha=1.0, n=n, k=k)
    assert run.step()["loss"] == float(expected.detach())


def test_instruments_take_a_convnet() -> None:
    train = spec()
    task = load_task(train.task)
    asked = ProbeSpec(
        job=1, instruments=("frontier", "tau", "halting", "accuracy", "damage", "tail", "schedules"), words=20, bootstrap=20
    )
    found = measure(build_model(train, task).eval(), task, train, asked)
    assert "tail" in found.figures
    with pytest.raises(InputError, match="measure transformers; got the architecture recall_conv"):
        start_of(train, task, "cpu")


def test_a_convnet_answers_batched_as_alone() -> None:
    net = RecallNet.for_task(load_task(spec().task), width=6).eval()
    words = [(0, 1, 1, 0), (1, 1, 0), (1, 0, 0, 1)]
    answers = LoopBatchEngine(ModelStepper(net)).run([Request(word, HaltingSpec(kind="fixed", loops=3)) for word in words])
    for word, answer in zip(words, answers, strict=True):
        assert answer.outputs == tuple(net(torch.tensor([word]), 3).argmax(-1)[0].tolist())


@pytest.mark.parametrize("side", [3, 5])
def test_mazes_train_a_convnet_and_a_transformer(side: int) -> None:
    maze = {
        "task": {"kind": "maze", "train_examples": 10, "held_out_examples": 5},
        "contract": {"lengths": [side], "loops": {"kind": "fixed", "count": 2}},
        "evaluate_on": 4,
    }
    net = Training(spec(**maze))
    assert isinstance(net.model, RecallNet)
    assert net.model.dimensions == 2
    net.step()
    places = {"causal": False, "positions": "learned", "max_length": side**2}
    transformer = Training(spec(**maze, model={"width": 8, "heads": 2, **places}))
    assert isinstance(transformer.model, LoopedTransformer)
    transformer.step()
    with pytest.raises(ValidationError, match=f"asks for {side**2}, the squares of side {side}; raise model.max_length"):
        spec(**maze, model={"width": 8, "heads": 2, **places, "max_length": side**2 - 1})


MAZE = {"task": {"kind": "maze"}, "contract": {"lengths": [9]}}
SEES_ALL = {"causal": False, "positions": "rope"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model": CONV | {"heads": 2, "tied": False}}, "architecture and width alone; leave out heads, tied: a transformer's"),
        ({"model": CONV | {"width": 1}}, "needs a width of at least 2, got 1"),
        ({"scaling": {"rule": "loop_mup"}}, "leave scaling out for a recall_conv"),
        ({"task": {"kind": "text"}, "optimizer": {"decay": "none"}}, "sees the bytes that it has to predict"),
        (
            {"task": {"kind": "text"}, "optimizer": {"decay": "none"}, "model": {"causal": False}},
            "not causal sees the bytes that it has to predict",
        ),
        ({"progressive": 0.5, "contract": {"lengths": [4], "input_schedule": "streaming"}}, "takes input_schedule all"),
        (MAZE | {"model": {"positions": "rope"}}, "an answer depends on squares that come later"),
        (MAZE | {"model": {"causal": False}}, "cannot tell the squares of a maze apart"),
        (MAZE | {"contract": {"lengths": [8]}}, "a maze's side is odd, from 3 to 59: contract.lengths may not have 8"),
        (MAZE | {"contract": {"lengths": [61]}}, "contract.lengths may not have 61"),
        (
            MAZE | {"contract": {"lengths": [9], "input_schedule": "streaming"}, "model": SEES_ALL},
            "a maze has no order to show its squares in",
        ),
        ({"task": {"kind": "chess", "file": "x.csv"}}, "contract.lengths must be [8], got [4]"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(message)):
        spec(**({"contract": {"lengths": [4]}} | fields))


def test_a_convnet_is_searched_under_the_standard_rule_only() -> None:
    train = spec(optimizer={"decay": "linear"})
    assert len(TuneSpec(train=train, rules=("standard",), loops=(2, 4)).points()) == 10
    with pytest.raises(ValidationError, match="leave scaling out"):
        TuneSpec(train=train)


@pytest.mark.parametrize("name", ["word", "prefix_sum", "chess"])
def test_built_in_tasks_have_specs_of_their_own(name: str) -> None:
    with pytest.raises(ValidationError, match=f"the task '{name}' is built in: write kind: {name}"):
        InstalledTask(name=name)


def test_prefixes_of_a_word_are_words_where_a_model_looks_back_only() -> None:
    assert ModelSpec().looks_back_only
    assert not ModelSpec(causal=False).looks_back_only
    assert not ModelSpec(architecture="recall_conv").looks_back_only
