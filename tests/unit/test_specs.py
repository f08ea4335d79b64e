"""Specs: what is refused and how it is said, digests that depend on the content alone, and no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from loopcore import specs
from loopcore.specs import (
    ContractSpec,
    FixedLoops,
    HaltingSpec,
    ModelName,
    ModelSpec,
    ProbeJob,
    RegisterJob,
    ScalingSpec,
    ServeSpec,
    Spec,
    TrainJob,
    TrainSpec,
    TrialPoint,
    TuneSpec,
    WordTask,
    parse_halting,
    parse_job,
)
from loopcore.specs.task import BUILT_IN, LARGEST_GROUP, group_order

TEXT = {"task": {"kind": "text"}, "contract": {"lengths": [64]}, "optimizer": {"decay": "linear"}}


def every_spec(kind: type[Spec] = Spec) -> Iterator[type[Spec]]:
    for sub in kind.__subclasses__():
        if sub.__module__.startswith("loopcore.specs"):
            yield sub
            yield from every_spec(sub)


def problems(kind: type[BaseModel], content: Any) -> list[tuple[str, str]]:
    """(field, message) of everything that is wrong with `content`."""
    with pytest.raises(ValidationError) as raised:
        kind.model_validate(content)
    return [(".".join(map(str, error["loc"])), error["msg"]) for error in raised.value.errors()]


# What every spec does


@pytest.mark.parametrize("kind", sorted(set(every_spec()), key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_spec_is_frozen_closed_and_documented(kind: type[Spec]) -> None:
    assert kind.model_config.get("frozen")
    assert kind.model_config.get("extra") == "forbid"
    assert (kind.__doc__ or "").strip()
    with pytest.raises(ValidationError) as raised:
        kind.model_validate({"no_such_field": 1})
    assert ("no_such_field",) in [error["loc"][-1:] for error in raised.value.errors()]


def test_a_spec_is_not_changed_after_validation() -> None:
    spec = TrainSpec()
    with pytest.raises(ValidationError, match="frozen"):
        spec.steps = 5  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("content", "field", "message"),
    [
        ({"stepz": 10}, "stepz", "Extra inputs are not permitted"),
        ({"optimizer": {"learning_rate": 1}}, "optimizer.learning_rate", "Extra inputs are not permitted"),
        ({"steps": "many"}, "steps", "Input should be a valid integer"),
        ({"steps": 1.5}, "steps", "Input should be a valid integer"),
        ({"steps": 0}, "steps", "greater than or equal to 1"),
        ({"steps": 2**31}, "steps", "less than 2147483648"),
        ({"seed": -1}, "seed", "greater than or equal to 0"),
        ({"model": None}, "model", "valid dictionary"),
        ({"model": [1]}, "model", "valid dictionary"),
        ({"precision": "fp8"}, "precision", "'auto', 'fp32' or 'bf16'"),
        ({"device": "tpu"}, "device", "'auto', 'cpu' or 'cuda'"),
        ({"optimizer": {"lr": 0}}, "optimizer.lr", "greater than 0"),
        ({"optimizer": {"lr": math.nan}}, "optimizer.lr", "finite number"),
        ({"optimizer": {"lr": math.inf}}, "optimizer.lr", "finite number"),
        ({"optimizer": {"betas": [0.9, 1.0]}}, "optimizer.betas.1", "less than 1"),
        ({"optimizer": {"betas": [0.9]}}, "optimizer.betas.1", "Field required"),
        ({"task": {"kind": "chess960"}}, "task", "does not match any of the expected tags"),
        ({"task": {"group": "S3"}}, "task", "Unable to extract tag"),
    ],
)  # fmt: skip
def test_what_is_refused_names_the_field(content: dict[str, Any], field: str, message: str) -> None:
    (found,) = problems(TrainSpec, content)
    assert found[0] == field
    assert message in found[1]


@pytest.mark.parametrize("count", [0, -1, 0.5, "two", None])
def test_fewer_than_one_loop(count: Any) -> None:
    assert problems(TrainSpec, {"contract": {"loops": {"kind": "fixed", "count": count}}})[0][0] == "contract.loops.fixed.count"
    assert problems(ScalingSpec, {"loops": 0})[0][0] == "loops"
    assert problems(TuneSpec, {"train": TEXT, "loops": [0, 1]})[0][0] == "loops.0"


@pytest.mark.parametrize("name", ["Q8", "", "s3", "Z0", "S3x", "S3 ", "A4xQ8", "Z" + "9" * 50])
def test_a_group_that_does_not_exist(name: str) -> None:
    (found,) = problems(TrainSpec, {"task": {"kind": "word", "group": name}})
    assert found[0] == "task.word.group"
    assert f"expected a group such as Z60, D4, S3, A5 or a product such as A4xZ5, got {name!r}" in found[1]


@pytest.mark.parametrize("name", ["S8", "A8", "S999", "Z999xZ999xZ999"])
def test_a_group_that_is_too_large(name: str) -> None:
    assert f"expected a group of at most 5040 elements, {name} has more" in problems(WordTask, {"group": name})[0][1]


@pytest.mark.parametrize(
    ("name", "order"),
    [("Z1", 1), ("Z60", 60), ("D1", 2), ("D4", 8), ("S1", 1), ("S2", 2), ("S5", 120), ("S7", 5040), ("A1", 1), ("A2", 1),
     ("A3", 3), ("A5", 60), ("A7", 2520), ("A4xZ5", 60), ("D4xD4xS3", 384)],
)  # fmt: skip
def test_orders_of_groups(name: str, order: int) -> None:
    assert group_order(name) == order <= LARGEST_GROUP


# Digests


def test_a_digest_does_not_depend_on_order_or_on_spelled_out_defaults() -> None:
    short = TrainSpec.model_validate({"seed": 3, "model": {"width": 32, "heads": 2}})
    turned = TrainSpec.model_validate({"model": {"heads": 2, "width": 32}, "seed": 3})
    full = TrainSpec.model_validate(short.resolved())
    assert short == turned == full
    assert short.digest() == turned.digest() == full.digest()
    assert len(short.digest()) == 64


def test_a_digest_does_not_depend_on_the_process(run_python) -> None:
    done = run_python("from loopcore.specs import TrainSpec; print(TrainSpec(seed=5).digest())")
    assert done.stdout.strip() == TrainSpec(seed=5).digest()


@pytest.mark.parametrize(
    "content",
    [{"seed": 1}, {"steps": 3999}, {"optimizer": {"lr": 1.0000000000000002e-3}}, {"contract": {"lengths": [2, 4]}},
     {"model": {"bos": False}}, {"task": {"kind": "word", "group": "Z6"}}, {"scaling": {"rule": "loop_mup"}}],
)  # fmt: skip
def test_another_content_is_another_digest(content: dict[str, Any]) -> None:
    assert TrainSpec.model_validate(content).digest() != TrainSpec().digest()


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True).map(sorted),
    lr=st.floats(1e-6, 10, allow_nan=False),
    seed=st.integers(0, 2**31 - 1),
    per_position=st.floats(0.01, 64),
)
def test_a_spec_survives_json(lengths: list[int], lr: float, seed: int, per_position: float) -> None:
    spec = TrainSpec.model_validate(
        {
            "contract": {"lengths": lengths, "loops": {"kind": "proportional", "per_position": per_position}},
            "optimizer": {"lr": lr},
            "seed": seed,
        }
    )
    again = TrainSpec.model_validate(json.loads(json.dumps(spec.resolved(), allow_nan=False)))
    assert again == spec
    assert again.digest() == spec.digest()
    assert spec.contract.most_loops == max(max(1, math.ceil(per_position * n - 1e-9)) for n in lengths)


# What does not go together


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"model": {"width": 64, "heads": 5}}, "heads must divide width, got width 64 and heads 5"),
        ({"model": {"width": 6, "heads": 2, "positions": "rope"}}, "rope needs an even head width, got 6 / 2 = 3"),
        ({"model": {"untied_loops": 4}}, "untied_loops applies to untied models"),
        ({"model": {"tied": False, "untied_loops": 4}}, "an untied model with 4 loops of weights cannot meet a contract of 8"),
        ({"scaling": {"rule": "deeploop"}}, "scaling rule 'deeploop' is defined for norm 'post', got norm 'pre'; set model.norm"),
        ({"scaling": {"rule": "loop_mup"}, "model": {"norm": "post"}}, "scaling rule 'loop_mup' is defined for norm 'pre'"),
        ({"scaling": {"exponent": 0.5}}, "exponent applies to the rules deepnorm and deeploop"),
        ({"contract": {"lengths": [2, 2]}}, "lengths must grow from stage to stage, got [2, 2]"),
        ({"contract": {"lengths": [4, 2]}}, "lengths must grow"),
        ({"contract": {"lengths": [200]}, "model": {"positions": "learned"}}, "learned positions reach length 128"),
        ({"contract": {"input_schedule": "streaming", "loops": {"kind": "fixed", "count": 4}}},
         "streaming shows input i at loop i, so length 6 needs 6 loops or more, got 4"),
        ({"contract": {"input_schedule": "streaming"}, "model": {"injection": "none"}},
         "a streaming contract needs an injection"),
        ({"task": {"kind": "text"}}, "a text task takes one contract length and optimizer.decay linear or none"),
        (TEXT | {"contract": {"lengths": [32, 64]}}, "a text task takes one contract length"),
        ({"kind": "train", "device": "cuda"}, "device cuda needs resources.gpus above 0"),
        ({"kind": "probe", "job": 1, "instruments": ["halting"]}, "the halting instrument needs v_hat"),
        ({"kind": "tune", "train": TEXT, "seeds": [1, 1]}, "seeds names a value twice"),
        ({"kind": "tune", "train": TEXT, "rules": ["loop_mup", "deeploop"]}, "mix pre-norm and post-norm"),
        ({"kind": "tune", "train": TEXT, "trial_cpus": 4}, "a trial of 4 CPUs does not fit in the job's 2"),
        ({"kind": "register", "job": 1, "model": "s3"}, "expected a model as name@alias, for example s3@champion, got 's3'"),
        ({"kind": "serve", "model": "../x@a"}, "expected a model as name@alias"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(content: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as raised:
        parse_job({"kind": "train"} | content)
    (error,) = raised.value.errors()
    assert message in error["msg"]


def test_loops_that_follow_from_other_fields() -> None:
    assert TrainSpec().scaling_loops == 8
    assert TrainSpec(contract=ContractSpec(loops=FixedLoops(count=3))).scaling_loops == 3
    assert TrainSpec(scaling=ScalingSpec(loops=5)).scaling_loops == 5
    assert TrainSpec().untied_loops is None
    assert TrainSpec(model=ModelSpec(tied=False)).untied_loops == 8
    assert TrainSpec(model=ModelSpec(tied=False, untied_loops=12)).untied_loops == 12


# Jobs


@pytest.mark.parametrize(
    ("content", "needs"),
    [
        ({"kind": "train"}, ()),
        ({"kind": "train", "start_from": 4}, (4,)),
        ({"kind": "probe", "job": 7}, (7,)),
        ({"kind": "tune", "train": TEXT}, ()),
        ({"kind": "register", "job": 7, "model": "s3@demo"}, (7,)),
        ({"kind": "register", "job": 7, "probe": 8, "model": "s3@demo"}, (7, 8)),
        ({"kind": "serve", "model": "s3@demo"}, ()),
    ],
)
def test_every_kind_of_job_is_parsed_and_says_what_it_waits_for(content: dict[str, Any], needs: tuple[int, ...]) -> None:
    job = parse_job(content)
    assert job.kind == content["kind"]
    assert job.needs() == needs
    assert parse_job(job.resolved()) == job


def test_the_kinds_of_jobs_and_tasks() -> None:
    assert specs.JOB_KINDS == ("train", "probe", "tune", "register", "serve")
    kinds = [kind.model_fields["kind"].default for kind in get_args(get_args(specs.TaskSpec)[0])]
    assert sorted(kinds) == sorted([*BUILT_IN, "installed"])


@pytest.mark.parametrize("content", [None, [], "train", 3, {}, {"kind": "cook"}, {"kind": None}])
def test_what_is_no_job(content: Any) -> None:
    with pytest.raises(ValueError, match="validation error"):
        parse_job(content)


def test_a_job_and_its_spec() -> None:
    assert isinstance(parse_job({"kind": "train", "steps": 7}), TrainJob)
    assert isinstance(parse_job({"kind": "probe", "job": 1}), ProbeJob)
    assert isinstance(parse_job({"kind": "register", "job": 1, "model": "a@b"}), RegisterJob)
    with pytest.raises(ValidationError, match="Extra inputs"):
        parse_job({"kind": "probe", "job": 1, "steps": 7})


# Searches


def test_every_piece_of_work_of_a_search_is_done_once() -> None:
    """2 rules x 2 loop counts x 3 rates x 2 seeds are 24 points; at T = 1 both rules are one run, which saves 6."""
    search = TuneSpec.model_validate({"train": TEXT, "log2_lrs": [-4, -5, -6], "seeds": [0, 1]})
    points = search.points()
    assert len(points) == len({point.digest() for point in points}) == 18
    twin = TrialPoint(rule="loop_mup", loops=1, log2_lr=-5, seed=1)
    assert search.stands_for(twin) == TrialPoint(rule="standard", loops=1, log2_lr=-5, seed=1)
    assert search.trial(points[0]).contract.loops == FixedLoops(count=1)
    trial = search.trial(TrialPoint(rule="loop_mup", loops=4, log2_lr=-5, seed=1))
    assert (trial.optimizer.lr, trial.seed, trial.scaling.rule, trial.scaling_loops) == (2**-5, 1, "loop_mup", 4)


# Short forms


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rule", HaltingSpec()),
        ("fixed:12", HaltingSpec(kind="fixed", loops=12)),
        ("converged", HaltingSpec(kind="converged")),
        ("converged:0.05", HaltingSpec(kind="converged", threshold=0.05)),
    ],
)
def test_short_forms_of_halting_rules(text: str, expected: HaltingSpec) -> None:
    assert parse_halting(text) == expected


@pytest.mark.parametrize("text", ["", "fixed", "fixed:0", "fixed:many", "converged:-1", "converged:nan", "never", "rule:"])
def test_what_is_no_halting_rule(text: str) -> None:
    if text == "rule:":
        assert parse_halting(text) == HaltingSpec()
        return
    with pytest.raises(ValueError, match="validation error"):
        parse_halting(text)


def test_thresholds_have_defaults() -> None:
    assert {kind: parse_halting(kind).effective_threshold for kind in ("converged", "kl", "argmax_stable", "rule")} == {
        "converged": 0.03,
        "kl": 1e-3,
        "argmax_stable": 5.0,
        "rule": None,
    }


def test_names_of_models() -> None:
    assert ModelName.parse("s3@champion") == ModelName(name="s3", alias="champion")
    assert str(ModelName.parse("a-b_C9@x1")) == "a-b_C9@x1"
    for text in ("s3", "s3@", "@x", "s3@Champion", "s 3@x", "s3@x@y", "s3@x\n", "-s@x"):
        with pytest.raises(ValueError, match="expected a model as name@alias"):
            ModelName.parse(text)
    assert ServeSpec(model="s3@demo").replicas == 1


# What they load


def test_specs_load_no_torch(run_python) -> None:
    done = run_python(
        "import sys, loopcore.specs\n"
        "loopcore.specs.parse_job({'kind': 'train'})\n"
        "loaded = {'torch', 'numpy', 'ray', 'mlflow', 'sqlalchemy', 'fastapi'} & sys.modules.keys()\n"
        "assert not loaded, loaded"
    )
    assert done.returncode == 0, done.stderr


def test_the_list_of_names_is_the_real_one() -> None:
    assert sorted(specs.__all__) == sorted(set(specs.__all__))
    assert all(hasattr(specs, name) for name in specs.__all__)
