package tests

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
	"github.com/latchkey-go/latchkey/tests/internal/testdb"
	"github.com/latchkey-go/latchkey/tests/internal/wire"
)

// oneWrite is a call that writes once, about something that nothing else is about.
type oneWrite struct {
	call    func(ctx context.Context) (id uuid.UUID, err error) // id is that of what it made, where that has one
	written string                                              // SQL that says whether it was
	about   any                                                 // $1 of that
	keyed   bool                                                // it has an idempotency key
	trips   int                                                 // round trips: COMMIT goes with the last
	whole   bool                                                // it has no BEGIN and COMMIT

	// again is what a repeat says where the first was written. Without a key, nil is that it is done once more.
	again error
}

const (
	setupWritten = "SELECT EXISTS (SELECT FROM latchkey.setup_requests WHERE user_id = $1)"
	setupEnded   = "SELECT EXISTS (SELECT FROM latchkey.setup_requests WHERE id = $1 AND status <> 'pending')"
	markWritten  = "SELECT EXISTS (SELECT FROM public.marks WHERE id = $1::uuid)"
	insertMark   = "INSERT INTO public.marks (id) VALUES ($1::uuid) RETURNING id"
)

var marks = repository.MustNamespace("outcome_mark")

// writes are all kinds of calls that write. Each makes a call of repo, and prepares it past that, with past.
var writes = map[string]func(t *testing.T, repo, past *repository.Repository) oneWrite{
	"CreateSetup": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		return createOnce(repo, setupWritten, repository.CreateSetupOpts{MaxPending: 2})
	},
	"CreateSetup with a key": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		return createOnce(repo, setupWritten, repository.CreateSetupOpts{IdempotencyKey: "k"})
	},
	"CreateSetup with an event, as the outbox says": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		return createOnce(repo, "SELECT count(*) = 1 FROM latchkey.outbox WHERE aggregate_key = ($1::uuid)::text",
			repository.CreateSetupOpts{IdempotencyKey: "k", Event: &repository.Event{Topic: "outcomes"}})
	},
	"CompleteSetup": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		return endOnce(t, past, repo.CompleteSetup)
	},
	"CancelSetup": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		return endOnce(t, past, repo.CancelSetup)
	},
	"OpenAccount": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		owner := uuid.New()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				a, err := repo.OpenAccount(ctx, repository.OpenAccountParams{OwnerID: owner, IdempotencyKey: "k"})
				if err != nil {
					return uuid.Nil, err
				}
				return a.ID, nil
			},
			written: "SELECT EXISTS (SELECT FROM latchkey.accounts WHERE owner_id = $1)", about: owner, keyed: true, trips: 1, whole: true,
		}
	},
	"Deposit": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		id := fundedAccount(t, past)
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return entryID(repo.Deposit(ctx, repository.DepositParams{AccountID: id, Amount: 7, IdempotencyKey: "k"}))
			},
			written: "SELECT balance = 107 FROM latchkey.accounts WHERE id = $1", about: id, keyed: true, trips: 1, whole: true,
		}
	},
	"Withdraw": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		id := fundedAccount(t, past)
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return entryID(repo.Withdraw(ctx, repository.WithdrawParams{AccountID: id, Amount: 7, IdempotencyKey: "k"}))
			},
			written: "SELECT balance = 93 FROM latchkey.accounts WHERE id = $1", about: id, keyed: true, trips: 1, whole: true,
		}
	},
	"Transfer": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		from, to := fundedAccount(t, past), fundedAccount(t, past)
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				transfer, err := repo.Transfer(ctx, repository.TransferParams{From: from, To: to, Amount: 7, IdempotencyKey: "k"})
				if err != nil {
					return uuid.Nil, err
				}
				return transfer.ID, nil
			},
			written: `
				SELECT sum(a.balance) = 93 + 107 AND bool_or(a.balance = 93) AND bool_or(a.balance = 107)
				FROM latchkey.accounts AS a
				WHERE a.id = ANY ($1)`,
			about: []uuid.UUID{from, to}, keyed: true, trips: 1,
		}
	},
	"Guard in one round trip": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		id := uuid.New()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return id, repo.Guard(ctx, []repository.Lock{marks.Exclusive("one")}, func(ctx context.Context, tx *repository.Tx) error {
					_, err := tx.Last().Exec(ctx, insertMark, id)
					return err
				})
			},
			written: markWritten, about: id, trips: 1,
		}
	},
	"Guard in two round trips": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		id := uuid.New()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return id, repo.Guard(ctx, []repository.Lock{marks.Exclusive("one")}, func(ctx context.Context, tx *repository.Tx) error {
					if _, err := tx.Exec(ctx, insertMark, id); err != nil {
						return err
					}
					_, err := tx.Last().Exec(ctx, insertMark, uuid.New())
					return err
				})
			},
			written: markWritten, about: id, trips: 2,
		}
	},
	"Guard without Last": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		id := uuid.New()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return id, repo.Guard(ctx, []repository.Lock{marks.Exclusive("one")}, func(ctx context.Context, tx *repository.Tx) error {
					_, err := tx.Exec(ctx, insertMark, id)
					return err
				})
			},
			written: markWritten, about: id, trips: 2,
		}
	},
	"GuardQuery": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		id := uuid.New()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				return repository.GuardQuery(ctx, repo, []repository.Lock{marks.Exclusive("one")}, func(ctx context.Context, q repository.DBTX) (made uuid.UUID, err error) {
					return made, q.QueryRow(ctx, insertMark, id).Scan(&made)
				})
			},
			written: markWritten, about: id, trips: 1,
		}
	},
	"ClaimEvents": func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		topic := eventOnce(t, past)
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				events, err := repo.ClaimEvents(ctx, repository.ClaimParams{Worker: "w", Topics: []string{topic}})
				if err == nil && len(events) == 0 {
					err = errFull
				}
				return uuid.Nil, err
			},
			written: "SELECT state = 'claimed' FROM latchkey.outbox WHERE topic = $1", about: topic, trips: 1,
			again: errFull,
		}
	},
	"CompleteEvent": settleOnce("state = 'done'", func(ctx context.Context, repo *repository.Repository, c repository.Claim) error {
		return repo.CompleteEvent(ctx, c)
	}, repository.ErrLeaseLost),
	"RetryEvent": settleOnce("state = 'ready'", func(ctx context.Context, repo *repository.Repository, c repository.Claim) error {
		return repo.RetryEvent(ctx, c, time.Hour, nil)
	}, repository.ErrLeaseLost),
	"ExtendClaim": settleOnce("lease_until > now() + '1 day'", func(ctx context.Context, repo *repository.Repository, c repository.Claim) error {
		_, err := repo.ExtendClaim(ctx, c, 48*time.Hour)
		return err
	}, nil),
	"AcquireLease": func(_ *testing.T, repo, _ *repository.Repository) oneWrite {
		name := uuid.NewString()
		return oneWrite{
			call: func(ctx context.Context) (uuid.UUID, error) {
				_, err := repo.AcquireLease(ctx, repository.LeaseParams{Name: name})
				return uuid.Nil, err
			},
			written: "SELECT EXISTS (SELECT FROM latchkey.leases WHERE name = $1 AND fence = 1)", about: name, trips: 1,
			again: repository.ErrLockBusy,
		}
	},
	"RenewLease": leaseOnce("expires_at > now() + '1 day'", func(ctx context.Context, repo *repository.Repository, l *repository.Lease) error {
		return repo.RenewLease(ctx, l, 48*time.Hour)
	}, nil),
	"ReleaseLease": leaseOnce("owner IS NULL", func(ctx context.Context, repo *repository.Repository, l *repository.Lease) error {
		return repo.ReleaseLease(ctx, l)
	}, repository.ErrLeaseLost),
}

func createOnce(repo *repository.Repository, written string, o repository.CreateSetupOpts) oneWrite {
	user := uuid.New()
	if o.Event != nil {
		o.Event.AggregateKey = user.String()
	}
	return oneWrite{
		call: func(ctx context.Context) (uuid.UUID, error) {
			s, err := repo.CreateSetup(ctx, user, &o)
			if err != nil {
				return uuid.Nil, err
			}
			return s.ID, nil
		},
		written: written, about: user, keyed: o.IdempotencyKey != "", trips: 1, whole: true,
	}
}

func endOnce(t *testing.T, past *repository.Repository, end func(context.Context, uuid.UUID) (*repository.SetupRequest, error)) oneWrite {
	t.Helper()
	s, err := past.CreateSetup(t.Context(), uuid.New(), nil)
	require.NoError(t, err)
	return oneWrite{
		call: func(ctx context.Context) (uuid.UUID, error) {
			_, err := end(ctx, s.ID)
			return s.ID, err
		},
		written: setupEnded, about: s.ID, trips: 1,
		again: repository.ErrNotPending,
	}
}

func fundedAccount(t *testing.T, past *repository.Repository) uuid.UUID {
	t.Helper()
	a, err := past.OpenAccount(t.Context(), repository.OpenAccountParams{OwnerID: uuid.New()})
	require.NoError(t, err)
	_, err = past.Deposit(t.Context(), repository.DepositParams{AccountID: a.ID, Amount: 100})
	require.NoError(t, err)
	return a.ID
}

func entryID(e *repository.Entry, err error) (uuid.UUID, error) {
	if err != nil {
		return uuid.Nil, err
	}
	return e.ID, nil
}

// eventOnce writes an event, of a topic of its own.
func eventOnce(t *testing.T, past *repository.Repository) (topic string) {
	t.Helper()
	topic = uuid.NewString()
	_, err := past.CreateSetup(t.Context(), uuid.New(), &repository.CreateSetupOpts{Event: &repository.Event{Topic: topic}})
	require.NoError(t, err)
	return topic
}

func settleOnce(
	written string, settle func(context.Context, *repository.Repository, repository.Claim) error, again error,
) func(*testing.T, *repository.Repository, *repository.Repository) oneWrite {
	return func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		topic := eventOnce(t, past)
		events, err := past.ClaimEvents(t.Context(), repository.ClaimParams{Worker: "w", Topics: []string{topic}})
		require.NoError(t, err)
		require.Len(t, events, 1)
		return oneWrite{
			call:    func(ctx context.Context) (uuid.UUID, error) { return uuid.Nil, settle(ctx, repo, events[0].Claim) },
			written: "SELECT " + written + " FROM latchkey.outbox WHERE topic = $1", about: topic, trips: 1,
			again: again,
		}
	}
}

func leaseOnce(
	written string, use func(context.Context, *repository.Repository, *repository.Lease) error, again error,
) func(*testing.T, *repository.Repository, *repository.Repository) oneWrite {
	return func(t *testing.T, repo, past *repository.Repository) oneWrite {
		t.Helper()
		l, err := past.AcquireLease(t.Context(), repository.LeaseParams{Name: uuid.NewString()})
		require.NoError(t, err)
		return oneWrite{
			call:    func(ctx context.Context) (uuid.UUID, error) { return uuid.Nil, use(ctx, repo, l) },
			written: "SELECT " + written + " FROM latchkey.leases WHERE name = $1", about: l.Name, trips: 1,
			again: again,
		}
	}
}

// outcomes are what an error of a call can say. It says one of them.
var outcomes = []error{
	repository.ErrOutcomeUnknown, repository.ErrConnectionLost, repository.ErrLockBusy, repository.ErrReadOnly,
	repository.ErrDeadlock, repository.ErrSerialization, repository.ErrLeaseLost, repository.ErrNotFound,
	repository.ErrNotPending, repository.ErrIdempotencyConflict, repository.ErrPendingExists,
}

// Whatever the call is, and wherever its connection breaks: if COMMIT was sent, the error says that the outcome is
// unknown, and if not, that nothing was written. That is so, and nothing is sent a second time.
func TestOutcomesOfEveryWrite(t *testing.T) {
	t.Parallel()
	for name, prepare := range writes {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := newOutcomes(t)
			places := cuts
			if prepare(t, o.repo, o.past).whole {
				places = wholeCuts
			}
			for _, cut := range places {
				for range 2 {
					_, err := prepare(t, o.repo, o.past).call(t.Context())
					require.NoError(t, err, "and now the connection is warm")
				}
				w := prepare(t, o.repo, o.past)
				// Of two round trips, the first has no COMMIT.
				unsent := cut.early && w.trips > 1
				o.require(t, cut.name, w, once(cut.at, cut.action), !unsent, cut.written && !unsent)
			}
			o.pool.Reset()
			o.require(t, "before the types of a new connection's statements are known", prepare(t, o.repo, o.past),
				once(func(m wire.Message) bool { return m.FromServer }, wire.CutBefore), false, false)
			_, err := prepare(t, o.repo, o.past).call(t.Context())
			require.NoError(t, err)
			w := prepare(t, o.repo, o.past)
			o.proxy.CutAll()
			o.require(t, "before anything was sent", w, nil, false, false)
		})
	}
}

// outcomesOf are a Repository behind a proxy, and one past it.
type outcomesOf struct {
	*faulty
	past *repository.Repository
}

func newOutcomes(t *testing.T) *outcomesOf {
	t.Helper()
	o := &outcomesOf{faulty: newFaulty(t)}
	testdb.Exec(t, o.url, "CREATE TABLE public.marks (id uuid PRIMARY KEY)")
	var err error
	o.past, err = repository.New(testdb.PoolAt(t, o.url, maxConns(1)))
	require.NoError(t, err)
	return o
}

// require makes the call while the hook breaks its connection, and compares what it says with what the database says.
func (o *outcomesOf) require(t *testing.T, name string, w oneWrite, hook func(wire.Message) wire.Action, sent, written bool) {
	t.Helper()
	var pid uint32
	if hook != nil {
		pid = pidOf(t, o.pool)
	}
	o.proxy.Reset()
	o.proxy.On(hook)
	_, err := w.call(t.Context())

	want := repository.ErrConnectionLost
	if sent {
		want = repository.ErrOutcomeUnknown
	}
	for _, outcome := range outcomes {
		require.Equal(t, outcome == want, errors.Is(err, outcome), "%s: %v", name, err) //nolint:errorlint // it is in the list
	}
	require.Equal(t, !sent || w.keyed, repository.IsRetryable(err), name)
	begun := 0
	for _, sql := range o.proxy.Traffic().Statements {
		if strings.HasPrefix(sql, "begin") || strings.HasPrefix(sql, "-- name: LockOneAtOnce ") {
			begun++
		}
	}
	require.LessOrEqual(t, begun, 1, "%s: it was tried again", name)
	if hook != nil {
		waitUntilGone(t, o.observer, pid) // and until then, the hook lets no cancel request pass
		o.proxy.On(nil)
	}
	require.Equal(t, written, o.isWritten(t, w), name)

	// A repeat tells, or does what was not done.
	id, err := w.call(t.Context())
	switch {
	case written && w.again != nil:
		require.ErrorIs(t, err, w.again, name)
	case written && w.written == markWritten:
		requireSQLState(t, "23505", err) // it is the host's to tell a repeat
	default:
		require.NoError(t, err, name)
	}
	require.True(t, o.isWritten(t, w), name)
	if w.keyed {
		again, err := w.call(t.Context())
		require.NoError(t, err, name)
		require.Equal(t, id, again, name)
		require.True(t, o.isWritten(t, w), "%s: once", name)
	}
}

func (o *outcomesOf) isWritten(t *testing.T, w oneWrite) (written bool) {
	t.Helper()
	require.NoError(t, o.observer.QueryRow(t.Context(), w.written, w.about).Scan(&written))
	return written
}
