# SPDX-License-Identifier: BSD-3-Clause
"""S-15: SQL and Python wait for the same time, to the microsecond."""

from __future__ import annotations

from datetime import timedelta

import psycopg
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from celery_ext.backoff import STRATEGIES, delay

attempts = st.one_of(st.integers(1, 80), st.integers(1, 2**31 - 1))
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 1e7), st.integers(0, 10**6).map(float))
strategies = st.sampled_from(STRATEGIES)
units = st.floats(0, 1)


@given(attempts, seconds, seconds, strategies, units)
def test_a_delay_stays_within_its_bounds(
    attempt: int, base: float, cap: float, strategy: str, u: float
) -> None:
    plain = delay(attempt, base=base, cap=cap, strategy=strategy, u=u, jitter=False)
    jittered = delay(attempt, base=base, cap=cap, strategy=strategy, u=u)
    assert 0 <= plain <= max(base, cap) + 1e-6
    assert 0.8 * plain - 2e-6 <= jittered <= 1.2 * plain + 2e-6


@given(st.integers(1, 2**31 - 2), seconds, seconds, strategies)
def test_a_later_attempt_never_waits_shorter(
    attempt: int, base: float, cap: float, strategy: str
) -> None:
    sooner, later = (
        delay(n, base=base, cap=cap, strategy=strategy, u=0.5, jitter=False)
        for n in (attempt, attempt + 1)
    )
    assert sooner <= later


@given(attempts, seconds, seconds, strategies, units)
@example(10_000, 30.0, 3600.0, "exponential", 0.5)
@example(8, 30.0, 3840.0, "exponential", 1.0)
@example(2, 0.1, 0.3, "linear", 0.3333333333333333)
@settings(
    max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_sql_and_python_agree(
    connection: psycopg.Connection, attempt: int, base: float, cap: float, strategy: str, u: float
) -> None:
    row = connection.execute(
        "SELECT pgqueue.fn_job_backoff(%s::integer, %s::float8, %s::float8, %s, %s::float8)",
        (attempt, base, cap, strategy, u),
    ).fetchone()
    assert row is not None
    ours = delay(attempt, base=base, cap=cap, strategy=strategy, u=u)
    assert row[0] == timedelta(microseconds=round(ours * 1e6))
