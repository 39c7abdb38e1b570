// Package pgbouncer starts a PgBouncer in transaction mode in front of a PostgreSQL server, and looks at what is left on the
// connections that it keeps to that server.
package pgbouncer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options say how [Start] configures PgBouncer.
type Options struct {
	PoolSize int // server connections, for each database
	Prepared int // max_prepared_statements; 0 is PgBouncer without support for prepared statements
}

// Bouncer is a running PgBouncer. Its methods may be called concurrently.
type Bouncer struct {
	Version Version
	options Options
	server  string // the address that it stands in front of
	address string
	console string // the connection string of its console
	stop    func() error
}

// Version is that of a PgBouncer.
type Version struct{ Major, Minor int }

func (v Version) String() string { return fmt.Sprintf("%d.%d", v.Major, v.Minor) }

// CanPrepare says whether this version can support prepared statements of the protocol, as those from 1.21 can.
func (v Version) CanPrepare() bool { return v.Major > 1 || v.Minor >= 21 }

// VersionOf asks the program for its version.
func VersionOf(ctx context.Context, program string) (v Version, err error) {
	out, err := exec.CommandContext(ctx, program, "--version").Output()
	if err != nil {
		return v, fmt.Errorf("%s --version: %w", program, err)
	}
	if _, err := fmt.Sscanf(string(out), "PgBouncer %d.%d", &v.Major, &v.Minor); err != nil {
		return v, fmt.Errorf("%s --version printed %q", program, out)
	}
	return v, nil
}

// nobody is whom it runs as where this process is root, since it refuses to be that.
const nobody = "nobody"

// startsWithin bounds a start. It is far beyond what a busy machine needs.
const startsWithin = 30 * time.Second

// Start starts the program in front of the server that the connection string, a URL, leads to. Any database of that server
// can be reached through it, as the role of the URL. It ends with this process, however that ends.
func Start(ctx context.Context, program, server string, o Options) (*Bouncer, error) {
	version, err := VersionOf(ctx, program)
	if err != nil {
		return nil, err
	}
	if o.Prepared > 0 && !version.CanPrepare() {
		return nil, fmt.Errorf("PgBouncer %v cannot support prepared statements", version)
	}
	u, err := url.Parse(server)
	if err != nil || u.Host == "" {
		return nil, errors.New("PgBouncer stands in front of a server only whose connection string is a URL with a host")
	}
	config, err := pgx.ParseConfig(server)
	if err != nil {
		return nil, err
	}
	b := &Bouncer{Version: version, options: o, server: u.Host}
	for range 3 { // somebody else may take the port first
		if err = b.start(ctx, program, config); err == nil {
			return b, nil
		}
	}
	return nil, fmt.Errorf("PgBouncer %v: %w", version, err)
}

func (b *Bouncer) start(ctx context.Context, program string, server *pgx.ConnConfig) (err error) {
	dir, err := os.MkdirTemp("", "latchkey-pgbouncer-")
	if err != nil {
		return err
	}
	b.stop = func() error { return os.RemoveAll(dir) }
	defer func() {
		if err != nil {
			log, _ := os.ReadFile(filepath.Join(dir, "log")) // there may be none yet
			err = errors.Join(fmt.Errorf("%w\n%s", err, log), b.Close())
		}
	}()

	var lc net.ListenConfig
	free, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	b.address = free.Addr().String()
	if err := free.Close(); err != nil {
		return err
	}
	if err := b.configure(dir, server); err != nil {
		return err
	}

	// The pipe's end is this process's end.
	const supervisor = `"$@" </dev/null & cat >/dev/null; kill -KILL $!; wait $!`
	args := []string{"-c", supervisor, "sh", program}
	if os.Getuid() == 0 {
		args = append(args, "-u", nobody)
	}
	cmd := exec.CommandContext(context.WithoutCancel(ctx), "/bin/sh", append(args, filepath.Join(dir, "ini"))...)
	log, err := os.Create(filepath.Join(dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr = log, log
	alive, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	b.stop = func() error {
		err := alive.Close()
		_ = cmd.Wait() // it was killed
		return errors.Join(err, os.RemoveAll(dir))
	}
	return b.waitReady(ctx, server.User, server.Password)
}

// configure writes the files that PgBouncer reads.
func (b *Bouncer) configure(dir string, server *pgx.ConnConfig) error {
	host, port, err := net.SplitHostPort(b.address)
	if err != nil {
		return err
	}
	auth := "scram-sha-256"
	if server.Password == "" {
		auth = "trust"
	}
	quote := func(s string) string { return `"` + strings.ReplaceAll(s, `"`, `""`) + `"` }
	ini := []string{
		"[databases]",
		fmt.Sprintf("* = host=%s port=%d", server.Host, server.Port),
		"[pgbouncer]",
		"listen_addr = " + host,
		"listen_port = " + port,
		"unix_socket_dir =",
		"auth_type = " + auth,
		"auth_file = " + filepath.Join(dir, "users"),
		"admin_users = " + server.User,
		"pool_mode = transaction",
		"default_pool_size = " + strconv.Itoa(b.options.PoolSize),
		"max_client_conn = 800",
	}
	if b.Version.CanPrepare() {
		ini = append(ini, "max_prepared_statements = "+strconv.Itoa(b.options.Prepared))
	}
	files := map[string]string{
		"ini":   strings.Join(ini, "\n") + "\n",
		"users": quote(server.User) + " " + quote(server.Password) + "\n",
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			return err
		}
	}
	if os.Getuid() != 0 {
		return nil
	}
	// It reads them again when it is not root any more.
	u, err := user.Lookup(nobody)
	if err != nil {
		return err
	}
	uid, err := strconv.Atoi(u.Uid)
	if err != nil {
		return err
	}
	for _, path := range []string{dir, filepath.Join(dir, "ini"), filepath.Join(dir, "users")} {
		if err := os.Chown(path, uid, -1); err != nil {
			return err
		}
	}
	return nil
}

// waitReady waits until PgBouncer's console answers.
func (b *Bouncer) waitReady(ctx context.Context, role, password string) error {
	ctx, cancel := context.WithTimeout(ctx, startsWithin)
	defer cancel()
	console := url.URL{Scheme: "postgres", User: url.UserPassword(role, password), Host: b.address, Path: "/pgbouncer"}
	b.console = console.String()
	for {
		_, err := b.show(ctx, "SHOW VERSION")
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Close stops PgBouncer.
func (b *Bouncer) Close() error { return b.stop() }

// URL leads to the same database as the connection string, through PgBouncer.
func (b *Bouncer) URL(direct string) (string, error) { return b.move(direct, b.server, b.address) }

// Direct leads to the same database as a connection string of [Bouncer.URL], past PgBouncer. Any other string it leaves as
// it is.
func (b *Bouncer) Direct(pooled string) (string, error) { return b.move(pooled, b.address, b.server) }

func (b *Bouncer) move(connString, from, to string) (string, error) {
	u, err := url.Parse(connString)
	if err != nil {
		return "", errors.New("the connection string is no valid URL")
	}
	if u.Host != from {
		return connString, nil
	}
	u.Host = to
	return u.String(), nil
}

// Left returns what is left on the connections that PgBouncer keeps to the database of the connection string, which leads
// through it: settings, advisory locks, prepared statements and more that a transaction should have taken with it. Nobody
// else uses the database.
func (b *Bouncer) Left(ctx context.Context, pooled string) (left []string, err error) {
	config, err := pgx.ParseConfig(pooled)
	if err != nil {
		return nil, err
	}
	config.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol // so that nothing is left by this
	// An open transaction keeps its connection to the server, so as many as there can be have them all.
	conns := make([]*pgx.Conn, b.options.PoolSize)
	defer func() {
		for _, conn := range conns {
			if conn != nil {
				_ = conn.Close(context.WithoutCancel(ctx))
			}
		}
	}()
	seen := make(map[string]bool)
	for i := range conns {
		if conns[i], err = pgx.ConnectConfig(ctx, config); err != nil {
			return nil, err
		}
		if _, err := conns[i].Exec(ctx, "BEGIN"); err != nil {
			return nil, err
		}
		var pid string
		if err := conns[i].QueryRow(ctx, "SELECT pg_catalog.pg_backend_pid()::text").Scan(&pid); err != nil {
			return nil, err
		}
		seen[pid] = true
		rows, err := conns[i].Query(ctx, leftovers)
		if err != nil {
			return nil, err
		}
		found, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			return nil, err
		}
		left = append(left, found...)
	}

	servers, err := b.show(ctx, "SHOW SERVERS")
	if err != nil {
		return nil, err
	}
	for _, s := range servers {
		if s["database"] == config.Database && !seen[s["remote_pid"]] {
			return nil, fmt.Errorf("PgBouncer's connection to backend %s was not looked at", s["remote_pid"])
		}
	}
	return left, nil
}

// leftovers finds what is of the session. The settings that it leaves out are those that PgBouncer sets itself, to what the
// client's session has, and those of the transaction that asks. A setting of ours was never there or is empty.
const leftovers = `
	SELECT 'setting ' || s.name || ' = ' || s.setting
	FROM pg_catalog.pg_settings AS s
	WHERE s.source = 'session' AND s.name NOT LIKE 'transaction\_%' AND lower(s.name) NOT IN
	    ('application_name', 'client_encoding', 'datestyle', 'intervalstyle', 'standard_conforming_strings', 'timezone')
	UNION ALL
	SELECT 'setting ' || s.name || ' = ' || pg_catalog.current_setting(s.name, true)
	FROM pg_catalog.unnest(ARRAY['latchkey.statement_timeout', 'latchkey.lock_timeout']) AS s (name)
	WHERE pg_catalog.current_setting(s.name, true) <> ''
	UNION ALL
	SELECT 'advisory lock ' || ((l.classid::bigint << 32) | l.objid::bigint)
	FROM pg_catalog.pg_locks AS l
	WHERE l.locktype = 'advisory' AND l.pid = pg_catalog.pg_backend_pid()
	UNION ALL
	SELECT 'prepared statement ' || p.name || ': ' || p.statement
	FROM pg_catalog.pg_prepared_statements AS p
	WHERE p.name NOT LIKE 'PGBOUNCER\_%' -- those are its own, and known to it
	UNION ALL
	SELECT 'channel ' || c FROM pg_catalog.pg_listening_channels() AS c
	UNION ALL
	SELECT 'cursor ' || c.name FROM pg_catalog.pg_cursors AS c WHERE c.is_holdable
	UNION ALL
	SELECT 'temporary table ' || c.relname FROM pg_catalog.pg_class AS c WHERE c.relnamespace = pg_catalog.pg_my_temp_schema()`

// Served returns how many transactions went through PgBouncer.
func (b *Bouncer) Served(ctx context.Context) (n int64, err error) {
	stats, err := b.show(ctx, "SHOW STATS_TOTALS")
	if err != nil {
		return 0, err
	}
	for _, s := range stats {
		count, err := strconv.ParseInt(s["xact_count"], 10, 64)
		if err != nil {
			return 0, err
		}
		n += count
	}
	return n, nil
}

// show asks PgBouncer's console, which speaks the simple protocol only.
func (b *Bouncer) show(ctx context.Context, command string) ([]map[string]string, error) {
	conn, err := pgx.Connect(ctx, b.console)
	if err != nil {
		return nil, err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	results, err := conn.PgConn().Exec(ctx, command).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(results) != 1 {
		return nil, io.ErrUnexpectedEOF
	}
	var rows []map[string]string
	for _, values := range results[0].Rows {
		row := make(map[string]string)
		for i, f := range results[0].FieldDescriptions {
			row[f.Name] = string(values[i])
		}
		rows = append(rows, row)
	}
	return rows, nil
}
