package testdb

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"

	"github.com/latchkey-go/latchkey/internal/pgserver"
)

// startContainer starts a server in a container and returns a function that removes the container.
func startContainer(ctx context.Context) (_ *pgserver.Server, _ func() error, err error) {
	image := cmp.Or(os.Getenv("LATCHKEY_POSTGRES_IMAGE"),
		"docker.io/library/postgres:"+cmp.Or(os.Getenv("LATCHKEY_POSTGRES_VERSION"), "18"))
	container, err := postgres.Run(ctx, image,
		postgres.WithPassword(rand.Text()),
		testcontainers.WithCmdArgs("-c", "max_connections=300", "-c", "full_page_writes=off"), // as pgserver's own
		postgres.BasicWaitStrategies())
	terminate := func() error { return testcontainers.TerminateContainer(container) } // a nil container is no error
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("container of %s: %w", image, err), terminate())
		}
	}()
	if err != nil {
		return nil, nil, err
	}
	url, err := container.ConnectionString(ctx, "sslmode=disable")
	if err != nil {
		return nil, nil, err
	}
	if err := waitForAnswer(ctx, url); err != nil {
		return nil, nil, err
	}
	s, err := pgserver.Use(ctx, url, "a container of "+image, pgserver.Options{Log: log})
	return s, terminate, err
}

// waitForAnswer waits for a real answer: an open port and a line in the log do not promise one.
func waitForAnswer(ctx context.Context, url string) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, url)
		if err == nil {
			return conn.Close(ctx)
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(50 * time.Millisecond):
		}
	}
}
