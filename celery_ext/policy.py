# SPDX-License-Identifier: BSD-3-Clause
"""What becomes of a failure: a frozen, pure value decides.

A policy reads no clock, no database and no random source; whoever asks hands those in. So the
function a test verifies is the function a worker runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite, isnan
from typing import Any

from celery_ext import backoff

#: An exception class, or its dotted name for one that should not be imported here.
ErrorSpec = type[BaseException] | str

DEFAULT_MAX_ATTEMPTS = 5
DEFAULT_BASE_S = 30.0
DEFAULT_CAP_S = 3600.0


@dataclass(frozen=True)
class Retry:
    """Run it again after `delay` seconds."""

    delay: float


@dataclass(frozen=True)
class DeadLetter:
    """Give it up; `code` is `exhausted`, `fatal` or `budget_exhausted`."""

    code: str


Decision = Retry | DeadLetter


@dataclass(frozen=True)
class RetryPolicy:
    """When a failed task runs again, and when it is given up.

    - `max_attempts`: tries in all, the first one included; None: no limit.
    - `strategy`: `exponential`, `linear` or `constant`; `base` and `cap` in seconds (a cap of 0
      means constant at the base); `jitter`: spread each delay by 20 % either way.
    - `budget`: seconds a job may spend waiting between tries, all together; None: no limit.
    - `retry_for`: exceptions that are retried although the task did not ask for it. An exception
      that is not listed is final, as in Celery, unless the task calls `self.retry()`.
    - `fatal_for`: exceptions that are final even then; it wins over `retry_for`.

    Both take classes (subclasses count) and dotted names such as `"requests.Timeout"`.
    Raises ValueError or TypeError, naming the field, for values that cannot be right.
    """

    max_attempts: int | None = DEFAULT_MAX_ATTEMPTS
    strategy: str = "exponential"
    base: float = DEFAULT_BASE_S
    cap: float = DEFAULT_CAP_S
    jitter: bool = True
    budget: float | None = None
    retry_for: tuple[ErrorSpec, ...] = ()
    fatal_for: tuple[ErrorSpec, ...] = ()

    def __post_init__(self) -> None:
        if self.max_attempts is not None:
            if isinstance(self.max_attempts, bool) or not isinstance(self.max_attempts, int):
                raise TypeError(f"max_attempts must be an int or None, not {self.max_attempts!r}")
            if self.max_attempts < 1:
                raise ValueError(f"max_attempts must be at least 1, not {self.max_attempts}")
        if self.strategy not in backoff.STRATEGIES:
            raise ValueError(f"strategy must be one of {backoff.STRATEGIES}, not {self.strategy!r}")
        _check_seconds("base", self.base)
        _check_seconds("cap", self.cap)
        if self.budget is not None:
            _check_seconds("budget", self.budget)
        object.__setattr__(self, "retry_for", _as_specs("retry_for", self.retry_for))
        object.__setattr__(self, "fatal_for", _as_specs("fatal_for", self.fatal_for))

    def delay(self, attempt: int, u: float) -> float:
        """Seconds to wait after the `attempt`-th try; `u` is uniform in [0, 1)."""
        return backoff.delay(
            attempt,
            base=self.base,
            cap=self.cap,
            strategy=self.strategy,
            u=u,
            jitter=self.jitter,
        )

    def decide(
        self,
        attempt: int,
        error: BaseException | None,
        spent: float,
        u: float,
        *,
        asked: bool = False,
        delay: float | None = None,
    ) -> Decision:
        """What to do now that the `attempt`-th try (1-based) ended with `error`.

        `spent` is how many seconds the job has waited between its tries so far and `u` is uniform
        in [0, 1). `asked`: the task itself asked for the retry, so `retry_for` is not consulted.
        `delay` is a wait the task named; None lets the policy compute it.
        """
        if error is not None and self.is_fatal(error):
            return DeadLetter("fatal")
        if not asked and (error is None or not self.retries(error)):
            return DeadLetter("fatal")
        if self.max_attempts is not None and attempt >= self.max_attempts:
            return DeadLetter("exhausted")
        wait = self.delay(attempt, u) if delay is None else delay
        if self.budget is not None and spent + wait > self.budget:
            return DeadLetter("budget_exhausted")
        return Retry(wait)

    def is_fatal(self, error: BaseException) -> bool:
        """Is it listed as final?"""
        return _matches(error, self.fatal_for)

    def retries(self, error: BaseException) -> bool:
        """Is it listed as worth another try, and not as final?"""
        return _matches(error, self.retry_for) and not self.is_fatal(error)

    @classmethod
    def from_task(cls, task: Any) -> RetryPolicy:
        """The policy that Celery's own settings on `task` describe.

        `max_retries` (None: no limit) counts the tries after the first. `retry_backoff` turns on
        the exponential strategy with that base (True: 1 second; fractions are kept) up to
        `retry_backoff_max`, spread by `retry_jitter`; without it every wait is
        `default_retry_delay`. `autoretry_for` and `dont_autoretry_for` say what is retried.
        """
        max_retries = task.max_retries
        base = float(getattr(task, "retry_backoff", False) or 0.0)
        retry_for = tuple(getattr(task, "autoretry_for", None) or ())
        fatal_for = tuple(getattr(task, "dont_autoretry_for", None) or ())
        max_attempts = None if max_retries is None else max(int(max_retries), 0) + 1
        if base > 0:
            return cls(
                max_attempts=max_attempts,
                strategy="exponential",
                base=base,
                cap=float(getattr(task, "retry_backoff_max", 600)),
                jitter=bool(getattr(task, "retry_jitter", True)),
                retry_for=retry_for,
                fatal_for=fatal_for,
            )
        return cls(
            max_attempts=max_attempts,
            strategy="constant",
            base=float(task.default_retry_delay or 0.0),
            cap=0.0,
            jitter=False,
            retry_for=retry_for,
            fatal_for=fatal_for,
        )


def _check_seconds(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number of seconds, not {value!r}")
    if isnan(value) or not isfinite(value) or value < 0:
        raise ValueError(f"{name} must be finite and not negative, not {value!r}")


def _as_specs(name: str, specs: Iterable[ErrorSpec]) -> tuple[ErrorSpec, ...]:
    if isinstance(specs, (str, type)):
        specs = (specs,)
    checked = tuple(specs)
    for spec in checked:
        if isinstance(spec, str) or (isinstance(spec, type) and issubclass(spec, BaseException)):
            continue
        raise TypeError(f"{name} takes exception classes and their dotted names, not {spec!r}")
    return checked


def _matches(error: BaseException, specs: tuple[ErrorSpec, ...]) -> bool:
    classes = tuple(spec for spec in specs if isinstance(spec, type))
    if isinstance(error, classes):
        return True
    names = {spec for spec in specs if isinstance(spec, str)}
    return bool(names) and any(
        f"{ancestor.__module__}.{ancestor.__qualname__}" in names
        or (ancestor.__module__ == "builtins" and ancestor.__qualname__ in names)
        for ancestor in type(error).__mro__
    )
