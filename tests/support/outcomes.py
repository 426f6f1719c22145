# SPDX-License-Identifier: BSD-3-Clause
"""The app of `tests.support.apps.outcomes` as a publisher, and what its tasks left behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import psycopg
from celery import Celery
from psycopg.rows import dict_row

from .apps.common import make_app
from .apps.outcomes import set_up
from .database import broker_url
from .wait import wait_until

MODULE = "tests.support.apps.outcomes"


@contextlib.contextmanager
def publishing(conninfo: str) -> Iterator[Celery]:
    """Yield the app on the database *conninfo*, its queues declared."""
    app = set_up(make_app("outcomes", broker_url(conninfo)))
    try:
        with app.connection_for_write() as connection:
            for queue in app.conf.task_queues:
                queue(connection.default_channel).declare()
        yield app
    finally:
        app.close()


class Database:
    """The tables, looked at from outside."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def rows(self, query: str, *args: Any) -> list[dict[str, Any]]:
        with self.connection.cursor(row_factory=dict_row) as cursor:
            return cursor.execute(query, args).fetchall()

    def live(self) -> list[dict[str, Any]]:
        return self.rows("SELECT * FROM pgqueue.job_queue WHERE job_kind <> '' ORDER BY seq")

    def dead(self) -> list[dict[str, Any]]:
        return self.rows(
            "SELECT *, job_snapshot ->> 'task_id' AS task_id FROM pgqueue.job_dead_letter"
            " ORDER BY dead_letter_id"
        )

    def inserted(self) -> int:
        """How many job rows were ever inserted."""
        (row,) = self.rows(
            "SELECT coalesce(max(last_value), 0) AS n FROM pg_sequences"
            " WHERE schemaname = 'pgqueue' AND sequencename LIKE 'job_queue%%'"
        )
        return int(row["n"])

    def drained(self, timeout: float = 30.0) -> list[dict[str, Any]]:
        """Wait until no job is live; return the dead letters."""
        wait_until(lambda: not self.live(), timeout, lambda: f"no live jobs: {self.live()}")
        return self.dead()
