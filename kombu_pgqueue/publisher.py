# SPDX-License-Identifier: BSD-3-Clause
"""The publishing sessions of a process and a database, shared by all its kombu connections."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import psycopg
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.pool import QueuePool

from kombu_pgqueue.connect import connect
from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.options import Options
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Enqueued, Publication

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: How long a thread waits for one of the shared connections, in seconds.
PATIENCE = 30.0


class Publisher:
    """A few connections, each lent for one short piece of work at a time."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._pool = self._new_pool()
        self._mending = threading.Lock()

    def run(self, work: Callable[[JobStore], T]) -> T:
        """Do `work` with a store, twice if a connection that had been lying around was dead.

        So `work` must be harmless when repeated: a publish is, since it carries its job id.
        Raises `StoreUnavailable`, `StoreError`.
        """
        try:
            return self._run_once(work, first=True)
        except _Stale:
            return self._run_once(work, first=False)

    def publish(self, publications: Sequence[Publication]) -> None:
        """Enqueue all or none, durably; then wake whoever waits for them."""
        answers: list[Enqueued] = []

        def work(store: JobStore) -> None:
            # What is committed is not sent again only because waking failed: a worker may have run
            # it meanwhile, and then nothing would be left to tell that it is the same job.
            if not answers and len(publications) == 1:
                answers.append(store.enqueue(publications[0]))
            elif not answers:
                answers.extend(store.enqueue_many(publications))
            if self.options.use_notify:
                # A consumer that sleeps looks again after its poll interval anyway.
                waiting = {
                    publication.queue_name
                    for publication, answer in zip(publications, answers, strict=True)
                    if answer.waiting and publication.delay < self.options.poll_interval
                }
                if waiting:
                    store.notify(waiting)

        if not publications:
            return
        try:
            self.run(work)
        except StoreError as exc:
            if not answers:
                raise
            logger.info("Published, but could not wake the consumers: %s", exc)

    def ping(self) -> None:
        """Raise `StoreUnavailable` unless the database answers."""
        self.run(lambda store: store.ping())

    def close(self) -> None:
        """Close the connections that are not lent."""
        self._pool.dispose()

    def _run_once(self, work: Callable[[JobStore], T], *, first: bool) -> T:
        pool = self._pool
        try:
            lent = pool.connect()
        except PoolTimeout as exc:
            raise StoreUnavailable(
                f"all {self.options.publish_connections} publishing connections are busy"
            ) from exc
        used = "store" in lent.info
        try:
            if not used:
                lent.info["store"] = self._new_store(lent.driver_connection)
            return work(cast(JobStore, lent.info["store"]))
        except StoreUnavailable:
            lent.invalidate()
            self._replace(pool)
            if used and first:
                raise _Stale from None
            raise
        except BaseException:
            # Interrupted in the middle: what would come next on it is anybody's guess.
            if _unclean(lent.driver_connection):
                lent.invalidate()
            raise
        finally:
            lent.close()

    def _replace(self, pool: QueuePool) -> None:
        """One is dead, so the others are too: an outage costs one error, not one each."""
        with self._mending:
            if self._pool is pool:
                self._pool = self._new_pool()
        pool.dispose()

    def _new_pool(self) -> QueuePool:
        return QueuePool(
            cast(Any, self._connect),
            pool_size=self.options.publish_connections,
            max_overflow=0,
            timeout=PATIENCE,
            use_lifo=True,
            reset_on_return=None,
        )

    def _connect(self) -> psycopg.Connection[Any]:
        return connect(self.options, role="publish", application_name=self.options.application_name)

    def _new_store(self, connection: Any) -> JobStore:
        return JobStore(connection, schema=self.options.schema)


class _Stale(Exception):
    """A connection that had been used before turned out to be dead."""


def _unclean(connection: Any) -> bool:
    if connection is None:
        return False
    status = connection.pgconn.transaction_status
    return bool(status != psycopg.pq.TransactionStatus.IDLE)
