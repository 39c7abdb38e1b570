-- name: SetupCountPending :one
-- SetupCountPending returns how many requests of the user are pending; 0 also for an unknown user.
--
-- Locks: none. Index: setup_requests_pending_key.
SELECT pg_catalog.count(*)
FROM latchkey.setup_requests AS s
WHERE s.user_id = @user_id AND s.status = 'pending';

-- name: SetupEnd :one
-- SetupEnd moves a pending request to status, which is completed or cancelled, and returns it with ended true.
-- A request that is not pending any more comes back as the statement found it, with ended false. No row: there
-- is no such request.
--
-- Needs no advisory lock: a request only ever leaves pending, so a count under the lock can be too high by
-- one that is just ending, never too low.
--
-- Locks: the row, FOR NO KEY UPDATE. Index: setup_requests_pkey.
WITH ended AS (
    UPDATE latchkey.setup_requests AS s
    SET status = @status, ended_at = pg_catalog.clock_timestamp()
    WHERE s.id = @id AND s.status = 'pending'
    RETURNING s.id, s.user_id, s.status, s.pending_slot, s.max_pending, s.idempotency_key, s.created_at, s.ended_at
)
SELECT e.id, e.user_id, e.status, e.pending_slot, e.max_pending, e.idempotency_key, e.created_at, e.ended_at, true AS ended
FROM ended AS e
UNION ALL
SELECT s.id, s.user_id, s.status, s.pending_slot, s.max_pending, s.idempotency_key, s.created_at, s.ended_at, false AS ended
FROM latchkey.setup_requests AS s
WHERE s.id = @id AND NOT EXISTS (SELECT FROM ended);

-- name: SetupGet :one
-- SetupGet returns the request. No row: there is none with this id.
--
-- Locks: none. Index: setup_requests_pkey.
SELECT s.id, s.user_id, s.status, s.pending_slot, s.max_pending, s.idempotency_key, s.created_at, s.ended_at
FROM latchkey.setup_requests AS s
WHERE s.id = @id;

-- name: SetupInsertManyWithinLimit :many
-- SetupInsertManyWithinLimit does at once what SetupInsertWithinLimit does when it is run for one of the ids after the
-- other, for the same user with the same max_pending: as many of the first ids are inserted as the limit leaves room for.
-- They take the slots after the highest first, and then what is free below max_pending, from the lowest on. Each row has
-- pending_before, from before all of them, and a request that was inserted; or there is one row, with NULL, if none was.
--
-- The caller holds the lock setup_request:<user_id>, taken by a statement of its own, before this one.
-- Error 23505 on setup_requests_pending_key: a writer without the lock was there first.
--
-- Locks: waits for another transaction only where that one inserted the same slot without the lock. Index:
-- setup_requests_pending_key.
WITH pending AS MATERIALIZED (
    SELECT pg_catalog.count(*) AS taken, coalesce(pg_catalog.max(s.pending_slot), 0) AS highest
    FROM latchkey.setup_requests AS s
    WHERE s.user_id = @user_id AND s.status = 'pending'
), inserted AS (
    INSERT INTO latchkey.setup_requests (id, user_id, pending_slot, max_pending)
    SELECT
        w.id, @user_id,
        CASE
            WHEN p.highest + w.nth <= @max_pending::smallint THEN p.highest + w.nth
            ELSE latchkey.setup_free_slot(@user_id::uuid, w.nth - greatest((@max_pending::smallint) - p.highest, 0))
        END,
        @max_pending::smallint
    FROM pending AS p
    CROSS JOIN pg_catalog.unnest(@ids::uuid[]) WITH ORDINALITY AS w (id, nth)
    WHERE p.taken + w.nth <= @max_pending::smallint
    RETURNING id, user_id, status, pending_slot, max_pending, idempotency_key, created_at, ended_at, NULL::bigint AS event_id
)
SELECT
    p.taken AS pending_before,
    i.id, i.user_id, i.status, i.pending_slot, i.max_pending, i.idempotency_key, i.created_at, i.ended_at, i.event_id
FROM pending AS p
LEFT JOIN inserted AS i ON true
ORDER BY i.pending_slot
LIMIT 1 + pg_catalog.cardinality(@ids::uuid[]);

-- name: SetupInsertOnce :one
-- SetupInsertOnce is SetupInsertWithinLimit for a call with an idempotency key: the request that an earlier call
-- inserted under the same key comes back in place of a new one. To look for that costs the server a tenth of the call.
--
-- Locks: as there, and for the same idempotency key. Indexes: setup_requests_pending_key,
-- setup_requests_idempotency_key.
WITH earlier AS MATERIALIZED (
    SELECT s.id, s.user_id, s.status, s.pending_slot, s.max_pending, s.idempotency_key, s.created_at, s.ended_at
    FROM latchkey.setup_requests AS s
    WHERE s.user_id = @user_id AND s.idempotency_key = @idempotency_key::text
), pending AS MATERIALIZED (
    SELECT pg_catalog.count(*) AS taken, coalesce(pg_catalog.max(s.pending_slot), 0) AS highest
    FROM latchkey.setup_requests AS s
    WHERE s.user_id = @user_id AND s.status = 'pending'
), inserted AS (
    INSERT INTO latchkey.setup_requests (id, user_id, pending_slot, max_pending, idempotency_key)
    SELECT @id::uuid, @user_id, CASE WHEN p.highest < @max_pending::smallint THEN 1 + p.highest ELSE latchkey.setup_free_slot(@user_id, 1) END, @max_pending::smallint, @idempotency_key::text
    FROM pending AS p
    WHERE p.taken < @max_pending
        AND NOT EXISTS (SELECT FROM earlier)
    RETURNING id, user_id, status, pending_slot, max_pending, idempotency_key, created_at, ended_at,
        latchkey.outbox_insert(sqlc.narg('event')::text[]) AS event_id
), chosen AS (
    SELECT e.id, e.user_id, e.status, e.pending_slot, e.max_pending, e.idempotency_key, e.created_at, e.ended_at, NULL::bigint AS event_id FROM earlier AS e
    UNION ALL
    SELECT i.id, i.user_id, i.status, i.pending_slot, i.max_pending, i.idempotency_key, i.created_at, i.ended_at, i.event_id FROM inserted AS i
)
SELECT
    p.taken AS pending_before,
    c.id, c.user_id, c.status, c.pending_slot, c.max_pending, c.idempotency_key, c.created_at, c.ended_at, c.event_id
FROM pending AS p
LEFT JOIN chosen AS c ON true;

-- name: SetupInsertWithinLimit :one
-- SetupInsertWithinLimit inserts a pending request of the user, if fewer than max_pending are pending, into the slot
-- after the highest, or into the lowest that is free where that is above max_pending. It returns one row always:
-- pending_before, and the new request, or NULL where the limit says no.
--
-- The caller holds the lock setup_request:<user_id>, taken by a statement of its own, before this one.
-- Error 23505 on setup_requests_pending_key: a writer without the lock was there first.
--
-- Locks: waits for another transaction only where that one inserted the same slot without the lock. Index:
-- setup_requests_pending_key.
WITH pending AS MATERIALIZED (
    SELECT pg_catalog.count(*) AS taken, coalesce(pg_catalog.max(s.pending_slot), 0) AS highest
    FROM latchkey.setup_requests AS s
    WHERE s.user_id = @user_id AND s.status = 'pending'
), inserted AS (
    INSERT INTO latchkey.setup_requests (id, user_id, pending_slot, max_pending)
    SELECT @id::uuid, @user_id, CASE WHEN p.highest < @max_pending::smallint THEN 1 + p.highest ELSE latchkey.setup_free_slot(@user_id, 1) END, @max_pending::smallint
    FROM pending AS p
    WHERE p.taken < @max_pending
    RETURNING id, user_id, status, pending_slot, max_pending, idempotency_key, created_at, ended_at,
        latchkey.outbox_insert(sqlc.narg('event')::text[]) AS event_id
)
SELECT
    p.taken AS pending_before,
    i.id, i.user_id, i.status, i.pending_slot, i.max_pending, i.idempotency_key, i.created_at, i.ended_at, i.event_id
FROM pending AS p
LEFT JOIN inserted AS i ON true;

-- name: SetupListByUser :many
-- SetupListByUser returns up to max_rows requests of the user, newest first. To page, give created_at and id
-- of the last row of the page before; to start, a time that is later than any.
--
-- Locks: none. Index: setup_requests_user_id_created_at_idx.
SELECT s.id, s.user_id, s.status, s.pending_slot, s.max_pending, s.idempotency_key, s.created_at, s.ended_at
FROM latchkey.setup_requests AS s
WHERE s.user_id = @user_id AND (s.created_at, s.id) < (@before_created_at::timestamptz, @before_id::uuid)
ORDER BY s.created_at DESC, s.id DESC
LIMIT @max_rows;
