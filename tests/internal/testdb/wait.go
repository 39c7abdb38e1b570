package testdb

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

// advisory selects the requests for one bigint key in the current database; objsubid 2 would be the two-int form.
const advisory = `
	SELECT l.pid::bigint
	FROM pg_catalog.pg_locks AS l
	WHERE l.locktype = 'advisory' AND l.objsubid = 1
	  AND l.database = (SELECT d.oid FROM pg_catalog.pg_database AS d WHERE d.datname = current_database())
	  AND (l.classid::bigint << 32) | l.objid::bigint = $1
	  AND l.granted = $2
	ORDER BY l.waitstart, l.pid`

// WaitForWaiter waits until at least n sessions wait for the advisory lock with the key, and returns their backends' pids,
// the longest wait first.
func WaitForWaiter(t testing.TB, observer *pgx.Conn, key int64, n int) []uint32 {
	t.Helper()
	var pids []uint32
	poll(t, observer, func() bool {
		pids = requests(t, observer, key, false)
		return len(pids) >= n
	}, "%d sessions that wait for advisory lock %d", n, key)
	return pids
}

// WaitForLockWait waits until the backend waits for a lock of any kind.
func WaitForLockWait(t testing.TB, observer *pgx.Conn, pid uint32) {
	t.Helper()
	poll(t, observer, func() bool {
		var waits bool
		err := observer.QueryRow(t.Context(),
			"SELECT EXISTS (SELECT FROM pg_catalog.pg_locks WHERE pid = $1::bigint AND NOT granted)", int64(pid)).Scan(&waits)
		require.NoError(t, err)
		return waits
	}, "backend %d to wait for a lock", pid)
}

// Holders returns the pids of the backends that hold the advisory lock with the key now.
func Holders(t testing.TB, observer *pgx.Conn, key int64) []uint32 {
	t.Helper()
	return requests(t, observer, key, true)
}

func requests(t testing.TB, observer *pgx.Conn, key int64, granted bool) []uint32 {
	t.Helper()
	rows, err := observer.Query(t.Context(), advisory, key, granted)
	require.NoError(t, err)
	pids, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (uint32, error) {
		var pid int64
		err := row.Scan(&pid)
		return uint32(pid), err
	})
	require.NoError(t, err)
	return pids
}

func poll(t testing.TB, observer *pgx.Conn, done func() bool, want string, args ...any) {
	t.Helper()
	deadline := time.After(patience)
	for !done() {
		select {
		case <-deadline:
			t.Log(activity(observer))
			t.Fatalf("waited %v in vain for "+want, append([]any{patience}, args...)...)
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// activity lists who does what in the database, for the reader of a failed wait.
func activity(observer *pgx.Conn) string {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	rows, err := observer.Query(ctx, `
		SELECT format('%s %s, waits for %s, blocked by %s: %s', a.pid, a.state, coalesce(a.wait_event, 'nothing'),
		              pg_catalog.pg_blocking_pids(a.pid), left(a.query, 200))
		FROM pg_catalog.pg_stat_activity AS a
		WHERE a.datname = current_database()
		ORDER BY a.pid`)
	if err != nil {
		return err.Error()
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return err.Error()
	}
	return "sessions:\n" + strings.Join(lines, "\n")
}
