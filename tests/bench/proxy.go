package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"time"
)

// proxy is a network of a chosen round-trip time in front of the server: a delay line, through which all bytes of all
// connections pass in the order in which they were sent, each as late as the next. It costs latency, not throughput.
type proxy struct {
	listener net.Listener
	server   string
	url      string
	sleeper  interface{ sleep(time.Duration) error }
	queue    chan parcel
	oneWay   atomic.Int64  // nanoseconds
	detour   time.Duration // what a round trip takes longer than it should; it is taken off

	// What the delay came to.
	delivered atomic.Int64
	delayed   atomic.Int64 // nanoseconds, of all that were delivered

	mu        sync.Mutex
	recording bool
	trips     []trip
}

// parcel is some bytes on their way. Without any, it says that there will be no more.
type parcel struct {
	link     *link
	toServer bool
	sent     time.Time
	data     []byte
}

// link is a client's connection and the one to the server that belongs to it.
type link struct {
	client, server *net.TCPConn
	asked          bool // the bytes before were the client's; under the proxy's mu
}

// trip is a round trip as the server sees it: from the moment that it is given the question until it has answered.
type trip struct{ asked, answered time.Time }

// startProxy starts a proxy in front of the server that connString leads to, a URL with a host and port. It takes
// connections until ctx ends.
func startProxy(ctx context.Context, connString string) (*proxy, error) {
	u, err := url.Parse(connString)
	if err != nil || u.Port() == "" {
		return nil, errors.New("the proxy needs the server's URL with its host and port")
	}
	var config net.ListenConfig
	listener, err := config.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	s, err := newSleeper()
	if err != nil {
		return nil, err
	}
	p := &proxy{listener: listener, server: u.Host, sleeper: s, queue: make(chan parcel, 4096)}
	u.Host = listener.Addr().String()
	p.url = u.String()
	context.AfterFunc(ctx, func() { listener.Close() })
	go p.accept(ctx)
	go p.deliver()
	return p, nil
}

// setRTT sets the round-trip time of what is sent from now on.
func (p *proxy) setRTT(rtt time.Duration) { p.oneWay.Store(int64(rtt-p.detour) / 2) }

// measured returns the round-trip time that there was, on average, since the last call.
func (p *proxy) measured() time.Duration {
	return time.Duration(2 * p.delayed.Swap(0) / max(1, p.delivered.Swap(0)))
}

// record starts to note round trips; recorded stops, and returns them.
func (p *proxy) record() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recording, p.trips = true, nil
}

func (p *proxy) recorded() []trip {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.recording = false
	return p.trips
}

func (p *proxy) accept(ctx context.Context) {
	var dialer net.Dialer
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		server, err := dialer.DialContext(ctx, "tcp", p.server)
		if err != nil {
			client.Close()
			continue
		}
		l := &link{client: client.(*net.TCPConn), server: server.(*net.TCPConn)} //nolint:errcheck // both are TCP
		go p.read(l, l.client, true)
		go p.read(l, l.server, false)
	}
}

func (p *proxy) read(l *link, from *net.TCPConn, toServer bool) {
	buffer := make([]byte, 1<<16)
	for {
		n, err := from.Read(buffer)
		now := time.Now()
		if n > 0 {
			if !toServer {
				p.answered(l, now)
			}
			p.queue <- parcel{l, toServer, now, bytes.Clone(buffer[:n])}
		}
		if err != nil {
			p.queue <- parcel{l, toServer, now, nil}
			return
		}
	}
}

// deliver is the only one that writes, so that nothing is overtaken.
func (p *proxy) deliver() {
	for c := range p.queue {
		oneWay := time.Duration(p.oneWay.Load())
		for early := oneWay - time.Since(c.sent); early > 0; early = oneWay - time.Since(c.sent) {
			if p.sleeper.sleep(early) != nil {
				break // the figures that are measured of the delay will show it
			}
		}
		to := c.link.client
		if c.toServer {
			to = c.link.server
		}
		if c.data == nil {
			_ = to.CloseWrite()
			continue
		}
		p.delayed.Add(int64(time.Since(c.sent)))
		p.delivered.Add(1)
		if c.toServer {
			p.asked(c.link)
		}
		_, _ = to.Write(c.data) // an error is for the reader on the other side to see
	}
}

// asked begins a round trip, if the server had answered before.
func (p *proxy) asked(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.recording && !l.asked {
		p.trips = append(p.trips, trip{asked: time.Now()})
	}
	l.asked = true
}

func (p *proxy) answered(l *link, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.recording && len(p.trips) > 0 {
		p.trips[len(p.trips)-1].answered = at
	}
	l.asked = false
}
