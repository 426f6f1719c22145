# SPDX-License-Identifier: BSD-3-Clause
"""Everything that can go wrong, in one shallow tree.

::

    PgQueueError
    |-- ConfigurationError       a URL or an option that cannot be right
    |-- EmbeddedServerError      the embedded server cannot be started or joined
    `-- StoreError               the database refused, with its SQLSTATE
        |-- StoreUnavailable     no usable connection: try again later
        |-- ServerUnsupported    too old, or not UTF-8
        `-- SchemaError          the schema is not one this code can use
            |-- SchemaMissing    nothing is installed there
            `-- SchemaTooNew     installed by a newer, incompatible release

A refused verdict is none of these: a lease that was taken away answers ``False``.
"""

from __future__ import annotations


class PgQueueError(Exception):
    """Base of every error of this library."""


class ConfigurationError(PgQueueError, ValueError):
    """A URL or an option that cannot be right; the message names it and what is allowed."""


class EmbeddedServerError(PgQueueError, RuntimeError):
    """The embedded server cannot be started or joined; the message says what to do."""


class StoreError(PgQueueError):
    """The database refused a statement; `sqlstate` is its five-character code, if it sent one."""

    def __init__(self, message: str, *, sqlstate: str | None = None) -> None:
        super().__init__(message)
        self.sqlstate = sqlstate


class StoreUnavailable(StoreError, OSError):
    """No usable connection: unreachable, cut, shutting down or turned read-only."""

    # OSError.__new__ would turn two arguments into (errno, strerror).
    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class ServerUnsupported(StoreError):
    """The server is older than PostgreSQL 13, or its database is not UTF-8."""


class SchemaError(StoreError):
    """The schema in the database is not one this code can use."""


class SchemaMissing(SchemaError):
    """No pgqueue schema is installed and `auto_migrate` is off."""


class SchemaTooNew(SchemaError):
    """The schema was installed by a newer release that this one cannot work with."""
