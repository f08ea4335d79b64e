"""The tables as migrations make them are the tables as the code has them, on both databases, up and down and at once."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import event

import services.registry.migrations
from services.registry import Registry, RegistryUnavailable, SchemaTooNew, SchemaTooOld, migrate
from services.registry.engine import Database
from services.registry.tables import SCHEMA, metadata
from tests.integration.registries import submission

ROOT = Path(__file__).resolve().parents[2]


def tables_of(url: str) -> set[str]:
    database = Database(url)
    with database.reading() as connection:
        names = set(sa.inspect(connection).get_table_names())
    database.close()
    return names


def set_schema(url: str, revision: str) -> None:
    database = Database(url)
    database.write(lambda connection: connection.execute(sa.text(f"UPDATE alembic_version SET version_num = '{revision}'")))
    database.close()


def test_the_code_knows_the_newest_migration() -> None:
    config = Config()
    config.set_main_option("script_location", str(Path(str(services.registry.migrations.__file__)).parent))
    scripts = ScriptDirectory.from_config(config)
    assert scripts.get_heads() == [SCHEMA]
    assert [script.revision for script in scripts.walk_revisions()] == [f"{number:04}" for number in range(int(SCHEMA), 0, -1)], (
        "revisions are compared as text, so they are numbered 0001, 0002, ..."
    )


def test_migrated_tables_are_those_of_the_code(registry_url: str) -> None:
    assert migrate(registry_url) == SCHEMA
    database = Database(registry_url)
    with database.reading() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []
        inspector = sa.inspect(connection)
        checks = {str(check["name"]): check["sqltext"] for check in inspector.get_check_constraints("jobs")}
    database.close()
    assert checks.keys() == {"ck_jobs_running_under_a_lease", "ck_jobs_unmet_not_negative"}


def test_partial_indexes_have_their_conditions(registry_url: str) -> None:
    """The comparison above does not look at them, and without them a claim walks over all ended jobs."""
    migrate(registry_url)
    sqlite = registry_url.startswith("sqlite")
    query = "SELECT name, sql FROM sqlite_master WHERE type = 'index'" if sqlite else "SELECT indexname, indexdef FROM pg_indexes"
    database = Database(registry_url)
    with database.reading() as connection:
        found = {row[0]: str(row[1]).lower() for row in connection.execute(sa.text(query))}
    database.close()
    assert "unmet = 0" in found["ix_jobs_claimable"]
    assert "'queued'" in found["ix_jobs_claimable"]
    assert "priority desc, id" in found["ix_jobs_claimable"]
    assert "'running'" in found["ix_jobs_leases"]
    assert "unique" in found["uq_jobs_unfinished_key"]
    assert "'succeeded'" not in found["uq_jobs_unfinished_key"]
    assert "'blocked'" in found["uq_jobs_unfinished_key"]


def test_down_and_up_again(registry_url: str) -> None:
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        registry.queue.submit(submission(needs=(registry.queue.submit(submission()).job.id,)))
    ours = {table.name for table in metadata.sorted_tables}
    assert tables_of(registry_url) - {"sqlite_sequence"} == ours | {"alembic_version"}
    assert migrate(registry_url, "base") is None
    assert tables_of(registry_url) - {"sqlite_sequence"} == {"alembic_version"}
    with pytest.raises(SchemaTooOld, match="loop db upgrade"):
        Registry.open(registry_url)
    assert migrate(registry_url) == SCHEMA
    with Registry.open(registry_url) as registry:
        assert registry.queue.jobs() == []


def test_a_second_migration_changes_nothing(registry_url: str) -> None:
    migrate(registry_url)
    with Registry.open(registry_url) as registry:
        job = registry.queue.submit(submission()).job
    assert migrate(registry_url) == SCHEMA
    with Registry.open(registry_url) as registry:
        assert registry.queue.job(job.id) == job


def test_processes_that_migrate_at_once_do_not_meet(registry_url: str) -> None:
    code = f"from services.registry import Registry, migrate; migrate({registry_url!r}); Registry.open({registry_url!r})"
    processes = [
        subprocess.Popen([sys.executable, "-W", "error", "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in processes:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    with Registry.open(registry_url) as registry:
        assert registry.queue.submit(submission()).job.id == 1


def test_a_step_that_fails_leaves_nothing(registry_url: str) -> None:
    """A table of ours is in the way of the first step: all of it is taken back, and the next try works."""
    database = Database(registry_url)
    database.write(lambda connection: connection.execute(sa.text("CREATE TABLE served (x INTEGER)")))
    with pytest.raises(Exception, match="served"):
        migrate(registry_url)
    assert tables_of(registry_url) == {"served"}
    database.write(lambda connection: connection.execute(sa.text("DROP TABLE served")))
    database.close()
    assert migrate(registry_url) == SCHEMA


def test_a_registry_from_a_newer_version_is_refused(registry_url: str) -> None:
    migrate(registry_url)
    set_schema(registry_url, "9999")
    for use in (Registry.open, migrate):
        with pytest.raises(SchemaTooNew, match=f"has schema 9999; this version knows up to {SCHEMA}: upgrade loopcore"):
            use(registry_url)


def test_a_registry_from_an_older_version_is_refused_until_upgraded(registry_url: str) -> None:
    migrate(registry_url)
    set_schema(registry_url, "0000")
    with pytest.raises(SchemaTooOld, match="run `loop db upgrade`"):
        Registry.open(registry_url)


def test_an_empty_or_missing_database_says_what_to_run(registry_url: str) -> None:
    with pytest.raises(SchemaTooOld, match="run `loop db upgrade`"):
        Registry.open(registry_url)


def test_opening_does_not_make_a_file(tmp_path: Path) -> None:
    with pytest.raises(SchemaTooOld):
        Registry.open(f"sqlite:///{tmp_path / 'none.db'}")
    assert list(tmp_path.iterdir()) == []


def test_sqlite_is_set_up_to_survive_a_power_cut(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'deep' / 'er' / 'registry.db'}"
    migrate(url)
    database = Database(url)
    with database.reading() as connection:
        found = {name: connection.scalar(sa.text(f"PRAGMA {name}")) for name in ("journal_mode", "synchronous", "foreign_keys")}
        assert found == {"journal_mode": "wal", "synchronous": 2, "foreign_keys": 1}
        assert connection.scalar(sa.text("PRAGMA busy_timeout")) == 60_000
    database.close()


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    path.write_text("this was never a database, and it is long enough to be taken for one by its size " * 40)
    with pytest.raises(RegistryUnavailable, match="cannot be used: file is not a database"):
        Registry.open(f"sqlite:///{path}")


def test_a_database_that_is_not_there_hides_the_password(free_port: object) -> None:
    assert callable(free_port)
    url = f"postgresql://ada:s3cret@127.0.0.1:{free_port()}/loop"
    with pytest.raises(RegistryUnavailable) as caught:
        Registry.open(url)
    message = str(caught.value)
    assert "ada:***@127.0.0.1" in message
    assert "s3cret" not in message
    assert "refused" in message


@pytest.mark.postgres
def test_connections_that_the_server_closed_are_replaced(fresh_postgres: str, postgres_server: str) -> None:
    import psycopg

    migrate(fresh_postgres)
    with Registry.open(fresh_postgres) as registry:
        registry.queue.submit(submission())
        with psycopg.connect(postgres_server, autocommit=True) as connection:
            ended = connection.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE datname = %s",
                [fresh_postgres.rpartition("/")[2]],
            ).fetchone()
        assert ended is not None
        assert ended[0] >= 1
        assert registry.queue.submit(submission()).job.id == 2


def test_a_read_only_file_is_said_to_be_one(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'registry.db'}"
    migrate(url)
    database = Database(url)
    with Registry.open(url) as registry:
        database.close()
        event.listen(registry._database.engine, "begin", lambda connection: connection.exec_driver_sql("PRAGMA query_only=ON"))
        with pytest.raises(RegistryUnavailable, match="readonly"):
            registry.queue.submit(submission())
    with sqlite3.connect(tmp_path / "registry.db") as connection:
        assert connection.execute("SELECT count(*) FROM jobs").fetchone() == (0,)
    connection.close()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://a@b/c", "cannot be kept in 'mysql'"),
        ("sqlite://", "names no file"),
        ("sqlite:///:memory:", "MemoryRegistry"),
        ("not a url", "cannot be read"),
    ],
)
def test_a_url_of_something_else(url: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Registry(url)
