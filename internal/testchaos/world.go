package testchaos

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"math/rand/v2"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
)

// The world of a load is small, so that pushers meet: models share blobs, and come back after they were deleted.
const (
	worldBlobs  = 96
	worldModels = 24
	worldTags   = 5
)

const manifestType = "application/vnd.oci.image.manifest.v1+json"

// blob is one of the blobs that models are made of.
type blob struct {
	digest    identity.Digest
	data      []byte
	mediaType string
}

// model is a manifest with what it refers to.
type model struct {
	digest   identity.Digest
	manifest []byte
	blobs    []*blob
}

type world struct {
	blobs  map[identity.Digest]*blob
	models []*model
}

type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

func (b *blob) descriptor(name string) descriptor {
	return descriptor{b.mediaType, b.digest.String(), len(b.data), map[string]string{api.AnnotationFilepath: name}}
}

func newWorld(seed uint64) *world {
	var key [32]byte
	binary.LittleEndian.PutUint64(key[:], seed)
	source := rand.NewChaCha8(key)
	r := rand.New(source)
	w := &world{blobs: map[identity.Digest]*blob{}}
	var pool []*blob
	for i := range worldBlobs {
		n := 1 + r.IntN(64<<10)
		if i%16 == 0 {
			n = 1<<20 + r.IntN(1<<20)
		}
		data := make([]byte, n)
		source.Read(data)
		b := &blob{data: data, mediaType: "application/octet-stream"}
		if i%2 == 0 {
			b.data, b.mediaType = safetensors(data), api.MediaTypeWeight
		}
		pool = append(pool, w.add(b))
	}
	config := w.add(&blob{data: []byte("{}"), mediaType: "application/vnd.oci.empty.v1+json"})
	for range worldModels {
		w.models = append(w.models, newModel(r, config, pool))
	}
	return w
}

func (w *world) add(b *blob) *blob {
	b.digest = identity.Sum(b.data)
	w.blobs[b.digest] = b
	return b
}

// newModel makes a model of some blobs of the pool.
func newModel(r *rand.Rand, config *blob, pool []*blob) *model {
	m := &model{blobs: []*blob{config}}
	layers := []descriptor{}
	for _, i := range r.Perm(len(pool))[:1+r.IntN(5)] {
		ext := "bin"
		if pool[i].mediaType == api.MediaTypeWeight {
			ext = "safetensors"
		}
		m.blobs = append(m.blobs, pool[i])
		layers = append(layers, pool[i].descriptor(fmt.Sprintf("part-%d.%s", i, ext)))
	}
	manifest, err := json.Marshal(map[string]any{
		"schemaVersion": 2, "mediaType": manifestType, "artifactType": api.ArtifactTypeBase,
		"config": descriptor{config.mediaType, config.digest.String(), len(config.data), nil}, "layers": layers,
		"annotations": map[string]string{"model": fmt.Sprint(r.Uint64())},
	})
	if err != nil {
		panic(err) // it is made of strings and numbers
	}
	m.manifest, m.digest = manifest, identity.Sum(manifest)
	return m
}

// safetensors makes a file of one tensor.
func safetensors(data []byte) []byte {
	head := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, len(data), len(data))
	b := binary.LittleEndian.AppendUint64(nil, uint64(len(head)))
	return append(append(b, head...), data...)
}
