package tests

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// soon bounds what has to follow at once: far below patience, which the calls that it is compared with would wait.
const soon = 3 * time.Second

// faulty is a Repository behind a proxy, and a connection past it.
type faulty struct {
	*wired
	url      string
	observer *pgx.Conn
}

func newFaulty(t *testing.T, opts ...func(*pgxpool.Config)) *faulty {
	t.Helper()
	f := &faulty{url: testdb.URL(t)}
	f.wired = setupWired(t, f.url, opts...)
	var err error
	f.repo, err = repository.New(f.pool, repository.WithLockTimeout(patience))
	require.NoError(t, err)
	f.observer = testdb.Conn(t, f.url)
	return f
}

// rows returns how many requests of the user there are.
func (f *faulty) rows(t *testing.T, user uuid.UUID) int {
	t.Helper()
	var n int
	require.NoError(t, f.observer.QueryRow(t.Context(), pendingOf, user).Scan(&n))
	return n
}

// requireNoAdvisoryLock waits until nobody in the database holds an advisory lock, or waits for one, but for the pid.
func (f *faulty) requireNoAdvisoryLock(t *testing.T, but uint32) {
	t.Helper()
	started := time.Now()
	waitUntil(t, f.observer, `
		SELECT NOT EXISTS (
			SELECT FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON d.oid = l.database
			WHERE d.datname = pg_catalog.current_database() AND l.locktype = 'advisory' AND l.pid <> $1::bigint)`, int64(but))
	require.Less(t, time.Since(started), soon)
}

// requireHealthy waits until every connection is back in the pool, and makes calls.
func (f *faulty) requireHealthy(t *testing.T) {
	t.Helper()
	require.Eventually(t, func() bool { return f.pool.Stat().AcquiredConns() == 0 }, patience, time.Millisecond)
	for _, key := range []string{"", "k", "", "k"} { // each has a statement of its own, and some modes are warm after two
		_, err := f.repo.CreateSetup(t.Context(), uuid.New(), &repository.CreateSetupOpts{IdempotencyKey: key})
		require.NoError(t, err)
	}
}

func TestFaultsOutcomeIsUnknownWhenTheConnectionBreaksAfterCommitIsSent(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	for _, key := range []string{"", "k"} {
		for _, cut := range wholeCuts {
			f.requireHealthy(t) // and now the connection is warm
			name := fmt.Sprintf("%s, key %q", cut.name, key)
			user, pid := uuid.New(), pidOf(t, f.pool)
			opts := &repository.CreateSetupOpts{IdempotencyKey: key}
			f.proxy.On(once(cut.at, cut.action))
			_, err := f.repo.CreateSetup(t.Context(), user, opts)
			require.ErrorIs(t, err, repository.ErrOutcomeUnknown, name)
			require.NotErrorIs(t, err, repository.ErrConnectionLost, name)
			require.Equal(t, key != "", repository.IsRetryable(err), name)

			waitUntilGone(t, f.observer, pid)
			written := 0
			if cut.written {
				written = 1
			}
			require.Equal(t, written, f.rows(t, user), name)
			if key == "" {
				continue
			}
			again, err := f.repo.CreateSetup(t.Context(), user, opts)
			require.NoError(t, err, name)
			require.Equal(t, 1, f.rows(t, user), name)
			var id uuid.UUID
			require.NoError(t, f.observer.QueryRow(t.Context(),
				"SELECT id FROM latchkey.setup_requests WHERE user_id = $1", user).Scan(&id))
			require.Equal(t, id, again.ID, name)
		}
	}
}

// The repeat does not wait for the server to notice that the first client has gone: the lock makes it wait.
func TestFaultsRepeatAtOnceReturnsTheRowOfTheCallWhoseAnswerWasLost(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	for range 20 {
		f.requireHealthy(t) // and now the connection is warm
		user := uuid.New()
		opts := &repository.CreateSetupOpts{IdempotencyKey: "once"}
		f.proxy.On(once(endsWrite, wire.CutAfter))
		_, err := f.repo.CreateSetup(t.Context(), user, opts)
		require.ErrorIs(t, err, repository.ErrOutcomeUnknown)
		again, err := f.repo.CreateSetup(t.Context(), user, opts)
		require.NoError(t, err)
		require.Equal(t, user, again.UserID)
		waitUntil(t, f.observer, "SELECT count(*) = 1 FROM latchkey.setup_requests WHERE user_id = $1", user)
	}
}

func TestFaultsConnectionIsLost(t *testing.T) {
	t.Parallel()
	requireLost := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, repository.ErrConnectionLost)
		require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
		require.True(t, repository.IsRetryable(err))
	}
	t.Run("before anything was sent", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		f.requireHealthy(t)
		f.proxy.CutAll()
		user := uuid.New()
		_, err := f.repo.CreateSetup(t.Context(), user, nil)
		requireLost(t, err)
		require.Zero(t, f.rows(t, user))
		f.requireHealthy(t)
	})
	t.Run("before the types of a new connection's statements are known", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		f.proxy.On(once(func(m wire.Message) bool { return m.FromServer }, wire.CutBefore))
		user := uuid.New()
		_, err := f.repo.CreateSetup(t.Context(), user, nil)
		requireLost(t, err)
		require.Zero(t, f.rows(t, user))
		f.requireHealthy(t)
	})
	t.Run("by the server's will, while it waits for the lock", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		user, pid := uuid.New(), pidOf(t, f.pool)
		holder := hold(t, f.url, setupKey(t, user))
		call := background(t, func() error {
			_, err := f.repo.CreateSetup(t.Context(), user, nil)
			return err
		})
		require.Equal(t, []uint32{pid}, testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 1))
		_, err := f.observer.Exec(t.Context(), "SELECT pg_catalog.pg_terminate_backend($1)", int64(pid))
		require.NoError(t, err)
		err = call()
		requireSQLState(t, "57P01", err)
		requireLost(t, err)
		require.NoError(t, holder.Rollback(t.Context()))
		f.requireHealthy(t)
		require.Zero(t, f.rows(t, user))
	})
	t.Run("in a read", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		f.requireHealthy(t)
		f.proxy.On(once(func(m wire.Message) bool { return m.Is('S') }, wire.CutAfter))
		_, err := f.repo.GetSetup(t.Context(), uuid.New())
		requireLost(t, err)
	})
	t.Run("in the caller's transaction, which is the caller's to run again", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		user := uuid.New()
		tx, err := f.pool.Begin(t.Context())
		require.NoError(t, err)
		f.proxy.On(once(isAnswer, wire.CutBefore))
		_, err = f.repo.CreateSetupTx(t.Context(), tx, user, nil)
		requireLost(t, err)
		require.Error(t, tx.Rollback(t.Context()))
		f.requireHealthy(t)
		require.Zero(t, f.rows(t, user))
	})
	t.Run("because nobody is there", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		require.NoError(t, listener.Close())
		repo, err := repository.New(testdb.PoolAt(t, "postgres://nobody@"+listener.Addr().String()+"/nothing?sslmode=disable"))
		require.NoError(t, err)
		_, err = repo.CreateSetup(t.Context(), uuid.New(), nil)
		requireLost(t, err)
		_, err = repo.GetSetup(t.Context(), uuid.New())
		requireLost(t, err)
	})
}

// A login that the server refuses is refused again, one for which it has no room now may be let in later.
func TestFaultsRefusedLogin(t *testing.T) {
	t.Parallel()
	call := func(t *testing.T, pool *pgxpool.Pool, check func(error)) {
		t.Helper()
		repo, err := repository.New(pool)
		require.NoError(t, err)
		_, err = repo.CreateSetup(t.Context(), uuid.New(), nil)
		check(err)
		_, err = repo.GetSetup(t.Context(), uuid.New())
		check(err)
		check(repo.Guard(t.Context(), []repository.Lock{items.Exclusive("1")}, func(context.Context, *repository.Tx) error {
			panic("called")
		}))
	}
	for code, lost := range map[string]bool{
		"28P01": false, // the password is wrong
		"28000": false, // there is no such role, or none from here
		"3D000": false, // there is no such database
		"53300": true,  // there are too many connections
		"57P03": true,  // it starts or shuts down
	} {
		t.Run(fmt.Sprintf("with %s may be tried again: %t", code, lost), func(t *testing.T) {
			t.Parallel()
			call(t, testdb.PoolAt(t, refuse(t, code)), func(err error) {
				requireSQLState(t, code, err)
				require.Equal(t, lost, errors.Is(err, repository.ErrConnectionLost), "%v", err)
				require.Equal(t, lost, repository.IsRetryable(err), "%v", err)
			})
		})
	}
	for name, change := range map[string]func(c *pgxpool.Config){
		"a role that does not exist, and its password": func(c *pgxpool.Config) {
			c.ConnConfig.User, c.ConnConfig.Password = "latchkey_nobody", "wrong"
		},
		"a database that does not exist": func(c *pgxpool.Config) { c.ConnConfig.Database = "latchkey_nothing" },
	} {
		t.Run("of "+name+" is the server's own error", func(t *testing.T) {
			t.Parallel()
			call(t, testdb.PoolAt(t, testdb.Server(t).URL(), change), func(err error) {
				var pgErr *pgconn.PgError
				require.ErrorAs(t, err, &pgErr)
				require.Contains(t, []string{"28P01", "28000", "3D000"}, pgErr.Code)
				require.NotErrorIs(t, err, repository.ErrConnectionLost)
				require.False(t, repository.IsRetryable(err))
			})
		})
	}
}

// refuse starts a server that answers every login with the SQLSTATE, and returns its connection string.
func refuse(t *testing.T, code string) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	var serving sync.WaitGroup
	t.Cleanup(func() {
		_ = listener.Close()
		serving.Wait()
	})
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			backend := pgproto3.NewBackend(conn, conn)
			if _, err := backend.ReceiveStartupMessage(); err == nil {
				backend.Send(&pgproto3.ErrorResponse{Severity: "FATAL", Code: code, Message: "refused"})
				_ = backend.Flush()
			}
			_ = conn.Close()
		}
	})
	return "postgres://somebody:wrong@" + listener.Addr().String() + "/something?sslmode=disable"
}

func TestFaultsCancelledWaitEndsOnTheServer(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	f.requireHealthy(t) // and now the connection is warm
	user := uuid.New()
	holder := hold(t, f.url, setupKey(t, user))
	ctx, cancel := context.WithCancel(t.Context())
	call := background(t, func() error {
		_, err := f.repo.CreateSetup(ctx, user, nil)
		return err
	})
	testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 1)
	cancel()
	err := call()
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorIs(t, err, repository.ErrOutcomeUnknown, "COMMIT was sent")
	require.False(t, repository.IsRetryable(err))
	require.NotContains(t, err.Error(), "conn closed")
	require.NotContains(t, err.Error(), "tx is closed")
	f.requireNoAdvisoryLock(t, holder.Conn().PgConn().PID())
	require.NoError(t, holder.Rollback(t.Context()))
	f.requireHealthy(t)
	require.Zero(t, f.rows(t, user))
}

func TestFaultsCancelledBeforeAnythingIsSent(t *testing.T) {
	t.Parallel()
	f := newFaulty(t)
	f.requireHealthy(t)
	pid := pidOf(t, f.pool)
	ended, end := context.WithCancel(t.Context())
	end()
	f.proxy.Reset()
	user := uuid.New()
	_, err := f.repo.CreateSetup(ended, user, nil)
	require.ErrorIs(t, err, context.Canceled)
	require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
	_, err = f.repo.GetSetup(ended, user)
	require.ErrorIs(t, err, context.Canceled)
	require.Zero(t, f.proxy.Traffic())
	require.Equal(t, pid, pidOf(t, f.pool))
	require.Zero(t, f.rows(t, user))
}

func TestFaultsCancelledCallsLeaveNothingBehind(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, maxConns(8))
	users := []uuid.UUID{uuid.New(), uuid.New(), uuid.New()}
	var callers sync.WaitGroup
	failed := make(chan error, 500)
	for i := range 500 {
		callers.Go(func() {
			ctx, cancel := context.WithCancel(t.Context())
			defer time.AfterFunc(rand.N(50*time.Millisecond), cancel).Stop()
			_, err := f.repo.CreateSetup(ctx, users[i%len(users)], nil)
			if err != nil && !errors.Is(err, context.Canceled) && !errors.Is(err, repository.ErrPendingExists) {
				failed <- err
			}
			cancel()
		})
	}
	callers.Wait()
	close(failed)
	require.NoError(t, <-failed)
	f.requireNoAdvisoryLock(t, 0)
	f.requireHealthy(t)
	for _, user := range users {
		require.LessOrEqual(t, f.rows(t, user), 1)
		_, err := f.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 2})
		require.NoError(t, err)
	}
}

// A call that gives up may lose its connection; the pool opens another while the server ends the old one.
func TestFaultsManyCallersOnOneLockDoNotFloodTheServer(t *testing.T) {
	t.Parallel()
	const (
		name   = "latchkey-flood"
		most   = 8
		margin = 8 // one that is ending for each that is in use
	)
	f := newFaulty(t, maxConns(most), func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = name })
	user := uuid.New()
	holder := hold(t, f.url, setupKey(t, user))

	var callers sync.WaitGroup
	errs := make([]error, 200)
	for i := range errs {
		callers.Go(func() {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			defer cancel()
			_, errs[i] = f.repo.CreateSetup(ctx, user, nil)
		})
	}
	done := make(chan struct{})
	go func() {
		callers.Wait()
		close(done)
	}()
	for running := true; running; {
		select {
		case <-done:
			running = false
		default:
		}
		var sessions int
		require.NoError(t, f.observer.QueryRow(t.Context(),
			"SELECT count(*) FROM pg_catalog.pg_stat_activity WHERE application_name = $1", name).Scan(&sessions))
		require.LessOrEqual(t, sessions, most+margin)
	}
	for _, err := range errs {
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	f.requireNoAdvisoryLock(t, holder.Conn().PgConn().PID())
	require.NoError(t, holder.Rollback(t.Context()))
	f.requireHealthy(t)
	require.Zero(t, f.rows(t, user))
}

func TestFaultsServerThatNeverAnswers(t *testing.T) {
	t.Parallel()
	// calls makes the calls, each of which must end with its context.
	calls := func(t *testing.T, repo *repository.Repository, check func(t *testing.T, err error)) {
		t.Helper()
		for _, call := range []func(ctx context.Context) error{
			func(ctx context.Context) error {
				_, err := repo.CreateSetup(ctx, uuid.New(), nil)
				return err
			},
			func(ctx context.Context) error {
				_, err := repo.GetSetup(ctx, uuid.New())
				return err
			},
		} {
			ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
			err := background(t, func() error { return call(ctx) })()
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			check(t, err)
		}
	}
	t.Run("not even to a new connection", func(t *testing.T) {
		t.Parallel()
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		pool := testdb.PoolAt(t, "postgres://nobody@"+listener.Addr().String()+"/nothing?sslmode=disable")
		t.Cleanup(func() { listener.Close() }) // before the pool, which waits for its connections
		repo, err := repository.New(pool, repository.WithLockTimeout(100*time.Millisecond))
		require.NoError(t, err)
		calls(t, repo, func(t *testing.T, err error) {
			t.Helper()
			require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
		})

		err = background(t, func() error {
			_, err := repo.CreateSetup(t.Context(), uuid.New(), nil)
			return err
		})()
		var busy *repository.LockBusyError
		require.ErrorAs(t, err, &busy)
		require.Equal(t, repository.WherePool, busy.Where)
	})
	t.Run("to a call on a warm connection", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t, maxConns(3))
		f.requireHealthy(t)
		f.proxy.On(func(m wire.Message) wire.Action {
			if m.FromServer {
				return wire.Hold
			}
			return wire.Forward
		})
		calls(t, f.repo, func(*testing.T, error) {})
		f.proxy.On(nil)
		_, err := f.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
		f.proxy.CutAll() // pgx gives a server 15 s to say goodbye, and the pool waits for it
	})
}

func TestFaultsReadOnlyServer(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, maxConns(3))
	alterDatabase(t, f.url, "default_transaction_read_only", "on")
	// A failover leaves a pool full of connections to the old primary.
	var old []*pgxpool.Conn
	for range 3 {
		conn, err := f.pool.Acquire(t.Context())
		require.NoError(t, err)
		old = append(old, conn)
	}
	pids := map[uint32]bool{}
	for _, conn := range old {
		pids[conn.Conn().PgConn().PID()] = true
		conn.Release()
	}
	testdb.Exec(t, f.url, "SET default_transaction_read_only = off",
		"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$")

	user := uuid.New()
	for range old {
		_, err := f.repo.CreateSetup(t.Context(), user, nil)
		require.ErrorIs(t, err, repository.ErrReadOnly)
		require.True(t, repository.IsRetryable(err))
		requireSQLState(t, "25006", err)
	}
	_, err := f.repo.CreateSetup(t.Context(), user, nil)
	require.NoError(t, err, "each of the old connections failed once")
	require.False(t, pids[pidOf(t, f.pool)])
	require.Equal(t, 1, f.rows(t, user))
}

// With this handler pgx asks the server to cancel, and waits for its answer: nothing is unknown, nothing lost.
func TestFaultsCancelledWithACancelRequestKeepsTheConnection(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: patience}
		}
	})
	f.requireHealthy(t)
	user, pid := uuid.New(), pidOf(t, f.pool)
	holder := hold(t, f.url, setupKey(t, user))
	for range 3 {
		ctx, cancel := context.WithCancel(t.Context())
		call := background(t, func() error {
			_, err := f.repo.CreateSetup(ctx, user, nil)
			return err
		})
		testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 1)
		cancel()
		err := call()
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
		requireSQLState(t, "57014", err)
		require.Equal(t, pid, pidOf(t, f.pool))
	}
	f.requireNoAdvisoryLock(t, holder.Conn().PgConn().PID())
	require.NoError(t, holder.Rollback(t.Context()))
	_, err := f.repo.CreateSetup(t.Context(), user, nil)
	require.NoError(t, err)
	require.Equal(t, pid, pidOf(t, f.pool))
}

// A commit that waits for a synchronous standby is done on the primary. To be cancelled ends the wait, not the commit.
func TestFaultsCommitThatWaitsForAStandby(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil)
	url, _, err := server.NewDatabase(t.Context())
	require.NoError(t, err)
	f := newFixture(t, url).withForeign(t, map[string]string{"synchronous_commit": "on"})
	f.fill(t, 2, 4) // and now the connection is warm
	_, err = f.observer.Exec(t.Context(), "ALTER SYSTEM SET synchronous_standby_names = 'nobody'")
	require.NoError(t, err)
	_, err = f.observer.Exec(t.Context(), "SELECT pg_catalog.pg_reload_conf()")
	require.NoError(t, err)
	const waits = "SELECT coalesce(wait_event, '') = 'SyncRep' FROM pg_stat_activity WHERE pid = $1::bigint"
	// The server's processes learn of it one by one. It is in force when a commit waits.
	probe := testdb.Conn(t, url)
	_, err = probe.Exec(t.Context(), "SET synchronous_commit = on")
	require.NoError(t, err)
	var seen atomic.Bool
	probed := background(t, func() error {
		for !seen.Load() {
			if _, err := probe.Exec(t.Context(), "SELECT pg_catalog.pg_logical_emit_message(true, '', '')"); err != nil {
				return err
			}
		}
		return nil
	})
	waitUntil(t, f.observer, waits, int64(probe.PgConn().PID()))
	seen.Store(true)
	_, err = f.observer.Exec(t.Context(), "SELECT pg_cancel_backend($1)", int64(probe.PgConn().PID()))
	require.NoError(t, err)
	require.NoError(t, probed())

	interrupted := func(how string) error {
		create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 4) })
		waitUntil(t, f.observer, waits, int64(f.pid))
		_, err := f.observer.Exec(t.Context(), "SELECT "+how+"($1)", int64(f.pid))
		require.NoError(t, err)
		_, err = create()
		return err
	}
	require.NoError(t, interrupted("pg_cancel_backend"))
	require.ErrorIs(t, interrupted("pg_terminate_backend"), repository.ErrOutcomeUnknown)
	require.Equal(t, []int{1, 2, 3, 4}, slots(t, f.pool, f.user))
}

func TestFaultsClientThatHangs(t *testing.T) {
	t.Parallel()
	// hang makes a call whose client hangs at a message, and a call for the same user by another client.
	hang := func(t *testing.T, f *faulty, at func(wire.Message) bool) (user uuid.UUID, other *repository.Repository, hung func() error) {
		t.Helper()
		f.requireHealthy(t) // and now the connection is warm
		user = uuid.New()
		other, err := repository.New(testdb.PoolAt(t, f.url, maxConns(1)))
		require.NoError(t, err)
		reached := make(chan struct{})
		var first sync.Once
		f.proxy.On(func(m wire.Message) wire.Action {
			if !at(m) {
				return wire.Forward
			}
			first.Do(func() { close(reached) })
			return wire.Hold
		})
		hung = background(t, func() error {
			_, err := f.repo.CreateSetup(t.Context(), user, nil)
			return err
		})
		select {
		case <-reached:
		case <-time.After(patience):
			require.FailNow(t, "the call does not come so far")
		}
		return user, other, hung
	}
	t.Run("after it has sent the batch holds nothing up", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		user, other, hung := hang(t, f, isAnswer)
		_, err := other.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 2})
		require.NoError(t, err)
		require.Equal(t, 2, f.rows(t, user), "the batch was committed")
		f.proxy.CutAll()
		require.ErrorIs(t, hung(), repository.ErrOutcomeUnknown)
	})
	// One network write does not get stuck half-way unless the network does. Others are told within their budget, and
	// the lock is free when the server sees the connection end, for which it has its TCP timeouts.
	t.Run("while half of its batch is on the way holds others up no longer than their budget", func(t *testing.T) {
		t.Parallel()
		f := newFaulty(t)
		user, other, hung := hang(t, f, endsWrite)
		// The server has all but Sync: it does not answer, but it has the lock.
		waitUntil(t, f.observer, `
			SELECT EXISTS (SELECT FROM pg_catalog.pg_locks AS l WHERE l.locktype = 'advisory' AND l.granted
			AND (l.classid::bigint << 32) | l.objid::bigint = $1)`, setupKey(t, user))
		_, err := other.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{LockTimeout: 50 * time.Millisecond})
		require.ErrorIs(t, err, repository.ErrLockBusy)
		_, err = other.TryCreateSetup(t.Context(), user, nil)
		require.ErrorIs(t, err, repository.ErrLockBusy)
		f.proxy.CutAll()
		require.ErrorIs(t, hung(), repository.ErrOutcomeUnknown)
		_, err = other.CreateSetup(t.Context(), user, nil)
		require.NoError(t, err)
		require.Equal(t, 1, f.rows(t, user))
	})
}

// The lock timeout is for all that a call waits for, also where a new connection asks for the types of its statements,
// which waits for whoever is changing the table.
func TestFaultsNewConnectionWaitsNoLongerThanItsBudget(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t) // of its own: the table is locked
			pool := testdb.PoolAt(t, url, withExecMode(mode))
			repo, err := repository.New(pool, repository.WithLockTimeout(100*time.Millisecond))
			require.NoError(t, err)
			migration := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
			_, err = migration.Exec(t.Context(), "LOCK TABLE latchkey.setup_requests IN ACCESS EXCLUSIVE MODE")
			require.NoError(t, err)
			call := background(t, func() error {
				ctx, cancel := context.WithTimeout(t.Context(), soon)
				defer cancel()
				_, err := repo.CreateSetup(ctx, uuid.New(), nil)
				return err
			})
			err = call()
			require.ErrorIs(t, err, repository.ErrLockBusy)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.NoError(t, migration.Rollback(t.Context()))
		})
	}
}
