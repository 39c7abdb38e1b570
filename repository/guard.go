package repository

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// MaxLocks is how many locks one call may take. The server's lock table is shared by everybody on it, and holds
// by default about 64 locks for each connection that it allows.
const MaxLocks = 1024

// Guard runs fn under locks, in a READ COMMITTED transaction of its own, and commits it if fn returns nil. It is
// for a rule of the host's, over its own tables and its own sqlc package:
//
//	locks := []repository.Lock{tickets.Exclusive(id)}
//	err := repo.Guard(ctx, locks, func(ctx context.Context, tx *repository.Tx) error {
//		n, err := hostdb.New(tx).CountOpen(ctx, id)
//		if err != nil {
//			return err
//		}
//		if n >= limit {
//			return errLimit
//		}
//		return hostdb.New(tx.Last()).InsertOpen(ctx, id)
//	})
//
// The locks travel with fn's first query, and until that none is held. They are taken in the order of their
// keys, each key once, where exclusive wins over shared, so calls over several locks never deadlock with each
// other. n queries cost n round trips if the last goes through [Tx.Last], and one more if not.
//
// fn is called at most once. It should neither call out nor wait for anything, since others wait for it: its
// context ends after [WithHoldTimeout], and so does the server's patience between two of its statements.
//
// An error of fn is returned as it is, and a panic goes on; everything is undone, unless it went through
// [Tx.Last] before. If fn returns nil although a statement failed, the error is [pgx.ErrTxCommitRollback]. The
// queries of fn return [ErrLockBusy] and the other errors of this package, with the server's own inside.
// [ErrInvalid] comes before fn: no lock, more than [MaxLocks], a lock with a bad id, or a nil fn.
func (r *Repository) Guard(ctx context.Context, locks []Lock, fn func(ctx context.Context, tx *Tx) error) (err error) {
	err = errNotReturned
	defer r.done(ctx, "Guard", time.Now(), &err)
	return r.guard(ctx, &call{locks: locks}, fn)
}

// TryGuard is [Repository.Guard], except that it waits for no lock: if one of them is held by another session,
// fn's first query returns [ErrLockBusy] at once, and none is taken.
func (r *Repository) TryGuard(ctx context.Context, locks []Lock, fn func(ctx context.Context, tx *Tx) error) (err error) {
	err = errNotReturned
	defer r.done(ctx, "TryGuard", time.Now(), &err)
	return r.guard(ctx, &call{locks: locks, try: true}, fn)
}

// GuardQuery is [Repository.Guard] for a rule that is one statement, such as INSERT ... SELECT ... WHERE (SELECT
// count(*) ...) < $1. It costs one round trip, and calls that wait for the same locks run together: see
// [WithCoalescing].
//
//	id, err := repository.GuardQuery(ctx, repo, locks, func(ctx context.Context, q repository.DBTX) (int64, error) {
//		return hostdb.New(q).InsertTicketWithinLimit(ctx, params)
//	})
//
// query must run one statement, and do nothing else that has an effect: it may be called several times, on another
// goroutine, and once more after GuardQuery has returned because ctx ended. A second statement fails, and the first is
// committed. Its error is returned as it is. Where that
// is the statement's, such as [ErrLockBusy], nothing was written; any other, such as [pgx.ErrNoRows] of a statement
// whose condition did not hold, undoes nothing.
func GuardQuery[T any](ctx context.Context, r *Repository, locks []Lock, query func(ctx context.Context, q DBTX) (T, error)) (_ T, err error) {
	err = errNotReturned
	defer r.done(ctx, "GuardQuery", time.Now(), &err)
	var none T
	if query == nil {
		return none, &InvalidError{"query", "must not be nil"}
	}
	if err := checkLocks(locks); err != nil {
		return none, err
	}
	c := &call{locks: locks, timeout: r.lockTimeout, foreign: true}
	return runOne(ctx, r, c, query)
}

// GuardTx takes locks in a transaction of the caller's, in one round trip; they are held until it ends, or until
// it rolls back to a savepoint that is older than they are. What the caller reads after GuardTx is guarded by
// them; what it read before is not.
//
// The terms of joining, and the errors, are those of [Repository.CreateSetupTx] and [Repository.Guard]. Two
// transactions that each call GuardTx several times can deadlock, one with the other: ask for all locks in the
// first call, or give the namespaces a [Rank] and let [WithLockOrderCheck] watch over it.
func (r *Repository) GuardTx(ctx context.Context, tx pgx.Tx, locks []Lock) (err error) {
	defer r.done(ctx, "GuardTx", time.Now(), &err)
	if tx == nil {
		return &InvalidError{"tx", "must not be nil"}
	}
	if err := checkLocks(locks); err != nil {
		return err
	}
	c := &call{outer: tx, locks: locks, timeout: r.lockTimeout}
	return r.run(ctx, c, func(*pipeline.Tx) error { return nil })
}

func (r *Repository) guard(ctx context.Context, c *call, fn func(ctx context.Context, tx *Tx) error) error {
	if fn == nil {
		return &InvalidError{"fn", "must not be nil"}
	}
	if err := checkLocks(c.locks); err != nil {
		return err
	}
	c.timeout = r.lockTimeout
	c.hold, c.foreign = r.holdTimeout, true
	cancel := context.CancelFunc(func() {})
	defer func() { cancel() }() // after the end of the transaction, which reads the rows that fn left open
	return r.run(ctx, c, func(tx *pipeline.Tx) error {
		ctx, stop := context.WithDeadline(ctx, c.started.Add(c.timeout+c.hold)) //nolint:gosec // it is called, above
		cancel = stop
		if err := fn(ctx, &Tx{tx}); err != nil {
			return hostError{err}
		}
		return nil
	})
}

func checkLocks(locks []Lock) error {
	switch {
	case len(locks) == 0:
		return &InvalidError{"locks", "must not be empty"}
	case len(locks) > MaxLocks:
		return fmt.Errorf("%w: %w", ErrTooManyLocks, &InvalidError{"locks", "must be at most 1024"})
	}
	for i, l := range locks {
		if _, err := Key(l.namespace.name, l.id); err != nil {
			return fmt.Errorf("locks[%d]: %w", i, err)
		}
	}
	return nil
}

// errNotReturned is what the observer is told of a function that panics, or ends its goroutine.
var errNotReturned = errors.New("the guarded function did not return")

// hostError is an error of the host's function, which is returned as it is.
type hostError struct{ error }

func (e hostError) Unwrap() error { return e.error }

// Tx is the transaction of a guarded function. It is a DBTX for every sqlc package that is generated for pgx/v5 and
// has no :copyfrom or :batch query.
// It is for one goroutine: a query while another one runs, or while its rows are open, fails, and after the
// function has returned every query is [pgx.ErrTxClosed].
type Tx struct{ tx *pipeline.Tx }

// Exec runs a statement; see [pgx.Conn.Exec].
func (t *Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return t.tx.Exec(ctx, sql, args...)
}

// Query runs a query; see [pgx.Conn.Query]. The rows must be closed before the next one.
func (t *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return t.tx.Query(ctx, sql, args...)
}

// QueryRow runs a query; see [pgx.Conn.QueryRow].
func (t *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return t.tx.QueryRow(ctx, sql, args...)
}

// Last returns a DBTX whose query is the last: COMMIT travels with it, and the locks are freed before its answer
// has come back. When it returns without an error, Scan and Rows.Err included, the transaction is committed, and
// nothing that fn does later can undo it.
func (t *Tx) Last() DBTX { return t.tx.Last() }

// DBTX is what sqlc's New takes, in every package that it generates for pgx/v5.
type DBTX = db.DBTX

// TxFromConn returns the transaction that is open on conn as one that can be joined, for a host that began it
// through database/sql and pgx's stdlib driver:
//
//	tx, err := sqlConn.BeginTx(ctx, nil) // sqlConn is a *sql.Conn
//	...
//	err = sqlConn.Raw(func(driverConn any) error {
//		joined := repository.TxFromConn(driverConn.(*stdlib.Conn).Conn())
//		return repo.GuardTx(ctx, joined, locks)
//	})
//
// It stays the host's to end: Begin, Commit and Rollback return [ErrInvalid]. Without an open transaction, the
// methods that join it fail with SQLSTATE 25P01.
func TxFromConn(conn *pgx.Conn) pgx.Tx { return connTx{conn} }

type (
	rawConn = pgx.Conn // so that the embedded field is not called Conn, as the method is
	connTx  struct{ *rawConn }
)

func (connTx) Begin(context.Context) (pgx.Tx, error) { return nil, errNotOurs }
func (connTx) Commit(context.Context) error          { return errNotOurs }
func (connTx) Rollback(context.Context) error        { return errNotOurs }
func (connTx) LargeObjects() pgx.LargeObjects        { return pgx.LargeObjects{} }
func (t connTx) Conn() *pgx.Conn                     { return t.rawConn }

var errNotOurs = &InvalidError{"tx", "must be ended by who began it"}
