# SPDX-License-Identifier: BSD-3-Clause
"""The processes of the demo: Celery's worker and Celery's command line."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
# How much of a command's output is shown.
HEAD, TAIL = 19, 6
CELERY = [sys.executable, "-m", "celery", "-A", "quickstart"]


class Worker:
    """A real ``celery worker`` process; its log goes to *log* and, line by line, into `lines`."""

    def __init__(self, log: Path) -> None:
        self.lines: queue.Queue[tuple[float, str]] = queue.Queue()
        self.process = subprocess.Popen(
            [*CELERY, "worker", "--concurrency=2", "--loglevel=INFO"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=HERE,
            env=environment(),
        )
        self._ready = threading.Event()
        self._log = log
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self._log.open("w", encoding="utf-8") as log:
            for line in self.process.stdout:
                log.write(line)
                log.flush()
                if line.rstrip().endswith(" ready."):
                    self._ready.set()
                self.lines.put((time.time(), line))
        self._ready.set()

    def wait_ready(self, seconds: float = 30.0) -> bool:
        return self._ready.wait(seconds) and self.process.poll() is None

    def stop(self) -> int:
        """Shut down warmly, by force after a while; return the exit status."""
        self.process.terminate()
        try:
            return self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()
        finally:
            self._reader.join(5)


def environment() -> dict[str, str]:
    # Celery warns about root, which a container's user often is.
    return {**os.environ, "PYTHONUNBUFFERED": "1", "C_FORCE_ROOT": "1"}


@contextlib.contextmanager
def running_worker(log: Path) -> Iterator[Worker]:
    worker = Worker(log)
    try:
        yield worker
    finally:
        if worker.process.poll() is None:
            worker.stop()


def celery(*words: str, show: bool = True) -> tuple[int, str]:
    """Run ``celery -A quickstart words...``, show it like a terminal; return status and text."""
    done = subprocess.run(
        [*CELERY, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if show else subprocess.PIPE,
        text=True,
        cwd=HERE,
        env=environment(),
        timeout=60,
        check=False,
    )
    if show:
        print(f"\n  $ celery -A quickstart {' '.join(words)}")
        print("".join(f"  | {line}\n" for line in shortened(done.stdout)), end="")
        if done.returncode:
            print(f"  (exit status {done.returncode})")
    return done.returncode, done.stdout


def shortened(text: str) -> list[str]:
    """Return the lines of *text*, a long traceback's inner frames left out."""
    lines = text.rstrip().splitlines()
    if len(lines) <= HEAD + TAIL + 1:
        return lines
    left_out = f"  ... {len(lines) - HEAD - TAIL} lines left out here ..."
    return [*lines[:HEAD], left_out, *lines[-TAIL:]]
