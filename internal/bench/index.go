package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
	"github.com/kiln-registry/kiln-registry/index/boltkv"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
	"github.com/kiln-registry/kiln-registry/registry/access"
)

const window = 200 // manifests of one measurement

// index fills one repository with manifests of one base, and then compares what a push into it costs with what one into
// a new registry does, and into one that holds a tenth as many: an index of a few pages is cheaper by a constant step,
// growth would show between the tenth and the whole. All are measured in every round, since the disk changes its pace.
func (b *bench) index(ctx context.Context) ([]row, error) {
	full, err := b.manifestServer(ctx)
	if err != nil {
		return nil, err
	}
	defer full.Stop()
	if _, err := b.window(ctx, full, "bench/manifests", 0, b.pushes); err != nil {
		return nil, err
	}
	var first, tenth ratios
	for i := range b.rounds {
		whole, one, part, err := b.compare(ctx, i, full)
		if err != nil {
			return nil, err
		}
		first.add(whole, one)
		tenth.add(whole, part)
	}
	return append(first.rows(b.pushes, 1, 1.25), tenth.rows(b.pushes, b.pushes/10, 1.15)...), nil
}

// ratios are those of one comparison, a round each.
type ratios struct{ wall, cpu, ours []float64 }

func (r *ratios) add(a, b cost) {
	r.wall, r.cpu, r.ours = append(r.wall, a.wall/b.wall), append(r.cpu, a.cpu/b.cpu), append(r.ours, a.cpu)
}

func (r *ratios) rows(from, to int, goal float64) []row {
	what := fmt.Sprintf("manifest push, from number %d on / from %d on: ", from, to)
	wall, wallSpread := median(r.wall)
	cpu, cpuSpread := median(r.cpu)
	each, _ := median(r.ours)
	return []row{
		atMost(what+"wall", wall, goal, "", wallSpread),
		atMost(what+"server CPU", cpu, goal, "", fmt.Sprintf("%s; %.2f ms each", cpuSpread, each)),
	}
}

// compare pushes as many manifests into the full registry as into a new one that is empty, and then holds a tenth.
// Which registry goes first alternates.
func (b *bench) compare(ctx context.Context, round int, full *rig.Server) (whole, one, part cost, err error) {
	fresh, err := b.manifestServer(ctx)
	if err != nil {
		return whole, one, part, err
	}
	defer fresh.Stop()
	const repo = "bench/manifests"
	at, tenth := b.pushes+round*window, b.pushes/10
	for side := range 2 {
		if (side+round)%2 == 0 {
			if whole, err = b.window(ctx, full, repo, at, at+window); err != nil {
				return whole, one, part, err
			}
			continue
		}
		if one, err = b.window(ctx, fresh, repo, 0, window); err != nil {
			return whole, one, part, err
		}
		if _, err = b.window(ctx, fresh, repo, window, tenth); err != nil {
			return whole, one, part, err
		}
		if part, err = b.window(ctx, fresh, repo, tenth, tenth+window); err != nil {
			return whole, one, part, err
		}
	}
	return whole, one, part, nil
}

// manifestServer is a new registry that holds the blobs of the manifests and has taken a few in another repository, so
// that the start of the process is not measured.
func (b *bench) manifestServer(ctx context.Context) (*rig.Server, error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	for _, repo := range []string{"bench/warm", "bench/manifests"} {
		for _, blob := range [][]byte{emptyConfig, tinyShard()} {
			body, size := bytes.NewReader(blob), int64(len(blob))
			if err := b.client.Push(ctx, reg.URL, repo, identity.Sum(blob), body, size); err != nil {
				reg.Stop()
				return nil, err
			}
		}
	}
	if _, err := b.window(ctx, reg, "bench/warm", 0, window/4); err != nil {
		reg.Stop()
		return nil, err
	}
	return reg, nil
}

// cost is that of one push, in milliseconds.
type cost struct{ wall, cpu float64 }

// window pushes manifests number from to number to, one after the other, each under a tag of its own.
func (b *bench) window(ctx context.Context, reg *rig.Server, repo string, from, to int) (cost, error) {
	walls := make([]float64, 0, to-from)
	cpu, err := reg.During(func() error {
		for i := from; i < to; i++ {
			begin := time.Now()
			err := b.client.PushManifest(ctx, reg.URL, repo, fmt.Sprint("v", i), manifest(i))
			if err != nil {
				return err
			}
			walls = append(walls, time.Since(begin).Seconds()*1e3)
		}
		return nil
	})
	if err != nil {
		return cost{}, err
	}
	wall, _ := median(walls)
	return cost{wall, cpu * 1e3 / float64(to-from)}, nil
}

var emptyConfig = []byte("{}")

// tinyShard is a safetensors file of one tensor.
func tinyShard() []byte {
	header := []byte(`{"t":{"dtype":"U8","shape":[8],"data_offsets":[0,8]}}   `)
	return append(append(binary.LittleEndian.AppendUint64(nil, uint64(len(header))), header...), "12345678"...)
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      identity.Digest   `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

const shardName = "model.safetensors"

// manifest is a base model of one shard that differs from every other number's by an annotation.
func manifest(number int) []byte {
	shard := tinyShard()
	text, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     manifestType,
		"artifactType":  api.ArtifactTypeBase,
		"config":        descriptor{api.MediaTypeModelConfig, identity.Sum(emptyConfig), len(emptyConfig), nil},
		"layers": []descriptor{{api.MediaTypeWeight, identity.Sum(shard), len(shard),
			map[string]string{api.AnnotationFilepath: shardName, "org.opencontainers.image.title": shardName}}},
		"annotations": map[string]string{api.AnnotationKind: string(api.KindBase), "bench.number": fmt.Sprint(number)},
	})
	if err != nil {
		panic(err) // the value above always has a JSON form
	}
	return text
}

const (
	bases      = 1000 // in the registry of the find table
	findAsks   = 3000 // of each kind, in each round
	findPage   = 100
	fewSeen    = 3
	seedNumber = 17 // the base that is asked for
)

// find measures a registry whose index holds b.artifacts adapters of a thousand bases, each in a repository of its own:
// the import of that index, its size, how long it takes to open, and what the first page of what was made from one base
// costs, for a caller who may see everything and for one who may see three of all the repositories. The index alone is
// filled: the store has two blobs, to which all manifests refer, and no records of them.
func (b *bench) find(ctx context.Context) ([]row, error) {
	p, imported, err := b.plantIndex(ctx)
	if err != nil {
		return nil, err
	}
	opened, err := openTimes(ctx, p, b.rounds)
	if err != nil {
		return nil, err
	}
	pages, err := b.pages(ctx, p)
	return append(append(imported, opened), pages...), err
}

func (p planted) index() string { return filepath.Join(p.dir, "data", "index.db") }

// plantIndex makes a store of two blobs, and imports its index.
func (b *bench) plantIndex(ctx context.Context) (p planted, rows []row, err error) {
	if p.dir, err = os.MkdirTemp(b.dir, "find-"); err != nil {
		return p, nil, err
	}
	p.artifacts = b.artifacts
	s, err := b.serve(ctx, p)
	if err != nil {
		return p, nil, err
	}
	err = b.pushParts(ctx, s, manifests)
	s.Stop()
	if err != nil {
		return p, nil, err
	}
	if err := os.Remove(p.index()); err != nil {
		return p, nil, err
	}
	kv, err := boltkv.Open(p.index(), boltkv.Options{})
	if err != nil {
		return p, nil, err
	}
	ix, err := index.New(ctx, kv)
	if err != nil {
		return p, nil, errors.Join(err, kv.Close())
	}
	defer func() { err = errors.Join(err, ix.Close()) }()
	before := ownSeconds()
	for range entries(p.artifacts) { // what their making costs
	}
	made := ownSeconds()
	if err := ix.Import(ctx, p.dir, entries(p.artifacts)); err != nil {
		return p, nil, err
	}
	used := ownSeconds() - made - (made - before)
	count, total, err := content(ctx, kv)
	if err != nil {
		return p, nil, err
	}
	info, err := os.Stat(p.index())
	if err != nil {
		return p, nil, err
	}
	size := float64(info.Size())
	return p, []row{
		atMost(fmt.Sprintf("import of %d adapters: CPU of a row of the index", p.artifacts), used*1e6/float64(count), 5, " µs",
			fmt.Sprintf("%.1f µs an adapter, of %.1f rows", used*1e6/float64(p.artifacts),
				float64(count)/float64(p.artifacts))),
		atMost("size of the index / bytes of its keys and values", size/float64(total), 2, "",
			fmt.Sprintf("%.0f MiB, %.0f bytes an adapter", size/(1<<20), size/float64(p.artifacts))),
	}, nil
}

// ownSeconds is the processor time that this process has used.
func ownSeconds() float64 {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		panic(err) // it has no way to fail
	}
	return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
}

// content counts the rows of an engine, and the bytes of their keys and values.
func content(ctx context.Context, kv index.KV) (rows, size int, err error) {
	err = kv.View(ctx, func(x index.Txn) error {
		rows, size = 0, 0
		for k, v := range x.Range(nil, nil) {
			rows++
			size += len(k) + len(v)
		}
		return nil
	})
	return rows, size, err
}

// entries are the bases and the adapters in order of repository.
func entries(adapters int) iter.Seq2[index.Entry, error] {
	return func(yield func(index.Entry, error) bool) {
		for i := range bases {
			if !yield(baseEntry(i), nil) {
				return
			}
		}
		for i := range adapters {
			if !yield(adapterEntry(i), nil) {
				return
			}
		}
	}
}

func numberedBase(i int) identity.Manifest {
	m, err := identity.New([]identity.Shard{{
		Filename: shardName, Size: 1 << 30, Digest: identity.Sum(fmt.Append(nil, "shard of base ", i)),
	}})
	if err != nil {
		panic(err) // the shard above is a valid one
	}
	return m
}

// aggregates are those of the bases.
var aggregates = sync.OnceValue(func() (all [bases]identity.Aggregate) {
	for i := range all {
		all[i] = numberedBase(i).Aggregate
	}
	return all
})

func entryOf(put index.PutManifest, i int) index.Entry {
	put.Seq, put.Created = 1, planting.Add(time.Duration(i)*time.Second)
	tag := index.PutTag{Repo: put.Repo, Tag: "v1", Digest: put.Digest, Seq: put.Seq}
	return index.Entry{PutManifest: put, Tags: []index.PutTag{tag}}
}

func baseEntry(i int) index.Entry {
	put := index.PutManifest{Manifest: manifest(i), Shards: numberedBase(i)}
	put.Record = index.Record{
		Repo: fmt.Sprintf("bases/model-%03d", i), Digest: identity.Sum(put.Manifest), MediaType: manifestType,
		Size: int64(len(put.Manifest)), ArtifactType: api.ArtifactTypeBase, Kind: api.KindBase, State: api.ContentDirect,
		Aggregate: put.Shards.Aggregate, Evidence: api.EvidenceNone, ShardCount: 1, TotalSize: put.Shards.TotalSize,
		Annotations: map[string]string{api.AnnotationKind: string(api.KindBase), "bench.number": fmt.Sprint(i)},
	}
	put.Refers = []identity.Digest{identity.Sum(emptyConfig), identity.Sum(tinyShard())}
	return entryOf(put, i)
}

// adapterEntry is number i of the adapters, of base i modulo their number, with what a training run says of itself.
func adapterEntry(i int) index.Entry {
	put := adapter(i)
	weights := identity.Sum(fmt.Append(nil, "weights ", i))
	put.Repo, put.Aggregate, put.Evidence = adapterRepo(i), aggregates()[i%bases], api.EvidenceDocument
	put.Name = fmt.Sprintf("adapter-%d", i)
	facts, err := json.Marshal(api.Facts{
		Name: put.Name, Source: "adapter_manifest.json $.base_model_content_manifest",
		Adapter: &api.AdapterFacts{Weights: weights, Config: identity.Sum(emptyConfig), Rank: 16, Stated: true,
			BaseText: "acme/model", Receipt: identity.Sum(fmt.Append(nil, "receipt ", i))},
	})
	if err != nil {
		panic(err) // the value above always has a JSON form
	}
	put.Facts = facts
	put.Links = []index.Link{{Relation: api.RelationReceipt, Target: identity.Sum(fmt.Append(nil, "receipt ", i))}}
	return entryOf(put, i)
}

func adapterRepo(i int) string { return fmt.Sprintf("farm/adapter-%07d", i) }

// openTimes times the opening of the index as the server does it.
func openTimes(ctx context.Context, p planted, rounds int) (row, error) {
	var times []float64
	for range rounds {
		began := time.Now()
		kv, err := boltkv.Open(p.index(), boltkv.Options{CheckLater: 1})
		if err != nil {
			return row{}, err
		}
		ix, err := index.New(ctx, kv)
		times = append(times, time.Since(began).Seconds()*1e3)
		if err == nil {
			err = ix.Close()
		} else {
			err = errors.Join(err, kv.Close())
		}
		if err != nil {
			return row{}, err
		}
	}
	middle, spread := median(times)
	return atMost("open of the index", middle, 20, " ms", spread), nil
}

// asked is one page as a caller asks for it: of the registry, and of the bare handler.
type asked struct {
	what, token, file string
}

// pages compares the first page of one base with a handler that writes the same bytes.
func (b *bench) pages(ctx context.Context, p planted) (rows []row, err error) {
	all, fewSecret, file, err := tokens(p.artifacts)
	if err != nil {
		return nil, err
	}
	path := filepath.Join(p.dir, "tokens.yaml")
	if err := os.WriteFile(path, file, 0o600); err != nil {
		return nil, err
	}
	reg, err := rig.Start(ctx, "/readyz", filepath.Join(b.bin, "kiln-registry"), func(addr string) []string {
		return []string{"serve", "--addr", addr, "--store", filepath.Join(p.dir, "data"), "--token-file", path}
	})
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	callers := []asked{
		{fmt.Sprintf("first %d of a base among %d adapters", findPage, p.artifacts), all, "page-all"},
		{fmt.Sprintf("the same for a caller who may see %d of them", fewSeen), fewSecret, "page-few"},
	}
	page := fmt.Sprintf("%s?limit=%d", api.PathArtifacts(aggregates()[seedNumber]), findPage)
	for _, c := range callers {
		if err := b.keepPage(ctx, reg.URL+page, c, p); err != nil {
			return nil, err
		}
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	bare, err := rig.Start(ctx, "/ready", self, func(addr string) []string { return []string{"bare", p.dir, addr} })
	if err != nil {
		return nil, err
	}
	defer bare.Stop()
	for _, c := range callers {
		more, err := b.pageRows(ctx, c, reg, reg.URL+page, bare, bare.URL+"/pages/"+c.file)
		if err != nil {
			return nil, err
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// tokens makes a token file of two callers, who may pull everything and three repositories of adapters of one base.
func tokens(adapters int) (all, few string, file []byte, err error) {
	all, allSum := access.NewSecret()
	few, fewSum := access.NewSecret()
	var seen []string
	for i := range fewSeen {
		seen = append(seen, adapterRepo(seedNumber+bases*(i*adapters/bases/fewSeen)))
	}
	pull := []access.Action{access.Pull}
	f := access.File{Version: access.FileVersion, Tokens: []access.Token{
		{Name: "all", SHA256: allSum, Allow: []access.Rule{{Repositories: []string{"**"}, Actions: pull}}},
		{Name: "few", SHA256: fewSum, Allow: []access.Rule{{Repositories: seen, Actions: pull}}},
	}}
	file, err = f.Marshal()
	return all, few, file, err
}

// keepPage checks the page of a caller, and keeps it for the bare handler.
func (b *bench) keepPage(ctx context.Context, url string, c asked, p planted) error {
	req, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+c.token)
	res, err := b.client.Client.Do(req)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	var list api.ArtifactList
	want := findPage
	if c.file == "page-few" {
		want = fewSeen
	}
	if err := json.Unmarshal(body, &list); err != nil || len(list.Artifacts) != want {
		return fmt.Errorf("%s: %s, %d artifacts, want %d: %v", c.what, res.Status, len(list.Artifacts), want, err)
	}
	return os.WriteFile(filepath.Join(p.dir, c.file), body, 0o600)
}

// pageRows asks both servers in turn, again and again.
func (b *bench) pageRows(ctx context.Context, c asked, reg *rig.Server, ours string, bare *rig.Server, theirs string) (
	[]row, error,
) {
	var cpu, wall, used []float64
	var every []float64 // of all rounds, of the registry
	for round := range b.rounds {
		var seconds, p50 [2]float64
		err := inTurn(round, 2, func(side int) (err error) {
			server, url := reg, ours
			if side == 1 {
				server, url = bare, theirs
			}
			var times []float64
			seconds[side], err = server.During(func() (err error) {
				times, err = b.askAs(ctx, url, c.token)
				return err
			})
			if err == nil {
				p50[side], _ = median(times)
			}
			if side == 0 {
				every = append(every, times...)
			}
			return err
		})
		if err != nil {
			return nil, err
		}
		cpu, wall = append(cpu, seconds[0]/seconds[1]), append(wall, p50[0]/p50[1])
		used = append(used, seconds[0]*1e6/findAsks)
	}
	cpuRatio, cpuSpread := median(cpu)
	wallRatio, wallSpread := median(wall)
	slices.Sort(every)
	return []row{
		atMost(c.what+": server CPU / bare handler's of the same bytes", cpuRatio, 2, "",
			fmt.Sprintf("%s; %.0f µs each", cpuSpread, middle(used))),
		atMost("p50 / the bare handler's", wallRatio, 2, "", fmt.Sprintf("%s; p50 %.2f ms, p99 %.2f ms", wallSpread,
			every[len(every)/2], every[len(every)*99/100])),
	}, nil
}

// askAs asks for a page again and again and returns how long each took, in milliseconds.
func (b *bench) askAs(ctx context.Context, url, token string) (times []float64, err error) {
	for range findAsks {
		began := time.Now()
		_, err := b.client.Do(ctx, "GET", url, nil, 0, http.StatusOK, "Authorization", "Bearer "+token)
		if err != nil {
			return nil, err
		}
		times = append(times, time.Since(began).Seconds()*1e3)
	}
	return times, nil
}
