// Command bench measures latchkey beside what people use instead, on one server, in one run.
//
//	bench [full|quick|draw]
//
// Every contestant does the same: it inserts a pending setup request, of which a user may have a thousand. full takes less
// than 20 minutes and writes its figures and plots into bench/results, quick takes less than 2 and measures what the figures
// to reach need; draw prints and plots the last full run's figures again.
//
// The server is the one of package pgserver, so LATCHKEY_DATABASE_URL names another. One that is started here flushes to the
// disk as a real one does, unlike for the tests: otherwise synchronous_commit would mean nothing.
//
// It runs on Unix.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"syscall"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/internal/pgserver"
)

// folder is where results go; the program runs in the folder above its own.
var folder = filepath.Join("bench", "results")

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	kind := "full"
	if len(args) > 0 {
		kind = args[0]
	}
	var r results
	var err error
	switch {
	case len(args) > 1 || kind != "full" && kind != "quick" && kind != "draw":
		return fmt.Errorf("unexpected %q, want full, quick or draw", args)
	case kind == "draw":
		r, err = read(filepath.Join(folder, "full.json"))
	default:
		if r, err = bench(ctx, kind); err == nil {
			err = r.write(filepath.Join(folder, kind+".json"))
		}
		if ctx.Err() != nil {
			err = errors.New("interrupted")
		}
	}
	if err != nil {
		return err
	}
	if err := r.print(out); err != nil || kind == "quick" {
		return err
	}
	return r.plot(folder)
}

// bench starts a server and measures everything on it.
func bench(ctx context.Context, kind string) (_ results, err error) {
	r := results{
		Kind: kind, Date: time.Now().UTC(), Seed: rand.Uint64(),
		CPUs: runtime.NumCPU(), GoMaxProcs: runtime.GOMAXPROCS(0), Go: runtime.Version(), System: runtime.GOOS + "/" + runtime.GOARCH,
	}
	server, err := pgserver.Start(ctx, pgserver.Options{Log: say, Settings: map[string]string{"fsync": "on", "full_page_writes": "on"}})
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	url, drop, err := server.NewDatabase(ctx)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, drop(context.WithoutCancel(ctx))) }()
	r.Server = server.Version()

	l, err := newLab(ctx, url)
	if err != nil {
		return r, err
	}
	defer l.admin.Close(context.WithoutCancel(ctx))
	cells := fullCells()
	if l.warm, l.round = 250*time.Millisecond, 700*time.Millisecond; kind == "quick" {
		cells = quickCells()
		l.round = 500 * time.Millisecond
	}
	r.Warm, r.Round = l.warm, l.round
	if err := l.settings(ctx, &r); err != nil {
		return r, err
	}
	if err := l.singles(ctx, &r); err != nil {
		return r, err
	}
	return r, l.run(ctx, cells, &r)
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }

// newLab makes what the rounds need in a migrated database.
func newLab(ctx context.Context, url string) (*lab, error) {
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, objectsSQL); err != nil {
		return nil, err
	}
	if err := migrateRiver(ctx, pool); err != nil {
		return nil, err
	}
	l := &lab{url: url, keys: make([]uuid.UUID, manyKeys)}
	for i := range l.keys {
		l.keys[i] = uuid.New()
	}
	parents := pgx.CopyFromSlice(len(l.keys), func(i int) ([]any, error) { return []any{l.keys[i]}, nil })
	if _, err := pool.CopyFrom(ctx, pgx.Identifier{"bench", "parents"}, []string{"id"}, parents); err != nil {
		return nil, err
	}
	for _, sql := range []string{
		// A vacuum in the middle of a round would be one contestant's bad luck.
		"ALTER TABLE latchkey.setup_requests SET (autovacuum_enabled = off)",
		"ALTER TABLE river.river_job SET (autovacuum_enabled = off)",
		"ALTER TABLE bench.parents SET (autovacuum_enabled = off)",
		"VACUUM ANALYZE bench.parents",
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			return nil, err
		}
	}
	if l.admin, err = pgx.Connect(ctx, url); err != nil {
		return nil, err
	}
	// It completes rows without waiting for the disk, so that how often it does is not the disk's to say.
	if _, err := l.admin.Exec(ctx, "SET synchronous_commit = off"); err != nil {
		return nil, err
	}
	l.proxy, err = startProxy(ctx, url)
	return l, err
}

// settings notes the server's settings that matter, and what the network is like.
func (l *lab) settings(ctx context.Context, r *results) error {
	const query = `
SELECT name, current_setting(name)
FROM pg_settings
WHERE name IN ('fsync', 'full_page_writes', 'wal_sync_method', 'shared_buffers', 'max_connections', 'commit_delay')
ORDER BY name`
	r.Settings = make(map[string]string)
	rows, _ := l.admin.Query(ctx, query) // the rows carry the error
	var name, value string
	_, err := pgx.ForEachRow(rows, []any{&name, &value}, func() error {
		r.Settings[name] = value
		return nil
	})
	if err != nil {
		return err
	}
	// What the detour costs at best is taken off the delays, so that no network is faster than it is said to be.
	best, err := l.roundTripTime(ctx, time.Millisecond, 1)
	if err != nil {
		return err
	}
	l.proxy.detour = max(0, best-time.Millisecond)
	for _, rtt := range rtts[1:] {
		got, err := l.roundTripTime(ctx, rtt, 50)
		if err != nil {
			return err
		}
		r.Network = append(r.Network, network{milliseconds(rtt), milliseconds(got)})
	}
	return nil
}

// singles measures calls that nobody disturbs.
func (l *lab) singles(ctx context.Context, r *results) error {
	say("round trips and lock hold times of single calls")
	for _, k := range contestants() {
		s, err := l.alone(ctx, k)
		if err != nil {
			return fmt.Errorf("single calls of %s: %w", k.name, err)
		}
		r.Singles = append(r.Singles, s)
	}
	trips, err := l.moneyTrips(ctx)
	r.MoneyTrips = trips
	return err
}

// run measures the cells, each contestant once in every round, in an order that is drawn for the round.
func (l *lab) run(ctx context.Context, cells []cell, r *results) error {
	order := rand.New(rand.NewPCG(r.Seed, 0))
	total, done := 0, 0
	for _, c := range cells {
		total += c.Rounds * len(c.Contestants)
	}
	began := time.Now()
	for n, c := range cells {
		samples := make(map[string][]sample)
		for round := range c.Rounds {
			each := l.warm + l.round + 150*time.Millisecond // a guess, until there is an average
			if done > 0 {
				each = time.Since(began) / time.Duration(done)
			}
			say("%d of %d measurements done, %v left; now cell %d of %d, round %d of %d: %v",
				done, total, (each * time.Duration(total-done)).Round(time.Second), n+1, len(cells), round+1, c.Rounds, c)
			if _, err := l.admin.Exec(ctx, "CHECKPOINT"); err != nil {
				return err
			}
			for _, k := range c.shuffled(order) {
				s, err := l.measure(ctx, c, k)
				if err != nil {
					return fmt.Errorf("%s: %v: %w", k.name, c, err)
				}
				samples[k.name] = append(samples[k.name], s)
				done++
			}
		}
		r.Cells = append(r.Cells, summary(c, samples))
	}
	return nil
}
