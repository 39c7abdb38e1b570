package pipeline

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// reply reads what the server answers to one network write: to the query, and if that was the last, to the
// statements after it and to COMMIT.
type reply struct {
	tx      *Tx
	results pgx.BatchResults
	last    bool
	done    bool
	err     error
}

func (r *reply) exec() (pgconn.CommandTag, error) {
	tag, err := r.results.Exec()
	return tag, r.finish(err)
}

func (r *reply) query() (pgx.Rows, error) {
	answer, err := r.results.Query()
	if err != nil {
		err = r.finish(err)
	}
	return &rows{answer, r}, err
}

func (r *reply) queryRow() pgx.Row {
	answer, _ := r.query() // the rows carry the error
	return row{answer}
}

// finish is called with the query's own error once its answer has been read, and returns the error of all.
func (r *reply) finish(err error) error {
	if r.done {
		return r.err
	}
	r.done = true
	committed := false
	if r.last && err == nil {
		err = r.finishLast()
		committed = err == nil
	}
	if closeErr := r.results.Close(); err == nil && !committed {
		err = closeErr
	}
	r.tx.ended = committed
	if err != nil && r.last && !r.tx.joined && r.tx.conn.IsClosed() && !pgconn.SafeToRetry(err) {
		// Also when the error names an earlier statement: the server may have gone on without us.
		err = &OutcomeError{err}
	}
	r.err = err
	return err
}

func (r *reply) finishLast() error {
	for range r.tx.after {
		if _, err := r.results.Exec(); err != nil {
			return err
		}
	}
	tag, err := r.results.Exec()
	if err == nil && tag.String() == "ROLLBACK" { // a failed transaction answers COMMIT so
		return pgx.ErrTxCommitRollback
	}
	return err
}

// rows are a query's rows; when the last has been read or they are closed, so is the reply.
type rows struct {
	pgx.Rows
	reply *reply
}

func (r *rows) Next() bool {
	if r.Rows.Next() {
		return true
	}
	_ = r.reply.finish(r.Rows.Err()) // Err returns it
	return false
}

func (r *rows) Close() {
	r.Rows.Close()
	_ = r.reply.finish(r.Rows.Err()) // Err returns it
}

func (r *rows) Err() error {
	if r.reply.done {
		return r.reply.err
	}
	return r.Rows.Err()
}

// row is the first of some rows, read as pgx reads one.
type row struct{ rows pgx.Rows }

func (r row) Scan(dest ...any) error {
	defer r.rows.Close()
	if !r.rows.Next() {
		if err := r.rows.Err(); err != nil {
			return err
		}
		return pgx.ErrNoRows
	}
	if err := r.rows.Scan(dest...); err != nil {
		return err
	}
	r.rows.Close()
	return r.rows.Err()
}
