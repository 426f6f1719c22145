# SPDX-License-Identifier: BSD-3-Clause
"""Installing the schema: by migration or by hand, by many at once, old and new."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg import sql as psycopg_sql
from sqlalchemy import create_engine
from sqlalchemy.pool import StaticPool

from kombu_pgqueue import connect as connecting
from kombu_pgqueue import migrations, sql, tables
from kombu_pgqueue.connect import connect
from kombu_pgqueue.errors import (
    ConfigurationError,
    SchemaMissing,
    SchemaTooNew,
    ServerUnsupported,
)
from kombu_pgqueue.options import Options
from kombu_pgqueue.store import JobStore
from tests.support import database as databases
from tests.support.jobs import claim, publication, rows


@pytest.fixture(autouse=True)
def as_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process looks at the schema of a database once."""
    monkeypatch.setattr(connecting, "_checked", set())


@pytest.fixture
def admin(fresh_database: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(fresh_database, autocommit=True) as connection:
        yield connection


def described(connection: psycopg.Connection[Any], schema: str) -> dict[str, list[Any]]:
    """Everything in a schema that a migration makes, in the server's own words."""
    words = {
        "columns": "SELECT table_name, column_name, ordinal_position, data_type, is_nullable,"
        " column_default, collation_name, is_identity, identity_generation"
        " FROM information_schema.columns WHERE table_schema = %(s)s ORDER BY 1, 3",
        "indexes": "SELECT indexname, indexdef FROM pg_indexes WHERE schemaname = %(s)s ORDER BY 1",
        "constraints": "SELECT conrelid::regclass::text, conname, pg_get_constraintdef(oid)"
        " FROM pg_constraint WHERE connamespace = %(s)s::regnamespace ORDER BY 1, 2",
        "relations": "SELECT relname, relkind, relpersistence, reloptions FROM pg_class"
        " WHERE relnamespace = %(s)s::regnamespace ORDER BY 1",
        "inherits": "SELECT inhrelid::regclass::text, inhparent::regclass::text FROM pg_inherits"
        " JOIN pg_class c ON c.oid = inhrelid WHERE c.relnamespace = %(s)s::regnamespace",
        "functions": "SELECT proname, pg_get_functiondef(oid) FROM pg_proc"
        " WHERE pronamespace = %(s)s::regnamespace ORDER BY 1, 2",
        "triggers": "SELECT tgname, pg_get_triggerdef(t.oid) FROM pg_trigger t JOIN pg_class c"
        " ON c.oid = tgrelid WHERE c.relnamespace = %(s)s::regnamespace AND NOT tgisinternal"
        " ORDER BY 1, 2",
        "views": "SELECT viewname, definition FROM pg_views WHERE schemaname = %(s)s ORDER BY 1",
        "version": f"SELECT version_num FROM {schema}.alembic_version",
        "level": f"SELECT required_level FROM {schema}.schema_compatibility",
        "config": f"SELECT key, value::text FROM {schema}.job_config ORDER BY 1",
    }
    return {
        name: connection.execute(query, {"s": schema} if "%(s)s" in query else None).fetchall()
        for name, query in words.items()
    }


@pytest.mark.parametrize("schema", ["pgqueue", "team_a"])
def test_the_migrations_make_what_the_metadata_says(fresh_database: str, schema: str) -> None:
    # S-22
    migrations.upgrade(fresh_database, schema)
    metadata = tables.metadata if schema == "pgqueue" else tables.metadata_in(schema)

    def ours(name: str | None, kind: str, parents: Any) -> bool:
        return kind != "schema" or name == schema

    # A user who is named like the schema has it for a default, which Alembic would then not name.
    with psycopg.connect(fresh_database, options="-c search_path=public") as connection:
        engine = create_engine(
            "postgresql+psycopg://", creator=lambda: connection, poolclass=StaticPool
        )
        with engine.connect() as bind:
            context = MigrationContext.configure(
                bind,
                opts={
                    "include_schemas": True,
                    "include_name": ours,
                    "compare_type": True,
                    "version_table_schema": schema,
                },
            )
            difference = [
                each
                for each in compare_metadata(context, metadata)
                # Foreign keys and identities are the migrations' own affair.
                if each[0] not in ("remove_fk",)
            ]
    assert difference == []


@pytest.mark.parametrize("schema", ["pgqueue", "team_a"])
def test_the_printed_sql_makes_the_same(
    fresh_database: str, admin: psycopg.Connection[Any], server: str, schema: str
) -> None:
    # S-22: printable as SQL for a DBA, and without any client that interprets it
    migrations.upgrade(fresh_database, schema)
    with databases.new_database(server) as other:
        with psycopg.connect(other, autocommit=True) as by_hand:
            by_hand.execute(migrations.sql(schema).encode())
            assert described(by_hand, schema) == described(admin, schema)
        state = migrations.upgrade(other, schema)
        assert (state.revision, state.up_to_date) == (migrations.HEAD, True)
    if schema != "pgqueue":
        assert rows(admin, "SELECT 1 FROM pg_namespace WHERE nspname = 'pgqueue'") == []


def test_functions_can_be_applied_again(
    fresh_database: str, admin: psycopg.Connection[Any]
) -> None:
    # S-22: an upgrade replaces them
    migrations.upgrade(fresh_database)
    before = described(admin, "pgqueue")
    admin.execute(sql.functions("pgqueue").encode())
    assert described(admin, "pgqueue") == before


def test_the_head_and_the_functions_of_the_newest_revision() -> None:
    # S-22: a changed function file needs a new revision, or databases in the field would not get it
    scripts = ScriptDirectory.from_config(migrations._config("pgqueue"))
    assert scripts.get_current_head() == migrations.HEAD
    newest = scripts.get_revision(migrations.HEAD)
    assert newest is not None
    assert newest.module.functions_digest == sql.functions_digest()


JOIN = """
import sys
from kombu_pgqueue.connect import connect
from kombu_pgqueue.options import Options
sys.stdin.readline()
with connect(Options(conninfo=sys.argv[1]), role="publish") as connection:
    print(connection.execute("SELECT count(*) FROM pgqueue.job_queue").fetchone()[0])
"""


def test_twenty_processes_start_at_once(
    fresh_database: str, admin: psycopg.Connection[Any]
) -> None:
    # S-22: on an empty database; one schema, no error
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOIN, fresh_database],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=root,
        )
        for _ in range(20)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    outcomes = [process.communicate(timeout=90) for process in processes]
    assert [(out, err) for out, err in outcomes if out != "0\n"] == []
    assert rows(admin, "SELECT version_num FROM pgqueue.alembic_version") == [
        {"version_num": migrations.HEAD}
    ]


def test_a_newer_incompatible_schema(fresh_database: str, admin: psycopg.Connection[Any]) -> None:
    # S-22
    migrations.upgrade(fresh_database)
    admin.execute("UPDATE pgqueue.alembic_version SET version_num = '0099'")
    admin.execute("UPDATE pgqueue.schema_compatibility SET required_level = 7")
    with pytest.raises(SchemaTooNew, match=r"revision 0099 .*level 7.*upgrade pgqueue"):
        connect(Options(conninfo=fresh_database), role="consume")
    with pytest.raises(SchemaTooNew):
        migrations.upgrade(fresh_database)


def test_a_newer_compatible_schema(fresh_database: str, admin: psycopg.Connection[Any]) -> None:
    # S-22
    migrations.upgrade(fresh_database)
    admin.execute("UPDATE pgqueue.alembic_version SET version_num = '0099'")
    with connect(Options(conninfo=fresh_database), role="consume") as connection:
        store = JobStore(connection)
        store.enqueue(publication())
        assert len(claim(store)) == 1
    assert migrations.upgrade(fresh_database).revision == "0099"


def test_auto_migrate_off(fresh_database: str, admin: psycopg.Connection[Any]) -> None:
    # S-22
    options = Options(conninfo=fresh_database, auto_migrate=False)
    with pytest.raises(SchemaMissing, match="celery -A proj pgqueue migrate"):
        connect(options, role="consume")
    assert rows(admin, "SELECT 1 FROM pg_namespace WHERE nspname = 'pgqueue'") == []
    migrations.upgrade(fresh_database)
    connect(options, role="consume").close()


def test_two_schemas_side_by_side(fresh_database: str) -> None:
    # S-21: separate teams
    stores = []
    for schema in ("team_a", "team_b"):
        options = Options(conninfo=fresh_database, schema=schema)
        stores.append(JobStore(connect(options, role="admin"), schema=schema))
    a, b = stores
    a.enqueue(publication())
    a.raise_wake_flag(["q"])
    assert not b.enqueue(publication()).waiting
    assert (a.queue_size("q"), b.queue_size("q")) == (1, 1)
    a.queue_purge("q")
    assert (a.queue_size("q"), b.queue_size("q")) == (0, 1)
    assert a.wake_channel != b.wake_channel
    for store in stores:
        store.connection.close()


@pytest.mark.parametrize("schema", ["Team", "1st", "pg_mine", "a b", 'a"b', "", "x" * 49, "a.b"])
def test_schema_names(fresh_database: str, schema: str) -> None:
    # S-22: it stands unquoted in SQL
    with pytest.raises(ConfigurationError):
        connect(Options(conninfo=fresh_database, schema=schema), role="admin")


def test_a_database_that_is_not_utf8(server: str) -> None:
    # Section 3 of the contract
    name = f"pgqueue_test_ascii_{os.getpid()}"
    identifier = psycopg_sql.Identifier(name)
    with psycopg.connect(server, autocommit=True) as connection:
        provider = "LOCALE_PROVIDER libc" if connection.info.server_version >= 150000 else ""
        connection.execute(
            psycopg_sql.SQL(
                "CREATE DATABASE {} ENCODING 'SQL_ASCII' TEMPLATE template0"
                f" LC_COLLATE 'C' LC_CTYPE 'C' {provider}"
            ).format(identifier)
        )
        try:
            conninfo = psycopg.conninfo.make_conninfo(server, dbname=name)
            with pytest.raises(ServerUnsupported, match=r"SQL_ASCII.*UTF8"):
                connect(Options(conninfo=conninfo), role="admin")
        finally:
            connection.execute(psycopg_sql.SQL("DROP DATABASE {} WITH (FORCE)").format(identifier))


def test_a_failed_migration_leaves_nothing_and_says_why(
    fresh_database: str, admin: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # S-22: one transaction
    monkeypatch.setattr(sql, "functions", lambda schema: "SELECT 1 / 0")
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrations.upgrade(fresh_database)
    assert rows(admin, "SELECT 1 FROM pg_namespace WHERE nspname = 'pgqueue'") == []
    monkeypatch.undo()
    assert migrations.upgrade(fresh_database).up_to_date
