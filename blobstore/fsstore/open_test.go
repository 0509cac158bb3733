package fsstore

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

// TestRefusesWhatIsNoStore: Open and Init say what they found instead, and leave it as it was.
func TestRefusesWhatIsNoStore(t *testing.T) {
	for _, c := range []struct {
		name       string
		files      map[string]string // nil: no folder
		open, init error             // nil: no error
		says       string            // by Open
	}{
		{"no folder", nil, blobstore.ErrNotStore, nil, "no such folder"},
		{"empty", map[string]string{}, blobstore.ErrNotStore, nil, "folder is empty"},
		{"other files", map[string]string{"a.txt": "", "b/c": "", "d": "", "e": ""}, blobstore.ErrNotStore,
			blobstore.ErrNotStore, "a.txt, b, d and 1 more"},
		{"a store without its marker", map[string]string{"blobs/sha256/00/x": "", "refs.log": ""},
			blobstore.ErrNotStore, blobstore.ErrNotStore, "no store.json"},
		{"refs without the marker", map[string]string{"refs.log": strings.Repeat("x", 100)}, blobstore.ErrNotStore,
			blobstore.ErrNotStore, "no store.json"},
		{"half made", map[string]string{"LOCK": "1\n", "refs.log": "x", ".store.json.tmp-X": "{"},
			blobstore.ErrNotStore, nil, "LOCK"},
		{"a fresh filesystem", map[string]string{"lost+found/.x": ""}, blobstore.ErrNotStore, nil, "lost+found"},
		{"not our marker", map[string]string{"store.json": `{"format":"other","version":1}`}, blobstore.ErrDamaged,
			blobstore.ErrDamaged, "store.json"},
		{"broken marker", map[string]string{"store.json": `{"fo`}, blobstore.ErrDamaged,
			blobstore.ErrDamaged, "store.json"},
	} {
		t.Run(c.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "data", "store")
			for name, content := range c.files {
				write(t, filepath.Join(dir, name), content)
			}
			if c.files != nil {
				os.MkdirAll(dir, 0o755)
			}
			before := tree(t, dir)
			_, err := Open(dir, Options{})
			if !errors.Is(err, c.open) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("open: %v, want %v, saying %q", err, c.open, c.says)
			}
			if now := tree(t, dir); !slices.Equal(now, before) {
				t.Errorf("open changed %q into %q", before, now)
			}
			if err := Init(dir); !errors.Is(err, c.init) || (err == nil) != (c.init == nil) {
				t.Fatalf("init: %v, want %v", err, c.init)
			}
			if c.init != nil {
				if now := tree(t, dir); !slices.Equal(now, before) {
					t.Errorf("init changed %q into %q", before, now)
				}
				return
			}
			if err := Init(dir); err != nil {
				t.Errorf("second init: %v", err)
			}
			open(t, dir)
		})
	}
}

func tree(t *testing.T, dir string) (paths []string) {
	t.Helper()
	filepath.WalkDir(dir, func(path string, _ os.DirEntry, err error) error {
		if err == nil {
			paths = append(paths, path)
		}
		return nil
	})
	return paths
}

func TestNewerFormat(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "store.json"), `{"format":"kiln-store","version":2}`)
	_, oerr := Open(dir, Options{})
	for what, err := range map[string]error{"open": oerr, "init": Init(dir)} {
		if err == nil || !strings.Contains(err.Error(), "format 2") || errors.Is(err, blobstore.ErrNotStore) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

func TestOneProcess(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	st := open(t, dir)
	_, err := Open(dir, Options{})
	if !errors.Is(err, durable.ErrLocked) || !strings.Contains(err.Error(), fmt.Sprintf("pid %d", os.Getpid())) {
		t.Errorf("second open: %v", err)
	}
	if err := st.Close(); err != nil {
		t.Fatal(err)
	}
	if err := st.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
	if _, err := st.Resume(t.Context(), strings.Repeat("0", 32)); !errors.Is(err, os.ErrClosed) {
		t.Errorf("resume after close: %v", err)
	}
	if _, err := st.Put(t.Context(), blobstore.Ref{}); err == nil {
		t.Error("put after close: no error")
	}
	open(t, dir)
}

// TestMissingParts: a store that lost its refs is not taken for an empty one; folders that a copy may have left out
// because they were empty are made again.
func TestMissingParts(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	for _, sub := range []string{"blobs", "uploads"} {
		if err := os.RemoveAll(filepath.Join(dir, sub)); err != nil {
			t.Fatal(err)
		}
	}
	st := open(t, dir)
	push(t, st, []byte("x"))
	st.Close()
	if err := os.Remove(filepath.Join(dir, "refs.log")); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(dir, Options{}); !errors.Is(err, blobstore.ErrDamaged) || !strings.Contains(err.Error(), "refs.log") {
		t.Errorf("open without refs.log: %v", err)
	}
}

// TestSweep: halves of uploads go when the store is opened, and are named.
func TestSweep(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	for _, name := range []string{strings.Repeat("a", 32) + ".data", strings.Repeat("b", 32) + ".state"} {
		write(t, filepath.Join(dir, "uploads", name), "x")
	}
	write(t, filepath.Join(dir, "uploads", "not-ours"), "x")
	var notes []string
	st, err := Open(dir, Options{Notify: func(s string) { notes = append(notes, s) }})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if len(notes) != 2 {
		t.Errorf("notes %q", notes)
	}
	if left := tree(t, filepath.Join(dir, "uploads")); len(left) != 2 {
		t.Errorf("left: %q", left)
	}
}

// TestListPages lists more blobs of one folder than a listing holds in memory.
func TestListPages(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	st := open(t, dir)
	const n = page + 100
	write(t, filepath.Join(dir, "blobs", "sha256", "ab", "not a digest"), "")
	write(t, filepath.Join(dir, "blobs", "sha256", "ab", strings.Repeat("z", 64)), "")
	for i := range n {
		write(t, filepath.Join(dir, "blobs", "sha256", "ab", fmt.Sprintf("ab%062x", i*7)), "")
	}
	i := 0
	for info, err := range st.List(t.Context(), identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		if want := fmt.Sprintf("ab%062x", i*7); info.Digest.Hex() != want {
			t.Fatalf("blob %d is %s, want %s", i, info.Digest.Hex(), want)
		}
		i++
	}
	if i != n {
		t.Errorf("%d blobs, want %d", i, n)
	}
}

// TestInsideOfAStore: no store is made inside of another one, however its path is written.
func TestInsideOfAStore(t *testing.T) {
	outer := filepath.Join(t.TempDir(), "outer")
	newStore(t, outer)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(filepath.Join(outer, "blobs"), link); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{
		filepath.Join(outer, "sub"), filepath.Join(outer, "blobs", "a", "b"), outer + "/x/../y",
		filepath.Join(link, "sub"), link,
	} {
		err := Init(dir)
		if !errors.Is(err, blobstore.ErrNotStore) || !strings.Contains(err.Error(), "inside of the store "+outer) {
			t.Errorf("%s: %v", dir, err)
		}
		if _, err := os.Stat(dir); dir != link && err == nil {
			t.Errorf("%s was made", dir)
		}
	}
	if err := Init(outer); err != nil {
		t.Error(err)
	}
	if err := Init(outer + "-2"); err != nil {
		t.Error(err)
	}
}

// TestReadOnly: a store that is opened for reading only is left as it was, whatever a killed process left in it.
func TestReadOnly(t *testing.T) {
	st, _ := openFaulty(t)
	data := pattern(5000, "read")
	i := push(t, st, data)
	putSeq(t, st, 1)
	open, whole := begin(t, st, data, 1000), begin(t, st, data, 5000)
	if _, err := whole.Commit(t.Context(), i.Digest); err != nil {
		t.Fatal(err)
	}
	damaged := begin(t, st, data, 100)
	i = stat(t, st, data)
	putSeq(t, st, 2)
	kill(t, st)
	dir := st.dir
	for name, content := range map[string]string{
		"quarantine/" + i.Digest.Hex() + asideNote:         "{}",
		"uploads/" + damaged.ID() + uploadState:            strings.Repeat("x", statesAt),
		"uploads/" + strings.Repeat("0", 32) + uploadData:  "half",
		"uploads/" + strings.Repeat("1", 32) + uploadState: "half",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	log := filepath.Join(dir, refsName)
	if err := os.Truncate(log, st.refs.end-3); err != nil {
		t.Fatal(err)
	}
	appendTo(t, filepath.Join(dir, uploadsName, open.ID()+uploadData), []byte("more"))
	before := content(t, dir)

	st, err := Open(dir, Options{ReadOnly: true, Disk: durable.Disk{
		Fault: func(op durable.Op, path string, do func() error) error {
			t.Errorf("%s %s", op, path)
			return do()
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, []uint64{1}) || len(st.Dropped()) != 1 {
		t.Errorf("refs %v, %v, dropped %v", got, err, st.Dropped())
	}
	for id, size := range map[string]int64{open.ID(): 1004, whole.ID(): 5000} {
		if u, err := st.Resume(t.Context(), id); err != nil || u.Size() != size {
			t.Errorf("resume %s: %v, want %d bytes", id, err, size)
		}
	}
	for _, id := range []string{damaged.ID(), strings.Repeat("0", 32), strings.Repeat("1", 32), "x"} {
		if _, err := st.Resume(t.Context(), id); !errors.Is(err, blobstore.ErrUploadUnknown) {
			t.Errorf("resume %s: %v", id, err)
		}
	}
	u, err := st.Resume(t.Context(), open.ID())
	if err != nil {
		t.Fatal(err)
	}
	_, created := st.Create(t.Context(), identity.Digest{}, -1)
	_, put := st.Put(t.Context(), blobstore.Ref{Seq: 3})
	_, appended := u.Append(t.Context(), 1004, strings.NewReader("x"))
	_, ended := u.Commit(t.Context(), i.Digest)
	for what, err := range map[string]error{
		"create": created, "put": put, "append": appended, "commit": ended, "abort": u.Abort(t.Context()),
		"delete": st.Delete(t.Context(), i), "set aside": st.SetAside(t.Context(), i, "why"),
	} {
		if !errors.Is(err, blobstore.ErrReadOnly) {
			t.Errorf("%s: %v", what, err)
		}
	}
	stat(t, st, data)
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	if after := content(t, dir); !maps.Equal(before, after) {
		t.Errorf("changed: %v, was %v", slices.Sorted(maps.Keys(after)), slices.Sorted(maps.Keys(before)))
	}
}

// content returns what is in each file of a folder, but for the lock.
func content(t *testing.T, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() || e.Name() == lockName {
			return err
		}
		fi, err := e.Info()
		b, rerr := os.ReadFile(path)
		all[path] = fmt.Sprint(fi.ModTime(), fi.Mode(), string(b))
		return errors.Join(err, rerr)
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}
