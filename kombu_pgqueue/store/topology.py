# SPDX-License-Identifier: BSD-3-Clause
"""What clients declare: exchanges, queues and bindings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from kombu_pgqueue.store.base import Row, StoreBase
from kombu_pgqueue.store.errors import store_errors


@dataclass(frozen=True)
class Exchange:
    """A declared exchange."""

    exchange_type: str
    durable: bool
    auto_delete: bool
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class Binding:
    """Messages of `exchange` with a matching `routing_key` go to `queue`."""

    exchange: str
    exchange_type: str
    routing_key: str
    queue: str


class TopologyVerbs(StoreBase):
    """Declare, bind, delete, purge, count."""

    def exchange_declare(
        self,
        name: str,
        type: str,
        durable: bool = True,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Declare it unless it exists; an existing one stays as it is."""
        self._count(
            "exchange_declare",
            {
                "name": name,
                "type": type,
                "durable": durable,
                "auto_delete": auto_delete,
                "arguments": json.dumps(dict(arguments or {})),
            },
        )

    def exchange_get(self, name: str) -> Exchange | None:
        """The declared exchange, None if there is none."""
        row = self._row("exchange_get", {"name": name})
        return Exchange(*row) if row else None

    def exchange_delete(self, name: str) -> None:
        """Forget it and its bindings."""
        self._count("exchange_delete", {"name": name})

    def queue_declare(
        self,
        name: str,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Declare it unless it exists; an existing one stays as it is."""
        self._count(
            "queue_declare",
            {
                "name": name,
                "durable": durable,
                "exclusive": exclusive,
                "auto_delete": auto_delete,
                "arguments": json.dumps(dict(arguments or {})),
            },
        )

    def queue_exists(self, name: str) -> bool:
        """Has it been declared?"""
        return bool(self._value("queue_exists", {"name": name}))

    def queue_delete(self, name: str) -> int:
        """Forget the queue, its bindings and its waiting messages; how many of those."""
        return self._messages("queue_delete", name)

    def queue_purge(self, name: str) -> int:
        """Drop the waiting messages, delayed ones too; how many."""
        return self._messages("queue_purge", name)

    def queue_size(self, name: str) -> int:
        """How many messages wait, delayed ones too."""
        return self._messages("queue_size", name)

    def bind(
        self,
        queue: str,
        exchange: str,
        routing_key: str,
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """Bind; both ends must have been declared."""
        self._count(
            "bind",
            {
                "queue": queue,
                "exchange": exchange,
                "routing_key": routing_key,
                "arguments": json.dumps(dict(arguments or {})),
            },
        )

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Undo a binding; one that is not there is no error."""
        self._count("unbind", {"queue": queue, "exchange": exchange, "routing_key": routing_key})

    def bindings(self, exchange: str | None = None) -> list[Binding]:
        """All bindings, or those of one exchange."""
        return [Binding(*row) for row in self._rows("bindings", {"exchange": exchange})]

    def _messages(self, query: str, name: str) -> int:
        # Unprepared: a plan made while the queue was empty would read the whole table later.
        with store_errors():
            row = self._send(query, {"name": name}, prepare=False).fetchone()
        return int(cast(Row, row)[0])
