package tests3

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// Fault is what goes wrong with a request: it stands before next, which passes the request on. Any middleware is one.
//
// Faults that count bytes count those of the HTTP body. minio-go over plain HTTP signs a body in chunks of 64 KiB, each
// with some 90 bytes before it, unless PutObjectOptions.DisableContentSha256 is set.
type Fault func(next http.Handler) http.Handler

// Answer refuses the request as S3 does, after its body was read. S3 never sees it.
func Answer(status int, code string) Fault {
	return instead(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			reset(w, r)
		}
		body := fmt.Appendf(nil, "%s<Error><Code>%s</Code><Message>injected by a test</Message><Resource>", xml.Header, code)
		var resource bytes.Buffer
		_ = xml.EscapeText(&resource, []byte(r.URL.Path)) // a Buffer takes everything
		body = fmt.Appendf(body, "%s</Resource><RequestId>test</RequestId></Error>", resource.Bytes())
		w.Header().Set("Content-Type", "application/xml")
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		w.WriteHeader(status)
		_, _ = w.Write(body) // a client that has left needs none
	})
}

// Reset breaks the connection once the headers are read. S3 never sees the request.
func Reset() Fault { return instead(reset) }

// Persisted lets S3 do what the request asks, drops its answer, and then does fault, which is an Answer or a Reset: the
// change happened, and the client doesn't know.
func Persisted(fault Fault) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(&kept{header: http.Header{}}, r.WithContext(context.WithoutCancel(r.Context())))
			r.Body = http.NoBody // it is read and closed
			fault(Answer(http.StatusInternalServerError, "InternalError")(nil)).ServeHTTP(w, r)
		})
	}
}

// CutRequest passes n bytes of the body on and then breaks both connections. A body of at most n bytes passes whole.
func CutRequest(n int64) Fault {
	return onBody(n, func(*http.Request, []byte) error { return errors.New("cut by a test") })
}

// CutAnswer resets the connection after at most n bytes of the answer's body. A body of at most n bytes passes whole.
func CutAnswer(n int64) Fault {
	return onAnswer(n, func(w http.ResponseWriter, r *http.Request, _ []byte) { reset(w, r) })
}

// FlipRequest turns a bit in byte n of the body on its way to S3, counted from 0.
func FlipRequest(n int64) Fault {
	return onBody(n, func(_ *http.Request, b []byte) error {
		b[0] ^= 1
		return nil
	})
}

// FlipAnswer turns a bit in byte n of the answer's body, counted from 0.
func FlipAnswer(n int64) Fault {
	return onAnswer(n, func(_ http.ResponseWriter, _ *http.Request, b []byte) { b[0] ^= 1 })
}

// AnswerHeader changes one header of the answer; an empty value removes it.
func AnswerHeader(name, value string) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(&headed{ResponseWriter: w, change: func(h http.Header) {
				if h.Del(name); value != "" {
					h.Set(name, value)
				}
			}}, r)
		})
	}
}

// EditAnswer holds the answer until it is whole and changes its headers and its body, whose length may change too.
func EditAnswer(edit func(h http.Header, body []byte) []byte) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			k := &kept{header: http.Header{}}
			next.ServeHTTP(k, r)
			body := edit(k.header, k.body.Bytes())
			maps.Copy(w.Header(), k.header)
			if r.Method != http.MethodHead {
				w.Header().Set("Content-Length", strconv.Itoa(len(body)))
			}
			w.WriteHeader(k.status)
			_, _ = w.Write(body) // a client that has left needs none
		})
	}
}

// Stall holds the request back before S3 sees any of it, until the gate opens or the client gives up.
func Stall(g *Gate) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			g.wait(w, r)
			next.ServeHTTP(w, r)
		})
	}
}

// StallRequest passes n bytes of the body on and then no more, until the gate opens or the client gives up. A body of
// at most n bytes passes whole.
func StallRequest(n int64, g *Gate) Fault {
	return onBody(n, func(r *http.Request, _ []byte) error { return g.hold(r) })
}

// StallAnswer sends n bytes of the answer's body and then no more, until the gate opens or the client gives up. A body
// of at most n bytes passes whole.
func StallAnswer(n int64, g *Gate) Fault {
	return onAnswer(n, func(w http.ResponseWriter, r *http.Request, _ []byte) { g.wait(w, r) })
}

// Gate holds requests back until it opens. NewGate makes one.
type Gate struct {
	reached, open       chan struct{}
	reachOnce, openOnce sync.Once
}

// NewGate returns a closed gate.
func NewGate() *Gate { return &Gate{reached: make(chan struct{}), open: make(chan struct{})} }

// Reached is closed when the first request stands at the gate.
func (g *Gate) Reached() <-chan struct{} { return g.reached }

// Open lets all through that wait, and all that come.
func (g *Gate) Open() { g.openOnce.Do(func() { close(g.open) }) }

func (g *Gate) wait(w http.ResponseWriter, r *http.Request) {
	if err := g.hold(r); err != nil {
		reset(w, r)
	}
}

// hold returns nil when the gate opens, and an error when the client has left or the proxy ends.
func (g *Gate) hold(r *http.Request) error {
	g.reachOnce.Do(func() { close(g.reached) })
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-g.open:
			return nil
		case <-r.Context().Done():
			return r.Context().Err()
		case <-originOf(r).proxy.ended:
			return errors.New("the proxy ends")
		case <-tick.C:
			if gone(originOf(r).conn) {
				return errors.New("the client has given up")
			}
		}
	}
}

type serve = http.HandlerFunc

// instead answers without passing the request on.
func instead(h serve) Fault { return func(http.Handler) http.Handler { return h } }
