package keyqueue_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/keyqueue"
)

// model says what a Queue must do, as plainly as it can be said: it is one list of all calls in the order in which they
// came, and a call has its turn when none before it is in its way.
type model struct {
	maxWaiters, maxBatch int

	present []*modelled // who waits, has the turn or is in a batch
	batches []*modelBatch
}

type modelled struct {
	*caller
	turn     bool
	batch    *modelBatch
	gone     bool // from the batch
	departed bool // when it went
	together bool
	deadline time.Time

	// What Enter must have returned.
	returned, done bool
	err            error
}

type modelBatch struct {
	members  []*modelled
	departed bool
	real     *batch
}

func wants(m *modelled, key int64) (lock keyqueue.Lock, ok bool) {
	for _, lock := range m.Locks {
		if lock.Key == key {
			return lock, true
		}
	}
	return lock, false
}

// blocked tells whether a call before the i-th is in its way on the key.
func (o *model) blocked(i int, key int64) bool {
	mine, _ := wants(o.present[i], key)
	for _, before := range o.present[:i] {
		other, ok := wants(before, key)
		if ok && (mine.Exclusive || other.Exclusive) && (before.batch == nil || before.batch != o.present[i].batch) {
			return true
		}
	}
	return false
}

func (o *model) waiters(key int64) int {
	n := 0
	for i, m := range o.present {
		if _, ok := wants(m, key); ok && m.batch == nil && o.blocked(i, key) {
			n++
		}
	}
	return n
}

func (m *modelled) back(err error) { m.returned, m.err = true, err }

func (o *model) enter(m *modelled) {
	if m.Try {
		defer func() { m.Try = false }() // what it was given is like any other's
	}
	o.present = append(o.present, m)
	last := len(o.present) - 1
	for _, lock := range m.Locks { // the first key that is in the way says what it is
		if !o.blocked(last, lock.Key) {
			continue
		}
		if m.Try {
			m.back(keyqueue.ErrTaken)
		} else if o.waiters(lock.Key) > o.maxWaiters {
			m.back(keyqueue.ErrFull)
		}
		if m.returned {
			o.remove(m)
			return
		}
	}
	for _, lock := range m.Locks {
		if o.blocked(last, lock.Key) {
			return
		}
	}
	m.turn = true
	m.back(nil)
}

func (o *model) remove(m *modelled) {
	o.present = slices.DeleteFunc(o.present, func(other *modelled) bool { return other == m })
}

// advance gives turns, and forms batches.
func (o *model) advance() {
	for i, m := range o.present {
		if m.turn || m.batch != nil || slices.ContainsFunc(m.Locks, func(l keyqueue.Lock) bool { return o.blocked(i, l.Key) }) {
			continue
		}
		members := []*modelled{m}
		for next := o.behind(members); next != nil && len(members) < o.maxBatch; next = o.behind(members) {
			members = append(members, next)
		}
		if len(members) == 1 {
			m.turn = true
			m.back(nil)
			continue
		}
		b := &modelBatch{members: members}
		o.batches = append(o.batches, b)
		for _, member := range members {
			member.batch = b
		}
	}
}

// behind is who stands next to the members in the line of each of their keys, if it may be one of them.
func (o *model) behind(members []*modelled) *modelled {
	first := members[0]
	var next *modelled
	for i, lock := range first.Locks {
		var after *modelled
		for _, m := range o.present[slices.Index(o.present, members[len(members)-1])+1:] {
			if _, ok := wants(m, lock.Key); ok {
				after = m
				break
			}
		}
		if after == nil || i > 0 && after != next || !lock.Exclusive {
			return nil
		}
		next = after
	}
	if !first.together || !next.together || next.deadline.Before(first.deadline) || !slices.Equal(first.Locks, next.Locks) {
		return nil
	}
	return next
}

func (o *model) leave(m *modelled) {
	o.remove(m)
	o.advance()
}

func (o *model) cancel(m *modelled) {
	switch {
	case m.returned:
	case m.batch != nil:
		m.gone, m.departed = true, m.batch.departed
		m.back(context.Canceled)
	default:
		m.back(context.Canceled)
		o.leave(m)
	}
}

// pass lets the time pass until now.
func (o *model) pass(now time.Time) {
	for {
		var next *modelled
		for _, m := range o.present {
			if !m.returned && m.batch == nil && !now.Before(m.deadline) && (next == nil || m.deadline.Before(next.deadline)) {
				next = m
			}
		}
		if next == nil {
			return
		}
		next.back(keyqueue.ErrTimeout)
		o.leave(next)
	}
}

func (o *model) end(b *modelBatch, again []*modelled, alone bool, now time.Time) {
	o.batches = slices.DeleteFunc(o.batches, func(other *modelBatch) bool { return other == b })
	for _, m := range b.members {
		m.batch = nil
		switch {
		case m.gone:
			o.remove(m)
		case !slices.Contains(again, m):
			m.done = true
			m.back(nil)
			o.remove(m)
		case !now.Before(m.deadline):
			m.back(keyqueue.ErrTimeout)
			o.remove(m)
		default:
			m.together = m.together && !alone
		}
	}
	o.advance()
}

// walk is a random walk of a Queue and the model, side by side.
type walk struct {
	*queue
	*model
	random *rand.Rand
	all    []*modelled
}

func pick[T any](r *rand.Rand, from []T) (one T, ok bool) {
	if len(from) == 0 {
		return one, false
	}
	return from[r.IntN(len(from))], true
}

func (w *walk) matching(fits func(*modelled) bool) []*modelled {
	return slices.DeleteFunc(slices.Clone(w.present), func(m *modelled) bool { return !fits(m) })
}

func (w *walk) step() {
	switch w.random.IntN(12) {
	case 0, 1, 2, 3:
		w.stepEnter()
	case 4, 5, 6:
		if m, ok := pick(w.random, w.matching(func(m *modelled) bool { return m.turn })); ok {
			w.Leave(m.ticket)
			w.model.leave(m)
		}
	case 7:
		if m, ok := pick(w.random, w.matching(func(m *modelled) bool { return !m.gone })); ok {
			m.caller.cancel()
			w.model.cancel(m)
		}
	case 8:
		elapse(time.Duration(w.random.IntN(3)) * time.Millisecond)
		w.pass(time.Now())
	case 9:
		if b, ok := pick(w.random, w.model.batches); ok {
			b.departed = true
			b.real.Depart()
		}
	default:
		if b, ok := pick(w.random, w.model.batches); ok {
			w.stepEnd(b)
		}
	}
}

func (w *walk) stepEnter() {
	var locks []keyqueue.Lock
	for range 1 + w.random.IntN(3)/2 {
		locks = append(locks, keyqueue.Lock{Key: int64(w.random.IntN(3)), Exclusive: w.random.IntN(4) > 0})
	}
	t := &ticket{
		Call:     fmt.Sprint(len(w.all)),
		Locks:    keyqueue.Distinct(locks),
		Deadline: time.Now().Add(time.Duration(1+w.random.IntN(20))*time.Millisecond + time.Duration(1+len(w.all))), // no two the same
		Try:      w.random.IntN(8) == 0,
		Together: w.random.IntN(8) > 0,
	}
	m := &modelled{caller: &caller{ticket: t}, together: t.Together, deadline: t.Deadline}
	w.model.enter(m)
	t.Try = t.Try || m.err == keyqueue.ErrTaken //nolint:errorlint // the very same
	w.all = append(w.all, m)
	m.caller = w.enterTicket(t)
}

func (w *walk) stepEnd(b *modelBatch) {
	b.departed = true
	var again []*modelled
	var tickets []*ticket
	for _, t := range b.real.Depart() {
		i := slices.IndexFunc(b.members, func(m *modelled) bool { return m.ticket == t })
		if w.random.IntN(2) == 0 {
			again, tickets = append(again, b.members[i]), append(tickets, t)
		}
	}
	alone := w.random.IntN(2) == 0
	now := time.Now()
	b.real.End(tickets, alone)
	w.model.end(b, again, alone, now)
}

// compare checks that the Queue is where the model is.
func (w *walk) compare() {
	w.t.Helper()
	w.settle()
	for _, real := range w.queue.batches { // of each key there is one at most, so the first member tells which it is
		i := slices.IndexFunc(w.model.batches, func(b *modelBatch) bool { return b.members[0].ticket == real.First() })
		require.GreaterOrEqual(w.t, i, 0, "a batch of %s", real.First().Call)
		w.model.batches[i].real = real
	}
	w.queue.batches = nil
	for _, b := range w.model.batches {
		require.NotNil(w.t, b.real, "no batch of %s", b.members[0].Call)
		there := slices.ContainsFunc(b.members, func(m *modelled) bool { return !m.gone })
		require.Equal(w.t, there, b.real.ctx.Err() == nil)
	}
	keys := make(map[int64]bool)
	for _, m := range w.present {
		for _, lock := range m.Locks {
			keys[lock.Key] = true
		}
	}
	require.Equal(w.t, len(keys), w.Len())
	for _, m := range w.all {
		require.Equal(w.t, m.returned, m.caller.returned, "%s: %v", m.Call, m.caller.err)
		require.ErrorIs(w.t, m.caller.err, m.err, m.Call)
		if m.returned && m.err == nil {
			require.Equal(w.t, m.done, m.Done(), m.Call)
		}
		if m.departed {
			require.ErrorIs(w.t, m.caller.err, keyqueue.ErrDeparted)
		}
	}
}

// finish lets everybody go.
func (w *walk) finish() {
	for len(w.present) > 0 {
		for _, b := range slices.Clone(w.model.batches) {
			b.real.End(nil, false)
			w.model.end(b, nil, false, time.Now())
			w.compare()
		}
		for _, m := range w.matching(func(m *modelled) bool { return m.turn }) {
			w.Leave(m.ticket)
			w.model.leave(m)
			w.compare()
		}
	}
}

func TestTheQueueDoesWhatItsModelDoes(t *testing.T) {
	t.Parallel()
	walks := 160
	if testing.Short() {
		walks = 30
	}
	var formed, refused, late, again atomic.Int64
	for i := range walks {
		maxWaiters, maxBatch := 2+i%4, []int{0, 2, 3, 64}[i/4%4]
		seed := rand.Uint64()
		inQueue(t, maxWaiters, maxBatch, func(t *testing.T, q *queue) {
			t.Helper()
			defer func() {
				if t.Failed() {
					t.Log("seed", seed, "walk", i)
				}
			}()
			w := &walk{queue: q, model: &model{maxWaiters: maxWaiters, maxBatch: maxBatch}, random: rand.New(rand.NewPCG(seed, 0))}
			for range 150 {
				w.step()
				w.compare()
			}
			w.finish()
			for _, m := range w.all {
				switch {
				case m.done:
					formed.Add(1)
				case m.err == keyqueue.ErrFull: //nolint:errorlint // the very same
					refused.Add(1)
				case m.err == keyqueue.ErrTimeout: //nolint:errorlint // the very same
					late.Add(1)
				case m.together != m.Together || m.err == nil && m.Together && m.turn:
					again.Add(1)
				}
			}
		})
	}
	for name, n := range map[string]int64{"done in a batch": formed.Load(), "refused": refused.Load(), "late": late.Load(), "alone": again.Load()} {
		require.NotZero(t, n, "no call was %s: the walks say nothing of that", name)
	}
}

// In real time, with real goroutines: the race detector has something to see.
func TestManyCallsAtOnceKeepToTheDepthAndNoneIsLostOrRunTwice(t *testing.T) {
	t.Parallel()
	for _, depth := range []int{1, 2, 3} {
		t.Run(fmt.Sprintf("depth %d", depth), func(t *testing.T) {
			t.Parallel()
			manyCallsAtOnce(t, depth)
		})
	}
}

// room counts who has the turn on a key.
type room struct {
	sync.Mutex
	all, exclusive int
}

// change returns how many are in there now, if it matters.
func (r *room) change(lock keyqueue.Lock, n int) int {
	r.Lock()
	defer r.Unlock()
	r.all += n
	if lock.Exclusive {
		r.exclusive += n
	}
	if r.exclusive == 0 {
		return 0
	}
	return r.all
}

func manyCallsAtOnce(t *testing.T, depth int) {
	t.Helper()
	const callers, rounds, keys = 32, 200, 3
	type call struct{ runs atomic.Int32 }
	type ticket = keyqueue.Ticket[*call]
	var rooms [keys]room
	var broken, batches atomic.Int32
	run := func(locks []keyqueue.Lock, calls ...*call) {
		for _, lock := range locks {
			if rooms[lock.Key].change(lock, 1) > depth {
				broken.Add(1)
			}
		}
		for _, c := range calls {
			c.runs.Add(1)
		}
		runtime.Gosched() // so that others come meanwhile
		for _, lock := range locks {
			rooms[lock.Key].change(lock, -1)
		}
	}
	q := keyqueue.New(depth, 1000, 8, func(_ context.Context, b *keyqueue.Batch[*call]) {
		batches.Add(1)
		departed := b.Depart()
		half := len(departed) / 2
		again := departed[half:]
		for _, t := range departed[:half] {
			run(t.Locks, t.Call)
		}
		b.End(again, half%2 == 0)
	})

	var wg sync.WaitGroup
	for i := range callers {
		random := rand.New(rand.NewPCG(uint64(i), 0))
		wg.Go(func() {
			for range rounds {
				c := &call{}
				ctx, cancel := context.WithCancel(context.Background())
				var locks []keyqueue.Lock
				for range 1 + random.IntN(3)/2 {
					locks = append(locks, keyqueue.Lock{Key: int64(random.IntN(keys)), Exclusive: random.IntN(8) > 0})
				}
				t := &ticket{Call: c, Locks: keyqueue.Distinct(locks), Deadline: time.Now().Add(far), Together: random.IntN(8) > 0}
				if random.IntN(16) == 0 {
					t.Deadline = time.Now().Add(time.Duration(random.IntN(50)) * time.Microsecond)
				}
				if random.IntN(16) == 0 {
					go cancel()
				}
				err := q.Enter(ctx, t)
				if err == nil && !t.Done() {
					run(t.Locks, c)
					q.Leave(t)
				}
				cancel()
				if err == nil && c.runs.Load() != 1 {
					broken.Add(1)
				}
			}
		})
	}
	wg.Wait()
	require.Zero(t, broken.Load())
	require.NotZero(t, batches.Load(), "without a batch the test says little")
	require.Eventually(t, func() bool { return q.Len() == 0 }, time.Minute, time.Millisecond) // a batch that was given up may still end
}
