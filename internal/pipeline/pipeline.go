// Package pipeline runs a transaction in as few network round trips as its queries need: what begins it
// travels with the first query, and what ends it with the last.
//
// A lock that is taken in such a transaction is held while the server works, not while the network carries
// questions and answers. A transaction of one query costs one round trip, once its statements are prepared:
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
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
)

// BeforeError says that the query was not run, since a statement queued with [Tx.Before] failed, or the one that
// begins the transaction, or one of them all could not be prepared or encoded.
type BeforeError struct{ Err error }

func (e *BeforeError) Error() string { return e.Err.Error() }
func (e *BeforeError) Unwrap() error { return e.Err }

// OutcomeError says that the connection, or the context, ended after COMMIT was sent and before its answer came: the
// transaction may or may not have been committed. Err is what ended it, perhaps the context's error.
type OutcomeError struct{ Err error }

func (e *OutcomeError) Error() string { return "no answer to commit: " + e.Err.Error() }
func (e *OutcomeError) Unwrap() error { return e.Err }

// ErrInUse is returned by a query while another query of the same Tx runs, or has rows that are still open.
var ErrInUse = errors.New("transaction is in use: it is for one goroutine, and the rows of a query must be closed before the next")

// Tx is a transaction, or a savepoint in somebody else's, that sends nothing until its first query. It is a
// [db.DBTX] for every query but the last, which goes through [Tx.Last] or is followed by [Tx.Commit]. It is for
// one goroutine; a second one gets [ErrInUse], and after the end [pgx.ErrTxClosed].
//
// [Tx.Rollback] must follow every Tx that was not committed, and does no harm to one that was. Errors are those
// of pgx, except [BeforeError], [OutcomeError], and those of Otherwise and Ahead, after which the query is not sent.
type Tx struct {
	// Explain, if it is set, gives an error of the server or the connection its meaning before a query or
	// Commit returns it. The connection is known to be lost or not by then.
	Explain func(error) error

	// Otherwise, if it is set, is called where what Whole queued is not sent, or is refused. With Before, it queues what
	// does the same in a transaction that has a BEGIN.
	Otherwise func() error

	// Ahead, if it is set, is called where the transaction was begun ahead of the statement that takes the locks,
	// which may have taken long. What it queues with Before goes before that statement.
	Ahead func() error

	// PrepareBy, if it is set, is how long pgx may take to prepare statements of its own accord; then the connection
	// is given up. What it has prepared, it may have forgotten without saying.
	PrepareBy time.Time

	// Foreign says that the queries are not latchkey's own, and may be too many to keep prepared.
	Foreign bool

	conn     *pgx.Conn
	prepared *prepared // on conn; only known while that is the transaction's
	send     func(context.Context, *pgx.Batch) pgx.BatchResults
	commit   string
	rollback string
	joined   bool

	mu     sync.Mutex  // never waited for by a query, which fails instead
	before []statement // not sent yet
	whole  []statement // in place of before, if everything goes in one write
	after  []statement
	open   *reply // whose rows are being read
	begun  bool
	ended  bool
	failed error // why the transaction did not begin or was not committed, or it is not known to have been
	stale  bool  // a prepared statement does not fit the server any more
}

type statement struct {
	sql  string
	args []any
}

var begin = []statement{{sql: "begin isolation level read committed"}}

// Begin returns a READ COMMITTED transaction on conn, whatever the default of the database, role or session.
// At any other level a query would not see what was committed while the transaction waited for its lock.
func Begin(conn *pgx.Conn) *Tx {
	return &Tx{
		conn:     conn,
		send:     conn.SendBatch,
		before:   begin,
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

// Whole returns a [db.DBTX] whose Exec queues a statement that does the work of all that Before queues, BEGIN included,
// where everything goes to the server in one write: then the transaction that the server itself begins with a write and
// commits at its end is enough, and BEGIN and COMMIT are two messages less. The statement must read no table, and raise
// SQLSTATE 25000 where such a transaction is not what BEGIN would have made; then the connection never tries again. What
// After queues is not sent with it.
func (tx *Tx) Whole() db.DBTX { return queue{&tx.whole} }

// After returns a [db.DBTX] whose Exec queues a statement to be sent between the last query and the end.
func (tx *Tx) After() db.DBTX { return queue{&tx.after} }

// Last returns a [db.DBTX] whose query is the last: it is sent with all that is queued and with COMMIT. When it
// returns without an error, Scan and Rows.Err included, the transaction is committed. An error of Scan's own,
// such as a wrong type, comes too late to undo anything.
func (tx *Tx) Last() db.DBTX { return last{tx} }

// Exec implements [db.DBTX].
func (tx *Tx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return tx.exec(ctx, statement{sql, args}, false)
}

// Query implements [db.DBTX].
func (tx *Tx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return tx.query(ctx, statement{sql, args}, false)
}

// QueryRow implements [db.DBTX].
func (tx *Tx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := tx.query(ctx, statement{sql, args}, false) // the rows carry the error
	return row{rows}
}

// Commit ends a transaction whose last query was not known to be the last, and does nothing after [Tx.Last]. If
// there was no query at all, what was queued is sent now. A transaction in which a statement failed is not
// committed: [pgx.ErrTxCommitRollback]. Where the outcome of Last is unknown, so is Commit's.
func (tx *Tx) Commit(ctx context.Context) error {
	tx.stop()
	defer tx.mu.Unlock()
	switch {
	case tx.failed != nil && errors.As(tx.failed, new(*OutcomeError)):
		return tx.failed
	case tx.failed != nil:
		return fmt.Errorf("%w: %w", pgx.ErrTxCommitRollback, tx.failed)
	case tx.ended:
		return nil
	case tx.begun && tx.conn.PgConn().TxStatus() == 'E':
		return pgx.ErrTxCommitRollback
	}
	return tx.start(ctx, nil, true).finish(nil)
}

// stop locks mu at the end of the transaction, when nobody should be using it. Rows that were left open are
// closed; a query that another goroutine is still waiting for loses the connection.
func (tx *Tx) stop() {
	if !tx.mu.TryLock() {
		_ = tx.conn.PgConn().Conn().Close()
		tx.mu.Lock()
	}
	if tx.open != nil {
		_ = tx.open.finish(tx.open.rows.Err())
	}
}

// rollbackTimeout bounds a ROLLBACK whose context has ended. The server answers one in microseconds; when it
// does not, closing the connection has the same effect.
const rollbackTimeout = 5 * time.Second

// Rollback undoes the transaction, or all since [Join], and does nothing if it has ended or never began. It
// works also when ctx has ended, so that the connection need not be closed. A connection whose prepared statements
// were dropped, or made useless by a change of the schema, is closed.
func (tx *Tx) Rollback(ctx context.Context) {
	tx.stop()
	defer tx.mu.Unlock()
	over := tx.ended || !tx.begun || tx.conn.IsClosed() || tx.conn.PgConn().TxStatus() == 'I'
	tx.ended = true
	if over && !tx.stale {
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	var err error
	if !over {
		_, err = tx.conn.Exec(ctx, tx.rollback)
	}
	switch {
	case tx.joined && tx.stale:
		tx.prepared.forget(ctx, tx.conn)
	case !tx.joined && (tx.stale || err != nil):
		_ = tx.conn.Close(ctx)
	}
}

func (tx *Tx) exec(ctx context.Context, query statement, last bool) (pgconn.CommandTag, error) {
	if !tx.mu.TryLock() {
		return pgconn.CommandTag{}, ErrInUse
	}
	defer tx.mu.Unlock()
	return tx.start(ctx, []statement{query}, last).exec()
}

func (tx *Tx) query(ctx context.Context, query statement, last bool) (pgx.Rows, error) {
	if !tx.mu.TryLock() {
		return failed{ErrInUse}, ErrInUse
	}
	defer tx.mu.Unlock()
	return tx.start(ctx, []statement{query}, last).query() //nolint:sqlclosecheck // the rows are the caller's to close
}

// start sends what is queued and the queries, if there are any, and reads the answers that come before the
// queries' own.
func (tx *Tx) start(ctx context.Context, queries []statement, last bool) *reply {
	switch {
	case tx.ended:
		return &reply{tx: tx, done: true, err: pgx.ErrTxClosed}
	case tx.open != nil:
		return &reply{tx: tx, done: true, err: ErrInUse}
	case tx.failed != nil: // without its locks, nothing may run
		return &reply{tx: tx, done: true, err: tx.failed}
	case tx.begun && !tx.conn.IsClosed() && tx.conn.PgConn().TxStatus() == 'I': // by a COMMIT that was a query
		return &reply{tx: tx, done: true, err: pgx.ErrTxClosed}
	}
	if tx.joined && !tx.begun {
		// An empty batch sends nothing. After the end of the transaction, its connection is somebody else's.
		if err := tx.send(ctx, &pgx.Batch{}).Close(); err != nil {
			tx.failed = tx.explain(&BeforeError{err})
			return &reply{tx: tx, done: true, err: tx.failed}
		}
	}
	p := preparedOn(tx.conn)
	tx.prepared = p
	// In a transaction that is open already, this one's or one that the host left, the end of the write commits nothing.
	idle := tx.conn.PgConn().TxStatus() == 'I'
	if last && len(tx.whole) > 0 && idle && !tx.Foreign && !p.notWhole && p.covers(queries) {
		if err := p.name(ctx, tx.conn, tx.whole); err != nil {
			tx.failed = tx.explain(&BeforeError{err})
			return &reply{tx: tx, done: true, err: tx.failed}
		}
		r := &reply{tx: tx, statements: slices.Concat(tx.whole, queries), last: true, whole: true}
		err := r.send(ctx, len(tx.whole))
		if !isNotWhole(err) {
			return r.began(err)
		}
		p.notWhole = true
		r.abandon(err)
	}
	if otherwise := tx.Otherwise; otherwise != nil {
		tx.Otherwise = nil
		if err := otherwise(); err != nil {
			tx.failed = tx.explain(err)
			return &reply{tx: tx, done: true, err: tx.failed}
		}
	}

	statements := tx.statements(queries, last)
	if tx.before != nil && !p.covers(statements) {
		if err := tx.beginAhead(ctx, queries, last); err != nil {
			tx.failed = tx.explain(err)
			return &reply{tx: tx, done: true, err: tx.failed}
		}
		statements = tx.statements(queries, last)
	}
	r := &reply{tx: tx, statements: statements, last: last}
	err := r.send(ctx, len(tx.before))
	tx.before = nil
	return r.began(err)
}

// sendBounded sends a batch, which returns once pgx has prepared what it thinks is new, and bounds that where the
// server does not yet.
func (tx *Tx) sendBounded(ctx context.Context, statements []statement) (pgx.BatchResults, context.CancelFunc) {
	if tx.begun || tx.PrepareBy.IsZero() || tx.prepared.isNamed(statements) {
		return tx.send(ctx, queued(statements)), func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	timer := time.AfterFunc(time.Until(tx.PrepareBy), cancel)
	defer timer.Stop()
	return tx.send(ctx, queued(statements)), cancel
}

// readBefore reads the answers to n of the statements that were queued before the query.
func (tx *Tx) readBefore(results pgx.BatchResults, n int) error {
	for range n {
		if _, err := results.Exec(); err != nil {
			return err
		}
		tx.begun = true
	}
	return nil
}

// statements are those that are queued, together with the queries.
func (tx *Tx) statements(queries []statement, last bool) []statement {
	if !last {
		return slices.Concat(tx.before, queries)
	}
	return slices.Concat(tx.before, queries, tx.after, []statement{{sql: tx.commit}})
}

// beginAhead begins the transaction, and sends what is queued before the query but the last of it, which is what
// takes the locks: they are still not held across the network. Then it prepares the rest.
func (tx *Tx) beginAhead(ctx context.Context, queries []statement, last bool) error {
	p := tx.prepared
	for !tx.begun || len(tx.before) > 1 {
		ahead := tx.before[:1]
		if tx.begun || !tx.joined {
			ahead = tx.before[:max(1, len(tx.before)-1)]
		}
		if err := p.name(ctx, tx.conn, ahead); err != nil {
			return &BeforeError{err}
		}
		results := tx.send(ctx, queued(ahead))
		err := tx.readBefore(results, len(ahead))
		if closeErr := results.Close(); err == nil {
			err = closeErr
		}
		p.ran(ahead, err)
		if err != nil {
			tx.stale = isStale(err)
			return &BeforeError{err}
		}
		tx.before = tx.before[len(ahead):]
	}
	if tx.Foreign {
		queries = nil
	}
	if err := p.name(ctx, tx.conn, slices.Concat(tx.whole, tx.statements(queries, last))); err != nil || tx.Ahead == nil {
		return err
	}
	lock := tx.before
	for prepared := false; ; prepared = true {
		tx.before = nil
		if err := tx.Ahead(); err != nil {
			return err
		}
		if prepared || p.isNamed(tx.before) {
			tx.before = append(tx.before, lock...)
			return nil
		}
		// To prepare it takes time too, so what it says is asked for again.
		if err := p.name(ctx, tx.conn, tx.before); err != nil {
			return err
		}
	}
}

func queued(statements []statement) *pgx.Batch {
	batch := &pgx.Batch{}
	for _, s := range statements {
		batch.Queue(s.sql, s.args...)
	}
	return batch
}

func (tx *Tx) explain(err error) error {
	if err == nil || tx.Explain == nil {
		return err
	}
	return tx.Explain(err)
}

type last struct{ tx *Tx }

func (l last) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	return l.tx.exec(ctx, statement{sql, args}, true)
}

func (l last) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	return l.tx.query(ctx, statement{sql, args}, true)
}

func (l last) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := l.tx.query(ctx, statement{sql, args}, true) // the rows carry the error
	return row{rows}
}

type queue struct{ statements *[]statement }

// errNotExec tells a developer of this module what can be queued.
var errNotExec = errors.New("pipeline: only a statement without a result can be queued")

func (q queue) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	*q.statements = append(*q.statements, statement{sql, args})
	return pgconn.CommandTag{}, nil
}

func (q queue) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return failed{errNotExec}, errNotExec
}

func (q queue) QueryRow(context.Context, string, ...any) pgx.Row { return row{failed{errNotExec}} }
