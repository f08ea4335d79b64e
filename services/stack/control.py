"""What `loop up` and `loop down` do from the outside: start a supervisor, wait for it, end it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from services.settings import Settings
from services.stack import state

__all__ = ["down", "up_detached"]

DOWN_S = 75.0  # seconds that a supervisor has to take everything down: above the sum of its own waits
READY_FD = "LOOP_READY_FD"  # names the pipe on which a detached supervisor tells how it goes


def up_detached(settings: Settings, *, note: Callable[[str], None] = lambda text: None) -> dict[str, Any]:
    """Starts the stack in the background and returns what stack.json says once it is ready. Raises StackError.

    `note` gets a line for everything that happens meanwhile. An interrupted wait takes the stack down again.
    """
    try:
        settings.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        logs = settings.home / "logs"
        logs.mkdir(mode=0o700, exist_ok=True)
        log = open(os.open(logs / "supervisor.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")  # noqa: PTH123, SIM115
    except OSError as error:
        raise state.StackError(
            f"cannot write to {settings.home}: {error.strerror}; set LOOP_HOME to a folder of yours", exit_code=2
        ) from None
    reading, writing = os.pipe()
    with log, open(reading) as news:  # noqa: PTH123
        supervisor = subprocess.Popen(
            [sys.executable, "-m", "services.stack"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=os.environ | {"LOOP_HOME": str(settings.home), READY_FD: str(writing)},
            pass_fds=(writing,),
            start_new_session=True,
        )
        os.close(writing)
        try:
            for line in news:
                said = json.loads(line)
                if "ready" in said:
                    return said["ready"]
                if "error" in said:
                    supervisor.wait()
                    raise state.StackError(said["error"], exit_code=said["exit_code"])
                note(said["note"])
        except KeyboardInterrupt:
            supervisor.terminate()
            supervisor.wait(DOWN_S)
            raise
    code = supervisor.wait()
    raise state.StackError(f"the supervisor ended with status {code} before the stack was up; see {logs / 'supervisor.log'}")


def down(settings: Settings) -> bool:
    """Ends the stack of this home with everything it started, and waits for it; False where nothing ran."""
    lock = state.StackLock(settings.home)
    known = state.read(settings)
    holder = lock.holder()
    if holder is not None:
        _signal(holder, signal.SIGTERM)
        if not _gone(lock, holder, DOWN_S):
            _signal(holder, signal.SIGKILL)
            _gone(lock, holder, 5.0)
    left = state.sweep(known, grace_s=5.0) if known else []
    if known is not None and lock.holder() is None:
        settings.stack_file.unlink(missing_ok=True)
    return holder is not None or bool(left)


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _gone(lock: state.StackLock, holder: int, within_s: float) -> bool:
    ends = time.monotonic() + within_s
    while lock.holder() == holder:
        if time.monotonic() > ends:
            return False
        time.sleep(0.1)
    return True
