package cache_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const child = "KILN_CACHE_TEST_CHILD"

// TestMain is also the process that receives half a file into the cache that the variable names, and goes no further.
func TestMain(m *testing.M) {
	tests := testlanes.Use(m)
	if dir := os.Getenv(child); dir != "" {
		half(dir)
	}
	os.Exit(tests.Run())
}

func half(dir string) {
	c, err := cache.Open(dir, cache.Options{})
	if err == nil {
		b := content(1)
		_, _, err = c.Receive(context.Background(), fileOf(b), func(a *staging.Area) error {
			p, err := a.Partial(identity.Sum(b), int64(len(b)))
			if err != nil {
				return err
			}
			for piece := range bytes.Lines(b[:len(b)/2]) {
				if _, err := p.Write(piece); err != nil {
					return err
				}
			}
			fmt.Println("half")
			_, err = io.Copy(io.Discard, os.Stdin)
			return err
		}, nil)
	}
	fmt.Fprintln(os.Stderr, err)
	os.Exit(1)
}

// content returns 40 MB that go with a seed, enough for points to be saved on the way.
func content(seed byte) []byte {
	b := make([]byte, 40<<20)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func small(seed byte) []byte {
	b := make([]byte, 5000)
	rand.NewChaCha8([32]byte{seed}).Read(b)
	return b
}

func fileOf(b []byte) staging.File {
	return staging.File{Name: "f", Size: int64(len(b)), Digest: identity.Sum(b)}
}

func open(t *testing.T, dir string, o cache.Options) *cache.Cache {
	t.Helper()
	c, err := cache.Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// put writes what is missing of b into an area.
func put(a *staging.Area, b []byte) (from int64, err error) {
	p, err := a.Partial(identity.Sum(b), int64(len(b)))
	if err != nil {
		return 0, err
	}
	from = p.Offset()
	_, err = p.Write(b[from:])
	if err == nil {
		_, err = p.Finish()
	}
	return from, errors.Join(err, p.Close())
}

// receive brings b into a cache, and says whether it was not there.
func receive(t *testing.T, c *cache.Cache, b []byte) (cache.Entry, bool) {
	t.Helper()
	e, fetched, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) error { _, err := put(a, b); return err }, nil)
	if err != nil {
		t.Fatal(err)
	}
	holds(t, e, b)
	return e, fetched
}

func holds(t *testing.T, e cache.Entry, b []byte) {
	t.Helper()
	got, err := os.ReadFile(e.Path)
	fi, serr := os.Lstat(e.Path)
	if err != nil || serr != nil || !bytes.Equal(got, b) || fi.Mode() != staging.Shared || e.Size != int64(len(b)) ||
		time.Since(e.Verified) > time.Minute {
		t.Fatalf("%+v: %v, %v, %v", e, err, serr, fi)
	}
}

// TestOnce: of many that want one file at the same time, one receives it.
func TestOnce(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	b := content(2)
	var fetched atomic.Int64
	var wg sync.WaitGroup
	for range 8 {
		c := open(t, dir, cache.Options{Poll: time.Millisecond})
		wg.Go(func() {
			e, _, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) error {
				fetched.Add(1)
				_, err := put(a, b)
				return err
			}, nil)
			if err != nil {
				t.Error(err)
				return
			}
			holds(t, e, b)
		})
	}
	wg.Wait()
	if n := fetched.Load(); n != 1 {
		t.Errorf("it was received %d times", n)
	}
	if left, err := os.ReadDir(filepath.Join(dir, "partial")); err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// begin starts a process that has received half of content(1).
func begin(t *testing.T, dir string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), child+"="+dir)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		cmd.Process.Kill()
		cmd.Wait()
	})
	if line, err := bufio.NewReader(out).ReadString('\n'); line != "half\n" {
		t.Fatalf("%q, %v", line, err)
	}
	return cmd
}

// TestKilled: who waits for a process that is killed takes over, and goes on from what that one had.
func TestKilled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	cmd := begin(t, dir)
	b := content(1)
	c := open(t, dir, cache.Options{Poll: time.Millisecond})
	var once sync.Once
	var from int64
	e, fetched, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) (err error) {
		from, err = put(a, b)
		return err
	}, func(who error, have int64) {
		once.Do(func() {
			if !strings.Contains(who.Error(), fmt.Sprintf("pid %d on ", cmd.Process.Pid)) || have < 8<<20 {
				t.Errorf("waiting for %v, which has %d bytes", who, have)
			}
			if err := cmd.Process.Kill(); err != nil {
				t.Error(err)
			}
			cmd.Process.Wait()
		})
	})
	if err != nil || !fetched || from < 16<<20 {
		t.Errorf("fetched %v from %d: %v", fetched, from, err)
	}
	holds(t, e, b)
}

// TestStalled: nobody waits for ever for a process that does not get on.
func TestStalled(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	cmd := begin(t, dir)
	if err := cmd.Process.Signal(syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	c := open(t, dir, cache.Options{Poll: time.Millisecond, Patience: 50 * time.Millisecond})
	_, _, err := c.Receive(t.Context(), fileOf(content(1)), func(*staging.Area) error {
		t.Error("two at once")
		return nil
	}, nil)
	if !errors.Is(err, cache.ErrStalled) {
		t.Errorf("got %v", err)
	}
	p, err := c.Prune(t.Context(), cache.PruneOptions{Older: time.Nanosecond})
	if err != nil || p.Busy != 1 || p.Partials != 0 {
		t.Errorf("what is on its way in was pruned: %+v, %v", p, err)
	}
}

// TestTouched: an entry that changed in any way is read again before it is used, and what does not match is dropped.
func TestTouched(t *testing.T) {
	b := small(1)
	other := bytes.Clone(b)
	other[17] ^= 1
	overwrite := func(path string, b []byte) error {
		return errors.Join(os.Chmod(path, 0o644), os.WriteFile(path, b, 0o644), os.Chmod(path, 0o444))
	}
	another := func(path string) error { return errors.Join(os.Remove(path), os.WriteFile(path, b, 0o444)) }
	linked := func(path string) error { return errors.Join(os.Rename(path, path+"x"), os.Symlink(path+"x", path)) }
	for name, tt := range map[string]struct {
		do   func(path string) error
		want string // what it says; empty: nothing, as nothing is wrong
		kept bool
	}{
		"link":          {func(path string) error { return os.Link(path, path+"x") }, "", true},
		"mode":          {func(path string) error { return os.Chmod(path, 0o644) }, "hashed again", true},
		"touched":       {func(path string) error { return os.Chtimes(path, time.Time{}, time.Now()) }, "hashed again", true},
		"written":       {func(path string) error { return overwrite(path, other) }, "damaged", false},
		"written back":  {func(path string) error { return overwrite(path, b) }, "hashed again", true},
		"short":         {func(path string) error { return overwrite(path, b[:17]) }, "has 17 bytes", false},
		"another file":  {another, "hashed again", true},
		"group":         {func(path string) error { return os.Chmod(path, 0o464) }, "not this user's alone", false},
		"symbolic link": {linked, "not used", false},
		"no record":     {func(path string) error { return os.Remove(path + ".json") }, "hashed again", true},
		"cut record":    {func(path string) error { return os.Truncate(path+".json", 20) }, "hashed again", true},
		"record of all": {func(path string) error { return os.Chmod(path+".json", 0o666) }, "hashed again", true},
	} {
		t.Run(name, func(t *testing.T) {
			said := ""
			c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{Notify: func(s string) { said += s + "\n" }})
			e, _ := receive(t, c, b)
			if err := tt.do(e.Path); err != nil {
				t.Fatal(err)
			}
			e, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b)))
			if err != nil || ok != tt.kept || !strings.Contains(said, tt.want) || tt.want == "" && said != "" {
				t.Errorf("%v, %v; said %q", ok, err, said)
			}
			if said = ""; ok {
				holds(t, e, b)
			} else if _, err := os.Lstat(e.Path + ".json"); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("its record stays: %v", err)
			}
			if _, fetched := receive(t, c, b); fetched == tt.kept || said != "" {
				t.Errorf("fetched %v; said %q", fetched, said)
			}
		})
	}
}

// TestForeign: nothing is believed that another user could have written.
func TestForeign(t *testing.T) {
	b := small(1)
	dir := filepath.Join(t.TempDir(), "cache")
	c := open(t, dir, cache.Options{})
	e, _ := receive(t, c, b)
	for _, path := range []string{dir, filepath.Join(dir, "sha256"), filepath.Join(dir, "partial")} {
		if err := os.Chmod(path, 0o775); err != nil {
			t.Fatal(err)
		}
		if _, err := cache.Open(dir, cache.Options{}); !errors.Is(err, cache.ErrForeign) {
			t.Errorf("%s: %v", path, err)
		}
		if err := os.Chmod(path, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(e.Path, os.Geteuid()+1, -1); err == nil { // only root can give a file away
		if _, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b))); ok || err != nil {
			t.Errorf("another user's file: %v, %v", ok, err)
		}
	}
}

// TestHidden: bytes that changed while the time of modification did not are found by a check.
func TestHidden(t *testing.T) {
	b := small(1)
	c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
	receive(t, c, small(2))
	e, _ := receive(t, c, b)
	fi, err := os.Stat(e.Path)
	if err != nil {
		t.Fatal(err)
	}
	bad := bytes.Clone(b)
	bad[0] ^= 1
	err = errors.Join(os.Chmod(e.Path, 0o644), os.WriteFile(e.Path, bad, 0o644), os.Chmod(e.Path, 0o444),
		os.Chtimes(e.Path, time.Time{}, fi.ModTime()))
	if err != nil {
		t.Fatal(err)
	}
	v, err := c.Verify(t.Context(), cache.Checking{})
	if err != nil || v.Files != 1 || len(v.Dropped) != 1 || v.Dropped[0] != identity.Sum(b) {
		t.Errorf("%+v, %v", v, err)
	}
	if _, fetched := receive(t, c, b); !fetched {
		t.Error("it is used still")
	}
}

// TestFaults fails every change of the disk once, lost and persisted: what the cache then has under a name is right, and
// the next try ends well.
func TestFaults(t *testing.T) {
	b := small(3)
	for _, persisted := range []bool{false, true} {
		for n := int64(1); ; n++ {
			dir := filepath.Join(t.TempDir(), "cache")
			open(t, dir, cache.Options{})
			var count atomic.Int64
			fault := func(_ durable.Op, _ string, do func() error) error {
				if count.Add(1) != n {
					return do()
				}
				if persisted {
					if err := do(); err != nil {
						return err
					}
				}
				return errors.New("injected")
			}
			c := open(t, dir, cache.Options{Staging: staging.Options{Disk: durable.Disk{Fault: fault}}})
			_, _, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) error {
				_, err := put(a, b)
				return err
			}, nil)
			if count.Load() < n {
				if err != nil || n < 8 {
					t.Fatalf("%d changes of the disk were seen: %v", n-1, err)
				}
				break
			}
			c = open(t, dir, cache.Options{})
			if e, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b))); err != nil {
				t.Fatal(err)
			} else if ok {
				holds(t, e, b)
			}
			receive(t, c, b)
			if left, err := os.ReadDir(filepath.Join(dir, "partial")); err != nil || len(left) > 1 {
				t.Errorf("left behind: %v, %v", left, err)
			}
		}
	}
}

// TestPrune: the longest unused go first, and what a folder has as its own stays.
func TestPrune(t *testing.T) {
	dir := t.TempDir()
	c := open(t, filepath.Join(dir, "cache"), cache.Options{})
	var paths []string
	for i := range byte(5) {
		e, _ := receive(t, c, small(i))
		then := time.Now().Add(-time.Duration(i+1) * time.Hour)
		if err := os.Chtimes(e.Path+".json", then, then); err != nil {
			t.Fatal(err)
		}
		paths = append(paths, e.Path)
	}
	if err := os.Link(paths[4], filepath.Join(dir, "folder")); err != nil {
		t.Fatal(err)
	}
	there := func() (s string) {
		for i, p := range paths {
			if _, err := os.Lstat(p); err == nil {
				s += fmt.Sprint(i)
			}
		}
		return s
	}
	for _, tt := range []struct {
		o    cache.PruneOptions
		want string
	}{
		{cache.PruneOptions{}, "01234"},
		{cache.PruneOptions{Older: 24 * time.Hour}, "01234"},
		{cache.PruneOptions{Older: 210 * time.Minute}, "0124"},
		{cache.PruneOptions{Max: 10000}, "014"},
		{cache.PruneOptions{Max: 1}, "4"},
	} {
		p, err := c.Prune(t.Context(), tt.o)
		if got := there(); err != nil || got != tt.want || p.Linked != 1 || p.Kept != len(tt.want) {
			t.Errorf("%+v: %s is left, want %s; %+v, %v", tt.o, got, tt.want, p, err)
		}
	}
}
