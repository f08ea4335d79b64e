"""What alembic runs for each command: on the connection, and in the transaction, that `services.registry.migrate` opened."""

from __future__ import annotations

from alembic import context

from services.registry.tables import metadata

# All steps of one call are kept or none: SQLite can undo a CREATE TABLE as well, though alembic does not expect it to.
context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    transactional_ddl=True,
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
