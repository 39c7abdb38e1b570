package testdb_test

import (
	"context"
	"os"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }

func TestPool(t *testing.T) {
	t.Parallel()
	pool := testdb.Pool(t, func(c *pgxpool.Config) { c.MaxConns = 2 })
	require.EqualValues(t, 2, pool.Config().MaxConns)

	var one int
	require.NoError(t, pool.QueryRow(t.Context(), "select 1").Scan(&one))
	require.Equal(t, 1, one)
	version, dirty, err := migrations.Version(t.Context(), pool)
	require.NoError(t, err)
	require.False(t, dirty)
	require.Positive(t, version)

	for setting, want := range map[string]string{
		"timezone":         testdb.TimeZone,
		"search_path":      testdb.SearchPath,
		"deadlock_timeout": "1s",
		"max_connections":  "300",
	} {
		if setting == "max_connections" && os.Getenv("LATCHKEY_DATABASE_URL") != "" {
			continue // whoever runs that server chooses
		}
		var got string
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT current_setting($1)", setting).Scan(&got))
		require.Equal(t, want, got, setting)
	}
}

func TestProvider(t *testing.T) {
	t.Parallel()
	s := testdb.Server(t)
	require.Equal(t, os.Getenv("LATCHKEY_POSTGRES") == "docker", strings.HasPrefix(s.Provider(), "a container of "), s.Provider())
}

func TestDatabasesAreSeparateAndDropped(t *testing.T) {
	t.Parallel()
	var url string
	t.Run("one test", func(t *testing.T) {
		url = testdb.URL(t)
		testdb.Exec(t, url, "CREATE SCHEMA mine", "CREATE TABLE mine.t ()")
		var there bool
		second := testdb.PoolAt(t, url)
		require.NoError(t, second.QueryRow(t.Context(), "SELECT to_regclass('mine.t') IS NOT NULL").Scan(&there))
		require.True(t, there)
		require.NoError(t, testdb.Pool(t).QueryRow(t.Context(), "SELECT to_regclass('mine.t') IS NOT NULL").Scan(&there))
		require.False(t, there)
	})
	_, err := pgx.Connect(t.Context(), url)
	require.ErrorContains(t, err, "3D000")
}

func TestWaits(t *testing.T) {
	t.Parallel()
	const key = -4603886392734601391 // a negative one, so that both halves of the key have their high bits
	url := testdb.URL(t)
	observer, holder := testdb.Conn(t, url), testdb.Conn(t, url)
	require.Empty(t, testdb.Holders(t, observer, key))

	tx, err := holder.Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", int64(key))
	require.NoError(t, err)
	require.Equal(t, []uint32{holder.PgConn().PID()}, testdb.Holders(t, observer, key))
	require.Empty(t, testdb.Holders(t, observer, key+1))

	var want []uint32
	ended := make(chan error, 2)
	for i := range 2 {
		waiter := testdb.Conn(t, url)
		go func() {
			_, err := waiter.Exec(context.Background(), "SELECT pg_advisory_xact_lock($1)", int64(key))
			ended <- err
		}()
		want = append(want, waiter.PgConn().PID())
		testdb.WaitForLockWait(t, observer, waiter.PgConn().PID())
		require.Equal(t, want, testdb.WaitForWaiter(t, observer, key, i+1), "in the order of their waits")
	}

	// The same key in another database is another lock.
	elsewhere := testdb.Conn(t, testdb.URL(t))
	require.Empty(t, testdb.Holders(t, elsewhere, key))
	_, err = elsewhere.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", int64(key))
	require.NoError(t, err)

	require.NoError(t, tx.Rollback(t.Context()))
	require.NoError(t, <-ended)
	require.NoError(t, <-ended)
	require.Empty(t, testdb.Holders(t, observer, key))
}
