# SPDX-License-Identifier: BSD-3-Clause
"""Replay, discard, supersede, cancel: once, by one, and for good."""

from __future__ import annotations

import psycopg

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient
from tests.support.jobs import (
    Later,
    bury,
    claim,
    claim_one,
    events,
    lapse,
    letters,
    make_due,
    publication,
    publish,
    publish_and_claim,
    reap_at_once,
    row,
    rows,
)


def test_replay_starts_from_zero(store: JobStore, connection: psycopg.Connection) -> None:
    # S-2, S-11: byte for byte, under its own id, expiry lifted
    made = publish(
        store,
        body=b'["\x00"]',
        expires_in=1800,
        priority=6,
        acks_late=True,
        stamps=Stamps(max_attempts=2),
    )
    lease = claim_one(store)
    store.progress(*lease.ref)
    store.fail_transient(*lease.ref, FailTransient("E", "x", delay=2))
    make_due(connection, made.job_id)
    lease = claim_one(store)
    store.progress(*lease.ref)
    store.release(*lease.ref, requeue=True)
    assert store.fail_permanent(*claim_one(store).ref, FailPermanent("fatal", "y"))
    (letter,) = store.dead_letters()
    assert store.dead_letter_replay(letter.dead_letter_id, actor="ann", note="fixed") == "replayed"
    kept = row(connection, made.job_id)
    assert kept is not None
    zero = ("attempts", "retries", "deliveries", "backoff_spent_s")
    assert [kept[name] for name in zero] == [0, 0, 0, 0]
    assert (kept["status"], kept["expires_at"], kept["replays"]) == ("queued", None, 1)
    assert (kept["priority"], kept["acks_late"], kept["max_attempts"]) == (6, True, 2)
    assert (kept["body"], kept["envelope"]) == (made.body, made.envelope)
    assert kept["dead_letter_id"] == letter.dead_letter_id
    resolved = store.dead_letter(letter.dead_letter_id)
    assert resolved is not None
    assert (resolved.resolution, resolved.resolved_by, resolved.resolution_note) == (
        "replayed",
        "ann",
        "fixed",
    )
    assert resolved.resolved_at is not None
    assert not claim_one(store).redelivered


def test_an_expired_job_can_be_replayed(store: JobStore) -> None:
    # S-11
    made = publish(store, expires_in=-1)
    assert store.sweep_expired() == 1
    (letter,) = store.dead_letters()
    assert store.dead_letter_replay(letter.dead_letter_id) == "replayed"
    assert store.sweep_expired() == 0
    assert claim_one(store).job_id == made.job_id


def test_a_second_attempt_changes_nothing_and_says_so(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-11
    replayed, discarded, superseded = bury(store), bury(store), bury(store)
    assert store.dead_letter_replay(replayed) == "replayed"
    assert store.dead_letter_discard(discarded) == "discarded"
    assert store.dead_letter_supersede(superseded) == "superseded"
    before = rows(connection, "SELECT * FROM pgqueue.job_dead_letter ORDER BY dead_letter_id")
    trail = len(events(connection))
    for each in (replayed, discarded, superseded):
        assert store.dead_letter_replay(each) == "already_resolved"
        assert store.dead_letter_discard(each) == "already_resolved"
        assert store.dead_letter_supersede(each) == "already_resolved"
    for act in (store.dead_letter_replay, store.dead_letter_discard, store.dead_letter_supersede):
        assert act(10**12) == "not_found"
    after = rows(connection, "SELECT * FROM pgqueue.job_dead_letter ORDER BY dead_letter_id")
    assert after == before
    assert len(events(connection)) == trail
    assert len(claim(store)) == 1


def test_two_operators_at_once(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-11: compare-and-swap
    letter = bury(store)
    with psycopg.connect(conninfo) as first:
        assert JobStore(first).dead_letter_replay(letter) == "replayed"
        later = Later(conninfo, lambda other: other.dead_letter_discard(letter))
        later.wait_blocked(connection)
        first.commit()
        assert later.result() == "already_resolved"
    assert len(claim(store)) == 1


def test_replay_waits_for_the_key(store: JobStore, connection: psycopg.Connection) -> None:
    # S-11: refused while a live job holds the same explicit key
    letter = bury(store, idempotency_key="k")
    holder = publish(store, idempotency_key="k")
    assert store.dead_letter_replay(letter) == "key_conflict"
    open_one = store.dead_letter(letter)
    assert open_one is not None
    assert open_one.resolved_at is None
    assert store.succeed(*claim_one(store).ref)
    assert holder.idempotency_key == "k"
    assert store.dead_letter_replay(letter) == "replayed"


def test_replay_is_off_with_the_substrate(store: JobStore) -> None:
    # S-13; discarding is no part of the machinery
    letter = bury(store)
    store.config_set("queue.job_substrate.enabled", False)
    assert store.dead_letter_replay(letter) == "disabled"
    assert store.dead_letter_discard(letter) == "discarded"


def test_dying_again_is_linked(store: JobStore, connection: psycopg.Connection) -> None:
    # S-9, FIELD 25
    first = bury(store)
    assert store.dead_letter_replay(first) == "replayed"
    lease = claim_one(store)
    store.fail_permanent(*lease.ref, FailPermanent("fatal", "again"))
    _, second = letters(connection, lease.job_id)
    assert second["previous_id"] == first
    assert [each.dead_letter_id for each in store.dead_letters()] == [second["dead_letter_id"]]
    assert store.dead_letter_replay(first) == "already_resolved"
    reap_at_once(store)
    assert store.dead_letter_replay(second["dead_letter_id"]) == "replayed"
    lease = claim_one(store)
    lapse(connection, lease.job_id)
    store.reap()
    make_due(connection, lease.job_id)
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["replays"], kept["dead_letter_id"]) == (2, second["dead_letter_id"])


def test_cancel(store: JobStore, connection: psycopg.Connection) -> None:
    # S-2, S-19: only what is not running; audited
    made = publish(store)
    running = publish_and_claim(store, queue_name="other")
    assert not store.job_cancel(running.job_id)
    assert store.job_cancel(made.job_id, actor="ann", reason="not wanted")
    assert not store.job_cancel(made.job_id)
    assert row(connection, made.job_id) is None
    (event,) = events(connection, "queue_job_cancelled")
    assert (event["actor"], event["reason"], event["job_id"]) == ("ann", "not wanted", made.job_id)
    assert store.enqueue(publication(job_id=made.job_id)).created
