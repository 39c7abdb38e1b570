package repository

import (
	"context"
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// FuzzClassify feeds the funnel of errors with whatever a server, a proxy or a driver may say.
func FuzzClassify(f *testing.F) {
	codes := []string{
		lockNotAvailable, queryCanceled, uniqueViolation, noSuchStatement, checkViolation, numericOutOfRange, invalidParameterValue,
		insufficientPrivilege, undefinedFunction, featureNotSupported, "25P02", "57P01", "08006", "XX000", "", "\x00", "ZZZZZZ",
	}
	for code := range conditions {
		codes = append(codes, code)
	}
	constraints := append([]string{pendingConstraint, balanceConstraint, turnConstraint, ""}, idempotencyConstraints...)
	for i, code := range codes {
		for wrapping := range uint8(6) {
			f.Add(code, schema, constraints[i%len(constraints)], wrapping, uint16(i)<<5|uint16(i))
		}
		f.Add(code, "host", constraints[i%len(constraints)], uint8(0), uint16(0))
	}
	f.Fuzz(func(t *testing.T, code, schemaName, constraint string, wrapping uint8, flags uint16) {
		flag := func(n int) bool { return flags>>n&1 == 1 }
		pgErr := &pgconn.PgError{Code: code, SchemaName: schemaName, ConstraintName: constraint}
		var err error = pgErr
		committing := false
		switch wrapping % 6 {
		case 1:
			err = &pipeline.BeforeError{Err: err}
		case 2:
			err, committing = &pipeline.OutcomeError{Err: err}, true
		case 3:
			err, committing = fmt.Errorf("host: %w", &pipeline.OutcomeError{Err: errors.Join(io.EOF, err)}), true
		case 4:
			err = fmt.Errorf("%w: %w", pgx.ErrTxClosed, err)
		case 5:
			err, committing = &pipeline.BeforeError{Err: &pipeline.OutcomeError{Err: err}}, true
		}
		c := &call{started: time.Now(), try: flag(0), cut: flag(1), foreign: flag(2), idempotent: flag(3), limit: int64(flags)}
		if flag(4) {
			c.locks = []Lock{{Namespace{"user", 0}, "1", true}}
		}
		if flag(5) {
			c.outer = connTx{}
		}
		ctx := context.Background()
		switch {
		case flag(6):
			canceled, cancel := context.WithCancel(ctx)
			cancel()
			ctx = canceled
		case flag(7):
			expired, cancel := context.WithDeadline(ctx, time.Unix(1, 0))
			defer cancel()
			ctx = expired
		}
		got := c.classify(ctx, err, func() bool { return flag(8) })

		require.Error(t, got)
		require.NotEmpty(t, got.Error())
		for _, got := range []error{got, wrap("CreateSetup", got), fmt.Errorf("host: %w", got)} {
			var seen *pgconn.PgError
			require.ErrorAs(t, got, &seen)
			require.Same(t, pgErr, seen, "the server's error is found")
			if ctx.Err() != nil {
				require.ErrorIs(t, got, ctx.Err(), "the context's error is found")
			}
			require.Equal(t, committing, errors.Is(got, ErrOutcomeUnknown))
			if committing { // it may have been
				require.Equal(t, c.idempotent, IsRetryable(got))
				for _, known := range []error{
					ErrConnectionLost, ErrLockBusy, ErrDeadlock, ErrSerialization, ErrReadOnly, ErrPendingExists, ErrInsufficientFunds,
					ErrIdempotencyConflict,
				} {
					require.NotErrorIs(t, got, known)
				}
			}
			if schemaName != schema {
				for _, rule := range []error{ErrPendingExists, ErrInsufficientFunds, ErrIdempotencyConflict, errTurnTaken} {
					require.NotErrorIs(t, got, rule, "the host's constraints may have the same names")
				}
			}
			if c.foreign {
				require.NotErrorIs(t, got, ErrInvalid, "the host's statements are the host's")
			}
			if !errors.Is(got, ErrConnectionLost) && !errors.Is(got, ErrLockBusy) && !committing {
				retryable := code == "40001" || code == "40P01" || code == "25006"
				require.Equal(t, retryable && ctx.Err() == nil, IsRetryable(got), "%v", got)
			}
		}
	})
}

// FuzzPayload compares what is said of a payload with what is said of the JSON in it.
func FuzzPayload(f *testing.F) {
	for _, seed := range []string{
		`null`, `"\u0000"`, `"\ud800"`, `"\ud83d\ude00"`, `1e131072`, `-1.5E-16383`, `[[[[]]]]`, `{"a":"\\u0000"}`, "\"\xff\"", `"\ud800\n"`, `1e`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		e := Event{Topic: "t", Payload: payload}
		encoded, err := e.encode()
		if err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		require.Len(t, encoded, 5)
		if payload != nil {
			require.Equal(t, string(payload), encoded[2])
		}
	})
}
