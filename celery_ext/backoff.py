# SPDX-License-Identifier: BSD-3-Clause
"""How long to wait before the next try: pure arithmetic, the randomness is passed in.

The rule, the same one that the SQL function `fn_job_backoff` follows:

* exponential: the base doubles with every attempt, up to the cap;
* linear: the base times the attempt, up to the cap;
* constant: the base;
* a cap of 0 means "constant at the base", whatever the strategy.

The jitter of 20 % either way comes after the cap, so that jobs that have all reached the cap still
spread out, and never before it: a jittered delay has a floor of 0.8 of the plain one, it cannot
collapse to 0. The result is rounded to the microsecond, which is what an `interval` can hold.
"""

from __future__ import annotations

from math import log2
from typing import Final

STRATEGIES: Final = ("exponential", "linear", "constant")

_JITTER_FLOOR: Final = 0.8
_JITTER_WIDTH: Final = 0.4


def delay(
    attempt: int,
    *,
    base: float,
    cap: float,
    strategy: str = "exponential",
    u: float,
    jitter: bool = True,
) -> float:
    """Seconds to wait after the `attempt`-th try (1-based) has failed.

    `base` and `cap` are seconds; `u` is uniform in [0, 1) and only matters with `jitter`.
    Raises ValueError for an unknown strategy.
    """
    plain = without_jitter(attempt, base=base, cap=cap, strategy=strategy)
    seconds = plain * (_JITTER_FLOOR + u * _JITTER_WIDTH) if jitter else plain
    # To the nearest whole microsecond, ties to even, as PostgreSQL makes an interval of seconds.
    return round(seconds * 1e6) / 1e6


def without_jitter(attempt: int, *, base: float, cap: float, strategy: str) -> float:
    """The delay before jitter, in seconds."""
    if strategy not in STRATEGIES:
        raise ValueError(f"unknown backoff strategy {strategy!r}: use one of {STRATEGIES}")
    if base <= 0:
        return 0.0
    if strategy == "constant" or cap <= 0:
        return float(base)
    attempt = max(attempt, 1)
    if strategy == "linear":
        return float(min(cap, base * attempt))
    # Asked of the logarithms, so that neither attempt 10,000 nor a tiny base overflows a double.
    if attempt - 1 > log2(cap) - log2(base):
        return float(cap)
    return float(min(cap, base * 2.0 ** (attempt - 1)))
