// Package pgserver gives the demo, the tests and the benchmarks a PostgreSQL server, and databases with latchkey's schema
// on it.
//
// [Start] takes the first of these that there is, and [Server.Provider] says which one it was:
//
//  1. an existing server, LATCHKEY_DATABASE_URL; its role needs CREATEDB,
//  2. server programs found on the machine: on the PATH, where pg_config points to, and in the usual places of Debian,
//     Red Hat and macOS,
//  3. server programs in the project's .cache/postgres folder, fetched there once with the npm client.
//
// LATCHKEY_POSTGRES_VERSION, a major version such as 16, narrows the choice to that version. Without it the newest version
// found on the machine is taken, if it is 15 or newer.
//
// A server started here listens on 127.0.0.1 only, keeps everything in a temporary folder, trades durability for speed, and
// is stopped and removed when the program that started it ends, however it ends.
package pgserver

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// MinVersion is the oldest major version of PostgreSQL that latchkey supports.
const MinVersion = 15

// Options says how [Start] and [Use] go about it. The zero value is usable.
type Options struct {
	// Log receives progress lines, such as which server is used and what is fetched. Nil is silent.
	Log func(format string, args ...any)
	// Settings are extra server settings by name. They only apply to a server that is started here.
	Settings map[string]string
	// Own starts a server also if there is LATCHKEY_DATABASE_URL.
	Own bool
}

func (o Options) log(format string, args ...any) {
	if o.Log != nil {
		o.Log(format, args...)
	}
}

// Server is a running PostgreSQL server. Its methods may be called concurrently.
type Server struct {
	provider string
	version  string
	url      string
	stop     func() error
	signal   func(name string) error // has the server end by a signal, and start again; nil if it is not started here
	standby  func(ctx context.Context, o Options) (*Server, error)

	mu       sync.Mutex // one caller makes the template, the others wait for it
	template string     // empty until it is known to be there
}

// Start finds or starts a server, as the package documentation says. The context bounds the start only. The caller must
// call [Server.Close], and may also just end: a server started here ends with the program.
func Start(ctx context.Context, o Options) (*Server, error) {
	return start(ctx, fromEnv(), o)
}

// env is what Start reads from its surroundings. Tests give their own.
type env struct {
	url     string // an existing server
	version string // the wanted major version; empty takes any
	dirs    func() []string
	cache   func() (string, error)
	npm     string
}

func fromEnv() env {
	return env{
		url:     os.Getenv("LATCHKEY_DATABASE_URL"),
		version: os.Getenv("LATCHKEY_POSTGRES_VERSION"),
		dirs:    programDirs,
		cache:   cacheDir,
		npm:     "npm",
	}
}

func start(ctx context.Context, e env, o Options) (*Server, error) {
	wanted, err := parseWanted(e.version)
	if err != nil {
		return nil, err
	}
	if e.url == "" || o.Own {
		return startLocal(ctx, e, wanted, o)
	}
	s, err := Use(ctx, e.url, "the server of LATCHKEY_DATABASE_URL", o)
	if err != nil {
		return nil, err
	}
	// A matrix of versions that silently tests one version several times would be worse than no matrix.
	if v, _ := parseVersion(s.version); wanted != 0 && v.major != wanted {
		return nil, fmt.Errorf("pgserver: LATCHKEY_POSTGRES_VERSION asks for PostgreSQL %d, but the server of LATCHKEY_DATABASE_URL is %s",
			wanted, s.version)
	}
	return s, nil
}

func parseWanted(version string) (int, error) {
	if version == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(version)
	if err != nil || n < MinVersion {
		return 0, fmt.Errorf("pgserver: LATCHKEY_POSTGRES_VERSION is %q, want a major version from %d up, such as 16", version, MinVersion)
	}
	return n, nil
}

// Use wraps a server that is already running. The provider says where it came from, for people to read. Close leaves the
// server running. It is an error when the server is too old or the role of the URL may not create databases.
func Use(ctx context.Context, url, provider string, o Options) (*Server, error) {
	conn, err := pgx.Connect(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("pgserver: %s: %w", provider, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))

	s := &Server{provider: provider, url: url, stop: func() error { return nil }}
	var (
		number   int
		role     string
		mayClone bool
	)
	err = conn.QueryRow(ctx, `
		SELECT split_part(current_setting('server_version'), ' ', 1), current_setting('server_version_num')::int,
		       rolname::text, rolcreatedb OR rolsuper
		FROM pg_catalog.pg_roles
		WHERE rolname = current_user`).Scan(&s.version, &number, &role, &mayClone)
	switch {
	case err != nil:
		return nil, fmt.Errorf("pgserver: %s: %w", provider, err)
	case number/10000 < MinVersion:
		return nil, fmt.Errorf("pgserver: %s runs PostgreSQL %s, latchkey needs %d or newer", provider, s.version, MinVersion)
	case !mayClone:
		return nil, fmt.Errorf(`pgserver: %s: role %q may not create databases; a superuser can allow it with: ALTER ROLE %s CREATEDB`,
			provider, role, pgx.Identifier{role}.Sanitize())
	}
	o.log("using PostgreSQL %s: %s", s.version, provider)
	return s, nil
}

// Provider says in one line for people where the server came from, for example "server programs in /usr/lib/postgresql/15/bin".
func (s *Server) Provider() string { return s.provider }

// Version returns the running server's version, for example "15.18".
func (s *Server) Version() string { return s.version }

// URL returns the connection string of the maintenance database, as the role that owns the databases of [Server.NewDatabase].
func (s *Server) URL() string { return s.url }

// Close stops a server that was started here, with whoever is connected to it, and removes its folder. Any other server is
// left alone. Calling it again does nothing.
func (s *Server) Close() error { return s.stop() }

// Restart stops a server that was started here, and starts it again on the same port with the same data: after a fast
// shutdown, which disconnects everybody, or an immediate one, which is a crash. It returns when the server takes
// connections again.
func (s *Server) Restart(ctx context.Context, immediate bool) error {
	if s.signal == nil {
		return errors.New("pgserver: restart: the server was not started here")
	}
	before, err := s.started(ctx)
	if err != nil {
		return fmt.Errorf("pgserver: restart: %w", err)
	}
	name := "INT"
	if immediate {
		name = "QUIT"
	}
	if err := s.signal(name); err != nil {
		return fmt.Errorf("pgserver: restart: %w", err)
	}
	for {
		if now, err := s.started(ctx); err == nil && !now.Equal(before) {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("pgserver: restart: %w", ctx.Err())
		case <-time.After(25 * time.Millisecond):
		}
	}
}

// Standby starts a hot standby of a server that was started here, with the data and the password of that. It follows by
// streaming replication, asynchronously until the primary's synchronous_standby_names says otherwise, where it is called
// standby. It is a server of its own: it outlives its primary, and SELECT pg_promote() makes it one.
func (s *Server) Standby(ctx context.Context, o Options) (*Server, error) {
	if s.standby == nil {
		return nil, errors.New("pgserver: standby: the server was not started here")
	}
	return s.standby(ctx, o)
}

// started returns when the server that answers was started.
func (s *Server) started(ctx context.Context) (at time.Time, err error) {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return at, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return at, conn.QueryRow(ctx, "SELECT pg_catalog.pg_postmaster_start_time()").Scan(&at)
}

// errNoServer ends every error that means "there is no way left", so that each of them names all the ways.
var errNoServer = errors.New(`to give it one, do one of these:
  - set LATCHKEY_DATABASE_URL to the connection string of a server whose role has CREATEDB
  - install PostgreSQL 15 or newer on this machine (initdb and postgres are needed, on the PATH or in the package's usual place)
  - install the npm client, which then fetches server programs once into the project's .cache folder
  - unset LATCHKEY_POSTGRES_VERSION, or set it to a version there is`)
