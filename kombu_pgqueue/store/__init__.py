# SPDX-License-Identifier: BSD-3-Clause
"""The verbs of the queue: one short method per SQL function.

Primitives in, frozen values out. It knows no kombu and no Celery. A refused verdict is a value
(`False`), never an exception; the driver's errors leave as `StoreError` and `StoreUnavailable`.
"""

from __future__ import annotations

from kombu_pgqueue.store.base import JobRef
from kombu_pgqueue.store.hold import ClaimRequest, ExchangeResult, HolderVerbs
from kombu_pgqueue.store.maintain import MaintenanceVerbs
from kombu_pgqueue.store.operate import OperatorVerbs
from kombu_pgqueue.store.publish import PublisherVerbs
from kombu_pgqueue.store.topology import Binding, Exchange, TopologyVerbs

__all__ = ["Binding", "ClaimRequest", "Exchange", "ExchangeResult", "JobRef", "JobStore"]


class JobStore(PublisherVerbs, HolderVerbs, MaintenanceVerbs, TopologyVerbs, OperatorVerbs):
    """All verbs on one connection. As thread-safe as that: give each thread its own."""
