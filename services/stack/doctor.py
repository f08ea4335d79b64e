"""What the stack stands on, looked at piece by piece, with advice where something is wrong."""

from __future__ import annotations

import os
import platform
import shutil
import sqlite3
import stat
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from services.settings import Settings, without_password
from services.stack import state
from services.stack.ports import free_port_near, is_free

__all__ = ["Finding", "examine"]

Level = Literal["ok", "note", "problem"]

LEAST_FREE_GB = 2.0  # GiB on the disk of HOME below which checkpoints may not fit
MOST_SKEW_S = 5.0  # seconds between this clock and the database's that deserve a word
STALE_S = 20.0  # seconds since its last word after which a dispatcher is silent; it speaks every 2
WAL_FIXED = (3, 51, 3)  # SQLite whose write-ahead log survives a reset under concurrent readers
OLDEST_PYTHON = (3, 11)


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    level: Level
    found: str
    advice: str | None = None


def examine(settings: Settings) -> list[Finding]:
    """Looks at everything; what cannot be looked at is a finding as well."""
    checks: tuple[Callable[[Settings], Iterator[Finding]], ...] = (
        _python,
        _packages,
        _variables,
        _sqlite,
        _disk,
        _shared_memory,
        _permissions,
        _ports,
        _registry,
        _mlflow,
    )
    findings: list[Finding] = []
    for check in checks:
        try:
            findings.extend(check(settings))
        except Exception as error:
            findings.append(
                Finding(check.__name__.strip("_"), "problem", f"cannot be looked at: {type(error).__name__}: {error}")
            )
    return findings


def _python(settings: Settings) -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info < OLDEST_PYTHON:
        yield Finding("python", "problem", version, "install Python 3.11 or newer")
    else:
        yield Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")


def _packages(settings: Settings) -> Iterator[Finding]:
    for name in ("loopcore", "torch", "ray", "mlflow", "sqlalchemy"):
        try:
            yield Finding(name, "ok", metadata.version(name))
        except metadata.PackageNotFoundError:
            yield Finding(name, "problem", "not installed", "run `pip install -c constraints.txt -e .`")


def _variables(settings: Settings) -> Iterator[Finding]:
    known = {f"LOOP_{name.upper()}" for name in Settings.model_fields} | {"LOOP_CONFIG", "LOOP_DEBUG", state.MARK}
    strange = sorted(name for name in os.environ if name.startswith("LOOP_") and name not in known)
    if strange:
        yield Finding("environment", "note", f"{', '.join(strange)} is no setting", "see docs/settings.md for those that are")


def _sqlite(settings: Settings) -> Iterator[Finding]:
    if not settings.registry_url.startswith("sqlite"):
        return
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < WAL_FIXED:
        yield Finding(
            "sqlite",
            "note",
            f"{version}, before 3.51.3: a write-ahead log that is reset at a bad moment can lose a transaction",
            "rare, and never seen by our tests; use PostgreSQL (LOOP_REGISTRY_URL) where several people share the registry",
        )
    else:
        yield Finding("sqlite", "ok", version)


def _disk(settings: Settings) -> Iterator[Finding]:
    seen: set[int] = set()
    for what, path in (("home", settings.home), ("checkpoints", settings.checkpoints), ("artifacts", settings.artifacts)):
        there = next(parent for parent in (path, *path.parents) if parent.exists())
        device = there.stat().st_dev
        if device in seen:
            continue
        seen.add(device)
        free = shutil.disk_usage(there).free / 2**30
        if not os.access(there, os.W_OK):
            yield Finding(f"disk of {what}", "problem", f"{there} cannot be written", "set LOOP_HOME to a folder of yours")
        elif free < LEAST_FREE_GB:
            advice = "make room, or set LOOP_HOME or LOOP_CHECKPOINTS to another disk"
            yield Finding(f"disk of {what}", "problem", f"{free:.1f} GiB free below {there}", advice)
        else:
            yield Finding(f"disk of {what}", "ok", f"{free:.1f} GiB free below {there}")


def _shared_memory(settings: Settings) -> Iterator[Finding]:
    place = Path("/dev/shm")  # noqa: S108 - looked at, not written
    if settings.ray_address is not None or not place.exists():
        return
    free = shutil.disk_usage(place).free // 2**20
    if free < settings.ray_object_store_mb and (state.read(settings) or {}).get("state") != "ready":
        advice = (
            "give the container more (--shm-size), or lower LOOP_RAY_OBJECT_STORE_MB; Ray uses /tmp until then, which is slower"
        )
        yield Finding("shared memory", "note", f"{free} MiB free, Ray is to have {settings.ray_object_store_mb}", advice)


def _permissions(settings: Settings) -> Iterator[Finding]:
    for path in (settings.token_file(), settings.stack_file):
        if not path.exists():
            continue
        mode = stat.S_IMODE(path.stat().st_mode)
        if mode & 0o077:
            yield Finding(path.name, "problem", f"others may read it (mode {mode:o})", f"run `chmod 600 {path}`")
        else:
            yield Finding(path.name, "ok", f"mode {mode:o}")


def _ports(settings: Settings) -> Iterator[Finding]:
    up = state.StackLock(settings.home).holder() is not None
    yield Finding("stack", "ok", f"up, supervisor {(state.read(settings) or {}).get('supervisor', '?')}" if up else "not up")
    if up:
        return
    for name in ("api", "inference"):
        host, port = getattr(settings, f"{name}_host"), getattr(settings, f"{name}_port")
        if is_free(host, port):
            yield Finding(f"{name} port", "ok", f"{port} is free")
        else:
            other = free_port_near(host, port)
            advice = f"set LOOP_{name.upper()}_PORT={other}, or stop that program"
            yield Finding(f"{name} port", "problem", f"{port} is taken by another program", advice)


def _registry(settings: Settings) -> Iterator[Finding]:
    from services.registry import Registry, RegistryUnavailable, SchemaTooOld

    up = state.StackLock(settings.home).holder() is not None
    try:
        registry = Registry.open(settings.registry_url)
    except SchemaTooOld as error:
        # `loop up` makes and upgrades the tables; while the stack is up they must be right.
        yield Finding("registry", "problem" if up else "note", str(error), "`loop up` does so too")
        return
    except RegistryUnavailable as error:
        yield Finding("registry", "problem", str(error))
        return
    with registry:
        yield Finding("registry", "ok", f"{without_password(settings.registry_url)}, its schema is the one of this version")
        skew = registry.ping() - time.time()
        if abs(skew) > MOST_SKEW_S:
            advice = "set both clocks by NTP; jobs go by the database's clock alone, what people see does not"
            yield Finding("clock", "note", f"the database's is {skew:+.0f} s from this machine's", advice)
        else:
            yield Finding("clock", "ok", f"{skew:+.2f} s from the database's")
        yield from _dispatcher(registry.queue.dispatchers(), up)


def _dispatcher(rows: list, up: bool) -> Iterator[Finding]:
    fresh = [row for row in rows if row.age_s <= STALE_S]
    if fresh:
        for row in fresh:
            problem = row.cluster.get("problem")
            if problem:
                yield Finding(f"dispatcher {row.id}", "problem", str(problem), "see ray.log of the stack")
            else:
                yield Finding(
                    f"dispatcher {row.id}", "ok", f"spoke {row.age_s:.0f} s ago, {len(row.cluster.get('nodes', []))} node(s)"
                )
    elif up:
        last = f"the last one spoke {rows[0].age_s:.0f} s ago" if rows else "none ever spoke"
        yield Finding(
            "dispatcher", "problem", f"none is up: {last}", "see dispatcher.log of the stack; `loop down` and `loop up`"
        )
    else:
        yield Finding("dispatcher", "ok", "none, as the stack is not up")


def _mlflow(settings: Settings) -> Iterator[Finding]:
    from services.tracking import Tracking, TrackingUnavailable

    path = settings.mlflow_url.partition(":///")[2]
    if settings.mlflow_url.startswith("sqlite") and not Path("/" + path.lstrip("/")).exists():
        yield Finding("mlflow", "ok", "its database is made by the first job")
        return
    tracking = Tracking(settings, patience_s=2.0)
    try:
        number = len(tracking.models())
    except TrackingUnavailable as error:
        advice = "jobs go on without it and catch up later; models cannot be promoted or served meanwhile"
        yield Finding("mlflow", "problem", str(error), advice)
        return
    yield Finding("mlflow", "ok", f"{tracking.place}, {number} model(s)")
