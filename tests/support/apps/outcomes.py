# SPDX-License-Identifier: BSD-3-Clause
"""An app whose tasks end in every way a task can end; most arguments are only carried along."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore, Reject
from kombu import Exchange, Queue
from kombu.common import Broadcast

import celery_ext
from celery_ext import RetryPolicy

from .common import BROKER, Passing, Runs, Unlisted, make_app

QUICK = RetryPolicy(max_attempts=3, base=0.2, cap=1, retry_for=(Passing,), fatal_for=(KeyError,))


def set_up(app: Celery) -> Celery:
    """Give *app* the extension, the queues and the tasks."""
    celery_ext.setup(app)
    app.conf.task_queues = [
        Queue("celery", Exchange("celery"), "celery"),
        Queue("other", Exchange("celery"), "other"),
        Queue("one_topic", Exchange("topics", type="topic"), "a.#"),
        Broadcast("all", queue="left", auto_delete=False),
        Broadcast("all", queue="right", auto_delete=False),
    ]
    app.conf.worker_send_task_events = True

    def task(**options: Any) -> Any:
        def register(function: Any) -> Any:
            return app.task(name=function.__name__, shared=False, **options)(function)

        return register

    @task()
    def fine(*args: Any, **kwargs: Any) -> str:
        return "fine"

    @task()
    def fatal(*args: Any, **kwargs: Any) -> None:
        raise Unlisted("nobody listed this \x00 \ud800")

    @task(acks_late=True)
    def fatal_late(*args: Any, **kwargs: Any) -> None:
        raise Unlisted("nobody listed this")

    @task(acks_late=True, acks_on_failure=False)
    def fatal_unacked(*args: Any, **kwargs: Any) -> None:
        raise Unlisted("nobody listed this")

    @task(autoretry_for=(Passing,), max_retries=2, retry_backoff=0.2, retry_backoff_max=1)
    def exhausted(*args: Any, **kwargs: Any) -> None:
        raise Passing("every time")

    @task(acks_late=True, bind=True, max_retries=1, default_retry_delay=0.2, base=Task)
    def exhausted_late(self: Task, *args: Any, **kwargs: Any) -> None:
        raise self.retry()

    @task(retry_policy=QUICK)
    def by_policy(*args: Any, **kwargs: Any) -> None:
        raise Passing("every time")

    @task(bind=True, retry_policy=RetryPolicy(base=1, jitter=False, budget=0.5))
    def over_budget(self: Task, *args: Any, **kwargs: Any) -> None:
        raise self.retry(exc=Passing("too long to wait"))

    @task(bind=True, retry_policy=QUICK)
    def fatal_by_policy(self: Task, *args: Any, **kwargs: Any) -> None:
        raise self.retry(exc=KeyError("hopeless"))

    @task()
    def rejected(*args: Any, **kwargs: Any) -> None:
        raise Reject("will not")

    @task(bind=True, acks_late=True)
    def requeued_once(self: Task, *args: Any, **kwargs: Any) -> None:
        if not self.request.delivery_info["redelivered"]:
            raise Reject("once more", requeue=True)

    @task()
    def ignored(*args: Any, **kwargs: Any) -> None:
        raise Ignore

    @task(bind=True)
    def swallows(self: Task, *args: Any, **kwargs: Any) -> str:
        if self.request.retries:
            return "second"
        try:
            self.retry(countdown=0.2)
        except Exception:  # noqa: BLE001 - the careless code this task stands for
            return "first"
        return "never"

    @task(bind=True)
    def sends_on(self: Task, *args: Any, **kwargs: Any) -> str:
        if not self.request.retries:
            self.retry(countdown=0.2, throw=False)
        return "done"

    @task(bind=True)
    def changes_all(self: Task, number: int, *args: Any, **kwargs: Any) -> int:
        if self.request.retries < 2:
            changed = (number + 1, *args)
            raise self.retry(args=changed, kwargs=kwargs, queue="other", priority=9, countdown=0.2)
        return number

    @task(bind=True)
    def again(self: Task, *args: Any, **kwargs: Any) -> None:
        if not self.request.retries:
            raise self.retry(countdown=0.2)

    @task()
    def soft_limit(*args: Any, **kwargs: Any) -> None:
        time.sleep(60)

    @task(acks_late=True, acks_on_timeout=False)
    def limit_requeued(*args: Any, **kwargs: Any) -> None:
        time.sleep(60)

    @task(acks_late=True)
    def slow_late(*args: Any, **kwargs: Any) -> None:
        time.sleep(60)

    @task()
    def slow(*args: Any, **kwargs: Any) -> None:
        time.sleep(60)

    def lethal(**options: Any) -> Any:
        def decorate(function: Any) -> Any:
            return task(bind=True, **options)(function)

        return decorate

    @task()
    def interrupts(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    @task(acks_late=True)
    def interrupts_late(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    @lethal()
    def dies(self: Task, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @lethal(acks_late=True)
    def dies_late(self: Task, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @lethal(acks_late=True, reject_on_worker_lost=True)
    def dies_once(self: Task, *args: Any, **kwargs: Any) -> None:
        if not self.request.delivery_info["redelivered"]:
            os.kill(os.getpid(), signal.SIGKILL)

    @lethal(acks_late=True, retry_on_worker_lost=True, default_retry_delay=0.2)
    def dies_first(self: Task, *args: Any, **kwargs: Any) -> None:
        if not self.request.retries:
            os.kill(os.getpid(), signal.SIGKILL)

    @task(autoretry_for=(OSError,), max_retries=2, retry_backoff=0.2, retry_backoff_max=2)
    def needs_file(path: str, *args: Any, **kwargs: Any) -> str:
        with open(path, encoding="utf-8") as file:
            return file.read()

    return app


if BROKER in os.environ:
    app = set_up(make_app("outcomes"))
    Runs().connect()
