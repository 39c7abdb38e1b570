package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// What the transactions of these tests do. The table notes holds the note 0.
const (
	addNote   = "INSERT INTO notes (n) VALUES ($1) RETURNING n"
	addOrphan = "INSERT INTO notes (n, parent) VALUES ($1, -1) RETURNING n" // fails at COMMIT, with 23503
	addSlow   = "INSERT INTO notes (n, parent) VALUES ($1, 0) RETURNING n"  // COMMIT waits, where there is waitAtCommit
	divide    = "SELECT 1 / 0"                                              // 22012
	takeLock  = "SELECT pg_catalog.pg_advisory_xact_lock($1)"
)

// pipe is a pool of one connection behind a proxy, with a table of its own.
type pipe struct {
	url   string // past the proxy, to the same schema
	proxy *wire.Proxy
	pool  *pgxpool.Pool
	other *pgx.Conn // past the proxy
	key   int64     // for takeLock, of its own too
}

// inEveryExecMode runs the test once for each of pgx's ways to send a query.
func inEveryExecMode(t *testing.T, test func(t *testing.T, p *pipe)) {
	t.Helper()
	url := testdb.URL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, setupPipe(t, url, withExecMode(mode)))
		})
	}
}

func setupPipe(t *testing.T, url string, opts ...func(*pgxpool.Config)) *pipe {
	t.Helper()
	schema := pgx.Identifier{strings.ToLower(t.Name())[strings.LastIndexByte(t.Name(), '/')+1:]}.Sanitize()
	testdb.Exec(t, url,
		"CREATE SCHEMA "+schema,
		"CREATE TABLE "+schema+".notes (n integer PRIMARY KEY, parent integer REFERENCES "+schema+".notes DEFERRABLE INITIALLY DEFERRED)",
		"INSERT INTO "+schema+".notes VALUES (0)")
	p := &pipe{url: withSearchPath(url, schema)}
	p.proxy = wire.Start(t, p.url)
	p.pool = testdb.PoolAt(t, p.proxy.URL(), append([]func(*pgxpool.Config){maxConns(1)}, opts...)...)
	p.other = testdb.Conn(t, p.url)
	var err error
	p.key, err = repository.Key("note", t.Name())
	require.NoError(t, err)
	return p
}

func withSearchPath(url, path string) string {
	separator := "?"
	if strings.Contains(url, "?") {
		separator = "&"
	}
	return url + separator + "search_path=" + strings.ReplaceAll(path, `"`, "%22")
}

func (p *pipe) acquire(t *testing.T) *pgxpool.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	conn, err := p.pool.Acquire(ctx)
	require.NoError(t, err)
	t.Cleanup(conn.Release) // for a test that fails; it does no harm twice
	return conn
}

// requireNotes checks what is committed.
func (p *pipe) requireNotes(t *testing.T, want ...int) {
	t.Helper()
	rows, err := p.other.Query(t.Context(), "SELECT n FROM notes WHERE n <> 0 ORDER BY n")
	require.NoError(t, err)
	got, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	if want == nil {
		want = []int{}
	}
	require.Equal(t, want, got)
}

func (p *pipe) clear(t *testing.T) {
	t.Helper()
	_, err := p.other.Exec(t.Context(), "DELETE FROM notes WHERE n <> 0")
	require.NoError(t, err)
}

// requireKept gives the connection back and checks that it is the one that the next caller gets.
func (p *pipe) requireKept(t *testing.T, conn *pgxpool.Conn) {
	t.Helper()
	require.False(t, conn.Conn().IsClosed())
	require.Equal(t, "I", string(conn.Conn().PgConn().TxStatus()))
	pid := conn.Conn().PgConn().PID()
	conn.Release()
	require.Zero(t, p.pool.Stat().AcquiredConns())
	next := p.acquire(t)
	defer next.Release()
	require.Equal(t, pid, next.Conn().PgConn().PID())
}

// requireReplaced gives the connection back and checks that the next caller gets one that works.
func (p *pipe) requireReplaced(t *testing.T, conn *pgxpool.Conn) {
	t.Helper()
	require.True(t, conn.Conn().IsClosed())
	conn.Release()
	next := p.acquire(t)
	defer next.Release()
	require.NoError(t, next.Ping(t.Context()))
	require.Equal(t, int32(1), p.pool.Stat().AcquiredConns())
}

// ways are those in which a query can be made of a db.DBTX.
var ways = []struct {
	name string
	make func(ctx context.Context, q db.DBTX, sql string, args ...any) error
}{
	{"Exec", func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		_, err := q.Exec(ctx, sql, args...)
		return err
	}},
	{"Query", func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		rows, err := q.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		for rows.Next() {
		}
		return rows.Err()
	}},
	{"QueryRow", func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		var n int
		return q.QueryRow(ctx, sql, args...).Scan(&n)
	}},
}

// queue queues a statement; an error comes from the query.
func queue(t *testing.T, q db.DBTX, sql string, args ...any) {
	t.Helper()
	_, err := q.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// requireSQLState checks that the server's error is in err.
func requireSQLState(t *testing.T, want string, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr)
	require.Equal(t, want, pgErr.Code, "%v", err)
}

func requireNoOutcomeError(t *testing.T, err error) {
	t.Helper()
	var outcome *pipeline.OutcomeError
	require.NotErrorAs(t, err, &outcome)
}

func requireOutcomeError(t *testing.T, err error) {
	t.Helper()
	var outcome *pipeline.OutcomeError
	require.ErrorAs(t, err, &outcome)
}

// waitUntil waits until the query, of one boolean, says yes.
func waitUntil(t *testing.T, conn *pgx.Conn, sql string, args ...any) {
	t.Helper()
	bound := time.Now().Add(30 * time.Second) // far more than a busy machine needs
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		var yes bool
		require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&yes))
		if yes {
			return
		}
		require.True(t, time.Now().Before(bound), "waited in vain for %s %v", sql, args)
		<-tick.C
	}
}

// waitUntilGone waits until the session has ended, and with it all that it was doing.
func waitUntilGone(t *testing.T, observer *pgx.Conn, pid uint32) {
	t.Helper()
	waitUntil(t, observer, "SELECT NOT EXISTS (SELECT FROM pg_catalog.pg_stat_activity WHERE pid = $1::bigint)", int64(pid))
}

// hold takes the advisory lock in a transaction of another connection, which it returns.
func hold(t *testing.T, url string, key int64) pgx.Tx {
	t.Helper()
	tx, err := testdb.Conn(t, url).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), takeLock, key)
	require.NoError(t, err)
	return tx
}

func TestPipelineCommitsWithTheLastQuery(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		for i, way := range ways {
			conn := p.acquire(t)
			tx := pipeline.Begin(conn.Conn())
			require.NoError(t, way.make(ctx, tx, addNote, 1), way.name)
			p.requireNotes(t) // not yet
			require.NoError(t, way.make(ctx, tx.Last(), addNote, 2), way.name)
			p.requireNotes(t, 1, 2)
			tx.Rollback(ctx) // does no harm
			p.requireNotes(t, 1, 2)
			p.requireKept(t, conn)
			p.clear(t)

			conn = p.acquire(t)
			tx = pipeline.Begin(conn.Conn())
			require.NoError(t, way.make(ctx, tx.Last(), addNote, 10+i), way.name)
			p.requireNotes(t, 10+i)
			p.requireKept(t, conn)
			p.clear(t)
		}
	})
}

func TestPipelineRollbackUndoesAll(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		queue(t, tx.Before(), takeLock, p.key)
		queue(t, tx.Before(), addNote, 1)
		_, err := tx.Exec(ctx, addNote, 2)
		require.NoError(t, err)
		require.Len(t, testdb.Holders(t, p.other, p.key), 1)
		tx.Rollback(ctx)
		require.Empty(t, testdb.Holders(t, p.other, p.key))
		p.requireNotes(t)
		p.requireKept(t, conn)

		p.proxy.Reset()
		conn = p.acquire(t)
		tx = pipeline.Begin(conn.Conn())
		queue(t, tx.Before(), addNote, 1)
		tx.Rollback(ctx)
		require.Zero(t, p.proxy.Traffic(), "what never began needs no end")
		p.requireKept(t, conn)
	})
}

func TestPipelineIsReadCommittedWhateverTheDefault(t *testing.T) {
	t.Parallel()
	p := setupPipe(t, testdb.URL(t), func(c *pgxpool.Config) {
		c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable"
	})
	conn := p.acquire(t)
	defer conn.Release()
	var level string
	require.NoError(t, conn.QueryRow(t.Context(), "SHOW transaction_isolation").Scan(&level))
	require.Equal(t, "serializable", level, "without such a default the test says nothing")
	tx := pipeline.Begin(conn.Conn())
	require.NoError(t, tx.Last().QueryRow(t.Context(), "SHOW transaction_isolation").Scan(&level))
	require.Equal(t, "read committed", level)
}

func TestPipelineRunsWhatIsQueuedInOrderAndInOneTransaction(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		_, err := p.other.Exec(ctx, `CREATE TABLE steps (
			place integer GENERATED ALWAYS AS IDENTITY, step text, xid xid8 DEFAULT pg_catalog.pg_current_xact_id())`)
		require.NoError(t, err)
		const addStep = "INSERT INTO steps (step) VALUES ($1)"

		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		queue(t, tx.After(), addStep, "after 1")
		queue(t, tx.Before(), addStep, "before 1")
		queue(t, tx.Before(), addStep, "before 2")
		queue(t, tx.After(), addStep, "after 2")
		queue(t, tx, addStep, "query")
		queue(t, tx.Before(), addStep, "before 3") // travels with the next query
		queue(t, tx.Last(), addStep, "last")
		p.requireKept(t, conn)

		rows, err := p.other.Query(ctx, "SELECT step FROM steps ORDER BY place")
		require.NoError(t, err)
		got, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Equal(t, []string{"before 1", "before 2", "query", "before 3", "last", "after 1", "after 2"}, got)
		var transactions int
		require.NoError(t, p.other.QueryRow(ctx, "SELECT count(DISTINCT xid) FROM steps").Scan(&transactions))
		require.Equal(t, 1, transactions)
	})
}

// failure is a transaction in which one statement fails.
type failure struct {
	name     string
	sqlState string
	before   bool // the error is a BeforeError
	either   bool // it may be one or not, as the mode sends all together or not
	atCommit bool
	make     func(t *testing.T, tx *pipeline.Tx, query func(q db.DBTX, sql string, args ...any) error) error
}

var failures = []failure{
	{
		name: "a statement queued before the query", sqlState: "22012", before: true,
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), divide)
			queue(t, tx.Before(), addNote, 1)
			return query(tx.Last(), addNote, 2)
		},
	},
	{
		name: "a statement queued after others", sqlState: "22012", before: true,
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			queue(t, tx.Before(), divide)
			return query(tx, addNote, 2)
		},
	},
	{
		name: "a statement queued between queries", sqlState: "22012", before: true,
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx, addNote, 1)
			queue(t, tx.Before(), divide)
			return query(tx.Last(), addNote, 2)
		},
	},
	{
		name: "the first query", sqlState: "23505",
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			return query(tx, addNote, 0)
		},
	},
	{
		name: "the query after another", sqlState: "23505",
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx, addNote, 1)
			return query(tx, addNote, 0)
		},
	},
	{
		name: "the last query", sqlState: "23505",
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			queue(t, tx.After(), addNote, 2)
			return query(tx.Last(), addNote, 0)
		},
	},
	{
		name: "a query of what does not exist", sqlState: "42P01", either: true,
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			return query(tx.Last(), "SELECT n FROM nothing")
		},
	},
	{
		name: "a statement after the last query", sqlState: "22012",
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.After(), addNote, 1)
			queue(t, tx.After(), divide)
			return query(tx.Last(), addNote, 2)
		},
	},
	{
		name: "the last query after an error that was not heeded", sqlState: "25P02",
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			_, err := tx.Exec(t.Context(), addNote, 0)
			require.Error(t, err)
			return query(tx.Last(), addNote, 2)
		},
	},
	{
		name: "COMMIT", sqlState: "23503", atCommit: true,
		make: func(t *testing.T, tx *pipeline.Tx, query func(db.DBTX, string, ...any) error) error {
			t.Helper()
			queue(t, tx.Before(), addNote, 1)
			return query(tx.Last(), addOrphan, 2)
		},
	},
}

// inEachFailure makes each failure in each way, on a connection that may have made it before or not.
func inEachFailure(t *testing.T, test func(t *testing.T, f failure, query func(q db.DBTX, sql string, args ...any) error)) {
	t.Helper()
	for _, f := range failures {
		for _, way := range ways {
			t.Run(f.name+" by "+way.name, func(t *testing.T) {
				test(t, f, func(q db.DBTX, sql string, args ...any) error {
					return way.make(t.Context(), q, sql, args...)
				})
			})
		}
	}
}

// requireFailed checks the failure's error.
func (p *pipe) requireFailed(t *testing.T, f failure, err error) {
	t.Helper()
	requireSQLState(t, f.sqlState, err)
	var before *pipeline.BeforeError
	if !f.either {
		require.Equal(t, f.before, errors.As(err, &before), "%v", err)
	}
	requireNoOutcomeError(t, err)
}

func TestPipelineWritesNothingAndKeepsTheConnectionWhenAStatementFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		inEachFailure(t, func(t *testing.T, f failure, query func(db.DBTX, string, ...any) error) {
			t.Helper()
			conn := p.acquire(t)
			tx := pipeline.Begin(conn.Conn())
			p.requireFailed(t, f, f.make(t, tx, query))
			tx.Rollback(t.Context())
			p.requireNotes(t)
			p.requireKept(t, conn)

			conn = p.acquire(t)
			require.NoError(t, query(pipeline.Begin(conn.Conn()).Last(), addNote, 3))
			p.requireNotes(t, 3)
			p.clear(t)
			p.requireKept(t, conn)
		})
	})
}

// Somebody else's transaction is not ended.
func TestPipelineDoesNotBeginInAnotherTransaction(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		conn := p.acquire(t)
		open, err := conn.BeginTx(ctx, pgx.TxOptions{IsoLevel: pgx.RepeatableRead})
		require.NoError(t, err)
		_, err = open.Exec(ctx, addNote, 1)
		require.NoError(t, err)

		tx := pipeline.Begin(conn.Conn())
		_, err = tx.Last().Exec(ctx, addNote, 2)
		p.requireFailed(t, failure{sqlState: "25001", before: true}, err)
		tx.Rollback(ctx)
		require.Equal(t, "E", string(conn.Conn().PgConn().TxStatus()))
		require.NoError(t, open.Rollback(ctx))
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

func TestPipelineRefusesAnArgumentThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		unknown := make(chan int)
		for _, way := range ways {
			for name, add := range map[string]func(tx *pipeline.Tx) error{
				"a query":      func(tx *pipeline.Tx) error { return way.make(ctx, tx, addNote, unknown) },
				"a last query": func(tx *pipeline.Tx) error { return way.make(ctx, tx.Last(), addNote, unknown) },
				"a queued statement": func(tx *pipeline.Tx) error {
					queue(t, tx.Before(), addNote, unknown)
					return way.make(ctx, tx.Last(), addNote, 2)
				},
			} {
				conn := p.acquire(t)
				tx := pipeline.Begin(conn.Conn())
				queue(t, tx.Before(), addNote, 1)
				err := add(tx)
				require.ErrorContains(t, err, "chan int", "%s by %s", name, way.name)
				requireNoOutcomeError(t, err) // nothing was sent
				tx.Rollback(ctx)
				p.requireNotes(t)
				// pgx closes the connection in some modes, because it has half a batch in its buffer.
				if conn.Conn().IsClosed() {
					p.requireReplaced(t, conn)
				} else {
					p.requireKept(t, conn)
				}
			}
		}
	})
}

func TestPipelineCommitsWhenRowsAreClosedEarly(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		const addMany = "INSERT INTO notes (n) SELECT g.n FROM generate_series(1, $1::integer) AS g (n) RETURNING n"
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		for _, last := range []bool{false, true} {
			q := db.DBTX(tx)
			if last {
				q = tx.Last()
				_, err := tx.Exec(ctx, "DELETE FROM notes WHERE n <> 0")
				require.NoError(t, err)
			}
			rows, err := q.Query(ctx, addMany, 5)
			require.NoError(t, err)
			require.True(t, rows.Next())
			var n int
			require.NoError(t, rows.Scan(&n))
			require.Equal(t, 1, n)
			require.NoError(t, rows.Err())
			rows.Close()
			require.NoError(t, rows.Err())
			require.False(t, rows.Next())
			require.Equal(t, int64(5), rows.CommandTag().RowsAffected())
		}
		p.requireNotes(t, 1, 2, 3, 4, 5)
		p.requireKept(t, conn)
	})
}

func TestPipelineCommitsWhenTheLastQueryFindsNoRow(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		queue(t, tx.Before(), addNote, 1)
		var n int
		err := tx.Last().QueryRow(t.Context(), "SELECT n FROM notes WHERE n = $1", 99).Scan(&n)
		require.ErrorIs(t, err, pgx.ErrNoRows)
		tx.Rollback(t.Context())
		p.requireNotes(t, 1)
		p.requireKept(t, conn)
	})
}

func TestPipelineHasCommittedWhenARowDoesNotFitItsVariable(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		var n struct{}
		require.Error(t, tx.Last().QueryRow(t.Context(), addNote, 1).Scan(&n))
		tx.Rollback(t.Context())
		p.requireNotes(t, 1)
		p.requireKept(t, conn)
	})
}

func TestPipelineIsClosedAfterItsEnd(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		conn := p.acquire(t)
		for _, end := range []func(tx *pipeline.Tx){
			func(tx *pipeline.Tx) { queue(t, tx.Last(), "SELECT 1") },
			func(tx *pipeline.Tx) {
				queue(t, tx, "SELECT 1")
				tx.Rollback(ctx)
			},
			func(tx *pipeline.Tx) { tx.Rollback(ctx) }, // without a query
			func(tx *pipeline.Tx) {
				_, err := tx.Exec(ctx, divide)
				require.Error(t, err)
				tx.Rollback(ctx)
			},
		} {
			tx := pipeline.Begin(conn.Conn())
			end(tx)
			p.proxy.Reset()
			for _, way := range ways {
				require.ErrorIs(t, way.make(ctx, tx, addNote, 1), pgx.ErrTxClosed, way.name)
				require.ErrorIs(t, way.make(ctx, tx.Last(), addNote, 1), pgx.ErrTxClosed, way.name)
			}
			tx.Rollback(ctx)
			require.Zero(t, p.proxy.Traffic())
		}
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

func TestPipelineQueuesOnlyExec(t *testing.T) {
	t.Parallel()
	p := setupPipe(t, testdb.URL(t))
	conn := p.acquire(t)
	tx := pipeline.Begin(conn.Conn())
	for _, q := range []db.DBTX{tx.Before(), tx.After()} {
		for _, way := range ways[1:] {
			require.Error(t, way.make(t.Context(), q, addNote, 1), way.name)
		}
	}
	queue(t, tx.Last(), addNote, 2)
	p.requireNotes(t, 2)
	p.requireKept(t, conn)
}

func TestPipelineLeaksNoConnection(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			p := setupPipe(t, url, withExecMode(mode), maxConns(2))
			for i := range 100 {
				conn := p.acquire(t)
				tx := pipeline.Begin(conn.Conn())
				query := func(q db.DBTX, sql string, args ...any) error {
					return ways[i%len(ways)].make(t.Context(), q, sql, args...)
				}
				f := failures[i%len(failures)]
				p.requireFailed(t, f, f.make(t, tx, query))
				tx.Rollback(t.Context())
				conn.Release()
			}
			require.Zero(t, p.pool.Stat().AcquiredConns())
			require.LessOrEqual(t, p.pool.Stat().NewConnsCount(), int64(2), "no connection was replaced")
			p.requireNotes(t)
		})
	}
}

// joined is a caller's transaction, with the note 50 in it.
type joined struct {
	pgx.Tx
	conn *pgxpool.Conn
}

func (p *pipe) begin(t *testing.T) *joined {
	t.Helper()
	conn := p.acquire(t)
	outer, err := conn.Begin(t.Context())
	require.NoError(t, err)
	_, err = outer.Exec(t.Context(), "SET LOCAL lock_timeout = '1234ms'")
	require.NoError(t, err)
	_, err = outer.Exec(t.Context(), addNote, 50)
	require.NoError(t, err)
	return &joined{outer, conn}
}

// requireUsable checks that nothing of the failed part is left, and commits the caller's transaction with one more
// note, 51.
func (p *pipe) requireUsable(t *testing.T, outer *joined) {
	t.Helper()
	require.Empty(t, testdb.Holders(t, p.other, p.key))
	var timeout string
	require.NoError(t, outer.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&timeout))
	require.Equal(t, "1234ms", timeout)
	_, err := outer.Exec(t.Context(), addNote, 51)
	require.NoError(t, err)
	require.NoError(t, outer.Commit(t.Context()))
	p.requireNotes(t, 50, 51)
	p.clear(t)
	p.requireKept(t, outer.conn)
}

func TestPipelineJoinBecomesAPartOfTheCallersTransaction(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		for _, way := range ways {
			outer := p.begin(t)
			tx := pipeline.Join(outer)
			queue(t, tx.Before(), takeLock, p.key)
			queue(t, tx.After(), addNote, 2)
			require.NoError(t, way.make(ctx, tx.Last(), addNote, 1))
			tx.Rollback(ctx) // does no harm
			require.Len(t, testdb.Holders(t, p.other, p.key), 1, "the lock is held until the caller ends")
			p.requireNotes(t)
			require.NoError(t, outer.Commit(ctx))
			require.Empty(t, testdb.Holders(t, p.other, p.key))
			p.requireNotes(t, 1, 2, 50)
			p.clear(t)
			p.requireKept(t, outer.conn)
		}

		outer := p.begin(t)
		queue(t, pipeline.Join(outer).Last(), addNote, 1)
		require.NoError(t, outer.Rollback(ctx))
		p.requireNotes(t)
		p.requireKept(t, outer.conn)
	})
}

func TestPipelineJoinLeavesTheCallersTransactionUsableWhenAStatementFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		inEachFailure(t, func(t *testing.T, f failure, query func(db.DBTX, string, ...any) error) {
			t.Helper()
			if f.atCommit {
				return // it is the caller's
			}
			outer := p.begin(t)
			tx := pipeline.Join(outer)
			queue(t, tx.Before(), "SELECT pg_catalog.set_config('lock_timeout', '5ms', true)")
			queue(t, tx.Before(), takeLock, p.key)
			p.requireFailed(t, f, f.make(t, tx, query))
			tx.Rollback(t.Context())
			p.requireUsable(t, outer)
		})
	})
}

func TestPipelineJoinFreesItsLocksOnRollback(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		outer := p.begin(t)
		tx := pipeline.Join(outer)
		queue(t, tx.Before(), takeLock, p.key)
		queue(t, tx, addNote, 1)
		require.Len(t, testdb.Holders(t, p.other, p.key), 1)
		tx.Rollback(t.Context())
		p.requireUsable(t, outer)
	})
}

func TestPipelineJoinWorksInASavepoint(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		outer := p.begin(t)
		nested, err := outer.Begin(ctx)
		require.NoError(t, err)
		_, err = nested.Exec(ctx, addNote, 1)
		require.NoError(t, err)

		queue(t, pipeline.Join(nested).Last(), addNote, 2)
		tx := pipeline.Join(nested)
		queue(t, tx.Before(), takeLock, p.key)
		_, err = tx.Last().Exec(ctx, addNote, 0)
		requireSQLState(t, "23505", err)
		tx.Rollback(ctx)
		var inside int
		require.NoError(t, nested.QueryRow(ctx, "SELECT count(*) FROM notes WHERE n IN (1, 2)").Scan(&inside))
		require.Equal(t, 2, inside)

		require.NoError(t, nested.Rollback(ctx))
		p.requireUsable(t, outer)
	})
}

func TestPipelineJoinOfAFailedTransactionFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		outer := p.begin(t)
		_, err := outer.Exec(ctx, divide)
		require.Error(t, err)
		tx := pipeline.Join(outer)
		_, err = tx.Last().Exec(ctx, addNote, 1)
		p.requireFailed(t, failure{sqlState: "25P02", before: true}, err)
		tx.Rollback(ctx)
		require.ErrorIs(t, outer.Commit(ctx), pgx.ErrTxCommitRollback)
		p.requireNotes(t)
		p.requireKept(t, outer.conn)
	})
}

// What the server has done cannot be undone by then, as without Join: the caller finds the row.
func TestPipelineJoinLeavesTheCallersTransactionUsableWhenARowDoesNotFitItsVariable(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		outer := p.begin(t)
		tx := pipeline.Join(outer)
		var n struct{}
		require.Error(t, tx.Last().QueryRow(ctx, addNote, 1).Scan(&n))
		tx.Rollback(ctx)
		_, err := outer.Exec(ctx, "DELETE FROM notes WHERE n = 1")
		require.NoError(t, err)
		p.requireUsable(t, outer)
	})
}

func TestPipelineJoinOfAnEndedTransactionFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		outer := p.begin(t)
		require.NoError(t, outer.Rollback(ctx))
		tx := pipeline.Join(outer)
		_, err := tx.Last().Exec(ctx, addNote, 1)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		tx.Rollback(ctx)
		p.requireNotes(t)
		p.requireKept(t, outer.conn)
	})
}

func TestPipelineSendsNothingWhenTheContextHasEnded(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ended, end := context.WithCancel(t.Context())
		end()
		conn := p.acquire(t)
		for _, way := range ways {
			p.proxy.Reset()
			tx := pipeline.Begin(conn.Conn())
			err := way.make(ended, tx.Last(), addNote, 1)
			require.ErrorIs(t, err, context.Canceled, way.name)
			requireNoOutcomeError(t, err)
			tx.Rollback(ended)
			require.Zero(t, p.proxy.Traffic())
		}
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

func TestPipelineRollsBackWhenTheContextEndsBetweenQueries(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx, end := context.WithCancel(t.Context())
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		queue(t, tx.Before(), takeLock, p.key)
		_, err := tx.Exec(ctx, addNote, 1)
		require.NoError(t, err)
		end()
		_, err = tx.Last().Exec(ctx, addNote, 2)
		require.ErrorIs(t, err, context.Canceled)
		requireNoOutcomeError(t, err)
		tx.Rollback(ctx)
		require.Empty(t, testdb.Holders(t, p.other, p.key))
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

const queuedWaits = "a queued statement, then the last query"

// waitAtCommit makes COMMIT wait for the lock.
func (p *pipe) waitAtCommit(t *testing.T) {
	t.Helper()
	_, err := p.other.Exec(t.Context(), fmt.Sprintf(`
		CREATE FUNCTION wait() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_catalog.pg_advisory_xact_lock(%d); RETURN NULL; END $$;
		CREATE CONSTRAINT TRIGGER wait AFTER INSERT ON notes DEFERRABLE INITIALLY DEFERRED
		FOR EACH ROW WHEN (NEW.parent = 0) EXECUTE FUNCTION wait()`, p.key))
	require.NoError(t, err)
}

// stop is how a query that waits for a lock is stopped.
type stop struct {
	name  string
	known bool // the server says itself that it did not come to the end of COMMIT
	blind bool // the server does not notice, and goes on
	stop  func(t *testing.T, p *pipe, pid uint32, end context.CancelFunc)
	check func(t *testing.T, err error)
}

var stops = []stop{
	{
		"its context is cancelled", false, false,
		func(_ *testing.T, _ *pipe, _ uint32, end context.CancelFunc) { end() },
		func(t *testing.T, err error) {
			t.Helper()
			require.ErrorIs(t, err, context.Canceled)
		},
	},
	{
		"the server ends its session", true, false,
		func(t *testing.T, p *pipe, pid uint32, _ context.CancelFunc) {
			t.Helper()
			_, err := p.other.Exec(t.Context(), "SELECT pg_catalog.pg_terminate_backend($1)", int64(pid))
			require.NoError(t, err)
		},
		func(t *testing.T, err error) {
			t.Helper()
			requireSQLState(t, "57P01", err)
		},
	},
	{
		"its connection is cut", false, true,
		func(_ *testing.T, p *pipe, _ uint32, _ context.CancelFunc) {
			p.proxy.On(once(nobody, wire.Forward))
			p.proxy.CutAll()
		},
		func(t *testing.T, err error) {
			t.Helper()
			require.Error(t, err)
		},
	},
}

func TestPipelineSaysWhetherTheOutcomeIsUnknownWhenItIsStoppedWhileItWaits(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		p.waitAtCommit(t)
		for _, s := range stops {
			for _, c := range []struct {
				name    string
				unknown bool // COMMIT was sent
				make    func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error
			}{
				{queuedWaits, true, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					queue(t, tx.Before(), takeLock, p.key)
					_, err := tx.Last().Exec(ctx, addNote, 1)
					return err
				}},
				{"a queued statement, then a query", false, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					queue(t, tx.Before(), takeLock, p.key)
					_, err := tx.Exec(ctx, addNote, 1)
					return err
				}},
				{"the last query", true, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					queue(t, tx.Before(), addNote, 1)
					_, err := tx.Last().Exec(ctx, takeLock, p.key)
					return err
				}},
				{"a query", false, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					queue(t, tx, addNote, 1)
					_, err := tx.Exec(ctx, takeLock, p.key)
					return err
				}},
				{"a statement after the last query", true, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					queue(t, tx.After(), takeLock, p.key)
					_, err := tx.Last().Exec(ctx, addNote, 1)
					return err
				}},
				{"COMMIT", true, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
					t.Helper()
					_, err := tx.Last().Exec(ctx, addSlow, 1)
					return err
				}},
			} {
				t.Run(c.name+" waits when "+s.name, func(t *testing.T) {
					p.stopped(t, s, c.unknown, c.name, c.make)
				})
			}
		}
	})
}

// stopped makes a transaction that waits for a lock and is stopped.
func (p *pipe) stopped(t *testing.T, s stop, unknown bool, where string, query func(*testing.T, *pipeline.Tx, context.Context) error) {
	t.Helper()
	conn := p.acquire(t)
	warm := pipeline.Begin(conn.Conn())
	require.NoError(t, query(t, warm, t.Context()))
	warm.Rollback(t.Context())
	p.clear(t)
	holder := hold(t, p.url, p.key)
	pid := conn.Conn().PgConn().PID()
	ctx, end := context.WithCancel(t.Context())
	defer end()
	tx := pipeline.Begin(conn.Conn())

	failed := make(chan error, 1)
	go func() { failed <- query(t, tx, ctx) }()
	require.Equal(t, []uint32{pid}, testdb.WaitForWaiter(t, p.other, p.key, 1))
	s.stop(t, p, pid, end)
	err := <-failed
	s.check(t, err)
	if where == queuedWaits && conn.Conn().Config().DefaultQueryExecMode == pgx.QueryExecModeDescribeExec {
		unknown = errors.As(err, new(*pipeline.OutcomeError)) // never warm, it may have sent this alone
	} else if unknown && !s.known {
		requireOutcomeError(t, err)
	} else {
		requireNoOutcomeError(t, err)
	}
	tx.Rollback(ctx)
	p.requireReplaced(t, conn)
	p.proxy.On(nil)

	require.NoError(t, holder.Rollback(t.Context()))
	waitUntilGone(t, p.other, pid)
	if unknown && s.blind {
		p.requireNotes(t, 1) // it got the lock, and then to COMMIT
	} else {
		p.requireNotes(t)
	}
	p.clear(t)
}

func TestPipelineKnowsThatNothingWasSentOnAConnectionThatWasLost(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		require.NoError(t, conn.Ping(t.Context()))
		p.proxy.CutAll()
		tx := pipeline.Begin(conn.Conn())
		_, err := tx.Last().Exec(t.Context(), addNote, 1)
		require.Error(t, err)
		if conn.Conn().Config().DefaultQueryExecMode != pgx.QueryExecModeExec { // there pgx does not tell
			requireNoOutcomeError(t, err)
		}
		tx.Rollback(t.Context())
		p.requireReplaced(t, conn)
		p.requireNotes(t)
	})
}

func TestPipelineConnectionIsLostBetweenQueries(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for _, last := range []bool{false, true} {
			conn := p.acquire(t)
			pid := conn.Conn().PgConn().PID()
			tx := pipeline.Begin(conn.Conn())
			queue(t, tx.Before(), takeLock, p.key)
			queue(t, tx, addNote, 1)
			stops[1].stop(t, p, pid, nil)
			waitUntilGone(t, p.other, pid)
			q := db.DBTX(tx)
			if last {
				q = tx.Last()
			}
			_, err := q.Exec(t.Context(), addNote, 2)
			requireSQLState(t, "57P01", err)
			requireNoOutcomeError(t, err)
			tx.Rollback(t.Context())
			p.requireReplaced(t, conn)
			p.requireNotes(t)
		}
	})
}

// isBegin picks the message that brings BEGIN to the server.
func isBegin(m wire.Message) bool {
	return m.Is('B', 'Q') && strings.HasPrefix(m.Statement, "begin")
}

// isCommit picks the message that brings COMMIT to the server: the whole batch in the simple protocol.
func isCommit(m wire.Message) bool {
	return m.Is('E', 'Q') && strings.HasSuffix(m.Statement, "commit")
}

// endsBatch picks the message after which the server has all that was sent with COMMIT.
func endsBatch(m wire.Message) bool {
	return m.Is('S', 'Q') && strings.HasSuffix(m.Statement, "commit")
}

// isAnswer picks the server's answer to a statement that was run.
func isAnswer(m wire.Message) bool { return m.FromServer && m.Type == 'C' }

// isCommitted picks the server's answer to COMMIT.
func isCommitted(m wire.Message) bool { return isAnswer(m) && m.Tag == "COMMIT" }

// place is one at which a connection may break.
type place struct {
	name    string
	at      func(m wire.Message) bool
	action  wire.Action
	early   bool // in the mode that is never warm, COMMIT has not been sent
	written bool // what was the case
}

// cuts are the places in a warm transaction of one query. Its outcome is unknown at each.
var cuts = []place{
	{"before BEGIN reaches the server", isBegin, wire.CutBefore, true, false},
	{"within BEGIN", isBegin, wire.CutWithin, true, false},
	{"before COMMIT reaches the server", isCommit, wire.CutBefore, false, false},
	{"within COMMIT", isCommit, wire.CutWithin, false, false},
	{"after COMMIT has reached the server", endsBatch, wire.CutAfter, false, true},
	{"before the first answer", isAnswer, wire.CutBefore, true, true},
	{"within the first answer", isAnswer, wire.CutWithin, true, true},
	{"after the first answer", isAnswer, wire.CutAfter, true, true},
	{"before the answer to COMMIT", isCommitted, wire.CutBefore, false, true},
	{"within the answer to COMMIT", isCommitted, wire.CutWithin, false, true},
}

// wholeCuts are those of a warm transaction without BEGIN and COMMIT, which is what calls with one lock make.
var wholeCuts = []place{
	{"before the lock statement reaches the server", beginsWhole, wire.CutBefore, false, false},
	{"within the lock statement", beginsWhole, wire.CutWithin, false, false},
	{"before the end of the write reaches the server", endsWrite, wire.CutBefore, false, false},
	{"within the end of the write", endsWrite, wire.CutWithin, false, false},
	{"after the end of the write has reached the server", endsWrite, wire.CutAfter, false, true},
	{"before the first answer", isAnswer, wire.CutBefore, false, true},
	{"within the first answer", isAnswer, wire.CutWithin, false, true},
	{"after the first answer", isAnswer, wire.CutAfter, false, true},
	{"before the end of the answers", endsAnswers, wire.CutBefore, false, true},
	{"within the end of the answers", endsAnswers, wire.CutWithin, false, true},
}

// beginsWhole picks the message that brings the lock statement of a transaction without BEGIN.
func beginsWhole(m wire.Message) bool {
	return m.Is('B', 'Q') && strings.HasPrefix(m.Statement, "-- name: LockOneAtOnce ")
}

// endsWrite picks the message after which the server commits a transaction without COMMIT.
func endsWrite(m wire.Message) bool { return m.Is('S', 'Q') }

// endsAnswers picks the only answer to such a commit.
func endsAnswers(m wire.Message) bool { return m.FromServer && m.Type == 'Z' }

func TestPipelineOutcomeIsUnknownWhenTheConnectionBreaks(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		for _, cut := range cuts {
			for _, way := range ways {
				conn := p.acquire(t)
				require.NoError(t, way.make(ctx, pipeline.Begin(conn.Conn()).Last(), addNote, 1)) // now it is warm
				p.clear(t)

				pid := conn.Conn().PgConn().PID()
				p.proxy.On(once(cut.at, cut.action))
				tx := pipeline.Begin(conn.Conn())
				err := way.make(ctx, tx.Last(), addNote, 2)
				require.Error(t, err, cut.name)
				written := cut.written
				if cut.early && conn.Conn().Config().DefaultQueryExecMode == pgx.QueryExecModeDescribeExec {
					requireNoOutcomeError(t, err)
					written = false
				} else {
					requireOutcomeError(t, err)
				}
				tx.Rollback(ctx)
				p.requireReplaced(t, conn)
				waitUntilGone(t, p.other, pid)
				if written {
					p.requireNotes(t, 2)
				} else {
					p.requireNotes(t)
				}
				p.clear(t)
			}
		}
	})
}

func TestPipelineHasCommittedOnceTheAnswerToCommitIsThere(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		conn := p.acquire(t)
		p.proxy.On(once(isCommitted, wire.CutAfter))
		tx := pipeline.Begin(conn.Conn())
		_, err := tx.Last().Exec(ctx, addNote, 1)
		require.NoError(t, err)
		tx.Rollback(ctx)
		p.requireReplaced(t, conn)
		p.requireNotes(t, 1)
	})
}

func TestPipelineKnowsThatNothingIsCommittedWhenTheConnectionBreaksWithoutCommit(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		for _, cut := range cuts {
			if strings.Contains(cut.name, "COMMIT") {
				continue
			}
			conn := p.acquire(t)
			pid := conn.Conn().PgConn().PID()
			p.proxy.On(once(cut.at, cut.action))
			tx := pipeline.Begin(conn.Conn())
			_, err := tx.Exec(ctx, addNote, 1)
			require.Error(t, err, cut.name)
			requireNoOutcomeError(t, err)
			tx.Rollback(ctx)
			p.requireReplaced(t, conn)
			waitUntilGone(t, p.other, pid)
			p.requireNotes(t)
		}
	})
}

// A statement's types are asked for first, where they are not known, and COMMIT is not sent before the answer.
func TestPipelineKnowsThatNothingIsCommittedWhenTheConnectionBreaksBeforeTheTypesAreKnown(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
	} {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			p := setupPipe(t, url, withExecMode(mode))
			conn := p.acquire(t)
			p.proxy.On(once(func(m wire.Message) bool { return m.FromServer }, wire.CutBefore))
			tx := pipeline.Begin(conn.Conn())
			_, err := tx.Last().Exec(t.Context(), addNote, 1)
			require.Error(t, err)
			requireNoOutcomeError(t, err)
			tx.Rollback(t.Context())
			require.NotContains(t, p.proxy.Traffic().Statements, addNote)
			p.requireReplaced(t, conn)
			p.requireNotes(t)
		})
	}
}

// once is a hook that does the action at the first message that fits. Nor do cancel requests reach the server, which
// pgx sends when it has lost a connection: a broken network passes none.
func once(at func(wire.Message) bool, action wire.Action) func(wire.Message) wire.Action {
	var done atomic.Bool
	return func(m wire.Message) wire.Action {
		switch {
		case m.Is(wire.CancelRequest):
			return wire.CutBefore
		case at(m) && done.CompareAndSwap(false, true):
			return action
		}
		return wire.Forward
	}
}

func nobody(wire.Message) bool { return false }
