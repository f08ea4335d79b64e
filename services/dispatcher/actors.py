"""The processes of jobs as Ray actors: starting them, finding them again, and hearing how they ended.

An actor is detached and is never restarted by Ray: it outlives the dispatcher that started it, and the registry alone
decides about another try. It begins its attempt by itself when it is created, so that nothing hangs on a dispatcher that
dies in between, and ends its process when the attempt is over.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.dispatcher.cluster import GIB, node_name
from services.dispatcher.kinds import CLOSER, ENTRIES, RUNNER, actor_cpus
from services.registry import Fence, Job
from services.settings import Settings

__all__ = ["Actors", "JobActor", "News", "Phase", "Unfit", "Watch", "actor_name"]

JOIN_S = 20.0  # seconds that one wait for an actor's end may take: a dispatcher that died leaves no thread behind for long
FAREWELL_S = 5.0  # seconds after an attempt's end in which a dispatcher may end its process; then it does so itself
THREADS = 8  # calls an actor serves at once: every dispatcher that watches it takes one

# What Ray says of an actor whose process is known to be gone, and how we say it. Anything else may be a network that is.
GONE: dict[str, str] = {
    "error raised in its creation task": "its process could not begin; this machine's installation may be broken",
    "worker process has died": "its process died: killed, out of memory, or crashed",
    "killed by `ray.kill`": "its process was ended through Ray",
    "exit_actor": "its process ended itself",
    "its owner has exited": "its process was ended with the one that started it",
}


def actor_name(fence: Fence) -> str:
    """The name under which an attempt's actor is found."""
    return f"job-{fence.job}-{fence.attempt}"


class JobActor:
    """The process of one attempt."""

    def __init__(self, entry: str, job: int, attempt: int, settings_json: str) -> None:
        self._over, self._release = threading.Event(), threading.Event()
        arguments = (entry, job, attempt, settings_json)
        threading.Thread(target=self._attempt, args=arguments, name=f"job-{job}-{attempt}", daemon=True).start()

    def ping(self) -> int:
        """The process's id: that it is alive."""
        return os.getpid()

    def join(self, wait_s: float) -> bool:
        """Waits for the attempt's end; gives whether it came."""
        return self._over.wait(wait_s)

    def release(self) -> None:
        """Has the attempt write a last checkpoint, give its job back and end."""
        self._release.set()

    def _attempt(self, entry: str, job: int, attempt: int, settings_json: str) -> None:
        import ray

        status = 0
        try:
            context = ray.get_runtime_context()
            node = node_name(os.uname().nodename, context.get_node_id())
            _load(RUNNER)(entry, job, attempt, settings_json, node=node, release=self._release)
        except BaseException:
            # What the attempt itself raises is in the registry by now. This is an installation that cannot run it.
            traceback.print_exc()
            status = 1
        self._over.set()
        time.sleep(FAREWELL_S)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not by an exception: no thread that a library left behind may keep the node's resources.
        os._exit(status)


class Unfit(Exception):
    """Ray takes no job that asks for this; the message says why."""


class Phase(StrEnum):
    """What a dispatcher knows of an actor."""

    PENDING = "pending"
    """Asked for; its process has not answered yet."""
    ALIVE = "alive"
    """Its process has answered: it renews its lease itself."""


@dataclass
class Watch:
    """An actor that this dispatcher keeps an eye on."""

    fence: Fence
    handle: Any
    phase: Phase
    call: Any
    """The unanswered `ping` or `join`."""
    node: str | None = None
    """Where it was put, Ray's id; None for one that was found."""
    since: float = field(default_factory=time.monotonic)
    renewed_at: float = field(default_factory=time.monotonic)
    stale_since: float | None = None
    """Since when the registry no longer knows this attempt as running."""


@dataclass(frozen=True)
class News:
    """Something that happened to a watched actor."""

    watch: Watch
    kind: str
    """`began`, `ended` (its process is gone, or will be at once) or `silent` (it cannot be reached; it may well be alive)."""
    why: str = ""


class Actors:
    """All contact with the actors of one cluster."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._settings_json = settings.model_dump_json()
        self.watched: dict[Fence, Watch] = {}
        self._closing: Any | None = None

    def start(self, job: Job, node: str) -> Watch:
        """Creates the actor of a claimed job on a node; it waits there if Ray has not got room yet. Raises Unfit."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cpus, gpus = actor_cpus(job)
        options: dict[str, Any] = {"memory": int(job.memory_gb * GIB)} if job.memory_gb else {}
        try:
            asked = ray.remote(JobActor).options(
                name=actor_name(job.fence),
                namespace=self._settings.ray_namespace,
                lifetime="detached",
                num_cpus=cpus,
                num_gpus=gpus,
                max_restarts=0,
                max_task_retries=0,
                max_concurrency=THREADS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                **options,
            )
            handle = asked.remote(ENTRIES[job.kind], job.id, job.attempt, self._settings_json)
        except (TypeError, ValueError) as error:
            why = " ".join(str(part).strip() for part in error.args)
            raise Unfit(f"Ray does not take what the job asks for: {why}; change its resources") from error
        return self._watch(job.fence, handle, node)

    def adopt(self, fence: Fence) -> Watch | None:
        """Finds the actor of an attempt that somebody else started; None if there is none."""
        handle = self._find(fence)
        return None if handle is None else self._watch(fence, handle, None)

    def poll(self) -> Iterator[News]:
        """What happened since the last call."""
        import ray

        calls = {watch.call: watch for watch in self.watched.values()}
        if not calls:
            return
        ready, _ = ray.wait(list(calls), num_returns=len(calls), timeout=0)
        for call in ready:
            yield from self._answer(calls[call])

    def _answer(self, watch: Watch) -> Iterator[News]:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError, ActorUnschedulableError, RayError

        try:
            answer = ray.get(watch.call, timeout=0)
        except ActorUnavailableError as error:
            watch.call = watch.handle.ping.remote()
            yield News(watch, "silent", _first_line(error))
        except ActorUnschedulableError as error:
            self.forget(watch.fence)
            yield News(watch, "ended", f"Ray could not place it: {_first_line(error)}")
        except ActorDiedError as error:
            self.forget(watch.fence)
            gone = _gone(str(error))
            yield News(watch, "ended", gone) if gone else News(watch, "silent", _first_line(error))
        except RayError as error:
            self.forget(watch.fence)
            yield News(watch, "silent", _first_line(error))
        else:
            if watch.phase is Phase.PENDING or answer is not True:
                began = watch.phase is Phase.PENDING
                watch.phase = Phase.ALIVE
                watch.call = watch.handle.join.remote(JOIN_S)
                if began:
                    yield News(watch, "began")
            else:
                self.kill(watch.fence)  # it is done, and would end a little later by itself
                yield News(watch, "ended", "its process ended without saying how")

    def release(self) -> None:
        """Has every watched attempt give its job back; does not wait for it."""
        for watch in self.watched.values():
            watch.handle.release.remote()

    def kill(self, fence: Fence) -> None:
        """Ends an attempt's process, if there is one."""
        import ray

        watch = self.watched.pop(fence, None)
        handle = watch.handle if watch else self._find(fence)
        if handle is not None:
            ray.kill(handle, no_restart=True)

    def close(self) -> bool:
        """Has somebody on the cluster tidy up after jobs that ended without their processes; not while somebody is still at it.

        Gives whether it was begun.
        """
        import ray

        if self._closing is not None and not ray.wait([self._closing], timeout=0)[0]:
            return False
        self._closing = ray.remote(_close).options(num_cpus=0, max_retries=0).remote(self._settings_json)
        return True

    def forget(self, fence: Fence) -> None:
        """Looks at an actor no more."""
        self.watched.pop(fence, None)

    def _find(self, fence: Fence) -> Any | None:
        import ray

        try:
            return ray.get_actor(actor_name(fence), namespace=self._settings.ray_namespace)
        except ValueError:
            return None

    def _watch(self, fence: Fence, handle: Any, node: str | None) -> Watch:
        watch = Watch(fence, handle, Phase.PENDING, handle.ping.remote(), node)
        self.watched[fence] = watch
        return watch


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else type(error).__name__


def _load(entry: str) -> Callable[..., Any]:
    """The function behind "module:name"."""
    module, _, function = entry.partition(":")
    return getattr(importlib.import_module(module), function)


def _close(settings_json: str) -> None:
    _load(CLOSER)(settings_json)


def _gone(text: str) -> str | None:
    """How an actor's process ended, by Ray's report of its death; None where the process may well be alive."""
    return next((words for sign, words in GONE.items() if sign in text), None)
