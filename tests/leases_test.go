package tests

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func (o *office) acquire(t *testing.T, p repository.LeaseParams) *repository.Lease {
	t.Helper()
	l, err := o.repo.AcquireLease(t.Context(), p)
	require.NoError(t, err)
	return l
}

// expireLease waits until the lease, which is short, has ended.
func (o *office) expireLease(t *testing.T, name string) {
	t.Helper()
	waitUntil(t, o.observer, "SELECT clock_timestamp() > expires_at FROM latchkey.leases WHERE name = $1", name)
}

// lockLease locks the row of the lease from another connection, and changes nothing.
func (o *office) lockLease(t *testing.T, name string) pgx.Tx {
	t.Helper()
	tx := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
	tag, err := tx.Exec(t.Context(), "SELECT FROM latchkey.leases WHERE name = $1 FOR UPDATE", name)
	require.NoError(t, err)
	require.Equal(t, int64(1), tag.RowsAffected())
	return tx
}

func TestLeaseAcquire(t *testing.T) {
	t.Parallel()
	o := newOffice(t)

	t.Run("gives a name to one, with what is known of it", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		l := o.acquire(t, repository.LeaseParams{Name: "job", Owner: "one", TTL: time.Hour})
		require.Equal(t, "job", l.Name)
		require.Equal(t, "one", l.Owner)
		require.Equal(t, int64(1), l.Fence)
		require.Equal(t, time.Hour, l.TTL)
		require.Equal(t, value[time.Time](t, o, "SELECT expires_at FROM latchkey.leases WHERE name = 'job'").UTC(), l.ExpiresAt.UTC())
		require.Positive(t, l.Remaining())
		require.LessOrEqual(t, l.Remaining(), 54*time.Minute, "a tenth is kept back")

		before := o.contents(t, "leases")
		for _, owner := range []string{"two", "one", ""} {
			_, err := o.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: "job", Owner: owner})
			requireBusy(t, err, repository.WhereLease)
		}
		require.Equal(t, before, o.contents(t, "leases"))
		other := o.acquire(t, repository.LeaseParams{Name: "another job"})
		require.NoError(t, uuid.Validate(other.Owner))
		require.Equal(t, repository.DefaultLease, other.TTL)
	})
	t.Run("raises the token each time, however the lease ended", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		for fence := int64(1); fence <= 6; fence++ {
			ttl := time.Hour
			if fence%2 == 0 {
				ttl = time.Millisecond
			}
			l := o.acquire(t, repository.LeaseParams{Name: "job", TTL: ttl})
			require.Equal(t, fence, l.Fence)
			if fence%2 == 0 {
				o.expireLease(t, "job")
				continue
			}
			require.NoError(t, o.repo.RenewLease(t.Context(), l, time.Hour))
			require.Equal(t, fence, l.Fence, "a renewal does not")
			require.NoError(t, o.repo.ReleaseLease(t.Context(), l))
			require.LessOrEqual(t, l.Remaining(), time.Duration(0))
		}
	})
	t.Run("gives it to one of many that ask at once", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, o.url, 20)
		for round := range 5 {
			errs := r.atOnce(func(c racer) error {
				return errorOf(c.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: fmt.Sprint("race ", round), TTL: time.Hour}))
			})
			got := 0
			for _, err := range errs {
				if err == nil {
					got++
					continue
				}
				requireBusy(t, err, repository.WhereLease)
			}
			require.Equal(t, 1, got)
		}
	})
	t.Run("waits for who is inserting the same name, and counts from then on", func(t *testing.T) {
		t.Parallel()
		for _, commit := range []bool{true, false} {
			o, name := o.colleague(t), fmt.Sprint("new ", commit)
			other := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
			require.NoError(t, db.New(other).LeaseEnsure(t.Context(), name))
			acquired := inBackground(t, func() (*repository.Lease, error) {
				return o.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: name, TTL: time.Minute})
			})
			testdb.WaitForLockWait(t, o.observer, o.pid)
			freed := value[time.Time](t, o, "SELECT clock_timestamp()")
			if commit {
				require.NoError(t, other.Commit(t.Context()))
			} else {
				require.NoError(t, other.Rollback(t.Context()))
			}
			l, err := acquired()
			require.NoError(t, err)
			require.Equal(t, int64(1), l.Fence)
			require.GreaterOrEqual(t, l.ExpiresAt, freed.Add(time.Minute))
			require.LessOrEqual(t, l.Remaining(), 54*time.Second)
		}
	})
	t.Run("reads the clock when the row is locked", func(t *testing.T) {
		t.Parallel()
		o := o.colleague(t)
		o.acquire(t, repository.LeaseParams{Name: "locked", TTL: 2 * time.Second})
		locker := o.lockLease(t, "locked")
		acquired := inBackground(t, func() (*repository.Lease, error) {
			return o.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: "locked", TTL: time.Minute})
		})
		testdb.WaitForLockWait(t, o.observer, o.pid)
		o.expireLease(t, "locked")
		freed := value[time.Time](t, o, "SELECT clock_timestamp()")
		require.NoError(t, locker.Rollback(t.Context()))
		l, err := acquired()
		require.NoError(t, err, "it ended while this one waited for the row")
		require.GreaterOrEqual(t, l.ExpiresAt, freed.Add(time.Minute))
	})
	t.Run("gives up on a row that stays locked", func(t *testing.T) {
		t.Parallel()
		o := o.colleague(t)
		o.acquire(t, repository.LeaseParams{Name: "stuck", TTL: time.Millisecond})
		o.lockLease(t, "stuck")
		repo, err := repository.New(o.pool, repository.WithLockTimeout(50*time.Millisecond))
		require.NoError(t, err)
		_, err = repo.AcquireLease(t.Context(), repository.LeaseParams{Name: "stuck"})
		requireBusy(t, err, repository.WhereRow)
	})
	t.Run("costs one round trip, as the others do", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, o.url)
		n, held := 0, repository.LeaseParams{Name: "held", TTL: time.Hour}
		l, err := w.repo.AcquireLease(t.Context(), held)
		require.NoError(t, err)
		for name, call := range map[string]func() error{
			"acquire": func() error {
				n++
				return errorOf(w.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: fmt.Sprint("trip ", n)}))
			},
			"acquire what is held": func() error {
				_, err := w.repo.AcquireLease(t.Context(), held)
				requireBusy(t, err, repository.WhereLease)
				return nil
			},
			"renew": func() error { return w.repo.RenewLease(t.Context(), l, 0) },
		} {
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				require.NoError(t, call(), name)
			})
			require.Equal(t, 1, traffic.RoundTrips, "%s sent %q", name, traffic.Statements)
		}
	})
}

func TestLeaseIsRefusedWithoutTheToken(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		happen func(t *testing.T, o *office, l *repository.Lease)
	}{
		{"it ended, and nobody else has it yet", func(t *testing.T, o *office, _ *repository.Lease) {
			t.Helper()
			o.expireLease(t, "job")
		}},
		{"another has it since", func(t *testing.T, o *office, l *repository.Lease) {
			t.Helper()
			o.expireLease(t, "job")
			o.acquire(t, repository.LeaseParams{Name: "job", Owner: l.Owner, TTL: time.Hour})
		}},
		{"it was given back", func(t *testing.T, o *office, l *repository.Lease) {
			t.Helper()
			o.expireLease(t, "job")
			*l = *o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
			given := *l
			require.NoError(t, o.repo.ReleaseLease(t.Context(), &given))
		}},
		{"the token is of another owner", func(t *testing.T, o *office, l *repository.Lease) {
			t.Helper()
			o.expireLease(t, "job")
			*l = *o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
			l.Owner = "other"
		}},
		{"the token is larger", func(t *testing.T, o *office, l *repository.Lease) {
			t.Helper()
			o.expireLease(t, "job")
			*l = *o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
			l.Fence++
		}},
		{"there is no such name", func(t *testing.T, _ *office, l *repository.Lease) {
			t.Helper()
			l.Name = "other"
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			l := o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Millisecond})
			test.happen(t, o, l)
			before := o.contents(t, "leases")
			require.ErrorIs(t, o.repo.RenewLease(t.Context(), l, time.Hour), repository.ErrLeaseLost)
			require.ErrorIs(t, o.repo.ReleaseLease(t.Context(), l), repository.ErrLeaseLost)
			require.Equal(t, before, o.contents(t, "leases"))
		})
	}
}

func TestLeaseReadsTheClockAfterTheWait(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(context.Context, *repository.Repository, *repository.Lease) error{
		"renew": func(ctx context.Context, r *repository.Repository, l *repository.Lease) error {
			return r.RenewLease(ctx, l, time.Hour)
		},
		"release": func(ctx context.Context, r *repository.Repository, l *repository.Lease) error {
			return r.ReleaseLease(ctx, l)
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			l := o.acquire(t, repository.LeaseParams{Name: "job", TTL: 2 * time.Second})
			before := o.contents(t, "leases")
			locker := o.lockLease(t, "job")
			ended := inBackground(t, func() (struct{}, error) { return struct{}{}, call(t.Context(), o.repo, l) })
			testdb.WaitForLockWait(t, o.observer, o.pid)
			o.expireLease(t, "job")
			require.NoError(t, locker.Rollback(t.Context()))
			_, err := ended()
			require.ErrorIs(t, err, repository.ErrLeaseLost)
			require.Equal(t, before, o.contents(t, "leases"))
		})
	}
	t.Run("also for how long it lasts", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		l := o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
		locker := o.lockLease(t, "job")
		renewed := inBackground(t, func() (struct{}, error) { return struct{}{}, o.repo.RenewLease(t.Context(), l, 2*time.Hour) })
		testdb.WaitForLockWait(t, o.observer, o.pid)
		freed := value[time.Time](t, o, "SELECT clock_timestamp()")
		require.NoError(t, locker.Rollback(t.Context()))
		_, err := renewed()
		require.NoError(t, err)
		require.GreaterOrEqual(t, l.ExpiresAt, freed.Add(2*time.Hour))
		require.Equal(t, 2*time.Hour, l.TTL)
	})
}

func TestLeaseRowsThatCannotBe(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	for _, bad := range []string{
		"('', NULL, 0, NULL)", "(repeat('n', 256), NULL, 0, NULL)", "('n', 'o', 1, NULL)", "('n', NULL, 1, now())", "('n', 'o', 0, now())",
		"('n', NULL, -1, NULL)", "('n', '', 1, now())", "('n', repeat('o', 256), 1, now())",
	} {
		_, err := o.admin.Exec(t.Context(), "INSERT INTO latchkey.leases (name, owner, fence, expires_at) VALUES "+bad)
		requireSQLState(t, "23514", err)
	}
	o.exec(t, "INSERT INTO latchkey.leases (name, owner, fence, expires_at) VALUES ('free', NULL, 0, NULL), ('given back', NULL, 7, NULL), ('held', 'o', 1, now())")
}

// requireEnds waits until the context ends.
func requireEnds(t *testing.T, ctx context.Context) {
	t.Helper()
	select {
	case <-ctx.Done():
	case <-time.After(patience):
		t.Fatal("waited in vain for the end of the context")
	}
}

func TestWithLease(t *testing.T) {
	t.Parallel()

	t.Run("renews as long as the function runs, and gives the lease back", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ran := false
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "job", TTL: 2 * time.Second}, func(ctx context.Context, fence int64) error {
			ran = true
			require.Equal(t, int64(1), fence)
			first := value[time.Time](t, o, "SELECT expires_at FROM latchkey.leases")
			waitUntil(t, o.observer, "SELECT clock_timestamp() > $1::timestamptz", first)
			_, err := o.colleague(t).repo.AcquireLease(ctx, repository.LeaseParams{Name: "job"})
			requireBusy(t, err, repository.WhereLease)
			return ctx.Err()
		})
		require.NoError(t, err)
		require.True(t, ran)
		require.Equal(t, int64(2), o.acquire(t, repository.LeaseParams{Name: "job"}).Fence)
	})
	t.Run("does not call the function if somebody has the lease", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "job"}, func(context.Context, int64) error {
			t.Error("it was called")
			return nil
		})
		requireBusy(t, err, repository.WhereLease)
		require.ErrorContains(t, err, "latchkey: WithLease: ")
	})
	t.Run("returns the function's error as it is, and gives the lease back", func(t *testing.T) {
		t.Parallel()
		o, mine := newOffice(t), errors.New("mine")
		p := repository.LeaseParams{Name: "job", TTL: time.Hour}
		err := o.repo.WithLease(t.Context(), p, func(context.Context, int64) error { return mine })
		require.Same(t, mine, err)
		require.PanicsWithValue(t, "mine", func() {
			_ = o.repo.WithLease(t.Context(), p, func(context.Context, int64) error { panic("mine") })
		})
		require.Equal(t, int64(3), o.acquire(t, p).Fence)
	})
	t.Run("gives the lease back also when the caller's context has ended", func(t *testing.T) {
		t.Parallel()
		o, p := newOffice(t), repository.LeaseParams{Name: "job", TTL: time.Hour}
		ctx, cancel := context.WithCancel(t.Context())
		err := o.repo.WithLease(ctx, p, func(ctx context.Context, _ int64) error {
			cancel()
			requireEnds(t, ctx)
			return ctx.Err()
		})
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, repository.ErrLeaseLost)
		require.Equal(t, int64(2), o.acquire(t, p).Fence)
	})
	t.Run("gives an inner lease back when an outer one is lost", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		inner := repository.LeaseParams{Name: "inner", TTL: time.Hour}
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "outer", TTL: 300 * time.Millisecond}, func(ctx context.Context, _ int64) error {
			return o.repo.WithLease(ctx, inner, func(ctx context.Context, _ int64) error {
				o.exec(t, "UPDATE latchkey.leases SET owner = 'other', fence = fence + 1 WHERE name = 'outer'")
				requireEnds(t, ctx)
				return nil
			})
		})
		require.ErrorIs(t, err, repository.ErrLeaseLost)
		require.Equal(t, int64(2), o.acquire(t, inner).Fence)
	})
	t.Run("ends the function's context when the lease is lost", func(t *testing.T) {
		t.Parallel()
		o, mine := newOffice(t), errors.New("mine")
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "job", TTL: time.Second}, func(ctx context.Context, _ int64) error {
			o.exec(t, "UPDATE latchkey.leases SET owner = 'other', fence = fence + 1, expires_at = clock_timestamp() + interval '1 hour'")
			requireEnds(t, ctx)
			require.ErrorIs(t, context.Cause(ctx), repository.ErrLeaseLost)
			return mine
		})
		require.ErrorIs(t, err, repository.ErrLeaseLost)
		require.ErrorIs(t, err, mine)
		require.Equal(t, "other", value[string](t, o, "SELECT owner FROM latchkey.leases"), "nothing was changed")
	})
	t.Run("ends the function's context before the lease ends, if it cannot be renewed", func(t *testing.T) {
		t.Parallel()
		o, ttl := newOffice(t), 5*time.Second
		asked := time.Now() // the lease ends no sooner than ttl after this
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "job", TTL: ttl}, func(ctx context.Context, _ int64) error {
			o.lockLease(t, "job")
			requireEnds(t, ctx)
			require.Less(t, time.Since(asked), ttl)
			require.ErrorIs(t, context.Cause(ctx), repository.ErrLeaseLost)
			return nil
		})
		require.ErrorIs(t, err, repository.ErrLeaseLost, "also if the function saw nothing wrong")
	})
	t.Run("says so if the lease was lost and the function did not notice", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		err := o.repo.WithLease(t.Context(), repository.LeaseParams{Name: "job", TTL: time.Hour}, func(context.Context, int64) error {
			o.exec(t, "UPDATE latchkey.leases SET owner = 'other', fence = fence + 1")
			return nil
		})
		require.ErrorIs(t, err, repository.ErrLeaseLost)
	})
}
