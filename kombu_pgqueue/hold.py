# SPDX-License-Identifier: BSD-3-Clause
"""One lease in this process, from its claim to its verdict."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Protocol

from kombu_pgqueue.verdicts import FailPermanent, Final, Progress, Release, Succeed, Verdict

if TYPE_CHECKING:
    from kombu_pgqueue.values import Lease
    from kombu_pgqueue.window import Window


class Outbox(Protocol):
    """Where verdicts go: never blocks, takes no lock, outlives channels and transports."""

    def post(self, hold: Hold, verdict: Verdict) -> None: ...


class Hold:
    """Ownership of one delivery. The first final verdict counts, whichever thread gives it.

    `window` is the prefetch window it takes a place in. Nothing here takes a lock: verdicts come
    from pool threads and from the garbage collector, which may run inside any lock.
    """

    __slots__ = (
        "_early",
        "_message",
        "_open",
        "_outbox",
        "lease",
        "malformed",
        "placed",
        "started",
        "window",
    )

    def __init__(self, lease: Lease, window: Window, outbox: Outbox) -> None:
        self.lease = lease
        self.window = window
        self._outbox = outbox
        # Taken by whoever finishes it: list.pop is atomic.
        self._open = [True]
        self._message: Any = None
        self._early = False
        self.started = False
        #: Does it take a place of its window? The session's thread keeps this.
        self.placed = False
        #: Why its message cannot be read, if it cannot.
        self.malformed: str | None = None

    @property
    def open(self) -> bool:
        """No final verdict has been given yet."""
        return bool(self._open)

    def start(self, *, early: bool = False) -> None:
        """The task runs; `early`: the broker need not keep it for a second run."""
        if not self._open or (self.started and (self._early or not early)):
            return
        self.started = True
        self._early = self._early or early
        self._outbox.post(self, Progress(acks_late=False) if early else Progress())

    def finish(self, verdict: Final) -> bool:
        """Give the final verdict; False if there was one."""
        try:
            self._open.pop()
        except IndexError:
            return False
        self._outbox.post(self, verdict)
        return True

    def acknowledge(self) -> bool:
        """What an acknowledgement means: what could not be read was not done."""
        if self.malformed is not None:
            return self.finish(FailPermanent("malformed", self.malformed))
        return self.finish(Succeed())

    def reject(self, *, requeue: bool) -> bool:
        """What a rejection means."""
        if requeue:
            return self.finish(Release(requeue=True))
        if self.malformed is not None:
            return self.finish(FailPermanent("malformed", self.malformed))
        return self.finish(FailPermanent("rejected", "rejected by the consumer"))

    def give_back(self) -> bool:
        """End it without the task having said anything."""
        if self.malformed is not None:
            return self.finish(FailPermanent("malformed", self.malformed))
        if self._early:
            # Acknowledged at its start: a second run is what its owner does not want.
            return self.finish(FailPermanent("worker_lost", "the worker forgot the running task"))
        return self.finish(Release(requeue=self.started))

    def watch(self, message: object) -> None:
        """Give the job back if `message` is forgotten before it had its verdict."""
        self._message = weakref.ref(message, self._forgotten)

    def _forgotten(self, _: object) -> None:
        if self._open:
            self.give_back()
