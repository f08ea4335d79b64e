"""Studies, and the jobs that do their work."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")
JSON = sa.JSON(none_as_null=True)


def upgrade() -> None:
    op.create_table(
        "studies",
        sa.Column("id", ID, autoincrement=True, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("scale", sa.Text, nullable=False),
        sa.Column("asked", JSON, nullable=False),
        sa.Column("digest", sa.Text, nullable=False),
        sa.Column("user", sa.Text, nullable=True),
        sa.Column("provenance", JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("started_at", sa.Double, nullable=False),
        sa.Column("cancelled_at", sa.Double, nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_studies")),
        sa.UniqueConstraint("digest", name=op.f("uq_studies_digest")),
        sqlite_autoincrement=True,
    )
    op.create_table(
        "study_works",
        sa.Column("study", ID, autoincrement=False, nullable=False),
        sa.Column("cell", sa.Text, nullable=False),
        sa.Column("probe", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("job", ID, nullable=False),
        sa.ForeignKeyConstraint(["study"], ["studies.id"], name=op.f("fk_study_works_study"), ondelete="CASCADE"),
        sa.ForeignKeyConstraint(["job"], ["jobs.id"], name=op.f("fk_study_works_job"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("study", "cell", "probe", name=op.f("pk_study_works")),
    )
    op.create_index("ix_study_works_key", "study_works", ["key"])
    op.create_index("ix_study_works_job", "study_works", ["job"])


def downgrade() -> None:
    op.drop_table("study_works")
    op.drop_table("studies")
