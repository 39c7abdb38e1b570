// Package racelab races the usual ways of keeping a rule such as "at most one pending request per user"
// against each other on a real PostgreSQL: the broken ones, the right ones, and latchkey. The demo, the
// tests and the benchmarks share it; package repository never imports it.
//
// No experiment relies on luck. Hand-written ways are held between their check and their insert until
// every other caller has checked too or is seen waiting in pg_locks; latchkey, whose code has no such
// place, is held there from outside, by another transaction's uncommitted row in the slot that it is
// about to take. So a broken way breaks every time, and a right way holds under the same schedule.
package racelab

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"
)

// runBudget bounds one experiment. The slowest takes about 0.3 s; the rest is room for a loaded machine.
const runBudget = 15 * time.Second

// Result is what one run of an experiment came to.
type Result struct {
	// Name is the experiment's.
	Name string `json:"name"`
	// Callers counts the connections that take part, one that only holds the lock included, so the
	// outcomes below need not add up to it.
	Callers int `json:"callers"`
	// Limit is how many pending requests the user may have.
	Limit int `json:"limit"`
	// Created, Refused and Busy count the calls that made a request, that found the limit reached,
	// and that did not get the lock in their time.
	Created int `json:"created"`
	Refused int `json:"refused"`
	Busy    int `json:"busy"`
	// Errors counts every other end of a call. The only one that any experiment expects is 23505, the
	// unique index stopping code that was past its own check; for latchkey's calls that counts here too,
	// although the caller sees a refusal, because its lock should have refused first.
	Errors int `json:"errors"`
	// Rows is how many pending rows the experiment's users have afterwards.
	Rows int `json:"rows"`
	// Holds says that Rows is at most Limit, and that nothing else that the way promises was broken:
	// for session-lock-survives-rollback, that the lock ended with its transaction.
	Holds bool `json:"holds"`
}

// Event is something that happened in an experiment, and when.
type Event struct {
	// At counts from the start of the race.
	At time.Duration
	// Caller is "A", "B" and so on, or empty for what the lab itself does.
	Caller string
	Text   string
}

// Timeline is the events of one run in the order in which they were seen.
type Timeline []Event

// Experiment is one way of keeping the rule, together with the schedule that it has to stand.
type Experiment struct {
	// Name is unique and fixed; Summary says in a line what the callers do.
	Name, Summary string
	// Want is how every run must come out.
	Want Result

	schema   string            // on the callers' search_path, so that the same code can meet both tables
	settings map[string]string // of the callers' connections
	run      func(context.Context, *lab) error
}

// Breaks reports whether the way is a broken one, which every run must show.
func (e Experiment) Breaks() bool { return !e.Want.Holds }

// Run races the experiment once on the migrated database at url, for a user that nobody else has, so
// runs may share a database and may run at the same time. It ends when ctx does, and after 15 s at the latest.
//
// The error says what kept the experiment from being carried out, or which calls ended as no experiment
// expects; the result and the timeline are then what there was until it. That the rule broke, or that the
// result is not the wanted one, is no error here: see [Experiment.Check].
func (e Experiment) Run(ctx context.Context, url string) (Result, Timeline, error) {
	ctx, cancel := context.WithTimeout(ctx, runBudget)
	defer cancel()

	l, err := open(ctx, e, url)
	if err != nil {
		return l.result, nil, fmt.Errorf("racelab: %s: prepare: %w", e.Name, err)
	}
	defer l.close()

	err = e.run(ctx, l)
	if err = errors.Join(err, l.unexpected); err == nil {
		l.result.Rows, err = l.rows(ctx)
	}
	if err != nil {
		return l.result, l.timeline, fmt.Errorf("racelab: %s: %w", e.Name, err)
	}
	l.result.Holds = l.result.Rows <= l.result.Limit && !l.broken
	return l.result, l.timeline, nil
}

// Check returns nil when r is what the experiment must come to, and otherwise an error that names every
// difference. A broken way that held is as wrong as a right way that broke.
func (e Experiment) Check(r Result) error {
	if r == e.Want {
		return nil
	}
	var diff []string
	add := func(what string, got, want any) {
		if got != want {
			diff = append(diff, fmt.Sprintf("%s %v, want %v", what, got, want))
		}
	}
	add("name", r.Name, e.Want.Name)
	add("callers", r.Callers, e.Want.Callers)
	add("limit", r.Limit, e.Want.Limit)
	add("created", r.Created, e.Want.Created)
	add("refused", r.Refused, e.Want.Refused)
	add("busy", r.Busy, e.Want.Busy)
	add("errors", r.Errors, e.Want.Errors)
	add("rows", r.Rows, e.Want.Rows)
	add("holds", r.Holds, e.Want.Holds)
	return fmt.Errorf("racelab: %s: %s", e.Name, strings.Join(diff, "; "))
}
