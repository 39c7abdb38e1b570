package racelab

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/repository"
)

const (
	ownSchema      = "racelab"
	latchkeySchema = "latchkey"

	// patience is the lock timeout of calls that are to get their lock: more than a loaded machine needs.
	patience = 10 * time.Second

	// labConns are one that watches pg_locks and one for a transaction of the lab's own.
	labConns = 2

	// pollEvery is how often pg_locks is read. Nothing depends on it except how exact a timeline is.
	pollEvery = time.Millisecond
)

// The statements run one at a time in the whole database: IF NOT EXISTS alone fails when two sessions
// create the same name at once. LIKE copies latchkey's columns and defaults, and not its indexes.
const createOwnSchema = `
SELECT pg_advisory_xact_lock(latchkey.lock_key('racelab', 'schema'));
CREATE SCHEMA IF NOT EXISTS racelab;
CREATE TABLE IF NOT EXISTS racelab.users (id uuid PRIMARY KEY);
CREATE TABLE IF NOT EXISTS racelab.setup_requests (LIKE latchkey.setup_requests INCLUDING DEFAULTS);`

// lab is the frame that all experiments share: the callers on their own connections, what became of
// them, and the means to wait until they are where the schedule wants them.
type lab struct {
	pool    *pgxpool.Pool // the lab's own connections, which prepare, watch and count
	user    uuid.UUID
	users   []string // all of the experiment's, user among them; as text, for the exec modes that ask no types
	key     int64    // of user's lock
	callers []*caller
	broken  bool // a promise other than the limit was broken

	gateOpens sync.Once
	gateErr   error // written by gateOpens

	mu         sync.Mutex // guards everything below, and the callers' state; never held during a query
	began      time.Time
	result     Result
	unexpected error
	timeline   Timeline
}

// caller is one request, of a service with a pool and a Repository of its own. The pool has a single
// connection, so that the backend that the lab watches is the one that works.
type caller struct {
	name string
	pid  uint32
	pool *pgxpool.Pool
	repo *repository.Repository
	user uuid.UUID

	doing   string // the step that it is in
	seen    bool   // it was seen waiting in this step
	checked bool   // it is past its check, at the gate
	ended   bool   // its attempt has ended
}

// attempt is one try at a pending request. It returns nil when it made one.
type attempt func(context.Context, *lab, *caller) error

func open(ctx context.Context, e Experiment, url string) (_ *lab, err error) {
	l := &lab{result: Result{Name: e.Name, Callers: e.Want.Callers, Limit: e.Want.Limit}}
	defer func() {
		if err != nil {
			l.close()
		}
	}()

	if l.pool, err = connect(ctx, url, labConns, e.schema, nil); err != nil {
		return l, err
	}
	if _, err = l.pool.Exec(ctx, createOwnSchema, pgx.QueryExecModeSimpleProtocol); err != nil {
		return l, err
	}
	l.user = l.another()
	if _, err = l.pool.Exec(ctx, "INSERT INTO racelab.users (id) VALUES ($1)", l.user); err != nil {
		return l, err
	}
	if l.key, err = repository.Key("setup_request", l.user.String()); err != nil {
		return l, err
	}

	for i := range e.Want.Callers {
		c := &caller{name: string(rune('A' + i)), user: l.user}
		if c.pool, err = connect(ctx, url, 1, e.schema, e.settings); err != nil {
			return l, err
		}
		l.callers = append(l.callers, c)
		if c.repo, err = repository.New(c.pool, repository.WithLockTimeout(patience)); err != nil {
			return l, err
		}
		if err = c.pool.QueryRow(ctx, "SELECT pg_backend_pid()").Scan(&c.pid); err != nil {
			return l, err
		}
	}
	return l, nil
}

// connect opens a pool whose connections have the search_path and the settings that an experiment asks for.
func connect(
	ctx context.Context, url string, conns int32, searchPath string, settings map[string]string,
) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = conns
	params := config.ConnConfig.RuntimeParams
	params["search_path"] = searchPath
	for name, value := range settings {
		params[name] = value
	}
	return pgxpool.NewWithConfig(ctx, config)
}

func (l *lab) close() {
	for _, c := range l.callers {
		c.pool.Close()
	}
	if l.pool != nil {
		l.pool.Close()
	}
}

// another returns a user that no other run has.
func (l *lab) another() uuid.UUID {
	user := uuid.New()
	l.users = append(l.users, user.String())
	return user
}

func (l *lab) rows(ctx context.Context) (n int, err error) {
	err = l.pool.QueryRow(ctx,
		"SELECT count(*) FROM setup_requests WHERE user_id = ANY ($1::uuid[]) AND status = 'pending'", l.users).Scan(&n)
	return n, err
}

// start lets callers, or all of them, attempt at the same time. The function that it returns waits until
// they have ended.
func (l *lab) start(ctx context.Context, attempt attempt, callers ...*caller) (wait func()) {
	if len(callers) == 0 {
		callers = l.callers
	}
	var wg sync.WaitGroup
	for _, c := range callers {
		l.mu.Lock()
		c.ended = false
		l.mu.Unlock()
		wg.Go(func() { l.end(c, attempt(ctx, l, c)) })
	}
	return wg.Wait
}

// one lets c attempt until it has ended, and puts on the timeline if it was seen waiting.
func (l *lab) one(ctx context.Context, attempt attempt, c *caller) error {
	wait := l.start(ctx, attempt, c)
	defer wait()
	return l.awaitWaiting(ctx, c)
}

// end books how an attempt ended.
func (l *lab) end(c *caller, err error) {
	var limit *repository.LimitError
	indexOnly := sqlState(err) == "23505"
	outcome := ""

	l.mu.Lock()
	c.ended = true
	switch {
	case err == nil:
		l.result.Created++
		outcome = "created"
	case indexOnly:
		l.result.Errors++
		outcome = "ERROR: 23505, stopped by the unique index"
	case errors.As(err, &limit):
		l.result.Refused++
		outcome = fmt.Sprintf("refused: %d of %d pending", limit.Used, limit.Limit)
	case errors.Is(err, errLimit):
		l.result.Refused++
		outcome = fmt.Sprintf("refused: %d pending already", l.result.Limit)
	case errors.Is(err, repository.ErrLockBusy):
		l.result.Busy++
		outcome = "busy"
	default:
		l.result.Errors++
		l.unexpected = errors.Join(l.unexpected, fmt.Errorf("%s: %s: %w", c.name, c.doing, err))
		outcome = "ERROR: " + err.Error()
	}
	l.mu.Unlock()

	l.say(c, outcome)
}

// gate keeps c between its check and its insert until all others are as far, or cannot get there before c
// is through. After that it stays open for those who come later or again.
func (l *lab) gate(ctx context.Context, c *caller) error {
	l.mu.Lock()
	c.checked = true
	l.mu.Unlock()

	l.gateOpens.Do(func() {
		var waits map[*caller]lockWait
		if waits, l.gateErr = l.settle(ctx); l.gateErr != nil {
			return
		}
		if len(waits) == 0 {
			l.say(nil, "all have checked, nobody has written: the lab lets them write")
		} else {
			l.say(nil, "one has checked, the other waits: the lab lets it write")
		}
	})
	return l.gateErr
}

// settle waits until every caller is at the gate, has ended, or is seen waiting in pg_locks, so that nobody
// moves unless the lab does something. It returns who waits, and for what.
func (l *lab) settle(ctx context.Context) (map[*caller]lockWait, error) {
	for {
		waits, err := l.waits(ctx)
		if err != nil {
			return nil, err
		}
		if l.settled(waits) {
			return waits, nil
		}
		if err := pause(ctx); err != nil {
			return nil, fmt.Errorf("callers neither check nor wait: %w", err)
		}
	}
}

func (l *lab) settled(waits map[*caller]lockWait) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, c := range l.callers {
		if waits[c] == (lockWait{}) && !c.checked && !c.ended {
			return false
		}
	}
	return true
}

// awaitWaiting waits until c is seen waiting for its user's lock, or has ended: as what, its result says.
func (l *lab) awaitWaiting(ctx context.Context, c *caller) error {
	for {
		waits, err := l.waits(ctx)
		if err != nil {
			return err
		}
		l.mu.Lock()
		ended := c.ended
		l.mu.Unlock()
		if ended || waits[c].kind == "advisory" {
			return nil
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("%s neither waits nor ends: %w", c.name, err)
		}
	}
}

func pause(ctx context.Context) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(pollEvery):
		return nil
	}
}

// lockWait is what pg_locks shows of a backend that waits. The zero value is one that does not.
type lockWait struct {
	kind string // its locktype
	past bool   // the backend has an advisory lock already
}

func (w lockWait) String() string {
	switch {
	case w.kind == "advisory":
		return "waits for the lock"
	case w.past:
		return "has the lock; its INSERT waits"
	default:
		return "waits for the row"
	}
}

// waits reads from pg_locks which callers wait, and for what. Other kinds of lock than these three, such
// as the one to extend a table, are over by themselves and mean nothing here.
func (l *lab) waits(ctx context.Context) (map[*caller]lockWait, error) {
	byPID := make(map[uint32]*caller, len(l.callers))
	pids := make([]int64, 0, len(l.callers))
	for _, c := range l.callers {
		byPID[c.pid] = c
		pids = append(pids, int64(c.pid))
	}
	rows, err := l.pool.Query(ctx, `
SELECT pid, locktype, pid IN (SELECT pid FROM pg_catalog.pg_locks WHERE granted AND locktype = 'advisory')
FROM pg_catalog.pg_locks
WHERE pid = ANY ($1) AND NOT granted AND locktype IN ('advisory', 'transactionid', 'tuple')`, pids)
	if err != nil {
		return nil, err
	}
	waits := make(map[*caller]lockWait)
	var pid uint32
	var wait lockWait
	_, err = pgx.ForEachRow(rows, []any{&pid, &wait.kind, &wait.past}, func() error {
		c := byPID[pid]
		waits[c] = wait
		l.sayOnce(c, wait.String())
		return nil
	})
	return waits, err
}

// hold lets c take its user's lock with the given function in a transaction that stays open until
// release rolls it back; a second release does nothing.
func (l *lab) hold(ctx context.Context, c *caller, lockFunction string) (release func(), err error) {
	l.do(c, "BEGIN; "+lockFunction)
	tx, err := c.pool.Begin(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, "SELECT "+lockFunction+"($1)", l.key); err != nil {
		rollback(ctx, tx)
		return nil, err
	}
	l.say(c, "held")
	return sync.OnceFunc(func() {
		l.do(c, "ROLLBACK")
		rollback(ctx, tx)
		l.say(c, "the transaction is over")
	}), nil
}

// holdsLock reports whether c's connection has its user's lock according to pg_locks.
func (l *lab) holdsLock(ctx context.Context, c *caller) (held bool, err error) {
	err = l.pool.QueryRow(ctx, `
SELECT EXISTS (
    SELECT
    FROM pg_catalog.pg_locks
    WHERE pid = $1 AND granted AND locktype = 'advisory'
      AND objsubid = 1 -- the form with one bigint
      AND (classid::bigint << 32) | objid::bigint = $2
)`, int64(c.pid), l.key).Scan(&held)
	return held, err
}

// do says what c is about to do.
func (l *lab) do(c *caller, step string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	c.doing, c.seen = step, false
	l.startClock()
}

func (l *lab) startClock() {
	if l.began.IsZero() {
		l.began = time.Now()
	}
}

// say puts on the timeline how c's step came out, or what the lab does when c is nil.
func (l *lab) say(c *caller, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.sayLocked(c, text)
}

func (l *lab) sayLocked(c *caller, text string) {
	l.startClock()
	event := Event{At: time.Since(l.began), Text: text}
	if c != nil {
		event.Caller, event.Text = c.name, c.doing+" -> "+text
	}
	l.timeline = append(l.timeline, event)
}

// sayOnce is say for what is seen again and again while c is in the same step.
func (l *lab) sayOnce(c *caller, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if c.seen || c.ended {
		return
	}
	c.seen = true
	l.sayLocked(c, text)
}
