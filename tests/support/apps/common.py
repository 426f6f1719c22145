# SPDX-License-Identifier: BSD-3-Clause
"""What the sample apps share: settings handed down by a test, tasks, the ledger of their runs."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from celery import Celery, Task
from celery.signals import task_postrun, task_prerun

from tests.support.ledger import Recorder

#: Environment variables that `tests.support.worker` sets.
BROKER = "PGQUEUE_TEST_BROKER"
LEDGER = "PGQUEUE_TEST_LEDGER"


def make_app(name: str, broker: str | None = None) -> Celery:
    """Return an app on *broker*, by default that of the environment."""
    app = Celery(name, broker=broker or os.environ[BROKER], set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_ignore_result=True,
        worker_hijack_root_logger=False,
    )
    return app


class Runs:
    """Writes a ledger row around each run of a task."""

    def __init__(self) -> None:
        self._recorder = Recorder(os.environ[LEDGER]) if LEDGER in os.environ else None
        self._open: dict[str, int] = {}

    def connect(self) -> None:
        task_prerun.connect(self.before, weak=False)
        task_postrun.connect(self.after, weak=False)

    def before(self, task_id: str, task: Task, args: Any, kwargs: Any, **_: Any) -> None:
        if self._recorder is not None:
            self._open[task_id] = self._recorder.start(task, args, kwargs)

    def after(self, task_id: str, state: str | None, **_: Any) -> None:
        if self._recorder is not None:
            self._recorder.finish(self._open.pop(task_id), state or "")


class Unlisted(Exception):
    """An error that no task retries for."""


class Passing(Exception):
    """An error that goes away by itself."""


def add_tasks(app: Celery) -> None:
    """Give *app* the tasks that tests need; `<app>.<task>` is the name of each."""

    def task(**options: Any) -> Any:
        def register(function: Any) -> Any:
            return app.task(name=f"{app.main}.{function.__name__}", shared=False, **options)(
                function
            )

        return register

    @task()
    def echo(*args: Any, **kwargs: Any) -> list[Any]:
        return [args, kwargs]

    @task(acks_late=True)
    def echo_late(*args: Any, **kwargs: Any) -> list[Any]:
        return [args, kwargs]

    @task()
    def nap(seconds: float) -> None:
        time.sleep(seconds)

    @task(acks_late=True)
    def nap_late(seconds: float) -> None:
        time.sleep(seconds)

    @task(acks_late=True)
    def spin(seconds: float) -> int:
        """Burn CPU; bytecode only, so other threads get their turns."""
        end = time.monotonic() + seconds
        turns = 0
        while time.monotonic() < end:
            turns += 1
        return turns

    @task()
    def unlisted(*args: Any, **kwargs: Any) -> None:
        raise Unlisted(f"nobody retries this: {args!r} {kwargs!r}")

    @task(
        autoretry_for=(Passing,),
        max_retries=2,
        retry_backoff=0.2,
        retry_backoff_max=2,
    )
    def failing(*args: Any, **kwargs: Any) -> None:
        raise Passing(f"fails every time: {args!r} {kwargs!r}")

    @task(
        autoretry_for=(Passing,),
        max_retries=2,
        retry_backoff=0.2,
        retry_backoff_max=2,
    )
    def needs_file(path: str, *args: Any) -> str:
        """Fail until *path* exists."""
        try:
            with open(path, encoding="utf-8") as file:
                return file.read()
        except FileNotFoundError as exc:
            raise Passing(f"no {path} yet") from exc

    @task(bind=True, max_retries=3)
    def asks_again(self: Task, times: int, countdown: float = 0.2) -> int:
        """Retry by hand *times* times, then succeed."""
        if self.request.retries < times:
            raise self.retry(countdown=countdown)
        return self.request.retries

    @task(acks_late=True)
    def kills_itself(signum: int = signal.SIGKILL) -> None:
        os.kill(os.getpid(), signum)
        time.sleep(30)
