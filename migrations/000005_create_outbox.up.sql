-- Creates the outbox: what must be done outside of the database because of a transaction, written in that transaction,
-- and done later by a worker that owns the event for a while.
--
-- An event is ready, then claimed by a worker until its lease ends, then done, or dead when its attempts are used up.
-- A claim that ran out is claimed anew by whoever comes; there is no state for it. Each claim raises fence, which
-- nothing ever lowers: a worker that comes back late is told apart by it.
--
-- Within an aggregate, ids are drawn in the order of commits, if whoever writes its events holds one lock from before
-- the id is drawn until the transaction ends. The sequence must hand them out one by one for that, so it has no cache.
--
-- Locks: none that anything else waits for; new objects only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000005_create_outbox.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

-- A function, and not the CHECK itself: PostgreSQL reads the text of a CHECK anew for every statement that writes, and
-- this one would be a third of the cost of an event. A function's is read once per session.
CREATE FUNCTION latchkey.outbox_is_possible(
    topic text, aggregate_key text, state text, owner text, lease_until timestamptz, ended_at timestamptz,
    attempts integer, max_attempts integer, fence bigint
) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
AS $$
BEGIN
    RETURN (
            state = 'ready' AND owner IS NULL AND lease_until IS NULL AND ended_at IS NULL
            OR state = 'claimed' AND owner IS NOT NULL AND lease_until IS NOT NULL AND ended_at IS NULL AND attempts > 0
            OR state IN ('done', 'dead') AND owner IS NULL AND lease_until IS NULL AND ended_at IS NOT NULL
        )
        -- attempts may be above max_attempts, which an operator may lower at any time.
        AND attempts BETWEEN 0 AND fence AND max_attempts > 0
        AND pg_catalog.octet_length(topic) BETWEEN 1 AND 255
        AND (aggregate_key IS NULL OR pg_catalog.octet_length(aggregate_key) BETWEEN 1 AND 255)
        AND (owner IS NULL OR pg_catalog.octet_length(owner) BETWEEN 1 AND 255);
END;
$$;

COMMENT ON FUNCTION latchkey.outbox_is_possible(text, text, text, text, timestamptz, timestamptz, integer, integer, bigint) IS
    'The CHECK of latchkey.outbox: state, owner, lease, token and end fit together, and no text is too long.';

CREATE TABLE latchkey.outbox (
    id bigint GENERATED ALWAYS AS IDENTITY (CACHE 1),
    topic text NOT NULL,
    -- Compared byte by byte: the index that keeps the order must not depend on the operating system's collations.
    aggregate_key text COLLATE "C",
    payload jsonb NOT NULL,
    headers jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    due_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    attempts integer NOT NULL DEFAULT 0,
    max_attempts integer NOT NULL DEFAULT 25,
    state text NOT NULL DEFAULT 'ready',
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    lease_until timestamptz,
    last_error text,
    ended_at timestamptz,
    CONSTRAINT outbox_pkey PRIMARY KEY (id),
    CONSTRAINT outbox_state_check CHECK (
        latchkey.outbox_is_possible(topic, aggregate_key, state, owner, lease_until, ended_at, attempts, max_attempts, fence)
    )
) WITH (
    -- Every event is rewritten two times and more; with room beside it, that stays on its page, so that fewer pages
    -- are written.
    fillfactor = 60,
    -- Dead rows grow with what passes through, not with what is kept, so a share of the table says little.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 1000,
    -- To cut off the empty end of a table takes ACCESS EXCLUSIVE, for which workers would wait, and on a standby every
    -- reader; the next events fill it again.
    vacuum_truncate = off,
    toast.vacuum_truncate = off
);

COMMENT ON TABLE latchkey.outbox IS 'Events to be handled outside of the database, at least once each.';
COMMENT ON COLUMN latchkey.outbox.id IS 'Stable for the life of the event, also over a redrive; within an aggregate it is the order.';
COMMENT ON COLUMN latchkey.outbox.topic IS 'What kind of event it is, for workers that take some kinds only. At most 255 bytes.';
COMMENT ON COLUMN latchkey.outbox.aggregate_key IS
    'Events of one key are handled one at a time, in the order of their ids; those without a key have no order. At most 255 bytes.';
COMMENT ON COLUMN latchkey.outbox.payload IS 'What the handler needs; JSON''s null if nothing. Latchkey writes at most 1 MiB of text.';
COMMENT ON COLUMN latchkey.outbox.headers IS 'An object of strings for what carries the event, such as a trace.';
COMMENT ON COLUMN latchkey.outbox.created_at IS 'When the row was written, by the server''s clock.';
COMMENT ON COLUMN latchkey.outbox.due_at IS 'Not to be claimed before; by the server''s clock.';
COMMENT ON COLUMN latchkey.outbox.attempts IS 'How often it was claimed since it was written or redriven; counted at the claim, so that a crash counts.';
COMMENT ON COLUMN latchkey.outbox.max_attempts IS 'How many attempts it has. It may be changed at any time.';
COMMENT ON COLUMN latchkey.outbox.state IS 'ready, claimed, done or dead. Claimed with lease_until in the past is free to be claimed again.';
COMMENT ON COLUMN latchkey.outbox.owner IS 'The worker that claimed it; NULL if none has. At most 255 bytes.';
COMMENT ON COLUMN latchkey.outbox.fence IS 'The fencing token: how often it was claimed in all. It only rises.';
COMMENT ON COLUMN latchkey.outbox.lease_until IS 'When the claim ends, by the server''s clock; NULL if there is none.';
COMMENT ON COLUMN latchkey.outbox.last_error IS 'Why the last attempt that failed did; NULL if none has.';
COMMENT ON COLUMN latchkey.outbox.ended_at IS 'When it was done or dead, by the server''s clock; NULL while it is ready or claimed.';

CREATE INDEX outbox_due_idx
    ON latchkey.outbox ((coalesce(lease_until, due_at)), id)
    WHERE ended_at IS NULL AND aggregate_key IS NULL;
COMMENT ON INDEX latchkey.outbox_due_idx IS
    'Events without an order, by when they can be claimed: when they are due, or when the claim ends; serves OutboxClaim.';

CREATE INDEX outbox_aggregate_due_idx
    ON latchkey.outbox ((coalesce(lease_until, due_at)), id)
    WHERE ended_at IS NULL AND aggregate_key IS NOT NULL;
COMMENT ON INDEX latchkey.outbox_aggregate_due_idx IS
    'Events of aggregates, by when they can be claimed if it is their turn; serves OutboxClaim.';

CREATE UNIQUE INDEX outbox_turn_key
    ON latchkey.outbox (aggregate_key, (CASE WHEN state = 'claimed' THEN 0 ELSE id END))
    WHERE ended_at IS NULL AND aggregate_key IS NOT NULL;
COMMENT ON INDEX latchkey.outbox_turn_key IS
    'Whose turn it is in an aggregate: the first entry of each, which is the event that is claimed, if one is. One at a time, as a constraint; serves OutboxClaim.';

CREATE INDEX outbox_ended_idx
    ON latchkey.outbox (state, ended_at, id)
    WHERE ended_at IS NOT NULL;
COMMENT ON INDEX latchkey.outbox_ended_idx IS 'Serves OutboxListDead and OutboxPurge.';

-- A function and no part of the statements that call it, since a statement that could write to the outbox is slower
-- also when it does not. It is strict: where there is no event, it is not called.
CREATE FUNCTION latchkey.outbox_insert(event text[]) RETURNS bigint
    LANGUAGE plpgsql VOLATILE STRICT
AS $$
DECLARE
    inserted bigint;
BEGIN
    INSERT INTO latchkey.outbox AS o (topic, aggregate_key, payload, headers, max_attempts)
    VALUES (event[1], nullif(event[2], ''), event[3]::pg_catalog.jsonb, event[4]::pg_catalog.jsonb, event[5]::integer)
    RETURNING o.id INTO STRICT inserted;
    RETURN inserted;
END;
$$;

COMMENT ON FUNCTION latchkey.outbox_insert(text[]) IS
    'Writes an event, which is its topic, aggregate key or an empty text, payload, headers and max attempts, and returns its id. NULL writes none. Called by OutboxInsert, SetupInsertWithinLimit, SetupInsertOnce, EntryInsertDeposit, EntryInsertWithdrawal and TransferInsert.';

CREATE FUNCTION latchkey.outbox_notify() RETURNS trigger
    LANGUAGE plpgsql
AS $$
BEGIN
    PERFORM pg_catalog.pg_notify('latchkey_outbox', '');
    RETURN NULL;
END;
$$;

COMMENT ON FUNCTION latchkey.outbox_notify() IS 'The trigger outbox_notify: wakes dispatchers that listen, when the transaction commits.';

-- Disabled, since transactions that notify commit one after another, in the whole server: each holds a lock from before
-- its commit is written to disk until after that. Where events are few, and a poll is too late, it can be had:
-- ALTER TABLE latchkey.outbox ENABLE TRIGGER outbox_notify;
CREATE TRIGGER outbox_notify
    AFTER INSERT ON latchkey.outbox
    FOR EACH STATEMENT EXECUTE FUNCTION latchkey.outbox_notify();
ALTER TABLE latchkey.outbox DISABLE TRIGGER outbox_notify;
COMMENT ON TRIGGER outbox_notify ON latchkey.outbox IS
    'Wakes dispatchers that listen. Disabled unless the host enables it, since transactions that notify commit one after another.';
