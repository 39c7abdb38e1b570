package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/pgserver"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// cluster is a primary of a test's own, a standby that follows it, and a database with latchkey's schema on both.
type cluster struct {
	primary, standby string // connection strings of the database
	url              string // whichever of them takes writes
}

// failoverPatience bounds the wait for what takes two servers' work.
const failoverPatience = 2 * patience

// ownServer starts a server with these settings, which a test may restart, kill and replicate.
func ownServer(t testing.TB, settings map[string]string) *pgserver.Server {
	t.Helper()
	s, err := pgserver.Start(t.Context(), pgserver.Options{Own: true, Settings: settings})
	if err != nil && os.Getenv("LATCHKEY_DATABASE_URL") != "" {
		t.Skipf("%s is not the test's own to set up, kill or replicate, and this machine has no server programs: %v", testdb.Server(t).Provider(), err)
	}
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

// newCluster starts both servers. The standby follows when it returns, asynchronously.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	primary := ownServer(t, nil)
	c := &cluster{}
	var err error
	c.primary, _, err = primary.NewDatabase(t.Context())
	require.NoError(t, err)
	standby, err := primary.Standby(t.Context(), pgserver.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, standby.Close()) })

	one, err := pgx.ParseConfig(c.primary)
	require.NoError(t, err)
	other, err := pgx.ParseConfig(standby.URL())
	require.NoError(t, err)
	login := fmt.Sprintf("user=%s password=%s dbname=%s sslmode=disable ", one.User, one.Password, one.Database)
	c.standby = login + fmt.Sprintf("host=%s port=%d", other.Host, other.Port)
	c.url = login + fmt.Sprintf("host=%s,%s port=%d,%d target_session_attrs=read-write", one.Host, other.Host, one.Port, other.Port)
	c.waitUntilFollowed(t)
	return c
}

// waitUntilFollowed waits until the standby has applied all that the primary has written by now.
func (c *cluster) waitUntilFollowed(t *testing.T) {
	t.Helper()
	var written string
	require.NoError(t, testdb.Conn(t, c.primary).QueryRow(t.Context(), "SELECT pg_current_wal_flush_lsn()::text").Scan(&written))
	waitUntil(t, testdb.Conn(t, c.standby), "SELECT coalesce(pg_last_wal_replay_lsn() >= $1::text::pg_lsn, false)", written)
}

// waitForStandby has each COMMIT wait until the standby has applied it.
func (c *cluster) waitForStandby(t *testing.T) {
	t.Helper()
	testdb.Exec(t, c.primary, "ALTER SYSTEM SET synchronous_commit = 'remote_apply'",
		"ALTER SYSTEM SET synchronous_standby_names = 'standby'", "SELECT pg_reload_conf()")
	waitUntil(t, testdb.Conn(t, c.primary), "SELECT EXISTS (SELECT FROM pg_stat_replication WHERE state = 'streaming' AND sync_state = 'sync')")
}

// disconnect makes the standby hear no more of the primary.
func (c *cluster) disconnect(t *testing.T) {
	t.Helper()
	testdb.Exec(t, c.standby, "ALTER SYSTEM SET primary_conninfo = ''", "SELECT pg_reload_conf()")
	waitUntil(t, testdb.Conn(t, c.primary), "SELECT NOT EXISTS (SELECT FROM pg_stat_replication)")
}

// failOver kills the primary, and makes the standby the next one.
func (c *cluster) failOver(t *testing.T) {
	t.Helper()
	conn := testdb.Conn(t, c.primary)
	var pid int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT split_part(pg_read_file('postmaster.pid'), E'\n', 1)::integer").Scan(&pid))
	postmaster, err := os.FindProcess(pid)
	require.NoError(t, err)
	require.NoError(t, postmaster.Kill())
	testdb.Exec(t, c.standby, "DO $$ BEGIN ASSERT pg_promote(); END $$")
}

const (
	failoverPending = 3  // requests that a user may have pending
	failoverSold    = 10 // rows of the host's table that an owner may have
)

var sold = repository.MustNamespace("failover_sold")

// shop is a service whose callers do everything that latchkey has rules for, each of them time and again.
type shop struct {
	cluster
	users    [3]uuid.UUID
	accounts [4]uuid.UUID
	answers  [8]atomic.Int64 // how many each caller got
	closing  atomic.Bool
	callers  sync.WaitGroup

	mu      sync.Mutex
	acked   map[string]bool // rows, as written returns them
	unknown int             // outcomes that were not known at first
	longest time.Duration   // that a caller was without an answer
	failed  []error         // that neither a rule nor a failover explains
}

func newShop(t *testing.T) *shop {
	t.Helper()
	s := &shop{cluster: *newCluster(t), acked: map[string]bool{}}
	testdb.Exec(t, s.primary, "CREATE TABLE public.sold (owner text NOT NULL, key text NOT NULL)")
	b := newBank(t, s.primary)
	for i := range s.users {
		s.users[i] = uuid.New()
	}
	for i := range s.accounts {
		s.accounts[i] = b.open(t, int64(i%2)*2000, 1000)
	}
	return s
}

// open lets the callers in, each with a pool of its own.
func (s *shop) open(t *testing.T) {
	t.Helper()
	for i := range s.answers {
		repo, err := repository.New(testdb.PoolAt(t, s.url, maxConns(2)))
		require.NoError(t, err)
		s.callers.Go(func() {
			last := time.Now()
			for n := 0; !s.closing.Load() && t.Context().Err() == nil; n++ {
				err := s.call(t.Context(), repo, i, n)
				s.mu.Lock()
				s.longest = max(s.longest, time.Since(last))
				if err != nil && !refused(err) {
					s.failed = append(s.failed, fmt.Errorf("call %d of caller %d: %w", n, i, err))
				}
				s.mu.Unlock()
				last = time.Now()
				s.answers[i].Add(1)
				<-time.After(rand.N(20 * time.Millisecond)) // it is a shop, and no benchmark
			}
		})
	}
}

// refused tells whether a rule says no.
func refused(err error) bool {
	for _, rule := range []error{repository.ErrPendingExists, repository.ErrDailyLimit, repository.ErrInsufficientFunds, errFull} {
		if errors.Is(err, rule) {
			return true
		}
	}
	return false
}

// served waits until each caller has got n more answers.
func (s *shop) served(t *testing.T, n int64) {
	t.Helper()
	for i := range s.answers {
		enough := s.answers[i].Load() + n
		require.Eventually(t, func() bool { return s.answers[i].Load() >= enough }, failoverPatience, time.Millisecond, "caller %d", i)
	}
}

// close waits until the callers have left.
func (s *shop) close(t *testing.T) {
	t.Helper()
	s.closing.Store(true)
	s.callers.Wait()
	t.Logf("%d rows are acknowledged; %d outcomes were not known at first; the longest that a caller was without an answer: %v",
		len(s.acked), s.unknown, s.longest.Round(time.Millisecond))
}

// call makes the n-th call of a caller, and repeats it until its outcome is known.
func (s *shop) call(ctx context.Context, repo *repository.Repository, caller, n int) error {
	key := fmt.Sprint(caller, "-", n)
	payload, err := json.Marshal(key)
	if err != nil {
		return err
	}
	event := &repository.Event{Topic: "shop", Payload: payload}
	from := rand.IntN(len(s.accounts))
	id, other, amount := s.accounts[from], s.accounts[(from+1)%len(s.accounts)], 1+rand.Int64N(100)
	switch n % 5 {
	case 0:
		user := s.users[rand.IntN(len(s.users))]
		r, err := again(ctx, s, func() (*repository.SetupRequest, error) {
			return repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{MaxPending: failoverPending, IdempotencyKey: key, Event: event})
		})
		if err != nil {
			return err
		}
		s.ack("setup", r.ID, user, key)
		_, err = again(ctx, s, func() (*repository.SetupRequest, error) { return repo.CompleteSetup(ctx, r.ID) })
		if err == nil || errors.Is(err, repository.ErrNotPending) { // nobody else completes it
			s.ack("completed", r.ID)
			err = nil
		}
		return err
	case 1:
		e, err := again(ctx, s, func() (*repository.Entry, error) {
			return repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: amount, IdempotencyKey: key, Event: event})
		})
		if err == nil {
			s.ack("deposit", e.ID, id, amount, e.BalanceAfter, key)
		}
		return err
	case 2:
		e, err := again(ctx, s, func() (*repository.Entry, error) {
			return repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: amount, IdempotencyKey: key, Event: event})
		})
		if err == nil {
			s.ack("withdrawal", e.ID, id, amount, e.BalanceAfter, key)
		}
		return err
	case 3:
		m, err := again(ctx, s, func() (*repository.Transfer, error) {
			return repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: amount, IdempotencyKey: key, Event: event})
		})
		if err == nil {
			s.ack("transfer", m.ID, id, other, amount)
		}
		return err
	default:
		owner := fmt.Sprint("owner ", n/60)
		_, err := again(ctx, s, func() (struct{}, error) {
			return struct{}{}, repo.Guard(ctx, []repository.Lock{sold.Exclusive(owner)}, sell(owner, key))
		})
		if err == nil {
			s.ack("sold", owner, key)
		}
		return err
	}
}

// sell is the host's rule, which can be repeated: it looks for its key first.
func sell(owner, key string) func(context.Context, *repository.Tx) error {
	return func(ctx context.Context, tx *repository.Tx) error {
		var all, before int
		err := tx.QueryRow(ctx, "SELECT count(*), count(*) FILTER (WHERE key = $2) FROM public.sold WHERE owner = $1", owner, key).Scan(&all, &before)
		switch {
		case err != nil:
			return err
		case before > 0:
			return nil
		case all >= failoverSold:
			return errFull
		}
		_, err = tx.Last().Exec(ctx, "INSERT INTO public.sold VALUES ($1, $2)", owner, key)
		return err
	}
}

// again makes a call until it is known what came of it.
func again[T any](ctx context.Context, s *shop, call func() (T, error)) (T, error) {
	for {
		v, err := call()
		unknown := errors.Is(err, repository.ErrOutcomeUnknown)
		if err == nil || !unknown && !repository.IsRetryable(err) || ctx.Err() != nil {
			return v, err
		}
		if unknown {
			s.mu.Lock()
			s.unknown++
			s.mu.Unlock()
		}
		<-time.After(rand.N(20 * time.Millisecond))
	}
}

// ack notes a row that a caller was told of.
func (s *shop) ack(row ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.acked[fmt.Sprintln(row...)] = true
}

// lost returns what was acknowledged and is not there.
func (s *shop) lost(t *testing.T, conn *pgx.Conn) (list []string) {
	t.Helper()
	there := map[string]bool{}
	rows, err := conn.Query(t.Context(), `
		SELECT concat_ws(' ', 'setup', id, user_id, idempotency_key) FROM latchkey.setup_requests
		UNION ALL SELECT concat_ws(' ', 'completed', id) FROM latchkey.setup_requests WHERE status = 'completed'
		UNION ALL SELECT concat_ws(' ', kind, id, account_id, amount, balance_after, idempotency_key) FROM latchkey.entries
		UNION ALL SELECT concat_ws(' ', 'transfer', id, from_account_id, to_account_id, amount) FROM latchkey.transfers
		UNION ALL SELECT concat_ws(' ', 'sold', owner, key) FROM public.sold`)
	require.NoError(t, err)
	var row string
	_, err = pgx.ForEachRow(rows, []any{&row}, func() error {
		there[fmt.Sprintln(row)] = true
		return nil
	})
	require.NoError(t, err)
	for row := range s.acked {
		if !there[row] {
			list = append(list, row)
		}
	}
	return list
}

// requireRules requires that no rule is broken, and that no key was used twice.
func (s *shop) requireRules(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	requireSound(t, conn)
	var poor, crowded, oversold, twice int
	require.NoError(t, conn.QueryRow(t.Context(), `
		SELECT
			(SELECT count(*) FROM latchkey.accounts WHERE balance < 0),
			(SELECT count(*) FROM (SELECT FROM latchkey.setup_requests WHERE status = 'pending' GROUP BY user_id HAVING count(*) > $1) AS u),
			(SELECT count(*) FROM (SELECT FROM public.sold GROUP BY owner HAVING count(*) > $2) AS o),
			(SELECT count(*) FROM (
				SELECT FROM (
					SELECT idempotency_key AS key FROM latchkey.setup_requests
					UNION ALL SELECT idempotency_key FROM latchkey.entries WHERE idempotency_key IS NOT NULL
					UNION ALL SELECT key FROM public.sold
				) AS used GROUP BY key HAVING count(*) > 1
				UNION ALL SELECT FROM latchkey.outbox GROUP BY payload::text HAVING count(*) > 1
			) AS k)`, failoverPending, failoverSold).Scan(&poor, &crowded, &oversold, &twice))
	require.Zero(t, poor, "balances below 0")
	require.Zero(t, crowded, "users with too many pending requests")
	require.Zero(t, oversold, "owners with too much")
	require.Zero(t, twice, "keys that were used twice")
}

// The primary is killed while the service is busy, at a moment when it waits for the standby to confirm a COMMIT. The
// client is not restarted, and told nothing but the names of both servers.
func TestFailover(t *testing.T) {
	t.Parallel()
	for name, reached := range map[string]bool{
		"when the standby has what was not acknowledged":     true,
		"when the standby has not what was not acknowledged": false,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newShop(t)
			s.waitForStandby(t)
			observer := testdb.Conn(t, s.primary)
			office, tenants := s.staff(t), s.tenants(t)
			s.open(t)
			s.served(t, 20)

			if reached {
				testdb.Exec(t, s.standby, "SELECT pg_wal_replay_pause()")
			} else {
				s.disconnect(t)
			}
			// One that is certain to have asked for COMMIT, and not to have been answered.
			pool, user := testdb.PoolAt(t, s.url, maxConns(1)), uuid.New()
			repo, err := repository.New(pool)
			require.NoError(t, err)
			pid := pidOf(t, pool)
			opts := &repository.CreateSetupOpts{IdempotencyKey: "once"}
			create := inBackground(t, func() (*repository.SetupRequest, error) { return repo.CreateSetup(t.Context(), user, opts) })
			waitUntil(t, observer, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep')", int64(pid))
			if reached {
				var written string
				require.NoError(t, observer.QueryRow(t.Context(), "SELECT pg_current_wal_flush_lsn()::text").Scan(&written))
				waitUntil(t, testdb.Conn(t, s.standby), "SELECT pg_last_wal_receive_lsn() >= $1::text::pg_lsn", written)
			}
			killed := time.Now()
			s.failOver(t)
			t.Logf("the standby was promoted %v after the primary was to be killed", time.Since(killed).Round(time.Millisecond))

			_, err = create()
			require.ErrorIs(t, err, repository.ErrOutcomeUnknown)
			require.True(t, repository.IsRetryable(err))
			created, err := again(t.Context(), s, func() (*repository.SetupRequest, error) { return repo.CreateSetup(t.Context(), user, opts) })
			require.NoError(t, err)
			require.Equal(t, reached, created.CreatedAt.Before(killed), "it is the first call's")
			s.ack("setup", created.ID, user, "once")

			s.served(t, 20)
			tenants.requireSurvived(t)
			s.close(t)
			require.NoError(t, errors.Join(s.failed...))
			now := testdb.Conn(t, s.standby)
			office.requireSettled(t, now)
			require.Empty(t, s.lost(t, now))
			s.requireRules(t, now)
		})
	}
}

// The negative control: what is acknowledged without the standby is lost with the primary, and that is seen.
func TestFailoverLosesWhatTheStandbyDoesNotHave(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	repo, err := repository.New(testdb.PoolAt(t, s.url))
	require.NoError(t, err)
	fence := func() (fence int64) {
		t.Helper()
		l, err := again(t.Context(), s, func() (*repository.Lease, error) {
			return repo.AcquireLease(t.Context(), repository.LeaseParams{Name: "job"})
		})
		require.NoError(t, err)
		require.NoError(t, repo.ReleaseLease(t.Context(), l))
		return l.Fence
	}
	require.Equal(t, int64(1), fence())
	s.open(t)
	s.served(t, 20)
	s.waitUntilFollowed(t)
	s.disconnect(t)
	require.Equal(t, int64(2), fence())
	s.served(t, 20)
	s.failOver(t)
	s.served(t, 20)
	s.close(t)
	for _, err := range s.failed {
		require.ErrorIs(t, err, repository.ErrNotFound, "of a request that is lost")
	}
	now := testdb.Conn(t, s.standby)
	require.NotEmpty(t, s.lost(t, now))
	s.requireRules(t, now)
	require.Equal(t, int64(2), fence(), "it goes back too")
}

// staff are two Dispatchers, and what they and their handlers have done, by event.
type staff struct {
	dispatchers []*dispatching
	listening   sync.WaitGroup

	mu      sync.Mutex
	fences  map[repository.EventID][]int64 // of each time that it was handled
	settled map[repository.EventID]int     // how often it was noted as done
}

func (s *shop) staff(t *testing.T) *staff {
	t.Helper()
	f := &staff{fences: map[repository.EventID][]int64{}, settled: map[repository.EventID]int{}}
	testdb.Exec(t, s.primary, enableNotify)
	s.waitUntilFollowed(t)
	for range 2 {
		pool := testdb.PoolAt(t, s.url)
		d := dispatch(t, pool, repository.DispatcherOpts{Lease: 3 * time.Second, Listen: pool.Config().ConnConfig, PollInterval: 100 * time.Millisecond},
			func(_ context.Context, e repository.ClaimedEvent) error {
				f.mu.Lock()
				defer f.mu.Unlock()
				f.fences[e.EventID] = append(f.fences[e.EventID], e.Fence)
				return nil
			})
		f.dispatchers = append(f.dispatchers, d)
		f.listening.Go(func() {
			for e := range d.done {
				f.mu.Lock()
				if e.Err == nil {
					f.settled[e.EventID]++
				}
				f.mu.Unlock()
			}
		})
	}
	return f
}

// requireSettled waits until every event there is has been noted as done, and requires that it was handled, each time
// with a token of its own, and noted once.
func (f *staff) requireSettled(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	waitUntil(t, conn, "SELECT count(*) > 0 AND bool_and(state = 'done') FROM latchkey.outbox")
	for _, d := range f.dispatchers {
		require.NoError(t, d.stop(t))
		close(d.done)
	}
	f.listening.Wait()
	rows, err := conn.Query(t.Context(), "SELECT id, fence FROM latchkey.outbox")
	require.NoError(t, err)
	var (
		id    repository.EventID
		fence int64
		again int
		there = map[repository.EventID]bool{}
	)
	_, err = pgx.ForEachRow(rows, []any{&id, &fence}, func() error {
		there[id] = true
		given := f.fences[id]
		require.NotEmpty(t, given, "event %d was not handled", id)
		for i := range given[1:] {
			require.NotContains(t, given[:i+1], given[i+1], "event %d had a token twice", id)
		}
		require.LessOrEqual(t, slices.Max(given), fence, "event %d", id)
		require.LessOrEqual(t, f.settled[id], 1, "event %d", id)
		again += len(given) - 1
		return nil
	})
	require.NoError(t, err)
	for id := range f.fences {
		require.True(t, there[id], "event %d was handled, and is lost", id)
	}
	t.Logf("%d events were handled and noted as done, after %d times in vain", len(there), again)
}

// tenants hold leases: one a long one all the time, two others a short one in turn.
type tenants struct {
	shop    *shop
	release func() // ends the long lease
	kept    func() error

	mu     sync.Mutex
	given  [2][]int64 // the tokens of each holder of the short one
	failed []error
}

// longLease leaves a third of it for the failover, after it was not renewed for a third.
const longLease = 18 * time.Second

func (s *shop) tenants(t *testing.T) *tenants {
	t.Helper()
	l := &tenants{shop: s}
	released, began := make(chan struct{}), make(chan struct{})
	l.release = sync.OnceFunc(func() { close(released) })
	repo, err := repository.New(testdb.PoolAt(t, s.url, maxConns(1)))
	require.NoError(t, err)
	kept := make(chan error, 1)
	go func() {
		kept <- repo.WithLease(t.Context(), repository.LeaseParams{Name: "long", TTL: longLease}, func(ctx context.Context, _ int64) error {
			close(began)
			select {
			case <-ctx.Done():
			case <-released:
			}
			return context.Cause(ctx)
		})
	}()
	l.kept = func() error { return receive(t, kept) }
	receive(t, began)

	for i := range l.given {
		repo, err := repository.New(testdb.PoolAt(t, s.url, maxConns(1)))
		require.NoError(t, err)
		s.callers.Go(func() {
			for !s.closing.Load() && t.Context().Err() == nil {
				err := repo.WithLease(t.Context(), repository.LeaseParams{Name: "short", TTL: 500 * time.Millisecond}, func(ctx context.Context, fence int64) error {
					l.mu.Lock()
					l.given[i] = append(l.given[i], fence)
					l.mu.Unlock()
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Millisecond):
					}
					return nil
				})
				if err != nil && !repository.IsRetryable(err) && !errors.Is(err, repository.ErrOutcomeUnknown) && !errors.Is(err, repository.ErrLeaseLost) {
					l.mu.Lock()
					l.failed = append(l.failed, err)
					l.mu.Unlock()
				}
				<-time.After(rand.N(20 * time.Millisecond)) // for the other
			}
		})
	}
	return l
}

// acquired is how often the short lease was.
func (l *tenants) acquired() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.given[0]) + len(l.given[1])
}

// requireSurvived waits until the long lease has been renewed and the short one acquired on the new primary. It requires
// that the one was never lost, and that the token of the other never went back.
func (l *tenants) requireSurvived(t *testing.T) {
	t.Helper()
	before, since := l.acquired(), time.Now()
	now := testdb.Conn(t, l.shop.standby)
	waitUntil(t, now, "SELECT expires_at - $2::interval > $1 FROM latchkey.leases WHERE name = 'long'", since, longLease)
	l.release()
	require.NoError(t, l.kept())
	require.Eventually(t, func() bool { return l.acquired() >= before+5 }, failoverPatience, time.Millisecond)

	l.mu.Lock()
	defer l.mu.Unlock()
	require.NoError(t, errors.Join(l.failed...))
	all := slices.Concat(l.given[0], l.given[1])
	for _, given := range l.given {
		require.True(t, slices.IsSorted(given), "%v", given)
	}
	slices.Sort(all)
	require.Len(t, slices.Compact(slices.Clone(all)), len(all), "a token was given twice: %v", all)
	var fence int64
	require.NoError(t, now.QueryRow(t.Context(), "SELECT fence FROM latchkey.leases WHERE name = 'short'").Scan(&fence))
	require.GreaterOrEqual(t, fence, all[len(all)-1])
	t.Logf("the short lease was acquired %d times, %d of them after the failover", len(all), len(all)-before)
}

// A standby gives advisory locks to whoever asks, while somebody has them on the primary. So there is nothing that can be
// done under one, or that it could be said of that it is done. And its connection is not used again.
func TestFailoverStandbyGivesNoLock(t *testing.T) {
	t.Parallel()
	c := newCluster(t)
	o := &office{newFixture(t, c.primary), testdb.PoolAt(t, c.primary)}
	b := &bank{o.fixture, noon(t, o.observer)}
	account, other := b.open(t, 0, 1000), b.open(t, 0, 0)
	pending, err := o.create(t, 1)
	require.NoError(t, err)
	o.enqueue(t, "", "")
	claim := o.claimOne(t, repository.ClaimParams{Max: 1}).Claim
	lease := o.acquire(t, repository.LeaseParams{Name: "job", TTL: time.Hour})
	locks := []repository.Lock{items.Exclusive("held"), items.Shared("shared")}
	for _, key := range []int64{o.key, accountKey(t, account), itemKey(t, "held"), itemKey(t, "shared")} {
		hold(t, c.primary, key)
	}
	c.waitUntilFollowed(t)
	contents := func(url string) (all []string) {
		t.Helper()
		on := &office{admin: testdb.PoolAt(t, url, maxConns(1))}
		for _, table := range []string{"setup_requests", "accounts", "entries", "outbox", "leases"} {
			all = append(all, on.contents(t, table)...)
		}
		return all
	}
	before := contents(c.standby)

	standby := testdb.Conn(t, c.standby)
	_, err = standby.Exec(t.Context(), "SELECT pg_advisory_lock($1)", o.key)
	require.NoError(t, err, "if no standby gives them any more, this test is not needed")
	_, err = standby.Exec(t.Context(), "SELECT pg_advisory_unlock_all()")
	require.NoError(t, err)

	read := func(ctx context.Context, q repository.DBTX) (n int, err error) {
		err = q.QueryRow(ctx, "SELECT count(*) FROM latchkey.setup_requests").Scan(&n)
		return n, err
	}
	reading := func(ctx context.Context, tx *repository.Tx) error { return errorOf(read(ctx, tx)) }
	for name, call := range map[string]func(r *repository.Repository) error{
		"CreateSetup": func(r *repository.Repository) error {
			return errorOf(r.CreateSetup(t.Context(), o.user, &repository.CreateSetupOpts{MaxPending: 2}))
		},
		"CreateSetup, again": func(r *repository.Repository) error {
			return errorOf(r.CreateSetup(t.Context(), o.user, &repository.CreateSetupOpts{MaxPending: 2, IdempotencyKey: "key"}))
		},
		"TryCreateSetup": func(r *repository.Repository) error { return errorOf(r.TryCreateSetup(t.Context(), o.user, nil)) },
		"CompleteSetup":  func(r *repository.Repository) error { return errorOf(r.CompleteSetup(t.Context(), pending.ID)) },
		"CancelSetup":    func(r *repository.Repository) error { return errorOf(r.CancelSetup(t.Context(), pending.ID)) },
		"OpenAccount": func(r *repository.Repository) error {
			return errorOf(r.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: uuid.New()}))
		},
		"Deposit": func(r *repository.Repository) error {
			return errorOf(r.Deposit(t.Context(), repository.DepositParams{AccountID: account, Amount: 1}))
		},
		"Withdraw": func(r *repository.Repository) error {
			return errorOf(r.Withdraw(t.Context(), repository.WithdrawParams{AccountID: account, Amount: 1}))
		},
		"Transfer": func(r *repository.Repository) error {
			return errorOf(r.Transfer(t.Context(), repository.TransferParams{From: account, To: other, Amount: 1}))
		},
		"Guard that reads":    func(r *repository.Repository) error { return r.Guard(t.Context(), locks, reading) },
		"TryGuard that reads": func(r *repository.Repository) error { return r.TryGuard(t.Context(), locks, reading) },
		"Guard of one lock that reads": func(r *repository.Repository) error {
			return r.Guard(t.Context(), locks[:1], reading)
		},
		"Guard that does nothing": func(r *repository.Repository) error {
			return r.Guard(t.Context(), locks, func(context.Context, *repository.Tx) error { return nil })
		},
		"Guard that goes on after an error": func(r *repository.Repository) error {
			return r.Guard(t.Context(), locks, func(ctx context.Context, tx *repository.Tx) error {
				if err := reading(ctx, tx); err == nil {
					return nil
				}
				return reading(ctx, tx)
			})
		},
		"GuardQuery that reads": func(r *repository.Repository) error {
			return errorOf(repository.GuardQuery(t.Context(), r, locks, read))
		},
		"AcquireLease of somebody's": func(r *repository.Repository) error {
			return errorOf(r.AcquireLease(t.Context(), repository.LeaseParams{Name: "job"}))
		},
		"AcquireLease": func(r *repository.Repository) error {
			return errorOf(r.AcquireLease(t.Context(), repository.LeaseParams{Name: "nobody's"}))
		},
		"RenewLease": func(r *repository.Repository) error {
			l := *lease
			return r.RenewLease(t.Context(), &l, 0)
		},
		"ReleaseLease": func(r *repository.Repository) error {
			l := *lease
			return r.ReleaseLease(t.Context(), &l)
		},
		"WithLease": func(r *repository.Repository) error {
			return r.WithLease(t.Context(), repository.LeaseParams{Name: "nobody's"}, func(context.Context, int64) error {
				t.Error("it has no lease")
				return nil
			})
		},
		"ClaimEvents": func(r *repository.Repository) error {
			return errorOf(r.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "worker"}))
		},
		"CompleteEvent": func(r *repository.Repository) error { return r.CompleteEvent(t.Context(), claim) },
		"RetryEvent":    func(r *repository.Repository) error { return r.RetryEvent(t.Context(), claim, 0, nil) },
		"ExtendClaim":   func(r *repository.Repository) error { return errorOf(r.ExtendClaim(t.Context(), claim, 0)) },
		"RedriveDeadLetter": func(r *repository.Repository) error {
			return r.RedriveDeadLetter(t.Context(), claim.EventID)
		},
		"PurgeEvents": func(r *repository.Repository) error { return errorOf(r.PurgeEvents(t.Context(), 0, 0)) },
	} {
		t.Run(name, func(t *testing.T) {
			for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
				pool := testdb.PoolAt(t, c.standby, maxConns(1), withExecMode(mode))
				repo, err := repository.New(pool)
				require.NoError(t, err)
				for range 2 { // the second time on a connection that has prepared nothing either
					pid := pidOf(t, pool)
					err = call(repo)
					require.ErrorIs(t, err, repository.ErrReadOnly, mode)
					require.True(t, repository.IsRetryable(err))
					requireSQLState(t, "25006", err)
					require.NotEqual(t, pid, pidOf(t, pool), "its connection is not used again")
				}
			}
		})
	}
	t.Run("Guard whose function says something else", func(t *testing.T) {
		for _, says := range []error{nil, errFull} {
			g := newGuardedOn(t, c.standby, testdb.PoolAt(t, c.standby, maxConns(1)))
			err := g.guard(t, func(ctx context.Context, tx *repository.Tx) error {
				require.ErrorIs(t, reading(ctx, tx), repository.ErrReadOnly)
				return says
			})
			require.Error(t, err)
			require.NotEqual(t, g.pid, pidOf(t, g.pool), "its connection is not used again")
		}
	})
	t.Run("a transaction that is joined", func(t *testing.T) {
		repo, err := repository.New(testdb.PoolAt(t, c.standby))
		require.NoError(t, err)
		tx := begin(t, testdb.Conn(t, c.standby), pgx.TxOptions{})
		for _, call := range []func() error{
			func() error { return repo.GuardTx(t.Context(), tx, locks) },
			func() error { return errorOf(repo.CreateSetupTx(t.Context(), tx, o.user, nil)) },
			func() error {
				return errorOf(repo.DepositTx(t.Context(), tx, repository.DepositParams{AccountID: account, Amount: 1}))
			},
		} {
			require.ErrorIs(t, call(), repository.ErrReadOnly)
			require.Empty(t, locksOf(t, standby, tx.Conn().PgConn().PID()))
			require.NoError(t, errorOf(read(t.Context(), tx)), "it can be used on, to read")
		}
		require.ErrorIs(t, errorOf(repo.EnqueueTx(t.Context(), tx, repository.Event{Topic: "test"})), repository.ErrReadOnly)
	})
	t.Run("reads go on", func(t *testing.T) {
		repo, err := repository.New(testdb.PoolAt(t, c.standby, maxConns(1)))
		require.NoError(t, err)
		got, err := repo.GetSetup(t.Context(), pending.ID)
		require.NoError(t, err)
		require.Equal(t, pending, got)
		a, err := repo.GetAccount(t.Context(), account)
		require.NoError(t, err)
		require.Equal(t, int64(1000), a.Balance)
	})
	require.Equal(t, before, contents(c.standby))
	require.Equal(t, before, contents(c.primary))
}

// A primary takes no more writes by its setting, then as a standby, and at last as a primary again; the client is never
// restarted.
func TestFailoverDemotedPrimary(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil)
	url, _, err := server.NewDatabase(t.Context())
	require.NoError(t, err)
	pool := testdb.PoolAt(t, url, maxConns(3))
	repo, err := repository.New(pool)
	require.NoError(t, err)
	created := 0
	create := func() error {
		_, err := repo.CreateSetup(t.Context(), uuid.New(), nil)
		if err == nil {
			created++
		}
		return err
	}
	// pids returns the backends of the pool's connections, all of which see the setting by now.
	pids := func(readOnly string) (all map[uint32]bool) {
		t.Helper()
		var conns []*pgxpool.Conn
		for range pool.Config().MaxConns {
			conn, err := pool.Acquire(t.Context())
			require.NoError(t, err)
			conns = append(conns, conn)
		}
		all = map[uint32]bool{}
		for _, conn := range conns {
			waitUntil(t, conn.Conn(), "SELECT current_setting('transaction_read_only') = $1", readOnly)
			all[conn.Conn().PgConn().PID()] = true
			conn.Release()
		}
		return all
	}
	requireReadOnly := func() {
		t.Helper()
		for range 2 { // the connections that come instead are no better
			old := pids("on")
			for range old {
				require.ErrorIs(t, create(), repository.ErrReadOnly)
			}
			for pid := range pids("on") {
				require.False(t, old[pid], "a connection was used again")
			}
		}
	}
	require.NoError(t, create())
	pids("off")

	testdb.Exec(t, url, "ALTER SYSTEM SET default_transaction_read_only = on", "SELECT pg_reload_conf()")
	requireReadOnly()
	testdb.Exec(t, url, "ALTER SYSTEM RESET default_transaction_read_only", "SELECT pg_reload_conf()")
	old := pids("off")
	require.NoError(t, create())
	require.True(t, old[pidOf(t, pool)], "now it is")

	testdb.Exec(t, url, `DO $$ BEGIN EXECUTE format('COPY (SELECT) TO %L', current_setting('data_directory') || '/standby.signal'); END $$`)
	require.NoError(t, server.Restart(t.Context(), false))
	for range old {
		if err := create(); !errors.Is(err, repository.ErrConnectionLost) { // of those to what it was
			require.ErrorIs(t, err, repository.ErrReadOnly)
		}
	}
	requireReadOnly()
	testdb.Exec(t, url, "DO $$ BEGIN ASSERT pg_promote(); END $$")
	require.NoError(t, create())
	var rows int
	require.NoError(t, testdb.Conn(t, url).QueryRow(t.Context(), "SELECT count(*) FROM latchkey.setup_requests").Scan(&rows))
	require.Equal(t, created, rows)
}

// Calls that run together on a connection to a server that takes no writes run again on another.
func TestFailoverCallsTogetherLeaveTheirConnection(t *testing.T) {
	t.Parallel()
	const old = inDatabase + 1
	url := testdb.URL(t)
	var connections atomic.Int32
	connections.Store(old)
	pool := testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
		c.BeforeConnect = func(_ context.Context, one *pgx.ConnConfig) error {
			if connections.Add(1) <= old {
				one.RuntimeParams["default_transaction_read_only"] = "on"
			}
			return nil
		}
	})
	l := newDeskOn(t, url, pool)
	pool.Reset()
	connections.Store(0)
	open := l.gate(t)
	create := l.createSetup(repository.CreateSetupOpts{MaxPending: 10})
	calls := enter(t, create, create, create, create, create)
	open()
	for _, w := range calls[:inDatabase] { // which are there alone
		require.ErrorIs(t, w.wait(t).err, repository.ErrReadOnly)
	}
	for _, w := range calls[inDatabase:] {
		w.mustWait(t)
	}
	require.EqualValues(t, old+1, connections.Load())
}

// A server that is asked to stop while COMMIT waits for the standby says that it is done, and that it warned. It is done
// on this server, for as long as that is there.
func TestFailoverCancelledCommitIsUnknown(t *testing.T) {
	t.Parallel()
	s := newShop(t)
	s.waitForStandby(t)
	pool := testdb.PoolAt(t, s.url, maxConns(1), func(c *pgxpool.Config) {
		c.ConnConfig.BuildContextWatcherHandler = func(conn *pgconn.PgConn) ctxwatch.Handler {
			return &pgconn.CancelRequestContextWatcherHandler{Conn: conn, DeadlineDelay: patience}
		}
	})
	repo, err := repository.New(pool)
	require.NoError(t, err)
	observer, pid := testdb.Conn(t, s.primary), pidOf(t, pool)
	s.disconnect(t)
	lock := []repository.Lock{sold.Exclusive("owner")}
	opts := &repository.CreateSetupOpts{IdempotencyKey: "key"}
	for name, call := range map[string]func(context.Context) error{
		"at the end of a write": func(ctx context.Context) error { return errorOf(repo.CreateSetup(ctx, s.users[0], opts)) },
		"with the last query":   func(ctx context.Context) error { return repo.Guard(ctx, lock, sell("owner", "last")) },
		"alone": func(ctx context.Context) error {
			return repo.Guard(ctx, lock, func(_ context.Context, tx *repository.Tx) error {
				return errorOf(tx.Exec(ctx, "INSERT INTO public.sold VALUES ('owner', 'alone')"))
			})
		},
		"of a function that says otherwise": func(ctx context.Context) error {
			return repo.Guard(ctx, lock, func(_ context.Context, tx *repository.Tx) error {
				_ = errorOf(tx.Last().Exec(ctx, "INSERT INTO public.sold VALUES ('owner', 'otherwise')"))
				return nil
			})
		},
	} {
		ctx, cancel := context.WithCancel(t.Context())
		done := background(t, func() error { return call(ctx) })
		waitUntil(t, observer, "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event = 'SyncRep')", int64(pid))
		cancel()
		err := done()
		require.ErrorIs(t, err, repository.ErrOutcomeUnknown, name)
		require.ErrorIs(t, err, context.Canceled, name)
		require.Equal(t, pid, pidOf(t, pool), "%s: the connection is kept", name)
	}
	var rows int
	require.NoError(t, observer.QueryRow(t.Context(), "SELECT count(*) FROM public.sold").Scan(&rows))
	require.Equal(t, 3, rows, "they are there")
	s.failOver(t)
	now := testdb.Conn(t, s.standby)
	require.NoError(t, now.QueryRow(t.Context(), "SELECT count(*) FROM public.sold").Scan(&rows))
	require.Zero(t, rows, "they were there")
	require.NoError(t, errorOf(again(t.Context(), s, func() (*repository.SetupRequest, error) {
		return repo.CreateSetup(t.Context(), s.users[0], opts)
	})))
	s.requireRules(t, now)
}
