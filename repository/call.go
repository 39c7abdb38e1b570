package repository

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/keyqueue"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// call is one use of a method that takes locks: which, how long it may wait for them, and for what.
type call struct {
	outer      pgx.Tx // the caller's transaction to join; nil to open one
	locks      []Lock
	try        bool
	timeout    time.Duration
	hold       time.Duration // how long the host's function may keep the locks; 0 if there is none
	foreign    bool          // what it runs is the host's
	idempotent bool          // it has an idempotency key
	limit      int64         // of its rule, for the error of the constraint behind it
	setup      *setupInsert  // what its statement inserts, if that can be done for several calls at once

	started   time.Time
	cut       bool           // the timeout is shorter than asked for, because the context's deadline comes first
	keys      []int64        // of the locks
	ticket    ticket         // its place in the queue of this process
	statement pipeline.Query // all that it runs, if that is one statement
	err       error          // of the statement, if it ran together with those of other calls
	readOnly  bool           // the server takes no writes, whatever the host's function made of that
}

// runOne is run for a rule that is one statement. Calls that wait for the same locks run together.
func runOne[T any](ctx context.Context, r *Repository, c *call, query func(context.Context, db.DBTX) (T, error)) (T, error) {
	var row T
	err := r.runStatement(ctx, c, func(ctx context.Context, q db.DBTX) (err error) {
		row, err = query(ctx, q)
		return err
	})
	if err != nil {
		var none T // row may still be written to, if ctx ended
		return none, err
	}
	return row, nil
}

// runStatement is runOne for a statement that keeps its result to itself.
func (r *Repository) runStatement(ctx context.Context, c *call, statement pipeline.Query) error {
	// The host's query may look into its context, so that is the call's own, also where a batch has another.
	c.statement = func(_ context.Context, q db.DBTX) error {
		err := statement(ctx, q)
		if err != nil && c.foreign {
			err = hostError{err}
		}
		return err
	}
	return r.run(ctx, c, func(tx *pipeline.Tx) error { return c.statement(ctx, tx.Last()) })
}

// run runs fn in a transaction that begins with the call's locks, and commits it if fn returns nil. The locks
// travel with fn's first query, and COMMIT with its last if that goes through tx.Last: a single statement is
// one round trip.
//
// In the caller's transaction a savepoint stands for BEGIN, and its release for COMMIT. If the call fails, all
// of it is undone, the locks too, and the transaction can be used on, unless its connection is lost.
func (r *Repository) run(ctx context.Context, c *call, fn func(tx *pipeline.Tx) error) error {
	if len(c.locks) > 0 && c.outer == nil {
		if err := r.requireExclusion(ctx, c); err != nil {
			return err
		}
	}
	if err := c.start(ctx); err != nil {
		return err
	}
	if c.outer != nil {
		release, err := claim(c.outer)
		if err != nil {
			return err
		}
		defer release()
		if err := r.checkOrder(ctx, c); err != nil {
			return err
		}
		tx := pipeline.Join(c.outer)
		_ = db.New(tx.Before()).TxRequireReadCommitted(ctx)
		_ = db.New(tx.After()).TxRestoreTimeouts(ctx)
		return c.explainIn(ctx, tx, c.outer.Conn(), fn)
	}

	if len(c.locks) > 0 {
		if err := r.queue.Enter(ctx, &c.ticket); err != nil {
			return c.notEntered(ctx, err)
		}
		if c.ticket.Done() {
			return c.outcome()
		}
		defer r.queue.Leave(&c.ticket)
	}
	conn, err := r.acquire(ctx, c)
	if err != nil {
		return err
	}
	defer conn.Release()
	err = c.explainIn(ctx, pipeline.Begin(conn.Conn()), conn.Conn(), fn)
	if c.readOnly {
		_ = conn.Conn().Close(ctx) // the next call's connection may reach the new primary
	}
	return err
}

func (c *call) explainIn(ctx context.Context, tx *pipeline.Tx, conn *pgx.Conn, fn func(tx *pipeline.Tx) error) error {
	tx.Explain = func(err error) error {
		err = c.classify(ctx, err, conn.IsClosed)
		c.readOnly = c.readOnly || errors.Is(err, ErrReadOnly)
		return err
	}
	return c.runIn(ctx, tx, fn)
}

func (c *call) runIn(ctx context.Context, tx *pipeline.Tx, fn func(tx *pipeline.Tx) error) error {
	defer tx.Rollback(ctx) // also if fn panics
	if err := c.lockIn(ctx, tx); err != nil {
		return err
	}
	tx.Foreign = c.foreign
	tx.PrepareBy = c.started.Add(c.timeout)
	tx.Ahead = func() error {
		budget, err := c.budget()
		if err != nil {
			return err
		}
		return db.New(tx.Before()).TxRenewLockBudget(ctx, budget)
	}
	if err := fn(tx); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// lockIn has the transaction begin with the call's locks. Nearly every call wants one, and has one statement.
func (c *call) lockIn(ctx context.Context, tx *pipeline.Tx) error {
	if !c.wantsOne() || c.outer != nil || c.foreign {
		return c.queueLocks(ctx, tx)
	}
	tx.Otherwise = func() error { return c.queueLocks(ctx, tx) }
	budget, err := c.budget()
	if err == nil {
		_ = db.New(tx.Whole()).LockOneAtOnce(ctx, db.LockOneAtOnceParams{LockTimeoutMs: budget.LockTimeoutMs, Key: c.keys[0]})
	}
	return err
}

// wantsOne tells whether the call waits for one exclusive lock.
func (c *call) wantsOne() bool { return len(c.locks) == 1 && c.locks[0].exclusive && !c.try }

// queueLocks queues what bounds the wait, and the locks. Errors come from the first query.
func (c *call) queueLocks(ctx context.Context, tx *pipeline.Tx) error {
	budget, err := c.budget()
	if err != nil {
		return err
	}
	before := db.New(tx.Before())
	_ = before.TxSetLockBudget(ctx, db.TxSetLockBudgetParams{
		LockTimeoutMs:  budget.LockTimeoutMs,
		BudgetMs:       budget.BudgetMs,
		OwnTransaction: c.outer == nil,
	})
	if c.hold > 0 {
		_ = before.TxSetHoldTimeout(ctx, c.hold.Milliseconds())
	}
	if c.wantsOne() {
		_ = before.LockOne(ctx, c.keys[0])
		return nil
	}
	locks := db.LockAllParams{
		Keys:      c.keys,
		Exclusive: make([]bool, len(c.locks)),
		Ranks:     make([]int32, len(c.locks)),
	}
	for i, l := range c.locks {
		locks.Exclusive[i], locks.Ranks[i] = l.exclusive, l.namespace.rank
	}
	if c.try {
		_ = before.LockTryAll(ctx, db.LockTryAllParams(locks))
	} else {
		_ = before.LockAll(ctx, locks)
	}
	return nil
}

// budget is what is left of the timeout, in whole milliseconds: to the server, 0 is for ever.
func (c *call) budget() (b db.TxRenewLockBudgetParams, err error) {
	left := c.timeout - time.Since(c.started)
	if left <= 0 {
		return b, c.busy(WherePool, nil)
	}
	b.BudgetMs = int64((left + time.Millisecond - 1) / time.Millisecond)
	b.LockTimeoutMs = b.BudgetMs
	if c.try {
		b.LockTimeoutMs = 1
	}
	return b, nil
}

// start derives the keys of the locks, and begins the budget. The context's deadline shortens it by a little more than
// is left, so that the server's answer comes before the context ends: then the connection is kept, and the outcome
// known.
func (c *call) start(ctx context.Context) error {
	c.started = time.Now()
	c.keys = make([]int64, len(c.locks))
	locks := make([]keyqueue.Lock, len(c.locks))
	for i, l := range c.locks {
		c.keys[i] = l.key()
		locks[i] = keyqueue.Lock{Key: c.keys[i], Exclusive: l.exclusive}
	}
	if deadline, ok := ctx.Deadline(); ok {
		left := deadline.Sub(c.started)
		left -= min(left/4, 50*time.Millisecond)
		if left < c.timeout {
			c.timeout, c.cut = left, true
		}
	}
	c.ticket = ticket{
		Call:     c,
		Locks:    keyqueue.Distinct(locks),
		Deadline: c.started.Add(c.timeout),
		Try:      c.try,
		Together: c.statement != nil,
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
	return nil, c.classify(ctx, err, refused(err))
}

// busy says that the call gave up; err is what the server said, nil if it was not asked.
func (c *call) busy(where string, err error) error {
	busy := &LockBusyError{Waited: time.Since(c.started), Where: where, Err: err}
	if len(c.locks) > 0 {
		busy.Namespace = c.locks[0].namespace.name
	}
	if c.cut && (!c.try || where == WherePool) {
		return fmt.Errorf("%w: %w", context.DeadlineExceeded, busy)
	}
	return busy
}

// joining holds the connections whose transactions are being joined at this moment.
var joining sync.Map

// claim makes sure that a transaction of the caller's is joined by one goroutine at a time: pgx finds out only when
// it is too late.
func claim(outer pgx.Tx) (release func(), err error) {
	conn := outer.Conn()
	if conn == nil {
		return nil, &InvalidError{"tx", "must have a connection"}
	}
	if _, taken := joining.LoadOrStore(conn, true); taken {
		return nil, pipeline.ErrInUse
	}
	return func() { joining.Delete(conn) }, nil
}

// readIn runs a query in a transaction of the caller's, which can be used on after an error, or without one as
// read does.
func (r *Repository) readIn(ctx context.Context, outer pgx.Tx, query func(*db.Queries) error) error {
	if outer == nil {
		return r.read(ctx, query)
	}
	release, err := claim(outer)
	if err != nil {
		return err
	}
	defer release()
	c := call{outer: outer, started: time.Now()}
	return c.readJoined(ctx, query)
}

// readJoined runs a query behind a savepoint of the transaction that the call joins.
func (c *call) readJoined(ctx context.Context, query func(*db.Queries) error) error {
	tx := pipeline.Join(c.outer)
	defer tx.Rollback(ctx)
	tx.Explain = func(err error) error { return c.classify(ctx, err, c.outer.Conn().IsClosed) }
	return query(db.New(tx.Last()))
}

// read runs a query on a connection of its own, outside any transaction.
func (r *Repository) read(ctx context.Context, query func(*db.Queries) error) error {
	c := call{started: time.Now()}
	conn, err := r.pool.Acquire(ctx)
	if err != nil {
		return c.classify(ctx, err, refused(err))
	}
	defer conn.Release()
	if err := query(r.alone(conn)); err != nil {
		return c.classify(ctx, err, conn.Conn().IsClosed)
	}
	return nil
}

// alone returns the queries of a connection that run outside any transaction.
func (r *Repository) alone(conn *pgxpool.Conn) *db.Queries {
	if r.describes {
		return db.New(undescribed{conn})
	}
	return db.New(conn)
}

// undescribed are queries of a connection whose mode is describe_exec. Outside a transaction pgx runs such a query in two,
// one to ask for its types and one that relies on the statement that the first left unnamed. Behind a pooler that is perhaps
// gone, or another client's. So they are sent without asking.
type undescribed struct{ *pgxpool.Conn }

func (u undescribed) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return u.Conn.Query(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
}

func (u undescribed) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return u.Conn.QueryRow(ctx, sql, append([]any{pgx.QueryExecModeExec}, args...)...)
}

// refused tells whether err means that there is no connection to be had now. A wrong password, role or database
// does not pass.
func refused(err error) func() bool {
	return func() bool {
		var pgErr *pgconn.PgError
		if errors.As(err, &pgErr) && (strings.HasPrefix(pgErr.Code, "28") || pgErr.Code == "3D000") {
			return false
		}
		return errors.As(err, new(*pgconn.ConnectError))
	}
}
