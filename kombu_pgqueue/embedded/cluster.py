# SPDX-License-Identifier: BSD-3-Clause
"""Make the cluster once, start and stop its server. Works in the current directory."""

from __future__ import annotations

import contextlib
import glob
import os
import secrets
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import IO

from . import leftovers
from .layout import DATA, DATABASE, LOG, NEW_DATA, PGPASS, RUN, SOCKET_PORT, USER
from .privileges import signal_with_parent
from .state import Failure

POSTGRES_LOG = os.path.join(LOG, "postgres.log")
INITDB_LOG = os.path.join(LOG, "initdb.log")

_LOG_LIMIT = 10 << 20
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_FAST_SECONDS = 30.0
_IMMEDIATE_SECONDS = 5.0

# Written once, into postgresql.conf, where the owner may change them. Durability stays as
# PostgreSQL has it: on.
_DEFAULTS = """
# defaults of the embedded server
max_connections = 200
shared_buffers = 64MB
max_wal_size = 256MB
jit = off
cluster_name = 'pgqueue-embedded'
"""

# What a tool needs of the environment; the rest may hold the starter's secrets.
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")

Process = subprocess.Popen[bytes]


@dataclass
class Cluster:
    """The cluster in ``./data``.

    *base* is a name of the current directory that works for the server's user; *descriptor* is kept
    open for the server when that name goes through it. *wait* waits for a process of ours and
    raises when the supervisor is told to stop.
    """

    bindir: str
    major: int
    base: str
    descriptor: int | None
    wait: Callable[[Process], int]
    port: int | None = None
    process: Process | None = field(default=None, init=False)

    def create(self) -> None:
        """Make the cluster unless it exists. It appears under its name only when it is complete."""
        for draft in glob.glob(f"{NEW_DATA}*"):
            shutil.rmtree(draft, ignore_errors=True)
        if os.path.lexists(DATA):
            self._check()
            return
        draft = f"{NEW_DATA}{secrets.token_hex(4)}"
        os.mkdir(draft, 0o700)
        try:
            cluster = self._initialised(draft)
            os.rename(os.path.join(draft, PGPASS), PGPASS)
            os.rename(cluster, DATA)
            _sync_directory(".")
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _initialised(self, draft: str) -> str:
        """Make a complete cluster within *draft*; return its name."""
        password = self._new_password(draft)
        cluster = os.path.join(draft, DATA)
        with open(INITDB_LOG, "wb") as log:
            self._run_tool(log, "initdb", *self._initdb_options(cluster, password))
            with open(os.path.join(cluster, "postgresql.conf"), "a", encoding="utf-8") as conf:
                conf.write(_DEFAULTS)
            single = ("--single", "-F", "-D", self._named(cluster), "template1")
            self._run_tool(log, "postgres", *single, said=f"CREATE DATABASE {DATABASE};\n")
            # One pass over the finished files instead of one in each step.
            self._run_tool(log, "initdb", "--sync-only", "-D", self._named(cluster))
        return cluster

    def _check(self) -> None:
        try:
            with open(os.path.join(DATA, "PG_VERSION"), encoding="utf-8") as file:
                major = int(file.read(16))
        except (OSError, ValueError) as exc:
            raise Failure(
                f"the directory data holds no PostgreSQL cluster ({exc}); move it away"
            ) from exc
        if major != self.major:
            raise Failure(f"the cluster was made by PostgreSQL {major}, the server is {self.major}")

    def _new_password(self, draft: str) -> str:
        word = secrets.token_urlsafe(24)
        name = os.path.join(draft, "password")
        for path, text in ((name, word), (os.path.join(draft, PGPASS), f"*:*:*:{USER}:{word}")):
            with open(path, "w", encoding="utf-8") as file:
                file.write(text + "\n")
        return name

    def _initdb_options(self, cluster: str, password: str) -> list[str]:
        options = [
            *("-D", self._named(cluster), "-U", USER, "-E", "UTF8", "--no-locale"),
            # The socket's directory is the owner's alone; TCP, if used at all, wants a password.
            *("--auth-local=trust", "--auth-host=scram-sha-256"),
            *(f"--pwfile={self._named(password)}", "--no-sync"),
        ]
        if self.major < 18:
            options.append("--data-checksums")  # the default since then
        if self.major >= 17:
            options += ["--locale-provider=builtin", "--builtin-locale=C.UTF-8"]
        return options

    def _named(self, relative: str) -> str:
        return os.path.join(self.base, relative)

    def _run_tool(self, log: IO[bytes], tool: str, *options: str, said: str = "") -> None:
        process = self._spawn(log, tool, options, signal.SIGTERM, subprocess.PIPE)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(said.encode())
            process.stdin.close()
        status = self.wait(process)
        if status != 0:
            raise Failure(f"{tool} {_ended(status)}. Its last words:\n{tail(INITDB_LOG)}")

    def _spawn(
        self, log: IO[bytes], tool: str, options: tuple[str, ...], death: int, stdin: int
    ) -> Process:
        environment = {key: os.environ[key] for key in _PASSED_ON if key in os.environ}
        # A given zone spares initdb the search for the machine's.
        environment |= {"LC_ALL": "C", "TZ": "UTC"}
        try:
            return subprocess.Popen(
                [os.path.join(self.bindir, tool), *options],
                stdin=stdin,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=() if self.descriptor is None else (self.descriptor,),
                preexec_fn=signal_with_parent(death),  # this process has one thread
            )
        except OSError as exc:
            raise Failure(f"cannot run {os.path.join(self.bindir, tool)}: {exc.strerror}") from exc

    def start(self, *, tcp: bool) -> None:
        """Start ``postgres``; `is_ready` tells when it takes connections."""
        shutil.rmtree(RUN, ignore_errors=True)
        os.makedirs(RUN, mode=0o700, exist_ok=True)
        if tcp:
            self.port = self.port or _free_port()
            listen = ["listen_addresses=127.0.0.1", f"port={self.port}", "unix_socket_directories="]
        else:
            directory = self._named(RUN).replace('"', '""')
            listen = [
                *("listen_addresses=", f"port={SOCKET_PORT}"),
                f'unix_socket_directories="{directory}"',
            ]
        settings = [*listen, "logging_collector=off", "log_destination=stderr"]
        options = ["-D", self._named(DATA)]
        for setting in settings:
            options += ["-c", setting]
        with contextlib.suppress(FileNotFoundError):
            os.replace(POSTGRES_LOG, f"{POSTGRES_LOG}.1")
        with open(POSTGRES_LOG, "ab") as log:
            self.process = self._spawn(
                log, "postgres", tuple(options), signal.SIGINT, subprocess.DEVNULL
            )

    def is_ready(self) -> bool:
        lines = leftovers.pid_file()
        return (
            self.process is not None
            and len(lines) > 7
            and lines[0] == str(self.process.pid)
            and lines[7].strip() == "ready"
        )

    def exit_status(self) -> int | None:
        """Return how ``postgres`` ended, ``None`` while it runs."""
        return None if self.process is None else self.process.poll()

    def stop(self, wait: Callable[[Process, float], bool]) -> None:
        """Stop ``postgres``: fast, else at once, else by force."""
        if self.process is None:
            return
        for signum, seconds in (
            (signal.SIGINT, _FAST_SECONDS),
            (signal.SIGQUIT, _IMMEDIATE_SECONDS),
            (signal.SIGKILL, _IMMEDIATE_SECONDS),
        ):
            self.process.send_signal(signum)
            if wait(self.process, seconds):
                return

    def abandon(self) -> None:
        """Stop ``postgres`` without a care for the cluster, whose files are gone."""
        if self.process is not None:
            self.process.send_signal(signal.SIGQUIT)

    def limit_log(self) -> None:
        """Keep the log below its limit, with one older generation."""
        with contextlib.suppress(OSError):
            if os.stat(POSTGRES_LOG).st_size > _LOG_LIMIT:
                shutil.copyfile(POSTGRES_LOG, f"{POSTGRES_LOG}.1")
                os.truncate(POSTGRES_LOG, 0)  # the server appends

    def port_was_taken(self) -> bool:
        return self.port is not None and "could not bind" in tail(POSTGRES_LOG)

    def failure(self) -> Failure:
        status = self.exit_status()
        ended = "did not start" if status is None else _ended(status)
        return Failure(f"postgres {ended}. Its last words:\n{tail(POSTGRES_LOG)}")


def _ended(status: int) -> str:
    return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"


def tail(name: str) -> str:
    """Return the last lines of a log, or say that there is none."""
    try:
        with open(name, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read().decode(errors="replace").strip().splitlines()
    except OSError as exc:
        return f"({name}: {exc.strerror})"
    return "\n".join(lines[-_TAIL_LINES:]) or f"({name} is empty)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _sync_directory(name: str) -> None:
    fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
