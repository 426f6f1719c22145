# SPDX-License-Identifier: BSD-3-Clause
"""Names and limits that client and supervisor share.

    <path>/pgqueue-embedded.lock   held shared by each user process; marks the directory as ours
    <path>/start.lock              held by the one client that starts a supervisor
    <path>/server.lock             held by the supervisor for all its life
    <path>/state.json              what the supervisor has to say; absent while it starts or stops
    <path>/data/                   the cluster; data.new-* while initdb works on it
    <path>/run/                    the server's socket
    <path>/log/                    supervisor.log, initdb.log, postgres.log
    <path>/pgpass                  password of the superuser, used over TCP only
    <path>/server-<version>/       copy of the binaries, where the originals are out of reach

Client code runs with the caller's rights, perhaps root's, in a directory that belongs to somebody
else: it creates files exclusively, follows no link and changes only what it created.
"""

from __future__ import annotations

import os
import sys

HOLD_LOCK = "pgqueue-embedded.lock"
START_LOCK = "start.lock"
SERVER_LOCK = "server.lock"
STATE = "state.json"
DATA = "data"
NEW_DATA = "data.new-"
RUN = "run"
LOG = "log"
PGPASS = "pgpass"
SERVER_COPY = "server-"

USER = "pgqueue"
DATABASE = "pgqueue"
# A socket's name carries a port even where nothing listens on one.
SOCKET_PORT = 5432

OLDEST_MAJOR = 13
LINGER_SECONDS = 2.0

# sun_path holds 108 bytes on Linux and 104 elsewhere, with the closing NUL.
_SOCKET_NAME_LIMIT = 107 if sys.platform == "linux" else 103
# PostgreSQL's MAXPGPATH is 1024; the deepest name under the cluster needs some of it.
PATH_LIMIT = 900


def socket_fits(path: str) -> bool:
    """Tell whether libpq can name a socket below *path*.

    A comma would make libpq read two hosts; a long name does not fit the kernel's structure.
    """
    name = os.path.join(path, RUN, f".s.PGSQL.{SOCKET_PORT}")
    return len(os.fsencode(name)) <= _SOCKET_NAME_LIMIT and "," not in path


def conninfo(path: str, port: int | None) -> str:
    """Return the libpq connection string; *port* is the TCP port, ``None`` for the socket."""
    if port is None:
        where = {"host": os.path.join(path, RUN), "port": str(SOCKET_PORT)}
        secret = {}
    else:
        where = {"host": "127.0.0.1", "port": str(port)}
        secret = {"passfile": os.path.join(path, PGPASS)}
    words = {**where, "dbname": DATABASE, "user": USER, **secret}
    return " ".join(f"{key}={_quoted(value)}" for key, value in words.items())


def _quoted(value: str) -> str:
    if value and not any(c.isspace() or c in "'\\" for c in value):
        return value
    escaped = value.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
