# SPDX-License-Identifier: BSD-3-Clause
"""What PostgreSQL's text and jsonb cannot hold, made visible instead of refused.

Bodies and envelopes never come here: they are stored byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def storable(text: str) -> str:
    r"""NUL becomes the four characters `\x00`; a lone surrogate becomes its escape."""
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def storable_json(value: Mapping[str, Any]) -> str:
    """JSON text that jsonb takes; what JSON does not know is kept as its repr."""
    return json.dumps(_clean(value), default=repr)


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return storable(value)
    if isinstance(value, Mapping):
        return {storable(str(key)): _clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(item) for item in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return storable(repr(value))
