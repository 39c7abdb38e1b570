//go:build unix

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// contextCancelled is the fault that the workers make themselves.
const contextCancelled = "context cancelled"

// fault is a kind of fault.
type fault struct {
	name   string
	weight int  // how often it is drawn
	own    bool // it needs a server of our own
	// inject makes the fault and, if it lasts, takes it away. made is false if there was nothing to make it at. What it
	// returns is when the fault was over.
	inject func(ctx context.Context, r *round, random *rand.Rand) (over time.Time, made bool, err error)
}

// between returns a time that is drawn.
func between(random *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(random.Int64N(int64(most-least)))
}

// ofTheServer are made one after another, while those of the network are made too.
var ofTheServer = []fault{
	{"backend terminated", 20, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		return r.signalBySQL(ctx, random, "pg_catalog.pg_terminate_backend")
	}},
	{"backend cancelled", 20, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		return r.signalBySQL(ctx, random, "pg_catalog.pg_cancel_backend")
	}},
	{"all of ours terminated", 4, false, func(ctx context.Context, r *round, _ *rand.Rand) (time.Time, bool, error) {
		err := r.server.exec(ctx, "SELECT pg_catalog.pg_terminate_backend(a.pid) FROM pg_catalog.pg_stat_activity AS a WHERE "+r.ours(), r.role, r.database)
		return time.Now(), true, err
	}},
	{"server killed", 2, true, func(ctx context.Context, r *round, _ *rand.Rand) (time.Time, bool, error) {
		killed := time.Now()
		return killed, true, r.server.kill(ctx)
	}},
	{"backend killed", 2, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		pid, err := r.backend(ctx, random)
		if err != nil || pid == 0 {
			return time.Now(), false, err
		}
		killed := time.Now()
		if syscall.Kill(pid, syscall.SIGKILL) != nil {
			return killed, false, nil
		}
		return killed, true, nil
	}},
	{"backend stopped", 10, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		pid, err := r.backend(ctx, random)
		if err != nil || pid == 0 {
			return time.Now(), false, err
		}
		return stop(ctx, between(random, 20*time.Millisecond, 600*time.Millisecond), pid)
	}},
	{"postmaster stopped", 4, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		pid, err := r.server.postmaster()
		if err != nil {
			return time.Now(), false, err
		}
		r.processes[random.IntN(len(r.processes))].pool.Reset() // the next calls need new connections
		return stop(ctx, between(random, 20*time.Millisecond, 600*time.Millisecond), pid)
	}},
	{"server stopped", 4, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		pids, err := r.server.processes(ctx)
		if err != nil {
			return time.Now(), false, err
		}
		return stop(ctx, between(random, 20*time.Millisecond, 600*time.Millisecond), pids...)
	}},
	roleSetting("default_transaction_isolation = 'repeatable read'", 8),
	roleSetting("default_transaction_isolation = 'serializable'", 4),
	roleSetting("default_transaction_read_only = on", 2),
	roleSetting("lock_timeout = '1ms'", 2),
	roleSetting("statement_timeout = '5ms'", 2),
	roleSetting("idle_in_transaction_session_timeout = '1ms'", 2),
	limited("connection limit of the role", "ALTER ROLE %[1]s CONNECTION LIMIT 2", "ALTER ROLE %[1]s CONNECTION LIMIT -1"),
	limited("connection limit of the database", "ALTER DATABASE %[2]s CONNECTION LIMIT 2", "ALTER DATABASE %[2]s CONNECTION LIMIT -1"),
}

// ofTheNetwork are made between the clients and the server.
var ofTheNetwork = []fault{
	cut("cut before a message", anyMessage, wire.CutBefore),
	cut("cut within a message", anyMessage, wire.CutWithin),
	cut("cut after a message", anyMessage, wire.CutAfter),
	cut("COMMIT lost", isCommit, wire.CutBefore),
	cut("cut within COMMIT", isCommit, wire.CutWithin),
	cut("answer to a batch lost", endsBatch, wire.CutAfter),
	cut("cut within an answer", func(m wire.Message) bool { return m.FromServer && m.Type == 'C' }, wire.CutWithin),
	cut("answer to COMMIT lost", isCommitted, wire.CutBefore),
	cut("cut after the answer to COMMIT", isCommitted, wire.CutAfter),
	silence("answer that never comes", func(m wire.Message) bool { return m.FromServer }),
	silence("batch that never comes", func(m wire.Message) bool { return m.Is('B') }),
	{"all connections cut", 3, false, func(_ context.Context, r *round, _ *rand.Rand) (time.Time, bool, error) {
		r.proxy.CutAll()
		return time.Now(), true, nil
	}},
	{"slow network", 6, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		most := 20 * time.Millisecond
		r.proxy.Delay(between(random, 0, most), between(random, 0, most))
		err := pause(ctx, between(random, 50*time.Millisecond, 300*time.Millisecond))
		r.proxy.Delay(0, 0)
		return time.Now(), true, err
	}},
	{"pool exhausted", 6, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		pool := r.processes[random.IntN(len(r.processes))].pool
		bounded, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		var taken []*pgxpool.Conn
		for range pool.Config().MaxConns {
			if conn, err := pool.Acquire(bounded); err == nil {
				taken = append(taken, conn)
			}
		}
		err := pause(ctx, between(random, 10*time.Millisecond, 500*time.Millisecond))
		for _, conn := range taken {
			conn.Release()
		}
		return time.Now(), len(taken) == int(pool.Config().MaxConns), err
	}},
}

// signalBySQL calls a function with one of our backends.
func (r *round) signalBySQL(ctx context.Context, random *rand.Rand, function string) (time.Time, bool, error) {
	pid, err := r.backend(ctx, random)
	if err != nil || pid == 0 {
		return time.Now(), false, err
	}
	return time.Now(), true, r.server.exec(ctx, "SELECT "+function+"($1)", pid)
}

// stop stops processes for a while.
func stop(ctx context.Context, d time.Duration, pids ...int) (over time.Time, made bool, err error) {
	for _, pid := range pids {
		made = syscall.Kill(pid, syscall.SIGSTOP) == nil || made
	}
	err = pause(ctx, d)
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGCONT)
	}
	return time.Now(), made, err
}

// roleSetting is a default of the role that new connections have, until it is taken away again.
func roleSetting(setting string, weight int) fault {
	return fault{"role: " + setting, weight, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		if err := r.server.exec(ctx, fmt.Sprintf("ALTER ROLE %s SET %s", r.role, setting)); err != nil {
			return time.Now(), false, err
		}
		for _, p := range r.processes {
			p.pool.Reset()
		}
		paused := pause(ctx, between(random, 100*time.Millisecond, time.Second))
		err := r.server.exec(ctx, fmt.Sprintf("ALTER ROLE %s RESET ALL", r.role))
		for _, p := range r.processes {
			p.pool.Reset()
		}
		if err == nil {
			err = paused
		}
		return time.Now(), true, err
	}}
}

// limited is a limit that leaves no room for the connections that are needed, until it is taken away again.
func limited(name, limit, lift string) fault {
	return fault{name, 4, true, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		database := pgx.Identifier{r.database}.Sanitize()
		if err := r.server.exec(ctx, fmt.Sprintf(limit+" --%[1]s%[2]s", r.role, database)); err != nil {
			return time.Now(), false, err
		}
		for _, p := range r.processes {
			p.pool.Reset()
		}
		paused := pause(ctx, between(random, 50*time.Millisecond, 400*time.Millisecond))
		err := r.server.exec(ctx, fmt.Sprintf(lift+" --%[1]s%[2]s", r.role, database))
		if err == nil {
			err = paused
		}
		return time.Now(), true, err
	}}
}

// cut cuts a connection at a message that fits.
func cut(name string, at func(wire.Message) bool, action wire.Action) fault {
	return fault{name, 10, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		conn, err := r.atMessage(ctx, random, at, action)
		return time.Now(), conn > 0, err
	}}
}

// silence keeps a message that fits, and all that follows, from the other side, which does not see the client leave. Some
// time later the connection is cut, as the server's keepalive would do: until then, the server keeps what locks it has.
func silence(name string, at func(wire.Message) bool) fault {
	return fault{name, 10, false, func(ctx context.Context, r *round, random *rand.Rand) (time.Time, bool, error) {
		conn, err := r.atMessage(ctx, random, at, wire.Hold)
		if err == nil && conn > 0 {
			err = pause(ctx, between(random, 10*time.Millisecond, time.Second))
			r.proxy.Cut(conn)
		}
		return time.Now(), conn > 0, err
	}}
}

// atMessage does something to a message that fits, some time after the first that does, and returns on which connection;
// 0 if there was none.
func (r *round) atMessage(ctx context.Context, random *rand.Rand, at func(wire.Message) bool, action wire.Action) (conn int, err error) {
	var left atomic.Int64
	left.Store(random.Int64N(30))
	done := make(chan int, 1)
	r.proxy.On(func(m wire.Message) wire.Action {
		if at(m) && left.Add(-1) == -1 {
			done <- m.Conn
			return action
		}
		return wire.Forward
	})
	defer r.proxy.On(nil)
	bounded, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	select {
	case conn = <-done:
		return conn, nil
	case <-bounded.Done():
	}
	if left.Swap(-2) < 0 { // it has just happened; otherwise it never will
		conn = <-done
	}
	return conn, ctx.Err()
}

func anyMessage(m wire.Message) bool { return m.FromServer || m.Type != wire.CancelRequest }

// The calls that go to the server whole have no COMMIT: it is the end of their write, and ReadyForQuery its answer.
func endsWhole(m wire.Message) bool {
	return m.Is('S') && (strings.HasPrefix(m.Statement, "-- name: SetupInsert") || strings.HasPrefix(m.Statement, "-- name: EntryInsert"))
}

func isCommit(m wire.Message) bool  { return m.Is('E') && m.Statement == "commit" || endsWhole(m) }
func endsBatch(m wire.Message) bool { return m.Is('S') && m.Statement == "commit" || endsWhole(m) }
func isCommitted(m wire.Message) bool {
	return m.FromServer && (m.Type == 'C' && m.Tag == "COMMIT" || m.Type == 'Z')
}

// inject makes faults that are drawn, until ctx ends.
func (r *round) inject(ctx context.Context, kinds []fault, random *rand.Rand, most time.Duration) {
	total := 0
	for _, f := range kinds {
		total += f.weight
	}
	for pause(ctx, between(random, 0, most)) == nil {
		n := random.IntN(total)
		var f fault
		for _, f = range kinds {
			if n -= f.weight; n < 0 {
				break
			}
		}
		if f.own && !r.server.own {
			continue
		}
		// What is begun is ended, also when the time is over.
		over, made, err := f.inject(context.WithoutCancel(ctx), r, random)
		switch {
		case err != nil:
			r.fail(fmt.Sprintf("the fault %q could not be made: %v", f.name, err))
			return
		case made:
			r.faults.injected(f.name)
			r.served.wait(f.name, over, len(r.processes))
		}
	}
}

// ours is the condition for the backends of the calls, of $1, the role, and $2, the database.
func (r *round) ours() string {
	return "a.usename = $1 AND a.datname = $2 AND a.pid <> pg_catalog.pg_backend_pid()"
}

// backend draws one of our backends; 0 if there is none.
func (r *round) backend(ctx context.Context, random *rand.Rand) (int, error) {
	pids, err := r.server.pids(ctx, r.ours(), r.role, r.database)
	if err != nil || len(pids) == 0 {
		return 0, err
	}
	return pids[random.IntN(len(pids))], nil
}
