package registry_test

import (
	"context"
	"fmt"
	"sync/atomic"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/memkv"
	"github.com/kiln-registry/kiln-registry/registry"
)

// readKV counts the bytes of the values that are read of an engine.
type readKV struct {
	index.KV
	bytes atomic.Int64
}

type readTxn struct {
	index.Txn
	kv *readKV
}

func (k *readKV) View(ctx context.Context, fn func(index.Txn) error) error {
	return k.KV.View(ctx, func(x index.Txn) error { return fn(readTxn{x, k}) })
}

func (k *readKV) Update(ctx context.Context, fn func(index.Txn) error) error {
	return k.KV.Update(ctx, func(x index.Txn) error { return fn(readTxn{x, k}) })
}

func (x readTxn) Get(key []byte) ([]byte, error) {
	v, err := x.Txn.Get(key)
	x.kv.bytes.Add(int64(len(v)))
	return v, err
}

// A delete in a repository of many large image indexes reads none of them, and knows all the same what they list.
func TestDeleteBesideLargeIndexes(t *testing.T) {
	s := newServer(t)
	kv := new(readKV)
	s.restart(func(c *registry.Config) {
		immutableTags(t, "**:v*")(c)
		mem, err := new(memkv.Disk).Open(1)
		if err != nil {
			t.Fatal(err)
		}
		kv.KV = mem
		if c.Index, err = index.New(t.Context(), kv); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Index.Close() })
	})
	var leaves [4]string
	for i := range leaves {
		m := s.manifest("a", nil, map[string]any{"annotations": map[string]string{"n": fmt.Sprint(i)}})
		leaves[i] = identity.Sum(m).String()
		s.want(201, "PUT", api.PathManifest("a", leaves[i]), m, "Content-Type", manifestType)
	}
	const indexes, children = 8, 4000
	for i := range indexes {
		list := []string{leaves[0], leaves[1+i%2], leaves[0]}
		for n := range children {
			list = append(list, identity.Sum(fmt.Append(nil, i, n)).String())
		}
		tag := fmt.Sprint("x", i)
		if i == 1 {
			tag = "v1"
		}
		s.want(201, "PUT", api.PathManifest("a", tag), indexOf(list...), "Content-Type", indexType)
	}
	kv.bytes.Store(0)
	s.want(202, "DELETE", api.PathManifest("a", leaves[3]), nil)
	s.want(202, "DELETE", api.PathManifest("a", leaves[1]), nil)
	s.want(403, "DELETE", api.PathManifest("a", leaves[2]), nil)
	s.want(403, "DELETE", api.PathManifest("a", leaves[0]), nil)
	if n := kv.bytes.Load(); n > 64<<10 {
		t.Errorf("%d bytes of the index were read", n)
	}
	s.want(202, "DELETE", api.PathManifest("a", "x0"), nil)
	s.want(403, "DELETE", api.PathManifest("a", leaves[0]), nil)
}
