package cache_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
)

// TestVerify: all files are planned before one is read, and each is told of to its end. One that goes meanwhile is
// neither right nor wrong.
func TestVerify(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
	var total int64
	paths := map[identity.Digest]string{}
	for i := range byte(20) {
		b := small(i)
		e, _ := receive(t, c, b)
		paths[identity.Sum(b)] = e.Path
		total += e.Size
	}
	gone := identity.Sum(small(7))
	var mu sync.Mutex // guards the rest
	var planned, moved, done int64
	v, err := c.Verify(t.Context(), cache.Checking{
		Moved: func(d identity.Digest, n, size int64) {
			mu.Lock()
			defer mu.Unlock()
			if n > 0 {
				moved += n
				return
			}
			planned += size
			if d == gone {
				if err := os.Remove(paths[d]); err != nil {
					t.Error(err)
				}
			}
			if moved > 0 || done > 0 {
				t.Error("planned when others were read")
			}
		},
		Done: func(_ identity.Digest, size int64) {
			mu.Lock()
			defer mu.Unlock()
			done += size
		},
	})
	if err != nil || v.Files != 19 || v.Bytes != total-5000 || len(v.Dropped) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
	if planned != total || moved != v.Bytes || done != v.Bytes {
		t.Errorf("of %d bytes %d were planned; %d moved and %d done of %d", total, planned, moved, done, v.Bytes)
	}
}

// TestVerifyEnds: what can't be read ends a check with an error that names it, and so does the end of its context. Both
// drop nothing.
func TestVerifyEnds(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
	e, _ := receive(t, c, small(1))
	receive(t, c, small(2))
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no more time")
	v, err := c.Verify(ctx, cache.Checking{Moved: func(identity.Digest, int64, int64) { cancel(why) }})
	if !errors.Is(err, why) || len(v.Dropped) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
	if err := errors.Join(os.Rename(e.Path, e.Path+".away"), os.Symlink(e.Path+".away", e.Path)); err != nil {
		t.Fatal(err)
	}
	if v, err = c.Verify(t.Context(), cache.Checking{}); err == nil || !strings.Contains(err.Error(), e.Path) ||
		len(v.Dropped) != 0 {
		t.Errorf("%+v, %v", v, err)
	}
}

// TestMidstates: a large file that is hashed in a cache has midstates from then on, until it is dropped.
func TestMidstates(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
	b := content(3)
	d, size := identity.Sum(b), int64(len(b))
	e, _ := receive(t, c, b)
	receive(t, c, small(1))
	if s := c.Midstates(d, size); s != nil {
		t.Errorf("before: %+v", s)
	}
	if v, err := c.Verify(t.Context(), cache.Checking{}); err != nil || v.Files != 2 {
		t.Fatalf("%+v, %v", v, err)
	}
	if v, err := c.Verify(t.Context(), cache.Checking{}); err != nil || v.Files != 2 {
		t.Errorf("midstates are taken for a file: %+v, %v", v, err)
	}
	s := c.Midstates(d, size)
	if s == nil || s.Len() != 3 {
		t.Fatalf("%+v", s)
	}
	for i := range s.Len() {
		check := s.Check(i)
		off, n := s.Range(i)
		check.Write(b[off : off+n])
		if err := check.Err(); err != nil {
			t.Error(err)
		}
	}
	if s := c.Midstates(d, size+1); s != nil {
		t.Error("given for another size")
	}
	if s := c.Midstates(identity.Sum(small(1)), 5000); s != nil {
		t.Error("given for a small file")
	}
	if err := c.Drop(d); err != nil {
		t.Fatal(err)
	}
	if left, err := filepath.Glob(e.Path + "*"); err != nil || len(left) != 0 {
		t.Errorf("left: %v, %v", left, err)
	}
}

// TestForeignMidstates: midstates that decayed, or that others could have written, are none.
func TestForeignMidstates(t *testing.T) {
	c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
	b := content(3)
	d, size := identity.Sum(b), int64(len(b))
	h := lanes.NewRecorder(lanes.SegmentSize)
	h.Write(b)
	_, noted := h.Take()
	s, err := lanes.New(lanes.SegmentSize, size, d, noted)
	if err != nil {
		t.Fatal(err)
	}
	e, _ := receive(t, c, b)
	path := e.Path + ".midstates"
	c.KeepMidstates(s)
	if got := c.Midstates(d, size); got == nil || !slices.Equal(got.Edge, s.Edge) {
		t.Fatalf("kept %+v, got %+v", s, got)
	}
	form, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string][]byte{
		"short": form[:len(form)-1], "long": append(slices.Clip(form), 0),
		"flipped": bytes.Replace(form, form[100:104], []byte("flip"), 1),
	} {
		if err := os.WriteFile(path, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		if c.Midstates(d, size) != nil {
			t.Errorf("%s: given", name)
		}
	}
	c.KeepMidstates(s)
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	if c.Midstates(d, size) != nil {
		t.Error("given, though anyone could have written them")
	}
}
