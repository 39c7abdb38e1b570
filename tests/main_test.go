package tests

import (
	"context"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/latchkey-go/latchkey/tests/internal/testdb"
)

func TestMain(m *testing.M) {
	flag.Parse()
	program, version, err := testdb.Pooler(context.Background())
	if program != "" && err == nil { // Main reports the error
		err = skipNotThroughPooler(version.CanPrepare())
		if err != nil {
			fmt.Fprintln(os.Stderr, "latchkey tests:", err)
			os.Exit(1)
		}
	}
	testdb.Main(m)
}

// skipNotThroughPooler adds to -skip, and says so: what is skipped was not tested.
func skipNotThroughPooler(prepares bool) error {
	skip := flag.Lookup("test.skip")
	var patterns []string
	if given := skip.Value.String(); given != "" {
		patterns = append(patterns, given)
	}
	for _, not := range notThroughPooler {
		if not.prepare && prepares {
			continue
		}
		tests := strings.Fields(not.tests)
		fmt.Fprintf(os.Stderr, "latchkey tests: not through the pooler, since they %s: %s\n", not.why, strings.Join(tests, " "))
		patterns = append(patterns, tests...)
	}
	// Of the patterns that a test's name fits in part, package testing takes the first, and does not look at the others.
	slices.SortStableFunc(patterns, func(a, b string) int { return strings.Count(a, "/") - strings.Count(b, "/") })
	return skip.Value.Set(strings.Join(patterns, "|"))
}
