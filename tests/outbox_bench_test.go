package tests

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// beside measures two that each say how long they took, again and again in an order by chance, so that what else the machine
// does hits both. It reports the median of each in microseconds, and "ratio": that of the second to that of the first.
func beside(b *testing.B, names [2]string, contestants [2]func() time.Duration) {
	b.Helper()
	for _, warm := range contestants {
		warm()
	}
	var took [2][]time.Duration
	b.ResetTimer()
	for range b.N {
		for _, i := range rand.Perm(2) {
			took[i] = append(took[i], contestants[i]())
		}
	}
	var medians [2]float64
	for i, name := range names {
		slices.Sort(took[i])
		medians[i] = float64(took[i][len(took[i])/2]) / float64(time.Microsecond)
		b.ReportMetric(medians[i], name+"-us")
	}
	b.ReportMetric(medians[1]/medians[0], "ratio")
	b.ReportMetric(0, "ns/op")
}

func timed(call func()) func() time.Duration {
	return func() time.Duration {
		started := time.Now()
		call()
		return time.Since(started)
	}
}

// BenchmarkOutboxEnqueue measures what an event adds to a guarded write, in one caller without a network: on a server that
// flushes a commit to the disk, as one does that is to lose nothing; on one that does not; and there also into a table
// without CHECK and index, but for the primary key, which is what any second row costs.
func BenchmarkOutboxEnqueue(b *testing.B) {
	const bare = `ALTER TABLE latchkey.outbox DROP CONSTRAINT outbox_state_check;
		DROP INDEX latchkey.outbox_due_idx, latchkey.outbox_aggregate_due_idx, latchkey.outbox_turn_key, latchkey.outbox_ended_idx`
	for _, on := range []struct{ name, fsync, twist string }{{"Flush", "on", "SELECT"}, {"NoFlush", "off", "SELECT"}, {"NoFlush/Bare", "off", bare}} {
		url, _, err := ownServer(b, map[string]string{"fsync": on.fsync, "full_page_writes": on.fsync}).NewDatabase(b.Context())
		require.NoError(b, err)
		testdb.Exec(b, url, on.twist)
		repo, err := repository.New(testdb.PoolAt(b, url))
		require.NoError(b, err)
		b.Run(on.name, func(b *testing.B) {
			create := func(payload json.RawMessage) func() time.Duration {
				return timed(func() {
					user := uuid.New()
					var event *repository.Event
					if payload != nil {
						event = &repository.Event{Topic: "setup", AggregateKey: user.String(), Payload: payload}
					}
					_, err := repo.CreateSetup(b.Context(), user, &repository.CreateSetupOpts{Event: event})
					require.NoError(b, err)
				})
			}
			beside(b, [2]string{"without-event", "with-event"}, [2]func() time.Duration{
				create(nil), create(json.RawMessage(`{"a": 1, "b": "some text"}`)),
			})
		})
	}
}

// BenchmarkOutboxClaim measures a claim of 10 events out of many, each of an aggregate of its own: with nothing else in
// the table, and with 100,000 events that have ended.
func BenchmarkOutboxClaim(b *testing.B) {
	claim := func(others string) func() time.Duration {
		pool := testdb.Pool(b)
		repo, err := repository.New(pool)
		require.NoError(b, err)
		_, err = pool.Exec(b.Context(), others)
		require.NoError(b, err)
		_, err = pool.Exec(b.Context(), `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
			SELECT 'bench', 'a' || n, 'null' FROM generate_series(1, 10 * ($1::integer + 1)) AS n`, b.N)
		require.NoError(b, err)
		return timed(func() {
			events, err := repo.ClaimEvents(b.Context(), repository.ClaimParams{Worker: "bench", Max: 10})
			require.NoError(b, err)
			require.Len(b, events, 10)
		})
	}
	beside(b, [2]string{"alone", "beside-ended"}, [2]func() time.Duration{
		claim(`SELECT`),
		claim(`INSERT INTO latchkey.outbox (topic, aggregate_key, payload, state, ended_at)
			SELECT 'bench', 'old' || n, 'null', CASE WHEN n % 2 = 0 THEN 'done' ELSE 'dead' END, clock_timestamp() FROM generate_series(1, 100000) AS n`),
	})
}

// backlog is how many events or jobs a round of BenchmarkDispatcherBesideRiver begins with.
const backlog = 10_000

// BenchmarkDispatcherBesideRiver measures how long the Dispatcher takes to claim, handle and complete what is queued with
// a handler that does nothing, beside River with as many workers, and its fetches as soon after one another as it allows.
// Each has a database of its own each time. "ratio" is above 1 where the Dispatcher is faster.
func BenchmarkDispatcherBesideRiver(b *testing.B) {
	for _, workers := range []int{16, 100, 1000} {
		b.Run(fmt.Sprint("Workers=", workers), func(b *testing.B) {
			beside(b, [2]string{"dispatcher", "river"}, [2]func() time.Duration{
				func() time.Duration { return drainByDispatcher(b, workers) },
				func() time.Duration { return drainByRiver(b, workers) },
			})
		})
	}
}

func drainByDispatcher(b *testing.B, workers int) time.Duration {
	b.Helper()
	pool := testdb.Pool(b, maxConns(16))
	_, err := pool.Exec(b.Context(), `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
		SELECT 'bench', 'a' || n, '{}' FROM generate_series(1, $1::integer) AS n`, backlog)
	require.NoError(b, err)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	var left atomic.Int64
	left.Store(backlog)
	repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
		EventDone: func(_ context.Context, e repository.EventDone) {
			if left.Add(-1) == 0 || e.Err != nil {
				cancel()
			}
		},
	}))
	require.NoError(b, err)
	d, err := repository.NewDispatcher(repo, func(context.Context, repository.ClaimedEvent) error { return nil },
		&repository.DispatcherOpts{Concurrency: workers})
	require.NoError(b, err)
	started := time.Now()
	require.NoError(b, d.Run(ctx))
	took := time.Since(started)
	require.Zero(b, left.Load())
	return took
}

type noopArgs struct{}

func (noopArgs) Kind() string { return "noop" }

func drainByRiver(b *testing.B, workers int) time.Duration {
	b.Helper()
	pool := testdb.Pool(b, maxConns(16))
	_, err := pool.Exec(b.Context(), "CREATE SCHEMA river")
	require.NoError(b, err)
	silent := slog.New(slog.DiscardHandler)
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: "river", Logger: silent})
	require.NoError(b, err)
	_, err = migrator.Migrate(b.Context(), rivermigrate.DirectionUp, nil)
	require.NoError(b, err)
	registry := river.NewWorkers()
	river.AddWorker(registry, river.WorkFunc(func(context.Context, *river.Job[noopArgs]) error { return nil }))
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{
		FetchCooldown:     river.FetchCooldownMin,
		FetchPollInterval: river.FetchPollIntervalMin,
		Logger:            silent,
		Queues:            map[string]river.QueueConfig{river.QueueDefault: {MaxWorkers: workers}},
		Schema:            "river",
		Workers:           registry,
	})
	require.NoError(b, err)
	_, err = client.InsertManyFast(b.Context(), slices.Repeat([]river.InsertManyParams{{Args: noopArgs{}}}, backlog))
	require.NoError(b, err)
	completed, unsubscribe := client.SubscribeConfig(&river.SubscribeConfig{ChanSize: backlog, Kinds: []river.EventKind{river.EventKindJobCompleted}})
	defer unsubscribe()
	started := time.Now()
	require.NoError(b, client.Start(b.Context()))
	for range backlog {
		<-completed
	}
	took := time.Since(started)
	require.NoError(b, client.Stop(b.Context()))
	return took
}
