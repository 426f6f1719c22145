# SPDX-License-Identifier: BSD-3-Clause
"""T-10: what was committed is not published a second time, whatever fails after it."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from kombu_pgqueue.envelope import new_job_id
from kombu_pgqueue.errors import StoreUnavailable
from kombu_pgqueue.options import parse_url
from kombu_pgqueue.publisher import Publisher
from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Publication


@pytest.fixture
def publisher(dsn: str) -> Iterator[Publisher]:
    publisher = Publisher(parse_url(dsn))
    publisher.ping()  # from now on its connection counts as one that may have gone stale
    yield publisher
    publisher.close()


@pytest.mark.parametrize("failures", [1, 9])
@pytest.mark.parametrize("count", [1, 3])
def test_a_session_lost_between_commit_and_wake_up(
    count: int,
    failures: int,
    publisher: Publisher,
    store: JobStore,
    connection: psycopg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store.raise_wake_flag(["q"])
    finished = 0
    left = failures

    def lost(self: JobStore, queues: object) -> None:
        nonlocal finished, left
        # A worker was as fast as that: all is done, and the rows are gone.
        finished += connection.execute("DELETE FROM pgqueue.job_queue").rowcount
        left -= 1
        if left >= 0:
            raise StoreUnavailable("terminating connection due to administrator command")

    monkeypatch.setattr(JobStore, "notify", lost)
    publisher.publish(
        [Publication(new_job_id(), "q", "{}", b"", job_kind="t") for _ in range(count)]
    )
    assert finished == count
    assert connection.execute("SELECT count(*) FROM pgqueue.job_queue").fetchone() == (0,)
