# SPDX-License-Identifier: BSD-3-Clause
"""What every group of verbs stands on: a connection, the named queries, the errors."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

import psycopg

from kombu_pgqueue import sql
from kombu_pgqueue.store.errors import store_errors

#: `(job_id, lease_token)`: what a verdict names.
JobRef = tuple[UUID, UUID]
Row = tuple[Any, ...]
Parameters = dict[str, Any]


class StoreBase:
    """Named queries on one autocommit connection, or inside a transaction of the caller's."""

    def __init__(
        self, connection: psycopg.Connection[Any], *, schema: str = sql.DEFAULT_SCHEMA
    ) -> None:
        self.connection = connection
        self.schema = schema
        self._queries = {name: text.encode() for name, text in sql.queries(schema).items()}

    def _send(
        self, name: str, parameters: Mapping[str, Any], *, prepare: bool | None = None
    ) -> psycopg.Cursor[Row]:
        cursor: psycopg.Cursor[Row] = self.connection.cursor(binary=True)
        return cursor.execute(self._queries[name], parameters, prepare=prepare)

    def _row(self, name: str, parameters: Mapping[str, Any]) -> Row:
        with store_errors():
            return cast(Row, self._send(name, parameters).fetchone())

    def _rows(self, name: str, parameters: Mapping[str, Any]) -> list[Row]:
        with store_errors():
            return self._send(name, parameters).fetchall()

    def _value(self, name: str, parameters: Mapping[str, Any]) -> Any:
        return self._row(name, parameters)[0]

    def _count(self, name: str, parameters: Mapping[str, Any]) -> int:
        """Rows a statement touched."""
        with store_errors():
            return self._send(name, parameters).rowcount

    def ping(self) -> None:
        """Raise `StoreUnavailable` unless the server answers."""
        with store_errors():
            self.connection.execute("SELECT 1")


def seconds(value: float | None) -> timedelta | None:
    """Seconds as the interval the functions take."""
    return None if value is None else timedelta(seconds=value)
