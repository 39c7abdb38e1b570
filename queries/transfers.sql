-- name: TransferInsert :one
-- TransferInsert moves amount from one account to another, if that much is there, the daily limit of the first
-- allows it, and the balance of the second would not pass the largest bigint, and inserts the transfer with its
-- two entries. It returns one row always: whether each account was found, whether the limit allows it, the limit,
-- spent_before, whether the second account has room, and the new transfer, or what an earlier call inserted in
-- from_account_id under the same idempotency key, or NULL where it is refused. If that earlier one was no
-- transfer, kind says what it was, and there is no id.
--
-- spent_before is that of EntryInsertWithdrawal.
--
-- The caller holds the locks account:<from_account_id> and account:<to_account_id>, taken by a statement of its
-- own, before this one, so that the clock is read when the wait is over. Error 23505 on entries_idempotency_key:
-- a writer without the lock was there first.
--
-- Locks: the rows of both accounts, FOR NO KEY UPDATE, from_account_id first; waits only for writers without the
-- advisory locks. Indexes: accounts_pkey, transfers_pkey, entries_outgoing_idx, entries_idempotency_key.
WITH clock AS MATERIALIZED (
    SELECT pg_catalog.clock_timestamp() AS now
), earlier AS MATERIALIZED (
    SELECT e.kind, t.id, t.from_account_id, t.to_account_id, t.amount, t.created_at
    FROM latchkey.entries AS e
    LEFT JOIN latchkey.transfers AS t ON t.id = e.transfer_id
    WHERE e.account_id = @from_account_id AND e.idempotency_key = sqlc.narg('idempotency_key')::text
), sender AS MATERIALIZED (
    SELECT a.id, a.daily_limit, today.spent, a.daily_limit = 0 OR today.spent + (@amount::bigint)::numeric <= a.daily_limit::numeric AS allowed
    FROM latchkey.accounts AS a
    CROSS JOIN clock AS t
    CROSS JOIN LATERAL (
        SELECT coalesce(pg_catalog.sum(e.amount), 0) AS spent
        FROM latchkey.entries AS e
        WHERE e.account_id = a.id
            AND a.daily_limit > 0
            AND e.kind IN ('withdrawal', 'transfer_out')
            -- For the index alone; see EntryInsertWithdrawal.
            AND e.created_at > t.now - interval '48 hours'
            AND (e.created_at AT TIME ZONE a.time_zone)::date = (t.now AT TIME ZONE a.time_zone)::date
    ) AS today
    WHERE a.id = @from_account_id
), receiver AS MATERIALIZED (
    SELECT a.id, a.balance <= 9223372036854775807 - @amount AS room  -- the largest bigint
    FROM latchkey.accounts AS a
    WHERE a.id = @to_account_id
), debited AS (
    UPDATE latchkey.accounts AS a
    SET balance = a.balance - @amount
    WHERE a.id = @from_account_id
        AND a.balance >= @amount
        AND (SELECT s.allowed FROM sender AS s)
        AND (SELECT r.room FROM receiver AS r)
        AND NOT EXISTS (SELECT FROM earlier)
    RETURNING a.id, a.balance
), credited AS (
    UPDATE latchkey.accounts AS a
    SET balance = a.balance + @amount
    FROM debited AS d
    WHERE a.id = @to_account_id
    RETURNING a.id, a.balance
), inserted AS (
    INSERT INTO latchkey.transfers (id, from_account_id, to_account_id, amount, created_at)
    SELECT @id::uuid, d.id, c.id, @amount, t.now
    FROM debited AS d
    CROSS JOIN credited AS c
    CROSS JOIN clock AS t
    RETURNING id, from_account_id, to_account_id, amount, created_at
), entered AS (
    INSERT INTO latchkey.entries (id, account_id, kind, amount, balance_after, transfer_id, idempotency_key, created_at)
    SELECT @from_entry_id::uuid, d.id, 'transfer_out', i.amount, d.balance, i.id, sqlc.narg('idempotency_key')::text, i.created_at
    FROM inserted AS i
    CROSS JOIN debited AS d
    UNION ALL
    SELECT @to_entry_id::uuid, c.id, 'transfer_in', i.amount, c.balance, i.id, NULL, i.created_at
    FROM inserted AS i
    CROSS JOIN credited AS c
), chosen AS (
    SELECT e.kind, e.id, e.from_account_id, e.to_account_id, e.amount, e.created_at, NULL::bigint AS event_id FROM earlier AS e
    UNION ALL
    SELECT 'transfer_out' AS kind, i.id, i.from_account_id, i.to_account_id, i.amount, i.created_at,
        latchkey.outbox_insert(sqlc.narg('event')::text[]) AS event_id
    FROM inserted AS i
)
SELECT
    (s.id IS NOT NULL)::boolean AS from_found,
    (r.id IS NOT NULL)::boolean AS to_found,
    coalesce(s.allowed, false)::boolean AS allowed,
    coalesce(s.daily_limit, 0)::bigint AS daily_limit,
    coalesce(least(s.spent, 9223372036854775807), 0)::bigint AS spent_before,  -- the largest bigint
    coalesce(r.room, false)::boolean AS room,
    c.kind, c.id, c.from_account_id, c.to_account_id, c.amount, c.created_at, c.event_id
FROM clock AS t
LEFT JOIN sender AS s ON true
LEFT JOIN receiver AS r ON true
LEFT JOIN chosen AS c ON true;
