package storetest

import (
	"bytes"
	"errors"
	"io"
	"maps"
	"math/rand/v2"
	"slices"
	"testing/iotest"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
)

// model is what a store must hold after the calls that were made.
type model struct {
	*env
	*rand.Rand
	blobs   map[identity.Digest][]byte
	uploads map[string]*modelUpload
	aside   map[identity.Digest]blobstore.Info
	refs    []blobstore.Ref
}

type modelUpload struct {
	data     []byte // that is to come in all
	received int
}

// testModel makes calls in random order, ends the process now and then, and compares with the model.
func testModel(e *env) {
	for seed := range uint64(4) {
		m := &model{env: e, Rand: rand.New(rand.NewPCG(seed, 1))}
		m.blobs, m.uploads = map[identity.Digest][]byte{}, map[string]*modelUpload{}
		m.aside = map[identity.Digest]blobstore.Info{}
		m.refs, _ = e.since(0)
		for range 100 {
			m.step()
			if e.Failed() {
				e.Fatalf("seed %d", seed)
			}
		}
		m.compare()
		for _, i := range e.list(identity.Digest{}) {
			e.must(e.st.Delete(e.ctx, i))
		}
		for _, i := range m.aside {
			e.must(e.st.Delete(e.ctx, i))
		}
		for id := range e.uploads() {
			e.must(e.resume(id).Abort(e.ctx))
		}
	}
}

func (m *model) step() {
	switch n := m.IntN(21); {
	case n < 3:
		data := random(m.Uint64N(6), m.IntN(2)*300_000+m.IntN(50))
		hint, size := identity.Sum(data), int64(len(data))
		if m.IntN(2) == 0 {
			hint, size = identity.Digest{}, -1
		}
		m.uploads[m.create(hint, size).ID()] = &modelUpload{data: data}
	case n < 10:
		m.append()
	case n < 13:
		m.end()
	case n < 15:
		m.delete()
	case n < 18:
		r := blobstore.Ref{Repo: "r", Name: "n", Seq: uint64(len(m.refs)), Manifest: random(m.Uint64N(9), 500)}
		_, err := m.st.Put(m.ctx, r, r)
		m.must(err)
		m.refs = append(m.refs, r, r)
	case n < 19:
		m.setAside()
	default:
		m.reopen(m.IntN(3) > 0)
		m.compare()
	}
}

// pick returns the id of some upload, or "".
func (m *model) pick() string {
	ids := slices.Sorted(maps.Keys(m.uploads))
	if len(ids) == 0 {
		return ""
	}
	return ids[m.IntN(len(ids))]
}

func (m *model) append() {
	id := m.pick()
	if id == "" {
		return
	}
	up := m.uploads[id]
	rest := up.data[up.received:]
	rest = rest[:m.IntN(len(rest)+1)]
	var r io.Reader = bytes.NewReader(rest)
	cause := errors.New("reader failed")
	if m.IntN(3) == 0 {
		r = io.MultiReader(r, iotest.ErrReader(cause))
	}
	n, err := m.resume(id).Append(m.ctx, int64(up.received), r)
	if err != nil && !errors.Is(err, cause) || n != int64(len(rest)) {
		m.Errorf("append %d bytes at %d: kept %d, %v", len(rest), up.received, n, err)
	}
	up.received += int(n)
}

// end commits an upload, rightly or not, or aborts it.
func (m *model) end() {
	id := m.pick()
	if id == "" {
		return
	}
	u, up := m.resume(id), m.uploads[id]
	delete(m.uploads, id)
	d := identity.Sum(up.data)
	if m.IntN(4) == 0 {
		m.must(u.Abort(m.ctx))
		return
	}
	_, err := u.Commit(m.ctx, d)
	if up.received == len(up.data) {
		m.must(err)
		m.must(u.Abort(m.ctx))
		m.blobs[d] = up.data
		delete(m.aside, d)
	} else if !errors.Is(err, blobstore.ErrDigestMismatch) && !errors.Is(err, blobstore.ErrSizeMismatch) {
		m.Errorf("commit of %d of %d bytes: %v", up.received, len(up.data), err)
	}
}

func (m *model) delete() {
	found := m.list(identity.Digest{})
	if len(found) == 0 {
		return
	}
	i := found[m.IntN(len(found))]
	m.must(m.st.Delete(m.ctx, i))
	delete(m.blobs, i.Digest)
}

func (m *model) setAside() {
	found := m.list(identity.Digest{})
	q, ok := m.st.(blobstore.Quarantine)
	if len(found) == 0 || !ok {
		return
	}
	i := found[m.IntN(len(found))]
	m.must(q.SetAside(m.ctx, i, "why"))
	delete(m.blobs, i.Digest)
	m.aside[i.Digest] = i
}

func (m *model) compare() {
	found := m.list(identity.Digest{})
	if len(found) != len(m.blobs) {
		m.Errorf("%d blobs, want %d", len(found), len(m.blobs))
	}
	for _, b := range m.blobs {
		m.holds(b)
	}
	for _, i := range m.aside {
		m.quarantined(i)
	}
	if _, ok := m.st.(blobstore.Quarantine); ok && len(m.env.aside()) != len(m.aside) {
		m.Errorf("%d copies are set aside, want %d", len(m.env.aside()), len(m.aside))
	}
	open := m.env.uploads()
	for id, up := range m.uploads {
		if got, ok := open[id]; !ok || got.Size != int64(up.received) || m.resume(id).Size() != got.Size {
			m.Errorf("upload %s: listed %v with %d bytes, want %d", id, ok, got.Size, up.received)
		}
	}
	if len(open) != len(m.uploads) {
		m.Errorf("%d uploads, want %d", len(open), len(m.uploads))
	}
	refs, _ := m.since(0)
	m.sameRefs("refs", refs, m.refs)
}
