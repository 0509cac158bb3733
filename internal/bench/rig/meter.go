package rig

import (
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
)

// Meter lies between a client and a server and counts the bytes of both ways, headers too.
type Meter struct {
	URL string

	to             string
	listener       net.Listener
	running        sync.WaitGroup
	sent, received atomic.Int64
}

// NewMeter listens on a free loopback port and passes everything on to the server at url, until Close.
func NewMeter(url string) (*Meter, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	m := &Meter{URL: "http://" + l.Addr().String(), to: strings.TrimPrefix(url, "http://"), listener: l}
	m.running.Go(m.accept)
	return m, nil
}

func (m *Meter) accept() {
	for {
		c, err := m.listener.Accept()
		if err != nil {
			return
		}
		m.running.Go(func() { m.pass(c) })
	}
}

// pass carries one connection. When either side is done, both are.
func (m *Meter) pass(client net.Conn) {
	defer client.Close()
	server, err := net.Dial("tcp", m.to)
	if err != nil {
		return
	}
	var back sync.WaitGroup
	back.Go(func() {
		io.Copy(counter{client, &m.received}, server) // an end of either side shows there
		client.Close()
	})
	io.Copy(counter{server, &m.sent}, client)
	server.Close()
	back.Wait()
}

type counter struct {
	io.Writer
	n *atomic.Int64
}

func (c counter) Write(p []byte) (int, error) {
	c.n.Add(int64(len(p))) // first, so that whoever has received them finds them counted
	return c.Writer.Write(p)
}

// Take returns the bytes that went either way since it was last asked.
func (m *Meter) Take() (sent, received int64) { return m.sent.Swap(0), m.received.Swap(0) }

// Close ends it. Clients and server must be done with their connections.
func (m *Meter) Close() {
	m.listener.Close()
	m.running.Wait()
}
