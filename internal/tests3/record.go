package tests3

import (
	"bytes"
	"context"
	"io"
	"net/http"
	"sync"
)

// Recording keeps requests, to send them again: a network that delivers twice, or late. The zero value is empty.
type Recording struct {
	mu       sync.Mutex
	requests []*http.Request
	bodies   [][]byte
}

// Record keeps the request whole before it passes it on. Followed by Reset, the request is lost now and Replay delivers
// it late.
func Record(rec *Recording) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			b, err := io.ReadAll(r.Body)
			if err != nil {
				reset(w, r)
			}
			rec.add(r, b)
			next.ServeHTTP(w, request(r, r.Context(), b))
		})
	}
}

func (rec *Recording) add(r *http.Request, body []byte) {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	rec.requests, rec.bodies = append(rec.requests, r), append(rec.bodies, body)
}

// request returns r with a body to be read.
func request(r *http.Request, ctx context.Context, b []byte) *http.Request {
	r = r.Clone(ctx)
	r.Body = io.NopCloser(bytes.NewReader(b))
	if len(b) == 0 {
		r.Body = http.NoBody
	}
	return r
}

// Replay sends what was kept to S3, in the order in which it came, and returns the status of each answer, 0 where there
// was none. No rule breaks it and no count includes it. It may be called again.
func (rec *Recording) Replay() []int {
	rec.mu.Lock()
	defer rec.mu.Unlock()
	statuses := make([]int, len(rec.requests))
	for i, r := range rec.requests {
		statuses[i] = originOf(r).proxy.replay(request(r, context.WithoutCancel(r.Context()), rec.bodies[i]))
	}
	return statuses
}

// replay sends a request of which nobody waits for the answer.
func (p *Proxy) replay(r *http.Request) int {
	resp, err := p.send(r)
	if err != nil {
		return 0
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode
}
