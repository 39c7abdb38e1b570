package main

import (
	"cmp"
	"context"
	"encoding/binary"
	"errors"
	"log/slog"
	"math/rand/v2"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/riverqueue/river"
	"github.com/riverqueue/river/riverdriver/riverpgxv5"
	"github.com/riverqueue/river/rivermigrate"
	"github.com/riverqueue/river/rivertype"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
)

// openRepository returns latchkey on a pool of its own. The patience is for those who wait behind 255 others.
func openRepository(ctx context.Context, w *world, coalesce bool) (*repository.Repository, error) {
	pool, err := w.pool(ctx, poolSize)
	if err != nil {
		return nil, err
	}
	opts := []repository.Option{repository.WithLockTimeout(patience)}
	if !coalesce {
		opts = append(opts, repository.WithCoalescing(0))
	}
	return repository.New(pool, opts...)
}

func openLatchkey(ctx context.Context, w *world, coalesce bool) (call, error) {
	repo, err := openRepository(ctx, w, coalesce)
	return func(ctx context.Context, user uuid.UUID) error {
		_, err := repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{MaxPending: maxPending})
		if errors.Is(err, repository.ErrPendingExists) {
			return errRefused
		}
		return err
	}, err
}

// openBareBatch sends the very statements that latchkey sends, with values that need no thought, and reads the row: the
// least that a client can do for them. It learns the statements by watching latchkey.
func openBareBatch(ctx context.Context, w *world) (call, error) {
	watched := uuid.New()
	watchedKey, err := repository.Key("setup_request", watched.String())
	if err != nil {
		return nil, err
	}
	sent, err := watchCreateSetup(ctx, w, watched)
	if err != nil {
		return nil, err
	}
	// The user's first bytes are as good a key as a hash of them: users are random.
	valueFor := func(user uuid.UUID, v any) any {
		key := int64(binary.BigEndian.Uint64(user[:]))
		switch v := v.(type) {
		case pgtype.UUID:
			if v.Bytes == watched {
				return pgtype.UUID{Bytes: user, Valid: true}
			}
			return pgtype.UUID{Bytes: uuid.Must(uuid.NewV7()), Valid: true} // the row's
		case []int64:
			return []int64{key}
		case int64:
			if v == watchedKey {
				return key
			}
		}
		return v
	}
	return w.onConn(ctx, func(ctx context.Context, conn *pgxpool.Conn, user uuid.UUID) error {
		batch := &pgx.Batch{}
		for _, s := range sent {
			values := make([]any, len(s.Args))
			for i, v := range s.Args {
				values[i] = valueFor(user, v)
			}
			batch.Queue(s.SQL, values...)
		}
		results := conn.SendBatch(ctx, batch)
		var row db.SetupInsertWithinLimitRow
		var err error
		for _, s := range sent {
			if !strings.HasPrefix(s.SQL, "-- name: SetupInsertWithinLimit ") {
				_, execErr := results.Exec()
				err = cmp.Or(err, execErr)
				continue
			}
			err = cmp.Or(err, results.QueryRow().Scan(&row.PendingBefore, &row.ID, &row.UserID, &row.Status, &row.PendingSlot,
				&row.MaxPending, &row.IdempotencyKey, &row.CreatedAt, &row.EndedAt, &row.EventID))
		}
		if err = cmp.Or(err, results.Close()); err == nil && !row.ID.Valid {
			return errRefused
		}
		return err
	})
}

// watchCreateSetup returns the statements of a CreateSetup on a warm connection, and leaves no row behind.
func watchCreateSetup(ctx context.Context, w *world, user uuid.UUID) ([]pgx.TraceBatchQueryData, error) {
	config, err := pgxpool.ParseConfig(w.url)
	if err != nil {
		return nil, err
	}
	config.MaxConns = 1
	watcher := &batchWatcher{}
	config.ConnConfig.Tracer = watcher
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	defer pool.Close()
	repo, err := repository.New(pool)
	if err != nil {
		return nil, err
	}
	for range 2 { // the first call prepares
		watcher.sent = nil
		if _, err := repo.CreateSetup(ctx, user, &repository.CreateSetupOpts{MaxPending: maxPending}); err != nil {
			return nil, err
		}
	}
	_, err = pool.Exec(ctx, "DELETE FROM latchkey.setup_requests WHERE user_id = $1", user)
	return watcher.sent, err
}

// batchWatcher notes the statements of batches.
type batchWatcher struct{ sent []pgx.TraceBatchQueryData }

func (*batchWatcher) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	return ctx
}
func (*batchWatcher) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}
func (*batchWatcher) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}

func (b *batchWatcher) TraceBatchQuery(_ context.Context, _ *pgx.Conn, data pgx.TraceBatchQueryData) {
	b.sent = append(b.sent, data)
}
func (*batchWatcher) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData) {}

// riverArgs are a job of a user's. River allows one live job of the same arguments, so the slot makes it as many as the
// rule allows; it is drawn as for the unguarded INSERT.
type riverArgs struct {
	User uuid.UUID `json:"user"`
	Slot int       `json:"slot"`
}

func (riverArgs) Kind() string { return "setup" }

func openRiver(ctx context.Context, w *world) (call, error) {
	pool, err := w.pool(ctx, poolSize)
	if err != nil {
		return nil, err
	}
	client, err := river.NewClient(riverpgxv5.New(pool), &river.Config{Schema: "river", Logger: slog.New(slog.DiscardHandler)})
	opts := &river.InsertOpts{UniqueOpts: river.UniqueOpts{ByArgs: true, ByState: []rivertype.JobState{
		rivertype.JobStateAvailable, rivertype.JobStatePending, rivertype.JobStateRetryable, rivertype.JobStateRunning,
		rivertype.JobStateScheduled, // all of the default but completed
	}}}
	return func(ctx context.Context, user uuid.UUID) error {
		result, err := client.Insert(ctx, riverArgs{user, 1 + rand.IntN(maxPending)}, opts)
		if err == nil && result.UniqueSkippedAsDuplicate {
			return errRefused
		}
		return err
	}, err
}

func migrateRiver(ctx context.Context, pool *pgxpool.Pool) error {
	migrator, err := rivermigrate.New(riverpgxv5.New(pool), &rivermigrate.Config{Schema: "river", Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	_, err = migrator.Migrate(ctx, rivermigrate.DirectionUp, nil)
	return err
}
