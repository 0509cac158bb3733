package pgkv

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

// trips counts how often somebody waits for the server: what is sent after something was received is a new round trip,
// but for the rollback that ends a view, for which nobody waits.
type trips struct{ n atomic.Int64 }

type counted struct {
	net.Conn
	trips    *trips
	received atomic.Bool
}

func (c *counted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.received.Store(true)
	return n, err
}

func (c *counted) Write(b []byte) (int, error) {
	if !bytes.Contains(b, []byte("rollback")) && c.received.Swap(false) {
		c.trips.n.Add(1)
	}
	return c.Conn.Write(b)
}

func (s *trips) tune(c *pgxpool.Config) {
	c.MaxConns = 1 // so that one waits for the end of the transaction before
	dial := c.ConnConfig.DialFunc
	c.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := dial(ctx, network, address)
		return &counted{Conn: conn, trips: s}, err
	}
}

// of returns the round trips for which fn waits. No connection is still ending a transaction.
func (s *trips) of(t *testing.T, kv *KV, fn func() error) int64 {
	t.Helper()
	if _, err := kv.Now(t.Context()); err != nil { // waits for the connection
		t.Fatal(err)
	}
	before := s.n.Load()
	err := fn()
	n := s.n.Load() - before
	if err != nil {
		t.Fatal(err)
	}
	return n
}

func opened(t testing.TB, url string, o Options) (*KV, *index.Index) {
	t.Helper()
	kv, err := Open(t.Context(), url, o)
	if err != nil {
		t.Fatal(err)
	}
	ix, err := index.New(t.Context(), kv)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := ix.Close(); err != nil {
			t.Error(err)
		}
	})
	return kv, ix
}

var epoch = time.Date(2024, 5, 1, 12, 0, 0, 0, time.UTC)

// artifact is an adapter of a base, with some blobs.
func artifact(repo string, seq uint64, base identity.Aggregate, blobs int) index.PutManifest {
	text := fmt.Sprintf("%s %d", repo, seq)
	p := index.PutManifest{Manifest: []byte(text)}
	p.Record = index.Record{
		Repo: repo, Digest: identity.Sum(p.Manifest), MediaType: "application/vnd.oci.image.manifest.v1+json",
		Size: int64(len(text)), ArtifactType: api.ArtifactTypeAdapter, Kind: api.KindAdapter, Aggregate: base, Name: text,
		Evidence: api.EvidenceAsserted, Seq: seq, Created: epoch.Add(time.Duration(seq) * time.Second),
		Annotations: map[string]string{"text": text},
	}
	for i := range blobs {
		p.Refers = append(p.Refers, identity.Sum(binary.BigEndian.AppendUint64(p.Digest[:], uint64(i))))
	}
	return p
}

// TestManifestOfManyShards: a manifest of 4,096 shards, with its tag, is one transaction of a few round trips, as is
// one of one shard.
func TestManifestOfManyShards(t *testing.T) {
	var s trips
	kv, ix := opened(t, testpg.Shared(t).Database(t), Options{tune: s.tune})
	base := identity.Aggregate(identity.Sum([]byte("base")))
	seq := uint64(0)
	push := func(blobs int) int64 {
		seq++
		p := artifact("models/big", seq, base, blobs)
		return s.of(t, kv, func() error {
			return ix.Apply(t.Context(), p, index.PutTag{Repo: p.Repo, Tag: "main", Digest: p.Digest, Seq: seq})
		})
	}
	push(1)
	push(1) // now all statements are prepared
	for _, shards := range []int{1, 4096} {
		if n := push(shards); n > 8 {
			t.Errorf("%d shards: %d round trips, want at most 8", shards, n)
		} else {
			t.Logf("%d shards: %d round trips", shards, n)
		}
	}
	for _, d := range artifact("models/big", seq, base, 4096).Refers {
		if ok, err := ix.Visible(t.Context(), "models/big", d, epoch); err != nil || !ok {
			t.Fatalf("shard %s: %v (%v)", d, ok, err)
		}
	}
	var leases []index.Op
	for _, d := range artifact("models/other", 1, base, 4096).Refers {
		leases = append(leases, index.LinkBlob{Repo: "models/other", Digest: d, Size: 1, Until: epoch})
	}
	if n := s.of(t, kv, func() error { return ix.Apply(t.Context(), leases...) }); n > 3 {
		t.Errorf("4096 leases: %d round trips, want at most 3", n)
	}
}

// TestFirstPage: the first 100 of many rows take two round trips.
func TestFirstPage(t *testing.T) {
	var s trips
	kv, ix := opened(t, testpg.Shared(t).Database(t), Options{tune: s.tune})
	base := identity.Aggregate(identity.Sum([]byte("base")))
	var ops []index.Op
	for i := range 3000 {
		ops = append(ops, artifact("farm/adapters", uint64(i+1), base, 1))
	}
	if err := ix.Apply(t.Context(), ops...); err != nil {
		t.Fatal(err)
	}
	var page index.Page
	first := func() (err error) {
		page, err = ix.Listing(t.Context(), index.Query{Aggregate: base}, 100, nil)
		return err
	}
	s.of(t, kv, first)
	if n := s.of(t, kv, first); n > 2 || page.Rows != 100 || page.Next == "" {
		t.Errorf("%d rows, next %q: %d round trips, want at most 2", page.Rows, page.Next, n)
	}
	q := index.Query{Aggregate: base, After: page.Next}
	n := s.of(t, kv, func() (err error) {
		page, err = ix.Listing(t.Context(), q, 100, nil)
		return err
	})
	if n > 2 || page.Rows != 100 {
		t.Errorf("the second page has %d rows: %d round trips, want at most 2", page.Rows, n)
	}
}

// TestRangeOfOwnWrites: a range has what is stored and what the transaction wrote, over pages and in order, with values
// that are too long for a page.
func TestRangeOfOwnWrites(t *testing.T) {
	kv, _ := opened(t, testpg.Shared(t).Database(t), Options{})
	key := func(i int) []byte { return fmt.Appendf(nil, "k%05d", i) }
	long := make([]byte, 3<<20)
	put := func(from, to, step int) error {
		return kv.Update(t.Context(), func(x index.Txn) error {
			for i := from; i < to; i += step {
				v := key(i)
				if i%1000 == 0 {
					v = append(v, long...)
				}
				if err := x.Put(key(i), v); err != nil {
					return err
				}
			}
			return nil
		})
	}
	if err := put(0, 5000, 2); err != nil {
		t.Fatal(err)
	}
	err := kv.Update(t.Context(), func(x index.Txn) error {
		for i := 4999; i >= 0; i-- {
			var err error
			switch {
			case i%6 == 0:
				err = x.Delete(key(i))
			case i%2 == 1:
				err = x.Put(key(i), key(i))
			}
			if err != nil {
				return err
			}
		}
		at := 0
		for k, v := range x.Range(key(0), []byte("l")) {
			for at%6 == 0 {
				at++
			}
			want := len(key(at))
			if at%1000 == 0 {
				want += len(long)
			}
			if string(k) != string(key(at)) || len(v) != want || string(v[:6]) != string(k) {
				return fmt.Errorf("%q has %d bytes, want %q with %d", k, len(v), key(at), want)
			}
			at++
		}
		if at != 5000 {
			return fmt.Errorf("the range ends before %q", key(at))
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
