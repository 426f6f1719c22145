-- One message into one queue. A delay beats an absolute time; a relative expiry becomes absolute
-- here, by the database's clock. `created` is false when a live job already holds the explicit key,
-- or when this very job id was published before (its first answer was lost) and lives, or is dead and
-- may be replayed: one job is never in two places.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_enqueue(
    p_job_id uuid,
    p_queue_name text,
    p_envelope text,
    p_body bytea,
    p_job_kind text DEFAULT '',
    p_task_id text DEFAULT NULL,
    p_priority integer DEFAULT 0,
    p_delay interval DEFAULT NULL,
    p_process_after timestamptz DEFAULT NULL,
    p_expires_in interval DEFAULT NULL,
    p_expires_at timestamptz DEFAULT NULL,
    p_idempotency_key text DEFAULT NULL,
    p_acks_late boolean DEFAULT NULL,
    p_durable boolean DEFAULT true,
    p_stamps jsonb DEFAULT NULL,
    p_retries integer DEFAULT 0
) RETURNS TABLE (job_id uuid, created boolean, waiting boolean)
LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_ready   timestamptz := CASE
        WHEN p_delay IS NOT NULL THEN v_now + greatest(p_delay, interval '0')
        ELSE greatest(coalesce(p_process_after, v_now), v_now) END;
    v_expires timestamptz := CASE
        WHEN p_expires_in IS NOT NULL THEN v_now + p_expires_in ELSE p_expires_at END;
    v_holder  uuid;
BEGIN
    IF p_stamps IS NOT NULL THEN
        IF p_stamps - ARRAY['visibility_timeout_s', 'max_attempts', 'backoff_strategy', 'backoff_base_s',
                            'backoff_cap_s', 'backoff_budget_s', 'dead_letter_retention_s'] <> '{}' THEN
            RAISE EXCEPTION 'unknown stamp in %', left(p_stamps::text, 200) USING
                ERRCODE = 'invalid_parameter_value',
                HINT = 'visibility_timeout_s, max_attempts, backoff_strategy, backoff_base_s, '
                       'backoff_cap_s, backoff_budget_s, dead_letter_retention_s';
        END IF;
    END IF;
    PERFORM pgqueue.fn_queue_priority_note(p_queue_name, p_priority);
    FOR v_try IN 1..100 LOOP
        IF coalesce(p_durable, true) OR p_idempotency_key IS NOT NULL THEN
            INSERT INTO pgqueue.job_queue AS j (
                job_id, queue_name, job_kind, task_id, priority, process_after, enqueued_at,
                expires_at, idempotency_key, explicit_key, retries, acks_late, envelope, body,
                visibility_timeout_s, max_attempts, backoff_strategy, backoff_base_s, backoff_cap_s,
                backoff_budget_s, dead_letter_retention_s)
            VALUES (
                p_job_id, p_queue_name, p_job_kind, p_task_id, p_priority, v_ready, v_now,
                v_expires, coalesce(p_idempotency_key, p_job_id::text),
                p_idempotency_key IS NOT NULL, coalesce(p_retries, 0), p_acks_late, p_envelope, p_body,
                (p_stamps ->> 'visibility_timeout_s')::double precision,
                (p_stamps ->> 'max_attempts')::integer, p_stamps ->> 'backoff_strategy',
                (p_stamps ->> 'backoff_base_s')::double precision,
                (p_stamps ->> 'backoff_cap_s')::double precision,
                (p_stamps ->> 'backoff_budget_s')::double precision,
                (p_stamps ->> 'dead_letter_retention_s')::double precision)
            ON CONFLICT DO NOTHING;
        ELSE
            INSERT INTO pgqueue.job_queue_transient AS j (
                job_id, queue_name, job_kind, task_id, priority, process_after, enqueued_at,
                expires_at, idempotency_key, retries, acks_late, envelope, body,
                visibility_timeout_s, max_attempts, backoff_strategy, backoff_base_s, backoff_cap_s,
                backoff_budget_s, dead_letter_retention_s)
            VALUES (
                p_job_id, p_queue_name, p_job_kind, p_task_id, p_priority, v_ready, v_now,
                v_expires, p_job_id::text, coalesce(p_retries, 0), p_acks_late, p_envelope, p_body,
                (p_stamps ->> 'visibility_timeout_s')::double precision,
                (p_stamps ->> 'max_attempts')::integer, p_stamps ->> 'backoff_strategy',
                (p_stamps ->> 'backoff_base_s')::double precision,
                (p_stamps ->> 'backoff_cap_s')::double precision,
                (p_stamps ->> 'backoff_budget_s')::double precision,
                (p_stamps ->> 'dead_letter_retention_s')::double precision)
            ON CONFLICT DO NOTHING;
        END IF;
        IF FOUND THEN
            job_id := p_job_id;
            -- Asked after the insert, which waited for whoever was just burying this job. (Not by
            -- resolved_at: that would allow a walk through all open dead letters for one id.)
            IF EXISTS (SELECT FROM pgqueue.job_dead_letter l
                       WHERE l.job_id = p_job_id AND l.resolution IS NULL) THEN
                DELETE FROM pgqueue.job_queue j WHERE j.job_id = p_job_id;
                created := false;
                waiting := false;
            ELSE
                created := true;
                waiting := pgqueue.fn_somebody_waits(p_queue_name);
            END IF;
            RETURN NEXT;
            RETURN;
        END IF;
        -- A fresh statement has a fresh snapshot: the holder is seen, or it is gone and we try again.
        SELECT j.job_id INTO v_holder FROM pgqueue.job_queue j WHERE j.job_id = p_job_id;
        IF NOT FOUND AND p_idempotency_key IS NOT NULL THEN
            SELECT j.job_id INTO v_holder FROM pgqueue.job_queue j
            WHERE j.queue_name = p_queue_name AND j.idempotency_key = p_idempotency_key
              AND j.explicit_key AND j.status <> 'succeeded';
        END IF;
        IF FOUND THEN
            RETURN QUERY SELECT v_holder, false, false;
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'the holder of idempotency key % is not visible to this transaction', p_idempotency_key
        USING ERRCODE = 'serialization_failure',
              HINT = 'publish in a READ COMMITTED transaction, or retry this one';
END $$;

-- Remember that a queue uses a priority. Concurrent publishers may both write it: harmless, and
-- neither waits for the other's commit.
CREATE OR REPLACE FUNCTION pgqueue.fn_queue_priority_note(p_queue_name text, p_priority integer)
RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM pgqueue.queue_priority p
                   WHERE p.queue_name = p_queue_name AND p.priority = p_priority) THEN
        INSERT INTO pgqueue.queue_priority (queue_name, priority) VALUES (p_queue_name, p_priority);
    END IF;
END $$;
