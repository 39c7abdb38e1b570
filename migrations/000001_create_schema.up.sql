-- Creates the schema latchkey and the function that turns a namespace and an id into a lock key.
--
-- Locks: none that anything else waits for; new objects only. Scans and rewrites nothing.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000001_create_schema.up.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

-- IF NOT EXISTS, because the down migration leaves the schema and its version table, and because the migrate
-- program creates that table itself.
CREATE SCHEMA IF NOT EXISTS latchkey;
CREATE TABLE IF NOT EXISTS latchkey.schema_migrations (
    version bigint NOT NULL,
    dirty boolean NOT NULL,
    CONSTRAINT schema_migrations_pkey PRIMARY KEY (version)
);

COMMENT ON TABLE latchkey.schema_migrations IS 'The version of this schema: one row, in the form of golang-migrate; none before the first migration.';
COMMENT ON SCHEMA latchkey IS 'Guarded writes: every rule here runs as lock, check, write in one short transaction.';

CREATE FUNCTION latchkey.lock_key(namespace text, id text) RETURNS bigint
    LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE
    RETURN ('x' || encode(substr(sha256(convert_to(namespace || ':' || id, 'UTF8')), 1, 8), 'hex'))::bit(64)::bigint;

COMMENT ON FUNCTION latchkey.lock_key(text, text) IS
    'The advisory lock key of an id: the first 8 bytes, big-endian and signed, of SHA-256 of namespace:id. Never changes. Give a uuid as uuid::text.';

-- A query cannot raise an error of its own; a try that finds the lock held must, so that the statements
-- queued behind it in the same network write do not run.
CREATE FUNCTION latchkey.raise_error(code text, message text) RETURNS boolean
    LANGUAGE plpgsql VOLATILE
AS $$
BEGIN
    RAISE EXCEPTION USING ERRCODE = code, MESSAGE = message;
END;
$$;

COMMENT ON FUNCTION latchkey.raise_error(text, text) IS
    'Raises an error with this SQLSTATE and never returns. Called by LockTryAll and TxRequireReadCommitted.';
