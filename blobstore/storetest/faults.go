package storetest

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// grid is a store with something of everything, all of it acknowledged, on which one call meets one fault.
type grid struct {
	*env
	old   []byte // a blob
	info  blobstore.Info
	more  []byte // the upload is to become this blob
	id    string // of the upload
	acked int    // how many of its bytes are acknowledged
	fresh []byte // a blob of which nothing is there
	refs  []blobstore.Ref
	next  bool // a process after the one that saw the fault
}

// ErrInjected is the error of a change that Medium.Fail made fail.
var ErrInjected = errors.New("injected fault")

// Faults counts changes and lets one of them fail. It does what Medium.Fail asks for. The zero Faults lets none fail.
// It is safe for concurrent use.
type Faults struct {
	mu      sync.Mutex
	left    int // changes up to the one that fails
	persist bool
	fired   bool

	room int // changes that take space up to the first for which there is none; 0: there is room for all
}

// Fill implements Medium.
func (f *Faults) Fill(n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.room = n
}

// Full is asked before every change that takes space, and says whether there is none left.
func (f *Faults) Full() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.room > 1 {
		f.room--
		return false
	}
	return f.room == 1
}

// Fail implements Medium.
func (f *Faults) Fail(n int, persist bool) (fired func() bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.left, f.persist, f.fired = n, persist, f.fired && n == 0
	return func() bool {
		f.mu.Lock()
		defer f.mu.Unlock()
		return f.fired
	}
}

// Do makes a change, or fails it.
func (f *Faults) Do(change func() error) error {
	f.mu.Lock()
	f.left--
	fails := f.left == 0
	f.fired = f.fired || fails
	persist := f.persist
	f.mu.Unlock()
	if fails && !persist {
		return ErrInjected
	}
	err := change()
	if fails {
		err = errors.Join(err, ErrInjected)
	}
	return err
}

// action is the call, or calls, that meet the fault.
type action struct {
	name    string
	prepare func(g *grid) // without a fault
	run     func(g *grid) error
	// check says what must hold afterwards, given whether run succeeded, besides what was acknowledged before. It is
	// asked in the process that saw the fault, and in the next one.
	check func(g *grid, ok bool)
	// spares says that the action leaves the blob, or the upload, as it is.
	sparesBlob, sparesUpload bool
}

var actions = []action{
	{"create", nil, (*grid).create, func(*grid, bool) {}, true, true},
	{"append", nil, (*grid).append, (*grid).checkAppended, true, true},
	{"commit", (*grid).complete, (*grid).commit, (*grid).checkCommitted, true, false},
	{"abort", nil, (*grid).abort, (*grid).checkAborted, true, false},
	{"mismatch", nil, (*grid).mismatch, (*grid).checkAborted, true, false},
	{"delete", nil, (*grid).delete, (*grid).checkDeleted, false, true},
	{"put refs", nil, (*grid).putRefs, (*grid).checkRefs, true, true},
	{"push", nil, (*grid).push, (*grid).checkPushed, true, true},
	{"finish", nil, (*grid).finishUpload, (*grid).checkCommitted, true, false},
	{"drop receipt", (*grid).end, (*grid).abort, (*grid).checkReceiptDropped, true, false},
	{"push over", nil, (*grid).heal, func(*grid, bool) {}, true, true},
}

// Sizes are those of the upload that meets the faults: of all its bytes, and of those that are there when a call does.
type Sizes struct{ Upload, Received int }

// RunFaults lets every change that every action makes fail once, lost and persisted. Run does so with an upload of less
// than a MiB. The actions may be named: append, commit and so on.
func RunFaults(t *testing.T, sizes Sizes, makeMedium func(t testing.TB) Medium, only ...string) {
	all := actions
	if probe(t, makeMedium).quarantine {
		all = slices.Concat(actions, asideActions)
	}
	for _, a := range all {
		if len(only) > 0 && !slices.Contains(only, a.name) {
			continue
		}
		for _, persist := range []bool{false, true} {
			fate := map[bool]string{false: "lost", true: "persisted"}[persist]
			t.Run(a.name+" "+fate, func(t *testing.T) {
				t.Parallel()
				n := 1
				for ; oneFault(newGrid(t, sizes, makeMedium), a, n, persist); n++ {
				}
				if n == 1 {
					t.Error("no change was seen that could fail")
				}
			})
		}
	}
}

// oneFault runs an action whose nth change fails, and says whether there was an nth change.
func oneFault(g *grid, a action, n int, persist bool) (fired bool) {
	if a.prepare != nil {
		a.prepare(g)
	}
	check := g.medium.Fail(n, persist)
	err := a.run(g)
	g.medium.Fail(0, false)
	fired = check()
	if err != nil && (!fired || !errors.Is(err, ErrInjected)) {
		g.Fatalf("%s, change %d failed: %v: error %v", a.name, n, fired, err)
	}
	for _, where := range []string{"in the same process", "in the next process"} {
		g.survived(a)
		a.check(g, err == nil)
		if g.Failed() {
			g.Fatalf("%s, change %d failed, error %v: seen %s", a.name, n, err, where)
		}
		g.reopen(true)
		g.next = true
	}
	g.finish()
	g.close()
	g.medium.Check(g)
	return fired
}

func newGrid(t testing.TB, sizes Sizes, makeMedium func(t testing.TB) Medium) *grid {
	g := &grid{env: newEnv(t, makeMedium), old: random(30, 5000), more: random(31, sizes.Upload), fresh: random(32, 3000)}
	g.info = g.put(g.old)
	u := g.env.create(identity.Sum(g.more), int64(len(g.more)))
	g.id, g.acked = u.ID(), sizes.Received
	g.add(u, g.more[:g.acked])
	g.refs = someRefs()[:3]
	_, err := g.st.Put(g.ctx, g.refs[0])
	g.must(err)
	return g
}

// survived checks what was acknowledged before, and that nothing is there by half.
func (g *grid) survived(a action) {
	g.Helper()
	g.whole()
	if a.sparesBlob {
		g.holds(g.old)
	}
	if a.sparesUpload {
		if n := int(g.resume(g.id).Size()); n < g.acked || n > len(g.more) {
			g.Errorf("upload has %d bytes, acknowledged were %d", n, g.acked)
		}
	}
	got, _ := g.since(0)
	if len(got) != 1 && len(got) != 3 {
		g.Fatalf("%d refs, want 1, or 3 with the group", len(got))
	}
	g.sameRefs("refs", got, g.refs[:len(got)])
}

// finish does everything that is left to do, without faults: whatever failed can be tried again.
func (g *grid) finish() {
	g.Helper()
	u, err := g.st.Resume(g.ctx, g.id)
	if errors.Is(err, blobstore.ErrUploadUnknown) {
		u = g.env.create(identity.Sum(g.more), int64(len(g.more)))
	} else {
		g.must(err)
	}
	g.add(u, g.more[u.Size():])
	g.env.commit(u, identity.Sum(g.more))
	g.must(g.push())
	g.must(g.putRefs())
	g.holds(g.more)
	g.holds(g.fresh)
	for id := range g.uploads() {
		g.must(g.resume(id).Abort(g.ctx))
	}
	g.put(g.old)
	g.reopen(true)
	if got := g.list(identity.Digest{}); len(got) != 3 {
		g.Errorf("%d blobs in the end, want 3", len(got))
	}
	g.whole()
	if got, _ := g.since(0); len(got) < 3 {
		g.Errorf("%d refs in the end", len(got))
	}
}

func (g *grid) create() error {
	_, err := g.st.Create(g.ctx, identity.Digest{}, 2<<20)
	return err
}

func (g *grid) append() error {
	u, err := g.st.Resume(g.ctx, g.id)
	if err != nil {
		return err
	}
	off := u.Size()
	n, err := u.Append(g.ctx, off, bytes.NewReader(g.more[off:]))
	g.acked = int(off + n) // also after an error: what it says it kept
	if err == nil && g.acked != len(g.more) {
		return fmt.Errorf("kept %d bytes of %d", g.acked, len(g.more))
	}
	return err
}

func (g *grid) checkAppended(ok bool) {
	if n := int(g.resume(g.id).Size()); n < g.acked {
		g.Errorf("upload has %d bytes, Append said it kept them up to %d", n, g.acked)
	}
}

func (g *grid) complete() {
	u := g.resume(g.id)
	g.add(u, g.more[u.Size():])
	g.acked = len(g.more)
}

func (g *grid) commit() error {
	_, err := g.resume(g.id).Commit(g.ctx, identity.Sum(g.more))
	return err
}

// checkCommitted: after a failure the upload is there, open or as a receipt, with all that was acknowledged of it. In
// the process that saw it a blob whose name could not be made durable may be hidden.
func (g *grid) checkCommitted(ok bool) {
	u := g.resume(g.id)
	i, err := g.st.Stat(g.ctx, identity.Sum(g.more))
	if u.Size() < int64(g.acked) {
		g.Errorf("upload has %d bytes, acknowledged were %d", u.Size(), g.acked)
	}
	if ok {
		g.must(err)
		g.ended(u, i)
	}
	if blob := g.uploads()[g.id].Blob; g.next && !blob.IsZero() {
		g.must(err)
		g.ended(u, i)
	}
}

// end makes the upload a blob.
func (g *grid) end() {
	g.must(g.finishUpload())
	g.acked = len(g.more)
}

// checkReceiptDropped: a receipt goes without the blob.
func (g *grid) checkReceiptDropped(ok bool) {
	g.holds(g.more)
	if _, err := g.st.Resume(g.ctx, g.id); ok {
		g.want("resume after abort", err, blobstore.ErrUploadUnknown)
	}
}

func (g *grid) finishUpload() error {
	u, err := g.st.Resume(g.ctx, g.id)
	if err != nil {
		return err
	}
	_, err = u.Finish(g.ctx, u.Size(), bytes.NewReader(g.more[u.Size():]), identity.Sum(g.more))
	return err
}

func (g *grid) abort() error { return g.resume(g.id).Abort(g.ctx) }

func (g *grid) mismatch() error {
	_, err := g.resume(g.id).Commit(g.ctx, identity.Sum(g.fresh))
	if errors.Is(err, ErrInjected) {
		return err
	}
	g.want("commit", err, blobstore.ErrSizeMismatch)
	return nil
}

func (g *grid) checkAborted(ok bool) {
	if _, err := g.st.Resume(g.ctx, g.id); ok {
		g.want("resume after the end", err, blobstore.ErrUploadUnknown)
	}
	g.lacks(identity.Sum(g.more))
	g.lacks(identity.Sum(g.fresh))
}

func (g *grid) delete() error { return g.st.Delete(g.ctx, g.info) }

func (g *grid) checkDeleted(ok bool) {
	if ok {
		g.lacks(g.info.Digest)
	}
}

func (g *grid) putRefs() error {
	_, err := g.st.Put(g.ctx, g.refs[1:]...)
	return err
}

func (g *grid) checkRefs(ok bool) {
	if got, _ := g.since(0); ok && len(got) != 3 {
		g.Errorf("%d refs, acknowledged were 3", len(got))
	}
}

func (g *grid) push() error {
	u, err := g.st.Create(g.ctx, identity.Sum(g.fresh), int64(len(g.fresh)))
	if err != nil {
		return err
	}
	if _, err := u.Append(g.ctx, 0, bytes.NewReader(g.fresh)); err != nil {
		return err
	}
	_, err = u.Commit(g.ctx, identity.Sum(g.fresh))
	return err
}

func (g *grid) checkPushed(ok bool) {
	if ok {
		g.holds(g.fresh)
	}
}
