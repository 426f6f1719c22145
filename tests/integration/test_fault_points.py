# SPDX-License-Identifier: BSD-3-Clause
"""Errors forced where a job moves to the dead letters: it is in one table, whatever fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from uuid import UUID

import psycopg
import pytest

from kombu_pgqueue.errors import StoreError
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Lease, Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Release, Succeed
from tests.support.jobs import (
    Later,
    claim,
    lapse,
    publication,
    publish_and_claim,
    reap_at_once,
    rows,
)

FATAL = FailPermanent("fatal", "boom")
LAST = FailTransient("E", "once too often")


@contextmanager
def failing(
    connection: psycopg.Connection, table: str, timing: str, job_id: UUID
) -> Iterator[None]:
    """An INSERT for this job into the table fails, before or after the row is there."""
    connection.execute(
        "CREATE FUNCTION public.fail() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF NEW.job_id = '{job_id}' THEN RAISE EXCEPTION 'forced'; END IF; RETURN NEW; END $$"
    )
    connection.execute(
        f"CREATE TRIGGER forced {timing} INSERT ON pgqueue.{table}"
        " FOR EACH ROW EXECUTE FUNCTION public.fail()"
    )
    yield
    connection.execute("DROP FUNCTION public.fail() CASCADE")


def places(connection: psycopg.Connection, job_id: UUID) -> list[str]:
    found = rows(
        connection,
        "SELECT 'live' AS place FROM pgqueue.job_queue WHERE job_id = %s UNION ALL"
        " SELECT 'dead' FROM pgqueue.job_dead_letter WHERE job_id = %s",
        job_id,
        job_id,
    )
    return [each["place"] for each in found]


def _refuse(store: JobStore, lease: Lease) -> object:
    return store.fail_permanent(*lease.ref, FATAL)


def _exhaust(store: JobStore, lease: Lease) -> object:
    return store.fail_transient(*lease.ref, LAST)


def _requeue(store: JobStore, lease: Lease) -> object:
    return store.release(*lease.ref, requeue=True)


def _move(store: JobStore, lease: Lease) -> object:
    query = "SELECT pgqueue.fn_job_move_to_dead_letter(%s, 'fatal')"
    try:
        found = store.connection.execute(query, [lease.job_id]).fetchone()
    except psycopg.Error as error:
        raise StoreError(str(error)) from error
    return found and found[0]


def _reap(store: JobStore, lease: Lease) -> object:
    store.progress(*lease.ref, acks_late=False)
    lapse(store.connection, lease.job_id)
    if store.reap() == 0:
        raise StoreError("not reaped")
    return True


def _sweep(store: JobStore, lease: Lease) -> object:
    store.release(*lease.ref)
    store.connection.execute("UPDATE pgqueue.job_queue SET expires_at = now() - interval '1 s'")
    if store.sweep_expired() == 0:
        raise StoreError("not swept")
    return True


MOVES: dict[str, Callable[[JobStore, Lease], object]] = {
    "fail_permanent": _refuse,
    "fail_transient": _exhaust,
    "delivery limit": _requeue,
    "operator": _move,
    "reaper": _reap,
    "sweeper": _sweep,
}


@pytest.fixture
def tight(store: JobStore) -> JobStore:
    """Any failure, requeue or loss is the last one."""
    reap_at_once(store)
    store.config_set("queue.retry.max_attempts.default", 1)
    store.config_set("queue.delivery_limit", 1)
    return store


def test_a_forced_error_leaves_the_job_in_one_table(
    tight: JobStore, connection: psycopg.Connection
) -> None:
    # S-7
    for number, (name, move) in enumerate(MOVES.items()):
        for table in ("job_dead_letter", "job_event"):
            for timing in ("BEFORE", "AFTER"):
                lease = publish_and_claim(
                    tight, queue_name=f"q{number}", stamps=Stamps(visibility_timeout_s=60)
                )
                with failing(connection, table, timing, lease.job_id):
                    with pytest.raises(StoreError):
                        move(tight, lease)
                    assert places(connection, lease.job_id) == ["live"], (name, table, timing)
                if name == "reaper":
                    assert tight.reap() == 1
                elif name == "sweeper":
                    assert tight.sweep_expired() == 1
                else:
                    assert move(tight, lease) is True
                assert places(connection, lease.job_id) == ["dead"], (name, table, timing)


def test_a_replay_that_fails_changes_nothing(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-7
    lease = publish_and_claim(store)
    store.fail_permanent(*lease.ref, FATAL)
    (letter,) = store.dead_letters()
    for table in ("job_queue", "job_event"):
        with failing(connection, table, "AFTER", lease.job_id):
            with pytest.raises(StoreError, match="forced"):
                store.dead_letter_replay(letter.dead_letter_id)
            assert places(connection, lease.job_id) == ["dead"]
            (still,) = store.dead_letters()
            assert still.resolved_at is None
    assert store.dead_letter_replay(letter.dead_letter_id) == "replayed"


def test_neighbours_of_a_failing_move(tight: JobStore, connection: psycopg.Connection) -> None:
    # S-6: in a batch of failures, in the reaper's and in the sweeper's
    tight.enqueue_many([publication(stamps=Stamps(visibility_timeout_s=60)) for _ in range(3)])
    a, b, c = claim(tight)
    with failing(connection, "job_dead_letter", "BEFORE", b.job_id):
        answers = tight.settle([(a.ref, FATAL), (b.ref, LAST), (c.ref, LAST)])
    assert answers == [True, None, True]
    assert [places(connection, each.job_id) for each in (a, b, c)] == [["dead"], ["live"], ["dead"]]
    assert tight.succeed(*b.ref)

    tight.enqueue_many([publication("s", expires_in=-1) for _ in range(3)])
    ids = [each["job_id"] for each in rows(connection, "SELECT job_id FROM pgqueue.job_queue")]
    with failing(connection, "job_event", "AFTER", ids[1]):
        assert tight.sweep_expired() == 2
    assert [places(connection, each) for each in ids] == [["dead"], ["live"], ["dead"]]


def test_an_exchange_that_fails_is_undone_whole_and_can_be_taken_apart(
    tight: JobStore, connection: psycopg.Connection
) -> None:
    # S-6, D-12
    tight.enqueue_many([publication() for _ in range(3)])
    a, b, c = claim(tight)
    verdicts = [(a.ref, Succeed()), (b.ref, Release(requeue=True)), (c.ref, Release())]
    with failing(connection, "job_dead_letter", "BEFORE", b.job_id):
        with pytest.raises(StoreError, match="forced"):
            tight.exchange(verdicts, [], lease_name="w1", lease_holder="h")
        assert [places(connection, each.job_id) for each in (a, b, c)] == [["live"]] * 3
        assert tight.settle(verdicts) == [True, None, True]
    assert tight.settle(verdicts) == [False, True, False]
    assert [places(connection, each.job_id) for each in (a, b, c)] == [[], ["dead"], ["live"]]


def test_a_move_that_is_cut_off_in_the_middle(
    conninfo: str, tight: JobStore, connection: psycopg.Connection
) -> None:
    # S-7: the session dies while its INSERT into the dead letters is blocked
    lease = publish_and_claim(tight)
    with psycopg.connect(conninfo) as blocker:
        blocker.execute("LOCK TABLE pgqueue.job_dead_letter IN SHARE MODE")
        later = Later(conninfo, lambda other: _refuse(other, lease))
        later.wait_blocked(connection)
        assert places(connection, lease.job_id) == ["live"]
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        with pytest.raises(StoreError):
            later.result()
        blocker.rollback()
    assert places(connection, lease.job_id) == ["live"]
    assert tight.fail_permanent(*lease.ref, FATAL)
    assert places(connection, lease.job_id) == ["dead"]


def test_a_move_that_waits(conninfo: str, tight: JobStore, connection: psycopg.Connection) -> None:
    # S-7
    lease = publish_and_claim(tight)
    with psycopg.connect(conninfo) as blocker:
        blocker.execute("LOCK TABLE pgqueue.job_event IN SHARE MODE")
        later = Later(conninfo, lambda other: _exhaust(other, lease))
        later.wait_blocked(connection)
        assert places(connection, lease.job_id) == ["live"]
        assert claim(tight) == []
        blocker.rollback()
        assert later.result() is True
    assert places(connection, lease.job_id) == ["dead"]
