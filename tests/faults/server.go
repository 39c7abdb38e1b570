//go:build unix

package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/latchkey-go/latchkey/internal/pgserver"
)

// server is where the faults are made. One that was started here can be killed and started again.
type server struct {
	*pgserver.Server
	own   bool
	admin *pgxpool.Pool // past the proxy, as the superuser

	// Of a server of our own.
	data    string   // its folder
	keeper  int      // the keeper of a postmaster that was started by us, if it has not ended
	ended   bool     // the last one has
	program *os.File // whose end is that of the program, for the keeper
}

func startServer(ctx context.Context, url string) (_ *server, err error) {
	s := &server{own: url == "" && os.Getenv("LATCHKEY_DATABASE_URL") == ""}
	if url != "" {
		s.Server, err = pgserver.Use(ctx, url, "the server of -server", pgserver.Options{Log: say})
	} else {
		// A server that is killed while it writes a page leaves half of one. The machine goes on, and so what was
		// given to it is written: that needs no fsync.
		s.Server, err = pgserver.Start(ctx, pgserver.Options{Log: say, Settings: map[string]string{
			"full_page_writes":        "on",
			"unix_socket_directories": "", // the file beside a socket would be in the way after a kill
		}})
	}
	if err != nil {
		return nil, err
	}
	if s.admin, err = pgxpool.New(ctx, s.URL()); err == nil && s.own {
		err = s.admin.QueryRow(ctx, "SHOW data_directory").Scan(&s.data)
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

// close stops the server. Its folder is removed by who started it first.
func (s *server) close() error {
	if s.admin != nil {
		s.admin.Close()
	}
	if s.keeper > 0 {
		_ = s.program.Close()
		_, _ = syscall.Wait4(s.keeper, nil, 0, nil)
	}
	return s.Close()
}

// postmaster returns the process whose children serve the connections.
func (s *server) postmaster() (int, error) {
	file, err := os.ReadFile(filepath.Join(s.data, "postmaster.pid"))
	if err != nil {
		return 0, err
	}
	line, _, _ := strings.Cut(string(file), "\n")
	return strconv.Atoi(line)
}

// processes are the postmaster and its children.
func (s *server) processes(ctx context.Context) ([]int, error) {
	postmaster, err := s.postmaster()
	if err != nil {
		return nil, err
	}
	children, err := s.pids(ctx, "true")
	return append([]int{postmaster}, children...), err
}

// pids returns the processes that pg_stat_activity shows where the condition holds.
func (s *server) pids(ctx context.Context, where string, args ...any) ([]int, error) {
	var pids []int
	err := s.insist(ctx, func(ctx context.Context) error {
		return s.admin.QueryRow(ctx, `
			SELECT coalesce(pg_catalog.array_agg(a.pid ORDER BY a.pid), '{}')
			FROM pg_catalog.pg_stat_activity AS a
			WHERE `+where, args...).Scan(&pids)
	})
	return pids, err
}

func (s *server) exec(ctx context.Context, sql string, args ...any) error {
	return s.insist(ctx, func(ctx context.Context) error {
		_, err := s.admin.Exec(ctx, sql, args...)
		return err
	})
}

// enough bounds what a server does that is well; it may be starting up, on a busy machine.
const enough = 60 * time.Second

// insist repeats f until it succeeds: the connections of a server that was killed are of no use, and a new one takes
// a while.
func (s *server) insist(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, enough)
	defer cancel()
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		if s.hasEnded() {
			return fmt.Errorf("%w: the server ended by itself, the end of its log:\n%s", err, s.log())
		}
		if pause(ctx, 20*time.Millisecond) != nil {
			return err
		}
	}
}

// kill ends all processes of the server at once, as a crash does, and starts it again.
func (s *server) kill(ctx context.Context) error {
	pids, err := s.processes(ctx)
	if err != nil {
		return err
	}
	if s.keeper > 0 {
		s.dismiss()
	}
	for _, pid := range pids {
		_ = syscall.Kill(pid, syscall.SIGKILL) // the postmaster first, so that it has no more children
	}
	// Who started the first postmaster waits for it at the end only, so for the next one it would seem to run. That
	// nobody uses the memory any more is seen from the memory.
	if err := os.Remove(filepath.Join(s.data, "postmaster.pid")); err != nil {
		return err
	}
	return s.restart(ctx)
}

// restart starts a server that was killed. Processes that it left behind keep its memory, for as long as they do not
// notice, and the next one ends at once then.
func (s *server) restart(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, enough)
	defer cancel()
	for {
		if err := s.launch(); err != nil {
			return err
		}
		for {
			// A connection that there was before may be to a process that has not noticed yet.
			if conn, err := pgx.Connect(ctx, s.URL()); err == nil {
				return conn.Close(ctx)
			}
			if s.hasEnded() {
				break
			}
			if err := pause(ctx, 10*time.Millisecond); err != nil {
				return fmt.Errorf("the server does not come back: %w, the end of its log:\n%s", err, s.log())
			}
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return fmt.Errorf("the server does not come back: %w, the end of its log:\n%s", err, s.log())
		}
	}
}

// keeper starts a postmaster, and stops it and removes its folder, $1, when its standard input ends, which the kernel
// sees to when the program ends, even by SIGKILL. The command follows from the first start.
const keeper = `
umask 077
exec 3<&0
%s </dev/null 3<&- &
server=$!
(
	while read -r _; do :; done
	kill -CONT $server
	kill -QUIT $server
	while kill -0 $server; do sleep 0.1; done
	rm -rf "$1"
) <&3 2>/dev/null &
exec 3<&-
wait $server`

// launch starts the postmaster as it was started the first time.
func (s *server) launch() error {
	command, err := os.ReadFile(filepath.Join(s.data, "postmaster.opts")) // quoted for a shell
	if err != nil {
		return err
	}
	folder := filepath.Dir(s.data)
	log, err := os.OpenFile(filepath.Join(folder, "log"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer log.Close()
	info, err := os.Stat(s.data)
	if err != nil {
		return err
	}
	alive, program, err := os.Pipe()
	if err != nil {
		return err
	}
	defer alive.Close()
	script := fmt.Sprintf(keeper, strings.TrimSpace(string(command)))
	cmd := exec.Command("/bin/sh", "-c", script, "latchkey-postgres", folder)
	cmd.Dir = "/"
	cmd.Env = []string{"LC_ALL=C", "PATH=/usr/bin:/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = alive, log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // an interrupt is ours to act upon
	if owner, ok := info.Sys().(*syscall.Stat_t); ok && os.Getuid() == 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}
	}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, program.Close())
	}
	s.keeper, s.program, s.ended = cmd.Process.Pid, program, false
	return cmd.Process.Release() // it is waited for by its number
}

// dismiss ends the keeper with its whole group, so that nobody removes the folder.
func (s *server) dismiss() {
	_ = syscall.Kill(-s.keeper, syscall.SIGKILL)
	_, _ = syscall.Wait4(s.keeper, nil, 0, nil)
	_ = s.program.Close()
	s.keeper = 0
}

// hasEnded says whether the postmaster that was started by us has ended.
func (s *server) hasEnded() bool {
	if s.keeper > 0 {
		pid, err := syscall.Wait4(s.keeper, nil, syscall.WNOHANG, nil)
		if s.ended = err == nil && pid == s.keeper; s.ended {
			s.dismiss()
		}
	}
	return s.ended
}

// log returns the end of the server's log.
func (s *server) log() string {
	file, err := os.ReadFile(filepath.Join(filepath.Dir(s.data), "log"))
	if err != nil {
		return err.Error()
	}
	return string(file[max(0, len(file)-4096):])
}

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
