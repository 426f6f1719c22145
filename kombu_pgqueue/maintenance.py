# SPDX-License-Identifier: BSD-3-Clause
"""Reaper, sweeper and retention, run by whichever worker leads.

Everything goes in small batches between the session's other work, one at a time, so that renewals
and claims never wait long for it. An error here is logged and tried again; it ends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID, uuid4

from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.store import JobStore

logger = logging.getLogger(__name__)

LEASE_NAME = "maintenance"
#: Seconds between looks at the leases, and how long a leader stays one without renewing.
REAP_EVERY = 2.0
LEADER_TTL = 5.0
SWEEP_EVERY = 5.0
PRUNE_EVERY = 60.0
BATCH = 200


@dataclass
class _Chore:
    name: str
    every: float
    run: Callable[[JobStore], int]
    at: float = 0.0


class Maintenance:
    """The chores of one session. Times are monotonic seconds."""

    def __init__(self, lease_holder: str, lease_ttl: float) -> None:
        self._holder = lease_holder
        self._token: UUID = uuid4()
        self._reap_every = min(REAP_EVERY, lease_ttl / 3)
        self._lead_at = 0.0
        self._leading = False
        self._lease_ttl = lease_ttl
        self._chores = [
            _Chore("reap", self._reap_every, lambda store: store.reap(limit=BATCH)),
            _Chore("sweep_expired", SWEEP_EVERY, lambda store: store.sweep_expired(limit=BATCH)),
            _Chore("prune", PRUNE_EVERY, lambda store: store.prune(limit=BATCH)),
        ]

    def hold_off(self, now: float) -> None:
        """After an outage of our own: whoever else lost its connection gets one lease time."""
        self._chores[0].at = now + self._lease_ttl

    def _paused(self, now: float) -> bool:
        """Did everything stand still for so long that other leases may have run out meanwhile?

        A paused server or machine drops no connection. When it goes on, we must not be faster with
        the reaper than the others with their renewals.
        """
        return bool(self._lead_at) and now - self._lead_at > self._lease_ttl / 2

    def due_at(self) -> float:
        """When there is something to do."""
        if not self._leading:
            return self._lead_at
        return min(self._lead_at, *(chore.at for chore in self._chores))

    def step(self, store: JobStore, now: float) -> bool:
        """Do at most one batch of one chore; True if something changed that others may wait for.

        Raises `StoreUnavailable`.
        """
        try:
            if now >= self._lead_at:
                if self._paused(now):
                    self.hold_off(now)
                self._lead_at = now + self._reap_every
                self._leading = store.runtime_lease_acquire(
                    LEASE_NAME, self._holder, self._token, max(LEADER_TTL, 2 * self._reap_every)
                )
                return False
            return self._run_chore(store, now) if self._leading else False
        except StoreUnavailable:
            self._leading = False
            raise
        except StoreError as exc:
            logger.error("Maintenance: cannot lead: %s", exc)
            return False

    def _run_chore(self, store: JobStore, now: float) -> bool:
        chore = min(self._chores, key=lambda each: each.at)
        if now < chore.at:
            return False
        chore.at = now + chore.every
        try:
            count = chore.run(store)
        except StoreUnavailable:
            raise
        except StoreError as exc:
            logger.error("Maintenance: %s failed and is tried again: %s", chore.name, exc)
            return False
        if count:
            logger.info("Maintenance: %s: %d", chore.name, count)
        if count >= BATCH:
            chore.at = now
        return bool(count)

    def stop(self, store: JobStore) -> None:
        """Let another one lead."""
        if self._leading:
            self._leading = False
            store.runtime_lease_release(LEASE_NAME, self._token)
