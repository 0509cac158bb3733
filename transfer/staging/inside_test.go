package staging

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// precious makes a folder with a file in it, and returns what fails the test if one of them was changed.
func precious(t *testing.T) (dir string, check func()) {
	t.Helper()
	dir = t.TempDir()
	path := filepath.Join(dir, "precious")
	if err := os.WriteFile(path, []byte("bytes"), 0o600); err != nil {
		t.Fatal(err)
	}
	was, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return dir, func() {
		t.Helper()
		b, err := os.ReadFile(path)
		now, serr := os.Lstat(path)
		if err != nil || serr != nil || string(b) != "bytes" || now.Mode() != was.Mode() {
			t.Errorf("what a link leads to was changed: %q, %v", b, errors.Join(err, serr))
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
			t.Errorf("what a link leads to was changed: %v, %v", left, err)
		}
	}
}

// TestForeignInside: an area in which a name stands for something else than a folder or a file of its own is not opened,
// nothing that a link in it leads to is changed, and nobody waits for a pipe.
func TestForeignInside(t *testing.T) {
	link := func(to ...string) func(string, string) error {
		return func(path, elsewhere string) error {
			return os.Symlink(filepath.Join(append([]string{elsewhere}, to...)...), path)
		}
	}
	pipe := func(path, _ string) error { return syscall.Mkfifo(path, 0o644) }
	folder := func(path, _ string) error { return os.Mkdir(path, 0o755) }
	file := func(path, _ string) error { return os.WriteFile(path, nil, 0o644) }
	makers := map[string]func(path, elsewhere string) error{
		"is a symbolic link": link(), "is a symbolic link to a file": link("precious"),
		"is a symbolic link to nowhere": link("nowhere"), "is not a regular file: a pipe": pipe,
		"is not a regular file: a folder": folder, "is not a folder: a pipe": pipe, "is not a folder: a file": file,
	}
	for _, name := range []string{ownerName, startedName, completeName, statesName, "parts-A", "stage-A", "old-A"} {
		isFile := name == ownerName || strings.HasSuffix(name, ".json")
		for what, make := range makers {
			if isFile && strings.Contains(what, "not a folder") || !isFile && strings.Contains(what, "not a regular") {
				continue
			}
			t.Run(name+" "+what, func(t *testing.T) {
				target := filepath.Join(t.TempDir(), "m")
				elsewhere, check := precious(t)
				path := filepath.Join(dirOf(target), name)
				if err := errors.Join(os.Mkdir(dirOf(target), 0o755), make(path, elsewhere)); err != nil {
					t.Fatal(err)
				}
				why, _, _ := strings.Cut(what, " to ")
				why, _, _ = strings.Cut(why, ":")
				_, err := Open(t.Context(), target, Options{})
				for _, err := range []error{err, Trust(target)} {
					if !errors.Is(err, ErrForeign) || !strings.HasSuffix(err.Error(), ": "+name+" in it "+why) ||
						strings.Contains(err.Error(), "\n") {
						t.Errorf("got %v", err)
					}
				}
				_, err = Known(target)
				if reads := isFile && name != ownerName; reads != errors.Is(err, ErrForeign) || !reads && err != nil {
					t.Errorf("known: %v", err)
				}
				_, err = Sweep(target, time.Now().Add(time.Hour), func() (*Area, error) {
					return Open(t.Context(), target, Options{})
				})
				if err != nil && !errors.Is(err, ErrForeign) {
					t.Errorf("swept: %v", err)
				}
				check()
				if _, err := os.Lstat(target); err == nil {
					t.Error("something is at the target")
				}
			})
		}
	}
}

// TestForeignFile: a record of another user is not believed.
func TestForeignFile(t *testing.T) {
	for _, name := range []string{completeName, startedName, ownerName, statesName} {
		target := filepath.Join(t.TempDir(), "m")
		path := filepath.Join(dirOf(target), name)
		err := os.Mkdir(dirOf(target), 0o755)
		if err == nil && name == statesName {
			err = os.Mkdir(path, 0o755)
		} else if err == nil {
			err = os.WriteFile(path, []byte("{}"), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := Trust(target); err != nil {
			t.Errorf("%s of this user: %v", name, err)
		}
		if os.Chown(path, os.Geteuid()+1, -1) == nil { // only root can give a file away
			if err := Trust(target); !errors.Is(err, ErrForeign) || !strings.Contains(err.Error(), name+" in it belongs") {
				t.Errorf("%s given away: %v", name, err)
			}
		}
	}
}

// TestLinksLater: what becomes a link while a pull is at work is not followed.
func TestLinksLater(t *testing.T) {
	b := random(2*seg + 5)
	states := midstates(t, b)
	file := File{Name: "x", Size: int64(len(b)), Digest: states.Digest}
	for name, make := range map[string]func(a *Area, to string) error{
		"a file of midstates": func(a *Area, to string) error {
			path := statesPath(a.dir, states.Digest)
			return errors.Join(os.Mkdir(filepath.Dir(path), 0o755), os.Symlink(filepath.Join(to, "precious"), path))
		},
		"a second name": func(a *Area, to string) error {
			path := statesPath(a.dir, states.Digest)
			return errors.Join(os.Mkdir(filepath.Dir(path), 0o755), os.Link(filepath.Join(to, "precious"), path))
		},
		"their folder": func(a *Area, to string) error { return os.Symlink(to, filepath.Join(a.dir, statesName)) },
		"a part": func(a *Area, to string) error {
			return os.Symlink(filepath.Join(to, "precious"), a.part(states.Digest))
		},
		"a record": func(a *Area, to string) error {
			part, err := os.Create(a.part(states.Digest))
			return errors.Join(err, part.Truncate(file.Size), part.Close(),
				os.Symlink(filepath.Join(to, "precious"), part.Name()+stateSuffix),
				syscall.Mkfifo(part.Name()+syncedSuffix, 0o644))
		},
		"a record, named twice": func(a *Area, to string) error {
			return os.Link(filepath.Join(to, "precious"), a.part(states.Digest)+stateSuffix)
		},
	} {
		t.Run(name, func(t *testing.T) {
			a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
			elsewhere, check := precious(t)
			if err := make(a, elsewhere); err != nil {
				t.Fatal(err)
			}
			a.KeepMidstates(states)
			if got := Midstates(a.target, file); (got == nil) != (name == "their folder") {
				t.Errorf("midstates: %v", got)
			}
			if _, err := Progress(a.target, file); err != nil {
				t.Error(err)
			}
			f := segments(t, a, states)
			for i := range states.Len() {
				give(t, f, b, i, -1)
			}
			if err := errors.Join(f.Finish(), f.Close()); err != nil {
				t.Fatal(err)
			}
			if err := a.Begin(Record{}); err != nil {
				t.Error(err)
			}
			if _, err := a.Confirm(Record{}); err != nil != (name == "their folder") {
				t.Errorf("confirmed: %v", err)
			}
			check()
			closeArea(t, a)
		})
	}
}

// TestOpenEnds: whoever opens an area gives up when asked to.
func TestOpenEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	path := filepath.Join(t.TempDir(), ownerName)
	if _, err := claim(ctx, path, mark{}, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := os.Symlink("nowhere", path); err != nil {
		t.Fatal(err)
	}
	if _, err := claim(t.Context(), path, mark{}, Options{}); !errors.Is(err, ErrForeign) {
		t.Errorf("a link to nowhere: %v", err)
	}
}
