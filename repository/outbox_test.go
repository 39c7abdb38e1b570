package repository_test

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
)

type outboxCall func(ctx context.Context, r *repository.Repository) error

func claim(p repository.ClaimParams) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return second(r.ClaimEvents(ctx, p)) }
}

func complete(c repository.Claim) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.CompleteEvent(ctx, c) }
}

func retry(c repository.Claim, after time.Duration) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.RetryEvent(ctx, c, after, nil) }
}

func extend(c repository.Claim, lease time.Duration) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return second(r.ExtendClaim(ctx, c, lease)) }
}

func listDead(o *repository.DeadLetterOpts) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return second(r.ListDeadLetters(ctx, o)) }
}

func redrive(id repository.EventID) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.RedriveDeadLetter(ctx, id) }
}

func purge(olderThan time.Duration, limit int) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error {
		return second(r.PurgeEvents(ctx, olderThan, limit))
	}
}

func acquire(p repository.LeaseParams) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return second(r.AcquireLease(ctx, p)) }
}

func withLease(p repository.LeaseParams, fn func(context.Context, int64) error) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.WithLease(ctx, p, fn) }
}

func renew(l *repository.Lease, ttl time.Duration) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.RenewLease(ctx, l, ttl) }
}

func release(l *repository.Lease) outboxCall {
	return func(ctx context.Context, r *repository.Repository) error { return r.ReleaseLease(ctx, l) }
}

// Every method of the outbox and of leases refuses a bad argument before it asks for a connection, and a good one
// gets as far as that.
func TestOutboxArguments(t *testing.T) {
	t.Parallel()
	var (
		long  = strings.Repeat("w", 255)
		good  = repository.Claim{EventID: 1, Worker: "w", Fence: 1}
		lease = func() *repository.Lease {
			return &repository.Lease{Name: "n", Owner: "o", Fence: 1, TTL: time.Second}
		}
		idle     = func(context.Context, int64) error { return nil }
		topics   = func(n int) []string { return strings.Split(strings.Repeat(",t", n)[1:], ",") }
		tooLong  = 24*24*time.Hour + 1
		microsec = time.Microsecond
	)
	for _, tc := range []struct {
		name string
		bad  string // the argument's name; empty if all are good
		call outboxCall
	}{
		{"claim for nobody", "Worker", claim(repository.ClaimParams{})},
		{"claim for a long name", "Worker", claim(repository.ClaimParams{Worker: long + "w"})},
		{"claim for a name with NUL", "Worker", claim(repository.ClaimParams{Worker: "a\x00"})},
		{"claim for a name that is not UTF-8", "Worker", claim(repository.ClaimParams{Worker: "a\xff"})},
		{"claim -1", "Max", claim(repository.ClaimParams{Worker: "w", Max: -1})},
		{"claim 1001", "Max", claim(repository.ClaimParams{Worker: "w", Max: 1001})},
		{"claim for less than 1 ms", "Lease", claim(repository.ClaimParams{Worker: "w", Lease: microsec})},
		{"claim for more than 24 days", "Lease", claim(repository.ClaimParams{Worker: "w", Lease: tooLong})},
		{"claim an empty topic", "Topics[1]", claim(repository.ClaimParams{Worker: "w", Topics: []string{"a", ""}})},
		{"claim a long topic", "Topics[0]", claim(repository.ClaimParams{Worker: "w", Topics: []string{long + "w"}})},
		{"claim 101 topics", "Topics", claim(repository.ClaimParams{Worker: "w", Topics: topics(101)})},
		{"claim 100 topics", "", claim(repository.ClaimParams{Worker: long, Max: 1000, Lease: time.Hour, Topics: topics(100)})},
		{"claim with the defaults", "", claim(repository.ClaimParams{Worker: "w"})},

		{"complete nothing", "c", complete(repository.Claim{})},
		{"complete without an id", "c", complete(repository.Claim{Worker: "w", Fence: 1})},
		{"complete without a token", "c", complete(repository.Claim{EventID: 1, Worker: "w"})},
		{"complete for nobody", "Worker", complete(repository.Claim{EventID: 1, Fence: 1})},
		{"complete", "", complete(good)},
		{"retry nothing", "c", retry(repository.Claim{}, 0)},
		{"retry before now", "after", retry(good, -1)},
		{"retry in less than 1 ms", "after", retry(good, microsec)},
		{"retry in more than 24 days", "after", retry(good, tooLong)},
		{"retry", "", retry(good, 0)},
		{"extend nothing", "c", extend(repository.Claim{}, 0)},
		{"extend by less than 1 ms", "lease", extend(good, microsec)},
		{"extend by more than 24 days", "lease", extend(good, tooLong)},
		{"extend", "", extend(good, 0)},

		{"list -1", "Limit", listDead(&repository.DeadLetterOpts{Limit: -1})},
		{"list 1001", "Limit", listDead(&repository.DeadLetterOpts{Limit: 1001})},
		{"list after half a cursor", "After", listDead(&repository.DeadLetterOpts{After: repository.DeadLetterCursor{EventID: 1}})},
		{"list after the other half", "After", listDead(&repository.DeadLetterOpts{After: repository.DeadLetterCursor{DiedAt: time.Now()}})},
		{"list", "", listDead(nil)},
		{"redrive 0", "id", redrive(0)},
		{"redrive", "", redrive(1)},
		{"purge what is to come", "olderThan", purge(-1, 0)},
		{"purge -1", "limit", purge(0, -1)},
		{"purge 10001", "limit", purge(0, 10_001)},
		{"purge", "", purge(time.Hour, 10_000)},

		{"acquire nothing", "Name", acquire(repository.LeaseParams{})},
		{"acquire a long name", "Name", acquire(repository.LeaseParams{Name: long + "w"})},
		{"acquire for a long owner", "Owner", acquire(repository.LeaseParams{Name: "n", Owner: long + "w"})},
		{"acquire for less than 1 ms", "TTL", acquire(repository.LeaseParams{Name: "n", TTL: microsec})},
		{"acquire", "", acquire(repository.LeaseParams{Name: long})},
		{"work under the lease of nothing", "Name", withLease(repository.LeaseParams{}, idle)},
		{"no work", "fn", withLease(repository.LeaseParams{Name: "n"}, nil)},
		{"work", "", withLease(repository.LeaseParams{Name: "n"}, idle)},
		{"renew nil", "l", renew(nil, 0)},
		{"renew nothing", "l", renew(&repository.Lease{}, 0)},
		{"renew for more than 24 days", "ttl", renew(lease(), tooLong)},
		{"renew", "", renew(lease(), 0)},
		{"release nil", "l", release(nil)},
		{"release nothing", "l", release(&repository.Lease{})},
		{"release", "", release(lease())},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			pool, dials := unreachable(t)
			repo, err := repository.New(pool)
			require.NoError(t, err)
			err = tc.call(t.Context(), repo)
			if tc.bad == "" {
				require.ErrorIs(t, err, repository.ErrConnectionLost)
				require.NotZero(t, dials.Load(), "without a dial the checks for none prove nothing")
				return
			}
			requireInvalid(t, err, tc.bad)
			require.Zero(t, dials.Load())
		})
	}
}

// An event is checked before anything is sent, wherever it is given.
func TestOutboxEventArguments(t *testing.T) {
	t.Parallel()
	pool, _ := unreachable(t)
	repo, err := repository.New(pool)
	require.NoError(t, err)
	one, two := uuid.New(), uuid.New()
	ways := map[string]func(e *repository.Event) error{
		"EnqueueTx": func(e *repository.Event) error {
			return second(repo.EnqueueTx(t.Context(), untouchable{}, *e))
		},
		"CreateSetup": func(e *repository.Event) error {
			return second(repo.CreateSetup(t.Context(), one, &repository.CreateSetupOpts{Event: e}))
		},
		"Deposit": func(e *repository.Event) error {
			return second(repo.Deposit(t.Context(), repository.DepositParams{AccountID: one, Amount: 1, Event: e}))
		},
		"Withdraw": func(e *repository.Event) error {
			return second(repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: one, Amount: 1, Event: e}))
		},
		"Transfer": func(e *repository.Event) error {
			return second(repo.Transfer(t.Context(), repository.TransferParams{From: one, To: two, Amount: 1, Event: e}))
		},
	}
	text := func(s string) json.RawMessage { return json.RawMessage(s) }
	for _, tc := range []struct {
		bad string
		e   repository.Event
	}{
		{"Topic", repository.Event{}},
		{"Topic", repository.Event{Topic: strings.Repeat("t", 256)}},
		{"Topic", repository.Event{Topic: "a\x00"}},
		{"Topic", repository.Event{Topic: "a\xff"}},
		{"AggregateKey", repository.Event{Topic: "t", AggregateKey: strings.Repeat("t", 256)}},
		{"AggregateKey", repository.Event{Topic: "t", AggregateKey: "a\x00"}},
		{"MaxAttempts", repository.Event{Topic: "t", MaxAttempts: -1}},
		{"MaxAttempts", repository.Event{Topic: "t", MaxAttempts: 1001}},
		{"Headers", repository.Event{Topic: "t", Headers: map[string]string{"a": "b\x00"}}},
		{"Headers", repository.Event{Topic: "t", Headers: map[string]string{"a\xff": "b"}}},
		{"Headers", repository.Event{Topic: "t", Headers: map[string]string{"a": strings.Repeat("x", 16<<10)}}},
		{"Payload", repository.Event{Topic: "t", Payload: text("")}},
		{"Payload", repository.Event{Topic: "t", Payload: text("{")}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`"` + strings.Repeat("x", 1<<20-1) + `"`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`["\u0000"]`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`{"\u0000": 1}`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`"\\\u0000"`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`"\ud800"`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`"\ud800\n"`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`"\udc00\ud800"`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text("\"\xff\"")}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`[1e131072]`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`[-1.5e-16383]`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text(`[1E+99999999999999999999]`)}},
		{"Payload", repository.Event{Topic: "t", Payload: text("[" + strings.Repeat("1e131071,", 9) + "0]")}},
		{"Payload", repository.Event{Topic: "t", Payload: text(strings.Repeat("[", 1001) + strings.Repeat("]", 1001))}},
	} {
		for name, call := range ways {
			requireInvalid(t, call(&tc.e), tc.bad)
			require.ErrorContains(t, call(&tc.e), "latchkey: "+name+": ")
		}
	}
	for _, e := range []repository.Event{
		{Topic: strings.Repeat("t", 255), AggregateKey: strings.Repeat("k", 255), MaxAttempts: 1000},
		{Topic: "t", Payload: text(`"` + strings.Repeat("x", 1<<20-2) + `"`)},
		{Topic: "t", Payload: text(`["\\u0000", "\ud83d\udc0e", "\u0001", "\"\\", -0.5e-10, 1E+3, {"a": []}, true]`)},
		{Topic: "t", Payload: text("[" + strings.Repeat("1e131071,", 7) + "0]")},
		{Topic: "t", Payload: text(strings.Repeat("[", 1000) + strings.Repeat("]", 1000))},
		{Topic: "t", Headers: map[string]string{"a": strings.Repeat("x", 16<<10-1)}},
	} {
		for name, call := range ways {
			if name == "EnqueueTx" {
				require.Panics(t, func() { _ = call(&e) }, "it uses the transaction")
				continue
			}
			require.ErrorIs(t, call(&e), repository.ErrConnectionLost, "%s %.40s", name, e.Payload)
		}
	}
}
