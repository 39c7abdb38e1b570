package history

import (
	"hash/maphash"
	"time"

	"github.com/anishathalye/porcupine"
)

// The questions of [Leases], and then their answers.
type (
	// Acquire asks for the lease.
	Acquire struct{ TTL time.Duration }

	// Renew asks for more time.
	Renew struct {
		Fence int64
		TTL   time.Duration
	}

	// Release gives the lease back.
	Release struct{ Fence int64 }

	// Token asks for the last token that was given.
	Token struct{}

	// Acquired is the token of who has the lease now.
	Acquired struct{ Fence int64 }

	// Taken says that somebody has the lease.
	Taken struct{}

	// Kept says that the lease was renewed.
	Kept struct{}

	// Released says that it was given back.
	Released struct{}

	// Lost says that it is over, or somebody else's.
	Lost struct{}

	// Given answers Token.
	Given struct{ Fence int64 }
)

// lease is the state of a name. It ends at a moment that only the server knows, by its own clock: after the call was
// made that acquired or renewed it, and before that returned.
type lease struct {
	fence      int64
	held       bool
	soon, late time.Duration // when it ends, at the earliest and at the latest
}

// clocks is what the server's clock, which may be set and is counted in milliseconds, may differ in the time of one
// lease from the monotonic one here.
const clocks = 5 * time.Millisecond

func (l lease) grant(op *Op, ttl time.Duration) lease {
	l.held, l.soon, l.late = true, op.Call+ttl-clocks, Forever
	if op.Return < Forever-ttl-clocks {
		l.late = op.Return + ttl + clocks
	}
	return l
}

// mayBeFree says whether there is a moment in the call at which nobody has the lease, mayBeHeld one at which somebody
// does.
func (l lease) mayBeFree(op *Op) bool { return !l.held || op.Return >= l.soon }
func (l lease) mayBeHeld(op *Op) bool { return l.held && op.Call <= l.late }

// Leases is the model of one name's lease: one holder at a time, until its end, and a token that rises by one for each.
func Leases() porcupine.Model {
	equal := func(a, b lease) bool { return a == b }
	hash := func(l lease) uint64 { return maphash.Comparable(seed, l) }
	return model(lease{}, equal, hash, stepLease, func(l lease, op *Op) lease {
		switch in := op.In.(type) {
		case Acquire:
			if l.mayBeFree(op) {
				l.fence++
				return l.grant(op, in.TTL)
			}
		case Renew:
			if in.Fence == l.fence && l.mayBeHeld(op) {
				return l.grant(op, in.TTL)
			}
		case Release:
			if in.Fence == l.fence && l.mayBeHeld(op) {
				l.held = false
			}
		}
		return l
	})
}

func stepLease(l lease, op *Op) (lease, bool) {
	switch in := op.In.(type) {
	case Acquire:
		switch out := op.Out.(type) {
		case Acquired:
			free := l.mayBeFree(op)
			l.fence++
			return l.grant(op, in.TTL), free && out.Fence == l.fence
		case Taken:
			return l, l.mayBeHeld(op)
		}
	case Renew:
		current := in.Fence == l.fence
		if op.Out == (Lost{}) {
			return l, !current || l.mayBeFree(op)
		}
		return l.grant(op, in.TTL), op.Out == Kept{} && current && l.mayBeHeld(op)
	case Release:
		current := in.Fence == l.fence
		if op.Out == (Lost{}) {
			return l, !current || l.mayBeFree(op)
		}
		held := l.mayBeHeld(op)
		l.held = false
		return l, op.Out == Released{} && current && held
	case Token:
		return l, op.Out == Given{l.fence}
	}
	return l, false
}
