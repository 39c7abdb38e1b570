package wire_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

func TestMain(m *testing.M) { testdb.Main(m) }

const insert = "INSERT INTO public.numbers VALUES (1)"

// setup returns a proxy, a connection through it, and one past it.
func setup(t *testing.T) (*wire.Proxy, *pgx.Conn, *pgx.Conn) {
	t.Helper()
	url := testdb.URL(t)
	testdb.Exec(t, url, "CREATE TABLE public.numbers (n integer)")
	proxy := wire.Start(t, url)
	return proxy, testdb.Conn(t, proxy.URL()), testdb.Conn(t, url)
}

func count(t *testing.T, conn *pgx.Conn) (n int) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM public.numbers").Scan(&n))
	return n
}

// waitUntilAlone waits until no other session is in the database.
func waitUntilAlone(t *testing.T, observer *pgx.Conn) {
	t.Helper()
	bound := time.Now().Add(30 * time.Second)
	for others := 1; others > 0; {
		require.True(t, time.Now().Before(bound))
		require.NoError(t, observer.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_catalog.pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_catalog.pg_backend_pid() AND backend_type = 'client backend'`).Scan(&others))
	}
}

func TestProxyCounts(t *testing.T) {
	t.Parallel()
	proxy, conn, _ := setup(t)
	require.Zero(t, proxy.Traffic(), "start-up is not counted")
	pg := conn.PgConn()

	for name, test := range map[string]struct {
		want wire.Traffic
		run  func() error
	}{
		"a simple query": {wire.Traffic{RoundTrips: 1, Queries: 1, Statements: []string{"SELECT 1; SELECT 2"}}, func() error {
			_, err := pg.Exec(t.Context(), "SELECT 1; SELECT 2").ReadAll()
			return err
		}},
		"an extended query": {wire.Traffic{RoundTrips: 1, Syncs: 1, Statements: []string{"SELECT $1::text"}}, func() error {
			return pg.ExecParams(t.Context(), "SELECT $1::text", [][]byte{[]byte("a")}, nil, nil, nil).Read().Err
		}},
		"a statement that is prepared and executed": {
			wire.Traffic{RoundTrips: 3, Syncs: 3, Statements: []string{"SELECT 3", "SELECT 3"}}, func() error {
				_, err := pg.Prepare(t.Context(), "three", "SELECT 3", nil)
				for range 2 {
					require.NoError(t, err)
					err = pg.ExecPrepared(t.Context(), "three", nil, nil, nil).Read().Err
				}
				return err
			},
		},
		"a batch": {wire.Traffic{RoundTrips: 1, Syncs: 1, Statements: []string{"SELECT 1", "SELECT 2"}}, func() error {
			var batch pgconn.Batch
			batch.ExecParams("SELECT 1", nil, nil, nil, nil)
			batch.ExecParams("SELECT 2", nil, nil, nil, nil)
			return pg.ExecBatch(t.Context(), &batch).Close()
		}},
		"queries one after the other": {
			wire.Traffic{RoundTrips: 3, Queries: 3, Statements: []string{"SELECT 1", "SELECT 1", "SELECT 1"}}, func() error {
				var err error
				for range 3 {
					require.NoError(t, err)
					_, err = pg.Exec(t.Context(), "SELECT 1").ReadAll()
				}
				return err
			},
		},
	} {
		proxy.Reset()
		require.NoError(t, test.run(), name)
		require.Equal(t, test.want, proxy.Traffic(), name)
	}
}

func TestProxyCuts(t *testing.T) {
	t.Parallel()
	asks := func(m wire.Message) bool { return m.Is('Q') && m.Statement == insert }
	answers := func(m wire.Message) bool { return m.FromServer && m.Tag == "INSERT 0 1" }
	for name, test := range map[string]struct {
		at     func(wire.Message) bool
		action wire.Action
		rows   int
	}{
		"before a question":       {asks, wire.CutBefore, 0},
		"in the middle of one":    {asks, wire.CutWithin, 0},
		"after a question":        {asks, wire.CutAfter, 1},
		"before an answer":        {answers, wire.CutBefore, 1},
		"in the middle of answer": {answers, wire.CutWithin, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, conn, other := setup(t)
			proxy.On(func(m wire.Message) wire.Action {
				switch {
				case test.at(m):
					return test.action
				case m.Is(wire.CancelRequest):
					return wire.CutBefore
				}
				return wire.Forward
			})
			_, err := conn.Exec(t.Context(), insert)
			require.Error(t, err)
			waitUntilAlone(t, other)
			require.Equal(t, test.rows, count(t, other))
		})
	}
	t.Run("between two answers", func(t *testing.T) {
		t.Parallel()
		proxy, conn, other := setup(t)
		proxy.On(func(m wire.Message) wire.Action {
			if answers(m) {
				return wire.CutAfter
			}
			return wire.Forward
		})
		results, err := conn.PgConn().Exec(t.Context(), insert+"; SELECT 1").ReadAll()
		require.Error(t, err)
		require.NotEmpty(t, results)
		require.Equal(t, "INSERT 0 1", results[0].CommandTag.String())
		waitUntilAlone(t, other)
	})
	t.Run("all connections, before the client has sent anything", func(t *testing.T) {
		t.Parallel()
		proxy, conn, other := setup(t)
		proxy.CutAll()
		_, err := conn.Exec(t.Context(), insert)
		require.Error(t, err)
		require.True(t, pgconn.SafeToRetry(err), "%v", err)
		waitUntilAlone(t, other)
		require.Equal(t, 0, count(t, other))
		require.NoError(t, testdb.Conn(t, proxy.URL()).Ping(t.Context()))
	})
}

func TestProxyCutsOneConnection(t *testing.T) {
	t.Parallel()
	proxy, first, other := setup(t)
	second := testdb.Conn(t, proxy.URL())
	proxy.Cut(1)
	_, err := first.Exec(t.Context(), insert)
	require.Error(t, err)
	require.True(t, pgconn.SafeToRetry(err), "%v", err)
	_, err = second.Exec(t.Context(), insert)
	require.NoError(t, err)
	proxy.Cut(1) // which is gone
	require.Equal(t, 1, count(t, other))
}

func TestProxyHolds(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		at   func(wire.Message) bool
		rows int
	}{
		"a question": {func(m wire.Message) bool { return m.Is('Q') }, 0},
		"an answer":  {func(m wire.Message) bool { return m.FromServer }, 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			proxy, conn, other := setup(t)
			held := make(chan struct{}, 10)
			proxy.On(func(m wire.Message) wire.Action {
				if test.at(m) {
					held <- struct{}{}
					return wire.Hold
				}
				return wire.Forward
			})
			ctx, cancel := context.WithCancel(t.Context())
			failed := make(chan error, 1)
			go func() {
				_, err := conn.Exec(ctx, insert)
				failed <- err
			}()
			<-held
			require.Equal(t, test.rows, count(t, other))
			require.Empty(t, failed)
			cancel()
			require.ErrorIs(t, <-failed, context.Canceled)
			proxy.CutAll()
			waitUntilAlone(t, other)
			require.Equal(t, test.rows, count(t, other))
		})
	}
}

func TestProxyDelaysEachDirection(t *testing.T) {
	t.Parallel()
	const delay = 50 * time.Millisecond
	proxy, conn, _ := setup(t)
	for _, delays := range [][2]time.Duration{{delay, 0}, {0, delay}, {delay, delay}} {
		proxy.Delay(delays[0], delays[1])
		started := time.Now()
		// Both answers are under way at the same time.
		_, err := conn.PgConn().Exec(t.Context(), "SELECT 1; SELECT 2").ReadAll()
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(started), delays[0]+delays[1])
	}
	proxy.Delay(0, 0)
	require.NoError(t, conn.Ping(t.Context()))
}
