package main

import (
	"context"
	"sync"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// throttled gives rate bytes a second to all its readers together, as one disk or one connection does.
type throttled struct {
	gpuload.Source
	rate float64

	mu   sync.Mutex
	next time.Time // when all that was asked for has come
}

// late is how much a source may make up for after a wait that took too long.
const late = 20 * time.Millisecond

// wait returns when n more bytes have come.
func (s *throttled) wait(n int) {
	s.mu.Lock()
	now := time.Now()
	if begin := now.Add(-late); s.next.Before(begin) {
		s.next = begin
	}
	s.next = s.next.Add(time.Duration(float64(n) / s.rate * float64(time.Second)))
	until := s.next
	s.mu.Unlock()
	time.Sleep(until.Sub(now))
}

// Open implements gpuload.Source.
func (s *throttled) Open(ctx context.Context, name string) (gpuload.File, error) {
	f, err := s.Source.Open(ctx, name)
	if err != nil {
		return nil, err
	}
	slow := slowFile{f, s}
	if a, ok := f.(interface{ Align() int64 }); ok {
		return alignedFile{slow, a.Align()}, nil
	}
	return slow, nil
}

type slowFile struct {
	gpuload.File
	from *throttled
}

// ReadAt implements io.ReaderAt.
func (f slowFile) ReadAt(b []byte, off int64) (int, error) {
	n, err := f.File.ReadAt(b, off)
	f.from.wait(n)
	return n, err
}

type alignedFile struct {
	slowFile
	align int64
}

// Align implements what gpuload asks of files that are read past the page cache.
func (f alignedFile) Align() int64 { return f.align }

// most keeps the largest of the numbers that it sees.
type most struct {
	mu   sync.Mutex
	of   func() int64
	last int64
}

func (m *most) now() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.last = max(m.last, m.of())
	return m.last
}
