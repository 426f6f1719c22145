# SPDX-License-Identifier: BSD-3-Clause
"""Dead letters for programs: list, look, replay, discard, count."""

from __future__ import annotations

import builtins
import getpass
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_ext.broker import open_store
from kombu_pgqueue.values import DeadLetter

if TYPE_CHECKING:
    from kombu_pgqueue.store import JobStore

_PAGE = 200


@dataclass(frozen=True)
class Filter:
    """Which dead letters: all conditions that are not None must hold.

    `since` and `until` bound the time of the last failure; `state` is `open`, `resolved` or `all`.
    """

    queue: str | None = None
    task: str | None = None
    code: str | None = None
    task_id: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    state: str = "open"

    @property
    def selects_all(self) -> bool:
        """Does it name no condition but the state?"""
        return self == Filter(state=self.state)


class DeadLetterQueue:
    """The dead letters of one schema. `actor` is recorded with every resolution."""

    def __init__(self, store: JobStore, *, actor: str | None = None) -> None:
        self._store = store
        self._actor = actor or default_actor()

    @classmethod
    @contextmanager
    def of(cls, app: Any, *, actor: str | None = None) -> Iterator[DeadLetterQueue]:
        """Those of a Celery app's broker, on a session that is closed at the end.

        Raises PgQueueError when the broker's settings or the database do not allow it.
        """
        with open_store(app, "pgqueue dead-letter") as store:
            yield cls(store, actor=actor)

    def list(
        self, which: Filter | None = None, *, limit: int | None = None
    ) -> Iterator[DeadLetter]:
        """The latest failure first, read page by page; `limit` None: all of them."""
        which = which or Filter()
        after: tuple[datetime, int] | None = None
        left = limit
        while left is None or left > 0:
            page = self._store.dead_letters(
                queue=which.queue,
                kind=which.task,
                code=which.code,
                task_id=which.task_id,
                state=which.state,
                since=which.since,
                until=which.until,
                limit=_PAGE if left is None else min(_PAGE, left),
                after=after,
            )
            if not page:
                return
            yield from page
            after = page[-1].last_failed_at, page[-1].dead_letter_id
            left = None if left is None else left - len(page)

    def select(self, which: Filter) -> builtins.list[int]:
        """The ids of the open ones among those, oldest failure first: a fixed list to work on."""
        found = [letter.dead_letter_id for letter in self.list(replace(which, state="open"))]
        found.reverse()
        return found

    def get(self, dead_letter_id: int) -> DeadLetter | None:
        """One of them, resolved or not."""
        return self._store.dead_letter(dead_letter_id) if _can_be_id(dead_letter_id) else None

    def replay(self, dead_letter_id: int, *, note: str | None = None) -> str:
        """Queue it again, its message byte for byte. `replayed`, or the reason of the refusal."""
        if not _can_be_id(dead_letter_id):
            return "not_found"
        return self._store.dead_letter_replay(dead_letter_id, actor=self._actor, note=note)

    def discard(self, dead_letter_id: int, *, note: str | None = None) -> str:
        """Close it for good. `discarded`, or the reason of the refusal."""
        if not _can_be_id(dead_letter_id):
            return "not_found"
        return self._store.dead_letter_discard(dead_letter_id, actor=self._actor, note=note)

    def health(self) -> dict[str, Any]:
        """Counts of the open ones, by failure code, and the oldest first failure."""
        return self._store.dead_letter_health()


def _can_be_id(number: int) -> bool:
    # A bigint; another number must not stop the work on those that follow it.
    return 0 < number < 2**63


def default_actor() -> str:
    """Who is at work: `user@host`."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a user without a name, as in some containers
        user = "unknown"
    return f"{user}@{socket.gethostname()}"
