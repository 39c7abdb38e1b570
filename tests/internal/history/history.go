// Package history records what many callers of latchkey asked and got, and checks it: for each answer there must be a
// moment between its question and itself at which it was right, if the calls are taken one at a time.
//
// What is not known is not guessed. A call whose outcome is unknown may have had its effect at any time until the end
// of the history, or never. One whose error says that nothing was written must have had none.
//
// A [History] is of one user, a few accounts or one lease, and short: to check one is exponential in the number of calls
// that overlap. The search is that of package porcupine, the models are here: [Setups], [Accounts] and [Leases]. What
// one history cannot show, [Audit] looks for in the database.
package history

import (
	"fmt"
	"hash/maphash"
	"io"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
	"github.com/google/uuid"
)

// Op is a call, from its question to its answer.
type Op struct {
	Number int // its place among the calls of its history
	Client int
	In     any // one of the questions of the model

	// What follows is set by [History.Return].

	Out    any           // [Nothing], [Unknown] or one of the answers of the model; nil is Unknown
	Return time.Duration // [Forever] if the outcome is unknown
	Call   time.Duration // like Return, since the program began
}

// Nothing is the answer of an error that says that nothing was written.
type Nothing struct{ Why string }

// Unknown is the answer of an error that says that the outcome is unknown.
type Unknown struct{ Why string }

// Forever is when a call returns whose outcome is unknown.
const Forever = time.Duration(math.MaxInt64)

// epoch makes times of the monotonic clock comparable.
var epoch = time.Now()

// History is calls that have only each other to be consistent with. Its methods are safe for concurrent use.
type History struct {
	Name  string
	model porcupine.Model

	mu      sync.Mutex
	ops     []*Op
	unknown int
}

// New returns an empty history of a model.
func New(name string, model porcupine.Model) *History { return &History{Name: name, model: model} }

// Call notes a question of a client, which has no other question open: after an unknown outcome, whoever goes on is
// another client.
func (h *History) Call(client int, in any) *Op {
	h.mu.Lock()
	defer h.mu.Unlock()
	op := &Op{Number: len(h.ops), Client: client, In: in, Call: time.Since(epoch), Return: Forever}
	h.ops = append(h.ops, op)
	return op
}

// Return notes the answer.
func (h *History) Return(op *Op, out any) {
	returned := time.Since(epoch)
	h.mu.Lock()
	defer h.mu.Unlock()
	op.Out = out
	if _, unknown := out.(Unknown); unknown {
		h.unknown++
		return
	}
	op.Return = returned
}

// Observe notes what was seen when all calls were over, and nothing could happen any more.
func (h *History) Observe(in, out any) { h.Return(h.Call(observer, in), out) }

// Learn notes what was seen of a call when nothing could happen any more: [Nothing], or what it must have answered. It
// makes the check shorter, since less is to be tried. When the call had its effect stays as unknown as it was.
func (h *History) Learn(op *Op, out any) { op.Out = out }

// observer is the client of [History.Observe].
const observer = 0

// Len returns how many calls there are, and how many of them have an unknown outcome.
func (h *History) Len() (ops, unknown int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.ops), h.unknown
}

// Ops returns the calls, in the order of their questions. It is for when all are over.
func (h *History) Ops() []*Op { return h.ops }

// Verdict is what came of a check.
type Verdict = porcupine.CheckResult

// The verdicts. One that is not decided in time says nothing.
const (
	Sound     = porcupine.Ok
	Broken    = porcupine.Illegal
	Undecided = porcupine.Unknown
)

// Check says whether the calls can have happened one at a time, each between its question and its answer.
func (h *History) Check(timeout time.Duration) Verdict {
	return porcupine.CheckOperationsTimeout(h.model, h.operations(), timeout)
}

// Draw writes the history and the longest orders that were found for it as a page of HTML.
func (h *History) Draw(w io.Writer, timeout time.Duration) error {
	_, info := porcupine.CheckOperationsVerbose(h.model, h.operations(), timeout)
	return porcupine.Visualize(h.model, info, w)
}

// String lists the calls, in the order of their questions.
func (h *History) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", h.Name)
	for _, op := range h.ops {
		fmt.Fprintf(&b, "%11v to %-11v client %-4d %v\n",
			op.Call.Round(time.Microsecond), op.returned(), op.Client, op)
	}
	return b.String()
}

// operations are the calls to find an order for. Those that had no effect stand nowhere in it: they are checked by
// what the others saw, which they cannot explain.
func (h *History) operations() []porcupine.Operation {
	var operations []porcupine.Operation
	for _, op := range h.ops {
		if _, none := op.Out.(Nothing); !none {
			operations = append(operations, porcupine.Operation{
				ClientId: op.Client, Input: op, Call: int64(op.Call), Return: int64(op.Return),
			})
		}
	}
	return operations
}

func (op *Op) returned() string {
	if op.Return == Forever {
		return "?"
	}
	return op.Return.Round(time.Microsecond).String()
}

// String says what was asked and what came back.
func (op *Op) String() string {
	return strings.ReplaceAll(fmt.Sprintf("%d: %T%+v -> %T%+v", op.Number, op.In, op.In, op.Out, op.Out), "history.", "")
}

// model makes a porcupine.Model of a step that returns the state after a call, and whether its answer is right there. It
// is asked about answers that say something only: for an unknown outcome, otherwise returns the state if the call had
// its effect, or the same state where it can have none. A call that had no effect at all is one that had it at the very
// end, after all that could have shown it, so two ways need not be told apart there.
func model[S any](
	first S, equal func(a, b S) bool, hash func(S) uint64,
	step func(state S, op *Op) (S, bool), unknown func(state S, op *Op) S,
) porcupine.Model {
	of := func(state any) S { return state.(S) } //nolint:errcheck // the model's own
	return porcupine.Model{
		Init: func() any { return first },
		Step: func(state, input, _ any) (bool, any) {
			op := input.(*Op) //nolint:errcheck // the history's own
			if _, is := op.Out.(Unknown); is || op.Out == nil {
				return true, unknown(of(state), op)
			}
			next, ok := step(of(state), op)
			return ok, next
		},
		Equal:             func(a, b any) bool { return equal(of(a), of(b)) },
		Hash:              func(state any) uint64 { return hash(of(state)) },
		DescribeOperation: func(input, _ any) string { return input.(*Op).String() }, //nolint:errcheck // the history's own
		DescribeState:     func(state any) string { return fmt.Sprintf("%+v", state) },
	}
}

// match says whether the rows of a state, as written makes them, are those that were read. split takes the ID out of
// one: of those that nobody was told the ID of, any will do.
func match[S any, R comparable](rows []S, read []R, written func(S) R, split func(R) (uuid.UUID, R)) bool {
	left := slices.Clone(read)
	for _, told := range []bool{true, false} {
		for _, row := range rows {
			want := written(row)
			if id, _ := split(want); told != (id != uuid.Nil) {
				continue
			}
			i := slices.IndexFunc(left, func(r R) bool {
				if !told {
					_, r = split(r)
				}
				return r == want
			})
			if i < 0 {
				return false
			}
			left = slices.Delete(left, i, i+1)
		}
	}
	return len(left) == 0
}

var seed = maphash.MakeSeed()

func hashOf[T comparable](items []T) (sum uint64) {
	for _, item := range items {
		sum = sum*31 + maphash.Comparable(seed, item)
	}
	return sum
}
