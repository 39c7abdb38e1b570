package repository_test

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
)

// pay stands for a client of another service, which refuses a token that is below one that it has seen for the id, and
// does nothing if it has the effect of the id already.
func pay(ctx context.Context, _ []byte, _ repository.EventID, _ int64) error { return ctx.Err() }

func ExampleNewDispatcher() {
	d, err := repository.NewDispatcher(repo, func(ctx context.Context, e repository.ClaimedEvent) error {
		return pay(ctx, e.Payload, e.EventID, e.Fence)
	}, &repository.DispatcherOpts{Topics: []string{"setup"}})
	if err != nil {
		fmt.Println(err)
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := d.Run(ctx); err != nil {
		fmt.Println(err)
	}
}

func idle(context.Context, repository.ClaimedEvent) error { return nil }

func TestDispatcherArguments(t *testing.T) {
	t.Parallel()
	pool, dials := unreachable(t)
	repo, err := repository.New(pool)
	require.NoError(t, err)
	type opts = repository.DispatcherOpts
	tooLong := 24*24*time.Hour + 1
	for _, tc := range []struct {
		bad string // the argument's name; empty if all are good
		o   *opts
	}{
		{"", nil},
		{"", &opts{}},
		{"", &opts{Worker: strings.Repeat("w", 255), Topics: []string{"a"}, Concurrency: 1000, Lease: 100 * time.Millisecond, PollInterval: time.Millisecond}},
		{"Worker", &opts{Worker: strings.Repeat("w", 256)}},
		{"Worker", &opts{Worker: "a\x00"}},
		{"Topics", &opts{Topics: make([]string, 101)}},
		{"Topics[1]", &opts{Topics: []string{"a", ""}}},
		{"Concurrency", &opts{Concurrency: -1}},
		{"Concurrency", &opts{Concurrency: 1001}},
		{"Lease", &opts{Lease: 100*time.Millisecond - 1}},
		{"Lease", &opts{Lease: tooLong}},
		{"PollInterval", &opts{PollInterval: -1}},
		{"PollInterval", &opts{PollInterval: tooLong}},
		{"StopTimeout", &opts{StopTimeout: time.Microsecond}},
		{"StopTimeout", &opts{StopTimeout: tooLong}},
	} {
		d, err := repository.NewDispatcher(repo, idle, tc.o)
		if tc.bad == "" {
			require.NoError(t, err)
			require.NotNil(t, d)
			continue
		}
		requireInvalid(t, err, tc.bad)
		require.Nil(t, d)
		require.ErrorContains(t, err, "latchkey: NewDispatcher: ")
	}
	_, err = repository.NewDispatcher(nil, idle, nil)
	requireInvalid(t, err, "r")
	_, err = repository.NewDispatcher(repo, nil, nil)
	requireInvalid(t, err, "h")
	require.Zero(t, dials.Load(), "it does no I/O")
}

// Without a server a Dispatcher goes on trying, says so to the observer, and stops when it is told to.
func TestDispatcherWithoutAServer(t *testing.T) {
	t.Parallel()
	pool, dials := unreachable(t)
	failed := make(chan repository.CallDone, 100)
	repo, err := repository.New(pool, repository.WithObserver(repository.Observer{
		CallDone: func(_ context.Context, c repository.CallDone) {
			select {
			case failed <- c:
			default:
			}
		},
	}))
	require.NoError(t, err)
	listen, err := pgx.ParseConfig("postgres://nobody@127.0.0.1:1/none?sslmode=disable")
	require.NoError(t, err)
	listen.DialFunc = pool.Config().ConnConfig.DialFunc
	d, err := repository.NewDispatcher(repo, idle, &repository.DispatcherOpts{Listen: listen})
	require.NoError(t, err)

	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- d.Run(ctx) }()
	seen := map[string]int{}
	for seen["ClaimEvents"] < 2 || seen["Listen"] < 2 {
		c := <-failed
		require.Error(t, c.Err)
		if c.Method == "ClaimEvents" {
			require.ErrorIs(t, c.Err, repository.ErrConnectionLost)
		}
		seen[c.Method]++
	}
	require.Positive(t, dials.Load())
	cancel()
	require.NoError(t, <-ended)

	require.NoError(t, d.Run(ctx), "its context has ended already")
}
