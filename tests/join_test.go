package tests

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/pipeline"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// joint is a host's transaction, on a connection of its own, beside a service that works on the same user.
type joint struct {
	*fixture
	conn *pgx.Conn
	tx   pgx.Tx
}

func newJoint(t *testing.T, url string, o pgx.TxOptions) *joint {
	t.Helper()
	conn := testdb.Conn(t, url)
	return &joint{newFixture(t, url), conn, begin(t, conn, o)}
}

func (j *joint) join(t *testing.T, limit int) (*repository.SetupRequest, error) {
	t.Helper()
	return j.joinWithin(t, limit, patience)
}

func (j *joint) joinWithin(t *testing.T, limit int, timeout time.Duration) (*repository.SetupRequest, error) {
	t.Helper()
	return j.repo.CreateSetupTx(t.Context(), j.tx, j.user, &repository.CreateSetupOpts{MaxPending: limit, LockTimeout: timeout})
}

// createBeside starts the other service's call, which returns once it has the lock.
func (j *joint) createBeside(t *testing.T) func() (*repository.SetupRequest, error) {
	t.Helper()
	return inBackground(t, func() (*repository.SetupRequest, error) { return j.create(t, 1) })
}

// holds says whether the host's transaction has the user's lock.
func (j *joint) holds(t *testing.T) bool {
	t.Helper()
	holders := testdb.Holders(t, j.observer, j.key)
	require.Subset(t, []uint32{j.conn.PgConn().PID()}, holders)
	return len(holders) == 1
}

// requireUsable requires that the transaction can read and, if it may, write and commit.
func (j *joint) requireUsable(t *testing.T, mayWrite bool) {
	t.Helper()
	var one int
	require.NoError(t, j.tx.QueryRow(t.Context(), "SELECT 1").Scan(&one))
	row := uuid.New()
	if mayWrite {
		_, err := j.tx.Exec(t.Context(), "INSERT INTO public.host (id) VALUES ($1)", row)
		require.NoError(t, err)
	}
	require.NoError(t, j.tx.Commit(t.Context()))
	if mayWrite {
		require.NoError(t, j.observer.QueryRow(t.Context(), "SELECT 1 FROM public.host WHERE id = $1", row).Scan(&one))
	}
}

// hostURL returns a database with a table of the host's.
func hostURL(t *testing.T) string {
	t.Helper()
	url := testdb.URL(t)
	testdb.Exec(t, url, "CREATE TABLE public.host (id uuid PRIMARY KEY)")
	return url
}

func TestJoin(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	readCommitted := pgx.TxOptions{IsoLevel: pgx.ReadCommitted}

	for name, start := range map[string]func(t *testing.T, f *fixture) (tx, outermost pgx.Tx){
		"of a pool": func(t *testing.T, f *fixture) (pgx.Tx, pgx.Tx) {
			t.Helper()
			tx := begin(t, f.pool, readCommitted)
			return tx, tx
		},
		"of a pool's connection": func(t *testing.T, f *fixture) (pgx.Tx, pgx.Tx) {
			t.Helper()
			conn, err := f.pool.Acquire(t.Context())
			require.NoError(t, err)
			t.Cleanup(conn.Release)
			tx := begin(t, conn, readCommitted)
			return tx, tx
		},
		"of a connection": func(t *testing.T, f *fixture) (pgx.Tx, pgx.Tx) {
			t.Helper()
			tx := begin(t, testdb.Conn(t, f.url), readCommitted)
			return tx, tx
		},
		"nested in a pool's": func(t *testing.T, f *fixture) (pgx.Tx, pgx.Tx) {
			t.Helper()
			outer := begin(t, f.pool, readCommitted)
			tx, err := outer.Begin(t.Context())
			require.NoError(t, err)
			return tx, outer
		},
		"nested in a connection's": func(t *testing.T, f *fixture) (pgx.Tx, pgx.Tx) {
			t.Helper()
			outer := begin(t, testdb.Conn(t, f.url), readCommitted)
			tx, err := outer.Begin(t.Context())
			require.NoError(t, err)
			return tx, outer
		},
	} {
		t.Run("creates in a transaction "+name+", for all to see once that commits", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url)
			tx, outermost := start(t, f)
			s, err := f.repo.CreateSetupTx(t.Context(), tx, f.user, nil)
			require.NoError(t, err)
			require.Empty(t, f.dump(t))
			require.Len(t, testdb.Holders(t, f.observer, f.key), 1)
			_, err = f.repo.CreateSetupTx(t.Context(), tx, f.user, nil)
			requireLimit(t, err, 1, 1)
			require.NoError(t, tx.Commit(t.Context()))
			if tx != outermost {
				require.Empty(t, f.dump(t))
				require.NoError(t, outermost.Commit(t.Context()))
			}
			require.Len(t, f.dump(t), 1)
			require.Empty(t, testdb.Holders(t, f.observer, f.key))
			require.Equal(t, repository.SetupPending, s.Status)
		})
	}

	t.Run("is undone with the caller's transaction", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.join(t, 1)
		require.NoError(t, err)
		require.NoError(t, j.tx.Rollback(t.Context()))
		require.Empty(t, j.dump(t))
		require.False(t, j.holds(t))
		_, err = j.create(t, 1)
		require.NoError(t, err)
	})
	t.Run("keeps the lock until the caller commits", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.join(t, 1)
		require.NoError(t, err)
		create := j.createBeside(t)
		require.Equal(t, []uint32{j.pid}, testdb.WaitForWaiter(t, j.observer, j.key, 1))
		require.True(t, j.holds(t))
		j.requireUsable(t, true)
		_, err = create()
		requireLimit(t, err, 1, 1)
	})
	t.Run("keeps the lock until the caller rolls back", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.join(t, 1)
		require.NoError(t, err)
		create := j.createBeside(t)
		testdb.WaitForWaiter(t, j.observer, j.key, 1)
		require.NoError(t, j.tx.Rollback(t.Context()))
		_, err = create()
		require.NoError(t, err)
	})
	t.Run("keeps the lock until the caller rolls back to a savepoint before it", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		outer := j.tx
		savepoint, err := outer.Begin(t.Context())
		require.NoError(t, err)
		j.tx = savepoint
		_, err = j.join(t, 1)
		require.NoError(t, err)
		create := j.createBeside(t)
		testdb.WaitForWaiter(t, j.observer, j.key, 1)
		require.NoError(t, savepoint.Rollback(t.Context()))
		_, err = create()
		require.NoError(t, err)

		j.tx = outer
		_, err = j.join(t, 1)
		requireLimit(t, err, 1, 1)
		j.requireUsable(t, true)
	})
	t.Run("leaves the caller's savepoints alone, also one of the same name", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.tx.Exec(t.Context(), "SAVEPOINT latchkey")
		require.NoError(t, err)
		_, err = j.join(t, 1)
		require.NoError(t, err)
		_, err = j.joinWithin(t, 1, patience)
		requireLimit(t, err, 1, 1)
		_, err = j.tx.Exec(t.Context(), "ROLLBACK TO SAVEPOINT latchkey")
		require.NoError(t, err)
		require.False(t, j.holds(t))
		j.requireUsable(t, true)
		require.Empty(t, j.dump(t))
	})
	t.Run("works for two users in one transaction", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		other := uuid.New()
		_, err := j.join(t, 1)
		require.NoError(t, err)
		_, err = j.repo.CreateSetupTx(t.Context(), j.tx, other, nil)
		require.NoError(t, err)
		require.True(t, j.holds(t))
		require.Len(t, testdb.Holders(t, j.observer, setupKey(t, other)), 1)
		j.requireUsable(t, true)
		require.Len(t, j.dump(t), 1)
	})
	t.Run("does not wait for a lock that its own transaction holds", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		for range 2 {
			_, err := j.join(t, 2)
			require.NoError(t, err)
		}
		_, err := j.join(t, 2)
		requireLimit(t, err, 2, 2) // its own, not committed yet
		j.requireUsable(t, true)
		require.Equal(t, []int{1, 2}, slots(t, j.pool, j.user))
	})
	t.Run("counts after the lock, so it sees what the holder committed meanwhile", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		holder := hold(t, url, j.key)
		create := inBackground(t, func() (*repository.SetupRequest, error) { return j.join(t, 1) })
		testdb.WaitForWaiter(t, j.observer, j.key, 1)
		_, err := holder.Exec(t.Context(), "INSERT INTO latchkey.setup_requests (user_id) VALUES ($1)", j.user)
		require.NoError(t, err)
		require.NoError(t, holder.Commit(t.Context()))
		_, err = create()
		requireLimit(t, err, 1, 1)
		j.requireUsable(t, true)
	})
}

func TestJoinRefusesOtherIsolation(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	for name, o := range map[string]pgx.TxOptions{
		"a repeatable read transaction":                           {IsoLevel: pgx.RepeatableRead},
		"a serializable transaction":                              {IsoLevel: pgx.Serializable},
		"a read-only transaction":                                 {IsoLevel: pgx.ReadCommitted, AccessMode: pgx.ReadOnly},
		"a serializable read-only deferrable transaction":         {IsoLevel: pgx.Serializable, AccessMode: pgx.ReadOnly, DeferrableMode: pgx.Deferrable},
		"a transaction that is serializable by session's default": {},
	} {
		t.Run(name+", before any lock, and leaves it usable", func(t *testing.T) {
			t.Parallel()
			conn := testdb.Conn(t, url)
			_, err := conn.Exec(t.Context(), "SET default_transaction_isolation = 'serializable'")
			require.NoError(t, err)
			j := &joint{newFixture(t, url), conn, begin(t, conn, o)}
			hold(t, url, j.key) // to ask for the lock would be to wait for it

			create := inBackground(t, func() (*repository.SetupRequest, error) { return j.joinWithin(t, 1, 24*24*time.Hour) })
			_, err = create()
			require.ErrorIs(t, err, repository.ErrIsolation)
			requireSQLState(t, "25000", err)
			require.False(t, repository.IsRetryable(err))
			var locks int
			require.NoError(t, j.observer.QueryRow(t.Context(),
				"SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = $1::bigint", int64(conn.PgConn().PID())).Scan(&locks))
			require.Zero(t, locks)
			j.requireUsable(t, o.AccessMode != pgx.ReadOnly)
		})
	}
	t.Run("a transaction that is read-only by the session's default, which is the caller's to change", func(t *testing.T) {
		t.Parallel()
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "SET default_transaction_read_only = on")
		require.NoError(t, err)
		j := &joint{newFixture(t, url), conn, begin(t, conn, pgx.TxOptions{})}
		_, err = j.join(t, 1)
		require.ErrorIs(t, err, repository.ErrIsolation)
		require.NotErrorIs(t, err, repository.ErrReadOnly)
		requireSQLState(t, "25000", err)
		require.False(t, repository.IsRetryable(err))
		require.False(t, j.holds(t))
		j.requireUsable(t, false)

		j.tx = begin(t, conn, pgx.TxOptions{AccessMode: pgx.ReadWrite})
		_, err = j.join(t, 1)
		require.NoError(t, err)
		j.requireUsable(t, true)
	})
	t.Run("but takes one that asks for read committed", func(t *testing.T) {
		t.Parallel()
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "SET default_transaction_isolation = 'serializable'")
		require.NoError(t, err)
		j := &joint{newFixture(t, url), conn, begin(t, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})}
		_, err = j.join(t, 1)
		require.NoError(t, err)
		j.requireUsable(t, true)
	})
}

func TestJoinLeavesTheTransactionUsable(t *testing.T) {
	t.Parallel()
	url := hostURL(t)

	t.Run("after a lock timeout, with the server's own error", func(t *testing.T) {
		t.Parallel()
		const budget = 400 * time.Millisecond
		j := newJoint(t, url, pgx.TxOptions{})
		holder := hold(t, url, j.key)
		for range 3 {
			before := time.Now()
			_, err := j.joinWithin(t, 1, budget)
			busy := requireBusy(t, err, repository.WhereAdvisory)
			requireSQLState(t, "55P03", err)
			requireAbout(t, budget, busy.Waited, time.Since(before))
		}
		require.NoError(t, holder.Rollback(t.Context()))
		require.False(t, j.holds(t))
		j.requireUsable(t, true)
	})
	t.Run("after a lock timeout that the context's deadline cut short", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		hold(t, url, j.key)
		// Long enough for the server's answer to come before the deadline also on a busy machine.
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := j.repo.CreateSetupTx(ctx, j.tx, j.user, &repository.CreateSetupOpts{LockTimeout: patience})
		requireBusy(t, err, repository.WhereAdvisory)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		j.requireUsable(t, true)
	})
	t.Run("after a wait for a writer that skips the lock", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		writer := j.insertWithoutLock(t)
		_, err := j.joinWithin(t, 1, 400*time.Millisecond)
		requireBusy(t, err, repository.WhereRow)
		require.False(t, j.holds(t), "the lock that it got is given back")

		create := inBackground(t, func() (*repository.SetupRequest, error) { return j.join(t, 1) })
		testdb.WaitForLockWait(t, j.observer, j.conn.PgConn().PID())
		require.NoError(t, writer.Commit(t.Context()))
		_, err = create()
		requireLimit(t, err, -1, 1)
		require.False(t, j.holds(t))
		j.requireUsable(t, true)
	})
	t.Run("after a refusal, which stays true under the lock", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		j.fill(t, 1, 1)
		_, err := j.join(t, 1)
		requireLimit(t, err, 1, 1)
		require.True(t, j.holds(t))
		j.requireUsable(t, true)
	})
	t.Run("after an idempotency conflict, which stays true under the lock", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.repo.CreateSetup(t.Context(), j.user, &repository.CreateSetupOpts{IdempotencyKey: "k"})
		require.NoError(t, err)
		_, err = j.repo.CreateSetupTx(t.Context(), j.tx, j.user, &repository.CreateSetupOpts{IdempotencyKey: "k", MaxPending: 2})
		require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
		require.True(t, j.holds(t))
		j.requireUsable(t, true)
	})
	t.Run("after a refusal that follows a success, still with the lock of the success", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.join(t, 1)
		require.NoError(t, err)
		_, err = j.join(t, 1)
		requireLimit(t, err, 1, 1)
		require.True(t, j.holds(t))
		j.requireUsable(t, true)
		require.Len(t, j.dump(t), 1)
	})
	t.Run("but only if it was", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		_, err := j.tx.Exec(t.Context(), "SELECT 1/0")
		requireSQLState(t, "22012", err)
		_, err = j.join(t, 1)
		requireSQLState(t, "25P02", err)
		require.False(t, repository.IsRetryable(err))
		require.ErrorIs(t, j.tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
		_, err = j.create(t, 1)
		require.NoError(t, err)
	})
}

// What latchkey prepared on the caller's connection may be dropped by the caller, or stop to fit the schema. The
// connection is not latchkey's to close, so one call fails, and the next prepares anew.
func TestJoinRecoversWhenItsStatementsBecomeUseless(t *testing.T) {
	t.Parallel()
	const newType = "ALTER TABLE latchkey.setup_requests ALTER COLUMN status TYPE varchar(20)"
	for name, spoil := range map[string]func(t *testing.T, j *joint){
		"by DEALLOCATE ALL": func(t *testing.T, j *joint) {
			t.Helper()
			_, err := j.conn.Exec(t.Context(), "DEALLOCATE ALL")
			require.NoError(t, err)
		},
		"by DISCARD ALL": func(t *testing.T, j *joint) {
			t.Helper()
			_, err := j.conn.Exec(t.Context(), "DISCARD ALL")
			require.NoError(t, err)
		},
		"by a column's new type": func(t *testing.T, j *joint) {
			t.Helper()
			testdb.Exec(t, j.url, newType)
		},
	} {
		for _, mode := range execModes {
			t.Run(name+", "+mode.String(), func(t *testing.T) {
				t.Parallel()
				url := hostURL(t) // of its own: the schema changes
				config, err := pgx.ParseConfig(url)
				require.NoError(t, err)
				config.DefaultQueryExecMode = mode
				conn, err := pgx.ConnectConfig(t.Context(), config)
				require.NoError(t, err)
				t.Cleanup(func() { conn.Close(context.Background()) })
				j := &joint{fixture: newFixture(t, url), conn: conn}
				for range 2 {
					j.tx = begin(t, conn, pgx.TxOptions{})
					_, err := j.join(t, 100)
					require.NoError(t, err)
					require.NoError(t, j.tx.Commit(t.Context()))
				}

				t.Run("for the next transaction", func(t *testing.T) {
					spoil(t, j)
					j.tx = begin(t, conn, pgx.TxOptions{})
					_, first := j.join(t, 100)
					require.NoError(t, j.tx.Rollback(t.Context()))
					j.tx = begin(t, conn, pgx.TxOptions{})
					_, err := j.join(t, 100)
					require.NoError(t, err, "after %v", first)
					require.True(t, j.holds(t))
					j.requireUsable(t, true)
				})
				testdb.Exec(t, url, "ALTER TABLE latchkey.setup_requests ALTER COLUMN status TYPE text")
				for range 2 { // the first may fail again
					j.tx = begin(t, conn, pgx.TxOptions{})
					_, err = j.join(t, 100)
					require.NoError(t, j.tx.Rollback(t.Context()))
				}
				require.NoError(t, err)
				if mode == pgx.QueryExecModeCacheStatement && name != "by a column's new type" {
					return // the savepoint itself is dropped, so there is nothing to go back to
				}
				t.Run("for the same one, which can be used on", func(t *testing.T) {
					spoil(t, j)
					j.tx = begin(t, conn, pgx.TxOptions{})
					_, first := j.join(t, 100)
					require.Equal(t, first == nil, j.holds(t))
					_, err := j.tx.Exec(t.Context(), "SELECT 1")
					require.NoError(t, err, "after %v", first)
					_, err = j.join(t, 100)
					require.NoError(t, err, "after %v", first)
					require.True(t, j.holds(t))
					j.requireUsable(t, true)
				})
			})
		}
	}
}

// What the caller set, in the transaction or the session, is what the caller finds again.
func TestJoinPutsTimeoutsBack(t *testing.T) {
	t.Parallel()
	url := hostURL(t)
	settings := []struct {
		session string // before the transaction
		inTx    string
	}{
		{"", ""},
		{"SET lock_timeout = '3s'; SET statement_timeout = '1h'", ""},
		{"", "SET LOCAL lock_timeout = '1500ms'; SET LOCAL statement_timeout = '90s'"},
		{"SET lock_timeout = '3s'", "SET LOCAL lock_timeout = '1min'; SET LOCAL statement_timeout = '2d'"},
		{"SET lock_timeout = '3s'; SET statement_timeout = '1h'", "SET LOCAL lock_timeout = 0; SET LOCAL statement_timeout = 0"},
		{"", "SET lock_timeout = '61s'; SET statement_timeout = 59999"},
		{"", "SET lock_timeout = 1; SET LOCAL lock_timeout = 7"},
		{"", "SET LOCAL statement_timeout = 2147483647"},
	}
	for name, call := range map[string]func(t *testing.T, j *joint){
		"success": func(t *testing.T, j *joint) {
			t.Helper()
			_, err := j.join(t, 1)
			require.NoError(t, err)
		},
		"a refusal": func(t *testing.T, j *joint) {
			t.Helper()
			j.fill(t, 1, 1)
			_, err := j.join(t, 1)
			requireLimit(t, err, 1, 1)
		},
		"a lock timeout": func(t *testing.T, j *joint) {
			t.Helper()
			hold(t, url, j.key)
			_, err := j.joinWithin(t, 1, 300*time.Millisecond)
			requireBusy(t, err, repository.WhereAdvisory)
		},
		"a refusal by the constraint": func(t *testing.T, j *joint) {
			t.Helper()
			_, err := j.tx.Exec(t.Context(), "SELECT") // its snapshot is not that of the call
			require.NoError(t, err)
			writer := j.insertWithoutLock(t)
			create := inBackground(t, func() (*repository.SetupRequest, error) { return j.join(t, 1) })
			testdb.WaitForLockWait(t, j.observer, j.conn.PgConn().PID())
			require.NoError(t, writer.Commit(t.Context()))
			_, err = create()
			requireLimit(t, err, -1, 1)
		},
		"two calls": func(t *testing.T, j *joint) {
			t.Helper()
			for _, limit := range []int{2, 2} {
				_, err := j.join(t, limit)
				require.NoError(t, err)
			}
		},
	} {
		t.Run("after "+name, func(t *testing.T) {
			t.Parallel()
			service := newFixture(t, url)
			for _, s := range settings {
				conn := testdb.Conn(t, url)
				_, err := conn.Exec(t.Context(), s.session)
				require.NoError(t, err)
				session := timeouts(t, conn)
				for _, end := range []func(pgx.Tx, context.Context) error{pgx.Tx.Rollback, pgx.Tx.Commit} {
					// What the same transaction without the call shows, and leaves.
					control := begin(t, conn, pgx.TxOptions{})
					_, err := control.Exec(t.Context(), s.inTx)
					require.NoError(t, err)
					within := timeouts(t, conn)
					require.NoError(t, end(control, t.Context()))
					after := timeouts(t, conn)
					_, err = conn.Exec(t.Context(), "RESET lock_timeout; RESET statement_timeout; "+s.session)
					require.NoError(t, err)
					require.Equal(t, session, timeouts(t, conn))

					j := &joint{service.withNewUser(t), conn, begin(t, conn, pgx.TxOptions{})}
					_, err = j.tx.Exec(t.Context(), s.inTx)
					require.NoError(t, err)
					call(t, j)
					require.Equal(t, within, timeouts(t, conn), "%+v", s)
					require.NoError(t, end(j.tx, t.Context()))
					require.Equal(t, after, timeouts(t, conn), "%+v", s)
				}
			}
		})
	}
}

func timeouts(t *testing.T, conn *pgx.Conn) (all string) {
	t.Helper()
	require.NoError(t, conn.QueryRow(t.Context(),
		"SELECT current_setting('lock_timeout') || ', ' || current_setting('statement_timeout')").Scan(&all))
	return all
}

func TestJoinMisuse(t *testing.T) {
	t.Parallel()
	url := hostURL(t)

	t.Run("of a transaction that has ended is an error, and harms nobody", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		for _, db := range []beginner{f.pool, testdb.Conn(t, url)} {
			for _, end := range []func(pgx.Tx, context.Context) error{pgx.Tx.Rollback, pgx.Tx.Commit} {
				tx := begin(t, db, pgx.TxOptions{})
				require.NoError(t, end(tx, t.Context()))
				_, err := f.repo.CreateSetupTx(t.Context(), tx, f.user, nil)
				require.ErrorIs(t, err, pgx.ErrTxClosed)
				require.False(t, repository.IsRetryable(err))
			}
		}
		require.Empty(t, f.dump(t))
		require.Empty(t, testdb.Holders(t, f.observer, f.key))
		_, err := f.create(t, 1)
		require.NoError(t, err)
		require.Equal(t, f.pid, pidOf(t, f.pool))
	})
	t.Run("of a transaction whose connection somebody else has got meanwhile touches it not", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		ended := begin(t, f.pool, pgx.TxOptions{})
		require.NoError(t, ended.Commit(t.Context()))
		other := begin(t, f.pool, pgx.TxOptions{})
		_, err := f.repo.CreateSetupTx(t.Context(), ended, f.user, nil)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		_, err = other.Exec(t.Context(), "INSERT INTO public.host (id) VALUES (gen_random_uuid())")
		require.NoError(t, err)
		require.NoError(t, other.Commit(t.Context()))
		require.Empty(t, f.dump(t))
	})
	t.Run("of a transaction with open rows is an error, and the transaction goes on", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		rows, err := j.tx.Query(t.Context(), "SELECT generate_series(1, 10)")
		require.NoError(t, err)
		require.True(t, rows.Next())
		create := inBackground(t, func() (*repository.SetupRequest, error) { return j.join(t, 1) })
		_, err = create()
		require.ErrorContains(t, err, "conn busy")
		require.False(t, repository.IsRetryable(err))
		rows.Close()
		require.NoError(t, rows.Err())
		_, err = j.join(t, 1)
		require.NoError(t, err)
		j.requireUsable(t, true)
		require.Len(t, j.dump(t), 1)
	})
	t.Run("from other goroutines while a call waits is an error at once, and the call goes on", func(t *testing.T) {
		t.Parallel()
		j := newJoint(t, url, pgx.TxOptions{})
		savepoint, err := j.tx.Begin(t.Context())
		require.NoError(t, err)
		holder := hold(t, url, j.key)
		waiting := inBackground(t, func() (*repository.SetupRequest, error) { return j.join(t, 1) })
		testdb.WaitForWaiter(t, j.observer, j.key, 1)
		for name, call := range map[string]func(tx pgx.Tx) error{
			"CreateSetupTx": func(tx pgx.Tx) error {
				_, err := j.repo.CreateSetupTx(t.Context(), tx, uuid.New(), nil)
				return err
			},
			"GuardTx": func(tx pgx.Tx) error {
				return j.repo.GuardTx(t.Context(), tx, []repository.Lock{items.Exclusive(j.user.String())})
			},
			"GetAccountTx, which only reads": func(tx pgx.Tx) error {
				_, err := j.repo.GetAccountTx(t.Context(), tx, uuid.New())
				return err
			},
		} {
			for _, tx := range []pgx.Tx{j.tx, savepoint, repository.TxFromConn(j.conn)} {
				err := background(t, func() error { return call(tx) })()
				require.ErrorIs(t, err, pipeline.ErrInUse, name)
				require.False(t, repository.IsRetryable(err))
			}
		}
		require.NoError(t, holder.Rollback(t.Context()))
		_, err = waiting()
		require.NoError(t, err)
		require.NoError(t, savepoint.Commit(t.Context()))
		j.requireUsable(t, true)
		require.Len(t, j.dump(t), 1)
	})
	t.Run("from four goroutines at once is an error for those who come too early, and harms nobody", func(t *testing.T) {
		t.Parallel()
		const goroutines = 4
		j := newJoint(t, url, pgx.TxOptions{})
		for round := range 30 {
			j.fixture = j.withNewUser(t)
			if round > 0 {
				j.tx = begin(t, j.conn, pgx.TxOptions{})
			}
			errs := make(racers, goroutines).atOnce(func(racer) error {
				_, err := j.join(t, goroutines)
				return err
			})
			created := 0
			for _, err := range errs {
				if err == nil {
					created++
					continue
				}
				require.ErrorIs(t, err, pipeline.ErrInUse)
			}
			require.Positive(t, created)
			j.requireUsable(t, true)
			require.Len(t, j.dump(t), created)
		}
	})
	t.Run("of the pool's last connection needs no second one", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		tx := begin(t, f.pool, pgx.TxOptions{})
		create := inBackground(t, func() (*repository.SetupRequest, error) {
			return f.repo.CreateSetupTx(t.Context(), tx, f.user, nil)
		})
		_, err := create()
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
	})
}

// A joined call and one of its own exclude each other as two of a kind do.
func TestJoinRacesExactly(t *testing.T) {
	t.Parallel()
	r := newRacers(t, testdb.URL(t), 20)
	for round := range 10 {
		limit, user := 1+round%3, uuid.New()
		o := &repository.CreateSetupOpts{MaxPending: limit}
		requireExactly(t, r.atOnce(func(c racer) error {
			if c.n%2 == 0 {
				_, err := c.repo.CreateSetup(t.Context(), user, o)
				return err
			}
			return pgx.BeginFunc(t.Context(), c.pool, func(tx pgx.Tx) error {
				_, err := c.repo.CreateSetupTx(t.Context(), tx, user, o)
				return err
			})
		}), limit)
		require.Len(t, slots(t, r[0].pool, user), limit)
	}
}
