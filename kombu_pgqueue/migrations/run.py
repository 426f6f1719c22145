# SPDX-License-Identifier: BSD-3-Clause
"""Run or print SQL text inside a migration."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from alembic.runtime.migration import MigrationContext


def run_sql(context: MigrationContext, text: str) -> None:
    """Several statements at once, as they are: no parameter syntax is looked for in them."""
    if context.as_sql:
        context.impl.static_output(text)
        return
    bind = context.connection
    assert bind is not None
    driver_connection = bind.connection.driver_connection
    assert driver_connection is not None
    driver_connection.execute(text)
