"""The database behind the registry: connections, transactions, its clock, and the check that its tables are ours.

Two databases, one behaviour. On SQLite every write is `BEGIN IMMEDIATE` (one writer at a time, WAL, synchronous=FULL); on
PostgreSQL writes are READ COMMITTED, and those that touch more than one job's row first take the graph lock: whoever waits
for a second job's row holds that lock, so no circle of waits can form.
"""

from __future__ import annotations

import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import sqlalchemy as sa
from sqlalchemy import event, exc
from sqlalchemy.dialects import postgresql, sqlite

from services.registry.errors import RegistryUnavailable, SchemaTooNew, SchemaTooOld
from services.registry.tables import SCHEMA, Time

__all__ = ["Database", "Now", "clean_text", "dump_json", "finite", "kept_json", "registry_url"]

Result = TypeVar("Result")

# The clock: nothing for the database's own, an SQL expression, or a function of no arguments that gives epoch seconds.
Now = sa.ColumnElement[float] | Callable[[], float] | None

BUSY_TIMEOUT_S = 60.0  # seconds a SQLite writer waits for the others
CONNECT_TIMEOUT_S = 10  # seconds
IDLE_TRANSACTION_S = 30  # seconds after which PostgreSQL ends the transaction of a process that stopped in the middle of one
GRAPH_LOCK = 0x6C6F6F70  # number of the advisory lock; any constant will do
DEADLOCK_TRIES = 5  # times a transaction that PostgreSQL broke off is run

# SQLSTATEs of a transaction that may simply be run again: serialization failure and deadlock.
_AGAIN = frozenset({"40001", "40P01"})


class GraphWanted(Exception):
    """A transaction found that it must touch a second job and could not get the graph lock without waiting."""


def registry_url(url: str) -> sa.URL:
    """The URL with its driver; `postgresql://` means psycopg 3. Raises ValueError for what is neither of the two databases."""
    try:
        parsed = sa.make_url(url)
    except exc.ArgumentError:
        raise ValueError(
            "the registry's URL cannot be read; expected sqlite:///PATH or postgresql://USER@HOST/DATABASE"
        ) from None
    if parsed.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return parsed.set(drivername="postgresql+psycopg")
    if parsed.drivername in ("sqlite", "sqlite+pysqlite"):
        if parsed.database in (None, "", ":memory:"):
            raise ValueError(f"{url!r} names no file; expected sqlite:///PATH (in memory: MemoryRegistry)")
        return parsed.set(drivername="sqlite+pysqlite")
    raise ValueError(f"the registry cannot be kept in {parsed.drivername!r}; expected sqlite:///PATH or postgresql://...")


def finite(value: float | None) -> float | None:
    """The number, or None where it is not a finite one."""
    return None if value is None or not math.isfinite(value) else float(value)


def clean_text(text: str) -> str:
    """The text as both databases can keep it: no NUL, no half of a surrogate pair."""
    return text.replace("\x00", "\ufffd").encode("utf-8", "replace").decode()


def _finite_json(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    if isinstance(value, dict):
        return {key: _finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite_json(item) for item in value]
    return value


def dump_json(value: Any) -> str:
    """JSON as the standard has it: numbers that are not finite become null."""
    try:
        return json.dumps(value, allow_nan=False)
    except ValueError:
        return json.dumps(_finite_json(value), allow_nan=False)


def kept_json(value: Any) -> Any:
    """The value as it comes back from the database."""
    return json.loads(dump_json(value))


class Database:
    """Connections to one registry. Safe to share between threads; each process opens its own."""

    def __init__(self, url: str, now: Now = None) -> None:
        self.url = registry_url(url)
        self.place = self.url.render_as_string(hide_password=True)
        self.sqlite = self.url.get_backend_name() == "sqlite"
        self._now = now
        if self.sqlite:
            self.engine = sa.create_engine(self.url, connect_args={"timeout": BUSY_TIMEOUT_S}, json_serializer=dump_json)
            event.listen(self.engine, "connect", _prepare_sqlite)
            event.listen(self.engine, "begin", _begin_sqlite)
        else:
            given = self.url.query
            wanted: dict[str, Any] = {
                "connect_timeout": CONNECT_TIMEOUT_S,
                "application_name": "loopcore",
                # A connection whose other end vanished is noticed within half a minute.
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
                "tcp_user_timeout": 30_000,
                "options": f"-c idle_in_transaction_session_timeout={IDLE_TRANSACTION_S * 1000}",
            }
            self.engine = sa.create_engine(
                self.url,
                connect_args={name: value for name, value in wanted.items() if name not in given},
                json_serializer=dump_json,
                pool_pre_ping=True,
                isolation_level="READ COMMITTED",
            )
        # The same pool of connections; only how a transaction begins differs.
        self._writing = self.engine.execution_options(writes=True)

    def now(self) -> sa.ColumnElement[float]:
        """The time as an SQL expression. It moves on within a transaction, so a wait for a lock counts."""
        if isinstance(self._now, sa.ColumnElement):
            return self._now
        if self._now is not None:
            return sa.bindparam("now", type_=Time, unique=True, callable_=self._now)  # asked at each execution
        if self.sqlite:
            return sa.type_coerce((sa.func.julianday("now") - 2440587.5) * 86400.0, Time)
        return sa.cast(sa.extract("epoch", sa.func.clock_timestamp()), Time)

    def insert(self, table: sa.Table) -> postgresql.Insert | sqlite.Insert:
        """An INSERT that can say `on_conflict_do_update`, in this database's dialect."""
        return sqlite.insert(table) if self.sqlite else postgresql.insert(table)

    @contextmanager
    def reading(self) -> Iterator[sa.Connection]:
        """A transaction that only reads. Raises RegistryUnavailable."""
        with self._answering(), self.engine.begin() as connection:
            yield connection

    def write(self, work: Callable[[sa.Connection], Result], *, graph: bool = False) -> Result:
        """Runs `work` in one transaction and commits it; all of it is kept or nothing.

        `graph` takes the graph lock first. `work` is run again when PostgreSQL broke the transaction off, so it must have no
        effect but its writes. Raises RegistryUnavailable, and whatever `work` raises.
        """
        for turn in range(DEADLOCK_TRIES):
            try:
                with self._answering(), self._writing.begin() as connection:
                    if graph and not self.sqlite:
                        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(GRAPH_LOCK)))
                    return work(connection)
            except GraphWanted:
                graph = True
            except exc.DBAPIError as error:
                if getattr(error.orig, "sqlstate", None) not in _AGAIN or turn + 1 == DEADLOCK_TRIES:
                    raise
                time.sleep(0.01 * 2**turn)
        raise RegistryUnavailable(f"the registry at {self.place} broke off the same write {DEADLOCK_TRIES} times; try again")

    def want_graph(self, connection: sa.Connection) -> None:
        """Makes sure that the transaction holds the graph lock, from its middle: takes it if free, else starts over."""
        if not self.sqlite and not connection.scalar(sa.select(sa.func.pg_try_advisory_xact_lock(GRAPH_LOCK))):
            raise GraphWanted

    def check_schema(self) -> None:
        """Raises SchemaTooNew or SchemaTooOld unless the tables are those of this version."""
        if self.sqlite and not Path(str(self.url.database)).exists():
            raise SchemaTooOld(f"there is no registry at {self.place}; expected one of schema {SCHEMA}: run `loop db upgrade`")
        with self.reading() as connection:
            found = schema_of(connection)
        if found is None:
            raise SchemaTooOld(f"the registry at {self.place} has no tables; expected schema {SCHEMA}: run `loop db upgrade`")
        if found > SCHEMA:
            raise too_new(self.place, found)
        if found < SCHEMA:
            raise SchemaTooOld(f"the registry at {self.place} has schema {found}; expected {SCHEMA}: run `loop db upgrade`")

    def ping(self) -> float:
        """Asks the database for its time and returns it. Raises RegistryUnavailable."""
        with self.reading() as connection:
            return float(connection.execute(sa.select(self.now())).scalar_one())

    def close(self) -> None:
        """Gives all connections back."""
        self.engine.dispose()

    @contextmanager
    def _answering(self) -> Iterator[None]:
        """Turns what the driver raises when there is no database to speak to into RegistryUnavailable."""
        try:
            yield
        except exc.DBAPIError as error:
            if getattr(error.orig, "sqlstate", None) in _AGAIN or not _is_unavailable(error):
                raise
            why = str(error.orig).strip().splitlines() or [type(error.orig).__name__]
            raise RegistryUnavailable(
                f"the registry at {self.place} cannot be used: {why[0]}; expected a database that answers: "
                "check the address and that it runs, then try again"
            ) from error
        except exc.TimeoutError as error:
            raise RegistryUnavailable(f"the registry at {self.place} gave no connection in time: {error}") from error


def too_new(place: str, found: str) -> SchemaTooNew:
    """The error of a program that met the tables of a later one."""
    return SchemaTooNew(f"the registry at {place} has schema {found}; this version knows up to {SCHEMA}: upgrade loopcore")


def schema_of(connection: sa.Connection) -> str | None:
    """The revision that the database says it has; None where there are no tables of ours."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.scalar(sa.select(sa.column("version_num")).select_from(sa.table("alembic_version")))


def _is_unavailable(error: exc.DBAPIError) -> bool:
    if isinstance(error, exc.OperationalError | exc.InterfaceError) or error.connection_invalidated:
        return True
    return type(error.orig) is sqlite3.DatabaseError  # "file is not a database", "disk image is malformed"


def _prepare_sqlite(dbapi_connection: Any, _record: Any) -> None:
    # Transactions are begun by the listener below, not by the driver.
    dbapi_connection.isolation_level = None
    cursor = dbapi_connection.cursor()
    try:
        _use_wal(cursor)
        cursor.execute("PRAGMA synchronous=FULL")
        cursor.execute("PRAGMA foreign_keys=ON")
    finally:
        cursor.close()


def _use_wal(cursor: sqlite3.Cursor) -> None:
    """The file remembers its mode, so this writes once in its life; SQLite does not wait for others here, so we do."""
    ends = time.monotonic() + BUSY_TIMEOUT_S
    while True:
        try:
            if cursor.execute("PRAGMA journal_mode").fetchone()[0] == "wal":
                return
            cursor.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > ends:
                raise
        time.sleep(0.005)


def _begin_sqlite(connection: sa.Connection) -> None:
    # A transaction that reads first and writes later would be refused when another wrote in between: take the lock at once.
    connection.exec_driver_sql("BEGIN IMMEDIATE" if connection.get_execution_options().get("writes") else "BEGIN")
