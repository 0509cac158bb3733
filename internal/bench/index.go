package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/bench/rig"
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
