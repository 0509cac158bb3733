package transfer_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/testenv"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

func write(t *testing.T, path string, b []byte) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, b, 0o644)); err != nil {
		t.Fatal(err)
	}
}

// TestTwoPulls is PL-23: two clients at once, which know of one another only by what is on the disk.
func TestTwoPulls(t *testing.T) {
	s := newSite(t)
	files := model(2, 3*mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	dir := filepath.Join(t.TempDir(), "m")
	var wg sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		wg.Go(func() { _, errs[i] = transfer.Pull(t.Context(), s.c, plan, dir, s.options()) })
	}
	wg.Wait()
	ok := 0
	for _, err := range errs {
		if err == nil {
			ok++
		} else if !errors.Is(err, staging.ErrBusy) {
			t.Error(err)
		}
	}
	if ok == 0 {
		t.Error("none of them ended well")
	}
	s.holds(dir, files)
}

// TestAppears: what appears at the target while a pull is under way is not lost.
func TestAppears(t *testing.T) {
	s := newSite(t)
	files := model(1, mib)
	s.push("m", "v1", files)
	for name, o := range map[string]transfer.PullOptions{"new": s.options(), "repair": s.options()} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "m")
			if name == "repair" {
				s.pull(dir, files)
				if err := os.Truncate(filepath.Join(dir, "model-a.safetensors"), 5); err != nil {
					t.Fatal(err)
				}
			}
			thesis := filepath.Join(dir, "thesis.txt")
			s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
				write(t, thesis, []byte("my only copy"))
				next.ServeHTTP(w, r)
			})
			if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, o); !errors.Is(err, transfer.ErrOccupied) {
				t.Errorf("got %v", err)
			}
			if _, err := os.Stat(thesis); err != nil {
				t.Error(err)
			}
			if err := os.Remove(thesis); err != nil {
				t.Fatal(err)
			}
			s.onBlob(nil)
			s.pull(dir, files)
			if s.sent() != 0 {
				t.Errorf("%d bytes were sent again", s.sent())
			}
		})
	}
}

// TestDamaged: a file of a pulled folder that changed is fetched anew, the others are used.
func TestDamaged(t *testing.T) {
	files := model(3, mib)
	name := "model-b.safetensors"
	b := files[name]
	damages := map[string]func(path string) error{
		"bit":     func(path string) error { c := bytes.Clone(b); c[mib-1] ^= 1; return os.WriteFile(path, c, 0o644) },
		"short":   func(path string) error { return os.Truncate(path, 50) },
		"long":    func(path string) error { return os.WriteFile(path, append(bytes.Clone(b[:50]), b...), 0o644) },
		"missing": os.Remove,
		"link":    func(path string) error { return errors.Join(os.Remove(path), os.Symlink("model-a.safetensors", path)) },
	}
	s := newSite(t)
	s.push("m", "v1", files)
	for damage, do := range damages {
		t.Run(damage, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "m")
			s.pull(dir, files)
			if err := do(filepath.Join(dir, name)); err != nil {
				t.Fatal(err)
			}
			s.onBlob(nil)
			done := s.pull(dir, files)
			if s.sent() != mib || done.Reused != len(files)-1 {
				t.Errorf("%d bytes sent, %d files reused", s.sent(), done.Reused)
			}
			if again := s.pull(dir, files); !again.Already {
				t.Errorf("not recorded: %+v", again)
			}
		})
	}
}

// TestTouched: a file that was only touched is read again and nothing is fetched.
func TestTouched(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.pull(dir, files)
	write(t, filepath.Join(dir, "config.json"), files["config.json"])
	s.onBlob(nil)
	if done := s.pull(dir, files); !done.Already || s.requests() != 0 {
		t.Errorf("%+v, %d requests", done, s.requests())
	}
	if done := s.pull(dir, files); !done.Already || done.Reused != 0 {
		t.Errorf("read once more: %+v", done)
	}
}

// TestFieldPulls runs PL-01, PL-02 and PL-03: a folder without a record, in which a shard is not what it should be.
func TestFieldPulls(t *testing.T) {
	cases := testenv.FieldCases(t)
	expected := testenv.Expected(t, cases)
	s := newSite(t)
	for _, id := range []string{"PL-01", "PL-02", "PL-03"} {
		t.Run(id, func(t *testing.T) {
			b, err := os.ReadFile(filepath.Join(cases, id, "want.json"))
			if err != nil {
				t.Fatal(err)
			}
			want, err := identity.Parse(b)
			if err != nil {
				t.Fatal(err)
			}
			dir := filepath.Join(cases, id, "dest")
			files := map[string][]byte{}
			var list []staging.File
			for _, x := range want.Shards {
				list = append(list, staging.File{Name: x.Filename, Size: int64(x.Size), Digest: x.Digest})
				files[x.Filename] = whole(t, cases, x)
			}
			v, err := transfer.Verify(t.Context(), dir, list, transfer.VerifyOptions{Extra: true})
			if err != nil || len(v.Findings) != 1 || string(v.Findings[0].Code) != expected[id].Code || v.Files != len(list)-1 {
				t.Errorf("verify: %+v, %v, want %s", v, err, expected[id].Code)
			}
			s.push("m", "v1", files)
			plan := s.resolve("m", "v1")
			if plan.Aggregate != want.Aggregate {
				t.Errorf("aggregate %s, want %s", plan.Aggregate, want.Aggregate)
			}
			if _, err := transfer.Pull(t.Context(), s.c, plan, dir, s.options()); !errors.Is(err, transfer.ErrOccupied) {
				t.Errorf("a folder without a record was taken: %v", err)
			}
			o := s.options()
			o.Repair = true
			s.onBlob(nil)
			if _, err := transfer.Pull(t.Context(), s.c, plan, dir, o); err != nil {
				t.Fatal(err)
			}
			s.holds(dir, files)
			if n := int64(len(files[v.Findings[0].Name])); s.sent() != n {
				t.Errorf("%d bytes were fetched, want the %d of the one shard", s.sent(), n)
			}
		})
	}
}

// whole finds the right bytes of a shard among the three cases: each of them damages the same one differently.
func whole(t *testing.T, cases string, x identity.Shard) []byte {
	t.Helper()
	for _, id := range []string{"PL-01", "PL-02", "PL-03"} {
		b, err := os.ReadFile(filepath.Join(cases, id, "dest", x.Filename))
		if err != nil {
			t.Fatal(err)
		}
		for _, b := range [][]byte{b, b[min(50, len(b)):], flipLast(b)} {
			if identity.Sum(b) == x.Digest {
				return b
			}
		}
	}
	t.Fatalf("no case has the bytes of %s", x.Filename)
	return nil
}

func flipLast(b []byte) []byte {
	b = bytes.Clone(b)
	b[len(b)-1] ^= 1
	return b
}

func TestOccupied(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	refused := func(dir, want string, o transfer.PullOptions) {
		t.Helper()
		_, err := transfer.Pull(t.Context(), s.c, plan, dir, o)
		if !errors.Is(err, transfer.ErrOccupied) || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v", err)
		}
	}
	foreign := map[string][]byte{"thesis.txt": []byte("my only copy")}
	dir := filepath.Join(t.TempDir(), "m")
	write(t, filepath.Join(dir, "thesis.txt"), foreign["thesis.txt"])
	refused(dir, "thesis.txt", s.options())
	o := s.options()
	o.Repair = true
	refused(dir, "thesis.txt", o)
	s.holds(dir, foreign)

	o = s.options()
	o.Replace = true
	if _, err := transfer.Pull(t.Context(), s.c, plan, dir, o); err != nil {
		t.Fatal(err)
	}
	s.holds(dir, files)
	write(t, filepath.Join(dir, "notes.txt"), []byte("x"))
	refused(dir, "notes.txt", s.options())
	if err := os.Remove(filepath.Join(dir, "notes.txt")); err != nil {
		t.Fatal(err)
	}

	next := model(3, mib)
	first := plan.Manifest
	s.push("m", "v1", next)
	plan = s.resolve("m", "v1")
	refused(dir, first.String(), s.options())
	s.holds(dir, files)
	s.onBlob(nil)
	done, err := transfer.Pull(t.Context(), s.c, plan, dir, o)
	if err != nil {
		t.Fatal(err)
	}
	s.holds(dir, next)
	if n := s.sentOf(next["model-a.safetensors"]); n != 0 || done.Reused != len(files)-1 {
		t.Errorf("%d bytes of a shard that was there were fetched; %d files reused", n, done.Reused)
	}
}

// TestDiedBeforeRecord: the folder was put in place, and the process died before it could say so.
func TestDiedBeforeRecord(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.pull(dir, files)
	beside := filepath.Join(filepath.Dir(dir), ".m.kiln")
	if err := os.Rename(filepath.Join(beside, "complete.json"), filepath.Join(beside, "started.json")); err != nil {
		t.Fatal(err)
	}
	s.onBlob(nil)
	if done := s.pull(dir, files); !done.Already || s.requests() != 0 {
		t.Errorf("%+v, %d requests", done, s.requests())
	}
	if err := os.Rename(filepath.Join(beside, "complete.json"), filepath.Join(beside, "started.json")); err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "config.json"), []byte(`{"model_type":"mine"}`))
	if _, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options()); !errors.Is(err, transfer.ErrOccupied) {
		t.Errorf("a folder of unknown origin was replaced: %v", err)
	}
}

func TestTarget(t *testing.T) {
	s := newSite(t)
	files := model(1, 100_000)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	parent := t.TempDir()
	file := filepath.Join(parent, "file")
	write(t, file, []byte("x"))
	for _, dir := range []string{"/", file, "/proc"} {
		if _, err := transfer.Pull(t.Context(), s.c, plan, dir, s.options()); !errors.Is(err, transfer.ErrTarget) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if err := os.Symlink("nowhere", filepath.Join(parent, "dangling")); err != nil {
		t.Fatal(err)
	}
	if _, err := transfer.Pull(t.Context(), s.c, plan, filepath.Join(parent, "dangling"), s.options()); err == nil {
		t.Error("a link to nowhere was taken")
	}
	real := filepath.Join(parent, "real")
	if err := errors.Join(os.Mkdir(real, 0o755), os.Symlink("real", filepath.Join(parent, "link"))); err != nil {
		t.Fatal(err)
	}
	link := filepath.Join(parent, "link") // to an empty folder
	if _, err := transfer.Pull(t.Context(), s.c, plan, link, s.options()); err != nil {
		t.Fatal(err)
	}
	s.holds(real, files)
	if fi, err := os.Lstat(link); err != nil || fi.Mode()&os.ModeSymlink == 0 {
		t.Errorf("the link was replaced: %v", err)
	}
}

// small mounts a filesystem of a size in MiB.
func smallDisk(t *testing.T, size int) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("none", dir, "tmpfs", 0, fmt.Sprintf("size=%dm", size)); err != nil {
		t.Fatalf("mount a tmpfs: %v (this test needs the right to mount: run it as root)", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestNoSpace is PL-25, before the start: 40 MB and room for 20.
func TestNoSpace(t *testing.T) {
	s := newSite(t)
	files := model(4, 10*mib)
	s.push("m", "v1", files)
	dir := filepath.Join(smallDisk(t, 20), "m")
	s.onBlob(nil)
	_, err := transfer.Pull(t.Context(), s.c, s.resolve("m", "v1"), dir, s.options())
	var space *transfer.SpaceError
	if !errors.As(err, &space) || space.Need < 40*mib || space.Free > 20*mib || s.requests() != 0 {
		t.Errorf("%v after %d requests", err, s.requests())
	}
	s.nothingAt(dir)
}

// TestDiskFills is PL-25, half way: somebody else fills the disk.
func TestDiskFills(t *testing.T) {
	s := newSite(t)
	files := model(2, 6*mib)
	s.push("m", "v1", files)
	disk := smallDisk(t, 20)
	dir := filepath.Join(disk, "m")
	var fill sync.Once
	s.onBlob(func(w http.ResponseWriter, r *http.Request, next http.Handler) {
		fill.Do(func() {
			err := os.WriteFile(filepath.Join(disk, "other"), make([]byte, 20*mib), 0o644)
			if !errors.Is(err, syscall.ENOSPC) {
				t.Errorf("the disk is not full: %v", err)
			}
		})
		next.ServeHTTP(w, r)
	})
	o := s.options()
	o.Jobs = 1
	plan := s.resolve("m", "v1")
	if _, err := transfer.Pull(t.Context(), s.c, plan, dir, o); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("got %v", err)
	}
	s.nothingAt(dir)
	if err := os.Remove(filepath.Join(disk, "other")); err != nil {
		t.Fatal(err)
	}
	s.onBlob(nil)
	s.pull(dir, files)
	if s.sent() >= 7*mib {
		t.Errorf("the retry fetched %d bytes; one shard of %d was here", s.sent(), 6*mib)
	}
}

// TestMemory: what is held does not grow with the size of a file.
func TestMemory(t *testing.T) {
	peak := func(size int64) (high uint64) {
		chunk := make([]byte, mib)
		rand.NewChaCha8([32]byte{1}).Read(chunk)
		h := identity.NewHash()
		for range size / mib {
			h.Write(chunk)
		}
		d := identity.DigestOf(h)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			var from, to int64
			if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-%d", &from, &to); err != nil {
				to = size - 1
			} else {
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to, size))
			}
			w.Header().Set("Content-Length", fmt.Sprint(to-from+1))
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusPartialContent)
			}
			for from <= to {
				part := chunk[from%mib : min(mib, from%mib+to-from+1)]
				w.Write(part)
				from += int64(len(part))
			}
		}))
		defer server.Close()
		c, err := client.New(strings.TrimPrefix(server.URL, "http://"), client.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		plan := transfer.Plan{NoBase: errors.New("bytes only")}
		plan.Repository = "m"
		for i := range 2 {
			plan.Files = append(plan.Files, staging.File{Name: fmt.Sprint(i), Size: size, Digest: d})
		}
		runtime.GC() // the buffers of the run before
		var mu sync.Mutex
		seen := 0
		o := transfer.PullOptions{Watch: func(transfer.Event) {
			mu.Lock()
			defer mu.Unlock()
			if seen++; seen%64 == 0 {
				var m runtime.MemStats
				runtime.ReadMemStats(&m)
				high = max(high, m.HeapInuse)
			}
		}}
		if _, err := transfer.Pull(context.Background(), c, plan, filepath.Join(t.TempDir(), "m"), o); err != nil {
			t.Fatal(err)
		}
		return high
	}
	small, large := peak(32*mib), peak(256*mib)
	t.Logf("heap in use: %d MiB with files of 32 MiB, %d MiB with files of 256 MiB", small/mib, large/mib)
	if large > small+8*mib || large > 40*mib {
		t.Errorf("heap grows with the size of a file: %d, then %d", small, large)
	}
}

// decay changes a byte of a file in such a way that it looks as it did.
func decay(t *testing.T, path string) {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	var b [1]byte
	_, err = f.ReadAt(b[:], 1000)
	b[0] ^= 1
	if err == nil {
		_, err = f.WriteAt(b[:], 1000)
	}
	if err := errors.Join(err, f.Close(), os.Chtimes(path, time.Time{}, fi.ModTime())); err != nil {
		t.Fatal(err)
	}
}

// look makes the record of a folder say that its files look as they do now: as after damage that no filesystem saw.
func look(t *testing.T, dir string) {
	t.Helper()
	target, err := staging.Target(dir)
	if err != nil {
		t.Fatal(err)
	}
	known, err := staging.Known(target)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range known.Complete.Files {
		fi, err := os.Lstat(filepath.Join(target, f.Name))
		if err != nil {
			t.Fatal(err)
		}
		stat := staging.StatOf(fi)
		known.Complete.Files[i].Stat = &stat
	}
	b, err := json.Marshal(known.Complete)
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(filepath.Dir(target), "."+filepath.Base(target)+".kiln", "complete.json"), b)
}

// TestDecayed: a file that changed and looks as it did is repaired where a pull is asked to hash, or a check found it.
func TestDecayed(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	plan := s.resolve("m", "v1")
	for name, o := range map[string]transfer.PullOptions{
		"repair": {Repair: true}, "replace": {Replace: true}, "checked": {},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "m")
			s.pull(dir, files)
			decay(t, filepath.Join(dir, "model-b.safetensors"))
			look(t, dir)
			if done, err := transfer.Pull(t.Context(), s.c, plan, dir, s.options()); err != nil || !done.Already {
				t.Fatalf("it is seen: %+v, %v", done, err)
			}
			if name == "checked" {
				v, err := transfer.Verify(t.Context(), dir, plan.Files, transfer.VerifyOptions{})
				if err != nil || len(v.Findings) != 1 {
					t.Fatalf("%+v, %v", v, err)
				}
				names, err := transfer.Doubt(t.Context(), dir, v.Findings)
				if err != nil || len(names) != 1 || names[0] != "model-b.safetensors" {
					t.Fatal(names, err)
				}
				if names, err := transfer.Doubt(t.Context(), dir, v.Findings); err != nil || len(names) != 0 {
					t.Errorf("noted once more: %v, %v", names, err)
				}
			}
			s.onBlob(nil)
			o.Staging = s.options().Staging
			done, err := transfer.Pull(t.Context(), s.c, plan, dir, o)
			if err != nil || done.Already || done.Reused != len(files)-1 || s.sent() != mib {
				t.Errorf("%+v, %d bytes sent, %v", done, s.sent(), err)
			}
			s.holds(dir, files)
			if done, err = transfer.Pull(t.Context(), s.c, plan, dir, o); err != nil || !done.Already || s.sent() != mib {
				t.Errorf("again: %+v, %d bytes sent, %v", done, s.sent(), err)
			}
		})
	}
}

// TestDoubt: nothing is noted of what the record doesn't name, nor where a pull is at work or nothing was pulled.
func TestDoubt(t *testing.T) {
	s := newSite(t)
	files := model(2, mib)
	s.push("m", "v1", files)
	dir := filepath.Join(t.TempDir(), "m")
	s.pull(dir, files)
	right := transfer.Finding{Name: "config.json", Want: identity.Sum(files["config.json"])}
	for _, x := range []transfer.Finding{{Name: "other", Want: right.Want}, {Name: "config.json"}} {
		if names, err := transfer.Doubt(t.Context(), dir, []transfer.Finding{x}); err != nil || len(names) != 0 {
			t.Errorf("%+v: %v, %v", x, names, err)
		}
	}
	if names, err := transfer.Doubt(t.Context(), t.TempDir(), []transfer.Finding{right}); err != nil || len(names) != 0 {
		t.Errorf("of a folder that was not pulled: %v, %v", names, err)
	}
	area, err := staging.Open(t.Context(), dir, staging.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := transfer.Doubt(t.Context(), dir, []transfer.Finding{right}); !errors.Is(err, staging.ErrBusy) {
		t.Errorf("while a pull is at work: %v", err)
	}
	if err := area.Close(); err != nil {
		t.Fatal(err)
	}
	if done := s.pull(dir, files); !done.Already {
		t.Errorf("%+v", done)
	}
}
