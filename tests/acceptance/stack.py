"""A stack as a user has it: the command `loop` in processes of its own, on ports and in a home of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

__all__ = ["LOOP", "Stack", "environment_for", "free_ports"]

LOOP = str(Path(sys.executable).with_name("loop"))
UP_S = 180.0  # seconds; a busy machine with two cores takes a while to start Ray


def free_ports(number: int) -> list[int]:
    """Different ports of loopback that nothing listens on."""
    sockets = [socket.socket() for _ in range(number)]
    try:
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def environment_for(home: Path, **more: str) -> dict[str, str]:
    """This environment without its own LOOP_* and RAY_* variables, with those of a stack in `home`."""
    api, inference = free_ports(2)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOOP_", "RAY_"))}
    return kept | {
        "LOOP_HOME": str(home),
        "LOOP_API_PORT": str(api),
        "LOOP_INFERENCE_PORT": str(inference),
        "LOOP_RAY_CPUS": "2",
        **more,
    }


@dataclass
class Stack:
    """A home and the environment its commands run in."""

    home: Path
    environment: dict[str, str]

    def loop(self, *arguments: str, timeout_s: float = UP_S, **more: str) -> subprocess.CompletedProcess[str]:
        """Runs a command to its end."""
        return subprocess.run(
            [LOOP, *arguments],
            env=self.environment | more,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def start(self, *arguments: str, **more: str) -> subprocess.Popen[str]:
        """Starts a command."""
        return subprocess.Popen(
            [LOOP, *arguments],
            env=self.environment | more,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            stdin=subprocess.DEVNULL,
        )

    def json(self, *arguments: str, timeout_s: float = UP_S) -> Any:
        """What a command that must succeed prints with --json."""
        done = self.loop(*arguments, "--json", timeout_s=timeout_s)
        assert done.returncode == 0, f"loop {' '.join(arguments)}: {done.stderr}"
        return json.loads(done.stdout)

    def get(self, path: str) -> httpx.Response:
        """What the API answers."""
        return httpx.get(f"{self.state['api']['url']}{path}", trust_env=False, timeout=30.0)

    def submit(self, spec: str, *arguments: str) -> int:
        """The number of a new job."""
        return self.json("submit", spec, *arguments)["id"]

    @property
    def state(self) -> dict[str, Any]:
        """What stack.json says."""
        return json.loads((self.home / "stack.json").read_text())

    def processes(self) -> list[int]:
        """Everything that the stack has started and that still lives."""
        from services.stack.state import marked

        return marked(self.state["mark"])
