// Package keyqueue lines up the calls of this process that want the same locks, so that only a few of them at a time
// are in the database. The others wait here, first come, first served, each with its own deadline and context, and hold
// no connection: a hot key cannot drain the pool. It is the server that keeps calls apart, those of other processes too.
//
// Calls that wait for the same locks, and may, have their turn together, as a [Batch].
package keyqueue

import (
	"cmp"
	"container/list"
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Errors of [Queue.Enter], beside the context's.
var (
	ErrFull    = errors.New("too many calls wait for the lock in this process")
	ErrTaken   = errors.New("another call of this process has the lock")
	ErrTimeout = errors.New("the turn did not come in time")

	// ErrDeparted means that the context ended while the call's batch was on its way to the server.
	ErrDeparted = errors.New("the call was on its way already")
)

// Lock is a key that a call wants, for itself or together with others that want it shared.
type Lock struct {
	Key       int64
	Exclusive bool
}

// Distinct returns locks as [Ticket] wants them; exclusive wins over shared. It uses the slice that it is given.
func Distinct(locks []Lock) []Lock {
	slices.SortFunc(locks, func(a, b Lock) int {
		switch {
		case a.Key != b.Key:
			return cmp.Compare(a.Key, b.Key)
		case a.Exclusive == b.Exclusive:
			return 0
		case a.Exclusive:
			return -1
		}
		return 1
	})
	return slices.CompactFunc(locks, func(a, b Lock) bool { return a.Key == b.Key })
}

// Ticket is a place in line for a call, which is C.
type Ticket[C any] struct {
	Call     C
	Locks    []Lock    // at least one, as from [Distinct]
	Deadline time.Time // for the turn to come
	Try      bool      // do not wait for it
	Together bool      // it may be a part of a batch

	ctx     context.Context
	places  []*list.Element // in the line of each lock; nil where it has its turn
	missing int             // how many turns it waits for
	wake    chan struct{}   // when all have come, or the batch has ended
	batch   *Batch[C]       // that it is a part of
	gone    bool            // from the batch, because its context ended
	late    bool            // its deadline had passed when the batch ended, which did not do it
	done    bool            // by the batch
}

// Done tells whether the call was done as a part of a batch, so that there is no turn to take and none to give back.
func (t *Ticket[C]) Done() bool { return t.done }

// Batch is a number of calls that have their turn together. The first of them was there first, and no other has an
// earlier deadline.
type Batch[C any] struct {
	queue    *Queue[C]
	tickets  []*Ticket[C]
	present  int // how many are not gone
	cancel   context.CancelFunc
	departed bool
}

// Queue has a line for each key that somebody wants. It is safe for concurrent use.
type Queue[C any] struct {
	depth      int
	maxWaiters int
	maxBatch   int
	run        func(context.Context, *Batch[C])

	mu    sync.Mutex
	lines map[int64]*line
}

// line is who has the turn on a key, and who waits for it: elements are places.
type line struct {
	turns     int
	exclusive int // how many of them
	waiting   list.List
}

// free tells whether the lock can be taken, as far as this process knows.
func (l *line) free(want Lock) bool { return l.turns == 0 || l.exclusive == 0 && !want.Exclusive }

func (l *line) enter(want Lock) { l.turns++; l.count(want, 1) }
func (l *line) leave(want Lock) { l.turns--; l.count(want, -1) }

func (l *line) count(lock Lock, n int) {
	if lock.Exclusive {
		l.exclusive += n
	}
}

// New returns a Queue in which depth calls for a key have their turn at a time, or any number if all want it shared; at
// most maxWaiters wait for a key, and at most maxBatch make a batch. A batch is run on a goroutine of its own, and must
// end with [Batch.End]. Its context has the values of the first call's, and ends when those of all its calls have. With
// a maxBatch below 2 there is none.
func New[C any](depth, maxWaiters, maxBatch int, run func(context.Context, *Batch[C])) *Queue[C] {
	return &Queue[C]{depth: depth, maxWaiters: maxWaiters, maxBatch: maxBatch, run: run, lines: make(map[int64]*line)}
}

// admits tells whether another call may go to the database.
func (q *Queue[C]) admits(l *line, want Lock) bool { return l.turns < q.depth || l.free(want) }

// Len returns how many keys somebody has or wants.
func (q *Queue[C]) Len() int {
	q.mu.Lock()
	defer q.mu.Unlock()
	return len(q.lines)
}

// Enter waits until it is the call's turn to take its locks in the database; then [Queue.Leave] must follow. Or until a
// batch has done the call: see [Ticket.Done]. The error is [ErrFull], [ErrTaken], [ErrTimeout], or what ctx ended with;
// or [ErrDeparted], with ctx's.
func (q *Queue[C]) Enter(ctx context.Context, t *Ticket[C]) error {
	if err := q.join(ctx, t); err != nil || t.wake == nil { // missing is not this goroutine's to read any more
		return err
	}
	timer := time.NewTimer(time.Until(t.Deadline))
	defer timer.Stop()
	for {
		select {
		case <-t.wake:
			if t.late {
				return ErrTimeout
			}
			return nil
		case <-timer.C:
			if q.drop(t) {
				return ErrTimeout
			}
		case <-ctx.Done():
			return q.giveUp(ctx, t)
		}
	}
}

// join gives the ticket its place in the line of every lock, all at one time: then who came first is first in
// each of them, and no two calls wait for each other.
func (q *Queue[C]) join(ctx context.Context, t *Ticket[C]) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	t.ctx = ctx
	for _, lock := range t.Locks {
		l := q.lines[lock.Key]
		switch {
		case l == nil || l.waiting.Len() == 0 && l.free(lock):
		case !t.Try && l.waiting.Len() == 0 && q.admits(l, lock):
		case t.Try:
			return ErrTaken
		case l.waiting.Len() >= q.maxWaiters:
			return ErrFull
		}
	}
	for i, lock := range t.Locks {
		l := q.lines[lock.Key]
		if l == nil {
			l = &line{}
			q.lines[lock.Key] = l
		}
		if l.waiting.Len() == 0 && q.admits(l, lock) {
			l.enter(lock)
			continue
		}
		if t.places == nil {
			t.places = make([]*list.Element, len(t.Locks))
			t.wake = make(chan struct{}, 1)
		}
		t.places[i] = l.waiting.PushBack(t)
		t.missing++
	}
	return nil
}

// Leave gives the turn to who is next.
func (q *Queue[C]) Leave(t *Ticket[C]) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.leave(t)
}

func (q *Queue[C]) leave(t *Ticket[C]) {
	for i, lock := range t.Locks {
		l := q.lines[lock.Key]
		if t.places != nil && t.places[i] != nil {
			l.waiting.Remove(t.places[i])
		} else {
			l.leave(lock)
		}
		q.advance(lock.Key, l)
	}
}

// drop takes a ticket whose deadline has passed out of the lines, unless its turn has come, be it in a batch.
func (q *Queue[C]) drop(t *Ticket[C]) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.missing == 0 {
		return false
	}
	q.leave(t)
	return true
}

func (q *Queue[C]) giveUp(ctx context.Context, t *Ticket[C]) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case t.done:
		return nil
	case t.late:
		return ErrTimeout
	case t.batch == nil:
		q.leave(t)
		return ctx.Err()
	}
	t.gone = true
	t.batch.present--
	if t.batch.present == 0 {
		t.batch.cancel()
	}
	if t.batch.departed {
		return errors.Join(ErrDeparted, ctx.Err())
	}
	return ctx.Err()
}

func ticketAt[C any](place *list.Element) *Ticket[C] {
	return place.Value.(*Ticket[C]) //nolint:errcheck,forcetypeassert // join put it there
}

// advance gives turns on a key to those who wait.
func (q *Queue[C]) advance(key int64, l *line) {
	for first := l.waiting.Front(); first != nil; first = l.waiting.Front() {
		t := ticketAt[C](first)
		i := slices.IndexFunc(t.Locks, func(lock Lock) bool { return lock.Key == key })
		if !q.admits(l, t.Locks[i]) {
			return
		}
		l.waiting.Remove(first)
		l.enter(t.Locks[i])
		t.places[i] = nil
		t.missing--
		if t.missing == 0 {
			q.call(t)
		}
	}
	if l.turns == 0 {
		delete(q.lines, key)
	}
}

// call tells a ticket that its turn has come, or runs it with those that stand behind it and want the same.
func (q *Queue[C]) call(t *Ticket[C]) {
	b := &Batch[C]{queue: q, tickets: []*Ticket[C]{t}}
	for next := q.behind(t); next != nil && len(b.tickets) < q.maxBatch; next = q.behind(t) {
		for i, lock := range next.Locks {
			q.lines[lock.Key].waiting.Remove(next.places[i])
		}
		b.tickets = append(b.tickets, next)
	}
	if len(b.tickets) == 1 {
		t.wake <- struct{}{}
		return
	}
	for _, member := range b.tickets {
		member.batch = b
		member.missing = 0
	}
	b.present = len(b.tickets)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.ctx)) //nolint:gosec // the end of the batch calls it
	b.cancel = cancel
	go q.run(ctx, b)
}

// behind returns the ticket that is next in every line of t, if the two can run together.
func (q *Queue[C]) behind(t *Ticket[C]) *Ticket[C] {
	first := q.lines[t.Locks[0].Key].waiting.Front()
	if !t.Together || first == nil {
		return nil
	}
	next := ticketAt[C](first)
	if !next.Together || next.Deadline.Before(t.Deadline) || !slices.Equal(next.Locks, t.Locks) {
		return nil
	}
	if next.missing < len(next.Locks) { // it has one of its turns, and does not wait in that line
		return nil
	}
	for i, lock := range next.Locks {
		if !lock.Exclusive || q.lines[lock.Key].waiting.Front() != next.places[i] {
			return nil
		}
	}
	return next
}

// First returns the call that was there first. It may have given up.
func (b *Batch[C]) First() *Ticket[C] { return b.tickets[0] }

// Depart returns the calls to run: those whose context has not ended yet. It goes just before they are sent, since a
// call whose context ends after it is told [ErrDeparted].
func (b *Batch[C]) Depart() []*Ticket[C] {
	b.queue.mu.Lock()
	defer b.queue.mu.Unlock()
	b.departed = true
	return slices.DeleteFunc(slices.Clone(b.tickets), func(t *Ticket[C]) bool { return t.gone })
}

// End lets the calls of the batch return, except some that were not done: they go back to the head of the line,
// to run again, each alone if so wanted. It must be called once.
func (b *Batch[C]) End(again []*Ticket[C], alone bool) {
	q := b.queue
	q.mu.Lock()
	defer q.mu.Unlock()
	b.cancel()
	for _, t := range b.tickets {
		t.batch = nil
		t.done = true
	}
	now := time.Now()
	for _, t := range slices.Backward(again) {
		t.done = false
		t.late = !now.Before(t.Deadline)
		if t.late || t.gone {
			continue
		}
		t.Together = t.Together && !alone
		for i, lock := range t.Locks {
			t.places[i] = q.lines[lock.Key].waiting.PushFront(t)
		}
		t.missing = len(t.Locks)
	}
	for _, t := range b.tickets {
		if t.done || t.late {
			t.wake <- struct{}{}
		}
	}
	for _, lock := range b.tickets[0].Locks {
		l := q.lines[lock.Key]
		l.leave(lock)
		q.advance(lock.Key, l)
	}
}
