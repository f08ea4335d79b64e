"""The processes of jobs as Ray actors: starting them, finding them again, and hearing how they ended.

An actor is detached and is never restarted by Ray: it outlives the dispatcher that started it, and the registry alone
decides about another try. It begins its attempt by itself when it is created, so that nothing hangs on a dispatcher that
dies in between, and ends its process when the attempt is over.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from services.dispatcher.cluster import GIB, node_name
from services.dispatcher.kinds import CLOSER, ENTRIES, PACK_RUNNER, RUNNER, actor_cpus
from services.registry import Fence, Job
from services.settings import Settings

__all__ = ["Actors", "JobActor", "News", "Phase", "Unfit", "Watch", "actor_name"]

JOIN_S = 20.0  # seconds that one wait for an actor's end may take: a dispatcher that died leaves no thread behind for long
FAREWELL_S = 5.0  # seconds after an attempt's end in which a dispatcher may end its process; then it does so itself
NAMED = re.compile(r"job-(\d+-\d+(?:\+\d+-\d+)*)")
THREADS = 8  # calls an actor serves at once: every dispatcher that watches it takes one

# What Ray says of an actor whose process is known to be gone, and how we say it. Anything else may be a network that is.
GONE: dict[str, str] = {
    "error raised in its creation task": "its process could not begin; this machine's installation may be broken",
    "worker process has died": "its process died: killed, out of memory, or crashed",
    "killed by `ray.kill`": "its process was ended through Ray",
    "exit_actor": "its process ended itself",
    "its owner has exited": "its process was ended with the one that started it",
}


def actor_name(*fences: Fence) -> str:
    """The name under which the actor of these attempts is found."""
    return "job-" + "+".join(f"{fence.job}-{fence.attempt}" for fence in fences)


def _named(name: str) -> tuple[Fence, ...]:
    """The attempts of the actor of that name; none if it is not of ours."""
    found = NAMED.fullmatch(name)
    pairs = found.group(1).split("+") if found else []
    return tuple(Fence(*map(int, pair.split("-"))) for pair in pairs)


class JobActor:
    """The process of one attempt, or of several that are trained together."""

    def __init__(self, entry: str, attempts: Sequence[tuple[int, int]], settings_json: str) -> None:
        self._over, self._release = threading.Event(), threading.Event()
        name = actor_name(*(Fence(*attempt) for attempt in attempts))
        threading.Thread(target=self._attempt, args=(entry, attempts, settings_json), name=name, daemon=True).start()

    def ping(self) -> int:
        """The process's id: that it is alive."""
        return os.getpid()

    def join(self, wait_s: float) -> bool:
        """Waits for the end of all of its attempts; gives whether it came."""
        return self._over.wait(wait_s)

    def release(self) -> None:
        """Has its attempts write a last checkpoint, give their jobs back and end."""
        self._release.set()

    def _attempt(self, entry: str, attempts: Sequence[tuple[int, int]], settings_json: str) -> None:
        import ray

        status = 0
        try:
            context = ray.get_runtime_context()
            node = node_name(os.uname().nodename, context.get_node_id())
            if len(attempts) == 1:
                _load(RUNNER)(entry, *attempts[0], settings_json, node=node, release=self._release)
            else:
                _load(PACK_RUNNER)(entry, attempts, settings_json, node=node, release=self._release)
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

    fences: tuple[Fence, ...]
    """Its attempts; some may be over while others go on."""
    handle: Any
    phase: Phase
    call: Any
    """The unanswered `ping` or `join`."""
    node: str | None = None
    """Where it was put, Ray's id; None for one that was found."""
    since: float = field(default_factory=time.monotonic)
    renewed_at: float = field(default_factory=time.monotonic)
    stale_since: float | None = None
    """Since when the registry no longer knows any of its attempts as running."""

    @property
    def name(self) -> str:
        return actor_name(*self.fences)


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
        """By attempt: those of one process have one watch."""
        self._closing: Any | None = None

    @property
    def watches(self) -> list[Watch]:
        """Each watched actor once."""
        return list({id(watch): watch for watch in self.watched.values()}.values())

    def riding(self, running: Collection[Fence]) -> set[Fence]:
        """The running attempts that share the process, and so the resources, of another one."""
        return {fence for watch in self.watches for fence in [one for one in watch.fences if one in running][1:]}

    def start(self, jobs: Sequence[Job], node: str) -> Watch:
        """Creates the actor of claimed jobs on a node, with the resources of the first; it waits there if Ray has not got room
        yet. Raises Unfit."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        job, fences = jobs[0], tuple(one.fence for one in jobs)
        cpus, gpus = actor_cpus(job)
        options: dict[str, Any] = {"memory": int(job.memory_gb * GIB)} if job.memory_gb else {}
        try:
            asked = ray.remote(JobActor).options(
                name=actor_name(*fences),
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
            handle = asked.remote(ENTRIES[job.kind], [(one.id, one.attempt) for one in jobs], self._settings_json)
        except (TypeError, ValueError) as error:
            why = " ".join(str(part).strip() for part in error.args)
            raise Unfit(f"Ray does not take what the job asks for: {why}; change its resources") from error
        return self._watch(fences, handle, node)

    def adopt(self, fence: Fence) -> Watch | None:
        """Finds the actor of an attempt that somebody else started; None if there is none."""
        fences, handle = self._find(fence)
        return None if handle is None else self._watch(fences, handle, None)

    def poll(self) -> Iterator[News]:
        """What happened since the last call."""
        import ray

        calls = {watch.call: watch for watch in self.watches}
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
            self._forget(watch)
            yield News(watch, "ended", f"Ray could not place it: {_first_line(error)}")
        except ActorDiedError as error:
            self._forget(watch)
            gone = _gone(str(error))
            yield News(watch, "ended", gone) if gone else News(watch, "silent", _first_line(error))
        except RayError as error:
            self._forget(watch)
            yield News(watch, "silent", _first_line(error))
        else:
            if watch.phase is Phase.PENDING or answer is not True:
                began = watch.phase is Phase.PENDING
                watch.phase = Phase.ALIVE
                watch.call = watch.handle.join.remote(JOIN_S)
                if began:
                    yield News(watch, "began")
            else:
                self.kill(watch.fences[0])  # it is done, and would end a little later by itself
                yield News(watch, "ended", "its process ended without saying how")

    def release(self) -> None:
        """Has every watched attempt give its job back; does not wait for it."""
        for watch in self.watches:
            watch.handle.release.remote()

    def kill(self, fence: Fence) -> tuple[Fence, ...]:
        """Ends an attempt's process, if there is one; gives all attempts that it had."""
        import ray

        watch = self.watched.get(fence)
        fences, handle = (watch.fences, watch.handle) if watch else self._find(fence)
        if watch is not None:
            self._forget(watch)
        if handle is not None:
            ray.kill(handle, no_restart=True)
        return fences

    def close(self) -> bool:
        """Has somebody on the cluster tidy up after jobs that ended without their processes; not while somebody is still at it.

        Gives whether it was begun.
        """
        import ray

        if self._closing is not None and not ray.wait([self._closing], timeout=0)[0]:
            return False
        self._closing = ray.remote(_close).options(num_cpus=0, max_retries=0).remote(self._settings_json)
        return True

    def _forget(self, watch: Watch) -> None:
        """Looks at an actor no more."""
        for fence in watch.fences:
            self.watched.pop(fence, None)

    def _find(self, fence: Fence) -> tuple[tuple[Fence, ...], Any | None]:
        """The attempts of the process of this one, and its actor."""
        import ray
        from ray.util import list_named_actors

        for fences in ((fence,), *(_named(name) for name in list_named_actors())):
            if fence in fences:
                with suppress(ValueError):  # there is no such actor, or no more
                    return fences, ray.get_actor(actor_name(*fences), namespace=self._settings.ray_namespace)
        return (fence,), None

    def _watch(self, fences: tuple[Fence, ...], handle: Any, node: str | None) -> Watch:
        watch = Watch(fences, handle, Phase.PENDING, handle.ping.remote(), node)
        self.watched |= dict.fromkeys(fences, watch)
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
