package tests

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestSetupLimitHoldsInARace(t *testing.T) {
	t.Parallel()
	for _, callers := range []int{20, 30} {
		t.Run(fmt.Sprintf("%d callers, limits 1 to 5, many rounds", callers), func(t *testing.T) {
			t.Parallel()
			r := newRacers(t, testdb.URL(t), callers)
			for round := range 25 {
				limit := 1 + round%5
				r.requireExact(t, uuid.New(), limit)
			}
		})
	}
	for name, gather := range gatherings {
		t.Run("also of callers "+name, func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t)
			testdb.Exec(t, url, append(slowInserts, dropPendingKey)...)
			r := gather.racers(t, url, 20)
			for round := range 2 {
				r.requireExact(t, uuid.New(), 1+2*round)
			}
		})
	}
	t.Run("also while every insert takes its time", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		testdb.Exec(t, url, slowInserts...)
		newRacers(t, url, 20).requireExact(t, uuid.New(), 1)
	})
	t.Run("also without the constraint behind it", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		testdb.Exec(t, url, append(slowInserts, dropPendingKey)...)
		newRacers(t, url, 20).requireExact(t, uuid.New(), 3)
	})
	t.Run("and does not hold without the lock", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		testdb.Exec(t, url, append(slowInserts, dropPendingKey)...)
		r, user := newRacers(t, url, 20), uuid.New()
		errs := r.atOnce(func(c racer) error {
			_, err := db.New(c.pool).SetupInsertWithinLimit(t.Context(),
				db.SetupInsertWithinLimitParams{ID: pg(uuid.New()), UserID: pg(user), MaxPending: 3})
			return err
		})
		require.NoError(t, errors.Join(errs...))
		require.Greater(t, len(slots(t, r[0].pool, user)), 3, "the guard is off, so this race must break the rule")
	})
	t.Run("also while requests are completed", func(t *testing.T) {
		t.Parallel()
		requireLimitWhileCompleting(t)
	})
}

// requireLimitWhileCompleting has callers create and others complete what they created, and looks all the time.
func requireLimitWhileCompleting(t *testing.T) {
	t.Helper()
	const (
		limit   = 2
		callers = 8
		each    = 40
	)
	url := testdb.URL(t)
	testdb.Exec(t, url, dropPendingKey) // so that only the lock can keep the limit
	r, user := newRacers(t, url, callers), uuid.New()

	var created, refused, most atomic.Int64
	looking, stop := context.WithCancel(t.Context())
	observer := testdb.PoolAt(t, url)
	look := inBackground(t, func() (struct{}, error) {
		for looking.Err() == nil {
			var n int64
			err := observer.QueryRow(t.Context(), pendingOf, user).Scan(&n)
			if err != nil {
				return struct{}{}, err
			}
			most.Store(max(most.Load(), n))
		}
		return struct{}{}, nil
	})
	errs := r.atOnce(func(c racer) error {
		for range each {
			s, err := c.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: limit})
			switch {
			case errors.Is(err, repository.ErrPendingExists):
				refused.Add(1)
				continue
			case err != nil:
				return err
			}
			created.Add(1)
			if _, err := c.repo.CompleteSetup(t.Context(), s.ID); err != nil {
				return err
			}
		}
		return nil
	})
	stop()
	_, err := look()
	require.NoError(t, errors.Join(append(errs, err)...))
	require.LessOrEqual(t, most.Load(), int64(limit))
	require.Positive(t, most.Load(), "nothing was ever seen pending")
	require.Greater(t, created.Load(), int64(limit), "no place was ever used again")
	require.Equal(t, int64(callers*each), created.Load()+refused.Load())
}

func TestSetupLimit(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)

	t.Run("refuses with what it counted, and writes nothing", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		for used := range 3 {
			_, err := f.create(t, 3)
			require.NoError(t, err, used)
		}
		before := f.dump(t)
		_, err := f.create(t, 3)
		requireLimit(t, err, 3, 3)
		require.Equal(t, before, f.dump(t))
		require.ErrorContains(t, err, "latchkey: CreateSetup: ")

		_, err = f.repo.CreateSetup(t.Context(), f.user, nil)
		requireLimit(t, err, 3, 1)
	})
	t.Run("is 1 by default", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s, err := f.repo.CreateSetup(t.Context(), f.user, nil)
		require.NoError(t, err)
		require.Equal(t, 1, s.MaxPending)
		require.Equal(t, f.user, s.UserID)
		require.Equal(t, repository.SetupPending, s.Status)
		require.Empty(t, s.IdempotencyKey)
		require.Nil(t, s.EndedAt)
		_, err = f.repo.CreateSetup(t.Context(), f.user, nil)
		requireLimit(t, err, 1, 1)
	})
	t.Run("is of one user", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		for range 5 {
			_, err := f.repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.NoError(t, err)
		}
	})
	t.Run("has each pending request in a slot, the next one or, after the last, the first that is free", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s := f.fill(t, 5, 5)
		require.Equal(t, []int{1, 2, 3, 4, 5}, slots(t, f.pool, f.user))
		_, err := f.repo.CompleteSetup(t.Context(), s[3].ID)
		require.NoError(t, err)
		_, err = f.repo.CancelSetup(t.Context(), s[1].ID)
		require.NoError(t, err)
		require.Equal(t, []int{1, 3, 5}, slots(t, f.pool, f.user))

		for _, want := range []int{6, 2, 4} {
			s, err := f.create(t, 6)
			require.NoError(t, err)
			require.Equal(t, want, f.slot(t, s.ID))
		}
		_, err = f.create(t, 6)
		requireLimit(t, err, 6, 6)
	})
	t.Run("may be lowered and raised from call to call", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s := f.fill(t, 3, 3)
		_, err := f.create(t, 2)
		requireLimit(t, err, 3, 2)

		for _, s := range s[:2] {
			_, err := f.repo.CompleteSetup(t.Context(), s.ID)
			require.NoError(t, err)
		}
		require.Equal(t, []int{3}, slots(t, f.pool, f.user))
		_, err = f.create(t, 1)
		requireLimit(t, err, 1, 1)
		_, err = f.create(t, 2) // the one pending sits in a slot above this limit
		require.NoError(t, err)
		require.Equal(t, []int{1, 3}, slots(t, f.pool, f.user))
		_, err = f.create(t, 2)
		requireLimit(t, err, 2, 2)

		f.fill(t, 2, 4)
		require.Equal(t, []int{1, 2, 3, 4}, slots(t, f.pool, f.user))
		_, err = f.create(t, 4)
		requireLimit(t, err, 4, 4)
	})
	t.Run("goes up to 1000", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		_, err := f.pool.Exec(t.Context(), `
			INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending)
			SELECT $1, n, 1000 FROM generate_series(1, 1000) AS n WHERE n <> 500`, f.user)
		require.NoError(t, err)
		s, err := f.create(t, 1000)
		require.NoError(t, err)
		require.Equal(t, 500, f.slot(t, s.ID))
		_, err = f.create(t, 1000)
		requireLimit(t, err, 1000, 1000)

		_, err = f.pool.Exec(t.Context(), "DELETE FROM latchkey.setup_requests WHERE user_id = $1 AND pending_slot = 1000", f.user)
		require.NoError(t, err)
		s, err = f.create(t, 1000)
		require.NoError(t, err)
		require.Equal(t, 1000, f.slot(t, s.ID))
	})
}

func TestSetupTry(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	// It would end the test, not the wait.
	forever := &repository.CreateSetupOpts{LockTimeout: 24 * 24 * time.Hour}
	try := func(t *testing.T, f *fixture) (*repository.SetupRequest, error) {
		t.Helper()
		return inBackground(t, func() (*repository.SetupRequest, error) {
			return f.repo.TryCreateSetup(t.Context(), f.user, forever)
		})()
	}

	t.Run("creates if nobody holds the lock", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s, err := try(t, f)
		require.NoError(t, err)
		require.Equal(t, s, f.get(t, s.ID))
	})
	t.Run("is busy at once if another holds the lock", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		holder := hold(t, url, f.key)
		_, err := try(t, f)
		busy := requireBusy(t, err, repository.WhereAdvisory)
		require.NotErrorIs(t, err, repository.ErrPendingExists)
		require.Equal(t, "setup_request", busy.Namespace)
		requireSQLState(t, "55P03", err)
		require.Empty(t, f.dump(t))

		require.NoError(t, holder.Rollback(t.Context()))
		_, err = try(t, f)
		require.NoError(t, err)
	})
	t.Run("is busy also where the limit is reached, since it cannot know", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		f.fill(t, 1, 1)
		hold(t, url, f.key)
		_, err := try(t, f)
		requireBusy(t, err, repository.WhereAdvisory)
		require.NotErrorIs(t, err, repository.ErrPendingExists)
	})
	t.Run("is refused, not busy, if the limit is reached", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		f.fill(t, 1, 1)
		_, err := try(t, f)
		requireLimit(t, err, 1, 1)
		require.NotErrorIs(t, err, repository.ErrLockBusy)
	})
	t.Run("does not wait for a writer that skips the lock either", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		f.insertWithoutLock(t)
		_, err := try(t, f)
		requireBusy(t, err, repository.WhereRow)
		requireSQLState(t, "55P03", err)
	})
	t.Run("does not blame a deadline that is far away", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		hold(t, url, f.key)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := f.repo.TryCreateSetup(ctx, f.user, forever)
		requireBusy(t, err, repository.WhereAdvisory)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
	})
}

func TestSetupIdempotency(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	withKey := func(key string, limit int) *repository.CreateSetupOpts {
		return &repository.CreateSetupOpts{MaxPending: limit, IdempotencyKey: key}
	}

	t.Run("a repeat returns the first call's request and uses no quota", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		first, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 2))
		require.NoError(t, err)
		require.Equal(t, "k", first.IdempotencyKey)
		before := f.dump(t)
		for range 3 {
			again, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 2))
			require.NoError(t, err)
			require.Equal(t, first, again)
		}
		require.Equal(t, before, f.dump(t))
		_, err = f.create(t, 2)
		require.NoError(t, err)
	})
	t.Run("a repeat is answered by try and join too", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		first, err := f.repo.TryCreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		again, err := f.repo.TryCreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		require.Equal(t, first, again)
		tx := begin(t, f.pool, pgx.TxOptions{})
		again, err = f.repo.CreateSetupTx(t.Context(), tx, f.user, withKey("k", 1))
		require.NoError(t, err)
		require.Equal(t, first, again)
		require.NoError(t, tx.Commit(t.Context()))
	})
	t.Run("a repeat is answered although the limit has been reached", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		first, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 3))
		require.NoError(t, err)
		f.fill(t, 2, 3)
		_, err = f.create(t, 3)
		requireLimit(t, err, 3, 3)
		again, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 3))
		require.NoError(t, err)
		require.Equal(t, first, again)
	})
	t.Run("a repeat returns the request as it is by then, and never a second one", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		first, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		completed, err := f.repo.CompleteSetup(t.Context(), first.ID)
		require.NoError(t, err)
		again, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		require.Equal(t, completed, again)
		require.Empty(t, slots(t, f.pool, f.user))
	})
	t.Run("the same key with another limit is a conflict", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		_, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 2))
		require.NoError(t, err)
		before := f.dump(t)
		for _, limit := range []int{0, 1, 3} {
			_, err = f.repo.CreateSetup(t.Context(), f.user, withKey("k", limit))
			require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
			require.NotErrorIs(t, err, repository.ErrPendingExists)
			require.False(t, repository.IsRetryable(err))
		}
		require.Equal(t, before, f.dump(t))
	})
	t.Run("the default limit and 1 are the same parameters", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		first, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 0))
		require.NoError(t, err)
		again, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		require.Equal(t, first, again)
	})
	t.Run("the same key of another user is another key", func(t *testing.T) {
		t.Parallel()
		f, g := newFixture(t, url), newFixture(t, url)
		first, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		second, err := g.repo.CreateSetup(t.Context(), g.user, withKey("k", 2))
		require.NoError(t, err)
		require.NotEqual(t, first.ID, second.ID)
		require.Equal(t, g.user, second.UserID)
	})
	t.Run("a refused call leaves the key free", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s := f.fill(t, 1, 1)
		_, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		requireLimit(t, err, 1, 1)
		_, err = f.repo.CancelSetup(t.Context(), s[0].ID)
		require.NoError(t, err)
		created, err := f.repo.CreateSetup(t.Context(), f.user, withKey("k", 1))
		require.NoError(t, err)
		require.NotEqual(t, s[0].ID, created.ID)
	})
	t.Run("keys are compared byte by byte", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		long := strings.Repeat("ü", 127) + "x" // 255 bytes
		seen := map[uuid.UUID]string{}
		for _, key := range []string{"k", "K", "k ", " k", "\u00e9", "e\u0301", "'", `\`, "\n", "%", long, long[2:]} {
			s, err := f.repo.CreateSetup(t.Context(), f.user, withKey(key, 100))
			require.NoError(t, err)
			require.Equal(t, key, s.IdempotencyKey)
			require.Equal(t, s, f.get(t, s.ID))
			require.NotContains(t, seen, s.ID, "%q and %q", key, seen[s.ID])
			seen[s.ID] = key
		}
	})
	t.Run("20 repeats at once give one row and 20 equal answers", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, url, 20)
		for range 10 {
			user := uuid.New()
			var mu sync.Mutex
			var answers []*repository.SetupRequest
			errs := r.atOnce(func(c racer) error {
				s, err := c.repo.CreateSetup(t.Context(), user, withKey("k", 1))
				mu.Lock()
				defer mu.Unlock()
				answers = append(answers, s)
				return err
			})
			require.NoError(t, errors.Join(errs...))
			require.Len(t, answers, 20)
			for _, s := range answers {
				require.Equal(t, answers[0], s)
			}
			require.Equal(t, []int{1}, slots(t, r[0].pool, user))
		}
	})
	t.Run("a key that a writer without the lock used is a conflict", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		writer := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := writer.Exec(t.Context(), `
			INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending, idempotency_key)
			VALUES ($1, 2, 2, 'k')`, f.user)
		require.NoError(t, err)
		create := inBackground(t, func() (*repository.SetupRequest, error) {
			return f.repo.CreateSetup(t.Context(), f.user, withKey("k", 2))
		})
		testdb.WaitForLockWait(t, f.observer, f.pid)
		require.NoError(t, writer.Commit(t.Context()))
		_, err = create()
		require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
		requireSQLState(t, "23505", err)
	})
}

func TestSetupEnd(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	type end func(*repository.Repository, context.Context, uuid.UUID) (*repository.SetupRequest, error)
	ends := map[repository.SetupStatus]end{
		repository.SetupCompleted: (*repository.Repository).CompleteSetup,
		repository.SetupCancelled: (*repository.Repository).CancelSetup,
	}
	for status, end := range ends {
		t.Run(string(status)+" frees the place and is final", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url)
			created := f.fill(t, 1, 1)[0]
			ended, err := end(f.repo, t.Context(), created.ID)
			require.NoError(t, err)
			require.NotNil(t, ended.EndedAt)
			require.False(t, ended.EndedAt.Before(created.CreatedAt))
			want := created
			want.Status, want.EndedAt = status, ended.EndedAt
			require.Equal(t, &want, ended)
			require.Equal(t, ended, f.get(t, created.ID))

			for _, again := range ends {
				_, err := again(f.repo, t.Context(), created.ID)
				require.ErrorIs(t, err, repository.ErrNotPending)
				require.NotErrorIs(t, err, repository.ErrNotFound)
			}
			require.Equal(t, ended, f.get(t, created.ID))
			f.fill(t, 1, 1)
		})
		t.Run(string(status)+" of an unknown request is not found", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url)
			_, err := end(f.repo, t.Context(), uuid.New())
			require.ErrorIs(t, err, repository.ErrNotFound)
			require.NotErrorIs(t, err, pgx.ErrNoRows, "the driver's error is not part of the API")
			_, err = f.repo.GetSetup(t.Context(), uuid.New())
			require.ErrorIs(t, err, repository.ErrNotFound)
		})
		t.Run(string(status)+" waits for a row that is locked, at most its budget", func(t *testing.T) {
			t.Parallel()
			const budget = 200 * time.Millisecond
			f := newFixture(t, url, repository.WithLockTimeout(budget))
			s := f.fill(t, 1, 1)[0]
			locker := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
			_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.setup_requests WHERE id = $1 FOR UPDATE", s.ID)
			require.NoError(t, err)

			before := time.Now()
			_, err = end(f.repo, t.Context(), s.ID)
			busy := requireBusy(t, err, repository.WhereRow)
			requireSQLState(t, "55P03", err)
			require.Empty(t, busy.Namespace, "it asked for no advisory lock")
			requireAbout(t, budget, busy.Waited, time.Since(before))

			require.NoError(t, locker.Rollback(t.Context()))
			require.Equal(t, &s, f.get(t, s.ID))
			_, err = end(f.repo, t.Context(), s.ID)
			require.NoError(t, err)
		})
	}
	t.Run("of two that wait for each other's row, the later finds it ended", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		s := f.fill(t, 1, 1)[0]
		other := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := db.New(other).SetupEnd(t.Context(), db.SetupEndParams{ID: pg(s.ID), Status: "cancelled"})
		require.NoError(t, err)
		complete := inBackground(t, func() (*repository.SetupRequest, error) {
			return f.repo.CompleteSetup(t.Context(), s.ID)
		})
		testdb.WaitForLockWait(t, f.observer, f.pid)
		require.NoError(t, other.Commit(t.Context()))
		_, err = complete()
		require.ErrorIs(t, err, repository.ErrNotPending)
		require.Equal(t, repository.SetupCancelled, f.get(t, s.ID).Status)
	})
	t.Run("of 20 at once one wins", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, url, 20)
		for range 10 {
			s, err := r[0].repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.NoError(t, err)
			var mu sync.Mutex
			var won []*repository.SetupRequest
			errs := r.atOnce(func(c racer) error {
				end := ends[repository.SetupCompleted]
				if c.n%2 == 0 {
					end = ends[repository.SetupCancelled]
				}
				s, err := end(c.repo, t.Context(), s.ID)
				if err == nil {
					mu.Lock()
					defer mu.Unlock()
					won = append(won, s)
				}
				return err
			})
			require.Len(t, won, 1)
			for _, err := range errs {
				if err != nil {
					require.ErrorIs(t, err, repository.ErrNotPending)
				}
			}
			now, err := r[0].repo.GetSetup(t.Context(), s.ID)
			require.NoError(t, err)
			require.Equal(t, won[0], now)
		}
	})
}

// The constraint stops those who do not take the lock, and stops us when they were first.
func TestSetupWriterWithoutTheLock(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)

	t.Run("that commits is a refusal by the constraint", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		writer := f.insertWithoutLock(t)
		create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 2) })
		testdb.WaitForLockWait(t, f.observer, f.pid)
		require.NoError(t, writer.Commit(t.Context()))
		_, err := create()
		requireLimit(t, err, -1, 2)
		requireSQLState(t, "23505", err)
		require.Equal(t, []int{1}, slots(t, f.pool, f.user))

		_, err = f.create(t, 2)
		require.NoError(t, err, "by now it can be counted")
	})
	t.Run("that rolls back is as if it had not been", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		writer := f.insertWithoutLock(t)
		create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 1) })
		testdb.WaitForLockWait(t, f.observer, f.pid)
		require.NoError(t, writer.Rollback(t.Context()))
		_, err := create()
		require.NoError(t, err)
		require.Equal(t, []int{1}, slots(t, f.pool, f.user))
	})
	t.Run("that stays open is waited for at most the budget", func(t *testing.T) {
		t.Parallel()
		const budget = 200 * time.Millisecond
		f := newFixture(t, url, repository.WithLockTimeout(budget))
		f.insertWithoutLock(t)
		before := time.Now()
		_, err := f.create(t, 1)
		busy := requireBusy(t, err, repository.WhereRow)
		requireSQLState(t, "55P03", err)
		requireAbout(t, budget, busy.Waited, time.Since(before))
		require.Empty(t, testdb.Holders(t, f.observer, f.key))
	})
	t.Run("is stopped by the constraint itself", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		f.fill(t, 1, 1)
		_, err := f.pool.Exec(t.Context(), "INSERT INTO latchkey.setup_requests (user_id) VALUES ($1)", f.user)
		requireSQLState(t, "23505", err)
	})
}

// To end a request takes no lock, so the others of the user may end between the count and the insert.
func TestSetupIsCreatedWhileOthersEnd(t *testing.T) {
	t.Parallel()
	const limit, key = 7, 77
	url := testdb.URL(t)
	testdb.Exec(t, url, waitingInserts(limit, key)...)
	local := newFixture(t, url)
	past := newFixture(t, url)
	for _, gap := range []bool{false, true} {
		f := local.withNewUser(t)
		want, pending := 4, f.fill(t, 3, limit-1)
		if gap {
			pending = append(pending, f.fill(t, limit-3, limit+1)...)
			for _, s := range pending[1 : limit-1] {
				_, err := f.repo.CompleteSetup(t.Context(), s.ID)
				require.NoError(t, err)
			}
			want, pending = 2, []repository.SetupRequest{pending[0], pending[limit-1]}
		}
		holder := hold(t, url, key)
		create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, limit) })
		testdb.WaitForWaiter(t, f.observer, key, 1)
		for _, s := range pending {
			_, err := past.repo.CompleteSetup(t.Context(), s.ID)
			require.NoError(t, err)
		}
		_, err := f.observer.Exec(t.Context(), "INSERT INTO latchkey.setup_requests (user_id) VALUES ($1)", f.user) // into slot 1
		require.NoError(t, err)
		require.NoError(t, holder.Rollback(t.Context()))
		s, err := create()
		require.NoError(t, err)
		require.Equal(t, want, f.slot(t, s.ID))

		f.fill(t, limit-3, limit-1)
		_, err = f.create(t, limit-1)
		requireLimit(t, err, limit-1, limit-1)
		require.Equal(t, []int{1, 2, 3, 4, 5, 6}, slots(t, f.pool, f.user))
	}
}

func TestSetupList(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	pages := func(t *testing.T, f *fixture, size int, between func()) []repository.SetupRequest {
		t.Helper()
		var all []repository.SetupRequest
		o := &repository.ListOpts{Limit: size}
		for {
			page, err := f.repo.ListSetups(t.Context(), f.user, o)
			require.NoError(t, err)
			if len(page) == 0 {
				return all
			}
			require.LessOrEqual(t, len(page), size)
			all = append(all, page...)
			o.After = page[len(page)-1].Cursor()
			between()
		}
	}
	newestFirst := func(s []repository.SetupRequest) []repository.SetupRequest {
		s = slices.Clone(s)
		slices.Reverse(s)
		return s
	}

	t.Run("is newest first, of one user, in any state", func(t *testing.T) {
		t.Parallel()
		f, other := newFixture(t, url), newFixture(t, url)
		other.fill(t, 2, 2)
		want := f.fill(t, 4, 5)
		completed, err := f.repo.CompleteSetup(t.Context(), want[1].ID)
		require.NoError(t, err)
		want[1] = *completed
		got, err := f.repo.ListSetups(t.Context(), f.user, nil)
		require.NoError(t, err)
		require.Equal(t, newestFirst(want), got)
		for _, s := range got {
			require.Equal(t, &s, f.get(t, s.ID))
		}
		n, err := f.repo.CountPendingSetups(t.Context(), f.user)
		require.NoError(t, err)
		require.Equal(t, 3, n)
	})
	t.Run("of an unknown user is empty", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		got, err := f.repo.ListSetups(t.Context(), f.user, nil)
		require.NoError(t, err)
		require.Empty(t, got)
		n, err := f.repo.CountPendingSetups(t.Context(), f.user)
		require.NoError(t, err)
		require.Zero(t, n)
	})
	t.Run("in pages of any size is the whole, also while rows are added", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		want := f.fill(t, 7, 1000)
		for size := 1; size <= 8; size++ {
			require.Equal(t, newestFirst(want), pages(t, f, size, func() {}))
		}
		got := pages(t, f, 2, func() { f.fill(t, 1, 1000) })
		require.Equal(t, newestFirst(want), got, "those that were there at the start, once each")
		count, err := f.repo.CountPendingSetups(t.Context(), f.user)
		require.NoError(t, err)
		require.Greater(t, count, len(want), "no row was added meanwhile")
	})
	t.Run("in pages loses and repeats no row of one instant", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		f.fill(t, 7, 7)
		_, err := f.pool.Exec(t.Context(), `
			UPDATE latchkey.setup_requests SET created_at = '2026-04-05 01:45:00.123456+10:30' WHERE user_id = $1`, f.user)
		require.NoError(t, err)
		whole, err := f.repo.ListSetups(t.Context(), f.user, nil)
		require.NoError(t, err)
		require.Len(t, whole, 7)
		require.True(t, slices.IsSortedFunc(whole, func(a, b repository.SetupRequest) int {
			return strings.Compare(b.ID.String(), a.ID.String())
		}))
		for size := 1; size <= 7; size++ {
			require.Equal(t, whole, pages(t, f, size, func() {}))
		}
	})
	t.Run("does not begin after half a cursor, and sends nothing", func(t *testing.T) {
		t.Parallel()
		repo, dials := nowhere(t)
		for _, after := range []repository.Cursor{{CreatedAt: time.Now()}, {ID: uuid.New()}} {
			_, setups := repo.ListSetups(t.Context(), uuid.New(), &repository.ListOpts{After: after})
			_, entries := repo.ListEntries(t.Context(), uuid.New(), &repository.ListOpts{After: after})
			_, joined := repo.ListEntriesTx(t.Context(), struct{ pgx.Tx }{}, uuid.New(), &repository.ListOpts{After: after})
			for _, err := range []error{setups, entries, joined} {
				var invalid *repository.InvalidError
				require.ErrorAs(t, err, &invalid)
				require.ErrorIs(t, err, repository.ErrInvalid)
				require.Equal(t, "After", invalid.Argument)
				require.False(t, repository.IsRetryable(err))
			}
		}
		require.Zero(t, dials.Load())
	})
	t.Run("has at most 100 rows by default, and 1000 in any case", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		_, err := f.pool.Exec(t.Context(), `
			INSERT INTO latchkey.setup_requests (user_id, status, ended_at)
			SELECT $1, 'completed', clock_timestamp() FROM generate_series(1, 1001)`, f.user)
		require.NoError(t, err)
		for limit, want := range map[int]int{0: 100, 1: 1, 101: 101, 1000: 1000} {
			got, err := f.repo.ListSetups(t.Context(), f.user, &repository.ListOpts{Limit: limit})
			require.NoError(t, err)
			require.Len(t, got, want)
		}
		require.Len(t, pages(t, f, 1000, func() {}), 1001)
	})
}

// now() is when the transaction began, which is before it waited.
func TestSetupIsCreatedAfterTheWait(t *testing.T) {
	t.Parallel()
	f := newFixture(t, testdb.URL(t))
	holder := hold(t, f.url, f.key)
	create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 1) })
	testdb.WaitForWaiter(t, f.observer, f.key, 1)
	var released time.Time
	require.NoError(t, holder.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&released))
	require.NoError(t, holder.Commit(t.Context()))
	s, err := create()
	require.NoError(t, err)
	require.False(t, s.CreatedAt.Before(released), "created %v, the lock was held until %v", s.CreatedAt, released)
}

func TestSetupKeys(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for name, user := range map[string]string{
		"a negative key": "3f2b8a54-9f0e-4d9c-8a1e-7d6c5b4a3f21",
		"a positive key": "b5a0e105-fa50-4ad1-b12a-c1f09a181998",
	} {
		t.Run("of a user with "+name+" is the lock that a call waits for", func(t *testing.T) {
			t.Parallel()
			f := newFixtureOf(t, url, uuid.MustParse(user))
			require.Equal(t, strings.HasPrefix(name, "a negative"), f.key < 0)
			holder := hold(t, url, f.key)
			create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 1) })
			require.Equal(t, []uint32{f.pid}, testdb.WaitForWaiter(t, f.observer, f.key, 1))
			require.NoError(t, holder.Rollback(t.Context()))
			s, err := create()
			require.NoError(t, err)
			_, err = f.create(t, 1)
			requireLimit(t, err, 1, 1)
			_, err = f.repo.CancelSetup(t.Context(), s.ID)
			require.NoError(t, err)
		})
	}
	t.Run("are one for every spelling of a UUID", func(t *testing.T) {
		t.Parallel()
		user := uuid.New()
		text := user.String()
		spellings := []string{
			text, strings.ToUpper(text), "{" + text + "}", "urn:uuid:" + text, strings.ReplaceAll(text, "-", ""),
		}
		r := newRacers(t, url, 20)
		errs := r.atOnce(func(c racer) error {
			parsed, err := uuid.Parse(spellings[c.n%len(spellings)])
			if err != nil {
				return err
			}
			_, err = c.repo.CreateSetup(t.Context(), parsed, nil)
			return err
		})
		requireExactly(t, errs, 1)
		require.Equal(t, []int{1}, slots(t, r[0].pool, user))
	})
	t.Run("of other users are not waited for", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		hold(t, url, f.key)
		_, err := f.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
	})
}

func TestSetupConnections(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("one is enough for every method", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		require.Equal(t, int32(1), f.pool.Config().MaxConns)
		f.callEverything(t)
		require.Zero(t, f.pool.Stat().AcquiredConns())
	})
	t.Run("few are enough for many callers", func(t *testing.T) {
		t.Parallel()
		pool := testdb.PoolAt(t, url, maxConns(4))
		repo, err := repository.New(pool, repository.WithLockTimeout(patience))
		require.NoError(t, err)
		r := make(racers, 32)
		for i := range r {
			r[i] = racer{n: i, pool: pool, repo: repo}
		}
		require.NoError(t, errors.Join(r.atOnce(func(c racer) error {
			for range 5 {
				if _, err := c.repo.CreateSetup(t.Context(), uuid.New(), nil); err != nil {
					return err
				}
			}
			return nil
		})...))
	})
	t.Run("that are warm survive a new column", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, testdb.URL(t))
		f.callEverything(t)
		testdb.Exec(t, f.url, "ALTER TABLE latchkey.setup_requests ADD COLUMN note text, ADD COLUMN flag boolean NOT NULL DEFAULT true")
		f.callEverything(t)
		require.Equal(t, f.pid, pidOf(t, f.pool), "the connection is the one with the cached plans")
	})
}

// The lock timeout is the whole wait: for a connection and for the lock.
func TestSetupBudget(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	const budget = 200 * time.Millisecond

	for name, tc := range map[string]struct{ ofRepository, ofCall time.Duration }{
		"the Repository's":              {budget, 0},
		"the call's, if that is less":   {patience, budget},
		"the call's, if that is longer": {time.Millisecond, budget},
	} {
		t.Run("bounds the wait for the lock: "+name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url, repository.WithLockTimeout(tc.ofRepository))
			holder := hold(t, url, f.key)
			before := time.Now()
			_, err := f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: tc.ofCall})
			busy := requireBusy(t, err, repository.WhereAdvisory)
			requireSQLState(t, "55P03", err)
			requireAbout(t, budget, busy.Waited, time.Since(before))
			require.Equal(t, "setup_request", busy.Namespace)
			require.NotErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, f.pid, pidOf(t, f.pool), "the connection is kept")
			require.Empty(t, f.dump(t))

			require.NoError(t, holder.Rollback(t.Context()))
			_, err = f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: patience})
			require.NoError(t, err)
		})
	}
	t.Run("of a millisecond is enough where nobody else asks", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url, repository.WithLockTimeout(time.Millisecond))
		bound := time.Now().Add(patience) // the machine may be busy
		for {
			_, err := f.repo.CreateSetup(t.Context(), uuid.New(), nil)
			if err == nil {
				return
			}
			requireBusy(t, err, "")
			require.True(t, time.Now().Before(bound), "it never succeeds: %v", err)
		}
	})
	t.Run("bounds the wait for a connection", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url, repository.WithLockTimeout(budget))
		conn, err := f.pool.Acquire(t.Context())
		require.NoError(t, err)
		for name, call := range map[string]func() error{
			"create": func() error {
				_, err := f.create(t, 1)
				return err
			},
			"try": func() error {
				_, err := f.repo.TryCreateSetup(t.Context(), f.user, nil)
				return err
			},
			"complete": func() error {
				_, err := f.repo.CompleteSetup(t.Context(), uuid.New())
				return err
			},
		} {
			before := time.Now()
			err := call()
			busy := requireBusy(t, err, repository.WherePool)
			require.NoError(t, busy.Err, name)
			require.NotErrorIs(t, err, context.DeadlineExceeded, name)
			requireAbout(t, budget, busy.Waited, time.Since(before))
		}
		conn.Release()
		_, err = f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: patience})
		require.NoError(t, err)
	})
	t.Run("is for the connection and the lock together", func(t *testing.T) {
		t.Parallel()
		const budget, spent = 1500 * time.Millisecond, 300 * time.Millisecond
		seen := new(budgets)
		pool := testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen })
		repo, err := repository.New(pool)
		require.NoError(t, err)
		user := uuid.New()
		hold(t, url, setupKey(t, user))
		conn, err := pool.Acquire(t.Context())
		require.NoError(t, err)

		ctx := &startContext{Context: t.Context(), started: make(chan time.Time, 1)}
		began := time.Now()
		create := inBackground(t, func() (*repository.SetupRequest, error) {
			return repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{LockTimeout: budget})
		})
		started := <-ctx.started
		<-time.After(time.Until(started.Add(spent)))
		conn.Release()
		_, err = create()
		busy := requireBusy(t, err, repository.WhereAdvisory)
		requireAbout(t, budget, busy.Waited, time.Since(began))
		require.Len(t, seen.ms, 1)
		require.Positive(t, seen.ms[0])
		require.LessOrEqual(t, seen.ms[0], (budget - spent).Milliseconds(), "what the server was given")
	})
	t.Run("is shortened by the context's deadline, and then it is both errors", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		hold(t, url, f.key)
		for range 10 {
			ctx, cancel := context.WithTimeout(t.Context(), budget)
			_, err := f.repo.CreateSetup(ctx, f.user, &repository.CreateSetupOpts{LockTimeout: patience})
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			if errors.Is(err, repository.ErrOutcomeUnknown) {
				f.pid = pidOf(t, f.pool)
				continue // the machine was so busy that the server's answer came after the deadline
			}
			busy := requireBusy(t, err, repository.WhereAdvisory)
			requireSQLState(t, "55P03", err)
			require.GreaterOrEqual(t, busy.Waited, budget/2)
			require.Equal(t, f.pid, pidOf(t, f.pool), "the connection is kept")
			return
		}
		require.FailNow(t, "the server's answer never comes before the deadline")
	})
	t.Run("is shortened by the context's deadline also for a connection", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		conn, err := f.pool.Acquire(t.Context())
		require.NoError(t, err)
		defer conn.Release()
		ctx, cancel := context.WithTimeout(t.Context(), budget)
		defer cancel()
		_, err = f.repo.CreateSetup(ctx, f.user, &repository.CreateSetupOpts{LockTimeout: patience})
		requireBusy(t, err, repository.WherePool)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
	t.Run("is not shortened by a deadline that is later", func(t *testing.T) {
		t.Parallel()
		f := newFixture(t, url)
		hold(t, url, f.key)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		_, err := f.repo.CreateSetup(ctx, f.user, &repository.CreateSetupOpts{LockTimeout: budget})
		busy := requireBusy(t, err, repository.WhereAdvisory)
		require.NotErrorIs(t, err, context.DeadlineExceeded)
		require.GreaterOrEqual(t, busy.Waited, budget-time.Millisecond)
	})
}

// startContext tells when a call has started its clock: that is when it asks for the deadline.
type startContext struct {
	context.Context
	started chan time.Time
}

func (c *startContext) Deadline() (time.Time, bool) {
	select {
	case c.started <- time.Now():
	default:
	}
	return c.Context.Deadline()
}

// budgets traces what the server is told to wait at most.
type budgets struct{ ms []int64 }

func (b *budgets) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (b *budgets) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData)     {}
func (b *budgets) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) {}
func (b *budgets) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)     {}
func (b *budgets) TraceBatchStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceBatchStartData) context.Context {
	for _, q := range data.Batch.QueuedQueries {
		switch { //nolint:forcetypeassert // if not, the test may panic
		case strings.HasPrefix(q.SQL, "-- name: TxSetLockBudget "):
			b.ms = append(b.ms, q.Arguments[2].(int64))
		case strings.HasPrefix(q.SQL, "-- name: LockOneAtOnce "):
			b.ms = append(b.ms, q.Arguments[0].(int64))
		}
	}
	return ctx
}

const (
	// patience is for what must come. A machine that needs longer is broken.
	patience = 30 * time.Second

	pendingOf = "SELECT count(*) FROM latchkey.setup_requests WHERE user_id = $1 AND status = 'pending'"

	// dropPendingKey takes away the constraint that would hide a broken lock.
	dropPendingKey = "DROP INDEX latchkey.setup_requests_pending_key"
)

// waitingInserts have a request with this limit wait for the advisory lock before it is inserted.
func waitingInserts(limit, key int) []string {
	return []string{fmt.Sprintf(`
		CREATE FUNCTION public.wait() RETURNS trigger LANGUAGE plpgsql AS $$
		BEGIN PERFORM pg_catalog.pg_advisory_xact_lock(%d); RETURN NEW; END $$`, key), fmt.Sprintf(`
		CREATE TRIGGER wait BEFORE INSERT ON latchkey.setup_requests
		FOR EACH ROW WHEN (NEW.max_pending = %d) EXECUTE FUNCTION public.wait()`, limit)}
}

// slowInserts keep a row invisible to others for a while after it was decided on.
var slowInserts = []string{
	`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.15); RETURN NEW; END $$`,
	`CREATE TRIGGER slow BEFORE INSERT ON latchkey.setup_requests FOR EACH ROW EXECUTE FUNCTION public.slow()`,
}

// fixture is a service with one connection, so that the backend that is watched is the one that works, and a
// user whom nobody else has.
type fixture struct {
	url      string
	pool     *pgxpool.Pool
	pid      uint32
	repo     *repository.Repository
	user     uuid.UUID
	key      int64
	observer *pgx.Conn
}

func newFixture(t *testing.T, url string, opts ...repository.Option) *fixture {
	t.Helper()
	return newFixtureOf(t, url, uuid.New(), opts...)
}

func newFixtureOf(t *testing.T, url string, user uuid.UUID, opts ...repository.Option) *fixture {
	t.Helper()
	if len(opts) == 0 {
		opts = []repository.Option{repository.WithLockTimeout(patience)}
	}
	f := &fixture{url: url, pool: testdb.PoolAt(t, url, maxConns(1)), user: user, key: setupKey(t, user), observer: testdb.Conn(t, url)}
	f.pid = pidOf(t, f.pool)
	var err error
	f.repo, err = repository.New(f.pool, opts...)
	require.NoError(t, err)
	return f
}

func setupKey(t *testing.T, user uuid.UUID) int64 {
	t.Helper()
	key, err := repository.Key("setup_request", user.String())
	require.NoError(t, err)
	return key
}

// withNewUser is the same service with another user.
func (f *fixture) withNewUser(t *testing.T) *fixture {
	t.Helper()
	g := *f
	g.user = uuid.New()
	g.key = setupKey(t, g.user)
	return &g
}

func pidOf(t *testing.T, pool *pgxpool.Pool) uint32 {
	t.Helper()
	conn, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer conn.Release()
	return conn.Conn().PgConn().PID()
}

func (f *fixture) create(t *testing.T, limit int) (*repository.SetupRequest, error) {
	t.Helper()
	return f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{MaxPending: limit})
}

// fill creates n requests under the limit, oldest first.
func (f *fixture) fill(t *testing.T, n, limit int) []repository.SetupRequest {
	t.Helper()
	var all []repository.SetupRequest
	for range n {
		s, err := f.create(t, limit)
		require.NoError(t, err)
		all = append(all, *s)
	}
	return all
}

func (f *fixture) get(t *testing.T, id uuid.UUID) *repository.SetupRequest {
	t.Helper()
	s, err := f.repo.GetSetup(t.Context(), id)
	require.NoError(t, err)
	return s
}

// callEverything calls each method and requires what it must return.
func (f *fixture) callEverything(t *testing.T) {
	t.Helper()
	user := uuid.New()
	first, err := f.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 3, IdempotencyKey: "k"})
	require.NoError(t, err)
	second, err := f.repo.TryCreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 3})
	require.NoError(t, err)
	tx := begin(t, f.pool, pgx.TxOptions{})
	third, err := f.repo.CreateSetupTx(t.Context(), tx, user, &repository.CreateSetupOpts{MaxPending: 3})
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))
	_, err = f.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: 3})
	requireLimit(t, err, 3, 3)

	first, err = f.repo.CompleteSetup(t.Context(), first.ID)
	require.NoError(t, err)
	second, err = f.repo.CancelSetup(t.Context(), second.ID)
	require.NoError(t, err)
	require.Equal(t, third, f.get(t, third.ID))
	list, err := f.repo.ListSetups(t.Context(), user, nil)
	require.NoError(t, err)
	require.Equal(t, []repository.SetupRequest{*third, *second, *first}, list)
	n, err := f.repo.CountPendingSetups(t.Context(), user)
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// dump returns the user's rows with every column and their versions.
func (f *fixture) dump(t *testing.T) []string {
	t.Helper()
	rows, err := f.observer.Query(t.Context(), "SELECT s.xmin || s::text FROM latchkey.setup_requests AS s WHERE user_id = $1 ORDER BY id", f.user)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

func (f *fixture) slot(t *testing.T, id uuid.UUID) (slot int) {
	t.Helper()
	require.NoError(t, f.observer.QueryRow(t.Context(), "SELECT pending_slot FROM latchkey.setup_requests WHERE id = $1", id).Scan(&slot))
	return slot
}

// insertWithoutLock writes into slot 1, in a transaction that the caller ends.
func (f *fixture) insertWithoutLock(t *testing.T) pgx.Tx {
	t.Helper()
	writer := begin(t, testdb.Conn(t, f.url), pgx.TxOptions{})
	_, err := writer.Exec(t.Context(), "INSERT INTO latchkey.setup_requests (user_id) VALUES ($1)", f.user)
	require.NoError(t, err)
	return writer
}

// slots returns the slots of the user's pending requests.
func slots(t *testing.T, pool *pgxpool.Pool, user uuid.UUID) []int {
	t.Helper()
	rows, err := pool.Query(t.Context(), `
		SELECT pending_slot FROM latchkey.setup_requests WHERE user_id = $1 AND status = 'pending' ORDER BY pending_slot`, user)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[int])
	require.NoError(t, err)
	return all
}

type beginner interface {
	BeginTx(ctx context.Context, o pgx.TxOptions) (pgx.Tx, error)
}

// begin begins a transaction that is over at the end of the test, if not before.
func begin(t *testing.T, db beginner, o pgx.TxOptions) pgx.Tx {
	t.Helper()
	tx, err := db.BeginTx(t.Context(), o)
	require.NoError(t, err)
	t.Cleanup(func() { tx.Rollback(context.Background()) }) //nolint:errcheck // as a rule it has ended
	return tx
}

// inBackground starts a call, and returns a function that waits for what it returns.
func inBackground[T any](t *testing.T, call func() (T, error)) func() (T, error) {
	t.Helper()
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		value, err := call()
		done <- result{value, err}
	}()
	return func() (T, error) {
		t.Helper()
		select {
		case r := <-done:
			return r.value, r.err
		case <-time.After(patience):
			require.FailNow(t, "the call does not return")
			panic("unreachable")
		}
	}
}

// racer is one caller in a race, a service with a pool of its own.
type racer struct {
	n    int
	pool *pgxpool.Pool
	repo *repository.Repository
}

type racers []racer

// raceTrack lets two races run at once: with more of them, machines with many processors would run out of
// connections. A test that has it starts no parallel sub-tests, which could wait for those that wait for it.
var raceTrack = make(chan struct{}, 2)

// newRacers opens n pools of one connection each. Their lock timeout is long: none of them is to be busy.
func newRacers(t *testing.T, url string, n int, opts ...func(*pgxpool.Config)) racers {
	t.Helper()
	raceTrack <- struct{}{}
	t.Cleanup(func() { <-raceTrack })
	all := make(racers, n)
	for i := range all {
		pool := testdb.PoolAt(t, url, append(opts, maxConns(1))...)
		repo, err := repository.New(pool, repository.WithLockTimeout(2*patience))
		require.NoError(t, err)
		all[i] = racer{i, pool, repo}
		require.NoError(t, pool.Ping(t.Context()), "connected before the race, not in it")
	}
	return all
}

// atOnce lets all of them do one thing at the same time, and returns what came of it.
func (r racers) atOnce(do func(racer) error) []error {
	errs, gun := make([]error, len(r)), make(chan struct{})
	var wg sync.WaitGroup
	for i, c := range r {
		wg.Go(func() {
			<-gun
			errs[i] = do(c)
		})
	}
	close(gun)
	wg.Wait()
	return errs
}

// requireExact lets all create for the user, and requires that exactly limit succeed and all others are refused.
func (r racers) requireExact(t *testing.T, user uuid.UUID, limit int) {
	t.Helper()
	requireExactly(t, r.atOnce(func(c racer) error {
		_, err := c.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: limit})
		return err
	}), limit)
	want := make([]int, limit)
	for i := range want {
		want[i] = i + 1
	}
	// Without the constraint, two in one slot would show here.
	require.Equal(t, want, slots(t, r[0].pool, user))
}

func requireExactly(t *testing.T, errs []error, limit int) {
	t.Helper()
	created := 0
	for _, err := range errs {
		if err == nil {
			created++
			continue
		}
		requireLimit(t, err, int64(limit), int64(limit))
	}
	require.Equal(t, limit, created)
}

// requireLimit requires a refusal by the rule of setup requests.
func requireLimit(t *testing.T, err error, used, limit int64) {
	t.Helper()
	var refused *repository.LimitError
	require.ErrorAs(t, err, &refused)
	require.ErrorIs(t, err, repository.ErrPendingExists)
	require.NotErrorIs(t, err, repository.ErrLockBusy)
	require.False(t, repository.IsRetryable(err))
	cause := refused.Err
	require.Equal(t, used < 0, cause != nil, "%v", cause)
	require.Equal(t, repository.LimitError{
		Rule: repository.ErrPendingExists, Used: used, Limit: limit, Requested: 1, Err: cause,
	}, *refused)
}

// requireBusy requires that the call gave up waiting there; anywhere if where is empty.
func requireBusy(t *testing.T, err error, where string) *repository.LockBusyError {
	t.Helper()
	var busy *repository.LockBusyError
	require.ErrorAs(t, err, &busy)
	require.ErrorIs(t, err, repository.ErrLockBusy)
	require.True(t, repository.IsRetryable(err))
	if where != "" {
		require.Equal(t, where, busy.Where)
	}
	return busy
}

// requireAbout requires that a call waited for its budget, in whole milliseconds as the server counts, and that
// what it says of that is true.
func requireAbout(t *testing.T, budget, waited, took time.Duration) {
	t.Helper()
	require.GreaterOrEqual(t, waited, budget-time.Millisecond)
	require.LessOrEqual(t, waited, took)
	require.Less(t, took, budget+patience/2)
}
