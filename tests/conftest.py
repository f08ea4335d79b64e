"""Fixtures that tests of every cost share: real databases, one Ray cluster a session, threads kept to what is granted."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


@pytest.fixture(scope="session", autouse=True)
def _one_torch_thread() -> None:
    """A test process with more threads than cores it is granted can be a hundred times slower beside others."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of the maintenance database of a real PostgreSQL server that lives as long as the test session."""
    from tests.postgres import running_server

    with running_server(tmp_path_factory.mktemp("postgres")) as url:
        yield url


@pytest.fixture
def fresh_postgres(postgres_server: str) -> Iterator[str]:
    """URL of an empty PostgreSQL database of this test's own."""
    import psycopg

    name = f"loop_{secrets.token_hex(6)}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f'CREATE DATABASE "{name}"')
    base, _, _ = postgres_server.rpartition("/")
    yield f"{base}/{name}"
    with psycopg.connect(postgres_server, autocommit=True) as connection:
        connection.execute(f'DROP DATABASE "{name}" WITH (FORCE)')


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.postgres)])
def registry_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty database, once on SQLite and once on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'registry.db'}"
    return request.getfixturevalue("fresh_postgres")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives ports of the loopback interface that nothing listens on."""
    return _free_port


@pytest.fixture
def eventually() -> Callable[..., object]:
    """Polls a condition until it holds and returns its value; fails the test when the time is over."""

    def wait(
        condition: Callable[[], object], *, within_s: float = 30.0, every_s: float = 0.05, what: str = "the condition"
    ) -> object:
        ends = time.monotonic() + within_s
        while time.monotonic() < ends:
            value = condition()
            if value:
                return value
            time.sleep(every_s)
        pytest.fail(f"{what} did not hold within {within_s:g} s")

    return wait


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a piece of Python in a fresh interpreter, for what must be seen from a process's beginning."""

    def run(code: str, *, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=timeout_s, check=False)

    return run
