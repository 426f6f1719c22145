# SPDX-License-Identifier: BSD-3-Clause
"""The embedded server's parts that need no server."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import psycopg.conninfo
import pytest

from kombu_pgqueue.embedded import EmbeddedServerError, directory, layout, locks, state
from kombu_pgqueue.embedded.state import State


@pytest.mark.parametrize("path", ["/a", "/a b", "/it's", "/back\\slash", "/a=b", "/ü"])
def test_conninfo_is_what_libpq_reads(path: str) -> None:
    read = psycopg.conninfo.conninfo_to_dict(layout.conninfo(path, None))
    assert read == {"host": f"{path}/run", "port": "5432", "dbname": "pgqueue", "user": "pgqueue"}
    read = psycopg.conninfo.conninfo_to_dict(layout.conninfo(path, 4711))
    assert (read["host"], read["port"]) == ("127.0.0.1", "4711")
    assert read["passfile"] == f"{path}/pgpass"
    assert "password" not in read


def test_a_socket_must_have_a_name_that_fits_and_is_one_host() -> None:
    longest = 107 - len("/run/.s.PGSQL.5432")
    if layout.socket_fits("/" + "x" * (longest - 1)):  # Linux
        assert not layout.socket_fits("/" + "x" * longest)
        assert not layout.socket_fits("/" + "ü" * (longest // 2 + 1))
    assert not layout.socket_fits("/a,b")


def test_names_of_a_path_resolve_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("real")
    real = str(tmp_path.resolve() / "real")
    for name in ("real", "./x/../real", "link", "~/real", tmp_path / "link"):
        assert directory.resolve(name) == real


@pytest.mark.parametrize("path", ["", "/a\nb", "/a\0b", "/\udcff", "/" + "x" * 901])
def test_paths_that_postgresql_cannot_use_are_refused(path: str) -> None:
    with pytest.raises(EmbeddedServerError):
        directory.resolve(path)


def test_state_survives_the_file(tmp_path: Path) -> None:
    assert state.read(str(tmp_path)) is None
    assert state.identity(str(tmp_path)) is None
    word = State("b00t", "host=/x dbname='a b'", "", 1, 2)
    state.write(word, str(tmp_path))
    assert state.read(str(tmp_path)) == word
    before = state.identity(str(tmp_path))
    state.write(State("other", error="no\nway"), str(tmp_path))
    assert state.identity(str(tmp_path)) != before
    state.remove(str(tmp_path))
    state.remove(str(tmp_path))
    assert state.read(str(tmp_path)) is None
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"boot": "x", "strange": 1}', "null"])
def test_a_damaged_state_is_no_state(tmp_path: Path, text: str) -> None:
    (tmp_path / layout.STATE).write_text(text)
    assert state.read(str(tmp_path)) is None


def test_a_state_that_is_no_file_is_no_state(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / layout.STATE)
    assert state.read(str(tmp_path)) is None


def test_looking_at_a_lock_does_not_keep_it(tmp_path: Path) -> None:
    name = tmp_path / "lock"
    name.touch()
    with name.open("r+") as one, name.open("r+") as two:
        assert not locks.is_taken(one.fileno())
        assert locks.try_lock(two.fileno(), locks.EXCLUSIVE)
        assert locks.is_taken(one.fileno())
        assert not locks.try_lock(one.fileno(), locks.SHARED)
        locks.unlock(two.fileno())
        assert locks.try_lock(one.fileno(), locks.SHARED)
        assert not locks.try_lock(two.fileno(), locks.EXCLUSIVE)
        assert not locks.is_taken(two.fileno())


def test_a_new_directory_is_private_and_has_one_lock_of_a_name(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with directory.adopt(str(path)) as (home, fd):
        assert home.uid != 0
        one = directory.open_lock(home, fd, layout.HOLD_LOCK)
        two = directory.open_lock(home, fd, layout.HOLD_LOCK)
    assert os.path.samestat(os.fstat(one), os.fstat(two))
    assert stat.S_IMODE(os.fstat(one).st_mode) == 0o600
    assert os.fstat(one).st_uid == path.stat().st_uid == home.uid
    assert not os.get_inheritable(one)
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    os.close(one)
    os.close(two)
    with directory.adopt(str(path)) as (again, _):
        assert again == home


def test_a_new_file_system_counts_as_empty(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    with directory.adopt(str(tmp_path)):
        pass
