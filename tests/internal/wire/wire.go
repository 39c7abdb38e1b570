// Package wire puts a proxy in front of a PostgreSQL server that counts round trips, delays them, and breaks
// connections at a chosen message.
//
// It reads messages of the frontend/backend protocol, version 3, after the connection's start-up, which it passes on
// unseen, undelayed and uncounted. It speaks no TLS.
package wire

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/url"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

// Message is one message on its way. Type is PostgreSQL's letter for it, which means different things from
// the two sides: 'C' is Close from the client and CommandComplete from the server.
type Message struct {
	Conn       int // the connection it is on, counted from 1
	FromServer bool
	Type       byte

	// Statement is the SQL of a Query, Parse, Bind or Execute, also where the message itself only names it, and for a
	// Sync that of the last Execute before it, if there was one since the last Sync.
	Statement string

	// Tag is that of a CommandComplete, such as "INSERT 0 1".
	Tag string
}

// CancelRequest is the type of a request to cancel what another connection is doing, which comes alone on a
// connection of its own, number 0. It is not counted; if it is not forwarded, it is lost.
const CancelRequest byte = 0

// Is says whether the message is one of these types from the client.
func (m Message) Is(types ...byte) bool { return !m.FromServer && slices.Contains(types, m.Type) }

// Action is what becomes of a message.
type Action int

// To cut is to close both sides. The server then ends the session as soon as it has run all that it got: what was
// forwarded before the cut reaches it.
const (
	Forward   Action = iota
	CutBefore        // cut instead of forwarding it
	CutWithin        // forward its first half, then cut
	CutAfter         // forward it, then cut; an answer to it does not arrive
	Hold             // keep it, and all that would follow it in this direction; the server does not see the client leave
)

// Traffic is what passed since [Start] or [Proxy.Reset].
type Traffic struct {
	// RoundTrips counts how often a client began to send after the server had answered all it had sent before.
	// A client that sends on after a Sync without waiting may be counted once or twice, one that waits after a
	// Flush once too little.
	RoundTrips int

	Syncs      int      // Sync messages
	Queries    int      // Query messages, of the simple protocol
	Statements []string // the SQL of Execute and Query messages, in order
}

// Proxy passes connections on to one server. Its methods are safe for concurrent use.
type Proxy struct {
	url             string
	network, server string
	listener        net.Listener
	running         sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	hook     func(Message) Action
	toServer time.Duration
	toClient time.Duration
	traffic  Traffic
	accepted int
	links    map[*link]struct{}
}

// Start starts a proxy in front of the server that connString, a URL, leads to. It ends with the test.
func Start(t testing.TB, connString string) *Proxy {
	t.Helper()
	p, err := Open(t.Context(), connString)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.Close)
	return p
}

// Open is [Start] without a test: the proxy lasts until [Proxy.Close].
func Open(ctx context.Context, connString string) (*Proxy, error) {
	config, err := pgconn.ParseConfig(connString)
	if err != nil {
		return nil, fmt.Errorf("wire: %w", err)
	}
	u, err := url.Parse(connString)
	if err != nil || u.Host == "" && u.RawQuery == "" {
		return nil, errors.New("wire: the connection string is not a URL")
	}
	var lc net.ListenConfig
	listener, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("wire: %w", err)
	}

	p := &Proxy{listener: listener, links: make(map[*link]struct{})}
	p.network, p.server = pgconn.NetworkAddress(config.Host, config.Port)
	u.Host = listener.Addr().String()
	q := u.Query()
	for _, other := range []string{"host", "hostaddr", "port", "sslnegotiation"} {
		q.Del(other)
	}
	q.Set("sslmode", "disable")
	u.RawQuery = q.Encode()
	p.url = u.String()

	p.running.Go(p.accept)
	return p, nil
}

// URL leads to the same database through the proxy, without TLS.
func (p *Proxy) URL() string { return p.url }

// On sets what decides about each message; nil forwards all. hook is called for each message in the order of
// its direction, from several goroutines; while it has not returned, that direction of that connection stands
// still.
func (p *Proxy) On(hook func(Message) Action) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.hook = hook
}

// Delay sets how much later than sent a message arrives. It costs latency, not throughput.
func (p *Proxy) Delay(toServer, toClient time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.toServer, p.toClient = toServer, toClient
}

// Traffic returns what passed.
func (p *Proxy) Traffic() Traffic {
	p.mu.Lock()
	defer p.mu.Unlock()
	traffic := p.traffic
	traffic.Statements = slices.Clone(traffic.Statements)
	return traffic
}

// Reset forgets what passed.
func (p *Proxy) Reset() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.traffic = Traffic{}
}

// CutAll cuts all connections there are, in such a way that a client that sends afterwards fails before it has sent
// anything. New ones are accepted.
func (p *Proxy) CutAll() {
	p.mu.Lock()
	links := slices.Collect(maps.Keys(p.links))
	p.mu.Unlock()
	for _, l := range links {
		l.reset()
	}
}

// Cut is [Proxy.CutAll] for one connection, if it is still there.
func (p *Proxy) Cut(conn int) {
	p.mu.Lock()
	links := slices.Collect(maps.Keys(p.links))
	p.mu.Unlock()
	for _, l := range links {
		if l.number == conn {
			l.reset()
		}
	}
}

// Close ends everything, and waits until it has ended.
func (p *Proxy) Close() {
	p.mu.Lock()
	p.closed = true
	_ = p.listener.Close()
	for l := range p.links {
		l.cut()
		_ = l.server.Close()
	}
	p.mu.Unlock()
	p.running.Wait()
}

func (p *Proxy) accept() {
	for {
		client, err := p.listener.Accept()
		if err != nil {
			return
		}
		p.running.Go(func() { p.serve(client) })
	}
}

// conn is a side of a connection: TCP, or to the server also a Unix socket.
type conn interface {
	net.Conn
	CloseWrite() error
}

// link is a client's connection and the one to the server that belongs to it.
type link struct {
	number         int
	client, server conn
	once           sync.Once
	ended          chan struct{} // closed when the link is cut
	clientGone     chan struct{} // closed when the client's side is not read any more

	// What follows is under the proxy's mu.
	unanswered int               // Syncs and Queries without their ReadyForQuery
	executed   string            // by the last Execute since the last Sync
	clientNext bool              // the server has answered all, so that what the client sends begins a round trip
	prepared   map[string]string // SQL by statement name
	portals    map[string]string // SQL by portal name
}

// cut ends the client's side, and tells the server that nothing more will come. The server's side is read to its
// end, because closing it with answers unread could destroy what the server has not read yet.
func (l *link) cut() {
	l.once.Do(func() { close(l.ended) })
	_ = l.client.Close()
	_ = l.server.CloseWrite()
}

// reset cuts so that not even one more write of the client succeeds, as it would after an ordinary close.
func (l *link) reset() {
	if client, ok := l.client.(*net.TCPConn); ok {
		_ = client.SetLinger(0)
	}
	l.cut()
	<-l.clientGone // Close takes effect when nobody is in Read any more
}

func (p *Proxy) serve(accepted net.Conn) {
	defer accepted.Close()
	client, ok := accepted.(conn)
	if !ok {
		return
	}
	server, err := p.dial()
	if err != nil {
		return // the client sees that nobody is there, as it would without the proxy
	}
	defer server.Close()

	l := &link{
		client: client, server: server, ended: make(chan struct{}), clientGone: make(chan struct{}), clientNext: true,
		prepared: make(map[string]string), portals: make(map[string]string),
	}
	if !p.add(l) {
		return
	}
	defer p.remove(l)

	fromClient, fromServer := bufio.NewReaderSize(client, 1<<16), bufio.NewReaderSize(server, 1<<16)
	if !p.startUp(l, fromClient, fromServer) {
		close(l.clientGone)
		return
	}
	var both sync.WaitGroup
	both.Go(func() {
		p.pass(l, fromClient, server, false)
		close(l.clientGone)
		_ = server.CloseWrite()
	})
	both.Go(func() {
		p.pass(l, fromServer, client, true)
		_ = client.Close()
	})
	both.Wait()
}

func (p *Proxy) dial() (conn, error) {
	var d net.Dialer
	dialed, err := d.DialContext(context.Background(), p.network, p.server)
	if err != nil {
		return nil, err
	}
	server, ok := dialed.(conn)
	if !ok {
		return nil, fmt.Errorf("%T cannot be half closed", dialed)
	}
	return server, nil
}

func (p *Proxy) add(l *link) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return false
	}
	p.accepted++
	l.number = p.accepted
	p.links[l] = struct{}{}
	return true
}

func (p *Proxy) remove(l *link) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.links, l)
}

// Codes that stand where a StartupMessage has its protocol version.
const (
	cancelCode = 80877102
	sslCode    = 80877103
	gssCode    = 80877104
)

// startUp passes on everything until the server is ready for the first query, and says whether it came to that.
func (p *Proxy) startUp(l *link, fromClient, fromServer *bufio.Reader) bool {
	for {
		length, err := fromClient.Peek(4)
		if err != nil {
			return false
		}
		packet := make([]byte, binary.BigEndian.Uint32(length))
		if _, err := io.ReadFull(fromClient, packet); err != nil || len(packet) < 8 {
			return false
		}
		code := binary.BigEndian.Uint32(packet[4:])
		if code == sslCode || code == gssCode {
			if _, err := l.client.Write([]byte{'N'}); err != nil {
				return false
			}
			continue
		}
		if code == cancelCode {
			p.cancel(l, packet)
			return false
		}
		if _, err := l.server.Write(packet); err != nil {
			return false
		}
		break
	}

	// Question by question, so that nothing is read that belongs to the queries.
	for {
		m, err := readMessage(fromServer)
		if err != nil {
			return false
		}
		if _, err := l.client.Write(m); err != nil {
			return false
		}
		switch m[0] {
		case 'Z':
			return true
		case 'R':
			if !wantsAnswer(m) {
				continue
			}
			answer, err := readMessage(fromClient)
			if err != nil {
				return false
			}
			if _, err := l.server.Write(answer); err != nil {
				return false
			}
		default:
		}
	}
}

// cancel passes on a cancel request, and waits for the server to close, which says that it has sent the signal.
func (p *Proxy) cancel(l *link, packet []byte) {
	p.mu.Lock()
	hook := p.hook
	p.mu.Unlock()
	if hook != nil && hook(Message{Type: CancelRequest}) != Forward {
		return
	}
	if _, err := l.server.Write(packet); err == nil {
		_, _ = io.Copy(io.Discard, l.server)
	}
}

// wantsAnswer says whether an Authentication message is one that the client answers: all but AuthenticationOk and
// AuthenticationSASLFinal.
func wantsAnswer(m []byte) bool {
	kind := binary.BigEndian.Uint32(m[5:])
	return kind != 0 && kind != 12
}

// readMessage returns a whole message: its type, its length, and what it says.
func readMessage(r *bufio.Reader) ([]byte, error) {
	header, err := r.Peek(5)
	if err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(header[1:])
	if length < 4 || length > 1<<30 {
		return nil, errors.New("not a message")
	}
	m := make([]byte, 1+length)
	_, err = io.ReadFull(r, m)
	return m, err
}

// chunk is some messages that were sent together, and what comes after them.
type chunk struct {
	sent time.Time
	data []byte
	then Action
}

// pass moves messages of one direction until that ends.
func (p *Proxy) pass(l *link, from *bufio.Reader, to conn, fromServer bool) {
	// Reading goes on while earlier chunks are delayed. When the queue is full, the sender waits, as it would
	// for a slow network.
	chunks := make(chan chunk, 256)
	var writing sync.WaitGroup
	writing.Go(func() {
		for c := range chunks {
			p.write(l, to, c, fromServer)
		}
	})
	defer writing.Wait()
	defer close(chunks)

	var c chunk
	for {
		m, err := readMessage(from)
		if err != nil {
			return
		}
		if len(c.data) == 0 {
			c.sent = time.Now()
		}
		c.then = p.judge(l, m, fromServer)
		switch c.then {
		case CutBefore, Hold:
		case CutWithin:
			c.data = append(c.data, m[:len(m)/2]...)
		default:
			c.data = append(c.data, m...)
		}
		if c.then == Forward && from.Buffered() > 0 {
			continue
		}
		chunks <- c
		switch {
		case c.then == Forward:
			c = chunk{}
		case fromServer:
			_, _ = io.Copy(io.Discard, from)
			return
		case c.then == Hold:
			<-l.ended
			return
		default:
			return
		}
	}
}

// write delivers a chunk when it is due.
func (p *Proxy) write(l *link, to conn, c chunk, fromServer bool) {
	p.mu.Lock()
	delay := p.toServer
	if fromServer {
		delay = p.toClient
	}
	p.mu.Unlock()
	if delay > 0 {
		timer := time.NewTimer(time.Until(c.sent.Add(delay)))
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-l.ended: // what is under way in a connection that is cut is lost
			return
		}
	}
	cuts := c.then == CutBefore || c.then == CutWithin || c.then == CutAfter
	if cuts && !fromServer {
		_ = l.client.Close() // first, or the server's answer could get through
	}
	_, _ = to.Write(c.data) // an error is for the reader on the other side to see
	if cuts {
		l.cut()
	}
}

// judge counts a message and asks the hook about it.
func (p *Proxy) judge(l *link, m []byte, fromServer bool) Action {
	p.mu.Lock()
	message := Message{Conn: l.number, FromServer: fromServer, Type: m[0]}
	if fromServer {
		p.answer(l, &message, m[5:])
	} else {
		p.ask(l, &message, m[5:])
	}
	hook := p.hook
	p.mu.Unlock()
	if hook == nil {
		return Forward
	}
	return hook(message)
}

// ask keeps account of a message from the client.
func (p *Proxy) ask(l *link, m *Message, body []byte) {
	const terminate = 'X'
	if l.clientNext && m.Type != terminate {
		l.clientNext = false
		p.traffic.RoundTrips++
	}
	switch m.Type {
	case 'Q': // Query
		l.unanswered++
		p.traffic.Queries++
		m.Statement, _ = text(body)
		p.traffic.Statements = append(p.traffic.Statements, m.Statement)
	case 'S': // Sync
		l.unanswered++
		p.traffic.Syncs++
		m.Statement, l.executed = l.executed, ""
	case 'P': // Parse
		name, rest := text(body)
		m.Statement, _ = text(rest)
		l.prepared[name] = m.Statement
	case 'B': // Bind
		portal, rest := text(body)
		name, _ := text(rest)
		m.Statement = l.prepared[name]
		l.portals[portal] = m.Statement
	case 'E': // Execute
		portal, _ := text(body)
		m.Statement = l.portals[portal]
		l.executed = m.Statement
		p.traffic.Statements = append(p.traffic.Statements, m.Statement)
	default:
	}
}

// answer keeps account of a message from the server.
func (p *Proxy) answer(l *link, m *Message, body []byte) {
	switch m.Type {
	case 'C': // CommandComplete
		m.Tag, _ = text(body)
	case 'G': // CopyInResponse
		l.clientNext = true
	case 'Z': // ReadyForQuery
		l.unanswered--
		l.clientNext = l.unanswered == 0
	default:
	}
}

// text returns a zero-terminated string and what follows it.
func text(b []byte) (string, []byte) {
	before, after, _ := bytes.Cut(b, []byte{0})
	return string(before), after
}
