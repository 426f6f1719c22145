# SPDX-License-Identifier: BSD-3-Clause
"""``flock`` in three verbs. The kernel drops a lock when the last descriptor of it is closed."""

from __future__ import annotations

import fcntl

SHARED = fcntl.LOCK_SH
EXCLUSIVE = fcntl.LOCK_EX


def try_lock(fd: int, kind: int) -> bool:
    """Take the lock, or return false at once."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def unlock(fd: int) -> None:
    """Give the lock back for every process that shares this open file."""
    fcntl.flock(fd, fcntl.LOCK_UN)


def is_taken(fd: int) -> bool:
    """Tell whether another process holds the lock exclusively.

    Looking takes the lock for a moment, so whoever wants it exclusively must try more than once.
    """
    if not try_lock(fd, SHARED):
        return True
    unlock(fd)
    return False
