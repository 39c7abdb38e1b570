package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

const (
	poolSize = 16

	// patience is the lock timeout of everybody who has one. Nobody is to run into it.
	patience = 10 * time.Second

	// sweepEvery is how often pending rows are completed, so that the rule goes on saying yes.
	sweepEvery = 5 * time.Millisecond

	// manyKeys are more than any round uses up.
	manyKeys = 200_000
)

// table is where a contestant's rows are, and the statements about them.
type table struct {
	empty string
	sweep string // completes what is pending for the users $1
	count string // of all rows, and of the pending ones of the user who has most
}

var (
	setupRequests = table{
		empty: "TRUNCATE latchkey.setup_requests",
		sweep: `
UPDATE latchkey.setup_requests
SET status = 'completed', ended_at = clock_timestamp()
WHERE user_id = ANY ($1) AND status = 'pending'`,
		count: `
SELECT coalesce(sum(n), 0)::bigint, coalesce(max(pending), 0)
FROM (SELECT count(*) AS n, count(*) FILTER (WHERE status = 'pending') AS pending FROM latchkey.setup_requests GROUP BY user_id) AS users`,
	}
	riverJobs = table{
		empty: "TRUNCATE river.river_job",
		sweep: `
UPDATE river.river_job
SET state = 'completed', finalized_at = clock_timestamp()
WHERE args ->> 'user' = ANY ($1::uuid[]::text[]) AND state = 'available'`,
		count: `
SELECT coalesce(sum(n), 0)::bigint, coalesce(max(pending), 0)
FROM (SELECT count(*) AS n, count(*) FILTER (WHERE state = 'available') AS pending FROM river.river_job GROUP BY args ->> 'user') AS users`,
	}
)

// world is what a contestant has in one round.
type world struct {
	url        string
	syncCommit bool
	over       context.Context // ends with the round, for those who have not begun their call
	pools      []*pgxpool.Pool
}

// pool returns a pool of the contestant's own, with all connections open.
func (w *world) pool(ctx context.Context, size int32) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(w.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = size
	config.ConnConfig.RuntimeParams["synchronous_commit"] = onOff(w.syncCommit)
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	w.pools = append(w.pools, pool)
	var opening sync.WaitGroup
	errs := make([]error, size)
	conns := make([]*pgxpool.Conn, size)
	for i := range conns {
		opening.Go(func() { conns[i], errs[i] = pool.Acquire(ctx) })
	}
	opening.Wait()
	for _, c := range conns {
		if c != nil {
			c.Release()
		}
	}
	return pool, errors.Join(errs...)
}

// acquire is given up at the end of the round, when hundreds may still wait for a connection.
func (w *world) acquire(pool *pgxpool.Pool) (*pgxpool.Conn, error) {
	conn, err := pool.Acquire(w.over)
	if err != nil && w.over.Err() != nil {
		return nil, errStopped
	}
	return conn, err
}

// onConn makes a call of a function that needs a connection.
func (w *world) onConn(ctx context.Context, f func(context.Context, *pgxpool.Conn, uuid.UUID) error) (call, error) {
	pool, err := w.pool(ctx, poolSize)
	return func(ctx context.Context, user uuid.UUID) error {
		conn, err := w.acquire(pool)
		if err != nil {
			return err
		}
		defer conn.Release()
		return f(ctx, conn, user)
	}, err
}

func (w *world) inUse() (n int) {
	for _, p := range w.pools {
		n += int(p.Stat().AcquiredConns())
	}
	return n
}

func (w *world) close() {
	for _, p := range w.pools {
		p.Close()
	}
}

func onOff(b bool) string {
	if b {
		return "on"
	}
	return "off"
}

// lab is what all rounds share.
type lab struct {
	url   string // direct
	proxy *proxy
	admin *pgx.Conn // direct; it empties, sweeps and counts
	keys  []uuid.UUID
	next  atomic.Int64 // the fresh key that was used last
	warm  time.Duration
	round time.Duration
}

// sample is what one round of a contestant came to.
type sample struct {
	accepted, all float64 // per second
	p50, p99      time.Duration
	conns         int
	cpu           time.Duration // of this program, per call
	rtt           time.Duration // measured
}

// The phases of a round. Callers only read which one it is, after each call.
const (
	warming int32 = iota
	measuring
	ended
)

// caller makes calls one after the other, as long as the round lasts.
type caller struct {
	accepted int             // in the whole round
	counted  int             // of those, in the measured part
	took     []time.Duration // of all calls in the measured part
	err      error
}

func (c *caller) run(ctx context.Context, phase *atomic.Int32, do call, user func() uuid.UUID) {
	for phase.Load() != ended {
		began := time.Now()
		err := do(ctx, user())
		took := time.Since(began)
		measured := phase.Load() == measuring
		switch {
		case err == nil:
			c.accepted++
			if measured {
				c.counted++
			}
		case errors.Is(err, errRefused):
		case errors.Is(err, errStopped):
			return
		default:
			c.err = err
			return
		}
		if measured {
			c.took = append(c.took, took)
		}
	}
}

// measure runs one round of a contestant in a cell, and checks that it kept the rule.
func (l *lab) measure(ctx context.Context, c cell, k contestant) (s sample, err error) {
	if err := l.clear(ctx, k); err != nil {
		return s, err
	}
	over, end := context.WithCancel(ctx)
	defer end()
	w := &world{url: l.at(c.RTT), syncCommit: c.SyncCommit, over: over}
	defer w.close()
	do, err := k.open(ctx, w)
	if err != nil {
		return s, err
	}
	rehearsed, err := l.rehearse(ctx, do)
	if err != nil {
		return s, err
	}
	runtime.GC()

	var phase atomic.Int32
	var callers sync.WaitGroup
	all := make([]caller, c.Callers)
	user := l.users(c.Keys)
	for i := range all {
		callers.Go(func() { all[i].run(ctx, &phase, do, user) })
	}
	watching := make(chan error, 1)
	go func() { watching <- l.watch(over, c, k, w, &s.conns) }()

	wait(ctx, l.warm)
	l.proxy.measured()
	began, cpu := time.Now(), cpuTime()
	phase.Store(measuring)
	wait(ctx, l.round)
	phase.Store(ended)
	cpu, took := cpuTime()-cpu, time.Since(began)
	if c.RTT > 0 {
		s.rtt = l.proxy.measured()
	}
	end()
	callers.Wait()
	if err := <-watching; err != nil {
		return s, fmt.Errorf("sweeper: %w", err)
	}

	var sum caller
	for _, one := range all {
		if one.err != nil {
			return s, one.err
		}
		sum.accepted += one.accepted
		sum.counted += one.counted
		sum.took = append(sum.took, one.took...)
	}
	slices.Sort(sum.took)
	s.accepted, s.all = float64(sum.counted)/took.Seconds(), float64(len(sum.took))/took.Seconds()
	s.p50, s.p99 = percentile(sum.took, 50), percentile(sum.took, 99)
	s.cpu = cpu / time.Duration(max(1, len(sum.took)))
	return s, l.check(ctx, k, rehearsed+sum.accepted)
}

// rehearse makes some calls on every connection, so that the statements are prepared and the server has its plans, which
// takes the first five executions. It returns how many were made; all are accepted, since each is another user's.
func (l *lab) rehearse(ctx context.Context, do call) (int, error) {
	const each = 8
	var callers sync.WaitGroup
	var errs [poolSize]error
	user := l.users(freshKeys)
	for i := range errs {
		callers.Go(func() {
			for n := 0; n < each && errs[i] == nil; n++ {
				errs[i] = do(ctx, user())
			}
		})
	}
	callers.Wait()
	return each * poolSize, errors.Join(errs[:]...)
}

// clear leaves no contestant another's rows or garbage.
func (l *lab) clear(ctx context.Context, k contestant) error {
	for _, sql := range []string{k.table.empty, "VACUUM bench.parents"} {
		if _, err := l.admin.Exec(ctx, sql); err != nil {
			return err
		}
	}
	return nil
}

// check is the honesty of a round: all that was said to be accepted is there, nothing else is, and the rule was kept.
func (l *lab) check(ctx context.Context, k contestant, accepted int) error {
	var rows, most int
	if err := l.admin.QueryRow(ctx, k.table.count).Scan(&rows, &most); err != nil {
		return err
	}
	if rows != accepted {
		return fmt.Errorf("%d calls were accepted, but there are %d rows", accepted, rows)
	}
	if most > maxPending {
		return fmt.Errorf("the rule is broken: a user has %d pending, and may have %d", most, maxPending)
	}
	return nil
}

// at returns the URL that leads to the server over the round-trip time. Without one there is no proxy either.
func (l *lab) at(rtt time.Duration) string {
	l.proxy.setRTT(rtt)
	if rtt == 0 {
		return l.url
	}
	return l.proxy.url
}

// users returns what draws a user for each call.
func (l *lab) users(keys string) func() uuid.UUID {
	switch keys {
	case hotKey:
		return func() uuid.UUID { return l.keys[0] }
	case hundredKeys:
		return func() uuid.UUID { return l.keys[rand.IntN(hundred)] }
	default:
		return func() uuid.UUID { return l.keys[int(l.next.Add(1))%len(l.keys)] }
	}
}

const hundred = 100

// watch sweeps, and sees how many connections are in use, until the round is over. Fresh keys need no sweeping: each has
// one row.
func (l *lab) watch(over context.Context, c cell, k contestant, w *world, conns *int) error {
	swept := map[string][]uuid.UUID{hotKey: l.keys[:1], hundredKeys: l.keys[:hundred]}[c.Keys]
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-over.Done():
			return nil
		case <-tick.C:
		}
		*conns = max(*conns, w.inUse())
		if swept == nil {
			continue
		}
		if _, err := l.admin.Exec(context.WithoutCancel(over), k.table.sweep, swept); err != nil {
			return err
		}
	}
}

// single is what a call costs that nobody disturbs.
type single struct {
	Contestant string  `json:"contestant"`
	RoundTrips int     `json:"round_trips"`
	HoldMicros float64 `json:"hold_microseconds"` // 0: it holds no lock
}

// alone measures a contestant's single calls at a round-trip time of 1 ms.
func (l *lab) alone(ctx context.Context, k contestant) (single, error) {
	s := single{Contestant: k.name}
	if err := l.clear(ctx, k); err != nil {
		return s, err
	}
	w := &world{url: l.at(time.Millisecond), over: ctx}
	defer w.close()
	do, err := k.open(ctx, w)
	if err != nil {
		return s, err
	}
	rehearsed, err := l.rehearse(ctx, do)
	if err != nil {
		return s, err
	}
	const calls = 51
	user := l.users(freshKeys)
	var trips, holds []float64
	for range calls {
		l.proxy.record()
		err := do(ctx, user())
		seen := l.proxy.recorded()
		if err != nil {
			return s, err
		}
		trips = append(trips, float64(len(seen)))
		if k.lock > 0 && len(seen) >= k.lock {
			holds = append(holds, microseconds(seen[len(seen)-1].answered.Sub(seen[k.lock-1].asked)))
		}
	}
	s.RoundTrips, s.HoldMicros = int(median(trips)), median(holds)
	return s, l.check(ctx, k, rehearsed+calls)
}

// roundTripTime measures a query that does nothing, through the proxy and directly; the difference is the network's. p is
// the percentile of what it took.
func (l *lab) roundTripTime(ctx context.Context, rtt time.Duration, p int) (time.Duration, error) {
	ping := func(url string) (time.Duration, error) {
		conn, err := pgx.Connect(ctx, url)
		if err != nil {
			return 0, err
		}
		defer conn.Close(context.WithoutCancel(ctx))
		var took [201]time.Duration
		for i := range took {
			began := time.Now()
			if err := conn.Ping(ctx); err != nil {
				return 0, err
			}
			took[i] = time.Since(began)
		}
		slices.Sort(took[:])
		return percentile(took[:], p), nil
	}
	direct, err := ping(l.url)
	through, throughErr := ping(l.at(rtt))
	return through - direct, errors.Join(err, throughErr)
}

// wait returns early when ctx ends; the calls that are made next then say so.
func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}

// cpuTime is what this program has used so far, in user and kernel mode.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u) // it cannot fail for oneself
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
