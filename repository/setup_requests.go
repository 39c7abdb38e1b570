package repository

import (
	"context"
	"errors"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// SetupRequest is a request of a user to set something up.
type SetupRequest struct {
	ID             uuid.UUID
	UserID         uuid.UUID
	Status         SetupStatus
	MaxPending     int        // the limit that it was created under
	IdempotencyKey string     // empty if it was created without one
	CreatedAt      time.Time  // by the server's clock, when the lock was held
	EndedAt        *time.Time // by the server's clock; nil while it is pending
}

// SetupStatus is the state of a [SetupRequest]. It leaves [SetupPending] once, and never returns.
type SetupStatus string

// The states of a setup request.
const (
	SetupPending   SetupStatus = "pending"
	SetupCompleted SetupStatus = "completed"
	SetupCancelled SetupStatus = "cancelled"
)

// CreateSetupOpts are the options of [Repository.CreateSetup]; nil is the default of each.
type CreateSetupOpts struct {
	// MaxPending is how many requests of the user may be pending, this one included: 1 to 1000; 0 is 1.
	MaxPending int

	// LockTimeout bounds the wait for the user's lock: 1 ms to 24 days; 0 is the Repository's.
	LockTimeout time.Duration

	// IdempotencyKey makes the call safe to repeat: a later call for the same user with the same key returns
	// the first call's request, as it is by then, and uses no quota. At most 255 bytes of UTF-8 without NUL;
	// empty is none. It is the user's: the same key of another user is another key. It is kept as long as the
	// request is. MaxPending must be the same too, so a repeat across a change of the limit is a conflict.
	IdempotencyKey string

	// Event is written to the outbox by the statement that creates the request, if it does: a refused call writes none,
	// nor does a repeat with the same key. If its AggregateKey is the user's, the user's lock keeps the order.
	Event *Event
}

// maxMaxPending bounds what one insert counts under the lock. The table's CHECK says the same.
const maxMaxPending = 1000

// setupNamespace is where a user's setup requests are counted.
var setupNamespace = MustNamespace("setup_request")

// CreateSetup creates a pending request of the user, unless MaxPending are pending already.
//
// It opens a transaction of its own, takes the lock setup_request:<userID> in it, and returns after COMMIT; all
// in one round trip, once the connection has prepared the statements. Calls for one user run one after the other, calls
// for different users do not meet.
//
// Errors, beside those that the package names for every call: [ErrPendingExists], a [LimitError]; [ErrLockBusy],
// a [LockBusyError]; [ErrIdempotencyConflict] if the key was used with another MaxPending; [ErrInvalid].
func (r *Repository) CreateSetup(ctx context.Context, userID uuid.UUID, o *CreateSetupOpts) (_ *SetupRequest, err error) {
	defer r.done(ctx, "CreateSetup", time.Now(), &err)
	return r.createSetup(ctx, &call{}, userID, o)
}

// TryCreateSetup is [Repository.CreateSetup], except that it does not wait for a lock: if another call holds the
// user's, it returns [ErrLockBusy] at once, which tells nothing about the limit. LockTimeout bounds its wait for
// a connection.
func (r *Repository) TryCreateSetup(ctx context.Context, userID uuid.UUID, o *CreateSetupOpts) (_ *SetupRequest, err error) {
	defer r.done(ctx, "TryCreateSetup", time.Now(), &err)
	return r.createSetup(ctx, &call{try: true}, userID, o)
}

// CreateSetupTx is [Repository.CreateSetup] in a transaction of the caller's, and is undone with it. The user's
// lock is held until that ends, so end it soon.
//
// tx must be READ COMMITTED and READ WRITE, otherwise the error is [ErrIsolation]; no lock is taken then. Its
// lock_timeout and statement_timeout are put back as they were. After an error the transaction can be used on,
// unless ctx ended or the connection was lost during the call, or DISCARD ALL or the like had dropped what was
// prepared on it. After a refusal that was found under the lock it holds that, so that the refusal stays true until
// it ends; after any other error it does not.
func (r *Repository) CreateSetupTx(ctx context.Context, tx pgx.Tx, userID uuid.UUID, o *CreateSetupOpts) (_ *SetupRequest, err error) {
	defer r.done(ctx, "CreateSetupTx", time.Now(), &err)
	if tx == nil {
		return nil, &InvalidError{"tx", "must not be nil"}
	}
	return r.createSetup(ctx, &call{outer: tx}, userID, o)
}

// createSetup checks the arguments, runs the guarded insert, and reads its one row.
func (r *Repository) createSetup(ctx context.Context, c *call, userID uuid.UUID, o *CreateSetupOpts) (*SetupRequest, error) {
	if o == nil {
		o = &CreateSetupOpts{}
	}
	if userID == uuid.Nil {
		return nil, &InvalidError{"userID", "must not be the nil UUID"}
	}
	maxPending, err := count("MaxPending", o.MaxPending, 1, maxMaxPending)
	if err != nil {
		return nil, err
	}
	lockTimeout, err := timeout("LockTimeout", o.LockTimeout, r.lockTimeout)
	if err != nil {
		return nil, err
	}
	key, err := idempotencyKey(o.IdempotencyKey)
	if err != nil {
		return nil, err
	}
	event, err := o.Event.encode()
	if err != nil {
		return nil, err
	}
	id, err := uuid.NewV7() // rows of one time lie together in the primary key's index
	if err != nil {
		return nil, err
	}

	c.locks = []Lock{setupNamespace.Exclusive(userID.String())}
	c.timeout = lockTimeout
	c.idempotent = key != nil
	c.limit = int64(maxPending)
	insert := &setupInsert{params: db.SetupInsertWithinLimitParams{
		ID:         pgUUID(id),
		UserID:     pgUUID(userID),
		MaxPending: int16(maxPending),
		Event:      event,
	}}
	if key == nil && event == nil {
		c.setup = insert
	}
	err = r.runStatement(ctx, c, func(ctx context.Context, q db.DBTX) (err error) {
		if key == nil {
			insert.row, err = db.New(q).SetupInsertWithinLimit(ctx, insert.params)
			return err
		}
		once, err := db.New(q).SetupInsertOnce(ctx, db.SetupInsertOnceParams{
			ID:             pgUUID(id),
			UserID:         pgUUID(userID),
			MaxPending:     int16(maxPending),
			IdempotencyKey: *key,
			Event:          event,
		})
		insert.row = db.SetupInsertWithinLimitRow(once)
		return err
	})
	row := &insert.row // still written to, perhaps, if err says that ctx ended
	switch {
	case err != nil:
		return nil, err
	case !row.ID.Valid:
		return nil, &LimitError{Rule: ErrPendingExists, Used: row.PendingBefore, Limit: c.limit, Requested: 1}
	case int32(*row.MaxPending) != maxPending:
		return nil, ErrIdempotencyConflict
	}
	return setupRequest(db.SetupRequest{
		ID:             row.ID,
		UserID:         row.UserID,
		Status:         *row.Status,
		MaxPending:     *row.MaxPending,
		IdempotencyKey: row.IdempotencyKey,
		CreatedAt:      *row.CreatedAt,
		EndedAt:        row.EndedAt,
	}), nil
}

// setupInsert is what the statement of a CreateSetup inserts, and what it returned.
type setupInsert struct {
	params db.SetupInsertWithinLimitParams
	row    db.SetupInsertWithinLimitRow
}

// insertSetups is the statement of several calls whose users and limits are the same.
func insertSetups(ctx context.Context, q db.DBTX, calls []*ticket) error {
	first := calls[0].Call.setup.params
	params := db.SetupInsertManyWithinLimitParams{UserID: first.UserID, MaxPending: first.MaxPending}
	for _, t := range calls {
		params.Ids = append(params.Ids, t.Call.setup.params.ID)
	}
	rows, err := db.New(q).SetupInsertManyWithinLimit(ctx, params)
	if err != nil {
		return err
	}
	inserted := make(map[pgtype.UUID]db.SetupInsertManyWithinLimitRow, len(rows))
	for _, row := range rows {
		inserted[row.ID] = row
	}
	for _, t := range calls {
		row, ok := inserted[t.Call.setup.params.ID]
		if !ok { // those before it have used up the limit, if it was not used up already
			row.PendingBefore = max(rows[0].PendingBefore, int64(first.MaxPending))
		}
		t.Call.setup.row = db.SetupInsertWithinLimitRow(row)
	}
	return nil
}

// CompleteSetup moves a pending request to [SetupCompleted], which frees its place in the user's limit.
//
// It opens a transaction of its own, takes no advisory lock, and costs one round trip. Of two calls at once
// that end the same request, one succeeds. Errors: [ErrNotFound]; [ErrNotPending], also for a repeat of a call
// that succeeded; [ErrLockBusy] if another transaction held the row for the Repository's lock timeout.
func (r *Repository) CompleteSetup(ctx context.Context, id uuid.UUID) (_ *SetupRequest, err error) {
	defer r.done(ctx, "CompleteSetup", time.Now(), &err)
	return r.endSetup(ctx, id, SetupCompleted)
}

// CancelSetup is [Repository.CompleteSetup], except that it moves the request to [SetupCancelled].
func (r *Repository) CancelSetup(ctx context.Context, id uuid.UUID) (_ *SetupRequest, err error) {
	defer r.done(ctx, "CancelSetup", time.Now(), &err)
	return r.endSetup(ctx, id, SetupCancelled)
}

func (r *Repository) endSetup(ctx context.Context, id uuid.UUID, status SetupStatus) (*SetupRequest, error) {
	if id == uuid.Nil {
		return nil, &InvalidError{"id", "must not be the nil UUID"}
	}
	var row db.SetupEndRow
	err := r.run(ctx, &call{timeout: r.lockTimeout}, func(tx *pipeline.Tx) (err error) {
		row, err = db.New(tx.Last()).SetupEnd(ctx, db.SetupEndParams{ID: pgUUID(id), Status: string(status)})
		return err
	})
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, ErrNotFound
	case err != nil:
		return nil, err
	case !row.Ended:
		return nil, ErrNotPending
	}
	return setupRequest(db.SetupRequest{
		ID:             row.ID,
		UserID:         row.UserID,
		Status:         row.Status,
		MaxPending:     row.MaxPending,
		IdempotencyKey: row.IdempotencyKey,
		CreatedAt:      row.CreatedAt,
		EndedAt:        row.EndedAt,
	}), nil
}

// GetSetup returns a request, or [ErrNotFound]. It takes no lock and opens no transaction. It waits for a connection
// as long as ctx lets it, as all methods do that only read.
func (r *Repository) GetSetup(ctx context.Context, id uuid.UUID) (_ *SetupRequest, err error) {
	defer r.done(ctx, "GetSetup", time.Now(), &err)
	if id == uuid.Nil {
		return nil, &InvalidError{"id", "must not be the nil UUID"}
	}
	var row db.SetupRequest
	err = r.read(ctx, func(q *db.Queries) (err error) {
		row, err = q.SetupGet(ctx, pgUUID(id))
		return err
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, ErrNotFound
	}
	if err != nil {
		return nil, err
	}
	return setupRequest(row), nil
}

// Cursor returns the request's place in [Repository.ListSetups].
func (s *SetupRequest) Cursor() Cursor { return Cursor{s.CreatedAt, s.ID} }

// ListSetups returns a page of the user's requests, newest first; none for an unknown user. It takes no lock
// and opens no transaction.
func (r *Repository) ListSetups(ctx context.Context, userID uuid.UUID, o *ListOpts) (_ []SetupRequest, err error) {
	defer r.done(ctx, "ListSetups", time.Now(), &err)
	if userID == uuid.Nil {
		return nil, &InvalidError{"userID", "must not be the nil UUID"}
	}
	limit, after, err := o.page()
	if err != nil {
		return nil, err
	}
	var rows []db.SetupRequest
	err = r.read(ctx, func(q *db.Queries) (err error) {
		rows, err = q.SetupListByUser(ctx, db.SetupListByUserParams{
			UserID:          pgUUID(userID),
			BeforeCreatedAt: after.CreatedAt,
			BeforeID:        pgUUID(after.ID),
			MaxRows:         limit,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	setups := make([]SetupRequest, len(rows))
	for i, row := range rows {
		setups[i] = *setupRequest(row)
	}
	return setups, nil
}

// CountPendingSetups returns how many requests of the user are pending; 0 for an unknown user. It takes no
// lock, so the number may be old by the time it is read: to decide by it is what [Repository.CreateSetup] does.
func (r *Repository) CountPendingSetups(ctx context.Context, userID uuid.UUID) (_ int, err error) {
	defer r.done(ctx, "CountPendingSetups", time.Now(), &err)
	if userID == uuid.Nil {
		return 0, &InvalidError{"userID", "must not be the nil UUID"}
	}
	var n int64
	err = r.read(ctx, func(q *db.Queries) (err error) {
		n, err = q.SetupCountPending(ctx, pgUUID(userID))
		return err
	})
	return int(n), err
}

func setupRequest(row db.SetupRequest) *SetupRequest {
	s := &SetupRequest{
		ID:         row.ID.Bytes,
		UserID:     row.UserID.Bytes,
		Status:     SetupStatus(row.Status),
		MaxPending: int(row.MaxPending),
		CreatedAt:  row.CreatedAt,
		EndedAt:    row.EndedAt,
	}
	if row.IdempotencyKey != nil {
		s.IdempotencyKey = *row.IdempotencyKey
	}
	return s
}
