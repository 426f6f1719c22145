# SPDX-License-Identifier: BSD-3-Clause
"""The sample apps on each pool, with and without the extension: a task runs once, its row goes."""

from __future__ import annotations

import psycopg
import pytest

from tests.support.ledger import Ledger, args_hash
from tests.support.publisher import publishing_app
from tests.support.wait import wait_until
from tests.support.worker import EXTENDED, PLAIN, worker


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
@pytest.mark.parametrize("module", [PLAIN, EXTENDED])
def test_task_runs_once(
    module: str, pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:
    name = module.rsplit(".", 1)[1]
    with publishing_app(name, conninfo) as app, worker(module, conninfo, pool=pool):
        early = app.tasks[f"{name}.echo"].delay("früh", n=1)
        late = app.tasks[f"{name}.echo_late"].delay("spät", n=2)
        ledger.wait_finished(2)

        def rows_left() -> int:
            row = connection.execute("SELECT count(*) FROM pgqueue.job_queue").fetchone()
            return int(row[0]) if row else -1

        wait_until(lambda: rows_left() == 0, 10, "the rows of ended tasks are gone")
        runs = {run.task_id: run for run in ledger.runs()}
    assert set(runs) == {early.id, late.id}
    assert len(ledger.runs()) == 2
    assert {run.outcome for run in runs.values()} == {"SUCCESS"}
    assert runs[early.id].args_hash == args_hash(("früh",), {"n": 1})
