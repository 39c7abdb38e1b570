package racelab

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/repository"
)

const (
	// busyBudget is long enough to be seen on a timeline and short enough for a demo.
	busyBudget = 200 * time.Millisecond

	// atOnce is what a try may take at most. It is far above a round trip on a loaded machine and far
	// below patience, for which a call that waits would wait.
	atOnce = 2 * time.Second
)

// The statements of the hand-written ways. Table names are unqualified, as application code has them:
// the callers' search_path says whether it is latchkey's table or the copy without the unique index.
const (
	countPending = `
SELECT count(*)
FROM setup_requests
WHERE user_id = @user_id AND status = 'pending'`

	// PostgreSQL allows no FOR UPDATE beside an aggregate, hence the sub-query.
	countPendingForUpdate = `
SELECT count(*)
FROM (
    SELECT id
    FROM setup_requests
    WHERE user_id = @user_id AND status = 'pending'
    FOR UPDATE
) AS pending`

	// The lock is taken before the rows are counted, so it is the statement's snapshot, and not its
	// order, that breaks this.
	lockAndCountPending = `
WITH lock AS MATERIALIZED (
    SELECT pg_advisory_xact_lock(@key)
)
SELECT (SELECT count(*) FROM setup_requests WHERE user_id = @user_id AND status = 'pending')
FROM lock`

	insertPending = `
INSERT INTO setup_requests (user_id)
VALUES (@user_id)`

	lockParentRow = `
SELECT id
FROM users
WHERE id = @user_id
FOR NO KEY UPDATE`

	lockAdvisory = `SELECT pg_advisory_xact_lock(@key)`
)

// errLimit is a hand-written way's own refusal.
var errLimit = errors.New("limit reached")

// handWritten is check-then-insert in a transaction of its own. The ways differ in its statements only.
type handWritten struct {
	isolation pgx.TxIsoLevel // empty: the connection's default, as where nobody thought of it
	lock      string         // a statement before the check, or empty
	check     string         // returns how many are pending
}

// race lets all callers try at once.
func (h handWritten) race(ctx context.Context, l *lab) error {
	l.start(ctx, h.try)()
	return nil
}

// try repeats attempts that end in a serialization failure: that is how SERIALIZABLE has to be used.
func (h handWritten) try(ctx context.Context, l *lab, c *caller) error {
	for {
		err := h.attempt(ctx, l, c)
		if sqlState(err) != "40001" || ctx.Err() != nil {
			return err
		}
		l.say(c, "40001: try again")
	}
}

func (h handWritten) attempt(ctx context.Context, l *lab, c *caller) error {
	args := pgx.NamedArgs{"user_id": l.user, "key": l.key}

	l.do(c, "BEGIN; count pending")
	if h.lock != "" {
		l.do(c, "BEGIN; lock")
	}
	tx, err := c.pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: h.isolation})
	if err != nil {
		return err
	}
	defer rollback(ctx, tx)

	if h.lock != "" {
		if _, err := tx.Exec(ctx, h.lock, args); err != nil {
			return err
		}
		l.say(c, "held")
		l.do(c, "count pending")
	}

	var pending int
	if err := tx.QueryRow(ctx, h.check, args).Scan(&pending); err != nil {
		return err
	}
	l.say(c, fmt.Sprint(pending))
	if pending >= l.result.Limit {
		l.do(c, "ROLLBACK")
		return errLimit
	}

	if err := l.gate(ctx, c); err != nil {
		return err
	}

	l.do(c, "INSERT")
	if _, err := tx.Exec(ctx, insertPending, args); err != nil {
		return err
	}
	l.say(c, "1 row")
	l.do(c, "COMMIT")
	return tx.Commit(ctx)
}

// raceLatchkey lets all callers call CreateSetup at once. The first has its lock and has counted when
// it meets, at its INSERT, an uncommitted row of the lab in the slot that it wants; there it waits, as
// long a window as a race can have, until all the others are seen waiting for its lock. Then the lab's row
// is rolled back.
func raceLatchkey(ctx context.Context, l *lab) error {
	row, err := l.pool.Begin(ctx)
	if err != nil {
		return err
	}
	defer rollback(ctx, row)
	if _, err := row.Exec(ctx, insertPending, pgx.NamedArgs{"user_id": l.user}); err != nil {
		return err
	}

	l.say(nil, "the lab keeps an uncommitted row in the way of the first INSERT")
	wait := l.start(ctx, createSetup(0))
	waits, err := l.settle(ctx)
	if err == nil {
		err = onePastTheLock(l, waits)
	}
	if err == nil {
		l.say(nil, "one has the lock, the rest wait for it: the lab takes its row away")
	}
	rollback(ctx, row)
	wait()
	return err
}

// onePastTheLock is the proof that it is the lock that keeps the rule: without it the numbers would be
// the same for a limit of one, thanks to the unique index behind it.
func onePastTheLock(l *lab, waits map[*caller]lockWait) error {
	past := 0
	for _, c := range l.callers {
		if waits[c].kind != "advisory" {
			past++
		}
	}
	if past != 1 {
		return fmt.Errorf("%d callers were past the lock at the same time, want 1", past)
	}
	return nil
}

// createSetup calls CreateSetup with a lock timeout, or with the Repository's for 0, which is patience.
func createSetup(lockTimeout time.Duration) attempt {
	return func(ctx context.Context, l *lab, c *caller) error {
		l.do(c, "CreateSetup")
		l.say(c, "sent")
		_, err := c.repo.CreateSetup(ctx, c.user, &repository.CreateSetupOpts{
			MaxPending:  l.result.Limit,
			LockTimeout: lockTimeout,
		})
		return err
	}
}

// tryCreateSetup calls TryCreateSetup, and calls it an error when it has waited.
func tryCreateSetup(ctx context.Context, l *lab, c *caller) error {
	l.do(c, "TryCreateSetup")
	l.say(c, "sent")
	sent := time.Now()
	_, err := c.repo.TryCreateSetup(ctx, c.user, &repository.CreateSetupOpts{MaxPending: l.result.Limit})
	if took := time.Since(sent); took > atOnce {
		return fmt.Errorf("took %v, want at once", took)
	}
	return err
}

func otherUserNotBlocked(ctx context.Context, l *lab) error {
	a, b, c := l.callers[0], l.callers[1], l.callers[2]
	c.user = l.another()

	release, err := l.hold(ctx, a, "pg_advisory_xact_lock")
	if err != nil {
		return err
	}
	defer release()

	// B is the control: without one that is blocked, C's success would prove nothing.
	wait := l.start(ctx, createSetup(busyBudget), b)
	defer wait()
	if err := l.awaitWaiting(ctx, b); err != nil {
		return err
	}
	return l.one(ctx, createSetup(0), c)
}

func lockBusy(ctx context.Context, l *lab) error {
	return busyUntilReleased(ctx, l, createSetup(busyBudget))
}

func tryLock(ctx context.Context, l *lab) error {
	return busyUntilReleased(ctx, l, tryCreateSetup)
}

// busyUntilReleased lets B attempt twice: while A holds the lock, and after A's rollback.
func busyUntilReleased(ctx context.Context, l *lab, attempt attempt) error {
	a, b := l.callers[0], l.callers[1]
	release, err := l.hold(ctx, a, "pg_advisory_xact_lock")
	if err != nil {
		return err
	}
	defer release()
	if err := l.one(ctx, attempt, b); err != nil {
		return err
	}
	release()
	return l.one(ctx, attempt, b)
}

func sessionLockSurvivesRollback(ctx context.Context, l *lab) error {
	a, b := l.callers[0], l.callers[1]
	release, err := l.hold(ctx, a, "pg_advisory_lock")
	if err != nil {
		return err
	}
	release()
	if l.broken, err = l.holdsLock(ctx, a); err != nil {
		return err
	}
	if l.broken {
		l.say(nil, "pg_locks: A still holds the lock, outside any transaction")
	}
	return l.one(ctx, createSetup(busyBudget), b)
}

// sqlState returns the SQLSTATE of a server's error, and "" for any other.
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}

// rollback also works when ctx has ended, so that the connection outlives it; after COMMIT it does nothing.
func rollback(ctx context.Context, tx pgx.Tx) {
	_ = tx.Rollback(context.WithoutCancel(ctx))
}
