// Package testdb gives each test a database of its own, with latchkey's schema, on one server per test binary.
//
// A package whose tests use it says so once:
//
//	func TestMain(m *testing.M) { testdb.Main(m) }
//
// The server is the one that package pgserver finds or starts. With LATCHKEY_POSTGRES=docker it is a container of
// LATCHKEY_POSTGRES_IMAGE instead, by default of the official image. Where no image can be pulled, such as a CI machine
// without a registry, testcontainers-go needs TESTCONTAINERS_RYUK_DISABLED=true as well.
//
// With LATCHKEY_PGBOUNCER, the program of a PgBouncer, it starts one in front of the server, and [URL] leads through it; [Conn]
// and [Exec] still go past it. Each test then also checks that it left nothing on the connections to the server.
//
// The databases have a foreign search_path and an odd time zone, since the product must care about neither. The functions
// that take a [testing.TB] end the test when they fail, so they are called from the test's own goroutine.
package testdb

import (
	"context"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/pgserver"
)

// TimeZone is the time zone of the test databases: its offset is no whole hour, and daylight saving moves it by 30 minutes.
const TimeZone = "Australia/Lord_Howe"

// SearchPath is the search_path of the test databases. There is no such schema.
const SearchPath = "nowhere"

// patience bounds every wait. It is far beyond what a busy machine needs, so only a wait for something that never comes
// reaches it.
const patience = 30 * time.Second

var server *pgserver.Server

// Main starts the server, runs the tests and exits with their code.
func Main(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) (code int) {
	s, closeServer, err := start(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "latchkey tests have no PostgreSQL:", err)
		return 1
	}
	defer func() {
		if err := closeServer(); err != nil {
			fmt.Fprintln(os.Stderr, "latchkey tests:", err)
			code = max(code, 1)
		}
	}()
	server = s
	closePooler, err := startPooler(context.Background())
	if err != nil {
		fmt.Fprintln(os.Stderr, "latchkey tests:", err)
		return 1
	}
	defer func() {
		if err := closePooler(); err != nil {
			fmt.Fprintln(os.Stderr, "latchkey tests:", err)
			code = max(code, 1)
		}
	}()
	return m.Run()
}

func start(ctx context.Context) (*pgserver.Server, func() error, error) {
	switch kind := os.Getenv("LATCHKEY_POSTGRES"); kind {
	case "":
		s, err := pgserver.Start(ctx, pgserver.Options{Log: log})
		if err != nil {
			return nil, nil, err
		}
		return s, s.Close, nil
	case "docker":
		return startContainer(ctx)
	default:
		return nil, nil, fmt.Errorf("LATCHKEY_POSTGRES is %q, want docker or nothing", kind)
	}
}

// log tells people which server a run was made on: a green run means nothing without it.
func log(format string, args ...any) {
	fmt.Fprintf(os.Stderr, "latchkey tests: "+format+"\n", args...)
}

// Server returns the test binary's server.
func Server(t testing.TB) *pgserver.Server {
	t.Helper()
	require.NotNil(t, server, "the package's TestMain does not call testdb.Main")
	return server
}

// URL makes a fresh database and returns its connection string. The database is dropped at the end of the test.
func URL(t testing.TB) string {
	t.Helper()
	s := Server(t)
	url, drop, err := s.NewDatabase(t.Context())
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := drop(context.Background()); err != nil {
			t.Error(err)
		}
	})
	config, err := pgx.ParseConfig(url)
	require.NoError(t, err)
	database := pgx.Identifier{config.Database}.Sanitize()
	Exec(t, s.URL(),
		"ALTER DATABASE "+database+" SET timezone = '"+TimeZone+"'",
		"ALTER DATABASE "+database+" SET search_path = '"+SearchPath+"'")
	return throughPooler(t, url)
}

// URLForExample is [URL] for an Example function, which has no testing.TB: it drops the database itself, and what fails
// is a panic.
func URLForExample() (url string, drop func()) {
	url, dropDatabase, err := server.NewDatabase(context.Background())
	if err != nil {
		panic(err) //nolint:forbidigo // an Example has nobody to return an error to
	}
	return url, func() {
		if err := dropDatabase(context.Background()); err != nil {
			panic(err) //nolint:forbidigo // an Example has nobody to return an error to
		}
	}
}

// Pool returns a pool on a fresh database, after the options have changed its configuration.
func Pool(t testing.TB, opts ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return PoolAt(t, URL(t), opts...)
}

// PoolAt returns one more pool on a database of [URL]. It is closed at the end of the test, which fails when a connection
// was not given back by then.
func PoolAt(t testing.TB, url string, opts ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	config, err := pgxpool.ParseConfig(url)
	require.NoError(t, err)
	for _, opt := range opts {
		opt(config)
	}
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	require.NoError(t, err)
	t.Cleanup(func() {
		closed := make(chan struct{})
		go func() {
			pool.Close()
			close(closed)
		}()
		select {
		case <-closed:
		case <-time.After(patience):
			t.Errorf("%d connections were not given back to the pool", pool.Stat().AcquiredConns())
		}
	})
	return pool
}

// Conn returns a connection that belongs to no pool, directly to the server. It is closed at the end of the test.
func Conn(t testing.TB, url string) *pgx.Conn {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), Direct(t, url))
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close(context.Background()) })
	return conn
}

// Exec runs the statements on a new connection, directly to the server, to give the database or a role a twist before the test.
func Exec(t testing.TB, url string, statements ...string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), Direct(t, url))
	require.NoError(t, err)
	for _, sql := range statements {
		if _, err = conn.Exec(t.Context(), sql); err != nil {
			err = fmt.Errorf("%s: %w", sql, err)
			break
		}
	}
	require.NoError(t, errors.Join(err, conn.Close(context.WithoutCancel(t.Context()))))
}
