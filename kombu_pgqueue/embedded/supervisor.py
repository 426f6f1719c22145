# SPDX-License-Identifier: BSD-3-Clause
"""The process that owns ``postgres`` and looks whether anybody still needs it.

It has one thread and, as root's child, no rights of root's left.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import time
from types import FrameType

from . import leftovers, locks, state
from .cluster import Cluster, Process
from .layout import HOLD_LOCK, conninfo, socket_fits
from .state import State

_LOOK_SECONDS = 0.25
_START_POLL_SECONDS = 0.01
_PORT_TRIES = 5
# A postmaster that dies more often than this is not worth another start.
_CRASHES = 5
_CRASH_WINDOW_SECONDS = 60.0


class Stopped(Exception):
    """Somebody told the supervisor to end."""


class Told:
    """Tells the outcome to the client that waits at the pipe, and to all by the state file."""

    def __init__(self, pipe: int, boot: str) -> None:
        self._pipe: int | None = pipe
        self._boot = boot
        self._in_file = False

    def keep_in_file(self) -> None:
        """From now on this process is the directory's supervisor and owns the state file."""
        self._in_file = True

    def ready(self, conninfo: str, postmaster_pid: int) -> None:
        self._tell(State(self._boot, conninfo, "", os.getpid(), postmaster_pid))

    def failed(self, error: str) -> None:
        self._tell(State(self._boot, error=error))

    def joined(self) -> None:
        """Say that another supervisor was first."""
        self._tell(State(self._boot))

    def _tell(self, what: State) -> None:
        if self._in_file:
            # A full disk must not hide why; the pipe still has it.
            with contextlib.suppress(OSError):
                state.write(what)
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # the client may be gone
                os.write(self._pipe, f"\n{state.encode(what)}\n".encode())
            os.close(self._pipe)
            self._pipe = None


class Supervisor:
    """Runs the server of the current directory until nobody holds it."""

    def __init__(self, path: str, cluster: Cluster, hold: int, linger: float, told: Told) -> None:
        self._path = path
        self._cluster = cluster
        self._hold = hold
        self._linger = linger
        self._told = told
        self._tcp = not socket_fits(path)
        self._crashes: list[float] = []
        self._end: int | None = None
        self._wakeup = _wakeup_pipe()
        cluster.wait = self._wait_or_stop
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT):
            signal.signal(signum, self._asked_to_end)
        for signum in (signal.SIGCHLD, signal.SIGHUP):
            signal.signal(signum, _wake_only)

    def run(self) -> None:
        """Start the server and return when it has stopped."""
        try:
            self._cluster.create()
            self._start()
            self._watch()
        except Stopped:
            log(f"ends on signal {self._end}")
        finally:
            state.remove()
            self._cluster.stop(self._wait)
            log("stopped")

    def _start(self) -> None:
        old = leftovers.stop()
        if old:
            log(f"stopped server processes without a supervisor: {old}")
        for left in reversed(range(_PORT_TRIES)):
            self._cluster.start(tcp=self._tcp)
            if self._came_up():
                break
            if not (left and self._cluster.port_was_taken()):
                raise self._cluster.failure()
            self._cluster.port = None
        process = self._cluster.process
        assert process is not None
        self._told.ready(conninfo(self._path, self._cluster.port), process.pid)
        log(f"ready, postmaster {process.pid}")

    def _came_up(self) -> bool:
        while self._cluster.exit_status() is None:
            if self._cluster.is_ready():
                return True
            self._sleep(_START_POLL_SECONDS)
        return False

    def _watch(self) -> None:
        idle_since: float | None = None
        while True:
            self._sleep(_LOOK_SECONDS)
            if not self._at_home():
                log("the directory is gone")
                self._cluster.abandon()
                return
            if self._cluster.exit_status() is not None:
                self._restart()
            self._cluster.limit_log()
            if not locks.try_lock(self._hold, locks.EXCLUSIVE):
                idle_since = None
                continue
            now = time.monotonic()
            if idle_since is None:
                idle_since = now
            if now - idle_since >= self._linger:
                log("nobody is left")
                return  # with the lock: who comes now waits until this process has ended
            locks.unlock(self._hold)

    def _restart(self) -> None:
        log(str(self._cluster.failure()))
        state.remove()
        now = time.monotonic()
        self._crashes = [t for t in self._crashes if now - t < _CRASH_WINDOW_SECONDS] + [now]
        if len(self._crashes) > _CRASHES:
            raise self._cluster.failure()
        self._start()

    def _at_home(self) -> bool:
        """Tell whether the lock that we watch is still the one that clients find."""
        try:
            try:
                named = os.stat(os.path.join(self._path, HOLD_LOCK))
            except PermissionError:  # parents are closed to this user, the directory is not
                named = os.stat(HOLD_LOCK)
        except OSError:
            return False
        return os.path.samestat(named, os.fstat(self._hold))

    def _wait_or_stop(self, process: Process) -> int:
        try:
            while (status := process.poll()) is None:
                self._sleep(_LOOK_SECONDS)
        except Stopped:
            process.terminate()
            process.wait()
            raise
        return status

    def _wait(self, process: Process, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while process.poll() is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._doze(min(left, _LOOK_SECONDS))
        return True

    def _sleep(self, seconds: float) -> None:
        self._doze(seconds)
        if self._end is not None:
            raise Stopped

    def _doze(self, seconds: float) -> None:
        """Sleep until a signal comes, a child's end included."""
        if select.select([self._wakeup], [], [], seconds)[0]:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wakeup, 512)

    def _asked_to_end(self, signum: int, _frame: FrameType | None) -> None:
        self._end = signum


def _wakeup_pipe() -> int:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    return reader


def _wake_only(_signum: int, _frame: FrameType | None) -> None:
    """Do nothing; the wake-up descriptor has done it."""


def log(message: str) -> None:
    """Write a line to the supervisor's log, once it has one."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    with contextlib.suppress(OSError):
        print(f"{stamp} UTC [{os.getpid()}] {message}", file=sys.stderr, flush=True)
