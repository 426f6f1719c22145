-- 100,000 rows in every state, for the tests of plans.
INSERT INTO pgqueue.queue_priority
    SELECT 'q' || q, p FROM generate_series(0, 9) q, unnest(ARRAY[0, 5, 9]) p;
-- Due, spread over ten queues and two priorities.
INSERT INTO pgqueue.job_queue (job_id, queue_name, job_kind, priority, process_after, enqueued_at,
                               expires_at, idempotency_key, envelope, body)
    SELECT gen_random_uuid(), 'q' || n % 10, 'app.work', n % 2 * 5, now() - n * interval '1 ms',
           now(), CASE WHEN n % 5 = 0 THEN now() + interval '1 day' END, n, '{}', repeat('x', 100)::bytea
    FROM generate_series(1, 40000) n;
-- Delayed, of a higher priority than all that is due.
INSERT INTO pgqueue.job_queue (job_id, queue_name, job_kind, priority, process_after, enqueued_at,
                               idempotency_key, envelope, body)
    SELECT gen_random_uuid(), 'q' || n % 10, 'app.work', 9, now() + n * interval '1 s',
           now(), n, '{}', repeat('x', 100)::bytea
    FROM generate_series(1, 30000) n;
-- Leased, most of them by a holder whose lease stands.
INSERT INTO pgqueue.runtime_lease VALUES
    ('alive', 'alive@host', gen_random_uuid(), now(), now() + interval '1 day', now());
INSERT INTO pgqueue.job_queue (job_id, queue_name, job_kind, process_after, enqueued_at,
                               idempotency_key, envelope, body)
    SELECT gen_random_uuid(), 'leased', 'app.work', now(), now(), n, '{}', 'x'
    FROM generate_series(1, 2000) n;
UPDATE pgqueue.job_queue SET status = 'leased', lease_name = 'alive', lease_holder = 'alive@host',
       lease_token = gen_random_uuid(), claimed_at = now(), leased_until = now() + interval '1 hour'
WHERE queue_name = 'leased';
INSERT INTO pgqueue.job_dead_letter (job_id, job_kind, event_domain, idempotency_key, failure_code,
        attempts, job_snapshot, envelope, body, last_failed_at, died_at, resolved_at, resolution,
        resolved_by)
    SELECT gen_random_uuid(), 'app.k' || n % 50, 'q' || n % 10, n, 'fatal', 1, '{}', '{}', 'x',
           now() - n * interval '1 s', now() - n * interval '1 s',
           CASE WHEN n % 10 > 0 THEN now() END, CASE WHEN n % 10 > 0 THEN 'discarded' END,
           CASE WHEN n % 10 > 0 THEN 'me' END
    FROM generate_series(1, 28000) n;
