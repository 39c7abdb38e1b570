package main

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/repository"
)

// The rule that every contestant keeps is that a user has at most this many pending requests, the most that latchkey
// allows.
const maxPending = 1000

var (
	errRefused = errors.New("refused by the rule")
	errStopped = errors.New("the round is over")
)

// call makes one guarded insert for the user. It returns errRefused where the rule says no, and errStopped if the round
// ended before it had begun.
type call func(ctx context.Context, user uuid.UUID) error

// contestant is a way to make a guarded insert.
type contestant struct {
	name string

	// lock is which round trip of a call takes its lock, counted from 1; the last one frees it. 0: there is no lock.
	lock int

	table table
	open  func(context.Context, *world) (call, error)
}

const (
	textbook   = "textbook, 7 round trips"
	beginTx    = "the same with BeginTxFunc"
	parentRow  = "parent row FOR UPDATE"
	serial     = "SERIALIZABLE and retry"
	unguarded  = "unguarded INSERT"
	function   = "one PL/pgSQL function"
	session    = "session lock"
	riverJob   = "River unique insert"
	alone      = "latchkey, not coalescing"
	coalescing = "latchkey"
	guardLast  = "Guard, insert only"
	guardCount = "Guard, count in Go"
	lease      = "lease by hand"
	bareBatch  = "bare pgx batch"
)

func contestants() []contestant {
	return []contestant{
		{textbook, 3, setupRequests, openTextbook},
		{beginTx, 3, setupRequests, openBeginTx},
		{parentRow, 2, setupRequests, openParentRow},
		{serial, 0, setupRequests, openSerializable},
		{unguarded, 0, setupRequests, openUnguarded},
		{function, 1, setupRequests, openFunction},
		{session, 1, setupRequests, openSessionLock},
		{riverJob, 0, riverJobs, openRiver},
		{alone, 1, setupRequests, func(ctx context.Context, w *world) (call, error) { return openLatchkey(ctx, w, false) }},
		{coalescing, 1, setupRequests, func(ctx context.Context, w *world) (call, error) { return openLatchkey(ctx, w, true) }},
		{guardLast, 1, setupRequests, openGuardLast},
		{guardCount, 1, setupRequests, openGuardCount},
		{lease, 1, setupRequests, openLease},
		{bareBatch, 1, setupRequests, openBareBatch},
	}
}

// The hand-written ways share their statements. Like latchkey's, the check finds a free slot as well as the count,
// because the table's constraint wants to know it.
const (
	checkSQL = `
SELECT
    count(*),
    CASE WHEN count(*) = 0 THEN 1 WHEN max(pending_slot) < 1000 THEN 1 + max(pending_slot) ELSE latchkey.setup_free_slot($1, 1) END
FROM latchkey.setup_requests
WHERE user_id = $1 AND status = 'pending'`

	insertSQL = `
INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending)
VALUES ($1, $2, 1000)`
)

// objectsSQL makes what the contestants need beside latchkey's schema.
var objectsSQL = `
CREATE SCHEMA bench;
CREATE SCHEMA river;
CREATE TABLE bench.parents (id uuid PRIMARY KEY, leased_until timestamptz);
CREATE FUNCTION bench.create_setup(for_user uuid, key bigint) RETURNS uuid LANGUAGE plpgsql AS $$
DECLARE
    already bigint;
    free smallint;
    made uuid;
BEGIN
    PERFORM set_config('lock_timeout', '10s', true);
    PERFORM pg_advisory_xact_lock(key);` + strings.ReplaceAll(checkSQL, "$1", "for_user") + `
    INTO already, free;
    IF already >= 1000 THEN
        RETURN NULL;
    END IF;
    INSERT INTO latchkey.setup_requests (user_id, pending_slot, max_pending)
    VALUES (for_user, free, 1000)
    RETURNING id INTO made;
    RETURN made;
END;
$$;`

type querier interface {
	Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// checkAndInsert is two round trips.
func checkAndInsert(ctx context.Context, check, insert querier, user uuid.UUID) error {
	var pending, slot int
	if err := check.QueryRow(ctx, checkSQL, user).Scan(&pending, &slot); err != nil {
		return err
	}
	if pending >= maxPending {
		return errRefused
	}
	_, err := insert.Exec(ctx, insertSQL, user, slot)
	return err
}

// lockCheckInsert is five round trips: what the textbook has between BEGIN and COMMIT. The lock timeout is for the lock
// only, so it is put back.
func lockCheckInsert(ctx context.Context, q querier, user uuid.UUID) error {
	key, err := repository.Key("setup_request", user.String())
	if err != nil {
		return err
	}
	if _, err := q.Exec(ctx, "SET LOCAL lock_timeout = '10s'"); err != nil {
		return err
	}
	if _, err := q.Exec(ctx, "SELECT pg_advisory_xact_lock($1)", key); err != nil {
		return err
	}
	if _, err := q.Exec(ctx, "SET LOCAL lock_timeout = DEFAULT"); err != nil {
		return err
	}
	return checkAndInsert(ctx, q, q, user)
}

// openTextbook has no more than the connection: every statement is sent by hand.
func openTextbook(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		if _, err := conn.Exec(ctx, "BEGIN"); err != nil {
			return err
		}
		if err := lockCheckInsert(ctx, conn, user); err != nil {
			_, endErr := conn.Exec(ctx, "ROLLBACK")
			return errors.Join(err, endErr)
		}
		_, err := conn.Exec(ctx, "COMMIT")
		return err
	})
}

func openBeginTx(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			return lockCheckInsert(ctx, tx, user)
		})
	})
}

func openParentRow(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		return pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.ReadCommitted}, func(tx pgx.Tx) error {
			if _, err := tx.Exec(ctx, "SELECT FROM bench.parents WHERE id = $1 FOR UPDATE", user); err != nil {
				return err
			}
			return checkAndInsert(ctx, tx, tx, user)
		})
	})
}

// openSerializable also tries again where the slot was taken in the meantime, which is the same conflict, found by the
// index first.
func openSerializable(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		for {
			err := pgx.BeginTxFunc(ctx, conn, pgx.TxOptions{IsoLevel: pgx.Serializable}, func(tx pgx.Tx) error {
				return checkAndInsert(ctx, tx, tx, user)
			})
			if state := sqlState(err); state != "40001" && state != "23505" {
				return err
			}
		}
	})
}

// openUnguarded takes a slot at random, since nobody has looked which is free; nearly all are.
func openUnguarded(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		_, err := conn.Exec(ctx, insertSQL, user, 1+rand.IntN(maxPending))
		return takenIsRefused(err)
	})
}

func openFunction(ctx context.Context, w *world) (call, error) {
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		key, err := repository.Key("setup_request", user.String())
		if err != nil {
			return err
		}
		var id *uuid.UUID
		if err := conn.QueryRow(ctx, "SELECT bench.create_setup($1, $2)", user, key).Scan(&id); err != nil {
			return err
		}
		if id == nil {
			return errRefused
		}
		return nil
	})
}

// openSessionLock gives one half of the connections to the locks and the other to the work. In one pool for both, those
// that wait for the lock would take all connections, and its holder would wait for one for ever.
func openSessionLock(ctx context.Context, w *world) (call, error) {
	pool, err := w.pool(ctx, poolSize/2)
	if err != nil {
		return nil, err
	}
	locks, err := w.pool(ctx, poolSize/2)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, user uuid.UUID) error {
		key, err := repository.Key("setup_request", user.String())
		if err != nil {
			return err
		}
		conn, err := w.acquire(locks)
		if err != nil {
			return err
		}
		defer conn.Release()
		if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock($1)", key); err != nil {
			return err
		}
		err = checkAndInsert(ctx, pool, pool, user)
		_, freeErr := conn.Exec(ctx, "SELECT pg_advisory_unlock($1)", key)
		return errors.Join(err, freeErr)
	}, nil
}

var benched = repository.MustNamespace("bench")

// openGuardLast leaves the limit to the constraint; the lock sees to it that nobody waits in the index.
func openGuardLast(ctx context.Context, w *world) (call, error) {
	repo, err := openRepository(ctx, w, false)
	return func(ctx context.Context, user uuid.UUID) error {
		locks := []repository.Lock{benched.Exclusive(user.String())}
		return takenIsRefused(repo.Guard(ctx, locks, func(ctx context.Context, tx *repository.Tx) error {
			_, err := tx.Last().Exec(ctx, insertSQL, user, 1+rand.IntN(maxPending))
			return err
		}))
	}, err
}

func openGuardCount(ctx context.Context, w *world) (call, error) {
	repo, err := openRepository(ctx, w, false)
	return func(ctx context.Context, user uuid.UUID) error {
		locks := []repository.Lock{benched.Exclusive(user.String())}
		return repo.Guard(ctx, locks, func(ctx context.Context, tx *repository.Tx) error {
			return checkAndInsert(ctx, tx, tx.Last(), user)
		})
	}, err
}

// openLease asks again every millisecond while another has the lease, since nobody says when it is free.
func openLease(ctx context.Context, w *world) (call, error) {
	const take = `
UPDATE bench.parents
SET leased_until = clock_timestamp() + '10 s'
WHERE id = $1 AND (leased_until IS NULL OR leased_until < clock_timestamp())`
	pool, err := w.pool(ctx, poolSize)
	return func(ctx context.Context, user uuid.UUID) error {
		for {
			tag, err := pool.Exec(ctx, take, user)
			if err != nil {
				return err
			}
			if tag.RowsAffected() == 1 {
				break
			}
			select {
			case <-w.over.Done():
				return errStopped
			case <-time.After(time.Millisecond):
			}
		}
		err := checkAndInsert(ctx, pool, pool, user)
		_, freeErr := pool.Exec(ctx, "UPDATE bench.parents SET leased_until = NULL WHERE id = $1", user)
		return errors.Join(err, freeErr)
	}, err
}

// takenIsRefused turns the constraint's no into the rule's.
func takenIsRefused(err error) error {
	if sqlState(err) == "23505" {
		return errRefused
	}
	return err
}

// sqlState returns the SQLSTATE of a server's error, and "" for any other.
func sqlState(err error) string {
	var pgErr *pgconn.PgError
	if errors.As(err, &pgErr) {
		return pgErr.Code
	}
	return ""
}
