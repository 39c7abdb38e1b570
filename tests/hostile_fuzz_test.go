package tests

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// What comes from outside goes to the server as it is, or is refused with ErrInvalid before anything is sent: nothing is
// cut, changed or refused by the server in words of its own.

// hostile are texts that have broken something somewhere.
var hostile = []string{
	"", "k", "a\x00b", "\xff", "'; DROP TABLE latchkey.accounts; --", `\`, "$1", "%s%n", "\u202e", "ключ", strings.Repeat("é", 127), strings.Repeat("x", 256),
	"\ufeff", "\U0010ffff", "NULL", "{}", `{"a"}`, "\r\n", " ",
}

// acceptable requires that an error is of an argument and nothing was sent, and returns whether there was none.
func acceptable(t *testing.T, err error, also ...error) bool {
	t.Helper()
	if err == nil {
		return true
	}
	for _, kind := range append(also, repository.ErrInvalid) {
		if errors.Is(err, kind) {
			return false
		}
	}
	require.NoError(t, err)
	return false
}

func fuzzed(f *testing.F) *service {
	f.Helper()
	pool := testdb.Pool(f)
	repo, err := repository.New(pool)
	require.NoError(f, err)
	return &service{pool: pool, repo: repo}
}

func FuzzSetup(f *testing.F) {
	for i, text := range hostile {
		f.Add(text, i, int64(0), i-1, int64(i), int64(0))
	}
	for _, n := range []int64{-1, 1, int64(time.Millisecond), math.MaxInt64, math.MinInt64} {
		f.Add("k", int(n), n, int(n), n, n)
		f.Add("k", 1, int64(0), 0, n, int64(0))
	}
	for _, year := range []int{-300_000, -4_714, -4_713, -1, 0, 1, 9_999, 10_000, 294_276, 294_277, 300_000} {
		f.Add("k", 1, int64(0), 0, time.Date(year, 1, 1, 0, 0, 0, 0, time.UTC).Unix(), int64(0))
	}
	s := fuzzed(f)
	f.Fuzz(func(t *testing.T, key string, maxPending int, lockTimeout int64, limit int, seconds, nanoseconds int64) {
		ctx, user := t.Context(), uuid.New()
		o := &repository.CreateSetupOpts{IdempotencyKey: key, MaxPending: maxPending, LockTimeout: time.Duration(lockTimeout)}
		busy := repository.ErrLockBusy // where the timeout is shorter than a busy machine needs
		if o.LockTimeout == 0 || o.LockTimeout > time.Second {
			busy = repository.ErrInvalid
		}
		first, err := s.repo.CreateSetup(ctx, user, o)
		if acceptable(t, err, busy) {
			require.Equal(t, key, first.IdempotencyKey)
			again, err := s.repo.CreateSetup(ctx, user, o)
			if key != "" && acceptable(t, err, busy) {
				require.Equal(t, first, again)
			}
		}
		n, err := s.repo.CountPendingSetups(ctx, user)
		require.NoError(t, err)
		require.LessOrEqual(t, n, max(1, maxPending))

		after := repository.Cursor{CreatedAt: time.Unix(seconds, nanoseconds), ID: user}
		list, err := s.repo.ListSetups(ctx, user, &repository.ListOpts{Limit: limit, After: after})
		if acceptable(t, err) {
			for _, r := range list {
				require.True(t, r.CreatedAt.Before(after.CreatedAt) || r.CreatedAt.Equal(after.CreatedAt), "%v is not before %v", r.CreatedAt, after.CreatedAt)
			}
			if first != nil && after.CreatedAt.After(first.CreatedAt.Add(time.Second)) {
				require.NotEmpty(t, list)
			}
		}
	})
}

func FuzzAccount(f *testing.F) {
	for i, text := range hostile {
		f.Add(text, "UTC", int64(i), int64(i))
		f.Add("k", text, int64(i), int64(-i))
	}
	for _, zone := range []string{"Europe/Berlin", "posix/UTC", "<+03>3", "UTC+25", "localtime", "../UTC", "EST5EDT,M3.2.0,M11.1.0", "+99999999999", "utc", "Factory"} {
		f.Add("k", zone, int64(1), int64(math.MaxInt64))
	}
	f.Add("k", "UTC", int64(math.MaxInt64), int64(math.MaxInt64))
	f.Add("k", "UTC", int64(math.MinInt64), int64(math.MinInt64))
	s := fuzzed(f)
	f.Fuzz(func(t *testing.T, key, zone string, limit, amount int64) {
		ctx := t.Context()
		a, err := s.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New(), DailyLimit: limit, TimeZone: zone, IdempotencyKey: key})
		if !acceptable(t, err) {
			return
		}
		require.Equal(t, key, a.IdempotencyKey)
		balance := int64(0)
		if _, err = s.repo.Deposit(ctx, repository.DepositParams{AccountID: a.ID, Amount: amount, IdempotencyKey: key}); acceptable(t, err) {
			balance = amount
		}
		_, err = s.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: a.ID, Amount: amount})
		if acceptable(t, err, repository.ErrDailyLimit) {
			require.True(t, limit == 0 || amount <= limit)
			balance -= amount
		}
		got, err := s.repo.GetAccount(ctx, a.ID)
		require.NoError(t, err)
		require.Equal(t, balance, got.Balance)
	})
}

func FuzzEvent(f *testing.F) {
	for _, text := range hostile {
		f.Add(text, "a", []byte(`null`), "h", "v")
		f.Add("t", text, []byte(`{"n": 1.50}`), text, "v")
		f.Add("t", "a", []byte(text), "h", text)
	}
	for _, payload := range []string{
		`"\u0000"`, `"\ud83d\ude00"`, `"\ud800"`, `1e131071`, `1e131072`, `-0`, `0e-17000`, `1.5E-16382`, `{"a":1,"a":2}`, `[` + strings.Repeat(`[`, 1000),
		strings.Repeat(`[`, 1000) + strings.Repeat(`]`, 1000), `"\u2028\\u0000"`, ` [1 , 2] `, `0.1e1`, `123456789012345678901234567890.123`,
	} {
		f.Add("t", "a", []byte(payload), "h", "v")
	}
	s := fuzzed(f)
	f.Fuzz(func(t *testing.T, topic, aggregate string, payload []byte, header, value string) {
		ctx := t.Context()
		e := repository.Event{Topic: topic, AggregateKey: aggregate, Payload: payload, Headers: map[string]string{header: value}}
		sent := pgx.BeginFunc(ctx, s.pool, func(tx pgx.Tx) error {
			_, err := s.repo.EnqueueTx(ctx, tx, e)
			if errors.Is(err, repository.ErrInvalid) {
				require.NotErrorAs(t, err, new(*pgconn.PgError), "nothing was sent")
				_, usable := tx.Exec(ctx, "SELECT 1")
				require.NoError(t, usable)
			}
			return err
		})
		claimed, err := s.repo.ClaimEvents(ctx, repository.ClaimParams{Worker: "w"})
		require.NoError(t, err)
		if !acceptable(t, sent) {
			require.Empty(t, claimed)
			return
		}
		require.Len(t, claimed, 1)
		got := claimed[0]
		require.NoError(t, s.repo.CompleteEvent(ctx, got.Claim))
		require.Equal(t, topic, got.Topic)
		require.Equal(t, aggregate, got.AggregateKey)
		require.True(t, maps.Equal(e.Headers, got.Headers), "%q became %q", e.Headers, got.Headers)
		if payload == nil {
			payload = []byte("null")
		}
		require.Equal(t, meaning(t, payload), meaning(t, got.Payload), "%s became %s", payload, got.Payload)
	})
}

// meaning is what JSON says, with its numbers exact.
func meaning(t *testing.T, text []byte) any {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.UseNumber()
	var value any
	require.NoError(t, decoder.Decode(&value))
	return exact(t, value)
}

func exact(t *testing.T, value any) any {
	t.Helper()
	switch v := value.(type) {
	case json.Number:
		number, ok := new(big.Rat).SetString(v.String())
		require.True(t, ok)
		return number.String()
	case []any:
		for i := range v {
			v[i] = exact(t, v[i])
		}
	case map[string]any:
		for k := range v {
			v[k] = exact(t, v[k])
		}
	}
	return value
}

func FuzzWorker(f *testing.F) {
	for i, text := range hostile {
		f.Add(text, "o", "t", i, int64(0))
		f.Add("n", text, "t", -i, int64(time.Second))
		f.Add("n", "o", text, i, int64(i))
	}
	f.Add("n", "o", "t", math.MaxInt, int64(math.MaxInt64))
	f.Add("n", "o", "t", math.MinInt, int64(math.MinInt64))
	f.Add("n", "o", "t", 1, int64(math.MaxInt64))
	f.Add("n", "o", "t", 1, int64(math.MinInt64))
	s := fuzzed(f)
	f.Fuzz(func(t *testing.T, name, owner, topic string, rows int, nanoseconds int64) {
		ctx, d := t.Context(), time.Duration(nanoseconds)
		lease, err := s.repo.AcquireLease(ctx, repository.LeaseParams{Name: name, Owner: owner, TTL: d})
		if acceptable(t, err, repository.ErrLockBusy) {
			require.Equal(t, name, lease.Name)
			if err := s.repo.RenewLease(ctx, lease, d); acceptable(t, err, repository.ErrLeaseLost) {
				acceptable(t, s.repo.ReleaseLease(ctx, lease), repository.ErrLeaseLost)
			}
		}
		_, err = s.repo.ClaimEvents(ctx, repository.ClaimParams{Worker: owner, Max: rows, Lease: d, Topics: []string{topic}})
		acceptable(t, err)
		_, err = s.repo.PurgeEvents(ctx, d, rows)
		acceptable(t, err)
		after := repository.DeadLetterCursor{DiedAt: time.Unix(nanoseconds, nanoseconds), EventID: repository.EventID(rows)}
		_, err = s.repo.ListDeadLetters(ctx, &repository.DeadLetterOpts{Limit: rows, After: after})
		if acceptable(t, err) {
			require.InDelta(t, 5000, after.DiedAt.UTC().Year(), 5000, "pgx sends such a time as another one")
		}
		claim := repository.Claim{EventID: repository.EventID(rows), Worker: owner, Fence: nanoseconds}
		acceptable(t, s.repo.RetryEvent(ctx, claim, d, errors.New(topic)), repository.ErrLeaseLost)
		_, err = s.repo.ExtendClaim(ctx, claim, d)
		acceptable(t, err, repository.ErrLeaseLost)
		acceptable(t, s.repo.CompleteEvent(ctx, claim), repository.ErrLeaseLost)
		acceptable(t, s.repo.RedriveDeadLetter(ctx, repository.EventID(nanoseconds)), repository.ErrNotFound)
	})
}

func FuzzLock(f *testing.F) {
	for _, id := range append(hostile, strings.Repeat("x", 1024), strings.Repeat("x", 1025)) {
		f.Add(id)
	}
	s := fuzzed(f)
	f.Fuzz(func(t *testing.T, id string) {
		want, invalid := repository.Key("guard_item", id)
		called := false
		err := s.repo.Guard(t.Context(), []repository.Lock{items.Exclusive(id)}, func(ctx context.Context, tx *repository.Tx) error {
			called = true
			var ofServer, held int64
			if err := tx.QueryRow(ctx, "SELECT latchkey.lock_key('guard_item', $1::text)", id).Scan(&ofServer); err != nil {
				return err
			}
			require.Equal(t, want, ofServer)
			if err := tx.QueryRow(ctx, "SELECT key FROM latchkey.lock_activity WHERE pid = pg_backend_pid()").Scan(&held); err != nil {
				return err
			}
			require.Equal(t, want, held)
			return nil
		})
		require.Equal(t, invalid == nil, acceptable(t, err))
		require.Equal(t, invalid == nil, called)
	})
}
