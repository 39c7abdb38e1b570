// Package repository runs business rules that a constraint cannot say, such as "at most N pending requests per
// user", so that no two calls can break them together: latchkey's own, and by [Repository.Guard] the host's. Each
// runs as lock, check, write in one short READ COMMITTED transaction, whatever the default isolation level is.
//
// A call costs one network round trip, once the connection has prepared its statements: a few more the first time,
// and always where pgx's query exec mode is describe_exec. The first call that takes a lock also proves that the server
// excludes by it, which [Repository.Check] does too, or returns [ErrUnsafeServer]. The lock is pg_advisory_xact_lock on [Key], and is held
// for the server's work only. Waiting for it is bounded: [WithLockTimeout]. What bounds the network is the context:
// a server that never answers is waited for as long as that lasts.
//
// Errors are told apart with [errors.Is]; [IsRetryable] says which calls may simply be made again. Arguments are
// checked before anything is sent: [ErrInvalid]. Beside the errors that its own doc names, any call can return
// [ErrConnectionLost], [ErrReadOnly], [ErrDeadlock], [ErrSerialization], [ErrTooManyLocks] and the context's; and
// one that writes, [ErrOutcomeUnknown].
//
// A lock ends with its transaction, so it does not cover what happens outside of the database. For that there are
// events, which are written in the transaction and handled after it ([Event], [Dispatcher]), and leases by name
// ([Repository.WithLease]). Both outlive transactions, connections and processes, end by the server's clock, and
// have fencing tokens.
//
// The schema comes from package migrations, the statements from package queries.
package repository

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/internal/keyqueue"
)

// DefaultLockTimeout is the lock timeout without [WithLockTimeout]: longer than any queue of healthy calls,
// shorter than a user waits.
const DefaultLockTimeout = 2 * time.Second

// DefaultHoldTimeout is the hold timeout without [WithHoldTimeout]: a guarded function runs a few statements.
const DefaultHoldTimeout = 5 * time.Second

// DefaultMaxWaiters is the bound of the queue without [WithMaxWaiters]: some megabytes.
const DefaultMaxWaiters = 10_000

// DefaultMaxBatch is the bound of a batch without [WithCoalescing]: beyond it, a larger one is hardly faster.
const DefaultMaxBatch = 64

// inDatabase is how many calls for a key are in the database at a time, if calls that wait can run together.
const inDatabase = 2

// Repository is the data layer. It holds no state of its own beside the pool and the queue of the calls that wait,
// and is safe for concurrent use. Calls of two Repositories meet at the server, so one for each pool is best.
type Repository struct {
	pool        *pgxpool.Pool
	queue       *keyqueue.Queue[*call]
	lockTimeout time.Duration
	holdTimeout time.Duration
	maxWaiters  int
	maxBatch    int
	observer    Observer
	describes   bool // pgx's mode is describe_exec

	lockOrderCheck bool

	exclusion exclusion
}

// Option is a setting for [New].
type Option struct {
	name  string
	apply func(*Repository) error
}

// WithLockTimeout bounds the whole wait of a call until it has its locks: in the queue of this process, for a
// connection, and for every lock in the server. It is [DefaultLockTimeout] if not given or 0; otherwise from 1 ms to 24 days. The context's
// deadline shortens it, and so may a call's own option.
func WithLockTimeout(d time.Duration) Option {
	return Option{"WithLockTimeout", func(r *Repository) (err error) {
		r.lockTimeout, err = timeout("LockTimeout", d, DefaultLockTimeout)
		return err
	}}
}

// WithHoldTimeout bounds how long the function of [Repository.Guard] may take once it may have its locks, so that
// a function that hangs does not hang the others: its context ends, and the server ends a transaction that sends
// nothing for so long, unless the role or the database sets idle_in_transaction_session_timeout itself. The
// function's next query is [ErrConnectionLost] then. It is [DefaultHoldTimeout] if not given or 0; otherwise from
// 1 ms to 24 days.
func WithHoldTimeout(d time.Duration) Option {
	return Option{"WithHoldTimeout", func(r *Repository) (err error) {
		r.holdTimeout, err = timeout("HoldTimeout", d, DefaultHoldTimeout)
		return err
	}}
}

// WithMaxWaiters bounds how many calls of this process may wait for one key in memory; one more is [ErrLockBusy] at
// once. It is [DefaultMaxWaiters] if not given; otherwise from 1 to 1,000,000.
//
// Two calls for a key are in the database at a time: one that has the lock, and one that has asked for it, so that no
// network delay lies between them. Those for shared locks are there together. The others wait in memory, first come,
// first served, and hold no connection.
func WithMaxWaiters(perKey int) Option {
	return Option{"WithMaxWaiters", func(r *Repository) error {
		if perKey < 1 || perKey > 1_000_000 {
			return &InvalidError{"MaxWaiters", "must be from 1 to 1,000,000"}
		}
		r.maxWaiters = perKey
		return nil
	}}
}

// WithCoalescing bounds how many calls that wait for the same locks run together, as consecutive statements of one
// transaction: CreateSetup, Deposit, Withdraw, Transfer and [GuardQuery]. Calls of CreateSetup that follow one another,
// with the same limit and neither a key nor an event, are one statement. Each call has a result of its own, and none
// waits for others to come. It is [DefaultMaxBatch] if not given; otherwise up to 1024. With 0 or 1 none do; then half of
// the pool's connections may be for one key, so that they, and not the network, set the pace.
//
// Where such a transaction fails, its calls run again, each alone, so that none is harmed by another. A call whose
// context ends while the transaction is on its way is [ErrOutcomeUnknown], and does not stop the others.
func WithCoalescing(maxBatch int) Option {
	return Option{"WithCoalescing", func(r *Repository) error {
		if maxBatch < 0 || maxBatch > 1024 {
			return &InvalidError{"MaxBatch", "must be from 0 to 1024"}
		}
		r.maxBatch = maxBatch
		return nil
	}}
}

// WithLockOrderCheck makes a method that joins a transaction return [ErrLockOrder] where it asks for a lock out of
// order, instead of telling [Observer.LockOrder]; no lock is taken then. It is for tests: they meet the wrong
// order more often than the deadlock that comes of it.
//
// The order is that of [Rank], and within a rank of the key. It knows the locks that this process has asked for
// recently, a few thousand, and only those.
func WithLockOrderCheck() Option {
	return Option{"WithLockOrderCheck", func(r *Repository) error {
		r.lockOrderCheck = true
		return nil
	}}
}

// WithObserver sets functions that are told what the Repository does, for metrics and traces.
func WithObserver(o Observer) Option {
	return Option{"WithObserver", func(r *Repository) error {
		r.observer = o
		return nil
	}}
}

// Observer is told what a [Repository] does. Any of its functions may be nil. They are called on the
// goroutine of the call, from many at once, and should return quickly.
type Observer struct {
	// CallDone is called when a method of the Repository is about to return.
	CallDone func(ctx context.Context, c CallDone)

	// LockOrder is called when a method that joins a transaction asks for a lock out of order; the call goes
	// on. It makes each of those methods one round trip longer, to ask what the transaction holds.
	LockOrder func(ctx context.Context, e *LockOrderError)

	// EventsClaimed is called when a [Dispatcher] has claimed n events, at least one.
	EventsClaimed func(ctx context.Context, n int)

	// EventDone is called when a [Dispatcher] has handled an event, and has noted that as far as it could.
	EventDone func(ctx context.Context, e EventDone)
}

// CallDone describes a call that has ended.
type CallDone struct {
	Method   string        // such as "CreateSetup"
	Duration time.Duration // of the whole call
	Err      error         // what it returned
}

// New returns a Repository on pool, which stays the caller's to close. It does no I/O. The error is
// [ErrInvalid]: pool is nil, an option's value is out of range, or an option is given twice.
//
// A call whose context ends while it waits at the server asks the server to stop, and gives its connection up. The pool may
// open another before the server has ended the first session, so for a moment there can be up to twice as many sessions as
// the pool's MaxConns. A session whose request to stop was lost waits on, for as long as the call's lock timeout
// allowed, and those come on top. A context that ends by its deadline costs no connection as a rule: the lock timeout is cut
// to end a little before it.
//
// The pool may lead through a pooler in transaction mode, in the query exec modes that pgx itself can use there; the README
// says which.
func New(pool *pgxpool.Pool, opts ...Option) (*Repository, error) {
	if pool == nil {
		return nil, wrap("new", &InvalidError{"pool", "must not be nil"})
	}
	r := &Repository{
		pool:        pool,
		lockTimeout: DefaultLockTimeout,
		holdTimeout: DefaultHoldTimeout,
		maxWaiters:  DefaultMaxWaiters,
		maxBatch:    DefaultMaxBatch,
	}
	given := make(map[string]bool, len(opts))
	for _, o := range opts {
		if o.apply == nil {
			return nil, wrap("new", &InvalidError{"opts", "must not hold an empty Option"})
		}
		if given[o.name] {
			return nil, wrap("new", &InvalidError{o.name, "must be given once"})
		}
		given[o.name] = true
		if err := o.apply(r); err != nil {
			return nil, wrap("new", err)
		}
	}
	config := pool.Config()
	r.describes = config.ConnConfig.DefaultQueryExecMode == pgx.QueryExecModeDescribeExec
	depth := inDatabase
	if r.maxBatch < 2 {
		depth = max(depth, int(config.MaxConns)/2)
	}
	r.queue = keyqueue.New(depth, r.maxWaiters, r.maxBatch, r.runTogether)
	return r, nil
}

// done ends a public method: it prefixes the error, and tells the observer.
func (r *Repository) done(ctx context.Context, method string, started time.Time, err *error) {
	*err = wrap(method, *err)
	if r.observer.CallDone != nil {
		r.observer.CallDone(ctx, CallDone{Method: method, Duration: time.Since(started), Err: *err})
	}
}

// wrap prefixes an error with what was being done, unless it is the host's own.
func wrap(method string, err error) error {
	if err == nil {
		return nil
	}
	var host hostError
	if errors.As(err, &host) {
		return host.error
	}
	return fmt.Errorf("latchkey: %s: %w", method, err)
}
