"""The doctor: what is well is called well, and what is not gets advice."""

from __future__ import annotations

import socket
import sqlite3
import time
from pathlib import Path

import pytest

from services.registry import Registry, migrate
from services.settings import Settings
from services.stack import doctor
from services.stack.doctor import Finding, examine
from services.stack.state import StackLock

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of MLflow, in this process


@pytest.fixture
def settings(tmp_path: Path, free_port) -> Settings:
    return Settings(home=tmp_path, api_port=free_port(), inference_port=free_port())


def finding(settings: Settings, what: str) -> Finding:
    return next(found for found in examine(settings) if found.what.startswith(what))


def problems(settings: Settings) -> dict[str, Finding]:
    return {found.what: found for found in examine(settings) if found.level == "problem"}


def test_a_fresh_installation_is_well(settings: Settings) -> None:
    assert problems(settings) == {}
    assert finding(settings, "registry").level == "note"
    assert finding(settings, "mlflow").found.startswith("3.")
    migrate(settings.registry_url)
    assert finding(settings, "registry").level == "ok"
    assert problems(settings) == {}


def test_a_port_that_is_taken(settings: Settings) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", settings.api_port))
        taken.listen()
        found = problems(settings)["api port"]
    assert found.found == f"{settings.api_port} is taken by another program"
    assert found.advice is not None
    assert found.advice.startswith("set LOOP_API_PORT=")


def test_a_token_that_others_may_read(settings: Settings) -> None:
    settings.token_file().write_text("secret")
    settings.token_file().chmod(0o644)
    found = problems(settings)["ray-token"]
    assert found.found == "others may read it (mode 644)"
    assert found.advice == f"run `chmod 600 {settings.token_file()}`"


def test_a_variable_that_is_no_setting(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOOP_API_PROT", "8800")
    found = finding(settings, "environment")
    assert (found.level, "LOOP_API_PROT is no setting" in found.found) == ("note", True)


def test_a_registry_of_another_version(settings: Settings) -> None:
    migrate(settings.registry_url)
    with sqlite3.connect(settings.home / "registry.db") as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    assert "has schema 9999; this version knows up to" in problems(settings)["registry"].found


def test_a_dispatcher_that_fell_silent_while_the_stack_is_up(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(settings.registry_url)
    lock = StackLock(settings.home)
    assert lock.take()
    try:
        assert problems(settings)["dispatcher"].found == "none is up: none ever spoke"
        with Registry.open(settings.registry_url) as registry:
            registry.queue.announce("d", "host", 1, {"ray": "up", "nodes": [{}]})
        assert finding(settings, "dispatcher d").found.endswith("1 node(s)")
        monkeypatch.setattr(doctor, "STALE_S", -1.0)
        assert problems(settings)["dispatcher"].found.startswith("none is up: the last one spoke 0 s ago")
    finally:
        lock.give()


def test_a_clock_that_is_off(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    migrate(settings.registry_url)
    now = time.time
    monkeypatch.setattr(doctor.time, "time", lambda: now() - 60)
    found = finding(settings, "clock")
    assert (found.level, found.found) == ("note", "the database's is +60 s from this machine's")


def test_databases_that_do_not_answer(settings: Settings) -> None:
    away = settings.model_copy(
        update={"registry_url": "postgresql://lab:hunter2@127.0.0.1:9/loop", "mlflow_url": "http://127.0.0.1:9"}
    )
    found = problems(away)
    assert set(found) == {"registry", "mlflow"}
    assert all("hunter2" not in one.found for one in found.values())


def test_a_disk_that_is_full(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LEAST_FREE_GB", 1e9)
    found = problems(settings)["disk of home"]
    assert found.advice == "make room, or set LOOP_HOME or LOOP_CHECKPOINTS to another disk"
