"""What the registry's tests share: a clock they set, small jobs, and a way to empty a database between two tests."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from services.registry import MemoryRegistry, Registry, Submission
from services.registry.tables import metadata

AnyRegistry = Registry | MemoryRegistry

# Room for every job in these tests.
ROOM: dict[str, Any] = {"cpus": 8.0, "gpus": 8.0, "memory_gb": 64.0}


class Clock:
    """Epoch seconds that move only when told to; whole numbers, so that sums of them are exact."""

    def __init__(self) -> None:
        self.at = 1_000_000.0

    def __call__(self) -> float:
        return self.at

    def pass_s(self, seconds: float) -> None:
        self.at += seconds


def submission(**values: Any) -> Submission:
    """A small job; everything can be said otherwise."""
    return Submission(**({"kind": "train", "spec": {"steps": 3}, "digest": "d1"} | values))


def empty(registry: Registry) -> None:
    """Leaves the tables without rows, and numbers beginning from 1: faster than a new database a test."""

    def work(connection: sa.Connection) -> None:
        if connection.dialect.name == "sqlite":
            for table in reversed(metadata.sorted_tables):
                connection.execute(sa.delete(table))
            connection.execute(sa.text("DELETE FROM sqlite_sequence"))
        else:
            names = ", ".join(table.name for table in metadata.sorted_tables)
            connection.execute(sa.text(f"TRUNCATE {names} RESTART IDENTITY CASCADE"))

    registry._database.write(work)
