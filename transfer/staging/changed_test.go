package staging

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
)

// TestAdoptChanged: a file that is written to, or replaced, while it is hashed does not match; one that is changed later
// is not recorded, be it that it stays or that it is put in place.
func TestAdoptChanged(t *testing.T) {
	b := random(1 << 20)
	x := File{Name: "x", Size: int64(len(b)), Digest: identity.Sum(b)}
	r := Record{Files: []File{x}}
	write := func(path string) error { return os.WriteFile(path, b, 0o644) }
	restore := func(path string) error { // the bytes and the times are as they were
		fi, err := os.Lstat(path)
		return errors.Join(err, write(path), os.Chtimes(path, time.Time{}, fi.ModTime()))
	}
	replace := func(path string) error { return errors.Join(write(path+".new"), os.Rename(path+".new", path)) }
	for name, tt := range map[string]struct {
		during, after func(path string) error
		publish       bool
	}{
		"as it is":           {},
		"as it is, put":      {publish: true},
		"written":            {during: write},
		"written, times put": {during: restore},
		"replaced":           {during: replace},
		"gone":               {during: os.Remove},
		"written later":      {after: write},
		"replaced later":     {after: replace},
		"written later, put": {after: write, publish: true},
	} {
		t.Run(name, func(t *testing.T) {
			target := filepath.Join(t.TempDir(), "m")
			path := filepath.Join(target, x.Name)
			old := time.Now().Add(-time.Hour)
			if err := errors.Join(os.Mkdir(target, 0o755), write(path), os.Chtimes(path, old, old)); err != nil {
				t.Fatal(err)
			}
			a := open(t, target, Options{})
			defer closeArea(t, a)
			if err := a.Begin(r); err != nil {
				t.Fatal(err)
			}
			changed := tt.during == nil
			ok, err := a.Adopt(t.Context(), []Found{{x, path}}, func(int, int64) {
				if !changed {
					changed = true
					if err := tt.during(path); err != nil {
						t.Error(err)
					}
				}
			})
			if err != nil || ok[0] != (tt.during == nil) {
				t.Fatalf("adopted: %t, %v", ok, err)
			}
			if !ok[0] {
				return
			}
			if tt.after != nil {
				if err := tt.after(path); err != nil {
					t.Fatal(err)
				}
			}
			got, err := Record{}, error(nil)
			if tt.publish {
				got, err = a.Publish(r, true)
			} else {
				got, err = a.Confirm(r)
			}
			if tt.after != nil {
				if k, kerr := Known(target); !errors.Is(err, ErrChanged) || kerr != nil || k.Complete != nil {
					t.Errorf("recorded: %v, %v, %v", err, k.Complete, kerr)
				}
				return
			}
			fi, serr := os.Lstat(path)
			if err != nil || serr != nil || !got.Files[0].Untouched(fi) {
				t.Errorf("got %+v, %v", got, errors.Join(err, serr))
			}
		})
	}
}
