# SPDX-License-Identifier: BSD-3-Clause
"""Broker URLs as text: taking them apart, and showing them without their passwords."""

from __future__ import annotations

import re
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote

from kombu_pgqueue.errors import ConfigurationError

SCHEME = "pgqueue"
EMBEDDED_SCHEME = "pgqueue-embedded"

#: libpq's own names for secrets that may stand in a query.
_SECRET_KEYS = frozenset({"password", "sslpassword"})

#: A ";" that is followed by no URL belongs to a password that somebody did not encode.
_BETWEEN_URLS = re.compile(r";(?=[A-Za-z][\w+.-]*://|$)")
#: `host:port`, one or more of them.
_HOSTS = re.compile(r"(?:(?:\[[^\[\]]*\]|[^\[\]:,]*)(?::\d*)?(?:,|$))*")


class UrlParts(NamedTuple):
    """`rest` is what stands between `scheme://` and the query."""

    scheme: str
    rest: str
    query: str


def split_url(url: str) -> UrlParts:
    """Cut a URL at its scheme and its query; nothing is decoded. Raises `ConfigurationError`."""
    scheme, separator, rest = str(url).partition("://")
    if not separator or scheme not in (SCHEME, EMBEDDED_SCHEME):
        raise ConfigurationError(
            f"a broker URL starts with {SCHEME}:// or {EMBEDDED_SCHEME}://, not {scheme[:20]!r}"
        )
    rest, _, query = rest.partition("?")
    return UrlParts(scheme, rest, query)


def safe_uri(url: str, mask_with: str = "**") -> str:
    """`url` with every password in it replaced, whatever the scheme; several URLs by `;` too."""
    return ";".join(_safe_one(part, mask_with) for part in _BETWEEN_URLS.split(str(url)))


def _safe_one(url: str, mask_with: str) -> str:
    scheme, separator, rest = url.partition("://")
    if not separator:
        # The rest of a URL that was cut at a ";" in its password, perhaps.
        return f"{mask_with}@{url.rpartition('@')[2]}" if "@" in url else url
    rest, question, query = rest.partition("?")
    # An unencoded "@" or "/" in a password is the user's mistake, but it must not become ours:
    # everything up to the last "@" counts as credentials.
    userinfo, at, hosts = rest.rpartition("@")
    if at:
        user, colon, _ = userinfo.partition(":")
        if colon and not _HOSTS.fullmatch(hosts.partition("/")[0]):
            hosts = mask_with  # no host: a piece of a URL that was cut inside its password
        rest = f"{user}{colon}{mask_with if colon else ''}@{hosts}"
    if question:
        query = "&".join(_safe_pair(pair, mask_with) for pair in query.split("&"))
    return f"{scheme}://{rest}{question}{query}"


def _safe_pair(pair: str, mask_with: str) -> str:
    key, equals, _ = pair.partition("=")
    if equals and unquote(key).lower() in _SECRET_KEYS:
        return f"{key}={mask_with}"
    return pair


def unreadable(url: str, reason: str) -> str:
    """A URL and libpq's reason to refuse it, as far as both can be shown.

    Where there is a password it may be what breaks the URL: then neither what passes for the host
    nor what libpq quotes of it is shown.
    """
    scheme, _, rest = url.partition("://")
    rest, question, _ = rest.partition("?")
    if ":" not in rest.rpartition("@")[0]:
        return f"{safe_uri(url)!r}: {reason}"
    quoted = re.compile(r'"([^"]*)"')
    reason = quoted.sub(lambda m: '"**"' if m[1] in rest else m[0], reason)
    query = safe_uri(url).partition("?")[2]
    return (
        f"'{scheme}://{rest.partition(':')[0]}:**@**{question}{query}': {mask(reason, url)} "
        "(percent-encode @ : / ? # [ ] % ; in a password)"
    )


def secrets_of(url: str) -> list[str]:
    """The passwords a URL holds, as they stand there and decoded."""
    _, _, rest = str(url).partition("://")
    rest, _, query = rest.partition("?")
    userinfo, _, _ = rest.rpartition("@")
    found = [userinfo.partition(":")[2]]
    found += [value for key, value in parse_qsl(query) if key.lower() in _SECRET_KEYS]
    return [text for value in found for text in (value, unquote(value)) if text]


def mask(text: str, url: str, mask_with: str = "**") -> str:
    """`text` with every password of `url` replaced; for messages that other code wrote."""
    for secret in secrets_of(url):
        text = text.replace(secret, mask_with)
    return text


class SafeUrl(str):
    """A broker URL that shows itself without its passwords and compares as what it is.

    kombu keeps the URL in `Connection.hostname` and hands it out in `info()`, which Celery puts
    into `inspect stats`: there this text is what anybody sees.
    """

    real: str

    def __new__(cls, url: str) -> SafeUrl:
        if isinstance(url, SafeUrl):
            return url
        self = super().__new__(cls, safe_uri(url))
        self.real = str(url)
        return self

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.real == reveal(other)
        return NotImplemented

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.real)

    def __reduce__(self) -> tuple[type[SafeUrl], tuple[str]]:
        return SafeUrl, (self.real,)


def reveal(url: str) -> str:
    """The URL itself, passwords included."""
    return url.real if isinstance(url, SafeUrl) else url


def url_of_parts(
    scheme: str,
    *,
    host: str | None,
    port: int | str | None = None,
    user: str | None = None,
    password: str | None = None,
    database: str | None = None,
) -> str:
    """A URL of the pieces kombu has when it took a URL apart itself (or never had one)."""
    userinfo = ""
    if user or password:
        userinfo = quote(user or "", safe="")
        if password:
            userinfo += ":" + quote(password, safe="")
        userinfo += "@"
    if host and ":" in host and not host.startswith("["):
        host = f"[{host}]"
    place = (host or "") + (f":{port}" if port else "")
    path = "" if database in (None, "", "/") else quote(str(database).lstrip("/"), safe="")
    return f"{scheme}://{userinfo}{place}/{path}"
