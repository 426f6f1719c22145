# SPDX-License-Identifier: BSD-3-Clause
"""Commands that join `celery` through its `celery.commands` entry points."""
