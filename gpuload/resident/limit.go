package resident

import (
	"encoding/json"
	"fmt"
	"net"
	"sync"

	"github.com/kiln-registry/kiln-registry/gpuload/attach"
)

// limited refuses connections beyond the limit.
type limited struct {
	net.Listener
	places  chan struct{}
	refused func(code string) // is told of each that was
}

// limit bounds the connections of a listener that are open at a time.
func (s *Server) limit(l net.Listener, connections int) *limited {
	return &limited{l, make(chan struct{}, connections), s.refused.add}
}

// Accept implements net.Listener.
func (l *limited) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		select {
		case l.places <- struct{}{}:
			closed := sync.OnceFunc(func() { <-l.places })
			if u, is := c.(*net.UnixConn); is {
				return &connection{u, closed}, nil
			}
			return &counted{c, closed}, nil
		default:
		}
		e := attach.Refuse(attach.CodeBusy, "%d connections are open", cap(l.places))
		l.refused(e.Code)
		text, _ := json.Marshal(e) // of two strings
		_, _ = fmt.Fprintf(c, "HTTP/1.1 %d Busy\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", e.Status(),
			len(text), text) // fits into the socket's buffer
		c.Close()
	}
}

// connection is a connection of the socket that counts until it is closed.
type connection struct {
	*net.UnixConn
	closed func()
}

// Close implements net.Conn.
func (c *connection) Close() error {
	c.closed()
	return c.UnixConn.Close()
}

// counted is any other connection that counts until it is closed.
type counted struct {
	net.Conn
	closed func()
}

// Close implements net.Conn.
func (c *counted) Close() error {
	c.closed()
	return c.Conn.Close()
}
