# SPDX-License-Identifier: BSD-3-Clause
"""Real threads and real waiting, also in a program that gevent has patched.

The thread that renews leases must run while a greenlet burns CPU, so it must not become a greenlet.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def patched(module: str = "threading") -> bool:
    """Has gevent replaced this module of the standard library?"""
    monkey = sys.modules.get("gevent.monkey")
    return monkey is not None and bool(monkey.is_module_patched(module))


def original(module: str, name: str) -> Any:
    """A name of a standard module as it was before gevent came."""
    if patched(module):
        return sys.modules["gevent.monkey"].get_original(module, name)
    return getattr(sys.modules[module], name)


def start_thread(target: Callable[[], None], name: str) -> None:
    """Run `target` in a daemon thread of the operating system."""
    if patched("threading"):
        original("_thread", "start_new_thread")(target, ())
    else:
        threading.Thread(target=target, name=name, daemon=True).start()


class Answer:
    """Something one thread waits for and another gives, once."""

    def __init__(self) -> None:
        self.value: Any = None
        self.error: BaseException | None = None
        self._given = False
        # A greenlet must not block its whole thread on a lock that only a real thread releases.
        self._event = None if patched() else threading.Event()

    def give(self, value: Any = None, error: BaseException | None = None) -> None:
        """The first answer counts."""
        if not self._given:
            self.value, self.error, self._given = value, error, True
            if self._event is not None:
                self._event.set()

    def wait(self, timeout: float) -> bool:
        """False if it did not come within `timeout` seconds."""
        if self._event is not None:
            return self._event.wait(timeout)
        deadline = time.monotonic() + timeout
        while not self._given and time.monotonic() < deadline:
            time.sleep(0.001)
        return self._given


class Bell:
    """Wakes a thread that sleeps in poll(). Rung any number of times, it is heard once."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._rung = False

    def fileno(self) -> int:
        return self._reader.fileno()

    def ring(self) -> None:
        """From any thread, and from a garbage collector's callback: takes no lock."""
        if not self._rung:
            self._rung = True
            try:
                self._writer.send(b"\0")
            except OSError:
                # Full means heard anyway; closed means nobody is left to hear it.
                return

    def hush(self) -> None:
        """Forget the ringing; look for work after this, not before."""
        # Nothing to read: the byte of a ring that is under way comes later.
        with contextlib.suppress(OSError):
            self._reader.recv(64)
        self._rung = False

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def wait_readable(fds: list[int], timeout: float, *, native: bool) -> set[int]:
    """Which descriptors can be read within `timeout` seconds; all of them on an error.

    `native` blocks the thread of the operating system even where gevent has patched `select`.
    """
    get = original if native else (lambda module, name: getattr(sys.modules[module], name))
    if hasattr(select, "poll"):
        poller = get("select", "poll")()
        for fd in fds:
            poller.register(fd, select.POLLIN | select.POLLERR | select.POLLHUP)
        # Rounded up: polling again in the last microseconds would burn CPU.
        return {fd for fd, _ in poller.poll(int(timeout * 1000) + 1 if timeout > 0 else 0)}
    readable, _, _ = get("select", "select")(fds, [], [], max(timeout, 0))
    return set(readable)
