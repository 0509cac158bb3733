// Package testregistry runs a real registry for the tests of other packages: a store on disk, an index in bbolt, nobody
// refused.
package testregistry

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/registry"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

// New returns a registry in a temporary folder, closed when the test ends.
func New(t testing.TB) *registry.Registry {
	t.Helper()
	r, err := Open(t.TempDir(), t.Cleanup)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// Open returns a registry whose data is in dir, which is made if there is none. later is told what closes it, and with
// may change how it is made.
func Open(dir string, later func(func()), with ...func(*registry.Config)) (*registry.Registry, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	if err := fsstore.Init(dir); err != nil {
		return nil, err
	}
	store, err := fsstore.Open(dir, fsstore.Options{})
	if err != nil {
		return nil, err
	}
	later(func() { store.Close() })
	kv, err := boltkv.Open(filepath.Join(dir, "index.db"), boltkv.Options{})
	if err != nil {
		return nil, err
	}
	ix, err := index.New(context.Background(), kv)
	if err != nil {
		return nil, err
	}
	later(func() { ix.Close() })
	c := registry.Config{
		Store: store, Refs: store, Uploads: store, Index: ix, Access: access.Open(), Log: slog.New(slog.DiscardHandler),
	}
	for _, change := range with {
		change(&c)
	}
	r, err := registry.New(c)
	if err != nil {
		return nil, err
	}
	return r, r.Replay(context.Background())
}
