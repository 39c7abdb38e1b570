-- Creates the table of setup requests: at most max_pending of them may be pending per user.
--
-- The rule is counted under the advisory lock setup_request:<user_id>. It is also a constraint: each pending row
-- holds a slot from 1 to max_pending, and a slot is held once. A writer that skips the lock gets a unique violation,
-- not an overrun. That is the highest limit that is in use: where it was lowered, or differs from call to call, the lower
-- one is kept by the lock alone, since what is pending may be in slots above it.
--
-- Idempotency keys are a column here, not a table of their own: a key belongs to its user, so the user's lock
-- covers it too, and a repeat finds the first row by one index.
--
-- Locks: none that anything else waits for; new objects only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000002_create_setup_requests.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE TABLE latchkey.setup_requests (
    id uuid NOT NULL DEFAULT gen_random_uuid(),
    user_id uuid NOT NULL,
    status text NOT NULL DEFAULT 'pending',
    pending_slot smallint NOT NULL DEFAULT 1,
    max_pending smallint NOT NULL DEFAULT 1,
    idempotency_key text,
    -- Not now(): that is when the transaction began, before it waited for the lock.
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at timestamptz,
    CONSTRAINT setup_requests_pkey PRIMARY KEY (id),
    CONSTRAINT setup_requests_status_check CHECK (status IN ('pending', 'completed', 'cancelled')),
    CONSTRAINT setup_requests_max_pending_check CHECK (max_pending BETWEEN 1 AND 1000),
    CONSTRAINT setup_requests_pending_slot_check CHECK (pending_slot BETWEEN 1 AND max_pending),
    CONSTRAINT setup_requests_idempotency_key_check CHECK (octet_length(idempotency_key) BETWEEN 1 AND 255),
    CONSTRAINT setup_requests_ended_at_check CHECK ((status = 'pending') = (ended_at IS NULL))
);

-- A function and no part of the statements that call it, since a statement that could look for a gap is slower also
-- when it does not.
CREATE FUNCTION latchkey.setup_free_slot(for_user uuid, nth bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE
AS $$
BEGIN
    -- What a slot is larger than its number among them is how many below it are free.
    RETURN (
        SELECT nth + pg_catalog.count(*) FILTER (WHERE taken.slot - taken.number < nth)
        FROM (
            SELECT s.pending_slot AS slot, pg_catalog.row_number() OVER (ORDER BY s.pending_slot) AS number
            FROM latchkey.setup_requests AS s
            WHERE s.user_id = for_user AND s.status = 'pending'
        ) AS taken
    );
END;
$$;

COMMENT ON FUNCTION latchkey.setup_free_slot(uuid, bigint) IS
    'The nth of the numbers from 1 that no pending request of the user has as its slot. Called by SetupInsertWithinLimit, SetupInsertManyWithinLimit and SetupInsertOnce where the number after the highest is above the limit.';

COMMENT ON TABLE latchkey.setup_requests IS 'A request of a user to set something up; a user has a bounded number of pending ones.';
COMMENT ON COLUMN latchkey.setup_requests.user_id IS 'Whose request it is; the host''s own id, with no foreign key.';
COMMENT ON COLUMN latchkey.setup_requests.status IS 'pending, completed or cancelled; it leaves pending once and never returns.';
COMMENT ON COLUMN latchkey.setup_requests.pending_slot IS 'Which of the user''s places, 1 to max_pending, the request holds while it is pending.';
COMMENT ON COLUMN latchkey.setup_requests.max_pending IS 'The limit that the request was created under, 1 to 1000.';
COMMENT ON COLUMN latchkey.setup_requests.idempotency_key IS 'The caller''s key for this request, unique per user; NULL is none. At most 255 bytes.';
COMMENT ON COLUMN latchkey.setup_requests.created_at IS 'When the row was written, under the lock, by the server''s clock.';
COMMENT ON COLUMN latchkey.setup_requests.ended_at IS 'When it was completed or cancelled, by the server''s clock; NULL while it is pending.';

CREATE UNIQUE INDEX setup_requests_pending_key
    ON latchkey.setup_requests (user_id, pending_slot)
    WHERE status = 'pending';
COMMENT ON INDEX latchkey.setup_requests_pending_key IS
    'The rule as a constraint; serves SetupInsertWithinLimit, SetupInsertManyWithinLimit, SetupInsertOnce and SetupCountPending.';

CREATE UNIQUE INDEX setup_requests_idempotency_key
    ON latchkey.setup_requests (user_id, idempotency_key)
    WHERE idempotency_key IS NOT NULL;
COMMENT ON INDEX latchkey.setup_requests_idempotency_key IS
    'One request per idempotency key of a user; serves SetupInsertOnce.';

CREATE INDEX setup_requests_user_id_created_at_idx
    ON latchkey.setup_requests (user_id, created_at DESC, id DESC);
COMMENT ON INDEX latchkey.setup_requests_user_id_created_at_idx IS 'Serves SetupListByUser.';
