# SPDX-License-Identifier: BSD-3-Clause
"""C-5, C-6: each way a run can end, as the one verdict on its job."""

from __future__ import annotations

import time
from typing import Any

import pytest
from billiard.einfo import ExceptionInfo
from celery import Celery, signals
from celery.exceptions import (
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import state
from celery.worker.request import Request

from celery_ext import outcome
from celery_ext.request import VerdictRequest, request_class
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Release, Succeed
from tests.support.delivery import Delivery, make_app

LATE = pytest.mark.parametrize("late", [False, True], ids=["early", "late"])


@pytest.fixture
def app() -> Celery:
    outcome.connect()
    app = make_app()
    app.pgqueue_retry_policy = None
    return app


def make(app: Celery, function: Any = None, **options: Any) -> Delivery:
    def work(*args: Any) -> str:
        return "done"

    delivery = Delivery(app.task(**options)(function or work), ("a",))
    delivery.accept()
    return delivery


def einfo(exc: BaseException) -> ExceptionInfo:
    try:
        raise exc
    except BaseException:  # noqa: BLE001 - also SystemExit
        return ExceptionInfo()


@LATE
def test_the_start_is_said_before_celery_acknowledges(app: Celery, late: bool) -> None:
    delivery = make(app, acks_late=late)
    assert delivery.message.said == (["started"] if late else ["started early", "ack"])
    assert delivery.message.verdict is None


@LATE
def test_success(app: Celery, late: bool) -> None:
    delivery = make(app, acks_late=late)
    delivery.request.on_success(delivery.trace())
    assert delivery.message.verdict == Succeed()
    assert delivery.request.acknowledged


@LATE
def test_a_failure_keeps_its_circumstances(app: Celery, late: bool) -> None:
    def work(value: str) -> None:
        raise ValueError(f"bad {value}")

    delivery = make(app, work, acks_late=late)
    delivery.request.on_success(delivery.trace())
    verdict = delivery.message.verdict
    assert isinstance(verdict, FailPermanent)
    assert (verdict.failure_code, verdict.error_message) == ("fatal", "bad a")
    assert verdict.actor == "w@test"
    detail = dict(verdict.detail)
    assert "raise ValueError" in detail.pop("traceback")
    assert detail == {
        "type": "ValueError",
        "message": "bad a",
        "worker": "w@test",
        "pid": delivery.request.worker_pid,
        "task_id": delivery.request.id,
        "root_id": delivery.request.id,
        "parent_id": None,
        "retries": 0,
        "max_retries": 3,
    }
    assert delivery.request.acknowledged


@LATE
def test_acks_on_failure_off_changes_nothing_for_the_job(app: Celery, late: bool) -> None:
    def work(value: str) -> None:
        raise ValueError

    delivery = make(app, work, acks_late=late, acks_on_failure=False)
    delivery.request.on_success(delivery.trace())
    assert delivery.message.verdict.failure_code == "fatal"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"acks_late": False}, "worker_lost"),
        ({"acks_late": True}, "worker_lost"),
        ({"acks_late": True, "reject_on_worker_lost": True}, Release(requeue=True)),
        ({"acks_late": False, "reject_on_worker_lost": True}, "worker_lost"),
    ],
)
def test_a_lost_child(app: Celery, options: dict[str, Any], expected: Any) -> None:
    delivery = make(app, **options)
    delivery.request.on_failure(einfo(WorkerLostError("signal 9 (SIGKILL)")))
    verdict = delivery.message.verdict
    assert getattr(verdict, "failure_code", verdict) == expected


@LATE
def test_retry_on_worker_lost_is_one_update_too(app: Celery, late: bool) -> None:
    delivery = make(app, acks_late=late, retry_on_worker_lost=True, default_retry_delay=9)
    delivery.request.on_failure(einfo(WorkerLostError("signal 9")))
    verdict = delivery.message.verdict
    assert isinstance(verdict, FailTransient)
    assert 8.9 < verdict.delay <= 9
    assert (verdict.retries, verdict.error_message) == (1, "signal 9")
    assert verdict.error_code.endswith("WorkerLostError")


def test_retry_on_worker_lost_ends_with_max_retries(app: Celery) -> None:
    delivery = make(app, acks_late=True, retry_on_worker_lost=True, max_retries=0)
    delivery.request.on_failure(einfo(WorkerLostError("signal 9")))
    assert delivery.message.verdict.failure_code == "worker_lost"


def test_a_child_lost_after_it_stored_success(app: Celery, monkeypatch: Any) -> None:
    delivery = make(app, acks_late=True)
    monkeypatch.setattr(Request, "_success_was_stored", lambda self: {"result": 1})
    delivery.request.on_failure(einfo(WorkerLostError("signal 9")))
    assert delivery.message.verdict == Succeed()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"acks_late": False}, "time_limit"),
        ({"acks_late": True}, "time_limit"),
        ({"acks_late": True, "acks_on_timeout": False}, Release(requeue=True)),
        ({"acks_late": False, "acks_on_timeout": False}, "time_limit"),
    ],
)
@pytest.mark.parametrize("first", ["on_failure", "on_timeout"])
def test_a_hard_time_limit(app: Celery, first: str, options: dict[str, Any], expected: Any) -> None:
    delivery = make(app, **options)
    failed = einfo(TimeLimitExceeded(5))
    ends = {
        "on_failure": lambda: delivery.request.on_failure(failed),
        "on_timeout": lambda: delivery.request.on_timeout(False, 5),
    }
    ends.pop(first)()
    verdict = delivery.message.verdict
    assert getattr(verdict, "failure_code", verdict) == expected
    for end in ends.values():
        end()
    assert delivery.message.verdict is verdict


def test_a_soft_time_limit_is_told_by_its_code(app: Celery) -> None:
    def work(value: str) -> None:
        raise SoftTimeLimitExceeded

    delivery = make(app, work)
    delivery.request.on_timeout(True, 3)
    assert delivery.message.verdict is None
    delivery.request.on_success(delivery.trace())
    assert delivery.message.verdict.failure_code == "time_limit"


@LATE
def test_revoked_and_terminated_is_done(app: Celery, late: bool) -> None:
    delivery = make(app, acks_late=late)
    delivery.request.on_failure(einfo(Terminated("SIGTERM")))
    assert delivery.message.verdict == Succeed()


@LATE
def test_interrupted_by_the_worker_itself(app: Celery, late: bool) -> None:
    delivery = make(app, acks_late=late)
    delivery.request._already_cancelled = True
    delivery.request.on_failure(einfo(SystemExit(1)))
    verdict = delivery.message.verdict
    expected = Release(requeue=True) if late else "worker_lost"
    assert getattr(verdict, "failure_code", verdict) == expected


def test_revoked_before_it_started_is_done(app: Celery) -> None:
    delivery = Delivery(app.task(make_work()))
    state.revoked.add(delivery.request.id)
    try:
        assert delivery.request.revoked()
    finally:
        state.revoked.discard(delivery.request.id)
    assert delivery.message.verdict == Succeed()


def test_expired_before_it_started_is_kept(app: Celery) -> None:
    past = "2020-01-01T00:00:00+00:00"
    delivery = Delivery(app.task(make_work()), headers={"expires": past})
    assert delivery.request.revoked()
    assert delivery.message.verdict.failure_code == "expired"
    # Or a replay would be taken for revoked here.
    assert delivery.request.id not in state.revoked


def make_work() -> Any:
    def work() -> None:
        pass

    return work


def test_a_memory_error_is_kept_although_celery_raises_it(app: Celery) -> None:
    delivery = make(app)
    with pytest.raises(MemoryError):
        delivery.request.on_failure(einfo(MemoryError("out")))
    assert delivery.message.verdict.failure_code == "fatal"


def test_what_solo_reports_of_a_base_exception_is_kept(app: Celery) -> None:
    delivery = make(app)
    # Celery would end a solo worker by a TypeError here.
    delivery.request.on_success(einfo(WorkerLostError("KeyboardInterrupt()")))
    assert delivery.message.verdict.failure_code == "worker_lost"


@LATE
def test_celerys_signals_come_as_ever(app: Celery, late: bool) -> None:
    seen: list[str] = []

    def work(value: str) -> None:
        raise ValueError

    delivery = make(app, work, acks_late=late)

    def failed(task_id: str, exception: Any, **_: Any) -> None:
        seen.append(f"{task_id == delivery.request.id} {exception!r}")

    signals.task_failure.connect(failed)
    try:
        delivery.request.on_success(delivery.trace())
    finally:
        signals.task_failure.disconnect(failed)
    assert seen == ["True ValueError()"]


class Recording(Request):
    """A user's own Request class."""

    def on_failure(self, exc_info: Any, **options: Any) -> None:  # type: ignore[override]
        self.noted = True
        super().on_failure(exc_info, **options)


def test_a_users_request_class_keeps_its_say(app: Celery) -> None:
    def work(value: str) -> None:
        raise ValueError

    delivery = make(app, work, Request=f"{__name__}.Recording")
    delivery.request.on_success(delivery.trace())
    assert isinstance(delivery.request, Recording)
    assert isinstance(delivery.request, VerdictRequest)
    assert delivery.request.noted
    assert delivery.message.verdict.failure_code == "fatal"


def test_a_request_class_is_made_once() -> None:
    assert request_class(Recording) is request_class(Recording)
    assert request_class(request_class(Recording)) is request_class(Recording)


def test_a_message_of_another_broker_is_only_acknowledged(app: Celery) -> None:
    def work(value: str) -> None:
        raise ValueError

    delivery = Delivery(app.task(work), ("a",), ours=False)
    delivery.request.on_accepted(1, time.monotonic())
    delivery.request.on_success(delivery.trace())
    assert delivery.message.said == ["ack"]
