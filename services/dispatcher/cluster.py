"""What the cluster has, what is free of it, where a job goes, and why one has to wait."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from services.registry import Fence, Job
from services.settings import Settings

__all__ = ["Ledger", "NoCluster", "Node", "Room", "connect", "knock", "look", "node_name", "snapshot"]

GIB = 2**30
TINY = 1e-6  # shares of a CPU or GPU are counted to four digits; a rounding error is no shortage
CONNECT_S = 2.0  # seconds that the cluster's port has to answer


class NoCluster(Exception):
    """There is no Ray cluster to be reached; the message says why."""


@dataclass(frozen=True)
class Room:
    """An amount of what jobs ask for."""

    cpus: float = 0.0
    gpus: float = 0.0
    memory_gb: float = 0.0  # GiB

    def __sub__(self, other: Room) -> Room:
        return Room(self.cpus - other.cpus, self.gpus - other.gpus, self.memory_gb - other.memory_gb)

    def __add__(self, other: Room) -> Room:
        return Room(self.cpus + other.cpus, self.gpus + other.gpus, self.memory_gb + other.memory_gb)

    def floor(self) -> Room:
        """Never less than nothing."""
        return Room(max(0.0, self.cpus), max(0.0, self.gpus), max(0.0, self.memory_gb))

    def holds(self, other: Room) -> bool:
        """Whether `other` fits."""
        return all(getattr(other, name) <= getattr(self, name) + TINY for name in _WORDS)

    @classmethod
    def of(cls, job: Job) -> Room:
        return cls(job.cpus, job.gpus, job.memory_gb)


_WORDS = {"cpus": "CPU", "gpus": "GPU", "memory_gb": "GiB of memory"}


@dataclass(frozen=True)
class Node:
    """A machine of the cluster that is up."""

    id: str  # Ray's
    host: str
    address: str
    total: Room
    used: Room  # by anything at all, as Ray counts it; it lags by a second or so

    @property
    def name(self) -> str:
        return node_name(self.host, self.id)


def node_name(host: str, node: str) -> str:
    """What attempts write down as the place where they run."""
    return f"{host}/{node[:12]}"


@dataclass
class Ledger:
    """What is free on each node: its total, less what live attempts hold, less what others than this registry use."""

    nodes: list[Node]
    free: dict[str, Room]
    """By node, Ray's id."""
    jobs: dict[str, list[int]]
    """Jobs on each node."""

    @classmethod
    def count(
        cls, nodes: Iterable[Node], live: Iterable[Job], placed: Mapping[Fence, str], riding: Collection[Fence] = ()
    ) -> Ledger:
        """`placed` says where this dispatcher put attempts that have not yet said so themselves; those `riding` along in the
        process of another take nothing.

        An attempt of unknown place (another dispatcher has claimed it and not begun it) is counted where most is free.
        """
        nodes = list(nodes)
        by_name = {node.name: node.id for node in nodes}
        free = {node.id: node.total for node in nodes}
        begun = {node.id: Room() for node in nodes}
        jobs: dict[str, list[int]] = {node.id: [] for node in nodes}
        homeless: list[Job] = []
        for job in live:
            place = by_name.get(job.node) if job.node else placed.get(job.fence)
            room = Room() if job.fence in riding else Room.of(job)
            if place in free:
                free[place] -= room
                jobs[place].append(job.id)
                if job.node:
                    begun[place] += room
            elif job.node is None:
                homeless.append(job)
        for node in nodes:
            free[node.id] -= (node.used - begun[node.id]).floor()
        ledger = cls(nodes, free, jobs)
        for job in homeless:
            if nodes:
                ledger.take(ledger.roomiest()[0].id, job)
        return ledger

    def roomiest(self) -> list[Node]:
        """Most free first: GPUs, then CPUs, then memory."""
        return sorted(
            self.nodes, key=lambda node: (-self.free[node.id].gpus, -self.free[node.id].cpus, -self.free[node.id].memory_gb)
        )

    def take(self, node: str, job: Job, *riding: Job) -> None:
        """Counts a job that was put on a node, and those riding along in its process."""
        self.free[node] -= Room.of(job)
        self.jobs[node].extend(one.id for one in (job, *riding))

    def why(self, job: Job) -> str:
        """Why a job that could be claimed was not: what it needs, against what there is or is free."""
        asked = Room.of(job)
        if not self.nodes:
            return "waiting: no machine of the cluster is up"
        able = [node for node in self.nodes if node.total.holds(asked)]
        if not able:
            return "waiting: " + self._short(asked)
        # Judged on the machine that lacks least.
        best = max(able, key=lambda node: min(_share(self.free[node.id], asked, name) for name in _WORDS))
        free, lacks = self.free[best.id], []
        for name, word in _WORDS.items():
            if getattr(asked, name) > getattr(free, name) + TINY:
                has = max(0.0, getattr(free, name))
                lacks.append(f"needs {_amount(getattr(asked, name), word)}, {has:.4g} of {getattr(best.total, name):.4g} free")
        if not lacks:
            return "waiting: its turn comes next"
        return "waiting: " + "; ".join(lacks) + ("" if len(self.nodes) == 1 else f" on {best.host}")

    def _short(self, asked: Room) -> str:
        """What no machine has, even when nothing runs."""
        everything = Room()
        for node in self.nodes:
            everything += node.total
        for name, word in _WORDS.items():
            wanted = getattr(asked, name)
            if wanted > getattr(everything, name) + TINY:
                return f"needs {_amount(wanted, word)}, the cluster has {getattr(everything, name):.4g}"
        for name, word in _WORDS.items():
            wanted, most = getattr(asked, name), max(getattr(node.total, name) for node in self.nodes)
            if wanted > most + TINY:
                return f"needs {_amount(wanted, word)} on one machine, the largest has {most:.4g}"
        wanted = " and ".join(_amount(getattr(asked, name), word) for name, word in _WORDS.items() if getattr(asked, name))
        return f"needs {wanted} on one machine, and none has them together"


def _share(free: Room, asked: Room, name: str) -> float:
    wanted = getattr(asked, name)
    return 1.0 if wanted <= 0 else min(1.0, getattr(free, name) / wanted)


def _amount(number: float, word: str) -> str:
    plural = "s" if word in ("CPU", "GPU") and number != 1 else ""
    return f"{number:.4g} {word}{plural}"


def snapshot(ledger: Ledger | None, waiting: Mapping[int, str], *, address: str | None, problem: str | None) -> dict[str, Any]:
    """What the dispatcher tells the registry about its cluster, JSON-compatible."""
    nodes = []
    for node in ledger.nodes if ledger else ():
        free = ledger.free[node.id].floor() if ledger else Room()
        nodes.append(
            {
                "id": node.id,
                "name": node.name,
                "host": node.host,
                "address": node.address,
                **{name: round(getattr(node.total, name), 3) for name in _WORDS},
                **{f"free_{name}": round(getattr(free, name), 3) for name in _WORDS},
                "jobs": ledger.jobs[node.id] if ledger else [],
            }
        )
    return {
        "ray": "up" if problem is None else "down",
        "address": address,
        "problem": problem,
        "nodes": nodes,
        "waiting": [{"job": job, "reason": reason} for job, reason in waiting.items()],
    }


def connect(settings: Settings) -> str:
    """Joins the settings' Ray cluster as a driver; gives its address. Raises NoCluster.

    Ray asks every process for the cluster's token, and makes one that everybody may read where it finds none: the stack's own
    is named here. A driver that finds nobody at the address would wait for minutes, so the port is tried first.
    """
    address = settings.cluster_address()
    if address is None:
        raise NoCluster(
            f"no Ray cluster is known; expected {settings.stack_file} of a running stack (`loop up`) or LOOP_RAY_ADDRESS"
        )
    _environment(settings, address)
    knock(address)
    import ray

    try:
        ray.init(
            address=address,
            namespace=settings.ray_namespace,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:  # Ray raises what it pleases
        ray.shutdown()
        raise NoCluster(f"the Ray cluster at {address} did not take this driver: {error}") from error
    return address


def knock(address: str) -> None:
    """Raises NoCluster where nobody listens at the cluster's address."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        raise NoCluster(f"the Ray cluster at {address} does not answer: {error}") from None


def _environment(settings: Settings, address: str) -> None:
    """What Ray reads from the environment when it is imported; what the user has set stays."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    token: Path = settings.token_file()
    if token.exists() and not settings.ray_address:
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(token))
    if address.startswith("127."):
        # Otherwise Ray turns loopback into the machine's outward address. (The name is Ray's; it holds for any system.)
        os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")


def look() -> list[Node]:
    """The machines that are up, as Ray sees them."""
    import ray
    from ray._private.state import available_resources_per_node

    available = available_resources_per_node()
    found = []
    for entry in ray.nodes():
        if entry["Alive"]:
            total = _room(entry["Resources"])
            free = _room(available.get(entry["NodeID"], entry["Resources"]))
            found.append(
                Node(entry["NodeID"], entry["NodeManagerHostname"], entry["NodeManagerAddress"], total, (total - free).floor())
            )
    return found


def _room(resources: Mapping[str, float]) -> Room:
    return replace(Room(resources.get("CPU", 0.0), resources.get("GPU", 0.0)), memory_gb=resources.get("memory", 0.0) / GIB)
