# SPDX-License-Identifier: BSD-3-Clause
"""An unchanged Celery app on a `pgqueue://` URL: real workers, killed, cut and shut down."""

from __future__ import annotations

import signal
import time
from collections import Counter
from typing import Any

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from tests.support.ledger import Ledger
from tests.support.publisher import publishing_app
from tests.support.wait import wait_until
from tests.support.worker import PLAIN, celery_command, worker

POOLS = ("prefork", "solo", "threads")


def jobs(connection: psycopg.Connection, where: str = "true") -> int:
    return connection.execute(f"SELECT count(*) FROM pgqueue.job_queue WHERE {where}").fetchone()[0]


def cut(connection: psycopg.Connection) -> None:
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name LIKE 'pgqueue %'"
    )


def task(app: Any, name: str) -> Any:
    return app.tasks[f"plain.{name}"]


@pytest.mark.parametrize("pool", POOLS)
def test_every_task_ends_once(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # T-2, T-8
    with publishing_app("plain", conninfo) as app, worker(PLAIN, conninfo, pool=pool) as running:
        for number in range(30):
            task(app, "echo").delay(number, text="é\0")
            task(app, "echo_late").apply_async((number,), priority=number % 10)
        task(app, "echo").apply_async(("soon",), countdown=1)
        runs = ledger.wait_finished(61)
        assert set(Counter(run.task_id for run in runs).values()) == {1}
        wait_until(lambda: jobs(connection) == 0)
        assert running.stop() == 0
        assert "Traceback" not in running.output()
    assert connection.execute("SELECT count(*) FROM pgqueue.runtime_lease").fetchone() == (0,)


def test_two_prefork_workers_share_the_work(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:
    with (
        publishing_app("plain", conninfo) as app,
        worker(PLAIN, conninfo),
        worker(PLAIN, conninfo),
    ):
        for number in range(1000):
            task(app, "echo" if number % 2 else "echo_late").delay(number)
        runs = ledger.wait_finished(1000, 120)
        assert set(Counter(run.task_id for run in runs).values()) == {1}
        assert len({run.pid for run in runs}) == 4
        wait_until(lambda: jobs(connection) == 0)


@pytest.mark.chaos
@pytest.mark.parametrize("pool", POOLS)
def test_sessions_cut_in_mid_task(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # T-10
    with publishing_app("plain", conninfo) as app, worker(PLAIN, conninfo, pool=pool) as running:
        task(app, "nap_late").delay(2)
        ledger.wait(lambda runs: bool(runs))
        for number in range(5):
            cut(connection)
            task(app, "echo").delay(number)
            time.sleep(0.3)  # five times in about two seconds, in the middle of the nap
        task(app, "echo_late").delay("after")
        runs = ledger.wait_finished(7)
        assert len(runs) == 7
        wait_until(lambda: jobs(connection) == 0)
        assert running.stop() == 0


@pytest.mark.chaos
def test_a_killed_worker_is_replaced_within_ten_seconds(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger, store: JobStore
) -> None:  # T-14
    store.config_set("queue.lease.ttl_seconds", 5)
    with publishing_app("plain", conninfo) as app, worker(PLAIN, conninfo) as killed:
        task(app, "nap_late").delay(3)
        for number in range(5):
            task(app, "nap_late").delay(0.1 * number)
        ledger.wait(lambda runs: bool(runs))
        with worker(PLAIN, conninfo):
            killed.kill(signal.SIGKILL)
            killed.process.wait()
            died = time.monotonic()
            held = f"lease_holder LIKE '%:{killed.pid} %'"
            wait_until(lambda: jobs(connection, held) == 0)
            assert time.monotonic() - died < 10
            wait_until(lambda: jobs(connection) == 0, 30)
        finished = Counter(run.task_id for run in ledger.runs() if run.finished_at)
        assert len(finished) == 6


@pytest.mark.parametrize("pool", POOLS)
def test_a_warm_shutdown_ends_the_running_task_and_gives_back_the_rest(
    pool: str, conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:
    with publishing_app("plain", conninfo) as app:
        with worker(PLAIN, conninfo, pool=pool, concurrency=1) as running:
            task(app, "nap_late").delay(1)
            ledger.wait(lambda runs: bool(runs))
            for number in range(10):
                task(app, "nap_late").delay(0.01 * number)
            assert running.stop() == 0
        done = [run.task_id for run in ledger.runs() if run.finished_at]
        assert len(done) == len(ledger.runs())
        assert jobs(connection) == 11 - len(done)
        assert jobs(connection, "status = 'leased'") == 0
        assert jobs(connection, "attempts + deliveries > 0") == 0
        with worker(PLAIN, conninfo, pool=pool, concurrency=1):
            runs = ledger.wait_finished(11)
            assert set(Counter(run.task_id for run in runs).values()) == {1}
            wait_until(lambda: jobs(connection) == 0)


def test_children_that_come_and_go_leave_the_sessions_alone(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # T-8
    with (
        publishing_app("plain", conninfo) as app,
        worker(PLAIN, conninfo, args=["--max-tasks-per-child", "3"]) as running,
    ):
        for number in range(40):
            task(app, "echo_late").delay(number)
        runs = ledger.wait_finished(40, 60)
        assert len({run.pid for run in runs}) > 8
        assert set(Counter(run.task_id for run in runs).values()) == {1}
        wait_until(lambda: jobs(connection) == 0)
        assert "lost its connection" not in running.output()
        sessions = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue consume'"
        ).fetchone()
        assert sessions == (1,)


def test_a_cpu_bound_solo_task_outlasts_its_lease(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger, store: JobStore
) -> None:  # T-9
    store.config_set("queue.lease.ttl_seconds", 3)
    with (
        publishing_app("plain", conninfo) as app,
        worker(PLAIN, conninfo, pool="solo"),
        worker(PLAIN, conninfo, pool="solo"),
    ):
        task(app, "spin").delay(10)
        ledger.wait_finished(1, 60)
        wait_until(lambda: jobs(connection) == 0)
        assert len(ledger.runs()) == 1


def test_a_long_countdown_is_no_place_in_a_worker(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # T-6
    with publishing_app("plain", conninfo) as app, worker(PLAIN, conninfo):
        for number in range(100):
            task(app, "echo").apply_async((number,), countdown=3600)
        task(app, "echo").delay("urgent")
        ledger.wait_finished(1)
        wait_until(lambda: jobs(connection) == 100)
        assert jobs(connection, "status = 'leased'") == 0


def test_remote_control(
    conninfo: str, connection: psycopg.Connection, ledger: Ledger
) -> None:  # T-5
    with worker(PLAIN, conninfo) as running:
        answered = celery_command(PLAIN, conninfo, "inspect", "ping", "--timeout", "5")
        assert answered.returncode == 0, answered.stderr
        assert "pong" in answered.stdout
        stats = celery_command(PLAIN, conninfo, "inspect", "stats", "--timeout", "5", "--json")
        assert '"pgqueue"' in stats.stdout
        sessions = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
            "AND application_name LIKE 'pgqueue %' AND application_name <> 'pgqueue admin'"
        ).fetchone()[0]
        assert sessions <= 3
        celery_command(PLAIN, conninfo, "control", "shutdown")
        assert running.wait() == 0
