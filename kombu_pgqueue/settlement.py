# SPDX-License-Identifier: BSD-3-Clause
"""Getting verdicts settled: what to send again, what to give up, what to say about it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.holder import Holder
from kombu_pgqueue.pending import Entry, Pending
from kombu_pgqueue.verdicts import Changes, FailPermanent, FailTransient, Progress, Release, Verdict

logger = logging.getLogger(__name__)

#: A row that another transaction holds is asked for again after so many seconds.
LOCKED_DELAY = 0.05
#: The same where we waited for the row.
WAITED_DELAY = 1.0
#: Lock timeout, statement timeout, deadlock, serialization failure: nothing wrong with the verdict.
_PASSING = frozenset({"55P03", "57014", "40P01", "40001"})
#: How often a verdict that the database cannot take is tried, whole and then bare.
TRIES = 3


@dataclass
class Outcome:
    """What verdicts did to the queues: `released` have a job again, `delayed`: some will have."""

    released: set[str] = field(default_factory=set)
    delayed: bool = False


class Settlement(Pending):
    """Belongs to the session's thread."""

    def __init__(self, holder: Holder) -> None:
        super().__init__()
        self._holder = holder
        self._resent: set[Hold] = set()
        self._failures: dict[Hold, int] = {}

    def answered(self, entries: Sequence[Entry], settled: Sequence[bool | None]) -> Outcome:
        """Take the answers to a batch."""
        outcome = Outcome()
        for (hold, verdict), applied in zip(entries, settled, strict=True):
            if applied is None:
                self.again(hold, verdict, time.monotonic() + LOCKED_DELAY)
                continue
            resent = hold in self._resent
            self._resent.discard(hold)
            if applied and isinstance(verdict, Release):
                outcome.released.add(hold.lease.queue_name)
            elif applied and isinstance(verdict, FailTransient):
                outcome.delayed = True
            elif not applied and not resent:
                # Sent twice, a refusal may only mean that the first one counted.
                logger.warning(
                    "Job %s: its lease was taken away; %s is refused",
                    hold.lease.job_id,
                    type(verdict).__name__,
                )
        return outcome

    def one_by_one(self, entries: Sequence[Entry]) -> Outcome:
        """Settle each on its own, so that a bad one spoils no other. Raises `StoreUnavailable`."""
        done: list[Entry] = []
        answers: list[bool | None] = []
        for place, (hold, verdict) in enumerate(entries):
            try:
                answers.append(self._holder.settle(hold.lease.ref, verdict))
            except StoreUnavailable:
                self.send_again(entries[place:])
                raise
            except (StoreError, ValueError, TypeError) as exc:
                self._not_taken(hold, verdict, exc)
            else:
                done.append((hold, verdict))
                self._failures.pop(hold, None)
        return self.answered(done, answers)

    def send_again(self, entries: Sequence[Entry]) -> None:
        """Their answer was lost: they may have counted or not."""
        for hold, verdict in entries:
            self._resent.add(hold)
            self.again(hold, verdict, time.monotonic())

    def _not_taken(self, hold: Hold, verdict: Verdict, exc: Exception) -> None:
        """Neither settled nor refused: its row is locked, or something in it cannot be stored."""
        now = time.monotonic()
        if isinstance(exc, StoreError) and exc.sqlstate in _PASSING:
            self.again(hold, verdict, now + WAITED_DELAY)
            return
        count = self._failures[hold] = self._failures.get(hold, 0) + 1
        logger.error("Job %s: %s failed: %s", hold.lease.job_id, type(verdict).__name__, exc)
        if isinstance(verdict, Progress | Release) and count >= TRIES:
            # It stays ours until the lease ends; then the reaper has it.
            self._failures.pop(hold)
            return
        self.again(hold, _barer(verdict, count), now + 0.5 * count)


def _barer(verdict: Verdict, failures: int) -> Verdict:
    """What is left of a verdict that cannot be stored: better a bare one than none."""
    if failures >= TRIES and not isinstance(verdict, Progress):
        return Release(requeue=True)
    if isinstance(verdict, FailPermanent):
        return FailPermanent("fatal", verdict.error_message, actor=verdict.actor)
    if isinstance(verdict, FailTransient):
        return replace(verdict, changes=Changes())
    return verdict
