-- Creates the leases by name: of those who ask for a name, one has it until its time is over.
--
-- Each time a name is acquired, its fence rises. A row is never deleted, also when its lease is given back, since the
-- fence would begin again, and what was written under an older one could not be told apart. So names are few and
-- lasting, such as those of jobs, and not ids that are used once.
--
-- Locks: none that anything else waits for; new objects only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000006_create_leases.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

CREATE TABLE latchkey.leases (
    name text COLLATE "C" NOT NULL,
    owner text,
    fence bigint NOT NULL DEFAULT 0,
    expires_at timestamptz,
    CONSTRAINT leases_pkey PRIMARY KEY (name),
    CONSTRAINT leases_name_check CHECK (octet_length(name) BETWEEN 1 AND 255),
    CONSTRAINT leases_owner_check CHECK (octet_length(owner) BETWEEN 1 AND 255),
    CONSTRAINT leases_expires_at_check CHECK ((owner IS NULL) = (expires_at IS NULL)),
    CONSTRAINT leases_fence_check CHECK (fence >= 0 AND (owner IS NULL OR fence > 0))
) WITH (
    -- A row is rewritten at each renewal. No indexed column changes, so with room beside it no index is written.
    fillfactor = 50,
    -- To cut off the empty end of a table takes ACCESS EXCLUSIVE, for which renewals would wait.
    vacuum_truncate = off
);

COMMENT ON TABLE latchkey.leases IS 'Who of those who ask for a name has it, and until when.';
COMMENT ON COLUMN latchkey.leases.name IS 'What only one may do at a time. At most 255 bytes.';
COMMENT ON COLUMN latchkey.leases.owner IS 'Who acquired it last; NULL if it was given back. At most 255 bytes.';
COMMENT ON COLUMN latchkey.leases.fence IS 'The fencing token: how often the name was acquired. It only rises.';
COMMENT ON COLUMN latchkey.leases.expires_at IS 'When the lease ends, by the server''s clock; NULL if it was given back.';
