# SPDX-License-Identifier: BSD-3-Clause
"""What the reaper and the sweeper do about jobs."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from tests.support.jobs import (
    claim,
    claim_one,
    events,
    lapse,
    letters,
    publication,
    publish,
    publish_and_claim,
    reap_at_once,
    row,
    rows,
)


@pytest.fixture
def reaping(store: JobStore) -> JobStore:
    reap_at_once(store)
    return store


def test_an_unstarted_job_gets_its_attempt_back(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-16
    lease = publish_and_claim(reaping)
    before = row(connection, lease.job_id)
    lapse(connection, lease.job_id)
    assert reaping.reap(actor="me") == 1
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert before is not None
    assert (kept["status"], kept["attempts"], kept["deliveries"]) == ("retry_waiting", 0, 1)
    assert (kept["last_error"], kept["first_failed_at"]) == ("lease_expired", None)
    assert kept["process_after"] == before["process_after"]
    (event,) = events(connection, "queue_lease_reaped")
    assert (event["severity"], event["actor"], event["job_id"]) == ("warning", "me", lease.job_id)
    assert event["detail"]["started"] is False
    again = claim_one(reaping)
    assert again.redelivered
    assert again.retries == 0


def test_a_started_one_has_spent_it(reaping: JobStore, connection: psycopg.Connection) -> None:
    # S-16: the first loss is repeated at once, the next ones wait
    made = publish(reaping, stamps=Stamps(max_attempts=3, backoff_base_s=100))
    waits = []
    for attempt in (1, 2, 3):
        connection.execute("UPDATE pgqueue.job_queue SET process_after = now()")
        lease = claim_one(reaping)
        assert reaping.progress(*lease.ref)
        lapse(connection, made.job_id)
        assert reaping.reap() == 1
        kept = row(connection, made.job_id)
        if kept is None:
            break
        assert (kept["attempts"], kept["retries"]) == (attempt, 0)
        assert kept["first_failed_at"] is not None
        waits.append((kept["process_after"] - kept["last_error_at"]).total_seconds())
    assert waits[0] == 0
    assert 80 <= waits[1] <= 120
    (letter,) = letters(connection, made.job_id)
    assert (letter["failure_code"], letter["attempts"]) == ("lease_expired", 3)
    assert "w1@host" in letter["last_error"]


def test_unlimited_attempts_are_capped_by_the_delivery_limit(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-16
    reaping.config_set("queue.delivery_limit", 4)
    made = publish(reaping, stamps=Stamps(max_attempts=0))
    for _ in range(4):
        connection.execute("UPDATE pgqueue.job_queue SET process_after = now()")
        reaping.progress(*claim_one(reaping).ref)
        lapse(connection, made.job_id)
        assert reaping.reap() == 1
    (letter,) = letters(connection, made.job_id)
    assert (letter["failure_code"], letter["attempts"]) == ("delivery_limit", 4)


def test_an_early_acknowledged_job_is_never_run_again(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-16, C-6; before its start it is as good as new
    started = publish(reaping)
    waiting = publish(reaping, acks_late=False)
    first, second = claim(reaping)
    assert reaping.progress(*first.ref, acks_late=False)
    lapse(connection, first.job_id, second.job_id)
    assert reaping.reap() == 2
    (letter,) = letters(connection, started.job_id)
    assert (letter["failure_code"], letter["attempts"]) == ("worker_lost", 1)
    assert claim_one(reaping).job_id == waiting.job_id


def test_innocent_neighbours_are_not_charged(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # C-7: a job that ran when its worker died is a delivery more, what waited behind it is not
    for _ in range(3):
        publish(reaping)
    poison, *neighbours = claim(reaping)
    reaping.progress(*poison.ref)
    lapse(connection, poison.job_id, *[lease.job_id for lease in neighbours])
    # Several batches, the one that ran among the last: it is still known who is to blame.
    while reaping.reap(limit=1):
        pass
    deliveries = [row(connection, job.job_id)["deliveries"] for job in (poison, *neighbours)]
    assert deliveries == [1, 0, 0]


def test_batches_have_no_cap_on_the_total(reaping: JobStore) -> None:
    # S-16
    reaping.enqueue_many([publication() for _ in range(25)])
    leases = claim(reaping, limit=25)
    lapse(reaping.connection, *[lease.job_id for lease in leases])
    counts = []
    while count := reaping.reap(limit=10):
        counts.append(count)
    assert counts == [10, 10, 5]
    assert len(claim(reaping, limit=50)) == 25


def test_nothing_is_reaped_just_after_a_server_start(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-16: whoever is alive gets one lease time to renew
    up = rows(
        connection,
        "SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8 AS s",
    )[0]["s"]
    lease = publish_and_claim(store)
    lapse(connection, lease.job_id)
    store.config_set("queue.lease.ttl_seconds", up + 3600)
    assert store.reap() == 0
    store.config_set("queue.lease.ttl_seconds", 0.001)
    assert store.reap() == 1


@pytest.mark.parametrize("key", ["queue.lease_reaper.enabled", "queue.job_substrate.enabled"])
def test_reaper_switches(reaping: JobStore, connection: psycopg.Connection, key: str) -> None:
    # S-13
    lease = publish_and_claim(reaping)
    lapse(connection, lease.job_id)
    reaping.config_set(key, False)
    assert reaping.reap() == 0
    assert row(connection, lease.job_id) is not None
    reaping.config_set(key, True)
    assert reaping.reap() == 1


def test_a_job_that_cannot_be_moved_does_not_hold_up_its_neighbours(
    reaping: JobStore, connection: psycopg.Connection
) -> None:
    # S-6, S-16
    for _ in range(3):
        publish(reaping, acks_late=False, stamps=Stamps(max_attempts=1))
    leases = claim(reaping)
    for lease in leases:
        assert reaping.progress(*lease.ref)
    lapse(connection, *[lease.job_id for lease in leases])
    connection.execute(
        "ALTER TABLE pgqueue.job_dead_letter ADD CONSTRAINT spoilt"
        f" CHECK (job_id <> '{leases[1].job_id}')"
    )
    try:
        assert reaping.reap() == 2
        assert row(connection, leases[1].job_id) is not None
        assert [each.job_id for each in reaping.dead_letters()] == [
            leases[2].job_id,
            leases[0].job_id,
        ]
    finally:
        connection.execute("ALTER TABLE pgqueue.job_dead_letter DROP CONSTRAINT spoilt")
    assert reaping.reap() == 1


def test_the_sweeper_buries_what_expired_before_it_started(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-17
    store.enqueue_many(
        [publication(queue_name, expires_in=-1) for queue_name in ("a", "b") for _ in range(3)]
    )
    fresh = publish(store, "a", expires_in=3600)
    assert store.sweep_expired(limit=4, actor="me") == 4
    assert store.sweep_expired(limit=4) == 2
    assert store.sweep_expired() == 0
    assert {each.failure_code for each in store.dead_letters()} == {"expired"}
    assert {each["actor"] for each in events(connection, "queue_job_dead_lettered")} >= {"me"}
    assert claim_one(store, "a").job_id == fresh.job_id


def test_the_sweeper_and_leased_jobs(store: JobStore, connection: psycopg.Connection) -> None:
    # S-17: a running task finishes, as in Celery
    for acks_late in (True, True, None):
        publish(store, acks_late=acks_late, expires_in=3600)
    waiting, running, unknown = claim(store)
    assert store.progress(*running.ref)
    connection.execute("UPDATE pgqueue.job_queue SET expires_at = now() - interval '1 second'")
    assert store.sweep_expired() == 1
    assert not store.progress(*waiting.ref)
    assert len(letters(connection, waiting.job_id)) == 1
    assert store.succeed(*running.ref)
    # A client that never reports a start may be running it.
    assert store.succeed(*unknown.ref)


def test_transient_messages_that_expire_are_counted(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-17
    for _ in range(3):
        publish(store, durable=False, expires_in=-1)
    assert store.sweep_expired() == 3
    assert store.dead_letters() == []
    (event,) = events(connection, "queue_pruned")
    assert event["detail"] == {"count": 3}


def test_the_sweeper_is_off_with_the_substrate(store: JobStore) -> None:
    # S-13
    publish(store, expires_in=-1)
    store.config_set("queue.job_substrate.enabled", False)
    assert store.sweep_expired() == 0
    store.config_set("queue.job_substrate.enabled", True)
    assert store.sweep_expired() == 1
