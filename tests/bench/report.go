package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"text/tabwriter"
	"time"
)

// results are all that a run came to: enough to print and draw them again.
type results struct {
	Kind       string            `json:"kind"`
	Date       time.Time         `json:"date"`
	Seed       uint64            `json:"seed"` // of the contestants' order
	Server     string            `json:"server"`
	Settings   map[string]string `json:"settings"`
	System     string            `json:"system"`
	CPUs       int               `json:"cpus"`
	Go         string            `json:"go"`
	GoMaxProcs int               `json:"gomaxprocs"`
	Warm       time.Duration     `json:"warm_up_nanoseconds"`
	Round      time.Duration     `json:"round_nanoseconds"`
	Network    []network         `json:"network"`
	Singles    []single          `json:"single_calls"`
	MoneyTrips map[string]int    `json:"money_round_trips"`
	Cells      []cellResult      `json:"cells"`
}

// network is a round-trip time, and what the proxy made of it when nothing else ran.
type network struct {
	RTT      float64 `json:"rtt_milliseconds"`
	Measured float64 `json:"measured_milliseconds"`
}

type cellResult struct {
	cell
	Figures []figure `json:"figures"`
}

// figure is the median of a contestant's rounds.
type figure struct {
	Contestant  string    `json:"contestant"`
	Accepted    float64   `json:"accepted_per_second"`
	All         float64   `json:"calls_per_second"`
	P50         float64   `json:"p50_milliseconds"`
	P99         float64   `json:"p99_milliseconds"`
	Connections int       `json:"connections"` // the most in any round
	CPU         float64   `json:"client_cpu_microseconds_per_call,omitempty"`
	RTT         float64   `json:"measured_rtt_milliseconds,omitempty"`
	Rounds      []float64 `json:"accepted_per_second_by_round"`
}

// summary makes the figures of a cell. The proxy is a part of this program, so what the client costs is only known without.
func summary(c cell, samples map[string][]sample) cellResult {
	r := cellResult{cell: c}
	for _, name := range c.Contestants {
		of := func(value func(sample) float64) (values []float64) {
			for _, s := range samples[name] {
				values = append(values, value(s))
			}
			return values
		}
		f := figure{
			Contestant:  name,
			Rounds:      of(func(s sample) float64 { return s.accepted }),
			All:         median(of(func(s sample) float64 { return s.all })),
			P50:         median(of(func(s sample) float64 { return milliseconds(s.p50) })),
			P99:         median(of(func(s sample) float64 { return milliseconds(s.p99) })),
			Connections: int(slices.Max(of(func(s sample) float64 { return float64(s.conns) }))),
			RTT:         median(of(func(s sample) float64 { return milliseconds(s.rtt) })),
		}
		if c.RTT == 0 {
			f.CPU = median(of(func(s sample) float64 { return microseconds(s.cpu) }))
		}
		f.Accepted = median(f.Rounds)
		r.Figures = append(r.Figures, f)
	}
	return r
}

func read(path string) (r results, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(b, &r)
}

func (r results) write(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}

// figure returns what a contestant came to in a cell with synchronous_commit off, and zeros where it was not measured.
func (r results) figure(keys string, rtt time.Duration, callers int, contestant string) figure {
	for _, c := range r.Cells {
		if c.Keys != keys || c.RTT != rtt || c.Callers != callers || c.SyncCommit {
			continue
		}
		for _, f := range c.Figures {
			if f.Contestant == contestant {
				return f
			}
		}
	}
	return figure{}
}

func (r results) print(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	r.printHead(w)
	for _, c := range r.Cells {
		fmt.Fprintf(w, "\n%v; median of %d rounds\n", c.cell, c.Rounds)
		fmt.Fprintln(w, "accepted/s\tin rounds\tcalls/s\tp50 ms\tp99 ms\tconnections\tclient CPU µs\tmeasured delay ms\t  contestant")
		for _, f := range c.Figures {
			cpu, rtt := "-", "-"
			if c.RTT == 0 {
				cpu = fmt.Sprintf("%.0f", f.CPU)
			} else {
				rtt = fmt.Sprintf("%.2f", f.RTT)
			}
			fmt.Fprintf(w, "%.0f\t%.0f-%.0f\t%.0f\t%.2f\t%.2f\t%d\t%s\t%s\t  %s\n",
				f.Accepted, slices.Min(f.Rounds), slices.Max(f.Rounds), f.All, f.P50, f.P99, f.Connections, cpu, rtt, f.Contestant)
		}
	}
	r.printSingles(w)
	r.printGoals(w)
	return w.Flush()
}

func (r results) printHead(out io.Writer) {
	fmt.Fprintf(out, `%s run of %s: PostgreSQL %s, %s on %s, %d CPUs for client and server together, GOMAXPROCS %d, seed %d
server settings: %v
network: a delay line in this program; 0 ms is the loopback without it. Measured before the rounds:`,
		r.Kind, r.Date.Format("2006-01-02 15:04 MST"), r.Server, r.Go, r.System, r.CPUs, r.GoMaxProcs, r.Seed, r.Settings)
	for _, n := range r.Network {
		fmt.Fprintf(out, " %g ms is %.2f;", n.RTT, n.Measured)
	}
	fmt.Fprintf(out, `
measured delay: both ways, on average, of all that passed in a cell; more than it should be where the CPUs are busy
a pool of %d connections, %v of warm-up, rounds of %v in random order of the contestants, pending rows completed every %v;
no latency can come out longer than warm-up and round, so those of the slowest contestants are too low
`, poolSize, r.Warm, r.Round, sweepEvery)
}

// printSingles prints what a call costs alone, and for those that are measured there, among others.
func (r results) printSingles(w io.Writer) {
	fmt.Fprintln(w, "\nwhat a guard costs: round trips and lock hold time of a single call at 1 ms, then accepted/s of 16 callers at 1 ms")
	fmt.Fprintln(w, "hold time: from when the server is given the packet that takes the lock until it has answered the one that frees it")
	fmt.Fprintln(w, "round trips\thold ms\tfresh keys\thot key\t  contestant")
	perSecond := func(f figure) string {
		if f.Contestant == "" {
			return "-"
		}
		return fmt.Sprintf("%.0f", f.Accepted)
	}
	for _, s := range r.Singles {
		hold := "-"
		if s.HoldMicros > 0 {
			hold = fmt.Sprintf("%.2f", s.HoldMicros/1000)
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%s\t  %s\n", s.RoundTrips, hold,
			perSecond(r.figure(freshKeys, time.Millisecond, freshCallers, s.Contestant)),
			perSecond(r.figure(hotKey, time.Millisecond, freshCallers, s.Contestant)), s.Contestant)
	}
}

// goal is a figure to reach: at least, or at most, so much.
type goal struct {
	what   string
	got    float64
	wanted float64
	atMost bool
}

func (g goal) reached() bool {
	if g.atMost {
		return g.got > 0 && g.got <= g.wanted // 0 was not measured
	}
	return g.got >= g.wanted
}

func (r results) goals() []goal {
	accepted := func(keys string, rtt time.Duration, callers int, a, b string) float64 {
		return ratio(r.figure(keys, rtt, callers, a).Accepted, r.figure(keys, rtt, callers, b).Accepted)
	}
	cpu := func(callers int) float64 {
		return ratio(r.figure(freshKeys, 0, callers, coalescing).CPU, r.figure(freshKeys, 0, callers, bareBatch).CPU)
	}
	goals := make([]goal, 0, 16)
	for _, s := range r.Singles {
		if s.Contestant == coalescing || s.Contestant == alone {
			goals = append(goals, goal{"round trips of CreateSetup: " + s.Contestant, float64(s.RoundTrips), 1, true})
		}
	}
	for _, method := range moneyMethods {
		goals = append(goals, goal{"round trips of " + method, float64(r.MoneyTrips[method]), 1, true})
	}
	return append(goals,
		goal{"hot key, 1 ms, callers 256: latchkey / textbook", accepted(hotKey, time.Millisecond, hotCallers, coalescing, textbook), 60, false},
		goal{"hot key, 1 ms, callers 256: latchkey / PL/pgSQL function", accepted(hotKey, time.Millisecond, hotCallers, coalescing, function), 2.5, false},
		goal{"hot key, 0 ms, callers 256: latchkey / PL/pgSQL function", accepted(hotKey, 0, hotCallers, coalescing, function), 4, false},
		goal{"hot key, 1 ms, callers 256: latchkey, not coalescing / PL/pgSQL function", accepted(hotKey, time.Millisecond, hotCallers, alone, function), 0.9, false},
		goal{"fresh keys, 0 ms, callers 16: latchkey / PL/pgSQL function", accepted(freshKeys, 0, freshCallers, coalescing, function), 0.95, false},
		goal{"fresh keys, 1 ms, callers 16: latchkey / PL/pgSQL function", accepted(freshKeys, time.Millisecond, freshCallers, coalescing, function), 0.95, false},
		goal{"fresh keys, 1 ms, callers 16: latchkey / unguarded INSERT", accepted(freshKeys, time.Millisecond, freshCallers, coalescing, unguarded), 0.9, false},
		goal{"client CPU per call, 1 caller: latchkey / bare pgx batch", cpu(1), 1.25, true},
		goal{"client CPU per call, 16 callers: latchkey / bare pgx batch", cpu(16), 1.25, true},
	)
}

func (r results) printGoals(w io.Writer) {
	fmt.Fprintln(w, "\nfigures to reach")
	fmt.Fprintln(w, "got\twanted\t\t  what")
	for _, g := range r.goals() {
		verdict, side := "missed", "at least"
		if g.reached() {
			verdict = "reached"
		}
		if g.atMost {
			side = "at most"
		}
		fmt.Fprintf(w, "%.2f\t%s %g\t%s\t  %s\n", g.got, side, g.wanted, verdict, g.what)
	}
	fmt.Fprintln(w, "not measured here: the time of a guarded insert with 10 million rows / with 10 thousand")
}
