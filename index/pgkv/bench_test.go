package pgkv

import (
	"context"
	"flag"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/internal/testpg"
)

// held is how many rows the benchmarks start with: 1,000,000 for the long form.
var held = flag.Int("held", 20000, "manifests that the index of a benchmark holds")

// filled is an index that holds manifests of one base, in repositories of 10,000.
func filled(b *testing.B, o Options) (*index.Index, identity.Aggregate) {
	b.Helper()
	_, ix := opened(b, testpg.Shared(b).Database(b), o)
	base := identity.Aggregate(identity.Sum([]byte("base")))
	err := ix.Import(b.Context(), b.TempDir(), func(yield func(index.Entry, error) bool) {
		for i := range *held {
			p := artifact(fmt.Sprint("farm/adapters-", i/10000), uint64(i+1), base, 1)
			if !yield(index.Entry{PutManifest: p}, nil) {
				return
			}
		}
	})
	if err != nil {
		b.Fatal(err)
	}
	return ix, base
}

// BenchmarkPush is one manifest with 4 blobs and a tag; every pusher has a repository. The server's disk is not synced.
func BenchmarkPush(b *testing.B) {
	var runs atomic.Int64 // of transactions
	ix, base := filled(b, Options{Conns: 32, tune: func(c *pgxpool.Config) {
		c.PrepareConn = func(context.Context, *pgx.Conn) (bool, error) {
			runs.Add(1)
			return true, nil
		}
	}})
	round := 0
	for _, pushers := range []int{1, 4, 16} {
		b.Run(fmt.Sprint(pushers, " pushers"), func(b *testing.B) {
			round++
			runs.Store(0)
			var next atomic.Int64
			var wg sync.WaitGroup
			b.ResetTimer()
			for w := range pushers {
				wg.Go(func() {
					for seq := uint64(1); next.Add(1) <= int64(b.N); seq++ {
						p := artifact(fmt.Sprintf("models/of-%d-%d", round, w), seq, base, 4)
						err := ix.Apply(b.Context(), p, index.PutTag{Repo: p.Repo, Tag: "main", Digest: p.Digest, Seq: seq})
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "pushes/s")
			b.ReportMetric(float64(runs.Load())/float64(b.N), "transactions/push")
		})
	}
}

// BenchmarkFindFirst is the first 100 of all.
func BenchmarkFindFirst(b *testing.B) {
	ix, base := filled(b, Options{})
	b.ResetTimer()
	for range b.N {
		p, err := ix.Listing(b.Context(), index.Query{Aggregate: base}, 100, nil)
		if err != nil || p.Rows != 100 {
			b.Fatal(p.Rows, err)
		}
	}
}
