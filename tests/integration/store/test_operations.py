# SPDX-License-Identifier: BSD-3-Clause
"""What an operator sees: views, health, the audit trail, topology, and the functions' names."""

from __future__ import annotations

from uuid import uuid4

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.store.topology import Binding
from kombu_pgqueue.values import Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient
from tests.support.jobs import (
    bury,
    claim_one,
    events,
    lapse,
    publish,
    publish_and_claim,
    reap_at_once,
    rows,
)

#: S-23: each with its leading arguments.
FUNCTIONS = {
    "fn_job_enqueue": "p_job_id, p_queue_name, p_envelope, p_body",
    "fn_job_claim": "p_queues, p_lease_name, p_lease_holder, p_limit",
    "fn_job_progress": "p_job_id, p_lease_token",
    "fn_job_succeed": "p_job_id, p_lease_token",
    "fn_job_lease_renew": "p_job_id, p_lease_token",
    "fn_job_release": "p_job_id, p_lease_token",
    "fn_job_fail_transient": "p_job_id, p_lease_token, p_error_code, p_error_message, p_actor,"
    " p_delay",
    "fn_job_fail_permanent": "p_job_id, p_lease_token, p_failure_code",
    "fn_job_move_to_dead_letter": "p_job_id, p_failure_code, p_failure_detail",
    "fn_job_cancel": "p_job_id",
    "fn_job_get": "p_job_id",
    "fn_job_backoff": "p_attempts, p_base, p_cap, p_strategy, p_u",
    "fn_job_lease_reaper": "",
    "fn_job_sweep_expired": "",
    "fn_job_dead_letter_replay": "p_dead_letter_id",
    "fn_job_dead_letter_discard": "p_dead_letter_id",
    "fn_job_dead_letter_supersede": "p_dead_letter_id",
    "fn_dead_letter_health": "",
    "fn_runtime_lease_acquire": "p_lease_name, p_lease_holder, p_lease_token",
    "fn_runtime_lease_renew": "p_lease_name, p_lease_token",
    "fn_runtime_lease_release": "p_lease_name, p_lease_token",
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(connection: psycopg.Connection, name: str) -> None:
    # S-23
    (function,) = rows(
        connection,
        "SELECT coalesce(p.proargnames, '{}') AS names, p.pronargs, p.prosecdef FROM pg_proc p"
        " WHERE p.pronamespace = 'pgqueue'::regnamespace AND p.proname = %s",
        name,
    )
    arguments = ", ".join(function["names"][: function["pronargs"]])
    assert arguments.startswith(FUNCTIONS[name])
    assert not function["prosecdef"]


def test_nothing_depends_on_the_search_path(
    conninfo: str, store: JobStore, connection: psycopg.Connection
) -> None:
    # S-23: whatever else lies in the caller's path
    connection.execute("CREATE SCHEMA evil")
    try:
        connection.execute("CREATE TABLE evil.job_queue (x int)")
        connection.execute(
            "CREATE FUNCTION evil.octet_length(text) RETURNS int LANGUAGE sql AS 'SELECT 1 / 0'"
        )
        for path in ("", "evil", "evil, public"):
            connection.execute("SELECT set_config('search_path', %s, false)", [path])
            reap_at_once(store)
            lease = publish_and_claim(store, idempotency_key="k")
            assert store.progress(*lease.ref)
            assert store.fail_transient(*lease.ref, FailTransient("E", "x", delay=0))
            lease = claim_one(store)
            lapse(connection, lease.job_id)
            assert store.reap() == 1
            assert store.fail_permanent(*claim_one(store).ref, FailPermanent("fatal", "y"))
            (letter,) = store.dead_letters()
            assert store.dead_letter_discard(letter.dead_letter_id) == "discarded"
            assert store.sweep_expired() == 0
            assert store.queue_health() == []
            store.prune()
    finally:
        connection.execute("RESET search_path")
        connection.execute("DROP SCHEMA evil CASCADE")


def test_queue_health(store: JobStore, connection: psycopg.Connection) -> None:
    # S-18
    publish(store)
    publish(store, priority=1, delay=0)
    publish(store, delay=3600)
    bury(store, queue_name="dead")
    store.progress(*claim_one(store).ref)
    claim_one(store)
    publish(store)
    connection.execute(
        "UPDATE pgqueue.job_queue SET process_after = now() - interval '90 seconds'"
        " WHERE status = 'queued' AND process_after <= now()"
    )
    health = {each["queue_name"]: each for each in store.queue_health()}
    counts = ("ready", "scheduled", "retry_waiting", "leased", "in_progress", "dead_letters")
    assert [health["q"][name] for name in counts] == [1, 1, 0, 1, 1, 0]
    assert 90 <= health["q"]["oldest_ready_age_s"] < 120
    assert [health["dead"][name] for name in counts] == [0, 0, 0, 0, 0, 1]
    (view,) = rows(
        connection, "SELECT dead_letter_health FROM pgqueue.v_queue_health WHERE queue_name = 'q'"
    )
    assert view["dead_letter_health"] == store.dead_letter_health()


def test_dead_letter_health(store: JobStore) -> None:
    # S-18
    nothing = {
        "open_count_event": 0,
        "open_count_job": 0,
        "oldest_first_failed_at": None,
        "by_failure_code": {},
    }
    assert store.dead_letter_health() == nothing
    first = bury(store, "fatal")
    bury(store, "fatal")
    bury(store, "rejected")
    health = store.dead_letter_health()
    assert health["open_count_job"] == 3
    assert health["by_failure_code"] == {"fatal": 2, "rejected": 1}
    assert health["oldest_first_failed_at"] is not None
    for each in [first, *(letter.dead_letter_id for letter in store.dead_letters())]:
        store.dead_letter_discard(each)
    assert store.dead_letter_health() == nothing


def test_retry_pressure_and_active_leases(store: JobStore, connection: psycopg.Connection) -> None:
    # S-18
    lease = publish_and_claim(store, job_kind="app.a")
    store.fail_transient(*lease.ref, FailTransient("E", "x", delay=60))
    bury(store, job_kind="app.a")
    publish(store, job_kind="app.b")
    pressure = rows(connection, "SELECT * FROM pgqueue.v_job_retry_pressure ORDER BY job_kind")
    assert pressure == [
        {"job_kind": "app.a", "waiting": 1, "dead": 1, "max_attempts_seen": 1},
        {"job_kind": "app.b", "waiting": 0, "dead": 0, "max_attempts_seen": 0},
    ]
    store.runtime_lease_acquire("w1", "me", uuid4(), 60)
    store.runtime_lease_acquire("w2", "you", uuid4(), -1)
    (active,) = rows(connection, "SELECT * FROM pgqueue.v_lease_active")
    assert (active["lease_name"], active["lease_holder"]) == ("w1", "me")
    assert 0 < active["ttl_remaining"].total_seconds() <= 60
    assert set(active) == {"lease_name", "lease_holder", "leased_until", "ttl_remaining"}


def test_one_job_live_and_dead(store: JobStore, connection: psycopg.Connection) -> None:
    # S-18: v_job and fn_job_get see both, with stamps
    made = publish(store, stamps=Stamps(max_attempts=7))

    def seen() -> tuple[str, str]:
        job = store.job_get(made.job_id)
        assert job is not None
        assert job["max_attempts"] == 7
        assert {"body", "envelope"}.isdisjoint(job)
        (view,) = rows(connection, "SELECT * FROM pgqueue.v_job WHERE job_id = %s", made.job_id)
        assert view["task_id"] == made.task_id
        return job["status"], view["status"]

    assert seen() == ("queued", "queued")
    lease = claim_one(store)
    assert seen() == ("leased", "leased")
    store.progress(*lease.ref)
    assert seen() == ("in_progress", "in_progress")
    store.fail_transient(*lease.ref, FailTransient("E", "x", delay=0))
    assert seen() == ("retry_waiting", "retry_waiting")
    store.fail_permanent(*claim_one(store).ref, FailPermanent("fatal", "boom"))
    assert seen() == ("dead_letter", "dead_letter")
    job = store.job_get(made.job_id)
    assert job is not None
    assert (job["failure_code"], job["last_error"], job["attempts"]) == ("fatal", "boom", 2)
    assert job["died_at"] is not None
    assert job["claimed_at"] is not None
    assert store.job_get(uuid4()) is None


def test_the_trail(store: JobStore, connection: psycopg.Connection) -> None:
    # S-19: who, what, why; the actor is never null
    store.config_set("queue.delivery_limit", 9, actor="ann")
    reap_at_once(store)
    replayed = bury(store)
    store.dead_letter_replay(replayed, actor="bob", note="mended")
    store.dead_letter_discard(bury(store, queue_name="r"), note="junk")
    store.dead_letter_supersede(bury(store, queue_name="r"), actor="")
    lease = claim_one(store)
    lapse(connection, lease.job_id)
    store.reap()
    store.job_cancel(lease.job_id, actor="cid", reason="late")
    publish(store, "purged")
    store.queue_purge("purged")
    trail = events(connection)
    kinds = [(each["event_type"], each["severity"]) for each in trail]
    assert kinds == [
        ("queue_config_changed", "info"),
        ("queue_config_changed", "info"),
        ("queue_job_dead_lettered", "warning"),
        ("queue_job_replayed", "info"),
        ("queue_job_dead_lettered", "warning"),
        ("queue_job_discarded", "info"),
        ("queue_job_dead_lettered", "warning"),
        ("queue_job_superseded", "info"),
        ("queue_lease_reaped", "warning"),
        ("queue_job_cancelled", "info"),
        ("queue_purged", "info"),
    ]
    user = connection.info.user
    actors = [each["actor"] for each in trail]
    assert actors == ["ann", user, user, "bob", user, user, user, user, "reaper", "cid", user]
    assert trail[0]["detail"] == {"key": "queue.delivery_limit", "old": 20, "new": 9}
    assert trail[3]["reason"] == "mended"
    assert trail[3]["detail"] == {"dead_letter_id": replayed}
    with pytest.raises(psycopg.errors.NotNullViolation):
        connection.execute("INSERT INTO pgqueue.job_event (event_type, actor) VALUES ('x', NULL)")


def test_the_session_can_say_who_acts(store: JobStore, connection: psycopg.Connection) -> None:
    # S-19
    connection.execute("SET pgqueue_client.actor = 'deploy 7'")
    connection.execute("SET pgqueue_client.reason = 'ticket 12'")
    store.config_set("queue.delivery_limit", 8)
    store.dead_letter_discard(bury(store))
    connection.execute("DELETE FROM pgqueue.job_config WHERE key = 'queue.delivery_limit'")
    trail = events(connection)
    assert {each["actor"] for each in trail} == {"deploy 7"}
    assert trail[0]["reason"] == "ticket 12"
    assert trail[-1]["detail"] == {"key": "queue.delivery_limit", "old": 8, "new": None}


def test_topology(store: JobStore) -> None:
    # T-4
    store.exchange_declare("x", "direct", arguments={"a": 1})
    store.exchange_declare("x", "topic")
    found = store.exchange_get("x")
    assert found is not None
    assert (found.exchange_type, found.arguments) == ("direct", {"a": 1})
    assert store.exchange_get("y") is None
    for name in ("q1", "q2"):
        store.queue_declare(name)
        store.queue_declare(name, durable=False)
        store.bind(name, "x", "key")
        store.bind(name, "x", "key")
    assert store.bindings("x") == [
        Binding("x", "direct", "key", "q1"),
        Binding("x", "direct", "key", "q2"),
    ]
    store.unbind("q1", "x", "key")
    store.unbind("q1", "x", "key")
    assert [each.queue for each in store.bindings()] == ["q2"]
    publish(store, "q2")
    publish(store, "q2", delay=60)
    running = claim_one(store, "q2")
    assert store.queue_size("q2") == 1
    assert store.queue_delete("q2") == 1
    assert store.bindings() == []
    assert store.succeed(*running.ref)
    store.exchange_delete("x")
    assert store.exchange_get("x") is None
