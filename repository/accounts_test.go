package repository_test

import (
	"context"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
)

// Every method of accounts refuses a bad argument before it asks for a connection, in both of its forms, and a
// good one gets as far as that.
func TestAccountArguments(t *testing.T) {
	t.Parallel()
	var (
		one, two = uuid.New(), uuid.New()
		long     = strings.Repeat("k", 255)
	)
	for _, tc := range []struct {
		name string
		bad  string // the argument's name; empty if all are good
		call accountCall
	}{
		{"open for the nil owner", "OwnerID", open(repository.OpenAccountParams{})},
		{"open with the limit -1", "DailyLimit", open(repository.OpenAccountParams{OwnerID: one, DailyLimit: -1})},
		{"open with the least limit", "DailyLimit", open(repository.OpenAccountParams{OwnerID: one, DailyLimit: math.MinInt64})},
		{"open with no limit", "", open(repository.OpenAccountParams{OwnerID: one})},
		{"open with the greatest limit", "", open(repository.OpenAccountParams{OwnerID: one, DailyLimit: math.MaxInt64})},
		{"open in an unknown zone", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "Mars/Olympus_Mons"})},
		{"open in the machine's zone", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "Local"})},
		{"open in an offset", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "+02:00"})},
		{"open in a POSIX zone", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "<+02>-2"})},
		{"open in a path", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "../zoneinfo/UTC"})},
		{"open in an absolute path", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "/usr/share/zoneinfo/UTC"})},
		{"open in a zone with a space", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "Europe/Berlin "})},
		{"open in a zone with NUL", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "UTC\x00"})},
		{"open in a zone that is not UTF-8", "TimeZone", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "UTC\xff"})},
		{"open in UTC", "", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "UTC"})},
		{"open in a zone of half an hour", "", open(repository.OpenAccountParams{OwnerID: one, TimeZone: "Australia/Lord_Howe"})},
		{"open with a long key", "IdempotencyKey", open(repository.OpenAccountParams{OwnerID: one, IdempotencyKey: long + "k"})},
		{"open with a key", "", open(repository.OpenAccountParams{OwnerID: one, IdempotencyKey: long})},
		{"open with a lock timeout that would be 0 ms", "LockTimeout", open(repository.OpenAccountParams{OwnerID: one, LockTimeout: 1})},

		{"get the nil id", "id", getAccount(uuid.Nil)},
		{"get an id", "", getAccount(one)},

		{"deposit in the nil account", "AccountID", deposit(repository.DepositParams{Amount: 1})},
		{"deposit 0", "Amount", deposit(repository.DepositParams{AccountID: one})},
		{"deposit -1", "Amount", deposit(repository.DepositParams{AccountID: one, Amount: -1})},
		{"deposit the least amount", "Amount", deposit(repository.DepositParams{AccountID: one, Amount: math.MinInt64})},
		{"deposit with a long key", "IdempotencyKey", deposit(repository.DepositParams{AccountID: one, Amount: 1, IdempotencyKey: long + "k"})},
		{"deposit with a key with NUL", "IdempotencyKey", deposit(repository.DepositParams{AccountID: one, Amount: 1, IdempotencyKey: "a\x00"})},
		{"deposit with a negative lock timeout", "LockTimeout", deposit(repository.DepositParams{AccountID: one, Amount: 1, LockTimeout: -1})},
		{"deposit 1", "", deposit(repository.DepositParams{AccountID: one, Amount: 1})},
		{"deposit the greatest amount", "", deposit(repository.DepositParams{AccountID: one, Amount: math.MaxInt64, IdempotencyKey: long})},

		{"withdraw from the nil account", "AccountID", withdraw(repository.WithdrawParams{Amount: 1})},
		{"withdraw 0", "Amount", withdraw(repository.WithdrawParams{AccountID: one})},
		{"withdraw -1", "Amount", withdraw(repository.WithdrawParams{AccountID: one, Amount: -1})},
		{"withdraw the least amount", "Amount", withdraw(repository.WithdrawParams{AccountID: one, Amount: math.MinInt64})},
		{"withdraw with a long key", "IdempotencyKey", withdraw(repository.WithdrawParams{AccountID: one, Amount: 1, IdempotencyKey: long + "k"})},
		{"withdraw with a lock timeout above 24 days", "LockTimeout", withdraw(repository.WithdrawParams{AccountID: one, Amount: 1, LockTimeout: 24*24*time.Hour + 1})},
		{"withdraw 1", "", withdraw(repository.WithdrawParams{AccountID: one, Amount: 1})},

		{"transfer from the nil account", "From", transfer(repository.TransferParams{To: two, Amount: 1})},
		{"transfer to the nil account", "To", transfer(repository.TransferParams{From: one, Amount: 1})},
		{"transfer to the same account", "To", transfer(repository.TransferParams{From: one, To: one, Amount: 1})},
		{"transfer 0", "Amount", transfer(repository.TransferParams{From: one, To: two})},
		{"transfer -1", "Amount", transfer(repository.TransferParams{From: one, To: two, Amount: -1})},
		{"transfer the least amount", "Amount", transfer(repository.TransferParams{From: one, To: two, Amount: math.MinInt64})},
		{"transfer with a long key", "IdempotencyKey", transfer(repository.TransferParams{From: one, To: two, Amount: 1, IdempotencyKey: long + "k"})},
		{"transfer with a lock timeout that would be 0 ms", "LockTimeout", transfer(repository.TransferParams{From: one, To: two, Amount: 1, LockTimeout: 1})},
		{"transfer 1", "", transfer(repository.TransferParams{From: one, To: two, Amount: 1})},

		{"list for the nil account", "accountID", listEntries(uuid.Nil, nil)},
		{"list with a limit above 1000", "Limit", listEntries(one, &repository.ListOpts{Limit: 1001})},
		{"list with the default limit", "", listEntries(one, nil)},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool, dials := unreachable(t)
			repo, err := repository.New(pool)
			require.NoError(t, err)
			err = tc.call(t.Context(), repo, nil)
			if tc.bad == "" {
				require.ErrorIs(t, err, repository.ErrConnectionLost)
				require.NotZero(t, dials.Load(), "without a dial the checks for none prove nothing")
				return
			}
			requireInvalid(t, err, tc.bad)
			requireInvalid(t, tc.call(t.Context(), repo, untouchable{}), tc.bad)
			require.Zero(t, dials.Load())
			require.Zero(t, pool.Stat().EmptyAcquireCount()+pool.Stat().CanceledAcquireCount()+pool.Stat().AcquireCount())
		})
	}
	t.Run("no method joins nothing", func(t *testing.T) {
		t.Parallel()
		pool, dials := unreachable(t)
		repo, err := repository.New(pool)
		require.NoError(t, err)
		_, openErr := repo.OpenAccountTx(t.Context(), nil, repository.OpenAccountParams{OwnerID: one})
		_, getErr := repo.GetAccountTx(t.Context(), nil, one)
		_, depositErr := repo.DepositTx(t.Context(), nil, repository.DepositParams{AccountID: one, Amount: 1})
		_, withdrawErr := repo.WithdrawTx(t.Context(), nil, repository.WithdrawParams{AccountID: one, Amount: 1})
		_, transferErr := repo.TransferTx(t.Context(), nil, repository.TransferParams{From: one, To: two, Amount: 1})
		_, listErr := repo.ListEntriesTx(t.Context(), nil, one, nil)
		for _, err := range []error{openErr, getErr, depositErr, withdrawErr, transferErr, listErr} {
			requireInvalid(t, err, "tx")
		}
		require.Zero(t, dials.Load())
	})
}

// The observer sees every call once, under the name of the method that was called, with the caller's error.
func TestAccountObserver(t *testing.T) {
	t.Parallel()
	pool, _ := unreachable(t)
	var seen []repository.CallDone
	repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
		CallDone: func(_ context.Context, c repository.CallDone) { seen = append(seen, c) },
	}))
	require.NoError(t, err)
	for name, call := range map[string]accountCall{
		"OpenAccount": open(repository.OpenAccountParams{}),
		"GetAccount":  getAccount(uuid.Nil),
		"Deposit":     deposit(repository.DepositParams{}),
		"Withdraw":    withdraw(repository.WithdrawParams{}),
		"Transfer":    transfer(repository.TransferParams{}),
		"ListEntries": listEntries(uuid.Nil, nil),
	} {
		for name, tx := range map[string]pgx.Tx{name: nil, name + "Tx": untouchable{}} {
			seen = nil
			err := call(t.Context(), repo, tx)
			require.Error(t, err)
			require.Len(t, seen, 1, name)
			require.Equal(t, name, seen[0].Method)
			require.Same(t, err, seen[0].Err)
			require.True(t, strings.HasPrefix(err.Error(), "latchkey: "+name+": "), err)
			require.Equal(t, 1, strings.Count(err.Error(), "latchkey: "), "prefixed once")
		}
	}
}

func TestAccountNamespacesAreDeclared(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"account", "account_owner"} {
		_, err := repository.NewNamespace(name)
		requireInvalid(t, err, "name")
	}
}

// accountCall is a method, or its form for the transaction, if there is one.
type accountCall func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error

func open(p repository.OpenAccountParams) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.OpenAccount(ctx, p))
		}
		return second(r.OpenAccountTx(ctx, tx, p))
	}
}

func getAccount(id uuid.UUID) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.GetAccount(ctx, id))
		}
		return second(r.GetAccountTx(ctx, tx, id))
	}
}

func deposit(p repository.DepositParams) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.Deposit(ctx, p))
		}
		return second(r.DepositTx(ctx, tx, p))
	}
}

func withdraw(p repository.WithdrawParams) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.Withdraw(ctx, p))
		}
		return second(r.WithdrawTx(ctx, tx, p))
	}
}

func transfer(p repository.TransferParams) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.Transfer(ctx, p))
		}
		return second(r.TransferTx(ctx, tx, p))
	}
}

func listEntries(id uuid.UUID, o *repository.ListOpts) accountCall {
	return func(ctx context.Context, r *repository.Repository, tx pgx.Tx) error {
		if tx == nil {
			return second(r.ListEntries(ctx, id, o))
		}
		return second(r.ListEntriesTx(ctx, tx, id, o))
	}
}

// second drops the result.
func second[T any](_ T, err error) error { return err }
