# SPDX-License-Identifier: BSD-3-Clause
"""Failover: `Connection.switch()` for URLs that kombu cannot take apart itself.

kombu's own reads any URL as one host with one port, and hands every query parameter to a function
that knows none of ours.
"""

from __future__ import annotations

from typing import Any

from kombu_pgqueue.url import EMBEDDED_SCHEME, SCHEME, SafeUrl, reveal


def switch(connection: Any, conn_str: str) -> None:
    """Use another URL from now on. Does not connect."""
    url = reveal(conn_str)
    scheme = url.partition("://")[0]
    if scheme not in (SCHEME, EMBEDDED_SCHEME):
        # Another transport's URL: that one needs no such help, and must not get it.
        del connection.switch
        connection.switch(url)
        return
    connection.close()
    connection.declared_entities.clear()
    connection._closed = False
    # Per class: a connection remembers its last port and virtual host where it is given none.
    for name in ("port", "virtual_host"):
        connection.__dict__.pop(name, None)
    parameters = dict(
        connection._initial_params,
        hostname=SafeUrl(url),
        transport=scheme,
        userid=None,
        password=None,
        virtual_host=None,
        port=None,
    )
    connection._init_params(**parameters)
