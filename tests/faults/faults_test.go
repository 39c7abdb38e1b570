//go:build unix

package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/tests/internal/history"
)

// What is sound is found sound, and what has no guard is found out, with a picture.
func TestRounds(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		name      string
		seed      uint64
		unguarded bool
	}{
		{"a sound round, with coalescing", 2, false},
		{"a sound round, without coalescing", 3, false},
		{"tickets that are given out without a lock", 2, true},
	} {
		t.Run(tc.name, func(t *testing.T) { // one after the other, since goroutines are counted
			var out bytes.Buffer
			o := options{round: 3 * time.Second, seed: tc.seed, unguarded: tc.unguarded, pictures: t.TempDir()}
			err := run(t.Context(), o, &out)
			pictures, readErr := os.ReadDir(o.pictures)
			require.NoError(t, readErr)
			require.Contains(t, out.String(), "acknowledged writes lost    0\n")
			require.Contains(t, out.String(), "leaked                      0 ")
			if tc.unguarded {
				require.ErrorIs(t, err, errBroken, "%s", &out)
				require.NotEmpty(t, pictures)
				return
			}
			require.NoError(t, err, "%s", &out)
			require.Empty(t, pictures)
		})
	}
}

// What is compared with the database beside the order of the calls.
func TestChecks(t *testing.T) {
	t.Parallel()
	id, other := uuid.New(), uuid.New()
	create, keyed := history.Create{Max: 3}, history.Create{Key: "k", Max: 3}
	created := history.Created{ID: id, Status: history.Pending}
	row := history.Row{ID: id, Max: 3, Status: history.Pending}
	keyedRow := history.Row{ID: id, Key: "k", Max: 3, Status: history.Pending}
	for _, tc := range []struct {
		name   string
		ops    [][2]any
		rows   []history.Row
		events map[int]int
		wrong  string
	}{
		{"a write and its event", [][2]any{{create, created}}, []history.Row{row}, map[int]int{0: 1}, ""},
		{"an acknowledged write is lost", [][2]any{{create, created}}, nil, nil, "an acknowledged write is lost"},
		{"a write without its event", [][2]any{{create, created}}, []history.Row{row}, nil, "0 events"},
		{"a write with two events", [][2]any{{create, created}}, []history.Row{row}, map[int]int{0: 2}, "2 events"},
		{
			"nothing was written, but its event",
			[][2]any{{create, history.Nothing{}}},
			nil,
			map[int]int{0: 1},
			"1 events",
		},
		{"an unknown outcome that was written", [][2]any{{create, history.Unknown{}}}, []history.Row{row}, map[int]int{0: 1}, ""},
		{"an unknown outcome that was not", [][2]any{{create, history.Unknown{}}}, nil, nil, ""},
		{"an unknown outcome, and half of it", [][2]any{{create, history.Unknown{}}}, nil, map[int]int{0: 1}, "of 0 writes"},
		{"a repeat, which has no event", [][2]any{{keyed, created}, {keyed, created}}, []history.Row{keyedRow}, map[int]int{0: 1}, ""},
		{"a repeat, with an event", [][2]any{{keyed, created}, {keyed, created}}, []history.Row{keyedRow}, map[int]int{0: 1, 1: 1}, "done once"},
		{
			"a row more",
			[][2]any{{create, created}},
			[]history.Row{row, {ID: other, Max: 3, Status: history.Pending}},
			map[int]int{0: 1},
			"not possible one at a time",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			u := &user{id: uuid.New(), events: true}
			u.History = history.New("user", history.Setups())
			for i, op := range tc.ops {
				u.Return(u.Call(i, op[0]), op[1])
			}
			name := u.id.String()
			f := &found{setups: map[string][]history.Row{name: tc.rows}, events: map[string]map[int]int{name: tc.events}}
			var r round
			r.histories = make(map[history.Verdict]int)
			r.checkOne(u, f, t.TempDir())
			if tc.wrong == "" {
				require.Empty(t, r.violations)
				return
			}
			require.Contains(t, strings.Join(r.violations, "\n"), tc.wrong)
		})
	}
}
