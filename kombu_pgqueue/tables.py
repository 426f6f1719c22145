# SPDX-License-Identifier: BSD-3-Clause
"""The tables as SQLAlchemy metadata, for queries and reports of your own.

The migrations make the schema; a test holds this picture of it against their result. The package
itself writes through the SQL functions only, and so should you.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    DateTime,
    Double,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    Uuid,
    text,
)
from sqlalchemy.dialects.postgresql import JSONB

#: In the default schema; `metadata_in` gives the same tables in another.
metadata = MetaData(schema="pgqueue")


def metadata_in(schema: str) -> MetaData:
    """The same tables in another schema."""
    copy = MetaData(schema=schema)
    for table in metadata.sorted_tables:
        table.to_metadata(copy, schema=schema)
    return copy


job_queue = Table(
    "job_queue",
    metadata,
    Column("job_id", Uuid(), primary_key=True),
    Column("seq", BigInteger(), nullable=False),
    Column("queue_name", Text(), nullable=False),
    Column("job_kind", Text(), nullable=False),
    Column("task_id", Text()),
    Column("priority", SmallInteger(), nullable=False),
    Column("status", Text(), nullable=False),
    Column("process_after", DateTime(timezone=True), nullable=False),
    Column("enqueued_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("attempts", Integer(), nullable=False),
    Column("retries", Integer(), nullable=False),
    Column("deliveries", Integer(), nullable=False),
    Column("replays", Integer(), nullable=False),
    Column("acks_late", Boolean()),
    Column("idempotency_key", Text(), nullable=False),
    Column("explicit_key", Boolean(), nullable=False),
    Column("lease_name", Text()),
    Column("lease_holder", Text()),
    Column("lease_token", Uuid()),
    Column("leased_until", DateTime(timezone=True)),
    Column("claimed_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    Column("finished_at", DateTime(timezone=True)),
    Column("visibility_timeout_s", Double()),
    Column("max_attempts", Integer()),
    Column("backoff_strategy", Text()),
    Column("backoff_base_s", Double()),
    Column("backoff_cap_s", Double()),
    Column("backoff_budget_s", Double()),
    Column("dead_letter_retention_s", Double()),
    Column("backoff_spent_s", Double(), nullable=False),
    Column("last_executor", Text()),
    Column("last_error", Text()),
    Column("last_error_code", Text()),
    Column("last_error_at", DateTime(timezone=True)),
    Column("first_failed_at", DateTime(timezone=True)),
    Column("dead_letter_id", BigInteger()),
    Column("envelope", Text(), nullable=False),
    Column("body", LargeBinary(), nullable=False),
    Index("job_queue_expiry", "expires_at", postgresql_where=text("expires_at IS NOT NULL")),
    Index(
        "job_queue_explicit_key",
        "queue_name",
        "idempotency_key",
        unique=True,
        postgresql_where=text("explicit_key AND status <> 'succeeded'"),
    ),
    Index("job_queue_finished", "finished_at", postgresql_where=text("status = 'succeeded'")),
    Index("job_queue_leased", "leased_until", postgresql_where=text("status = 'leased'")),
    Index(
        "job_queue_ready",
        "queue_name",
        text("priority DESC"),
        "process_after",
        "seq",
        postgresql_where=text("status IN ('queued', 'retry_waiting')"),
    ),
)

job_queue_transient = Table(
    "job_queue_transient",
    metadata,
    Column("job_id", Uuid(), primary_key=True),
    Column("seq", BigInteger(), nullable=False),
    Column("queue_name", Text(), nullable=False),
    Column("job_kind", Text(), nullable=False),
    Column("task_id", Text()),
    Column("priority", SmallInteger(), nullable=False),
    Column("status", Text(), nullable=False),
    Column("process_after", DateTime(timezone=True), nullable=False),
    Column("enqueued_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True)),
    Column("attempts", Integer(), nullable=False),
    Column("retries", Integer(), nullable=False),
    Column("deliveries", Integer(), nullable=False),
    Column("replays", Integer(), nullable=False),
    Column("acks_late", Boolean()),
    Column("idempotency_key", Text(), nullable=False),
    Column("explicit_key", Boolean(), nullable=False),
    Column("lease_name", Text()),
    Column("lease_holder", Text()),
    Column("lease_token", Uuid()),
    Column("leased_until", DateTime(timezone=True)),
    Column("claimed_at", DateTime(timezone=True)),
    Column("started_at", DateTime(timezone=True)),
    Column("finished_at", DateTime(timezone=True)),
    Column("visibility_timeout_s", Double()),
    Column("max_attempts", Integer()),
    Column("backoff_strategy", Text()),
    Column("backoff_base_s", Double()),
    Column("backoff_cap_s", Double()),
    Column("backoff_budget_s", Double()),
    Column("dead_letter_retention_s", Double()),
    Column("backoff_spent_s", Double(), nullable=False),
    Column("last_executor", Text()),
    Column("last_error", Text()),
    Column("last_error_code", Text()),
    Column("last_error_at", DateTime(timezone=True)),
    Column("first_failed_at", DateTime(timezone=True)),
    Column("dead_letter_id", BigInteger()),
    Column("envelope", Text(), nullable=False),
    Column("body", LargeBinary(), nullable=False),
    Index(
        "job_queue_transient_expiry", "expires_at", postgresql_where=text("expires_at IS NOT NULL")
    ),
    Index(
        "job_queue_transient_explicit_key",
        "queue_name",
        "idempotency_key",
        unique=True,
        postgresql_where=text("explicit_key AND status <> 'succeeded'"),
    ),
    Index("job_queue_transient_leased", "leased_until", postgresql_where=text("status = 'leased'")),
    Index(
        "job_queue_transient_ready",
        "queue_name",
        text("priority DESC"),
        "process_after",
        "seq",
        postgresql_where=text("status IN ('queued', 'retry_waiting')"),
    ),
)

job_dead_letter = Table(
    "job_dead_letter",
    metadata,
    Column("dead_letter_id", BigInteger(), primary_key=True),
    Column("previous_id", BigInteger()),
    Column("job_id", Uuid(), nullable=False),
    Column("job_kind", Text(), nullable=False),
    Column("event_domain", Text(), nullable=False),
    Column("executor", Text()),
    Column("idempotency_key", Text(), nullable=False),
    Column("failure_code", Text(), nullable=False),
    Column("failure_detail", JSONB(), nullable=False),
    Column("last_error", Text()),
    Column("attempts", Integer(), nullable=False),
    Column("job_snapshot", JSONB(), nullable=False),
    Column("envelope", Text(), nullable=False),
    Column("body", LargeBinary(), nullable=False),
    Column("claimed_at", DateTime(timezone=True)),
    Column("expires_at", DateTime(timezone=True)),
    Column("first_failed_at", DateTime(timezone=True)),
    Column("last_failed_at", DateTime(timezone=True), nullable=False),
    Column("died_at", DateTime(timezone=True), nullable=False),
    Column("visibility_timeout_s", Double()),
    Column("max_attempts", Integer()),
    Column("backoff_strategy", Text()),
    Column("backoff_base_s", Double()),
    Column("backoff_cap_s", Double()),
    Column("backoff_budget_s", Double()),
    Column("dead_letter_retention_s", Double()),
    Column("resolved_at", DateTime(timezone=True)),
    Column("resolution", Text()),
    Column("resolution_note", Text()),
    Column("resolved_by", Text()),
    Index("job_dead_letter_domain", "event_domain", "died_at"),
    Index("job_dead_letter_job", "job_id", "dead_letter_id"),
    Index("job_dead_letter_kind", "job_kind", text("last_failed_at DESC")),
    Index("job_dead_letter_listing", text("last_failed_at DESC"), "dead_letter_id"),
    Index(
        "job_dead_letter_resolved_at",
        "resolved_at",
        postgresql_where=text("resolved_at IS NOT NULL"),
    ),
    Index(
        "job_dead_letter_retained",
        "died_at",
        postgresql_where=text("resolved_at IS NULL AND dead_letter_retention_s IS NOT NULL"),
    ),
    Index(
        "job_dead_letter_one_open",
        "job_id",
        unique=True,
        postgresql_where=text("resolved_at IS NULL"),
    ),
    Index(
        "job_dead_letter_open",
        text("last_failed_at DESC"),
        "dead_letter_id",
        postgresql_where=text("resolved_at IS NULL"),
    ),
)

job_config = Table(
    "job_config",
    metadata,
    Column("key", Text(), primary_key=True),
    Column("value", JSONB(), nullable=False),
)

runtime_lease = Table(
    "runtime_lease",
    metadata,
    Column("lease_name", Text(), primary_key=True),
    Column("lease_holder", Text(), nullable=False),
    Column("lease_token", Uuid(), nullable=False),
    Column("acquired_at", DateTime(timezone=True), nullable=False),
    Column("expires_at", DateTime(timezone=True), nullable=False),
    Column("renewed_at", DateTime(timezone=True), nullable=False),
)

job_event = Table(
    "job_event",
    metadata,
    Column("event_id", BigInteger(), primary_key=True),
    Column("event_type", Text(), nullable=False),
    Column("severity", Text(), nullable=False),
    Column("happened_at", DateTime(timezone=True), nullable=False),
    Column("actor", Text(), nullable=False),
    Column("job_id", Uuid()),
    Column("job_kind", Text()),
    Column("queue_name", Text()),
    Column("reason", Text()),
    Column("detail", JSONB(), nullable=False),
    Index("job_event_job", "job_id", "event_id", postgresql_where=text("job_id IS NOT NULL")),
    Index("job_event_time", "happened_at"),
)

queue_priority = Table(
    "queue_priority",
    metadata,
    Column("queue_name", Text(), nullable=False),
    Column("priority", SmallInteger(), nullable=False),
    Index("queue_priority_lookup", "queue_name", text("priority DESC")),
)

exchange = Table(
    "exchange",
    metadata,
    Column("exchange_name", Text(), primary_key=True),
    Column("exchange_type", Text(), nullable=False),
    Column("durable", Boolean(), nullable=False),
    Column("auto_delete", Boolean(), nullable=False),
    Column("arguments", JSONB(), nullable=False),
)

queue = Table(
    "queue",
    metadata,
    Column("queue_name", Text(), primary_key=True),
    Column("durable", Boolean(), nullable=False),
    Column("exclusive", Boolean(), nullable=False),
    Column("auto_delete", Boolean(), nullable=False),
    Column("arguments", JSONB(), nullable=False),
    Column("declared_at", DateTime(timezone=True), nullable=False),
    Column("used_at", DateTime(timezone=True), nullable=False),
)

binding = Table(
    "binding",
    metadata,
    Column("exchange_name", Text(), primary_key=True),
    Column("routing_key", Text(), primary_key=True),
    Column("queue_name", Text(), primary_key=True),
    Column("arguments", JSONB(), nullable=False),
    Index("binding_queue_name", "queue_name"),
)

schema_compatibility = Table(
    "schema_compatibility",
    metadata,
    Column("only_row", Boolean(), primary_key=True),
    Column("required_level", SmallInteger(), nullable=False),
)
