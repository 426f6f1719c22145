# SPDX-License-Identifier: BSD-3-Clause
"""The server's directory: which one it is, whether it may be ours, and whose it is."""

from __future__ import annotations

import os
import pwd
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from kombu_pgqueue.errors import EmbeddedServerError

from .layout import HOLD_LOCK, PATH_LIMIT

# PostgreSQL refuses to run as root; these accounts exist already or not at all.
_SERVICE_ACCOUNTS = ("postgres", "nobody")
# A new file system has this one at its root.
_NOT_COUNTED = frozenset({"lost+found"})
_CREATE_RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Home:
    """The directory *path* and the user and group that the server runs as."""

    path: str
    uid: int
    gid: int


def resolve(path: str | os.PathLike[str]) -> str:
    """Return the one name of *path*: absolute, without ``~`` and symbolic links.

    Raises EmbeddedServerError for a path that PostgreSQL could not work with.
    """
    text = os.fspath(path)
    if not text:
        raise EmbeddedServerError("the embedded server needs a path: pgqueue-embedded:///path")
    if any(c in text for c in "\0\r\n"):
        raise EmbeddedServerError(f"{text!r} holds a line break or NUL; choose another path")
    real = os.path.realpath(os.path.expanduser(text))
    try:
        size = len(real.encode())
    except UnicodeEncodeError:
        raise EmbeddedServerError(f"{real!a} is not valid UTF-8; choose another path") from None
    if size > PATH_LIMIT:
        raise EmbeddedServerError(
            f"the path has {size} bytes, PostgreSQL can use {PATH_LIMIT}; choose a shorter one"
        )
    return real


@contextmanager
def adopt(path: str) -> Iterator[tuple[Home, int]]:
    """Create *path* or check that it is ours or empty; yield it with an open descriptor.

    As root, an empty directory of root's is handed to the service account. Nothing outside of
    *path* changes, and nothing inside of it that was there before.
    """
    fd = _opened(path)
    try:
        yield _checked(path, fd), fd
    finally:
        os.close(fd)


def _opened(path: str) -> int:
    try:
        os.makedirs(path, mode=0o700, exist_ok=True)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (FileExistsError, NotADirectoryError):
        raise EmbeddedServerError(
            f"{path} is not a directory; give the embedded server a directory of its own"
        ) from None
    except OSError as exc:
        raise EmbeddedServerError(
            f"cannot use {path} for the embedded server: {exc.strerror};"
            " choose a path that this user can write to"
        ) from exc


def _checked(path: str, fd: int) -> Home:
    found = os.fstat(fd)
    me = os.geteuid()
    if me not in (0, found.st_uid):
        raise EmbeddedServerError(
            f"{path} belongs to {_user_name(found.st_uid)} and this process runs as"
            f" {_user_name(me)}; run it as that user or choose another path"
        )
    names = set(os.listdir(fd))
    ours = HOLD_LOCK in names
    # Another process may have made it ours after the look.
    if not ours and names - _NOT_COUNTED and not _exists(fd, HOLD_LOCK):
        raise EmbeddedServerError(
            f"{path} is not empty and holds no embedded server; nothing was changed;"
            " choose an empty or new directory"
        )
    if not ours and found.st_mode & stat.S_ISVTX:
        raise EmbeddedServerError(
            f"{path} is shared by all users (sticky bit); choose a directory inside of it"
        )
    uid, gid = _server_account(found)
    if (uid, gid) != (found.st_uid, found.st_gid) and found.st_uid == 0:
        os.fchown(fd, uid, gid)
    if found.st_mode & 0o077:
        # As initdb does with its own directory: only the owner may reach the socket.
        os.fchmod(fd, 0o700)
    return Home(path, uid, gid)


def _server_account(found: os.stat_result) -> tuple[int, int]:
    if found.st_uid != 0:
        try:
            return found.st_uid, pwd.getpwuid(found.st_uid).pw_gid
        except KeyError:
            return found.st_uid, found.st_gid
    for name in _SERVICE_ACCOUNTS:
        try:
            account = pwd.getpwnam(name)
        except KeyError:
            continue
        if account.pw_uid != 0:
            return account.pw_uid, account.pw_gid
    raise EmbeddedServerError(
        "PostgreSQL does not run as root, and there is neither a user postgres nor nobody;"
        " give the embedded server a directory that belongs to another user"
    )


def open_lock(home: Home, directory: int, name: str) -> int:
    """Open the lock file *name*, creating it for the directory's owner; return a descriptor."""
    deadline = time.monotonic() + _CREATE_RETRY_SECONDS
    while True:
        try:
            return _open_lock(home, directory, name)
        except FileNotFoundError:
            # Removed between the two looks.
            if time.monotonic() > deadline:
                raise
        except PermissionError:
            # Root has just created it and not yet handed it over.
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)


def _open_lock(home: Home, directory: int, name: str) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=directory)
    except FileExistsError:
        fd = os.open(name, flags, dir_fd=directory)
    try:
        found = os.fstat(fd)
        if found.st_uid != home.uid:
            # Ours is empty and has one name: a link to somebody's file is never handed over.
            if not stat.S_ISREG(found.st_mode) or found.st_size or found.st_nlink != 1:
                raise EmbeddedServerError(
                    f"{os.path.join(home.path, name)} is not the embedded server's; remove it"
                )
            os.fchown(fd, home.uid, home.gid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _user_name(uid: int) -> str:
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user id {uid}"
