# SPDX-License-Identifier: BSD-3-Clause
"""A kombu message as a row and back: priority, delay, expiry, stamps; the body stays raw bytes."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime, timezone
from typing import Any
from uuid import UUID

from kombu.utils import json

from kombu_pgqueue.values import Lease, Publication, Stamps

MIN_PRIORITY, MAX_PRIORITY = 0, 255
TRANSIENT = 1
#: 1970 and 9999: dates outside cannot be read back by every client, and say no more than these.
_EARLIEST, _LATEST = 0.0, datetime(9999, 12, 30, tzinfo=timezone.utc).timestamp()

_STAMPS = frozenset(field.name for field in fields(Stamps))


def new_job_id() -> UUID:
    """A UUID of version 7 (RFC 9562): ids made later sort later, so index inserts stay together."""
    nanoseconds = time.time_ns()
    milliseconds, rest = divmod(nanoseconds, 1_000_000)
    # The 12 bits after the version count the fractions of the millisecond (RFC 9562, 6.2 method 3).
    fraction = rest * 4096 // 1_000_000
    value = (milliseconds & (1 << 48) - 1) << 80 | 0x7 << 76 | fraction << 64
    value |= 0b10 << 62 | int.from_bytes(os.urandom(8), "big") >> 2
    return UUID(int=value)


def publication(
    message: Mapping[str, Any],
    *,
    queue: str,
    job_id: UUID,
    exchange: str,
    routing_key: str,
    visibility_timeout: float | None = None,
) -> Publication:
    """The row that a prepared message becomes in one queue."""
    headers: Mapping[str, Any] = message["headers"]
    properties: dict[str, Any] = dict(message["properties"])
    priority = clamp_priority(properties.get("priority"))
    properties["priority"] = priority
    properties["delivery_info"] = {"exchange": exchange, "routing_key": routing_key}
    ours = properties.get("pgqueue") or {}
    now = time.time()
    key = properties.get("idempotency_key")
    return Publication(
        job_id=job_id,
        queue_name=queue,
        envelope=json.dumps(
            {
                "content-type": message["content-type"],
                "content-encoding": message["content-encoding"],
                "headers": headers,
                "properties": properties,
            }
        ),
        body=_bytes(message["body"]),
        job_kind=_text(headers.get("task")) or "",
        task_id=_text(headers.get("id")),
        priority=priority,
        delay=max(_seconds_until(headers.get("eta"), now) or 0.0, 0.0),
        expires_in=_expires_in(headers, properties, now),
        idempotency_key=None if key is None else str(key),
        retries=_count(headers.get("retries")),
        acks_late=ours.get("acks_late"),
        durable=properties.get("delivery_mode") != TRANSIENT,
        stamps=_stamps(ours.get("stamps"), visibility_timeout),
    )


def clamp_priority(value: Any) -> int:
    """Higher goes first; what is no number is 0."""
    try:
        return min(max(int(value), MIN_PRIORITY), MAX_PRIORITY)
    except (TypeError, ValueError, OverflowError):
        return MIN_PRIORITY


def _bytes(body: Any) -> bytes:
    return body.encode() if isinstance(body, str) else bytes(body)


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 < value < 2**31 else 0


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _stamps(given: Mapping[str, Any] | None, visibility_timeout: float | None) -> Stamps:
    known = {name: value for name, value in (given or {}).items() if value is not None}
    unknown = known.keys() - _STAMPS
    if unknown:
        raise ValueError(
            f"unknown stamps {', '.join(sorted(unknown))}; known are: {', '.join(sorted(_STAMPS))}"
        )
    if visibility_timeout is not None:
        known.setdefault("visibility_timeout_s", visibility_timeout)
    return Stamps(**known) if known else Stamps()


def _moment(value: Any) -> float | None:
    """Seconds since the epoch of an ISO time (UTC if it names no zone), a datetime or a number."""
    if isinstance(value, str):
        try:
            value = datetime.fromisoformat(value.replace("Z", "+00:00"))
        except ValueError:
            return None
    if isinstance(value, datetime):
        if value.tzinfo is None:
            value = value.replace(tzinfo=timezone.utc)
        return value.timestamp()
    if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
        return float(value)
    return None


def _seconds_until(value: Any, now: float) -> float | None:
    moment = _moment(value)
    return None if moment is None else min(max(moment, _EARLIEST), _LATEST) - now


def _expires_in(
    headers: Mapping[str, Any], properties: Mapping[str, Any], now: float
) -> float | None:
    limits = [_seconds_until(headers.get("expires"), now)]
    try:
        # AMQP's own: milliseconds in a string.
        limits.append(_seconds_until(now + float(properties["expiration"]) / 1000, now))
    except (KeyError, TypeError, ValueError):
        limits.append(None)
    given = [limit for limit in limits if limit is not None]
    return min(given) if given else None


def unpack(lease: Lease) -> dict[str, Any]:
    """The envelope of a lease, as `Message` takes it. Raises `ValueError` if it is none."""
    try:
        envelope = json.loads(lease.envelope)
        headers, properties = envelope["headers"], envelope["properties"]
        if not isinstance(headers, dict) or not isinstance(properties, dict):
            raise TypeError("headers and properties must be objects")
        info = properties.get("delivery_info")
    except (ValueError, TypeError, KeyError, RecursionError) as exc:
        raise ValueError(f"the stored envelope cannot be read: {exc!r}") from exc
    # The database held it until it was due, by its own clock: the worker must not hold it again.
    if "eta" in headers and _moment(headers["eta"]) is not None:
        headers["eta"] = None
    # Where the row says 0 and was not replayed, the publisher's own header stands as it is.
    if (lease.retries or lease.replays) and ("retries" in headers or "task" in headers):
        headers["retries"] = lease.retries
    if lease.replays and headers.get("expires") is not None:
        headers["expires"] = None
    properties["priority"] = lease.priority
    properties["pgqueue"] = {
        "job_id": str(lease.job_id),
        "lease_token": str(lease.lease_token),
        "attempts": lease.attempts,
        "deliveries": lease.deliveries,
        "replays": lease.replays,
        "backoff_spent": lease.backoff_spent_s,
    }
    delivery_info = dict(info) if isinstance(info, dict) else {}
    delivery_info["redelivered"] = lease.redelivered
    delivery_info["priority"] = lease.priority
    return {
        "headers": headers,
        "properties": properties,
        "content_type": envelope.get("content-type"),
        "content_encoding": envelope.get("content-encoding"),
        "delivery_info": delivery_info,
    }
