"""What the stack is made of: the keeper that leaves no orphan, parts that start again, the lock, what is found of a stack."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.settings import Settings
from services.stack import state
from services.stack.control import down
from services.stack.parts import KEEPER, Part
from services.stack.ports import free_port_near, is_free, listens

Eventually = Callable[..., object]

linux = pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux only")

# A child, a grandchild that is an orphan at once, and one in a session of its own that does not listen to SIGTERM.
FAMILY = "sleep 600 & (sleep 601 &) ; setsid sh -c 'trap : TERM; while :; do sleep 1; done' & sleep {alive}; exit 3"


def keeper(mark: str, command: str, grace_s: float = 1.0) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-I", "-S", str(KEEPER), str(grace_s), "sh", "-c", command],
        stdin=subprocess.PIPE,
        env=os.environ | {state.MARK: mark},
        start_new_session=True,
    )


def others(mark: str, process: subprocess.Popen[bytes]) -> list[int]:
    return [pid for pid in state.marked(mark) if pid != process.pid]


@linux
@pytest.mark.parametrize("end", ["the command ends", "told to", "the pipe closes"])
def test_the_keeper_leaves_nothing_behind(end: str, eventually: Eventually) -> None:
    mark = secrets.token_hex(8)
    process = keeper(mark, FAMILY.format(alive=2 if end == "the command ends" else 600))
    eventually(lambda: len(others(mark, process)) >= 5, what="the whole family")
    if end == "told to":
        process.terminate()
    elif end == "the pipe closes":
        assert process.stdin is not None
        process.stdin.close()
    assert process.wait(20) == (3 if end == "the command ends" else 128 + signal.SIGTERM)
    assert state.marked(mark) == []
    if process.stdin is not None:
        process.stdin.close()


@linux
def test_a_killed_keeper_takes_its_command_along_and_the_rest_is_found_by_its_mark(eventually: Eventually) -> None:
    mark = secrets.token_hex(8)
    process = keeper(mark, FAMILY.format(alive=600))
    eventually(lambda: len(others(mark, process)) >= 5, what="the whole family")
    process.kill()
    process.wait()
    assert process.stdin is not None
    process.stdin.close()
    assert state.end_marked(mark, grace_s=0.5)
    assert state.marked(mark) == []


def test_a_part_that_ends_is_started_again_after_growing_pauses(tmp_path: Path) -> None:
    part = Part("short", [sys.executable, "-c", "print('hello')"], tmp_path / "short.log")
    part.start()
    news: list[str] = []
    ends = time.monotonic() + 30.0
    while len(news) < 4 and time.monotonic() < ends:
        news += [line for line in (part.look(),) if line is not None]
        time.sleep(0.02)
    assert [line.partition(";")[0].partition(" (")[0] for line in news] == [
        "short ended with status 0",
        "short started again",
        "short ended with status 0",
        "short started again",
    ]
    assert "again in 0.5 s" in news[0]
    assert "again in 1 s" in news[2]
    assert part.restarts == 2
    part.stop(5.0)
    assert part.last_words() == "hello"
    assert (tmp_path / "short.log").stat().st_mode & 0o777 == 0o600


def test_a_part_that_does_not_listen_is_killed(tmp_path: Path, eventually: Eventually) -> None:
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    part = Part("deaf", [sys.executable, "-c", deaf], tmp_path / "deaf.log")
    part.start()
    eventually(lambda: part.last_words() == "deaf", what="its first word")
    pid = part.pid
    assert pid is not None
    part.stop(0.3)
    assert not Path(f"/proc/{pid}").exists() or sys.platform != "linux"


def test_the_lock_is_held_by_one_and_freed_by_the_kernel(tmp_path: Path, eventually: Eventually) -> None:
    lock = state.StackLock(tmp_path)
    assert lock.holder() is None
    take = f"lock = StackLock(Path({str(tmp_path)!r})); lock.take(); input()"
    code = f"from pathlib import Path; from services.stack.state import StackLock; {take}"
    holder = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert holder.stdin is not None
    eventually(lambda: lock.holder() == holder.pid, what="the lock")
    assert lock.take() is False
    holder.kill()
    holder.wait()
    holder.stdin.close()
    assert lock.holder() is None
    assert lock.take() is True
    lock.give()


def test_down_ends_what_a_dead_supervisor_left_and_only_that(tmp_path: Path, eventually: Eventually) -> None:
    settings = Settings(home=tmp_path)
    assert down(settings) is False
    mark = secrets.token_hex(8)
    left, other = (
        subprocess.Popen(["sleep", "600"], env=os.environ | {state.MARK: value}, start_new_session=True)
        for value in (mark, "other")
    )
    state.write(settings, {"mark": mark, "state": "ready"})
    assert settings.stack_file.stat().st_mode & 0o777 == 0o600
    if sys.platform == "linux":
        eventually(lambda: left.pid in state.marked(mark), what="the process's environment")
        assert down(settings) is True
        eventually(lambda: left.poll() is not None, what="its end")
    assert other.poll() is None
    assert not settings.stack_file.exists()
    for process in (left, other):
        process.kill()
        process.wait()


def test_ports_that_are_taken_are_seen(free_port: Callable[[], int]) -> None:
    import socket

    port = free_port()
    assert is_free("127.0.0.1", port)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        assert not is_free("127.0.0.1", port)
        assert listens("127.0.0.1", port)
        near = free_port_near("127.0.0.1", port)
    assert near is None or (near > port and is_free("127.0.0.1", near))
    assert not listens("127.0.0.1", port)


def test_rays_folder_is_short_however_deep_the_home_is() -> None:
    # A session's socket: session_2026-12-01_01-31-36_366889_1234567/sockets/plasma_store, 107 bytes at most.
    folder = state.ray_folder(secrets.token_hex(16))
    assert len(f"{folder}/ray/session_2026-12-01_01-31-36_366889_1234567/sockets/plasma_store") <= 107


def test_a_lock_whose_home_was_removed_is_no_longer_in_place(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    lock = state.StackLock(home)
    assert lock.in_place() is False
    lock.take()
    assert lock.in_place() is True
    lock.path.unlink()
    assert lock.in_place() is False
    other = state.StackLock(home)
    assert other.take() is True
    assert lock.in_place() is False, "another stack's lock is not this one's"
    other.give()
    lock.give()
