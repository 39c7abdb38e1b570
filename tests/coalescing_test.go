package tests

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	"runtime/pprof"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// stubs is a host's table, in which a statement can go wrong in many ways.
const stubs = `CREATE TABLE public.stubs (
	id     bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
	owner  text NOT NULL,
	label  text NOT NULL CHECK (label <> 'bad'),
	code   text UNIQUE,
	parent bigint REFERENCES public.stubs DEFERRABLE INITIALLY DEFERRED)`

// insertStub returns what it was given, and in which transaction it ran.
const insertStub = "INSERT INTO public.stubs (owner, label) VALUES ($1, $2) RETURNING label, pg_catalog.pg_current_xact_id()::text"

type stub struct{ label, xid string }

// waitsForAWriter tells whether a session of this database waits for the transaction of another.
const waitsForAWriter = `SELECT EXISTS (SELECT FROM pg_catalog.pg_stat_activity
	WHERE datname = pg_catalog.current_database() AND wait_event = 'transactionid')`

type hostQuery = func(context.Context, repository.DBTX) (stub, error)

// returning is a query of a host's that runs one statement.
func returning(sql string, args ...any) hostQuery {
	return func(ctx context.Context, q repository.DBTX) (s stub, err error) {
		err = q.QueryRow(ctx, sql, args...).Scan(&s.label, &s.xid)
		return s, err
	}
}

// desk is a service whose calls wait in line, on more connections than it needs for that.
type desk struct {
	*bank
	owner string
	done  atomic.Int64 // calls that the observer was told of
}

func newDesk(t *testing.T, url string, opts ...repository.Option) *desk {
	t.Helper()
	return newDeskOn(t, url, testdb.PoolAt(t, url, maxConns(4)), opts...)
}

func newDeskOn(t *testing.T, url string, pool *pgxpool.Pool, opts ...repository.Option) *desk {
	t.Helper()
	f := &fixture{url: url, pool: pool, user: uuid.New(), observer: testdb.Conn(t, url)}
	f.key = setupKey(t, f.user)
	l := &desk{bank: &bank{f, noon(t, f.observer)}, owner: uuid.NewString()}
	var err error
	l.repo, err = repository.New(pool, append(opts,
		repository.WithLockTimeout(patience), repository.WithHoldTimeout(patience),
		repository.WithObserver(repository.Observer{CallDone: func(context.Context, repository.CallDone) { l.done.Add(1) }}))...)
	require.NoError(t, err)
	// The calls of a test come in its order, which they would lose while all of them wait for the proof of the first use.
	_, err = l.repo.Check(t.Context())
	require.NoError(t, err)
	l.done.Store(0)
	return l
}

func stubsURL(t *testing.T) string {
	t.Helper()
	url := testdb.URL(t)
	testdb.Exec(t, url, stubs)
	return url
}

// guardQuery is a call under the owner's lock.
func (l *desk) guardQuery(query hostQuery) func(context.Context) (stub, error) {
	return func(ctx context.Context) (stub, error) {
		return repository.GuardQuery(ctx, l.repo, []repository.Lock{items.Exclusive(l.owner)}, query)
	}
}

func (l *desk) insert(label string) func(context.Context) (stub, error) {
	return l.guardQuery(returning(insertStub, l.owner, label))
}

// stubs returns how many rows of the owner's there are of each label.
func (l *desk) stubs(t *testing.T) map[string]int {
	t.Helper()
	rows, err := l.observer.Query(t.Context(), "SELECT label FROM public.stubs WHERE owner = $1", l.owner)
	require.NoError(t, err)
	labels, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	counts := map[string]int{}
	for _, label := range labels {
		counts[label]++
	}
	return counts
}

func (l *desk) createSetup(o repository.CreateSetupOpts) func(context.Context) (*repository.SetupRequest, error) {
	return func(ctx context.Context) (*repository.SetupRequest, error) {
		return l.repo.CreateSetup(ctx, l.user, &o)
	}
}

// transactions returns which transaction wrote each of the rows.
func (l *desk) transactions(t *testing.T, table string, ids []uuid.UUID) []string {
	t.Helper()
	all := make([]string, len(ids))
	for i, id := range ids {
		require.NoError(t, l.observer.QueryRow(t.Context(), "SELECT xmin::text FROM latchkey."+table+" WHERE id = $1", id).Scan(&all[i]))
	}
	return all
}

// sizes returns how many of the calls, in their order, ran in each transaction.
func sizes(t *testing.T, transactions []string) (all []int) {
	t.Helper()
	for i, x := range transactions {
		if i > 0 && transactions[i-1] == x {
			all[len(all)-1]++
			continue
		}
		require.NotContains(t, transactions[:i], x, "a transaction has its calls in their order")
		all = append(all, 1)
	}
	return all
}

// gate takes all turns on the owner's lock, or on other locks, and sends nothing, until open is called.
func (l *desk) gate(t *testing.T, locks ...repository.Lock) (open func()) {
	t.Helper()
	if locks == nil {
		locks = []repository.Lock{items.Exclusive(l.owner)}
	}
	errGate := errors.New("the gate is opened")
	entered, opened := make(chan struct{}, inDatabase), make(chan struct{})
	guard := func(ctx context.Context) (struct{}, error) {
		return struct{}{}, l.repo.Guard(ctx, locks, func(ctx context.Context, _ *repository.Tx) error {
			entered <- struct{}{}
			select {
			case <-opened:
			case <-ctx.Done(): // the test has failed
			}
			return errGate
		})
	}
	all := enter(t, guard, guard)
	for range min(inDatabase, l.pool.Config().MaxConns) {
		receive(t, entered) // of one connection, the other guard waits for that
	}
	return func() {
		t.Helper()
		close(opened)
		for _, w := range all {
			require.ErrorIs(t, w.wait(t).err, errGate)
		}
	}
}

func receive[T any](t *testing.T, from <-chan T) (value T) {
	t.Helper()
	select {
	case value = <-from:
	case <-time.After(patience):
		require.FailNow(t, "waited in vain")
	}
	return value
}

// watched is a context that tells when a call first waits for its end. Of a call with locks it is when it has its place
// in the line, or has passed it. A context that is made of it may ask earlier.
type watched struct {
	context.Context
	waits func()
}

func (w watched) Done() <-chan struct{} {
	w.waits()
	return w.Context.Done()
}

// ended is what became of a call.
type ended[T any] struct {
	value    T
	err      error
	panicked any
	exited   bool // its goroutine
}

// waiting is a call that was started.
type waiting[T any] struct {
	cancel context.CancelFunc
	ended  chan ended[T]
}

func (w *waiting[T]) wait(t *testing.T) ended[T] {
	t.Helper()
	return receive(t, w.ended)
}

// mustWait returns the result of a call that succeeds.
func (w *waiting[T]) mustWait(t *testing.T) T {
	t.Helper()
	e := w.wait(t)
	require.NoError(t, e.err)
	require.Nil(t, e.panicked)
	require.False(t, e.exited)
	return e.value
}

// enter starts the calls one after the other, each when the one before has its place in the line.
func enter[T any](t *testing.T, calls ...func(context.Context) (T, error)) []*waiting[T] {
	t.Helper()
	all := make([]*waiting[T], len(calls))
	for i, call := range calls {
		ctx, cancel := context.WithCancel(t.Context())
		w, placed := &waiting[T]{cancel, make(chan ended[T], 1)}, make(chan struct{})
		var once sync.Once
		place := func() { once.Do(func() { close(placed) }) }
		go pprof.Do(watched{ctx, place}, pprof.Labels("latchkey", t.Name()), func(ctx context.Context) {
			e := ended[T]{exited: true}
			defer func() {
				e.panicked = recover()
				e.exited = e.exited && e.panicked == nil
				w.ended <- e
				place()
			}()
			e.value, e.err = call(ctx)
			e.exited = false
		})
		receive(t, placed)
		all[i] = w
	}
	return all
}

// requireNoGoroutine requires that nothing goes on that a call of the test has started.
func requireNoGoroutine(t *testing.T) {
	t.Helper()
	label := regexp.MustCompile(`# labels: \{"latchkey":` + regexp.QuoteMeta(strconv.Quote(t.Name())) + `\}[^\0]*?\n\n`)
	var all bytes.Buffer
	require.Eventually(t, func() bool {
		all.Reset()
		require.NoError(t, pprof.Lookup("goroutine").WriteTo(&all, 1))
		return !label.Match(all.Bytes())
	}, patience, time.Millisecond)
}

func TestCoalescingRunsWaitingCallsAsOneTransaction(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	for _, tc := range []struct {
		maxBatch int
		want     []int
	}{{64, []int{1, 1, 6}}, {4, []int{1, 1, 4, 2}}, {2, []int{1, 1, 2, 2, 2}}, {1, []int{1, 1, 1, 1, 1, 1, 1, 1}}, {0, []int{1, 1, 1, 1, 1, 1, 1, 1}}} {
		t.Run(fmt.Sprintf("of at most %d, each with its own row", tc.maxBatch), func(t *testing.T) {
			t.Parallel()
			l := newDesk(t, url, repository.WithCoalescing(tc.maxBatch))
			holder := hold(t, url, l.key)
			calls := make([]func(context.Context) (*repository.SetupRequest, error), 8)
			for i := range calls {
				calls[i] = l.createSetup(repository.CreateSetupOpts{MaxPending: 8, IdempotencyKey: fmt.Sprint(i)})
			}
			all := enter(t, calls...)
			require.Len(t, testdb.WaitForWaiter(t, l.observer, l.key, inDatabase), inDatabase)
			require.EqualValues(t, inDatabase, l.pool.Stat().AcquiredConns(), "the others hold no connection")
			require.NoError(t, holder.Rollback(t.Context()))
			ids := make([]uuid.UUID, len(all))
			for i, w := range all {
				s := w.mustWait(t)
				require.Equal(t, fmt.Sprint(i), s.IdempotencyKey)
				require.Equal(t, s, l.get(t, s.ID))
				ids[i] = s.ID
			}
			transactions := l.transactions(t, "setup_requests", ids)
			require.Equal(t, tc.want, sizes(t, transactions))
			for i := range transactions {
				if i > 0 && transactions[i] == transactions[i-1] {
					require.Equal(t, l.slot(t, ids[i-1])+1, l.slot(t, ids[i]), "first come, first served")
				}
			}
			require.EqualValues(t, 2*len(calls), l.done.Load(), "those calls, and as many to GetSetup")
			requireNoGoroutine(t)
		})
	}
	t.Run("deposits, withdrawals and a host's statement on one account alike", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		id := l.open(t, 0, 100)
		open := l.gate(t, repository.AccountLock(id))
		entry := func(amount int64) func(context.Context) (any, error) {
			return func(ctx context.Context) (any, error) {
				if amount > 0 {
					return l.repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: amount})
				}
				return l.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: -amount})
			}
		}
		all := enter(t, entry(10), entry(-110), entry(-1), entry(7), func(ctx context.Context) (any, error) {
			return repository.GuardQuery(ctx, l.repo, []repository.Lock{repository.AccountLock(id)}, returning(
				"SELECT balance::text, pg_catalog.pg_current_xact_id()::text FROM latchkey.accounts WHERE id = $1", id))
		}, entry(-8), entry(3))
		open()
		var ids []uuid.UUID
		var host stub
		for i, want := range []struct{ amount, after int64 }{{10, 110}, {110, 0}, {}, {7, 7}, {}, {}, {3, 10}} {
			e := all[i].wait(t)
			switch {
			case i == 4:
				require.NoError(t, e.err)
				host = e.value.(stub)
				require.Equal(t, "7", host.label)
			case want.amount == 0:
				requirePoor(t, e.err)
				require.Nil(t, e.value)
			default:
				require.NoError(t, e.err)
				got := e.value.(*repository.Entry)
				require.Equal(t, want.amount, got.Amount)
				require.Equal(t, want.after, got.BalanceAfter)
				ids = append(ids, got.ID)
			}
		}
		transactions := l.transactions(t, "entries", ids)
		require.Equal(t, []int{4}, sizes(t, transactions))
		require.Equal(t, transactions[0], host.xid, "the host's ran with them")
		requireSoundOf(t, l.bank, id)
	})
	t.Run("but transfers only where they are between the same accounts", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		accounts := []uuid.UUID{l.open(t, 0, 100), l.open(t, 0, 100), l.open(t, 0, 100)}
		slices.SortFunc(accounts, func(a, b uuid.UUID) int { return cmp.Compare(accountKey(t, a), accountKey(t, b)) })
		a, b, c := accounts[0], accounts[1], accounts[2]
		open := l.gate(t, repository.AccountLock(a), repository.AccountLock(b), repository.AccountLock(c))
		before := enter(t, l.depositing(a, repository.DepositParams{Amount: 20}))[0]
		transfer := func(from, to uuid.UUID, amount int64) func(context.Context) (uuid.UUID, error) {
			return func(ctx context.Context) (uuid.UUID, error) {
				f, err := l.repo.Transfer(ctx, repository.TransferParams{From: from, To: to, Amount: amount})
				if err != nil {
					return uuid.Nil, err
				}
				if f.From != from || f.To != to || f.Amount != amount {
					return uuid.Nil, fmt.Errorf("%v is another's", f)
				}
				return f.ID, nil
			}
		}
		all := enter(t, transfer(a, b, 1), transfer(b, a, 2), transfer(a, c, 3), transfer(a, b, 4), transfer(b, a, 5), transfer(a, b, 6))
		open()
		ids := make([]uuid.UUID, len(all))
		for i, w := range all {
			ids[i] = w.mustWait(t)
		}
		transactions := l.transactions(t, "transfers", ids)
		require.Equal(t, []int{2, 1}, sizes(t, transactions)[:2])
		require.NotContains(t, transactions, l.transactions(t, "entries", []uuid.UUID{before.mustWait(t).ID})[0])
		l.requireBalance(t, 120-1+2-3-4+5-6, a)
		requireSoundOf(t, l.bank, append(ids, accounts...)...)
	})
	// The second has its turn on the other account before the first has both of its turns.
	t.Run("but not transfers that wait for one of their accounts only", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		a, b := l.open(t, 0, 100), l.open(t, 0, 100)
		if accountKey(t, b) < accountKey(t, a) {
			a, b = b, a
		}
		transfer := func(ctx context.Context) (*repository.Transfer, error) {
			return l.repo.Transfer(ctx, repository.TransferParams{From: a, To: b, Amount: 1})
		}
		holder, deposit := hold(t, url, accountKey(t, a)), l.depositing(a, repository.DepositParams{})
		deposits := enter(t, deposit, deposit)
		transfers := enter(t, transfer, transfer)
		testdb.WaitForWaiter(t, l.observer, accountKey(t, a), inDatabase)
		require.NoError(t, holder.Rollback(t.Context()))
		for _, w := range deposits {
			w.mustWait(t)
		}
		for _, w := range transfers {
			w.mustWait(t)
		}
		l.requireBalance(t, 100, a)
		l.requireBalance(t, 102, b)
	})
}

func TestCoalescingLineIsBounded(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	w := setupWired(t, url, maxConns(inDatabase+1))
	l := newDeskOn(t, url, w.pool, repository.WithMaxWaiters(3))
	open := l.gate(t)
	all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"))
	w.proxy.Reset()
	for _, cut := range []time.Duration{2 * patience, patience / 2} {
		ctx, cancel := context.WithTimeout(t.Context(), cut)
		_, err := l.insert("one too many")(ctx)
		cancel()
		require.Less(t, requireBusy(t, err, repository.WhereQueue).Waited, soon)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "no time has run out")
	}
	require.Zero(t, w.proxy.Traffic())
	_, err := l.repo.CreateSetup(t.Context(), l.user, nil)
	require.NoError(t, err, "another key has another line")
	all[1].cancel()
	require.ErrorIs(t, all[1].wait(t).err, context.Canceled)
	all = append(all, enter(t, l.insert("four"))...)
	open()
	for _, i := range []int{0, 2, 3} {
		all[i].mustWait(t)
	}
	require.Equal(t, map[string]int{"one": 1, "three": 1, "four": 1}, l.stubs(t))
}

func TestCoalescingTryDoesNotWaitInTheLine(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	w := setupWired(t, url, maxConns(2*inDatabase))
	l := newDeskOn(t, url, w.pool)
	holder := hold(t, url, l.key)
	all := enter(t, l.createSetup(repository.CreateSetupOpts{MaxPending: 2}), l.createSetup(repository.CreateSetupOpts{MaxPending: 2}))
	testdb.WaitForWaiter(t, l.observer, l.key, inDatabase)
	open := l.gate(t)
	w.proxy.Reset()
	_, err := l.repo.TryCreateSetup(t.Context(), l.user, nil)
	require.Less(t, requireBusy(t, err, repository.WhereQueue).Waited, soon)
	for _, locks := range [][]repository.Lock{
		{items.Exclusive(l.owner)},
		{items.Shared("another"), items.Shared(l.owner)},
	} {
		err = l.repo.TryGuard(t.Context(), locks, func(context.Context, *repository.Tx) error { return errors.New("called") })
		require.Less(t, requireBusy(t, err, repository.WhereQueue).Waited, soon)
	}
	require.Zero(t, w.proxy.Traffic())
	open()
	require.NoError(t, holder.Rollback(t.Context()))
	for _, w := range all {
		w.mustWait(t)
	}
	_, err = l.repo.TryCreateSetup(t.Context(), l.user, &repository.CreateSetupOpts{MaxPending: 3})
	require.NoError(t, err)
}

// callersOf returns callers of one Repository, or of several, each of them as one process has it.
func callersOf(t *testing.T, url string, callers, processes int, opts ...repository.Option) racers {
	t.Helper()
	repos, pools := make([]*repository.Repository, processes), make([]*pgxpool.Pool, processes)
	for i := range repos {
		pools[i] = testdb.PoolAt(t, url, maxConns(4))
		var err error
		repos[i], err = repository.New(pools[i], append(opts, repository.WithLockTimeout(2*patience))...)
		require.NoError(t, err)
	}
	all := make(racers, callers)
	for i := range all {
		all[i] = racer{i, pools[i%processes], repos[i%processes]}
	}
	return all
}

// gathering is a way in which callers race: of a process each, so that they meet at the server only, or of a few.
type gathering struct{ processes, maxBatch int }

var gatherings = map[string]gathering{
	"of a process each":            {},
	"of two processes, in batches": {2, repository.DefaultMaxBatch},
	"of two processes, one by one": {2, 0},
}

func (g gathering) racers(t *testing.T, url string, callers int) racers {
	t.Helper()
	if g.processes == 0 {
		return newRacers(t, url, callers)
	}
	return callersOf(t, url, callers, g.processes, repository.WithCoalescing(g.maxBatch))
}

func TestCoalescingKeepsLimitsExact(t *testing.T) {
	t.Parallel()
	const callers = 200
	keyOf := func(n int) string { // those without one are inserted alike
		if n%8 < 2 {
			return fmt.Sprint(n)
		}
		return ""
	}
	for _, processes := range []int{1, 2} {
		for _, maxBatch := range []int{0, 7, 64} {
			t.Run(fmt.Sprintf("in %d processes, in batches of %d", processes, maxBatch), func(t *testing.T) {
				t.Parallel()
				url := testdb.URL(t)
				testdb.Exec(t, url, dropPendingKey)
				r, observer := callersOf(t, url, callers, processes, repository.WithCoalescing(maxBatch)), testdb.Conn(t, url)
				for _, limit := range []int{1, 2, 3, 10, 100} {
					user, created := uuid.New(), make([]*repository.SetupRequest, callers)
					holder := hold(t, url, setupKey(t, user)) // until calls of each process wait for it
					race := inBackground(t, func() ([]error, error) {
						return r.atOnce(func(c racer) (err error) {
							created[c.n], err = c.repo.CreateSetup(t.Context(), user,
								&repository.CreateSetupOpts{MaxPending: limit, IdempotencyKey: keyOf(c.n)})
							return err
						}), nil
					})
					require.Len(t, testdb.WaitForWaiter(t, observer, setupKey(t, user), inDatabase*processes), inDatabase*processes)
					require.NoError(t, holder.Rollback(t.Context()))
					errs, _ := race()
					requireExactly(t, errs, limit)
					progress := make([]int, processes)
					for n, s := range created {
						if s == nil {
							continue
						}
						progress[n%processes]++
						row, err := r[0].repo.GetSetup(t.Context(), s.ID)
						require.NoError(t, err)
						require.Equal(t, row, s)
						require.Equal(t, keyOf(n), s.IdempotencyKey)
						require.Equal(t, user, s.UserID)
					}
					if limit > inDatabase {
						require.NotContains(t, progress, 0)
					}
					require.Len(t, slots(t, r[0].pool, user), limit)
					var transactions int
					require.NoError(t, observer.QueryRow(t.Context(),
						"SELECT count(DISTINCT xmin::text) FROM latchkey.setup_requests WHERE user_id = $1", user).Scan(&transactions))
					if maxBatch == 0 {
						require.Equal(t, limit, transactions)
					} else if limit == 100 {
						require.Less(t, transactions, limit)
					}
				}
			})
		}
	}
}

// Setups without a key and an event, of one user and limit, are one statement if they run together. What comes of it is
// the same as of one after the other: wherever the pending ones have their slots, and whatever runs in between.
func TestCoalescingInsertsAlikeAtOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			insertAlike(t, mode)
		})
	}
}

func insertAlike(t *testing.T, mode pgx.QueryExecMode) {
	t.Helper()
	url := testdb.URL(t)
	l := newDeskOn(t, url, testdb.PoolAt(t, url, maxConns(4), withExecMode(mode)))
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	const calls, limits, mostSlots = 16, 2, 12
	for round := range 20 {
		l.user = uuid.New()
		l.key = setupKey(t, l.user)
		pending := 0
		for slot := 1; slot <= mostSlots; slot++ {
			if random.IntN(2) == 0 {
				continue
			}
			pending++
			_, err := l.observer.Exec(t.Context(),
				"INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending) VALUES ($1, $2, $2)", l.user, slot)
			require.NoError(t, err)
		}
		least := 1 + random.IntN(pending+calls)
		opts := make([]repository.CreateSetupOpts, calls)
		creates := make([]func(context.Context) (*repository.SetupRequest, error), calls)
		for i := range opts {
			if opts[i].MaxPending = least + max(0, random.IntN(2*limits)-limits); i < inDatabase {
				opts[i].MaxPending = 100 // either may be first
			}
			switch random.IntN(10) {
			case 0:
				opts[i].IdempotencyKey = fmt.Sprint(i)
			case 1:
				opts[i].Event = &repository.Event{Topic: "setup"}
			}
			creates[i] = l.createSetup(opts[i])
		}
		holder := hold(t, url, l.key)
		all := enter(t, creates...)
		testdb.WaitForWaiter(t, l.observer, l.key, inDatabase)
		require.NoError(t, holder.Rollback(t.Context()))

		plain := func(i int) bool { return opts[i].IdempotencyKey == "" && opts[i].Event == nil }
		var transaction, command string
		last := -1 // of the batch that was inserted
		for i, w := range all {
			e := w.wait(t)
			if pending >= opts[i].MaxPending {
				requireLimit(t, e.err, int64(pending), int64(opts[i].MaxPending))
				continue
			}
			require.NoError(t, e.err, "round %d, call %d of %+v", round, i, opts)
			pending++
			require.Equal(t, opts[i].MaxPending, e.value.MaxPending)
			require.Equal(t, e.value, l.get(t, e.value.ID))
			var xmin, cmin string
			require.NoError(t, l.observer.QueryRow(t.Context(),
				"SELECT xmin::text, cmin::text FROM latchkey.setup_requests WHERE id = $1", e.value.ID).Scan(&xmin, &cmin))
			if i < inDatabase { // it ran alone
				continue
			}
			if last >= 0 {
				require.Equal(t, transaction, xmin, "the batch did not fail")
				alike := true
				for n := last; n < i; n++ {
					alike = alike && plain(n) && plain(n+1) && opts[n].MaxPending == opts[n+1].MaxPending
				}
				require.Equal(t, alike, command == cmin, "round %d, calls %d and %d of %+v", round, last, i, opts)
			}
			transaction, command, last = xmin, cmin, i
		}
		require.Len(t, slots(t, l.pool, l.user), pending)
	}
}

func TestCoalescingGivesEachCallItsEntry(t *testing.T) {
	t.Parallel()
	const callers, limit = 240, 5_000
	for _, maxBatch := range []int{0, 64} {
		t.Run(fmt.Sprintf("in batches of %d", maxBatch), func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t)
			b, r := newBank(t, url), callersOf(t, url, callers, 2, repository.WithCoalescing(maxBatch))
			id := b.open(t, limit, 6_000)
			got := make([]*repository.Entry, callers)
			errs := r.atOnce(func(c racer) (err error) {
				amount, key := int64(c.n+1), fmt.Sprint(c.n)
				if c.n%2 == 0 {
					got[c.n], err = c.repo.Deposit(t.Context(), repository.DepositParams{AccountID: id, Amount: amount, IdempotencyKey: key})
				} else {
					got[c.n], err = c.repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: id, Amount: amount, IdempotencyKey: key})
				}
				return err
			})
			rows := map[uuid.UUID]repository.Entry{}
			list, err := b.repo.ListEntries(t.Context(), id, &repository.ListOpts{Limit: 1000})
			require.NoError(t, err)
			for _, e := range list {
				rows[e.ID] = e
			}
			made, spent := 1, int64(0)
			for n, e := range got {
				if e == nil {
					var refused *repository.LimitError
					require.ErrorAs(t, errs[n], &refused)
					requireDailyLimit(t, errs[n], refused.Used, limit, int64(n+1))
					require.Greater(t, refused.Used+int64(n+1), int64(limit))
					require.Equal(t, 1, n%2)
					continue
				}
				require.NoError(t, errs[n])
				require.Equal(t, rows[e.ID], *e)
				require.Equal(t, int64(n+1), e.Amount)
				require.Equal(t, fmt.Sprint(n), e.IdempotencyKey)
				made++
				if n%2 == 1 {
					spent += e.Amount
				}
			}
			require.Less(t, made, callers, "some are refused")
			require.Len(t, list, made)
			require.LessOrEqual(t, spent, int64(limit))
			requireSound(t, b.observer)
		})
	}
}

func TestCoalescingSharedLocksRunSideBySide(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	const countStubs = "SELECT pg_catalog.count(*)::text, pg_catalog.pg_current_xact_id()::text FROM public.stubs WHERE owner = $1"
	t.Run("and an exclusive one has its turn before those that came later", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		inside := make(chan string, 3)
		read := func(leave <-chan struct{}) func(context.Context) (stub, error) {
			return func(ctx context.Context) (s stub, err error) {
				return s, l.repo.Guard(ctx, []repository.Lock{items.Shared(l.owner)}, func(ctx context.Context, tx *repository.Tx) error {
					s, err := returning(countStubs, l.owner)(ctx, tx)
					inside <- s.label
					<-leave
					return err
				})
			}
		}
		first, others := make(chan struct{}), make(chan struct{})
		readers := enter(t, read(first), read(others), read(others))
		require.Equal(t, []string{"0", "0", "0"}, []string{receive(t, inside), receive(t, inside), receive(t, inside)})
		writers := enter(t, l.insert("one"), l.insert("two"))
		close(others)
		testdb.WaitForWaiter(t, l.observer, itemKey(t, l.owner), 1)
		readers = append(readers, enter(t, read(others))...)
		close(first)
		require.Equal(t, "2", receive(t, inside))
		require.Equal(t, writers[0].mustWait(t).xid, writers[1].mustWait(t).xid)
		for _, w := range readers {
			w.mustWait(t)
		}
	})
	t.Run("also statements, each in its own transaction", func(t *testing.T) {
		t.Parallel()
		l := newDesk(t, url)
		read := func(ctx context.Context) (stub, error) {
			return repository.GuardQuery(ctx, l.repo, []repository.Lock{items.Shared(l.owner)}, returning(countStubs, l.owner))
		}
		open, holder := l.gate(t), hold(t, url, itemKey(t, l.owner))
		all := enter(t, read, read, read)
		open()
		testdb.WaitForWaiter(t, l.observer, itemKey(t, l.owner), 3)
		require.NoError(t, holder.Rollback(t.Context()))
		require.Len(t, sizes(t, []string{all[0].mustWait(t).xid, all[1].mustWait(t).xid, all[2].mustWait(t).xid}), 3)
	})
}

func TestGuardQuery(t *testing.T) {
	t.Parallel()
	url := stubsURL(t)
	for _, mode := range execModes {
		t.Run("works in the mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, url, withExecMode(mode))
			l := newDeskOn(t, url, w.pool)
			call := func(t *testing.T) {
				t.Helper()
				s, err := l.insert("alone")(t.Context())
				require.NoError(t, err)
				require.Equal(t, "alone", s.label)
			}
			traffic := w.cost(t, call)
			want := 1
			if mode == pgx.QueryExecModeDescribeExec {
				want = 4 // as in TestRoundTripsOfCreateSetupAreOneInEveryExecMode
			}
			require.Equal(t, want, traffic.RoundTrips, "sent %q", traffic.Statements)

			open := l.gate(t)
			labels := []string{"one", "two", "three", "four"}
			all := enter(t, l.insert("one"), l.insert("two"), l.insert("three"), l.insert("four"))
			w.proxy.Reset()
			open()
			rows := map[string]int{"alone": 3}
			var xids []string
			for i, w := range all {
				got := w.mustWait(t)
				require.Equal(t, labels[i], got.label)
				xids = append(xids, got.xid)
				rows[got.label] = 1
			}
			require.Equal(t, []int{4}, sizes(t, xids))
			require.Equal(t, rows, l.stubs(t))
			require.Equal(t, want, w.proxy.Traffic().RoundTrips, "for all of them")

			none, err := l.guardQuery(returning("SELECT '', '' WHERE $1 = ''", l.owner))(t.Context())
			require.True(t, err == pgx.ErrNoRows, "%v", err) //nolint:errorlint // the very same
			require.Zero(t, none)
		})
	}
	t.Run("refuses bad arguments before any SQL", func(t *testing.T) {
		t.Parallel()
		repo, dials := nowhere(t)
		call := func(locks []repository.Lock, query func(context.Context, repository.DBTX) (int, error)) error {
			return errorOf(repository.GuardQuery(t.Context(), repo, locks, query))
		}
		called := false
		query := func(context.Context, repository.DBTX) (int, error) {
			called = true
			return 1, nil
		}
		requireInvalid(t, call(nil, query), "locks")
		requireInvalid(t, call([]repository.Lock{items.Exclusive("1"), {}}, query), "namespace")
		requireInvalid(t, call([]repository.Lock{items.Exclusive("1")}, nil), "query")
		require.ErrorIs(t, call(make([]repository.Lock, repository.MaxLocks+1), query), repository.ErrTooManyLocks)
		require.Zero(t, dials.Load())
		require.ErrorIs(t, call([]repository.Lock{items.Exclusive("1")}, query), repository.ErrConnectionLost)
		require.NotZero(t, dials.Load())
		require.False(t, called)
	})
}
