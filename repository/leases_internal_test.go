package repository

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A process that was stopped for longer than its lease may run the end of WithLease before the timer that says so. The
// lease is lost all the same, and nobody has to be asked: this Repository has no pool.
func TestLeaseWhoseTimeIsOverIsLost(t *testing.T) {
	t.Parallel()
	l := &Lease{Name: "job", Owner: "me", Fence: 1}
	l.trust(time.Now().Add(-time.Hour), time.Minute, time.Time{})
	require.False(t, new(Repository).giveBack(t.Context(), l))
}
