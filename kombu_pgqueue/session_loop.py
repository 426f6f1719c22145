# SPDX-License-Identifier: BSD-3-Clause
"""What the session's thread does: verdicts, claims and the renewal in one round trip."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kombu_pgqueue.errors import PgQueueError, StoreError, StoreUnavailable
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.holder import Holder
from kombu_pgqueue.mailbox import Delivery
from kombu_pgqueue.native import Answer, wait_readable
from kombu_pgqueue.settlement import Outcome, Settlement
from kombu_pgqueue.store import ClaimRequest
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import Progress
from kombu_pgqueue.window import Window
from kombu_pgqueue.windows import Windows

if TYPE_CHECKING:
    from kombu_pgqueue.session import Session

logger = logging.getLogger(__name__)

#: A session that nobody uses gives its connection back after so many seconds.
LINGER = 10.0
#: The longest sleep without a notification to wait for.
BLIND_REST = 1.0


class SessionLoop:
    """Belongs to its thread, but for `run`, which is that thread. Times are monotonic seconds."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._options = session.options
        self._holder = Holder(session.options)
        # The session's, for a successor of this loop needs them too.
        self.windows: Windows = session.windows
        self._holds: set[Hold] = set()
        self._settlement = Settlement(self._holder)
        self._gets: list[tuple[Window, str, Answer]] = []
        self._flushes: list[Answer] = []
        self._stopping: tuple[Answer, float] | None = None
        self._turn = 0
        self._idle_since = time.monotonic()
        self._told = False
        self._outage: PgQueueError | None = None

    def get(self, window: Window, queue: str, answer: Answer) -> None:
        self._gets.append((window, queue, answer))

    def flush(self, answer: Answer) -> None:
        self._flushes.append(answer)

    def stop(self, answer: Answer, deadline: float) -> None:
        self._stopping = answer, deadline
        self.windows.close_all()
        for hold in list(self._holds):
            hold.give_back()

    def run(self) -> None:
        """The thread."""
        try:
            while not self._done():
                try:
                    self._turn_once()
                except PgQueueError as exc:
                    self._failed(exc)
        except BaseException:
            # The leases cannot be kept without this thread: whoever consumes must know.
            logger.critical("The consuming session died", exc_info=True)
            self._session.died()
            self._tell(StoreUnavailable("the consuming session died; see the log"))
            raise
        finally:
            self._holder.leave()
            if self._stopping:
                self._stopping[0].give(not self._settlement)

    def _done(self) -> bool:
        now = time.monotonic()
        if self._stopping:
            return (not self._settlement and not self._session.inbox) or now >= self._stopping[1]
        if self._in_use:
            self._idle_since = now
            return False
        return now - self._idle_since >= LINGER and self._session.retire()

    @property
    def _in_use(self) -> bool:
        return bool(self._holds or self._settlement or self.windows.active)

    def _turn_once(self) -> None:
        self._listen_to_others()
        now = time.monotonic()
        if not self._holder.connected:
            if now < self._holder.retry_at:
                self._answer_flushes(settled=False)
                self._fail_gets(self._outage or StoreUnavailable("no connection to the database"))
                self._tell_if_hopeless(now)
                self._sleep(self._holder.retry_at)
                return
            self._connect(now)
        self.windows.heed(self._holder.notified())
        if not (self._settle() | self._exchange() | self._serve_gets() | self._look_after(now)):
            if not self._settlement:
                self._answer_flushes(settled=True)
            self._sleep(self._next_at())

    def _listen_to_others(self) -> None:
        session, now = self._session, time.monotonic()
        while session.calls:
            session.calls.popleft()(self)
        while session.inbox:
            hold, verdict = session.inbox.popleft()
            final = not isinstance(verdict, Progress)
            if hold.placed and (final or verdict == Progress(acks_late=False)):
                hold.placed = False
                hold.window.free(now)
            if final:
                self._holds.discard(hold)
            self._settlement.add(hold, verdict, now)
        self.windows.prune()

    def _connect(self, now: float) -> None:
        ours = self._holds.union(self._settlement.holds())
        again = self._holder.connect(known=[hold.lease.lease_token for hold in ours])
        self._outage = None
        self._told = False
        self.windows.reconnected()
        if again:
            logger.info("Connected to the database again; %d jobs are held", len(self._holds))

    def _exchange(self) -> bool:
        now = time.monotonic()
        claiming = self.windows.claiming(now)
        verdicts_due = self._settlement.due_at() <= now
        if not (claiming or verdicts_due or self._flushes or self._holder.renew_at <= now):
            return False
        entries = self._settlement.take_quick(
            now, all_of_them=bool(self._flushes or self._stopping)
        )
        if not (entries or claiming or self._holder.renew_at <= now):
            return False
        limit = self._options.max_claim_bytes
        requests = [w.request(now, self.windows.others(w), limit) for w in claiming]
        try:
            verdicts = [(hold.lease.ref, verdict) for hold, verdict in entries]
            result = self._holder.exchange(verdicts, requests, now)
        except StoreUnavailable:
            self._settlement.send_again(entries)
            raise
        except StoreError as exc:
            logger.warning("A batch failed and is tried one by one: %s", exc)
            for window in claiming:
                window.back_off(now)
            self._after(self._settlement.one_by_one(entries))
            return True
        after = time.monotonic()
        self._after(self._settlement.answered(entries, result.settled))
        for window, request, leases in zip(claiming, requests, result.leases, strict=True):
            window.claimed(request, leases, after, after - now)
            self._deliver(window, leases)
        return True

    def _deliver(self, window: Window, leases: Sequence[Lease]) -> None:
        deliveries = []
        for lease in leases:
            hold = Hold(lease, window, self._session)
            self._holds.add(hold)
            self._turn += 1
            tag = window.pick(lease.queue_name, self._turn)
            if tag is None:
                hold.give_back()
            else:
                deliveries.append(Delivery(tag, hold))
        if deliveries:
            window.deliver(deliveries)

    def _after(self, outcome: Outcome) -> None:
        self.windows.settled(outcome)
        if outcome.released:
            self._holder.notify(outcome.released)

    def _settle(self) -> bool:
        entries = self._settlement.take_durable(time.monotonic())
        if entries:
            self._after(self._settlement.one_by_one(entries))
        return bool(entries)

    def _serve_gets(self) -> bool:
        served = bool(self._gets)
        while self._gets:
            window, queue, answer = self._gets[0]
            leases = self._holder.claim(ClaimRequest([queue], 1))
            hold = Hold(leases[0], window, self._session) if leases else None
            if hold is not None:
                self._holds.add(hold)
            del self._gets[0]
            answer.give(hold)
        return served

    def _fail_gets(self, error: Exception) -> None:
        while self._gets:
            self._gets.pop()[2].give(error=error)

    def _answer_flushes(self, *, settled: bool) -> None:
        while self._flushes:
            self._flushes.pop().give(settled)

    def _look_after(self, now: float) -> bool:
        """Flags, due times, maintenance: one step, so that nothing waits long for it."""
        for window in self.windows:
            if window.flag_is_waste(now):
                self._holder.lower_flag(window.flagged)
                window.flag_lowered()
                return True
            if window.active and window.wants_flag:
                self._holder.raise_flag(window.queues)
                window.flag_raised(now)
                return True
            if window.active and window.wants_due:
                longest = self._options.poll_interval
                if not self._options.use_notify:
                    longest = min(longest, BLIND_REST)
                window.rest(now, self._holder.next_due(window.queues), longest)
                return True
        return self._holder.maintain(now, chores=self.windows.working)

    def _next_at(self) -> float:
        now = time.monotonic()
        times = self.windows.next_claims(now)
        times += [self._settlement.due_at(), self._holder.renew_at]
        times.append(self._holder.maintain_at(chores=self.windows.working))
        if not self._in_use:
            times.append(self._idle_since + LINGER)
        if self._stopping:
            times.append(self._stopping[1] if self._settlement else now)
        return min(times)

    def _sleep(self, until: float) -> None:
        timeout = min(until - time.monotonic(), 60.0)
        bell = self._session.bell
        if self._session.calls or self._session.inbox:
            return
        fds = [bell.fileno(), *self._holder.fds()]
        readable = wait_readable(fds, max(timeout, 0.0), native=True)
        if bell.fileno() in readable:
            bell.hush()
        if len(fds) > 1 and fds[1] in readable:
            self._holder.read_notifications()

    def _failed(self, exc: PgQueueError) -> None:
        now = time.monotonic()
        if self._holder.connected and not isinstance(exc, StoreUnavailable):
            logger.error("The consuming session: %s", exc)
            self._holder.retry_soon(now)
            return
        self._outage = exc
        if self._holder.lost(now):
            logger.warning("The consuming session lost its connection: %s", exc)
        if not isinstance(exc, StoreUnavailable):
            # Waiting does not mend a schema that is too new: say so instead of trying in silence.
            self._tell(exc)
        self._fail_gets(exc)

    def _tell_if_hopeless(self, now: float) -> None:
        if not self._told and now > self._holder.safe_until:
            self._tell(StoreUnavailable("the database cannot be reached and leases are lost"))

    def _tell(self, error: Exception) -> None:
        self._told = True
        self.windows.tell(error)
