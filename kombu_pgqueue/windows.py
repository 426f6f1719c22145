# SPDX-License-Identifier: BSD-3-Clause
"""All prefetch windows of a session: who may claim, who must hear what happened."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from kombu_pgqueue.mailbox import Delivery
from kombu_pgqueue.settlement import Outcome
from kombu_pgqueue.window import Window


class Windows:
    """Belongs to the session's thread. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._windows: list[Window] = []

    def __iter__(self) -> Iterator[Window]:
        return iter(self._windows)

    @property
    def active(self) -> bool:
        """Somebody consumes."""
        return any(window.active for window in self._windows)

    @property
    def working(self) -> bool:
        """Somebody consumes what has to be acknowledged: a worker, not a client with a question."""
        return any(window.active and not window.unlimited for window in self._windows)

    def add(self, window: Window) -> None:
        self._windows.append(window)

    def close(self, window: Window) -> None:
        """Its channel is closed. It stays here until its running jobs have ended."""
        window.closed = True
        window.consumers.clear()
        _give_back(window, None)

    def close_all(self) -> None:
        for window in self._windows:
            self.close(window)

    def unsubscribe(self, window: Window, tag: str) -> None:
        window.unsubscribe(tag)
        _give_back(window, tag)

    def prune(self) -> None:
        """Forget windows that nothing is left of."""
        self._windows = [w for w in self._windows if not w.closed or w.taken or w.flagged]

    def others(self, window: Window) -> int:
        """Places that running jobs of closed windows take on the same queues."""
        return sum(
            each.taken
            for each in self._windows
            if each.closed and each.taken and set(each.queues) & set(window.queues)
        )

    def claiming(self, now: float) -> list[Window]:
        """Those whose time to claim has come."""
        return [w for w in self._windows if w.claim_at(now, self.others(w)) <= now]

    def next_claims(self, now: float) -> list[float]:
        """When each will claim."""
        return [window.claim_at(now, self.others(window)) for window in self._windows]

    def heed(self, queues: Iterable[str]) -> None:
        """Publishers notified."""
        for queue in queues:
            for window in self._windows:
                if queue in window.queues:
                    window.poke()

    def reconnected(self) -> None:
        """Flags were locks of the old connection."""
        for window in self._windows:
            window.flagged = ()
            window.poke()

    def settled(self, outcome: Outcome) -> None:
        """Jobs came back into the queues."""
        for window in self._windows:
            if outcome.released & set(window.queues):
                window.marks.forget()
                window.poke()
            if outcome.delayed:
                window.due_changed()

    def tell(self, error: Exception) -> None:
        """Make every reader raise `error`."""
        for window in self._windows:
            if window.active:
                window.mailbox.fail(error)


def _give_back(window: Window, tag: str | None) -> None:
    def unwanted(delivery: Delivery) -> bool:
        return delivery.hold.window is window and tag in (None, delivery.tag)

    for delivery in window.mailbox.take_out(unwanted):
        delivery.hold.give_back()
