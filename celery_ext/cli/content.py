# SPDX-License-Identifier: BSD-3-Clause
"""A dead letter as a mapping, and what its message says, as far as it can be read here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from kombu.compression import decompress
from kombu.serialization import loads, prepare_accept_content

from kombu_pgqueue.values import DeadLetter


def columns_of(letter: DeadLetter) -> dict[str, Any]:
    """Its values keyed by the column names of `job_dead_letter`."""
    return {column.name: getattr(letter, column.name) for column in fields(letter)}


def arguments_of(letter: DeadLetter, accept: Any) -> tuple[Any, str | None]:
    """`({"args", "kwargs"}, None)`, or `(None, why not)`.

    Only content types the app accepts are decoded: unpickling can run code.
    """
    try:
        body = decode(letter, accept)
    except Exception as exc:  # noqa: BLE001 - any decoder may be behind this; the reason is shown
        return None, f"{type(exc).__name__}: {exc}"
    if isinstance(body, Mapping):
        return {"args": body.get("args", []), "kwargs": body.get("kwargs", {})}, None
    if isinstance(body, (list, tuple)) and len(body) >= 2:
        return {"args": body[0], "kwargs": body[1]}, None
    return None, "the body is no task message"


def decode(letter: DeadLetter, accept: Any) -> Any:
    """The body as its content type and encoding say. Raises whatever its decoder raises."""
    envelope = json.loads(letter.envelope)
    headers = envelope.get("headers") or {}
    body = letter.body
    if headers.get("compression"):
        body = decompress(body, headers["compression"])
    return loads(
        body,
        envelope.get("content-type") or envelope.get("content_type"),
        envelope.get("content-encoding") or envelope.get("content_encoding") or "utf-8",
        accept=prepare_accept_content(accept or ["json"]),
    )
