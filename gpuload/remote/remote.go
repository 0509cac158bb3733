// Package remote gives a load the shards of a base straight from a registry: what comes over the network is read into
// the buffers of the load and is nowhere else. Nothing that a registry says is believed: the load hashes the bytes.
package remote

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

const (
	headBytes = 64 << 10  // of a shard that are asked for with its header, so that one request has most headers whole
	maxHead   = 128 << 20 // bytes of a shard that are kept for its header: more than a header may have
	maxPassed = 8         // times the size of a shard that may come in vain from a server that sends no parts
)

// Source reads the shards of one base. It is a gpuload.Source, safe for concurrent use. Made by New.
type Source struct {
	client *client.Client
	repo   string
	shards map[string]identity.Shard

	mu    sync.Mutex // guards heads
	heads map[string][]byte
}

// New returns the source of the shards of base, which a repository of the registry of c has as blobs.
func New(c *client.Client, repo string, base identity.Manifest) *Source {
	s := &Source{client: c, repo: repo, shards: map[string]identity.Shard{}, heads: map[string][]byte{}}
	for _, shard := range base.Shards {
		s.shards[shard.Filename] = shard
	}
	return s
}

// Stage is what reading is called in the account of a load.
func (s *Source) Stage() string { return "network" }

// Open opens a shard by its file name. The first one to do so is taken to be after the header: it asks for what it
// reads and little more, which is kept. Each later one reads behind that with one request, as long as it reads in order: so
// every byte is received once. Requests end with ctx.
//
// ReadAt asks again for what is missing where an answer is cut off or stalls, or the server has trouble, as
// client.Retry says; a server that sends no parts has to begin anew. Stamp gives the size that the base states: an
// answer of another size is client.ErrNotBlob.
func (s *Source) Open(ctx context.Context, name string) (gpuload.File, error) {
	shard, ok := s.shards[name]
	if !ok {
		return nil, fmt.Errorf("open shard %s: the base has none of that name", name)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_, known := s.heads[name]
	if !known {
		s.heads[name] = nil
	}
	return &file{s: s, ctx: ctx, Shard: shard, size: int64(shard.Size), first: !known}, nil
}

func (s *Source) head(name string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.heads[name]
}

// file is one shard that is read. Its body gives bytes from at on.
type file struct {
	s   *Source
	ctx context.Context
	identity.Shard
	size  int64
	first bool // it reads the header

	body   io.ReadCloser // nil: none is open
	at     int64
	passed int64 // bytes that came in vain
}

// Stamp implements gpuload.File.
func (f *file) Stamp() (gpuload.Stamp, error) { return gpuload.Stamp{Size: f.size}, nil }

// ReadAt implements gpuload.File.
func (f *file) ReadAt(b []byte, off int64) (n int, err error) {
	end := io.EOF
	if n := f.size - off; int64(len(b)) > n {
		b = b[:max(0, n)]
	} else {
		end = nil
	}
	if f.first {
		if err := f.grow(off + int64(len(b))); err != nil {
			return 0, err
		}
	}
	if head := f.s.head(f.Filename); off < int64(len(head)) {
		n = copy(b, head[off:])
	}
	if n < len(b) {
		m, err := f.read(b[n:], off+int64(n), f.size)
		if n += m; err != nil {
			return n, err
		}
	}
	return n, end
}

// grow makes the head reach up to end, if it may be that long.
func (f *file) grow(end int64) error {
	head := f.s.head(f.Filename)
	have := int64(len(head))
	if end <= have || end > maxHead {
		return nil
	}
	end = min(max(end, headBytes), f.size)
	head = append(make([]byte, 0, end), head...)[:end]
	if _, err := f.read(head[have:], have, end); err != nil {
		return errors.Join(err, f.Close())
	}
	f.s.mu.Lock()
	defer f.s.mu.Unlock()
	f.s.heads[f.Filename] = head
	return f.Close()
}

// read fills b from off, through an answer that is open there, or is opened to give the bytes up to end.
func (f *file) read(b []byte, off, end int64) (n int, err error) {
	err = f.s.client.Retry(f.ctx, f.Filename, func() error {
		if f.body != nil && f.at != off+int64(n) {
			_ = f.Close()
		}
		if f.body == nil {
			if err := f.open(off+int64(n), end); err != nil {
				return err
			}
		}
		m, err := io.ReadFull(f.body, b[n:])
		n += m
		f.at += int64(m)
		if err != nil {
			_ = f.Close() // what went wrong is told already
		}
		return err
	})
	if errors.Is(err, io.EOF) { // which would say that the shard ends here
		err = cut{err}
	}
	return n, err
}

// cut is an answer that ended too early.
type cut struct{ error }

// Unwrap returns io.ErrUnexpectedEOF.
func (cut) Unwrap() error { return io.ErrUnexpectedEOF }

// open asks for the bytes from off up to end. Where the server sends no parts, it reads up to off in vain.
func (f *file) open(off, end int64) error {
	body, err := f.s.client.Blob(f.ctx, f.s.repo, f.Digest, off, end-off, f.size)
	if errors.Is(err, client.ErrRangeIgnored) {
		if f.passed/maxPassed > f.size {
			return fmt.Errorf("%s sends no parts, and broke off again and again: %d bytes of it came that were here before",
				f.s.client.Host(), f.passed)
		}
		if body, err = f.s.client.Whole(f.ctx, f.s.repo, f.Digest, off, f.size); err == nil {
			n, skip := io.CopyN(io.Discard, body, off)
			if f.passed += n; skip != nil {
				_ = body.Close() // what went wrong is told already
				return skip
			}
		}
	}
	if err != nil {
		return err
	}
	f.body, f.at = body, off
	return nil
}

// Close implements gpuload.File.
func (f *file) Close() error {
	if f.body == nil {
		return nil
	}
	err := f.body.Close()
	f.body = nil
	return err
}
