package repository

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// LeaseParams are the parameters of [Repository.AcquireLease].
type LeaseParams struct {
	// Name is what only one may do at a time, such as "nightly-report": 1 to 255 bytes of UTF-8 without NUL. Names are
	// kept for ever, so they are of jobs, and not ids that are used once.
	Name string

	// Owner says who asks, for operators. At most 255 bytes of UTF-8 without NUL; empty is a random UUID.
	Owner string

	// TTL is how long the lease lasts if it is not renewed: 1 ms to 24 days; 0 is [DefaultLease].
	TTL time.Duration
}

// Lease is the right to be the only one who does something, until it ends.
type Lease struct {
	Name  string
	Owner string

	// Fence is the fencing token. Each time the name is acquired it is larger than ever before: a sink that remembers
	// the largest it has seen, and refuses smaller ones, is safe from holders that come back late.
	Fence int64

	// ExpiresAt is when the lease ends by the server's clock, which is not this machine's; see [Lease.Remaining].
	ExpiresAt time.Time

	// TTL is how long it lasts, from when it was acquired or renewed.
	TTL time.Duration

	trusted time.Time // until when, on the monotonic clock of this process
}

// Remaining returns for how long the lease can be relied on: to its end less a tenth of its TTL, counted on this
// machine's monotonic clock from before the request for it was sent. From 0 on it is not to be relied on, although the
// server may still say otherwise.
func (l *Lease) Remaining() time.Duration { return time.Until(l.trusted) }

// trust notes that the lease lasts for ttl from some time after sent.
func (l *Lease) trust(sent time.Time, ttl time.Duration, expiresAt time.Time) {
	l.TTL, l.ExpiresAt = ttl, expiresAt
	l.trusted = sent.Add(ttl - ttl/10) // a clock that is a tenth slow, or a holder that takes as long to stop
}

// AcquireLease acquires the lease of a name, if nobody has it. It does not wait for it: if somebody has it, also one of
// the same Owner, the error is [ErrLockBusy], a [LockBusyError] whose Where is [WhereLease].
//
// A lease ends by the server's clock, read when the name's row is locked, unless it is renewed or given back before.
// It outlives the transaction, the connection and the process. Whoever relies on it does so for [Lease.Remaining], and
// passes its Fence to what it writes to. [Repository.WithLease] does the first by itself.
//
// It opens a transaction of its own, and costs one round trip. Errors, beside those that the package names for every
// call: [ErrLockBusy], as said, and if another transaction held the row for the Repository's lock timeout;
// [ErrInvalid]. If the outcome is unknown, the lease may be held by nobody until it ends.
func (r *Repository) AcquireLease(ctx context.Context, p LeaseParams) (_ *Lease, err error) {
	defer r.done(ctx, "AcquireLease", time.Now(), &err)
	return r.acquireLease(ctx, p)
}

func (r *Repository) acquireLease(ctx context.Context, p LeaseParams) (*Lease, error) {
	if err := checkName("Name", p.Name); err != nil {
		return nil, err
	}
	if p.Owner == "" {
		p.Owner = uuid.NewString()
	}
	if err := checkName("Owner", p.Owner); err != nil {
		return nil, err
	}
	ttl, err := timeout("TTL", p.TTL, DefaultLease)
	if err != nil {
		return nil, err
	}
	c := &call{timeout: r.lockTimeout}
	sent := time.Now()
	var row db.LeaseAcquireRow
	err = r.run(ctx, c, func(tx *pipeline.Tx) (err error) {
		_ = db.New(tx.Before()).LeaseEnsure(ctx, p.Name)
		row, err = db.New(tx.Last()).LeaseAcquire(ctx, db.LeaseAcquireParams{
			Name:  p.Name,
			Owner: p.Owner,
			TtlMs: ttl.Milliseconds(),
		})
		return err
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, &LockBusyError{Waited: time.Since(sent), Where: WhereLease}
	case err != nil:
		return nil, err
	}
	l := &Lease{Name: p.Name, Owner: p.Owner, Fence: row.Fence}
	l.trust(sent, ttl, row.ExpiresAt)
	return l, nil
}

// RenewLease makes a lease end ttl from now, and updates l; its Fence stays. ttl is 1 ms to 24 days; 0 is l.TTL. l is
// for one goroutine at a time.
//
// It opens a transaction of its own, and costs one round trip. Errors: [ErrLeaseLost] if the lease ended, even if nobody
// else has acquired it yet, or was given back; nothing is changed then. [ErrLockBusy] if another transaction held the
// row for the Repository's lock timeout; [ErrInvalid]. The server's clock is read when the row is locked.
func (r *Repository) RenewLease(ctx context.Context, l *Lease, ttl time.Duration) (err error) {
	defer r.done(ctx, "RenewLease", time.Now(), &err)
	return r.renewLease(ctx, l, ttl)
}

func (r *Repository) renewLease(ctx context.Context, l *Lease, ttl time.Duration) error {
	if err := l.check(); err != nil {
		return err
	}
	ttl, err := timeout("ttl", ttl, l.TTL)
	if err != nil {
		return err
	}
	sent := time.Now()
	var expiresAt time.Time
	err = r.settle(ctx, func(q *db.Queries) (err error) {
		expiresAt, err = q.LeaseRenew(ctx, db.LeaseRenewParams{Name: l.Name, Owner: l.Owner, Fence: l.Fence, TtlMs: ttl.Milliseconds()})
		return err
	})
	if err == nil {
		l.trust(sent, ttl, expiresAt)
	}
	return err
}

// ReleaseLease gives a lease back, so that others need not wait for its end. l is not to be relied on from then on.
//
// Its terms and errors are those of [Repository.RenewLease]: with [ErrLeaseLost] it says that the lease ended before,
// so what was done under it may have been done beside somebody else.
func (r *Repository) ReleaseLease(ctx context.Context, l *Lease) (err error) {
	defer r.done(ctx, "ReleaseLease", time.Now(), &err)
	return r.releaseLease(ctx, l)
}

func (r *Repository) releaseLease(ctx context.Context, l *Lease) error {
	if err := l.check(); err != nil {
		return err
	}
	l.trusted = time.Time{}
	return r.settle(ctx, func(q *db.Queries) error {
		released, err := q.LeaseRelease(ctx, db.LeaseReleaseParams{Name: l.Name, Owner: l.Owner, Fence: l.Fence})
		if err == nil && released == 0 {
			return pgx.ErrNoRows
		}
		return err
	})
}

// check finds a Lease that AcquireLease did not return.
func (l *Lease) check() error {
	if l == nil || l.Fence <= 0 || l.TTL <= 0 {
		return &InvalidError{"l", "must be a Lease of AcquireLease"}
	}
	return errors.Join(checkName("Name", l.Name), checkName("Owner", l.Owner))
}

// WithLease acquires the lease of a name, as [Repository.AcquireLease] does, runs fn with its fencing token, and gives
// the lease back. Meanwhile it renews the lease each third of its TTL. When the lease is lost, or could not be renewed
// until [Lease.Remaining] is over, it ends fn's context, with the cause [ErrLeaseLost].
//
// fn is called at most once, and must return when its context ends: nothing else can stop it. It runs in no transaction,
// and no connection is held for it.
//
// If the lease lasted, an error of fn is returned as it is, and a panic goes on. If it did not, also if fn did not
// notice, the error is [ErrLeaseLost], and that of fn too. The other errors are those of [Repository.AcquireLease], and
// fn has not been called then.
func (r *Repository) WithLease(ctx context.Context, p LeaseParams, fn func(ctx context.Context, fence int64) error) (err error) {
	err = errNotReturned
	defer r.done(ctx, "WithLease", time.Now(), &err)
	if fn == nil {
		return &InvalidError{"fn", "must not be nil"}
	}
	l, err := r.acquireLease(ctx, p)
	if err != nil {
		return err
	}
	err = errNotReturned // until fn does

	held, cancel := context.WithCancelCause(ctx)
	var lost atomic.Bool
	lose := func(cause error) {
		lost.Store(true)
		cancel(cause)
	}
	keeping, stop := context.WithCancel(ctx)
	var keeper sync.WaitGroup
	keeper.Go(func() { r.keepLease(keeping, l, lose) })
	defer func() { // also if fn panics
		stop()
		keeper.Wait()
		cancel(nil)
		if !lost.Load() && !r.giveBack(ctx, l) {
			lost.Store(true)
		}
		switch {
		case lost.Load() && err != nil:
			err = fmt.Errorf("%w: %w", ErrLeaseLost, err)
		case lost.Load():
			err = ErrLeaseLost
		case err != nil && !errors.Is(err, errNotReturned):
			err = hostError{err}
		}
	}()
	return fn(held, l.Fence)
}

// giveBack releases a lease, and says whether it lasted until then.
func (r *Repository) giveBack(ctx context.Context, l *Lease) (lasted bool) {
	if l.Remaining() <= 0 {
		return false // in a process that was stopped for a while, fn may be ahead of what should have ended its context
	}
	// Should it fail, the lease ends by itself.
	ending, cancel := context.WithDeadline(context.WithoutCancel(ctx), l.trusted)
	defer cancel()
	return !errors.Is(r.releaseLease(ending, l), ErrLeaseLost)
}

// keepLease renews a lease until ctx ends, and calls lose when it cannot be relied on any more.
func (r *Repository) keepLease(ctx context.Context, l *Lease, lose func(cause error)) {
	// Not by the loop below, which may be waiting for an answer.
	end := time.AfterFunc(l.Remaining(), func() { lose(ErrLeaseLost) })
	defer end.Stop()
	wait := l.TTL / 3
	for {
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
		bounded, cancel := context.WithDeadline(ctx, l.trusted)
		err := r.renewLease(bounded, l, 0)
		cancel()
		switch {
		case err == nil:
			end.Reset(l.Remaining())
			wait = l.TTL / 3
		case errors.Is(err, ErrLeaseLost):
			lose(err)
			return
		case l.Remaining() <= 0:
			return
		default:
			wait = l.TTL / 30 // a few more tries before the end
		}
	}
}
