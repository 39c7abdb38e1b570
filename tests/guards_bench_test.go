package tests

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

var benched = repository.MustNamespace("bench")

const guardBurst = 40 // inserts for one key, after which another is the hot one, so that none ever counts many

// guardBench is what the ways to guard an insert have in common; row n of a key is in slot n, which is free.
type guardBench struct {
	pool *pgxpool.Pool
	repo *repository.Repository
}

func (g guardBench) insert(ctx context.Context, q hostDBTX, key uuid.UUID, n int) error {
	_, err := q.Exec(ctx, "INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending) VALUES ($1, $2, 1000)", key, n)
	return err
}

func (g guardBench) countAndInsert(ctx context.Context, count, insert hostDBTX, key uuid.UUID, n int) error {
	_, err := count.Exec(ctx, pendingOf, key)
	return errors.Join(err, g.insert(ctx, insert, key, n))
}

// The hand-written ones are as a host writes them, with a round trip for each statement.
var guardWays = []struct {
	name string
	call func(ctx context.Context, g guardBench, key uuid.UUID, n int) error
}{
	{"PlainInsert", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		_, err := g.pool.Exec(ctx, "INSERT INTO public.plain (user_id, pending_slot, max_pending) VALUES ($1, $2, 1000)", key, n)
		return err
	}},
	{"Constraint", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		return g.insert(ctx, g.pool, key, n)
	}},
	{"ConstraintAndLock", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		return g.repo.Guard(ctx, []repository.Lock{benched.Exclusive(key.String())}, func(ctx context.Context, tx *repository.Tx) error {
			return g.insert(ctx, tx.Last(), key, n)
		})
	}},
	{"CreateSetup", func(ctx context.Context, g guardBench, key uuid.UUID, _ int) error {
		_, err := g.repo.CreateSetup(ctx, key, &repository.CreateSetupOpts{MaxPending: 1000})
		return err
	}},
	{"GuardWithCount", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		return g.repo.Guard(ctx, []repository.Lock{benched.Exclusive(key.String())}, func(ctx context.Context, tx *repository.Tx) error {
			return g.countAndInsert(ctx, tx, tx.Last(), key, n)
		})
	}},
	{"ParentRow", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		return pgx.BeginFunc(ctx, g.pool, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, "SELECT FROM public.parents WHERE id = $1 FOR NO KEY UPDATE", key)
			return errors.Join(err, g.countAndInsert(ctx, tx, tx, key, n))
		})
	}},
	{"SerializableAndRetry", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		for {
			err := pgx.BeginTxFunc(ctx, g.pool, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				return g.countAndInsert(ctx, tx, tx, key, n)
			})
			if pgErr := (*pgconn.PgError)(nil); !errors.As(err, &pgErr) || pgErr.Code != "40001" {
				return err
			}
		}
	}},
	{"Lease", func(ctx context.Context, g guardBench, key uuid.UUID, n int) error {
		const take = `UPDATE public.parents SET leased_until = clock_timestamp() + '10 s'
			WHERE id = $1 AND (leased_until IS NULL OR leased_until < clock_timestamp())`
		tag, err := g.pool.Exec(ctx, take, key)
		for ; err == nil && tag.RowsAffected() == 0; tag, err = g.pool.Exec(ctx, take, key) {
			<-time.After(time.Millisecond) // somebody else has it, and nobody says when not any more
		}
		err = errors.Join(err, g.countAndInsert(ctx, g.pool, g.pool, key, n))
		_, freeErr := g.pool.Exec(ctx, "UPDATE public.parents SET leased_until = NULL WHERE id = $1", key)
		return errors.Join(err, freeErr)
	}},
}

// BenchmarkGuards measures what a guarded insert costs, in one run for all, so that they can be compared: time per
// successful insert of 4 callers together, with a key of its own for each insert, and with one key for all; and the
// round trips of a call that nobody disturbs.
func BenchmarkGuards(b *testing.B) {
	for _, keys := range []string{"FreshKeys", "OneHotKey"} {
		for _, way := range guardWays {
			b.Run(keys+"/"+way.name, func(b *testing.B) {
				url := testdb.URL(b)
				testdb.Exec(b, url, "CREATE TABLE public.plain (LIKE latchkey.setup_requests INCLUDING DEFAULTS INCLUDING CONSTRAINTS, PRIMARY KEY (id))",
					"CREATE INDEX ON public.plain (user_id, created_at, id)",
					"CREATE TABLE public.parents (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), leased_until timestamptz)",
					fmt.Sprintf("INSERT INTO public.parents SELECT FROM generate_series(1, %d)", b.N+guardBurst))
				proxy, pool := wire.Start(b, url), testdb.PoolAt(b, url, maxConns(4))
				at := func(pool *pgxpool.Pool) guardBench {
					repo, err := repository.New(pool, repository.WithLockTimeout(patience))
					require.NoError(b, err)
					return guardBench{pool, repo}
				}
				g, alone := at(pool), at(testdb.PoolAt(b, proxy.URL(), maxConns(4)))
				rows, _ := pool.Query(b.Context(), "SELECT id FROM public.parents")
				ids, err := pgx.CollectRows(rows, pgx.RowTo[uuid.UUID])
				require.NoError(b, err)
				for n := range 2 { // the second finds the connection warm
					proxy.Reset()
					require.NoError(b, way.call(b.Context(), alone, ids[len(ids)-1], n+1))
				}
				trips := float64(proxy.Traffic().RoundTrips)
				if rtt, err := time.ParseDuration(os.Getenv("LATCHKEY_RTT")); err == nil { // as over a network
					proxy.Delay(rtt/2, rtt/2)
					g = alone
				}
				next, callers := new(atomic.Int64), new(sync.WaitGroup)
				b.ResetTimer()
				for range 4 {
					callers.Go(func() {
						for i := int(next.Add(1)) - 1; i < b.N; i = int(next.Add(1)) - 1 {
							key := ids[i]
							if keys == "OneHotKey" {
								key = ids[i/guardBurst]
							}
							assert.NoError(b, way.call(b.Context(), g, key, i%guardBurst+1))
						}
					})
				}
				callers.Wait()
				b.ReportMetric(trips, "roundtrips/op")
			})
		}
	}
}
