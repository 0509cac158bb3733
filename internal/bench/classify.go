package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
	"github.com/kiln-registry/kiln-registry/internal/testartifact"
)

const (
	classifyRepo   = "bench/classify"
	classifyRounds = 7    // at least
	classifyShards = 8192 // of all manifests that are pushed in a turn, about
	classifyFewest = 40   // manifests of a turn: processor time is counted in steps of 10 ms, and a large push varies
)

// pushed is a kind of manifest that is pushed in two forms. Both have the same layers of the same blobs; in the plain
// one no file has a name that says what it is, so that there is nothing to classify. All else that a push is made of is
// in both: the reading of the manifest, the look at every blob, the record and its place in the index.
type pushed struct {
	what   string
	layers []descriptor
	plain  []descriptor
	each   int // pushes of a turn
}

// classify measures what classification adds to the push of a manifest: for bases of few and of very many shards, and
// for an adapter whose document holds the shard manifest of the largest. What is kept of the outcome is a part of that.
func (b *bench) classify(ctx context.Context) (rows []row, err error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	defer reg.Stop()
	shards, err := b.pushShards(ctx, reg)
	if err != nil {
		return nil, err
	}
	var all []pushed
	for _, n := range []int{1, 8, 64, 1024, identity.MaxShards} {
		all = append(all, baseOf(shards[:n]))
	}
	adapter, trained, err := b.pushAdapter(ctx, reg, shards)
	if err != nil {
		return nil, err
	}
	for _, p := range append(all, adapter, trained) {
		more, err := b.classified(ctx, reg, p)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", p.what, err)
		}
		rows = append(rows, more...)
	}
	return rows, nil
}

// pushShards pushes as many different shards as a base can have.
func (b *bench) pushShards(ctx context.Context, reg *rig.Server) ([]identity.Shard, error) {
	if err := b.pushParts(ctx, reg, classifyRepo); err != nil {
		return nil, err
	}
	shards := make([]identity.Shard, identity.MaxShards)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(16)
	for i := range shards {
		text := fmt.Appendf(tinyShard(), "%08d", i) // which no header names: a reader of weights would refuse it
		d := identity.Sum(text)
		shards[i] = identity.Shard{Filename: fmt.Sprintf("model-%05d.safetensors", i), Size: uint64(len(text)), Digest: d}
		group.Go(func() error {
			return b.client.PushWhole(ctx, reg.URL, classifyRepo, d, bytes.NewReader(text), int64(len(text)))
		})
	}
	return shards, group.Wait()
}

func baseOf(shards []identity.Shard) pushed {
	p := pushed{
		what: fmt.Sprintf("base of %d shards", len(shards)),
		each: min(max(classifyShards/len(shards), classifyFewest), window),
	}
	for i, s := range shards {
		p.add(s.Filename, fmt.Sprintf("model-%05d.safetensorz", i), s.Digest, int(s.Size))
	}
	return p
}

// add adds a layer, with its name in either form.
func (p *pushed) add(name, plain string, d identity.Digest, size int) {
	layer := func(name string) descriptor {
		return descriptor{api.MediaTypeWeight, d, size, map[string]string{api.AnnotationFilepath: name}}
	}
	p.layers, p.plain = append(p.layers, layer(name)), append(p.plain, layer(plain))
}

// pushAdapter pushes the files of an adapter of the base of all shards. It makes two kinds of manifests: without the
// receipt, and with it. Either document holds the whole shard manifest.
func (b *bench) pushAdapter(ctx context.Context, reg *rig.Server, shards []identity.Shard) (
	alone, trained pushed, err error,
) {
	alone = pushed{what: fmt.Sprintf("adapter with the manifest of %d shards", len(shards)), each: window / 4}
	trained = pushed{what: "the same with a receipt that holds it, too", each: window / 4}
	base, err := identity.New(shards)
	if err != nil {
		return alone, trained, err
	}
	weights, config := testartifact.Weights(1), testartifact.Config("example/base")
	receipt := testartifact.Receipt("sql", identity.Sum(weights), &base)
	manifest := func(receipt identity.Digest) []byte {
		m := documents.NewAdapterManifest("sql", identity.Sum(weights), identity.Sum(config), receipt, base)
		text, derr := m.Document()
		err = errors.Join(err, derr)
		return text
	}
	for p, files := range map[*pushed]map[string][]byte{
		&alone:   {documents.AdapterManifestFile: manifest(identity.Digest{})},
		&trained: {documents.AdapterManifestFile: manifest(identity.Sum(receipt)), documents.ReceiptFile: receipt},
	} {
		files[documents.AdapterWeightsFile], files[documents.AdapterConfigFile] = weights, config
		for name, text := range files {
			d := identity.Sum(text)
			p.add(name, fmt.Sprintf("file-%d.bin", len(p.plain)), d, len(text))
			err = errors.Join(err,
				b.client.PushWhole(ctx, reg.URL, classifyRepo, d, bytes.NewReader(text), int64(len(text))))
		}
	}
	return alone, trained, err
}

// layered is a manifest with layers layers that differs from every other number's by an annotation.
func layered(layers []descriptor, number int) ([]byte, error) {
	return json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "layers": layers,
		"config":      descriptor{api.MediaTypeModelConfig, identity.Sum(emptyConfig), len(emptyConfig), nil},
		"annotations": map[string]string{"bench.number": fmt.Sprint(number)},
	})
}

// classified pushes manifests in both forms in turn. A turn is two halves, in the order with, without, without, with: what
// a push costs grows with what was pushed before, and so it does for both alike.
func (b *bench) classified(ctx context.Context, reg *rig.Server, p pushed) ([]row, error) {
	var cpu, wall, with, without []float64
	number := 0
	for round := range max(b.rounds, classifyRounds) {
		var costs [2]cost
		for half := range 2 {
			err := inTurn(round+half, 2, func(side int) error {
				c, err := b.pushNumbers(ctx, reg, [...][]descriptor{p.layers, p.plain}[side], number, p.each/2)
				number += p.each / 2
				costs[side].cpu, costs[side].wall = costs[side].cpu+c.cpu/2, costs[side].wall+c.wall/2
				return err
			})
			if err != nil {
				return nil, err
			}
		}
		cpu, wall = append(cpu, costs[0].cpu-costs[1].cpu), append(wall, costs[0].wall-costs[1].wall)
		with, without = append(with, costs[0].cpu), append(without, costs[1].cpu)
	}
	added, spread := median(cpu)
	slower, slowerSpread := median(wall)
	return []row{
		atMost(p.what+": server CPU that classification adds to a push", added, 2, " ms",
			fmt.Sprintf("%s; %.2f ms with it, %.2f ms without", spread, middle(with), middle(without))),
		{what: "wall", value: slower, unit: " ms", notes: slowerSpread},
	}, nil
}

// pushNumbers pushes so many manifests with the same layers, and returns what one of them cost.
func (b *bench) pushNumbers(ctx context.Context, reg *rig.Server, layers []descriptor, from, count int) (cost, error) {
	texts := make([][]byte, count)
	for i := range texts {
		var err error
		if texts[i], err = layered(layers, from+i); err != nil {
			return cost{}, err
		}
	}
	var walls []float64
	cpu, err := reg.During(func() error {
		for _, text := range texts {
			began := time.Now()
			if err := b.client.PushManifest(ctx, reg.URL, classifyRepo, identity.Sum(text).String(), text); err != nil {
				return err
			}
			walls = append(walls, time.Since(began).Seconds()*1e3)
		}
		return nil
	})
	if err != nil {
		return cost{}, err
	}
	wall, _ := median(walls)
	return cost{wall, cpu * 1e3 / float64(count)}, nil
}
