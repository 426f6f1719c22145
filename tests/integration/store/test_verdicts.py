# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts: fenced by the token, answered by a value, one by one and in batches."""

from __future__ import annotations

from collections.abc import Callable
from uuid import uuid4

import psycopg
import pytest

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import (
    Changes,
    FailPermanent,
    FailTransient,
    Progress,
    Release,
    Succeed,
    Verdict,
)
from tests.support.jobs import (
    claim,
    claim_one,
    lapse,
    letters,
    make_due,
    publish,
    publish_and_claim,
    reap_at_once,
    row,
    row_locked,
)

FAILED = FailTransient("E", "again", delay=5)
FATAL = FailPermanent("fatal", "boom")

VERDICTS: dict[str, Callable[[JobStore, Lease], bool]] = {
    "progress": lambda store, lease: store.progress(*lease.ref),
    "succeed": lambda store, lease: store.succeed(*lease.ref),
    "renew": lambda store, lease: store.renew(*lease.ref),
    "release": lambda store, lease: store.release(*lease.ref),
    "requeue": lambda store, lease: store.release(*lease.ref, requeue=True),
    "fail_transient": lambda store, lease: store.fail_transient(*lease.ref, FAILED),
    "fail_permanent": lambda store, lease: store.fail_permanent(*lease.ref, FATAL),
}


def exchange(store: JobStore, *verdicts: tuple[Lease, Verdict]) -> list[bool | None]:
    sent = [(lease.ref, verdict) for lease, verdict in verdicts]
    return store.exchange(sent, [], lease_name="w1", lease_holder="h").settled


@pytest.mark.parametrize("name", VERDICTS)
def test_the_token_decides(store: JobStore, connection: psycopg.Connection, name: str) -> None:
    # S-6
    lease = publish_and_claim(store)
    before = row(connection, lease.job_id)
    forged = [
        Lease(**{**vars(lease), "lease_token": uuid4()}),
        Lease(**{**vars(lease), "job_id": uuid4()}),
    ]
    for each in forged:
        assert VERDICTS[name](store, each) is False
    assert row(connection, lease.job_id) == before
    assert VERDICTS[name](store, lease) is True


@pytest.mark.parametrize("name", VERDICTS)
@pytest.mark.parametrize("taken_by", ["reaper", "operator", "cancelled retry", "another claim"])
def test_a_lease_that_was_taken_away(
    store: JobStore, connection: psycopg.Connection, name: str, taken_by: str
) -> None:
    # S-6: each verdict of it is refused, as a value
    lease = publish_and_claim(store)
    if taken_by == "operator":
        connection.execute("SELECT pgqueue.fn_job_move_to_dead_letter(%s, 'fatal')", [lease.job_id])
    else:
        reap_at_once(store)
        lapse(connection, lease.job_id)
        assert store.reap() == 1
        if taken_by == "another claim":
            assert claim_one(store).lease_token != lease.lease_token
        elif taken_by == "cancelled retry":
            assert store.job_cancel(lease.job_id)
    before = row(connection, lease.job_id)
    assert VERDICTS[name](store, lease) is False
    assert row(connection, lease.job_id) == before
    assert len(letters(connection, lease.job_id)) == (taken_by == "operator")


@pytest.mark.parametrize(
    "name", ["succeed", "release", "requeue", "fail_transient", "fail_permanent"]
)
def test_one_final_verdict(store: JobStore, name: str) -> None:
    # S-6
    lease = publish_and_claim(store)
    assert VERDICTS[name](store, lease) is True
    for again in VERDICTS.values():
        assert again(store, lease) is False


def test_a_lease_whose_time_is_over_counts_until_it_is_taken_away(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6: a verdict counts while its token is on the row
    lease = publish_and_claim(store)
    lapse(connection, lease.job_id)
    assert store.succeed(*lease.ref) is True


def test_progress_counts_one_attempt_however_often_it_is_told(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-3
    lease = publish_and_claim(store)
    assert store.progress(*lease.ref)
    started = row(connection, lease.job_id)
    assert store.progress(*lease.ref, acks_late=False)
    again = row(connection, lease.job_id)
    assert started is not None
    assert again is not None
    assert (started["attempts"], again["attempts"]) == (1, 1)
    assert started["started_at"] == again["started_at"]
    assert again["acks_late"] is False
    assert exchange(store, (lease, Progress())) == [True]
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["attempts"], kept["acks_late"]) == (1, False)


def test_what_failed_has_started(store: JobStore, connection: psycopg.Connection) -> None:
    # S-2: leased -> retry_waiting counts the attempt nobody reported
    lease = publish_and_claim(store)
    assert store.fail_transient(*lease.ref, FAILED)
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["attempts"], kept["retries"], kept["status"]) == (1, 1, "retry_waiting")


def test_release_of_an_unstarted_job_costs_nothing(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-2
    made = publish(store)
    before = row(connection, made.job_id)
    lease = claim_one(store)
    assert store.release(*lease.ref)
    after = row(connection, made.job_id)
    assert before is not None
    assert after is not None
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"claimed_at", "last_executor"}
    assert not claim_one(store).redelivered


def test_requeue_costs_a_delivery_slows_down_and_is_capped(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-2, C-7, FIELD 22
    made = publish(store)
    other = publish(store)
    store.config_set("queue.delivery_limit", 6)
    waits = []
    for delivery in range(6):
        lease = claim_one(store)
        assert lease.job_id == made.job_id, "its old place in line"
        assert lease.deliveries == delivery
        assert lease.redelivered == (delivery > 0)
        assert store.progress(*lease.ref)
        assert store.release(*lease.ref, requeue=True)
        kept = row(connection, made.job_id)
        if kept is None:
            break
        assert (kept["attempts"], kept["deliveries"]) == (delivery + 1, delivery + 1)
        waits.append(kept["process_after"] > lease.process_after)
        make_due(connection, made.job_id)
        connection.execute(
            "UPDATE pgqueue.job_queue SET process_after = process_after - interval '1 hour'"
            " WHERE job_id = %s",
            [made.job_id],
        )
    assert waits == [False, False, False, True, True]
    (letter,) = letters(connection, made.job_id)
    assert (letter["failure_code"], letter["attempts"]) == ("delivery_limit", 6)
    assert letter["job_snapshot"]["deliveries"] == 6
    assert claim_one(store).job_id == other.job_id


def test_an_exchange_answers_each_in_its_place(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6
    for _ in range(8):
        publish(store)
    a, b, c, d, e, f, g, h = claim(store)
    assert store.succeed(*h.ref)
    answers = exchange(
        store,
        (g, Release(requeue=True)),
        (a, Succeed()),
        (h, Succeed()),
        (b, Progress(acks_late=True)),
        (c, Release()),
        (h, Progress()),
        (d, Succeed()),
        (h, Release()),
        (e, Progress()),
    )
    assert answers == [True, True, False, True, True, False, True, False, True]
    status = {lease.job_id: row(connection, lease.job_id) for lease in (a, b, c, d, e, f, g)}
    assert status[a.job_id] is None
    assert status[d.job_id] is None
    assert status[b.job_id]["started_at"] is not None
    assert status[e.job_id]["attempts"] == 1
    assert status[c.job_id]["deliveries"] == 0
    assert status[g.job_id]["deliveries"] == 1
    assert status[f.job_id]["status"] == "leased"


def test_two_leases_of_one_job_in_one_batch(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6: the late verdict of a lost lease must not be taken for that of the new one
    old = publish_and_claim(store)
    assert store.release(*old.ref)
    new = claim_one(store)
    assert exchange(store, (old, Succeed()), (new, Succeed()), (old, Succeed())) == [
        False,
        True,
        False,
    ]
    assert row(connection, old.job_id) is None


def test_tokens_of_neighbours_do_not_fit(store: JobStore, connection: psycopg.Connection) -> None:
    # S-6
    publish(store)
    publish(store)
    a, b = claim(store)
    crossed = [(a.job_id, b.lease_token), (b.job_id, a.lease_token)]
    for verdict in (Progress(), Succeed(), Release()):
        sent = [(ref, verdict) for ref in crossed]
        assert store.exchange(sent, [], lease_name="w", lease_holder="h").settled == [False, False]
    assert store.renew_many(crossed) == [False, False]
    assert exchange(store, (a, Progress()), (b, Progress())) == [True, True]


def test_a_start_told_twice_in_one_batch_keeps_the_early_acknowledgement(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # C-6: else a lost worker's job would be run again
    lease = publish_and_claim(store, acks_late=True)
    assert exchange(store, (lease, Progress()), (lease, Progress(acks_late=False))) == [True, True]
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["acks_late"], kept["attempts"]) == (False, 1)


@pytest.mark.parametrize("verdict", [Progress(), Succeed(), Release(), Release(requeue=True)])
def test_locked_rows_answer_none_and_do_not_hold_up_the_others(
    conninfo: str, store: JobStore, verdict: Verdict
) -> None:
    # S-6
    for _ in range(3):
        publish(store)
    a, b, c = claim(store)
    with row_locked(conninfo, b.job_id):
        assert exchange(store, (a, verdict), (b, verdict), (c, verdict)) == [True, None, True]
    assert exchange(store, (b, verdict)) == [True]


def test_locked_rows_in_the_other_batch_forms(conninfo: str, store: JobStore) -> None:
    # S-6
    for _ in range(3):
        publish(store)
    a, b, c = claim(store)
    with row_locked(conninfo, b.job_id):
        assert store.renew_many([a.ref, b.ref, c.ref]) == [True, None, True]
        failures: list[tuple[Lease, Verdict]] = [(a, FAILED), (b, FATAL), (b, FAILED), (c, FATAL)]
        assert store.settle([(lease.ref, verdict) for lease, verdict in failures]) == [
            True,
            None,
            None,
            True,
        ]
    assert store.settle([(b.ref, FATAL), (b.ref, FAILED)]) == [True, False]


def test_a_verdict_that_cannot_be_stored_does_not_spoil_its_neighbours(store: JobStore) -> None:
    # S-6
    for _ in range(3):
        publish(store)
    a, b, c = claim(store)
    bad = FailTransient("E", "again", delay=0, changes=Changes(queue_name="x" * 256))
    assert store.settle([(a.ref, FAILED), (b.ref, bad), (c.ref, FATAL)]) == [True, None, True]
    with pytest.raises(StoreError, match="queue name"):
        store.settle([(b.ref, bad)])
    assert store.succeed(*b.ref)
    with pytest.raises(ValueError, match="unknown failure code"):
        store.fail_permanent(*b.ref, FailPermanent("tired", ""))
