package staging

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// lossy is a disk of a machine that goes down in the end: what was removed is there again, unless the folder was synced.
type lossy struct {
	t    *testing.T
	mu   sync.Mutex // guards the rest
	back map[string][]byte
}

func (l *lossy) fault(op durable.Op, path string, do func() error) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch op {
	case durable.OpRemove:
		if b, err := os.ReadFile(path); err == nil && strings.HasSuffix(path, syncedSuffix) {
			l.back[path] = b
		}
	case durable.OpSyncDir:
		for gone := range l.back {
			if filepath.Dir(gone) == path {
				delete(l.back, gone)
			}
		}
	case durable.OpWrite:
		if l.back[path+syncedSuffix] != nil {
			l.t.Error("bytes are written before the record of them is gone for good")
		}
	}
	return do()
}

func (l *lossy) down() {
	l.t.Helper()
	for path, b := range l.back {
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := os.WriteFile(path, b, 0o644); err != nil {
			l.t.Fatal(err)
		}
	}
}

// claims checks that what is believed of a partial file after a restart of the machine is true.
func claims(t *testing.T, path string, size int64, all ...*lanes.States) {
	t.Helper()
	have, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if pt := bestPoint(path, size, "two"); pt.Offset > 0 {
		h := identity.NewHash()
		h.Write(have[:pt.Offset])
		if sum, err := h.MarshalBinary(); err != nil || !bytes.Equal(sum, pt.Hash) {
			t.Errorf("other bytes before %d than those of the record, %v", pt.Offset, err)
		}
	}
	r := bestSegments(path, size, "two")
	for _, s := range all {
		form, err := s.MarshalBinary()
		if err != nil {
			t.Fatal(err)
		}
		for i := range s.Len() {
			if r.Size == 0 || r.Midstates != identity.Sum(form) || !r.Passed.has(i) {
				continue
			}
			c := s.Check(i)
			off, n := s.Range(i)
			c.Write(have[off : off+n])
			if err := c.Err(); err != nil {
				t.Errorf("other bytes than those of the record: %v", err)
			}
		}
	}
}

// TestClaims: what a record that outlives the machine says of a file is dropped before other bytes are written there,
// whoever writes them.
func TestClaims(t *testing.T) {
	const n = 6 * seg
	b := random(n)
	evil := bytes.Clone(b)
	for i := range evil {
		evil[i] ^= 0x55
	}
	d := identity.Sum(b)
	right := midstates(t, b)
	forged := *right
	forged.Edge = midstates(t, evil).Edge
	inSegments := func(t *testing.T, a *Area, s *lanes.States, from []byte, which ...int) {
		f := segments(t, a, s)
		if err := f.Settle(t.Context()); err != nil {
			t.Fatal(err)
		}
		for _, i := range which {
			if !f.Passed(i) {
				give(t, f, from, i, -1)
			}
		}
		if err := errors.Join(f.wait(), f.Close()); err != nil {
			t.Fatal(err)
		}
	}
	inOrder := func(t *testing.T, a *Area, from []byte, to int) {
		p, err := a.Partial(d, n)
		if err != nil {
			t.Fatal(err)
		}
		write(t, p, from, to)
		if err := errors.Join(p.wait(), p.Close()); err != nil {
			t.Fatal(err)
		}
	}
	known := func(t *testing.T, a *Area) { inSegments(t, a, right, b, 0, 1, 2, 3, 4) }
	for name, way := range map[string]func(t *testing.T, a *Area){
		"other midstates": func(t *testing.T, a *Area) {
			known(t, a)
			inSegments(t, a, &forged, evil, 0, 1)
		},
		"in order after segments": func(t *testing.T, a *Area) {
			inSegments(t, a, right, b, 1, 2, 3, 4)
			p, err := a.Partial(d, n)
			if err != nil {
				t.Fatal(err)
			}
			write(t, p, evil, 3*seg) // as from a server that sends no parts
			if err := p.close(); err != nil {
				t.Fatal(err)
			}
		},
		"segments after in order": func(t *testing.T, a *Area) {
			inOrder(t, a, b, 4*seg+1000)
			inSegments(t, a, &forged, evil, 0, 1)
		},
		"begun anew": func(t *testing.T, a *Area) {
			inOrder(t, a, b, 4*seg+1000)
			p, err := a.Partial(d, n)
			if err == nil {
				err = p.Reset()
			}
			if err != nil {
				t.Fatal(err)
			}
			write(t, p, evil, 4*seg+500)
			if err := p.close(); err != nil {
				t.Fatal(err)
			}
		},
		"not wanted for a while": func(t *testing.T, a *Area) {
			known(t, a)
			for _, files := range []map[string][]byte{{"x": b[:7]}, {"x": b}} {
				if err := a.Begin(recordOf(files)); err != nil {
					t.Fatal(err)
				}
			}
			inSegments(t, a, &forged, evil, 0, 1)
		},
		"named twice": func(t *testing.T, a *Area) {
			known(t, a)
			if err := os.Link(a.part(d), filepath.Join(a.dir, "x")); err != nil {
				t.Fatal(err)
			}
			inSegments(t, a, &forged, evil, 0, 1)
		},
		"shorter than its record": func(t *testing.T, a *Area) {
			p, err := a.Partial(d, n)
			if err != nil {
				t.Fatal(err)
			}
			write(t, p, b, 20<<20)
			early := p.save()
			state, err := os.ReadFile(a.part(d) + stateSuffix)
			write(t, p, b, 5*seg)
			err = errors.Join(early, err, p.wait(), p.Close(), os.WriteFile(a.part(d)+stateSuffix, state, 0o644),
				os.Truncate(a.part(d), 25<<20))
			if err != nil {
				t.Fatal(err)
			}
			if p, err = a.Partial(d, n); err != nil || p.Offset() != 20<<20 {
				t.Fatalf("goes on at %d, %v", p.Offset(), err)
			}
			write(t, p, evil, 5*seg-1000)
			if err := p.close(); err != nil {
				t.Fatal(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			disk := &lossy{t: t, back: map[string][]byte{}}
			a := open(t, filepath.Join(t.TempDir(), "m"), Options{Disk: durable.Disk{Boot: "one", Fault: disk.fault}})
			defer closeArea(t, a)
			way(t, a)
			disk.down()
			claims(t, a.part(d), n, right, &forged)
		})
	}
}

// write puts the bytes of b there from where p is, up to an offset.
func write(t *testing.T, p *Partial, b []byte, to int) {
	t.Helper()
	for p.Offset() < int64(to) {
		if _, err := p.Write(b[p.Offset():min(int64(to), p.Offset()+durable.PieceSize)]); err != nil {
			t.Fatal(err)
		}
	}
}

// TestApart: of what two pulls left, a record is believed only of the file that it lay beside.
func TestApart(t *testing.T) {
	b := random(5 * seg)
	target := filepath.Join(t.TempDir(), "m")
	states := midstates(t, b)
	a := open(t, target, Options{})
	f := segments(t, a, states)
	for i := range 4 {
		give(t, f, b, i, -1)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	one, two := a.part(states.Digest), filepath.Join(a.dir, partsPrefix+"two")
	closeArea(t, a)
	if err := os.Mkdir(two, 0o755); err != nil {
		t.Fatal(err)
	}
	other := filepath.Join(two, filepath.Base(one))
	if err := errors.Join(os.Rename(one, other), os.WriteFile(other, make([]byte, len(b)), 0o644)); err != nil {
		t.Fatal(err)
	}
	a = open(t, target, Options{})
	defer closeArea(t, a)
	if a.Begun(states.Digest, int64(len(b))) {
		t.Error("the record of one file is believed of another")
	}
	if left, err := others(a.dir, partsPrefix, ""); err != nil || len(left) != 1 {
		t.Errorf("%q are left, %v", left, err)
	}
}
