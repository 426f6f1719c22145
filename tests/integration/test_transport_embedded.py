# SPDX-License-Identifier: BSD-3-Clause
"""`pgqueue-embedded:///path` as a broker (T-1)."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from kombu import Connection

from kombu_pgqueue import embedded, process


@pytest.fixture
def path() -> Iterator[Path]:
    # Short: the socket's name must fit.
    directory = Path(tempfile.mkdtemp(prefix="pgq"))
    yield directory / "pg"
    process.close_all()
    embedded.release(directory / "pg")
    shutil.rmtree(directory, ignore_errors=True)


def test_the_url_is_enough(path: Path) -> None:
    with Connection(f"pgqueue-embedded://{path}") as broker:
        queue = broker.SimpleQueue("work")
        queue.put({"a": 1})
        message = queue.get(timeout=10)
        assert message.payload == {"a": 1}
        message.ack()
        queue.close()
        assert broker.as_uri() == f"pgqueue-embedded://{path}"
