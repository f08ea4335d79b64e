"""A Ray head of the tests' own: loopback only, its token readable by its owner only, ended without touching other clusters."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STARTS_WITHIN_S = 60.0


@dataclass
class RayCluster:
    """A running head, and the environment that reaches it."""

    address: str
    environment: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    def end(self, *, at_once: bool = False) -> None:
        """Ends the head: its own way out first, since it knows its children; then whatever is left of its process group."""
        process = self.process
        if process is None:
            return
        if process.poll() is None and not at_once:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(15)


def a_token(folder: Path) -> Path:
    """A new token, in a file that only its owner reads."""
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    return token


def ray_environment(token: Path) -> dict[str, str]:
    """What a process needs to join the cluster of this token."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Keeps Ray on 127.0.0.1; without it loopback becomes the machine's outward address.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_DISABLE_IMPORT_WARNING": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
    }


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running_ray(*, cpus: int = 2, port: int | None = None, token: Path | None = None) -> Iterator[RayCluster]:
    """Starts a head with this many CPUs and ends it, whatever runs on it. `token` is the file of one that is there already."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))  # socket paths below it must stay short
    if token is None:
        token = a_token(folder)
    port = port or free_port()
    environment = ray_environment(token)
    command = [
        str(Path(sys.executable).with_name("ray")),
        "start",
        "--head",
        "--block",
        "--disable-usage-stats",
        "--include-dashboard=false",
        "--node-ip-address=127.0.0.1",
        f"--port={port}",
        f"--ray-client-server-port={free_port()}",
        f"--num-cpus={cpus}",
        "--num-gpus=0",
        f"--object-store-memory={80 * 2**20}",
        f"--temp-dir={folder / 'ray'}",
    ]
    with (folder / "head.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=os.environ | environment, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
    cluster = RayCluster(f"127.0.0.1:{port}", environment, process)
    try:
        _wait_for(process, port, folder / "head.log")
        yield cluster
    finally:
        cluster.end()
        shutil.rmtree(folder, ignore_errors=True)


def _wait_for(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    ends = time.monotonic() + STARTS_WITHIN_S
    while time.monotonic() < ends:
        if process.poll() is not None:
            raise RuntimeError(f"the Ray head ended:\n{log.read_text()}")
        if "Ray runtime started" in log.read_text():
            return
        time.sleep(0.1)
    raise RuntimeError(f"the Ray head was not up within {STARTS_WITHIN_S:g} s:\n{log.read_text()}")
