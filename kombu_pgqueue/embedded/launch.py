# SPDX-License-Identifier: BSD-3-Clause
"""Start a supervisor and hear how it went."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from dataclasses import astuple

from kombu_pgqueue.errors import EmbeddedServerError

from . import binaries
from .directory import Home
from .layout import LINGER_SECONDS, LOG
from .state import State, decode

# The supervisor loads this package under a name of its own: without its parent and what that
# imports, without site-packages, and with nothing left to import once it has given up root.
_BOOT = """
import sys, types
package = types.ModuleType("pgqueue_embedded")
package.__path__ = [sys.argv[1]]
sys.modules[package.__name__] = package
from pgqueue_embedded.startup import main
main(sys.argv[2:])
"""
_OPTIONS = ("-I", "-S", "-B")
_PASSED_ON = ("PATH", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "DYLD_FALLBACK_LIBRARY_PATH")


def launch(home: Home, deadline: float) -> State:
    """Start a supervisor for *home*; return its first word, when the server is ready or failed.

    Raises EmbeddedServerError if the supervisor says nothing before *deadline* or dies.
    """
    process = subprocess.Popen(
        [_python(), *_OPTIONS, "-c", _BOOT, os.path.dirname(__file__), home.path, _request(home)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        cwd="/",
        env={key: os.environ[key] for key in _PASSED_ON if key in os.environ},
        start_new_session=True,
    )
    try:
        # The first process ends at once, its detached child closes the pipe after its word.
        said, _ = process.communicate(timeout=max(0.0, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise EmbeddedServerError(
            f"the embedded server at {home.path} was not ready in time; it may still come up:"
            f" see {os.path.join(home.path, LOG)}, or allow a longer timeout"
        ) from None
    finally:
        if process.stdout is not None:
            process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
    *before, last = said.decode(errors="replace").strip().splitlines() or [""]
    word = decode(last)
    if word is None:
        raise EmbeddedServerError(
            f"the supervisor of the embedded server at {home.path} ended without a word;"
            f" see {os.path.join(home.path, LOG)}\n" + "\n".join([*before, last])
        )
    return word


def _request(home: Home) -> str:
    found = binaries.usable(home.path)
    # Root may have to fall back to what the server's user can reach; others take the first.
    candidates = list(found) if os.geteuid() == 0 else [next(found)]
    request = {
        "uid": home.uid,
        "gid": home.gid,
        "linger": LINGER_SECONDS,
        "candidates": [astuple(candidate) for candidate in candidates],
    }
    return json.dumps(request)


def _python() -> str:
    """Return an interpreter; ``sys.executable`` is the host program where Python is embedded."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    for name in ("python3", "python"):
        candidate = os.path.join(sys.exec_prefix, "bin", name)
        if os.access(candidate, os.X_OK):
            return candidate
    raise EmbeddedServerError(
        "cannot find the Python interpreter to run the embedded server's supervisor;"
        " set sys.executable"
    )
