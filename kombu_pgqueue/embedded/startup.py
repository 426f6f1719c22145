# SPDX-License-Identifier: BSD-3-Clause
"""From a fresh process, perhaps root, to a detached supervisor without privileges."""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import signal
import sys
import time
import traceback
from dataclasses import dataclass

from . import locks, privileges, state
from .cluster import Cluster
from .layout import HOLD_LOCK, LOG, SERVER_COPY, SERVER_LOCK
from .state import Failure
from .supervisor import Supervisor, Told, log

# The descriptor trick below needs magic links that work where the named path does not.
_SELF_FD = "/proc/self/fd"
_LOCK_SECONDS = 2.0
_LOG_LIMIT = 1 << 20


@dataclass(frozen=True)
class Request:
    """What the client asks: where, as whom, with which binaries (bindir, version, wheel)."""

    uid: int
    gid: int
    linger: float
    candidates: list[tuple[str, str, str]]


@dataclass(frozen=True)
class _Ground:
    bindir: str
    major: int
    base: str
    descriptor: int | None


def main(arguments: list[str]) -> None:
    """Run the supervisor of the directory ``arguments[0]``.

    The outcome of the start goes to standard output as one line of JSON, then that is closed.
    """
    path, request = arguments[0], Request(**json.loads(arguments[1]))
    told = Told(os.dup(1), boot=secrets.token_hex(8))
    try:
        _run(path, request, told)
    except Failure as failure:
        told.failed(str(failure))
        log(f"failed: {failure}")
        os._exit(1)
    except Exception:  # noqa: BLE001 - whatever it is, the waiting client must hear of it
        trace = _trace()
        told.failed(f"the supervisor of the embedded server failed:\n{trace}")
        log(trace)
        os._exit(1)


def _trace() -> str:
    try:
        return traceback.format_exc()
    except ImportError:  # a part of the library that this user cannot read
        return repr(sys.exc_info()[1])


def _run(path: str, request: Request, told: Told) -> None:
    os.umask(0o077)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    try:
        os.chdir(path)
        if os.stat(".").st_uid != request.uid:
            raise Failure(f"{path} has changed hands; try again")
        ground = _leave_root(path, request)
        os.makedirs(LOG, mode=0o700, exist_ok=True)
        server_lock = _own_lock()
        if server_lock is None:
            told.joined()
            return
        told.keep_in_file()
        _detach()
        hold = os.open(HOLD_LOCK, os.O_RDWR)
    except OSError as exc:
        raise Failure(f"cannot use {path}: {exc.strerror} ({exc.filename or 'lock'})") from exc
    cluster = Cluster(
        ground.bindir, ground.major, ground.base, ground.descriptor, wait=lambda p: p.wait()
    )
    Supervisor(path, cluster, hold, request.linger, told).run()


def _leave_root(path: str, request: Request) -> _Ground:
    """Choose binaries that the server's user can run, drop privileges, and name the directory."""
    if os.geteuid() != 0:
        bindir, version, _ = request.candidates[0]
        return _Ground(bindir, _major(version), path, None)
    uid, gid = request.uid, request.gid
    closed = privileges.first_closed_parent(path, uid, gid)
    base, descriptor = path, None
    if closed is not None:
        base, descriptor = _through_descriptor(path, closed)
    for bindir, version, wheel in request.candidates:
        target = f"{SERVER_COPY}{version}"
        if privileges.may_run(os.path.join(bindir, "postgres"), uid, gid):
            privileges.drop(uid, gid)
        elif wheel and closed is None:
            bindir = privileges.copied_bindir(target)
            if os.path.isdir(target):
                privileges.drop(uid, gid)
            else:
                bindir = privileges.copy_wheel_and_drop(wheel, target, uid, gid)
        else:
            continue
        return _Ground(bindir, _major(version), base, descriptor)
    raise Failure(_unreachable(closed, uid, [bindir for bindir, _, _ in request.candidates]))


def _through_descriptor(path: str, closed: str) -> tuple[str, int]:
    """Return a name of the current directory that leads past parents the server may not enter.

    A link in /proc/self/fd goes straight to the open directory, so that root's private trees
    (pytest's tmp_path, for one) work without changing the permissions of any parent.
    """
    if sys.platform != "linux" or not os.path.isdir(_SELF_FD):
        raise Failure(
            f"{path} is below {closed}, which the server's user may not enter;"
            f" choose a directory elsewhere, or allow it: chmod o+x {closed}"
        )
    # Not among the low numbers that a program may take for granted.
    low = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
    descriptor = fcntl.fcntl(low, fcntl.F_DUPFD_CLOEXEC, 100)
    os.close(low)
    return f"{_SELF_FD}/{descriptor}", descriptor


def _unreachable(closed: str | None, uid: int, bindirs: list[str]) -> str:
    reason = f"user id {uid}, which the server runs as, cannot run PostgreSQL from {bindirs}"
    if closed is None:
        return f"{reason}; allow it to, or install PostgreSQL in a place that every user can read"
    return (
        f"{reason}, and a copy in the server's directory is out of reach too, because of {closed};"
        " choose a directory whose parents every user may enter (chmod o+x), or install"
        " PostgreSQL in a place that every user can read"
    )


def _major(version: str) -> int:
    digits = version.split(".")[0]
    return int("".join(c for c in digits[:2] if c.isdigit()))


def _own_lock() -> int | None:
    """Return the locked descriptor, or ``None`` if another supervisor lives."""
    fd = os.open(SERVER_LOCK, os.O_RDWR)
    deadline = time.monotonic() + _LOCK_SECONDS
    while not locks.try_lock(fd, locks.EXCLUSIVE):  # clients look with a moment's shared lock
        if time.monotonic() > deadline:
            os.close(fd)
            return None
        time.sleep(0.002)
    state.remove()
    return fd


def _detach() -> None:
    """Go on in a child that nobody waits for, with the log as output."""
    if os.fork() != 0:
        os._exit(0)
    name = os.path.join(LOG, "supervisor.log")
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    output = os.open(name, flags, 0o600)
    if os.fstat(output).st_size > _LOG_LIMIT:
        os.truncate(output, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
