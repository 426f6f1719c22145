# SPDX-License-Identifier: BSD-3-Clause
"""From a kombu message to the rows it becomes, under ids that stay when kombu tries again."""

from __future__ import annotations

import logging
import threading
from typing import Any
from uuid import UUID

from kombu_pgqueue.envelope import new_job_id, publication
from kombu_pgqueue.options import Options
from kombu_pgqueue.topology import Topology
from kombu_pgqueue.values import Publication

logger = logging.getLogger(__name__)


class _LastTry(threading.local):
    """What this thread prepared last, until it is known to be published."""

    message: Prepared | None = None


_last = _LastTry()


class Prepared(dict[str, Any]):
    """A message ready for `basic_publish`, with the id of its job in each queue.

    When an answer is lost kombu prepares the same message once more, from the same headers and the
    same body. It must be the same job then, so the ids of a message whose publishing failed are
    kept for the thread's next message, and used if that is the same one.
    """

    def __init__(self, **parts: Any) -> None:
        super().__init__(parts)
        last = _last.message
        same = (
            last is not None
            and last["headers"] is parts["headers"]
            and last["body"] == parts["body"]
        )
        self._job_ids: dict[str, UUID] = last._job_ids if same and last is not None else {}
        _last.message = self

    def job_id(self, queue: str) -> UUID:
        """The id of the job this message is in `queue`."""
        if queue not in self._job_ids:
            self._job_ids[queue] = new_job_id()
        return self._job_ids[queue]

    def published(self) -> None:
        """It is done: the same headers again are another message."""
        if _last.message is self:
            _last.message = None
        self._job_ids = {}


def prepare(
    body: Any,
    priority: int | None,
    content_type: str | None,
    content_encoding: str | None,
    headers: dict[str, Any] | None,
    properties: dict[str, Any] | None,
) -> Prepared:
    """What `Channel.prepare_message` answers."""
    properties = properties if properties is not None else {}
    properties.setdefault("priority", priority or 0)
    return Prepared(
        **{
            "body": body,
            "content-type": content_type,
            "content-encoding": content_encoding,
            "headers": headers if headers is not None else {},
            "properties": properties,
        }
    )


def publications(
    message: Prepared, exchange: str, routing_key: str, topology: Topology, options: Options
) -> list[Publication]:
    """One row for each queue that takes the message."""
    queues = topology.route(exchange or "", routing_key or "")
    if not queues and message["properties"].get("delivery_mode") != 1:
        logger.warning(
            "No queue takes the message: exchange %r, routing key %r", exchange, routing_key
        )
    return [
        publication(
            message,
            queue=queue,
            job_id=message.job_id(queue),
            exchange=exchange or "",
            routing_key=routing_key or "",
            visibility_timeout=options.visibility_timeout,
        )
        for queue in queues
    ]
