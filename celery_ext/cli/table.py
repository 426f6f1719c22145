# SPDX-License-Identifier: BSD-3-Clause
"""Tables for people: cut to fit a terminal, whole where the output goes elsewhere."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import click

_GAP = "  "
_LEAST = 6


def is_terminal() -> bool:
    """Does standard output go to a person?"""
    return sys.stdout.isatty()


def colours(ctx: click.Context) -> bool:
    """Only for a person who has not asked for none (`NO_COLOR`, `celery --no-color`)."""
    refused = bool(os.environ.get("NO_COLOR")) or bool(getattr(ctx.obj, "no_color", False))
    return is_terminal() and not refused


def render(head: Sequence[str], rows: Sequence[Sequence[Any]], *, bold: bool = False) -> str:
    """The table as text. On a terminal the widest columns are cut until a row fits."""
    cells = [[text(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(head), *cells]) for i in range(len(head))]
    if is_terminal():
        _squeeze(widths, shutil.get_terminal_size().columns - len(_GAP) * (len(head) - 1))
    lines = [_line(head, widths), *(_line(row, widths) for row in cells)]
    if bold:
        lines[0] = click.style(lines[0], bold=True)
    return "\n".join(lines)


def text(value: Any) -> str:
    """One value on one line, control characters shown and not obeyed."""
    if value is None:
        return "-"
    if isinstance(value, datetime):
        return value.astimezone().isoformat(sep=" ", timespec="seconds")
    return one_line(str(value))


def one_line(value: str) -> str:
    """Text that cannot move the cursor or colour the terminal."""
    joined = " ".join(value.split())
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


def _squeeze(widths: list[int], room: int) -> None:
    while sum(widths) > room:
        widest = max(range(len(widths)), key=widths.__getitem__)
        if widths[widest] <= _LEAST:
            return
        widths[widest] = max(widths[widest] - (sum(widths) - room), _second(widths, widest), _LEAST)


def _second(widths: list[int], widest: int) -> int:
    # Down to just below the next widest, so that no column is starved before the others.
    others = [width for i, width in enumerate(widths) if i != widest]
    return min(max(others, default=0), widths[widest]) - 1


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    fitted = [
        cell if len(cell) <= width else cell[: width - 1] + "…"
        for cell, width in zip(cells, widths, strict=True)
    ]
    padded = [cell.ljust(width) for cell, width in zip(fitted, widths, strict=True)]
    return _GAP.join(padded).rstrip()
