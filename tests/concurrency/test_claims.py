# SPDX-License-Identifier: BSD-3-Clause
"""Sessions that want the same rows at the same time."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import psycopg

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Lease, Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Progress, Release, Succeed
from tests.support.jobs import (
    Later,
    another,
    claim,
    claim_one,
    lapse,
    letters,
    publication,
    publish_and_claim,
    reap_at_once,
    row,
    row_locked,
    rows,
)


def test_six_connections_claim_120_jobs_at_once(conninfo: str, store: JobStore) -> None:
    # S-3
    jobs = [publication(priority=number % 3) for number in range(120)]
    store.enqueue_many(jobs)
    together = threading.Barrier(6)

    def take(number: int) -> list[UUID]:
        taken: list[UUID] = []
        with another(conninfo) as mine:
            together.wait(20)
            while leases := claim(mine, limit=1 + number, name=f"w{number}"):
                taken += [lease.job_id for lease in leases]
        return taken

    with ThreadPoolExecutor(6) as pool:
        taken = [job_id for each in pool.map(take, range(6)) for job_id in each]
    assert len(taken) == len(set(taken)) == 120
    assert set(taken) == {job.job_id for job in jobs}


def test_claims_pass_each_other(conninfo: str, store: JobStore) -> None:
    # S-3: an open claim holds up nobody
    jobs = [publication() for _ in range(4)]
    store.enqueue_many(jobs)
    with psycopg.connect(conninfo) as first:
        mine = claim(JobStore(first), limit=2)
        theirs = claim(store, limit=2, name="w2")
        first.rollback()
    assert [lease.job_id for lease in mine] == [jobs[0].job_id, jobs[1].job_id]
    assert [lease.job_id for lease in theirs] == [jobs[2].job_id, jobs[3].job_id]
    assert [lease.job_id for lease in claim(store)] == [jobs[0].job_id, jobs[1].job_id]


def test_the_reaper_passes_over_a_completion(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-16, FIELD 17
    reap_at_once(store)
    lease = publish_and_claim(store)
    lapse(connection, lease.job_id)
    with psycopg.connect(conninfo) as worker:
        assert JobStore(worker).succeed(*lease.ref)
        assert store.reap() == 0
        worker.commit()
    assert store.reap() == 0
    assert row(connection, lease.job_id) is None


def test_a_completion_waits_for_the_reaper_and_is_refused(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6, FIELD 17
    reap_at_once(store)
    lease = publish_and_claim(store)
    lapse(connection, lease.job_id)
    with psycopg.connect(conninfo) as reaper:
        assert JobStore(reaper).reap() == 1
        later = Later(conninfo, lambda other: other.succeed(*lease.ref))
        later.wait_blocked(connection)
        reaper.commit()
        assert later.result() is False
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert kept["status"] == "retry_waiting"


def test_the_reaper_meets_a_renewal(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-16: the row that is locked counts, not the one that was read. The reaper has read all twelve
    # and is held at the first one's event, before it locks the last one; that is renewed meanwhile.
    reap_at_once(store)
    store.enqueue_many([publication() for _ in range(12)])
    leases = claim(store, limit=12)
    lapse(connection, *[lease.job_id for lease in leases])
    connection.execute(
        "CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " PERFORM pg_advisory_xact_lock(42); RETURN NEW; END $$"
    )
    connection.execute(
        "CREATE TRIGGER hold BEFORE INSERT ON pgqueue.job_event"
        " FOR EACH ROW EXECUTE FUNCTION public.hold()"
    )
    with psycopg.connect(conninfo, autocommit=True) as holder:
        holder.execute("SELECT pg_advisory_lock(42)")
        later = Later(conninfo, lambda other: other.reap())
        later.wait_blocked(connection)
        assert store.renew(*leases[11].ref, ttl=60)
        holder.execute("SELECT pg_advisory_unlock(42)")
        assert later.result() == 11
    assert store.succeed(*leases[11].ref)
    assert not store.succeed(*leases[0].ref)


def test_the_reaper_and_a_fresh_claim(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-16, FIELD 17: a new attempt is never overwritten
    reap_at_once(store)
    old = publish_and_claim(store)
    lapse(connection, old.job_id)
    assert store.reap() == 1
    with psycopg.connect(conninfo) as claimer:
        new = claim_one(JobStore(claimer))
        connection.execute("SELECT 1")
        assert store.reap() == 0
        claimer.commit()
    connection.execute("UPDATE pgqueue.job_queue SET leased_until = now() + interval '1 hour'")
    assert store.reap() == 0
    assert not store.fail_permanent(*old.ref, FailPermanent("fatal", "late"))
    assert store.succeed(*new.ref)


def test_two_reapers(conninfo: str, store: JobStore, connection: psycopg.Connection) -> None:
    # S-16: whoever comes second finds nothing to do
    reap_at_once(store)
    store.enqueue_many([publication() for _ in range(6)])
    leases = claim(store)
    lapse(connection, *[lease.job_id for lease in leases])
    with psycopg.connect(conninfo) as first:
        assert JobStore(first).reap(limit=4) == 4
        assert store.reap() == 2
        first.commit()
    assert store.reap() == 0
    counts = rows(connection, "SELECT deliveries FROM pgqueue.job_queue")
    assert [each["deliveries"] for each in counts] == [1] * 6


def test_batch_verdicts_skip_what_others_hold(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6: an open transaction that holds one job stalls no other
    store.enqueue_many([publication() for _ in range(6)])
    leases = claim(store)
    held = leases[2]
    with row_locked(conninfo, held.job_id):
        refs = [lease.ref for lease in leases]
        answers = [None if lease is held else True for lease in leases]
        assert store.renew_many(refs) == answers
        sent = [(ref, Progress()) for ref in refs]
        result = store.exchange(sent, [], lease_name="w1", lease_holder="h")
        assert result.settled == answers
        assert store.settle([(ref, FailTransient("E", "x", delay=0)) for ref in refs]) == answers
    assert store.succeed(*held.ref)


def test_two_batches_in_opposite_order_do_not_deadlock(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6: locks are taken in job order, whatever the order of the verdicts
    store.enqueue_many([publication() for _ in range(50)])
    refs = [lease.ref for lease in claim(store, limit=50)]

    def renew(order: list[tuple[UUID, UUID]]) -> None:
        with another(conninfo) as mine:
            for _ in range(30):
                mine.renew_many(order)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(renew, refs), pool.submit(renew, refs[::-1])]:
            done.result(30)
    assert _deadlocks(connection) == 0


def _deadlocks(connection: psycopg.Connection) -> int:
    # A backend that ended has reported; a living one does so within a second of being idle.
    query = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    return int(rows(connection, query)[0]["deadlocks"])


def test_everything_at_once_for_a_while(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-6, D-12: purge, renewal, claim, reaper, sweeper and verdicts without a deadlock
    reap_at_once(store)
    store.config_set("queue.lease.ttl_seconds", 0.05)
    store.config_set("queue.retry.max_attempts.default", 2)
    stop = time.monotonic() + 4
    errors: list[BaseException] = []

    def publisher(mine: JobStore, dice: random.Random) -> None:
        mine.enqueue_many(
            [
                publication(
                    queue_name=dice.choice("ab"),
                    priority=dice.randrange(3),
                    expires_in=dice.choice([None, 0.05]),
                    acks_late=dice.choice([True, False, None]),
                    idempotency_key=dice.choice([None, None, f"k{dice.randrange(20)}"]),
                    stamps=Stamps(backoff_base_s=0.01),
                )
            ]
        )

    def worker(mine: JobStore, dice: random.Random) -> None:
        leases: list[Lease] = claim(mine, ["a", "b"], 12, name=f"w{dice.randrange(3)}")
        dice.shuffle(leases)
        verdicts = [
            (lease.ref, dice.choice([Progress(), Succeed(), Release(), Release(requeue=True)]))
            for lease in leases
        ]
        mine.exchange(verdicts, [ClaimRequest(["a"], 2)], lease_name="w", lease_holder="h")
        mine.renew_many([lease.ref for lease in leases])
        for lease in leases[:3]:
            mine.fail_transient(*lease.ref, FailTransient("E", "x", delay=dice.choice([None, 0])))
            mine.fail_permanent(*lease.ref, FailPermanent("fatal", "x"))

    def reaper(mine: JobStore, dice: random.Random) -> None:
        mine.reap(limit=50)
        mine.sweep_expired(limit=50)
        mine.prune()

    def operator(mine: JobStore, dice: random.Random) -> None:
        mine.queue_purge(dice.choice("ab"))
        for letter in mine.dead_letters(limit=5):
            mine.dead_letter_replay(letter.dead_letter_id)

    def repeat(number: int, act: object) -> None:
        dice = random.Random(number)
        with another(conninfo) as mine:
            try:
                while time.monotonic() < stop and not errors:
                    act(mine, dice)  # type: ignore[operator]
            except StoreError as error:
                errors.append(error)

    acts = [publisher, publisher, worker, worker, worker, reaper, reaper, operator]
    with ThreadPoolExecutor(len(acts)) as pool:
        for done in [pool.submit(repeat, *each) for each in enumerate(acts)]:
            done.result(60)
    assert errors == []
    assert _deadlocks(connection) == 0
    both = rows(
        connection,
        "SELECT job_id FROM pgqueue.job_queue JOIN pgqueue.job_dead_letter d USING (job_id)"
        " WHERE d.resolved_at IS NULL",
    )
    assert both == []


def test_a_publish_again_while_the_job_dies(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-7, T-10: the lost answer is asked for again at the very moment of the death
    lease = publish_and_claim(store)
    again = publication(job_id=lease.job_id)
    with psycopg.connect(conninfo) as worker:
        assert JobStore(worker).fail_permanent(*lease.ref, FailPermanent("fatal", "boom"))
        later = Later(conninfo, lambda other: other.enqueue(again))
        later.wait_blocked(connection)
        worker.commit()
        assert later.result().created is False
    assert row(connection, lease.job_id) is None
    assert len(letters(connection, lease.job_id)) == 1


def test_a_claim_and_a_purge(conninfo: str, store: JobStore) -> None:
    # S-2: what is being claimed is not purged, and the other way round
    store.enqueue_many([publication() for _ in range(4)])
    with psycopg.connect(conninfo) as claimer:
        mine = claim(JobStore(claimer), limit=2)
        assert store.queue_purge("q") == 2
        claimer.commit()
    assert all(store.succeed(*lease.ref) for lease in mine)
