# SPDX-License-Identifier: BSD-3-Clause
"""One database for all tests of the store, emptied before each.

Creating one costs more than most of these tests.
"""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from tests.support import database as databases

_EMPTY = """
    DELETE FROM pgqueue.job_queue;
    DELETE FROM pgqueue.job_dead_letter;
    DELETE FROM pgqueue.runtime_lease;
    DELETE FROM pgqueue.queue_priority;
    DELETE FROM pgqueue.binding;
    DELETE FROM pgqueue.exchange;
    DELETE FROM pgqueue.queue;
    DELETE FROM pgqueue.job_config;
    INSERT INTO pgqueue.job_config SELECT * FROM public.first_config;
    DELETE FROM pgqueue.job_event;
"""


@pytest.fixture(scope="session")
def shared_database(server: str, template_database: str) -> Iterator[str]:
    with databases.new_database(server, template=template_database) as conninfo:
        with psycopg.connect(conninfo) as connection:
            connection.execute(
                "CREATE TABLE public.first_config AS SELECT * FROM pgqueue.job_config"
            )
        yield conninfo


@pytest.fixture
def conninfo(shared_database: str) -> str:
    """Connection string (libpq) of the shared database, empty as after its installation."""
    with psycopg.connect(shared_database, autocommit=True) as connection:
        connection.execute(_EMPTY)
    return shared_database
