"""Which trainings may share a process, and that asking for it changes no key."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from loopcore.errors import InputError
from loopcore.population.members import one_shape
from loopcore.specs import TrainJob, TrainSpec, shape_key
from loopcore.studies import STUDIES
from services.dispatcher.packs import alike, pack_key
from services.registry import Job, MemoryRegistry, Submission
from services.studies.plan import plan

BASE: dict[str, Any] = {"model": {"width": 16, "heads": 2}, "contract": {"lengths": [4]}}
# As they were before jobs could be packed.
DIGEST = "33669d769ad0b48f9f38d0b0db614ae7cd8e404c34406f7da347ec7a63eefe08"


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ({"seed": 7}, True),
        ({"steps": 9, "evaluate_every": 3, "checkpoint_every": 2}, True),
        ({"optimizer": {"lr": 0.01, "decay": "none"}}, True),
        ({"scaling": {"rule": "loop_mup"}}, True),
        ({"start_from": 3}, True),
        ({"model": {"width": 32, "heads": 2}}, False),
        ({"task": {"kind": "word", "group": "A4"}}, False),
        ({"contract": {"lengths": [2, 4]}}, False),
        ({"batch": 8}, False),
        ({"evaluate_on": 8}, False),
        ({"precision": "fp32"}, False),
        ({"device": "cpu"}, False),
        ({"progressive": 0.5}, False),
        ({"model": {"architecture": "recall_conv", "width": 16}}, False),
    ],
)
def test_one_key_is_one_population(change: dict[str, Any], same: bool) -> None:
    one, other = TrainSpec.model_validate(BASE), TrainSpec.model_validate(BASE | change)
    assert shape_key(one) is not None
    assert (shape_key(one) == shape_key(other)) is same
    if same:
        one_shape([one, other])
    else:
        with pytest.raises(InputError):
            one_shape([one, other])


def test_a_training_that_cannot_be_packed_is_not_asked_for() -> None:
    with pytest.raises(ValidationError, match=r"only transformers that train without .* leave pack out"):
        TrainJob.model_validate(BASE | {"progressive": 0.5, "pack": 2})
    with pytest.raises(ValidationError, match="less than or equal to 64"):
        TrainJob.model_validate(BASE | {"pack": 65})


def test_jobs_that_are_not_packed_keep_their_digests() -> None:
    assert TrainJob.model_validate(BASE).digest() == TrainJob.model_validate(BASE | {"pack": 1}).digest() == DIGEST
    assert "pack" not in TrainJob.model_validate(BASE).resolved()
    assert TrainJob.model_validate(BASE | {"pack": 2}).resolved()["pack"] == 2


def queued(*changes: dict[str, Any]) -> tuple[MemoryRegistry, list[Job]]:
    registry = MemoryRegistry()
    jobs = []
    for change in changes:
        spec = TrainJob.model_validate(BASE | {"pack": 3} | change).resolved()
        jobs.append(registry.queue.submit(Submission(kind="train", spec=spec, digest="d", error_budget=2)).job)
    return registry, jobs


def test_those_that_wait_come_along_as_many_as_the_first_one_says() -> None:
    registry, jobs = queued(
        {"seed": 0},
        {"seed": 1, "batch": 8},
        {"seed": 2, "pack": 1},
        {"seed": 3, "pack": 4},
        {"seed": 4, "resources": {"cpus": 2}},
        {"seed": 5, "steps": 7},
        {"seed": 6, "time_limit_s": 60, "name": "another"},
        {"seed": 7},
    )
    first = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
    assert first is not None
    assert alike(first, registry.queue.waiting()) == [jobs[5].id, jobs[6].id]
    assert alike(jobs[2], registry.queue.waiting()) == []


def test_what_failed_or_was_lost_twice_is_tried_alone() -> None:
    registry, [failed, lost] = queued({"seed": 0}, {"seed": 1})
    for job, ends in ((failed, 1), (lost, 2)):
        for end in range(ends):
            assert pack_key(registry.queue.job(job.id)) is not None
            claimed = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8, among=[job.id])
            assert claimed is not None, end
            if job is failed:
                registry.queue.fail(claimed.fence, "its own error")
            else:
                registry.queue.lose(claimed.fence, "the test says so")
        assert pack_key(registry.queue.job(job.id)) is None


@pytest.mark.parametrize(("scale", "packs"), [("smoke", {1}), ("cpu", {1}), ("gpu", {1, 8})])
def test_studies_ask_for_packs_on_a_gpu_only(scale: str, packs: set[int]) -> None:
    works = plan(STUDIES["easy-to-hard"].cells(scale))
    specs = [work.submission(1 if work.after else None).spec for work in works]
    assert {spec.get("pack", 1) for spec in specs} == packs
    packed = [spec for spec in specs if spec.get("pack", 1) > 1]
    assert all(spec["model"]["architecture"] == "transformer" and spec["resources"]["gpus"] == 0.5 for spec in packed)
    assert len({shape_key(TrainSpec.model_validate({n: spec[n] for n in TrainSpec.model_fields})) for spec in packed}) <= 1
