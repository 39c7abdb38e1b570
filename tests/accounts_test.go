package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/migrations"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// bank is a service with accounts; those of the fixture's user are its own.
type bank struct {
	*fixture
	zone string // where it is about noon, so that no day ends during a test
}

func newBank(t *testing.T, url string) *bank {
	t.Helper()
	f := newFixture(t, url)
	return &bank{f, noon(t, f.observer)}
}

// newBankOn is a bank whose own connection has the options.
func newBankOn(t *testing.T, url string, opts ...func(*pgxpool.Config)) *bank {
	t.Helper()
	b := newBank(t, url)
	b.pool = testdb.PoolAt(t, url, append(opts, maxConns(1))...)
	b.pid = pidOf(t, b.pool)
	var err error
	b.repo, err = repository.New(b.pool, repository.WithLockTimeout(patience))
	require.NoError(t, err)
	return b
}

// noon returns a time zone where the server's clock says 12 and something.
func noon(t *testing.T, conn *pgx.Conn) string {
	t.Helper()
	var hour int
	require.NoError(t, conn.QueryRow(t.Context(),
		"SELECT extract(HOUR FROM pg_catalog.clock_timestamp() AT TIME ZONE 'UTC')::integer").Scan(&hour))
	return fmt.Sprintf("Etc/GMT%+d", hour-12) // in these names, east is negative
}

// open opens an account with this limit and balance.
func (b *bank) open(t *testing.T, limit, balance int64) uuid.UUID {
	t.Helper()
	a, err := b.repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: b.user, DailyLimit: limit, TimeZone: b.zone})
	require.NoError(t, err)
	if balance > 0 {
		_, err = b.deposit(t, a.ID, balance)
		require.NoError(t, err)
	}
	return a.ID
}

func (b *bank) account(t *testing.T, id uuid.UUID) *repository.Account {
	t.Helper()
	a, err := b.repo.GetAccount(t.Context(), id)
	require.NoError(t, err)
	return a
}

func (b *bank) requireBalance(t *testing.T, want int64, id uuid.UUID) {
	t.Helper()
	require.Equal(t, want, b.account(t, id).Balance)
}

func (b *bank) deposit(t *testing.T, id uuid.UUID, amount int64) (*repository.Entry, error) {
	t.Helper()
	return b.repo.Deposit(t.Context(), repository.DepositParams{AccountID: id, Amount: amount})
}

func (b *bank) withdraw(t *testing.T, id uuid.UUID, amount int64) (*repository.Entry, error) {
	t.Helper()
	return b.repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: id, Amount: amount})
}

func (b *bank) transfer(t *testing.T, from, to uuid.UUID, amount int64) (*repository.Transfer, error) {
	t.Helper()
	return b.repo.Transfer(t.Context(), repository.TransferParams{From: from, To: to, Amount: amount})
}

func (b *bank) entries(t *testing.T, id uuid.UUID) []repository.Entry {
	t.Helper()
	list, err := b.repo.ListEntries(t.Context(), id, nil)
	require.NoError(t, err)
	return list
}

// dump returns all rows of the accounts and their versions.
func (b *bank) dump(t *testing.T, ids ...uuid.UUID) []string {
	t.Helper()
	rows, err := b.observer.Query(t.Context(), `
		SELECT 'account' || a.xmin || a::text FROM latchkey.accounts AS a WHERE a.id = ANY ($1)
		UNION ALL
		SELECT 'entry' || e.xmin || e::text FROM latchkey.entries AS e WHERE e.account_id = ANY ($1)
		UNION ALL
		SELECT 'transfer' || f.xmin || f::text FROM latchkey.transfers AS f WHERE f.from_account_id = ANY ($1) OR f.to_account_id = ANY ($1)
		ORDER BY 1`, ids)
	require.NoError(t, err)
	all, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return all
}

// setBalance writes what no call has moved. The account is not sound after that.
func (b *bank) setBalance(t *testing.T, id uuid.UUID, balance int64) {
	t.Helper()
	_, err := b.observer.Exec(t.Context(), "UPDATE latchkey.accounts SET balance = $2 WHERE id = $1", id, balance)
	require.NoError(t, err)
}

// spend writes a withdrawal that no call has made.
func (b *bank) spend(t *testing.T, id uuid.UUID, amount int64, at time.Time) {
	t.Helper()
	_, err := b.observer.Exec(t.Context(), `
		INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, created_at) VALUES ($1, 'withdrawal', $2, 0, $3)`,
		id, amount, at)
	require.NoError(t, err)
}

// now is the server's.
func (b *bank) now(t *testing.T) (now time.Time) {
	t.Helper()
	require.NoError(t, b.observer.QueryRow(t.Context(), "SELECT pg_catalog.clock_timestamp()").Scan(&now))
	return now
}

// errorOf drops the result.
func errorOf[T any](_ T, err error) error { return err }

func accountKey(t *testing.T, id uuid.UUID) int64 {
	t.Helper()
	key, err := repository.Key("account", id.String())
	require.NoError(t, err)
	return key
}

// requireDailyLimit requires a refusal by the rule of accounts.
func requireDailyLimit(t *testing.T, err error, used, limit, requested int64) {
	t.Helper()
	var refused *repository.LimitError
	require.ErrorAs(t, err, &refused)
	require.ErrorIs(t, err, repository.ErrDailyLimit)
	require.NotErrorIs(t, err, repository.ErrInsufficientFunds)
	require.NotErrorIs(t, err, repository.ErrPendingExists)
	require.False(t, repository.IsRetryable(err))
	require.Equal(t, repository.LimitError{Rule: repository.ErrDailyLimit, Used: used, Limit: limit, Requested: requested}, *refused)
}

func requireInvalid(t *testing.T, err error, argument string) {
	t.Helper()
	var invalid *repository.InvalidError
	require.ErrorAs(t, err, &invalid)
	require.ErrorIs(t, err, repository.ErrInvalid)
	require.Equal(t, argument, invalid.Argument)
	require.False(t, repository.IsRetryable(err))
}

// requireNoRoom requires that the statement refused what would be too much, before the server's arithmetic did.
func requireNoRoom(t *testing.T, err error) {
	t.Helper()
	requireInvalid(t, err, "Amount")
	require.NotErrorAs(t, err, new(*pgconn.PgError))
}

// requirePoor requires that the statement refused to take what is not there, before the constraint did.
func requirePoor(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, repository.ErrInsufficientFunds)
	require.NotErrorIs(t, err, repository.ErrDailyLimit)
	require.False(t, repository.IsRetryable(err))
	require.NotErrorAs(t, err, new(*pgconn.PgError))
}

// requireSound requires of the whole database that balances are the sums of their entries, from the first to the
// last, that transfers have their two entries, and that no daily limit was passed.
func requireSound(t *testing.T, conn *pgx.Conn) {
	t.Helper()
	var accounts int
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT count(*) FROM latchkey.accounts").Scan(&accounts))
	require.Positive(t, accounts)
	require.Empty(t, findings(t, conn))
}

func findings(t *testing.T, conn *pgx.Conn) []string {
	t.Helper()
	rows, err := conn.Query(t.Context(), `
		WITH signed AS (
			SELECT e.*, CASE WHEN e.kind IN ('deposit', 'transfer_in') THEN e.amount ELSE -e.amount END AS change
			FROM latchkey.entries AS e
		)
		SELECT 'balance ' || a.id
		FROM latchkey.accounts AS a LEFT JOIN signed AS s ON s.account_id = a.id
		GROUP BY a.id, a.balance HAVING a.balance <> coalesce(sum(s.change), 0)
		UNION ALL
		SELECT 'balance after ' || r.id
		FROM (SELECT s.id, s.balance_after, sum(s.change) OVER (PARTITION BY s.account_id ORDER BY s.created_at, s.id) AS running FROM signed AS s) AS r
		WHERE r.balance_after <> r.running
		UNION ALL
		SELECT 'transfer ' || f.id
		FROM latchkey.transfers AS f LEFT JOIN latchkey.entries AS e ON e.transfer_id = f.id AND e.amount = f.amount AND e.created_at = f.created_at
		GROUP BY f.id
		HAVING count(*) FILTER (WHERE e.kind = 'transfer_out' AND e.account_id = f.from_account_id) <> 1
			OR count(*) FILTER (WHERE e.kind = 'transfer_in' AND e.account_id = f.to_account_id) <> 1
			OR count(*) <> 2
		UNION ALL
		SELECT 'daily limit ' || a.id
		FROM latchkey.accounts AS a JOIN signed AS s ON s.account_id = a.id
		WHERE a.daily_limit > 0 AND s.change < 0
		GROUP BY a.id, a.daily_limit, (s.created_at AT TIME ZONE a.time_zone)::date HAVING -sum(s.change) > a.daily_limit`)
	require.NoError(t, err)
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	require.NoError(t, err)
	return list
}

func TestAccountOpen(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	open := func(t *testing.T, b *bank, p repository.OpenAccountParams) *repository.Account {
		t.Helper()
		p.OwnerID = b.user
		a, err := b.repo.OpenAccount(t.Context(), p)
		require.NoError(t, err)
		return a
	}

	t.Run("is empty, without a limit, and in UTC by default", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		before := b.now(t)
		a := open(t, b, repository.OpenAccountParams{})
		require.WithinRange(t, a.CreatedAt, before, b.now(t))
		require.NotZero(t, a.ID)
		require.Equal(t, &repository.Account{ID: a.ID, OwnerID: b.user, TimeZone: "UTC", CreatedAt: a.CreatedAt}, a)
		require.Equal(t, a, b.account(t, a.ID))
		require.Empty(t, b.entries(t, a.ID))
	})
	t.Run("keeps what it was given", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		for _, p := range []repository.OpenAccountParams{
			{DailyLimit: 1, TimeZone: "Australia/Lord_Howe", IdempotencyKey: "ключ"},
			{DailyLimit: math.MaxInt64, TimeZone: "America/St_Johns"},
			{TimeZone: "Pacific/Apia", IdempotencyKey: strings.Repeat("k", 255)},
			{TimeZone: "Asia/Kathmandu"},
			{TimeZone: "Pacific/Kiritimati"},
			{TimeZone: "Etc/GMT+12"},
		} {
			a := open(t, b, p)
			require.Equal(t, &repository.Account{
				ID: a.ID, OwnerID: b.user, DailyLimit: p.DailyLimit, TimeZone: p.TimeZone, IdempotencyKey: p.IdempotencyKey, CreatedAt: a.CreatedAt,
			}, a)
			require.Equal(t, a, b.account(t, a.ID))
		}
	})
	t.Run("in a zone that the server does not know is invalid", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		_, err := db.New(b.pool).AccountInsert(t.Context(), db.AccountInsertParams{ID: pg(uuid.New()), OwnerID: pg(b.user), TimeZone: "Mars/Olympus_Mons"})
		requireSQLState(t, "22023", err)

		// No zone is known to Go alone on every machine, so a trigger says what the statement would.
		url := testdb.URL(t)
		testdb.Exec(t, url,
			`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION USING ERRCODE = '22023'; END $$`,
			`CREATE TRIGGER refuse BEFORE INSERT ON latchkey.accounts FOR EACH ROW EXECUTE FUNCTION public.refuse()`)
		_, err = newBank(t, url).repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: b.user, TimeZone: "Europe/Berlin"})
		requireInvalid(t, err, "TimeZone")
		requireSQLState(t, "22023", err)
	})
	t.Run("of an unknown account is not found", func(t *testing.T) {
		t.Parallel()
		_, err := newBank(t, url).repo.GetAccount(t.Context(), uuid.New())
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.NotErrorIs(t, err, pgx.ErrNoRows, "the driver's error is not part of the API")
	})
	t.Run("repeated with its key returns the first call's account, as it is by then", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		p := repository.OpenAccountParams{DailyLimit: 100, IdempotencyKey: "k"}
		first := open(t, b, p)
		require.Equal(t, first, open(t, b, p))
		p.TimeZone = "UTC" // which is the default
		require.Equal(t, first, open(t, b, p))
		_, err := b.deposit(t, first.ID, 5)
		require.NoError(t, err)
		first.Balance = 5
		require.Equal(t, first, open(t, b, p))

		tx := begin(t, b.pool, pgx.TxOptions{})
		p.OwnerID = b.user
		again, err := b.repo.OpenAccountTx(t.Context(), tx, p)
		require.NoError(t, err)
		require.Equal(t, first, again)
		require.NoError(t, tx.Commit(t.Context()))
	})
	t.Run("repeated without a key opens another account", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		require.NotEqual(t, open(t, b, repository.OpenAccountParams{}).ID, open(t, b, repository.OpenAccountParams{}).ID)
	})
	t.Run("with a used key and other parameters is a conflict", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		first := open(t, b, repository.OpenAccountParams{DailyLimit: 1, IdempotencyKey: "k"})
		for _, p := range []repository.OpenAccountParams{{DailyLimit: 2}, {DailyLimit: 1, TimeZone: "Europe/Berlin"}, {}} {
			p.OwnerID, p.IdempotencyKey = b.user, "k"
			_, err := b.repo.OpenAccount(t.Context(), p)
			require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
			require.False(t, repository.IsRetryable(err))
		}
		var n int
		require.NoError(t, b.observer.QueryRow(t.Context(), "SELECT count(*) FROM latchkey.accounts WHERE owner_id = $1", b.user).Scan(&n))
		require.Equal(t, 1, n)
		require.Equal(t, first, b.account(t, first.ID))
	})
	t.Run("with the same key for another owner is another account", func(t *testing.T) {
		t.Parallel()
		b, c := newBank(t, url), newBank(t, url)
		p := repository.OpenAccountParams{IdempotencyKey: "k"}
		require.NotEqual(t, open(t, b, p).ID, open(t, c, p).ID)
	})
	t.Run("waits for its owner's lock if it has a key, and for nothing if not", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		key, err := repository.Key("account_owner", b.user.String())
		require.NoError(t, err)
		hold(t, url, key)
		open(t, b, repository.OpenAccountParams{})
		_, err = b.repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: b.user, IdempotencyKey: "k", LockTimeout: 20 * time.Millisecond})
		require.Equal(t, "account_owner", requireBusy(t, err, repository.WhereAdvisory).Namespace)
	})
	t.Run("20 times at once with one key opens one account", func(t *testing.T) {
		t.Parallel()
		r := newRacers(t, url, 20)
		for range 5 {
			owner := uuid.New()
			answers := make([]*repository.Account, len(r))
			errs := r.atOnce(func(c racer) (err error) {
				answers[c.n], err = c.repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: owner, IdempotencyKey: "k"})
				return err
			})
			require.NoError(t, errors.Join(errs...))
			for _, a := range answers {
				require.Equal(t, answers[0], a)
			}
		}
	})
}

// requireSoundOf requires it of some accounts, in a database that others make unsound on purpose.
func requireSoundOf(t *testing.T, b *bank, ids ...uuid.UUID) {
	t.Helper()
	for _, id := range ids {
		for _, finding := range findings(t, b.observer) {
			require.NotContains(t, finding, id.String())
		}
	}
}

func TestAccountSoundnessIsChecked(t *testing.T) {
	t.Parallel()
	for name, broken := range map[string]string{
		"balance ":       "UPDATE latchkey.accounts SET balance = balance + 1",
		"balance after ": "UPDATE latchkey.entries SET balance_after = balance_after + 1 WHERE kind = 'deposit'",
		"transfer ":      "UPDATE latchkey.entries SET created_at = created_at + interval '1 microsecond' WHERE kind = 'transfer_in'",
		"daily limit ":   "UPDATE latchkey.accounts SET daily_limit = 1 WHERE balance = 7",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, testdb.URL(t))
			_, err := b.transfer(t, b.open(t, 0, 10), b.open(t, 0, 0), 3)
			require.NoError(t, err)
			requireSound(t, b.observer)
			_, err = b.observer.Exec(t.Context(), broken)
			require.NoError(t, err)
			found := findings(t, b.observer)
			require.NotEmpty(t, found)
			for _, f := range found {
				require.True(t, strings.HasPrefix(f, name), f)
			}
		})
	}
}

// The constraints stop those who do not take the lock, and nothing wraps where they were first.
func TestAccountWriterWithoutTheLock(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	// during makes a call while another transaction has written the balance and not committed yet.
	during := func(t *testing.T, b *bank, id uuid.UUID, balance int64, call func() error) error {
		t.Helper()
		writer := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := writer.Exec(t.Context(), "UPDATE latchkey.accounts SET balance = $2 WHERE id = $1", id, balance)
		require.NoError(t, err)
		wait := inBackground(t, func() (struct{}, error) { return struct{}{}, call() })
		testdb.WaitForLockWait(t, b.observer, b.pid)
		require.NoError(t, writer.Commit(t.Context()))
		_, err = wait()
		return err
	}
	t.Run("that drains the account is insufficient funds", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, to := b.open(t, 100, 10), b.open(t, 0, 0)
		requirePoor(t, during(t, b, id, 5, func() error { return errorOf(b.withdraw(t, id, 6)) }))
		b.setBalance(t, id, 10)
		require.ErrorIs(t, during(t, b, id, 5, func() error {
			return errorOf(b.transfer(t, id, to, 6))
		}), repository.ErrInsufficientFunds)
		b.requireBalance(t, 5, id)
		b.requireBalance(t, 0, to)
	})
	t.Run("that fills the account leaves no room", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 0, 0)
		requireInvalid(t, during(t, b, to, math.MaxInt64-1, func() error {
			return errorOf(b.deposit(t, to, 2))
		}), "Amount")
		b.setBalance(t, to, 0)
		requireInvalid(t, during(t, b, to, math.MaxInt64-1, func() error {
			return errorOf(b.transfer(t, from, to, 2))
		}), "Amount")
		b.requireBalance(t, 10, from)
		b.requireBalance(t, math.MaxInt64-1, to)
		require.Len(t, b.entries(t, from), 1)
	})
	t.Run("cannot take a balance below 0, and is told so as a guarded function", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		err := b.repo.Guard(t.Context(), []repository.Lock{repository.AccountLock(id)}, func(ctx context.Context, tx *repository.Tx) error {
			return errorOf(tx.Last().Exec(ctx, "UPDATE latchkey.accounts SET balance = balance - 11 WHERE id = $1", id))
		})
		require.ErrorIs(t, err, repository.ErrInsufficientFunds)
		requireSQLState(t, "23514", err)
		b.requireBalance(t, 10, id)
	})
	t.Run("is stopped by each constraint", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 0, 0)
		f, err := b.transfer(t, from, to, 1)
		require.NoError(t, err)
		_, err = b.repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: b.user, IdempotencyKey: "k"})
		require.NoError(t, err)
		_, err = b.repo.Deposit(t.Context(), repository.DepositParams{AccountID: to, Amount: 1, IdempotencyKey: "k"})
		require.NoError(t, err)
		const (
			account  = "INSERT INTO latchkey.accounts (owner_id, balance, daily_limit, time_zone, idempotency_key) "
			entry    = "INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, transfer_id, idempotency_key) "
			transfer = "INSERT INTO latchkey.transfers (from_account_id, to_account_id, amount) "
		)
		for _, tc := range []struct {
			constraint, sql string
			args            []any
		}{
			{"", account + "VALUES ($1, 0, 0, 'UTC', NULL)", []any{b.user}},
			{"accounts_balance_check", account + "VALUES ($1, -1, 0, 'UTC', NULL)", []any{b.user}},
			{"accounts_daily_limit_check", account + "VALUES ($1, 0, -1, 'UTC', NULL)", []any{b.user}},
			{"accounts_time_zone_check", account + "VALUES ($1, 0, 0, '', NULL)", []any{b.user}},
			{"accounts_idempotency_key_check", account + "VALUES ($1, 0, 0, 'UTC', '')", []any{b.user}},
			{"accounts_idempotency_key_check", account + "VALUES ($1, 0, 0, 'UTC', repeat('ü', 128))", []any{b.user}},
			{"accounts_idempotency_key", account + "VALUES ($1, 0, 0, 'UTC', 'k')", []any{b.user}},
			{"", entry + "VALUES ($1, 'deposit', 1, 1, NULL, NULL)", []any{to}},
			{"entries_account_id_fkey", entry + "VALUES ($1, 'deposit', 1, 1, NULL, NULL)", []any{uuid.New()}},
			{"entries_kind_check", entry + "VALUES ($1, 'gift', 1, 1, NULL, NULL)", []any{to}},
			{"entries_amount_check", entry + "VALUES ($1, 'deposit', 0, 1, NULL, NULL)", []any{to}},
			{"entries_amount_check", entry + "VALUES ($1, 'withdrawal', -1, 1, NULL, NULL)", []any{to}},
			{"entries_amount_check", entry + "VALUES ($1, 'withdrawal', $2, 1, NULL, NULL)", []any{to, int64(math.MinInt64)}},
			{"entries_balance_after_check", entry + "VALUES ($1, 'deposit', 1, -1, NULL, NULL)", []any{to}},
			{"entries_transfer_id_check", entry + "VALUES ($1, 'transfer_in', 1, 1, NULL, NULL)", []any{to}},
			{"entries_transfer_id_check", entry + "VALUES ($1, 'deposit', 1, 1, $2, NULL)", []any{to, f.ID}},
			{"entries_transfer_id_fkey", entry + "VALUES ($1, 'transfer_in', 1, 1, $2, NULL)", []any{to, uuid.New()}},
			{"entries_transfer_id_kind_key", entry + "VALUES ($1, 'transfer_in', 1, 1, $2, NULL)", []any{to, f.ID}},
			{"entries_idempotency_key_check", entry + "VALUES ($1, 'deposit', 1, 1, NULL, '')", []any{to}},
			{"entries_idempotency_key", entry + "VALUES ($1, 'withdrawal', 1, 1, NULL, 'k')", []any{to}},
			{"", transfer + "VALUES ($1, $2, 1)", []any{from, to}},
			{"transfers_amount_check", transfer + "VALUES ($1, $2, 0)", []any{from, to}},
			{"transfers_amount_check", transfer + "VALUES ($1, $2, -1)", []any{from, to}},
			{"transfers_to_account_id_check", transfer + "VALUES ($1, $1, 1)", []any{from}},
			{"transfers_from_account_id_fkey", transfer + "VALUES ($1, $2, 1)", []any{uuid.New(), to}},
			{"transfers_to_account_id_fkey", transfer + "VALUES ($1, $2, 1)", []any{from, uuid.New()}},
			{"entries_account_id_fkey", "DELETE FROM latchkey.accounts WHERE id = $1", []any{b.open(t, 0, 1)}},
			{"transfers_from_account_id_fkey", "DELETE FROM latchkey.accounts WHERE id = $1", []any{from}},
			{"entries_transfer_id_fkey", "DELETE FROM latchkey.transfers WHERE id = $1", []any{f.ID}},
		} {
			_, err := b.pool.Exec(t.Context(), tc.sql, tc.args...)
			if tc.constraint == "" {
				require.NoError(t, err, tc.sql)
				continue
			}
			require.ErrorContains(t, err, `"`+tc.constraint+`"`, tc.sql)
		}
	})
}

func TestAccountLocks(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	const budget = 50 * time.Millisecond
	calls := func(b *bank, id, other uuid.UUID) map[string]func(ctx context.Context) error {
		return map[string]func(ctx context.Context) error{
			"Deposit": func(ctx context.Context) error {
				return errorOf(b.repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: 1, LockTimeout: budget}))
			},
			"Withdraw": func(ctx context.Context) error {
				return errorOf(b.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: 1, LockTimeout: budget}))
			},
			"Transfer from it": func(ctx context.Context) error {
				return errorOf(b.repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: 1, LockTimeout: budget}))
			},
			"Transfer to it": func(ctx context.Context) error {
				return errorOf(b.repo.Transfer(ctx, repository.TransferParams{From: other, To: id, Amount: 1, LockTimeout: budget}))
			},
		}
	}
	t.Run("of an account are waited for, at most the budget", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 0, 10), b.open(t, 0, 10)
		holder := hold(t, url, accountKey(t, id))
		before := b.dump(t, id, other)
		for name, call := range calls(b, id, other) {
			started := time.Now()
			busy := requireBusy(t, call(t.Context()), repository.WhereAdvisory)
			requireAbout(t, budget, busy.Waited, time.Since(started))
			require.Equal(t, "account", busy.Namespace, name)
		}
		require.Equal(t, before, b.dump(t, id, other))
		require.NotNil(t, b.account(t, id), "to read takes no lock")
		require.Len(t, b.entries(t, id), 1)
		require.NoError(t, holder.Rollback(t.Context()))
		for name, call := range calls(b, id, other) {
			require.NoError(t, call(t.Context()), name)
		}
	})
	t.Run("of other accounts are not waited for", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		hold(t, url, accountKey(t, b.open(t, 0, 0)))
		for name, call := range calls(b, b.open(t, 0, 10), b.open(t, 0, 10)) {
			require.NoError(t, call(t.Context()), name)
		}
	})
	t.Run("are those of AccountLock", func(t *testing.T) {
		t.Parallel()
		b, host := newBank(t, url), newBank(t, url)
		id, other := b.open(t, 0, 10), b.open(t, 0, 10)
		require.NoError(t, host.repo.Guard(t.Context(), []repository.Lock{repository.AccountLock(id)}, func(ctx context.Context, tx *repository.Tx) error {
			if _, err := tx.Exec(ctx, "SELECT 1"); err != nil {
				return err
			}
			for _, call := range calls(b, id, other) {
				requireBusy(t, call(ctx), repository.WhereAdvisory)
			}
			return nil
		}))
	})
}

func TestAccountJoin(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	// moves are the methods that write, in their order.
	type move struct {
		name string
		make func(ctx context.Context, tx pgx.Tx) error
	}
	moves := func(b *bank, id, other uuid.UUID) []move {
		return []move{
			{"OpenAccountTx", func(ctx context.Context, tx pgx.Tx) error {
				return errorOf(b.repo.OpenAccountTx(ctx, tx, repository.OpenAccountParams{OwnerID: b.user, IdempotencyKey: "joined", LockTimeout: patience}))
			}},
			{"DepositTx", func(ctx context.Context, tx pgx.Tx) error {
				return errorOf(b.repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: id, Amount: 5}))
			}},
			{"WithdrawTx", func(ctx context.Context, tx pgx.Tx) error {
				return errorOf(b.repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: id, Amount: 3}))
			}},
			{"TransferTx", func(ctx context.Context, tx pgx.Tx) error {
				return errorOf(b.repo.TransferTx(ctx, tx, repository.TransferParams{From: id, To: other, Amount: 1}))
			}},
		}
	}

	t.Run("writes with the caller's transaction, and keeps the locks until it ends", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 10, 10), b.open(t, 0, 0)
		before := b.dump(t, id, other)
		conn := testdb.Conn(t, url)
		_, err := conn.Exec(t.Context(), "SET lock_timeout = '123ms'; SET statement_timeout = '45s'")
		require.NoError(t, err)
		tx := begin(t, conn, pgx.TxOptions{})
		for _, m := range moves(b, id, other) {
			require.NoError(t, m.make(t.Context(), tx), m.name)
			require.Equal(t, "123ms, 45s", timeouts(t, conn))
		}
		a, err := b.repo.GetAccountTx(t.Context(), tx, id)
		require.NoError(t, err)
		require.Equal(t, int64(11), a.Balance)
		list, err := b.repo.ListEntriesTx(t.Context(), tx, id, nil)
		require.NoError(t, err)
		require.Len(t, list, 4)
		require.Equal(t, before, b.dump(t, id, other), "the others see nothing yet")
		for _, id := range []uuid.UUID{id, other} {
			require.Equal(t, []uint32{conn.PgConn().PID()}, testdb.Holders(t, b.observer, accountKey(t, id)))
		}
		require.NoError(t, tx.Commit(t.Context()))
		require.Empty(t, testdb.Holders(t, b.observer, accountKey(t, id)))
		require.Equal(t, a, b.account(t, id))
		require.Equal(t, list, b.entries(t, id))
	})
	t.Run("is undone with the caller's transaction", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 10, 10), b.open(t, 0, 0)
		before := b.dump(t, id, other)
		tx := begin(t, b.pool, pgx.TxOptions{})
		for _, m := range moves(b, id, other) {
			require.NoError(t, m.make(t.Context(), tx), m.name)
		}
		require.NoError(t, tx.Rollback(t.Context()))
		require.Equal(t, before, b.dump(t, id, other))
	})
	t.Run("that is refused leaves the transaction usable, and no lock", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 10, 5), b.open(t, 0, 0)
		conn := testdb.Conn(t, url)
		tx := begin(t, conn, pgx.TxOptions{})
		_, err := b.repo.WithdrawTx(t.Context(), tx, repository.WithdrawParams{AccountID: id, Amount: 11})
		requireDailyLimit(t, err, 0, 10, 11)
		_, err = b.repo.TransferTx(t.Context(), tx, repository.TransferParams{From: id, To: other, Amount: 6})
		requirePoor(t, err)
		_, err = b.repo.GetAccountTx(t.Context(), tx, uuid.New())
		require.ErrorIs(t, err, repository.ErrNotFound)

		third := b.open(t, 0, 5)
		holder := hold(t, url, accountKey(t, third))
		_, err = b.repo.WithdrawTx(t.Context(), tx, repository.WithdrawParams{AccountID: third, Amount: 1, LockTimeout: 20 * time.Millisecond})
		requireBusy(t, err, repository.WhereAdvisory)
		require.NoError(t, holder.Rollback(t.Context()))
		require.Empty(t, testdb.Holders(t, b.observer, accountKey(t, third)))

		_, err = b.repo.WithdrawTx(t.Context(), tx, repository.WithdrawParams{AccountID: id, Amount: 5})
		require.NoError(t, err)
		require.NoError(t, tx.Commit(t.Context()))
		b.requireBalance(t, 0, id)
	})
	t.Run("at another isolation level is refused, except for a read", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 10, 10), b.open(t, 0, 0)
		for _, o := range []pgx.TxOptions{{IsoLevel: pgx.RepeatableRead}, {IsoLevel: pgx.Serializable}, {AccessMode: pgx.ReadOnly}} {
			tx := begin(t, testdb.Conn(t, url), o)
			for _, m := range moves(b, id, other) {
				require.ErrorIs(t, m.make(t.Context(), tx), repository.ErrIsolation, m.name)
			}
			a, err := b.repo.GetAccountTx(t.Context(), tx, id)
			require.NoError(t, err)
			require.Equal(t, int64(10), a.Balance)
			list, err := b.repo.ListEntriesTx(t.Context(), tx, id, nil)
			require.NoError(t, err)
			require.Len(t, list, 1)
			require.NoError(t, tx.Commit(t.Context()))
		}
	})
	t.Run("to read leaves the transaction usable after an error", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		b.useEverything(t) // so that the statements are prepared: an error in that would come before the savepoint
		tx := begin(t, b.pool, pgx.TxOptions{})
		_, err := tx.Exec(t.Context(), "SET LOCAL lock_timeout = '20ms'")
		require.NoError(t, err)
		locker := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err = locker.Exec(t.Context(), "LOCK TABLE latchkey.accounts, latchkey.entries IN ACCESS EXCLUSIVE MODE")
		require.NoError(t, err)
		_, err = b.repo.GetAccountTx(t.Context(), tx, id)
		require.Less(t, requireBusy(t, err, repository.WhereRow).Waited, patience)
		_, err = b.repo.ListEntriesTx(t.Context(), tx, id, nil)
		requireBusy(t, err, repository.WhereRow)
		require.NoError(t, locker.Rollback(t.Context()))
		_, err = b.repo.GetAccountTx(t.Context(), tx, id)
		require.NoError(t, err)
	})
	t.Run("with several transfers needs all locks first, or can deadlock", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		accounts := []uuid.UUID{b.open(t, 0, 100), b.open(t, 0, 100), b.open(t, 0, 100), b.open(t, 0, 100)}
		var all []repository.Lock
		for _, id := range accounts {
			all = append(all, repository.AccountLock(id))
		}
		// each makes the same two transfers, the second one in the other order.
		both := func(before []repository.Lock) error {
			var first, second sync.WaitGroup
			first.Add(2)
			errs := make([]error, 2)
			for i := range errs {
				tx := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
				second.Go(func() {
					met := sync.OnceFunc(first.Done)
					defer met()
					pairs := [][2]uuid.UUID{{accounts[0], accounts[1]}, {accounts[2], accounts[3]}}
					if i == 1 {
						slices.Reverse(pairs)
					}
					errs[i] = func() error {
						if before != nil {
							met() // of two that want the same locks, only one gets as far as the first transfer
							if err := b.repo.GuardTx(t.Context(), tx, before); err != nil {
								return err
							}
						}
						for n, pair := range pairs {
							if _, err := b.repo.TransferTx(t.Context(), tx, repository.TransferParams{From: pair[0], To: pair[1], Amount: 1}); err != nil {
								return errors.Join(err, tx.Rollback(t.Context()))
							}
							if n == 0 {
								met()
								first.Wait()
							}
						}
						return tx.Commit(t.Context())
					}()
				})
			}
			second.Wait()
			return errors.Join(errs...)
		}
		require.NoError(t, both(all))
		require.ErrorIs(t, both(nil), repository.ErrDeadlock)
	})
}

// useEverything calls each method and requires what it must return.
func (b *bank) useEverything(t *testing.T) {
	t.Helper()
	ctx := t.Context()
	a, err := b.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: b.user, DailyLimit: 5, TimeZone: b.zone, IdempotencyKey: uuid.NewString()})
	require.NoError(t, err)
	require.Equal(t, a, b.account(t, a.ID))
	other := b.open(t, 0, 0)

	deposited, err := b.repo.Deposit(ctx, repository.DepositParams{AccountID: a.ID, Amount: math.MaxInt64, IdempotencyKey: "ключ"})
	require.NoError(t, err)
	again, err := b.repo.Deposit(ctx, repository.DepositParams{AccountID: a.ID, Amount: math.MaxInt64, IdempotencyKey: "ключ"})
	require.NoError(t, err)
	require.Equal(t, deposited, again)
	_, err = b.deposit(t, a.ID, 1)
	requireNoRoom(t, err)
	withdrawn, err := b.withdraw(t, a.ID, 3)
	require.NoError(t, err)
	_, err = b.withdraw(t, a.ID, 3)
	requireDailyLimit(t, err, 3, 5, 3)
	moved, err := b.transfer(t, a.ID, other, 2)
	require.NoError(t, err)
	_, err = b.transfer(t, a.ID, other, 1)
	requireDailyLimit(t, err, 5, 5, 1)
	_, err = b.transfer(t, other, a.ID, 3)
	requirePoor(t, err)
	_, err = b.withdraw(t, uuid.New(), 1)
	require.ErrorIs(t, err, repository.ErrNotFound)

	list := b.entries(t, a.ID)
	require.Len(t, list, 3)
	require.Equal(t, moved.ID, *list[0].TransferID)
	require.Equal(t, []repository.Entry{*withdrawn, *deposited}, list[1:])
	b.requireBalance(t, math.MaxInt64-5, a.ID)

	tx := begin(t, b.pool, pgx.TxOptions{IsoLevel: pgx.ReadCommitted})
	joined, err := b.repo.OpenAccountTx(ctx, tx, repository.OpenAccountParams{OwnerID: b.user})
	require.NoError(t, err)
	_, err = b.repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: joined.ID, Amount: 4})
	require.NoError(t, err)
	_, err = b.repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: joined.ID, Amount: 1})
	require.NoError(t, err)
	_, err = b.repo.TransferTx(ctx, tx, repository.TransferParams{From: joined.ID, To: other, Amount: 1})
	require.NoError(t, err)
	list, err = b.repo.ListEntriesTx(ctx, tx, joined.ID, nil)
	require.NoError(t, err)
	require.Len(t, list, 3)
	joined, err = b.repo.GetAccountTx(ctx, tx, joined.ID)
	require.NoError(t, err)
	require.Equal(t, int64(2), joined.Balance)
	require.NoError(t, tx.Commit(ctx))
	require.Equal(t, joined, b.account(t, joined.ID))
	require.Equal(t, b.pid, pidOf(t, b.pool))
	requireSoundOf(t, b, a.ID, other, joined.ID)
}

func TestAccountMethodsWorkInEveryExecMode(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for _, mode := range execModes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			newBankOn(t, url, withExecMode(mode)).useEverything(t)
		})
	}
}

func TestAccountSettingsOfTheHostDoNotMatter(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	testdb.Exec(t, url, append(slices.Clone(decoys),
		`CREATE TABLE decoy.accounts (LIKE latchkey.accounts INCLUDING ALL)`,
		`CREATE TABLE decoy.entries (LIKE latchkey.entries INCLUDING ALL)`,
		`CREATE TABLE decoy.transfers (LIKE latchkey.transfers INCLUDING ALL)`,
		`CREATE FUNCTION decoy.timezone(text, timestamptz) RETURNS timestamp LANGUAGE sql RETURN decoy.used()::timestamp`,
		`CREATE FUNCTION decoy.step_sum(numeric, bigint) RETURNS numeric LANGUAGE sql RETURN decoy.used()::numeric`,
		`CREATE AGGREGATE decoy.sum(bigint) (SFUNC = decoy.step_sum, STYPE = numeric, INITCOND = '0')`,
	)...)
	for name, settings := range foreign {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			newBankOn(t, url, withSettings(settings)).useEverything(t)
		})
	}
}

// An operator for exactly the types at hand wins over the system's, wherever its schema stands.
func TestAccountOperatorsOfTheHostDoNotMatter(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	decoys := []string{
		`CREATE SCHEMA decoy`,
		`CREATE FUNCTION decoy.used(OUT text) LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'a decoy was used'; END $$`,
	}
	types := []string{"smallint", "integer", "bigint", "numeric"}
	for _, left := range types {
		for _, right := range types {
			decoys = append(decoys,
				fmt.Sprintf("CREATE FUNCTION decoy.number(%s, %s) RETURNS numeric LANGUAGE sql RETURN decoy.used()::numeric", left, right),
				fmt.Sprintf("CREATE FUNCTION decoy.truth(%s, %s) RETURNS boolean LANGUAGE sql RETURN decoy.used()::boolean", left, right))
			for operator, function := range map[string]string{"+": "number", "-": "number", "<=": "truth", ">=": "truth", "<": "truth", ">": "truth", "=": "truth"} {
				decoys = append(decoys, fmt.Sprintf("CREATE OPERATOR decoy.%s (LEFTARG = %s, RIGHTARG = %s, FUNCTION = decoy.%s)", operator, left, right, function))
			}
		}
	}
	testdb.Exec(t, url, decoys...)
	b := newBankOn(t, url, withSettings(map[string]string{"search_path": "decoy"}))
	_, err := b.pool.Exec(t.Context(), "SELECT 1 <= 1.5")
	require.ErrorContains(t, err, "a decoy was used")
	b.useEverything(t)
}

func TestAccountConnectionsThatAreWarmSurviveANewColumn(t *testing.T) {
	t.Parallel()
	b := newBank(t, testdb.URL(t))
	b.useEverything(t)
	for _, table := range []string{"accounts", "entries", "transfers"} {
		testdb.Exec(t, b.url, "ALTER TABLE latchkey."+table+" ADD COLUMN note text, ADD COLUMN flag boolean NOT NULL DEFAULT true")
	}
	b.useEverything(t)
}

func TestAccountRoundTripsOfEveryMethodAreOne(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	w := setupWired(t, url)
	b := newBank(t, url)
	ctx := t.Context()
	id, other, full := b.open(t, 0, 1000), b.open(t, 0, 0), b.open(t, 1, 10)
	_, err := b.withdraw(t, full, 1)
	require.NoError(t, err)

	for _, test := range []struct {
		name string
		call func() error
	}{
		{"OpenAccount", func() error {
			return errorOf(w.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: uuid.New()}))
		}},
		{"OpenAccount with a key", func() error {
			return errorOf(w.repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: b.user, IdempotencyKey: "once"}))
		}},
		{"GetAccount", func() error {
			return errorOf(w.repo.GetAccount(ctx, id))
		}},
		{"Deposit", func() error {
			return errorOf(w.repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: 1}))
		}},
		{"Withdraw", func() error {
			return errorOf(w.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: 1}))
		}},
		{"Withdraw repeated with its key", func() error {
			return errorOf(w.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: 1, IdempotencyKey: "once"}))
		}},
		{"Withdraw refused by its limit", func() error {
			_, err := w.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: full, Amount: 1})
			requireDailyLimit(t, err, 1, 1, 1)
			return nil
		}},
		{"Transfer", func() error {
			return errorOf(w.repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: 1}))
		}},
		{"Transfer refused by its balance", func() error {
			_, err := w.repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: 10_000})
			requirePoor(t, err)
			return nil
		}},
		{"ListEntries", func() error {
			return errorOf(w.repo.ListEntries(ctx, id, nil))
		}},
	} {
		traffic := w.cost(t, func(t *testing.T) {
			t.Helper()
			require.NoError(t, test.call(), test.name)
		})
		require.Equal(t, 1, traffic.RoundTrips, "%s sent %q", test.name, traffic.Statements)
		require.Equal(t, 1, traffic.Syncs, test.name)
		require.Zero(t, traffic.Queries, test.name)
	}

	require.NoError(t, pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		for name, call := range map[string]func() error{
			"OpenAccountTx": func() error {
				return errorOf(w.repo.OpenAccountTx(ctx, tx, repository.OpenAccountParams{OwnerID: uuid.New()}))
			},
			"GetAccountTx": func() error {
				return errorOf(w.repo.GetAccountTx(ctx, tx, id))
			},
			"DepositTx": func() error {
				return errorOf(w.repo.DepositTx(ctx, tx, repository.DepositParams{AccountID: id, Amount: 1}))
			},
			"WithdrawTx": func() error {
				return errorOf(w.repo.WithdrawTx(ctx, tx, repository.WithdrawParams{AccountID: id, Amount: 1}))
			},
			"TransferTx": func() error {
				return errorOf(w.repo.TransferTx(ctx, tx, repository.TransferParams{From: id, To: other, Amount: 1}))
			},
			"ListEntriesTx": func() error {
				return errorOf(w.repo.ListEntriesTx(ctx, tx, id, nil))
			},
		} {
			traffic := w.cost(t, func(t *testing.T) {
				t.Helper()
				require.NoError(t, call(), name)
			})
			require.Equal(t, 1, traffic.RoundTrips, "%s sent %q", name, traffic.Statements)
		}
		return nil
	}))
}

// Where the connection dies after COMMIT was sent, the same key tells what became of the call.
func TestAccountOutcomeIsToldByTheKey(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	b := newBank(t, url)
	for _, committed := range []bool{true, false} {
		w := setupWired(t, url)
		id := b.open(t, 0, 10)
		p := repository.WithdrawParams{AccountID: id, Amount: 4, IdempotencyKey: "k"}
		_, err := w.repo.GetAccount(t.Context(), id) // warm
		require.NoError(t, err)
		w.proxy.On(func(m wire.Message) wire.Action {
			switch {
			case committed && m.FromServer && m.Type == 'C' && m.Tag == "COMMIT":
				return wire.CutBefore
			case !committed && m.Is('B') && strings.Contains(m.Statement, "EntryInsertWithdrawal"):
				return wire.CutBefore
			}
			return wire.Forward
		})
		_, err = w.repo.Withdraw(t.Context(), p)
		w.proxy.On(nil)
		require.ErrorIs(t, err, repository.ErrOutcomeUnknown)
		require.True(t, repository.IsRetryable(err))
		e, err := w.repo.Withdraw(t.Context(), p)
		require.NoError(t, err)
		require.Equal(t, int64(6), e.BalanceAfter)
		b.requireBalance(t, 6, id)
		require.Len(t, b.entries(t, id), 2)
	}
}

// The indexes are those that their comments name, on tables that are large enough to make it matter.
func TestAccountStatementsUseTheirIndexes(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	conn := testdb.Conn(t, url)
	testdb.Exec(t, url, `
		INSERT INTO latchkey.accounts (owner_id, daily_limit, idempotency_key)
		SELECT gen_random_uuid(), 1000000, 'k' || n FROM generate_series(1, 500) AS n`, `
		INSERT INTO latchkey.transfers (from_account_id, to_account_id, amount)
		SELECT p.id, p.next, 1
		FROM (SELECT a.id, lead(a.id) OVER (ORDER BY a.id) AS next FROM latchkey.accounts AS a) AS p, generate_series(1, 4)
		WHERE p.next IS NOT NULL`, `
		INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, idempotency_key, created_at)
		SELECT a.id, CASE n % 2 WHEN 0 THEN 'deposit' ELSE 'withdrawal' END, 1, 1, 'k' || n, clock_timestamp() - n * interval '1 hour'
		FROM latchkey.accounts AS a, generate_series(1, 50) AS n`,
		"VACUUM ANALYZE latchkey.accounts, latchkey.entries, latchkey.transfers")
	var from, to, owner uuid.UUID
	require.NoError(t, conn.QueryRow(t.Context(), "SELECT min(id::text)::uuid, max(id::text)::uuid, min(owner_id::text)::uuid FROM latchkey.accounts").Scan(&from, &to, &owner))
	uses := func(t *testing.T, name string, generic bool, call func(q *db.Queries) error) []string {
		t.Helper()
		tx := begin(t, conn, pgx.TxOptions{})
		defer tx.Rollback(t.Context())
		if generic {
			_, err := tx.Exec(t.Context(), "SET LOCAL plan_cache_mode = force_generic_plan")
			require.NoError(t, err)
		}
		e := &explainer{DBTX: tx, t: t}
		_ = call(db.New(e)) // there are no rows, for it is only explained
		require.NotEmpty(t, e.plan, name)
		return e.plan
	}
	key := "k9"
	for name, tc := range map[string]struct {
		call func(q *db.Queries) error
		want []string
	}{
		"AccountGet": {func(q *db.Queries) error {
			return errorOf(q.AccountGet(t.Context(), pg(from)))
		}, []string{"Index Scan accounts_pkey"}},
		"AccountInsert": {func(q *db.Queries) error {
			return errorOf(q.AccountInsert(t.Context(), db.AccountInsertParams{ID: pg(uuid.New()), OwnerID: pg(owner), TimeZone: "UTC", IdempotencyKey: &key}))
		}, []string{"Index Scan accounts_idempotency_key"}},
		"EntryInsertDeposit": {func(q *db.Queries) error {
			return errorOf(q.EntryInsertDeposit(t.Context(), db.EntryInsertDepositParams{ID: pg(uuid.New()), AccountID: pg(from), Amount: 1, IdempotencyKey: &key}))
		}, []string{"Index Scan accounts_pkey", "Index Scan entries_idempotency_key"}},
		"EntryInsertWithdrawal": {func(q *db.Queries) error {
			return errorOf(q.EntryInsertWithdrawal(t.Context(), db.EntryInsertWithdrawalParams{ID: pg(uuid.New()), AccountID: pg(from), Amount: 1, IdempotencyKey: &key}))
		}, []string{"Index Scan accounts_pkey", "Index Scan entries_idempotency_key", "Index Only Scan entries_outgoing_idx"}},
		"EntryListByAccount": {func(q *db.Queries) error {
			return errorOf(q.EntryListByAccount(t.Context(), db.EntryListByAccountParams{
				AccountID: pg(from), BeforeCreatedAt: time.Now(), BeforeID: pg(uuid.Max), MaxRows: 10,
			}))
		}, []string{"Index Scan entries_account_id_created_at_idx"}},
		"TransferInsert": {func(q *db.Queries) error {
			return errorOf(q.TransferInsert(t.Context(), db.TransferInsertParams{
				ID: pg(uuid.New()), FromAccountID: pg(from), ToAccountID: pg(to), Amount: 1, FromEntryID: pg(uuid.New()), ToEntryID: pg(uuid.New()), IdempotencyKey: &key,
			}))
		}, []string{"Index Scan accounts_pkey", "Index Scan entries_idempotency_key", "Index Only Scan entries_outgoing_idx", "Index Scan transfers_pkey"}},
	} {
		for _, generic := range []bool{false, true} {
			plan := uses(t, name, generic, tc.call)
			for _, want := range tc.want {
				require.True(t, slices.ContainsFunc(plan, func(node string) bool {
					return node == want || node == strings.Replace(want, "Index Scan", "Index Only Scan", 1)
				}), "%s, generic %v: %s not in %q", name, generic, want, plan)
			}
			for _, node := range plan {
				require.False(t, strings.HasPrefix(node, "Seq Scan"), "%s, generic %v: %q", name, generic, plan)
			}
		}
	}
	// The negative control: it sees a scan of the whole table, and a sum that has to read it.
	e := &explainer{DBTX: conn, t: t}
	require.Error(t, e.QueryRow(t.Context(), "SELECT sum(amount) FROM latchkey.entries WHERE amount > $1", 0).Scan(nil))
	require.Equal(t, []string{"Seq Scan entries"}, e.plan)
}

// explainer has each query explained in place of being run, as the plan that a prepared statement has, and keeps
// which tables and indexes it would scan, and how.
type explainer struct {
	db.DBTX
	t    *testing.T
	plan []string
}

func (e *explainer) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	rows, _ := e.Query(ctx, sql, args...)
	return noRow{rows}
}

func (e *explainer) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	e.t.Helper()
	_, err := e.Exec(ctx, "PREPARE explained AS "+sql)
	require.NoError(e.t, err)
	literals := make([]string, len(args))
	for i, arg := range args {
		switch arg := arg.(type) {
		case *string:
			literals[i] = "'" + *arg + "'"
		case []string:
			literals[i] = "NULL" // no event
		case time.Time:
			literals[i] = "'" + arg.Format(time.RFC3339Nano) + "'"
		default:
			literals[i] = fmt.Sprintf("'%v'", arg)
		}
	}
	var text []byte
	require.NoError(e.t, e.DBTX.QueryRow(ctx, "EXPLAIN (FORMAT JSON) EXECUTE explained ("+strings.Join(literals, ", ")+")").Scan(&text))
	_, err = e.Exec(ctx, "DEALLOCATE explained")
	require.NoError(e.t, err)
	var all []struct {
		Plan scanned `json:"Plan"`
	}
	require.NoError(e.t, json.Unmarshal(text, &all))
	all[0].Plan.walk(func(s scanned) {
		switch {
		case s.Index != "":
			e.plan = append(e.plan, s.Node+" "+s.Index)
		case s.Table != "" && s.Node != "ModifyTable":
			e.plan = append(e.plan, s.Node+" "+s.Table)
		}
	})
	return e.DBTX.Query(ctx, "SELECT WHERE false")
}

type noRow struct{ pgx.Rows }

func (r noRow) Scan(...any) error {
	r.Close()
	return pgx.ErrNoRows
}

type scanned struct {
	Node  string    `json:"Node Type"`
	Table string    `json:"Relation Name"`
	Index string    `json:"Index Name"`
	Plans []scanned `json:"Plans"`
}

func (s scanned) walk(visit func(scanned)) {
	visit(s)
	for _, child := range s.Plans {
		child.walk(visit)
	}
}

func TestAccountMigrationRefusesToLoseMoney(t *testing.T) {
	t.Parallel()
	b := newBank(t, testdb.URL(t))
	id := b.open(t, 0, 10)
	err := migrations.Down(t.Context(), b.pool)
	requireSQLState(t, "55000", err)
	require.ErrorContains(t, err, "latchkey.accounts is not empty")
	b.requireBalance(t, 10, id)

	testdb.Exec(t, b.url, "TRUNCATE latchkey.accounts, latchkey.entries, latchkey.transfers")
	require.NoError(t, migrations.Down(t.Context(), b.pool))
	require.NoError(t, migrations.Up(t.Context(), b.pool))
	b.requireBalance(t, 10, b.open(t, 0, 10))
}
