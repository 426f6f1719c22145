# SPDX-License-Identifier: BSD-3-Clause
"""What a published task says about itself to the queue: its stamps, and when it is acknowledged."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from celery._state import get_current_worker_task
from celery.app.amqp import AMQP
from kombu.utils.imports import symbol_by_name

from celery_ext.broker import uses_pgqueue
from celery_ext.capture import CapturingProducer
from celery_ext.outcome import notes_of
from celery_ext.plan import stamps_for

_PROPERTY = "pgqueue"


def install(app: Any) -> None:
    """Let messages of `app`, and of no other app, carry their stamps."""
    made = vars(app).get("amqp")
    if made is not None:
        # The app has built its AMQP object already: teach that one.
        base: Any = type(made)
        made.__class__ = stamping_amqp(base)
        vars(made).pop("send_task_message", None)
    app.amqp_cls = stamping_amqp(symbol_by_name(app.amqp_cls))


class StampingMixin:
    """Mixed in before Celery's `AMQP`."""

    app: Any

    def _create_task_sender(self) -> Callable[..., Any]:
        send = super()._create_task_sender()  # type: ignore[misc]
        app = self.app
        if not uses_pgqueue(app, write=True):
            return send

        def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
            own = properties_of(app, name)
            given = options.pop(_PROPERTY, None) or {}
            if own or given:
                message.properties[_PROPERTY] = {**own, **given}
            result = send(producer, name, message, **options)
            _note_publication(producer, message)
            return result

        return send_task_message


class PgQueueAMQP(StampingMixin, AMQP):
    """Celery's `AMQP`, with stamps."""


def properties_of(app: Any, name: str) -> dict[str, Any]:
    """The message property for a task of this app; empty for one it does not know."""
    task = app.tasks.get(name)
    if task is None:
        return {}
    properties: dict[str, Any] = {"acks_late": bool(task.acks_late)}
    stamps = stamps_for(task, app.pgqueue_retry_policy)
    if stamps:
        properties["stamps"] = stamps
    return properties


def _note_publication(producer: Any, message: Any) -> None:
    """Remember that the running task was sent again under its own id, past any capture."""
    if isinstance(producer, CapturingProducer) and not producer.passed_on:
        return
    task = get_current_worker_task()
    request = task.request if task is not None else None
    fields = message.headers if "task" in message.headers else message.body
    if request is None or not isinstance(fields, dict) or fields.get("id") != request.id:
        return
    notes = notes_of(request)
    if notes is not None:
        notes.republished = True


@cache
def stamping_amqp(base: type) -> type:
    """`base`, Celery's `AMQP` or a class like it, with stamps."""
    if issubclass(base, StampingMixin):
        return base
    if base is AMQP:
        return PgQueueAMQP  # importable, so that an app can be pickled for a spawned child
    return type(f"PgQueue{base.__name__}", (StampingMixin, base), {"__module__": base.__module__})
