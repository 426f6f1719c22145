# SPDX-License-Identifier: BSD-3-Clause
"""One delivery without a broker: a message that records its verdicts, run as each pool runs it."""

from __future__ import annotations

import functools
import os
import pickle
import time
import uuid
from datetime import datetime, timezone
from types import SimpleNamespace
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer, trace_task_ret
from celery.worker.request import create_request_cls
from kombu.message import Message
from kombu.utils.imports import symbol_by_name
from kombu.utils.json import dumps as json_dumps

from celery_ext.capture import Capture
from celery_ext.task import adopt_all
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import FailPermanent, Release, Succeed


class FakeMessage(Message):
    """Keeps the first final verdict, like a real delivery; `said` is all that was said to it."""

    def __init__(self, lease: Lease, **fields: Any) -> None:
        super().__init__(body=lease.body, channel=None, **fields)
        self.lease = lease
        self.early = False
        self.said: list[Any] = []
        self.verdict: Any = None

    def started(self) -> None:
        self.said.append("started early" if self.early else "started")

    def settle(self, verdict: Any) -> None:
        self.said.append(verdict)
        if self.verdict is None:
            self.verdict = verdict

    def ack(self, multiple: bool = False) -> None:
        self.said.append("ack")
        if not self.early:
            self.verdict = self.verdict or Succeed()

    def reject(self, requeue: bool = False) -> None:
        self.said.append("reject")
        outcome = Release(requeue=True) if requeue else FailPermanent("rejected", "")
        self.verdict = self.verdict or outcome


def make_app(**conf: Any) -> Celery:
    """An app whose broker is never reached."""
    app = Celery("delivery", broker="memory://", set_as_current=False)
    app.conf.update(task_ignore_result=True, **conf)
    # Tasks of one test must not turn up in the app of another.
    app.task = functools.partial(app.task, shared=False)
    return app


class Delivery:
    """A message for `task`, and what becomes of it. `pool` is prefork, threads or solo."""

    def __init__(
        self,
        task: Any,
        args: Any = (),
        kwargs: Any = None,
        *,
        retries: int = 0,
        spent: float = 0.0,
        queue: str = "celery",
        priority: int = 0,
        pool: str = "prefork",
        policy: Any = None,
        ours: bool = True,
        headers: dict[str, Any] | None = None,
        body: bytes | None = None,
    ) -> None:
        self.task, self.pool, app = task, pool, task.app
        adopt_all(app, policy)
        task_id = str(uuid.uuid4())
        # Published by Celery itself, to nowhere: exactly what a client would have sent.
        capture = Capture(app, SimpleNamespace(id=task_id, delivery_info=None))
        task.apply_async(
            args,
            kwargs,
            task_id=task_id,
            producer=capture.producer,
            queue=queue,
            priority=priority,
            retries=retries,
        )
        sent = capture.job
        assert sent is not None
        sent_headers = {**sent.headers, **(headers or {})}
        kind, encoding = sent.content_type, sent.content_encoding
        envelope = {
            "content-type": kind,
            "content-encoding": encoding,
            "headers": sent_headers,
            "properties": {
                **sent.properties,
                "delivery_info": {"exchange": "", "routing_key": queue},
            },
        }
        body_bytes = sent.body if body is None else body
        now = datetime.now(timezone.utc)
        lease = Lease(
            job_id=uuid.uuid4(),
            lease_token=uuid.uuid4(),
            queue_name=queue,
            job_kind=task.name,
            task_id=task_id,
            priority=priority,
            process_after=now,
            seq=1,
            attempts=retries,
            retries=retries,
            deliveries=0,
            replays=0,
            redelivered=False,
            backoff_spent_s=spent,
            leased_until=now,
            envelope=json_dumps(envelope),
            body=body_bytes,
        )
        job = {"job_id": str(lease.job_id), "backoff_spent": spent, "attempts": retries}
        properties = {**envelope["properties"], **({"pgqueue": job} if ours else {})}
        self.message = FakeMessage(
            lease,
            content_type=kind,
            content_encoding=encoding,
            headers={**sent_headers, "eta": None},
            properties=properties,
            delivery_info={"exchange": "", "routing_key": queue, "redelivered": False},
            delivery_tag="1",
        )
        if not ours:
            self.message.settle = None  # type: ignore[assignment]
        self.request = self._request(app)

    def _request(self, app: Celery) -> Any:
        pool = SimpleNamespace(apply_async=None)
        base = symbol_by_name(self.task.Request)
        cls = create_request_cls(base, self.task, pool, "w@test", None, app=app)
        return cls(
            self.message,
            on_ack=self.message.ack_log_error,
            on_reject=self.message.reject_log_error,
            app=app,
            hostname="w@test",
            task=self.task,
            body=self.message.body,
            headers=self.message.headers,
        )

    def accept(self) -> None:
        """The pool has taken it."""
        self.request.on_accepted(os.getpid(), time.monotonic())

    def trace(self) -> Any:
        """Run the task as a pool's child does; return what arrives in the main process."""
        self.task.__trace__ = build_tracer(self.task.name, self.task, app=self.task.app)
        message = self.message
        result = trace_task_ret(
            self.task.name,
            self.request.id,
            self.request.request_dict,
            message.body,
            message.content_type,
            message.content_encoding,
            app=self.task.app,
        )
        return pickle.loads(pickle.dumps(result)) if self.pool == "prefork" else result

    def run(self) -> Any:
        """From acceptance to the verdict, which is returned."""
        self.accept()
        self.request.on_success(self.trace())
        return self.message.verdict
