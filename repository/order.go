package repository

import (
	"context"
	"fmt"

	"github.com/latchkey-go/latchkey/db"
)

// LockOrderError says that a transaction which holds one lock asked for another that must come before it. If a
// second transaction takes the two in their order, both can wait for each other. It is [ErrLockOrder].
type LockOrderError struct {
	Held  LockName
	Asked LockName
}

// LockName says which lock it is. Namespace and ID are empty if this process has not asked for it recently.
type LockName struct {
	Namespace string
	ID        string
	Key       int64
	Rank      int32
}

func (n LockName) String() string {
	if n.Namespace == "" {
		return fmt.Sprintf("lock with key %d", n.Key)
	}
	return fmt.Sprintf("lock %s:%s (rank %d, key %d)", n.Namespace, n.ID, n.Rank, n.Key)
}

func (e *LockOrderError) Error() string {
	return fmt.Sprintf("%v: %v asked for while %v is held", ErrLockOrder, e.Asked, e.Held)
}

// Is makes it [ErrLockOrder].
func (e *LockOrderError) Is(target error) bool { return target == ErrLockOrder }

// maxHeld bounds what checkOrder reads of a transaction that holds very many locks.
const maxHeld = 10 * MaxLocks

// checkOrder compares the locks of a call with those that the transaction which it joins holds already. It asks
// the server for them, which costs a round trip, so it does nothing unless somebody wants to know.
func (r *Repository) checkOrder(ctx context.Context, c *call) error {
	if !r.lockOrderCheck && r.observer.LockOrder == nil {
		return nil
	}
	var held []db.LockListHeldRow
	err := c.readJoined(ctx, func(q *db.Queries) (err error) {
		held, err = q.LockListHeld(ctx, maxHeld)
		return err
	})
	if err != nil {
		return err
	}
	mine := make(map[int64]bool, len(held))
	for _, h := range held {
		mine[h.Key] = mine[h.Key] || h.Exclusive
	}
	for i, l := range c.locks {
		asked := LockName{Namespace: l.namespace.name, ID: l.id, Key: c.keys[i], Rank: l.namespace.rank}
		if exclusive, ok := mine[asked.Key]; ok && (exclusive || !l.exclusive) {
			continue // held already, so there is nothing to wait for
		}
		for _, h := range held {
			name := nameOf(h.Key)
			if name.Namespace == "" || asked.Rank > name.Rank || asked.Rank == name.Rank && asked.Key > name.Key {
				continue
			}
			broken := &LockOrderError{Held: name, Asked: asked}
			if r.lockOrderCheck {
				return broken
			}
			r.observer.LockOrder(ctx, broken)
		}
	}
	return nil
}

func nameOf(key int64) LockName {
	l, _ := recent.named(key)
	return LockName{Namespace: l.namespace.name, ID: l.id, Key: key, Rank: l.namespace.rank}
}
