-- Verdicts. Each names a job and the token of its lease and answers whether it counted: false when
-- reaper, sweeper or an operator took the lease away. The _many forms lock in job order and skip
-- rows that another transaction holds; those answer NULL and are to be sent again. They answer each
-- entry in its place; a job may be named twice, by the tokens of two of its leases.

-- Locks what a batch names, in job order, and answers each entry. A look of its own at the primary key
-- for each, whatever the statistics of the moment say: a join, or a NOT EXISTS, planned while the table
-- was empty would read all of it later.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_lock_many(
    p_job_ids uuid[], p_lease_tokens uuid[], OUT ids uuid[], OUT answers boolean[]
) LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    SELECT array_agg(l.job_id),
           array_agg(CASE WHEN l.job_id IS NOT NULL THEN true
                          WHEN (SELECT j.job_id FROM pgqueue.job_queue j
                                WHERE j.job_id = w.job_id AND j.lease_token = w.lease_token) IS NULL
                          THEN false END ORDER BY w.place)
    INTO ids, answers
    FROM (SELECT u.job_id, u.lease_token, u.place
          FROM unnest(p_job_ids, p_lease_tokens) WITH ORDINALITY u (job_id, lease_token, place)
          ORDER BY u.job_id) w
    LEFT JOIN LATERAL (
        SELECT j.job_id FROM pgqueue.job_queue j
        WHERE j.job_id = w.job_id AND j.lease_token = w.lease_token
        FOR UPDATE SKIP LOCKED) l ON true;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_progress(
    p_job_id uuid, p_lease_token uuid, p_acks_late boolean DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    -- Told twice, an attempt still counts once.
    UPDATE pgqueue.job_queue j SET
        attempts = j.attempts + (j.started_at IS NULL)::integer,
        started_at = coalesce(j.started_at, clock_timestamp()),
        acks_late = coalesce(p_acks_late, j.acks_late)
    WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_progress_many(
    p_job_ids uuid[], p_lease_tokens uuid[], p_acks_late boolean[] DEFAULT NULL
) RETURNS TABLE (job_id uuid, applied boolean)
LANGUAGE plpgsql ROWS 100
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_ids     uuid[];
    v_answers boolean[];
    -- A job told twice: "acknowledged early" is what must not get lost.
    v_early   uuid[] := ARRAY(SELECT u.job_id FROM unnest(p_job_ids, p_acks_late) u (job_id, acks_late)
                              WHERE NOT u.acks_late);
    v_late    uuid[] := ARRAY(SELECT u.job_id FROM unnest(p_job_ids, p_acks_late) u (job_id, acks_late)
                              WHERE u.acks_late);
BEGIN
    SELECT l.ids, l.answers INTO v_ids, v_answers FROM pgqueue.fn_job_lock_many(p_job_ids, p_lease_tokens) l;
    UPDATE pgqueue.job_queue j SET
        attempts = j.attempts + (j.started_at IS NULL)::integer,
        started_at = coalesce(j.started_at, clock_timestamp()),
        acks_late = CASE WHEN j.job_id = ANY (v_early) THEN false
                         WHEN j.job_id = ANY (v_late) THEN true ELSE j.acks_late END
    WHERE j.job_id = ANY (v_ids);
    RETURN QUERY
    SELECT a.job_id, a.applied FROM unnest(p_job_ids, v_answers) WITH ORDINALITY a (job_id, applied, place)
    ORDER BY a.place;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_succeed(p_job_id uuid, p_lease_token uuid)
RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    IF EXISTS (SELECT FROM pgqueue.job_config c
               WHERE c.key = 'queue.retention.succeeded_seconds' AND c.value > '0') THEN
        UPDATE pgqueue.job_queue j SET
            status = 'succeeded', finished_at = clock_timestamp(),
            attempts = j.attempts + (j.started_at IS NULL)::integer,
            lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL,
            started_at = NULL
        WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token;
    ELSE
        DELETE FROM pgqueue.job_queue j WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token;
    END IF;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_succeed_many(p_job_ids uuid[], p_lease_tokens uuid[])
RETURNS TABLE (job_id uuid, applied boolean)
LANGUAGE plpgsql ROWS 100
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_ids     uuid[];
    v_answers boolean[];
BEGIN
    SELECT l.ids, l.answers INTO v_ids, v_answers FROM pgqueue.fn_job_lock_many(p_job_ids, p_lease_tokens) l;
    IF EXISTS (SELECT FROM pgqueue.job_config c
               WHERE c.key = 'queue.retention.succeeded_seconds' AND c.value > '0') THEN
        UPDATE pgqueue.job_queue j SET
            status = 'succeeded', finished_at = clock_timestamp(),
            attempts = j.attempts + (j.started_at IS NULL)::integer,
            lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL,
            started_at = NULL
        WHERE j.job_id = ANY (v_ids);
    ELSE
        DELETE FROM pgqueue.job_queue j WHERE j.job_id = ANY (v_ids);
    END IF;
    RETURN QUERY
    SELECT a.job_id, a.applied FROM unnest(p_job_ids, v_answers) WITH ORDINALITY a (job_id, applied, place)
    ORDER BY a.place;
END $$;

-- For clients that keep no runtime_lease: moves the job's own deadline.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_lease_renew(
    p_job_id uuid, p_lease_token uuid, p_ttl interval DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    UPDATE pgqueue.job_queue j SET leased_until = clock_timestamp() + coalesce(
        p_ttl, make_interval(secs => coalesce(j.visibility_timeout_s, pgqueue.fn_job_setting_number(
            'queue.lease.ttl_seconds', j.job_kind, j.queue_name, 60))))
    WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_lease_renew_many(
    p_job_ids uuid[], p_lease_tokens uuid[], p_ttl interval DEFAULT NULL
) RETURNS TABLE (job_id uuid, applied boolean)
LANGUAGE plpgsql ROWS 100
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_ids     uuid[];
    v_answers boolean[];
BEGIN
    SELECT l.ids, l.answers INTO v_ids, v_answers FROM pgqueue.fn_job_lock_many(p_job_ids, p_lease_tokens) l;
    UPDATE pgqueue.job_queue j SET leased_until = clock_timestamp() + coalesce(
        p_ttl, make_interval(secs => coalesce(j.visibility_timeout_s, pgqueue.fn_job_setting_number(
            'queue.lease.ttl_seconds', j.job_kind, j.queue_name, 60))))
    WHERE j.job_id = ANY (v_ids);
    RETURN QUERY
    SELECT a.job_id, a.applied FROM unnest(p_job_ids, v_answers) WITH ORDINALITY a (job_id, applied, place)
    ORDER BY a.place;
END $$;

-- Give a job back. What never started costs nothing. With p_requeue, or once it started, it is a
-- delivery more: same place in line the first three times, then slower and slower, at last a
-- dead letter, so that a job rejected in a loop burns no CPU.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_release(
    p_job_id uuid, p_lease_token uuid, p_requeue boolean DEFAULT false, p_actor text DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    r         pgqueue.job_queue;
    v_requeue boolean := coalesce(p_requeue, false);
    v_charged boolean;
    v_limit   double precision;
BEGIN
    SELECT * INTO r FROM pgqueue.job_queue j
    WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    v_charged := v_requeue OR r.started_at IS NOT NULL;
    IF v_charged THEN
        v_limit := pgqueue.fn_job_setting_number('queue.delivery_limit', r.job_kind, r.queue_name, 20);
        IF r.deliveries + 1 >= v_limit THEN
            RETURN pgqueue.fn_job_bury(ARRAY[p_job_id], 'delivery_limit',
                format('delivered %s times', r.deliveries + 1), '{}', p_actor,
                (v_requeue AND r.started_at IS NULL)::integer, 1) = 1;
        END IF;
    END IF;
    UPDATE pgqueue.job_queue j SET
        status = 'queued',
        attempts = j.attempts + (v_requeue AND j.started_at IS NULL)::integer,
        deliveries = j.deliveries + v_charged::integer,
        process_after = CASE WHEN v_charged AND r.deliveries >= 3
            THEN clock_timestamp() + pgqueue.fn_job_backoff(r.deliveries - 2, 1, 60)
            ELSE j.process_after END,
        lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL,
        started_at = NULL
    WHERE j.job_id = p_job_id;
    RETURN true;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_release_many(
    p_job_ids uuid[], p_lease_tokens uuid[], p_requeue boolean[], p_actor text DEFAULT NULL
) RETURNS TABLE (job_id uuid, applied boolean)
LANGUAGE plpgsql ROWS 100
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_ids     uuid[];
    v_answers boolean[];
BEGIN
    SELECT l.ids, l.answers INTO v_ids, v_answers FROM pgqueue.fn_job_lock_many(p_job_ids, p_lease_tokens) l;
    RETURN QUERY
    SELECT a.job_id,
           CASE WHEN a.applied THEN pgqueue.fn_job_release(a.job_id, a.lease_token, a.requeue, p_actor)
                ELSE a.applied END
    FROM unnest(p_job_ids, p_lease_tokens, p_requeue, v_answers) WITH ORDINALITY
        a (job_id, lease_token, requeue, applied, place)
    ORDER BY a.place;
END $$;

-- A failure that may pass: the same row waits and runs again. A given delay is the caller's
-- decision; NULL asks max_attempts, the backoff and its budget here. The switch
-- queue.retry.enabled makes any failure final. Without p_wait a row that another transaction holds
-- answers NULL at once, as in the batch forms.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_fail_transient(
    p_job_id uuid,
    p_lease_token uuid,
    p_error_code text,
    p_error_message text,
    p_actor text DEFAULT NULL,
    p_delay interval DEFAULT NULL,
    p_retries integer DEFAULT NULL,
    p_queue_name text DEFAULT NULL,
    p_priority integer DEFAULT NULL,
    p_envelope text DEFAULT NULL,
    p_body bytea DEFAULT NULL,
    p_expires_in interval DEFAULT NULL,
    p_detail jsonb DEFAULT '{}',
    p_wait boolean DEFAULT true
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    r          pgqueue.job_queue;
    v_now      timestamptz := clock_timestamp();
    v_attempts integer;
    v_max      double precision;
    v_budget   double precision;
    v_delay    interval := greatest(p_delay, interval '0');
    v_code     text;
    v_answer   boolean;
BEGIN
    IF p_wait IS FALSE THEN
        SELECT l.answers[1] INTO v_answer
        FROM pgqueue.fn_job_lock_many(ARRAY[p_job_id], ARRAY[p_lease_token]) l;
        IF v_answer IS NOT TRUE THEN
            RETURN v_answer;
        END IF;
    END IF;
    SELECT * INTO r FROM pgqueue.job_queue j
    WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    -- What failed has started, even if nobody said so.
    v_attempts := r.attempts + (r.started_at IS NULL)::integer;
    IF NOT pgqueue.fn_job_switch('queue.retry.enabled', r.job_kind, r.queue_name) THEN
        v_code := 'exhausted';
    ELSIF p_delay IS NULL THEN
        v_max := coalesce(r.max_attempts, pgqueue.fn_job_setting_number(
            'queue.retry.max_attempts', r.job_kind, r.queue_name, 5));
        v_budget := coalesce(r.backoff_budget_s, pgqueue.fn_job_setting_number(
            'queue.retry.backoff.budget_seconds', r.job_kind, r.queue_name, NULL));
        v_delay := pgqueue.fn_job_backoff_of(r, v_attempts);
        IF v_max > 0 AND v_attempts >= v_max THEN
            v_code := 'exhausted';
        ELSIF r.backoff_spent_s + extract(epoch FROM v_delay) > v_budget THEN
            v_code := 'budget_exhausted';
        END IF;
    END IF;
    -- A retry that moves to another queue may find its key taken there: kept, not run beside its twin.
    IF v_code IS NULL AND r.explicit_key AND p_queue_name <> r.queue_name AND EXISTS (
        SELECT FROM pgqueue.job_queue j
        WHERE j.queue_name = p_queue_name AND j.idempotency_key = r.idempotency_key
          AND j.explicit_key AND j.status <> 'succeeded')
    THEN
        v_code := 'rejected';
        p_detail := coalesce(p_detail, '{}') || jsonb_build_object('key_conflict_in', p_queue_name);
    END IF;
    IF v_code IS NOT NULL THEN
        RETURN pgqueue.fn_job_bury(ARRAY[p_job_id], v_code, p_error_message,
            coalesce(p_detail, '{}') || jsonb_build_object('error_code', p_error_code), p_actor,
            (r.started_at IS NULL)::integer, 0) = 1;
    END IF;
    PERFORM pgqueue.fn_queue_priority_note(
        coalesce(p_queue_name, r.queue_name), coalesce(p_priority, r.priority));
    UPDATE pgqueue.job_queue j SET
        status = 'retry_waiting',
        process_after = v_now + v_delay,
        attempts = v_attempts,
        retries = coalesce(p_retries, j.retries + 1),
        backoff_spent_s = j.backoff_spent_s + extract(epoch FROM v_delay),
        queue_name = coalesce(p_queue_name, j.queue_name),
        priority = coalesce(p_priority, j.priority),
        envelope = coalesce(p_envelope, j.envelope),
        body = coalesce(p_body, j.body),
        expires_at = CASE WHEN p_expires_in IS NULL THEN j.expires_at ELSE v_now + p_expires_in END,
        last_error = p_error_message,
        last_error_code = p_error_code,
        last_error_at = v_now,
        first_failed_at = coalesce(j.first_failed_at, v_now),
        lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL,
        started_at = NULL
    WHERE j.job_id = p_job_id;
    RETURN true;
END $$;

-- The backoff a job's own stamps and its configuration ask for before its next attempt.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_backoff_of(r pgqueue.job_queue, p_attempts integer)
RETURNS interval LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    RETURN pgqueue.fn_job_backoff(
        p_attempts,
        coalesce(r.backoff_base_s, pgqueue.fn_job_setting_number(
            'queue.retry.backoff.base_seconds', r.job_kind, r.queue_name, 30)),
        coalesce(r.backoff_cap_s, pgqueue.fn_job_setting_number(
            'queue.retry.backoff.cap_seconds', r.job_kind, r.queue_name, 3600)),
        coalesce(r.backoff_strategy, pgqueue.fn_job_setting(
            'queue.retry.backoff.strategy', r.job_kind, r.queue_name, '"exponential"') #>> '{}'));
END $$;

-- A failure that will not pass: the job becomes a dead letter.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_fail_permanent(
    p_job_id uuid,
    p_lease_token uuid,
    p_failure_code text,
    p_error_message text,
    p_actor text DEFAULT NULL,
    p_detail jsonb DEFAULT '{}',
    p_wait boolean DEFAULT true
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    r        pgqueue.job_queue;
    v_answer boolean;
BEGIN
    IF p_wait IS FALSE THEN
        SELECT l.answers[1] INTO v_answer
        FROM pgqueue.fn_job_lock_many(ARRAY[p_job_id], ARRAY[p_lease_token]) l;
        IF v_answer IS NOT TRUE THEN
            RETURN v_answer;
        END IF;
    END IF;
    SELECT * INTO r FROM pgqueue.job_queue j
    WHERE j.job_id = p_job_id AND j.lease_token = p_lease_token FOR UPDATE;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    RETURN pgqueue.fn_job_bury(ARRAY[p_job_id], p_failure_code, p_error_message, p_detail, p_actor,
        -- These never reach the task, so they cost no attempt.
        (r.started_at IS NULL AND p_failure_code NOT IN ('malformed', 'unregistered', 'expired'))::integer,
        0) = 1;
END $$;
