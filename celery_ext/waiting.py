# SPDX-License-Identifier: BSD-3-Clause
"""A wait, in whatever form Celery names it, as seconds from now."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from celery.utils.time import maybe_iso8601, maybe_make_aware


def seconds_until(when: Any, app: Any) -> float | None:
    """Seconds from now until `when`: a number of seconds, a point in time or its ISO 8601 text.

    None, and what is none of these, give None. Never negative.
    """
    if isinstance(when, timedelta):
        return max(when.total_seconds(), 0.0)
    if isinstance(when, (int, float)) and not isinstance(when, bool):
        return max(float(when), 0.0)
    if isinstance(when, str):
        try:
            when = maybe_iso8601(when)
        except ValueError:
            return None
    if not isinstance(when, datetime):
        return None
    seconds: float = (maybe_make_aware(when, app.timezone) - app.now()).total_seconds()
    return max(seconds, 0.0)
