# SPDX-License-Identifier: BSD-3-Clause
"""C-3, C-4: a retry is one update of one row; FIELD 18, 20, 21, 24, 25."""

from __future__ import annotations

import json
from pathlib import Path

import psycopg
import pytest

from tests.support.ledger import Ledger, args_hash
from tests.support.outcomes import MODULE, Database, publishing
from tests.support.publisher import publishing_app
from tests.support.wait import wait_until
from tests.support.worker import PLAIN, celery_command, worker

POOLS = pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])


@pytest.fixture
def database(connection: psycopg.Connection) -> Database:  # type: ignore[override]
    return Database(connection)


@POOLS
def test_the_whole_path(
    pool: str, conninfo: str, database: Database, ledger: Ledger, tmp_path: Path
) -> None:
    """Three failures with max_retries=2, a dead letter, a replay; all the same bytes."""
    path = tmp_path / "cause"
    args = (str(path), "ü \x00 \U0001f600", {"deep": [1.5, None]}, "x" * 10_000)
    with publishing(conninfo) as app, worker(MODULE, conninfo, pool=pool, queues=["celery"]):
        # Published while nobody looks, so that its row can be read before anything happens to it.
        result = app.tasks["needs_file"].apply_async(args, {"key": 1}, countdown=1)
        (row,) = database.live()
        (letter,) = wait_until(database.dead, 30, "a dead letter")
        assert database.live() == []
        assert database.inserted() == 1
        assert (letter["job_id"], letter["body"]) == (row["job_id"], row["body"])
        assert letter["envelope"] == row["envelope"]
        assert (letter["failure_code"], letter["attempts"]) == ("exhausted", 3)
        assert "FileNotFoundError" in letter["failure_detail"]["traceback"]

        runs = ledger.runs(result.id)
        assert [run.retries for run in runs] == [0, 1, 2]
        assert {run.args_hash for run in runs} == {args_hash(args, {"key": 1})}
        waits = [0.2, 0.4]
        for wait, before, after in zip(waits, runs, runs[1:], strict=False):
            assert before.finished_at is not None
            gap = (after.started_at - before.finished_at).total_seconds()
            assert gap >= 0.8 * wait - 0.005
        spent = letter["job_snapshot"]["backoff_spent_s"]
        assert 0.8 * sum(waits) <= spent <= 1.2 * sum(waits)

        path.write_text("mended", encoding="utf-8")
        replay = ("dead-letter", "replay", str(letter["dead_letter_id"]))
        done = celery_command(MODULE, conninfo, *replay)
        assert (done.returncode, done.stderr) == (0, "")
        runs = ledger.wait(
            lambda runs: len(runs) == 4 and runs[-1].finished_at, 20, task_id=result.id
        )
        assert (runs[-1].outcome, runs[-1].retries) == ("SUCCESS", 0)
        assert runs[-1].args_hash == args_hash(args, {"key": 1})
        assert database.drained()[0]["resolution"] == "replayed"
        again = celery_command(MODULE, conninfo, *replay)
        assert again.returncode == 1
        assert "already resolved" in again.stderr
        assert len(ledger.runs(result.id)) == 4


def test_a_replay_that_dies_again_is_linked_to_the_first(
    conninfo: str, database: Database, ledger: Ledger
) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, queues=["celery"]):
        result = app.tasks["exhausted"].delay()
        (first,) = wait_until(database.dead, 20, "a dead letter")
        number = str(first["dead_letter_id"])
        assert celery_command(MODULE, conninfo, "dead-letter", "replay", number).returncode == 0
        wait_until(lambda: len(database.dead()) == 2, 20, "a second dead letter")
        first, second = database.dead()
    assert second["previous_id"] == first["dead_letter_id"]
    assert (first["resolution"], second["resolution"]) == ("replayed", None)
    assert (second["job_id"], second["body"]) == (first["job_id"], first["body"])
    assert (second["failure_code"], second["attempts"]) == ("exhausted", 3)
    assert [run.retries for run in ledger.runs(result.id)] == [0, 1, 2, 0, 1, 2]


@POOLS
def test_changed_arguments_queue_and_priority(
    pool: str, conninfo: str, database: Database, ledger: Ledger
) -> None:
    queues = ["celery", "other"]
    with publishing(conninfo) as app, worker(MODULE, conninfo, pool=pool, queues=queues):
        result = app.tasks["changes_all"].delay(1, key="v")
        wait_until(
            lambda: any(
                (row["queue_name"], row["priority"]) == ("other", 9) for row in database.live()
            ),
            20,
            "the row in its new queue",
            interval=0.005,
        )
        assert database.drained() == []
    runs = ledger.runs(result.id)
    assert [run.args_hash for run in runs] == [args_hash((n,), {"key": "v"}) for n in (1, 2, 3)]
    assert database.inserted() == 1


@POOLS
@pytest.mark.parametrize("name", ["swallows", "sends_on"])
def test_a_retry_the_task_does_not_raise_is_a_message_of_its_own(
    pool: str, name: str, conninfo: str, database: Database, ledger: Ledger
) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, pool=pool, queues=["celery"]):
        result = app.tasks[name].delay()
        runs = ledger.wait(
            lambda runs: len(runs) == 2 and all(run.finished_at for run in runs),
            20,
            task_id=result.id,
        )
        assert [run.retries for run in runs] == [0, 1]
        assert {run.outcome for run in runs} == {"SUCCESS"}
        assert database.drained() == []
    assert len(ledger.runs(result.id)) == 2
    assert database.inserted() == 2


def test_a_topic_that_leads_to_one_queue_stays_one_row(
    conninfo: str, database: Database, ledger: Ledger
) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, queues=["one_topic"]):
        result = app.tasks["again"].apply_async(exchange="topics", routing_key="a.b")
        ledger.wait(lambda runs: len(runs) == 2, 20, task_id=result.id)
        assert database.drained() == []
    assert database.inserted() == 1


def test_a_broadcast_is_published_to_all_again(
    conninfo: str, database: Database, ledger: Ledger
) -> None:
    with publishing(conninfo) as app, worker(MODULE, conninfo, queues=["left", "right"]):
        result = app.tasks["again"].apply_async(exchange="all", routing_key="x")
        # Two copies run; each of their retries goes to both queues.
        ledger.wait_finished(6)
        assert database.drained() == []
    assert sorted(run.retries for run in ledger.runs(result.id)) == [0, 0, 1, 1, 1, 1]
    assert database.inserted() == 6


def test_stamps_survive_retries_and_replay(conninfo: str, database: Database) -> None:
    with publishing(conninfo) as app:
        app.tasks["exhausted"].delay()
        (row,) = database.live()
        expected = {
            "max_attempts": 3,
            "backoff_strategy": "exponential",
            "backoff_base_s": 0.2,
            "backoff_cap_s": 1.0,
            "backoff_budget_s": None,
        }
        assert {name: row[name] for name in expected} == expected
        assert row["acks_late"] is False
        with worker(MODULE, conninfo, queues=["celery"]):
            (letter,) = wait_until(database.dead, 20, "a dead letter")
        assert {name: letter[name] for name in expected} == expected
        number = str(letter["dead_letter_id"])
        assert celery_command(MODULE, conninfo, "dead-letter", "replay", number).returncode == 0
        (row,) = database.live()
        assert {name: row[name] for name in expected} == expected
        assert json.loads(row["envelope"]) == json.loads(letter["envelope"])


def test_without_the_extension_a_retry_is_counted_too(
    conninfo: str, database: Database, ledger: Ledger
) -> None:
    with publishing_app("plain", conninfo) as app, worker(PLAIN, conninfo):
        result = app.tasks["plain.asks_again"].delay(2)
        # Acknowledged at its start, such a task has no row between its retries.
        ledger.wait_finished(3)
        assert database.drained() == []
    assert [run.retries for run in ledger.runs(result.id)] == [0, 1, 2]
