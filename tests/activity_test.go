package tests

import (
	"context"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

var activities = repository.MustNamespace("activity", repository.Rank(7))

// newOperator returns a Repository that looks on, with a pool of its own.
func newOperator(t *testing.T, url string) *repository.Repository {
	t.Helper()
	repo, err := repository.New(testdb.PoolAt(t, url, maxConns(1)))
	require.NoError(t, err)
	return repo
}

// The test is not parallel, though its parts are: the register of recent names is the process's, and what other tests
// lock meanwhile could push a name out of it.
func TestActivity(t *testing.T) {
	t.Run("shows holder and waiters by name, and who blocks whom", func(t *testing.T) {
		t.Parallel()
		url := itemsURL(t)
		named := func(name string) func(*pgxpool.Config) {
			return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = name }
		}
		holder := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), named("holder")))
		first := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), named("first")))
		second := newGuardedOn(t, url, testdb.PoolAt(t, url, maxConns(1), named("second")))
		lock, other := activities.Exclusive("watched"), activities.Shared("also")
		key, err := repository.Key("activity", "watched")
		require.NoError(t, err)
		otherKey, err := repository.Key("activity", "also")
		require.NoError(t, err)

		before := time.Now().Add(-time.Minute) // the server's clock may differ a little where it is another machine's
		inside, leave := make(chan struct{}), make(chan struct{})
		waits := []func() error{background(t, func() error {
			return holder.repo.Guard(t.Context(), []repository.Lock{lock, other}, func(ctx context.Context, tx *repository.Tx) error {
				_, err := hostQueries{}.countItems(ctx, tx, "anybody")
				close(inside)
				<-leave
				return err
			})
		})}
		<-inside
		nothing := func(context.Context, *repository.Tx) error { return nil }
		waits = append(waits, background(t, func() error { return first.repo.Guard(t.Context(), []repository.Lock{lock}, nothing) }))
		testdb.WaitForWaiter(t, first.observer, key, 1)
		waits = append(waits, background(t, func() error {
			return second.repo.Guard(t.Context(), []repository.Lock{activities.Shared("watched")}, nothing)
		}))
		testdb.WaitForWaiter(t, first.observer, key, 2)

		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		for i, a := range got {
			require.NotEmpty(t, a.Role)
			require.NotNil(t, a.TransactionStart)
			require.True(t, a.TransactionStart.After(before))
			require.Equal(t, !a.Granted, a.WaitingSince != nil)
			if a.WaitingSince != nil {
				require.False(t, a.WaitingSince.Before(*a.TransactionStart))
				require.Regexp(t, "^-- name: Lock(One|All) ", a.Query)
				require.Equal(t, "active", a.State)
			} else {
				require.Contains(t, a.Query, "public.items")
				require.Equal(t, "idle in transaction", a.State)
			}
			got[i].TransactionStart, got[i].WaitingSince, got[i].Role, got[i].Query, got[i].State = nil, nil, "", "", ""
		}
		watched := repository.LockName{Namespace: "activity", ID: "watched", Key: key, Rank: 7}
		also := repository.LockName{Namespace: "activity", ID: "also", Key: otherKey, Rank: 7}
		want := []repository.LockActivity{
			{Lock: watched, Exclusive: true, PID: int32(first.pid), Application: "first", BlockedBy: []int32{int32(holder.pid)}},
			{Lock: watched, PID: int32(second.pid), Application: "second", BlockedBy: []int32{int32(holder.pid), int32(first.pid)}},
			{Lock: watched, Exclusive: true, Granted: true, PID: int32(holder.pid), Application: "holder", BlockedBy: []int32{}},
			{Lock: also, Granted: true, PID: int32(holder.pid), Application: "holder", BlockedBy: []int32{}},
		}
		slices.SortFunc(want[2:], func(a, b repository.LockActivity) int { // of one transaction, by their keys
			if a.Lock.Key < b.Lock.Key {
				return -1
			}
			return 1
		})
		slices.Sort(got[1].BlockedBy)
		slices.Sort(want[1].BlockedBy)
		require.Equal(t, want, got)

		close(leave)
		for _, wait := range waits {
			require.NoError(t, wait())
		}
		got, err = newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Empty(t, got)
	})
	t.Run("names the locks of setup requests too, and those of a joined transaction", func(t *testing.T) {
		t.Parallel()
		url, user := itemsURL(t), uuid.New()
		g := newGuarded(t, url)
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := g.repo.CreateSetupTx(t.Context(), tx, user, nil)
		require.NoError(t, err)
		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Equal(t, repository.LockName{Namespace: "setup_request", ID: user.String(), Key: setupKey(t, user)}, got[0].Lock)
	})
}

// edges are keys whose two halves in pg_locks are at the edges of an oid.
var edges = []int64{-1, math.MinInt64, math.MaxInt64, 0, 1 << 32, 1<<32 - 1, -1 << 32, 42, -4603886392734601391}

func TestActivityOfForeignLocks(t *testing.T) {
	t.Parallel()

	t.Run("restores every key exactly, also in SQL, and has no name for them", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		for i, key := range edges {
			function := "pg_advisory_xact_lock"
			if i%2 == 1 {
				function += "_shared"
			}
			_, err := tx.Exec(t.Context(), "SELECT "+function+"($1)", key)
			require.NoError(t, err)
		}
		want := map[int64]bool{} // and whether it is exclusive
		for i, key := range edges {
			want[key] = i%2 == 0
		}
		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Len(t, got, len(edges))
		keys := map[int64]bool{}
		for _, a := range got {
			keys[a.Lock.Key] = a.Exclusive
			require.Equal(t, repository.LockName{Key: a.Lock.Key}, a.Lock)
			require.True(t, a.Granted)
			require.Equal(t, int32(tx.Conn().PgConn().PID()), a.PID)
		}
		require.Equal(t, want, keys)
		for _, key := range edges {
			var one int
			require.NoError(t, tx.QueryRow(t.Context(),
				"SELECT count(*) FROM latchkey.lock_activity WHERE key = $1 AND transaction_age >= '0' AND transaction_age < '1 day'", key).Scan(&one))
			require.Equal(t, 1, one, "%d", key)
		}
	})
	t.Run("leaves out locks of two integers, of other databases, and of other kinds", func(t *testing.T) {
		t.Parallel()
		url, elsewhere := testdb.URL(t), testdb.URL(t)
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		for _, sql := range []string{
			"SELECT pg_advisory_xact_lock(1, 1)", "SELECT pg_advisory_xact_lock_shared(-1, 2147483647)", "SELECT pg_advisory_lock(7, 7)",
			"LOCK TABLE latchkey.setup_requests IN SHARE MODE",
		} {
			_, err := tx.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		hold(t, elsewhere, 99)
		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Empty(t, got)
		// The control: there it is seen.
		got, err = newOperator(t, elsewhere).LockActivity(t.Context())
		require.NoError(t, err)
		require.Len(t, got, 1)
	})
	t.Run("shows a lock of the session, which has no transaction", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "SELECT pg_advisory_lock(5)")
		require.NoError(t, err)
		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.Nil(t, got[0].TransactionStart)
		require.Equal(t, "idle", got[0].State)
		require.EqualValues(t, 5, got[0].Lock.Key)
	})
	t.Run("has one row for each wait, and at most 1,000, the waits first", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock_shared(n) FROM generate_series(1, 1100) AS n")
		require.NoError(t, err)
		hold := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err = hold.Exec(t.Context(), "SELECT pg_advisory_xact_lock_shared(1)") // a second holder
		require.NoError(t, err)
		waiter, observer := testdb.Conn(t, url), testdb.Conn(t, url)
		wait := background(t, func() error {
			_, err := waiter.Exec(t.Context(), takeLock, int64(1))
			return err
		})
		testdb.WaitForWaiter(t, observer, 1, 1)
		got, err := newOperator(t, url).LockActivity(t.Context())
		require.NoError(t, err)
		require.Len(t, got, 1000)
		require.False(t, got[0].Granted)
		require.ElementsMatch(t, []int32{int32(tx.Conn().PgConn().PID()), int32(hold.Conn().PgConn().PID())}, got[0].BlockedBy)
		for _, a := range got[1:] {
			require.True(t, a.Granted)
		}
		require.NoError(t, tx.Rollback(t.Context()))
		require.NoError(t, hold.Rollback(t.Context()))
		require.NoError(t, wait())
	})
}
