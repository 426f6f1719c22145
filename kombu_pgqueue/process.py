# SPDX-License-Identifier: BSD-3-Clause
"""What a process shares: one consuming session and one publisher for each set of options.

A forked child starts with none: its parent's sessions are not its own.
"""

from __future__ import annotations

import atexit
import os
import threading

from kombu_pgqueue.options import Options
from kombu_pgqueue.publisher import Publisher
from kombu_pgqueue.session import Session
from kombu_pgqueue.topology import Topology

#: How long the end of a process waits for its last verdicts, in seconds.
FAREWELL = 5.0


class _Shared:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.sessions: dict[Options, Session] = {}
        self.publishers: dict[Options, Publisher] = {}
        self.topologies: dict[Options, Topology] = {}


_shared = _Shared()


def session_for(options: Options) -> Session:
    """The consuming session of this process."""
    with _shared.lock:
        if options not in _shared.sessions:
            _shared.sessions[options] = Session(options)
        return _shared.sessions[options]


def publisher_for(options: Options) -> Publisher:
    """The publishing connections of this process."""
    with _shared.lock:
        if options not in _shared.publishers:
            _shared.publishers[options] = Publisher(options)
        return _shared.publishers[options]


def topology_for(options: Options) -> Topology:
    """Exchanges, queues and bindings as this process knows them."""
    with _shared.lock:
        if options not in _shared.topologies:
            _shared.topologies[options] = Topology(publisher_for(options))
        return _shared.topologies[options]


def stop_sessions(timeout: float = FAREWELL) -> None:
    """Give back what is held and settle the rest; the sessions are of no use after this."""
    with _shared.lock:
        sessions, _shared.sessions = list(_shared.sessions.values()), {}
    for session in sessions:
        session.stop(timeout)


def close_all(timeout: float = FAREWELL) -> None:
    """Leave no session behind. What is used later connects anew."""
    stop_sessions(timeout)
    with _shared.lock:
        publishers = list(_shared.publishers.values())
    for publisher in publishers:
        publisher.close()


def _forget_parents() -> None:
    global _shared
    for session in _shared.sessions.values():
        session.disown()
    # Not closed, only forgotten: the descriptors are closed where the connections are made.
    _shared = _Shared()


# Runs after the pool threads have been joined, so their last acknowledgements are sent too.
atexit.register(stop_sessions)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_parents)
