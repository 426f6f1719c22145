# SPDX-License-Identifier: BSD-3-Clause
"""Server processes that outlived their supervisor or their postmaster.

Called by the one process that holds the server lock, so whatever runs in the cluster is an orphan.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable

from .layout import DATA
from .state import Failure

_FAST_SECONDS = 15.0
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 0.01

_PID_FILE = os.path.join(DATA, "postmaster.pid")


def pid_file() -> list[str]:
    """Return the lines of ``postmaster.pid``; none when there is no such file."""
    try:
        with open(_PID_FILE, encoding="utf-8", errors="replace") as file:
            return file.read().splitlines()
    except FileNotFoundError:
        return []


def recorded_pid() -> int:
    """Return the postmaster that ``postmaster.pid`` names, 0 without one."""
    lines = pid_file()
    return abs(int(lines[0])) if lines and lines[0].lstrip("-").isdigit() else 0


def stop() -> list[int]:
    """Stop every server process of the cluster; return which were found.

    First fast (SIGINT to the postmaster), then at once (SIGQUIT), then SIGKILL. Raises Failure if
    some process survives that.
    """
    if not recorded_pid():
        return []
    found = _processes()
    rest = found
    if recorded_pid() in rest:
        _send([recorded_pid()], signal.SIGINT)
        rest = _wait(_FAST_SECONDS)
    for signum in (signal.SIGQUIT, signal.SIGKILL):
        if rest:
            _send(rest, signum)
            rest = _wait(_EXIT_SECONDS)
    if rest:
        raise Failure(f"old server processes do not end: {rest}; end them, or restart the machine")
    _forget_reused_pid()
    return found


def _forget_reused_pid() -> None:
    """Remove a ``postmaster.pid`` whose number now belongs to another program.

    PostgreSQL takes any living process of that number for its postmaster and refuses to start.
    Only where every process of the cluster can be seen is it known that none is left.
    """
    if sys.platform == "linux" and _alive(recorded_pid()):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_PID_FILE)


def _wait(seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (rest := _processes()) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return rest


def _send(pids: Iterable[int], signum: signal.Signals) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _processes() -> list[int]:
    """Return the server processes that work in the cluster."""
    if sys.platform == "linux":
        cluster = os.stat(DATA)
        return [pid for pid in _all_pids() if _serves(pid, cluster)]
    pid = recorded_pid()
    return [pid] if _alive(pid) and "postgres" in _command(pid) else []


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _serves(pid: int, cluster: os.stat_result) -> bool:
    """Every server process has the data directory as its working directory."""
    try:
        if not os.path.samestat(os.stat(f"/proc/{pid}/cwd"), cluster):
            return False
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).startswith("postgres")
    except OSError:  # gone, or another user's
        return False


def _command(pid: int) -> str:
    done = subprocess.run(
        ["ps", "-o", "comm=", "-p", str(pid)], stdout=subprocess.PIPE, check=False
    )
    return done.stdout.decode(errors="replace")


def _alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return False
    return True
