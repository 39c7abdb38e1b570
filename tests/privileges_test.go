package tests

import (
	"context"
	"errors"
	"maps"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// service is what a role does, and the owner of the schema, who makes what the role's methods need.
type service struct {
	pool, ownerPool *pgxpool.Pool
	repo, owner     *repository.Repository
}

func newService(t *testing.T, owner, pool *pgxpool.Pool) *service {
	t.Helper()
	s := &service{pool: pool, ownerPool: owner}
	var err error
	s.owner, err = repository.New(owner)
	require.NoError(t, err)
	s.repo, err = repository.New(pool, repository.WithLockOrderCheck()) // which reads more
	require.NoError(t, err)
	return s
}

// methods are all methods of the Repository, and what else a service calls. Each is a call of its own that must succeed:
// what it needs is made by the owner.
func (s *service) methods(t *testing.T) map[string]func(ctx context.Context) error {
	t.Helper()
	event := &repository.Event{Topic: "privileges", AggregateKey: uuid.NewString()}
	locks := []repository.Lock{items.Exclusive(uuid.NewString())}
	one := func(ctx context.Context, tx *repository.Tx) error {
		_, err := tx.Last().Exec(ctx, "SELECT 1")
		return err
	}
	setup := func() *repository.SetupRequest {
		r, err := s.owner.CreateSetup(t.Context(), uuid.New(), nil)
		require.NoError(t, err)
		return r
	}
	account := func() uuid.UUID {
		a, err := s.owner.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: uuid.New(), DailyLimit: 100})
		require.NoError(t, err)
		_, err = s.owner.Deposit(t.Context(), repository.DepositParams{AccountID: a.ID, Amount: 10})
		require.NoError(t, err)
		return a.ID
	}
	claim := func() repository.Claim {
		topic := uuid.NewString()
		require.NoError(t, pgx.BeginFunc(t.Context(), s.ownerPool, func(tx pgx.Tx) error {
			return errorOf(s.owner.EnqueueTx(t.Context(), tx, repository.Event{Topic: topic}))
		}))
		claimed, err := s.owner.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w", Topics: []string{topic}})
		require.NoError(t, err)
		require.Len(t, claimed, 1)
		return claimed[0].Claim
	}
	lease := func() *repository.Lease {
		l, err := s.owner.AcquireLease(t.Context(), repository.LeaseParams{Name: uuid.NewString()})
		require.NoError(t, err)
		return l
	}
	inTx := func(ctx context.Context, fn func(tx pgx.Tx) error) error {
		return pgx.BeginTxFunc(ctx, s.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, fn)
	}
	return map[string]func(ctx context.Context) error{
		"Check": func(ctx context.Context) error { return errorOf(s.repo.Check(ctx)) },
		"CreateSetup": func(ctx context.Context) error {
			return errorOf(s.repo.CreateSetup(ctx, uuid.New(), &repository.CreateSetupOpts{Event: event}))
		},
		"TryCreateSetup": func(ctx context.Context) error {
			return errorOf(s.repo.TryCreateSetup(ctx, uuid.New(), &repository.CreateSetupOpts{IdempotencyKey: "k"}))
		},
		"CreateSetupTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error { return errorOf(s.repo.CreateSetupTx(ctx, tx, uuid.New(), nil)) })
		},
		"CompleteSetup": func(ctx context.Context) error { return errorOf(s.repo.CompleteSetup(ctx, setup().ID)) },
		"CancelSetup":   func(ctx context.Context) error { return errorOf(s.repo.CancelSetup(ctx, setup().ID)) },
		"GetSetup":      func(ctx context.Context) error { return errorOf(s.repo.GetSetup(ctx, setup().ID)) },
		"ListSetups":    func(ctx context.Context) error { return errorOf(s.repo.ListSetups(ctx, uuid.New(), nil)) },
		"CountPendingSetups": func(ctx context.Context) error {
			return errorOf(s.repo.CountPendingSetups(ctx, uuid.New()))
		},
		"OpenAccount": func(ctx context.Context) error {
			return errorOf(s.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New(), IdempotencyKey: "k"}))
		},
		"OpenAccountTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				return errorOf(s.repo.OpenAccountTx(ctx, tx, repository.OpenAccountParams{OwnerID: uuid.New()}))
			})
		},
		"GetAccount": func(ctx context.Context) error { return errorOf(s.repo.GetAccount(ctx, account())) },
		"GetAccountTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error { return errorOf(s.repo.GetAccountTx(ctx, tx, account())) })
		},
		"Deposit": func(ctx context.Context) error {
			return errorOf(s.repo.Deposit(ctx, repository.DepositParams{AccountID: account(), Amount: 1, Event: event, IdempotencyKey: "k"}))
		},
		"DepositTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				return errorOf(s.repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: account(), Amount: 1}))
			})
		},
		"Withdraw": func(ctx context.Context) error {
			return errorOf(s.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: account(), Amount: 1, Event: event}))
		},
		"WithdrawTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				return errorOf(s.repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: account(), Amount: 1}))
			})
		},
		"Transfer": func(ctx context.Context) error {
			return errorOf(s.repo.Transfer(ctx, repository.TransferParams{From: account(), To: account(), Amount: 1, Event: event}))
		},
		"TransferTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error {
				return errorOf(s.repo.TransferTx(ctx, tx, repository.TransferParams{From: account(), To: account(), Amount: 1}))
			})
		},
		"ListEntries": func(ctx context.Context) error { return errorOf(s.repo.ListEntries(ctx, account(), nil)) },
		"ListEntriesTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error { return errorOf(s.repo.ListEntriesTx(ctx, tx, account(), nil)) })
		},
		"Guard":    func(ctx context.Context) error { return s.repo.Guard(ctx, locks, one) },
		"TryGuard": func(ctx context.Context) error { return s.repo.TryGuard(ctx, locks, one) },
		"GuardTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error { return s.repo.GuardTx(ctx, tx, locks) })
		},
		"GuardQuery": func(ctx context.Context) error {
			return errorOf(repository.GuardQuery(ctx, s.repo, locks, func(ctx context.Context, q repository.DBTX) (n int, err error) {
				err = q.QueryRow(ctx, "SELECT 1").Scan(&n)
				return n, err
			}))
		},
		"EnqueueTx": func(ctx context.Context) error {
			return inTx(ctx, func(tx pgx.Tx) error { return errorOf(s.repo.EnqueueTx(ctx, tx, *event)) })
		},
		"ClaimEvents": func(ctx context.Context) error {
			return errorOf(s.repo.ClaimEvents(ctx, repository.ClaimParams{Worker: "w", Max: 1, Topics: []string{"none"}}))
		},
		"CompleteEvent":   func(ctx context.Context) error { return s.repo.CompleteEvent(ctx, claim()) },
		"RetryEvent":      func(ctx context.Context) error { return s.repo.RetryEvent(ctx, claim(), 0, errors.New("later")) },
		"ExtendClaim":     func(ctx context.Context) error { return errorOf(s.repo.ExtendClaim(ctx, claim(), time.Minute)) },
		"ListDeadLetters": func(ctx context.Context) error { return errorOf(s.repo.ListDeadLetters(ctx, nil)) },
		"RedriveDeadLetter": func(ctx context.Context) error {
			if err := s.repo.RedriveDeadLetter(ctx, 1<<40); !errors.Is(err, repository.ErrNotFound) {
				return err
			}
			return nil
		},
		"PurgeEvents": func(ctx context.Context) error { return errorOf(s.repo.PurgeEvents(ctx, time.Hour, 1)) },
		"AcquireLease": func(ctx context.Context) error {
			return errorOf(s.repo.AcquireLease(ctx, repository.LeaseParams{Name: uuid.NewString()}))
		},
		"RenewLease":   func(ctx context.Context) error { return s.repo.RenewLease(ctx, lease(), time.Minute) },
		"ReleaseLease": func(ctx context.Context) error { return s.repo.ReleaseLease(ctx, lease()) },
		"WithLease": func(ctx context.Context) error {
			return s.repo.WithLease(ctx, repository.LeaseParams{Name: uuid.NewString()}, func(context.Context, int64) error { return nil })
		},
		"LockActivity":  func(ctx context.Context) error { return errorOf(s.repo.LockActivity(ctx)) },
		"migrations.Up": func(ctx context.Context) error { return migrations.Up(ctx, s.pool) },
	}
}

// call calls every method, and returns the errors of those that failed.
func (s *service) call(t *testing.T) map[string]error {
	t.Helper()
	failed := map[string]error{}
	for name, call := range s.methods(t) {
		if err := call(t.Context()); err != nil {
			failed[name] = err
		}
	}
	return failed
}

func TestPrivilegesTestsKnowEveryMethod(t *testing.T) {
	t.Parallel()
	want := []string{"GuardQuery", "migrations.Up"}
	for i := range reflect.TypeFor[*repository.Repository]().NumMethod() {
		want = append(want, reflect.TypeFor[*repository.Repository]().Method(i).Name)
	}
	require.ElementsMatch(t, want, slices.Collect(maps.Keys((&service{}).methods(t))))
}

// privilege is one that README.md grants: what, and on what.
type privilege struct{ what, on string }

func (p privilege) grant(role string) string {
	return "GRANT " + p.what + " ON " + p.on + " TO " + role
}

func (p privilege) revoke(role string) string {
	return "REVOKE " + p.what + " ON " + p.on + " FROM " + role
}

// readmePrivileges takes the GRANT statements of README.md apart.
func readmePrivileges(t *testing.T, database string) (all []privilege) {
	t.Helper()
	for line := range strings.Lines(readFiles(t, "../README.md")["../README.md"]) {
		statement, _, _ := strings.Cut(line, ";")
		rest, ok := strings.CutPrefix(statement, "GRANT ")
		if !ok {
			continue
		}
		what, rest, _ := strings.Cut(rest, " ON ")
		on, role, _ := strings.Cut(rest, " TO ")
		require.Equal(t, "app", role, line)
		kind := ""
		for _, k := range []string{"SCHEMA ", "DATABASE ", "FUNCTION "} {
			if strings.HasPrefix(on, k) {
				kind, on = k, strings.TrimPrefix(on, k)
			}
		}
		for _, w := range strings.Split(what, ", ") {
			for _, o := range strings.Split(on, ", ") {
				if kind == "DATABASE " {
					o = database
				}
				all = append(all, privilege{w, kind + o})
			}
		}
	}
	require.Greater(t, len(all), 20)
	return all
}

// newRole makes a role that owns nothing and may nothing, on a database where PUBLIC may nothing either, and returns its
// name and how it connects.
func newRole(t *testing.T, connString string) (role, asRole string) {
	t.Helper()
	owner := testdb.Conn(t, connString)
	role = "app_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	t.Cleanup(func() {
		_, err := owner.Exec(context.Background(), "DROP OWNED BY "+role+"; DROP ROLE "+role, pgx.QueryExecModeSimpleProtocol)
		if err != nil {
			t.Error(err)
		}
	})
	testdb.Exec(t, connString,
		"CREATE ROLE "+role+" LOGIN NOSUPERUSER NOCREATEDB NOCREATEROLE NOINHERIT NOREPLICATION NOBYPASSRLS PASSWORD 'app'",
		"REVOKE ALL ON DATABASE "+databaseOf(t, connString)+" FROM PUBLIC",
		"REVOKE ALL ON SCHEMA public, latchkey FROM PUBLIC",
		"REVOKE ALL ON ALL TABLES IN SCHEMA latchkey FROM PUBLIC",
		"REVOKE ALL ON ALL FUNCTIONS IN SCHEMA latchkey FROM PUBLIC",
		"REVOKE ALL ON ALL SEQUENCES IN SCHEMA latchkey FROM PUBLIC")
	u, err := url.Parse(connString)
	require.NoError(t, err)
	u.User = url.UserPassword(role, "app")
	q := u.Query()
	q.Del("user")
	q.Del("password")
	u.RawQuery = q.Encode()
	return role, u.String()
}

func databaseOf(t *testing.T, connString string) string {
	t.Helper()
	config, err := pgx.ParseConfig(connString)
	require.NoError(t, err)
	return pgx.Identifier{config.Database}.Sanitize()
}

// requireDenied requires that a method failed for want of a privilege, and says so, and nothing else.
func requireDenied(t *testing.T, name string, err error) {
	t.Helper()
	var pgErr *pgconn.PgError
	require.ErrorAs(t, err, &pgErr, name)
	require.Equal(t, "42501", pgErr.Code, "%s: %v", name, err)
	require.False(t, repository.IsRetryable(err), name)
	for _, other := range []error{
		repository.ErrConnectionLost, repository.ErrOutcomeUnknown, repository.ErrLockBusy, repository.ErrUnsafeServer, repository.ErrInvalid,
		repository.ErrNotFound,
	} {
		require.NotErrorIs(t, err, other, name)
	}
}

func TestPrivilegesOfReadmeAreEnoughAndEachIsNeeded(t *testing.T) {
	t.Parallel()
	connString := testdb.URL(t)
	role, asRole := newRole(t, connString)
	all := readmePrivileges(t, databaseOf(t, connString))
	connect := privilege{"CONNECT", "DATABASE " + databaseOf(t, connString)}
	require.Contains(t, all, connect)

	_, err := pgx.Connect(t.Context(), asRole)
	requireSQLState(t, "42501", err)
	testdb.Exec(t, connString, connect.grant(role))
	s := newService(t, testdb.PoolAt(t, connString), testdb.PoolAt(t, asRole, maxConns(1)))
	pid := pidOf(t, s.pool)
	for name, err := range s.call(t) {
		requireDenied(t, name, err)
	}
	require.Len(t, s.call(t), len(s.methods(t))-1, "all but Check, which says so")
	require.Contains(t, found(t, s.pool), "schema")

	for _, p := range all {
		testdb.Exec(t, connString, p.grant(role))
	}
	require.Empty(t, s.call(t))
	requireFound(t, s.pool, map[string]repository.Severity{})

	for _, p := range all {
		if p == connect {
			continue
		}
		before := rowsOf(t, s.ownerPool)
		testdb.Exec(t, connString, p.revoke(role))
		failed := s.call(t)
		require.NotEmpty(t, failed, "%v is granted in README.md, and nothing needs it", p)
		for name, err := range failed {
			requireDenied(t, name, err)
		}
		got := found(t, s.pool)
		maps.DeleteFunc(got, func(name string, _ repository.Severity) bool {
			return !strings.HasPrefix(name, "privileges on ") && name != "schema"
		})
		require.Len(t, got, 1, "Check on the lack of %v", p)
		testdb.Exec(t, connString, p.grant(role))
		require.Empty(t, s.call(t), "with %v again", p)
		require.Greater(t, rowsOf(t, s.ownerPool), before)
	}
	require.Equal(t, pid, pidOf(t, s.pool), "no error cost the connection")
	require.Zero(t, s.pool.Stat().AcquiredConns())
}

// rowsOf counts all that was written.
func rowsOf(t *testing.T, pool *pgxpool.Pool) (n int) {
	t.Helper()
	require.NoError(t, pool.QueryRow(t.Context(), `SELECT (SELECT count(*) FROM latchkey.setup_requests)
		+ (SELECT count(*) FROM latchkey.accounts) + (SELECT count(*) FROM latchkey.entries)
		+ (SELECT count(*) FROM latchkey.outbox) + (SELECT count(*) FROM latchkey.leases)`).Scan(&n))
	return n
}

func TestPrivilegesRowSecurityIsAnErrorOrAFinding(t *testing.T) {
	t.Parallel()
	connString := testdb.URL(t)
	role, asRole := newRole(t, connString)
	for _, p := range readmePrivileges(t, databaseOf(t, connString)) {
		testdb.Exec(t, connString, p.grant(role))
	}
	s := newService(t, testdb.PoolAt(t, connString), testdb.PoolAt(t, asRole, maxConns(1)))
	require.Empty(t, s.call(t))
	pid, before := pidOf(t, s.pool), rowsOf(t, s.ownerPool)

	for _, table := range []string{"setup_requests", "accounts", "entries", "transfers", "outbox", "leases"} {
		testdb.Exec(t, connString, "ALTER TABLE latchkey."+table+" ENABLE ROW LEVEL SECURITY")
		requireFound(t, s.pool, map[string]repository.Severity{"row security on " + table: repository.SeverityUnsafe})
		testdb.Exec(t, connString, "ALTER TABLE latchkey."+table+" DISABLE ROW LEVEL SECURITY")
	}

	// Without a policy, nothing can be read or written.
	testdb.Exec(t, connString, "ALTER TABLE latchkey.setup_requests ENABLE ROW LEVEL SECURITY")
	for range 2 {
		_, err := s.repo.CreateSetup(t.Context(), uuid.New(), &repository.CreateSetupOpts{Event: &repository.Event{Topic: "t"}})
		requireDenied(t, "CreateSetup", err)
		err = pgx.BeginFunc(t.Context(), s.pool, func(tx pgx.Tx) error {
			_, err := s.repo.CreateSetupTx(t.Context(), tx, uuid.New(), nil)
			requireDenied(t, "CreateSetupTx", err)
			return errorOf(tx.Exec(t.Context(), "SELECT 1"))
		})
		require.NoError(t, err, "the caller's transaction can be used on")
	}
	require.Equal(t, before, rowsOf(t, s.ownerPool), "nothing was written, no event either")

	// A policy that hides what another wrote makes the count too low. The constraint still holds.
	user := uuid.New()
	_, err := s.owner.CreateSetup(t.Context(), user, nil)
	require.NoError(t, err)
	testdb.Exec(t, connString, "CREATE POLICY other ON latchkey.setup_requests USING (idempotency_key = 'mine') WITH CHECK (true)")
	_, err = s.repo.CreateSetup(t.Context(), user, &repository.CreateSetupOpts{IdempotencyKey: "mine"})
	requireLimit(t, err, -1, 1)

	testdb.Exec(t, connString, "ALTER TABLE latchkey.setup_requests DISABLE ROW LEVEL SECURITY")
	require.Empty(t, s.call(t))
	require.Equal(t, pid, pidOf(t, s.pool), "no error cost the connection")
}

// touchy are relations of latchkey's names that are an error to whoever touches them.
func touchy(schema string) (statements []string) {
	for _, name := range []string{"setup_requests", "accounts", "entries", "transfers", "outbox", "leases", "lock_activity", "schema_migrations"} {
		statements = append(statements, "CREATE VIEW "+schema+"."+name+" AS SELECT public.used() AS id")
	}
	return statements
}

func TestPrivilegesDecoysAreNeverTouched(t *testing.T) {
	t.Parallel()
	connString := testdb.URL(t)
	testdb.Exec(t, connString, append([]string{
		`CREATE SCHEMA decoy`,
		`CREATE FUNCTION public.used(OUT text) LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a decoy was used'; END $$`,
		`CREATE FUNCTION decoy.outbox_insert(text[]) RETURNS bigint LANGUAGE sql RETURN public.used()::bigint`,
		`CREATE FUNCTION decoy.setup_free_slot(uuid, bigint) RETURNS bigint LANGUAGE sql RETURN public.used()::bigint`,
		`CREATE FUNCTION decoy.outbox_is_possible(text, text, text, text, timestamptz, timestamptz, integer, integer, bigint)
			RETURNS boolean LANGUAGE sql RETURN public.used()::boolean`,
		`CREATE FUNCTION decoy.pg_backend_pid() RETURNS integer LANGUAGE sql RETURN public.used()::integer`,
		`CREATE FUNCTION decoy.pg_advisory_xact_lock(bigint) RETURNS void LANGUAGE sql AS 'SELECT public.used()'`,
		`CREATE FUNCTION decoy.pg_try_advisory_xact_lock(bigint) RETURNS boolean LANGUAGE sql RETURN public.used()::boolean`,
		`CREATE FUNCTION decoy.has_table_privilege(oid, text) RETURNS boolean LANGUAGE sql RETURN public.used()::boolean`,
		`CREATE FUNCTION decoy.row_security_active(oid) RETURNS boolean LANGUAGE sql RETURN public.used()::boolean`,
		`CREATE VIEW decoy.pg_settings AS SELECT public.used() AS name`,
		`CREATE VIEW decoy.pg_class AS SELECT public.used() AS oid`,
	}, touchy("decoy")...)...)
	temporary := touchy("pg_temp") // in a schema that is searched before all others, for tables
	for name, path := range map[string]string{
		"a schema that comes first":           "decoy, pg_catalog",
		"temporary ones, which come first":    "latchkey",
		"temporary ones, and a schema before": "decoy, pg_catalog, pg_temp",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			pool := testdb.PoolAt(t, connString, maxConns(1), withSettings(map[string]string{"search_path": path}), func(c *pgxpool.Config) {
				if !strings.HasPrefix(name, "temporary") {
					return
				}
				c.AfterConnect = func(ctx context.Context, conn *pgx.Conn) error {
					for _, sql := range temporary {
						if _, err := conn.Exec(ctx, sql); err != nil {
							return err
						}
					}
					return nil
				}
			})
			s := newService(t, testdb.PoolAt(t, connString), pool)
			require.Empty(t, s.call(t))
			requireFound(t, pool, map[string]repository.Severity{})
			for _, sql := range []string{
				"SELECT * FROM setup_requests", "INSERT INTO accounts (id) VALUES (gen_random_uuid())", "UPDATE leases SET id = ''",
				"DELETE FROM outbox", "SELECT * FROM schema_migrations",
			} {
				_, err := pool.Exec(t.Context(), sql)
				require.Error(t, err, "the control: %s touches the decoy", sql)
			}
		})
	}
}
