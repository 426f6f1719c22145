# SPDX-License-Identifier: BSD-3-Clause
"""A real ``celery worker`` in a process group of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .apps.common import BROKER, LEDGER
from .database import broker_url
from .wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
PLAIN = "tests.support.apps.plain"
EXTENDED = "tests.support.apps.extended"

_numbers = itertools.count(1)


class Worker:
    """A running worker; `log` holds what it printed."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait_for(self, text: str, timeout: float = 20.0) -> None:
        """Wait until *text* shows in the log; fail at once if the worker ends first."""

        def shown() -> bool:
            if text in self.output():
                return True
            status = self.process.poll()
            assert status is None, f"worker ended with {status}:\n{self.output()}"
            return False

        wait_until(shown, timeout, lambda: f"{text!r} in the log:\n{self.output()}")

    def send(self, signum: int) -> None:
        """Send a signal to the worker's main process only."""
        self.process.send_signal(signum)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to the worker and all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signum)

    def wait(self, timeout: float = 30.0) -> int:
        """Wait for the main process and return its status."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            message = f"worker still runs after {timeout:g} s:\n{self.output()}"
            raise AssertionError(message) from None

    def stop(self, timeout: float = 30.0) -> int:
        """Shut down warmly and return the exit status."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        return self.wait(timeout)


@contextlib.contextmanager
def worker(
    app: str,
    conninfo: str,
    *,
    pool: str = "prefork",
    concurrency: int = 2,
    queues: Sequence[str] = (),
    options: Mapping[str, object] | None = None,
    args: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    loglevel: str = "INFO",
    ready_timeout: float = 30.0,
) -> Iterator[Worker]:
    """Start a worker of the app module *app* on the database *conninfo*; yield it when it is ready.

    *options* are transport options, *args* more words of the command line. At the end the worker is
    shut down, by force if need be; if the test failed its log is shown.
    """
    number = next(_numbers)
    log = Path(tempfile.mkstemp(prefix="pgqueue-worker-", suffix=".log")[1])
    command = [sys.executable, "-m", "celery", "-A", app, "worker"]
    command += ["--pool", pool, "--concurrency", str(concurrency), "--loglevel", loglevel]
    command += ["--hostname", f"w{number}-{os.getpid()}@test", *args]
    if queues:
        command += ["--queues", ",".join(queues)]
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env=environment(conninfo, options, env),
            start_new_session=True,
        )
    running = Worker(process, log)
    try:
        running.wait_for(" ready.", ready_timeout)
        yield running
        running.stop()
    except BaseException:
        print(f"--- log of worker {number} ({app}, {pool}) ---\n{running.output()}")
        raise
    finally:
        running.kill()
        process.wait()
        log.unlink()


def environment(
    conninfo: str,
    options: Mapping[str, object] | None = None,
    extra: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment that a sample app reads its database from."""
    return {
        **os.environ,
        # Warnings about running as root are no news here.
        "C_FORCE_ROOT": "1",
        "PYTHONPATH": str(ROOT),
        "PYTHONUNBUFFERED": "1",
        BROKER: broker_url(conninfo, **(options or {})),
        LEDGER: conninfo,
        **(extra or {}),
    }


def celery_command(
    app: str, conninfo: str, *words: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``celery -A app words...`` and return what it printed and its status."""
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", app, *words],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=environment(conninfo),
        timeout=timeout,
        check=False,
    )
