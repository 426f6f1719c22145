-- Move jobs to the dead letters: one statement, so that a job is in exactly one table whatever
-- fails. Returns how many moved. p_attempts and p_deliveries are added to the counts kept.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_bury(
    p_job_ids uuid[],
    p_failure_code text,
    p_error text,
    p_detail jsonb,
    p_actor text,
    p_attempts integer DEFAULT 0,
    p_deliveries integer DEFAULT 0
) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_count integer;
BEGIN
    WITH gone AS (
        DELETE FROM pgqueue.job_queue j WHERE j.job_id = ANY (p_job_ids) AND j.status <> 'succeeded'
        RETURNING j.*, j.tableoid <> 'pgqueue.job_queue_transient'::regclass AS durable
    ), kept AS (
        INSERT INTO pgqueue.job_dead_letter (
            previous_id, job_id, job_kind, event_domain, executor, idempotency_key, failure_code,
            failure_detail, last_error, attempts, job_snapshot, envelope, body, claimed_at, expires_at,
            first_failed_at, last_failed_at, died_at, visibility_timeout_s, max_attempts,
            backoff_strategy, backoff_base_s, backoff_cap_s, backoff_budget_s, dead_letter_retention_s)
        SELECT
            g.dead_letter_id, g.job_id, g.job_kind, g.queue_name, g.last_executor, g.idempotency_key,
            p_failure_code, coalesce(p_detail, '{}'), coalesce(p_error, g.last_error),
            g.attempts + p_attempts, to_jsonb(s), g.envelope, g.body, g.claimed_at, g.expires_at,
            coalesce(g.first_failed_at, clock_timestamp()), clock_timestamp(), clock_timestamp(),
            g.visibility_timeout_s, g.max_attempts, g.backoff_strategy, g.backoff_base_s,
            g.backoff_cap_s, g.backoff_budget_s, g.dead_letter_retention_s
        -- The snapshot names its columns: a row turned to JSON whole would copy the body as hex.
        FROM gone g, LATERAL (SELECT
            g.job_id, g.seq, g.queue_name, g.job_kind, g.task_id, g.priority, g.status, g.process_after,
            g.enqueued_at, g.expires_at, g.attempts + p_attempts AS attempts, g.retries,
            g.deliveries + p_deliveries AS deliveries, g.replays, g.acks_late, g.idempotency_key,
            g.explicit_key, g.lease_name, g.lease_holder, g.leased_until, g.claimed_at, g.started_at,
            g.backoff_spent_s, g.last_executor, g.last_error, g.last_error_code, g.last_error_at,
            g.first_failed_at, g.durable) s
        RETURNING dead_letter_id, job_id
    ), told AS (
        INSERT INTO pgqueue.job_event (event_type, severity, actor, job_id, job_kind, queue_name, reason, detail)
        SELECT 'queue_job_dead_lettered', 'warning', pgqueue.fn_job_actor(p_actor), g.job_id, g.job_kind,
               g.queue_name, p_failure_code, jsonb_build_object('dead_letter_id', k.dead_letter_id)
        FROM gone g JOIN kept k ON k.job_id = g.job_id
        RETURNING 1
    )
    SELECT count(*)::integer INTO v_count FROM told;
    RETURN v_count;
END $$;

-- For operators: bury a live job by hand, whatever it is doing. Its holder's verdicts are refused.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_move_to_dead_letter(
    p_job_id uuid, p_failure_code text, p_failure_detail jsonb DEFAULT '{}', p_actor text DEFAULT NULL
) RETURNS boolean LANGUAGE sql AS $$
    SELECT pgqueue.fn_job_bury(ARRAY[p_job_id], p_failure_code, NULL, p_failure_detail, p_actor) = 1
$$;

-- Replay: the same message, byte for byte, under its own id, counted from zero. Its expiry is lifted
-- in the row, not in the preserved bytes. Answers 'replayed', or why nothing was changed.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_dead_letter_replay(
    p_dead_letter_id bigint, p_actor text DEFAULT NULL, p_note text DEFAULT NULL
) RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    d pgqueue.job_dead_letter;
    s pgqueue.job_queue;
BEGIN
    IF NOT pgqueue.fn_job_switch('queue.job_substrate.enabled') THEN
        RETURN 'disabled';
    END IF;
    SELECT * INTO d FROM pgqueue.job_dead_letter l WHERE l.dead_letter_id = p_dead_letter_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'not_found';
    ELSIF d.resolved_at IS NOT NULL THEN
        RETURN 'already_resolved';
    END IF;
    s := jsonb_populate_record(NULL::pgqueue.job_queue, d.job_snapshot);
    PERFORM pgqueue.fn_queue_priority_note(d.event_domain, s.priority);
    INSERT INTO pgqueue.job_queue (
        job_id, queue_name, job_kind, task_id, priority, process_after, enqueued_at, replays, acks_late,
        idempotency_key, explicit_key, visibility_timeout_s, max_attempts, backoff_strategy,
        backoff_base_s, backoff_cap_s, backoff_budget_s, dead_letter_retention_s, dead_letter_id,
        envelope, body)
    VALUES (
        d.job_id, d.event_domain, d.job_kind, s.task_id, s.priority, clock_timestamp(), s.enqueued_at,
        s.replays + 1, s.acks_late, d.idempotency_key, s.explicit_key, d.visibility_timeout_s,
        d.max_attempts, d.backoff_strategy, d.backoff_base_s, d.backoff_cap_s, d.backoff_budget_s,
        d.dead_letter_retention_s, d.dead_letter_id, d.envelope, d.body)
    ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
        RETURN 'key_conflict';
    END IF;
    PERFORM pgqueue.fn_job_dead_letter_close(d, 'replayed', p_actor, p_note);
    PERFORM pgqueue.fn_wake(d.event_domain);
    RETURN 'replayed';
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_dead_letter_close(
    d pgqueue.job_dead_letter, p_resolution text, p_actor text, p_note text
) RETURNS void LANGUAGE sql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
    UPDATE pgqueue.job_dead_letter l SET
        resolved_at = clock_timestamp(), resolution = p_resolution, resolution_note = p_note,
        resolved_by = pgqueue.fn_job_actor(p_actor)
    WHERE l.dead_letter_id = d.dead_letter_id;
    INSERT INTO pgqueue.job_event (event_type, actor, job_id, job_kind, queue_name, reason, detail)
    VALUES ('queue_job_' || p_resolution, pgqueue.fn_job_actor(p_actor), d.job_id, d.job_kind,
            d.event_domain, p_note, jsonb_build_object('dead_letter_id', d.dead_letter_id));
$$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_dead_letter_resolve(
    p_dead_letter_id bigint, p_resolution text, p_actor text, p_note text
) RETURNS text LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    d pgqueue.job_dead_letter;
BEGIN
    SELECT * INTO d FROM pgqueue.job_dead_letter l WHERE l.dead_letter_id = p_dead_letter_id FOR UPDATE;
    IF NOT FOUND THEN
        RETURN 'not_found';
    ELSIF d.resolved_at IS NOT NULL THEN
        RETURN 'already_resolved';
    END IF;
    PERFORM pgqueue.fn_job_dead_letter_close(d, p_resolution, p_actor, p_note);
    RETURN p_resolution;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_dead_letter_discard(
    p_dead_letter_id bigint, p_actor text DEFAULT NULL, p_note text DEFAULT NULL
) RETURNS text LANGUAGE sql AS $$
    SELECT pgqueue.fn_job_dead_letter_resolve(p_dead_letter_id, 'discarded', p_actor, p_note)
$$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_dead_letter_supersede(
    p_dead_letter_id bigint, p_actor text DEFAULT NULL, p_note text DEFAULT NULL
) RETURNS text LANGUAGE sql AS $$
    SELECT pgqueue.fn_job_dead_letter_resolve(p_dead_letter_id, 'superseded', p_actor, p_note)
$$;

-- Cancel a job that is not running. The trail keeps what was cancelled; the message is gone.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_cancel(
    p_job_id uuid, p_actor text DEFAULT NULL, p_reason text DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql
SET enable_seqscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    r pgqueue.job_queue;
BEGIN
    DELETE FROM pgqueue.job_queue j
    WHERE j.job_id = p_job_id AND j.status NOT IN ('leased', 'succeeded') RETURNING * INTO r;
    IF NOT FOUND THEN
        RETURN false;
    END IF;
    INSERT INTO pgqueue.job_event (event_type, actor, job_id, job_kind, queue_name, reason, detail)
    VALUES ('queue_job_cancelled', pgqueue.fn_job_actor(p_actor), r.job_id, r.job_kind, r.queue_name,
            p_reason, jsonb_build_object('task_id', r.task_id, 'attempts', r.attempts));
    RETURN true;
END $$;
