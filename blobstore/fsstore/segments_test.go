package fsstore

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// TestSegmentsOfRealSize: blobs of more than 16 MiB have midstates, also when most of them came after a kill.
func TestSegmentsOfRealSize(t *testing.T) {
	st, f := openFaulty(t)
	small := pattern(lanes.SegmentSize, "small")
	if i := push(t, st, small); checkMidstates(t, st, i, small) {
		t.Error("a blob of 16 MiB has midstates")
	}
	if _, err := os.Stat(filepath.Join(st.dir, segmentsName)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("there is a folder for midstates: %v", err)
	}
	data := pattern(3*lanes.SegmentSize+1000, "real")
	u := begin(t, st, data, lanes.SegmentSize+5)
	kill(t, st)
	appendTo(t, st.uploadPath(u.ID(), uploadData), data[u.Size():2*lanes.SegmentSize+7])
	st = reopen(t, st.dir, f, "")
	u, err := st.Resume(t.Context(), u.ID())
	if err != nil || u.Size() != 2*lanes.SegmentSize+7 {
		t.Fatalf("resumed at %d, %v", u.Size(), err)
	}
	end(t, u, data)
	if !checkMidstates(t, st, stat(t, st, data), data) {
		t.Error("no midstates")
	}
}

// TestSegmentsCostNoSync: midstates are not waited for.
func TestSegmentsCostNoSync(t *testing.T) {
	st, f := openFaulty(t)
	st.segment = 64 << 10
	var counts [2]int
	for i, n := range []int{int(st.segment), 3 * int(st.segment)} {
		data := pattern(n, "sync")
		if err := st.Delete(t.Context(), push(t, st, data)); err != nil { // after which the folders are there
			t.Fatal(err)
		}
		f.fault = func(op durable.Op, path string, do func() error) error {
			if op == durable.OpSync || op == durable.OpSyncDir {
				counts[i]++
			}
			return unsynced(op, path, do)
		}
		if has := checkMidstates(t, st, push(t, st, data), data); has != (i == 1) {
			t.Errorf("%d bytes: has midstates: %v", n, has)
		}
		f.fault = nil
	}
	if counts[0] != counts[1] {
		t.Errorf("%d syncs with midstates, %d without", counts[1], counts[0])
	}
}

// TestSegmentsWithoutSpace: an upload is saved also where its midstates find no space.
func TestSegmentsWithoutSpace(t *testing.T) {
	st, f := openFaulty(t)
	st.segment = 64 << 10
	data := pattern(300_000, "space")
	u := begin(t, st, data, 1000)
	fired := false
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpWrite && strings.HasSuffix(path, uploadState) && !fired {
			fired = true
			return syscall.ENOSPC
		}
		return unsynced(op, path, do)
	}
	n, err := u.Append(t.Context(), 1000, bytes.NewReader(data[1000:200_000]))
	if err != nil || n != 199_000 || !fired {
		t.Fatalf("append: kept %d, %v", n, err)
	}
	end(t, u, data)
	if checkMidstates(t, st, stat(t, st, data), data) {
		t.Error("there are midstates all the same")
	}
}

// TestCommitWithoutSegments: a blob is committed also where its midstates can't be kept.
func TestCommitWithoutSegments(t *testing.T) {
	st, f := openFaulty(t)
	st.segment = 64 << 10
	data := pattern(300_000, "commit")
	f.fault = func(op durable.Op, path string, do func() error) error {
		if strings.HasPrefix(path, filepath.Join(st.dir, segmentsName)) {
			return syscall.EIO
		}
		return unsynced(op, path, do)
	}
	i := push(t, st, data)
	f.fault = nil
	if checkMidstates(t, st, i, data) {
		t.Error("there are midstates all the same")
	}
	checkBlob(t, st.path(i.Digest))
	if left := tree(t, filepath.Join(st.dir, uploadsName)); len(left) != 1 {
		t.Errorf("left of the upload: %q", left)
	}
}

// TestUploadOfOlderProgram: an upload that a program began which recorded no midstates goes on, and has none in the
// end if an edge was among what came before.
func TestUploadOfOlderProgram(t *testing.T) {
	for received, has := range map[int]bool{0: true, 1000: true, 64<<10 - 1: true, 64 << 10: false, 250_000: false} {
		st, _ := openFaulty(t)
		st.segment = 1 << 40 // no edge is seen
		data := pattern(300_000, "old")
		u := begin(t, st, data, received)
		st.segment = 64 << 10
		end(t, u, data)
		if checkMidstates(t, st, stat(t, st, data), data) != has {
			t.Errorf("%d bytes came before: has midstates: %v", received, !has)
		}
	}
}

// TestTornSegments: midstates that a power failure left by half are none, and come back with the next push.
func TestTornSegments(t *testing.T) {
	st, _ := openFaulty(t)
	st.segment = 64 << 10
	data := pattern(300_000, "torn")
	i := push(t, st, data)
	path := st.segmentsPath(i.Digest)
	form, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, spoil := range [][]byte{nil, form[:len(form)-1], make([]byte, len(form)), append(bytes.Clone(form), 0)} {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		write(t, path, string(spoil))
		if _, err := st.Segments(t.Context(), i); !errors.Is(err, blobstore.ErrNotFound) {
			t.Errorf("%d bytes: %v", len(spoil), err)
		}
		if i = push(t, st, data); !checkMidstates(t, st, i, data) {
			t.Errorf("%d bytes: no midstates after another push", len(spoil))
		}
	}
	other := pattern(300_000, "other")
	theirs, err := os.ReadFile(st.segmentsPath(push(t, st, other).Digest))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	write(t, path, string(theirs))
	if _, err := st.Segments(t.Context(), i); !errors.Is(err, blobstore.ErrNotFound) {
		t.Errorf("midstates of another blob: %v", err)
	}
}

// TestKeepSegmentsIsDurable: midstates that are kept later have reached the disk, and on an error, or after the end of
// the process, there are those of before or the new ones, and nothing is left behind.
func TestKeepSegmentsIsDurable(t *testing.T) {
	st, f := openFaulty(t)
	st.segment = 64 << 10
	data := pattern(300_000, "keep")
	i := push(t, st, data)
	path := st.segmentsPath(i.Digest)
	form, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var did []string
	f.fault = func(op durable.Op, path string, do func() error) error {
		did = append(did, string(op)+" "+filepath.Ext(path))
		return do()
	}
	if err := st.KeepSegments(t.Context(), i, form); err != nil {
		t.Fatal(err)
	}
	f.fault = nil
	want := []string{
		"create .segments", "write .segments", "sync .segments", "rename ", "sync folder ",
	}
	if !slices.Equal(did, want) {
		t.Errorf("it did %q, want %q", did, want)
	}
	for n := range did {
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
		at := 0
		f.fault = func(_ durable.Op, _ string, do func() error) error {
			if at++; at-1 == n {
				return syscall.EIO
			}
			return do()
		}
		if err := st.KeepSegments(t.Context(), i, form); !errors.Is(err, syscall.EIO) {
			t.Errorf("fault %d: %v", n, err)
		}
		f.fault = nil
		if checkMidstates(t, st, i, data) != (n == len(did)-1) {
			t.Errorf("fault %d: other midstates than expected", n)
		}
		kill(t, st)
		st = reopen(t, st.dir, f, "")
		st.segment = 64 << 10
		if left := tree(t, filepath.Join(st.dir, uploadsName)); len(left) != 1 {
			t.Errorf("fault %d: left: %q", n, left)
		}
		if err := st.KeepSegments(t.Context(), i, form); err != nil || !checkMidstates(t, st, i, data) {
			t.Errorf("after fault %d: %v", n, err)
		}
	}
}

// TestSetAsideCutBlob: a blob that lost its end can be set aside as any other.
func TestSetAsideCutBlob(t *testing.T) {
	st, _ := openFaulty(t)
	data := pattern(5000, "cut")
	push(t, st, data)
	path := st.path(identity.Sum(data))
	if err := os.Truncate(path, 100); err != nil { // which also gives it another time
		t.Fatal(err)
	}
	i, err := st.Stat(t.Context(), identity.Sum(data))
	if !errors.Is(err, blobstore.ErrCut) {
		t.Errorf("stat: %v", err)
	}
	if err := st.SetAside(t.Context(), i, "it has 100 of 5000 bytes"); err != nil {
		t.Fatal(err)
	}
	for a, err := range st.Aside(t.Context()) {
		if err != nil || a.Size != 100 || !strings.HasPrefix(a.Why, "it has") {
			t.Errorf("set aside: %+v, %v", a, err)
		}
	}
	push(t, st, data)
	checkBlob(t, path)
	if left := tree(t, filepath.Join(st.dir, quarantineName)); len(left) != 1 {
		t.Errorf("left in quarantine: %q", left)
	}
}

// TestSetAsideWithoutSpace: a damaged blob is hidden also where nobody can write down why.
func TestSetAsideWithoutSpace(t *testing.T) {
	st, f := openFaulty(t)
	data := pattern(5000, "space")
	i := push(t, st, data)
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpWrite || op == durable.OpCreate || op == durable.OpMkdir {
			return &os.PathError{Op: string(op), Path: path, Err: syscall.ENOSPC}
		}
		return unsynced(op, path, do)
	}
	if err := st.SetAside(t.Context(), i, "why"); !errors.Is(err, blobstore.ErrNoSpace) {
		t.Errorf("set aside: %v", err)
	}
	f.fault = nil
	n := 0
	for a, err := range st.Aside(t.Context()) {
		if n++; err != nil || a.Why != "the reason was not written down" || a.Since.Before(i.Created.Add(-time.Second)) {
			t.Errorf("set aside: %+v, %v", a, err)
		}
	}
	if _, err := st.Stat(t.Context(), i.Digest); n != 1 || !errors.Is(err, blobstore.ErrQuarantined) {
		t.Errorf("%d set aside, stat: %v", n, err)
	}
	push(t, st, data)
	checkBlob(t, st.path(i.Digest))
}

// TestSweepAside: what killed processes leave in the quarantine goes when the store is opened; other files stay.
func TestSweepAside(t *testing.T) {
	st, f := openFaulty(t)
	shown, aside := pattern(10, "shown"), pattern(10, "aside")
	push(t, st, shown)
	if err := st.SetAside(t.Context(), push(t, st, aside), "why"); err != nil {
		t.Fatal(err)
	}
	st.Close()
	dir := filepath.Join(st.dir, quarantineName)
	healed, alone := identity.Sum(shown).Hex(), strings.Repeat("a", 64)
	for _, name := range []string{healed, healed + ".json", alone + ".json", "." + alone + ".json.tmp-X",
		"." + identity.Sum(aside).Hex() + ".json.tmp-X", "note.txt"} {
		write(t, filepath.Join(dir, name), "x")
	}
	st = reopen(t, st.dir, f, "")
	if left := tree(t, dir); len(left) != 4 { // the folder, the two of what is set aside, and the note
		t.Errorf("left: %q", left)
	}
	if a := identity.Sum(aside); !st.isAside(a) {
		t.Errorf("%s is not there any more", a)
	}
}
