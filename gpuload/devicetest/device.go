package devicetest

import (
	"bytes"
	"errors"
	"fmt"
	"testing"

	"github.com/kiln-registry/kiln-registry/gpuload"
)

// Fault is one fault of a device. The numbers of operations count from 1, from when it is set; 0 is none.
type Fault struct {
	Alloc, Copy, Handle, Flip int
	At                        Where // of Copy

	Pin    int  // of the attempts to register memory
	NoPins bool // no memory can be registered
}

// Where a device reports a copy that failed.
type Where int

// The places.
const (
	AtCall        Where = iota // the call that starts it
	AtToken                    // when it is waited for
	AtSynchronise              // only when everything is waited for
)

// readsBack damages a byte on its way: the load does not notice it unless it reads back.
func readsBack(t *testing.T, s Subject) {
	m := newModel(t)
	src := m.source(t)
	p := m.plan(t, src, m.want(t))
	if s.Read == nil {
		refused(t, s, t.Context(), p, src, &Faulty{Verify: true}, errors.ErrUnsupported)
		return
	}
	f := &Faulty{Verify: true}
	r, err := load(t, s, m, f)
	mustDo(t, err)
	if want := held(p); r.Stats().ReadBack != want || f.Count("readback") == 0 {
		t.Errorf("read back %d of %d bytes in %d parts", r.Stats().ReadBack, want, f.Count("readback"))
	}
	before := s.Held(t)
	if err := r.Audit(t.Context(), nil); err != nil || s.Held(t) != before {
		t.Errorf("audit: %v, %d bytes held, %d before", err, s.Held(t), before)
	}
	if len(r.Devices()) == 0 || r.Devices()[0].Name == "" {
		t.Errorf("devices %+v", r.Devices())
	}
	closed(t, r)
	if err := r.Audit(t.Context(), nil); !errors.Is(err, gpuload.ErrState) {
		t.Errorf("audit of freed weights: %v", err)
	}
	copies := f.Count("submit")
	for _, n := range []int{1, copies / 2, copies} {
		blamesAny(t, refused(t, s, t.Context(), p, src, &Faulty{Flip: n, Verify: true}, gpuload.ErrDevice))
		unnoticed(t, s, m, &Faulty{Flip: n})
	}
}

// load loads a model through f.
func load(t *testing.T, s Subject, m *model, f *Faulty) (*gpuload.Resident, error) {
	f.Target = s.New(t)
	src := m.source(t)
	o := options()
	o.VerifyDevice = f.Verify
	return gpuload.Load(t.Context(), m.plan(t, src, m.want(t)), src, f, o)
}

func held(p gpuload.Plan) (n int64) {
	for _, s := range p.Shards {
		n += s.Size - s.Data
	}
	return n
}

// unnoticed shows that a fault does damage, by what another process reads and by an audit.
func unnoticed(t *testing.T, s Subject, m *model, f *Faulty) {
	t.Helper()
	r, err := load(t, s, m, f)
	mustDo(t, err)
	defer closed(t, r)
	handles, release, err := r.Lease()
	mustDo(t, err)
	defer release()
	err = r.Audit(t.Context(), nil)
	if blamesAny(t, err); !errors.Is(err, gpuload.ErrDevice) {
		t.Errorf("audit: %v; want %v", err, gpuload.ErrDevice)
	}
	for i, name := range m.names() {
		if !bytes.Equal(s.Read(t, handles[i]), m.data(name)) {
			return
		}
	}
	t.Error("the fault did no damage")
}

// deviceFaults are those of the device itself, behind the target.
func deviceFaults(t *testing.T, s Subject) {
	if s.Break == nil {
		return
	}
	m := newModel(t)
	src := m.source(t)
	p := m.plan(t, src, m.want(t))
	f := &Faulty{}
	r, err := load(t, s, m, f)
	mustDo(t, err)
	closed(t, r)
	copies := f.Count("submit")
	for _, n := range []int{1, copies / 2, copies} {
		for _, at := range []Where{AtCall, AtToken, AtSynchronise} {
			t.Run(fmt.Sprintf("copy %d at %d", n, at), func(t *testing.T) {
				s.Break(t, Fault{Copy: n, At: at})
				refused(t, s, t.Context(), p, src, &Faulty{}, gpuload.ErrDevice)
			})
		}
		t.Run(fmt.Sprint("flip ", n), func(t *testing.T) {
			s.Break(t, Fault{Flip: n})
			unnoticed(t, s, m, &Faulty{})
			s.Break(t, Fault{Flip: n})
			blamesAny(t, refused(t, s, t.Context(), p, src, &Faulty{Verify: true}, gpuload.ErrDevice))
		})
	}
	for i, name := range m.names() {
		t.Run(fmt.Sprint("memory ", i+1), func(t *testing.T) {
			s.Break(t, Fault{Alloc: i + 1})
			f := &Faulty{}
			blames(t, refused(t, s, t.Context(), p, src, f, gpuload.ErrMemory), name)
			if f.Count("submit") != 0 {
				t.Errorf("%d copies before all memory was there", f.Count("submit"))
			}
		})
		t.Run(fmt.Sprint("handle ", i+1), func(t *testing.T) {
			s.Break(t, Fault{Handle: i + 1})
			refused(t, s, t.Context(), p, src, &Faulty{FailPublish: true}, gpuload.ErrDevice)
		})
	}
	for _, f := range []Fault{{NoPins: true}, {Pin: 1}} {
		t.Run(fmt.Sprintf("pins %+v", f), func(t *testing.T) {
			s.Break(t, f)
			loaded(t, s, m, options(), m.want(t))
		})
	}
}
