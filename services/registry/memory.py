"""The registry as plain Python in memory: for tests of what uses it, and the model that the real one is checked against.

Written apart from the SQL, in the plainest way: it goes over all jobs where the database uses an index. Its queue is put
together as the real one is: `memory_jobs` has the rows and the rules, `memory_submission` what people ask for, `memory_leases`
what attempts do.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from services.registry.engine import kept_json
from services.registry.memory_leases import MemoryLeases
from services.registry.memory_records import MemoryRecords
from services.registry.memory_studies import MemoryStudies
from services.registry.memory_submission import MemorySubmissions
from services.registry.rows import DispatcherRow, Served

__all__ = ["MemoryQueue", "MemoryRegistry"]


class MemoryQueue(MemorySubmissions, MemoryLeases):
    """The same methods as `Queue`, with the same errors."""

    def announce(self, dispatcher: str, host: str, pid: int, cluster: dict[str, Any]) -> None:
        with self._lock:
            self._dispatchers[dispatcher] = DispatcherRow(dispatcher, host, pid, self._now(), 0.0, kept_json(cluster))

    def dispatchers(self) -> list[DispatcherRow]:
        with self._lock:
            rows = [replace(row, age_s=self._now() - row.seen_at) for row in self._dispatchers.values()]
            return sorted(rows, key=lambda row: (-row.seen_at, row.id))

    def serve(self, model: str, replicas: int, *, job: int | None = None) -> Served:
        if replicas < 1:
            raise ValueError(f"{replicas} replicas of {model}; expected at least 1 (none: unserve)")
        with self._lock:
            self._served[model] = Served(model, replicas, job, self._now())
            return self._served[model]

    def unserve(self, model: str) -> bool:
        with self._lock:
            return self._served.pop(model, None) is not None

    def served(self) -> list[Served]:
        with self._lock:
            return [self._served[model] for model in sorted(self._served)]


class MemoryRegistry:
    """The same surface as `Registry`, without a database; `now` is its clock in epoch seconds."""

    def __init__(self, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self.place = "memory"
        self.queue = MemoryQueue(now)
        self.records = MemoryRecords(self.queue, now)
        self.studies = MemoryStudies(self.queue, self.records, now)

    def ping(self) -> float:
        return self._now()

    def close(self) -> None:
        """Does nothing: there is nothing to give back."""

    def __enter__(self) -> MemoryRegistry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
