package staging

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// brought begins to bring b, up to the byte cut.
func brought(t *testing.T, a *Area, b []byte, cut int) *Brought {
	t.Helper()
	in, err := a.Bring(identity.Sum(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	for off := 0; off < cut; off += 3 << 20 {
		if _, err := in.WriteAt(b[off:min(cut, off+3<<20)], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	return in
}

func TestBring(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	files := map[string][]byte{"a": random(7_000_000), "b/c": random(100), "d": nil}
	r := recordOf(files)
	if err := a.Begin(r); err != nil {
		t.Fatal(err)
	}
	for _, b := range files {
		p, err := a.Partial(identity.Sum(b), int64(len(b))) // what is there is dropped
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Write(b[:len(b)/2]); err != nil {
			t.Fatal(err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
		in := brought(t, a, b, len(b))
		if d := identity.Sum(b); a.Has(d) {
			t.Errorf("%s is there before it is committed", d)
		}
		if err := errors.Join(in.Commit(identity.Sum(b)), in.Close()); err != nil || !a.Has(identity.Sum(b)) {
			t.Fatal(err)
		}
	}
	if _, err := a.Publish(r, false); err != nil {
		t.Fatal(err)
	}
	holds(t, target, files)
}

// TestBringRefused: what is not whole, or not what it should be, is never published.
func TestBringRefused(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	b := random(1 << 20)
	d, r := identity.Sum(b), recordOf(map[string][]byte{"a": b})
	if err := a.Begin(r); err != nil {
		t.Fatal(err)
	}
	in := brought(t, a, b, len(b)-1)
	if err := in.Commit(d); err == nil {
		t.Error("a file that lacks a byte is committed")
	}
	for _, off := range []int64{0, int64(len(b))} {
		if _, err := in.WriteAt(b[:1], off); err == nil {
			t.Errorf("a byte at %d is taken, where %d are there", off, len(b)-1)
		}
	}
	if _, err := in.WriteAt(b[:2], int64(len(b)-1)); err == nil {
		t.Error("more bytes than it has are taken")
	}
	if _, err := in.WriteAt([]byte{b[len(b)-1] ^ 1}, int64(len(b)-1)); err != nil {
		t.Fatal(err)
	}
	if err := in.Commit(identity.Sum(nil)); !errors.Is(err, ErrUnverified) {
		t.Errorf("other bytes are committed: %v", err)
	}
	if err := in.Close(); err != nil || a.Has(d) {
		t.Errorf("%v, or it is there", err)
	}
	if _, err := a.Publish(r, false); !errors.Is(err, ErrUnverified) {
		t.Errorf("published: %v", err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("at the target: %v", err)
	}
}

// TestBringResume: nobody has kept the hash of what is there, so it is hashed by who continues it, and never believed.
func TestBringResume(t *testing.T) {
	const cut = syncEvery + 9<<20
	whole := random(cut + 1000)
	for _, tt := range []struct {
		name string
		boot string
		kill bool
		bad  bool
		cut  int
		want int64 // bytes that are not written again; 0 with bad: the digest tells
	}{
		{"closed", "one", false, false, cut, cut},
		{"killed", "one", true, false, cut, syncEvery + 8<<20},
		{"killed, machine restarted", "two", true, false, cut, syncEvery + 2<<20},
		{"whole, machine restarted", "two", true, false, len(whole), int64(len(whole))},
		{"damaged", "one", false, true, cut, cut},
	} {
		t.Run(tt.name, func(t *testing.T) {
			target := filepath.Join(t.TempDir(), "m")
			a := open(t, target, Options{Disk: durable.Disk{Boot: "one"}})
			in := brought(t, a, whole, tt.cut)
			err := error(nil)
			if tt.cut == len(whole) {
				err = in.Commit(identity.Sum(whole))
			}
			if tt.kill {
				err = errors.Join(err, in.p.wait(), in.p.close())
			} else {
				err = errors.Join(err, in.Close())
			}
			if err != nil {
				t.Fatal(err)
			}
			if tt.bad {
				damage(t, a.part(identity.Sum(whole)))
			}
			closeArea(t, a)
			continued(t, target, tt.boot, whole, tt.want, tt.bad)
		})
	}
}

func damage(t *testing.T, path string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte("damage"), 1000); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}

// continued ends a file in order that others have begun.
func continued(t *testing.T, target, boot string, b []byte, from int64, bad bool) {
	t.Helper()
	a := open(t, target, Options{Disk: durable.Disk{Boot: boot}})
	defer closeArea(t, a)
	if !a.Begun(identity.Sum(b), int64(len(b))) {
		t.Error("nothing is begun")
	}
	p, err := a.Partial(identity.Sum(b), int64(len(b)))
	if err != nil {
		t.Fatal(err)
	}
	if p.Offset() != from {
		t.Errorf("continues at %d, want %d", p.Offset(), from)
	}
	if _, err := p.Write(b[p.Offset():]); err != nil {
		t.Fatal(err)
	}
	got, err := p.Finish()
	if err != nil || (got == identity.Sum(b)) == bad || a.Has(identity.Sum(b)) == bad {
		t.Errorf("got %s, %v, there: %t", got, err, a.Has(identity.Sum(b)))
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestBringSegments: what others have begun is checked by segments, where there are midstates.
func TestBringSegments(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	b := random(3*seg + 1000)
	if err := brought(t, a, b, 2*seg+1000).Close(); err != nil {
		t.Fatal(err)
	}
	f := segments(t, a, midstates(t, b))
	if err := f.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !f.Passed(0) || !f.Passed(1) || f.Passed(2) || f.Have() != 2*seg+1000 {
		t.Errorf("%d bytes are there", f.Have())
	}
	give(t, f, b, 2, -1)
	give(t, f, b, 3, -1)
	finish(t, a, f, b)
}
