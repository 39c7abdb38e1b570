package testdb

import (
	"context"
	"errors"
	"net/url"
	"os"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/tests/internal/pgbouncer"
)

// poolerSize is how many connections to the server the tests' PgBouncer has for a database: few, so that they are used by
// turns.
const poolerSize = 5

// pooler is what the tests go through, nil if they do not.
var pooler *pgbouncer.Bouncer

// startPooler starts PgBouncer if one is wanted, with support for prepared statements if it can have that, and returns a
// function that stops it, which fails when nothing went through it.
func startPooler(ctx context.Context) (stop func() error, err error) {
	program, version, err := Pooler(ctx)
	if program == "" || err != nil {
		return func() error { return nil }, err
	}
	o := pgbouncer.Options{PoolSize: poolerSize}
	if version.CanPrepare() {
		o.Prepared = 200
	}
	pooler, err = pgbouncer.Start(ctx, program, server.URL(), o)
	if err != nil {
		return nil, err
	}
	log("through PgBouncer %v in transaction mode, %d connections to each database, max_prepared_statements %d", version, o.PoolSize, o.Prepared)
	return func() error {
		served, err := pooler.Served(ctx)
		if err == nil && served == 0 {
			err = errors.New("nothing went through PgBouncer")
		}
		log("%d transactions went through PgBouncer %v", served, version)
		return errors.Join(err, pooler.Close())
	}, nil
}

const execMode = "default_query_exec_mode" // pgx's name for it in a connection string

// throughPooler returns the URL of the same database through the pooler, if there is one. At the end of the test it looks
// at what is left there.
//
// pgx's default exec mode needs a pooler that knows prepared statements. In front of one that does not, the URL says another.
func throughPooler(t testing.TB, direct string) string {
	t.Helper()
	if pooler == nil {
		return direct
	}
	pooled, err := pooler.URL(direct)
	require.NoError(t, err)
	if !pooler.Version.CanPrepare() {
		u, err := url.Parse(pooled)
		require.NoError(t, err)
		q := u.Query()
		q.Set(execMode, "cache_describe")
		u.RawQuery = q.Encode()
		pooled = u.String()
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		left, err := pooler.Left(ctx, pooled)
		if err != nil {
			t.Error(err)
		}
		for _, l := range left {
			t.Error("left on the pooler's connection to the server:", l)
		}
	})
	return pooled
}

// Direct returns the connection string past the pooler, if there is one.
func Direct(t testing.TB, connString string) string {
	t.Helper()
	if pooler == nil {
		return connString
	}
	direct, err := pooler.Direct(connString)
	require.NoError(t, err)
	u, err := url.Parse(direct)
	require.NoError(t, err)
	q := u.Query()
	q.Del(execMode)
	u.RawQuery = q.Encode()
	return u.String()
}

// Pooler returns the program of the PgBouncer that the tests go through, and its version. Without a program they do not.
func Pooler(ctx context.Context) (program string, version pgbouncer.Version, err error) {
	if program = os.Getenv("LATCHKEY_PGBOUNCER"); program != "" {
		version, err = pgbouncer.VersionOf(ctx, program)
	}
	return program, version, err
}
