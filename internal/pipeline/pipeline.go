// Package pipeline runs a transaction in as few network round trips as its queries need: what begins it
// travels with the first query, and what ends it with the last.
//
// A lock that is taken in such a transaction is held while the server works, not while the network carries
// questions and answers. A transaction of one query costs one round trip:
//
//	tx := pipeline.Begin(conn)
//	db.New(tx.Before()).LockAll(ctx, locks)           // queued
//	row, err := db.New(tx.Last()).Insert(ctx, values) // BEGIN, LockAll, Insert, COMMIT in one write
//	if err != nil {
//		tx.Rollback(ctx)
//	}
package pipeline

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
)

// BeforeError says that a statement queued with [Tx.Before], or the one that begins the transaction, failed.
// No query of the caller's was run.
type BeforeError struct{ Err error }

func (e *BeforeError) Error() string { return e.Err.Error() }
func (e *BeforeError) Unwrap() error { return e.Err }

// OutcomeError says that the connection ended after COMMIT was sent and before its answer came: the
// transaction may or may not have been committed. Err is what ended it, perhaps the context's error.
type OutcomeError struct{ Err error }

func (e *OutcomeError) Error() string { return "no answer to commit: " + e.Err.Error() }
func (e *OutcomeError) Unwrap() error { return e.Err }

// Tx is a transaction, or a savepoint in somebody else's, that sends nothing until its first query. It is a
// [db.DBTX] for every query but the last, which goes through [Tx.Last]. It is for one goroutine.
//
// A query that fails has undone everything; what is left is [Tx.Rollback], which must follow every Tx that did
// not end, and does no harm to one that did. Errors are those of pgx, except [BeforeError] and [OutcomeError].
type Tx struct {
	conn     *pgx.Conn
	send     func(context.Context, *pgx.Batch) pgx.BatchResults
	before   []statement // not sent yet
	after    []statement
	commit   string
	rollback string
	joined   bool
	begun    bool
	ended    bool
}

type statement struct {
	sql  string
	args []any
}

// Begin returns a READ COMMITTED transaction on conn, whatever the default of the database, role or session.
// At any other level a query would not see what was committed while the transaction waited for its lock.
func Begin(conn *pgx.Conn) *Tx {
	return &Tx{
		conn:     conn,
		send:     conn.SendBatch,
		before:   []statement{{sql: "begin isolation level read committed"}},
		commit:   "commit",
		rollback: "rollback",
	}
}

// Join returns a part of the transaction outer that can fail without it: everything since Join is undone by
// [Tx.Rollback], also the locks, and outer can be used on. Without an error it becomes a part of outer.
func Join(outer pgx.Tx) *Tx {
	return &Tx{
		conn:     outer.Conn(),
		send:     outer.SendBatch,
		before:   []statement{{sql: "savepoint latchkey"}},
		commit:   "release savepoint latchkey",
		rollback: "rollback to savepoint latchkey; release savepoint latchkey",
		joined:   true,
	}
}

// Before returns a [db.DBTX] whose Exec queues a statement to be sent before the next query. Its result is not
// known: an error comes from that query, as a [BeforeError].
func (tx *Tx) Before() db.DBTX { return queue{&tx.before} }

// After returns a [db.DBTX] whose Exec queues a statement to be sent between the last query and the end.
func (tx *Tx) After() db.DBTX { return queue{&tx.after} }

// Last returns a [db.DBTX] whose query is the last: it is sent with all that is queued and with COMMIT. When it
// returns without an error, Scan and Rows.Err included, the transaction is committed. An error of Scan's own,
// such as a wrong type, comes too late to undo anything.
func (tx *Tx) Last() db.DBTX { return last{tx} }

// Exec implements [db.DBTX].
func (tx *Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.start(ctx, statement{sql, args}, false).exec()
}

// Query implements [db.DBTX].
func (tx *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tx.start(ctx, statement{sql, args}, false).query()
}

// QueryRow implements [db.DBTX].
func (tx *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return tx.start(ctx, statement{sql, args}, false).queryRow()
}

// rollbackTimeout bounds a ROLLBACK whose context has ended. The server answers one in microseconds; when it
// does not, closing the connection has the same effect.
const rollbackTimeout = 5 * time.Second

// Rollback undoes the transaction, or all since [Join], and does nothing if it has ended or never began. It
// works also when ctx has ended, so that the connection need not be closed.
func (tx *Tx) Rollback(ctx context.Context) {
	over := tx.ended || tx.conn.IsClosed() || tx.conn.PgConn().TxStatus() == 'I'
	tx.ended = true
	if over || !tx.begun {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	_, err := tx.conn.Exec(ctx, tx.rollback)
	if err != nil && !tx.joined {
		_ = tx.conn.Close(ctx)
	}
}

// start sends what is queued and one query, and reads the answers that come before the query's own.
func (tx *Tx) start(ctx context.Context, query statement, last bool) *reply {
	var batch pgx.Batch
	if tx.ended {
		// An empty batch sends nothing; its results answer every question with an error.
		return &reply{tx: tx, results: tx.send(ctx, &batch), done: true, err: pgx.ErrTxClosed}
	}
	for _, s := range tx.before {
		batch.Queue(s.sql, s.args...)
	}
	batch.Queue(query.sql, query.args...)
	if last {
		for _, s := range tx.after {
			batch.Queue(s.sql, s.args...)
		}
		batch.Queue(tx.commit)
	}

	r := &reply{tx: tx, results: tx.send(ctx, &batch), last: last}
	for range tx.before {
		if _, err := r.results.Exec(); err != nil {
			_ = r.finish(&BeforeError{err}) // the query returns it
			break
		}
		tx.begun = true
	}
	tx.before = nil
	return r
}

type last struct{ tx *Tx }

func (l last) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return l.tx.start(ctx, statement{sql, args}, true).exec()
}

func (l last) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.tx.start(ctx, statement{sql, args}, true).query()
}

func (l last) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	return l.tx.start(ctx, statement{sql, args}, true).queryRow()
}

type queue struct{ statements *[]statement }

func (q queue) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	*q.statements = append(*q.statements, statement{sql, args})
	return pgconn.CommandTag{}, nil
}

func (q queue) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errQueued
}

func (q queue) QueryRow(context.Context, string, ...any) pgx.Row {
	return failed{errQueued}
}

// errQueued tells a developer of this module that a statement is not :exec.
var errQueued = errors.New("pipeline: only Exec can be queued")

type failed struct{ err error }

func (f failed) Scan(...any) error { return f.err }
