package tests

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestEntryDeposit(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("adds to the balance", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 0)
		before := b.now(t)
		e, err := b.repo.Deposit(t.Context(), repository.DepositParams{AccountID: id, Amount: 7, IdempotencyKey: "k"})
		require.NoError(t, err)
		require.WithinRange(t, e.CreatedAt, before, b.now(t))
		require.Equal(t, &repository.Entry{
			ID: e.ID, AccountID: id, Kind: repository.EntryDeposit, Amount: 7, BalanceAfter: 7, IdempotencyKey: "k", CreatedAt: e.CreatedAt,
		}, e)
		f, err := b.deposit(t, id, 5)
		require.NoError(t, err)
		require.Equal(t, int64(12), f.BalanceAfter)
		require.Empty(t, f.IdempotencyKey)
		require.Equal(t, []repository.Entry{*f, *e}, b.entries(t, id))
		b.requireBalance(t, 12, id)
	})
	t.Run("in an unknown account is not found", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		_, err := b.deposit(t, uuid.New(), 7)
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.EqualError(t, err, "latchkey: Deposit: account: not found")
	})
	t.Run("up to the largest int64, and nothing wraps", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 1)
		before := b.dump(t, id)
		_, err := b.deposit(t, id, math.MaxInt64)
		requireNoRoom(t, err)
		require.ErrorContains(t, err, "Amount must not take the balance beyond an int64")
		require.Equal(t, before, b.dump(t, id))
		e, err := b.deposit(t, id, math.MaxInt64-1)
		require.NoError(t, err)
		require.Equal(t, int64(math.MaxInt64), e.BalanceAfter)
		_, err = b.deposit(t, id, 1)
		requireNoRoom(t, err)
		b.requireBalance(t, math.MaxInt64, id)

		e, err = b.withdraw(t, id, math.MaxInt64)
		require.NoError(t, err)
		require.Zero(t, e.BalanceAfter)
		_, err = b.deposit(t, id, math.MaxInt64)
		require.NoError(t, err)
	})
	t.Run("has no limit", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 1, 100)
		b.requireBalance(t, 100, id)
	})
}

func TestEntryWithdrawal(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("takes from the balance, to the last of it", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		before := b.now(t)
		e, err := b.repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: id, Amount: 3, IdempotencyKey: "k"})
		require.NoError(t, err)
		require.WithinRange(t, e.CreatedAt, before, b.now(t))
		require.Equal(t, &repository.Entry{
			ID: e.ID, AccountID: id, Kind: repository.EntryWithdrawal, Amount: 3, BalanceAfter: 7, IdempotencyKey: "k", CreatedAt: e.CreatedAt,
		}, e)
		require.Equal(t, *e, b.entries(t, id)[0])
		_, err = b.withdraw(t, id, 7)
		require.NoError(t, err)
		b.requireBalance(t, 0, id)
	})
	t.Run("of more than there is writes nothing", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		before := b.dump(t, id)
		for _, amount := range []int64{11, math.MaxInt64} {
			_, err := b.withdraw(t, id, amount)
			requirePoor(t, err)
		}
		require.Equal(t, before, b.dump(t, id))
	})
	t.Run("from an unknown account is not found", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		_, err := b.withdraw(t, uuid.New(), 7)
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.EqualError(t, err, "latchkey: Withdraw: account: not found")
	})
}

// leave is a way for money to leave an account.
type leave func(t *testing.T, b *bank, id uuid.UUID, amount int64) error

// leaves are both ways; the limit is for them together.
var leaves = map[string]leave{
	"a withdrawal": func(t *testing.T, b *bank, id uuid.UUID, amount int64) error {
		t.Helper()
		return errorOf(b.withdraw(t, id, amount))
	},
	"a transfer": func(t *testing.T, b *bank, id uuid.UUID, amount int64) error {
		t.Helper()
		return errorOf(b.transfer(t, id, b.open(t, 1, 0), amount))
	},
}

func TestEntryDailyLimit(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for name, leave := range leaves {
		t.Run("stops "+name+" that is larger, also the first of the day", func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id := b.open(t, 100, 1000)
			before := b.dump(t, id)
			requireDailyLimit(t, leave(t, b, id, 101), 0, 100, 101)
			requireDailyLimit(t, leave(t, b, id, math.MaxInt64), 0, 100, math.MaxInt64)
			require.Equal(t, before, b.dump(t, id))
			require.NoError(t, leave(t, b, id, 100))
			requireDailyLimit(t, leave(t, b, id, 1), 100, 100, 1)
		})
		t.Run("of 0 does not stop "+name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id := b.open(t, 0, math.MaxInt64)
			b.spend(t, id, math.MaxInt64, b.now(t))
			b.spend(t, id, math.MaxInt64, b.now(t))
			require.NoError(t, leave(t, b, id, math.MaxInt64-1))
			require.NoError(t, leave(t, b, id, 1))
			requirePoor(t, leave(t, b, id, 1))
		})
		t.Run("comes before the balance: "+name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id := b.open(t, 100, 10)
			requireDailyLimit(t, leave(t, b, id, 101), 0, 100, 101)
			requirePoor(t, leave(t, b, id, 100))
		})
		t.Run("is compared without wrapping: "+name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id := b.open(t, math.MaxInt64, 0)
			b.setBalance(t, id, math.MaxInt64)
			b.spend(t, id, math.MaxInt64-2, b.now(t))
			requireDailyLimit(t, leave(t, b, id, 3), math.MaxInt64-2, math.MaxInt64, 3)
			requireDailyLimit(t, leave(t, b, id, math.MaxInt64), math.MaxInt64-2, math.MaxInt64, math.MaxInt64)
			require.NoError(t, leave(t, b, id, 2))
			requireDailyLimit(t, leave(t, b, id, 1), math.MaxInt64, math.MaxInt64, 1)
		})
		t.Run("knows a sum beyond int64, and says int64's largest: "+name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id := b.open(t, 5, 100)
			for range 3 {
				b.spend(t, id, math.MaxInt64, b.now(t))
			}
			requireDailyLimit(t, leave(t, b, id, 1), math.MaxInt64, 5, 1)
		})
	}
	t.Run("is for withdrawals and transfers together, and for nothing else", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 100, 1000), b.open(t, 1, 1000)
		_, err := b.withdraw(t, id, 30)
		require.NoError(t, err)
		_, err = b.transfer(t, id, other, 30)
		require.NoError(t, err)
		_, err = b.deposit(t, id, 500) // these neither use the limit nor give it back
		require.NoError(t, err)
		_, err = b.transfer(t, other, id, 1)
		require.NoError(t, err)
		_, err = b.withdraw(t, id, 41)
		requireDailyLimit(t, err, 60, 100, 41)
		_, err = b.transfer(t, id, other, 41)
		requireDailyLimit(t, err, 60, 100, 41)
		_, err = b.transfer(t, id, other, 40)
		require.NoError(t, err)
		_, err = b.withdraw(t, id, 1)
		requireDailyLimit(t, err, 100, 100, 1)
		requireSoundOf(t, b, id, other)
	})
	t.Run("is of one account", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		first, second := b.open(t, 10, 100), b.open(t, 10, 100)
		_, err := b.withdraw(t, first, 10)
		require.NoError(t, err)
		_, err = b.withdraw(t, second, 10)
		require.NoError(t, err)
	})
	t.Run("is of one day", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 10, 100)
		zone, err := time.LoadLocation(b.zone)
		require.NoError(t, err)
		year, month, day := b.now(t).In(zone).Date()
		midnight := time.Date(year, month, day, 0, 0, 0, 0, zone)
		b.spend(t, id, 10, midnight.Add(-time.Microsecond))
		b.spend(t, id, 10, midnight.AddDate(0, 0, 1))
		b.spend(t, id, 10, midnight.AddDate(-1, 0, 0))
		_, err = b.withdraw(t, id, 1)
		require.NoError(t, err)
		b.spend(t, id, 3, midnight)
		b.spend(t, id, 4, midnight.AddDate(0, 0, 1).Add(-time.Microsecond))
		_, err = b.withdraw(t, id, 3)
		requireDailyLimit(t, err, 8, 10, 3)
		_, err = b.withdraw(t, id, 2)
		require.NoError(t, err)
	})
	t.Run("may be changed from call to call", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 10, 100)
		_, err := b.withdraw(t, id, 10)
		require.NoError(t, err)
		for limit, amount := range map[int64]int64{9: 1, 10: 1, 11: 2} {
			_, err = b.observer.Exec(t.Context(), "UPDATE latchkey.accounts SET daily_limit = $2 WHERE id = $1", id, limit)
			require.NoError(t, err)
			_, err = b.withdraw(t, id, amount)
			requireDailyLimit(t, err, 10, limit, amount)
		}
	})
}

// clockAt answers with a chosen time where the statement asks the server's clock.
type clockAt struct {
	db.DBTX
	now time.Time
}

func (c clockAt) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	chosen := strings.Replace(sql, "pg_catalog.clock_timestamp()", "timestamptz '"+c.now.UTC().Format("2006-01-02 15:04:05.999999Z")+"'", 1)
	if chosen == sql {
		panic("the statement does not ask the clock")
	}
	return c.DBTX.QueryRow(ctx, chosen, args...)
}

// Go knows the time zones too: on each side of each odd border, what counts is what has the same date there.
func TestEntryDayIsTheCalendarDayOfItsZone(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for name, border := range map[string]string{
		"UTC":                        "2025-06-15T00:00:00Z",
		"Asia/Kathmandu":             "2025-06-14T18:15:00Z",
		"Pacific/Kiritimati":         "2025-06-14T10:00:00Z",
		"Etc/GMT+12":                 "2025-06-15T12:00:00Z",
		"Australia/Lord_Howe":        "2025-04-05T15:00:00Z", // back by half an hour
		"America/St_Johns":           "2025-03-09T05:30:00Z", // forward, from half past
		"Pacific/Apia":               "2011-12-30T10:00:00Z", // over a whole day that never was
		"Atlantic/Azores":            "2024-10-27T01:00:00Z", // back, over midnight: the day begins twice
		"America/Havana":             "2024-11-03T05:00:00Z", // the same
		"America/Santiago":           "2024-09-08T04:00:00Z", // forward at midnight: the day begins at 1
		"Asia/Beirut":                "2024-10-26T21:00:00Z", // back at midnight: the day before ends twice
		"Africa/Cairo":               "2024-04-25T22:00:00Z", // forward at midnight
		"Pacific/Chatham":            "2024-09-28T14:00:00Z",
		"Antarctica/Troll":           "2024-10-27T01:00:00Z", // back by two hours
		"America/Juneau":             "1867-10-19T08:57:00Z", // back by a whole day, so that two days last 48 hours
		"America/Argentina/San_Luis": "2008-01-21T02:00:00Z", // back at midnight
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			zone, err := time.LoadLocation(name)
			require.NoError(t, err)
			middle, err := time.Parse(time.RFC3339, border)
			require.NoError(t, err)
			b := newBankOn(t, url, withExecMode(pgx.QueryExecModeExec), withSettings(map[string]string{"timezone": "America/Los_Angeles"}))
			a, err := b.repo.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: b.user, DailyLimit: math.MaxInt64, TimeZone: name})
			require.NoError(t, err)
			var spent []time.Time
			for at := middle.Add(-50 * time.Hour); at.Before(middle.Add(50 * time.Hour)); at = at.Add(15 * time.Minute) {
				spent = append(spent, at.Add(-time.Microsecond), at)
			}
			_, err = b.observer.Exec(t.Context(), `
				INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, created_at)
				SELECT $1, 'withdrawal', 1, 0, s FROM unnest($2::timestamptz[]) AS s`, a.ID, spent)
			require.NoError(t, err)

			date := func(at time.Time) string { return at.In(zone).Format(time.DateOnly) }
			dates := map[string]int64{}
			for _, at := range spent {
				dates[date(at)]++
			}
			tx := begin(t, b.pool, pgx.TxOptions{})
			for around := -26 * time.Hour; around <= 26*time.Hour; around += 15 * time.Minute {
				if off := around.Abs() % (24 * time.Hour); off > 2*time.Hour && off < 22*time.Hour {
					continue // far from any midnight
				}
				for _, now := range []time.Time{middle.Add(around - time.Microsecond), middle.Add(around)} {
					withdrawal, err := db.New(clockAt{tx, now}).EntryInsertWithdrawal(t.Context(), db.EntryInsertWithdrawalParams{AccountID: pg(a.ID), Amount: 1, ID: pg(uuid.New())})
					require.NoError(t, err)
					require.Equal(t, dates[date(now)], withdrawal.SpentBefore, "at %v", now.In(zone))
					transfer, err := db.New(clockAt{tx, now}).TransferInsert(t.Context(), db.TransferInsertParams{FromAccountID: pg(a.ID), Amount: 1})
					require.NoError(t, err)
					require.Equal(t, dates[date(now)], transfer.SpentBefore, "at %v", now.In(zone))
				}
			}
		})
	}
}

// The clock is read when the wait for the lock is over: what waited over midnight is of the new day.
func TestEntryClockIsReadAfterTheWait(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	for name, move := range map[string]func(t *testing.T, b *bank, id, other uuid.UUID) error{
		"a deposit": func(t *testing.T, b *bank, id, _ uuid.UUID) error {
			t.Helper()
			return errorOf(b.deposit(t, id, 1))
		},
		"a withdrawal": func(t *testing.T, b *bank, id, _ uuid.UUID) error {
			t.Helper()
			return errorOf(b.withdraw(t, id, 1))
		},
		"a transfer": func(t *testing.T, b *bank, id, other uuid.UUID) error {
			t.Helper()
			return errorOf(b.transfer(t, id, other, 1))
		},
		"a transfer that comes in": func(t *testing.T, b *bank, id, other uuid.UUID) error {
			t.Helper()
			return errorOf(b.transfer(t, other, id, 1))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBank(t, url)
			id, other := b.open(t, 10, 10), b.open(t, 10, 10)
			holder := hold(t, url, accountKey(t, id))
			wait := inBackground(t, func() (struct{}, error) { return struct{}{}, move(t, b, id, other) })
			require.Equal(t, []uint32{b.pid}, testdb.WaitForWaiter(t, b.observer, accountKey(t, id), 1))
			released := b.now(t)
			require.NoError(t, holder.Commit(t.Context()))
			require.NoError(t, errorOf(wait()))
			list := b.entries(t, id)
			require.Len(t, list, 2)
			require.False(t, list[0].CreatedAt.Before(released), "%v, the lock was held until %v", list[0].CreatedAt, released)
		})
	}
}

// slowEntries keep an entry invisible to others for a while after it was decided on.
var slowEntries = []string{
	`CREATE FUNCTION public.slow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_sleep(0.02); RETURN NEW; END $$`,
	`CREATE TRIGGER slow BEFORE INSERT ON latchkey.entries FOR EACH ROW EXECUTE FUNCTION public.slow()`,
}

// dropBalanceChecks takes away the constraints that would hide a broken lock.
const dropBalanceChecks = "ALTER TABLE latchkey.accounts DROP CONSTRAINT accounts_balance_check; ALTER TABLE latchkey.entries DROP CONSTRAINT entries_balance_after_check"

func TestEntryLimitHoldsInARace(t *testing.T) {
	t.Parallel()
	// Each of 20 wants 10 at the same time, and 5 may have it: by the limit, or by the balance.
	const callers, amount, may = 20, 10, 5
	type want func(ctx context.Context, c racer, id, other uuid.UUID) error
	wants := map[string]want{
		"withdraw": func(ctx context.Context, c racer, id, _ uuid.UUID) error {
			return errorOf(c.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: amount}))
		},
		"transfer": func(ctx context.Context, c racer, id, other uuid.UUID) error {
			return errorOf(c.repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: amount}))
		},
		"withdraw or transfer": func(ctx context.Context, c racer, id, other uuid.UUID) error {
			if c.n%2 == 0 {
				return errorOf(c.repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: amount}))
			}
			return errorOf(c.repo.Transfer(ctx, repository.TransferParams{From: id, To: other, Amount: amount}))
		},
	}
	succeeded := func(errs []error) (n int) {
		for _, err := range errs {
			if err == nil {
				n++
			}
		}
		return n
	}
	for name, want := range wants {
		for way, gather := range gatherings {
			t.Run(fmt.Sprintf("%s, of callers %s", name, way), func(t *testing.T) {
				t.Parallel()
				url := testdb.URL(t)
				b := newBank(t, url)
				r, other := gather.racers(t, url, callers), b.open(t, 0, 0)
				for round := range 3 {
					if round == 1 {
						testdb.Exec(t, url, append(slices.Clone(slowEntries), dropBalanceChecks)...)
					}
					limited := b.open(t, may*amount+amount/2, 1000)
					errs := r.atOnce(func(c racer) error { return want(t.Context(), c, limited, other) })
					require.Equal(t, may, succeeded(errs))
					for _, err := range errs {
						if err != nil {
							requireDailyLimit(t, err, may*amount, may*amount+amount/2, amount)
						}
					}
					b.requireBalance(t, 1000-may*amount, limited)

					poor := b.open(t, 0, may*amount+amount/2)
					errs = r.atOnce(func(c racer) error { return want(t.Context(), c, poor, other) })
					require.Equal(t, may, succeeded(errs))
					for _, err := range errs {
						if err != nil {
							requirePoor(t, err)
						}
					}
					b.requireBalance(t, amount/2, poor)
				}
				requireSound(t, b.observer)
			})
		}
	}
	t.Run("and does not hold without the lock", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		b := newBank(t, url)
		r, id := newRacers(t, url, callers), b.open(t, may*amount, 1000)
		testdb.Exec(t, url, slowEntries...)
		errs := r.atOnce(func(c racer) error {
			row, err := db.New(c.pool).EntryInsertWithdrawal(t.Context(), db.EntryInsertWithdrawalParams{AccountID: pg(id), Amount: amount, ID: pg(uuid.New())})
			if err == nil && !row.ID.Valid {
				return repository.ErrDailyLimit
			}
			return err
		})
		require.Greater(t, succeeded(errs), may, "the guard is off, so this race must break the rule")
		require.NotEmpty(t, findings(t, b.observer))
	})
}

func TestEntryIdempotency(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	deposit := func(t *testing.T, b *bank, id uuid.UUID, amount int64) (*repository.Entry, error) {
		t.Helper()
		return b.repo.Deposit(t.Context(), repository.DepositParams{AccountID: id, Amount: amount, IdempotencyKey: "k"})
	}
	withdraw := func(t *testing.T, b *bank, id uuid.UUID, amount int64) (*repository.Entry, error) {
		t.Helper()
		return b.repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: id, Amount: amount, IdempotencyKey: "k"})
	}
	transfer := func(t *testing.T, b *bank, from, to uuid.UUID, amount int64) (*repository.Transfer, error) {
		t.Helper()
		return b.repo.Transfer(t.Context(), repository.TransferParams{From: from, To: to, Amount: amount, IdempotencyKey: "k"})
	}

	t.Run("a repeat returns the first result, moves nothing, and uses no quota", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		in, out, from, to := b.open(t, 0, 0), b.open(t, 10, 10), b.open(t, 10, 10), b.open(t, 0, 0)
		deposited, err := deposit(t, b, in, 7)
		require.NoError(t, err)
		withdrawn, err := withdraw(t, b, out, 10) // all that is there, and all that may
		require.NoError(t, err)
		transferred, err := transfer(t, b, from, to, 10)
		require.NoError(t, err)
		before := b.dump(t, in, out, from, to)
		for range 3 {
			e, err := deposit(t, b, in, 7)
			require.NoError(t, err)
			require.Equal(t, deposited, e)
			e, err = withdraw(t, b, out, 10)
			require.NoError(t, err)
			require.Equal(t, withdrawn, e)
			f, err := transfer(t, b, from, to, 10)
			require.NoError(t, err)
			require.Equal(t, transferred, f)
		}
		require.Equal(t, before, b.dump(t, in, out, from, to))
	})
	t.Run("a repeat is answered also where the balance has no more room", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		in, from, to := b.open(t, 0, 0), b.open(t, 0, 10), b.open(t, 0, 0)
		deposited, err := deposit(t, b, in, 7)
		require.NoError(t, err)
		transferred, err := transfer(t, b, from, to, 10)
		require.NoError(t, err)
		b.setBalance(t, in, math.MaxInt64)
		b.setBalance(t, to, math.MaxInt64)
		e, err := deposit(t, b, in, 7)
		require.NoError(t, err)
		require.Equal(t, deposited, e)
		f, err := transfer(t, b, from, to, 10)
		require.NoError(t, err)
		require.Equal(t, transferred, f)
	})
	t.Run("a repeat is answered by the forms for a transaction too", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, to := b.open(t, 0, 10), b.open(t, 0, 0)
		first, err := withdraw(t, b, id, 3)
		require.NoError(t, err)
		tx := begin(t, b.pool, pgx.TxOptions{})
		again, err := b.repo.WithdrawTx(t.Context(), tx, repository.WithdrawParams{AccountID: id, Amount: 3, IdempotencyKey: "k"})
		require.NoError(t, err)
		require.Equal(t, first, again)
		_, err = b.repo.TransferTx(t.Context(), tx, repository.TransferParams{From: id, To: to, Amount: 3, IdempotencyKey: "k"})
		require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
		require.NoError(t, tx.Commit(t.Context()))
	})
	t.Run("the same key with another amount, kind or counterparty is a conflict", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		to, third, nobody := b.open(t, 0, 0), b.open(t, 0, 0), uuid.New()
		calls := map[string]func(t *testing.T, id uuid.UUID) error{
			"deposit 3": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(deposit(t, b, id, 3))
			},
			"deposit 4": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(deposit(t, b, id, 4))
			},
			"withdraw 3": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(withdraw(t, b, id, 3))
			},
			"withdraw 4": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(withdraw(t, b, id, 4))
			},
			"transfer 3": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(transfer(t, b, id, to, 3))
			},
			"transfer 4": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(transfer(t, b, id, to, 4))
			},
			"transfer 3 to a third": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(transfer(t, b, id, third, 3))
			},
			"transfer 3 to nobody": func(t *testing.T, id uuid.UUID) error {
				t.Helper()
				return errorOf(transfer(t, b, id, nobody, 3))
			},
		}
		for first, call := range calls {
			if first == "transfer 3 to nobody" {
				continue
			}
			id := b.open(t, 0, 10)
			require.NoError(t, call(t, id), first)
			before := b.dump(t, id, to, third)
			for second, call := range calls {
				err := call(t, id)
				if first == second {
					require.NoError(t, err, first)
					continue
				}
				require.ErrorIs(t, err, repository.ErrIdempotencyConflict, "%s, then %s", first, second)
				require.False(t, repository.IsRetryable(err))
			}
			require.Equal(t, before, b.dump(t, id, to, third))
		}
	})
	t.Run("the same key of another account is another key", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		first, second := b.open(t, 0, 10), b.open(t, 0, 10)
		_, err := withdraw(t, b, first, 1)
		require.NoError(t, err)
		_, err = withdraw(t, b, second, 2)
		require.NoError(t, err)
		_, err = deposit(t, b, b.open(t, 0, 0), 1)
		require.NoError(t, err)
	})
	t.Run("a transfer's key is the sender's only", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 0, 0)
		_, err := transfer(t, b, from, to, 1)
		require.NoError(t, err)
		_, err = transfer(t, b, to, from, 1)
		require.NoError(t, err)
		require.Equal(t, []string{"", "k"}, []string{b.entries(t, from)[0].IdempotencyKey, b.entries(t, from)[1].IdempotencyKey})
	})
	t.Run("a refused call leaves the key free", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, to := b.open(t, 10, 5), b.open(t, 0, 0)
		_, err := withdraw(t, b, id, 11)
		requireDailyLimit(t, err, 0, 10, 11)
		_, err = transfer(t, b, id, to, 6)
		requirePoor(t, err)
		_, err = transfer(t, b, id, uuid.New(), 5)
		require.ErrorIs(t, err, repository.ErrNotFound)
		_, err = deposit(t, b, id, math.MaxInt64)
		requireNoRoom(t, err)
		_, err = withdraw(t, b, id, 5)
		require.NoError(t, err)
	})
	t.Run("20 repeats at once move the money once", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		b := newBank(t, url)
		r, to := newRacers(t, url, 20), b.open(t, 0, 0)
		for range 5 {
			id := b.open(t, 0, 10)
			answers := make([]*repository.Transfer, len(r))
			errs := r.atOnce(func(c racer) (err error) {
				answers[c.n], err = c.repo.Transfer(t.Context(), repository.TransferParams{From: id, To: to, Amount: 1, IdempotencyKey: "k"})
				return err
			})
			require.NoError(t, errors.Join(errs...))
			for _, f := range answers {
				require.Equal(t, answers[0], f)
			}
			b.requireBalance(t, 9, id)
		}
		requireSound(t, b.observer)
	})
	t.Run("a key that a writer without the lock used is a conflict", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		writer := begin(t, testdb.Conn(t, url), pgx.TxOptions{})
		_, err := writer.Exec(t.Context(), `
			INSERT INTO latchkey.entries (account_id, kind, amount, balance_after, idempotency_key) VALUES ($1, 'deposit', 1, 1, 'k')`, id)
		require.NoError(t, err)
		wait := inBackground(t, func() (*repository.Entry, error) { return deposit(t, b, id, 1) })
		testdb.WaitForLockWait(t, b.observer, b.pid)
		require.NoError(t, writer.Commit(t.Context()))
		_, err = wait()
		require.ErrorIs(t, err, repository.ErrIdempotencyConflict)
		requireSQLState(t, "23505", err)
	})
}

func TestEntryList(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	pages := func(t *testing.T, b *bank, id uuid.UUID, size int, between func()) []repository.Entry {
		t.Helper()
		var all []repository.Entry
		o := &repository.ListOpts{Limit: size}
		for {
			page, err := b.repo.ListEntries(t.Context(), id, o)
			require.NoError(t, err)
			if len(page) == 0 {
				return all
			}
			require.LessOrEqual(t, len(page), size)
			all = append(all, page...)
			o.After = page[len(page)-1].Cursor()
			between()
		}
	}
	t.Run("is newest first, of one account, and of every kind", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id, other := b.open(t, 0, 0), b.open(t, 0, 100)
		deposited, err := b.deposit(t, id, 10)
		require.NoError(t, err)
		in, err := b.transfer(t, other, id, 7)
		require.NoError(t, err)
		withdrawn, err := b.withdraw(t, id, 3)
		require.NoError(t, err)
		out, err := b.transfer(t, id, other, 2)
		require.NoError(t, err)
		got := b.entries(t, id)
		require.Equal(t, []repository.Entry{
			{ID: got[0].ID, AccountID: id, Kind: repository.EntryTransferOut, Amount: 2, BalanceAfter: 12, TransferID: &out.ID, CreatedAt: out.CreatedAt},
			*withdrawn,
			{ID: got[2].ID, AccountID: id, Kind: repository.EntryTransferIn, Amount: 7, BalanceAfter: 17, TransferID: &in.ID, CreatedAt: in.CreatedAt},
			*deposited,
		}, got)
	})
	t.Run("of an unknown account is empty", func(t *testing.T) {
		t.Parallel()
		require.Empty(t, newBank(t, url).entries(t, uuid.New()))
	})
	t.Run("in pages of any size is the whole, also while rows are added", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 0)
		for amount := range int64(7) {
			_, err := b.deposit(t, id, 1+amount)
			require.NoError(t, err)
		}
		want := b.entries(t, id)
		require.Len(t, want, 7)
		for size := 1; size <= 8; size++ {
			require.Equal(t, want, pages(t, b, id, size, func() {}))
		}
		require.Equal(t, want, pages(t, b, id, 2, func() {
			_, err := b.deposit(t, id, 1)
			require.NoError(t, err)
		}))
	})
	t.Run("in pages loses and repeats no row of one instant", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 100)
		at, err := time.Parse(time.RFC3339, "2026-04-05T01:45:00.123456+10:30")
		require.NoError(t, err)
		for range 6 {
			b.spend(t, id, 1, at)
		}
		whole := b.entries(t, id)
		require.Len(t, whole, 7)
		for size := 1; size <= 7; size++ {
			require.Equal(t, whole, pages(t, b, id, size, func() {}))
		}
	})
	t.Run("has at most 100 rows by default, and 1000 in any case", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 0)
		_, err := b.observer.Exec(t.Context(), `
			INSERT INTO latchkey.entries (account_id, kind, amount, balance_after)
			SELECT $1, 'deposit', n, n FROM generate_series(1, 1001) AS n`, id)
		require.NoError(t, err)
		for limit, want := range map[int]int{0: 100, 1: 1, 101: 101, 1000: 1000} {
			got, err := b.repo.ListEntries(t.Context(), id, &repository.ListOpts{Limit: limit})
			require.NoError(t, err)
			require.Len(t, got, want)
		}
		require.Len(t, pages(t, b, id, 1000, func() {}), 1001)
	})
}

// Whatever is called in whatever order, from many at once, every balance is what its entries add up to.
func TestEntriesAddUpToTheirBalances(t *testing.T) {
	t.Parallel()
	for name, gather := range gatherings {
		t.Run("of callers "+name, func(t *testing.T) {
			t.Parallel()
			requireEntriesAddUp(t, gather)
		})
	}
}

func requireEntriesAddUp(t *testing.T, gather gathering) {
	t.Helper()
	url := testdb.URL(t)
	b := newBank(t, url)
	const callers, each, accounts = 8, 150, 5
	r, ids := gather.racers(t, url, callers), make([]uuid.UUID, accounts)
	for i := range ids {
		ids[i] = b.open(t, int64(i)*2000, 1000)
	}
	var done, refused atomic.Int64
	var mu sync.Mutex
	results := map[string]any{} // by account and key
	errs := r.atOnce(func(c racer) error {
		random := rand.New(rand.NewPCG(1, uint64(c.n)))
		for range each {
			from, to := ids[random.IntN(accounts)], ids[random.IntN(accounts)]
			amount, key := 1+random.Int64N(300), ""
			if random.IntN(2) == 0 {
				// One key stands for one call, made by several.
				n := random.IntN(40)
				key, amount = fmt.Sprint(n), int64(1+n)
				to = ids[(slices.Index(ids, from)+1)%accounts]
			}
			var result any
			var err error
			kind := random.IntN(3)
			if key != "" {
				kind = int(amount) % 3
			}
			switch {
			case kind == 0:
				result, err = c.repo.Deposit(t.Context(), repository.DepositParams{AccountID: from, Amount: amount, IdempotencyKey: key})
			case kind == 1 || from == to:
				result, err = c.repo.Withdraw(t.Context(), repository.WithdrawParams{AccountID: from, Amount: amount, IdempotencyKey: key})
			default:
				result, err = c.repo.Transfer(t.Context(), repository.TransferParams{From: from, To: to, Amount: amount, IdempotencyKey: key})
			}
			switch {
			case errors.Is(err, repository.ErrInsufficientFunds) || errors.Is(err, repository.ErrDailyLimit):
				refused.Add(1)
				continue
			case err != nil:
				return err
			}
			done.Add(1)
			if key == "" {
				continue
			}
			mu.Lock()
			first, ok := results[from.String()+key]
			if !ok {
				results[from.String()+key] = result
			}
			mu.Unlock()
			if ok && !reflect.DeepEqual(first, result) {
				return fmt.Errorf("%v and %v are of one key", first, result)
			}
		}
		return nil
	})
	require.NoError(t, errors.Join(errs...))
	require.Positive(t, done.Load())
	require.Positive(t, refused.Load())
	require.Equal(t, int64(callers*each), done.Load()+refused.Load())
	requireSound(t, b.observer)
	for _, id := range ids {
		var balance int64
		o := &repository.ListOpts{}
		for {
			page, err := b.repo.ListEntries(t.Context(), id, o)
			require.NoError(t, err)
			if len(page) == 0 {
				break
			}
			for _, e := range page {
				switch e.Kind {
				case repository.EntryDeposit, repository.EntryTransferIn:
					balance += e.Amount
				case repository.EntryWithdrawal, repository.EntryTransferOut:
					balance -= e.Amount
				}
			}
			o.After = page[len(page)-1].Cursor()
		}
		b.requireBalance(t, balance, id)
	}
}
