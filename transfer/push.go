package transfer

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"sync"
	"sync/atomic"

	godigest "github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/lanes"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxUploads is how many blobs are sent at a time; more connections do not help a link, and cost the registry buffers.
const maxUploads = 4

// pushStreams is how many files are hashed at a time on a core, as long as there may be something to send: with more,
// which takes less of the core, the first of them would be done, and sent, later.
const pushStreams = 4

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
	p := &push{f: f, u: NewUploader(c, ref.Repo, o.Watch), taken: map[identity.Digest]bool{}}
	layers, base, err := p.run(ctx)
	if err != nil {
		return Pushed{}, err
	}
	pushed = Pushed{Identity: base.Summary(), Files: len(layers), Warnings: f.Warnings}
	pushed.Digest, pushed.Reference, err = p.u.Put(ctx, artifactOf(layers, base, o.Annotations), ref.Tag)
	pushed.Sent = p.u.Sent()
	return pushed, err
}

// artifactOf is the artifact that a base model becomes.
func artifactOf(layers []layer, base identity.Manifest, annotations map[string]string) Artifact {
	a := Artifact{Type: api.ArtifactTypeBase, Model: true, Annotations: map[string]string{}}
	for _, l := range layers {
		a.Layers = append(a.Layers, Layer{Name: l.Name, Kind: l.Kind, Digest: l.digest, Size: l.Size})
	}
	maps.Copy(a.Annotations, annotations)
	a.Annotations[api.AnnotationKind] = string(api.KindBase)
	a.Annotations[api.AnnotationAggregate] = base.Aggregate.String()
	return a
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
	u     *Uploader
	there atomic.Int32 // blobs that the registry has now
	mu    sync.Mutex
	taken map[identity.Digest]bool // blobs that somebody is seeing to
}

// layer is one file of the artifact.
type layer struct {
	folder.File
	digest identity.Digest
}

// run hashes and uploads all files: the small ones that lie beside the shards first, then the shards. While some are
// sent, others are hashed.
func (p *push) run(ctx context.Context) ([]layer, identity.Manifest, error) {
	order := slices.Concat(p.f.Others, p.f.Shards)
	slices.SortFunc(order, func(a, b folder.File) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Name, b.Name))
	})
	layers := make([]layer, len(order))
	for i, file := range order {
		layers[i].File = file
		p.u.watch.tell(Event{Step: Planned, Phase: PhaseHash, File: file.Name, Total: file.Size})
	}
	g, ctx := errgroup.WithContext(ctx)
	sending := make(chan struct{}, maxUploads)
	g.Go(func() error {
		return p.f.HashAll(ctx, order, folder.Hashing{
			Streams: p.streams,
			Moved:   func(i int, n int64) { p.hashed(Moved, order[i], n) },
			Done: func(i int, h folder.Hashed) {
				l := &layers[i]
				l.digest = h.Digest
				p.hashed(Done, l.File, l.Size)
				if p.take(l.digest) {
					g.Go(func() error { return within(ctx, sending, func() error { return p.send(ctx, l) }) })
				}
			},
		})
	})
	if err := g.Wait(); err != nil {
		return nil, identity.Manifest{}, err
	}
	base, err := baseOf(layers)
	return layers, base, err
}

// rank puts shards behind all else, and large ones before small ones: so the last ones to be hashed are short.
func rank(f folder.File) int64 {
	if f.Kind == folder.Weight {
		return math.MaxInt64 - f.Size
	}
	return math.MinInt64 + f.Size
}

func (p *push) hashed(s Step, f folder.File, n int64) {
	p.u.watch.tell(Event{Step: s, Phase: PhaseHash, File: f.Name, Bytes: n, Total: f.Size})
}

func (p *push) send(ctx context.Context, l *layer) error {
	err := p.u.Send(ctx, Blob{l.Name, l.digest, l.Size, OnDisk{p.f, l.File}})
	if err == nil {
		p.there.Add(1)
	}
	return err
}

// streams returns how many files are hashed at a time on a core. If the registry had all that it was asked for, it most
// likely has the rest too.
func (p *push) streams() int {
	if p.there.Load() > 0 && p.u.Sent() == 0 {
		return lanes.Width()
	}
	return pushStreams
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

// OnDisk is a file of a folder as the Source of a blob.
type OnDisk struct {
	Folder *folder.Folder
	File   folder.File
}

// Open implements Source. folder.ErrChanged.
func (d OnDisk) Open() (io.ReadSeekCloser, func() error, error) { return d.Folder.Read(d.File) }

// Layer is one file of an artifact.
type Layer struct {
	Name   string // path in the artifact, with slashes
	Kind   folder.Kind
	Digest identity.Digest
	Size   int64 // bytes
}

// Subject is the manifest that an artifact is about. The zero Subject is none.
type Subject struct {
	MediaType string
	Digest    identity.Digest
	Size      int64 // bytes
}

// Artifact is what Uploader.Put makes a manifest of.
type Artifact struct {
	Type        string // artifact type
	Model       bool   // with a model config; else with the empty one of OCI
	Layers      []Layer
	Subject     Subject
	Annotations map[string]string
}

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

// Put makes an artifact of files that the repository holds: it sends the config and the manifest, and points tag to it
// unless that is empty. Equal artifacts give equal manifests, in whatever order their layers are given. reference names
// it by its digest too. The artifact is durable in the registry when this returns nil. The errors are those of
// client.Client.
func (u *Uploader) Put(ctx context.Context, a Artifact, tag string) (d identity.Digest, reference string, err error) {
	config, doc, err := a.documents()
	if err == nil {
		err = u.Send(ctx, Blob{"config", identity.Sum(config), int64(len(config)), Bytes(config)})
	}
	if err != nil {
		return d, "", err
	}
	d = identity.Sum(doc)
	err = u.c.Retry(ctx, "manifest", func() error {
		_, err := u.c.PutManifest(ctx, u.repo, cmp.Or(tag, d.String()), v1.MediaTypeImageManifest, doc)
		return err
	})
	return d, client.Reference{Host: u.c.Host(), Repo: u.repo, Tag: tag, Digest: d}.String(), err
}

// Digest returns that of the manifest which Put makes of a.
func (a Artifact) Digest() (identity.Digest, error) {
	_, doc, err := a.documents()
	return identity.Sum(doc), err
}

// documents returns the config and the manifest of an artifact.
func (a Artifact) documents() (config, doc []byte, err error) {
	a.Layers = slices.SortedFunc(slices.Values(a.Layers), func(a, b Layer) int {
		return cmp.Or(cmp.Compare(a.Kind, b.Kind), cmp.Compare(a.Name, b.Name))
	})
	mediaType, config, err := a.config()
	if err != nil {
		return nil, nil, err
	}
	doc, err = json.Marshal(a.manifest(descriptor(mediaType, identity.Sum(config), int64(len(config)))))
	if err == nil && len(doc) > api.MaxManifestBytes {
		err = fmt.Errorf("manifest of %d files has %d bytes, more than the %d that registries take",
			len(a.Layers), len(doc), api.MaxManifestBytes)
	}
	return config, doc, err
}

// config returns the config of an artifact, and its media type.
func (a Artifact) config() (mediaType string, config []byte, err error) {
	if !a.Model {
		return v1.MediaTypeEmptyJSON, []byte("{}"), nil
	}
	var mc modelConfig
	mc.ModelFS.Type, mc.Config.Format = "layers", "safetensors"
	for _, l := range a.Layers {
		mc.ModelFS.DiffIDs = append(mc.ModelFS.DiffIDs, l.Digest)
	}
	config, err = json.Marshal(mc)
	return api.MediaTypeModelConfig, config, err
}

// manifest depends on nothing but the artifact: not on time, place or order of work.
func (a Artifact) manifest(config v1.Descriptor) v1.Manifest {
	m := v1.Manifest{
		Versioned:    specs.Versioned{SchemaVersion: 2},
		MediaType:    v1.MediaTypeImageManifest,
		ArtifactType: a.Type,
		Config:       config,
		Annotations:  a.Annotations,
	}
	for _, l := range a.Layers {
		d := descriptor(mediaTypes[l.Kind], l.Digest, l.Size)
		d.Annotations = map[string]string{v1.AnnotationTitle: l.Name, api.AnnotationFilepath: l.Name}
		m.Layers = append(m.Layers, d)
	}
	if s := a.Subject; !s.Digest.IsZero() {
		m.Subject = new(descriptor(s.MediaType, s.Digest, s.Size))
	}
	return m
}

func descriptor(mediaType string, d identity.Digest, size int64) v1.Descriptor {
	return v1.Descriptor{MediaType: mediaType, Digest: godigest.Digest(d.String()), Size: size}
}
