# SPDX-License-Identifier: BSD-3-Clause
"""This process as a holder of leases: its connection, its name, its sign of life, its renewal."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import sql

from kombu_pgqueue.connect import connect
from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.maintenance import Maintenance
from kombu_pgqueue.options import Options
from kombu_pgqueue.store import ClaimRequest, ExchangeResult, JobRef, JobStore
from kombu_pgqueue.store.errors import store_errors
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import Verdict

logger = logging.getLogger(__name__)

DEFAULT_TTL = 60.0
RETRY_FIRST, RETRY_LONGEST = 0.1, 5.0
#: How often a holder whose lock is still with its own dead backend tries to take it.
ANNOUNCE_EVERY = 1.0


class Holder:
    """Belongs to the session's thread. Times are monotonic seconds."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._store: JobStore | None = None
        self.lease_name = f"{socket.gethostname()}:{os.getpid()}:{uuid4()}"
        self._lease_holder = ""
        self._token = uuid4()
        self._ttl = DEFAULT_TTL
        self._maintenance: Maintenance | None = None
        self._announced_at = math.inf
        self._notified: list[str] = []
        self._delay = 0.0
        self.retry_at = 0.0
        self.renew_at = math.inf
        #: Until then our leases stand, connected or not.
        self.safe_until = time.monotonic() + DEFAULT_TTL

    @property
    def connected(self) -> bool:
        return self._store is not None

    @property
    def store(self) -> JobStore:
        if self._store is None:
            raise StoreUnavailable("no connection to the database")
        return self._store

    def connect(self, *, known: Sequence[UUID]) -> bool:
        """Connect and take up the lease again; `known` are the tokens of the jobs we hold.

        True if there was a connection before. Raises `PgQueueError`.
        """
        again = self._maintenance is not None
        connection = connect(
            self._options, role="consume", application_name=self._options.application_name
        )
        try:
            store = JobStore(connection, schema=self._options.schema)
            if not again:
                self._introduce(store)
            self._limit_waiting(connection)
            now = time.monotonic()
            self._announced_at = math.inf if store.announce_holder(self.lease_name) else now
            self._take_lease(store)
            if again:
                lost = store.release_unknown(self.lease_name, known)
                if lost:
                    logger.info("Gave %d jobs back whose claim was never answered", lost)
            if self._options.use_notify:
                connection.add_notify_handler(lambda notify: self._notified.append(notify.payload))
                channel = sql.Identifier(store.wake_channel)
                with store_errors():
                    connection.execute(sql.SQL("LISTEN {}").format(channel))
        except BaseException:
            connection.close()
            raise
        self._store = store
        self._delay = 0.0
        if again and self._maintenance is not None:
            self._maintenance.hold_off(now)
        return again

    def _introduce(self, store: JobStore) -> None:
        lock = store.holder_lock(self.lease_name)
        self._lease_holder = f"{socket.gethostname()}:{os.getpid()} lock={lock}"
        self._ttl = self._options.lease_ttl or _number(store.config_get("queue.lease.ttl_seconds"))
        self._maintenance = Maintenance(self._lease_holder, self._ttl)

    def _limit_waiting(self, connection: psycopg.Connection[Any]) -> None:
        # Whatever blocks, blocks the renewal behind it.
        patience = {"lock_timeout": self._ttl / 12, "statement_timeout": self._ttl / 2}
        for name, limit in patience.items():
            with store_errors():
                value = f"{max(int(limit * 1000), 100)}ms"
                connection.execute("SELECT set_config(%s, %s, false)", (name, value))

    def _take_lease(self, store: JobStore) -> None:
        asked = time.monotonic()
        if not store.runtime_lease_acquire(
            self.lease_name, self._lease_holder, self._token, self._ttl
        ):
            raise StoreError(f"the lease {self.lease_name!r} belongs to somebody else")
        self._renewed(asked)

    def _renewed(self, asked: float) -> None:
        self.renew_at = asked + self._ttl / 3
        self.safe_until = asked + self._ttl

    def exchange(
        self,
        verdicts: Sequence[tuple[JobRef, Verdict]],
        claims: Sequence[ClaimRequest],
        now: float,
    ) -> ExchangeResult:
        """One round trip; carries the renewal when that is due within a sixth of the lease."""
        renewing = now >= self.renew_at - self._ttl / 6
        result = self.store.exchange(
            verdicts,
            claims,
            lease_name=self.lease_name,
            lease_holder=self._lease_holder,
            renew=self._token if renewing else None,
            lease_ttl=self._ttl,
        )
        if result.lease_stands:
            self._renewed(now)
        elif result.lease_stands is False:
            logger.warning("The lease of this worker was taken away; taking it up again")
            self._take_lease(self.store)
        return result

    def claim(self, request: ClaimRequest) -> list[Lease]:
        return self.store.claim(
            request, lease_name=self.lease_name, lease_holder=self._lease_holder
        )

    def settle(self, ref: JobRef, verdict: Verdict) -> bool | None:
        """One verdict on its own, committed durably; None: its row is locked, try again."""
        return self.store.settle([(ref, verdict)])[0]

    def notify(self, queues: Iterable[str]) -> None:
        self.store.notify(queues)

    def next_due(self, queues: Sequence[str]) -> float | None:
        return self.store.next_due(queues)

    def raise_flag(self, queues: Sequence[str]) -> None:
        if self._options.use_notify:
            self.store.raise_wake_flag(queues)

    def lower_flag(self, queues: Sequence[str]) -> None:
        if self._options.use_notify:
            self.store.lower_wake_flag(queues)

    def maintain_at(self, *, chores: bool) -> float:
        """When `maintain` has something to do."""
        if not chores or self._maintenance is None:
            return self._announced_at
        return min(self._maintenance.due_at(), self._announced_at)

    def maintain(self, now: float, *, chores: bool) -> bool:
        """One step of keeping ourselves known and, with `chores`, of the database's upkeep."""
        if now >= self._announced_at:
            done = self.store.announce_holder(self.lease_name)
            self._announced_at = math.inf if done else now + ANNOUNCE_EVERY
        if not chores or self._maintenance is None or now < self._maintenance.due_at():
            return False
        self._maintenance.step(self.store, now)
        return True

    def fds(self) -> list[int]:
        """What to poll besides the bell."""
        return [] if self._store is None else [self._store.connection.pgconn.socket]

    def read_notifications(self) -> None:
        """The socket can be read. Raises `StoreUnavailable`, for so a lost connection shows."""
        pgconn = self.store.connection.pgconn
        with store_errors():
            pgconn.consume_input()
        while notify := pgconn.notifies():
            self._notified.append(notify.extra.decode())

    def notified(self) -> list[str]:
        """Queues that notifications named since the last call, those read by the way included."""
        names, self._notified = self._notified, []
        return list(dict.fromkeys(names))

    def lost(self, now: float) -> bool:
        """Forget the connection and plan the next attempt; True if there was one."""
        store, self._store = self._store, None
        self._delay = min(max(self._delay * 2, RETRY_FIRST), RETRY_LONGEST)
        self.retry_at = now + (self._delay if store is None else 0.0)
        if store is not None:
            store.connection.close()
        return store is not None

    def retry_soon(self, now: float) -> None:
        """Something failed that is no lost connection: take breath."""
        time.sleep(0.1)

    def leave(self) -> None:
        """End the lease and the connection."""
        store, self._store = self._store, None
        if store is None:
            return
        try:
            if self._maintenance is not None:
                self._maintenance.stop(store)
            store.runtime_lease_release(self.lease_name, self._token)
        except StoreError as exc:
            logger.info("Could not end the lease of this worker: %s", exc)
        finally:
            store.connection.close()


def _number(value: Any) -> float:
    """`job_config` holds JSON; anything that is no positive number is as good as not set."""
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    return DEFAULT_TTL
