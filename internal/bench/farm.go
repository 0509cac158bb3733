package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/blobstore"
	"github.com/kiln-registry/kiln-registry/blobstore/fsstore"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
)

const (
	fewArtifacts = 10_000
	queries      = 50 // of each kind, in each round
)

// farm measures a registry that holds one base and very many adapters of it, each with a tag and all in one repository:
// how long the first page of a listing takes, and how long the server takes to be ready. The stores are written by the
// packages that the server is made of, one record of the log for each adapter as if it had been pushed.
func (b *bench) farm(ctx context.Context) ([]row, error) {
	few, err := b.plant(ctx, fewArtifacts)
	if err != nil {
		return nil, err
	}
	many, err := b.plant(ctx, b.artifacts)
	if err != nil {
		return nil, err
	}
	listings, err := b.listings(ctx, few, many)
	if err != nil {
		return nil, err
	}
	starts, err := b.starts(ctx, many)
	return append(listings, starts...), err
}

// planted is a store of adapters.
type planted struct {
	dir       string
	artifacts int
}

var (
	baseManifest  = manifest(0)
	baseAggregate = aggregateOf(identity.Shard{
		Filename: shardName, Size: uint64(len(tinyShard())), Digest: identity.Sum(tinyShard()),
	})
)

func aggregateOf(shard identity.Shard) identity.Aggregate {
	m, err := identity.New([]identity.Shard{shard})
	if err != nil {
		panic(err) // the shard above is a valid one
	}
	return m.Aggregate
}

// plant makes a store with a base, which is pushed, and adapters of it.
func (b *bench) plant(ctx context.Context, artifacts int) (p planted, err error) {
	if p.dir, err = os.MkdirTemp(b.dir, "farm-"); err != nil {
		return p, err
	}
	p.artifacts = artifacts
	s, err := b.serve(ctx, p)
	if err != nil {
		return p, err
	}
	err = b.sow(ctx, s)
	s.Stop()
	if err != nil {
		return p, err
	}
	return p, grow(ctx, p)
}

// sow pushes the base, and so many small blobs that every folder of blobs is there: each has a part in a start.
func (b *bench) sow(ctx context.Context, s *rig.Server) error {
	for number := range uint64(2000) {
		err := b.client.PushWhole(ctx, s.URL, manifests, rig.DigestOf(number, 8), rig.Stream(number, 8), 8)
		if err != nil {
			return err
		}
	}
	if err := b.pushParts(ctx, s, manifests); err != nil {
		return err
	}
	return b.client.PushManifest(ctx, s.URL, manifests, "base", baseManifest)
}

func (b *bench) serve(ctx context.Context, p planted) (*rig.Server, error) {
	return rig.KilnOn(ctx, filepath.Join(b.bin, "kiln-registry"), filepath.Join(p.dir, "data"))
}

// grow writes the adapters into the log and the index.
func grow(ctx context.Context, p planted) (err error) {
	store, err := fsstore.Open(filepath.Join(p.dir, "data"), fsstore.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, store.Close()) }()
	kv, err := boltkv.Open(filepath.Join(p.dir, "data", "index.db"), boltkv.Options{})
	if err != nil {
		return err
	}
	ix, err := index.New(ctx, kv)
	if err != nil {
		return errors.Join(err, kv.Close())
	}
	defer func() { err = errors.Join(err, ix.Close()) }()
	const batch = 2000 // in one transaction of the index
	from := 0
	for numbers := range slices.Chunk(byDigest(p.artifacts), batch) {
		puts := adapters(numbers, from)
		from += batch
		last, err := keep(ctx, store, puts)
		if err != nil {
			return err
		}
		ops := []index.Op{index.Checkpoint{Position: uint64(last)}}
		for _, put := range puts {
			ops = append(ops, put, index.PutTag{Repo: put.Repo, Tag: tagOf(put.Seq), Digest: put.Digest, Seq: put.Seq})
		}
		if err := ix.Apply(ctx, ops...); err != nil {
			return err
		}
	}
	return nil
}

func tagOf(seq uint64) string { return fmt.Sprintf("v%09d", seq) }

// keep puts one record for each adapter into the log, many at a time so that they share syncs, and returns where the log
// ends.
func keep(ctx context.Context, store *fsstore.Store, puts []index.PutManifest) (last blobstore.Position, err error) {
	var group errgroup.Group
	group.SetLimit(1024)
	ends := make([]blobstore.Position, len(puts))
	for i, put := range puts {
		group.Go(func() (err error) {
			ref := blobstore.Ref{
				Repo: put.Repo, Name: put.Digest.String(), Seq: put.Seq, Digest: put.Digest, MediaType: put.MediaType,
				Manifest: put.Manifest, Time: put.Created,
			}
			tag := ref
			tag.Name, tag.Manifest = tagOf(put.Seq), nil
			ends[i], err = store.Put(ctx, ref, tag)
			return err
		})
	}
	err = group.Wait()
	return slices.Max(ends), err
}

// planting is when the first adapter was accepted, as far as the index knows.
var planting = time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)

// byDigest returns the numbers of so many adapters in order of digest: so those that go into the index together touch few
// of its pages.
func byDigest(artifacts int) []int {
	digests, numbers := make([]identity.Digest, artifacts), make([]int, artifacts)
	for i := range artifacts {
		digests[i], numbers[i] = adapter(i).Digest, i
	}
	slices.SortFunc(numbers, func(a, b int) int { return digests[a].Compare(digests[b]) })
	return numbers
}

// adapters makes adapters as if they had been pushed one after the other, the first one as number from.
func adapters(numbers []int, from int) []index.PutManifest {
	puts := make([]index.PutManifest, len(numbers))
	for i, number := range numbers {
		puts[i] = adapter(number)
		puts[i].Seq, puts[i].Created = uint64(from+i+1000), planting.Add(time.Duration(from+i)*time.Second)
	}
	return puts
}

const manifestType = "application/vnd.oci.image.manifest.v1+json"

// adapter is an adapter as the registry indexes one that was pushed.
func adapter(number int) index.PutManifest {
	config, layer := identity.Sum(emptyConfig), identity.Sum(tinyShard())
	annotations := map[string]string{api.AnnotationKind: string(api.KindAdapter), "bench.number": fmt.Sprint(number)}
	text, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     manifestType,
		"artifactType":  api.ArtifactTypeAdapter,
		"config":        descriptor{"application/vnd.oci.empty.v1+json", config, len(emptyConfig), nil},
		"layers":        []descriptor{{"application/octet-stream", layer, len(tinyShard()), nil}},
		"subject":       descriptor{manifestType, identity.Sum(baseManifest), len(baseManifest), nil},
		"annotations":   annotations,
	})
	if err != nil {
		panic(err) // the value above always has a JSON form
	}
	return index.PutManifest{
		Record: index.Record{
			Repo: manifests, Digest: identity.Sum(text), MediaType: manifestType, Size: int64(len(text)),
			ArtifactType: api.ArtifactTypeAdapter, Annotations: annotations, Kind: api.KindAdapter,
			State: api.ContentNone, Aggregate: baseAggregate, Evidence: api.EvidenceAsserted,
			Subject: identity.Sum(baseManifest),
			Facts:   fmt.Appendf(nil, `{"source":"subject %s"}`, identity.Sum(baseManifest)),
		},
		Manifest: text, Refers: []identity.Digest{config, layer},
	}
}

// listings times the first page of each listing, of few adapters and of many in turn.
func (b *bench) listings(ctx context.Context, few, many planted) ([]row, error) {
	var servers [2]*rig.Server
	for i, p := range []planted{few, many} {
		s, err := b.serve(ctx, p)
		if err != nil {
			return nil, err
		}
		defer s.Stop()
		servers[i] = s
	}
	rows := []row{}
	for _, l := range []struct{ what, path string }{
		{"referrers", api.PathReferrers(manifests, identity.Sum(baseManifest))},
		{"referrers of one type", api.PathReferrers(manifests, identity.Sum(baseManifest)) +
			"?artifactType=" + url.QueryEscape(api.ArtifactTypeAdapter)},
		{"artifacts of an aggregate", api.PathArtifacts(baseAggregate)},
	} {
		times, cpu := newSeries(2), newSeries(2)
		for round := range b.rounds {
			err := inTurn(round, 2, func(i int) error {
				used, err := servers[i].During(func() error {
					took, err := b.ask(ctx, servers[i].URL+l.path)
					times[i] = append(times[i], took...)
					return err
				})
				cpu.add(i, used*1e3/queries)
				return err
			})
			if err != nil {
				return nil, err
			}
		}
		at, spread := median(times[0])
		then, thenSpread := median(times[1])
		rows = append(rows,
			row{
				what: fmt.Sprintf("%s, first page, of %d: p50", l.what, few.artifacts), value: at, unit: " ms",
				notes: fmt.Sprintf("%s; server CPU %.2f ms", spread, middle(cpu[0])),
			}.atMost(5),
			row{
				what: fmt.Sprintf("the same of %d / of %d", many.artifacts, few.artifacts), value: then / at,
				notes: fmt.Sprintf("%.2f ms, %s; server CPU %.2f ms", then, thenSpread, middle(cpu[1])),
			}.atMost(2),
		)
	}
	return rows, nil
}

// ask sends a query again and again and returns how long each took, in milliseconds.
func (b *bench) ask(ctx context.Context, page string) (times []float64, err error) {
	for range queries {
		began := time.Now()
		if _, err := b.client.Do(ctx, "GET", page, nil, 0, http.StatusOK); err != nil {
			return nil, err
		}
		times = append(times, time.Since(began).Seconds()*1e3)
	}
	return times, nil
}

// starts times the server from its exec to the first 200 of /readyz.
func (b *bench) starts(ctx context.Context, p planted) ([]row, error) {
	var stopped, killed []float64
	for range b.rounds {
		for _, kind := range []struct {
			end  func(*rig.Server)
			into *[]float64
		}{{(*rig.Server).Kill, &stopped}, {(*rig.Server).Stop, &killed}} { // how this one ends, the next one finds
			began := time.Now()
			s, err := b.serve(ctx, p)
			if err != nil {
				return nil, err
			}
			*kind.into = append(*kind.into, time.Since(began).Seconds()*1e3)
			kind.end(s)
		}
	}
	what := fmt.Sprintf("start with %d artifacts, from exec to ready, ", p.artifacts)
	clean, cleanSpread := median(stopped)
	crash, crashSpread := median(killed)
	return []row{
		row{what: what + "after a stop", value: clean, unit: " ms", notes: cleanSpread}.atMost(100),
		row{what: what + "after a kill", value: crash, unit: " ms", notes: crashSpread}.atMost(100),
	}, nil
}
