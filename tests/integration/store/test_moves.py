# SPDX-License-Identifier: BSD-3-Clause
"""What the database itself refuses, and what no move changes."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import (
    FailPermanent,
    FailTransient,
    Succeed,
)
from tests.support.jobs import (
    claim,
    claim_one,
    letters,
    make_due,
    publish,
    publish_and_claim,
    row,
)

ILLEGAL = {
    "queued -> in_progress": "started_at = now()",
    "queued -> retry_waiting": "status = 'retry_waiting'",
    "queued -> succeeded": "status = 'succeeded'",
    "queued -> anything": "status = 'asleep'",
    "half a lease": "status = 'leased', lease_token = gen_random_uuid()",
    "a lease on a waiting job": "lease_name = 'w'",
    "negative": "attempts = -1",
    "too long a name": "queue_name = repeat('x', 256)",
    "priority": "priority = 256",
    "stamp": "visibility_timeout_s = 'NaN'",
}
ILLEGAL_LEASED = {
    "another token": "lease_token = gen_random_uuid()",
    "no deadline": "leased_until = NULL",
    "leased -> queued with the lease": "status = 'queued'",
}
NO_LEASE = "lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL"
ILLEGAL_STARTED = {
    "unstarted": "started_at = NULL",
    "started again": "started_at = now()",
    "in_progress -> queued free of charge": f"status = 'queued', started_at = NULL, {NO_LEASE}",
}


@pytest.mark.parametrize("change", ILLEGAL.values(), ids=ILLEGAL)
@pytest.mark.parametrize("durable", [True, False])
def test_the_database_refuses_illegal_moves(
    store: JobStore, connection: psycopg.Connection, change: str, durable: bool
) -> None:
    # S-2
    made = publish(store, durable=durable)
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(
            f"UPDATE pgqueue.job_queue SET {change} WHERE job_id = %s", [made.job_id]
        )


@pytest.mark.parametrize(
    "change",
    [*ILLEGAL_LEASED.values(), *ILLEGAL_STARTED.values()],
    ids=[*ILLEGAL_LEASED, *ILLEGAL_STARTED],
)
@pytest.mark.parametrize("durable", [True, False])
def test_the_database_refuses_illegal_moves_of_leased_jobs(
    store: JobStore, connection: psycopg.Connection, change: str, durable: bool
) -> None:
    # S-2
    lease = publish_and_claim(store, durable=durable)
    if change in ILLEGAL_STARTED.values():
        assert store.progress(*lease.ref)
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(
            f"UPDATE pgqueue.job_queue SET {change} WHERE job_id = %s", [lease.job_id]
        )
    assert store.succeed(*lease.ref)


@pytest.mark.parametrize("status", ["leased", "retry_waiting", "succeeded", "dead_letter"])
@pytest.mark.parametrize("table", ["job_queue", "job_queue_transient"])
def test_a_job_begins_queued(connection: psycopg.Connection, table: str, status: str) -> None:
    # S-2
    with pytest.raises(psycopg.errors.CheckViolation, match="from nothing to"):
        connection.execute(
            f"INSERT INTO pgqueue.{table} (job_id, queue_name, status, process_after, enqueued_at,"
            " idempotency_key, envelope, body)"
            " VALUES (gen_random_uuid(), 'q', %s, now(), now(), 'k', '{}', 'x')",
            [status],
        )


def test_stamps_do_not_change(store: JobStore, connection: psycopg.Connection) -> None:
    # S-8: across claim, renew, retry and replay
    stamps = Stamps(
        visibility_timeout_s=71.5,
        max_attempts=3,
        backoff_strategy="linear",
        backoff_base_s=0.25,
        backoff_cap_s=9,
        backoff_budget_s=77,
        dead_letter_retention_s=86400,
    )
    made = publish(store, stamps=stamps, priority=4, acks_late=True)
    fixed = {**vars(stamps), "priority": 4, "job_kind": made.job_kind, "task_id": made.task_id}

    def check() -> None:
        kept = row(connection, made.job_id)
        assert kept is not None
        assert {name: kept[name] for name in fixed} == fixed

    lease = claim_one(store)
    check()
    assert store.progress(*lease.ref)
    assert store.renew(*lease.ref)
    check()
    assert store.fail_transient(*lease.ref, FailTransient("E", "again"))
    check()
    make_due(connection, made.job_id)
    assert store.fail_permanent(*claim_one(store).ref, FailPermanent("fatal", "boom"))
    (letter,) = letters(connection, made.job_id)
    assert {name: letter[name] for name in vars(stamps)} == vars(stamps)
    assert store.dead_letter_replay(letter["dead_letter_id"]) == "replayed"
    check()
    again = claim_one(store)
    assert (again.attempts, again.retries, again.deliveries, again.backoff_spent_s) == (0, 0, 0, 0)
    assert again.replays == 1


def test_finished_jobs_are_kept_if_that_is_configured(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-2
    store.config_set("queue.retention.succeeded_seconds", 3600)
    publish(store)
    publish(store)
    a, b = claim(store)
    assert store.succeed(*a.ref)
    for sent, answers in (((b, b), [True, True]), ((a, b), [False, False])):
        verdicts = [(lease.ref, Succeed()) for lease in sent]
        result = store.exchange(verdicts, [], lease_name="w1", lease_holder="h")
        assert result.settled == answers
    for lease in (a, b):
        kept = row(connection, lease.job_id)
        assert kept is not None
        assert (kept["status"], kept["attempts"]) == ("succeeded", 1)
        job = store.job_get(lease.job_id)
        assert job is not None
        assert job["status"] == "succeeded"
        assert not store.job_cancel(lease.job_id)
    assert claim(store) == []
    moved = connection.execute(
        "SELECT pgqueue.fn_job_move_to_dead_letter(%s, 'fatal')", [a.job_id]
    ).fetchone()
    assert moved == (False,)
    store.prune()
    assert row(connection, a.job_id) is not None
    connection.execute("UPDATE pgqueue.job_queue SET finished_at = now() - interval '2 hours'")
    assert store.prune() == 2
    assert row(connection, a.job_id) is None
