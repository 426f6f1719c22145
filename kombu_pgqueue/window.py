# SPDX-License-Identifier: BSD-3-Clause
"""One prefetch window: which queues it wants jobs of, how many, and when to look again.

Belongs to the session's thread; only `prefetch` is set from outside. Times are monotonic seconds.

A window that finds its queues empty looks again soon, for a stream of jobs rarely pauses longer. If
nothing comes it raises the wake flag, which publishers see, so that they notify. A job published by
somebody who looked at the flag just before must still be found: four more looks, each further on.
Then it rests until a notification, the next job that becomes due, or the poll interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from kombu_pgqueue.mailbox import Delivery, Mailbox
from kombu_pgqueue.marks import Marks
from kombu_pgqueue.store import ClaimRequest
from kombu_pgqueue.values import Lease, Mark

#: The most jobs one claim asks for.
BATCH = 100
#: A free place waits this long for others to be claimed with it.
GATHER = 0.002
#: Looks after the queues ran empty, before the wake flag is raised and after.
BEFORE_FLAG = (0.001, 0.003)
AFTER_FLAG = (0.002, 0.01, 0.05, 0.25)
#: That many claims with jobs within that time: a stream, for which notifying each job is a waste.
STREAM_CLAIMS, STREAM_TIME = 6, 0.03
#: A window full for so long needs no notifications.
FULL_TIME = 0.05


@dataclass(eq=False)
class Window:
    """The places of one channel's consumers; `unlimited` ones need no acknowledgement."""

    mailbox: Mailbox
    unlimited: bool = False
    prefetch: int = 0
    consumers: dict[str, str] = field(default_factory=dict)  # tag -> queue
    taken: int = 0
    closed: bool = False
    #: Kept after closing: what its running tasks take away from a successor on the same queues.
    queues: tuple[str, ...] = ()
    flagged: tuple[str, ...] = ()
    wants_flag: bool = False
    wants_due: bool = False
    marks: Marks = field(default_factory=Marks)
    _next: float = 0.0
    _freed: float = -math.inf
    _empty_since: float = math.inf
    _flag_since: float = math.inf
    _full_since: float = math.inf
    _hits: int = 0
    _hits_since: float = 0.0
    _turn: int = 0
    _in_vain: int = 0

    def subscribe(self, tag: str, queue: str) -> None:
        self.consumers[tag] = queue
        self._changed()

    def unsubscribe(self, tag: str) -> None:
        self.consumers.pop(tag, None)
        if self.consumers:
            self._changed()

    def _changed(self) -> None:
        self.queues = tuple(dict.fromkeys(self.consumers.values()))
        self.wants_flag = False
        self._empty_since = math.inf
        self._next = 0.0
        self.marks.forget()

    def free(self, now: float) -> None:
        """A job gave its place back."""
        self.taken -= 1
        if self._freed < 0:
            self._freed = now

    def poke(self) -> None:
        """Something may have come: look now."""
        self._next = 0.0

    @property
    def active(self) -> bool:
        return bool(self.consumers) and not self.closed

    def room(self, others: int) -> int:
        """Places free now; `others`: running jobs of closed windows on the same queues."""
        if not self.active:
            return 0
        if self.unlimited or self.prefetch <= 0:
            return BATCH - self.mailbox.waiting(urgent=self.unlimited)
        return min(BATCH, self.prefetch - self.taken - others)

    def claim_at(self, now: float, others: int) -> float:
        """When to claim next; infinity while there is no room."""
        room = self.room(others)
        if room <= 0:
            if self._full_since == math.inf:
                self._full_since = now
            return math.inf
        self._full_since = math.inf
        if self._freed > 0 and self.taken > 0 and room * 2 < self.prefetch:
            return max(self._next, self._freed + GATHER)
        return self._next

    def request(self, now: float, others: int, max_bytes: int | None) -> ClaimRequest:
        """What to ask for. The first queue changes from claim to claim."""
        self._turn = (self._turn + 1) % len(self.queues)
        queues = self.queues[self._turn :] + self.queues[: self._turn]
        marks: Mapping[tuple[str, int], Mark] = self.marks.current(now)
        return ClaimRequest(queues, self.room(others), marks=marks, max_bytes=max_bytes)

    def claimed(
        self, request: ClaimRequest, leases: Sequence[Lease], now: float, took: float
    ) -> None:
        """Decide from the answer when to look again."""
        self.marks.claimed(leases, took, marked=bool(request.marks))
        self._freed = -math.inf
        self._in_vain = 0 if leases else min(self._in_vain, 10)
        if leases and (len(leases) >= request.limit or request.max_bytes is not None):
            self._empty_since = math.inf
            self._next = 0.0
            return
        if leases:
            self._count_hit(now)
        if self.flagged:
            self._look_again(now, self._flag_since, AFTER_FLAG)
            return
        if leases or self._empty_since == math.inf:
            self._empty_since = now
        if not self._look_again(now, self._empty_since, BEFORE_FLAG, rest=False):
            self._next, self.wants_flag = math.inf, True

    def _look_again(
        self, now: float, since: float, steps: tuple[float, ...], *, rest: bool = True
    ) -> bool:
        for step in steps:
            if now < since + step:
                self._next = since + step
                return True
        if rest:
            self._next, self.wants_due = math.inf, True
        return False

    def _count_hit(self, now: float) -> None:
        if now - self._hits_since > STREAM_TIME:
            self._hits, self._hits_since = 0, now
        self._hits += 1

    def flag_raised(self, now: float) -> None:
        self.flagged, self.wants_flag = self.queues, False
        self._flag_since = now
        self._hits = 0
        self._next = now + AFTER_FLAG[0]

    def flag_is_waste(self, now: float) -> bool:
        """Lower it: jobs come in a stream, or there is no room for any."""
        return bool(self.flagged) and (
            not self.active
            or self.flagged != self.queues
            or self._hits >= STREAM_CLAIMS
            or now - self._full_since > FULL_TIME
        )

    def flag_lowered(self) -> None:
        self.flagged = ()
        self._hits = 0
        self._empty_since = math.inf
        self._next = 0.0

    def rest(self, now: float, due_in: float | None, longest: float) -> None:
        """Sleep until a job becomes due, but not longer than `longest` seconds."""
        self.wants_due = False
        if due_in is None:
            due_in = longest
        elif due_in <= 0:
            # Due but not to be had: locked elsewhere, or claiming is switched off.
            self._in_vain += 1
            due_in = 0.1 * 2**self._in_vain
        self._next = now + min(due_in, longest)

    def back_off(self, now: float) -> None:
        """A claim failed: not again at once."""
        self._next = now + 1.0

    def due_changed(self) -> None:
        """Some job became waiting: ask anew when the next one is due."""
        if self._next == math.inf or self.flagged:
            self.wants_due = True

    def deliver(self, deliveries: Sequence[Delivery]) -> None:
        """Hand jobs to the reader; each takes a place until it is acknowledged."""
        for delivery in deliveries:
            delivery.hold.placed = not self.unlimited
        self.taken += 0 if self.unlimited else len(deliveries)
        self.mailbox.put(deliveries, urgent=self.unlimited)

    def pick(self, queue: str, turn: int) -> str | None:
        """The consumer of a queue whose turn it is."""
        tags = [tag for tag, name in self.consumers.items() if name == queue]
        return tags[turn % len(tags)] if tags else None
