package upkeep_test

import (
	"bytes"
	"context"
	"errors"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// TestTooMany: many small blobs are too much as few large ones are, unless it is forced.
func TestTooMany(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	r.put(201, "a", "v1", r.image("a", make([]byte, 100_000)))
	for i := range 8 {
		r.blob("a", []byte{byte(i)})
	}
	h.forward(week)
	did, err := r.reg.Collector().Collect(t.Context(), upkeep.Terms{MaxShare: 0.7})
	if !errors.Is(err, upkeep.ErrTooMuch) || did.Unused != (upkeep.Amount{Blobs: 8, Bytes: 8}) || len(r.stored()) != 10 {
		t.Errorf("%v, %+v", err, did)
	}
	if did := r.collect(upkeep.Terms{MaxShare: 0.7, Force: true}); did.Removed.Blobs != 8 || len(r.stored()) != 2 {
		t.Errorf("%+v", did)
	}
}

// TestTooMuchSinceCounted: what becomes unused while a collection runs is left to the next one, or, where what it found
// is too much to have in mind at once, counts too: it stops before the share is passed.
func TestTooMuchSinceCounted(t *testing.T) {
	did, left, err := collectDeleted(t, 0)
	if err != nil || did.Unused.Blobs != 2 || did.Removed.Blobs != 2 || left != 10 {
		t.Errorf("%v, %+v, %d are left", err, did, left)
	}
	did, left, err = collectDeleted(t, 1)
	if !errors.Is(err, upkeep.ErrTooMuch) || did.Unused.Blobs != 2 || did.Removed.Blobs > 6 || left < 6 {
		t.Errorf("%v, %+v, %d are left", err, did, left)
	}
}

// collectDeleted collects when two blobs are unused, in rounds of a number of blobs, and nine others become so when it
// has counted.
func collectDeleted(t *testing.T, round int) (did upkeep.Collection, left int, err error) {
	h, f := new(hands), new(faults)
	r := newRig(t, func(r *rig) {
		r.clock = h.clock
		r.wrap = func(st blobstore.Store) blobstore.Store { f.Store = st; return f }
	})
	for i := range 9 {
		r.put(201, "a", "v1", r.image("a", []byte{byte(i)}))
	}
	r.blob("a", []byte("u1"))
	r.blob("a", []byte("u2"))
	h.forward(week)
	r.reg.Collector().SetRound(round)
	f.listed = func() { // when it has been counted
		f.listed = nil
		for i := range 9 {
			m := r.image("b", []byte{byte(i)})
			r.do(202, "DELETE", "/v2/a/manifests/"+identity.Sum(m).String(), nil)
		}
		h.forward(week) // and the leases of b are over
	}
	did, err = r.reg.Collector().Collect(t.Context(), upkeep.Terms{})
	return did, len(r.stored()), err
}

// TestOtherCopyAtTheLastMoment: a collection removes the copy that it found, and no other one of the same blob that came
// in its place.
func TestOtherCopyAtTheLastMoment(t *testing.T) {
	h := new(hands)
	r := newRig(t, func(r *rig) { r.clock = h.clock })
	data := []byte("content")
	d := r.blob("a", data)
	h.forward(week)
	c := r.reg.Collector()
	enter, asked := c.Enter, 0
	c.Enter = func(ctx context.Context) (func(), error) {
		if asked++; asked == 2 { // after it was found
			if err := r.store.Delete(ctx, r.stored()[d]); err != nil {
				t.Error(err)
			}
			u, err := r.store.Create(ctx, d, int64(len(data)))
			if err == nil {
				_, err = u.Finish(ctx, 0, bytes.NewReader(data), d)
			}
			if err != nil {
				t.Error(err)
			}
		}
		return enter(ctx)
	}
	did := r.collect(upkeep.Terms{Force: true})
	if _, there := r.stored()[d]; !there || asked < 2 || did.Removed.Blobs != 0 {
		t.Errorf("%+v, asked %d times", did, asked)
	}
}
