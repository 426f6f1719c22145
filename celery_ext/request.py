# SPDX-License-Identifier: BSD-3-Clause
"""The worker's request: how a run ended becomes the one verdict on its job.

Celery's own code still runs in full (results, hooks, signals, events, the restoring of a reduced
prefetch). It speaks through `acknowledge()` and `reject()`; what these mean for the job is settled
just before Celery says them, since the first final verdict is the one that counts.
"""

from __future__ import annotations

from functools import cache, wraps
from typing import Any

from billiard.einfo import ExceptionWithTraceback
from celery.exceptions import (
    Ignore,
    Reject,
    Retry,
    SoftTimeLimitExceeded,
    Terminated,
    TimeLimitExceeded,
    WorkerLostError,
)
from celery.worker import state

from celery_ext.capture import Capture, CapturedRetry, JobRetry
from celery_ext.changes import changes_of
from celery_ext.detail import error_code, error_text, failure_detail
from celery_ext.outcome import outcome_of
from celery_ext.waiting import seconds_until
from kombu_pgqueue.verdicts import (
    FailPermanent,
    FailTransient,
    Final,
    Release,
    Succeed,
)


class VerdictRequest:
    """Mixed in before a `Request` class. Does nothing for a message of another broker."""

    # Celery's Request, which this class always comes before, has these.
    id: str
    task: Any
    hostname: str
    _message: Any
    _context: Any
    _already_cancelled: bool
    _already_revoked: bool
    acknowledged: bool

    #: The verdict to settle when Celery acknowledges or rejects, or at the latest when it is done.
    _final: Final | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # Celery's strategy derives one class per task, whose on_success asks no base class.
        own = vars(cls).get("on_success")
        if own is not None:
            cls.on_success = _settling_success(own)  # type: ignore[method-assign]

    @property
    def _ours(self) -> bool:
        return getattr(self._message, "settle", None) is not None

    def _settle(self, verdict: Final | None = None) -> None:
        verdict = verdict or self._final
        if verdict is not None and self._ours:
            self._message.settle(verdict)

    def on_accepted(self, pid: int, time_accepted: float) -> None:
        if self._ours:
            # Acknowledged early, a job has started and no more: its row stays until the run ends.
            # Said at once: the solo pool runs the task before the loop gets to the acknowledgement.
            self._message.early = not self.task.acks_late
            self._message.started()
        super().on_accepted(pid, time_accepted)  # type: ignore[misc]

    def on_success(self, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        if self._was_cut_off(failed__retval__runtime):
            return self.on_failure(failed__retval__runtime, return_ok=True)
        self._settle_success(failed__retval__runtime)
        return super().on_success(failed__retval__runtime, **kwargs)  # type: ignore[misc]

    def _was_cut_off(self, returned: Any) -> bool:
        # Threads and solo report a run that BaseException ended as a success, with the exception
        # for its result; Celery chokes on that, and a solo worker would end with it.
        return self._ours and not isinstance(returned, tuple)

    def _settle_success(self, returned: Any) -> None:
        if self._ours and not returned[0]:
            self._settle(Succeed())

    def on_retry(self, exc_info: Any) -> Any:
        if self._ours:
            self._final = self._retry_verdict(exc_info)
        try:
            return super().on_retry(exc_info)  # type: ignore[misc]
        finally:
            self._settle()

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        if self._ours and not isinstance(_exception(exc_info), Retry):
            self._final = self._failure_verdict(exc_info)
        try:
            return super().on_failure(  # type: ignore[misc]
                exc_info, send_failed_event=send_failed_event, return_ok=return_ok
            )
        finally:
            self._settle()

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        if self._ours and not soft:
            self._final = self._timeout_verdict(TimeLimitExceeded(timeout), None)
        try:
            return super().on_timeout(soft, timeout)  # type: ignore[misc]
        finally:
            if not soft:
                self._settle()

    def cancel(self, pool: Any, signal: Any = None, emit_retry: bool = True) -> None:
        try:
            super().cancel(pool, signal, emit_retry=emit_retry)  # type: ignore[misc]
        except NotImplementedError:
            # A cold shutdown of a pool that cannot kill. This is a signal handler: solo runs it
            # inside the task, whose failure it would become; threads would end by a traceback.
            if not self._ours:
                raise

    def acknowledge(self) -> None:
        self._settle()
        super().acknowledge()  # type: ignore[misc]

    def reject(self, requeue: bool = False) -> None:
        if not self.acknowledged:
            self._settle(Release(requeue=True) if requeue else None)
        super().reject(requeue=requeue)  # type: ignore[misc]

    def _announce_revoked(self, reason: str, terminated: bool, signum: Any, expired: bool) -> None:
        if not self._ours:
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
            return
        # What expired before it started is kept as a dead letter; what was revoked is done.
        message = "expired before it started"
        self._final = (
            FailPermanent("expired", message, self._detail(None), self.hostname)
            if expired
            else Succeed()
        )
        try:
            super()._announce_revoked(reason, terminated, signum, expired)  # type: ignore[misc]
        finally:
            self._settle()
            if expired:
                # Celery notes it among the revoked, where a replay would find its own id.
                state.revoked.discard(self.id)

    def _success_was_stored(self) -> Any:
        stored = super()._success_was_stored()  # type: ignore[misc]
        if stored:
            self._final = Succeed()
        return stored

    def _retry_worker_lost(self, exc: BaseException, exc_info: Any) -> Any:
        if not self._ours:
            return super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]
        capture = Capture(self.task.app, self._context, on_captured=self._keep_retry(exc))
        with capture():
            retried = super()._retry_worker_lost(exc, exc_info)  # type: ignore[misc]
        if retried and capture.published:
            self._final = Succeed()
        return retried

    def _keep_retry(self, exc: BaseException) -> Any:
        def keep(job: CapturedRetry) -> None:
            self._final = self._transient(job, exc)

        return keep

    # -- verdicts

    def _failure_verdict(self, exc_info: Any) -> Final:
        exc = _exception(exc_info)
        if isinstance(exc, (Terminated, SystemExit, KeyboardInterrupt)):
            if self._already_cancelled:
                # Interrupted by the worker itself, not by the task.
                late = self.task.acks_late
                return Release(requeue=True) if late else self._permanent("worker_lost", exc_info)
            if isinstance(exc, Terminated) or self._already_revoked:
                return Succeed()
            return self._permanent("worker_lost", exc_info)
        if isinstance(exc, Reject):
            return Release(requeue=True) if exc.requeue else self._permanent("rejected", exc_info)
        if isinstance(exc, Ignore):
            return Succeed()
        if isinstance(exc, TimeLimitExceeded):
            return self._timeout_verdict(exc, exc_info)
        if isinstance(exc, WorkerLostError):
            return self._permanent("worker_lost", exc_info)
        code = outcome_of(exc_info).code
        if code is None:
            code = "time_limit" if isinstance(exc, SoftTimeLimitExceeded) else "fatal"
        return self._permanent(code, exc_info)

    def _timeout_verdict(self, exc: BaseException, exc_info: Any) -> Final:
        if self.task.acks_late and not self.task.acks_on_timeout:
            return Release(requeue=True)
        detail = self._detail(exc_info, exc)
        return FailPermanent("time_limit", error_text(exc), detail, self.hostname)

    def _retry_verdict(self, exc_info: Any) -> Final:
        retry = _exception(exc_info)
        cause = retry.exc or retry.excs
        if isinstance(retry, JobRetry) and retry.job is not None:
            return self._transient(retry.job, cause)
        if outcome_of(exc_info).republished:
            return Succeed()  # it waits as a message of its own
        return FailTransient(
            error_code=error_code(cause),
            error_message=error_text(cause or retry),
            delay=seconds_until(retry.when, self.task.app),
            retries=int(self._context.retries or 0) + 1,
            actor=self.hostname,
        )

    def _transient(self, job: CapturedRetry, cause: Any) -> FailTransient:
        return FailTransient(
            error_code=error_code(cause),
            error_message=error_text(cause or "the task asked for a retry"),
            delay=job.delay,
            retries=job.retries,
            changes=changes_of(job, self._message, self.task.app),
            actor=self.hostname,
        )

    def _permanent(self, code: str, exc_info: Any) -> FailPermanent:
        exc = _exception(exc_info)
        return FailPermanent(code, error_text(exc), self._detail(exc_info, exc), self.hostname)

    def _detail(self, exc_info: Any, exc: BaseException | None = None) -> dict[str, Any]:
        return failure_detail(self, exc, exc_info)


def _settling_success(original: Any) -> Any:
    if getattr(original, "settles_success", False):
        return original

    @wraps(original)
    def on_success(self: Any, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        if self._was_cut_off(failed__retval__runtime):
            return self.on_failure(failed__retval__runtime, return_ok=True)
        self._settle_success(failed__retval__runtime)
        return original(self, failed__retval__runtime, **kwargs)

    on_success.settles_success = True  # type: ignore[attr-defined]
    return on_success


def _exception(exc_info: Any) -> Any:
    exc = exc_info.exception
    return exc.exc if isinstance(exc, ExceptionWithTraceback) else exc


@cache
def request_class(base: type) -> type:
    """`base`, any class like Celery's `Request`, with verdicts."""
    if issubclass(base, VerdictRequest):
        return base
    return type(f"PgQueue{base.__name__}", (VerdictRequest, base), {"__module__": base.__module__})
