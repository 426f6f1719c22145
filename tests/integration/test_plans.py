# SPDX-License-Identifier: BSD-3-Clause
"""The plans of the hot queries on 100,000 rows: which index, and never a whole table.

auto_explain tells the plan of each statement inside the functions, with the buffers it touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from uuid import uuid4

import psycopg
import pytest

from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Progress, Release, Succeed
from tests.support import database as databases
from tests.support.jobs import bury, claim, claim_one, publish, reap_at_once, rows

QUEUES = 10

FILL = (Path(__file__).parent.parent / "support" / "fill.sql").read_text()


@dataclass
class Plans:
    """What auto_explain said while they were watched."""

    texts: list[str] = field(default_factory=list)

    def _hits(self, pattern: str) -> list[str]:
        return [hit for text in self.texts for hit in re.findall(pattern, text)]

    def scanned(self) -> set[str]:
        return set(self._hits(r"Seq Scan on (?:pgqueue\.)?(\w+)"))

    def indexes(self) -> set[str]:
        using = self._hits(r"Index (?:Only )?Scan (?:Backward )?using (\w+)")
        return set(using) | set(self._hits(r"Bitmap Index Scan on (\w+)"))

    def walked_whole(self) -> list[str]:
        """Index scans without a condition, by their index."""
        lines = [line for text in self.texts for line in text.splitlines()]
        return [
            found.group(1)
            for line, below in zip(lines, [*lines[1:], ""], strict=True)
            if (found := re.search(r"Index (?:Only )?Scan (?:Backward )?using (job_\w+)", line))
            and "Index Cond" not in below
            and "never executed" not in line
        ]

    def buffers(self) -> int:
        """Of the outermost statement, which includes those inside."""
        counts = re.findall(r"Buffers: shared hit=(\d+)(?: read=(\d+))?", self.texts[-1])
        return max(int(hit) + int(read or 0) for hit, read in counts)


@contextmanager
def watched(connection: psycopg.Connection) -> Iterator[Plans]:
    plans = Plans()

    def hear(notice: psycopg.errors.Diagnostic) -> None:
        plans.texts.append(notice.message_primary or "")

    connection.add_notice_handler(hear)
    connection.execute("SET auto_explain.log_min_duration = 0", prepare=False)
    yield plans
    connection.execute("SET auto_explain.log_min_duration = -1", prepare=False)
    connection.remove_notice_handler(hear)
    plans.texts = [text for text in plans.texts if "plan:" in text]
    assert plans.texts


def explaining(connection: psycopg.Connection) -> JobStore:
    connection.execute(
        "LOAD 'auto_explain';"
        "SET auto_explain.log_nested_statements = on; SET auto_explain.log_analyze = on;"
        "SET auto_explain.log_buffers = on; SET auto_explain.log_timing = off;"
        "SET auto_explain.log_level = notice; SET client_min_messages = notice;"
    )
    return JobStore(connection)


@pytest.fixture(scope="module", params=["analyzed", "just loaded", "planned while empty"])
def loaded(
    request: pytest.FixtureRequest, server: str, template_database: str
) -> Iterator[JobStore]:
    with (
        databases.new_database(server, template=template_database) as conninfo,
        psycopg.connect(conninfo, autocommit=True) as connection,
    ):
        connection.execute(
            "ALTER TABLE pgqueue.job_queue SET (autovacuum_enabled = off);"
            "ALTER TABLE pgqueue.job_dead_letter SET (autovacuum_enabled = off)"
        )
        store = explaining(connection)
        reap_at_once(store)
        store.config_set("queue.lease.ttl_seconds.app.work", 600)
        if request.param == "planned while empty":
            connection.execute("VACUUM ANALYZE")
            for _ in range(7):
                for act in ACTS.values():
                    act[0](store)
            for table in ("job_queue", "job_dead_letter", "runtime_lease"):
                connection.execute(f"DELETE FROM pgqueue.{table}")
        connection.execute(FILL)
        if request.param == "analyzed":
            connection.execute("VACUUM ANALYZE")
        yield store


def _leases(store: JobStore, count: int = 10) -> list[Lease]:
    for _ in range(count):
        publish(store, "mine")
    return claim(store, "mine", count)


def _claim(store: JobStore) -> None:
    claim(store, ["q1", "q2"], 8)


def _claim_bytes(store: JobStore) -> None:
    claim(store, ["q1"], 8, max_bytes=1000, kinds=["app.work"])


def _exchange(store: JobStore) -> None:
    leases = _leases(store)
    kinds = [Progress(), Succeed(), Release(), Release(requeue=True)]
    verdicts = [(lease.ref, kinds[n % 4]) for n, lease in enumerate(leases)]
    store.exchange(verdicts, [ClaimRequest(["q3"], 3)], lease_name="w", lease_holder="h")
    store.renew_many([lease.ref for lease in leases])
    for lease in leases:
        store.succeed(*lease.ref)
    store.queue_purge("mine")


def _singles(store: JobStore) -> None:
    a, b, c, d = _leases(store, 4)
    store.progress(*a.ref)
    store.renew(*a.ref)
    store.succeed(*a.ref)
    store.release(*b.ref)
    store.fail_transient(*c.ref, FailTransient("E", "x"))
    store.fail_permanent(*d.ref, FailPermanent("fatal", "x"))
    store.settle([(d.ref, FailPermanent("fatal", "x"))])
    store.queue_purge("mine")


def _reap(store: JobStore) -> None:
    (lease,) = _leases(store, 1)
    store.renew(*lease.ref, ttl=-1)
    assert store.reap(limit=100) >= 1
    store.queue_purge("mine")


def _sweep(store: JobStore) -> None:
    publish(store, "mine", expires_in=-1)
    publish(store, "mine", expires_in=-1, durable=False)
    assert store.sweep_expired() == 2


def _next_due(store: JobStore) -> None:
    store.next_due(["q1", "q2", "idle"])


def _enqueue(store: JobStore) -> None:
    made = publish(store, "mine", idempotency_key="k")
    store.enqueue(made)
    publish(store, "mine", idempotency_key="k")
    store.job_cancel(made.job_id)


def _list(store: JobStore) -> None:
    page = store.dead_letters(limit=20)
    if page:
        last = page[-1]
        store.dead_letters(limit=20, after=(last.last_failed_at, last.dead_letter_id))
        store.dead_letters(limit=20, kind="app.k7", state="all")
        store.dead_letters(limit=20, since=last.last_failed_at, state="resolved")


def _resolve(store: JobStore) -> None:
    letter = bury(store, queue_name="mine")
    store.dead_letter(letter)
    assert store.dead_letter_replay(letter) == "replayed"
    lease = claim_one(store, "mine")
    store.fail_permanent(*lease.ref, FailPermanent("fatal", "x"))
    store.dead_letter_discard(store.dead_letters(queue="mine")[0].dead_letter_id)
    store.job_get(lease.job_id)
    store.job_get(uuid4())


def _queue(store: JobStore) -> None:
    publish(store, "mine")
    store.queue_size("mine")
    store.queue_purge("mine")
    store.queue_delete("mine")


def _prune(store: JobStore) -> None:
    store.prune(limit=100)


#: What runs, and the indexes it must be seen to use.
ACTS: dict[str, tuple[Callable[[JobStore], None], set[str]]] = {
    "claim": (_claim, {"job_queue_ready", "job_queue_pkey"}),
    "claim by bytes": (_claim_bytes, {"job_queue_ready", "job_queue_pkey"}),
    "batch verdicts": (_exchange, {"job_queue_pkey"}),
    "single verdicts": (_singles, {"job_queue_pkey"}),
    "reaper": (_reap, {"job_queue_leased", "job_queue_pkey"}),
    "sweeper": (_sweep, {"job_queue_expiry", "job_queue_pkey"}),
    "next due": (_next_due, {"job_queue_ready"}),
    "enqueue": (_enqueue, {"job_queue_pkey", "job_queue_explicit_key", "job_dead_letter_job"}),
    "listing": (_list, {"job_dead_letter_open"}),
    "replay and discard": (_resolve, {"job_dead_letter_pkey"}),
    "size and purge": (_queue, {"job_queue_ready"}),
    "prune": (_prune, {"job_dead_letter_resolved_at"}),
}
#: Walked without a condition, in their own order until a limit is full; all of them are partial.
LEASED = {"job_queue_leased", "job_queue_transient_leased"}
IN_ORDER: dict[str, set[str]] = {
    "reaper": LEASED,
    "listing": {"job_dead_letter_open", "job_dead_letter_listing"},
    "replay and discard": {"job_dead_letter_open"},
    "prune": {
        "job_dead_letter_retained",
        "job_queue_ready",
        "job_queue_transient_ready",
        *LEASED,
    },
}


@pytest.mark.parametrize("name", ACTS)
def test_plans(loaded: JobStore, name: str) -> None:
    # D-3, S-4
    act, wanted = ACTS[name]
    with watched(loaded.connection) as plans:
        act(loaded)
    big = {"job_queue", "job_dead_letter"}
    assert not plans.scanned() & big, "\n".join(plans.texts)
    assert wanted <= plans.indexes(), "\n".join(plans.texts)
    assert set(plans.walked_whole()) <= IN_ORDER.get(name, set()), "\n".join(plans.texts)


def test_the_cost_of_a_claim_is_flat(loaded: JobStore) -> None:
    # S-4: neither the 30,000 delayed jobs of a higher priority nor the backlog cost anything
    publish(loaded, "small", priority=5)
    publish(loaded, "small")
    counts = []
    for queue_name in ("small", "q4"):
        with watched(loaded.connection) as plans:
            assert len(claim(loaded, queue_name, 1)) == 1
        counts.append(plans.buffers())
    assert counts[1] <= counts[0] + 25, counts


def test_a_start_is_a_hot_update(store: JobStore, connection: psycopg.Connection) -> None:
    # D-3: no index covers what a start writes
    if connection.info.server_version < 150000:
        pytest.skip("statistics cannot be flushed on demand before PostgreSQL 15")

    def updates() -> tuple[int, int]:
        connection.execute("SELECT pg_stat_force_next_flush()")
        (found,) = rows(
            connection,
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relname = 'job_queue'",
        )
        return found["n_tup_upd"], found["n_tup_hot_upd"]

    for _ in range(6):
        publish(store)
    leases = claim(store)
    before = updates()
    sent = [(lease.ref, Progress(acks_late=True)) for lease in leases[:3]]
    store.exchange(sent, [], lease_name="w", lease_holder="h")
    for lease in leases[3:]:
        store.progress(*lease.ref)
    after = updates()
    assert (after[0] - before[0], after[1] - before[1]) == (6, 6)
