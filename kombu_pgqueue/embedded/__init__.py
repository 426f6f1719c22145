# SPDX-License-Identifier: BSD-3-Clause
"""The embedded server: a PostgreSQL that lives as long as somebody uses it.

``acquire(path)`` starts the server of that directory, or joins it, and returns how to connect. The
processes of the machine that name the same directory share one server; it stops about two seconds
after the last of them is gone, however it went.

How it works: each user process holds a shared ``flock`` on a file in the directory, which the
kernel drops when the process dies. A detached supervisor process runs ``postgres`` as its child and
looks four times a second whether it could have that lock exclusively. It keeps it while it shuts
down, so whoever comes meanwhile waits, and then starts the server anew. If the supervisor itself is
killed, the kernel tells ``postgres`` to stop (Linux), and the next ``acquire`` starts over.
"""

from __future__ import annotations

import sys

from kombu_pgqueue.errors import EmbeddedServerError

if sys.platform == "win32":
    import os

    def acquire(path: str | os.PathLike[str], *, timeout: float = 60.0) -> str:
        """Refuse: the embedded server needs POSIX file locks."""
        raise EmbeddedServerError(
            "the embedded server needs Linux, macOS or another POSIX system;"
            " on Windows run a PostgreSQL of your own and use a pgqueue:// URL"
        )

    def release(path: str | os.PathLike[str]) -> None:
        """Do nothing: nothing can be held here."""

else:
    from .client import acquire, release

__all__ = ["EmbeddedServerError", "acquire", "release"]
