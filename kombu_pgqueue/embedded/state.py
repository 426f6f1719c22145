# SPDX-License-Identifier: BSD-3-Clause
"""What a supervisor tells: the server is ready, or why it is not."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from dataclasses import asdict, dataclass

from .layout import STATE

_SIZE_LIMIT = 1 << 16


class Failure(Exception):
    """Why the server cannot run, in words for the user. Crosses to the client as a `State`."""


@dataclass(frozen=True)
class State:
    """One word of a supervisor.

    *boot* names the supervisor's start, so that an old word is told from a new one. *conninfo* is
    set when the server is ready, *error* when it failed, neither when another supervisor was first.
    """

    boot: str
    conninfo: str = ""
    error: str = ""
    supervisor_pid: int = 0
    postmaster_pid: int = 0


def encode(state: State) -> str:
    return json.dumps(asdict(state))


def decode(text: str) -> State | None:
    """Return the state in *text*, or ``None`` where there is none."""
    try:
        fields = json.loads(text)
        return State(**fields)
    except (ValueError, TypeError):
        return None


def write(state: State, directory: str = ".") -> None:
    """Replace the state file atomically."""
    target = os.path.join(directory, STATE)
    draft = f"{target}.{state.boot}"
    with open(draft, "w", encoding="utf-8") as file:
        file.write(encode(state))
    os.replace(draft, target)


def remove(directory: str = ".") -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(directory, STATE))


def read(directory: str) -> State | None:
    """Return what the state file says, or ``None`` if there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(os.path.join(directory, STATE), flags)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        return decode(file.read(_SIZE_LIMIT).decode("utf-8", "replace"))


def identity(directory: str) -> tuple[int, int] | None:
    """Return what changes whenever the state file is replaced, or ``None`` without one."""
    try:
        found = os.stat(os.path.join(directory, STATE), follow_symlinks=False)
    except OSError:
        return None
    return (found.st_ino, found.st_mtime_ns)
