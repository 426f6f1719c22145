# SPDX-License-Identifier: BSD-3-Clause
"""Which retry policy holds for a task: its own, Celery's settings on it, the app's, in that order.

A setting counts as explicit when the task or a base class below `celery.Task` names it. Only what
is explicit overrides the app's policy, and only what is explicit is stamped on a published job.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from celery.app.task import Task

from celery_ext.policy import ErrorSpec, RetryPolicy


@dataclass(frozen=True)
class Plan:
    """How one task is retried.

    `policy` decides. `times`: it sets the wait where the task names none (otherwise Celery's
    `default_retry_delay` stands). `limits`: it sets the number of tries (otherwise `max_retries`
    stands, read at run time). `auto` lists what is retried unasked; `auto_kwargs` go to that retry.
    """

    policy: RetryPolicy
    times: bool
    limits: bool
    auto: RetryPolicy
    auto_kwargs: Mapping[str, Any]


def plan_for(task: Any, app_policy: RetryPolicy | None = None) -> Plan:
    """The plan for `task`. Raises TypeError if its `retry_policy` is not a `RetryPolicy`."""
    celery = RetryPolicy.from_task(task)
    auto_kwargs = dict(getattr(task, "retry_kwargs", None) or {})
    own = own_policy(task)
    if own is not None:
        for name in ("countdown", "max_retries"):
            auto_kwargs.pop(name, None)
        return Plan(own, times=True, limits=True, auto=_auto(celery, own), auto_kwargs=auto_kwargs)
    if is_builtin(task):
        # chord_unlock and its kin poll by their own rules; no app policy was meant for them.
        app_policy = None
    backoff = has_backoff(task)
    if backoff:
        auto_kwargs.pop("countdown", None)
    times = backoff or (app_policy is not None and not is_explicit(task, "default_retry_delay"))
    limits = app_policy is not None and not is_explicit(task, "max_retries")
    timing = app_policy if app_policy is not None and times and not backoff else celery
    policy = replace(
        timing,
        max_attempts=app_policy.max_attempts if app_policy and limits else celery.max_attempts,
        budget=app_policy.budget if app_policy else None,
        retry_for=app_policy.retry_for if app_policy else (),
        # What Celery only bars from the automatic retry, self.retry() may still retry.
        fatal_for=app_policy.fatal_for if app_policy else (),
    )
    return Plan(policy, times, limits, auto=_auto(celery, policy), auto_kwargs=auto_kwargs)


def stamps_for(task: Any, app_policy: RetryPolicy | None = None) -> dict[str, Any]:
    """The job stamps that the task's explicit settings ask for; `max_attempts` 0: unlimited."""
    own = own_policy(task)
    policy = own or (None if is_builtin(task) else app_policy)
    stamps: dict[str, Any] = {}
    if policy is not None:
        stamps.update(_timing(policy))
        stamps["max_attempts"] = policy.max_attempts or 0
        if policy.budget is not None:
            stamps["backoff_budget_s"] = policy.budget
    if own is not None:
        return stamps
    if is_explicit(task, "max_retries"):
        stamps["max_attempts"] = RetryPolicy.from_task(task).max_attempts or 0
    if has_backoff(task) or is_explicit(task, "default_retry_delay"):
        stamps.update(_timing(RetryPolicy.from_task(task)))
    return stamps


def own_policy(task: Any) -> RetryPolicy | None:
    """The task's `retry_policy`, if it names one."""
    policy = getattr(task, "retry_policy", None)
    if policy is not None and not isinstance(policy, RetryPolicy):
        raise TypeError(
            f"retry_policy of task {task.name} must be a celery_ext.RetryPolicy, not {policy!r}"
        )
    return policy


def has_backoff(task: Any) -> bool:
    """Does the task name Celery's `retry_backoff`?"""
    return bool(getattr(task, "retry_backoff", False))


def is_explicit(task: Any, name: str) -> bool:
    """Did the task, or a base class below `celery.Task`, set `name`?"""
    if name in vars(task):
        return True
    for cls in task.__class__.__mro__:  # also behind the proxy that @app.task returns
        if cls is Task:
            return False
        if name in vars(cls):
            return True
    return False


def is_builtin(task: Any) -> bool:
    """Is it one of the tasks that Celery itself brings?"""
    return str(task.name).startswith("celery.")


def _auto(celery: RetryPolicy, policy: RetryPolicy) -> RetryPolicy:
    return replace(
        policy,
        retry_for=_union(celery.retry_for, policy.retry_for),
        fatal_for=_union(celery.fatal_for, policy.fatal_for),
    )


def _union(left: tuple[ErrorSpec, ...], right: tuple[ErrorSpec, ...]) -> tuple[ErrorSpec, ...]:
    return tuple(dict.fromkeys(left + right))


def _timing(policy: RetryPolicy) -> dict[str, Any]:
    return {
        "backoff_strategy": policy.strategy,
        "backoff_base_s": policy.base,
        "backoff_cap_s": policy.cap,
    }
