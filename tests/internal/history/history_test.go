package history_test

import (
	"bytes"
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/tests/internal/history"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestMain(m *testing.M) { testdb.Main(m) }

// at is a call, in milliseconds, and its answer.
type at struct {
	call, ret int
	in, out   any
}

var (
	a, b, c = uuid.MustParse("a0000000-0000-0000-0000-000000000000"), uuid.MustParse("b0000000-0000-0000-0000-000000000000"), uuid.MustParse("c0000000-0000-0000-0000-000000000000")

	nothing = history.Nothing{Why: "connection lost"}
	unknown = history.Unknown{Why: "outcome unknown"}
)

const patience = 30 * time.Second

// written makes a history from what is written down, in any order.
func written(model porcupine.Model, calls []at) *history.History {
	h := history.New("by hand", model)
	for i, call := range calls {
		op := h.Call(i, call.in)
		h.Return(op, call.out)
		op.Call = time.Duration(call.call) * time.Millisecond
		if op.Return != history.Forever {
			op.Return = time.Duration(call.ret) * time.Millisecond
		}
	}
	return h
}

func TestSetups(t *testing.T) {
	t.Parallel()
	one := history.Create{Max: 1}
	key := history.Create{Key: "k", Max: 1}
	created := func(id uuid.UUID) history.Created { return history.Created{ID: id, Status: history.Pending} }
	completed := func(id uuid.UUID) history.Created { return history.Created{ID: id, Status: "completed"} }
	complete := func(id uuid.UUID) history.End { return history.End{ID: id, Status: "completed"} }
	full := history.Refused{Used: 1, Limit: 1}
	list := func(rows ...history.Row) history.Listed { return history.Listed{Rows: rows} }
	row := func(id uuid.UUID, key, status string) history.Row {
		return history.Row{ID: id, Key: key, Max: 1, Status: status}
	}
	check(t, history.Setups, []byHand{
		{"one after the other, up to the limit", true, []at{
			{0, 1, one, created(a)},
			{2, 3, one, full},
			{4, 5, history.Count{}, history.Counted{Pending: 1}},
		}},
		{"of two at once, either may be first", true, []at{{0, 9, one, full}, {1, 8, one, created(a)}}},
		{"two over the limit", false, []at{{0, 9, one, created(a)}, {1, 8, one, created(b)}}},
		{"refused with nothing there", false, []at{{0, 1, one, full}}},
		{"refused by what came later", false, []at{{0, 1, one, full}, {2, 3, one, created(a)}}},
		{"refused with a wrong count", false, []at{{0, 1, one, created(a)}, {2, 3, one, history.Refused{Used: -1, Limit: 1}}}},
		{"refused with a wrong limit", false, []at{{0, 1, one, created(a)}, {2, 3, one, history.Refused{Used: 1, Limit: 2}}}},
		{"a place is free again", true, []at{
			{0, 1, one, created(a)},
			{2, 3, complete(a), history.Ended{}},
			{4, 5, one, created(b)},
			{6, 7, history.Get{ID: a}, history.Got{Status: "completed"}},
			{8, 9, history.List{}, list(row(b, "", history.Pending), row(a, "", "completed"))},
		}},
		{"refused although a place was free again", false, []at{
			{0, 1, one, created(a)},
			{2, 3, complete(a), history.Ended{}},
			{4, 5, one, full},
		}},
		{"refused because of one that is just ending, which a reader sees sooner", true, []at{
			{0, 1, one, created(a)},
			{2, 9, complete(a), history.Ended{}},
			{3, 4, history.Count{}, history.Counted{Pending: 0}},
			{5, 6, one, full},
		}},
		{"ended twice", false, []at{
			{0, 1, one, created(a)},
			{2, 3, complete(a), history.Ended{}},
			{4, 5, complete(a), history.Ended{}},
		}},
		{"ended once, of two at once", true, []at{
			{0, 1, one, created(a)},
			{2, 9, complete(a), history.Ended{}},
			{2, 9, history.End{ID: a, Status: "cancelled"}, history.NotPending{}},
			{10, 11, history.Get{ID: a}, history.Got{Status: "completed"}},
		}},
		{"not pending although nobody ended it", false, []at{{0, 1, one, created(a)}, {2, 3, complete(a), history.NotPending{}}}},
		{"not found although it was made", false, []at{{0, 1, one, created(a)}, {2, 3, complete(a), history.NotFound{}}}},
		{"an old status", false, []at{
			{0, 1, one, created(a)},
			{2, 3, complete(a), history.Ended{}},
			{4, 5, history.Get{ID: a}, history.Got{Status: history.Pending}},
		}},
		{"a repeat gets the first row and uses no quota", true, []at{
			{0, 1, key, created(a)},
			{2, 3, key, created(a)},
			{4, 5, complete(a), history.Ended{}},
			{6, 7, key, completed(a)},
			{8, 9, history.Create{Key: "k", Max: 2}, history.Conflict{}},
		}},
		{"a repeat gets another row", false, []at{{0, 1, key, created(a)}, {2, 3, key, created(b)}}},
		{"a repeat gets an old status", false, []at{
			{0, 1, key, created(a)},
			{2, 3, complete(a), history.Ended{}},
			{4, 5, key, created(a)},
		}},
		{"a repeat is refused", false, []at{{0, 1, key, created(a)}, {2, 3, key, full}}},
		{"a conflict with nothing", false, []at{{0, 1, key, history.Conflict{}}}},
		{"a conflict with the same", false, []at{{0, 1, key, created(a)}, {2, 3, key, history.Conflict{}}}},
		{"other parameters, and no conflict", false, []at{{0, 1, key, created(a)}, {2, 3, history.Create{Key: "k", Max: 2}, created(a)}}},
		{"an unknown outcome that was written", true, []at{
			{0, 0, key, unknown},
			{2, 3, one, full},
			{4, 5, key, created(a)},
			{6, 7, history.List{}, list(row(a, "k", history.Pending))},
		}},
		{"an unknown outcome that was written late", true, []at{
			{0, 0, one, unknown},
			{2, 3, history.Count{}, history.Counted{Pending: 0}},
			{4, 5, one, full},
			{6, 7, history.List{}, list(row(b, "", history.Pending))},
		}},
		{"an unknown outcome that was not written", true, []at{{0, 0, one, unknown}, {2, 3, one, created(a)}, {4, 5, history.List{}, list(row(a, "", history.Pending))}}},
		{"an unknown outcome that was written twice", false, []at{
			{0, 0, history.Create{Max: 3}, unknown},
			{2, 3, history.Count{}, history.Counted{Pending: 2}},
		}},
		{"an unknown outcome that was written before it was asked for", false, []at{
			{0, 1, one, full},
			{2, 0, one, unknown},
		}},
		{"an unknown outcome that came and went", false, []at{
			{0, 0, one, unknown},
			{2, 3, history.Count{}, history.Counted{Pending: 1}},
			{4, 5, history.Count{}, history.Counted{Pending: 0}},
		}},
		{"an end of unknown outcome", true, []at{
			{0, 1, one, created(a)},
			{2, 0, complete(a), unknown},
			{4, 5, one, full},
			{6, 7, one, created(b)},
			{8, 9, complete(a), history.NotPending{}},
		}},
		{"nothing was written, and that is so", true, []at{
			{0, 1, one, nothing},
			{2, 3, one, created(a)},
			{4, 5, complete(a), nothing},
			{6, 7, history.Count{}, history.Counted{Pending: 1}},
		}},
		{"nothing was written, but it was", false, []at{{0, 1, one, nothing}, {2, 3, history.List{}, list(row(a, "", history.Pending))}}},
		{"nothing was ended, but it was", false, []at{
			{0, 1, one, created(a)},
			{2, 3, complete(a), nothing},
			{4, 5, history.Get{ID: a}, history.Got{Status: "completed"}},
		}},
		{"an acknowledged row is lost", false, []at{{0, 1, one, created(a)}, {2, 3, history.List{}, list()}}},
		{"a row that nobody made", false, []at{{0, 1, one, created(a)}, {2, 3, history.List{}, list(row(a, "", history.Pending), row(b, "", "completed"))}}},
		{"one row for two calls", false, []at{
			{0, 1, history.Create{Max: 2}, created(a)},
			{2, 3, history.Create{Max: 2}, created(a)},
		}},
		{"a call without an answer, such as one that still runs", true, []at{{0, 0, one, nil}, {2, 3, one, full}}},
	})
}

func TestAccounts(t *testing.T) {
	t.Parallel()
	deposit := func(amount int64, key string) history.Move {
		return history.Move{From: history.None, To: 0, Amount: amount, Key: key}
	}
	withdraw := func(amount int64, key string) history.Move {
		return history.Move{From: 0, To: history.None, Amount: amount, Key: key}
	}
	transfer := history.Move{From: 0, To: 1, Amount: 3}
	in := func(id uuid.UUID, after int64) history.Moved { return history.Moved{ID: id, ToAfter: after} }
	out := func(id uuid.UUID, after int64) history.Moved { return history.Moved{ID: id, FromAfter: after} }
	over := func(id uuid.UUID) history.Moved {
		return history.Moved{ID: id, FromAfter: history.Untold, ToAfter: history.Untold}
	}
	books := func(first, second int64, moves ...history.Posted) history.Booked {
		return history.Booked{Balances: []int64{first, second}, Moves: moves}
	}
	posted := func(id uuid.UUID, amount, after int64, key string) history.Posted {
		return history.Posted{Move: deposit(amount, key), ID: id, ToAfter: after}
	}
	// The first account may spend 10 a day, the second what it likes.
	model := func() porcupine.Model { return history.Accounts(10, 0) }
	check(t, model, []byHand{
		{"money in and out", true, []at{
			{0, 1, deposit(5, ""), in(a, 5)},
			{2, 3, withdraw(2, ""), out(b, 3)},
			{4, 5, transfer, over(c)},
			{6, 7, history.Balance{Account: 0}, history.Balanced{Balance: 0}},
			{6, 7, history.Balance{Account: 1}, history.Balanced{Balance: 3}},
			{8, 9, withdraw(1, ""), history.Insufficient{}},
			{10, 11, history.Books{}, books(
				0, 3,
				posted(a, 5, 5, ""),
				history.Posted{Move: withdraw(2, ""), ID: b, FromAfter: 3},
				history.Posted{Move: transfer, ID: c, ToAfter: 3},
			)},
		}},
		{"two that spend the same money", false, []at{
			{0, 1, deposit(3, ""), in(a, 3)},
			{2, 9, withdraw(3, ""), out(b, 0)},
			{2, 9, transfer, over(c)},
		}},
		{"two that see the same balance", false, []at{{0, 9, deposit(3, ""), in(a, 3)}, {0, 9, deposit(3, ""), in(b, 3)}}},
		{"two at once, the later one first", true, []at{{0, 9, deposit(3, ""), in(a, 5)}, {0, 9, deposit(2, ""), in(b, 2)}}},
		{"two in turn, the later one first", false, []at{{0, 1, deposit(3, ""), in(a, 5)}, {2, 3, deposit(2, ""), in(b, 2)}}},
		{"insufficient although it is there", false, []at{{0, 1, deposit(3, ""), in(a, 3)}, {2, 3, withdraw(3, ""), history.Insufficient{}}}},
		{"the daily limit", true, []at{
			{0, 1, deposit(20, ""), in(a, 20)},
			{2, 3, withdraw(8, ""), out(b, 12)},
			{4, 5, transfer, history.OverLimit{Used: 8, Limit: 10}},
			{6, 7, withdraw(2, ""), out(c, 10)},
		}},
		{"over the daily limit", false, []at{
			{0, 1, deposit(20, ""), in(a, 20)},
			{2, 9, withdraw(8, ""), out(b, 12)},
			{2, 9, transfer, over(c)},
		}},
		{"refused by a limit that is not reached", false, []at{
			{0, 1, deposit(20, ""), in(a, 20)},
			{2, 3, transfer, history.OverLimit{Used: 0, Limit: 10}},
		}},
		{"refused with a wrong sum", false, []at{
			{0, 1, deposit(20, ""), in(a, 20)},
			{2, 3, withdraw(8, ""), out(b, 12)},
			{4, 5, transfer, history.OverLimit{Used: 9, Limit: 10}},
		}},
		{"a repeat gets the first entry", true, []at{
			{0, 1, deposit(5, "k"), in(a, 5)},
			{2, 3, deposit(1, ""), in(b, 6)},
			{4, 5, deposit(5, "k"), in(a, 5)},
			{6, 7, deposit(4, "k"), history.Conflict{}},
			{8, 9, withdraw(5, "k"), history.Conflict{}},
		}},
		{"a repeat moves money again", false, []at{{0, 1, deposit(5, "k"), in(a, 5)}, {2, 3, deposit(5, "k"), in(a, 10)}}},
		{"a repeat makes an entry of its own", false, []at{{0, 1, deposit(5, "k"), in(a, 5)}, {2, 3, deposit(5, "k"), in(b, 5)}}},
		{"a repeat is a transfer", false, []at{
			{0, 1, deposit(5, "k"), in(a, 5)},
			{2, 3, history.Move{From: 0, To: 1, Amount: 5, Key: "k"}, over(b)},
		}},
		{"the key of another account is another key", true, []at{
			{0, 1, deposit(5, "k"), in(a, 5)},
			{2, 3, history.Move{From: history.None, To: 1, Amount: 5, Key: "k"}, in(b, 5)},
		}},
		{"an unknown outcome that was written, as its key tells", true, []at{
			{0, 0, deposit(5, "k"), unknown},
			{2, 3, deposit(1, ""), in(b, 6)},
			{4, 5, deposit(5, "k"), in(a, 5)},
			{6, 7, history.Books{}, books(6, 0, posted(a, 5, 5, "k"), posted(b, 1, 6, ""))},
		}},
		{"an unknown outcome that was not written", true, []at{
			{0, 0, withdraw(5, ""), unknown},
			{2, 3, deposit(5, ""), in(a, 5)},
			{4, 5, history.Books{}, books(5, 0, posted(a, 5, 5, ""))},
		}},
		{"an unknown outcome that was written twice", false, []at{
			{0, 0, deposit(5, ""), unknown},
			{2, 3, deposit(1, ""), in(b, 11)},
		}},
		{"nothing was written, but it was", false, []at{
			{0, 1, deposit(5, ""), nothing},
			{2, 3, history.Balance{Account: 0}, history.Balanced{Balance: 5}},
		}},
		{"the balances after a transfer, as they were read", true, []at{
			{0, 1, deposit(5, ""), in(a, 5)},
			{2, 3, transfer, history.Moved{ID: b, FromAfter: 2, ToAfter: 3}},
		}},
		{"wrong balances after a transfer", false, []at{
			{0, 1, deposit(5, ""), in(a, 5)},
			{2, 3, transfer, history.Moved{ID: b, FromAfter: 2, ToAfter: 2}},
		}},
		{"half a transfer", false, []at{
			{0, 1, deposit(5, ""), in(a, 5)},
			{2, 0, transfer, unknown},
			{4, 5, history.Balance{Account: 0}, history.Balanced{Balance: 2}},
			{6, 7, history.Balance{Account: 1}, history.Balanced{Balance: 0}},
		}},
		{"an acknowledged entry is lost", false, []at{{0, 1, deposit(5, ""), in(a, 5)}, {2, 3, history.Books{}, books(0, 0)}}},
		{"an entry that nobody made", false, []at{{0, 1, history.Books{}, books(5, 0, posted(a, 5, 5, ""))}}},
		{"money that has no entry", false, []at{{0, 1, deposit(5, ""), in(a, 5)}, {2, 3, history.Books{}, books(6, 0, posted(a, 5, 5, ""))}}},
	})
}

func TestLeases(t *testing.T) {
	t.Parallel()
	acquire := history.Acquire{TTL: 100 * time.Millisecond}
	acquired := func(fence int64) history.Acquired { return history.Acquired{Fence: fence} }
	renew := func(fence int64) history.Renew { return history.Renew{Fence: fence, TTL: 100 * time.Millisecond} }
	release := func(fence int64) history.Release { return history.Release{Fence: fence} }
	token := func(fence int64) history.Given { return history.Given{Fence: fence} }
	check(t, history.Leases, []byHand{
		{"one holder, until it gives the lease back", true, []at{
			{0, 1, acquire, acquired(1)},
			{2, 3, acquire, history.Taken{}},
			{4, 5, release(1), history.Released{}},
			{6, 7, acquire, acquired(2)},
			{8, 9, history.Token{}, token(2)},
		}},
		{"two holders", false, []at{{0, 1, acquire, acquired(1)}, {2, 3, acquire, acquired(2)}}},
		{"two holders at once, one token", false, []at{{0, 9, acquire, acquired(1)}, {1, 8, acquire, acquired(1)}}},
		{"the next one after the end", true, []at{{0, 1, acquire, acquired(1)}, {110, 111, acquire, acquired(2)}}},
		{"the next one before the end", false, []at{{0, 1, acquire, acquired(1)}, {90, 91, acquire, acquired(2)}}},
		{"a call that lasts until the end", true, []at{{0, 1, acquire, acquired(1)}, {90, 101, acquire, acquired(2)}}},
		{"a slow call may have been quick", true, []at{{0, 90, acquire, acquired(1)}, {110, 111, acquire, acquired(2)}}},
		{"taken after the end", false, []at{{0, 1, acquire, acquired(1)}, {120, 121, acquire, history.Taken{}}}},
		{"taken by nobody", false, []at{{0, 1, acquire, history.Taken{}}}},
		{"a token that falls", false, []at{
			{0, 1, acquire, acquired(1)},
			{2, 3, release(1), history.Released{}},
			{4, 5, acquire, acquired(1)},
		}},
		{"a token that was given to nobody", false, []at{{0, 1, acquire, acquired(2)}}},
		{"renewed, so that it lasts", true, []at{
			{0, 1, acquire, acquired(1)},
			{90, 91, renew(1), history.Kept{}},
			{150, 151, acquire, history.Taken{}},
			{200, 201, renew(1), history.Lost{}},
		}},
		{"taken over although it was renewed", false, []at{
			{0, 1, acquire, acquired(1)},
			{90, 91, renew(1), history.Kept{}},
			{150, 151, acquire, acquired(2)},
		}},
		{"renewed after its end", false, []at{{0, 1, acquire, acquired(1)}, {120, 121, renew(1), history.Kept{}}}},
		{"renewed by who had it before", false, []at{
			{0, 1, acquire, acquired(1)},
			{110, 111, acquire, acquired(2)},
			{112, 113, renew(1), history.Kept{}},
		}},
		{"given back by who had it before", false, []at{
			{0, 1, acquire, acquired(1)},
			{110, 111, acquire, acquired(2)},
			{112, 113, release(1), history.Released{}},
		}},
		{"lost by who had it before", true, []at{
			{0, 1, acquire, acquired(1)},
			{110, 111, acquire, acquired(2)},
			{112, 113, renew(1), history.Lost{}},
			{114, 115, release(1), history.Lost{}},
		}},
		{"lost without a reason", false, []at{{0, 1, acquire, acquired(1)}, {2, 3, renew(1), history.Lost{}}}},
		{"acquired, perhaps: it was", true, []at{
			{0, 0, acquire, unknown},
			{2, 3, acquire, history.Taken{}},
			{110, 111, acquire, acquired(2)},
		}},
		{"acquired, perhaps: it was not", true, []at{{0, 0, acquire, unknown}, {2, 3, acquire, acquired(1)}, {4, 5, history.Token{}, token(1)}}},
		{"acquired, perhaps, and taken over too soon", false, []at{{0, 0, acquire, unknown}, {2, 3, acquire, acquired(2)}}},
		{"given back, perhaps", true, []at{
			{0, 1, acquire, acquired(1)},
			{2, 0, release(1), unknown},
			{4, 5, acquire, history.Taken{}},
			{6, 7, acquire, acquired(2)},
		}},
		{"nothing was written, but it was", false, []at{
			{0, 1, acquire, nothing},
			{2, 3, acquire, history.Taken{}},
		}},
		{"not renewed, but it was", false, []at{
			{0, 1, acquire, acquired(1)},
			{90, 91, renew(1), nothing},
			{150, 151, acquire, history.Taken{}},
		}},
		{"a token that is lost", false, []at{{0, 1, acquire, acquired(1)}, {2, 3, history.Token{}, token(0)}}},
	})
}

// byHand is a history that is written down, and whether it is a possible one.
type byHand struct {
	name  string
	sound bool
	calls []at
}

func check(t *testing.T, model func() porcupine.Model, histories []byHand) {
	t.Helper()
	for _, tc := range histories {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			h := written(model(), tc.calls)
			want := history.Broken
			if tc.sound {
				want = history.Sound
			}
			require.Equal(t, want, h.Check(patience), "%v", h)
			var page bytes.Buffer
			require.NoError(t, h.Draw(&page, patience))
			require.Contains(t, page.String(), "<html")
		})
	}
}

// The search is exponential in what overlaps, so there is a limit, and what is not decided is not called sound.
func TestUndecided(t *testing.T) {
	t.Parallel()
	var calls []at
	for i := range 40 {
		calls = append(calls, at{0, 0, history.Move{From: history.None, To: 0, Amount: 1 << i}, unknown})
	}
	calls = append(calls, at{1, 2, history.Balance{Account: 0}, history.Balanced{Balance: -1}})
	h := written(history.Accounts(0), calls)
	require.Equal(t, history.Undecided, h.Check(50*time.Millisecond))
}

func TestRecording(t *testing.T) {
	t.Parallel()
	h := history.New("recorded", history.Setups())
	first := h.Call(1, history.Create{Max: 1})
	second := h.Call(2, history.Create{Max: 1})
	h.Return(second, history.Created{ID: a, Status: history.Pending})
	h.Return(first, unknown)
	h.Observe(history.Count{}, history.Counted{Pending: 1})
	ops, open := h.Len()
	require.Equal(t, 3, ops)
	require.Equal(t, 1, open)
	require.Equal(t, history.Forever, first.Return)
	require.Less(t, first.Call, second.Call)
	require.Less(t, second.Call, second.Return)
	require.Equal(t, history.Sound, h.Check(patience))
	require.Contains(t, h.String(), "0: Create{Key: Max:1} -> Unknown{Why:outcome unknown}")
	require.Contains(t, h.String(), fmt.Sprintf("Created{ID:%v Status:pending}", a))
}

func TestAudit(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	conn := testdb.Conn(t, url)
	audit := func() []string {
		broken, err := history.Audit(context.Background(), conn)
		require.NoError(t, err)
		return broken
	}
	testdb.Exec(t, url, `
		INSERT INTO latchkey.accounts (id, owner_id, balance, daily_limit)
		VALUES ('`+a.String()+`', '`+a.String()+`', 3, 5), ('`+b.String()+`', '`+b.String()+`', 2, 0)`, `
		INSERT INTO latchkey.transfers (id, from_account_id, to_account_id, amount) VALUES ('`+c.String()+`', '`+a.String()+`', '`+b.String()+`', 2)`, `
		INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, transfer_id, created_at)
		VALUES ('`+a.String()+`', 'deposit', 5, 5, NULL, now()), ('`+a.String()+`', 'transfer_out', 2, 3, '`+c.String()+`', now() + '1 s'),
			('`+b.String()+`', 'transfer_in', 2, 2, '`+c.String()+`', now())`, `
		INSERT INTO latchkey.setup_requests (user_id, status, created_at, ended_at)
		VALUES ('`+a.String()+`', 'completed', now(), now() + '1 s'), ('`+a.String()+`', 'completed', now() + '1 s', now() + '2 s')`)
	require.Empty(t, audit())
	for name, sql := range map[string]string{
		"more were pending":                    "UPDATE latchkey.setup_requests SET ended_at = ended_at + interval '1 ms'",
		"the balance is not":                   "UPDATE latchkey.accounts SET balance = balance + 1 WHERE id = '" + a.String() + "'",
		"an entry does not follow":             "UPDATE latchkey.entries SET balance_after = balance_after + 1 WHERE kind = 'transfer_in'",
		"more left the account":                "UPDATE latchkey.accounts SET daily_limit = 1 WHERE daily_limit = 5",
		"a transfer does not have":             "UPDATE latchkey.transfers SET amount = 1",
		"somebody has an advisory lock, or wa": "SELECT pg_advisory_xact_lock(1)",
	} {
		tx, err := conn.Begin(t.Context())
		require.NoError(t, err)
		_, err = tx.Exec(t.Context(), sql)
		require.NoError(t, err)
		broken := audit()
		require.Len(t, broken, 1, name)
		require.Contains(t, broken[0], name)
		require.NoError(t, tx.Rollback(t.Context()))
	}
	require.Empty(t, audit())
}
