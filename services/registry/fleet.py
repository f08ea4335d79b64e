"""Who works for the registry: dispatchers that announce themselves, and the models that the inference service has up."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa

from services.registry.engine import Database
from services.registry.rows import DispatcherRow, Served
from services.registry.tables import dispatchers, served

__all__ = ["Fleet"]


class Fleet:
    """The part of the queue that says what is up."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def announce(self, dispatcher: str, host: str, pid: int, cluster: dict[str, Any]) -> None:
        """Says that a dispatcher is alive, and what its cluster has."""
        values = {"host": host, "pid": pid, "seen_at": self._database.now(), "cluster": cluster}
        note = self._database.insert(dispatchers).values(id=dispatcher, **values)
        note = note.on_conflict_do_update(index_elements=[dispatchers.c.id], set_=values)
        self._database.write(lambda connection: connection.execute(note))

    def dispatchers(self) -> list[DispatcherRow]:
        """All that ever announced themselves, the one seen last first."""
        age = (self._database.now() - dispatchers.c.seen_at).label("age_s")
        with self._database.reading() as connection:
            query = sa.select(dispatchers, age).order_by(dispatchers.c.seen_at.desc(), dispatchers.c.id)
            return [DispatcherRow(**row._mapping) for row in connection.execute(query)]

    def serve(self, model: str, replicas: int, *, job: int | None = None) -> Served:
        """Asks the inference service to have `model` (name@alias) up with that many replicas."""
        if replicas < 1:
            raise ValueError(f"{replicas} replicas of {model}; expected at least 1 (none: unserve)")
        values = {"replicas": replicas, "job": job, "since": self._database.now()}
        note = self._database.insert(served).values(model=model, **values)
        note = note.on_conflict_do_update(index_elements=[served.c.model], set_=values).returning(served)
        return self._database.write(lambda connection: Served(**connection.execute(note).one()._mapping))

    def unserve(self, model: str) -> bool:
        """Asks the inference service to take `model` down; gives whether it was asked to have it up."""
        drop = sa.delete(served).where(served.c.model == model)
        return self._database.write(lambda connection: connection.execute(drop).rowcount) > 0

    def served(self) -> list[Served]:
        """What the inference service is to have up, by name."""
        with self._database.reading() as connection:
            return [Served(**row._mapping) for row in connection.execute(sa.select(served).order_by(served.c.model))]
