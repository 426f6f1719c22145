# SPDX-License-Identifier: BSD-3-Clause
"""Installing and upgrading the schema.

Tables change by numbered Alembic revisions; functions and views are applied whole after the last
of them. Alembic is imported only by the process whose turn it is, and only when there is something
to do: a worker's start asks two cheap queries.
"""

from __future__ import annotations

import io
import logging
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kombu_pgqueue.errors import SchemaError, SchemaTooNew
from kombu_pgqueue.sql import DEFAULT_SCHEMA, check_schema_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    import psycopg
    from alembic.config import Config

#: The newest revision this code brings.
HEAD = "0001"
#: A schema that asks for a higher level than this was made by an incompatible, newer release.
COMPATIBILITY_LEVEL = 1

_TURN_POLL_S = 0.1
_TURN_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class SchemaState:
    """What is installed: `revision` None is nothing at all."""

    revision: str | None
    required_level: int | None = None

    @property
    def up_to_date(self) -> bool:
        """True if this code can work with it: at its own revision, or a newer compatible one."""
        return self.revision is not None and self.revision >= HEAD


def current(connection: psycopg.Connection[Any], schema: str = DEFAULT_SCHEMA) -> SchemaState:
    """Read the installed revision; raise `SchemaTooNew` if this code cannot work with it."""
    check_schema_name(schema)
    known = connection.execute("SELECT to_regclass(%s)", [f"{schema}.alembic_version"]).fetchone()
    if known is None or known[0] is None:
        return SchemaState(None)
    row = connection.execute(
        f"SELECT (SELECT max(version_num) FROM {schema}.alembic_version),"
        f" (SELECT max(required_level) FROM {schema}.schema_compatibility)"
    ).fetchone()
    state = SchemaState(*row) if row else SchemaState(None)
    if state.required_level is not None and state.required_level > COMPATIBILITY_LEVEL:
        raise SchemaTooNew(
            f"the schema {schema!r} is at revision {state.revision} and needs a pgqueue of "
            f"compatibility level {state.required_level}; this one has {COMPATIBILITY_LEVEL}: "
            "upgrade pgqueue here, or use another schema"
        )
    return state


def upgrade(conninfo: str, schema: str = DEFAULT_SCHEMA) -> SchemaState:
    """Bring the schema up to `HEAD`, in turn with whoever else tries; return what is then there.

    Raises `SchemaTooNew`, and `SchemaError` if another process holds the turn for two minutes.
    """
    import psycopg

    with psycopg.connect(conninfo, autocommit=True) as connection, _turn(connection, schema):
        state = current(connection, schema)
        if state.up_to_date:
            return state
        from alembic import command
        from sqlalchemy import create_engine
        from sqlalchemy.pool import StaticPool

        engine = create_engine(
            "postgresql+psycopg://", creator=lambda: connection, poolclass=StaticPool
        )
        connection.autocommit = False
        with engine.connect() as bind:
            command.upgrade(_config(schema, connection=bind), HEAD)
            bind.commit()
        connection.autocommit = True
        return current(connection, schema)


def sql(schema: str = DEFAULT_SCHEMA) -> str:
    """The whole installation as SQL text, for a database administrator to read and run."""
    from alembic import command

    output = io.StringIO()
    command.upgrade(_config(schema, output_buffer=output), HEAD, sql=True)
    return output.getvalue()


@contextmanager
def _turn(connection: psycopg.Connection[Any], schema: str) -> Iterator[None]:
    # Polled, not waited for: a session queued on the lock would hold a snapshot that CREATE INDEX
    # CONCURRENTLY of the one who has the turn would wait for.
    key = f"{schema}.migration"
    deadline = time.monotonic() + _TURN_TIMEOUT_S
    while True:
        row = connection.execute("SELECT pg_try_advisory_lock(hashtext(%s), 0)", [key]).fetchone()
        if row and row[0]:
            break
        if time.monotonic() > deadline:
            raise SchemaError(
                f"another process has been migrating the schema {schema!r} for two minutes"
            )
        time.sleep(_TURN_POLL_S)
    try:
        yield
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(hashtext(%s), 0)", [key])


def _config(schema: str, **attributes: Any) -> Config:
    from importlib.resources import files

    from alembic.config import Config

    check_schema_name(schema)
    # It reports each of its own plugins at INFO, in the log of whatever worker comes first.
    logging.getLogger("alembic.runtime.plugins").setLevel(logging.WARNING)
    config = Config(output_buffer=attributes.get("output_buffer"))
    config.set_main_option("script_location", str(files(__name__)).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes.update(attributes, schema=schema)
    return config
