# SPDX-License-Identifier: BSD-3-Clause
"""S-15: the arithmetic of waiting."""

from __future__ import annotations

import pytest

from celery_ext.backoff import delay


def plain(attempt: int, **options: object) -> float:
    settings: dict[str, object] = {"base": 30, "cap": 3600, "u": 0.5, **options}
    return delay(attempt, **settings)  # type: ignore[arg-type]


def test_the_exponential_delay_doubles_up_to_the_cap() -> None:
    assert [plain(n) for n in range(1, 10)] == [30, 60, 120, 240, 480, 960, 1920, 3600, 3600]


def test_the_linear_delay_grows_by_the_base_up_to_the_cap() -> None:
    assert [plain(n, strategy="linear", cap=100) for n in (1, 2, 3, 4)] == [30, 60, 90, 100]


def test_the_constant_delay_is_the_base_whatever_the_cap() -> None:
    assert [plain(n, strategy="constant", cap=10) for n in (1, 5)] == [30, 30]


@pytest.mark.parametrize("strategy", ["exponential", "linear", "constant"])
def test_a_cap_of_zero_means_constant_at_the_base(strategy: str) -> None:
    assert [plain(n, strategy=strategy, cap=0) for n in (1, 2, 10_000)] == [30, 30, 30]


@pytest.mark.parametrize("base", [1e-300, 1e-6, 0.5, 30, 1e300])
@pytest.mark.parametrize("attempt", [1, 64, 1_100, 10_000, 2**31])
def test_no_attempt_overflows(attempt: int, base: float) -> None:
    assert 0 <= plain(attempt, base=base, cap=3600) <= 3600


def test_a_base_of_zero_never_waits() -> None:
    assert plain(10_000, base=0) == 0


def test_the_jitter_comes_after_the_cap_and_has_a_floor() -> None:
    assert plain(20, u=0.0) == 2880
    assert plain(20, u=1.0) == 4320
    assert plain(20, u=0.0, jitter=False) == 3600


def test_fractions_are_kept_to_the_microsecond() -> None:
    assert plain(2, base=0.3, u=0.25) == 0.54
    assert plain(1, base=0.0000004, jitter=False) == 0.0
    assert plain(1, base=1 / 3, jitter=False) == 0.333333


def test_an_unknown_strategy_is_named() -> None:
    with pytest.raises(ValueError, match="fibonacci"):
        plain(1, strategy="fibonacci")
