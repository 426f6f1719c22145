# SPDX-License-Identifier: BSD-3-Clause
"""The consuming session of a process and a database, as all other threads see it.

One native thread (`session_loop`) owns the connection that claims jobs, settles verdicts and renews
leases. It outlives channels and transports, since Celery drops both at a connection error while its
tasks still run.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable

from kombu_pgqueue.errors import StoreUnavailable
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.mailbox import Mailbox
from kombu_pgqueue.native import Answer, Bell, original, start_thread
from kombu_pgqueue.options import Options
from kombu_pgqueue.session_loop import SessionLoop
from kombu_pgqueue.verdicts import Verdict
from kombu_pgqueue.window import Window
from kombu_pgqueue.windows import Windows

logger = logging.getLogger(__name__)


class Session:
    """Everything here may be called from any thread."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.bell = Bell()
        self.inbox: deque[tuple[Hold, Verdict]] = deque()
        self.calls: deque[Callable[[SessionLoop], None]] = deque()
        self.windows = Windows()
        self._loop: SessionLoop | None = None
        self._lock = original("_thread", "allocate_lock")()
        self._disowned = False
        self._stopped = False

    def post(self, hold: Hold, verdict: Verdict) -> None:
        """Take a verdict; it is sent within milliseconds and kept until it is answered."""
        if not self._disowned:
            self.inbox.append((hold, verdict))
            self.bell.ring()

    def open_window(self, mailbox: Mailbox, *, unlimited: bool, prefetch: int) -> Window:
        """A place for consumers to get jobs through `mailbox`."""
        window = Window(mailbox, unlimited=unlimited, prefetch=prefetch)
        self._call(lambda loop: loop.windows.add(window))
        return window

    def close_window(self, window: Window) -> None:
        """Give back what was not delivered. Delivered jobs stay with whoever has them."""
        self._call(lambda loop: loop.windows.close(window))

    def subscribe(self, window: Window, tag: str, queue: str) -> None:
        self._call(lambda loop: window.subscribe(tag, queue))

    def unsubscribe(self, window: Window, tag: str) -> None:
        """Give back what was not delivered to this consumer."""
        self._call(lambda loop: loop.windows.unsubscribe(window, tag))

    def get(self, window: Window, queue: str, timeout: float) -> Hold | None:
        """Claim one job now. Raises `StoreError`."""
        answer = Answer()
        self._call(lambda loop: loop.get(window, queue, answer))
        if not answer.wait(timeout):
            raise StoreUnavailable("the database did not answer in time")
        if answer.error is not None:
            raise answer.error
        hold: Hold | None = answer.value
        return hold

    def flush(self, timeout: float) -> bool:
        """Wait until the verdicts given so far are settled; False if they are not."""
        if not self._running:
            return not self.inbox
        answer = Answer()
        self._call(lambda loop: loop.flush(answer))
        return answer.wait(timeout) and bool(answer.value)

    def stop(self, timeout: float) -> None:
        """Give everything back and end, within `timeout` seconds. For the end of the process."""
        if not self._running:
            return
        answer = Answer()
        deadline = time.monotonic() + timeout
        self._call(lambda loop: loop.stop(answer, deadline))
        self._stopped = True
        if not answer.wait(timeout + 0.5):
            logger.warning("The database did not take the last verdicts in time")

    def disown(self) -> None:
        """In a forked child: all this is the parent's. Its connection is closed elsewhere."""
        self._disowned = True
        self.inbox.clear()
        self.calls.clear()

    @property
    def _running(self) -> bool:
        return self._loop is not None and not self._disowned and not self._stopped

    def _call(self, call: Callable[[SessionLoop], None]) -> None:
        if self._disowned or self._stopped:
            return
        with self._lock:
            self.calls.append(call)
            if self._loop is None:
                self._loop = loop = SessionLoop(self)
                start_thread(loop.run, "pgqueue session")
        self.bell.ring()

    def died(self) -> None:
        """The thread ends by an error; whoever consumes again starts another one."""
        with self._lock:
            self._loop = None

    def retire(self) -> bool:
        """The thread asks whether it may end; a later call starts another one."""
        with self._lock:
            if self.calls or self.inbox:
                return False
            self._loop = None
            return True
