package tests

import (
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestTransfer(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	t.Run("moves money, to the last of it, and each account has an entry", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 1, 5)
		before := b.now(t)
		f, err := b.repo.Transfer(t.Context(), repository.TransferParams{From: from, To: to, Amount: 10, IdempotencyKey: "k"})
		require.NoError(t, err)
		require.WithinRange(t, f.CreatedAt, before, b.now(t))
		require.NotZero(t, f.ID)
		require.Equal(t, &repository.Transfer{ID: f.ID, From: from, To: to, Amount: 10, IdempotencyKey: "k", CreatedAt: f.CreatedAt}, f)
		out, in := b.entries(t, from)[0], b.entries(t, to)[0]
		require.Equal(t, repository.Entry{
			ID: out.ID, AccountID: from, Kind: repository.EntryTransferOut, Amount: 10, BalanceAfter: 0,
			TransferID: &f.ID, IdempotencyKey: "k", CreatedAt: f.CreatedAt,
		}, out)
		require.Equal(t, repository.Entry{
			ID: in.ID, AccountID: to, Kind: repository.EntryTransferIn, Amount: 10, BalanceAfter: 15,
			TransferID: &f.ID, CreatedAt: f.CreatedAt,
		}, in)
		b.requireBalance(t, 0, from)
		b.requireBalance(t, 15, to)
		requireSoundOf(t, b, from, to, f.ID)
	})
	t.Run("of more than there is writes nothing", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 0, 0)
		before := b.dump(t, from, to)
		for _, amount := range []int64{11, math.MaxInt64} {
			_, err := b.transfer(t, from, to, amount)
			requirePoor(t, err)
		}
		require.Equal(t, before, b.dump(t, from, to))
	})
	t.Run("says which account is not found", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		id := b.open(t, 0, 10)
		before := b.dump(t, id)
		_, err := b.transfer(t, uuid.New(), id, 1)
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.EqualError(t, err, "latchkey: Transfer: account From: not found")
		_, err = b.transfer(t, id, uuid.New(), 1)
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.EqualError(t, err, "latchkey: Transfer: account To: not found")
		_, err = b.transfer(t, uuid.New(), uuid.New(), 1)
		require.ErrorIs(t, err, repository.ErrNotFound)
		require.Equal(t, before, b.dump(t, id))
	})
	t.Run("fills a balance up to the largest int64, and nothing wraps", func(t *testing.T) {
		t.Parallel()
		b := newBank(t, url)
		from, to := b.open(t, 0, 10), b.open(t, 0, math.MaxInt64-5)
		before := b.dump(t, from, to)
		_, err := b.transfer(t, from, to, 6)
		requireNoRoom(t, err)
		_, err = b.transfer(t, to, from, math.MaxInt64-9)
		requireNoRoom(t, err)
		require.Equal(t, before, b.dump(t, from, to))
		_, err = b.transfer(t, from, to, 5)
		require.NoError(t, err)
		b.requireBalance(t, math.MaxInt64, to)
		_, err = b.transfer(t, to, from, math.MaxInt64-5)
		require.NoError(t, err)
		b.requireBalance(t, math.MaxInt64, from)
		b.requireBalance(t, 5, to)
	})
}

// Two accounts in both directions, as often as can be: the locks are taken in the order of their keys.
func TestTransfersThatMeetNeverDeadlock(t *testing.T) {
	t.Parallel()
	for name, gather := range gatherings {
		t.Run("however they meet, of callers "+name, func(t *testing.T) {
			t.Parallel()
			url := testdb.URL(t)
			b := newBank(t, url)
			r, one, two := gather.racers(t, url, 8), b.open(t, 0, 1000), b.open(t, 0, 1000)
			errs := r.atOnce(func(c racer) error {
				from, to := one, two
				if c.n/2%2 == 0 {
					from, to = two, one
				}
				for range 100 {
					if _, err := c.repo.Transfer(t.Context(), repository.TransferParams{From: from, To: to, Amount: 1}); err != nil {
						return err
					}
				}
				return nil
			})
			require.NoError(t, errors.Join(errs...))
			b.requireBalance(t, 1000, one)
			b.requireBalance(t, 1000, two)
			requireSound(t, b.observer)
		})
	}
	t.Run("and by hand, in the order of the arguments, do", func(t *testing.T) {
		t.Parallel()
		url := testdb.URL(t)
		b := newBank(t, url)
		one, two := b.open(t, 0, 10), b.open(t, 0, 10)
		const update = "UPDATE latchkey.accounts SET balance = balance + $2 WHERE id = $1"
		byHand := func(from, to uuid.UUID) (debit, credit func() error) {
			conn := testdb.Conn(t, url)
			tx := begin(t, conn, pgx.TxOptions{})
			return func() error {
					_, err := tx.Exec(t.Context(), update, from, -1)
					return err
				}, func() error {
					_, err := tx.Exec(t.Context(), update, to, 1)
					return errors.Join(err, tx.Rollback(t.Context()))
				}
		}
		debitOne, creditTwo := byHand(one, two)
		debitTwo, creditOne := byHand(two, one)
		require.NoError(t, debitOne())
		require.NoError(t, debitTwo())
		wait := inBackground(t, func() (struct{}, error) { return struct{}{}, creditTwo() })
		second := creditOne()
		_, first := wait()
		requireSQLState(t, "40P01", errors.Join(first, second))
	})
}

// transferring is how long the longest test goes on: as long as the promise says, or long enough to see it start.
func transferring() time.Duration {
	if os.Getenv("LATCHKEY_LONG") == "1" {
		return 20 * time.Second
	}
	return 3 * time.Second
}

// Money that only moves is never more or less, and no rule is broken on the way.
func TestTransfersKeepTheTotal(t *testing.T) {
	t.Parallel()
	url := testdb.URL(t)
	b := newBank(t, url)
	const callers, accounts, limited, each, limit = 20, 10, 3, 20_000, 10_000
	r, ids := newRacers(t, url, callers), make([]uuid.UUID, accounts)
	for i := range ids {
		if i < limited {
			ids[i] = b.open(t, limit, each)
		} else {
			ids[i] = b.open(t, 0, each)
		}
	}

	end := time.Now().Add(transferring())
	watcher := testdb.Conn(t, url)
	watch := inBackground(t, func() (looks int, err error) {
		for ; time.Now().Before(end); looks++ {
			var total, least int64
			err := watcher.QueryRow(t.Context(), "SELECT sum(balance)::bigint, min(balance) FROM latchkey.accounts").Scan(&total, &least)
			switch {
			case err != nil:
				return 0, err
			case total != accounts*each:
				return 0, errors.New("the total is not constant")
			case least < 0:
				return 0, errors.New("a balance is below 0")
			}
		}
		return looks, nil
	})
	var moved, poor, full atomic.Int64
	errs := r.atOnce(func(c racer) error {
		random := rand.New(rand.NewPCG(2, uint64(c.n)))
		for time.Now().Before(end) {
			order, amount := random.Perm(accounts), 1+random.Int64N(each/2)
			if order[1] < limited {
				amount = 1 // or all the money would end where it may not leave
			}
			_, err := c.repo.Transfer(t.Context(), repository.TransferParams{From: ids[order[0]], To: ids[order[1]], Amount: amount})
			switch {
			case err == nil:
				moved.Add(1)
			case errors.Is(err, repository.ErrInsufficientFunds):
				poor.Add(1)
			case errors.Is(err, repository.ErrDailyLimit):
				full.Add(1)
			default:
				return err // a deadlock too
			}
		}
		return nil
	})
	looks, err := watch()
	require.NoError(t, errors.Join(append(errs, err)...))
	t.Logf("%d moved, %d had too little, %d had reached their limit; looked %d times", moved.Load(), poor.Load(), full.Load(), looks)
	for _, n := range []int64{moved.Load(), poor.Load(), full.Load(), int64(looks)} {
		require.Positive(t, n)
	}
	requireSound(t, b.observer)
	var deadlocks int
	require.NoError(t, b.observer.QueryRow(t.Context(),
		"SELECT deadlocks FROM pg_catalog.pg_stat_database WHERE datname = pg_catalog.current_database()").Scan(&deadlocks))
	require.Zero(t, deadlocks)
}
