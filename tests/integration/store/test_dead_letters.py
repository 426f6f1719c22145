# SPDX-License-Identifier: BSD-3-Clause
"""Dead letters: kept whole, listed in order, one open one a job."""

from __future__ import annotations

from datetime import timedelta

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import DeadLetter, Stamps
from kombu_pgqueue.verdicts import FAILURE_CODES, FailPermanent, FailTransient
from tests.support.jobs import (
    bury,
    claim_one,
    events,
    letters,
    publish,
    publish_and_claim,
    row,
)


def test_what_is_kept(store: JobStore, connection: psycopg.Connection) -> None:
    # S-9
    made = publish(store, idempotency_key="k", expires_in=3600, priority=3, acks_late=True)
    lease = claim_one(store, holder="w1@host")
    store.progress(*lease.ref)
    store.fail_transient(*lease.ref, FailTransient("E", "first", delay=0))
    lease = claim_one(store, holder="w2@host")
    store.progress(*lease.ref)
    detail = {"type": "KeyError", "traceback": "…"}
    store.fail_permanent(*lease.ref, FailPermanent("fatal", "second", detail, "w2"))
    (letter,) = letters(connection, made.job_id)
    assert letter["previous_id"] is None
    assert (letter["job_kind"], letter["event_domain"]) == (made.job_kind, "q")
    assert (letter["executor"], letter["idempotency_key"]) == ("w2@host", "k")
    assert (letter["failure_code"], letter["failure_detail"]) == ("fatal", detail)
    assert (letter["last_error"], letter["attempts"]) == ("second", 2)
    assert (letter["envelope"], letter["body"]) == (made.envelope, made.body)
    assert letter["claimed_at"] is not None
    assert letter["expires_at"] is not None
    assert letter["first_failed_at"] < letter["last_failed_at"] <= letter["died_at"]
    snapshot = letter["job_snapshot"]
    assert not {"body", "envelope"} & set(snapshot)
    expected = {"task_id": made.task_id, "priority": 3, "retries": 1, "acks_late": True}
    assert {name: snapshot[name] for name in expected} == expected
    assert (snapshot["attempts"], snapshot["explicit_key"]) == (2, True)
    assert row(connection, made.job_id) is None


def test_a_job_that_was_never_claimed(store: JobStore, connection: psycopg.Connection) -> None:
    # S-9
    made = publish(store, expires_in=-1)
    assert store.sweep_expired() == 1
    (letter,) = letters(connection, made.job_id)
    assert (letter["executor"], letter["attempts"], letter["claimed_at"]) == (None, 0, None)


@pytest.mark.parametrize("code", sorted(FAILURE_CODES))
def test_codes(store: JobStore, connection: psycopg.Connection, code: str) -> None:
    # S-10
    bury(store, code)
    attempts = 0 if code in ("malformed", "unregistered", "expired") else 1
    assert [each.attempts for each in store.dead_letters(code=code)] == [attempts]


def test_no_other_code(store: JobStore, connection: psycopg.Connection) -> None:
    # S-10
    lease = publish_and_claim(store)
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute("SELECT pgqueue.fn_job_move_to_dead_letter(%s, 'tired')", [lease.job_id])
    assert store.succeed(*lease.ref)


def test_listing_order_and_pages(store: JobStore, connection: psycopg.Connection) -> None:
    # S-11: last_failed_at DESC, dead_letter_id; paged by key
    for _ in range(10):
        bury(store)
    connection.execute(
        "UPDATE pgqueue.job_dead_letter SET last_failed_at ="
        " '2026-01-01'::timestamptz + (dead_letter_id % 3) * interval '1 hour'"
    )
    everything = store.dead_letters()
    keys = [(-each.last_failed_at.timestamp(), each.dead_letter_id) for each in everything]
    assert keys == sorted(keys)
    assert len(everything) == 10
    seen: list[DeadLetter] = []
    after = None
    while page := store.dead_letters(limit=4, after=after):
        seen += page
        after = (page[-1].last_failed_at, page[-1].dead_letter_id)
    assert seen == everything


def test_filters(store: JobStore) -> None:
    # S-11
    a = bury(store, "fatal", queue_name="a", job_kind="app.one", task_id="t1")
    b = bury(store, "rejected", queue_name="b", job_kind="app.one")
    c = bury(store, "fatal", queue_name="b", job_kind="app.two")
    assert store.dead_letter_discard(c) == "discarded"

    def ids(**filters: object) -> list[int]:
        return [each.dead_letter_id for each in store.dead_letters(**filters)]  # type: ignore[arg-type]

    assert ids() == [b, a]
    assert ids(state="all") == [c, b, a]
    assert ids(state="resolved") == [c]
    assert ids(queue="b", state="all") == [c, b]
    assert ids(kind="app.one") == [b, a]
    assert ids(code="fatal", state="all") == [c, a]
    assert ids(task_id="t1") == [a]
    assert ids(kind="app.two") == []
    middle = store.dead_letter(b)
    assert middle is not None
    instant = timedelta(microseconds=1)
    assert ids(since=middle.last_failed_at) == [b]
    assert ids(until=middle.last_failed_at) == [a]
    assert ids(since=middle.last_failed_at, until=middle.last_failed_at + instant) == [b]
    with pytest.raises(ValueError, match="unknown state"):
        store.dead_letters(state="closed")
    assert store.dead_letter(0) is None


def test_one_open_dead_letter_per_job(store: JobStore, connection: psycopg.Connection) -> None:
    # S-9
    letter = bury(store)
    columns = (
        "previous_id, job_id, job_kind, event_domain, idempotency_key, failure_code, attempts,"
        " job_snapshot, envelope, body, last_failed_at, died_at"
    )
    with pytest.raises(psycopg.errors.UniqueViolation):
        connection.execute(
            f"INSERT INTO pgqueue.job_dead_letter ({columns})"
            f" SELECT {columns} FROM pgqueue.job_dead_letter WHERE dead_letter_id = %s",
            [letter],
        )


@pytest.mark.parametrize(
    "change",
    [
        "resolved_at = now()",
        "resolution = 'replayed'",
        "resolved_at = now(), resolution = 'replayed'",
        "resolved_at = now(), resolution = 'forgotten', resolved_by = 'x'",
    ],
)
def test_a_resolution_is_whole(
    store: JobStore, connection: psycopg.Connection, change: str
) -> None:
    # S-9
    bury(store)
    with pytest.raises(psycopg.errors.CheckViolation):
        connection.execute(f"UPDATE pgqueue.job_dead_letter SET {change}")


def test_retention(store: JobStore, connection: psycopg.Connection) -> None:
    # S-17: open ones are kept unless stamped; resolved ones and events go after 30 days
    bury(store)
    stamped = bury(store, stamps=Stamps(dead_letter_retention_s=60))
    resolved = bury(store)
    store.dead_letter_discard(resolved)
    assert store.prune() == 0
    connection.execute(
        "UPDATE pgqueue.job_dead_letter SET died_at = died_at - interval '31 days',"
        " resolved_at = resolved_at - interval '29 days'"
    )
    age = "UPDATE pgqueue.job_event SET happened_at = happened_at - %s::interval"
    connection.execute(age, ["29 days"])
    assert store.prune() == 1
    assert store.dead_letter(stamped) is None
    connection.execute(
        "UPDATE pgqueue.job_dead_letter SET resolved_at = resolved_at - interval '2 days'"
    )
    connection.execute(age, ["2 days"])
    assert store.prune(actor="me") == 1 + 4
    assert store.dead_letter(resolved) is None
    assert len(store.dead_letters()) == 1
    pruned = events(connection, "queue_pruned")[-1]
    assert (pruned["actor"], pruned["detail"]["dead_letters"]) == ("me", 1)
