package tests

import (
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// execModes are the ways in which pgx can send a query. The first is its default.
var execModes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement,
	pgx.QueryExecModeCacheDescribe,
	pgx.QueryExecModeDescribeExec,
	pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// pg is an id as the generated statements take it.
func pg(id uuid.UUID) pgtype.UUID { return pgtype.UUID{Bytes: id, Valid: true} }

func maxConns(n int32) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.MaxConns = n }
}

func withExecMode(mode pgx.QueryExecMode) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = mode }
}

// wired is a Repository behind a proxy; of one connection, if no option says otherwise.
type wired struct {
	proxy *wire.Proxy
	pool  *pgxpool.Pool
	repo  *repository.Repository
}

func setupWired(t *testing.T, url string, opts ...func(*pgxpool.Config)) *wired {
	t.Helper()
	proxy := wire.Start(t, url)
	pool := testdb.PoolAt(t, proxy.URL(), append([]func(*pgxpool.Config){maxConns(1)}, opts...)...)
	repo, err := repository.New(pool)
	require.NoError(t, err)
	return &wired{proxy, pool, repo}
}

// cost makes the call often enough to find the connection warm, and returns what the last one cost.
func (w *wired) cost(t *testing.T, call func(t *testing.T)) wire.Traffic {
	t.Helper()
	call(t) // begins ahead of the statements that it prepares
	call(t) // needs no BEGIN any more
	w.proxy.Reset()
	call(t)
	return w.proxy.Traffic()
}

func TestRoundTripsOfEveryMethodAreOne(t *testing.T) {
	t.Parallel()
	w := setupWired(t, testdb.URL(t))
	ctx := t.Context()

	create := func(t *testing.T) *repository.SetupRequest {
		t.Helper()
		s, err := w.repo.CreateSetup(ctx, uuid.New(), nil)
		require.NoError(t, err)
		return s
	}
	// What CompleteSetup and CancelSetup need is made before, a piece for each call.
	ids := make(chan uuid.UUID, 2*3)
	for range cap(ids) {
		ids <- create(t).ID
	}
	known := create(t).ID
	full := create(t).UserID
	repeated := uuid.New()
	keyed := &repository.CreateSetupOpts{IdempotencyKey: "once"}
	before, err := w.repo.CreateSetup(ctx, repeated, keyed)
	require.NoError(t, err)

	for _, test := range []struct {
		name string
		call func(t *testing.T)
	}{
		{"CreateSetup", func(t *testing.T) {
			t.Helper()
			create(t)
		}},
		{"TryCreateSetup", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.TryCreateSetup(ctx, uuid.New(), nil)
			require.NoError(t, err)
		}},
		{"CreateSetup refused by its limit", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CreateSetup(ctx, full, nil)
			require.ErrorIs(t, err, repository.ErrPendingExists)
		}},
		{"CreateSetup repeated with its idempotency key", func(t *testing.T) {
			t.Helper()
			again, err := w.repo.CreateSetup(ctx, repeated, keyed)
			require.NoError(t, err)
			require.Equal(t, before, again)
		}},
		{"CompleteSetup", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CompleteSetup(ctx, <-ids)
			require.NoError(t, err)
		}},
		{"CancelSetup", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CancelSetup(ctx, <-ids)
			require.NoError(t, err)
		}},
		{"CompleteSetup of an unknown request", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CompleteSetup(ctx, uuid.New())
			require.ErrorIs(t, err, repository.ErrNotFound)
		}},
		{"GetSetup", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.GetSetup(ctx, known)
			require.NoError(t, err)
		}},
		{"ListSetups", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.ListSetups(ctx, full, nil)
			require.NoError(t, err)
		}},
		{"CountPendingSetups", func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CountPendingSetups(ctx, full)
			require.NoError(t, err)
		}},
	} {
		traffic := w.cost(t, test.call)
		require.Equal(t, 1, traffic.RoundTrips, "%s sent %q", test.name, traffic.Statements)
		require.Equal(t, 1, traffic.Syncs, test.name)
		require.Equal(t, 0, traffic.Queries, test.name)
	}
}

func TestRoundTripsOfCreateSetupAreOneInEveryExecMode(t *testing.T) {
	t.Parallel()
	want := map[pgx.QueryExecMode]wire.Traffic{
		pgx.QueryExecModeCacheStatement: {RoundTrips: 1, Syncs: 1},
		pgx.QueryExecModeCacheDescribe:  {RoundTrips: 1, Syncs: 1},
		// It asks for the statements' types every time, and so for BEGIN, the locks and the rest apart.
		pgx.QueryExecModeDescribeExec:   {RoundTrips: 4, Syncs: 4},
		pgx.QueryExecModeExec:           {RoundTrips: 1, Syncs: 1},
		pgx.QueryExecModeSimpleProtocol: {RoundTrips: 1, Queries: 1},
	}
	url := testdb.URL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, url, withExecMode(mode))
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
				require.NoError(t, err)
			})
			traffic.Statements = nil
			require.Equal(t, want[mode], traffic)
		})
	}
}

func TestRoundTripsOfCreateSetupTxAreOneInTheCallersTransaction(t *testing.T) {
	t.Parallel()
	w := setupWired(t, testdb.URL(t))
	require.NoError(t, pgx.BeginFunc(t.Context(), w.pool, func(tx pgx.Tx) error {
		traffic := w.cost(t, func(t *testing.T) {
			t.Helper()
			_, err := w.repo.CreateSetupTx(t.Context(), tx, uuid.New(), nil)
			require.NoError(t, err)
		})
		require.Equal(t, 1, traffic.RoundTrips, "sent %q", traffic.Statements)
		require.Equal(t, 1, traffic.Syncs)
		return nil
	}))
}

// pgx forgets the statements of a batch that failed. A try that finds the lock held fails by design, so that would
// make the calls after it prepare everything anew, just where many wait for one lock.
func TestRoundTripsAreOneAlsoAfterATryThatFoundTheLockHeld(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	w := setupWired(t, url)
	user := uuid.New()
	hold(t, url, setupKey(t, user))
	try := func(t *testing.T) {
		t.Helper()
		_, err := w.repo.TryCreateSetup(t.Context(), user, nil)
		require.ErrorIs(t, err, repository.ErrLockBusy)
	}
	create := func(t *testing.T) {
		t.Helper()
		_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
	}
	create(t)
	require.Equal(t, 2, w.cost(t, try).RoundTrips, "the try, and ROLLBACK")
	w.proxy.Reset()
	create(t)
	require.Equal(t, 1, w.proxy.Traffic().RoundTrips)
}

// A prepared statement lives as long as its connection, unless somebody drops it or changes what it returns.
func TestRoundTripsStatementsThatBecameUselessCostAConnection(t *testing.T) {
	t.Parallel()
	for name, spoil := range map[string]string{
		"because they were dropped":       "DEALLOCATE ALL",
		"because a column has a new type": "ALTER TABLE latchkey.setup_requests ALTER COLUMN status TYPE varchar(20)",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := setupWired(t, testdb.URL(t))
			_, err := w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.NoError(t, err)
			_, err = w.pool.Exec(t.Context(), spoil)
			require.NoError(t, err)
			_, err = w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.Error(t, err, "the connection has the old statements")
			if spoil == "DEALLOCATE ALL" {
				requireSQLState(t, "26000", err)
				require.ErrorIs(t, err, repository.ErrConnectionLost)
				require.True(t, repository.IsRetryable(err))
			}
			_, err = w.repo.CreateSetup(t.Context(), uuid.New(), nil)
			require.NoError(t, err)
		})
	}
}

// The negative control: a proxy that counts 1 for everything would count 1 for this too.
func TestRoundTripsOfTheTextbookSequenceAreCountedOneByOne(t *testing.T) {
	t.Parallel()
	w := setupWired(t, testdb.URL(t))
	traffic := w.cost(t, func(t *testing.T) {
		t.Helper()
		createByHand(t, w.pool)
	})
	require.Equal(t, 5, traffic.RoundTrips, "sent %q", traffic.Statements)
	require.Equal(t, []string{"begin", lockByHand, countByHand, insertByHand, "commit"}, traffic.Statements)
}

const (
	lockByHand   = "SELECT pg_advisory_xact_lock($1)"
	countByHand  = "SELECT count(*) FROM latchkey.setup_requests WHERE user_id = $1 AND status = 'pending'"
	insertByHand = "INSERT INTO latchkey.setup_requests (user_id) VALUES ($1)"
)

func createByHand(t *testing.T, pool *pgxpool.Pool) {
	t.Helper()
	userID := uuid.New()
	key, err := repository.Key("setup_request", userID.String())
	require.NoError(t, err)
	require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), lockByHand, key)
		require.NoError(t, err)
		var pending int
		require.NoError(t, tx.QueryRow(t.Context(), countByHand, userID).Scan(&pending))
		require.Equal(t, 0, pending)
		_, err = tx.Exec(t.Context(), insertByHand, userID)
		return err
	}))
}
