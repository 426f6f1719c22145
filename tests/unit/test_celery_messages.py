# SPDX-License-Identifier: BSD-3-Clause
"""C-5, FIELD 23: messages no task can take, before they become a request."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import InvalidTaskError
from celery.worker import state

from celery_ext import bootsteps
from celery_ext.bootsteps import KeepRefused
from celery_ext.strategy import check, checked_strategy
from kombu_pgqueue.verdicts import FailPermanent, Release


def message(payload: Any, **headers: Any) -> Any:
    return SimpleNamespace(payload=payload, headers={"task": "t", "id": "i", **headers}, lease=1)


@pytest.mark.parametrize(
    "payload",
    [[[1], {"a": 1}, {}], ((), {}, None), [[], {}, {"chain": None}], {"args": [], "kwargs": {}}],
)
def test_a_task_message_passes(payload: Any) -> None:
    check(message(payload))


@pytest.mark.parametrize(
    "payload",
    [42, None, "text", b"abc", [], [[], {}], ["ab", {}, {}], [[], [], {}], [[], {}, 1], {}],
)
def test_another_body_is_an_invalid_task(payload: Any) -> None:
    with pytest.raises(InvalidTaskError):
        check(message(payload))


def test_a_message_without_an_id_is_invalid() -> None:
    with pytest.raises(InvalidTaskError, match="no task id"):
        check(message([[], {}, {}], id=None))


def test_only_our_messages_are_looked_at() -> None:
    handled: list[Any] = []

    class AnyTask:
        def start_strategy(self, app: Any, consumer: Any) -> Any:
            return lambda message, body: handled.append(message)

    handle = checked_strategy(AnyTask())(None, None)
    foreign = SimpleNamespace(payload=42, headers={"task": "t"})
    handle(foreign, None)
    assert handled == [foreign]
    with pytest.raises(InvalidTaskError):
        handle(message(42), None)


class Consumer:
    """Celery's, reduced to what handles refused messages."""

    hostname = "w@test"

    def __init__(self, broker: str) -> None:
        conf = SimpleNamespace(broker_read_url=None, broker_write_url=None, broker_url=broker)
        self.app = SimpleNamespace(conf=conf)
        self.said: list[str] = []

    def create_task_handler(self) -> Any:
        return lambda message: self.said.append(message.headers["task"])

    def on_decode_error(self, message: Any, exc: Exception) -> None:
        self.said.append("decode")

    def on_unknown_message(self, body: Any, message: Any) -> None:
        self.said.append("message")

    def on_unknown_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.said.append("task")

    def on_invalid_task(self, body: Any, message: Any, exc: Exception) -> None:
        self.said.append("invalid")


def test_refused_messages_are_settled_before_celery_drops_them() -> None:
    consumer: Any = Consumer("pgqueue://localhost/x")
    KeepRefused(consumer)
    settled: list[FailPermanent] = []
    refused = SimpleNamespace(headers={"task": "gone", "id": "7"}, settle=settled.append)
    consumer.on_decode_error(refused, ValueError("no JSON"))
    consumer.on_unknown_message(None, refused)
    consumer.on_unknown_task(None, refused, KeyError("gone"))
    consumer.on_invalid_task(None, refused, InvalidTaskError("no arguments"))
    assert consumer.said == ["decode", "message", "task", "invalid"]
    assert [(each.failure_code, each.error_message) for each in settled] == [
        ("malformed", "no JSON"),
        ("malformed", "not a task message"),
        ("unregistered", "no task 'gone' is registered here"),
        ("malformed", "no arguments"),
    ]
    assert settled[2].detail["task_id"] == "7"
    assert settled[2].detail["worker"] == "w@test"


def test_another_broker_keeps_celerys_own_handlers() -> None:
    consumer: Any = Consumer("memory://")
    KeepRefused(consumer)
    assert "on_unknown_task" not in vars(consumer)


def test_a_task_name_that_is_no_text_never_becomes_a_key() -> None:  # C-5
    consumer: Any = Consumer("pgqueue://localhost/x")
    KeepRefused(consumer)
    handle = consumer.create_task_handler()
    settled: list[FailPermanent] = []
    for name in ("fine", ["a", "list"], {"a": "dict"}, 5):
        handle(SimpleNamespace(headers={"task": name}, lease=True, settle=settled.append))
    assert consumer.said == ["fine", "message", "message", "message"]
    assert [each.failure_code for each in settled] == ["malformed"] * 3


@pytest.mark.parametrize(
    "headers",
    [
        {"id": ["a", "list"]},
        {"retries": "x"},
        {"retries": -1},
        {"retries": 10**30},
        {"timelimit": "x"},
        {"timelimit": [1]},
        {"timelimit": ["a", "b"]},
    ],
)
def test_headers_that_celery_takes_on_trust(headers: dict[str, Any]) -> None:
    message = SimpleNamespace(headers={"task": "t", "id": "1", **headers}, payload=[[], {}, {}])
    with pytest.raises(InvalidTaskError):
        check(message)


def test_headers_as_celery_writes_them() -> None:
    headers = {"task": "t", "id": "1", "retries": 3, "timelimit": [None, 2.5]}
    check(SimpleNamespace(headers=headers, payload=[[], {}, {}]))


@pytest.mark.parametrize("cold", [True, 0])
def test_nothing_goes_to_the_pool_that_a_cold_shutdown_has_closed(
    monkeypatch: pytest.MonkeyPatch, cold: object
) -> None:
    # FIELD 13: the signal may come while the loop still has messages in its hands
    handed_on: list[Any] = []
    create = bootsteps._guarded_handler(None, lambda: handed_on.append)
    settled: list[Any] = []
    message = SimpleNamespace(lease=object(), headers={"task": "t"}, settle=settled.append)
    create()(message)
    assert (handed_on, settled) == ([message], [])
    monkeypatch.setattr(state, "should_terminate", cold)
    create()(message)
    assert (handed_on, settled) == ([message], [Release()])
