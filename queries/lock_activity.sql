-- name: LockActivityList :many
-- LockActivityList returns who waits for an advisory lock in this database, longest first, and then who holds one,
-- oldest transaction first; max_rows of them at most.
--
-- Locks: none of its own; reading pg_locks stops the server's lock table for a moment.
SELECT
    a.key, a.exclusive, a.granted, a.pid, a.waiting_since, a.transaction_start, a.blocked_by, a.role, a.application, a.state, a.query
FROM latchkey.lock_activity AS a
ORDER BY a.granted, a.waiting_since, a.transaction_start, a.pid, a.key
LIMIT @max_rows;
