//go:build unix

package main

import (
	"context"
	"encoding/json"
	"errors"
	"math/rand/v2"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/history"
)

const (
	// longest and mostUnknown are when a history is ended, and another begun: to check one takes time that is
	// exponential in what overlaps, and a call of unknown outcome overlaps all that comes after it.
	longest     = 40
	mostUnknown = 3

	// callTimeout bounds a call whose server does not answer; lockTimeout is well below it.
	callTimeout = 1500 * time.Millisecond
	lockTimeout = 400 * time.Millisecond
)

// process is what a process of the host has. There are two, so that calls meet in the queue and at the server.
type process struct {
	number int
	pool   *pgxpool.Pool
	repo   *repository.Repository
}

// worker makes one call after the other.
type worker struct {
	*process
	random *rand.Rand
	round  *round
	client int
}

// subject is what one history is about.
type subject interface {
	record() *history.History
	act(ctx context.Context, w *worker)
	// observe notes what is in the database in the end, and returns the rows that were written, and how many events
	// there are of each call, or nil if its calls have none.
	observe(f *found) (there map[uuid.UUID]bool, events map[int]int)
}

// stage is a kind of subjects, of which some are in use at a time.
type stage struct {
	begin func(random *rand.Rand) subject

	mu     sync.Mutex
	random *rand.Rand
	inUse  []subject
	all    []subject
}

// pick returns one that is in use.
func (s *stage) pick() subject {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := s.random.IntN(len(s.inUse))
	if s.inUse[i] != nil {
		if ops, unknown := s.inUse[i].record().Len(); ops < longest && unknown < mostUnknown {
			return s.inUse[i]
		}
	}
	s.inUse[i] = s.begin(s.random)
	s.all = append(s.all, s.inUse[i])
	return s.inUse[i]
}

// work makes calls until ctx ends. Each ends by itself.
func (w *worker) work(ctx context.Context) {
	for ctx.Err() == nil {
		w.round.stages[w.random.IntN(len(w.round.stages))].pick().act(context.WithoutCancel(ctx), w)
	}
}

// do makes a call and records it.
func (w *worker) do(ctx context.Context, h *history.History, in any, call func(ctx context.Context, op *history.Op) (any, error)) any {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if w.random.IntN(20) == 0 {
		defer time.AfterFunc(time.Duration(w.random.Int64N(int64(8*time.Millisecond))), func() {
			if ctx.Err() == nil {
				w.round.faults.injected(contextCancelled)
				cancel()
			}
		}).Stop()
	}
	op := h.Call(w.client, in)
	began := time.Now()
	out, err := call(ctx, op)
	if err != nil {
		out = answer(err)
	}
	h.Return(op, out)
	w.round.note(w.number, began, out, err)
	switch out.(type) {
	case history.Unknown:
		w.client = w.round.newClient()
	case history.Nothing:
		// While nobody is there, a call fails at once.
		_ = pause(context.WithoutCancel(ctx), time.Duration(w.random.Int64N(int64(20*time.Millisecond))))
	}
	return out
}

// answer is what an error says.
func answer(err error) any {
	var limit *repository.LimitError
	var busy *repository.LockBusyError
	switch {
	case errors.Is(err, repository.ErrOutcomeUnknown):
		return history.Unknown{Why: "outcome unknown"}
	case errors.As(err, &limit) && errors.Is(err, repository.ErrDailyLimit):
		return history.OverLimit{Used: limit.Used, Limit: limit.Limit}
	case errors.As(err, &limit):
		return history.Refused{Used: int(limit.Used), Limit: int(limit.Limit)}
	case errors.Is(err, repository.ErrInsufficientFunds):
		return history.Insufficient{}
	case errors.Is(err, repository.ErrIdempotencyConflict):
		return history.Conflict{}
	case errors.Is(err, repository.ErrNotFound):
		return history.NotFound{}
	case errors.Is(err, repository.ErrNotPending):
		return history.NotPending{}
	case errors.Is(err, repository.ErrLeaseLost):
		return history.Lost{}
	case errors.As(err, &busy) && busy.Where == repository.WhereLease:
		return history.Taken{}
	}
	return history.Nothing{Why: kindOf(err)}
}

// unexpected begins the kind of an error that the faults do not explain.
const unexpected = "unexpected: "

// kindOf names an error that says that nothing was written.
func kindOf(err error) string {
	for _, kind := range []error{
		repository.ErrConnectionLost, repository.ErrLockBusy, repository.ErrReadOnly, repository.ErrDeadlock,
		repository.ErrSerialization, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, kind) {
			return kind.Error()
		}
	}
	// The host's own statement, in a Guard: cancelled by an operator, or by the role's statement_timeout.
	if pgErr := new(pgconn.PgError); errors.As(err, &pgErr) && pgErr.Code == "57014" {
		return "statement cancelled"
	}
	return unexpected + err.Error()
}

// event is one for the outbox, of a call that is told by its number.
func event(key string, op *history.Op) *repository.Event {
	return &repository.Event{Topic: "faults", AggregateKey: key, Payload: json.RawMessage(`{"op": ` + strconv.Itoa(op.Number) + `}`)}
}

// user is a user who has setup requests.
type user struct {
	*history.History
	id     uuid.UUID
	most   int  // that may be pending
	events bool // each write has one

	mu   sync.Mutex
	ids  []uuid.UUID
	keys []string
}

func beginUser(random *rand.Rand) subject {
	u := &user{id: uuid.New(), most: 1 + random.IntN(4), events: random.IntN(2) == 0}
	u.History = history.New("user "+u.id.String(), history.Setups())
	return u
}

func (u *user) record() *history.History { return u.History }

func (u *user) act(ctx context.Context, w *worker) {
	switch n := w.random.IntN(100); {
	case n < 50:
		u.create(ctx, w)
	case n < 80:
		u.end(ctx, w)
	case n < 88:
		if id, ok := u.known(w.random); ok {
			w.do(ctx, u.History, history.Get{ID: id}, func(ctx context.Context, _ *history.Op) (any, error) {
				s, err := w.repo.GetSetup(ctx, id)
				if err != nil {
					return nil, err
				}
				return history.Got{Status: string(s.Status)}, nil
			})
		}
	case n < 95:
		w.do(ctx, u.History, history.Count{}, func(ctx context.Context, _ *history.Op) (any, error) {
			n, err := w.repo.CountPendingSetups(ctx, u.id)
			return history.Counted{Pending: n}, err
		})
	default:
		w.do(ctx, u.History, history.List{}, func(ctx context.Context, _ *history.Op) (any, error) {
			setups, err := w.repo.ListSetups(ctx, u.id, &repository.ListOpts{Limit: 1000})
			var rows []history.Row
			for _, s := range setups {
				rows = append(rows, history.Row{ID: s.ID, Key: s.IdempotencyKey, Max: s.MaxPending, Status: string(s.Status)})
			}
			return history.Listed{Rows: rows}, err
		})
	}
}

func (u *user) create(ctx context.Context, w *worker) {
	in := history.Create{Max: u.most, Key: u.key(w.random)}
	if in.Key != "" && w.random.IntN(20) == 0 {
		in.Max++ // a conflict, if the key was used
	}
	method := w.repo.CreateSetup
	if w.random.IntN(10) == 0 {
		method = w.repo.TryCreateSetup
	}
	call := func(ctx context.Context, op *history.Op) (any, error) {
		opts := &repository.CreateSetupOpts{MaxPending: in.Max, IdempotencyKey: in.Key}
		if u.events {
			opts.Event = event(u.id.String(), op)
		}
		s, err := method(ctx, u.id, opts)
		if err != nil {
			return nil, err
		}
		return history.Created{ID: s.ID, Status: string(s.Status)}, nil
	}
	out := w.do(ctx, u.History, in, call)
	if _, unknown := out.(history.Unknown); unknown && in.Key != "" {
		out = w.do(ctx, u.History, in, call) // the key tells
	}
	if created, ok := out.(history.Created); ok {
		u.mu.Lock()
		u.ids = append(u.ids, created.ID)
		u.mu.Unlock()
	}
}

// key returns none, a new one, or one that was used.
func (u *user) key(random *rand.Rand) string {
	u.mu.Lock()
	defer u.mu.Unlock()
	return pickKey(random, &u.keys)
}

func pickKey(random *rand.Rand, keys *[]string) string {
	switch n := random.IntN(10); {
	case n < 4:
		return ""
	case n < 6 && len(*keys) > 0:
		return (*keys)[random.IntN(len(*keys))]
	}
	*keys = append(*keys, "k"+strconv.Itoa(len(*keys)))
	return (*keys)[len(*keys)-1]
}

func (u *user) known(random *rand.Rand) (uuid.UUID, bool) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if len(u.ids) == 0 {
		return uuid.Nil, false
	}
	return u.ids[max(0, len(u.ids)-1-random.IntN(4))], true
}

func (u *user) end(ctx context.Context, w *worker) {
	id, ok := u.known(w.random)
	if !ok {
		return
	}
	method, status := w.repo.CompleteSetup, repository.SetupCompleted
	if w.random.IntN(2) == 0 {
		method, status = w.repo.CancelSetup, repository.SetupCancelled
	}
	w.do(ctx, u.History, history.End{ID: id, Status: string(status)}, func(ctx context.Context, _ *history.Op) (any, error) {
		_, err := method(ctx, id)
		return history.Ended{}, err
	})
}

// desk is where tickets are given out, a table of the host's under a rule of its own.
type desk struct {
	*history.History
	name      string
	most      int
	unguarded bool
}

var (
	tickets  = repository.MustNamespace("faults_ticket")
	errNone  = errors.New("no ticket is left")
	ticketed = func(id uuid.UUID) history.Created { return history.Created{ID: id, Status: history.Pending} }
)

func (d *desk) record() *history.History { return d.History }

func (d *desk) act(ctx context.Context, w *worker) {
	method := d.guard
	switch {
	case d.unguarded:
		method = d.withoutLock
	case w.random.IntN(2) == 0:
		method = d.guardQuery
	}
	key := uuid.NewString() // it is no idempotency key, but tells which call wrote the row
	w.do(ctx, d.History, history.Create{Max: d.most, Key: key}, func(ctx context.Context, _ *history.Op) (any, error) {
		id, err := method(ctx, w, key)
		if errors.Is(err, errNone) {
			return history.Refused{Used: d.most, Limit: d.most}, nil
		}
		return ticketed(id), err
	})
}

func (d *desk) locks() []repository.Lock { return []repository.Lock{tickets.Exclusive(d.name)} }

func (d *desk) guard(ctx context.Context, w *worker, key string) (id uuid.UUID, err error) {
	err = w.repo.Guard(ctx, d.locks(), func(ctx context.Context, tx *repository.Tx) error {
		return d.give(ctx, tx, tx.Last(), key, &id)
	})
	return id, err
}

func (d *desk) give(ctx context.Context, q, last repository.DBTX, key string, id *uuid.UUID) error {
	var n int
	if err := q.QueryRow(ctx, "SELECT count(*) FROM host.tickets WHERE desk = $1", d.name).Scan(&n); err != nil {
		return err
	}
	if n >= d.most {
		return errNone
	}
	return last.QueryRow(ctx, "INSERT INTO host.tickets (desk, key) VALUES ($1, $2) RETURNING id", d.name, key).Scan(id)
}

func (d *desk) guardQuery(ctx context.Context, w *worker, key string) (uuid.UUID, error) {
	id, err := repository.GuardQuery(ctx, w.repo, d.locks(), func(ctx context.Context, q repository.DBTX) (id uuid.UUID, err error) {
		err = q.QueryRow(ctx, `
			INSERT INTO host.tickets (desk, key)
			SELECT $1, $2
			WHERE (SELECT count(*) FROM host.tickets WHERE desk = $1) < $3
			RETURNING id`, d.name, key, d.most).Scan(&id)
		return id, err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return id, errNone
	}
	return id, err
}

// withoutLock is the control: what the driver must find.
func (d *desk) withoutLock(ctx context.Context, w *worker, key string) (id uuid.UUID, err error) {
	err = pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error { return d.give(ctx, tx, tx, key, &id) })
	return id, err
}

// bank is a few accounts between which money moves.
type bank struct {
	*history.History
	name     string // of the outbox's aggregate
	accounts []uuid.UUID
	events   bool

	mu   sync.Mutex
	keys []string
}

func (b *bank) record() *history.History { return b.History }

func (b *bank) act(ctx context.Context, w *worker) {
	account := w.random.IntN(len(b.accounts))
	if w.random.IntN(10) == 0 {
		w.do(ctx, b.History, history.Balance{Account: account}, func(ctx context.Context, _ *history.Op) (any, error) {
			a, err := w.repo.GetAccount(ctx, b.accounts[account])
			if err != nil {
				return nil, err
			}
			return history.Balanced{Balance: a.Balance}, nil
		})
		return
	}
	b.mu.Lock()
	in := history.Move{From: history.None, To: history.None, Amount: 1 + w.random.Int64N(9), Key: pickKey(w.random, &b.keys)}
	b.mu.Unlock()
	switch w.random.IntN(3) {
	case 0:
		in.To = account
		in.Amount *= 2
	case 1:
		in.From = account
	default:
		in.From, in.To = account, (account+1+w.random.IntN(len(b.accounts)-1))%len(b.accounts)
	}
	call := func(ctx context.Context, op *history.Op) (any, error) { return b.move(ctx, w.repo, in, op) }
	if _, unknown := w.do(ctx, b.History, in, call).(history.Unknown); unknown && in.Key != "" {
		w.do(ctx, b.History, in, call) // the key tells
	}
}

func (b *bank) move(ctx context.Context, repo *repository.Repository, in history.Move, op *history.Op) (any, error) {
	var e *repository.Event
	if b.events {
		e = event(b.name, op)
	}
	var entry *repository.Entry
	var err error
	switch {
	case in.From == history.None:
		entry, err = repo.Deposit(ctx, repository.DepositParams{
			AccountID: b.accounts[in.To], Amount: in.Amount, IdempotencyKey: in.Key, Event: e,
		})
	case in.To == history.None:
		entry, err = repo.Withdraw(ctx, repository.WithdrawParams{
			AccountID: b.accounts[in.From], Amount: in.Amount, IdempotencyKey: in.Key, Event: e,
		})
	default:
		transfer, err := repo.Transfer(ctx, repository.TransferParams{
			From: b.accounts[in.From], To: b.accounts[in.To], Amount: in.Amount, IdempotencyKey: in.Key, Event: e,
		})
		if err != nil {
			return nil, err
		}
		return history.Moved{ID: transfer.ID, FromAfter: history.Untold, ToAfter: history.Untold}, nil
	}
	if err != nil {
		return nil, err
	}
	moved := history.Moved{ID: entry.ID, ToAfter: entry.BalanceAfter}
	if in.To == history.None {
		moved.FromAfter, moved.ToAfter = entry.BalanceAfter, 0
	}
	return moved, nil
}

// job is done under a lease of its name.
type job struct {
	*history.History
	name string

	mu   sync.Mutex
	held []*repository.Lease // some are over
}

func beginJob(*rand.Rand) subject {
	j := &job{name: uuid.NewString()}
	j.History = history.New("lease "+j.name, history.Leases())
	return j
}

func (j *job) record() *history.History { return j.History }

func (j *job) act(ctx context.Context, w *worker) {
	ttl := time.Duration(5+w.random.IntN(150)) * time.Millisecond // some end before they are renewed
	l := j.take(w.random)
	if l == nil || w.random.IntN(4) == 0 {
		j.giveBack(l)
		w.do(ctx, j.History, history.Acquire{TTL: ttl}, func(ctx context.Context, _ *history.Op) (any, error) {
			l, err := w.repo.AcquireLease(ctx, repository.LeaseParams{Name: j.name, TTL: ttl})
			if err != nil {
				return nil, err
			}
			j.giveBack(l)
			return history.Acquired{Fence: l.Fence}, nil
		})
		return
	}
	defer j.giveBack(l)
	if w.random.IntN(2) == 0 {
		w.do(ctx, j.History, history.Renew{Fence: l.Fence, TTL: ttl}, func(ctx context.Context, _ *history.Op) (any, error) {
			return history.Kept{}, w.repo.RenewLease(ctx, l, ttl)
		})
		return
	}
	w.do(ctx, j.History, history.Release{Fence: l.Fence}, func(ctx context.Context, _ *history.Op) (any, error) {
		return history.Released{}, w.repo.ReleaseLease(ctx, l)
	})
}

// take takes one of the last leases, which is for one goroutine at a time.
func (j *job) take(random *rand.Rand) *repository.Lease {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.held) == 0 {
		return nil
	}
	i := max(0, len(j.held)-1-random.IntN(2))
	l := j.held[i]
	j.held = slices.Delete(j.held, i, i+1)
	return l
}

func (j *job) giveBack(l *repository.Lease) {
	if l == nil {
		return
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	j.held = append(j.held, l)
	slices.SortFunc(j.held, func(a, b *repository.Lease) int { return int(a.Fence - b.Fence) })
}
