-- Drops the tables of accounts, entries and transfers, and refuses to while they hold any row.
--
-- Locks: ACCESS EXCLUSIVE on all three until the end of the transaction, each waited for at most 3 s.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000003_create_accounts.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

LOCK TABLE latchkey.accounts, latchkey.entries, latchkey.transfers IN ACCESS EXCLUSIVE MODE;

DO $$
BEGIN
    -- The rows of the others refer to an account.
    IF EXISTS (SELECT FROM latchkey.accounts) THEN
        RAISE EXCEPTION USING
            ERRCODE = 'object_not_in_prerequisite_state',
            MESSAGE = 'latchkey.accounts is not empty',
            HINT = 'Copy what must be kept, then TRUNCATE latchkey.accounts, latchkey.entries, latchkey.transfers and run this again.';
    END IF;
END;
$$;

DROP TABLE latchkey.entries;
DROP TABLE latchkey.transfers;
DROP TABLE latchkey.accounts;
