package tests

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
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

// items is the namespace of a host that lets an owner have so many items.
var items = repository.MustNamespace("guard_item")

// hostDBTX and hostQueries are what sqlc makes for a host that has emit_methods_with_db_argument, where each call
// names its connection. For the other style, New(tx), there is the module's own package db.
type hostDBTX interface {
	Exec(ctx context.Context, sql string, args ...interface{}) (pgconn.CommandTag, error)
	Query(ctx context.Context, sql string, args ...interface{}) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...interface{}) pgx.Row
}

type hostQueries struct{}

func (hostQueries) countItems(ctx context.Context, tx hostDBTX, owner string) (n int, err error) {
	err = tx.QueryRow(ctx, "SELECT count(*) FROM public.items WHERE owner = $1", owner).Scan(&n)
	return n, err
}

func (hostQueries) insertItem(ctx context.Context, tx hostDBTX, owner string) error {
	_, err := tx.Exec(ctx, insertItem, owner)
	return err
}

const (
	insertItem = "INSERT INTO public.items (owner) VALUES ($1)"

	// insertOrphan fails when it is committed, with 23503.
	insertOrphan = "INSERT INTO public.items (owner, parent) VALUES ($1, -1)"
)

// itemsURL returns a database with the host's table.
func itemsURL(t *testing.T) string {
	t.Helper()
	url := testdb.URL(t)
	testdb.Exec(t, url, `CREATE TABLE public.items (
		id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
		owner  text NOT NULL,
		parent bigint REFERENCES public.items DEFERRABLE INITIALLY DEFERRED)`)
	return url
}

// slowItems keep an item invisible to others for a while after it was decided on.
var slowItems = []string{
	`CREATE FUNCTION public.slow_item() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.15); RETURN NEW; END $$`,
	`CREATE TRIGGER slow BEFORE INSERT ON public.items FOR EACH ROW EXECUTE FUNCTION public.slow_item()`,
}

// alterDatabase changes a default of all who connect from now on.
func alterDatabase(t *testing.T, url, setting, value string) {
	t.Helper()
	testdb.Exec(t, url, fmt.Sprintf(
		`DO $$ BEGIN EXECUTE format('ALTER DATABASE %%I SET %s = %%L', current_database(), '%s'); END $$`, setting, value))
}

// errFull is the host's own refusal.
var errFull = errors.New("the owner has enough items")

// insertWithin is the host's rule: count, decide, insert.
func insertWithin(limit int, owner string) func(context.Context, *repository.Tx) error {
	return func(ctx context.Context, tx *repository.Tx) error {
		n, err := hostQueries{}.countItems(ctx, tx, owner)
		if err != nil {
			return err
		}
		if n >= limit {
			return errFull
		}
		return hostQueries{}.insertItem(ctx, tx.Last(), owner)
	}
}

// guarded is a service of a host with one connection, so that the backend that is watched is the one that works,
// and an owner whom nobody else has.
type guarded struct {
	url      string
	pool     *pgxpool.Pool
	pid      uint32
	repo     *repository.Repository
	owner    string
	lock     repository.Lock
	key      int64
	observer *pgx.Conn
}

func newGuarded(t *testing.T, url string, opts ...repository.Option) *guarded {
	t.Helper()
	return newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1)), opts...)
}

func newGuardedOn(t *testing.T, url string, pool *pgxpool.Pool, opts ...repository.Option) *guarded {
	t.Helper()
	if len(opts) == 0 {
		opts = []repository.Option{repository.WithLockTimeout(patience), repository.WithHoldTimeout(patience)}
	}
	g := &guarded{url: url, pool: pool, observer: testdb.Conn(t, url)}
	g.renew(t)
	var err error
	g.repo, err = repository.New(pool, opts...)
	require.NoError(t, err)
	return g
}

// renew gives the service another owner, and the connection that it has by now.
func (g *guarded) renew(t *testing.T) {
	t.Helper()
	g.owner, g.pid = uuid.NewString(), pidOf(t, g.pool)
	g.lock, g.key = items.Exclusive(g.owner), itemKey(t, g.owner)
}

func itemKey(t *testing.T, id string) int64 {
	t.Helper()
	key, err := repository.Key("guard_item", id)
	require.NoError(t, err)
	return key
}

// guard runs fn under the owner's lock.
func (g *guarded) guard(t *testing.T, fn func(ctx context.Context, tx *repository.Tx) error) error {
	t.Helper()
	return g.repo.Guard(t.Context(), []repository.Lock{g.lock}, fn)
}

func (g *guarded) count(t *testing.T) int {
	t.Helper()
	n, err := hostQueries{}.countItems(t.Context(), g.observer, g.owner)
	require.NoError(t, err)
	return n
}

// requireHealthy requires that nothing is left of the last call: no lock, no item beyond n, and the connection is
// back in the pool, the same one and outside a transaction.
func (g *guarded) requireHealthy(t *testing.T, n int) {
	t.Helper()
	require.Equal(t, n, g.count(t))
	require.Empty(t, locksOf(t, g.observer, g.pid))
	require.Zero(t, g.pool.Stat().AcquiredConns())
	conn, err := g.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	require.Equal(t, g.pid, conn.Conn().PgConn().PID())
	require.Equal(t, "I", string(conn.Conn().PgConn().TxStatus()))
	require.NoError(t, conn.Ping(t.Context()))
}

// locksOf returns the advisory locks that a backend holds now, and for each whether it is exclusive.
func locksOf(t *testing.T, observer *pgx.Conn, pid uint32) map[int64]bool {
	t.Helper()
	held := map[int64]bool{}
	rows, err := observer.Query(t.Context(), `
		SELECT (classid::bigint << 32) | objid::bigint, mode = 'ExclusiveLock'
		FROM pg_catalog.pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = $1::bigint`, int64(pid))
	require.NoError(t, err)
	var key int64
	var exclusive bool
	_, err = pgx.ForEachRow(rows, []any{&key, &exclusive}, func() error {
		held[key] = held[key] || exclusive
		return nil
	})
	require.NoError(t, err)
	return held
}

// background is inBackground for a call that returns an error only.
func background(t *testing.T, call func() error) (wait func() error) {
	t.Helper()
	result := inBackground(t, func() (struct{}, error) { return struct{}{}, call() })
	return func() error {
		t.Helper()
		_, err := result()
		return err
	}
}

func TestGuardWorksInEveryExecMode(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)))
			require.NoError(t, g.guard(t, insertWithin(2, g.owner)))
			require.NoError(t, g.guard(t, insertWithin(2, g.owner)))
			require.True(t, g.guard(t, insertWithin(2, g.owner)) == errFull) //nolint:errorlint // the very same
			g.requireHealthy(t, 2)

			// The style New(tx), and rows, and several statements without Last.
			user := uuid.New()
			require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				for range 2 {
					if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
						return err
					}
				}
				if _, err := db.New(tx).SetupCountPending(ctx, pg(user)); err != nil {
					return err
				}
				_, err := db.New(tx).SetupListByUser(ctx, db.SetupListByUserParams{
					UserID: pg(user), BeforeCreatedAt: time.Now(), BeforeID: pg(uuid.Max), MaxRows: 10,
				})
				return err
			}))
			require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				_, err := db.New(tx.Last()).SetupInsertWithinLimit(ctx,
					db.SetupInsertWithinLimitParams{ID: pg(uuid.New()), UserID: pg(user), MaxPending: 1})
				return err
			}))
			g.requireHealthy(t, 4)
			require.Equal(t, []int{1}, slots(t, g.pool, user))
		})
	}
}

// What a function does that ends badly, and what must come of it: nothing written, nothing held, the connection kept.
func TestGuardUndoesAll(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	type end struct {
		name string
		fn   func(ctx context.Context, g *guarded, tx *repository.Tx) error
		want func(t *testing.T, err error)
	}
	isRollback := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
		require.ErrorContains(t, err, "latchkey: Guard: ")
		require.False(t, repository.IsRetryable(err))
	}
	isError := func(t *testing.T, err error) {
		t.Helper()
		require.Error(t, err, "nothing was written, or without the lock, and nobody is told")
	}
	own := errors.New("the host's own error")
	isOwn := func(t *testing.T, err error) {
		t.Helper()
		require.True(t, err == own, "%v", err) //nolint:errorlint // the very same
	}
	ends := []end{
		{"an error before any statement", func(context.Context, *guarded, *repository.Tx) error { return own }, isOwn},
		{"an error after a statement", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
				return err
			}
			return own
		}, isOwn},
		{"an error with rows left open", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
				return err
			}
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 100000)")
			if err != nil {
				return err
			}
			rows.Next()
			return own
		}, isOwn},
		{"an error after a failed statement", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			_, _ = tx.Exec(ctx, divide)
			return own
		}, isOwn},
		{"a swallowed failure of the first statement", func(ctx context.Context, _ *guarded, tx *repository.Tx) error {
			_, _ = tx.Exec(ctx, divide)
			return nil
		}, isRollback},
		{"a swallowed failure of a later statement", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			_, _ = tx.Exec(ctx, divide)
			return nil
		}, isRollback},
		{"a swallowed failure in the middle of unread rows", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			rows, err := tx.Query(ctx, "SELECT 1 / (3 - n) FROM generate_series(1, 5) AS n")
			if err == nil {
				rows.Next()
			}
			return nil
		}, isRollback},
		{"a swallowed failure in the middle of the unread rows of Last", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			rows, err := tx.Last().Query(ctx, "SELECT 1 / (3 - n) FROM generate_series(1, 5) AS n")
			if err == nil {
				rows.Next()
			}
			return nil
		}, isRollback},
		{"a swallowed failure of Last", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			_, _ = tx.Last().Exec(ctx, divide)
			return nil
		}, isRollback},
		{"a swallowed failure of Last as the only statement", func(ctx context.Context, _ *guarded, tx *repository.Tx) error {
			_, _ = tx.Last().Exec(ctx, divide)
			return nil
		}, isRollback},
		{"a swallowed failure of COMMIT with Last", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_, _ = tx.Last().Exec(ctx, insertOrphan, g.owner)
			return nil
		}, isError},
		{"a statement after the failure of COMMIT with Last", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_, _ = tx.Last().Exec(ctx, insertOrphan, g.owner)
			return hostQueries{}.insertItem(ctx, tx, g.owner) // neither in a transaction nor under a lock
		}, func(t *testing.T, err error) {
			t.Helper()
			require.ErrorIs(t, err, pgx.ErrTxClosed)
		}},
		{"a failure of COMMIT", func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_, err := tx.Exec(ctx, insertOrphan, g.owner)
			return err
		}, func(t *testing.T, err error) {
			t.Helper()
			requireSQLState(t, "23503", err)
			require.ErrorContains(t, err, "latchkey: Guard: ")
			require.False(t, repository.IsRetryable(err))
		}},
	}
	for name, read := range misreads {
		ends = append(ends, end{"a failure of COMMIT with Last, whose row does not fit " + name, func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			err := read(ctx, tx.Last(), insertOrphan+" RETURNING -1", g.owner)
			require.Error(t, err)
			return err
		}, isError}, end{"a swallowed one, whose row does not fit " + name, func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = read(ctx, tx.Last(), insertOrphan+" RETURNING -1", g.owner)
			return nil
		}, func(t *testing.T, err error) {
			t.Helper()
			isRollback(t, err)
			requireSQLState(t, "23503", err)
		}})
	}
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			pool := testdb.PoolAt(t, url, maxConns(1), withExecMode(mode))
			g := newGuardedOn(t, url, pool)
			for _, e := range ends {
				t.Run("after "+e.name, func(t *testing.T) {
					g.renew(t)
					calls := 0
					err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
						calls++
						return e.fn(ctx, g, tx)
					})
					e.want(t, err)
					require.Equal(t, 1, calls)
					g.requireHealthy(t, 0)
				})
			}
		})
	}
}

// misreads are ways to read a row of -1 into a variable that does not take it.
var misreads = map[string]func(ctx context.Context, q db.DBTX, sql string, args ...any) error{
	"in Scan": func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		var n uint8
		return q.QueryRow(ctx, sql, args...).Scan(&n)
	},
	"in the Scan of rows that are left open": func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		rows, err := q.Query(ctx, sql, args...)
		if err != nil || !rows.Next() {
			return errors.Join(err, rows.Err())
		}
		var n uint8
		return rows.Scan(&n)
	},
	"in a struct": func(ctx context.Context, q db.DBTX, sql string, args ...any) error {
		rows, err := q.Query(ctx, sql, args...)
		if err != nil {
			return err
		}
		_, err = pgx.CollectOneRow(rows, pgx.RowToStructByPos[struct{ N uint8 }])
		return err
	},
}

// What Scan has to say comes after the commit, and does not undo it.
func TestGuardHasCommittedWhenTheRowOfLastDoesNotFit(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)))
			for name, read := range misreads {
				for _, swallow := range []bool{true, false} {
					g.renew(t)
					var scan error
					err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
						scan = read(ctx, tx.Last(), insertItem+" RETURNING -1", g.owner)
						if swallow {
							return nil
						}
						return scan
					})
					require.Error(t, scan, name)
					if swallow {
						require.NoError(t, err, name)
					} else {
						require.True(t, err == scan, "%s: %v", name, err) //nolint:errorlint // the very same
					}
					g.requireHealthy(t, 1)
				}
			}
		})
	}
}

// pgx closes the connection of a batch that it cannot encode. That says nothing about the server or the network, and to
// make the same call again would close the next one.
func TestGuardArgumentThatDoesNotFitIsNoLostConnection(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	testdb.Exec(t, url, "CREATE TABLE public.small (n int4)")
	big := func(ctx context.Context, q db.DBTX) error {
		_, err := q.Exec(ctx, "INSERT INTO public.small VALUES ($1)", int64(1)<<40)
		return err
	}
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)))
			for _, later := range []bool{false, true} {
				for _, last := range []bool{false, true} {
					what := fmt.Sprintf("after another statement: %t, last: %t", later, last)
					err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
						if later {
							require.NoError(t, hostQueries{}.insertItem(ctx, tx, g.owner), what)
						}
						if last {
							return big(ctx, tx.Last())
						}
						return big(ctx, tx)
					})
					require.Error(t, err, what)
					require.NotErrorIs(t, err, repository.ErrConnectionLost, what)
					require.NotErrorIs(t, err, repository.ErrOutcomeUnknown, what)
					require.False(t, repository.IsRetryable(err), "%s: %v", what, err)
					g.pid = pidOf(t, g.pool) // where it was closed, the pool has another one
					g.requireHealthy(t, 0)
				}
			}
			require.NoError(t, g.guard(t, insertWithin(1, g.owner)))
			g.requireHealthy(t, 1)
		})
	}
}

// A first statement that fails before the server has begun the transaction, or instead of it, must not leave what
// follows without a transaction and its locks.
func TestGuardRunsNothingWithoutItsLocks(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	firsts := map[string]func(ctx context.Context, tx *repository.Tx) error{
		"does not exist": func(ctx context.Context, tx *repository.Tx) error { // 42P01, in some modes while it is prepared
			_, err := tx.Exec(ctx, "SELECT FROM public.nothing")
			return err
		},
		"cannot be parsed": func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Exec(ctx, "SELEKT")
			return err
		},
		"has an argument that cannot be sent": func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Exec(ctx, insertItem, make(chan int))
			return err
		},
		"has too many arguments": func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Exec(ctx, insertItem, "a", "b")
			return err
		},
		"fails when it is committed": func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Last().Exec(ctx, insertOrphan, "nobody")
			return err
		},
		"fails when it is committed and returns a row": func(ctx context.Context, tx *repository.Tx) error {
			var id int64
			return tx.Last().QueryRow(ctx, insertOrphan+" RETURNING id", "nobody").Scan(&id)
		},
	}
	thens := map[string]func(ctx context.Context, g *guarded, tx *repository.Tx) error{
		"a statement": func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			return hostQueries{}.insertItem(ctx, tx, g.owner)
		},
		"the last statement": func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			return hostQueries{}.insertItem(ctx, tx.Last(), g.owner)
		},
		"a statement whose error is not heeded": func(ctx context.Context, g *guarded, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			return nil
		},
		"nothing": func(context.Context, *guarded, *repository.Tx) error { return nil },
	}
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)))
			for firstName, first := range firsts {
				for thenName, then := range thens {
					for _, held := range []bool{true, false} {
						what := fmt.Sprintf("%s after a first one that %s, lock held by another: %t", thenName, firstName, held)
						g.renew(t)
						var holder pgx.Tx
						if held {
							holder = hold(t, url, g.key)
						}
						err := g.repo.TryGuard(t.Context(), []repository.Lock{g.lock}, func(ctx context.Context, tx *repository.Tx) error {
							require.Error(t, first(ctx, tx), what)
							return then(ctx, g, tx)
						})
						if held {
							require.Error(t, err, what)
							require.NoError(t, holder.Rollback(t.Context()))
						}
						want := 0
						if err == nil && thenName != "nothing" {
							want = 1 // it was not sent, so it did no harm to the transaction
						}
						require.Equal(t, want, g.count(t), "%s: %v", what, err)
						require.NoError(t, g.pool.Ping(t.Context()), what)
					}
				}
			}
		})
	}
}

func TestGuardPassesOn(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	insert := func(t *testing.T, g *guarded, then func()) func(context.Context, *repository.Tx) error {
		t.Helper()
		return func(ctx context.Context, tx *repository.Tx) error {
			if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
				return err
			}
			then()
			return nil
		}
	}
	observed := func(calls *[]repository.CallDone) []repository.Option {
		return []repository.Option{
			repository.WithLockTimeout(patience),
			repository.WithObserver(repository.Observer{CallDone: func(_ context.Context, c repository.CallDone) {
				*calls = append(*calls, c)
			}}),
		}
	}

	t.Run("a panic, with its value, after all is undone", func(t *testing.T) {
		t.Parallel()
		var calls []repository.CallDone
		g := newGuarded(t, url, observed(&calls)...)
		value := &struct{ int }{42}
		func() {
			defer func() { require.Same(t, value, recover()) }()
			_ = g.guard(t, insert(t, g, func() { panic(value) }))
			require.Fail(t, "the panic did not reach the caller")
		}()
		g.requireHealthy(t, 0)
		for _, c := range calls {
			require.Error(t, c.Err, "the observer is told that a call succeeded which panicked")
		}
	})
	t.Run("a panic while rows are open", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		require.PanicsWithValue(t, "midway", func() {
			_ = g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
					return err
				}
				rows, err := tx.Query(ctx, "SELECT generate_series(1, 100000)")
				if err != nil {
					return err
				}
				rows.Next()
				panic("midway")
			})
		})
		g.requireHealthy(t, 0)
	})
	t.Run("a panic after Last, which has committed", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		require.PanicsWithValue(t, "too late", func() {
			_ = g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				if err := (hostQueries{}).insertItem(ctx, tx.Last(), g.owner); err != nil {
					return err
				}
				panic("too late")
			})
		})
		g.requireHealthy(t, 1)
	})
	t.Run("an error after Last, which has committed", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		require.True(t, errFull == g.guard(t, func(ctx context.Context, tx *repository.Tx) error { //nolint:errorlint // the very same
			if err := (hostQueries{}).insertItem(ctx, tx.Last(), g.owner); err != nil {
				return err
			}
			return errFull
		}))
		g.requireHealthy(t, 1)
	})
	t.Run("the end of its goroutine", func(t *testing.T) {
		t.Parallel()
		var calls []repository.CallDone
		g := newGuarded(t, url, observed(&calls)...)
		ended, returned := make(chan struct{}), false
		go func() {
			defer close(ended)
			_ = g.guard(t, insert(t, g, runtime.Goexit))
			returned = true
		}()
		select {
		case <-ended:
		case <-time.After(patience):
			require.FailNow(t, "the goroutine does not end")
		}
		require.False(t, returned)
		g.requireHealthy(t, 0)
		for _, c := range calls {
			require.Error(t, c.Err, "the observer is told that a call succeeded which never returned")
		}
	})
	t.Run("the context's values, and its end", func(t *testing.T) {
		t.Parallel()
		type key struct{}
		g := newGuarded(t, url)
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), key{}, "value"))
		err := g.repo.Guard(ctx, []repository.Lock{g.lock}, func(ctx context.Context, tx *repository.Tx) error {
			require.Equal(t, "value", ctx.Value(key{}))
			if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
				return err
			}
			cancel()
			return hostQueries{}.insertItem(ctx, tx, g.owner)
		})
		require.ErrorIs(t, err, context.Canceled)
		g.requireHealthy(t, 0) // the context had ended before anything was sent
	})
}

func TestGuardMisuseOfTx(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)

	t.Run("after the function has returned is an error, and sends nothing", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		g := newGuardedOn(t, url, w.pool)
		for _, result := range []error{nil, errFull} {
			var kept *repository.Tx
			err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				kept = tx
				_, err := hostQueries{}.countItems(ctx, tx, g.owner)
				return errors.Join(err, result)
			})
			require.ErrorIs(t, err, result)
			w.proxy.Reset()
			for _, q := range []db.DBTX{kept, kept.Last()} {
				for _, way := range ways {
					require.ErrorIs(t, way.make(t.Context(), q, insertItem, g.owner), pgx.ErrTxClosed, way.name)
				}
			}
			require.Zero(t, w.proxy.Traffic())
		}
		g.requireHealthy(t, 0)
	})
	t.Run("after Last is an error", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			require.NoError(t, hostQueries{}.insertItem(ctx, tx.Last(), g.owner))
			require.ErrorIs(t, hostQueries{}.insertItem(ctx, tx, g.owner), pgx.ErrTxClosed)
			require.ErrorIs(t, hostQueries{}.insertItem(ctx, tx.Last(), g.owner), pgx.ErrTxClosed)
			return nil
		}))
		g.requireHealthy(t, 1)
	})
	for _, mode := range execModes {
		t.Run("by ending it with a query is an error of the next one, which does not run without the locks: "+mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)))
			for _, end := range []string{"COMMIT", "ROLLBACK"} {
				for _, first := range []bool{false, true} {
					for _, swallow := range []bool{false, true} {
						g.renew(t)
						err := g.guard(t, func(ctx context.Context, tx *repository.Tx) (err error) {
							if !first {
								require.NoError(t, hostQueries{}.insertItem(ctx, tx, g.owner))
							}
							_, err = tx.Exec(ctx, end)
							require.NoError(t, err)
							for _, q := range []db.DBTX{tx, tx.Last()} {
								for _, way := range ways {
									err = way.make(ctx, q, insertItem, g.owner)
									require.ErrorIs(t, err, pgx.ErrTxClosed, "%s after %s", way.name, end)
								}
							}
							if swallow {
								return nil
							}
							return err
						})
						require.ErrorIs(t, err, pgx.ErrTxClosed, "after %s, swallowed: %t", end, swallow)
						require.False(t, repository.IsRetryable(err))
						want := 0
						if end == "COMMIT" && !first {
							want = 1
						}
						g.requireHealthy(t, want)
					}
				}
			}
		})
	}
	t.Run("from two goroutines at once is an error, and the transaction goes on", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		// The first goroutine's statement waits for a row that the test holds.
		blocker := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		var row int64
		require.NoError(t, blocker.QueryRow(t.Context(),
			"INSERT INTO public.items (owner) VALUES ('somebody') RETURNING id").Scan(&row))
		require.NoError(t, blocker.Commit(t.Context()))
		blocker = begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		lockRow := "SELECT 1 FROM public.items WHERE id = $1 FOR UPDATE"
		_, err := blocker.Exec(t.Context(), lockRow, row)
		require.NoError(t, err)

		require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			first := background(t, func() error {
				_, err := tx.Exec(ctx, lockRow, row)
				return err
			})
			testdb.WaitForLockWait(t, g.observer, g.pid)
			for _, q := range []db.DBTX{tx, tx.Last()} {
				for _, way := range ways {
					require.EqualError(t, way.make(ctx, q, insertItem, g.owner), pipeline.ErrInUse.Error(), way.name)
				}
			}
			require.NoError(t, blocker.Commit(ctx))
			require.NoError(t, first())
			return hostQueries{}.insertItem(ctx, tx.Last(), g.owner)
		}))
		g.requireHealthy(t, 1)
	})
	t.Run("while rows are open is an error, and the transaction goes on", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			rows, err := tx.Query(ctx, "SELECT generate_series(1, 3)")
			require.NoError(t, err)
			require.True(t, rows.Next())
			for _, way := range ways {
				require.ErrorIs(t, way.make(ctx, tx, insertItem, g.owner), pipeline.ErrInUse, way.name)
			}
			require.True(t, rows.Next(), "and so do the rows")
			rows.Close()
			require.NoError(t, rows.Err())
			return hostQueries{}.insertItem(ctx, tx, g.owner)
		}))
		g.requireHealthy(t, 1)
	})
	t.Run("by returning while another goroutine still waits for it loses the connection, and nothing is written", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		other := itemKey(t, g.owner+" other")
		blocker := hold(t, url, other)
		var second func() error
		err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			require.NoError(t, hostQueries{}.insertItem(ctx, tx, g.owner))
			second = background(t, func() error {
				_, err := tx.Exec(ctx, takeLock, other)
				return err
			})
			testdb.WaitForLockWait(t, g.observer, g.pid)
			return nil
		})
		require.ErrorIs(t, err, repository.ErrConnectionLost)
		require.Error(t, second())
		require.NoError(t, blocker.Rollback(t.Context()))
		waitUntilGone(t, g.observer, g.pid)
		require.Zero(t, g.count(t))
		require.NoError(t, g.pool.Ping(t.Context()))
	})
	t.Run("with rows left open at the end commits, as the rows are closed", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		for _, last := range []bool{false, true} {
			require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				q := hostDBTX(tx)
				if last {
					q = tx.Last()
				}
				rows, err := q.Query(ctx, insertItem+", ($1), ($1) RETURNING id", g.owner)
				require.NoError(t, err)
				require.True(t, rows.Next())
				return nil
			}))
		}
		g.requireHealthy(t, 6)
	})
}

func TestGuardRoundTrips(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	guard := func(fn func(context.Context, *repository.Tx) error) func(*testing.T, *wired, []repository.Lock) {
		return func(t *testing.T, w *wired, two []repository.Lock) {
			t.Helper()
			require.NoError(t, w.repo.Guard(t.Context(), two, fn))
		}
	}
	count := func(ctx context.Context, tx hostDBTX) error {
		_, err := hostQueries{}.countItems(ctx, tx, "trips")
		return err
	}
	for _, test := range []struct {
		name string
		want int
		call func(t *testing.T, w *wired, two []repository.Lock)
	}{
		{"a lock, a count and an insert through Last are two", 2, guard(func(ctx context.Context, tx *repository.Tx) error {
			return errors.Join(count(ctx, tx), hostQueries{}.insertItem(ctx, tx.Last(), "trips"))
		})},
		{"a lock, a count and an insert without Last are three", 3, guard(func(ctx context.Context, tx *repository.Tx) error {
			return errors.Join(count(ctx, tx), hostQueries{}.insertItem(ctx, tx, "trips"))
		})},
		{"one statement through Last is one", 1, guard(func(ctx context.Context, tx *repository.Tx) error {
			return hostQueries{}.insertItem(ctx, tx.Last(), "trips")
		})},
		{"one statement with named arguments through Last is one", 1, guard(func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Last().Exec(ctx, "INSERT INTO public.items (owner) VALUES (@owner)", pgx.NamedArgs{"owner": "trips"})
			return err
		})},
		{"a function without a statement is one", 1, guard(func(context.Context, *repository.Tx) error { return nil })},
		{"a refusal after the count is two, with the rollback", 2, func(t *testing.T, w *wired, two []repository.Lock) {
			t.Helper()
			require.ErrorIs(t, w.repo.Guard(t.Context(), two, insertWithin(0, "trips")), errFull)
		}},
		{"TryGuard costs what Guard does", 2, func(t *testing.T, w *wired, two []repository.Lock) {
			t.Helper()
			require.NoError(t, w.repo.TryGuard(t.Context(), two, insertWithin(1000, "trips")))
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, url)
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				test.call(t, w, []repository.Lock{items.Exclusive(test.name), items.Shared(test.name + "2")})
			})
			require.Equal(t, test.want, traffic.RoundTrips, "sent %q", traffic.Statements)
			require.Len(t, lockStatements(traffic), 1, "sent %q", traffic.Statements)
		})
	}
	t.Run("GuardTx is one", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				require.NoError(t, w.repo.GuardTx(t.Context(), tx, []repository.Lock{items.Exclusive("trips"), items.Shared("trips 2")}))
			})
			require.Equal(t, 1, traffic.RoundTrips, "sent %q", traffic.Statements)
			require.Len(t, lockStatements(traffic), 1)
			return nil
		}))
	})
}

func lockStatements(traffic wire.Traffic) (all []string) {
	for _, s := range traffic.Statements {
		if strings.Contains(s, "pg_advisory") || strings.Contains(s, "pg_try_advisory") {
			all = append(all, s)
		}
	}
	return all
}

func TestGuardLocks(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)

	for name, o := range map[string]func(*repository.Repository) func(context.Context, []repository.Lock, func(context.Context, *repository.Tx) error) error{
		"Guard": func(r *repository.Repository) func(context.Context, []repository.Lock, func(context.Context, *repository.Tx) error) error {
			return r.Guard
		},
		"TryGuard": func(r *repository.Repository) func(context.Context, []repository.Lock, func(context.Context, *repository.Tx) error) error {
			return r.TryGuard
		},
	} {
		t.Run(name+" takes each key once, exclusive where one of its locks is, and none before the first statement", func(t *testing.T) {
			t.Parallel()
			g := newGuarded(t, url)
			id := func(n int) string { return fmt.Sprint(g.owner, n) }
			locks := []repository.Lock{
				items.Shared(id(1)), items.Exclusive(id(2)), items.Shared(id(3)), items.Exclusive(id(1)), items.Shared(id(2)),
				items.Shared(id(3)), items.Exclusive(id(4)), items.Exclusive(id(4)),
			}
			given := slices.Clone(locks)
			require.NoError(t, o(g.repo)(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error {
				require.Empty(t, locksOf(t, g.observer, g.pid))
				_, err := hostQueries{}.countItems(ctx, tx, g.owner)
				require.Equal(t, map[int64]bool{
					itemKey(t, id(1)): true, itemKey(t, id(2)): true, itemKey(t, id(3)): false, itemKey(t, id(4)): true,
				}, locksOf(t, g.observer, g.pid))
				return err
			}))
			require.Equal(t, given, locks, "the caller's slice is the caller's")
			g.requireHealthy(t, 0)
		})
	}
	t.Run("are taken when a function without a statement returns", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		holder := hold(t, url, g.key)
		returned := make(chan struct{})
		wait := background(t, func() error {
			return g.guard(t, func(context.Context, *repository.Tx) error {
				close(returned)
				return nil
			})
		})
		<-returned
		require.Equal(t, []uint32{g.pid}, testdb.WaitForWaiter(t, g.observer, g.key, 1))
		require.NoError(t, holder.Rollback(t.Context()))
		require.NoError(t, wait())
		g.requireHealthy(t, 0)
	})
	t.Run("are not to be had, which a function without a statement is told too", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		hold(t, url, g.key)
		err := g.repo.TryGuard(t.Context(), []repository.Lock{g.lock}, func(context.Context, *repository.Tx) error { return nil })
		require.Equal(t, "guard_item", requireBusy(t, err, repository.WhereAdvisory).Namespace)
		require.ErrorContains(t, err, "latchkey: TryGuard: ")
		g.requireHealthy(t, 0)
	})
	t.Run("are held by many at once if all are shared, and by one if it is exclusive", func(t *testing.T) {
		t.Parallel()
		readers := []*guarded{newGuarded(t, url), newGuarded(t, url), newGuarded(t, url)}
		writer := newGuarded(t, url)
		shared := []repository.Lock{items.Shared(writer.owner)}
		inside, leave := make(chan struct{}, len(readers)), make(chan struct{})
		var waits []func() error
		for _, r := range readers {
			waits = append(waits, background(t, func() error {
				return r.repo.Guard(t.Context(), shared, func(ctx context.Context, tx *repository.Tx) error {
					_, err := hostQueries{}.countItems(ctx, tx, writer.owner)
					inside <- struct{}{}
					<-leave
					return err
				})
			}))
		}
		for range readers {
			<-inside // all of them, together
		}
		// A try for shared would be granted, a try for exclusive is not.
		other := newGuarded(t, url)
		nothing := func(context.Context, *repository.Tx) error { return nil }
		require.NoError(t, other.repo.TryGuard(t.Context(), shared, nothing))
		requireBusy(t, other.repo.TryGuard(t.Context(), []repository.Lock{writer.lock}, nothing), repository.WhereAdvisory)

		write := background(t, func() error { return writer.guard(t, insertWithin(1, writer.owner)) })
		require.Equal(t, []uint32{writer.pid}, testdb.WaitForWaiter(t, writer.observer, writer.key, 1))
		// Documented: a shared try is refused while an exclusive one is waited for.
		requireBusy(t, other.repo.TryGuard(t.Context(), shared, nothing), repository.WhereAdvisory)
		require.Zero(t, writer.count(t))
		close(leave)
		for _, wait := range waits {
			require.NoError(t, wait())
		}
		require.NoError(t, write())
		writer.requireHealthy(t, 1)
	})
	t.Run("of other namespaces and ids are others", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		hold(t, url, setupKey(t, uuid.MustParse(g.owner)))
		hold(t, url, itemKey(t, g.owner+" "))
		require.NoError(t, g.repo.TryGuard(t.Context(), []repository.Lock{g.lock}, insertWithin(1, g.owner)))
	})
}

// One more lock is refused before anything is sent. The test is not parallel: so many locks push the names of other
// tests' locks out of the register of recent ones.
func TestGuardTakes1024Locks(t *testing.T) { //nolint:paralleltest // see above
	g := newGuarded(t, itemsURL(t))
	locks := make([]repository.Lock, 0, repository.MaxLocks+1)
	for n := range cap(locks) {
		locks = append(locks, items.Exclusive(fmt.Sprint(n)))
	}
	require.NoError(t, g.repo.Guard(t.Context(), locks[:repository.MaxLocks], func(ctx context.Context, tx *repository.Tx) error {
		err := hostQueries{}.insertItem(ctx, tx, g.owner)
		require.Len(t, locksOf(t, g.observer, g.pid), 1024)
		return err
	}))
	require.NoError(t, pgx.BeginFunc(t.Context(), g.pool, func(tx pgx.Tx) error {
		return g.repo.GuardTx(t.Context(), tx, locks[:repository.MaxLocks])
	}))
	g.requireHealthy(t, 1)

	repo, dials := nowhere(t)
	never := func(context.Context, *repository.Tx) error { panic("called") }
	for _, err := range []error{
		repo.Guard(t.Context(), locks, never),
		repo.TryGuard(t.Context(), locks, never),
		repo.GuardTx(t.Context(), struct{ pgx.Tx }{}, locks),
	} {
		require.ErrorIs(t, err, repository.ErrTooManyLocks)
		require.ErrorIs(t, err, repository.ErrInvalid)
		require.False(t, repository.IsRetryable(err))
	}
	require.Zero(t, dials.Load())
}

// nowhere returns a Repository that cannot connect, and how often it tried.
func nowhere(t *testing.T) (*repository.Repository, *atomic.Int64) {
	t.Helper()
	dials := new(atomic.Int64)
	pool := testdb.PoolAt(t, "postgres://nobody@127.0.0.1:1/none?sslmode=disable", func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
			dials.Add(1)
			return nil, errors.New("there is no server here")
		}
	})
	repo, err := repository.New(pool)
	require.NoError(t, err)
	return repo, dials
}

func TestGuardRefusesBadArgumentsBeforeAnySQL(t *testing.T) {
	t.Parallel()
	repo, dials := nowhere(t)
	called := false
	fn := func(context.Context, *repository.Tx) error {
		called = true
		return nil
	}
	good := []repository.Lock{items.Exclusive("1")}
	calls := map[string]func(locks []repository.Lock) error{
		"Guard":    func(locks []repository.Lock) error { return repo.Guard(t.Context(), locks, fn) },
		"TryGuard": func(locks []repository.Lock) error { return repo.TryGuard(t.Context(), locks, fn) },
		"GuardTx":  func(locks []repository.Lock) error { return repo.GuardTx(t.Context(), struct{ pgx.Tx }{}, locks) },
	}
	for method, call := range calls {
		for name, bad := range map[string]struct {
			locks    []repository.Lock
			argument string
		}{
			"no locks":                   {nil, "locks"},
			"an empty slice":             {[]repository.Lock{}, "locks"},
			"the zero Lock":              {[]repository.Lock{{}}, "namespace"},
			"the zero Lock among others": {[]repository.Lock{good[0], {}}, "namespace"},
			"the zero Namespace":         {[]repository.Lock{repository.Namespace{}.Exclusive("1")}, "namespace"},
			"an empty id":                {[]repository.Lock{good[0], items.Shared("")}, "id"},
			"an id with NUL":             {[]repository.Lock{items.Exclusive("a\x00b")}, "id"},
			"an id that is not UTF-8":    {[]repository.Lock{items.Exclusive("a\xff")}, "id"},
			"an id above 1 KiB":          {[]repository.Lock{items.Exclusive(strings.Repeat("i", 1025))}, "id"},
		} {
			err := call(bad.locks)
			require.ErrorIs(t, err, repository.ErrInvalid, "%s with %s", method, name)
			var invalid *repository.InvalidError
			require.ErrorAs(t, err, &invalid)
			require.Equal(t, bad.argument, invalid.Argument, "%s with %s", method, name)
			require.ErrorContains(t, err, "latchkey: "+method+": ")
			require.NotErrorIs(t, err, repository.ErrTooManyLocks)
			require.False(t, repository.IsRetryable(err))
		}
	}
	require.ErrorIs(t, repo.Guard(t.Context(), good, nil), repository.ErrInvalid)
	require.ErrorIs(t, repo.TryGuard(t.Context(), good, nil), repository.ErrInvalid)
	require.ErrorIs(t, repo.GuardTx(t.Context(), nil, good), repository.ErrInvalid)
	require.Zero(t, dials.Load())
	require.False(t, called)

	// The control: what is good gets as far as the network.
	require.ErrorIs(t, repo.Guard(t.Context(), good, fn), repository.ErrConnectionLost)
	require.NotZero(t, dials.Load())
	require.False(t, called)
}

func TestGuardLimitHoldsInARace(t *testing.T) {
	t.Parallel()
	const limit = 3
	// count returns how many items there are, and how many of the callers were refused.
	count := func(t *testing.T, r racers, owner string, errs []error) (made, refused int) {
		t.Helper()
		for _, err := range errs {
			if err != nil {
				require.True(t, err == errFull, "%v", err) //nolint:errorlint // the very same
				refused++
			}
		}
		made, err := hostQueries{}.countItems(t.Context(), r[0].pool, owner)
		require.NoError(t, err)
		return made, refused
	}
	for _, isolation := range []string{"repeatable read", "serializable"} {
		t.Run("also where the default is "+isolation+", unlike the same lock in a transaction of the default", func(t *testing.T) {
			t.Parallel()
			const callers = 30
			url := itemsURL(t)
			alterDatabase(t, url, "default_transaction_isolation", isolation)
			r, observer := newRacers(t, url, callers), testdb.Conn(t, url)
			// race lets all ask while the lock is held, so that each has begun before any of them has written.
			race := func(call func(c racer, owner string) error) (made, refused int) {
				owner := uuid.NewString()
				holder := hold(t, url, itemKey(t, owner))
				all := inBackground(t, func() ([]error, error) {
					return r.atOnce(func(c racer) error { return call(c, owner) }), nil
				})
				testdb.WaitForWaiter(t, observer, itemKey(t, owner), callers)
				require.NoError(t, holder.Rollback(t.Context()))
				errs, err := all()
				require.NoError(t, err)
				return count(t, r, owner, errs)
			}
			made, refused := race(func(c racer, owner string) error {
				return c.repo.Guard(t.Context(), []repository.Lock{items.Exclusive(owner)}, insertWithin(limit, owner))
			})
			require.Equal(t, limit, made)
			require.Equal(t, callers-limit, refused)

			if isolation == "serializable" {
				return // there the server ends those who would break the rule, with 40001
			}
			made, _ = race(func(c racer, owner string) error {
				return pgx.BeginFunc(t.Context(), c.pool, func(tx pgx.Tx) error {
					if _, err := tx.Exec(t.Context(), takeLock, itemKey(t, owner)); err != nil {
						return err
					}
					n, err := hostQueries{}.countItems(t.Context(), tx, owner)
					if err != nil || n >= limit {
						return errors.Join(err, errFull)
					}
					return hostQueries{}.insertItem(t.Context(), tx, owner)
				})
			})
			require.Equal(t, callers, made, "each counted what there was before it waited")
		})
	}
	t.Run("while every insert takes its time, unlike with a lock for each caller, or a shared one", func(t *testing.T) {
		t.Parallel()
		const callers = 20
		url := itemsURL(t)
		testdb.Exec(t, url, slowItems...)
		r := newRacers(t, url, callers)
		race := func(lock func(c racer, owner string) repository.Lock) (made, refused int) {
			owner := uuid.NewString()
			return count(t, r, owner, r.atOnce(func(c racer) error {
				return c.repo.Guard(t.Context(), []repository.Lock{lock(c, owner)}, insertWithin(limit, owner))
			}))
		}
		made, refused := race(func(_ racer, owner string) repository.Lock { return items.Exclusive(owner) })
		require.Equal(t, limit, made)
		require.Equal(t, callers-limit, refused)

		made, _ = race(func(c racer, owner string) repository.Lock { return items.Exclusive(fmt.Sprint(owner, c.n)) })
		require.Greater(t, made, limit, "the guard is off, so this race must break the rule")
		made, _ = race(func(_ racer, owner string) repository.Lock { return items.Shared(owner) })
		require.Greater(t, made, limit, "the guard is off, so this race must break the rule")
	})
}

func TestGuardBudget(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	const budget = 500 * time.Millisecond

	for _, mode := range execModes {
		t.Run("is one for five keys that are let go 400 ms apart, with "+mode.String(), func(t *testing.T) {
			t.Parallel()
			g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), withExecMode(mode)), repository.WithLockTimeout(budget))
			var locks []repository.Lock
			var keys []int64
			for n := range 5 {
				id := fmt.Sprint(g.owner, n)
				locks, keys = append(locks, items.Exclusive(id)), append(keys, itemKey(t, id))
			}
			slices.Sort(keys) // so that every wait is for the key that is let go next
			var holders []pgx.Tx
			for _, key := range keys {
				holders = append(holders, hold(t, url, key))
			}
			done := make(chan struct{})
			released := background(t, func() error {
				for _, holder := range holders {
					select {
					case <-done:
					case <-time.After(400 * time.Millisecond):
					}
					if err := holder.Rollback(context.Background()); err != nil {
						return err
					}
				}
				return nil
			})
			before := time.Now()
			err := g.repo.Guard(t.Context(), locks, insertWithin(1, g.owner))
			took := time.Since(before)
			close(done)
			// With a budget for each key it would have succeeded, after 2 s.
			requireAbout(t, budget, requireBusy(t, err, repository.WhereAdvisory).Waited, took)
			require.NoError(t, released())
			g.requireHealthy(t, 0)
			require.NoError(t, g.repo.Guard(t.Context(), locks, insertWithin(1, g.owner)))
		})
	}
	t.Run("is none for TryGuard, which takes all or nothing", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url, repository.WithLockTimeout(24*24*time.Hour)) // it would end the test, not the wait
		var locks []repository.Lock
		for n := range 3 {
			locks = append(locks, items.Exclusive(fmt.Sprint(g.owner, n)))
		}
		holder := hold(t, url, itemKey(t, fmt.Sprint(g.owner, 1)))
		var first error
		err := background(t, func() error {
			return g.repo.TryGuard(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error {
				first = hostQueries{}.insertItem(ctx, tx.Last(), g.owner)
				return first
			})
		})()
		require.True(t, err == first) //nolint:errorlint // the very same
		require.Equal(t, "guard_item", requireBusy(t, err, repository.WhereAdvisory).Namespace)
		requireSQLState(t, "55P03", err)
		g.requireHealthy(t, 0)

		err = g.repo.TryGuard(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error {
			_ = hostQueries{}.insertItem(ctx, tx, g.owner)
			require.Empty(t, locksOf(t, g.observer, g.pid)[itemKey(t, fmt.Sprint(g.owner, 1))])
			return nil
		})
		require.ErrorIs(t, err, pgx.ErrTxCommitRollback)
		g.requireHealthy(t, 0)

		require.NoError(t, holder.Rollback(t.Context()))
		require.NoError(t, g.repo.TryGuard(t.Context(), locks, insertWithin(1, g.owner)))
		g.requireHealthy(t, 1)
	})
	t.Run("also bounds the wait for a row that somebody else has", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url, repository.WithLockTimeout(200*time.Millisecond))
		require.NoError(t, g.guard(t, insertWithin(1, g.owner)))
		writer := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := writer.Exec(t.Context(), "SELECT FROM public.items WHERE owner = $1 FOR UPDATE", g.owner)
		require.NoError(t, err)
		err = g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Last().Exec(ctx, "DELETE FROM public.items WHERE owner = $1", g.owner)
			return err
		})
		requireBusy(t, err, repository.WhereRow)
		g.requireHealthy(t, 1)
	})
	t.Run("leaves the function the statement_timeout of its role", func(t *testing.T) {
		t.Parallel()
		g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["statement_timeout"] = "20s"
		}))
		require.NoError(t, g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			for range 2 {
				var got string
				if err := tx.QueryRow(ctx, "SHOW statement_timeout").Scan(&got); err != nil {
					return err
				}
				require.Equal(t, "20s", got)
			}
			return nil
		}))
	})
	t.Run("does not call a statement of the function busy that took longer than its role lets it", func(t *testing.T) {
		t.Parallel()
		g := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["statement_timeout"] = "250ms"
		}))
		err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			return err
		})
		requireSQLState(t, "57014", err)
		require.NotErrorIs(t, err, repository.ErrLockBusy)
		require.False(t, repository.IsRetryable(err))
		g.requireHealthy(t, 0)
	})
}

func TestGuardWithTheOnlyConnection(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	const lock, hold = 200 * time.Millisecond, 400 * time.Millisecond
	for name, second := range map[string]struct {
		call func(ctx context.Context, g *guarded) error
		want error
	}{
		"a method of the Repository": {func(ctx context.Context, g *guarded) error {
			_, err := g.repo.CreateSetup(ctx, uuid.New(), nil)
			return err
		}, repository.ErrLockBusy},
		"another Guard": {func(ctx context.Context, g *guarded) error {
			return g.repo.Guard(ctx, []repository.Lock{g.lock}, func(context.Context, *repository.Tx) error { return nil })
		}, repository.ErrLockBusy},
		"a method that only reads": {func(ctx context.Context, g *guarded) error {
			_, err := g.repo.CountPendingSetups(ctx, uuid.New())
			return err
		}, context.DeadlineExceeded},
		"the pool itself": {func(ctx context.Context, g *guarded) error {
			conn, err := g.pool.Acquire(ctx)
			if err == nil {
				conn.Release()
			}
			return err
		}, context.DeadlineExceeded},
	} {
		for _, held := range []bool{false, true} {
			t.Run(fmt.Sprintf("a function that asks %s for a second one, locks held: %t, is told", name, held), func(t *testing.T) {
				t.Parallel()
				g := newGuarded(t, url, repository.WithLockTimeout(lock), repository.WithHoldTimeout(hold))
				before := time.Now()
				err := background(t, func() error {
					return g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
						if held {
							if err := (hostQueries{}).insertItem(ctx, tx, g.owner); err != nil {
								return err
							}
						}
						return second.call(ctx, g)
					})
				})()
				require.ErrorIs(t, err, second.want)
				if errors.Is(err, repository.ErrLockBusy) {
					requireBusy(t, err, repository.WherePool)
				}
				require.Less(t, time.Since(before), lock+hold+patience/2)
				require.Zero(t, g.count(t))
				require.NoError(t, g.pool.Ping(t.Context()))
			})
		}
	}
}

func TestGuardHoldTimeout(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	// idle runs a function that has its lock and then does nothing until the server has ended its session; then next.
	idle := func(t *testing.T, g *guarded, next func(ctx context.Context, tx *repository.Tx) error) error {
		t.Helper()
		other := newGuarded(t, url)
		var waiting func() error
		err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
			require.NoError(t, hostQueries{}.insertItem(ctx, tx, g.owner))
			waiting = background(t, func() error {
				return other.repo.Guard(t.Context(), []repository.Lock{g.lock}, insertWithin(1, other.owner))
			})
			waitUntilGone(t, g.observer, g.pid)
			require.NoError(t, waiting(), "who waits gets the lock")
			return next(ctx, tx)
		})
		require.Zero(t, g.count(t), "nothing was written")
		require.NoError(t, g.pool.Ping(t.Context()))
		return err
	}
	requireLost := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, repository.ErrConnectionLost)
		require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
		require.True(t, repository.IsRetryable(err))
	}
	nexts := map[string]func(g *guarded) func(context.Context, *repository.Tx) error{
		"and then goes on": func(g *guarded) func(context.Context, *repository.Tx) error {
			return func(ctx context.Context, tx *repository.Tx) error { return hostQueries{}.insertItem(ctx, tx, g.owner) }
		},
		"and then comes to its last statement": func(g *guarded) func(context.Context, *repository.Tx) error {
			return func(ctx context.Context, tx *repository.Tx) error {
				return hostQueries{}.insertItem(ctx, tx.Last(), g.owner)
			}
		},
		"and then returns": func(*guarded) func(context.Context, *repository.Tx) error {
			return func(context.Context, *repository.Tx) error { return nil }
		},
	}
	for name, next := range nexts {
		t.Run("ends the session of a function that idles "+name, func(t *testing.T) {
			t.Parallel()
			g := newGuarded(t, url, repository.WithLockTimeout(patience), repository.WithHoldTimeout(100*time.Millisecond))
			err := idle(t, g, next(g))
			requireLost(t, err)
			requireSQLState(t, "25P03", err)
		})
		t.Run("is not needed where the database has a timeout of its own, for a function that idles "+name, func(t *testing.T) {
			t.Parallel()
			pool := testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["idle_in_transaction_session_timeout"] = "100ms"
			})
			g := newGuardedOn(t, url, pool, repository.WithLockTimeout(patience), repository.WithHoldTimeout(24*24*time.Hour))
			err := idle(t, g, next(g))
			requireLost(t, err)
			requireSQLState(t, "25P03", err)
		})
	}
	t.Run("is the server's for the transaction only, unless the database has its own", func(t *testing.T) {
		t.Parallel()
		url := itemsURL(t)
		for own, want := range map[string]string{"0": "7s", "12345ms": "12345ms", "1h": "1h"} {
			alterDatabase(t, url, "idle_in_transaction_session_timeout", own)
			g := newGuarded(t, url, repository.WithHoldTimeout(7*time.Second))
			show := func(q hostDBTX) (got string) {
				require.NoError(t, q.QueryRow(t.Context(), "SHOW idle_in_transaction_session_timeout").Scan(&got))
				return got
			}
			require.NoError(t, g.guard(t, func(_ context.Context, tx *repository.Tx) error {
				require.Equal(t, want, show(tx))
				return nil
			}))
			require.Equal(t, own, show(g.pool))
		}
	})
	t.Run("ends the function's context, which began with the call", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url, repository.WithLockTimeout(time.Minute), repository.WithHoldTimeout(time.Hour))
		started := time.Now()
		require.NoError(t, g.guard(t, func(ctx context.Context, _ *repository.Tx) error {
			deadline, ok := ctx.Deadline()
			require.True(t, ok)
			require.False(t, deadline.Before(started.Add(time.Hour+time.Minute)))
			require.False(t, deadline.After(time.Now().Add(time.Hour+time.Minute)))
			return nil
		}))
	})
}

func TestGuardLosesItsConnection(t *testing.T) {
	t.Parallel()
	url := itemsURL(t)
	t.Run("between two statements: nothing is written, the caller is told, and others get the lock", func(t *testing.T) {
		t.Parallel()
		for _, swallow := range []bool{false, true} {
			g := newGuarded(t, url)
			err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				require.NoError(t, hostQueries{}.insertItem(ctx, tx, g.owner))
				_, err := g.observer.Exec(ctx, "SELECT pg_terminate_backend($1)", int64(g.pid))
				require.NoError(t, err)
				waitUntilGone(t, g.observer, g.pid)
				err = hostQueries{}.insertItem(ctx, tx, g.owner)
				require.ErrorIs(t, err, repository.ErrConnectionLost)
				if swallow {
					return nil
				}
				return err
			})
			require.ErrorIs(t, err, repository.ErrConnectionLost, "swallowed: %t", swallow)
			require.True(t, repository.IsRetryable(err))
			require.Zero(t, g.count(t))
			require.NoError(t, g.guard(t, insertWithin(1, g.owner)))
		}
	})
	t.Run("to a server that takes no writes, so that the next call gets another", func(t *testing.T) {
		t.Parallel()
		pool := testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
			c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
		})
		g := newGuardedOn(t, url, pool)
		err := g.guard(t, insertWithin(1, g.owner))
		require.ErrorIs(t, err, repository.ErrReadOnly)
		require.True(t, repository.IsRetryable(err))
		require.NotEqual(t, g.pid, pidOf(t, g.pool))
	})
}

// Many callers, each with several locks in any order and of any mode, beside calls with a lock of the library's own:
// none deadlocks, and what is written under an exclusive lock is not lost.
func TestGuardManyLocksInAnyOrder(t *testing.T) {
	t.Parallel()
	const callers, ids, picks = 8, 5, 3
	each := 300
	if os.Getenv("LATCHKEY_LONG") != "" {
		each = 2000
	}
	setup := func(t *testing.T) string {
		t.Helper()
		url := itemsURL(t)
		testdb.Exec(t, url, "CREATE TABLE public.counters (id integer PRIMARY KEY, n integer NOT NULL)",
			"INSERT INTO public.counters SELECT n, 0 FROM generate_series(0, 4) AS n")
		return url
	}
	const read = "SELECT n FROM public.counters WHERE id = $1"

	t.Run("neither deadlocks nor loses anything", func(t *testing.T) {
		t.Parallel()
		url := setup(t)
		users := make([]uuid.UUID, ids)
		for i := range users {
			users[i] = uuid.New()
		}
		var written, created, balance [ids]atomic.Int64
		// work counts up under an exclusive lock, and reads twice the same under a shared one.
		work := func(ctx context.Context, q hostDBTX, exclusive map[int]bool) error {
			for id, write := range exclusive {
				var n, again int
				if err := q.QueryRow(ctx, read, id).Scan(&n); err != nil {
					return err
				}
				if write {
					if _, err := q.Exec(ctx, "UPDATE public.counters SET n = $2 WHERE id = $1", id, n+1); err != nil {
						return err
					}
					continue
				}
				if err := q.QueryRow(ctx, read, id).Scan(&again); err != nil {
					return err
				}
				if n != again {
					return fmt.Errorf("%d was written while its lock was shared", id)
				}
			}
			return nil
		}
		r := newRacers(t, url, callers)
		accounts := make([]uuid.UUID, ids)
		for i := range accounts {
			account, err := r[0].repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: users[i]})
			require.NoError(t, err)
			accounts[i] = account.ID
			_, err = r[0].repo.Deposit(t.Context(), repository.DepositParams{AccountID: account.ID, Amount: callers * 2000})
			require.NoError(t, err)
			balance[i].Store(callers * 2000)
		}
		errs := r.atOnce(func(c racer) error {
			for range each {
				var locks []repository.Lock
				exclusive := map[int]bool{}
				for range picks {
					id := rand.IntN(ids)
					if rand.IntN(2) == 0 {
						locks = append(locks, items.Shared(fmt.Sprint("many", id)))
						exclusive[id] = exclusive[id] || false
					} else {
						locks = append(locks, items.Exclusive(fmt.Sprint("many", id)))
						exclusive[id] = true
					}
				}
				user := rand.IntN(ids)
				var err error
				switch kind := rand.IntN(5); kind {
				case 0, 1:
					err = c.repo.Guard(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error { return work(ctx, tx, exclusive) })
				case 2: // joined, all of the host's locks in the first call
					err = pgx.BeginTxFunc(t.Context(), c.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
						if err := c.repo.GuardTx(t.Context(), tx, locks); err != nil {
							return err
						}
						if err := work(t.Context(), tx, exclusive); err != nil {
							return err
						}
						_, err := c.repo.CreateSetupTx(t.Context(), tx, users[user], &repository.CreateSetupOpts{MaxPending: 1000})
						return err
					})
					if err == nil {
						created[user].Add(1)
					}
				case 3:
					to := (user + 1 + rand.IntN(ids-1)) % ids
					_, err = c.repo.Transfer(t.Context(), repository.TransferParams{From: accounts[user], To: accounts[to], Amount: 1})
					if err == nil {
						balance[user].Add(-1)
						balance[to].Add(1)
					}
					clear(exclusive)
				default:
					_, err = c.repo.CreateSetup(t.Context(), users[user], &repository.CreateSetupOpts{MaxPending: 1000})
					if err == nil {
						created[user].Add(1)
					}
					clear(exclusive)
				}
				if errors.Is(err, repository.ErrPendingExists) { // a long run comes there
					continue
				}
				if err != nil {
					return err
				}
				for id, write := range exclusive {
					if write {
						written[id].Add(1)
					}
				}
			}
			return nil
		})
		require.NoError(t, errors.Join(errs...))
		for id := range ids {
			var n int64
			require.NoError(t, r[0].pool.QueryRow(t.Context(), read, id).Scan(&n))
			require.Equal(t, written[id].Load(), n)
			require.Positive(t, n)
			require.NoError(t, r[0].pool.QueryRow(t.Context(), pendingOf, users[id]).Scan(&n))
			require.Equal(t, created[id].Load(), n)
			require.Positive(t, n)
			account, err := r[0].repo.GetAccount(t.Context(), accounts[id])
			require.NoError(t, err)
			require.Equal(t, balance[id].Load(), account.Balance)
		}
	})
	t.Run("deadlocks if the locks are taken as they come", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, setup(t), callers)
		var deadlocks atomic.Int64
		errs := r.atOnce(func(c racer) error {
			for deadlocks.Load() == 0 {
				err := pgx.BeginFunc(t.Context(), c.pool, func(tx pgx.Tx) error {
					for range picks {
						if _, err := tx.Exec(t.Context(), takeLock, int64(rand.IntN(ids))); err != nil {
							return err
						}
					}
					return nil
				})
				var pgErr *pgconn.PgError
				if errors.As(err, &pgErr) && pgErr.Code == "40P01" {
					deadlocks.Add(1)
				} else if err != nil {
					return err
				}
			}
			return nil
		})
		require.NoError(t, errors.Join(errs...))
		require.Positive(t, deadlocks.Load())
	})
}
