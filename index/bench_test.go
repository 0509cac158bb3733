package index_test

import (
	"fmt"
	"os"
	"testing"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// load puts adapters number from+1 to number to of one aggregate into repositories of 10,000 each.
func load(tb testing.TB, ix *index.Index, a identity.Aggregate, from, to int) {
	tb.Helper()
	var ops []index.Op
	for i := from; i < to; i++ {
		ops = append(ops, adapter(fmt.Sprintf("farm/adapters-%d", i/10000), fmt.Sprint("adapter ", i), uint64(i+1), a))
		if len(ops) == 1000 || i+1 == to {
			apply(tb, ix, ops...)
			ops = nil
		}
	}
}

// BenchmarkPush is one manifest with a tag, durable, in a repository that holds so many.
func BenchmarkPush(b *testing.B) {
	for _, held := range []int{1, 10000, 50000} {
		b.Run(fmt.Sprintf("into %d", held), func(b *testing.B) {
			ix := opened(b, openBolt(b))
			a := aggregate("base")
			load(b, ix, a, 0, held)
			seq := uint64(held)
			for b.Loop() {
				seq++
				p := adapter("farm/adapters-0", fmt.Sprint("pushed ", seq), seq, a)
				p.Name, p.Facts = fmt.Sprint("adapter ", seq), []byte(`{"name":"adapter","adapter":{"rank":16}}`)
				p.Links = []index.Link{{Relation: api.RelationReceipt, Target: identity.Sum([]byte(p.Name))}}
				apply(b, ix, p, index.PutTag{Repo: p.Repo, Tag: fmt.Sprint("v", seq), Digest: p.Digest, Seq: seq})
			}
		})
	}
}

// BenchmarkFind is the first 100 records of a query among 100,000 adapters of one base.
func BenchmarkFind(b *testing.B) {
	ix := opened(b, openBolt(b))
	a := aggregate("base")
	load(b, ix, a, 0, 100000)
	for name, q := range map[string]index.Query{
		"by aggregate":                  {Aggregate: a, Kind: api.KindAdapter},
		"all but the last repo refused": {Aggregate: a, See: func(repo string) bool { return repo == "farm/adapters-9" }},
		"of a repository":               {Repo: "farm/adapters-5"},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				n := 0
				for _, err := range ix.Find(b.Context(), q) {
					if err != nil {
						b.Fatal(err)
					}
					if n++; n == 100 {
						break
					}
				}
				if n != 100 {
					b.Fatalf("found %d", n)
				}
			}
		})
	}
}

// BenchmarkRebuild applies 10,000 manifests in batches of 1,000.
func BenchmarkRebuild(b *testing.B) {
	for b.Loop() {
		b.StopTimer()
		ix := opened(b, openBolt(b))
		b.StartTimer()
		load(b, ix, aggregate("base"), 0, 10000)
	}
}

// BenchmarkImport is an import of 100,000 adapters, and what it leaves on the disk.
func BenchmarkImport(b *testing.B) {
	const n = 100_000
	for b.Loop() {
		kv := openBolt(b)
		ix := opened(b, kv)
		if err := ix.Import(b.Context(), b.TempDir(), farm(n, aggregate("base"))); err != nil {
			b.Fatal(err)
		}
		info, err := os.Stat(kv.Path())
		if err != nil {
			b.Fatal(err)
		}
		rows, bytes := content(b, kv)
		b.ReportMetric(float64(info.Size())/float64(bytes), "size/bytes")
		b.ReportMetric(float64(rows)/n, "rows/artifact")
		b.ReportMetric(float64(bytes)/float64(rows), "bytes/row")
	}
}

// BenchmarkListing is the first page of 100 of a base with 100,000 adapters, each in a repository of its own.
func BenchmarkListing(b *testing.B) {
	a := aggregate("base")
	ix := opened(b, openBolt(b))
	if err := ix.Import(b.Context(), b.TempDir(), farm(100_000, a)); err != nil {
		b.Fatal(err)
	}
	var buf []byte
	for b.Loop() {
		p, err := ix.Listing(b.Context(), index.Query{Aggregate: a}, 100, buf[:0])
		if err != nil || p.Rows != 100 {
			b.Fatalf("%d rows, %v", p.Rows, err)
		}
		buf = p.JSON
	}
	b.SetBytes(int64(len(buf)))
}
