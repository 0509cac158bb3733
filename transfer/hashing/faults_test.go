package hashing_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/transfer/hashing"
)

// meddled is a job during which something happens to its file, once, when the first bytes were hashed.
type meddled struct {
	job
	meddle func()
}

func (m *meddled) Moved(n int64) {
	m.job.Moved(n)
	if m.meddle != nil {
		m.meddle()
		m.meddle = nil
	}
}

// TestChanging: a file that changes its size or is removed while it is read is hashed as far as it is there; what that
// means is the job's to say.
func TestChanging(t *testing.T) {
	const size, less, more = 9 << 20, 5<<20 + 77, 12<<20 + 5
	truncate := func(to int64) func(path string) error {
		return func(path string) error { return os.Truncate(path, to) }
	}
	for _, tt := range []struct {
		name     string
		off, end int64
		do       func(path string) error
		want     func(b []byte) []byte
	}{
		{"shorter", 0, -1, truncate(less), func(b []byte) []byte { return b[:less] }},
		{"shorter part", 3, size - 1, truncate(less), func(b []byte) []byte { return b[3:less] }},
		{"longer", 0, -1, truncate(more), func(b []byte) []byte { return append(b, make([]byte, more-size)...) }},
		{"longer part", 0, size, truncate(more), func(b []byte) []byte { return b }},
		{"removed", 0, -1, os.Remove, func(b []byte) []byte { return b }},
	} {
		for _, cold := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, cold %v", tt.name, cold), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "file")
				b := fill(t, path, size)
				if cold {
					drop(t, path)
				}
				j := &meddled{job: job{path: path, off: tt.off, end: tt.end}, meddle: func() {
					if err := tt.do(path); err != nil {
						t.Error(err)
					}
				}}
				if err := hashing.Run(t.Context(), []*meddled{j}, hashing.Options{}); err != nil {
					t.Fatal(err)
				}
				want := tt.want(slices.Clip(b))
				if j.closed != 1 || j.moved != int64(len(want)) || j.got != identity.Sum(want) {
					t.Errorf("closed %d times, %d bytes of %d, %s", j.closed, j.moved, len(want), j.got)
				}
			})
		}
	}
}

// among runs a job with others, which must all be closed whatever becomes of it.
func among(t *testing.T, ctx context.Context, j hashing.Job) error {
	t.Helper()
	var opened atomic.Int32
	path := filepath.Join(t.TempDir(), "other")
	fill(t, path, 1<<20)
	jobs := []hashing.Job{j}
	for range 20 {
		jobs = append(jobs, &job{path: path, end: -1, opened: &opened})
	}
	err := hashing.Run(ctx, jobs, hashing.Options{})
	if n := opened.Load(); n != 0 {
		t.Errorf("%d are open", n)
	}
	return err
}

// asked is a job that answers Open as it was told to.
type asked struct {
	job
	open func() (hashing.Part, error)
	err  error // that it was closed with
}

func (a *asked) Open() (hashing.Part, error) {
	a.hash = identity.NewHash()
	p, err := a.open()
	p.To, a.in = a.hash, p.File
	return p, err
}

func (a *asked) Close(err error) error {
	a.err = err
	return a.job.Close(err)
}

// at returns the path that an error names.
func at(err error) string {
	if named, ok := errors.AsType[*fs.PathError](err); ok {
		return named.Path
	}
	return ""
}

// TestAway: a file that isn't there, or may not be read, ends the work with an error that names it.
func TestAway(t *testing.T) {
	path := filepath.Join(t.TempDir(), "away")
	err := among(t, t.Context(), &job{path: path, end: -1})
	if !errors.Is(err, fs.ErrNotExist) || at(err) != path {
		t.Errorf("away: %v", err)
	}
	fill(t, path, 1<<20)
	j := &asked{open: func() (p hashing.Part, err error) {
		p.File, err = os.OpenFile(path, os.O_WRONLY, 0)
		p.End = -1
		return p, err
	}}
	err = among(t, t.Context(), j)
	if !errors.Is(err, unix.EBADF) || at(err) != path || j.closed != 1 {
		t.Errorf("only to write: %v, closed %d times", err, j.closed)
	}
}

// TestNothingToRead: a job may find that there is nothing to do, and the others go on.
func TestNothingToRead(t *testing.T) {
	j := &asked{open: func() (hashing.Part, error) { return hashing.Part{}, hashing.ErrNothing }}
	if err := among(t, t.Context(), j); err != nil || j.closed != 0 {
		t.Errorf("%v, closed %d times", err, j.closed)
	}
}

// TestReadError: a read that fails in the middle of a file ends the work, and its job learns why and how far it came.
// The file is this process's memory, a part of which is none: the pages behind the end of a file that is mapped.
func TestReadError(t *testing.T) {
	const good = 5<<20 + 4096
	path := filepath.Join(t.TempDir(), "file")
	b := fill(t, path, good)
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := unix.MmapPtr(int(f.Fd()), 0, nil, 2*good, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.MunmapPtr(m, 2*good); err != nil {
			t.Error(err)
		}
	}()
	start := int64(uintptr(m))
	j := &asked{open: func() (p hashing.Part, err error) {
		p.File, err = os.Open("/proc/self/mem")
		p.Off, p.End = start, start+2*good
		return p, err
	}}
	err = among(t, t.Context(), j)
	if !errors.Is(err, unix.EIO) || at(err) != "/proc/self/mem" {
		t.Errorf("got %v", err)
	}
	if j.closed != 1 || !errors.Is(j.err, unix.EIO) || j.moved != good || j.got != identity.Sum(b) {
		t.Errorf("closed %d times with %v, %d bytes of %d, %s", j.closed, j.err, j.moved, good, j.got)
	}
}

// TestCancelledBefore: nothing is opened when there is no time for it.
func TestCancelledBefore(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errJob)
	j := &asked{open: func() (hashing.Part, error) {
		t.Error("opened")
		return hashing.Part{}, errJob
	}}
	if err := hashing.Run(ctx, []*asked{j}, hashing.Options{}); !errors.Is(err, errJob) || j.closed != 0 {
		t.Errorf("%v, closed %d times", err, j.closed)
	}
}
