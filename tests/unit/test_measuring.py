"""The instruments of a probe together: rows as studies read them, and reasons in place of what cannot be measured."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from loopcore.errors import LengthError, Undecided
from loopcore.model import build_model
from loopcore.specs import ProbeSpec, TrainSpec
from loopcore.studies.base import Cell
from loopcore.studies.measured import CellResult, Row, Run
from loopcore.tasks import load_task
from tests.unit.handmade import Jumping
from workers.measuring import Probed, measure

ALL = ("frontier", "tau", "halting", "accuracy", "damage", "tail", "schedules")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spec(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {"model": {"width": 8, "heads": 2}, "task": {"kind": "word", "group": "Z5"}, "contract": {"lengths": [2, 8]}} | fields
    )


def probe(train: TrainSpec, model: Any = None, **fields: Any) -> Probed:
    asked = ProbeSpec.model_validate({"job": 1, "instruments": ALL, "words": 48, "bootstrap": 50} | fields)
    task = load_task(train.task)
    found = measure(model or build_model(train, task).eval(), task, train, asked)
    json.dumps([found.rows, found.figures, found.undecided], allow_nan=False)
    assert all(math.isfinite(row["value"]) for row in found.rows)
    assert len({json.dumps([row["instrument"], row["axes"]], sort_keys=True) for row in found.rows}) == len(found.rows)
    return found


def read(train: TrainSpec, found: Probed) -> Run:
    """The cell as a study sees it."""
    rows = tuple(Row(**row) for row in found.rows)
    return Run(Cell(name="made", train=train), CellResult("succeeded", rows=rows, missing=found.undecided))


def test_a_study_reads_what_was_measured() -> None:
    train = spec()
    told: list[str] = []
    found = measure(
        Jumping(5, 2),
        load_task(train.task),
        train,
        ProbeSpec(job=1, instruments=ALL, words=64, bootstrap=50, lengths=(8, 12)),
        tell=lambda done, total, name: told.append(f"{done}/{total} {name}"),
    )
    run = read(train, found)
    assert told == [
        "1/8 frontier",
        "2/8 tau",
        "3/8 halting",
        "4/8 accuracy",
        "4/8 accuracy at length 12",
        "5/8 damage",
        "6/8 tail",
        "7/8 schedules",
    ]
    # Two positions a loop: words of 8 are right from loop 4 on, of 12 from loop 6 on, and 1.5 T loops are watched.
    assert run.speed("frontier", 0.9).value == pytest.approx(2.0)
    assert run.speed("tau_mean").value == pytest.approx(2.0, abs=0.1)
    assert max(run.accuracy(8)) == 12
    assert max(run.accuracy(12)) == 18
    assert [run.accuracy_at(8, loops, "exact").value for loops in (3, 4, 12)] == [0.0, 1.0, 1.0]
    assert [run.accuracy_at(12, loops, "last").value for loops in (5, 6)] == [0.0, 1.0]
    assert found.figures["accuracy_at_lengths"] == {"8": 1.0, "12": 1.0}
    assert run.by_position(8)[2, 3] == 1.0
    assert run.by_position(8)[2, 4] == 0.0
    assert run.by_position(12) == {}
    assert run.cone_ratio().value == pytest.approx(1.0, abs=0.15)
    assert run.cone_points()
    assert run.tail("one_step_skip").value == 1.0  # solved at 4 of 8 loops, and unchanged since
    assert run.under_schedule("all").value == 1.0
    with pytest.raises(Undecided, match="streaming"):
        run.under_schedule("streaming")


def test_another_length_than_the_trained_one_is_named() -> None:
    train = spec()
    found = probe(train, Jumping(5, 2), length=4, instruments=("accuracy", "schedules"))
    run = read(train, found)
    with pytest.raises(Undecided):
        run.accuracy(8)
    assert run.accuracy_at(4, 2, "exact").value == 1.0


def test_an_untied_model_is_watched_to_its_last_loop() -> None:
    train = spec(model={"width": 8, "heads": 2, "tied": False})
    found = probe(train, lengths=(8, 12))
    assert found.watched == 8
    assert found.undecided["loops"] == "12 loops were to be watched at length 8 and this untied model has weights for 8"
    assert "measured up to those" in found.undecided["accuracy.12"]
    assert max(read(train, found).accuracy(12)) == 8
    assert "the instrument needs 16 loops and this untied model has weights for 8" in found.undecided["damage.cone"]
    assert "16 loops" in found.undecided["tail.asymptotic_alignment"]
    assert "tail.one_step_skip" not in found.undecided


def test_an_untrained_model_has_reasons_in_place_of_figures() -> None:
    found = probe(spec())
    assert {"frontier", "tau.p90", "halting", "damage.cone", "damage.ratio"} <= found.undecided.keys()
    assert "v" not in found.figures
    assert found.figures["damage"] == {"cone": None, "ratio": None}


def test_a_streaming_contract_is_measured_both_ways() -> None:
    train = spec(
        contract={"lengths": [2, 4], "input_schedule": "streaming"}, model={"width": 8, "heads": 2, "readout_init": "normal"}
    )
    found = probe(train)
    run = read(train, found)
    assert run.under_schedule("streaming").value == found.accuracy.token_T[3]
    assert run.under_schedule("all") != run.under_schedule("streaming")
    assert "trained on a streaming contract" in found.undecided["damage"]
    assert "trained on a streaming contract" in found.undecided["tail"]


def test_words_too_short_to_be_damaged() -> None:
    found = probe(spec(contract={"lengths": [1]}))
    assert "no position behind a damaged one" in found.undecided["damage"]
    assert "at least 2 loops, got 1" in found.undecided["tail.jacobian_alignment"]


def test_a_length_that_cannot_be_measured_fails_no_other() -> None:
    train = spec(model={"width": 8, "heads": 2, "positions": "learned", "max_length": 8})
    found = probe(train, lengths=(8, 9), instruments=("accuracy",))
    assert "learned positions reach 8" in found.undecided["accuracy.9"]
    assert found.figures["accuracy_at_lengths"].keys() == {"8"}
    with pytest.raises(LengthError, match="learned positions reach 8"):
        probe(train, length=9)


def test_mazes_have_accuracy_and_no_speed() -> None:
    train = spec(
        task={"kind": "maze", "train_examples": 20, "held_out_examples": 20},
        contract={"lengths": [5], "loops": {"kind": "fixed", "count": 3}},
        model={"width": 8, "heads": 2, "causal": False, "positions": "learned", "max_length": 25},
    )
    found = probe(train, words=20)
    assert len(found.accuracy.position_TN[0]) == 25
    for name in ("frontier", "tau", "damage"):
        assert "in no order" in found.undecided[name]
    assert "see frontier" in found.undecided["halting"]
    assert found.figures["tail"].keys() >= {"one_step_skip", "adjacent_cosine"}


def test_states_that_overflow_are_no_right_answers() -> None:
    train = spec()
    model = build_model(train, load_task(train.task)).eval()
    with torch.no_grad():
        model.injections[0].weight.mul_(1e30)  # pyright: ignore
    found = probe(train, model)
    assert set(found.accuracy.token_T[2:]) == {0.0}
    assert "not finite" in found.undecided["tail.adjacent_cosine"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lengths": [4]}, "lengths are those of the instrument accuracy"),
        ({"lengths": [4, 4], "instruments": ["accuracy"]}, "name each length once"),
    ],
)
def test_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ProbeSpec.model_validate({"job": 1} | fields)
