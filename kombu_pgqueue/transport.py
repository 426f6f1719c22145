# SPDX-License-Identifier: BSD-3-Clause
"""kombu's Transport: URL and errors, connecting, the event loop, forks."""

from __future__ import annotations

import time
from functools import cached_property
from types import MethodType
from typing import Any

import psycopg
from amqp.exceptions import ChannelError, ConnectionError, RecoverableConnectionError
from kombu.transport import base

from kombu_pgqueue.channel import Channel
from kombu_pgqueue.errors import StoreError, StoreUnavailable
from kombu_pgqueue.mailbox import Mailbox
from kombu_pgqueue.native import wait_readable
from kombu_pgqueue.options import Options, parse_url
from kombu_pgqueue.process import publisher_for, topology_for
from kombu_pgqueue.publisher import Publisher
from kombu_pgqueue.switching import switch
from kombu_pgqueue.topology import Topology
from kombu_pgqueue.url import EMBEDDED_SCHEME, SCHEME, SafeUrl, reveal, safe_uri, url_of_parts


class Management(base.Management):
    """What kombu's management API offers of a broker."""

    def get_bindings(self) -> list[dict[str, str]]:
        with self.transport.client.channel() as channel:
            return [
                {"destination": queue, "source": exchange, "routing_key": routing_key}
                for queue, exchange, routing_key in channel.list_bindings()
            ]


class Transport(base.Transport):
    """PostgreSQL as a broker. Also plays the connection, as kombu's virtual transports do.

    A transport holds no session: publishing and consuming sessions belong to the process.
    """

    #: The kombu.Connection this belongs to.
    client: Any
    Management = Management
    scheme = SCHEME
    can_parse_url = True
    default_port = 5432  # type: ignore[assignment]
    driver_type = "pgqueue"
    driver_name = "psycopg"

    connection_errors = (  # type: ignore[assignment]
        StoreUnavailable,
        psycopg.OperationalError,
        psycopg.InterfaceError,
        ConnectionError,
    )
    channel_errors = (StoreError, ChannelError)  # type: ignore[assignment]
    recoverable_connection_errors = (
        StoreUnavailable,
        psycopg.OperationalError,
        psycopg.InterfaceError,
        RecoverableConnectionError,
    )
    #: What the database refuses once it refuses again.
    recoverable_channel_errors = ()

    implements = base.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
        heartbeats=False,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)  # type: ignore[no-untyped-call]
        self.channels: list[Channel] = []
        #: Consumer tag -> its channel, for all channels of this connection.
        self.consumers: dict[str, Channel] = {}
        self.connected = False
        self._temporary: set[str] = set()
        # From here on kombu shows the URL without its passwords, `Connection.info()` included.
        client.hostname = self._url = SafeUrl(_url_of(client, self.scheme))
        client.alt[:] = [SafeUrl(url) if isinstance(url, str) else url for url in client.alt]
        client.switch = MethodType(switch, client)

    @cached_property
    def options(self) -> Options:
        """Raises `ConfigurationError`."""
        return parse_url(
            self._url.real,
            self.client.transport_options,
            connect_timeout=self.client.connect_timeout,
        )

    @cached_property
    def mailbox(self) -> Mailbox:
        return Mailbox()

    @property
    def publisher(self) -> Publisher:
        return publisher_for(self.options)

    @property
    def topology(self) -> Topology:
        return topology_for(self.options)

    def driver_version(self) -> str:
        return psycopg.__version__

    def establish_connection(self) -> Transport:
        """Raises `StoreUnavailable` for a server that cannot be reached, and says why it cannot."""
        self.publisher.ping()
        self.connected = True
        return self

    def verify_connection(self, connection: Transport) -> bool:
        return connection.connected

    def create_channel(self, connection: Transport) -> Channel:
        channel = Channel(connection)
        self.channels.append(channel)
        return channel

    def close_channel(self, channel: Channel) -> None:
        channel.close()

    def forget(self, channel: Channel) -> None:
        """A channel was closed."""
        if channel in self.channels:
            self.channels.remove(channel)

    def close_connection(self, connection: Transport) -> None:
        for channel in list(self.channels):
            channel.close()
        self.connected = False
        if "mailbox" in self.__dict__:
            del self.__dict__["mailbox"]

    def _collect(self, connection: Transport | None) -> None:
        """After a connection error or a fork: let go without asking the database anything."""
        if connection is not None:
            for channel in list(connection.channels):
                channel.abandon()
            connection.close_connection(connection)

    def keep_temporary(self, queue: str, *, exclusive: bool) -> None:
        """A queue that must not outlive its consumers here.

        What another connection left in an exclusive queue was not meant for this one: a worker must
        not find the shutdown command that its predecessor of the same name did not live to see.
        """
        if queue not in self._temporary:
            self._temporary.add(queue)
            if exclusive:
                self.topology.purge(queue)

    def drop_if_temporary(self, queue: str) -> None:
        """A consumer of the queue has ended."""
        if queue in self._temporary and not self.consumers_on(queue):
            self._temporary.discard(queue)
            self.topology.delete_queue(queue)

    def consumers_on(self, queue: str) -> int:
        """Consumers of a queue on this connection."""
        return sum(channel.consumes(queue) for channel in self.channels)

    # Receiving

    def drain_events(self, connection: Transport, timeout: float | None = None, **_: Any) -> None:
        """Deliver one message. Raises `socket.timeout` if none comes within `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._deliver_one():
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError("timed out")
            wait_readable([self.mailbox.bell.fileno()], left, native=False)

    def _deliver_one(self) -> bool:
        delivery = self.mailbox.get()
        if delivery is None:
            return False
        channel = self.consumers.get(delivery.tag)
        if channel is None:
            delivery.hold.give_back()
        else:
            channel.deliver(delivery)
        return True

    def register_with_event_loop(self, connection: Transport, loop: Any) -> None:
        # Kept, for closing empties `mailbox`, and the loop must be told which descriptor goes.
        loop.add_reader(self.mailbox.bell.fileno(), self.on_readable, connection, loop)

    def unregister_from_event_loop(self, connection: Transport, loop: Any) -> None:
        loop.remove_reader(self.mailbox.bell.fileno())

    def on_readable(self, connection: Transport, loop: Any) -> None:
        """One message in each turn of the loop: acknowledgements and signals need theirs too."""
        self._deliver_one()

    # The URL

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        return reveal(uri) if include_password else safe_uri(reveal(uri), mask)

    @property
    def default_connection_params(self) -> dict[str, Any]:
        return {"hostname": f"{self.scheme}://localhost/"}

    def qos_semantics_matches_spec(self, connection: Transport) -> bool:
        return True


class EmbeddedTransport(Transport):
    """The same on a server that starts on first use and stops with its last user."""

    scheme = EMBEDDED_SCHEME


def _url_of(client: Any, scheme: str) -> str:
    """The URL of a connection, also where kombu has taken one apart or never had one."""
    hostname = client.hostname
    if isinstance(hostname, str) and "://" in hostname:
        return reveal(hostname)
    password = client.password() if callable(client.password) else client.password
    return url_of_parts(
        scheme,
        host=hostname,
        port=client.port,
        user=client.userid,
        password=password,
        database=client.virtual_host,
    )
