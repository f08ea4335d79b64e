"""The inference service on real Ray Serve, brought up by real jobs: swap, full line, disconnects, a replica killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from loopcore.specs import ServeJob
from services.registry import Job, JobState, Registry, migrate
from services.settings import Settings
from services.tracking import Tracking
from tests.integration.dispatching import dispatching, settings_for, submit
from tests.integration.ray_cluster import ROOT, RayCluster
from tests.published import publish, small_model, small_spec

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]

PREDICT = "/v1/models/s3@demo/predict"
WORD = [3, 1, 4, 2]


@dataclass
class Stack:
    """A dispatcher, and a client of the service it brought up."""

    settings: Settings
    registry: Registry
    tracking: Tracking
    client: httpx.Client
    run: str
    folder: Path

    def register(self, model: str, version: str, *, seed: int) -> None:
        """Publishes weights that depend on `seed` as the next version, and points the alias at it."""
        name, _, alias = model.partition("@")
        files = publish(self.folder, model, version, seed=seed).checkpoint.parent
        holder = files / "files"
        (holder / "artifacts").mkdir(parents=True)
        (holder / "MLmodel").write_text("flavors: {}\n")
        for part in ("checkpoint", "profile.json"):
            (files / part).rename(holder / "artifacts" / part)
        made = self.tracking.register(name, files=holder, mlflow_run=self.run, tags={}, key=f"{model}-{version}")
        assert made == version
        self.tracking.set_alias(name, alias, version)

    def serve(self, model: str) -> Job:
        """Submits a `serve` job and waits for its end."""
        spec = ServeJob(model=model).resolved()
        job = submit(self.registry, "serve", cpus=0.0, spec=spec)
        ends = time.monotonic() + 180.0
        while not (found := self.registry.queue.job(job.id)).ended:
            assert time.monotonic() < ends, found
            time.sleep(0.1)
        return found

    def card(self, model: str = "s3@demo") -> dict[str, Any]:
        return self.client.get(f"/v1/models/{model}").json()


@pytest.fixture(scope="module")
def stack(ray_cluster: RayCluster, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Stack]:
    from tests.integration.ray_cluster import free_port

    home = tmp_path_factory.mktemp("inference")
    settings = settings_for(home, ray_cluster, inference_port=free_port(), inference_queue=8, inference_rows=2)
    given = {
        f"LOOP_{name.upper()}": str(getattr(settings, name)) for name in ("inference_port", "inference_queue", "inference_rows")
    }
    migrate(settings.registry_url)
    tracking = Tracking(settings)
    with (
        pytest.MonkeyPatch.context() as patch,
        Registry(settings.registry_url) as registry,
        httpx.Client(base_url=f"http://127.0.0.1:{settings.inference_port}", trust_env=False, timeout=30.0) as client,
    ):
        for name, value in given.items():
            patch.setenv(name, value)
        run = tracking.start_run("models", {}, {}, key="models")
        stack = Stack(settings, registry, tracking, client, run, home / "published")
        stack.register("s3@demo", "1", seed=0)
        with dispatching(settings, ray_cluster):
            yield stack
        code = (
            f"import ray; ray.init({ray_cluster.address!r}, log_to_driver=False);"
            "from services.inference.hosting import shut_down; shut_down()"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | ray_cluster.environment,
            cwd=ROOT,
            timeout=60,
            check=False,
            capture_output=True,
        )
        assert ended.returncode == 0, ended.stderr.decode()[-2000:]


def right(seed: int, loops: int = 5) -> list[int]:
    with torch.inference_mode():
        return small_model(small_spec(seed=seed))(torch.tensor([WORD]), loops).argmax(-1)[0].tolist()


def test_a_serve_job_ends_once_the_model_answers(stack: Stack) -> None:
    job = stack.serve("s3@demo")
    assert job.state is JobState.SUCCEEDED, job.error
    assert job.result == {
        "url": f"http://127.0.0.1:{stack.settings.inference_port}",
        "model": "s3@demo",
        "version": "1",
        "replicas": 1,
    }
    assert [row.model for row in stack.registry.queue.served()] == ["s3@demo"]
    answer = stack.client.post(PREDICT, json={"inputs": WORD}).json()
    assert (answer["outputs"], answer["loops_used"], answer["model_version"]) == (right(0), 5, "1")
    assert stack.client.get("/v2/health/ready").json() == {"ready": True}
    began = time.monotonic()
    again = stack.serve("s3@demo")
    assert again.state is JobState.SUCCEEDED
    assert time.monotonic() - began < 25.0


def test_a_model_that_is_not_registered_fails_the_job_with_what_there_is(stack: Stack) -> None:
    job = stack.serve("a5@demo")
    assert job.state is JobState.FAILED
    assert "there is no model a5@demo" in str(job.error)
    assert "s3" in str(job.error)
    assert "Traceback" not in str(job.error)
    assert [row.model for row in stack.registry.queue.served()] == ["s3@demo"]


def test_a_version_that_cannot_be_loaded_fails_the_job_and_is_not_served(stack: Stack) -> None:
    stack.register("broken@demo", "1", seed=0)
    weights = stack.tracking.resolve("broken@demo").checkpoint / "step-00000001" / "tensors.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    job = stack.serve("broken@demo")
    assert job.state is JobState.FAILED
    assert "broken@demo version 1 cannot be brought up: the checkpoint" in str(job.error)
    assert "Traceback" not in str(job.error)
    assert [row.model for row in stack.registry.queue.served()] == ["s3@demo"]


def test_a_stream_comes_through_the_proxy_loop_by_loop(stack: Stack) -> None:
    body = {"inputs": WORD, "halt": "fixed:3"}
    with stack.client.stream("POST", PREDICT, json=body, headers={"accept": "text/event-stream"}) as answer:
        names = [line.removeprefix("event: ") for line in answer.iter_lines() if line.startswith("event: ")]
    assert names == ["loop", "loop", "loop", "answer"]


def test_refusals_come_through_the_proxy(stack: Stack) -> None:
    assert stack.client.post(PREDICT, json={"inputs": [9]}).status_code == 400
    assert stack.client.post(PREDICT, content=b" " * (2**20 + 1)).status_code == 413
    assert stack.client.post("/v1/models/no@model/predict", json={"inputs": [1]}).status_code == 404
    assert stack.client.get("/v2", headers={"host": "attacker.example"}).status_code == 421


def test_a_promotion_under_load_loses_nothing(stack: Stack) -> None:
    """The alias moves while eight clients ask: no request fails, and each answer is that of the version it names."""
    expected = {"1": right(0), "2": right(1)}
    assert expected["1"] != expected["2"]
    over = threading.Event()

    def ask() -> list[tuple[int, str, bool]]:
        told = []
        with httpx.Client(base_url=stack.client.base_url, trust_env=False, timeout=30.0) as client:
            while not over.is_set():
                answer = client.post(PREDICT, json={"inputs": WORD})
                body = answer.json()
                version = str(body.get("model_version"))
                told.append((answer.status_code, version, body.get("outputs") == expected.get(version)))
        return told

    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask) for _ in range(8)]
        time.sleep(0.5)
        stack.register("s3@demo", "2", seed=1)
        ends = time.monotonic() + 15.0
        while stack.card()["version"] != "2" and time.monotonic() < ends:
            time.sleep(0.1)
        time.sleep(0.5)
        over.set()
        told = Counter(one for client in clients for one in client.result())
    assert set(told) == {(200, "1", True), (200, "2", True)}, told


def test_another_model_is_added_and_the_first_stays(stack: Stack) -> None:
    stack.register("other@demo", "1", seed=2)
    assert stack.serve("other@demo").state is JobState.SUCCEEDED
    listed = stack.client.get("/v1/models").json()["models"]
    assert [(one["model"], one["state"], one["version"]) for one in listed] == [
        ("other@demo", "ready", "1"),
        ("s3@demo", "ready", "2"),
    ]
    assert stack.registry.queue.unserve("other@demo")
    ends = time.monotonic() + 10.0
    while stack.client.get("/v1/models/other@demo").status_code != 404:
        assert time.monotonic() < ends
        time.sleep(0.1)
    assert stack.client.post(PREDICT, json={"inputs": WORD}).json()["outputs"] == right(1)


def test_a_full_line_is_503_with_a_time_to_come_back(stack: Stack) -> None:
    """Two rows and eight places for sixteen requests of eight words and 64 loops: some wait, some are refused, none is lost."""
    words = [[1] * 16] * 8

    def ask(_: int) -> httpx.Response:
        return httpx.post(
            f"{stack.client.base_url}{PREDICT}".replace("//v1", "/v1"),
            json={"inputs": words, "halt": "fixed:64"},
            trust_env=False,
            timeout=60.0,
        )

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(16)))
    told = Counter(answer.status_code for answer in answers)
    assert set(told) == {200, 503}, told
    for answer in answers:
        if answer.status_code == 503:
            assert int(answer.headers["retry-after"]) >= 1
            assert "words are waiting" in answer.json()["error"]
        else:
            assert answer.json()["loops_used"] == [64] * 8


def test_a_client_that_leaves_frees_its_row(stack: Stack, eventually: Callable[..., object]) -> None:
    def cancelled() -> bool:
        lines = stack.client.get("/metrics").text.splitlines()
        return any(line.startswith("loop_inference_words_finished_total") and 'exit_reason="cancelled"' in line for line in lines)

    def leaves() -> bool:
        try:
            stack.client.post(PREDICT, json={"inputs": [[1] * 16] * 8, "halt": "fixed:64"}, timeout=0.03)
        except httpx.ReadTimeout:
            return True
        return False

    assert not cancelled()
    eventually(lambda: leaves() and cancelled(), within_s=10.0, every_s=0.5, what="a word given up")
    eventually(lambda: (stack.card()["live"], stack.card()["waiting"]) == (0, 0), within_s=10.0, what="an empty engine")


def test_a_replica_killed_under_load_is_503_for_what_it_held_and_is_back_within_30_s(stack: Stack) -> None:
    """Ten clients keep its rows and its line full, two of them by streams: each is answered rightly or told to come back."""
    over = threading.Event()
    word, loops = [1] * 16, 64
    with torch.inference_mode():
        expected = small_model(small_spec(seed=1))(torch.tensor([word]), loops).argmax(-1)[0].tolist()

    def ask(streams: bool) -> list[tuple[float, int, Any]]:
        told = []
        headers = {"accept": "text/event-stream"} if streams else {}
        with httpx.Client(base_url=stack.client.base_url, trust_env=False, timeout=30.0, headers=headers) as client:
            while not over.is_set():
                answer = client.post(PREDICT, json={"inputs": word, "halt": f"fixed:{loops}"})
                body, status = _last(answer)
                if status == 503:
                    assert set(body) - {"status"} == {"error", "expected", "hint", "field", "problems"}
                    assert answer.status_code == 200 or int(answer.headers["retry-after"]) >= 1
                    time.sleep(0.2)
                told.append((time.monotonic(), status, body.get("outputs", body.get("error"))))
        return told

    [pid] = _replicas()
    with ThreadPoolExecutor(10) as pool:
        clients = [pool.submit(ask, number < 2) for number in range(10)]
        time.sleep(1.0)
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        while time.monotonic() - killed < 30.0 and (not _replicas() or stack.client.get("/v2/health/ready").status_code != 200):
            time.sleep(0.1)
        time.sleep(1.0)
        over.set()
        told = sorted(one for client in clients for one in client.result())
    gone = [(at, what) for at, status, what in told if status == 503 and "words are waiting" not in what]
    assert {status for _, status, _ in told} == {200, 503}, Counter(status for _, status, _ in told)
    assert [what for _, status, what in told if status == 200 and what != expected] == []
    assert {what for _, what in gone} == {"the replica that had this request ended before it answered"}
    assert 1 <= len(gone) <= 10
    assert min(at for at, _ in gone) >= killed
    assert min(at for at, status, _ in told if status == 200 and at > max(at for at, _ in gone)) - killed < 30.0
    assert pid not in _replicas()


def _last(answer: httpx.Response) -> tuple[dict[str, Any], int]:
    """The answer and its status; those of its last event where it is a stream."""
    if not answer.headers["content-type"].startswith("text/event-stream"):
        return answer.json(), answer.status_code
    name, data = answer.text.rstrip().split("\n\n")[-1].split("\n")
    body = json.loads(data.removeprefix("data: "))
    return body, 200 if name == "event: answer" else body["status"]


def _replicas() -> list[int]:
    """Processes that Ray has named after the service's replicas, by /proc."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if command.startswith("ray::ServeReplica:loop-inference:"):
            found.append(int(folder.name))
    return found
