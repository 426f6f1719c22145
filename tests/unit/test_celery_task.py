# SPDX-License-Identifier: BSD-3-Clause
"""C-2, C-3, C-4: what a task's retry becomes, on each pool, without a broker."""

from __future__ import annotations

import pickle
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery, Task, signals
from celery.exceptions import Ignore, Reject, Retry
from kombu.common import Broadcast
from kombu.transport import memory

from celery_ext import RetryPolicy, capture, outcome, publish
from celery_ext.capture import CapturedRetry, JobRetry
from kombu_pgqueue.verdicts import Changes, FailPermanent, FailTransient, Succeed
from tests.support.delivery import Delivery, make_app

POOLS = pytest.mark.parametrize("pool", ["prefork", "threads"])


class Passing(Exception):
    """Goes away by itself."""


class Unpicklable(Exception):
    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} {two}")


@pytest.fixture
def app() -> Celery:
    outcome.connect()
    app = make_app()
    app.pgqueue_retry_policy = None
    return app


@POOLS
def test_a_retry_is_one_update_with_nothing_changed(app: Celery, pool: str) -> None:
    @app.task(bind=True)
    def work(self: Task, *args: Any, **kwargs: Any) -> None:
        raise self.retry(countdown=2.5, exc=Passing("not yet"))

    verdict = Delivery(work, (1, [2]), {"a": "ä"}, pool=pool, retries=1).run()
    assert verdict == FailTransient(
        error_code=f"{__name__}.Passing",
        error_message="not yet",
        delay=2.5,
        retries=2,
        changes=Changes(),
        actor="w@test",
    )


def test_changed_arguments_queue_priority_and_expiry_are_carried(app: Celery) -> None:
    @app.task(bind=True)
    def work(self: Task, number: int) -> None:
        raise self.retry(args=(number + 1,), queue="slow", priority=7, countdown=0, expires=60)

    delivery = Delivery(work, (1,))
    verdict = delivery.run()
    assert verdict.delay == 0
    assert verdict.changes.queue_name == "slow"
    assert verdict.changes.priority == 7
    assert verdict.changes.body.startswith(b"[[2], {}")
    assert 59 < verdict.changes.expires_in <= 60
    assert '"argsrepr": "(2,)"' in verdict.changes.envelope
    # The next retry starts from there.
    assert '{"exchange": "", "routing_key": "slow"}' in verdict.changes.envelope


def test_arguments_the_task_has_altered_are_sent_as_they_are_now(app: Celery) -> None:
    @app.task(bind=True)
    def work(self: Task, done: list[int]) -> None:
        done.append(1)
        raise self.retry(countdown=1)

    assert Delivery(work, ([],)).run().changes.body.startswith(b"[[[1]], {}")


def test_another_publishers_spacing_is_left_alone(app: Celery) -> None:
    @app.task(bind=True)
    def work(self: Task, **kwargs: Any) -> None:
        raise self.retry(countdown=1)

    body = b'[[],{"b":1,\n"a":2},{"callbacks":null,"errbacks":null,"chain":null,"chord":null}]'
    assert Delivery(work, body=body).run().changes == Changes()


def test_an_eta_becomes_a_delay(app: Celery) -> None:
    @app.task(bind=True)
    def work(self: Task) -> None:
        raise self.retry(eta=self.app.now() + timedelta(seconds=90))

    assert 89 < Delivery(work).run().delay <= 90


def test_the_default_delay_stands_without_a_policy(app: Celery) -> None:
    @app.task(bind=True)
    def work(self: Task) -> None:
        self.default_retry_delay = 77  # as late as this
        raise self.retry()

    assert Delivery(work).run().delay == 77


def test_backoff_holds_for_a_retry_by_hand_too(app: Celery) -> None:
    @app.task(bind=True, retry_backoff=0.5, retry_jitter=False)
    def work(self: Task) -> None:
        raise self.retry()

    assert [Delivery(work, retries=n).run().delay for n in range(3)] == [0.5, 1, 2]


def test_autoretry_keeps_fractions_and_has_a_floor(app: Celery) -> None:
    @app.task(autoretry_for=(Passing,), retry_backoff=0.5)
    def work() -> None:
        raise Passing

    delays = [Delivery(work, retries=1).run().delay for _ in range(50)]
    assert all(0.8 <= delay <= 1.2 for delay in delays)
    assert len(set(delays)) > 1


@POOLS
def test_exhaustion_is_told_from_a_fatal_error(app: Celery, pool: str) -> None:
    @app.task(autoretry_for=(Passing,), max_retries=2)
    def listed() -> None:
        raise Passing("again")

    @app.task
    def unlisted() -> None:
        raise Passing("once")

    verdict = Delivery(listed, retries=2, pool=pool).run()
    assert isinstance(verdict, FailPermanent)
    assert (verdict.failure_code, verdict.error_message) == ("exhausted", "again")
    assert (verdict.detail["retries"], verdict.detail["max_retries"]) == (2, 2)
    assert verdict.detail["type"] == f"{__name__}.Passing"
    assert "raise Passing" in verdict.detail["traceback"]
    verdict = Delivery(unlisted, pool=pool).run()
    assert (verdict.failure_code, verdict.error_message) == ("fatal", "once")


@POOLS
def test_an_exception_that_cannot_be_pickled_keeps_its_code_and_name(
    app: Celery, pool: str
) -> None:
    @app.task(bind=True, max_retries=0)
    def work(self: Task) -> None:
        raise self.retry(exc=Unpicklable("a", "b"))

    verdict = Delivery(work, pool=pool).run()
    assert verdict.failure_code == "exhausted"
    assert verdict.detail["type"] == f"{__name__}.Unpicklable"


def test_max_retries_of_one_call_does_not_leak(app: Celery) -> None:
    @app.task(bind=True, autoretry_for=(Passing,), max_retries=5)
    def work(self: Task, limit: int | None) -> None:
        if limit is not None:
            raise self.retry(max_retries=limit, countdown=1)
        raise Passing

    assert Delivery(work, (1,), retries=1).run().failure_code == "exhausted"
    assert isinstance(Delivery(work, (9,), retries=7).run(), FailTransient)
    assert isinstance(Delivery(work, (None,), retries=4).run(), FailTransient)
    assert Delivery(work, (None,), retries=5).run().failure_code == "exhausted"
    assert not hasattr(work, "override_max_retries")


def test_no_limit_means_none(app: Celery) -> None:
    @app.task(bind=True, max_retries=None)
    def work(self: Task) -> None:
        raise self.retry(countdown=1)

    assert isinstance(Delivery(work, retries=10_000).run(), FailTransient)


class TestPolicies:
    policy = RetryPolicy(
        max_attempts=3, base=10, jitter=False, budget=25, retry_for=(Passing,), fatal_for=(OSError,)
    )

    def test_a_tasks_own_policy_retries_unasked(self, app: Celery) -> None:
        @app.task(retry_policy=self.policy)
        def work() -> None:
            raise Passing

        assert Delivery(work).run().delay == 10
        assert Delivery(work, retries=1).run().delay == 20
        assert Delivery(work, retries=2).run().failure_code == "exhausted"
        assert Delivery(work, retries=1, spent=5.1).run().failure_code == "budget_exhausted"

    def test_fatal_errors_stay_fatal_when_the_task_asks(self, app: Celery) -> None:
        @app.task(bind=True, retry_policy=self.policy)
        def work(self: Task) -> None:
            raise self.retry(exc=FileNotFoundError("gone"))

        verdict = Delivery(work).run()
        assert verdict.failure_code == "fatal"
        assert verdict.detail["type"] == "FileNotFoundError"

    def test_a_named_countdown_counts_against_the_budget(self, app: Celery) -> None:
        @app.task(bind=True, retry_policy=self.policy)
        def work(self: Task, countdown: float) -> None:
            raise self.retry(countdown=countdown)

        assert Delivery(work, (25,)).run().delay == 25
        assert Delivery(work, (26,)).run().failure_code == "budget_exhausted"

    def test_the_apps_policy_fills_what_a_task_leaves_open(self, app: Celery) -> None:
        @app.task(bind=True)
        def bare(self: Task) -> None:
            raise self.retry()

        @app.task(bind=True, default_retry_delay=3, max_retries=7)
        def settled(self: Task) -> None:
            raise self.retry()

        assert Delivery(bare, policy=self.policy).run().delay == 10
        assert Delivery(bare, policy=self.policy, retries=2).run().failure_code == "exhausted"
        assert Delivery(settled, policy=self.policy, retries=6).run().delay == 3
        assert Delivery(settled, policy=self.policy, retries=7).run().failure_code == "exhausted"

    def test_dont_autoretry_for_leaves_a_retry_by_hand_alone(self, app: Celery) -> None:
        @app.task(bind=True, autoretry_for=(Exception,), dont_autoretry_for=(OSError,))
        def work(self: Task, by_hand: bool) -> None:
            if by_hand:
                raise self.retry(exc=OSError("busy"), countdown=1)
            raise OSError("busy")

        assert isinstance(Delivery(work, (True,)).run(), FailTransient)
        assert Delivery(work, (False,)).run().failure_code == "fatal"

    def test_something_else_as_a_policy_is_refused_by_name(self, app: Celery) -> None:
        @app.task(retry_policy="often")
        def work() -> None:
            pass

        with pytest.raises(TypeError, match="retry_policy of task tests"):
            Delivery(work)


class TestUserCode:
    """C-1: whatever base class, override or signal."""

    def test_signals_and_an_overridden_apply_async_see_the_retry(self, app: Celery) -> None:
        seen: list[Any] = []

        class Traced(Task):
            def apply_async(self, *args: Any, **options: Any) -> Any:
                headers = dict(options.pop("headers", None) or {}, trace=f"t{options['retries']}")
                return super().apply_async(*args, headers=headers, **options)

        @app.task(base=Traced, bind=True)
        def work(self: Task) -> None:
            raise self.retry(countdown=1)

        def before(headers: Any = None, **_: Any) -> None:
            seen.append(("before", headers["retries"], headers["trace"]))

        def after(headers: Any = None, **_: Any) -> None:
            seen.append(("after", headers["retries"]))

        def retried(request: Any = None, reason: Any = None, **_: Any) -> None:
            seen.append(("retry", type(reason)))

        delivery = Delivery(work)
        listeners = {
            signals.before_task_publish: before,
            signals.after_task_publish: after,
            signals.task_retry: retried,
        }
        for signal, listener in listeners.items():
            signal.connect(listener)
        verdict = delivery.run()
        for signal, listener in listeners.items():
            signal.disconnect(listener)
        assert seen == [("before", 1, "t1"), ("after", 1), ("retry", JobRetry)]
        assert '"trace": "t1"' in verdict.changes.envelope
        assert verdict.changes.body is None

    def test_an_overridden_retry_with_its_own_signature(self, app: Celery) -> None:
        class Own(Task):
            def retry(self, error: Exception, pause: float = 4) -> Any:  # type: ignore[override]
                return super().retry(exc=error, countdown=pause)

        @app.task(base=Own, bind=True)
        def work(self: Any) -> None:
            raise self.retry(Passing("own"))

        verdict = Delivery(work, policy=RetryPolicy()).run()
        assert (verdict.delay, verdict.error_message) == (4, "own")

    def test_a_class_that_defines_call(self, app: Celery) -> None:
        class Wrapped(Task):
            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                return super().__call__(*args, **kwargs)

        @app.task(base=Wrapped, bind=True)
        def work(self: Task) -> None:
            raise self.retry(countdown=3)

        assert Delivery(work).run().delay == 3

    def test_hooks_run_as_celery_defines_them(self, app: Celery) -> None:
        seen: list[str] = []

        class Hooked(Task):
            def on_retry(self, exc: Any, *args: Any) -> None:
                seen.append(f"on_retry {exc!r}")

            def on_failure(self, exc: Any, *args: Any) -> None:
                seen.append(f"on_failure {exc!r}")

        @app.task(base=Hooked, autoretry_for=(Passing,), max_retries=1)
        def work() -> None:
            raise Passing("x")

        Delivery(work).run()
        Delivery(work, retries=1).run()
        assert seen == ["on_retry Passing('x')", "on_failure Passing('x')"]

    def test_a_message_of_another_broker_is_published_as_ever(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> None:
            raise self.retry(countdown=1)

        delivery = Delivery(work, ours=False)
        assert delivery.run() is None or delivery.message.verdict == Succeed()
        assert sent(app) == [1]


def sent(app: Celery, queue: str = "celery") -> list[int]:
    """The `retries` of each message waiting on the in-memory broker."""
    found = []
    with app.connection_for_read() as connection, connection.channel() as channel:
        while (message := channel.basic_get(queue, no_ack=True)) is not None:
            found.append(message.headers["retries"])
    return found


class TestPublished:
    """Where one update cannot say it, Celery's own publishing stands, and the row ends."""

    @pytest.fixture(autouse=True)
    def stamping(self, app: Celery) -> None:
        publish.install(app)
        app.amqp._create_task_sender = lambda: noting(app)

    def test_throw_false_sends_a_message_of_its_own(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> str:
            self.retry(throw=False, countdown=1)
            return "done"

        assert Delivery(work).run() == Succeed()
        assert sent(app) == [1]

    def test_a_swallowed_retry_is_still_sent(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> str:
            try:
                self.retry(countdown=1)
            except Retry:
                return "careless"

        assert Delivery(work).run() == Succeed()
        assert sent(app) == [1]

    def test_a_swallowed_retry_does_not_hide_the_error_after_it(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> str:
            try:
                self.retry(countdown=1)
            except Retry:
                raise Passing("after all") from None

        assert Delivery(work).run().failure_code == "fatal"
        assert sent(app) == [1]

    def test_the_returned_retry_raised_by_hand_is_not_sent_twice(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> None:
            raise self.retry(throw=False, countdown=1)

        assert Delivery(work).run() == Succeed()
        assert sent(app) == [1]

    def test_a_fanout_goes_out_again(self, app: Celery, monkeypatch: Any) -> None:
        # The in-memory transport plays ours, which knows the routes from the database.
        routes = SimpleNamespace(route=lambda exchange, routing_key: ["one", "two"])
        monkeypatch.setattr(memory.Transport, "topology", routes, raising=False)
        app.conf.task_queues = [Broadcast("shout", queue="one"), Broadcast("shout", queue="two")]

        @app.task(bind=True)
        def work(self: Task) -> None:
            raise self.retry(exchange="shout", routing_key="all", countdown=1)

        with app.connection_for_write() as connection:
            for queue in app.conf.task_queues:
                queue(connection.default_channel).declare()
        delivery = Delivery(work)
        assert delivery.run() == Succeed()
        assert (sent(app, "one"), sent(app, "two")) == ([1], [1])


def noting(app: Celery) -> Any:
    """The sender of the extension, on an app whose broker is not ours."""
    raw = publish.AMQP._create_task_sender(app.amqp)

    def send_task_message(producer: Any, name: str, message: Any, **options: Any) -> Any:
        result = raw(producer, name, message, **options)
        publish._note_publication(producer, message)
        return result

    return send_task_message


class TestOtherEnds:
    def test_a_bare_retry_waits_for_its_when(self, app: Celery) -> None:
        @app.task
        def work(when: Any) -> None:
            raise Retry("later", when=when)

        verdict = Delivery(work, (12,)).run()
        assert (verdict.delay, verdict.retries, verdict.error_message) == (12, 1, "later")
        assert Delivery(work, (None,)).run().delay is None

    def test_reject_and_ignore_are_not_retried_automatically(self, app: Celery) -> None:
        @app.task(autoretry_for=(Exception,))
        def work(kind: str) -> None:
            raise Reject("no") if kind == "reject" else Ignore("never mind")

        assert Delivery(work, ("reject",)).run().failure_code == "rejected"
        assert Delivery(work, ("ignore",)).run() == Succeed()

    def test_arguments_that_cannot_be_sent_are_kept_as_rejected(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> None:
            raise self.retry(args=(object(),), countdown=1)

        assert Delivery(work).run().failure_code == "rejected"

    def test_a_wrong_call_of_retry_is_a_bug_not_exhaustion(self, app: Celery) -> None:
        @app.task(bind=True)
        def work(self: Task) -> None:
            raise self.retry((), {}, None, True, None, 1, None, "one too many")

        assert Delivery(work).run().failure_code == "fatal"

    def test_a_task_called_as_a_function_raises_its_own_error(self, app: Celery) -> None:
        @app.task(autoretry_for=(Passing,))
        def inner() -> None:
            raise Passing("inner")

        @app.task
        def outer() -> None:
            inner()

        verdict = Delivery(outer).run()
        assert (verdict.failure_code, verdict.error_message) == ("fatal", "inner")

    def test_an_eager_task_inside_retries_eagerly(self, app: Celery) -> None:
        runs: list[int] = []

        @app.task(bind=True, max_retries=2)
        def inner(self: Task) -> str:
            runs.append(self.request.retries)
            if self.request.retries < 2:
                raise self.retry(countdown=1)
            return "ok"

        @app.task
        def outer() -> Any:
            return inner.apply().result

        assert Delivery(outer).run() == Succeed()
        assert runs == [0, 1, 2]


def test_a_job_retry_survives_pickling() -> None:
    job = CapturedRetry("q", "", "q", b"x", "json", "utf-8", {"id": "1"}, {}, 1.5, 2, None)
    back = pickle.loads(pickle.dumps(JobRetry(exc=Passing("x"), when=1.5, job=job)))
    assert (back.job, back.when, repr(back.exc)) == (job, 1.5, "Passing('x')")
    text = pickle.loads(pickle.dumps(JobRetry(exc="only text", job=job)))
    assert str(text) == "Retry at None: only text"


def test_result_states_are_celerys(app: Celery) -> None:
    app.conf.update(result_backend="cache+memory://", task_ignore_result=False)

    @app.task(bind=True, autoretry_for=(Passing,), max_retries=1)
    def work(self: Task) -> None:
        raise Passing("x")

    retried, failed = Delivery(work), Delivery(work, retries=1)
    retried.run()
    failed.run()
    assert app.AsyncResult(retried.request.id).state == "RETRY"
    assert app.AsyncResult(failed.request.id).state == "FAILURE"
    assert repr(app.AsyncResult(failed.request.id).result) == "Passing('x')"


def test_a_sent_event_goes_its_own_way(app: Celery, monkeypatch: Any) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(capture, "publish_for_real", lambda app, body, **_: seen.append(body))

    @app.task(bind=True)
    def work(self: Task) -> None:
        raise self.retry(countdown=1)

    delivery = Delivery(work)
    app.conf.task_send_sent_event = True
    assert delivery.run().changes == Changes()
    assert [(event["type"], event["retries"]) for event in seen] == [("task-sent", 1)]


def test_the_rpc_backend_can_declare_its_queue(app: Celery) -> None:
    app.conf.update(result_backend="rpc://", task_ignore_result=False)

    @app.task(bind=True)
    def work(self: Task) -> None:
        raise self.retry(countdown=1)

    assert Delivery(work, pool="threads").run().delay == 1
