-- Drops the functions. The schema and its version table stay, to record that no migration is applied.
--
-- Locks: the functions only. Loses no data.
-- By hand: psql -1 -v ON_ERROR_STOP=1 -f 000001_create_schema.down.sql, and record the version (README).
SET LOCAL lock_timeout = '3s';
SET LOCAL search_path = pg_catalog, pg_temp;

DROP FUNCTION latchkey.raise_error(text, text);
DROP FUNCTION latchkey.lock_key(text, text);
