# SPDX-License-Identifier: BSD-3-Clause
"""A delivered message: kombu's, with the verdicts of its lease."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kombu.message import Message as KombuMessage

from kombu_pgqueue.envelope import unpack
from kombu_pgqueue.hold import Hold
from kombu_pgqueue.values import Lease
from kombu_pgqueue.verdicts import Final

if TYPE_CHECKING:
    from kombu_pgqueue.channel import Channel


class Message(KombuMessage):
    """Its verdicts go to the session, from any thread, also after the channel was closed.

    Raises `ValueError` when it is made of a lease whose envelope cannot be read.
    """

    #: Set before an acknowledgement that only says "started" (Celery's early one): the job stays
    #: leased until `settle` or the end of this object.
    early = False

    def __init__(self, hold: Hold, channel: Channel, consumer_tag: str | None = None) -> None:
        self.hold = hold
        parts = unpack(hold.lease)
        if consumer_tag is not None:
            parts["delivery_info"]["consumer_tag"] = consumer_tag
        super().__init__(  # type: ignore[no-untyped-call]
            body=hold.lease.body,
            delivery_tag=str(hold.lease.lease_token),
            channel=channel,
            **parts,
        )
        if self.errors:
            hold.malformed = repr(self.errors[0][1])
        hold.watch(self)

    @property
    def lease(self) -> Lease:
        return self.hold.lease

    def started(self) -> None:
        """The task runs now."""
        self.hold.start(early=self.early)

    def settle(self, verdict: Final) -> None:
        """End the job. The first final verdict counts; acknowledging later changes nothing."""
        self.hold.finish(verdict)

    def ack(self, multiple: bool = False) -> None:
        """As kombu's; early, it only says that the task started."""
        if self._needs_no_ack():
            return
        self._once()
        if self.early and self.hold.malformed is None:
            self.hold.start(early=True)
        else:
            self.channel.acknowledged(self.hold, multiple=multiple)
        self._state = "ACK"

    def reject(self, requeue: bool = False) -> None:
        """As kombu's: without `requeue` the job becomes a dead letter."""
        self._once()
        self.hold.reject(requeue=requeue)
        self._state = "REJECTED"

    def requeue(self) -> None:
        """As kombu's: deliver it again."""
        self._once()
        self.hold.reject(requeue=True)
        self._state = "REQUEUED"

    def _once(self) -> None:
        if self.acknowledged:
            raise self.MessageStateError(f"Message already acknowledged with state: {self._state}")

    def _needs_no_ack(self) -> bool:
        tag = self.delivery_info.get("consumer_tag")
        return tag is not None and tag in (self.channel.no_ack_consumers or ())

    def decode(self) -> Any:
        """As kombu's; remembers that the body cannot be read, so that it is not taken for done."""
        try:
            return super().decode()  # type: ignore[no-untyped-call]
        except Exception as exc:
            self.hold.malformed = self.hold.malformed or repr(exc)
            raise
