-- The statements the store sends. Hot ones are single function calls, prepared once a session.

-- name: enqueue
-- One row per message and queue; answers whether a consumer waits, so that only then we NOTIFY.
SELECT job_id, created, waiting FROM pgqueue.fn_job_enqueue(
    %(job_id)s, %(queue_name)s, %(envelope)s, %(body)s, %(job_kind)s, %(task_id)s,
    %(priority)s::integer, p_delay => %(delay)s, p_expires_in => %(expires_in)s,
    p_idempotency_key => %(idempotency_key)s, p_acks_late => %(acks_late)s,
    p_durable => %(durable)s, p_stamps => %(stamps)s::jsonb, p_retries => %(retries)s::integer)

-- name: notify
-- After the commit of the publish, on its own: NOTIFY inside it would serialise all publishers.
SELECT pg_notify(%(channel)s, q) FROM unnest(%(queues)s::text[]) q

-- name: claim
-- The columns of values.Lease, in its order.
SELECT job_id, lease_token, queue_name, job_kind, task_id, priority, process_after, seq, attempts,
       retries, deliveries, replays, backoff_spent_s, leased_until, envelope, body
FROM pgqueue.fn_job_claim(
    %(queues)s::text[], %(lease_name)s, %(lease_holder)s, %(limit)s::integer, %(kinds)s::text[],
    %(max_bytes)s::bigint, %(mark_queues)s::text[], %(mark_priorities)s::integer[],
    %(mark_times)s::timestamptz[], %(mark_seqs)s::bigint[])

-- name: next_due
-- Asked only after an empty claim, to know how long to sleep.
SELECT extract(epoch FROM pgqueue.fn_job_next_due(%(queues)s::text[]))::double precision

-- name: wake_flag_raise
SELECT pgqueue.fn_wake_flag_raise(%(queues)s::text[])

-- name: wake_flag_lower
SELECT pgqueue.fn_wake_flag_lower(%(queues)s::text[])

-- name: progress
SELECT pgqueue.fn_job_progress(%(job_id)s, %(lease_token)s, %(acks_late)s)

-- name: progress_many
-- One answer an entry, in their order; NULL: another transaction holds the row, send it again.
SELECT job_id, applied FROM pgqueue.fn_job_progress_many(
    %(job_ids)s::uuid[], %(lease_tokens)s::uuid[], %(acks_late)s::boolean[])

-- name: succeed
SELECT pgqueue.fn_job_succeed(%(job_id)s, %(lease_token)s)

-- name: succeed_many
SELECT job_id, applied FROM pgqueue.fn_job_succeed_many(%(job_ids)s::uuid[], %(lease_tokens)s::uuid[])

-- name: renew
SELECT pgqueue.fn_job_lease_renew(%(job_id)s, %(lease_token)s, %(ttl)s)

-- name: renew_many
SELECT job_id, applied FROM pgqueue.fn_job_lease_renew_many(
    %(job_ids)s::uuid[], %(lease_tokens)s::uuid[], %(ttl)s)

-- name: release
SELECT pgqueue.fn_job_release(%(job_id)s, %(lease_token)s, %(requeue)s)

-- name: release_many
SELECT job_id, applied FROM pgqueue.fn_job_release_many(
    %(job_ids)s::uuid[], %(lease_tokens)s::uuid[], %(requeue)s::boolean[])

-- name: release_unknown
-- After a lost connection: what a claim took whose answer never came. Only leased rows are looked at.
SELECT count(*) FROM (
    SELECT pgqueue.fn_job_release(j.job_id, j.lease_token) FROM (
        SELECT job_id, lease_token FROM pgqueue.job_queue
        WHERE status = 'leased' AND lease_name = %(lease_name)s
          AND lease_token <> ALL (%(lease_tokens)s::uuid[])
        ORDER BY job_id) j) released

-- name: fail_transient
SELECT pgqueue.fn_job_fail_transient(
    %(job_id)s, %(lease_token)s, %(error_code)s, %(error_message)s, %(actor)s, %(delay)s,
    %(retries)s::integer, %(queue_name)s, %(priority)s::integer, %(envelope)s, %(body)s,
    %(expires_in)s, p_wait => %(wait)s)

-- name: fail_permanent
SELECT pgqueue.fn_job_fail_permanent(
    %(job_id)s, %(lease_token)s, %(failure_code)s, %(error_message)s, %(actor)s, %(detail)s::jsonb,
    p_wait => %(wait)s)

-- name: runtime_lease_acquire
SELECT pgqueue.fn_runtime_lease_acquire(%(lease_name)s, %(lease_holder)s, %(lease_token)s, %(ttl)s)

-- name: runtime_lease_renew
SELECT pgqueue.fn_runtime_lease_renew(%(lease_name)s, %(lease_token)s, %(ttl)s)

-- name: runtime_lease_release
SELECT pgqueue.fn_runtime_lease_release(%(lease_name)s, %(lease_token)s)

-- name: holder_lock
SELECT pgqueue.fn_holder_lock(%(lease_name)s)

-- name: holder_announce
-- The sign of life: a session advisory lock, gone the moment the backend is.
SELECT pgqueue.fn_holder_announce(%(lease_name)s)

-- name: reap
SELECT pgqueue.fn_job_lease_reaper(%(limit)s::integer, %(actor)s)

-- name: sweep_expired
SELECT pgqueue.fn_job_sweep_expired(%(limit)s::integer, %(actor)s)

-- name: prune
SELECT pgqueue.fn_job_prune(%(limit)s::integer, %(actor)s)

-- name: job_get
SELECT pgqueue.fn_job_get(%(job_id)s)

-- name: job_cancel
SELECT pgqueue.fn_job_cancel(%(job_id)s, %(actor)s, %(reason)s)

-- name: config_get
SELECT value FROM pgqueue.job_config WHERE key = %(key)s

-- name: config_set
INSERT INTO pgqueue.job_config (key, value) VALUES (%(key)s, %(value)s::jsonb)
ON CONFLICT (key) DO UPDATE SET value = excluded.value

-- name: setting
-- The effective value: task name, queue, default, built-in.
SELECT pgqueue.fn_job_setting(%(key)s, %(job_kind)s, %(queue_name)s, 'null')

-- name: dead_letters
-- Paged by key, never by OFFSET: stays fast on the last page, shows no row twice. Sent unprepared: only
-- a plan for the very filters given can use the index that fits them.
SELECT dead_letter_id, previous_id, job_id, job_kind, event_domain, executor, idempotency_key,
       failure_code, failure_detail, last_error, attempts, job_snapshot, envelope, body, claimed_at,
       expires_at, first_failed_at, last_failed_at, died_at, resolved_at, resolution,
       resolution_note, resolved_by, visibility_timeout_s, max_attempts, backoff_strategy,
       backoff_base_s, backoff_cap_s, backoff_budget_s, dead_letter_retention_s
FROM pgqueue.job_dead_letter
WHERE (%(queue)s::text IS NULL OR event_domain = %(queue)s)
  AND (%(kind)s::text IS NULL OR job_kind = %(kind)s)
  AND (%(code)s::text IS NULL OR failure_code = %(code)s)
  AND (%(task_id)s::text IS NULL OR job_snapshot ->> 'task_id' = %(task_id)s)
  AND (%(state)s::text = 'all' OR (resolved_at IS NULL) = (%(state)s = 'open'))
  AND (%(since)s::timestamptz IS NULL OR last_failed_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR last_failed_at < %(until)s)
  AND (%(after_time)s::timestamptz IS NULL OR last_failed_at <= %(after_time)s)
  AND (%(after_time)s::timestamptz IS NULL OR last_failed_at < %(after_time)s
       OR dead_letter_id > %(after_id)s::bigint)
ORDER BY last_failed_at DESC, dead_letter_id
LIMIT %(limit)s::integer

-- name: dead_letter
SELECT dead_letter_id, previous_id, job_id, job_kind, event_domain, executor, idempotency_key,
       failure_code, failure_detail, last_error, attempts, job_snapshot, envelope, body, claimed_at,
       expires_at, first_failed_at, last_failed_at, died_at, resolved_at, resolution,
       resolution_note, resolved_by, visibility_timeout_s, max_attempts, backoff_strategy,
       backoff_base_s, backoff_cap_s, backoff_budget_s, dead_letter_retention_s
FROM pgqueue.job_dead_letter WHERE dead_letter_id = %(dead_letter_id)s

-- name: dead_letter_replay
SELECT pgqueue.fn_job_dead_letter_replay(%(dead_letter_id)s::bigint, %(actor)s, %(note)s)

-- name: dead_letter_discard
SELECT pgqueue.fn_job_dead_letter_discard(%(dead_letter_id)s::bigint, %(actor)s, %(note)s)

-- name: dead_letter_supersede
SELECT pgqueue.fn_job_dead_letter_supersede(%(dead_letter_id)s::bigint, %(actor)s, %(note)s)

-- name: dead_letter_health
SELECT pgqueue.fn_dead_letter_health()

-- name: queue_health
SELECT queue_name, ready, scheduled, retry_waiting, leased, in_progress, dead_letters,
       extract(epoch FROM oldest_ready_age)::double precision AS oldest_ready_age_s
FROM pgqueue.v_queue_health ORDER BY queue_name

-- name: exchange_declare
INSERT INTO pgqueue.exchange (exchange_name, exchange_type, durable, auto_delete, arguments)
VALUES (%(name)s, %(type)s, %(durable)s, %(auto_delete)s, %(arguments)s::jsonb)
ON CONFLICT (exchange_name) DO NOTHING

-- name: exchange_get
SELECT exchange_type, durable, auto_delete, arguments FROM pgqueue.exchange
WHERE exchange_name = %(name)s

-- name: exchange_delete
DELETE FROM pgqueue.exchange WHERE exchange_name = %(name)s

-- name: queue_declare
INSERT INTO pgqueue.queue (queue_name, durable, exclusive, auto_delete, arguments)
VALUES (%(name)s, %(durable)s, %(exclusive)s, %(auto_delete)s, %(arguments)s::jsonb)
ON CONFLICT (queue_name) DO NOTHING

-- name: queue_exists
SELECT EXISTS (SELECT FROM pgqueue.queue WHERE queue_name = %(name)s)

-- name: queue_delete
-- Waiting messages go with the queue, as in AMQP; running ones end on their own. Its priority levels
-- stay until retention: a publisher that just saw them may be about to commit.
WITH gone AS (
    DELETE FROM pgqueue.job_queue
    WHERE job_id = ANY (ARRAY(
        SELECT job_id FROM pgqueue.job_queue
        WHERE queue_name = %(name)s AND status IN ('queued', 'retry_waiting')
        ORDER BY job_id FOR UPDATE SKIP LOCKED))
    RETURNING 1
), undeclared AS (
    DELETE FROM pgqueue.queue WHERE queue_name = %(name)s
)
SELECT count(*) FROM gone

-- name: queue_purge
-- Waiting messages, delayed ones too. The trail says who purged and how many.
WITH gone AS (
    DELETE FROM pgqueue.job_queue
    WHERE job_id = ANY (ARRAY(
        SELECT job_id FROM pgqueue.job_queue
        WHERE queue_name = %(name)s AND status IN ('queued', 'retry_waiting')
        ORDER BY job_id FOR UPDATE SKIP LOCKED))
    RETURNING 1
), told AS (
    INSERT INTO pgqueue.job_event (event_type, actor, queue_name, detail)
    SELECT 'queue_purged', pgqueue.fn_job_actor(), %(name)s, jsonb_build_object('count', count(*))
    FROM gone HAVING count(*) > 0
)
SELECT count(*) FROM gone

-- name: queue_size
SELECT count(*) FROM pgqueue.job_queue
WHERE queue_name = %(name)s AND status IN ('queued', 'retry_waiting')

-- name: bind
INSERT INTO pgqueue.binding (exchange_name, routing_key, queue_name, arguments)
VALUES (%(exchange)s, %(routing_key)s, %(queue)s, %(arguments)s::jsonb)
ON CONFLICT (exchange_name, routing_key, queue_name) DO NOTHING

-- name: unbind
DELETE FROM pgqueue.binding
WHERE exchange_name = %(exchange)s AND routing_key = %(routing_key)s AND queue_name = %(queue)s

-- name: bindings
SELECT b.exchange_name, e.exchange_type, b.routing_key, b.queue_name
FROM pgqueue.binding b JOIN pgqueue.exchange e USING (exchange_name)
WHERE %(exchange)s::text IS NULL OR b.exchange_name = %(exchange)s
ORDER BY b.exchange_name, b.routing_key, b.queue_name
