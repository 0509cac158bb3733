package fsstore

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// push stores b as a blob.
func push(t *testing.T, st *Store, b []byte) blobstore.Info {
	t.Helper()
	i, err := pushAll(st, b)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func pushAll(st *Store, b []byte) (blobstore.Info, error) {
	u, err := st.Create(context.Background(), identity.Sum(b), int64(len(b)))
	if err != nil {
		return blobstore.Info{}, err
	}
	if _, err := u.Append(context.Background(), 0, bytes.NewReader(b)); err != nil {
		return blobstore.Info{}, err
	}
	i, err := u.Commit(context.Background(), identity.Sum(b))
	if err != nil {
		return i, err
	}
	return i, u.Abort(context.Background())
}

// faulty is a disk with a fault that can be set while the store is open.
type faulty struct {
	fault func(op durable.Op, path string, do func() error) error
}

func (f *faulty) do(op durable.Op, path string, do func() error) error {
	if f.fault != nil {
		return f.fault(op, path, do)
	}
	return unsynced(op, path, do)
}

// openFaulty opens a new store on a faulty disk, as if under the given boot.
func openFaulty(t *testing.T) (*Store, *faulty) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "store")
	newStore(t, dir)
	f := &faulty{}
	return reopen(t, dir, f, ""), f
}

func reopen(t *testing.T, dir string, f *faulty, boot string) *Store {
	t.Helper()
	st, err := Open(dir, Options{Disk: durable.Disk{Fault: f.do, Boot: boot}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}

func pattern(n int, of string) []byte { return []byte(strings.Repeat(of, n/len(of)+1)[:n]) }

// begin opens an upload of data and appends what comes before off.
func begin(t *testing.T, st *Store, data []byte, off int) blobstore.Upload {
	t.Helper()
	u, err := st.Create(t.Context(), identity.Sum(data), int64(len(data)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := u.Append(t.Context(), 0, bytes.NewReader(data[:off])); err != nil {
		t.Fatal(err)
	}
	return u
}

// end appends what is missing, commits and drops the receipt.
func end(t *testing.T, u blobstore.Upload, data []byte) {
	t.Helper()
	if _, err := u.Append(t.Context(), u.Size(), bytes.NewReader(data[u.Size():])); err != nil {
		t.Fatal(err)
	}
	if _, err := u.Commit(t.Context(), identity.Sum(data)); err != nil {
		t.Error(err)
	}
	if err := u.Abort(t.Context()); err != nil {
		t.Error(err)
	}
}

func stat(t *testing.T, st *Store, b []byte) blobstore.Info {
	t.Helper()
	i, err := st.Stat(t.Context(), identity.Sum(b))
	if err != nil {
		t.Fatal(err)
	}
	return i
}

func appendTo(t *testing.T, path string, b []byte) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.Write(b)
	if err = errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// TestTail: bytes after the saved state are taken under the same boot and dropped under another.
func TestTail(t *testing.T) {
	data := pattern(500_000, "tail")
	for boot, size := range map[string]int64{"first": 400_000, "second": 100_000} {
		st, f := openFaulty(t)
		dir := st.dir
		st.Close()
		st = reopen(t, dir, f, "first")
		u := begin(t, st, data, 100_000)
		kill(t, st)
		tail := data[100_000:400_000]
		if boot == "second" {
			tail = make([]byte, 300_000) // what a machine finds where nothing was synced
		}
		appendTo(t, filepath.Join(dir, "uploads", u.ID()+".data"), tail)
		st = reopen(t, dir, f, boot)
		u, err := st.Resume(t.Context(), u.ID())
		if err != nil || u.Size() != size {
			t.Fatalf("boot %s: resumed at %d, %v, want %d", boot, u.Size(), err, size)
		}
		end(t, u, data)
	}
}

// TestSavesOnTheWay: while bytes come, the state is saved again and again, so that a killed process leaves little to
// hash a second time.
func TestSavesOnTheWay(t *testing.T) {
	st, f := openFaulty(t)
	st.every = 512 << 10
	saves := make(chan bool, 100)
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSync && strings.HasSuffix(path, uploadState) {
			saves <- true
		}
		return unsynced(op, path, do)
	}
	data := pattern(8<<20, "once")
	u, err := st.Create(t.Context(), identity.Digest{}, -1)
	if err != nil {
		t.Fatal(err)
	}
	var pieces []io.Reader
	for at := 0; at < len(data); at += 1 << 20 {
		pieces = append(pieces, bytes.NewReader(data[at:at+1<<20]), readerFunc(func() error { <-saves; return io.EOF }))
	}
	if _, err := u.Append(t.Context(), 0, io.MultiReader(pieces...)); err != nil {
		t.Fatal(err)
	}
	end(t, u, data)
}

// TestStaleState: a save that was reported as failed, but reached the disk, must not be believed when other bytes have
// come in place of those that it covered.
func TestStaleState(t *testing.T) {
	st, f := openFaulty(t)
	one, two := pattern(300_000, "one"), pattern(300_000, "two")
	u, err := st.Create(t.Context(), identity.Digest{}, -1)
	if err != nil {
		t.Fatal(err)
	}
	f.fault = func(op durable.Op, path string, do func() error) error {
		err := unsynced(op, path, do)
		if op == durable.OpSync && strings.HasSuffix(path, uploadState) {
			return syscall.EIO
		}
		return err
	}
	n, err := u.Append(t.Context(), 0, bytes.NewReader(one[:200_000]))
	if n != 0 || !errors.Is(err, syscall.EIO) || u.Size() != 0 {
		t.Fatalf("append: kept %d, size %d, %v", n, u.Size(), err)
	}
	f.fault = nil
	killed := &faulty{func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSync {
			return syscall.EIO // the process ends before it can save
		}
		return do()
	}}
	r := io.MultiReader(bytes.NewReader(two[:250_000]), readerFunc(func() error {
		f.fault = killed.fault
		return io.EOF
	}))
	if _, err := u.Append(t.Context(), 0, r); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	f.fault = nil
	appendTo(t, st.uploadPath(u.ID(), uploadData), two[:250_000]) // Append could still take them back: the dead could not
	kill(t, st)
	st = reopen(t, st.dir, f, "")
	u, err = st.Resume(t.Context(), u.ID())
	if err != nil || u.Size() != 250_000 {
		t.Fatalf("resumed at %d, %v", u.Size(), err)
	}
	end(t, u, two)
}

type readerFunc func() error

func (f readerFunc) Read([]byte) (int, error) { return 0, f() }

// TestFailedSync: after a sync that failed, the system may have dropped what was written and say nothing at the next
// one. Those bytes must be sent again.
func TestFailedSync(t *testing.T) {
	for _, every := range []int64{syncEvery, 64 << 10} { // at the end; in the background
		st, f := openFaulty(t)
		st.every = every
		data := pattern(600_000, "sync")
		u := begin(t, st, data, 100_000)
		path := st.uploadPath(u.ID(), uploadData)
		once := true
		f.fault = func(op durable.Op, p string, do func() error) error {
			if op == durable.OpSync && p == path && once {
				once = false
				if err := os.WriteFile(path, append(data[:100_000:100_000], make([]byte, 1000)...), 0o600); err != nil {
					return err
				}
				return syscall.EIO
			}
			return unsynced(op, p, do)
		}
		n, err := u.Append(t.Context(), 100_000, bytes.NewReader(data[100_000:]))
		if n != 0 || !errors.Is(err, syscall.EIO) || u.Size() != 100_000 {
			t.Fatalf("append: kept %d, size %d, %v", n, u.Size(), err)
		}
		end(t, u, data)
	}
}

// TestDiskFull: an announcement takes no space, what was acknowledged stays, what was not gives its space back, and the
// upload goes on when there is room.
func TestDiskFull(t *testing.T) {
	st, f := openFaulty(t)
	data := pattern(8<<20, "full")
	u := begin(t, st, data, 1000)
	path := st.uploadPath(u.ID(), uploadData)
	if got := allocated(t, path); got >= 1<<20 {
		t.Fatalf("%d bytes are taken for 8 MiB that were announced", got)
	}
	writes := 0
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpWrite && strings.HasSuffix(path, uploadData) {
			if writes++; writes > 4 {
				return &os.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
			}
		}
		return unsynced(op, path, do)
	}
	n, err := u.Append(t.Context(), 1000, bytes.NewReader(data[1000:]))
	if !errors.Is(err, blobstore.ErrNoSpace) || n != 0 || u.Size() != 1000 {
		t.Errorf("append: kept %d, size %d, %v", n, u.Size(), err)
	}
	if got := allocated(t, path); got > 64<<10 {
		t.Errorf("%d bytes are still taken", got)
	}
	f.fault = nil
	end(t, u, data)
}

func allocated(t *testing.T, path string) int64 {
	t.Helper()
	fi, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return fi.Sys().(*syscall.Stat_t).Blocks * 512
}

func TestNoSpaceSaysHowMuch(t *testing.T) {
	st, _ := openFaulty(t)
	_, err := st.Create(t.Context(), identity.Digest{}, 1<<59)
	if !errors.Is(err, blobstore.ErrNoSpace) || !strings.Contains(err.Error(), "576460752303423488 bytes to come") ||
		!strings.Contains(err.Error(), "bytes free") {
		t.Errorf("create: %v", err)
	}
}

// TestHiddenUntilDurable: while the name of a blob could not be made durable, nobody may rely on the blob.
func TestHiddenUntilDurable(t *testing.T) {
	st, f := openFaulty(t)
	b := []byte("hidden")
	d := identity.Sum(b)
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpSyncDir && path == shelf(st.dir, d[0]) {
			return syscall.EIO
		}
		return unsynced(op, path, do)
	}
	if _, err := pushAll(st, b); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	fi, err := os.Stat(st.path(d))
	if err != nil {
		t.Fatal(err) // it is there, and that is the point
	}
	if _, err := st.Stat(t.Context(), d); !errors.Is(err, blobstore.ErrNotFound) {
		t.Errorf("stat: %v", err)
	}
	if _, err := st.Open(t.Context(), describeFile(d, fi), 0, -1); !errors.Is(err, blobstore.ErrNotFound) {
		t.Errorf("open: %v", err)
	}
	for i, err := range st.List(t.Context(), identity.Digest{}) {
		t.Errorf("list: %v, %v", i, err)
	}
	if _, err := pushAll(st, b); !errors.Is(err, syscall.EIO) {
		t.Fatalf("second push: %v", err)
	}
	f.fault = nil
	push(t, st, b)
	if _, err := st.Stat(t.Context(), d); err != nil {
		t.Error(err)
	}
}

// TestDamagedCopyIsReplaced: a file of the wrong size does not keep the good bytes out.
func TestDamagedCopyIsReplaced(t *testing.T) {
	st, _ := openFaulty(t)
	b := []byte("whole blob")
	i := push(t, st, b)
	if err := os.Remove(st.path(i.Digest)); err != nil {
		t.Fatal(err)
	}
	write(t, st.path(i.Digest), "whole")
	push(t, st, b)
	checkBlob(t, st.path(i.Digest))
}

// TestUnusableUpload: an upload without a usable state is unknown to the client and goes.
func TestUnusableUpload(t *testing.T) {
	for _, spoil := range []func(t *testing.T, data, state string){
		func(t *testing.T, data, state string) { write(t, state, "") },
		func(t *testing.T, data, state string) { write(t, state, strings.Repeat("x", 2*slotSpacing)) },
		func(t *testing.T, data, state string) { write(t, data, "short") },
	} {
		st, _ := openFaulty(t)
		u := begin(t, st, pattern(5000, "x"), 1000)
		u2 := begin(t, st, pattern(5000, "x"), 2000)
		if _, err := u2.Append(t.Context(), 2000, bytes.NewReader(make([]byte, 10))); err != nil { // both slots cover bytes
			t.Fatal(err)
		}
		for _, u := range []blobstore.Upload{u, u2} {
			data := st.uploadPath(u.ID(), uploadData)
			spoil(t, data, st.uploadPath(u.ID(), uploadState))
		}
		_, err := st.Resume(t.Context(), u2.ID())
		if !errors.Is(err, blobstore.ErrUploadUnknown) {
			t.Errorf("resume: %v", err)
		}
		if _, err := os.Stat(st.uploadPath(u2.ID(), uploadData)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("its bytes are still there: %v", err)
		}
	}
}

// TestFailedCommitCanBeRetried: an upload that could not be named stays as it was.
func TestFailedCommitCanBeRetried(t *testing.T) {
	st, f := openFaulty(t)
	data := pattern(1000, "again")
	u := begin(t, st, data, 1000)
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpRename {
			return syscall.EIO
		}
		return unsynced(op, path, do)
	}
	if _, err := u.Commit(t.Context(), identity.Sum(data)); !errors.Is(err, syscall.EIO) {
		t.Fatal(err)
	}
	f.fault = nil
	st.Close()
	st = reopen(t, st.dir, f, "")
	u, err := st.Resume(t.Context(), u.ID())
	if err != nil {
		t.Fatal(err)
	}
	if fi, err := os.Stat(st.uploadPath(u.ID(), uploadData)); err != nil || fi.Mode().Perm() != 0o600 {
		t.Errorf("mode %v, %v", fi.Mode(), err)
	}
	end(t, u, data)
	checkBlob(t, st.path(identity.Sum(data)))
}

// TestResumeWhereNothingCanBeWritten: an upload is there, with what was acknowledged, also while the disk takes
// nothing.
func TestResumeWhereNothingCanBeWritten(t *testing.T) {
	st, f := openFaulty(t)
	data := pattern(300_000, "full")
	u := begin(t, st, data, 1000)
	appendTo(t, filepath.Join(st.dir, uploadsName, u.ID()+uploadData), data[1000:2000])
	f.fault = func(op durable.Op, path string, do func() error) error {
		if op == durable.OpWrite || op == durable.OpSync {
			return syscall.EIO
		}
		return unsynced(op, path, do)
	}
	u, err := st.Resume(t.Context(), u.ID())
	if err != nil || u.Size() != 1000 {
		t.Fatal(u.Size(), err)
	}
	f.fault = nil
	end(t, u, data)
	checkBlob(t, st.path(identity.Sum(data)))
}

// TestCutFile: a file that is shorter or longer than what was stored is not served, and can be set aside, deleted or
// healed. One of which the size is not known is served as it is.
func TestCutFile(t *testing.T) {
	st, _ := openFaulty(t)
	data := pattern(300_000, "cut")
	for _, size := range []int64{0, 1, 299_999, 300_001} {
		i := push(t, st, data)
		if err := os.Truncate(st.path(i.Digest), size); err != nil {
			t.Fatal(err)
		}
		now, err := st.Stat(t.Context(), i.Digest)
		for what, err := range map[string]error{"stat": err, "open": func() error {
			_, err := st.Open(t.Context(), now, 0, -1)
			return err
		}()} {
			if !errors.Is(err, blobstore.ErrCut) || !errors.Is(err, blobstore.ErrNotFound) ||
				!errors.Is(err, blobstore.ErrDamaged) || errors.Is(err, blobstore.ErrQuarantined) {
				t.Errorf("%s of %d bytes: %v", what, size, err)
			}
		}
		listed := 0
		for l, err := range st.List(t.Context(), identity.Digest{}) {
			if listed++; err != nil || l != now || l.Size != size {
				t.Errorf("listed as %+v, %v, stat said %+v", l, err, now)
			}
		}
		if err := st.SetAside(t.Context(), now, "cut"); err != nil || listed != 1 {
			t.Error(listed, err)
		}
	}
	i := push(t, st, data)
	if err := os.Truncate(st.path(i.Digest), 1000); err != nil {
		t.Fatal(err)
	}
	now, _ := st.Stat(t.Context(), i.Digest)
	if err := st.Delete(t.Context(), now); err != nil {
		t.Error(err)
	}
	old := st.path(identity.Sum(data[:10]))
	if err := os.MkdirAll(filepath.Dir(old), 0o755); err != nil {
		t.Fatal(err)
	}
	write(t, old, string(data[:10]))
	if i := stat(t, st, data[:10]); i.Size != 10 {
		t.Errorf("%+v", i)
	}
}

// TestPushOverDamage: whoever pushes the right bytes over a copy that has rotted heals it, also one that nobody has
// found yet, of the same size or not. Readers never find that the blob is not there.
func TestPushOverDamage(t *testing.T) {
	st, f := openFaulty(t)
	data := pattern(300_000, "rot")
	i := push(t, st, data)
	for name, spoil := range map[string]func() error{
		"flipped": func() error { return os.WriteFile(st.path(i.Digest), pattern(300_000, "other"), 0o600) },
		"cut":     func() error { return os.Truncate(st.path(i.Digest), 1000) },
		"grown":   func() error { return os.Truncate(st.path(i.Digest), 1<<20) },
		"whole":   func() error { return nil },
	} {
		if err := os.Chmod(st.path(i.Digest), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := spoil(); err != nil {
			t.Fatal(err)
		}
		rotten := name == "cut" || name == "grown" // can't be taken for the blob
		f.fault = func(op durable.Op, path string, do func() error) error {
			if _, err := st.Stat(t.Context(), i.Digest); err != nil && !rotten {
				t.Errorf("%s: %s %s: the blob is not there: %v", name, op, path, err)
			}
			return unsynced(op, path, do)
		}
		again := push(t, st, data)
		f.fault = nil
		if again.Generation == i.Generation {
			t.Errorf("%s: still generation %s", name, i.Generation)
		}
		if err := st.Delete(t.Context(), i); !errors.Is(err, blobstore.ErrNotFound) {
			t.Errorf("%s: delete of the copy that was replaced: %v", name, err)
		}
		i = again
		checkBlob(t, st.path(i.Digest))
	}
}
