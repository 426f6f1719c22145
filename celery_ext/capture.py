# SPDX-License-Identifier: BSD-3-Clause
"""A retry's message, caught on its way out.

Celery's `retry()` publishes the task again and lets the old message be acknowledged. Here the
publishing runs as Celery wrote it, an overridden `apply_async` and the publish signals included,
but ends in a producer that keeps the message. The worker writes it on the job's row as one update.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

from celery.exceptions import Retry
from kombu.entity import Exchange
from kombu.exceptions import OperationalError
from kombu.messaging import Producer

from celery_ext.waiting import seconds_until


@dataclass(frozen=True)
class CapturedRetry:
    """What `self.retry(...)` would have published.

    `queue` None: the queue the message came from. `delay` is seconds from now. The other fields
    are those of a kombu message, `body` raw as it would have gone out.
    """

    queue: str | None
    exchange: str
    routing_key: str
    body: bytes
    content_type: str
    content_encoding: str
    headers: Mapping[str, Any]
    properties: Mapping[str, Any]
    delay: float
    retries: int
    expires: str | None


class JobRetry(Retry):
    """A retry that has not been published: the worker turns `job` into an update of the row."""

    def __init__(
        self,
        message: str | None = None,
        exc: BaseException | str | None = None,
        when: Any = None,
        job: CapturedRetry | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(message, exc, when, **kwargs)
        self.job = job

    def __reduce__(self) -> tuple[Any, ...]:
        # Retry's own drops what it does not know, and the text of an error it cannot pickle.
        return type(self), (self.message, self.exc or self.excs, self.when, self.job)

    @classmethod
    def of(cls, retry: Retry, job: CapturedRetry) -> JobRetry:
        """`retry` with the message it would have published."""
        return cls(retry.message, retry.exc or retry.excs, retry.when, job, sig=retry.sig)


_active: ContextVar[Capture | None] = ContextVar("celery_ext_capture", default=None)


class Capture:
    """One `retry()` call. `job` is its message; None if it was published after all, or never."""

    def __init__(
        self, app: Any, request: Any, on_captured: Callable[[CapturedRetry], None] | None = None
    ) -> None:
        self.app = app
        self.request = request
        self.job: CapturedRetry | None = None
        self.published = False
        self.began = app.now()
        self._on_captured = on_captured
        self._publication: tuple[Any, dict[str, Any]] | None = None
        self._producer: CapturingProducer | None = None

    @contextmanager
    def __call__(self) -> Iterator[Capture]:
        """Within this context the task's own retry is caught."""
        token = _active.set(self)
        try:
            yield self
        finally:
            _active.reset(token)
            if self._producer is not None:
                self._producer.__connection__.release()

    @property
    def producer(self) -> CapturingProducer:
        """What the retry is published with."""
        if self._producer is None:
            self._producer = CapturingProducer(self)
        return self._producer

    @property
    def done(self) -> bool:
        """Has the retry's message been seen?"""
        return self.published or self.job is not None

    def keep(self, job: CapturedRetry, body: Any, options: dict[str, Any]) -> None:
        """Take the message; `body` and `options` could still publish it for real."""
        self.job = job
        self._publication = body, options
        if self._on_captured is not None:
            self._on_captured(job)

    def with_delay(self, when: Any) -> CapturedRetry | None:
        """The message, its delay exactly `when` if that is the countdown it was made from.

        The message carries only a point in time, which has lost the time the call took.
        """
        job = self.job
        if job is None or isinstance(when, bool) or not isinstance(when, (int, float)):
            return job
        took = (self.app.now() - self.began).total_seconds()
        if job.delay - 0.001 <= when <= job.delay + took + 0.001:
            return replace(job, delay=max(float(when), 0.0))
        return job

    def publish(self) -> None:
        """Send the caught message the usual way, because the task hid its `Retry`."""
        if self._publication is None or self.published:
            return
        body, options = self._publication
        self.published = True
        publish_for_real(self.app, body, **options)


def inject_producer(options: dict[str, Any], request: Any) -> None:
    """Let the options of a retry's signature lead to the capture that is active, if any."""
    capture = _active.get()
    if capture is None or capture.done or capture.request is not request:
        return
    if options.get("connection") is None:
        options.setdefault("producer", capture.producer)


def publish_for_real(app: Any, body: Any, *args: Any, **options: Any) -> Any:
    """Publish on a connection from the app's pool."""
    with app.amqp.producer_pool.acquire(block=True) as producer:
        return producer.publish(body, *args, **options)


class CapturingProducer(Producer):
    """Keeps the one message its capture waits for and passes on all others. Opens no connection."""

    def __init__(self, capture: Capture) -> None:
        super().__init__(None, auto_declare=False)  # type: ignore[no-untyped-call]
        self._capture = capture
        self._options: dict[str, Any] = {}
        self._body: Any = None
        self._queue: str | None = None
        # Celery asks it for its error classes; it is never connected.
        self.__connection__: Any = capture.app.connection_for_write()

    @property
    def channel(self) -> Any:
        """Asked for only by the rpc result backend, and only where waiting is no deadlock."""
        return self.__connection__.default_channel

    @property
    def passed_on(self) -> bool:
        """Did the retry go out as a message of its own?"""
        return self._capture.published

    def publish(self, body: Any, *args: Any, **options: Any) -> Any:
        capture = self._capture
        if capture.done or args or not _is_for(capture.request, body, options):
            return publish_for_real(capture.app, body, *args, **options)
        queues = self._destinations(options)
        if len(queues) != 1:
            capture.published = True
            return publish_for_real(capture.app, body, **options)
        self._options = dict(options)
        self._queue = queues[0]
        # kombu's own preparation, short of the connection: it ends in _publish below.
        options = {**options, "retry": False, "declare": None}
        return super().publish(body, **options)  # type: ignore[no-untyped-call]

    def _publish(
        self,
        body: bytes,
        priority: int,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        exchange: str,
        *_: Any,
        **__: Any,
    ) -> None:
        fields = _fields(headers, self._body)
        properties.setdefault("priority", priority)
        job = CapturedRetry(
            queue=self._queue,
            exchange=exchange,
            routing_key=routing_key,
            body=body.encode() if isinstance(body, str) else bytes(body),
            content_type=content_type,
            content_encoding=content_encoding,
            headers=headers,
            properties=properties,
            delay=seconds_until(fields.get("eta"), self._capture.app) or 0.0,
            retries=int(fields.get("retries") or 0),
            expires=fields.get("expires"),
        )
        self._capture.keep(job, self._body, self._options)

    def _prepare(self, body: Any, *args: Any, **kwargs: Any) -> Any:
        self._body = body
        return super()._prepare(body, *args, **kwargs)  # type: ignore[no-untyped-call]

    def _destinations(self, options: Mapping[str, Any]) -> list[str | None]:
        exchange = options.get("exchange")
        name = exchange.name if isinstance(exchange, Exchange) else exchange or ""
        routing_key = options.get("routing_key") or ""
        if not name:
            return [routing_key]
        try:
            if options.get("declare"):
                with self._capture.app.amqp.producer_pool.acquire(block=True) as producer:
                    for entity in options["declare"]:
                        producer.maybe_declare(entity)
            return list(self.__connection__.transport.topology.route(name, routing_key))
        except (*self.__connection__.connection_errors, OperationalError):
            origin = self._capture.request.delivery_info or {}
            if (name, routing_key) != (origin.get("exchange"), origin.get("routing_key")):
                raise
            # Where it came from is known without asking: no need to lose the retry over this.
            return [None]


def _fields(headers: Mapping[str, Any], body: Any) -> Mapping[str, Any]:
    # Message protocol 2 keeps the task's fields in the headers, protocol 1 in the body.
    return headers if "task" in headers or not isinstance(body, Mapping) else body


def _is_for(request: Any, body: Any, options: Mapping[str, Any]) -> bool:
    fields = _fields(options.get("headers") or {}, body)
    return "task" in fields and fields.get("id") == request.id
