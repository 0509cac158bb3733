package staging

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(testlanes.Use(m)) }

func open(t *testing.T, target string, o Options) *Area {
	t.Helper()
	a, err := Open(t.Context(), target, o)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func closeArea(t *testing.T, a *Area) {
	t.Helper()
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
}

func random(n int) []byte {
	b := make([]byte, n)
	r := rand.NewChaCha8([32]byte{byte(n)})
	r.Read(b)
	return b
}

// put receives whole files into an area and returns the record of them.
func put(t *testing.T, a *Area, files map[string][]byte) Record {
	t.Helper()
	r := recordOf(files)
	if err := a.Begin(r); err != nil {
		t.Fatal(err)
	}
	for _, b := range files {
		p, err := a.Partial(identity.Sum(b), int64(len(b)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := p.Write(b[p.Offset():]); err != nil {
			t.Fatal(err)
		}
		if got, err := p.Finish(); err != nil || got != identity.Sum(b) {
			t.Fatal(got, err)
		}
		if err := p.Close(); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func recordOf(files map[string][]byte) (r Record) {
	for name, b := range files {
		r.Files = append(r.Files, File{Name: name, Size: int64(len(b)), Digest: identity.Sum(b)})
	}
	slices.SortFunc(r.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	return r
}

func holds(t *testing.T, dir string, files map[string][]byte) {
	t.Helper()
	n := 0
	err := Walk(dir, func(name string, e fs.DirEntry) error {
		n++
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err == nil && (!bytes.Equal(b, files[name]) || !e.Type().IsRegular()) {
			err = fmt.Errorf("%s: other bytes than those published", name)
		}
		return err
	})
	if err != nil || n != len(files) {
		t.Fatalf("%d of %d files, %v", n, len(files), err)
	}
}

func TestResume(t *testing.T) {
	const cut = syncEvery + saveEvery + 100
	b := random(cut + 1000)
	d := identity.Sum(b)
	tests := []struct {
		name string
		boot string
		kill bool
		want int64
	}{
		{"closed", "one", false, cut},
		{"killed", "one", true, syncEvery + saveEvery},
		{"killed, machine restarted", "two", true, syncEvery},
		{"closed, machine restarted", "two", false, syncEvery},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			target := filepath.Join(t.TempDir(), "m")
			a := open(t, target, Options{Disk: durable.Disk{Boot: "one"}})
			p, err := a.Partial(d, int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			for off := 0; off < cut; off += durable.PieceSize {
				if _, err := p.Write(b[off:min(cut, off+durable.PieceSize)]); err != nil {
					t.Fatal(err)
				}
			}
			if tt.kill {
				err = errors.Join(p.wait(), p.close())
			} else {
				err = p.Close()
			}
			if err != nil {
				t.Fatal(err)
			}
			closeArea(t, a)

			a = open(t, target, Options{Disk: durable.Disk{Boot: tt.boot}})
			defer closeArea(t, a)
			if p, err = a.Partial(d, int64(len(b))); err != nil {
				t.Fatal(err)
			}
			if p.Offset() != tt.want {
				t.Errorf("continues at %d, want %d", p.Offset(), tt.want)
			}
			if _, err := p.Write(b[p.Offset():]); err != nil {
				t.Fatal(err)
			}
			if got, err := p.Finish(); got != d || err != nil {
				t.Errorf("got %s, %v", got, err)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestDistrust: what could have changed since it was hashed is not continued.
func TestDistrust(t *testing.T) {
	b := random(1 << 20)
	d := identity.Sum(b)
	tests := map[string]func(part string) error{
		"cut short":      func(part string) error { return os.Truncate(part, 100) },
		"second name":    func(part string) error { return os.Link(part, part+"x") },
		"gone":           os.Remove,
		"symbolic link":  func(part string) error { return errors.Join(os.Rename(part, part+"x"), os.Symlink(part+"x", part)) },
		"point cut":      func(part string) error { return os.Truncate(part+stateSuffix, 10) },
		"point nonsense": func(part string) error { return os.WriteFile(part+stateSuffix, []byte(`{"offset":7}`), 0o644) },
	}
	for name, damage := range tests {
		t.Run(name, func(t *testing.T) {
			a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
			defer closeArea(t, a)
			p, err := a.Partial(d, int64(len(b)))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := p.Write(b[:600_000]); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(p.Close(), damage(a.part(d))); err != nil {
				t.Fatal(err)
			}
			if p, err = a.Partial(d, int64(len(b))); err != nil {
				t.Fatal(err)
			}
			if p.Offset() != 0 {
				t.Errorf("continues at %d", p.Offset())
			}
			if _, err := p.Write(b); err != nil {
				t.Fatal(err)
			}
			if got, err := p.Finish(); got != d || err != nil {
				t.Errorf("got %s, %v", got, err)
			}
			if err := p.Close(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestPublish(t *testing.T) {
	parent := t.TempDir()
	target := filepath.Join(parent, "m")
	a := open(t, target, Options{})
	files := map[string][]byte{"a": random(10), "sub/b": random(300_000), "empty": {}, "twin/a": random(10)}
	r := put(t, a, files)
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("the target is there before it is published: %v", err)
	}
	mine := filepath.Join(target, "mine")
	if err := errors.Join(os.Mkdir(target, 0o755), os.WriteFile(mine, nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Publish(r, false); !errors.Is(err, fs.ErrExist) {
		t.Fatalf("a folder that is there: %v", err)
	}
	if err := os.Remove(mine); err != nil {
		t.Fatal(err)
	}
	done, err := a.Publish(r, false) // the folder is empty now
	if err != nil {
		t.Fatal(err)
	}
	holds(t, target, files)
	k, err := Known(target)
	if err != nil || k.Started != nil || k.Complete == nil || !k.Complete.Same(r) || !k.Complete.Verified.Equal(done.Verified) {
		t.Fatalf("known: %+v, %v", k, err)
	}
	for _, f := range k.Complete.Files {
		fi, err := os.Lstat(filepath.Join(target, f.Name))
		if err != nil || StatOf(fi) != *f.Stat || fi.Sys().(*syscall.Stat_t).Nlink != 1 {
			t.Errorf("%s: not as recorded: %v", f.Name, err)
		}
	}
	closeArea(t, a)
	entries, err := os.ReadDir(dirOf(target))
	if err != nil || len(entries) != 1 {
		t.Errorf("left beside the target: %v, %v", entries, err)
	}
}

func TestUnverified(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	good, bad := random(1000), random(1001)
	r := put(t, a, map[string][]byte{"good": good})
	r.Files = append(r.Files, File{Name: "bad", Size: 1001, Digest: identity.Sum(bad)})
	p, err := a.Partial(identity.Sum(bad), 1001)
	if err != nil {
		t.Fatal(err)
	}
	bad[1000] ^= 1
	if _, err := p.Write(bad); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Write([]byte{1}); err == nil {
		t.Error("a byte past the size was taken")
	}
	if _, err := p.Finish(); err != nil {
		t.Fatal(err)
	}
	if err := p.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := a.Publish(r, true); !errors.Is(err, ErrUnverified) {
		t.Errorf("published: %v", err)
	}
	if _, err := os.Lstat(target); !errors.Is(err, fs.ErrNotExist) {
		t.Error("something is at the target")
	}
}

// failNth fails the nth change of the disk, lost or persisted.
func failNth(n int, persisted bool, count *int) func(durable.Op, string, func() error) error {
	return func(_ durable.Op, _ string, do func() error) error {
		if *count++; *count != n {
			return do()
		}
		if persisted {
			if err := do(); err != nil {
				return err
			}
		}
		return errors.New("injected")
	}
}

// TestPublishFaults fails every change of the disk once, lost and persisted: the target holds the old files or the new
// ones, whole, and the next pull ends well.
func TestPublishFaults(t *testing.T) {
	old := map[string][]byte{"a": random(10), "b": random(20)}
	files := map[string][]byte{"a": random(11), "c/d": random(21)}
	for _, persisted := range []bool{false, true} {
		for n := 1; ; n++ {
			target := filepath.Join(t.TempDir(), "m")
			a := open(t, target, Options{})
			if _, err := a.Publish(put(t, a, old), false); err != nil {
				t.Fatal(err)
			}
			closeArea(t, a)

			a = open(t, target, Options{})
			r := put(t, a, files)
			count := 0
			a.disk.Fault = failNth(n, persisted, &count)
			_, err := a.Publish(r, true)
			a.disk.Fault = nil
			if count < n {
				closeArea(t, a)
				if err != nil || n < 10 {
					t.Fatalf("%d changes of the disk were seen: %v", n-1, err)
				}
				break
			}
			if err == nil { // there was another way
				holds(t, target, files)
				closeArea(t, a)
				continue
			}
			now := old
			if _, err := os.Lstat(filepath.Join(target, "c")); err == nil {
				now = files
			}
			holds(t, target, now)
			k, err := Known(target)
			if err != nil {
				t.Fatal(err)
			}
			if k.Complete != nil && k.Complete.Files[1].Digest != identity.Sum(now[k.Complete.Files[1].Name]) {
				t.Fatalf("change %d: the record is of other files: %+v", n, k.Complete)
			}
			closeArea(t, a)

			a = open(t, target, Options{})
			if _, err := a.Publish(put(t, a, files), true); err != nil {
				t.Fatalf("after change %d failed: %v", n, err)
			}
			holds(t, target, files)
			closeArea(t, a)
		}
	}
}

// TestPlainFilesystem: no hard links, no exchange, as on many network filesystems.
func TestPlainFilesystem(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	plain := func(op durable.Op, path string, do func() error) error {
		switch {
		case op == durable.OpLink:
			return &os.LinkError{Op: "link", New: path, Err: syscall.EPERM}
		case op == durable.OpRename && path == target && isDir(target):
			return errors.Join(fs.ErrExist, errors.ErrUnsupported)
		}
		return do()
	}
	for i := range 2 {
		a := open(t, target, Options{Disk: durable.Disk{Fault: plain}})
		if b := random(21); i > 0 {
			if ok, err := adopt(t, a, filepath.Join(target, "c/d"), b); err != nil || !ok {
				t.Errorf("adopt by copy: %v, %v", ok, err)
			}
		}
		files := map[string][]byte{"a": random(10 + i), "twin": random(10 + i), "c/d": random(21)}
		r := put(t, a, files)
		if _, err := a.Publish(r, true); err != nil {
			t.Fatal(err)
		}
		holds(t, target, files)
		closeArea(t, a)
	}
}

func isDir(path string) bool {
	entries, err := os.ReadDir(path)
	return err == nil && len(entries) > 0
}

// TestMovedAway: a pull died between the two renames that stand in for an exchange.
func TestMovedAway(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	files := map[string][]byte{"a": random(10)}
	if _, err := a.Publish(put(t, a, files), true); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(target, filepath.Join(dirOf(target), oldPrefix+"x")); err != nil {
		t.Fatal(err)
	}
	closeArea(t, a)
	closeArea(t, open(t, target, Options{}))
	holds(t, target, files)
}

func TestUmask(t *testing.T) {
	defer syscall.Umask(syscall.Umask(0o027))
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	defer closeArea(t, a)
	if _, err := a.Publish(put(t, a, map[string][]byte{"sub/a": random(10), "sub/twin": random(10)}), false); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]fs.FileMode{"": 0o750, "sub": 0o750, "sub/a": 0o640, "sub/twin": 0o640} {
		if fi, err := os.Stat(filepath.Join(target, name)); err != nil || fi.Mode().Perm() != want {
			t.Errorf("%q: %v, want %v, %v", name, fi.Mode().Perm(), want, err)
		}
	}
}

func TestCheck(t *testing.T) {
	a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
	defer closeArea(t, a)
	long := strings.Repeat("x", 256)
	for _, names := range [][]string{{"a", "a"}, {"a", "a/b"}, {"a/b", "a"}, {long}} {
		var r Record
		for _, n := range names {
			r.Files = append(r.Files, File{Name: n})
		}
		if err := a.Check(r); !errors.Is(err, ErrCollides) {
			t.Errorf("%.20q: %v", names, err)
		}
	}
	if err := a.Check(Record{Files: []File{{Name: "a"}, {Name: "A"}, {Name: "b/a"}}}); err != nil {
		t.Error(err)
	}
}

func TestBusy(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	if _, err := Open(t.Context(), target, Options{}); !errors.Is(err, ErrBusy) || !strings.Contains(err.Error(), fmt.Sprint(os.Getpid())) {
		t.Errorf("second pull: %v", err)
	}
	closeArea(t, a)
	closeArea(t, open(t, target, Options{}))
	if _, err := os.Lstat(dirOf(target)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an area with nothing in it stays: %v", err)
	}
}

// leave writes an owner file as another process would have left it.
func leave(t *testing.T, target string, change func(*mark)) {
	t.Helper()
	boot, err := durable.Disk{}.BootID()
	if err != nil {
		t.Fatal(err)
	}
	m, err := self("other", boot)
	if err != nil {
		t.Fatal(err)
	}
	change(&m)
	if err := os.MkdirAll(dirOf(target), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := create(filepath.Join(dirOf(target), ownerName), m); err != nil {
		t.Fatal(err)
	}
}

func TestTakeOver(t *testing.T) {
	cmd := exec.Command("true")
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	tests := map[string]func(*mark){
		"dead process":        func(m *mark) { m.PID = cmd.Process.Pid },
		"pid used again":      func(m *mark) { m.Start = "1" },
		"before the restart":  func(m *mark) { m.Boot = "before" },
		"silent on elsewhere": func(m *mark) { m.Boot, m.Host = "its own", "elsewhere" },
		"other namespace":     func(m *mark) { m.Space = "pid:[1]" },
	}
	for name, change := range tests {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			target := filepath.Join(t.TempDir(), "m")
			leave(t, target, change)
			part := filepath.Join(dirOf(target), partsPrefix+"other")
			if err := os.Mkdir(part, 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(part, "x"), nil, 0o644); err != nil {
				t.Fatal(err)
			}
			said := ""
			a := open(t, target, Options{Beat: 5 * time.Millisecond, Notify: func(s string) { said += s }})
			if !strings.Contains(said, "took over from pid ") {
				t.Errorf("said %q", said)
			}
			if _, err := os.Lstat(filepath.Join(dirOf(target), partsPrefix+a.id, "x")); err != nil {
				t.Errorf("its parts were not taken over: %v", err)
			}
			closeArea(t, a)
		})
	}
}

// TestCutOwner: a process died before it had written its owner file.
func TestCutOwner(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	leave(t, target, func(*mark) {})
	if err := os.Truncate(filepath.Join(dirOf(target), ownerName), 0); err != nil {
		t.Fatal(err)
	}
	closeArea(t, open(t, target, Options{Beat: 5 * time.Millisecond}))
}

// TestAlive: a process elsewhere that gives signs of life is not taken over.
func TestAlive(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	leave(t, target, func(m *mark) { m.Boot = "its own" })
	path := filepath.Join(dirOf(target), ownerName)
	m, err := read(path)
	if err != nil {
		t.Fatal(err)
	}
	o := start(path, m, 5*time.Millisecond)
	if _, err := Open(t.Context(), target, Options{Beat: 20 * time.Millisecond}); !errors.Is(err, ErrBusy) {
		t.Errorf("got %v", err)
	}
	if err := o.release(); err != nil {
		t.Error(err)
	}
}

// TestLost: a process that was stopped for long and taken over writes nothing more.
func TestLost(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	a := open(t, target, Options{})
	r := put(t, a, map[string][]byte{"a": random(10)})
	p, err := a.Partial(identity.Sum(random(20)), 20)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dirOf(target), ownerName)); err != nil {
		t.Fatal(err)
	}
	leave(t, target, func(*mark) {})
	a.owner.mu.Lock()
	a.owner.last -= a.owner.until // as if it had slept
	a.owner.mu.Unlock()
	if _, err := p.Write(random(20)); !errors.Is(err, ErrLost) {
		t.Errorf("write: %v", err)
	}
	if _, err := a.Publish(r, true); !errors.Is(err, ErrLost) {
		t.Errorf("publish: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); !errors.Is(err, ErrLost) {
		t.Errorf("close: %v", err)
	}
	if m, err := read(filepath.Join(dirOf(target), ownerName)); err != nil || m.ID != "other" {
		t.Errorf("the other one's owner file: %v, %v", m, err)
	}
}

func TestBeginDropsOther(t *testing.T) {
	a := open(t, filepath.Join(t.TempDir(), "m"), Options{})
	defer closeArea(t, a)
	put(t, a, map[string][]byte{"a": random(10), "b": random(20)})
	if err := a.Begin(recordOf(map[string][]byte{"b": random(20), "c": random(30)})); err != nil {
		t.Fatal(err)
	}
	if n := a.Missing(identity.Sum(random(10)), 10); n != 10 {
		t.Errorf("the part that is not wanted any more stays: %d", n)
	}
	if n := a.Missing(identity.Sum(random(20)), 20); n != 0 {
		t.Errorf("the part that is wanted still is gone: %d", n)
	}
}

func TestAdopt(t *testing.T) {
	target := filepath.Join(t.TempDir(), "m")
	good, bad := random(100), bytes.Clone(random(100))
	bad[99] ^= 1
	if err := os.Mkdir(target, 0o755); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{"good": good, "bad": bad, "short": good[:99]} {
		if err := os.WriteFile(filepath.Join(target, name), b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("good", filepath.Join(target, "link")); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(target, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	a := open(t, target, Options{})
	defer closeArea(t, a)
	for name, want := range map[string]bool{"good": true, "bad": false, "short": false, "link": false, "fifo": false} {
		if got, err := adopt(t, a, filepath.Join(target, name), good); got != want || err != nil {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}
