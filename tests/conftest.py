# SPDX-License-Identifier: BSD-3-Clause
"""Fixtures: a server for the session, a database for each test.

Tests run on an embedded PostgreSQL unless ``PGQUEUE_TEST_DSN`` names another server, which must let
the user create databases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import psycopg
import pytest

from tests.support import database as databases
from tests.support.ledger import Ledger

if TYPE_CHECKING:
    from kombu_pgqueue.store import JobStore


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """Connection string (libpq) of an admin database of the server."""
    with databases.server() as conninfo:
        yield conninfo


@pytest.fixture(scope="session")
def template_database(server: str) -> Iterator[str]:
    """A database with the schema, to copy from; nobody may be connected to it."""
    from kombu_pgqueue.connect import connect
    from kombu_pgqueue.options import parse_url

    with databases.new_database(server) as conninfo:
        options = parse_url(databases.broker_url(conninfo), {})
        connect(options, role="admin", application_name="pgqueue tests").close()
        yield databases.database_name(conninfo)


@pytest.fixture
def conninfo(server: str, template_database: str) -> Iterator[str]:
    """Connection string (libpq) of this test's own database, with the schema in it."""
    with databases.new_database(server, template=template_database) as conninfo:
        yield conninfo


@pytest.fixture
def database(conninfo: str) -> str:
    """Name of this test's own database."""
    return databases.database_name(conninfo)


@pytest.fixture
def fresh_database(server: str) -> Iterator[str]:
    """Connection string (libpq) of this test's own empty database, without the schema."""
    with databases.new_database(server) as conninfo:
        yield conninfo


@pytest.fixture
def dsn(conninfo: str) -> str:
    """``pgqueue://`` URL of this test's own database."""
    return databases.broker_url(conninfo)


@pytest.fixture
def connection(conninfo: str) -> Iterator[psycopg.Connection]:
    """Autocommit connection to this test's own database."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        yield connection


@pytest.fixture
def store(connection: psycopg.Connection) -> JobStore:
    """Store on `connection`."""
    from kombu_pgqueue.store import JobStore

    return JobStore(connection)


@pytest.fixture
def ledger(conninfo: str) -> Iterator[Ledger]:
    """What the sample apps' tasks really did, in this test's own database."""
    ledger = Ledger(conninfo)
    try:
        yield ledger
    finally:
        ledger.close()
