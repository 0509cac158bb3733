package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

const window = 200 // manifests at each end of the run

// index pushes many manifests of one base into one repository and compares what the last cost with what the first did.
// The very first meet an index of one page; the tenths say whether the cost grows from there on.
func (b *bench) index(ctx context.Context) ([]row, error) {
	reg, err := b.startRegistry(ctx)
	if err != nil {
		return nil, err
	}
	defer reg.stop()
	for _, repo := range []string{"bench/warm", "bench/manifests"} {
		for _, blob := range [][]byte{emptyConfig, tinyShard()} {
			body, size := bytes.NewReader(blob), int64(len(blob))
			if err := b.client.push(ctx, reg.url, repo, identity.Sum(blob), body, size); err != nil {
				return nil, err
			}
		}
	}
	if _, err := b.window(ctx, reg, "bench/warm", 0, window); err != nil {
		return nil, err
	}
	const end, tenth = window, 10
	part := b.pushes / tenth
	ends := []int{0, end, part, 2 * part, b.pushes - end - part, b.pushes - end, b.pushes}
	costs := make([]cost, len(ends)-1)
	for i := range costs {
		if costs[i], err = b.window(ctx, reg, "bench/manifests", ends[i], ends[i+1]); err != nil {
			return nil, err
		}
	}
	first, early, late, last := costs[0], costs[2], costs[4], costs[5]
	return []row{
		atMost(fmt.Sprintf("manifest push: wall, last %d / first %d of %d", end, end, b.pushes),
			last.wall/first.wall, 1.25, "", fmt.Sprintf("medians %.2f and %.2f ms", last.wall, first.wall)),
		atMost("manifest push: server CPU, the same", last.cpu/first.cpu, 1.25, "",
			fmt.Sprintf("%.2f and %.2f ms each", last.cpu, first.cpu)),
		atMost("manifest push: server CPU, last tenth / second tenth", late.cpu/early.cpu, 1.15, "",
			fmt.Sprintf("%.2f and %.2f ms each", late.cpu, early.cpu)),
	}, nil
}

// cost is that of one push, in milliseconds.
type cost struct{ wall, cpu float64 }

// window pushes manifests number from to number to, one after the other, each under a tag of its own.
func (b *bench) window(ctx context.Context, reg *server, repo string, from, to int) (cost, error) {
	walls := make([]float64, 0, to-from)
	cpu, err := reg.during(func() error {
		for i := from; i < to; i++ {
			begin := time.Now()
			body := manifest(i)
			_, err := b.client.do(ctx, "PUT", fmt.Sprintf("%s/v2/%s/manifests/v%d", reg.url, repo, i), bytes.NewReader(body),
				int64(len(body)), http.StatusCreated, "Content-Type", "application/vnd.oci.image.manifest.v1+json")
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

// manifest is a base model of one shard that differs from every other number's by an annotation.
func manifest(number int) []byte {
	type descriptor struct {
		MediaType   string            `json:"mediaType"`
		Digest      identity.Digest   `json:"digest"`
		Size        int               `json:"size"`
		Annotations map[string]string `json:"annotations,omitempty"`
	}
	shard, name := tinyShard(), "model.safetensors"
	text, err := json.Marshal(map[string]any{
		"schemaVersion": 2,
		"mediaType":     "application/vnd.oci.image.manifest.v1+json",
		"artifactType":  api.ArtifactTypeBase,
		"config":        descriptor{api.MediaTypeModelConfig, identity.Sum(emptyConfig), len(emptyConfig), nil},
		"layers": []descriptor{{api.MediaTypeWeight, identity.Sum(shard), len(shard),
			map[string]string{api.AnnotationFilepath: name, "org.opencontainers.image.title": name}}},
		"annotations": map[string]string{api.AnnotationKind: string(api.KindBase), "bench.number": fmt.Sprint(number)},
	})
	if err != nil {
		panic(err) // the value above always has a JSON form
	}
	return text
}
