package repository_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
)

// Every method refuses a bad argument before it asks for a connection, and a good one gets as far as that.
func TestArguments(t *testing.T) {
	t.Parallel()
	var (
		user = uuid.MustParse("3f2b8a54-9f0e-4d9c-8a1e-7d6c5b4a3f21")
		long = strings.Repeat("k", 255)
	)
	for _, tc := range []struct {
		name string
		bad  string // the argument's name; empty if all are good
		call func(ctx context.Context, r *repository.Repository) error
	}{
		{"create for the nil user", "userID", create(uuid.Nil, nil)},
		{"create with a negative limit", "MaxPending", create(user, &repository.CreateSetupOpts{MaxPending: -1})},
		{"create with a limit above 1000", "MaxPending", create(user, &repository.CreateSetupOpts{MaxPending: 1001})},
		{"create with a limit that 16 bits would make 1", "MaxPending", create(user, &repository.CreateSetupOpts{MaxPending: 1<<16 + 1})},
		{"create with the limit 1000", "", create(user, &repository.CreateSetupOpts{MaxPending: 1000})},
		{"create with the default limit", "", create(user, nil)},
		{"create with a negative lock timeout", "LockTimeout", create(user, &repository.CreateSetupOpts{LockTimeout: -1})},
		{"create with a lock timeout that would be 0 ms", "LockTimeout", create(user, &repository.CreateSetupOpts{LockTimeout: time.Millisecond - 1})},
		{"create with a lock timeout above 24 days", "LockTimeout", create(user, &repository.CreateSetupOpts{LockTimeout: 24*24*time.Hour + 1})},
		{"create with a lock timeout of 24 days", "", create(user, &repository.CreateSetupOpts{LockTimeout: 24 * 24 * time.Hour})},
		{"create with a key of 256 bytes", "IdempotencyKey", create(user, &repository.CreateSetupOpts{IdempotencyKey: long + "k"})},
		{"create with a key of 256 bytes in 255 characters", "IdempotencyKey", create(user, &repository.CreateSetupOpts{IdempotencyKey: long[1:] + "ü"})},
		{"create with a key that is not UTF-8", "IdempotencyKey", create(user, &repository.CreateSetupOpts{IdempotencyKey: "a\xff"})},
		{"create with a key with NUL", "IdempotencyKey", create(user, &repository.CreateSetupOpts{IdempotencyKey: "a\x00"})},
		{"create with a key of 255 bytes", "", create(user, &repository.CreateSetupOpts{IdempotencyKey: long})},

		{"complete the nil id", "id", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CompleteSetup(ctx, uuid.Nil)
			return err
		}},
		{"complete an id", "", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CompleteSetup(ctx, user)
			return err
		}},
		{"cancel the nil id", "id", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CancelSetup(ctx, uuid.Nil)
			return err
		}},
		{"cancel an id", "", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CancelSetup(ctx, user)
			return err
		}},
		{"get the nil id", "id", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.GetSetup(ctx, uuid.Nil)
			return err
		}},
		{"get an id", "", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.GetSetup(ctx, user)
			return err
		}},
		{"count for the nil user", "userID", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CountPendingSetups(ctx, uuid.Nil)
			return err
		}},
		{"count for a user", "", func(ctx context.Context, r *repository.Repository) error {
			_, err := r.CountPendingSetups(ctx, user)
			return err
		}},
		{"list for the nil user", "userID", list(uuid.Nil, nil)},
		{"list with a negative limit", "Limit", list(user, &repository.ListOpts{Limit: -1})},
		{"list with a limit above 1000", "Limit", list(user, &repository.ListOpts{Limit: 1001})},
		{"list with the limit 1000", "", list(user, &repository.ListOpts{Limit: 1000})},
		{"list with the default limit", "", list(user, nil)},

		{"guard with no lock", "locks", guard()},
		{"guard with a lock of no namespace", "namespace", guard(repository.Lock{})},
		{"guard with an empty id", "id", guard(things.Exclusive(user.String()), things.Shared(""))},
		{"guard with an id over 1 KiB", "id", guard(things.Exclusive(strings.Repeat("i", 1025)))},
		{"guard with an id that is not UTF-8", "id", guard(things.Exclusive("\xff"))},
		{"guard with an id with NUL", "id", guard(things.Shared("a\x00"))},
		{"guard with 1025 locks", "locks", guard(slices.Repeat([]repository.Lock{things.Exclusive("1")}, 1025)...)},
		{"guard with 1024 locks", "", guard(slices.Repeat([]repository.Lock{things.Exclusive("1")}, 1024)...)},
		{"guard without a function", "fn", func(ctx context.Context, r *repository.Repository) error {
			return r.Guard(ctx, []repository.Lock{things.Exclusive("1")}, nil)
		}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool, dials := unreachable(t)
			repo, err := repository.New(pool)
			require.NoError(t, err)

			err = tc.call(t.Context(), repo)
			if tc.bad == "" {
				require.ErrorIs(t, err, repository.ErrConnectionLost)
				require.True(t, repository.IsRetryable(err))
				require.NotZero(t, dials.Load(), "without a dial the checks for none prove nothing")
				return
			}
			requireInvalid(t, err, tc.bad)
			require.Zero(t, dials.Load())
			require.Zero(t, pool.Stat().EmptyAcquireCount()+pool.Stat().CanceledAcquireCount()+pool.Stat().AcquireCount())
		})
	}

	t.Run("too many locks are told apart from other mistakes", func(t *testing.T) {
		t.Parallel()
		pool, _ := unreachable(t)
		repo, err := repository.New(pool)
		require.NoError(t, err)
		err = guard(slices.Repeat([]repository.Lock{things.Exclusive("1")}, 1025)...)(t.Context(), repo)
		require.ErrorIs(t, err, repository.ErrTooManyLocks)
		require.ErrorIs(t, err, repository.ErrInvalid)
	})
	t.Run("guards that try or join check what guard checks", func(t *testing.T) {
		t.Parallel()
		pool, dials := unreachable(t)
		repo, err := repository.New(pool)
		require.NoError(t, err)
		good := []repository.Lock{things.Exclusive("1")}
		for argument, locks := range map[string][]repository.Lock{"locks": nil, "id": {things.Exclusive("")}, "namespace": {{}}} {
			requireInvalid(t, repo.TryGuard(t.Context(), locks, untouched), argument)
			requireInvalid(t, repo.GuardTx(t.Context(), untouchable{}, locks), argument)
		}
		requireInvalid(t, repo.TryGuard(t.Context(), good, nil), "fn")
		requireInvalid(t, repo.GuardTx(t.Context(), nil, good), "tx")
		require.Zero(t, dials.Load())
	})
	t.Run("try and join check what create checks", func(t *testing.T) {
		t.Parallel()
		pool, dials := unreachable(t)
		repo, err := repository.New(pool)
		require.NoError(t, err)
		var tx pgx.Tx = untouchable{}
		for argument, o := range map[string]*repository.CreateSetupOpts{
			"MaxPending":     {MaxPending: -1},
			"LockTimeout":    {LockTimeout: time.Microsecond},
			"IdempotencyKey": {IdempotencyKey: "\x00"},
		} {
			_, err := repo.TryCreateSetup(t.Context(), user, o)
			requireInvalid(t, err, argument)
			_, err = repo.CreateSetupTx(t.Context(), tx, user, o)
			requireInvalid(t, err, argument)
		}
		_, err = repo.TryCreateSetup(t.Context(), uuid.Nil, nil)
		requireInvalid(t, err, "userID")
		_, err = repo.CreateSetupTx(t.Context(), tx, uuid.Nil, nil)
		requireInvalid(t, err, "userID")
		_, err = repo.CreateSetupTx(t.Context(), nil, user, nil)
		requireInvalid(t, err, "tx")
		require.Zero(t, dials.Load())
	})
}

func TestNew(t *testing.T) {
	t.Parallel()
	pool, dials := unreachable(t)
	for _, tc := range []struct {
		name string
		bad  string
		pool *pgxpool.Pool
		opts []repository.Option
	}{
		{"refuses a nil pool", "pool", nil, nil},
		{"refuses an option without a value", "opts", pool, []repository.Option{{}}},
		{"refuses a negative lock timeout", "LockTimeout", pool, []repository.Option{repository.WithLockTimeout(-time.Second)}},
		{"refuses a lock timeout that would be 0 ms", "LockTimeout", pool, []repository.Option{repository.WithLockTimeout(time.Millisecond - 1)}},
		{"refuses a lock timeout above 24 days", "LockTimeout", pool, []repository.Option{repository.WithLockTimeout(24*24*time.Hour + 1)}},
		{"refuses two lock timeouts", "WithLockTimeout", pool, []repository.Option{
			repository.WithLockTimeout(time.Second), repository.WithLockTimeout(time.Minute),
		}},
		{"refuses a negative hold timeout", "HoldTimeout", pool, []repository.Option{repository.WithHoldTimeout(-1)}},
		{"refuses a hold timeout above 24 days", "HoldTimeout", pool, []repository.Option{repository.WithHoldTimeout(24*24*time.Hour + 1)}},
		{"refuses two hold timeouts", "WithHoldTimeout", pool, []repository.Option{
			repository.WithHoldTimeout(time.Second), repository.WithHoldTimeout(time.Second),
		}},
		{"refuses two observers", "WithObserver", pool, []repository.Option{
			repository.WithObserver(repository.Observer{}), repository.WithObserver(repository.Observer{}),
		}},
		{"refuses a queue without a place", "MaxWaiters", pool, []repository.Option{repository.WithMaxWaiters(0)}},
		{"refuses a queue above a million", "MaxWaiters", pool, []repository.Option{repository.WithMaxWaiters(1_000_001)}},
		{"refuses two queues", "WithMaxWaiters", pool, []repository.Option{
			repository.WithMaxWaiters(1), repository.WithMaxWaiters(1),
		}},
		{"refuses a negative batch", "MaxBatch", pool, []repository.Option{repository.WithCoalescing(-1)}},
		{"refuses a batch above 1024", "MaxBatch", pool, []repository.Option{repository.WithCoalescing(1025)}},
		{"refuses two batches", "WithCoalescing", pool, []repository.Option{
			repository.WithCoalescing(0), repository.WithCoalescing(0),
		}},
		{"takes no options", "", pool, nil},
		{"takes one of each", "", pool, []repository.Option{
			repository.WithLockTimeout(time.Millisecond), repository.WithHoldTimeout(time.Millisecond),
			repository.WithLockOrderCheck(), repository.WithObserver(repository.Observer{}),
			repository.WithMaxWaiters(1), repository.WithCoalescing(0),
		}},
		{"takes the largest queue and batch", "", pool, []repository.Option{
			repository.WithMaxWaiters(1_000_000), repository.WithCoalescing(1024),
		}},
		{"takes 0 for the default lock timeout", "", pool, []repository.Option{repository.WithLockTimeout(0)}},
		{"takes the longest lock timeout", "", pool, []repository.Option{repository.WithLockTimeout(24 * 24 * time.Hour)}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			repo, err := repository.New(tc.pool, tc.opts...)
			if tc.bad == "" {
				require.NoError(t, err)
				require.NotNil(t, repo)
				return
			}
			require.Nil(t, repo)
			requireInvalid(t, err, tc.bad)
		})
	}
	t.Run("does no I/O", func(t *testing.T) {
		t.Parallel()
		_, err := repository.New(pool)
		require.NoError(t, err)
		require.Zero(t, dials.Load())
	})
}

// The observer sees every call once, also a refused one, with the error that the caller gets.
func TestObserver(t *testing.T) {
	t.Parallel()
	pool, _ := unreachable(t)
	var seen []repository.CallDone
	repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
		CallDone: func(_ context.Context, c repository.CallDone) { seen = append(seen, c) },
	}))
	require.NoError(t, err)

	for _, method := range []struct {
		name string
		call func(context.Context) error
	}{
		{"CreateSetup", func(ctx context.Context) error {
			_, err := repo.CreateSetup(ctx, uuid.Nil, nil)
			return err
		}},
		{"TryCreateSetup", func(ctx context.Context) error {
			_, err := repo.TryCreateSetup(ctx, uuid.Nil, nil)
			return err
		}},
		{"CreateSetupTx", func(ctx context.Context) error {
			_, err := repo.CreateSetupTx(ctx, nil, uuid.Nil, nil)
			return err
		}},
		{"CompleteSetup", func(ctx context.Context) error {
			_, err := repo.CompleteSetup(ctx, uuid.New())
			return err
		}},
		{"CancelSetup", func(ctx context.Context) error {
			_, err := repo.CancelSetup(ctx, uuid.New())
			return err
		}},
		{"GetSetup", func(ctx context.Context) error {
			_, err := repo.GetSetup(ctx, uuid.New())
			return err
		}},
		{"ListSetups", func(ctx context.Context) error {
			_, err := repo.ListSetups(ctx, uuid.New(), nil)
			return err
		}},
		{"Guard", func(ctx context.Context) error {
			return repo.Guard(ctx, nil, untouched)
		}},
		{"TryGuard", func(ctx context.Context) error {
			return repo.TryGuard(ctx, nil, untouched)
		}},
		{"GuardTx", func(ctx context.Context) error {
			return repo.GuardTx(ctx, nil, nil)
		}},
		{"GuardQuery", func(ctx context.Context) error {
			_, err := repository.GuardQuery[int](ctx, repo, nil, nil)
			return err
		}},
		{"LockActivity", func(ctx context.Context) error {
			_, err := repo.LockActivity(ctx)
			return err
		}},
		{"CountPendingSetups", func(ctx context.Context) error {
			_, err := repo.CountPendingSetups(ctx, uuid.New())
			return err
		}},
	} {
		seen = nil
		before := time.Now()
		err := method.call(t.Context())
		took := time.Since(before)
		require.Error(t, err)
		require.Len(t, seen, 1, method.name)
		require.Equal(t, method.name, seen[0].Method)
		require.Same(t, err, seen[0].Err)
		require.Positive(t, seen[0].Duration)
		require.LessOrEqual(t, seen[0].Duration, took)
		require.True(t, strings.HasPrefix(err.Error(), "latchkey: "+method.name+": "), err)
		require.Equal(t, 1, strings.Count(err.Error(), "latchkey: "), "prefixed once")
	}
}

// A context that has ended before the call is told apart from everything else, and nothing is dialled.
func TestContextThatHasEnded(t *testing.T) {
	t.Parallel()
	pool, dials := unreachable(t)
	repo, err := repository.New(pool)
	require.NoError(t, err)
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()

	for ctx, want := range map[context.Context]error{cancelled: context.Canceled, expired: context.DeadlineExceeded} {
		for _, call := range []func(context.Context, *repository.Repository) error{
			create(uuid.New(), nil),
			list(uuid.New(), nil),
			func(ctx context.Context, r *repository.Repository) error {
				_, err := r.CompleteSetup(ctx, uuid.New())
				return err
			},
		} {
			err := call(ctx, repo)
			require.ErrorIs(t, err, want)
			require.NotErrorIs(t, err, repository.ErrConnectionLost)
		}
	}
	require.Zero(t, dials.Load())
}

// things is a host's namespace.
var things = repository.MustNamespace("test_things")

func untouched(context.Context, *repository.Tx) error {
	panic("a function that was not to be called was called")
}

// guard guards a function that sends nothing, so that only the locks are sent.
func guard(locks ...repository.Lock) func(context.Context, *repository.Repository) error {
	return func(ctx context.Context, r *repository.Repository) error {
		return r.Guard(ctx, locks, func(context.Context, *repository.Tx) error { return nil })
	}
}

func create(user uuid.UUID, o *repository.CreateSetupOpts) func(context.Context, *repository.Repository) error {
	return func(ctx context.Context, r *repository.Repository) error {
		_, err := r.CreateSetup(ctx, user, o)
		return err
	}
}

func list(user uuid.UUID, o *repository.ListOpts) func(context.Context, *repository.Repository) error {
	return func(ctx context.Context, r *repository.Repository) error {
		_, err := r.ListSetups(ctx, user, o)
		return err
	}
}

func requireInvalid(t *testing.T, err error, argument string) {
	t.Helper()
	require.ErrorIs(t, err, repository.ErrInvalid)
	var invalid *repository.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, argument, invalid.Argument)
	require.NotEmpty(t, invalid.Problem)
	require.False(t, repository.IsRetryable(err))
}

// unreachable returns a pool that cannot connect, and how often it was asked to.
func unreachable(t *testing.T) (*pgxpool.Pool, *atomic.Int64) {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	require.NoError(t, err)
	dials := new(atomic.Int64)
	config.ConnConfig.DialFunc = func(context.Context, string, string) (net.Conn, error) {
		dials.Add(1)
		return nil, errors.New("there is no server here")
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool, dials
}

// untouchable is a transaction that panics when it is used.
type untouchable struct{ pgx.Tx }
