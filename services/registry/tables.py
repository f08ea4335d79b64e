"""The registry's tables. Migrations make them; a test compares the two on both databases.

Times are DOUBLE seconds since 1970, by the database's clock. `jobs.origin` is empty for a job that is its own origin.
"""

from __future__ import annotations

import sqlalchemy as sa

__all__ = [
    "SCHEMA",
    "attempts",
    "checkpoints",
    "curves",
    "dispatchers",
    "job_needs",
    "jobs",
    "logs",
    "measurements",
    "metadata",
    "runs",
    "served",
    "studies",
    "study_works",
]

# The newest migration, which these tables are; revisions are numbers of four digits, so they compare as text.
SCHEMA = "0002"

metadata = sa.MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite numbers rows by themselves only where the column's type is INTEGER.
Id = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
Time = sa.Double()
# JSON as text on both: PostgreSQL's jsonb would refuse \u0000 and reorder what people wrote.
Json = sa.JSON(none_as_null=True)

jobs = sa.Table(
    "jobs",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("name", sa.Text),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("spec", Json, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("priority", sa.Integer, nullable=False),
    sa.Column("user", sa.Text),
    sa.Column("key", sa.Text),
    sa.Column("cpus", sa.Double, nullable=False),
    sa.Column("gpus", sa.Double, nullable=False),
    sa.Column("memory_gb", sa.Double, nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("errors", sa.Integer, nullable=False),
    sa.Column("losses", sa.Integer, nullable=False),
    sa.Column("error_budget", sa.Integer, nullable=False),
    sa.Column("loss_budget", sa.Integer, nullable=False),
    sa.Column("unmet", sa.Integer, nullable=False),
    sa.Column("reason", sa.Text),
    sa.Column("progress", Json),
    sa.Column("result", Json),
    sa.Column("error", sa.Text),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("run_after", Time, nullable=False),
    sa.Column("started_at", Time),
    sa.Column("finished_at", Time),
    sa.Column("lease_until", Time),
    sa.Column("deadline_at", Time),
    sa.Column("time_limit_s", sa.Double),
    sa.Column("cancel_requested_at", Time),
    sa.Column("origin", Id),
    sa.Column("retry_of", Id),
    sa.Column("dispatcher", sa.Text),
    sa.Column("node", sa.Text),
    sa.Column("provenance", Json, nullable=False),
    sa.Column("study_id", Id),
    sa.CheckConstraint("(state = 'running') = (lease_until IS NOT NULL)", name="running_under_a_lease"),
    sa.CheckConstraint("unmet >= 0", name="unmet_not_negative"),
    sqlite_autoincrement=True,
)

_claimable = sa.text("state = 'queued' AND unmet = 0")
_running = sa.text("state = 'running'")
_unfinished = sa.text("key IS NOT NULL AND state IN ('queued', 'blocked', 'running')")

# A claim walks this in its own order and stops at the first row that fits: ended rows are not in it.
sa.Index("ix_jobs_claimable", jobs.c.priority.desc(), jobs.c.id, sqlite_where=_claimable, postgresql_where=_claimable)
sa.Index("ix_jobs_leases", jobs.c.lease_until, sqlite_where=_running, postgresql_where=_running)
sa.Index("uq_jobs_unfinished_key", jobs.c.key, unique=True, sqlite_where=_unfinished, postgresql_where=_unfinished)
# For counts and lists by state without reading whole rows. Not the other way round: SQLite would take an index that begins with
# the state for claims and then sort.
sa.Index("ix_jobs_id_state", jobs.c.id, jobs.c.state)
sa.Index(
    "ix_jobs_origin", jobs.c.origin, sqlite_where=sa.text("origin IS NOT NULL"), postgresql_where=sa.text("origin IS NOT NULL")
)
sa.Index("ix_jobs_finished_at", jobs.c.finished_at)

job_needs = sa.Table(
    "job_needs",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("needs", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Index("ix_job_needs_needs", "needs"),
)

attempts = sa.Table(
    "attempts",
    metadata,
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("node", sa.Text),
    sa.Column("pid", sa.Integer),
    sa.Column("dispatcher", sa.Text, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("finished_at", Time),
    sa.Column("outcome", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("log_bytes", sa.BigInteger, nullable=False),
)

logs = sa.Table(
    "logs",
    metadata,
    sa.Column("seq", Id, primary_key=True, autoincrement=True),
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("at", Time, nullable=False),
    sa.Column("text", sa.Text, nullable=False),
    sa.Index("ix_logs_job_seq", "job", "seq"),
    sqlite_autoincrement=True,
)

runs = sa.Table(
    "runs",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Column("origin", Id, nullable=False),
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("kind", sa.Text, nullable=False),
    sa.Column("spec", Json, nullable=False),
    sa.Column("provenance", Json, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("mlflow_run", sa.Text),
    sa.Column("mlflow_step", sa.BigInteger, nullable=False),
    sa.Column("figures", Json),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("finished_at", Time),
    sa.Index("ix_runs_job", "job"),
    sa.UniqueConstraint("origin", "key"),
    sqlite_autoincrement=True,
)

checkpoints = sa.Table(
    "checkpoints",
    metadata,
    sa.Column("run", Id, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("place", sa.Text, nullable=False),
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("at", Time, nullable=False),
)

curves = sa.Table(
    "curves",
    metadata,
    sa.Column("run", Id, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("name", sa.Text, primary_key=True),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    sa.Column("value", sa.Double),
    sqlite_with_rowid=False,
)

measurements = sa.Table(
    "measurements",
    metadata,
    sa.Column("run", Id, sa.ForeignKey("runs.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("instrument", sa.Text, primary_key=True),
    # The axes as JSON with sorted names: what tells two measurements of an instrument apart.
    sa.Column("position", sa.Text, primary_key=True),
    sa.Column("value", sa.Double),
    sa.Column("low", sa.Double),
    sa.Column("high", sa.Double),
)

dispatchers = sa.Table(
    "dispatchers",
    metadata,
    sa.Column("id", sa.Text, primary_key=True),
    sa.Column("host", sa.Text, nullable=False),
    sa.Column("pid", sa.Integer, nullable=False),
    sa.Column("seen_at", Time, nullable=False),
    sa.Column("cluster", Json, nullable=False),
)

studies = sa.Table(
    "studies",
    metadata,
    sa.Column("id", Id, primary_key=True, autoincrement=True),
    sa.Column("name", sa.Text, nullable=False),
    sa.Column("scale", sa.Text, nullable=False),
    sa.Column("asked", Json, nullable=False),
    # Of name, scale and what was asked: starting the same study again goes on with it.
    sa.Column("digest", sa.Text, nullable=False),
    sa.Column("user", sa.Text),
    sa.Column("provenance", Json, nullable=False),
    sa.Column("created_at", Time, nullable=False),
    sa.Column("started_at", Time, nullable=False),
    sa.Column("cancelled_at", Time),
    sa.UniqueConstraint("digest"),
    sqlite_autoincrement=True,
)

study_works = sa.Table(
    "study_works",
    metadata,
    sa.Column("study", Id, sa.ForeignKey("studies.id", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    sa.Column("cell", sa.Text, primary_key=True),
    # Empty for the cell's training.
    sa.Column("probe", sa.Text, primary_key=True),
    # What the work is, whoever asks for it: by this, studies find each other's jobs.
    sa.Column("key", sa.Text, nullable=False),
    sa.Column("job", Id, sa.ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    sa.Index("ix_study_works_key", "key"),
    sa.Index("ix_study_works_job", "job"),
)

served = sa.Table(
    "served",
    metadata,
    sa.Column("model", sa.Text, primary_key=True),
    sa.Column("replicas", sa.Integer, nullable=False),
    sa.Column("job", Id),
    sa.Column("since", Time, nullable=False),
)
