# SPDX-License-Identifier: BSD-3-Clause
"""`celery -A proj pgqueue`: the queue's schema and state."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import click

from celery_ext.broker import options_of
from celery_ext.cli.common import clear_errors, format_option, to_json
from celery_ext.cli.table import colours, render


@click.group()
def pgqueue() -> None:
    """The PostgreSQL queue behind the app: its schema, its state.

    Exit status: 0 done; 2 settings, broker or database.
    """


@pgqueue.command()
@click.option("--sql", "as_sql", is_flag=True, help="Print the SQL instead of running it.")
@click.pass_context
@clear_errors
def migrate(ctx: click.Context, as_sql: bool) -> None:
    """Install or upgrade the schema. Safe to run any number of times, from any number of hosts."""
    from kombu_pgqueue import migrations
    from kombu_pgqueue.connect import connect

    options = options_of(ctx.obj.app)
    if as_sql:
        click.echo(migrations.sql(options.schema))
        return
    # Opening a session that may migrate checks the server first and then waits its turn.
    connection = connect(
        replace(options, auto_migrate=True), role="admin", application_name="pgqueue migrate"
    )
    with connection:
        state = migrations.current(connection, options.schema)
    click.echo(f"schema {options.schema} is at revision {state.revision}")


@pgqueue.command()
@format_option
@click.pass_context
@clear_errors
def status(ctx: click.Context, form: str) -> None:
    """Server, schema revision, queues and dead letters. Changes nothing."""
    found = _status(ctx.obj.app)
    if form == "json":
        click.echo(to_json(found))
        return
    queues = found.pop("queues")
    letters = found.pop("dead_letters")
    rows = [(name.replace("_", " "), value) for name, value in found.items()]
    rows.append(("open dead letters", letters.get("open_count_job")))
    click.echo(render(("pgqueue", ""), rows, bold=colours(ctx)))
    if queues:
        head = [name.replace("_", " ") for name in queues[0]]
        click.echo("\n" + render(head, [list(row.values()) for row in queues], bold=colours(ctx)))


def _status(app: Any) -> dict[str, Any]:
    from kombu_pgqueue import migrations
    from kombu_pgqueue.connect import connect
    from kombu_pgqueue.errors import SchemaMissing
    from kombu_pgqueue.store import JobStore

    given = options_of(app)
    options = replace(given, auto_migrate=False)
    try:
        connection = connect(options, role="admin", application_name="pgqueue status")
    except SchemaMissing as exc:
        if not given.auto_migrate:
            raise
        raise SchemaMissing(
            f"the schema {options.schema!r} is not installed or not up to date: the first worker "
            "or publisher does it, or `celery -A proj pgqueue migrate`"
        ) from exc
    with connection:
        store = JobStore(connection, schema=options.schema)
        state = migrations.current(connection, options.schema)
        version = connection.info.server_version
        return {
            "server_version": f"{version // 10000}.{version % 10000}",
            "database": connection.info.dbname,
            "schema": options.schema,
            "revision": state.revision,
            "newest_revision": migrations.HEAD,
            "queues": store.queue_health(),
            "dead_letters": store.dead_letter_health(),
        }
