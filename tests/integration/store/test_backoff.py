# SPDX-License-Identifier: BSD-3-Clause
"""The backoff in SQL, and the guard of the configuration."""

from __future__ import annotations

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from tests.support.jobs import (
    events,
    publication,
    row,
    rows,
)


def backoff(connection: psycopg.Connection, *arguments: object) -> float:
    found = connection.execute(
        "SELECT extract(epoch FROM pgqueue.fn_job_backoff("
        "%s::int, %s::float8, %s::float8, %s, %s::float8))",
        arguments,
    ).fetchone()
    assert found is not None
    return float(found[0])


@pytest.mark.parametrize(
    ("strategy", "attempts", "base", "cap", "plain"),
    [
        ("exponential", 1, 30, 3600, 30),
        ("exponential", 4, 30, 3600, 240),
        ("exponential", 8, 30, 3600, 3600),
        ("exponential", 10_000, 30, 3600, 3600),
        ("exponential", 2**31 - 1, 0.001, 1e9, 1e9),
        ("exponential", 7, 30, 0, 30),
        ("exponential", 7, 0, 3600, 0),
        ("exponential", 7, 100, 10, 10),
        ("exponential", 0, 30, 3600, 30),
        ("linear", 4, 30, 3600, 120),
        ("linear", 10_000, 30, 3600, 3600),
        ("linear", 9, 30, 0, 30),
        ("constant", 10_000, 30, 3, 30),
    ],
)
def test_backoff_bounds(
    connection: psycopg.Connection,
    strategy: str,
    attempts: int,
    base: float,
    cap: float,
    plain: float,
) -> None:
    # S-15: the jitter comes after the cap; no overflow at any attempt
    for u in (0.0, 0.5, 1.0):
        delay = backoff(connection, attempts, base, cap, strategy, u)
        assert delay == pytest.approx(plain * (0.8 + 0.4 * u), abs=1e-6)


def test_backoff_spreads_at_the_cap(connection: psycopg.Connection) -> None:
    # S-15
    found = rows(
        connection,
        "SELECT min(d), max(d), count(DISTINCT d) AS n FROM (SELECT extract(epoch FROM"
        " pgqueue.fn_job_backoff(50, 30, 3600)) AS d FROM generate_series(1, 500)) x",
    )[0]
    assert 2880 <= found["min"] < 3000
    assert 4200 < found["max"] <= 4320
    assert found["n"] > 490


@pytest.mark.parametrize(
    "arguments",
    [
        (1, -1, 10, "linear", 0.5),
        (1, None, 10, "linear", 0.5),
        (1, 1, None, "exponential", 0.5),
        (1, 1, 10, "linear", 1.5),
        (1, 1, 10, "linear", None),
        (1, 1, 10, "quadratic", 0.5),
        (1, 1, 10, None, 0.5),
    ],
)
def test_backoff_arguments(connection: psycopg.Connection, arguments: tuple) -> None:
    # S-15
    with pytest.raises(psycopg.errors.InvalidParameterValue, match="fn_job_backoff"):
        backoff(connection, *arguments)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("queue.retry.enable", True),
        ("queue.retry.enabled", "yes"),
        ("queue.retry.max_attempts", 3),
        ("queue.retry.max_attempts.default", 0),
        ("queue.retry.max_attempts.default", 2.5),
        ("queue.retry.max_attempts.default", 1e12),
        ("queue.retry.backoff.strategy", "random"),
        ("queue.retry.backoff.base_seconds", None),
        ("queue.retry.backoff.cap_seconds", -1),
        ("queue.lease.ttl_seconds", 0),
        ("queue.lease.ttl_seconds.app.work", 1e300),
        ("queue.delivery_limit", "20"),
        ("queue.job_substrate.enabled.app.work", True),
        ("queue.retention.event_seconds", None),
        ("anything", 1),
    ],
)
def test_configuration_is_guarded(
    store: JobStore, connection: psycopg.Connection, key: str, value: object
) -> None:
    # S-13
    from kombu_pgqueue.errors import StoreError

    before = store.config_get(key)
    with pytest.raises(StoreError, match="configuration key"):
        store.config_set(key, value)
    assert store.config_get(key) == before
    assert events(connection) == []


def test_configuration_defaults_are_rows(store: JobStore) -> None:
    # S-13
    defaults = {
        "queue.retry.enabled": True,
        "queue.retry.max_attempts.default": 5,
        "queue.retry.backoff.strategy": "exponential",
        "queue.retry.backoff.base_seconds": 30,
        "queue.retry.backoff.cap_seconds": 3600,
        "queue.retry.backoff.budget_seconds": None,
        "queue.lease.ttl_seconds": 60,
        "queue.delivery_limit": 20,
        "queue.job_substrate.enabled": True,
        "queue.lease_reaper.enabled": True,
    }
    assert {key: store.config_get(key) for key in defaults} == defaults


def test_only_what_was_set_is_stamped(store: JobStore, connection: psycopg.Connection) -> None:
    # S-13
    made = publication(stamps=Stamps(max_attempts=3))
    store.enqueue(made)
    kept = row(connection, made.job_id)
    assert kept is not None
    stamped = {name for name in vars(Stamps()) if kept[name] is not None}
    assert stamped == {"max_attempts"}
