"""The commands against a real API and registry; this test plays the worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.api.app import create_app
from services.cli.main import _run
from services.registry import CurvePoint, Fence, Job, Measurement, Registry, migrate
from services.settings import Settings
from tests.serving import served

Out = Callable[..., tuple[int, str, str]]


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    """The registry of an API that the commands find."""
    settings = Settings(home=tmp_path)
    migrate(settings.registry_url)
    with served(create_app(settings)) as client, Registry.open(settings.registry_url) as opened:
        monkeypatch.setenv("LOOP_API_URL", str(client.base_url))
        monkeypatch.setenv("LOOP_HOME", str(tmp_path))
        yield opened


@pytest.fixture
def loop(capsys: pytest.CaptureFixture[str]) -> Out:
    """Runs a command; gives its exit code and what it wrote."""

    def run(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = _run(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def spec(tmp_path: Path) -> str:
    path = tmp_path / "train.yaml"
    path.write_text("kind: train\nname: small\n")
    return str(path)


def claim(registry: Registry) -> Job:
    ends = time.monotonic() + 20.0
    while time.monotonic() < ends:
        job = registry.queue.claim("here", cpus=4, gpus=0, memory_gb=1)
        if job is not None:
            registry.queue.begin(job.fence, "node-1", os.getpid())
            return job
        time.sleep(0.02)
    raise AssertionError("no job came")


def in_the_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def test_submit_applies_changes_and_says_the_number(registry: Registry, loop: Out, spec: str) -> None:
    assert loop("submit", spec, "optimizer.lr=2e-3", "--set", "seed=7", "--priority", "5") == (0, "job 1\n", "")
    job = registry.queue.job(1)
    assert (job.spec["optimizer"]["lr"], job.spec["seed"], job.priority) == (2e-3, 7, 5)
    assert job.user
    assert job.provenance["packages"]["torch"]
    assert job.provenance["python"].startswith("3.")


def test_submit_with_a_key_twice_is_one_job(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec, "--key", "a")
    code, out, _ = loop("submit", spec, "--key", "a", "--json")
    assert (code, json.loads(out)["id"]) == (0, 1)
    assert loop("submit", spec, "--key", "a")[1] == "job 1, which held the key 'a' already\n"
    code, out, err = loop("submit", spec, "seed=1", "--key", "a")
    assert (code, out) == (2, "")
    assert err.startswith("loop: key 'a' is held by job 1, whose spec is another one; expected the same spec or a free key; use")
    assert len(registry.queue.jobs()) == 1


def test_wait_follows_to_the_end_and_prints_the_result(registry: Registry, loop: Out, spec: str) -> None:
    def work() -> None:
        job = claim(registry)
        registry.queue.beat(job.fence, lease_s=60, progress={"done": 1, "total": 2, "unit": "steps", "rate": 1.0, "left_s": 1.0})
        time.sleep(0.6)
        registry.queue.succeed(job.fence, {"run": 1, "token_accuracy": 0.98765, "table": [{"rule": "standard", "regret": 0.5}]})

    worker = in_the_background(work)
    code, out, err = loop("submit", spec, "--wait")
    worker.join()
    assert code == 0
    assert "token_accuracy  0.9877" in out
    assert out.splitlines()[-2:] == ["rule      regret", "standard  0.5"]
    assert err.splitlines()[0] == "job 1"
    assert err.splitlines()[-1] == "job 1 train small: succeeded"


def test_wait_with_json_prints_the_whole_job_and_nothing_else(registry: Registry, loop: Out, spec: str) -> None:
    worker = in_the_background(lambda: registry.queue.succeed(claim(registry).fence, {"run": 1}))
    code, out, _ = loop("submit", spec, "--wait", "--json")
    worker.join()
    job = json.loads(out)
    assert (code, job["state"], job["losses"], job["result"]) == (0, "succeeded", 0, {"run": 1})


def test_a_job_that_fails_is_exit_code_1_with_its_reason(registry: Registry, loop: Out, spec: str) -> None:
    worker = in_the_background(lambda: registry.queue.fail(claim(registry).fence, "Traceback ...\nValueError: no such corpus"))
    code, out, err = loop("submit", spec, "--wait")
    worker.join()
    assert (code, out) == (1, "")
    assert "job 1 failed" in err.splitlines()[-1]
    assert "no such corpus" in err.splitlines()[-1]
    assert err.splitlines()[-1].endswith("see `loop logs 1`")
    code, out, _ = loop("job", "1")
    assert code == 0
    assert "ValueError: no such corpus" in out


def test_a_job_that_can_never_start_is_not_waited_for(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)
    registry.queue.cancel(1)
    code, _, err = loop("submit", spec, "--after", "1", "--wait")
    assert code == 1
    assert "job 2 cannot start: " in err.splitlines()[-1]
    assert "job 1" in err.splitlines()[-1]


def test_an_interrupted_wait_leaves_the_job_running_and_says_so(registry: Registry, spec: str) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-c", "from services.cli.main import main; main()", "submit", spec, "--wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    job = claim(registry)
    time.sleep(1.0)
    waiting.send_signal(signal.SIGINT)
    out, err = waiting.communicate(timeout=20)
    assert waiting.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "job 1 goes on; see it with `loop job 1`, end it with `loop cancel 1`"
    assert "Traceback" not in err
    registry.queue.beat(job.fence, lease_s=60)  # still its own


def test_logs_are_followed_over_attempts_to_the_end(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)

    def work() -> None:
        job = claim(registry)
        registry.queue.log(job.fence, "one\n")
        registry.queue.lose(job.fence, "its node went away")
        again = claim(registry)
        assert again.fence == Fence(1, 2)
        registry.queue.log(again.fence, "two\n")
        time.sleep(1.2)
        registry.queue.log(again.fence, "three\n")
        registry.queue.succeed(again.fence, {})

    worker = in_the_background(work)
    code, out, err = loop("logs", "1", "-f")
    worker.join()
    assert (code, out, err) == (0, "one\n--- attempt 2\ntwo\nthree\n", "")
    code, out, _ = loop("logs", "1", "--json")
    assert [json.loads(line)["text"] for line in out.splitlines()] == ["one\n", "two\n", "three\n"]
    _, out, _ = loop("job", "1")
    assert "losses     1 of 5" in out
    assert "its node went away" in out


def test_lists_say_why_a_job_waits(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)
    registry.queue.set_reason(1, "waiting: needs 1 GPU, the cluster has 0")
    code, out, _ = loop("jobs", "--state", "queued")
    assert code == 0
    assert out.splitlines()[0].split() == ["job", "kind", "state", "name", "user", "age", "progress"]
    assert out.splitlines()[1].endswith("waiting: needs 1 GPU, the cluster has 0")
    assert json.loads(loop("jobs", "--json")[1])["jobs"][0]["reason"] == "waiting: needs 1 GPU, the cluster has 0"
    assert loop("jobs", "--kind", "tune") == (0, "", "no jobs\n")
    code, out, err = loop("jobs", "--state", "done")
    assert (code, out) == (2, "")
    assert err.startswith("loop: state: got 'done'; expected 'queued', ")


def test_cancel_and_retry(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)
    assert loop("cancel", "1") == (0, "job 1 is cancelled\n", "")
    assert loop("retry", "1") == (0, "job 2\n", "")
    claim(registry)
    assert loop("cancel", "2") == (0, "job 2 was asked to stop\n", "")
    code, _, err = loop("retry", "2")
    assert code == 2
    assert err == "loop: cannot retry job 2: it is running; expected failed or cancelled\n"


def test_curves_and_measurements_are_exported(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)
    job = claim(registry)
    run = registry.records.open_run(job.fence, kind="train", spec=job.spec, provenance={})
    registry.records.add_points(job.fence, run.id, [CurvePoint(0, "loss", 1.5), CurvePoint(1, "loss", float("nan"))])
    registry.records.measure(job.fence, run.id, [Measurement("frontier", {"loop": 1}, 2.0, 1.5, 2.5)])
    assert loop("run", "1", "--curve", "--csv") == (0, "step,name,value\n0,loss,1.5\n1,loss,\n", "")
    assert json.loads(loop("run", "1", "--curve", "--name", "lr", "--json")[1]) == []
    assert (
        loop("run", "1", "--measurements", "--csv")[1] == 'instrument,axes,value,low,high\nfrontier,"{""loop"": 1}",2.0,1.5,2.5\n'
    )
    assert "state    running" in loop("run", "1")[1]
    assert loop("runs", "--job", "1")[1].splitlines()[1].split()[:2] == ["1", "1"]
    assert loop("run", "9")[0] == 2


def test_promote_finds_the_job_of_a_run(registry: Registry, loop: Out, spec: str) -> None:
    loop("submit", spec)
    job = claim(registry)
    registry.records.open_run(job.fence, kind="train", spec=job.spec, provenance={})
    registry.queue.succeed(job.fence, {"run": 1})
    assert loop("promote", "run:1", "s3@a", "--no-wait") == (0, "job 2\n", "")
    assert registry.queue.job(2).spec["job"] == 1
    assert loop("promote", "1", "s3@a", "--no-wait") == (0, "job 3\n", "")
    code, _, err = loop("promote", "2", "s3@a", "--no-wait")
    assert code == 2
    assert err == "loop: job: job 2 is of kind register; expected a train job; see `loop jobs --kind train`\n"
    assert loop("promote", "run:5", "s3@a")[2].startswith("loop: there is no run 5")
    assert loop("promote", "champion", "s3@a")[2].startswith("loop: cannot read 'champion'; expected the number of a train job")
