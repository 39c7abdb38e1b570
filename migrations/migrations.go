// Package migrations holds latchkey's schema as plain SQL files and applies them with golang-migrate.
//
// A host calls [Up] when it starts, in every replica, or hands the files in [FS] to its own tool. The version
// is kept in [Table], so latchkey's migrations and the host's never see each other. Whoever applies a file by hand
// records its version there, or [Up] would apply it again.
//
// Each file runs in one transaction together with the row that records its version: a migration that fails,
// or whose process is killed, leaves the version before it, never a dirty one.
package migrations

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/golang-migrate/migrate/v4"
	"github.com/golang-migrate/migrate/v4/source/iofs"
	"github.com/jackc/pgx/v5/pgxpool"
)

// FS holds the migrations, NNNNNN_verb_object.{up,down}.sql.
//
//go:embed *.sql
var FS embed.FS

// Table is the table that records which version the database has: one row (version, dirty), none before the
// first migration.
const Table = "latchkey.schema_migrations"

// LockWait is how long [Up] and [Down] wait for another process that is migrating the same database.
const LockWait = time.Minute

var (
	// ErrAhead is returned by [Up] and [Down] when the database has a version that this build does not know:
	// a newer build migrated it. Nothing was changed. A host that has been rolled back may go on with it.
	ErrAhead = errors.New("database schema is newer than this build")

	// ErrPooler is returned by [Up] and [Down] when the pool does not reach PostgreSQL directly. Migrations
	// exclude each other by a lock of the session, and a pooler may give each statement another session.
	ErrPooler = errors.New("migrations need a direct connection, not one through a pooler")

	// ErrLocked is returned by [Up] and [Down] when another process was still migrating after [LockWait].
	ErrLocked = errors.New("another process is migrating")
)

// Up applies the migrations that the database does not have yet, and does nothing if it has all of them.
//
// It is safe to call from several processes at once: one migrates, the others wait for it, at most [LockWait].
// It takes one connection of pool, gives it back as it was, and leaves the pool open. The role needs CREATE on
// the database, and must own the schema latchkey if that exists.
//
// It returns [ErrAhead], [ErrLocked], [ErrPooler], ctx's error, or the server's *[pgconn.PgError] wrapped.
func Up(ctx context.Context, pool *pgxpool.Pool) error {
	return run(ctx, pool, "up", (*migrate.Migrate).Up)
}

// Down takes back all migrations, the latest first, and does nothing if none is applied. One whose table holds rows
// refuses, with SQLSTATE 55000, and stays, as do those before it; those after it are undone by then, and the grants
// on them. The schema latchkey stays, with [Table].
//
// Its concurrency and errors are those of [Up].
func Down(ctx context.Context, pool *pgxpool.Pool) error {
	return run(ctx, pool, "down", (*migrate.Migrate).Down)
}

// Version returns the version of the last migration that was applied, 0 if none was. dirty is true only if
// another tool left a migration half done. It changes nothing and takes no lock.
func Version(ctx context.Context, pool *pgxpool.Pool) (version uint, dirty bool, err error) {
	version, dirty, err = readVersion(ctx, pool)
	if err != nil {
		return 0, false, fmt.Errorf("migrations: version: %w", err)
	}
	return version, dirty, nil
}

// run applies migrations on one connection of pool. golang-migrate decides which; the driver below runs them.
func run(ctx context.Context, pool *pgxpool.Pool, direction string, apply func(*migrate.Migrate) error) error {
	conn, err := pool.Acquire(ctx)
	if err != nil {
		return fmt.Errorf("migrations: %s: %w", direction, err)
	}
	defer conn.Release()

	files, err := iofs.New(FS, ".")
	if err != nil {
		return fmt.Errorf("migrations: %s: %w", direction, err)
	}
	defer files.Close()

	m, err := migrate.NewWithInstance("embedded", files, "pgx", &driver{ctx: ctx, conn: conn.Conn()})
	if err != nil {
		return fmt.Errorf("migrations: %s: %w", direction, err)
	}
	m.LockTimeout = 2 * LockWait // the driver's own bound comes first

	switch err := apply(m); {
	case errors.Is(err, migrate.ErrNoChange):
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("migrations: %s: %w", direction, ErrAhead)
	case err != nil:
		return fmt.Errorf("migrations: %s: %w", direction, err)
	}
	return nil
}
