# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts as the parameters of their queries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from kombu_pgqueue.store.base import JobRef, Parameters, seconds
from kombu_pgqueue.store.text import storable, storable_json
from kombu_pgqueue.verdicts import (
    FAILURE_CODES,
    Changes,
    FailTransient,
    Progress,
    Release,
    Succeed,
    Verdict,
)


def refs_parameters(refs: Sequence[JobRef]) -> Parameters:
    """Jobs and tokens as two arrays."""
    return {"job_ids": [each[0] for each in refs], "lease_tokens": [each[1] for each in refs]}


def batches(
    verdicts: Sequence[tuple[JobRef, Verdict]],
) -> list[tuple[str, list[int], Parameters]]:
    """Group by kind: query name, places of its entries in `verdicts`, parameters."""
    progress = [i for i, (_, verdict) in enumerate(verdicts) if isinstance(verdict, Progress)]
    succeed = [i for i, (_, verdict) in enumerate(verdicts) if isinstance(verdict, Succeed)]
    release = [i for i, (_, verdict) in enumerate(verdicts) if isinstance(verdict, Release)]
    if len(progress) + len(succeed) + len(release) != len(verdicts):
        raise TypeError("exchange takes Progress, Succeed and Release; settle takes the others")
    grouped = []
    for name, chosen in (
        ("progress_many", progress),
        ("succeed_many", succeed),
        ("release_many", release),
    ):
        if chosen:
            args = refs_parameters([verdicts[i][0] for i in chosen])
            if name == "progress_many":
                args["acks_late"] = [cast(Progress, verdicts[i][1]).acks_late for i in chosen]
            elif name == "release_many":
                args["requeue"] = [cast(Release, verdicts[i][1]).requeue for i in chosen]
            grouped.append((name, chosen, args))
    return grouped


def single(verdict: Verdict, *, wait: bool = True) -> tuple[str, Parameters]:
    """The query and its parameters besides the job's.

    Without `wait` a failure answers None at once for a row that another transaction holds.
    """
    if isinstance(verdict, Progress):
        return "progress", {"acks_late": verdict.acks_late}
    if isinstance(verdict, Succeed):
        return "succeed", {}
    if isinstance(verdict, Release):
        return "release", {"requeue": verdict.requeue}
    if isinstance(verdict, FailTransient):
        return "fail_transient", _transient(verdict, verdict.changes) | {"wait": wait}
    if verdict.failure_code not in FAILURE_CODES:
        allowed = ", ".join(sorted(FAILURE_CODES))
        raise ValueError(f"unknown failure code {verdict.failure_code!r}; known: {allowed}")
    return "fail_permanent", {
        "failure_code": verdict.failure_code,
        "error_message": storable(verdict.error_message),
        "actor": verdict.actor,
        "detail": storable_json(verdict.detail),
        "wait": wait,
    }


def _transient(failure: FailTransient, changes: Changes) -> Parameters:
    return {
        "error_code": storable(failure.error_code),
        "error_message": storable(failure.error_message),
        "actor": failure.actor,
        "delay": seconds(failure.delay),
        "retries": failure.retries,
        "queue_name": changes.queue_name,
        "priority": changes.priority,
        "envelope": changes.envelope,
        "body": changes.body,
        "expires_in": seconds(changes.expires_in),
    }
