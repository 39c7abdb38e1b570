package tests

import (
	"encoding/json"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// BenchmarkOutboxEnqueue measures what an event adds to a guarded write, in one caller.
func BenchmarkOutboxEnqueue(b *testing.B) {
	repo, err := repository.New(testdb.Pool(b))
	require.NoError(b, err)
	for name, event := range map[string]*repository.Event{
		"WithoutEvent": nil,
		"WithEvent":    {Topic: "setup", AggregateKey: "user", Payload: json.RawMessage(`{"a": 1, "b": "some text"}`)},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				_, err := repo.CreateSetup(b.Context(), uuid.New(), &repository.CreateSetupOpts{Event: event})
				require.NoError(b, err)
			}
		})
	}
}

// BenchmarkOutboxClaim measures a claim of 10 events out of many, each of an aggregate of its own: with nothing else in
// the table, and with 100,000 events that have ended.
func BenchmarkOutboxClaim(b *testing.B) {
	for name, others := range map[string]string{
		"Alone": `SELECT`,
		"Ended": `INSERT INTO latchkey.outbox (topic, aggregate_key, payload, state, ended_at)
			SELECT 'bench', 'old' || n, 'null', CASE WHEN n % 2 = 0 THEN 'done' ELSE 'dead' END, clock_timestamp() FROM generate_series(1, 100000) AS n`,
	} {
		b.Run(name, func(b *testing.B) {
			pool := testdb.Pool(b)
			repo, err := repository.New(pool)
			require.NoError(b, err)
			_, err = pool.Exec(b.Context(), others)
			require.NoError(b, err)
			_, err = pool.Exec(b.Context(), `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
				SELECT 'bench', 'a' || n, 'null' FROM generate_series(1, 10 * ($1::integer + 1)) AS n`, b.N)
			require.NoError(b, err)
			claim := func() int {
				events, err := repo.ClaimEvents(b.Context(), repository.ClaimParams{Worker: "bench", Max: 10})
				require.NoError(b, err)
				return len(events)
			}
			claim()
			b.ResetTimer()
			for range b.N {
				require.Equal(b, 10, claim())
			}
		})
	}
}
