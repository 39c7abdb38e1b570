package main

import (
	"bytes"
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"gonum.org/v1/plot/plotter"
)

func TestMedianIsTheMiddle(t *testing.T) {
	t.Parallel()
	require.InDelta(t, 0, median(nil), 0)
	require.InDelta(t, 7, median([]float64{7}), 0)
	require.InDelta(t, 2, median([]float64{9, 1, 2}), 0)
	values := []float64{9, 1, 2, 4}
	require.InDelta(t, 3, median(values), 0)
	require.Equal(t, []float64{9, 1, 2, 4}, values, "the order of the rounds is lost")
}

func TestPercentileIsTheNearestRank(t *testing.T) {
	t.Parallel()
	require.Zero(t, percentile(nil, 99))
	require.EqualValues(t, 5, percentile([]time.Duration{5}, 1))
	var hundred []time.Duration
	for i := range 100 {
		hundred = append(hundred, time.Duration(i+1))
	}
	require.EqualValues(t, 50, percentile(hundred, 50))
	require.EqualValues(t, 99, percentile(hundred, 99))
	require.EqualValues(t, 100, percentile(hundred, 100))
	require.EqualValues(t, 3, percentile([]time.Duration{1, 3, 5}, 50))
	require.EqualValues(t, 5, percentile([]time.Duration{1, 3, 5}, 99))
}

func TestGoalIsJudgedByItsSide(t *testing.T) {
	t.Parallel()
	require.InDelta(t, 2.5, ratio(5, 2), 0)
	require.InDelta(t, 0, ratio(5, 0), 0, "not measured")
	require.True(t, goal{got: 60, wanted: 60}.reached())
	require.False(t, goal{got: 59.9, wanted: 60}.reached())
	require.True(t, goal{got: 1.25, wanted: 1.25, atMost: true}.reached())
	require.False(t, goal{got: 1.26, wanted: 1.25, atMost: true}.reached())
	require.False(t, goal{got: 0, wanted: 1.25, atMost: true}.reached(), "nothing was measured")
}

func TestNamesAreMovedApart(t *testing.T) {
	t.Parallel()
	names := plotter.XYs{{Y: 1000}, {Y: 10}, {Y: 10.5}, {Y: 10.6}}
	apart(names, 2)
	require.Equal(t, plotter.XYs{{Y: 1000}, {Y: 10}, {Y: 20}, {Y: 40}}, names)
}

func TestSummaryIsTheMedianOfEachFigure(t *testing.T) {
	t.Parallel()
	c := cell{Keys: freshKeys, Callers: 4, Rounds: 3, Contestants: []string{textbook}}
	r := results{Cells: []cellResult{summary(c, map[string][]sample{textbook: {
		{accepted: 30, all: 31, p50: time.Millisecond, p99: 4 * time.Millisecond, conns: 2, cpu: time.Microsecond},
		{accepted: 10, all: 33, p50: 3 * time.Millisecond, p99: 9 * time.Millisecond, conns: 4, cpu: 5 * time.Microsecond},
		{accepted: 20, all: 32, p50: 2 * time.Millisecond, p99: 5 * time.Millisecond, conns: 1, cpu: 3 * time.Microsecond},
	}})}}
	require.Equal(t, figure{
		Contestant: textbook, Accepted: 20, All: 32, P50: 2, P99: 5, Connections: 4, CPU: 3, Rounds: []float64{30, 10, 20},
	}, r.figure(freshKeys, 0, 4, textbook))
	require.Zero(t, r.figure(freshKeys, time.Millisecond, 4, textbook), "another cell's")
}

// What is sent in one go arrives together, one round-trip time later: not a round-trip time for each part of it.
func TestProxyDelaysWithoutSlowingDown(t *testing.T) {
	t.Parallel()
	const rtt, parts = 100 * time.Millisecond, 200
	p, conn := startEcho(t)
	p.setRTT(rtt)
	p.record()
	sent := make([]byte, 0, parts*1000)
	began := time.Now()
	for i := range parts {
		part := bytes.Repeat([]byte{byte(i)}, 1000)
		_, err := conn.Write(part)
		require.NoError(t, err)
		sent = append(sent, part...)
	}
	first := make([]byte, 1)
	_, err := io.ReadFull(conn, first)
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(began), rtt)
	rest := make([]byte, len(sent)-1)
	_, err = io.ReadFull(conn, rest)
	require.NoError(t, err)
	require.Less(t, time.Since(began), parts*rtt/10)
	require.Equal(t, sent, append(first, rest...))
	require.GreaterOrEqual(t, p.measured(), rtt)
}

func TestProxyRecordsRoundTripsAsTheServerSeesThem(t *testing.T) {
	t.Parallel()
	const rtt = 100 * time.Millisecond
	p, conn := startEcho(t)
	p.setRTT(rtt)
	p.record()
	for range 3 {
		_, err := conn.Write([]byte("question"))
		require.NoError(t, err)
		_, err = io.ReadFull(conn, make([]byte, len("question")))
		require.NoError(t, err)
	}
	trips := p.recorded()
	require.Len(t, trips, 3)
	for _, trip := range trips {
		require.Positive(t, trip.answered.Sub(trip.asked))
	}
	require.GreaterOrEqual(t, trips[2].asked.Sub(trips[0].answered), rtt, "the network's delay is not between them")
}

// startEcho returns a connection, through a proxy, to a server that sends back what it gets.
func startEcho(t *testing.T) (*proxy, net.Conn) {
	t.Helper()
	server, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { server.Close() })
	go func() {
		conn, err := server.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.Copy(conn, conn)
	}()
	p, err := startProxy(t.Context(), "postgres://"+server.Addr().String()+"/postgres")
	require.NoError(t, err)
	conn, err := net.Dial("tcp", p.listener.Addr().String())
	require.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	return p, conn
}
