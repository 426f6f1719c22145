# SPDX-License-Identifier: BSD-3-Clause
"""What a retry changes on its job's row, and what it leaves exactly as it was published.

A retry is published by Celery as a whole new message. Most of it is the old one again, written
anew; only what truly differs is stored, so that the bytes of an unchanged job survive its retries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kombu.compression import decompress
from kombu.serialization import loads
from kombu.utils.json import dumps as json_dumps
from kombu.utils.json import loads as json_loads

from celery_ext.capture import CapturedRetry
from celery_ext.waiting import seconds_until
from kombu_pgqueue.verdicts import Changes

#: Header fields the row itself keeps, or that every publishing writes anew.
_ROW_HEADERS = frozenset({"eta", "retries", "expires"})
#: Descriptions of the arguments: the publisher's own stay while the arguments do.
_REPR_HEADERS = frozenset({"argsrepr", "kwargsrepr"})
#: Properties of the delivery, settings fixed when the job was published, and what Celery's retry
#: leaves among the properties by accident.
_OTHER_PROPERTIES = frozenset(
    {
        *("body_encoding", "delivery_tag", "expiration", "priority"),
        *("idempotency_key", "pgqueue"),
        *("origin", "redelivered"),
    }
)


def changes_of(job: CapturedRetry, message: Any, app: Any) -> Changes:
    """The difference between the retry `job` and the delivery `message` it comes from."""
    lease = message.lease
    stored: dict[str, Any] = json_loads(lease.envelope)
    fresh: dict[str, Any] = json_loads(json_dumps(_envelope(job)))
    body = None if _same_body(job, lease, stored) else job.body
    envelope = None
    if not _same_envelope(fresh, stored, ignore_reprs=body is None):
        envelope = json_dumps(_merged(fresh, stored))
    priority = job.properties.get("priority")
    return Changes(
        queue_name=None if job.queue in (None, lease.queue_name) else job.queue,
        priority=None if priority is None or int(priority) == lease.priority else int(priority),
        envelope=envelope,
        body=body,
        expires_in=_new_expiry(job, message, app),
    )


def _envelope(job: CapturedRetry) -> dict[str, Any]:
    properties = _without(job.properties, _OTHER_PROPERTIES)
    # Where it went to: the next retry starts from there.
    properties["delivery_info"] = {"exchange": job.exchange, "routing_key": job.routing_key}
    return {
        "content-type": job.content_type,
        "content-encoding": job.content_encoding,
        "headers": dict(job.headers),
        "properties": properties,
    }


def _same_body(job: CapturedRetry, lease: Any, stored: Mapping[str, Any]) -> bool:
    old_type = stored.get("content-type"), stored.get("content-encoding")
    if (job.content_type, job.content_encoding) != old_type:
        return False
    headers = stored.get("headers") or {}
    if job.headers.get("compression") != headers.get("compression"):
        return False
    old: bytes = lease.body
    if job.body == old:
        return True
    # Another publisher's spacing or key order is no reason to rewrite what it wrote.
    return bool(
        _decoded(job.body, job.headers, job.content_type, job.content_encoding)
        == _decoded(old, headers, job.content_type, job.content_encoding)
    )


def _decoded(body: bytes, headers: Mapping[str, Any], kind: str, encoding: str) -> Any:
    if headers.get("compression"):
        body = decompress(body, headers["compression"])
    # The worker has decoded the same content type to run the task at all.
    return loads(body, kind, encoding, accept=[kind])


def _same_envelope(
    fresh: Mapping[str, Any], stored: Mapping[str, Any], *, ignore_reprs: bool
) -> bool:
    if any(fresh[key] != stored.get(key) for key in ("content-type", "content-encoding")):
        return False
    skipped = _ROW_HEADERS | _REPR_HEADERS if ignore_reprs else _ROW_HEADERS
    old_headers = dict(stored.get("headers") or {})
    new_headers = dict(fresh["headers"])
    own_id, parent_id = old_headers.get("id"), new_headers.get("parent_id")
    if parent_id == own_id and old_headers.get("parent_id") is None:
        # Celery takes the running task for the parent of its own retry.
        new_headers["parent_id"] = None
    if _without(new_headers, skipped) != _without(old_headers, skipped):
        return False
    old_properties = stored.get("properties") or {}
    return all(old_properties.get(key) == value for key, value in fresh["properties"].items())


def _merged(fresh: Mapping[str, Any], stored: Mapping[str, Any]) -> dict[str, Any]:
    properties = {**(stored.get("properties") or {}), **fresh["properties"]}
    return {**stored, **fresh, "properties": properties}


def _without(mapping: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in names}


def _new_expiry(job: CapturedRetry, message: Any, app: Any) -> float | None:
    # What the worker was told; a replay has no expiry any more, nor have its retries.
    if not job.expires or job.expires == (message.headers or {}).get("expires"):
        return None
    return seconds_until(job.expires, app)
