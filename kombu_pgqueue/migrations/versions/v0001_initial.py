# SPDX-License-Identifier: BSD-3-Clause
"""The schema of the first release."""

from __future__ import annotations

from alembic import op

from kombu_pgqueue import sql
from kombu_pgqueue.migrations.run import run_sql

revision = "0001"
down_revision = None
#: A changed function needs a new revision, or databases in the field would not get it.
functions_digest = "37444dbb9db7da788ccb5780ce00ec6fa80efd8d29dee00e86f55c3bb4f2f3e4"


def upgrade() -> None:
    context = op.get_context()
    run_sql(context, sql.revision("0001_initial", context.opts["pgqueue_schema"]))
