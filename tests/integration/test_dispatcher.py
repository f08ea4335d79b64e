"""The dispatcher as its own process, on a real Ray cluster and a real registry, with workers killed under it."""

from __future__ import annotations

import os
import signal
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from services.dispatcher.loop import Dispatcher
from services.registry import AttemptOutcome, Job, JobState, Registry, RegistryUnavailable, RunState, migrate
from services.settings import Settings
from services.tracking import Tracking
from tests.integration.dispatching import DispatcherProcess, dispatching, settings_for, submit
from tests.integration.ray_cluster import RayCluster, a_token, free_port, running_ray

pytestmark = pytest.mark.ray

Eventually = Callable[..., object]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("dispatcher")


@pytest.fixture(scope="module")
def settings(home: Path, ray_cluster: RayCluster) -> Settings:
    settings = settings_for(home, ray_cluster)
    migrate(settings.registry_url)
    return settings


@pytest.fixture(scope="module")
def registry(settings: Settings) -> Iterator[Registry]:
    with Registry.open(settings.registry_url) as registry:
        yield registry


@pytest.fixture(scope="module")
def dispatcher(settings: Settings, ray_cluster: RayCluster) -> Iterator[DispatcherProcess]:
    with dispatching(settings, ray_cluster) as running:
        yield running


@pytest.fixture
def reaches(registry: Registry, dispatcher: DispatcherProcess, eventually: Eventually) -> Callable[..., Job]:
    """Waits until a job is in a state and gives it."""

    def wait(job: Job, state: str, *, within_s: float = 30.0) -> Job:
        what = f"job {job.id} is {state}"
        try:
            eventually(lambda: registry.queue.job(job.id).state == state, within_s=within_s, what=what)
        except pytest.fail.Exception:
            pytest.fail(f"{what} did not hold: {registry.queue.job(job.id)}\n{dispatcher.said()[-4000:]}")
        return registry.queue.job(job.id)

    return wait


def begun(registry: Registry, job: Job, attempt: int = 1) -> int | None:
    """The process of an attempt, once it has begun."""
    return next((row.pid for row in registry.queue.attempts(job.id) if row.attempt == attempt and row.pid), None)


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_a_job_runs_and_its_output_is_kept(registry: Registry, reaches: Callable[..., Job], tmp_path: Path) -> None:
    job = submit(registry, steps=3, diary=str(tmp_path / "diary"))
    done = reaches(job, JobState.SUCCEEDED)
    assert done.result is not None
    assert (done.result["attempt"], done.result["threads"]) == (1, 1)
    assert done.node == done.result["node"]
    assert done.progress is not None
    assert done.progress["total"] == 3
    log = "".join(chunk.text for chunk in registry.queue.logs(job.id))
    assert "printed by the job\n" in log
    assert "INFO entries: logged by the job" in log


def test_what_does_not_fit_says_why_and_does_not_hold_up_the_rest(
    registry: Registry, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    gpu = submit(registry, gpus=1, priority=9)
    wide = submit(registry, cpus=3, priority=9)
    small = submit(registry)
    reaches(small, JobState.SUCCEEDED)
    eventually(lambda: registry.queue.job(wide.id).reason, within_s=10)
    assert registry.queue.job(gpu.id).reason == "waiting: needs 1 GPU, the cluster has 0"
    assert registry.queue.job(wide.id).reason == "waiting: needs 3 CPUs, the cluster has 2"
    told = registry.queue.dispatchers()[0].cluster
    assert {"job": gpu.id, "reason": "waiting: needs 1 GPU, the cluster has 0"} in told["waiting"]
    assert told["nodes"][0]["cpus"] == 2
    for job in (gpu, wide):
        registry.queue.cancel(job.id)


def test_a_full_cluster_says_so_and_the_job_runs_when_there_is_room(
    registry: Registry, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    first = submit(registry, cpus=2, steps=1000)
    reaches(first, JobState.RUNNING)
    second = submit(registry, cpus=1)
    eventually(lambda: registry.queue.job(second.id).reason == "waiting: needs 1 CPU, 0 of 2 free", within_s=10)
    registry.queue.cancel(first.id)
    reaches(first, JobState.CANCELLED, within_s=15)
    assert reaches(second, JobState.SUCCEEDED).reason is None


def test_a_killed_worker_is_tried_again_at_once(
    registry: Registry, settings: Settings, reaches: Callable[..., Job], eventually: Eventually, tmp_path: Path
) -> None:
    job = submit(registry, steps=60, diary=str(tmp_path / "diary"))
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    time.sleep(0.5)
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: registry.queue.job(job.id).losses == 1, within_s=settings.lease_s / 2)
    assert time.monotonic() - killed_at < settings.lease_s / 2  # heard of, not waited for
    done = reaches(job, JobState.SUCCEEDED)
    assert (done.losses, done.errors, done.attempt, done.error) == (1, 0, 2, None)
    outcomes = [attempt.outcome for attempt in registry.queue.attempts(job.id)]
    assert outcomes == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
    assert (tmp_path / "diary").read_text().splitlines()[-1] == "2 end"


def test_a_job_that_is_lost_too_often_fails_and_says_so(
    registry: Registry, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    job = submit(registry, steps=1000, loss_budget=0)
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    os.kill(pid, signal.SIGKILL)
    done = reaches(job, JobState.FAILED)
    assert done.error is None
    assert done.reason is not None
    assert "lost 1 time" in done.reason


def test_an_error_of_the_job_is_kept_with_its_traceback(registry: Registry, reaches: Callable[..., Job]) -> None:
    job = submit(registry, steps=3, error_at=1)
    wrong = submit(registry, steps=3, input_error_at=0, error_budget=3)
    failed = reaches(job, JobState.FAILED)
    assert failed.error is not None
    assert failed.error.startswith("Traceback")
    assert failed.error.rstrip().endswith("ZeroDivisionError: the spec asked for this")
    # What the user asked for is not asked for again.
    refused = reaches(wrong, JobState.FAILED)
    assert (refused.error, refused.attempt) == ("expected something else", 1)


def test_cancelling_ends_a_job_that_listens_with_what_it_has(
    registry: Registry, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    job = submit(registry, steps=1000)
    eventually(lambda: (registry.queue.job(job.id).progress or {}).get("done", 0) > 2)
    registry.queue.cancel(job.id)
    done = reaches(job, JobState.CANCELLED, within_s=15)
    assert done.result is not None
    assert done.result["stopped_at"] > 2
    assert "stopped on request" in "".join(chunk.text for chunk in registry.queue.logs(job.id))


def test_what_ray_refuses_is_the_job_s_own_error(registry: Registry, reaches: Callable[..., Job]) -> None:
    failed = reaches(submit(registry, cpus=0.00003), JobState.FAILED)
    assert failed.error is not None
    assert failed.error.startswith("Ray does not take what the job asks for")


def test_one_that_does_not_listen_is_killed_after_the_grace(
    registry: Registry, settings: Settings, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    cancelled = submit(registry, steps=10_000, deaf=True)
    late = submit(registry, steps=10_000, deaf=True, time_limit_s=1.0)
    pids = [eventually(lambda job=job: begun(registry, job)) for job in (cancelled, late)]
    registry.queue.cancel(cancelled.id)
    reaches(cancelled, JobState.CANCELLED, within_s=15)
    done = reaches(late, JobState.FAILED, within_s=15)
    assert done.error is not None
    assert "time limit of 1 s" in done.error
    eventually(lambda: not any(isinstance(pid, int) and alive(pid) for pid in pids), within_s=15)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow, in this process
def test_what_a_killed_job_left_open_in_mlflow_is_ended(
    registry: Registry, settings: Settings, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    from mlflow.tracking import MlflowClient

    """By every way in which a job ends without its process, and by one that fails before it has said anything."""
    Tracking(settings).prepare()  # MLflow's own client would make the tables beside the jobs
    client = MlflowClient(tracking_uri=settings.mlflow_url)
    failed = submit(registry, "mirrored", cpus=0.5, error=True)
    cancelled, lost = (submit(registry, "mirrored", cpus=0.5, loss_budget=budget) for budget in (5, 0))
    for job in (cancelled, lost):
        eventually(lambda job=job: registry.queue.job(job.id).progress, within_s=90, what=f"the work of job {job.id}")
    registry.queue.cancel(cancelled.id)
    os.kill(begun(registry, lost) or 0, signal.SIGKILL)
    reaches(failed, JobState.FAILED)
    reaches(lost, JobState.FAILED)
    reaches(cancelled, JobState.CANCELLED)

    # One that was lost, and is cancelled while it waits for its next attempt: another takes its place on the cluster first.
    waits = submit(registry, "mirrored", cpus=2)
    eventually(lambda: registry.queue.job(waits.id).progress, within_s=60)
    first = submit(registry, cpus=2, steps=10_000, priority=5)
    os.kill(begun(registry, waits) or 0, signal.SIGKILL)
    reaches(first, JobState.RUNNING)
    [run] = registry.records.runs(waits.id)
    assert (registry.queue.job(waits.id).state, run.state) == (JobState.QUEUED, RunState.RUNNING)
    assert client.get_run(run.mlflow_run or "").info.status == "RUNNING"
    registry.queue.cancel(waits.id)

    for job, status in ((failed, "FAILED"), (lost, "FAILED"), (cancelled, "KILLED"), (waits, "KILLED")):
        [run] = registry.records.runs(job.id)
        assert run.state is {"FAILED": RunState.FAILED, "KILLED": RunState.CANCELLED}[status]
        copy = run.mlflow_run or ""
        what = f"the end of job {job.id} in MLflow as {status}"
        eventually(lambda copy=copy, status=status: client.get_run(copy).info.status == status, within_s=60, what=what)
    registry.queue.cancel(first.id)
    reaches(first, JobState.CANCELLED)


def pause(pid: int, settings: Settings) -> None:
    """Stops a process, but not inside a write: SQLite's lock would be held as long, and everybody else with it."""
    for _ in range(100):
        os.kill(pid, signal.SIGSTOP)
        with closing(sqlite3.connect(settings.registry_url.removeprefix("sqlite:///"), timeout=1.0)) as database:
            try:
                database.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError:
                os.kill(pid, signal.SIGCONT)
                time.sleep(0.05)
            else:
                return
    pytest.fail("the process was in a write whenever it was stopped")


def test_a_paused_worker_that_wakes_up_late_changes_nothing(
    registry: Registry, settings: Settings, reaches: Callable[..., Job], eventually: Eventually, tmp_path: Path
) -> None:
    job = submit(registry, steps=40, diary=str(tmp_path / "diary"))
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    pause(pid, settings)
    try:
        done = reaches(job, JobState.SUCCEEDED, within_s=40)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGCONT)
    assert (done.losses, done.attempt) == (1, 2)
    eventually(lambda: not alive(pid), within_s=20)
    assert "1 end" not in (tmp_path / "diary").read_text()
    assert registry.queue.job(job.id) == done


def test_a_killed_dispatcher_is_followed_by_one_that_adopts(
    registry: Registry, dispatcher: DispatcherProcess, reaches: Callable[..., Job], eventually: Eventually, tmp_path: Path
) -> None:
    job = submit(registry, steps=120, diary=str(tmp_path / "diary"))
    queued = submit(registry, cpus=2, steps=1)
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    dispatcher.kill()
    time.sleep(1.0)
    assert alive(pid)
    dispatcher.restart()
    done = reaches(job, JobState.SUCCEEDED)
    assert (done.attempt, done.losses) == (1, 0)
    assert (tmp_path / "diary").read_text().splitlines() == [f"1 begin {pid}", "1 end"]
    assert "adopted" in dispatcher.said()
    reaches(queued, JobState.SUCCEEDED)


def test_a_worker_that_dies_while_no_dispatcher_is_up_is_rescued(
    registry: Registry, dispatcher: DispatcherProcess, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    job = submit(registry, steps=60)
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    dispatcher.kill()
    os.kill(pid, signal.SIGKILL)
    dispatcher.restart()
    done = reaches(job, JobState.SUCCEEDED, within_s=40)
    assert (done.attempt, done.losses) == (2, 1)


def test_two_dispatchers_at_once_run_everything_once(
    registry: Registry, settings: Settings, ray_cluster: RayCluster, reaches: Callable[..., Job], tmp_path: Path
) -> None:
    second = DispatcherProcess(settings, ray_cluster)
    try:
        jobs = [submit(registry, cpus=0.5, steps=2, diary=str(tmp_path / f"diary-{n}")) for n in range(4)]
        for n, job in enumerate(jobs):
            assert reaches(job, JobState.SUCCEEDED, within_s=60).attempt == 1
            assert len((tmp_path / f"diary-{n}").read_text().splitlines()) == 2
    finally:
        assert second.stop() == 0


def test_told_to_stop_it_leaves_its_jobs_alone(
    registry: Registry, dispatcher: DispatcherProcess, reaches: Callable[..., Job], eventually: Eventually
) -> None:
    job = submit(registry, steps=80)
    pid = eventually(lambda: begun(registry, job))
    assert isinstance(pid, int)
    assert psutil.Process(dispatcher.process.pid).memory_info().rss < 250e6
    assert dispatcher.stop() == 0
    later = submit(registry, steps=1)
    assert reaches(job, JobState.SUCCEEDED).attempt == 1
    assert registry.queue.job(later.id).state == JobState.QUEUED
    dispatcher.restart()
    reaches(later, JobState.SUCCEEDED)


@pytest.mark.postgres
def test_the_same_on_postgresql(fresh_postgres: str, tmp_path: Path, ray_cluster: RayCluster, eventually: Eventually) -> None:
    settings = settings_for(tmp_path, ray_cluster, registry_url=fresh_postgres)
    migrate(settings.registry_url)
    with Registry.open(settings.registry_url) as registry, dispatching(settings, ray_cluster):
        job = submit(registry, steps=40, diary=str(tmp_path / "diary"))
        pid = eventually(lambda: begun(registry, job), within_s=60)
        assert isinstance(pid, int)
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: registry.queue.job(job.id).ended, within_s=60)
        done = registry.queue.job(job.id)
        assert (done.state, done.losses, done.attempt) == (JobState.SUCCEEDED, 1, 2)
        assert "printed by the job" in "".join(chunk.text for chunk in registry.queue.logs(job.id))


def test_it_lives_through_a_cluster_that_goes_away_and_comes_back(tmp_path: Path, eventually: Eventually) -> None:
    """Ray ends a driver whose cluster is gone; the dispatcher begins anew before that, and its job is tried again."""
    port, token = free_port(), a_token(tmp_path)
    settings = settings_for(tmp_path, RayCluster(f"127.0.0.1:{port}", {}))
    migrate(settings.registry_url)
    with Registry.open(settings.registry_url) as registry:
        with running_ray(port=port, token=token) as cluster, DispatcherProcess(settings, cluster) as dispatcher:
            job = submit(registry, steps=70)
            eventually(lambda: begun(registry, job), within_s=30)
            cluster.end(at_once=True)
            waits = submit(registry, steps=1)
            eventually(lambda: "does not answer" in (registry.queue.job(waits.id).reason or ""), within_s=20)
            assert dispatcher.process.poll() is None
            with running_ray(port=port, token=token):
                eventually(lambda: registry.queue.job(job.id).ended and registry.queue.job(waits.id).ended, within_s=60)
            assert dispatcher.stop() == 0
        done = registry.queue.job(job.id)
        assert (done.state, done.losses, done.attempt) == (JobState.SUCCEEDED, 1, 2)
        assert registry.queue.job(waits.id).state == JobState.SUCCEEDED


def test_it_waits_for_a_registry_that_is_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Eventually) -> None:
    settings = Settings(home=tmp_path, poll_s=0.05)
    migrate(settings.registry_url)
    dispatcher = Dispatcher(settings, start_anew=lambda: pytest.fail("it has no cluster to lose"))
    calls = []

    def away() -> list[Job]:
        calls.append(1)
        if len(calls) <= 2:
            raise RegistryUnavailable("away by the test")
        return []

    monkeypatch.setattr(dispatcher._queue, "rescue", away)
    thread = threading.Thread(target=dispatcher.run, daemon=True)
    thread.start()
    with Registry.open(settings.registry_url) as registry:
        eventually(registry.queue.dispatchers, within_s=15)
        [row] = registry.queue.dispatchers()
        assert (row.id, row.cluster["ray"]) == (dispatcher.name, "down")
        assert "no Ray cluster is known" in row.cluster["problem"]
    dispatcher.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert len(calls) > 2
