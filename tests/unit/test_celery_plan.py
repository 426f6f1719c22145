# SPDX-License-Identifier: BSD-3-Clause
"""C-3, S-13: which settings hold for a task, and which of them are stamped on its jobs."""

from __future__ import annotations

from typing import Any

from celery import Celery, Task

import celery_ext
from celery_ext import RetryPolicy
from celery_ext.plan import plan_for, stamps_for
from celery_ext.publish import properties_of

APP_POLICY = RetryPolicy(max_attempts=7, base=5, cap=50, budget=900, retry_for=(OSError,))


def task(base: Any = None, **options: Any) -> Any:
    app = Celery(set_as_current=False)
    if base is not None:
        options["base"] = base

    @app.task(shared=False, **options)
    def work() -> None:
        pass

    return work


def test_only_explicit_settings_are_stamped() -> None:
    assert stamps_for(task()) == {}
    assert stamps_for(task(max_retries=2)) == {"max_attempts": 3}
    assert stamps_for(task(max_retries=None)) == {"max_attempts": 0}
    assert stamps_for(task(default_retry_delay=4)) == {
        "backoff_strategy": "constant",
        "backoff_base_s": 4,
        "backoff_cap_s": 0,
    }
    assert stamps_for(task(retry_backoff=0.5)) == {
        "backoff_strategy": "exponential",
        "backoff_base_s": 0.5,
        "backoff_cap_s": 600,
    }


def test_a_base_class_counts_as_explicit() -> None:
    class Patient(Task):
        max_retries = 9

    assert stamps_for(task(Patient)) == {"max_attempts": 10}


def test_a_policy_is_stamped_whole() -> None:
    policy = RetryPolicy(max_attempts=None, strategy="linear", base=1, cap=9, budget=60)
    assert stamps_for(task(retry_policy=policy, max_retries=2)) == {
        "max_attempts": 0,
        "backoff_strategy": "linear",
        "backoff_base_s": 1,
        "backoff_cap_s": 9,
        "backoff_budget_s": 60,
    }


def test_explicit_settings_win_over_the_apps_policy() -> None:
    stamps = stamps_for(task(max_retries=1, retry_backoff=2), APP_POLICY)
    assert stamps == {
        "max_attempts": 2,
        "backoff_strategy": "exponential",
        "backoff_base_s": 2,
        "backoff_cap_s": 600,
        "backoff_budget_s": 900,
    }


def test_the_apps_policy_leaves_celerys_own_tasks_alone() -> None:
    unlock = task(name="celery.chord_unlock", max_retries=None, default_retry_delay=1)
    plan = plan_for(unlock, APP_POLICY)
    assert (plan.times, plan.limits) == (False, False)
    assert plan.policy.budget is None
    assert not plan.auto.retries(OSError())
    assert "backoff_budget_s" not in stamps_for(unlock, APP_POLICY)


def test_the_apps_policy_adds_what_it_retries() -> None:
    plan = plan_for(task(autoretry_for=(KeyError,)), APP_POLICY)
    assert plan.auto.retries(KeyError())
    assert plan.auto.retries(OSError())
    assert plan.policy.max_attempts == 7


def test_retry_kwargs_are_celerys() -> None:
    plan = plan_for(
        task(autoretry_for=(KeyError,), retry_kwargs={"max_retries": 9, "countdown": 2})
    )
    assert plan.auto_kwargs == {"max_retries": 9, "countdown": 2}
    plan = plan_for(task(retry_backoff=1, retry_kwargs={"max_retries": 9, "countdown": 2}))
    assert plan.auto_kwargs == {"max_retries": 9}


def test_a_message_carries_stamps_and_the_way_of_acknowledging() -> None:
    work = task(max_retries=2, acks_late=True)
    work.app.pgqueue_retry_policy = None
    assert properties_of(work.app, work.name) == {"acks_late": True, "stamps": {"max_attempts": 3}}
    assert properties_of(work.app, "unknown") == {}


def published(app: Celery, **options: Any) -> dict[str, Any]:
    """The properties a message of `app.work` is published with."""
    seen: dict[str, Any] = {}

    class Nowhere:
        def publish(self, body: Any, **fields: Any) -> None:
            seen.update(fields)

    @app.task(name="work", max_retries=2, shared=False)
    def work() -> None:
        pass

    message = app.amqp.create_task_message("id", "work", (), {})
    app.amqp.send_task_message(Nowhere(), "work", message, **options)
    return seen


def test_an_app_on_pgqueue_stamps_its_messages() -> None:
    app = Celery(broker="pgqueue://localhost/none", set_as_current=False)
    celery_ext.setup(app)
    assert published(app)["pgqueue"] == {"acks_late": False, "stamps": {"max_attempts": 3}}


def test_a_caller_can_say_more() -> None:
    app = Celery(broker="pgqueue://localhost/none", set_as_current=False)
    celery_ext.setup(app)
    own = published(app, pgqueue={"stamps": {"max_attempts": 9}})["pgqueue"]
    assert own == {"acks_late": False, "stamps": {"max_attempts": 9}}


def test_an_app_on_another_broker_is_left_alone() -> None:
    app = Celery(broker="memory://", set_as_current=False)
    celery_ext.setup(app)
    assert "pgqueue" not in published(app)


def test_setup_again_replaces_only_the_policy() -> None:
    app = Celery(broker="pgqueue://localhost/none", set_as_current=False)
    made = app.amqp
    celery_ext.setup(app, retry_policy=APP_POLICY)
    celery_ext.setup(app)
    assert app.pgqueue_retry_policy is APP_POLICY
    assert app.amqp is made
    stamps = published(app)["pgqueue"]["stamps"]
    assert (stamps["max_attempts"], stamps["backoff_base_s"]) == (3, 5)
    assert len(app.steps["worker"]) == len(app.steps["consumer"]) == 1


def test_an_app_can_still_be_pickled() -> None:
    import pickle

    app = Celery("pickled", broker="pgqueue://localhost/none", set_as_current=False)
    celery_ext.setup(app)
    assert pickle.loads(pickle.dumps(app)).main == "pickled"
