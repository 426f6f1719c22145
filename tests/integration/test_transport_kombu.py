# SPDX-License-Identifier: BSD-3-Clause
"""The transport as kombu programs use it, on a real database."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from amqp.exceptions import ChannelError, NotFound, PreconditionFailed
from kombu import Connection, Consumer, Exchange, Producer, Queue
from kombu.exceptions import OperationalError

from kombu_pgqueue import process
from kombu_pgqueue.errors import ConfigurationError, StoreUnavailable
from kombu_pgqueue.store import JobStore
from tests.support.wait import wait_until

QUEUE = Queue("work", Exchange("work"), "work")


@pytest.fixture(autouse=True)
def _no_sessions_left(conninfo: str) -> Iterator[None]:
    yield
    process.close_all()


@pytest.fixture
def broker(dsn: str) -> Iterator[Connection]:
    with Connection(dsn) as connection:
        yield connection


def send(broker: Connection, *bodies: Any, **options: Any) -> None:
    producer = broker.Producer(serializer="json")
    for body in bodies:
        producer.publish(body, **({"routing_key": "work", "declare": [QUEUE]} | options))


class Inbox:
    """A consumer that keeps what it gets."""

    def __init__(self, broker: Connection, queue: Queue = QUEUE, **options: Any) -> None:
        self.broker = broker
        self.messages: list[Any] = []
        self.channel = broker.channel()
        prefetch = options.pop("prefetch_count", None)
        self.consumer = Consumer(
            self.channel,
            [queue],
            on_message=self.messages.append,
            prefetch_count=prefetch,
            **options,
        )
        self.consumer.consume()

    def drain(self, count: int, timeout: float = 10) -> list[Any]:
        while len(self.messages) < count:
            self.broker.drain_events(timeout=timeout)
        return [message.payload for message in self.messages]

    def silent(self, timeout: float = 0.3) -> bool:
        with pytest.raises(socket.timeout):
            self.broker.drain_events(timeout=timeout)
        return True


def leased(connection: psycopg.Connection) -> int:
    row = connection.execute(
        "SELECT count(*) FROM pgqueue.job_queue WHERE status = 'leased'"
    ).fetchone()
    return row[0]


def rows(connection: psycopg.Connection) -> int:
    return connection.execute("SELECT count(*) FROM pgqueue.job_queue").fetchone()[0]


def test_publish_consume_ack(broker: Connection, connection: psycopg.Connection) -> None:  # T-4
    send(broker, {"a": 1}, {"b": "é\0"})
    inbox = Inbox(broker)
    assert inbox.drain(2) == [{"a": 1}, {"b": "é\0"}]
    assert leased(connection) == 2
    for message in inbox.messages:
        message.ack()
    inbox.channel.close()
    assert rows(connection) == 0


def test_through_a_direct_exchange_from_another_process_view(dsn: str, broker: Connection) -> None:
    """Bindings are in the database: a connection that declared nothing publishes through them."""
    QUEUE(broker.channel()).declare()
    with Connection(dsn) as other:
        Producer(other).publish("x", exchange="work", routing_key="work")
    assert QUEUE(broker.channel()).get().payload == "x"


@pytest.mark.parametrize(
    ("kind", "bound", "sent", "taken"),
    [
        ("direct", "a", "a", True),
        ("direct", "a", "b", False),
        ("fanout", "", "anything", True),
        ("topic", "a.*", "a.b", True),
        ("topic", "a.*", "a.b.c", False),
        ("topic", "a.#", "a", True),
        ("topic", "a.#", "a.b.c", True),
        ("topic", "#", "", True),
        ("topic", "#.c", "a.b.c", True),
        ("topic", "#.c", "c", True),
        ("topic", "*.b.#", "a.b", True),
        ("topic", "a.#.z", "a.z", True),
        ("topic", "a.#.z", "az", False),
        ("topic", "a.b", "axb", False),
    ],
)
def test_exchanges(
    broker: Connection, kind: str, bound: str, sent: str, taken: bool
) -> None:  # T-4
    exchange = Exchange("ex", kind)
    queue = Queue("q", exchange, bound)(broker.channel())
    queue.declare()
    Producer(broker).publish("x", exchange=exchange, routing_key=sent)
    assert (queue.get(no_ack=True) is not None) is taken


def test_unbind(broker: Connection) -> None:
    queue = QUEUE(broker.channel())
    queue.declare()
    queue.unbind_from(QUEUE.exchange, "work")
    Producer(broker).publish("x", exchange="work", routing_key="work")
    assert queue.get() is None


def test_passive_declarations(broker: Connection) -> None:
    channel = broker.channel()
    with pytest.raises(NotFound):
        channel.queue_declare("nowhere", passive=True)
    with pytest.raises(ChannelError):
        channel.exchange_declare("nowhere", passive=True)
    send(broker, 1, 2, 3)
    assert channel.queue_declare("work", passive=True).message_count == 3
    channel.exchange_declare("work", passive=True)
    with pytest.raises(PreconditionFailed):
        channel.exchange_declare("work", "topic")
    with pytest.raises(NotFound):
        channel.queue_bind("nowhere", "work", "x")


def test_publishing_to_an_unknown_exchange_is_an_error(broker: Connection) -> None:
    with pytest.raises(NotFound):
        Producer(broker).publish(
            "x", exchange=Exchange("nowhere", no_declare=True), routing_key="x"
        )


def test_a_message_nothing_takes_is_told(
    broker: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "kombu_pgqueue"):
        exchange = Exchange("work")
        send(broker, 1, routing_key="other", exchange=exchange, declare=[exchange])
    assert "No queue takes the message" in caplog.text


def test_purge_takes_delayed_messages_too(broker: Connection) -> None:
    send(broker, 1, 2)
    send(broker, 3, headers={"eta": "2999-01-01T00:00:00+00:00"})
    assert QUEUE(broker.channel()).purge() == 3
    assert QUEUE(broker.channel()).get() is None


def test_delete(broker: Connection) -> None:
    send(broker, 1)
    channel = broker.channel()
    with pytest.raises(PreconditionFailed):
        channel.queue_delete("work", if_empty=True)
    channel.queue_delete("work")
    with pytest.raises(NotFound):
        channel.queue_declare("work", passive=True)
    channel.exchange_delete("work")
    with pytest.raises(NotFound):
        channel.exchange_declare("work", passive=True)


def test_get(broker: Connection, connection: psycopg.Connection) -> None:
    queue = QUEUE(broker.channel())
    queue.declare()
    assert queue.get() is None
    send(broker, 1, 2)
    first = queue.get()
    assert first.payload == 1
    first.ack()
    assert queue.get(no_ack=True).payload == 2
    assert queue.get() is None
    wait_until(lambda: rows(connection) == 0)


def test_requeue_is_first_in_line_and_marked(broker: Connection) -> None:
    send(broker, 1, 2)
    queue = QUEUE(broker.channel())
    first = queue.get()
    assert first.delivery_info["redelivered"] is False
    first.requeue()
    again = queue.get()
    assert (again.payload, again.delivery_info["redelivered"]) == (1, True)


def test_reject_makes_a_dead_letter(broker: Connection, store: JobStore) -> None:
    send(broker, {"a": 1})
    queue = QUEUE(broker.channel())
    queue.get().reject()
    assert queue.get() is None
    (letter,) = store.dead_letters()
    assert letter.failure_code == "rejected"
    assert json.loads(letter.body) == {"a": 1}


def test_recover_delivers_again(broker: Connection) -> None:
    send(broker, 1, 2)
    channel = broker.channel()
    queue = QUEUE(channel)
    kept = [queue.get(), queue.get()]
    assert len(kept) == 2
    channel.basic_recover(requeue=True)
    again = [queue.get(), queue.get()]
    assert [message.payload for message in again] == [1, 2]


def test_ack_multiple(broker: Connection, connection: psycopg.Connection) -> None:
    send(broker, 1, 2, 3)
    inbox = Inbox(broker)
    inbox.drain(3)
    inbox.messages[1].ack(multiple=True)
    inbox.channel._settled()
    assert rows(connection) == 1


def test_ack_by_delivery_tag(broker: Connection, connection: psycopg.Connection) -> None:
    send(broker, 1, 2)
    inbox = Inbox(broker)
    inbox.drain(2)
    inbox.channel.basic_ack(inbox.messages[0].delivery_tag)
    inbox.channel.basic_reject(inbox.messages[1].delivery_tag)
    inbox.channel.basic_ack("no such tag")
    inbox.channel._settled()
    assert rows(connection) == 0


def test_prefetch_is_never_exceeded(
    broker: Connection, connection: psycopg.Connection
) -> None:  # T-6
    send(broker, *range(20))
    inbox = Inbox(broker, prefetch_count=3)
    inbox.drain(3)
    assert inbox.silent()
    assert leased(connection) == 3
    inbox.messages[0].ack()
    assert inbox.drain(4) == [0, 1, 2, 3]
    assert leased(connection) == 3
    inbox.consumer.qos(prefetch_count=6)
    inbox.drain(7)
    assert inbox.silent()


def test_no_ack(broker: Connection, connection: psycopg.Connection) -> None:
    send(broker, *range(250))
    inbox = Inbox(broker, no_ack=True)
    assert inbox.drain(250) == list(range(250))
    inbox.messages[0].ack()  # as in kombu, no error
    wait_until(lambda: rows(connection) == 0)


def test_without_a_prefetch_limit_everything_comes(broker: Connection) -> None:
    send(broker, *range(250))
    inbox = Inbox(broker)
    assert inbox.drain(250) == list(range(250))


def test_two_consumers_share_a_queue(broker: Connection) -> None:
    send(broker, *range(10))
    one = Inbox(broker, prefetch_count=5)
    two = Inbox(broker, prefetch_count=5)
    while len(one.messages) + len(two.messages) < 10:
        broker.drain_events(timeout=10)
    assert (len(one.messages), len(two.messages)) == (5, 5)


def test_cancel_gives_back_what_was_not_delivered(
    broker: Connection, connection: psycopg.Connection
) -> None:
    send(broker, *range(5))
    inbox = Inbox(broker, prefetch_count=5)
    inbox.drain(1)
    wait_until(lambda: leased(connection) == 5)
    inbox.consumer.cancel()
    wait_until(lambda: leased(connection) == 1)
    attempts = connection.execute(
        "SELECT max(attempts + deliveries) FROM pgqueue.job_queue"
    ).fetchone()
    assert attempts == (0,)
    assert inbox.silent(0.1)


def test_a_forgotten_message_goes_back(
    broker: Connection, connection: psycopg.Connection
) -> None:  # T-10
    send(broker, 1)
    inbox = Inbox(broker)
    inbox.drain(1)
    inbox.consumer.cancel()
    inbox.messages.clear()
    wait_until(lambda: leased(connection) == 0)
    assert rows(connection) == 1


def test_ack_after_the_channel_and_the_connection_closed(
    dsn: str, connection: psycopg.Connection
) -> None:
    with Connection(dsn) as broker:
        send(broker, 1, 2)
        inbox = Inbox(broker)
        inbox.drain(2)
        inbox.channel.close()
        inbox.messages[0].ack()
    acker = threading.Thread(target=inbox.messages[1].ack)
    acker.start()
    acker.join()
    wait_until(lambda: rows(connection) == 0)


def test_places_of_running_tasks_count_after_a_reconnect(
    dsn: str, connection: psycopg.Connection
) -> None:  # T-6
    with Connection(dsn) as first:
        send(first, *range(6))
        running = Inbox(first, prefetch_count=2)
        running.drain(2)
    with Connection(dsn) as second:
        inbox = Inbox(second, prefetch_count=3)
        inbox.drain(1)
        assert inbox.silent()
        assert leased(connection) == 3
        running.messages[0].ack()
        inbox.drain(2)


def test_priorities(broker: Connection) -> None:
    for priority in (0, 9, 300, 5):
        send(broker, priority, priority=priority)
    inbox = Inbox(broker)
    assert inbox.drain(4) == [300, 9, 5, 0]
    assert inbox.messages[0].properties["priority"] == 255


def test_eta_waits_in_the_database(
    broker: Connection, connection: psycopg.Connection
) -> None:  # T-6
    soon = connection.execute("SELECT (now() + interval '0.8 s')::text").fetchone()[0]
    send(broker, "later", headers={"eta": soon.replace(" ", "T") + ":00", "task": "t"})
    send(broker, "now")
    inbox = Inbox(broker, prefetch_count=5)
    assert inbox.drain(1) == ["now"]
    assert leased(connection) == 1
    assert inbox.drain(2, timeout=3) == ["now", "later"]
    assert inbox.messages[1].headers["eta"] is None
    late = connection.execute(
        "SELECT extract(epoch FROM now() - %s::timestamptz)", [soon]
    ).fetchone()[0]
    assert 0 <= late < 0.5


def test_a_sleeping_consumer_is_woken(
    broker: Connection, dsn: str, connection: psycopg.Connection
) -> None:  # T-12
    inbox = Inbox(broker)
    flags = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'"
    wait_until(lambda: connection.execute(flags).fetchone()[0] > 0, message="the wake flag")
    wait_until(
        lambda: (
            connection.execute(
                "SELECT state_change < now() - interval '0.4 s' FROM pg_stat_activity "
                "WHERE datname = current_database() AND application_name = 'pgqueue consume'"
            ).fetchone()
            == (True,)
        ),
        message="the session to rest",
    )
    timer = threading.Timer(0.1, send, (broker, "x"))
    timer.start()
    assert inbox.drain(1, timeout=2) == ["x"]  # the poll interval is 5 s


def test_an_unreadable_envelope_is_buried_and_the_consumer_goes_on(
    broker: Connection, store: JobStore, connection: psycopg.Connection
) -> None:
    send(broker, 1, 2)
    connection.execute("UPDATE pgqueue.job_queue SET envelope = '{' WHERE body = '1'")
    inbox = Inbox(broker)
    assert inbox.drain(1) == [2]
    letters = wait_until(store.dead_letters)
    assert [letter.failure_code for letter in letters] == ["malformed"]
    assert letters[0].envelope == "{"


def test_an_unreadable_body_is_buried(broker: Connection, store: JobStore) -> None:
    Producer(broker).publish(
        b"{",
        content_type="application/json",
        content_encoding="utf-8",
        routing_key="work",
        declare=[QUEUE],
    )
    with broker.channel() as channel:
        message = QUEUE(channel).get()
        with pytest.raises(Exception, match=r"JSON|Expecting"):
            message.decode()
        message.ack()
    (letter,) = store.dead_letters()
    assert letter.failure_code == "malformed"
    assert letter.body == b"{"


def test_transient_and_durable_messages(broker: Connection, connection: psycopg.Connection) -> None:
    send(broker, 1, delivery_mode=1)
    send(broker, 2, delivery_mode=2)
    tables = connection.execute(
        "SELECT relname FROM pgqueue.job_queue q JOIN pg_class c ON c.oid = q.tableoid "
        "ORDER BY body"
    ).fetchall()
    assert tables == [("job_queue_transient",), ("job_queue",)]


def test_a_batch_is_all_or_nothing(broker: Connection, connection: psycopg.Connection) -> None:
    QUEUE(broker.channel()).declare()
    producer = broker.Producer(serializer="json")
    assert producer.supports_batch_publish
    with contextlib.suppress(RuntimeError), producer.batch():
        producer.publish(1, routing_key="work")
        raise RuntimeError
    assert rows(connection) == 0
    with producer.batch(max_size=4):
        for number in range(10):
            producer.publish(number, routing_key="work")
        assert rows(connection) == 8
    assert rows(connection) == 10


def test_simple_queue(broker: Connection) -> None:
    with contextlib.closing(broker.SimpleQueue("simple")) as queue:
        queue.put({"x": 1})
        assert queue.qsize() == 1
        message = queue.get(timeout=5)
        assert message.payload == {"x": 1}
        message.ack()
        with pytest.raises(queue.Empty):
            queue.get_nowait()


def test_a_temporary_queue_ends_with_its_consumer(
    dsn: str, broker: Connection, connection: psycopg.Connection
) -> None:
    queue = Queue("mine", Exchange("all", "fanout"), exclusive=True, durable=False)
    queues = "SELECT count(*) FROM pgqueue.queue WHERE queue_name = 'mine'"
    inbox = Inbox(broker, queue, no_ack=True)
    Producer(broker).publish("x", exchange=queue.exchange)
    assert inbox.drain(1) == ["x"]
    inbox.consumer.cancel()
    assert connection.execute(queues).fetchone() == (0,)
    # One that its consumer did not live to delete is empty for the next.
    with Connection(dsn) as dead:
        queue(dead.channel()).declare()
        Producer(dead).publish("stale", exchange=queue.exchange)
        dead.collect()
    assert Inbox(broker, queue, no_ack=True).silent()


LONG = "ö" * 127


@pytest.mark.parametrize("name", ["with space", "a.b", "日本語", LONG, "quote'\"\\;--"])
def test_queue_names(broker: Connection, name: str) -> None:  # T-4
    queue = Queue(name, Exchange(name), name)
    Producer(broker).publish("x", exchange=queue.exchange, routing_key=name, declare=[queue])
    inbox = Inbox(broker, queue)
    assert inbox.drain(1) == ["x"]
    inbox.messages[0].ack()


def test_sessions_of_a_process(
    dsn: str, connection: psycopg.Connection, database: str
) -> None:  # T-8
    with contextlib.ExitStack() as stack:
        brokers = [stack.enter_context(Connection(dsn)) for _ in range(6)]
        inboxes = [Inbox(broker, Queue(f"q{n}")) for n, broker in enumerate(brokers)]
        threads = [
            threading.Thread(
                target=send, args=(b, *range(5)), kwargs={"declare": None, "routing_key": f"q{n}"}
            )
            for n, b in enumerate(brokers)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for inbox in inboxes:
            inbox.drain(5)
        count = connection.execute(
            "SELECT count(*) FROM pg_stat_activity "
            "WHERE datname = %s AND application_name LIKE 'pgqueue %%'",
            [database],
        ).fetchone()[0]
        assert count <= 3


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.connect(),
        lambda c: c.connection,
        lambda c: c.channel(),
        lambda c: c.ensure_connection(max_retries=1),
    ],
)
def test_a_dead_server_is_an_error_at_once(use: Callable[[Connection], Any]) -> None:
    broker = Connection(f"pgqueue://u:sesame@127.0.0.1:{free_port()}/db", connect_timeout=2)
    with pytest.raises((StoreUnavailable, OperationalError)) as caught:
        use(broker)
    assert "sesame" not in str(caught.value)


def test_publishing_to_a_dead_server_follows_the_retry_policy() -> None:  # T-10
    broker = Connection(f"pgqueue://u@127.0.0.1:{free_port()}/db")
    policy = {"max_retries": 2, "interval_start": 0.01, "interval_step": 0, "interval_max": 0.01}
    broker.transport_options.update(policy)
    with pytest.raises(OperationalError):
        Producer(broker).publish("x", routing_key="q", retry=True, retry_policy=policy)


def test_failover(dsn: str) -> None:
    dead = f"pgqueue://u:a%3Bb@127.0.0.1:{free_port()},127.0.0.1:{free_port()}/db?sslmode=disable"
    with Connection(f"{dead};{dsn}") as broker:
        broker.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
        send(broker, 1)
        assert broker.as_uri(include_password=True) == dsn
        assert broker.transport_cls == "pgqueue"
        assert "a%3Bb" not in repr(broker.info())


def test_switching_to_another_transport() -> None:
    broker = Connection("pgqueue://h/db;memory://")
    assert broker.transport.driver_type == "pgqueue"
    broker.maybe_switch_next()
    assert broker.transport_cls == "memory"
    assert broker.transport.driver_type == "memory"
    broker.maybe_switch_next()
    assert broker.transport_cls == "pgqueue"


def test_kombu_shows_no_password() -> None:  # T-1
    url = "pgqueue://u:se%2Fsame@h1,h2:5433/db?sslmode=require"
    broker = Connection(f"{url};{url}x")
    shown = [
        repr(broker),
        broker.as_uri(),
        repr(broker.info()),
        json.dumps(broker.info(), default=str),
    ]
    assert not any("same" in text for text in shown)
    assert broker.as_uri(include_password=True) == url
    for copy in (broker.clone(), pickle.loads(pickle.dumps(broker))):
        assert copy.as_uri(include_password=True) == url
        assert copy.transport.options == broker.transport.options
    assert "same" not in repr(broker.transport.options)


def test_a_connection_of_pieces(dsn: str) -> None:
    broker = Connection(
        transport="pgqueue", hostname="h", userid="u", password="p@", virtual_host="db", port=7
    )
    assert broker.as_uri(include_password=True) == "pgqueue://u:p%40@h:7/db"


def test_an_unknown_option_is_told_when_connecting(dsn: str) -> None:  # T-3
    with pytest.raises(ConfigurationError, match=r"'pol_interval'.*poll_interval"):
        Connection(dsn, transport_options={"pol_interval": 1}).connect()


def test_a_forked_child_has_sessions_of_its_own(
    dsn: str, connection: psycopg.Connection, broker: Connection
) -> None:  # T-8
    send(broker, "parent")
    inbox = Inbox(broker, prefetch_count=1)
    inbox.drain(1)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            broker.collect()
            inbox.messages.clear()  # forgotten here, not by the parent
            send(Connection(dsn), "child")
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0
    assert leased(connection) == 1
    send(broker, "parent again")
    inbox.messages[0].ack()
    assert inbox.drain(2, timeout=5)[1] == "child"


def test_the_same_publish_twice_is_one_job(
    broker: Connection, connection: psycopg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:  # T-10
    """The answer to the publish is lost after its commit; kombu tries again."""
    QUEUE(broker.channel()).declare()
    enqueue, lost = JobStore.enqueue, []

    def answer_lost(self: JobStore, publication: Any) -> Any:
        answer = enqueue(self, publication)
        if len(lost) < 2:
            lost.append(answer)
            raise StoreUnavailable("cut")
        return answer

    monkeypatch.setattr(JobStore, "enqueue", answer_lost)
    producer = broker.Producer(serializer="json")
    producer.publish({"n": 1}, routing_key="work", retry=True, retry_policy={"interval_start": 0})
    assert len(lost) == 2
    assert rows(connection) == 1
    producer.publish({"n": 1}, routing_key="work", retry=True)
    assert rows(connection) == 2


def test_publishing_survives_terminated_sessions(
    broker: Connection, connection: psycopg.Connection
) -> None:  # T-10
    for _ in range(3):
        send(broker, 1)
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
            "WHERE datname = current_database() AND application_name = 'pgqueue publish'"
        )
        Producer(broker).publish("no retry asked for", routing_key="work")
    assert rows(connection) == 6
