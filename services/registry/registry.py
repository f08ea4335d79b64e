"""The registry as one object: its queue, its records and its studies on one database."""

from __future__ import annotations

from services.registry.engine import Database, Now
from services.registry.queue import Queue
from services.registry.records import Records
from services.registry.studies import Studies

__all__ = ["Registry"]


class Registry:
    """The experiment registry at a URL: `sqlite:///PATH` or `postgresql://USER@HOST/DATABASE` (psycopg 3).

    `now` replaces the database's clock: an SQL expression, or a function that gives epoch seconds. Nothing is connected until
    it is used; `Registry.open` also makes sure that the tables fit. Safe to share between threads; each process opens its own.
    Raises ValueError for a URL of anything else.
    """

    queue: Queue
    records: Records
    studies: Studies

    def __init__(self, url: str, *, now: Now = None) -> None:
        self._database = Database(url, now)
        self.queue = Queue(self._database)
        self.records = Records(self._database)
        self.studies = Studies(self._database, self.queue, self.records)

    @classmethod
    def open(cls, url: str, *, now: Now = None) -> Registry:
        """Connects and checks the tables. Raises SchemaTooNew, SchemaTooOld, RegistryUnavailable."""
        registry = cls(url, now=now)
        try:
            registry._database.check_schema()
        except BaseException:
            registry.close()
            raise
        return registry

    @property
    def place(self) -> str:
        """The URL without its password, for people."""
        return self._database.place

    def ping(self) -> float:
        """The database's time in epoch seconds. Raises RegistryUnavailable."""
        return self._database.ping()

    def close(self) -> None:
        """Gives all connections back."""
        self._database.close()

    def __enter__(self) -> Registry:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
