# SPDX-License-Identifier: BSD-3-Clause
"""Any name, any bytes; what cannot be kept is refused at once."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient
from tests.support.jobs import (
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
    with pytest.raises(psycopg.Error, match=r"null value|unknown stamp"):
        connection.execute(f"SELECT * FROM pgqueue.fn_job_enqueue({arguments})")
