package fetch

import (
	"cmp"
	"context"
	"io"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/internal/durable"
)

const burst = 100 * time.Millisecond // of bytes that may come at once after a pause

// limiter bounds the bytes a second of all connections together. A nil limiter bounds nothing.
type limiter struct {
	rate int64

	mu   sync.Mutex
	next time.Time // when the next byte may come
}

func newLimiter(rate int64) *limiter {
	if rate <= 0 {
		return nil
	}
	return &limiter{rate: rate}
}

// piece returns how many bytes to read at a time, so that none has to wait long.
func (l *limiter) piece() int64 {
	if l == nil {
		return durable.PieceSize
	}
	return max(1<<10, min(durable.PieceSize, l.rate/16))
}

// wait returns when n more bytes may have come.
func (l *limiter) wait(ctx context.Context, n int) error {
	if l == nil {
		return nil
	}
	d := l.reserve(n)
	if d <= 0 {
		return nil
	}
	return waitFor(ctx, nil, d)
}

func (l *limiter) reserve(n int) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := time.Now()
	if early := now.Add(-burst); l.next.Before(early) {
		l.next = early
	}
	l.next = l.next.Add(time.Duration(float64(n) / float64(l.rate) * float64(time.Second)))
	return l.next.Sub(now)
}

// reader is the body of an answer. All that comes in is read through one: it holds to the limit, and measures.
type reader struct {
	io.ReadCloser
	ctx context.Context
	f   *fetcher
	l   *lease
}

// Read returns errSlow, and what it read, if the source is to be given up.
func (r *reader) Read(b []byte) (int, error) {
	n, err := r.ReadCloser.Read(b[:min(int64(len(b)), r.f.limit.piece())])
	if n == 0 {
		return n, err
	}
	begun := time.Now()
	werr := r.f.limit.wait(r.ctx, n)
	slow := r.l.moved(n, time.Since(begun))
	return n, cmp.Or(err, slow, werr)
}

// fill is io.ReadFull, but does not replace the error of the reader.
func fill(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
	}
	return n, err
}

// pair is the buffers of one connection: one to read into while the bytes of the other are hashed.
type pair [2][]byte

// next returns the buffer that was used before the last one.
func (p *pair) next() []byte {
	p[0], p[1] = p[1], p[0]
	return p[0]
}
