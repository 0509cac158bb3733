package transfer_test

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

func (s *site) cache(dir string) *cache.Cache {
	s.t.Helper()
	c, err := cache.Open(dir, cache.Options{Notify: s.notes.add, Poll: time.Millisecond})
	if err != nil {
		s.t.Fatal(err)
	}
	return c
}

// through pulls a plan with a cache; it must end well and leave exactly files at dir.
func (s *site) through(c *cache.Cache, plan transfer.Plan, dir string, files map[string][]byte) transfer.Pulled {
	s.t.Helper()
	o := s.options()
	o.Cache = c
	done, err := transfer.Pull(s.t.Context(), s.c, plan, dir, o)
	if err != nil {
		s.t.Fatal(err)
	}
	s.holds(dir, files)
	return done
}

func names(t *testing.T, path string) (links uint64, mode os.FileMode) {
	t.Helper()
	fi, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	return uint64(fi.Sys().(*syscall.Stat_t).Nlink), fi.Mode()
}

// TestCachedCheckpoint: no file of a checkpoint is another name of one in the cache.
func TestCachedCheckpoint(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	plan.Kind = api.KindCheckpoint
	c := s.cache(filepath.Join(t.TempDir(), "cache"))
	for i, name := range []string{"a", "b"} {
		dir := filepath.Join(t.TempDir(), name)
		s.onBlob(nil)
		done := s.through(c, plan, dir, files)
		if sent := s.sent(); sent != total(files)*int64(1-i) || done.Cached != i*len(files) {
			t.Errorf("%+v, %d bytes sent", done, sent)
		}
		for f := range files {
			if n, mode := names(t, filepath.Join(dir, f)); n != 1 || mode != 0o644 {
				t.Errorf("%s has %d names, mode %v", f, n, mode)
			}
		}
		if again := s.through(c, plan, dir, files); !again.Already {
			t.Errorf("again: %+v", again)
		}
	}
}

// sharing returns an empty folder on a filesystem whose files can share blocks: XFS in a file, where this machine has
// what that takes; else one of the usual filesystem, of which shared says what it can.
func sharing(t *testing.T) (dir string, shared bool) {
	t.Helper()
	dir = t.TempDir()
	_, noTool := exec.LookPath("mkfs.xfs")
	_, noLoop := os.Stat("/dev/loop-control")
	missing := errors.Join(noTool, noLoop)
	if missing == nil {
		image := filepath.Join(t.TempDir(), "image")
		run := func(args ...string) {
			t.Helper()
			if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
				t.Fatalf("%v: %v\n%s(this test needs the right to mount: run it as root)", args, err, out)
			}
		}
		run("truncate", "--size=320M", image)
		run("mkfs.xfs", "-q", "-m", "reflink=1", image)
		run("mount", "-t", "xfs", "-o", "loop", image, dir)
		t.Cleanup(func() { run("umount", dir) })
	} else {
		t.Logf("no XFS is mounted: %v", missing)
	}
	a, err := os.Create(filepath.Join(dir, "a"))
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	b, err := os.Create(filepath.Join(dir, "b"))
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	no := unix.IoctlFileClone(int(b.Fd()), int(a.Fd()))
	if no != nil && missing == nil {
		t.Fatalf("an XFS doesn't let files share blocks: %v", no)
	}
	if err := errors.Join(os.Remove(a.Name()), os.Remove(b.Name())); err != nil {
		t.Fatal(err)
	}
	return dir, no == nil
}

// TestCachedShared: a file of a checkpoint takes the blocks of the one in the cache where files can share them, and is
// another file all the same.
func TestCachedShared(t *testing.T) {
	dir, shared := sharing(t)
	s := newSite(t)
	files := model(2, 20*mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	plan.Kind = api.KindCheckpoint
	c := s.cache(filepath.Join(dir, "cache"))
	s.through(c, plan, filepath.Join(dir, "a"), files)
	before, err := durable.Free(dir)
	if err != nil {
		t.Fatal(err)
	}
	done := s.through(c, plan, filepath.Join(dir, "b"), files)
	after, err := durable.Free(dir)
	if err != nil {
		t.Fatal(err)
	}
	copied := total(files)
	if shared {
		copied = 0
	}
	if done.Cached != len(files) || done.Copied != copied {
		t.Errorf("%+v; blocks can be shared: %v", done, shared)
	}
	if taken := before - after; shared && taken > 4*mib {
		t.Errorf("%d more bytes of disk are taken by %d", taken, total(files))
	}
	path := filepath.Join(dir, "b", "model-a.safetensors")
	if n, mode := names(t, path); n != 1 || mode != 0o644 {
		t.Errorf("%d names, mode %v", n, mode)
	}
	if err := os.WriteFile(path, make([]byte, 20*mib), 0o644); err != nil {
		t.Fatal(err)
	}
	s.holds(filepath.Join(dir, "a"), files)
	if v, err := c.Verify(t.Context(), cache.Checking{}); err != nil || len(v.Dropped) != 0 {
		t.Errorf("the cache after a write to a file that came from it: %+v, %v", v, err)
	}
}

// TestCachedElsewhere: from a cache on another filesystem files are copied, and hashed as they are.
func TestCachedElsewhere(t *testing.T) {
	far := t.TempDir()
	if err := unix.Mount("none", far, "tmpfs", 0, "size=64m"); err != nil {
		t.Fatalf("mount a tmpfs: %v (this test needs the right to mount: run it as root)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(far, 0); err != nil {
			t.Error(err)
		}
	})
	s := newSite(t)
	files := model(2, 3*mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	c := s.cache(filepath.Join(far, "cache"))
	s.through(c, plan, filepath.Join(t.TempDir(), "a"), files)
	s.onBlob(nil)
	done := s.through(c, plan, filepath.Join(t.TempDir(), "b"), files)
	if done.Cached != len(files) || done.Copied != total(files) || s.sent() != 0 {
		t.Errorf("%+v, %d bytes sent", done, s.sent())
	}

	// Bytes that changed behind the record are found as they are copied.
	b := files["model-a.safetensors"]
	e, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b)))
	if err != nil || !ok {
		t.Fatalf("%v, %v", ok, err)
	}
	fi, err := os.Stat(e.Path)
	bad := bytes.Clone(b)
	bad[mib] ^= 1
	err = errors.Join(err, os.Chmod(e.Path, 0o644), os.WriteFile(e.Path, bad, 0o644), os.Chmod(e.Path, 0o444),
		os.Chtimes(e.Path, time.Time{}, fi.ModTime()))
	if err != nil {
		t.Fatal(err)
	}
	if done = s.through(c, plan, filepath.Join(t.TempDir(), "c"), files); s.sent() != int64(len(b)) ||
		!strings.Contains(s.notes.String(), "dropped from the cache: damaged: "+e.Path) {
		t.Errorf("%+v, %d bytes sent; notes: %s", done, s.sent(), &s.notes)
	}

	// A cache that is full says so, and nothing is received.
	if err := os.WriteFile(filepath.Join(far, "fill"), make([]byte, 40*mib), 0o644); err != nil {
		t.Fatal(err)
	}
	more := model(1, 30*mib)
	more["model-a.safetensors"][29*mib] ^= 1
	s.push("m", "v2", more)
	o := s.options()
	o.Cache = c
	s.onBlob(nil)
	var space *transfer.SpaceError
	if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v2"), filepath.Join(t.TempDir(), "d"), o); !errors.As(err, &space) ||
		space.Path != c.Dir() || s.sent() != 0 {
		t.Errorf("full: %v, %d bytes sent", err, s.sent())
	}
}

// TestCachedTogether: pulls of several folders at the same time receive each file once.
func TestCachedTogether(t *testing.T) {
	s := newSite(t)
	files := model(6, 2*mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	dir := t.TempDir()
	var wg sync.WaitGroup
	for _, name := range []string{"a", "b", "c", "d"} {
		c := s.cache(filepath.Join(dir, "cache"))
		wg.Go(func() {
			o := s.options()
			o.Cache = c
			if _, err := transfer.Pull(t.Context(), s.c, plan, filepath.Join(dir, name), o); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, name := range []string{"a", "b", "c", "d"} {
		s.holds(filepath.Join(dir, name), files)
	}
	if s.sent() != total(files) {
		t.Errorf("%d bytes were sent of %d", s.sent(), total(files))
	}
	if n, mode := names(t, filepath.Join(dir, "a", "config.json")); n != 5 || mode != 0o444 {
		t.Errorf("%d names, mode %v", n, mode)
	}
}

// TestCachedMidstates: what comes from the cache has its midstates beside the folder, as after a fetch, whether it is
// linked or a copy. The cache has them from the pull that filled it.
func TestCachedMidstates(t *testing.T) {
	s := newSite(t)
	files := model(1, 3*segment+100)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	c := s.cache(filepath.Join(t.TempDir(), "cache"))
	s.through(c, plan, filepath.Join(t.TempDir(), "a"), files)
	s.onBlob(nil)
	for _, kind := range []api.Kind{plan.Kind, api.KindCheckpoint} {
		plan.Kind = kind
		dir := filepath.Join(t.TempDir(), "b")
		if done := s.through(c, plan, dir, files); done.Cached != len(files) || s.sent() != 0 {
			t.Errorf("%s: %+v, %d bytes sent", kind, done, s.sent())
		}
		for _, f := range plan.Files {
			if states := staging.Midstates(dir, f); (states != nil) != (f.Size > 2*segment) {
				t.Errorf("%s: midstates of %s, %d bytes: %v", kind, f.Name, f.Size, states)
			}
		}
	}
}

// TestCachedOld: a folder was verified when the oldest of its files was.
func TestCachedOld(t *testing.T) {
	s := newSite(t)
	files := model(1, mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	c := s.cache(filepath.Join(t.TempDir(), "cache"))
	s.through(c, plan, filepath.Join(t.TempDir(), "a"), files)
	b := files["config.json"]
	e, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b)))
	if err != nil || !ok {
		t.Fatalf("%v, %v", ok, err)
	}
	record, err := os.ReadFile(e.Path + ".json")
	if err != nil {
		t.Fatal(err)
	}
	then := e.Verified.Add(-time.Hour)
	record = bytes.Replace(record, []byte(e.Verified.Format(time.RFC3339)), []byte(then.Format(time.RFC3339)), 1)
	if err := os.WriteFile(e.Path+".json", record, 0o644); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "b")
	if done := s.through(c, plan, dir, files); done.Cached != len(files) || !done.Record.Verified.Equal(then) {
		t.Errorf("verified at %v, want %v: %+v", done.Record.Verified, then, done)
	}
	if again := s.through(c, plan, dir, files); !again.Already || !again.Record.Verified.Equal(then) {
		t.Errorf("again: %+v", again)
	}
}

// TestCachedForeign: a folder of the cache that others could have written to is not used, and the pull goes on without.
func TestCachedForeign(t *testing.T) {
	s := newSite(t)
	files := model(2, 3*mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	c := s.cache(filepath.Join(t.TempDir(), "cache"))
	s.through(c, plan, filepath.Join(t.TempDir(), "a"), files)
	b := files["model-a.safetensors"]
	e, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b)))
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	shard, elsewhere := filepath.Dir(e.Path), filepath.Join(t.TempDir(), "elsewhere")
	if err := errors.Join(os.Rename(shard, elsewhere), os.Symlink(elsewhere, shard)); err != nil {
		t.Fatal(err)
	}
	s.onBlob(nil)
	dir := filepath.Join(t.TempDir(), "b")
	if done := s.through(c, plan, dir, files); s.sent() != int64(len(b)) || done.Cached != len(files)-1 {
		t.Errorf("%+v, %d bytes sent", done, s.sent())
	}
	if n, mode := names(t, filepath.Join(dir, "model-a.safetensors")); n != 1 || mode != 0o644 {
		t.Errorf("it has %d names and mode %v", n, mode)
	}
	if n := strings.Count(s.notes.String(), "not used: "+shard+": "); n != 1 {
		t.Errorf("told %d times: %s", n, &s.notes)
	}
	if left, err := os.ReadDir(elsewhere); err != nil || len(left) != 2 {
		t.Errorf("written through the link: %v, %v", left, err)
	}
}

// TestCachedResume: what was received without a cache is gone on with.
func TestCachedResume(t *testing.T) {
	s := newSite(t)
	files := model(1, 10*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.interrupted(dir, files["model-a.safetensors"], 6*mib)
	done := s.through(s.cache(filepath.Join(t.TempDir(), "cache")), s.resolve("m", "v1"), dir, files)
	if done.Resumed == 0 || s.sent() >= total(files) {
		t.Errorf("%+v, %d bytes sent", done, s.sent())
	}
}

// TestPartial: what was pulled in part is not pushed, compared or held as the base, even if all its shards are there.
func TestPartial(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	part, err := plan.Only([]string{"*.safetensors", "*.json"})
	if err != nil || !part.Aggregate.IsZero() || part.NoBase == nil {
		t.Fatalf("%+v, %v", part, err)
	}
	dir := filepath.Join(t.TempDir(), "m")
	if _, err := transfer.Pull(t.Context(), s.c, part, dir, s.options()); err != nil {
		t.Fatal(err)
	}
	dial := func(string, bool) (*client.Client, error) { return nil, errors.New("not asked") }
	ref := client.Reference{Host: s.host, Repo: "n", Tag: "v1"}
	_, pushErr := transfer.Push(t.Context(), s.c, dir, ref, transfer.PushOptions{})
	_, sideErr := transfer.OpenSide(t.Context(), dir, dial, folder.Options{}, nil)
	for _, err := range []error{pushErr, sideErr} {
		var partial *folder.PartialError
		if !errors.As(err, &partial) || err.Error() != dir+": partial pull: 4 of 6 files" {
			t.Errorf("got %v", err)
		}
	}
	s.onBlob(nil)
	whole := s.pull(dir, files)
	if whole.Reused != 4 || whole.Record.Aggregate != plan.Aggregate || whole.Record.PartOf != 0 {
		t.Errorf("%+v", whole)
	}
	if want := int64(len(files["tokenizer/vocab.txt"]) + len(files["empty.txt"])); s.sent() != want {
		t.Errorf("%d bytes were sent, want %d", s.sent(), want)
	}
	if _, err := transfer.OpenSide(t.Context(), dir, dial, folder.Options{}, nil); err != nil {
		t.Error(err)
	}
}
