# SPDX-License-Identifier: BSD-3-Clause
"""Hold the server of a directory for this process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from dataclasses import dataclass

from kombu_pgqueue.errors import EmbeddedServerError

from . import locks, state
from .directory import Home, adopt, open_lock, resolve
from .launch import launch
from .layout import HOLD_LOCK, LOG, SERVER_LOCK, START_LOCK, STATE

_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class _Hold:
    """This process's part in a server; closing the descriptors ends it.

    A forked child shares the lock through its copies until it takes a hold of its own.
    """

    pid: int
    lock: int
    server_lock: int
    conninfo: str
    state: tuple[int, int] | None

    def lives(self, path: str) -> bool:
        """Tell whether this process holds it and the supervisor's last word still counts."""
        if self.pid != os.getpid() or self.state is None or self.state != state.identity(path):
            return False
        try:
            return locks.is_taken(self.server_lock)
        except OSError:  # released by another thread
            return False

    def close(self) -> None:
        os.close(self.lock)
        os.close(self.server_lock)


_holds: dict[str, _Hold] = {}
_mutex = threading.Lock()
_starting: set[int] = set()


def acquire(path: str | os.PathLike[str], *, timeout: float = 60.0) -> str:
    """Start or join the server at *path* and return a libpq connection string.

    The server runs until this process calls `release` or ends. A path that is held already costs a
    few system calls, unless its server is gone: then it is started anew, so call this before every
    connect. A forked child that calls it holds the server for itself. *timeout* is in seconds.

    Raises EmbeddedServerError, which says what is wrong and what to do.
    """
    real = resolve(path)
    held = _holds.get(real)
    if held is not None and held.lives(real):
        return held.conninfo
    with _mutex:
        held = _holds.get(real)
        if held is not None and held.lives(real):
            return held.conninfo
        try:
            fresh = _join(real, time.monotonic() + timeout)
        except OSError as exc:
            raise EmbeddedServerError(
                f"cannot use {real} for the embedded server: {exc.strerror or exc};"
                " check its permissions and free space, or choose another path"
            ) from exc
        _holds[real] = fresh
        if held is not None:
            held.close()  # after the new one, so that the server is held without a gap
        return fresh.conninfo


def release(path: str | os.PathLike[str]) -> None:
    """End this process's hold of the server at *path*; do nothing if it has none."""
    with _mutex:
        held = _holds.pop(resolve(path), None)
        if held is not None:
            held.close()


def _join(path: str, deadline: float) -> _Hold:
    with contextlib.ExitStack() as undo:
        while True:
            with adopt(path) as (home, directory):
                lock = _opened(undo, home, directory, HOLD_LOCK)
                server = _opened(undo, home, directory, SERVER_LOCK)
                start = _opened(undo, home, directory, START_LOCK)
            before = state.read(path)
            while not locks.try_lock(lock, locks.SHARED):
                _pause(deadline, path, "another process is still stopping it")
            if _is_named(lock, path):
                break
            undo.close()  # the directory was replaced meanwhile
        _starting.add(start)
        undo.callback(_starting.discard, start)
        conninfo, identity = _served(home, server, start, before, deadline)
        undo.pop_all()
        _starting.discard(start)
        os.close(start)
        return _Hold(os.getpid(), lock, server, conninfo, identity)


def _served(
    home: Home, server: int, start: int, before: state.State | None, deadline: float
) -> tuple[str, tuple[int, int] | None]:
    """Wait until the server is ready, starting its supervisor if there is none."""
    while True:
        identity = state.identity(home.path)
        word = state.read(home.path)
        if locks.is_taken(server):
            # Read before and after the look at the lock: it is this supervisor's own word.
            if word is not None and word.conninfo and identity == state.identity(home.path):
                return word.conninfo, identity
        elif word is not None and word.error and (before is None or before.boot != word.boot):
            raise EmbeddedServerError(_described(home, word.error))
        elif locks.try_lock(start, locks.EXCLUSIVE):
            try:
                if not locks.is_taken(server):
                    _start(home, deadline)
                    before = None
                    continue
            finally:
                # Not by close: a child forked meanwhile would keep it.
                locks.unlock(start)
        _pause(deadline, home.path, "its supervisor has not said why")


def _start(home: Home, deadline: float) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(home.path, STATE))
    outcome = launch(home, deadline)
    if outcome.error:
        raise EmbeddedServerError(_described(home, outcome.error))


def _described(home: Home, error: str) -> str:
    return f"the embedded server at {home.path} cannot run: {error}\n(logs: {home.path}/{LOG})"


def _opened(undo: contextlib.ExitStack, home: Home, directory: int, name: str) -> int:
    fd = open_lock(home, directory, name)
    undo.callback(os.close, fd)
    return fd


def _is_named(lock: int, path: str) -> bool:
    try:
        return os.path.samestat(os.stat(os.path.join(path, HOLD_LOCK)), os.fstat(lock))
    except FileNotFoundError:
        return False


def _pause(deadline: float, path: str, why: str) -> None:
    if time.monotonic() > deadline:
        raise EmbeddedServerError(
            f"the embedded server at {path} was not ready in time: {why};"
            f" see {os.path.join(path, LOG)}, or allow a longer timeout"
        )
    time.sleep(_POLL_SECONDS)


def _after_fork() -> None:
    """Start with a free mutex, and leave a start in progress to the parent."""
    global _mutex
    _mutex = threading.Lock()
    for fd in _starting:
        with contextlib.suppress(OSError):
            os.close(fd)
    _starting.clear()


os.register_at_fork(after_in_child=_after_fork)
