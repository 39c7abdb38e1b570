//go:build unix

package pgserver

import (
	"bytes"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"net/url"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

const (
	// role is the superuser of a server that is started here.
	role = "latchkey"

	// portTries is how often another program may take the free port between its choice and its use.
	portTries = 5

	// readyWithin bounds the wait for a new server; it takes a second on an idle machine, but tests run on busy ones.
	readyWithin = 2 * time.Minute

	// maxSocketDir is what the shortest sun_path, 104 bytes on macOS, leaves beside "/.s.PGSQL.65535.lock" and a NUL.
	maxSocketDir = 80
)

// supervisor runs initdb and postgres and cleans up after them as soon as its standard input ends, which the kernel sees to
// when the parent ends, even by SIGKILL.
//
//go:embed supervisor.sh
var supervisor string

var errPortTaken = errors.New("port taken")

func startLocal(ctx context.Context, e env, wanted int, o Options) (*Server, error) {
	p, provider, err := locate(ctx, e, wanted, o)
	if err != nil {
		return nil, fmt.Errorf("pgserver: %w", err)
	}
	return launchOnFreePort(ctx, p, provider, o, nil)
}

func launchOnFreePort(ctx context.Context, p programs, provider string, o Options, primary *primary) (*Server, error) {
	for try := 1; ; try++ {
		s, err := launch(ctx, p, provider, o, primary)
		if errors.Is(err, errPortTaken) && try < portTries {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("pgserver: starting PostgreSQL with the %s: %w", provider, err)
		}
		o.log("using PostgreSQL %s: %s", s.version, provider)
		return s, nil
	}
}

func locate(ctx context.Context, e env, wanted int, o Options) (programs, string, error) {
	found := findPrograms(ctx, e.dirs())
	if p, ok := choose(found, wanted); ok {
		return p, "server programs in " + p.dir, nil
	}
	if err := ctx.Err(); err != nil {
		return programs{}, "", err // nothing was found because nothing could be asked
	}
	p, err := cached(ctx, e, wanted, o)
	if err != nil {
		var seen strings.Builder
		for _, f := range found {
			fmt.Fprintf(&seen, "\n  found %d.%d in %s", f.version.major, f.version.minor, f.dir)
		}
		what := fmt.Sprintf("PostgreSQL %d or newer", MinVersion)
		if wanted != 0 {
			what = fmt.Sprintf("PostgreSQL %d", wanted)
		}
		return programs{}, "", fmt.Errorf("no server programs of %s on this machine%s, and none could be fetched: %w\n%w", what, seen.String(), err, errNoServer)
	}
	return p, "server programs fetched into " + p.dir, nil
}

// launch makes a cluster, or takes that of a primary as it is now, and starts a server on it.
func launch(ctx context.Context, p programs, provider string, o Options, of *primary) (_ *Server, err error) {
	cred, err := otherUser()
	if err != nil {
		return nil, err
	}
	dir, err := makeDir(ctx, cred)
	if err != nil {
		return nil, err
	}
	// Once the supervisor runs, the folder is its business.
	supervised := false
	defer func() {
		if !supervised {
			err = errors.Join(err, os.RemoveAll(dir))
		}
	}()

	bin, err := enterable(ctx, p.dir, dir, cred)
	if err != nil {
		return nil, err
	}
	var password string
	if of == nil {
		password = randomHex(16)
		err = giveFile(filepath.Join(dir, "password"), password+"\n", cred)
	} else {
		password = of.password
		err = of.copyTo(ctx, filepath.Join(dir, "data"), cred)
	}
	if err != nil {
		return nil, err
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}

	// The write end is closed by Close, or by the kernel when this program ends; no child inherits it.
	aliveR, aliveW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer aliveR.Close()
	// Only the server holds the write end of this one, so its end is the server's end.
	goneR, goneW, err := os.Pipe()
	if err != nil {
		aliveW.Close()
		return nil, err
	}
	defer goneW.Close()

	cmd := exec.Command("/bin/sh", append([]string{"-c", supervisor, "latchkey-postgres", dir, bin, role}, settings(dir, port, o)...)...)
	cmd.Dir = "/"
	cmd.Env = cleanEnv()
	cmd.Stdin = aliveR
	cmd.ExtraFiles = []*os.File{goneW}
	// A group of its own keeps a terminal's Ctrl-C away, which is for the parent to act upon.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Credential: cred}
	if err := cmd.Start(); err != nil {
		aliveW.Close()
		goneR.Close()
		return nil, err
	}
	supervised = true
	goneW.Close()

	gone := make(chan struct{})
	go func() {
		io.Copy(io.Discard, goneR) //nolint:errcheck // any end is the end
		goneR.Close()
		close(gone)
		// A caller may keep the URL only. The collector would close the pipe with the forgotten Server, and so end it.
		runtime.KeepAlive(aliveW)
	}()
	s := &Server{
		provider: provider,
		url:      fmt.Sprintf("postgres://%s:%s@127.0.0.1:%d/postgres?sslmode=disable", url.PathEscape(role), password, port),
		stop: sync.OnceValue(func() error {
			aliveW.Close()
			var exit *exec.ExitError
			if err := cmd.Wait(); err != nil && !errors.As(err, &exit) {
				return err
			}
			if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("pgserver: %s could not be removed", dir)
			}
			return nil
		}),
		signal: func(name string) error {
			_, err := io.WriteString(aliveW, name+"\n")
			return err
		},
	}
	s.standby = func(ctx context.Context, o Options) (*Server, error) {
		return launchOnFreePort(ctx, p, "a standby, "+provider, o, &primary{s.url, filepath.Join(dir, "data"), port, password})
	}
	if err := s.waitReady(ctx, gone); err != nil {
		log := logEnd(filepath.Join(dir, "log"))
		if strings.Contains(log, "could not bind") { // initdb ran with the C locale, so messages are English
			err = errPortTaken
		}
		return nil, errors.Join(fmt.Errorf("%w\nthe end of its log:\n%s", err, log), s.Close())
	}
	return s, nil
}

// primary is a server that a standby follows.
type primary struct {
	url, data string
	port      int
	password  string
}

// copyTo copies the primary's data while it runs, as pg_basebackup does, which not every installation has: what changes
// under the copy is in the log that the standby asks the primary for.
func (p *primary) copyTo(ctx context.Context, data string, cred *syscall.Credential) error {
	conn, err := pgx.Connect(ctx, p.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	if _, err := conn.Exec(ctx, "SELECT pg_catalog.pg_backup_start('standby', true)"); err != nil {
		return err
	}
	if _, err := runAs(ctx, cred, "/bin/sh", "-c", `umask 077 && cp -R "$1" "$2" && rm -f "$2/postmaster.pid"`, "sh", p.data, data); err != nil {
		return err
	}
	var label string
	if err := conn.QueryRow(ctx, "SELECT labelfile FROM pg_catalog.pg_backup_stop(false)").Scan(&label); err != nil {
		return err
	}
	for name, content := range map[string]string{
		"backup_label":   label,
		"standby.signal": "",
		// In a file, because anybody may read the arguments of a program.
		"postgresql.auto.conf": fmt.Sprintf("primary_conninfo = 'host=127.0.0.1 port=%d user=%s password=%s application_name=standby'\n",
			p.port, role, p.password),
	} {
		if err := giveFile(filepath.Join(data, name), content, cred); err != nil {
			return err
		}
	}
	return nil
}

func settings(dir string, port int, o Options) []string {
	socketDir := dir
	if len(dir) > maxSocketDir {
		socketDir = ""
	}
	values := map[string]string{
		"listen_addresses":        "127.0.0.1",
		"port":                    strconv.Itoa(port),
		"unix_socket_directories": socketDir,
		"max_connections":         "300", // several test binaries, each with parallel tests and a pool in each
		// The data is thrown away: nothing needs to survive a crash of the machine.
		"fsync":            "off",
		"full_page_writes": "off",
	}
	for name, value := range o.Settings {
		values[name] = value
	}
	var args []string
	for name, value := range values {
		args = append(args, "-c", name+"="+value)
	}
	return args
}

func (s *Server) waitReady(ctx context.Context, gone <-chan struct{}) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer time.AfterFunc(readyWithin, func() { cancel(fmt.Errorf("it was not ready within %v", readyWithin)) }).Stop()
	go func() {
		<-gone
		cancel(errors.New("it ended before it was ready"))
	}()
	for {
		// A wrong answer is no answer either: another server may have taken the port.
		if s.askVersion(ctx) == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(25 * time.Millisecond):
		}
	}
}

func (s *Server) askVersion(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, s.url)
	if err != nil {
		return err
	}
	defer conn.Close(context.WithoutCancel(ctx))
	return conn.QueryRow(ctx, "SELECT split_part(current_setting('server_version'), ' ', 1)").Scan(&s.version)
}

func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	address, err := netip.ParseAddrPort(l.Addr().String())
	return int(address.Port()), err
}

// cleanEnv keeps the user's PostgreSQL settings, which are meant for other servers, and languages out, and makes sure that
// the shell finds rm and the like.
func cleanEnv() []string {
	env := slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "PG") || strings.HasPrefix(v, "LC_") || strings.HasPrefix(v, "LANG")
	})
	return append(env, "LC_ALL=C", "PATH="+os.Getenv("PATH")+":/usr/bin:/bin")
}

func logEnd(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	b = bytes.TrimSpace(b)
	const enough = 4096 // some thirty lines
	if len(b) > enough {
		b = append([]byte("..."), b[len(b)-enough:]...)
	}
	return string(b)
}

// otherUser returns whom the server runs as. PostgreSQL refuses to run as root; for anybody else this is nil: themselves.
func otherUser() (*syscall.Credential, error) {
	if os.Getuid() != 0 {
		return nil, nil
	}
	for _, name := range []string{"postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		// macOS writes nobody's id as -2.
		uid, err := strconv.ParseInt(u.Uid, 10, 64)
		if err != nil {
			return nil, err
		}
		gid, err := strconv.ParseInt(u.Gid, 10, 64)
		if err != nil {
			return nil, err
		}
		return &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}, nil
	}
	return nil, errors.New("PostgreSQL does not run as root, and there is no user postgres or nobody to run it as")
}

// runAs runs a program as the server's user and returns what it printed.
func runAs(ctx context.Context, cred *syscall.Credential, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = "/"
	cmd.Env = cleanEnv()
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w %s", err, bytes.TrimSpace(out))
	}
	return strings.TrimSpace(string(out)), nil
}

// makeDir makes the server's folder. For root, the server's user makes it: only where that user can, can the supervisor
// remove it.
func makeDir(ctx context.Context, cred *syscall.Credential) (string, error) {
	const pattern = "latchkey-postgres-"
	if cred == nil {
		return os.MkdirTemp("", pattern)
	}
	var errs []error
	for _, base := range []string{os.TempDir(), "/tmp", "/var/tmp"} {
		dir, err := runAs(ctx, cred, "/bin/sh", "-c", `mktemp -d "$1"`, "sh", filepath.Join(base, pattern+"XXXXXXXXXX"))
		if err == nil {
			return dir, nil
		}
		errs = append(errs, err)
	}
	return "", fmt.Errorf("no temporary folder for user %d: %w", cred.Uid, errors.Join(errs...))
}

// enterable returns a folder with the programs of bin that the server's user can run. Where root can go but that user
// cannot, such as in a checkout below /root, that is a copy in dir.
func enterable(ctx context.Context, bin, dir string, cred *syscall.Credential) (string, error) {
	if cred == nil {
		return bin, nil
	}
	if _, err := runAs(ctx, cred, filepath.Join(bin, "postgres"), "--version"); err == nil {
		return bin, nil
	}
	// An installation that can be found in such a place was built to be moved, so it finds its files beside bin.
	prefix, dst := filepath.Dir(bin), filepath.Join(dir, "programs")
	for _, sub := range []string{filepath.Base(bin), "lib", "share"} {
		if _, err := os.Stat(filepath.Join(prefix, sub)); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err := os.CopyFS(filepath.Join(dst, sub), os.DirFS(filepath.Join(prefix, sub))); err != nil {
			return "", err
		}
	}
	err := filepath.WalkDir(dst, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, int(cred.Uid), int(cred.Gid))
	})
	if err != nil {
		return "", err
	}
	bin = filepath.Join(dst, filepath.Base(bin))
	if _, err := runAs(ctx, cred, filepath.Join(bin, "postgres"), "--version"); err != nil {
		return "", fmt.Errorf("user %d cannot run the server programs in %s, nor a copy of them: %w", cred.Uid, prefix, err)
	}
	return bin, nil
}

// giveFile writes a file that only the server's user can read.
func giveFile(path, content string, cred *syscall.Credential) error {
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		return err
	}
	if cred == nil {
		return nil
	}
	return os.Chown(path, int(cred.Uid), int(cred.Gid))
}
