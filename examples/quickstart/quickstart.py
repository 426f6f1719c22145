# SPDX-License-Identifier: BSD-3-Clause
"""A small shop's background work: an ordinary Celery app, with PostgreSQL as its broker."""

from __future__ import annotations

import json
import os
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from celery import Celery

import celery_ext

# A server of its own below /tmp; elsewhere it is pgqueue://user:password@host/database.
DEFAULT_BROKER = f"pgqueue-embedded://{tempfile.gettempdir()}/pgqueue-quickstart-{os.getuid()}"
PRICES = Path(os.environ.get("QUICKSTART_PRICES", "prices.json"))

app = Celery("quickstart", broker=os.environ.get("QUICKSTART_BROKER", DEFAULT_BROKER))
celery_ext.setup(app)


@app.task(autoretry_for=(ConnectionError,), max_retries=6, retry_backoff=0.5)
def fetch_rates(url: str) -> str:
    """Ask a service that is sometimes down: any HTTP or network error is tried again."""
    try:
        with urlopen(url, timeout=5) as answer:
            rates = json.load(answer)
    except URLError as exc:
        # An HTTPError holds an open socket and cannot be handed from process to process.
        raise ConnectionError(str(exc)) from exc
    return f"1 EUR = {rates['USD']} USD"


@app.task
def import_order(line: str) -> str:
    """Read ``sku,quantity``. A bad record stays bad: nobody listed ValueError for a retry."""
    sku, quantity = line.split(",")
    return f"{int(quantity)} x {sku}"


@app.task(acks_late=True)
def monthly_report(month: str) -> str:
    """Take a while; the lease is renewed meanwhile."""
    time.sleep(4)
    return f"report for {month} written"


@app.task(autoretry_for=(FileNotFoundError,), max_retries=2, retry_backoff=0.5)
def price_order(sku: str, quantity: int) -> str:
    """Need the price list. Three tries, then it is a case for somebody to look at."""
    price = json.loads(PRICES.read_text(encoding="utf-8"))[sku]
    return f"{quantity} x {sku} = {quantity * price:.2f} EUR"
