# SPDX-License-Identifier: BSD-3-Clause
"""What is shipped, and what importing it costs."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("kombu_pgqueue", "celery_ext")


def python(code: str, cwd: Path) -> str:
    """Run *code* in an interpreter of its own, away from the source tree; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel, built from a copy so that no build leftovers get into the tree."""
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    for package in PACKAGES:
        shutil.copytree(
            ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__")
        )
    build = "from setuptools.build_meta import build_wheel; build_wheel('.')"
    python(build, source)
    (built,) = source.glob("*.whl")
    return zipfile.ZipFile(built)


def test_wheel_holds_every_file_of_both_packages(wheel: zipfile.ZipFile) -> None:
    tracked = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert "kombu_pgqueue/py.typed" in tracked
    assert any(name.endswith(".sql") for name in tracked)
    shipped = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert shipped == tracked


def test_wheel_declares_its_entry_points(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    declared = configparser.ConfigParser()
    declared.read_string(wheel.read(name).decode())
    assert set(declared["kombu.serializers"]) == {"pgqueue"}
    assert set(declared["celery.commands"]) == {"dead-letter", "pgqueue"}


@pytest.mark.parametrize("scheme", ["pgqueue", "pgqueue-embedded"])
def test_url_alone_is_enough_in_a_celery_app(scheme: str, tmp_path: Path) -> None:  # T-2
    code = (
        f"import celery; app = celery.Celery(broker='{scheme}:///x');"
        "print(app.connection().get_transport_cls().__module__)"
    )
    assert python(code, tmp_path) == "kombu_pgqueue.transport"


@pytest.mark.parametrize("scheme", ["pgqueue", "pgqueue-embedded"])
def test_import_serves_bare_kombu(scheme: str, tmp_path: Path) -> None:  # T-2
    code = (
        "import kombu, kombu_pgqueue;"
        f"print(kombu.Connection('{scheme}:///x').get_transport_cls().__module__)"
    )
    assert python(code, tmp_path) == "kombu_pgqueue.transport"


def test_registering_imports_next_to_nothing(tmp_path: Path) -> None:  # T-2
    code = (
        "import sys, kombu_pgqueue;"
        "print({'kombu.entity', 'celery', 'psycopg', 'sqlalchemy'} & set(sys.modules))"
    )
    assert python(code, tmp_path) == "set()"


@pytest.mark.parametrize("module", ["store", "values", "verdicts", "connect", "embedded"])
def test_store_needs_no_celery(module: str, tmp_path: Path) -> None:
    code = f"import sys, kombu_pgqueue.{module}; print('celery' in sys.modules)"
    assert python(code, tmp_path) == "False"
