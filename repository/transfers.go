package repository

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
)

// Transfer is money that moved from one [Account] to another. Each of them has an [Entry] that says so.
type Transfer struct {
	ID             uuid.UUID
	From           uuid.UUID
	To             uuid.UUID
	Amount         int64     // in minor units, above 0
	IdempotencyKey string    // empty if it was made without one
	CreatedAt      time.Time // by the server's clock, when the locks were held; the entries have the same
}

// TransferParams are the parameters of [Repository.Transfer].
type TransferParams struct {
	// From and To are two accounts, of one currency.
	From, To uuid.UUID

	// Amount is in minor units, and above 0.
	Amount int64

	// IdempotencyKey makes the call safe to repeat: a later call with the same From and key returns the first call's
	// transfer, and moves nothing. It is the From account's, as in [DepositParams].
	IdempotencyKey string

	// LockTimeout bounds the wait for both accounts' locks: 1 ms to 24 days; 0 is the Repository's.
	LockTimeout time.Duration

	// Event is written to the outbox by the statement that inserts the transfer, on the terms of [DepositParams].
	Event *Event
}

// Transfer moves money from one account to another, if it is there and the DailyLimit of From allows it, as
// [Repository.Withdraw] does. To has no limit for what it gets.
//
// It opens a transaction of its own, takes the locks account:<From> and account:<To> in it, and returns after
// COMMIT; all in one round trip. The locks are taken in the order of their keys, so transfers never deadlock with
// each other.
//
// Errors, beside those that the package names for every call: [ErrNotFound], which says of which account;
// [ErrDailyLimit], a [LimitError], also if the money is not there either; [ErrInsufficientFunds];
// [ErrIdempotencyConflict] if the key was used with another To or amount, or not for a transfer; [ErrLockBusy], a
// [LockBusyError]; [ErrInvalid], also if the balance of To would be more than an int64 holds.
func (r *Repository) Transfer(ctx context.Context, p TransferParams) (_ *Transfer, err error) {
	defer r.done(ctx, "Transfer", time.Now(), &err)
	return r.transfer(ctx, &call{}, p)
}

// TransferTx is [Repository.Transfer] in a transaction of the caller's, on the terms of
// [Repository.CreateSetupTx]. Two transactions that each make several transfers can deadlock, one with the
// other: take the [AccountLock] of every account before, in one [Repository.GuardTx].
func (r *Repository) TransferTx(ctx context.Context, tx pgx.Tx, p TransferParams) (_ *Transfer, err error) {
	defer r.done(ctx, "TransferTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.transfer(ctx, &call{outer: tx}, p)
}

func (r *Repository) transfer(ctx context.Context, c *call, p TransferParams) (*Transfer, error) {
	switch {
	case p.From == uuid.Nil:
		return nil, &InvalidError{"From", "must not be the nil UUID"}
	case p.To == uuid.Nil:
		return nil, &InvalidError{"To", "must not be the nil UUID"}
	case p.To == p.From:
		return nil, &InvalidError{"To", "must not be From"}
	}
	c.locks = []Lock{AccountLock(p.From), AccountLock(p.To)}
	key, event, err := r.prepareMove(c, p.Amount, p.IdempotencyKey, p.LockTimeout, p.Event)
	if err != nil {
		return nil, err
	}
	var ids [3]uuid.UUID // of the transfer and its entries
	for i := range ids {
		if ids[i], err = uuid.NewV7(); err != nil {
			return nil, err
		}
	}

	row, err := runOne(ctx, r, c, func(ctx context.Context, q db.DBTX) (db.TransferInsertRow, error) {
		return db.New(q).TransferInsert(ctx, db.TransferInsertParams{
			ID:             pgUUID(ids[0]),
			FromEntryID:    pgUUID(ids[1]),
			ToEntryID:      pgUUID(ids[2]),
			FromAccountID:  pgUUID(p.From),
			ToAccountID:    pgUUID(p.To),
			Amount:         p.Amount,
			IdempotencyKey: key,
			Event:          event,
		})
	})
	switch {
	case err != nil:
		return nil, err
	case !row.FromFound:
		return nil, fmt.Errorf("account From: %w", ErrNotFound)
	case !row.ToFound && row.Kind == nil:
		return nil, fmt.Errorf("account To: %w", ErrNotFound)
	case row.Kind == nil && !row.Allowed:
		return nil, &LimitError{Rule: ErrDailyLimit, Used: row.SpentBefore, Limit: row.DailyLimit, Requested: p.Amount}
	case row.Kind == nil && !row.Room:
		return nil, errBalanceRange
	case row.Kind == nil:
		return nil, ErrInsufficientFunds
	case *row.Kind != string(EntryTransferOut) || row.ToAccountID.Bytes != p.To || *row.Amount != p.Amount:
		return nil, ErrIdempotencyConflict
	}
	return &Transfer{
		ID:             row.ID.Bytes,
		From:           row.FromAccountID.Bytes,
		To:             row.ToAccountID.Bytes,
		Amount:         *row.Amount,
		IdempotencyKey: p.IdempotencyKey,
		CreatedAt:      *row.CreatedAt,
	}, nil
}
