-- Jittered backoff: least(cap, base * 2^(attempts-1)) * (0.8 + u * 0.4), the jitter after the cap,
-- so that a crowd at the cap still spreads. linear: least(cap, base * attempts); constant: base;
-- a cap of 0 means base. celery_ext.backoff computes the same to the microsecond.
CREATE OR REPLACE FUNCTION pgqueue.fn_job_backoff(
    p_attempts integer,
    p_base double precision,
    p_cap double precision,
    p_strategy text DEFAULT 'exponential',
    p_u double precision DEFAULT random()
) RETURNS interval LANGUAGE plpgsql IMMUTABLE AS $$
DECLARE
    v_attempt double precision := greatest(p_attempts, 1);
    v_delay   double precision;
BEGIN
    IF (p_base >= 0 AND p_cap >= 0 AND p_u >= 0 AND p_u <= 1) IS NOT TRUE THEN
        RAISE EXCEPTION 'fn_job_backoff: base % and cap % must be 0 or more, u % must lie in [0, 1]',
            p_base, p_cap, p_u USING ERRCODE = 'invalid_parameter_value';
    END IF;
    CASE p_strategy
        WHEN 'constant' THEN v_delay := p_base;
        WHEN 'linear' THEN
            v_delay := CASE WHEN p_cap = 0 THEN p_base ELSE least(p_cap, p_base * v_attempt) END;
        WHEN 'exponential' THEN
            v_delay := CASE
                WHEN p_cap = 0 OR p_base = 0 THEN p_base
                -- Past the cap the power is not computed: it would overflow.
                WHEN p_cap <= p_base OR v_attempt - 1 > (ln(p_cap) - ln(p_base)) / ln(2::double precision) THEN p_cap
                ELSE least(p_cap, p_base * power(2::double precision, v_attempt - 1))
            END;
        ELSE
            RAISE EXCEPTION 'fn_job_backoff: unknown strategy %', p_strategy USING
                ERRCODE = 'invalid_parameter_value', HINT = 'exponential, linear or constant';
    END CASE;
    -- Below a microsecond there is nothing to wait, and a product too small for a float is an error.
    RETURN CASE WHEN v_delay < 1e-7 THEN interval '0'
        ELSE make_interval(secs => v_delay * (0.8 + CASE WHEN p_u < 1e-300 THEN 0 ELSE p_u * 0.4 END)) END;
END $$;
