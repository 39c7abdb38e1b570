package history

import (
	"hash/maphash"
	"slices"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
)

// The questions of [Accounts], whose accounts are numbered from 0, and then their answers, beside [Conflict].
type (
	// Move asks to move an amount into an account, out of one, or from one to another; None is the world outside. The
	// key is that of the account which the money leaves, or for a deposit of the one that gets it.
	Move struct {
		From, To int
		Amount   int64
		Key      string
	}

	// Balance asks for what is in an account.
	Balance struct{ Account int }

	// Books asks for what is in all accounts, and all that ever moved.
	Books struct{}

	// Moved is what was done, or what an earlier call did under the same key, and the balances after that, where they
	// are told: of what comes from outside, or goes there, it is 0.
	Moved struct {
		ID                 uuid.UUID
		FromAfter, ToAfter int64
	}

	// OverLimit says that the daily limit does not allow it.
	OverLimit struct{ Used, Limit int64 }

	// Insufficient says that the money is not there.
	Insufficient struct{}

	// Balanced answers Balance.
	Balanced struct{ Balance int64 }

	// Booked answers Books.
	Booked struct {
		Balances []int64
		Moves    []Posted
	}
)

const (
	// None is no account: where deposits come from, and withdrawals go.
	None = -1

	// Untold is the balance in a Moved that does not say it.
	Untold = -1
)

// Posted is a Move that was made, as it is read. Of what comes from outside, or goes there, the balance is 0.
type Posted struct {
	Move
	ID                 uuid.UUID // of its entry, or for a transfer its own
	FromAfter, ToAfter int64
}

// maxAccounts is how many one history can have.
const maxAccounts = 4

// books is the state of the accounts. It is a value but for moves, which is never written to.
type books struct {
	balances, spent [maxAccounts]int64
	moves           []posted
}

type posted struct {
	Posted
	by int // the call that made it; the moves are in this order
}

// Keeper returns the account that the key belongs to.
func (m Move) Keeper() int {
	if m.From == None {
		return m.To
	}
	return m.From
}

// Accounts is the model of accounts with these daily limits; 0 is none. All that is spent is spent on one day, so the
// history must not go beyond midnight where the accounts are.
func Accounts(dailyLimits ...int64) porcupine.Model {
	var limits [maxAccounts]int64
	copy(limits[:], dailyLimits)
	equal := func(a, b books) bool {
		return a.balances == b.balances && a.spent == b.spent && slices.Equal(a.moves, b.moves)
	}
	hash := func(b books) uint64 {
		return maphash.Comparable(seed, b.balances) + hashOf(b.moves)
	}
	return model(books{}, equal, hash, func(b books, op *Op) (books, bool) {
		switch in := op.In.(type) {
		case Move:
			return b.step(op, in, limits)
		case Balance:
			return b, op.Out == Balanced{b.balances[in.Account]}
		case Books:
			out, ok := op.Out.(Booked)
			return b, ok && slices.Equal(out.Balances, b.balances[:len(dailyLimits)]) && b.lists(out.Moves)
		}
		return b, false
	}, func(b books, op *Op) books {
		in, ok := op.In.(Move)
		if ok && b.earlier(in) < 0 && b.allowed(in, limits) && b.covered(in) {
			b, _ = b.post(in, op.Number, uuid.Nil)
		}
		return b
	})
}

func (b books) step(op *Op, in Move, limits [maxAccounts]int64) (books, bool) {
	earlier := b.earlier(in)
	switch out := op.Out.(type) {
	case Moved:
		if earlier < 0 {
			known := slices.ContainsFunc(b.moves, func(p posted) bool { return p.ID == out.ID })
			if known || !b.allowed(in, limits) || !b.covered(in) {
				return b, false
			}
			var p Posted
			b, p = b.post(in, op.Number, out.ID)
			return b, out.fits(p)
		}
		first := b.moves[earlier]
		if first.Move != in || !out.fits(first.Posted) {
			return b, false
		}
		if first.ID == uuid.Nil {
			b.moves = slices.Clone(b.moves)
			b.moves[earlier].ID = out.ID
			return b, true
		}
		return b, first.ID == out.ID
	case Conflict:
		return b, earlier >= 0 && b.moves[earlier].Move != in
	case OverLimit:
		return b, earlier < 0 && in.From != None && !b.allowed(in, limits) &&
			out.Limit == limits[in.From] && out.Used == b.spent[in.From]
	case Insufficient:
		return b, earlier < 0 && b.allowed(in, limits) && !b.covered(in)
	}
	return b, false
}

// earlier finds what was done under the key.
func (b books) earlier(in Move) int {
	if in.Key == "" {
		return -1
	}
	return slices.IndexFunc(b.moves, func(p posted) bool { return p.Key == in.Key && p.Keeper() == in.Keeper() })
}

func (b books) allowed(in Move, limits [maxAccounts]int64) bool {
	return in.From == None || limits[in.From] == 0 || b.spent[in.From]+in.Amount <= limits[in.From]
}

func (b books) covered(in Move) bool { return in.From == None || b.balances[in.From] >= in.Amount }

// fits says whether the balances are those that were told.
func (m Moved) fits(p Posted) bool {
	return (m.FromAfter == Untold || m.FromAfter == p.FromAfter) && (m.ToAfter == Untold || m.ToAfter == p.ToAfter)
}

func (b books) post(in Move, by int, id uuid.UUID) (books, Posted) {
	p := posted{Posted: Posted{Move: in, ID: id}, by: by}
	if in.From != None {
		b.balances[in.From] -= in.Amount
		b.spent[in.From] += in.Amount
		p.FromAfter = b.balances[in.From]
	}
	if in.To != None {
		b.balances[in.To] += in.Amount
		p.ToAfter = b.balances[in.To]
	}
	i, _ := slices.BinarySearchFunc(b.moves, by, func(other posted, by int) int { return other.by - by })
	b.moves = slices.Insert(slices.Clone(b.moves), i, p)
	return b, p.Posted
}

func (b books) lists(read []Posted) bool {
	return match(b.moves, read, func(p posted) Posted { return p.Posted }, func(p Posted) (uuid.UUID, Posted) {
		id := p.ID
		p.ID = uuid.Nil
		return id, p
	})
}
