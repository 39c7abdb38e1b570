//go:build !linux

package main

import "time"

// sleeper is Go's own timer, which is exact enough where the runtime does not wait in whole milliseconds.
type sleeper struct{}

func newSleeper() (sleeper, error) { return sleeper{}, nil }

func (sleeper) sleep(d time.Duration) error {
	<-time.After(d)
	return nil
}
