# SPDX-License-Identifier: BSD-3-Clause
"""kombu's publish batches: messages are gathered and committed together."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu_pgqueue.publishing import Prepared, publications
from kombu_pgqueue.values import Publication

if TYPE_CHECKING:
    from kombu_pgqueue.channel import Channel


class PublishBatch:
    """What `Producer.batch()` publishes through. Each flush is one transaction: all or none."""

    def __init__(self, channel: Channel, max_size: int) -> None:
        self.channel = channel
        self._max_size = max_size
        self._waiting: list[Publication] = []

    def publish(
        self, message: Prepared, exchange: str = "", routing_key: str = "", **kwargs: Any
    ) -> None:
        """Take a message; flushes when the batch is full."""
        transport = self.channel.connection_or_error()
        self._waiting += publications(
            message, exchange, routing_key, transport.topology, transport.options
        )
        # Its ids are in the batch now, and a flush that is repeated repeats them.
        message.published()
        if len(self._waiting) >= self._max_size:
            self.flush()

    def flush(self) -> None:
        """Commit what was gathered. Raises `StoreUnavailable`, `StoreError`; all is kept then."""
        self.channel.connection_or_error().publisher.publish(self._waiting)
        self._waiting = []

    def discard(self) -> None:
        """Forget what was not flushed."""
        self._waiting = []

    def close(self) -> None:
        self.discard()
