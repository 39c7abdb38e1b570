package tests

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"
	"weak"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// The ids of these namespaces are few and fixed, so that no two of them meet in the register of recent names.
var (
	owners = repository.MustNamespace("order_owner", repository.Rank(1))
	parts  = repository.MustNamespace("order_part", repository.Rank(2))
)

// Two ids whose keys are in the order of their names, and the keys.
const (
	ownerA, ownerB       = "5", "1"
	keyA           int64 = -3932688354906185314
	keyB           int64 = 480224186618436812
)

// partX has a key below that of ownerB, so that the order of ranks is not that of keys.
const (
	partX       = "2"
	keyX  int64 = -8697674010223890233
)

func TestOrderOfTheseKeys(t *testing.T) {
	t.Parallel()
	for key, text := range map[int64][2]string{keyA: {"order_owner", ownerA}, keyB: {"order_owner", ownerB}, keyX: {"order_part", partX}} {
		got, err := repository.Key(text[0], text[1])
		require.NoError(t, err)
		require.Equal(t, key, got, "%v", text)
	}
	require.Less(t, keyA, keyB)
	require.Less(t, keyX, keyB)
}

// ordered is a host's transaction beside a Repository.
type ordered struct {
	repo     *repository.Repository
	conn     *pgx.Conn
	pid      uint32
	tx       pgx.Tx
	observer *pgx.Conn
}

func newOrdered(t *testing.T, url string, opts ...repository.Option) *ordered {
	t.Helper()
	// The Repository's own pool has no part in a transaction that it joins, and here could have none.
	pool := testdb.PoolAt(t, "postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	repo, err := repository.New(pool, append(opts, repository.WithLockTimeout(patience))...)
	require.NoError(t, err)
	conn := testdb.Conn(t, url)
	return &ordered{repo, conn, conn.PgConn().PID(), begin(t, conn, pgx.TxOptions{}), testdb.Conn(t, url)}
}

func (o *ordered) take(t *testing.T, locks ...repository.Lock) error {
	t.Helper()
	return o.repo.GuardTx(t.Context(), o.tx, locks)
}

func (o *ordered) requireUsable(t *testing.T) {
	t.Helper()
	id := uuid.New()
	_, err := o.tx.Exec(t.Context(), "INSERT INTO public.host (id) VALUES ($1)", id)
	require.NoError(t, err)
	require.NoError(t, o.tx.Commit(t.Context()))
	waitUntil(t, o.observer, "SELECT EXISTS (SELECT FROM public.host WHERE id = $1)", id)
	require.Empty(t, locksOf(t, o.observer, o.pid))
}

// The test is not parallel, though its parts are: the register of recent names is the process's, and what other tests
// lock meanwhile could push a name out of it.
func TestOrder(t *testing.T) {
	name := func(namespace, id string, key int64, rank int32) repository.LockName {
		return repository.LockName{Namespace: namespace, ID: id, Key: key, Rank: rank}
	}
	a, b, x := name("order_owner", ownerA, keyA, 1), name("order_owner", ownerB, keyB, 1), name("order_part", partX, keyX, 2)

	for _, test := range []struct {
		name   string
		first  []repository.Lock
		second []repository.Lock
		broken []repository.LockOrderError
		held   map[int64]bool // after the second, if it is let go on
	}{
		{
			"a lower rank after a higher one",
			[]repository.Lock{parts.Exclusive(partX)},
			[]repository.Lock{owners.Exclusive(ownerB)},
			[]repository.LockOrderError{{Held: x, Asked: b}},
			map[int64]bool{keyX: true, keyB: true},
		},
		{
			"a lower key after a higher one of the same rank",
			[]repository.Lock{owners.Exclusive(ownerB)},
			[]repository.Lock{owners.Exclusive(ownerA)},
			[]repository.LockOrderError{{Held: b, Asked: a}},
			map[int64]bool{keyA: true, keyB: true},
		},
		{
			"a lower key after a higher one although both are shared",
			[]repository.Lock{owners.Shared(ownerB)},
			[]repository.Lock{owners.Shared(ownerA)},
			[]repository.LockOrderError{{Held: b, Asked: a}},
			map[int64]bool{keyA: false, keyB: false},
		},
		{
			"an exclusive lock after the same one shared",
			[]repository.Lock{owners.Shared(ownerA)},
			[]repository.Lock{owners.Exclusive(ownerA)},
			[]repository.LockOrderError{{Held: a, Asked: a}},
			map[int64]bool{keyA: true},
		},
		{
			"one that is right beside one that is not",
			[]repository.Lock{owners.Exclusive(ownerB)},
			[]repository.Lock{parts.Exclusive(partX), owners.Exclusive(ownerA)},
			[]repository.LockOrderError{{Held: b, Asked: a}},
			map[int64]bool{keyA: true, keyB: true, keyX: true},
		},
		{
			"one that comes before two",
			[]repository.Lock{owners.Exclusive(ownerB), parts.Shared(partX)},
			[]repository.Lock{owners.Exclusive(ownerA)},
			[]repository.LockOrderError{{Held: x, Asked: a}, {Held: b, Asked: a}},
			map[int64]bool{keyA: true, keyB: true, keyX: false},
		},
		{
			"a higher rank after a lower one", // although its key is lower
			[]repository.Lock{owners.Exclusive(ownerB)},
			[]repository.Lock{parts.Exclusive(partX)},
			nil,
			map[int64]bool{keyB: true, keyX: true},
		},
		{
			"a higher key after a lower one of the same rank",
			[]repository.Lock{owners.Exclusive(ownerA)},
			[]repository.Lock{owners.Exclusive(ownerB)},
			nil,
			map[int64]bool{keyA: true, keyB: true},
		},
		{
			"one that is held already, below another",
			[]repository.Lock{owners.Exclusive(ownerA), owners.Exclusive(ownerB)},
			[]repository.Lock{owners.Exclusive(ownerA)},
			nil,
			map[int64]bool{keyA: true, keyB: true},
		},
		{
			"a shared one that is held exclusive already",
			[]repository.Lock{owners.Exclusive(ownerA), parts.Exclusive(partX)},
			[]repository.Lock{owners.Shared(ownerA)},
			nil,
			map[int64]bool{keyA: true, keyX: true},
		},
		{
			"a shared one that is held already",
			[]repository.Lock{owners.Shared(ownerA), parts.Shared(partX)},
			[]repository.Lock{owners.Shared(ownerA), parts.Shared(partX)},
			nil,
			map[int64]bool{keyA: false, keyX: false},
		},
	} {
		t.Run(test.name+", in a test", func(t *testing.T) {
			t.Parallel()
			o := newOrdered(t, hostURL(t), repository.WithLockOrderCheck())
			require.NoError(t, o.take(t, test.first...))
			before := locksOf(t, o.observer, o.pid)
			err := o.take(t, test.second...)
			if len(test.broken) == 0 {
				require.NoError(t, err)
				require.Equal(t, test.held, locksOf(t, o.observer, o.pid))
				return
			}
			require.ErrorIs(t, err, repository.ErrLockOrder)
			require.False(t, repository.IsRetryable(err))
			var broken *repository.LockOrderError
			require.ErrorAs(t, err, &broken)
			require.Contains(t, test.broken, *broken)
			require.Equal(t, before, locksOf(t, o.observer, o.pid), "no lock was taken")
			o.requireUsable(t)
		})
		t.Run(test.name+", in production", func(t *testing.T) {
			t.Parallel()
			var broken []repository.LockOrderError
			o := newOrdered(t, hostURL(t), repository.WithObserver(repository.Observer{LockOrder: func(_ context.Context, e *repository.LockOrderError) {
				broken = append(broken, *e)
			}}))
			require.NoError(t, o.take(t, test.first...))
			require.NoError(t, o.take(t, test.second...))
			require.ElementsMatch(t, test.broken, broken)
			require.Equal(t, test.held, locksOf(t, o.observer, o.pid), "the call went on")
			o.requireUsable(t)
		})
	}

	t.Run("names both locks in the error", func(t *testing.T) {
		t.Parallel()
		o := newOrdered(t, hostURL(t), repository.WithLockOrderCheck())
		require.NoError(t, o.take(t, parts.Exclusive(partX)))
		require.EqualError(t, o.take(t, owners.Exclusive(ownerB)), fmt.Sprintf(
			"latchkey: GuardTx: locks are taken out of order: lock order_owner:%s (rank 1, key %d) asked for while lock order_part:%s (rank 2, key %d) is held",
			ownerB, keyB, partX, keyX))
	})
	t.Run("of setup requests counts too, as rank 0", func(t *testing.T) {
		t.Parallel()
		o := newOrdered(t, hostURL(t), repository.WithLockOrderCheck())
		require.NoError(t, o.take(t, owners.Exclusive(ownerA)))
		_, err := o.repo.CreateSetupTx(t.Context(), o.tx, uuid.New(), nil)
		require.ErrorIs(t, err, repository.ErrLockOrder)
		o.requireUsable(t)

		o = newOrdered(t, hostURL(t), repository.WithLockOrderCheck())
		_, err = o.repo.CreateSetupTx(t.Context(), o.tx, uuid.New(), nil)
		require.NoError(t, err)
		require.NoError(t, o.take(t, owners.Exclusive(ownerA)))
		o.requireUsable(t)
	})
	t.Run("is asked of the server, so a lock that a savepoint gave back does not count", func(t *testing.T) {
		t.Parallel()
		o := newOrdered(t, hostURL(t), repository.WithLockOrderCheck())
		savepoint, err := o.tx.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, o.repo.GuardTx(t.Context(), savepoint, []repository.Lock{parts.Exclusive(partX)}))
		require.ErrorIs(t, o.repo.GuardTx(t.Context(), savepoint, []repository.Lock{owners.Exclusive(ownerA)}), repository.ErrLockOrder)
		require.NoError(t, savepoint.Rollback(t.Context()))
		require.Empty(t, locksOf(t, o.observer, o.pid))
		require.NoError(t, o.take(t, owners.Exclusive(ownerA)))

		// And one that a released savepoint took still does.
		savepoint, err = o.tx.Begin(t.Context())
		require.NoError(t, err)
		require.NoError(t, o.repo.GuardTx(t.Context(), savepoint, []repository.Lock{parts.Exclusive(partX)}))
		require.NoError(t, savepoint.Commit(t.Context()))
		require.ErrorIs(t, o.take(t, owners.Exclusive(ownerB)), repository.ErrLockOrder)
		o.requireUsable(t)
	})
	t.Run("leaves the transaction usable where the caller may not ask", func(t *testing.T) {
		t.Parallel()
		url := hostURL(t)
		testdb.Exec(t, url, "REVOKE SELECT ON pg_catalog.pg_locks FROM PUBLIC")
		o := newOrdered(t, url, repository.WithLockOrderCheck())
		_, err := o.tx.Exec(t.Context(), "SET LOCAL ROLE pg_monitor")
		require.NoError(t, err)
		for range 2 {
			err = o.take(t, parts.Exclusive(partX))
			requireSQLState(t, "42501", err)
			require.False(t, repository.IsRetryable(err))
		}
		_, err = o.tx.Exec(t.Context(), "RESET ROLE")
		require.NoError(t, err)
		require.NoError(t, o.take(t, parts.Exclusive(partX)))
		require.ErrorIs(t, o.take(t, owners.Exclusive(ownerB)), repository.ErrLockOrder)
		o.requireUsable(t)
	})
	t.Run("does not mind the locks of other sessions, nor those that nobody in this process knows", func(t *testing.T) {
		t.Parallel()
		url := hostURL(t)
		o := newOrdered(t, url, repository.WithLockOrderCheck())
		hold(t, url, keyX)
		for _, function := range []string{"pg_advisory_xact_lock(9223372036854775807)", "pg_advisory_xact_lock(2147483647, 2147483647)"} {
			_, err := o.tx.Exec(t.Context(), "SELECT "+function)
			require.NoError(t, err)
		}
		require.NoError(t, o.take(t, owners.Exclusive(ownerA)))
		o.requireUsable(t)
	})
	t.Run("is not checked unless somebody wants to know, and costs a round trip if so", func(t *testing.T) {
		t.Parallel()
		for want, opts := range map[int][]repository.Option{
			1: {repository.WithObserver(repository.Observer{CallDone: func(context.Context, repository.CallDone) {}})},
			2: {repository.WithLockOrderCheck()},
		} {
			w := setupWired(t, hostURL(t))
			repo, err := repository.New(w.pool, opts...)
			require.NoError(t, err)
			require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
				traffic := w.cost(t, func(t *testing.T) {
					t.Helper()
					require.NoError(t, repo.GuardTx(t.Context(), tx, []repository.Lock{owners.Shared(ownerA)}))
				})
				require.Equal(t, want, traffic.RoundTrips, "sent %q", traffic.Statements)
				return nil
			}))
		}
	})
}

func TestOrderOfOneCallIsThatOfRanks(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	// All in the wrong order, and the rank's order is not the key's.
	locks := []repository.Lock{parts.Exclusive(partX), owners.Exclusive(ownerB), owners.Shared(ownerA)}
	for blocked, before := range map[int64]map[int64]bool{
		keyA: {},
		keyB: {keyA: false},
		keyX: {keyA: false, keyB: true},
	} {
		o := newOrdered(t, url)
		holder := hold(t, url, blocked)
		wait := background(t, func() error { return o.take(t, locks...) })
		require.Equal(t, []uint32{o.pid}, testdb.WaitForWaiter(t, o.observer, blocked, 1))
		require.Equal(t, before, locksOf(t, o.observer, o.pid), "while it waits for %d", blocked)
		require.NoError(t, holder.Rollback(t.Context()))
		require.NoError(t, wait())
		require.Equal(t, map[int64]bool{keyA: false, keyB: true, keyX: true}, locksOf(t, o.observer, o.pid))
		o.requireUsable(t)
	}
}

// crossing has two transactions take first each, and then second each, and returns what became of the second calls.
// It is over when one of the two was given up, which gives way to the other by a rollback.
func crossing(t *testing.T, url string, timeout time.Duration, first, second [2]repository.Lock) (errs []error) {
	t.Helper()
	var o [2]*ordered
	for i := range o {
		o[i] = newOrdered(t, url)
		var err error
		o[i].repo, err = repository.New(testdb.PoolAt(t, url), repository.WithLockTimeout(timeout))
		require.NoError(t, err)
		require.NoError(t, o[i].take(t, first[i]))
	}
	type outcome struct {
		who int
		err error
	}
	ended := make(chan outcome, len(o))
	for i := range o {
		go func() { ended <- outcome{i, o[i].repo.GuardTx(t.Context(), o[i].tx, second[i:i+1])} }()
	}
	for range o {
		select {
		case e := <-ended:
			errs = append(errs, e.err)
			if e.err == nil {
				require.NoError(t, o[e.who].tx.Commit(t.Context()))
				continue
			}
			// The first lock is still held, and the transaction can be used.
			require.Len(t, locksOf(t, o[e.who].observer, o[e.who].pid), 1)
			o[e.who].requireUsable(t)
		case <-time.After(patience):
			require.FailNow(t, "the two wait for each other")
		}
	}
	return errs
}

func TestOrderAcrossCalls(t *testing.T) {
	t.Parallel()
	a, b := owners.Exclusive(ownerA), owners.Exclusive(ownerB)

	t.Run("two that cross can deadlock, and one is told, with its transaction usable", func(t *testing.T) {
		t.Parallel()
		errs := crossing(t, hostURL(t), patience, [2]repository.Lock{a, b}, [2]repository.Lock{b, a})
		require.ErrorIs(t, errs[0], repository.ErrDeadlock)
		requireSQLState(t, "40P01", errs[0])
		require.True(t, repository.IsRetryable(errs[0]))
		require.NoError(t, errs[1])
	})
	t.Run("two that cross are busy if the lock timeout is shorter than the deadlock timeout", func(t *testing.T) {
		t.Parallel()
		for _, err := range crossing(t, hostURL(t), 300*time.Millisecond, [2]repository.Lock{a, b}, [2]repository.Lock{b, a}) {
			if err != nil { // the second may still get its lock in time
				requireBusy(t, err, repository.WhereAdvisory)
				requireSQLState(t, "55P03", err)
			}
		}
	})
	t.Run("two that hold one lock shared and both want it exclusive deadlock, and one is told", func(t *testing.T) {
		t.Parallel()
		shared := owners.Shared(ownerA)
		errs := crossing(t, hostURL(t), patience, [2]repository.Lock{shared, shared}, [2]repository.Lock{a, a})
		require.ErrorIs(t, errs[0], repository.ErrDeadlock)
		require.True(t, repository.IsRetryable(errs[0]))
		require.NoError(t, errs[1])
	})
	t.Run("two that ask for all in the first call do not deadlock, and neither do two that keep to the ranks", func(t *testing.T) {
		t.Parallel()
		x := parts.Exclusive(partX)
		for _, calls := range [][2][][]repository.Lock{
			{{{a, b, x}}, {{x, b, a}}}, // all in the first call
			{{{a}, {b}, {x}}, {{owners.Shared(ownerA)}, {b}, {parts.Exclusive(partX)}}}, // one by one, in order
		} {
			url := hostURL(t)
			var waits []func() error
			for _, mine := range calls {
				repo, err := repository.New(testdb.PoolAt(t, url, maxConns(1)),
					repository.WithLockTimeout(patience), repository.WithLockOrderCheck())
				require.NoError(t, err)
				pool := testdb.PoolAt(t, url, maxConns(1))
				waits = append(waits, background(t, func() error {
					for range 100 {
						err := pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
							for _, locks := range mine {
								if err := repo.GuardTx(t.Context(), tx, locks); err != nil {
									return err
								}
							}
							return nil
						})
						if err != nil {
							return err
						}
					}
					return nil
				}))
			}
			for _, wait := range waits {
				require.NoError(t, wait())
			}
		}
	})
}

func TestGuardTx(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	readCommitted := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}
	for name, start := range map[string]func(t *testing.T, pool *pgxpool.Pool) (tx, outermost pgx.Tx){
		"of a pool": func(t *testing.T, pool *pgxpool.Pool) (pgx.Tx, pgx.Tx) {
			t.Helper()
			tx := begin(t, pool, readCommitted)
			return tx, tx
		},
		"of a connection": func(t *testing.T, _ *pgxpool.Pool) (pgx.Tx, pgx.Tx) {
			t.Helper()
			tx := begin(t, testdb.Conn(t, url), readCommitted)
			return tx, tx
		},
		"nested in a pool's": func(t *testing.T, pool *pgxpool.Pool) (pgx.Tx, pgx.Tx) {
			t.Helper()
			outer := begin(t, pool, readCommitted)
			tx, err := outer.Begin(t.Context())
			require.NoError(t, err)
			return tx, outer
		},
	} {
		t.Run("takes locks in a transaction "+name+", until that ends", func(t *testing.T) {
			t.Parallel()
			g := newGuarded(t, url)
			tx, outermost := start(t, g.pool)
			second := items.Shared(g.owner + " 2")
			require.NoError(t, g.repo.GuardTx(t.Context(), tx, []repository.Lock{second, g.lock, g.lock}))
			pid := tx.Conn().PgConn().PID()
			want := map[int64]bool{g.key: true, itemKey(t, g.owner+" 2"): false}
			require.Equal(t, want, locksOf(t, g.observer, pid))
			require.NoError(t, g.repo.GuardTx(t.Context(), tx, []repository.Lock{g.lock}), "its own lock is no obstacle")
			if tx != outermost {
				require.NoError(t, tx.Commit(t.Context()))
				require.Equal(t, want, locksOf(t, g.observer, pid))
			}
			require.NoError(t, outermost.Commit(t.Context()))
			require.Empty(t, locksOf(t, g.observer, pid))
		})
	}

	t.Run("guards what is read after it, not what was read before", func(t *testing.T) {
		t.Parallel()
		o, id := newOrdered(t, url), uuid.New()
		lock, key := items.Exclusive(id.String()), itemKey(t, id.String())
		holder := hold(t, url, key)
		const exists = "SELECT EXISTS (SELECT FROM public.host WHERE id = $1)"
		var there bool
		require.NoError(t, o.tx.QueryRow(t.Context(), exists, id).Scan(&there))
		require.False(t, there)
		wait := background(t, func() error { return o.take(t, lock) })
		testdb.WaitForWaiter(t, o.observer, key, 1)
		_, err := holder.Exec(t.Context(), "INSERT INTO public.host (id) VALUES ($1)", id)
		require.NoError(t, err)
		require.NoError(t, holder.Commit(t.Context()))
		require.NoError(t, wait())
		require.NoError(t, o.tx.QueryRow(t.Context(), exists, id).Scan(&there))
		require.True(t, there)
		o.requireUsable(t)
	})
	for name, options := range map[string]pgx.TxOptions{
		"repeatable read": {IsoLevel: pgx.RepeatableRead},
		"serializable":    {IsoLevel: pgx.Serializable},
		"read only":       {IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly},
	} {
		for check, opts := range map[string][]repository.Option{"": nil, ", with the check of the order": {repository.WithLockOrderCheck()}} {
			t.Run("refuses a transaction that is "+name+", before any lock, and leaves it usable"+check, func(t *testing.T) {
				t.Parallel()
				o := newOrdered(t, url, opts...)
				require.NoError(t, o.tx.Rollback(t.Context()))
				o.tx = begin(t, o.conn, options)
				id := uuid.NewString()
				hold(t, url, itemKey(t, id)) // to ask for it would be to wait
				err := background(t, func() error { return o.take(t, items.Exclusive(id)) })()
				require.ErrorIs(t, err, repository.ErrIsolation)
				requireSQLState(t, "25000", err)
				require.False(t, repository.IsRetryable(err))
				require.Empty(t, locksOf(t, o.observer, o.pid))
				_, err = o.tx.Exec(t.Context(), "SELECT 1")
				require.NoError(t, err)
				require.NoError(t, o.tx.Commit(t.Context()))
			})
		}
	}
	for check, opts := range map[string][]repository.Option{"": nil, ", with the check of the order": {repository.WithLockOrderCheck()}} {
		t.Run("says so if the transaction has failed before"+check, func(t *testing.T) {
			t.Parallel()
			o := newOrdered(t, url, opts...)
			for warm := range 2 {
				if warm > 0 {
					o.tx = begin(t, o.conn, pgx.TxOptions{})
					require.NoError(t, o.take(t, items.Exclusive("before")))
				}
				_, err := o.tx.Exec(t.Context(), divide)
				requireSQLState(t, "22012", err)
				err = o.take(t, items.Exclusive("after"))
				requireSQLState(t, "25P02", err)
				require.False(t, repository.IsRetryable(err))
				require.ErrorIs(t, o.tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
				require.Empty(t, locksOf(t, o.observer, o.pid))
			}
			o.tx = begin(t, o.conn, pgx.TxOptions{})
			require.NoError(t, o.take(t, items.Exclusive("after")))
			o.requireUsable(t)
		})
	}
	t.Run("puts the caller's settings back, and leaves none of its own, whether it succeeds or not", func(t *testing.T) {
		t.Parallel()
		const settings = `SELECT string_agg(name || '=' || setting, ', ' ORDER BY name) FROM pg_settings
			WHERE name IN ('lock_timeout', 'statement_timeout', 'idle_in_transaction_session_timeout', 'transaction_isolation', 'search_path')`
		for _, sql := range []string{
			"", "SET LOCAL lock_timeout = '1500ms'; SET LOCAL statement_timeout = '90s'; SET LOCAL idle_in_transaction_session_timeout = '1h'",
			"SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0",
		} {
			for _, busy := range []bool{false, true} {
				o, id := newOrdered(t, url), uuid.NewString()
				if busy {
					hold(t, url, itemKey(t, id))
					var err error
					o.repo, err = repository.New(testdb.PoolAt(t, url), repository.WithLockTimeout(300*time.Millisecond))
					require.NoError(t, err)
				}
				_, err := o.tx.Exec(t.Context(), sql)
				require.NoError(t, err)
				var before, after string
				require.NoError(t, o.tx.QueryRow(t.Context(), settings).Scan(&before))
				err = o.take(t, items.Exclusive(id), items.Shared(id+" 2"))
				if busy {
					requireBusy(t, err, repository.WhereAdvisory)
					require.Empty(t, locksOf(t, o.observer, o.pid))
				} else {
					require.NoError(t, err)
				}
				require.NoError(t, o.tx.QueryRow(t.Context(), settings).Scan(&after))
				require.Equal(t, before, after, "after %q, busy: %t", sql, busy)
				o.requireUsable(t)
			}
		}
	})
	t.Run("waits no longer than its budget in all, for several keys", func(t *testing.T) {
		t.Parallel()
		const budget = 500 * time.Millisecond
		o, id := newOrdered(t, url), uuid.NewString()
		var err error
		o.repo, err = repository.New(testdb.PoolAt(t, url), repository.WithLockTimeout(budget))
		require.NoError(t, err)
		hold(t, url, itemKey(t, id))
		before := time.Now()
		busy := requireBusy(t, o.take(t, items.Exclusive(id), items.Exclusive(id+" 2")), repository.WhereAdvisory)
		requireAbout(t, budget, busy.Waited, time.Since(before))
		require.Empty(t, locksOf(t, o.observer, o.pid))
		o.requireUsable(t)
	})
}

// A host that uses database/sql joins with the connection that is behind its transaction.
func TestGuardTxThroughDatabaseSQL(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	open := func(t *testing.T, g *guarded) (*sql.Conn, func(func(tx pgx.Tx) error) error) {
		t.Helper()
		config, err := pgx.ParseConfig(url)
		require.NoError(t, err)
		conn, err := stdlib.OpenDB(*config).Conn(t.Context())
		require.NoError(t, err)
		t.Cleanup(func() { conn.Close() })
		require.NotNil(t, g)
		return conn, func(do func(tx pgx.Tx) error) error {
			return conn.Raw(func(driverConn any) error {
				std, ok := driverConn.(*stdlib.Conn)
				if !ok {
					return fmt.Errorf("%T is not of pgx", driverConn)
				}
				return do(repository.TxFromConn(std.Conn()))
			})
		}
	}
	const insert = "INSERT INTO public.host (id) VALUES ($1)"

	t.Run("takes locks and writes in one transaction, which the host ends", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		for _, commit := range []bool{true, false} {
			conn, join := open(t, g)
			tx, err := conn.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			row, user := uuid.New(), uuid.New()
			_, err = tx.ExecContext(t.Context(), insert, row.String())
			require.NoError(t, err)
			var pid uint32
			require.NoError(t, join(func(joined pgx.Tx) error {
				pid = joined.Conn().PgConn().PID()
				if err := g.repo.GuardTx(t.Context(), joined, []repository.Lock{g.lock}); err != nil {
					return err
				}
				_, err := g.repo.CreateSetupTx(t.Context(), joined, user, nil)
				return err
			}))
			require.Equal(t, map[int64]bool{g.key: true, setupKey(t, user): true}, locksOf(t, g.observer, pid))
			require.Empty(t, slots(t, g.pool, user))
			want := []int{1}
			if commit {
				require.NoError(t, tx.Commit())
			} else {
				require.NoError(t, tx.Rollback())
				want = []int{}
			}
			require.Empty(t, locksOf(t, g.observer, pid))
			require.Equal(t, want, slots(t, g.pool, user))
			waitUntil(t, g.observer, "SELECT EXISTS (SELECT FROM public.host WHERE id = $1) = $2", row, commit)
		}
	})
	t.Run("leaves the transaction usable after an error", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url, repository.WithLockTimeout(500*time.Millisecond))
		hold(t, url, g.key)
		conn, join := open(t, g)
		tx, err := conn.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		err = join(func(joined pgx.Tx) error { return g.repo.GuardTx(t.Context(), joined, []repository.Lock{g.lock}) })
		requireBusy(t, err, repository.WhereAdvisory)
		row := uuid.New()
		_, err = tx.ExecContext(t.Context(), insert, row.String())
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		waitUntil(t, g.observer, "SELECT EXISTS (SELECT FROM public.host WHERE id = $1)", row)
	})
	t.Run("refuses another isolation, and a connection without a transaction", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		conn, join := open(t, g)
		take := func(joined pgx.Tx) error { return g.repo.GuardTx(t.Context(), joined, []repository.Lock{g.lock}) }
		requireSQLState(t, "25P01", join(take))
		for _, o := range []*sql.TxOptions{{Isolation: sql.LevelSerializable}, {Isolation: sql.LevelRepeatableRead}, {ReadOnly: true}} {
			tx, err := conn.BeginTx(t.Context(), o)
			require.NoError(t, err)
			require.ErrorIs(t, join(take), repository.ErrIsolation)
			require.NoError(t, tx.Commit())
		}
		require.Empty(t, testdb.Holders(t, g.observer, g.key))
	})
	t.Run("does not end what the host began", func(t *testing.T) {
		t.Parallel()
		g := newGuarded(t, url)
		conn, join := open(t, g)
		tx, err := conn.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		require.NoError(t, join(func(joined pgx.Tx) error {
			require.ErrorIs(t, joined.Commit(t.Context()), repository.ErrInvalid)
			require.ErrorIs(t, joined.Rollback(t.Context()), repository.ErrInvalid)
			_, err := joined.Begin(t.Context())
			require.ErrorIs(t, err, repository.ErrInvalid)
			return nil
		}))
		require.NoError(t, tx.Commit())
	})
}

// The names of locks are remembered in bounded memory, and the latest are those that are known. The test is not
// parallel, since it pushes out the names that other tests rely on.
func TestRecentNamesAreBounded(t *testing.T) { //nolint:paralleltest // see above
	const ids = 100_000
	url := testdb.URL(t)
	repo, err := repository.New(testdb.PoolAt(t, url, maxConns(2)))
	require.NoError(t, err)
	var seen []weak.Pointer[byte]
	for n := 0; n < ids; n += repository.MaxLocks {
		locks := make([]repository.Lock, repository.MaxLocks)
		for i := range locks {
			// Long, so that it is an allocation of its own.
			id := strings.Clone(strings.Repeat("i", 64) + fmt.Sprint(n+i))
			seen = append(seen, weak.Make(unsafe.StringData(id)))
			locks[i] = items.Shared(id)
		}
		err := repo.Guard(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Last().Exec(ctx, "SELECT")
			return err
		})
		require.NoError(t, err)
	}
	runtime.GC()
	kept := 0
	for _, p := range seen {
		if p.Value() != nil {
			kept++
		}
	}
	require.Greater(t, len(seen), ids)
	require.Positive(t, kept, "without a name that is kept the test says nothing")
	require.LessOrEqual(t, kept, 8192, "a few thousand, as the documentation says")

	// The latest is known.
	require.NoError(t, repo.Guard(t.Context(), []repository.Lock{items.Exclusive("latest")}, func(ctx context.Context, tx *repository.Tx) error {
		if _, err := tx.Exec(ctx, "SELECT"); err != nil {
			return err
		}
		activity, err := repo.LockActivity(ctx)
		if err == nil && !slices.ContainsFunc(activity, func(a repository.LockActivity) bool { return a.Lock.ID == "latest" }) {
			err = errors.New("the latest lock has no name")
		}
		return err
	}))
}
