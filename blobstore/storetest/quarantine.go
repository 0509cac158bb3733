package storetest

import (
	"bytes"
	"errors"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// quarantine returns the store's, which it has.
func (e *env) quarantine() blobstore.Quarantine { return e.st.(blobstore.Quarantine) }

// aside returns what is set aside.
func (e *env) aside() map[identity.Digest]blobstore.AsideInfo {
	e.Helper()
	found := map[identity.Digest]blobstore.AsideInfo{}
	for a, err := range e.quarantine().Aside(e.ctx) {
		e.must(err)
		if _, twice := found[a.Digest]; twice {
			e.Errorf("%s is set aside twice", a.Digest)
		}
		found[a.Digest] = a
	}
	return found
}

// quarantined checks that the copy i is set aside, and not shown.
func (e *env) quarantined(i blobstore.Info) blobstore.AsideInfo {
	e.Helper()
	_, err := e.st.Stat(e.ctx, i.Digest)
	e.want("stat of what is set aside", err, blobstore.ErrQuarantined)
	_, err = e.st.Open(e.ctx, i, 0, -1)
	e.want("open of what is set aside", err, blobstore.ErrQuarantined)
	for _, listed := range e.list(identity.Digest{}) {
		if listed.Digest == i.Digest {
			e.Errorf("%s is listed and set aside", i.Digest)
		}
	}
	a, ok := e.aside()[i.Digest]
	if !ok || a.Generation != i.Generation || a.Size != i.Size {
		e.Errorf("set aside of %+v is %+v", i, a)
	}
	return a
}

// released checks that nothing of d is set aside.
func (e *env) released(d identity.Digest) {
	e.Helper()
	if a, ok := e.aside()[d]; ok {
		e.Errorf("still set aside: %+v", a)
	}
	if _, err := e.st.Stat(e.ctx, d); errors.Is(err, blobstore.ErrQuarantined) {
		e.Errorf("stat %s: %v", d, err)
	}
}

func testSetAside(e *env) {
	b, other := random(50, 5000), random(51, 10)
	e.put(other)
	first := e.put(b)
	q := e.quarantine()
	e.want("set aside another generation",
		q.SetAside(e.ctx, blobstore.Info{Digest: first.Digest, Generation: "x"}, "why"), blobstore.ErrNotFound)
	e.want("set aside what is not there",
		q.SetAside(e.ctx, blobstore.Info{Digest: identity.Sum([]byte("not there"))}, "why"), blobstore.ErrNotFound)
	e.holds(b)
	if n := len(e.aside()); n != 0 {
		e.Errorf("%d blobs are set aside", n)
	}

	before, why := time.Now().Add(-time.Second), `bytes 16777216 to 33554431 are "damaged" – é\`
	e.must(q.SetAside(e.ctx, first, why))
	for _, kill := range []bool{false, true} {
		a := e.quarantined(first)
		if a.Why != why || a.Since.Before(before) || a.Since.After(time.Now().Add(time.Second)) {
			e.Errorf("set aside %q since %v, want %q just now", a.Why, a.Since, why)
		}
		if !a.Created.Equal(first.Created) {
			e.Errorf("created %v, was %v", a.Created, first.Created)
		}
		e.want("set aside again", e.quarantine().SetAside(e.ctx, first, "again"), blobstore.ErrNotFound)
		e.holds(other)
		e.reopen(kill)
	}

	second := e.finished(b)
	if second.Generation == first.Generation {
		e.Errorf("both copies are generation %s", first.Generation)
	}
	for _, kill := range []bool{false, true} {
		e.holds(b)
		e.released(first.Digest)
		e.want("set aside the first copy", e.quarantine().SetAside(e.ctx, first, "why"), blobstore.ErrNotFound)
		e.want("delete of the first copy", e.st.Delete(e.ctx, first), blobstore.ErrNotFound)
		e.reopen(kill)
	}
}

// testAsideTwice: a copy that heals a blob can be set aside in its turn.
func testAsideTwice(e *env) {
	b := random(52, 3000)
	for _, why := range []string{"one", "two", "three"} {
		i := e.put(b)
		e.must(e.quarantine().SetAside(e.ctx, i, why))
		if a := e.quarantined(i); a.Why != why {
			e.Errorf("set aside for %q, want %q", a.Why, why)
		}
	}
	e.reopen(true)
	if n := len(e.aside()); n != 1 {
		e.Errorf("%d copies are set aside", n)
	}
}

// testDeleteAside: what is set aside can be deleted as any copy can.
func testDeleteAside(e *env) {
	b := random(53, 3000)
	i := e.put(b)
	e.must(e.quarantine().SetAside(e.ctx, i, "why"))
	e.want("delete of another generation", e.st.Delete(e.ctx, blobstore.Info{Digest: i.Digest, Generation: "x"}),
		blobstore.ErrNotFound)
	e.quarantined(i)
	e.must(e.st.Delete(e.ctx, i))
	for range 2 {
		e.lacks(i.Digest)
		e.released(i.Digest)
		e.want("second delete", e.st.Delete(e.ctx, i), blobstore.ErrNotFound)
		e.reopen(true)
	}
	e.put(b)
	e.holds(b)
}

// testAsideMany: what is set aside is listed wholly, and a listing may end early.
func testAsideMany(e *env) {
	for n := range 20 {
		e.must(e.quarantine().SetAside(e.ctx, e.put(random(54, 100+n)), "why"))
	}
	if n := len(e.aside()); n != 20 {
		e.Errorf("%d copies are set aside, want 20", n)
	}
	for range e.quarantine().Aside(e.ctx) {
		break
	}
	if n := len(e.list(identity.Digest{})); n != 0 {
		e.Errorf("%d blobs are listed", n)
	}
}

// testAsideUnderUpload: an upload that was open before heals the blob.
func testAsideUnderUpload(e *env) {
	b := random(55, 300<<10)
	u := e.create(identity.Sum(b), int64(len(b)))
	e.add(u, b[:1000])
	i := e.put(b)
	e.must(e.quarantine().SetAside(e.ctx, i, "why"))
	e.reopen(true)
	u = e.resume(u.ID())
	e.add(u, b[1000:])
	e.quarantined(i)
	e.commit(u, identity.Sum(b))
	e.holds(b)
	e.released(i.Digest)
}

// The actions of the fault grid that need a Quarantine.
var asideActions = []action{
	{"set aside", nil, (*grid).setAside, (*grid).checkSetAside, false, true},
	{"heal", (*grid).isSetAside, (*grid).heal, (*grid).checkHealed, false, true},
	{"delete aside", (*grid).isSetAside, (*grid).delete, (*grid).checkDeletedAside, false, true},
}

func (g *grid) setAside() error { return g.quarantine().SetAside(g.ctx, g.info, "why") }

func (g *grid) isSetAside() { g.must(g.setAside()) }

// checkSetAside: what failed to be set aside is shown or set aside; it is never gone.
func (g *grid) checkSetAside(ok bool) {
	if _, err := g.st.Stat(g.ctx, g.info.Digest); err == nil && !ok {
		g.holds(g.old)
		g.released(g.info.Digest)
		return
	}
	if a := g.quarantined(g.info); ok && a.Why != "why" {
		g.Errorf("set aside for %q", a.Why)
	}
}

func (g *grid) heal() error {
	u, err := g.st.Create(g.ctx, g.info.Digest, int64(len(g.old)))
	if err != nil {
		return err
	}
	_, err = u.Finish(g.ctx, 0, bytes.NewReader(g.old), g.info.Digest)
	return err
}

func (g *grid) checkHealed(ok bool) {
	if _, err := g.st.Stat(g.ctx, g.info.Digest); err != nil && !ok {
		g.quarantined(g.info)
		return
	}
	g.holds(g.old)
	g.released(g.info.Digest)
}

// checkDeletedAside: a delete that failed leaves the copy set aside or gone. It is never shown.
func (g *grid) checkDeletedAside(ok bool) {
	if _, err := g.st.Stat(g.ctx, g.info.Digest); errors.Is(err, blobstore.ErrQuarantined) && !ok {
		g.quarantined(g.info)
		return
	}
	g.lacks(g.info.Digest)
	g.released(g.info.Digest)
}
