# SPDX-License-Identifier: BSD-3-Clause
"""The demo that ``make demo`` runs checks itself and ends with status 0."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = Path(__file__).resolve().parents[2] / "examples/quickstart/demo.py"


def test_demo_ends_in_success() -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("OK: ")
