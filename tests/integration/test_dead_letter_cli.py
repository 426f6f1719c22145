# SPDX-License-Identifier: BSD-3-Clause
"""K-1, K-2: the operator's commands, run as an operator runs them."""

from __future__ import annotations

import base64
import json
import subprocess
import uuid
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from typing import Any

import click
import psycopg
import pytest
from celery import Celery
from celery.bin.base import CLIContext
from click.testing import CliRunner

from celery_ext.cli.dead_letter import dead_letter
from celery_ext.cli.pgqueue import pgqueue
from celery_ext.dead_letter import DeadLetterQueue, Filter, default_actor
from kombu_pgqueue.errors import StoreUnavailable
from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Publication
from kombu_pgqueue.verdicts import FailPermanent
from tests.support.apps.common import make_app
from tests.support.database import broker_url
from tests.support.publisher import publishing_app
from tests.support.worker import EXTENDED, PLAIN, celery_command

BODY = b'[["\\u0000 caf\\u00e9", {"deep": [1.5]}], {"key": "v"}, {"callbacks": null}]'
ENVELOPE = json.dumps(
    {
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": {"task": "shop.pay", "id": "t-1", "lang": "py"},
        "properties": {"correlation_id": "t-1", "delivery_mode": 2},
    }
)

Bury = Callable[..., int]
Run = Callable[..., Any]


@pytest.fixture
def bury(store: JobStore) -> Bury:
    """Make a dead letter; return its id."""

    def bury(
        queue: str = "celery",
        task: str = "shop.pay",
        code: str = "fatal",
        body: bytes = BODY,
        envelope: str = ENVELOPE,
        error: str = "card declined",
    ) -> int:
        job_id = uuid.uuid4()
        store.enqueue(Publication(job_id, queue, envelope, body, job_kind=task, task_id="t-1"))
        (lease,) = store.claim(ClaimRequest([queue], 1), lease_name="l", lease_holder="h")
        store.progress(*lease.ref)
        detail = {"type": "shop.Declined", "message": error, "traceback": "Traceback:\n  pay()\n"}
        assert store.fail_permanent(*lease.ref, FailPermanent(code, error, detail))
        return store.dead_letters(limit=1)[0].dead_letter_id

    return bury


def invoke(app: Celery, group: click.Group, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command as `celery -A proj` does, but in this process: no second for each start."""
    context = CLIContext(app=app, no_color=False, workdir=None)
    result = CliRunner().invoke(group, list(words), obj=context)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(
        words, result.exit_code, stdout=result.stdout, stderr=result.stderr
    )


@pytest.fixture
def run(conninfo: str) -> Iterator[Run]:
    """Run `dead-letter ...`; return what it printed and its status."""
    with publishing_app("extended", conninfo) as app:
        yield partial(invoke, app, dead_letter)


def test_list_json_has_the_tables_columns(
    bury: Bury, conninfo: str, connection: psycopg.Connection
) -> None:
    number = bury()
    result = celery_command(EXTENDED, conninfo, "dead-letter", "list", "--format", "json")
    assert (result.returncode, result.stderr) == (0, "")
    (letter,) = json.loads(result.stdout)
    columns = connection.execute(
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = 'pgqueue' AND table_name = 'job_dead_letter'"
    )
    assert set(letter) == {name for (name,) in columns}
    assert letter["dead_letter_id"] == number
    assert letter["failure_code"] == "fatal"
    assert letter["job_kind"] == "shop.pay"
    assert letter["failure_detail"]["type"] == "shop.Declined"
    assert base64.b64decode(letter["body"]) == BODY
    assert letter["envelope"] == ENVELOPE
    assert datetime.fromisoformat(letter["died_at"]).tzinfo is not None
    assert letter["resolved_at"] is None


def test_list_filters(bury: Bury, run: Run) -> None:
    first = bury()
    second = bury(queue="mail", task="shop.mail", code="exhausted")

    def ids(*words: str) -> list[int]:
        result = run("list", "--format", "json", *words)
        assert result.returncode == 0
        return [letter["dead_letter_id"] for letter in json.loads(result.stdout)]

    assert ids() == [second, first]
    assert ids("--queue", "mail") == [second]
    assert ids("--task", "shop.pay") == [first]
    assert ids("--code", "exhausted") == [second]
    assert ids("--since", "1h") == [second, first]
    assert ids("--until", "1h") == []
    assert ids("--limit", "1") == [second]
    assert ids("--limit", "0") == [second, first]
    assert run("discard", str(first), "--note", "test").returncode == 0
    assert ids() == [second]
    assert ids("--state", "resolved") == [first]
    assert ids("--state", "all") == [second, first]


def test_list_as_a_table_says_when_there_is_more(bury: Bury, run: Run) -> None:
    for _ in range(3):
        number = bury(error="two\nlines \x1b[31m")
    result = run("list", "--limit", "2")
    assert len(result.stdout.splitlines()) == 3
    assert str(number) in result.stdout.splitlines()[1]
    assert "two lines \\x1b[31m" in result.stdout
    assert "more than 2" in result.stderr


def test_show_prints_arguments_and_traceback(bury: Bury, run: Run) -> None:
    number = bury()
    result = run("show", str(number))
    assert result.returncode == 0
    assert "\\x00 café" in result.stdout
    assert "'key': 'v'" in result.stdout
    assert "card declined" in result.stdout
    assert "\n  pay()\n" in result.stdout
    shown = json.loads(run("show", str(number), "--format", "json").stdout)
    assert shown["arguments"] == {"args": ["\x00 café", {"deep": [1.5]}], "kwargs": {"key": "v"}}
    assert shown["dead_letter_id"] == number


@pytest.mark.parametrize(
    ("envelope", "body"),
    [
        (ENVELOPE, b"\xff\x00 not json"),
        (ENVELOPE.replace("json", "x-python-serialize"), b"cos\nsystem\n(S'true'\ntR."),
        ("no envelope at all", BODY),
        (ENVELOPE, b"42"),
    ],
)
def test_show_bears_what_it_cannot_decode(bury: Bury, run: Run, envelope: str, body: bytes) -> None:
    number = bury(code="malformed", envelope=envelope, body=body)
    result = run("show", str(number))
    assert result.returncode == 0
    assert "not readable" in result.stdout
    shown = json.loads(run("show", str(number), "--format", "json").stdout)
    assert (shown["arguments"], base64.b64decode(shown["body"])) == (None, body)


def test_replay_is_refused_the_second_time(
    bury: Bury, conninfo: str, connection: psycopg.Connection
) -> None:
    number = bury()
    replay = partial(celery_command, EXTENDED, conninfo, "dead-letter", "replay", str(number))
    result = replay("--note", "card renewed")
    assert (result.returncode, result.stdout) == (0, f"{number}: replayed\n")
    again = replay()
    assert again.returncode == 1
    assert "already resolved" in again.stderr
    row = connection.execute("SELECT body, envelope, retries, attempts FROM pgqueue.job_queue")
    assert row.fetchall() == [(BODY, ENVELOPE, 0, 0)]
    row = connection.execute(
        "SELECT resolution, resolution_note, resolved_by FROM pgqueue.job_dead_letter"
    )
    assert row.fetchall() == [("replayed", "card renewed", default_actor())]


def test_one_refusal_among_many_is_told_and_stops_nothing(bury: Bury, run: Run) -> None:
    first, second = bury(), bury()
    assert run("discard", str(first)).returncode == 0
    result = run("replay", str(first), "999999", str(second), "--format", "json")
    assert result.returncode == 1
    assert [(each["dead_letter_id"], each["result"]) for each in json.loads(result.stdout)] == [
        (first, "already_resolved"),
        (999999, "not_found"),
        (second, "replayed"),
    ]


def test_a_number_that_is_no_id_stops_nothing(bury: Bury, run: Run) -> None:  # K-1
    first, second = bury(), bury()
    result = run("replay", str(first), str(2**63), str(second))
    assert result.returncode == 1
    assert f"{first}: replayed" in result.stdout
    assert f"{second}: replayed" in result.stdout
    assert f"{2**63}: refused: not found" in result.stderr


@pytest.mark.parametrize("error", [StoreUnavailable("the server is gone"), KeyboardInterrupt()])
def test_work_that_is_cut_off_says_what_was_done(
    bury: Bury, run: Run, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:  # K-1, K-2
    numbers = [bury() for _ in range(3)]
    discard = DeadLetterQueue.discard

    def cut_off(self: DeadLetterQueue, number: int, **options: Any) -> str:
        if number == numbers[1]:
            raise error
        return discard(self, number, **options)

    monkeypatch.setattr(DeadLetterQueue, "discard", cut_off)
    result = run("discard", *map(str, numbers))
    assert result.returncode == (2 if isinstance(error, StoreUnavailable) else 1)
    assert f"{numbers[0]}: discarded" in result.stdout
    assert "stopped: 2 not reached" in result.stderr


def test_a_filter_that_is_no_text_is_one_line(run: Run) -> None:  # K-2
    result = run("list", "--task", "\udced")
    assert result.returncode == 2
    assert "no valid text" in result.stderr


def test_bulk_work_needs_a_selection_and_consent(bury: Bury, run: Run) -> None:
    bury()
    bury(task="shop.mail")
    for words in (["replay"], ["discard", "--yes"], ["replay", "1", "--all"]):
        assert run(*words).returncode == 2
    refused = run("discard", "--all")
    assert refused.returncode == 2
    assert "--yes" in refused.stderr
    assert len(json.loads(run("list", "--format", "json").stdout)) == 2
    dry = run("replay", "--all", "--dry-run")
    assert (dry.returncode, dry.stdout.count("would be replayed")) == (0, 3)
    assert len(json.loads(run("list", "--format", "json").stdout)) == 2
    assert run("replay", "--task", "shop.mail", "--yes").returncode == 0
    assert run("discard", "--all", "--yes").returncode == 0
    assert json.loads(run("list", "--format", "json").stdout) == []


def test_health(bury: Bury, run: Run) -> None:
    bury()
    bury(code="exhausted")
    health = json.loads(run("health", "--format", "json").stdout)
    assert health["open_count_job"] == 2
    assert health["by_failure_code"] == {"fatal": 1, "exhausted": 1}
    assert "open: exhausted" in run("health").stdout


def test_an_app_that_was_not_set_up_is_told(conninfo: str) -> None:
    for words in (["list", "--format", "json"], ["health"]):
        result = celery_command(PLAIN, conninfo, "dead-letter", *words)
        assert result.returncode == 0
        assert "celery_ext.setup(app)" in result.stderr


def test_a_resolved_one_keeps_its_code_beside_its_state(bury: Bury, run: Run) -> None:
    number = bury(code="exhausted")
    assert run("discard", str(number)).returncode == 0
    head, row = run("list", "--state", "all").stdout.splitlines()
    assert head.split()[3:5] == ["STATE", "CODE"]
    assert row.split()[3:5] == ["discarded", "exhausted"]


def test_the_queue_of_dead_letters_is_paged(bury: Bury, store: JobStore, monkeypatch: Any) -> None:
    monkeypatch.setattr("celery_ext.dead_letter._PAGE", 2)
    made = [bury() for _ in range(5)]
    queue = DeadLetterQueue(store, actor="tester")
    assert [letter.dead_letter_id for letter in queue.list()] == made[::-1]
    assert [letter.dead_letter_id for letter in queue.list(limit=3)] == made[:1:-1]
    assert queue.select(Filter()) == made


def test_migrate_and_status(fresh_database: str) -> None:
    app = make_app("extended", broker_url(fresh_database))
    run = partial(invoke, app, pgqueue)
    missing = run("status")
    assert missing.returncode == 2
    assert "pgqueue migrate" in missing.stderr
    assert len(missing.stderr.splitlines()) == 1
    printed = run("migrate", "--sql")
    assert printed.returncode == 0
    assert "CREATE TABLE pgqueue.job_queue" in printed.stdout
    assert run("status").returncode == 2
    for _ in range(2):
        done = run("migrate")
        assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(run("status", "--format", "json").stdout)
    assert found["revision"] == found["newest_revision"]
    assert found["dead_letters"]["open_count_job"] == 0
    assert run("status").returncode == 0


@pytest.mark.parametrize(
    ("broker", "said"),
    [
        ("pgqueue://nobody:s3cret@127.0.0.1:1/nowhere", "127.0.0.1"),
        ("pgqueue://h/db?no_such_option=1", "no_such_option"),
        ("pgqueue://h/db?poll_interval=often", "poll_interval"),
        ("amqp://guest@localhost//", "pgqueue://"),
    ],
)
@pytest.mark.parametrize("words", [[dead_letter, "list"], [pgqueue, "status"]])
def test_a_broker_that_cannot_be_is_one_clear_line(
    broker: str, said: str, words: list[Any]
) -> None:
    result = invoke(make_app("extended", broker), *words)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1
    assert said in result.stderr
    assert "s3cret" not in result.stderr


def test_the_commands_are_found_by_celery(conninfo: str) -> None:
    for words in (["dead-letter", "health"], ["pgqueue", "status"]):
        result = celery_command(EXTENDED, conninfo, *words)
        assert (result.returncode, result.stderr) == (0, "")
