# SPDX-License-Identifier: BSD-3-Clause
"""${message}."""

from __future__ import annotations

from alembic import op

from kombu_pgqueue import sql
from kombu_pgqueue.migrations.run import run_sql

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
#: A changed function needs a new revision, or databases in the field would not get it.
functions_digest = ""


def upgrade() -> None:
    context = op.get_context()
    run_sql(context, sql.revision("", context.opts["pgqueue_schema"]))
