# SPDX-License-Identifier: BSD-3-Clause
"""What is kept about a failure besides the message itself."""

from __future__ import annotations

from typing import Any

from celery.utils.serialization import UnpickleableExceptionWrapper
from kombu.utils.encoding import safe_repr, safe_str

from celery_ext.outcome import outcome_of


def error_code(error: Any) -> str:
    """The qualified name of an error's class; `retry` where the task named no error."""
    if isinstance(error, UnpickleableExceptionWrapper):
        return f"{error.exc_module}.{error.exc_cls_name}"
    if not isinstance(error, BaseException):
        return "retry"
    module, name = type(error).__module__, type(error).__qualname__
    return name if module == "builtins" else f"{module}.{name}"


def error_text(error: Any) -> str:
    """What an error says; its class where it says nothing."""
    try:
        return str(error) or error_code(error)
    except Exception:  # noqa: BLE001 - an error that cannot even be shown must still be kept
        return safe_repr(error)


def failure_detail(request: Any, error: Any, exc_info: Any) -> dict[str, Any]:
    """JSON-ready facts for the dead letter of a worker's `request`."""
    outcome = outcome_of(exc_info)
    fields = request.request_dict
    return {
        "type": error_code(error) if error is not None else None,
        "message": error_text(error) if error is not None else None,
        "traceback": safe_str(getattr(exc_info, "traceback", None) or "") or None,
        "worker": request.hostname,
        "pid": request.worker_pid,
        "task_id": request.id,
        "root_id": request.root_id,
        "parent_id": request.parent_id,
        "retries": int(fields.get("retries") or 0),
        "max_retries": outcome.max_retries if outcome.spoke else request.task.max_retries,
    }


def message_detail(message: Any, error: Any, hostname: str) -> dict[str, Any]:
    """The same for a message that never became a request."""
    headers = message.headers or {}
    return {
        "type": error_code(error) if error is not None else None,
        "message": error_text(error) if error is not None else None,
        "traceback": None,
        "worker": hostname,
        "pid": None,
        "task_id": headers.get("id"),
        "root_id": headers.get("root_id"),
        "parent_id": headers.get("parent_id"),
        "retries": headers.get("retries"),
        "max_retries": None,
    }
