# SPDX-License-Identifier: BSD-3-Clause
"""A message whose body is not what its task can take ends at Celery's own `on_invalid_task`.

Celery's strategy unpacks headers and body on trust; one message of a foreign publisher would take
the worker's loop down with a TypeError, again after each restart.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any

from celery.exceptions import InvalidTaskError


def checked_strategy(task: Any) -> Callable[..., Any]:
    """`task.start_strategy`, its handlers looking at each message of ours first."""
    original = type(task).start_strategy

    @wraps(original)
    def start_strategy(app: Any, consumer: Any, **options: Any) -> Any:
        handle = original(task, app, consumer, **options)

        @wraps(handle)
        def handler(message: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(message, "lease", None) is not None:
                check(message)
            return handle(message, *args, **kwargs)

        return handler

    return start_strategy


def check(message: Any) -> None:
    """Raise InvalidTaskError for a message no task can take; decoding errors come as they are."""
    if "task" not in message.headers:
        return  # protocol 1: Celery has looked at the body
    if not message.headers.get("id"):
        raise InvalidTaskError("the message has no task id")
    payload = message.payload
    if isinstance(payload, Mapping):
        if "args" not in payload:
            raise InvalidTaskError("the body has no arguments")
        return
    if isinstance(payload, (str, bytes)) or not isinstance(payload, Sequence) or len(payload) != 3:
        raise InvalidTaskError("the body is not [args, kwargs, options]")
    args, kwargs, embed = payload
    if isinstance(args, (str, bytes)) or not isinstance(args, Sequence):
        raise InvalidTaskError(f"the positional arguments are no list but {type(args).__name__}")
    if not isinstance(kwargs, Mapping):
        raise InvalidTaskError(f"the keyword arguments are no mapping but {type(kwargs).__name__}")
    if embed is not None and not isinstance(embed, Mapping):
        raise InvalidTaskError(f"the options are no mapping but {type(embed).__name__}")
