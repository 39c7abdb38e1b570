package pipeline

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
)

// Query runs one statement, by a method of a sqlc package, on the [db.DBTX] that it is given. It keeps the result
// to itself.
type Query func(context.Context, db.DBTX) error

// ErrNotOne is returned by [Tx.LastTogether], and nothing was sent, for a query that does not run exactly one statement.
// One that wants a second only when it has the answer to its first gets it from that second: the first was run.
var ErrNotOne = errors.New("a query that runs together with others must run exactly one statement")

// LastTogether runs queries as the last of the transaction: one after the other, in one network write that ends with
// COMMIT. It calls each twice: first to learn its statement, then to read the answer.
//
// The error is that of the transaction. Without one, the transaction is committed, and errs has for each query what it
// returned itself, which the server knows nothing of: [pgx.ErrNoRows], or an error of Scan.
func (tx *Tx) LastTogether(ctx context.Context, queries []Query) (errs []error, err error) {
	if !tx.mu.TryLock() {
		return nil, ErrInUse
	}
	defer tx.mu.Unlock()
	sent := make(recorder, 0, len(queries))
	for i, query := range queries {
		_ = query(ctx, &sent) // fails, since it gets no answer
		if len(sent) != i+1 {
			return nil, ErrNotOne
		}
	}
	r := tx.start(ctx, sent, true)
	var a *answer
	defer func() { r.leave(a) }()
	errs = make([]error, len(queries))
	for i, query := range queries {
		if r.done {
			return nil, r.err
		}
		a = &answer{results: r.results}
		errs[i] = query(ctx, a)
		if err := a.close(); err != nil {
			return nil, r.finish(err)
		}
	}
	r.ran = true
	return errs, r.finish(nil)
}

var errLeft = errors.New("pipeline: a query did not return")

// leave reads what a query that panicked, or ended its goroutine, has left unread: the server ran all that was sent.
func (r *reply) leave(a *answer) {
	if r.done {
		return
	}
	err := a.close()
	if closeErr := r.results.Close(); err == nil {
		err = closeErr
	}
	if err == nil {
		r.ran = true
		err = errLeft
	}
	_ = r.finish(err) // Commit and Rollback know
}

// recorder is a [db.DBTX] that only notes what it is asked to run.
type recorder []statement

var errRecorded = errors.New("pipeline: the statement has not been sent yet")

func (r *recorder) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	*r = append(*r, statement{sql, args})
	return pgconn.CommandTag{}, errRecorded
}

func (r *recorder) Query(_ context.Context, sql string, args ...any) (pgx.Rows, error) {
	*r = append(*r, statement{sql, args})
	return failed{errRecorded}, errRecorded
}

func (r *recorder) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	*r = append(*r, statement{sql, args})
	return row{failed{errRecorded}}
}

// answer is a [db.DBTX] that gives the answer to one statement that was sent before.
type answer struct {
	results pgx.BatchResults
	rows    pgx.Rows
	read    bool
	err     error
}

func (a *answer) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	if a.read {
		return pgconn.CommandTag{}, ErrNotOne
	}
	a.read = true
	var tag pgconn.CommandTag
	tag, a.err = a.results.Exec()
	return tag, a.err
}

func (a *answer) Query(context.Context, string, ...any) (pgx.Rows, error) {
	if a.read {
		return failed{ErrNotOne}, ErrNotOne
	}
	a.read = true
	a.rows, a.err = a.results.Query()
	return scanned{a.rows}, a.err
}

func (a *answer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := a.Query(ctx, sql, args...) // the rows carry the error
	return row{rows}
}

// close reads what the query has left, and returns the error of the server or the connection.
func (a *answer) close() error {
	if !a.read {
		_, a.err = a.results.Exec()
	}
	if a.rows != nil {
		a.rows.Close()
		a.err = a.rows.Err()
	}
	return a.err
}
