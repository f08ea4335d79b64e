"""The local stack: it comes up whole, keeps itself up, and goes away whole."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.acceptance.stack import Stack, environment_for

Eventually = Callable[..., object]

LONG = ("steps=20000", "evaluate_every=50", "checkpoint_every=50", "optimizer.decay=none", "contract.promote_at=1.0")


def test_it_is_ready_and_says_of_what_it_is_made(stack: Stack) -> None:
    found = stack.json("status")
    assert (found["up"], found["ready"], found["problem"]) == (True, True, None)
    assert urlsplit(found["stack"]["api"]["url"]).port == int(stack.environment["LOOP_API_PORT"])
    (dispatcher,) = found["cluster"]["dispatchers"]
    assert [node["cpus"] for node in dispatcher["cluster"]["nodes"]] == [2.0]
    assert stack.get("/health/ready").status_code == 200


def test_a_job_runs_to_its_end_and_its_curve_is_there(stack: Stack, quick: str) -> None:
    job = stack.json("submit", quick, "--wait")
    assert (job["state"], job["losses"], job["errors"], job["attempt"]) == ("succeeded", 0, 0, 1)
    (run,) = stack.json("runs", "--job", str(job["id"]))["runs"]
    curve = stack.json("run", str(run["id"]), "--curve", "--name", "loss")
    assert [point["step"] for point in curve] == sorted(point["step"] for point in curve)
    assert curve[-1]["step"] == 20
    assert stack.loop("logs", str(job["id"])).returncode == 0


def test_doctor_finds_nothing_wrong(stack: Stack) -> None:
    found = stack.json("doctor")
    assert found["healthy"], [finding for finding in found["findings"] if finding["level"] == "problem"]
    looked_at = {finding["what"].split()[0] for finding in found["findings"]}
    assert {"python", "torch", "ray", "mlflow", "disk", "ray-token", "registry", "clock", "dispatcher"} <= looked_at


def test_it_listens_on_loopback_only_and_shows_no_secret(stack: Stack) -> None:
    mine = set(stack.processes()) | {stack.state["supervisor"]}
    listening = [
        line for line in _listeners() if any(f"pid={pid}," in line for pid in mine) and "127.0.0.1" not in line.split()[3]
    ]
    assert listening == []
    for name in ("ray-token", "stack.json"):
        assert (stack.home / name).stat().st_mode & 0o777 == 0o600
    token = (stack.home / "ray-token").read_text()
    for pid in mine:
        assert token not in _command_line(pid)


def _listeners() -> list[str]:
    try:
        return subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True).stdout.splitlines()
    except FileNotFoundError:
        pytest.skip("needs ss (iproute2) to see who listens where")


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def test_a_second_one_in_the_same_home_is_refused_and_the_first_stays(stack: Stack) -> None:
    for arguments in (["up"], ["up", "--detach"]):
        done = stack.loop(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(f"loop: a stack of {stack.home} is running already (API at http://127.0.0.1:")
        assert len(done.stderr.splitlines()) == 1
    assert stack.json("status")["ready"]


def test_a_dispatcher_or_api_that_dies_is_started_again(stack: Stack, quick: str, eventually: Eventually) -> None:
    for part in ("dispatcher", "api"):
        before = stack.state[part]
        os.kill(before["pid"], signal.SIGKILL)
        eventually(lambda part=part, before=before: stack.state[part]["restarts"] > before["restarts"], what=f"a new {part}")
    eventually(lambda: stack.loop("status").returncode == 0, within_s=60, what="a ready stack")
    assert stack.json("submit", quick, "--wait")["state"] == "succeeded"


def test_a_job_whose_process_is_killed_goes_on_from_its_checkpoint(stack: Stack, quick: str, eventually: Eventually) -> None:
    job = stack.submit(quick, "steps=400", "checkpoint_every=20")
    eventually(lambda: _step(stack, job) >= 60, within_s=120, what="step 60")
    (attempt,) = _attempts(stack, job)
    os.kill(attempt["pid"], signal.SIGKILL)
    eventually(lambda: _job(stack, job)["state"] == "succeeded", within_s=120, what="the job's success")
    found = stack.json("job", str(job))
    assert (found["losses"], found["errors"], found["attempt"]) == (1, 0, 2)
    assert _attempts(stack, job)[0]["outcome"] == "lost"


def _step(stack: Stack, job: int) -> float:
    return (_job(stack, job)["progress"] or {}).get("done") or 0


def _job(stack: Stack, job: int) -> dict:
    return stack.get(f"/v1/jobs/{job}").json()


def _attempts(stack: Stack, job: int) -> list[dict]:
    return stack.get(f"/v1/jobs/{job}/attempts").json()["attempts"]


def test_a_running_job_is_cancelled_with_a_checkpoint_and_keeps_its_log(stack: Stack, quick: str, eventually: Eventually) -> None:
    job = stack.submit(quick, *LONG)
    eventually(lambda: _step(stack, job) >= 10, within_s=120, what="step 10")
    asked = time.monotonic()
    assert stack.loop("cancel", str(job)).stdout == f"job {job} was asked to stop\n"
    eventually(lambda: _job(stack, job)["state"] == "cancelled", within_s=15, what="the job's end")
    assert time.monotonic() - asked < 15
    (run,) = stack.json("runs", "--job", str(job))["runs"]
    assert run["checkpoint_step"] >= 10
    assert Path(run["checkpoint"]).is_dir()
    assert stack.loop("logs", str(job)).returncode == 0


def test_a_job_that_runs_when_the_stack_goes_down_goes_on_when_it_is_up_again(
    tmp_path: Path, quick: str, eventually: Eventually
) -> None:
    """Nothing is lost by it: no loss is counted, no lease waited for, and the curve is that of a job nobody disturbed."""
    from mlflow.tracking import MlflowClient

    own = Stack(tmp_path / "home", environment_for(tmp_path / "home"))
    spec = ("steps=2000", "evaluate_every=500", "checkpoint_every=100000", "optimizer.decay=none", "contract.promote_at=1.0")
    try:
        assert own.loop("up", "--detach").returncode == 0
        alone = own.json("submit", quick, *spec, "--wait")["id"]
        job = own.submit(quick, *spec)
        eventually(lambda: _step(own, job) >= 20, within_s=120, what="step 20")
        assert own.loop("down").returncode == 0
        assert own.loop("up", "--detach").returncode == 0
        first = _attempts(own, job)[0]
        assert first["outcome"] == "released"
        eventually(lambda: _job(own, job)["state"] == "succeeded", within_s=80, what="the job's success")
        found = _job(own, job)
        assert (found["losses"], found["errors"], found["attempt"]) == (0, 0, 2)
        log = own.loop("logs", str(job)).stdout
        (stopped,) = re.findall(r"stopped at step (\d+)", log)
        assert 20 <= int(stopped) < 2000
        assert f"goes on from step {stopped}" in log
        (run,) = own.json("runs", "--job", str(job))["runs"]
        (other,) = own.json("runs", "--job", str(alone))["runs"]
        curve, undisturbed = (_curve(own, row["id"]) for row in (run, other))
        assert [step for step, _ in curve] == list(range(1, 2001))
        assert curve == undisturbed
    finally:
        own.loop("down")
    client = MlflowClient(tracking_uri=f"sqlite:///{own.home}/mlflow.db")
    copies = [copy for one in client.search_experiments() for copy in client.search_runs([one.experiment_id])]
    assert sorted((copy.data.tags["loop.job"], copy.info.status) for copy in copies) == [
        (str(alone), "FINISHED"),
        (str(job), "FINISHED"),
    ]


def _curve(stack: Stack, run: int) -> list[tuple[int, float]]:
    return [(point["step"], point["value"]) for point in stack.json("run", str(run), "--curve", "--name", "loss")]


def test_an_interrupted_foreground_stack_takes_everything_along(tmp_path: Path, quick: str, eventually: Eventually) -> None:
    """It also is killed outright while a job runs, and what was left is ended by `loop down`."""
    own = Stack(tmp_path / "home", environment_for(tmp_path / "home"))
    foreground = own.start("up")
    try:
        eventually(lambda: own.loop("status").returncode == 0, within_s=120, every_s=0.5, what="a ready stack")
        job = own.submit(quick, *LONG)
        eventually(lambda: _step(own, job) >= 10, within_s=120, what="step 10")
        everything, state = own.processes(), own.state
        assert len(everything) >= 8  # API, dispatcher, keeper, Ray's own and the job's
        foreground.send_signal(signal.SIGINT)
        out, err = foreground.communicate(timeout=60)
    finally:
        foreground.kill()
        own.loop("down")
    assert foreground.returncode == 0, err
    assert state["api"]["url"] in out
    assert [pid for pid in everything if Path(f"/proc/{pid}/environ").exists() and _belongs(pid, state["mark"])] == []
    assert not (own.home / "stack.json").exists()
    for port in (state["api"]["url"].rpartition(":")[2], state["ray"]["address"].rpartition(":")[2]):
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(port))) != 0
    assert own.loop("down").stdout == f"no stack of {own.home} was up\n"
    assert own.loop("status").returncode == 1


def _belongs(pid: int, mark: str) -> bool:
    try:
        return f"LOOP_STACK={mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def test_a_killed_supervisor_leaves_nothing_that_works_on(stack: Stack, tmp_path: Path, eventually: Eventually) -> None:
    own = _joined(stack, tmp_path)
    assert own.loop("up", "--detach").returncode == 0
    mark, supervisor = own.state["mark"], own.state["supervisor"]
    os.kill(supervisor, signal.SIGKILL)
    eventually(lambda: own.processes() == [], within_s=15, what="the end of its parts")
    done = own.loop("jobs")
    assert done.returncode == 1
    assert "does not answer; start the stack with `loop up --detach`" in done.stderr
    assert own.loop("up", "--detach").returncode == 0, "a new one comes up over what the old one left"
    assert own.state["mark"] != mark
    assert own.loop("down").stdout == f"the stack of {own.home} is down\n"


def test_a_stack_whose_home_is_removed_ends_itself(stack: Stack, tmp_path: Path, eventually: Eventually) -> None:
    own = _joined(stack, tmp_path)
    assert own.loop("up", "--detach").returncode == 0
    state = own.state
    shutil.rmtree(own.home)
    eventually(lambda: not _alive(state["supervisor"]), within_s=60, what="the supervisor's end")
    assert [pid for pid in (state["api"]["pid"], state["dispatcher"]["pid"]) if _alive(pid)] == []


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _joined(stack: Stack, tmp_path: Path, **more: str) -> Stack:
    """A second installation on the first one's Ray."""
    home = tmp_path / "joined"
    environment = environment_for(
        home,
        LOOP_RAY_ADDRESS=stack.state["ray"]["address"],
        LOOP_RAY_NAMESPACE=tmp_path.name,
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(stack.home / "ray-token"),
        LOOP_MLFLOW_URL=f"sqlite:///{stack.home}/mlflow.db",  # its tables take seconds to make
        **more,
    )
    return Stack(home, environment)


@pytest.mark.postgres
def test_it_works_the_same_on_postgresql_and_on_a_cluster_that_was_there(
    stack: Stack, tmp_path: Path, quick: str, fresh_postgres: str
) -> None:
    own = _joined(stack, tmp_path, LOOP_REGISTRY_URL=fresh_postgres)
    up = own.loop("up", "--detach", "--json")
    assert up.returncode == 0, up.stderr
    try:
        assert json.loads(up.stdout)["ray"] == {"address": stack.state["ray"]["address"], "own": False}
        job = own.json("submit", quick, "--wait", "--key", "a")
        assert (job["id"], job["state"]) == (1, "succeeded")
        assert own.json("doctor")["healthy"]
    finally:
        assert own.loop("down").returncode == 0
    assert not (own.home / "registry.db").exists()
    assert stack.json("status")["ready"], "the cluster it had joined is still there"
