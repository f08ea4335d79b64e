"""Training that starts from another run's weights."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from loopcore.errors import InputError
from loopcore.specs import TrainSpec, TuneSpec, parse_job
from loopcore.training import Training


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def spec(**fields: Any) -> TrainSpec:
    return TrainSpec.model_validate(
        {
            "model": {"width": 8, "heads": 2},
            "contract": {"lengths": [2, 4]},
            "steps": 30,
            "batch": 4,
            "evaluate_every": 10,
            "evaluate_on": 8,
        }
        | fields
    )


@pytest.fixture(scope="module")
def parent() -> Training:
    torch.set_num_threads(1)
    run = Training(spec(seed=3))
    for _ in range(12):
        run.advance()
    return run


def warm(**fields: Any) -> TrainSpec:
    return spec(start_from=7, contract={"lengths": [4], "loops": {"kind": "proportional", "per_position": 2.0}}, **fields)


def test_only_the_weights_are_taken(parent: Training) -> None:
    run = Training(warm(optimizer={"lr": 3e-4}))
    run.start_weights(parent.state_dict(), trained_by=parent.spec)
    weights = parent.model.state_dict()
    assert all(torch.equal(value, weights[name]) for name, value in run.model.state_dict().items())
    assert (run.step_count, run.stages.length, run.stages.loops, run.evaluation) == (0, 4, 8, None)
    assert run.optimizer.state == {}
    assert run.step()["lr"] == pytest.approx(3e-4 / 100)  # the warm-up begins anew
    assert torch.equal(parent.model.embedding_VD, weights["embedding_VD"])  # and the parent's are its own


def test_a_warm_run_is_taken_up_bit_for_bit_without_its_parent(parent: Training) -> None:
    whole = Training(warm())
    whole.start_weights(parent.state_dict(), trained_by=parent.spec)
    curve = [whole.advance().metrics for _ in range(5)]
    state = whole.state_dict()
    curve = [whole.advance().metrics for _ in range(15)]
    again = Training(warm())
    again.load_state_dict(state)
    assert [again.advance().metrics for _ in range(15)] == curve


def test_a_run_that_was_not_given_its_weights_does_not_begin(parent: Training) -> None:
    run = Training(warm())
    with pytest.raises(InputError, match="starts from the weights of job 7 and has not been given them"):
        run.advance()
    with pytest.raises(InputError, match="the run is at step 12"):
        parent.start_weights(parent.state_dict(), trained_by=parent.spec)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"task": {"kind": "word", "group": "Z6"}}, "trained on another task: word/S3/1, this run's is word/Z6/1"),
        ({"model": {"width": 16, "heads": 2}}, "are of another model: width 8 (here 16); give this run the same model"),
        ({"model": {"width": 8, "heads": 4, "positions": "rope"}}, "another model: heads 2 (here 4), positions none (here rope)"),
    ],
)
def test_weights_that_do_not_fit_are_refused(parent: Training, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        Training(warm(**fields)).start_weights(parent.state_dict(), trained_by=parent.spec)


def test_weights_of_another_shape_are_refused() -> None:
    untied = Training(spec(model={"width": 8, "heads": 2, "tied": False}))  # 4 loops of weights
    run = Training(warm(model={"width": 8, "heads": 2, "tied": False}))  # 8
    with pytest.raises(InputError, match=r"of another shape .*Missing key"):
        run.start_weights(untied.state_dict(), trained_by=untied.spec)
    with pytest.raises(InputError, match="has not been given them"):
        run.step()


def test_a_search_starts_every_trial_afresh_and_a_job_waits_for_its_parent() -> None:
    with pytest.raises(ValidationError, match="every trial starts from weights of its own"):
        TuneSpec(train=warm(optimizer={"decay": "linear"}))
    assert parse_job(warm().resolved() | {"kind": "train"}).needs() == (7,)
