# SPDX-License-Identifier: BSD-3-Clause
"""An unchanged Celery app: only its broker URL speaks of PostgreSQL."""

from __future__ import annotations

from .common import Runs, add_tasks, make_app

app = make_app("plain")
add_tasks(app)
Runs().connect()
