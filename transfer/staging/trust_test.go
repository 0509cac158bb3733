package staging

import (
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
)

// TestForeign: an area is never opened, and no record read, through a link or in a file.
func TestForeign(t *testing.T) {
	for name, make := range map[string]func(dir, elsewhere string) error{
		"a symbolic link": func(dir, elsewhere string) error { return os.Symlink(elsewhere, dir) },
		"a file":          func(dir, _ string) error { return os.WriteFile(dir, []byte("x"), 0o644) },
	} {
		target := filepath.Join(t.TempDir(), "m")
		elsewhere := t.TempDir()
		if err := writeRecord(Options{}.Disk, filepath.Join(elsewhere, completeName), Record{}); err != nil {
			t.Fatal(err)
		}
		if err := make(dirOf(target), elsewhere); err != nil {
			t.Fatal(err)
		}
		_, openErr := Open(t.Context(), target, Options{})
		_, knownErr := Known(target)
		for _, err := range []error{openErr, knownErr, Trust(target)} {
			if !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), dirOf(target)+": ") ||
				!strings.Contains(err.Error(), name) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if left, err := os.ReadDir(elsewhere); err != nil || len(left) != 1 {
			t.Errorf("%s: %v, %v", name, left, err)
		}
		if fi, err := os.Lstat(dirOf(target)); err != nil || fi.IsDir() {
			t.Errorf("%s: %v, %v", name, fi, err)
		}
	}
	dangling := filepath.Join(t.TempDir(), "m")
	if err := os.Symlink("nowhere", dirOf(dangling)); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(t.Context(), dangling, Options{}); !errors.Is(err, ErrForeign) {
		t.Errorf("a link to nowhere: %v", err)
	}
	if err := Trust(filepath.Join(t.TempDir(), "none", "m")); err != nil {
		t.Errorf("nothing: %v", err)
	}
}

// TestOwner: an area of another user is not believed, unless that user is root or owns the folder above it.
func TestOwner(t *testing.T) {
	for _, tt := range []struct {
		owner, above, me uint32
		want             bool
	}{
		{1, 1, 1, false}, {1, 0, 1, false}, {1, 1, 0, false}, {0, 0, 1, false}, {2, 0, 1, true}, {2, 1, 1, true}, {0, 1, 1, false}, {1, 0, 0, true},
	} {
		if got := foreign(tt.owner, tt.above, tt.me); got != tt.want {
			t.Errorf("%+v: %v", tt, got)
		}
	}
	target := filepath.Join(t.TempDir(), "m")
	if err := os.Mkdir(dirOf(target), 0o755); err != nil {
		t.Fatal(err)
	}
	err := os.Chown(dirOf(target), os.Geteuid()+1, -1)
	switch got := Trust(target); {
	case err == nil: // only root can give a folder away
		if !errors.Is(got, ErrForeign) {
			t.Errorf("a folder given away: %v", got)
		}
	case got != nil:
		t.Errorf("own folder: %v, %v", err, got)
	}
}

// TestMidstatesBeside: those that fit are given, and they go with the file.
func TestMidstatesBeside(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	b := make([]byte, 2*seg+5)
	states := midstates(t, b)
	f := File{Name: "x", Size: int64(len(b)), Digest: states.Digest}
	a := open(t, target, Options{})
	s := segments(t, a, states)
	for i := range states.Len() {
		give(t, s, b, i, -1)
	}
	if Midstates(target, f) != nil {
		t.Error("there are some before any were kept")
	}
	a.KeepMidstates(states)
	finish(t, a, s, b)
	if got := Midstates(target, f); !reflect.DeepEqual(got, states) {
		t.Errorf("got %+v", got)
	}
	for _, other := range []File{{Name: "x", Size: f.Size + 1, Digest: f.Digest}, {Name: "x", Size: f.Size}} {
		if got := Midstates(target, other); got != nil {
			t.Errorf("of another file: %+v", got)
		}
	}
	path := statesPath(dirOf(target), f.Digest)
	form, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	flipped := slices.Clone(form)
	flipped[60] ^= 1
	for name, bad := range map[string][]byte{
		"none": nil, "cut": form[:len(form)-1], "damaged": flipped, "long": append(slices.Clone(form), make([]byte, 2*statesSlack)...),
	} {
		if err := os.WriteFile(path, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		if got := Midstates(target, f); got != nil {
			t.Errorf("%s: got %+v", name, got)
		}
	}
	if err := errors.Join(os.Remove(path), os.Symlink(path+".real", path), os.WriteFile(path+".real", form, 0o644)); err != nil {
		t.Fatal(err)
	}
	if got := Midstates(target, f); got != nil {
		t.Errorf("through a link: %+v", got)
	}
	if _, err := a.Confirm(recordOf(nil)); err != nil {
		t.Fatal(err)
	}
	if left, err := os.ReadDir(filepath.Dir(path)); err != nil || len(left) > 0 {
		t.Errorf("they stay: %v, %v", left, err)
	}
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}
