package lockkey_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/internal/lockkey"
)

type vector struct {
	Namespace string `json:"namespace"`
	ID        string `json:"id"`
	Key       int64  `json:"key,string"`
}

func readVectors(tb testing.TB) []vector {
	tb.Helper()
	data, err := os.ReadFile(filepath.Join("testdata", "vectors.json"))
	require.NoError(tb, err)
	var file struct {
		Vectors []vector `json:"vectors"`
	}
	require.NoError(tb, json.Unmarshal(data, &file))
	return file.Vectors
}

// naive is the rule word for word, with no thought of speed.
func naive(namespace, id string) int64 {
	sum := sha256.Sum256([]byte(namespace + ":" + id))
	return int64(binary.BigEndian.Uint64(sum[:8]))
}

func TestSumEqualsThePublishedVectors(t *testing.T) {
	t.Parallel()
	vectors := readVectors(t)
	require.GreaterOrEqual(t, len(vectors), 204)

	negative, nonASCII, longest := 0, 0, 0
	seen := map[[2]string]bool{}
	for _, v := range vectors {
		require.NoError(t, lockkey.CheckNamespace(v.Namespace), "%q", v.Namespace)
		require.NoError(t, lockkey.CheckID(v.ID), "%q", v.ID)
		require.Equal(t, v.Key, lockkey.Sum(v.Namespace, v.ID), "%s:%q", v.Namespace, v.ID)

		require.False(t, seen[[2]string{v.Namespace, v.ID}], "twice: %s:%q", v.Namespace, v.ID)
		seen[[2]string{v.Namespace, v.ID}] = true
		if v.Key < 0 {
			negative++
		}
		if strings.ContainsFunc(v.ID, func(r rune) bool { return r > 127 }) {
			nonASCII++
		}
		if len(v.Namespace) == lockkey.MaxNamespace && len(v.ID) == lockkey.MaxID {
			longest++
		}
	}
	// The file says nothing about these cases unless it holds them.
	require.Greater(t, negative, 50)
	require.Greater(t, nonASCII, 50)
	require.Positive(t, longest)
}

// TestSumEqualsTheDesign holds its own copy of four vectors, so that regenerating the file with
// another rule cannot pass.
func TestSumEqualsTheDesign(t *testing.T) {
	t.Parallel()
	for _, v := range []vector{
		{"setup_request", "00000000-0000-0000-0000-000000000000", -4603886392734601391},
		{"setup_request", "3f2b8a54-9f0e-4d9c-8a1e-7d6c5b4a3f21", -817216473665466468},
		{"account", "1", 6051513417264253602},
		{"user", "42", -1567300791643570846},
	} {
		require.Equal(t, v.Key, lockkey.Sum(v.Namespace, v.ID), "%s:%s", v.Namespace, v.ID)
		require.Contains(t, readVectors(t), v)
	}
}

func TestOtherLanguagesEqualThePublishedVectors(t *testing.T) {
	t.Parallel()
	want := strconv.Itoa(len(readVectors(t))) + " vectors, 0 wrong"
	for _, check := range []struct{ program, file string }{
		{"python3", "check.py"},
		{"node", "check.mjs"},
	} {
		t.Run(check.program, func(t *testing.T) {
			t.Parallel()
			if _, err := exec.LookPath(check.program); err != nil {
				t.Skipf("%s is not on PATH", check.program)
			}
			run := func(dir string) (string, error) {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				out, err := exec.CommandContext(ctx, check.program, filepath.Join(dir, check.file)).CombinedOutput()
				return string(out), err
			}
			out, err := run("testdata")
			require.NoError(t, err, out)
			require.Contains(t, out, want)

			// A check that cannot fail checks nothing.
			dir := t.TempDir()
			program, err := os.ReadFile(filepath.Join("testdata", check.file))
			require.NoError(t, err)
			require.NoError(t, os.WriteFile(filepath.Join(dir, check.file), program, 0o600))
			data, err := os.ReadFile(filepath.Join("testdata", "vectors.json"))
			require.NoError(t, err)
			data = bytes.Replace(data, []byte(`"6051513417264253602"`), []byte(`"6051513417264253603"`), 1)
			require.NoError(t, os.WriteFile(filepath.Join(dir, "vectors.json"), data, 0o600))
			out, err = run(dir)
			var exit *exec.ExitError
			require.ErrorAs(t, err, &exit, out)
			require.Equal(t, 1, exit.ExitCode(), out)
			require.Contains(t, out, "1 wrong")
		})
	}
}

func TestAMillionIDsDoNotCollide(t *testing.T) {
	t.Parallel()
	const n = 1_000_000
	keys := make([]int64, n)
	var ones, zeros uint64
	for i := range keys {
		keys[i] = lockkey.Sum("user", strconv.Itoa(i))
		ones |= uint64(keys[i])
		zeros |= ^uint64(keys[i])
	}
	require.Equal(t, ^uint64(0), ones, "a bit is never 1")
	require.Equal(t, ^uint64(0), zeros, "a bit is never 0")
	slices.Sort(keys)
	require.Len(t, slices.Compact(keys), n)
}

func TestNamespacesAreApart(t *testing.T) {
	t.Parallel()
	require.NotEqual(t, lockkey.Sum("user", "1"), lockkey.Sum("users", "1"))
	require.NotEqual(t, lockkey.Sum("user", "1"), lockkey.Sum("account", "1"))
	require.NotEqual(t, lockkey.Sum("a", "b:c"), lockkey.Sum("a_b", "c"))
}

//nolint:paralleltest // testing.AllocsPerRun counts the allocations of the whole process
func TestSumDoesNotAllocate(t *testing.T) {
	for _, size := range []int{1, 36, 64, lockkey.MaxID} {
		namespace, id := strings.Repeat("n", lockkey.MaxNamespace), strings.Repeat("x", size)
		require.Zero(t, testing.AllocsPerRun(100, func() { _ = lockkey.Sum(namespace, id) }), "id of %d bytes", size)
	}
}

func TestCheckNamespace(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{"a", "z", "user", "setup_request", "a0", "a_", "a__b", "x9", strings.Repeat("a", 63)} {
		require.NoError(t, lockkey.CheckNamespace(ok), "%q", ok)
	}
	const chars = "must begin with a-z and hold only a-z, 0-9 and _"
	for namespace, want := range map[string]string{
		"":                            "must not be empty",
		strings.Repeat("a", 64):       "must be at most 63 characters long",
		strings.Repeat("a:", 1<<20):   "must be at most 63 characters long",
		"User":                        chars,
		"uSer":                        chars,
		"_user":                       chars,
		"1user":                       chars,
		"user:":                       chars,
		":user":                       chars,
		"us er":                       chars,
		"user ":                       chars,
		"user\n":                      chars,
		"user\x00":                    chars,
		"us-er":                       chars,
		"us.er":                       chars,
		"usér":                        chars,
		"usеr":                        chars, // a Cyrillic e
		"user\xff":                    chars,
		strings.Repeat("a", 62) + "{": chars,
	} {
		require.EqualError(t, lockkey.CheckNamespace(namespace), want, "%.80q", namespace)
	}
}

func TestCheckID(t *testing.T) {
	t.Parallel()
	for _, ok := range []string{
		"1", " ", "\n", ":", "'", `\`, "a:b", "é", "e\u0301", "\U0001F511", "\uFFFD", "\uFEFF",
		strings.Repeat("x", 1024), strings.Repeat("é", 512), strings.Repeat("\U0001F511", 256),
	} {
		require.NoError(t, lockkey.CheckID(ok), "%.80q", ok)
	}
	for id, want := range map[string]string{
		"":                           "must not be empty",
		strings.Repeat("x", 1025):    "must be at most 1024 bytes long",
		strings.Repeat("é", 513):     "must be at most 1024 bytes long",
		strings.Repeat("\xff", 2048): "must be at most 1024 bytes long",
		"\xff":                       "must be valid UTF-8",
		"a\xc3":                      "must be valid UTF-8",
		"\xc0\xaf":                   "must be valid UTF-8", // overlong
		"\xed\xa0\x80":               "must be valid UTF-8", // a surrogate
		"\xf4\x90\x80\x80":           "must be valid UTF-8", // above U+10FFFF
		"\x00":                       "must not hold a NUL byte",
		"a\x00b":                     "must not hold a NUL byte",
		"a\x00":                      "must not hold a NUL byte",
	} {
		require.EqualError(t, lockkey.CheckID(id), want, "%.80q", id)
	}
}

func FuzzSum(f *testing.F) {
	for _, v := range readVectors(f) {
		f.Add(v.Namespace, v.ID)
	}
	f.Add("", "")
	f.Add("a", "\xff")
	f.Fuzz(func(t *testing.T, namespace, id string) {
		// Also for input that the checks refuse: a caller that forgot them still gets the rule's key.
		require.Equal(t, naive(namespace, id), lockkey.Sum(namespace, id))
	})
}

func FuzzChecks(f *testing.F) {
	for _, v := range readVectors(f) {
		f.Add(v.Namespace, v.ID)
	}
	f.Add("a"+strings.Repeat("_", 63), strings.Repeat("x", 1025))
	f.Add("a:b", "a\x00")
	f.Add("a\n", "\xff")
	pattern := regexp.MustCompile(`^[a-z][a-z0-9_]{0,62}\z`)
	f.Fuzz(func(t *testing.T, namespace, id string) {
		require.Equal(t, pattern.MatchString(namespace), lockkey.CheckNamespace(namespace) == nil)
		storable := len(id) <= 1024 && id != "" && utf8.ValidString(id) && !strings.Contains(id, "\x00")
		require.Equal(t, storable, lockkey.CheckID(id) == nil)
	})
}

func BenchmarkSum(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		_ = lockkey.Sum("setup_request", "3f2b8a54-9f0e-4d9c-8a1e-7d6c5b4a3f21")
	}
}
