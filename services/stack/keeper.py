"""Runs one command and sees that nothing of it is left: `python keeper.py GRACE_S COMMAND...`.

Ray's processes start others, which outlive them by minutes when one of them is killed. This process adopts every orphan
below it, reaps it, and ends all of them when the command ends, when it gets SIGTERM, or when its standard input closes (the
supervisor is gone, however that came about). It loads the standard library only, to stay small.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

__all__ = ["adopt_orphans", "descendants", "die_with_parent"]

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # Linux, prctl(2)
TICK_S = 0.1  # seconds between two looks at what still lives


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def adopt_orphans() -> None:
    """Makes this process the parent of every process below it that loses its own (Linux)."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Has the kernel kill this process when the thread that started it ends (Linux)."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _parents() -> dict[int, int]:
    """The parent of every process."""
    found: dict[int, int] = {}
    if sys.platform != "linux":
        listed = subprocess.run(["ps", "-axo", "pid=,ppid="], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            pid, parent = line.split()
            found[int(pid)] = int(parent)
        return found
    for name in os.listdir("/proc"):  # noqa: PTH208 - pathlib is most of this process's memory
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat", "rb") as file:  # noqa: PTH123
                # The command, in parentheses, may hold anything.
                found[int(name)] = int(file.read().rpartition(b")")[2].split()[1])
    return found


def descendants(root: int) -> set[int]:
    """Every process below `root`."""
    parents = _parents()
    found: set[int] = set()
    grown = True
    while grown:
        more = {pid for pid, parent in parents.items() if parent == root or parent in found} - found
        grown = bool(more)
        found |= more
    return found


def _signal_all(number: int) -> bool:
    """Signals everything below this process; gives whether there was anything."""
    alive = descendants(os.getpid())
    for pid in alive:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
    return bool(alive)


def _reap() -> dict[int, int]:
    """Exit statuses of children that ended."""
    ended: dict[int, int] = {}
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


def main(grace_s: float, command: list[str]) -> int:
    adopt_orphans()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    told: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda got, _: told.append(got))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    nothing = os.open(os.devnull, os.O_RDONLY)
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        os.dup2(nothing, 0)
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        os.execvp(command[0], command)  # noqa: S606
    status: int | None = None
    while status is None and not told:
        readable, _, _ = select.select([0, wake_read], [], [])
        if wake_read in readable:
            os.read(wake_read, 4096)
        if 0 in readable and not os.read(0, 4096):
            break
        status = _reap().get(pid)
    # From here on everything goes: first asked, then forced.
    ends = time.monotonic() + grace_s
    number = signal.SIGTERM
    _signal_all(number)
    while True:
        status = _reap().get(pid, status)
        if time.monotonic() > ends:
            number = signal.SIGKILL
        if not (_signal_all(number) if number == signal.SIGKILL else descendants(os.getpid())):
            break
        time.sleep(TICK_S)
    if status is None:
        return 0
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code  # as a shell says that a signal ended it


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
