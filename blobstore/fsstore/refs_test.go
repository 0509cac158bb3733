package fsstore

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

func putSeq(t *testing.T, st *Store, seqs ...uint64) {
	t.Helper()
	var refs []blobstore.Ref
	for _, seq := range seqs {
		refs = append(refs, blobstore.Ref{Repo: "r", Name: "n", Seq: seq, Manifest: []byte(strings.Repeat("m", 20))})
	}
	if _, err := st.Put(t.Context(), refs...); err != nil {
		t.Fatal(err)
	}
}

func seqs(t *testing.T, st *Store) (found []uint64, err error) {
	t.Helper()
	for r, err := range st.Since(t.Context(), 0) {
		if err != nil {
			return found, err
		}
		found = append(found, r.Seq)
	}
	return found, nil
}

// logOf makes a store with one Put for each argument, and returns it closed by force, with the size of its log before
// the first Put and after each.
func logOf(t *testing.T, puts ...[]uint64) (dir string, sizes []int64) {
	t.Helper()
	dir = filepath.Join(memDir(t), "store")
	newStore(t, dir)
	st := reopen(t, dir, &faulty{}, "")
	sizes = []int64{st.refs.end}
	for _, p := range puts {
		putSeq(t, st, p...)
		sizes = append(sizes, st.refs.end)
	}
	kill(t, st)
	return dir, sizes
}

// reread opens a copy of a store whose log was changed.
func reread(t *testing.T, dir string, change func(log []byte) []byte) ([]uint64, error) {
	t.Helper()
	log, err := os.ReadFile(filepath.Join(dir, refsName))
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, refsName), change(bytes.Clone(log)), 0o644); err != nil {
		t.Fatal(err)
	}
	defer os.WriteFile(filepath.Join(dir, refsName), log, 0o644)
	st, err := Open(dir, Options{Disk: durable.Disk{Fault: unsynced}})
	if err != nil {
		return nil, err
	}
	defer kill(t, st)
	return seqs(t, st)
}

// TestTornTail cuts the log at every byte: what ends before the cut is there, groups whole.
func TestTornTail(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2, 3}, []uint64{4})
	all := [][]uint64{nil, {1}, {1, 2, 3}, {1, 2, 3, 4}}
	for cut := sizes[0]; cut <= sizes[3]; cut++ {
		whole := 0
		for whole+1 < len(sizes) && sizes[whole+1] <= cut {
			whole++
		}
		for _, fill := range []int64{0, 10, sizes[3] - cut} { // and perhaps zeros, where a size came before its data
			got, err := reread(t, dir, func(log []byte) []byte {
				return append(log[:cut:cut], make([]byte, fill)...)
			})
			if err != nil || !slices.Equal(got, all[whole]) {
				t.Fatalf("cut at %d and %d zeros: %v, %v, want %v", cut, fill, got, err, all[whole])
			}
		}
	}
	if _, err := reread(t, dir, func(log []byte) []byte { return log[:sizes[0]-1] }); !errors.Is(err, blobstore.ErrDamaged) {
		t.Errorf("half a header: %v", err)
	}
}

// TestTornBatch: frames that were written together may reach the disk in any order; a whole one behind a broken one is
// no sign of damage then.
func TestTornBatch(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1})
	st := reopen(t, dir, &faulty{}, "")
	start, size := sizes[1], 0
	var batch []*frame
	for seq := range uint64(3) {
		payload, err := blobstore.EncodeRefs([]blobstore.Ref{{Seq: 2 + seq, Manifest: make([]byte, 10)}})
		if err != nil {
			t.Fatal(err)
		}
		batch = append(batch, &frame{payload: payload, refs: 1})
		size += frameHead + len(payload)
	}
	if err := st.refs.write(batch, size); err != nil {
		t.Fatal(err)
	}
	kill(t, st)
	for at := range size {
		got, err := reread(t, st.dir, func(log []byte) []byte { log[start+int64(at)] ^= 1; return log })
		if want := []uint64{1, 2, 3, 4}[:1+at/(size/3)]; err != nil || !slices.Equal(got, want) {
			t.Fatalf("byte %d of %d: read %v, %v, want %v", at, size, got, err, want)
		}
	}
}

// TestDamage changes every byte of the log: nothing that was acknowledged and proven by a later frame goes without
// ErrDamaged, and nothing is ever read as something else.
func TestDamage(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2, 3}, []uint64{4})
	all := []uint64{1, 2, 3, 4}
	for at := int64(0); at < sizes[3]; at++ {
		got, err := reread(t, dir, func(log []byte) []byte { log[at] ^= 0x10; return log })
		if at >= sizes[2] { // the last write, which nothing proves
			if err != nil || !slices.Equal(got, all[:3]) {
				t.Errorf("byte %d of the last frame: %v, %v", at, got, err)
			}
			continue
		}
		if !errors.Is(err, blobstore.ErrDamaged) && !strings.Contains(fmt.Sprint(err), "format") {
			t.Errorf("byte %d: %v, %v", at, got, err)
		}
		if len(got) > 3 {
			t.Errorf("byte %d: read %v", at, got)
		}
	}
	for i := 1; i < 3; i++ { // without a frame, what comes after it is in the wrong place and is not read
		got, err := reread(t, dir, func(log []byte) []byte {
			return slices.Delete(log, int(sizes[i-1]), int(sizes[i]))
		})
		if len(got) != i-1 {
			t.Errorf("without frame %d: read %v, %v", i, got, err)
		}
	}
}

// TestCloseProvesTheLastFrame: after Close also the last frame can't be lost without a word.
func TestCloseProvesTheLastFrame(t *testing.T) {
	st, _ := openFaulty(t)
	putSeq(t, st, 1)
	end := st.refs.end
	for range 3 {
		if err := st.Close(); err != nil {
			t.Fatal(err)
		}
		st = open(t, st.dir)
	}
	if n := st.refs.end - end; n != frameHead+1 {
		t.Errorf("three closes added %d bytes", n)
	}
	st.Close()
	got, err := reread(t, st.dir, func(log []byte) []byte { log[end-1] ^= 1; return log })
	if !errors.Is(err, blobstore.ErrDamaged) {
		t.Errorf("read %v, %v", got, err)
	}
}

// TestForgedFrame: a manifest that holds a copy of a frame can't make an unfinished write look like damage, or be read
// as refs.
func TestForgedFrame(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2})
	log, err := os.ReadFile(filepath.Join(dir, refsName))
	if err != nil {
		t.Fatal(err)
	}
	forged := bytes.Clone(log[sizes[1]:sizes[2]]) // says that the log was synced up to sizes[1]
	st := open(t, dir)
	if _, err := st.Put(t.Context(), blobstore.Ref{Seq: 3, Manifest: bytes.Repeat(forged, 50)}); err != nil {
		t.Fatal(err)
	}
	end := st.refs.end
	kill(t, st)
	got, err := reread(t, dir, func(log []byte) []byte { log[sizes[2]] ^= 1; return log[:end-1] })
	if err != nil || !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("read %v, %v", got, err)
	}
}

// TestFailedPut: after a write or a sync that failed, later Puts are durable and the failed one is not there.
func TestFailedPut(t *testing.T) {
	for _, op := range []durable.Op{durable.OpWrite, durable.OpSync} {
		for _, persist := range []bool{false, true} {
			st, f := openFaulty(t)
			putSeq(t, st, 1)
			f.fault = func(got durable.Op, path string, do func() error) error {
				if got != op {
					return unsynced(got, path, do)
				}
				f.fault = nil
				if persist {
					do()
				}
				return &os.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
			}
			if _, err := st.Put(t.Context(), blobstore.Ref{Seq: 2}); !errors.Is(err, blobstore.ErrNoSpace) {
				t.Errorf("%s: %v", op, err)
			}
			want := []uint64{1}
			for range 3 {
				if got, err := seqs(t, st); err != nil || !slices.Equal(got, want) {
					t.Errorf("%s, persisted %v: read %v, %v, want %v", op, persist, got, err, want)
				}
				kill(t, st)
				st = reopen(t, st.dir, f, "")
				putSeq(t, st, 3)
				want = append(want, 3)
			}
		}
	}
}

// TestBrokenLogTakesNothing: while the log can't be brought back to a known state, Put says so, and reading goes on.
func TestBrokenLogTakesNothing(t *testing.T) {
	st, f := openFaulty(t)
	putSeq(t, st, 1)
	f.fault = func(op durable.Op, path string, do func() error) error { return syscall.EIO }
	for range 2 {
		if _, err := st.Put(t.Context(), blobstore.Ref{Seq: 2}); !errors.Is(err, syscall.EIO) {
			t.Errorf("put: %v", err)
		}
	}
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, []uint64{1}) {
		t.Errorf("read %v, %v", got, err)
	}
	f.fault = nil
	putSeq(t, st, 3)
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, []uint64{1, 3}) {
		t.Errorf("read %v, %v", got, err)
	}
}

// TestPutsShareSyncs holds one Put in its sync until 64 others wait.
func TestPutsShareSyncs(t *testing.T) {
	st, f := openFaulty(t)
	const n = 64
	syncs := 0
	held, release := make(chan bool), make(chan bool)
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSync {
			if syncs++; syncs == 1 {
				close(held)
				<-release
			}
		}
		return unsynced(op, path, do)
	}
	var wg sync.WaitGroup
	wg.Go(func() { putSeq(t, st, n) })
	<-held
	for i := range uint64(n) {
		wg.Go(func() { putSeq(t, st, i) })
	}
	for waiting := 0; waiting < n; runtime.Gosched() {
		st.refs.mu.Lock()
		waiting = len(st.refs.queue)
		st.refs.mu.Unlock()
	}
	close(release)
	wg.Wait()
	if syncs > 3 {
		t.Errorf("%d syncs for %d puts", syncs, n+1)
	}
	if got, err := seqs(t, st); err != nil || len(got) != n+1 {
		t.Errorf("read %v, %v", got, err)
	}
}

func TestPutLimits(t *testing.T) {
	st, _ := openFaulty(t)
	if _, err := st.Put(t.Context(), make([]blobstore.Ref, blobstore.MaxRefs)...); err != nil {
		t.Error(err)
	}
	if _, err := st.Put(t.Context(), make([]blobstore.Ref, blobstore.MaxRefs+1)...); err == nil {
		t.Error("too many refs: no error")
	}
	if _, err := st.Put(t.Context(), blobstore.Ref{Manifest: make([]byte, blobstore.MaxRefsBytes)}); err == nil {
		t.Error("too many bytes: no error")
	}
	if _, err := st.Put(t.Context(), blobstore.Ref{Seq: 7, Manifest: make([]byte, blobstore.MaxRefsBytes-1000)}); err != nil {
		t.Error(err)
	}
	got, err := seqs(t, st)
	if err != nil || len(got) != blobstore.MaxRefs+1 || got[blobstore.MaxRefs] != 7 {
		t.Errorf("%d refs, %v", len(got), err)
	}
}

// TestCutIsKept: what Open leaves out at the end of the log is kept, and said, also to who asks for what was there.
func TestCutIsKept(t *testing.T) {
	st, _ := openFaulty(t)
	for seq := range uint64(3) {
		putSeq(t, st, seq+1)
	}
	end := st.refs.end
	last := positionAt(end, 0)
	kill(t, st)
	path := filepath.Join(st.dir, refsName)
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, end-5); err != nil {
		t.Fatal(err)
	}
	var told []string
	st, err = Open(st.dir, Options{Notify: func(s string) { told = append(told, s) }})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	lost := st.Dropped()
	if len(lost) != 1 || len(told) != 1 || told[0] != lost[0].String() || lost[0].Bytes != end-5-st.refs.end {
		t.Fatalf("dropped %+v, told %q", lost, told)
	}
	kept, err := os.ReadFile(filepath.Join(st.dir, lost[0].Kept))
	if err != nil || !bytes.Equal(kept, log[st.refs.end:end-5]) {
		t.Errorf("kept %d bytes, %v", len(kept), err)
	}
	if want := fmt.Sprintf("refs.log from byte %d on", st.refs.end); lost[0].Where != want {
		t.Errorf("%q, want %q", lost[0].Where, want)
	}
	for _, err := range st.Since(t.Context(), last) {
		if !errors.Is(err, blobstore.ErrRefsDamaged) || !strings.Contains(err.Error(), lost[0].Kept) {
			t.Errorf("refs after one that was cut off: %v", err)
		}
	}
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, []uint64{1, 2}) {
		t.Errorf("%v, %v", got, err)
	}
}

// TestAcceptLoss changes every byte of a log behind its header: an Open that accepts the loss finds everything but the
// Put that was hit, keeps the log as it was, and is the same store.
func TestAcceptLoss(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2, 3}, []uint64{4}, []uint64{5})
	groups := [][]uint64{{1}, {2, 3}, {4}, {5}}
	log, err := os.ReadFile(filepath.Join(dir, refsName))
	if err != nil {
		t.Fatal(err)
	}
	for at := sizes[0]; at < sizes[4]; at++ {
		spoilt := bytes.Clone(log)
		spoilt[at] ^= 0x10
		hit := 0
		for sizes[hit+1] <= at {
			hit++
		}
		want := slices.Concat(slices.Delete(slices.Clone(groups), hit, hit+1)...)
		if got := acceptLoss(t, spoilt, want); hit < 3 && (len(got) != 1 || got[0].Bytes != sizes[hit+1]-sizes[hit]) {
			t.Errorf("byte %d: dropped %+v", at, got)
		}
	}
	if got := acceptLoss(t, log, []uint64{1, 2, 3, 4, 5}); len(got) != 0 {
		t.Errorf("dropped %+v of a log without damage", got)
	}
	both := bytes.Clone(log)
	both[sizes[0]+1], both[sizes[2]+30] = 0, both[sizes[2]+30]+1
	if got := acceptLoss(t, both, []uint64{2, 3, 5}); len(got) != 2 {
		t.Errorf("dropped %+v", got)
	}
}

func acceptLoss(t *testing.T, log []byte, want []uint64) []blobstore.Dropped {
	t.Helper()
	dir := filepath.Join(memDir(t), "store")
	newStore(t, dir)
	path := filepath.Join(dir, refsName)
	if err := os.WriteFile(path, log, 0o644); err != nil {
		t.Fatal(err)
	}
	st, err := Open(dir, Options{AcceptLoss: true, Disk: durable.Disk{Fault: unsynced}})
	if err != nil {
		t.Fatal(err)
	}
	id, lost := st.ID(), st.Dropped()
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, want) {
		t.Errorf("read %v, %v, want %v", got, err, want)
	}
	putSeq(t, st, 9)
	st.Close()
	for _, d := range lost {
		kept, err := os.ReadFile(filepath.Join(dir, d.Kept))
		if err != nil || !bytes.Contains(log, kept) {
			t.Errorf("%s: %d bytes of %d, %v", d, len(kept), len(log), err)
		}
	}
	st, err = Open(dir, Options{Disk: durable.Disk{Fault: unsynced}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if got, err := seqs(t, st); err != nil || !slices.Equal(got, append(want, 9)) || len(st.Dropped()) > 0 {
		t.Errorf("then read %v, %v, dropped %v, want %v and 9", got, err, st.Dropped(), want)
	}
	if st.ID() != id {
		t.Error("it is another store")
	}
	return lost
}

// TestAcceptLossOfHeader changes the header of a log: an Open that accepts the loss finds everything, and where the salt
// is not damaged, or only the end of it, it is the same store.
func TestAcceptLossOfHeader(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2, 3}, []uint64{4})
	path := filepath.Join(dir, refsName)
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	id := hex.EncodeToString(log[12:28])
	spoilt := func(from, to int64, x byte) []byte {
		b := bytes.Clone(log)
		for at := from; at < to; at++ {
			b[at] ^= x
		}
		return b
	}
	type damage struct {
		log  []byte
		same bool // store
	}
	all := []damage{
		{spoilt(0, 32, 0xff), false}, {spoilt(12, 28, 0x11), false}, {spoilt(0, 12, 0x11), true}, {spoilt(24, 32, 1), true},
	}
	for at := range int64(logHeaderSize) {
		for bit := range 8 {
			all = append(all, damage{spoilt(at, at+1, 1<<bit), at < 12 || at >= 24})
		}
	}
	for i, d := range all {
		if err := os.WriteFile(path, d.log, 0o644); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(dir, Options{}); !errors.Is(err, blobstore.ErrRefsDamaged) {
			t.Fatalf("%d: open: %v", i, err)
		}
		if lost := acceptLoss(t, d.log, []uint64{1, 2, 3, 4}); len(lost) != 1 || lost[0].Bytes != logHeaderSize {
			t.Errorf("%d: dropped %+v", i, lost)
		}
		st, err := Open(dir, Options{AcceptLoss: true})
		if err != nil {
			t.Fatal(err)
		}
		if d.same && st.ID() != id {
			t.Errorf("%d: it is another store: %s, not %s", i, st.ID(), id)
		}
		kill(t, st)
	}
	both := spoilt(14, 15, 1)
	both[sizes[1]+30]++
	if lost := acceptLoss(t, both, []uint64{1, 4}); len(lost) != 2 {
		t.Errorf("dropped %+v", lost)
	}
	first := spoilt(14, 15, 1)
	first[sizes[0]+30]++
	for what, b := range map[string][]byte{"first frame too": first, "nothing": nil, "no frame": spoilt(14, 15, 1)[:32]} {
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := Open(dir, Options{AcceptLoss: true})
		if !errors.Is(err, blobstore.ErrDamaged) || errors.Is(err, blobstore.ErrRefsDamaged) {
			t.Errorf("%s: %v", what, err)
		}
		if kept, err := os.ReadFile(path); err != nil || !bytes.Equal(kept, b) {
			t.Errorf("%s: the log was changed: %d bytes, %v", what, len(kept), err)
		}
	}
}

// TestAcceptLossFails lets each change of the mending fail: the log is the one that it was, or mended.
func TestAcceptLossFails(t *testing.T) {
	dir, sizes := logOf(t, []uint64{1}, []uint64{2, 3}, []uint64{4})
	path := filepath.Join(dir, refsName)
	log, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	log[sizes[1]+30]++
	for n := 1; ; n++ {
		for _, persist := range []bool{false, true} {
			if err := os.WriteFile(path, log, 0o644); err != nil {
				t.Fatal(err)
			}
			var faults storetest.Faults
			fired := faults.Fail(n, persist)
			st, err := Open(dir, Options{AcceptLoss: true, Disk: durable.Disk{
				Fault: func(op durable.Op, path string, do func() error) error {
					return faults.Do(func() error { return unsynced(op, path, do) })
				},
			}})
			if err == nil {
				kill(t, st)
			}
			if !fired() {
				return
			}
			st, err = Open(dir, Options{AcceptLoss: true, Disk: durable.Disk{Fault: unsynced}})
			if err != nil {
				t.Fatal(err)
			}
			if got, err := seqs(t, st); err != nil || !slices.Equal(got, []uint64{1, 4}) {
				t.Errorf("change %d, persisted %v: %v, %v", n, persist, got, err)
			}
			kill(t, st)
		}
	}
}

// TestLongLog: Open reads the end of a log, however much is before it; a frame that is damaged there shows when it is
// read, with its place.
func TestLongLog(t *testing.T) {
	puts := make([][]uint64, 8000) // more than a piece
	for i := range puts {
		puts[i] = []uint64{uint64(i + 1)}
	}
	dir, sizes := logOf(t, puts...)
	if sizes[len(puts)] < 2*durable.PieceSize {
		t.Fatalf("the log has only %d bytes", sizes[len(puts)])
	}
	for _, at := range []int64{sizes[0], sizes[1] - 1, sizes[4000]} { // in a head, in a payload, in a head
		got, err := reread(t, dir, func(log []byte) []byte { log[at] ^= 1; return log })
		whole, _ := slices.BinarySearch(sizes, at+1)
		if !errors.Is(err, blobstore.ErrRefsDamaged) || len(got) != whole-1 ||
			!strings.Contains(err.Error(), fmt.Sprintf("byte %d", sizes[whole-1])) {
			t.Errorf("byte %d: read %d, %v", at, len(got), err)
		}
	}
	cut := sizes[5000] + 7
	got, err := reread(t, dir, func(log []byte) []byte { return log[:cut] })
	if err != nil || len(got) != 5000 {
		t.Errorf("cut inside frame 5001: read %d, %v", len(got), err)
	}
	got, err = reread(t, dir, func(log []byte) []byte { return append(log, make([]byte, 3*durable.PieceSize)...) })
	if err != nil || len(got) != len(puts) {
		t.Errorf("with zeros behind it: read %d, %v", len(got), err)
	}
}
