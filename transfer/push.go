package transfer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"

	godigest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxUploads is how many blobs are sent at a time; more connections do not help a link, and cost the registry buffers.
const maxUploads = 4

// PushOptions says how a model is pushed. The zero value is ready to use.
type PushOptions struct {
	FollowLinks           bool              // read the files behind links, see folder.Options
	Snapshot              bool              // push from a private copy, see folder.Folder.Snapshot
	AllowIncompleteFamily bool              // push files 1 and 3 of a model of 3
	Annotations           map[string]string // of the manifest; they are part of its digest
	Watch                 Watch
}

// Pushed is what a push has made.
type Pushed struct {
	Identity  identity.Summary      `json:"base_weight_identity"`
	Digest    identity.Digest       `json:"digest"` // of the manifest
	Reference string                `json:"reference"`
	Files     int                   `json:"files"`
	Sent      int64                 `json:"sent_bytes"` // of blobs; what the registry had already is not sent
	Warnings  []safetensors.Warning `json:"-"`
}

// Push makes the model in dir an artifact of a registry, under the tag of ref or, where it has none, by digest alone. The
// same bytes under the same names and annotations give the same manifest. Blobs that the registry has are not sent, and
// an upload that was broken off, also by the end of the process, goes on where it stopped. When this returns nil,
// everything is durable in the registry.
//
// The errors are those of folder.Open, folder.Hash and client.Client, and folder.ErrChanged where a file changed between
// being hashed and being sent: then no manifest was put.
func Push(ctx context.Context, c *client.Client, dir string, ref client.Reference, o PushOptions) (
	pushed Pushed, err error,
) {
	f, err := folder.Open(dir, folder.Options{FollowLinks: o.FollowLinks})
	if err != nil {
		return Pushed{}, err
	}
	if err := wholeFamily(f.Warnings); err != nil && !o.AllowIncompleteFamily {
		return Pushed{}, err
	}
	if err := pullable(f.Shards); err != nil {
		return Pushed{}, err
	}
	if o.Snapshot {
		snapshot, remove, err := f.Snapshot(ctx)
		if err != nil {
			return Pushed{}, err
		}
		defer func() { err = errors.Join(err, remove()) }()
		f = snapshot
	}
	u := &uploader{c: c, repo: ref.Repo, watch: o.Watch, notes: userNotes()}
	p := &push{f: f, u: u, taken: map[identity.Digest]bool{}}
	layers, base, err := p.run(ctx)
	if err != nil {
		return Pushed{}, err
	}
	doc, err := p.describe(ctx, layers, base, o.Annotations)
	if err != nil {
		return Pushed{}, err
	}
	pushed = Pushed{Identity: base.Summary(), Files: len(layers), Sent: p.u.sent.Load(), Warnings: f.Warnings}
	pushed.Digest = identity.Sum(doc)
	name := cmp.Or(ref.Tag, pushed.Digest.String())
	err = c.Retry(ctx, "manifest", func() error {
		_, err := c.PutManifest(ctx, ref.Repo, name, v1.MediaTypeImageManifest, doc)
		return err
	})
	pushed.Reference = client.Reference{Host: c.Host(), Repo: ref.Repo, Tag: ref.Tag, Digest: pushed.Digest}.String()
	return pushed, err
}

// wholeFamily refuses a folder that lacks members of a numbered family, which is most often a download that is not done.
func wholeFamily(warnings []safetensors.Warning) error {
	for _, w := range warnings {
		if w.Code == safetensors.WarnFamilyIncomplete {
			return &safetensors.Error{Code: w.Code, Msg: w.Message}
		}
	}
	return nil
}

// pullable refuses shards whose names a shard manifest may hold but no pull takes.
func pullable(shards []folder.File) error {
	for _, s := range shards {
		if err := api.CheckFilePath(s.Name); err != nil {
			return &safetensors.Error{Code: safetensors.CodeNotPortableName, File: s.Name, Msg: err.Error()}
		}
	}
	return nil
}

type push struct {
	f     *folder.Folder
	u     *uploader
	mu    sync.Mutex
	taken map[identity.Digest]bool // blobs that somebody is seeing to
}

// layer is one file of the artifact.
type layer struct {
	folder.File
	digest identity.Digest
}

// run hashes and uploads all files, small ones first. While some are sent, others are hashed.
func (p *push) run(ctx context.Context) ([]layer, identity.Manifest, error) {
	files := slices.Concat(p.f.Others, p.f.Shards)
	layers := make([]layer, len(files))
	for i, file := range files {
		layers[i].File = file
		p.u.watch.tell(Event{Step: Planned, Phase: PhaseHash, File: file.Name, Total: file.Size})
	}
	order := make([]*layer, len(layers))
	for i := range layers {
		order[i] = &layers[i]
	}
	slices.SortFunc(order, func(a, b *layer) int {
		return cmp.Or(cmp.Compare(a.Size, b.Size), cmp.Compare(a.Name, b.Name))
	})
	hashing := make(chan struct{}, runtime.GOMAXPROCS(0))
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(cap(hashing) + maxUploads - 1)
	sending := make(chan struct{}, maxUploads)
	for _, l := range order {
		g.Go(func() error {
			if err := within(ctx, hashing, func() error { return p.hash(ctx, l) }); err != nil || !p.take(l.digest) {
				return err
			}
			return within(ctx, sending, func() error {
				return p.u.push(ctx, blob{l.Name, l.digest, l.Size, onDisk{p.f, l.File}})
			})
		})
	}
	if err := g.Wait(); err != nil {
		return nil, identity.Manifest{}, err
	}
	base, err := baseOf(layers)
	return layers, base, err
}

// within runs do while holding a place among those that slots has.
func within(ctx context.Context, slots chan struct{}, do func() error) error {
	select {
	case slots <- struct{}{}:
		defer func() { <-slots }()
		return do()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (p *push) hash(ctx context.Context, l *layer) (err error) {
	l.digest, _, err = p.f.Hash(ctx, l.File, func(n int64) {
		p.u.watch.tell(Event{Step: Moved, Phase: PhaseHash, File: l.Name, Bytes: n, Total: l.Size})
	})
	if err == nil {
		p.u.watch.tell(Event{Step: Done, Phase: PhaseHash, File: l.Name, Bytes: l.Size, Total: l.Size})
	}
	return err
}

// take says whether the caller is the first to ask for a blob: files with the same bytes are sent once.
func (p *push) take(d identity.Digest) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	first := !p.taken[d]
	p.taken[d] = true
	return first
}

func baseOf(layers []layer) (identity.Manifest, error) {
	var shards []identity.Shard
	for _, l := range layers {
		if l.Kind == folder.Weight {
			shards = append(shards, identity.Shard{Filename: l.Name, Size: uint64(l.Size), Digest: l.digest})
		}
	}
	return identity.New(shards)
}

// onDisk is a file of a folder as the source of a blob.
type onDisk struct {
	f    *folder.Folder
	file folder.File
}

func (d onDisk) open() (io.ReadSeekCloser, func() error, error) { return d.f.Read(d.file) }

// mediaTypes are those of the CNCF model-spec for raw files: the digest of a layer is that of the file.
var mediaTypes = map[folder.Kind]string{
	folder.Config: api.MediaTypeWeightConfig,
	folder.Weight: api.MediaTypeWeight,
	folder.Code:   api.MediaTypeCode,
	folder.Doc:    api.MediaTypeDoc,
}

// modelConfig is as much of a model-spec config as follows from the files alone.
type modelConfig struct {
	Descriptor struct{} `json:"descriptor"`
	ModelFS    struct {
		Type    string            `json:"type"`
		DiffIDs []identity.Digest `json:"diffIds"`
	} `json:"modelfs"`
	Config struct {
		Format string `json:"format"`
	} `json:"config"`
}

// describe uploads the config and returns the manifest. Nothing in either depends on time, place or order of work.
func (p *push) describe(ctx context.Context, layers []layer, base identity.Manifest, annotations map[string]string) (
	[]byte, error,
) {
	slices.SortFunc(layers, func(a, b layer) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	var mc modelConfig
	mc.ModelFS.Type, mc.Config.Format = "layers", "safetensors"
	m := v1.Manifest{
		Versioned:    specs.Versioned{SchemaVersion: 2},
		MediaType:    v1.MediaTypeImageManifest,
		ArtifactType: api.ArtifactTypeBase,
		Annotations:  map[string]string{},
	}
	for _, l := range layers {
		mc.ModelFS.DiffIDs = append(mc.ModelFS.DiffIDs, l.digest)
		m.Layers = append(m.Layers, v1.Descriptor{
			MediaType: mediaTypes[l.Kind], Digest: godigest.Digest(l.digest.String()), Size: l.Size,
			Annotations: map[string]string{v1.AnnotationTitle: l.Name, api.AnnotationFilepath: l.Name},
		})
	}
	config, err := json.Marshal(mc)
	if err != nil {
		return nil, err
	}
	d := identity.Sum(config)
	if err := p.u.push(ctx, blob{"model config", d, int64(len(config)), text(config)}); err != nil {
		return nil, err
	}
	m.Config = v1.Descriptor{
		MediaType: api.MediaTypeModelConfig, Digest: godigest.Digest(d.String()), Size: int64(len(config)),
	}
	for k, v := range annotations {
		m.Annotations[k] = v
	}
	m.Annotations[api.AnnotationKind] = string(api.KindBase)
	m.Annotations[api.AnnotationAggregate] = base.Aggregate.String()
	doc, err := json.Marshal(m)
	if err == nil && len(doc) > api.MaxManifestBytes {
		err = fmt.Errorf("manifest of %d files has %d bytes, more than the %d that registries take",
			len(layers), len(doc), api.MaxManifestBytes)
	}
	return doc, err
}
