//go:build unix

package pgserver

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
)

// endVariable makes the test binary a program that starts a server and ends in the way the variable says.
const endVariable = "LATCHKEY_TEST_END"

var shared struct {
	*Server
	err error
}

func TestMain(m *testing.M) {
	if how := os.Getenv(endVariable); how != "" {
		startAndEnd(how)
	}
	shared.Server, shared.err = Start(context.Background(), Options{Log: func(format string, args ...any) {
		fmt.Fprintf(os.Stderr, "pgserver tests: "+format+"\n", args...)
	}})
	code := m.Run()
	if shared.Server != nil {
		if err := shared.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

func server(t *testing.T) *Server {
	t.Helper()
	require.NoError(t, shared.err)
	return shared.Server
}

// localEnv is the usual surroundings without a server that the user named.
func localEnv(version string) env {
	e := fromEnv()
	e.url, e.version = "", version
	return e
}

func connect(t *testing.T, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), url)
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

func ask[T any](t *testing.T, conn *pgx.Conn, sql string, args ...any) T {
	t.Helper()
	var v T
	require.NoError(t, conn.QueryRow(t.Context(), sql, args...).Scan(&v))
	return v
}

// folder returns where a server that was started here keeps its things.
func folder(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	return filepath.Dir(ask[string](t, conn, "SHOW data_directory"))
}

func TestStartedServer(t *testing.T) {
	t.Parallel()
	s, err := start(t.Context(), localEnv(""), Options{Settings: map[string]string{"work_mem": "5MB"}})
	require.NoError(t, err)
	defer s.Close()
	conn := connect(t, s.URL())

	require.Equal(t, ask[string](t, conn, "SELECT split_part(current_setting('server_version'), ' ', 1)"), s.Version())
	require.Contains(t, s.Provider(), "server programs ")
	for setting, want := range map[string]string{
		"work_mem":            "5MB",
		"listen_addresses":    "127.0.0.1",
		"password_encryption": "scram-sha-256",
		"max_connections":     "300",
		"fsync":               "off",
		"deadlock_timeout":    "1s", // the product's rules about it are tested with the value that everybody has
		"server_encoding":     "UTF8",
	} {
		require.Equal(t, want, ask[string](t, conn, "SELECT current_setting($1)", setting), setting)
	}

	dir := folder(t, conn)
	if sockets := ask[string](t, conn, "SHOW unix_socket_directories"); sockets != "" {
		require.Equal(t, dir, sockets)
	}
	wrong := conn.Config().Copy()
	wrong.Password = "wrong"
	_, err = pgx.ConnectConfig(t.Context(), wrong)
	require.True(t, hasCode(err, "28P01"), "a wrong password gave %v", err)

	// Close does not wait for clients to leave.
	require.NoError(t, s.Close())
	require.NoDirExists(t, dir)
	require.Error(t, conn.Ping(t.Context()))
	require.NoError(t, s.Close(), "a second Close")
}

func TestServerThatCannotStartSaysWhy(t *testing.T) {
	t.Parallel()
	_, err := start(t.Context(), localEnv(""), Options{Settings: map[string]string{"no_such_setting": "1"}})
	require.ErrorContains(t, err, "it ended before it was ready")
	require.ErrorContains(t, err, `unrecognized configuration parameter "no_such_setting"`)

	// Close looks whether the folder is gone, and launch joins its error.
	require.NotContains(t, err.Error(), "could not be removed")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = start(ctx, localEnv(""), Options{})
	require.ErrorIs(t, err, context.Canceled)
	require.NotContains(t, err.Error(), "could not be removed")
}

func TestPortThatIsTakenIsRecognised(t *testing.T) {
	t.Parallel()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	require.NoError(t, err)
	p, provider, err := locate(t.Context(), localEnv(""), 0, Options{})
	require.NoError(t, err)

	_, err = launch(t.Context(), p, provider, Options{Settings: map[string]string{"port": port}}, nil)
	require.ErrorIs(t, err, errPortTaken)
}

func TestStandby(t *testing.T) {
	t.Parallel()
	primary, err := start(t.Context(), localEnv(""), Options{})
	require.NoError(t, err)
	defer primary.Close()
	writer := connect(t, primary.URL())
	_, err = writer.Exec(t.Context(), "CREATE TABLE public.t AS SELECT 'before' AS at")
	require.NoError(t, err)
	standby, err := primary.Standby(t.Context(), Options{Settings: map[string]string{"work_mem": "5MB"}})
	require.NoError(t, err)
	defer standby.Close()
	require.Equal(t, primary.Version(), standby.Version())
	require.Equal(t, "a standby, "+primary.Provider(), standby.Provider())

	_, err = writer.Exec(t.Context(), "INSERT INTO public.t VALUES ('after')")
	require.NoError(t, err)
	require.Equal(t, "standby", ask[string](t, writer, "SELECT application_name FROM pg_stat_replication"))
	reader := connect(t, standby.URL())
	require.Equal(t, "5MB", ask[string](t, reader, "SHOW work_mem"))
	require.Eventually(t, func() bool {
		return ask[int](t, reader, "SELECT count(*) FROM public.t") == 2
	}, readyWithin, 10*time.Millisecond)
	_, err = reader.Exec(t.Context(), "INSERT INTO public.t VALUES ('here')")
	require.True(t, hasCode(err, "25006"), "%v", err)

	dir := folder(t, reader)
	require.NotEqual(t, folder(t, writer), dir)
	require.NoError(t, primary.Close())
	require.True(t, ask[bool](t, reader, "SELECT pg_promote()"))
	_, err = reader.Exec(t.Context(), "INSERT INTO public.t VALUES ('here')")
	require.NoError(t, err)
	require.NoError(t, standby.Close())
	require.NoDirExists(t, dir)

	used, err := Use(t.Context(), server(t).URL(), "somebody's", Options{})
	require.NoError(t, err)
	_, err = used.Standby(t.Context(), Options{})
	require.ErrorContains(t, err, "was not started here")
}

func TestNewDatabase(t *testing.T) {
	t.Parallel()
	s := server(t)

	t.Run("has the schema and is nobody else's", func(t *testing.T) {
		t.Parallel()
		first, drop, err := s.NewDatabase(t.Context())
		require.NoError(t, err)
		second, dropSecond, err := s.NewDatabase(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, dropSecond(context.Background())) }()
		require.NotEqual(t, first, second)

		pool, err := pgxpool.New(t.Context(), first)
		require.NoError(t, err)
		version, dirty, err := migrations.Version(t.Context(), pool)
		require.NoError(t, err)
		require.False(t, dirty)
		require.Positive(t, version)
		pool.Close()

		a, b := connect(t, first), connect(t, second)
		_, err = a.Exec(t.Context(), "CREATE TABLE public.mine ()")
		require.NoError(t, err)
		require.False(t, ask[bool](t, b, "SELECT to_regclass('public.mine') IS NOT NULL"))

		require.NoError(t, drop(t.Context()), "with a connection still open")
		_, err = pgx.Connect(t.Context(), first)
		require.True(t, hasCode(err, "3D000"), "a dropped database gave %v", err)
		require.NoError(t, drop(t.Context()), "a second drop")
	})

	t.Run("can be called by many at once", func(t *testing.T) {
		t.Parallel()
		var wg sync.WaitGroup
		errs := make([]error, 12)
		for i := range errs {
			wg.Go(func() {
				_, drop, err := s.NewDatabase(t.Context())
				if err == nil {
					err = drop(t.Context())
				}
				errs[i] = err
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
	})

	t.Run("makes one template however many processes ask", func(t *testing.T) {
		t.Parallel()
		// A role of its own has no template yet. Every Server is a process for this purpose: they share nothing here.
		conn := connect(t, s.URL())
		role := "role_" + randomHex(4)
		_, err := conn.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN CREATEDB PASSWORD 'p'")
		require.NoError(t, err)
		url := fmt.Sprintf("postgres://%s:p@%s:%d/postgres?sslmode=disable", role, conn.Config().Host, conn.Config().Port)

		var wg sync.WaitGroup
		urls, errs := make([]string, 6), make([]error, 6)
		for i := range errs {
			wg.Go(func() {
				s, err := Use(t.Context(), url, "the test's server", Options{})
				if err == nil {
					urls[i], _, err = s.NewDatabase(t.Context())
				}
				errs[i] = err
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))

		const owned = "SELECT count(*) FROM pg_database WHERE datdba = $1::regrole AND datname LIKE $2"
		require.Equal(t, 1, ask[int](t, conn, owned, role, "latchkey\\_template\\_%"))
		require.Equal(t, 0, ask[int](t, conn, owned, role, "latchkey\\_making\\_%"))
		require.Equal(t, 6, ask[int](t, conn, owned, role, "latchkey\\_db\\_%"))
		require.Equal(t, role, ask[string](t, connect(t, urls[0]), "SELECT nspowner::regrole::text FROM pg_namespace WHERE nspname = 'latchkey'"))

		rows, err := conn.Query(t.Context(), "SELECT datname FROM pg_database WHERE datdba = $1::regrole", role)
		require.NoError(t, err)
		names, err := pgx.CollectRows(rows, pgx.RowTo[string])
		require.NoError(t, err)
		for _, name := range names {
			require.NoError(t, s.drop(t.Context(), name))
		}
		_, err = conn.Exec(t.Context(), "DROP ROLE "+role)
		require.NoError(t, err)
	})
}

func TestUse(t *testing.T) {
	t.Parallel()
	s := server(t)
	conn := connect(t, s.URL())
	role := "role_" + randomHex(4)
	_, err := conn.Exec(t.Context(), "CREATE ROLE "+role+" LOGIN PASSWORD 'p'")
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := conn.Exec(context.Background(), "DROP ROLE "+role)
		require.NoError(t, err)
	})

	t.Run("an existing server is used and left running", func(t *testing.T) {
		var lines []string
		used, err := start(t.Context(), env{url: s.URL()}, Options{Log: func(format string, args ...any) {
			lines = append(lines, fmt.Sprintf(format, args...))
		}})
		require.NoError(t, err)
		require.Equal(t, "the server of LATCHKEY_DATABASE_URL", used.Provider())
		require.Equal(t, s.Version(), used.Version())
		require.Equal(t, []string{"using PostgreSQL " + s.Version() + ": the server of LATCHKEY_DATABASE_URL"}, lines)
		require.NoError(t, used.Close())
		require.NoError(t, conn.Ping(t.Context()))
	})
	t.Run("a role without CREATEDB is refused", func(t *testing.T) {
		url := fmt.Sprintf("postgres://%s:p@%s:%d/postgres?sslmode=disable", role, conn.Config().Host, conn.Config().Port)
		_, err := start(t.Context(), env{url: url}, Options{})
		require.ErrorContains(t, err, "may not create databases")
		require.ErrorContains(t, err, `ALTER ROLE "`+role+`" CREATEDB`)
	})
	t.Run("a version that the server is not is refused", func(t *testing.T) {
		_, err := start(t.Context(), env{url: s.URL(), version: "99"}, Options{})
		require.ErrorContains(t, err, "asks for PostgreSQL 99, but the server of LATCHKEY_DATABASE_URL is "+s.Version())
	})
	t.Run("a server that is not there is an error", func(t *testing.T) {
		port, err := freePort()
		require.NoError(t, err)
		_, err = start(t.Context(), env{url: fmt.Sprintf("postgres://u:p@127.0.0.1:%d/postgres", port)}, Options{})
		require.ErrorContains(t, err, "the server of LATCHKEY_DATABASE_URL")
	})
}

// fetched returns an environment that finds nothing on the machine, so that server programs come from the project's cache.
func fetched(t *testing.T, version string) env {
	t.Helper()
	if _, err := exec.LookPath("npm"); err != nil {
		t.Skip("the npm client, which fetches server programs, is not on this machine")
	}
	e := localEnv(version)
	e.dirs = func() []string { return nil }
	return e
}

func TestFetchedServer(t *testing.T) {
	t.Parallel()
	e := fetched(t, "17")

	t.Run("several at once into an empty cache", func(t *testing.T) {
		t.Parallel()
		cache := t.TempDir()
		stale := filepath.Join(cache, fetchPrefix+"of-a-killed-program")
		require.NoError(t, os.Mkdir(stale, 0o700))
		e := e
		e.cache = func() (string, error) { return cache, nil }
		var (
			wg      sync.WaitGroup
			mu      sync.Mutex
			fetches int
		)
		errs := make([]error, 3)
		for i := range errs {
			wg.Go(func() {
				p, provider, err := locate(t.Context(), e, 17, Options{Log: func(format string, _ ...any) {
					mu.Lock()
					defer mu.Unlock()
					if strings.HasPrefix(format, "fetching") {
						fetches++
					}
				}})
				if err == nil && (p.version.major != 17 || provider != "server programs fetched into "+p.dir) {
					err = fmt.Errorf("got %v, %s", p, provider)
				}
				errs[i] = err
			})
		}
		wg.Wait()
		require.NoError(t, errors.Join(errs...))
		require.Equal(t, 1, fetches)
		left, err := os.ReadDir(cache)
		require.NoError(t, err)
		require.Len(t, left, 2, "want the lock and the programs: %v", left)
	})

	t.Run("runs", func(t *testing.T) {
		t.Parallel()
		s, err := start(t.Context(), e, Options{Log: t.Logf})
		require.NoError(t, err)
		require.True(t, strings.HasPrefix(s.Version(), "17."), s.Version())
		require.Contains(t, s.Provider(), "fetched")
		_, _, err = s.NewDatabase(t.Context())
		require.NoError(t, err)
		require.NoError(t, s.Close())
	})

	t.Run("runs for root from where only root can go", func(t *testing.T) {
		t.Parallel()
		if os.Getuid() != 0 {
			t.Skip("the test is about root, and this is not root")
		}
		p, _, err := locate(t.Context(), e, 17, Options{Log: t.Logf})
		require.NoError(t, err)
		home := t.TempDir()
		require.NoError(t, os.Chmod(home, 0o700))
		require.NoError(t, os.CopyFS(filepath.Join(home, "pg"), os.DirFS(filepath.Dir(p.dir))))

		hidden := e
		hidden.dirs = func() []string { return []string{filepath.Join(home, "pg", "bin")} }
		s, err := start(t.Context(), hidden, Options{})
		require.NoError(t, err)
		defer s.Close()
		require.Equal(t, "server programs in "+filepath.Join(home, "pg", "bin"), s.Provider())
		conn := connect(t, s.URL())
		dir := folder(t, conn)
		require.DirExists(t, filepath.Join(dir, "programs"))
		require.NoError(t, s.Close())
		require.NoDirExists(t, dir)
	})

	t.Run("an interrupted fetch leaves nothing", func(t *testing.T) {
		t.Parallel()
		cache := t.TempDir()
		npm := filepath.Join(t.TempDir(), "npm")
		require.NoError(t, os.WriteFile(npm, []byte("#!/bin/sh\necho half >half.tgz\necho begun >&2\nexit 7\n"), 0o755))
		e := e
		e.cache, e.npm = func() (string, error) { return cache, nil }, npm
		_, err := start(t.Context(), e, Options{})
		require.ErrorContains(t, err, "exit status 7\nbegun")
		requireAllWays(t, err)
		left, err := os.ReadDir(cache)
		require.NoError(t, err)
		require.Len(t, left, 1, "want only the lock: %v", left)
	})
}

func requireAllWays(t *testing.T, err error) {
	t.Helper()
	for _, way := range []string{"LATCHKEY_DATABASE_URL", "install PostgreSQL 15 or newer", "npm client", "LATCHKEY_POSTGRES_VERSION"} {
		require.ErrorContains(t, err, way)
	}
}

func TestNoServerNamesEveryWay(t *testing.T) {
	t.Parallel()
	cache := t.TempDir()
	e := localEnv("17")
	e.npm = filepath.Join(t.TempDir(), "npm")
	e.cache = func() (string, error) { return cache, nil }
	e.dirs = func() []string { return nil }
	_, err := start(t.Context(), e, Options{})
	require.ErrorContains(t, err, "no server programs of PostgreSQL 17 on this machine")
	require.ErrorContains(t, err, "the npm client is needed")
	requireAllWays(t, err)

	e = localEnv("99")
	_, err = start(t.Context(), e, Options{})
	require.ErrorContains(t, err, "version 99 is not one of those that can be fetched, [15 16 17 18]")
	requireAllWays(t, err)
	for _, p := range findPrograms(t.Context(), e.dirs()) {
		require.ErrorContains(t, err, p.dir, "what was found but does not fit")
	}
}

func TestServerEndsWithItsProgram(t *testing.T) {
	t.Parallel()
	if testing.Short() {
		t.Skip("starts a server for each way to end; left out with -short")
	}
	for _, how := range []string{"return", "exit", "panic", "interrupted", "killed", "killed during the start"} {
		t.Run(how, func(t *testing.T) {
			t.Parallel()
			cmd := exec.Command(os.Args[0])
			// A folder of its own shows what the program left, even if it did not live to tell.
			tmp, err := os.MkdirTemp("", "end-")
			require.NoError(t, err)
			require.NoError(t, os.Chmod(tmp, 0o777|os.ModeSticky)) // as every temporary folder, for the server's user
			t.Cleanup(func() { os.RemoveAll(tmp) })
			cmd.Env = append(os.Environ(), endVariable+"="+how, "TMPDIR="+tmp, "LATCHKEY_DATABASE_URL=")
			var stderr strings.Builder
			cmd.Stderr = &stderr
			defer func() { t.Log(stderr.String()) }()
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			t.Cleanup(func() { cmd.Process.Kill() }) //nolint:errcheck // it has ended, unless the test failed

			if how == "killed during the start" {
				eventually(t, func() bool {
					logs, err := filepath.Glob(filepath.Join(tmp, "*", "log"))
					require.NoError(t, err)
					return len(logs) == 1
				})
				require.NoError(t, cmd.Process.Kill())
				require.Error(t, cmd.Wait())
				eventually(t, func() bool { return isEmpty(t, tmp) })
				return
			}

			url, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			conn := connect(t, strings.TrimSpace(url)) // somebody who does not leave must not keep it alive
			dir := folder(t, conn)
			require.Equal(t, tmp, filepath.Dir(dir))
			pid := postmaster(t, conn)
			ask[string](t, conn, "SELECT pg_sleep(0.5)::text")       // dozens of collections in the program
			conn.Exec(t.Context(), "SET application_name = 'asked'") //nolint:errcheck // may end the server before the answer
			switch how {
			case "interrupted":
				require.NoError(t, cmd.Process.Signal(os.Interrupt))
			case "killed":
				require.NoError(t, cmd.Process.Kill())
			}
			err = cmd.Wait()
			require.Equal(t, how == "return", err == nil, "%v", err)

			eventually(t, func() bool { return isEmpty(t, tmp) })
			// A process that may not be signalled is there, but so is a later one with its number.
			require.ErrorIs(t, syscall.Kill(pid, 0), syscall.ESRCH)
			require.Error(t, conn.Ping(t.Context()))
		})
	}
}

func postmaster(t *testing.T, conn *pgx.Conn) int {
	t.Helper()
	var pid int
	_, err := fmt.Sscan(ask[string](t, conn, "SELECT pg_read_file('postmaster.pid')"), &pid)
	require.NoError(t, err)
	return pid
}

func isEmpty(t *testing.T, dir string) bool {
	t.Helper()
	left, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return true
	}
	require.NoError(t, err)
	return len(left) == 0
}

func eventually(t *testing.T, done func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !done() {
		select {
		case <-deadline:
			t.Fatal("waited a minute in vain")
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// startAndEnd is the program of TestServerEndsWithItsProgram.
func startAndEnd(how string) {
	s, err := Start(context.Background(), Options{})
	if err != nil {
		panic(err)
	}
	fmt.Println(s.URL())
	switch how {
	case "return":
		waitForClient(s)
		if err := s.Close(); err != nil {
			panic(err)
		}
		os.Exit(0)
	case "exit":
		waitForClient(s)
		os.Exit(3)
	case "panic":
		waitForClient(s)
		panic("as the test wants it")
	default: // the signal ends it
		for range time.Tick(10 * time.Millisecond) {
			runtime.GC() // nobody knows the Server any more, which must not be its end
		}
	}
}

// waitForClient lets the test ask its questions before the server goes.
func waitForClient(s *Server) {
	ctx := context.Background()
	conn, err := pgx.Connect(ctx, s.URL())
	if err != nil {
		panic(err)
	}
	for n := 0; n == 0; {
		err := conn.QueryRow(ctx, "SELECT count(*) FROM pg_stat_activity WHERE application_name = 'asked'").Scan(&n)
		if err != nil {
			panic(err)
		}
	}
}
