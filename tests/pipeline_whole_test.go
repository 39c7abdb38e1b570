package tests

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// whole returns a transaction that takes p's lock, and needs no BEGIN if it goes to the server in one write.
func (p *pipe) whole(t *testing.T, conn *pgx.Conn) *pipeline.Tx {
	t.Helper()
	tx := pipeline.Begin(conn)
	key, asked := p.key, false
	tx.Otherwise = func() error {
		require.False(t, asked)
		asked = true
		require.NoError(t, db.New(tx.Before()).TxSetLockBudget(t.Context(), lockBudget(patience)))
		return db.New(tx.Before()).LockOne(t.Context(), key)
	}
	require.NoError(t, db.New(tx.Whole()).LockOneAtOnce(t.Context(),
		db.LockOneAtOnceParams{LockTimeoutMs: patience.Milliseconds(), Key: p.key}))
	return tx
}

// warm makes the connection's first calls, for which it prepares the statements.
func (p *pipe) warm(t *testing.T, conn *pgx.Conn, statements ...string) {
	t.Helper()
	for range 2 {
		for i, sql := range statements {
			tx := p.whole(t, conn)
			_, _ = tx.Last().Exec(t.Context(), sql, 1000+i) // some are to fail
			tx.Rollback(t.Context())
		}
		p.clear(t)
	}
}

// names returns the first words of the statements that were sent.
func names(traffic wire.Traffic) (names []string) {
	for _, sql := range traffic.Statements {
		name, _, _ := strings.Cut(strings.TrimPrefix(sql, "-- name: "), " ")
		names = append(names, name)
	}
	return names
}

func TestPipelineWhole(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.warm(t, conn.Conn(), addNote)
		want := []string{"LockOneAtOnce", "INSERT"}
		switch conn.Conn().Config().DefaultQueryExecMode {
		case pgx.QueryExecModeSimpleProtocol:
			want = []string{"LockOneAtOnce"} // and all the rest in one text
		case pgx.QueryExecModeDescribeExec:
			want = []string{"begin", "TxSetLockBudget", "LockOne", "INSERT", "commit"}
		default:
		}
		for i, way := range ways {
			p.proxy.Reset()
			tx := p.whole(t, conn.Conn())
			require.NoError(t, way.make(t.Context(), tx.Last(), addNote, i+1))
			require.NoError(t, tx.Commit(t.Context()), "which does nothing")
			require.Equal(t, want, names(p.proxy.Traffic()))
		}
		p.requireNotes(t, 1, 2, 3)

		p.proxy.Reset()
		errs, err := p.whole(t, conn.Conn()).LastTogether(t.Context(), notes(4, 6))
		requireNoErrors(t, errs, err)
		require.Equal(t, want[0], names(p.proxy.Traffic())[0])
		p.requireNotes(t, 1, 2, 3, 4, 5, 6)
		require.Empty(t, testdb.Holders(t, p.other, p.key))

		p.proxy.Reset()
		tx := p.whole(t, conn.Conn())
		_, err = tx.Exec(t.Context(), addNote, 7)
		require.NoError(t, err)
		require.Equal(t, "begin", names(p.proxy.Traffic())[0], "the query was not the last")
		require.Len(t, testdb.Holders(t, p.other, p.key), 1)
		require.NoError(t, tx.Commit(t.Context()))

		p.proxy.Reset()
		tx = p.whole(t, conn.Conn())
		tx.Foreign = true
		_, err = tx.Last().Exec(t.Context(), addNote, 8)
		require.NoError(t, err)
		require.Equal(t, "begin", names(p.proxy.Traffic())[0], "what a foreign statement does is not known")
		p.requireKept(t, conn)
	})
}

// Without what stands for a whole write, nothing may be sent.
func TestPipelineWholeWithNothingOtherwise(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.warm(t, conn.Conn(), addNote)
		late := errors.New("too late")
		p.proxy.Reset()
		tx := p.whole(t, conn.Conn())
		tx.Otherwise = func() error { return late }
		tx.Explain = func(err error) error { return fmt.Errorf("explained: %w", err) }
		_, err := tx.Exec(t.Context(), addNote, 1)
		require.ErrorIs(t, err, late)
		require.ErrorContains(t, err, "explained: ")
		_, err = tx.Last().Exec(t.Context(), addNote, 2)
		require.ErrorIs(t, err, late)
		require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
		tx.Rollback(t.Context())
		require.Zero(t, p.proxy.Traffic().RoundTrips)
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

// The lock comes first: the statement after it sees what the last holder committed.
func TestPipelineWholeSeesWhatTheLastHolderCommitted(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		const addNext = "INSERT INTO notes (n) SELECT $1::integer * 0 + 1 + max(n) FROM notes RETURNING n"
		conn := p.acquire(t)
		p.warm(t, conn.Conn(), addNext)
		holder := hold(t, p.url, p.key)
		done := background(t, func() error {
			_, err := p.whole(t, conn.Conn()).Last().Exec(t.Context(), addNext, 0)
			return err
		})
		testdb.WaitForWaiter(t, p.other, p.key, 1)
		_, err := holder.Exec(t.Context(), addNote, 1)
		require.NoError(t, err)
		require.NoError(t, holder.Commit(t.Context()))
		require.NoError(t, done())
		p.requireNotes(t, 1, 2)
	})
}

func TestPipelineWholeIsRefusedWhereTheSessionHasOtherDefaults(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	settings := map[string]string{
		"default_transaction_isolation": "repeatable read",
		"statement_timeout":             foreignTimeout,
	}
	if _, known := settingsOf(t, testdb.Conn(t, url))["transaction_timeout"]; known { // from PostgreSQL 17 on
		settings["transaction_timeout"] = foreignTimeout
	}
	for setting, value := range settings {
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			for _, mode := range execModes {
				t.Run(setting+" "+mode.String(), func(t *testing.T) {
					p := setupPipe(t, url, withExecMode(mode), withSettings(map[string]string{setting: value}))
					conn := p.acquire(t)
					_, err := p.whole(t, conn.Conn()).Last().Exec(t.Context(), addNote, 1)
					require.NoError(t, err)
					_, err = p.whole(t, conn.Conn()).Last().Exec(t.Context(), addNote, 2) // may ask
					require.NoError(t, err)
					p.proxy.Reset()
					_, err = p.whole(t, conn.Conn()).Last().Exec(t.Context(), addNote, 3)
					require.NoError(t, err)
					require.NotContains(t, strings.Join(p.proxy.Traffic().Statements, "\n"), "LockOneAtOnce", "it was told")
					p.requireNotes(t, 1, 2, 3)
					p.requireKept(t, conn)
				})
			}
		})
	}
}

func TestPipelineWholeOutcomeIsUnknownWhenTheConnectionBreaks(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		if p.pool.Config().ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeDescribeExec {
			return // it has BEGIN and COMMIT
		}
		ctx := t.Context()
		for _, cut := range wholeCuts {
			for _, way := range ways {
				conn := p.acquire(t)
				p.warm(t, conn.Conn(), addNote)
				pid := conn.Conn().PgConn().PID()
				p.proxy.On(once(cut.at, cut.action))
				tx := p.whole(t, conn.Conn())
				requireOutcomeError(t, way.make(ctx, tx.Last(), addNote, 1))
				tx.Rollback(ctx)
				p.requireReplaced(t, conn)
				waitUntilGone(t, p.other, pid)
				if cut.written {
					p.requireNotes(t, 1)
				} else {
					p.requireNotes(t)
				}
				p.clear(t)
			}
		}
	})
}

func TestPipelineWholeWritesNothingAndKeepsTheConnectionWhenAStatementFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		const taken = "INSERT INTO notes (n) SELECT 0 * $1::integer RETURNING n" // 23505
		conn := p.acquire(t)
		p.warm(t, conn.Conn(), addNote, addOrphan, taken)
		fail := func(q db.DBTX, sql, state string, way int) {
			requireSQLState(t, state, ways[way].make(t.Context(), q, sql, 1))
		}
		for way := range ways {
			for sql, state := range map[string]string{taken: "23505", addOrphan: "23503"} { // the second at the commit
				tx := p.whole(t, conn.Conn())
				fail(tx.Last(), sql, state, way)
				require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback)
				tx.Rollback(t.Context())
			}
			tx := p.whole(t, conn.Conn())
			_, err := tx.LastTogether(t.Context(), append(notes(1, 3), func(ctx context.Context, q db.DBTX) error {
				_, err := q.Exec(ctx, addOrphan, 4)
				return err
			}))
			requireSQLState(t, "23503", err)
			requireNoOutcomeError(t, err)
			tx.Rollback(t.Context())
		}
		p.requireNotes(t)
		require.Empty(t, testdb.Holders(t, p.other, p.key))
		p.requireKept(t, conn)
	})
}

// That the session was ended before the last statement was done proves that nothing was committed. After that, nothing
// says it: the commit has no answer of its own. In the simple protocol it comes before the statement's.
func TestPipelineWholeSaysWhetherTheOutcomeIsUnknownWhenTheServerEndsItsSession(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		p.waitAtCommit(t)
		separate := true
		switch p.pool.Config().ConnConfig.DefaultQueryExecMode {
		case pgx.QueryExecModeSimpleProtocol, pgx.QueryExecModeDescribeExec: // which has COMMIT
			separate = false
		default:
		}
		for _, way := range ways {
			for sql, atCommit := range map[string]bool{addNote: false, addSlow: true} {
				conn := p.acquire(t)
				p.warm(t, conn.Conn(), addNote, addSlow)
				holdKey := p.key
				if atCommit {
					p.key-- // the call has its lock, and waits for the holder's in the trigger
				}
				holder := hold(t, p.url, holdKey)
				pid := conn.Conn().PgConn().PID()
				tx := p.whole(t, conn.Conn())
				p.key = holdKey
				failed := background(t, func() error { return way.make(t.Context(), tx.Last(), sql, 1) })
				require.Equal(t, []uint32{pid}, testdb.WaitForWaiter(t, p.other, p.key, 1))
				p.terminate(t, pid)
				err := failed()
				requireSQLState(t, "57P01", err)
				if atCommit && separate {
					requireOutcomeError(t, err)
				} else {
					requireNoOutcomeError(t, err)
				}
				tx.Rollback(t.Context())
				require.NoError(t, holder.Rollback(t.Context()))
				p.requireReplaced(t, conn)
				p.requireNotes(t)
			}
		}
	})
}

func (p *pipe) terminate(t *testing.T, pid uint32) {
	t.Helper()
	_, err := p.other.Exec(t.Context(), "SELECT pg_catalog.pg_terminate_backend($1)", int64(pid))
	require.NoError(t, err)
}

// The end of a write commits nothing where a transaction is open already.
func TestPipelineWholeIsNotUsedInAnOpenTransaction(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.warm(t, conn.Conn(), addNote)
		for i, way := range ways {
			_, err := conn.Exec(t.Context(), "BEGIN") // a host's hook
			require.NoError(t, err)
			require.NoError(t, way.make(t.Context(), p.whole(t, conn.Conn()).Last(), addNote, 10*i+1))

			tx := p.whole(t, conn.Conn())
			require.NoError(t, way.make(t.Context(), tx, addNote, 10*i+2))
			require.NoError(t, way.make(t.Context(), tx.Last(), addNote, 10*i+3))

			tx = p.whole(t, conn.Conn())
			require.NoError(t, way.make(t.Context(), tx, addNote, 10*i+4))
			require.NoError(t, tx.Commit(t.Context()))
		}
		p.requireNotes(t, 1, 2, 3, 4, 11, 12, 13, 14, 21, 22, 23, 24)
		require.Empty(t, testdb.Holders(t, p.other, p.key))
		p.requireKept(t, conn)
	})
}

// Where pgx asks what the rows look like, the answer to that comes before the statement has run.
func TestPipelineWholeWasNotCommittedWhereTheServerEndsItsSessionInTheStatement(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for _, way := range ways {
			conn := p.acquire(t)
			p.warm(t, conn.Conn(), addNote)
			pid := conn.Conn().PgConn().PID()
			writer, err := testdb.Conn(t, p.url).Begin(t.Context())
			require.NoError(t, err)
			_, err = writer.Exec(t.Context(), addNote, 1)
			require.NoError(t, err)
			tx := p.whole(t, conn.Conn())
			failed := background(t, func() error { return way.make(t.Context(), tx.Last(), addNote, 1) })
			testdb.WaitForLockWait(t, p.other, pid)
			p.terminate(t, pid)
			err = failed()
			requireSQLState(t, "57P01", err)
			requireNoOutcomeError(t, err)
			tx.Rollback(t.Context())
			require.NoError(t, writer.Rollback(t.Context()))
			p.requireReplaced(t, conn)
			p.requireNotes(t)
		}
	})
}
