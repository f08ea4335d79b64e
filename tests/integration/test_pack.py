"""Trainings of one shape in one process: each ends as it would have alone, and what happens to one is no other's business."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from loopcore import checkpoint
from loopcore.specs import TrainJob, parse_job
from loopcore.training import Training
from services.registry import AttemptOutcome, Job, JobState, Registry, Run, RunState, migrate
from services.settings import Settings
from services.tracking import Tracking
from tests.integration.dispatching import dispatching, settings_for, submit
from tests.integration.ray_cluster import RayCluster
from workers.lease import run_attempt
from workers.pack import run_pack
from workers.recording import LEFT_OUT, pure

pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))
)  # MLflow

Eventually = Callable[..., object]

SLACK = {"grad_norm": 1e-3}  # relative, where it is not what a population promises for losses


def spec_of(seed: int, **given: Any) -> dict[str, Any]:
    """A short training; rates at which rounding does not grow over its steps."""
    small: dict[str, Any] = {
        "kind": "train",
        "seed": seed,
        "model": {"width": 16, "heads": 2},
        "contract": {"lengths": [4]},
        "optimizer": {"lr": 5e-4, "warmup": 10, "cooldown": 20},
        "steps": 50,
        "evaluate_every": 10,
        "evaluate_on": 32,
        "checkpoint_every": 20,
        "pack": 4,
    }
    return parse_job(small | given).resolved()


def claimed(registry: Registry, specs: Sequence[dict[str, Any]]) -> list[Job]:
    for spec in specs:
        submit(registry, "train", spec=spec)
    jobs = [registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8) for _ in specs]
    return [job for job in jobs if job is not None]


def packed(settings: Settings, jobs: Sequence[Job], release: threading.Event | None = None) -> None:
    """Runs claimed jobs in this process, as their actor would."""
    run_pack("workers.train:run", [(job.id, job.attempt) for job in jobs], settings.model_dump_json(), release=release)


def text_of(registry: Registry, job: Job) -> str:
    return "".join(chunk.text for chunk in registry.queue.logs(job.id))


def run_of(registry: Registry, job: Job) -> Run:
    [run] = registry.records.runs(job.id)
    return run


def trained_alone(spec: dict[str, Any]) -> tuple[Training, dict[tuple[int, str], float]]:
    """The same training by nobody's help, and its curve."""
    job = parse_job(spec)
    assert isinstance(job, TrainJob)
    training, curve = Training(pure(job), device="cpu"), {}
    while not training.finished:
        progress = training.advance()
        curve |= {(progress.step, name): value for name, value in progress.metrics.items() if name not in LEFT_OUT}
    return training, curve


def as_alone(registry: Registry, job: Job) -> None:
    """Within what a population promises in fp32: losses to 1e-5 over 50 steps. An accuracy may differ by one answer of 128."""
    training, expected = trained_alone(job.spec)
    found = {(point.step, point.name): point.value for point in registry.records.curve(run_of(registry, job).id)}
    assert found.keys() == expected.keys()
    for (step, name), value in expected.items():
        near = pytest.approx(value, abs=1 / 32) if "accuracy" in name else pytest.approx(value, rel=SLACK.get(name, 1e-5))
        assert found[step, name] == near, (step, name)
    result, figures = result_of(registry, job), training.figures()
    assert (result["outcome"], result["steps"]) == (figures["outcome"], figures["steps"])
    assert result["loss"] == pytest.approx(figures["loss"], rel=1e-5)
    _, spec = checkpoint.load_model(result["checkpoint"])
    assert (spec, checkpoint.load(result["checkpoint"]).step) == (training.spec, figures["steps"])


def result_of(registry: Registry, job: Job) -> dict[str, Any]:
    result = registry.queue.job(job.id).result
    assert result is not None, text_of(registry, job)
    return result


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = Settings(home=tmp_path_factory.mktemp("packs"))
    migrate(settings.registry_url)
    Tracking(settings).prepare()
    return settings


@pytest.fixture(scope="module")
def registry(settings: Settings) -> Iterator[Registry]:
    with Registry.open(settings.registry_url) as registry:
        yield registry


def test_three_in_one_process_end_as_each_does_alone(settings: Settings, registry: Registry) -> None:
    specs = [spec_of(0), spec_of(1, steps=40), spec_of(2, optimizer={"lr": 2e-4, "decay": "none"}, checkpoint_every=7)]
    jobs = claimed(registry, specs)
    packed(settings, jobs)
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    for job in jobs:
        as_alone(registry, job)
        assert run_of(registry, job).state == RunState.FINISHED
        copy = client.get_run(result_of(registry, job)["mlflow_run"])
        assert (copy.info.status, copy.data.tags["loop.job"]) == ("FINISHED", str(job.id))
        assert copy.data.metrics["final.loss"] == result_of(registry, job)["loss"]


def test_each_job_has_its_own_log(settings: Settings, registry: Registry) -> None:
    jobs = claimed(registry, [spec_of(0, steps=20), spec_of(1, steps=50)])
    packed(settings, jobs)
    short, long = (text_of(registry, job) for job in jobs)
    assert [short.count(f"at step {step}, ") for step in (10, 20, 30, 40, 50)] == [1, 1, 0, 0, 0]
    assert [long.count(f"at step {step}, ") for step in (10, 20, 30, 40, 50)] == [1, 1, 1, 1, 1]


def test_what_happens_to_one_leaves_the_others(settings: Settings, registry: Registry) -> None:
    """One starts from a job without a checkpoint, one is not this attempt's any more, one is cancelled on its way."""
    nothing = submit(registry, "train", spec=spec_of(9))
    registry.queue.cancel(nothing.id)
    specs = [spec_of(0), spec_of(1, start_from=nothing.id), spec_of(2), spec_of(3, steps=20_000)]
    jobs = claimed(registry, specs)
    fine, wrong, lost, stopped = jobs
    registry.queue.lose(lost.fence, "the test says so")
    thread = threading.Thread(target=packed, args=[settings, jobs])
    thread.start()
    try:
        while (registry.queue.job(stopped.id).progress or {}).get("done", 0) < 1:
            threading.Event().wait(0.05)
        registry.queue.cancel(stopped.id)
    finally:
        thread.join(60)
    assert not thread.is_alive()
    done, failed, asked = (registry.queue.job(job.id) for job in (fine, wrong, stopped))
    assert (done.state, done.attempt) == (JobState.SUCCEEDED, 1), text_of(registry, fine)
    assert failed.state == JobState.FAILED
    assert f"job {nothing.id} is a train job without a trained checkpoint" in (failed.error or "")
    assert asked.state == JobState.CANCELLED
    assert asked.result is not None
    assert 0 < asked.result["steps"] < 20_000
    assert checkpoint.load(asked.result["checkpoint"]).step == asked.result["steps"]
    assert run_of(registry, asked).state == RunState.CANCELLED
    assert registry.queue.job(lost.id).state == JobState.QUEUED  # for an attempt of its own
    assert registry.records.runs(lost.id) == []
    registry.queue.cancel(lost.id)
    as_alone(registry, done)


def test_released_it_gives_every_job_back_and_each_goes_on_alone(settings: Settings, registry: Registry) -> None:
    specs = [spec_of(0, steps=600), spec_of(1, steps=600)]
    jobs = claimed(registry, specs)
    release = threading.Event()
    thread = threading.Thread(target=packed, args=[settings, jobs, release])
    thread.start()
    while (registry.queue.job(jobs[0].id).progress or {}).get("done", 0) < 1:
        threading.Event().wait(0.05)
    release.set()
    thread.join(60)
    for job, spec in zip(jobs, specs, strict=True):
        given_back = registry.queue.job(job.id)
        assert (given_back.state, given_back.losses) == (JobState.QUEUED, 0)
        again = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8, among=[job.id])
        assert again is not None
        run_attempt("workers.train:run", again.id, again.attempt, settings.model_dump_json())
        assert "goes on from step" in text_of(registry, job)
        done = registry.queue.job(job.id)
        assert (done.state, done.attempt) == (JobState.SUCCEEDED, 2)
        same_steps = [point.step for point in registry.records.curve(run_of(registry, job).id, "loss")]
        assert same_steps == list(range(1, spec["steps"] + 1))


@pytest.mark.ray
class TestOnACluster:
    @pytest.fixture(scope="class")
    def settings(self, tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Settings:
        settings = settings_for(tmp_path_factory.mktemp("packing"), ray_cluster)
        migrate(settings.registry_url)
        return settings

    @pytest.fixture(scope="class")
    def registry(self, settings: Settings) -> Iterator[Registry]:
        with Registry.open(settings.registry_url) as registry:
            yield registry

    def test_killed_each_job_is_lost_once_and_goes_on(
        self, settings: Settings, registry: Registry, ray_cluster: RayCluster, eventually: Eventually
    ) -> None:
        """Three jobs that each want both CPUs train at once, since they are one process; it is killed, and so is the dispatcher
        that knew them. One that is of another shape waits for them."""
        specs = [spec_of(seed, steps=3000, evaluate_every=500, checkpoint_every=200, resources={"cpus": 2}) for seed in range(3)]
        jobs = [submit(registry, "train", spec=spec, cpus=2) for spec in specs]
        other = submit(registry, "train", spec=spec_of(0, batch=8, resources={"cpus": 2}), cpus=2)
        with dispatching(settings, ray_cluster) as dispatcher:
            eventually(lambda: all(_checkpoints(registry, job) for job in jobs), within_s=240, what="a checkpoint of each")
            pids = {registry.queue.attempts(job.id)[0].pid for job in jobs}
            assert len(pids) == 1
            assert registry.queue.job(other.id).state == JobState.QUEUED
            [node] = registry.queue.dispatchers()[0].cluster["nodes"]
            assert (node["free_cpus"], node["jobs"]) == (0.0, [job.id for job in jobs])
            dispatcher.kill()
            dispatcher.restart()
            eventually(lambda: "adopted" in dispatcher.said(), within_s=120)
            os.kill(pids.pop() or 0, signal.SIGKILL)
            eventually(lambda: all(registry.queue.job(job.id).losses for job in jobs), within_s=settings.lease_s / 2)
            eventually(lambda: all(registry.queue.job(job.id).ended for job in [*jobs, other]), within_s=300)
        for job in jobs:
            done = registry.queue.job(job.id)
            assert (done.state, done.losses, done.errors, done.attempt) == (JobState.SUCCEEDED, 1, 0, 2), dispatcher.said()
            outcomes = [attempt.outcome for attempt in registry.queue.attempts(job.id)]
            assert outcomes == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
            assert "goes on from step" in text_of(registry, job)
            steps = [point.step for point in registry.records.curve(run_of(registry, job).id, "loss")]
            assert steps == list(range(1, len(steps) + 1))
        assert registry.queue.job(other.id).state == JobState.SUCCEEDED


def _checkpoints(registry: Registry, job: Job) -> bool:
    return any(registry.records.checkpoints(run.id) for run in registry.records.runs(job.id))
