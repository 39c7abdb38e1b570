package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

type vector struct {
	Namespace string `json:"namespace"`
	ID        string `json:"id"`
	Key       int64  `json:"key,string"`
}

func readVectors(t *testing.T) []vector {
	t.Helper()
	data, err := os.ReadFile("../internal/lockkey/testdata/vectors.json")
	require.NoError(t, err)
	var file struct {
		Vectors []vector `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(data, &file))
	require.Greater(t, len(file.Vectors), 200)
	return file.Vectors
}

type querier interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
}

// lockKeys returns the vectors with the keys that the server computes.
func lockKeys(t *testing.T, db querier, vectors []vector) []vector {
	t.Helper()
	namespaces, ids := make([]string, len(vectors)), make([]string, len(vectors))
	for i, v := range vectors {
		namespaces[i], ids[i] = v.Namespace, v.ID
	}
	rows, err := db.Query(t.Context(), `
		SELECT v.namespace, v.id, latchkey.lock_key(v.namespace, v.id)
		FROM unnest($1::text[], $2::text[]) WITH ORDINALITY AS v (namespace, id, n)
		ORDER BY v.n`, namespaces, ids)
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowToStructByPos[vector])
	require.NoError(t, err)
	return got
}

func TestKeysInSQLEqualThePublishedVectors(t *testing.T) {
	t.Parallel()
	vectors := readVectors(t)
	require.Equal(t, vectors, lockKeys(t, testdb.Pool(t), vectors))
}

func TestKeysInSQLDoNotTrustTheSearchPath(t *testing.T) {
	t.Parallel()
	conn, err := testdb.Pool(t).Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()

	// What lock_key is made of, and what else it could be made of, each with a wrong answer.
	_, err = conn.Exec(t.Context(), `
		CREATE SCHEMA hostile;
		CREATE FUNCTION hostile.sha256(bytea) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT '\x00'::bytea $$;
		CREATE FUNCTION hostile.digest(bytea, text) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT '\x00'::bytea $$;
		CREATE FUNCTION hostile.convert_to(text, name) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT '\x00'::bytea $$;
		CREATE FUNCTION hostile.encode(bytea, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT '00'::text $$;
		CREATE FUNCTION hostile.substr(bytea, integer, integer) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT '\x00'::bytea $$;
		CREATE FUNCTION hostile.substring(bytea, integer, integer) RETURNS bytea LANGUAGE sql IMMUTABLE AS $$ SELECT '\x00'::bytea $$;
		CREATE FUNCTION hostile.get_byte(bytea, integer) RETURNS integer LANGUAGE sql IMMUTABLE AS $$ SELECT 0 $$;
		CREATE FUNCTION hostile.concat(text, text) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'x'::text $$;
		CREATE OPERATOR hostile.|| (LEFTARG = text, RIGHTARG = text, FUNCTION = hostile.concat);
		CREATE DOMAIN hostile.int8 AS integer;
		SET search_path = hostile, pg_catalog`)
	require.NoError(t, err)
	// Only now does a test with such a search path say anything.
	var shadowed string
	require.NoError(t, conn.QueryRow(t.Context(), `SELECT 'a'::text || 'b'::text`).Scan(&shadowed))
	require.Equal(t, "x", shadowed)

	vectors := readVectors(t)
	require.Equal(t, vectors, lockKeys(t, conn, vectors))

	_, err = conn.Exec(t.Context(), `SET search_path = ''`)
	require.NoError(t, err)
	require.Equal(t, vectors, lockKeys(t, conn, vectors))
}

// The text that is hashed is UTF-8 whatever the database stores.
func TestKeysInSQLDoNotDependOnTheEncoding(t *testing.T) {
	t.Parallel()
	for encoding, holds := range map[string]func(rune) bool{
		"LATIN1":    func(r rune) bool { return r <= 0xFF },
		"SQL_ASCII": func(rune) bool { return true },
	} {
		t.Run(encoding, func(t *testing.T) {
			t.Parallel()
			pool := newDatabase(t, "ENCODING '"+encoding+"' LC_COLLATE 'C' LC_CTYPE 'C'")
			require.NoError(t, migrations.Up(t.Context(), pool))

			var vectors []vector
			for _, v := range readVectors(t) {
				if !strings.ContainsFunc(v.ID, func(r rune) bool { return !holds(r) }) {
					vectors = append(vectors, v)
				}
			}
			require.Contains(t, vectors, vector{"user", "\u00fc", -5869728405963765576})
			require.Greater(t, len(vectors), 200)
			require.Equal(t, vectors, lockKeys(t, pool, vectors))
		})
	}
}

// newDatabase makes an empty database that is not a copy of the tests' template.
func newDatabase(t *testing.T, options string) *pgxpool.Pool {
	t.Helper()
	admin := testdb.Pool(t)
	config := admin.Config()
	config.ConnConfig.Database += "_other"
	// pgx sends UTF-8 whatever the server takes it for, which without this is the database's own encoding.
	config.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	name := pgx.Identifier{config.ConnConfig.Database}.Sanitize()
	_, err := admin.Exec(t.Context(), fmt.Sprintf("CREATE DATABASE %s TEMPLATE template0 %s", name, options))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.WithoutCancel(t.Context()), fmt.Sprintf("DROP DATABASE %s WITH (FORCE)", name))
		require.NoError(t, err)
	})
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}
