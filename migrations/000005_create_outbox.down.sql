-- Drops the outbox and its functions, and refuses to while it holds any row.
--
-- Locks: ACCESS EXCLUSIVE on outbox until the end of the transaction, waited for at most 3 s.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000005_create_outbox.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

LOCK TABLE latchkey.outbox IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    IF EXISTS (SELECT FROM latchkey.outbox) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'latchkey.outbox is not empty',
            HINT = 'Let its events be handled, copy what must be kept, then TRUNCATE latchkey.outbox and run this again.';
    END IF;
END;
$$;

DROP FUNCTION latchkey.outbox_insert(text[]);
DROP TABLE latchkey.outbox;
DROP FUNCTION latchkey.outbox_notify();
DROP FUNCTION latchkey.outbox_is_possible(text, text, text, text, timestamptz, timestamptz, integer, integer, bigint);
