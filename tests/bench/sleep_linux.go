package main

import (
	"errors"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// sleeper sleeps for fractions of a millisecond. Go's own timers are up to a millisecond late on Linux when the
// program is idle, because the runtime then waits in whole milliseconds. A timer that is a file is as exact as the
// kernel, and blocks no thread.
type sleeper struct {
	timer *os.File
	raw   syscall.RawConn
}

func newSleeper() (*sleeper, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	timer := os.NewFile(uintptr(fd), "timer")
	raw, err := timer.SyscallConn()
	return &sleeper{timer, raw}, err
}

// sleep needs d to be positive: 0 would disarm the timer.
func (s *sleeper) sleep(d time.Duration) error {
	var set error
	err := s.raw.Control(func(fd uintptr) {
		set = unix.TimerfdSettime(int(fd), 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil)
	})
	if err := errors.Join(err, set); err != nil {
		return err
	}
	var expirations [8]byte
	_, err = s.timer.Read(expirations[:])
	return err
}
