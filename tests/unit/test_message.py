# SPDX-License-Identifier: BSD-3-Clause
"""Envelope <-> row (T-6), and what a message does with its lease."""

from __future__ import annotations

import gc
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils import json

from kombu_pgqueue.envelope import clamp_priority, new_job_id, publication, unpack
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.message import Message
from kombu_pgqueue.publishing import Prepared, prepare
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Progress, Release, Succeed, Verdict

NOW = datetime.now(timezone.utc)


class Outbox:
    """Keeps what is posted."""

    def __init__(self) -> None:
        self.posted: list[Verdict] = []

    def post(self, hold: Hold, verdict: Verdict) -> None:
        self.posted.append(verdict)


def lease(envelope: str, body: bytes = b"{}", **changes: Any) -> Lease:
    values: dict[str, Any] = {
        "job_id": uuid4(),
        "lease_token": uuid4(),
        "queue_name": "q",
        "job_kind": "t",
        "task_id": "1",
        "priority": 0,
        "process_after": NOW,
        "seq": 1,
        "attempts": 0,
        "retries": 0,
        "deliveries": 0,
        "replays": 0,
        "redelivered": False,
        "backoff_spent_s": 0.0,
        "leased_until": NOW,
        "envelope": envelope,
        "body": body,
    }
    return Lease(**(values | changes))


def prepared(
    body: Any = "{}", headers: dict[str, Any] | None = None, **properties: Any
) -> Prepared:
    return prepare(body, 0, "application/json", "utf-8", headers or {}, properties)


def published(message: Prepared, **more: Any) -> Any:
    return publication(
        message, queue="q", job_id=new_job_id(), exchange="e", routing_key="r", **more
    )


def receive(outbox: Outbox, envelope: str, body: bytes = b"{}", **changes: Any) -> Message:
    channel = SimpleNamespace(
        no_ack_consumers=set(), acknowledged=lambda h, multiple: h.acknowledge()
    )
    return Message(
        Hold(lease(envelope, body, **changes), SimpleNamespace(), outbox), channel, "tag"
    )


def delivered(outbox: Outbox, body: bytes = b"{}", **changes: Any) -> Message:
    return receive(outbox, published(prepared(body)).envelope, body, **changes)


texts = st.text() | st.sampled_from(["\0", "\ud800", "\u2028", "é"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)


@given(headers=st.dictionaries(texts, values, max_size=5), body=st.binary(max_size=60))
def test_headers_and_body_come_back_as_they_were(headers: dict[str, Any], body: bytes) -> None:
    headers = {k: v for k, v in headers.items() if k not in ("eta", "expires", "retries", "task")}
    row = published(prepared(body, headers, correlation_id="c", reply_to="r"))
    assert row.envelope.isascii()
    assert row.body == body
    found = unpack(lease(row.envelope, row.body))
    assert found["headers"] == headers
    assert found["properties"]["correlation_id"] == "c"
    assert found["content_type"] == "application/json"
    assert found["delivery_info"]["exchange"] == "e"
    assert found["delivery_info"]["routing_key"] == "r"


def test_the_columns_of_a_task() -> None:
    eta = (datetime.now(timezone.utc) + timedelta(seconds=60)).isoformat()
    expires = (datetime.now(timezone.utc) + timedelta(seconds=90)).isoformat()
    headers = {"task": "proj.add", "id": "abc", "eta": eta, "expires": expires, "retries": 2}
    row = published(prepared("{}", headers, priority=7, delivery_mode=2), visibility_timeout=3.0)
    assert (row.job_kind, row.task_id, row.priority, row.durable) == ("proj.add", "abc", 7, True)
    assert row.delay == pytest.approx(60, abs=1)  # T-6
    assert row.expires_in == pytest.approx(90, abs=1)
    assert row.stamps.visibility_timeout_s == 3.0
    assert json.loads(row.envelope)["headers"]["eta"] == eta  # the stored envelope keeps it


def test_eta_is_gone_on_delivery_and_retries_are_the_rows() -> None:  # T-6
    eta = "2020-01-01T00:00:00+00:00"
    row = published(prepared("{}", {"task": "t", "eta": eta, "expires": eta, "retries": 0}))
    found = unpack(lease(row.envelope, retries=3, redelivered=True, deliveries=1, priority=4))
    assert found["headers"]["eta"] is None
    assert found["headers"]["retries"] == 3
    assert found["headers"]["expires"] == eta
    assert found["delivery_info"]["redelivered"] is True
    assert found["properties"]["priority"] == 4
    assert unpack(lease(row.envelope, replays=1))["headers"]["expires"] is None


def test_an_eta_that_is_none_stays_for_celery_to_refuse() -> None:
    row = published(prepared("{}", {"task": "t", "eta": "soon"}))
    assert row.delay == 0
    assert unpack(lease(row.envelope))["headers"]["eta"] == "soon"


@pytest.mark.parametrize(
    ("eta", "delay"),
    [
        ("2020-01-01T00:00:00", 0),
        (datetime(2020, 1, 1, tzinfo=timezone.utc), 0),
        (None, 0),
        ("", 0),
        ("2999-01-01T00:00:00Z", 3e10),
    ],
)
def test_kinds_of_eta(eta: Any, delay: float) -> None:
    assert published(prepared("{}", {"eta": eta})).delay == pytest.approx(delay, rel=0.1)


def test_expirations() -> None:
    assert published(prepared("{}", expiration="1500")).expires_in == 1.5
    assert published(prepared("{}", {"expires": 0})).expires_in is None  # kombu.pidbox says 0
    both = published(prepared("{}", {"expires": "2020-01-01T00:00:00"}, expiration="1500"))
    assert both.expires_in is not None
    assert both.expires_in < 0


@pytest.mark.parametrize(
    ("given_", "stored"), [(None, 0), (-5, 0), (300, 255), ("8", 8), ("x", 0), (9, 9)]
)
def test_priorities_are_clamped(given_: Any, stored: int) -> None:
    assert clamp_priority(given_) == stored


def test_our_properties() -> None:
    ours = {"stamps": {"max_attempts": 3, "backoff_base_s": None}, "acks_late": True}
    row = published(prepared("{}", idempotency_key="k", pgqueue=ours, delivery_mode=1))
    assert row.stamps.max_attempts == 3
    assert row.acks_late is True
    assert row.idempotency_key == "k"
    assert row.durable is False
    with pytest.raises(ValueError, match="max_attempt"):
        published(prepared("{}", pgqueue={"stamps": {"max_attempt": 3}}))


def test_job_ids_are_version_7_and_ordered() -> None:
    ids = [new_job_id() for _ in range(2000)]
    assert {(each.version, each.variant) for each in ids} == {(7, "specified in RFC 4122")}
    assert len(set(ids)) == 2000
    # Two within a quarter of a microsecond may swap; the thousandth is later for sure.
    assert all(early < late for early, late in zip(ids, ids[1000:], strict=False))


def test_a_publish_that_failed_keeps_its_job_id_when_tried_again() -> None:  # T-10
    headers: dict[str, Any] = {"id": "1"}
    properties: dict[str, Any] = {}
    first = prepare("body", 0, "t", "e", headers, properties)
    again = prepare("body", 0, "t", "e", headers, properties)
    assert first.job_id("q") == again.job_id("q")
    again.published()
    assert prepare("body", 0, "t", "e", headers, properties).job_id("q") != first.job_id("q")


def test_another_message_has_another_job_id() -> None:
    headers: dict[str, Any] = {"id": "1"}
    first = prepare("body", 0, "t", "e", headers, {}).job_id("q")
    assert prepare("other", 0, "t", "e", headers, {}).job_id("q") != first
    assert prepare("other", 0, "t", "e", dict(headers), {}).job_id("q") != first


def test_one_id_for_each_queue() -> None:
    message = prepared()
    assert message.job_id("a") != message.job_id("b")
    assert message.job_id("a") == message.job_id("a")


def test_ack_succeeds_once() -> None:
    outbox = Outbox()
    message = delivered(outbox)
    message.ack()
    assert outbox.posted == [Succeed()]
    with pytest.raises(Message.MessageStateError):
        message.ack()
    message.settle(FailPermanent("fatal", "late"))
    assert outbox.posted == [Succeed()]


def test_settle_comes_first_and_ack_changes_nothing() -> None:
    outbox = Outbox()
    message = delivered(outbox)
    verdict = FailTransient("x", "y", delay=1)
    message.settle(verdict)
    message.ack()
    assert message.acknowledged
    assert outbox.posted == [verdict]


def test_an_early_ack_only_says_started() -> None:  # C-6
    outbox = Outbox()
    message = delivered(outbox)
    message.early = True
    message.started()
    message.ack()
    assert outbox.posted == [Progress(acks_late=False)]
    message.settle(Succeed())
    assert outbox.posted == [Progress(acks_late=False), Succeed()]


def test_started_is_said_once_and_early_may_follow() -> None:
    outbox = Outbox()
    message = delivered(outbox)
    message.started()
    message.started()
    message.early = True
    message.ack()
    assert outbox.posted == [Progress(), Progress(acks_late=False)]


@pytest.mark.parametrize(
    ("act", "verdict"),
    [
        (lambda m: m.reject(), FailPermanent("rejected", "rejected by the consumer")),
        (lambda m: m.reject(requeue=True), Release(requeue=True)),
        (lambda m: m.requeue(), Release(requeue=True)),
    ],
)
def test_rejections(act: Any, verdict: Verdict) -> None:
    outbox = Outbox()
    message = delivered(outbox)
    act(message)
    assert outbox.posted == [verdict]


@pytest.mark.parametrize("act", ["ack", "reject"])
def test_a_body_that_cannot_be_decoded_is_malformed_not_done(act: str) -> None:  # C-5
    outbox = Outbox()
    message = delivered(outbox, b"{no json")
    with pytest.raises(Exception, match=r"JSON|Expecting"):
        message.decode()
    getattr(message, act)()
    (verdict,) = outbox.posted
    assert isinstance(verdict, FailPermanent)
    assert verdict.failure_code == "malformed"


def test_a_body_that_cannot_be_decompressed_is_malformed() -> None:
    outbox = Outbox()
    row = published(prepared(b"x", {"compression": "application/x-gzip"}))
    message = receive(outbox, row.envelope, b"not gzip")
    assert message.errors
    message.ack()
    assert isinstance(outbox.posted[0], FailPermanent)


@pytest.mark.parametrize(
    "envelope",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"headers": [], "properties": {}}',
        '{"headers":{},"properties":null}',
    ],
)
def test_an_envelope_that_cannot_be_read(envelope: str) -> None:
    with pytest.raises(ValueError, match="envelope"):
        receive(Outbox(), envelope)


def test_a_forgotten_message_is_released() -> None:  # T-10
    outbox = Outbox()
    message = delivered(outbox)
    del message
    gc.collect()
    assert outbox.posted == [Release()]


def test_a_forgotten_message_that_had_started() -> None:
    outbox = Outbox()
    message = delivered(outbox)
    message.started()
    del message
    gc.collect()
    assert outbox.posted == [Progress(), Release(requeue=True)]


def test_a_forgotten_message_acknowledged_early_is_no_second_run() -> None:  # C-6
    outbox = Outbox()
    message = delivered(outbox)
    message.early = True
    message.ack()
    del message
    gc.collect()
    assert isinstance(outbox.posted[-1], FailPermanent)
    assert outbox.posted[-1].failure_code == "worker_lost"


def test_a_settled_message_is_forgotten_in_silence() -> None:
    outbox = Outbox()
    message = delivered(outbox)
    message.ack()
    del message
    gc.collect()
    assert outbox.posted == [Succeed()]


@pytest.mark.parametrize("when", ["9999-12-31T23:59:59-14:00", 1e30, float("inf")])
def test_a_time_beyond_the_calendar_is_its_end(when: Any) -> None:
    row = published(prepared("{}", {"eta": when, "expires": when}))
    now = datetime.now(timezone.utc)
    assert (now + timedelta(seconds=row.delay)).year == 9999
    assert (now + timedelta(seconds=row.expires_in)).year == 9999


def test_a_time_before_the_calendar_is_long_ago() -> None:
    row = published(prepared("{}", {"expires": "0001-01-01T00:00:00+14:00"}))
    assert (datetime.now(timezone.utc) + timedelta(seconds=row.expires_in)).year in (1969, 1970)
