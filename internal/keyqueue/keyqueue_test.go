package keyqueue_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/keyqueue"
)

type ticket = keyqueue.Ticket[string]

// queue is a Queue in a synctest bubble: its time is virtual, and after each step every call has come as far as it can.
type queue struct {
	*keyqueue.Queue[string]
	t       *testing.T
	callers []*caller
	begun   chan *batch
	batches []*batch // that the test has not taken
}

// batch is one that the Queue has begun to run. The test ends it.
type batch struct {
	*keyqueue.Batch[string]
	ctx context.Context
}

// inQueue runs the test in a bubble. A goroutine that is left over fails it.
func inQueue(t *testing.T, maxWaiters, maxBatch int, test func(t *testing.T, q *queue)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		q := &queue{t: t, begun: make(chan *batch, 100)}
		q.Queue = keyqueue.New(1, maxWaiters, maxBatch, func(ctx context.Context, b *keyqueue.Batch[string]) {
			q.begun <- &batch{b, ctx}
		})
		test(t, q)
		q.settle()
		require.Zero(t, q.Len(), "a line is left over")
	})
}

// caller is a goroutine in Enter.
type caller struct {
	*ticket
	cancel   context.CancelFunc
	result   chan error
	returned bool
	err      error
}

// elapse lets time pass in the bubble, and wakes everybody whose time has come.
func elapse(d time.Duration) {
	time.Sleep(d) //nolint:forbidigo // it is virtual
}

// settle waits until nobody can do anything, and notes what has happened.
func (q *queue) settle() {
	synctest.Wait()
	for _, c := range q.callers {
		select {
		case c.err = <-c.result:
			c.returned = true
		default:
		}
	}
	for len(q.begun) > 0 {
		q.batches = append(q.batches, <-q.begun)
	}
}

const far = time.Hour

func exclusive(keys ...int64) []keyqueue.Lock {
	locks := make([]keyqueue.Lock, len(keys))
	for i, key := range keys {
		locks[i] = keyqueue.Lock{Key: key, Exclusive: true}
	}
	return locks
}

func shared(keys ...int64) []keyqueue.Lock {
	locks := make([]keyqueue.Lock, len(keys))
	for i, key := range keys {
		locks[i] = keyqueue.Lock{Key: key}
	}
	return locks
}

func (q *queue) enterTicket(t *ticket) *caller {
	q.t.Helper()
	ctx, cancel := context.WithCancel(q.t.Context())
	c := &caller{ticket: t, cancel: cancel, result: make(chan error, 1)}
	q.callers = append(q.callers, c)
	go func() { c.result <- q.Enter(ctx, t) }()
	q.settle()
	return c
}

// enter is a call that waits for an hour, alone.
func (q *queue) enter(name string, locks []keyqueue.Lock) *caller {
	q.t.Helper()
	return q.enterTicket(&ticket{Call: name, Locks: locks, Deadline: time.Now().Add(far)})
}

// together is a call that waits for the key, for an hour, and may be a part of a batch.
func (q *queue) together(name string, keys ...int64) *caller {
	q.t.Helper()
	return q.enterTicket(&ticket{Call: name, Locks: exclusive(keys...), Deadline: time.Now().Add(far), Together: true})
}

func (q *queue) leave(c *caller) {
	q.t.Helper()
	q.requireTurn(c)
	q.Leave(c.ticket)
	q.settle()
}

func (q *queue) cancelled(c *caller) {
	c.cancel()
	q.settle()
}

// end ends the batch, and gives back those of its calls that are named.
func (q *queue) end(b *batch, alone bool, names ...string) {
	q.t.Helper()
	var again []*ticket
	for _, member := range b.Depart() {
		for _, name := range names {
			if member.Call == name {
				again = append(again, member)
			}
		}
	}
	require.Len(q.t, again, len(names))
	b.End(again, alone)
	q.settle()
}

func (q *queue) requireWaits(callers ...*caller) {
	q.t.Helper()
	for _, c := range callers {
		require.False(q.t, c.returned, "%s has returned: %v", c.Call, c.err)
	}
}

func (q *queue) requireTurn(callers ...*caller) {
	q.t.Helper()
	for _, c := range callers {
		require.True(q.t, c.returned, "%s waits", c.Call)
		require.NoError(q.t, c.err, c.Call)
		require.False(q.t, c.Done(), c.Call)
	}
}

func (q *queue) requireDone(callers ...*caller) {
	q.t.Helper()
	for _, c := range callers {
		require.True(q.t, c.returned, "%s waits", c.Call)
		require.NoError(q.t, c.err, c.Call)
		require.True(q.t, c.Done(), c.Call)
	}
}

func (q *queue) requireError(want error, callers ...*caller) {
	q.t.Helper()
	for _, c := range callers {
		require.True(q.t, c.returned, "%s waits", c.Call)
		require.ErrorIs(q.t, c.err, want, c.Call)
		require.False(q.t, c.Done(), c.Call)
	}
}

func calls(tickets []*ticket) []string {
	names := []string{}
	for _, t := range tickets {
		names = append(names, t.Call)
	}
	return names
}

// requireBatch checks that exactly one batch has begun since the last one that the test has taken, and of whom. They
// depart.
func (q *queue) requireBatch(names ...string) *batch {
	q.t.Helper()
	b := q.takeBatch()
	require.Equal(q.t, names, calls(b.Depart()))
	require.Equal(q.t, names[0], b.First().Call)
	return b
}

func (q *queue) takeBatch() *batch {
	q.t.Helper()
	require.Len(q.t, q.batches, 1)
	b := q.batches[0]
	q.batches = nil
	return b
}

func (q *queue) requireNoBatch() {
	q.t.Helper()
	require.Empty(q.t, q.batches)
}

func TestDistinct(t *testing.T) {
	t.Parallel()
	x := func(key int64) keyqueue.Lock { return keyqueue.Lock{Key: key, Exclusive: true} }
	s := func(key int64) keyqueue.Lock { return keyqueue.Lock{Key: key} }
	for name, test := range map[string]struct{ locks, want []keyqueue.Lock }{
		"one":                          {[]keyqueue.Lock{s(1)}, []keyqueue.Lock{s(1)}},
		"in the order of the keys":     {[]keyqueue.Lock{x(2), s(-1), x(1)}, []keyqueue.Lock{s(-1), x(1), x(2)}},
		"twice the same":               {[]keyqueue.Lock{s(1), x(2), s(1), x(2)}, []keyqueue.Lock{s(1), x(2)}},
		"exclusive after shared":       {[]keyqueue.Lock{s(1), x(1)}, []keyqueue.Lock{x(1)}},
		"exclusive before shared":      {[]keyqueue.Lock{x(1), s(1)}, []keyqueue.Lock{x(1)}},
		"exclusive in between, of two": {[]keyqueue.Lock{s(2), s(1), x(2), s(2)}, []keyqueue.Lock{s(1), x(2)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			require.Equal(t, test.want, keyqueue.Distinct(test.locks))
		})
	}
}

func TestTheTurnGoesToWhoCameFirst(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		callers := make([]*caller, 20)
		for i := range callers {
			callers[i] = q.enter("", exclusive(1))
		}
		other := q.enter("of another key", exclusive(2))
		require.Equal(t, 2, q.Len())
		q.leave(other)
		require.Equal(t, 1, q.Len())
		for i, c := range callers {
			q.requireWaits(callers[i+1:]...)
			q.leave(c)
		}
	})
}

func TestSharedLocksAreHadTogetherAndExclusiveOnesAlone(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		reader1, reader2 := q.enter("reader 1", shared(1)), q.enter("reader 2", shared(1))
		q.requireTurn(reader1, reader2)
		writer := q.enter("writer", exclusive(1))
		q.leave(reader1)
		q.requireWaits(writer)
		q.leave(reader2)
		q.requireTurn(writer)
		reader3, reader4 := q.enter("reader 3", shared(1)), q.enter("reader 4", shared(1))
		q.requireWaits(reader3, reader4)
		q.leave(writer)
		q.requireTurn(reader3, reader4)
		q.leave(reader3)
		q.leave(reader4)
	})
}

func TestASharedLockIsNotHadBeforeAnExclusiveOneThatWaits(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		reader1 := q.enter("reader 1", shared(1))
		writer1 := q.enter("writer 1", exclusive(1))
		reader2, reader3 := q.enter("reader 2", shared(1)), q.enter("reader 3", shared(1))
		writer2 := q.enter("writer 2", exclusive(1))
		reader4 := q.enter("reader 4", shared(1))
		q.requireTurn(reader1)
		q.requireWaits(writer1, reader2, reader3, writer2, reader4)
		q.leave(reader1)
		q.requireTurn(writer1)
		q.requireWaits(reader2, reader3, writer2, reader4)
		q.leave(writer1)
		q.requireTurn(reader2, reader3)
		q.requireWaits(writer2, reader4)
		q.cancelled(writer2) // and now nobody is between the readers
		q.requireError(context.Canceled, writer2)
		q.requireTurn(reader4)
		q.leave(reader2)
		q.leave(reader3)
		q.leave(reader4)
	})
}

func TestSeveralLocksAreWaitedForAtOnce(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		first := q.enter("first", exclusive(1))
		both := q.enter("both", exclusive(1, 2)) // has its turn on 2, and waits for 1
		second := q.enter("second", exclusive(2))
		backwards := q.enter("backwards", exclusive(2, 1))
		three := q.enter("three", append(exclusive(3), shared(2)...))
		q.requireWaits(both, second, backwards, three)
		require.Equal(t, 3, q.Len())

		q.leave(first)
		q.requireTurn(both)
		q.requireWaits(second, backwards, three)
		q.leave(both)
		q.requireTurn(second)
		q.requireWaits(backwards, three)
		q.leave(second)
		q.requireTurn(backwards)
		q.requireWaits(three)
		q.leave(backwards)
		q.leave(three)
	})
}

func TestWhoGivesUpLeavesAllItsLines(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		first := q.enter("first", exclusive(1))
		both := q.enter("both", exclusive(1, 2))
		second := q.enter("second", exclusive(2))
		q.requireWaits(both, second)
		q.cancelled(both)
		q.requireError(context.Canceled, both)
		q.requireTurn(second)
		q.leave(second)
		q.leave(first)
	})
}

func TestTryTakesTheTurnOrNothing(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		try := func(locks []keyqueue.Lock) *caller {
			return q.enterTicket(&ticket{Locks: locks, Try: true})
		}
		free := try(exclusive(1, 2))
		q.requireTurn(free)
		q.requireError(keyqueue.ErrTaken, try(exclusive(2, 3)), try(shared(1)))
		require.Equal(t, 2, q.Len(), "of what it did not get, it takes nothing")
		q.leave(free)

		reader := q.enter("reader", shared(1))
		q.leave(try(shared(1)))
		writer := q.enter("writer", exclusive(1))
		q.requireError(keyqueue.ErrTaken, try(shared(1))) // it does not overtake
		q.leave(reader)
		q.leave(writer)
	})
}

func TestTheLineOfAKeyIsFull(t *testing.T) {
	t.Parallel()
	inQueue(t, 2, 0, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1))
		waiter1, waiter2 := q.enter("waiter 1", exclusive(1)), q.enter("waiter 2", shared(1))
		q.requireWaits(waiter1, waiter2)
		q.requireError(keyqueue.ErrFull, q.enter("one too many", exclusive(1)), q.enter("of two keys", exclusive(0, 1, 2)))
		require.Equal(t, 1, q.Len(), "who is refused takes nothing")
		q.requireError(keyqueue.ErrTaken, q.enterTicket(&ticket{Locks: exclusive(1), Try: true}))
		other := q.enter("of another key", exclusive(2))
		waiters := []*caller{q.enter("another's waiter 1", exclusive(2)), q.enter("another's waiter 2", exclusive(2))}
		q.requireError(keyqueue.ErrFull, q.enter("another's one too many", exclusive(2)))

		q.cancelled(waiter1)
		waiter3 := q.enter("waiter 3", exclusive(1))
		q.requireWaits(waiter3)
		q.requireError(keyqueue.ErrFull, q.enter("one too many again", exclusive(1)))
		q.leave(holder)
		q.requireTurn(waiter2)
		waiter4 := q.enter("waiter 4", exclusive(1))
		q.requireWaits(waiter3, waiter4)
		q.requireError(keyqueue.ErrFull, q.enter("one too many at last", exclusive(1)))
		for _, c := range append([]*caller{waiter2, waiter3, waiter4, other}, waiters...) {
			q.leave(c)
		}
	})
}

func TestTheDeadlineEndsTheWaitToTheNanosecond(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1))
		in := func(d time.Duration, keys ...int64) *caller {
			return q.enterTicket(&ticket{Call: d.String(), Locks: exclusive(keys...), Deadline: time.Now().Add(d)})
		}
		minute, second, past := in(time.Minute, 1), in(time.Second, 1, 2), in(-1, 1)
		q.requireError(keyqueue.ErrTimeout, past)
		elapse(time.Second - 1)
		q.settle()
		q.requireWaits(minute, second)
		elapse(1)
		q.settle()
		q.requireError(keyqueue.ErrTimeout, second)
		q.requireWaits(minute)
		require.Equal(t, 1, q.Len())

		q.leave(holder)
		q.requireTurn(minute)
		elapse(time.Hour) // a deadline is for the wait only
		q.leave(minute)
		q.leave(in(-1, 1)) // there is no wait
	})
}

func TestATurnThatComesAtTheDeadlineIsNotLost(t *testing.T) {
	t.Parallel()
	for range 100 { // which of the two is seen first, chance decides
		inQueue(t, 100, 0, func(t *testing.T, q *queue) {
			t.Helper()
			holder := q.enter("holder", exclusive(1))
			waiter := q.enterTicket(&ticket{Locks: exclusive(1), Deadline: time.Now().Add(time.Second)})
			next := q.enter("next", exclusive(1))
			elapse(time.Second)
			q.Leave(holder.ticket)
			q.settle()
			if waiter.err == nil {
				q.requireWaits(next)
				q.leave(waiter)
			} else {
				q.requireError(keyqueue.ErrTimeout, waiter)
			}
			q.leave(next)
		})
	}
}

func TestATurnThatComesWhenTheContextEndsIsNotLost(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 0, func(t *testing.T, q *queue) {
			t.Helper()
			holder := q.enter("holder", exclusive(1, 2))
			waiter := q.enter("waiter", exclusive(1, 2))
			next := q.enter("next", exclusive(1))
			q.Leave(holder.ticket)
			waiter.cancel()
			q.settle()
			if waiter.err == nil {
				q.requireWaits(next)
				q.leave(waiter)
			} else {
				q.requireError(context.Canceled, waiter)
			}
			q.leave(next)
		})
	}
}

func TestTheErrorIsWhatTheContextEndedWith(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 0, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		err := q.Enter(ctx, &ticket{Locks: exclusive(1), Deadline: time.Now().Add(time.Minute)})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		q.leave(holder)
	})
}

func TestALoneCallMakesNoBatch(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		first := q.together("first", 1)
		second := q.together("second", 1)
		q.leave(first)
		q.leave(second)
		q.requireNoBatch()
	})
}

func TestABatchIsOfThoseWhoStandBehindTheFirstAndWantTheSame(t *testing.T) {
	t.Parallel()
	with := func(change func(*ticket)) func(*ticket) { return change }
	same := with(func(*ticket) {})
	for name, test := range map[string]struct {
		maxBatch int
		behind   []func(*ticket) // the first, what is otherwise as the first
		locks    []keyqueue.Lock
		want     int // how many are in the batch; 0 if there is none
	}{
		"all":         {64, []func(*ticket){same, same, same}, exclusive(1), 3},
		"of two keys": {64, []func(*ticket){same, same, same}, exclusive(1, 2), 3},
		"not more than a batch may have": {
			2, []func(*ticket){same, same, same}, exclusive(1), 2,
		},
		"none, if a batch may have one":  {1, []func(*ticket){same, same, same}, exclusive(1), 0},
		"none, if a batch may have none": {0, []func(*ticket){same, same, same}, exclusive(1), 0},
		"up to one that may not": {
			64, []func(*ticket){same, same, with(func(t *ticket) { t.Together = false }), same}, exclusive(1), 2,
		},
		"none, if the first may not": {
			64, []func(*ticket){with(func(t *ticket) { t.Together = false }), same, same}, exclusive(1), 0,
		},
		"up to one with an earlier deadline than the first": {
			64, []func(*ticket){
				same, with(func(t *ticket) { t.Deadline = t.Deadline.Add(time.Second) }), same,
				with(func(t *ticket) { t.Deadline = t.Deadline.Add(-1) }), same,
			}, exclusive(1), 3,
		},
		"up to one that wants more": {
			64, []func(*ticket){same, same, with(func(t *ticket) { t.Locks = exclusive(1, 3) }), same}, exclusive(1), 2,
		},
		"up to one that wants less": {
			64, []func(*ticket){same, same, with(func(t *ticket) { t.Locks = exclusive(2) }), same}, exclusive(1, 2), 2,
		},
		"up to one that wants it shared": {
			64, []func(*ticket){same, same, with(func(t *ticket) { t.Locks = shared(1) }), same}, exclusive(1), 2,
		},
		"none, where one lock is shared": {
			64, []func(*ticket){same, same}, append(exclusive(1), shared(2)...), 0,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			inQueue(t, 100, test.maxBatch, func(t *testing.T, q *queue) {
				t.Helper()
				holder := q.enter("holder", test.locks)
				deadline := time.Now().Add(far)
				callers := make([]*caller, len(test.behind))
				for i, change := range test.behind {
					next := &ticket{Call: string(rune('a' + i)), Locks: test.locks, Deadline: deadline, Together: true}
					change(next)
					callers[i] = q.enterTicket(next)
				}
				q.leave(holder)
				if test.want == 0 {
					q.requireNoBatch()
				} else {
					names := []string{}
					for _, c := range callers[:test.want] {
						names = append(names, c.Call)
					}
					b := q.requireBatch(names...)
					q.requireWaits(callers...)
					require.NoError(t, b.ctx.Err())
					b.End(nil, false)
					q.settle()
					require.Error(t, b.ctx.Err(), "what was made for the batch is freed")
					q.requireDone(callers[:test.want]...)
				}
				for i := test.want; i < len(callers); i++ {
					if len(q.batches) > 0 { // of those who were left
						q.end(q.takeBatch(), false)
					}
					if !callers[i].Done() {
						q.leave(callers[i])
					}
				}
			})
		})
	}
}

func TestABatchIsNotFormedAcrossAnother(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1, 2))
		first := q.together("first", 1, 2)
		between := q.together("between", 2)
		second := q.together("second", 1, 2) // it is next in the line of 1, but not in that of 2
		q.leave(holder)
		q.requireNoBatch()
		q.leave(first)
		q.leave(between)
		q.leave(second)
	})
}

// batchOf is a batch of calls that waited for the key 1 together, an hour each, and who may stand behind them.
func (q *queue) batchOf(names ...string) (*batch, []*caller) {
	q.t.Helper()
	holder := q.enter("holder", exclusive(1))
	callers := make([]*caller, len(names))
	for i, name := range names {
		callers[i] = q.together(name, 1)
	}
	q.leave(holder)
	return q.takeBatch(), callers
}

func TestABatchHasTheTurnUntilItsEnd(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b", "c")
		late := q.together("late", 1)
		writer := q.enter("writer", exclusive(1))
		q.requireError(keyqueue.ErrTaken, q.enterTicket(&ticket{Locks: shared(1), Try: true}))
		q.end(b, false)
		q.requireDone(callers...)
		q.requireTurn(late) // too late for the batch
		q.requireWaits(writer)
		q.leave(late)
		q.leave(writer)
	})
}

func TestWhatABatchGivesBackIsRunAgainInOrder(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 3, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b", "c")
		next := q.together("d", 1)
		q.end(b, false, "b", "c")
		q.requireDone(callers[0])
		b = q.requireBatch("b", "c", "d")
		q.end(b, true, "c", "d") // alone
		q.requireNoBatch()
		q.requireDone(callers[1])
		q.requireTurn(callers[2])
		q.requireWaits(next)
		q.leave(callers[2])
		q.leave(next)
	})
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b", "c")
		next, last := q.together("d", 1), q.together("e", 1)
		q.end(b, true, "a", "b", "c")
		for i, c := range callers {
			q.requireWaits(callers[i+1:]...)
			q.requireWaits(next, last)
			q.requireNoBatch()
			q.leave(c)
		}
		q.end(q.requireBatch("d", "e"), false) // who was not in it may still be in another
		q.requireDone(next, last)
	})
}

func TestABatchOfSeveralKeysIsGivenBackToTheHeadOfEachLine(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1, 2))
		first, second := q.together("a", 1, 2), q.together("b", 1, 2)
		one, two := q.enter("one", exclusive(1)), q.enter("two", exclusive(2))
		q.leave(holder)
		q.end(q.takeBatch(), false, "a", "b")
		q.end(q.requireBatch("a", "b"), true, "a", "b")
		q.requireTurn(first)
		q.requireWaits(second, one, two)
		q.leave(first)
		q.requireWaits(one, two)
		q.leave(second)
		q.requireTurn(one, two)
		q.leave(one)
		q.leave(two)
	})
}

// Those who were given back wait already.
func TestWhatABatchGivesBackIsNeverTooMany(t *testing.T) {
	t.Parallel()
	inQueue(t, 2, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b")
		waiters := []*caller{q.enter("waiter 1", exclusive(1)), q.enter("waiter 2", exclusive(1))}
		q.end(b, true, "a", "b")
		q.requireError(keyqueue.ErrFull, q.enter("one too many", exclusive(1)))
		for _, c := range append(callers, waiters...) {
			q.leave(c)
		}
	})
}

func TestTheDeadlineDoesNotEndACallInABatch(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b")
		elapse(2 * far)
		q.settle()
		q.requireWaits(callers...)
		q.end(b, false)
		q.requireDone(callers...)
	})
}

// The timer and the end of the batch are both there when the call looks: whichever it sees, it was done.
func TestACallThatABatchHasDoneAtItsDeadlineIsDone(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b", "c")
			elapse(time.Until(callers[0].Deadline))
			b.Depart()
			b.End(nil, false)
			q.settle()
			q.requireDone(callers...)
		})
	}
}

func TestACallThatABatchGivesBackAtItsDeadlineIsTooLate(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b", "c")
			next := q.enterTicket(&ticket{Call: "next", Locks: exclusive(1), Deadline: time.Now().Add(2 * far)})
			elapse(time.Until(callers[0].Deadline))
			b.End(b.Depart()[1:], false)
			q.settle()
			q.requireDone(callers[0])
			q.requireError(keyqueue.ErrTimeout, callers[1:]...)
			q.leave(next)
		})
	}
}

func TestACallThatABatchGivesBackLateIsOverAndItsOthersGoOn(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1))
		in := func(d time.Duration) *caller {
			return q.enterTicket(&ticket{Call: d.String(), Locks: exclusive(1), Deadline: time.Now().Add(d), Together: true})
		}
		second, minute, minutes := in(time.Second), in(time.Minute), in(2*time.Minute)
		q.leave(holder)
		b := q.requireBatch("1s", "1m0s", "2m0s")
		elapse(time.Minute - 1)
		q.end(b, false, "1s", "1m0s", "2m0s")
		q.requireError(keyqueue.ErrTimeout, second)
		b = q.requireBatch("1m0s", "2m0s")
		elapse(1)
		q.end(b, false, "1m0s", "2m0s")
		q.requireError(keyqueue.ErrTimeout, minute)
		q.requireTurn(minutes)
		q.leave(minutes)
	})
}

func TestACallThatABatchGaveBackStillHasItsDeadline(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b")
		q.end(b, true, "a", "b")
		q.requireTurn(callers[0])
		elapse(2 * far)
		q.settle()
		q.requireError(keyqueue.ErrTimeout, callers[1])
		q.leave(callers[0])
	})
}

func TestAContextThatEndsBeforeTheBatchDeparts(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b", "c")
		q.cancelled(callers[0])
		q.requireError(context.Canceled, callers[0])
		require.NotErrorIs(t, callers[0].err, keyqueue.ErrDeparted)
		require.Equal(t, "a", b.First().Call)
		require.Equal(t, []string{"b", "c"}, calls(b.Depart()))
		require.NoError(t, b.ctx.Err())
		q.end(b, false)
		q.requireDone(callers[1:]...)
	})
}

func TestAContextThatEndsAfterTheBatchHasDeparted(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		b, callers := q.batchOf("a", "b", "c")
		departed := b.Depart()
		require.Equal(t, []string{"a", "b", "c"}, calls(departed))
		q.cancelled(callers[1])
		q.requireError(context.Canceled, callers[1])
		q.requireError(keyqueue.ErrDeparted, callers[1])
		require.Equal(t, []string{"a", "b", "c"}, calls(departed))
		b.End(departed, true)
		q.settle()
		q.leave(callers[0])
		q.leave(callers[2]) // b is not there any more to run again
	})
}

func TestAContextThatEndsWhenTheBatchHasEnded(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b", "c", "d")
			next := q.enter("next", exclusive(1))
			departed := b.Depart()
			b.End(departed[2:], false)
			for _, c := range callers {
				c.cancel()
			}
			q.settle()
			q.requireDone(callers[0], callers[1])
			q.requireError(context.Canceled, callers[2:]...)
			if len(q.batches) > 0 { // of the two others; they have given up
				b = q.takeBatch()
				require.ErrorIs(t, b.ctx.Err(), context.Canceled)
				require.Empty(t, b.Depart())
				b.End(nil, false)
				q.settle()
			}
			q.leave(next)
		})
	}
}

func TestAContextThatEndsWhileTheBatchEnds(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b", "c", "d")
			next := q.enterTicket(&ticket{Call: "next", Locks: exclusive(1), Deadline: time.Now().Add(3 * far)})
			departed := b.Depart()
			elapse(2 * far)
			for _, c := range callers {
				c.cancel()
			}
			b.End(departed[2:], false)
			q.settle()
			for i, c := range callers { // each has seen the one or the other first
				switch {
				case errors.Is(c.err, keyqueue.ErrDeparted):
				case i < 2:
					q.requireDone(c)
				default:
					q.requireError(keyqueue.ErrTimeout, c)
				}
			}
			q.leave(next)
		})
	}
}

func TestALateCallWhoseContextEndsIsOver(t *testing.T) {
	t.Parallel()
	for range 100 {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b")
			elapse(2 * far)
			b.End(b.Depart(), false)
			callers[0].cancel()
			callers[1].cancel()
			q.settle()
			q.requireError(keyqueue.ErrTimeout, callers...)
		})
	}
}

func TestTheContextOfABatchEndsWhenAllItsCallsHaveGivenUp(t *testing.T) {
	t.Parallel()
	for _, departs := range []bool{false, true} {
		inQueue(t, 100, 64, func(t *testing.T, q *queue) {
			t.Helper()
			b, callers := q.batchOf("a", "b", "c")
			if departs {
				b.Depart()
			}
			for _, c := range callers {
				require.NoError(t, b.ctx.Err())
				q.cancelled(c)
				q.requireError(context.Canceled, c)
				require.Equal(t, departs, errors.Is(c.err, keyqueue.ErrDeparted))
			}
			require.ErrorIs(t, b.ctx.Err(), context.Canceled)
			next := q.enter("next", exclusive(1))
			q.requireWaits(next) // until the batch has ended
			require.Empty(t, b.Depart())
			b.End(nil, false)
			q.settle()
			q.leave(next)
		})
	}
}

type valueKey struct{}

func TestTheContextOfABatchHasTheValuesOfTheFirst(t *testing.T) {
	t.Parallel()
	inQueue(t, 100, 64, func(t *testing.T, q *queue) {
		t.Helper()
		holder := q.enter("holder", exclusive(1))
		for _, name := range []string{"a", "b"} {
			go func() {
				ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), valueKey{}, name), far)
				defer cancel()
				_ = q.Enter(ctx, &ticket{Call: name, Locks: exclusive(1), Deadline: time.Now().Add(far), Together: true})
			}()
			q.settle()
		}
		q.leave(holder)
		b := q.requireBatch("a", "b")
		require.Equal(t, "a", b.ctx.Value(valueKey{}))
		_, ok := b.ctx.Deadline()
		require.False(t, ok, "the deadline of one is not that of all")
		b.End(nil, false)
	})
}
