package tests

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// BenchmarkClient measures what a call costs this side of the connection, beside a batch written by hand that sends the
// same statements and reads the same row.
func BenchmarkClient(b *testing.B) {
	pool := testdb.Pool(b)
	repo, err := repository.New(pool)
	require.NoError(b, err)
	ctx := b.Context()

	b.Run("CreateSetup", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := repo.CreateSetup(ctx, uuid.New(), nil); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("BareBatch", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if err := bareCreateSetup(ctx, pool, uuid.New()); err != nil {
				b.Fatal(err)
			}
		}
	})
}

type batcher interface {
	SendBatch(ctx context.Context, b *pgx.Batch) pgx.BatchResults
}

// bareCreateSetup is CreateSetup without latchkey: its statements in a batch of pgx.
func bareCreateSetup(ctx context.Context, conn batcher, user uuid.UUID) error {
	id, err := uuid.NewV7()
	if err != nil {
		return err
	}
	key, err := repository.Key("setup_request", user.String())
	if err != nil {
		return err
	}
	batch := new(pgx.Batch)
	q := db.New(queued{batch})
	_ = q.LockOneAtOnce(ctx, db.LockOneAtOnceParams{LockTimeoutMs: 2000, Key: key})
	_, _ = q.SetupInsertWithinLimit(ctx, db.SetupInsertWithinLimitParams{ID: pg(id), UserID: pg(user), MaxPending: 1})
	results := conn.SendBatch(ctx, batch)
	defer results.Close()
	if _, err := results.Exec(); err != nil {
		return err
	}
	if _, err := db.New(answered{results}).SetupInsertWithinLimit(ctx, db.SetupInsertWithinLimitParams{}); err != nil {
		return err
	}
	return results.Close()
}

// queued is a DBTX that puts statements into a batch.
type queued struct{ *pgx.Batch }

func (q queued) Exec(_ context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	q.Queue(sql, args...)
	return pgconn.CommandTag{}, nil
}

func (q queued) Query(context.Context, string, ...any) (pgx.Rows, error) { panic("not used") }

func (q queued) QueryRow(_ context.Context, sql string, args ...any) pgx.Row {
	q.Queue(sql, args...)
	return unanswered{}
}

type unanswered struct{}

func (unanswered) Scan(...any) error { return pgx.ErrNoRows }

// answered is a DBTX that reads what a batch answers.
type answered struct{ pgx.BatchResults }

func (a answered) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return a.BatchResults.Exec()
}

func (a answered) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return a.BatchResults.Query()
}

func (a answered) QueryRow(context.Context, string, ...any) pgx.Row { return a.BatchResults.QueryRow() }
