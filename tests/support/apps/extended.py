# SPDX-License-Identifier: BSD-3-Clause
"""The same app and tasks with the extension set up: retries in place, dead letters."""

from __future__ import annotations

import celery_ext

from .common import Runs, add_tasks, make_app

app = make_app("extended")
celery_ext.setup(app)
add_tasks(app)
Runs().connect()
