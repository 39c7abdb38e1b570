//go:build unix

package tests

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

// A whole service: users ask for a setup over HTTP, it is written with an event, and workers, which are processes of
// their own, have a payment provider do what the event says. However they end, the provider does it once.

// What a worker process is told.
const (
	workerDatabase = "LATCHKEY_TEST_WORKER_DATABASE"
	workerProvider = "LATCHKEY_TEST_WORKER_PROVIDER"
)

// A test binary that is started as a worker runs no tests.
func init() {
	if url := os.Getenv(workerDatabase); url != "" {
		fmt.Fprintln(os.Stderr, "worker:", runWorker(url, os.Getenv(workerProvider)))
		os.Exit(1)
	}
}

// setupEvent is the payload of an event.
type setupEvent struct {
	User uuid.UUID `json:"user"`
}

// setups is the service's handler of POST /setups?user=...
func setups(repo *repository.Repository) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		user, err := uuid.Parse(r.FormValue("user"))
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		payload, err := json.Marshal(setupEvent{user})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		_, err = repo.CreateSetup(r.Context(), user, &repository.CreateSetupOpts{
			Event: &repository.Event{Topic: "setup", AggregateKey: user.String(), Payload: payload},
		})
		switch {
		case err == nil:
			w.WriteHeader(http.StatusCreated)
		case errors.Is(err, repository.ErrPendingExists):
			http.Error(w, err.Error(), http.StatusConflict)
		default:
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
}

// runWorker is a worker process. It ends with the process that started it, if not before.
func runWorker(database, provider string) error {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	pool, err := pgxpool.New(ctx, database)
	if err != nil {
		return err
	}
	defer pool.Close()
	repo, err := repository.New(pool)
	if err != nil {
		return err
	}
	d, err := repository.NewDispatcher(repo, pay(provider), &repository.DispatcherOpts{
		Worker:       fmt.Sprint("worker ", os.Getpid()),
		Concurrency:  4,
		Lease:        time.Second,
		PollInterval: 20 * time.Millisecond,
	})
	if err != nil {
		return err
	}
	return d.Run(ctx)
}

// pay returns the worker's handler. It is a careless one, which asks first and then pays whatever became of its context:
// what makes the effect once is not the handler, but what it sends along.
func pay(provider string) repository.Handler {
	return func(ctx context.Context, e repository.ClaimedEvent) error {
		ctx = context.WithoutCancel(ctx)
		if err := request(ctx, http.MethodGet, provider, e); err != nil {
			return err
		}
		return request(ctx, http.MethodPost, provider, e)
	}
}

func request(ctx context.Context, method, provider string, e repository.ClaimedEvent) error {
	r, err := http.NewRequestWithContext(ctx, method, provider, strings.NewReader(string(e.Payload)))
	if err != nil {
		return err
	}
	r.Header.Set("Idempotency-Key", fmt.Sprint(e.EventID))
	r.Header.Set("Fencing-Token", fmt.Sprint(e.Fence))
	r.Header.Set("Worker", strconv.Itoa(os.Getpid()))
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode >= http.StatusBadRequest {
		return errors.New(response.Status)
	}
	return nil
}

// provider is the payment provider.
type provider struct {
	url string

	mu      sync.Mutex
	fences  map[string]int64             // the largest token seen, by idempotency key
	paid    map[string]bool              // by idempotency key
	effects map[uuid.UUID]int            // by user
	repeats map[string]int               // how many were answered from memory, by idempotency key
	stale   map[string]int               // how many were refused, by idempotency key
	pause   func(method string, pid int) // called before each answer, without the mutex; nil for none
}

func newProvider(t *testing.T) *provider {
	t.Helper()
	p := &provider{
		fences: map[string]int64{}, paid: map[string]bool{}, effects: map[uuid.UUID]int{},
		repeats: map[string]int{}, stale: map[string]int{},
	}
	server := httptest.NewServer(p)
	t.Cleanup(server.Close)
	p.url = server.URL
	return p
}

func (p *provider) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	status := http.StatusOK
	if r.Method == http.MethodPost {
		status = p.pay(r)
	}
	p.mu.Lock()
	pause := p.pause
	p.mu.Unlock()
	if pid, err := strconv.Atoi(r.Header.Get("Worker")); err == nil && pause != nil {
		pause(r.Method, pid)
	}
	w.WriteHeader(status)
}

// pay is one transaction of the provider: it judges the token, looks for the key, and pays.
func (p *provider) pay(r *http.Request) (status int) {
	var e setupEvent
	if err := json.NewDecoder(r.Body).Decode(&e); err != nil {
		return http.StatusBadRequest
	}
	key := r.Header.Get("Idempotency-Key")
	fence, err := strconv.ParseInt(r.Header.Get("Fencing-Token"), 10, 64)
	if err != nil || key == "" {
		return http.StatusBadRequest
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if fence < p.fences[key] {
		p.stale[key]++
		return http.StatusPreconditionFailed
	}
	p.fences[key] = fence
	if p.paid[key] {
		p.repeats[key]++
		return http.StatusOK
	}
	p.paid[key] = true
	p.effects[e.User]++
	return http.StatusCreated
}

func (p *provider) setPause(pause func(method string, pid int)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.pause = pause
}

// counts returns how many requests were repeats, and how many stale.
func (p *provider) counts() (repeats, stale int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, n := range p.repeats {
		repeats += n
	}
	for _, n := range p.stale {
		stale += n
	}
	return repeats, stale
}

// catch holds the next answer to this method until release is called, and returns a channel with the pid that waits for it.
func (p *provider) catch(t *testing.T, method string) (caught <-chan int, release func()) {
	t.Helper()
	pids, open := make(chan int, 1), make(chan struct{})
	var first, once sync.Once
	release = func() { once.Do(func() { close(open) }) }
	t.Cleanup(release)
	p.setPause(func(m string, pid int) {
		if m != method {
			return
		}
		first.Do(func() {
			p.setPause(nil)
			pids <- pid
			<-open
		})
	})
	return pids, release
}

// crew are the worker processes.
type crew struct {
	url, provider string
	workers       map[int]*exec.Cmd // by pid
}

func (c *crew) hire(t *testing.T) {
	t.Helper()
	program, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(program)
	cmd.Env = append(os.Environ(), workerDatabase+"="+c.url, workerProvider+"="+c.provider)
	cmd.Stderr = os.Stderr
	_, err = cmd.StdinPipe() // which ends when this process does
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	c.workers[cmd.Process.Pid] = cmd
}

func (c *crew) kill(t *testing.T, pid int) {
	t.Helper()
	cmd := c.workers[pid]
	require.NotNil(t, cmd, "pid %d is no worker", pid)
	require.NoError(t, cmd.Process.Kill())
	require.Error(t, cmd.Wait(), "it was killed")
	delete(c.workers, pid)
}

func (c *crew) anyone() int {
	n := rand.IntN(len(c.workers))
	for pid := range c.workers {
		if n--; n < 0 {
			return pid
		}
	}
	panic("nobody is left")
}

func TestPaymentIsMadeOnceHoweverWorkersEnd(t *testing.T) {
	t.Parallel()
	const users, kills = 40, 10
	o := newOffice(t)
	p := newProvider(t)
	repo, err := repository.New(testdb.PoolAt(t, o.url, maxConns(4)))
	require.NoError(t, err)
	service := httptest.NewServer(setups(repo))
	t.Cleanup(service.Close)
	c := &crew{o.url, p.url, map[int]*exec.Cmd{}}
	t.Cleanup(func() {
		for _, cmd := range c.workers {
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
		}
	})
	for range 3 {
		c.hire(t)
	}
	// ask has a new user ask for a setup, and again, which is refused: there is one pending.
	ask := func() error {
		url := service.URL + "/setups?user=" + uuid.NewString()
		for _, want := range []int{http.StatusCreated, http.StatusConflict} {
			response, err := http.Post(url, "", nil)
			if err != nil {
				return err
			}
			response.Body.Close()
			if response.StatusCode != want {
				return fmt.Errorf("%s, want %d", response.Status, want)
			}
		}
		return nil
	}
	const allDone = "SELECT bool_and(state = 'done') FROM latchkey.outbox"

	// A worker is killed when the provider has paid, and the worker does not know it yet.
	caught, release := p.catch(t, http.MethodPost)
	require.NoError(t, ask())
	c.kill(t, receive(t, caught))
	release()
	waitUntil(t, o.observer, allDone)
	repeats, stale := p.counts()
	require.Equal(t, 1, repeats, "the next worker asked for the same again")
	require.Zero(t, stale)
	c.hire(t)

	// A worker is frozen before it pays, until another one has, and then thawed.
	caught, release = p.catch(t, http.MethodGet)
	require.NoError(t, ask())
	frozen := receive(t, caught)
	require.NoError(t, c.workers[frozen].Process.Signal(syscall.SIGSTOP))
	waitUntil(t, o.observer, allDone)
	require.NoError(t, c.workers[frozen].Process.Signal(syscall.SIGCONT))
	release()
	require.Eventually(t, func() bool {
		_, stale := p.counts()
		return stale == 1
	}, patience, time.Millisecond, "it pays late, and is refused")

	// Workers are killed at any time, while users go on asking.
	var asking sync.WaitGroup
	failed := make(chan error, users)
	for range 4 {
		asking.Go(func() {
			for range users / 4 {
				failed <- ask()
			}
		})
	}
	for range kills {
		<-time.After(rand.N(60 * time.Millisecond))
		c.kill(t, c.anyone())
		c.hire(t)
	}
	asking.Wait()
	for range users {
		require.NoError(t, <-failed)
	}
	waitUntil(t, o.observer, allDone)

	p.mu.Lock()
	defer p.mu.Unlock()
	require.Len(t, p.effects, users+2)
	for user, n := range p.effects {
		require.Equal(t, 1, n, user)
	}
	require.Equal(t, users+2, value[int](t, o, "SELECT count(*) FROM latchkey.setup_requests"))
}
