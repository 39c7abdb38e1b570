package pgserver

import (
	"context"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestParseVersion(t *testing.T) {
	t.Parallel()
	for output, want := range map[string]version{
		"postgres (PostgreSQL) 15.18 (Debian 15.18-0+deb12u1)\n": {15, 18, false},
		"postgres (PostgreSQL) 18.4\n":                           {18, 4, false},
		"postgres (PostgreSQL) 16.9 (Homebrew)\n":                {16, 9, false},
		"postgres (PostgreSQL) 14.0\n":                           {14, 0, false},
		"postgres (PostgreSQL) 9.6.24\n":                         {9, 6, false},
		"postgres (PostgreSQL) 19devel\n":                        {19, 0, true},
		"postgres (PostgreSQL) 19beta2 (Debian 19~beta2-1)\n":    {19, 0, true},
		"postgres (PostgreSQL) 18rc1\n":                          {18, 0, true},
		"17.10":                                                  {17, 10, false},
	} {
		got, err := parseVersion(output)
		require.NoError(t, err, output)
		require.Equal(t, want, got, output)
	}
	for _, output := range []string{"", "bash: postgres: command not found", "psql (PostgreSQL) 15.18", "postgres (PostgreSQL) devel"} {
		_, err := parseVersion(output)
		require.Error(t, err, output)
	}
}

func TestChoose(t *testing.T) {
	t.Parallel()
	at := func(dir string, major, minor int) programs { return programs{dir, version{major, minor, false}} }
	pre := func(dir string, major int) programs { return programs{dir, version{major, 0, true}} }
	for name, c := range map[string]struct {
		found  []programs
		wanted int
		want   string // empty: none
	}{
		"nothing found":                         {nil, 0, ""},
		"the newest when none is wanted":        {[]programs{at("a", 15, 18), at("b", 17, 2), at("c", 16, 14)}, 0, "b"},
		"the newest minor version":              {[]programs{at("a", 16, 9), at("b", 16, 14)}, 0, "b"},
		"the user's choice among equals":        {[]programs{at("path", 16, 4), at("usual", 16, 4)}, 0, "path"},
		"the wanted one, not the newest":        {[]programs{at("a", 15, 18), at("b", 17, 2)}, 15, "a"},
		"none when the wanted one is missing":   {[]programs{at("a", 15, 18), at("b", 17, 2)}, 16, ""},
		"none when all are too old":             {[]programs{at("a", 13, 20), at("b", 14, 1), at("c", 9, 6)}, 0, ""},
		"a release before a newer pre-release":  {[]programs{pre("a", 19), at("b", 15, 1)}, 0, "b"},
		"a pre-release when it is wanted":       {[]programs{pre("a", 19), at("b", 15, 1)}, 19, "a"},
		"a pre-release when there is no other":  {[]programs{pre("a", 19), at("b", 14, 1)}, 0, "a"},
		"the newest of several pre-releases":    {[]programs{pre("a", 19), pre("b", 20)}, 0, "b"},
		"a release of the version of a preview": {[]programs{pre("a", 18), at("b", 18, 0)}, 18, "b"},
	} {
		p, ok := choose(c.found, c.wanted)
		require.Equal(t, c.want != "", ok, name)
		require.Equal(t, c.want, p.dir, name)
	}
}

func TestFindProgramsFollowsLinksAndSkipsWhatDoesNotRun(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	program := func(path, script string) {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte("#!/bin/sh\n"+script), 0o755))
	}
	installation := func(name, script string) string {
		bin := filepath.Join(dir, name, "bin")
		program(filepath.Join(bin, "postgres"), script)
		program(filepath.Join(bin, "initdb"), "exit 1")
		return bin
	}
	good := installation("good", "echo 'postgres (PostgreSQL) 16.3'")
	broken := installation("broken", "echo 'cannot open shared object file' >&2; exit 127")
	alone := filepath.Join(dir, "alone")
	program(filepath.Join(alone, "postgres"), "echo 'postgres (PostgreSQL) 17.1'")
	links := filepath.Join(dir, "links")
	require.NoError(t, os.Mkdir(links, 0o755))
	require.NoError(t, os.Symlink(filepath.Join(good, "postgres"), filepath.Join(links, "postgres")))

	found := findPrograms(context.Background(), []string{links, broken, alone, filepath.Join(dir, "missing"), good})
	real, err := filepath.EvalSymlinks(good) // the temporary folder itself is behind a link on macOS
	require.NoError(t, err)
	require.Equal(t, []programs{{real, version{16, 3, false}}}, found)
}

func TestWantedVersion(t *testing.T) {
	t.Parallel()
	for _, s := range []string{"14", "9.6", "16.4", "abc", "-16", "latest"} {
		_, err := start(context.Background(), env{version: s}, Options{})
		require.ErrorContains(t, err, "LATCHKEY_POSTGRES_VERSION is \""+s+"\"")
	}
	n, err := parseWanted("")
	require.NoError(t, err)
	require.Zero(t, n)
}

func TestWithDatabase(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"postgres://u:p%40@h:5433/old?sslmode=disable": "postgres://u:p%40@h:5433/new?sslmode=disable",
		"postgresql://h": "postgresql://h/new",
		"postgres:///old?host=%2Ftmp&dbname=other&database=more": "postgres:///new?host=%2Ftmp",
		"postgres://u@a:1,b:2/old":                               "postgres://u@a:1,b:2/new",
		"host=h user=u dbname=old":                               "host=h user=u dbname=old dbname=new",
	} {
		got, err := withDatabase(in, "new")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := withDatabase("postgres://u:secret@h:port/old", "new")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}
