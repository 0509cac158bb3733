package upkeep_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/internal/durable"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

const segment = lanes.SegmentSize

// parted returns bytes of three segments, which differ by seed.
func parted(seed byte) []byte {
	b := make([]byte, 2*segment+12345)
	for i := range b {
		b[i] = seed ^ byte(i>>4) ^ byte(i>>12)
	}
	return b
}

func (r *rig) segmentsPath(d identity.Digest) string {
	return filepath.Join(r.dir, "segments", "sha256", d.Hex()[:2], d.Hex())
}

// forge puts a file in place of the midstates of a blob; nil: there is none then.
func (r *rig) forge(d identity.Digest, form []byte) {
	r.t.Helper()
	err := os.Remove(r.segmentsPath(d))
	if err == nil && form != nil {
		err = os.WriteFile(r.segmentsPath(d), form, 0o444)
	}
	if err != nil {
		r.t.Fatal(err)
	}
}

// midstates returns those of a blob; nil if there are none.
func (r *rig) midstates(d identity.Digest) []byte {
	r.t.Helper()
	i, err := r.store.Stat(context.Background(), d)
	if err != nil {
		r.t.Fatal(err)
	}
	form, err := r.store.(blobstore.Segments).Segments(context.Background(), i)
	if err != nil && !errors.Is(err, blobstore.ErrNotFound) {
		r.t.Fatal(err)
	}
	return form
}

// statesOf returns the form of the midstates that a blob of these bytes would have, said to be those of another digest.
func statesOf(t *testing.T, b []byte, d identity.Digest) []byte {
	t.Helper()
	h := lanes.NewRecorder(segment)
	h.Write(b)
	_, noted := h.Take()
	s, err := lanes.New(segment, int64(len(b)), d, noted)
	if err != nil {
		t.Fatal(err)
	}
	form, err := s.MarshalBinary()
	if err != nil {
		t.Fatal(err)
	}
	return form
}

// TestScrubMakesUpMidstates: a blob of several segments that has no midstates, or any that are wrong in whichever way,
// has the right ones after it was read, once, and is good all the while.
func TestScrubMakesUpMidstates(t *testing.T) {
	r := newRig(t, nil)
	b, small := parted(1), bytes.Repeat([]byte{1}, segment)
	d := r.blob("a", b)
	r.blob("a", small)
	want := r.midstates(d)
	forged := statesOf(t, parted(2), d)
	for name, form := range map[string][]byte{
		"none": nil, "forged": forged, "cut": want[:100], "flipped": flip(80)(bytes.Clone(want)),
		"nothing": {}, "of other size": statesOf(t, b[:len(b)-1], d), "of another": statesOf(t, b, identity.Sum(small)),
	} {
		r.forge(d, form)
		did, found := r.scrub()
		if did.Midstates != 1 || did.Read.Blobs != 2 || did.Damaged+did.Unsteady+did.Unreadable != 0 || len(found) > 0 {
			t.Errorf("%s: %+v, %v", name, did, found)
		}
		if !bytes.Equal(r.midstates(d), want) {
			t.Errorf("%s: other midstates than those of the push", name)
		}
		if did, _ := r.scrub(); did.Midstates != 0 {
			t.Errorf("%s: kept again: %+v", name, did)
		}
	}
	r.forge(d, nil)
	if _, found := r.scrub(d); !found[d].Midstates || found[d].Verdict != upkeep.Good {
		t.Errorf("%+v", found)
	}
	r.forge(d, nil)
	r.reg.Scrubber().ReadOnly = true
	if did, _ := r.scrub(); did.Midstates != 0 || r.midstates(d) != nil {
		t.Errorf("read-only: %+v", did)
	}
}

// TestForgedMidstatesHideNothing: midstates that fit damaged bytes do not make those good, and midstates of a damaged
// blob are not kept.
func TestForgedMidstatesHideNothing(t *testing.T) {
	r := newRig(t, nil)
	b := parted(1)
	d := r.blob("a", b)
	r.put(201, "a", "v1", r.image("a", b))
	r.forge(d, statesOf(t, flip(segment+7)(bytes.Clone(b)), d))
	r.rewrite(d, flip(segment+7))
	did, found := r.scrub()
	if f := found[d]; did.Damaged != 1 || did.Midstates != 0 || !f.Aside || f.Midstates {
		t.Errorf("%+v, %+v", did, found)
	}
	r.do(404, "GET", api.PathMidstates(d), nil)
	r.blob("a", b)
	if form := r.midstates(d); !bytes.Equal(form, statesOf(t, b, d)) {
		t.Error("healed, and other midstates")
	}
}

// TestScrubAfterCutCommit: a blob whose midstates were not written down, as the commit came to no end or there was no
// space, gets them from the next scrub; one that fails to keep them says so, and is good all the same.
func TestScrubAfterCutCommit(t *testing.T) {
	failing := true
	disk := durable.Disk{Fault: func(op durable.Op, path string, do func() error) error {
		if failing && strings.HasSuffix(path, ".segments") {
			return syscall.ENOSPC
		}
		return do()
	}}
	dir := filepath.Join(t.TempDir(), "store")
	if err := fsstore.Init(dir); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, func(r *rig) {
		r.open = func() (blobstore.Engine, error) { return fsstore.Open(dir, fsstore.Options{Disk: disk}) }
	})
	b := parted(1)
	d := r.blob("a", b)
	if r.midstates(d) != nil {
		t.Fatal("there are midstates")
	}
	if did, found := r.scrub(); did.Midstates != 0 || did.Read.Blobs != 1 || len(found) > 0 {
		t.Errorf("%+v, %v", did, found)
	}
	if !strings.Contains(r.log.String(), "midstates not kept") {
		t.Errorf("the log says %q", r.log)
	}
	failing = false
	if did, _ := r.scrub(); did.Midstates != 1 || !bytes.Equal(r.midstates(d), statesOf(t, b, d)) {
		t.Errorf("%+v", did)
	}
	left, err := filepath.Glob(filepath.Join(dir, "uploads", "*.segments"))
	if err != nil || len(left) > 0 {
		t.Errorf("left: %q, %v", left, err)
	}
}

// TestWrongSizeNote: a note that is wrong about the size of a blob does not cost a blob whose bytes are right; one that
// is cut is set aside.
func TestWrongSizeNote(t *testing.T) {
	r := newRig(t, nil)
	whole, cut := []byte("bytes that are right"), []byte("bytes that will be cut")
	d, e := r.blob("a", whole), r.blob("a", cut)
	path := filepath.Join(r.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
	if err := syscall.Setxattr(path, "user.kiln.size", []byte("7"), 0); err != nil {
		t.Fatal(err)
	}
	r.rewrite(e, func(b []byte) []byte { return b[:5] })
	r.do(404, "GET", api.PathBlob("a", d), nil) // the store can't tell yet
	did, found := r.scrub()
	if did.Damaged != 1 || !found[e].Aside || found[d].Verdict == upkeep.Damaged {
		t.Errorf("%+v, %v", did, found)
	}
	if got := r.do(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(got, whole) {
		t.Errorf("%q", got)
	}
	fi, err := os.Stat(path)
	if err != nil || fi.Mode().Perm() != 0o444 {
		t.Errorf("%v, %v", fi.Mode(), err)
	}
	r.stop()
	r.start()
	if did, found := r.scrub(); did.Damaged != 0 || len(found) != 0 {
		t.Errorf("%+v, %v", did, found)
	}
}

// TestFolderInPlaceOfBlob: a folder in place of a blob's file counts as damage, and a push heals it, whether or not a
// scrub came first. What is in the folder is kept.
func TestFolderInPlaceOfBlob(t *testing.T) {
	for _, scrub := range []bool{false, true} {
		t.Run(fmt.Sprint("scrubbed ", scrub), func(t *testing.T) {
			r := newRig(t, nil)
			b := []byte("some bytes")
			d := r.blob("a", b)
			r.put(201, "a", "v1", r.image("a", b))
			path := filepath.Join(r.dir, "blobs", "sha256", d.Hex()[:2], d.Hex())
			err := os.Remove(path)
			if err = errors.Join(err, os.MkdirAll(filepath.Join(path, "inner", "most"), 0o755)); err != nil {
				t.Fatal(err)
			}
			for _, method := range []string{"GET", "HEAD"} {
				r.do(404, method, api.PathBlob("a", d), nil)
			}
			if scrub {
				if did, found := r.scrub(); did.Damaged != 1 || !found[d].Aside {
					t.Errorf("%+v, %v", did, found)
				}
			}
			r.blob("a", b)
			if got := r.do(200, "GET", api.PathBlob("a", d), nil); !bytes.Equal(got, b) {
				t.Errorf("%q", got)
			}
			r.stop()
			r.start()
			if did, found := r.scrub(); did.Read.Blobs != 2 || len(found) != 0 {
				t.Errorf("%+v, %v", did, found)
			}
			kept, err := filepath.Glob(filepath.Join(r.dir, "quarantine", d.Hex()+".folder-*", "inner", "most"))
			if err != nil || len(kept) != 1 {
				t.Errorf("kept: %q, %v", kept, err)
			}
		})
	}
}

type segments = blobstore.Segments

// inParts is a store whose reads are noted, and of which some have a wrong byte.
type inParts struct {
	blobstore.Store
	segments // by another name, as the method has that of the interface
	opened   []int64
	spoil    func(off int64) bool
}

func (s *inParts) Open(ctx context.Context, i blobstore.Info, off, n int64) (io.ReadCloser, error) {
	s.opened = append(s.opened, off)
	body, err := s.Store.Open(ctx, i, off, n)
	if err != nil || s.spoil == nil || !s.spoil(off) {
		return body, err
	}
	defer body.Close()
	b, err := io.ReadAll(body)
	if len(b) > 0 {
		b[len(b)/2] ^= 1
	}
	return io.NopCloser(bytes.NewReader(b)), err
}

// TestScrubInParts: a blob that has midstates is read once, in parts; what is read wrong there is read again in order,
// and that decides.
func TestScrubInParts(t *testing.T) {
	if lanes.Width() == 1 {
		t.Log("streams don't share a core with this kernel")
		return
	}
	s := &inParts{}
	r := newRig(t, func(r *rig) {
		r.wrap = func(st blobstore.Store) blobstore.Store {
			s.Store, s.segments = st, st.(blobstore.Segments)
			return s
		}
	})
	d := r.blob("a", parted(4))
	for name, c := range map[string]struct {
		spoil   func(off int64) bool
		verdict upkeep.Verdict
		opened  []int64
	}{
		"right":         {nil, upkeep.Good, []int64{0, segment, 2 * segment}},
		"wrong at once": {func(off int64) bool { return off == segment }, upkeep.Unsteady, []int64{0, segment, 2 * segment, 0}},
		"wrong always":  {func(int64) bool { return true }, upkeep.Damaged, []int64{0, segment, 2 * segment, 0, 0}},
	} {
		s.opened, s.spoil = nil, c.spoil
		_, found := r.scrub(d)
		if f := found[d]; f.Verdict != c.verdict || !slices.Equal(s.opened, c.opened) {
			t.Errorf("%s: %+v, read from %d", name, f, s.opened)
		}
	}
}
