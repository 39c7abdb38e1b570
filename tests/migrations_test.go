package tests

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestMigrations(t *testing.T) {
	t.Parallel()
	latest := latestMigration(t)

	t.Run("go up, and again without an effect", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "")
		requireVersion(t, pool, 0)
		require.NoError(t, migrations.Up(t.Context(), pool))
		requireVersion(t, pool, latest)
		before := catalog(t, pool)
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.Equal(t, before, catalog(t, pool))
		requireVersion(t, pool, latest)
		requireWorks(t, pool)
	})
	t.Run("go down and up to an equal schema", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "")
		require.NoError(t, migrations.Up(t.Context(), pool))
		up := catalog(t, pool)
		require.Greater(t, len(up), 20, "what is compared is the schema")
		require.NoError(t, migrations.Down(t.Context(), pool))
		requireVersion(t, pool, 0)
		down := catalog(t, pool)
		require.Less(t, len(down), len(up)/2, "only the schema and its version table stay: %v", down)
		require.NoError(t, migrations.Down(t.Context(), pool))
		require.Equal(t, down, catalog(t, pool))
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.Equal(t, up, catalog(t, pool))
		requireWorks(t, pool)
	})
	t.Run("give the schema that the files give by hand", func(t *testing.T) {
		t.Parallel()
		byHand, byUp := newDatabase(t, ""), newDatabase(t, "")
		require.NoError(t, migrations.Up(t.Context(), byUp))
		for _, file := range migrationFiles(t, "up") {
			// What psql -1 does.
			_, err := byHand.Exec(t.Context(), "BEGIN;\n"+file.sql+";\nCOMMIT", pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err, file.name)
		}
		require.Equal(t, catalog(t, byUp), catalog(t, byHand))
		for _, file := range slices.Backward(migrationFiles(t, "down")) {
			_, err := byHand.Exec(t.Context(), "BEGIN;\n"+file.sql+";\nCOMMIT", pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err, file.name)
		}
		require.NoError(t, migrations.Down(t.Context(), byUp))
		require.Equal(t, catalog(t, byUp), catalog(t, byHand))
	})
	t.Run("run under psql -1", func(t *testing.T) {
		t.Parallel()
		psql, err := exec.LookPath("psql")
		if err != nil {
			t.Skip("psql is not on the PATH")
		}
		pool, byUp := newDatabase(t, ""), newDatabase(t, "")
		run := func(direction string, files []migrationFile) {
			for _, file := range files {
				cmd := exec.CommandContext(t.Context(), psql, "-X", "-q", "-1", "-v", "ON_ERROR_STOP=1",
					"-d", databaseURL(pool), "-f", filepath.Join("../migrations", file.name))
				out, err := cmd.CombinedOutput()
				require.NoError(t, err, "%s %s: %s", direction, file.name, out)
				require.Empty(t, string(out), "no warning, such as that of SET LOCAL outside a transaction")
			}
		}
		run("up", migrationFiles(t, "up"))
		require.NoError(t, migrations.Up(t.Context(), byUp))
		require.Equal(t, catalog(t, byUp), catalog(t, pool))
		requireWorks(t, pool)
		_, err = pool.Exec(t.Context(), "TRUNCATE latchkey.setup_requests")
		require.NoError(t, err)
		down := migrationFiles(t, "down")
		slices.Reverse(down)
		run("down", down)
	})
	t.Run("go up once, whoever starts at the same time", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "")
		ended := make([]func() (struct{}, error), 5)
		for i := range ended {
			replica := samePool(t, pool)
			ended[i] = inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Up(t.Context(), replica) })
		}
		for _, wait := range ended {
			_, err := wait()
			require.NoError(t, err)
		}
		requireVersion(t, pool, latest)
		requireWorks(t, pool)
		requireNoLockLeft(t, pool)
	})
	t.Run("do not go down over rows", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		requireWorks(t, pool)
		err := migrations.Down(t.Context(), pool)
		requireSQLState(t, "55000", err)
		version, dirty, err := migrations.Version(t.Context(), pool)
		require.NoError(t, err)
		require.False(t, dirty)
		require.GreaterOrEqual(t, version, uint(2), "the table's own migration stays")
		var rows int
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT count(*) FROM latchkey.setup_requests").Scan(&rows))
		require.Equal(t, 1, rows)
		requireNoLockLeft(t, pool)

		require.NoError(t, migrations.Up(t.Context(), pool))
		requireVersion(t, pool, latest)
		_, err = pool.Exec(t.Context(), "TRUNCATE latchkey.setup_requests")
		require.NoError(t, err)
		require.NoError(t, migrations.Down(t.Context(), pool))
	})
	t.Run("leave a database alone that is ahead of them", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		_, err := pool.Exec(t.Context(), "UPDATE latchkey.schema_migrations SET version = version + 1")
		require.NoError(t, err)
		before := catalog(t, pool)
		for _, run := range []func(context.Context, *pgxpool.Pool) error{migrations.Up, migrations.Down} {
			require.ErrorIs(t, run(t.Context(), pool), migrations.ErrAhead)
			requireVersion(t, pool, latest+1)
			require.Equal(t, before, catalog(t, pool))
			requireNoLockLeft(t, pool)
		}
		requireWorks(t, pool)
	})
	t.Run("refuse what another tool left half done", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		_, err := pool.Exec(t.Context(), "UPDATE latchkey.schema_migrations SET dirty = true")
		require.NoError(t, err)
		_, dirty, err := migrations.Version(t.Context(), pool)
		require.NoError(t, err)
		require.True(t, dirty)
		for _, run := range []func(context.Context, *pgxpool.Pool) error{migrations.Up, migrations.Down} {
			require.ErrorContains(t, run(t.Context(), pool), fmt.Sprint(latest))
			requireNoLockLeft(t, pool)
		}
	})
}

func TestMigrationsKilledHalfway(t *testing.T) {
	t.Parallel()
	latest := latestMigration(t)

	t.Run("leave the version before, and none that is dirty", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		require.NoError(t, migrations.Down(t.Context(), pool))
		empty := catalog(t, pool)
		observer := testdb.Conn(t, databaseURL(pool))

		// Every file ends with a write of the version, so it runs as far as that.
		blocker := begin(t, testdb.Conn(t, databaseURL(pool)), pgx.TxOptions{})
		_, err := blocker.Exec(t.Context(), "LOCK TABLE latchkey.schema_migrations IN EXCLUSIVE MODE")
		require.NoError(t, err)
		migrator := samePool(t, pool)
		pid := pidOf(t, migrator)
		up := inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Up(t.Context(), migrator) })
		testdb.WaitForLockWait(t, observer, pid)
		_, err = observer.Exec(t.Context(), "SELECT pg_terminate_backend($1)", int64(pid))
		require.NoError(t, err)
		_, err = up()
		require.Error(t, err)
		require.NoError(t, blocker.Rollback(t.Context()))

		requireVersion(t, pool, 0)
		require.Equal(t, empty, catalog(t, pool))
		requireNoLockLeft(t, pool)
		require.NoError(t, migrations.Up(t.Context(), migrator), "the pool is usable")
		requireVersion(t, pool, latest)
		requireWorks(t, pool)
	})
	t.Run("keep those that were done", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		observer := testdb.Conn(t, databaseURL(pool))
		reader := begin(t, testdb.Conn(t, databaseURL(pool)), pgx.TxOptions{})
		_, err := reader.Exec(t.Context(), "SELECT FROM latchkey.setup_requests")
		require.NoError(t, err)
		migrator := samePool(t, pool)
		pid := pidOf(t, migrator)
		down := inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Down(t.Context(), migrator) })
		testdb.WaitForLockWait(t, observer, pid)
		_, err = observer.Exec(t.Context(), "SELECT pg_terminate_backend($1)", int64(pid))
		require.NoError(t, err)
		_, err = down()
		require.Error(t, err)
		requireVersion(t, pool, 2) // whose table the reader reads
		require.NoError(t, reader.Rollback(t.Context()))
		require.NoError(t, migrations.Up(t.Context(), pool))
		requireVersion(t, pool, latest)
		requireWorks(t, pool)
	})
	t.Run("give up on a busy table rather than queue up in front of everybody", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		reader := begin(t, testdb.Conn(t, databaseURL(pool)), pgx.TxOptions{})
		_, err := reader.Exec(t.Context(), "SELECT FROM latchkey.setup_requests")
		require.NoError(t, err)
		requireSQLState(t, "55P03", migrations.Down(t.Context(), pool))
		requireVersion(t, pool, 2)
		requireNoLockLeft(t, pool)
		require.NoError(t, reader.Rollback(t.Context()))
		require.NoError(t, migrations.Up(t.Context(), pool))
		requireWorks(t, pool)
	})
}

func TestMigrationsTakeTurns(t *testing.T) {
	t.Parallel()
	latest := latestMigration(t)
	key, err := repository.Key("schema_migrations", "latchkey")
	require.NoError(t, err)
	// lock is another migrator that is at work.
	lock := func(t *testing.T, pool *pgxpool.Pool) (unlock func()) {
		t.Helper()
		conn := testdb.Conn(t, databaseURL(pool))
		_, err := conn.Exec(t.Context(), "SELECT pg_advisory_lock($1)", key)
		require.NoError(t, err)
		return func() {
			_, err := conn.Exec(t.Context(), "SELECT pg_advisory_unlock($1)", key)
			require.NoError(t, err)
		}
	}

	t.Run("and wait for as long as the context allows", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "")
		unlock := lock(t, pool)
		short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
		defer cancel()
		err := migrations.Up(short, pool)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, migrations.ErrLocked, "it is the context that was short")

		cancelled, cancel := context.WithCancel(t.Context())
		up := inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Up(cancelled, pool) })
		require.Eventually(t, func() bool { return pool.Stat().AcquiredConns() == 1 }, patience, time.Millisecond)
		cancel()
		_, err = up()
		require.ErrorIs(t, err, context.Canceled)
		requireVersion(t, pool, 0)

		unlock()
		requireNoLockLeft(t, pool)
		require.NoError(t, migrations.Up(t.Context(), pool))
		requireVersion(t, pool, latest)
	})
	t.Run("whatever the database's timeouts are", func(t *testing.T) {
		t.Parallel()
		pool := newDatabase(t, "")
		alter := "ALTER DATABASE " + pgx.Identifier{pool.Config().ConnConfig.Database}.Sanitize() + " SET "
		testdb.Exec(t, databaseURL(pool), alter+"lock_timeout = '200ms'", alter+"statement_timeout = '5s'",
			alter+"idle_in_transaction_session_timeout = '200ms'")
		unlock := lock(t, pool)
		ended := make([]func() (struct{}, error), 5)
		pools := make([]*pgxpool.Pool, len(ended))
		for i := range ended {
			pools[i] = samePool(t, pool)
			ended[i] = inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Up(t.Context(), pools[i]) })
		}
		for _, p := range pools {
			require.Eventually(t, func() bool { return p.Stat().AcquiredConns() == 1 }, patience, time.Millisecond)
		}
		<-time.After(time.Second) // longer than any of the timeouts that could end the wait
		requireVersion(t, pool, 0)
		unlock()
		for _, wait := range ended {
			_, err := wait()
			require.NoError(t, err)
		}
		requireVersion(t, pool, latest)
	})
	t.Run("without a statement that waits in the server, for which an index build would wait", func(t *testing.T) {
		t.Parallel()
		pool := testdb.Pool(t)
		lock(t, pool)
		ctx, cancel := context.WithCancel(t.Context())
		migrator := samePool(t, pool)
		pid := pidOf(t, migrator)
		_, err := pool.Exec(t.Context(), "CREATE TABLE public.host (id integer)")
		require.NoError(t, err)
		up := inBackground(t, func() (struct{}, error) { return struct{}{}, migrations.Up(ctx, migrator) })
		waitUntil(t, testdb.Conn(t, databaseURL(pool)),
			"SELECT query LIKE '%advisory_lock%' FROM pg_stat_activity WHERE pid = $1", int64(pid))
		bounded, stop := context.WithTimeout(t.Context(), patience)
		defer stop()
		_, err = pool.Exec(bounded, "CREATE INDEX CONCURRENTLY ON public.host (id)")
		require.NoError(t, err)
		cancel()
		_, err = up()
		require.ErrorIs(t, err, context.Canceled)
	})
	t.Run("on one connection, which they give back as it was", func(t *testing.T) {
		t.Parallel()
		admin := testdb.Pool(t)
		pool := testdb.PoolAt(t, databaseURL(admin), maxConns(1), withSettings(map[string]string{"lock_timeout": "7s"}))
		pid, before := pidOf(t, pool), sessionOf(t, pool)
		for range 20 {
			require.NoError(t, migrations.Up(t.Context(), pool))
			require.NoError(t, migrations.Down(t.Context(), pool))
			requireVersion(t, pool, 0)
		}
		require.NoError(t, migrations.Up(t.Context(), pool))
		require.Equal(t, pid, pidOf(t, pool))
		require.Empty(t, changes(before, sessionOf(t, pool)))
		require.Zero(t, pool.Stat().AcquiredConns())
		require.Equal(t, int64(1), pool.Stat().NewConnsCount())
		requireNoLockLeft(t, pool)
		var others int
		require.NoError(t, admin.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_stat_activity
			WHERE datname = current_database() AND backend_type = 'client backend' AND pid NOT IN (pg_backend_pid(), $1)`,
			int64(pid)).Scan(&others))
		require.Zero(t, others, "no backend is left behind")
		requireWorks(t, pool)
	})
}

func TestMigrationsOfAnyRole(t *testing.T) {
	t.Parallel()
	latest := latestMigration(t)

	t.Run("keep one version table, whatever the search_path is", func(t *testing.T) {
		t.Parallel()
		admin := newDatabase(t, "")
		url := databaseURL(admin)
		testdb.Exec(t, url, "CREATE SCHEMA host", "CREATE TABLE host.schema_migrations (version bigint, dirty boolean)",
			"INSERT INTO host.schema_migrations VALUES (99, true)")
		for _, path := range []string{"", "host", "host, public", "public", `"$user", public`, "host, pg_catalog", "latchkey"} {
			pool := testdb.PoolAt(t, url, maxConns(1), withSettings(map[string]string{"search_path": path}))
			require.NoError(t, migrations.Up(t.Context(), pool), path)
			requireVersion(t, pool, latest)
			if path == "public" {
				testdb.Exec(t, url, "CREATE SCHEMA IF NOT EXISTS AUTHORIZATION CURRENT_USER")
			}
		}
		rows, err := admin.Query(t.Context(), `
			SELECT schemaname || '.' || tablename FROM pg_tables WHERE tablename = 'schema_migrations' ORDER BY 1`)
		require.NoError(t, err)
		tables, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		require.Equal(t, []string{"host.schema_migrations", "latchkey.schema_migrations"}, tables)
		var version int
		require.NoError(t, admin.QueryRow(t.Context(), "SELECT version FROM host.schema_migrations").Scan(&version))
		require.Equal(t, 99, version)
	})
	t.Run("go up and down under any default isolation level", func(t *testing.T) {
		t.Parallel()
		admin := testdb.Pool(t)
		for name, settings := range foreign {
			t.Log("with " + name)
			pool := testdb.PoolAt(t, databaseURL(admin), maxConns(1), withSettings(settings))
			require.NoError(t, migrations.Up(t.Context(), pool))
			requireVersion(t, pool, latest)
			require.NoError(t, migrations.Down(t.Context(), pool))
			requireVersion(t, pool, 0)
		}
	})
	t.Run("are up to date also for a role that may only read", func(t *testing.T) {
		t.Parallel()
		admin := testdb.Pool(t)
		role := "reader_" + strings.ReplaceAll(uuid.NewString(), "-", "")
		for _, sql := range []string{
			"CREATE ROLE " + role + " LOGIN PASSWORD 'reader'",
			"GRANT USAGE ON SCHEMA latchkey TO " + role,
			"GRANT SELECT ON ALL TABLES IN SCHEMA latchkey TO " + role,
		} {
			_, err := admin.Exec(t.Context(), sql)
			require.NoError(t, err)
		}
		t.Cleanup(func() {
			// The last of it goes with the database.
			_, err := admin.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role, pgx.QueryExecModeSimpleProtocol)
			require.NoError(t, err)
		})
		reader := testdb.PoolAt(t, databaseURL(admin), maxConns(1), func(c *pgxpool.Config) {
			c.ConnConfig.User, c.ConnConfig.Password = role, "reader"
			c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on"
		})
		requireVersion(t, reader, latest)
		require.NoError(t, migrations.Up(t.Context(), reader))
		requireSQLState(t, "42501", migrations.Down(t.Context(), reader))
		requireVersion(t, reader, latest)
		requireNoLockLeft(t, admin)
	})
	t.Run("are refused through a pooler", func(t *testing.T) {
		t.Parallel()
		admin := newDatabase(t, "")
		pooled := testdb.PoolAt(t, databaseURL(admin), func(c *pgxpool.Config) {
			c.ConnConfig.TLSConfig, c.ConnConfig.Fallbacks = nil, nil
			dial := c.ConnConfig.DialFunc
			c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
				conn, err := dial(ctx, network, address)
				if err != nil {
					return nil, err
				}
				return pooler(conn), nil
			}
		})
		require.NoError(t, pooled.Ping(t.Context()))
		for _, run := range []func(context.Context, *pgxpool.Pool) error{migrations.Up, migrations.Down} {
			require.ErrorIs(t, run(t.Context(), pooled), migrations.ErrPooler)
		}
		requireVersion(t, pooled, 0)
		requireNoLockLeft(t, admin)
		require.Empty(t, catalog(t, admin))
	})
}

// pooler gives the client a process number of its own, as poolers do, and is transparent otherwise.
func pooler(server net.Conn) net.Conn {
	client, side := net.Pipe()
	go func() {
		defer side.Close()
		defer server.Close()
		frontend := pgproto3.NewFrontend(server, nil)
		for {
			message, err := frontend.Receive()
			if err != nil {
				return
			}
			if key, ok := message.(*pgproto3.BackendKeyData); ok {
				key.ProcessID += 1 << 24
			}
			bytes, err := message.Encode(nil)
			if err != nil {
				return
			}
			if _, err := side.Write(bytes); err != nil {
				return
			}
		}
	}()
	return piped{client, server}
}

// piped reads from the pipe, and writes to the server itself.
type piped struct {
	net.Conn
	server net.Conn
}

func (p piped) Write(b []byte) (int, error) { return p.server.Write(b) }
func (p piped) Close() error                { return errors.Join(p.Conn.Close(), p.server.Close()) }

func TestMigrationFiles(t *testing.T) {
	t.Parallel()
	up, down := migrationFiles(t, "up"), migrationFiles(t, "down")

	t.Run("come in pairs of one version, one name and one width", func(t *testing.T) {
		t.Parallel()
		require.Len(t, down, len(up))
		seen := map[uint]bool{}
		for i := range up {
			require.Equal(t, up[i].version, down[i].version)
			require.Equal(t, strings.TrimSuffix(up[i].name, ".up.sql"), strings.TrimSuffix(down[i].name, ".down.sql"))
			require.Regexp(t, `^\d{6}_[a-z0-9]+_[a-z0-9_]+\.up\.sql$`, up[i].name)
			require.False(t, seen[up[i].version], "version %d twice", up[i].version)
			seen[up[i].version] = true
		}
	})
	t.Run("are all embedded", func(t *testing.T) {
		t.Parallel()
		onDisk, err := filepath.Glob("../migrations/*.sql")
		require.NoError(t, err)
		embedded, err := fs.Glob(migrations.FS, "*")
		require.NoError(t, err)
		require.Len(t, embedded, len(up)+len(down))
		for i, path := range onDisk {
			require.Equal(t, filepath.Base(path), embedded[i])
		}
	})
	for _, file := range slices.Concat(up, down) {
		t.Run(file.name+" begins with its lock_timeout and ends no transaction", func(t *testing.T) {
			t.Parallel()
			require.NoError(t, checkMigration(file.sql))
		})
	}
	t.Run("that do not are found", func(t *testing.T) {
		t.Parallel()
		const good = "SET LOCAL lock_timeout = '3s';\n"
		require.NoError(t, checkMigration(good+"CREATE FUNCTION f() RETURNS void LANGUAGE plpgsql AS $$ BEGIN NULL; END; $$;"))
		for _, bad := range []string{
			"CREATE TABLE t ();",
			"CREATE TABLE t (); " + good,
			"SET lock_timeout = '3s';",
			good + "BEGIN; CREATE TABLE t (); COMMIT;",
			good + "START TRANSACTION;",
			good + "rollback;",
			good + "/* x */ commit work;",
			good + "CREATE TABLE IF NOT EXISTS latchkey.t ();",
			good + "DROP INDEX CONCURRENTLY IF EXISTS latchkey.i;",
		} {
			require.Error(t, checkMigration(bad), bad)
		}
	})
}

var (
	transactionControl = regexp.MustCompile(`(?i)^(begin|start|commit|end|rollback|abort|savepoint|release|prepare)\b`)
	localLockTimeout   = regexp.MustCompile(`(?i)^set local lock_timeout = '[1-9]s'$`)
	ifExists           = regexp.MustCompile(`(?i)^(create|drop|alter)\b[^(]*\bif (not )?exists\b`)
	ofTheMigrator      = regexp.MustCompile(`(?i)^create (schema if not exists latchkey|table if not exists latchkey\.schema_migrations\b.*)$`)
)

func checkMigration(sql string) error {
	statements := splitStatements(sql)
	for i, s := range statements {
		s = strings.Join(strings.Fields(strings.TrimSpace(uncomment(s))), " ")
		switch {
		case i == 0 && !localLockTimeout.MatchString(s):
			return fmt.Errorf("the first statement must bound its lock waits: %s", s)
		case transactionControl.MatchString(s):
			return fmt.Errorf("the migrator and psql -1 make the transaction: %s", s)
		case ifExists.MatchString(s) && !ofTheMigrator.MatchString(s):
			return fmt.Errorf("what is there already is not what this file would make: %s", s)
		}
	}
	return nil
}

// uncomment drops comments and keeps strings, unlike sqlCode.
func uncomment(sql string) string {
	var b strings.Builder
	for at := 0; at < len(sql); {
		kind, n := lexeme(sql, at)
		if kind == comment {
			b.WriteByte(' ')
		} else {
			b.WriteString(sql[at : at+n])
		}
		at += n
	}
	return b.String()
}

type migrationFile struct {
	name    string
	version uint
	sql     string
}

// migrationFiles returns the embedded files of one direction by their versions.
func migrationFiles(t *testing.T, direction string) []migrationFile {
	t.Helper()
	names, err := fs.Glob(migrations.FS, "*."+direction+".sql")
	require.NoError(t, err)
	require.NotEmpty(t, names)
	files := make([]migrationFile, len(names))
	for i, name := range names {
		digits, _, _ := strings.Cut(name, "_")
		version, err := strconv.ParseUint(digits, 10, 32)
		require.NoError(t, err, name)
		sql, err := fs.ReadFile(migrations.FS, name)
		require.NoError(t, err)
		files[i] = migrationFile{name, uint(version), string(sql)}
	}
	require.True(t, slices.IsSortedFunc(files, func(a, b migrationFile) int { return int(a.version) - int(b.version) }),
		"the order of the names, which sqlc takes, is that of the versions")
	return files
}

func latestMigration(t *testing.T) uint {
	t.Helper()
	files := migrationFiles(t, "up")
	return files[len(files)-1].version
}

func requireVersion(t *testing.T, pool *pgxpool.Pool, want uint) {
	t.Helper()
	version, dirty, err := migrations.Version(t.Context(), pool)
	require.NoError(t, err)
	require.False(t, dirty)
	require.Equal(t, want, version)
}

// requireWorks makes one setup request.
func requireWorks(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	repo, err := repository.New(pool)
	require.NoError(t, err)
	_, err = repo.CreateSetup(t.Context(), uuid.New(), nil)
	require.NoError(t, err)
}

// requireNoLockLeft requires that nobody holds or awaits an advisory lock, once sessions that end have ended.
func requireNoLockLeft(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	require.Eventually(t, func() bool {
		var locks int
		err := pool.QueryRow(t.Context(), `
			SELECT count(*) FROM pg_locks
			WHERE locktype = 'advisory' AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&locks)
		return err == nil && locks == 0
	}, patience, 5*time.Millisecond)
}

// databaseURL returns the connection string of a pool of newDatabase, whose own still names another database.
func databaseURL(pool *pgxpool.Pool) string {
	database := pool.Config().ConnConfig.Database
	u, err := url.Parse(pool.Config().ConnString())
	if err != nil || u.Scheme == "" {
		return pool.Config().ConnString() + " dbname=" + database // of a keyword given twice the last one counts
	}
	u.Path = "/" + database
	return u.String()
}

// samePool returns one more pool on the database, as another replica has one.
func samePool(t *testing.T, pool *pgxpool.Pool) *pgxpool.Pool {
	t.Helper()
	return testdb.PoolAt(t, databaseURL(pool), maxConns(1))
}

// catalog describes every object of the schema latchkey, comments and privileges included, and nothing that
// differs between two databases with the same schema.
func catalog(t *testing.T, pool *pgxpool.Pool) []string {
	t.Helper()
	queries := map[string]string{
		"schema":     `SELECT nspname::text, obj_description(oid, 'pg_namespace'), nspacl::text FROM pg_namespace WHERE nspname = 'latchkey'`,
		"relation":   `SELECT relname::text, relkind::text, relpersistence::text, reloptions::text, relacl::text, relrowsecurity::text, obj_description(oid, 'pg_class') FROM pg_class WHERE relnamespace = to_regnamespace('latchkey')`,
		"column":     `SELECT c.relname::text, a.attnum::text, a.attname::text, format_type(a.atttypid, a.atttypmod), a.attnotnull::text, pg_get_expr(d.adbin, d.adrelid), col_description(c.oid, a.attnum) FROM pg_class AS c JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 LEFT JOIN pg_attrdef AS d ON d.adrelid = c.oid AND d.adnum = a.attnum WHERE c.relnamespace = to_regnamespace('latchkey') AND c.relkind IN ('r', 'v', 'm', 'p', 'c')`,
		"constraint": `SELECT conrelid::regclass::text, conname::text, pg_get_constraintdef(oid), convalidated::text FROM pg_constraint WHERE connamespace = to_regnamespace('latchkey')`,
		"index":      `SELECT tablename::text, indexname::text, indexdef FROM pg_indexes WHERE schemaname = 'latchkey'`,
		"view":       `SELECT viewname::text, definition FROM pg_views WHERE schemaname = 'latchkey'`,
		"trigger":    `SELECT tgrelid::regclass::text, pg_get_triggerdef(oid) FROM pg_trigger WHERE tgrelid IN (SELECT oid FROM pg_class WHERE relnamespace = to_regnamespace('latchkey')) AND NOT tgisinternal`,
		"function":   `SELECT pg_get_functiondef(oid), proacl::text, obj_description(oid, 'pg_proc') FROM pg_proc WHERE pronamespace = to_regnamespace('latchkey')`,
		"type":       `SELECT typname::text, typtype::text, obj_description(oid, 'pg_type') FROM pg_type WHERE typnamespace = to_regnamespace('latchkey')`,
	}
	var all []string
	for kind, sql := range queries {
		rows, err := pool.Query(t.Context(), sql)
		require.NoError(t, err, kind)
		objects, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (string, error) {
			values, err := row.Values()
			return fmt.Sprintf("%s %q", kind, values), err
		})
		require.NoError(t, err, kind)
		all = append(all, objects...)
	}
	slices.Sort(all)
	return all
}
