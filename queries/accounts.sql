-- name: AccountGet :one
-- AccountGet returns the account. No row: there is none with this id.
--
-- Locks: none. Index: accounts_pkey.
SELECT a.id, a.owner_id, a.balance, a.daily_limit, a.time_zone, a.idempotency_key, a.created_at
FROM latchkey.accounts AS a
WHERE a.id = @id;

-- name: AccountInsert :one
-- AccountInsert inserts an empty account of the owner. It returns one row always: the new account, or the one
-- that an earlier call inserted under the same idempotency key.
--
-- With an idempotency key the caller holds the lock account_owner:<owner_id>, taken by a statement of its own,
-- before this one; without one it needs no lock. Error 22023: the server does not know the time zone.
-- Error 23505 on accounts_idempotency_key: a writer without the lock was there first.
--
-- Locks: waits for another transaction only where that one inserted the same idempotency key without the lock.
-- Index: accounts_idempotency_key.
WITH earlier AS MATERIALIZED (
    SELECT a.id, a.owner_id, a.balance, a.daily_limit, a.time_zone, a.idempotency_key, a.created_at
    FROM latchkey.accounts AS a
    WHERE a.owner_id = @owner_id AND a.idempotency_key = sqlc.narg('idempotency_key')::text
), inserted AS (
    INSERT INTO latchkey.accounts (id, owner_id, daily_limit, time_zone, idempotency_key)
    SELECT @id::uuid, @owner_id, @daily_limit::bigint, @time_zone::text, sqlc.narg('idempotency_key')::text
    WHERE NOT EXISTS (SELECT FROM earlier)
        AND pg_catalog.clock_timestamp() AT TIME ZONE @time_zone IS NOT NULL  -- raises where the zone is unknown
    RETURNING id, owner_id, balance, daily_limit, time_zone, idempotency_key, created_at
)
SELECT e.id, e.owner_id, e.balance, e.daily_limit, e.time_zone, e.idempotency_key, e.created_at FROM earlier AS e
UNION ALL
SELECT i.id, i.owner_id, i.balance, i.daily_limit, i.time_zone, i.idempotency_key, i.created_at FROM inserted AS i;
