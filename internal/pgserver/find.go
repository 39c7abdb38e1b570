package pgserver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// usualPlaces are where packages put the server programs without putting them on the PATH.
var usualPlaces = []string{
	"/usr/lib/postgresql/*/bin", // Debian
	"/usr/pgsql-*/bin",          // the PostgreSQL project's packages for Red Hat
	"/usr/bin",                  // Red Hat's own
	"/opt/homebrew/opt/postgresql@*/bin",
	"/usr/local/opt/postgresql@*/bin",
	"/Applications/Postgres.app/Contents/Versions/*/bin",
}

// programs are the server programs of one installation.
type programs struct {
	dir     string
	version version
}

// programDirs lists the folders that may hold server programs, the ones that the user pointed to first.
func programDirs() []string {
	var dirs []string
	if path, err := exec.LookPath("postgres"); err == nil {
		dirs = append(dirs, filepath.Dir(path))
	}
	if out, err := exec.Command("pg_config", "--bindir").Output(); err == nil {
		dirs = append(dirs, strings.TrimSpace(string(out)))
	}
	for _, pattern := range usualPlaces {
		found, _ := filepath.Glob(pattern) // fails only on a bad pattern
		dirs = append(dirs, found...)
	}
	return dirs
}

// findPrograms returns the usable installations in the folders, each once, in the order of the folders.
func findPrograms(ctx context.Context, dirs []string) []programs {
	var found []programs
	for _, dir := range dirs {
		// A link on the PATH leads to the folder that has all the programs; they find their other files from there.
		path, err := filepath.EvalSymlinks(filepath.Join(dir, "postgres"))
		if err != nil {
			continue
		}
		dir = filepath.Dir(path)
		if slices.ContainsFunc(found, func(p programs) bool { return p.dir == dir }) {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, "initdb")); err != nil {
			continue
		}
		v, err := programVersion(ctx, dir)
		if err != nil {
			continue
		}
		found = append(found, programs{dir, v})
	}
	return found
}

func programVersion(ctx context.Context, dir string) (version, error) {
	out, err := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version").CombinedOutput()
	if err != nil {
		return version{}, fmt.Errorf("%w: %s", err, strings.TrimSpace(string(out)))
	}
	return parseVersion(string(out))
}

// choose returns the programs of the wanted major version, or of the newest version when none is wanted. It returns false
// when none fits.
func choose(found []programs, wanted int) (programs, bool) {
	found = slices.DeleteFunc(slices.Clone(found), func(p programs) bool {
		return p.version.major < MinVersion || wanted != 0 && p.version.major != wanted
	})
	if len(found) == 0 {
		return programs{}, false
	}
	// MaxFunc takes the first of equals, which is the one that the user pointed to.
	return slices.MaxFunc(found, func(a, b programs) int { return a.version.compare(b.version) }), true
}

// version is a PostgreSQL version as the programs print it.
type version struct {
	major, minor int
	pre          bool // a beta, release candidate or development version
}

// compare puts every release above every pre-release, which nobody wants to be given unasked.
func (v version) compare(w version) int {
	switch {
	case v.pre != w.pre && v.pre:
		return -1
	case v.pre != w.pre:
		return 1
	case v.major != w.major:
		return v.major - w.major
	}
	return v.minor - w.minor
}

var versionRE = regexp.MustCompile(`^(?:postgres \(PostgreSQL\) )?(\d+)(?:\.(\d+))?(devel|alpha|beta|rc)?`)

// parseVersion reads the output of postgres --version, or a server_version.
func parseVersion(s string) (version, error) {
	m := versionRE.FindStringSubmatch(s)
	if m == nil {
		return version{}, fmt.Errorf("not a PostgreSQL version: %q", s)
	}
	major, err := strconv.Atoi(m[1])
	if err != nil {
		return version{}, err
	}
	minor, _ := strconv.Atoi(m[2]) // absent in pre-releases
	return version{major, minor, m[3] != ""}, nil
}
