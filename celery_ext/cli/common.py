# SPDX-License-Identifier: BSD-3-Clause
"""What the commands share: clear errors, options, JSON."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import wraps
from typing import Any
from uuid import UUID

import click
import psycopg

from kombu_pgqueue.errors import PgQueueError
from kombu_pgqueue.store.errors import as_store_error

#: Something was refused: a dead letter that is already resolved, one that does not exist.
REFUSED = 1
#: Nothing could be done: settings, broker or database.
FAILED = 2


class CommandFailed(click.ClickException):
    """One line on standard error, exit status 2."""

    exit_code = FAILED

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


def clear_errors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn errors of settings, broker and database into one clear line."""

    @wraps(function)
    def command(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except PgQueueError as exc:
            raise CommandFailed(str(exc)) from exc
        except psycopg.Error as exc:
            raise CommandFailed(str(as_store_error(exc))) from exc
        except UnicodeEncodeError as exc:
            # Bytes of the command line that are no text in this locale.
            raise CommandFailed(f"an argument is no valid text: {exc.object!r}") from exc

    return command


format_option = click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="A table to read, or JSON to process.",
)


_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*([smhdw])")
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def moment(ctx: click.Context, param: click.Parameter, value: str | None) -> datetime | None:
    """Read a point in time: ISO 8601 (local where it names no offset), or `90m`, `2d` ago."""
    if value is None:
        return None
    ago = _AGO.fullmatch(value.strip())
    try:
        if ago:
            past = timedelta(seconds=float(ago[1]) * _SECONDS[ago[2]])
            return datetime.now(timezone.utc) - past
        return datetime.fromisoformat(value.strip().replace("Z", "+00:00")).astimezone()
    except (ValueError, OverflowError):
        raise click.BadParameter(
            f"{value!r} is neither ISO 8601 nor a time ago such as 90m, 12h or 2d"
        ) from None


def to_json(value: Any) -> str:
    """Indented JSON: times as ISO 8601, bytes as base64, what JSON does not know as text."""
    return json.dumps(value, indent=2, default=_plain)


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, (bytes, bytearray, memoryview)):
        return base64.b64encode(bytes(value)).decode("ascii")
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, timedelta):
        return value.total_seconds()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    return str(value)
