package repository

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// Event is something to be done outside of the database because of a transaction: it is written in that transaction,
// and handled after it, at least once. See [Repository.ClaimEvents].
type Event struct {
	// Topic says what kind of event it is: 1 to 255 bytes of UTF-8 without NUL.
	Topic string

	// AggregateKey names what the event is about, such as an account. The events of one key are handled one at a
	// time, and in the order of their commits if whoever writes them holds a lock for the key; see
	// [Repository.EnqueueTx]. At most 255 bytes of UTF-8 without NUL; an event without a key has no order.
	AggregateKey string

	// Payload is JSON that PostgreSQL's jsonb can hold, of at most 1 MiB, also with numbers such as 1e99 written out:
	// UTF-8, without the escape \u0000 and halves of surrogate pairs, nested at most 1,000 deep, and with numbers of at
	// most 131,072 digits before the decimal point and 16,383 after it. It comes back with the same value, not with
	// the same white space, order of keys, or keys given twice. nil is JSON's null.
	Payload json.RawMessage

	// Headers are for what carries the event, such as a trace. Keys and values are UTF-8 without NUL, at most 16 KiB
	// together.
	Headers map[string]string

	// MaxAttempts is how often the event may be claimed before it becomes a dead letter: 1 to 1000; 0 is
	// [DefaultMaxAttempts].
	MaxAttempts int
}

// EventID is the id of an event. It stays the same however often the event is claimed or redriven, so a sink can tell
// a repeat by it. Of the events of one aggregate, a later one has a larger id, if [Repository.EnqueueTx] was used as it
// says.
type EventID int64

// ClaimParams are the parameters of [Repository.ClaimEvents].
type ClaimParams struct {
	// Worker says who claims: 1 to 255 bytes of UTF-8 without NUL. It is shown to operators. What one claim may do is
	// told apart by its Fence, so two workers of one name do no harm.
	Worker string

	// Max is how many events to claim at most: 1 to 1000; 0 is 100.
	Max int

	// Lease is how long the events are the worker's: 1 ms to 24 days; 0 is [DefaultLease].
	Lease time.Duration

	// Topics are those that the worker handles, at most 100; none is all. To pass over due events of other topics costs
	// time too, and an aggregate whose turn is that of another topic waits for that.
	Topics []string
}

// Claim is a worker's right to handle an event until LeaseUntil. It is a value.
type Claim struct {
	EventID EventID
	Worker  string

	// Fence is the fencing token. Each claim of an event has a larger one than those before it, for ever: a sink that
	// remembers the largest it has seen, and refuses smaller ones, is safe from workers that come back late.
	Fence int64

	// LeaseUntil is when the claim ends by the server's clock, which is not this machine's: to know how much time is
	// left, count the Lease that was asked for from before the call.
	LeaseUntil time.Time
}

// ClaimedEvent is an event and the claim on it.
type ClaimedEvent struct {
	Claim
	Event
	Attempt   int       // which one this is, from 1; a redrive begins anew
	CreatedAt time.Time // by the server's clock, when the event was written
}

// DeadLetter is an event whose attempts are used up, or that failed with [ErrPermanent].
type DeadLetter struct {
	EventID EventID
	Event
	Attempts  int       // since it was written or redriven
	LastError string    // why the last attempt failed; empty if nobody said
	CreatedAt time.Time // by the server's clock, when the event was written
	DiedAt    time.Time // by the server's clock
}

// DeadLetterOpts choose a page of [Repository.ListDeadLetters]; nil is the default of each.
type DeadLetterOpts struct {
	// Limit is how many come back at most: 1 to 1000; 0 is 100.
	Limit int

	// After is the Cursor of the last one of the page before; the zero DeadLetterCursor starts with the newest.
	After DeadLetterCursor
}

// DeadLetterCursor is a place in [Repository.ListDeadLetters].
type DeadLetterCursor struct {
	DiedAt  time.Time
	EventID EventID
}

const (
	// DefaultMaxAttempts is the MaxAttempts of an event that has none of its own. With the back-off of
	// [Repository.RetryEvent] they take from six to thirteen hours.
	DefaultMaxAttempts = 25

	// DefaultLease is how long a claim or a lease lasts if nothing is said: several times as long as a call to
	// another service may take, and short enough to wait for after a crash.
	DefaultLease = 30 * time.Second

	// maxMaxAttempts bounds what nobody would look at any more.
	maxMaxAttempts = 1000

	// maxPayload keeps a page of claimed events in memory: what is larger belongs into a store of its own.
	maxPayload = 1 << 20

	// maxDepth is a tenth of what PostgreSQL's stack holds by default.
	maxDepth = 1000

	// maxHeaders is what web servers accept for all headers of a request.
	maxHeaders = 16 << 10

	// maxClaimed bounds what one claim holds in memory and in row locks.
	maxClaimed = 1000

	// maxTopics bounds what is compared for each due event.
	maxTopics = 100

	// maxLastError holds a wrapped error and the head of a stack, and stays off the table's toast.
	maxLastError = 1024

	// maxPurged bounds how long one purge holds its row locks.
	maxPurged = 10_000
)

// ErrPermanent in what a [Handler] returns, or in the cause of [Repository.RetryEvent], says that no further attempt can
// succeed, for instance because the event names an account that was closed: the event becomes a dead letter at once,
// whatever attempts it has left. It is to be wrapped with the reason, which operators see:
//
//	return fmt.Errorf("%w: the account is closed", repository.ErrPermanent)
var ErrPermanent = errors.New("permanent failure")

// EnqueueTx writes an event in a transaction of the caller's, due at once, and returns its id. It is undone with the
// transaction. tx is a [pgx.Tx], a [Tx] of [Repository.Guard], or what its Last returns: then COMMIT travels with it.
// It costs one round trip, takes no lock and waits for nobody, and nobody waits for it: events of other aggregates, and
// of this one if they were committed before, are claimed while tx is open.
//
// Within an aggregate the order of the ids is that of the commits only if whoever writes events of the aggregate holds
// one exclusive lock for it from before EnqueueTx until the transaction ends, as [Repository.Guard] and
// [Repository.GuardTx] take it. Without that, an event can be handled after one with a larger id; it is still handled,
// and still not at the same time as another one of its aggregate.
//
// Unlike the methods that join a transaction, it sets no savepoint: an error of the server leaves tx to be rolled back.
// [ErrInvalid] comes before anything is sent, also if tx is a pool, which is no transaction.
func (r *Repository) EnqueueTx(ctx context.Context, tx DBTX, e Event) (_ EventID, err error) {
	defer r.done(ctx, "EnqueueTx", time.Now(), &err)
	outer, joined := tx.(pgx.Tx)
	if _, pool := tx.(*pgxpool.Pool); tx == nil || pool {
		return 0, &InvalidError{"tx", "must be a transaction"}
	}
	event, err := e.encode()
	if err != nil {
		return 0, err
	}
	id, err := db.New(tx).OutboxInsert(ctx, event)
	if err != nil && joined {
		// The errors of Guard's Tx have their meaning already.
		c := call{outer: outer, started: time.Now()}
		err = c.classify(ctx, err, func() bool { return outer.Conn() == nil || outer.Conn().IsClosed() })
	}
	return EventID(id), err
}

// ClaimEvents claims due events for a worker, which are then its own until the lease ends, and returns them, oldest
// first: at most p.Max, none if nothing is due. It does not wait: not for events, not for other workers, not for open
// transactions.
//
// Of an aggregate one event at a time is claimed, that with the lowest id: the next one's turn comes when it is done or
// dead, also if it has to wait for its next attempt until then. A dead letter does not hold up those behind it. A claim
// that was not settled before its lease ended is free to be claimed again, by anyone. Events that have been claimed
// MaxAttempts times already become dead letters instead. An attempt is counted when it begins, so that a worker that
// crashes each time gets there too.
//
// For each event the worker calls one of [Repository.CompleteEvent] and [Repository.RetryEvent] in the end, and
// [Repository.ExtendClaim] while it needs more time. Handling is at least once: a worker that is stopped and comes back
// late may be handling an event that is somebody else's by then. To make the effect once, let the sink compare the
// EventID and the Fence.
//
// It opens a transaction of its own and costs one round trip, and a few where there is nothing but events whose
// attempts are used up. Time is the server's, and a lease is counted from when its event is locked. Errors, beside
// those that the package names for every call: [ErrLockBusy]; [ErrInvalid]. If the outcome is unknown, what was
// claimed is free again when the lease ends.
func (r *Repository) ClaimEvents(ctx context.Context, p ClaimParams) (_ []ClaimedEvent, err error) {
	defer r.done(ctx, "ClaimEvents", time.Now(), &err)
	params, err := p.check()
	if err != nil {
		return nil, err
	}
	for tries := 1; ; tries++ {
		events, dead, err := r.claimEvents(ctx, params)
		switch {
		case errors.Is(err, errTurnTaken) && tries < maxClaimTries:
			continue
		case errors.Is(err, errTurnTaken):
			return nil, &LockBusyError{Where: WhereRow, Err: err}
		case err != nil:
			return nil, err
		case len(events) > 0 || dead == 0:
			return events, nil
		}
	}
}

// maxClaimTries is for a race that needs a redrive, or a writer without a lock, at the very moment of two claims.
const maxClaimTries = 5

// claimEvents claims once. dead is how many events became dead letters instead.
func (r *Repository) claimEvents(ctx context.Context, params db.OutboxClaimParams) (events []ClaimedEvent, dead int, err error) {
	var rows []db.OutboxClaimRow
	err = r.run(ctx, &call{timeout: r.lockTimeout}, func(tx *pipeline.Tx) (err error) {
		_ = db.New(tx.Before()).OutboxPreferIndexes(ctx)
		rows, err = db.New(tx.Last()).OutboxClaim(ctx, params)
		return err
	})
	if err != nil {
		return nil, 0, err
	}
	for _, row := range rows {
		if row.Dead {
			dead++
			continue
		}
		events = append(events, ClaimedEvent{
			Claim:     Claim{EventID: EventID(row.ID), Worker: params.Worker, Fence: row.Fence, LeaseUntil: *row.LeaseUntil},
			Event:     event(row.Topic, row.AggregateKey, row.Payload, row.Headers, row.MaxAttempts),
			Attempt:   int(row.Attempts),
			CreatedAt: row.CreatedAt,
		})
	}
	return events, dead, nil
}

// CompleteEvent ends a claim whose event has been handled. The event is kept as done until [Repository.PurgeEvents].
//
// It opens a transaction of its own, and costs one round trip. Errors: [ErrLeaseLost] if the claim is not current any
// more, because its lease ended, even if nobody else has claimed the event yet, or because the event has been settled
// or redriven; nothing is changed then. [ErrLockBusy] if another transaction held the row for the Repository's lock
// timeout; [ErrInvalid]. The server's clock is read when the row is locked, so time spent waiting for it counts.
//
// If the outcome is unknown, a repeat says [ErrLeaseLost] if the first call was committed.
func (r *Repository) CompleteEvent(ctx context.Context, c Claim) (err error) {
	defer r.done(ctx, "CompleteEvent", time.Now(), &err)
	if err := c.check(); err != nil {
		return err
	}
	return r.settle(ctx, func(q *db.Queries) error {
		done, err := q.OutboxComplete(ctx, db.OutboxCompleteParams{
			Ids:    []int64{int64(c.EventID)},
			Fences: []int64{c.Fence},
			Worker: c.Worker,
		})
		if err == nil && len(done) == 0 {
			return pgx.ErrNoRows
		}
		return err
	})
}

// RetryEvent ends a claim whose event could not be handled: it is due again after a while, or, if that was the last of
// its MaxAttempts or the cause is [ErrPermanent], it becomes a dead letter.
//
// after is 1 ms to 24 days, counted by the server from now; 0 is a back-off of one second, doubled with each attempt up
// to an hour, of which half is certain and half is left to chance, so that what failed together does not come back
// together. cause is kept for operators, its first 1,024 bytes; it may be nil.
//
// Its terms and errors are those of [Repository.CompleteEvent].
func (r *Repository) RetryEvent(ctx context.Context, c Claim, after time.Duration, cause error) (err error) {
	defer r.done(ctx, "RetryEvent", time.Now(), &err)
	if err := c.check(); err != nil {
		return err
	}
	after, err = timeout("after", after, 0)
	if err != nil {
		return err
	}
	params := db.OutboxRetryParams{
		ID:        int64(c.EventID),
		Worker:    c.Worker,
		Fence:     c.Fence,
		Permanent: errors.Is(cause, ErrPermanent),
		LastError: lastError(cause),
	}
	if after > 0 {
		ms := after.Milliseconds()
		params.AfterMs = &ms
	}
	return r.settle(ctx, func(q *db.Queries) error {
		_, err := q.OutboxRetry(ctx, params)
		return err
	})
}

// ExtendClaim makes a claim end a lease from now, and returns it with its new LeaseUntil; its Fence stays. lease is
// 1 ms to 24 days; 0 is [DefaultLease]. It may also be shorter than what is left.
//
// Its terms and errors are those of [Repository.CompleteEvent].
func (r *Repository) ExtendClaim(ctx context.Context, c Claim, lease time.Duration) (_ Claim, err error) {
	defer r.done(ctx, "ExtendClaim", time.Now(), &err)
	if err := c.check(); err != nil {
		return Claim{}, err
	}
	lease, err = timeout("lease", lease, DefaultLease)
	if err != nil {
		return Claim{}, err
	}
	var until time.Time
	err = r.settle(ctx, func(q *db.Queries) (err error) {
		until, err = q.OutboxExtend(ctx, db.OutboxExtendParams{
			ID:      int64(c.EventID),
			Worker:  c.Worker,
			Fence:   c.Fence,
			LeaseMs: lease.Milliseconds(),
		})
		return err
	})
	if err != nil {
		return Claim{}, err
	}
	c.LeaseUntil = until
	return c, nil
}

// completeEvents is CompleteEvent for claims of one worker. It returns the tokens of those that it has ended, by event;
// the other claims are not current any more.
func (r *Repository) completeEvents(ctx context.Context, claims []Claim) (done map[EventID]int64, err error) {
	defer r.done(ctx, "CompleteEvents", time.Now(), &err)
	ids, fences := tokens(claims)
	var rows []db.OutboxCompleteRow
	err = r.settle(ctx, func(q *db.Queries) (err error) {
		rows, err = q.OutboxComplete(ctx, db.OutboxCompleteParams{Ids: ids, Fences: fences, Worker: claims[0].Worker})
		return err
	})
	done = make(map[EventID]int64, len(rows))
	for _, row := range rows {
		done[EventID(row.ID)] = row.Fence
	}
	return done, err
}

// releaseEvents gives back claims of one worker whose events nobody has begun to handle, without counting the attempt.
// It returns the tokens of those that it has given back, by event; the other claims are not current any more.
func (r *Repository) releaseEvents(ctx context.Context, claims []Claim) (ready map[EventID]int64, err error) {
	defer r.done(ctx, "ReleaseEvents", time.Now(), &err)
	ids, fences := tokens(claims)
	var rows []db.OutboxReleaseRow
	err = r.settle(ctx, func(q *db.Queries) (err error) {
		rows, err = q.OutboxRelease(ctx, db.OutboxReleaseParams{Ids: ids, Fences: fences, Worker: claims[0].Worker})
		return err
	})
	ready = make(map[EventID]int64, len(rows))
	for _, row := range rows {
		ready[EventID(row.ID)] = row.Fence
	}
	return ready, err
}

// extendClaims is ExtendClaim for claims of one worker, but does not wait for a row that is locked. It returns the rows of
// those that are current, which say whether they were extended.
func (r *Repository) extendClaims(ctx context.Context, claims []Claim, lease time.Duration) (current map[EventID]db.OutboxExtendAllRow, err error) {
	defer r.done(ctx, "ExtendClaims", time.Now(), &err)
	ids, fences := tokens(claims)
	var rows []db.OutboxExtendAllRow
	err = r.settle(ctx, func(q *db.Queries) (err error) {
		rows, err = q.OutboxExtendAll(ctx, db.OutboxExtendAllParams{
			Ids:     ids,
			Fences:  fences,
			Worker:  claims[0].Worker,
			LeaseMs: lease.Milliseconds(),
		})
		return err
	})
	current = make(map[EventID]db.OutboxExtendAllRow, len(rows))
	for _, row := range rows {
		current[EventID(row.ID)] = row
	}
	return current, err
}

func tokens(claims []Claim) (ids, fences []int64) {
	for _, c := range claims {
		ids, fences = append(ids, int64(c.EventID)), append(fences, c.Fence)
	}
	return ids, fences
}

// settle runs the one query of a transaction that changes something under a token; no row means that the token is old.
func (r *Repository) settle(ctx context.Context, query func(*db.Queries) error) error {
	err := r.run(ctx, &call{timeout: r.lockTimeout}, func(tx *pipeline.Tx) error {
		return query(db.New(tx.Last()))
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return ErrLeaseLost
	}
	return err
}

// Cursor returns the dead letter's place in [Repository.ListDeadLetters].
func (d *DeadLetter) Cursor() DeadLetterCursor { return DeadLetterCursor{d.DiedAt, d.EventID} }

// ListDeadLetters returns a page of the dead letters, the one that died last first. It takes no lock and opens no
// transaction. Dead letters stay until they are redriven, or deleted by hand.
func (r *Repository) ListDeadLetters(ctx context.Context, o *DeadLetterOpts) (_ []DeadLetter, err error) {
	defer r.done(ctx, "ListDeadLetters", time.Now(), &err)
	if o == nil {
		o = &DeadLetterOpts{}
	}
	limit, err := count("Limit", o.Limit, defaultRows, maxListLimit)
	if err != nil {
		return nil, err
	}
	after := o.After
	switch {
	case after == (DeadLetterCursor{}):
		after = DeadLetterCursor{afterAll.CreatedAt, math.MaxInt64}
	case !isOfRow(after.DiedAt) || after.EventID <= 0:
		return nil, &InvalidError{"After", "must be the Cursor of a dead letter"}
	}
	var rows []db.OutboxListDeadRow
	err = r.read(ctx, func(q *db.Queries) (err error) {
		rows, err = q.OutboxListDead(ctx, db.OutboxListDeadParams{
			BeforeEndedAt: after.DiedAt,
			BeforeID:      int64(after.EventID),
			MaxRows:       limit,
		})
		return err
	})
	if err != nil {
		return nil, err
	}
	letters := make([]DeadLetter, len(rows))
	for i, row := range rows {
		letters[i] = DeadLetter{
			EventID:   EventID(row.ID),
			Event:     event(row.Topic, row.AggregateKey, row.Payload, row.Headers, row.MaxAttempts),
			Attempts:  int(row.Attempts),
			CreatedAt: row.CreatedAt,
			DiedAt:    row.EndedAt,
		}
		if row.LastError != nil {
			letters[i].LastError = *row.LastError
		}
	}
	return letters, nil
}

// RedriveDeadLetter makes a dead letter an event again, with the same id, due at once, and with all of its MaxAttempts.
// In its aggregate, its turn comes before those of later events that are not claimed yet.
//
// It opens a transaction of its own, and costs one round trip. Errors: [ErrNotFound] if there is no dead letter with
// this id; [ErrLockBusy]; [ErrInvalid].
func (r *Repository) RedriveDeadLetter(ctx context.Context, id EventID) (err error) {
	defer r.done(ctx, "RedriveDeadLetter", time.Now(), &err)
	if id <= 0 {
		return &InvalidError{"id", "must be above 0"}
	}
	var redriven int64
	err = r.run(ctx, &call{timeout: r.lockTimeout}, func(tx *pipeline.Tx) (err error) {
		redriven, err = db.New(tx.Last()).OutboxRedrive(ctx, int64(id))
		return err
	})
	if err == nil && redriven == 0 {
		return ErrNotFound
	}
	return err
}

// PurgeEvents deletes events that were done more than olderThan ago, the oldest first, and returns how many: at most
// limit, from 1 to 10000; 0 is 1000. Fewer than that mean that no more are left. Nothing else deletes them, so call it
// now and then until it does. Events that are done cost a claim nothing, only space. Dead letters stay.
//
// It opens a transaction of its own, costs one round trip, and waits for nobody; calls at once share the work. Errors:
// [ErrInvalid] if olderThan is below 0.
func (r *Repository) PurgeEvents(ctx context.Context, olderThan time.Duration, limit int) (_ int, err error) {
	defer r.done(ctx, "PurgeEvents", time.Now(), &err)
	if olderThan < 0 {
		return 0, &InvalidError{"olderThan", "must not be below 0"}
	}
	rows, err := count("limit", limit, 1000, maxPurged)
	if err != nil {
		return 0, err
	}
	var purged int64
	err = r.run(ctx, &call{timeout: r.lockTimeout}, func(tx *pipeline.Tx) (err error) {
		_ = db.New(tx.Before()).OutboxPreferIndexes(ctx)
		purged, err = db.New(tx.Last()).OutboxPurge(ctx, db.OutboxPurgeParams{
			OlderMs: olderThan.Milliseconds(),
			MaxRows: rows,
		})
		return err
	})
	return int(purged), err
}

// check checks the parameters and fills in the defaults.
func (p ClaimParams) check() (params db.OutboxClaimParams, err error) {
	if err := checkName("Worker", p.Worker); err != nil {
		return params, err
	}
	limit, err := count("Max", p.Max, defaultRows, maxClaimed)
	if err != nil {
		return params, err
	}
	lease, err := timeout("Lease", p.Lease, DefaultLease)
	if err != nil {
		return params, err
	}
	if len(p.Topics) > maxTopics {
		return params, &InvalidError{"Topics", "must be at most 100"}
	}
	for i, topic := range p.Topics {
		if err := checkName(fmt.Sprintf("Topics[%d]", i), topic); err != nil {
			return params, err
		}
	}
	return db.OutboxClaimParams{
		Worker:  p.Worker,
		MaxRows: limit,
		LeaseMs: lease.Milliseconds(),
		Topics:  append([]string{}, p.Topics...), // a nil slice would be NULL
	}, nil
}

// check finds a Claim that ClaimEvents did not return.
func (c Claim) check() error {
	if c.EventID <= 0 || c.Fence <= 0 {
		return &InvalidError{"c", "must be a Claim of ClaimEvents"}
	}
	return checkName("Worker", c.Worker)
}

// encode checks an event, and returns it in the form of latchkey.outbox_insert; nil if there is none.
func (e *Event) encode() ([]string, error) {
	if e == nil {
		return nil, nil
	}
	if err := checkName("Topic", e.Topic); err != nil {
		return nil, err
	}
	if err := checkText("AggregateKey", e.AggregateKey, maxName); err != nil {
		return nil, err
	}
	payload := "null"
	if e.Payload != nil {
		if problem := payloadProblem(e.Payload); problem != "" {
			return nil, &InvalidError{"Payload", problem}
		}
		payload = string(e.Payload)
	}
	headers, err := encodeHeaders(e.Headers)
	if err != nil {
		return nil, err
	}
	attempts, err := count("MaxAttempts", e.MaxAttempts, DefaultMaxAttempts, maxMaxAttempts)
	if err != nil {
		return nil, err
	}
	return []string{e.Topic, e.AggregateKey, payload, headers, strconv.Itoa(int(attempts))}, nil
}

func encodeHeaders(headers map[string]string) (string, error) {
	if len(headers) == 0 {
		return "{}", nil
	}
	size := 0
	for key, value := range headers {
		for _, text := range []string{key, value} {
			if err := checkText("Headers", text, maxHeaders); err != nil {
				return "", err
			}
			size += len(text)
		}
	}
	if size > maxHeaders {
		return "", &InvalidError{"Headers", "must be at most 16384 bytes long together"}
	}
	text, err := json.Marshal(headers)
	return string(text), err
}

// event is the reverse of encode. Headers that are no strings, and what is no object, which only SQL can have written, come
// as their JSON, the latter under an empty key: an event that could not be read would cost all that were claimed with it
// their attempts.
func event(topic string, aggregateKey *string, payload, headers []byte, maxAttempts int32) Event {
	e := Event{Topic: topic, Payload: payload, MaxAttempts: int(maxAttempts)}
	if aggregateKey != nil {
		e.AggregateKey = *aggregateKey
	}
	var values map[string]json.RawMessage
	if json.Unmarshal(headers, &values) != nil {
		values = map[string]json.RawMessage{"": headers}
	}
	if len(values) == 0 {
		return e
	}
	e.Headers = make(map[string]string, len(values))
	for key, value := range values {
		var text string
		if json.Unmarshal(value, &text) != nil {
			text = string(value)
		}
		e.Headers[key] = text
	}
	return e
}

// lastError is the text of a cause in a form that PostgreSQL can hold; nil if there is none.
func lastError(cause error) *string {
	if cause == nil {
		return nil
	}
	text := cause.Error()
	text = text[:min(len(text), maxLastError)]
	text = strings.ReplaceAll(strings.ToValidUTF8(text, "\uFFFD"), "\x00", "\uFFFD")
	return &text
}

// payloadProblem says what is wrong with a payload: that it is no JSON, or JSON that PostgreSQL's jsonb cannot hold.
// To find out from the server would cost the transaction.
func payloadProblem(payload []byte) string {
	switch {
	case len(payload) > maxPayload:
		return "must be at most 1 MiB long"
	case !utf8.Valid(payload):
		return "must be valid UTF-8"
	case !json.Valid(payload):
		return "must be valid JSON"
	}
	depth, size := 0, len(payload)
	for rest := payload; len(rest) > 0; {
		length := 1
		switch c := rest[0]; {
		case c == '[' || c == '{':
			if depth++; depth > maxDepth {
				return "must not be nested more than 1000 deep"
			}
		case c == ']' || c == '}':
			depth--
		case c == '"':
			var problem string
			if length, problem = stringProblem(rest); problem != "" {
				return problem
			}
		case c == '-' || c >= '0' && c <= '9':
			length = len(rest) - len(bytes.TrimLeft(rest, "-+.eE0123456789"))
			digits, ok := writtenOut(string(rest[:length]))
			if !ok {
				return "must not hold a number of more than 131072 digits before the decimal point or 16383 after it"
			}
			if size += max(0, digits-length); size > maxPayload { // 1e99999 comes back with all of its zeros
				return "must be at most 1 MiB long with its numbers written out"
			}
		}
		rest = rest[length:]
	}
	return ""
}

// stringProblem looks at the string that valid JSON begins with, and returns its length, quotes included.
func stringProblem(text []byte) (length int, problem string) {
	i := 1
	for text[i] != '"' {
		if text[i] != '\\' {
			i++
			continue
		}
		unit, ok := escapedUnit(text[i:])
		switch {
		case !ok:
			i += 2
			continue
		case unit == 0:
			return 0, `must not hold the escape \u0000`
		case utf16.IsSurrogate(unit):
			i += 6
			low, _ := escapedUnit(text[i:])
			if utf16.DecodeRune(unit, low) == utf8.RuneError {
				return 0, "must not hold half of a surrogate pair"
			}
		}
		i += 6
	}
	return i + 1, ""
}

// escapedUnit reads an escape such as \u0041.
func escapedUnit(text []byte) (rune, bool) {
	if len(text) < 6 || text[0] != '\\' || text[1] != 'u' {
		return 0, false
	}
	unit, err := strconv.ParseUint(string(text[2:6]), 16, 16)
	return rune(unit), err == nil
}

// writtenOut returns how many digits a number of valid JSON has without its exponent; false is too many for
// PostgreSQL's numeric.
func writtenOut(number string) (digits int, ok bool) {
	mantissa, exponent := strings.TrimPrefix(number, "-"), 0
	if at := strings.IndexAny(mantissa, "eE"); at >= 0 {
		var err error
		if exponent, err = strconv.Atoi(mantissa[at+1:]); err != nil || exponent > maxPayload || exponent < -maxPayload {
			return 0, false
		}
		mantissa = mantissa[:at]
	}
	whole, fraction, _ := strings.Cut(mantissa, ".")
	before, after := max(0, len(whole)+exponent), max(0, len(fraction)-exponent)
	return before + after, before <= 131072 && after <= 16383
}
