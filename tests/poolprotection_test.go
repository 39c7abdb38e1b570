package tests

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

const (
	crowdSize  = 500 // callers who want one key, which somebody else holds
	passersBy  = 20  // callers with other keys
	smallPool  = 10
	inDatabase = 2  // of the crowd, at a time
	callsEach  = 50 // of a passer-by in a phase: a thousand of them all, so that ten are slower than the 99th percentile
	phases     = 5  // of each kind in an attempt
	attempts   = 3  // the machine may be busy for the length of one
	mostSlower = 2.0
)

// Callers who wait for a hot key hold no connections, so the others get theirs as if nobody waited. The test is not
// parallel: it compares times.
func TestPoolProtection(t *testing.T) { //nolint:paralleltest // see above
	p := newProtected(t)

	t.Run("keeps the others as fast as without the crowd", func(t *testing.T) {
		var ratio float64
		for range attempts {
			if ratio = p.slowdown(t); ratio <= mostSlower {
				break
			}
		}
		require.LessOrEqual(t, ratio, mostSlower)
	})
	for name, call := range map[string]func(ctx context.Context, repo *repository.Repository, user uuid.UUID) error{
		"a method": func(ctx context.Context, repo *repository.Repository, user uuid.UUID) error {
			return errorOf(repo.CreateSetup(ctx, user, nil))
		},
		"Guard": func(ctx context.Context, repo *repository.Repository, user uuid.UUID) error {
			return repo.Guard(ctx, []repository.Lock{items.Exclusive(user.String())}, func(ctx context.Context, tx *repository.Tx) error {
				return errorOf(tx.Last().Exec(ctx, "SELECT"))
			})
		},
	} {
		t.Run("lets every caller of "+name+" give up in time", func(t *testing.T) {
			const timeout = time.Second
			repo, err := repository.New(p.pool, repository.WithLockTimeout(timeout))
			require.NoError(t, err)
			user := uuid.New()
			key := setupKey(t, user)
			if name == "Guard" {
				key = itemKey(t, user.String())
			}
			c := p.crowd(t, key, func() error { return call(t.Context(), repo, user) })
			require.Len(t, testdb.WaitForWaiter(t, p.observer, key, inDatabase), inDatabase)
			for _, err := range c.wait(t) {
				var busy *repository.LockBusyError
				require.ErrorAs(t, err, &busy)
				require.GreaterOrEqual(t, busy.Waited, timeout)
			}
			c.release(t)
			p.requireQuiet(t, c)
		})
	}
	t.Run("is needed", func(t *testing.T) {
		key, timeout := int64(1), 100*time.Millisecond
		c := p.crowd(t, key, func() error { // as a host writes it who has pgx and no queue
			return pgx.BeginFunc(t.Context(), p.pool, func(tx pgx.Tx) error { return errorOf(tx.Exec(t.Context(), takeLock, key)) })
		})
		require.Len(t, testdb.WaitForWaiter(t, p.observer, key, smallPool), smallPool)
		_, errs := p.passBy(t.Context(), 1, timeout)
		for _, err := range errs {
			var busy *repository.LockBusyError
			require.ErrorAs(t, err, &busy)
			require.Equal(t, repository.WherePool, busy.Where)
		}
		c.release(t)
		require.NoError(t, errors.Join(c.wait(t)...))
		p.requireQuiet(t, c)
	})
}

// protected is a service with a small pool, and somebody else who can hold its keys.
type protected struct {
	pool     *pgxpool.Pool
	repo     *repository.Repository
	other    *pgx.Conn
	observer *pgx.Conn
}

func newProtected(t *testing.T) *protected {
	t.Helper()
	url := testdb.URL(t)
	p := &protected{pool: testdb.PoolAt(t, url, maxConns(smallPool)), other: testdb.Conn(t, url), observer: testdb.Conn(t, url)}
	var err error
	p.repo, err = repository.New(p.pool)
	require.NoError(t, err)
	_, errs := p.passBy(t.Context(), callsEach, patience) // so that all connections are there and warm
	require.NoError(t, errors.Join(errs...))
	return p
}

// passBy has each of the passers-by create requests one after the other, each for a user of its own, until one fails.
// It returns how long each took, shortest first.
func (p *protected) passBy(ctx context.Context, each int, timeout time.Duration) (took []time.Duration, errs []error) {
	var (
		callers sync.WaitGroup
		mu      sync.Mutex
	)
	for range passersBy {
		callers.Go(func() {
			for range each {
				began := time.Now()
				_, err := p.repo.CreateSetup(ctx, uuid.New(), &repository.CreateSetupOpts{LockTimeout: timeout})
				mu.Lock()
				took, errs = append(took, time.Since(began)), append(errs, err)
				mu.Unlock()
				if err != nil {
					return
				}
			}
		})
	}
	callers.Wait()
	slices.Sort(took)
	return took, errs
}

// slowdown returns by how much the crowd makes the 99th percentile of the others longer, by the medians of phases with
// and without it that take turns.
func (p *protected) slowdown(t *testing.T) float64 {
	t.Helper()
	p99 := func() time.Duration {
		t.Helper()
		took, errs := p.passBy(t.Context(), callsEach, repository.DefaultLockTimeout)
		require.NoError(t, errors.Join(errs...))
		return took[len(took)*99/100]
	}
	var without, with []time.Duration
	for range phases {
		without = append(without, p99())

		user := uuid.New()
		key := setupKey(t, user)
		c := p.crowd(t, key, func() error {
			return errorOf(p.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: crowdSize, LockTimeout: patience}))
		})
		testdb.WaitForWaiter(t, p.observer, key, inDatabase)
		with = append(with, p99())
		require.Len(t, testdb.WaitForWaiter(t, p.observer, key, inDatabase), inDatabase, "two of the crowd wait in the server, the others before it")
		require.EqualValues(t, inDatabase, p.pool.Stat().AcquiredConns(), "the others of the crowd hold no connection")
		c.release(t)
		require.NoError(t, errors.Join(c.wait(t)...))
		p.requireQuiet(t, c)
	}
	slices.Sort(without)
	slices.Sort(with)
	a, b := without[phases/2], with[phases/2]
	ratio := float64(b) / float64(a)
	t.Logf("99th percentile of %d callers: %v alone, %v while %d wait for a hot key, ratio %.2f", passersBy, a, b, crowdSize, ratio)
	return ratio
}

// crowd is many calls that want one key while somebody else holds it.
type crowd struct {
	goroutines int // that there were before
	holder     pgx.Tx
	calls      sync.WaitGroup
	errs       [crowdSize]error
}

func (p *protected) crowd(t *testing.T, key int64, call func() error) *crowd {
	t.Helper()
	c := &crowd{goroutines: runtime.NumGoroutine(), holder: begin(t, p.other, pgx.TxOptions{})}
	_, err := c.holder.Exec(t.Context(), takeLock, key)
	require.NoError(t, err)
	for i := range c.errs {
		c.calls.Go(func() { c.errs[i] = call() })
	}
	return c
}

func (c *crowd) release(t *testing.T) {
	t.Helper()
	require.NoError(t, c.holder.Rollback(t.Context()))
}

// wait returns what came of the calls.
func (c *crowd) wait(t *testing.T) []error {
	t.Helper()
	_, err := inBackground(t, func() (struct{}, error) {
		c.calls.Wait()
		return struct{}{}, nil
	})()
	require.NoError(t, err)
	return c.errs[:]
}

// requireQuiet waits until nothing is left of the crowd.
func (p *protected) requireQuiet(t *testing.T, c *crowd) {
	t.Helper()
	deadline := time.After(patience)
	for p.pool.Stat().AcquiredConns() > 0 || runtime.NumGoroutine() > c.goroutines {
		select {
		case <-deadline:
			stacks := make([]byte, 1<<20)
			require.FailNow(t, "something is left of the crowd", "%d connections are taken; there were %d goroutines, there are:\n%s",
				p.pool.Stat().AcquiredConns(), c.goroutines, stacks[:runtime.Stack(stacks, true)])
		case <-time.After(10 * time.Millisecond):
		}
	}
}
