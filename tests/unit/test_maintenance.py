# SPDX-License-Identifier: BSD-3-Clause
"""S-16: when a leader may reap, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from kombu_pgqueue.maintenance import Maintenance

TTL = 6.0


class Store:
    """Grants the leadership and notes when it is asked to reap."""

    def __init__(self) -> None:
        self.now = 0.0
        self.reaped: list[float] = []

    def runtime_lease_acquire(self, *_: Any) -> bool:
        return True

    def reap(self, *, limit: int) -> int:
        self.reaped.append(self.now)
        return 0

    def sweep_expired(self, *, limit: int) -> int:
        return 0

    def prune(self, *, limit: int) -> int:
        return 0


@pytest.fixture
def store() -> Store:
    return Store()


def work(store: Store, maintenance: Maintenance, begin: float, end: float) -> Iterator[float]:
    """Do what is due at every tenth of a second; the times of the reaper's runs."""
    store.reaped.clear()
    for tenth in range(int(begin * 10), int(end * 10)):
        store.now = tenth / 10
        while maintenance.due_at() <= store.now:
            maintenance.step(store, store.now)  # type: ignore[arg-type]
    yield from store.reaped


def test_a_leader_reaps_at_once_and_then_regularly(store: Store) -> None:
    times = list(work(store, Maintenance("me", TTL), 100, 110))
    assert times[0] == 100
    assert max(later - earlier for earlier, later in pairwise(times)) <= 2.2


def test_after_a_pause_of_everything_the_others_get_one_lease_time(store: Store) -> None:
    # A server stopped for longer than a lease, or a suspended machine: no connection was lost,
    # and everybody's renewal comes late.
    maintenance = Maintenance("me", TTL)
    list(work(store, maintenance, 100, 110))
    times = list(work(store, maintenance, 110 + 2 * TTL, 150))
    assert times[0] == pytest.approx(110 + 3 * TTL, abs=0.2)


def test_a_little_late_is_no_pause(store: Store) -> None:
    maintenance = Maintenance("me", TTL)
    list(work(store, maintenance, 100, 110))
    assert next(work(store, maintenance, 110 + TTL / 4, 120)) < 110 + TTL / 2
