"""What people read when a field is wrong."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loopcore.specs import JobSpec, parse_job
from services.problems import Problem, explain


def lines(content: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        parse_job(content)
    return [problem.line() for problem in explain(caught.value, JobSpec)]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({"kind": "train", "batch": "many"}, "batch: got 'many'; expected a whole number"),
        ({"kind": "train", "batch": 1.5}, "batch: got 1.5; expected a whole number"),
        ({"kind": "train", "batch": 0}, "batch: got 0; expected at least 1"),
        (
            {"kind": "train", "contract": {"loops": {"kind": "fixed", "count": 0}}},
            "contract.loops.count: got 0; expected at least 1",
        ),
        (
            {"kind": "train", "contract": {"loops": {"kind": "fixd"}}},
            "contract.loops.kind: got 'fixd'; expected one of 'proportional', 'fixed', 'log'",
        ),
        ({"kind": "train", "model": {"norm": "rms"}}, "model.norm: got 'rms'; expected 'pre' or 'post'"),
        ({"kind": "train", "device": "tpu"}, "device: got 'tpu'; expected 'auto', 'cpu' or 'cuda'"),
        ({"kind": "train", "model": [1]}, "model: got [1]; expected a mapping of fields"),
        ({"kind": "train", "optimizer": {"lr": float("inf")}}, "optimizer.lr: got inf; expected a finite number"),
        ({"kind": "probe"}, "job: this field is missing; expected a value; add it"),
        ({}, "kind: this field is missing; expected one of train, probe, tune, register, serve; add it"),
        (
            {"kind": "training"},
            "kind: got 'training'; expected one of 'train', 'probe', 'tune', 'register', 'serve'",
        ),
        (
            {"kind": "register", "job": 1, "model": "s3"},
            "model: expected a model as name@alias, for example s3@champion, got 's3'",
        ),
    ],
)
def test_one_line_says_which_field_what_was_wrong_and_what_was_expected(content: Any, told: str) -> None:
    assert lines(content) == [told]


def test_an_unknown_field_names_the_one_that_was_meant() -> None:
    (line,) = lines({"kind": "train", "optimizer": {"wramup": 3}})
    assert line.startswith("optimizer.wramup: unknown field; expected one of betas, clip, ")
    assert line.endswith("; did you mean warmup?")


def test_the_tag_of_a_kind_is_no_part_of_a_path_even_where_a_field_is_called_the_same() -> None:
    # A tune job has a field `train`, and `train` is a kind of job.
    assert lines({"kind": "tune", "train": {"batch": 0}}) == ["train.batch: got 0; expected at least 1"]
    assert lines({"kind": "train", "batch": 0}) == ["batch: got 0; expected at least 1"]


def test_every_wrong_field_has_its_line() -> None:
    assert len(lines({"kind": "train", "batch": 0, "steps": 0, "sede": 1})) == 3


def test_a_hidden_field_keeps_its_value_to_itself() -> None:
    from pydantic import BaseModel

    class Door(BaseModel):
        password: int

    with pytest.raises(ValidationError) as caught:
        Door.model_validate({"password": "hunter2"})
    (problem,) = explain(caught.value, Door, hide=frozenset({"password"}))
    assert problem.line() == "password: got a value that is not shown; expected a whole number"


def test_a_long_value_is_cut_and_a_line_is_one_line() -> None:
    assert "..." in lines({"kind": "train", "batch": "x" * 1000})[0]
    assert Problem("two\nlines", "one", field="f").line() == "f: two lines; expected one"
