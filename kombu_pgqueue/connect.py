# SPDX-License-Identifier: BSD-3-Clause
"""Opening database sessions: what every session of this library is set to, and forks."""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING, Any, Literal

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from kombu_pgqueue import migrations
from kombu_pgqueue.errors import SchemaMissing, ServerUnsupported
from kombu_pgqueue.store.errors import store_errors

if TYPE_CHECKING:
    from kombu_pgqueue.options import Options

Role = Literal["publish", "consume", "admin"]

#: The oldest server: gen_random_uuid() in core, and the planner that incremental sorts need.
OLDEST_SERVER = 130000

# A peer that vanished without a word is noticed within half a lease: keepalives for a session
# that listens, tcp_user_timeout for one that waits for an answer. The URL has the last word.
_NETWORK: dict[str, str] = {
    "keepalives": "1",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "25000",
}

_SETTINGS: dict[str, str] = {
    "default_transaction_isolation": "read committed",
    "TimeZone": "UTC",
    "client_encoding": "UTF8",
    "lock_timeout": "10s",
    "statement_timeout": "60s",
    "idle_in_transaction_session_timeout": "60s",
}

_checked: set[tuple[str, str]] = set()
_checking = threading.Lock()
_open: weakref.WeakSet[psycopg.Connection[Any]] = weakref.WeakSet()


def conninfo_of(options: Options) -> str:
    """The libpq connection string, starting the embedded server where the URL asks for one."""
    if options.embedded_path is None:
        return options.conninfo
    from kombu_pgqueue import embedded

    return embedded.acquire(options.embedded_path)


def connect(
    options: Options, *, role: Role, application_name: str | None = None
) -> psycopg.Connection[Any]:
    """Open an autocommit session.

    The first of a process looks at the server's version and encoding and at the schema, and
    installs or upgrades that if `auto_migrate` allows. Claims and successes of a "consume" session
    commit asynchronously: a crash of the server, not of a worker, may then cost a redelivery.

    Raises `StoreUnavailable`, `ServerUnsupported`, `SchemaMissing`, `SchemaTooNew`.
    """
    conninfo = conninfo_of(options)
    parameters: dict[str, Any] = _NETWORK | conninfo_to_dict(conninfo)
    parameters.setdefault("application_name", application_name or f"pgqueue {role}")
    parameters.setdefault("connect_timeout", max(int(options.connect_timeout), 2))
    settings = dict(_SETTINGS)
    if role == "consume":
        settings["synchronous_commit"] = "off"
    elif role == "publish" and options.publish_synchronous_commit is not None:
        settings["synchronous_commit"] = options.publish_synchronous_commit
    with store_errors():
        connection: psycopg.Connection[Any] = psycopg.connect(
            make_conninfo(**parameters),
            autocommit=True,
            prepare_threshold=0 if options.prepare else None,
        )
        try:
            _check_server(connection)
            connection.execute(
                "SELECT " + ", ".join(["set_config(%s, %s, false)"] * len(settings)),
                [part for setting in settings.items() for part in setting],
            )
            _check_schema(connection, conninfo, options)
        except BaseException:
            connection.close()
            raise
    _open.add(connection)
    return connection


def _check_server(connection: psycopg.Connection[Any]) -> None:
    version = connection.info.server_version
    if version < OLDEST_SERVER:
        raise ServerUnsupported(
            f"PostgreSQL {version // 10000} is too old: pgqueue needs version "
            f"{OLDEST_SERVER // 10000} or newer"
        )
    encoding = connection.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise ServerUnsupported(
            f"the database {connection.info.dbname!r} is encoded in {encoding}: pgqueue needs UTF8"
        )


def _check_schema(connection: psycopg.Connection[Any], conninfo: str, options: Options) -> None:
    key = (conninfo, options.schema)
    if key in _checked:
        return
    with _checking:
        if not migrations.current(connection, options.schema).up_to_date:
            if not options.auto_migrate:
                raise SchemaMissing(
                    f"the schema {options.schema!r} is not installed or not up to date, and "
                    "auto_migrate is off: run `celery -A proj pgqueue migrate`"
                )
            migrations.upgrade(conninfo, options.schema)
        _checked.add(key)


def _close_inherited() -> None:
    """In a forked child: let go of the parent's sessions without a word to the server.

    libpq's own close would say goodbye on the socket that both share and end the parent's session;
    left open, the socket keeps a dead parent's session, and its sign of life, alive.
    """
    global _checking
    _checking = threading.Lock()
    for connection in list(_open):
        if not connection.closed:
            os.close(connection.pgconn.socket)
    _open.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_inherited)
