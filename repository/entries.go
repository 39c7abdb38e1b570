package repository

import (
	"context"
	"fmt"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
)

// Entry is money that moved in an [Account]. Entries are added and never change; the balance is their sum.
type Entry struct {
	ID             uuid.UUID
	AccountID      uuid.UUID
	Kind           EntryKind
	Amount         int64      // in minor units, above 0 for every kind
	BalanceAfter   int64      // of the account, in minor units
	TransferID     *uuid.UUID // which [Transfer] it is a side of; nil if of none
	IdempotencyKey string     // empty if it was made without one, and for what a transfer brought
	CreatedAt      time.Time  // by the server's clock, when the lock was held
}

// EntryKind says how the money of an [Entry] moved.
type EntryKind string

// The kinds of entries.
const (
	EntryDeposit     EntryKind = "deposit"
	EntryWithdrawal  EntryKind = "withdrawal"
	EntryTransferIn  EntryKind = "transfer_in"
	EntryTransferOut EntryKind = "transfer_out"
)

// DepositParams are the parameters of [Repository.Deposit].
type DepositParams struct {
	AccountID uuid.UUID

	// Amount is in minor units, and above 0.
	Amount int64

	// IdempotencyKey makes the call safe to repeat: a later call for the same account with the same key returns the
	// first call's entry, and moves nothing. At most 255 bytes of UTF-8 without NUL; empty is none. It is the
	// account's, for its deposits, withdrawals and outgoing transfers together, and is kept as long as the entry is.
	IdempotencyKey string

	// LockTimeout bounds the wait for the account's lock: 1 ms to 24 days; 0 is the Repository's.
	LockTimeout time.Duration

	// Event is written to the outbox by the statement that inserts the entry, if it does: a refused call writes none,
	// nor does a repeat with the same key. If its AggregateKey is the account's, the account's lock keeps the order.
	Event *Event
}

// WithdrawParams are the parameters of [Repository.Withdraw]; the fields are those of [DepositParams].
type WithdrawParams struct {
	AccountID      uuid.UUID
	Amount         int64
	IdempotencyKey string
	LockTimeout    time.Duration
	Event          *Event
}

// Deposit adds money to an account.
//
// It opens a transaction of its own, takes the lock account:<AccountID> in it, and returns after COMMIT; all in
// one round trip. Calls for one account run one after the other, calls for different accounts do not meet.
//
// Errors, beside those that the package names for every call: [ErrNotFound]; [ErrIdempotencyConflict] if the key
// was used with another amount, or not for a deposit; [ErrLockBusy], a [LockBusyError]; [ErrInvalid], also if the
// balance would be more than an int64 holds.
func (r *Repository) Deposit(ctx context.Context, p DepositParams) (_ *Entry, err error) {
	defer r.done(ctx, "Deposit", time.Now(), &err)
	return r.deposit(ctx, &call{}, p)
}

// DepositTx is [Repository.Deposit] in a transaction of the caller's, on the terms of [Repository.CreateSetupTx].
func (r *Repository) DepositTx(ctx context.Context, tx pgx.Tx, p DepositParams) (_ *Entry, err error) {
	defer r.done(ctx, "DepositTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.deposit(ctx, &call{outer: tx}, p)
}

func (r *Repository) deposit(ctx context.Context, c *call, p DepositParams) (*Entry, error) {
	id, key, event, err := r.prepareEntry(c, WithdrawParams(p))
	if err != nil {
		return nil, err
	}
	row, err := runOne(ctx, r, c, func(ctx context.Context, q db.DBTX) (db.EntryInsertDepositRow, error) {
		return db.New(q).EntryInsertDeposit(ctx, db.EntryInsertDepositParams{
			ID:             pgUUID(id),
			AccountID:      pgUUID(p.AccountID),
			Amount:         p.Amount,
			IdempotencyKey: key,
			Event:          event,
		})
	})
	switch {
	case err != nil:
		return nil, err
	case !row.Found:
		return nil, fmt.Errorf("account: %w", ErrNotFound)
	case !row.ID.Valid:
		return nil, errBalanceRange
	case *row.Kind != string(EntryDeposit) || *row.Amount != p.Amount:
		return nil, ErrIdempotencyConflict
	}
	return entry(db.Entry{
		ID:             row.ID,
		AccountID:      row.AccountID,
		Kind:           *row.Kind,
		Amount:         *row.Amount,
		BalanceAfter:   *row.BalanceAfter,
		TransferID:     row.TransferID,
		IdempotencyKey: row.IdempotencyKey,
		CreatedAt:      *row.CreatedAt,
	}), nil
}

// Withdraw takes money from an account, if it is there and the account's DailyLimit allows it.
//
// The limit is for what leaves the account on one calendar day of its time zone, by withdrawals and transfers. Which
// day it is, the server's clock says when the lock is held, however long the call waited for it.
//
// It opens a transaction of its own, takes the lock account:<AccountID> in it, and returns after COMMIT; all in
// one round trip. Calls for one account run one after the other, calls for different accounts do not meet.
//
// Errors, beside those that the package names for every call: [ErrNotFound]; [ErrDailyLimit], a [LimitError], also
// if the money is not there either; [ErrInsufficientFunds]; [ErrIdempotencyConflict] if the key was used with
// another amount, or not for a withdrawal; [ErrLockBusy], a [LockBusyError]; [ErrInvalid].
func (r *Repository) Withdraw(ctx context.Context, p WithdrawParams) (_ *Entry, err error) {
	defer r.done(ctx, "Withdraw", time.Now(), &err)
	return r.withdraw(ctx, &call{}, p)
}

// WithdrawTx is [Repository.Withdraw] in a transaction of the caller's, on the terms of
// [Repository.CreateSetupTx].
func (r *Repository) WithdrawTx(ctx context.Context, tx pgx.Tx, p WithdrawParams) (_ *Entry, err error) {
	defer r.done(ctx, "WithdrawTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.withdraw(ctx, &call{outer: tx}, p)
}

func (r *Repository) withdraw(ctx context.Context, c *call, p WithdrawParams) (*Entry, error) {
	id, key, event, err := r.prepareEntry(c, p)
	if err != nil {
		return nil, err
	}
	row, err := runOne(ctx, r, c, func(ctx context.Context, q db.DBTX) (db.EntryInsertWithdrawalRow, error) {
		return db.New(q).EntryInsertWithdrawal(ctx, db.EntryInsertWithdrawalParams{
			ID:             pgUUID(id),
			AccountID:      pgUUID(p.AccountID),
			Amount:         p.Amount,
			IdempotencyKey: key,
			Event:          event,
		})
	})
	switch {
	case err != nil:
		return nil, err
	case !row.Found:
		return nil, fmt.Errorf("account: %w", ErrNotFound)
	case !row.ID.Valid && !row.Allowed:
		return nil, &LimitError{Rule: ErrDailyLimit, Used: row.SpentBefore, Limit: row.DailyLimit, Requested: p.Amount}
	case !row.ID.Valid:
		return nil, ErrInsufficientFunds
	case *row.Kind != string(EntryWithdrawal) || *row.Amount != p.Amount:
		return nil, ErrIdempotencyConflict
	}
	return entry(db.Entry{
		ID:             row.ID,
		AccountID:      row.AccountID,
		Kind:           *row.Kind,
		Amount:         *row.Amount,
		BalanceAfter:   *row.BalanceAfter,
		TransferID:     row.TransferID,
		IdempotencyKey: row.IdempotencyKey,
		CreatedAt:      *row.CreatedAt,
	}), nil
}

// prepareEntry checks the arguments of a deposit or withdrawal, fills in the call, and returns the new entry's id
// and key, and its event.
func (r *Repository) prepareEntry(c *call, p WithdrawParams) (id uuid.UUID, key *string, event []string, err error) {
	if p.AccountID == uuid.Nil {
		return uuid.Nil, nil, nil, &InvalidError{"AccountID", "must not be the nil UUID"}
	}
	c.locks = []Lock{AccountLock(p.AccountID)}
	key, event, err = r.prepareMove(c, p.Amount, p.IdempotencyKey, p.LockTimeout, p.Event)
	if err != nil {
		return uuid.Nil, nil, nil, err
	}
	id, err = uuid.NewV7()
	return id, key, event, err
}

// prepareMove is what prepareEntry has in common with a transfer.
func (r *Repository) prepareMove(c *call, amount int64, idempotency string, lockTimeout time.Duration, e *Event) (key *string, event []string, err error) {
	if amount <= 0 {
		return nil, nil, &InvalidError{"Amount", "must be above 0"}
	}
	if c.timeout, err = timeout("LockTimeout", lockTimeout, r.lockTimeout); err != nil {
		return nil, nil, err
	}
	if key, err = idempotencyKey(idempotency); err != nil {
		return nil, nil, err
	}
	c.idempotent = key != nil
	event, err = e.encode()
	return key, event, err
}

// Cursor returns the entry's place in [Repository.ListEntries].
func (e *Entry) Cursor() Cursor { return Cursor{e.CreatedAt, e.ID} }

// ListEntries returns a page of the account's entries, newest first; none for an unknown account. It takes no
// lock and opens no transaction.
func (r *Repository) ListEntries(ctx context.Context, accountID uuid.UUID, o *ListOpts) (_ []Entry, err error) {
	defer r.done(ctx, "ListEntries", time.Now(), &err)
	return r.listEntries(ctx, nil, accountID, o)
}

// ListEntriesTx is [Repository.ListEntries] in a transaction of the caller's, on the terms of
// [Repository.GetAccountTx].
func (r *Repository) ListEntriesTx(ctx context.Context, tx pgx.Tx, accountID uuid.UUID, o *ListOpts) (_ []Entry, err error) {
	defer r.done(ctx, "ListEntriesTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.listEntries(ctx, tx, accountID, o)
}

func (r *Repository) listEntries(ctx context.Context, outer pgx.Tx, accountID uuid.UUID, o *ListOpts) ([]Entry, error) {
	if accountID == uuid.Nil {
		return nil, &InvalidError{"accountID", "must not be the nil UUID"}
	}
	limit, after, err := o.page()
	if err != nil {
		return nil, err
	}
	var rows []db.Entry
	err = r.readIn(ctx, outer, func(q *db.Queries) (err error) {
		rows, err = q.EntryListByAccount(ctx, db.EntryListByAccountParams{
			AccountID:       pgUUID(accountID),
			BeforeCreatedAt: after.CreatedAt,
			BeforeID:        pgUUID(after.ID),
			MaxRows:         limit,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	entries := make([]Entry, len(rows))
	for i, row := range rows {
		entries[i] = *entry(row)
	}
	return entries, nil
}

func entry(row db.Entry) *Entry {
	e := &Entry{
		ID:           row.ID.Bytes,
		AccountID:    row.AccountID.Bytes,
		Kind:         EntryKind(row.Kind),
		Amount:       row.Amount,
		BalanceAfter: row.BalanceAfter,
		CreatedAt:    row.CreatedAt,
	}
	if row.TransferID.Valid {
		e.TransferID = (*uuid.UUID)(&row.TransferID.Bytes)
	}
	if row.IdempotencyKey != nil {
		e.IdempotencyKey = *row.IdempotencyKey
	}
	return e
}
