# SPDX-License-Identifier: BSD-3-Clause
"""Run the quickstart from beginning to end: ``make demo``.

Starts a PostgreSQL of its own and a real worker, publishes four tasks of which two go wrong, mends
what was wrong with one and replays it. Ends with status 0 only if everything went as told.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import psycopg
from flaky import flaky_service
from processes import celery, running_worker
from watch import Watch, tell

from kombu_pgqueue import embedded

PUBLISHED_DONE = """
SELECT (SELECT count(*) FROM pgqueue.job_queue) = 0
   AND (SELECT count(*) FROM pgqueue.job_dead_letter WHERE resolved_at IS NULL) = %s
"""
OPEN = """
SELECT job_kind, dead_letter_id, failure_code FROM pgqueue.job_dead_letter
WHERE resolved_at IS NULL
"""
COUNTS = """
SELECT 'job_queue: jobs alive', count(*) FROM pgqueue.job_queue
UNION ALL
SELECT 'job_dead_letter: open', count(*) FROM pgqueue.job_dead_letter WHERE resolved_at IS NULL
UNION ALL
SELECT 'job_dead_letter: replayed', count(*) FROM pgqueue.job_dead_letter
WHERE resolution = 'replayed'
"""
# A wait may end this much later than planned before the demo calls it wrong; seconds.
LATE = 1.5


class Unexpected(Exception):
    """The demo did not go as it should."""


def expect(condition: bool, what: str) -> None:
    if not condition:
        raise Unexpected(what)


def main() -> int:
    began = time.time()
    directory = Path(tempfile.mkdtemp(prefix="pgqueue-demo-", dir="/tmp"))
    server, log = directory / "pg", directory / "worker.log"
    os.environ["QUICKSTART_BROKER"] = f"pgqueue-embedded://{server}"
    os.environ["QUICKSTART_PRICES"] = str(directory / "prices.json")
    print("pgqueue quickstart: PostgreSQL is the broker, the worker is Celery's own\n")
    try:
        with psycopg.connect(embedded.acquire(server), autocommit=True) as connection:
            version = connection.info.parameter_status("server_version")
            tell(began, "server", f"PostgreSQL {version} runs")
            with running_worker(log) as worker, flaky_service(failures=3) as url:
                expect(worker.wait_ready(), "the worker gets ready within 30 s")
                tell(began, "worker", "ready (prefork, 2 processes)")
                play(Watch(connection, worker.lines, began), url)
    except (Unexpected, psycopg.Error, embedded.EmbeddedServerError) as exc:
        print(f"\nFAILED: {exc}", file=sys.stderr)
        if log.exists():
            print(f"\nThe worker's log:\n{log.read_text(encoding='utf-8')}", file=sys.stderr)
        return 1
    finally:
        embedded.release(server)
        remove(directory)
    print(
        f"\nOK: one task replayed after its cause was mended ({time.time() - began:.0f} s in all)"
    )
    return 0


def play(watch: Watch, url: str) -> None:
    ids = publish(watch, url)

    expect(watch.until(PUBLISHED_DONE, 2), "two tasks are done, two dead letters, within 30 s")
    expect(watch.runs.get(ids["fetch_rates"]) == 4, "fetch_rates runs four times")
    expect(ids["fetch_rates"] in watch.results, "fetch_rates succeeds in the end")
    expect(watch.runs.get(ids["import_order"]) == 1, "a bad record is not tried again")
    expect(watch.runs.get(ids["price_order"]) == 3, "price_order runs three times")
    expect(ids["monthly_report"] in watch.results, "the slow report succeeds")
    show_waits(watch)

    print("\nTwo tasks will not run again by themselves. They are kept, with all that is known:")
    celery("dead-letter", "list")
    letters = {task: (number, code) for task, number, code in watch.connection.execute(OPEN)}
    codes = {task: code for task, (_, code) in letters.items()}
    expected = {"quickstart.import_order": "fatal", "quickstart.price_order": "exhausted"}
    expect(codes == expected, f"the dead letters are {expected}, not {codes}")
    number = str(letters["quickstart.price_order"][0])
    status, text = celery("dead-letter", "show", number)
    expect(status == 0 and "FileNotFoundError" in text, "show tells the error")

    mend_and_replay(watch, number, ids["price_order"])
    show_counts(watch)


def publish(watch: Watch, url: str) -> dict[str, str]:
    """Publish four tasks; return their ids by name."""
    import quickstart as shop

    sent = {
        "monthly_report": shop.monthly_report.delay("2026-10"),
        "fetch_rates": shop.fetch_rates.delay(url),
        "import_order": shop.import_order.delay("apples,a dozen"),
        "price_order": shop.price_order.delay("pears", quantity=12),
    }
    shop.app.close()
    tell(watch.began, "publisher", f"published {', '.join(sent)}")
    return {name: result.id for name, result in sent.items()}


def show_waits(watch: Watch) -> None:
    print("\nThe waits between runs: base 0.5 s, doubled each time, spread by 20 % either way.")
    print("  task             before run   planned      seen")
    for wait in watch.waits.values():
        seen = f"{wait.seen:.2f} s" if wait.seen is not None else "never"
        print(f"  {wait.task:<16} {wait.run:>10}    {wait.planned:.2f} s    {seen}")
        middle = 0.5 * 2 ** (wait.run - 2)
        expect(0.79 * middle < wait.planned < 1.21 * middle, f"about {middle} s are planned")
        expect(
            wait.seen is not None and -0.05 < wait.seen - wait.planned < LATE,
            f"run {wait.run} of {wait.task} starts when it is due",
        )
    expect(len(watch.waits) == 5, "five waits were seen")


def mend_and_replay(watch: Watch, number: str, task_id: str) -> None:
    Path(os.environ["QUICKSTART_PRICES"]).write_text('{"pears": 0.45}', encoding="utf-8")
    print("\nThe price list has arrived. Replay:")
    status, _ = celery("dead-letter", "replay", number)
    expect(status == 0, "the replay is accepted")
    expect(watch.until(PUBLISHED_DONE, 1), "the replayed task is done within 30 s")
    expect(watch.results.get(task_id) == "12 x pears = 5.40 EUR", "the replayed task succeeds")
    print("\nA dead letter is resolved once. Replay it again:")
    status, _ = celery("dead-letter", "replay", number)
    expect(status == 1, f"the second replay is refused with status 1, not {status}")


def show_counts(watch: Watch) -> None:
    print("\nWhat the tables hold at the end:")
    counts: dict[str, int] = {}
    for what, count in watch.connection.execute(COUNTS):
        counts[what] = count
        print(f"  {what:<28} {count}")
    expect(list(counts.values()) == [0, 1, 1], "no job is left, one dead letter open, one replayed")


def remove(directory: Path) -> None:
    """Remove the directory once its server, which nobody uses any more, has stopped."""
    deadline = time.monotonic() + 30
    while (directory / "pg/data/postmaster.pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
