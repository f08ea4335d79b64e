"""A learning-rate study on a real cluster: its table, and the same table after its process was killed."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import psutil
import pytest
from mlflow.tracking import MlflowClient

from loopcore.specs import parse_job
from services.registry import Job, JobState, Registry, Run, RunState, migrate
from services.settings import Settings
from tests.integration.dispatching import DispatcherProcess, dispatching, settings_for, submit
from tests.integration.ray_cluster import RayCluster

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning")]  # of MLflow, in this process

RATES = (0.0, -5.0, -6.0)


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory, ray_cluster: RayCluster) -> Settings:
    settings = settings_for(tmp_path_factory.mktemp("tune"), ray_cluster)
    migrate(settings.registry_url)
    (settings.home / "text.txt").write_text("the quick brown fox jumps over the lazy dog; " * 200)
    return settings


@pytest.fixture(scope="module")
def registry(settings: Settings) -> Iterator[Registry]:
    with Registry.open(settings.registry_url) as registry:
        yield registry


@pytest.fixture(scope="module")
def dispatcher(settings: Settings, ray_cluster: RayCluster) -> Iterator[DispatcherProcess]:
    with dispatching(settings, ray_cluster) as running:
        yield running


def a_study(settings: Settings, **values: object) -> dict[str, object]:
    train = {
        "task": {"kind": "text", "source": str(settings.home / "text.txt")},
        "model": {"width": 16, "heads": 2, "positions": "rope"},
        "contract": {"lengths": [16]},
        "optimizer": {"decay": "linear", "warmup": 4},
        "batch": 8,
        "steps": 120,
        "evaluate_on": 16,
        "evaluate_every": 60,
    }
    spec = {"kind": "tune", "train": train, "rules": ["standard", "loop_mup"], "loops": [1, 2], "log2_lrs": RATES}
    return parse_job(spec | {"max_trials": 9} | values).resolved()


def finished(registry: Registry, job: Job, dispatcher: DispatcherProcess, within_s: float = 120.0) -> Job:
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        now = registry.queue.job(job.id)
        if now.ended:
            if now.state != JobState.SUCCEEDED:
                pytest.fail(f"{now}\n{''.join(chunk.text for chunk in registry.queue.logs(job.id))}")
            return now
        time.sleep(0.1)
    log = "".join(chunk.text for chunk in registry.queue.logs(job.id))
    pytest.fail(f"not done: {registry.queue.job(job.id)}\n{log}\n{dispatcher.said()[-3000:]}")


@pytest.fixture(scope="module")
def undisturbed(registry: Registry, settings: Settings, dispatcher: DispatcherProcess) -> Job:
    return finished(registry, submit(registry, "tune", spec=a_study(settings), cpus=2), dispatcher)


def trials_of(registry: Registry, job: Job) -> dict[str, Run]:
    return {run.key: run for run in registry.records.runs(job.id, kind="trial")}


def test_a_study_ends_in_a_table_and_a_plot(registry: Registry, settings: Settings, undisturbed: Job) -> None:
    assert undisturbed.result is not None
    assert undisturbed.attempt == 1
    assert [(row["rule"], row["loops"]) for row in undisturbed.result["table"]] == [
        ("standard", 1),
        ("standard", 2),
        ("loop_mup", 1),
        ("loop_mup", 2),
    ]
    trials = trials_of(registry, undisturbed)
    assert len(trials) == undisturbed.result["trials"] == 9  # T = 1 once for both rules
    losses = {key: (run.figures or {})["loss"] for key, run in trials.items()}
    base = {rate: losses[f"standard T=1 lr=2^{rate:g} seed=0"] for rate in RATES}
    best = min(base, key=base.__getitem__)
    for row in undisturbed.result["table"]:
        if row["loops"] == 1:
            assert (row["best_log2_lr"], row["best_loss"], row["regret"]) == (best, base[best], 0.0)
        own = {rate: losses[f"{row['rule']} T={row['loops']} lr=2^{rate:g} seed=0"] for rate in RATES if row["loops"] > 1}
        if own:
            assert row["regret"] == pytest.approx(own[best] - min(own.values()))
    folder = settings.artifacts / f"job-{undisturbed.id}"
    assert (folder / "transfer.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert json.loads((folder / "transfer.json").read_text()) == undisturbed.result["table"]
    assert not list((settings.home / "tune").iterdir())


def test_mlflow_shows_the_study_with_its_trials_below(registry: Registry, settings: Settings, undisturbed: Job) -> None:
    assert undisturbed.result is not None
    assert undisturbed.result["mlflow_complete"]
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    parent = client.get_run(undisturbed.result["mlflow_run"])
    assert parent.info.status == "FINISHED"
    assert {file.path for file in client.list_artifacts(parent.info.run_id)} == {"transfer.json", "transfer.png"}
    for trial in trials_of(registry, undisturbed).values():
        assert trial.mlflow_run is not None
        child = client.get_run(trial.mlflow_run)
        assert child.info.status == "FINISHED"
        assert child.data.tags["mlflow.parentRunId"] == parent.info.run_id
        history = client.get_metric_history(trial.mlflow_run, "loss")
        assert [metric.step for metric in history] == list(range(1, 121))
        assert history[-1].value == registry.records.curve(trial.id, "loss")[-1].value


def test_a_study_that_was_killed_gives_the_same_table(
    registry: Registry, settings: Settings, dispatcher: DispatcherProcess, undisturbed: Job, eventually: Callable[..., object]
) -> None:
    job = submit(registry, "tune", spec=a_study(settings), cpus=2)
    eventually(lambda: (registry.queue.job(job.id).progress or {}).get("done", 0) >= 3, within_s=60)
    [attempt] = registry.queue.attempts(job.id)
    assert attempt.pid is not None
    done = {key for key, run in trials_of(registry, job).items() if run.state == RunState.FINISHED}
    os.kill(attempt.pid, signal.SIGKILL)
    again = finished(registry, job, dispatcher)
    assert (again.losses, again.attempt) == (1, 2)
    assert again.result is not None
    assert undisturbed.result is not None
    assert again.result["table"] == undisturbed.result["table"]
    # What was done was not done again, and each trial has one run here and there.
    log = "".join(chunk.text for chunk in registry.queue.logs(job.id) if chunk.attempt == 2)
    assert f"{len(done)} of 9 trials were done by an earlier attempt" in log or len(done) < 9
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    experiment = client.get_experiment_by_name("loop")
    assert experiment is not None
    copies = client.search_runs([experiment.experiment_id], f"tags.`loop.job` = '{job.id}'")
    assert len(copies) == 10
    assert {copy.info.status for copy in copies} == {"FINISHED"}
    for run in trials_of(registry, job).values():
        twin = trials_of(registry, undisturbed)[run.key]
        assert registry.records.curve(run.id) == registry.records.curve(twin.id)


# Far too small: every curve wants larger rates, round after round, until it is bracketed or the limit is reached.
FROM_BELOW = {"log2_lrs": [-11.0, -10.0, -9.0], "max_trials": 24, "loops": [1, 2], "rules": ["standard", "loop_mup"]}


@pytest.fixture(scope="module")
def extended(registry: Registry, settings: Settings, dispatcher: DispatcherProcess) -> Job:
    return finished(registry, submit(registry, "tune", spec=a_study(settings, **FROM_BELOW), cpus=2), dispatcher)


def test_the_search_extends_its_grid(registry: Registry, extended: Job) -> None:
    assert extended.result is not None
    trials = trials_of(registry, extended)
    assert 9 < len(trials) == extended.result["trials"] <= 24
    for row in extended.result["table"]:
        rates = [rate for rate, _ in row["losses"]]
        assert rates[-1] > -9.0
        assert row["bracketed"] == (row["best_log2_lr"] not in (rates[0], rates[-1]))
        assert row["bracketed"] == (row["open_because"] is None)


def test_an_extended_search_that_was_killed_comes_to_the_same_trials_and_the_same_table(
    registry: Registry, settings: Settings, dispatcher: DispatcherProcess, extended: Job, eventually: Callable[..., object]
) -> None:
    """Once in the first round and once after it: the rounds are worked out anew from what is done."""
    job = submit(registry, "tune", spec=a_study(settings, **FROM_BELOW), cpus=2)
    for attempt, enough in enumerate((4, 11)):
        eventually(lambda enough=enough: (registry.queue.job(job.id).progress or {}).get("done", 0) >= enough, within_s=90)
        [*_, running] = sorted(registry.queue.attempts(job.id), key=lambda one: one.attempt)
        assert running.attempt == attempt + 1
        assert running.pid is not None
        os.kill(running.pid, signal.SIGKILL)
        if attempt == 0:
            eventually(lambda: len(registry.queue.attempts(job.id)) == 2, within_s=90)
            eventually(lambda: registry.queue.attempts(job.id)[-1].pid is not None, within_s=60)
    again = finished(registry, job, dispatcher)
    assert (again.losses, again.attempt) == (2, 3)
    assert again.result is not None
    assert extended.result is not None
    assert again.result["table"] == extended.result["table"]
    runs = registry.records.runs(job.id, kind="trial", limit=100)
    assert len({run.key for run in runs}) == len(runs) == again.result["trials"]
    assert {run.key for run in runs} == set(trials_of(registry, extended))
    assert {run.state for run in runs} <= {RunState.FINISHED, RunState.DIVERGED}
    experiment = MlflowClient(tracking_uri=settings.mlflow_url).get_experiment_by_name("loop")
    assert experiment is not None
    copies = MlflowClient(tracking_uri=settings.mlflow_url).search_runs(
        [experiment.experiment_id], f"tags.`loop.job` = '{job.id}'"
    )
    assert len(copies) == len(runs) + 1
    assert {copy.info.status for copy in copies} == {"FINISHED"}


def test_no_process_of_a_study_outlives_it(ray_cluster: RayCluster, undisturbed: Job, eventually: Callable[..., object]) -> None:
    assert ray_cluster.process is not None
    head = psutil.Process(ray_cluster.process.pid)

    def trials() -> list[str]:
        names = []
        for child in head.children(recursive=True):
            with suppress(psutil.Error):  # it ended since it was listed
                names.append(" ".join(child.cmdline()))
        return [name for name in names if "TrialRun" in name]

    eventually(lambda: not trials(), within_s=15)
