# SPDX-License-Identifier: BSD-3-Clause
"""Exchanges, queues and bindings: declared in the database, so that they hold across processes.

Everything here runs on the publisher's own connections, never in a transaction of the caller's.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from amqp.exceptions import NotFound, PreconditionFailed

from kombu_pgqueue.publisher import Publisher
from kombu_pgqueue.store import Binding, JobStore

#: How long the bindings of an exchange are believed, in seconds.
BELIEVED = 1.0
#: A message that nothing takes makes us look again, but not more often than this.
DISBELIEVED = 0.05

#: `(routing key of the binding, routing key of the message)` -> does it match?
Match = Callable[[str, str], bool]


def _direct(bound: str, routing_key: str) -> bool:
    return bound == routing_key


def _fanout(bound: str, routing_key: str) -> bool:
    return True


def _topic(bound: str, routing_key: str) -> bool:
    return _pattern(bound).fullmatch(routing_key) is not None


@lru_cache(maxsize=1024)
def _pattern(bound: str) -> re.Pattern[str]:
    """AMQP's patterns: `*` is one word, `#` any number of words, none included."""
    regex = ""
    words = bound.split(".")
    for place, word in enumerate(words):
        if word == "#":
            # The dot goes with the words: "a.#" takes "a" too.
            regex += (
                ".*" if len(words) == 1 else (r"(?:[^.]+\.)*" if place == 0 else r"(?:\.[^.]+)*")
            )
        else:
            needs_dot = place > 0 and not (place == 1 and words[0] == "#")
            regex += r"\." if needs_dot else ""
            regex += "[^.]+" if word == "*" else re.escape(word)
    return re.compile(regex, re.DOTALL)


MATCHES: dict[str, Match] = {"direct": _direct, "fanout": _fanout, "topic": _topic}


@dataclass
class _Known:
    bindings: list[Binding]
    since: float
    exists: bool


class Topology:
    """One database's exchanges, queues and bindings."""

    def __init__(self, publisher: Publisher) -> None:
        self._run = publisher.run
        self._known: dict[str, _Known] = {}

    def route(self, exchange: str, routing_key: str) -> list[str]:
        """The queues that a message goes into; none if nothing takes it.

        Raises `NotFound` for an exchange that nobody declared.
        """
        if not exchange:
            return [routing_key] if routing_key else []
        queues = self._match(self._look(exchange, BELIEVED), routing_key)
        if queues:
            return queues
        known = self._look(exchange, DISBELIEVED)
        if not known.exists:
            raise NotFound(f"NOT_FOUND - no exchange {exchange!r}", (60, 40), "Basic.publish")
        return self._match(known, routing_key)

    @staticmethod
    def _match(known: _Known, routing_key: str) -> list[str]:
        taken = (
            binding.queue
            for binding in known.bindings
            if MATCHES.get(binding.exchange_type, _direct)(binding.routing_key, routing_key)
        )
        return list(dict.fromkeys(taken))

    def _look(self, exchange: str, believed: float) -> _Known:
        known = self._known.get(exchange)
        now = time.monotonic()
        if known is None or now - known.since > believed:

            def work(store: JobStore) -> _Known:
                bindings = store.bindings(exchange)
                return _Known(
                    bindings, now, bool(bindings) or store.exchange_get(exchange) is not None
                )

            known = self._known[exchange] = self._run(work)
        return known

    def declare_exchange(
        self,
        name: str,
        type: str,
        *,
        durable: bool,
        auto_delete: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        """Raises `PreconditionFailed` if it exists with another type."""
        if type not in MATCHES:
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - exchange type {type!r} is not supported; "
                f"known are: {', '.join(MATCHES)}",
                (40, 10),
                "Exchange.declare",
            )

        def work(store: JobStore) -> str:
            store.exchange_declare(name, type, durable, auto_delete, arguments)
            found = store.exchange_get(name)
            return found.exchange_type if found else type

        found = self._run(work)
        if found != type:
            raise PreconditionFailed(
                f"PRECONDITION_FAILED - exchange {name!r} is of type {found!r}, not {type!r}",
                (40, 10),
                "Exchange.declare",
            )
        self._known.pop(name, None)

    def exchange_exists(self, name: str) -> bool:
        return self._run(lambda store: store.exchange_get(name)) is not None

    def delete_exchange(self, name: str) -> None:
        self._run(lambda store: store.exchange_delete(name))
        self._known.pop(name, None)

    def exchange_in_use(self, name: str) -> bool:
        return bool(self._run(lambda store: store.bindings(name)))

    def declare_queue(
        self,
        name: str,
        *,
        durable: bool,
        exclusive: bool,
        auto_delete: bool,
        arguments: Mapping[str, Any],
    ) -> None:
        self._run(
            lambda store: store.queue_declare(name, durable, exclusive, auto_delete, arguments)
        )

    def queue_exists(self, name: str) -> bool:
        return self._run(lambda store: store.queue_exists(name))

    def queue_size(self, name: str) -> int:
        return self._run(lambda store: store.queue_size(name))

    def purge(self, name: str) -> int:
        return self._run(lambda store: store.queue_purge(name))

    def delete_queue(self, name: str) -> int:
        self._known.clear()
        return self._run(lambda store: store.queue_delete(name))

    def bind(
        self, queue: str, exchange: str, routing_key: str, arguments: Mapping[str, Any]
    ) -> None:
        """Raises `NotFound` unless both were declared."""

        def work(store: JobStore) -> str | None:
            if store.exchange_get(exchange) is None:
                return f"no exchange {exchange!r}"
            if not store.queue_exists(queue):
                return f"no queue {queue!r}"
            store.bind(queue, exchange, routing_key, arguments)
            return None

        missing = self._run(work)
        if missing:
            raise NotFound(f"NOT_FOUND - {missing}", (50, 20), "Queue.bind")
        self._known.pop(exchange, None)

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        self._run(lambda store: store.unbind(queue, exchange, routing_key))
        self._known.pop(exchange, None)

    def all_bindings(self) -> Iterable[Binding]:
        return self._run(lambda store: store.bindings())
