"""The waiting line: bounded, first come first served, with bounded exceptions.

A row joins a batch of its own length, so taking a waiting row whose batch already runs makes a fuller pass than opening
another batch. Such a row may pass older ones, but no row is ever passed more than `bypass_limit` times.

Only the oldest waiting row has to be watched: whoever passes a row also passes every older one still waiting, so the
oldest has been passed most. Its count needs no bookkeeping per row: of all that were admitted since it came, those that
came before it are the ones that waited then and did not leave the line otherwise.
"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from loopcore.errors import QueueFull

__all__ = ["Waiting"]

Item = TypeVar("Item")


@dataclass(frozen=True)
class _Place(Generic[Item]):
    item: Item
    number: int  # order of arrival
    ahead: int  # waiting when it came
    admitted: int  # admitted in all when it came
    withdrawn: int  # left the line unadmitted when it came


class Waiting(Generic[Item]):
    """Items by the batch they would join, kept in order of arrival."""

    def __init__(self, limit: int, bypass_limit: int) -> None:
        self.limit = limit
        self.bypass_limit = bypass_limit
        self._lines: dict[int, dict[int, _Place[Item]]] = {}
        self._count = 0
        self._arrived = 0
        self._admitted = 0
        self._withdrawn = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Item]:
        """Oldest first."""
        places = sorted((place for line in self._lines.values() for place in line.values()), key=lambda place: place.number)
        return (place.item for place in places)

    def push(self, batch: int, key: int, item: Item) -> None:
        """Raises QueueFull when `limit` items wait."""
        if self._count >= self.limit:
            raise QueueFull(f"{self._count} requests are waiting and {self.limit} may; ask again later")
        place = _Place(item, self._arrived, self._count, self._admitted, self._withdrawn)
        self._lines.setdefault(batch, {})[key] = place
        self._arrived += 1
        self._count += 1

    def pop(self, running: Container[int]) -> tuple[int, Item] | None:
        """(batch, item) to admit next: the oldest whose batch is running, unless the oldest of all was passed often enough."""
        heads = {batch: next(iter(line.items())) for batch, line in self._lines.items()}
        if not heads:
            return None
        oldest = min(heads, key=lambda batch: heads[batch][1].number)
        chosen = oldest
        if self._passed(heads[oldest][1]) < self.bypass_limit:
            joining = [batch for batch in heads if batch in running]
            chosen = min(joining, key=lambda batch: heads[batch][1].number, default=oldest)
        key, place = heads[chosen]
        self._remove(chosen, key)
        self._admitted += 1
        return chosen, place.item

    def withdraw(self, batch: int, key: int) -> bool:
        """Takes an item out of the line unadmitted; False where it is not in it."""
        if key not in self._lines.get(batch, ()):
            return False
        self._remove(batch, key)
        self._withdrawn += 1
        return True

    def _passed(self, oldest: _Place[Item]) -> int:
        # Every item ahead of it was admitted or withdrawn since. Withdrawals of younger items are counted too: the true
        # number of passes is never above this one, so the bound holds.
        since, withdrawn = self._admitted - oldest.admitted, self._withdrawn - oldest.withdrawn
        return since - oldest.ahead + withdrawn

    def _remove(self, batch: int, key: int) -> None:
        line = self._lines[batch]
        del line[key]
        if not line:
            del self._lines[batch]
        self._count -= 1
