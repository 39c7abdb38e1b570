package tests

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// A host declares its namespaces once. The rank matters only to who takes locks in several calls.
var (
	exampleUsers    = repository.MustNamespace("example_user", repository.Rank(1))
	exampleProjects = repository.MustNamespace("example_project", repository.Rank(2))
	exampleSettings = repository.MustNamespace("example_settings")
)

// exampleHost makes a host's database, and a pool on it.
func exampleHost() (pool *pgxpool.Pool, done func()) {
	url, drop := testdb.URLForExample()
	pool, err := pgxpool.New(context.Background(), url)
	if err != nil {
		panic(err)
	}
	if _, err := pool.Exec(context.Background(), `
		CREATE TABLE tickets (id bigint GENERATED ALWAYS AS IDENTITY, owner text NOT NULL, project text NOT NULL);
		CREATE TABLE settings (owner text PRIMARY KEY, version integer NOT NULL, cached integer NOT NULL);
		INSERT INTO settings VALUES ('ann', 1, 1), ('bob', 1, 1)`); err != nil {
		panic(err)
	}
	// Connected before the example, so that a busy machine does not make it slow.
	var conns []*pgxpool.Conn
	for range 3 {
		conn, err := pool.Acquire(context.Background())
		if err != nil {
			panic(err)
		}
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		conn.Release()
	}
	return pool, func() {
		pool.Close()
		drop()
	}
}

// A rule of the host's, over its own table: no user has more than two tickets. The count is one round trip, with the
// lock, and the insert another, with COMMIT.
func Example_guard() {
	pool, done := exampleHost()
	defer done()
	repo, err := repository.New(pool)
	if err != nil {
		panic(err)
	}
	errEnough := errors.New("enough tickets")

	open := func(ctx context.Context, owner, project string) error {
		locks := []repository.Lock{exampleUsers.Exclusive(owner)}
		return repo.Guard(ctx, locks, func(ctx context.Context, tx *repository.Tx) error {
			var n int // with sqlc: n, err := hostdb.New(tx).CountTickets(ctx, owner)
			if err := tx.QueryRow(ctx, "SELECT count(*) FROM tickets WHERE owner = $1", owner).Scan(&n); err != nil {
				return err
			}
			if n >= 2 {
				return errEnough
			}
			_, err := tx.Last().Exec(ctx, "INSERT INTO tickets (owner, project) VALUES ($1, $2)", owner, project)
			return err
		})
	}

	for range 3 {
		fmt.Println(open(context.Background(), "ann", "roof"))
	}
	// Output:
	// <nil>
	// <nil>
	// enough tickets
}

// The same rule as one statement: one round trip, and calls of one owner that wait for each other run together. The
// statement inserts nothing where the rule says no, which pgx reports as no rows.
func Example_guardQuery() {
	pool, done := exampleHost()
	defer done()
	repo, err := repository.New(pool)
	if err != nil {
		panic(err)
	}
	const insert = `INSERT INTO tickets (owner, project) SELECT $1, $2
		WHERE (SELECT count(*) FROM tickets WHERE owner = $1) < 2 RETURNING id`

	open := func(ctx context.Context, owner, project string) (id int64, err error) {
		locks := []repository.Lock{exampleUsers.Exclusive(owner)}
		return repository.GuardQuery(ctx, repo, locks, func(ctx context.Context, q repository.DBTX) (id int64, err error) {
			err = q.QueryRow(ctx, insert, owner, project).Scan(&id) // with sqlc: return hostdb.New(q).InsertTicket(ctx, params)
			return id, err
		})
	}
	for range 3 {
		id, err := open(context.Background(), "ann", "garden")
		fmt.Println(id, err)
	}
	// Output:
	// 1 <nil>
	// 2 <nil>
	// 0 no rows in result set
}

// A rule in a transaction that the host has already. The locks are held until it ends, and all that is read after
// GuardTx is guarded by them.
func Example_guardTx() {
	pool, done := exampleHost()
	defer done()
	repo, err := repository.New(pool)
	if err != nil {
		panic(err)
	}

	ctx := context.Background()
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
		// Both at once, so that no other transaction can hold the one and wait for the other.
		locks := []repository.Lock{exampleProjects.Exclusive("roof"), exampleUsers.Exclusive("ann")}
		if err := repo.GuardTx(ctx, tx, locks); err != nil {
			return err
		}
		var ofProject int
		if err := tx.QueryRow(ctx, "SELECT count(*) FROM tickets WHERE project = 'roof'").Scan(&ofProject); err != nil {
			return err
		}
		fmt.Println("tickets of the project:", ofProject)
		_, err := tx.Exec(ctx, "INSERT INTO tickets (owner, project) VALUES ('ann', 'roof')")
		return err
	})
	fmt.Println(err)

	// In a transaction where it could not keep its promise, it says so.
	err = pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		return repo.GuardTx(ctx, tx, []repository.Lock{exampleUsers.Exclusive("ann")})
	})
	fmt.Println(errors.Is(err, repository.ErrIsolation))
	// Output:
	// tickets of the project: 0
	// <nil>
	// true
}

// A host on database/sql, with pgx's stdlib driver, joins through the connection of its transaction.
func Example_databaseSQL() {
	pool, done := exampleHost()
	defer done()
	repo, err := repository.New(pool)
	if err != nil {
		panic(err)
	}
	host := stdlib.OpenDBFromPool(pool)
	defer host.Close()

	ctx := context.Background()
	conn, err := host.Conn(ctx)
	if err != nil {
		panic(err)
	}
	defer conn.Close()
	tx, err := conn.BeginTx(ctx, &sql.TxOptions{Isolation: sql.LevelReadCommitted})
	if err != nil {
		panic(err)
	}
	defer tx.Rollback() //nolint:errcheck // as a rule it is committed

	err = conn.Raw(func(driverConn any) error {
		joined := repository.TxFromConn(driverConn.(*stdlib.Conn).Conn()) //nolint:forcetypeassert // of stdlib.OpenDB it is
		return repo.GuardTx(ctx, joined, []repository.Lock{exampleUsers.Exclusive("ann")})
	})
	if err != nil {
		panic(err)
	}
	if _, err := tx.ExecContext(ctx, "INSERT INTO tickets (owner, project) VALUES ('ann', 'roof')"); err != nil {
		panic(err)
	}
	fmt.Println(tx.Commit())

	var n int
	if err := host.QueryRowContext(ctx, "SELECT count(*) FROM tickets").Scan(&n); err != nil {
		panic(err)
	}
	fmt.Println("tickets:", n)
	// Output:
	// <nil>
	// tickets: 1
}

// settingsService reads a user's settings, as many at a time as like to, and rebuilds what is derived from them,
// when nobody reads.
type settingsService struct{ repo *repository.Repository }

// read shares the lock with other readers. What use does is done under it, so it should be quick.
func (s settingsService) read(ctx context.Context, owner string, use func(version, cached int)) error {
	return s.repo.Guard(ctx, []repository.Lock{exampleSettings.Shared(owner)}, func(ctx context.Context, tx *repository.Tx) error {
		var version, cached int
		err := tx.QueryRow(ctx, "SELECT version, cached FROM settings WHERE owner = $1", owner).Scan(&version, &cached)
		if err == nil {
			use(version, cached)
		}
		return err
	})
}

// rebuild has the lock alone. It waits for those who read now, and not for those who come later, who wait for it.
func (s settingsService) rebuild(ctx context.Context, owner string) error {
	return s.repo.Guard(ctx, []repository.Lock{exampleSettings.Exclusive(owner)}, func(ctx context.Context, tx *repository.Tx) error {
		if _, err := tx.Exec(ctx, "UPDATE settings SET version = version + 1 WHERE owner = $1", owner); err != nil {
			return err
		}
		_, err := tx.Last().Exec(ctx, "UPDATE settings SET cached = version WHERE owner = $1", owner)
		return err
	})
}

// Many read a user's settings at the same time; one rebuild makes the readers wait.
func Example_sharedLock() {
	pool, done := exampleHost()
	defer done()
	repo, err := repository.New(pool, repository.WithLockTimeout(time.Second))
	if err != nil {
		panic(err)
	}
	ctx, s := context.Background(), settingsService{repo}

	inside, leave, left := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		left <- s.read(ctx, "ann", func(version, cached int) {
			fmt.Println("one reader sees", version, cached)
			close(inside)
			<-leave
		})
	}()
	<-inside
	_ = s.read(ctx, "ann", func(version, cached int) { fmt.Println("another, meanwhile,", version, cached) })
	fmt.Println("a rebuild gives up after its lock timeout:", errors.Is(s.rebuild(ctx, "ann"), repository.ErrLockBusy))
	fmt.Println("that of another user does not wait:", s.rebuild(ctx, "bob"))
	close(leave)
	fmt.Println(<-left)
	fmt.Println("when nobody reads:", s.rebuild(ctx, "ann"))
	_ = s.read(ctx, "ann", func(version, cached int) { fmt.Println("a reader sees", version, cached) })
	// Output:
	// one reader sees 1 1
	// another, meanwhile, 1 1
	// a rebuild gives up after its lock timeout: true
	// that of another user does not wait: <nil>
	// <nil>
	// when nobody reads: <nil>
	// a reader sees 2 2
}

func TestSharedLock(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	testdb.Exec(t, url, "CREATE TABLE public.settings (owner text PRIMARY KEY, version integer NOT NULL, cached integer NOT NULL)")
	inPublic := func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["search_path"] = "public" }

	setup := func(t *testing.T, rebuildTimeout time.Duration) (owner string, key int64, readers, rebuilder settingsService, rebuilderPID uint32) {
		t.Helper()
		owner = uuid.NewString()
		testdb.Exec(t, url, "INSERT INTO public.settings VALUES ('"+owner+"', 1, 1)")
		key, err := repository.Key("example_settings", owner)
		require.NoError(t, err)
		readers.repo, err = repository.New(testdb.PoolAt(t, url, maxConns(10), inPublic), repository.WithLockTimeout(patience), repository.WithHoldTimeout(patience))
		require.NoError(t, err)
		pool := testdb.PoolAt(t, url, maxConns(1), inPublic)
		rebuilder.repo, err = repository.New(pool, repository.WithLockTimeout(rebuildTimeout))
		require.NoError(t, err)
		return owner, key, readers, rebuilder, pidOf(t, pool)
	}
	// startReaders starts n of them, and returns when they have all read and sit there until they may leave.
	startReaders := func(t *testing.T, s settingsService, owner string, n int) (leave func(), wait func()) {
		t.Helper()
		inside, gate := make(chan struct{}), make(chan struct{})
		var waits []func() error
		for range n {
			waits = append(waits, background(t, func() error {
				return s.read(t.Context(), owner, func(int, int) {
					inside <- struct{}{}
					<-gate
				})
			}))
		}
		for range n {
			select {
			case <-inside:
			case <-time.After(patience):
				require.FailNow(t, "the readers do not read at the same time")
			}
		}
		return func() { close(gate) }, func() {
			for _, w := range waits {
				require.NoError(t, w())
			}
		}
	}

	t.Run("is held by all readers at once, and a rebuild waits for them, and not for those who come later", func(t *testing.T) {
		t.Parallel()
		owner, key, readers, rebuilder, pid := setup(t, patience)
		observer := testdb.Conn(t, url)
		leave, wait := startReaders(t, readers, owner, 3)
		require.Len(t, testdb.Holders(t, observer, key), 3)

		rebuilt := background(t, func() error { return rebuilder.rebuild(t.Context(), owner) })
		require.Equal(t, []uint32{pid}, testdb.WaitForWaiter(t, observer, key, 1))
		var later []func() (int, error)
		for n := range 5 {
			later = append(later, inBackground(t, func() (seen int, err error) {
				err = readers.read(t.Context(), owner, func(version, cached int) { seen = 100*version + cached })
				return seen, err
			}))
			waiters := testdb.WaitForWaiter(t, observer, key, 2+n)
			require.Equal(t, pid, waiters[0], "it is the first in the queue")
		}
		require.Len(t, testdb.Holders(t, observer, key), 3, "a reader overtook the rebuild")
		leave()
		wait()
		require.NoError(t, rebuilt())
		for _, result := range later {
			seen, err := result()
			require.NoError(t, err)
			require.Equal(t, 202, seen, "who came after the rebuild sees what it made")
		}
	})
	t.Run("keeps a rebuild waiting no longer than its timeout, after which the readers in the queue go on", func(t *testing.T) {
		t.Parallel()
		const budget = 300 * time.Millisecond
		owner, key, readers, rebuilder, _ := setup(t, budget)
		observer := testdb.Conn(t, url)
		leave, wait := startReaders(t, readers, owner, 1) // this one stays for longer than the rebuild will wait
		started := time.Now()
		rebuilt := background(t, func() error { return rebuilder.rebuild(t.Context(), owner) })
		later := background(t, func() error { return readers.read(t.Context(), owner, func(int, int) {}) })
		busy := requireBusy(t, rebuilt(), repository.WhereAdvisory)
		requireAbout(t, budget, busy.Waited, time.Since(started))
		require.NoError(t, later(), "although the first reader is still there")
		leave()
		wait()
		require.Empty(t, testdb.Holders(t, observer, key))
		require.NoError(t, rebuilder.rebuild(t.Context(), owner))
	})
	t.Run("is not starved by readers that come one after the other without a pause", func(t *testing.T) {
		t.Parallel()
		owner, _, readers, rebuilder, _ := setup(t, patience)
		ctx, stop := context.WithCancel(t.Context())
		var waits []func() error
		for range 6 {
			waits = append(waits, background(t, func() error {
				for ctx.Err() == nil {
					if err := readers.read(t.Context(), owner, func(int, int) {}); err != nil {
						return err
					}
				}
				return nil
			}))
		}
		for range 20 {
			require.NoError(t, rebuilder.rebuild(t.Context(), owner))
		}
		stop()
		for _, w := range waits {
			require.NoError(t, w())
		}
	})
}
