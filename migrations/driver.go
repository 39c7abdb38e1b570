package migrations

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/golang-migrate/migrate/v4/database"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/internal/lockkey"
)

// driver runs migrations for golang-migrate on one connection. It stands in for golang-migrate's own pgx
// driver, which waits for its lock inside the server without a bound or a context, so that a concurrent index
// build deadlocks with the waiter; which hides the server's error; and which records the version in another
// transaction than the migration's.
type driver struct {
	ctx    context.Context
	conn   *pgx.Conn
	target int // the version that the next Run leads to
}

// migrationLock is a lock of the session, since it must outlive each file's transaction.
var migrationLock = lockkey.Sum("schema_migrations", "latchkey")

// lockPoll is how often a process asks for the migration lock: seldom enough to cost nothing with many
// replicas, often enough that nobody notices the delay at a start.
const lockPoll = 200 * time.Millisecond

// Lock asks again and again rather than waiting in the server: a statement that waits has a snapshot, and a
// concurrent index build would wait for that.
func (d *driver) Lock() error {
	// In a mode that prepares nothing by name, at which a pooler could fail before it is known to be one.
	var pid uint32
	err := d.conn.QueryRow(d.ctx, "SELECT pg_catalog.pg_backend_pid()", pgx.QueryExecModeExec).Scan(&pid)
	if err != nil {
		return err
	}
	if pid != d.conn.PgConn().PID() { // a pooler gives its clients numbers of its own
		return ErrPooler
	}

	ctx, cancel := context.WithTimeoutCause(d.ctx, LockWait, fmt.Errorf("%w for %v", ErrLocked, LockWait))
	defer cancel()
	for {
		var locked bool
		err := d.conn.QueryRow(d.ctx, "SELECT pg_catalog.pg_try_advisory_lock($1)", migrationLock).Scan(&locked)
		if err != nil || locked {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(lockPoll):
		}
	}
}

// Unlock also works when the context has ended: a connection that is still locked must not go back to the pool.
func (d *driver) Unlock() error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(d.ctx), 5*time.Second)
	defer cancel()
	var unlocked bool
	err := d.conn.QueryRow(ctx, "SELECT pg_catalog.pg_advisory_unlock($1)", migrationLock).Scan(&unlocked)
	if err != nil || !unlocked {
		return errors.Join(err, d.conn.Close(ctx))
	}
	return nil
}

// Run sends the file and the statements that record its version as one string, which PostgreSQL runs as one
// transaction.
func (d *driver) Run(file io.Reader) error {
	statements, err := io.ReadAll(file)
	if err != nil {
		return err
	}
	record := "DELETE FROM " + Table
	if d.target != database.NilVersion {
		record += fmt.Sprintf("; INSERT INTO "+Table+" (version, dirty) VALUES (%d, false)", d.target)
	}
	_, err = d.conn.PgConn().Exec(d.ctx, string(statements)+";\n"+record).ReadAll()
	return err
}

// SetVersion notes the version for Run, which records it.
func (d *driver) SetVersion(version int, _ bool) error {
	d.target = version
	return nil
}

// Version reads the version for golang-migrate, to which none is NilVersion.
func (d *driver) Version() (int, bool, error) {
	version, dirty, err := readVersion(d.ctx, d.conn)
	if version == 0 {
		return database.NilVersion, dirty, err
	}
	return int(version), dirty, err
}

// Close leaves the connection to its owner.
func (d *driver) Close() error { return nil }

var errUnused = errors.New("not used by Up and Down")

func (d *driver) Open(string) (database.Driver, error) { return nil, errUnused }
func (d *driver) Drop() error                          { return errUnused }

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// readVersion returns 0 where nothing was migrated yet.
func readVersion(ctx context.Context, q querier) (version uint, dirty bool, err error) {
	err = q.QueryRow(ctx, "SELECT version, dirty FROM "+Table).Scan(&version, &dirty)
	var pgErr *pgconn.PgError
	if errors.Is(err, pgx.ErrNoRows) || errors.As(err, &pgErr) && pgErr.Code == "42P01" /* undefined_table */ {
		return 0, false, nil
	}
	return version, dirty, err
}
