# SPDX-License-Identifier: BSD-3-Clause
"""What an app's settings say about its broker."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kombu_pgqueue.errors import ConfigurationError

if TYPE_CHECKING:
    from kombu_pgqueue.options import Options
    from kombu_pgqueue.store import JobStore

#: The URL schemes, and so kombu's transport names, that are ours.
SCHEMES = ("pgqueue", "pgqueue-embedded")


def uses_pgqueue(app: Any, *, write: bool = False) -> bool:
    """Does `app` read from (or write to) a pgqueue broker? Connects to nothing."""
    return any(_is_ours(url) for url in broker_urls(app, write=write))


def broker_urls(app: Any, *, write: bool = True) -> list[str]:
    """The broker URLs of the app, failover alternatives included."""
    conf = app.conf
    setting = (conf.broker_write_url if write else conf.broker_read_url) or conf.broker_url
    given = setting.split(";") if isinstance(setting, str) else list(setting or ())
    return [str(url) for url in given]


def options_of(app: Any) -> Options:
    """The validated options of the app's first pgqueue broker.

    Raises ConfigurationError if it has none, or if its URL or its options cannot be right.
    """
    from kombu_pgqueue.options import parse_url

    for url in broker_urls(app):
        if _is_ours(url):
            return parse_url(url, app.conf.broker_transport_options or {})
    schemes = ", ".join(f"{url.partition('://')[0]}://" for url in broker_urls(app) if "://" in url)
    raise ConfigurationError(
        f"the broker of app {app.main or app!r} is {schemes or 'no URL'}, not pgqueue:// or "
        "pgqueue-embedded://: name the app with -A, or set its broker_url"
    )


@contextmanager
def open_store(app: Any, application_name: str) -> Iterator[JobStore]:
    """A store on a session of its own for an operator's work. Raises PgQueueError."""
    from kombu_pgqueue.connect import connect
    from kombu_pgqueue.store import JobStore

    options = options_of(app)
    connection = connect(options, role="admin", application_name=application_name)
    try:
        yield JobStore(connection, schema=options.schema)
    finally:
        connection.close()


def _is_ours(url: str) -> bool:
    return str(url).partition("://")[0] in SCHEMES
