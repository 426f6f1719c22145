-- Settings: the most specific row of job_config wins; an absent row means the built-in value.

-- PL/pgSQL, not SQL: its plan is kept for the session, an SQL function would be planned at every call.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_setting(
    p_key text, p_job_kind text, p_queue_name text, p_built_in jsonb
) RETURNS jsonb LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN coalesce(
        (SELECT c.value FROM pgqueue.job_config c WHERE c.key = p_key || '.' || p_job_kind),
        (SELECT c.value FROM pgqueue.job_config c WHERE c.key = p_key || '.queue:' || p_queue_name),
        (SELECT c.value FROM pgqueue.job_config c WHERE c.key = p_key || '.default'),
        (SELECT c.value FROM pgqueue.job_config c WHERE c.key = p_key),
        p_built_in);
END $$;

-- The same as a number; a JSON null ("none", "unlimited") is SQL NULL.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_setting_number(
    p_key text, p_job_kind text, p_queue_name text, p_built_in double precision
) RETURNS double precision LANGUAGE sql STABLE AS $$
    SELECT (pgqueue.fn_job_setting(p_key, p_job_kind, p_queue_name,
                                   coalesce(to_jsonb(p_built_in), 'null')) #>> '{}')::double precision
$$;

CREATE OR REPLACE FUNCTION pgqueue.fn_job_switch(
    p_key text, p_job_kind text DEFAULT NULL, p_queue_name text DEFAULT NULL
) RETURNS boolean LANGUAGE plpgsql STABLE AS $$
BEGIN
    RETURN (pgqueue.fn_job_setting(p_key, p_job_kind, p_queue_name, 'true') #>> '{}')::boolean;
END $$;

-- Who is asking: set by a client as pgqueue.actor for its session, else the database role.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_actor(p_actor text DEFAULT NULL) RETURNS text
LANGUAGE sql STABLE AS $$
    SELECT coalesce(nullif(p_actor, ''), nullif(current_setting('pgqueue_client.actor', true), ''),
                    session_user::text)
$$;

-- A misspelt key or a value of the wrong type would silently change nothing: refuse both.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_config_guard() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    v_kind text := CASE
        WHEN NEW.key IN ('queue.job_substrate.enabled', 'queue.lease_reaper.enabled') THEN 'boolean'
        WHEN NEW.key ~ '^queue\.retry\.enabled(\..+)?$' THEN 'boolean'
        WHEN NEW.key ~ '^queue\.retry\.max_attempts\..+' THEN 'count or null'
        WHEN NEW.key ~ '^queue\.retry\.backoff\.strategy(\..+)?$' THEN 'strategy'
        WHEN NEW.key ~ '^queue\.retry\.backoff\.(base|cap)_seconds(\..+)?$' THEN 'number'
        WHEN NEW.key ~ '^queue\.retry\.backoff\.budget_seconds(\..+)?$' THEN 'number or null'
        WHEN NEW.key ~ '^queue\.lease\.ttl_seconds(\..+)?$' THEN 'positive number'
        WHEN NEW.key ~ '^queue\.delivery_limit(\..+)?$' THEN 'count or null'
        WHEN NEW.key ~ '^queue\.retention\.(succeeded|resolved|event)_seconds$' THEN 'number'
    END;
    v_type text := jsonb_typeof(NEW.value);
    v_number numeric := CASE WHEN v_type = 'number' THEN (NEW.value #>> '{}')::numeric END;
    -- Some thirty years: more would overflow the clock, in every claim and not only here.
    v_most   numeric := 1000000000;
BEGIN
    IF v_kind IS NULL THEN
        RAISE EXCEPTION 'unknown configuration key %', NEW.key USING
            ERRCODE = 'check_violation',
            HINT = 'known: queue.retry.enabled, queue.retry.max_attempts.default, '
                   'queue.retry.backoff.strategy | base_seconds | cap_seconds | budget_seconds, '
                   'queue.lease.ttl_seconds, queue.delivery_limit, queue.job_substrate.enabled, '
                   'queue.lease_reaper.enabled, queue.retention.succeeded_seconds | '
                   'resolved_seconds | event_seconds; retry, lease and delivery keys also with '
                   '.<task name> or .queue:<queue name>';
    ELSIF (CASE v_kind
        WHEN 'boolean' THEN v_type = 'boolean'
        WHEN 'strategy' THEN NEW.value IN ('"exponential"', '"linear"', '"constant"')
        WHEN 'number' THEN v_number BETWEEN 0 AND v_most
        WHEN 'positive number' THEN v_number > 0 AND v_number <= v_most
        WHEN 'number or null' THEN v_type = 'null' OR v_number BETWEEN 0 AND v_most
        WHEN 'count or null' THEN
            v_type = 'null' OR (v_number BETWEEN 1 AND v_most AND v_number = trunc(v_number))
        END IS NOT TRUE)
    THEN
        RAISE EXCEPTION 'configuration key % cannot be %: it takes a %', NEW.key, left(NEW.value::text, 100),
            replace(replace(v_kind, 'strategy', 'strategy: "exponential", "linear" or "constant"'),
                    'number', 'number up to ' || v_most)
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
DROP TRIGGER IF EXISTS job_config_guard ON pgqueue.job_config;
CREATE TRIGGER job_config_guard BEFORE INSERT OR UPDATE ON pgqueue.job_config
    FOR EACH ROW EXECUTE FUNCTION pgqueue.fn_job_config_guard();

-- Who changed what. After, not before: an upsert runs the triggers before the insert even where it updates.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_config_told() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO pgqueue.job_event (event_type, actor, reason, detail)
    VALUES ('queue_config_changed', pgqueue.fn_job_actor(),
            nullif(current_setting('pgqueue_client.reason', true), ''),
            jsonb_build_object('key', coalesce(NEW.key, OLD.key), 'old', OLD.value, 'new', NEW.value));
    RETURN NULL;
END $$;
DROP TRIGGER IF EXISTS job_config_told ON pgqueue.job_config;
CREATE TRIGGER job_config_told AFTER INSERT OR UPDATE OR DELETE ON pgqueue.job_config
    FOR EACH ROW EXECUTE FUNCTION pgqueue.fn_job_config_told();
