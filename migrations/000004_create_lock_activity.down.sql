-- Drops the view of lock activity. Loses no data.
--
-- Locks: the view only.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000004_create_lock_activity.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

DROP VIEW latchkey.lock_activity;
