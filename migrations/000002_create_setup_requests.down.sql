-- Drops the table of setup requests, and refuses to while it holds any row.
--
-- Locks: ACCESS EXCLUSIVE on setup_requests until the end of the transaction, waited for at most 3 s.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000002_create_setup_requests.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

LOCK TABLE latchkey.setup_requests IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM latchkey.setup_requests) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'latchkey.setup_requests is not empty',
            HINT = 'Copy what must be kept, then TRUNCATE latchkey.setup_requests and run this again.';
    END IF;
END;
$$;

DROP TABLE latchkey.setup_requests;
DROP FUNCTION latchkey.setup_free_slot(uuid, bigint);
