"""Train, probe and register jobs on the real parts: what they leave behind, and what is left after a SIGKILL."""

from __future__ import annotations

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from mlflow.tracking import MlflowClient

from loopcore import checkpoint
from loopcore.instruments import correct_by_loop, measure_frontier
from loopcore.specs import WordTask, parse_job
from loopcore.tasks import load_task
from services.registry import CurvePoint, Job, JobState, Registry, RunState, migrate
from services.settings import Settings
from tests.integration.dispatching import DispatcherProcess, dispatching, settings_for, submit
from tests.integration.ray_cluster import RayCluster
from workers.lease import run_attempt

pytestmark = pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("DeprecationWarning", "FutureWarning", "UserWarning"))
)  # MLflow

Eventually = Callable[..., object]


def train_spec(**given: Any) -> dict[str, Any]:
    small: dict[str, Any] = {
        "kind": "train",
        "model": {"width": 16, "heads": 2},
        "contract": {"lengths": [2, 3]},
        "optimizer": {"warmup": 20, "cooldown": 50},
        "steps": 600,
        "evaluate_every": 60,
        "evaluate_on": 32,
        "checkpoint_every": 40,
    }
    return parse_job(small | given).resolved()


def text_of(registry: Registry, job: Job) -> str:
    return "".join(chunk.text for chunk in registry.queue.logs(job.id))


def result_of(job: Job) -> dict[str, Any]:
    assert job.result is not None, job
    return job.result


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    settings = Settings(home=tmp_path_factory.mktemp("workers"))
    migrate(settings.registry_url)
    return settings


@pytest.fixture(scope="module")
def registry(settings: Settings) -> Iterator[Registry]:
    with Registry.open(settings.registry_url) as registry:
        yield registry


def here(settings: Settings, registry: Registry, spec: dict[str, Any], **given: Any) -> Job:
    """Runs a job in this process, as its actor would."""
    submit(registry, spec["kind"], spec=parse_job(spec).resolved(), **given)
    job = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
    assert job is not None
    run_attempt(f"workers.{job.kind}:run", job.id, job.attempt, settings.model_dump_json())
    return registry.queue.job(job.id)


@pytest.mark.ray
class TestOnACluster:
    @pytest.fixture(scope="class")
    def cluster_settings(self, tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Settings:
        settings = settings_for(tmp_path_factory.mktemp("training"), ray_cluster)
        migrate(settings.registry_url)
        return settings

    @pytest.fixture(scope="class")
    def queue_of(self, cluster_settings: Settings) -> Iterator[Registry]:
        with Registry.open(cluster_settings.registry_url) as registry:
            yield registry

    @pytest.fixture(scope="class")
    def dispatcher(self, cluster_settings: Settings, ray_cluster: RayCluster) -> Iterator[DispatcherProcess]:
        with dispatching(cluster_settings, ray_cluster) as running:
            yield running

    @pytest.fixture
    def reaches(self, queue_of: Registry, dispatcher: DispatcherProcess, eventually: Eventually) -> Callable[..., Job]:
        def wait(job: Job, state: str, *, within_s: float = 60.0) -> Job:
            ended = eventually(
                lambda: (now := queue_of.queue.job(job.id)).state == state or now.ended,
                within_s=within_s,
                what=f"{job.id} {state}",
            )
            now = queue_of.queue.job(job.id)
            assert ended
            assert now.state == state, f"{now}\n{text_of(queue_of, job)}\n{dispatcher.said()[-2000:]}"
            return now

        return wait

    def test_a_killed_training_goes_on_and_its_curve_is_the_undisturbed_one(
        self, queue_of: Registry, cluster_settings: Settings, reaches: Callable[..., Job], eventually: Eventually
    ) -> None:
        undisturbed, disturbed = (submit(queue_of, "train", spec=train_spec(name=name)) for name in ("undisturbed", "disturbed"))

        def checkpoints() -> int:
            runs = queue_of.records.runs(disturbed.id)
            return len(queue_of.records.checkpoints(runs[0].id)) if runs else 0

        eventually(lambda: checkpoints() == 2, within_s=60)
        [attempt] = queue_of.queue.attempts(disturbed.id)
        assert attempt.pid is not None
        os.kill(attempt.pid, signal.SIGKILL)
        first, second = reaches(undisturbed, JobState.SUCCEEDED), reaches(disturbed, JobState.SUCCEEDED)
        assert (first.losses, second.losses, second.errors, second.attempt) == (0, 1, 0, 2)
        assert "goes on from step" in text_of(queue_of, disturbed)

        [one], [other] = queue_of.records.runs(first.id), queue_of.records.runs(second.id)
        assert one.state == other.state == RunState.FINISHED
        curve = queue_of.records.curve(one.id)
        assert curve == queue_of.records.curve(other.id)
        steps = result_of(first)["steps"]
        assert [point.step for point in curve if point.name == "loss"] == list(range(1, steps + 1))
        assert [row.digest for row in queue_of.records.checkpoints(one.id)] == [
            row.digest for row in queue_of.records.checkpoints(other.id)
        ]
        same = ("outcome", "steps", "loss", "token_accuracy", "stage")
        assert {name: result_of(first)[name] for name in same} == {name: result_of(second)[name] for name in same}

        # MLflow has both, each in one run, to the last step.
        client = MlflowClient(tracking_uri=cluster_settings.mlflow_url)
        for job, run in ((first, one), (second, other)):
            assert result_of(job)["mlflow_complete"]
            assert run.mlflow_run == result_of(job)["mlflow_run"]
            assert client.get_run(run.mlflow_run or "").info.status == "FINISHED"
            history = client.get_metric_history(run.mlflow_run or "", "loss")
            assert [(metric.step, metric.value) for metric in history] == [
                (point.step, point.value) for point in curve if point.name == "loss"
            ]

    def test_a_cancelled_training_leaves_a_checkpoint_and_a_retry_goes_on_from_it(
        self, queue_of: Registry, reaches: Callable[..., Job], eventually: Eventually
    ) -> None:
        job = submit(queue_of, "train", spec=train_spec(steps=100_000, checkpoint_every=100_000, contract={"lengths": [8]}))
        eventually(lambda: (queue_of.queue.job(job.id).progress or {}).get("done", 0) > 20, within_s=60)
        asked_at = time.monotonic()
        queue_of.queue.cancel(job.id)
        done = reaches(job, JobState.CANCELLED, within_s=15)
        assert time.monotonic() - asked_at < 15
        place = Path(result_of(done)["checkpoint"])
        step = checkpoint.load(place).step
        assert step == result_of(done)["steps"] > 20
        assert "stopped at step" in text_of(queue_of, job)
        [run] = queue_of.records.runs(job.id)
        assert (run.state, run.checkpoint_step) == (RunState.CANCELLED, step)

        again = queue_of.queue.retry(job.id)
        eventually(lambda: (queue_of.queue.job(again.id).progress or {}).get("done", 0) > step, within_s=60)
        eventually(lambda: f"goes on from step {step}" in text_of(queue_of, again), within_s=10)
        assert [run.id] == [row.id for row in queue_of.records.runs(again.id)]
        queue_of.queue.cancel(again.id)
        reaches(again, JobState.CANCELLED, within_s=15)


@pytest.fixture(scope="module")
def trained(settings: Settings, registry: Registry) -> Job:
    """S3 to length 4: enough to have a frontier."""
    job = here(
        settings,
        registry,
        train_spec(
            model={"width": 64},
            contract={"lengths": [2, 4]},
            optimizer={"lr": 0.002, "warmup": 20, "cooldown": 60},
            steps=1600,
            evaluate_every=50,
            evaluate_on=64,
            checkpoint_every=400,
        ),
    )
    assert result_of(job)["outcome"] == "solved", text_of(registry, job)
    return job


@pytest.fixture(scope="module")
def probed(settings: Settings, registry: Registry, trained: Job) -> Job:
    job = here(settings, registry, {"kind": "probe", "job": trained.id, "words": 128, "bootstrap": 200, "loops_factor": 3.0})
    assert job.state == JobState.SUCCEEDED, text_of(registry, job)
    return job


def test_a_probe_measures_what_the_instruments_say(settings: Settings, registry: Registry, trained: Job, probed: Job) -> None:
    found = result_of(probed)
    assert (found["length"], found["trained_loops"], found["loops"]) == (4, 4, 12)
    assert found["trained_run"] == result_of(trained)["run"]
    model, spec = checkpoint.load_model(result_of(trained)["checkpoint"])
    correct = correct_by_loop(model, load_task(spec.task), words=128, length=4, loops=12)
    frontier = measure_frontier(correct, bootstrap=200)
    assert (found["v"], found["r2"]) == (frontier.speed.v, frontier.speed.r2)
    assert found["accuracy"] == pytest.approx(float(correct[3].double().mean()))
    assert found["accuracy"] > 0.95
    assert found["v_low"] <= found["v"] <= found["v_high"]
    assert found["planned_loops"] == math.ceil(4 / found["v"] - 1e-9) + found["burn_in"]
    rows = registry.records.measurements(job_id=probed.id)
    assert len(rows) == found["measurements"]
    [v] = [row for row in rows if row.instrument == "speed" and row.axes == {"estimator": "frontier", "q": found["level"]}]
    assert (v.value, v.low, v.high) == (found["v"], found["v_low"], found["v_high"])
    folder = settings.artifacts / f"job-{probed.id}"
    assert found["plots"] == [str(folder / "accuracy.png"), str(folder / "frontier.png")]
    assert all(Path(plot).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" for plot in found["plots"])
    assert json.loads((folder / "probe.json").read_text())["v"] == found["v"]
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    copy = client.get_run(found["mlflow_run"])
    assert copy.data.metrics["final.v"] == found["v"]
    assert {file.path for file in client.list_artifacts(copy.info.run_id)} == {"accuracy.png", "frontier.png", "probe.json"}


def test_what_cannot_be_decided_is_said_and_is_no_failure(settings: Settings, registry: Registry, trained: Job) -> None:
    job = here(settings, registry, {"kind": "probe", "job": trained.id, "words": 4, "bootstrap": 50, "length": 2})
    assert job.state == JobState.SUCCEEDED
    assert (result_of(job)["v"], result_of(job)["profile"]) == (None, None)
    assert "measure longer words" in result_of(job)["undecided"]["frontier"]
    assert "tau needs at least 8" in result_of(job)["undecided"]["tau.p90"]


def test_a_probe_of_something_else_is_the_user_s_mistake(settings: Settings, registry: Registry, probed: Job) -> None:
    job = here(settings, registry, {"kind": "probe", "job": probed.id}, error_budget=3)
    assert (job.state, job.attempt) == (JobState.FAILED, 1)
    assert (
        job.error == f"job {probed.id} is a probe job without a trained checkpoint; expected the number of a train job that ended"
    )


def test_a_corrupt_checkpoint_is_skipped_for_the_one_before(settings: Settings, registry: Registry) -> None:
    """Two checkpoints are there; the newer is cut off, the job is lost, and the next attempt begins at the older."""
    spec = train_spec(steps=120, checkpoint_every=40)
    submit(registry, "train", spec=spec)
    job = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
    assert job is not None
    _train_until(settings, registry, job, steps=90)
    [run] = registry.records.runs(job.id)
    newest, older = registry.records.checkpoints(run.id)
    tensors = Path(newest.place) / "tensors.safetensors"
    tensors.write_bytes(tensors.read_bytes()[:-7])
    registry.queue.lose(job.fence, "the test says so")
    again = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
    assert again is not None
    assert run_attempt("workers.train:run", again.id, again.attempt, settings.model_dump_json()) == "succeeded"
    text = text_of(registry, job)
    assert f"the checkpoint {newest.place} cannot be used" in text
    assert f"goes on from step {older.step}" in text
    untouched = here(settings, registry, spec)
    [twin] = registry.records.runs(untouched.id)
    assert registry.records.curve(run.id) == registry.records.curve(twin.id)


def test_a_training_starts_from_the_weights_of_another_job(settings: Settings, registry: Registry, trained: Job) -> None:
    own = dict(trained.spec)
    spec = own | {
        "start_from": trained.id,
        "contract": own["contract"] | {"lengths": [4], "loops": {"kind": "proportional", "per_position": 2.0}},
    }
    job = here(settings, registry, spec)
    assert job.state == JobState.SUCCEEDED, text_of(registry, job)
    assert f"starts from the weights of job {trained.id} at step {result_of(trained)['steps']}" in text_of(registry, job)
    [run] = registry.records.runs(job.id)
    # Untrained, S3 begins at the loss of a guess, ln 6.
    assert registry.records.curve(run.id, "loss")[0].value < 1.0
    other = here(settings, registry, spec | {"task": {"kind": "word", "group": "Z6"}}, error_budget=3)
    assert (other.state, other.attempt) == (JobState.FAILED, 1)
    assert "trained on another task: word/S3/1, this run's is word/Z6/1" in (other.error or "")


def _train_until(settings: Settings, registry: Registry, job: Job, *, steps: int) -> None:
    """What a worker that died after so many steps leaves behind."""
    from loopcore.training import Training
    from workers.capture import Captured
    from workers.keeper import Keeper
    from workers.lease import HeldJob
    from workers.recording import Recording, pure

    job = registry.queue.begin(job.fence, "here", os.getpid())
    with Keeper(registry, job.fence, settings, Captured()) as keeper:
        held = HeldJob(job, settings, registry, keeper)
        spec = pure(held.spec)  # type: ignore[arg-type]
        recording = Recording(held, registry.records.open_run(job.fence, kind="train", spec=spec.resolved()))
        training = Training(spec, device="cpu", threads=1)
        for step in range(1, steps + 1):
            recording.add(step, training.advance().metrics)
            if step % spec.checkpoint_every == 0:
                recording.save(training)


def test_mlflow_out_of_reach_costs_the_job_nothing(tmp_path: Path, free_port: Callable[[], int], monkeypatch: Any) -> None:
    monkeypatch.setattr("workers.train.MLFLOW_AFTER_S", 2.0)
    monkeypatch.setattr("workers.feed.PATIENCE_S", 0.2)
    settings = Settings(home=tmp_path, mlflow_url=f"http://127.0.0.1:{free_port()}")
    migrate(settings.registry_url)
    with Registry.open(settings.registry_url) as registry:
        job = here(settings, registry, train_spec(steps=60))
        assert job.state == JobState.SUCCEEDED
        assert (result_of(job)["mlflow_run"], result_of(job)["mlflow_complete"]) == (None, False)
        [run] = registry.records.runs(job.id)
        assert (run.state, run.mlflow_step) == (RunState.FINISHED, -1)  # the cursor says what is missing
        assert len(registry.records.curve(run.id, "loss")) == 60
        assert "did not open run" in text_of(registry, job)


def test_a_full_disk_fails_the_job_with_what_to_do(settings: Settings, registry: Registry, monkeypatch: Any) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "_write", full)
    job = here(settings, registry, train_spec(steps=60))
    assert job.state == JobState.FAILED
    assert job.error is not None
    assert "No space left on device; free some space" in job.error
    assert len(job.error.splitlines()) == 1
    [run] = registry.records.runs(job.id)
    assert run.state == RunState.FAILED
    assert registry.records.checkpoints(run.id) == []


def test_a_diverged_training_is_a_result(settings: Settings, registry: Registry, monkeypatch: Any) -> None:
    import torch

    monkeypatch.setattr(
        torch.nn.utils, "clip_grad_norm_", lambda *_, **__: torch.tensor(float("nan"))
    )  # a gradient that overflowed
    job = here(settings, registry, train_spec(steps=60))
    assert (job.state, result_of(job)["outcome"], result_of(job)["diverged_at"]) == (JobState.SUCCEEDED, "diverged", 1)
    [run] = registry.records.runs(job.id)
    assert run.state == RunState.DIVERGED
    assert CurvePoint(1, "grad_norm", None) in registry.records.curve(run.id)


class TestRegister:
    @pytest.fixture(scope="class")
    def registered(self, settings: Settings, registry: Registry, trained: Job, probed: Job) -> Job:
        job = here(settings, registry, {"kind": "register", "job": trained.id, "model": "s3@demo"})
        assert job.state == JobState.SUCCEEDED, text_of(registry, job)
        return job

    def test_a_version_loads_anywhere_with_pickles_forbidden(
        self, settings: Settings, registered: Job, probed: Job, run_python: Callable[..., Any]
    ) -> None:
        assert result_of(registered)["model"] == "s3@demo"
        assert result_of(registered)["probe"] == probed.id  # the newest that measured this run and came to a speed
        code = (
            "import os; os.environ['MLFLOW_ALLOW_PICKLE_DESERIALIZATION'] = 'false'; import mlflow, pandas as pd;"
            f"mlflow.set_tracking_uri({settings.mlflow_url!r}); mlflow.set_registry_uri({settings.mlflow_url!r});"
            "m = mlflow.pyfunc.load_model('models:/s3@demo');"
            "print(m.predict(pd.DataFrame({'word': ['1 2', '3 4']}))['answer'].tolist())"
        )
        ran = run_python(code)
        assert ran.returncode == 0, ran.stderr
        # Worked out from the group's own table, not by the model.
        from loopcore.tasks import load_task

        task: Any = load_task(WordTask())
        expected = []
        for word in ((1, 2), (3, 4)):
            product, answer = 0, []
            for element in word:
                product = int(task.group.table_GG[product, element])
                answer.append(product)
            expected.append(task.decode(answer))
        assert ran.stdout.strip().splitlines()[-1] == str(expected)

    def test_the_version_says_where_it_comes_from(self, settings: Settings, registered: Job, trained: Job, probed: Job) -> None:
        from services.tracking import Tracking

        version = Tracking(settings).resolve("s3@demo")
        assert version.version == result_of(registered)["version"]
        assert version.mlflow_run == result_of(trained)["mlflow_run"]
        assert float(version.tags["v"]) == pytest.approx(result_of(probed)["v"], rel=1e-5)
        assert json.loads(version.profile.read_text())["halting"] == result_of(probed)["profile"]
        [step] = checkpoint.checkpoints(version.checkpoint)
        assert set(checkpoint.load(step).state) == {"model"}  # weights alone

    def test_a_second_attempt_makes_no_second_version(self, settings: Settings, registry: Registry, trained: Job) -> None:
        from services.tracking import Tracking

        job = submit(registry, "register", spec=parse_job({"kind": "register", "job": trained.id, "model": "twice@x"}).resolved())
        versions = []
        for _ in range(2):
            claimed = registry.queue.claim("here", cpus=8, gpus=0, memory_gb=8)
            assert claimed is not None
            with pytest.MonkeyPatch.context() as patched:
                if not versions:  # the first dies with its work done, before it can say so
                    patched.setattr("workers.register._log.info", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                    with pytest.raises(KeyboardInterrupt):
                        run_attempt("workers.register:run", claimed.id, claimed.attempt, settings.model_dump_json())
                    registry.queue.lose(claimed.fence, "the test says so")
                else:
                    run_attempt("workers.register:run", claimed.id, claimed.attempt, settings.model_dump_json())
            versions.append(Tracking(settings).resolve("twice@x").version)
        assert registry.queue.job(job.id).state == JobState.SUCCEEDED
        assert versions == ["1", "1"]

    def test_a_version_that_answers_otherwise_gets_no_alias(
        self, settings: Settings, registry: Registry, trained: Job, monkeypatch: Any
    ) -> None:
        monkeypatch.setattr("workers.register._answers", lambda *_: {"1 2": "0 0"})
        job = here(settings, registry, {"kind": "register", "job": trained.id, "model": "wrong@x"})
        assert job.state == JobState.FAILED
        assert job.error is not None
        assert "answers otherwise than the run it was made from" in job.error
        client = MlflowClient(registry_uri=settings.mlflow_url, tracking_uri=settings.mlflow_url)
        assert "wrong" not in [model.name for model in client.search_registered_models()]

    def test_a_probe_of_another_run_is_refused(self, settings: Settings, registry: Registry, trained: Job) -> None:
        job = here(settings, registry, {"kind": "register", "job": trained.id, "probe": trained.id, "model": "s3@x"})
        assert job.state == JobState.FAILED
        assert job.error is not None
        assert f"job {trained.id} is not a probe of the run of job {trained.id}" in job.error
