package repository

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/keyqueue"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

type ticket = keyqueue.Ticket[*call]

// notEntered says why the call did not get its turn in the queue.
func (c *call) notEntered(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, keyqueue.ErrDeparted):
		return &outcomeError{c.idempotent, ctx.Err()}
	case errors.Is(err, keyqueue.ErrFull), errors.Is(err, keyqueue.ErrTaken):
		c.cut = false // no time has run out
		return c.busy(WhereQueue, err)
	case errors.Is(err, keyqueue.ErrTimeout):
		return c.busy(WhereQueue, nil)
	}
	return err
}

// runTogether runs calls that wait for the same locks, each of them one statement, as consecutive statements of one
// transaction, and those of them that insert alike as one statement. If that fails, they run again, each alone: no call
// is harmed by another.
func (r *Repository) runTogether(ctx context.Context, b *keyqueue.Batch[*call]) {
	var again []*ticket
	alone := false
	defer func() { b.End(again, alone) }()

	first := b.First().Call
	conn, err := r.acquire(ctx, first)
	calls := b.Depart()
	explain := func(*call) error { return err }
	if err == nil {
		defer conn.Release()
		err = runCalls(ctx, conn.Conn(), calls)
		explain = func(c *call) error { return c.classify(ctx, err, conn.Conn().IsClosed) }
	}
	if err == nil {
		return
	}

	var busy *LockBusyError
	reason := explain(first)
	if conn != nil && errors.Is(reason, ErrReadOnly) {
		_ = conn.Conn().Close(ctx) // as in run; alone, the calls may reach the new primary
	}
	switch {
	case errors.As(reason, &busy) && (busy.Where != WhereRow || time.Since(first.started) >= first.timeout):
		// It was the first one's time that ran out. Whose row it waited for is not known.
		first.err = reason
		again = slices.DeleteFunc(calls, func(t *ticket) bool { return t.Call == first })
		alone = busy.Where == WhereRow
	case conn == nil, errors.Is(reason, ErrOutcomeUnknown):
		for _, t := range calls {
			t.Call.err = explain(t.Call)
		}
	default:
		again, alone = calls, true
	}
}

// runCalls runs the statements of calls in one transaction, and notes in each what it returned.
func runCalls(ctx context.Context, conn *pgx.Conn, calls []*ticket) error {
	if len(calls) == 0 {
		return nil
	}
	var groups [][]*ticket
	var statements []pipeline.Query
	for rest := calls; len(rest) > 0; {
		n := alike(rest)
		groups = append(groups, rest[:n])
		statements = append(statements, statementOf(rest[:n]))
		rest = rest[n:]
	}
	return calls[0].Call.runIn(ctx, pipeline.Begin(conn), func(tx *pipeline.Tx) error {
		tx.Foreign = slices.ContainsFunc(calls, func(t *ticket) bool { return t.Call.foreign })
		errs, err := tx.LastTogether(ctx, statements)
		if err != nil {
			return err
		}
		for i, group := range groups {
			for _, t := range group {
				t.Call.err = errs[i]
			}
		}
		return nil
	})
}

// alike returns how many of the calls, from the first on, can be one statement. That they have the same lock does not yet
// say that they have the same user: keys can collide.
func alike(calls []*ticket) int {
	first := calls[0].Call.setup
	n := slices.IndexFunc(calls[1:], func(t *ticket) bool {
		next := t.Call.setup
		return first == nil || next == nil || next.params.UserID != first.params.UserID || next.params.MaxPending != first.params.MaxPending
	})
	if n < 0 {
		return len(calls)
	}
	return 1 + n
}

// statementOf returns what calls that are alike run.
func statementOf(calls []*ticket) pipeline.Query {
	switch c := calls[0].Call; {
	case len(calls) > 1:
		return func(ctx context.Context, q db.DBTX) error { return insertSetups(ctx, q, calls) }
	case c.foreign:
		return c.recovered
	default:
		return c.statement
	}
}

// panicked is what the host's function panicked with, on a goroutine that is not its caller's.
type panicked struct{ value any }

func (p panicked) Error() string { return fmt.Sprintf("panic: %v", p.value) }

// errExited says that the host's function ended its goroutine, with runtime.Goexit.
var errExited = errors.New("the function ended its goroutine")

// outcome returns what came of a call that ran with others. It ends the goroutine of the call as the host's function
// ended the one that it ran on.
func (c *call) outcome() error {
	var p panicked
	switch {
	case errors.As(c.err, &p):
		panic(p.value) //nolint:forbidigo // it is the host's
	case errors.Is(c.err, errExited):
		runtime.Goexit()
	}
	return c.err
}

// recovered runs the host's function on a goroutine of its own, so that it cannot end that of the others' calls.
func (c *call) recovered(ctx context.Context, q db.DBTX) error {
	err := errExited
	var run sync.WaitGroup
	run.Go(func() {
		defer func() {
			if value := recover(); value != nil {
				err = panicked{value}
			}
		}()
		err = c.statement(ctx, q)
	})
	run.Wait()
	return err
}
