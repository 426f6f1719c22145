# SPDX-License-Identifier: BSD-3-Clause
"""Transient failures: delays, limits, who decides, and the backoff in SQL."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import Changes, FailTransient
from tests.support.jobs import (
    claim,
    claim_one,
    events,
    letters,
    make_due,
    publish,
    publish_and_claim,
    row,
    rows,
)

POLICY = FailTransient("ValueError", "no luck")


def fail(store: JobStore, **fields: Any) -> dict[str, Any]:
    """Publish, claim, start and fail one job by the database's policy; its row or dead letter."""
    lease = publish_and_claim(store, **fields)
    assert store.progress(*lease.ref)
    assert store.fail_transient(*lease.ref, POLICY)
    kept = row(store.connection, lease.job_id)
    return kept if kept is not None else letters(store.connection, lease.job_id)[-1]


def delay_of(kept: dict[str, Any]) -> float:
    return float((kept["process_after"] - kept["last_error_at"]).total_seconds())


def test_one_row_throughout(store: JobStore, connection: psycopg.Connection) -> None:
    # S-2, C-4
    made = publish(store, stamps=Stamps(max_attempts=3, backoff_base_s=10, backoff_cap_s=15))
    spent = 0.0
    for attempt in (1, 2):
        lease = claim_one(store)
        assert store.progress(*lease.ref)
        assert store.fail_transient(*lease.ref, FailTransient("E", f"no {attempt}", actor="me"))
        kept = row(connection, made.job_id)
        assert kept is not None
        assert (kept["attempts"], kept["retries"], kept["status"]) == (
            attempt,
            attempt,
            "retry_waiting",
        )
        assert (kept["last_error_code"], kept["last_error"]) == ("E", f"no {attempt}")
        base = min(15, 10 * 2 ** (attempt - 1))
        assert 0.8 * base <= delay_of(kept) <= 1.2 * base
        spent += delay_of(kept)
        assert kept["backoff_spent_s"] == pytest.approx(spent)
        assert rows(connection, "SELECT count(*) FROM pgqueue.job_queue") == [{"count": 1}]
        assert claim(store) == []
        make_due(connection, made.job_id)
    lease = claim_one(store)
    assert (lease.attempts, lease.retries) == (2, 2)
    assert lease.backoff_spent_s == pytest.approx(spent)
    assert store.fail_transient(*lease.ref, FailTransient("E", "no 3", actor="me"))
    (letter,) = letters(connection, made.job_id)
    assert (letter["failure_code"], letter["attempts"], letter["last_error"]) == (
        "exhausted",
        3,
        "no 3",
    )
    assert letter["failure_detail"] == {"error_code": "E"}
    assert letter["executor"] == "w1@host"
    assert letter["first_failed_at"] < letter["last_failed_at"]
    assert events(connection)[-1]["actor"] == "me"


def test_a_given_delay_is_the_callers_decision(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-23: neither max_attempts nor the backoff is asked
    lease = publish_and_claim(store, stamps=Stamps(max_attempts=1))
    failure = FailTransient("E", "x", delay=12.345678, retries=41)
    assert store.fail_transient(*lease.ref, failure)
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert delay_of(kept) == 12.345678
    assert (kept["retries"], kept["attempts"]) == (41, 1)


def test_a_retry_may_change_the_message(store: JobStore, connection: psycopg.Connection) -> None:
    # S-8: explicitly
    lease = publish_and_claim(store)
    changes = Changes(
        queue_name="other", priority=9, envelope='{"new": 1}', body=b"\x00new", expires_in=60
    )
    assert store.fail_transient(*lease.ref, FailTransient("E", "x", delay=0, changes=changes))
    again = claim_one(store, "other")
    assert again.job_id == lease.job_id
    assert (again.priority, again.envelope, again.body) == (9, '{"new": 1}', b"\x00new")
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert (kept["expires_at"] - kept["last_error_at"]).total_seconds() == 60


def test_a_retry_into_a_queue_where_its_key_lives(
    store: JobStore, connection: psycopg.Connection
) -> None:
    # S-1, S-6: a value, not a unique violation; kept, not run beside its twin
    holder = publish(store, queue_name="other", idempotency_key="k")
    lease = publish_and_claim(store, idempotency_key="k")
    failure = FailTransient("E", "x", delay=0, changes=Changes(queue_name="other"))
    assert store.fail_transient(*lease.ref, failure)
    (letter,) = letters(connection, lease.job_id)
    assert letter["failure_code"] == "rejected"
    assert letter["failure_detail"] == {"error_code": "E", "key_conflict_in": "other"}
    assert store.dead_letter_replay(letter["dead_letter_id"]) == "replayed"
    assert claim_one(store, "other").job_id == holder.job_id


def test_the_switch_makes_every_failure_final(store: JobStore) -> None:
    # S-13: also for a delay the caller gave, also for jobs already queued
    lease = publish_and_claim(store, stamps=Stamps(max_attempts=9))
    store.config_set("queue.retry.enabled", False)
    assert store.fail_transient(*lease.ref, FailTransient("E", "x", delay=3))
    (letter,) = store.dead_letters()
    assert letter.failure_code == "exhausted"
    store.config_set("queue.retry.enabled.app.important", True)
    assert fail(store, job_kind="app.important")["status"] == "retry_waiting"


@pytest.mark.parametrize("key", ["default", "app.work", "queue:q"])
def test_max_attempts_one(store: JobStore, key: str) -> None:
    # S-13: final where nothing was set; a stamp has the last word
    store.config_set(f"queue.retry.max_attempts.{key}", 1)
    assert fail(store)["failure_code"] == "exhausted"
    assert fail(store, stamps=Stamps(max_attempts=2))["status"] == "retry_waiting"


def test_unlimited(store: JobStore, connection: psycopg.Connection) -> None:
    # S-13: a stamp of 0, or null in the configuration
    store.config_set("queue.retry.max_attempts.app.work", None)
    store.config_set("queue.retry.max_attempts.app.stamped", 1)
    for fields in ({}, {"job_kind": "app.stamped", "stamps": Stamps(max_attempts=0)}):
        lease = publish_and_claim(store, **fields)
        connection.execute(
            "UPDATE pgqueue.job_queue SET attempts = 10000 WHERE job_id = %s", [lease.job_id]
        )
        assert store.fail_transient(*lease.ref, POLICY)
        kept = row(connection, lease.job_id)
        assert kept is not None
        assert kept["attempts"] == 10001
        assert 0.8 * 3600 <= delay_of(kept) <= 1.2 * 3600


def test_precedence(store: JobStore) -> None:
    # S-13: stamp, kind, queue, default, built-in; read when it is needed
    key = "queue.retry.backoff.base_seconds"

    def delay(**fields: Any) -> float:
        kept = fail(store, **fields)
        store.job_cancel(kept["job_id"])
        return delay_of(kept)

    store.connection.execute("DELETE FROM pgqueue.job_config WHERE key = %s", [key])
    assert 24 <= delay() <= 36
    store.config_set(key, 100)
    assert 80 <= delay() <= 120
    store.config_set(f"{key}.queue:q", 200)
    assert 160 <= delay() <= 240
    store.config_set(f"{key}.app.work", 400)
    assert 320 <= delay() <= 480
    assert 800 <= delay(stamps=Stamps(backoff_base_s=1000)) <= 1200
    assert 80 <= delay(queue_name="another", job_kind="app.another") <= 120
    assert store.setting(key, job_kind="app.work", queue_name="q") == 400
    assert store.setting(key, queue_name="q") == 200
    assert store.setting(key) == 100


def test_cap_zero_is_constant_at_base(store: JobStore, connection: psycopg.Connection) -> None:
    # S-13, S-15
    store.config_set("queue.retry.backoff.cap_seconds", 0)
    store.config_set("queue.retry.max_attempts.default", None)
    lease = publish_and_claim(store)
    connection.execute("UPDATE pgqueue.job_queue SET attempts = 50")
    assert store.fail_transient(*lease.ref, POLICY)
    kept = row(connection, lease.job_id)
    assert kept is not None
    assert 24 <= delay_of(kept) <= 36


def test_budget(store: JobStore) -> None:
    # S-10, S-13
    letter = fail(store, stamps=Stamps(backoff_base_s=100, backoff_budget_s=79))
    assert letter["failure_code"] == "budget_exhausted"
    assert fail(store, stamps=Stamps(backoff_base_s=100, backoff_budget_s=121))["retries"] == 1
    store.config_set("queue.retry.backoff.budget_seconds", 20)
    assert fail(store)["failure_code"] == "budget_exhausted"


def test_strategy_from_the_configuration(store: JobStore) -> None:
    # S-13
    store.config_set("queue.retry.backoff.strategy.app.work", "constant")
    store.config_set("queue.retry.backoff.base_seconds", 50)
    store.config_set("queue.retry.backoff.cap_seconds", 10)
    assert 40 <= delay_of(fail(store)) <= 60
