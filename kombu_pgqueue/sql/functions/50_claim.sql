-- Claim: take up to p_limit due jobs under a lease, in one call.
--
-- The order is priority DESC, process_after ASC, seq ASC within a queue. It is reached by walking
-- the queue's few priority levels (queue_priority) with the remaining limit: one ordered index scan
-- per level, so that delayed, leased and dead rows, other queues and unused priorities cost
-- nothing, and the rows locked are the rows returned. One ORDER BY over all levels would lock a
-- batch per level. Several queues share the batch evenly; what one leaves over the others take. The
-- first of them is drawn by lot: a batch smaller than the number of queues must not starve the last.
--
-- p_max_bytes bounds the bodies of the batch; one job always goes, however large it is. The rows are
-- sized before they are locked, so that none is locked and left: other claimers in between can make
-- the batch another one of the same length.
--
-- A low-water mark (p_mark_*, one per queue and priority) starts the scan behind what the caller
-- already took: while some transaction holds back vacuum, taken rows stay in the index and every
-- scan from the start would read them all again.
--
-- The settings below: the plan must be the index scan whatever the statistics of the moment say
-- (an empty table has none), and JIT must not be tempted by the costs of disabled plans.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_claim(
    p_queues text[],
    p_lease_name text,
    p_lease_holder text,
    p_limit integer,
    p_kinds text[] DEFAULT NULL,
    p_max_bytes bigint DEFAULT NULL,
    p_mark_queues text[] DEFAULT NULL,
    p_mark_priorities integer[] DEFAULT NULL,
    p_mark_times timestamptz[] DEFAULT NULL,
    p_mark_seqs bigint[] DEFAULT NULL
) RETURNS TABLE (
    job_id uuid, lease_token uuid, queue_name text, job_kind text, task_id text, priority smallint,
    process_after timestamptz, seq bigint, attempts integer, retries integer, deliveries integer,
    replays integer, backoff_spent_s double precision, leased_until timestamptz, envelope text,
    body bytea
) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
#variable_conflict use_column
DECLARE
    v_now       timestamptz := clock_timestamp();
    v_enabled   boolean;
    v_ttl       double precision;
    v_special   boolean;
    v_queues    text[] := p_queues;
    v_start     integer;
    v_left      integer := p_limit;
    v_want      integer;
    v_got       integer;
    v_bytes     bigint := p_max_bytes;
    v_size      bigint;
    v_seen      integer;
    v_cut       boolean := false;
    v_drained   text[] := '{}';
    v_queue     text;
    v_priority  smallint;
    v_after     timestamptz;
    v_after_seq bigint;
BEGIN
    IF p_queues IS NULL OR p_limit IS NULL OR p_lease_name IS NULL OR p_lease_holder IS NULL THEN
        RAISE EXCEPTION 'fn_job_claim: queues, lease name, lease holder and limit must be given' USING
            ERRCODE = 'null_value_not_allowed';
    END IF;
    -- One look at the configuration; the special deadlines only where there are any.
    SELECT coalesce((SELECT (c.value #>> '{}')::boolean FROM pgqueue.job_config c
                     WHERE c.key = 'queue.job_substrate.enabled'), true),
           coalesce((SELECT (c.value #>> '{}')::double precision FROM pgqueue.job_config c
                     WHERE c.key = 'queue.lease.ttl_seconds'), 60),
           EXISTS (SELECT FROM pgqueue.job_config c
                   WHERE c.key > 'queue.lease.ttl_seconds.' AND c.key < 'queue.lease.ttl_seconds/')
    INTO v_enabled, v_ttl, v_special;
    IF NOT v_enabled THEN
        RETURN;
    END IF;
    IF cardinality(p_queues) > 1 THEN
        v_start := 1 + floor(random() * cardinality(p_queues))::integer;
        v_queues := p_queues[v_start:] || p_queues[:v_start - 1];
    END IF;
    FOR v_round IN 1..2 LOOP
        EXIT WHEN v_left <= 0 OR cardinality(v_queues) = cardinality(v_drained);
        FOREACH v_queue IN ARRAY v_queues LOOP
            EXIT WHEN v_left <= 0 OR v_bytes <= 0;
            CONTINUE WHEN v_queue = ANY (v_drained);
            v_want := CASE WHEN v_round = 1
                           THEN least(v_left, ceil(p_limit::numeric / cardinality(v_queues))::integer)
                           ELSE v_left END;
            FOR v_priority IN
                SELECT DISTINCT p.priority FROM pgqueue.queue_priority p
                WHERE p.queue_name = v_queue ORDER BY 1 DESC
            LOOP
                EXIT WHEN v_want <= 0 OR v_bytes <= 0;
                v_after := '-infinity';
                v_after_seq := 0;
                IF p_mark_queues IS NOT NULL THEN
                    FOR v_mark IN 1..cardinality(p_mark_queues) LOOP
                        IF p_mark_queues[v_mark] = v_queue AND p_mark_priorities[v_mark] = v_priority THEN
                            v_after := p_mark_times[v_mark];
                            v_after_seq := p_mark_seqs[v_mark];
                        END IF;
                    END LOOP;
                END IF;
                v_got := v_want;
                IF v_bytes IS NOT NULL THEN
                    SELECT count(*) FILTER (WHERE s.fits), max(s.total) FILTER (WHERE s.fits), count(*)
                    INTO v_got, v_size, v_seen
                    FROM (SELECT z.total, z.total <= v_bytes OR (z.place = 1 AND v_left = p_limit) AS fits
                          FROM (SELECT sum(octet_length(c.body)) OVER w AS total, row_number() OVER w AS place
                                FROM (SELECT q.body, q.process_after, q.seq FROM pgqueue.job_queue q
                                      WHERE q.queue_name = v_queue AND q.priority = v_priority
                                        AND q.status IN ('queued', 'retry_waiting')
                                        AND q.process_after <= v_now
                                        AND (q.process_after, q.seq) > (v_after, v_after_seq)
                                        AND (q.expires_at IS NULL OR q.expires_at > v_now)
                                        AND (p_kinds IS NULL OR q.job_kind = ANY (p_kinds))
                                      ORDER BY q.process_after, q.seq LIMIT v_want) c
                                WINDOW w AS (ORDER BY c.process_after, c.seq)) z) s;
                    -- What does not fit must not be overtaken by what comes after it.
                    v_cut := v_got < v_seen;
                    EXIT WHEN v_got = 0 AND v_cut;
                    CONTINUE WHEN v_got = 0;
                    v_bytes := v_bytes - v_size;
                END IF;
                RETURN QUERY
                WITH taken AS (
                    UPDATE pgqueue.job_queue q SET
                        status = 'leased',
                        lease_name = p_lease_name,
                        lease_holder = p_lease_holder,
                        last_executor = p_lease_holder,
                        lease_token = gen_random_uuid(),
                        claimed_at = v_now,
                        leased_until = v_now + make_interval(secs => coalesce(
                            q.visibility_timeout_s,
                            CASE WHEN v_special THEN pgqueue.fn_job_setting_number(
                                'queue.lease.ttl_seconds', q.job_kind, q.queue_name, 60) END,
                            v_ttl))
                    WHERE q.job_id = ANY (ARRAY(
                        SELECT d.job_id FROM pgqueue.job_queue d
                        WHERE d.queue_name = v_queue AND d.priority = v_priority
                          AND d.status IN ('queued', 'retry_waiting')
                          AND d.process_after <= v_now
                          AND (d.process_after, d.seq) > (v_after, v_after_seq)
                          AND (d.expires_at IS NULL OR d.expires_at > v_now)
                          AND (p_kinds IS NULL OR d.job_kind = ANY (p_kinds))
                        ORDER BY d.process_after, d.seq
                        LIMIT v_got
                        FOR UPDATE SKIP LOCKED))
                    RETURNING q.*
                )
                SELECT t.job_id, t.lease_token, t.queue_name, t.job_kind, t.task_id, t.priority,
                       t.process_after, t.seq, t.attempts, t.retries, t.deliveries, t.replays,
                       t.backoff_spent_s, t.leased_until, t.envelope, t.body
                FROM taken t ORDER BY t.process_after, t.seq;
                GET DIAGNOSTICS v_got = ROW_COUNT;
                v_left := v_left - v_got;
                v_want := v_want - v_got;
                EXIT WHEN v_cut;
            END LOOP;
            IF v_want > 0 THEN
                v_drained := v_drained || v_queue;
            END IF;
        END LOOP;
        EXIT WHEN cardinality(v_queues) = 1;
    END LOOP;
END $$;

-- When the next waiting job of these queues becomes due; NULL when none waits.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_next_due(p_queues text[]) RETURNS interval
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    v_soonest timestamptz;
    v_level   record;
    v_first   timestamptz;
BEGIN
    -- Nothing is due while claims are switched off: who sleeps by this answer must not spin.
    IF NOT pgqueue.fn_job_switch('queue.job_substrate.enabled') THEN
        RETURN NULL;
    END IF;
    FOR v_level IN SELECT DISTINCT p.queue_name, p.priority FROM pgqueue.queue_priority p
                   WHERE p.queue_name = ANY (p_queues) LOOP
        SELECT q.process_after INTO v_first FROM pgqueue.job_queue q
        WHERE q.queue_name = v_level.queue_name AND q.priority = v_level.priority
          AND q.status IN ('queued', 'retry_waiting')
          AND (q.expires_at IS NULL OR q.expires_at > clock_timestamp())
        ORDER BY q.process_after, q.seq LIMIT 1;
        v_soonest := least(v_soonest, v_first);
    END LOOP;
    -- greatest() ignores NULL, so nothing waiting would be due at once.
    RETURN CASE WHEN v_soonest IS NOT NULL
                THEN greatest(v_soonest - clock_timestamp(), interval '0') END;
END $$;
