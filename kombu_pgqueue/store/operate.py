# SPDX-License-Identifier: BSD-3-Clause
"""An operator's verbs: look, configure, replay, discard."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any, cast
from uuid import UUID

from kombu_pgqueue.store.base import StoreBase
from kombu_pgqueue.store.errors import store_errors
from kombu_pgqueue.values import DeadLetter


class OperatorVerbs(StoreBase):
    """Dead letters, single jobs, configuration, health."""

    def dead_letters(
        self,
        *,
        queue: str | None = None,
        kind: str | None = None,
        code: str | None = None,
        task_id: str | None = None,
        state: str = "open",
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = 100,
        after: tuple[datetime, int] | None = None,
    ) -> list[DeadLetter]:
        """One page, latest failure first. `after` is the last row's `(last_failed_at, id)`.

        `state` is open, resolved or all; `since` and `until` bound `last_failed_at`.
        """
        if state not in ("open", "resolved", "all"):
            raise ValueError(f"unknown state {state!r}: open, resolved or all")
        filters = {
            "queue": queue,
            "kind": kind,
            "code": code,
            "task_id": task_id,
            "state": state,
            "since": since,
            "until": until,
            "limit": limit,
            "after_time": after and after[0],
            "after_id": after and after[1],
        }
        with store_errors():
            rows = self._send("dead_letters", filters, prepare=False).fetchall()
        return [DeadLetter(*row) for row in rows]

    def dead_letter(self, dead_letter_id: int) -> DeadLetter | None:
        """One of them, resolved or not."""
        rows = self._rows("dead_letter", {"dead_letter_id": dead_letter_id})
        return DeadLetter(*rows[0]) if rows else None

    def dead_letter_replay(
        self, dead_letter_id: int, *, actor: str | None = None, note: str | None = None
    ) -> str:
        """`replayed`, or why not: `not_found`, `already_resolved`, `key_conflict`, `disabled`."""
        return self._resolve("dead_letter_replay", dead_letter_id, actor, note)

    def dead_letter_discard(
        self, dead_letter_id: int, *, actor: str | None = None, note: str | None = None
    ) -> str:
        """`discarded`, or why not: `not_found`, `already_resolved`."""
        return self._resolve("dead_letter_discard", dead_letter_id, actor, note)

    def dead_letter_supersede(
        self, dead_letter_id: int, *, actor: str | None = None, note: str | None = None
    ) -> str:
        """`superseded`, or why not: `not_found`, `already_resolved`."""
        return self._resolve("dead_letter_supersede", dead_letter_id, actor, note)

    def _resolve(self, name: str, dead_letter_id: int, actor: str | None, note: str | None) -> str:
        args = {"dead_letter_id": dead_letter_id, "actor": actor, "note": note}
        return str(self._value(name, args))

    def dead_letter_health(self) -> dict[str, Any]:
        """Open counts, the oldest first failure, counts by failure code."""
        return cast("dict[str, Any]", self._value("dead_letter_health", {}))

    def queue_health(self) -> list[dict[str, Any]]:
        """One row per queue that holds anything: counts by state, age of the oldest ready job."""
        with store_errors():
            cursor = self._send("queue_health", {})
            names = [column.name for column in cursor.description or ()]
            return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]

    def job_get(self, job_id: UUID) -> dict[str, Any] | None:
        """One job, live or dead, with its stamps."""
        return cast("dict[str, Any] | None", self._value("job_get", {"job_id": job_id}))

    def job_cancel(
        self, job_id: UUID, *, actor: str | None = None, reason: str | None = None
    ) -> bool:
        """Cancel a job that is not running; the audit trail keeps who and why."""
        args = {"job_id": job_id, "actor": actor, "reason": reason}
        return bool(self._value("job_cancel", args))

    def config_get(self, key: str) -> Any:
        """The value written under exactly this key, None if there is none."""
        rows = self._rows("config_get", {"key": key})
        return rows[0][0] if rows else None

    def config_set(self, key: str, value: Any, *, actor: str | None = None) -> None:
        """Write a setting, recorded with `actor`. Unknown keys and wrong types are refused."""
        with store_errors(), self.connection.transaction():
            if actor is not None:
                self.connection.execute(
                    "SELECT set_config('pgqueue_client.actor', %s, true)", [actor]
                )
            self._send("config_set", {"key": key, "value": json.dumps(value)})

    def setting(self, key: str, *, job_kind: str = "", queue_name: str = "") -> Any:
        """The value in force for a task and queue: task name, queue, default; None if unset."""
        args = {"key": key, "job_kind": job_kind, "queue_name": queue_name}
        return self._value("setting", args)
