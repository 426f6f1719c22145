# SPDX-License-Identifier: BSD-3-Clause
"""Low-water marks: where in a queue the next claim may start.

While some transaction holds back vacuum, the index entries of jobs that are gone stay, and a scan
from the start would read them all again. A mark skips them. It trails the newest claimed job by a
second, since a job with an earlier time may still be uncommitted, and all marks are forgotten again
and again: what came to lie behind one (a job released elsewhere) waits no longer than that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from kombu_pgqueue.values import Lease, Mark

#: How far a mark stays behind the newest claimed job.
TRAIL = timedelta(seconds=1)
#: Marks are forgotten after so many seconds, or so many times what an unmarked claim takes.
FORGET_AFTER = 1.0
FORGET_FACTOR = 20

_Key = tuple[str, int]


class Marks:
    """The marks of one window's queues. Times are the caller's monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._marks: dict[_Key, Mark] = {}
        self._candidates: dict[_Key, deque[Mark]] = {}
        self._newest: datetime | None = None
        self._forget_at = 0.0
        self._unmarked_took = 0.0

    def current(self, now: float) -> Mapping[_Key, Mark]:
        """The marks to claim with; none when it is time for a look from the start."""
        if now >= self._forget_at:
            self._marks.clear()
            self._forget_at = now + max(FORGET_AFTER, FORGET_FACTOR * self._unmarked_took)
        return dict(self._marks)

    def claimed(self, leases: Iterable[Lease], took: float, *, marked: bool) -> None:
        """Learn from a claim that took `took` seconds."""
        if not marked:
            self._unmarked_took = took
        for lease in leases:
            mark = Mark(lease.process_after, lease.seq)
            if self._newest is None or lease.process_after > self._newest:
                self._newest = lease.process_after
            candidates = self._candidates.setdefault((lease.queue_name, lease.priority), deque())
            if candidates and _key(mark) <= _key(candidates[-1]):
                continue
            # One candidate a tenth of a second is enough, however many jobs there are.
            if len(candidates) > 1 and (
                candidates[-1].process_after - candidates[-2].process_after < TRAIL / 10
            ):
                candidates.pop()
            candidates.append(mark)
        self._advance()

    def forget(self) -> None:
        """A job went back into its old place: look from the start again."""
        self._marks.clear()
        self._candidates.clear()

    def _advance(self) -> None:
        if self._newest is None:
            return
        horizon = self._newest - TRAIL
        for key, candidates in self._candidates.items():
            while candidates and candidates[0].process_after <= horizon:
                self._marks[key] = candidates.popleft()


def _key(mark: Mark) -> tuple[datetime, int]:
    return mark.process_after, mark.seq
