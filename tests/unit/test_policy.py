# SPDX-License-Identifier: BSD-3-Clause
"""C-2, C-3: the policy as a pure value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from celery import Celery

from celery_ext import RetryPolicy
from celery_ext.policy import DeadLetter, Retry


class Passing(Exception):
    """May go away."""


class Worse(Passing):
    """A kind of it that will not."""


POLICY = RetryPolicy(
    max_attempts=3, base=10, cap=100, budget=50, retry_for=(Passing,), fatal_for=(Worse,)
)


def test_it_is_frozen_and_compares_by_value() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        POLICY.base = 1  # type: ignore[misc]
    assert RetryPolicy(retry_for=[OSError]) == RetryPolicy(retry_for=(OSError,))  # type: ignore[arg-type]
    assert hash(POLICY) == hash(dataclasses.replace(POLICY))


def test_a_listed_error_is_retried_after_the_delay() -> None:
    assert POLICY.decide(1, Passing(), 0, 0.5) == Retry(10)
    assert POLICY.decide(2, Passing(), 0, 0.0) == Retry(16)


def test_the_last_attempt_exhausts_it() -> None:
    assert POLICY.decide(3, Passing(), 0, 0.5) == DeadLetter("exhausted")
    unlimited = dataclasses.replace(POLICY, max_attempts=None, budget=None)
    assert unlimited.decide(10_000, Passing(), 0, 0.5) == Retry(100)


def test_an_error_nobody_listed_is_fatal() -> None:
    assert POLICY.decide(1, KeyError(), 0, 0.5) == DeadLetter("fatal")
    assert RetryPolicy().decide(1, Passing(), 0, 0.5) == DeadLetter("fatal")


def test_fatal_wins_over_retry_and_over_the_task() -> None:
    assert POLICY.decide(1, Worse(), 0, 0.5) == DeadLetter("fatal")
    assert POLICY.decide(1, Worse(), 0, 0.5, asked=True) == DeadLetter("fatal")


def test_what_the_task_asks_for_needs_no_listing() -> None:
    assert POLICY.decide(1, KeyError(), 0, 0.5, asked=True) == Retry(10)
    assert POLICY.decide(1, None, 0, 0.5, asked=True) == Retry(10)


def test_the_budget_counts_the_coming_wait() -> None:
    assert POLICY.decide(1, Passing(), 40, 0.5) == Retry(10)
    assert POLICY.decide(1, Passing(), 40.1, 0.5) == DeadLetter("budget_exhausted")
    assert POLICY.decide(1, Passing(), 0, 0.5, delay=51) == DeadLetter("budget_exhausted")
    assert POLICY.decide(3, Passing(), 99, 0.5) == DeadLetter("exhausted")


def test_errors_can_be_named_without_importing_them() -> None:
    name = f"{__name__}.Passing"
    policy = RetryPolicy(retry_for=(name, "OSError"), fatal_for="builtins.FileNotFoundError")  # type: ignore[arg-type]
    assert policy.retries(Worse())
    assert policy.retries(PermissionError())
    assert not policy.retries(FileNotFoundError())
    assert not policy.retries(KeyError())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_attempts", 0),
        ("max_attempts", 2.5),
        ("max_attempts", True),
        ("strategy", "fibonacci"),
        ("base", -1),
        ("base", "30"),
        ("cap", float("nan")),
        ("cap", float("inf")),
        ("budget", -0.1),
        ("retry_for", (42,)),
        ("fatal_for", (int,)),
    ],
)
def test_what_cannot_be_right_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=field):
        RetryPolicy(**{field: value})


class TestFromTask:
    """Celery's own settings, read as a policy."""

    def policy(self, **options: Any) -> RetryPolicy:
        app = Celery(set_as_current=False)

        def work() -> None:
            pass

        return RetryPolicy.from_task(app.task(**options)(work))

    def test_celerys_defaults(self) -> None:
        policy = self.policy()
        assert policy.max_attempts == 4
        assert policy.decide(1, None, 0, 0.0, asked=True) == Retry(180)
        assert policy.retry_for == ()

    def test_max_retries_counts_after_the_first_try(self) -> None:
        assert self.policy(max_retries=2).max_attempts == 3
        assert self.policy(max_retries=0).max_attempts == 1
        assert self.policy(max_retries=None).max_attempts is None

    def test_retry_backoff(self) -> None:
        assert self.policy(retry_backoff=True).delay(3, 0.5) == 4
        assert self.policy(retry_backoff=0.5, retry_jitter=False).delay(1, 0.0) == 0.5
        assert self.policy(retry_backoff=True, retry_jitter=False).delay(30, 0.0) == 600
        assert self.policy(retry_backoff=2, retry_backoff_max=7).delay(9, 0.5) == 7

    def test_a_plain_delay_has_no_jitter(self) -> None:
        assert self.policy(default_retry_delay=2.5).delay(7, 0.0) == 2.5

    def test_what_is_retried_automatically(self) -> None:
        policy = self.policy(autoretry_for=(OSError,), dont_autoretry_for=(FileNotFoundError,))
        assert policy.retries(PermissionError())
        assert policy.decide(1, FileNotFoundError(), 0, 0.5) == DeadLetter("fatal")
