-- Wake-ups are hints. A waiting consumer holds a shared advisory lock for each of its queues; an
-- advisory lock is visible at once, so a publisher can ask without writing anything.

CREATE OR REPLACE FUNCTION pgqueue.fn_wake_key(p_queue_name text) RETURNS integer
LANGUAGE sql IMMUTABLE AS $$ SELECT hashtext(p_queue_name) $$;

CREATE OR REPLACE FUNCTION pgqueue.fn_wake_flag_raise(p_queues text[]) RETURNS void
LANGUAGE sql AS $$
    SELECT pg_advisory_lock_shared(hashtext('pgqueue.waiter'), pgqueue.fn_wake_key(q))
    FROM unnest(p_queues) q
$$;

CREATE OR REPLACE FUNCTION pgqueue.fn_wake_flag_lower(p_queues text[]) RETURNS void
LANGUAGE sql AS $$
    SELECT pg_advisory_unlock_shared(hashtext('pgqueue.waiter'), pgqueue.fn_wake_key(q))
    FROM unnest(p_queues) q
$$;

-- Taken and given back in one breath: held until the commit, publishers would see each other.
CREATE OR REPLACE FUNCTION pgqueue.fn_somebody_waits(p_queue_name text) RETURNS boolean
LANGUAGE plpgsql AS $$
BEGIN
    IF pg_try_advisory_lock(hashtext('pgqueue.waiter'), pgqueue.fn_wake_key(p_queue_name)) THEN
        PERFORM pg_advisory_unlock(hashtext('pgqueue.waiter'), pgqueue.fn_wake_key(p_queue_name));
        RETURN false;
    END IF;
    RETURN true;
END $$;

-- For use inside a transaction: delivered with its commit.
CREATE OR REPLACE FUNCTION pgqueue.fn_wake(p_queue_name text) RETURNS void
LANGUAGE sql AS $$ SELECT pg_notify('pgqueue.wake', p_queue_name) $$;
