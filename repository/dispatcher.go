package repository

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
)

// Handler handles an event of a [Dispatcher], outside of any transaction, and returns nil if that is done. It is called
// from many goroutines at once.
//
// An event is handled at least once: again if the handler fails, if the process ends before it is noted that it is done,
// and if the lease is lost, then perhaps while this call still goes on. To make the effect once, the handler sends
// e.EventID and e.Fence along, and what it writes to does two things in the transaction of the effect. It refuses a
// Fence that is below the largest one that it has seen for this EventID, and notes it otherwise: so whoever was given
// the event last is the only one who can have an effect. And it does nothing, but answers as before, if it has the
// effect of this EventID already: so a repeat has none. Where only one of the two can be had, as with most idempotency
// keys, let it be the second, with the EventID as the key.
//
// ctx has the values of that of [Dispatcher.Run]. It ends when the lease is lost, with the cause [ErrLeaseLost]: the
// event is somebody else's then, or may be soon, and the handler should stop at once. It ends too when the Dispatcher
// has been stopping for StopTimeout; the event is due again at once then, if the handler returns an error, and the
// attempt counts.
//
// An error or a panic is a failed attempt, as in [Repository.RetryEvent] with its back-off. An error that is
// [ErrPermanent] makes the event a dead letter at once.
type Handler func(ctx context.Context, e ClaimedEvent) error

// DispatcherOpts are the options of [NewDispatcher]; nil is the default of each.
type DispatcherOpts struct {
	// Worker says who claims, for operators. At most 255 bytes of UTF-8 without NUL; empty is a random UUID. It need not
	// be unique.
	Worker string

	// Topics are those to handle, at most 100; none is all. See [ClaimParams].
	Topics []string

	// Concurrency is how many handlers run at a time at most: 1 to 1000; 0 is [DefaultConcurrency]. Where handlers use
	// the pool of the Repository, it has room for the Dispatcher too, or leases are lost for want of a connection.
	Concurrency int

	// Lease is how long an event is the Dispatcher's after it was last heard of, and so for how long nobody handles the
	// events of a process that crashed: 100 ms to 24 days; 0 is [DefaultLease]. A handler may take longer: its lease is
	// renewed each third of it.
	Lease time.Duration

	// PollInterval is after how long without an event the Dispatcher asks again, give or take a fifth, by chance: 1 ms
	// to 24 days; 0 is [DefaultPollInterval]. It asks at once while there is more than it could take, and when an event
	// that others of its aggregate waited for is done.
	PollInterval time.Duration

	// Listen is how to connect to be notified of new events at once, made by [pgx.ParseConfig]; nil is not to be: then an
	// event waits for the next poll, half of PollInterval on average. It leads to the server of the pool, directly: a
	// pooler that gives a connection to others between transactions loses notifications. The Dispatcher has one such
	// connection, and polls as well, for events that are to be tried again, and for what comes while it is not connected.
	//
	// The host enables the notifications for the whole database: ALTER TABLE latchkey.outbox ENABLE TRIGGER
	// outbox_notify. Transactions that write events commit one after another then, in the whole server: 16 callers at
	// once, on a server that writes each commit to disk, wrote 2,100 events a second instead of 5,100.
	Listen *pgx.ConnConfig

	// StopTimeout is how long handlers may go on when the Dispatcher stops: 1 ms to 24 days; 0 is [DefaultStopTimeout].
	StopTimeout time.Duration
}

const (
	// DefaultConcurrency is the Concurrency if nothing is said. A handler waits for another service, as a rule.
	DefaultConcurrency = 10

	// DefaultPollInterval is the PollInterval if nothing is said: a claim that finds nothing takes the server less than
	// a millisecond, and changes no row.
	DefaultPollInterval = time.Second

	// DefaultStopTimeout is the StopTimeout if nothing is said: a third of what Kubernetes waits for before it kills.
	DefaultStopTimeout = 10 * time.Second

	// minDispatcherLease is many times what a statement takes, or every lease would be lost.
	minDispatcherLease = 100 * time.Millisecond

	// maxStatement bounds the wait for a server that does not answer any more; a living one takes milliseconds.
	maxStatement = 30 * time.Second

	// stopGrace is what handlers have to return in when their contexts have ended, and what their events are settled in.
	stopGrace = time.Second

	// maxBackOff is how much later than the server the Dispatcher may be back, and hardly a load for it.
	maxBackOff = 5 * time.Second

	// minPause is how soon the Dispatcher asks again after it was given nothing, however many notifications come: of what
	// others took, or of topics of others. It is shorter than most handlers, and many times what a claim takes.
	minPause = 10 * time.Millisecond

	// listenCheck is how long a connection may be silent before it is asked whether it is still there.
	listenCheck = time.Minute
)

// errStopped is the cause of a handler's context that ends because the Dispatcher stops.
var errStopped = errors.New("the dispatcher has stopped")

// Dispatcher claims events and has a [Handler] handle them. It is safe for concurrent use.
type Dispatcher struct {
	repo   *Repository
	handle Handler
	opts   DispatcherOpts
}

// EventDone describes an event that a [Dispatcher] has handled.
type EventDone struct {
	EventID  EventID
	Topic    string
	Attempt  int
	Duration time.Duration // of the handler

	// Err is nil if the event is done. Otherwise it is what the handler returned, or [ErrLeaseLost] if the event could not
	// be noted as done or failed because the lease was over, or both.
	Err error
}

// NewDispatcher returns a Dispatcher that has h handle events of r. It does no I/O, and nothing goes on before
// [Dispatcher.Run]. It deletes nothing: for that there is [Repository.PurgeEvents], and [Repository.ListDeadLetters] shows
// what was given up. The error is [ErrInvalid]: r or h is nil, or an option is out of range.
func NewDispatcher(r *Repository, h Handler, o *DispatcherOpts) (_ *Dispatcher, err error) {
	defer func() { err = wrap("NewDispatcher", err) }()
	if r == nil {
		return nil, &InvalidError{"r", "must not be nil"}
	}
	if h == nil {
		return nil, &InvalidError{"h", "must not be nil"}
	}
	d := &Dispatcher{repo: r, handle: h}
	if o != nil {
		d.opts = *o
	}
	o = &d.opts
	if o.Worker == "" {
		o.Worker = uuid.NewString()
	}
	o.Topics = slices.Clone(o.Topics)
	switch {
	case o.Concurrency == 0:
		o.Concurrency = DefaultConcurrency
	case o.Concurrency < 0 || o.Concurrency > maxClaimed:
		return nil, &InvalidError{"Concurrency", "must be 0 or from 1 to 1000"}
	}
	if o.Lease, err = timeout("Lease", o.Lease, DefaultLease); err != nil {
		return nil, err
	}
	if o.Lease < minDispatcherLease {
		return nil, &InvalidError{"Lease", "must be 0 or from 100ms to 576h"}
	}
	if o.PollInterval, err = timeout("PollInterval", o.PollInterval, DefaultPollInterval); err != nil {
		return nil, err
	}
	if o.StopTimeout, err = timeout("StopTimeout", o.StopTimeout, DefaultStopTimeout); err != nil {
		return nil, err
	}
	if o.Listen != nil {
		o.Listen = o.Listen.Copy()
		o.Listen.OnNotification = nil // pgx's own, which is what is waited for
	}
	_, err = d.claimParams(o.Concurrency).check()
	if err != nil {
		return nil, err
	}
	return d, nil
}

func (d *Dispatcher) claimParams(n int) ClaimParams {
	return ClaimParams{Worker: d.opts.Worker, Max: n, Lease: d.opts.Lease, Topics: d.opts.Topics}
}

// Run claims events, and has them handled, until ctx ends. It claims no more than can be handled at once, and renews
// their leases until they are done. What a lease is trusted for is counted on this machine's monotonic clock from before
// the claim was sent, less a tenth: then, or when the server says that it is lost, the handler's context ends.
//
// When ctx ends, it claims no more, hands back what it has not begun to handle, without counting the attempt, and waits
// for the handlers, whose contexts go on for StopTimeout. Then those end, and a second later Run returns, also if not all
// handlers have: the error says how many, and their events are claimed again when their leases end. Otherwise it returns
// nil.
//
// No error of the database ends it. While the server is away, handlers go on for as long as their leases can be trusted,
// and Run tries again, at longer and longer intervals up to 5 s; what was handled meanwhile is noted as soon as that can
// be done, if the lease still lives. [Observer.CallDone] is told of each call and its error, with the Method ClaimEvents,
// CompleteEvents, RetryEvent, ExtendClaims, ReleaseEvents or Listen.
//
// It uses up to four connections of the pool at a time, and none while it waits. It may be called again, and several
// times at once, each with a Concurrency of its own.
func (d *Dispatcher) Run(ctx context.Context) error {
	handling, interrupt := context.WithCancelCause(context.WithoutCancel(ctx))
	defer interrupt(errStopped)
	ending, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	run := &dispatch{
		Dispatcher: d,
		held:       make(map[*task]bool),
		wake:       make(chan struct{}, 1),
		freed:      make(chan struct{}, 1),
		finished:   make(chan *task, 2*d.opts.Concurrency),
		locked:     make(chan *task, 2*d.opts.Concurrency),
	}
	var claiming, settling, helping sync.WaitGroup
	claiming.Go(func() { run.claim(ctx, ending, handling) })
	settling.Go(func() {
		defer close(run.locked)
		run.settle(ending, run.finished)
	})
	settling.Go(func() { run.settle(ending, run.locked) })
	helping.Go(func() { run.keep(ending) })
	if d.opts.Listen != nil {
		helping.Go(func() { run.listen(ctx) })
	}

	<-ctx.Done()
	defer time.AfterFunc(d.opts.StopTimeout, func() { interrupt(errStopped) }).Stop()
	defer time.AfterFunc(d.opts.StopTimeout+stopGrace, end).Stop()
	settled := make(chan struct{})
	go func() {
		claiming.Wait()
		run.handlers.Wait()
		close(run.finished)
		settling.Wait()
		close(settled)
	}()
	select {
	case <-settled:
	case <-ending.Done():
	}
	end()
	settling.Wait()
	helping.Wait()
	if n := run.left(); n > 0 {
		return wrap("Run", fmt.Errorf("%d handlers have not returned", n))
	}
	return nil
}

// dispatch is one Run of a Dispatcher.
type dispatch struct {
	*Dispatcher
	handlers sync.WaitGroup
	wake     chan struct{} // there may be something to claim
	freed    chan struct{} // there may be room for more
	finished chan *task    // to be settled; holds all that may be held, so that nobody waits to send
	locked   chan *task    // the same, but somebody had the row locked: apart, or the others would wait for that each time

	mu      sync.Mutex
	held    map[*task]bool // claimed and not settled
	running int            // how many of them are being handled
}

// task is a claimed event.
type task struct {
	ClaimedEvent
	ctx         context.Context // of the handler
	cancel      context.CancelCauseFunc
	unstarted   bool
	interrupted bool  // the handler's context ended because the Dispatcher stops
	err         error // of the handler
	duration    time.Duration
	failure     error // of the last try to settle it
	locked      bool  // it is among those whose row was

	// Of dispatch.mu.
	until   time.Time   // when the lease may have ended, on the monotonic clock
	trusted *time.Timer // ends ctx a little before
}

// signal notes in a channel of one place that something may have happened.
func signal(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

// sleep waits, and says whether ctx has not ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-timer.C:
		return true
	}
}

// backOff is how long to wait after so many failures in a row: half of it by chance.
func backOff(failures int) time.Duration {
	full := min(maxBackOff, 50*time.Millisecond<<min(failures-1, 10))
	return full/2 + rand.N(full/2) //nolint:gosec // it only spreads the load
}

// bounded ends with ctx, or when it is no use to wait any longer for a statement.
func (d *dispatch) bounded(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(ctx, min(d.opts.Lease, maxStatement))
}

// claim claims events and starts to handle them, until ctx ends.
func (d *dispatch) claim(ctx, ending, handling context.Context) {
	for failures := 0; ctx.Err() == nil; {
		room := d.room()
		if room == 0 {
			select {
			case <-ctx.Done():
			case <-d.freed:
			}
			continue
		}
		sent := time.Now()
		bounded, cancel := d.bounded(ending) // the answer is wanted also if ctx ends: it says what to hand back
		events, err := d.repo.ClaimEvents(bounded, d.claimParams(room))
		cancel()
		if err != nil {
			failures++
			sleep(ctx, backOff(failures))
			continue
		}
		failures = 0
		if claimed := d.repo.observer.EventsClaimed; claimed != nil && len(events) > 0 {
			claimed(ctx, len(events))
		}
		for _, e := range events {
			d.start(ctx, handling, e, sent)
		}
		if len(events) == 0 {
			sleep(ctx, min(minPause, d.opts.PollInterval))
		}
		if len(events) < room {
			d.wait(ctx)
		}
	}
}

// wait waits until it is time to claim again.
func (d *dispatch) wait(ctx context.Context) {
	spread := d.opts.PollInterval * 2 / 5
	timer := time.NewTimer(d.opts.PollInterval - spread/2 + rand.N(spread+1)) //nolint:gosec // it only spreads the load
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-d.wake:
	case <-timer.C:
	}
}

// room is how many events may be claimed. Those that wait to be settled take no handler's place, but there is an end to
// how many there may be.
func (d *dispatch) room() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return min(d.opts.Concurrency-d.running, 2*d.opts.Concurrency-len(d.held))
}

// left is how many handlers run.
func (d *dispatch) left() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.running
}

// start has an event handled that was claimed after sent, or handed back if it is too late for that.
func (d *dispatch) start(ctx, handling context.Context, e ClaimedEvent, sent time.Time) {
	t := &task{ClaimedEvent: e, until: sent.Add(d.opts.Lease)}
	t.ctx, t.cancel = context.WithCancelCause(handling)
	trust := d.trust(t)
	t.trusted = time.AfterFunc(trust, func() { t.cancel(ErrLeaseLost) })
	t.unstarted = ctx.Err() != nil || trust <= 0
	d.mu.Lock()
	d.held[t] = true
	if !t.unstarted {
		d.running++
	}
	d.mu.Unlock()
	if t.unstarted {
		d.finished <- t
		return
	}
	d.handlers.Go(func() { d.work(t) })
}

// trust is for how long the lease of a task can be relied on, as in [Lease.Remaining].
func (d *dispatch) trust(t *task) time.Duration { return time.Until(t.until) - d.opts.Lease/10 }

// work runs the handler.
func (d *dispatch) work(t *task) {
	started := time.Now()
	defer func() { // also if the handler panics, or ends its goroutine
		if value := recover(); value != nil {
			t.err = fmt.Errorf("%w\n%s", panicked{value}, debug.Stack())
		}
		t.duration = time.Since(started)
		t.interrupted = errors.Is(context.Cause(t.ctx), errStopped)
		d.mu.Lock()
		d.running--
		d.mu.Unlock()
		signal(d.freed)
		d.finished <- t
	}()
	t.err = errExited // until it returns
	t.err = d.handle(t.ctx, t.ClaimedEvent)
}

// keep renews the leases of what is held, until ctx ends.
func (d *dispatch) keep(ctx context.Context) {
	wait := d.opts.Lease / 3
	for sleep(ctx, wait) {
		wait = d.opts.Lease / 3
		if !d.extend(ctx) {
			wait = d.opts.Lease / 30 // a few more tries before the end
		}
	}
}

// extend renews the leases of what is held, and says whether that was done for all that are not lost.
func (d *dispatch) extend(ctx context.Context) bool {
	d.mu.Lock()
	var tasks []*task
	for t := range d.held {
		if t.ctx.Err() == nil {
			tasks = append(tasks, t)
		}
	}
	d.mu.Unlock()
	if len(tasks) == 0 {
		return true
	}
	bounded, cancel := context.WithTimeout(ctx, min(d.opts.Lease/3, maxStatement)) // or the next try would come too late
	defer cancel()
	sent := time.Now()
	current, err := d.repo.extendClaims(bounded, claimsOf(tasks), d.opts.Lease)
	if err != nil {
		return false
	}
	all := true
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range tasks {
		row := current[t.EventID]
		switch {
		case row.Fence != t.Fence:
			t.cancel(ErrLeaseLost)
		case !row.Extended:
			all = false
		case d.held[t]:
			t.until = sent.Add(d.opts.Lease)
			t.trusted.Reset(d.trust(t))
		}
	}
	return all
}

func claimsOf(tasks []*task) []Claim {
	claims := make([]Claim, len(tasks))
	for i, t := range tasks {
		claims[i] = t.Claim
	}
	return claims
}

// settle notes what came of finished tasks, as many at a time as there are, until there are no more to come, or ctx ends.
func (d *dispatch) settle(ctx context.Context, finished <-chan *task) {
	var tasks []*task
	for failures := 0; ; {
		if failures > 0 {
			if !sleep(ctx, backOff(failures)) {
				return
			}
		} else {
			select {
			case <-ctx.Done():
				return
			case t, more := <-finished:
				if !more {
					return
				}
				tasks = append(tasks, t)
			}
		}
		for waiting := len(finished); waiting > 0; waiting-- {
			tasks = append(tasks, <-finished)
		}
		tasks = d.settleTasks(ctx, tasks)
		failures++
		if len(tasks) == 0 {
			failures = 0
		}
	}
}

// settleTasks returns those tasks that are to be tried again.
func (d *dispatch) settleTasks(ctx context.Context, tasks []*task) (again []*task) {
	var done, unstarted []*task
	for _, t := range tasks {
		switch {
		case t.unstarted:
			unstarted = append(unstarted, t)
		case t.err == nil:
			done = append(done, t)
		default:
			again = append(again, d.retry(ctx, t)...)
		}
	}
	again = append(again, d.together(ctx, done, d.repo.completeEvents)...)
	return append(again, d.together(ctx, unstarted, d.repo.releaseEvents)...)
}

// together settles tasks by one statement.
func (d *dispatch) together(ctx context.Context, tasks []*task, statement func(context.Context, []Claim) (map[EventID]int64, error)) (again []*task) {
	if len(tasks) == 0 {
		return nil
	}
	bounded, cancel := d.bounded(ctx)
	fences, err := statement(bounded, claimsOf(tasks))
	cancel()
	if len(tasks) > 1 && rowLocked(err) { // which must not hold up the others
		for _, t := range tasks {
			again = append(again, d.together(ctx, []*task{t}, statement)...)
		}
		return again
	}
	for _, t := range tasks {
		result := err
		if err == nil && fences[t.EventID] != t.Fence { // of one event, there may be a task whose lease was lost beside a later one
			result = ErrLeaseLost
		}
		again = append(again, d.settled(ctx, t, result)...)
	}
	return again
}

// rowLocked says whether somebody has a row locked.
func rowLocked(err error) bool {
	var busy *LockBusyError
	return errors.As(err, &busy) && busy.Where == WhereRow
}

// retry settles a task whose handler failed.
func (d *dispatch) retry(ctx context.Context, t *task) (again []*task) {
	after := time.Duration(0) // the back-off
	if t.interrupted {
		after = time.Millisecond // it was not the event's fault
	}
	bounded, cancel := d.bounded(ctx)
	defer cancel()
	return d.settled(ctx, t, d.repo.RetryEvent(bounded, t.Claim, after, t.err))
}

// settled ends a task, unless err means that it can be tried again.
func (d *dispatch) settled(ctx context.Context, t *task, err error) (again []*task) {
	d.mu.Lock()
	late := time.Now().After(t.until)
	if err != nil && !errors.Is(err, ErrLeaseLost) {
		t.failure = err
		if !late {
			d.mu.Unlock()
			if t.locked || !rowLocked(err) {
				return []*task{t}
			}
			t.locked = true
			d.locked <- t
			return nil
		}
	}
	delete(d.held, t)
	t.trusted.Stop()
	d.mu.Unlock()
	t.cancel(nil)
	signal(d.freed)
	if t.AggregateKey != "" {
		signal(d.wake) // for the next one of it
	}

	done := d.repo.observer.EventDone
	if done == nil || t.unstarted {
		return nil
	}
	result := t.err
	if err != nil {
		result = ErrLeaseLost
		// If the answer to an earlier try was lost, that may have been what ended the claim.
		for _, cause := range []error{t.failure, t.err} {
			if cause != nil {
				result = fmt.Errorf("%w: %w", result, cause)
			}
		}
	}
	done(ctx, EventDone{EventID: t.EventID, Topic: t.Topic, Attempt: t.Attempt, Duration: t.duration, Err: result})
	return nil
}

// listen has notifications wake the Dispatcher, until ctx ends.
func (d *dispatch) listen(ctx context.Context) {
	for failures := 1; ; failures++ {
		started := time.Now()
		err := d.listenOnce(ctx)
		if time.Since(started) > maxBackOff {
			failures = 1
		}
		if err == nil || !sleep(ctx, backOff(failures)) {
			return
		}
	}
}

// listenOnce returns nil when ctx has ended.
func (d *dispatch) listenOnce(ctx context.Context) (err error) {
	defer d.repo.done(ctx, "Listen", time.Now(), &err)
	connecting, cancel := context.WithTimeout(ctx, maxStatement)
	defer cancel()
	conn, err := pgx.ConnectConfig(connecting, d.opts.Listen)
	if err == nil {
		defer func() {
			closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
			defer cancel()
			_ = conn.Close(closing)
		}()
		err = db.New(conn).OutboxListen(connecting)
	}
	if err == nil {
		signal(d.wake) // for what was committed before
		err = d.await(ctx, conn)
	}
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// await has each notification wake the Dispatcher. It returns when the connection is lost, or ctx has ended.
func (d *dispatch) await(ctx context.Context, conn *pgx.Conn) error {
	for {
		waiting, cancel := context.WithTimeout(ctx, listenCheck)
		_, err := conn.WaitForNotification(waiting)
		silent := waiting.Err() != nil
		cancel()
		switch {
		case err == nil:
			signal(d.wake)
		case !silent || ctx.Err() != nil:
			return err
		default:
			checking, cancel := context.WithTimeout(ctx, maxStatement)
			err := conn.Ping(checking)
			cancel()
			if err != nil {
				return err
			}
		}
	}
}
