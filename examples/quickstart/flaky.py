# SPDX-License-Identifier: BSD-3-Clause
"""A local HTTP service that is down (503) for its first requests, then recovers."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWER = b'{"USD": 1.08}'


@contextlib.contextmanager
def flaky_service(failures: int) -> Iterator[str]:
    """Serve until the block ends; yield the URL. The first *failures* requests get a 503."""
    left = iter(range(failures))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if next(left, None) is not None:
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(ANSWER)

        def log_message(self, format: str, *args: object) -> None:
            """Leave the terminal to the demo."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/rates"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
