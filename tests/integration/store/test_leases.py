# SPDX-License-Identifier: BSD-3-Clause
"""Leases of holders and leaders, signs of life, and which jobs they keep."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import Release
from tests.support.jobs import (
    another,
    claim,
    claim_one,
    lapse,
    publish,
    publish_and_claim,
    reap_at_once,
    row,
    rows,
)
from tests.support.wait import wait_until

LONG = Stamps(visibility_timeout_s=600)


@pytest.fixture
def reaping(store: JobStore) -> JobStore:
    reap_at_once(store)
    return store


def lease_row(connection: psycopg.Connection, name: str) -> dict[str, Any] | None:
    found = rows(connection, "SELECT * FROM pgqueue.runtime_lease WHERE lease_name = %s", name)
    return found[0] if found else None


def run_out(connection: psycopg.Connection, name: str) -> None:
    connection.execute(
        "UPDATE pgqueue.runtime_lease SET expires_at = clock_timestamp() - interval '1 second'"
        " WHERE lease_name = %s",
        [name],
    )


def test_a_runtime_lease_has_one_holder(store: JobStore, connection: psycopg.Connection) -> None:
    # S-14
    mine, theirs = uuid4(), uuid4()
    assert store.runtime_lease_acquire("leader", "me", mine, 60)
    assert store.runtime_lease_acquire("leader", "me", mine, 60)
    assert not store.runtime_lease_acquire("leader", "you", theirs, 60)
    assert store.runtime_lease_renew("leader", mine, 60)
    assert not store.runtime_lease_renew("leader", theirs, 60)
    assert not store.runtime_lease_release("leader", theirs)
    assert store.runtime_lease_release("leader", mine)
    assert not store.runtime_lease_renew("leader", mine, 60)
    assert store.runtime_lease_acquire("leader", "you", theirs, 60)


def test_a_dead_leader_is_replaced(store: JobStore, connection: psycopg.Connection) -> None:
    # S-14
    mine, theirs = uuid4(), uuid4()
    assert store.runtime_lease_acquire("leader", "me", mine, 60)
    run_out(connection, "leader")
    assert store.runtime_lease_acquire("leader", "you", theirs, 60)
    assert not store.runtime_lease_renew("leader", mine, 60)
    kept = lease_row(connection, "leader")
    assert kept is not None
    assert (kept["lease_holder"], kept["lease_token"]) == ("you", theirs)


def test_a_leader_without_its_sign_of_life_is_replaced_at_once(
    conninfo: str, store: JobStore
) -> None:
    # S-14, D-6
    mine, theirs = uuid4(), uuid4()
    with another(conninfo) as leader:
        holder = f"me lock={leader.holder_lock('leader')}"
        assert leader.announce_holder("leader")
        assert leader.runtime_lease_acquire("leader", holder, mine, 60)
        assert not store.runtime_lease_acquire("leader", "you", theirs, 60)
    wait_until(lambda: store.runtime_lease_acquire("leader", "you", theirs, 60), 10)


def test_the_holders_lease_keeps_its_jobs(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-14: one row is renewed, not one per job
    token = uuid4()
    assert reaping.runtime_lease_acquire("w1", "w1@host", token, 60)
    lease = publish_and_claim(reaping)
    lapse(connection, lease.job_id)
    assert reaping.reap() == 0
    # a job's own deadline alone keeps it, too
    run_out(connection, "w1")
    assert reaping.renew(*lease.ref, ttl=60)
    assert reaping.reap() == 0
    assert lease_row(connection, "w1") is not None, "its jobs' leases hang on it"
    lapse(connection, lease.job_id)
    assert reaping.reap() == 1
    assert lease_row(connection, "w1") is None


def test_a_namesake_does_not_keep_them(reaping: JobStore, connection: psycopg.Connection) -> None:
    # S-14: a lease belongs to one incarnation
    lease = publish_and_claim(reaping, stamps=LONG)
    assert reaping.runtime_lease_acquire("w1", "w1@host again", uuid4(), 60)
    assert reaping.reap() == 0
    lapse(connection, lease.job_id)
    assert reaping.reap() == 1


def test_an_exchange_renews_the_holder(store: JobStore, connection: psycopg.Connection) -> None:
    # S-14, D-1
    token = uuid4()
    assert store.runtime_lease_acquire("w1", "h", token, 5)
    before = lease_row(connection, "w1")
    lease = publish_and_claim(store)
    result = store.exchange(
        [(lease.ref, Release())], [], lease_name="w1", lease_holder="h", renew=token, lease_ttl=90
    )
    assert (result.settled, result.lease_stands) == ([True], True)
    after = lease_row(connection, "w1")
    assert before is not None
    assert after is not None
    assert (after["expires_at"] - before["expires_at"]).total_seconds() > 80
    lost = store.exchange([], [], lease_name="w1", lease_holder="h", renew=uuid4())
    assert lost.lease_stands is False


def test_a_dead_holders_jobs_go_within_seconds(
    conninfo: str, reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-16, T-14: however far their deadlines are
    with another(conninfo) as worker:
        holder = f"w1@host lock={worker.holder_lock('w1')}"
        assert worker.announce_holder("w1")
        assert worker.runtime_lease_acquire("w1", holder, uuid4(), 600)
        for _ in range(2):
            publish(worker, stamps=LONG)
        started, waiting = claim(worker, name="w1", holder=holder)
        assert worker.progress(*started.ref)
        assert reaping.reap() == 0
    wait_until(
        lambda: rows(connection, "SELECT pgqueue.fn_holder_missing(%s) AS gone", holder)[0]["gone"]
    )
    assert reaping.reap() == 0, "it may be reconnecting"
    left = rows(
        connection,
        "SELECT extract(epoch FROM expires_at - clock_timestamp())::float8 AS s"
        " FROM pgqueue.runtime_lease WHERE lease_name = 'w1'",
    )[0]["s"]
    assert 0 < left <= 4
    run_out(connection, "w1")
    assert reaping.reap() == 2
    for lease, attempts in ((started, 1), (waiting, 0)):
        kept = row(connection, lease.job_id)
        assert kept is not None
        assert (kept["status"], kept["attempts"]) == ("retry_waiting", attempts)


def test_a_holder_that_shows_itself_again_keeps_its_jobs(
    conninfo: str, reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-16, T-10: its next renewal restores the deadline
    token = uuid4()
    with another(conninfo) as worker:
        holder = f"w1@host lock={worker.holder_lock('w1')}"
        assert worker.announce_holder("w1")
        assert worker.runtime_lease_acquire("w1", holder, token, 600)
        lease = publish_and_claim(worker, stamps=LONG)
        connection.execute("UPDATE pgqueue.job_queue SET lease_holder = %s", [holder])
    wait_until(
        lambda: rows(connection, "SELECT pgqueue.fn_holder_missing(%s) AS gone", holder)[0]["gone"]
    )
    assert reaping.reap() == 0
    with another(conninfo) as worker:
        assert worker.announce_holder("w1")
        assert worker.runtime_lease_renew("w1", token, 600)
        assert reaping.reap() == 0
        kept = lease_row(connection, "w1")
        assert kept is not None
        assert (kept["expires_at"] - kept["renewed_at"]).total_seconds() > 599
        assert worker.succeed(*lease.ref)


@pytest.mark.parametrize(
    "holder",
    ["no lock", "lock=", "lock=99999999999999999999", "x lock=4294967295"],
)
def test_odd_holders_do_not_stop_the_reaper(
    reaping: JobStore, connection: psycopg.Connection, holder: str
) -> None:
    # S-16
    odd = publish(reaping)
    claim_one(reaping, name="odd", holder=holder)
    assert reaping.runtime_lease_acquire("odd", holder, uuid4(), 0.001)
    lapse(connection, odd.job_id)
    wait_until(lambda: reaping.reap() == 1, 10)
