package main

import (
	"bytes"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/racelab"
)

func experiment(t *testing.T, name string) racelab.Experiment {
	t.Helper()
	for _, e := range racelab.All() {
		if e.Name == name {
			return e
		}
	}
	t.Fatalf("no experiment %q", name)
	panic("unreachable")
}

func asWanted(e racelab.Experiment) outcome { return outcome{experiment: e, result: e.Want} }

func TestTimelineHasAColumnPerRequest(t *testing.T) {
	t.Parallel()
	x := asWanted(experiment(t, "check-then-insert"))
	x.timeline = racelab.Timeline{
		{At: 0, Caller: "B", Text: "BEGIN; count -> 0"},
		{At: 250 * time.Microsecond, Caller: "A", Text: "BEGIN"},
		{At: 12 * time.Millisecond, Text: "both have checked"},
	}
	var out bytes.Buffer
	(&printer{w: &out}).timeline(x)
	require.Equal(t, `
check-then-insert
count, then insert: what most code does
t(ms)   request A           request B
  0.0                       BEGIN; count -> 0
  0.2   BEGIN
 12.0   -- both have checked --
        2 pending for a limit of 1: the rule is broken
`, out.String())
}

func TestTableSaysWhatDidNotComeOutAsItMust(t *testing.T) {
	t.Parallel()
	broken, wrong := asWanted(experiment(t, "for-update")), asWanted(experiment(t, "advisory-lock"))
	wrong.result.Created, wrong.result.Rows, wrong.result.Holds = 2, 2, false
	wrong.err = wrong.experiment.Check(wrong.result)

	var out bytes.Buffer
	p := &printer{w: &out}
	p.table("PostgreSQL 18.0", []outcome{broken, wrong})
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	require.Len(t, lines, 4)
	require.Regexp(t, `^for-update +2 +1 +2 +0 +0 +0 +2   NO   as it must: the way is broken$`, lines[2])
	require.Regexp(t, `^advisory-lock +2 +1 +2 +1 +0 +0 +2   NO   <- not as it must be$`, lines[3])

	require.NoError(t, verdict(p, []outcome{broken}))
	require.EqualError(t, verdict(p, []outcome{broken, wrong}),
		"1 of 2 experiments did not come out as they must:\n"+
			"  racelab: advisory-lock: created 2, want 1; rows 2, want 1; holds false, want true")
}

func TestABrokenWayThatHoldsIsWrong(t *testing.T) {
	t.Parallel()
	e := experiment(t, "check-then-insert")
	held := e.Want
	held.Created, held.Refused, held.Rows, held.Holds = 1, 1, 1, true
	require.ErrorContains(t, e.Check(held), "holds true, want false")
}

func TestColourIsForTerminalsOnly(t *testing.T) {
	t.Parallel()
	file, err := os.CreateTemp(t.TempDir(), "")
	require.NoError(t, err)
	defer file.Close()
	require.False(t, newPrinter(file).colour)
	require.Equal(t, "x", (&printer{}).paint(red, "x"))
	require.Equal(t, "\x1b[31mx\x1b[0m", (&printer{colour: true}).paint(red, "x"))
}

func TestOptionsNameExistingExperiments(t *testing.T) {
	t.Parallel()
	o, err := parseOptions(nil, io.Discard)
	require.NoError(t, err)
	require.Equal(t, options{timelines: []string{"check-then-insert", "advisory-lock"}}, o)

	o, err = parseOptions([]string{"-json", "-timeline=all"}, io.Discard)
	require.NoError(t, err)
	require.True(t, o.json)
	require.Len(t, o.timelines, len(racelab.All()))

	for _, args := range [][]string{{"-timeline=nonsense"}, {"stray"}, {"-unknown"}} {
		_, err = parseOptions(args, io.Discard)
		require.Error(t, err, args)
	}
}
