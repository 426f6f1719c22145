# SPDX-License-Identifier: BSD-3-Clause
"""Wait for a condition instead of sleeping for a guess."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    predicate: Callable[[], T],
    timeout: float = 10.0,
    message: str | Callable[[], str] = "",
    *,
    interval: float = 0.02,
) -> T:
    """Return the first true value of *predicate*; fail after *timeout* seconds.

    *message*, or what it returns by then, says what was waited for.
    """
    deadline = time.monotonic() + timeout
    while True:
        late = time.monotonic() >= deadline  # one more look after the deadline
        value = predicate()
        if value:
            return value
        if late:
            what = message() if callable(message) else message
            raise AssertionError(f"not within {timeout:g} s: {what or predicate}; last: {value!r}")
        time.sleep(interval)
