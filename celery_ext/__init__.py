# SPDX-License-Identifier: BSD-3-Clause
"""The Celery extension of pgqueue: retries in place, dead letters, their commands.

    import celery_ext
    celery_ext.setup(app)

is all an existing app needs; its tasks stay as they are.
"""

from __future__ import annotations

from typing import Any

from celery_ext.policy import RetryPolicy

__all__ = ["RetryPolicy", "setup"]


def setup(app: Any, *, retry_policy: RetryPolicy | None = None) -> None:
    """Let failures of the app's tasks be decided here and kept as dead letters.

    `retry_policy` holds for every task that names neither a `retry_policy` of its own nor Celery's
    settings for the same thing. Call it before the worker starts; calling it again only replaces
    the policy. An app whose broker is not pgqueue runs as before.
    """
    if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
        raise TypeError(f"retry_policy must be a RetryPolicy, not {retry_policy!r}")
    from celery_ext import bootsteps, outcome, publish

    if retry_policy is not None or "pgqueue_retry_policy" not in vars(app):
        app.pgqueue_retry_policy = retry_policy
    publish.install(app)
    outcome.connect()
    app.steps["worker"].add(bootsteps.AdoptTasks)
    app.steps["consumer"].add(bootsteps.KeepRefused)
