# SPDX-License-Identifier: BSD-3-Clause
"""The sample apps as a publisher in the test's own process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from celery import Celery

import celery_ext

from .apps.common import add_tasks, make_app
from .database import broker_url


@contextlib.contextmanager
def publishing_app(name: str, conninfo: str, **options: object) -> Iterator[Celery]:
    """Yield the app ``plain`` or ``extended`` on the database *conninfo*; records no runs.

    Its tasks are in ``app.tasks[f"{name}.<task>"]``; *options* are transport options.
    """
    app = make_app(name, broker_url(conninfo, **options))
    if name == "extended":
        celery_ext.setup(app)
    add_tasks(app)
    try:
        yield app
    finally:
        app.close()
