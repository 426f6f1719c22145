# SPDX-License-Identifier: BSD-3-Clause
"""Which statements commit durably, and which may be forgotten by a crash of the server."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import psycopg
import pytest

from kombu_pgqueue.connect import connect
from kombu_pgqueue.options import parse_url
from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Lease, Publication
from kombu_pgqueue.verdicts import Changes, FailPermanent, FailTransient, Release, Succeed

HOLDER = {"lease_name": "holder", "lease_holder": "a test"}


@pytest.fixture
def commits(connection: psycopg.Connection) -> psycopg.Connection:
    """Notes the commit mode of every statement that changes a job or a dead letter."""
    connection.execute(
        "CREATE TABLE commit_mode (seen int GENERATED ALWAYS AS IDENTITY, mode text)"
    )
    connection.execute(
        "CREATE FUNCTION note_mode() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "INSERT INTO commit_mode (mode) VALUES (current_setting('synchronous_commit')); "
        "RETURN NULL; END $$"
    )
    for table in ("job_queue", "job_dead_letter"):
        connection.execute(
            f"CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON pgqueue.{table} "
            "FOR EACH STATEMENT EXECUTE FUNCTION note_mode()"
        )
    return connection


@pytest.fixture
def publisher(dsn: str) -> Iterator[JobStore]:
    with connect(parse_url(dsn), role="publish") as session:
        yield JobStore(session)


@pytest.fixture
def holder(dsn: str) -> Iterator[JobStore]:
    with connect(parse_url(dsn), role="consume") as session:
        yield JobStore(session)


def modes(connection: psycopg.Connection) -> set[str]:
    """The modes seen since the last call."""
    return {row[0] for row in connection.execute("DELETE FROM commit_mode RETURNING mode")}


def claimed(publisher: JobStore, holder: JobStore) -> Lease:
    publisher.enqueue(Publication(uuid4(), "celery", "{}", b"[]"))
    [lease] = holder.claim(ClaimRequest(["celery"], 1), **HOLDER)
    return lease


def test_publishing_is_durable(commits: psycopg.Connection, publisher: JobStore) -> None:  # T-13
    publisher.enqueue(Publication(uuid4(), "celery", "{}", b"[]"))
    publisher.enqueue_many([Publication(uuid4(), "celery", "{}", b"[]") for _ in range(2)])
    assert modes(commits) == {"on"}


def test_a_weaker_publishing_is_chosen_by_name(
    commits: psycopg.Connection, dsn: str
) -> None:  # T-13
    options = parse_url(dsn, {"publish_synchronous_commit": "off"})
    with connect(options, role="publish") as session:
        JobStore(session).enqueue(Publication(uuid4(), "celery", "{}", b"[]"))
    assert modes(commits) == {"off"}


def test_claims_and_ends_may_be_forgotten(
    commits: psycopg.Connection, publisher: JobStore, holder: JobStore
) -> None:  # T-13
    lease, other = claimed(publisher, holder), claimed(publisher, holder)
    modes(commits)
    holder.exchange(
        [(lease.ref, Succeed()), (other.ref, Release())],
        [ClaimRequest(["celery"], 1)],
        **HOLDER,
    )
    assert modes(commits) == {"off"}


@pytest.mark.parametrize(
    "verdict",
    [
        FailPermanent("fatal", "no"),
        FailTransient("Error", "later", delay=1.0, changes=Changes(body=b"[1]")),
    ],
)
def test_failures_are_durable(
    commits: psycopg.Connection,
    publisher: JobStore,
    holder: JobStore,
    verdict: FailPermanent | FailTransient,
) -> None:  # T-13
    lease = claimed(publisher, holder)
    modes(commits)
    assert holder.settle([(lease.ref, verdict)]) == [True]
    assert modes(commits) == {"on"}
    # and the session goes on as it was
    assert holder.connection.execute("SHOW synchronous_commit").fetchone() == ("off",)


def test_a_callers_transaction_keeps_its_mode(
    commits: psycopg.Connection, publisher: JobStore
) -> None:  # T-13
    with publisher.connection.transaction():
        publisher.connection.execute("SET LOCAL synchronous_commit TO remote_write")
        publisher.enqueue(Publication(uuid4(), "celery", "{}", b"[]"))
        mode = publisher.connection.execute("SHOW synchronous_commit").fetchone()
    assert mode == ("remote_write",)
    assert modes(commits) == {"remote_write"}
