package tests

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// foreign are the settings of hosts that must not matter. Each is the session's default, as a role's or a
// database's setting is.
var foreign = map[string]map[string]string{
	"repeatable read":            {"default_transaction_isolation": "repeatable read"},
	"serializable":               {"default_transaction_isolation": "serializable"},
	"serializable, deferrable":   {"default_transaction_isolation": "serializable", "default_transaction_deferrable": "on"},
	"a short statement_timeout":  {"statement_timeout": foreignTimeout},
	"a short lock_timeout":       {"lock_timeout": "50ms"},
	"both timeouts short":        {"statement_timeout": foreignTimeout, "lock_timeout": foreignTimeout},
	"a short idle timeout":       {"idle_in_transaction_session_timeout": "100ms"},
	"an odd time zone":           {"timezone": "Asia/Kathmandu"},
	"odd text formats":           {"datestyle": "SQL, DMY", "intervalstyle": "sql_standard", "extra_float_digits": "-15", "bytea_output": "escape"},
	"odd quoting":                {"standard_conforming_strings": "off", "backslash_quote": "on", "array_nulls": "off", "transform_null_equals": "on"},
	"an empty search_path":       {"search_path": ""},
	"a search_path of decoys":    {"search_path": "decoy"},
	"decoys before the system's": {"search_path": "decoy, pg_catalog"},
	"an odd planner": {
		"jit": "off", "plan_cache_mode": "force_generic_plan", "enable_hashagg": "off", "enable_sort": "off", "enable_seqscan": "off",
		"enable_material": "off", "from_collapse_limit": "1", "join_collapse_limit": "1",
	},
	"everything at once": {
		"default_transaction_isolation": "serializable", "statement_timeout": foreignTimeout, "lock_timeout": "50ms",
		"idle_in_transaction_session_timeout": "100ms", "timezone": "Asia/Kathmandu", "datestyle": "German",
		"search_path": "decoy, pg_catalog", "extra_float_digits": "-15",
	},
}

// foreignTimeout is shorter than the lock waits below, and longer than a busy machine needs for a statement that
// does not wait.
const foreignTimeout = "250ms"

// decoys are what a foreign search_path may offer in place of the system's and ours; to use one is an error.
var decoys = []string{
	`CREATE SCHEMA decoy`,
	`CREATE TABLE decoy.setup_requests (LIKE latchkey.setup_requests INCLUDING ALL)`,
	`CREATE TABLE decoy.schema_migrations (LIKE latchkey.schema_migrations)`,
	`CREATE TABLE decoy.pg_locks ()`,
	`CREATE FUNCTION decoy.used(OUT text) LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a decoy was used'; END $$`,
	`CREATE FUNCTION decoy.lock_key(text, text) RETURNS bigint LANGUAGE sql RETURN (SELECT decoy.used()::bigint)`,
	`CREATE FUNCTION decoy.raise_error(text, text) RETURNS boolean LANGUAGE sql RETURN true`,
	`CREATE FUNCTION decoy.set_config(text, text, boolean) RETURNS text LANGUAGE sql RETURN decoy.used()`,
	`CREATE FUNCTION decoy.current_setting(text) RETURNS text LANGUAGE sql RETURN decoy.used()`,
	`CREATE FUNCTION decoy.statement_timestamp() RETURNS timestamptz LANGUAGE sql RETURN decoy.used()::timestamptz`,
	`CREATE FUNCTION decoy.date_part(text, interval) RETURNS double precision LANGUAGE sql RETURN decoy.used()::double precision`,
	`CREATE FUNCTION decoy.clock_timestamp() RETURNS timestamptz LANGUAGE sql RETURN decoy.used()::timestamptz`,
	`CREATE FUNCTION decoy.gen_random_uuid() RETURNS uuid LANGUAGE sql RETURN decoy.used()::uuid`,
	`CREATE FUNCTION decoy.unnest(anyarray) RETURNS SETOF anyelement LANGUAGE sql AS 'SELECT $1[1] WHERE decoy.used() IS NULL'`,
	`CREATE FUNCTION decoy.step(bigint) RETURNS bigint LANGUAGE sql RETURN decoy.used()::bigint`,
	`CREATE FUNCTION decoy.step(bigint, "any") RETURNS bigint LANGUAGE internal AS 'int8inc_any'`,
	`CREATE FUNCTION decoy.step(boolean, boolean) RETURNS boolean LANGUAGE sql RETURN decoy.used()::boolean`,
	`CREATE AGGREGATE decoy.count(*) (SFUNC = decoy.step, STYPE = bigint, INITCOND = '0')`,
	`CREATE AGGREGATE decoy.count("any") (SFUNC = decoy.step, STYPE = bigint, INITCOND = '1000000')`,
	`CREATE AGGREGATE decoy.bool_or(boolean) (SFUNC = decoy.step, STYPE = boolean, INITCOND = 'true')`,
	`CREATE FUNCTION decoy.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS ''`,
	`CREATE FUNCTION decoy.pg_advisory_xact_lock_shared(bigint) RETURNS void LANGUAGE sql AS ''`,
	`CREATE FUNCTION decoy.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql RETURN true`,
	`CREATE FUNCTION decoy.pg_try_advisory_xact_lock_shared(bigint) RETURNS boolean LANGUAGE sql RETURN true`,
}

// withSettings starts every session with them.
func withSettings(settings map[string]string) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { maps.Copy(c.ConnConfig.RuntimeParams, settings) }
}

// withForeign is a service of another host beside this one, with a user of its own.
func (f *fixture) withForeign(t *testing.T, settings map[string]string, opts ...repository.Option) *fixture {
	t.Helper()
	g := f.withNewUser(t)
	g.pool = testdb.PoolAt(t, f.url, maxConns(1), withSettings(settings))
	g.pid = pidOf(t, g.pool)
	var err error
	g.repo, err = repository.New(g.pool, opts...)
	require.NoError(t, err)
	return g
}

func TestSettingsOfTheHostDoNotMatter(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	testdb.Exec(t, url, decoys...)
	require.Subset(t, settingsOf(t, testdb.Conn(t, url)), map[string]string{"transaction_isolation": "read committed"})

	t.Run("a race is exact under each of them", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, url, 20)
		for name, settings := range foreign {
			t.Log("with " + name)
			for _, c := range r {
				for setting, value := range settings {
					_, err := c.pool.Exec(t.Context(), "SELECT pg_catalog.set_config($1, $2, false)", setting, value)
					require.NoError(t, err)
				}
			}
			for range 3 {
				r.requireExact(t, uuid.New(), 1)
			}
			for _, c := range r {
				_, err := c.pool.Exec(t.Context(), "RESET ALL")
				require.NoError(t, err)
			}
		}
		requireNoDecoy(t, url)
	})
	for name, settings := range foreign {
		t.Run(name+": every method works and leaves nothing on the session", func(t *testing.T) {
			t.Parallel()
			f := newFixture(t, url).withForeign(t, settings, repository.WithLockTimeout(patience))
			before := sessionOf(t, f.pool)
			f.callEverythingInReadCommitted(t)
			_, err := f.create(t, 1)
			require.NoError(t, err)
			_, err = f.create(t, 1)
			requireLimit(t, err, 1, 1)
			holder := hold(t, url, f.key)
			_, err = f.repo.TryCreateSetup(t.Context(), f.user, nil)
			requireBusy(t, err, repository.WhereAdvisory)
			_, err = f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: 20 * time.Millisecond})
			requireBusy(t, err, repository.WhereAdvisory)
			require.NoError(t, holder.Rollback(t.Context()))
			_, err = f.repo.CompleteSetup(t.Context(), uuid.New())
			require.ErrorIs(t, err, repository.ErrNotFound)

			require.Equal(t, f.pid, pidOf(t, f.pool))
			require.Empty(t, changes(before, sessionOf(t, f.pool)))
			require.Empty(t, granted(t, f.observer, f.pid))
			requireNoDecoy(t, url)
		})
	}
	// Of all settings at once, because a test that waits does nothing else.
	t.Run("a lock wait gets its whole budget under each of them", func(t *testing.T) {
		t.Parallel()
		const budget = time.Second
		type wait struct {
			f    *fixture
			ends func() (took time.Duration, err error)
		}
		waits := map[string]wait{}
		local := newFixture(t, url)
		holder := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		for name, settings := range foreign {
			f := local.withForeign(t, settings)
			_, err := holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", f.key)
			require.NoError(t, err)
			waits[name] = wait{f, inBackground(t, func() (time.Duration, error) {
				before := time.Now()
				_, err := f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: budget})
				return time.Since(before), err
			})}
		}
		for name, w := range waits {
			took, err := w.ends()
			busy := requireBusy(t, err, repository.WhereAdvisory)
			requireSQLState(t, "55P03", err)
			requireAbout(t, budget, busy.Waited, took)
			require.Equal(t, w.f.pid, pidOf(t, w.f.pool), name)
		}
	})
	t.Run("a lock that is freed in time is taken under each of them", func(t *testing.T) {
		t.Parallel()
		local := newFixture(t, url)
		holder := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		var waiting []*fixture
		var created []func() (*repository.SetupRequest, error)
		for _, settings := range foreign {
			f := local.withForeign(t, settings, repository.WithLockTimeout(patience))
			_, err := holder.Exec(t.Context(), "SELECT pg_advisory_xact_lock($1)", f.key)
			require.NoError(t, err)
			waiting = append(waiting, f)
			created = append(created, inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 1) }))
		}
		for _, f := range waiting {
			require.Equal(t, []uint32{f.pid}, testdb.WaitForWaiter(t, f.observer, f.key, 1))
		}
		<-time.After(300 * time.Millisecond) // longer than any timeout of the host's
		require.NoError(t, holder.Rollback(t.Context()))
		for i, wait := range created {
			_, err := wait()
			require.NoError(t, err)
			require.Len(t, waiting[i].dump(t), 1)
		}
	})
	t.Run("the decoys would be used if a name were not qualified", func(t *testing.T) {
		t.Parallel()
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "SET search_path = decoy, pg_catalog")
		require.NoError(t, err)
		for _, sql := range []string{
			"SELECT set_config('lock_timeout', '1', true)", "SELECT current_setting('lock_timeout')", "SELECT clock_timestamp()",
			"SELECT statement_timestamp()", "SELECT date_part('epoch', interval '1 s')",
			"SELECT count(*) FROM (SELECT) AS s", "SELECT bool_or(true)", "SELECT unnest('{1}'::bigint[])",
		} {
			_, err := conn.Exec(t.Context(), sql)
			require.ErrorContains(t, err, "a decoy was used", sql)
		}
	})
}

// A role's and a database's settings come to a session in other ways than a client's, which must not matter either.
func TestSettingsOfTheDatabaseDoNotMatter(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	alter := "ALTER DATABASE " + pgx.Identifier{config.Database}.Sanitize() + " SET "
	testdb.Exec(t, url,
		alter+"default_transaction_isolation = 'serializable'",
		alter+"statement_timeout = '"+foreignTimeout+"'",
		alter+"lock_timeout = '50ms'",
	)
	r := newRacers(t, url, 20)
	require.Equal(t, "serializable", settingsOf(t, testdb.Conn(t, url))["default_transaction_isolation"])
	for range 3 {
		r.requireExact(t, uuid.New(), 1)
	}
}

// It ends the session, so that the call would not even know its outcome.
func TestSettingsWithTransactionTimeout(t *testing.T) {
	t.Parallel()
	f := newFixture(t, testdb.URL(t))
	if _, known := settingsOf(t, f.observer)["transaction_timeout"]; !known {
		t.Skip("PostgreSQL before 17 has no transaction_timeout")
	}
	f = f.withForeign(t, map[string]string{"transaction_timeout": foreignTimeout})
	holder := hold(t, f.url, f.key)
	_, err := f.repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{LockTimeout: 500 * time.Millisecond})
	requireBusy(t, err, repository.WhereAdvisory)
	require.Equal(t, f.pid, pidOf(t, f.pool), "the connection is kept")
	require.NoError(t, holder.Rollback(t.Context()))
	_, err = f.create(t, 1)
	require.NoError(t, err)
}

// A hook of the pool's may leave a transaction open. What a call says is written must be committed all the same.
func TestSettingsWithATransactionLeftOpen(t *testing.T) {
	t.Parallel()
	f := newFixture(t, testdb.URL(t))
	pool := testdb.PoolAt(t, f.url, maxConns(1), func(c *pgxpool.Config) {
		c.PrepareConn = func(ctx context.Context, conn *pgx.Conn) (bool, error) {
			_, err := conn.Exec(ctx, "BEGIN")
			return true, err
		}
	})
	repo, err := repository.New(pool)
	require.NoError(t, err)
	for i := range 3 { // the first prepares
		s, err := repo.CreateSetup(t.Context(), f.user, &repository.CreateSetupOpts{MaxPending: 3})
		require.NoError(t, err)
		require.Equal(t, i+1, f.slot(t, s.ID))
	}
}

// What a session's own defaults make of a standby must not hide that it is one: after the failover, the same pool works.
func TestSettingsOnAStandby(t *testing.T) {
	t.Parallel()
	server := ownServer(t, nil)
	url, _, err := server.NewDatabase(t.Context())
	require.NoError(t, err)
	var data string
	require.NoError(t, testdb.Conn(t, url).QueryRow(t.Context(), "SHOW data_directory").Scan(&data))
	require.NoError(t, os.WriteFile(filepath.Join(data, "standby.signal"), nil, 0o600))
	require.NoError(t, os.Chmod(filepath.Join(data, "standby.signal"), 0o644)) // the server may run as somebody else
	require.NoError(t, server.Restart(t.Context(), false))

	var services []*repository.Repository
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		for _, mode := range execModes {
			repo, err := repository.New(testdb.PoolAt(t, url, maxConns(1), withExecMode(mode),
				withSettings(map[string]string{"default_transaction_isolation": level})))
			require.NoError(t, err)
			for range 2 {
				_, err = repo.CreateSetup(t.Context(), uuid.New(), nil)
				require.ErrorIs(t, err, repository.ErrReadOnly, "%s, %v", level, mode)
			}
			services = append(services, repo)
		}
	}
	_, err = testdb.Conn(t, url).Exec(t.Context(), "SELECT pg_catalog.pg_promote()")
	require.NoError(t, err)
	for _, repo := range services {
		_, err := repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
	}
}

// Operators have schemas too, though nobody writes them. An operator for exactly the types at hand wins even over
// the system's, wherever its schema stands in the search_path.
func TestSettingsWithDecoyOperators(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	decoys := []string{
		`CREATE SCHEMA decoy`,
		`CREATE FUNCTION decoy.used(OUT text) LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a decoy was used'; END $$`,
	}
	types := []string{"smallint", "integer", "bigint", "numeric", "double precision", "interval"}
	for i, operator := range []string{"+", "-", "*", "/"} {
		for j, left := range types {
			for k, right := range types {
				decoys = append(decoys,
					fmt.Sprintf("CREATE FUNCTION decoy.f%d%d%d(%s, %s) RETURNS numeric LANGUAGE sql RETURN decoy.used()::numeric", i, j, k, left, right),
					fmt.Sprintf("CREATE OPERATOR decoy.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = decoy.f%d%d%d)", operator, left, right, i, j, k),
				)
			}
		}
	}
	testdb.Exec(t, url, decoys...)
	f := newFixture(t, url).withForeign(t, map[string]string{"search_path": "decoy"})
	_, err := f.pool.Exec(t.Context(), "SELECT 1 * 1.5")
	require.ErrorContains(t, err, "a decoy was used")
	f.callEverything(t)

	// After a wait there is more to compute.
	holder := hold(t, url, f.key)
	create := inBackground(t, func() (*repository.SetupRequest, error) { return f.create(t, 1) })
	testdb.WaitForWaiter(t, f.observer, f.key, 1)
	<-time.After(10 * time.Millisecond)
	require.NoError(t, holder.Rollback(t.Context()))
	_, err = create()
	require.NoError(t, err)
}

// Before pg_catalog only a host that means it puts a schema. What its operators then break is an error, not the rule.
func TestSettingsWithHostileOperatorsKeepTheRule(t *testing.T) {
	t.Parallel()
	for name, decoys := range map[string][]string{
		"equality of UUIDs": {
			`CREATE FUNCTION decoy.never(uuid, uuid) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN false`,
			`CREATE OPERATOR decoy.= (LEFTARG = uuid, RIGHTARG = uuid, FUNCTION = decoy.never)`,
		},
		"equality of texts": {
			`CREATE FUNCTION decoy.never(text, text) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN false`,
			`CREATE OPERATOR decoy.= (LEFTARG = text, RIGHTARG = text, FUNCTION = decoy.never)`,
		},
		"comparison of counts": {
			`CREATE FUNCTION decoy.always(bigint, smallint) RETURNS boolean LANGUAGE sql IMMUTABLE RETURN true`,
			`CREATE OPERATOR decoy.< (LEFTARG = bigint, RIGHTARG = smallint, FUNCTION = decoy.always)`,
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			const limit = 2
			url := testdb.URL(t)
			testdb.Exec(t, url, append([]string{"CREATE SCHEMA decoy"}, decoys...)...)
			r, user := newRacers(t, url, 10, withSettings(map[string]string{"search_path": "decoy, pg_catalog"})), uuid.New()
			created := 0
			for _, err := range r.atOnce(func(c racer) error {
				_, err := c.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{MaxPending: limit})
				return err
			}) {
				if err == nil {
					created++
				}
			}
			var pending int
			require.NoError(t, testdb.Conn(t, url).QueryRow(t.Context(), pendingOf, user).Scan(&pending))
			require.Equal(t, pending, created)
			require.Positive(t, created)
			require.LessOrEqual(t, created, limit)
		})
	}
}

// callEverythingInReadCommitted is callEverything, whatever the session's default is.
func (f *fixture) callEverythingInReadCommitted(t *testing.T) {
	t.Helper()
	tx := begin(t, f.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	_, err := f.repo.CreateSetupTx(t.Context(), tx, uuid.New(), nil)
	require.NoError(t, err)
	require.NoError(t, tx.Commit(t.Context()))

	s, err := f.repo.CreateSetup(t.Context(), uuid.New(), &repository.CreateSetupOpts{IdempotencyKey: "ключ", MaxPending: 2})
	require.NoError(t, err)
	again, err := f.repo.TryCreateSetup(t.Context(), s.UserID, &repository.CreateSetupOpts{IdempotencyKey: "ключ", MaxPending: 2})
	require.NoError(t, err)
	require.Equal(t, s, again)
	other, err := f.repo.TryCreateSetup(t.Context(), s.UserID, &repository.CreateSetupOpts{MaxPending: 2})
	require.NoError(t, err)
	completed, err := f.repo.CompleteSetup(t.Context(), s.ID)
	require.NoError(t, err)
	require.Equal(t, completed, f.get(t, s.ID))
	list, err := f.repo.ListSetups(t.Context(), s.UserID, nil)
	require.NoError(t, err)
	require.Equal(t, []repository.SetupRequest{*other, *completed}, list)
	_, err = f.repo.CancelSetup(t.Context(), other.ID)
	require.NoError(t, err)
	n, err := f.repo.CountPendingSetups(t.Context(), s.UserID)
	require.NoError(t, err)
	require.Zero(t, n)
}

// settingsOf returns all settings of the session.
func settingsOf(t *testing.T, db querier) map[string]string {
	t.Helper()
	// Qualified, because it is used on sessions with decoys.
	rows, err := db.Query(t.Context(), "SELECT s.name, s.setting FROM pg_catalog.pg_settings AS s")
	require.NoError(t, err)
	all := map[string]string{}
	var name, setting string
	_, err = pgx.ForEachRow(rows, []any{&name, &setting}, func() error {
		all[name] = setting
		return nil
	})
	require.NoError(t, err)
	return all
}

// sessionOf returns the settings of the pool's connection. The names of an extension's settings appear when it
// is loaded, and the server keeps the names of ours, but what those held must be gone.
func sessionOf(t *testing.T, pool *pgxpool.Pool) map[string]string {
	t.Helper()
	all := settingsOf(t, pool)
	maps.DeleteFunc(all, func(name, setting string) bool {
		return strings.Contains(name, ".") && (setting == "" || !strings.HasPrefix(name, "latchkey."))
	})
	return all
}

// changes lists only what differs, since there are hundreds of settings.
func changes(before, after map[string]string) (list []string) {
	for name := range after {
		if before[name] != after[name] {
			list = append(list, fmt.Sprintf("%s: %q became %q", name, before[name], after[name]))
		}
	}
	return list
}

func requireNoDecoy(t *testing.T, url string) {
	t.Helper()
	var rows int
	require.NoError(t, testdb.Conn(t, url).QueryRow(t.Context(), "SELECT count(*) FROM decoy.setup_requests").Scan(&rows))
	require.Zero(t, rows)
}
