package repository

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/lockkey"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// call is one guarded statement: the locks it needs, and how long it may wait for them.
type call struct {
	outer      pgx.Tx // the caller's transaction to join; nil to open one
	locks      []Lock
	try        bool
	timeout    time.Duration
	idempotent bool  // it has an idempotency key
	limit      int64 // of its rule, for the error of the constraint behind it

	started time.Time
	cut     bool // the timeout is shorter than asked for, because the context's deadline comes first
}

// guarded runs a call in one round trip: BEGIN, the timeouts, the locks, the statement that last makes, COMMIT.
// When it returns nil, that is committed.
//
// In the caller's transaction a savepoint stands for BEGIN, and its release for COMMIT. If the call fails, all
// of it is undone, the locks too, and the transaction can be used on, unless its connection is lost.
func (r *Repository) guarded(ctx context.Context, c *call, last func(*db.Queries) error) error {
	if err := c.start(ctx); err != nil {
		return err
	}
	if c.outer != nil {
		tx := pipeline.Join(c.outer)
		_ = db.New(tx.Before()).TxRequireReadCommitted(ctx)
		_ = db.New(tx.After()).TxRestoreTimeouts(ctx)
		return c.run(ctx, c.outer.Conn(), tx, last)
	}

	conn, err := r.acquire(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Release()
	err = c.run(ctx, conn.Conn(), pipeline.Begin(conn.Conn()), last)
	if errors.Is(err, ErrReadOnly) {
		_ = conn.Conn().Close(ctx) // the next call's connection may reach the new primary
	}
	return err
}

// run queues what comes before the statement, makes it, and undoes everything if that fails.
func (c *call) run(ctx context.Context, conn *pgx.Conn, tx *pipeline.Tx, last func(*db.Queries) error) error {
	budget := (c.timeout - time.Since(c.started)).Milliseconds()
	if budget < 1 { // to the server, 0 is for ever
		return c.busy(WherePool, nil)
	}
	keys, exclusive := make([]int64, len(c.locks)), make([]bool, len(c.locks))
	for i, l := range c.locks {
		keys[i], exclusive[i] = lockkey.Sum(l.namespace, l.id), l.exclusive
	}

	// Queued, so that an error comes from the statement.
	before := db.New(tx.Before())
	_ = before.TxSetLockBudget(ctx, budget)
	if c.try {
		_ = before.LockTryAll(ctx, db.LockTryAllParams{Keys: keys, Exclusive: exclusive})
	} else {
		_ = before.LockAll(ctx, db.LockAllParams{Keys: keys, Exclusive: exclusive})
	}

	err := last(db.New(tx.Last()))
	if err == nil {
		return nil
	}
	tx.Rollback(ctx)
	return c.classify(ctx, err, conn.IsClosed())
}

// start begins the budget. The context's deadline shortens it by a little more than is left, so that the
// server's answer comes before the context ends: then the connection is kept, and the outcome known.
func (c *call) start(ctx context.Context) error {
	c.started = time.Now()
	if deadline, ok := ctx.Deadline(); ok {
		left := deadline.Sub(c.started)
		left -= min(left/4, 50*time.Millisecond)
		if left < c.timeout {
			c.timeout, c.cut = left, true
		}
	}
	return ctx.Err()
}

// acquire takes a connection within the budget.
func (r *Repository) acquire(ctx context.Context, c *call) (*pgxpool.Conn, error) {
	bounded, cancel := context.WithDeadline(ctx, c.started.Add(c.timeout))
	defer cancel()
	conn, err := r.pool.Acquire(bounded)
	switch {
	case err == nil:
		return conn, nil
	case bounded.Err() != nil && ctx.Err() == nil:
		return nil, c.busy(WherePool, nil)
	}
	var refused *pgconn.ConnectError
	return nil, c.classify(ctx, err, errors.As(err, &refused))
}

// busy says that the call gave up; err is what the server said, nil if it was not asked.
func (c *call) busy(where string, err error) error {
	busy := &LockBusyError{Waited: time.Since(c.started), Where: where, Err: err}
	if len(c.locks) > 0 {
		busy.Namespace = c.locks[0].namespace
	}
	if c.cut {
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, busy)
	}
	return busy
}

// read runs a query on a connection of its own, outside any transaction.
func (r *Repository) read(ctx context.Context, query func(*db.Queries) error) error {
	var c call
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		var refused *pgconn.ConnectError
		return c.classify(ctx, err, errors.As(err, &refused))
	}
	defer conn.Release()
	if err := query(db.New(conn)); err != nil {
		return c.classify(ctx, err, conn.Conn().IsClosed())
	}
	return nil
}
