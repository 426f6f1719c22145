# SPDX-License-Identifier: BSD-3-Clause
"""The state machine of a job, driven at random over the real database, held against a small model.

Time is moved by SQL, never by sleeping. After every step all rows are looked at: each job is in
exactly one place, with the counts, stamps and lease that the model expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, ClassVar
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from kombu_pgqueue.store import ClaimRequest, JobStore
from kombu_pgqueue.values import Lease, Publication, Stamps
from kombu_pgqueue.verdicts import FailPermanent, FailTransient, Progress, Release, Succeed, Verdict
from tests.support.job_model import MAX_ATTEMPTS, Job, Model, claimable, dead, leased, waiting
from tests.support.jobs import publication, rows

QUEUES = ["a", "b"]
KINDS = ["k1", "k2"]
DELIVERY_LIMIT = 5
VERDICTS: list[Verdict] = [
    Progress(),
    Progress(acks_late=True),
    Progress(acks_late=False),
    Succeed(),
    Release(),
    Release(requeue=True),
    FailTransient("E", "no luck"),
    FailTransient("E", "no luck", delay=0),
    FailTransient("E", "no luck", delay=600),
    FailPermanent("fatal", "boom"),
    FailPermanent("malformed", "boom"),
]
STAMPS = Stamps(visibility_timeout_s=600, backoff_base_s=100)

_EMPTY = """
    DELETE FROM pgqueue.job_queue;
    DELETE FROM pgqueue.job_dead_letter;
    DELETE FROM pgqueue.job_event;
    DELETE FROM pgqueue.queue_priority;
"""


def some(test: Callable[[Job], bool]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run the rule only while some job is like this: most random steps would do nothing else."""
    return precondition(lambda machine: any(map(test, machine.model.jobs.values())))


#: Which of the candidates; a verdict's is a stale lease in one of four cases.
pick = st.integers(0, 2**16)


class JobStates(RuleBasedStateMachine):
    """Rules are the verbs; `leases` are all leases ever given, most of them stale in the end."""

    store: ClassVar[JobStore]

    @initialize(count=st.integers(2, 6))
    def begin(self, count: int) -> None:
        self.store.connection.execute(_EMPTY, prepare=False)
        self.model = Model()
        self.leases: list[Lease] = []
        self.known: list[UUID] = []
        for number in range(count):
            made = publication(QUEUES[number % 2], job_kind="k1", stamps=STAMPS)
            assert self.store.enqueue(made).created
            self._published(made)
        self.claim(QUEUES, count - 1, None)

    def _published(self, made: Publication) -> None:
        self.known.append(made.job_id)
        self.model.jobs[made.job_id] = Job(made, acks_late=made.acks_late, due=made.delay == 0)

    def _job(self, place: int, test: Callable[[Job], bool]) -> Job:
        found = [job for job in self.model.jobs.values() if test(job)]
        return found[place % len(found)]

    def _lease(self, place: int) -> Lease:
        held = [lease for lease in self.leases if self._held(lease)]
        chosen = held if held and place % 4 else self.leases
        return chosen[place // 4 % len(chosen)]

    # The publisher's side

    @rule(
        queue_name=st.sampled_from(QUEUES),
        priority=st.sampled_from([0, 0, 3, 255]),
        delay=st.sampled_from([0.0, 0.0, 0.0, 3600.0]),
        expires_in=st.sampled_from([None, None, 3600.0]),
        kind=st.sampled_from(KINDS),
        key=st.sampled_from([None, None, "x", "y"]),
        acks_late=st.sampled_from([None, True, False]),
        durable=st.booleans(),
        max_attempts=st.sampled_from([None, 0, 1, 2]),
        body=st.binary(max_size=8),
    )
    def publish(
        self,
        queue_name: str,
        priority: int,
        delay: float,
        expires_in: float | None,
        kind: str,
        key: str | None,
        acks_late: bool | None,
        durable: bool,
        max_attempts: int | None,
        body: bytes,
    ) -> None:
        made = publication(
            queue_name,
            priority=priority,
            delay=delay,
            expires_in=expires_in,
            job_kind=kind,
            idempotency_key=key,
            acks_late=acks_late,
            durable=durable,
            body=body,
            stamps=replace(STAMPS, max_attempts=max_attempts),
        )
        holder = self.model.holder_of(queue_name, key) if key else None
        answer = self.store.enqueue(made)
        if holder is not None:
            assert (answer.job_id, answer.created) == (holder.published.job_id, False)
            return
        assert (answer.job_id, answer.created) == (made.job_id, True)
        self._published(made)

    # Once it is done and gone nobody remembers its id.
    @some(lambda job: True)
    @rule(place=pick)
    def publish_again(self, place: int) -> None:
        job = self._job(place, lambda job: True)
        job_id = job.published.job_id
        answer = self.store.enqueue(job.published)
        # The key of a dead job may have moved on to another one.
        key = job.published.idempotency_key
        other = self.model.holder_of(job.published.queue_name, key) if key else None
        expected = other.published.job_id if other is not None and not job.alive else job_id
        assert (answer.job_id, answer.created) == (expected, False)

    # Time

    @some(lambda job: job.alive)
    @rule(place=pick, live=st.booleans())
    def time_passes(self, place: int, live: bool) -> None:
        """The delays of all jobs, or the time to live of one."""
        if live:
            job = self._job(place, lambda job: job.alive)
            self._sql("expires_at = clock_timestamp() - interval '1 s'", job.published.job_id)
            job.expired = True
            return
        for job in self.model.jobs.values():
            if waiting(job) and not job.due:
                self._sql(
                    "process_after = clock_timestamp() - interval '1 s'", job.published.job_id
                )
                job.due = True

    # The holder's side

    @some(claimable)
    @rule(
        queues=st.sampled_from([QUEUES, QUEUES, ["a"], ["b"]]),
        limit=st.integers(1, 4),
        kinds=st.sampled_from([None, None, None, ["k1"]]),
    )
    def claim(self, queues: list[str], limit: int, kinds: list[str] | None) -> None:
        due = {
            queue_name: sorted(
                (
                    row
                    for row in self._rows()
                    if row["queue_name"] == queue_name
                    and self._claimable(self.model.jobs[row["job_id"]], kinds)
                ),
                key=lambda row: (-row["priority"], row["process_after"], row["seq"]),
            )
            for queue_name in queues
        }
        # The first queue is drawn by lot; a replayed example must see the same one.
        self.store.connection.execute("SELECT setseed(0.25)")
        request = ClaimRequest(queues, limit, kinds=kinds)
        taken = self.store.claim(request, lease_name="w", lease_holder="w@host")
        assert len(taken) == min(limit, sum(map(len, due.values())))
        for queue_name in queues:
            mine = [lease.job_id for lease in taken if lease.queue_name == queue_name]
            expected = [row["job_id"] for row in due[queue_name]]
            share = -(-limit // len(queues))
            # What is left over goes to the others, after their share.
            if len(mine) <= share:
                assert mine == expected[: len(mine)]
            assert sorted(mine, key=expected.index) == sorted(
                expected[: len(mine)], key=expected.index
            )
        for lease in taken:
            job = self.model.jobs[lease.job_id]
            assert (lease.attempts, lease.retries, lease.deliveries, lease.replays) == (
                job.attempts,
                job.retries,
                job.deliveries,
                job.replays,
            )
            assert lease.redelivered == (job.deliveries > 0)
            assert (lease.body, lease.envelope) == (job.published.body, job.published.envelope)
            job.status, job.token = "leased", lease.lease_token
            self.leases.append(lease)

    @staticmethod
    def _claimable(job: Job, kinds: list[str] | None) -> bool:
        return claimable(job) and (kinds is None or job.published.job_kind in kinds)

    @precondition(lambda machine: machine.leases)
    @rule(place=pick, verdict=st.sampled_from(VERDICTS), many=st.booleans())
    def verdict(self, place: int, verdict: Verdict, many: bool) -> None:
        lease = self._lease(place)
        assert self._send((lease.job_id, uuid4()), verdict, many) is False
        job = self._held(lease)
        assert self._send(lease.ref, verdict, many) is (job is not None)
        if job is None:
            return
        if isinstance(verdict, Progress):
            job.count_attempt()
            job.acks_late = job.acks_late if verdict.acks_late is None else verdict.acks_late
        elif isinstance(verdict, Succeed):
            del self.model.jobs[lease.job_id]
        elif isinstance(verdict, Release):
            self._released(job, verdict)
        elif isinstance(verdict, FailTransient):
            self._failed(job, verdict)
        else:
            if verdict.failure_code != "malformed":
                job.count_attempt()
            job.bury(verdict.failure_code)

    @staticmethod
    def _released(job: Job, verdict: Release) -> None:
        if verdict.requeue:
            job.count_attempt()
        if not job.started:
            job.free("queued")
            return
        job.deliveries += 1
        if job.deliveries >= DELIVERY_LIMIT:
            job.bury("delivery_limit")
        else:
            job.free("queued")
            job.due = job.deliveries <= 3

    @staticmethod
    def _failed(job: Job, verdict: FailTransient) -> None:
        job.count_attempt()
        if verdict.delay is None and 0 < job.max_attempts <= job.attempts:
            job.bury("exhausted")
        else:
            job.retries += 1
            job.free("retry_waiting")
            job.due = verdict.delay == 0

    @precondition(lambda machine: machine.leases)
    @rule(place=pick)
    def renew(self, place: int) -> None:
        lease = self._lease(place)
        applied = self.store.renew(*lease.ref)
        assert applied is (self._held(lease) is not None)
        assert self.store.renew_many([lease.ref, lease.ref]) == [applied, applied]

    # Maintenance and operators

    @some(leased)
    @rule(places=st.lists(pick, min_size=1, max_size=3))
    def leases_run_out(self, places: list[int]) -> None:
        dropped: dict[UUID, Job] = {}
        for job in (self._job(place, leased) for place in places):
            dropped[job.published.job_id] = job
            self._sql("leased_until = clock_timestamp() - interval '1 s'", job.published.job_id)
        assert self.store.reap() == len(dropped)
        # One holder has them all: what it ran is to blame, or all if it is known to have run none.
        ran = any(job.started for job in dropped.values())
        for job in dropped.values():
            charged = job.started or not ran
            job.deliveries += charged
            if job.started and job.acks_late is False:
                job.bury("worker_lost")
            elif charged and job.deliveries >= DELIVERY_LIMIT:
                job.bury("delivery_limit")
            elif job.started and 0 < job.max_attempts <= job.attempts:
                job.bury("lease_expired")
            else:
                # A first loss is repeated at once; an unstarted job keeps its place.
                job.due = job.due if not job.started else job.attempts <= 1
                job.free("retry_waiting")

    @some(lambda job: job.alive and job.expired)
    @rule()
    def sweep(self) -> None:
        swept = 0
        for job in list(self.model.jobs.values()):
            if not (job.alive and job.expired):
                continue
            if self._transient(job):
                if waiting(job):
                    swept += 1
                    del self.model.jobs[job.published.job_id]
            elif waiting(job) or (not job.started and job.acks_late is not None):
                swept += 1
                job.bury("expired")
        assert self.store.sweep_expired() == swept

    @rule(place=pick)
    def cancel(self, place: int) -> None:
        job_id = self.known[place % len(self.known)]
        job = self.model.jobs.get(job_id)
        possible = job is not None and waiting(job)
        assert self.store.job_cancel(job_id) is possible
        if possible:
            del self.model.jobs[job_id]

    def _letter_of(self, place: int) -> UUID:
        ids = [job_id for job_id, job in self.model.jobs.items() if dead(job)]
        chosen = ids if ids and place % 4 else self.known
        return chosen[place // 4 % len(chosen)]

    @some(lambda job: job.letters > 0)
    @rule(place=pick)
    def replay(self, place: int) -> None:
        job_id = self._letter_of(place)
        job = self.model.jobs.get(job_id)
        letter = self._last_letter(job_id)
        if letter is None:
            return
        answer = self.store.dead_letter_replay(letter)
        if job is None or job.alive:
            assert answer == "already_resolved"
            return
        key = job.published.idempotency_key
        if key and self.model.holder_of(job.published.queue_name, key) is not None:
            assert answer == "key_conflict"
            return
        assert answer == "replayed"
        job.free("queued")
        job.attempts = job.retries = job.deliveries = 0
        job.due, job.expired = True, False
        job.replays += 1

    @some(lambda job: job.letters > 0)
    @rule(place=pick)
    def discard(self, place: int) -> None:
        job_id = self._letter_of(place)
        job = self.model.jobs.get(job_id)
        letter = self._last_letter(job_id)
        if letter is not None:
            possible = job is not None and dead(job)
            answer = self.store.dead_letter_discard(letter)
            assert answer == ("discarded" if possible else "already_resolved")
            if possible:
                del self.model.jobs[job_id]

    @precondition(lambda machine: sum(map(waiting, machine.model.jobs.values())) > 5)
    @rule(queue_name=st.sampled_from(QUEUES))
    def purge(self, queue_name: str) -> None:
        gone = [
            job_id
            for job_id, job in self.model.jobs.items()
            if job.published.queue_name == queue_name and waiting(job)
        ]
        assert self.store.queue_purge(queue_name) == len(gone)
        for job_id in gone:
            del self.model.jobs[job_id]

    # What always holds

    @invariant()
    def every_job_is_where_the_model_says(self) -> None:
        live = self._rows()
        dead = rows(
            self.store.connection,
            "SELECT * FROM pgqueue.job_dead_letter WHERE resolved_at IS NULL",
        )
        jobs = self.model.jobs
        assert sorted(row["job_id"] for row in live) == sorted(i for i in jobs if jobs[i].alive)
        assert sorted(row["job_id"] for row in dead) == sorted(i for i in jobs if not jobs[i].alive)
        for row in live:
            self._check_live(row, jobs[row["job_id"]])
        for row in dead:
            self._check_dead(row, jobs[row["job_id"]])

    def _check_live(self, row: dict[str, Any], job: Job) -> None:
        seen = {name: row[name] for name in ("status", "attempts", "retries", "deliveries")}
        assert seen == {name: getattr(job, name) for name in seen}
        assert (row["started_at"] is not None) == job.started
        assert row["lease_token"] == job.token
        lease = [row[name] for name in ("lease_name", "lease_holder", "leased_until")]
        assert all(each is not None for each in lease) == (job.token is not None)
        assert all(each is None for each in lease) == (job.token is None)
        assert row["acks_late"] == job.acks_late
        assert row["replays"] == job.replays
        assert row["retries"] == 0 or row["first_failed_at"] is not None
        self._check_fixed(row, job)
        assert row["priority"] == job.published.priority
        assert row["idempotency_key"] == (job.published.idempotency_key or str(row["job_id"]))

    def _check_dead(self, row: dict[str, Any], job: Job) -> None:
        assert (row["failure_code"], row["attempts"]) == (job.code, job.attempts)
        snapshot = row["job_snapshot"]
        assert (snapshot["retries"], snapshot["deliveries"]) == (job.retries, job.deliveries)
        self._check_fixed(row, job)

    @staticmethod
    def _check_fixed(row: dict[str, Any], job: Job) -> None:
        """What no move may change."""
        stamps = vars(job.published.stamps)
        assert {name: row[name] for name in stamps} == stamps
        assert (row["body"], row["envelope"]) == (job.published.body, job.published.envelope)
        assert row["job_kind"] == job.published.job_kind

    @invariant()
    def the_trail_adds_up(self) -> None:
        (found,) = rows(
            self.store.connection,
            "SELECT (SELECT count(*) FROM pgqueue.job_dead_letter) AS letters,"
            " (SELECT count(*) FROM pgqueue.job_event"
            "  WHERE event_type = 'queue_job_dead_lettered') AS told",
        )
        assert found["letters"] == found["told"]

    # Helpers

    def _rows(self) -> list[dict[str, Any]]:
        return rows(self.store.connection, "SELECT * FROM pgqueue.job_queue")

    def _sql(self, change: str, job_id: UUID) -> None:
        self.store.connection.execute(
            f"UPDATE pgqueue.job_queue SET {change} WHERE job_id = %s", [job_id]
        )

    def _transient(self, job: Job) -> bool:
        mine = job.published
        return not mine.durable and mine.idempotency_key is None and job.replays == 0

    def _last_letter(self, job_id: UUID) -> int | None:
        query = "SELECT max(dead_letter_id) AS id FROM pgqueue.job_dead_letter WHERE job_id = %s"
        found: int | None = rows(self.store.connection, query, job_id)[0]["id"]
        return found

    def _held(self, lease: Lease) -> Job | None:
        """The lease's job, if its token is still on the row."""
        job = self.model.jobs.get(lease.job_id)
        return job if job is not None and job.token == lease.lease_token else None

    def _send(self, ref: tuple[UUID, UUID], verdict: Verdict, many: bool) -> bool | None:
        if isinstance(verdict, FailTransient | FailPermanent):
            if many:
                return self.store.settle([(ref, verdict)])[0]
            if isinstance(verdict, FailTransient):
                return self.store.fail_transient(*ref, verdict)
            return self.store.fail_permanent(*ref, verdict)
        if many:
            sent = [(ref, verdict)]
            return self.store.exchange(sent, [], lease_name="w", lease_holder="h").settled[0]
        if isinstance(verdict, Progress):
            return self.store.progress(*ref, acks_late=verdict.acks_late)
        if isinstance(verdict, Succeed):
            return self.store.succeed(*ref)
        assert isinstance(verdict, Release)
        return self.store.release(*ref, requeue=verdict.requeue)


@pytest.fixture
def machine_store(conninfo: str) -> Iterator[JobStore]:
    with psycopg.connect(conninfo, autocommit=True, prepare_threshold=0) as connection:
        connection.execute("SET synchronous_commit = off")
        store = JobStore(connection)
        # The stamps give the leases their time; the reaper must not hold off after a start.
        store.config_set("queue.lease.ttl_seconds", 0.001)
        store.config_set("queue.delivery_limit", DELIVERY_LIMIT)
        store.config_set("queue.retry.max_attempts.default", MAX_ATTEMPTS)
        yield store


def test_state_machine(machine_store: JobStore) -> None:
    # S-2, S-6, S-7, S-8: any sequence of verbs
    JobStates.store = machine_store
    run_state_machine_as_test(
        JobStates,
        settings=settings(
            max_examples=60,
            stateful_step_count=40,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
