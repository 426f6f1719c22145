-- A holder's session advisory lock is its sign of life: gone the moment its backend is.
CREATE OR REPLACE FUNCTION pgqueue.fn_holder_lock(p_lease_name text) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT hashtext(p_lease_name) & 2147483647 $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_holder_announce(p_lease_name text) RETURNS boolean
LANGUAGE sql AS $$
    SELECT pg_try_advisory_lock(hashtext('pgqueue.holder'), pgqueue.fn_holder_lock(p_lease_name))
$$;

-- Only a holder that says "lock=<n>" in its name can be missed; others live by their deadline.
CREATE OR REPLACE FUNCTION pgqueue.fn_holder_missing(p_lease_holder text)
RETURNS boolean LANGUAGE sql VOLATILE AS $$
    -- Ten digits at most, compared as bigint: a number that is none of ours must not raise.
    SELECT p_lease_holder ~ 'lock=\d+' AND NOT EXISTS (
        SELECT FROM pg_catalog.pg_locks l
        WHERE l.locktype = 'advisory' AND l.objsubid = 2 AND l.granted
          AND l.database = (SELECT d.oid FROM pg_catalog.pg_database d WHERE d.datname = current_database())
          AND l.classid = (hashtext('pgqueue.holder')::bigint & 4294967295)::oid
          AND l.objid::bigint = substring(p_lease_holder FROM 'lock=(\d{1,10})')::bigint)
$$;

CREATE OR REPLACE FUNCTION pgqueue.fn_runtime_lease_acquire(
    p_lease_name text, p_lease_holder text, p_lease_token uuid, p_ttl interval
) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
BEGIN
    INSERT INTO pgqueue.runtime_lease AS l
        (lease_name, lease_holder, lease_token, acquired_at, expires_at, renewed_at)
    VALUES (p_lease_name, p_lease_holder, p_lease_token, v_now, v_now + p_ttl, v_now)
    ON CONFLICT (lease_name) DO UPDATE SET
        lease_holder = excluded.lease_holder, lease_token = excluded.lease_token,
        acquired_at = excluded.acquired_at, expires_at = excluded.expires_at,
        renewed_at = excluded.renewed_at
    WHERE l.expires_at <= v_now OR l.lease_token = excluded.lease_token
       OR pgqueue.fn_holder_missing(l.lease_holder);
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_runtime_lease_renew(
    p_lease_name text, p_lease_token uuid, p_ttl interval
) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    UPDATE pgqueue.runtime_lease l SET
        expires_at = clock_timestamp() + p_ttl, renewed_at = clock_timestamp()
    WHERE l.lease_name = p_lease_name AND l.lease_token = p_lease_token;
    RETURN FOUND;
END $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_runtime_lease_release(p_lease_name text, p_lease_token uuid)
RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM pgqueue.runtime_lease l
    WHERE l.lease_name = p_lease_name AND l.lease_token = p_lease_token;
    RETURN FOUND;
END $$;

-- Reaper: one batch of jobs whose lease no longer stands. Returns how many; call until it is 0.
--
-- A lease stands while the job's own deadline or its holder's runtime_lease is ahead. A holder
-- whose sign of life is missing gets four seconds to show it again (it may only be reconnecting: its
-- next renewal restores the deadline); after that its jobs go, however far their deadline.
--
-- A lost lease is a delivery more for the jobs that ran. What had not started next to them is innocent;
-- where nobody is known to have run, all are charged, or a poison message whose start was never
-- reported would be passed on for ever.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_lease_reaper(
    p_limit integer DEFAULT 500, p_actor text DEFAULT 'reaper'
) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now   timestamptz := clock_timestamp();
    v_ttl   interval := make_interval(secs =>
        pgqueue.fn_job_setting_number('queue.lease.ttl_seconds', NULL, NULL, 60));
    v_count integer := 0;
    v_code  text;
    r       record;
BEGIN
    IF NOT pgqueue.fn_job_switch('queue.lease_reaper.enabled')
       OR NOT pgqueue.fn_job_switch('queue.job_substrate.enabled')
       -- After a start every holder is still reconnecting: whoever is alive renews in this time.
       OR v_now < pg_postmaster_start_time() + v_ttl
    THEN
        RETURN 0;
    END IF;
    UPDATE pgqueue.runtime_lease l SET expires_at = v_now + interval '4 seconds'
    WHERE l.lease_name IN (
        SELECT m.lease_name FROM pgqueue.runtime_lease m
        WHERE m.expires_at > v_now + interval '4 seconds'
          AND pgqueue.fn_holder_missing(m.lease_holder)
        ORDER BY m.lease_name FOR UPDATE SKIP LOCKED);
    FOR r IN
        WITH holder AS MATERIALIZED (
            -- pg_locks is dear: asked once a holder, not once a job.
            SELECT l.lease_name, l.lease_holder, l.expires_at,
                   l.expires_at <= v_now AND pgqueue.fn_holder_missing(l.lease_holder) AS gone
            FROM pgqueue.runtime_lease l
        ), lost AS MATERIALIZED (
            -- Unstarted ones first: while a started one is left, it is known who killed the holder.
            SELECT j.job_id, j.lease_token, coalesce(h.gone, false) AS holder_gone,
                   j.started_at IS NOT NULL
                       OR NOT bool_or(j.started_at IS NOT NULL) OVER (PARTITION BY j.lease_name) AS charged
            FROM pgqueue.job_queue j
            LEFT JOIN holder h ON h.lease_name = j.lease_name AND h.lease_holder = j.lease_holder
            WHERE j.status = 'leased' AND coalesce(h.expires_at <= v_now, true)
              AND (j.leased_until <= v_now OR h.gone)
            ORDER BY j.started_at IS NOT NULL, j.leased_until LIMIT p_limit
        )
        SELECT j.*, l.holder_gone, l.charged
        FROM (SELECT * FROM lost ORDER BY job_id) l CROSS JOIN LATERAL (
            -- The deadline again: a renewal that committed meanwhile is seen by the row that is locked.
            SELECT * FROM pgqueue.job_queue q
            WHERE q.job_id = l.job_id AND q.lease_token = l.lease_token
              AND (q.leased_until <= v_now OR l.holder_gone)
            FOR UPDATE SKIP LOCKED) j
    LOOP
        -- The subtransaction: a job that cannot be moved must not hold up its neighbours.
        BEGIN
            v_code := CASE
                WHEN r.started_at IS NOT NULL AND r.acks_late IS FALSE THEN 'worker_lost'
                WHEN r.charged AND r.deliveries + 1 >= pgqueue.fn_job_setting_number(
                    'queue.delivery_limit', r.job_kind, r.queue_name, 20) THEN 'delivery_limit'
                WHEN r.started_at IS NOT NULL AND r.attempts >= nullif(coalesce(
                        r.max_attempts, pgqueue.fn_job_setting_number(
                            'queue.retry.max_attempts', r.job_kind, r.queue_name, 5)), 0)
                    THEN CASE WHEN r.holder_gone THEN 'worker_lost' ELSE 'lease_expired' END
                END;
            IF v_code IS NOT NULL THEN
                PERFORM pgqueue.fn_job_bury(ARRAY[r.job_id], v_code,
                    format('lease_expired: %s was lost', r.lease_holder), '{}', p_actor, 0, r.charged::integer);
            ELSE
                UPDATE pgqueue.job_queue j SET
                    status = 'retry_waiting',
                    -- The first loss is repeated at once; a job that keeps losing its worker waits.
                    process_after = CASE
                        WHEN r.started_at IS NULL THEN j.process_after
                        WHEN r.attempts <= 1 THEN v_now
                        ELSE v_now + pgqueue.fn_job_backoff(r.attempts - 1,
                            coalesce(r.backoff_base_s, pgqueue.fn_job_setting_number(
                                'queue.retry.backoff.base_seconds', r.job_kind, r.queue_name, 30)),
                            coalesce(r.backoff_cap_s, pgqueue.fn_job_setting_number(
                                'queue.retry.backoff.cap_seconds', r.job_kind, r.queue_name, 3600)),
                            coalesce(r.backoff_strategy, pgqueue.fn_job_setting(
                                'queue.retry.backoff.strategy', r.job_kind, r.queue_name,
                                '"exponential"') #>> '{}')) END,
                    deliveries = j.deliveries + r.charged::integer,
                    last_error = 'lease_expired', last_error_code = 'lease_expired', last_error_at = v_now,
                    first_failed_at = CASE WHEN r.started_at IS NULL THEN j.first_failed_at
                                           ELSE coalesce(j.first_failed_at, v_now) END,
                    lease_name = NULL, lease_holder = NULL, lease_token = NULL, leased_until = NULL,
                    started_at = NULL
                WHERE j.job_id = r.job_id;
                PERFORM pgqueue.fn_wake(r.queue_name);
            END IF;
            INSERT INTO pgqueue.job_event
                (event_type, severity, actor, job_id, job_kind, queue_name, reason, detail)
            VALUES ('queue_lease_reaped', 'warning', pgqueue.fn_job_actor(p_actor), r.job_id, r.job_kind,
                    r.queue_name, coalesce(v_code, 'lease_expired'),
                    jsonb_build_object('lease_holder', r.lease_holder, 'started', r.started_at IS NOT NULL,
                                       'attempts', r.attempts,
                                       'deliveries', r.deliveries + r.charged::integer));
            v_count := v_count + 1;
        EXCEPTION
            WHEN query_canceled OR admin_shutdown THEN RAISE;
            WHEN OTHERS THEN
                RAISE WARNING 'pgqueue: job % could not be reaped: % (%)', r.job_id, SQLERRM, SQLSTATE;
        END;
    END LOOP;
    DELETE FROM pgqueue.runtime_lease l WHERE l.lease_name IN (
        SELECT m.lease_name FROM pgqueue.runtime_lease m
        WHERE m.expires_at <= v_now
          AND NOT EXISTS (SELECT FROM pgqueue.job_queue j
                          WHERE j.status = 'leased' AND j.lease_name = m.lease_name)
        ORDER BY m.lease_name FOR UPDATE SKIP LOCKED);
    RETURN v_count;
END $$;

-- Sweeper: bury jobs that expired before they started, one statement a queue. Transient ones are
-- only counted. A leased row counts as unstarted where its publisher's workers report starts.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_sweep_expired(
    p_limit integer DEFAULT 500, p_actor text DEFAULT 'sweeper'
) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now     timestamptz := clock_timestamp();
    v_count   integer := 0;
    v_dropped integer;
    v_queue   text;
    v_ids     uuid[];
    v_id      uuid;
    v_error   text := 'expired before it started';
BEGIN
    IF NOT pgqueue.fn_job_switch('queue.job_substrate.enabled') THEN
        RETURN 0;
    END IF;
    FOR v_queue, v_ids IN
        SELECT d.queue_name, array_agg(d.job_id ORDER BY d.job_id)
        FROM (SELECT j.job_id, j.queue_name FROM ONLY pgqueue.job_queue j
              WHERE j.expires_at <= v_now AND j.started_at IS NULL
                AND (j.status IN ('queued', 'retry_waiting')
                     OR (j.status = 'leased' AND j.acks_late IS NOT NULL))
              ORDER BY j.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED) d
        GROUP BY d.queue_name
    LOOP
        BEGIN
            v_count := v_count + pgqueue.fn_job_bury(v_ids, 'expired', v_error, '{}', p_actor);
        EXCEPTION WHEN OTHERS THEN
            -- One of them cannot be moved: it must not hold up its neighbours.
            FOREACH v_id IN ARRAY v_ids LOOP
                BEGIN
                    v_count := v_count + pgqueue.fn_job_bury(ARRAY[v_id], 'expired', v_error, '{}', p_actor);
                EXCEPTION WHEN OTHERS THEN
                    RAISE WARNING 'pgqueue: expired job % could not be buried: % (%)', v_id, SQLERRM, SQLSTATE;
                END;
            END LOOP;
        END;
    END LOOP;
    -- An array, not IN: a sub-select with a limit may be run again for every row of a join. NOT IN, not
    -- the waiting states by name: those would allow a walk through the index of all ready jobs.
    WITH gone AS (
        DELETE FROM pgqueue.job_queue_transient t WHERE t.job_id = ANY (ARRAY(
            SELECT j.job_id FROM pgqueue.job_queue_transient j
            WHERE j.expires_at <= v_now AND j.status NOT IN ('leased', 'succeeded')
            ORDER BY j.expires_at LIMIT p_limit FOR UPDATE SKIP LOCKED))
        RETURNING t.queue_name)
    SELECT count(*) INTO v_dropped FROM gone;
    IF v_dropped > 0 THEN
        INSERT INTO pgqueue.job_event (event_type, actor, reason, detail)
        VALUES ('queue_pruned', pgqueue.fn_job_actor(p_actor), 'transient messages expired',
                jsonb_build_object('count', v_dropped));
    END IF;
    RETURN v_count + v_dropped;
END $$;

-- Retention: resolved dead letters, open ones stamped with a retention, events, finished jobs; and the
-- priority levels of queues that are gone.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_prune(
    p_limit integer DEFAULT 1000, p_actor text DEFAULT 'retention'
) RETURNS integer LANGUAGE plpgsql
SET enable_seqscan = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_now      timestamptz := clock_timestamp();
    v_resolved timestamptz := v_now - make_interval(secs => pgqueue.fn_job_setting_number(
        'queue.retention.resolved_seconds', NULL, NULL, 2592000));
    v_event    timestamptz := v_now - make_interval(secs => pgqueue.fn_job_setting_number(
        'queue.retention.event_seconds', NULL, NULL, 2592000));
    v_finished timestamptz := v_now - make_interval(secs => pgqueue.fn_job_setting_number(
        'queue.retention.succeeded_seconds', NULL, NULL, 0));
    v_letters  integer;
    v_open     integer;
    v_events   integer;
    v_jobs     integer;
BEGIN
    DELETE FROM pgqueue.job_dead_letter l WHERE l.dead_letter_id = ANY (ARRAY(
        SELECT d.dead_letter_id FROM pgqueue.job_dead_letter d WHERE d.resolved_at <= v_resolved
        ORDER BY d.resolved_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_letters = ROW_COUNT;
    DELETE FROM pgqueue.job_dead_letter l WHERE l.dead_letter_id = ANY (ARRAY(
        SELECT d.dead_letter_id FROM pgqueue.job_dead_letter d
        WHERE d.resolved_at IS NULL AND d.dead_letter_retention_s IS NOT NULL
          AND d.died_at + make_interval(secs => d.dead_letter_retention_s) <= v_now
        ORDER BY d.died_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_open = ROW_COUNT;
    DELETE FROM pgqueue.job_event e WHERE e.event_id = ANY (ARRAY(
        SELECT f.event_id FROM pgqueue.job_event f WHERE f.happened_at <= v_event
        ORDER BY f.happened_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_events = ROW_COUNT;
    DELETE FROM pgqueue.job_queue q WHERE q.job_id = ANY (ARRAY(
        SELECT j.job_id FROM pgqueue.job_queue j
        WHERE j.status = 'succeeded' AND j.finished_at <= v_finished
        ORDER BY j.finished_at LIMIT p_limit FOR UPDATE SKIP LOCKED));
    GET DIAGNOSTICS v_jobs = ROW_COUNT;
    IF v_letters + v_open + v_events + v_jobs > 0 THEN
        INSERT INTO pgqueue.job_event (event_type, actor, detail)
        VALUES ('queue_pruned', pgqueue.fn_job_actor(p_actor), jsonb_build_object(
            'dead_letters', v_letters + v_open, 'events', v_events, 'succeeded', v_jobs));
    END IF;
    PERFORM pgqueue.fn_queue_priority_mend();
    RETURN v_letters + v_open + v_events + v_jobs;
END $$;

-- Makes queue_priority say what the queues hold. A level goes when its queue is not declared and holds
-- nothing that waits. A publisher that saw the level just before may commit just after, and a claim would
-- never look where that job is: so what is missing is put back, by one descent in the index of the
-- waiting jobs for each queue and priority they have.
CREATE OR REPLACE FUNCTION pgqueue.fn_queue_priority_mend() RETURNS void LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_queue    text;
    v_priority smallint;
BEGIN
    DELETE FROM pgqueue.queue_priority p
    WHERE NOT EXISTS (SELECT FROM pgqueue.queue q WHERE q.queue_name = p.queue_name)
      AND NOT EXISTS (SELECT FROM pgqueue.job_queue j
                      WHERE j.queue_name = p.queue_name AND j.status IN ('queued', 'retry_waiting'))
      -- Leased ones come back to their place when they are given back or reaped.
      AND NOT EXISTS (SELECT FROM pgqueue.job_queue j
                      WHERE j.queue_name = p.queue_name AND j.status = 'leased');
    SELECT j.queue_name, j.priority INTO v_queue, v_priority FROM pgqueue.job_queue j
    WHERE j.status IN ('queued', 'retry_waiting')
    ORDER BY j.queue_name, j.priority DESC LIMIT 1;
    WHILE FOUND LOOP
        PERFORM pgqueue.fn_queue_priority_note(v_queue, v_priority);
        SELECT j.queue_name, j.priority INTO v_queue, v_priority FROM pgqueue.job_queue j
        WHERE j.status IN ('queued', 'retry_waiting') AND j.queue_name = v_queue AND j.priority < v_priority
        ORDER BY j.queue_name, j.priority DESC LIMIT 1;
        IF NOT FOUND THEN
            SELECT j.queue_name, j.priority INTO v_queue, v_priority FROM pgqueue.job_queue j
            WHERE j.status IN ('queued', 'retry_waiting') AND j.queue_name > v_queue
            ORDER BY j.queue_name, j.priority DESC LIMIT 1;
        END IF;
    END LOOP;
END $$;
