package fsstore

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
)

// What is no regular file is in nobody's way: it is refused where it would be read, and nobody waits for it.
func TestNoRegularFile(t *testing.T) {
	for _, kind := range []string{"pipe", "link"} {
		t.Run(kind, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			newStore(t, dir)
			st, err := Open(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			d := identity.Sum([]byte("blob"))
			paths := []string{
				st.path(d), st.uploadPath(strings.Repeat("a", 32), uploadState), st.uploadPath(strings.Repeat("b", 32), uploadData),
				st.uploadPath(strings.Repeat("b", 32), uploadState),
			}
			kill(t, st)
			elsewhere := filepath.Join(t.TempDir(), "elsewhere")
			if err := os.WriteFile(elsewhere, []byte("blob"), 0o600); err != nil {
				t.Fatal(err)
			}
			for _, path := range paths {
				if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
					t.Fatal(err)
				}
				make := func() error { return syscall.Mkfifo(path, 0o600) }
				if kind == "link" {
					make = func() error { return os.Symlink(elsewhere, path) }
				}
				if err := make(); err != nil {
					t.Fatal(err)
				}
			}
			st, err = Open(dir, Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer kill(t, st)
			if i, err := st.stat(d); err != nil {
				t.Fatal(err)
			} else if r, err := st.Open(t.Context(), i, 0, -1); err == nil {
				t.Errorf("%T", r)
			}
			for _, id := range []string{strings.Repeat("a", 32), strings.Repeat("b", 32)} {
				if u, err := st.Resume(t.Context(), id); err == nil {
					t.Errorf("upload %s has %d bytes", id, u.Size())
				}
			}
			for _, err := range st.Uploads(t.Context()) {
				if err != nil {
					t.Error(err)
				}
			}
			if b, err := os.ReadFile(elsewhere); err != nil || string(b) != "blob" {
				t.Errorf("%q, %v", b, err)
			}
		})
	}
}
