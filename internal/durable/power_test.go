package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

var errPower = errors.New("the power is off")

// power is a disk whose power fails at one change. It knows what was synced, and makes what a machine could find
// afterwards: of data that was not synced any part, the rest zeros; of the changes of names that were not synced those
// up to some moment, in their order. A rename is never there by half.
type power struct {
	root string
	rng  *rand.Rand
	left int // changes until the power fails
	off  bool

	made   int
	ids    map[uint64]int   // of the file or folder that has an inode now, as inodes are used again
	data   map[int][]byte   // of a file at its last sync
	clock  int              // changes of names so far
	shown  map[int][]naming // of a folder, the last one that was synced and all later ones
	latest map[int]int      // when a folder was last synced
}

// naming is what names a folder had from a moment on.
type naming struct {
	since int
	names map[string]int
}

func newPower(t *testing.T, root string, left int, rng *rand.Rand) *power {
	p := &power{root: root, rng: rng, left: left}
	p.ids, p.data, p.shown, p.latest = map[uint64]int{}, map[int][]byte{}, map[int][]naming{}, map[int]int{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if e.IsDir() {
			p.named(path)
			p.synced(path)
		} else {
			p.data[p.id(path)] = must(os.ReadFile(path))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

func (p *power) id(path string) int {
	ino := must(os.Lstat(path)).Sys().(*syscall.Stat_t).Ino
	if p.ids[ino] == 0 {
		p.made++
		p.ids[ino] = p.made
	}
	return p.ids[ino]
}

// named notes the names that folders have now.
func (p *power) named(dirs ...string) {
	p.clock++
	for _, dir := range dirs {
		names := map[string]int{}
		for _, e := range must(os.ReadDir(dir)) {
			names[e.Name()] = p.id(filepath.Join(dir, e.Name()))
		}
		id := p.id(dir)
		p.shown[id] = append(p.shown[id], naming{p.clock, names})
	}
}

// synced notes that a folder is on the disk. What was moved into it is no longer where it was.
func (p *power) synced(dir string) {
	id := p.id(dir)
	p.shown[id] = p.shown[id][len(p.shown[id])-1:]
	p.latest[id] = p.clock
	for _, moved := range p.shown[id][0].names {
		for other, was := range p.shown {
			for _, n := range was {
				maps.DeleteFunc(n.names, func(_ string, had int) bool { return other != id && had == moved })
			}
		}
	}
}

func (p *power) fault(op Op, path string, do func() error) error {
	if p.left--; p.left <= 0 {
		if !p.off && p.rng.IntN(2) == 0 { // it still reaches the system, if not the disk
			p.change(op, path, do)
		}
		p.off = true
		return errPower
	}
	return p.change(op, path, do)
}

// change makes a change and notes what it means for the disk.
func (p *power) change(op Op, path string, do func() error) error {
	if err := do(); err != nil {
		return err
	}
	switch op {
	case OpCreate, OpMkdir:
		delete(p.ids, must(os.Lstat(path)).Sys().(*syscall.Stat_t).Ino)
		if op == OpMkdir {
			p.named(path)
		}
		p.named(filepath.Dir(path))
	case OpRename:
		var all []string // the other folder is not told: all are looked at, as of one moment
		err := filepath.WalkDir(p.root, func(path string, e fs.DirEntry, err error) error {
			if e.IsDir() {
				all = append(all, path)
			}
			return err
		})
		p.named(all...)
		return err
	case OpLink, OpRemove:
		p.named(filepath.Dir(path))
	case OpSync:
		p.data[p.id(path)] = must(os.ReadFile(path))
	case OpSyncDir:
		p.synced(path)
	}
	return nil
}

// image writes what a machine could find to another folder.
func (p *power) image(to string) error {
	now := map[int]string{}
	err := filepath.WalkDir(p.root, func(path string, _ fs.DirEntry, err error) error {
		now[p.id(path)] = path
		return err
	})
	if err != nil {
		return err
	}
	return p.folder(p.id(p.root), to, now, p.rng.IntN(p.clock+1))
}

// folder writes a folder as it was at a moment, or when it was last synced if that was later.
func (p *power) folder(id int, to string, now map[int]string, moment int) error {
	if err := os.Mkdir(to, 0o755); err != nil {
		return err
	}
	var names map[string]int
	for _, n := range p.shown[id] {
		if names == nil || n.since <= max(moment, p.latest[id]) {
			names = n.names
		}
	}
	for _, name := range slices.Sorted(maps.Keys(names)) {
		id, path := names[name], filepath.Join(to, name)
		err := error(nil)
		if _, dir := p.shown[id]; dir {
			err = p.folder(id, path, now, moment)
		} else {
			err = os.WriteFile(path, p.content(id, now[id]), 0o644)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// content is that of the last sync, or the present one, or a mixture of both with zeros where nothing was.
func (p *power) content(id int, path string) []byte {
	now, err := os.ReadFile(path)
	if err != nil || p.rng.IntN(3) == 0 {
		return p.data[id]
	}
	mixed := make([]byte, len(now))
	copy(mixed, p.data[id])
	for i := range now {
		if p.rng.IntN(8) > 0 {
			mixed[i] = now[i]
		}
	}
	return mixed
}

// files lists the files below dir with what they hold, but not leftovers.
func files(t *testing.T, dir string) string {
	t.Helper()
	var text strings.Builder
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() && !strings.Contains(e.Name(), ".tmp-") {
			fmt.Fprintf(&text, "%s=%q ", strings.TrimPrefix(path, dir), must(os.ReadFile(path)))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return text.String()
}

// acts are what this package promises to be durable and never there by half. Each is made in a folder of its own, with
// the files a/x, a/y and b/x in it.
var acts = map[string]func(d Disk, dir string) error{
	"replace": func(d Disk, dir string) error {
		return d.WriteFile(filepath.Join(dir, "a/x"), []byte("the new content"), 0o600)
	},
	"replace twice": func(d Disk, dir string) error {
		return errors.Join(d.WriteFile(filepath.Join(dir, "a/x"), []byte("the first"), 0o600),
			d.WriteFile(filepath.Join(dir, "a/x"), []byte("the second"), 0o600))
	},
	"publish": func(d Disk, dir string) error {
		f, err := d.CreateTemp(filepath.Join(dir, "b/new"), 0o600)
		if err != nil {
			return err
		}
		for i := range 5 {
			if _, err := fmt.Fprintf(f, "piece %d", i); err != nil {
				return errors.Join(err, f.Discard())
			}
		}
		return f.PublishNew(filepath.Join(dir, "b/new"))
	},
	"make folders": func(d Disk, dir string) error {
		deep := filepath.Join(dir, "c/d/e")
		if err := d.MkdirAll(deep, 0o755); err != nil {
			return err
		}
		return d.WriteFile(filepath.Join(deep, "new"), []byte("deep"), 0o600)
	},
	"move": func(d Disk, dir string) error {
		return d.Move(filepath.Join(dir, "a/x"), filepath.Join(dir, "b/x"))
	},
	"move a folder": func(d Disk, dir string) error {
		return d.MoveNew(filepath.Join(dir, "a"), filepath.Join(dir, "b/a"))
	},
	"exchange": func(d Disk, dir string) error {
		return d.Exchange(filepath.Join(dir, "a"), filepath.Join(dir, "b"))
	},
	"remove": func(d Disk, dir string) error {
		if err := d.Remove(filepath.Join(dir, "a/y")); err != nil {
			return err
		}
		return d.SyncDir(filepath.Join(dir, "a"))
	},
	"clone": func(d Disk, dir string) error {
		src, err := os.Open(filepath.Join(dir, "a/x"))
		if err != nil {
			return err
		}
		defer src.Close()
		f, err := d.Clone(src, filepath.Join(dir, "b/.x.tmp-1"), 0o600)
		if err != nil {
			return err
		}
		return f.Publish(filepath.Join(dir, "b/x"))
	},
}

func fresh(t *testing.T, dir string) {
	t.Helper()
	for _, name := range []string{"a/x", "a/y", "b/x"} {
		must(0, os.MkdirAll(filepath.Join(dir, filepath.Dir(name)), 0o755))
		must(0, os.WriteFile(filepath.Join(dir, name), []byte("old content of "+name), 0o600))
	}
}

// TestPowerFailure lets the power fail at every change of what this package does: what it said to be done is there, and
// what it did not come to say is there whole or not at all.
func TestPowerFailure(t *testing.T) {
	for name, act := range acts {
		t.Run(name, func(t *testing.T) {
			if wrong := everyFailure(t, act); len(wrong) > 0 {
				t.Errorf("%d times wrong, at first %s", len(wrong), wrong[0])
			}
		})
	}
}

// everyFailure returns what was not as promised.
func everyFailure(t *testing.T, act func(Disk, string) error) (wrong []string) {
	t.Helper()
	states := everyState(t, act)
	done := states[len(states)-1]
	for n, ended := 1, false; !ended; n++ {
		for seed := range uint64(16) {
			tmp := memDir(t)
			dir, after := filepath.Join(tmp, "disk"), filepath.Join(tmp, "after")
			fresh(t, dir)
			p := newPower(t, dir, n, rand.New(rand.NewPCG(seed, uint64(n))))
			err := act(Disk{Fault: p.fault}, dir)
			if err != nil && !errors.Is(err, errPower) {
				t.Fatal(err)
			}
			ended = err == nil
			if err := p.image(after); err != nil {
				t.Fatal(err)
			}
			if got := files(t, after); ended && got != done || !slices.Contains(states, got) {
				wrong = append(wrong, fmt.Sprintf("change %d, seed %d, %v: %s\nwant %q", n, seed, err, got, states))
			}
		}
	}
	return wrong
}

// memDir is a folder in memory where that is possible: no test here needs a disk that is one.
func memDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "durable-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

// everyState returns what is there before, between and after the changes of names that an act makes.
func everyState(t *testing.T, act func(Disk, string) error) (states []string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "disk")
	fresh(t, dir)
	states = []string{files(t, dir)}
	d := Disk{Fault: func(op Op, _ string, do func() error) error {
		err := do()
		if op == OpRename || op == OpRemove {
			states = append(states, files(t, dir))
		}
		return err
	}}
	if err := act(d, dir); err != nil {
		t.Fatal(err)
	}
	return states
}

// TestPowerFailureShows: with a sync left out the model must show that something is lost, or it would show nothing.
func TestPowerFailureShows(t *testing.T) {
	for op, name := range map[Op]string{OpSync: "replace", OpSyncDir: "publish"} {
		without := func(d Disk, dir string) error {
			fault := d.Fault
			if fault != nil {
				d.Fault = func(o Op, path string, do func() error) error {
					if o == op {
						return nil
					}
					return fault(o, path, do)
				}
			}
			return acts[name](d, dir)
		}
		if len(everyFailure(t, without)) == 0 {
			t.Errorf("%s without %q: nothing was lost", name, op)
		}
	}
}
