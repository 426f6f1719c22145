# SPDX-License-Identifier: BSD-3-Clause
"""How a task's outcome travels from the pool's child to the worker's main process.

Only the child knows why a task failed for good: that its retries are used up, or its waiting
budget. It notes that on the request of the run, and hands it over on the `ExceptionInfo` that
Celery's tracer returns: the `task_failure` and `task_retry` signals carry that very object, and
what is set on it survives pickling (prefork) as well as being passed by reference (threads, solo).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from celery import signals

from celery_ext.capture import Capture

_NOTES = "pgqueue_notes"
_OUTCOME = "pgqueue_outcome"


@dataclass(frozen=True)
class Outcome:
    """What the child says about a failed or retried run.

    `code`: why no retry followed, None if that is for the parent to tell. `max_retries`: the limit
    that held, None for no limit. `republished`: the task was sent again as a message of its own.
    `spoke` is False where the child said nothing.
    """

    code: str | None = None
    max_retries: int | None = None
    republished: bool = False
    spoke: bool = False


@dataclass
class Notes:
    """What is noted during one run of a task."""

    code: str | None = None
    max_retries: int | None = None
    limited: bool = False
    republished: bool = False
    captures: list[Capture] = field(default_factory=list)


def job_of(request: Any) -> dict[str, Any] | None:
    """The job behind a task's request, if it is one of ours and runs in a worker."""
    if request.called_directly or request.is_eager:
        return None
    job = (request.properties or {}).get("pgqueue")
    return job if isinstance(job, dict) and job.get("job_id") else None


def notes_of(request: Any) -> Notes | None:
    """The notes of this run, made when first asked for; None if it is not one of our jobs."""
    notes = vars(request).get(_NOTES)
    if notes is None and job_of(request) is not None:
        notes = vars(request)[_NOTES] = Notes()
    return notes if isinstance(notes, Notes) else None


def outcome_of(einfo: Any) -> Outcome:
    """What the child said with this `ExceptionInfo`; nothing known if it said nothing."""
    outcome = getattr(einfo, _OUTCOME, None)
    return outcome if isinstance(outcome, Outcome) else Outcome()


def connect() -> None:
    """Listen for the ends of runs; doing it again changes nothing."""
    uid = "celery_ext.outcome"
    signals.task_failure.connect(_hand_over, weak=False, dispatch_uid=uid)
    signals.task_retry.connect(_hand_over, weak=False, dispatch_uid=uid)


def _hand_over(sender: Any = None, einfo: Any = None, **_: Any) -> None:
    request = getattr(sender, "request", None)
    if request is None or einfo is None:
        return
    notes = vars(request).get(_NOTES)
    if isinstance(notes, Notes):
        limit = notes.max_retries if notes.limited else sender.max_retries
        setattr(einfo, _OUTCOME, Outcome(notes.code, limit, notes.republished, spoke=True))
