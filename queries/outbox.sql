-- name: OutboxClaim :many
-- OutboxClaim leases up to max_rows due events to worker for lease_ms milliseconds, each with a new fencing token, and
-- returns them, oldest first. Events whose attempts are used up become dead instead, and come back with dead true; they
-- count towards max_rows too. topics are those that the worker takes; empty is all.
--
-- An event can be claimed if it is ready and due, or if it is claimed and its lease has ended; and, within an aggregate,
-- if it is its turn: that of the one that is claimed, if there is one, or else of the ready one with the lowest id. What
-- an open transaction has written is not seen, so nothing waits for it. near looks at the events that have been due the
-- longest. Where so many of those must wait for others of their aggregate that near finds too few, far goes from
-- aggregate to aggregate.
--
-- Times are the server's, and a lease is counted from when its row is locked. Error 23505 on outbox_turn_key: another
-- call got the turn of the same aggregate at the same moment, with another event; nothing was changed.
--
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the chosen rows; waits for no row. Indexes: outbox_due_idx,
-- outbox_aggregate_due_idx, outbox_turn_key, outbox_pkey.
WITH RECURSIVE near AS MATERIALIZED (
    SELECT o.id
    FROM (
        (
            SELECT coalesce(d.lease_until, d.due_at) AS claimable_at, d.id
            FROM latchkey.outbox AS d
            WHERE d.ended_at IS NULL AND d.aggregate_key IS NULL
                AND coalesce(d.lease_until, d.due_at) <= pg_catalog.statement_timestamp()
                AND (pg_catalog.cardinality(@topics::text[]) = 0 OR d.topic = ANY (@topics::text[]))
            ORDER BY coalesce(d.lease_until, d.due_at), d.id
            LIMIT 500 + @max_rows::integer  -- more than other calls have locked at one moment, as a rule
        )
        UNION ALL
        (
            SELECT coalesce(d.lease_until, d.due_at) AS claimable_at, d.id
            FROM latchkey.outbox AS d
            WHERE d.ended_at IS NULL AND d.aggregate_key IS NOT NULL
                AND coalesce(d.lease_until, d.due_at) <= pg_catalog.statement_timestamp()
                AND (pg_catalog.cardinality(@topics::text[]) = 0 OR d.topic = ANY (@topics::text[]))
            ORDER BY coalesce(d.lease_until, d.due_at), d.id
            LIMIT 500 + @max_rows  -- bounds how many are looked at that must wait for their turn
        )
    ) AS due
    JOIN latchkey.outbox AS o ON o.id = due.id
    -- Judged again when the row is locked, in case that another call had it meanwhile.
    WHERE o.ended_at IS NULL
        AND coalesce(o.lease_until, o.due_at) <= pg_catalog.statement_timestamp()
        AND (o.aggregate_key IS NULL OR o.id = (
            SELECT t.id
            FROM latchkey.outbox AS t
            WHERE t.aggregate_key = o.aggregate_key AND t.aggregate_key IS NOT NULL AND t.ended_at IS NULL
            ORDER BY CASE WHEN t.state = 'claimed' THEN 0 ELSE t.id END
            LIMIT 1
        ))
    ORDER BY due.claimable_at, due.id
    LIMIT @max_rows
    FOR NO KEY UPDATE OF o SKIP LOCKED
), turns AS (
    (
        SELECT t.aggregate_key, t.id
        FROM latchkey.outbox AS t
        WHERE t.aggregate_key IS NOT NULL AND t.ended_at IS NULL
            AND (SELECT pg_catalog.count(*) FROM near) < @max_rows
            AND EXISTS (
                SELECT d.id
                FROM latchkey.outbox AS d
                WHERE d.ended_at IS NULL AND d.aggregate_key IS NOT NULL
                    AND coalesce(d.lease_until, d.due_at) <= pg_catalog.statement_timestamp()
                    AND (pg_catalog.cardinality(@topics::text[]) = 0 OR d.topic = ANY (@topics::text[]))
                ORDER BY coalesce(d.lease_until, d.due_at), d.id
                OFFSET 500 + @max_rows  -- beyond what near has looked at
            )
        ORDER BY t.aggregate_key, CASE WHEN t.state = 'claimed' THEN 0 ELSE t.id END
        LIMIT 1
    )
    UNION ALL
    SELECT n.aggregate_key, n.id
    FROM turns AS p
    CROSS JOIN LATERAL (
        SELECT t.aggregate_key, t.id
        FROM latchkey.outbox AS t
        WHERE t.aggregate_key > p.aggregate_key AND t.aggregate_key IS NOT NULL AND t.ended_at IS NULL
        ORDER BY t.aggregate_key, CASE WHEN t.state = 'claimed' THEN 0 ELSE t.id END
        LIMIT 1
    ) AS n
), far AS MATERIALIZED (
    SELECT o.id
    FROM latchkey.outbox AS o
    WHERE o.id = ANY (ARRAY(SELECT t.id FROM turns AS t))
        AND o.ended_at IS NULL
        AND coalesce(o.lease_until, o.due_at) <= pg_catalog.statement_timestamp()
        AND (pg_catalog.cardinality(@topics::text[]) = 0 OR o.topic = ANY (@topics::text[]))
        AND o.id <> ALL (ARRAY(SELECT n.id FROM near AS n))
    ORDER BY coalesce(o.lease_until, o.due_at), o.id
    LIMIT (@max_rows) - (SELECT pg_catalog.count(*) FROM near)
    FOR NO KEY UPDATE OF o SKIP LOCKED
), claimed AS (
    UPDATE latchkey.outbox AS o
    SET state = CASE WHEN o.attempts < o.max_attempts THEN 'claimed' ELSE 'dead' END,
        owner = CASE WHEN o.attempts < o.max_attempts THEN @worker::text END,
        attempts = o.attempts + CASE WHEN o.attempts < o.max_attempts THEN 1 ELSE 0 END,
        fence = o.fence + 1,
        lease_until = CASE
            WHEN o.attempts < o.max_attempts
                THEN pg_catalog.clock_timestamp() + (@lease_ms::bigint)::double precision * interval '1 millisecond'
        END,
        last_error = CASE WHEN o.state = 'claimed' THEN pg_catalog.concat('the lease of ', o.owner, ' ended') ELSE o.last_error END,
        ended_at = CASE WHEN o.attempts >= o.max_attempts THEN pg_catalog.clock_timestamp() END
    -- An array, since a plan that joins could read all of the table.
    WHERE o.id = ANY (ARRAY(SELECT n.id FROM near AS n UNION ALL SELECT f.id FROM far AS f))
    RETURNING
        o.id, o.topic, o.aggregate_key, o.payload, o.headers, o.created_at, o.attempts, o.max_attempts, o.state, o.fence, o.lease_until
)
SELECT
    c.id, c.topic, c.aggregate_key, c.payload, c.headers, c.created_at, c.attempts, c.max_attempts, c.fence, c.lease_until,
    (c.state = 'dead')::boolean AS dead
FROM claimed AS c
ORDER BY c.id;

-- name: OutboxComplete :many
-- OutboxComplete ends claims whose events have been handled, and returns the id and the token of each that it has ended.
-- ids and fences have one entry a claim, all of one worker. One that does not come back is not current any more, because
-- its lease ended or somebody has ended or redriven the event, and nothing was changed.
--
-- The clock is read when the rows are locked.
--
-- Locks: FOR NO KEY UPDATE on the rows, in the order of their ids; waits for who has them locked. Index: outbox_pkey.
WITH locked AS MATERIALIZED (
    SELECT o.id, o.lease_until
    FROM latchkey.outbox AS o
    WHERE o.id = ANY (@ids::bigint[]) AND o.state = 'claimed' AND o.owner = @worker::text
        AND ((o.id, o.fence) IN (
            SELECT claim.id, claim.fence
            FROM ROWS FROM (
                pg_catalog.unnest(@ids::bigint[]), pg_catalog.unnest(@fences::bigint[])
            ) AS claim (id, fence)
        )) IS TRUE  -- or it would be a join, whose plan may compare each with each
    ORDER BY o.id
    FOR NO KEY UPDATE OF o
), done AS (
    UPDATE latchkey.outbox AS o
    SET state = 'done', owner = NULL, lease_until = NULL, ended_at = pg_catalog.clock_timestamp()
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked AS l WHERE l.lease_until > pg_catalog.clock_timestamp()))
    RETURNING o.id, o.fence
)
SELECT d.id, d.fence
FROM done AS d
ORDER BY d.id
LIMIT pg_catalog.cardinality(@ids::bigint[]);

-- name: OutboxExtend :one
-- OutboxExtend makes the lease of a claim end lease_ms milliseconds from now, and returns when that is. No row: the
-- claim is not current any more, as in OutboxComplete.
--
-- Locks: FOR NO KEY UPDATE on the row; waits for who has it locked. Index: outbox_pkey.
WITH locked AS MATERIALIZED (
    SELECT o.id, o.lease_until
    FROM latchkey.outbox AS o
    WHERE o.id = @id AND o.state = 'claimed' AND o.owner = @worker::text AND o.fence = @fence
    FOR NO KEY UPDATE
)
UPDATE latchkey.outbox AS o
SET lease_until = pg_catalog.clock_timestamp() + (@lease_ms::bigint)::double precision * interval '1 millisecond'
WHERE o.id = (SELECT l.id FROM locked AS l WHERE l.lease_until > pg_catalog.clock_timestamp())
RETURNING (o.lease_until)::timestamptz AS lease_until;

-- name: OutboxExtendAll :many
-- OutboxExtendAll makes the leases of a worker's claims end lease_ms milliseconds from now. ids and fences have one entry
-- a claim. It returns the id and the token of those that are current, and whether each was extended: not if somebody has its
-- row locked, so that one row does not cost the others their leases; try it again then. One that does not come back is not
-- current any more, as in OutboxComplete.
--
-- Locks: FOR NO KEY UPDATE SKIP LOCKED on the rows; waits for none. Index: outbox_pkey.
WITH locked AS MATERIALIZED (
    SELECT o.id, o.lease_until
    FROM latchkey.outbox AS o
    WHERE o.id = ANY (@ids::bigint[]) AND o.state = 'claimed' AND o.owner = @worker::text
        AND ((o.id, o.fence) IN (
            SELECT claim.id, claim.fence
            FROM ROWS FROM (
                pg_catalog.unnest(@ids::bigint[]), pg_catalog.unnest(@fences::bigint[])
            ) AS claim (id, fence)
        )) IS TRUE  -- or it would be a join, whose plan may compare each with each
    ORDER BY o.id
    FOR NO KEY UPDATE OF o SKIP LOCKED
), extended AS (
    UPDATE latchkey.outbox AS o
    SET lease_until = pg_catalog.clock_timestamp() + (@lease_ms::bigint)::double precision * interval '1 millisecond'
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked AS l WHERE l.lease_until > pg_catalog.clock_timestamp()))
    RETURNING o.id
)
SELECT o.id, o.fence, (o.id IN (SELECT e.id FROM extended AS e))::boolean AS extended
FROM latchkey.outbox AS o
WHERE o.id = ANY (@ids::bigint[]) AND o.state = 'claimed' AND o.owner = @worker::text
    AND ((o.id, o.fence) IN (
        SELECT claim.id, claim.fence
        FROM ROWS FROM (
            pg_catalog.unnest(@ids::bigint[]), pg_catalog.unnest(@fences::bigint[])
        ) AS claim (id, fence)
    )) IS TRUE
    AND o.lease_until > pg_catalog.statement_timestamp()
ORDER BY o.id
LIMIT pg_catalog.cardinality(@ids::bigint[]);

-- name: OutboxInsert :one
-- OutboxInsert writes an event that is due at once, and returns its id. event is that of latchkey.outbox_insert.
--
-- Locks: none that anything else waits for.
SELECT latchkey.outbox_insert(@event::text[]) AS id;

-- name: OutboxListDead :many
-- OutboxListDead returns up to max_rows dead events, the one that died last first. To page, give ended_at and id of the
-- last row of the page before; to start, a time that is later than any.
--
-- Locks: none. Index: outbox_ended_idx.
SELECT o.id, o.topic, o.aggregate_key, o.payload, o.headers, o.created_at, o.attempts, o.max_attempts, o.last_error, (o.ended_at)::timestamptz AS ended_at
FROM latchkey.outbox AS o
WHERE o.state = 'dead' AND o.ended_at IS NOT NULL AND (o.ended_at, o.id) < (@before_ended_at::timestamptz, @before_id::bigint)
ORDER BY o.ended_at DESC, o.id DESC
LIMIT @max_rows;

-- name: OutboxListen :exec
-- OutboxListen has the session notified when events are committed, if the host has enabled the trigger outbox_notify.
-- It lasts as long as the session, so it is for a connection of its own, and never for one of a pool.
--
-- Locks: none.
LISTEN latchkey_outbox;

-- name: OutboxPreferIndexes :exec
-- OutboxPreferIndexes makes the planner walk along indexes for the rest of the transaction. What it knows of a queue is
-- old: a plan that was good for an empty one reads and sorts all that has piled up since, for each claim. With these
-- settings a plan looks so expensive that it would be compiled, so jit is off too.
--
-- Goes before OutboxClaim and OutboxPurge.
--
-- Locks: none. All settings are local to the transaction.
SELECT
    pg_catalog.set_config('enable_seqscan', 'off', true),
    pg_catalog.set_config('enable_bitmapscan', 'off', true),
    pg_catalog.set_config('enable_sort', 'off', true),
    pg_catalog.set_config('enable_hashjoin', 'off', true),
    pg_catalog.set_config('enable_mergejoin', 'off', true),
    pg_catalog.set_config('jit', 'off', true);

-- name: OutboxPurge :execrows
-- OutboxPurge deletes up to max_rows events that were done more than older_ms milliseconds ago, the oldest first, and
-- returns how many. Dead ones stay.
--
-- Locks: FOR UPDATE SKIP LOCKED on the rows, so several calls at once share the work; waits for none.
-- Indexes: outbox_ended_idx, outbox_pkey.
WITH old AS MATERIALIZED (
    SELECT o.id
    FROM latchkey.outbox AS o
    WHERE o.state = 'done' AND o.ended_at IS NOT NULL
        AND o.ended_at < pg_catalog.statement_timestamp() - (@older_ms::bigint)::double precision * interval '1 millisecond'
    ORDER BY o.ended_at, o.id
    LIMIT @max_rows
    FOR UPDATE SKIP LOCKED
)
DELETE FROM latchkey.outbox AS o
WHERE o.id = ANY (ARRAY(SELECT old.id FROM old));

-- name: OutboxRedrive :execrows
-- OutboxRedrive makes a dead event ready again, due at once, with all of its attempts before it; its id, fence and
-- last_error stay. No row: it is not dead, or there is none.
--
-- Locks: the row, FOR NO KEY UPDATE. Index: outbox_pkey.
UPDATE latchkey.outbox AS o
SET state = 'ready', attempts = 0, due_at = pg_catalog.clock_timestamp(), ended_at = NULL
WHERE o.id = @id AND o.state = 'dead';

-- name: OutboxRelease :many
-- OutboxRelease gives back claims whose events nobody has begun to handle, and returns the id and the token of each that
-- it has given back: the event is due as before, and without the attempt. ids and fences have one entry a claim, all of one
-- worker. One that does not come back is not current any more, as in OutboxComplete.
--
-- Locks: FOR NO KEY UPDATE on the rows, in the order of their ids; waits for who has them locked. Index: outbox_pkey.
WITH locked AS MATERIALIZED (
    SELECT o.id, o.lease_until
    FROM latchkey.outbox AS o
    WHERE o.id = ANY (@ids::bigint[]) AND o.state = 'claimed' AND o.owner = @worker::text
        AND ((o.id, o.fence) IN (
            SELECT claim.id, claim.fence
            FROM ROWS FROM (
                pg_catalog.unnest(@ids::bigint[]), pg_catalog.unnest(@fences::bigint[])
            ) AS claim (id, fence)
        )) IS TRUE  -- or it would be a join, whose plan may compare each with each
    ORDER BY o.id
    FOR NO KEY UPDATE OF o
), released AS (
    UPDATE latchkey.outbox AS o
    SET state = 'ready', owner = NULL, lease_until = NULL, attempts = o.attempts - 1
    WHERE o.id = ANY (ARRAY(SELECT l.id FROM locked AS l WHERE l.lease_until > pg_catalog.clock_timestamp()))
    RETURNING o.id, o.fence
)
SELECT r.id, r.fence
FROM released AS r
ORDER BY r.id
LIMIT pg_catalog.cardinality(@ids::bigint[]);

-- name: OutboxRetry :one
-- OutboxRetry ends a claim whose event could not be handled: the event is ready again, due after_ms milliseconds from
-- now, or dead if that was its last attempt or the failure is permanent. It returns which. No row: the claim is not
-- current any more, as in OutboxComplete.
--
-- Without after_ms the wait is half to all, by chance, of one second doubled with each attempt, up to an hour.
--
-- Locks: FOR NO KEY UPDATE on the row; waits for who has it locked. Index: outbox_pkey.
WITH locked AS MATERIALIZED (
    SELECT o.id, o.lease_until
    FROM latchkey.outbox AS o
    WHERE o.id = @id AND o.state = 'claimed' AND o.owner = @worker::text AND o.fence = @fence
    FOR NO KEY UPDATE
)
UPDATE latchkey.outbox AS o
SET state = CASE WHEN o.attempts < o.max_attempts AND NOT @permanent::boolean THEN 'ready' ELSE 'dead' END,
    owner = NULL,
    lease_until = NULL,
    due_at = pg_catalog.clock_timestamp() + coalesce(
        (sqlc.narg('after_ms')::bigint)::double precision,
        -- 2 to the power of 12 is more seconds than an hour has; that of 1024 would overflow.
        1000::double precision
            * least(3600::double precision, pg_catalog.power(2::double precision, least(o.attempts - 1, 12)::double precision))
            * (1::double precision + pg_catalog.random()) / 2::double precision
    ) * interval '1 millisecond',
    last_error = sqlc.narg('last_error')::text,
    ended_at = CASE WHEN o.attempts >= o.max_attempts OR @permanent THEN pg_catalog.clock_timestamp() END
WHERE o.id = (SELECT l.id FROM locked AS l WHERE l.lease_until > pg_catalog.clock_timestamp())
RETURNING (o.state = 'dead')::boolean AS dead;
