//go:build unix

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/tests/internal/history"
)

// found is what is in the database at the end.
type found struct {
	setups  map[string][]history.Row // by user
	tickets map[string][]history.Row // by desk
	balance map[uuid.UUID]int64
	moves   map[uuid.UUID][]move   // by account; a transfer is in both
	fences  map[string]int64       // by lease
	events  map[string]map[int]int // by aggregate, how many of each call
}

// move is a deposit or withdrawal, or a transfer.
type move struct {
	id                 uuid.UUID
	from, to           *uuid.UUID
	amount             int64
	key                string
	fromAfter, toAfter int64
}

// check compares what the calls say with what is in the database, and looks for an order of the calls in which all is
// as it was answered.
func (r *round) check(ctx context.Context, pictures string) error {
	conn, err := pgx.Connect(ctx, r.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	broken, err := history.Audit(ctx, conn)
	if err != nil {
		return err
	}
	for _, line := range broken {
		r.fail(line)
	}
	f, err := read(ctx, conn)
	if err != nil {
		return err
	}

	subjects := make(chan subject)
	var checkers sync.WaitGroup
	for range runtime.GOMAXPROCS(0) {
		checkers.Go(func() {
			for s := range subjects {
				r.checkOne(s, f, pictures)
			}
		})
	}
	for _, stage := range r.stages {
		for _, s := range stage.all {
			subjects <- s
		}
	}
	close(subjects)
	checkers.Wait()
	return nil
}

func (r *round) checkOne(s subject, f *found, pictures string) {
	h := s.record()
	ops := h.Ops()
	// The acknowledged rows must be there, and of an error that says that nothing was written, no event.
	there, events := s.observe(f)
	for _, op := range ops {
		if id := acknowledged(op.Out); id != uuid.Nil && !there[id] {
			r.mu.Lock()
			r.lost++
			r.violations = append(r.violations, fmt.Sprintf("%s: an acknowledged write is lost: %v", h.Name, op))
			r.mu.Unlock()
		}
	}
	if events != nil {
		r.checkEvents(h, events, len(there))
		for _, op := range ops {
			if _, unknown := op.Out.(history.Unknown); unknown && writes(op) && events[op.Number] == 0 {
				h.Learn(op, notWritten)
			}
		}
	}

	began := time.Now()
	verdict := h.Check(checkTimeout)
	took := time.Since(began)
	picture := ""
	switch verdict {
	case history.Broken:
		picture = r.draw(h, pictures)
	case history.Undecided:
		say("seed %d: not decided in %v: %v", r.seed, checkTimeout, h)
	default:
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.histories[verdict]++
	r.longest = max(r.longest, took)
	if verdict == history.Broken {
		r.violations = append(r.violations, fmt.Sprintf("not possible one at a time, see %s: %v", picture, h))
	}
}

// checkEvents checks that each write left exactly one event, and what was not written left none.
func (r *round) checkEvents(h *history.History, events map[int]int, writes int) {
	total := 0
	made := make(map[string]int) // by idempotency key
	for _, op := range h.Ops() {
		n := events[op.Number]
		total += n
		most := 0
		switch op.Out.(type) {
		case history.Created, history.Moved, history.Unknown:
			most = 1
		}
		key := keyOf(op)
		made[key] += n
		_, unknown := op.Out.(history.Unknown)
		if n > most || most == 1 && n == 0 && key == "" && !unknown {
			r.fail(fmt.Sprintf("%s: %d events in the outbox of %v", h.Name, n, op))
		}
	}
	for key, n := range made {
		if key != "" && n > 1 {
			r.fail(fmt.Sprintf("%s: %d events in the outbox of what was done once, under key %s", h.Name, n, key))
		}
	}
	if total != writes {
		r.fail(fmt.Sprintf("%s: %d events in the outbox of %d writes", h.Name, total, writes))
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.events += total
}

// keyOf returns the idempotency key of a call, with whose it is.
func keyOf(op *history.Op) string {
	switch in := op.In.(type) {
	case history.Create:
		return in.Key
	case history.Move:
		return keyOfMove(in)
	}
	return ""
}

func keyOfMove(m history.Move) string {
	if m.Key == "" {
		return ""
	}
	return strconv.Itoa(m.Keeper()) + "/" + m.Key
}

func acknowledged(out any) uuid.UUID {
	switch out := out.(type) {
	case history.Created:
		return out.ID
	case history.Moved:
		return out.ID
	}
	return uuid.Nil
}

// writes says whether a call writes an event, if those of its history do.
func writes(op *history.Op) bool {
	switch op.In.(type) {
	case history.Create, history.Move:
		return true
	}
	return false
}

// notWritten is what is learned of a call that has left nothing.
var notWritten = history.Nothing{Why: "nothing was found of it in the end"}

// never finds the calls of unknown outcome whose idempotency key nothing was written under, to make the check shorter.
func never(h *history.History, used map[string]bool) {
	for _, op := range h.Ops() {
		if _, unknown := op.Out.(history.Unknown); unknown && keyOf(op) != "" && !used[keyOf(op)] {
			h.Learn(op, notWritten)
		}
	}
}

// draw writes the picture of a history and returns where it is.
func (r *round) draw(h *history.History, folder string) string {
	path := filepath.Join(folder, fmt.Sprintf("latchkey-faults-%d-%s.html", r.seed, strings.ReplaceAll(h.Name, " ", "-")))
	file, err := os.Create(path)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	if err := h.Draw(file, checkTimeout); err != nil {
		return err.Error()
	}
	return path
}

func (u *user) observe(f *found) (there map[uuid.UUID]bool, events map[int]int) {
	rows := f.setups[u.id.String()]
	u.Observe(history.List{}, history.Listed{Rows: rows})
	never(u.History, keysOf(rows))
	if u.events {
		events = f.eventsOf(u.id.String())
	}
	return idsOf(rows), events
}

func (d *desk) observe(f *found) (there map[uuid.UUID]bool, events map[int]int) {
	rows := f.tickets[d.name]
	for i := range rows {
		rows[i].Max = d.most
	}
	d.Observe(history.List{}, history.Listed{Rows: rows})
	never(d.History, keysOf(rows))
	return idsOf(rows), nil
}

func (b *bank) observe(f *found) (there map[uuid.UUID]bool, events map[int]int) {
	there = make(map[uuid.UUID]bool)
	numbers := make(map[uuid.UUID]int)
	out := history.Booked{}
	for i, id := range b.accounts {
		numbers[id] = i
		out.Balances = append(out.Balances, f.balance[id])
	}
	number := func(id *uuid.UUID) int {
		if id == nil {
			return history.None
		}
		return numbers[*id]
	}
	for _, id := range b.accounts {
		for _, m := range f.moves[id] {
			if there[m.id] {
				continue
			}
			there[m.id] = true
			out.Moves = append(out.Moves, history.Posted{
				Move: history.Move{From: number(m.from), To: number(m.to), Amount: m.amount, Key: m.key},
				ID:   m.id, FromAfter: m.fromAfter, ToAfter: m.toAfter,
			})
		}
	}
	b.Observe(history.Books{}, out)
	b.learn(out.Moves)
	if b.events {
		events = f.eventsOf(b.name)
	}
	return there, events
}

// learn takes what calls did not tell from what was posted: the balances after a transfer, and of a call of unknown
// outcome what was done under its idempotency key.
func (b *bank) learn(moves []history.Posted) {
	byKey, byID := make(map[string]history.Posted), make(map[uuid.UUID]history.Posted)
	for _, p := range moves {
		byKey[keyOfMove(p.Move)], byID[p.ID] = p, p
	}
	for _, op := range b.Ops() {
		switch out := op.Out.(type) {
		case history.Moved:
			if p, ok := byID[out.ID]; ok && out.FromAfter == history.Untold {
				b.Learn(op, history.Moved{ID: p.ID, FromAfter: p.FromAfter, ToAfter: p.ToAfter})
			}
		case history.Unknown:
			p, done := byKey[keyOf(op)]
			switch {
			case keyOf(op) == "":
			case done && p.Move == op.In:
				b.Learn(op, history.Moved{ID: p.ID, FromAfter: p.FromAfter, ToAfter: p.ToAfter})
			default:
				b.Learn(op, notWritten)
			}
		}
	}
}

func (j *job) observe(f *found) (there map[uuid.UUID]bool, events map[int]int) {
	j.Observe(history.Token{}, history.Given{Fence: f.fences[j.name]})
	return nil, nil
}

func (f *found) eventsOf(aggregate string) map[int]int {
	if events := f.events[aggregate]; events != nil {
		return events
	}
	return map[int]int{}
}

func idsOf(rows []history.Row) map[uuid.UUID]bool {
	ids := make(map[uuid.UUID]bool)
	for _, row := range rows {
		ids[row.ID] = true
	}
	return ids
}

func keysOf(rows []history.Row) map[string]bool {
	keys := make(map[string]bool)
	for _, row := range rows {
		keys[row.Key] = true
	}
	return keys
}

// read reads all that the round has written.
func read(ctx context.Context, conn *pgx.Conn) (*found, error) {
	f := &found{
		setups: make(map[string][]history.Row), tickets: make(map[string][]history.Row), balance: make(map[uuid.UUID]int64),
		moves: make(map[uuid.UUID][]move), fences: make(map[string]int64), events: make(map[string]map[int]int),
	}
	var (
		owner string
		row   history.Row
		id    uuid.UUID
		n     int64
		m     move
		op    int
	)
	each := func(sql string, scans []any, do func()) error {
		rows, err := conn.Query(ctx, sql)
		if err != nil {
			return err
		}
		_, err = pgx.ForEachRow(rows, scans, func() error { do(); return nil })
		return err
	}
	for _, q := range []struct {
		sql   string
		scans []any
		do    func()
	}{
		{
			"SELECT user_id::text, id, coalesce(idempotency_key, ''), max_pending, status FROM latchkey.setup_requests",
			[]any{&owner, &row.ID, &row.Key, &row.Max, &row.Status},
			func() { f.setups[owner] = append(f.setups[owner], row) },
		},
		{
			"SELECT desk, id, key, 0, 'pending' FROM host.tickets",
			[]any{&owner, &row.ID, &row.Key, &row.Max, &row.Status},
			func() { f.tickets[owner] = append(f.tickets[owner], row) },
		},
		{"SELECT id, balance FROM latchkey.accounts", []any{&id, &n}, func() { f.balance[id] = n }},
		{"SELECT name, fence FROM latchkey.leases", []any{&owner, &n}, func() { f.fences[owner] = n }},
		{
			"SELECT aggregate_key, (payload->>'op')::integer, count(*) FROM latchkey.outbox GROUP BY 1, 2",
			[]any{&owner, &op, &n},
			func() {
				if f.events[owner] == nil {
					f.events[owner] = make(map[int]int)
				}
				f.events[owner][op] = int(n)
			},
		},
		{
			`
			SELECT id, CASE kind WHEN 'withdrawal' THEN account_id END, CASE kind WHEN 'deposit' THEN account_id END, amount,
				coalesce(idempotency_key, ''),
				CASE kind WHEN 'withdrawal' THEN balance_after ELSE 0 END, CASE kind WHEN 'deposit' THEN balance_after ELSE 0 END
			FROM latchkey.entries
			WHERE transfer_id IS NULL
			UNION ALL
			SELECT t.id, o.account_id, i.account_id, t.amount, coalesce(o.idempotency_key, ''), o.balance_after, i.balance_after
			FROM latchkey.transfers AS t
			JOIN latchkey.entries AS o ON o.transfer_id = t.id AND o.kind = 'transfer_out'
			JOIN latchkey.entries AS i ON i.transfer_id = t.id AND i.kind = 'transfer_in'`,
			[]any{&m.id, &m.from, &m.to, &m.amount, &m.key, &m.fromAfter, &m.toAfter},
			func() {
				for _, account := range []*uuid.UUID{m.from, m.to} {
					if account != nil {
						f.moves[*account] = append(f.moves[*account], m)
					}
				}
			},
		},
	} {
		if err := each(q.sql, q.scans, q.do); err != nil {
			return nil, err
		}
	}
	return f, nil
}
