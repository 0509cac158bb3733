// Package storetest is what every engine of a blob store has to pass.
package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// Store is what an engine implements. Quarantine and Segments are tested in addition if it has them.
type Store interface {
	blobstore.Store
	blobstore.Uploads
	blobstore.Refs
	io.Closer
}

// Medium is where an engine keeps things. It outlives the processes that open it, one at a time.
type Medium interface {
	// Open opens the store as a new process would.
	Open(t testing.TB) (Store, error)
	// Kill ends the process of a store without Close. No call is running.
	Kill(t testing.TB, st Store)
	// Fail lets the nth change from now on fail with ErrInjected: it is made if persist is set, and else lost. 1 is the
	// next one; 0 ends all failing. fired says whether it came to that.
	Fail(n int, persist bool) (fired func() bool)
	// Fill lets the store be full for every change that takes space, from the nth of them on: the engine is answered what
	// a full place answers, and the change is lost. 0 ends it.
	Fill(n int)
	// Check looks for anything that is not as the engine wants it, while no store is open.
	Check(t testing.TB)
}

type test struct {
	name string
	test func(e *env)
}

// Run tests an engine. makeMedium returns a medium with an empty store.
func Run(t *testing.T, makeMedium func(t testing.TB) Medium) {
	tests := []test{
		{"RoundTrip", testRoundTrip},
		{"Ranges", testRanges},
		{"NotFound", testNotFound},
		{"Resume", testResume},
		{"Finish", testFinish},
		{"Receipt", testReceipt},
		{"ReceiptOfAnotherCopy", testReceiptOfAnotherCopy},
		{"ReceiptOfNothing", testReceiptOfNothing},
		{"Offset", testOffset},
		{"FailingReader", testFailingReader},
		{"Cancel", testCancel},
		{"AnnouncedSize", testAnnouncedSize},
		{"NoSpace", testNoSpace},
		{"Full", testFull},
		{"Mismatch", testMismatch},
		{"Abort", testAbort},
		{"UnknownUpload", testUnknownUpload},
		{"Busy", testBusy},
		{"Uploads", testUploads},
		{"Together", testTogether},
		{"List", testList},
		{"Delete", testDelete},
		{"KeepsOneCopy", testKeepsOneCopy},
		{"TwoPushers", testTwoPushers},
		{"Refs", testRefs},
		{"RefsTogether", testRefsTogether},
		{"RefsGroup", testRefsGroup},
		{"Model", testModel},
	}
	more := probe(t, makeMedium)
	if more.segments {
		tests = append(tests, test{"Segments", testSegments}, test{"SegmentsOfCopy", testSegmentsOfCopy},
			test{"KeepSegments", testKeepSegments})
	}
	if more.quarantine {
		tests = append(tests, []test{
			{"SetAside", testSetAside},
			{"AsideTwice", testAsideTwice},
			{"DeleteAside", testDeleteAside},
			{"AsideMany", testAsideMany},
			{"AsideUnderUpload", testAsideUnderUpload},
		}...)
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			e := newEnv(t, makeMedium)
			tt.test(e)
			e.close()
			e.medium.Check(t)
		})
	}
	t.Run("Faults", func(t *testing.T) { RunFaults(t, Sizes{Upload: 600 << 10, Received: 300 << 10}, makeMedium) })
}

// additions says what an engine implements besides Store.
type additions struct{ quarantine, segments bool }

func probe(t *testing.T, makeMedium func(t testing.TB) Medium) (a additions) {
	e := newEnv(t, makeMedium)
	_, a.quarantine = e.st.(blobstore.Quarantine)
	_, a.segments = e.st.(blobstore.Segments)
	e.close()
	return a
}

// env is a store under test. Its methods fail the test where the store returns an error.
type env struct {
	testing.TB
	ctx    context.Context
	medium Medium
	st     Store
}

func newEnv(t testing.TB, makeMedium func(t testing.TB) Medium) *env {
	e := &env{TB: t, ctx: t.Context(), medium: makeMedium(t)}
	e.open()
	return e
}

func (e *env) open() {
	e.Helper()
	st, err := e.medium.Open(e)
	if err != nil {
		e.Fatalf("open: %v", err)
	}
	e.st = st
}

func (e *env) close() {
	e.Helper()
	if err := e.st.Close(); err != nil {
		e.Fatalf("close: %v", err)
	}
}

// reopen ends the process, in good order or by force, and opens the store in another.
func (e *env) reopen(kill bool) {
	e.Helper()
	if kill {
		e.medium.Kill(e, e.st)
	} else {
		e.close()
	}
	e.open()
}

func (e *env) must(err error) {
	e.Helper()
	if err != nil {
		e.Fatal(err)
	}
}

func (e *env) want(what string, err, want error) {
	e.Helper()
	if !errors.Is(err, want) {
		e.Errorf("%s: error %v, want %v", what, err, want)
	}
}

// random returns n bytes that depend on n and seed. They repeat after a prime number of bytes, which no piece size is a
// multiple of.
func random(seed uint64, n int) []byte {
	var key [32]byte
	copy(key[:], fmt.Sprintf("%d %d", seed, n))
	period := make([]byte, 4099)
	rand.NewChaCha8(key).Read(period)
	b := make([]byte, n)
	for at := 0; at < n; {
		at += copy(b[at:], period)
	}
	return b
}

func (e *env) create(hint identity.Digest, size int64) blobstore.Upload {
	e.Helper()
	u, err := e.st.Create(e.ctx, hint, size)
	e.must(err)
	return u
}

func (e *env) resume(id string) blobstore.Upload {
	e.Helper()
	u, err := e.st.Resume(e.ctx, id)
	e.must(err)
	return u
}

// add appends b at the upload's end.
func (e *env) add(u blobstore.Upload, b []byte) {
	e.Helper()
	off := u.Size()
	n, err := u.Append(e.ctx, off, bytes.NewReader(b))
	if err != nil || n != int64(len(b)) || u.Size() != off+n {
		e.Fatalf("append %d bytes at %d: kept %d, size %d, error %v", len(b), off, n, u.Size(), err)
	}
}

// commit makes an upload a blob, and drops the receipt.
func (e *env) commit(u blobstore.Upload, d identity.Digest) blobstore.Info {
	e.Helper()
	i, err := u.Commit(e.ctx, d)
	e.must(err)
	e.must(u.Abort(e.ctx))
	return i
}

// put stores b as a blob.
func (e *env) put(b []byte) blobstore.Info {
	e.Helper()
	u := e.create(identity.Digest{}, -1)
	e.add(u, b)
	return e.commit(u, identity.Sum(b))
}

func (e *env) read(d identity.Digest) []byte {
	e.Helper()
	i, err := e.st.Stat(e.ctx, d)
	e.must(err)
	r, err := e.st.Open(e.ctx, i, 0, -1)
	e.must(err)
	b := bytes.NewBuffer(make([]byte, 0, i.Size+bytes.MinRead)) // which grows no more
	_, err = b.ReadFrom(struct{ io.Reader }{r})
	e.must(err)
	e.must(r.Close())
	return b.Bytes()
}

// holds checks that b is a blob of the store, whole.
func (e *env) holds(b []byte) {
	e.Helper()
	d := identity.Sum(b)
	i, err := e.st.Stat(e.ctx, d)
	e.must(err)
	if i.Digest != d || i.Size != int64(len(b)) || i.Generation == "" {
		e.Errorf("stat %s: %+v", d, i)
	}
	if got := e.read(d); !bytes.Equal(got, b) {
		e.Errorf("blob %s reads as %d other bytes", d, len(got))
	}
}

func (e *env) lacks(d identity.Digest) {
	e.Helper()
	_, err := e.st.Stat(e.ctx, d)
	e.want("stat of an absent blob", err, blobstore.ErrNotFound)
	_, err = e.st.Open(e.ctx, blobstore.Info{Digest: d, Generation: "x"}, 0, -1)
	e.want("open of an absent blob", err, blobstore.ErrNotFound)
}

// list returns all blobs after a digest, and checks their order.
func (e *env) list(after identity.Digest) (found []blobstore.Info) {
	e.Helper()
	last := after
	for i, err := range e.st.List(e.ctx, after) {
		e.must(err)
		if i.Digest.Compare(last) <= 0 && !i.Digest.IsZero() {
			e.Errorf("list: %s after %s", i.Digest, last)
		}
		last = i.Digest
		found = append(found, i)
	}
	return found
}

// whole checks that every blob that is listed has the bytes that its name says, and right midstates if it has any.
func (e *env) whole() {
	e.Helper()
	for _, i := range e.list(identity.Digest{}) {
		if b := e.read(i.Digest); identity.Sum(b) != i.Digest || int64(len(b)) != i.Size {
			e.Errorf("blob %s has %d bytes of something else", i.Digest, len(b))
		} else {
			e.midstates(i, b)
		}
	}
}

func (e *env) uploads() map[string]blobstore.UploadInfo {
	e.Helper()
	found := map[string]blobstore.UploadInfo{}
	for u, err := range e.st.Uploads(e.ctx) {
		e.must(err)
		found[u.ID] = u
	}
	return found
}

// since returns the refs after a position, and checks that their positions ascend.
func (e *env) since(after blobstore.Position) (refs []blobstore.Ref, positions []blobstore.Position) {
	e.Helper()
	last := after
	for r, err := range e.st.Since(e.ctx, after) {
		e.must(err)
		if r.After <= last {
			e.Errorf("since %d: position %d after %d", after, r.After, last)
		}
		last = r.After
		refs, positions = append(refs, r.Ref), append(positions, last)
	}
	return refs, positions
}
