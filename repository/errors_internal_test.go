package repository

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/pipeline"
)

var sentinels = []error{
	ErrPendingExists, ErrDailyLimit, ErrInsufficientFunds, ErrLockBusy, ErrDeadlock, ErrSerialization, ErrOutcomeUnknown,
	ErrConnectionLost, ErrReadOnly, ErrIsolation, ErrIdempotencyConflict, ErrTooManyLocks, ErrLockOrder, ErrNotFound,
	ErrNotPending, ErrInvalid, ErrUnsafeServer, context.Canceled, context.DeadlineExceeded,
}

// requireIs checks that err is each of want and no other sentinel, also when it is wrapped.
func requireIs(t *testing.T, err error, want ...error) {
	t.Helper()
	for _, err := range []error{err, fmt.Errorf("host: %w", err), wrap("CreateSetup", err)} {
		for _, sentinel := range sentinels {
			expected := false
			for _, w := range want {
				expected = expected || w == sentinel //nolint:errorlint // of two lists, not of a returned error
			}
			require.Equal(t, expected, errors.Is(err, sentinel), "%v is %v", err, sentinel)
		}
	}
}

func TestErrorTypes(t *testing.T) {
	t.Parallel()
	cause := &pgconn.PgError{Severity: "ERROR", Code: "55P03", Message: "canceling statement due to lock timeout"}
	unique := &pgconn.PgError{Severity: "ERROR", Code: "23505", Message: "duplicate key"}
	for _, tc := range []struct {
		name  string
		err   error
		is    []error
		cause *pgconn.PgError
		text  string
	}{
		{
			"invalid", &InvalidError{"MaxPending", "must be 0 or from 1 to 1000"},
			[]error{ErrInvalid},
			nil, "MaxPending must be 0 or from 1 to 1000",
		},
		{
			"limit, counted", &LimitError{Rule: ErrPendingExists, Used: 3, Limit: 3, Requested: 1},
			[]error{ErrPendingExists},
			nil, "too many requests are pending: 3 of 3 in use, 1 requested",
		},
		{
			"limit, by the constraint", &LimitError{Rule: ErrPendingExists, Used: -1, Limit: 3, Requested: 1, Err: unique},
			[]error{ErrPendingExists},
			unique,
			"too many requests are pending: the constraint refused, limit 3: ERROR: duplicate key (SQLSTATE 23505)",
		},
		{
			"busy, not asked", &LockBusyError{Waited: 1500 * time.Microsecond, Where: WherePool},
			[]error{ErrLockBusy},
			nil, "lock is busy: waited 2ms for pool",
		},
		{
			"busy, by the server", &LockBusyError{Namespace: "setup_request", Waited: 2 * time.Second, Where: WhereAdvisory, Err: cause},
			[]error{ErrLockBusy},
			cause,
			"lock is busy: waited 2s for advisory, namespace setup_request: ERROR: canceling statement due to lock timeout (SQLSTATE 55P03)",
		},
		{
			"lock order", &LockOrderError{Held: LockName{Key: 7}, Asked: LockName{"user", "42", -1, 3}},
			[]error{ErrLockOrder},
			nil,
			"locks are taken out of order: lock user:42 (rank 3, key -1) asked for while lock with key 7 is held",
		},
		{
			"outcome unknown", &outcomeError{true, &pipeline.OutcomeError{Err: io.ErrUnexpectedEOF}},
			[]error{ErrOutcomeUnknown},
			nil, "outcome unknown: no answer to commit: unexpected EOF",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			requireIs(t, tc.err, tc.is...)
			require.EqualError(t, tc.err, tc.text)
			var pgErr *pgconn.PgError
			require.Equal(t, tc.cause != nil, errors.As(tc.err, &pgErr))
			require.Same(t, tc.cause, pgErr)
		})
	}

	t.Run("the typed ones are found with their fields", func(t *testing.T) {
		t.Parallel()
		var limit *LimitError
		require.ErrorAs(t, wrap("CreateSetup", &LimitError{Rule: ErrPendingExists, Used: 2, Limit: 1, Requested: 1}), &limit)
		require.Equal(t, int64(2), limit.Used)
		var busy *LockBusyError
		require.ErrorAs(t, wrap("CreateSetup", &LockBusyError{Where: WhereRow}), &busy)
		require.Equal(t, WhereRow, busy.Where)
	})
	t.Run("no error stays no error", func(t *testing.T) {
		t.Parallel()
		require.NoError(t, wrap("CreateSetup", nil))
	})
}

func TestIsRetryable(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{io.EOF, false},
		{context.Canceled, false},
		{context.DeadlineExceeded, false},
		{&InvalidError{"id", "must not be the nil UUID"}, false},
		{&LimitError{Rule: ErrPendingExists}, false},
		{&LimitError{Rule: ErrDailyLimit}, false},
		{ErrInsufficientFunds, false},
		{&LockBusyError{Where: WherePool}, true},
		{fmt.Errorf("%w: %w", context.DeadlineExceeded, &LockBusyError{Where: WhereAdvisory}), true},
		{ErrLockBusy, true},
		{ErrDeadlock, true},
		{ErrSerialization, true},
		{ErrConnectionLost, true},
		{ErrReadOnly, true},
		{ErrOutcomeUnknown, false},
		{&outcomeError{false, io.EOF}, false},
		{&outcomeError{true, io.EOF}, true},
		{&outcomeError{false, fmt.Errorf("%w: %w", ErrConnectionLost, io.EOF)}, false}, // the outcome decides
		{ErrIsolation, false},
		{ErrIdempotencyConflict, false},
		{ErrTooManyLocks, false},
		{&LockOrderError{}, false},
		{ErrNotFound, false},
		{ErrNotPending, false},
		{ErrInvalid, false},
	} {
		require.Equal(t, tc.want, IsRetryable(tc.err), "%v", tc.err)
		if tc.err != nil {
			require.Equal(t, tc.want, IsRetryable(wrap("CreateSetup", tc.err)), "wrapped: %v", tc.err)
		}
	}
}

// What the server and the driver say, and what a caller sees. The message never decides.
func TestClassify(t *testing.T) {
	t.Parallel()
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	expired, cancel := context.WithDeadline(t.Context(), time.Now().Add(-time.Second))
	defer cancel()
	code := func(code, constraint string) error {
		return &pgconn.PgError{Code: code, SchemaName: "latchkey", ConstraintName: constraint, Message: "deadlock detected: lock timeout, commit"}
	}
	before := func(err error) error { return &pipeline.BeforeError{Err: err} }
	outcome := func(err error) error { return &pipeline.OutcomeError{Err: err} }

	for _, tc := range []struct {
		name    string
		ctx     context.Context //nolint:containedctx // a column of the table
		foreign bool            // the statement is the host's
		err     error
		lost    bool
		is      []error
		where   string // of the LockBusyError, if it is one
	}{
		{"a lock not available before the statement is the advisory lock", t.Context(), false, before(code("55P03", "")), false, []error{ErrLockBusy}, WhereAdvisory},
		{"a lock not available in the statement is a row", t.Context(), false, code("55P03", ""), false, []error{ErrLockBusy}, WhereRow},
		{"the budget of several locks ends them as a cancelled query", t.Context(), false, before(code("57014", "")), false, []error{ErrLockBusy}, WhereAdvisory},
		{"a cancelled query of a cancelled context is the context's", cancelled, false, before(code("57014", "")), true, []error{context.Canceled}, ""},
		{"a lock timeout seen after the deadline is both", expired, false, before(code("55P03", "")), false, []error{ErrLockBusy, context.DeadlineExceeded}, WhereAdvisory},
		{"a cancelled query after the deadline is both", expired, false, code("57014", ""), false, []error{ErrLockBusy, context.DeadlineExceeded}, WhereRow},
		{"a deadlock", t.Context(), false, before(code("40P01", "")), false, []error{ErrDeadlock}, ""},
		{"a serialization failure", t.Context(), false, code("40001", ""), false, []error{ErrSerialization}, ""},
		{"a full lock table", t.Context(), false, before(code("53200", "")), false, []error{ErrTooManyLocks}, ""},
		{"a read-only server", t.Context(), false, code("25006", ""), false, []error{ErrReadOnly}, ""},
		{"a wrong isolation level", t.Context(), false, before(code("25000", "")), false, []error{ErrIsolation}, ""},
		{"the pending constraint", t.Context(), false, code("23505", "setup_requests_pending_key"), false, []error{ErrPendingExists}, ""},
		{"the idempotency constraint", t.Context(), false, code("23505", "setup_requests_idempotency_key"), false, []error{ErrIdempotencyConflict}, ""},
		{"the constraint on turns", t.Context(), false, code("23505", "outbox_turn_key"), false, []error{errTurnTaken}, ""},
		{"the idempotency constraint of accounts", t.Context(), false, code("23505", "accounts_idempotency_key"), false, []error{ErrIdempotencyConflict}, ""},
		{"the idempotency constraint of entries", t.Context(), false, code("23505", "entries_idempotency_key"), false, []error{ErrIdempotencyConflict}, ""},
		{"the constraint of balances", t.Context(), false, code("23514", "accounts_balance_check"), false, []error{ErrInsufficientFunds}, ""},
		{"the constraint of balances in the host's statement", t.Context(), true, code("23514", "accounts_balance_check"), false, []error{ErrInsufficientFunds}, ""},
		{"the host's constraint of the same name has no meaning", t.Context(), false, &pgconn.PgError{
			Code: "23514", SchemaName: "public", ConstraintName: "accounts_balance_check",
		}, false, nil, ""},
		{"a balance out of range", t.Context(), false, code("22003", ""), false, []error{ErrInvalid}, ""},
		{"a number out of range in the host's statement has no meaning", t.Context(), true, code("22003", ""), false, nil, ""},
		{"an unknown time zone", t.Context(), false, code("22023", ""), false, []error{ErrInvalid}, ""},
		{"a bad setting before the statement has no meaning", t.Context(), false, before(code("22023", "")), false, nil, ""},
		{"a bad value in the host's statement has no meaning", t.Context(), true, code("22023", ""), false, nil, ""},
		{"another unique constraint has no meaning", t.Context(), false, code("23505", "setup_requests_pkey"), false, nil, ""},
		{"another code on the pending constraint has no meaning", t.Context(), false, code("23514", "setup_requests_pending_key"), false, nil, ""},
		{"a connection that is gone", t.Context(), false, io.ErrUnexpectedEOF, true, []error{ErrConnectionLost}, ""},
		{"a backend that was terminated", t.Context(), false, code("57P01", ""), true, []error{ErrConnectionLost}, ""},
		{"a connection that the context closed", cancelled, false, io.ErrUnexpectedEOF, true, []error{context.Canceled}, ""},
		{"no answer to commit", t.Context(), false, outcome(io.ErrUnexpectedEOF), true, []error{ErrOutcomeUnknown}, ""},
		{"no answer to commit as the context ended", cancelled, false, outcome(io.ErrUnexpectedEOF), true, []error{ErrOutcomeUnknown, context.Canceled}, ""},
		{"no answer to commit, told by a code", t.Context(), false, outcome(before(code("55P03", ""))), true, []error{ErrOutcomeUnknown}, ""},
		{"anything else", t.Context(), false, code("42501", ""), false, nil, ""},
		{"a lock not available in the host's statement is a row", t.Context(), true, code("55P03", ""), false, []error{ErrLockBusy}, WhereRow},
		{"a cancelled query of the host's may have worked for too long", t.Context(), true, code("57014", ""), false, nil, ""},
		{"a cancelled query before the host's is the locks", t.Context(), true, before(code("57014", "")), false, []error{ErrLockBusy}, WhereAdvisory},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			c := &call{locks: []Lock{setupNamespace.Exclusive("1")}, foreign: tc.foreign, limit: 3, started: time.Now()}
			err := c.classify(tc.ctx, tc.err, func() bool { return tc.lost })
			requireIs(t, err, tc.is...)

			var want, got *pgconn.PgError
			if errors.As(tc.err, &want) {
				require.ErrorAs(t, err, &got, "the server's error is kept")
				require.Same(t, want, got)
			}
			var busy *LockBusyError
			require.Equal(t, tc.where != "", errors.As(err, &busy))
			if busy != nil {
				require.Equal(t, tc.where, busy.Where)
				require.Equal(t, "setup_request", busy.Namespace)
			}
			var limit *LimitError
			if errors.As(err, &limit) {
				require.Equal(t, LimitError{ErrPendingExists, -1, 3, 1, tc.err}, *limit)
			}
		})
	}
}
