# SPDX-License-Identifier: BSD-3-Clause
"""kombu's Channel: AMQP's words as operations on the queue."""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from uuid import uuid4

from amqp.exceptions import RecoverableConnectionError
from kombu.transport.base import StdChannel

from kombu_pgqueue.batch import PublishBatch
from kombu_pgqueue.declarations import Declarations
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.mailbox import Delivery
from kombu_pgqueue.message import Message
from kombu_pgqueue.process import session_for
from kombu_pgqueue.publishing import Prepared, prepare, publications
from kombu_pgqueue.session import Session
from kombu_pgqueue.verdicts import Release, Succeed
from kombu_pgqueue.window import Window

if TYPE_CHECKING:
    from kombu_pgqueue.transport import Transport

logger = logging.getLogger(__name__)

#: How long a synchronous call waits for the verdicts given before it, and for its own answer.
PATIENCE = 10.0
#: How long closing waits for them.
FAREWELL = 1.0

_numbers = count(1)


class Consumer(NamedTuple):
    """One `basic_consume`."""

    queue: str
    no_ack: bool
    callback: Callable[[Message], Any]
    window: Window


class QoS:
    """What kombu and Celery look at of a channel's prefetch window."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.prefetch_count = 0

    def can_consume(self) -> bool:
        """Is a place free?"""
        window = self._channel.window
        return not self.prefetch_count or window is None or window.taken < self.prefetch_count


class Channel(Declarations, StdChannel):
    """Consumers that share one prefetch window, and everything else AMQP does on a channel."""

    #: kombu may publish through `create_publish_batch`.
    supports_batch_publish = True

    def __init__(self, connection: Transport) -> None:
        # kombu asks a channel for `connection.client`; None says that the channel is closed.
        self.connection: Transport | None = connection
        self._transport = connection
        self._options = connection.options
        self.channel_id = next(_numbers)
        self.closed = False
        self._abandoned = False
        self.qos = QoS(self)
        self.no_ack_consumers: set[str] = set()  # type: ignore[assignment]
        self._consumers: dict[str, Consumer] = {}
        self._unacked: dict[str, Hold] = {}
        # Not asked for before something is consumed: publishers need no session.
        self._session: Session | None = None
        self.window: Window | None = None
        self._free_window: Window | None = None

    @property
    def session(self) -> Session:
        """The session this channel consumes through; the same for as long as the channel lives."""
        if self._session is None:
            self._session = session_for(self._options)
        return self._session

    def prepare_message(
        self,
        body: Any,
        priority: int | None = None,
        content_type: str | None = None,
        content_encoding: str | None = None,
        headers: dict[str, Any] | None = None,
        properties: dict[str, Any] | None = None,
    ) -> Prepared:
        """What `basic_publish` takes."""
        return prepare(body, priority, content_type, content_encoding, headers, properties)

    def basic_publish(
        self, message: Prepared, exchange: str = "", routing_key: str = "", **kwargs: Any
    ) -> None:
        """Returns once the message is committed. Raises `StoreUnavailable`, `StoreError`."""
        self._check_open()
        found = publications(
            message, exchange, routing_key, self._transport.topology, self._options
        )
        self._transport.publisher.publish(found)
        message.published()

    def create_publish_batch(self, max_size: int) -> PublishBatch:
        """kombu's `Producer.batch()`: one transaction for many messages."""
        return PublishBatch(self, max_size)

    def basic_qos(
        self, prefetch_size: int = 0, prefetch_count: int = 0, apply_global: bool = False
    ) -> None:
        """How many messages may be unacknowledged; 0: any number."""
        self.qos.prefetch_count = prefetch_count or 0
        if self.window is not None:
            self.window.prefetch = self.qos.prefetch_count
            self.session.bell.ring()

    def basic_consume(
        self,
        queue: str,
        no_ack: bool = False,
        callback: Callable[[Message], Any] | None = None,
        consumer_tag: str = "",
        **kwargs: Any,
    ) -> str:
        """Have messages of `queue` given to `callback`; the consumer's tag."""
        self._check_open()
        tag = consumer_tag or f"ctag-{uuid4()}"
        window = self._window(no_ack=bool(no_ack))
        self._consumers[tag] = Consumer(queue, bool(no_ack), callback or _ignore, window)
        if no_ack:
            self.no_ack_consumers.add(tag)
        self._transport.consumers[tag] = self
        self.session.subscribe(window, tag, queue)
        return tag

    def _window(self, *, no_ack: bool) -> Window:
        mailbox = self._transport.mailbox
        if no_ack:
            if self._free_window is None:
                self._free_window = self.session.open_window(mailbox, unlimited=True, prefetch=0)
            return self._free_window
        if self.window is None:
            self.window = self.session.open_window(
                mailbox, unlimited=False, prefetch=self.qos.prefetch_count
            )
        return self.window

    def basic_cancel(self, consumer_tag: str, **kwargs: Any) -> None:
        """End a consumer; what it was not given yet goes back at once."""
        consumer = self._consumers.pop(consumer_tag, None)
        if consumer is None:
            return
        self.no_ack_consumers.discard(consumer_tag)
        self._transport.consumers.pop(consumer_tag, None)
        self.session.unsubscribe(consumer.window, consumer_tag)
        if not self._abandoned:
            self._transport.drop_if_temporary(consumer.queue)

    def deliver(self, delivery: Delivery) -> None:
        """Give a job to its consumer."""
        consumer = self._consumers.get(delivery.tag)
        if consumer is None:
            delivery.hold.give_back()
            return
        message = self._message(delivery.hold, delivery.tag, no_ack=consumer.no_ack)
        if not self.qos.prefetch_count:
            self.session.bell.ring()  # room in the mailbox, with no acknowledgement to say so
        if message is not None:
            consumer.callback(message)

    def _message(self, hold: Hold, tag: str | None, *, no_ack: bool) -> Message | None:
        try:
            message = Message(hold, self, tag)
        except ValueError as exc:
            # Nothing can be made of it: it must neither stop the consumer nor come again.
            logger.error("Job %s: %s", hold.lease.job_id, exc)
            hold.malformed = str(exc)
            hold.reject(requeue=False)
            return None
        if no_ack:
            hold.finish(Succeed())
        else:
            self._unacked[message.delivery_tag] = hold
            if len(self._unacked) > 64:
                self._forget_settled()
        return message

    def _forget_settled(self) -> None:
        """Verdicts may have been given past the channel; keep the table as short as the window."""
        settled = [tag for tag, hold in list(self._unacked.items()) if not hold.open]
        for tag in settled:
            self._unacked.pop(tag, None)

    def basic_get(self, queue: str, no_ack: bool = False, **kwargs: Any) -> Message | None:
        """One message, if there is one."""
        self._check_open()
        self._settled()
        hold = self.session.get(self._window(no_ack=no_ack), queue, PATIENCE)
        return None if hold is None else self._message(hold, None, no_ack=no_ack)

    def message_to_python(self, raw_message: Any) -> Any:
        """Messages are made before they are delivered."""
        return raw_message

    def acknowledged(self, hold: Hold, *, multiple: bool) -> None:
        """A message was acknowledged; with `multiple` all that were delivered before it too."""
        if multiple:
            tag = str(hold.lease.lease_token)
            for earlier in list(self._unacked):
                if earlier == tag:
                    break
                self.basic_ack(earlier)
        self._unacked.pop(str(hold.lease.lease_token), None)
        hold.acknowledge()

    def basic_ack(self, delivery_tag: str, multiple: bool = False) -> None:
        """From any thread, also after the channel was closed."""
        hold = self._unacked.get(delivery_tag)
        if hold is not None:
            self.acknowledged(hold, multiple=multiple)

    def basic_reject(self, delivery_tag: str, requeue: bool = False) -> None:
        """From any thread, also after the channel was closed."""
        hold = self._unacked.pop(delivery_tag, None)
        if hold is not None:
            hold.reject(requeue=requeue)

    def basic_recover(self, requeue: bool = False) -> None:
        """Deliver everything again that was delivered here and not acknowledged."""
        for tag in list(self._unacked):
            hold = self._unacked.pop(tag, None)
            if hold is not None:
                hold.finish(Release(requeue=True))

    def flow(self, active: bool = True) -> NoReturn:
        raise NotImplementedError("pgqueue has no channel flow")

    def consumes(self, queue: str) -> int:
        """How many consumers of `queue` are here."""
        return sum(consumer.queue == queue for consumer in self._consumers.values())

    def connection_or_error(self) -> Transport:
        """The transport while the channel is open. Raises `RecoverableConnectionError`."""
        self._check_open()
        return self._transport

    def _settled(self) -> None:
        """AMQP keeps the order of a channel: what was acknowledged before is done before."""
        if self._session is not None:
            self._session.flush(PATIENCE)

    def _check_open(self) -> None:
        if self.closed:
            raise RecoverableConnectionError("the channel is closed")

    def abandon(self) -> None:
        """Close without a word to the database: it is gone, or all this is a parent process's."""
        self._abandoned = True
        self.close()

    def close(self) -> None:
        """End the consumers. What they were given stays theirs until they settle or forget it."""
        if self.closed:
            return
        self.closed = True
        for tag in list(self._consumers):
            self.basic_cancel(tag)
        for window in (self.window, self._free_window):
            if window is not None:
                self.session.close_window(window)
        if self._session is not None and not self._abandoned:
            self._session.flush(FAREWELL)
        self._transport.forget(self)
        self.connection = None


def _ignore(message: Message) -> None:
    """A consumer without a callback."""
