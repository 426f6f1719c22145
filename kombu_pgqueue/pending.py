# SPDX-License-Identifier: BSD-3-Clause
"""Verdicts on their way to the database: gathered, sent, kept until they are answered.

A start is held back for a moment: a task that ends meanwhile needs only its final verdict, for the
database counts an attempt for every failure, reported start or not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from kombu_pgqueue.hold import Hold
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Progress, Verdict

#: How long a start waits for the task's end.
START_DELAY = 0.01
#: How long a final verdict waits for others to be sent with it.
GATHER = 0.002

Entry = tuple[Hold, Verdict]


@dataclass(eq=False)
class Pending:
    """Belongs to the session's thread. Times are monotonic seconds."""

    _starts: dict[Hold, tuple[Progress, float]] = field(default_factory=dict)
    _quick: dict[Hold, tuple[Verdict, float]] = field(default_factory=dict)
    _durable: dict[Hold, tuple[Verdict, float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._starts or self._quick or self._durable)

    def add(self, hold: Hold, verdict: Verdict, now: float) -> None:
        if isinstance(verdict, Progress):
            self._starts[hold] = (verdict, now + START_DELAY)
            return
        self._starts.pop(hold, None)
        if isinstance(verdict, FailTransient | FailPermanent):
            self._durable[hold] = (verdict, now)
        else:
            self._quick[hold] = (verdict, now + GATHER)

    def again(self, hold: Hold, verdict: Verdict, at: float) -> None:
        """Send it once more, not before `at`: unanswered, or its row was locked."""
        if isinstance(verdict, Progress):
            if hold.open:
                self._starts.setdefault(hold, (verdict, at))
        elif isinstance(verdict, FailTransient | FailPermanent):
            self._durable[hold] = (verdict, at)
        else:
            self._quick[hold] = (verdict, at)

    def holds(self) -> set[Hold]:
        """Those whose verdict is on its way."""
        return {hold for group in self._groups() for hold in group}

    def due_at(self) -> float:
        """When something has to be sent."""
        times = [
            min((at for _, at in group.values()), default=math.inf) for group in self._groups()
        ]
        return min(times)

    def _groups(self) -> tuple[dict[Hold, tuple[Verdict, float]], ...]:
        return (self._starts, self._quick, self._durable)  # type: ignore[return-value]

    def take_durable(self, now: float) -> list[Entry]:
        """Failures; each is committed on its own."""
        return _take(self._durable, now)

    def take_quick(self, now: float, *, all_of_them: bool = False) -> list[Entry]:
        """What goes with the next round trip: all ends, and the starts whose time has come."""
        ends = _take(self._quick, math.inf if all_of_them else now + GATHER)
        return _take(self._starts, math.inf if all_of_them else now) + ends


def _take(
    group: dict[Hold, tuple[Verdict, float]] | dict[Hold, tuple[Progress, float]], until: float
) -> list[Entry]:
    taken = [(hold, verdict) for hold, (verdict, at) in group.items() if at <= until]
    for hold, _ in taken:
        del group[hold]
    return taken
