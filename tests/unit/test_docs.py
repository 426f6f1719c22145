# SPDX-License-Identifier: BSD-3-Clause
"""What the documents say is so: options are complete, links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kombu_pgqueue.options import KNOWN, Options

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted(
    path for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md") for path in ROOT.glob(pattern)
)


def documented_options() -> dict[str, str]:
    text = (ROOT / "docs/reference/options.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", text, flags=re.MULTILINE))


def test_every_option_is_documented() -> None:
    assert sorted(documented_options()) == sorted(KNOWN)


def test_documented_defaults_hold() -> None:
    defaults = Options()
    for name, said in documented_options().items():
        match = re.fullmatch(r"`(.*)`", said)
        value = getattr(defaults, name)
        if match is None:
            assert value is None, f"{name} has the default {value!r}"
        elif isinstance(value, bool):
            assert match[1] == str(value).lower()
        else:
            assert match[1] == (f"{value:g}" if isinstance(value, float) else str(value))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target
