-- name: EntryInsertDeposit :one
-- EntryInsertDeposit adds amount to the balance of the account, unless that would pass the largest bigint, and
-- inserts the entry that says so. It returns one row always: whether the account was found, and the new entry,
-- or the entry that an earlier call inserted under the same idempotency key, or NULL where it is refused.
--
-- The caller holds the lock account:<account_id>, taken by a statement of its own, before this one.
-- Error 23505 on entries_idempotency_key: a writer without the lock was there first.
--
-- Locks: the account's row, FOR NO KEY UPDATE; waits only for writers without the advisory lock.
-- Indexes: accounts_pkey, entries_idempotency_key.
WITH earlier AS MATERIALIZED (
    SELECT e.id, e.account_id, e.kind, e.amount, e.balance_after, e.transfer_id, e.idempotency_key, e.created_at
    FROM latchkey.entries AS e
    WHERE e.account_id = @account_id AND e.idempotency_key = sqlc.narg('idempotency_key')::text
), credited AS (
    UPDATE latchkey.accounts AS a
    SET balance = a.balance + @amount::bigint
    WHERE a.id = @account_id
        AND a.balance <= 9223372036854775807 - @amount  -- the largest bigint
        AND NOT EXISTS (SELECT FROM earlier)
    RETURNING a.id, a.balance
), inserted AS (
    INSERT INTO latchkey.entries (id, account_id, kind, amount, balance_after, idempotency_key)
    SELECT @id::uuid, c.id, 'deposit', @amount, c.balance, sqlc.narg('idempotency_key')::text
    FROM credited AS c
    RETURNING id, account_id, kind, amount, balance_after, transfer_id, idempotency_key, created_at
), chosen AS (
    SELECT e.id, e.account_id, e.kind, e.amount, e.balance_after, e.transfer_id, e.idempotency_key, e.created_at, NULL::bigint AS event_id FROM earlier AS e
    UNION ALL
    SELECT i.id, i.account_id, i.kind, i.amount, i.balance_after, i.transfer_id, i.idempotency_key, i.created_at,
        latchkey.outbox_insert(sqlc.narg('event')::text[]) AS event_id
    FROM inserted AS i
)
SELECT
    f.found,
    c.id, c.account_id, c.kind, c.amount, c.balance_after, c.transfer_id, c.idempotency_key, c.created_at, c.event_id
FROM (SELECT EXISTS (SELECT FROM latchkey.accounts AS a WHERE a.id = @account_id) AS found) AS f
LEFT JOIN chosen AS c ON true;

-- name: EntryInsertWithdrawal :one
-- EntryInsertWithdrawal takes amount from the balance of the account, if that much is there and the account's
-- daily limit allows it, and inserts the entry that says so. It returns one row always: whether the account was
-- found, whether the limit allows it, the limit, spent_before, and the new entry, or the entry that an earlier
-- call inserted under the same idempotency key, or NULL where it is refused.
--
-- spent_before is what had left the account, by withdrawals and transfers, on the calendar day that it now is in
-- the account's time zone, by the server's clock; the session's time zone plays no part. It is a numeric in the
-- comparison; what comes back is the largest bigint if it is more, and 0 if there is no limit.
--
-- The caller holds the lock account:<account_id>, taken by a statement of its own, before this one, so that the
-- clock is read when the wait is over. Error 23505 on entries_idempotency_key: a writer without the lock was
-- there first.
--
-- Locks: the account's row, FOR NO KEY UPDATE; waits only for writers without the advisory lock.
-- Indexes: accounts_pkey, entries_outgoing_idx, entries_idempotency_key.
WITH clock AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS now
), earlier AS MATERIALIZED (
    SELECT e.id, e.account_id, e.kind, e.amount, e.balance_after, e.transfer_id, e.idempotency_key, e.created_at
    FROM latchkey.entries AS e
    WHERE e.account_id = @account_id AND e.idempotency_key = sqlc.narg('idempotency_key')::text
), account AS MATERIALIZED (
    SELECT a.id, a.daily_limit, today.spent, a.daily_limit = 0 OR today.spent + (@amount::bigint)::numeric <= a.daily_limit::numeric AS allowed
    FROM latchkey.accounts AS a
    CROSS JOIN clock AS t
    CROSS JOIN LATERAL (
        SELECT coalesce(pg_catalog.sum(e.amount), 0) AS spent
        FROM latchkey.entries AS e
        WHERE e.account_id = a.id
            AND a.daily_limit > 0
            AND e.kind IN ('withdrawal', 'transfer_out')
            -- No calendar day is longer, so this is for the index alone. The day cannot be told by when it began:
            -- where clocks go back over midnight there are two such times.
            AND e.created_at > t.now - interval '48 hours'
            AND (e.created_at AT TIME ZONE a.time_zone)::date = (t.now AT TIME ZONE a.time_zone)::date
    ) AS today
    WHERE a.id = @account_id
), debited AS (
    UPDATE latchkey.accounts AS a
    SET balance = a.balance - @amount
    WHERE a.id = @account_id
        AND a.balance >= @amount
        AND (SELECT f.allowed FROM account AS f)
        AND NOT EXISTS (SELECT FROM earlier)
    RETURNING a.id, a.balance
), inserted AS (
    INSERT INTO latchkey.entries (id, account_id, kind, amount, balance_after, idempotency_key, created_at)
    SELECT @id::uuid, d.id, 'withdrawal', @amount, d.balance, sqlc.narg('idempotency_key')::text, t.now
    FROM debited AS d
    CROSS JOIN clock AS t
    RETURNING id, account_id, kind, amount, balance_after, transfer_id, idempotency_key, created_at
), chosen AS (
    SELECT e.id, e.account_id, e.kind, e.amount, e.balance_after, e.transfer_id, e.idempotency_key, e.created_at, NULL::bigint AS event_id FROM earlier AS e
    UNION ALL
    SELECT i.id, i.account_id, i.kind, i.amount, i.balance_after, i.transfer_id, i.idempotency_key, i.created_at,
        latchkey.outbox_insert(sqlc.narg('event')::text[]) AS event_id
    FROM inserted AS i
)
SELECT
    (f.id IS NOT NULL)::boolean AS found,
    coalesce(f.allowed, false)::boolean AS allowed,
    coalesce(f.daily_limit, 0)::bigint AS daily_limit,
    coalesce(least(f.spent, 9223372036854775807), 0)::bigint AS spent_before,  -- the largest bigint
    c.id, c.account_id, c.kind, c.amount, c.balance_after, c.transfer_id, c.idempotency_key, c.created_at, c.event_id
FROM clock AS t
LEFT JOIN account AS f ON true
LEFT JOIN chosen AS c ON true;

-- name: EntryListByAccount :many
-- EntryListByAccount returns up to max_rows entries of the account, newest first. To page, give created_at and
-- id of the last row of the page before; to start, a time that is later than any.
--
-- Locks: none. Index: entries_account_id_created_at_idx.
SELECT e.id, e.account_id, e.kind, e.amount, e.balance_after, e.transfer_id, e.idempotency_key, e.created_at
FROM latchkey.entries AS e
WHERE e.account_id = @account_id AND (e.created_at, e.id) < (@before_created_at::timestamptz, @before_id::uuid)
ORDER BY e.created_at DESC, e.id DESC
LIMIT @max_rows;
