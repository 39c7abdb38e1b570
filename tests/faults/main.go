//go:build unix

// Command faults makes calls of latchkey while everything around them fails, and checks what they say.
//
//	faults [-for 2m] [-seed n] [-server url] [-pictures folder]
//
// A run is made of rounds. In each, two processes with a pool of their own call the methods for setup requests, guarded
// rules of the host, accounts and leases, while backends are ended, cancelled, stopped and killed, the server is killed
// and started again, the network cuts, loses and delays, contexts end, pools are exhausted and the role's settings
// change: see plan.go. In every other round calls that wait for the same lock run together. In the end each call is
// checked to have done what it said, by package history and in the database, and nothing may be left behind.
//
// The faults of a round are drawn from its seed, which is printed: -seed makes that round again, alone. What is broken
// ends the program with status 1, and is drawn as a page of HTML. How long it took to serve again is counted from when
// the fault was over, and where a server or a backend was killed, from then.
//
// The server is one that is started here. With -server, or LATCHKEY_DATABASE_URL, it is another one; faults of the
// machine and the role are left out then, since they are not ours to make.
//
// It runs on Unix.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// roundTime is how long a round has faults.
const roundTime = 12 * time.Second

// options are what the command line says.
type options struct {
	duration  time.Duration
	round     time.Duration
	seed      uint64 // 0 is any
	server    string
	pictures  string // the folder for them
	unguarded bool
}

var errBroken = errors.New("something is broken, see above")

func main() {
	var o options
	flag.DurationVar(&o.duration, "for", 2*time.Minute, "how long to go on")
	flag.DurationVar(&o.round, "round", roundTime, "how long a round has faults")
	flag.Uint64Var(&o.seed, "seed", 0, "make the round of this seed, and no other")
	flag.StringVar(&o.server, "server", "", "the URL of a server to use")
	flag.StringVar(&o.pictures, "pictures", os.TempDir(), "the folder for pictures of what is broken")
	flag.BoolVar(&o.unguarded, "unguarded", false, "give out tickets without a lock, which must be found out")
	flag.Parse()

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	err := run(ctx, o, os.Stdout)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "faults: "+format+"\n", args...) }

func run(ctx context.Context, o options, out io.Writer) (err error) {
	s, err := startServer(ctx, o.server)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.close()) }()
	var p report
	began := time.Now()
	for seed := first(o); ; seed++ {
		r := &round{server: s, seed: seed, coalesces: seed%2 == 0, unguarded: o.unguarded}
		started := time.Now()
		if err := r.run(ctx, o.round, o.pictures); err != nil {
			return fmt.Errorf("seed %d: %w", seed, err)
		}
		p.add(r)
		say("%v of %v: seed %d, coalescing %t: %d operations, %d faults, %d unknown outcomes, %d histories, %d violations",
			time.Since(began).Round(time.Second), o.duration, seed, r.coalesces,
			r.operations, r.faults.total(), r.unknown, r.checked(), len(r.violations))
		for _, violation := range r.violations {
			say("seed %d: %s", seed, violation)
		}
		if o.seed != 0 || time.Since(began)+time.Since(started) > o.duration {
			break
		}
	}
	p.print(out)
	if len(p.violations) > 0 {
		return errBroken
	}
	return nil
}

func first(o options) uint64 {
	if o.seed != 0 {
		return o.seed
	}
	return rand.Uint64N(1 << 32)
}
