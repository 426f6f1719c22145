# SPDX-License-Identifier: BSD-3-Clause
"""Tells kombu where `pgqueue://` lives, without importing anything that imports kombu back.

The `kombu.serializers` entry point names `ENTRY`: kombu loads that group while it is itself being
imported, so nothing here may need `kombu.Queue`, Celery or the driver.
"""

from __future__ import annotations

from kombu.transport import TRANSPORT_ALIASES

TRANSPORT_ALIASES["pgqueue"] = "kombu_pgqueue.transport:Transport"
TRANSPORT_ALIASES["pgqueue-embedded"] = "kombu_pgqueue.transport:EmbeddedTransport"

#: What kombu's serializer registry wants of an entry point: no encoder, no decoder, a content type.
ENTRY = (None, None, "application/x-pgqueue")
