package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pgserver"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

const enableNotify = "ALTER TABLE latchkey.outbox ENABLE TRIGGER outbox_notify"

// dispatching is a Dispatcher that runs, and what it has said.
type dispatching struct {
	claimed atomic.Int64 // how many events
	done    chan repository.EventDone
	calls   chan repository.CallDone
	cancel  func()                   // says that it is to stop
	stop    func(t *testing.T) error // waits until it has, and returns what Run did
}

// dispatch runs a Dispatcher on pool until the test ends.
func dispatch(t *testing.T, pool *pgxpool.Pool, o repository.DispatcherOpts, h repository.Handler) *dispatching {
	t.Helper()
	d := &dispatching{done: make(chan repository.EventDone, 10_000), calls: make(chan repository.CallDone, 10_000)}
	repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
		CallDone: func(_ context.Context, c repository.CallDone) {
			select {
			case d.calls <- c:
			default: // nobody looks at so many
			}
		},
		EventsClaimed: func(_ context.Context, n int) { d.claimed.Add(int64(n)) },
		EventDone:     func(_ context.Context, e repository.EventDone) { d.done <- e },
	}))
	require.NoError(t, err)
	if o.PollInterval == 0 {
		o.PollInterval = 20 * time.Millisecond
	}
	if o.StopTimeout == 0 {
		o.StopTimeout = 100 * time.Millisecond // a test that ends need not wait for its handlers
	}
	dispatcher, err := repository.NewDispatcher(repo, h, &o)
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	d.cancel = cancel
	ended := make(chan struct{})
	var result error
	go func() {
		defer close(ended)
		result = dispatcher.Run(ctx)
	}()
	d.stop = func(t *testing.T) error {
		t.Helper()
		cancel()
		receive(t, ended)
		return result
	}
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return d
}

// nextCall waits for a call of the method whose error is what is looked for.
func (d *dispatching) nextCall(t *testing.T, method string, is func(err error) bool) {
	t.Helper()
	bound := time.After(patience)
	for {
		select {
		case c := <-d.calls:
			if c.Method == method && is(c.Err) {
				return
			}
		case <-bound:
			require.FailNow(t, "waited in vain for "+method)
		}
	}
}

func succeeded(err error) bool { return err == nil }
func failed(err error) bool    { return err != nil }
func readOnly(err error) bool  { return errors.Is(err, repository.ErrReadOnly) }

// held is a handler that says when it begins, and returns what it is told to, or that its context has ended.
type held struct {
	began  chan repository.ClaimedEvent
	result chan error
	causes chan error // of contexts that ended
}

func newHeld() *held {
	return &held{make(chan repository.ClaimedEvent, 100), make(chan error, 100), make(chan error, 100)}
}

func (h *held) handle(ctx context.Context, e repository.ClaimedEvent) error {
	h.began <- e
	select {
	case err := <-h.result:
		return err
	case <-ctx.Done():
		h.causes <- context.Cause(ctx)
		return ctx.Err()
	}
}

func TestDispatcherHandlesEachEventInItsOrder(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	const concurrency, aggregates, each = 5, 8, 20
	o.exec(t, `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
		SELECT 'test', CASE WHEN n % 8 > 0 THEN 'a' || n % 8 END, to_jsonb(n) FROM generate_series(1, $1::integer) AS n`, aggregates*each)
	var (
		mu      sync.Mutex
		handled = map[string][]int{}
		running atomic.Int32
		most    atomic.Int32
	)
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Concurrency: concurrency, PollInterval: time.Hour},
		func(_ context.Context, e repository.ClaimedEvent) error {
			if n := running.Add(1); n > most.Load() {
				most.Store(n)
			}
			defer running.Add(-1)
			var n int
			if err := json.Unmarshal(e.Payload, &n); err != nil {
				return err
			}
			mu.Lock()
			defer mu.Unlock()
			handled[e.AggregateKey] = append(handled[e.AggregateKey], n)
			return nil
		})
	for range aggregates * each {
		e := receive(t, d.done)
		require.NoError(t, e.Err)
		require.Equal(t, "test", e.Topic)
		require.Equal(t, 1, e.Attempt)
	}
	require.NoError(t, d.stop(t))
	require.LessOrEqual(t, most.Load(), int32(concurrency))
	require.EqualValues(t, aggregates*each, d.claimed.Load())
	require.Equal(t, map[string]int{"done": aggregates * each}, o.states(t))
	require.Len(t, handled, aggregates)
	for key, list := range handled {
		require.Len(t, list, each, key)
		require.True(t, key == "" || slices.IsSorted(list), "%s: %v", key, list)
	}
}

func TestDispatcherClaimsNoMoreThanItCanBegin(t *testing.T) {
	t.Parallel()
	o, h := newOffice(t), newHeld()
	o.enqueue(t, "", "", "", "", "")
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Concurrency: 2}, h.handle)
	receive(t, h.began)
	receive(t, h.began)
	require.Equal(t, map[string]int{"claimed": 2, "ready": 3}, o.states(t))
	for range 3 {
		h.result <- nil
		require.NoError(t, receive(t, d.done).Err)
		receive(t, h.began)
	}
	require.Equal(t, map[string]int{"claimed": 2, "done": 3}, o.states(t))
}

func TestDispatcherTakesItsTopics(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	o.enqueueEvent(t, repository.Event{Topic: "other"})
	mine := o.enqueueEvent(t, repository.Event{Topic: "mine"})
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Topics: []string{"mine"}, Worker: "me"},
		func(_ context.Context, e repository.ClaimedEvent) error { return errors.New(e.Worker) })
	e := receive(t, d.done)
	require.Equal(t, mine, e.EventID)
	require.EqualError(t, e.Err, "me")
	require.NoError(t, d.stop(t))
	require.Equal(t, map[string]int{"ready": 2}, o.states(t))
}

// What the observer is told of an extension comes after it, so that the rows can be looked at.
func TestDispatcherRenewsLeases(t *testing.T) {
	t.Parallel()
	o, h := newOffice(t), newHeld()
	o.enqueue(t, "", "", "a", "b", "c")
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: 3 * time.Second}, h.handle)
	var last time.Time
	for range 5 {
		if e := receive(t, h.began); e.LeaseUntil.After(last) {
			last = e.LeaseUntil
		}
	}
	d.nextCall(t, "ExtendClaims", succeeded)
	require.Equal(t, 5, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE lease_until > $1", last), "by one statement")
	waitUntil(t, o.observer, "SELECT clock_timestamp() > $1::timestamptz", last)
	require.Equal(t, 5, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE state = 'claimed' AND lease_until > clock_timestamp() AND fence = 1"))
	for range 5 {
		h.result <- nil
		require.NoError(t, receive(t, d.done).Err)
	}
	require.Empty(t, h.causes)
	require.Equal(t, map[string]int{"done": 5}, o.states(t))
}

func TestDispatcherLosesALease(t *testing.T) {
	t.Parallel()
	t.Run("that somebody else was given", func(t *testing.T) {
		t.Parallel()
		o, h := newOffice(t), newHeld()
		o.enqueue(t, "a", "b")
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: 6 * time.Second}, h.handle)
		first, second := receive(t, h.began), receive(t, h.began)
		o.exec(t, "UPDATE latchkey.outbox SET owner = 'other', fence = fence + 1, lease_until = clock_timestamp() + interval '1 hour' WHERE id = $1", first.EventID)
		before := o.versions(t, "outbox")
		require.ErrorIs(t, receive(t, h.causes), repository.ErrLeaseLost)
		d.nextCall(t, "ExtendClaims", succeeded)
		for len(d.calls) > 0 {
			require.NotEqual(t, "ExtendClaims", receive(t, d.calls).Method, "the first one has said it; another is two seconds away")
		}
		e := receive(t, d.done)
		require.Equal(t, first.EventID, e.EventID)
		require.ErrorIs(t, e.Err, repository.ErrLeaseLost)
		require.ErrorIs(t, e.Err, context.Canceled, "what the handler returned")
		require.Contains(t, before, o.version(t, first.EventID), "nothing was changed")
		h.result <- nil
		e = receive(t, d.done)
		require.Equal(t, second.EventID, e.EventID)
		require.NoError(t, e.Err, "the other one's was not lost")
	})
	t.Run("before it ends, if it cannot be renewed, and only that", func(t *testing.T) {
		t.Parallel()
		o, h, lease := newOffice(t), newHeld(), 5*time.Second
		o.enqueue(t, "a", "b")
		asked := time.Now() // the leases end no sooner than a lease after this
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: lease}, h.handle)
		first := receive(t, h.began)
		locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", first.EventID)
		require.NoError(t, err)
		require.ErrorIs(t, receive(t, h.causes), repository.ErrLeaseLost)
		require.Less(t, time.Since(asked), lease)
		require.NoError(t, locker.Rollback(t.Context()))
		require.Equal(t, first.EventID, receive(t, d.done).EventID)
		waitUntil(t, o.observer, "SELECT clock_timestamp() > $1::timestamptz", first.LeaseUntil)
		require.Empty(t, h.causes)
		require.Equal(t, 1, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE id <> $1 AND lease_until > clock_timestamp()", first.EventID))
	})
	t.Run("to itself, and does not take the end of the later attempt for that of the one before", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "locked")
		began, end := make(chan repository.ClaimedEvent), make(map[repository.EventID]chan struct{})
		for _, id := range ids {
			end[id] = make(chan struct{})
		}
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: time.Hour}, func(_ context.Context, e repository.ClaimedEvent) error {
			began <- e
			<-end[e.EventID]
			return nil
		})
		receive(t, began)
		receive(t, began)
		o.exec(t, "UPDATE latchkey.outbox SET lease_until = clock_timestamp() WHERE id = $1", ids[0])
		require.Equal(t, int64(2), receive(t, began).Fence)

		// Both attempts end while the Dispatcher waits for the row of the other event, so it settles them together.
		locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", ids[1])
		require.NoError(t, err)
		close(end[ids[1]])
		waitUntil(t, o.observer, `SELECT EXISTS (SELECT FROM pg_locks AS l JOIN pg_stat_activity AS a USING (pid)
			WHERE NOT l.granted AND a.datname = current_database() AND a.query LIKE '-- name: OutboxComplete%')`)
		close(end[ids[0]])
		results := map[int]error{}
		for range 2 {
			e := receive(t, d.done)
			require.Equal(t, ids[0], e.EventID)
			results[e.Attempt] = e.Err
		}
		require.ErrorIs(t, results[1], repository.ErrLeaseLost)
		require.NoError(t, results[2])
		require.Len(t, results, 2)
	})
	t.Run("and says so if the handler did not notice", func(t *testing.T) {
		t.Parallel()
		o, h := newOffice(t), newHeld()
		o.enqueue(t, "a")
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: time.Hour}, h.handle)
		receive(t, h.began)
		o.exec(t, "UPDATE latchkey.outbox SET owner = 'other', fence = fence + 1")
		h.result <- nil
		require.ErrorIs(t, receive(t, d.done).Err, repository.ErrLeaseLost)
		require.Equal(t, map[string]int{"claimed": 1}, o.states(t))
	})
}

// version is the row of the event, as versions has it.
func (o *office) version(t *testing.T, id repository.EventID) string {
	t.Helper()
	return value[string](t, o, "SELECT concat_ws(' ', r.ctid, r.xmin, r.xmax, to_jsonb(r)) FROM latchkey.outbox AS r WHERE id = $1", id)
}

func TestDispatcherTriesAgain(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name string
		fail func() error
		want string
	}{
		{"after an error", func() error { return errors.New("no") }, "^no$"},
		{"after a panic", func() error { panic("oops") }, "(?s)^panic: oops\ngoroutine .*"},
		{"after a handler that ended its goroutine", func() error { runtime.Goexit(); return nil }, "ended its goroutine"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			id := o.enqueueEvent(t, repository.Event{Topic: "test", MaxAttempts: 2})
			d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{}, func(context.Context, repository.ClaimedEvent) error { return test.fail() })
			for attempt := 1; attempt <= 2; attempt++ {
				e := receive(t, d.done)
				require.Equal(t, attempt, e.Attempt)
				require.Regexp(t, test.want, e.Err.Error())
				require.Regexp(t, test.want, value[string](t, o, "SELECT last_error FROM latchkey.outbox"))
			}
			require.Equal(t, "dead", o.state(t, id))
		})
	}
}

func TestDispatcherStops(t *testing.T) {
	t.Parallel()
	t.Run("and hands back what it did not begin, without counting the attempt", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.enqueue(t, "a", "", "b")
		pool := testdb.PoolAt(t, o.url, maxConns(1))
		pid := pidOf(t, pool)
		blocker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := blocker.Exec(t.Context(), "LOCK TABLE latchkey.outbox IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		d := dispatch(t, pool, repository.DispatcherOpts{}, func(context.Context, repository.ClaimedEvent) error {
			t.Error("it was called")
			return nil
		})
		testdb.WaitForLockWait(t, o.observer, pid)
		d.cancel()
		require.NoError(t, blocker.Rollback(t.Context()))
		require.NoError(t, d.stop(t))
		require.Equal(t, 3, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE state = 'ready' AND attempts = 0 AND due_at < clock_timestamp()"))
	})
	t.Run("when its handlers have returned", func(t *testing.T) {
		t.Parallel()
		o, h := newOffice(t), newHeld()
		o.enqueue(t, "a", "a")
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{StopTimeout: patience}, h.handle)
		receive(t, h.began)
		d.cancel()
		h.result <- nil
		require.NoError(t, d.stop(t))
		require.Empty(t, h.causes)
		require.Equal(t, map[string]int{"done": 1, "ready": 1}, o.states(t))
	})
	t.Run("and renews the leases of its handlers until then", func(t *testing.T) {
		t.Parallel()
		o, h := newOffice(t), newHeld()
		o.enqueue(t, "a")
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Lease: 2 * time.Second, StopTimeout: patience}, h.handle)
		e := receive(t, h.began)
		d.cancel()
		waitUntil(t, o.observer, "SELECT clock_timestamp() > $1::timestamptz", e.LeaseUntil)
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		h.result <- nil
		require.NoError(t, d.stop(t))
		require.Empty(t, h.causes)
		require.Equal(t, map[string]int{"done": 1}, o.states(t))
	})
	t.Run("and ends the handlers' contexts when their time is over", func(t *testing.T) {
		t.Parallel()
		o, h := newOffice(t), newHeld()
		o.enqueue(t, "a")
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{StopTimeout: 10 * time.Millisecond}, h.handle)
		receive(t, h.began)
		require.NoError(t, d.stop(t))
		require.EqualError(t, receive(t, h.causes), "the dispatcher has stopped")
		waitUntil(t, o.observer, "SELECT due_at < clock_timestamp() FROM latchkey.outbox")
		e := o.claimOne(t, repository.ClaimParams{})
		require.Equal(t, 2, e.Attempt)
	})
	t.Run("also if a handler does not return", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueue(t, "a")[0]
		began, forever := make(chan struct{}), make(chan struct{})
		t.Cleanup(func() { close(forever) })
		d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{StopTimeout: 10 * time.Millisecond}, func(context.Context, repository.ClaimedEvent) error {
			close(began)
			<-forever
			return nil
		})
		receive(t, began)
		require.EqualError(t, d.stop(t), "latchkey: Run: 1 handlers have not returned")
		require.Equal(t, "claimed", o.state(t, id))
	})
}

// Its server goes away, comes back as a standby, and then as a primary.
func TestDispatcherSurvivesAFailover(t *testing.T) {
	t.Parallel()
	o, h := newOffice(t), newHeld()
	proxy := wire.Start(t, o.url)
	listen, err := pgx.ParseConfig(proxy.URL())
	require.NoError(t, err)
	o.exec(t, enableNotify)
	o.enqueue(t, "a")
	d := dispatch(t, testdb.PoolAt(t, proxy.URL()), repository.DispatcherOpts{Listen: listen, Concurrency: 2}, h.handle)
	receive(t, h.began)

	proxy.On(func(wire.Message) wire.Action { return wire.CutBefore })
	proxy.CutAll()
	for range 3 {
		d.nextCall(t, "ClaimEvents", failed)
	}
	h.result <- nil // which cannot be noted now
	d.nextCall(t, "CompleteEvents", failed)

	alterDatabase(t, o.url, "default_transaction_read_only", "on")
	proxy.On(nil)
	d.nextCall(t, "ClaimEvents", readOnly)
	testdb.Exec(t, o.url, "SET default_transaction_read_only = off",
		"DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET default_transaction_read_only', current_database()); END $$")
	require.NoError(t, receive(t, d.done).Err, "it was noted after all")

	later := o.enqueue(t, "b")[0]
	require.Equal(t, later, receive(t, h.began).EventID)
	h.result <- nil
	require.NoError(t, receive(t, d.done).Err)
	require.Equal(t, 2, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE state = 'done' AND attempts = 1"))
	require.Empty(t, h.causes)
}

// Writers, a Dispatcher and a handler that is at work live through restarts of the server: an orderly one, and a crash.
func TestDispatcherSurvivesARestart(t *testing.T) {
	t.Parallel()
	const writers, each, lease = 4, 60, 4 * time.Second
	server := ownServer(t, nil)
	url, _, err := server.NewDatabase(t.Context())
	require.NoError(t, err)
	open := func() *office { return &office{newFixture(t, url), testdb.PoolAt(t, url)} }
	o := open()
	o.exec(t, enableNotify)
	listen, err := pgx.ParseConfig(url)
	require.NoError(t, err)

	var (
		mu      sync.Mutex
		handled = map[string][]int{}
		h       = newHeld()
	)
	d := dispatch(t, testdb.PoolAt(t, url), repository.DispatcherOpts{Listen: listen, Lease: lease}, func(ctx context.Context, e repository.ClaimedEvent) error {
		if e.Topic == "held" {
			return h.handle(ctx, e)
		}
		var n int
		if err := json.Unmarshal(e.Payload, &n); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		handled[e.AggregateKey] = append(handled[e.AggregateKey], n)
		return nil
	})
	for restart, immediate := range []bool{false, true} {
		id := o.enqueueEvent(t, repository.Event{Topic: "held"})
		require.Equal(t, id, receive(t, h.began).EventID)

		// Each writer goes on until all that it has to write is acknowledged, and writes again what may not have been.
		written := make(chan error, writers)
		half := make(chan struct{}, writers)
		for w := range writers {
			key := fmt.Sprint("restart ", restart, " writer ", w)
			pool := testdb.PoolAt(t, url, maxConns(1))
			go func() { written <- writeAll(t.Context(), pool, key, each, half) }()
		}
		for range writers {
			receive(t, half)
		}
		require.NoError(t, server.Restart(t.Context(), immediate))
		h.result <- nil
		for range writers {
			require.NoError(t, receive(t, written))
		}
		d.nextCall(t, "Listen", failed)
		o = open()
		waitUntil(t, o.observer, "SELECT bool_and(state = 'done') FROM latchkey.outbox")
		require.Equal(t, 1, value[int](t, o, "SELECT attempts FROM latchkey.outbox WHERE id = $1", id), "its lease outlived the server")
		require.Empty(t, h.causes)
		waitUntil(t, o.observer, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '-- name: OutboxListen%')")
	}
	require.NoError(t, d.stop(t))
	require.Len(t, handled, 2*writers)
	for key, list := range handled {
		require.True(t, slices.IsSorted(list), "%s: %v", key, list)
		require.Len(t, slices.Compact(list), each, key)
	}
}

// writeAll writes the events 0 to n-1 of an aggregate under its lock, and says when it is halfway.
func writeAll(ctx context.Context, pool *pgxpool.Pool, key string, n int, half chan<- struct{}) error {
	repo, err := repository.New(pool)
	if err != nil {
		return err
	}
	for i := range n {
		if i == n/2 {
			half <- struct{}{}
		}
		for {
			err := repo.Guard(ctx, []repository.Lock{restarts.Exclusive(key)}, func(ctx context.Context, tx *repository.Tx) error {
				return errorOf(repo.EnqueueTx(ctx, tx.Last(), repository.Event{Topic: "test", AggregateKey: key, Payload: json.RawMessage(fmt.Sprint(i))}))
			})
			if err == nil {
				break
			}
			if !repository.IsRetryable(err) && !errors.Is(err, repository.ErrOutcomeUnknown) {
				return err
			}
		}
	}
	return nil
}

var restarts = repository.MustNamespace("dispatcher_restart")

// A handler can say that there is no use in trying again.
func TestDispatcherEndsWhatCannotSucceed(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	ids := o.enqueue(t, "a", "a")
	closed := errors.New("the account is closed")
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{PollInterval: time.Hour}, func(_ context.Context, e repository.ClaimedEvent) error {
		if e.EventID == ids[0] {
			return fmt.Errorf("charge: %w: %w", repository.ErrPermanent, closed)
		}
		return nil
	})
	e := receive(t, d.done)
	require.Equal(t, ids[0], e.EventID)
	require.ErrorIs(t, e.Err, repository.ErrPermanent)
	require.ErrorIs(t, e.Err, closed)
	e = receive(t, d.done)
	require.Equal(t, ids[1], e.EventID, "it does not hold up the next one, which does not wait for a poll")
	require.NoError(t, e.Err)
	letters, err := o.repo.ListDeadLetters(t.Context(), nil)
	require.NoError(t, err)
	require.Len(t, letters, 1)
	require.Equal(t, ids[0], letters[0].EventID)
	require.Equal(t, 1, letters[0].Attempts)
	require.Equal(t, "charge: permanent failure: the account is closed", letters[0].LastError)
}

// A row that somebody has locked holds up neither the others that are done nor what comes after them.
func TestDispatcherIsNotHeldUpByALockedRow(t *testing.T) {
	t.Parallel()
	o, h := newOffice(t), newHeld()
	pool := testdb.PoolAt(t, o.url)
	ids := o.enqueue(t, "", "", "")
	d := dispatch(t, pool, repository.DispatcherOpts{Lease: patience}, h.handle)
	for range ids {
		receive(t, h.began)
	}
	locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
	_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", ids[0])
	require.NoError(t, err)
	for range ids {
		h.result <- nil
	}
	for range ids[1:] {
		e := receive(t, d.done)
		require.NoError(t, e.Err)
		require.NotEqual(t, ids[0], e.EventID)
	}
	// Many times what it can have in hand: if each lot waited for the row, that would take minutes.
	const later = 300
	o.exec(t, "INSERT INTO latchkey.outbox (topic, payload) SELECT 'test', 'null' FROM generate_series(1, $1::integer)", later)
	for range later {
		require.NotEqual(t, ids[0], receive(t, h.began).EventID)
		h.result <- nil
	}
	for range later {
		require.NoError(t, receive(t, d.done).Err)
	}
	require.Equal(t, "claimed", o.state(t, ids[0]))
	require.NoError(t, locker.Rollback(t.Context()))
	require.Equal(t, ids[0], receive(t, d.done).EventID)
	require.Equal(t, map[string]int{"done": 3 + later}, o.states(t))
}

func TestDispatcherListens(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	require.Equal(t, "D", value[string](t, o, "SELECT tgenabled::text FROM pg_trigger WHERE tgname = 'outbox_notify'"), "it is for the host to want it")
	o.exec(t, enableNotify)
	listen, err := pgx.ParseConfig(o.url)
	require.NoError(t, err)
	pool := testdb.PoolAt(t, o.url)
	d := dispatch(t, pool, repository.DispatcherOpts{Listen: listen, PollInterval: time.Hour},
		func(context.Context, repository.ClaimedEvent) error { return nil })
	const listener = "SELECT coalesce(min(pid), 0)::bigint FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '-- name: OutboxListen%'"
	var before int64
	for range 3 {
		waitUntil(t, o.observer, "SELECT ("+listener+") NOT IN (0, $1)", before)
		before = value[int64](t, o, listener)
		for range 4 { // a connection that is new explains two claims; the others come of notifications
			id := o.enqueue(t, "")[0]
			e := receive(t, d.done)
			require.NoError(t, e.Err)
			require.Equal(t, id, e.EventID)
		}
		require.Equal(t, before, value[int64](t, o, listener), "it is the same connection")
		o.exec(t, "SELECT pg_terminate_backend($1::integer)", before)
		d.nextCall(t, "Listen", failed)
	}
	require.NoError(t, d.stop(t))
	waitUntil(t, o.observer, "SELECT ("+listener+") = 0")
}

func TestDispatcherRunsSeveralTimes(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	repo, err := repository.New(testdb.PoolAt(t, o.url))
	require.NoError(t, err)
	handled := make(chan repository.EventID, 1000)
	d, err := repository.NewDispatcher(repo, func(_ context.Context, e repository.ClaimedEvent) error {
		handled <- e.EventID
		return nil
	}, &repository.DispatcherOpts{PollInterval: time.Millisecond})
	require.NoError(t, err)
	for range 2 { // one after the other
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 3)
		for range cap(ended) { // and at once
			go func() { ended <- d.Run(ctx) }()
		}
		o.exec(t, "INSERT INTO latchkey.outbox (topic, payload) SELECT 'test', 'null' FROM generate_series(1, 200)")
		seen := map[repository.EventID]bool{}
		for range 200 {
			seen[receive(t, handled)] = true
		}
		require.Len(t, seen, 200, "each once")
		cancel()
		for range cap(ended) {
			require.NoError(t, receive(t, ended))
		}
		require.Empty(t, handled)
	}
	require.Equal(t, map[string]int{"done": 400}, o.states(t))
}

// Notifications that bring nothing, however many, do not have the Dispatcher ask each time.
func TestDispatcherOutlivesAStormOfNotifications(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	o.exec(t, enableNotify)
	listen, err := pgx.ParseConfig(o.url)
	require.NoError(t, err)
	d := dispatch(t, testdb.PoolAt(t, o.url), repository.DispatcherOpts{Listen: listen, PollInterval: time.Hour, Topics: []string{"mine"}},
		func(context.Context, repository.ClaimedEvent) error { return nil })
	waitUntil(t, o.observer, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '-- name: OutboxListen%')")
	const storm = 2000
	began := time.Now()
	for range storm {
		o.exec(t, "INSERT INTO latchkey.outbox (topic, payload) VALUES ('other', 'null')")
	}
	mine := o.enqueueEvent(t, repository.Event{Topic: "mine"})
	e := receive(t, d.done)
	took := time.Since(began)
	require.Equal(t, mine, e.EventID)
	require.NoError(t, e.Err)
	require.NoError(t, d.stop(t))
	claims := 0
	for len(d.calls) > 0 {
		if c := receive(t, d.calls); c.Method == "ClaimEvents" {
			claims++
		}
	}
	require.LessOrEqual(t, claims, 5+int(took/(10*time.Millisecond)), "in %v", took)
}

// The statements for many claims judge each by its own token.
func TestDispatcherStatementsJudgeEachToken(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	ids := o.enqueue(t, "good", "locked", "stale", "expired", "settled")
	events := o.requireClaims(t, ids...)
	fences := []int64{1, 1, 0, 1, 1}
	_, err := o.repo.ExtendClaim(t.Context(), events[3].Claim, time.Millisecond)
	require.NoError(t, err)
	o.expire(t, events[3].Claim)
	require.NoError(t, o.repo.CompleteEvent(t.Context(), events[4].Claim))
	var all []int64
	for _, id := range ids {
		all = append(all, int64(id))
	}
	locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
	_, err = locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", ids[1])
	require.NoError(t, err)

	untouched := func(from int) []string {
		t.Helper()
		list := []string{}
		for _, id := range ids[from:] {
			list = append(list, value[string](t, o, "SELECT concat_ws(' ', r.ctid, r.xmin, to_jsonb(r)) FROM latchkey.outbox AS r WHERE id = $1", id))
		}
		return list
	}
	before := untouched(1)
	q := db.New(testdb.Conn(t, o.url))
	rows, err := q.OutboxExtendAll(t.Context(), db.OutboxExtendAllParams{Ids: all, Fences: fences, Worker: "worker", LeaseMs: time.Hour.Milliseconds()})
	require.NoError(t, err)
	require.Equal(t, []db.OutboxExtendAllRow{{ID: all[0], Fence: 1, Extended: true}, {ID: all[1], Fence: 1, Extended: false}}, rows)
	require.True(t, value[bool](t, o, "SELECT lease_until > clock_timestamp() + interval '50 minutes' FROM latchkey.outbox WHERE id = $1", ids[0]))
	require.Equal(t, before, untouched(1))
	rows, err = q.OutboxExtendAll(t.Context(), db.OutboxExtendAllParams{Ids: all, Fences: fences, Worker: "other", LeaseMs: 1})
	require.NoError(t, err)
	require.Empty(t, rows)
	require.NoError(t, locker.Rollback(t.Context()))

	before = untouched(2)
	done, err := q.OutboxRelease(t.Context(), db.OutboxReleaseParams{Ids: all, Fences: fences, Worker: "other"})
	require.NoError(t, err)
	require.Empty(t, done)
	done, err = q.OutboxRelease(t.Context(), db.OutboxReleaseParams{Ids: all, Fences: fences, Worker: "worker"})
	require.NoError(t, err)
	require.Equal(t, []db.OutboxReleaseRow{{ID: all[0], Fence: 1}, {ID: all[1], Fence: 1}}, done)
	require.Equal(t, before, untouched(2))
	for _, e := range o.claim(t, repository.ClaimParams{Max: 2}) {
		require.Equal(t, 1, e.Attempt, "that one did not count")
		require.NotEqual(t, int64(1), e.Fence, "but its token is not given again")
	}
	for _, params := range []any{db.OutboxExtendAllParams{}, db.OutboxReleaseParams{}} {
		for field := range fieldsOf(params) {
			require.NotContains(t, field.Type.String(), "time.", "%T.%s", params, field.Name)
		}
	}
}

// BenchmarkDispatcher measures events that are claimed, handled by a handler that does nothing, and completed.
func BenchmarkDispatcher(b *testing.B) {
	for _, concurrency := range []int{10, 100} {
		b.Run(fmt.Sprint("Concurrency=", concurrency), func(b *testing.B) {
			pool := testdb.Pool(b, maxConns(16))
			var left atomic.Int64
			left.Store(int64(b.N))
			ctx, cancel := context.WithCancel(b.Context())
			defer cancel()
			repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
				EventDone: func(_ context.Context, e repository.EventDone) {
					if left.Add(-1) == 0 || e.Err != nil {
						cancel()
					}
				},
			}))
			require.NoError(b, err)
			d, err := repository.NewDispatcher(repo, func(context.Context, repository.ClaimedEvent) error { return nil },
				&repository.DispatcherOpts{Concurrency: concurrency})
			require.NoError(b, err)
			_, err = pool.Exec(b.Context(), `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
				SELECT 'bench', 'a' || n, 'null' FROM generate_series(1, $1::integer) AS n`, b.N)
			require.NoError(b, err)
			b.ResetTimer()
			require.NoError(b, d.Run(ctx))
			require.Zero(b, left.Load())
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "events/s")
		})
	}
}

// BenchmarkDispatcherNotify measures what the trigger that notifies costs 16 callers who write events at once, on a
// server that writes its log to disk at each commit.
func BenchmarkDispatcherNotify(b *testing.B) {
	server, err := pgserver.Start(b.Context(), pgserver.Options{Settings: map[string]string{"fsync": "on"}})
	require.NoError(b, err)
	defer server.Close()
	for _, trigger := range []string{"DISABLE", "ENABLE"} {
		b.Run(trigger, func(b *testing.B) {
			url, drop, err := server.NewDatabase(b.Context())
			require.NoError(b, err)
			defer drop(context.Background())
			testdb.Exec(b, url, "ALTER TABLE latchkey.outbox "+trigger+" TRIGGER outbox_notify")
			config, err := pgxpool.ParseConfig(url)
			require.NoError(b, err)
			config.MaxConns = 16
			pool, err := pgxpool.NewWithConfig(b.Context(), config)
			require.NoError(b, err)
			defer pool.Close()
			repo, err := repository.New(pool)
			require.NoError(b, err)
			b.SetParallelism(max(1, 16/runtime.GOMAXPROCS(0)))
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					_, err := repo.CreateSetup(b.Context(), uuid.New(), &repository.CreateSetupOpts{Event: &repository.Event{Topic: "bench"}})
					if err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
		})
	}
}
