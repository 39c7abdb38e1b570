package repository_test

import (
	"encoding/json"
	"math"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/latchkey-go/latchkey/repository"
)

// Do not change a value here: old and new builds exclude each other only as long as their keys are equal.
func TestKeyOfThePublishedVectors(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../internal/lockkey/testdata/vectors.json")
	require.NoError(t, err)
	var file struct {
		Vectors []struct {
			Namespace string `json:"namespace"`
			ID        string `json:"id"`
			Key       int64  `json:"key,string"`
		} `json:"vectors"`
	}
	require.NoError(t, json.Unmarshal(data, &file))
	require.Greater(t, len(file.Vectors), 200)
	for _, v := range file.Vectors {
		key, err := repository.Key(v.Namespace, v.ID)
		require.NoError(t, err)
		require.Equal(t, v.Key, key, "%s:%s", v.Namespace, v.ID)
	}

	key, err := repository.Key("setup_request", "3f2b8a54-9f0e-4d9c-8a1e-7d6c5b4a3f21")
	require.NoError(t, err)
	require.Equal(t, int64(-817216473665466468), key)
}

func TestKeyUsesAllOf64Bits(t *testing.T) {
	t.Parallel()
	const ids = 100_000
	always, ever := uint64(math.MaxUint64), uint64(0)
	seen := make(map[int64]bool, ids)
	for i := range ids {
		key, err := repository.Key("user", strconv.Itoa(i))
		require.NoError(t, err)
		seen[key] = true
		always &= uint64(key)
		ever |= uint64(key)
	}
	require.Len(t, seen, ids, "two ids have one key")
	require.Zero(t, always, "a bit is always set")
	require.Equal(t, uint64(math.MaxUint64), ever, "a bit is never set")
}

// The namespaces that break the pattern [a-z][a-z0-9_]{0,62}, and those just inside it.
var (
	badNamespaces = []string{
		"", "A", "Account", "1a", "_a", "a-b", "a b", "a:b", "a.b", "ä", "aé", "a\x00", "a\n", "\xff", strings.Repeat("a", 64),
	}
	goodNamespaces = []string{"a", "z9_", "setup_request", strings.Repeat("a", 63)}
)

func TestKeyRefusesBadInput(t *testing.T) {
	t.Parallel()
	for _, namespace := range badNamespaces {
		_, err := repository.Key(namespace, "1")
		requireInvalid(t, err, "namespace")
	}
	for _, namespace := range goodNamespaces {
		_, err := repository.Key(namespace, "1")
		require.NoError(t, err, namespace)
	}
	for name, id := range map[string]string{
		"empty": "", "over 1 KiB": strings.Repeat("i", 1025), "over 1 KiB in fewer characters": strings.Repeat("ü", 513),
		"not UTF-8": "a\xc3", "a surrogate": "\xed\xa0\x80", "with NUL": "a\x00b",
	} {
		_, err := repository.Key("user", id)
		requireInvalid(t, err, "id")
		require.NotContains(t, err.Error(), "iii", "%s: an id may be secret", name)
	}
	for _, id := range []string{" ", ":", "a:b", strings.Repeat("i", 1024), strings.Repeat("ü", 512), "\U0010ffff"} {
		_, err := repository.Key("user", id)
		require.NoError(t, err)
	}
}

func TestKeyTellsNamespaceAndIDApart(t *testing.T) {
	t.Parallel()
	seen := map[int64][2]string{}
	for _, text := range [][2]string{{"a", "b:c"}, {"a", "b"}, {"ab", "c"}, {"a", "bc"}, {"a", ":b"}, {"a", "b "}, {"a", "B"}} {
		key, err := repository.Key(text[0], text[1])
		require.NoError(t, err)
		require.NotContains(t, seen, key, "%v and %v", seen[key], text)
		seen[key] = text
	}
}

var names atomic.Int64

// unused returns a name that nobody has declared: the register is the process's, and a test may run again in it.
func unused() string { return "test_" + strconv.FormatInt(names.Add(1), 10) }

func TestNamespace(t *testing.T) {
	t.Parallel()
	t.Run("refuses a name against the pattern", func(t *testing.T) {
		t.Parallel()
		for _, name := range badNamespaces {
			n, err := repository.NewNamespace(name)
			requireInvalid(t, err, "name")
			require.Zero(t, n)
		}
	})
	t.Run("is declared once", func(t *testing.T) {
		t.Parallel()
		for _, name := range []string{unused(), (unused() + strings.Repeat("_", 63))[:63]} {
			n, err := repository.NewNamespace(name)
			require.NoError(t, err)
			require.NotZero(t, n)
			_, err = repository.NewNamespace(name)
			requireInvalid(t, err, "name")
			require.ErrorContains(t, err, name)
		}
	})
	t.Run("is declared once also by many goroutines", func(t *testing.T) {
		t.Parallel()
		name := unused()
		var declared atomic.Int64
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				if _, err := repository.NewNamespace(name); err == nil {
					declared.Add(1)
				}
			})
		}
		wg.Wait()
		require.Equal(t, int64(1), declared.Load())
	})
	t.Run("of the library is taken", func(t *testing.T) {
		t.Parallel()
		_, err := repository.NewNamespace("setup_request")
		requireInvalid(t, err, "name")
	})
	t.Run("a refused name is not declared", func(t *testing.T) {
		t.Parallel()
		name := unused()
		_, err := repository.NewNamespace(strings.ToUpper(name))
		require.Error(t, err)
		_, err = repository.NewNamespace(name)
		require.NoError(t, err)
	})
	t.Run("panics at start if it must", func(t *testing.T) {
		t.Parallel()
		name := unused()
		require.NotZero(t, repository.MustNamespace(name))
		require.PanicsWithValue(t, "latchkey: namespace: name is declared already: "+name,
			func() { repository.MustNamespace(name) })
		require.PanicsWithValue(t, "latchkey: namespace: name must not be empty",
			func() { repository.MustNamespace("") })
	})
	t.Run("may have a rank", func(t *testing.T) {
		t.Parallel()
		name := unused()
		n := repository.MustNamespace(name, repository.Rank(-3))
		_, err := repository.NewNamespace(name, repository.Rank(4))
		requireInvalid(t, err, "name")
		require.NotZero(t, n)
	})
	t.Run("gives comparable locks", func(t *testing.T) {
		t.Parallel()
		n := repository.MustNamespace(unused())
		require.Equal(t, n.Exclusive("1"), n.Exclusive("1"))
		require.NotEqual(t, n.Exclusive("1"), n.Exclusive("2"))
		require.NotEqual(t, n.Exclusive("1"), n.Shared("1"))
	})
}
