# SPDX-License-Identifier: BSD-3-Clause
"""Jobs for tests of the store: made, claimed, looked at and aged in one line each."""

from __future__ import annotations

import contextlib
import itertools
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import psycopg
from psycopg.rows import dict_row

from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Lease, Publication

from .wait import wait_until

_numbers = itertools.count(1)


def publication(queue_name: str = "q", **fields: Any) -> Publication:
    """A small message; ids are ordered as a publisher's are."""
    job_id = uuid.UUID(int=(uuid.uuid4().int >> 32) | next(_numbers) << 96)
    return Publication(
        **{
            "job_id": job_id,
            "queue_name": queue_name,
            "envelope": '{"headers": {}}',
            "body": b"[[], {}, {}]",
            "job_kind": "app.work",
            "task_id": f"task-{job_id}",
            **fields,
        }
    )


def publish(store: JobStore, queue_name: str = "q", **fields: Any) -> Publication:
    made = publication(queue_name, **fields)
    store.enqueue(made)
    return made


def claim(
    store: JobStore,
    queues: str | Sequence[str] = "q",
    limit: int = 10,
    *,
    name: str = "w1",
    holder: str = "w1@host",
    **request: Any,
) -> list[Lease]:
    names = [queues] if isinstance(queues, str) else list(queues)
    return store.claim(ClaimRequest(names, limit, **request), lease_name=name, lease_holder=holder)


def claim_one(store: JobStore, queue_name: str = "q", **options: Any) -> Lease:
    (lease,) = claim(store, queue_name, 1, **options)
    return lease


def publish_and_claim(store: JobStore, **fields: Any) -> Lease:
    """A published job, claimed: the only due one of its queue."""
    made = publish(store, **fields)
    lease = claim_one(store, made.queue_name)
    assert lease.job_id == made.job_id
    return lease


def rows(connection: psycopg.Connection[Any], query: str, *parameters: Any) -> list[dict[str, Any]]:
    with connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(query, parameters).fetchall()


def row(connection: psycopg.Connection[Any], job_id: uuid.UUID) -> dict[str, Any] | None:
    """The live row of a job, None if there is none."""
    found = rows(connection, "SELECT * FROM pgqueue.job_queue WHERE job_id = %s", job_id)
    return found[0] if found else None


def events(connection: psycopg.Connection[Any], event_type: str = "%") -> list[dict[str, Any]]:
    query = "SELECT * FROM pgqueue.job_event WHERE event_type LIKE %s ORDER BY event_id"
    return rows(connection, query, event_type)


def letters(connection: psycopg.Connection[Any], job_id: uuid.UUID) -> list[dict[str, Any]]:
    query = "SELECT * FROM pgqueue.job_dead_letter WHERE job_id = %s ORDER BY dead_letter_id"
    return rows(connection, query, job_id)


def lapse(connection: psycopg.Connection[Any], *job_ids: uuid.UUID) -> None:
    """Let the leases run out, as if their time had passed."""
    connection.execute(
        "UPDATE pgqueue.job_queue SET leased_until = clock_timestamp() - interval '1 second'"
        " WHERE status = 'leased' AND job_id = ANY (%s)",
        [list(job_ids)],
    )


def make_due(connection: psycopg.Connection[Any], *job_ids: uuid.UUID) -> None:
    """Let the delay of waiting jobs be over."""
    connection.execute(
        "UPDATE pgqueue.job_queue SET process_after = clock_timestamp() - interval '1 second'"
        " WHERE job_id = ANY (%s)",
        [list(job_ids)],
    )


def reap_at_once(store: JobStore) -> None:
    """Shorten the time after a server's start in which nothing is reaped."""
    store.config_set("queue.lease.ttl_seconds", 0.001)


def bury(store: JobStore, code: str = "fatal", **fields: Any) -> int:
    """Publish, claim and refuse a job for good; the id of its dead letter."""
    from kombu_pgqueue.verdicts import FailPermanent

    lease = publish_and_claim(store, **fields)
    assert store.fail_permanent(*lease.ref, FailPermanent(code, "boom"))
    return int(letters(store.connection, lease.job_id)[-1]["dead_letter_id"])


@contextlib.contextmanager
def another(conninfo: str) -> Iterator[JobStore]:
    """A store on a session of its own."""
    with psycopg.connect(conninfo, autocommit=True) as connection:
        yield JobStore(connection)


@contextlib.contextmanager
def row_locked(conninfo: str, *job_ids: uuid.UUID) -> Iterator[None]:
    """Another transaction holds the rows."""
    with psycopg.connect(conninfo) as connection:
        connection.execute(
            "SELECT FROM pgqueue.job_queue WHERE job_id = ANY (%s) FOR UPDATE", [list(job_ids)]
        )
        yield
        connection.rollback()


class Later:
    """A call in a thread, on a session of its own, that is expected to block for a while."""

    def __init__(self, conninfo: str, call: Callable[[JobStore], Any]) -> None:
        self._connection = psycopg.connect(conninfo, autocommit=True)
        self._call = call
        self._outcome: list[Any] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcome.append(self._call(JobStore(self._connection)))
        except Exception as exc:  # noqa: BLE001 - told to the test by `result`
            self._outcome.append(exc)

    def wait_blocked(self, observer: psycopg.Connection[Any]) -> None:
        """Until the server says that the session waits for a lock."""
        pid = self._connection.info.backend_pid
        query = "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'"
        wait_until(
            lambda: self._outcome or observer.execute(query, [pid]).fetchone(),
            10,
            "the other session waits for a lock",
        )
        assert not self._outcome, f"did not block: {self._outcome}"

    def result(self, timeout: float = 20.0) -> Any:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "still blocked"
        self._connection.close()
        if isinstance(self._outcome[0], Exception):
            raise self._outcome[0]
        return self._outcome[0]
