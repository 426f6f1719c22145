# SPDX-License-Identifier: BSD-3-Clause
"""Where the extension enters a worker: before its pool is started, and on its consumer."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery import bootsteps
from celery.worker import state

from celery_ext.broker import uses_pgqueue
from celery_ext.detail import error_text, message_detail
from celery_ext.task import adopt_all
from kombu_pgqueue.verdicts import FailPermanent, Release


class AdoptTasks(bootsteps.Step):
    """Adopts all tasks while the worker is built: pool children are forked later and inherit it."""

    def include_if(self, parent: Any) -> bool:
        return uses_pgqueue(parent.app)

    def create(self, parent: Any) -> None:
        adopt_all(parent.app, parent.app.pgqueue_retry_policy)


class KeepRefused(bootsteps.StartStopStep):
    """Messages the consumer cannot run become dead letters; Celery's own handling still follows.

    Celery acknowledges what it cannot decode and rejects what it does not know. For a broker that
    drops rejected messages that is the end; here they are kept, and can be replayed after a deploy.
    """

    def __init__(self, parent: Any, **kwargs: Any) -> None:
        super().__init__(parent, **kwargs)
        if not uses_pgqueue(parent.app):
            return
        # Set before the consumer builds its handlers from these attributes.
        parent.on_decode_error = _keeping(parent, parent.on_decode_error, "malformed", 0)
        parent.on_unknown_message = _keeping(parent, parent.on_unknown_message, "malformed", 1)
        parent.on_invalid_task = _keeping(parent, parent.on_invalid_task, "malformed", 1)
        parent.on_unknown_task = _keeping(parent, parent.on_unknown_task, "unregistered", 1)
        parent.create_task_handler = _guarded_handler(parent, parent.create_task_handler)


def _keeping(consumer: Any, original: Callable[..., Any], code: str, at: int) -> Callable[..., Any]:
    @wraps(original)
    def handle(*args: Any) -> Any:
        message = args[at]
        error = args[at + 1] if len(args) > at + 1 else None
        settle = getattr(message, "settle", None)
        if settle is not None:
            if code == "unregistered":
                name = (message.headers or {}).get("task")
                text = f"no task {name!r} is registered here"
            else:
                text = error_text(error) if error is not None else "not a task message"
            detail = message_detail(message, error, consumer.hostname)
            settle(FailPermanent(code, text, detail, consumer.hostname))
        return original(*args)

    return handle


def _guarded_handler(consumer: Any, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def create_task_handler(*args: Any, **kwargs: Any) -> Any:
        handle = original(*args, **kwargs)

        @wraps(handle)
        def on_task_received(message: Any) -> Any:
            ours = getattr(message, "lease", None) is not None
            # By identity, as Celery asks it: 0 is an exit status.
            cold = state.should_terminate is not None and state.should_terminate is not False
            if ours and cold:
                # A cold shutdown has closed the pool in the middle of the loop's round.
                message.settle(Release())
                return None
            # Celery looks it up as a key: one that is no key at all would end the worker.
            name = (message.headers or {}).get("task", "")
            if ours and not isinstance(name, str):
                return consumer.on_unknown_message(None, message)
            return handle(message)

        return on_task_received

    return create_task_handler
