//go:build unix

package main

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	mathrand "math/rand/v2"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/history"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

const (
	// workers is how many callers each process has: more than connections, so that calls wait for both.
	workers = 16
	conns   = 6

	// accounts is how many a round has. They are opened before it begins, without faults.
	accounts = 6000

	// recovery bounds how long calls may go on failing after the last fault, and what is closed may take to go away.
	recovery = 30 * time.Second

	// checkTimeout bounds the check of one history.
	checkTimeout = 20 * time.Second
)

// round is some time of calls and faults in a database of its own, and what came of it.
type round struct {
	seed      uint64
	coalesces bool
	unguarded bool
	server    *server

	url, database, role string
	proxy               *wire.Proxy
	processes           []*process
	stages              []*stage
	clients             atomic.Int64

	faults faults
	served served
	tally
}

// tally is what is counted in a round, and added up.
type tally struct {
	mu         sync.Mutex
	operations int
	unknown    int
	failed     map[string]int // calls, by what their error was
	histories  map[history.Verdict]int
	longest    time.Duration // that a check took
	lost       int           // acknowledged writes
	leaked     int           // connections, locks and goroutines
	events     int           // that were looked for in the outbox
	violations []string
}

func (t *tally) fail(violation string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.violations = append(t.violations, violation)
}

// note counts a call.
func (r *round) note(process int, began time.Time, out any, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.operations++
	switch out := out.(type) {
	case history.Unknown:
		r.unknown++
		r.failed[out.Why]++
	case history.Nothing:
		r.failed[out.Why]++
		if strings.HasPrefix(out.Why, unexpected) {
			r.violations = append(r.violations, fmt.Sprintf("an error that no fault explains: %v", err))
		}
	default:
		r.served.answered(process, began)
	}
}

func (r *round) newClient() int { return int(r.clients.Add(1)) }

// run makes the round.
func (r *round) run(ctx context.Context, d time.Duration, pictures string) (err error) {
	r.failed, r.histories = make(map[string]int), make(map[history.Verdict]int)
	cleanUp, err := r.prepare(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cleanUp(context.WithoutCancel(ctx))) }()
	goroutines := runtime.NumGoroutine()
	if err := r.open(ctx); err != nil {
		return err
	}

	working, stopWork := context.WithCancel(ctx)
	defer stopWork()
	var callers sync.WaitGroup
	for i := range workers * len(r.processes) {
		w := &worker{process: r.processes[i%len(r.processes)], round: r, random: r.random(uint64(i)), client: r.newClient()}
		callers.Go(func() { w.work(working) })
	}
	faulty, stopFaults := context.WithTimeout(ctx, d)
	defer stopFaults()
	var lanes sync.WaitGroup
	lanes.Go(func() { r.inject(faulty, ofTheServer, r.random(1000), 300*time.Millisecond) })
	lanes.Go(func() { r.inject(faulty, ofTheNetwork, r.random(1001), 150*time.Millisecond) })
	lanes.Wait()

	r.awaitService(ctx)
	stopWork()
	callers.Wait()
	r.close(ctx)
	r.awaitNothingLeft(ctx, goroutines)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return r.check(ctx, pictures)
}

// random returns numbers that depend on the seed and what they are for.
func (r *round) random(stream uint64) *mathrand.Rand {
	return mathrand.New(mathrand.NewPCG(r.seed, stream))
}

// grants are what the README says that the role of the service needs.
const grants = `
GRANT USAGE ON SCHEMA latchkey TO %[1]s;
GRANT SELECT, INSERT, UPDATE ON latchkey.setup_requests, latchkey.accounts TO %[1]s;
GRANT SELECT, INSERT ON latchkey.entries, latchkey.transfers TO %[1]s;
GRANT SELECT, INSERT, UPDATE ON latchkey.leases TO %[1]s;
GRANT SELECT, INSERT, UPDATE, DELETE ON latchkey.outbox TO %[1]s;
GRANT USAGE ON SCHEMA host TO %[1]s;
GRANT SELECT, INSERT ON host.tickets TO %[1]s;`

// prepare makes the database and the role.
func (r *round) prepare(ctx context.Context) (cleanUp func(context.Context) error, err error) {
	var drop func(context.Context) error
	if r.url, drop, err = r.server.NewDatabase(ctx); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, drop(context.WithoutCancel(ctx)))
		}
	}()
	conn, err := pgx.Connect(ctx, r.url)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	r.database, r.role = conn.Config().Database, conn.Config().User
	if _, err := conn.Exec(ctx, `
		CREATE SCHEMA host;
		CREATE TABLE host.tickets (id uuid PRIMARY KEY DEFAULT gen_random_uuid(), desk text NOT NULL, key text NOT NULL);
		CREATE INDEX ON host.tickets (desk)`); err != nil {
		return nil, err
	}
	if !r.server.own {
		return drop, r.prepareStages(ctx, conn)
	}
	// No superuser, for whom limits do not count.
	name := make([]byte, 8)
	rand.Read(name)
	r.role = "faults_" + hex.EncodeToString(name)
	if _, err := conn.Exec(ctx, fmt.Sprintf("CREATE ROLE %[1]s LOGIN PASSWORD '%[1]s';"+grants, r.role)); err != nil {
		return nil, err
	}
	return func(ctx context.Context) error {
		err := r.server.insist(ctx, drop)
		return errors.Join(err, r.server.exec(ctx, "DROP ROLE "+r.role))
	}, r.prepareStages(ctx, conn)
}

// prepareStages opens the accounts, and says what calls are made.
func (r *round) prepareStages(ctx context.Context, conn *pgx.Conn) error {
	random := r.random(2000)
	ids := make([]uuid.UUID, accounts)
	limits := make([]int64, accounts)
	for i := range ids {
		ids[i] = uuid.New()
		limits[i] = []int64{0, 0, 30, 100}[random.IntN(4)]
	}
	// It is about noon there, so that the round is of one day.
	zone := fmt.Sprintf("Etc/GMT%+d", time.Now().UTC().Hour()-12)
	if _, err := conn.Exec(ctx, `
		INSERT INTO latchkey.accounts (id, owner_id, daily_limit, time_zone)
		SELECT a.id, a.id, a.daily_limit, $3 FROM ROWS FROM (unnest($1::uuid[]), unnest($2::bigint[])) AS a (id, daily_limit)`,
		ids, limits, zone); err != nil {
		return err
	}
	r.stages = []*stage{
		{begin: beginUser},
		{begin: func(random *mathrand.Rand) subject {
			d := &desk{name: uuid.NewString(), most: 5 + random.IntN(20), unguarded: r.unguarded}
			d.History = history.New("desk "+d.name, history.Setups())
			return d
		}},
		{begin: func(random *mathrand.Rand) subject {
			n := min(2+random.IntN(2), len(ids))
			b := &bank{name: uuid.NewString(), accounts: ids[:n], events: random.IntN(2) == 0}
			b.History = history.New("accounts of "+b.name, history.Accounts(limits[:n]...))
			ids, limits = ids[n:], limits[n:]
			return b
		}},
		{begin: beginJob},
	}
	for i, s := range r.stages {
		s.random = r.random(3000 + uint64(i))
		s.inUse = make([]subject, 1+s.random.IntN(2)) // few, so that calls wait for each other, and run together
	}
	return nil
}

// open starts the proxy, and the processes behind it.
func (r *round) open(ctx context.Context) (err error) {
	u, err := url.Parse(r.url)
	if err != nil {
		return errors.New("the server's connection string is no URL")
	}
	if r.server.own {
		u.User = url.UserPassword(r.role, r.role)
	}
	if r.proxy, err = wire.Open(ctx, u.String()); err != nil {
		return err
	}
	config, err := pgxpool.ParseConfig(r.proxy.URL())
	if err != nil {
		return err
	}
	config.MaxConns = conns
	config.ConnConfig.ConnectTimeout = callTimeout
	batch := 0
	if r.coalesces {
		batch = repository.DefaultMaxBatch
	}
	for number := range 2 {
		pool, err := pgxpool.NewWithConfig(ctx, config.Copy())
		if err != nil {
			return err
		}
		repo, err := repository.New(pool, repository.WithLockTimeout(lockTimeout), repository.WithCoalescing(batch))
		if err != nil {
			return err
		}
		r.processes = append(r.processes, &process{number, pool, repo})
	}
	return nil
}

// awaitService waits until each process has been served again after each fault.
func (r *round) awaitService(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	for pause(ctx, 10*time.Millisecond) == nil {
		if len(r.served.waiting()) == 0 {
			return
		}
	}
	for _, name := range r.served.waiting() {
		r.fail(fmt.Sprintf("%v after the fault %q no call is answered", recovery, name))
	}
}

// close closes the processes, in which no call is left.
func (r *round) close(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	r.awaitNoLock(ctx)
	r.proxy.CutAll() // or the pool would wait until each server has said goodbye, also one that says nothing
	for _, p := range r.processes {
		taken := p.pool.Stat().AcquiredConns()
		for ; taken > 0 && pause(ctx, 5*time.Millisecond) == nil; taken = p.pool.Stat().AcquiredConns() {
		}
		if taken > 0 {
			r.leak(fmt.Sprintf("%d connections were not given back to the pool", taken))
			continue // it would not close
		}
		p.pool.Close()
	}
	r.proxy.Close()
}

// awaitNoLock waits until nobody has an advisory lock, while the connections are still open.
func (r *round) awaitNoLock(ctx context.Context) {
	for {
		pids, err := r.server.pids(ctx, `a.pid IN (
			SELECT l.pid FROM pg_catalog.pg_locks AS l JOIN pg_catalog.pg_database AS d ON d.oid = l.database
			WHERE l.locktype = 'advisory' AND d.datname = $1)`, r.database)
		if err == nil && len(pids) == 0 {
			return
		}
		if pause(ctx, 5*time.Millisecond) != nil {
			r.leak(fmt.Sprintf("advisory locks are left, %v after the last call: %v, %v", recovery, pids, err))
			return
		}
	}
}

func (r *round) leak(what string) {
	r.fail(what)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.leaked++
}

// awaitNothingLeft waits until there are no sessions, so that nothing can be written any more, and no goroutines.
func (r *round) awaitNothingLeft(ctx context.Context, goroutines int) {
	ctx, cancel := context.WithTimeout(ctx, recovery)
	defer cancel()
	for {
		pids, err := r.server.pids(ctx, r.ours(), r.role, r.database)
		if err == nil && len(pids) == 0 {
			break
		}
		if pause(ctx, 5*time.Millisecond) != nil {
			r.leak(fmt.Sprintf("sessions are left, %v after the pool was closed: %v, %v", recovery, pids, err))
			break
		}
	}
	for runtime.NumGoroutine() > goroutines {
		if pause(ctx, 5*time.Millisecond) != nil {
			stacks := make([]byte, 1<<20)
			stacks = stacks[:runtime.Stack(stacks, true)]
			r.leak(fmt.Sprintf("%d goroutines are left, of %d before:\n%s", runtime.NumGoroutine(), goroutines, stacks))
			break
		}
	}
}
