package repository

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/latchkey-go/latchkey/db"
	"github.com/latchkey-go/latchkey/internal/lockkey"
	"github.com/latchkey-go/latchkey/internal/pipeline"
)

// exclusion is what a Repository knows of its server: whether a lock that one connection holds is refused to another.
// Some servers that speak PostgreSQL's protocol accept the lock functions and do nothing.
type exclusion struct {
	proven   atomic.Bool
	mu       sync.Mutex
	underway *proof // or the one that succeeded
}

// proof is one attempt, which all calls that come meanwhile wait for.
type proof struct {
	ended chan struct{}
	err   error
}

// proofTimeout bounds an attempt. It makes two connections, which a busy server does in a second at worst.
const proofTimeout = 10 * time.Second

// errNoProof means that an attempt had no answer in time.
var errNoProof = errors.New("no two connections beside the pool had an answer from the server")

// requireExclusion returns nil once exclusion has been proven. A failure is not remembered: the server may be another one
// when the next call comes.
//
// The call waits for as long as its lock timeout, or [DefaultLockTimeout] if that is longer, so that a short one is no
// reason to fail where only the first call takes long. An attempt does not end with the call that began it, since others
// may wait for it by then.
func (r *Repository) requireExclusion(ctx context.Context, c *call) error {
	if r.exclusion.proven.Load() {
		return nil
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	c.started = time.Now()
	timer := time.NewTimer(max(c.timeout, DefaultLockTimeout))
	defer timer.Stop()
	p := r.exclusion.join(func() error { return r.proveExclusion(context.WithoutCancel(ctx)) })
	select {
	case <-p.ended:
		if errors.Is(p.err, errNoProof) {
			return c.busy(WherePool, p.err)
		}
		return p.err
	case <-timer.C:
		return c.busy(WherePool, errNoProof)
	case <-ctx.Done():
		return ctx.Err()
	}
}

// join returns the attempt that is under way or has succeeded, or begins one.
func (e *exclusion) join(prove func() error) *proof {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.underway != nil {
		return e.underway
	}
	p := &proof{ended: make(chan struct{})}
	e.underway = p
	go func() {
		p.err = prove()
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.proven.Store(p.err == nil); p.err != nil {
			e.underway = nil
		}
		close(p.ended)
	}()
	return p
}

// proveExclusion takes a fresh lock on one connection, and tries for it on another: while it is held, and when it is
// not. Of several processes that do so at once one holds while it tries, and the others know by that: behind a pooler
// with few connections, each would have one and wait for its second. The connections are beside the pool, so that a pool
// of one, or one that the host has emptied, cannot make it wait for itself, and closed afterwards.
func (r *Repository) proveExclusion(ctx context.Context) error {
	bounded, cancel := context.WithTimeout(ctx, proofTimeout)
	defer cancel()
	holder, err := r.connect(bounded)
	if err != nil {
		return explainProof(bounded, err, refused(err))
	}
	defer holder.Close(bounded)
	rival, err := r.connect(bounded)
	if err != nil {
		return explainProof(bounded, err, refused(err))
	}
	defer rival.Close(bounded)

	key := lockkey.Sum("latchkey_check", uuid.NewString())
	tx := pipeline.Begin(holder)
	defer tx.Rollback(bounded)
	hold, err := db.New(tx).CheckHold(bounded, db.CheckHoldParams{Key: key, Common: lockkey.Sum("latchkey_check", "common")})
	if err != nil {
		return explainProof(bounded, err, holder.IsClosed)
	}
	shared := false
	if hold.Alone { // otherwise it was refused a lock, which is what the rival would see
		if shared, err = db.New(rival).CheckTry(bounded, key); err != nil {
			return explainProof(bounded, err, rival.IsClosed)
		}
	}
	// A session that was ended held the lock no more. It is the answer to this that says so.
	tx.Rollback(bounded)
	switch {
	case holder.IsClosed():
		return explainProof(bounded, errHolderLost, holder.IsClosed)
	case shared:
		return fmt.Errorf("%w: two connections got the same one", ErrUnsafeServer)
	}
	free, err := db.New(rival).CheckTry(bounded, key)
	switch {
	case err != nil:
		return explainProof(bounded, err, rival.IsClosed)
	case !free:
		return fmt.Errorf("%w: one was not free after its transaction", ErrUnsafeServer)
	}
	return nil
}

var errHolderLost = errors.New("the connection that held the lock ended")

// connect makes a connection as the pool makes its own, for statements that are sent once.
func (r *Repository) connect(ctx context.Context) (*pgx.Conn, error) {
	pool := r.pool.Config()
	config := pool.ConnConfig
	if pool.BeforeConnect != nil {
		if err := pool.BeforeConnect(ctx, config); err != nil {
			return nil, err
		}
	}
	if config.DefaultQueryExecMode != pgx.QueryExecModeSimpleProtocol {
		config.DefaultQueryExecMode = pgx.QueryExecModeExec // nothing is prepared, so each costs one round trip
	}
	return pgx.ConnectConfig(ctx, config)
}

// explainProof gives an error of the proof its meaning.
func explainProof(bounded context.Context, err error, lost func() bool) error {
	c := call{started: time.Now()}
	explained := c.classify(bounded, err, lost)
	var pgErr *pgconn.PgError
	switch {
	case errors.Is(explained, ErrReadOnly): // a standby can say that something is not supported, too
		return explained
	case errors.As(err, &pgErr) && (pgErr.Code == undefinedFunction || pgErr.Code == featureNotSupported):
		return fmt.Errorf("%w: %w", ErrUnsafeServer, err)
	case bounded.Err() != nil:
		// Without the context's own error: it is not the caller's context that has ended.
		return fmt.Errorf("%w within %v: %v", errNoProof, proofTimeout, err) //nolint:errorlint // see above
	}
	return explained
}
