# SPDX-License-Identifier: BSD-3-Clause
"""Publishing into the store: one job per id and per live key, bytes kept as they are."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient
from tests.support.jobs import (
    Later,
    another,
    bury,
    claim,
    claim_one,
    letters,
    publication,
    publish,
    publish_and_claim,
    row,
    rows,
)

EVIL_NAMES = [
    "plain",
    'quo"te',
    "it's",
    "back\\slash",
    "semi; DROP TABLE pgqueue.job_queue; --",
    "percent %s %(x)s",
    "пример",
    "队列",
    "🐘" * 63,
    "x" * 255,
    " ",
]


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


@pytest.mark.parametrize("queue_name", EVIL_NAMES)
def test_any_queue_name(store: JobStore, queue_name: str) -> None:
    # T-4: up to 255 bytes in any alphabet
    store.queue_declare(queue_name)
    made = publish(store, queue_name)
    assert store.queue_size(queue_name) == 1
    assert store.next_due([queue_name]) == 0
    lease = claim_one(store, queue_name)
    assert (lease.job_id, lease.queue_name) == (made.job_id, queue_name)
    assert store.fail_permanent(*lease.ref, FailPermanent("fatal", "boom"))
    (letter,) = store.dead_letters(queue=queue_name)
    assert store.dead_letter_replay(letter.dead_letter_id) == "replayed"
    assert store.queue_purge(queue_name) == 1
    assert store.queue_delete(queue_name) == 0
    assert not store.queue_exists(queue_name)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x00\x01\xff",
        rb'["\u0000"]',
        "🐘 é".encode(),
        bytes(range(256)) * 40,
    ],
    ids=["empty", "nul", "escaped-nul", "emoji", "10kB"],
)
def test_bodies_byte_for_byte(store: JobStore, connection: psycopg.Connection, body: bytes) -> None:
    # S-1, S-11
    envelope = r'{"headers": {"x": "\u0000 🐘"},  "odd":   1}'
    publish(store, body=body, envelope=envelope)
    lease = claim_one(store)
    assert (lease.body, lease.envelope) == (body, envelope)
    store.fail_permanent(*lease.ref, FailPermanent("fatal", "boom"))
    (letter,) = store.dead_letters()
    assert (letter.body, letter.envelope) == (body, envelope)
    assert store.dead_letter_replay(letter.dead_letter_id) == "replayed"
    again = claim_one(store)
    assert (again.job_id, again.body, again.envelope) == (lease.job_id, body, envelope)


def test_fifty_megabytes(store: JobStore) -> None:
    # S-1
    body = b"\x00pgqueue\xff" * (50 * 1024 * 1024 // 9)
    publish(store, body=body)
    lease = claim_one(store)
    assert lease.body == body
    assert store.succeed(*lease.ref)


def test_nul_is_escaped_where_text_cannot_hold_it(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-1, FIELD 35
    lease = publish_and_claim(store, job_kind="app.\x00kind", task_id="id\x00")
    assert lease.job_kind == r"app.\x00kind"
    assert store.fail_transient(*lease.ref, FailTransient("E\x00", "a\x00b \ud800", delay=0))
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["last_error_code"], kept["last_error"]) == (r"E\x00", r"a\x00b \ud800")
    lease = claim_one(store)
    detail = {"trace\x00": ["x\x00", float("nan"), object, {"deep": "\x00"}]}
    assert store.fail_permanent(*lease.ref, FailPermanent("fatal", "m\x00", detail=detail))
    (letter,) = letters(connection, lease.job_id)
    assert letter["last_error"] == r"m\x00"
    assert letter["failure_detail"][r"trace\x00"][0] == r"x\x00"
    assert letter["failure_detail"][r"trace\x00"][3] == {"deep": r"\x00"}


@pytest.mark.parametrize(
    "fields",
    [
        {"queue_name": ""},
        {"queue_name": "x" * 256},
        {"queue_name": "nul\x00"},
        {"priority": 256},
        {"priority": -1},
        {"priority": 70000},
        {"job_kind": "k" * 1001},
        {"idempotency_key": "k" * 2001},
        {"stamps": Stamps(visibility_timeout_s=0)},
        {"stamps": Stamps(visibility_timeout_s=1e300)},
        {"stamps": Stamps(visibility_timeout_s=float("nan"))},
        {"stamps": Stamps(backoff_cap_s=float("inf"))},
        {"stamps": Stamps(max_attempts=-1)},
        {"stamps": Stamps(backoff_strategy="sometimes")},
        {"stamps": Stamps(dead_letter_retention_s=-5)},
    ],
    ids=lambda fields: f"{next(iter(fields))}",
)
def test_what_cannot_be_kept_is_refused_at_once(
    store: JobStore, connection: psycopg.Connection, fields: dict
) -> None:
    # S-1: a row that cannot be claimed, or cannot die, would hold up its whole queue
    with pytest.raises(StoreError):
        store.enqueue(publication(**fields))
    assert rows(connection, "SELECT 1 FROM pgqueue.job_queue") == []


@pytest.mark.parametrize(
    "arguments",
    [
        "NULL, 'q', '{}', 'x'",
        "gen_random_uuid(), NULL, '{}', 'x'",
        "gen_random_uuid(), 'q', NULL, 'x'",
        "gen_random_uuid(), 'q', '{}', NULL",
        "gen_random_uuid(), 'q', '{}', 'x', p_job_kind => NULL",
        "gen_random_uuid(), 'q', '{}', 'x', p_priority => NULL",
        """gen_random_uuid(), 'q', '{}', 'x', p_stamps => '{"max_attemps": 3}'""",
    ],
)
def test_missing_and_misspelt_arguments(connection: psycopg.Connection, arguments: str) -> None:
    # S-23: callable from any language, so it says what is wrong
    with pytest.raises(psycopg.Error, match="null value|unknown stamp"):
        connection.execute(f"SELECT * FROM pgqueue.fn_job_enqueue({arguments})")


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
