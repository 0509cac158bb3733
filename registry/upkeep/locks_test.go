package upkeep_test

import (
	"context"
	"io"
	"sync"
	"testing"
	"time"

	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/registry/upkeep"
)

// between is a store in which something happens right after the registry has seen that a blob is there.
type between struct {
	blobstore.Store
	blob identity.Digest
	mu   sync.Mutex
	then func() // once
}

func (b *between) happen(d identity.Digest, err error) {
	if err != nil || d != b.blob {
		return
	}
	b.mu.Lock()
	then := b.then
	b.then = nil
	b.mu.Unlock()
	if then != nil {
		then()
	}
}

func (b *between) Stat(ctx context.Context, d identity.Digest) (blobstore.Info, error) {
	i, err := b.Store.Stat(ctx, d)
	b.happen(d, err)
	return i, err
}

func (b *between) Create(ctx context.Context, hint identity.Digest, size int64) (blobstore.Upload, error) {
	u, err := b.Store.Create(ctx, hint, size)
	return upload{u, b}, err
}

type upload struct {
	blobstore.Upload
	b *between
}

func (u upload) Finish(ctx context.Context, off int64, r io.Reader, want identity.Digest) (blobstore.Info, error) {
	i, err := u.Upload.Finish(ctx, off, r, want)
	u.b.happen(want, err)
	return i, err
}

// TestCollectedInBetween: a collection that comes between the moment in which the registry finds a blob and the one in
// which something refers to it leaves the blob alone, although every lease ends right before the collection.
func TestCollectedInBetween(t *testing.T) {
	layer := []byte("a layer that nothing refers to yet")
	d := identity.Sum(layer)
	for name, act := range map[string]func(r *rig, manifest []byte){
		"upload": func(r *rig, _ []byte) { r.blob("a", layer) },
		"upload in pieces": func(r *rig, _ []byte) {
			at := r.location("POST", "/v2/a/blobs/uploads/")
			r.do(202, "PATCH", at, layer[:7])
			r.do(201, "PUT", at+"?digest="+d.String(), layer[7:])
		},
		"upload with an empty end": func(r *rig, _ []byte) {
			at := r.location("POST", "/v2/a/blobs/uploads/")
			r.do(202, "PATCH", at, layer)
			r.do(201, "PUT", at+"?digest="+d.String(), nil)
		},
		"mount": func(r *rig, _ []byte) {
			r.do(201, "POST", "/v2/b/blobs/uploads/?from=a&mount="+d.String(), nil)
			r.do(200, "GET", "/v2/b/blobs/"+d.String(), nil)
		},
		"head": func(r *rig, _ []byte) { r.do(200, "HEAD", "/v2/a/blobs/"+d.String(), nil) },
		"manifest": func(r *rig, manifest []byte) {
			r.put(201, "a", "v1", manifest)
			r.do(200, "GET", "/v2/a/blobs/"+d.String(), nil)
		},
	} {
		t.Run(name, func(t *testing.T) {
			h, b := new(hands), &between{blob: d}
			r := newRig(t, func(r *rig) {
				r.clock = h.clock
				r.wrap = func(st blobstore.Store) blobstore.Store {
					b.Store = st
					return b
				}
			})
			manifest := r.image("a", layer)
			happened := false
			b.then = func() {
				h.forward(8 * 24 * time.Hour)
				did := r.collect(upkeep.Terms{Force: true})
				happened = true
				if did.Busy == 0 {
					t.Errorf("nobody holds the blob: %+v", did)
				}
			}
			act(r, manifest)
			if !happened {
				t.Fatal("no collection came in between")
			}
			if _, err := r.store.Stat(t.Context(), d); err != nil {
				t.Error(err)
			}
			h.forward(8 * 24 * time.Hour)
			r.collect(upkeep.Terms{Force: true})
			if _, err := r.store.Stat(t.Context(), d); (err == nil) != (name == "manifest") {
				t.Errorf("after its lease: %v", err)
			}
		})
	}
}
