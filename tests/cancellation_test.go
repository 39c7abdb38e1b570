package tests

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

const (
	leavers        = 200 // callers who want one key, which somebody else holds, and have little time
	leaversConns   = 8
	leaversMargin  = leaversConns // sessions beyond the pool's size; package repository's doc promises that
	leaversSoon    = 100 * time.Millisecond
	leaversRetries = 5 // the machine may be busy for the length of one
)

// departure is how the callers left.
type departure struct {
	late     time.Duration // of the last of them, after its context had ended
	bare     time.Duration // of the last of as many goroutines that did nothing but wait for that
	waiting  time.Duration // how long after the contexts' end somebody still waited at the server
	waiters  int           // the most that did so at a time
	sessions int           // the most there were at a time, but for the holder's and the observer's
}

// depart has all of them call, and waits until they and their waiters at the server are gone. Without a deadline the
// context is cancelled as soon as two wait there.
func (f *faulty) depart(t *testing.T, deadline time.Duration, call func(ctx context.Context) error) (d departure) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	if deadline > 0 {
		ctx, cancel = context.WithTimeout(t.Context(), deadline)
	}
	defer cancel()
	var cancelled atomic.Pointer[time.Time]
	ended := func() time.Time {
		if at, ok := ctx.Deadline(); ok {
			return at
		}
		return *cancelled.Load()
	}

	var callers, bare sync.WaitGroup
	errs, late, bareLate := make([]error, leavers), make([]time.Duration, leavers), make([]time.Duration, leavers)
	for i := range leavers {
		callers.Go(func() {
			errs[i] = call(ctx)
			late[i] = time.Since(ended())
		})
		bare.Go(func() {
			<-ctx.Done()
			bareLate[i] = time.Since(ended())
		})
	}
	returned := make(chan struct{})
	go func() {
		callers.Wait()
		close(returned)
	}()
	for all := false; !all; {
		select {
		case <-returned:
			all = true // and look once more
		default:
		}
		waiters, sessions := f.waitersAndSessions(t)
		d.waiters, d.sessions = max(d.waiters, waiters), max(d.sessions, sessions)
		if waiters > 1 && deadline == 0 && cancelled.Load() == nil {
			now := time.Now()
			cancelled.Store(&now)
			cancel()
		}
		all = all && waiters == 0
	}
	d.waiting = time.Since(ended())
	bare.Wait()
	d.late, d.bare = slices.Max(late), slices.Max(bareLate)
	for _, err := range errs {
		require.ErrorIs(t, err, ctx.Err())
	}
	return d
}

// waitersAndSessions counts those who wait for an advisory lock of the database, and all that are connected to it but for the
// observer and whoever holds such a lock.
func (f *faulty) waitersAndSessions(t *testing.T) (waiters, sessions int) {
	t.Helper()
	require.NoError(t, f.observer.QueryRow(t.Context(), `
		SELECT count(*) FILTER (WHERE l.waits), count(*) FILTER (WHERE l.waits IS NULL OR l.waits)
		FROM pg_catalog.pg_stat_activity AS a
		LEFT JOIN (
			SELECT pid, bool_or(NOT granted) AS waits FROM pg_catalog.pg_locks WHERE locktype = 'advisory' GROUP BY pid
		) AS l USING (pid)
		WHERE a.datname = current_database() AND a.pid <> pg_backend_pid()`).Scan(&waiters, &sessions))
	return waiters, sessions
}

func TestCancellation(t *testing.T) { //nolint:paralleltest // it measures times
	for name, how := range map[string]struct {
		deadline time.Duration
		opts     []repository.Option
	}{
		"by the caller":                              {},
		"by the caller, one by one":                  {opts: []repository.Option{repository.WithCoalescing(0)}},
		"by a deadline":                              {deadline: 300 * time.Millisecond},
		"by a deadline, of those who are let in all": {deadline: 300 * time.Millisecond, opts: []repository.Option{repository.WithCoalescing(0)}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFaulty(t, maxConns(leaversConns))
			repo, err := repository.New(f.pool, append(how.opts, repository.WithLockTimeout(patience))...)
			require.NoError(t, err)
			user := uuid.New()
			holder := hold(t, f.url, setupKey(t, user))
			var d departure
			for range leaversRetries {
				d = f.depart(t, how.deadline, func(ctx context.Context) error { return errorOf(repo.CreateSetup(ctx, user, nil)) })
				t.Logf("the last caller returned %v after the end of its context, a bare one %v; its last waiter was gone from the server after %v; "+
					"at most %d waiters, %d sessions for a pool of %d", d.late, d.bare, d.waiting, d.waiters, d.sessions, leaversConns)
				require.LessOrEqual(t, d.sessions, leaversConns+leaversMargin)
				if d.waiters > 0 && d.late <= d.bare+leaversSoon && d.waiting <= leaversSoon {
					break
				}
			}
			require.Positive(t, d.waiters, "nobody came so far as to wait at the server")
			require.LessOrEqual(t, d.late, d.bare+leaversSoon)
			require.LessOrEqual(t, d.waiting, leaversSoon)
			f.requireHealthy(t)
			require.NoError(t, holder.Rollback(t.Context()))
			require.Zero(t, f.rows(t, user))
			require.NoError(t, errorOf(repo.CreateSetup(t.Context(), user, nil)))
		})
	}
}

// A client that gives up asks the server to stop, which may get lost. What it left there then waits no longer than the call
// might have: the server knows the lock timeout.
func TestCancellationThatIsLost(t *testing.T) {
	t.Parallel()
	f := newFaulty(t, maxConns(leaversConns))
	f.requireHealthy(t)
	var lost atomic.Int64
	f.proxy.On(func(m wire.Message) wire.Action {
		if m.Is(wire.CancelRequest) {
			lost.Add(1)
			return wire.CutBefore
		}
		return wire.Forward
	})
	const lockTimeout = 3 * time.Second
	repo, err := repository.New(f.pool, repository.WithLockTimeout(lockTimeout))
	require.NoError(t, err)
	user := uuid.New()
	holder := hold(t, f.url, setupKey(t, user))

	// As a host writes it who has pgx alone; it is what shows that nothing else ends a wait.
	ctx, cancel := context.WithCancel(t.Context())
	bare := background(t, func() error { return errorOf(f.pool.Exec(ctx, takeLock, setupKey(t, user))) })
	unbounded := testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 1)
	cancel()
	require.ErrorIs(t, bare(), context.Canceled)

	ctx, cancel = context.WithCancel(t.Context())
	began := time.Now()
	var callers sync.WaitGroup
	errs := make([]error, leavers)
	for i := range errs {
		callers.Go(func() { errs[i] = errorOf(repo.CreateSetup(ctx, user, nil)) })
	}
	testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 2)
	cancel()
	callers.Wait()
	require.Less(t, time.Since(began), lockTimeout, "a lock timeout is not what ended them")
	for _, err := range errs {
		require.ErrorIs(t, err, context.Canceled)
	}
	require.Positive(t, lost.Load())
	require.Greater(t, len(testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 2)), 1, "their waiters are still there")

	for waiters := 2; waiters > 1; {
		waiters, _ = f.waitersAndSessions(t)
		require.Less(t, time.Since(began), lockTimeout+soon)
	}
	require.GreaterOrEqual(t, time.Since(began), lockTimeout)
	require.Equal(t, unbounded, testdb.WaitForWaiter(t, f.observer, setupKey(t, user), 1), "and that without a bound is")
	require.NoError(t, holder.Rollback(t.Context()))
	f.requireNoAdvisoryLock(t, 0)
	f.requireHealthy(t)
	require.Zero(t, f.rows(t, user))
}
