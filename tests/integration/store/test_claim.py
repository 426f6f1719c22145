# SPDX-License-Identifier: BSD-3-Clause
"""Claims: what is due, in which order, how much of it."""

from __future__ import annotations

import random

import psycopg
import pytest

from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Mark, Stamps
from kombu_pgqueue.verdicts import FailTransient
from tests.support.jobs import (
    claim,
    claim_one,
    make_due,
    publication,
    publish,
    row,
    row_locked,
    rows,
)


def test_a_claim_is_a_whole_lease(store: JobStore, connection: psycopg.Connection) -> None:
    # S-3
    made = publish(store, stamps=Stamps(visibility_timeout_s=90))
    (lease,) = claim(store, name="worker", holder="worker@host lock=7")
    kept = row(connection, made.job_id)
    assert kept is not None
    assert kept["status"] == "leased"
    assert kept["lease_token"] == lease.lease_token
    assert (kept["lease_name"], kept["lease_holder"]) == ("worker", "worker@host lock=7")
    assert kept["started_at"] is None
    assert (kept["attempts"], kept["deliveries"]) == (0, 0)
    assert (kept["leased_until"] - kept["claimed_at"]).total_seconds() == 90
    assert lease.leased_until == kept["leased_until"]
    assert claim(store) == []


def test_order(store: JobStore, connection: psycopg.Connection) -> None:
    # S-3: priority DESC, process_after ASC, seq ASC
    wanted = []
    for priority in (9, 5, 0):
        early = [publication(priority=priority) for _ in range(3)]
        late = [publication(priority=priority) for _ in range(3)]
        wanted.append((early, late))
    everything = [job for early, late in wanted for job in late + early]
    random.Random(1).shuffle(everything)
    store.enqueue_many(everything)
    early_ids = [job.job_id for early, _ in wanted for job in early]
    connection.execute(
        "UPDATE pgqueue.job_queue SET process_after = now() - interval '1 hour'"
        " WHERE job_id = ANY (%s)",
        [early_ids],
    )
    place = {job.job_id: index for index, job in enumerate(everything)}
    expected = []
    for early, late in wanted:
        expected += sorted((job.job_id for job in early), key=place.__getitem__)
        expected += sorted((job.job_id for job in late), key=place.__getitem__)
    taken = [lease.job_id for size in (1, 4, 2, 50) for lease in claim(store, limit=size)]
    assert taken == expected


def test_a_retry_queues_behind_what_was_due_before_it(store: JobStore) -> None:
    # S-3: ready time, not age
    first, second = publish(store), publish(store)
    lease = claim_one(store)
    assert lease.job_id == first.job_id
    store.fail_transient(*lease.ref, FailTransient("E", "again", delay=0))
    assert [lease.job_id for lease in claim(store)] == [second.job_id, first.job_id]


def test_only_what_is_due(store: JobStore, connection: psycopg.Connection) -> None:
    # S-3
    delayed = publish(store, delay=3600, priority=9)
    expired = publish(store, expires_in=-1, priority=9)
    due = publish(store, expires_in=3600)
    assert 3500 < (store.next_due(["q"]) or 0) + 3600 <= 7200
    assert [lease.job_id for lease in claim(store)] == [due.job_id]
    assert 3590 < (store.next_due(["q"]) or 0) <= 3600
    make_due(connection, delayed.job_id, expired.job_id)
    assert store.next_due(["q"]) == 0
    assert [lease.job_id for lease in claim(store)] == [delayed.job_id]
    assert store.next_due(["q"]) is None
    assert store.next_due([]) is None
    assert store.next_due(["nobody knows"]) is None


def test_kinds(store: JobStore) -> None:
    # S-3
    publish(store, job_kind="a")
    wanted = [publish(store, job_kind=kind) for kind in ("b", "c")]
    assert claim(store, kinds=["d"]) == []
    taken = claim(store, kinds=["b", "c"])
    assert [lease.job_id for lease in taken] == [job.job_id for job in wanted]
    assert [lease.job_kind for lease in claim(store)] == ["a"]


def test_max_bytes_bounds_the_whole_batch(store: JobStore) -> None:
    # S-3
    for priority in (3, 3, 2, 1):
        publish(store, body=b"x" * 400, priority=priority)
    assert len(claim(store, max_bytes=1000)) == 2
    assert len(claim(store, max_bytes=1000)) == 2


def test_one_always_goes_and_nothing_overtakes_what_does_not_fit(store: JobStore) -> None:
    # S-3
    publish(store, body=b"x" * 5000, priority=9)
    publish(store, body=b"x" * 300, priority=5)
    publish(store, body=b"x" * 5000, priority=5)
    publish(store, body=b"x", priority=1)
    sizes = []
    while taken := claim(store, max_bytes=1000):
        sizes.append([len(lease.body) for lease in taken])
    assert sizes == [[5000], [300], [5000], [1]]


def test_max_bytes_over_several_queues(store: JobStore) -> None:
    # S-3
    for queue_name in ("a", "b", "c"):
        for _ in range(3):
            publish(store, queue_name, body=b"x" * 400)
    taken = claim(store, ["a", "b", "c"], 9, max_bytes=1300)
    assert len(taken) == 3


def test_a_batch_is_shared_among_queues(store: JobStore) -> None:
    # S-3
    for queue_name in ("a", "b", "c"):
        for _ in range(20):
            publish(store, queue_name)
    taken = claim(store, ["a", "b", "c"], 9)
    assert sorted(lease.queue_name for lease in taken) == ["a"] * 3 + ["b"] * 3 + ["c"] * 3


def test_what_one_queue_leaves_the_others_take(store: JobStore) -> None:
    # S-3
    for _ in range(20):
        publish(store, "busy")
    publish(store, "quiet")
    taken = claim(store, ["quiet", "idle", "busy"], 9)
    assert sorted(lease.queue_name for lease in taken) == ["busy"] * 8 + ["quiet"]


def test_a_batch_smaller_than_the_number_of_queues_starves_none(store: JobStore) -> None:
    # S-3: fairly among queues, also one at a time
    names = ["a", "b", "c"]
    for queue_name in names:
        for _ in range(60):
            publish(store, queue_name)
    taken = [claim(store, names, 1)[0].queue_name for _ in range(60)]
    assert set(taken) == set(names)


def test_ask_for_nothing(store: JobStore) -> None:
    # S-3
    publish(store)
    assert claim(store, [], 5) == []
    assert claim(store, "q", 0) == []
    assert len(claim(store, ["q", "q"], 5)) == 1


@pytest.mark.parametrize(
    "arguments",
    ["NULL, 'w', 'h', 1", "'{q}', NULL, 'h', 1", "'{q}', 'w', NULL, 1", "'{q}', 'w', 'h', NULL"],
)
def test_arguments_that_are_missing(
    store: JobStore, connection: psycopg.Connection, arguments: str
) -> None:
    # S-23: a NULL limit would be no limit
    publish(store)
    with pytest.raises(psycopg.errors.NullValueNotAllowed, match="must be given"):
        connection.execute(f"SELECT * FROM pgqueue.fn_job_claim({arguments})")


def test_marks_hide_what_lies_before_them(store: JobStore) -> None:
    # S-5
    jobs = [publish(store) for _ in range(4)] + [publish(store, priority=5)]
    taken = claim(store, limit=3)
    mark = Mark(taken[-1].process_after, taken[-1].seq)
    assert [lease.job_id for lease in taken] == [jobs[4].job_id, jobs[0].job_id, jobs[1].job_id]
    for lease in taken:
        assert store.release(*lease.ref)
    marked = claim(store, marks={("q", 0): mark, ("other", 5): mark})
    assert [lease.job_id for lease in marked] == [jobs[4].job_id, jobs[2].job_id, jobs[3].job_id]
    assert [lease.job_id for lease in claim(store)] == [jobs[0].job_id, jobs[1].job_id]


def test_locked_rows_are_passed_over_and_no_more_locked_than_returned(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-3
    jobs = [publish(store, priority=priority) for priority in (3, 2, 1) for _ in range(5)]
    locked = row_locked(conninfo, jobs[0].job_id, jobs[6].job_id)
    with locked, psycopg.connect(conninfo) as claimer:
        taken = claim(JobStore(claimer), limit=7)
        expected = [jobs[i].job_id for i in (1, 2, 3, 4, 5, 7, 8)]
        assert [lease.job_id for lease in taken] == expected
        free = rows(connection, "SELECT job_id FROM pgqueue.job_queue FOR UPDATE SKIP LOCKED")
        assert len(free) == 15 - 7 - 2


def test_lease_time_by_stamp_kind_queue_and_default(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-13
    key = "queue.lease.ttl_seconds"
    store.config_set(key, 100)
    store.config_set(f"{key}.queue:special", 200)
    store.config_set(f"{key}.app.slow", 300)
    cases = [
        ({}, 100),
        ({"queue_name": "special"}, 200),
        ({"queue_name": "special", "job_kind": "app.slow"}, 300),
        ({"job_kind": "app.slow", "stamps": Stamps(visibility_timeout_s=400)}, 400),
    ]
    for fields, seconds in cases:
        made = publish(store, **fields)
        lease = claim_one(store, made.queue_name)
        kept = row(connection, lease.job_id)
        assert kept is not None
        assert (kept["leased_until"] - kept["claimed_at"]).total_seconds() == seconds
        assert store.renew(*lease.ref)
        kept = row(connection, lease.job_id)
        assert kept is not None
        assert (kept["leased_until"] - kept["claimed_at"]).total_seconds() >= seconds


def test_switched_off(store: JobStore) -> None:
    # S-13: claims stop; publishing, verdicts and renewals of running jobs go on
    publish(store)
    running = claim_one(store)
    store.config_set("queue.job_substrate.enabled", False)
    assert store.enqueue(publication()).created
    assert claim(store) == []
    assert store.next_due(["q"]) is None
    assert store.progress(*running.ref)
    assert store.renew(*running.ref)
    assert store.succeed(*running.ref)
    store.config_set("queue.job_substrate.enabled", True)
    assert len(claim(store)) == 1


def test_a_job_committed_while_its_queue_was_deleted_is_found_again(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-4: the priority levels are a hint that must never hide a job
    store.queue_declare("q")
    publish(store)
    store.succeed(*claim_one(store).ref)
    with psycopg.connect(conninfo) as publisher:
        made = publish(JobStore(publisher))
        store.queue_delete("q")
        store.prune()
        publisher.commit()
    store.prune()
    assert [lease.job_id for lease in claim(store)] == [made.job_id]


def test_levels_of_queues_that_are_gone_are_forgotten(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-4
    query = "SELECT queue_name FROM pgqueue.queue_priority ORDER BY 1"
    store.queue_declare("declared")
    for queue_name in ("declared", "waiting", "leased", "reply.1", "reply.2"):
        publish(store, queue_name)
    for queue_name in ("declared", "reply.1", "reply.2"):
        store.succeed(*claim_one(store, queue_name).ref)
    claim_one(store, "leased")
    store.prune()
    assert [each["queue_name"] for each in rows(connection, query)] == [
        "declared",
        "leased",
        "waiting",
    ]


def test_an_exchange_claims_for_several_subscriptions(store: JobStore) -> None:
    # S-3, D-1
    a, b = publish(store, "a"), publish(store, "b")
    result = store.exchange(
        [],
        [ClaimRequest(["a"], 5), ClaimRequest(["nothing"], 5), ClaimRequest(["b"], 5)],
        lease_name="w1",
        lease_holder="h",
    )
    assert [[lease.job_id for lease in each] for each in result.leases] == [
        [a.job_id],
        [],
        [b.job_id],
    ]
    assert result.lease_stands is None
