package fsstore

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

var errPower = errors.New("the power is off")

// crasher is a disk whose power fails at one change. It knows what was synced, so that it can show what a machine would
// find afterwards: of everything that was not synced, some is there and some is not. Only a rename is never there by
// half: every journaling filesystem takes a name away and gives the new one in one step.
type crasher struct {
	root string
	rng  *rand.Rand

	mu    sync.Mutex
	left  int // changes until the power fails
	off   bool
	made  int                       // files and folders so far
	ids   map[uint64]int            // the one that has an inode now, as inodes are used again
	files map[int][]byte            // content at the last sync
	dirs  map[string]map[string]int // names in a folder at its last sync
}

func newCrasher(t *testing.T, root string, left int, rng *rand.Rand) *crasher {
	c := &crasher{root: root, rng: rng, left: left}
	c.ids, c.files, c.dirs = map[uint64]int{}, map[int][]byte{}, map[string]map[string]int{}
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		if e.IsDir() {
			c.syncDir(path)
		} else {
			c.syncFile(path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (c *crasher) fault(op durable.Op, path string, do func() error) error {
	c.mu.Lock()
	if c.left--; c.left <= 0 && !c.off {
		c.off = true
		if c.rng.IntN(2) == 0 { // the change still reaches the system, if not the disk
			unsynced(op, path, do)
		}
	}
	off := c.off
	c.mu.Unlock()
	if off {
		return errPower
	}
	err := unsynced(op, path, do)
	c.mu.Lock()
	defer c.mu.Unlock()
	if err != nil || c.off {
		return err
	}
	switch op {
	case durable.OpCreate, durable.OpMkdir:
		delete(c.ids, inode(path))
	case durable.OpSync:
		c.syncFile(path)
	case durable.OpSyncDir:
		c.syncDir(path)
	}
	return nil
}

func inode(path string) uint64 {
	fi, err := os.Lstat(path)
	if err != nil {
		return 0
	}
	return fi.Sys().(*syscall.Stat_t).Ino
}

// id names the file or folder that is at path now, whatever happens to the name.
func (c *crasher) id(path string) int {
	ino := inode(path)
	if c.ids[ino] == 0 {
		c.made++
		c.ids[ino] = c.made
	}
	return c.ids[ino]
}

func (c *crasher) syncFile(path string) {
	if b, err := os.ReadFile(path); err == nil {
		c.files[c.id(path)] = b
	}
}

func (c *crasher) syncDir(path string) {
	c.dirs[path] = c.names(path)
	oneName(c.dirs, path)
}

// oneName takes every file that has its name in dir away from the others, where it was before a rename.
func oneName(all map[string]map[string]int, dir string) {
	for _, id := range all[dir] {
		for other, names := range all {
			if other != dir {
				maps.DeleteFunc(names, func(_ string, had int) bool { return had == id })
			}
		}
	}
}

func (c *crasher) names(dir string) map[string]int {
	names := map[string]int{}
	found, _ := os.ReadDir(dir)
	for _, e := range found {
		names[e.Name()] = c.id(filepath.Join(dir, e.Name()))
	}
	return names
}

// image writes what a machine could find to another folder.
func (c *crasher) image(t *testing.T, to string) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	current := map[int]string{}          // where a file or folder is now
	found := map[string]map[string]int{} // the names in each folder
	err := filepath.WalkDir(c.root, func(path string, e fs.DirEntry, err error) error {
		current[c.id(path)] = path
		if e.IsDir() {
			found[path] = maps.Clone(c.dirs[path])
			if c.rng.IntN(2) == 0 {
				found[path] = c.names(path)
			}
		}
		return err
	})
	c.wholeRenames(current, found)
	if err = errors.Join(err, c.copyDir(c.root, to, current, found)); err != nil {
		t.Fatal(err)
	}
}

// wholeRenames gives a file its new name if it has lost its old one, and takes the old one away if it has both.
func (c *crasher) wholeRenames(current map[int]string, found map[string]map[string]int) {
	named := map[int]bool{}
	for _, names := range found {
		for _, id := range names {
			named[id] = true
		}
	}
	for _, names := range c.dirs {
		for _, id := range names {
			if path, ok := current[id]; ok && !named[id] {
				found[filepath.Dir(path)] = c.names(filepath.Dir(path))
			}
		}
	}
	for id, path := range current {
		if found[filepath.Dir(path)][filepath.Base(path)] == id {
			oneName(found, filepath.Dir(path))
		}
	}
}

func (c *crasher) copyDir(from, to string, current map[int]string, found map[string]map[string]int) error {
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	names := found[from]
	for _, name := range slices.Sorted(maps.Keys(names)) {
		path, id := filepath.Join(to, name), names[name]
		if fi, err := os.Stat(current[id]); err == nil && fi.IsDir() {
			if err := c.copyDir(current[id], path, current, found); err != nil {
				return err
			}
		} else if err := os.WriteFile(path, c.content(id, current[id]), 0o644); err != nil {
			return err
		}
	}
	return nil
}

// content is that of the last sync, or the present one, or a mixture with holes of zeros.
func (c *crasher) content(id int, path string) []byte {
	synced := c.files[id]
	now, err := os.ReadFile(path)
	if err != nil {
		return synced
	}
	switch c.rng.IntN(3) {
	case 0:
		return synced
	case 1:
		return now
	}
	mixed := make([]byte, len(now))
	copy(mixed, synced)
	for at := 0; at < len(now); at += 512 {
		end := min(at+512, len(now))
		if c.rng.IntN(2) == 0 {
			copy(mixed[at:end], now[at:end])
		}
	}
	return mixed
}

// TestPowerFailure lets the power fail at every change of a workload, and looks at what was acknowledged.
func TestPowerFailure(t *testing.T) {
	everyChange(t, 3, func(t *testing.T, dir string, c *crasher, w *workload) error {
		return w.process(t, dir, c)
	})
}

// TestKillThenPowerFailure ends the process at every change of a workload and lets the power fail as soon as the next
// process has shown what it found: that must not go again.
func TestKillThenPowerFailure(t *testing.T) {
	everyChange(t, 1, func(t *testing.T, dir string, c *crasher, w *workload) error {
		err := w.process(t, dir, c)
		c.off, c.left = false, math.MaxInt
		st, oerr := Open(dir, Options{Disk: durable.Disk{Fault: c.fault, Boot: "before"}})
		if oerr != nil {
			t.Fatal(oerr)
		}
		st.segment = crashSegment
		w.check(t, st)
		w.show(t, st)
		kill(t, st)
		return err
	})
}

// everyChange calls run with a store whose disk fails at the first change, the second and so on until run returns nil,
// and then looks at what a machine could find of it.
func everyChange(t *testing.T, seeds uint64, run func(t *testing.T, dir string, c *crasher, w *workload) error) {
	done := false
	for n := 1; !done; n++ {
		for seed := range seeds {
			t.Run(fmt.Sprintf("change %d, seed %d", n, seed), func(t *testing.T) {
				rng := rand.New(rand.NewPCG(seed, uint64(n)))
				tmp := memDir(t)
				dir, after := filepath.Join(tmp, "store"), filepath.Join(tmp, "after")
				newStore(t, dir)
				c, w := newCrasher(t, dir, n, rng), &workload{rng: rng}
				err := run(t, dir, c, w)
				if err != nil && !errors.Is(err, errPower) {
					t.Fatal(err)
				}
				done = err == nil
				c.image(t, after)
				st, err := Open(after, Options{Disk: durable.Disk{Boot: "after", Fault: unsynced}})
				if err != nil {
					t.Fatal(err)
				}
				defer st.Close()
				st.segment = crashSegment
				w.check(t, st)
				w.finish(t, st)
			})
		}
		if t.Failed() {
			return
		}
	}
}

// crashSegment is the size of segments, so that the blobs of a workload have midstates.
const crashSegment = 10 << 10

// workload makes calls and remembers what was acknowledged.
type workload struct {
	rng     *rand.Rand
	blobs   [][]byte
	deleted []identity.Digest
	refs    int
	asked   int // refs that were put, acknowledged or not
	id      string
	data    []byte // of the open upload
	acked   int
	suspect []byte // a blob that was pushed and is, or was, to be set aside
	aside   bool   // that was acknowledged
}

// process runs the workload in a process that dies at its end or when the disk fails.
func (w *workload) process(t *testing.T, dir string, c *crasher) error {
	st, err := Open(dir, Options{Disk: durable.Disk{Fault: c.fault, Boot: "before"}})
	if err != nil {
		return err
	}
	defer kill(t, st)
	st.every, st.segment = 64<<10, crashSegment
	return w.run(t, st)
}

// show takes what a store shows for acknowledged.
func (w *workload) show(t *testing.T, st *Store) {
	t.Helper()
	w.blobs = nil
	for i, err := range st.List(t.Context(), identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(st.path(i.Digest))
		if err != nil {
			t.Fatal(err)
		}
		w.blobs = append(w.blobs, b)
	}
	_, err := st.Stat(t.Context(), identity.Sum(w.suspect))
	w.aside = errors.Is(err, blobstore.ErrQuarantined)
	w.refs = 0
	for range st.Since(t.Context(), 0) {
		w.refs++
	}
	w.asked = w.refs
	if u, err := st.Resume(t.Context(), w.id); err == nil {
		w.acked = int(u.Size())
	}
}

func (w *workload) bytes(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(w.rng.Uint32() | 1) // never 0, as a hole reads
	}
	return b
}

func (w *workload) run(t *testing.T, st *Store) error {
	small := w.bytes(3000)
	if err := w.push(t, st, small); err != nil {
		return err
	}
	w.data = w.bytes(200_000)
	u, err := st.Create(t.Context(), identity.Sum(w.data), int64(len(w.data)))
	if err != nil {
		return err
	}
	w.id = u.ID()
	// The last bytes come with the commit, or before it.
	for _, to := range []int{90_000, 91_000, len(w.data) - w.rng.IntN(2)*50_000} {
		r := &slow{b: w.data[w.acked:to]}
		if _, err := u.Append(t.Context(), int64(w.acked), r); err != nil {
			return err
		}
		w.acked = to
		if err := w.put(t, st, 2); err != nil {
			return err
		}
	}
	i, err := st.Stat(t.Context(), identity.Sum(small))
	if err != nil {
		return err
	}
	w.blobs = nil
	if err := st.Delete(t.Context(), i); err != nil {
		return err
	}
	w.deleted = append(w.deleted, i.Digest)
	if _, err := u.Finish(t.Context(), u.Size(), bytes.NewReader(w.data[u.Size():]), identity.Sum(w.data)); err != nil {
		return err
	}
	w.blobs, w.acked = append(w.blobs, w.data), len(w.data)
	if err := w.put(t, st, 1); err != nil {
		return err
	}
	id := w.id
	w.id = ""
	if s, err := st.Resume(t.Context(), id); err != nil || s.Abort(t.Context()) != nil {
		return fmt.Errorf("drop the receipt: %w", errors.Join(err, errPower))
	}
	return w.setAside(t, st)
}

// setAside sets a blob aside and heals it.
func (w *workload) setAside(t *testing.T, st *Store) error {
	suspect := w.bytes(70_000)
	if err := w.push(t, st, suspect); err != nil {
		return err
	}
	i, err := st.Stat(t.Context(), identity.Sum(suspect))
	if err != nil {
		return err
	}
	w.suspect, w.blobs = suspect, w.blobs[:len(w.blobs)-1]
	if err := st.SetAside(t.Context(), i, "why"); err != nil {
		return err
	}
	w.aside = true
	if err := w.put(t, st, 1); err != nil {
		return err
	}
	w.aside = false
	return w.push(t, st, suspect)
}

func (w *workload) push(t *testing.T, st *Store, b []byte) error {
	u, err := st.Create(t.Context(), identity.Digest{}, -1)
	if err != nil {
		return err
	}
	if _, err := u.Append(t.Context(), 0, bytes.NewReader(b)); err != nil {
		return err
	}
	if _, err := u.Commit(t.Context(), identity.Sum(b)); err != nil {
		return err
	}
	w.blobs = append(w.blobs, b)
	return nil
}

func (w *workload) put(t *testing.T, st *Store, n int) error {
	var refs []blobstore.Ref
	for range n {
		refs = append(refs, blobstore.Ref{Repo: "r", Seq: uint64(w.asked), Manifest: w.bytes(2000)})
		w.asked++
	}
	if _, err := st.Put(t.Context(), refs...); err != nil {
		return err
	}
	w.refs = w.asked
	return nil
}

// slow gives few bytes at a time.
type slow struct{ b []byte }

func (s *slow) Read(b []byte) (int, error) {
	n := copy(b[:min(len(b), 10_000)], s.b)
	if s.b = s.b[n:]; n == 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (w *workload) check(t *testing.T, st *Store) {
	t.Helper()
	for _, b := range w.blobs {
		if _, err := st.Stat(t.Context(), identity.Sum(b)); err != nil {
			t.Errorf("a blob of %d bytes was acknowledged: %v", len(b), err)
		}
	}
	for i, err := range st.List(t.Context(), identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		b, err := os.ReadFile(st.path(i.Digest))
		if err != nil || identity.Sum(b) != i.Digest {
			t.Errorf("blob %s is not whole: %d bytes, %v", i.Digest, len(b), err)
		}
		checkMidstates(t, st, i, b)
	}
	if w.suspect != nil {
		_, err := st.Stat(t.Context(), identity.Sum(w.suspect))
		if (err != nil || w.aside) && !errors.Is(err, blobstore.ErrQuarantined) {
			t.Errorf("a blob was to be set aside, acknowledged %v: %v", w.aside, err)
		}
	}
	for _, d := range w.deleted {
		if _, err := st.Stat(t.Context(), d); !errors.Is(err, blobstore.ErrNotFound) {
			t.Errorf("blob %s was deleted: %v", d, err)
		}
	}
	w.checkRefs(t, st)
}

// checkMidstates: a blob has the right midstates or none.
func checkMidstates(t *testing.T, st *Store, i blobstore.Info, b []byte) (found bool) {
	t.Helper()
	form, err := st.Segments(t.Context(), i)
	if errors.Is(err, blobstore.ErrNotFound) {
		return false
	} else if err != nil {
		t.Fatal(err)
	}
	s, err := lanes.ParseSegments(form, st.segment)
	if err != nil {
		t.Fatal(err)
	}
	stream := s.Stream()
	stream.Write(b)
	if bad := stream.End(); bad != nil || s.Digest != i.Digest {
		t.Errorf("midstates of %s, %d bytes: segments %v do not pass", i.Digest, len(b), bad)
	}
	return true
}

func (w *workload) checkRefs(t *testing.T, st *Store) {
	t.Helper()
	n := 0
	for r, err := range st.Since(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		if r.Seq != uint64(n) {
			t.Errorf("ref %d has number %d", n, r.Seq)
		}
		n++
	}
	if n != w.refs && n != w.asked {
		t.Errorf("%d refs, acknowledged %d of %d", n, w.refs, w.asked)
	}
}

// finish goes on with the upload and commits it, which shows that its hash state is that of its bytes, or that it is a
// receipt.
func (w *workload) finish(t *testing.T, st *Store) {
	t.Helper()
	if w.id == "" {
		return
	}
	u, err := st.Resume(t.Context(), w.id)
	if errors.Is(err, blobstore.ErrUploadUnknown) && w.acked == 0 {
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	off := u.Size()
	if off < int64(w.acked) {
		t.Errorf("upload has %d bytes, acknowledged were %d", off, w.acked)
	}
	if _, err := u.Append(t.Context(), off, bytes.NewReader(w.data[off:])); err != nil {
		t.Fatal(err)
	}
	i, err := u.Commit(t.Context(), identity.Sum(w.data))
	if err != nil {
		t.Fatal(err)
	}
	checkMidstates(t, st, i, w.data)
}
