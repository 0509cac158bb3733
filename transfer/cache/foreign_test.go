package cache_test

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/transfer/cache"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// foreigners make the folder of a file one that others could have written to. They say whether they could.
var foreigners = map[string]func(shard string) bool{
	"for all": func(shard string) bool { return os.Chmod(shard, 0o777) == nil },
	"of another user": func(shard string) bool { // only root can give a folder away
		return os.Chown(shard, os.Geteuid()+1, -1) == nil
	},
	"a link": func(shard string) bool {
		elsewhere := filepath.Join(shard, "..", "..", "..", "elsewhere")
		return errors.Join(os.Rename(shard, elsewhere), os.Symlink(elsewhere, shard)) == nil
	},
	"a link to nowhere": func(shard string) bool {
		return errors.Join(os.RemoveAll(shard), os.Symlink("nowhere", shard)) == nil
	},
	"a file": func(shard string) bool {
		return errors.Join(os.RemoveAll(shard), os.WriteFile(shard, nil, 0o644)) == nil
	},
}

// TestForeignShard: nothing is found in a folder that others could have written to, and nothing received into it,
// changed or removed. It is told once.
func TestForeignShard(t *testing.T) {
	b := small(1)
	for name, spoil := range foreigners {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "cache")
			var said []string
			c := open(t, dir, cache.Options{Notify: func(s string) { said = append(said, s) }})
			e, _ := receive(t, c, b)
			if !spoil(filepath.Dir(e.Path)) {
				t.Logf("user %d can't make it so", os.Geteuid())
				return
			}
			before := tree(t, filepath.Dir(dir))
			if _, ok, err := c.Find(t.Context(), identity.Sum(b), e.Size); ok || err != nil {
				t.Errorf("found: %v, %v", ok, err)
			}
			_, fetched, err := c.Receive(t.Context(), fileOf(b), func(*staging.Area) error {
				t.Error("it is received")
				return nil
			}, nil)
			if fetched || !errors.Is(err, cache.ErrForeign) {
				t.Errorf("received: %v, %v", fetched, err)
			}
			if err := c.Drop(identity.Sum(b)); err != nil {
				t.Error(err)
			}
			if c.Uses(identity.Sum(b)) {
				t.Error("it is used")
			}
			if len(said) != 1 || !strings.Contains(said[0], "not used: "+filepath.Dir(e.Path)+": ") {
				t.Errorf("said %q", said)
			}
			if v, err := c.Verify(t.Context(), cache.Checking{}); err != nil || v.Files != 0 || len(v.Dropped) != 0 {
				t.Errorf("verified: %+v, %v", v, err)
			}
			if p, err := c.Prune(t.Context(), cache.PruneOptions{Max: 1, Older: 1}); err != nil || p.Removed != 0 {
				t.Errorf("pruned: %+v, %v", p, err)
			}
			if now := tree(t, filepath.Dir(dir)); now != before {
				t.Errorf("it was\n%sand is\n%s", before, now)
			}
		})
	}
}

// tree lists what is below a folder, with what changes of it when it is written.
func tree(t *testing.T, dir string) string {
	t.Helper()
	var s strings.Builder
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := e.Info()
		if err == nil {
			s.WriteString(path + " " + fi.Mode().String() + " " + fi.ModTime().String() + "\n")
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return s.String()
}

// TestOpen: what is opened is the file that was found, whatever lies there by then.
func TestOpen(t *testing.T) {
	b := small(1)
	for name, do := range map[string]func(path string) error{
		"the same": func(string) error { return nil },
		"another": func(path string) error {
			return errors.Join(os.Rename(path, path+"-away"), os.WriteFile(path, b, 0o444))
		},
		"a link to it": func(path string) error {
			return errors.Join(os.Rename(path, path+"-away"), os.Symlink(path+"-away", path))
		},
		"gone": os.Remove,
		"written to": func(path string) error {
			return errors.Join(os.Chmod(path, 0o644), os.WriteFile(path, small(2), 0o644), os.Chmod(path, 0o444))
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := open(t, filepath.Join(t.TempDir(), "cache"), cache.Options{})
			received, _ := receive(t, c, b)
			found, ok, err := c.Find(t.Context(), identity.Sum(b), received.Size)
			if err != nil || !ok {
				t.Fatal(ok, err)
			}
			if err := do(found.Path); err != nil {
				t.Fatal(err)
			}
			for _, e := range []cache.Entry{received, found} {
				f, err := e.Open()
				if (err == nil) != (name == "the same") || err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("got %v", err)
				}
				if err == nil {
					f.Close()
				}
			}
		})
	}
}

// TestSpoilt: bytes of an earlier process that were changed on the disk since are found before the file is in the cache,
// and it is received anew.
func TestSpoilt(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	cmd := begin(t, dir)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	b := content(1)
	parts, err := filepath.Glob(filepath.Join(dir, "partial", ".*.kiln", "parts-*", identity.Sum(b).Hex()))
	if err != nil || len(parts) != 1 {
		t.Fatal(parts, err)
	}
	f, err := os.OpenFile(parts[0], os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte{^b[1000]}, 1000)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	var said []string
	c := open(t, dir, cache.Options{Notify: func(s string) { said = append(said, s) }})
	var from []int64
	e, fetched, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) error {
		at, err := put(a, b)
		from = append(from, at)
		return err
	}, nil)
	if err != nil || !fetched {
		t.Fatal(fetched, err)
	}
	holds(t, e, b)
	if len(from) != 2 || from[0] < 16<<20 || from[1] != 0 {
		t.Errorf("received from %v", from)
	}
	if !strings.Contains(strings.Join(said, "\n"), "received anew: f: its partial file was changed on the disk") {
		t.Errorf("said %q", said)
	}
}

// TestResumedStops: the check of what an earlier process has begun ends with its context, and goes on with the next one.
func TestResumedStops(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "cache")
	cmd := begin(t, dir)
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	cmd.Wait()
	b := content(1)
	c := open(t, dir, cache.Options{})
	ctx, cancel := context.WithCancelCause(t.Context())
	why := errors.New("no more time")
	_, _, err := c.Receive(ctx, fileOf(b), func(a *staging.Area) error {
		_, err := put(a, b)
		cancel(why)
		return err
	}, nil)
	if !errors.Is(err, why) {
		t.Errorf("got %v", err)
	}
	if _, ok, err := c.Find(t.Context(), identity.Sum(b), int64(len(b))); ok || err != nil {
		t.Errorf("it is in the cache: %v, %v", ok, err)
	}
	e, fetched, err := c.Receive(t.Context(), fileOf(b), func(a *staging.Area) error {
		from, err := put(a, b)
		if from != int64(len(b)) {
			t.Errorf("received from %d", from)
		}
		return err
	}, nil)
	if err != nil || !fetched {
		t.Fatal(fetched, err)
	}
	holds(t, e, b)
}

// TestOpenOld: what is no cache stays what it is.
func TestOpenOld(t *testing.T) {
	dir := t.TempDir()
	for _, dir := range []string{dir, filepath.Join(dir, "none")} {
		if _, err := cache.OpenOld(dir, cache.Options{}); !errors.Is(err, cache.ErrNone) {
			t.Errorf("%s: %v", dir, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("made: %v, %v", left, err)
	}
	receive(t, open(t, dir, cache.Options{}), small(1))
	c, err := cache.OpenOld(dir, cache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if _, fetched := receive(t, c, small(1)); fetched {
		t.Error("it is another cache")
	}
}

// TestMidstatesLink: a link in the place of midstates is replaced and not written through.
func TestMidstatesLink(t *testing.T) {
	dir := t.TempDir()
	b := content(3)
	h := lanes.NewRecorder(lanes.SegmentSize)
	h.Write(b)
	_, noted := h.Take()
	s, err := lanes.New(lanes.SegmentSize, int64(len(b)), identity.Sum(b), noted)
	if err != nil {
		t.Fatal(err)
	}
	c := open(t, filepath.Join(dir, "cache"), cache.Options{})
	e, _ := receive(t, c, b)
	precious := filepath.Join(dir, "precious")
	err = errors.Join(os.WriteFile(precious, []byte("x"), 0o644), os.Symlink(precious, e.Path+".midstates"))
	if err != nil {
		t.Fatal(err)
	}
	c.KeepMidstates(s)
	if got, err := durable.ReadRegular(precious); err != nil || !bytes.Equal(got, []byte("x")) {
		t.Errorf("%d bytes were written through a link, %v", len(got), err)
	}
	if c.Midstates(s.Digest, s.Size) == nil {
		t.Error("they are not kept")
	}
}
