-- What an operator looks at.

CREATE OR REPLACE VIEW pgqueue.v_job AS
SELECT j.job_id, j.queue_name, j.job_kind, j.task_id,
       CASE WHEN j.started_at IS NOT NULL THEN 'in_progress' ELSE j.status END AS status,
       j.priority, j.process_after, j.enqueued_at, j.expires_at, j.attempts, j.retries, j.deliveries,
       j.lease_holder, j.leased_until, j.claimed_at, j.started_at, j.last_error, j.last_error_code,
       j.last_error_at, NULL::text AS failure_code, NULL::timestamptz AS died_at,
       j.dead_letter_id
FROM pgqueue.job_queue j
UNION ALL
SELECT d.job_id, d.event_domain, d.job_kind, d.job_snapshot ->> 'task_id', 'dead_letter',
       (d.job_snapshot ->> 'priority')::smallint, NULL, (d.job_snapshot ->> 'enqueued_at')::timestamptz,
       d.expires_at, d.attempts, (d.job_snapshot ->> 'retries')::integer,
       (d.job_snapshot ->> 'deliveries')::integer, d.executor, NULL, d.claimed_at, NULL, d.last_error,
       d.job_snapshot ->> 'last_error_code', d.last_failed_at, d.failure_code, d.died_at,
       d.dead_letter_id
FROM pgqueue.job_dead_letter d WHERE d.resolved_at IS NULL;

CREATE OR REPLACE VIEW pgqueue.v_job_retry_pressure AS
SELECT k.job_kind, sum(k.waiting)::bigint AS waiting, sum(k.dead)::bigint AS dead,
       max(k.attempts) AS max_attempts_seen
FROM (SELECT j.job_kind, (j.status = 'retry_waiting')::integer AS waiting, 0 AS dead, j.attempts
      FROM pgqueue.job_queue j
      UNION ALL
      SELECT d.job_kind, 0, 1, d.attempts FROM pgqueue.job_dead_letter d WHERE d.resolved_at IS NULL) k
GROUP BY k.job_kind;

CREATE OR REPLACE VIEW pgqueue.v_lease_active AS
SELECT l.lease_name, l.lease_holder, l.expires_at AS leased_until,
       greatest(l.expires_at - clock_timestamp(), interval '0') AS ttl_remaining
FROM pgqueue.runtime_lease l WHERE l.expires_at > clock_timestamp();

CREATE OR REPLACE FUNCTION pgqueue.fn_dead_letter_health() RETURNS jsonb
LANGUAGE sql STABLE AS $$
    SELECT jsonb_build_object(
        'open_count_event', 0,
        'open_count_job', coalesce(sum(c.n), 0),
        'oldest_first_failed_at', min(c.oldest),
        'by_failure_code', coalesce(jsonb_object_agg(c.failure_code, c.n)
                                    FILTER (WHERE c.failure_code IS NOT NULL), '{}'))
    FROM (SELECT d.failure_code, count(*) AS n, min(coalesce(d.first_failed_at, d.died_at)) AS oldest
          FROM pgqueue.job_dead_letter d WHERE d.resolved_at IS NULL GROUP BY d.failure_code) c
$$;

CREATE OR REPLACE VIEW pgqueue.v_queue_health AS
SELECT q.queue_name,
       count(*) FILTER (WHERE q.status = 'queued' AND q.process_after <= clock_timestamp()) AS ready,
       count(*) FILTER (WHERE q.status = 'queued' AND q.process_after > clock_timestamp()) AS scheduled,
       count(*) FILTER (WHERE q.status = 'retry_waiting') AS retry_waiting,
       count(*) FILTER (WHERE q.status = 'leased' AND q.started_at IS NULL) AS leased,
       count(*) FILTER (WHERE q.status = 'leased' AND q.started_at IS NOT NULL) AS in_progress,
       count(*) FILTER (WHERE q.status = 'dead_letter') AS dead_letters,
       clock_timestamp() - min(q.process_after) FILTER (
           WHERE q.status IN ('queued', 'retry_waiting') AND q.process_after <= clock_timestamp()
       ) AS oldest_ready_age,
       (SELECT pgqueue.fn_dead_letter_health()) AS dead_letter_health
FROM (SELECT j.queue_name, j.status, j.started_at, j.process_after FROM pgqueue.job_queue j
      UNION ALL
      SELECT d.event_domain, 'dead_letter', NULL, NULL FROM pgqueue.job_dead_letter d
      WHERE d.resolved_at IS NULL) q
WHERE q.status <> 'succeeded'
GROUP BY q.queue_name;

-- One job, live or dead, with its stamps; NULL when it is in neither place.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_get(p_job_id uuid) RETURNS jsonb
LANGUAGE sql STABLE
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
    SELECT coalesce(
        (SELECT to_jsonb(s) || jsonb_build_object(
                    'status', CASE WHEN j.started_at IS NOT NULL THEN 'in_progress' ELSE j.status END,
                    'died_at', NULL, 'failure_code', NULL)
         FROM pgqueue.job_queue j, LATERAL (SELECT
            j.job_id, j.seq, j.queue_name, j.job_kind, j.task_id, j.priority, j.process_after,
            j.enqueued_at, j.expires_at, j.attempts, j.retries, j.deliveries, j.replays, j.acks_late,
            j.idempotency_key, j.explicit_key, j.lease_name, j.lease_holder, j.leased_until,
            j.claimed_at, j.started_at, j.visibility_timeout_s, j.max_attempts, j.backoff_strategy,
            j.backoff_base_s, j.backoff_cap_s, j.backoff_budget_s, j.dead_letter_retention_s,
            j.backoff_spent_s, j.last_error, j.last_error_code, j.last_error_at, j.first_failed_at) s
         WHERE j.job_id = p_job_id),
        (SELECT d.job_snapshot || to_jsonb(s) || jsonb_build_object('status', 'dead_letter')
         FROM pgqueue.job_dead_letter d, LATERAL (SELECT
            d.dead_letter_id, d.failure_code, d.failure_detail, d.last_error, d.attempts, d.claimed_at,
            d.expires_at, d.first_failed_at, d.last_failed_at, d.died_at, d.visibility_timeout_s,
            d.max_attempts, d.backoff_strategy, d.backoff_base_s, d.backoff_cap_s, d.backoff_budget_s,
            d.dead_letter_retention_s, d.resolved_at, d.resolution) s
         WHERE d.job_id = p_job_id
         ORDER BY d.resolved_at IS NULL DESC, d.dead_letter_id DESC LIMIT 1))
$$;
