# SPDX-License-Identifier: BSD-3-Clause
"""What may not end a worker: messages made to break it, a shutdown its pool cannot carry out."""

from __future__ import annotations

import signal

import psycopg
import pytest
from kombu import Connection

from tests.support.database import broker_url
from tests.support.ledger import Ledger
from tests.support.publisher import publishing_app
from tests.support.wait import wait_until
from tests.support.worker import EXTENDED, worker

ECHO = "extended.echo"
OUTCOMES = "tests.support.apps.outcomes"


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_messages_that_no_task_can_take(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # C-5
    broken = [
        {"id": ["no", "key"]},
        {"task": ["no", "key"]},
        {"task": {"no": "key"}},
        {"retries": "x"},
        {"retries": 10**30},
        {"timelimit": "x"},
        {"timelimit": ["a", "b"]},
        {"eta": "garbage"},
        {"expires": [1]},
    ]
    with publishing_app("extended", conninfo) as app, worker(EXTENDED, conninfo, pool=pool) as run:
        app.tasks[ECHO].delay("declares the queue")
        with Connection(broker_url(conninfo)) as client:
            producer = client.Producer()
            for number, headers in enumerate(broken):
                producer.publish(
                    [[], {}, {}],
                    routing_key="celery",
                    headers={"id": f"broken-{number}", "task": ECHO, **headers},
                )
        app.tasks[ECHO].delay("neighbour")
        ledger.wait_finished(2)
        letters = "SELECT failure_code, count(*) FROM pgqueue.job_dead_letter GROUP BY 1"
        wait_until(
            lambda: connection.execute(letters).fetchall() == [("malformed", len(broken))],
            message=lambda: f"{connection.execute(letters).fetchall()}",
        )
        assert run.stop() == 0


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_cold_shutdown_of_a_pool_that_cannot_kill(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # S-2, FIELD 13
    with publishing_app("extended", conninfo) as app, worker(EXTENDED, conninfo, pool=pool) as run:
        for _ in range(4):
            app.tasks["extended.nap_late"].delay(1)
        ledger.wait(lambda runs: runs, message="a running task")
        run.send(signal.SIGQUIT)
        run.wait()
        assert "Traceback" not in run.output()
    started = ledger.runs()
    assert {each.outcome for each in started} == {"SUCCESS"}
    kept = connection.execute("SELECT status FROM pgqueue.job_queue").fetchall()
    assert kept == [("queued",)] * (4 - len(started))
    assert connection.execute("SELECT count(*) FROM pgqueue.job_dead_letter").fetchone() == (0,)


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_task_that_interrupts_its_worker(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # C-5, FIELD 14
    with (
        Connection(broker_url(conninfo)) as client,
        worker(OUTCOMES, conninfo, pool=pool) as run,
    ):
        producer = client.Producer()
        for name in ("interrupts", "interrupts_late", "fine"):
            headers = {"id": name, "task": name}
            producer.publish([[], {}, {}], routing_key="celery", headers=headers)
        letters = "SELECT job_kind, failure_code FROM pgqueue.job_dead_letter ORDER BY 1"
        expected = [("interrupts", "worker_lost"), ("interrupts_late", "worker_lost")]
        wait_until(lambda: connection.execute(letters).fetchall() == expected)
        ledger.wait(lambda runs: any(r.name == "fine" and r.outcome for r in runs))
        assert run.stop() == 0
        assert "Unrecoverable" not in run.output()
