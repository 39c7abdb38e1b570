package pipeline

import (
	"github.com/jackc/pgx/v5"
)

// prepared is what is known of the statements that pgx has prepared or described on a connection.
//
// pgx does that for all new statements of a batch before it sends the batch, so before BEGIN and before any
// timeout is set. A statement waits then, as it does when it runs, for whoever is changing its table; and one that
// cannot be prepared would abort the transaction that was to be joined, with no savepoint to go back to. So a batch
// with a new statement begins its transaction on its own.
type prepared struct {
	unneeded bool // the exec mode sends statements as they are
	repeated bool // the exec mode describes them each time
	known    map[string]bool
}

// maxKnown is the size of pgx's own cache; beyond it, what is known may have been forgotten there.
const maxKnown = 512

// preparedOn returns what is known of conn's statements. It is kept in the connection.
func preparedOn(conn *pgx.Conn) *prepared {
	data := conn.PgConn().CustomData()
	if p, ok := data["latchkey"].(*prepared); ok {
		return p
	}
	p := &prepared{known: make(map[string]bool)}
	switch conn.Config().DefaultQueryExecMode {
	case pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol:
		p.unneeded = true
	case pgx.QueryExecModeDescribeExec:
		p.repeated = true
	default: // the two modes with a cache
	}
	data["latchkey"] = p
	return p
}

// covers tells whether pgx will send the batch as it is.
func (p *prepared) covers(batch *pgx.Batch) bool {
	if p.unneeded || p.repeated {
		return p.unneeded
	}
	for _, q := range batch.QueuedQueries {
		if !p.known[q.SQL] {
			return false
		}
	}
	return true
}

// ran notes how a batch went. After an error pgx prepares its statements anew.
func (p *prepared) ran(batch *pgx.Batch, err error) {
	if p.unneeded || p.repeated {
		return
	}
	if err != nil || len(p.known) > maxKnown {
		clear(p.known)
		return
	}
	for _, q := range batch.QueuedQueries {
		p.known[q.SQL] = true
	}
}
