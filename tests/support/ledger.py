# SPDX-License-Identifier: BSD-3-Clause
"""What really ran, kept apart from the code under test.

The sample apps write one row when a task starts and complete it when the task ends, on connections
of their own. Tests compare this ledger with what the queue says.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import psycopg
from psycopg.rows import class_row

from .wait import wait_until

CREATE = """
CREATE TABLE IF NOT EXISTS run_ledger (
    run_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id     text NOT NULL,
    name        text NOT NULL,
    args_hash   text NOT NULL,
    pid         integer NOT NULL,
    retries     integer NOT NULL,
    redelivered boolean NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    finished_at timestamptz,
    outcome     text
)
"""
_START = """
INSERT INTO run_ledger (task_id, name, args_hash, pid, retries, redelivered)
VALUES (%s, %s, %s, %s, %s, %s) RETURNING run_id
"""
_FINISH = """
UPDATE run_ledger SET finished_at = clock_timestamp(), outcome = %s WHERE run_id = %s
"""


def args_hash(args: Any, kwargs: Any) -> str:
    """Hash arguments by value; what JSON cannot write goes in by its repr."""
    text = json.dumps([list(args), kwargs], sort_keys=True, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@dataclass(frozen=True)
class Run:
    """One start of a task; `outcome` is a Celery state, None while it runs or if it was killed."""

    run_id: int
    task_id: str
    name: str
    args_hash: str
    pid: int
    retries: int
    redelivered: bool
    started_at: datetime
    finished_at: datetime | None
    outcome: str | None


class Ledger:
    """The test's view of the runs."""

    def __init__(self, conninfo: str) -> None:
        self.connection = psycopg.connect(conninfo, autocommit=True)
        self.connection.execute(CREATE)

    def close(self) -> None:
        self.connection.close()

    def runs(self, task_id: str | None = None) -> list[Run]:
        """Return all runs, or those of one task, in the order of their starts."""
        with self.connection.cursor(row_factory=class_row(Run)) as cursor:
            cursor.execute(
                "SELECT * FROM run_ledger WHERE %s::text IS NULL OR task_id = %s ORDER BY run_id",
                (task_id, task_id),
            )
            return cursor.fetchall()

    def wait(
        self,
        predicate: Callable[[list[Run]], Any],
        timeout: float = 20.0,
        message: str = "the runs",
        task_id: str | None = None,
    ) -> list[Run]:
        """Wait until *predicate* holds for the runs; return them."""
        wait_until(lambda: predicate(self.runs(task_id)), timeout, message, interval=0.05)
        return self.runs(task_id)

    def wait_finished(self, count: int, timeout: float = 20.0) -> list[Run]:
        """Wait until *count* runs have ended, whatever their outcome."""
        return self.wait(
            lambda runs: sum(run.finished_at is not None for run in runs) >= count,
            timeout,
            f"{count} finished runs",
        )


class Recorder:
    """The app's side: one connection per process and thread, made when it is first needed.

    Keyed by the process id as well, so a forked child never writes on its parent's connection.
    """

    def __init__(self, conninfo: str) -> None:
        self._conninfo = conninfo
        self._local = threading.local()

    def start(self, task: Any, args: Any, kwargs: Any) -> int:
        request = task.request
        redelivered = bool((request.delivery_info or {}).get("redelivered"))
        row = self._connection().execute(
            _START,
            (
                request.id,
                task.name,
                args_hash(args, kwargs),
                os.getpid(),
                request.retries or 0,
                redelivered,
            ),
        )
        return int(row.fetchone()[0])  # type: ignore[index]

    def finish(self, run_id: int, outcome: str) -> None:
        self._connection().execute(_FINISH, (outcome, run_id))

    def _connection(self) -> psycopg.Connection:
        known = getattr(self._local, "known", None)
        if known is None or known[0] != os.getpid():
            known = (os.getpid(), psycopg.connect(self._conninfo, autocommit=True))
            self._local.known = known
        return known[1]
