package adapters

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/hostmem"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

func load(t *testing.T, s *Set, name string) Adapter {
	t.Helper()
	a, _, err := s.Load(t.Context(), name)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestLoad(t *testing.T) {
	loads(t, newWorld(t), memory, func() (gpuload.Target, error) { return new(hostmem.Target), nil })
}

// loads brings one adapter in by each way in which it can be named.
func loads(t *testing.T, w *world, memory func(*testing.T) int64, target func() (gpuload.Target, error)) {
	const n = 2_500_000
	before := memory(t)
	s := w.set(func(o *Options) { o.Target = target })
	p, want := w.made("sql", 1, n), data(1, n)
	dir := w.adapter("sql", 1, n, &w.base)
	generation := uint64(1)
	for _, name := range []string{p.Digest.String(), "sql", w.host + "/team/sql:sql", p.Reference, dir} {
		a, again, err := s.Load(t.Context(), name)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if again || a.Digest != p.Digest || a.Name != "sql" || a.Base != w.base.Aggregate ||
			a.Evidence != documents.EvidenceDocument || a.Bytes < n || len(a.Files) != 2 || a.LoadedAt.IsZero() {
			t.Errorf("%s: %v, %+v", name, again, a)
		}
		attached(t, s, p.Digest, want)
		texts(t, s, a)
		if _, again, err = s.Load(t.Context(), name); err != nil || !again {
			t.Errorf("%s: loaded again: %v, %v", name, again, err)
		}
		if list := s.List(); len(list) != 1 || list[0].Digest != p.Digest || list[0].Leases != 0 {
			t.Errorf("%s: list %+v", name, list)
		}
		if err := s.Unload(p.Digest); err != nil || len(s.List()) != 0 || memory(t) != before {
			t.Errorf("%s: unload: %v, %d bytes held, %d before", name, err, memory(t), before)
		}
		if generation += 2; s.Generation() != generation {
			t.Errorf("%s: generation %d, want %d", name, s.Generation(), generation)
		}
	}
	if err := s.Unload(p.Digest); !errors.Is(err, ErrUnknown) {
		t.Errorf("unloaded again: %v", err)
	}
	if _, err := s.Attach(p.Digest); !errors.Is(err, ErrUnknown) {
		t.Errorf("attached to nothing: %v", err)
	}
}

// texts checks the documents that an adapter is held with.
func texts(t *testing.T, s *Set, a Adapter) {
	t.Helper()
	config, err := s.Text(a.Digest, documents.AdapterConfigFile)
	if err != nil || !bytes.Equal(config, testartifact.Config("example/base")) {
		t.Errorf("config %q, %v", config, err)
	}
	if text, err := s.Text(a.Digest, documents.AdapterManifestFile); err != nil || len(text) == 0 {
		t.Errorf("manifest %q, %v", text, err)
	}
	for _, name := range []string{"", "../x", documents.AdapterWeightsFile, documents.ReceiptFile} {
		if b, err := s.Text(a.Digest, name); !errors.Is(err, ErrUnknown) {
			t.Errorf("%q: %d bytes, %v", name, len(b), err)
		}
	}
	if _, w, err := s.Show(a.Digest); err != nil || w.State() != gpuload.Published {
		t.Errorf("show: %v", err)
	}
}

// TestAsserted: an adapter that says nothing itself is taken at the word of who pushed it, or who bound it.
func TestAsserted(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	peft := filepath.Join(w.dir, "word")
	if err := testartifact.PEFT(peft, 3); err != nil {
		t.Fatal(err)
	}
	p := w.send(peft, "team/word", artifact.Base{Aggregate: w.base.Aggregate, Name: "x"})
	if a := load(t, s, p.Reference); a.Evidence != documents.EvidenceAsserted || a.Name != "" || len(a.Files) != 1 {
		t.Errorf("%+v", a)
	}
	if err := testartifact.PEFT(peft, 4); err != nil {
		t.Fatal(err)
	}
	p = w.send(peft, "team/bound", artifact.Base{})
	w.bind("team/bound", p.Digest, w.base.Aggregate, "a")
	if a := load(t, s, p.Digest.String()); a.Evidence != documents.EvidenceAsserted {
		t.Errorf("%+v", a)
	}
}

// TestShared: who asks for an adapter while it is loaded waits for that load, which goes on until the last has gone.
func TestShared(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	p := w.made("sql", 1, 50_000)
	st := &stalled{adapterWeights(p, w), make(chan struct{}, 100), make(chan struct{})}
	w.stall.Store(st)
	first, leave := context.WithCancel(t.Context())
	gone := make(chan error)
	go func() { _, _, err := s.Load(first, p.Digest.String()); gone <- err }()
	<-st.reached
	var g errgroup.Group
	for i := range 8 {
		name := []string{p.Digest.String(), "sql"}[i%2]
		g.Go(func() error { _, _, err := s.Load(t.Context(), name); return err })
	}
	waits(s, p, 9)
	leave()
	if err := <-gone; !errors.Is(err, context.Canceled) {
		t.Errorf("who left got %v", err)
	}
	if len(s.List()) != 0 || s.Generation() != 1 {
		t.Error("an adapter shows before it is loaded")
	}
	w.stall.Store(nil)
	close(st.until)
	if err := g.Wait(); err != nil {
		t.Error(err)
	}
	if w.opens.Load() != 1 || s.Generation() != 2 {
		t.Errorf("%d loads, generation %d", w.opens.Load(), s.Generation())
	}
	attached(t, s, p.Digest, data(1, 50_000))
}

// TestAbandoned: a load for which nobody waits ends, and leaves nothing.
func TestAbandoned(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	before := memory(t)
	p := w.made("sql", 1, 50_000)
	for range 3 {
		st := &stalled{adapterWeights(p, w), make(chan struct{}, 100), make(chan struct{})}
		w.stall.Store(st)
		ctx, leave := context.WithCancel(t.Context())
		gone := make(chan error)
		go func() { _, _, err := s.Load(ctx, "sql"); gone <- err }()
		<-st.reached
		leave()
		if err := <-gone; !errors.Is(err, context.Canceled) {
			t.Errorf("%v", err)
		}
	}
	w.stall.Store(nil)
	load(t, s, "sql")
	if err := s.Unload(p.Digest); err != nil || s.Generation() != 3 {
		t.Errorf("%v, generation %d", err, s.Generation())
	}
	if err := s.Close(t.Context()); err != nil || memory(t) != before || s.used != 0 {
		t.Errorf("%v, %d bytes held, %d before, %d counted", err, memory(t), before, s.used)
	}
}

// TestInUse: what somebody has attached stays.
func TestInUse(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	p := w.made("sql", 1, 5000)
	load(t, s, "sql")
	a, b := must(s.Attach(p.Digest)), must(s.Attach(p.Digest))
	for _, l := range []*Lease{a, b} {
		if err := s.Unload(p.Digest); !errors.Is(err, ErrInUse) {
			t.Errorf("unloaded what is in use: %v", err)
		}
		if got := content(t, l); !bytes.Equal(got, data(1, 5000)) {
			t.Error("other bytes")
		}
		l.Release()
		l.Release()
	}
	if err := s.Unload(p.Digest); err != nil || s.Generation() != 3 {
		t.Errorf("%v, generation %d", err, s.Generation())
	}
}

// TestEvict: what was not used for longest goes, and nothing that is in use.
func TestEvict(t *testing.T) {
	w := newWorld(t)
	const n = 10_000
	var all []artifact.Pushed
	for i := range byte(4) {
		all = append(all, w.made(fmt.Sprint("a", i), i, n))
	}
	s := w.set(func(o *Options) { o.Limit = 3 * n })
	names := func() (names []string) {
		for _, a := range s.List() {
			names = append(names, a.Name)
		}
		return names
	}
	load(t, s, "a0")
	load(t, s, "a1")
	must(s.Attach(all[0].Digest)).Release()
	if size := s.List()[0].Bytes; 2*size > s.o.Limit || 3*size < s.o.Limit {
		t.Fatalf("%d bytes each, and the limit is %d", size, s.o.Limit)
	}
	load(t, s, "a2")
	if !slices.Equal(names(), []string{"a0", "a2"}) || s.Generation() != 5 {
		t.Errorf("held: %v, generation %d", names(), s.Generation())
	}
	one, two := must(s.Attach(all[0].Digest)), must(s.Attach(all[2].Digest))
	if _, _, err := s.Load(t.Context(), "a3"); !errors.Is(err, ErrNoRoom) || s.Generation() != 5 {
		t.Errorf("no room: %v, generation %d", err, s.Generation())
	}
	two.Release()
	load(t, s, "a3")
	if !slices.Equal(names(), []string{"a0", "a3"}) {
		t.Errorf("held: %v", names())
	}
	one.Release()
	w.made("huge", 9, 4*n)
	if _, _, err := s.Load(t.Context(), "huge"); !errors.Is(err, ErrNoRoom) || len(s.List()) != 2 {
		t.Errorf("larger than the limit: %v; held: %v", err, names())
	}
	few := w.set(func(o *Options) { o.Most = 1 })
	load(t, few, "a0")
	load(t, few, "a1")
	l := must(few.Attach(all[1].Digest))
	if _, _, err := few.Load(t.Context(), "a0"); !errors.Is(err, ErrNoRoom) {
		t.Errorf("one too many: %v", err)
	}
	l.Release()
}

// TestClose ends loads that run and waits for leases; then nothing can be loaded any more.
func TestClose(t *testing.T) {
	w := newWorld(t)
	before := memory(t)
	s := w.set()
	p, q := w.made("sql", 1, 5000), w.made("other", 2, 5000)
	load(t, s, "sql")
	l := must(s.Attach(p.Digest))
	st := &stalled{adapterWeights(q, w), make(chan struct{}, 100), make(chan struct{})}
	w.stall.Store(st)
	loading, closed, waiting := make(chan error), make(chan error), make(chan uint64)
	go func() { _, _, err := s.Load(t.Context(), "other"); loading <- err }()
	<-st.reached
	go func() { waiting <- s.Wait(t.Context(), 100) }()
	go func() { closed <- s.Close(context.Background()) }()
	if err := <-loading; !errors.Is(err, ErrClosed) {
		t.Errorf("the load that ran: %v", err)
	}
	if g := <-waiting; g != 2 {
		t.Errorf("generation %d", g)
	}
	if got := bytesOf(l); !bytes.Equal(got, data(1, 5000)) {
		t.Error("the lease is gone")
	}
	l.Release()
	if err := <-closed; err != nil || memory(t) != before {
		t.Errorf("%v, %d bytes held, %d before", err, memory(t), before)
	}
	for _, name := range []string{"sql", p.Digest.String(), w.adapter("sql", 1, 5000, &w.base)} {
		if _, _, err := s.Load(t.Context(), name); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: loaded after the end: %v", name, err)
		}
	}
	if _, err := s.Attach(p.Digest); !errors.Is(err, ErrClosed) {
		t.Errorf("attach: %v", err)
	}
	if err := s.Unload(p.Digest); !errors.Is(err, ErrClosed) {
		t.Errorf("unload: %v", err)
	}
	cut := w.set()
	w.stall.Store(nil)
	load(t, cut, "sql")
	l = must(cut.Attach(p.Digest))
	defer l.Release()
	ctx, stop := context.WithCancelCause(t.Context())
	stop(errors.New("too long"))
	if err := cut.Close(ctx); err == nil || memory(t) != before {
		t.Errorf("freed while leased: %v, %d bytes held", err, memory(t))
	}
}

// TestWait wakes whoever waits for the next generation.
func TestWait(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	p := w.made("sql", 1, 5000)
	next := make(chan uint64)
	go func() { next <- s.Wait(t.Context(), 1) }()
	load(t, s, "sql")
	if g := <-next; g != 2 {
		t.Errorf("generation %d", g)
	}
	if g := s.Wait(t.Context(), 1); g != 2 {
		t.Errorf("generation %d", g)
	}
	go func() { next <- s.Wait(t.Context(), 2) }()
	if err := s.Unload(p.Digest); err != nil {
		t.Fatal(err)
	}
	if g := <-next; g != 3 {
		t.Errorf("generation %d", g)
	}
	ctx, stop := context.WithCancel(t.Context())
	stop()
	if g := s.Wait(ctx, 3); g != 3 {
		t.Errorf("generation %d", g)
	}
}

// TestCycles loads and unloads while others attach, and touches nothing of the base.
func TestCycles(t *testing.T) {
	w := newWorld(t)
	s := w.set()
	before := memory(t)
	base, release, err := w.held.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	const n, cycles, attachers = 20_000, 50, 4
	p, dir := w.made("sql", 1, n), w.adapter("sql", 1, n, &w.base)
	want, baseData := data(1, n), data(200, 300_000)
	done := make(chan struct{})
	var g sync.WaitGroup
	for range attachers {
		g.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				l, err := s.Attach(p.Digest)
				if errors.Is(err, ErrUnknown) {
					continue
				}
				if err != nil {
					t.Error(err)
					return
				}
				if !bytes.Equal(bytesOf(l), want) {
					t.Error("an attacher sees other bytes")
				}
				l.Release()
			}
		})
	}
	for i := range cycles {
		load(t, s, []string{p.Digest.String(), dir}[i%2])
		for {
			err := s.Unload(p.Digest)
			if err == nil {
				break
			}
			if !errors.Is(err, ErrInUse) {
				t.Fatal(err)
			}
		}
	}
	close(done)
	g.Wait()
	got := make([]byte, base[0].Size)
	if _, err := base[0].File.ReadAt(got, 0); err != nil || !bytes.Equal(got, baseData) {
		t.Errorf("the base has other bytes (%v)", err)
	}
	if w.held.State() != gpuload.Published || memory(t) != before || s.Generation() != 2*cycles+1 {
		t.Errorf("base %s, %d bytes held, %d before, generation %d", w.held.State(), memory(t), before, s.Generation())
	}
}

// waits returns when so many callers wait for an adapter.
func waits(s *Set, p artifact.Pushed, n int) {
	for {
		s.mu.Lock()
		x := s.slots[p.Digest]
		ready := x != nil && x.waiting == n
		s.mu.Unlock()
		if ready {
			return
		}
		runtime.Gosched()
	}
}
