# SPDX-License-Identifier: BSD-3-Clause
"""Where the session's thread leaves jobs for a transport, and the bell that says so.

One writer (the session's thread), one reader (the consumer's loop); deques need no lock for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from kombu_pgqueue.native import Bell

if TYPE_CHECKING:
    from kombu_pgqueue.hold import Hold


class Delivery(NamedTuple):
    """A job on its way to the consumer `tag`."""

    tag: str
    hold: Hold


class Mailbox:
    """Jobs for one transport. Control messages (`urgent`) overtake tasks."""

    def __init__(self) -> None:
        self._urgent: deque[Delivery] = deque()
        self._normal: deque[Delivery] = deque()
        self._error: BaseException | None = None
        self.bell = Bell()
        self.closed = False

    def put(self, deliveries: Iterable[Delivery], *, urgent: bool = False) -> None:
        (self._urgent if urgent else self._normal).extend(deliveries)
        self.bell.ring()

    def get(self) -> Delivery | None:
        """The next job, None if there is none. Raises what `fail` was told, once."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        delivery = self._pop()
        if not (self._urgent or self._normal):
            self.bell.hush()
            # Put while we hushed: its ring may have gone unheard.
            if self._urgent or self._normal or self._error is not None:
                self.bell.ring()
        return delivery

    def waiting(self, *, urgent: bool) -> int:
        """How many the reader has not taken yet."""
        return len(self._urgent if urgent else self._normal)

    def _pop(self) -> Delivery | None:
        for queue in (self._urgent, self._normal):
            try:
                return queue.popleft()
            except IndexError:
                continue
        return None

    def fail(self, error: BaseException) -> None:
        """Make the reader raise `error`: jobs can no longer be kept for it."""
        self._error = error
        self.bell.ring()

    def take_out(self, unwanted: Callable[[Delivery], bool]) -> list[Delivery]:
        """Remove what the reader must not see any more. Called by the writer only."""
        out: list[Delivery] = []
        for queue in (self._urgent, self._normal):
            for _ in range(len(queue)):
                try:
                    delivery = queue.popleft()
                except IndexError:
                    break  # the reader was faster
                (out if unwanted(delivery) else queue).append(delivery)
        return out

    def close(self) -> None:
        """The reader is gone."""
        self.closed = True
        self.bell.close()
