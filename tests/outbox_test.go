package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// office is a service with an outbox, in a database of its own.
type office struct {
	*fixture
	admin *pgxpool.Pool
}

func newOffice(t *testing.T, opts ...func(*pgxpool.Config)) *office {
	t.Helper()
	url := testdb.URL(t)
	o := &office{newFixture(t, url), testdb.PoolAt(t, url)}
	if len(opts) > 0 {
		o.pool = testdb.PoolAt(t, url, append(opts, maxConns(1))...)
		o.pid = pidOf(t, o.pool)
		var err error
		o.repo, err = repository.New(o.pool, repository.WithLockTimeout(patience))
		require.NoError(t, err)
	}
	return o
}

// colleague is another worker of the office, with a connection of its own.
func (o *office) colleague(t *testing.T) *office {
	t.Helper()
	f := newFixtureOf(t, o.url, o.user)
	return &office{f, o.admin}
}

// enqueue writes events of these aggregates, one transaction each, and returns their ids.
func (o *office) enqueue(t *testing.T, aggregates ...string) []repository.EventID {
	t.Helper()
	var ids []repository.EventID
	for _, key := range aggregates {
		ids = append(ids, o.enqueueEvent(t, repository.Event{Topic: "test", AggregateKey: key}))
	}
	return ids
}

func (o *office) enqueueEvent(t *testing.T, e repository.Event) (id repository.EventID) {
	t.Helper()
	require.NoError(t, pgx.BeginFunc(t.Context(), o.pool, func(tx pgx.Tx) (err error) {
		id, err = o.repo.EnqueueTx(t.Context(), tx, e)
		return err
	}))
	return id
}

func (o *office) claim(t *testing.T, p repository.ClaimParams) []repository.ClaimedEvent {
	t.Helper()
	if p.Worker == "" {
		p.Worker = "worker"
	}
	events, err := o.repo.ClaimEvents(t.Context(), p)
	require.NoError(t, err)
	return events
}

// claimOne claims the one event that there is to claim.
func (o *office) claimOne(t *testing.T, p repository.ClaimParams) repository.ClaimedEvent {
	t.Helper()
	events := o.claim(t, p)
	require.Len(t, events, 1)
	return events[0]
}

func (o *office) requireClaims(t *testing.T, want ...repository.EventID) []repository.ClaimedEvent {
	t.Helper()
	events := o.claim(t, repository.ClaimParams{})
	require.Equal(t, want, idsOf(events))
	return events
}

func idsOf(events []repository.ClaimedEvent) (ids []repository.EventID) {
	for _, e := range events {
		ids = append(ids, e.EventID)
	}
	return ids
}

func (o *office) exec(t *testing.T, sql string, args ...any) {
	t.Helper()
	_, err := o.admin.Exec(t.Context(), sql, args...)
	require.NoError(t, err)
}

// value returns what a query of one value says.
func value[T any](t *testing.T, o *office, sql string, args ...any) (v T) {
	t.Helper()
	require.NoError(t, o.admin.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

func (o *office) state(t *testing.T, id repository.EventID) string {
	t.Helper()
	return value[string](t, o, "SELECT state FROM latchkey.outbox WHERE id = $1", id)
}

// expire waits until the lease of the claim, which is short, has ended.
func (o *office) expire(t *testing.T, c repository.Claim) {
	t.Helper()
	waitUntil(t, o.observer, "SELECT clock_timestamp() > lease_until FROM latchkey.outbox WHERE id = $1", c.EventID)
}

// versions returns each row of the table with where it stands and which transactions wrote and locked it.
func (o *office) versions(t *testing.T, table string) []string {
	t.Helper()
	rows, err := o.admin.Query(t.Context(),
		"SELECT concat_ws(' ', r.ctid, r.xmin, r.xmax, to_jsonb(r)) FROM latchkey."+table+" AS r ORDER BY 1")
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

// contents are the rows without who locked them.
func (o *office) contents(t *testing.T, table string) []string {
	t.Helper()
	rows, err := o.admin.Query(t.Context(), "SELECT concat_ws(' ', r.ctid, r.xmin, to_jsonb(r)) FROM latchkey."+table+" AS r ORDER BY 1")
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

func TestOutboxEventOfARule(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	ctx := t.Context()
	w := setupWired(t, url)
	o := &office{newFixture(t, url), testdb.PoolAt(t, url)}
	b := newBank(t, url)
	written := func() int { return value[int](t, o, "SELECT count(*) FROM latchkey.outbox") }
	event := &repository.Event{Topic: "rule", AggregateKey: "a", Payload: json.RawMessage(`{"n": 1}`), Headers: map[string]string{"h": "v"}}

	limited, rich, poor := b.open(t, 1, 100), b.open(t, 0, 1_000_000), b.open(t, 0, 0)
	for _, rule := range []struct {
		name           string
		call, callInTx func(tx pgx.Tx, key string, e *repository.Event) error
		refused        func() error
	}{
		{
			"CreateSetup",
			func(_ pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.CreateSetup(ctx, uuid.NewSHA1(b.user, []byte(key)), &repository.CreateSetupOpts{IdempotencyKey: key, Event: e}))
			},
			func(tx pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.CreateSetupTx(ctx, tx, uuid.NewSHA1(b.user, []byte(key)), &repository.CreateSetupOpts{IdempotencyKey: key, Event: e}))
			},
			func() error {
				user := uuid.New()
				if _, err := w.repo.CreateSetup(ctx, user, nil); err != nil {
					return err
				}
				err := errorOf(w.repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{Event: event}))
				require.ErrorIs(t, err, repository.ErrPendingExists)
				return err
			},
		},
		{
			"Deposit",
			func(_ pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.Deposit(ctx, repository.DepositParams{AccountID: rich, Amount: 1, IdempotencyKey: "d" + key, Event: e}))
			},
			func(tx pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: rich, Amount: 1, IdempotencyKey: "d" + key, Event: e}))
			},
			func() error {
				return errorOf(w.repo.Deposit(ctx, repository.DepositParams{AccountID: uuid.New(), Amount: 1, Event: event}))
			},
		},
		{
			"Withdraw",
			func(_ pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: rich, Amount: 1, IdempotencyKey: "w" + key, Event: e}))
			},
			func(tx pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: rich, Amount: 1, IdempotencyKey: "w" + key, Event: e}))
			},
			func() error {
				return errorOf(w.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: limited, Amount: 2, Event: event}))
			},
		},
		{
			"Transfer",
			func(_ pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.Transfer(ctx, repository.TransferParams{From: rich, To: poor, Amount: 1, IdempotencyKey: "t" + key, Event: e}))
			},
			func(tx pgx.Tx, key string, e *repository.Event) error {
				return errorOf(w.repo.TransferTx(ctx, tx, repository.TransferParams{From: rich, To: poor, Amount: 1, IdempotencyKey: "t" + key, Event: e}))
			},
			func() error {
				return errorOf(w.repo.Transfer(ctx, repository.TransferParams{From: limited, To: rich, Amount: 2, Event: event}))
			},
		},
	} {
		t.Run(rule.name, func(t *testing.T) {
			before := written()
			require.NoError(t, rule.call(nil, "without", nil))
			require.Equal(t, before, written(), "there was no event")

			key := 0
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				key++
				require.NoError(t, rule.call(nil, fmt.Sprint(key), event))
			})
			require.Equal(t, 1, traffic.RoundTrips, "sent %q", traffic.Statements)
			require.Equal(t, before+key, written())
			require.NoError(t, rule.call(nil, "1", event))
			require.Equal(t, before+key, written(), "a repeat writes no second one")

			require.Error(t, rule.refused())
			require.Equal(t, before+key, written(), "a refused call writes none")

			tx := begin(t, w.pool, pgx.TxOptions{})
			require.NoError(t, rule.callInTx(tx, "tx", event))
			require.NoError(t, tx.Rollback(ctx))
			require.Equal(t, before+key, written(), "nor does one that is rolled back")
			tx = begin(t, w.pool, pgx.TxOptions{})
			require.NoError(t, rule.callInTx(tx, "tx", event))
			require.NoError(t, tx.Commit(ctx))
			require.Equal(t, before+key+1, written())

			err := rule.call(nil, "bad", &repository.Event{Topic: "rule", Payload: json.RawMessage("{")})
			require.ErrorIs(t, err, repository.ErrInvalid)
			require.Equal(t, before+key+1, written())
		})
	}
	for range written() {
		c := o.claimOne(t, repository.ClaimParams{})
		got := c.Event
		require.JSONEq(t, string(event.Payload), string(got.Payload))
		got.Payload = event.Payload
		require.Equal(t, repository.Event{
			Topic: "rule", AggregateKey: "a", Payload: event.Payload, Headers: event.Headers, MaxAttempts: repository.DefaultMaxAttempts,
		}, got)
		require.NoError(t, o.repo.CompleteEvent(ctx, c.Claim))
	}
	require.Empty(t, o.claim(t, repository.ClaimParams{}))
}

func TestOutboxEnqueueTx(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	e := repository.Event{Topic: "test"}

	t.Run("is undone with the transaction", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		tx := begin(t, o.pool, pgx.TxOptions{})
		_, err := o.repo.EnqueueTx(t.Context(), tx, e)
		require.NoError(t, err)
		require.NoError(t, tx.Rollback(t.Context()))
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
	})
	t.Run("travels with COMMIT through Last", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, o.url)
		ns := repository.MustNamespace("outbox_last_" + strings.ReplaceAll(uuid.NewString(), "-", "_")[:8])
		traffic := w.cost(t, func(t *testing.T) {
			t.Helper()
			require.NoError(t, w.repo.Guard(t.Context(), []repository.Lock{ns.Exclusive("a")}, func(ctx context.Context, tx *repository.Tx) error {
				return errorOf(w.repo.EnqueueTx(ctx, tx.Last(), e))
			}))
		})
		require.Equal(t, 1, traffic.RoundTrips, "sent %q", traffic.Statements)
	})
	t.Run("refuses what is no transaction, and what is no event", func(t *testing.T) {
		t.Parallel()
		for _, tx := range []repository.DBTX{nil, o.pool} {
			_, err := o.repo.EnqueueTx(t.Context(), tx, e)
			require.ErrorIs(t, err, repository.ErrInvalid)
		}
		tx := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := o.repo.EnqueueTx(t.Context(), tx, repository.Event{})
		require.ErrorIs(t, err, repository.ErrInvalid)
		_, err = o.repo.EnqueueTx(t.Context(), tx, e)
		require.NoError(t, err, "nothing was sent, so the transaction is as it was")
	})
	t.Run("gives the server's errors their meaning", func(t *testing.T) {
		t.Parallel()
		tx := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{AccessMode: pgx.ReadOnly})
		_, err := o.repo.EnqueueTx(t.Context(), tx, e)
		require.ErrorIs(t, err, repository.ErrReadOnly)
		require.NoError(t, tx.Rollback(t.Context()))
		_, err = o.repo.EnqueueTx(t.Context(), tx, e)
		require.ErrorIs(t, err, pgx.ErrTxClosed)
	})
}

func TestOutboxPayloads(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	long := `"` + strings.Repeat("x", 1<<20-2) + `"`
	for _, mode := range execModes {
		t.Run("come back with the same value in mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t)
			f := newFixture(t, url)
			o := &office{f, testdb.PoolAt(t, url)}
			o.pool = testdb.PoolAt(t, url, maxConns(1), withExecMode(mode))
			var err error
			o.repo, err = repository.New(o.pool)
			require.NoError(t, err)

			for _, payload := range []string{
				"null", "{}", "[]", "0", `""`, `{"a": [1, {"b": null}]}`, `{"a": 1, "a": 2}`, `"Žluťoučký 🐎 \\ \" ' \t"`, `"\ud83d\udc0e"`, long,
				"1e131071", "1e-16383", strings.Repeat("[", 1000) + strings.Repeat("]", 1000),
			} {
				headers := map[string]string{`"quoted" {key}, \ `: `it's, "a" value; \ NULL`, "": ""}
				id := o.enqueueEvent(t, repository.Event{Topic: "t\\,{}\"'", Payload: json.RawMessage(payload), Headers: headers})
				e := o.claimOne(t, repository.ClaimParams{})
				require.Equal(t, id, e.EventID)
				require.True(t, value[bool](t, o, "SELECT $1::text::jsonb = $2::text::jsonb", payload, string(e.Payload)), "%.40s", payload)
				require.Equal(t, headers, e.Headers)
				require.Equal(t, "t\\,{}\"'", e.Topic)
				require.NoError(t, o.repo.CompleteEvent(t.Context(), e.Claim))
			}
			_, err = o.repo.CreateSetup(t.Context(), uuid.New(), nil) // whose event is NULL
			require.NoError(t, err)
			require.Empty(t, o.claim(t, repository.ClaimParams{}))
		})
	}
	t.Run("and headers that SQL has written do not cost others their attempts", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		written := map[string]map[string]string{
			`{"text": "a", "number": 1, "null": null, "list": ["a", 1]}`: {"text": "a", "number": "1", "null": "", "list": `["a", 1]`},
			`[1, 2]`: {"": "[1, 2]"},
			`"text"`: {"": "text"},
			`null`:   nil,
		}
		for headers := range written {
			o.exec(t, "INSERT INTO latchkey.outbox (topic, payload, headers) VALUES ($1, '{}', $2)", headers, headers)
		}
		events := o.claim(t, repository.ClaimParams{})
		require.Len(t, events, len(written))
		for _, e := range events {
			require.Equal(t, written[e.Topic], e.Headers)
			require.NoError(t, o.repo.RetryEvent(t.Context(), e.Claim, 0, repository.ErrPermanent))
		}
		letters, err := o.repo.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		for _, l := range letters {
			require.Equal(t, written[l.Topic], l.Headers)
		}
	})
	t.Run("of nothing are JSON's null", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.enqueueEvent(t, repository.Event{Topic: "test"})
		e := o.claimOne(t, repository.ClaimParams{})
		require.Equal(t, "null", string(e.Payload))
		require.Nil(t, e.Headers)
	})
	t.Run("that are refused would be by the server too", func(t *testing.T) {
		t.Parallel()
		conn := testdb.Conn(t, url)
		for _, bad := range []string{
			"", "{", "{}x", `"\u0000"`, `"\ud83d"`, `"\udc0e"`, `"\ud83d\ud83d"`, `"\ud83dx"`, `"\u00"`, "\"\xff\"", "\"a\x00\"", "'a'",
			"NaN", "1e131072", "-1e131072", "1e-16384", "1e99999999999999999999",
		} {
			_, err := conn.Exec(t.Context(), "SELECT $1::text::jsonb", bad)
			require.Error(t, err, "%.20s", bad)
			tx := begin(t, conn, pgx.TxOptions{})
			repo, err := repository.New(testdb.PoolAt(t, url))
			require.NoError(t, err)
			_, err = repo.EnqueueTx(t.Context(), tx, repository.Event{Topic: "test", Payload: json.RawMessage(bad)})
			require.ErrorIs(t, err, repository.ErrInvalid, "%.20s", bad)
			require.ErrorContains(t, err, "Payload", "%.20s", bad)
			require.NoError(t, tx.Rollback(t.Context()))
		}
	})
}

func TestOutboxClaim(t *testing.T) {
	t.Parallel()
	t.Run("takes no more than Max, whatever the plan", func(t *testing.T) {
		t.Parallel()
		for name, settings := range foreign {
			o := newOffice(t, withSettings(settings))
			o.exec(t, `INSERT INTO latchkey.outbox (topic, aggregate_key, payload)
				SELECT 'test', CASE WHEN n % 3 > 0 THEN 'a' || n % 20 END, 'null' FROM generate_series(1, 2000) AS n`)
			for range 3 { // with no statistics, with some, and with a plan for any parameters
				require.Len(t, o.claim(t, repository.ClaimParams{Max: 7}), 7, name)
				o.exec(t, "ANALYZE latchkey.outbox")
			}
			require.Equal(t, 21, value[int](t, o, "SELECT count(*) FROM latchkey.outbox WHERE state = 'claimed'"), name)
		}
	})
	t.Run("returns the oldest first, with what is known of them", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "", "b", "a", "")
		events := o.claim(t, repository.ClaimParams{Worker: "w", Max: 3, Lease: time.Minute})
		require.Equal(t, ids[:3], idsOf(events))
		for _, e := range events {
			require.Equal(t, "w", e.Worker)
			require.Equal(t, int64(1), e.Fence)
			require.Equal(t, 1, e.Attempt)
			require.Equal(t, value[time.Time](t, o, "SELECT lease_until FROM latchkey.outbox WHERE id = $1", e.EventID).UTC(), e.LeaseUntil.UTC())
			require.Equal(t, value[time.Time](t, o, "SELECT created_at FROM latchkey.outbox WHERE id = $1", e.EventID).UTC(), e.CreatedAt.UTC())
		}
		o.requireClaims(t, ids[3])
	})
	t.Run("takes the topics that were asked for", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		one := o.enqueueEvent(t, repository.Event{Topic: "one"})
		two := o.enqueueEvent(t, repository.Event{Topic: "two"})
		first := o.enqueueEvent(t, repository.Event{Topic: "one", AggregateKey: "a"})
		o.enqueueEvent(t, repository.Event{Topic: "two", AggregateKey: "a"})
		require.Empty(t, o.claim(t, repository.ClaimParams{Topics: []string{"three", "on"}}))
		require.Equal(t, []repository.EventID{two}, idsOf(o.claim(t, repository.ClaimParams{Topics: []string{"two", "three"}})),
			"of the aggregate, it is the turn of another topic")
		require.Equal(t, []repository.EventID{one, first}, idsOf(o.claim(t, repository.ClaimParams{Topics: []string{"one", "two"}})))
	})
	t.Run("takes topics whatever they are named, in every exec mode", func(t *testing.T) {
		t.Parallel()
		names := []string{" ", "NULL", "null", "{}", `{"a","b"}`, "a,b", `\`, `"`, "'", "$1", "%", "Žluť 🐎", "\t\n", "\u202e", strings.Repeat("é", 127)}
		for _, mode := range execModes {
			o := newOffice(t, withExecMode(mode))
			for _, name := range names {
				o.enqueueEvent(t, repository.Event{Topic: name, AggregateKey: name})
			}
			for _, name := range names {
				e := o.claimOne(t, repository.ClaimParams{Topics: []string{name, "another"}})
				require.Equal(t, name, e.Topic)
				require.Equal(t, name, e.AggregateKey)
			}
		}
	})
	t.Run("an aggregate's events in order, whatever becomes of each", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "a", "a", "a", "a")
		next := func() repository.Claim { // of a, not knowing how often it has been tried
			c := o.claimOne(t, repository.ClaimParams{}).Claim
			require.Empty(t, o.claim(t, repository.ClaimParams{}), "one at a time")
			return c
		}
		retry := func(c repository.Claim, cause error) {
			require.NoError(t, o.repo.RetryEvent(t.Context(), c, time.Millisecond, cause))
			waitUntil(t, o.observer, "SELECT clock_timestamp() > due_at FROM latchkey.outbox WHERE id = $1", c.EventID)
		}
		var order []repository.EventID
		for _, end := range []func(c repository.Claim){
			func(c repository.Claim) { retry(c, errors.New("once")) },
			func(c repository.Claim) { retry(c, errors.New("twice")) },
			func(c repository.Claim) { require.NoError(t, o.repo.CompleteEvent(t.Context(), c)) },
			func(c repository.Claim) { retry(c, repository.ErrPermanent) },
			func(c repository.Claim) {
				_, err := o.repo.ExtendClaim(t.Context(), c, time.Millisecond)
				require.NoError(t, err)
				o.expire(t, c)
			},
			func(c repository.Claim) {
				_, err := db.New(o.admin).OutboxRelease(t.Context(), db.OutboxReleaseParams{
					Ids: []int64{int64(c.EventID)}, Fences: []int64{c.Fence}, Worker: c.Worker,
				})
				require.NoError(t, err)
			},
			func(c repository.Claim) { require.NoError(t, o.repo.CompleteEvent(t.Context(), c)) },
			func(c repository.Claim) {
				o.exec(t, "UPDATE latchkey.outbox SET max_attempts = 1 WHERE id = $1", c.EventID)
				retry(c, errors.New("the last"))
			},
			func(c repository.Claim) {
				require.NoError(t, o.repo.RedriveDeadLetter(t.Context(), ids[1]))
				require.Empty(t, o.claim(t, repository.ClaimParams{}), "it waits for the one that is being handled")
				require.NoError(t, o.repo.CompleteEvent(t.Context(), c))
			},
			func(c repository.Claim) { require.NoError(t, o.repo.CompleteEvent(t.Context(), c)) },
		} {
			c := next()
			order = append(order, c.EventID)
			end(c)
		}
		require.Equal(t, []repository.EventID{ids[0], ids[0], ids[0], ids[1], ids[2], ids[2], ids[2], ids[3], ids[4], ids[1]}, order)
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
	})
	t.Run("one of an aggregate at a time, in order, while others go on", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "b", "a", "b", "a")
		events := o.requireClaims(t, ids[0], ids[1])
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		require.NoError(t, o.repo.CompleteEvent(t.Context(), events[1].Claim))
		o.requireClaims(t, ids[3])

		// One that is to be tried again later holds up its aggregate too, and one that is dead does not.
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[0].Claim, time.Hour, nil))
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		o.exec(t, "UPDATE latchkey.outbox SET due_at = clock_timestamp(), max_attempts = 1 WHERE id = $1", ids[0])
		require.Empty(t, o.claim(t, repository.ClaimParams{Topics: []string{"other"}}))
		o.requireClaims(t, ids[2])
		require.Equal(t, "dead", o.state(t, ids[0]))
	})
	t.Run("waits neither for a row that is locked nor for what is not committed", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "b", "")
		locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", ids[0])
		require.NoError(t, err)
		writer := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		open, err := o.repo.EnqueueTx(t.Context(), writer, repository.Event{Topic: "test", AggregateKey: "c"})
		require.NoError(t, err)
		later := o.enqueue(t, "c", "d")

		events := o.requireClaims(t, ids[1], ids[2], later[0], later[1])
		require.NoError(t, writer.Commit(t.Context()))
		require.Empty(t, o.claim(t, repository.ClaimParams{}), "it was not skipped, but its aggregate is busy")
		require.NoError(t, o.repo.CompleteEvent(t.Context(), events[2].Claim))
		o.requireClaims(t, open)
		require.NoError(t, locker.Rollback(t.Context()))
		o.requireClaims(t, ids[0])
	})
	t.Run("changes no row when it finds nothing", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "a", "b", "b", "", "c", "d")
		events := o.requireClaims(t, ids[0], ids[2], ids[4], ids[5], ids[6])
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[1].Claim, time.Hour, nil))
		require.NoError(t, o.repo.CompleteEvent(t.Context(), events[3].Claim))
		o.exec(t, "UPDATE latchkey.outbox SET max_attempts = 1 WHERE id = $1", ids[6])
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[4].Claim, 0, nil))
		require.Equal(t, map[string]int{"claimed": 2, "ready": 3, "done": 1, "dead": 1}, o.states(t))

		before := o.versions(t, "outbox")
		for range 100 {
			require.Empty(t, o.claim(t, repository.ClaimParams{}))
		}
		require.Equal(t, before, o.versions(t, "outbox"))
	})
	t.Run("counts a lease from when the row is got, by the server's clock", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueue(t, "a")[0]
		blocker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := blocker.Exec(t.Context(), "LOCK TABLE latchkey.outbox IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		claim := inBackground(t, func() ([]repository.ClaimedEvent, error) {
			return o.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w", Lease: time.Minute})
		})
		testdb.WaitForLockWait(t, o.observer, o.pid)
		var freed time.Time
		require.NoError(t, blocker.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&freed))
		require.NoError(t, blocker.Commit(t.Context()))
		events, err := claim()
		require.NoError(t, err)
		require.Equal(t, []repository.EventID{id}, idsOf(events))
		require.GreaterOrEqual(t, events[0].LeaseUntil, freed.Add(time.Minute))
	})
	t.Run("gives an event to the next when its lease has ended, with a larger token", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueue(t, "a")[0]
		for attempt := 1; attempt <= 5; attempt++ {
			e := o.claimOne(t, repository.ClaimParams{Worker: fmt.Sprint("worker ", attempt), Lease: time.Millisecond})
			require.Equal(t, id, e.EventID)
			require.Equal(t, int64(attempt), e.Fence)
			require.Equal(t, attempt, e.Attempt)
			o.expire(t, e.Claim)
		}
	})
	t.Run("finds what stands behind many that must wait for their turn", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		expired := o.enqueue(t, "expired")[0]
		e := o.claimOne(t, repository.ClaimParams{})
		blocker := o.enqueue(t, "many")[0]
		o.requireClaims(t, blocker)
		o.exec(t, "INSERT INTO latchkey.outbox (topic, aggregate_key, payload) SELECT 'test', 'many', 'null' FROM generate_series(1, 3000)")
		behind := o.enqueue(t, "", "a", "z", "a")
		_, err := o.repo.ExtendClaim(t.Context(), e.Claim, time.Millisecond)
		require.NoError(t, err)
		o.expire(t, e.Claim)
		o.requireClaims(t, expired, behind[0], behind[1], behind[2])
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		before := o.versions(t, "outbox")
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		require.Equal(t, before, o.versions(t, "outbox"))
	})
	t.Run("reads indexes, however old the statistics are", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		queries := generatedQueries(t)
		for _, state := range []string{"empty", "full"} {
			o.exec(t, "ANALYZE latchkey.outbox")
			o.exec(t, `INSERT INTO latchkey.outbox (topic, aggregate_key, payload, state, ended_at)
				SELECT 'test', 'a' || n, 'null', CASE WHEN n % 2 = 0 THEN 'done' ELSE 'ready' END, CASE WHEN n % 2 = 0 THEN clock_timestamp() END
				FROM generate_series(1, 2000) AS n ON CONFLICT DO NOTHING`)
			for name, args := range map[string]string{
				"OutboxClaim":     "('{}', 10, 'w', 1000)",
				"OutboxPurge":     "(0, 10)",
				"OutboxComplete":  "('{1}', 'w', '{1}')",
				"OutboxExtend":    "(1000, 1, 'w', 1)",
				"OutboxExtendAll": "('{1}', 'w', '{1}', 1000)",
				"OutboxRelease":   "('{1}', 'w', '{1}')",
				"OutboxRetry":     "(false, NULL, NULL, 1, 'w', 1)",
			} {
				tx := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
				require.NoError(t, db.New(tx).OutboxPreferIndexes(t.Context()))
				_, err := tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = force_generic_plan")
				require.NoError(t, err)
				_, err = tx.Exec(t.Context(), "PREPARE q AS "+queries[name], pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err, name)
				rows, err := tx.Query(t.Context(), "EXPLAIN EXECUTE q"+args, pgx.QueryExecModeSimpleProtocol)
				require.NoError(t, err, name)
				plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
				require.NoError(t, err, name)
				text := strings.Join(plan, "\n")
				require.Contains(t, text, "Index Scan", name)
				require.NotContains(t, text, "Seq Scan on outbox", "%s on a table that was %s", name, state)
				require.NotContains(t, text, "Bitmap", "%s on a table that was %s", name, state)
				require.Equal(t, strings.Contains(queries[name], "claim.fence"), strings.Contains(text, "hashed SubPlan"),
					"%s must not compare each claim with each row: %s", name, text)
				require.NoError(t, tx.Rollback(t.Context()))
			}
		}
	})
}

func (o *office) states(t *testing.T) map[string]int {
	t.Helper()
	rows, err := o.admin.Query(t.Context(), "SELECT state, count(*) FROM latchkey.outbox GROUP BY state")
	require.NoError(t, err)
	all := map[string]int{}
	var (
		state string
		n     int
	)
	_, err = pgx.ForEachRow(rows, []any{&state, &n}, func() error {
		all[state] = n
		return nil
	})
	require.NoError(t, err)
	return all
}

func TestOutboxRoundTripsAreOne(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	w := setupWired(t, o.url)
	for range 20 {
		o.enqueue(t, "")
	}
	claims := o.claim(t, repository.ClaimParams{Max: 10, Lease: time.Hour})
	next := func() repository.Claim {
		c := claims[0].Claim
		claims = claims[1:]
		return c
	}
	for _, test := range []struct {
		name string
		call func() error
	}{
		{"claim", func() error {
			return errorOf(w.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w", Max: 3}))
		}},
		{"complete", func() error { return w.repo.CompleteEvent(t.Context(), next()) }},
		{"retry", func() error { return w.repo.RetryEvent(t.Context(), next(), time.Hour, nil) }},
		{"extend", func() error { return errorOf(w.repo.ExtendClaim(t.Context(), next(), time.Hour)) }},
		{"list", func() error { return errorOf(w.repo.ListDeadLetters(t.Context(), nil)) }},
		{"purge", func() error { return errorOf(w.repo.PurgeEvents(t.Context(), time.Hour, 0)) }},
	} {
		traffic := w.cost(t, func(t *testing.T) {
			t.Helper()
			require.NoError(t, test.call(), test.name)
		})
		require.Equal(t, 1, traffic.RoundTrips, "%s sent %q", test.name, traffic.Statements)
	}
}

var outboxRace = repository.MustNamespace("outbox_race")

// Workers claim, complete, give back and forget, while writers go on writing.
func TestOutboxRace(t *testing.T) {
	t.Parallel()
	const (
		workers    = 8
		aggregates = 10
		each       = 30
	)
	url := testdb.URL(t)
	r := newRacers(t, url, workers)
	o := &office{newFixture(t, url), testdb.PoolAt(t, url)}

	var (
		mu      sync.Mutex
		busy    = map[string]repository.EventID{} // which event of an aggregate is being handled
		handled = map[string][]int{}
		twice   []string
	)
	writers := make([]func() (struct{}, error), aggregates)
	for a := range writers {
		key := fmt.Sprint("a", a)
		pool := testdb.PoolAt(t, url, maxConns(1))
		repo, err := repository.New(pool, repository.WithLockTimeout(patience))
		require.NoError(t, err)
		writers[a] = inBackground(t, func() (struct{}, error) {
			for n := range each {
				err := repo.Guard(t.Context(), []repository.Lock{outboxRace.Exclusive(key)}, func(ctx context.Context, tx *repository.Tx) error {
					return errorOf(repo.EnqueueTx(ctx, tx.Last(), repository.Event{
						Topic: "race", AggregateKey: key, Payload: json.RawMessage(fmt.Sprint(n)),
					}))
				})
				if err != nil {
					return struct{}{}, err
				}
			}
			return struct{}{}, nil
		})
	}
	handle := func(c racer, e repository.ClaimedEvent) error {
		var n int
		if err := json.Unmarshal(e.Payload, &n); err != nil {
			return err
		}
		mu.Lock()
		if other, ok := busy[e.AggregateKey]; ok {
			twice = append(twice, fmt.Sprintf("%d and %d of %s", other, e.EventID, e.AggregateKey))
		}
		busy[e.AggregateKey] = e.EventID
		first := e.Attempt == 1 && n%5 == 0
		if !first {
			handled[e.AggregateKey] = append(handled[e.AggregateKey], n)
		}
		mu.Unlock()
		<-time.After(rand.N(2 * time.Millisecond)) // so that others have the time to begin with what is not theirs
		mu.Lock()
		delete(busy, e.AggregateKey) // before the next one's turn
		mu.Unlock()
		if first {
			return c.repo.RetryEvent(t.Context(), e.Claim, time.Millisecond, errors.New("the first time it fails"))
		}
		return c.repo.CompleteEvent(t.Context(), e.Claim)
	}
	done := func() int {
		mu.Lock()
		defer mu.Unlock()
		n := 0
		for _, list := range handled {
			n += len(list)
		}
		return n
	}
	bound := time.Now().Add(patience)
	errs := r.atOnce(func(c racer) error {
		for done() < aggregates*each {
			events, err := c.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: fmt.Sprint(c.n), Max: 3, Lease: patience})
			if err != nil {
				return err
			}
			if len(events) > 3 {
				return fmt.Errorf("claimed %d", len(events))
			}
			for _, e := range events {
				if err := handle(c, e); err != nil {
					return err
				}
			}
			if time.Now().After(bound) {
				return errors.New("events are left that nobody gets")
			}
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
	for _, wait := range writers {
		_, err := wait()
		require.NoError(t, err)
	}
	require.Empty(t, twice)
	require.Len(t, handled, aggregates)
	for key, list := range handled {
		require.Len(t, list, each, key)
		require.True(t, slices.IsSorted(list), "%s: %v", key, list)
	}
	require.Equal(t, map[string]int{"done": aggregates * each}, o.states(t))
}

// Workers do all that can be done with a claim, lose some, and come back late, while operators lower attempts, redrive and
// purge.
func TestOutboxChaos(t *testing.T) {
	t.Parallel()
	const workers, aggregates, each, redrives = 8, 6, 15, 60
	url := testdb.URL(t)
	r := newRacers(t, url, workers)
	o := &office{newFixture(t, url), testdb.PoolAt(t, url)}
	o.exec(t, `INSERT INTO latchkey.outbox (topic, aggregate_key, payload, max_attempts)
		SELECT 'test', nullif('a' || n % $1::integer, 'a0'), 'null', 1 + n % 4 FROM generate_series(1, $2::integer) AS n`, aggregates, aggregates*each)
	var (
		mu       sync.Mutex
		attempts = map[repository.EventID]map[int64]bool{} // the tokens given
		done     = map[repository.EventID]int64{}          // the token that completed it
		wrong    []string
	)
	note := func(format string, args ...any) {
		mu.Lock()
		defer mu.Unlock()
		wrong = append(wrong, fmt.Sprintf(format, args...))
	}
	given := func(c repository.Claim) {
		mu.Lock()
		defer mu.Unlock()
		if attempts[c.EventID] == nil {
			attempts[c.EventID] = map[int64]bool{}
		}
		if attempts[c.EventID][c.Fence] {
			wrong = append(wrong, fmt.Sprintf("%d was given token %d twice", c.EventID, c.Fence))
		}
		attempts[c.EventID][c.Fence] = true
	}
	// work ends a claim in some way, and says so if it was lost.
	work := func(c racer, e repository.ClaimedEvent, lasts bool) error {
		ctx := t.Context()
		complete := func() error {
			err := c.repo.CompleteEvent(ctx, e.Claim)
			if err == nil {
				mu.Lock()
				if before, twice := done[e.EventID]; twice {
					wrong = append(wrong, fmt.Sprintf("%d was completed under tokens %d and %d", e.EventID, before, e.Fence))
				}
				done[e.EventID] = e.Fence
				mu.Unlock()
			}
			return err
		}
		if !lasts {
			<-time.After(rand.N(4 * time.Millisecond))
		}
		switch rand.IntN(6) {
		case 0:
			return c.repo.RetryEvent(ctx, e.Claim, time.Millisecond, errors.New("no"))
		case 1:
			return c.repo.RetryEvent(ctx, e.Claim, 0, repository.ErrPermanent)
		case 2:
			_, err := db.New(c.pool).OutboxRelease(ctx, db.OutboxReleaseParams{Ids: []int64{int64(e.EventID)}, Fences: []int64{e.Fence}, Worker: e.Worker})
			return err
		case 3:
			if _, err := c.repo.ExtendClaim(ctx, e.Claim, time.Hour); err != nil {
				return err
			}
			if err := complete(); err != nil {
				note("the claim of %d was lost within an hour: %v", e.EventID, err)
			}
			return nil
		default:
			return complete()
		}
	}
	const open = "SELECT count(*) FROM latchkey.outbox WHERE ended_at IS NULL"
	var left atomic.Int64
	left.Store(redrives)
	purged := make([]int, workers)
	bound := time.Now().Add(patience)
	errs := r.atOnce(func(c racer) error {
		for {
			lasts, lease := true, time.Hour
			if rand.IntN(3) == 0 {
				lasts, lease = false, 3*time.Millisecond
			}
			events, err := c.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "same", Max: 3, Lease: lease})
			if err != nil {
				return err
			}
			for _, e := range events {
				given(e.Claim)
			}
			for _, e := range events {
				err := work(c, e, lasts)
				if err != nil && (lasts || !errors.Is(err, repository.ErrLeaseLost)) {
					return err
				}
			}
			redriven := 0
			if c.n == 0 { // the operator
				if _, err := c.pool.Exec(t.Context(), `UPDATE latchkey.outbox SET max_attempts = greatest(1, attempts - 1)
					WHERE id = (SELECT id FROM latchkey.outbox WHERE ended_at IS NULL ORDER BY random() LIMIT 1)`); err != nil {
					return err
				}
				letters, err := c.repo.ListDeadLetters(t.Context(), &repository.DeadLetterOpts{Limit: 2})
				if err != nil {
					return err
				}
				for _, l := range letters {
					if left.Add(-1) >= 0 {
						if err := c.repo.RedriveDeadLetter(t.Context(), l.EventID); err != nil {
							return err
						}
						redriven++
					}
				}
			}
			n, err := c.repo.PurgeEvents(t.Context(), time.Millisecond, 2)
			if err != nil {
				return err
			}
			purged[c.n] += n
			var more int
			if err := c.pool.QueryRow(t.Context(), open).Scan(&more); err != nil {
				return err
			}
			switch {
			case more == 0 && redriven == 0:
				return nil
			case time.Now().After(bound):
				return fmt.Errorf("%d events are left that nobody gets", more)
			}
		}
	})
	require.NoError(t, errors.Join(errs...))
	require.Empty(t, wrong)
	states, gone := o.states(t), 0
	for _, n := range purged {
		gone += n
	}
	require.Equal(t, aggregates*each, states["done"]+states["dead"]+gone)
	require.Len(t, done, states["done"]+gone)
	require.NotEmpty(t, done)
	for id, fence := range done {
		for other := range attempts[id] {
			require.LessOrEqual(t, other, fence, "nobody was given %d after it was done", id)
		}
	}
}

// A redrive brings an event in front of one that is being claimed at this moment: whoever then claims the first
// cannot see the claim on the second.
func TestOutboxTwoClaimsOfOneTurn(t *testing.T) {
	t.Parallel()
	for _, committed := range []bool{true, false} {
		t.Run(fmt.Sprintf("the other committed: %v", committed), func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			ids := o.enqueue(t, "a", "a")
			o.exec(t, "UPDATE latchkey.outbox SET state = 'dead', ended_at = clock_timestamp() WHERE id = $1", ids[0])
			other := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
			rows, err := db.New(other).OutboxClaim(t.Context(), db.OutboxClaimParams{Worker: "other", MaxRows: 1, LeaseMs: 60_000, Topics: []string{}})
			require.NoError(t, err)
			require.Len(t, rows, 1)
			require.NoError(t, o.repo.RedriveDeadLetter(t.Context(), ids[0]))

			claim := inBackground(t, func() ([]repository.ClaimedEvent, error) {
				return o.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w"})
			})
			testdb.WaitForLockWait(t, o.observer, o.pid) // for the index that says one at a time
			if committed {
				require.NoError(t, other.Commit(t.Context()))
			} else {
				require.NoError(t, other.Rollback(t.Context()))
			}
			events, err := claim()
			require.NoError(t, err)
			if committed {
				require.Empty(t, events)
				require.Equal(t, map[string]int{"claimed": 1, "ready": 1}, o.states(t))
			} else {
				require.Equal(t, ids[:1], idsOf(events))
			}
		})
	}
}

// settlers are the ways to settle a claim.
var settlers = map[string]func(context.Context, *repository.Repository, repository.Claim) error{
	"complete": func(ctx context.Context, r *repository.Repository, c repository.Claim) error {
		return r.CompleteEvent(ctx, c)
	},
	"retry": func(ctx context.Context, r *repository.Repository, c repository.Claim) error {
		return r.RetryEvent(ctx, c, 0, errors.New("late"))
	},
	"extend": func(ctx context.Context, r *repository.Repository, c repository.Claim) error {
		return errorOf(r.ExtendClaim(ctx, c, time.Hour))
	},
}

func TestOutboxSettlingIsRefusedWithoutTheToken(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		name   string
		happen func(t *testing.T, o *office, c repository.Claim) repository.Claim
	}{
		{"the lease ended, and nobody else has claimed it yet", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			o.expire(t, c)
			return c
		}},
		{"another has claimed it since", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			o.expire(t, c)
			e := o.claimOne(t, repository.ClaimParams{Worker: "other"})
			require.Greater(t, e.Fence, c.Fence)
			return c
		}},
		{"another of the same name has claimed it since", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			o.expire(t, c)
			o.claimOne(t, repository.ClaimParams{Worker: c.Worker})
			return c
		}},
		{"it is done", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			c = o.reclaim(t, c)
			require.NoError(t, o.repo.CompleteEvent(t.Context(), c))
			return c
		}},
		{"it is to be tried again", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			c = o.reclaim(t, c)
			require.NoError(t, o.repo.RetryEvent(t.Context(), c, 0, nil))
			return c
		}},
		{"it is dead", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			o.exec(t, "UPDATE latchkey.outbox SET max_attempts = 1")
			o.expire(t, c)
			require.Empty(t, o.claim(t, repository.ClaimParams{}))
			return c
		}},
		{"it was redriven and claimed again", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			o.exec(t, "UPDATE latchkey.outbox SET max_attempts = 1")
			o.expire(t, c)
			require.Empty(t, o.claim(t, repository.ClaimParams{}))
			require.NoError(t, o.repo.RedriveDeadLetter(t.Context(), c.EventID))
			e := o.claimOne(t, repository.ClaimParams{Worker: c.Worker})
			require.Equal(t, 1, e.Attempt)
			require.Greater(t, e.Fence, c.Fence)
			return c
		}},
		{"it is gone", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			c = o.reclaim(t, c)
			require.NoError(t, o.repo.CompleteEvent(t.Context(), c))
			n, err := o.repo.PurgeEvents(t.Context(), 0, 0)
			require.NoError(t, err)
			require.Equal(t, 1, n)
			return c
		}},
		{"the token is of another worker", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			c = o.reclaim(t, c)
			c.Worker = "other"
			return c
		}},
		{"the token is larger", func(t *testing.T, o *office, c repository.Claim) repository.Claim {
			t.Helper()
			c = o.reclaim(t, c)
			c.Fence++
			return c
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			o.enqueue(t, "a")
			c := test.happen(t, o, o.claimOne(t, repository.ClaimParams{Lease: time.Millisecond}).Claim)
			before := o.contents(t, "outbox")
			for name, settle := range settlers {
				require.ErrorIs(t, settle(t.Context(), o.repo, c), repository.ErrLeaseLost, name)
				require.Equal(t, before, o.contents(t, "outbox"), name)
			}
		})
	}
}

// reclaim claims the event again, for long.
func (o *office) reclaim(t *testing.T, c repository.Claim) repository.Claim {
	t.Helper()
	o.expire(t, c)
	return o.claimOne(t, repository.ClaimParams{Lease: time.Hour}).Claim
}

// The row is locked by somebody who changes nothing, so that what was found before the wait stands as it was.
func TestOutboxSettlingReadsTheClockAfterTheWait(t *testing.T) {
	t.Parallel()
	for name, settle := range settlers {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			o.enqueue(t, "a")
			c := o.claimOne(t, repository.ClaimParams{Lease: 2 * time.Second}).Claim
			before := o.contents(t, "outbox")
			locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
			_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox FOR UPDATE")
			require.NoError(t, err)
			settled := inBackground(t, func() (struct{}, error) { return struct{}{}, settle(t.Context(), o.repo, c) })
			testdb.WaitForLockWait(t, o.observer, o.pid)
			o.expire(t, c)
			require.NoError(t, locker.Rollback(t.Context()))
			_, err = settled()
			require.ErrorIs(t, err, repository.ErrLeaseLost)
			require.Equal(t, before, o.contents(t, "outbox"))
		})
	}
	for name, settle := range settlers {
		t.Run(name+", of a claim that is being extended at the moment", func(t *testing.T) {
			t.Parallel()
			o := newOffice(t)
			o.enqueue(t, "a")
			c := o.claimOne(t, repository.ClaimParams{Lease: 2 * time.Second}).Claim
			other := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
			_, err := db.New(other).OutboxExtend(t.Context(), db.OutboxExtendParams{
				ID: int64(c.EventID), Worker: c.Worker, Fence: c.Fence, LeaseMs: time.Hour.Milliseconds(),
			})
			require.NoError(t, err)
			settled := inBackground(t, func() (struct{}, error) { return struct{}{}, settle(t.Context(), o.repo, c) })
			testdb.WaitForLockWait(t, o.observer, o.pid)
			o.expire(t, c) // as far as others can see
			require.NoError(t, other.Commit(t.Context()))
			_, err = settled()
			require.NoError(t, err)
			require.Equal(t, name == "extend", o.state(t, c.EventID) == "claimed")
		})
	}
	t.Run("and counts what it gives from then on", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.enqueue(t, "a")
		c := o.claimOne(t, repository.ClaimParams{Lease: time.Hour}).Claim
		locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
		_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox FOR UPDATE")
		require.NoError(t, err)
		extended := inBackground(t, func() (repository.Claim, error) { return o.repo.ExtendClaim(t.Context(), c, 2*time.Hour) })
		testdb.WaitForLockWait(t, o.observer, o.pid)
		var freed time.Time
		require.NoError(t, locker.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&freed))
		require.NoError(t, locker.Rollback(t.Context()))
		got, err := extended()
		require.NoError(t, err)
		require.GreaterOrEqual(t, got.LeaseUntil, freed.Add(2*time.Hour))
		require.Equal(t, c.Fence, got.Fence)
		require.NoError(t, o.repo.CompleteEvent(t.Context(), c), "the token is the same")
	})
}

// No statement that leases takes a time from the client, whose clock may be wrong.
func TestOutboxSendsNoTimeOfTheClient(t *testing.T) {
	t.Parallel()
	for _, params := range []any{
		db.OutboxClaimParams{},
		db.OutboxCompleteParams{},
		db.OutboxExtendParams{},
		db.OutboxRetryParams{},
		db.OutboxPurgeParams{},
		db.LeaseAcquireParams{},
		db.LeaseRenewParams{},
		db.LeaseReleaseParams{},
	} {
		for field := range fieldsOf(params) {
			require.NotContains(t, field.Type.String(), "time.", "%T.%s", params, field.Name)
		}
	}
}

// Workers whose clocks are ten minutes slow and ten minutes fast. They have one clock here, which is moved in between:
// that of a bubble does not stand for the server's, which is another process.
func TestOutboxClocksOfWorkersDoNotMatter(t *testing.T) {
	t.Parallel()
	const skew, lease = 10 * time.Minute, 5 * time.Minute
	url, now := testdb.URL(t), time.Now()
	synctest.Test(t, func(t *testing.T) {
		<-time.After(time.Until(now.Add(-skew))) // it begins in the year 2000
		f := newFixture(t, url)
		o := &office{f, testdb.PoolAt(t, url)}
		// in says how many minutes from now, by the server's clock, the time is that the query returns.
		in := func(column string, id repository.EventID) time.Duration {
			return value[time.Duration](t, o, "SELECT "+column+" - clock_timestamp() FROM latchkey.outbox WHERE id = $1", id).Round(time.Minute)
		}
		ids := o.enqueue(t, "a", "b", "c")
		slow := o.claim(t, repository.ClaimParams{Worker: "slow", Max: 1, Lease: lease})[0]
		require.Equal(t, lease, in("lease_until", ids[0]))
		l := o.acquire(t, repository.LeaseParams{Name: "job", TTL: lease})

		<-time.After(2 * skew)
		events := o.claim(t, repository.ClaimParams{Worker: "fast", Lease: lease})
		require.Equal(t, ids[1:], idsOf(events), "the slow one's lease lives")
		require.Equal(t, lease, in("lease_until", ids[1]))
		_, err := o.repo.ExtendClaim(t.Context(), slow.Claim, lease)
		require.NoError(t, err)
		require.Equal(t, lease, in("lease_until", ids[0]))
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[0].Claim, lease, nil))
		require.Equal(t, lease, in("due_at", ids[1]))
		_, err = o.repo.ExtendClaim(t.Context(), events[1].Claim, time.Millisecond)
		require.NoError(t, err)
		o.expire(t, events[1].Claim)
		o.requireClaims(t, ids[2])
		require.ErrorIs(t, o.repo.CompleteEvent(t.Context(), events[1].Claim), repository.ErrLeaseLost)
		require.NoError(t, o.repo.CompleteEvent(t.Context(), slow.Claim))

		_, err = o.repo.AcquireLease(t.Context(), repository.LeaseParams{Name: "job"})
		requireBusy(t, err, repository.WhereLease)
		require.NoError(t, o.repo.RenewLease(t.Context(), l, 0))
		require.Positive(t, l.Remaining())
		require.NoError(t, o.repo.ReleaseLease(t.Context(), l))

		d := dispatch(t, testdb.PoolAt(t, url), repository.DispatcherOpts{Lease: lease}, func(context.Context, repository.ClaimedEvent) error { return nil })
		id := o.enqueue(t, "d")[0]
		e := receive(t, d.done)
		require.Equal(t, id, e.EventID)
		require.NoError(t, e.Err)
		require.NoError(t, d.stop(t))
		require.Equal(t, map[string]int{"done": 2, "ready": 1, "claimed": 1}, o.states(t))
	})
}

func fieldsOf(params any) func(yield func(reflect.StructField) bool) {
	return func(yield func(reflect.StructField) bool) {
		for i := range reflect.TypeOf(params).NumField() {
			if !yield(reflect.TypeOf(params).Field(i)) {
				return
			}
		}
	}
}

func TestOutboxRetry(t *testing.T) {
	t.Parallel()
	// wait has the event fail, and returns for how long it is not due then: between these two.
	wait := func(t *testing.T, o *office, after time.Duration) (least, most float64) {
		t.Helper()
		c := o.claimOne(t, repository.ClaimParams{}).Claim
		before := value[float64](t, o, "SELECT extract(EPOCH FROM clock_timestamp())")
		require.NoError(t, o.repo.RetryEvent(t.Context(), c, after, errors.New("no")))
		now := value[float64](t, o, "SELECT extract(EPOCH FROM clock_timestamp())")
		due := value[float64](t, o, "SELECT extract(EPOCH FROM due_at) FROM latchkey.outbox WHERE id = $1", c.EventID)
		o.exec(t, "UPDATE latchkey.outbox SET due_at = clock_timestamp() WHERE id = $1", c.EventID)
		return due - now, due - before
	}
	t.Run("waits for as long as was said", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.enqueue(t, "a")
		least, most := wait(t, o, 90*time.Minute)
		require.LessOrEqual(t, least, 5400.0)
		require.GreaterOrEqual(t, most, 5400.0)
	})
	t.Run("waits longer each time, up to an hour, half of it by chance", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		o.enqueueEvent(t, repository.Event{Topic: "test", MaxAttempts: 1000})
		seen := map[string]bool{}
		for attempt := 1; attempt <= 16; attempt++ {
			full := min(3600.0, float64(int(1)<<(attempt-1)))
			least, most := wait(t, o, 0)
			require.LessOrEqual(t, least, full, "attempt %d", attempt)
			require.GreaterOrEqual(t, most, full/2, "attempt %d", attempt)
			if full == 3600 {
				seen[fmt.Sprintf("%.0f", most)] = true
			}
		}
		require.Greater(t, len(seen), 1, "four waits that are equal to the second are not by chance")
		o.exec(t, "UPDATE latchkey.outbox SET attempts = 998, fence = 998")
		least, _ := wait(t, o, 0)
		require.LessOrEqual(t, least, 3600.0)
	})
	t.Run("keeps why", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueue(t, "a")[0]
		for cause, want := range map[error]string{
			errors.New("broken pipe"):                      "broken pipe",
			errors.New("a\x00b\xff"):                       "a\uFFFDb\uFFFD",
			errors.New(strings.Repeat("é", 600)):           strings.Repeat("é", 512),
			errors.New("x" + strings.Repeat("é", 600)):     "x" + strings.Repeat("é", 511) + "\uFFFD",
			fmt.Errorf("wrapped: %w", context.Canceled):    "wrapped: context canceled",
			errors.New(strings.Repeat("long ", 1_000_000)): strings.Repeat("long ", 1_000_000)[:1024],
		} {
			c := o.claimOne(t, repository.ClaimParams{}).Claim
			require.NoError(t, o.repo.RetryEvent(t.Context(), c, time.Hour, cause))
			require.Equal(t, want, value[string](t, o, "SELECT last_error FROM latchkey.outbox WHERE id = $1", id))
			o.exec(t, "UPDATE latchkey.outbox SET due_at = clock_timestamp()")
		}
	})
}

func TestOutboxDeadLetters(t *testing.T) {
	t.Parallel()
	t.Run("are events whose worker crashed each time", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueueEvent(t, repository.Event{Topic: "test", AggregateKey: "a", MaxAttempts: 2})
		next := o.enqueue(t, "a")[0]
		for range 2 {
			e := o.claimOne(t, repository.ClaimParams{Worker: "frail", Lease: time.Millisecond})
			require.Equal(t, id, e.EventID)
			require.Equal(t, 2, e.MaxAttempts)
			o.expire(t, e.Claim)
		}
		o.requireClaims(t, next)
		letters, err := o.repo.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		require.Len(t, letters, 1)
		require.Equal(t, id, letters[0].EventID)
		require.Equal(t, 2, letters[0].Attempts)
		require.Equal(t, "the lease of frail ended", letters[0].LastError)
		require.Equal(t, "a", letters[0].AggregateKey)
		require.JSONEq(t, "null", string(letters[0].Payload))
		require.Greater(t, letters[0].DiedAt, letters[0].CreatedAt)
	})
	t.Run("are events that failed each time", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueueEvent(t, repository.Event{Topic: "test", MaxAttempts: 1})
		require.NoError(t, o.repo.RetryEvent(t.Context(), o.claimOne(t, repository.ClaimParams{}).Claim, 0, errors.New("no")))
		require.Equal(t, "dead", o.state(t, id))
		letters, err := o.repo.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, "no", letters[0].LastError)
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
	})
	t.Run("are events of which somebody says that no attempt can succeed", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "a", "a")
		cause := fmt.Errorf("%w: no such account", repository.ErrPermanent)
		c := o.claimOne(t, repository.ClaimParams{}).Claim
		require.NoError(t, o.repo.RetryEvent(t.Context(), c, time.Hour, cause))
		require.ErrorIs(t, o.repo.RetryEvent(t.Context(), c, 0, cause), repository.ErrLeaseLost)
		require.Equal(t, "dead", o.state(t, ids[0]))
		next := o.requireClaims(t, ids[1])[0]
		require.NoError(t, o.repo.CompleteEvent(t.Context(), next.Claim))
		letters, err := o.repo.ListDeadLetters(t.Context(), nil)
		require.NoError(t, err)
		require.Equal(t, "permanent failure: no such account", letters[0].LastError)

		require.NoError(t, o.repo.RedriveDeadLetter(t.Context(), ids[0]))
		e := o.claimOne(t, repository.ClaimParams{})
		require.Equal(t, 1, e.Attempt)
		require.NoError(t, o.repo.RetryEvent(t.Context(), e.Claim, time.Hour, errors.New("permanent failure")))
		require.Equal(t, "ready", o.state(t, ids[0]), "the text alone does not say it")
	})
	t.Run("are events whose attempts were lowered below what they have had", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "ready", "claimed and completed", "claimed and failed", "claimed and lost")
		events := o.requireClaims(t, ids...)
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[0].Claim, time.Millisecond, nil))
		o.exec(t, "UPDATE latchkey.outbox SET attempts = 7, fence = 7, max_attempts = 3")
		for i := range events {
			events[i].Fence = 7
		}
		require.NoError(t, o.repo.CompleteEvent(t.Context(), events[1].Claim), "its lease lives")
		require.NoError(t, o.repo.RetryEvent(t.Context(), events[2].Claim, 0, nil))
		_, err := o.repo.ExtendClaim(t.Context(), events[3].Claim, time.Millisecond)
		require.NoError(t, err)
		o.expire(t, events[3].Claim)
		waitUntil(t, o.observer, "SELECT clock_timestamp() > due_at FROM latchkey.outbox WHERE id = $1", ids[0])
		require.Empty(t, o.claim(t, repository.ClaimParams{}))
		require.Equal(t, map[string]int{"dead": 3, "done": 1}, o.states(t))
	})
	t.Run("do not hide what can be claimed behind them", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		for range 5 {
			o.enqueueEvent(t, repository.Event{Topic: "test"})
		}
		o.exec(t, "UPDATE latchkey.outbox SET attempts = 25, fence = 25")
		good := o.enqueue(t, "")[0]
		require.Equal(t, []repository.EventID{good}, idsOf(o.claim(t, repository.ClaimParams{Max: 1})))
		require.Equal(t, map[string]int{"dead": 5, "claimed": 1}, o.states(t))
	})
	t.Run("come in pages, the last to die first", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		ids := o.enqueue(t, "", "", "", "", "", "", "")
		o.exec(t, "UPDATE latchkey.outbox SET state = 'dead', ended_at = '2030-01-01'::timestamptz + (id / 3) * interval '1 s'")
		slices.Reverse(ids)
		var got []repository.EventID
		opts := &repository.DeadLetterOpts{Limit: 3}
		for {
			page, err := o.repo.ListDeadLetters(t.Context(), opts)
			require.NoError(t, err)
			require.LessOrEqual(t, len(page), 3)
			if len(page) == 0 {
				break
			}
			for _, d := range page {
				got = append(got, d.EventID)
			}
			opts.After = page[len(page)-1].Cursor()
		}
		require.Equal(t, ids, got)
	})
	t.Run("can be redriven", func(t *testing.T) {
		t.Parallel()
		o := newOffice(t)
		id := o.enqueueEvent(t, repository.Event{Topic: "test", AggregateKey: "a", MaxAttempts: 1})
		c := o.claimOne(t, repository.ClaimParams{}).Claim
		require.ErrorIs(t, o.repo.RedriveDeadLetter(t.Context(), id), repository.ErrNotFound, "it is not dead")
		require.NoError(t, o.repo.RetryEvent(t.Context(), c, 0, errors.New("no")))
		next := o.enqueue(t, "a")[0]
		require.NoError(t, o.repo.RedriveDeadLetter(t.Context(), id))
		require.ErrorIs(t, o.repo.RedriveDeadLetter(t.Context(), id), repository.ErrNotFound)
		require.ErrorIs(t, o.repo.RedriveDeadLetter(t.Context(), next+1), repository.ErrNotFound)

		e := o.requireClaims(t, id)[0] // before the next one
		require.Equal(t, 1, e.Attempt)
		require.Equal(t, c.Fence+1, e.Fence)
		require.NoError(t, o.repo.CompleteEvent(t.Context(), e.Claim))
		o.requireClaims(t, next)
	})
}

func TestOutboxPurge(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	ids := o.enqueue(t, "", "", "", "", "", "a", "a", "a")
	for _, e := range o.requireClaims(t, ids[:6]...)[:5] {
		require.NoError(t, o.repo.CompleteEvent(t.Context(), e.Claim))
	}
	o.exec(t, "UPDATE latchkey.outbox SET ended_at = clock_timestamp() - interval '1 hour' - id * interval '1 s' WHERE id < $1", ids[4])
	o.exec(t, "UPDATE latchkey.outbox SET state = 'dead', ended_at = clock_timestamp() - interval '1 year' WHERE id = $1", ids[7])

	purge := func(olderThan time.Duration, limit int) int {
		t.Helper()
		n, err := o.repo.PurgeEvents(t.Context(), olderThan, limit)
		require.NoError(t, err)
		return n
	}
	left := func() []repository.EventID {
		t.Helper()
		rows, err := o.admin.Query(t.Context(), "SELECT id FROM latchkey.outbox ORDER BY id")
		require.NoError(t, err)
		list, err := pgx.CollectRows(rows, pgx.RowTo[repository.EventID])
		require.NoError(t, err)
		return list
	}
	require.Zero(t, purge(2*time.Hour, 0))
	require.Equal(t, 1, purge(time.Hour, 1))
	require.NotContains(t, left(), ids[3], "the oldest goes first")

	locker := begin(t, testdb.Conn(t, o.url), pgx.TxOptions{})
	_, err := locker.Exec(t.Context(), "SELECT FROM latchkey.outbox WHERE id = $1 FOR UPDATE", ids[1])
	require.NoError(t, err)
	require.Equal(t, 2, purge(time.Hour, 1000))
	require.NoError(t, locker.Rollback(t.Context()))
	require.Equal(t, 1, purge(time.Hour, 1000))
	require.Equal(t, ids[4:], left(), "what is younger, and what is not done")
	require.Equal(t, 1, purge(0, 0))
	require.Equal(t, ids[5:], left())
}

func TestOutboxRowsThatCannotBe(t *testing.T) {
	t.Parallel()
	o := newOffice(t)
	good := map[string]string{
		"ready":   "owner = NULL, lease_until = NULL, ended_at = NULL",
		"claimed": "owner = 'w', lease_until = now(), ended_at = NULL",
		"done":    "owner = NULL, lease_until = NULL, ended_at = now()",
		"dead":    "owner = NULL, lease_until = NULL, ended_at = now()",
	}
	id := o.enqueue(t, "a")[0]
	o.exec(t, "UPDATE latchkey.outbox SET fence = 1, attempts = 1")
	set := func(state, values string) error {
		tx := begin(t, o.admin, pgx.TxOptions{})
		defer tx.Rollback(t.Context()) //nolint:errcheck // it is an experiment
		_, err := tx.Exec(t.Context(), "UPDATE latchkey.outbox SET state = '"+state+"', "+values+" WHERE id = $1", id)
		return err
	}
	for state, values := range good {
		require.NoError(t, set(state, values), state)
		for _, other := range slices.Sorted(maps.Keys(good)) {
			if good[other] != values {
				requireSQLState(t, "23514", set(state, good[other]))
			}
		}
		for _, bad := range []string{"attempts = 2", "attempts = -1, fence = -1", "max_attempts = 0", "topic = ''", "aggregate_key = ''", "topic = repeat('x', 256)"} {
			requireSQLState(t, "23514", set(state, values+", "+bad))
		}
	}
	requireSQLState(t, "23514", set("claimed", good["claimed"]+", attempts = 0"))
	requireSQLState(t, "23514", set("lost", good["ready"]))
	o.exec(t, "INSERT INTO latchkey.outbox (topic, aggregate_key, payload, state, attempts, fence, owner, lease_until) VALUES ('t', 'a', 'null', 'claimed', 1, 1, 'w', now())")
	requireSQLState(t, "23505", set("claimed", good["claimed"]))
}

// The methods of the outbox and of leases work whatever the host sets, cost one round trip, and leave nothing behind.
func TestOutboxSettingsOfTheHostDoNotMatter(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	testdb.Exec(t, url, decoys...)
	for name, settings := range foreign {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url).withForeign(t, settings, repository.WithLockTimeout(patience))
			before := sessionOf(t, f.pool)
			ctx, topics := t.Context(), []string{uuid.NewString()}
			key := uuid.NewString()
			_, err := f.repo.CreateSetup(ctx, f.user, &repository.CreateSetupOpts{Event: &repository.Event{Topic: topics[0], AggregateKey: key, MaxAttempts: 2}})
			require.NoError(t, err)
			claim := func() repository.Claim {
				events, err := f.repo.ClaimEvents(ctx, repository.ClaimParams{Worker: "w", Topics: topics})
				require.NoError(t, err)
				require.Len(t, events, 1)
				return events[0].Claim
			}
			c, err := f.repo.ExtendClaim(ctx, claim(), time.Minute)
			require.NoError(t, err)
			require.NoError(t, f.repo.RetryEvent(ctx, c, time.Millisecond, nil))
			waitUntil(t, f.observer, "SELECT clock_timestamp() > due_at FROM latchkey.outbox WHERE id = $1", c.EventID)
			require.NoError(t, f.repo.RetryEvent(ctx, claim(), 0, errors.New("no")))
			require.NoError(t, f.repo.RedriveDeadLetter(ctx, c.EventID))
			require.NoError(t, f.repo.CompleteEvent(ctx, claim()))
			_, err = f.repo.ListDeadLetters(ctx, nil)
			require.NoError(t, err)
			_, err = f.repo.PurgeEvents(ctx, time.Hour, 0)
			require.NoError(t, err)
			require.NoError(t, f.repo.WithLease(ctx, repository.LeaseParams{Name: key}, func(context.Context, int64) error { return nil }))
			require.Empty(t, changes(before, sessionOf(t, f.pool)))
		})
	}
}
