"""Makes and upgrades the registry's tables. The only part of the registry that loads alembic."""

from __future__ import annotations

from pathlib import Path

import sqlalchemy as sa

from services.registry.engine import GRAPH_LOCK, Database, schema_of, too_new
from services.registry.tables import SCHEMA

__all__ = ["migrate"]


def migrate(url: str, revision: str = "head") -> str | None:
    """Brings the tables to `revision` ("head", "base" or a number), up or down, in one transaction; gives where they are now.

    Several processes may do this at once: one does the work, the others wait and find it done. Going down drops what the
    later tables held. Raises RegistryUnavailable, and SchemaTooNew for tables of a later version than this program knows.
    """
    from alembic import command
    from alembic.config import Config

    database = Database(url)
    if database.sqlite:
        Path(str(database.url.database)).parent.mkdir(parents=True, exist_ok=True)
    target = SCHEMA if revision == "head" else revision

    def work(connection: sa.Connection) -> str | None:
        if not database.sqlite:
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(GRAPH_LOCK + 1)))
        found = schema_of(connection)
        if found is not None and found > SCHEMA:
            raise too_new(database.place, found)
        config = Config()
        config.set_main_option("script_location", str(Path(__file__).with_name("migrations")).replace("%", "%%"))
        config.attributes["connection"] = connection
        if target == "base" or (found is not None and target < found):
            command.downgrade(config, target)
        else:
            command.upgrade(config, target)
        return schema_of(connection)

    try:
        return database.write(work)
    finally:
        database.close()
