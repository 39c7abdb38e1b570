-- name: LeaseAcquire :one
-- LeaseAcquire gives the lease of the name to owner for ttl_ms milliseconds with a new fencing token, unless somebody
-- has it, also if that is owner. It returns the token and when the lease ends. No row: somebody has it.
--
-- LeaseEnsure goes before it, as a statement of its own. The clock is read when the row is locked.
--
-- Locks: FOR NO KEY UPDATE on the row; waits for who has it locked. Index: leases_pkey.
WITH locked AS MATERIALIZED (
    SELECT l.name, l.expires_at
    FROM latchkey.leases AS l
    WHERE l.name = @name
    FOR NO KEY UPDATE
)
UPDATE latchkey.leases AS l
SET owner = @owner::text,
    fence = l.fence + 1,
    expires_at = pg_catalog.clock_timestamp() + (@ttl_ms::bigint)::double precision * interval '1 millisecond'
WHERE l.name = (
    SELECT k.name FROM locked AS k WHERE k.expires_at IS NULL OR k.expires_at <= pg_catalog.clock_timestamp()
)
RETURNING l.fence, (l.expires_at)::timestamptz AS expires_at;

-- name: LeaseEnsure :exec
-- LeaseEnsure inserts the row of a name that nobody ever had, and does nothing where there is one.
--
-- Locks: waits for another transaction only where that one is inserting the same name. Index: leases_pkey.
INSERT INTO latchkey.leases (name)
VALUES (@name)
ON CONFLICT (name) DO NOTHING;

-- name: LeaseRelease :execrows
-- LeaseRelease gives a lease back. No row: it is not current any more, because it ended or somebody else has it.
--
-- Locks: FOR NO KEY UPDATE on the row; waits for who has it locked. Index: leases_pkey.
WITH locked AS MATERIALIZED (
    SELECT l.name, l.expires_at
    FROM latchkey.leases AS l
    WHERE l.name = @name AND l.owner = @owner::text AND l.fence = @fence
    FOR NO KEY UPDATE
)
UPDATE latchkey.leases AS l
SET owner = NULL, expires_at = NULL
WHERE l.name = (SELECT k.name FROM locked AS k WHERE k.expires_at > pg_catalog.clock_timestamp());

-- name: LeaseRenew :one
-- LeaseRenew makes a lease end ttl_ms milliseconds from now, and returns when that is. No row: it is not current any
-- more, as in LeaseRelease.
--
-- Locks: FOR NO KEY UPDATE on the row; waits for who has it locked. Index: leases_pkey.
WITH locked AS MATERIALIZED (
    SELECT l.name, l.expires_at
    FROM latchkey.leases AS l
    WHERE l.name = @name AND l.owner = @owner::text AND l.fence = @fence
    FOR NO KEY UPDATE
)
UPDATE latchkey.leases AS l
SET expires_at = pg_catalog.clock_timestamp() + (@ttl_ms::bigint)::double precision * interval '1 millisecond'
WHERE l.name = (SELECT k.name FROM locked AS k WHERE k.expires_at > pg_catalog.clock_timestamp())
RETURNING (l.expires_at)::timestamptz AS expires_at;
