package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// wanted is a lock that LockAll or LockTryAll is asked for.
type wanted struct {
	key       int64
	exclusive bool
	rank      int32
}

type locks []wanted

func exclusive(keys ...int64) (l locks) {
	for _, key := range keys {
		l = append(l, wanted{key: key, exclusive: true})
	}
	return l
}

func shared(keys ...int64) locks {
	l := exclusive(keys...)
	for i := range l {
		l[i].exclusive = false
	}
	return l
}

func (l locks) params() (p db.LockAllParams) {
	for _, lock := range l {
		p.Keys = append(p.Keys, lock.key)
		p.Exclusive = append(p.Exclusive, lock.exclusive)
		p.Ranks = append(p.Ranks, lock.rank)
	}
	return p
}

// lockAll takes the locks as the repository does, in a transaction that stays open.
func lockAll(ctx context.Context, tx db.DBTX, budget time.Duration, l locks) error {
	q := db.New(tx)
	if err := q.TxSetLockBudget(ctx, lockBudget(budget)); err != nil {
		return err
	}
	return q.LockAll(ctx, l.params())
}

// lockOne takes the lock of one key, as the repository does for a call with one exclusive lock.
func lockOne(ctx context.Context, tx db.DBTX, budget time.Duration, key int64) error {
	q := db.New(tx)
	if err := q.TxSetLockBudget(ctx, lockBudget(budget)); err != nil {
		return err
	}
	return q.LockOne(ctx, key)
}

// waits are the two statements that wait for an exclusive lock, by their names.
var waits = map[string]func(ctx context.Context, tx db.DBTX, budget time.Duration, key int64) error{
	"LockAll": func(ctx context.Context, tx db.DBTX, budget time.Duration, key int64) error {
		return lockAll(ctx, tx, budget, exclusive(key))
	},
	"LockOne": lockOne,
}

func lockTryAll(ctx context.Context, tx db.DBTX, l locks) error {
	q := db.New(tx)
	if err := q.TxSetLockBudget(ctx, lockBudget(patience)); err != nil {
		return err
	}
	return q.LockTryAll(ctx, db.LockTryAllParams(l.params()))
}

// granted returns the advisory locks that the session holds, with their modes.
func granted(t *testing.T, observer *pgx.Conn, pid uint32) map[int64][]string {
	t.Helper()
	rows, err := observer.Query(t.Context(), `
		SELECT (classid::bigint << 32) | objid::bigint AS key, mode
		FROM pg_locks
		WHERE locktype = 'advisory' AND objsubid = 1 AND granted AND pid = $1::bigint
		ORDER BY mode`, int64(pid))
	require.NoError(t, err)
	held := map[int64][]string{}
	var key int64
	var mode string
	_, err = pgx.ForEachRow(rows, []any{&key, &mode}, func() error {
		held[key] = append(held[key], mode)
		return nil
	})
	require.NoError(t, err)
	return held
}

const (
	exclusiveMode = "ExclusiveLock"
	sharedMode    = "ShareLock"
)

// extremes are keys that a sort, a sign or a width can get wrong, in an order that is not theirs.
var extremes = []int64{0, math.MaxInt64, -1, 1 << 32, math.MinInt64, 1, -1 << 32, math.MaxUint32}

func TestLocksAreTakenInOrder(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("of the signed key", func(t *testing.T) {
		t.Parallel()
		requireOrder(t, url, exclusive(slices.Sorted(slices.Values(extremes))...))
	})
	t.Run("of the rank, and within a rank of the key", func(t *testing.T) {
		t.Parallel()
		requireOrder(t, testdb.URL(t), locks{
			{3, true, math.MinInt32},
			{4, true, math.MinInt32},
			{-1, true, -1},
			{math.MaxInt64, true, -1},
			{5, true, 0},
			{math.MinInt64, true, 2},
			{0, true, 2},
			{1, true, 10},
			{2, true, math.MaxInt32},
		})
	})
}

// requireOrder blocks a call at each of its locks in turn, and looks which of them it has got by then.
func requireOrder(t *testing.T, url string, sorted locks) {
	t.Helper()
	observer, conn := testdb.Conn(t, url), testdb.Conn(t, url)
	pid := conn.PgConn().PID()
	for i, middle := range sorted {
		holder := hold(t, url, middle.key)
		tx := begin(t, conn, pgx.TxOptions{})
		l := slices.Clone(sorted)
		rand.Shuffle(len(l), func(i, j int) { l[i], l[j] = l[j], l[i] })
		take := inBackground(t, func() (struct{}, error) { return struct{}{}, lockAll(t.Context(), tx, patience, l) })
		require.Equal(t, []uint32{pid}, testdb.WaitForWaiter(t, observer, middle.key, 1))

		want := map[int64][]string{}
		for _, earlier := range sorted[:i] {
			want[earlier.key] = []string{exclusiveMode}
		}
		require.Equal(t, want, granted(t, observer, pid), "blocked on %+v", middle)

		require.NoError(t, holder.Rollback(t.Context()))
		_, err := take()
		require.NoError(t, err)
		require.Len(t, granted(t, observer, pid), len(sorted))
		require.NoError(t, tx.Commit(t.Context()))
		require.Empty(t, granted(t, observer, pid))
	}
}

func TestLockModes(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	type side struct {
		conn *pgx.Conn
		tx   pgx.Tx
	}
	two := func(t *testing.T) (a, b side, observer *pgx.Conn) {
		t.Helper()
		for _, s := range []*side{&a, &b} {
			s.conn = testdb.Conn(t, url)
			s.tx = begin(t, s.conn, pgx.TxOptions{})
		}
		return a, b, testdb.Conn(t, url)
	}

	t.Run("a key named twice is taken once, and exclusive wins", func(t *testing.T) {
		t.Parallel()
		a, _, observer := two(t)
		l := slices.Concat(shared(201, 202), exclusive(201, 203), shared(201, 203, 202))
		require.NoError(t, lockAll(t.Context(), a.tx, patience, l))
		require.Equal(t, map[int64][]string{201: {exclusiveMode}, 202: {sharedMode}, 203: {exclusiveMode}},
			granted(t, observer, a.conn.PgConn().PID()))
	})
	t.Run("a try with a key named twice takes it once, and exclusive wins", func(t *testing.T) {
		t.Parallel()
		a, _, observer := two(t)
		require.NoError(t, lockTryAll(t.Context(), a.tx, slices.Concat(exclusive(211), shared(212, 211, 212))))
		require.Equal(t, map[int64][]string{211: {exclusiveMode}, 212: {sharedMode}}, granted(t, observer, a.conn.PgConn().PID()))
	})
	t.Run("shared does not wait for shared", func(t *testing.T) {
		t.Parallel()
		a, b, observer := two(t)
		require.NoError(t, lockAll(t.Context(), a.tx, patience, shared(221)))
		require.NoError(t, lockAll(t.Context(), b.tx, patience, shared(221)))
		require.NoError(t, lockTryAll(t.Context(), b.tx, shared(221)))
		require.Len(t, testdb.Holders(t, observer, 221), 2)
	})
	for key, modes := range map[int64]struct {
		name         string
		first, after func(...int64) locks
	}{
		231: {"exclusive waits for shared", shared, exclusive},
		232: {"shared waits for exclusive", exclusive, shared},
		233: {"exclusive waits for exclusive", exclusive, exclusive},
	} {
		t.Run(modes.name, func(t *testing.T) {
			t.Parallel()
			a, b, observer := two(t)
			require.NoError(t, lockAll(t.Context(), a.tx, patience, modes.first(key)))
			take := inBackground(t, func() (struct{}, error) {
				return struct{}{}, lockAll(t.Context(), b.tx, patience, modes.after(key))
			})
			testdb.WaitForWaiter(t, observer, key, 1)
			require.NoError(t, a.tx.Commit(t.Context()))
			_, err := take()
			require.NoError(t, err)
		})
		t.Run(modes.name+", so a try is refused", func(t *testing.T) {
			t.Parallel()
			a, b, observer := two(t)
			key := -key
			require.NoError(t, lockAll(t.Context(), a.tx, patience, modes.first(key)))
			requireSQLState(t, "55P03", lockTryAll(t.Context(), b.tx, modes.after(key)))
			require.Len(t, testdb.Holders(t, observer, key), 1)
		})
	}
	t.Run("a shared try is refused while an exclusive lock is waited for", func(t *testing.T) {
		t.Parallel()
		a, b, observer := two(t)
		require.NoError(t, lockAll(t.Context(), a.tx, patience, shared(241)))
		take := inBackground(t, func() (struct{}, error) {
			return struct{}{}, lockAll(t.Context(), b.tx, patience, exclusive(241))
		})
		testdb.WaitForWaiter(t, observer, 241, 1)
		c := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		requireSQLState(t, "55P03", lockTryAll(t.Context(), c, shared(241)))
		require.NoError(t, a.tx.Commit(t.Context()))
		_, err := take()
		require.NoError(t, err)
	})
	t.Run("one key by its own statement is exclusive, and taken by no other", func(t *testing.T) {
		t.Parallel()
		a, b, observer := two(t)
		for _, key := range extremes {
			require.NoError(t, lockOne(t.Context(), a.tx, patience, key))
			savepoint, err := b.tx.Begin(t.Context())
			require.NoError(t, err)
			requireSQLState(t, "55P03", lockTryAll(t.Context(), savepoint, shared(key)))
			require.NoError(t, savepoint.Rollback(t.Context()))
		}
		want := map[int64][]string{}
		for _, key := range extremes {
			want[key] = []string{exclusiveMode}
		}
		require.Equal(t, want, granted(t, observer, a.conn.PgConn().PID()))

		take := inBackground(t, func() (struct{}, error) {
			return struct{}{}, lockOne(t.Context(), b.tx, patience, extremes[0])
		})
		require.Equal(t, []uint32{b.conn.PgConn().PID()}, testdb.WaitForWaiter(t, observer, extremes[0], 1))
		require.NoError(t, a.tx.Commit(t.Context()))
		_, err := take()
		require.NoError(t, err)
		require.Equal(t, map[int64][]string{extremes[0]: {exclusiveMode}}, granted(t, observer, b.conn.PgConn().PID()))
	})
	t.Run("no lock at all is fine", func(t *testing.T) {
		t.Parallel()
		a, _, observer := two(t)
		empty := db.LockAllParams{Keys: []int64{}, Exclusive: []bool{}, Ranks: []int32{}}
		require.NoError(t, db.New(a.tx).TxSetLockBudget(t.Context(), lockBudget(time.Second)))
		require.NoError(t, db.New(a.tx).LockAll(t.Context(), empty))
		require.NoError(t, db.New(a.tx).LockTryAll(t.Context(), db.LockTryAllParams(empty)))
		require.Empty(t, granted(t, observer, a.conn.PgConn().PID()))
	})
	t.Run("1000 keys fit on default settings", func(t *testing.T) {
		t.Parallel()
		a, b, observer := two(t)
		var keys []int64
		for i := range int64(1000) {
			keys = append(keys, (i-500)*1_000_003+500)
		}
		require.NoError(t, lockAll(t.Context(), a.tx, patience, exclusive(keys...)))
		require.Len(t, granted(t, observer, a.conn.PgConn().PID()), 1000)
		requireSQLState(t, "55P03", lockTryAll(t.Context(), b.tx, exclusive(keys...)))
	})
	t.Run("locks of two numbers and of the same digits are others", func(t *testing.T) {
		t.Parallel()
		a, b, _ := two(t)
		_, err := a.tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(1, 1)")
		require.NoError(t, err)
		require.NoError(t, lockTryAll(t.Context(), b.tx, exclusive(1<<32+1)))
	})
}

func TestLockTryTakesAllOrNothing(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	hold(t, url, 20)

	t.Run("with its transaction", func(t *testing.T) {
		t.Parallel()
		conn, observer := testdb.Conn(t, url), testdb.Conn(t, url)
		tx := begin(t, conn, pgx.TxOptions{})
		requireSQLState(t, "55P03", lockTryAll(t.Context(), tx, exclusive(30, 20, 10)))
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, granted(t, observer, conn.PgConn().PID()))
	})
	t.Run("with its savepoint", func(t *testing.T) {
		t.Parallel()
		conn, observer := testdb.Conn(t, url), testdb.Conn(t, url)
		tx := begin(t, conn, pgx.TxOptions{})
		require.NoError(t, lockTryAll(t.Context(), tx, exclusive(5)))
		savepoint, err := tx.Begin(t.Context())
		require.NoError(t, err)
		requireSQLState(t, "55P03", lockTryAll(t.Context(), savepoint, exclusive(30, 20, 10)))
		require.NoError(t, savepoint.Rollback(t.Context()))
		require.Equal(t, map[int64][]string{5: {exclusiveMode}}, granted(t, observer, conn.PgConn().PID()))
		require.NoError(t, tx.Commit(t.Context()))
	})
	t.Run("in one round trip, and nothing behind it runs", func(t *testing.T) {
		t.Parallel()
		conn, observer := testdb.Conn(t, url), testdb.Conn(t, url)
		tx := pipeline.Begin(conn)
		params := exclusive(30, 20, 10).params()
		require.NoError(t, db.New(tx.Before()).TxSetLockBudget(t.Context(), lockBudget(time.Second)))
		require.NoError(t, db.New(tx.Before()).LockTryAll(t.Context(), db.LockTryAllParams(params)))
		_, err := tx.Last().Exec(t.Context(), "CREATE TABLE public.ran ()")
		requireSQLState(t, "55P03", err)
		tx.Rollback(t.Context())
		require.Empty(t, granted(t, observer, conn.PgConn().PID()))
		var ran *string
		require.NoError(t, observer.QueryRow(t.Context(), "SELECT to_regclass('public.ran')::text").Scan(&ran))
		require.Nil(t, ran)
	})
}

// lock_timeout counts anew for each key: without a bound on the whole, these waits would all be short enough.
func TestLocksOfOneCallHaveOneBudget(t *testing.T) {
	t.Parallel()
	const budget, gap = 500 * time.Millisecond, 300 * time.Millisecond
	url := testdb.URL(t)
	freeOneByOne := func(t *testing.T, keys []int64) (stop func()) {
		t.Helper()
		// The last one taken is the first that is freed.
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "BEGIN")
		require.NoError(t, err)
		for _, key := range slices.Backward(keys) {
			_, err := conn.Exec(t.Context(), fmt.Sprintf(`SAVEPOINT "%d"; SELECT pg_advisory_xact_lock(%d)`, key, key))
			require.NoError(t, err)
		}
		stopped := make(chan struct{})
		done := inBackground(t, func() (struct{}, error) {
			for _, key := range keys {
				select {
				case <-stopped:
				case <-time.After(gap):
				}
				if _, err := conn.Exec(t.Context(), fmt.Sprintf(`ROLLBACK TO SAVEPOINT "%d"`, key)); err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		})
		return func() {
			close(stopped)
			_, err := done()
			require.NoError(t, err)
		}
	}

	t.Run("that ends them all", func(t *testing.T) {
		t.Parallel()
		keys := []int64{1, 2, 3, 4, 5}
		conn := testdb.Conn(t, url)
		tx := begin(t, conn, pgx.TxOptions{})
		stop := freeOneByOne(t, keys)
		defer stop()

		before := time.Now()
		err := lockAll(t.Context(), tx, budget, exclusive(keys...))
		took := time.Since(before)
		var pgErr *pgconn.PgError
		require.ErrorAs(t, err, &pgErr)
		require.Contains(t, []string{"57014", "55P03"}, pgErr.Code)
		require.GreaterOrEqual(t, took, budget)
		require.Less(t, took, patience)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, granted(t, testdb.Conn(t, url), conn.PgConn().PID()))
	})
	t.Run("where that is long enough it does not", func(t *testing.T) {
		t.Parallel()
		keys := []int64{11, 12, 13}
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		stop := freeOneByOne(t, keys)
		defer stop()
		require.NoError(t, lockAll(t.Context(), tx, patience, exclusive(keys...)))
	})
}

// withoutLockTimeout takes lock_timeout away before the last statement, which then finds less of it than it waits.
type withoutLockTimeout struct{ pgx.Tx }

func (tx withoutLockTimeout) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !strings.Contains(sql, "TxSetLockBudget") {
		if _, err := tx.Tx.Exec(ctx, "SET LOCAL lock_timeout = 0"); err != nil {
			return pgconn.CommandTag{}, err
		}
	}
	return tx.Tx.Exec(ctx, sql, args...)
}

func TestLockTimeoutsAfterTheLock(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	const budget = 10 * time.Second
	// current returns both timeouts in milliseconds.
	current := func(t *testing.T, tx pgx.Tx) (statement, lock int64) {
		t.Helper()
		require.NoError(t, tx.QueryRow(t.Context(), `
			SELECT (SELECT setting::bigint FROM pg_settings WHERE name = 'statement_timeout'),
			       (SELECT setting::bigint FROM pg_settings WHERE name = 'lock_timeout')`).Scan(&statement, &lock))
		return statement, lock
	}

	next := int64(0)
	for name, wait := range waits {
		for _, before := range []int64{0, 7777, 90_000, math.MaxInt32} {
			next++
			key := next
			t.Run(fmt.Sprintf("%s puts statement_timeout back to %d ms, and leaves lock_timeout at the budget", name, before), func(t *testing.T) {
				t.Parallel()
				tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
				_, err := tx.Exec(t.Context(), fmt.Sprintf("SET statement_timeout = %d", before))
				require.NoError(t, err)
				require.NoError(t, wait(t.Context(), tx, budget, key))
				statement, lock := current(t, tx)
				require.Equal(t, before, statement)
				require.LessOrEqual(t, lock, budget.Milliseconds())
				require.GreaterOrEqual(t, lock, int64(1))
			})
		}
		// The server writes a time in the largest unit that divides it: each is one that the statement must read.
		for _, budget := range []time.Duration{budget + time.Millisecond, budget, time.Minute, 3 * time.Hour, 24 * 24 * time.Hour} {
			next++
			key := next
			t.Run(fmt.Sprintf("%s leaves of %s what it has not waited", name, budget), func(t *testing.T) {
				t.Parallel()
				const blocked = 250 * time.Millisecond
				holder := hold(t, url, key)
				tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
				started := time.Now()
				take := inBackground(t, func() (struct{}, error) { return struct{}{}, wait(t.Context(), tx, budget, key) })
				testdb.WaitForWaiter(t, testdb.Conn(t, url), key, 1)
				<-time.After(blocked)
				require.NoError(t, holder.Rollback(t.Context()))
				_, err := take()
				require.NoError(t, err)
				took := time.Since(started)
				_, lock := current(t, tx)
				require.LessOrEqual(t, lock, (budget - blocked).Milliseconds())
				require.GreaterOrEqual(t, lock, (budget - took).Milliseconds())
			})
		}
		next++
		key := next
		t.Run(name+" leaves 1 ms of nothing, not 0 which is for ever", func(t *testing.T) {
			t.Parallel()
			holder := hold(t, url, key)
			tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
			take := inBackground(t, func() (struct{}, error) { return struct{}{}, wait(t.Context(), withoutLockTimeout{tx}, budget, key) })
			testdb.WaitForWaiter(t, testdb.Conn(t, url), key, 1)
			<-time.After(10 * time.Millisecond)
			require.NoError(t, holder.Rollback(t.Context()))
			_, err := take()
			require.NoError(t, err)
			_, lock := current(t, tx)
			require.Equal(t, int64(1), lock)
		})
	}
	t.Run("after a try no statement waits", func(t *testing.T) {
		t.Parallel()
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := tx.Exec(t.Context(), "SET statement_timeout = '7s'")
		require.NoError(t, err)
		require.NoError(t, lockTryAll(t.Context(), tx, exclusive(102)))
		statement, lock := current(t, tx)
		require.Equal(t, int64(7000), statement)
		require.Equal(t, int64(1), lock)
	})
}

// taker takes locks in a transaction of its own, and ends that.
type taker func(ctx context.Context, conn *pgx.Conn, l locks) error

// takeTogether is the product's way: all keys in one statement.
func takeTogether(ctx context.Context, conn *pgx.Conn, l locks) error {
	tx := pipeline.Begin(conn)
	defer tx.Rollback(ctx)
	if err := lockAll(ctx, tx.Before(), patience, l); err != nil {
		return err
	}
	_, err := tx.Last().Exec(ctx, "SELECT")
	return err
}

// takeEachInTurn is the way that deadlocks: one statement for each key, in the order in which they come.
func takeEachInTurn(ctx context.Context, conn *pgx.Conn, l locks) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return err
	}
	defer tx.Rollback(ctx)
	for _, lock := range l {
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", lock.key); err != nil {
			return err
		}
	}
	return tx.Commit(ctx)
}

// hammer has 8 callers take 3 of 5 keys in random orders and modes, each that often or until one has an error,
// which it returns.
func hammer(t *testing.T, url string, often int, take taker) error {
	t.Helper()
	const callers = 8
	keys := []int64{extremes[0], extremes[1], extremes[2], 42, -42}
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	ended := make([]func() (struct{}, error), callers)
	for i := range ended {
		conn := testdb.Conn(t, url)
		random := rand.New(rand.NewPCG(1, uint64(i)))
		ended[i] = inBackground(t, func() (struct{}, error) {
			for range often {
				var l locks
				for _, at := range random.Perm(len(keys))[:3] {
					l = append(l, wanted{key: keys[at], exclusive: random.IntN(4) > 0})
				}
				if err := take(ctx, conn, l); err != nil {
					cancel(err) // the first error is the cause
					break
				}
			}
			return struct{}{}, nil
		})
	}
	for _, wait := range ended {
		_, err := wait()
		require.NoError(t, err)
	}
	return context.Cause(ctx)
}

func TestLocksNeverDeadlock(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("whatever the order in which the callers name them", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, hammer(t, url, 300, takeTogether))
	})
	t.Run("unless they are taken one by one", func(t *testing.T) {
		t.Parallel()
		requireSQLState(t, "40P01", hammer(t, testdb.URL(t), 100_000, takeEachInTurn))
	})
}

// An advisory lock function runs where the plan has it: below the sort it would run in any order.
func TestLockFunctionStandsAboveTheSort(t *testing.T) {
	t.Parallel()
	conn := testdb.Conn(t, testdb.URL(t))
	queries := generatedQueries(t)
	for _, planner := range []string{
		"SET enable_sort = on",
		"SET enable_sort = off",
		"SET enable_hashagg = off",
		"SET enable_hashagg = off; SET enable_sort = off",
		"SET plan_cache_mode = force_generic_plan",
		"SET from_collapse_limit = 1",
		"SET debug_parallel_query = on",
		"SET force_parallel_mode = on",
	} {
		if _, err := conn.Exec(t.Context(), "RESET ALL; "+planner); err != nil {
			requireSQLState(t, "42704", err) // the last two are one setting by its new and its old name
			continue
		}
		for _, n := range []int{1, 2, 1000} {
			for _, name := range []string{"LockAll", "LockTryAll"} {
				require.True(t, lockedAboveSort(t, conn, queries[name], n), "%s with %d keys, %s", name, n, planner)
			}
		}
	}
	require.False(t, lockedAboveSort(t, conn, `
		SELECT count(l.x) FROM (
			SELECT pg_advisory_xact_lock(k.key)::text AS x FROM ROWS FROM (unnest($1::bigint[]), unnest($2::boolean[]), unnest($3::integer[])) AS k (key, exclusive, rank)
			ORDER BY 1
		) AS l`, 2), "a check that accepts any plan proves nothing")
}

type plan struct {
	Node   string   `json:"Node Type"`
	Output []string `json:"Output"`
	Plans  []plan   `json:"Plans"`
}

func (p plan) has(match func(plan) bool) bool {
	return match(p) || slices.ContainsFunc(p.Plans, func(p plan) bool { return p.has(match) })
}

func (p plan) locks() bool {
	return slices.ContainsFunc(p.Output, func(s string) bool { return strings.Contains(s, "advisory_xact_lock") })
}

func (p plan) sorts() bool { return p.Node == "Sort" }

// lockedAboveSort says whether the plan sorts, takes locks, and does so only above every sort.
func lockedAboveSort(t *testing.T, conn *pgx.Conn, sql string, n int) bool {
	t.Helper()
	params := exclusive(make([]int64, n)...).params()
	for i := range params.Keys {
		params.Keys[i] = int64(n - i)
	}
	var plans []struct{ Plan plan }
	var text []byte
	require.NoError(t, conn.QueryRow(t.Context(), "EXPLAIN (VERBOSE, FORMAT JSON) "+sql, params.Keys, params.Exclusive, params.Ranks).Scan(&text))
	require.NoError(t, json.Unmarshal(text, &plans))
	require.Len(t, plans, 1)
	root := plans[0].Plan
	locksBelowSort := root.has(func(p plan) bool { return p.sorts() && p.has(plan.locks) })
	return root.has(plan.locks) && root.has(plan.sorts) && !locksBelowSort
}

// lockBudget is a budget in a transaction that this test opened.
func lockBudget(d time.Duration) db.TxSetLockBudgetParams {
	return db.TxSetLockBudgetParams{BudgetMs: d.Milliseconds(), LockTimeoutMs: d.Milliseconds(), OwnTransaction: true}
}
