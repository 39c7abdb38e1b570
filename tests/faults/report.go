//go:build unix

package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/latchkey-go/latchkey/tests/internal/history"
)

// faults counts what was injected, by kind.
type faults struct {
	mu sync.Mutex
	n  map[string]int
}

func (f *faults) injected(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.n == nil {
		f.n = make(map[string]int)
	}
	f.n[name]++
}

func (f *faults) total() (total int) {
	for _, n := range f.n {
		total += n
	}
	return total
}

// served measures how long it takes after a fault until a call of each process is answered that began after it.
type served struct {
	mu      sync.Mutex
	open    []outage
	longest map[string]time.Duration
}

type outage struct {
	fault   string
	over    time.Time
	process int
}

func (s *served) wait(fault string, over time.Time, processes int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for process := range processes {
		s.open = append(s.open, outage{fault, over, process})
	}
}

func (s *served) answered(process int, began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.open = slices.DeleteFunc(s.open, func(o outage) bool {
		if o.process != process || began.Before(o.over) {
			return false
		}
		if s.longest == nil {
			s.longest = make(map[string]time.Duration)
		}
		s.longest[o.fault] = max(s.longest[o.fault], time.Since(o.over))
		return true
	})
}

// waiting returns the faults after which nothing was answered yet.
func (s *served) waiting() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	var names []string
	for _, o := range s.open {
		names = append(names, o.fault)
	}
	return names
}

func (t *tally) checked() (n int) {
	for _, of := range t.histories {
		n += of
	}
	return n
}

// report adds up rounds.
type report struct {
	tally
	seeds     []uint64
	coalesced int // rounds
	faults    faults
	longest   map[string]time.Duration
}

func (p *report) add(r *round) {
	if p.longest == nil {
		p.longest, p.failed, p.histories = make(map[string]time.Duration), make(map[string]int), make(map[history.Verdict]int)
		p.faults.n = make(map[string]int)
	}
	p.seeds = append(p.seeds, r.seed)
	if r.coalesces {
		p.coalesced++
	}
	p.operations += r.operations
	p.unknown += r.unknown
	p.lost += r.lost
	p.leaked += r.leaked
	p.events += r.events
	p.tally.longest = max(p.tally.longest, r.tally.longest)
	for _, violation := range r.violations {
		p.violations = append(p.violations, fmt.Sprintf("seed %d: %s", r.seed, violation))
	}
	for name, n := range r.failed {
		p.failed[name] += n
	}
	for verdict, n := range r.histories {
		p.histories[verdict] += n
	}
	for name, n := range r.faults.n {
		p.faults.n[name] += n
	}
	for name, d := range r.served.longest {
		p.longest[name] = max(p.longest[name], d)
	}
}

// print writes the figures.
func (p *report) print(w io.Writer) {
	fmt.Fprintf(w, "rounds                      %d, %d of them with coalescing\n", len(p.seeds), p.coalesced)
	fmt.Fprintf(w, "operations                  %d\n", p.operations)
	fmt.Fprintf(w, "faults                      %d\n", p.faults.total())
	fmt.Fprintf(w, "histories checked           %d, the longest took %v\n", p.histories[history.Sound]+p.histories[history.Broken], p.tally.longest.Round(time.Millisecond))
	fmt.Fprintf(w, "histories not decided       %d\n", p.histories[history.Undecided])
	fmt.Fprintf(w, "events of writes in outbox  %d\n", p.events)
	fmt.Fprintf(w, "unknown outcomes            %d\n", p.unknown)
	fmt.Fprintf(w, "violations                  %d\n", len(p.violations))
	fmt.Fprintf(w, "acknowledged writes lost    %d\n", p.lost)
	fmt.Fprintf(w, "leaked                      %d (connections, sessions, locks, goroutines)\n", p.leaked)
	fmt.Fprintf(w, "\n%-64s %10s  %s\n", "fault", "injected", "longest until served again")
	for _, name := range slices.Sorted(maps.Keys(p.faults.n)) {
		until := ""
		if d, ok := p.longest[name]; ok {
			until = d.Round(time.Millisecond).String()
		}
		fmt.Fprintf(w, "%-64s %10d  %s\n", name, p.faults.n[name], until)
	}
	fmt.Fprintf(w, "\n%-64s %10s\n", "calls that failed, with", "calls")
	for _, name := range slices.Sorted(maps.Keys(p.failed)) {
		fmt.Fprintf(w, "%-64s %10d\n", name, p.failed[name])
	}
}
