package devicetest

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/identity"
)

// shelf is a gpuload.Keeper in memory that fails where before says so, and remembers what it was used for.
type shelf struct {
	before func(op string, n int) error // of keep, write, commit, close; n counts from 1; nil: nothing fails

	mu    sync.Mutex
	count map[string]int
	books map[string]*book
	wrong []string // what nobody may do
}

type book struct {
	on        *shelf
	name      string
	size      int64
	b         []byte
	failed    int64 // the offset of the write that failed; -1: none
	committed bool
	closed    bool
}

func (s *shelf) begin(op string) error {
	s.mu.Lock()
	if s.count == nil {
		s.count, s.books = map[string]int{}, map[string]*book{}
	}
	s.count[op]++
	n := s.count[op]
	s.mu.Unlock()
	if s.before == nil {
		return nil
	}
	return s.before(op, n)
}

func (s *shelf) misused(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wrong = append(s.wrong, fmt.Sprintf(format, args...))
}

// Keep implements gpuload.Keeper.
func (s *shelf) Keep(shard string, size int64) (gpuload.Kept, error) {
	if err := s.begin("keep"); err != nil {
		return nil, err
	}
	k := &book{on: s, name: shard, size: size, failed: -1}
	s.mu.Lock()
	s.books[shard] = k
	s.mu.Unlock()
	return k, nil
}

// WriteAt implements gpuload.Kept. It is slow, so that a buffer that is used again too early is noticed.
func (k *book) WriteAt(b []byte, off int64) (int, error) {
	if off != int64(len(k.b)) || k.failed >= 0 || k.committed || k.closed {
		k.on.misused("%s: written at %d, of %d bytes", k.name, off, len(k.b))
	}
	if err := k.on.begin("write"); err != nil {
		k.failed = off
		return 0, err
	}
	for range 100 {
		runtime.Gosched()
	}
	k.b = append(k.b, b...)
	return len(b), nil
}

// Commit implements gpuload.Kept.
func (k *book) Commit(d identity.Digest) error {
	if d != identity.Sum(k.b) || int64(len(k.b)) != k.size || k.failed >= 0 || k.committed || k.closed {
		k.on.misused("%s: committed as %s with %d of %d bytes", k.name, d, len(k.b), k.size)
	}
	if err := k.on.begin("commit"); err != nil {
		return err
	}
	k.committed = true
	return nil
}

// Close implements gpuload.Kept.
func (k *book) Close() error {
	if k.closed {
		k.on.misused("%s: closed twice", k.name)
	}
	k.closed = true
	return k.on.begin("close")
}

// check compares what was kept with the files: whole and committed where all went well.
func (s *shelf) check(t *testing.T, m *model, all bool) {
	t.Helper()
	for _, w := range s.wrong {
		t.Error(w)
	}
	for name, k := range s.books {
		if !k.closed {
			t.Errorf("%s was not closed", name)
		}
		if k.committed && !bytes.Equal(k.b, m.files[name]) || all && !k.committed {
			t.Errorf("%s: committed %t, with %d bytes for %d", name, k.committed, len(k.b), len(m.files[name]))
		}
	}
	if all && len(s.books) != len(m.files) {
		t.Errorf("%d of %d shards were kept", len(s.books), len(m.files))
	}
}

func (s *shelf) options(o *gpuload.Options) { o.Keep = s }

// keeps keeps a model on a disk besides, and has the disk fail.
func keeps(t *testing.T, s Subject) {
	m := newModel(t)
	good := keptWhole(t, s, m)
	src := m.source(t)
	p := m.plan(t, src, m.want(t))
	writes := good.count["write"]
	for op, numbers := range map[string][]int{
		"keep": {1, 3}, "write": {1, writes / 2, writes}, "commit": {1, 3}, "close": {1, 3},
	} {
		for _, n := range numbers {
			t.Run(fmt.Sprint(op, " ", n), func(t *testing.T) {
				to := &shelf{before: failAt(op, n, ErrInjected)}
				err := refused(t, s, t.Context(), p, src, &Faulty{With: to.options}, gpuload.ErrDisk)
				to.check(t, m, false)
				to.blamed(t, err)
			})
		}
	}
	t.Run("full", func(t *testing.T) {
		to := &shelf{before: failAt("write", writes/2, full(t))}
		refused(t, s, t.Context(), p, src, &Faulty{With: to.options}, syscall.ENOSPC)
		to.check(t, m, false)
	})
	t.Run("equal headers, other values", func(t *testing.T) { otherValues(t, s, m) })
}

// keptWhole keeps a model whose buffers are filled piece by piece and used again as early as they may be.
func keptWhole(t *testing.T, s Subject, m *model) *shelf {
	t.Helper()
	to, read := new(shelf), map[string]int64{}
	src := counting(slow(m.source(t)), read)
	o := options()
	o.Ring = 2
	o.Keep = to
	r, err := gpuload.Load(t.Context(), m.plan(t, src, m.want(t)), src, s.New(t), o)
	mustDo(t, err)
	defer closed(t, r)
	to.check(t, m, true)
	for name, b := range m.files {
		if read[name] != int64(len(b)) {
			t.Errorf("%s: %d bytes read for %d", name, read[name], len(b))
		}
	}
	if r.Stats().Disk == 0 {
		t.Error("the disk took no time")
	}
	return to
}

// otherValues loads a checkpoint with the headers of another one: nothing of the shard that differs is committed.
func otherValues(t *testing.T, s Subject, good *model) {
	for _, name := range good.names() {
		m := good.changed(t, name, func(b []byte) []byte { return sealLike(b, 7) })
		src, to := m.source(t), new(shelf)
		p := m.plan(t, src, good.want(t))
		blames(t, refused(t, s, t.Context(), p, src, &Faulty{With: to.options}, gpuload.ErrMismatch), name)
		to.check(t, good, false)
	}
}

func failAt(op string, n int, err error) func(string, int) error {
	return func(o string, i int) error {
		if o == op && i == n {
			return err
		}
		return nil
	}
}

// full is what the kernel says when a disk is full.
func full(t *testing.T) error {
	f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	mustDo(t, err)
	defer f.Close()
	if _, err = f.WriteAt([]byte{1}, 0); !errors.Is(err, syscall.ENOSPC) {
		t.Fatal(err)
	}
	return err
}

// blamed checks that an error names the shard, and the offset of the write that failed.
func (s *shelf) blamed(t *testing.T, err error) {
	t.Helper()
	var e *gpuload.Error
	if !errors.As(err, &e) || e.Shard == "" {
		t.Fatalf("%v; want a shard named", err)
	}
	if k := s.books[e.Shard]; k != nil && k.failed >= 0 && e.Offset != k.failed {
		t.Errorf("%v; the write at %d failed", err, k.failed)
	}
}
