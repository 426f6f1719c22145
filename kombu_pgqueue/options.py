# SPDX-License-Identifier: BSD-3-Clause
"""Transport options: one frozen value made of the URL and `broker_transport_options`.

Everything in the URL that is not ours is libpq's and is checked by libpq itself, so several
hosts, `sslmode`, unix sockets, IPv6 and service files mean what they mean to every other client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any
from urllib.parse import parse_qsl, quote, unquote

from kombu_pgqueue.errors import ConfigurationError
from kombu_pgqueue.url import EMBEDDED_SCHEME, safe_uri, split_url, unreadable

__all__ = ["Options", "parse_url", "safe_uri"]


@dataclass(frozen=True)
class Options:
    """Validated settings of one database. Times are seconds.

    `lease_ttl` None reads `queue.lease.ttl_seconds` from `job_config`. `conninfo` is libpq's
    keyword form, empty for an embedded server until it runs.
    """

    conninfo: str = field(default="", repr=False)
    schema: str = "pgqueue"
    auto_migrate: bool = True
    poll_interval: float = 5.0
    lease_ttl: float | None = None
    visibility_timeout: float | None = None
    connect_timeout: float = 5.0
    application_name: str | None = None
    use_notify: bool = True
    prepare: bool = True
    publish_connections: int = 2
    publish_synchronous_commit: str | None = None
    max_claim_bytes: int | None = None
    embedded_path: str | None = None

    def with_conninfo(self, conninfo: str) -> Options:
        """The same options for a server that has just been started."""
        return replace(self, conninfo=conninfo)


#: What kombu and Celery merge into `transport_options` by themselves: their retry policies
#: (`Connection.ensure`, `Connection._extract_failover_opts`, `task_publish_retry_policy`).
FOREIGN = frozenset(
    {
        "callback",
        "connect_retries_timeout",
        "errback",
        "interval_max",
        "interval_start",
        "interval_step",
        "max_retries",
        "on_revive",
        "retry_errors",
    }
)

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in _TRUE | _FALSE:
        return value.lower() in _TRUE
    raise ValueError("a boolean (true or false)")


def _seconds(value: Any) -> float:
    if not isinstance(value, bool) and isinstance(value, int | float | str):
        try:
            seconds = float(value)
        except ValueError:
            seconds = -1.0
        if 0 < seconds < 1e9:
            return seconds
    raise ValueError("a positive number of seconds")


def _count(value: Any) -> int:
    if not isinstance(value, bool) and isinstance(value, int | str):
        try:
            number = int(value)
        except ValueError:
            number = 0
        if number > 0:
            return number
    raise ValueError("a positive whole number")


def _text(value: Any) -> str:
    if isinstance(value, str) and value and "\0" not in value:
        return value
    raise ValueError("a non-empty text")


def _schema(value: Any) -> str:
    name = _text(value)
    if len(name.encode()) > 48 or name.startswith("pg_"):
        raise ValueError("a schema name of at most 48 bytes that does not start with pg_")
    return name


def _commit_mode(value: Any) -> str:
    modes = ("on", "off", "local", "remote_write", "remote_apply")
    if value in modes:
        return str(value)
    raise ValueError("one of " + ", ".join(modes))


_READERS: dict[str, Callable[[Any], Any]] = {
    "schema": _schema,
    "auto_migrate": _boolean,
    "poll_interval": _seconds,
    "lease_ttl": _seconds,
    "visibility_timeout": _seconds,
    "connect_timeout": _seconds,
    "application_name": _text,
    "use_notify": _boolean,
    "prepare": _boolean,
    "publish_connections": _count,
    "publish_synchronous_commit": _commit_mode,
    "max_claim_bytes": _count,
}

#: Options that may stand in the URL's query or in `broker_transport_options`.
KNOWN = tuple(sorted(_READERS))

#: Ours, but also libpq's: read here and handed on.
_SHARED = frozenset({"application_name", "connect_timeout"})

assert set(_READERS) <= {f.name for f in fields(Options)}


def parse_url(
    url: str,
    transport_options: Mapping[str, Any] | None = None,
    *,
    connect_timeout: float | None = None,
) -> Options:
    """Make `Options` of a broker URL and kombu's `transport_options`.

    An option in `transport_options` beats the same one in the URL. `connect_timeout` (seconds) is
    kombu's own and is used where neither names one. Raises `ConfigurationError`.
    """
    parts = split_url(url)
    given: dict[str, Any] = {}
    if connect_timeout:
        given["connect_timeout"] = _read("connect_timeout", connect_timeout)
    foreign_query: list[tuple[str, str]] = []
    for key, value in parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True):
        if key in _READERS:
            given[key] = _read(key, value)
        if key not in _READERS or key in _SHARED:
            foreign_query.append((key, value))
    for key, value in (transport_options or {}).items():
        if key in FOREIGN:
            continue
        if key not in _READERS:
            raise ConfigurationError(
                f"unknown transport option {key!r}; known are: {', '.join(KNOWN)}"
            )
        if value is not None:
            given[key] = _read(key, value)
    if parts.scheme == EMBEDDED_SCHEME:
        if foreign_query and any(key not in _SHARED for key, _ in foreign_query):
            key = next(key for key, _ in foreign_query if key not in _SHARED)
            raise ConfigurationError(
                f"unknown transport option {key!r}; known are: {', '.join(KNOWN)}"
            )
        return Options(embedded_path=_embedded_path(url, parts.rest), **given)
    # libpq takes whole seconds only, and `connect` sets the time limit itself.
    foreign_query = [(k, v) for k, v in foreign_query if k != "connect_timeout"]
    query = "&".join(f"{quote(k, safe='')}={quote(v, safe='')}" for k, v in foreign_query)
    return Options(conninfo=_conninfo(url, parts.rest, query), **given)


def _read(key: str, value: Any) -> Any:
    try:
        return _READERS[key](value)
    except ValueError as exc:
        raise ConfigurationError(
            f"transport option {key!r} must be {exc}, not {value!r}; "
            f"known options are: {', '.join(KNOWN)}"
        ) from None


def _embedded_path(url: str, rest: str) -> str:
    path = unquote(rest)
    if not path.startswith("/") or path == "/":
        raise ConfigurationError(
            f"{safe_uri(url)!r} must name an absolute directory: {EMBEDDED_SCHEME}:///path"
        )
    return path


def _conninfo(url: str, rest: str, query: str) -> str:
    # Late: whoever only registers the scheme must not need the driver.
    import psycopg
    from psycopg.conninfo import conninfo_to_dict, make_conninfo

    uri = f"postgresql://{rest}" + (f"?{query}" if query else "")
    try:
        parameters = {key: str(value) for key, value in conninfo_to_dict(uri).items()}
        _check_ports(parameters.get("port", ""))
        return make_conninfo(**parameters)
    except (psycopg.ProgrammingError, ValueError) as exc:
        # libpq quotes the URI in some of its messages.
        reason = str(exc).strip().replace(uri, safe_uri(url))
        raise ConfigurationError(
            f"cannot use the broker URL {unreadable(url, reason)}; "
            f"besides libpq's parameters it takes: {', '.join(KNOWN)}"
        ) from None


def _check_ports(ports: str) -> None:
    # libpq looks at them when it connects, where a typing error would count as an outage.
    for port in filter(None, ports.split(",")):
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ValueError(f'invalid port number: "{port}"')
