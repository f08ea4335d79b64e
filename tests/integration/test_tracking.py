"""The MLflow adapter on a real SQLite store, read back through MLflow itself."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow.tracking import MlflowClient

from services.registry import CurvePoint
from services.settings import Settings
from services.tracking import METRICS_A_CALL, ModelNotFound, Tracking, TrackingUnavailable

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return Settings(home=tmp_path_factory.mktemp("home"))


@pytest.fixture(scope="module")
def tracking(settings: Settings) -> Tracking:
    return Tracking(settings)


@pytest.fixture(scope="module")
def client(settings: Settings, tracking: Tracking) -> MlflowClient:
    tracking.prepare()
    return MlflowClient(tracking_uri=settings.mlflow_url, registry_uri=settings.mlflow_url)


def test_a_run_is_opened_once(tracking: Tracking, client: MlflowClient) -> None:
    first = tracking.start_run("s3", {"lr": 0.001, "task.group": "S3"}, {"loop.job": "7"}, key="7:1", started_at=1_000.5)
    tracking.end_run(first, "KILLED")
    again = tracking.start_run("s3", {"lr": 0.001, "task.group": "S3"}, {"loop.job": "7"}, key="7:1")
    other = tracking.start_run("child", {}, {}, key="7:2", parent=first)
    assert first == again != other
    run = client.get_run(first)
    assert run.info.status == "RUNNING"
    assert run.info.start_time == 1_000_500
    assert run.data.params == {"lr": "0.001", "task.group": "S3"}
    assert client.get_run(other).data.tags["mlflow.parentRunId"] == first


def test_runs_that_nobody_ended_are_found_by_their_keys(tracking: Tracking) -> None:
    left, ended, plain = (tracking.start_run(name, {}, {}, key=f"open:{name}") for name in ("left", "ended", "plain"))
    tracking.end_run(ended, "KILLED")
    found = tracking.running()
    assert (found[left], found[plain]) == ("open:left", "open:plain")
    assert ended not in found


def test_a_curve_sent_twice_is_there_once(tracking: Tracking, client: MlflowClient) -> None:
    run = tracking.start_run("curve", {}, {}, key="curve")
    points = [CurvePoint(step, "loss", 1.0 / (step + 1)) for step in range(METRICS_A_CALL + 5)]
    points.append(CurvePoint(METRICS_A_CALL + 5, "loss", None))
    tracking.log_points(run, points, origin_ms=1_000_000)
    tracking.log_points(run, points[-20:], origin_ms=1_000_000)
    history = client.get_metric_history(run, "loss")
    assert [metric.step for metric in history] == list(range(METRICS_A_CALL + 6))
    assert history[3].value == 0.25
    assert math.isnan(history[-1].value)


def test_figures_are_numbers_and_words(tracking: Tracking, client: MlflowClient) -> None:
    run = tracking.start_run("figures", {}, {}, key="figures")
    tracking.log_figures(run, {"accuracy": 0.75, "outcome": "solved", "nothing": None, "solved": True}, step=9)
    data = client.get_run(run).data
    assert data.metrics == {"final.accuracy": 0.75}
    assert data.tags["final.outcome"] == "solved"
    assert data.tags["final.solved"] == "True"
    tracking.end_run(run)
    tracking.end_run(run)
    assert client.get_run(run).info.status == "FINISHED"


def test_artifacts_lie_below_the_settings_folder(tracking: Tracking, settings: Settings, tmp_path: Path) -> None:
    run = tracking.start_run("artifacts", {}, {}, key="artifacts")
    (tmp_path / "plot.svg").write_text("<svg/>")
    tracking.log_artifacts(run, tmp_path / "plot.svg", "plots")
    assert [path.name for path in (settings.artifacts / "mlflow").rglob("plots/*")] == ["plot.svg"]


def test_a_version_is_made_once_and_found_by_its_alias(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text("flavors: {}\n")
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "artifacts" / "profile.json").write_text("{}")
    run = tracking.start_run("model", {}, {}, key="model")
    first = tracking.register("s3", files=tmp_path, mlflow_run=run, tags={"v": "1.02"}, key="41")
    again = tracking.register("s3", files=tmp_path, mlflow_run=run, tags={"v": "1.02"}, key="41")
    second = tracking.register("s3", files=tmp_path, mlflow_run=run, tags={"v": "1.03"}, key="42")
    assert (first, again, second) == ("1", "1", "2")
    tracking.set_alias("s3", "demo", "1")
    found = tracking.resolve("s3@demo")
    assert (found.name, found.version, found.aliases, found.mlflow_run) == ("s3", "1", ("demo",), run)
    assert found.tags["v"] == "1.02"
    assert found.profile.read_text() == "{}"
    assert found.path.is_dir()
    tracking.set_alias("s3", "demo", "2")
    assert tracking.resolve("s3@demo").version == "2"
    [model] = tracking.models()
    assert (model.name, model.aliases, model.latest, model.tags["v"]) == ("s3", {"demo": "2"}, "2", "1.03")


def test_a_model_that_is_not_there_says_what_is(tracking: Tracking, tmp_path: Path) -> None:
    (tmp_path / "MLmodel").write_text("flavors: {}\n")
    run = tracking.start_run("model", {}, {}, key="model")
    tracking.set_alias("a4", "champion", tracking.register("a4", files=tmp_path, mlflow_run=run, tags={}, key="50"))
    with pytest.raises(ModelNotFound, match=r"model a4 has no alias 'demo'.*a4@champion"):
        tracking.resolve("a4@demo")
    with pytest.raises(ModelNotFound, match=r"there is no model a5@demo.*a4"):
        tracking.resolve("a5@demo")
    with pytest.raises(ModelNotFound, match="no version 99 of model a4"):
        tracking.version("a4", "99")
    with pytest.raises(ValueError, match="name@alias"):
        tracking.resolve("a4")


def test_a_server_that_is_down_is_told_within_our_patience(tmp_path: Path, free_port: Callable[[], int]) -> None:
    url = f"http://user:secret@127.0.0.1:{free_port()}"
    tracking = Tracking(Settings(home=tmp_path, mlflow_url=url), patience_s=0.5)
    with pytest.raises(TrackingUnavailable, match="LOOP_MLFLOW_URL") as caught:
        tracking.start_run("x", {}, {}, key="x")
    assert "secret" not in str(caught.value)


def test_processes_that_meet_an_empty_store_at_once(tmp_path: Path) -> None:
    code = (
        "from services.settings import Settings; from services.tracking import Tracking; import sys; from pathlib import Path;"
        "print(Tracking(Settings(home=Path(sys.argv[1]))).start_run(sys.argv[2], {}, {}, key=sys.argv[2]))"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", code, str(tmp_path), str(n)], stdout=subprocess.PIPE, text=True) for n in range(2)
    ]
    ids = [process.communicate(timeout=60)[0].strip() for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert len(set(ids)) == 2


def test_importing_it_loads_no_mlflow(run_python: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    ran = run_python(
        "import sys, services.tracking; print([m for m in ('mlflow', 'torch', 'ray', 'pandas') if m in sys.modules])"
    )
    assert ran.stdout.strip() == "[]", ran.stderr


def test_the_stock_page_reads_the_store(settings: Settings, client: MlflowClient, free_port: Callable[[], int]) -> None:
    """`mlflow ui` with nothing but the database's URL shows the experiment."""
    import httpx

    port = free_port()
    env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [
        sys.executable,
        "-m",
        "mlflow",
        "ui",
        "--backend-store-uri",
        settings.mlflow_url,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    server = subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        for _ in range(400):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if server.poll() is not None:
                pytest.fail("mlflow ui ended")
            time.sleep(0.1)
        answer = httpx.post(
            f"http://127.0.0.1:{port}/api/2.0/mlflow/experiments/search", json={"max_results": 10}, timeout=30
        ).json()
        assert "loop" in [found["name"] for found in answer["experiments"]]
    finally:
        os.killpg(server.pid, 15)
        server.wait(20)
