package repository

import (
	"context"
	"time"

	"github.com/latchkey-go/latchkey/db"
)

// LockActivity is one advisory lock of the database that somebody holds or waits for, the host's own included.
type LockActivity struct {
	Lock             LockName
	Exclusive        bool
	Granted          bool       // false for one who waits
	PID              int32      // of the server process; 0 for a prepared transaction
	WaitingSince     *time.Time // nil for a holder
	TransactionStart *time.Time // nil outside a transaction
	BlockedBy        []int32    // the PIDs that hold the lock or wait for it earlier; empty for a holder

	// Role, Application, State and Query are those of pg_stat_activity. State, Query and TransactionStart are
	// hidden where the session is another role's and this one is not in pg_read_all_stats.
	Role, Application, State, Query string
}

// maxActivity bounds what LockActivity returns; the server's lock table may hold many times as much.
const maxActivity = 1000

// LockActivity returns who waits for an advisory lock, the longest wait first, and then who holds one, the oldest
// transaction first: at most 1,000 in all. It takes no lock, but reading pg_locks stops the server's lock table for
// a moment, so call it for a person or once in a while. In SQL it is the view latchkey.lock_activity.
func (r *Repository) LockActivity(ctx context.Context) (_ []LockActivity, err error) {
	defer r.done(ctx, "LockActivity", time.Now(), &err)
	var rows []db.LockActivityListRow
	err = r.read(ctx, func(q *db.Queries) (err error) {
		rows, err = q.LockActivityList(ctx, maxActivity)
		return err
	})
	if err != nil {
		return nil, err
	}
	activity := make([]LockActivity, len(rows))
	for i, row := range rows {
		activity[i] = LockActivity{
			Lock:             nameOf(row.Key),
			Exclusive:        row.Exclusive,
			Granted:          row.Granted,
			PID:              row.Pid,
			WaitingSince:     row.WaitingSince,
			TransactionStart: row.TransactionStart,
			BlockedBy:        row.BlockedBy,
			Role:             row.Role,
			Application:      row.Application,
			State:            row.State,
			Query:            row.Query,
		}
	}
	return activity, nil
}
