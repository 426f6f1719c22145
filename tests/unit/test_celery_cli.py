# SPDX-License-Identifier: BSD-3-Clause
"""K-1: tables and points in time."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from typing import Any

import click
import pytest

from celery_ext.cli import table
from celery_ext.cli.common import moment, to_json

HEAD = ("ID", "TASK", "ERROR")
ROWS = [(1, "shop.pay", "x" * 200), (22, "shop.a_rather_long_name_for_a_task", None)]


def render(monkeypatch: Any, terminal: bool, columns: int = 80) -> list[str]:
    monkeypatch.setattr(table, "is_terminal", lambda: terminal)
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((columns, 24)))
    return table.render(HEAD, ROWS).splitlines()


@pytest.mark.parametrize("columns", [40, 60, 80, 120])
def test_a_table_fits_the_terminal(monkeypatch: Any, columns: int) -> None:
    lines = render(monkeypatch, True, columns)
    assert max(len(line) for line in lines) <= columns
    assert lines[1].startswith("1 ")
    assert lines[2].startswith("22 ")
    assert "…" in lines[1]


def test_a_table_that_goes_elsewhere_is_whole(monkeypatch: Any) -> None:
    lines = render(monkeypatch, False)
    assert lines[1].endswith("x" * 200)
    assert lines[2].endswith("  -")


def test_a_cell_cannot_play_with_the_terminal() -> None:
    assert table.text("a\tb\n\x1b[2Jc\x00") == "a b \\x1b[2Jc\\x00"


def test_colour_is_for_people_who_want_it(monkeypatch: Any) -> None:
    ctx: Any = click.Context(click.Command("x"))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(table, "is_terminal", lambda: True)
    assert table.colours(ctx)
    monkeypatch.setenv("NO_COLOR", "1")
    assert not table.colours(ctx)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setattr(table, "is_terminal", lambda: False)
    assert not table.colours(ctx)


def test_points_in_time() -> None:
    def read(value: str) -> datetime | None:
        return moment(None, None, value)  # type: ignore[arg-type]

    ago = datetime.now(timezone.utc) - timedelta(hours=36)
    assert abs(read("1.5d") - ago) < timedelta(seconds=5)  # type: ignore[operator]
    assert read("2026-01-02T03:04:05Z") == datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    assert read("2026-01-02") == datetime(2026, 1, 2).astimezone()
    for wrong in ("yesterday", "5 parsecs", "", "99999999999w"):
        with pytest.raises(click.BadParameter):
            read(wrong)


def test_json_takes_what_a_row_holds() -> None:
    assert to_json({"t": datetime(2026, 1, 2, tzinfo=timezone.utc), "b": b"\x00\xff"}) == (
        '{\n  "t": "2026-01-02T00:00:00+00:00",\n  "b": "AP8="\n}'
    )
