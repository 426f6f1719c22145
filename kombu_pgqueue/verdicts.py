# SPDX-License-Identifier: BSD-3-Clause
"""How one delivery ends, as plain values that may cross threads.

A holder gives each lease exactly one final verdict; `Progress` may come before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """The task started: the attempt counts from here. Not final.

    `acks_late` False tells the reaper that the broker was already told the task is taken:
    if its worker dies the job is a dead letter, never a second run.
    """

    acks_late: bool | None = None


@dataclass(frozen=True)
class Succeed:
    """The job is done; its row goes."""


@dataclass(frozen=True)
class Release:
    """Give the job back.

    Without `requeue` it never started and costs neither attempt nor delivery. With it the task
    ran and asked to be delivered again: one delivery more, marked redelivered, old place in line.
    """

    requeue: bool = False


@dataclass(frozen=True)
class Changes:
    """What a retry changes on the row besides its delay; None leaves a column as it is."""

    queue_name: str | None = None
    priority: int | None = None
    envelope: str | None = None
    body: bytes | None = None
    expires_in: float | None = None


@dataclass(frozen=True)
class FailTransient:
    """Run it again later. `delay` in seconds; None lets the database's policy decide."""

    error_code: str
    error_message: str
    delay: float | None = None
    retries: int | None = None
    changes: Changes = field(default_factory=Changes)
    actor: str | None = None


@dataclass(frozen=True)
class FailPermanent:
    """Refuse for good: the job becomes a dead letter.

    `failure_code` is one of `FAILURE_CODES`; `detail` (JSON-ready) is kept with the dead letter:
    exception type, message, traceback, worker, ids.
    """

    failure_code: str
    error_message: str
    detail: Mapping[str, Any] = field(default_factory=dict)
    actor: str | None = None


Final = Succeed | Release | FailTransient | FailPermanent
Verdict = Progress | Final

#: Every reason a job may die for (`job_dead_letter.failure_code`).
FAILURE_CODES = frozenset(
    {
        "exhausted",
        "fatal",
        "budget_exhausted",
        "rejected",
        "expired",
        "delivery_limit",
        "lease_expired",
        "worker_lost",
        "time_limit",
        "malformed",
        "unregistered",
    }
)
