package pgserver

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/migrations"
)

const (
	templatePrefix = "latchkey_template_"
	makingPrefix   = "latchkey_making_"
	databasePrefix = "latchkey_db_"
)

// NewDatabase makes a fresh database with latchkey's schema and returns its connection string, and a function that drops it
// together with whatever is still connected to it.
//
// The database is a clone of a template that is migrated once per server, set of migrations and role, so that it costs
// milliseconds. On a server that outlives the program, the template stays for the next one, and so do the databases of a
// program that was killed. All of them can be dropped at any time when no program is using them:
//
//	SELECT format('DROP DATABASE %I;', datname) FROM pg_database WHERE datname ~ '^latchkey_(template|making|db)_' \gexec
func (s *Server) NewDatabase(ctx context.Context) (string, func(context.Context) error, error) {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return "", nil, fmt.Errorf("new database: %w", err)
	}
	defer conn.Close(context.WithoutCancel(ctx))

	template, err := s.ensureTemplate(ctx, conn)
	if err != nil {
		return "", nil, fmt.Errorf("new database: template: %w", err)
	}
	name := databasePrefix + randomHex(8)
	url, err := withDatabase(s.url, name)
	if err != nil {
		return "", nil, fmt.Errorf("new database: %w", err)
	}
	err = whileInUse(ctx, func() error {
		_, err := conn.Exec(ctx, "CREATE DATABASE "+name+" TEMPLATE "+template)
		return err
	})
	if err != nil {
		return "", nil, fmt.Errorf("new database: %w", err)
	}
	return url, func(ctx context.Context) error { return s.drop(ctx, name) }, nil
}

func (s *Server) drop(ctx context.Context, name string) error {
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+name+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop database %s: %w", name, err)
	}
	return nil
}

func (s *Server) ensureTemplate(ctx context.Context, conn *pgx.Conn) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.template != "" {
		return s.template, nil
	}
	hash, err := migrationsHash()
	if err != nil {
		return "", err
	}
	// A clone's objects belong to the template's owner, so another role must not find this one's template.
	var name string
	err = conn.QueryRow(ctx, "SELECT $1 || left(encode(sha256(convert_to($2 || current_user, 'UTF8')), 'hex'), 24)", templatePrefix, hash).Scan(&name)
	if err != nil {
		return "", err
	}

	// CREATE DATABASE cannot run in a transaction, so this one lock belongs to the session. It only saves work: processes
	// that come by different maintenance databases do not see each other's locks, and the loser of a rename gives in below.
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock(hashtextextended($1, 0))", name); err != nil {
		return "", err
	}
	defer conn.Exec(context.WithoutCancel(ctx), "SELECT pg_advisory_unlock(hashtextextended($1, 0))", name) //nolint:errcheck // the connection is closed next anyway

	var exists bool
	if err := conn.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_catalog.pg_database WHERE datname = $1)", name).Scan(&exists); err != nil {
		return "", err
	}
	if !exists {
		if err := s.makeTemplate(ctx, conn, name); err != nil {
			return "", err
		}
	}
	s.template = name
	return name, nil
}

// makeTemplate migrates under another name, because a template that a killed program left half done must not be found.
func (s *Server) makeTemplate(ctx context.Context, conn *pgx.Conn, name string) (err error) {
	making := makingPrefix + randomHex(8)
	// template0 has nothing that an administrator may have put into template1.
	if _, err := conn.Exec(ctx, "CREATE DATABASE "+making+" TEMPLATE template0 ENCODING 'UTF8'"); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.drop(context.WithoutCancel(ctx), making))
		}
	}()
	if err := s.migrate(ctx, making); err != nil {
		return err
	}
	// Nobody may connect to a template: CREATE DATABASE refuses to copy a database with sessions.
	if _, err := conn.Exec(ctx, "ALTER DATABASE "+making+" WITH ALLOW_CONNECTIONS false"); err != nil {
		return err
	}
	err = whileInUse(ctx, func() error {
		_, err := conn.Exec(ctx, "ALTER DATABASE "+making+" RENAME TO "+name)
		return err
	})
	if hasCode(err, "42P04") {
		return s.drop(ctx, making)
	}
	return err
}

func (s *Server) migrate(ctx context.Context, name string) error {
	url, err := withDatabase(s.url, name)
	if err != nil {
		return err
	}
	pool, err := pgxpool.New(ctx, url)
	if err != nil {
		return err
	}
	defer pool.Close()
	return migrations.Up(ctx, pool)
}

func migrationsHash() (string, error) {
	h := sha256.New()
	err := fs.WalkDir(migrations.FS, ".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := fs.ReadFile(migrations.FS, path)
		fmt.Fprintf(h, "%s\x00%d\x00%s", path, len(b), b)
		return err
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// inUseFor bounds whileInUse. The server itself waits up to 5 seconds before it says that a database is in use.
const inUseFor = 30 * time.Second

// whileInUse repeats f while the server says that the database is in use: a closed connection's backend, and an autovacuum
// worker, take a moment to leave.
func whileInUse(ctx context.Context, f func() error) error {
	deadline := time.Now().Add(inUseFor)
	for {
		err := f()
		if !hasCode(err, "55006") || time.Now().After(deadline) {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(20 * time.Millisecond):
		}
	}
}

func hasCode(err error, code string) bool {
	var e *pgconn.PgError
	return errors.As(err, &e) && e.Code == code
}

// withDatabase returns the connection string for another database of the same server.
func withDatabase(connString, name string) (string, error) {
	if !strings.HasPrefix(connString, "postgres://") && !strings.HasPrefix(connString, "postgresql://") {
		// Of a keyword given twice the last one counts.
		return connString + " dbname=" + name, nil
	}
	u, err := url.Parse(connString)
	if err != nil {
		// The text of this error would show the password.
		return "", errors.New("the connection string is no valid URL")
	}
	u.Path = "/" + name
	q := u.Query()
	q.Del("dbname") // as a parameter the name would win over the path
	q.Del("database")
	u.RawQuery = q.Encode()
	return u.String(), nil
}

func randomHex(n int) string {
	b := make([]byte, n)
	rand.Read(b)
	return hex.EncodeToString(b)
}
