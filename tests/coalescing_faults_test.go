package tests

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// What a call does that goes wrong, what it must get, and what it leaves behind, alone as in a batch.
func TestCoalescingHarmsNoOther(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	testdb.Exec(t, url, "INSERT INTO public.stubs (owner, label, code) VALUES ('nobody', 'nothing', 'taken')")
	statement := func(sql string, args ...any) func(string) hostQuery {
		return func(owner string) hostQuery { return returning(sql, append([]any{owner}, args...)...) }
	}
	// then runs a statement, and what end does with its result.
	then := func(end func(ctx context.Context, q repository.DBTX, s stub, err error) (stub, error)) func(string) hostQuery {
		return func(owner string) hostQuery {
			return func(ctx context.Context, q repository.DBTX) (stub, error) {
				s, err := returning(insertStub, owner, "odd")(ctx, q)
				return end(ctx, q, s, err)
			}
		}
	}
	instead := func(query hostQuery) func(string) hostQuery { return func(string) hostQuery { return query } }
	twice := returning(insertStub, "nobody", "twice")
	type want func(t *testing.T, e ended[stub])
	state := func(code string, kind error) want {
		return func(t *testing.T, e ended[stub]) {
			t.Helper()
			requireSQLState(t, code, e.err)
			require.NotErrorIs(t, e.err, repository.ErrConnectionLost)
			if kind != nil {
				require.ErrorIs(t, e.err, kind)
			}
		}
	}
	is := func(want error) want {
		return func(t *testing.T, e ended[stub]) {
			t.Helper()
			require.True(t, e.err == want, "%v", e.err) //nolint:errorlint // the very same
			require.Zero(t, e.value)
		}
	}
	says := func(text string) want {
		return func(t *testing.T, e ended[stub]) {
			t.Helper()
			require.ErrorContains(t, e.err, text)
			require.NotErrorAs(t, e.err, new(*pgconn.PgError))
			require.NotErrorIs(t, e.err, repository.ErrConnectionLost)
			require.NotErrorIs(t, e.err, repository.ErrOutcomeUnknown)
		}
	}
	panics := func(t *testing.T, e ended[stub]) {
		t.Helper()
		require.Equal(t, "mine", e.panicked)
	}
	exits := func(t *testing.T, e ended[stub]) {
		t.Helper()
		require.True(t, e.exited)
	}
	const (
		insertOther = "INSERT INTO public.stubs (owner, label, code, parent) SELECT $1, $2, $3, $4::bigint "
		ownXID      = " RETURNING label, pg_catalog.pg_current_xact_id()::text"
	)
	for _, b := range []struct {
		name     string
		query    func(owner string) hostQuery
		want     want
		rows     int  // that it writes
		together bool // the server sees nothing wrong, so that all stay together
	}{
		{"is refused by its own rule", statement(insertOther+"WHERE false"+ownXID, "odd", nil, nil), is(pgx.ErrNoRows), 0, true},
		{"returns an error of its own", then(func(_ context.Context, _ repository.DBTX, s stub, err error) (stub, error) {
			if err == nil {
				err = errFull
			}
			return s, err
		}), is(errFull), 1, true},
		{"has no variable for its row", func(owner string) hostQuery {
			return func(ctx context.Context, q repository.DBTX) (s stub, err error) {
				return s, q.QueryRow(ctx, insertStub, owner, "odd").Scan(new(int), &s.xid)
			}
		}, says("cannot scan"), 1, true},
		{"panics after its statement", then(func(_ context.Context, _ repository.DBTX, s stub, err error) (stub, error) {
			if err == nil {
				panic("mine")
			}
			return s, err
		}), panics, 1, true},
		{"ends its goroutine after its statement", then(func(_ context.Context, _ repository.DBTX, s stub, err error) (stub, error) {
			if err == nil {
				runtime.Goexit()
			}
			return s, err
		}), exits, 1, true},
		{"runs one more statement after its own", then(func(ctx context.Context, q repository.DBTX, s stub, err error) (stub, error) {
			if err == nil {
				s, err = twice(ctx, q)
			}
			return s, err
		}), says(""), 1, true},
		{"divides by zero", statement("SELECT $1, (1 / $2::integer)::text", 0), state("22012", nil), 0, false},
		{"violates a check", statement(insertStub, "bad"), state("23514", nil), 0, false},
		{"meets a row that was written without the lock", statement(insertOther+ownXID, "odd", "taken", nil), state("23505", nil), 0, false},
		{"fails when it is committed", statement(insertOther+ownXID, "odd", nil, -1), state("23503", nil), 0, false},
		{"cannot be parsed", statement("SELECT $1 FROM nowhere.nothing"), state("42P01", nil), 0, false},
		{
			"finds a row locked, and does not wait", statement("SELECT $1, latchkey.raise_error('55P03', 'locked')::text"),
			state("55P03", repository.ErrLockBusy), 0, false,
		},
		{
			"deadlocks", statement("SELECT $1, latchkey.raise_error('40P01', 'deadlock')::text"),
			state("40P01", repository.ErrDeadlock), 0, false,
		},
		{"has an argument that cannot be encoded", statement(insertStub, make(chan int)), says("encode"), 0, false},
		{"swallows the error of its statement", instead(func(ctx context.Context, q repository.DBTX) (stub, error) {
			_, _ = q.Exec(ctx, "SELECT 1 / 0")
			return stub{"fine", "fine"}, nil
		}), state("22012", pgx.ErrTxCommitRollback), 0, false},
		{"runs no statement", instead(func(context.Context, repository.DBTX) (stub, error) { return stub{}, errFull }), is(errFull), 0, false},
		{"runs two statements", then(func(ctx context.Context, q repository.DBTX, _ stub, _ error) (stub, error) {
			return twice(ctx, q)
		}), is(pgx.ErrTxClosed), 1, false},
		{"panics before its statement", instead(func(context.Context, repository.DBTX) (stub, error) { panic("mine") }), panics, 0, false},
		{"ends its goroutine before its statement", instead(func(context.Context, repository.DBTX) (s stub, err error) {
			runtime.Goexit()
			return s, err
		}), exits, 0, false},
	} {
		for place := range 3 {
			t.Run(fmt.Sprintf("that stands beside one that %s, at %d", b.name, place), func(t *testing.T) {
				t.Parallel()
				l := newDesk(t, url)
				labels := []string{"one", "two"}
				calls := []func(context.Context) (stub, error){l.insert("one"), l.insert("two")}
				open := l.gate(t)
				all := enter(t, slices.Insert(calls, place, l.guardQuery(b.query(l.owner)))...)
				open()
				var xids []string
				rows := map[string]int{}
				for i, w := range slices.Delete(slices.Clone(all), place, place+1) {
					got := w.mustWait(t)
					require.Equal(t, labels[i], got.label)
					xids = append(xids, got.xid)
					rows[got.label] = 1
				}
				b.want(t, all[place].wait(t))
				require.Equal(t, b.together, xids[0] == xids[1], "in a failed transaction all run again, each alone")
				require.EqualValues(t, 3+inDatabase, l.done.Load(), "the three, and the gate")

				b.want(t, enter(t, l.guardQuery(b.query(l.owner)))[0].wait(t)) // alone
				if b.rows > 0 {
					rows["odd"] = 2 * b.rows
				}
				require.Equal(t, rows, l.stubs(t), "each once")
				requireNoGoroutine(t)
			})
		}
	}
}

// Refused calls, and those that fail, among others that move money.
func TestCoalescingKeepsMoneyRight(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	for _, fails := range []bool{false, true} {
		t.Run(fmt.Sprintf("in a batch that fails: %t", fails), func(t *testing.T) {
			t.Parallel()
			l := newDesk(t, url)
			id, other := l.open(t, 100, 1000), l.open(t, 0, 0)
			_, err := l.repo.Deposit(t.Context(), repository.DepositParams{AccountID: id, Amount: 1, IdempotencyKey: "before"})
			require.NoError(t, err)
			deposit := func(amount int64, key string) func(context.Context) (*repository.Entry, error) {
				return func(ctx context.Context) (*repository.Entry, error) {
					return l.repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: amount, IdempotencyKey: key})
				}
			}
			withdraw := func(amount int64, key string) func(context.Context) (*repository.Entry, error) {
				return func(ctx context.Context) (*repository.Entry, error) {
					return l.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: amount, IdempotencyKey: key})
				}
			}
			open := l.gate(t, repository.AccountLock(id))
			all := enter(t, // so that it does not matter in which order they run again
				withdraw(60, "a"),
				withdraw(101, ""),
				deposit(5, "b"),
				deposit(5, "b"),
				deposit(math.MaxInt64-800, ""),
				withdraw(60, "a"),
				deposit(2, "before"),
				func(ctx context.Context) (*repository.Entry, error) {
					number := "0"
					if !fails {
						number = "1"
					}
					_, err := repository.GuardQuery(ctx, l.repo, []repository.Lock{repository.AccountLock(id)},
						returning("SELECT (1 / $1::text::integer)::text, ''", number))
					return nil, err
				},
				withdraw(40, "c"),
				deposit(7, ""),
			)
			across := enter(t, func(ctx context.Context) (*repository.Transfer, error) {
				return l.repo.Transfer(ctx, repository.TransferParams{From: other, To: id, Amount: 1})
			})[0]
			open()
			var got []*repository.Entry
			var errs []error
			for _, w := range all {
				e := w.wait(t)
				got, errs = append(got, e.value), append(errs, e.err)
			}
			made := []int{0, 2, 8, 9}
			var ids []uuid.UUID
			for n, i := range made {
				require.NoError(t, errs[i])
				require.Equal(t, []int64{60, 5, 40, 7}[n], got[i].Amount)
				ids = append(ids, got[i].ID)
			}
			var refused *repository.LimitError
			require.ErrorAs(t, errs[1], &refused)
			requireDailyLimit(t, errs[1], refused.Used, 100, 101)
			require.Equal(t, got[2], got[3], "a repeat in one batch")
			requireNoRoom(t, errs[4])
			require.Equal(t, got[0], got[5])
			require.ErrorIs(t, errs[6], repository.ErrIdempotencyConflict)
			if fails {
				requireSQLState(t, "22012", errs[7])
			} else {
				require.NoError(t, errs[7])
				require.EqualValues(t, 60, refused.Used)
			}
			requirePoor(t, across.wait(t).err)
			require.Len(t, l.entries(t, id), 6)
			l.requireBalance(t, 913, id)
			requireSoundOf(t, l.bank, id, other)
			transactions := l.transactions(t, "entries", ids)
			if fails {
				require.Equal(t, []int{1, 1, 1, 1}, sizes(t, transactions))
			} else {
				require.Equal(t, []int{4}, sizes(t, transactions))
			}
		})
	}
	t.Run("and requests, where a writer without the lock was there first", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		holder := hold(t, url, l.key)
		create := l.createSetup(repository.CreateSetupOpts{MaxPending: 3})
		all := enter(t, create, create, create, create, create)
		pids := testdb.WaitForWaiter(t, l.observer, l.key, inDatabase)
		for _, w := range all[:inDatabase] {
			w.cancel()
			require.ErrorIs(t, w.wait(t).err, context.Canceled)
		}
		for _, pid := range pids {
			waitUntilGone(t, l.observer, pid)
		}
		writer := l.insertWithoutLock(t)
		require.NoError(t, holder.Rollback(t.Context()))
		waitUntil(t, l.observer, waitsForAWriter)
		require.NoError(t, writer.Commit(t.Context())) // all run again, and see the row
		refused := 0
		for _, w := range all[inDatabase:] {
			if err := w.wait(t).err; err != nil {
				requireLimit(t, err, 3, 3)
				refused++
			}
		}
		require.Equal(t, 1, refused)
		require.Equal(t, []int{1, 2, 3}, slots(t, l.pool, l.user))
	})
}

// deposit is a call that may give up earlier than the others.
func (l *desk) depositing(id uuid.UUID, p repository.DepositParams) func(context.Context) (*repository.Entry, error) {
	p.AccountID = id
	if p.Amount == 0 {
		p.Amount = 1
	}
	return func(ctx context.Context) (*repository.Entry, error) { return l.repo.Deposit(ctx, p) }
}

func TestCoalescingCallIsCancelled(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	requireCancelled := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
		require.NotErrorIs(t, err, repository.ErrLockBusy)
	}
	t.Run("in the line, and nothing is written", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		open := l.gate(t)
		all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"))
		all[1].cancel()
		requireCancelled(t, all[1].wait(t).err)
		open()
		require.Equal(t, all[0].mustWait(t).xid, all[2].mustWait(t).xid)
		require.Equal(t, map[string]int{"one": 1, "three": 1}, l.stubs(t))
		requireNoGoroutine(t)
	})
	t.Run("while its batch waits for a connection, and nothing is written", func(t *testing.T) {
		t.Parallel()
		asked, given := make(chan struct{}), make(chan struct{})
		var shut atomic.Bool
		l := newDeskOn(t, url, testdb.PoolAt(t, url, func(c *pgxpool.Config) {
			c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
				if shut.CompareAndSwap(true, false) {
					close(asked)
					<-given
				}
				return true, nil
			}
		}))
		open := l.gate(t)
		all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"))
		shut.Store(true)
		open()
		receive(t, asked)
		for _, i := range []int{0, 1} {
			all[i].cancel()
			requireCancelled(t, all[i].wait(t).err)
		}
		close(given)
		all[2].mustWait(t)
		require.Equal(t, map[string]int{"three": 1}, l.stubs(t))
	})
	t.Run("while its batch is on the server, and only its key can tell", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		id := l.open(t, 0, 0)
		open, holder := l.gate(t, repository.AccountLock(id)), hold(t, url, accountKey(t, id))
		all := enter(t, l.depositing(id, repository.DepositParams{IdempotencyKey: "a"}), l.depositing(id, repository.DepositParams{}),
			l.depositing(id, repository.DepositParams{}), l.depositing(id, repository.DepositParams{IdempotencyKey: "b"}))
		open()
		testdb.WaitForWaiter(t, l.observer, accountKey(t, id), 1)
		for _, i := range []int{0, 2} {
			all[i].cancel()
			err := all[i].wait(t).err
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorIs(t, err, repository.ErrOutcomeUnknown)
			require.Equal(t, i == 0, repository.IsRetryable(err))
		}
		require.NoError(t, holder.Rollback(t.Context()))
		written := l.transactions(t, "entries", []uuid.UUID{all[1].mustWait(t).ID, all[3].mustWait(t).ID})
		require.Equal(t, []int{2}, sizes(t, written))
		again, err := l.depositing(id, repository.DepositParams{IdempotencyKey: "a"})(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, 1, again.BalanceAfter, "it was the first of the batch")
		l.requireBalance(t, 4, id)
	})
	t.Run("while setups like it are inserted, and they have their own", func(t *testing.T) {
		t.Parallel()
		const limit, key = 50, 79
		url := testdb.URL(t)
		testdb.Exec(t, url, waitingInserts(limit, key)...)
		l := newDesk(t, url)
		first, second := hold(t, url, l.key), hold(t, url, key)
		before, alike := l.createSetup(repository.CreateSetupOpts{MaxPending: limit + 1}), l.createSetup(repository.CreateSetupOpts{MaxPending: limit})
		all := enter(t, before, before, alike, alike, alike)
		testdb.WaitForWaiter(t, l.observer, l.key, inDatabase)
		require.NoError(t, first.Rollback(t.Context()))
		testdb.WaitForWaiter(t, l.observer, key, 1)
		all[3].cancel()
		require.ErrorIs(t, all[3].wait(t).err, repository.ErrOutcomeUnknown)
		require.NoError(t, second.Rollback(t.Context()))
		var ids []uuid.UUID
		for _, i := range []int{2, 4} {
			s := all[i].mustWait(t)
			require.Equal(t, s, l.get(t, s.ID))
			ids = append(ids, s.ID)
		}
		require.Equal(t, []int{2}, sizes(t, l.transactions(t, "setup_requests", ids)))
		require.Equal(t, []int{3, 5}, []int{l.slot(t, ids[0]), l.slot(t, ids[1])})
		require.Equal(t, []int{1, 2, 3, 4, 5}, slots(t, l.pool, l.user))
	})
	t.Run("and does not run again when its batch fails", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		open, holder := l.gate(t), hold(t, url, itemKey(t, l.owner))
		all := enter(t, l.insert("one"), l.guardQuery(returning("SELECT (1 / $1::integer)::text, ''", 0)), l.insert("three"))
		open()
		testdb.WaitForWaiter(t, l.observer, itemKey(t, l.owner), 1)
		all[0].cancel()
		require.ErrorIs(t, all[0].wait(t).err, repository.ErrOutcomeUnknown)
		require.NoError(t, holder.Rollback(t.Context()))
		requireSQLState(t, "22012", all[1].wait(t).err)
		all[2].mustWait(t)
		enter(t, l.insert("four"))[0].mustWait(t)
		require.Equal(t, map[string]int{"three": 1, "four": 1}, l.stubs(t))
	})
	t.Run("as all others of its batch are, and nobody waits on the server any more", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		open, key := l.gate(t), itemKey(t, l.owner)
		holder := hold(t, url, key)
		all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"))
		open()
		pids := testdb.WaitForWaiter(t, l.observer, key, 1)
		for _, w := range all {
			w.cancel()
			require.ErrorIs(t, w.wait(t).err, repository.ErrOutcomeUnknown)
		}
		started := time.Now()
		waitUntilGone(t, l.observer, pids[0])
		require.Less(t, time.Since(started), soon)
		require.NoError(t, holder.Rollback(t.Context()))
		enter(t, l.insert("four"))[0].mustWait(t)
		require.Equal(t, map[string]int{"four": 1}, l.stubs(t))
		requireNoGoroutine(t)
	})
}

// warm lets both connections of the pool prepare what a deposit needs, and returns an account with 1 in it.
func (l *desk) warm(t *testing.T) uuid.UUID {
	t.Helper()
	l.open(t, 0, 1)
	one, err := l.pool.Acquire(t.Context())
	require.NoError(t, err)
	defer one.Release()
	return l.open(t, 0, 1)
}

// until is a context that says when it will end. The call is over before that, so it need not.
type until struct {
	context.Context
	deadline time.Time
}

func (u until) Deadline() (time.Time, bool) { return u.deadline, true }

func TestCoalescingCallsHaveTheirOwnTime(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	const short = 500 * time.Millisecond // in which the calls come to the server
	type deadline struct {
		lock, context time.Duration
		where         string
	}
	long, first := deadline{}, deadline{lock: short, where: repository.WhereAdvisory}
	for name, tc := range map[string]struct {
		calls []deadline
		sizes []int // of what is left, when it is done
	}{
		"a short one behind a long one": {[]deadline{long, first, long, long}, []int{1, 2}},
		"a shorter one behind both": {
			[]deadline{long, first, {lock: short / 2, where: repository.WhereQueue}, long, long}, []int{1, 2},
		},
		"a short one before long ones":             {[]deadline{first, long, long}, []int{2}},
		"a short context behind a long one":        {[]deadline{long, {context: short, where: repository.WhereAdvisory}, long}, []int{1, 1}},
		"a short context before long ones":         {[]deadline{{context: short, where: repository.WhereAdvisory}, long, long}, []int{2}},
		"two short ones, which are in one batch":   {[]deadline{first, {lock: short}, long, long}, []int{2}},
		"one that is shorter than the short first": {[]deadline{{lock: 2 * short}, first, long, long}, []int{2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newDeskOn(t, url, testdb.PoolAt(t, url, maxConns(inDatabase)))
			id := l.warm(t)
			open, holder := l.gate(t, repository.AccountLock(id)), hold(t, url, accountKey(t, id))
			calls := make([]func(context.Context) (*repository.Entry, error), len(tc.calls))
			for i, c := range tc.calls {
				calls[i] = func(ctx context.Context) (*repository.Entry, error) {
					if c.context > 0 {
						ctx = until{ctx, time.Now().Add(c.context)}
					}
					return l.depositing(id, repository.DepositParams{LockTimeout: c.lock})(ctx)
				}
			}
			started := time.Now()
			all := enter(t, calls...)
			open()
			for i, c := range tc.calls {
				if c == long {
					continue
				}
				err := all[i].wait(t).err // the key is held all the time
				busy := requireBusy(t, err, c.where)
				require.GreaterOrEqual(t, busy.Waited, max(c.lock, c.context/2))
				require.Equal(t, c.context > 0, errors.Is(err, context.DeadlineExceeded))
				require.NotErrorIs(t, err, repository.ErrOutcomeUnknown)
			}
			require.Less(t, time.Since(started), soon)
			for i, c := range tc.calls {
				if c == long {
					require.Empty(t, all[i].ended)
				}
			}
			require.NoError(t, holder.Rollback(t.Context()))
			var ids []uuid.UUID
			for i, c := range tc.calls {
				if c == long {
					ids = append(ids, all[i].mustWait(t).ID)
				}
			}
			require.Equal(t, tc.sizes, sizes(t, l.transactions(t, "entries", ids)))
			l.requireBalance(t, int64(1+len(ids)), id)
		})
	}
	t.Run("also while they wait for a row, and the one whose time is over says so", func(t *testing.T) {
		t.Parallel()
		l := newDeskOn(t, url, testdb.PoolAt(t, url, maxConns(inDatabase)))
		id := l.warm(t)
		writer := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := writer.Exec(t.Context(), "UPDATE latchkey.accounts SET balance = 0 WHERE id = $1", id)
		require.NoError(t, err)
		open := l.gate(t, repository.AccountLock(id))
		all := enter(t, l.depositing(id, repository.DepositParams{LockTimeout: short}),
			l.depositing(id, repository.DepositParams{}), l.depositing(id, repository.DepositParams{}))
		open()
		requireBusy(t, all[0].wait(t).err, repository.WhereRow)
		require.NoError(t, writer.Rollback(t.Context()))
		all[1].mustWait(t)
		all[2].mustWait(t)
		l.requireBalance(t, 3, id)
	})
	t.Run("and short ones do not make long ones fail, however many there are", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url, repository.WithCoalescing(8))
		id := l.open(t, 0, 0)
		holder := hold(t, url, accountKey(t, id))
		calls := make([]func(context.Context) (*repository.Entry, error), 120)
		timeout := func(i int) time.Duration {
			if i%4 == 3 {
				return 0
			}
			return time.Duration(20+i*37%180) * time.Millisecond
		}
		for i := range calls {
			calls[i] = l.depositing(id, repository.DepositParams{LockTimeout: timeout(i)})
		}
		all := enter(t, calls...)
		for i, w := range all {
			if timeout(i) > 0 {
				require.GreaterOrEqual(t, requireBusy(t, w.wait(t).err, "").Waited, timeout(i))
			}
		}
		require.NoError(t, holder.Rollback(t.Context()))
		for i, w := range all {
			if timeout(i) == 0 {
				w.mustWait(t)
			}
		}
		l.requireBalance(t, int64(len(all)/4), id)
		requireNoGoroutine(t)
	})
}

// sleepy is the context of a call that comes to wait for its end only after a while.
type sleepy struct {
	context.Context
	awake <-chan struct{}
}

func (s sleepy) Done() <-chan struct{} {
	done := s.Context.Done()
	<-s.awake
	return done
}

// The goroutine of a call may find that the batch has ended, and that its time is over, both at once.
func TestCoalescingCallThatWasDoneIsNotBusy(t *testing.T) {
	t.Parallel()
	l := newDesk(t, testdb.URL(t))
	id := l.open(t, 0, 0)
	open := l.gate(t, repository.AccountLock(id))
	const timeout = time.Second
	calls, awake := make([]func(context.Context) (*repository.Entry, error), 20), make(chan struct{})
	for i := range calls {
		calls[i] = func(ctx context.Context) (*repository.Entry, error) {
			return l.depositing(id, repository.DepositParams{LockTimeout: timeout})(sleepy{ctx, awake})
		}
	}
	all := enter(t, calls...)
	over := time.After(timeout)
	open()
	waitUntil(t, l.observer, "SELECT count(*) = $2 FROM latchkey.entries WHERE account_id = $1", id, len(calls))
	receive(t, over)
	close(awake)
	for _, w := range all {
		w.mustWait(t)
	}
	l.requireBalance(t, int64(len(calls)), id)
}

func TestCoalescingQueryHasTheContextOfItsCall(t *testing.T) {
	t.Parallel()
	l := newDesk(t, stubsURL(t))
	type tenant struct{}
	calls := make([]func(context.Context) (stub, error), 3)
	for i := range calls {
		calls[i] = func(ctx context.Context) (stub, error) {
			return l.guardQuery(func(ctx context.Context, q repository.DBTX) (stub, error) {
				return returning(insertStub, l.owner, ctx.Value(tenant{}))(ctx, q)
			})(context.WithValue(ctx, tenant{}, fmt.Sprint(i)))
		}
	}
	open := l.gate(t)
	all := enter(t, calls...)
	open()
	for i, w := range all {
		require.Equal(t, fmt.Sprint(i), w.mustWait(t).label)
	}
}

func TestCoalescingSurvivesItsConnection(t *testing.T) {
	t.Parallel()
	t.Run("that is ended while the batch waits for the lock: nothing was written, and all run again", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, stubsURL(t))
		open, key := l.gate(t), itemKey(t, l.owner)
		holder := hold(t, l.url, key)
		all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"))
		open()
		pid := testdb.WaitForWaiter(t, l.observer, key, 1)[0]
		_, err := l.observer.Exec(t.Context(), "SELECT pg_catalog.pg_terminate_backend($1)", int64(pid))
		require.NoError(t, err)
		waitUntilGone(t, l.observer, pid)
		require.Len(t, testdb.WaitForWaiter(t, l.observer, key, inDatabase), inDatabase)
		require.NoError(t, holder.Rollback(t.Context()))
		require.Equal(t, []int{1, 1, 1}, sizes(t, []string{all[0].mustWait(t).xid, all[1].mustWait(t).xid, all[2].mustWait(t).xid}))
		require.Equal(t, map[string]int{"one": 1, "two": 1, "three": 1}, l.stubs(t))
	})
	t.Run("that breaks with COMMIT on the way: no call knows its outcome, and keys tell", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		w := setupWired(t, url)
		l := newDeskOn(t, url, w.pool)
		for _, cut := range wholeCuts {
			id := l.open(t, 0, 1) // and now the connection is warm
			pid := pidOf(t, l.pool)
			calls := []func(context.Context) (*repository.Entry, error){
				l.depositing(id, repository.DepositParams{IdempotencyKey: "a"}), l.depositing(id, repository.DepositParams{}),
				l.depositing(id, repository.DepositParams{IdempotencyKey: "b"}),
			}
			open := l.gate(t, repository.AccountLock(id))
			all := enter(t, calls...)
			w.proxy.On(once(cut.at, cut.action))
			open()
			for i, w := range all {
				err := w.wait(t).err
				require.ErrorIs(t, err, repository.ErrOutcomeUnknown, cut.name)
				require.Equal(t, i != 1, repository.IsRetryable(err), cut.name)
			}
			waitUntilGone(t, l.observer, pid)
			balance := int64(1)
			if cut.written {
				balance += 3
			}
			l.requireBalance(t, balance, id)
			for _, i := range []int{2, 0} {
				_, err := calls[i](t.Context())
				require.NoError(t, err, cut.name)
			}
			l.requireBalance(t, max(balance, 3), id)
			requireSoundOf(t, l.bank, id)
		}
	})
}
