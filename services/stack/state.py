"""What the stack says about itself: `HOME/stack.json`, and the lock that its supervisor holds while it lives."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from services.settings import Settings

__all__ = [
    "GIVE_BACK_S",
    "MARK",
    "StackError",
    "StackLock",
    "end_marked",
    "marked",
    "ray_folder",
    "read",
    "sweep",
    "takes_down",
    "write",
]

GIVE_BACK_S = 10.0  # most seconds that jobs have to write a last checkpoint when the stack goes down
MARK = "LOOP_STACK"  # variable in the environment of every process of a stack; its value tells stacks apart


class StackError(Exception):
    """The stack cannot do what was asked; `exit_code` is 2 where the user can set it right and 1 for a failure."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def read(settings: Settings) -> dict[str, Any] | None:
    """What the stack of this home last wrote; None where there is none."""
    try:
        found = json.loads(settings.stack_file.read_text())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def write(settings: Settings, state: dict[str, Any]) -> None:
    """Replaces it in one step; only its owner may read it."""
    temporary = settings.stack_file.with_suffix(".new")
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:  # noqa: PTH123
        json.dump(state, file, indent=2)
    temporary.replace(settings.stack_file)


def takes_down(settings: Settings, address: str) -> bool:
    """Whether the stack of this home is being taken down, and with it the Ray cluster at `address`, which it had started."""
    found = read(settings) or {}
    ray = found.get("ray", {})
    return found.get("state") == "stopping" and ray.get("own") is True and ray.get("address") == address


class StackLock:
    """Held by the one supervisor of a home; the kernel frees it however that process ends."""

    def __init__(self, home: Path) -> None:
        self.path = home / "stack.lock"
        self._held: int | None = None

    def take(self) -> bool:
        """Takes it if it is free."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        os.truncate(handle, 0)
        os.write(handle, str(os.getpid()).encode())
        self._held = handle
        return True

    def give(self) -> None:
        if self._held is not None:
            os.close(self._held)
            self._held = None

    def in_place(self) -> bool:
        """Whether what is held is still the home's lock: a home that was removed took it along."""
        try:
            return self._held is not None and os.fstat(self._held).st_ino == self.path.stat().st_ino
        except OSError:
            return False

    def holder(self) -> int | None:
        """The process that holds it; None where it is free."""
        if not self.path.exists():
            return None
        with self.path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return self._name()
        return None

    def _name(self) -> int:
        """The holder's number, which it writes right after it took the lock."""
        for _ in range(20):
            with contextlib.suppress(ValueError, OSError):
                return int(self.path.read_text())
            time.sleep(0.05)
        raise StackError(f"{self.path} is locked by a process that does not say who it is; see who holds it (fuser {self.path})")


def marked(mark: str) -> list[int]:
    """Processes of this user that belong to the stack `mark`, this one left out (Linux; empty elsewhere)."""
    return [pid for pid, environment in _environments() if f"{MARK}={mark}".encode() in environment]


def _environments() -> Iterator[tuple[int, list[bytes]]]:
    processes = Path("/proc")
    if not processes.exists():
        return
    for entry in processes.iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "environ").read_bytes().split(b"\0")


def ray_folder(mark: str) -> Path:
    """Where a stack's own Ray keeps its sockets and logs: a short path, for a socket's path may have 107 bytes only."""
    return Path(f"/tmp/loop-{os.getuid()}-{mark[:12]}")  # noqa: S108 - made for this user alone, under a drawn name


def sweep(left: dict[str, Any], *, grace_s: float) -> list[int]:
    """Ends and removes whatever is left of the stack that wrote `left`; gives the processes there were."""
    mark = left.get("mark")
    if not isinstance(mark, str) or not mark.isalnum():
        return []
    found = end_marked(mark, grace_s=grace_s)
    shutil.rmtree(ray_folder(mark), ignore_errors=True)
    return found


def end_marked(mark: str, *, grace_s: float) -> list[int]:
    """Ends whatever is left of the stack `mark`: asks, waits `grace_s`, then forces. Gives what there was."""
    found = marked(mark)
    alive, ends = found, time.monotonic() + grace_s
    number = signal.SIGTERM
    while alive:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        time.sleep(0.1)
        if time.monotonic() > ends:
            number = signal.SIGKILL
        alive = marked(mark)
    return found
