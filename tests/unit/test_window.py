# SPDX-License-Identifier: BSD-3-Clause
"""When a prefetch window claims, raises its flag and rests (D-1, D-5); low-water marks (S-5)."""

from __future__ import annotations

import math
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest

from kombu_pgqueue.hold import Hold
from kombu_pgqueue.mailbox import Delivery, Mailbox
from kombu_pgqueue.marks import Marks
from kombu_pgqueue.pending import Pending
from kombu_pgqueue.values import Lease, Mark
from kombu_pgqueue.verdicts import FailTransient, Progress, Release, Succeed
from kombu_pgqueue.window import AFTER_FLAG, BATCH, BEFORE_FLAG, STREAM_CLAIMS, Window

EPOCH = datetime(2030, 1, 1, tzinfo=timezone.utc)


class Outbox:
    def post(self, hold: Hold, verdict: Any) -> None:
        pass


def lease(seconds: float = 0, seq: int = 1, *, priority: int = 0, queue: str = "q") -> Lease:
    when = EPOCH + timedelta(seconds=seconds)
    return Lease(
        uuid4(),
        uuid4(),
        queue,
        "",
        None,
        priority,
        when,
        seq,
        0,
        0,
        0,
        0,
        False,
        0.0,
        when,
        "",
        b"",
    )


def hold(window: Any = None) -> Hold:
    return Hold(lease(), window or SimpleNamespace(), Outbox())


def window(prefetch: int = 8, queues: tuple[str, ...] = ("q",), **more: Any) -> Window:
    made = Window(Mailbox(), prefetch=prefetch, **more)
    for queue in queues:
        made.subscribe(f"tag-{queue}", queue)
    return made


def take(made: Window, count: int, now: float, *, others: int = 0) -> None:
    """Claim, and get `count` jobs."""
    request = made.request(now, others, None)
    leases = [lease(seq=n) for n in range(count)]
    made.claimed(request, leases, now, 0.001)
    made.deliver([Delivery("tag-q", Hold(each, made, Outbox())) for each in leases])


def test_an_empty_window_claims_all_at_once() -> None:
    made = window(8)
    assert made.claim_at(1.0, 0) <= 1.0
    assert made.request(1.0, 0, None).limit == 8


def test_a_full_window_claims_nothing() -> None:
    made = window(2)
    take(made, 2, 1.0)
    assert made.claim_at(1.0, 0) == math.inf


def test_half_a_window_is_claimed_at_once_and_less_waits_a_moment() -> None:  # D-1
    made = window(8)
    take(made, 8, 1.0)
    made.free(2.0)
    assert 2.0 < made.claim_at(2.0, 0) < 2.01
    for _ in range(3):
        made.free(2.0005)
    assert made.claim_at(2.0005, 0) <= 2.0005


def test_the_last_job_done_is_a_reason_to_claim() -> None:
    made = window(8)
    take(made, 8, 1.0)
    made.taken = 1
    made.free(2.0)
    assert made.claim_at(2.0, 0) <= 2.0


def test_running_jobs_of_a_closed_window_take_places() -> None:  # T-6
    made = window(4)
    assert made.room(3) == 1
    assert made.request(1.0, 3, None).limit == 1
    assert made.claim_at(1.0, 4) == math.inf
    assert made.claim_at(1.0, 9) == math.inf


def test_without_a_limit_a_batch_at_a_time() -> None:
    made = window(0)
    assert made.request(1.0, 0, None).limit == BATCH
    take(made, BATCH, 1.0)
    assert made.claim_at(1.0, 0) == math.inf  # until the reader takes some
    made.mailbox.get()
    assert made.room(0) == 1


def test_closed_or_without_consumers_it_wants_nothing() -> None:
    made = window(4)
    made.unsubscribe("tag-q")
    assert made.room(0) == 0
    made.subscribe("tag-q", "q")
    made.closed = True
    assert made.room(0) == 0


def test_the_ladder_to_rest() -> None:  # D-5
    made = window(8)
    now = 10.0
    looks = []
    while not made.wants_flag:
        take(made, 0, now)
        now = made.claim_at(now, 0) if not made.wants_flag else now
        looks.append(now)
    assert [round(look - 10.0, 4) for look in looks[:-1]] == list(BEFORE_FLAG)
    made.flag_raised(now)
    raised, looks = now, []
    while not made.wants_due:
        now = made.claim_at(now, 0)
        looks.append(round(now - raised, 4))
        take(made, 0, now)
    assert looks == list(AFTER_FLAG)
    assert made.claim_at(now, 0) == math.inf
    made.rest(now, 1.5, 5.0)
    assert made.claim_at(now, 0) == now + 1.5
    made.rest(now, None, 5.0)
    assert made.claim_at(now, 0) == now + 5.0


def resting(now: float) -> Window:
    made = window(8)
    take(made, 0, now)
    made.wants_flag = True
    made.flag_raised(now - 1)
    take(made, 0, now)
    made.rest(now, None, 5.0)
    return made


def test_a_notification_ends_the_rest_and_the_next_due_is_asked_again() -> None:
    made = resting(10.0)
    made.poke()
    assert made.claim_at(11.0, 0) <= 11.0
    take(made, 1, 11.0)
    assert made.wants_due
    assert not made.wants_flag


def test_a_job_that_is_due_but_not_to_be_had_is_not_asked_for_in_a_loop() -> None:
    made = resting(10.0)
    waits = []
    for _ in range(8):
        made.rest(10.0, 0.0, 5.0)
        waits.append(made.claim_at(10.0, 0) - 10.0)
        take(made, 0, 10.0)
    assert waits == sorted(waits)
    assert waits[0] < 0.5
    assert waits[-1] == 5.0


def test_a_stream_of_jobs_lowers_the_flag() -> None:
    made = resting(10.0)
    assert not made.flag_is_waste(10.0)
    for number in range(STREAM_CLAIMS):
        made.poke()
        take(made, 1, 11.0 + number / 1000)
        made.free(11.0)
    assert made.flag_is_waste(11.1)
    made.flag_lowered()
    assert not made.flagged
    assert made.claim_at(11.1, 0) <= 11.1


def test_a_window_that_stays_full_lowers_the_flag() -> None:
    made = resting(10.0)
    made.poke()
    take(made, 8, 11.0)
    made.claim_at(11.0, 0)
    assert not made.flag_is_waste(11.0)
    assert made.flag_is_waste(11.2)


def test_other_queues_need_another_flag() -> None:
    made = resting(10.0)
    made.subscribe("tag-r", "r")
    assert made.flag_is_waste(10.0)


def test_queues_take_turns() -> None:
    made = window(8, ("a", "b", "c"))
    firsts = {next(iter(made.request(1.0, 0, None).queues)) for _ in range(3)}
    assert firsts == {"a", "b", "c"}


def test_consumers_of_a_queue_take_turns() -> None:
    made = window(8, ("a",))
    made.subscribe("second", "a")
    assert {made.pick("a", turn) for turn in range(2)} == {"tag-a", "second"}
    assert made.pick("b", 0) is None


def test_marks_trail_by_a_second_and_are_forgotten() -> None:  # S-5
    marks = Marks()
    marks.current(0.0)
    for number in range(50):
        marks.claimed([lease(number / 10, number)], 0.001, marked=False)
    found = marks.current(0.5)
    mark = found["q", 0]
    assert timedelta(seconds=1) <= EPOCH + timedelta(seconds=4.9) - mark.process_after
    assert mark.process_after > EPOCH + timedelta(seconds=3)
    assert marks.current(1.1) == {}
    marks.claimed([lease(9.0, 99)], 0.001, marked=False)
    assert marks.current(1.2)
    marks.forget()
    assert marks.current(1.3) == {}


def test_marks_by_queue_and_priority() -> None:
    marks = Marks()
    marks.current(0.0)
    marks.claimed([lease(1, 1, priority=5), lease(1, 2, queue="r")], 0.001, marked=False)
    marks.claimed([lease(9, 3)], 0.001, marked=False)
    assert dict(marks.current(0.1)) == {
        ("q", 5): Mark(EPOCH + timedelta(seconds=1), 1),
        ("r", 0): Mark(EPOCH + timedelta(seconds=1), 2),
    }


def test_dear_scans_are_repeated_less_often() -> None:
    marks = Marks()
    marks.claimed([lease(0, 1), lease(9, 2)], 0.5, marked=False)
    marks.current(0.0)
    marks.claimed([lease(10, 3), lease(19, 4)], 0.5, marked=False)
    assert marks.current(9.0)
    assert not marks.current(10.1)


def test_a_start_that_ends_at_once_is_never_sent() -> None:
    pending, one = Pending(), hold()
    pending.add(one, Progress(acks_late=False), 1.0)
    assert pending.take_quick(1.001) == []
    pending.add(one, Succeed(), 1.002)
    assert pending.take_quick(1.1) == [(one, Succeed())]
    assert not pending


def test_a_start_that_goes_on_is_sent_soon() -> None:
    pending, one = Pending(), hold()
    pending.add(one, Progress(), 1.0)
    assert 1.0 < pending.due_at() < 1.05
    assert pending.take_quick(1.05) == [(one, Progress())]


def test_failures_go_apart_and_at_once() -> None:
    pending, one, two = Pending(), hold(), hold()
    failure = FailTransient("x", "y")
    pending.add(one, failure, 1.0)
    pending.add(two, Release(), 1.0)
    assert pending.due_at() <= 1.0
    assert pending.take_durable(1.0) == [(one, failure)]
    assert pending.take_quick(1.0) == [(two, Release())]


def test_what_is_sent_again_waits_its_time() -> None:
    pending, one = Pending(), hold()
    pending.again(one, Succeed(), 5.0)
    assert pending.holds() == {one}
    assert pending.take_quick(4.0) == []
    assert pending.due_at() == 5.0
    assert pending.take_quick(5.0) == [(one, Succeed())]


def test_a_start_is_not_sent_again_after_the_end() -> None:
    pending, one = Pending(), hold()
    one.finish(Succeed())
    pending.again(one, Progress(), 1.0)
    assert not pending


def test_a_mailbox_rings_until_it_is_empty() -> None:
    mailbox = Mailbox()
    first, second, control = hold(), hold(), hold()
    mailbox.put([Delivery("a", first), Delivery("b", second)])
    mailbox.put([Delivery("c", control)], urgent=True)
    got = [mailbox.get() for _ in range(4)]
    assert [each and each.hold for each in got] == [control, first, second, None]
    mailbox.put([Delivery("a", first)])
    assert mailbox.take_out(lambda delivery: delivery.tag == "a") == [Delivery("a", first)]
    assert mailbox.get() is None


def test_a_mailbox_raises_what_it_was_told_once() -> None:
    mailbox = Mailbox()
    mailbox.fail(OSError("lost"))
    with pytest.raises(OSError, match="lost"):
        mailbox.get()
    assert mailbox.get() is None
