package devicetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// refused loads what must not become resident, and checks what is left of it.
func refused(
	t *testing.T, s Subject, ctx context.Context, p gpuload.Plan, src gpuload.Source, f *Faulty, reason error,
) error {
	t.Helper()
	before := s.Held(t)
	f.Target = s.New(t)
	var last gpuload.State
	o := options()
	o.VerifyDevice = f.Verify
	o.Observe = func(st gpuload.State) { last = st }
	if f.With != nil {
		f.With(&o)
	}
	r, err := gpuload.Load(ctx, p, src, f, o)
	s.tally.faults++
	switch {
	case err == nil:
		s.tally.published++
		t.Errorf("loaded, want an error that is %q", reason)
		closed(t, r)
		return nil
	case !errors.Is(err, reason):
		t.Errorf("%v; want an error that is %q", err, reason)
	case strings.Contains(err.Error(), "\n"):
		t.Errorf("an error of several lines: %q", err)
	}
	if last != gpuload.Failed {
		t.Errorf("state %s after a failed load", last)
	}
	if f.Published != 0 {
		t.Errorf("%d handles were left", f.Published)
	}
	if f.Count("publish") > 0 && !f.FailPublish {
		t.Error("published before all was checked")
	}
	if after := s.Held(t); after != before {
		t.Errorf("%d bytes held, %d before", after, before)
	}
	return err
}

// blames checks which shard an error names.
func blames(t *testing.T, err error, shard string) {
	t.Helper()
	var e *gpuload.Error
	if err != nil && (!errors.As(err, &e) || e.Shard != shard) {
		t.Errorf("%v; want the blame on %s", err, shard)
	}
}

// faults are those of the target.
func faults(t *testing.T, s Subject) {
	m := newModel(t)
	src := m.source(t)
	p := m.plan(t, src, m.want(t))
	f := &Faulty{Target: s.New(t)}
	r, err := gpuload.Load(t.Context(), p, src, f, options())
	if err != nil {
		t.Fatal(err)
	}
	closed(t, r)
	copies, need := f.Count("submit"), f.Asked
	if copies < 50 {
		t.Fatalf("only %d copies", copies)
	}
	for _, n := range []int{1, copies / 2, copies} {
		blamesAny(t, refused(t, s, t.Context(), p, src, &Faulty{FailSubmit: n}, ErrInjected))
		blamesAny(t, refused(t, s, t.Context(), p, src, &Faulty{FailToken: n}, gpuload.ErrDevice))
		refused(t, s, t.Context(), p, src, &Faulty{DropCopy: n}, gpuload.ErrDevice)
	}
	for i, name := range m.names() {
		f := &Faulty{FailAlloc: i + 1}
		blames(t, refused(t, s, t.Context(), p, src, f, gpuload.ErrDevice), name)
		if f.Count("submit") != 0 {
			t.Errorf("%d copies before all memory was there", f.Count("submit"))
		}
	}
	f = &Faulty{FailPublish: true}
	refused(t, s, t.Context(), p, src, f, ErrInjected)
	f = &Faulty{Room: need - 1}
	err = refused(t, s, t.Context(), p, src, f, gpuload.ErrMemory)
	if err != nil && !strings.Contains(err.Error(), fmt.Sprint(need-1, " are free")) {
		t.Errorf("%v; want both numbers", err)
	}
	if f.Count("alloc") != 0 {
		t.Error("memory was taken though there is too little")
	}
	stamped(t, s, m)
}

func blamesAny(t *testing.T, err error) {
	t.Helper()
	var e *gpuload.Error
	if err != nil && (!errors.As(err, &e) || e.Shard == "") {
		t.Errorf("%v; want a shard named", err)
	}
}

// stamped asks for another aggregate than the bytes have: each shard is whole, the set is not the one meant.
func stamped(t *testing.T, s Subject, m *model) {
	other := m.manifest(t).Aggregate
	other[31] ^= 1
	src := m.source(t)
	p := m.plan(t, src, gpuload.Want{Aggregate: other})
	err := refused(t, s, t.Context(), p, src, &Faulty{}, gpuload.ErrMismatch)
	if err != nil && (!strings.Contains(err.Error(), other.String()) ||
		!strings.Contains(err.Error(), m.manifest(t).Aggregate.String())) {
		t.Errorf("%v; want both aggregates", err)
	}
}

// sourceFaults are those of the files: found at the plan or at the load, never later.
func sourceFaults(t *testing.T, s Subject) {
	const name = "model-00002-of-00003.safetensors"
	good := newModel(t)
	w, size := good.want(t), len(good.files[name])
	start := size - len(good.data(name))
	for _, at := range []int{0, 7, 8, start - 1, start, start + (size-start)/2, size - 1} {
		m := good.changed(t, name, func(b []byte) []byte { b[at] ^= 1; return b })
		t.Run(fmt.Sprintf("flip %d", at), func(t *testing.T) { blames(t, badFiles(t, s, m, w), name) })
	}
	for what, change := range map[string]func([]byte) []byte{
		"truncated":    func(b []byte) []byte { return b[:len(b)-1] },
		"extra":        func(b []byte) []byte { return append(b, 0) },
		"empty":        func(b []byte) []byte { return nil },
		"header":       func(b []byte) []byte { return append(b[:8:8], bytes.Repeat([]byte("x"), len(b)-8)...) },
		"other values": func([]byte) []byte { return sealLike(good.files[name], 77) },
	} {
		t.Run(what, func(t *testing.T) { badFiles(t, s, good.changed(t, name, change), w) })
	}
	t.Run("missing", func(t *testing.T) {
		m := good.changed(t, name, slices.Clone)
		delete(m.files, name)
		if _, err := gpuload.NewPlan(t.Context(), m.source(t), m.names(), w); !errors.Is(err, gpuload.ErrMismatch) {
			t.Errorf("%v; want %v", err, gpuload.ErrMismatch)
		}
	})
	t.Run("size", func(t *testing.T) {
		m := good.changed(t, name, func([]byte) []byte { return shardFile(2, 8, 149984) })
		_, err := gpuload.NewPlan(t.Context(), m.source(t), m.names(), w)
		if blames(t, err, name); !errors.Is(err, gpuload.ErrMismatch) {
			t.Errorf("%v; want %v before anything is loaded", err, gpuload.ErrMismatch)
		}
	})
	meanwhile(t, s, good, name)
}

// sealLike returns a file with the same header and other values: what a check of headers alone takes for the same.
func sealLike(b []byte, seed uint64) []byte {
	m := model{files: map[string][]byte{"x": b}}
	n := len(b) - len(m.data("x"))
	return append(slices.Clone(b[:n]), randomBytes(seed, len(b)-n)...)
}

// changed is a copy of the model with one file changed.
func (m *model) changed(t testing.TB, name string, change func([]byte) []byte) *model {
	files := map[string][]byte{}
	for n, b := range m.files {
		files[n] = slices.Clone(b)
	}
	files[name] = change(files[name])
	return writeModel(t, files)
}

// badFiles must fail when it is planned or when it is loaded.
func badFiles(t *testing.T, s Subject, m *model, w gpuload.Want) error {
	t.Helper()
	src := m.source(t)
	p, err := gpuload.NewPlan(t.Context(), src, m.names(), w)
	if err != nil {
		s.tally.faults++
		if strings.Contains(err.Error(), "\n") {
			t.Errorf("an error of several lines: %q", err)
		}
		var e *gpuload.Error
		if errors.As(err, &e) {
			return err
		}
		return nil // the header is refused; that is the header reader's own error
	}
	err = refused(t, s, t.Context(), p, src, &Faulty{}, gpuload.ErrMismatch)
	var e *gpuload.Error
	if errors.As(err, &e) && (e.Expected == "" || e.Got == "" || e.Expected == e.Got || e.Offset == 0) {
		t.Errorf("%v; want offset, expected and got", err)
	}
	return err
}

// meanwhile changes a file between the plan and the load, and during the load.
func meanwhile(t *testing.T, s Subject, good *model, name string) {
	for what, change := range map[string]func(path string, b []byte) error{
		"shrinks":  func(path string, b []byte) error { return os.Truncate(path, int64(len(b)-5000)) },
		"grows":    func(path string, b []byte) error { return os.Truncate(path, int64(len(b)+1)) },
		"replaced": func(path string, b []byte) error { return replace(path, sealLike(b, 5)) },
		"written":  func(path string, b []byte) error { return rewrite(path, sealLike(b, 6)) },
	} {
		for _, when := range []string{"before", "during"} {
			t.Run(what+" "+when, func(t *testing.T) {
				m := good.changed(t, name, slices.Clone)
				path, once := filepath.Join(m.dir, name), sync.Once{}
				change := func() { once.Do(func() { mustDo(t, change(path, m.files[name])) }) }
				dir, reads := m.source(t), atomic.Int64{}
				src := source{dir, func(n string, b []byte, off int64, under gpuload.File) (int, error) {
					if n == name {
						reads.Add(1)
					}
					if n == name && off > int64(len(m.files[name]))/2 {
						change()
					}
					return under.ReadAt(b, off)
				}}
				p := m.plan(t, dir, gpuload.Want{})
				reason := gpuload.ErrChanged
				if when == "before" {
					change()
				}
				if what == "replaced" && when == "during" {
					return // the open file stays what it was
				}
				blames(t, refused(t, s, t.Context(), p, src, &Faulty{}, reason), name)
				if n := reads.Load(); when == "before" && n > 0 {
					t.Errorf("%d reads of a file that is not that of the plan", n)
				}
			})
		}
	}
}

func replace(path string, b []byte) error {
	if err := os.WriteFile(path+".new", b, 0o666); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// rewrite changes a file in place. Its time is set apart, as a clock may stand still for some milliseconds.
func rewrite(path string, b []byte) error {
	if err := os.WriteFile(path, b, 0o666); err != nil {
		return err
	}
	later := time.Now().Add(time.Hour)
	return os.Chtimes(path, later, later)
}

func mustDo(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// cancels ends the context when a state is entered, and before an operation.
func cancels(t *testing.T, s Subject) {
	m := newModel(t)
	src := m.source(t)
	p := m.plan(t, src, m.want(t))
	for _, at := range []gpuload.State{gpuload.Planned, gpuload.Allocating, gpuload.Loading, gpuload.Verifying} {
		t.Run(string(at), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			before := s.Held(t)
			f := &Faulty{Target: s.New(t)}
			o := options()
			o.Observe = func(st gpuload.State) {
				if st == at {
					cancel()
				}
			}
			if _, err := gpuload.Load(ctx, p, src, f, o); !errors.Is(err, context.Canceled) {
				t.Errorf("%v, want %v", err, context.Canceled)
			}
			if f.Count("publish") != 0 || s.Held(t) != before {
				t.Errorf("published %d times, %d bytes held, %d before", f.Count("publish"), s.Held(t), before)
			}
		})
	}
	for _, op := range []struct {
		name string
		n    int
	}{
		{"alloc", 2}, {"read", 1}, {"read", 40}, {"submit", 1}, {"submit", 40}, {"hash", 2}, {"hash", 40}, {"wait", 1},
		{"waited", 1},
		{"keep", 1}, {"write", 1}, {"write", 40}, {"commit", 1}, {"commit", 3}, {"close", 3},
	} {
		t.Run(fmt.Sprint(op.name, " ", op.n), func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			cancelAt(t, s, ctx, cancel, op.name, op.n)
		})
	}
}

// cancelAt ends ctx before the n-th operation of a name.
func cancelAt(t *testing.T, s Subject, ctx context.Context, cancel func(), op string, n int) {
	at := func(name string, i int) {
		if name == op && i == n {
			cancel()
		}
	}
	var reads, hashes atomic.Int64
	m := newModel(t)
	src := source{m.source(t), func(_ string, b []byte, off int64, f gpuload.File) (int, error) {
		at("read", int(reads.Add(1)))
		return f.ReadAt(b, off)
	}}
	to := &shelf{before: func(name string, i int) error { at(name, i); return nil }}
	p := m.plan(t, m.source(t), m.want(t))
	refused(t, s, ctx, p, src, &Faulty{Before: at, With: func(o *gpuload.Options) {
		o.Keep = to
		o.Progress = func(string, int64) { at("hash", int(hashes.Add(1))) }
	}}, context.Canceled)
	to.check(t, m, false)
}

// late loads through a target that reads its buffers as late as it may, from a source that fills them piece by piece.
func late(t *testing.T, s Subject) {
	m := newModel(t)
	src := slow(m.source(t))
	for _, ring := range []int{1, 2, 3} {
		f := &Faulty{Target: s.New(t), Late: ring}
		o := options()
		o.Lanes, o.Ring = 1, ring
		r, err := gpuload.Load(t.Context(), m.plan(t, src, m.want(t)), src, f, o)
		if err != nil {
			t.Fatal(err)
		}
		handles, release, err := r.Lease()
		mustDo(t, err)
		same(t, s, m, handles)
		release()
		closed(t, r)
		if f.Overlaps != 0 {
			t.Errorf("ring of %d: %d buffers were filled while a copy read them", ring, f.Overlaps)
		}
	}
}
