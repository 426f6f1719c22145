# SPDX-License-Identifier: BSD-3-Clause
"""A message that no task can take ends at Celery's own `on_invalid_task`.

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
    _check_headers(message.headers)
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


def _check_headers(headers: Mapping[str, Any]) -> None:
    # What Celery takes on trust, outside any handler of errors: as a key, a count, a pair.
    task_id = headers.get("id")
    if not task_id:
        raise InvalidTaskError("the message has no task id")
    if not isinstance(task_id, (str, int)):
        raise InvalidTaskError(f"the task id is no text but {type(task_id).__name__}")
    retries = headers.get("retries")
    if retries is not None and not (isinstance(retries, int) and 0 <= retries < 2**31):
        raise InvalidTaskError(f"the number of retries is {str(retries)[:40]!r}")
    limits = headers.get("timelimit")
    if limits and not (
        isinstance(limits, (list, tuple)) and len(limits) == 2 and all(map(_is_limit, limits))
    ):
        raise InvalidTaskError(f"the time limits are {str(limits)[:80]!r}")


def _is_limit(value: Any) -> bool:
    return value is None or (isinstance(value, (int, float)) and 0 <= value < 2**31)
