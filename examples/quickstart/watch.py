# SPDX-License-Identifier: BSD-3-Clause
"""The demo's eyes: the worker's log as it is written, and the rows of the queue."""

from __future__ import annotations

import contextlib
import queue
import re
import time
from dataclasses import dataclass, field

import psycopg

# Celery's own log lines about tasks.
_TASK_LINE = re.compile(
    r"Task quickstart\.(?P<task>\w+)\[(?P<id>[\w-]+)\] "
    r"(?P<what>received|retry|succeeded|raised unexpected)(?: in [\d.e-]+s)?(?:: (?P<text>.*))?"
)
_WAITING = """
SELECT task_id, split_part(job_kind, '.', 2), retries, extract(epoch FROM last_error_at)::float8,
       extract(epoch FROM process_after - last_error_at)::float8
FROM pgqueue.job_queue WHERE status = 'retry_waiting'
"""


def tell(began: float, who: str, text: str) -> None:
    print(f"  {time.time() - began:5.1f} s  {who:<15} {text}", flush=True)


@dataclass(frozen=True)
class Wait:
    """A wait before the *run*-th run: planned in the job's row, then seen. Seconds."""

    task: str
    run: int
    planned: float
    failed_at: float
    seen: float | None = None


@dataclass
class Watch:
    """Tells what happens while it happens, and keeps what the demo checks at the end."""

    connection: psycopg.Connection
    lines: queue.Queue[tuple[float, str]]
    began: float
    runs: dict[str, int] = field(default_factory=dict)
    failures: dict[str, int] = field(default_factory=dict)
    waits: dict[tuple[str, int], Wait] = field(default_factory=dict)
    results: dict[str, str] = field(default_factory=dict)

    def say(self, task: str, text: str) -> None:
        tell(self.began, task, text)

    def until(self, done: str, *parameters: object, seconds: float = 30.0) -> bool:
        """Watch until the query *done* answers true; return false if it does not in time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self._look(done, parameters):
                self._read()
                return True
        return False

    def _look(self, done: str, parameters: tuple[object, ...]) -> bool:
        with contextlib.suppress(queue.Empty):
            self._line(*self.lines.get(timeout=0.03))
        for row in self.connection.execute(_WAITING):
            self._waiting(*row)
        answer = self.connection.execute(done, parameters).fetchone()
        return bool(answer and answer[0])

    def _read(self) -> None:
        """Read what the worker has printed but a moment ago."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._line(*self.lines.get(timeout=0.3))

    def _waiting(self, task_id: str, task: str, retries: int, failed: float, wait: float) -> None:
        # The row may be seen before the worker's log, which tells what led to it.
        told = self.failures.get(task_id, 0) >= retries
        if told and (task_id, retries) not in self.waits:
            known = Wait(task, retries + 1, wait, failed)
            self.waits[task_id, retries] = known
            self.say(task, f"retry_waiting, run {known.run} is due in {wait:.2f} s")

    def _line(self, at: float, line: str) -> None:
        match = _TASK_LINE.search(line)
        if match is None:
            return
        task, task_id, text = match["task"], match["id"], match["text"] or ""
        if match["what"] == "received":
            self._started(at, task, task_id)
        elif match["what"] == "retry":
            self.failures[task_id] = self.failures.get(task_id, 0) + 1
            reason = text.split("s: ", 1)[-1]
            self.say(task, f"failed for now: {reason}")
        elif match["what"] == "succeeded":
            self.results[task_id] = text.strip("'")
            self.say(task, f"succeeded: {self.results[task_id]}")
        else:
            self.say(task, f"failed for good: {text}")

    def _started(self, at: float, task: str, task_id: str) -> None:
        run = self.runs[task_id] = self.runs.get(task_id, 0) + 1
        before = self.waits.get((task_id, run - 1))
        if before is None or before.seen is not None:
            self.say(task, f"run {run} taken up")
            return
        seen = at - before.failed_at
        self.waits[task_id, run - 1] = Wait(task, run, before.planned, before.failed_at, seen)
        self.say(task, f"run {run} taken up, {seen:.2f} s after the failure")
