package tests

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// one is a query of one statement, whose answer is not looked at.
func one(sql string, args ...any) pipeline.Query {
	return func(ctx context.Context, q db.DBTX) error {
		_, err := q.Exec(ctx, sql, args...)
		return err
	}
}

// notes are queries that add the notes from the first to the last, in all ways in turn.
func notes(first, last int) []pipeline.Query {
	var queries []pipeline.Query
	for n := first; n <= last; n++ {
		queries = append(queries, func(ctx context.Context, q db.DBTX) error {
			return ways[n%len(ways)].make(ctx, q, addNote, n)
		})
	}
	return queries
}

// runTogether runs the queries in a transaction behind a lock, and gives the connection back.
func (p *pipe) runTogether(t *testing.T, ctx context.Context, queries ...pipeline.Query) ([]error, error) {
	t.Helper()
	conn := p.acquire(t)
	defer conn.Release()
	tx := pipeline.Begin(conn.Conn())
	defer tx.Rollback(ctx)
	queue(t, tx.Before(), takeLock, p.key)
	return tx.LastTogether(ctx, queries)
}

func (p *pipe) mode() pgx.QueryExecMode { return p.pool.Config().ConnConfig.DefaultQueryExecMode }

func requireNoErrors(t *testing.T, errs []error, err error) {
	t.Helper()
	require.NoError(t, err)
	for i, err := range errs {
		require.NoError(t, err, "query %d", i)
	}
}

// longest bounds what would otherwise hang; it is far more than a busy machine needs.
const longest = 2 * time.Minute

const manyRows = "SELECT g.n::integer FROM generate_series(1, $1::integer) AS g (n)"

var errOfItsOwn = errors.New("an error of the query's own")

func TestPipelineTogetherGivesEachQueryItsOwnAnswer(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for range 2 { // cold, then warm
			conn := p.acquire(t)
			tx := pipeline.Begin(conn.Conn())
			queue(t, tx.Before(), takeLock, p.key)
			queue(t, tx.Before(), addNote, 10)
			queue(t, tx.After(), addNote, 11)
			var affected int64
			var all, before []int
			var row, first int
			errs, err := tx.LastTogether(t.Context(), []pipeline.Query{
				func(ctx context.Context, q db.DBTX) error {
					tag, err := q.Exec(ctx, "INSERT INTO notes (n) VALUES ($1), ($2)", 1, 2)
					affected = tag.RowsAffected()
					return err
				},
				func(ctx context.Context, q db.DBTX) error {
					rows, _ := q.Query(ctx, manyRows, 1000) // the rows carry the error
					var err error
					all, err = pgx.CollectRows(rows, pgx.RowTo[int])
					return err
				},
				func(ctx context.Context, q db.DBTX) error { // leaves its rows open
					rows, err := q.Query(ctx, manyRows, 1000)
					if err == nil && rows.Next() {
						err = rows.Scan(&first)
					}
					return err
				},
				func(ctx context.Context, q db.DBTX) error {
					rows, err := q.Query(ctx, manyRows, 1000)
					if err == nil {
						rows.Close()
						err = rows.Err()
					}
					return err
				},
				func(ctx context.Context, q db.DBTX) error { return q.QueryRow(ctx, addNote, 3).Scan(&row) },
				func(ctx context.Context, q db.DBTX) error {
					return q.QueryRow(ctx, "SELECT n FROM notes WHERE n = $1", 77).Scan(&first)
				},
				func(ctx context.Context, q db.DBTX) error { return q.QueryRow(ctx, addNote, 4).Scan(&struct{}{}) },
				func(ctx context.Context, q db.DBTX) error {
					rows, err := q.Query(ctx, manyRows, 1000)
					for err == nil && rows.Next() {
						err = rows.Scan(&struct{}{})
					}
					return err
				},
				func(ctx context.Context, q db.DBTX) error { // heeds no answer
					_ = q.QueryRow(ctx, addNote, 5)
					return errOfItsOwn
				},
				func(ctx context.Context, q db.DBTX) error { // sees what came before it
					rows, _ := q.Query(ctx, "SELECT n FROM notes WHERE n <> 0 ORDER BY n")
					var err error
					before, err = pgx.CollectRows(rows, pgx.RowTo[int])
					return err
				},
			})
			require.NoError(t, err)
			require.Len(t, errs, 10)
			for _, i := range []int{0, 1, 2, 3, 4, 9} {
				require.NoError(t, errs[i], "query %d", i)
			}
			require.ErrorIs(t, errs[5], pgx.ErrNoRows)
			var scan pgx.ScanArgError
			require.ErrorAs(t, errs[6], &scan)
			require.ErrorAs(t, errs[7], &scan)
			require.Equal(t, errOfItsOwn, errs[8])
			require.Equal(t, int64(2), affected)
			require.Len(t, all, 1000)
			require.Equal(t, 1000, all[999])
			require.Equal(t, 1, first)
			require.Equal(t, 3, row)
			require.Equal(t, []int{1, 2, 3, 4, 5, 10}, before)

			tx.Rollback(t.Context()) // does no harm
			require.NoError(t, tx.Commit(t.Context()))
			p.requireNotes(t, 1, 2, 3, 4, 5, 10, 11)
			p.clear(t)
			p.requireKept(t, conn)
		}
	})
}

func TestPipelineTogetherOfNoQueriesCommits(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		queue(t, tx.Before(), addNote, 1)
		errs, err := tx.LastTogether(t.Context(), nil)
		requireNoErrors(t, errs, err)
		require.Empty(t, errs)
		p.requireNotes(t, 1)
		p.requireKept(t, conn)
	})
}

func TestPipelineTogetherWritesNothingAndKeepsTheConnectionWhenAStatementFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for _, c := range []struct {
			name, sqlState, sql string
			args                []any
		}{
			{"a statement", "23505", addNote, []any{0}},
			{"a statement after some rows", "22012", "SELECT 1 / (3 - g.n) FROM generate_series(1, $1::integer) AS g (n)", []any{5}},
			{"COMMIT", "23503", addOrphan, []any{9}},
			{"to prepare a statement", "42P01", "SELECT n FROM nothing", nil},
		} {
			for at := range 3 {
				for _, way := range ways {
					name := fmt.Sprintf("%s fails in the query %d by %s", c.name, at, way.name)
					queries := notes(1, 3)
					queries[at] = func(ctx context.Context, q db.DBTX) error { return way.make(ctx, q, c.sql, c.args...) }
					conn := p.acquire(t)
					tx := pipeline.Begin(conn.Conn())
					queue(t, tx.Before(), takeLock, p.key)
					_, err := tx.LastTogether(t.Context(), queries)
					requireSQLState(t, c.sqlState, err)
					requireNoOutcomeError(t, err)
					require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxCommitRollback, name)
					tx.Rollback(t.Context())
					require.Empty(t, testdb.Holders(t, p.other, p.key), name)
					p.requireNotes(t)
					p.requireKept(t, conn)

					errs, err := p.runTogether(t, t.Context(), notes(1, 3)...)
					requireNoErrors(t, errs, err)
					p.requireNotes(t, 1, 2, 3)
					p.clear(t)
				}
			}
		}
	})
}

// What the query makes of its error does not matter: the others' transaction is not committed.
func TestPipelineTogetherReturnsAnErrorThatTheQueryHides(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		const fails = "SELECT 1 / (3 - g.n) FROM generate_series(1, $1::integer) AS g (n)" // after two rows
		for name, hide := range map[string]pipeline.Query{
			"Exec": func(ctx context.Context, q db.DBTX) error {
				_, _ = q.Exec(ctx, addNote, 0)
				return nil
			},
			"Query, whose rows are left open": func(ctx context.Context, q db.DBTX) error {
				_, _ = q.Query(ctx, fails, 5)
				return nil
			},
			"Query, whose rows are closed early": func(ctx context.Context, q db.DBTX) error {
				rows, _ := q.Query(ctx, fails, 5)
				rows.Next()
				rows.Close()
				return nil
			},
			"QueryRow that is not scanned": func(ctx context.Context, q db.DBTX) error {
				_ = q.QueryRow(ctx, fails, 5)
				return nil
			},
			"QueryRow": func(ctx context.Context, q db.DBTX) error {
				var n int
				_ = q.QueryRow(ctx, fails, 5).Scan(&n)
				return nil
			},
		} {
			_, err := p.runTogether(t, t.Context(), append(notes(1, 2), hide)...)
			require.Error(t, err, name)
			requireNoOutcomeError(t, err)
			p.requireNotes(t)
			_, err = p.runTogether(t, t.Context(), append([]pipeline.Query{hide}, notes(1, 2)...)...)
			require.Error(t, err, name)
			p.requireNotes(t)
		}
	})
}

func TestPipelineTogetherSendsNothingIfAQueryRunsNoneOrTwoStatements(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.proxy.Reset()
		for name, query := range map[string]pipeline.Query{
			"none": func(context.Context, db.DBTX) error { return nil },
			"two": func(ctx context.Context, q db.DBTX) error {
				_ = one(addNote, 8)(ctx, q)
				return one(addNote, 9)(ctx, q)
			},
		} {
			for at := range 3 {
				queries := notes(1, 3)
				queries[at] = query
				tx := pipeline.Begin(conn.Conn())
				errs, err := tx.LastTogether(t.Context(), queries)
				require.ErrorIs(t, err, pipeline.ErrNotOne, name)
				require.Nil(t, errs)
				tx.Rollback(t.Context())
				require.Zero(t, p.proxy.Traffic())
			}
		}
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

// That it wants a second one shows only when its first has been answered.
func TestPipelineTogetherRefusesAStatementAfterTheAnswer(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for _, way := range ways {
			conn := p.acquire(t)
			tx := pipeline.Begin(conn.Conn())
			errs, err := tx.LastTogether(t.Context(), append(notes(1, 2), func(ctx context.Context, q db.DBTX) error {
				if err := one(addNote, 3)(ctx, q); err != nil {
					return err
				}
				return way.make(ctx, q, addNote, 4)
			}, one(addNote, 5)))
			require.NoError(t, err, way.name)
			require.NoError(t, errors.Join(errs[0], errs[1], errs[3]), way.name)
			require.ErrorIs(t, errs[2], pipeline.ErrNotOne, way.name)
			p.requireNotes(t, 1, 2, 3, 5)
			p.clear(t)
			p.requireKept(t, conn)
		}
	})
}

// How a query does not return.
var waysOut = map[string]func(){
	"panics":              func() { panic("a panic of the query") },
	"ends its goroutine":  runtime.Goexit,
	"panics with nothing": func() { panic(nil) },
}

// leftBy runs the function on a goroutine of its own, and waits until it has left.
func leftBy(run func()) (returned bool) {
	left := make(chan struct{})
	go func() {
		defer close(left)
		defer func() { _ = recover() }()
		run()
		returned = true
	}()
	<-left
	return returned
}

func TestPipelineTogetherSendsNothingWhenAQueryDoesNotReturnFromTheFirstCall(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.proxy.Reset()
		for name, leave := range waysOut {
			tx := pipeline.Begin(conn.Conn())
			require.False(t, leftBy(func() {
				_, _ = tx.LastTogether(t.Context(), append(notes(1, 2), func(context.Context, db.DBTX) error {
					leave()
					return nil
				}))
			}), name)
			require.Zero(t, p.proxy.Traffic(), name)
			tx.Rollback(t.Context())
			require.Zero(t, p.proxy.Traffic(), name)

			// Before the end, it can still be used.
			tx = pipeline.Begin(conn.Conn())
			require.False(t, leftBy(func() {
				_, _ = tx.LastTogether(t.Context(), []pipeline.Query{func(context.Context, db.DBTX) error {
					leave()
					return nil
				}})
			}), name)
			errs, err := tx.LastTogether(t.Context(), notes(1, 2))
			requireNoErrors(t, errs, err)
			p.requireNotes(t, 1, 2)
			p.clear(t)
			p.proxy.Reset()
		}
		p.requireKept(t, conn)
	})
}

// leavesWithAnswer is a query that does not return when it has its answer, or a part of it.
func leavesWithAnswer(leave func(), rows int) pipeline.Query {
	return func(ctx context.Context, q db.DBTX) error {
		rs, err := q.Query(ctx, manyRows, 1000)
		if err != nil {
			return err
		}
		for range rows {
			rs.Next()
		}
		leave()
		return nil
	}
}

func TestPipelineTogetherHasCommittedWhenAQueryDoesNotReturnFromTheSecondCall(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for name, leave := range waysOut {
			for _, rows := range []int{0, 1, 1001} {
				conn := p.acquire(t)
				tx := pipeline.Begin(conn.Conn())
				queue(t, tx.Before(), takeLock, p.key)
				require.False(t, leftBy(func() {
					_, _ = tx.LastTogether(t.Context(), append(append(notes(1, 2), leavesWithAnswer(leave, rows)), notes(3, 4)...))
				}), name)
				require.NoError(t, tx.Commit(t.Context()), name) // there is nothing left to do
				_, err := tx.Exec(t.Context(), addNote, 5)
				require.ErrorIs(t, err, pgx.ErrTxClosed, name)
				tx.Rollback(t.Context())
				require.Empty(t, testdb.Holders(t, p.other, p.key), name)
				p.requireNotes(t, 1, 2, 3, 4)
				p.clear(t)
				p.requireKept(t, conn)
			}
		}
	})
}

func TestPipelineTogetherIsNotCommittedWhenAQueryDoesNotReturnAndALaterOneFails(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for name, leave := range waysOut {
			conn := p.acquire(t)
			tx := pipeline.Begin(conn.Conn())
			queue(t, tx.Before(), takeLock, p.key)
			require.False(t, leftBy(func() {
				_, _ = tx.LastTogether(t.Context(), append(notes(1, 2), leavesWithAnswer(leave, 1), one(addNote, 0)))
			}), name)
			err := tx.Commit(t.Context())
			require.ErrorIs(t, err, pgx.ErrTxCommitRollback, name)
			requireSQLState(t, "23505", err)
			tx.Rollback(t.Context())
			p.requireNotes(t)
			p.requireKept(t, conn)
		}
	})
}

func TestPipelineTogetherJoinsTheCallersTransaction(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		outer := p.begin(t)
		errs, err := pipeline.Join(outer).LastTogether(ctx, notes(1, 3))
		requireNoErrors(t, errs, err)
		p.requireNotes(t)
		require.NoError(t, outer.Commit(ctx))
		p.requireNotes(t, 1, 2, 3, 50)
		p.clear(t)
		p.requireKept(t, outer.conn)

		outer = p.begin(t)
		tx := pipeline.Join(outer)
		queue(t, tx.Before(), takeLock, p.key)
		_, err = tx.LastTogether(ctx, append(notes(1, 3), one(addNote, 0), one(addNote, 4)))
		requireSQLState(t, "23505", err)
		tx.Rollback(ctx)
		p.requireUsable(t, outer)

		for name, leave := range waysOut {
			outer = p.begin(t)
			tx = pipeline.Join(outer)
			require.False(t, leftBy(func() {
				_, _ = tx.LastTogether(ctx, []pipeline.Query{leavesWithAnswer(leave, 1), one(manyRows, 1)})
			}), name)
			tx.Rollback(ctx)
			p.requireUsable(t, outer)
		}
	})
}

func TestPipelineTogetherRefusesAnArgumentThatCannotBeEncoded(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for at := range 3 {
			for _, way := range ways {
				conn := p.acquire(t)
				queries := notes(1, 3)
				queries[at] = func(ctx context.Context, q db.DBTX) error { return way.make(ctx, q, addNote, make(chan int)) }
				tx := pipeline.Begin(conn.Conn())
				queue(t, tx.Before(), takeLock, p.key)
				errs, err := tx.LastTogether(t.Context(), queries)
				require.ErrorContains(t, err, "chan int", "%d by %s", at, way.name)
				requireNoOutcomeError(t, err) // COMMIT was not sent
				require.Nil(t, errs)
				tx.Rollback(t.Context())
				p.requireNotes(t)
				if conn.Conn().IsClosed() {
					p.requireReplaced(t, conn)
				} else {
					p.requireKept(t, conn)
				}
			}
		}
	})
}

func TestPipelineTogetherOutcomeIsUnknownWhenTheConnectionBreaks(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		for _, cut := range append(cuts, []place{
			{"before an answer in the middle", isThirdInsert(), wire.CutBefore, false, true},
			{"within an answer in the middle", isThirdInsert(), wire.CutWithin, false, true},
			{"after an answer in the middle", isThirdInsert(), wire.CutAfter, false, true},
		}...) {
			conn := p.acquire(t)
			errs, err := pipeline.Begin(conn.Conn()).LastTogether(t.Context(), notes(1, 4))
			requireNoErrors(t, errs, err)
			p.clear(t)

			pid := conn.Conn().PgConn().PID()
			p.proxy.On(once(cut.at, cut.action))
			tx := pipeline.Begin(conn.Conn())
			_, err = tx.LastTogether(t.Context(), notes(1, 4))
			require.Error(t, err, cut.name)
			written := cut.written
			if cut.early && p.mode() == pgx.QueryExecModeDescribeExec {
				requireNoOutcomeError(t, err)
				written = false
			} else {
				requireOutcomeError(t, err)
				requireOutcomeError(t, tx.Commit(t.Context()))
			}
			tx.Rollback(t.Context())
			p.requireReplaced(t, conn)
			waitUntilGone(t, p.other, pid)
			if written {
				p.requireNotes(t, 1, 2, 3, 4)
			} else {
				p.requireNotes(t)
			}
			p.clear(t)
		}
	})
}

// isThirdInsert picks the server's answer to the third INSERT.
func isThirdInsert() func(wire.Message) bool {
	n := 0
	return func(m wire.Message) bool {
		if !isAnswer(m) || !strings.HasPrefix(m.Tag, "INSERT") {
			return false
		}
		n++
		return n == 3
	}
}

func TestPipelineTogetherHasCommittedOnceTheAnswerToCommitIsThere(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.proxy.On(once(isCommitted, wire.CutAfter))
		tx := pipeline.Begin(conn.Conn())
		errs, err := tx.LastTogether(t.Context(), notes(1, 3))
		requireNoErrors(t, errs, err)
		tx.Rollback(t.Context())
		p.requireReplaced(t, conn)
		p.requireNotes(t, 1, 2, 3)
	})
}

func TestPipelineTogetherKnowsThatNothingWasSentOnAConnectionThatWasLost(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		conn := p.acquire(t)
		p.proxy.CutAll()
		tx := pipeline.Begin(conn.Conn())
		_, err := tx.LastTogether(t.Context(), notes(1, 3))
		require.Error(t, err)
		if p.mode() != pgx.QueryExecModeExec { // there pgx does not tell
			requireNoOutcomeError(t, err)
		}
		tx.Rollback(t.Context())
		p.requireReplaced(t, conn)
		p.requireNotes(t)
	})
}

func TestPipelineTogetherSaysWhetherTheOutcomeIsUnknownWhenItIsStoppedWhileItWaits(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		p.waitAtCommit(t)
		for _, s := range stops {
			for name, make := range map[string]func(t *testing.T, tx *pipeline.Tx) []pipeline.Query{
				queuedWaits: func(t *testing.T, tx *pipeline.Tx) []pipeline.Query {
					t.Helper()
					queue(t, tx.Before(), takeLock, p.key)
					return append(notes(1, 1), one("SELECT 1"))
				},
				"the second query": func(*testing.T, *pipeline.Tx) []pipeline.Query {
					return append(notes(1, 1), one(takeLock, p.key), one("SELECT 1"))
				},
				"COMMIT": func(*testing.T, *pipeline.Tx) []pipeline.Query {
					return []pipeline.Query{one(addSlow, 1), one("SELECT 1")}
				},
			} {
				t.Run(name+" waits when "+s.name, func(t *testing.T) {
					p.stopped(t, s, true, name, func(t *testing.T, tx *pipeline.Tx, ctx context.Context) error {
						t.Helper()
						errs, err := tx.LastTogether(ctx, make(t, tx))
						return errors.Join(append(errs, err)...)
					})
				})
			}
		}
	})
}

func TestPipelineTogetherSendsNothingWhenTheContextHasEnded(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ended, end := context.WithCancel(t.Context())
		end()
		conn := p.acquire(t)
		p.proxy.Reset()
		tx := pipeline.Begin(conn.Conn())
		errs, err := tx.LastTogether(ended, notes(1, 3))
		require.ErrorIs(t, err, context.Canceled)
		requireNoOutcomeError(t, err)
		require.Nil(t, errs)
		tx.Rollback(ended)
		require.Zero(t, p.proxy.Traffic())
		p.requireNotes(t)
		p.requireKept(t, conn)
	})
}

func TestPipelineTogetherIsForOneGoroutineAndForOnce(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx := t.Context()
		conn := p.acquire(t)
		tx := pipeline.Begin(conn.Conn())
		rows, err := tx.Query(ctx, manyRows, 10)
		require.NoError(t, err)
		_, err = tx.LastTogether(ctx, notes(1, 2))
		require.ErrorIs(t, err, pipeline.ErrInUse)
		rows.Close()
		errs, err := tx.LastTogether(ctx, append(notes(1, 2), func(ctx context.Context, q db.DBTX) error {
			_, inner := tx.LastTogether(ctx, notes(3, 4))
			return errors.Join(inner, one(addNote, 5)(ctx, q))
		}))
		require.NoError(t, err)
		require.ErrorIs(t, errs[2], pipeline.ErrInUse)
		p.proxy.Reset()
		_, err = tx.LastTogether(ctx, notes(6, 7))
		require.ErrorIs(t, err, pgx.ErrTxClosed)
		require.Zero(t, p.proxy.Traffic())
		p.requireNotes(t, 1, 2, 5)
		p.requireKept(t, conn)
	})
}

func TestPipelineTogetherCostsWhatOneQueryCosts(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		cost := func(queries ...pipeline.Query) int {
			p.proxy.Reset()
			errs, err := p.runTogether(t, t.Context(), queries...)
			requireNoErrors(t, errs, err)
			p.clear(t)
			return p.proxy.Traffic().RoundTrips
		}
		conn := p.acquire(t)
		fresh := conn.Conn().PgConn().PID()
		conn.Release()
		many := cost(notes(1, 100)...)
		p.pool.Reset()
		require.Equal(t, cost(notes(1, 1)...), many, "on a fresh connection")
		conn = p.acquire(t)
		require.NotEqual(t, fresh, conn.Conn().PgConn().PID())
		conn.Release()

		warm := cost(notes(1, 1)...)
		require.Equal(t, warm, cost(notes(1, 100)...))
		if p.mode() != pgx.QueryExecModeDescribeExec { // never warm
			require.Equal(t, 1, warm)
		}
	})
}

// Also where the statements must be prepared first, the lock is taken in the one write that ends with COMMIT.
func TestPipelineTogetherDoesNotHoldItsLockAcrossTheNetwork(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		syncs, locked := 0, false
		p.proxy.On(func(m wire.Message) wire.Action {
			if !m.FromServer {
				locked = locked || m.Is('E', 'Q') && strings.Contains(m.Statement, "pg_advisory_xact_lock")
				if locked && m.Is('S', 'Q') {
					syncs++
				}
			}
			return wire.Forward
		})
		errs, err := p.runTogether(t, t.Context(), notes(1, 10)...)
		requireNoErrors(t, errs, err)
		p.proxy.CutAll() // and so the hook has returned
		require.True(t, locked)
		require.Equal(t, 1, syncs)
	})
}

// More than the buffers between the two sides hold: each must read while it has not written all.
func TestPipelineTogetherOfMuchIsNotADeadlock(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), longest)
		defer cancel()
		pool := testdb.PoolAt(t, p.url, maxConns(1), withExecMode(p.mode()))
		conn, err := pool.Acquire(ctx)
		require.NoError(t, err)
		defer conn.Release()
		filler := strings.Repeat("x", 64<<10)
		queries := make([]pipeline.Query, 512)
		for i := range queries {
			queries[i] = func(ctx context.Context, q db.DBTX) error {
				var got string
				want := fmt.Sprint(i, filler)
				if err := q.QueryRow(ctx, "SELECT $1::text", want).Scan(&got); err != nil {
					return err
				}
				if got != want {
					return errors.New("the answer of another query")
				}
				return nil
			}
		}
		for range 2 {
			errs, err := pipeline.Begin(conn.Conn()).LastTogether(ctx, queries)
			requireNoErrors(t, errs, err)
		}
	})
}

var togetherNamespace = repository.MustNamespace("together")

// noticed is a context that tells when somebody begins to wait for its end: in the queue, its call is in line then.
type noticed struct {
	context.Context
	waits chan struct{}
}

func (c noticed) Done() <-chan struct{} {
	select {
	case c.waits <- struct{}{}:
	default:
	}
	return c.Context.Done()
}

func TestGuardQueryThatDoesNotReturnHarmsNoOtherCallOfItsBatch(t *testing.T) {
	t.Parallel()
	inEveryExecMode(t, func(t *testing.T, p *pipe) {
		t.Helper()
		repo, err := repository.New(p.pool, repository.WithLockTimeout(30*time.Second))
		require.NoError(t, err)
		locks := []repository.Lock{togetherNamespace.Exclusive(t.Name())}
		key, err := repository.Key("together", t.Name())
		require.NoError(t, err)

		const bad = 3
		for name, leave := range waysOut {
			for _, first := range []bool{true, false} { // from the first call of the function, or from the second
				holder := hold(t, p.url, key)
				var calls [5]struct { // of which two run alone: one waits at the server, one for its connection
					err            error
					n, runs        int
					returned, left bool
				}
				var wg sync.WaitGroup
				for i := range calls {
					c := &calls[i]
					ctx := noticed{t.Context(), make(chan struct{}, 1)}
					wg.Go(func() {
						defer func() { _ = recover() }()
						defer func() { c.left = true }()
						c.n, c.err = repository.GuardQuery(ctx, repo, locks, func(ctx context.Context, q repository.DBTX) (n int, err error) {
							c.runs++
							if i == bad && first {
								leave()
							}
							err = q.QueryRow(ctx, addNote, i+1).Scan(&n)
							if i == bad && err == nil {
								leave()
							}
							return n, err
						})
						c.returned = true
					})
					if i == 0 {
						testdb.WaitForWaiter(t, p.other, key, 1)
					} else {
						<-ctx.waits
					}
				}
				require.NoError(t, holder.Rollback(t.Context()))
				wg.Wait()
				for i, c := range calls {
					require.True(t, c.left)
					require.Equal(t, i != bad, c.returned, "%s, %d", name, i)
					require.NoError(t, c.err)
					if i != bad {
						require.Equal(t, i+1, c.n, "%s, %d", name, i)
					}
				}
				require.Equal(t, 2, calls[2].runs, "it was in a batch")
				if first {
					p.requireNotes(t, 1, 2, 3, 5)
				} else {
					p.requireNotes(t, 1, 2, 3, 4, 5) // it has run
				}
				p.clear(t)
			}
		}
	})
}
