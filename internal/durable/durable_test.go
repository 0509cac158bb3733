package durable

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func names(t *testing.T, dir string) (out []string) {
	t.Helper()
	found, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range found {
		out = append(out, e.Name())
	}
	return out
}

// recorder notes every change and lets the nth one fail.
type recorder struct {
	ops     []string
	fail    int // 1 is the first change; 0: none
	persist bool
}

var errInjected = errors.New("injected")

func (r *recorder) fault(op Op, path string, do func() error) error {
	r.ops = append(r.ops, string(op))
	if len(r.ops) != r.fail {
		return do()
	}
	if r.persist {
		if err := do(); err != nil {
			return err
		}
	}
	return errInjected
}

func TestWriteFileOrder(t *testing.T) {
	var r recorder
	path := filepath.Join(t.TempDir(), "f")
	if err := (Disk{Fault: r.fault}).WriteFile(path, []byte("new"), 0o640); err != nil {
		t.Fatal(err)
	}
	want := []string{"create", "write", "sync", "rename", "sync folder"}
	if !slices.Equal(r.ops, want) {
		t.Errorf("changes %q, want %q", r.ops, want)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o640 || read(t, path) != "new" {
		t.Errorf("mode %v, content %q", st.Mode(), read(t, path))
	}
}

// TestWriteFileFaults lets each step of WriteFile fail, lost and persisted: the old content or the new one is there,
// whole, and no temporary file is left where it could be removed.
func TestWriteFileFaults(t *testing.T) {
	for n := 1; n <= 5; n++ {
		for _, persist := range []bool{false, true} {
			t.Run(fmt.Sprintf("%d persisted=%v", n, persist), func(t *testing.T) {
				dir := t.TempDir()
				path := filepath.Join(dir, "f")
				if err := (Disk{}).WriteFile(path, []byte("old"), 0o600); err != nil {
					t.Fatal(err)
				}
				r := recorder{fail: n, persist: persist}
				d := Disk{Fault: r.fault}
				if err := d.WriteFile(path, []byte("new"), 0o600); !errors.Is(err, errInjected) {
					t.Fatalf("error %v, want the injected one", err)
				}
				want := "old"
				if n == 5 || n == 4 && persist {
					want = "new"
				}
				if got := read(t, path); got != want {
					t.Errorf("content %q, want %q", got, want)
				}
				if n > 1 && len(names(t, dir)) != 1 {
					t.Errorf("left over: %q", names(t, dir))
				}
				if err := d.RemoveTemps(path); err != nil {
					t.Error(err)
				}
				if got := names(t, dir); !slices.Equal(got, []string{"f"}) {
					t.Errorf("after RemoveTemps: %q", got)
				}
			})
		}
	}
}

// TestShortWrite: of a write that is cut short the caller learns how much there is.
func TestShortWrite(t *testing.T) {
	d := Disk{Fault: func(op Op, _ string, do func() error) error {
		if op == OpWrite {
			return ShortWrite{errInjected}
		}
		return do()
	}}
	path := filepath.Join(t.TempDir(), "f")
	f, err := d.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if n, err := f.WriteAt([]byte("01234567"), 2); n != 4 || !errors.Is(err, errInjected) {
		t.Errorf("WriteAt: %d, %v", n, err)
	}
	if n, err := f.Write([]byte("ab")); n != 1 || !errors.Is(err, errInjected) {
		t.Errorf("Write: %d, %v", n, err)
	}
	if got := read(t, path); got != "a\x000123" {
		t.Errorf("content %q", got)
	}
}

func TestPublishNewKeepsWhatIsThere(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	for i, want := range []error{nil, fs.ErrExist} {
		f, err := Disk{}.CreateTemp(path, 0o400)
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(f, "content %d", i)
		if err := f.PublishNew(path); !errors.Is(err, want) {
			t.Errorf("PublishNew %d: %v, want %v", i, err, want)
		}
	}
	if got := read(t, path); got != "content 0" {
		t.Errorf("content %q", got)
	}
	if got := names(t, dir); len(got) != 1 {
		t.Errorf("left over: %q", got)
	}
}

func TestFolders(t *testing.T) {
	var d Disk
	dir := t.TempDir()
	a, b := filepath.Join(dir, "x/y/a"), filepath.Join(dir, "b")
	for _, p := range []string{a, b, a} {
		if err := d.MkdirAll(p, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := d.WriteFile(filepath.Join(p, "name"), []byte(p), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := d.MoveNew(a, b); !errors.Is(err, fs.ErrExist) {
		t.Errorf("MoveNew over a folder: %v", err)
	}
	if err := d.Exchange(a, b); err != nil {
		t.Fatal(err)
	}
	if read(t, filepath.Join(a, "name")) != b || read(t, filepath.Join(b, "name")) != a {
		t.Error("folders were not exchanged")
	}
	if err := d.MoveNew(a, filepath.Join(dir, "c")); err != nil {
		t.Error(err)
	}
	if err := d.Exchange(filepath.Join(dir, "none"), b); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("Exchange with nothing: %v", err)
	}
	file := filepath.Join(b, "name")
	if err := d.Mkdir(0o755, file); !errors.Is(err, fs.ErrExist) {
		t.Errorf("Mkdir over a file: %v", err)
	}
	if err := d.Remove(filepath.Join(dir, "none")); err != nil {
		t.Errorf("Remove of nothing: %v", err)
	}
}

func TestClone(t *testing.T) {
	dir := t.TempDir()
	data := bytes.Repeat([]byte("0123456789abcdef"), 50_000) // three pieces and a bit
	if err := os.WriteFile(filepath.Join(dir, "src"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	src, err := os.Open(filepath.Join(dir, "src"))
	if err != nil {
		t.Fatal(err)
	}
	defer src.Close()
	if _, err := src.Seek(100, 0); err != nil {
		t.Fatal(err)
	}
	f, err := Disk{}.Clone(src, filepath.Join(dir, "copy"), 0o400)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
	if st, _ := os.Stat(f.Name()); st.Mode().Perm() != 0o400 || read(t, f.Name()) != string(data) {
		t.Errorf("mode %v, or the bytes differ", st.Mode())
	}
	if _, err := (Disk{}).Clone(src, f.Name(), 0o400); !errors.Is(err, fs.ErrExist) {
		t.Errorf("second copy to one name: %v", err)
	}
}

func TestReserve(t *testing.T) {
	f, err := Disk{}.CreateTemp(filepath.Join(t.TempDir(), "f"), 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Discard()
	if err := f.Reserve(1 << 20); err != nil {
		t.Fatal(err)
	}
	if n, err := f.Size(); n != 0 || err != nil {
		t.Errorf("size %d, %v after Reserve", n, err)
	}
	free, err := Free(filepath.Dir(f.Name()))
	if err != nil || free <= 0 {
		t.Fatalf("free %d, %v", free, err)
	}
	if err := f.Reserve(1 << 60); err == nil {
		t.Error("reserved more than any disk has")
	}
}

func TestNote(t *testing.T) {
	path := filepath.Join(t.TempDir(), "f")
	f, err := Disk{}.CreateTemp(path, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	f.SetNote("kiln.test", "1")
	f.SetNote("kiln.test", "12345")
	f.SetNote("kiln.long", strings.Repeat("x", noteMax+1))
	if err := f.Publish(path); err != nil {
		t.Fatal(err)
	}
	if got := Note(path, "kiln.test"); got != "12345" {
		t.Errorf("note %q", got)
	}
	for _, name := range []string{"kiln.none", "kiln.long"} {
		if got := Note(path, name); got != "" {
			t.Errorf("%s: %q", name, got)
		}
	}
	if got := Note(path+"x", "kiln.test"); got != "" {
		t.Errorf("no file: %q", got)
	}
}

func TestAcquire(t *testing.T) {
	path := filepath.Join(t.TempDir(), "LOCK")
	l, err := Acquire(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = Acquire(path)
	if want := fmt.Sprintf("pid %d", os.Getpid()); !errors.Is(err, ErrLocked) || !strings.Contains(err.Error(), want) {
		t.Errorf("second lock: %v, want ErrLocked and %q", err, want)
	}
	if err := l.Release(); err != nil {
		t.Fatal(err)
	}
	if l, err = Acquire(path); err != nil {
		t.Fatalf("after the release: %v", err)
	}
	l.Release()
}

// TestGroup: what a caller did before Do is covered by the run it shares, and many callers share few runs.
func TestGroup(t *testing.T) {
	var (
		g       Group
		mu      sync.Mutex
		written = map[int]bool{}
		synced  = map[int]bool{}
		runs    int
		inside  int
		wg      sync.WaitGroup
	)
	gate := make(chan struct{})
	flush := func() error {
		mu.Lock()
		defer mu.Unlock()
		if inside++; inside > 1 {
			t.Error("two runs at once")
		}
		first := runs == 0
		runs++
		for i := range written {
			synced[i] = true
		}
		mu.Unlock()
		if first {
			<-gate
		}
		mu.Lock()
		inside--
		return nil
	}
	const n = 100
	for i := range n {
		wg.Go(func() {
			mu.Lock()
			written[i] = true
			all := len(written) == n
			mu.Unlock()
			if all {
				close(gate)
			}
			if err := g.Do(flush); err != nil {
				t.Error(err)
			}
			mu.Lock()
			defer mu.Unlock()
			if !synced[i] {
				t.Errorf("%d returned before it was synced", i)
			}
		})
	}
	wg.Wait()
	if runs >= n {
		t.Errorf("%d runs for %d callers that waited together", runs, n)
	}
}

func TestBootID(t *testing.T) {
	id, err := Disk{}.BootID()
	if again, _ := (Disk{}).BootID(); err != nil || len(id) != 36 || id != again {
		t.Errorf("boot id %q, then %q, %v", id, again, err)
	}
}

// TestPath: what Path names is the open file, whatever lies at its name by now.
func TestPath(t *testing.T) {
	dir := t.TempDir()
	name, other, to := filepath.Join(dir, "name"), filepath.Join(dir, "other"), filepath.Join(dir, "to")
	err := errors.Join(os.WriteFile(name, []byte("opened"), 0o644), os.WriteFile(other, []byte("other"), 0o644))
	if err != nil {
		t.Fatal(err)
	}
	f, err := OpenRegular(name, os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := errors.Join(os.Rename(name, name+"-away"), os.Symlink(other, name)); err != nil {
		t.Fatal(err)
	}
	if err := (Disk{}).Link(Path(f), to); err != nil || read(t, to) != "opened" {
		t.Errorf("linked %q, %v", read(t, to), err)
	}
	if err := (Disk{}).Link(Path(f), to); !errors.Is(err, fs.ErrExist) {
		t.Errorf("in place of another: %v", err)
	}
	again, err := OpenRegular(Path(f), os.O_RDONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(again.Close(), os.Remove(to), os.Remove(name+"-away")); err != nil {
		t.Fatal(err)
	}
	if err := (Disk{}).Link(Path(f), to); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a file that has no name any more: %v", err)
	}
}
