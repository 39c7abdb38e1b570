package pipeline

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// reply reads what the server answers to one network write: to the query, and if that was the last, to the
// statements after it and to COMMIT. Its Tx is locked by whoever calls it.
type reply struct {
	tx         *Tx
	statements []statement     // that were sent
	ctx        context.Context // that they were sent with
	results    pgx.BatchResults
	cancel     context.CancelFunc
	rows       pgx.Rows // of the query, if it has any
	last       bool
	whole      bool // without BEGIN and COMMIT
	ran        bool // the query did, as far as the server is concerned
	done       bool
	err        error
}

// send sends the statements, and reads the answers to the first n, which were queued before the query.
func (r *reply) send(ctx context.Context, n int) error {
	r.ctx = ctx
	r.results, r.cancel = r.tx.sendBounded(ctx, r.statements)
	r.tx.open = r
	return r.tx.readBefore(r.results, n)
}

// began notes what send returned.
func (r *reply) began(err error) *reply {
	if err != nil {
		_ = r.finish(&BeforeError{err}) // the query returns it
	}
	return r
}

// abandon gives up a write that changed nothing, because of what send returned.
func (r *reply) abandon(err error) {
	_ = r.results.Close()
	r.cancel()
	r.tx.prepared.ran(r.statements, err)
	r.tx.open = nil
}

func (r *reply) exec() (pgconn.CommandTag, error) {
	if r.done {
		return pgconn.CommandTag{}, r.err
	}
	tag, err := r.results.Exec()
	r.ran = err == nil
	return tag, r.finish(err)
}

func (r *reply) query() (pgx.Rows, error) {
	if r.done {
		return failed{r.err}, r.err
	}
	var err error
	r.rows, err = r.results.Query()
	r.ran = err == nil
	if err != nil {
		err = r.finish(err)
	}
	return &rows{scanned{r.rows}, r}, err
}

// finish is called with the query's own error once its answer has been read, and returns the error of all.
func (r *reply) finish(err error) error {
	if r.done {
		return r.err
	}
	r.done = true
	defer r.cancel()
	if r.rows != nil {
		r.rows.Close()
	}
	committed := false
	if r.last && err == nil {
		err = r.finishLast()
		committed = err == nil
	}
	if closeErr := r.results.Close(); err == nil && !committed {
		err = closeErr
	}
	r.tx.prepared.ran(r.statements, err)
	if committed && !r.tx.joined && r.ctx.Err() != nil {
		// pgx may have asked the server to stop. A commit that waits for a standby then is said to be done without it, and
		// is lost if the server is.
		err = &OutcomeError{r.ctx.Err()}
	}
	if err != nil {
		err = r.fail(err)
	}
	r.tx.open = nil
	// Also after an error of this side's own, such as one of Scan: the server ran all that was sent.
	r.tx.ended = committed || r.last && r.ran && !r.tx.conn.IsClosed() && r.tx.conn.PgConn().TxStatus() != 'E'
	r.err = err
	return err
}

// fail returns what the error is to the caller, and notes whether the transaction can go on.
func (r *reply) fail(err error) error {
	r.tx.stale = r.tx.stale || isStale(err)
	var pgErr *pgconn.PgError
	errors.As(err, &pgErr)
	// Also when the error names an earlier statement: the server may have gone on without us.
	if r.last && !r.tx.joined && r.tx.conn.IsClosed() && !r.uncommitted(err) {
		err = &OutcomeError{err}
	}
	fatal := errors.As(err, new(*BeforeError)) || errors.As(err, new(*OutcomeError)) ||
		!r.ran && pgErr == nil || // it was not sent, which the server does not know
		r.last && (pgErr != nil || r.tx.conn.IsClosed())
	err = r.tx.explain(err)
	if fatal {
		r.tx.failed = err
	}
	return err
}

// uncommitted tells whether err, which ended the connection, proves that COMMIT was not run: it was not sent, or the
// server ended the session at a point where it looks for that, and the answers before this one do not have COMMIT's.
// A commit at the end of a write has no answer of its own before the write's, so there the query's must be missing.
// A pooler's errors do not say where in PostgreSQL they come from, and prove nothing.
func (r *reply) uncommitted(err error) bool {
	var pgErr *pgconn.PgError
	return pgconn.SafeToRetry(err) ||
		errors.As(err, new(pgx.ErrPreprocessingBatch)) ||
		errors.As(err, &pgErr) && pgErr.Routine == "ProcessInterrupts" && (!r.whole || !r.answered())
}

// answered tells whether the query's answer came to its end. That it has rows is told before it has run.
func (r *reply) answered() bool {
	return r.ran && (r.rows == nil || r.rows.CommandTag() != pgconn.CommandTag{})
}

// finishLast reads the answers that follow the last query's, up to that of the commit.
func (r *reply) finishLast() error {
	if r.whole {
		return r.results.Close()
	}
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
	scanned
	reply *reply
}

func (r *rows) Next() bool {
	r.reply.tx.mu.Lock()
	defer r.reply.tx.mu.Unlock()
	if !r.reply.done && r.Rows.Next() {
		return true
	}
	_ = r.reply.finish(r.Rows.Err()) // Err returns it
	return false
}

func (r *rows) Close() {
	r.reply.tx.mu.Lock()
	defer r.reply.tx.mu.Unlock()
	r.Rows.Close()
	_ = r.reply.finish(r.Rows.Err()) // Err returns it
}

func (r *rows) Err() error {
	r.reply.tx.mu.Lock()
	defer r.reply.tx.mu.Unlock()
	if r.reply.done {
		return r.reply.err
	}
	return r.Rows.Err()
}

// scanned are rows whose Scan does what that of pgx does, except that an error of its own does not end the rows: that
// would hide what the server still has to say, to the query or to COMMIT.
type scanned struct{ pgx.Rows }

func (r scanned) Scan(dest ...any) error {
	if len(dest) == 1 {
		if scanner, ok := dest[0].(pgx.RowScanner); ok {
			return scanner.ScanRow(r)
		}
	}
	return pgx.ScanRow(r.TypeMap(), r.FieldDescriptions(), r.RawValues(), dest...)
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
	err := r.rows.Scan(dest...)
	r.rows.Close()
	if serverErr := r.rows.Err(); serverErr != nil {
		return serverErr
	}
	return err
}

// failed are the rows of a query that was not sent.
type failed struct{ err error }

func (f failed) Close()                                       {}
func (f failed) Err() error                                   { return f.err }
func (f failed) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (f failed) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (f failed) Next() bool                                   { return false }
func (f failed) Scan(...any) error                            { return f.err }
func (f failed) Values() ([]any, error)                       { return nil, f.err }
func (f failed) RawValues() [][]byte                          { return nil }
func (f failed) Conn() *pgx.Conn                              { return nil }
func (f failed) TypeMap() *pgtype.Map                         { return nil }
