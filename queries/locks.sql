-- name: LockAll :exec
-- LockAll takes the transaction locks of all keys, waiting for each that is held. Then it puts
-- statement_timeout back to what TxSetLockBudget found, and takes what it has waited off lock_timeout, which is the
-- budget until then, so that the rest of it bounds the row locks of the statements that follow. A wait of less than
-- the 1 ms that lock_timeout counts in is not worth the arithmetic.
--
-- keys, exclusive and ranks have one entry a lock, in any order; a key named twice is taken once, and exclusive
-- wins. Error 55P03 or 57014: the budget ran out; what was taken is freed with the transaction or savepoint.
--
-- Locks: advisory, in the order of rank and signed key, so that calls over several keys never deadlock with each
-- other. The function stands outside the sub-query that sorts; inside it, it could run before the sort.
-- Reads no table: only the next statement's snapshot shows what an earlier holder committed.
SELECT
    pg_catalog.count(taken.lock),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('latchkey.statement_timeout'), true),
    CASE
        WHEN pg_catalog.clock_timestamp() >= pg_catalog.statement_timestamp() + interval '1 ms'
            THEN pg_catalog.set_config('lock_timeout', greatest(1::bigint, (1000::double precision * pg_catalog.date_part('epoch',
                pg_catalog.current_setting('lock_timeout')::interval - (pg_catalog.clock_timestamp() - pg_catalog.statement_timestamp())
            ))::bigint)::text, true)
    END
FROM (
    SELECT
        CASE
            WHEN wanted.exclusive THEN pg_catalog.pg_advisory_xact_lock(wanted.key)
            ELSE pg_catalog.pg_advisory_xact_lock_shared(wanted.key)
        END AS lock
    FROM (
        SELECT named.key, pg_catalog.bool_or(named.exclusive) AS exclusive
        FROM ROWS FROM (
            pg_catalog.unnest(@keys::bigint[]), pg_catalog.unnest(@exclusive::boolean[]), pg_catalog.unnest(@ranks::integer[])
        ) AS named (key, exclusive, rank)
        GROUP BY named.rank, named.key
        ORDER BY named.rank, named.key
    ) AS wanted
) AS taken;

-- name: LockListHeld :many
-- LockListHeld returns the advisory locks that this transaction holds, in the order of the signed key. It is for
-- the check of the lock order: what is held is asked of the server, since a rollback to a savepoint frees locks.
--
-- Locks: none of its own; reading pg_locks stops the server's lock table for a moment.
SELECT
    ((l.classid::bigint << 32) | l.objid::bigint)::bigint AS key,
    (l.mode = 'ExclusiveLock')::boolean AS exclusive
FROM pg_catalog.pg_locks AS l
WHERE l.locktype = 'advisory'
    AND l.objsubid = 1  -- the form with one bigint
    AND l.pid = pg_catalog.pg_backend_pid()
    AND l.granted
ORDER BY 1, 2
LIMIT @max_rows;

-- name: LockOne :exec
-- LockOne is LockAll for one exclusive key, which is what nearly every call takes. It does the same, but with no
-- arrays to unpack, group and sort it costs the server a quarter.
--
-- Locks: advisory. The select list is evaluated from left to right: the lock first, and what was waited for it after
-- that. Reads no table: only the next statement's snapshot shows what an earlier holder committed.
SELECT
    pg_catalog.pg_advisory_xact_lock(@key),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('latchkey.statement_timeout'), true),
    CASE
        WHEN pg_catalog.clock_timestamp() >= pg_catalog.statement_timestamp() + interval '1 ms'
            THEN pg_catalog.set_config('lock_timeout', greatest(1::bigint, (1000::double precision * pg_catalog.date_part('epoch',
                pg_catalog.current_setting('lock_timeout')::interval - (pg_catalog.clock_timestamp() - pg_catalog.statement_timestamp())
            ))::bigint)::text, true)
    END;

-- name: LockOneAtOnce :exec
-- LockOneAtOnce is TxSetLockBudget and LockOne in one statement, for a call that goes to the server in one write and so
-- needs no BEGIN: the server begins a transaction with the first statement of a write and commits it after the last.
-- Such a transaction has the defaults of the session. So this raises 25000, before it waits for anything, where they
-- are not READ COMMITTED, no statement_timeout and, from PostgreSQL 17 on, no transaction_timeout.
--
-- Locks: advisory. The select list is evaluated from left to right. Reads no table: only the next statement's snapshot
-- shows what an earlier holder committed. The setting is local to the transaction.
SELECT
    CASE
        WHEN pg_catalog.current_setting('transaction_isolation') <> 'read committed'
            OR pg_catalog.current_setting('statement_timeout') <> '0'
            OR pg_catalog.current_setting('transaction_timeout', true) <> '0'  -- NULL before PostgreSQL 17
            THEN latchkey.raise_error('25000', 'session has defaults of its own')
    END,
    pg_catalog.set_config('lock_timeout', (@lock_timeout_ms::bigint)::text, true),
    pg_catalog.pg_advisory_xact_lock(@key),
    CASE
        WHEN pg_catalog.clock_timestamp() >= pg_catalog.statement_timestamp() + interval '1 ms'
            THEN pg_catalog.set_config('lock_timeout', greatest(1::bigint, (1000::double precision * pg_catalog.date_part('epoch',
                pg_catalog.current_setting('lock_timeout')::interval - (pg_catalog.clock_timestamp() - pg_catalog.statement_timestamp())
            ))::bigint)::text, true)
    END;

-- name: LockTryAll :exec
-- LockTryAll takes the transaction locks of all keys if none is held by another session, and raises 55P03
-- otherwise. Then it puts statement_timeout back to what TxSetLockBudget found, and leaves lock_timeout at
-- 1 ms, so that the statements that follow do not wait for a row lock either.
--
-- keys, exclusive and ranks are those of LockAll. A shared lock is refused also while an exclusive one is waited for.
--
-- Locks: advisory, in the order of rank and signed key; never waits. Reads no table.
SELECT
    pg_catalog.count(CASE WHEN taken.got THEN true ELSE latchkey.raise_error('55P03', 'advisory lock is held') END),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('latchkey.statement_timeout'), true),
    pg_catalog.set_config('lock_timeout', '1', true)  -- milliseconds; 0 would be for ever
FROM (
    SELECT
        CASE
            WHEN wanted.exclusive THEN pg_catalog.pg_try_advisory_xact_lock(wanted.key)
            ELSE pg_catalog.pg_try_advisory_xact_lock_shared(wanted.key)
        END AS got
    FROM (
        SELECT named.key, pg_catalog.bool_or(named.exclusive) AS exclusive
        FROM ROWS FROM (
            pg_catalog.unnest(@keys::bigint[]), pg_catalog.unnest(@exclusive::boolean[]), pg_catalog.unnest(@ranks::integer[])
        ) AS named (key, exclusive, rank)
        GROUP BY named.rank, named.key
        ORDER BY named.rank, named.key
    ) AS wanted
) AS taken;

-- name: TxRenewLockBudget :exec
-- TxRenewLockBudget bounds the next statement anew, as TxSetLockBudget does, where time has passed since that.
--
-- Locks: none. All settings are local to the transaction.
SELECT
    pg_catalog.set_config('lock_timeout', (@lock_timeout_ms::bigint)::text, true),
    pg_catalog.set_config('statement_timeout', (20::bigint + @budget_ms::bigint)::text, true);

-- name: TxRequireReadCommitted :exec
-- TxRequireReadCommitted raises 25000 unless the transaction is READ COMMITTED and may write. At any other
-- level the statement after the lock would not see what the last holder committed. On a standby it raises 25006.
--
-- Locks: none.
SELECT
    CASE
        WHEN pg_catalog.current_setting('transaction_isolation') = 'read committed'
            AND pg_catalog.current_setting('transaction_read_only') = 'off' THEN true
        WHEN pg_catalog.pg_is_in_recovery() THEN latchkey.raise_error('25006', 'server is a standby')
        ELSE latchkey.raise_error('25000', 'transaction is not READ COMMITTED, READ WRITE')
    END;

-- name: TxRestoreTimeouts :exec
-- TxRestoreTimeouts puts lock_timeout and statement_timeout back to what TxSetLockBudget found, for the rest
-- of a transaction that somebody else began.
--
-- Locks: none.
SELECT
    pg_catalog.set_config('lock_timeout', pg_catalog.current_setting('latchkey.lock_timeout'), true),
    pg_catalog.set_config('statement_timeout', pg_catalog.current_setting('latchkey.statement_timeout'), true);

-- name: TxSetHoldTimeout :exec
-- TxSetHoldTimeout ends the session if the transaction then sends nothing for hold_ms milliseconds, so that a
-- client that hangs does not keep its locks. A setting of the role's or the database's own stays.
--
-- Locks: none. The setting is local to the transaction.
SELECT
    CASE
        WHEN pg_catalog.current_setting('idle_in_transaction_session_timeout') = '0'
            THEN pg_catalog.set_config('idle_in_transaction_session_timeout', (@hold_ms::bigint)::text, true)
    END;

-- name: TxSetLockBudget :exec
-- TxSetLockBudget bounds the next statement, LockOne, LockAll or LockTryAll, to budget_ms milliseconds, and to
-- lock_timeout_ms for each lock: as many, or 1 for a try. lock_timeout counts anew for each key, so
-- statement_timeout bounds them all; it is a little longer, so that the wait for a single key ends as 55P03, which
-- says what it was. It is a statement of its own because the server starts the clock of statement_timeout before it
-- runs a statement. What statement_timeout was is kept in a setting of the transaction; what lock_timeout was too, if
-- the transaction is somebody else's and goes on. In one of latchkey's own, transaction_timeout is off: it would not
-- end the wait but the session. On a standby it raises 25006: an advisory lock can be had there too, but not that of the
-- primary.
--
-- Locks: none. All settings are local to the transaction; each is kept before it is changed, from left to right.
SELECT
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN latchkey.raise_error('25006', 'server is a standby') END,
    CASE
        WHEN NOT @own_transaction::boolean
            THEN pg_catalog.set_config('latchkey.lock_timeout', pg_catalog.current_setting('lock_timeout'), true)
    END,
    pg_catalog.set_config('latchkey.statement_timeout', pg_catalog.current_setting('statement_timeout'), true),
    pg_catalog.set_config('lock_timeout', (@lock_timeout_ms::bigint)::text, true),
    pg_catalog.set_config('statement_timeout', (20::bigint + @budget_ms::bigint)::text, true),
    CASE
        WHEN @own_transaction::boolean AND pg_catalog.current_setting('transaction_timeout', true) <> '0'  -- NULL before PostgreSQL 17
            THEN pg_catalog.set_config('transaction_timeout', '0', true)
    END;
