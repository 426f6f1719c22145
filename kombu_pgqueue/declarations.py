# SPDX-License-Identifier: BSD-3-Clause
"""The half of a channel that declares, binds, purges and deletes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn
from uuid import uuid4

from amqp.exceptions import NotFound, PreconditionFailed
from amqp.protocol import queue_declare_ok_t
from kombu.transport.base import to_rabbitmq_queue_arguments

if TYPE_CHECKING:
    from kombu_pgqueue.transport import Transport


class Declarations:
    """AMQP's exchange and queue methods. Nothing here uses a connection of the caller's."""

    _transport: Transport

    def _check_open(self) -> None:
        raise NotImplementedError

    def _settled(self) -> None:
        raise NotImplementedError

    def exchange_declare(
        self,
        exchange: str | None = None,
        type: str = "direct",
        durable: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
        nowait: bool = False,
        passive: bool = False,
    ) -> None:
        """Raises `NotFound` if `passive` and missing, `PreconditionFailed` if of another type."""
        self._check_open()
        name = exchange or f"amq.{type or 'direct'}"
        if not passive:
            self._transport.topology.declare_exchange(
                name,
                type or "direct",
                durable=bool(durable),
                auto_delete=bool(auto_delete),
                arguments=arguments or {},
            )
        elif not self._transport.topology.exchange_exists(name):
            raise NotFound(f"NOT_FOUND - no exchange {name!r}", (40, 10), "Exchange.declare")

    def exchange_delete(self, exchange: str, if_unused: bool = False, nowait: bool = False) -> None:
        """Forget an exchange and its bindings."""
        self._check_open()
        if if_unused and self._transport.topology.exchange_in_use(exchange):
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - exchange {exchange!r} in use", (40, 20), "Exchange.delete"
            )
        self._transport.topology.delete_exchange(exchange)

    def exchange_bind(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("pgqueue does not bind exchanges to exchanges")

    exchange_unbind = exchange_bind

    def prepare_queue_arguments(self, arguments: Any, **kwargs: Any) -> Any:
        """Keep expiry, lengths and TTL, which kombu's own version drops."""
        return to_rabbitmq_queue_arguments(arguments, **kwargs)

    def queue_declare(
        self,
        queue: str | None = None,
        passive: bool = False,
        durable: bool = False,
        exclusive: bool = False,
        auto_delete: bool = False,
        arguments: Mapping[str, Any] | None = None,
        nowait: bool = False,
        **kwargs: Any,
    ) -> queue_declare_ok_t:
        """Messages are counted for a passive declaration only: counting is not for free."""
        self._check_open()
        name = queue or f"amq.gen-{uuid4()}"
        size = 0
        if passive:
            if not self._transport.topology.queue_exists(name):
                raise NotFound(f"NOT_FOUND - no queue {name!r}", (50, 10), "Queue.declare")
            self._settled()
            size = self._transport.topology.queue_size(name)
        else:
            self._transport.topology.declare_queue(
                name,
                durable=bool(durable),
                exclusive=bool(exclusive),
                auto_delete=bool(auto_delete),
                arguments=arguments or {},
            )
            if exclusive or (auto_delete and not durable):
                self._transport.keep_temporary(name, exclusive=bool(exclusive))
        return queue_declare_ok_t(name, size, self._transport.consumers_on(name))

    def queue_bind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Raises `NotFound` unless both have been declared."""
        self._check_open()
        if exchange:  # every queue is bound to the default exchange by its name
            self._transport.topology.bind(queue, exchange, routing_key or "", arguments or {})

    def queue_unbind(
        self,
        queue: str,
        exchange: str | None = None,
        routing_key: str = "",
        arguments: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._check_open()
        self._transport.topology.unbind(queue, exchange or "", routing_key or "")

    def queue_purge(self, queue: str, **kwargs: Any) -> int:
        """Drop the waiting messages, delayed ones too; how many."""
        self._check_open()
        self._settled()
        return self._transport.topology.purge(queue)

    def queue_delete(
        self, queue: str, if_unused: bool = False, if_empty: bool = False, **kwargs: Any
    ) -> int:
        """Forget a queue and its waiting messages; how many of those."""
        self._check_open()
        self._settled()
        if if_unused and self._transport.consumers_on(queue):
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - queue {queue!r} in use", (50, 40), "Queue.delete"
            )
        if if_empty and self._transport.topology.queue_size(queue):
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - queue {queue!r} not empty", (50, 40), "Queue.delete"
            )
        return self._transport.topology.delete_queue(queue)

    def after_reply_message_received(self, queue: str) -> None:
        """A reply queue has served its purpose."""
        self.queue_delete(queue)

    def list_bindings(self) -> list[tuple[str, str, str]]:
        """`(queue, exchange, routing key)` of every binding in the database."""
        return [
            (b.queue, b.exchange, b.routing_key) for b in self._transport.topology.all_bindings()
        ]
