# SPDX-License-Identifier: BSD-3-Clause
"""A kombu transport that makes PostgreSQL the broker of an unchanged Celery app."""

from __future__ import annotations

from kombu_pgqueue import _register  # noqa: F401  (importing it registers the URL schemes)

__version__ = "0.1.0"
