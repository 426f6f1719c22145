# SPDX-License-Identifier: BSD-3-Clause
"""A holder's verbs: claim, the verdicts, and what a sleeping consumer needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast
from uuid import UUID

import psycopg

from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.store.base import JobRef, Parameters, Row, StoreBase, seconds
from kombu_pgqueue.store.errors import store_errors
from kombu_pgqueue.store.verdict_rows import batches, refs_parameters, single
from kombu_pgqueue.values import Lease, Mark
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Verdict


@dataclass(frozen=True)
class ClaimRequest:
    """What one subscription asks for: up to `limit` jobs of these queues.

    `marks` are low-water marks by `(queue_name, priority)`: rows before them are not looked at.
    `kinds` narrows to task names, `max_bytes` bounds the sum of the bodies (one always goes).
    """

    queues: Sequence[str]
    limit: int
    marks: Mapping[tuple[str, int], Mark] = field(default_factory=dict)
    kinds: Sequence[str] | None = None
    max_bytes: int | None = None


@dataclass(frozen=True)
class ExchangeResult:
    """Answers in the order of the questions; `settled` None: row locked, send that one again."""

    settled: list[bool | None]
    leases: list[list[Lease]]
    lease_stands: bool | None = None


class HolderVerbs(StoreBase):
    """Everything done under a lease."""

    def claim(self, request: ClaimRequest, *, lease_name: str, lease_holder: str) -> list[Lease]:
        """Take due jobs under a lease each; an empty list when nothing is due."""
        with store_errors():
            return _leases(self._send("claim", _claim(request, lease_name, lease_holder)))

    def exchange(
        self,
        verdicts: Sequence[tuple[JobRef, Verdict]],
        claims: Sequence[ClaimRequest],
        *,
        lease_name: str,
        lease_holder: str,
        renew: UUID | None = None,
        lease_ttl: float = 60.0,
    ) -> ExchangeResult:
        """Verdicts, claims and the holder's renewal (its lease token) in one round trip.

        Only `Progress`, `Succeed` and `Release` may come here: on a session with asynchronous
        commit a crash of the server may forget them, which costs a redelivery and no more.
        """
        grouped = batches(verdicts)
        with store_errors():
            with self.connection.pipeline():
                sent = [(places, self._send(name, args)) for name, places, args in grouped]
                claimed = [
                    self._send("claim", _claim(each, lease_name, lease_holder)) for each in claims
                ]
                renewed = renew and self._send(
                    "runtime_lease_renew",
                    {"lease_name": lease_name, "lease_token": renew, "ttl": seconds(lease_ttl)},
                )
            settled: list[bool | None] = [False] * len(verdicts)
            for places, cursor in sent:
                for place, (_, applied) in zip(places, cursor.fetchall(), strict=True):
                    settled[place] = applied
            leases = [_leases(cursor) for cursor in claimed]
            stands = bool(cast(Row, renewed.fetchone())[0]) if renewed else None
        return ExchangeResult(settled, leases, stands)

    def settle(self, verdicts: Sequence[tuple[JobRef, Verdict]]) -> list[bool | None]:
        """Any verdicts, each in a transaction of its own, durable as the server commits.

        None: send that one again, for another transaction holds its row, or the database refused it
        while others were still to come. Sent alone, the refusal is raised.
        """
        answers: list[bool | None] = []
        for ref, verdict in verdicts:
            try:
                answers.append(self._settle_one(ref, verdict))
            except StoreUnavailable:
                raise
            except StoreError:
                if len(verdicts) == 1:
                    raise
                answers.append(None)
        return answers

    def _settle_one(self, ref: JobRef, verdict: Verdict) -> bool | None:
        name, extra = single(verdict, wait=False)
        job: Parameters = {"job_id": ref[0], "lease_token": ref[1]}
        with store_errors():
            with self.connection.pipeline(), self.connection.transaction():
                # The consuming session commits claims asynchronously; this must not be lost.
                self.connection.execute("SET LOCAL synchronous_commit TO DEFAULT")
                cursor = self._send(name, job | extra)
            return cast("bool | None", cast(Row, cursor.fetchone())[0])

    def progress(self, job_id: UUID, lease_token: UUID, *, acks_late: bool | None = None) -> bool:
        """The task started: its attempt counts."""
        return self._verdict("progress", job_id, lease_token, {"acks_late": acks_late})

    def succeed(self, job_id: UUID, lease_token: UUID) -> bool:
        """The job is done."""
        return self._verdict("succeed", job_id, lease_token, {})

    def renew(self, job_id: UUID, lease_token: UUID, *, ttl: float | None = None) -> bool:
        """Move this job's own deadline; `ttl` in seconds, None: its visibility timeout."""
        return self._verdict("renew", job_id, lease_token, {"ttl": seconds(ttl)})

    def renew_many(self, refs: Sequence[JobRef], *, ttl: float | None = None) -> list[bool | None]:
        """The batch form: None for a row that another transaction holds."""
        answers = self._rows("renew_many", refs_parameters(refs) | {"ttl": seconds(ttl)})
        return [cast("bool | None", applied) for _, applied in answers]

    def release(self, job_id: UUID, lease_token: UUID, *, requeue: bool = False) -> bool:
        """Give the job back; `requeue` when it ran and asks to be delivered again."""
        return self._verdict("release", job_id, lease_token, {"requeue": requeue})

    def release_unknown(self, lease_name: str, known: Sequence[UUID]) -> int:
        """Give back what this holder leased under tokens it does not know; how many."""
        args = {"lease_name": lease_name, "lease_tokens": list(known)}
        return int(self._row("release_unknown", args)[0])

    def fail_transient(self, job_id: UUID, lease_token: UUID, failure: FailTransient) -> bool:
        """Wait and run again, or die if the policy says so."""
        name, extra = single(failure)
        return self._verdict(name, job_id, lease_token, extra)

    def fail_permanent(self, job_id: UUID, lease_token: UUID, failure: FailPermanent) -> bool:
        """To the dead letters. An unknown failure code is a `ValueError`."""
        name, extra = single(failure)
        return self._verdict(name, job_id, lease_token, extra)

    def next_due(self, queues: Sequence[str]) -> float | None:
        """Seconds until a job of these queues becomes due, 0 if one is; None: none waits."""
        due = self._row("next_due", {"queues": list(queues)})[0]
        return None if due is None else float(due)

    def raise_wake_flag(self, queues: Sequence[str]) -> None:
        """Tell publishers of these queues that somebody sleeps. Lower it with the same queues."""
        self._row("wake_flag_raise", {"queues": list(queues)})

    def lower_wake_flag(self, queues: Sequence[str]) -> None:
        """Publishers need not notify any more."""
        self._row("wake_flag_lower", {"queues": list(queues)})

    def _verdict(self, name: str, job_id: UUID, lease_token: UUID, extra: Parameters) -> bool:
        return bool(self._row(name, {"job_id": job_id, "lease_token": lease_token} | extra)[0])


def _claim(request: ClaimRequest, lease_name: str, lease_holder: str) -> Parameters:
    marks = list(request.marks.items())
    return {
        "queues": list(request.queues),
        "lease_name": lease_name,
        "lease_holder": lease_holder,
        "limit": request.limit,
        "kinds": None if request.kinds is None else list(request.kinds),
        "max_bytes": request.max_bytes,
        "mark_queues": [key[0] for key, _ in marks] or None,
        "mark_priorities": [key[1] for key, _ in marks] or None,
        "mark_times": [mark.process_after for _, mark in marks] or None,
        "mark_seqs": [mark.seq for _, mark in marks] or None,
    }


def _leases(cursor: psycopg.Cursor[Row]) -> list[Lease]:
    # `redelivered` is derived from `deliveries`, and stands after `replays`.
    rows = ((*row[:12], row[10] > 0, *row[12:]) for row in cursor.fetchall())
    return [Lease(*row) for row in rows]
