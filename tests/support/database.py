# SPDX-License-Identifier: BSD-3-Clause
"""The server the tests run on, databases on it, and how to name them."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Iterator
from urllib.parse import quote, urlencode

import psycopg
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from .wait import wait_until

_numbers = itertools.count(1)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """Yield the libpq connection string of an admin database.

    It is the server that ``PGQUEUE_TEST_DSN`` names, else an embedded one in a new directory.
    """
    named = os.environ.get("PGQUEUE_TEST_DSN")
    if named:
        yield make_conninfo(named)
        return
    from kombu_pgqueue import embedded

    # Short and below /tmp: the socket's name must fit, and root's server runs as another user.
    directory = tempfile.mkdtemp(prefix="pgqueue-test-", dir="/tmp")
    path = os.path.join(directory, "pg")
    try:
        yield embedded.acquire(path)
    finally:
        embedded.release(path)
        running = os.path.join(path, "data", "postmaster.pid")
        wait_until(lambda: not os.path.exists(running), 30, "the embedded server stops")
        shutil.rmtree(directory, ignore_errors=True)


def admin(conninfo: str) -> psycopg.Connection:
    return psycopg.connect(conninfo, autocommit=True)


@contextlib.contextmanager
def new_database(server: str, *, template: str | None = None) -> Iterator[str]:
    """Create a UTF-8 database, a copy of *template* if given; yield its conninfo; drop it."""
    name = f"pgqueue_test_{os.getpid()}_{next(_numbers)}"
    created = sql.SQL("CREATE DATABASE {} TEMPLATE {} ENCODING 'UTF8'").format(
        sql.Identifier(name), sql.Identifier(template or "template0")
    )
    with admin(server) as connection:
        connection.execute(created)
        try:
            yield make_conninfo(server, dbname=name)
        finally:
            drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)").format(sql.Identifier(name))
            connection.execute(drop)


def database_name(conninfo: str) -> str:
    return str(conninfo_to_dict(conninfo)["dbname"])


def broker_url(conninfo: str, **options: object) -> str:
    """Return the ``pgqueue://`` URL of a libpq connection string, with *options* in its query."""
    words = {key: str(value) for key, value in conninfo_to_dict(conninfo).items()}
    user, password = words.pop("user", ""), words.pop("password", "")
    host, port, dbname = words.pop("host", ""), words.pop("port", ""), words.pop("dbname", "")
    query = {**words, **{key: str(value) for key, value in options.items()}}
    if host.startswith("/") or "," in host or ":" in host:
        query = {"host": host, **({"port": port} if port else {}), **query}
        host = port = ""
    login = quote(user, safe="") + (f":{quote(password, safe='')}" if password else "")
    place = f"{login}@{host}" if login and host else host
    if login and not host:
        query = {"user": user, **({"password": password} if password else {}), **query}
    place += f":{port}" if port else ""
    tail = f"?{urlencode(query, quote_via=quote)}" if query else ""
    return f"pgqueue://{place}/{quote(dbname, safe='')}{tail}"
