"""What bad input gets: one line that says what was expected and what to do, the right exit code, nothing done by half."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

import pytest

from tests.acceptance.stack import Stack, environment_for

TRAIN = "examples/train_s3.yaml"
ROOT = Path(__file__).resolve().parents[2]


def jobs(stack: Stack) -> list[int]:
    return [job["id"] for job in stack.get("/v1/jobs").json()["jobs"]]


@pytest.fixture
def refused(stack: Stack):
    """Runs a command that must be refused; gives its one line. The stack stays up, and nothing was queued."""

    def run(*arguments: str, code: int = 2) -> str:
        before = jobs(stack)
        done = stack.loop(*arguments)
        assert done.returncode == code, done.stderr
        assert done.stdout == ""
        assert done.stderr.startswith("loop: ")
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert jobs(stack) == before
        assert stack.get("/health/ready").status_code == 200
        return done.stderr.removeprefix("loop: ").strip()

    return run


def spec(tmp_path: Path, text: str) -> str:
    path = tmp_path / "spec.yaml"
    path.write_text(text)
    return str(path)


def test_an_unknown_field(refused) -> None:
    line = refused("submit", str(ROOT / TRAIN), "model.widht=64")
    assert line.startswith("model.widht: unknown field; expected one of ")
    assert line.endswith("did you mean width?")


def test_a_wrong_type(refused) -> None:
    assert refused("submit", str(ROOT / TRAIN), "batch=many") == "batch: got 'many'; expected a whole number"


def test_fewer_loops_than_one(refused) -> None:
    line = refused("submit", str(ROOT / TRAIN), "contract.loops={kind: fixed, count: 0}")
    assert line == "contract.loops.count: got 0; expected at least 1"


def test_a_group_that_does_not_exist(refused) -> None:
    line = refused("submit", str(ROOT / TRAIN), "task.group=Q8")
    assert line.startswith("task.group: expected a group such as Z60, D4, S3, A5")
    assert "'Q8'" in line


def test_a_device_that_there_is_not(refused) -> None:
    assert refused("submit", str(ROOT / TRAIN), "device=tpu") == "device: got 'tpu'; expected 'auto', 'cpu' or 'cuda'"
    line = refused("submit", str(ROOT / TRAIN), "device=cuda")
    assert line == "device cuda needs resources.gpus above 0; set it, or leave device at auto"


def test_a_gpu_that_the_cluster_has_not_is_waited_for_with_its_reason(stack: Stack, eventually) -> None:
    job = stack.submit(str(ROOT / TRAIN), "device=cuda", "resources.gpus=1")
    told = "waiting: needs 1 GPU, the cluster has 0"
    eventually(lambda: stack.json("job", str(job))["reason"] == told, within_s=20, what=told)
    assert stack.loop("cancel", str(job)).returncode == 0


def test_a_yaml_that_is_no_mapping(refused, tmp_path: Path) -> None:
    path = spec(tmp_path, "- kind: train\n")
    assert refused("submit", path) == f"{path} holds a list; expected a mapping of fields, such as `kind: train`"


def test_a_file_that_is_no_yaml(refused, tmp_path: Path) -> None:
    path = spec(tmp_path, "kind: train\nmodel: {width: 64\n")
    assert refused("submit", path).startswith(f"{path} is no YAML, line 3, column 1: ")


@pytest.mark.parametrize("command", [["job"], ["logs"], ["cancel"], ["retry"]], ids=lambda command: command[0])
def test_a_job_that_does_not_exist(refused, command: list[str]) -> None:
    line = refused(*command, "4711")
    assert line == "there is no job 4711; expected the number of a job in the registry; see `loop jobs`"


def test_a_probe_of_a_job_that_does_not_exist(refused) -> None:
    assert refused("submit", str(ROOT / "examples/probe.yaml"), "job=4711").startswith("there is no job 4711; ")


def test_an_alias_that_does_not_exist(refused) -> None:
    line = refused("serve", "nothing@nobody")
    assert line.startswith("there is no model nothing@nobody; expected one that was registered")


def test_a_name_that_is_no_model(refused) -> None:
    assert refused("serve", "s3") == "expected a model as name@alias, for example s3@champion, got 's3'"


def test_a_port_that_somebody_else_has(stack: Stack, tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        for part, what in (("API", "the API"), ("INFERENCE", "the inference service")):
            home = tmp_path / part
            done = Stack(home, environment_for(home, **{f"LOOP_{part}_PORT": str(port)})).loop("up", "--detach")
            assert done.returncode == 2
            assert done.stderr.startswith(
                f"loop: port {port} on 127.0.0.1, meant for {what}, is taken by another program; "
                f"expected a free one: set LOOP_{part}_PORT="
            )
            assert len(done.stderr.splitlines()) == 1
            assert not (home / "stack.json").exists()
            assert not (home / "registry.db").exists()
    assert stack.get("/health/ready").status_code == 200


def test_a_registry_of_a_newer_version(tmp_path: Path) -> None:
    own = Stack(tmp_path, environment_for(tmp_path))
    assert own.loop("db", "upgrade").returncode == 0
    with sqlite3.connect(tmp_path / "registry.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    for arguments in (["up"], ["up", "--detach"], ["db", "upgrade"]):
        done = own.loop(*arguments)
        assert done.returncode == 2, done.stderr
        assert "has schema 9999; this version knows up to" in done.stderr
        assert done.stderr.strip().endswith("upgrade loopcore")
        assert len(done.stderr.splitlines()) == 1
    assert own.loop("doctor").returncode == 1
    with sqlite3.connect(tmp_path / "registry.db") as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchall() == [("9999",)]


def test_a_registry_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "registry.db").write_text("my notes\n" * 1000)
    done = Stack(tmp_path, environment_for(tmp_path)).loop("up", "--detach")
    assert done.returncode == 1
    assert done.stderr.startswith("loop: the registry at ")
    assert len(done.stderr.splitlines()) == 1
    assert (tmp_path / "registry.db").read_text() == "my notes\n" * 1000


def test_an_address_that_everybody_could_reach(tmp_path: Path) -> None:
    done = Stack(tmp_path, environment_for(tmp_path, LOOP_API_HOST="0.0.0.0")).loop("up")
    assert done.returncode == 2
    assert done.stderr.startswith("loop: setting api_host (LOOP_API_HOST): expected a loopback address such as 127.0.0.1")


def test_no_stack_at_all(tmp_path: Path) -> None:
    own = Stack(tmp_path, environment_for(tmp_path))
    for arguments in (["jobs"], ["job", "1"], ["submit", str(ROOT / TRAIN)], ["models"]):
        done = own.loop(*arguments)
        assert done.returncode == 2
        assert done.stderr.startswith(f"loop: no stack of {tmp_path} is up; start one with `loop up --detach`")
    assert own.loop("down").returncode == 0
