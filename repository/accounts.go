package repository

import (
	"context"
	"errors"
	"time"
	_ "time/tzdata" // or which time zones there are would depend on the files of the host's machine

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// Account holds money of an owner's. All amounts are in minor units of its one currency, such as cents; which
// currency that is, the host knows.
type Account struct {
	ID             uuid.UUID
	OwnerID        uuid.UUID
	Balance        int64     // what its entries add up to; never below 0
	DailyLimit     int64     // how much may leave it on one day; 0 is no limit
	TimeZone       string    // whose days those are, such as "Europe/Berlin"
	IdempotencyKey string    // empty if it was opened without one
	CreatedAt      time.Time // by the server's clock
}

// OpenAccountParams are the parameters of [Repository.OpenAccount].
type OpenAccountParams struct {
	// OwnerID is whose account it is, the host's own id.
	OwnerID uuid.UUID

	// DailyLimit is how much may leave the account on one day, by withdrawals and transfers together, in minor
	// units; 0 is no limit.
	DailyLimit int64

	// TimeZone is the IANA name of the time zone of the account's days, such as "Europe/Berlin"; empty is UTC. Both
	// Go and the server must know it. The server reads a short name such as CET as a fixed offset from UTC.
	TimeZone string

	// IdempotencyKey makes the call safe to repeat: a later call for the same owner with the same key returns the
	// first call's account, as it is by then. At most 255 bytes of UTF-8 without NUL; empty is none. It is the
	// owner's: the same key of another owner is another key.
	IdempotencyKey string

	// LockTimeout bounds the wait for a connection and the owner's lock: 1 ms to 24 days; 0 is the Repository's.
	LockTimeout time.Duration
}

var (
	// accountNamespace is where the money of an account moves.
	accountNamespace = MustNamespace("account")

	// accountOwnerNamespace is where an owner's idempotency keys are used.
	accountOwnerNamespace = MustNamespace("account_owner")
)

// AccountLock returns the lock under which the money of an account moves, for a [Repository.Guard] that must stop
// it, or a transaction that moves money in several accounts.
func AccountLock(id uuid.UUID) Lock { return accountNamespace.Exclusive(id.String()) }

// OpenAccount creates an empty account of the owner, who may have any number of them.
//
// It opens a transaction of its own, and returns after COMMIT; all in one round trip. Nothing can be in its way,
// so it takes a lock only if there is an idempotency key: account_owner:<OwnerID>.
//
// Errors, beside those that the package names for every call: [ErrIdempotencyConflict] if the key was used with
// another DailyLimit or TimeZone; [ErrLockBusy], a [LockBusyError]; [ErrInvalid].
func (r *Repository) OpenAccount(ctx context.Context, p OpenAccountParams) (_ *Account, err error) {
	defer r.done(ctx, "OpenAccount", time.Now(), &err)
	return r.openAccount(ctx, &call{}, p)
}

// OpenAccountTx is [Repository.OpenAccount] in a transaction of the caller's, on the terms of
// [Repository.CreateSetupTx].
func (r *Repository) OpenAccountTx(ctx context.Context, tx pgx.Tx, p OpenAccountParams) (_ *Account, err error) {
	defer r.done(ctx, "OpenAccountTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.openAccount(ctx, &call{outer: tx}, p)
}

func (r *Repository) openAccount(ctx context.Context, c *call, p OpenAccountParams) (*Account, error) {
	lockTimeout, err := timeout("LockTimeout", p.LockTimeout, r.lockTimeout)
	switch {
	case p.OwnerID == uuid.Nil:
		return nil, &InvalidError{"OwnerID", "must not be the nil UUID"}
	case p.DailyLimit < 0:
		return nil, &InvalidError{"DailyLimit", "must not be negative"}
	case err != nil:
		return nil, err
	}
	zone, err := timeZone(p.TimeZone)
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(p.IdempotencyKey)
	if err != nil {
		return nil, err
	}
	id, err := uuid.NewV7()
	if err != nil {
		return nil, err
	}

	if key != nil {
		c.locks = []Lock{accountOwnerNamespace.Exclusive(p.OwnerID.String())}
	}
	c.timeout = lockTimeout
	c.idempotent = key != nil
	var row db.AccountInsertRow
	err = r.run(ctx, c, func(tx *pipeline.Tx) (err error) {
		row, err = db.New(tx.Last()).AccountInsert(ctx, db.AccountInsertParams{
			ID:             pgUUID(id),
			OwnerID:        pgUUID(p.OwnerID),
			DailyLimit:     p.DailyLimit,
			TimeZone:       zone,
			IdempotencyKey: key,
		})
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case row.DailyLimit != p.DailyLimit || row.TimeZone != zone:
		return nil, ErrIdempotencyConflict
	}
	return account(db.Account(row)), nil
}

// GetAccount returns an account, or [ErrNotFound]. It takes no lock and opens no transaction, so the balance may
// be old by the time it is read.
func (r *Repository) GetAccount(ctx context.Context, id uuid.UUID) (_ *Account, err error) {
	defer r.done(ctx, "GetAccount", time.Now(), &err)
	return r.getAccount(ctx, nil, id)
}

// GetAccountTx is [Repository.GetAccount] in a transaction of the caller's, which may be of any isolation level.
// After an error the transaction can be used on, unless ctx ended or the connection was lost during the call.
func (r *Repository) GetAccountTx(ctx context.Context, tx pgx.Tx, id uuid.UUID) (_ *Account, err error) {
	defer r.done(ctx, "GetAccountTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.getAccount(ctx, tx, id)
}

func (r *Repository) getAccount(ctx context.Context, outer pgx.Tx, id uuid.UUID) (*Account, error) {
	if id == uuid.Nil {
		return nil, &InvalidError{"id", "must not be the nil UUID"}
	}
	var row db.Account
	err := r.readIn(ctx, outer, func(q *db.Queries) (err error) {
		row, err = q.AccountGet(ctx, pgUUID(id))
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	return account(row), nil
}

// timeZone checks the name of a time zone; empty is UTC.
func timeZone(name string) (string, error) {
	if name == "" {
		return "UTC", nil
	}
	if _, err := time.LoadLocation(name); err != nil || name == "Local" { // which is the machine's, not a zone
		return "", &InvalidError{"TimeZone", "must be a known IANA time zone"}
	}
	return name, nil
}

func account(row db.Account) *Account {
	a := &Account{
		ID:         row.ID.Bytes,
		OwnerID:    row.OwnerID.Bytes,
		Balance:    row.Balance,
		DailyLimit: row.DailyLimit,
		TimeZone:   row.TimeZone,
		CreatedAt:  row.CreatedAt,
	}
	if row.IdempotencyKey != nil {
		a.IdempotencyKey = *row.IdempotencyKey
	}
	return a
}
