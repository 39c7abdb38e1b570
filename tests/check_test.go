package tests

import (
	"context"
	"errors"
	"net"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// found is what Check found on the pool, by name, and how bad it is.
func found(t *testing.T, pool *pgxpool.Pool, opts ...repository.Option) map[string]repository.Severity {
	t.Helper()
	repo, err := repository.New(pool, opts...)
	require.NoError(t, err)
	findings, err := repo.Check(t.Context())
	require.NoError(t, err)
	all := map[string]repository.Severity{}
	rank := map[repository.Severity]int{repository.SeverityUnsafe: 1, repository.SeverityFailing: 2, repository.SeverityNotice: 3}
	last := 0
	for _, f := range findings {
		require.NotContains(t, all, f.Name, "found twice")
		require.NotEmpty(t, f.Problem)
		require.NotEmpty(t, f.Advice)
		require.GreaterOrEqual(t, rank[f.Severity], max(1, last), "the worst first: %v", findings)
		all[f.Name], last = f.Severity, rank[f.Severity]
	}
	return all
}

// requireFound requires that these are what is found, beside what is wrong with the tests' server itself.
func requireFound(t *testing.T, pool *pgxpool.Pool, want map[string]repository.Severity, opts ...repository.Option) {
	t.Helper()
	got := found(t, pool, opts...)
	for _, ofServer := range []string{"fsync", "full_page_writes", "max_locks_per_transaction"} {
		delete(got, ofServer)
	}
	require.Equal(t, want, got)
}

// ownDatabase returns a database of a server with these settings.
func ownDatabase(t *testing.T, settings map[string]string) string {
	t.Helper()
	url, _, err := ownServer(t, settings).NewDatabase(t.Context())
	require.NoError(t, err)
	return url
}

func TestCheckFindsNothingOnAServerThatIsSetUpSafely(t *testing.T) {
	t.Parallel()
	url := ownDatabase(t, map[string]string{"fsync": "on", "full_page_writes": "on"})
	require.Empty(t, found(t, testdb.PoolAt(t, url)))
}

func TestCheckFindsTheSettingsOfAServer(t *testing.T) {
	t.Parallel()
	url := ownDatabase(t, map[string]string{
		"fsync": "off", "full_page_writes": "off", "max_locks_per_transaction": "10", "max_connections": "30",
	})
	require.Equal(t, map[string]repository.Severity{
		"fsync":                     repository.SeverityUnsafe,
		"full_page_writes":          repository.SeverityUnsafe,
		"max_locks_per_transaction": repository.SeverityFailing,
	}, found(t, testdb.PoolAt(t, url)))
}

func TestCheckFindsTheSettingsOfASession(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	known := settingsOf(t, testdb.Conn(t, url))
	requireFound(t, testdb.PoolAt(t, url), map[string]repository.Severity{})
	for setting, test := range map[string]struct {
		value string
		want  repository.Severity
	}{
		"default_transaction_isolation":       {"serializable", repository.SeverityNotice},
		"default_transaction_read_only":       {"on", repository.SeverityFailing},
		"statement_timeout":                   {"20s", repository.SeverityNotice},
		"transaction_timeout":                 {"20s", repository.SeverityNotice},
		"idle_in_transaction_session_timeout": {"4s", repository.SeverityNotice},
		"synchronous_commit":                  {"off", repository.SeverityUnsafe},
		"session_replication_role":            {"replica", repository.SeverityUnsafe},
	} {
		if _, ok := known[setting]; !ok {
			continue // in a later PostgreSQL
		}
		t.Run(setting, func(t *testing.T) {
			t.Parallel()
			pool := testdb.PoolAt(t, url, withSettings(map[string]string{setting: test.value}))
			requireFound(t, pool, map[string]repository.Severity{setting: test.want})
		})
	}
	t.Run("an idle timeout that is longer than the hold timeout is none", func(t *testing.T) {
		t.Parallel()
		pool := testdb.PoolAt(t, url, withSettings(map[string]string{"idle_in_transaction_session_timeout": "4s"}))
		requireFound(t, pool, map[string]repository.Severity{}, repository.WithHoldTimeout(3*time.Second))
	})
	t.Run("a pooler", func(t *testing.T) {
		t.Parallel()
		requireFound(t, testdb.PoolAt(t, url, throughPooler), map[string]repository.Severity{"pooler": repository.SeverityNotice})
	})
	t.Run("an encoding", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "ENCODING 'LATIN1' LOCALE 'C'")
		require.NoError(t, migrations.Up(t.Context(), pool))
		requireFound(t, pool, map[string]repository.Severity{"server_encoding": repository.SeverityFailing})
	})
}

// throughPooler has the connections be told numbers that are not those of their server processes.
func throughPooler(c *pgxpool.Config) {
	c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
	dial := c.ConnConfig.DialFunc
	c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return pooler(conn), nil
	}
}

func TestCheckFindsWhatIsWrongWithTheSchema(t *testing.T) {
	t.Parallel()
	const name = "index or constraint setup_requests_pending_key"
	unsafe := map[string]repository.Severity{name: repository.SeverityUnsafe}
	for does, test := range map[string]struct {
		twist []string
		want  map[string]repository.Severity
	}{
		"an index that is missing": {
			[]string{"DROP INDEX latchkey.setup_requests_pending_key"}, unsafe,
		},
		"an index that is not unique": {
			[]string{
				"DROP INDEX latchkey.setup_requests_pending_key",
				"CREATE INDEX setup_requests_pending_key ON latchkey.setup_requests (user_id, pending_slot) WHERE status = 'pending'",
			}, unsafe,
		},
		"a constraint that is not validated": {
			[]string{
				"ALTER TABLE latchkey.accounts DROP CONSTRAINT accounts_balance_check",
				"ALTER TABLE latchkey.accounts ADD CONSTRAINT accounts_balance_check CHECK (balance >= 0) NOT VALID",
			}, map[string]repository.Severity{"index or constraint accounts_balance_check": repository.SeverityUnsafe},
		},
		"triggers that are disabled": {
			[]string{"ALTER TABLE latchkey.entries DISABLE TRIGGER ALL"},
			map[string]repository.Severity{"triggers of entries": repository.SeverityUnsafe},
		},
		"the trigger of dispatchers is the host's to enable": {
			[]string{"ALTER TABLE latchkey.outbox ENABLE TRIGGER outbox_notify"}, map[string]repository.Severity{},
		},
		"a function that is missing": {
			[]string{"DROP FUNCTION latchkey.raise_error"},
			map[string]repository.Severity{"function raise_error": repository.SeverityFailing},
		},
		"a view that is missing": {
			[]string{"DROP VIEW latchkey.lock_activity"},
			map[string]repository.Severity{"table lock_activity": repository.SeverityFailing},
		},
		"a schema that is behind": {
			[]string{"UPDATE latchkey.schema_migrations SET version = version - 1"},
			map[string]repository.Severity{"schema version": repository.SeverityFailing},
		},
		"a schema that is ahead": {
			[]string{"UPDATE latchkey.schema_migrations SET version = version + 1"},
			map[string]repository.Severity{"schema version": repository.SeverityNotice},
		},
		"a schema that is half done": {
			[]string{"UPDATE latchkey.schema_migrations SET dirty = true"},
			map[string]repository.Severity{"schema version": repository.SeverityFailing},
		},
		"a schema without a version": {
			[]string{"DELETE FROM latchkey.schema_migrations"},
			map[string]repository.Severity{"schema version": repository.SeverityFailing},
		},
		"no schema": {
			[]string{"DROP SCHEMA latchkey CASCADE"},
			map[string]repository.Severity{"schema": repository.SeverityFailing},
		},
	} {
		t.Run(does, func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t)
			testdb.Exec(t, url, test.twist...)
			requireFound(t, testdb.PoolAt(t, url), test.want)
		})
	}
	t.Run("an index that could not be built", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		conn := testdb.Conn(t, url)
		testdb.Exec(t, url,
			"DROP INDEX latchkey.setup_requests_pending_key",
			"INSERT INTO latchkey.setup_requests (user_id) SELECT '00000000-0000-0000-0000-000000000001' FROM generate_series(1, 2)")
		_, err := conn.Exec(t.Context(),
			"CREATE UNIQUE INDEX CONCURRENTLY setup_requests_pending_key ON latchkey.setup_requests (user_id, pending_slot) WHERE status = 'pending'")
		requireSQLState(t, "23505", err)
		requireFound(t, testdb.PoolAt(t, url), unsafe)
	})
	t.Run("each index and constraint that there is", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		conn := testdb.Conn(t, url)
		rows, err := conn.Query(t.Context(), `
			SELECT conname::text, format('ALTER TABLE %s DROP CONSTRAINT %I CASCADE', conrelid::regclass, conname)
			FROM pg_constraint WHERE connamespace = 'latchkey'::regnamespace AND contype <> 'n'
			UNION ALL
			SELECT indexrelid::regclass::text, format('DROP INDEX IF EXISTS %s', indexrelid::regclass)
			FROM pg_index JOIN pg_class ON oid = indexrelid
			WHERE relnamespace = 'latchkey'::regnamespace AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = indexrelid)`)
		require.NoError(t, err)
		want := map[string]repository.Severity{}
		var name, drop string
		var drops []string
		_, err = pgx.ForEachRow(rows, []any{&name, &drop}, func() error {
			name = strings.TrimPrefix(name, "latchkey.")
			want["index or constraint "+name] = repository.SeverityUnsafe
			if strings.HasSuffix(name, "_idx") {
				want["index or constraint "+name] = repository.SeverityNotice
			}
			drops = append(drops, drop)
			return nil
		})
		require.NoError(t, err)
		// CASCADE may have dropped one before it is its turn.
		for i, drop := range drops {
			drops[i] = strings.Replace(drop, "DROP CONSTRAINT ", "DROP CONSTRAINT IF EXISTS ", 1)
		}
		testdb.Exec(t, url, drops...)
		require.Greater(t, len(want), 40)
		requireFound(t, testdb.PoolAt(t, url), want)
	})
}

// noExclusion makes a server that accepts the lock functions and does nothing, of this one database. The functions
// themselves are kept aside.
var noExclusion = []string{
	`SET allow_system_table_mods = on`,
	`ALTER FUNCTION pg_catalog.pg_advisory_xact_lock(bigint) RENAME TO real_advisory_xact_lock`,
	`ALTER FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RENAME TO real_try_advisory_xact_lock`,
	`CREATE FUNCTION pg_catalog.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS ''`,
	`CREATE FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true'`,
}

var exclusion = []string{
	`SET allow_system_table_mods = on`,
	`DROP FUNCTION IF EXISTS pg_catalog.pg_advisory_xact_lock(bigint)`,
	`DROP FUNCTION IF EXISTS pg_catalog.pg_try_advisory_xact_lock(bigint)`,
	`ALTER FUNCTION pg_catalog.real_advisory_xact_lock(bigint) RENAME TO pg_advisory_xact_lock`,
	`ALTER FUNCTION pg_catalog.real_try_advisory_xact_lock(bigint) RENAME TO pg_try_advisory_xact_lock`,
}

// unsafeURL returns a database whose server does not exclude.
func unsafeURL(t *testing.T, more ...string) string {
	t.Helper()
	url := itemsURL(t)
	var super bool
	require.NoError(t, testdb.Conn(t, url).QueryRow(t.Context(), "SELECT current_setting('is_superuser')::boolean").Scan(&super))
	if !super {
		t.Skip("only a superuser can take the lock functions of a database away")
	}
	testdb.Exec(t, url, append(slices.Clone(noExclusion), more...)...)
	return url
}

func TestCheckRefusesAServerThatDoesNotExclude(t *testing.T) {
	t.Parallel()
	requireRefused := func(t *testing.T, err error) {
		t.Helper()
		require.ErrorIs(t, err, repository.ErrUnsafeServer)
		require.False(t, repository.IsRetryable(err))
	}
	t.Run("by the methods that take locks, and before they write anything", func(t *testing.T) {
		t.Parallel()
		url := unsafeURL(t)
		// The control: by hand, two transactions hold the same lock.
		first, second := begin(t, testdb.Conn(t, url), pgx.TxOptions{}), begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		for _, tx := range []pgx.Tx{first, second} {
			_, err := tx.Exec(t.Context(), "SELECT pg_advisory_xact_lock(1)")
			require.NoError(t, err)
		}

		g := newGuarded(t, url)
		ctx, locks := t.Context(), []repository.Lock{g.lock}
		never := func(context.Context, *repository.Tx) error { panic("called") }
		for range 2 { // it is refused every time
			_, err := g.repo.Check(ctx)
			requireRefused(t, err)
			_, err = g.repo.CreateSetup(ctx, uuid.New(), nil)
			requireRefused(t, err)
			_, err = g.repo.TryCreateSetup(ctx, uuid.New(), nil)
			requireRefused(t, err)
			_, err = g.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New(), IdempotencyKey: "k"})
			requireRefused(t, err)
			_, err = g.repo.Deposit(ctx, repository.DepositParams{AccountID: uuid.New(), Amount: 1})
			requireRefused(t, err)
			_, err = g.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: uuid.New(), Amount: 1})
			requireRefused(t, err)
			_, err = g.repo.Transfer(ctx, repository.TransferParams{From: uuid.New(), To: uuid.New(), Amount: 1})
			requireRefused(t, err)
			requireRefused(t, g.repo.Guard(ctx, locks, never))
			requireRefused(t, g.repo.TryGuard(ctx, locks, never))
			_, err = repository.GuardQuery(ctx, g.repo, locks, func(context.Context, repository.DBTX) (int, error) { panic("called") })
			requireRefused(t, err)
		}
		n, err := g.repo.CountPendingSetups(ctx, uuid.New())
		require.NoError(t, err, "what takes no lock needs none")
		require.Zero(t, n)
		var written int
		require.NoError(t, g.observer.QueryRow(ctx, "SELECT (SELECT count(*) FROM latchkey.setup_requests) + (SELECT count(*) FROM latchkey.accounts)").Scan(&written))
		require.Zero(t, written)

		// The refusal is not for ever: the next call may reach another server.
		testdb.Exec(t, url, exclusion...)
		require.NoError(t, g.guard(t, insertWithin(1, g.owner)))
		_, err = g.repo.Check(ctx)
		require.NoError(t, err)
	})
	for does, change := range map[string][]string{
		"that never gives a lock to a try": {
			`DROP FUNCTION pg_catalog.pg_advisory_xact_lock(bigint)`,
			`ALTER FUNCTION pg_catalog.real_advisory_xact_lock(bigint) RENAME TO pg_advisory_xact_lock`,
			`CREATE OR REPLACE FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql AS 'SELECT false'`,
		},
		"that gives every lock to a try": {
			`DROP FUNCTION pg_catalog.pg_advisory_xact_lock(bigint)`,
			`ALTER FUNCTION pg_catalog.real_advisory_xact_lock(bigint) RENAME TO pg_advisory_xact_lock`,
		},
		"that has a lock of nothing": {
			`DROP FUNCTION pg_catalog.pg_try_advisory_xact_lock(bigint)`,
			`ALTER FUNCTION pg_catalog.real_try_advisory_xact_lock(bigint) RENAME TO pg_try_advisory_xact_lock`,
		},
		"that has no such function": {
			`DROP FUNCTION pg_catalog.pg_advisory_xact_lock(bigint)`,
		},
		"that knows the function, and has not got it": {
			`CREATE OR REPLACE FUNCTION pg_catalog.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE plpgsql
				AS $$ BEGIN RAISE feature_not_supported; END $$`,
		},
	} {
		t.Run(does, func(t *testing.T) {
			t.Parallel()
			g := newGuarded(t, unsafeURL(t, change...))
			_, err := g.repo.Check(t.Context())
			requireRefused(t, err)
			requireRefused(t, g.guard(t, insertWithin(1, g.owner)))
		})
	}
	t.Run("that is two", func(t *testing.T) {
		t.Parallel()
		urls := []string{testdb.URL(t), testdb.URL(t)} // the locks of two databases are as those of two servers
		var made atomic.Int64
		pool := testdb.PoolAt(t, urls[0], func(c *pgxpool.Config) {
			c.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
				other, err := pgx.ParseConfig(urls[made.Add(1)%2])
				if err == nil {
					config.Database = other.Database
				}
				return err
			}
		})
		repo, err := repository.New(pool)
		require.NoError(t, err)
		_, err = repo.CreateSetup(t.Context(), uuid.New(), nil)
		requireRefused(t, err)
	})
}

// proofs counts the attempts to prove exclusion.
func proofs(p *wire.Proxy) (n int) {
	for _, sql := range p.Traffic().Statements {
		if strings.Contains(sql, "CheckHold") {
			n++
		}
	}
	return n
}

func TestCheckOfTheFirstUse(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	create := func(t *testing.T, w *wired) {
		t.Helper()
		_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
	}
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol} {
		t.Run("costs four round trips, once, in the mode "+mode.String(), func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, url, withExecMode(mode))
			for range 2 {
				create(t, w)
			}
			var err error
			w.repo, err = repository.New(w.pool) // on the connection that is warm by now
			require.NoError(t, err)
			w.proxy.Reset()
			create(t, w)
			require.Equal(t, 4+1, w.proxy.Traffic().RoundTrips, "%q", w.proxy.Traffic().Statements)
			w.proxy.Reset()
			create(t, w)
			require.Equal(t, 1, w.proxy.Traffic().RoundTrips)
		})
	}
	t.Run("is none of a method that takes no lock, or joins a transaction", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		_, err := w.repo.CountPendingSetups(t.Context(), uuid.New())
		require.NoError(t, err)
		_, err = w.repo.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w"})
		require.NoError(t, err)
		require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
			return w.repo.GuardTx(t.Context(), tx, []repository.Lock{items.Exclusive("1")})
		}))
		require.Zero(t, proofs(w.proxy))
		create(t, w)
		require.Equal(t, 1, proofs(w.proxy))
	})
	t.Run("is one for all that come meanwhile", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url, maxConns(4))
		w.proxy.Delay(5*time.Millisecond, 5*time.Millisecond)
		var calls sync.WaitGroup
		errs := make([]error, 50)
		for i := range errs {
			calls.Go(func() { _, errs[i] = w.repo.CreateSetup(t.Context(), uuid.New(), nil) })
		}
		calls.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, 1, proofs(w.proxy))
	})
	t.Run("goes on for the others when the call that began it is cancelled", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		began, held := make(chan struct{}), make(chan struct{})
		var once sync.Once
		w.proxy.On(func(m wire.Message) wire.Action {
			if m.Is('P', 'Q') && strings.Contains(m.Statement, "CheckHold") {
				once.Do(func() { close(began) })
				<-held
			}
			return wire.Forward
		})
		ctx, cancel := context.WithCancel(t.Context())
		first := background(t, func() error {
			_, err := w.repo.CreateSetup(ctx, uuid.New(), nil)
			return err
		})
		<-began
		second := background(t, func() error {
			_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			return err
		})
		cancel()
		require.ErrorIs(t, first(), context.Canceled)
		close(held)
		require.NoError(t, second())
		require.Equal(t, 1, proofs(w.proxy))
	})
	t.Run("is not taken off the lock timeout", func(t *testing.T) {
		t.Parallel()
		const timeout = 500 * time.Millisecond
		w := setupWired(t, url)
		create(t, w)
		var err error
		w.repo, err = repository.New(w.pool, repository.WithLockTimeout(timeout))
		require.NoError(t, err)
		w.proxy.On(func(m wire.Message) wire.Action {
			if m.Is('P', 'Q') && strings.Contains(m.Statement, "CheckHold") {
				<-time.After(timeout + 100*time.Millisecond)
			}
			return wire.Forward
		})
		create(t, w)
	})
	t.Run("that had no answer is tried again by the next call", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		create(t, w)
		var err error
		w.repo, err = repository.New(w.pool)
		require.NoError(t, err)
		silent := make(chan struct{})
		var asked atomic.Bool
		w.proxy.On(func(m wire.Message) wire.Action {
			if m.Is('P', 'Q') && strings.Contains(m.Statement, "CheckHold") && asked.CompareAndSwap(false, true) {
				<-silent
				return wire.CutBefore
			}
			return wire.Forward
		})
		err = background(t, func() error {
			_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			return err
		})()
		busy := requireBusy(t, err, repository.WherePool)
		require.GreaterOrEqual(t, busy.Waited, repository.DefaultLockTimeout)
		require.NotErrorIs(t, err, context.DeadlineExceeded, "its context has not ended")
		close(silent)
		for {
			_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			if err == nil {
				break
			}
			require.ErrorIs(t, err, repository.ErrConnectionLost, "that attempt was still under way")
		}
	})
	t.Run("that could not connect is tried again by the next call", func(t *testing.T) {
		t.Parallel()
		var down atomic.Bool
		w := setupWired(t, url, func(c *pgxpool.Config) {
			c.BeforeConnect = func(context.Context, *pgx.ConnConfig) error {
				if down.Load() {
					return errors.New("no password to be had")
				}
				return nil
			}
		})
		require.NoError(t, w.pool.Ping(t.Context()))
		down.Store(true)
		_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.ErrorContains(t, err, "no password to be had")
		require.NotErrorIs(t, err, repository.ErrUnsafeServer)
		down.Store(false)
		create(t, w)
	})
	for _, which := range []string{"CheckHold", "CheckTry"} {
		t.Run("that lost its connection at "+which+" is tried again by the next call", func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, url)
			var cut atomic.Bool
			w.proxy.On(func(m wire.Message) wire.Action {
				if m.Is('P', 'Q') && strings.Contains(m.Statement, which) && cut.CompareAndSwap(false, true) {
					return wire.CutAfter
				}
				return wire.Forward
			})
			_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.ErrorIs(t, err, repository.ErrConnectionLost)
			require.True(t, repository.IsRetryable(err))
			create(t, w)
		})
	}
	t.Run("is not fooled when the session that holds the lock is ended", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		w, killer := setupWired(t, url), testdb.Conn(t, url)
		var killed atomic.Bool
		w.proxy.On(func(m wire.Message) wire.Action {
			if m.Is('P', 'Q') && strings.Contains(m.Statement, "CheckTry") && killed.CompareAndSwap(false, true) {
				var gone bool
				err := killer.QueryRow(context.Background(), "SELECT pg_terminate_backend(a.pid, 10000) FROM ("+
					"SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE '%CheckHold%' AND pid <> pg_backend_pid() OFFSET 0) AS a").Scan(&gone)
				if err != nil {
					t.Error(err)
				}
			}
			return wire.Forward
		})
		_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.True(t, killed.Load())
		require.ErrorIs(t, err, repository.ErrConnectionLost)
		require.NotErrorIs(t, err, repository.ErrUnsafeServer)
		create(t, w)
	})
	t.Run("does not wait for a pool that the host has emptied", func(t *testing.T) {
		t.Parallel()
		w := setupWired(t, url)
		conn, err := w.pool.Acquire(t.Context())
		require.NoError(t, err)
		_, err = w.repo.CreateSetup(t.Context(), uuid.New(), &repository.CreateSetupOpts{LockTimeout: 50 * time.Millisecond})
		requireBusy(t, err, repository.WherePool)
		require.Equal(t, 1, proofs(w.proxy))
		conn.Release()
		create(t, w)
		require.Equal(t, 1, proofs(w.proxy))
	})
	t.Run("works as the pool connects, and leaves nothing behind", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		observer := testdb.Conn(t, url)
		pool := testdb.PoolAt(t, url, maxConns(1), func(c *pgxpool.Config) {
			password := c.ConnConfig.User
			c.ConnConfig.User = "nobody"
			c.BeforeConnect = func(_ context.Context, config *pgx.ConnConfig) error {
				config.User = password
				return nil
			}
		}, withSettings(foreign["everything at once"]))
		testdb.Exec(t, url, decoys...)
		repo, err := repository.New(pool)
		require.NoError(t, err)
		_, err = repo.Check(t.Context())
		require.NoError(t, err)
		waitUntil(t, observer, "SELECT count(*) = 2 FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'")
		var locks int
		require.NoError(t, observer.QueryRow(t.Context(), "SELECT count(*) FROM latchkey.lock_activity").Scan(&locks))
		require.Zero(t, locks)
	})
}
