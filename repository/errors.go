package repository

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// What a caller branches on. Every error of this package that has one of these causes is it, by [errors.Is],
// and the server's *[pgconn.PgError], where there is one, is found by [errors.As].
var (
	// ErrPendingExists is the [LimitError] of setup requests: the user has as many pending ones as may be.
	ErrPendingExists = errors.New("too many requests are pending")

	// ErrDailyLimit is the [LimitError] of accounts: that much may not leave the account on one day.
	ErrDailyLimit = errors.New("daily limit is reached")

	// ErrInsufficientFunds means that there is less in the account than was to leave it. Nothing was written.
	ErrInsufficientFunds = errors.New("insufficient funds")

	// ErrLockBusy is a [LockBusyError].
	ErrLockBusy = errors.New("lock is busy")

	// ErrDeadlock means that the server ended the call to resolve a deadlock. Nothing was written.
	ErrDeadlock = errors.New("deadlock")

	// ErrSerialization means that a transaction could not be serialised with others. Nothing was written.
	ErrSerialization = errors.New("serialization failure")

	// ErrOutcomeUnknown means that the connection, or the context, ended after COMMIT was sent and before its answer
	// came: the call may or may not have been committed. With an idempotency key, make the same call again and it tells.
	ErrOutcomeUnknown = errors.New("outcome unknown")

	// ErrConnectionLost means that no connection could be made, or it ended before COMMIT was sent. Nothing was
	// written. A login that the server refuses is not among these, but its own error.
	ErrConnectionLost = errors.New("connection lost")

	// ErrReadOnly means that the server takes no writes: it is a standby, a primary that was demoted, or its
	// default_transaction_read_only is on. The connection is closed, so that the next call gets another one; that of a
	// transaction that was joined is the caller's to close.
	ErrReadOnly = errors.New("server is read-only")

	// ErrIsolation means that the transaction to join is not READ COMMITTED, or is READ ONLY.
	ErrIsolation = errors.New("transaction to join is not read committed, read write")

	// ErrIdempotencyConflict means that the idempotency key was used before, with other parameters.
	ErrIdempotencyConflict = errors.New("idempotency key was used with other parameters")

	// ErrUnsafeServer means that two connections made as the pool makes its own could hold the same advisory lock at
	// once, or that there is none to be had: the server is not PostgreSQL, or they lead to different servers. Nothing
	// was written, and no rule would hold. See [Repository.Check].
	ErrUnsafeServer = errors.New("server does not exclude by advisory locks")

	// ErrTooManyLocks means that the server's lock table is full.
	ErrTooManyLocks = errors.New("too many locks")

	// ErrLockOrder is a [LockOrderError].
	ErrLockOrder = errors.New("locks are taken out of order")

	// ErrLeaseLost means that a claim or a lease is not current any more: its time is over by the server's clock, or
	// it was ended, and perhaps given to somebody else. Nothing was written. Stop what was done under it.
	ErrLeaseLost = errors.New("lease is lost")

	// ErrNotFound means that there is no row with this id.
	ErrNotFound = errors.New("not found")

	// ErrNotPending means that the request was completed or cancelled before.
	ErrNotPending = errors.New("not pending")

	// ErrInvalid is an [InvalidError].
	ErrInvalid = errors.New("invalid argument")
)

// InvalidError says which argument is wrong. Nothing was written; no SQL was sent and no connection taken, unless
// only the server could tell: that an amount is too large for the balance, or a time zone unknown. It is
// [ErrInvalid].
type InvalidError struct {
	Argument string // as it is named in Go, such as "MaxPending"
	Problem  string // what it must be, such as "must be from 1 to 1000"
}

func (e *InvalidError) Error() string { return e.Argument + " " + e.Problem }

// Is makes it [ErrInvalid].
func (e *InvalidError) Is(target error) bool { return target == ErrInvalid }

// LimitError says that the rule refuses the call, and what was counted. Nothing was written.
type LimitError struct {
	Rule      error // which rule it was: [ErrPendingExists] or [ErrDailyLimit]
	Used      int64 // what was in use, counted under the lock; -1 if not the count but the constraint refused
	Limit     int64 // what may be in use
	Requested int64 // what the call would have added
	Err       error // the *[pgconn.PgError] if the constraint refused, else nil
}

func (e *LimitError) Error() string {
	if e.Err != nil {
		return fmt.Sprintf("%v: the constraint refused, limit %d: %v", e.Rule, e.Limit, e.Err)
	}
	return fmt.Sprintf("%v: %d of %d in use, %d requested", e.Rule, e.Used, e.Limit, e.Requested)
}

func (e *LimitError) Unwrap() []error { return unwrap(e.Rule, e.Err) }

// LockBusyError says that the call gave up waiting, or that a try found the lock held. Nothing was written.
// It is [ErrLockBusy]. Where the context's deadline was what cut the wait short, the error that wraps it is also
// [context.DeadlineExceeded], even if the call returns a little before the deadline.
type LockBusyError struct {
	Namespace string        // of the lock; empty for a call that takes none
	Waited    time.Duration // from the start of the call
	Where     string        // what it waited for, one of the Where constants
	Err       error         // the server's *[pgconn.PgError], or what the queue or the proof of the first use says; nil if its time was over
}

// Where a call was waiting when it gave up.
const (
	WhereQueue    = "queue"    // for another call of this process with the same key, or the queue of those is full
	WherePool     = "pool"     // for a connection
	WhereAdvisory = "advisory" // for the advisory lock, held by another call with the same key
	WhereRow      = "row"      // for a row that another transaction has written, without the lock
	WhereLease    = "lease"    // for nothing: somebody has the lease, and it was not waited for
)

func (e *LockBusyError) Error() string {
	text := fmt.Sprintf("%v: waited %v for %s", ErrLockBusy, e.Waited.Round(time.Millisecond), e.Where)
	if e.Namespace != "" {
		text += ", namespace " + e.Namespace
	}
	if e.Err != nil {
		text += ": " + e.Err.Error()
	}
	return text
}

func (e *LockBusyError) Unwrap() []error { return unwrap(ErrLockBusy, e.Err) }

func unwrap(kind, cause error) []error {
	if cause == nil {
		return []error{kind}
	}
	return []error{kind, cause}
}

// IsRetryable says whether the same call may be made again as it is, with a fresh context: nothing was written,
// and the reason may pass. It is also true of [ErrOutcomeUnknown] if the call had an idempotency key. For a method
// that joins a transaction, a deadlock or a lost connection means to roll that back and run all of it again.
func IsRetryable(err error) bool {
	var unknown *outcomeError
	if errors.As(err, &unknown) {
		return unknown.idempotent
	}
	for _, kind := range []error{ErrLockBusy, ErrDeadlock, ErrSerialization, ErrConnectionLost, ErrReadOnly} {
		if errors.Is(err, kind) {
			return true
		}
	}
	return false
}

// outcomeError is ErrOutcomeUnknown with what IsRetryable must know.
type outcomeError struct {
	idempotent bool
	err        error
}

func (e *outcomeError) Error() string   { return fmt.Sprintf("%v: %v", ErrOutcomeUnknown, e.err) }
func (e *outcomeError) Unwrap() []error { return []error{ErrOutcomeUnknown, e.err} }

// The conditions of PostgreSQL that mean something to a caller, by SQLSTATE.
var conditions = map[string]error{
	"25000": ErrIsolation, // raised by TxRequireReadCommitted
	"25006": ErrReadOnly,
	"40001": ErrSerialization,
	"40P01": ErrDeadlock,
	"53200": ErrTooManyLocks,
}

const (
	featureNotSupported   = "0A000"
	lockNotAvailable      = "55P03"
	queryCanceled         = "57014"
	uniqueViolation       = "23505"
	noSuchStatement       = "26000"
	checkViolation        = "23514"
	numericOutOfRange     = "22003"
	invalidParameterValue = "22023"
	insufficientPrivilege = "42501"
	undefinedFunction     = "42883"
)

// Constraints that stand behind a rule. The host's own may have the same names, in another schema.
const (
	schema            = "latchkey"
	pendingConstraint = "setup_requests_pending_key"
	balanceConstraint = "accounts_balance_check"
	turnConstraint    = "outbox_turn_key"
)

// idempotencyConstraints are those that hold an idempotency key to one use.
var idempotencyConstraints = []string{
	"accounts_idempotency_key",
	"entries_idempotency_key",
	"setup_requests_idempotency_key",
}

// What the server finds wrong with an argument of a statement of latchkey's own.
var (
	errBalanceRange = &InvalidError{"Amount", "must not take the balance beyond an int64"}
	errTimeZone     = &InvalidError{"TimeZone", "must be known to the server"}
)

// errTurnTaken means that two calls claimed an event of one aggregate at the same moment, and the other was first.
var errTurnTaken = errors.New("another event of the aggregate was claimed at the same moment")

// classify gives an error of the driver or the server its meaning, by SQLSTATE and constraint name. It is the
// one place that does. lost says whether the connection is gone; it is not asked about one that may be somebody
// else's by now.
func (c *call) classify(ctx context.Context, err error, lost func() bool) error {
	var (
		outcome *pipeline.OutcomeError
		before  *pipeline.BeforeError
		pgErr   = new(pgconn.PgError)
	)
	errors.As(err, &pgErr)
	constraint := ""
	if pgErr.SchemaName == schema {
		constraint = pgErr.ConstraintName
	}
	gaveUp := pgErr.Code == lockNotAvailable || pgErr.Code == queryCanceled && !errors.Is(ctx.Err(), context.Canceled)
	switch {
	case errors.As(err, &outcome):
		return &outcomeError{c.idempotent, withContext(ctx, err)}

	case errors.As(err, &before) && gaveUp && len(c.locks) > 0:
		return withContext(ctx, c.busy(WhereAdvisory, err))

	case gaveUp && (!c.foreign || pgErr.Code == lockNotAvailable):
		// latchkey's own statements take microseconds unless they wait; the host's may be cancelled for what
		// they do.
		return withContext(ctx, c.busy(WhereRow, err))

	case ctx.Err() != nil:
		return withContext(ctx, err)

	case pgErr.Code == uniqueViolation && constraint == pendingConstraint:
		return &LimitError{Rule: ErrPendingExists, Used: -1, Limit: c.limit, Requested: 1, Err: err}

	case pgErr.Code == uniqueViolation && slices.Contains(idempotencyConstraints, constraint):
		return fmt.Errorf("%w: %w", ErrIdempotencyConflict, err)

	case pgErr.Code == uniqueViolation && constraint == turnConstraint:
		return fmt.Errorf("%w: %w", errTurnTaken, err)

	case pgErr.Code == checkViolation && constraint == balanceConstraint:
		return fmt.Errorf("%w: %w", ErrInsufficientFunds, err)

	case pgErr.Code == numericOutOfRange && !c.foreign:
		// A writer without the lock changed the balance between the check and the write.
		return fmt.Errorf("%w: %w", errBalanceRange, err)

	case pgErr.Code == invalidParameterValue && !c.foreign && before == nil:
		return fmt.Errorf("%w: %w", errTimeZone, err)

	case pgErr.Code == featureNotSupported && pgErr.Routine == "GetSerializableTransactionSnapshot":
		// A session whose default is SERIALIZABLE cannot even prepare a statement on a standby.
		return fmt.Errorf("%w: %w", ErrReadOnly, err)

	case conditions[pgErr.Code] != nil:
		return fmt.Errorf("%w: %w", conditions[pgErr.Code], err)

	case isArgument(err), errors.Is(err, pgx.ErrTxClosed):
		return err

	case c.outer == nil && pgErr.Code == noSuchStatement:
		// The host dropped what was prepared on the connection, which is closed for that.
		return fmt.Errorf("%w: %w", ErrConnectionLost, err)

	case lost():
		return fmt.Errorf("%w: %w", ErrConnectionLost, err)
	}
	return err
}

// isArgument tells whether an argument of a query could not be encoded. pgx closes the connection then, although
// nothing was sent and nothing is wrong with it, and says only in the text that it was that.
func isArgument(err error) bool {
	var before pgx.ErrPreprocessingBatch
	return errors.As(err, &before) && strings.HasPrefix(before.Error(), "error preprocessing batch (build)")
}

// withContext makes sure that the context's own error is in err.
func withContext(ctx context.Context, err error) error {
	if ctx.Err() == nil || errors.Is(err, ctx.Err()) {
		return err
	}
	return fmt.Errorf("%w: %w", ctx.Err(), err)
}
