# SPDX-License-Identifier: BSD-3-Clause
"""Alembic's environment: one connection handed in, or SQL text going out."""

from __future__ import annotations

from alembic import context

from kombu_pgqueue import sql
from kombu_pgqueue.migrations.run import run_sql
from kombu_pgqueue.tables import metadata

config = context.config
schema = config.attributes["schema"]
offline = context.is_offline_mode()

context.configure(
    connection=None if offline else config.attributes["connection"],
    dialect_name="postgresql" if offline else None,
    target_metadata=metadata,
    version_table_schema=schema,
    transactional_ddl=True,
    pgqueue_schema=schema,
)

with context.begin_transaction():
    if offline:
        # The version table lives in our schema, so that comes first.
        run_sql(context.get_context(), f"CREATE SCHEMA IF NOT EXISTS {schema};")
    else:
        config.attributes["connection"].exec_driver_sql(f"CREATE SCHEMA IF NOT EXISTS {schema}")
    context.run_migrations()
    run_sql(context.get_context(), sql.functions(schema))
