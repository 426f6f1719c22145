# SPDX-License-Identifier: BSD-3-Clause
"""The SQL of this package, read from its files with the configured schema put in.

Files name every object `pgqueue.<name>`, so that they can be read, linted and run as they are.
"""

from __future__ import annotations

import hashlib
import re
from functools import lru_cache
from importlib import resources

from kombu_pgqueue.errors import ConfigurationError

DEFAULT_SCHEMA = "pgqueue"
_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,47}")
_QUALIFIER = re.compile(r"\bpgqueue(?=\.)")
_QUERY_HEADER = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def check_schema_name(schema: str) -> str:
    """Return `schema` if it can stand unquoted in SQL, else raise `ConfigurationError`."""
    if not _SCHEMA_NAME.fullmatch(schema) or schema.startswith("pg_"):
        raise ConfigurationError(
            f"schema {schema!r} is not allowed: lower-case letters, digits and underscores, "
            "48 characters at most, not starting with a digit or with pg_"
        )
    return schema


def in_schema(text: str, schema: str) -> str:
    """Put `schema` in the place of the default one."""
    check_schema_name(schema)
    return _QUALIFIER.sub(schema, text).replace(
        "CREATE SCHEMA IF NOT EXISTS pgqueue;", f"CREATE SCHEMA IF NOT EXISTS {schema};"
    )


def revision(name: str, schema: str) -> str:
    """The DDL of one migration."""
    return in_schema(_read("revisions", f"{name}.sql"), schema)


def functions(schema: str) -> str:
    """Every function and view, in the order of their files; may be applied again and again."""
    return in_schema(_functions(), schema)


def functions_digest() -> str:
    """What a migration writes down about the functions it was made for."""
    return hashlib.sha256(_functions().encode()).hexdigest()


@lru_cache
def queries(schema: str) -> dict[str, str]:
    """The named queries of `queries.sql`."""
    parts = _QUERY_HEADER.split(in_schema(_read("queries.sql"), schema))[1:]
    return {
        name: "\n".join(line for line in text.splitlines() if not line.startswith("--")).strip()
        for name, text in zip(parts[::2], parts[1::2], strict=True)
    }


@lru_cache
def _functions() -> str:
    folder = resources.files(__name__) / "functions"
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.endswith(".sql"))
    return "\n".join(_read("functions", name) for name in names)


def _read(*path: str) -> str:
    return (resources.files(__name__).joinpath(*path)).read_text(encoding="utf-8")
