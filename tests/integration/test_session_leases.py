# SPDX-License-Identifier: BSD-3-Clause
"""The consuming session under trouble: cut connections, locked rows, lost leases, outages."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4

import psycopg
import pytest
from kombu import Connection, Consumer, Queue

from kombu_pgqueue import holder, process
from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.holder import Holder
from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Release, Succeed
from tests.support.wait import wait_until

TTL = "queue.lease.ttl_seconds"


@pytest.fixture(autouse=True)
def _no_sessions_left(conninfo: str) -> Iterator[None]:
    yield
    process.close_all()


class Worker:
    """A consumer in this process."""

    def __init__(self, dsn: str, prefetch: int = 4, **options: Any) -> None:
        self.broker = Connection(dsn, transport_options=options)
        self.channel = self.broker.channel()
        self.messages: list[Any] = []
        queue = Queue("work", durable=True)
        self.consumer = Consumer(
            self.channel, [queue], on_message=self.messages.append, prefetch_count=prefetch
        )
        self.consumer.consume()

    def publish(self, *bodies: Any, **options: Any) -> None:
        for body in bodies:
            self.broker.Producer().publish(body, routing_key="work", **options)

    def drain(self, count: int, timeout: float = 10) -> list[Any]:
        while len(self.messages) < count:
            self.broker.drain_events(timeout=timeout)
        return [message.payload for message in self.messages]


@pytest.fixture
def worker(dsn: str) -> Iterator[Worker]:
    worker = Worker(dsn)
    yield worker
    worker.broker.release()


class Look:
    """What the database says."""

    def __init__(self, connection: psycopg.Connection) -> None:
        self.connection = connection

    def value(self, query: str, *args: Any) -> Any:
        row = self.connection.execute(query, args).fetchone()
        return row and row[0]

    def jobs(self) -> int:
        return self.value("SELECT count(*) FROM pgqueue.job_queue")

    def leased(self) -> int:
        return self.value("SELECT count(*) FROM pgqueue.job_queue WHERE status = 'leased'")

    def cut(self) -> int:
        """End the consuming session as an administrator would."""
        return self.value(
            "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue consume'"
        )


@pytest.fixture
def look(connection: psycopg.Connection) -> Look:
    return Look(connection)


def test_a_verdict_arrives_after_the_reconnect(worker: Worker, look: Look) -> None:  # T-10
    worker.publish(1, 2)
    worker.drain(2)
    assert look.cut() == 1
    worker.messages[0].ack()
    wait_until(lambda: look.jobs() == 1)
    worker.messages[1].settle(FailTransient("x", "y", delay=60))
    wait_until(lambda: look.value("SELECT status FROM pgqueue.job_queue") == "retry_waiting")
    worker.publish(3)
    assert worker.drain(3, timeout=5) == [1, 2, 3]


def test_cut_again_and_again(worker: Worker, look: Look) -> None:  # T-10
    for number in range(5):
        look.cut()
        worker.publish(number)
        worker.drain(number + 1, timeout=5)
        worker.messages[number].ack()
    wait_until(lambda: look.jobs() == 0)
    assert [m.payload for m in worker.messages] == list(range(5))


def test_the_sign_of_life_is_back_after_a_cut(worker: Worker, look: Look) -> None:
    worker.publish(1)
    worker.drain(1)
    look.cut()
    missing = "SELECT pgqueue.fn_holder_missing(lease_holder) FROM pgqueue.job_queue"
    wait_until(lambda: look.value(missing) is False)
    assert (
        look.value("SELECT count(*) FROM pgqueue.runtime_lease WHERE lease_name <> 'maintenance'")
        == 1
    )


def test_a_claim_whose_answer_was_lost_is_given_back(
    worker: Worker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:  # T-6
    exchange, lost = JobStore.exchange, []

    def cut(self: JobStore, *args: Any, **kwargs: Any) -> Any:
        result = exchange(self, *args, **kwargs)
        if any(result.leases) and not lost:
            lost.append(result)
            self.connection.close()
            raise StoreUnavailable("cut")
        return result

    monkeypatch.setattr(JobStore, "exchange", cut)
    worker.publish(*range(8))
    assert worker.drain(4) == [0, 1, 2, 3]
    assert lost
    assert look.leased() == 4
    assert look.value("SELECT max(deliveries + attempts) FROM pgqueue.job_queue") == 0


def test_a_locked_row_holds_up_nothing_else(
    dsn: str, look: Look, conninfo: str, store: JobStore
) -> None:  # S-6, C-10
    store.config_set(TTL, 3)
    worker = Worker(dsn)
    worker.publish(1, 2, 3)
    worker.drain(3)
    with psycopg.connect(conninfo) as other:
        other.execute("SELECT FROM pgqueue.job_queue WHERE body = '1' FOR UPDATE")
        for message in worker.messages:
            message.ack()
        wait_until(lambda: look.jobs() == 1)
        worker.publish(4)
        worker.drain(4)
        renewed = (
            "SELECT max(renewed_at)::text FROM pgqueue.runtime_lease "
            "WHERE lease_name <> 'maintenance'"
        )
        before = look.value(renewed)
        wait_until(lambda: look.value(renewed) != before, 25)
        other.rollback()
    worker.messages[3].ack()
    wait_until(lambda: look.jobs() == 0)


def test_a_failure_of_a_locked_row_holds_up_nothing_else(
    dsn: str, look: Look, conninfo: str
) -> None:
    worker = Worker(dsn, lease_ttl=2)
    worker.publish(1, 2)
    worker.drain(2)
    with psycopg.connect(conninfo) as other:
        other.execute("SELECT FROM pgqueue.job_queue WHERE body = '1' FOR UPDATE")
        worker.messages[0].settle(FailPermanent("fatal", "x"))
        worker.messages[1].ack()
        wait_until(lambda: look.jobs() == 1)
        expires = "SELECT min(expires_at) > now() FROM pgqueue.runtime_lease"
        for _ in range(10):
            assert look.value(expires)
            time.sleep(0.3)  # longer than the lease, all in all
        other.rollback()
    wait_until(lambda: look.jobs() == 0)
    assert look.value("SELECT failure_code FROM pgqueue.job_dead_letter") == "fatal"


def test_a_refused_verdict_is_told_and_nothing_breaks(
    worker: Worker, look: Look, caplog: pytest.LogCaptureFixture
) -> None:  # S-6
    worker.publish(1, 2)
    worker.drain(2)
    look.value(
        "SELECT pgqueue.fn_job_release(job_id, lease_token) FROM pgqueue.job_queue WHERE body = '1'"
    )
    with caplog.at_level(logging.WARNING, "kombu_pgqueue"):
        worker.messages[0].ack()
        worker.messages[1].ack()
        wait_until(lambda: look.jobs() == 1)
        wait_until(lambda: "taken away" in caplog.text)


def test_verdicts_that_cannot_be_stored_end_somehow(
    worker: Worker, look: Look, caplog: pytest.LogCaptureFixture
) -> None:
    worker.publish(1, 2)
    worker.drain(2)
    worker.messages[0].settle(FailPermanent("no such code", "x"))
    worker.messages[1].ack()
    wait_until(lambda: look.value("SELECT failure_code FROM pgqueue.job_dead_letter") == "fatal")
    assert look.jobs() == 0


def test_one_bad_verdict_spoils_no_other(
    worker: Worker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:  # S-6
    exchange = JobStore.exchange

    def fail(self: JobStore, verdicts: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(verdict, Succeed) for _, verdict in verdicts):
            raise StoreError("deadlock", sqlstate="40P01")
        return exchange(self, verdicts, *args, **kwargs)

    worker.publish(1, 2, 3)
    worker.drain(3)
    monkeypatch.setattr(JobStore, "exchange", fail)
    for message in worker.messages:
        message.ack()
    wait_until(lambda: look.jobs() == 0)


def test_leases_are_renewed_while_this_thread_burns_cpu(
    dsn: str, look: Look, store: JobStore
) -> None:  # T-9
    store.config_set(TTL, 1)
    worker = Worker(dsn)
    worker.publish(1)
    worker.drain(1)
    end = time.monotonic() + 3
    while time.monotonic() < end:
        pass
    assert look.value("SELECT bool_and(expires_at > now()) FROM pgqueue.runtime_lease")
    worker.messages[0].ack()
    wait_until(lambda: look.jobs() == 0)


def test_an_outage_longer_than_the_lease_is_told(
    dsn: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:  # T-10
    worker = Worker(dsn, lease_ttl=1)
    worker.publish(1, 2)
    worker.drain(2)
    connect = holder.connect

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise StoreUnavailable("down")

    monkeypatch.setattr(holder, "connect", refuse)
    look.cut()
    began = time.monotonic()
    with pytest.raises(worker.broker.connection_errors):
        worker.drain(3, timeout=10)
    assert time.monotonic() - began > 0.5
    worker.messages[0].ack()
    monkeypatch.setattr(holder, "connect", connect)
    wait_until(lambda: look.jobs() == 1)
    worker.publish(3)
    assert worker.drain(3) == [1, 2, 3]


def test_a_short_outage_is_not_told(
    worker: Worker, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:  # T-10
    connect, refused = holder.connect, []

    def refuse_twice(*args: Any, **kwargs: Any) -> Any:
        if len(refused) < 2:
            refused.append(1)
            raise StoreUnavailable("down")
        return connect(*args, **kwargs)

    wait_until(lambda: look.cut() == 1)
    monkeypatch.setattr(holder, "connect", refuse_twice)
    worker.publish(1)
    assert worker.drain(1) == [1]


def test_a_schema_that_cannot_be_used_is_told(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_new(*args: Any, **kwargs: Any) -> Any:
        from kombu_pgqueue.errors import SchemaTooNew

        raise SchemaTooNew("made by release 9")

    with Connection(dsn) as broker:
        broker.connect()
        monkeypatch.setattr(holder, "connect", too_new)
        with pytest.raises(StoreError, match="release 9"):
            Queue("work")(broker.channel()).get()


def test_the_end_of_the_process_gives_everything_back(worker: Worker, look: Look) -> None:
    worker.publish(*range(6))
    worker.drain(3)
    wait_until(lambda: look.leased() == 4)
    worker.messages[0].started()
    process.stop_sessions()
    assert look.jobs() == 6
    assert look.leased() == 0
    deliveries = "SELECT array_agg(deliveries ORDER BY body) FROM pgqueue.job_queue"
    assert look.value(deliveries) == [1, 0, 0, 0, 0, 0]
    assert look.value("SELECT count(*) FROM pgqueue.runtime_lease") == 0
    assert look.value("SELECT sum(attempts) FROM pgqueue.job_queue") == 1


def test_the_last_verdicts_are_sent_at_the_end(worker: Worker, look: Look) -> None:
    worker.publish(1, 2)
    worker.drain(2)
    worker.messages[0].ack()
    worker.messages[1].settle(FailPermanent("fatal", "x"))
    process.stop_sessions()
    assert look.jobs() == 0
    assert look.value("SELECT count(*) FROM pgqueue.job_dead_letter") == 1


def test_jobs_of_a_dead_holder_are_reaped(
    worker: Worker, look: Look, store: JobStore
) -> None:  # T-14
    store.config_set(TTL, 2)  # nothing is reaped within one lease time after the server's start
    worker.publish(1)
    worker.drain(1)
    token = uuid4()
    assert store.runtime_lease_acquire("dead", "dead lock=1", token, 60)
    worker.consumer.cancel()
    worker.publish(2)
    (lease,) = store.claim(ClaimRequest(["work"], 1), lease_name="dead", lease_holder="dead lock=1")
    assert lease.body == b"2"
    worker.consumer.consume()
    began = time.monotonic()
    assert worker.drain(2, timeout=12) == [1, 2]
    assert time.monotonic() - began < 10


def test_an_idle_session_gives_its_connection_back(
    dsn: str, look: Look, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_pgqueue.session_loop.LINGER", 0.2)
    worker = Worker(dsn)
    worker.publish(1, 2)
    worker.drain(1)
    worker.consumer.cancel()
    sessions = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'pgqueue consume'"
    )
    time.sleep(0.5)
    assert look.value(sessions) == 1  # a job is still held
    worker.messages[0].ack()
    wait_until(lambda: look.value(sessions) == 0)
    worker.consumer.consume()
    assert worker.drain(2) == [1, 2]


def test_an_idle_consumer_asks_for_almost_nothing(worker: Worker, look: Look) -> None:
    """One look a poll interval, and the leader's chores: some transactions a second at most."""
    with pytest.raises(socket.timeout):
        worker.broker.drain_events(timeout=1.5)
    count = "SELECT count(*) FROM pgqueue.job_queue"
    asked: list[str] = []
    wrapped = {
        name: getattr(Holder, name) for name in ("exchange", "next_due", "raise_flag", "lower_flag")
    }

    def counting(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            asked.append(name)
            return method(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name, method in wrapped.items():
            patch.setattr(Holder, name, counting(name, method))
        with pytest.raises(socket.timeout):
            worker.broker.drain_events(timeout=5)
    assert len(asked) <= 4, asked
    assert look.value(count) == 0


def test_release_keeps_the_old_place_in_line(worker: Worker, look: Look) -> None:
    worker.publish(*range(8))
    worker.drain(4)
    worker.messages[0].settle(Release())
    assert worker.drain(5)[4] == 0


def test_a_retry_is_due_in_time(worker: Worker, look: Look) -> None:
    worker.publish(1)
    worker.drain(1)
    worker.messages[0].settle(FailTransient("x", "y", delay=0.5))
    began = time.monotonic()
    worker.drain(2, timeout=4)
    assert 0.4 < time.monotonic() - began < 2
    assert worker.messages[1].properties["pgqueue"]["attempts"] == 1
