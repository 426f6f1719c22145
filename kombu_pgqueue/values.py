# SPDX-License-Identifier: BSD-3-Clause
"""Frozen values that cross the store's boundary. They know no kombu and no Celery."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any
from uuid import UUID


@dataclass(frozen=True)
class Stamps:
    """Per-job settings fixed at enqueue; None means: read `job_config` when it is needed.

    Times are seconds. `max_attempts` 0 stamps "unlimited".
    """

    visibility_timeout_s: float | None = None
    max_attempts: int | None = None
    backoff_strategy: str | None = None
    backoff_base_s: float | None = None
    backoff_cap_s: float | None = None
    backoff_budget_s: float | None = None
    dead_letter_retention_s: float | None = None


@dataclass(frozen=True)
class Publication:
    """One message on its way into one queue.

    `delay` and `expires_in` are seconds from the moment of publishing, so that only the
    database's clock counts. `idempotency_key` None stores the job id as the key.
    `retries` is Celery's own count so far, of a task it sent again as a new message.
    """

    job_id: UUID
    queue_name: str
    envelope: str
    body: bytes
    job_kind: str = ""
    task_id: str | None = None
    priority: int = 0
    delay: float = 0.0
    expires_in: float | None = None
    idempotency_key: str | None = None
    retries: int = 0
    acks_late: bool | None = None
    durable: bool = True
    stamps: Stamps = field(default_factory=Stamps)


@dataclass(frozen=True)
class Enqueued:
    """`created` is False when a live job already held the key; `waiting`: some consumer sleeps."""

    job_id: UUID
    created: bool
    waiting: bool


@dataclass(frozen=True)
class Mark:
    """Low-water mark of one queue and priority: everything ready before it has been claimed."""

    process_after: datetime
    seq: int


@dataclass(frozen=True)
class Lease:
    """One delivery of one job: what was claimed and the token every verdict must carry."""

    job_id: UUID
    lease_token: UUID
    queue_name: str
    job_kind: str
    task_id: str | None
    priority: int
    process_after: datetime
    seq: int
    attempts: int
    retries: int
    deliveries: int
    replays: int
    redelivered: bool
    backoff_spent_s: float
    leased_until: datetime
    envelope: str
    body: bytes

    @property
    def ref(self) -> tuple[UUID, UUID]:
        """`(job_id, lease_token)`: what a verdict names."""
        return self.job_id, self.lease_token


@dataclass(frozen=True)
class DeadLetter:
    """A job that will not run again by itself, as `job_dead_letter` keeps it (bar the body)."""

    dead_letter_id: int
    previous_id: int | None
    job_id: UUID
    job_kind: str
    event_domain: str
    executor: str | None
    idempotency_key: str
    failure_code: str
    failure_detail: Mapping[str, Any]
    last_error: str | None
    attempts: int
    job_snapshot: Mapping[str, Any]
    envelope: str
    body: bytes
    claimed_at: datetime | None
    expires_at: datetime | None
    first_failed_at: datetime | None
    last_failed_at: datetime
    died_at: datetime
    resolved_at: datetime | None
    resolution: str | None
    resolution_note: str | None
    resolved_by: str | None
    visibility_timeout_s: float | None
    max_attempts: int | None
    backoff_strategy: str | None
    backoff_base_s: float | None
    backoff_cap_s: float | None
    backoff_budget_s: float | None
    dead_letter_retention_s: float | None
