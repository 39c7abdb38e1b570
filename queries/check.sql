-- name: CheckBackend :one
-- CheckBackend returns which server process runs the statement. A pooler gives its clients numbers of its own.
--
-- Locks: none.
SELECT (pg_catalog.pg_backend_pid())::integer AS pid;

-- name: CheckDisabledTriggers :many
-- CheckDisabledTriggers returns the tables of latchkey on which triggers that hold a foreign key do not fire, by name;
-- max_rows of them at most. The trigger outbox_notify is not among these: it is the host's to enable.
--
-- Locks: none. Reads the catalog only.
SELECT (r.relname)::text AS name
FROM pg_catalog.pg_trigger AS t
JOIN pg_catalog.pg_class AS r ON r.oid = t.tgrelid
JOIN pg_catalog.pg_namespace AS n ON n.oid = r.relnamespace
WHERE n.nspname = 'latchkey'
    AND t.tgisinternal
    AND t.tgenabled NOT IN ('O', 'A')  -- those that fire for what a service does
GROUP BY r.relname
ORDER BY r.relname
LIMIT @max_rows;

-- name: CheckFunctions :many
-- CheckFunctions returns the functions of latchkey, by name, and whether this role may call each; max_rows of them at
-- most.
--
-- Locks: none. Reads the catalog only.
SELECT (p.proname)::text AS name, pg_catalog.has_function_privilege(p.oid, 'EXECUTE')::boolean AS may_execute
FROM pg_catalog.pg_proc AS p
JOIN pg_catalog.pg_namespace AS n ON n.oid = p.pronamespace
WHERE n.nspname = 'latchkey'
ORDER BY p.proname, p.oid
LIMIT @max_rows;

-- name: CheckHold :one
-- CheckHold takes the transaction lock of a key that nobody else asks for, as calls do, and says whether it got that of
-- common too, which whoever makes this proof tries for.
--
-- Locks: advisory; waits for none.
SELECT
    coalesce((pg_catalog.pg_advisory_xact_lock(@key))::text, '')::text AS held,
    (pg_catalog.pg_try_advisory_xact_lock(@common))::boolean AS alone;

-- name: CheckObjects :many
-- CheckObjects returns the indexes and the check and foreign key constraints of latchkey, by name, and whether the
-- server holds to each: an index is valid, and unique if its name ends in key; a constraint is validated. max_rows of
-- them at most.
--
-- Locks: none. Reads the catalog only.
SELECT o.name, o.sound
FROM (
    SELECT
        (i.relname)::text AS name,
        (x.indisvalid AND (x.indisunique OR i.relname NOT LIKE '%key'))::boolean AS sound
    FROM pg_catalog.pg_index AS x
    JOIN pg_catalog.pg_class AS i ON i.oid = x.indexrelid
    JOIN pg_catalog.pg_namespace AS n ON n.oid = i.relnamespace
    WHERE n.nspname = 'latchkey'
    UNION ALL
    SELECT (c.conname)::text AS name, (c.convalidated)::boolean AS sound
    FROM pg_catalog.pg_constraint AS c
    JOIN pg_catalog.pg_namespace AS n ON n.oid = c.connamespace
    WHERE n.nspname = 'latchkey' AND c.contype IN ('c', 'f')  -- check, foreign key
) AS o
ORDER BY o.name, o.sound
LIMIT @max_rows;

-- name: CheckSettings :many
-- CheckSettings returns those of the named settings that this server has, as they are for this session, in the
-- setting's own unit; max_rows of them at most.
--
-- Locks: none.
SELECT (s.name)::text AS name, (s.setting)::text AS setting
FROM pg_catalog.pg_settings AS s
WHERE s.name = ANY (@names::text[])
ORDER BY s.name
LIMIT @max_rows;

-- name: CheckTables :many
-- CheckTables returns the tables and views of latchkey, by name, what this role may do with each, and whether row
-- security hides rows of it from this role; max_rows of them at most.
--
-- Locks: none. Reads the catalog only.
SELECT
    (r.relname)::text AS name,
    pg_catalog.has_schema_privilege(n.oid, 'USAGE')::boolean AS may_use_schema,
    pg_catalog.has_table_privilege(r.oid, 'SELECT')::boolean AS may_select,
    pg_catalog.has_table_privilege(r.oid, 'INSERT')::boolean AS may_insert,
    pg_catalog.has_table_privilege(r.oid, 'UPDATE')::boolean AS may_update,
    pg_catalog.has_table_privilege(r.oid, 'DELETE')::boolean AS may_delete,
    (r.relkind = 'r' AND pg_catalog.row_security_active(r.oid))::boolean AS hides_rows
FROM pg_catalog.pg_class AS r
JOIN pg_catalog.pg_namespace AS n ON n.oid = r.relnamespace
WHERE n.nspname = 'latchkey' AND r.relkind IN ('r', 'v')  -- table, view
ORDER BY r.relname
LIMIT @max_rows;

-- name: CheckTry :one
-- CheckTry returns whether the transaction lock of a key was to be had. It is free again when the transaction ends.
--
-- Locks: advisory, one that nobody else asks for; never waits.
SELECT (pg_catalog.pg_try_advisory_xact_lock(@key))::boolean AS got;

-- name: CheckVersion :one
-- CheckVersion returns the version of the schema, and whether a migration was left half done. No row: none was applied.
--
-- Locks: none. Index: schema_migrations_pkey.
SELECT (m.version)::bigint AS version, (m.dirty)::boolean AS dirty
FROM latchkey.schema_migrations AS m
ORDER BY m.version DESC
LIMIT 1;
