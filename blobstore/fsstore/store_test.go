package fsstore

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
)

// folder is a store's folder, whose disk can be made to fail.
type folder struct {
	storetest.Faults
	dir string
}

func newFolder(t testing.TB) storetest.Medium {
	f := &folder{dir: filepath.Join(memDir(t), "store")}
	newStore(t, f.dir)
	return f
}

// unsynced is a fault that makes every change but syncs none: these tests end processes, not machines.
func unsynced(op durable.Op, _ string, do func() error) error {
	if op == durable.OpSync || op == durable.OpSyncDir {
		return nil
	}
	return do()
}

// memDir returns a temporary folder in memory where the machine has one: the tests that use it make and drop thousands of
// files and have a model of the disk of their own.
func memDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "fsstore-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func newStore(t testing.TB, dir string) {
	t.Helper()
	if err := initOn(durable.Disk{Fault: unsynced}, dir); err != nil {
		t.Fatal(err)
	}
}

func (f *folder) Open(t testing.TB) (storetest.Store, error) {
	st, err := Open(f.dir, Options{
		Notify: func(s string) { t.Log(s) },
		Disk: durable.Disk{Fault: func(op durable.Op, path string, do func() error) error {
			inPlace := strings.HasSuffix(path, uploadState)
			if op == durable.OpWrite && !inPlace && f.Full() {
				return &os.PathError{Op: "write", Path: path, Err: syscall.ENOSPC}
			}
			return f.Do(func() error { return unsynced(op, path, do) })
		}},
	})
	if err != nil {
		return nil, err
	}
	st.every = 100 << 10 // so that saves in the background happen in small tests
	st.segment = f.SegmentSize()
	return st, nil
}

// SegmentSize is one that gives small blobs midstates, and that no size in the tests is a multiple of.
func (f *folder) SegmentSize() int64 { return 37 << 10 }

func (f *folder) Kill(t testing.TB, st storetest.Store) { kill(t, st.(*Store)) }

// kill leaves a store as the death of its process would.
func kill(t testing.TB, st *Store) {
	t.Helper()
	if err := errors.Join(st.refs.f.Close(), st.lock.Release()); err != nil {
		t.Fatal(err)
	}
}

// Check looks at every file of the folder.
func (f *folder) Check(t testing.TB) {
	t.Helper()
	err := filepath.WalkDir(f.dir, func(path string, e os.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		name, _ := filepath.Rel(f.dir, path)
		switch {
		case name == markerName, name == refsName, name == lockName:
		case strings.HasPrefix(name, "blobs/sha256/"):
			checkBlob(t, path)
		case strings.HasPrefix(name, "segments/sha256/"):
			f.checkSegments(t, path)
		case strings.HasPrefix(name, "quarantine/"):
			f.checkAside(t, path)
		default:
			t.Errorf("%s does not belong here", name)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func checkBlob(t testing.TB, path string) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if d := identity.Sum(b); filepath.Base(path) != d.Hex() || filepath.Base(filepath.Dir(path)) != d.Hex()[:2] {
		t.Errorf("%s holds %s", path, d)
	}
	if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o444 {
		t.Errorf("%s: mode %v, %v", path, st.Mode(), err)
	}
}

// checkSegments: midstates are there for no blob that is not, shown or set aside.
func (f *folder) checkSegments(t testing.TB, path string) {
	t.Helper()
	name := filepath.Base(path)
	_, gone := os.Stat(filepath.Join(f.dir, "blobs/sha256", name[:2], name))
	_, notAside := os.Stat(filepath.Join(f.dir, "quarantine", name))
	if gone != nil && notAside != nil || filepath.Base(filepath.Dir(path)) != name[:2] {
		t.Errorf("%s: %v", path, gone)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if s, err := lanes.ParseSegments(b, f.SegmentSize()); err != nil || s.Digest.Hex() != name {
		t.Errorf("%s: %v", path, err)
	}
}

// checkAside: nothing is set aside of a blob that is shown, and nothing stands there alone but what is set aside.
func (f *folder) checkAside(t testing.TB, path string) {
	t.Helper()
	name := strings.TrimSuffix(filepath.Base(path), asideNote)
	if _, err := os.Stat(filepath.Join(f.dir, "blobs/sha256", name[:2], name)); err == nil {
		t.Errorf("%s: the blob is there", path)
	}
	if _, err := os.Stat(filepath.Join(f.dir, "quarantine", name)); err != nil {
		t.Errorf("%s: %v", path, err)
	}
}

func TestStore(t *testing.T) { storetest.Run(t, newFolder) }

func open(t *testing.T, dir string) *Store {
	t.Helper()
	st, err := Open(dir, Options{Notify: func(s string) { t.Log(s) }})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}
