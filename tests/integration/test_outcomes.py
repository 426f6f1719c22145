# SPDX-License-Identifier: BSD-3-Clause
"""C-5, C-6: each way a task can end, by real workers on each pool, early and late acknowledged."""

from __future__ import annotations

import json
import uuid
from typing import Any

import psycopg
import pytest

from kombu_pgqueue.store import JobStore
from kombu_pgqueue.values import Publication
from tests.support.ledger import Ledger
from tests.support.outcomes import MODULE, Database, publishing
from tests.support.worker import worker

POOLS = pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])

#: Task -> failure code, attempts, what the error says. None: it ends well.
ENDS: dict[str, tuple[str, int, str] | None] = {
    "fine": None,
    "fatal": ("fatal", 1, "nobody listed this"),
    "fatal_late": ("fatal", 1, "nobody listed this"),
    "fatal_unacked": ("fatal", 1, "nobody listed this"),
    "exhausted": ("exhausted", 3, "every time"),
    "exhausted_late": ("exhausted", 2, "Can't retry exhausted_late"),
    "by_policy": ("exhausted", 3, "every time"),
    "over_budget": ("budget_exhausted", 1, "too long to wait"),
    "fatal_by_policy": ("fatal", 1, "hopeless"),
    "rejected": ("rejected", 1, "will not"),
    "requeued_once": None,
    "ignored": None,
    "again": None,
    "changes_all": None,
}


@pytest.fixture
def database(connection: psycopg.Connection) -> Database:  # type: ignore[override]
    return Database(connection)


@POOLS
def test_every_failure_is_one_dead_letter(
    pool: str, conninfo: str, database: Database, ledger: Ledger
) -> None:
    queues = ["celery", "other"]
    with publishing(conninfo) as app, worker(MODULE, conninfo, pool=pool, queues=queues) as running:
        ids = {name: app.tasks[name].delay(1, key="ä") for name in ENDS}
        dead = {letter["task_id"]: letter for letter in database.drained()}
        hostname = running.output().partition(" ready.")[0].rpartition(" ")[2]
    for name, result in ids.items():
        expected, letter = ENDS[name], dead.pop(result.id, None)
        if expected is None:
            assert letter is None, name
            continue
        assert letter is not None, name
        code, attempts, error = expected
        assert (letter["failure_code"], letter["attempts"]) == (code, attempts), name
        assert error in letter["last_error"], name
        detail = letter["failure_detail"]
        assert detail["type"], name
        assert error in detail["traceback"] or name == "fatal", name
        assert detail["worker"] == hostname, name
        assert detail["retries"] == attempts - 1, name
        assert (detail["task_id"], detail["root_id"]) == (result.id, result.id), name
        assert isinstance(detail["pid"], int), name
        assert letter["job_kind"] == name
        assert json.loads(letter["body"])[:2] == [[1], {"key": "ä"}], name
    assert dead == {}
    exhausted = next(each for each in database.dead() if each["job_kind"] == "exhausted")
    assert exhausted["failure_detail"]["max_retries"] == 2
    # One row each, whatever happened to it.
    assert database.inserted() == len(ENDS)


@POOLS
def test_messages_no_task_can_take(
    pool: str, conninfo: str, database: Database, store: JobStore
) -> None:
    def put(body: bytes, task: str | None = "fine", kind: str = "application/json") -> uuid.UUID:
        job_id = uuid.uuid4()
        headers = {"lang": "py", "id": str(job_id), **({"task": task} if task else {})}
        properties = {
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "celery"},
        }
        envelope = {
            "content-type": kind,
            "content-encoding": "utf-8",
            "headers": headers,
            "properties": properties,
        }
        store.enqueue(
            Publication(
                job_id,
                "celery",
                json.dumps(envelope),
                body,
                job_kind=task or "",
                task_id=str(job_id),
            )
        )
        return job_id

    good = b"[[], {}, {}]"
    expected = {
        put(b"\xff\xfe not json"): "malformed",
        put(b"42"): "malformed",
        put(b'["ab", {}, {}]'): "malformed",
        put(b"\x80\x04N.", kind="application/x-python-serialize"): "malformed",
        put(good, kind="application/x-unheard-of"): "malformed",
        put(b'{"no": "task"}', task=None): "malformed",
        put(good, task="not.registered"): "unregistered",
        put(good): None,
    }
    with publishing(conninfo), worker(MODULE, conninfo, pool=pool, queues=["celery"]):
        dead = {letter["job_id"]: letter for letter in database.drained()}
    assert {job: dead[job]["failure_code"] if job in dead else None for job in expected} == expected
    unregistered = next(each for each in dead.values() if each["failure_code"] == "unregistered")
    assert "not.registered" in unregistered["last_error"]
    assert unregistered["failure_detail"]["task_id"] == str(unregistered["job_id"])


def test_a_lost_child(conninfo: str, database: Database, ledger: Ledger) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, queues=["celery"]):
        names = ("dies", "dies_late", "dies_once", "dies_first")
        ids = {}
        for name in names:
            # One after the other: a child that dies takes nobody's neighbour with it.
            ids[name] = app.tasks[name].delay(name).id
            database.drained()
        dead = {letter["job_kind"]: letter for letter in database.dead()}
    assert set(dead) == {"dies", "dies_late"}
    for letter in dead.values():
        assert letter["failure_code"] == "worker_lost"
        assert "SIGKILL" in letter["last_error"]
        assert letter["attempts"] == 1
    assert database.inserted() == len(names)
    assert [run.redelivered for run in ledger.runs(ids["dies_once"])] == [False, True]
    assert [run.retries for run in ledger.runs(ids["dies_first"])] == [0, 1]


def test_time_limits(conninfo: str, database: Database, ledger: Ledger) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, queues=["celery"], concurrency=4):
        hard: dict[str, Any] = {"time_limit": 1}
        app.tasks["slow"].apply_async(**hard)
        app.tasks["slow_late"].apply_async(**hard)
        app.tasks["soft_limit"].apply_async(soft_time_limit=1)
        again = app.tasks["limit_requeued"].apply_async(**hard)
        ledger.wait(lambda runs: len(runs) >= 2, 20, "a second delivery", task_id=again.id)
        assert ledger.runs(again.id)[1].redelivered
        dead = {}

        def buried() -> bool:
            dead.update({letter["job_kind"]: letter for letter in database.dead()})
            return len(dead) == 3

        ledger.wait(lambda _: buried(), 20, "three dead letters")
    assert set(dead) == {"slow", "slow_late", "soft_limit"}
    assert {letter["failure_code"] for letter in dead.values()} == {"time_limit"}
    assert "TimeLimitExceeded" in dead["slow"]["failure_detail"]["type"]
    assert "SoftTimeLimitExceeded" in dead["soft_limit"]["failure_detail"]["type"]
