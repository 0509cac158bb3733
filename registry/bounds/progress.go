package bounds

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// ErrOverdue is the error of a body that has held memory for too long which others wait for.
var ErrOverdue = errors.New("others wait for the memory that this body takes")

// Body reads a request's body and gives the client another idle period before each read.
type Body struct {
	From     io.Reader
	Control  *http.ResponseController
	Idle     time.Duration
	Received *atomic.Int64 // over all requests
	Held     *Loan         // for what is read; may be nil

	N   int64
	Err error // the last one, unless it was the end
}

// Read implements io.Reader. ErrOverdue.
func (b *Body) Read(p []byte) (int, error) {
	if b.Held.Overdue(b.Idle) {
		b.Err = ErrOverdue
		return 0, b.Err
	}
	_ = b.Control.SetReadDeadline(time.Now().Add(b.Idle)) // not every ResponseWriter has deadlines
	n, err := b.From.Read(p)
	b.N += int64(n)
	b.Received.Add(int64(n))
	switch err {
	case nil:
	case io.EOF: // from here on the connection is read to see whether the client goes away, for as long as that takes
		_ = b.Control.SetReadDeadline(time.Time{})
	default:
		b.Err = err
	}
	return n, err
}

type connKey struct{}

// WithConn is for the ConnContext of an http.Server: it lets Taken know the connection of a request.
func WithConn(ctx context.Context, c net.Conn) context.Context {
	if t, ok := c.(*tls.Conn); ok {
		c = t.NetConn()
	}
	s, ok := c.(syscall.Conn)
	if !ok {
		return ctx
	}
	raw, err := s.SyscallConn()
	if err != nil {
		return ctx
	}
	return context.WithValue(ctx, connKey{}, raw)
}

// Taken returns how many bytes the client of a request has acknowledged since its connection was made. It is not known
// without WithConn, nor on systems other than Linux.
func Taken(ctx context.Context) (n uint64, known bool) {
	raw, ok := ctx.Value(connKey{}).(syscall.RawConn)
	if !ok {
		return 0, false
	}
	return acked(raw)
}

// Watch calls look again and again, until stop returns.
func Watch(every time.Duration, look func()) (stop func()) {
	var mu sync.Mutex
	var timer *time.Timer
	ended := false
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(every, func() {
		mu.Lock()
		defer mu.Unlock()
		if !ended {
			look()
			timer.Reset(every)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		ended = true
		timer.Stop()
	}
}
