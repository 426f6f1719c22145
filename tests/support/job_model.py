# SPDX-License-Identifier: BSD-3-Clause
"""A small model of jobs and their states, to hold the database against."""

from __future__ import annotations

from dataclasses import dataclass, field
from uuid import UUID

from kombu_pgqueue.values import Publication

#: What is configured where no stamp says otherwise.
MAX_ATTEMPTS = 3


@dataclass
class Job:
    """What the model knows of a job that is alive or an open dead letter."""

    published: Publication
    status: str = "queued"
    attempts: int = 0
    retries: int = 0
    deliveries: int = 0
    replays: int = 0
    acks_late: bool | None = None
    started: bool = False
    due: bool = True
    expired: bool = False
    token: UUID | None = None
    code: str | None = None
    letters: int = 0

    @property
    def alive(self) -> bool:
        return self.status != "dead"

    @property
    def max_attempts(self) -> int:
        stamp = self.published.stamps.max_attempts
        return MAX_ATTEMPTS if stamp is None else stamp

    def free(self, status: str) -> None:
        self.status, self.token, self.started = status, None, False

    def bury(self, code: str) -> None:
        self.free("dead")
        self.code = code
        self.letters += 1

    def count_attempt(self) -> None:
        self.attempts += not self.started
        self.started = True


@dataclass
class Model:
    jobs: dict[UUID, Job] = field(default_factory=dict)

    def holder_of(self, queue_name: str, key: str) -> Job | None:
        for job in self.jobs.values():
            mine = job.published
            if job.alive and mine.queue_name == queue_name and mine.idempotency_key == key:
                return job
        return None


def waiting(job: Job) -> bool:
    return job.status in ("queued", "retry_waiting")


def claimable(job: Job) -> bool:
    return waiting(job) and job.due and not job.expired


def leased(job: Job) -> bool:
    return job.token is not None


def dead(job: Job) -> bool:
    return not job.alive
