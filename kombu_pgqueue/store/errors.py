# SPDX-License-Identifier: BSD-3-Clause
"""Psycopg's errors in this library's words."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg

from kombu_pgqueue.errors import StoreError, StoreUnavailable

# The session can do no more, or cannot write: the same as a lost connection to whoever holds it.
_LOST_CLASSES = ("08", "28")
_LOST_STATES = frozenset(
    {
        "25006",  # turned read-only: this server is no longer the primary
        "53300",  # too many connections
        "57P01",  # shut down by an administrator
        "57P02",  # crash shutdown
        "57P03",  # cannot connect now: starting up
        "57P05",  # idle session timeout
        "3D000",  # the database does not exist (yet)
    }
)


def as_store_error(error: psycopg.Error) -> StoreError:
    """Translate, keeping the server's own sentence."""
    state = error.sqlstate
    said = (error.diag.message_primary, error.diag.message_hint)
    text = ": ".join(part for part in said if part) or " ".join(str(error).split())
    if state is None:
        lost = isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError))
    else:
        lost = state in _LOST_STATES or state.startswith(_LOST_CLASSES)
    return (StoreUnavailable if lost else StoreError)(text or type(error).__name__, sqlstate=state)


@contextmanager
def store_errors() -> Iterator[None]:
    """Let no driver error out: `StoreUnavailable` for a lost session, `StoreError` otherwise."""
    try:
        yield
    except psycopg.Error as error:
        raise as_store_error(error) from error
