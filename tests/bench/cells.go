package main

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"time"
)

const (
	hotKey      = "one hot key"
	hundredKeys = "100 keys"
	freshKeys   = "a fresh key per call"
)

// cell is a workload in which contestants are compared.
type cell struct {
	Keys        string        `json:"keys"`
	RTT         time.Duration `json:"rtt_nanoseconds"`
	Callers     int           `json:"callers"`
	SyncCommit  bool          `json:"synchronous_commit"`
	Rounds      int           `json:"rounds"`
	Contestants []string      `json:"-"`
}

func (c cell) String() string {
	return fmt.Sprintf("%s, %s, callers %d, synchronous_commit %s", c.Keys, rttName(c.RTT), c.Callers, onOff(c.SyncCommit))
}

// shuffled returns the contestants in an order that is drawn.
func (c cell) shuffled(order *rand.Rand) (drawn []contestant) {
	for _, k := range contestants() {
		if slices.Contains(c.Contestants, k.name) {
			drawn = append(drawn, k)
		}
	}
	order.Shuffle(len(drawn), func(i, j int) { drawn[i], drawn[j] = drawn[j], drawn[i] })
	return drawn
}

func rttName(rtt time.Duration) string { return fmt.Sprintf("%g ms", milliseconds(rtt)) }

// rtts are the round-trip times that are compared.
var rtts = []time.Duration{0, 500 * time.Microsecond, time.Millisecond, 5 * time.Millisecond}

// callerCounts are the numbers of callers that are compared.
var callerCounts = []int{1, 4, 16, 64, 256}

const (
	hotCallers     = 256
	hundredCallers = 64
	freshCallers   = poolSize // more would wait for a connection, and measure that
)

var (
	compared = []string{textbook, beginTx, parentRow, serial, unguarded, function, session, riverJob, alone, coalescing}
	guards   = []string{guardLast, guardCount, lease}
	clients  = []string{function, alone, coalescing, bareBatch}
)

// quickCells are what the figures to reach need.
func quickCells() []cell {
	const rounds = 3
	return []cell{
		{hotKey, time.Millisecond, hotCallers, false, rounds, []string{textbook, unguarded, function, alone, coalescing}},
		{hotKey, 0, hotCallers, false, rounds, []string{function, alone, coalescing}},
		{freshKeys, 0, freshCallers, false, rounds, []string{function, unguarded, alone, coalescing, bareBatch}},
		{freshKeys, time.Millisecond, freshCallers, false, rounds, []string{function, unguarded, alone, coalescing}},
		{freshKeys, 0, 1, false, rounds, clients},
	}
}

// fullCells cover every value of every axis, but not every combination.
func fullCells() []cell {
	const (
		rounds = 3
		more   = 5 // where a figure to reach depends on it
	)
	everybody := slices.Concat(compared, guards)
	return []cell{
		{hotKey, 0, hotCallers, false, more, compared},
		{hotKey, 500 * time.Microsecond, hotCallers, false, rounds, compared},
		{hotKey, time.Millisecond, 1, false, rounds, compared},
		{hotKey, time.Millisecond, 4, false, rounds, compared},
		{hotKey, time.Millisecond, freshCallers, false, rounds, everybody},
		{hotKey, time.Millisecond, 64, false, rounds, compared},
		{hotKey, time.Millisecond, hotCallers, false, more, compared},
		{hotKey, 5 * time.Millisecond, hotCallers, false, rounds, compared},
		{hotKey, time.Millisecond, hotCallers, true, rounds, compared},
		{hundredKeys, 0, hundredCallers, false, rounds, compared},
		{hundredKeys, time.Millisecond, hundredCallers, false, rounds, compared},
		{freshKeys, 0, freshCallers, false, more, slices.Concat(compared, []string{bareBatch})},
		{freshKeys, 500 * time.Microsecond, freshCallers, false, rounds, compared},
		{freshKeys, time.Millisecond, freshCallers, false, more, everybody},
		{freshKeys, 5 * time.Millisecond, freshCallers, false, rounds, compared},
		{freshKeys, time.Millisecond, freshCallers, true, rounds, compared},
		{freshKeys, 0, 1, false, more, clients},
		{freshKeys, time.Millisecond, 64, false, rounds, compared},
	}
}
