# SPDX-License-Identifier: BSD-3-Clause
"""A publisher's verbs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields as dataclass_fields
from typing import cast

from kombu_pgqueue.store.base import Parameters, Row, StoreBase, seconds
from kombu_pgqueue.store.errors import store_errors
from kombu_pgqueue.store.text import storable, storable_json
from kombu_pgqueue.values import Enqueued, Publication, Stamps


class PublisherVerbs(StoreBase):
    """Enqueue and wake."""

    @property
    def wake_channel(self) -> str:
        """The channel to LISTEN on; the payload of a notification is the queue's name."""
        return f"{self.schema}.wake"

    def enqueue(self, publication: Publication) -> Enqueued:
        """Put one message into one queue; durable when this returns, as the server commits."""
        return Enqueued(*self._row("enqueue", _publication(publication)))

    def enqueue_many(self, publications: Sequence[Publication]) -> list[Enqueued]:
        """All or none, in one transaction and one round trip."""
        with store_errors(), self.connection.pipeline(), self.connection.transaction():
            cursors = [self._send("enqueue", _publication(each)) for each in publications]
            return [Enqueued(*cast(Row, cursor.fetchone())) for cursor in cursors]

    def notify(self, queue_names: Iterable[str]) -> None:
        """Wake whoever waits for these queues. Call it after the publish has committed."""
        self._row("notify", {"channel": self.wake_channel, "queues": list(queue_names)})


def _publication(publication: Publication) -> Parameters:
    return {
        "job_id": publication.job_id,
        "queue_name": publication.queue_name,
        "envelope": publication.envelope,
        "body": publication.body,
        "job_kind": storable(publication.job_kind),
        "task_id": None if publication.task_id is None else storable(publication.task_id),
        "priority": publication.priority,
        "delay": seconds(publication.delay),
        "expires_in": seconds(publication.expires_in),
        "idempotency_key": publication.idempotency_key,
        "retries": publication.retries,
        "acks_late": publication.acks_late,
        "durable": publication.durable,
        "stamps": _stamps(publication.stamps),
    }


_NO_STAMPS = Stamps()


def _stamps(stamps: Stamps) -> str | None:
    if stamps == _NO_STAMPS:
        return None
    values = {each.name: getattr(stamps, each.name) for each in dataclass_fields(stamps)}
    return storable_json({name: value for name, value in values.items() if value is not None})
