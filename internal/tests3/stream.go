package tests3

import (
	"bytes"
	"io"
	"net/http"
)

// onBody calls do when byte n of the request's body was read and all before it was passed on. b begins with that byte
// and do may change it; an error ends the body.
func onBody(n int64, do func(r *http.Request, b []byte) error) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			if r.ContentLength != 0 { // a wrapped empty body would be sent in chunks
				r.Body = &body{ReadCloser: r.Body, left: n, do: func(b []byte) error { return do(r, b) }}
			}
			next.ServeHTTP(w, r)
		})
	}
}

type body struct {
	io.ReadCloser
	left int64 // before do
	do   func(b []byte) error
	done bool
}

func (b *body) Read(p []byte) (int, error) {
	if b.left > 0 && int64(len(p)) > b.left {
		p = p[:b.left]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left == 0 && n > 0 && !b.done {
		b.done = true
		if err := b.do(p[:n]); err != nil {
			return 0, err
		}
		return n, err
	}
	b.left -= min(b.left, int64(n))
	return n, err
}

// onAnswer calls do when the answer's body comes to byte n and all before it was sent. b begins with that byte and do
// may change it.
func onAnswer(n int64, do func(w http.ResponseWriter, r *http.Request, b []byte)) Fault {
	return func(next http.Handler) http.Handler {
		return serve(func(w http.ResponseWriter, r *http.Request) {
			next.ServeHTTP(&answer{ResponseWriter: w, left: n, do: func(b []byte) { do(w, r, b) }}, r)
		})
	}
}

type answer struct {
	http.ResponseWriter
	left int64 // before do
	do   func(b []byte)
	done bool
}

func (a *answer) Unwrap() http.ResponseWriter { return a.ResponseWriter }

func (a *answer) Write(b []byte) (int, error) {
	if a.done || int64(len(b)) <= a.left {
		a.left -= min(a.left, int64(len(b)))
		return a.ResponseWriter.Write(b)
	}
	n, err := a.ResponseWriter.Write(b[:a.left])
	if err != nil {
		return n, err
	}
	if err := http.NewResponseController(a.ResponseWriter).Flush(); err != nil {
		return n, err
	}
	a.done = true
	rest := bytes.Clone(b[a.left:])
	a.do(rest)
	m, err := a.ResponseWriter.Write(rest)
	return n + m, err
}

// headed changes the headers of an answer before they are sent.
type headed struct {
	http.ResponseWriter
	change func(http.Header)
}

func (h *headed) Unwrap() http.ResponseWriter { return h.ResponseWriter }

func (h *headed) WriteHeader(status int) {
	h.change(h.Header())
	h.ResponseWriter.WriteHeader(status)
}

// kept keeps an answer instead of sending it.
type kept struct {
	header http.Header
	status int
	body   bytes.Buffer
}

func (k *kept) Header() http.Header         { return k.header }
func (k *kept) WriteHeader(status int)      { k.status = status }
func (k *kept) Write(b []byte) (int, error) { return k.body.Write(b) }
func (k *kept) FlushError() error           { return nil }
