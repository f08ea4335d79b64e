"""One process of the stack: how it is started, watched, started again, and ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from services.stack.keeper import die_with_parent

__all__ = ["KEEPER", "Part"]

KEEPER = Path(__file__).with_name("keeper.py")
KEEPER_GRACE_S = 4.0  # seconds that what Ray started has to end by itself
BACKOFF_FIRST_S = 0.5  # seconds between an end and the next start
BACKOFF_MOST_S = 30.0  # seconds that no such pause exceeds
STEADY_S = 60.0  # seconds after which a start counts as a success and the pauses begin anew
LOG_MOST_BYTES = 10 * 2**20  # a log that is longer when its part starts is put aside


@dataclass
class Part:
    """A process that has to be up. Its output goes to `log`."""

    name: str
    command: list[str]
    log: Path
    environment: dict[str, str] = field(default_factory=dict)
    kept: bool = False  # starts processes of its own, which must not outlive it
    restarts: int = 0
    process: subprocess.Popen[bytes] | None = None
    _started: float = 0.0
    _pause_s: float = 0.0
    _again_at: float | None = None

    def start(self) -> None:
        command = self.command
        if self.kept:
            command = [sys.executable, "-I", "-S", str(KEEPER), str(KEEPER_GRACE_S), *command]
        with contextlib.suppress(OSError):
            if self.log.stat().st_size > LOG_MOST_BYTES:
                self.log.replace(self.log.with_suffix(".log.1"))
        with open(os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as log:  # noqa: PTH123
            self.process = subprocess.Popen(
                command,
                # The keeper ends everything when this pipe closes; the others are killed by the kernel.
                stdin=subprocess.PIPE if self.kept else subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | self.environment,
                start_new_session=True,
                preexec_fn=None if self.kept else die_with_parent,
            )
        self._started = time.monotonic()
        self._again_at = None

    @property
    def pid(self) -> int | None:
        return self.process.pid if self.process is not None else None

    @property
    def up(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def look(self) -> str | None:
        """Starts it again, after a pause, if it has ended; gives a line to tell when something happened."""
        if self.up or self.process is None:
            return None
        now = time.monotonic()
        if self._again_at is None:
            if now - self._started > STEADY_S:
                self._pause_s = 0.0
            self._pause_s = min(max(2 * self._pause_s, BACKOFF_FIRST_S), BACKOFF_MOST_S)
            self._again_at = now + self._pause_s
            return (
                f"{self.name} ended with status {self.process.returncode}; starts again in {self._pause_s:g} s (see {self.log})"
            )
        if now >= self._again_at:
            self.restarts += 1
            self.start()
            return f"{self.name} started again"
        return None

    def stop(self, grace_s: float) -> None:
        """Asks it to end, and forces it after `grace_s` seconds."""
        if self.process is None:
            return
        process, self.process = self.process, None
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(grace_s + (2 * KEEPER_GRACE_S if self.kept else 0.0))
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def last_words(self) -> str:
        """The last line of its log that says something."""
        try:
            lines = self.log.read_text(errors="replace").splitlines()
        except OSError:
            return ""
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
