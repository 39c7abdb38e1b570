package history_test

import (
	"context"
	"errors"
	"sync"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/history"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

var (
	places  = repository.MustNamespace("place")
	errFull = errors.New("no place is free")
)

const (
	countPlaces = "SELECT count(*) FROM public.places WHERE owner = $1"
	insertPlace = "INSERT INTO public.places (owner) VALUES ($1) RETURNING id"
)

// attempt counts, calls counted, and inserts a row if there was none.
type attempt func(ctx context.Context, pool *pgxpool.Pool, owner string, counted func()) (uuid.UUID, error)

// usual is what is usually written: in a transaction of the default isolation level, perhaps after a lock.
func usual(locked bool) attempt {
	return func(ctx context.Context, pool *pgxpool.Pool, owner string, counted func()) (id uuid.UUID, err error) {
		err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
			if locked {
				if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(latchkey.lock_key('place', $1))", owner); err != nil {
					return err
				}
			}
			return insert(ctx, tx, tx, owner, counted, &id)
		})
		return id, err
	}
}

func guarded(ctx context.Context, pool *pgxpool.Pool, owner string, counted func()) (id uuid.UUID, err error) {
	repo, err := repository.New(pool)
	if err != nil {
		return id, err
	}
	err = repo.Guard(ctx, []repository.Lock{places.Exclusive(owner)}, func(ctx context.Context, tx *repository.Tx) error {
		return insert(ctx, tx, tx.Last(), owner, counted, &id)
	})
	return id, err
}

func insert(ctx context.Context, q, last repository.DBTX, owner string, counted func(), id *uuid.UUID) error {
	var n int
	if err := q.QueryRow(ctx, countPlaces, owner).Scan(&n); err != nil {
		return err
	}
	counted()
	if n > 0 {
		return errFull
	}
	return last.QueryRow(ctx, insertPlace, owner).Scan(id)
}

// What the checker is for, on a real server: without a guard, and with one that is left to the default isolation level,
// it finds what is wrong, in the schedule in which latchkey is right.
func TestControls(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	testdb.Exec(t, url, "CREATE TABLE public.places (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), owner text NOT NULL)")
	for _, tc := range []struct {
		name      string
		isolation string
		attempt   attempt
		locks     bool
		want      history.Verdict
	}{
		{"without a lock", "read committed", usual(false), false, history.Broken},
		{"with a lock", "read committed", usual(true), true, history.Sound},
		{"with a lock, where REPEATABLE READ is the default", "repeatable read", usual(true), true, history.Broken},
		{"with Guard, where REPEATABLE READ is the default", "repeatable read", guarded, true, history.Sound},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			owner := uuid.NewString()
			observer := testdb.Conn(t, url)
			h := history.New(tc.name, history.Setups())
			counted, open := make(chan struct{}, 2), make(chan struct{})
			var callers sync.WaitGroup
			for client := range 2 {
				pool := testdb.PoolAt(t, url, func(c *pgxpool.Config) {
					c.ConnConfig.RuntimeParams["default_transaction_isolation"] = tc.isolation
				})
				callers.Go(func() {
					op := h.Call(client+1, history.Create{Max: 1})
					id, err := tc.attempt(t.Context(), pool, owner, func() {
						counted <- struct{}{}
						<-open
					})
					switch {
					case err == nil:
						h.Return(op, history.Created{ID: id, Status: history.Pending})
					case errors.Is(err, errFull):
						h.Return(op, history.Refused{Used: 1, Limit: 1})
					default:
						h.Return(op, history.Nothing{Why: err.Error()})
						t.Error(err)
					}
				})
			}
			<-counted
			if tc.locks {
				key, err := repository.Key("place", owner)
				require.NoError(t, err)
				testdb.WaitForWaiter(t, observer, key, 1)
			} else {
				<-counted
			}
			close(open)
			callers.Wait()
			var n int
			require.NoError(t, observer.QueryRow(t.Context(), countPlaces, owner).Scan(&n))
			h.Observe(history.Count{}, history.Counted{Pending: n})
			require.Equal(t, tc.want, h.Check(patience), "%v", h)
		})
	}
}
