"""The first tables: jobs with their needs, attempts and logs; runs with checkpoints, curves and measurements; who is up."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True)


def only(condition: str) -> dict[str, Any]:
    """An index over the rows that fit the condition, on both databases."""
    return {"sqlite_where": sa.text(condition), "postgresql_where": sa.text(condition)}


def upgrade() -> None:
    op.create_table(
        "dispatchers",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("host", sa.Text, nullable=False),
        sa.Column("pid", sa.Integer, nullable=False),
        sa.Column("seen_at", sa.Double, nullable=False),
        sa.Column("cluster", JSON, nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_dispatchers")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=True),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("priority", sa.Integer, nullable=False),
        sa.Column("user", sa.Text, nullable=True),
        sa.Column("key", sa.Text, nullable=True),
        sa.Column("cpus", sa.Double, nullable=False),
        sa.Column("gpus", sa.Double, nullable=False),
        sa.Column("memory_gb", sa.Double, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("errors", sa.Integer, nullable=False),
        sa.Column("losses", sa.Integer, nullable=False),
        sa.Column("error_budget", sa.Integer, nullable=False),
        sa.Column("loss_budget", sa.Integer, nullable=False),
        sa.Column("unmet", sa.Integer, nullable=False),
        sa.Column("reason", sa.Text, nullable=True),
        sa.Column("progress", JSON, nullable=True),
        sa.Column("result", JSON, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("run_after", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=True),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.Column("lease_until", sa.Double, nullable=True),
        sa.Column("deadline_at", sa.Double, nullable=True),
        sa.Column("time_limit_s", sa.Double, nullable=True),
        sa.Column("cancel_requested_at", sa.Double, nullable=True),
        sa.Column("origin", ID, nullable=True),
        sa.Column("retry_of", ID, nullable=True),
        sa.Column("dispatcher", sa.Text, nullable=True),
        sa.Column("node", sa.Text, nullable=True),
        sa.Column("provenance", JSON, nullable=False),
        sa.Column("study_id", ID, nullable=True),
        sa.CheckConstraint("(state = 'running') = (lease_until IS NOT NULL)", name=op.f("ck_jobs_running_under_a_lease")),
        sa.CheckConstraint("unmet >= 0", name=op.f("ck_jobs_unmet_not_negative")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
        sqlite_autoincrement=True,
    )
    op.create_index(
        "ix_jobs_claimable",
        "jobs",
        [sa.literal_column("priority DESC"), "id"],
        unique=False,
        **only("state = 'queued' AND unmet = 0"),
    )
    op.create_index("ix_jobs_finished_at", "jobs", ["finished_at"], unique=False)
    op.create_index("ix_jobs_leases", "jobs", ["lease_until"], unique=False, **only("state = 'running'"))
    op.create_index("ix_jobs_origin", "jobs", ["origin"], unique=False, **only("origin IS NOT NULL"))
    op.create_index("ix_jobs_id_state", "jobs", ["id", "state"], unique=False)
    op.create_index(
        "uq_jobs_unfinished_key",
        "jobs",
        ["key"],
        unique=True,
        **only("key IS NOT NULL AND state IN ('queued', 'blocked', 'running')"),
    )
    op.create_table(
        "served",
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("replicas", sa.Integer, nullable=False),
        sa.Column("job", ID, nullable=True),
        sa.Column("since", sa.Double, nullable=False),
        sa.PrimaryKeyConstraint("model", name=op.f("pk_served")),
    )
    op.create_table(
        "attempts",
        sa.Column("job", ID, autoincrement=False, nullable=False),
        sa.Column("attempt", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("node", sa.Text, nullable=True),
        sa.Column("pid", sa.Integer, nullable=True),
        sa.Column("dispatcher", sa.Text, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.Column("outcome", sa.Text, nullable=True),
        sa.Column("error", sa.Text, nullable=True),
        sa.Column("log_bytes", sa.BigInteger, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_attempts_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "attempt", name=op.f("pk_attempts")),
    )
    op.create_table(
        "job_needs",
        sa.Column("job", ID, autoincrement=False, nullable=False),
        sa.Column("needs", ID, autoincrement=False, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_job_needs_job"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["needs"], ["jobs.id"], name=op.f("fk_job_needs_needs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job", "needs", name=op.f("pk_job_needs")),
    )
    op.create_index("ix_job_needs_needs", "job_needs", ["needs"], unique=False)
    op.create_table(
        "logs",
        sa.Column("seq", ID, autoincrement=True, nullable=False),
        sa.Column("job", ID, nullable=False),
        sa.Column("attempt", sa.Integer, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("text", sa.Text, nullable=False),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_logs_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_logs")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_logs_job_seq", "logs", ["job", "seq"], unique=False)
    op.create_table(
        "runs",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("job", ID, nullable=False),
        sa.Column("origin", ID, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("spec", JSON, nullable=False),
        sa.Column("provenance", JSON, nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("mlflow_run", sa.Text, nullable=True),
        sa.Column("mlflow_step", sa.BigInteger, nullable=False),
        sa.Column("figures", JSON, nullable=True),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("finished_at", sa.Double, nullable=True),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_runs_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_runs")),
        sa.UniqueConstraint("origin", "key", name=op.f("uq_runs_origin_key")),
        sqlite_autoincrement=True,
    )
    op.create_index("ix_runs_job", "runs", ["job"], unique=False)
    op.create_table(
        "checkpoints",
        sa.Column("run", ID, autoincrement=False, nullable=False),
        sa.Column("step", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("place", sa.Text, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("at", sa.Double, nullable=False),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_checkpoints_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "step", name=op.f("pk_checkpoints")),
    )
    op.create_table(
        "curves",
        sa.Column("run", ID, autoincrement=False, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("step", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("value", sa.Double, nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_curves_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "name", "step", name=op.f("pk_curves")),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "measurements",
        sa.Column("run", ID, autoincrement=False, nullable=False),
        sa.Column("instrument", sa.Text, nullable=False),
        sa.Column("position", sa.Text, nullable=False),
        sa.Column("value", sa.Double, nullable=True),
        sa.Column("low", sa.Double, nullable=True),
        sa.Column("high", sa.Double, nullable=True),
        sa.ForeignKeyConstraint(["run"], ["runs.id"], name=op.f("fk_measurements_run"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("run", "instrument", "position", name=op.f("pk_measurements")),
    )


def downgrade() -> None:
    for table in (
        "measurements",
        "curves",
        "checkpoints",
        "runs",
        "logs",
        "job_needs",
        "attempts",
        "served",
        "dispatchers",
        "jobs",
    ):
        op.drop_table(table)
