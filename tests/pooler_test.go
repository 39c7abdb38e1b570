package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/pgbouncer"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// notThroughPooler are the tests that need a server to themselves, as patterns for -skip, and why. All others can go through
// PgBouncer in transaction mode; see package testdb.
var notThroughPooler = []struct {
	why, tests string
	prepare    bool // they can go through one that knows prepared statements
}{
	{why: "find a session by its process number, which a pooler gives clients of its own and servers by turns", tests: `
		TestAccountWriterWithoutTheLock
		TestActivity$
		TestDispatcherStops/and_hands_back
		TestEntryClockIsReadAfterTheWait
		TestEntryIdempotency/a_key_that_a_writer
		TestFaultsCancelledBeforeAnythingIsSent
		TestFaultsConnectionIsLost/by_the_server's_will
		TestGuardHoldTimeout/is_the_server's
		TestGuardLocks
		TestGuardLosesItsConnection
		TestGuardMisuseOfTx/(by_returning_while|from_two)
		TestGuardTakes1024Locks
		TestGuardTx$/takes_locks_in_a_transaction
		TestGuardTxThroughDatabaseSQL
		TestJoin$/keeps_the_lock
		TestJoinRecoversWhenItsStatementsBecomeUseless
		TestLeaseAcquire/(reads_the_clock|waits_for_who)
		TestLeaseReadsTheClockAfterTheWait
		TestOutboxClaim/counts_a_lease_from_when
		TestOutboxSettlingReadsTheClockAfterTheWait
		TestOutboxTwoClaimsOfOneTurn
		TestSetupEnd/of_two_that_wait
		TestSetupIdempotency/a_key_that_a_writer
		TestSetupKeys/of_a_user_with_a_(negative|positive)_key
		TestSetupWriterWithoutTheLock
		TestSharedLock`},
	{why: "begin their sessions with settings, which a pooler cannot keep apart or refuses", tests: `
		TestAccount(Operators|Settings)OfTheHost
		TestCheckOfTheFirstUse/works_as_the_pool
		TestFaultsReadOnlyServer
		TestGuardBudget/(does_not_call|leaves)
		TestGuardHoldTimeout/is_not_needed
		TestGuardLimitHoldsInARace/also_where_the_default
		TestGuardQueryThatDoesNotReturn
		TestKeysInSQLDoNotTrustTheSearchPath
		TestOutboxClaim/takes_no_more_than_Max
		TestOutboxSettingsOfTheHost
		TestPipeline
		TestSettings`},
	{why: "migrate, which is refused through a pooler", tests: `
		TestAccountMigration
		TestMigrations
		TestPrivilegesDecoys`},
	{why: "log in as roles that the pooler does not know", tests: `
		TestPrivilegesOf
		TestPrivilegesRow`},
	{why: "have servers of their own", tests: `
		TestFailover`},
	{why: "say what Check finds where there is no pooler", tests: `
		TestCheckFinds`},
	{why: "keep a session for LISTEN", tests: `
		TestDispatcherListens
		TestDispatcherOutlivesAStorm
		TestDispatcherSurvivesAFailover`},
	{why: "have session locks or several sessions that take turns in an order of their own", tests: `
		TestRacelab`},
	{why: "want more sessions at a time than the pooler has, or soon", tests: `
		TestAccountLocks/are_those
		TestPoolProtection/is_needed`},
	{why: "see the pooler, not the server, take COMMIT before the cut, and drop it", tests: `
		TestFaultsOutcomeIsUnknownWhen
		TestOutcomesOfEveryWrite`},
	{why: "spoil prepared statements, for which the pooler has other errors and keeps some", tests: `
		TestRoundTripsStatementsThatBecameUseless`},
	{why: "prepare statements and leave them", tests: `
		TestGeneratedQueriesPrepare`},
	{why: "measure the server", tests: `
		TestGrowth`},
	{why: "create databases of their own", tests: `
		TestKeysInSQLDoNotDependOnTheEncoding`},
	{why: "use pgx's default mode, which prepares statements", tests: `
		TestOutboxClaim/takes_topics
		TestRoundTripsAreOneAlsoAfterATry
		Test/cache_statement`, prepare: true},
}

// fewServers is PgBouncer's pool in the tests below: clients that are many more have to share.
const fewServers = 2

// bounced is a database behind a PgBouncer of its own.
type bounced struct {
	bouncer  *pgbouncer.Bouncer
	url      string // through it
	direct   string // past it
	prepares bool   // it supports prepared statements
}

// throughEach runs the test behind PgBouncer without support for prepared statements, and with it where it has that.
func throughEach(t *testing.T, test func(t *testing.T, b *bounced)) {
	t.Helper()
	program, version, err := testdb.Pooler(t.Context())
	require.NoError(t, err)
	if program == "" {
		t.Skip("needs PgBouncer: make test/poolers")
	}
	for _, prepared := range []int{0, 200} {
		if prepared > 0 && !version.CanPrepare() {
			continue
		}
		t.Run(fmt.Sprintf("PgBouncer %v, max_prepared_statements %d", version, prepared), func(t *testing.T) {
			t.Parallel()
			b := &bounced{direct: testdb.Direct(t, testdb.URL(t)), prepares: prepared > 0}
			b.bouncer, err = pgbouncer.Start(t.Context(), program, b.direct, pgbouncer.Options{PoolSize: fewServers, Prepared: prepared})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, b.bouncer.Close()) })
			b.url, err = b.bouncer.URL(b.direct)
			require.NoError(t, err)
			test(t, b)
		})
	}
}

// works says whether pgx can send its queries so through the pooler.
func (b *bounced) works(mode pgx.QueryExecMode) bool {
	return b.prepares || mode != pgx.QueryExecModeCacheStatement
}

func (b *bounced) requireNothingLeft(t *testing.T) {
	t.Helper()
	left, err := b.bouncer.Left(t.Context(), b.url)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestPoolerInEveryExecMode(t *testing.T) {
	t.Parallel()
	throughEach(t, func(t *testing.T, b *bounced) {
		t.Helper()
		for _, mode := range execModes {
			if !b.works(mode) {
				continue
			}
			t.Run(mode.String(), func(t *testing.T) {
				newRacers(t, b.url, 20, withExecMode(mode)).requireExactEach(t, 1, 2, 3, 4, 5)
				methods := callEverything(t, testdb.PoolAt(t, b.url, withExecMode(mode)))
				require.Subset(t, methods, publicMethods())
				b.requireNothingLeft(t)
			})
		}
		// That this is pgx's and the pooler's affair, and no fault of latchkey's.
		t.Run("the default mode works where the pooler knows prepared statements", func(t *testing.T) {
			errs := newRacers(t, b.url, 20).atOnce(func(c racer) error {
				return errorOf(c.pool.Exec(t.Context(), "SELECT $1::integer", c.n)) // with an argument, or pgx would not prepare it
			})
			require.Equal(t, b.prepares, errors.Join(errs...) == nil)
		})
	})
}

// Reads run outside a transaction, where the pooler may send each message of one to another server.
func TestPoolerReadsAreOfTheirOwnRows(t *testing.T) {
	t.Parallel()
	throughEach(t, func(t *testing.T, b *bounced) {
		t.Helper()
		for _, mode := range execModes {
			if !b.works(mode) {
				continue
			}
			t.Run(mode.String(), func(t *testing.T) {
				t.Parallel()
				errs := clients(t, b.url, 20, withExecMode(mode)).atOnce(func(c racer) error {
					repo, err := repository.New(c.pool)
					if err != nil {
						return err
					}
					user := uuid.New()
					setup, err := repo.CreateSetup(t.Context(), user, nil)
					if err != nil {
						return err
					}
					account, err := repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: user})
					if err != nil {
						return err
					}
					for range 20 {
						s, err := repo.GetSetup(t.Context(), setup.ID)
						if err != nil || s.ID != setup.ID {
							return fmt.Errorf("GetSetup(%v) = %v, %w", setup.ID, s, err)
						}
						a, err := repo.GetAccount(t.Context(), account.ID)
						if err != nil || a.ID != account.ID {
							return fmt.Errorf("GetAccount(%v) = %v, %w", account.ID, a, err)
						}
						n, err := repo.CountPendingSetups(t.Context(), user)
						if err != nil || n != 1 {
							return fmt.Errorf("CountPendingSetups = %d, %w", n, err)
						}
					}
					return nil
				})
				require.NoError(t, errors.Join(errs...))
			})
		}
	})
}

// requireExactEach races once for each limit.
func (r racers) requireExactEach(t *testing.T, limits ...int) {
	t.Helper()
	for _, limit := range limits {
		r.requireExact(t, uuid.New(), limit)
	}
}

// The negative control of what every test here ends with.
func TestPoolerLeftoversAreFound(t *testing.T) {
	t.Parallel()
	throughEach(t, func(t *testing.T, b *bounced) {
		t.Helper()
		b.requireNothingLeft(t)
		spoiler := testdb.PoolAt(t, b.url, withExecMode(pgx.QueryExecModeSimpleProtocol), maxConns(1))
		for _, leave := range []struct{ sql, left string }{
			{"SET lock_timeout = 4321", "setting lock_timeout = 4321"},
			{"SELECT set_config('statement_timeout', '54321', false)", "setting statement_timeout = 54321"},
			{"SELECT set_config('latchkey.lock_timeout', '1s', false)", "setting latchkey.lock_timeout = 1s"},
			{"SELECT pg_advisory_lock(77)", "advisory lock 77"},
			{"PREPARE forgotten AS SELECT 1", "prepared statement forgotten: PREPARE forgotten AS SELECT 1"},
			{"LISTEN somewhere", "channel somewhere"},
			{"CREATE TEMP TABLE scratch ()", "temporary table scratch"},
		} {
			_, err := spoiler.Exec(t.Context(), leave.sql)
			require.NoError(t, err)
			left, err := b.bouncer.Left(t.Context(), b.url)
			require.NoError(t, err)
			require.Contains(t, left, leave.left)
		}
	})
}

func TestPoolerIsRefusedByMigrations(t *testing.T) {
	t.Parallel()
	throughEach(t, func(t *testing.T, b *bounced) {
		t.Helper()
		direct := testdb.PoolAt(t, b.direct)
		version, _, err := migrations.Version(t.Context(), direct)
		require.NoError(t, err)
		for _, mode := range execModes {
			for range 10 {
				// Several at once, so that they meet on the connections to the server.
				errs := clients(t, b.url, 4, withExecMode(mode)).atOnce(func(c racer) error { return migrations.Up(t.Context(), c.pool) })
				for _, err := range errs {
					require.ErrorIs(t, err, migrations.ErrPooler, mode)
				}
			}
			pool := testdb.PoolAt(t, b.url, withExecMode(mode))
			require.ErrorIs(t, migrations.Down(t.Context(), pool), migrations.ErrPooler, mode)
		}
		b.requireNothingLeft(t)
		after, _, err := migrations.Version(t.Context(), direct)
		require.NoError(t, err)
		require.Equal(t, version, after)
		require.NoError(t, migrations.Down(t.Context(), direct))
		require.NoError(t, migrations.Up(t.Context(), direct))
	})
}

// clients are racers without a Repository.
func clients(t *testing.T, url string, n int, opts ...func(*pgxpool.Config)) racers {
	t.Helper()
	all := make(racers, n)
	for i := range all {
		all[i] = racer{n: i, pool: testdb.PoolAt(t, url, append(opts, maxConns(1))...)}
	}
	return all
}

// pins are what RDS Proxy's documentation names as reasons for it to give a client a connection to the server for the rest
// of the client's session, and what belongs to the session for any other pooler.
var pins = regexp.MustCompile(`(?i)^\s*(SET|RESET|PREPARE|EXECUTE|DEALLOCATE|DISCARD|LISTEN|UNLISTEN|DECLARE|LOAD|CREATE|DROP|ALTER|LOCK)\b` +
	`|\bpg_(try_)?advisory_(lock|unlock)|\b(nextval|setval|currval|lastval)\b`)

const maxUnpinned = 16 << 10 // bytes; RDS Proxy pins at longer statements

// pinOf says what of the statement a pooler would keep the session for.
func pinOf(sql string) error {
	code := sqlCode(sql, true)
	switch {
	case pins.MatchString(code):
		return fmt.Errorf("pins: %s", pins.FindString(code))
	case len(sql) > maxUnpinned:
		return fmt.Errorf("pins: it is %d bytes long", len(sql))
	}
	for _, after := range strings.Split(strings.ToLower(code), "set_config")[1:] {
		if !lastArgument(after, "true") {
			return errors.New("pins: set_config for the session")
		}
	}
	return nil
}

// lastArgument says whether the parenthesis that the code begins with ends in ", argument)".
func lastArgument(code, argument string) bool {
	depth := 0
	for i, c := range code {
		switch c {
		case '(':
			depth++
		case ')':
			depth--
		default:
		}
		if depth == 0 && c == ')' {
			before, found := strings.CutSuffix(strings.TrimSpace(code[:i]), argument)
			return found && strings.HasSuffix(strings.TrimSpace(before), ",")
		}
	}
	return false
}

func TestPoolerIsNotPinned(t *testing.T) {
	t.Parallel()
	for _, mode := range execModes {
		t.Run("by any statement of any method in mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, testdb.Direct(t, testdb.URL(t)), maxConns(4), withExecMode(mode))
			var mu sync.Mutex
			sent := make(map[string]bool)
			w.proxy.On(func(m wire.Message) wire.Action {
				if m.Is('P', 'Q') { // also what is only prepared
					mu.Lock()
					defer mu.Unlock()
					sent[m.Statement] = true
				}
				return wire.Forward
			})
			methods := callEverything(t, w.pool)
			require.Subset(t, methods, publicMethods())
			mu.Lock()
			defer mu.Unlock()
			require.Greater(t, len(sent), len(publicMethods()), "the statements were not seen")
			for sql := range sent {
				require.NoError(t, pinOf(sql), sql)
			}
		})
	}
	t.Run("which would be noticed", func(t *testing.T) {
		t.Parallel()
		for _, bad := range []string{
			"SET lock_timeout = 1", "set local lock_timeout = 1", "RESET ALL", "PREPARE p AS SELECT 1", "EXECUTE p", "DEALLOCATE ALL",
			"DISCARD ALL", "LISTEN c", "DECLARE c CURSOR FOR SELECT 1", "CREATE TEMP TABLE t ()", "LOAD 'auto_explain'",
			"-- name: X\nSET x.y = 1", "SELECT nextval('s')", "SELECT pg_advisory_lock(1)", "SELECT pg_catalog.pg_try_advisory_lock_shared(1)",
			"SELECT pg_advisory_unlock_all()", "SELECT set_config('a', 'b', false)", "SELECT set_config('a', coalesce($1, 'true'), $2)",
			"SELECT set_config('a', 'b', true), set_config('a', greatest(1, 2)::text, false)",
			"SELECT '" + strings.Repeat("x", maxUnpinned) + "'",
		} {
			require.Error(t, pinOf(bad), bad)
		}
		for _, good := range []string{
			"begin isolation level read committed", "commit", "SAVEPOINT s", "SELECT pg_advisory_xact_lock($1)", "SELECT pg_try_advisory_xact_lock_shared(1)",
			"SELECT set_config('a', greatest(1, 2)::text, true)", "SELECT 'nextval' -- SET", "UPDATE t SET a = 1",
		} {
			require.NoError(t, pinOf(good), good)
		}
	})
}

// publicMethods are those of the Repository.
func publicMethods() (names []string) {
	methods := reflect.TypeFor[*repository.Repository]()
	for i := range methods.NumMethod() {
		names = append(names, methods.Method(i).Name)
	}
	return names
}

// callEverything calls each method of a Repository once or more, also so that it fails, and returns what an observer heard
// of.
func callEverything(t *testing.T, pool *pgxpool.Pool) (methods []string) {
	t.Helper()
	ctx := t.Context()
	var mu sync.Mutex
	repo, err := repository.New(pool, repository.WithLockTimeout(patience), repository.WithObserver(repository.Observer{
		CallDone: func(_ context.Context, c repository.CallDone) {
			mu.Lock()
			defer mu.Unlock()
			methods = append(methods, c.Method)
		},
	}))
	require.NoError(t, err)
	ok := func(err error) {
		t.Helper()
		require.NoError(t, err)
	}
	joined := func(do func(tx pgx.Tx) error) {
		t.Helper()
		require.NoError(t, pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, do))
	}
	event := repository.Event{Topic: uuid.NewString(), AggregateKey: uuid.NewString(), Payload: json.RawMessage(`{"a": 1}`), MaxAttempts: 1}

	user := uuid.New()
	one, err := repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{MaxPending: 2, IdempotencyKey: "k", Event: &event})
	ok(err)
	other, err := repo.TryCreateSetup(ctx, user, &repository.CreateSetupOpts{MaxPending: 2})
	ok(err)
	require.ErrorIs(t, errorOf(repo.CreateSetup(ctx, user, nil)), repository.ErrPendingExists)
	joined(func(tx pgx.Tx) error {
		require.ErrorIs(t, errorOf(repo.CreateSetupTx(ctx, tx, user, nil)), repository.ErrPendingExists)
		return errorOf(repo.CreateSetupTx(ctx, tx, uuid.New(), nil))
	})
	ok(errorOf(repo.CompleteSetup(ctx, one.ID)))
	ok(errorOf(repo.CancelSetup(ctx, other.ID)))
	ok(errorOf(repo.GetSetup(ctx, one.ID)))
	ok(errorOf(repo.ListSetups(ctx, user, nil)))
	ok(errorOf(repo.CountPendingSetups(ctx, user)))

	a, err := repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: user, DailyLimit: 10, IdempotencyKey: "k"})
	ok(err)
	var b *repository.Account
	joined(func(tx pgx.Tx) (err error) {
		b, err = repo.OpenAccountTx(ctx, tx, repository.OpenAccountParams{OwnerID: user})
		return err
	})
	ok(errorOf(repo.Deposit(ctx, repository.DepositParams{AccountID: a.ID, Amount: 100, Event: &event})))
	ok(errorOf(repo.Withdraw(ctx, repository.WithdrawParams{AccountID: a.ID, Amount: 1})))
	require.ErrorIs(t, errorOf(repo.Withdraw(ctx, repository.WithdrawParams{AccountID: a.ID, Amount: 10})), repository.ErrDailyLimit)
	ok(errorOf(repo.Transfer(ctx, repository.TransferParams{From: a.ID, To: b.ID, Amount: 1})))
	joined(func(tx pgx.Tx) error {
		return errors.Join(
			errorOf(repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: a.ID, Amount: 1})),
			errorOf(repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: a.ID, Amount: 1})),
			errorOf(repo.TransferTx(ctx, tx, repository.TransferParams{From: a.ID, To: b.ID, Amount: 1})),
			errorOf(repo.GetAccountTx(ctx, tx, a.ID)),
			errorOf(repo.ListEntriesTx(ctx, tx, a.ID, nil)))
	})
	ok(errorOf(repo.GetAccount(ctx, a.ID)))
	ok(errorOf(repo.ListEntries(ctx, a.ID, nil)))

	locks := []repository.Lock{items.Exclusive(uuid.NewString()), items.Shared(uuid.NewString())}
	body := func(ctx context.Context, tx *repository.Tx) error {
		var n int
		return errors.Join(tx.QueryRow(ctx, "SELECT 1").Scan(&n), errorOf(tx.Last().Exec(ctx, "SELECT")))
	}
	ok(repo.Guard(ctx, locks, body))
	ok(repo.TryGuard(ctx, locks, body))
	ok(errorOf(repository.GuardQuery(ctx, repo, locks, func(ctx context.Context, q repository.DBTX) (n int, err error) {
		return n, q.QueryRow(ctx, "SELECT 1").Scan(&n)
	})))
	joined(func(tx pgx.Tx) error {
		return errors.Join(repo.GuardTx(ctx, tx, locks), errorOf(repo.EnqueueTx(ctx, tx, event)))
	})
	ok(errorOf(repo.LockActivity(ctx)))
	ok(errorOf(repo.Check(ctx)))

	kept := event
	kept.MaxAttempts, kept.AggregateKey = 9, ""
	for range 3 {
		joined(func(tx pgx.Tx) error { return errorOf(repo.EnqueueTx(ctx, tx, kept)) })
	}
	claims, err := repo.ClaimEvents(ctx, repository.ClaimParams{Worker: "w", Max: 10, Lease: time.Hour, Topics: []string{event.Topic}})
	ok(err)
	require.Len(t, claims, 4, "one of those with a key, and those without")
	for _, c := range claims {
		extended, err := repo.ExtendClaim(ctx, c.Claim, time.Hour)
		ok(err)
		if c.AggregateKey == "" {
			ok(repo.CompleteEvent(ctx, extended))
		} else {
			ok(repo.RetryEvent(ctx, extended, 0, errors.New("once is enough")))
		}
	}
	letters, err := repo.ListDeadLetters(ctx, nil)
	ok(err)
	require.NotEmpty(t, letters)
	ok(repo.RedriveDeadLetter(ctx, letters[0].EventID))
	ok(errorOf(repo.PurgeEvents(ctx, 0, 100)))

	lease, err := repo.AcquireLease(ctx, repository.LeaseParams{Name: uuid.NewString()})
	ok(err)
	ok(repo.RenewLease(ctx, lease, time.Hour))
	ok(repo.ReleaseLease(ctx, lease))
	ok(repo.WithLease(ctx, repository.LeaseParams{Name: uuid.NewString()}, func(context.Context, int64) error { return nil }))

	// Of the dispatcher's own, those of a run that handles what is left.
	handled := make(chan struct{}, 100)
	d := dispatch(t, pool, repository.DispatcherOpts{}, func(context.Context, repository.ClaimedEvent) error {
		handled <- struct{}{}
		return nil
	})
	receive(t, handled)
	ok(d.stop(t))

	mu.Lock()
	defer mu.Unlock()
	return methods
}
