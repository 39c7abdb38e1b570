package tests

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/racelab"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// The broken ways among the experiments are the negative controls of the right ones: they stand in the
// same schedule, and have to break in it.
func TestRacelab(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for _, e := range racelab.All() {
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			requireAsItMust(t, e, url)
		})
	}
}

func TestRacelabComesOutTheSameEveryTime(t *testing.T) {
	t.Parallel()
	const times = 20 // a schedule left to luck does not come out the same so often
	url := testdb.URL(t)
	races := []string{
		"check-then-insert",
		"advisory-lock",
		"advisory-lock-limit-3",
		"repeatable-read-default-broken",
		"repeatable-read-default",
		"serializable",
	}
	for _, e := range racelab.All() {
		if !slices.Contains(races, e.Name) {
			continue
		}
		t.Run(e.Name, func(t *testing.T) {
			t.Parallel()
			for range times {
				requireAsItMust(t, e, url)
			}
		})
	}
}

func requireAsItMust(t *testing.T, e racelab.Experiment, url string) {
	t.Helper()
	result, timeline, err := e.Run(t.Context(), url)
	require.NoError(t, err, "timeline: %v", timeline)
	require.NoError(t, e.Check(result), "timeline: %v", timeline)
}
