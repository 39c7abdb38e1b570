package pipeline

import (
	"context"
	"errors"
	"slices"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// prepared is what is known of the statements that are prepared or described on a connection.
//
// pgx does that for all new statements of a batch before it sends the batch, so before BEGIN and before any
// timeout is set. A statement waits then, as it does when it runs, for whoever is changing its table; and one that
// cannot be prepared would abort the transaction that was to be joined, with no savepoint to go back to. So where
// there is a new statement, the transaction is begun ahead of it.
type prepared struct {
	mode pgx.QueryExecMode

	// pgx forgets each statement of a batch that failed, although nothing is wrong with it: a try that found the
	// lock held would make the next call prepare all of them anew. So in the mode that prepares, latchkey's own
	// are prepared by name, for as long as the connection lives.
	named map[string]bool

	// cached are in pgx's cache.
	cached map[string]bool

	// notWhole says that the session's defaults are not those of a transaction without BEGIN.
	notWhole bool
}

// maxCached is the size of pgx's own cache; beyond it, what is here may have been forgotten there.
const maxCached = 512

// preparedOn returns what is known of conn's statements. It is kept in the connection.
func preparedOn(conn *pgx.Conn) *prepared {
	data := conn.PgConn().CustomData()
	if p, ok := data["latchkey"].(*prepared); ok {
		return p
	}
	p := &prepared{
		mode:   conn.Config().DefaultQueryExecMode,
		named:  make(map[string]bool),
		cached: make(map[string]bool),
	}
	data["latchkey"] = p
	return p
}

// covers tells whether pgx will send the statements as they are.
func (p *prepared) covers(statements []statement) bool {
	switch p.mode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
		return true
	case pgx.QueryExecModeDescribeExec:
		return false
	default: // the two modes with a cache
	}
	for _, s := range statements {
		if !p.named[s.sql] && !p.cached[s.sql] {
			return false
		}
	}
	return true
}

// isNamed tells whether pgx can have forgotten none of the statements.
func (p *prepared) isNamed(statements []statement) bool {
	if p.mode == pgx.QueryExecModeExec || p.mode == pgx.QueryExecModeSimpleProtocol {
		return true
	}
	return !slices.ContainsFunc(statements, func(s statement) bool { return !p.named[s.sql] })
}

// name prepares the statements by name, if the mode is the one that prepares.
func (p *prepared) name(ctx context.Context, conn *pgx.Conn, statements []statement) error {
	if p.mode != pgx.QueryExecModeCacheStatement {
		return nil
	}
	for _, s := range statements {
		if p.named[s.sql] {
			continue
		}
		if _, err := conn.Prepare(ctx, s.sql, s.sql); err != nil { // pgx shortens the name
			return err
		}
		p.named[s.sql] = true
	}
	return nil
}

// ran notes how a batch of the statements went.
func (p *prepared) ran(statements []statement, err error) {
	if err != nil || len(p.cached) > maxCached {
		clear(p.cached)
		return
	}
	for _, s := range statements {
		if !p.named[s.sql] {
			p.cached[s.sql] = true
		}
	}
}

// forget drops the statements that were prepared by name.
func (p *prepared) forget(ctx context.Context, conn *pgx.Conn) {
	for sql := range p.named {
		_ = conn.Deallocate(ctx, sql) // pgx forgets it also where the server has done so already
	}
	clear(p.named)
}

// isNotWhole tells whether err is what a statement queued with [Tx.Whole] says of a session's defaults.
func isNotWhole(err error) bool {
	if err == nil {
		return false // nearly always, so nothing is allocated
	}
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && pgErr.Code == "25000"
}

// isStale tells whether err says that a prepared statement is gone, or returns other types than when it was
// prepared.
func isStale(err error) bool {
	var pgErr *pgconn.PgError
	return errors.As(err, &pgErr) && (pgErr.Code == "26000" || pgErr.Routine == "RevalidateCachedQuery")
}
