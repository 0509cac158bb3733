// Package devicetest is the suite that every gpuload.Target passes: its contract, loads of real files through it, and
// the matrix of faults, each of which must leave no published handle and no memory behind.
package devicetest

import (
	"bytes"
	"errors"
	"slices"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Subject is the target under test.
type Subject struct {
	New  func(t testing.TB) gpuload.Target           // ready for one load
	Read func(t testing.TB, h gpuload.Handle) []byte // what another process sees; nil: the target keeps no bytes
	Held func(t testing.TB) int64                    // memory that targets of this kind hold now

	// Break makes the device itself fail until the test ends; nil: there is no device that could.
	Break func(t testing.TB, f Fault)

	tally *tally
}

// tally counts what must not be published, and what was all the same.
type tally struct{ faults, published int }

// Run runs the suite. Its last line says how many wrong weights were published.
func Run(t *testing.T, s Subject) {
	s.tally = new(tally)
	for _, part := range []struct {
		name string
		run  func(*testing.T, Subject)
	}{
		{"contract", contract},
		{"load", loads},
		{"late", late},
		{"keep", keeps},
		{"several devices", several},
		{"fault", faults},
		{"source", sourceFaults},
		{"cancel", cancels},
		{"read back", readsBack},
		{"device", deviceFaults},
	} {
		t.Run(part.name, func(t *testing.T) {
			before := s.Held(t)
			part.run(t, s)
			if after := s.Held(t); after != before {
				t.Errorf("%d bytes held, %d before", after, before)
			}
		})
	}
	t.Logf("faults: %d, wrong weights published: %d (%s)", s.tally.faults, s.tally.published, t.Name())
}

// contract uses a target by hand.
func contract(t *testing.T, s Subject) {
	ctx, target := t.Context(), s.New(t)
	defer target.Free()
	ds, err := target.Devices(ctx)
	if err != nil || len(ds) == 0 || ds[0].Free <= 0 || ds[0].Name == "" || ds[0].Backend == "" {
		t.Fatalf("devices: %+v, %v", ds, err)
	}
	a := must(target.Alloc(ctx, ds[0].Index, 10000))
	empty := must(target.Alloc(ctx, ds[0].Index, 0))
	if a != 0 || empty != 1 {
		t.Fatalf("blocks %d and %d, want 0 and 1", a, empty)
	}
	want := randomBytes(1, 10000)
	for _, part := range []struct{ from, to int }{{5000, 10000}, {0, 4999}, {4999, 5000}} {
		tok := must(target.Submit(ctx, want[part.from:part.to], a, int64(part.from)))
		if err := tok.Wait(ctx); err != nil {
			t.Fatal(err)
		}
	}
	if err := target.Wait(ctx); err != nil {
		t.Fatal(err)
	}
	handles := must(target.Publish(ctx))
	if len(handles) != 2 || handles[0].Size != 10000 || handles[1].Size != 0 {
		t.Fatalf("handles %+v", handles)
	}
	if s.Read != nil && (!bytes.Equal(s.Read(t, handles[0]), want) || len(s.Read(t, handles[1])) != 0) {
		t.Error("the published bytes are not those that were copied")
	}
	for range 2 {
		if err := target.Free(); err != nil {
			t.Fatal(err)
		}
	}
	overrun(t, s)
}

// overrun copies past the end of a block, which must not go unnoticed.
func overrun(t *testing.T, s Subject) {
	if s.Read == nil {
		return
	}
	ctx, target := t.Context(), s.New(t)
	defer target.Free()
	b := must(target.Alloc(ctx, 0, 10))
	tok, err := target.Submit(ctx, make([]byte, 11), b, 0)
	if err == nil {
		err = errors.Join(tok.Wait(ctx), target.Wait(ctx))
	}
	if err == nil {
		t.Error("11 bytes went into a block of 10")
	}
	if h, err := target.Publish(ctx); err == nil {
		t.Errorf("published %d handles after a failed copy", len(h))
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// options makes chunks so small that a model of some hundred KB needs many.
func options() gpuload.Options {
	return gpuload.Options{ChunkBytes: 4096, Ring: 3, Lanes: 2, Reserve: -1}
}

// want asks for the manifest of the model as it was made.
func (m *model) want(t testing.TB) gpuload.Want {
	man := m.manifest(t)
	return gpuload.Want{Manifest: &man, Aggregate: man.Aggregate}
}

func (m *model) plan(t testing.TB, src gpuload.Source, w gpuload.Want) gpuload.Plan {
	t.Helper()
	p, err := gpuload.NewPlan(t.Context(), src, m.names(), w)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// loads are those that must succeed.
func loads(t *testing.T, s Subject) {
	for _, start := range []int{0, 1, 2, 8, 15} {
		m := writeModel(t, map[string][]byte{"model.safetensors": shardFile(9, start, 256, 5000, 0, 256)})
		loaded(t, s, m, options(), m.want(t))
	}
	m := newModel(t)
	for _, o := range []gpuload.Options{
		{Reserve: -1},
		{ChunkBytes: 4096, Ring: 1, Lanes: 1, Reserve: -1},
		{ChunkBytes: 12288, Ring: 2, Lanes: 3, Reserve: -1},
		{MaxBuffer: 8192, Reserve: -1},
	} {
		loaded(t, s, m, o, m.want(t))
		loaded(t, s, m, o, gpuload.Want{})
	}
	t.Run("states", func(t *testing.T) { states(t, s, m) })
	t.Run("two devices", func(t *testing.T) { twoDevices(t, s, m) })
	t.Run("spread", func(t *testing.T) { spread(t, s, m) })
	t.Run("pinned", func(t *testing.T) { pinned(t, s, m) })
}

// loaded loads a model and compares every byte and row with the files.
func loaded(t *testing.T, s Subject, m *model, o gpuload.Options, w gpuload.Want) {
	t.Helper()
	src := m.source(t)
	r, err := gpuload.Load(t.Context(), m.plan(t, src, w), src, s.New(t), o)
	if err != nil {
		t.Fatal(err)
	}
	defer closed(t, r)
	if want := m.manifest(t); r.Manifest().Aggregate != want.Aggregate || !slices.Equal(r.Manifest().Shards, want.Shards) {
		t.Errorf("manifest %+v, want %+v", r.Manifest(), want)
	}
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	same(t, s, m, handles)
	if st := r.Stats(); st.Bytes != int64(r.Manifest().TotalSize) || o.MaxBuffer > 0 && st.Buffer > o.MaxBuffer {
		t.Errorf("stats %+v", st)
	}
}

func same(t *testing.T, s Subject, m *model, handles []gpuload.Handle) {
	t.Helper()
	if len(handles) != len(m.files) {
		t.Fatalf("%d handles for %d shards", len(handles), len(m.files))
	}
	for i, name := range m.names() {
		if handles[i].Shard != i {
			t.Errorf("the handle of shard %d says shard %d", i, handles[i].Shard)
		}
		if s.Read != nil && !bytes.Equal(s.Read(t, handles[i]), m.data(name)) {
			t.Errorf("%s: the bytes in memory differ from the file", name)
		}
	}
}

func closed(t *testing.T, r *gpuload.Resident) {
	t.Helper()
	if err := r.Close(t.Context()); err != nil {
		t.Error(err)
	}
	if r.State() != gpuload.Freed {
		t.Errorf("state %s after Close", r.State())
	}
}

func states(t *testing.T, s Subject, m *model) {
	var seen []gpuload.State
	o := options()
	o.Observe = func(st gpuload.State) { seen = append(seen, st) }
	loaded(t, s, m, o, m.want(t))
	want := []gpuload.State{gpuload.Planned, gpuload.Allocating, gpuload.Loading, gpuload.Verifying, gpuload.Published}
	if !slices.Equal(seen, want) {
		t.Errorf("states %v, want %v", seen, want)
	}
}

// twoDevices reads once for two devices and finds the same bytes on both.
func twoDevices(t *testing.T, s Subject, m *model) {
	f := &Faulty{Target: s.New(t), Split: 2}
	o := options()
	o.Placement = gpuload.Replicate
	r := once(t, m, f, o)
	defer closed(t, r)
	handles, release, err := r.Lease()
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if len(handles) != 2*len(m.files) {
		t.Fatalf("%d handles for %d shards on two devices", len(handles), len(m.files))
	}
	var even, odd []gpuload.Handle
	for i := 0; i+1 < len(handles); i += 2 {
		even, odd = append(even, handles[i]), append(odd, handles[i+1])
	}
	same(t, s, m, even)
	same(t, s, m, odd)
}

// spread takes memory on both of two devices, once for each shard.
func spread(t *testing.T, s Subject, m *model) {
	f := &Faulty{Target: s.New(t), Split: 2}
	o := options()
	o.Placement = gpuload.Spread
	closed(t, once(t, m, f, o))
	if !slices.Contains(f.On, 0) || !slices.Contains(f.On, 1) || len(f.On) != len(m.files) {
		t.Errorf("memory was taken on the devices %v", f.On)
	}
}

// pinned loads through buffers that are registered with the target, through smaller ones, and through ones that could
// not be.
func pinned(t *testing.T, s Subject, m *model) {
	for fails, want := range map[int]struct{ said, unpinned int }{0: {0, 1}, 1: {1, 1}, 99: {1, 0}} {
		var lines []string
		f := &Faulty{Target: s.New(t), FailPins: fails}
		o := options()
		o.Notify = func(line string) { lines = append(lines, line) }
		src := m.source(t)
		r, err := gpuload.Load(t.Context(), m.plan(t, src, m.want(t)), src, f, o)
		if err != nil {
			t.Fatal(err)
		}
		handles, release, err := r.Lease()
		mustDo(t, err)
		same(t, s, m, handles)
		release()
		closed(t, r)
		smaller := r.Stats().Buffer < int64(o.Lanes*o.Ring)*o.ChunkBytes
		if len(lines) != want.said || f.Count("unpin") != want.unpinned || smaller != (fails == 1) || f.Count("pin") == 0 {
			t.Errorf("%d attempts to pin fail: pinned %d, unpinned %d, said %q, %d bytes", fails, f.Count("pin"),
				f.Count("unpin"), lines, r.Stats().Buffer)
		}
	}
}
