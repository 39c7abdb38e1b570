-- Drops the leases by name, and refuses to while there is any name: its fence would begin again.
--
-- Locks: ACCESS EXCLUSIVE on leases until the end of the transaction, waited for at most 3 s.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000006_create_leases.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

LOCK TABLE latchkey.leases IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM latchkey.leases) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'latchkey.leases is not empty',
            HINT = 'If no sink compares fences any more, TRUNCATE latchkey.leases and run this again.';
    END IF;
END;
$$;

DROP TABLE latchkey.leases;
