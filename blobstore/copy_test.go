package blobstore_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/blobstore/memstore"
	"github.com/kiln-registry/kiln-registry/blobstore/storetest"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/internal/testlanes"
)

func TestMain(m *testing.M) { testlanes.Use(m).Run() }

// medium is a store whose process can end, and whose changes can fail.
type medium interface {
	open(t *testing.T) blobstore.Engine
	storetest() *storetest.Faults
}

type memory struct {
	storetest.Faults
	st *memstore.Store
}

func newMemory(*testing.T) medium {
	m := &memory{st: memstore.New()}
	m.st.Fault = func(_ memstore.Op, do func() error) error { return m.Do(do) }
	return m
}

func (m *memory) storetest() *storetest.Faults { return &m.Faults }

func (m *memory) open(*testing.T) blobstore.Engine {
	m.st = m.st.Reopen()
	return m.st
}

type folder struct {
	storetest.Faults
	dir string
}

func newFolder(t *testing.T) medium {
	f := &folder{dir: t.TempDir()}
	if err := fsstore.Init(f.dir); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f *folder) storetest() *storetest.Faults { return &f.Faults }

func (f *folder) open(t *testing.T) blobstore.Engine {
	t.Helper()
	st, err := fsstore.Open(f.dir, fsstore.Options{Disk: durable.Disk{
		Fault: func(op durable.Op, _ string, do func() error) error {
			return f.Do(func() error {
				if op == durable.OpSync || op == durable.OpSyncDir {
					return nil // these tests end processes, not machines
				}
				return do()
			})
		},
	}})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	return st
}

func (f *folder) blob(d identity.Digest) string {
	return filepath.Join(f.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
}

var media = map[string]func(*testing.T) medium{"memory": newMemory, "folder": newFolder}

func random(seed uint64, n int) []byte {
	b := make([]byte, n)
	rand.NewChaCha8([32]byte{byte(seed)}).Read(b)
	return b
}

// blobs are what a filled store has: an empty one, small ones, and one of several pieces.
var blobs = [][]byte{nil, random(1, 1), random(2, 5000), random(3, 600<<10), random(4, 70<<10)}

const allBytes = 0 + 1 + 5000 + 600<<10 + 70<<10

// allRefs are the refs of a filled store. Nobody changes their manifests.
var allRefs = sync.OnceValue(func() (refs []blobstore.Ref) {
	at := time.Date(2026, 2, 3, 4, 5, 6, 7, time.UTC)
	for i := range uint64(5) {
		m := random(10+i, 400<<10) // three to a group
		d := identity.Sum(m)
		refs = append(refs,
			blobstore.Ref{Repo: "a/b", Name: d.String(), Seq: 2 * i, Digest: d, MediaType: "x/y", Manifest: m, Time: at},
			blobstore.Ref{Repo: "a/b", Name: "v1", Seq: 2*i + 1, Deleted: i == 3, Digest: d, Time: at})
	}
	return refs
})

// full returns an open store that has all of it.
func full(t *testing.T, m medium) blobstore.Engine {
	t.Helper()
	st := m.open(t)
	for _, b := range blobs {
		push(t, st, b)
	}
	for _, r := range allRefs() {
		put(t, st, r)
	}
	return st
}

func push(t *testing.T, st blobstore.Engine, b []byte) {
	t.Helper()
	u := begin(t, st, identity.Sum(b), int64(len(b)), b)
	if _, err := u.Commit(t.Context(), identity.Sum(b)); err != nil {
		t.Fatal(err)
	}
	if err := u.Abort(t.Context()); err != nil {
		t.Fatal(err)
	}
}

// begin opens an upload that has received b.
func begin(t *testing.T, st blobstore.Engine, hint identity.Digest, size int64, b []byte) blobstore.Upload {
	t.Helper()
	u, err := st.Create(t.Context(), hint, size)
	if err == nil {
		_, err = u.Append(t.Context(), 0, bytes.NewReader(b))
	}
	if err != nil {
		t.Fatal(err)
	}
	return u
}

func put(t *testing.T, st blobstore.Engine, refs ...blobstore.Ref) {
	t.Helper()
	if _, err := st.Put(t.Context(), refs...); err != nil {
		t.Fatal(err)
	}
}

// content reads everything that a store has.
func content(t *testing.T, st blobstore.Engine) (held map[identity.Digest]string, refs []blobstore.Ref, uploads int) {
	t.Helper()
	held = map[identity.Digest]string{}
	for i, err := range st.List(t.Context(), identity.Digest{}) {
		if err != nil {
			t.Fatal(err)
		}
		r, err := st.Open(t.Context(), i, 0, -1)
		if err != nil {
			t.Fatal(err)
		}
		b, err := io.ReadAll(r)
		if err != nil || identity.Sum(b) != i.Digest {
			t.Fatalf("blob %s: %v", i.Digest, err)
		}
		r.Close()
		held[i.Digest] = string(b)
	}
	for r, err := range st.Since(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		refs = append(refs, r.Ref)
	}
	for _, err := range st.Uploads(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		uploads++
	}
	return held, refs, uploads
}

func sameContent(t *testing.T, dst, src blobstore.Engine) {
	t.Helper()
	want, wantRefs, _ := content(t, src)
	got, gotRefs, uploads := content(t, dst)
	if !reflect.DeepEqual(got, want) || !reflect.DeepEqual(gotRefs, wantRefs) || uploads != 0 {
		t.Errorf("%d blobs, want %d; %d refs, want %d; %d uploads", len(got), len(want), len(gotRefs), len(wantRefs), uploads)
	}
}

func TestCopy(t *testing.T) {
	for from, newSrc := range media {
		for to, newDst := range media {
			t.Run(from+" to "+to, func(t *testing.T) {
				src, dst := full(t, newSrc(t)), newDst(t).open(t)
				var mu sync.Mutex
				planned, copied, moved := int64(0), 0, map[identity.Digest]int64{}
				did, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{
					Planned: func(n int, bytes int64) { planned += bytes + int64(n)<<40 },
					Moved: func(i blobstore.Info, at int64) {
						mu.Lock()
						defer mu.Unlock()
						moved[i.Digest] = at
					},
					Copied: func(blobstore.Info) { mu.Lock(); copied++; mu.Unlock() },
				})
				want := blobstore.CopyResult{Blobs: len(blobs), Bytes: allBytes, Refs: len(allRefs())}
				if err != nil || did != want || planned != allBytes+int64(len(blobs))<<40 || copied != len(blobs) {
					t.Fatalf("%+v, %v; planned %d, copied %d", did, err, planned, copied)
				}
				for _, b := range blobs {
					if got := moved[identity.Sum(b)]; got != int64(len(b)) {
						t.Errorf("moved %d of %d bytes", got, len(b))
					}
				}
				sameContent(t, dst, src)
				did, err = blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{})
				if want = (blobstore.CopyResult{Present: len(blobs)}); err != nil || did != want {
					t.Fatalf("again: %+v, %v", did, err)
				}
				more := random(20, 3000)
				push(t, src, more)
				put(t, src, blobstore.Ref{Repo: "a/b", Name: "v2", Seq: 99})
				did, err = blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{Workers: 1})
				want = blobstore.CopyResult{Blobs: 1, Bytes: 3000, Present: len(blobs), Refs: 1}
				if err != nil || did != want {
					t.Fatalf("the rest: %+v, %v", did, err)
				}
				sameContent(t, dst, src)
			})
		}
	}
}

// TestCopyGoesOn lets every change fail that a Copy makes, lost and persisted, ends the process and copies again.
func TestCopyGoesOn(t *testing.T) {
	src := full(t, newMemory(t))
	for to, newDst := range media {
		for _, persist := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, persisted %v", to, persist), func(t *testing.T) {
				n := 1
				for ; copyWithFault(t, newDst(t), src, n, persist, 1+n%3); n++ {
				}
				if n < 10 {
					t.Error("only", n, "changes")
				}
			})
		}
	}
}

func copyWithFault(t *testing.T, m medium, src blobstore.Engine, n int, persist bool, workers int) (fired bool) {
	t.Helper()
	dst := m.open(t)
	begin(t, dst, identity.Sum(blobs[3]), int64(len(blobs[3])), blobs[3][:100<<10])
	put(t, dst, allRefs()[:3]...)
	check := m.storetest().Fail(n, persist)
	_, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{Workers: workers})
	m.storetest().Fail(0, false)
	if fired = check(); err != nil && !errors.Is(err, storetest.ErrInjected) {
		t.Fatalf("change %d: %v", n, err)
	}
	dst.Close()
	dst = m.open(t)
	if _, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{Workers: workers}); err != nil {
		t.Fatalf("after change %d had failed: %v", n, err)
	}
	sameContent(t, dst, src)
	if st, ok := dst.(*memstore.Store); ok {
		if err := st.Check(); err != nil {
			t.Fatal(err)
		}
	}
	dst.Close()
	return fired
}

// TestCopyInterrupted ends a Copy after every piece. No byte is read twice.
func TestCopyInterrupted(t *testing.T) {
	src := full(t, newFolder(t))
	for to, newDst := range media {
		t.Run(to, func(t *testing.T) {
			m, total, calls := newDst(t), int64(0), 0
			for done := false; !done; calls++ {
				dst := m.open(t)
				ctx, cancel := context.WithCancel(t.Context())
				did, err := blobstore.Copy(ctx, dst, src, blobstore.CopyOptions{
					Moved: func(blobstore.Info, int64) { cancel() },
				})
				cancel()
				if done = err == nil; !done && !errors.Is(err, context.Canceled) {
					t.Fatal(err)
				}
				if total += did.Bytes; done {
					sameContent(t, dst, src)
				}
				dst.Close()
			}
			if total != allBytes || calls < 4 {
				t.Errorf("%d bytes in %d calls, want %d", total, calls, allBytes)
			}
		})
	}
}

// TestCopyDamaged: what is broken in the source is named, and the rest is copied.
func TestCopyDamaged(t *testing.T) {
	from := newFolder(t).(*folder)
	src := full(t, from)
	flipped, cut, gone := identity.Sum(blobs[2]), identity.Sum(blobs[3]), identity.Sum(blobs[4])
	spoil := func(d identity.Digest, b []byte) {
		if err := errors.Join(os.Remove(from.blob(d)), os.WriteFile(from.blob(d), b, 0o444)); err != nil {
			t.Fatal(err)
		}
	}
	spoil(flipped, random(99, len(blobs[2])))
	spoil(cut, blobs[3][:500<<10])
	if err := errors.Join(os.Remove(from.blob(gone)), os.Mkdir(from.blob(gone), 0o755)); err != nil {
		t.Fatal(err)
	}
	for to, newDst := range media {
		t.Run(to, func(t *testing.T) {
			dst := newDst(t).open(t)
			push(t, dst, blobs[1])
			begin(t, dst, gone, int64(len(blobs[4])), blobs[4][:10])
			named := map[identity.Digest]error{}
			var mu sync.Mutex
			did, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{
				Damaged: func(i blobstore.Info, err error) { mu.Lock(); named[i.Digest] = err; mu.Unlock() },
			})
			if err != nil || did.Damaged != 3 || did.Blobs != 1 || did.Present != 1 || did.Refs != len(allRefs()) {
				t.Fatalf("%+v, %v", did, err)
			}
			if !errors.Is(named[flipped], blobstore.ErrDigestMismatch) || named[cut] == nil || named[gone] == nil {
				t.Error(named)
			}
			held, _, uploads := content(t, dst)
			if len(held) != 2 || uploads != 0 {
				t.Errorf("%d blobs, %d uploads", len(held), uploads)
			}
		})
	}
}

// TestCopyOverDamage: a blob of the destination that was cut short is replaced.
func TestCopyOverDamage(t *testing.T) {
	m := newFolder(t).(*folder)
	dst, src := full(t, m), full(t, newMemory(t))
	if err := os.Truncate(m.blob(identity.Sum(blobs[2])), 10); err != nil {
		t.Fatal(err)
	}
	did, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{})
	if err != nil || did.Blobs != 1 {
		t.Fatalf("%+v, %v", did, err)
	}
	sameContent(t, dst, src)
}

// TestCopyOpenUploads: an upload that a client left is gone on with only if it is the start of the blob.
func TestCopyOpenUploads(t *testing.T) {
	src := full(t, newMemory(t))
	want := identity.Sum(blobs[2])
	for what, open := range map[string]struct {
		hint identity.Digest
		size int64
		data []byte
		read [2]int // bytes more than all: at least, at most
		left int    // uploads afterwards
	}{
		"the start":      {want, -1, blobs[2][:2000], [2]int{-2000, -2000}, 1},
		"all of it":      {want, 5000, blobs[2], [2]int{-5000, -5000}, 1},
		"other bytes":    {want, 5000, random(50, 2000), [2]int{3000, 3000}, 1},
		"too many bytes": {want, -1, random(50, 5001), [2]int{}, 2},
		"announced less": {want, 4000, blobs[2][:2000], [2]int{2000, 3000}, 1},
		"announced more": {want, 6000, blobs[2][:2000], [2]int{3000, 3000}, 1},
		"no hint":        {identity.Digest{}, 5000, blobs[2][:2000], [2]int{}, 1},
	} {
		for to, newDst := range media {
			t.Run(what+", "+to, func(t *testing.T) {
				dst := newDst(t).open(t)
				begin(t, dst, want, 5000, nil)
				begin(t, dst, open.hint, open.size, open.data)
				did, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{})
				if more := int(did.Bytes - allBytes); err != nil || more < open.read[0] || more > open.read[1] {
					t.Fatalf("%+v, %v", did, err)
				}
				if held, _, uploads := content(t, dst); len(held) != len(blobs) || uploads != open.left {
					t.Errorf("%d blobs, %d uploads", len(held), uploads)
				}
			})
		}
	}
}

// TestCopyDiffers: a store with a past of its own is left as it is.
func TestCopyDiffers(t *testing.T) {
	src := full(t, newMemory(t))
	other := slices.Clone(allRefs()[:3])
	other[2].Time = other[2].Time.Add(1)
	for what, refs := range map[string][]blobstore.Ref{
		"another past": other,
		"ahead":        append(slices.Clone(allRefs()), blobstore.Ref{Repo: "a/b", Name: "v3"}),
	} {
		t.Run(what, func(t *testing.T) {
			dst := newFolder(t).open(t)
			put(t, dst, refs...)
			did, err := blobstore.Copy(t.Context(), dst, src, blobstore.CopyOptions{})
			held, kept, uploads := content(t, dst)
			if !errors.Is(err, blobstore.ErrDiffers) || did != (blobstore.CopyResult{}) || len(held)+uploads > 0 ||
				len(kept) != len(refs) {
				t.Errorf("%+v, %v; %d blobs, %d uploads, %d refs", did, err, len(held), uploads, len(kept))
			}
		})
	}
}

// TestCopyMissing: what manifests refer to and the source no longer shows is named, whether it is in quarantine or gone,
// unless the manifest was deleted, or the destination has it.
func TestCopyMissing(t *testing.T) {
	from := newFolder(t).(*folder)
	src := full(t, from)
	there, aside, gone, held, unused := blobs[1], blobs[2], blobs[3], blobs[4], blobs[0]
	refers := map[identity.Digest][][]byte{}
	ref := func(seq uint64, repo, manifest string, deleted bool, to ...[]byte) blobstore.Ref {
		d := identity.Sum([]byte(manifest))
		r := blobstore.Ref{Repo: repo, Name: d.String(), Seq: seq, Deleted: deleted, Digest: d}
		if !deleted {
			r.Manifest = []byte(manifest)
			refers[d] = to
		}
		return r
	}
	put(t, src,
		ref(20, "a/b", "whole", false, there),
		ref(22, "a/b", "deleted", true), // kept in another order than issued
		ref(21, "a/b", "deleted", false, gone, unused),
		ref(24, "a/b", "put again", false, aside, there),
		ref(23, "a/b", "put again", true),
		ref(25, "a/b", "second", false, aside, gone, held),
		ref(26, "c", "third", false, gone),
	)
	i, err := src.Stat(t.Context(), identity.Sum(aside))
	if err == nil {
		err = src.(blobstore.Quarantine).SetAside(t.Context(), i, "a test")
	}
	for _, b := range [][]byte{gone, held, unused} {
		err = errors.Join(err, os.Remove(from.blob(identity.Sum(b))))
	}
	if err != nil {
		t.Fatal(err)
	}
	for to, newDst := range media {
		t.Run(to, func(t *testing.T) {
			dst := newDst(t).open(t)
			push(t, dst, held)
			var named []blobstore.Missing
			o := blobstore.CopyOptions{
				Refers: func(r blobstore.Ref) (ds []identity.Digest, err error) {
					for _, b := range refers[r.Digest] {
						ds = append(ds, identity.Sum(b))
					}
					return ds, nil
				},
				Missing: func(m blobstore.Missing) { named = append(named, m) },
			}
			did, err := blobstore.Copy(t.Context(), dst, src, o)
			if err != nil || did.Missing != 2 || did.Blobs != 1 || did.Damaged != 0 || len(named) != 2 {
				t.Fatalf("%+v, %v; named %v", did, err, named)
			}
			for _, m := range named {
				want := blobstore.ErrNotFound
				if m.Digest == identity.Sum(aside) {
					want = blobstore.ErrQuarantined
				} else if m.Digest != identity.Sum(gone) {
					t.Errorf("named was %s", m.Digest)
				}
				if !errors.Is(m.Err, want) || m.Repo != "a/b" || len(refers[m.Manifest]) == 0 {
					t.Errorf("%+v", m)
				}
			}
			push(t, dst, gone)
			push(t, dst, aside)
			if did, err = blobstore.Copy(t.Context(), dst, src, o); err != nil || did.Missing != 0 {
				t.Errorf("after the copy was healed: %+v, %v", did, err)
			}
			o.Refers = func(blobstore.Ref) ([]identity.Digest, error) { return nil, io.ErrUnexpectedEOF }
			if _, err = blobstore.Copy(t.Context(), dst, src, o); !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("a manifest that does not read: %v", err)
			}
		})
	}
}
