# SPDX-License-Identifier: BSD-3-Clause
"""The worker's side of a task: `retry()` changes the job's row instead of publishing a new message.

Everything is set on the task *instance*, so it holds for any base class, `celery.Task` included,
and whatever the class overrides still runs: the replacements call `type(task)`'s own methods.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from random import random
from typing import Any

from celery.exceptions import Ignore, Reject, Retry, TaskPredicate
from kombu.utils.imports import symbol_by_name

from celery_ext.capture import Capture, JobRetry, inject_producer
from celery_ext.outcome import Notes, job_of, notes_of
from celery_ext.plan import Plan, plan_for
from celery_ext.policy import DeadLetter, RetryPolicy
from celery_ext.request import request_class
from celery_ext.strategy import checked_strategy
from celery_ext.waiting import seconds_until

_ADOPTED = "pgqueue_adopted"
_UNLIMITED = sys.maxsize


def adopt_all(app: Any, app_policy: RetryPolicy | None = None) -> None:
    """Adopt every registered task of `app`."""
    for task in app.tasks.values():
        adopt(task, app_policy)


def adopt(task: Any, app_policy: RetryPolicy | None = None) -> None:
    """Let `task` end its jobs through verdicts; doing it again changes nothing."""
    if vars(task).get(_ADOPTED):
        return
    plan = plan_for(task, app_policy)
    task.Request = request_class(symbol_by_name(task.Request))
    task.start_strategy = checked_strategy(task)
    task.signature_from_request = _signature(task)
    task.retry = _retry(task, plan)
    task.run = _run(task, plan)
    setattr(task, _ADOPTED, True)


def _signature(task: Any) -> Callable[..., Any]:
    original = type(task).signature_from_request

    @wraps(original)
    def signature_from_request(*args: Any, **options: Any) -> Any:
        inject_producer(options, args[0] if args else options.get("request"))
        return original(task, *args, **options)

    return signature_from_request


def _retry(task: Any, plan: Plan) -> Callable[..., Any]:
    original = type(task).retry
    signature = inspect.signature(original)

    @wraps(original)
    def retry(*args: Any, **options: Any) -> Any:
        notes = notes_of(task.request)
        try:
            call = _Call(signature.bind(task, *args, **options))
            if notes is None:
                return original(*call.args, **call.kwargs)
            return _retry_job(task, plan, notes, original, call)
        finally:
            # Celery keeps a call's max_retries on the task all requests share.
            vars(task).pop("override_max_retries", None)

    return retry


def _retry_job(
    task: Any, plan: Plan, notes: Notes, original: Callable[..., Any], call: _Call
) -> Any:
    request, error = task.request, call.get("exc")
    code = _prepare(task, plan, notes, call)
    # Without throw the task goes on, so the retry is a message of its own, as in Celery.
    capture = Capture(task.app, request) if call.get("throw", True) else None
    try:
        with capture() if capture else nullcontext():
            return original(*call.args, **call.kwargs)
    except Retry as exc:
        retry = exc
    except (Ignore, Reject):
        raise
    except Exception as exc:
        if _is_exhaustion(task, exc, error):
            notes.code = code or "exhausted"
        raise
    job = capture.with_delay(retry.when) if capture else None
    if capture is None or job is None:
        raise retry
    notes.captures.append(capture)
    capture.job = job
    # Outside the handler, so that its context stays the error the task was handling.
    raise JobRetry.of(retry, job).with_traceback(retry.__traceback__)


def _prepare(task: Any, plan: Plan, notes: Notes, call: _Call) -> str | None:
    """Write the policy's decision into the call; return why there is no retry, None if there is."""
    request, job = task.request, job_of(task.request) or {}
    limit = call.get("max_retries")
    if limit is None and plan.limits:
        limit = _UNLIMITED if plan.policy.max_attempts is None else plan.policy.max_attempts - 1
        call.put("max_retries", limit)
    if limit is None:
        limit = task.max_retries
    unlimited = limit is None or limit >= _UNLIMITED
    notes.limited, notes.max_retries = True, None if unlimited else limit
    policy = replace(plan.policy, max_attempts=None if unlimited else max(limit, 0) + 1)
    named = _named_delay(task, call)
    wait = task.default_retry_delay if named is None and not plan.times else named
    error = call.get("exc")
    decision = policy.decide(
        request.retries + 1,
        error if isinstance(error, BaseException) else None,
        float(job.get("backoff_spent") or 0.0),
        random(),
        asked=True,
        delay=None if wait is None and plan.times else float(wait or 0.0),
    )
    if isinstance(decision, DeadLetter):
        if decision.code != "exhausted":
            # Celery gives up for one reason only: a limit that is reached. So it is.
            call.put("max_retries", request.retries)
        return decision.code
    if named is None and plan.times:
        call.put("countdown", decision.delay)
    return None


def _named_delay(task: Any, call: _Call) -> float | None:
    # As Celery reads them: an eta wins, and a countdown of 0 is one.
    eta = call.get("eta")
    return seconds_until(eta, task.app) if eta else seconds_until(call.get("countdown"), task.app)


def _is_exhaustion(task: Any, raised: BaseException, given: Any) -> bool:
    # retry() raises the error it was given, or MaxRetriesExceededError; anything else is a bug in
    # the call, and no reason to say that the retries are used up.
    if isinstance(raised, task.MaxRetriesExceededError) or raised is given:
        return True
    return isinstance(given, type) and isinstance(raised, given)


class _Call:
    """The arguments of one call of `retry`, whatever signature the task's class gave it."""

    def __init__(self, bound: inspect.BoundArguments) -> None:
        self._bound = bound
        parameters = bound.signature.parameters.values()
        self._rest = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), None)

    def get(self, name: str, default: Any = None) -> Any:
        arguments = self._bound.arguments
        if name in arguments and name != self._rest:
            return arguments[name]
        return arguments.get(self._rest, {}).get(name, default) if self._rest else default

    def put(self, name: str, value: Any) -> None:
        if name in self._bound.signature.parameters and name != self._rest:
            self._bound.arguments[name] = value
        elif self._rest:
            self._bound.arguments.setdefault(self._rest, {})[name] = value

    @property
    def args(self) -> tuple[Any, ...]:
        return self._bound.args

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._bound.kwargs


def _run(task: Any, plan: Plan) -> Callable[..., Any]:
    # Celery's own automatic retry cuts fractions and lets the first delay be 0: ours replaces it.
    original = getattr(task, "_orig_run", None) or task.run

    def automatic(*args: Any, **kwargs: Any) -> Any:
        try:
            return original(*args, **kwargs)
        except TaskPredicate:
            raise
        except Exception as exc:
            notes = notes_of(task.request)
            if (notes is not None and notes.code) or not plan.auto.retries(exc):
                raise
            raise task.retry(exc=exc, **plan.auto_kwargs) from exc

    @wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            result = automatic(*args, **kwargs)
        except JobRetry as exc:
            _publish_hidden(task, exc.job)
            raise
        except Exception:
            _publish_hidden(task)
            raise
        _publish_hidden(task)
        return result

    return run


def _publish_hidden(task: Any, leaving: Any = None) -> None:
    """Publish the retries whose exception the task swallowed: in Celery they were on their way."""
    notes = notes_of(task.request)
    if notes is None:
        return
    hidden = [capture for capture in notes.captures if capture.job is not leaving]
    notes.captures.clear()
    for capture in hidden:
        try:
            capture.publish()
        except Exception as exc:
            # What Task.retry does when it cannot publish.
            raise Reject(exc, requeue=False) from exc
        notes.republished = True
