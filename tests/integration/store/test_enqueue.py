# SPDX-License-Identifier: BSD-3-Clause
"""Publishing into the store: one job per id and per live key, bytes kept as they are."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.verdicts import FailPermanent, FailTransient
from tests.support.jobs import (
    Later,
    another,
    bury,
    claim,
    claim_one,
    publication,
    publish,
    publish_and_claim,
    row,
    rows,
)


def test_a_fresh_row(store: JobStore, connection: psycopg.Connection) -> None:
    # S-1
    made = publication(priority=7, delay=0, acks_late=True)
    answer = store.enqueue(made)
    assert (answer.job_id, answer.created, answer.waiting) == (made.job_id, True, False)
    kept = row(connection, made.job_id)
    assert kept is not None
    assert kept["status"] == "queued"
    assert kept["idempotency_key"] == str(made.job_id)
    assert kept["explicit_key"] is False
    assert kept["process_after"] == kept["enqueued_at"]
    assert (kept["priority"], kept["acks_late"], kept["task_id"]) == (7, True, made.task_id)
    assert (kept["attempts"], kept["retries"], kept["deliveries"]) == (0, 0, 0)


def test_the_same_id_twice_is_one_job(store: JobStore) -> None:
    # S-1, T-10: a publish whose answer was lost is sent again under its own id
    made = publication()
    assert store.enqueue(made).created
    again = store.enqueue(made)
    assert (again.job_id, again.created) == (made.job_id, False)
    assert len(claim(store)) == 1


def test_the_id_of_a_dead_job_is_not_published_again(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-7, S-9: else the job would live and be dead at once, and could not die a second time
    lease = publish_and_claim(store)
    store.fail_permanent(*lease.ref, FailPermanent("fatal", "boom"))
    again = store.enqueue(publication(job_id=lease.job_id))
    assert (again.job_id, again.created) == (lease.job_id, False)
    assert row(connection, lease.job_id) is None


def test_a_live_key_is_one_job_per_queue(store: JobStore) -> None:
    # S-1, C-11
    first = publication(idempotency_key="order-1")
    assert store.enqueue(first).created
    second = store.enqueue(publication(idempotency_key="order-1"))
    assert (second.job_id, second.created) == (first.job_id, False)
    assert store.enqueue(publication("other", idempotency_key="order-1")).created
    assert store.enqueue(publication(idempotency_key="order-2")).created


def test_a_key_is_held_while_the_job_waits_or_runs(store: JobStore) -> None:
    # S-1
    made = publish(store, idempotency_key="k")
    lease = claim_one(store)
    assert not store.enqueue(publication(idempotency_key="k")).created
    assert store.fail_transient(*lease.ref, FailTransient("E", "later", delay=60))
    again = store.enqueue(publication(idempotency_key="k"))
    assert (again.job_id, again.created) == (made.job_id, False)


@pytest.mark.parametrize("end", ["succeed", "die", "cancel", "kept success"])
def test_an_end_frees_the_key(store: JobStore, end: str) -> None:
    # S-1: a dead letter frees its key
    if end == "kept success":
        store.config_set("queue.retention.succeeded_seconds", 3600)
    made = publish(store, idempotency_key="k")
    if end == "cancel":
        assert store.job_cancel(made.job_id)
    elif end == "die":
        store.fail_permanent(*claim_one(store).ref, FailPermanent("fatal", "boom"))
    else:
        assert store.succeed(*claim_one(store).ref)
    assert store.enqueue(publication(idempotency_key="k")).created


@pytest.mark.parametrize("commits", [True, False])
def test_the_same_key_from_two_transactions(
    conninfo: str, connection: psycopg.Connection, store: JobStore, commits: bool
) -> None:
    # S-1, FIELD 37: exactly one job, whether the first of them commits or rolls back
    first, second = publication(idempotency_key="k"), publication(idempotency_key="k")
    with psycopg.connect(conninfo) as open_transaction:
        assert JobStore(open_transaction).enqueue(first).created
        later = Later(conninfo, lambda other: other.enqueue(second))
        later.wait_blocked(connection)
        if commits:
            open_transaction.commit()
        else:
            open_transaction.rollback()
        answer = later.result()
    winner = first if commits else second
    assert (answer.job_id, answer.created) == (winner.job_id, not commits)
    assert [lease.job_id for lease in claim(store)] == [winner.job_id]


def test_many_are_all_or_none(store: JobStore, connection: psycopg.Connection) -> None:
    # S-1
    with pytest.raises(StoreError):
        store.enqueue_many([publication(), publication(priority=256), publication()])
    assert rows(connection, "SELECT 1 FROM pgqueue.job_queue") == []
    answers = store.enqueue_many([publication(), publication()])
    assert [answer.created for answer in answers] == [True, True]


def test_delay_beats_an_absolute_time_and_expiry_becomes_absolute(
    connection: psycopg.Connection,
) -> None:
    # S-8
    kept = connection.execute(
        "WITH made AS (SELECT * FROM pgqueue.fn_job_enqueue(gen_random_uuid(), 'q', '{}', 'x',"
        " p_delay => '1 hour', p_process_after => now() + interval '9 hours',"
        " p_expires_in => '2 hours', p_expires_at => now() + interval '9 hours'))"
        " SELECT job_id FROM made"
    ).fetchone()
    assert kept is not None
    job = row(connection, kept[0])
    assert job is not None
    assert (job["process_after"] - job["enqueued_at"]).total_seconds() == 3600
    assert (job["expires_at"] - job["enqueued_at"]).total_seconds() == 7200


def test_transient_messages_live_in_the_twin(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-1
    made = publish(store, durable=False, priority=3)
    twin = "SELECT job_id FROM pgqueue.job_queue_transient"
    assert [each["job_id"] for each in rows(connection, twin)] == [made.job_id]
    assert store.enqueue(made).created is False
    durable = publish(store, priority=2)
    assert store.queue_size("q") == 2
    first, second = claim(store)
    assert [first.job_id, second.job_id] == [made.job_id, durable.job_id]
    assert first.seq != second.seq
    assert store.progress(*first.ref)
    assert store.fail_transient(*first.ref, FailTransient("E", "again", delay=0))
    again = claim_one(store)
    assert again.attempts == 1
    assert store.fail_permanent(*again.ref, FailPermanent("fatal", "boom"))
    (letter,) = store.dead_letters()
    assert letter.job_snapshot["durable"] is False
    assert store.dead_letter_replay(letter.dead_letter_id) == "replayed"
    assert rows(connection, twin) == []


def test_a_null_durability_is_durable(connection: psycopg.Connection) -> None:
    # S-1: nothing is lost by accident
    connection.execute(
        "SELECT pgqueue.fn_job_enqueue(gen_random_uuid(), 'q', '{}', 'x', p_durable => NULL)"
    )
    assert rows(connection, "SELECT 1 AS one FROM ONLY pgqueue.job_queue") == [{"one": 1}]


def test_somebody_waits(conninfo: str, store: JobStore) -> None:
    # T-12: the answer of a publish says whether a NOTIFY is worth it
    with another(conninfo) as sleeper:
        sleeper.connection.execute(f'LISTEN "{sleeper.wake_channel}"')
        sleeper.raise_wake_flag(["q", "r"])
        assert store.enqueue(publication("q")).waiting
        assert not store.enqueue(publication("other")).waiting
        store.notify(["q"])
        (note,) = sleeper.connection.notifies(timeout=10, stop_after=1)
        assert (note.channel, note.payload) == (store.wake_channel, "q")
        sleeper.lower_wake_flag(["q", "r"])
        assert not store.enqueue(publication("q")).waiting


def test_the_key_of_a_replayed_job(store: JobStore) -> None:
    # S-1, S-11
    letter = bury(store, idempotency_key="k")
    assert store.dead_letter_replay(letter) == "replayed"
    assert not store.enqueue(publication(idempotency_key="k")).created
