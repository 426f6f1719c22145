# SPDX-License-Identifier: BSD-3-Clause
"""The schema of the first release."""

from __future__ import annotations

from alembic import op

from kombu_pgqueue import sql
from kombu_pgqueue.migrations.run import run_sql

revision = "0001"
down_revision = None
#: A changed function needs a new revision, or databases in the field would not get it.
functions_digest = "49570a23272102bd6151b0e4fe0379d235e1af653c8825c9df43d5d728818808"


def upgrade() -> None:
    context = op.get_context()
    run_sql(context, sql.revision("0001_initial", context.opts["pgqueue_schema"]))
