-- Creates the view that shows who holds or waits for an advisory lock of this database.
--
-- Locks: none that anything else waits for; a new view only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000004_create_lock_activity.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE VIEW latchkey.lock_activity AS
SELECT
    ((l.classid::bigint << 32) | l.objid::bigint)::bigint AS key,
    (l.mode = 'ExclusiveLock')::boolean AS exclusive,
    (l.granted)::boolean AS granted,
    coalesce(l.pid, 0)::integer AS pid,
    l.waitstart AS waiting_since,
    a.xact_start AS transaction_start,
    (clock_timestamp() - a.xact_start)::interval AS transaction_age,
    (CASE WHEN l.granted THEN '{}' ELSE pg_blocking_pids(l.pid) END)::integer[] AS blocked_by,
    coalesce(a.usename, '')::text AS role,
    coalesce(a.application_name, '')::text AS application,
    coalesce(a.state, '')::text AS state,
    coalesce(a.query, '')::text AS query
FROM pg_catalog.pg_locks AS l
LEFT JOIN pg_catalog.pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'advisory'
    AND l.objsubid = 1 -- the form with one bigint, not that with two integers
    AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database());

COMMENT ON VIEW latchkey.lock_activity IS
    'Who holds or waits for an advisory lock with a bigint key in this database; for one id: WHERE key = latchkey.lock_key(namespace, id). Of other roles'' sessions, a role that is not in pg_read_all_stats sees no state and no query.';
COMMENT ON COLUMN latchkey.lock_activity.key IS 'The lock key, put together again from the two halves in pg_locks.';
COMMENT ON COLUMN latchkey.lock_activity.exclusive IS 'False for a shared lock.';
COMMENT ON COLUMN latchkey.lock_activity.granted IS 'True for a holder, false for one who waits.';
COMMENT ON COLUMN latchkey.lock_activity.pid IS 'The server process; 0 for a prepared transaction.';
COMMENT ON COLUMN latchkey.lock_activity.waiting_since IS 'When the wait began; NULL for a holder.';
COMMENT ON COLUMN latchkey.lock_activity.transaction_start IS 'When the session''s transaction began; NULL outside any, and where this role may not see it.';
COMMENT ON COLUMN latchkey.lock_activity.blocked_by IS 'The pids that hold the lock, or wait for it earlier; empty for a holder.';
