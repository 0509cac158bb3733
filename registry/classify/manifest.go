// Package classify says what a pushed manifest is: which blobs it needs, and, from its descriptors and a few bytes of
// its blobs, what kind of artifact it is and which set of shards it holds. It trusts no name and no annotation where it
// can look at bytes, and reads no weights.
package classify

import (
	"errors"
	"fmt"
	"math"
	"mime"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// Docker's names of the two manifest types.
const (
	mediaTypeDockerManifest = "application/vnd.docker.distribution.manifest.v2+json"
	mediaTypeDockerList     = "application/vnd.docker.distribution.manifest.list.v2+json"
	mediaTypeDockerForeign  = "application/vnd.docker.image.rootfs.foreign.diff.tar.gzip"
)

// Manifest is an image manifest or an image index, checked and without what a registry has no use for.
type Manifest struct {
	MediaType    string
	ArtifactType string       // as it stands in the manifest
	Config       Descriptor   // zero for an index
	Layers       []Descriptor // of an image manifest
	Children     []Descriptor // of an index
	Subject      identity.Digest
	Annotations  map[string]string

	named *named // of a parsed manifest; nil: not kept
}

// Descriptor is a descriptor of a manifest.
type Descriptor struct {
	MediaType   string
	Digest      identity.Digest
	Size        int64 // bytes, never negative
	Annotations map[string]string
}

// IsIndex says whether the manifest lists other manifests.
func (m Manifest) IsIndex() bool {
	return m.MediaType == v1.MediaTypeImageIndex || m.MediaType == mediaTypeDockerList
}

// ReferrerType is the artifact type under which the manifest is listed as a referrer: its own, else its config's.
func (m Manifest) ReferrerType() string {
	if m.ArtifactType != "" {
		return m.ArtifactType
	}
	return m.Config.MediaType
}

// Blobs returns the descriptors of the blobs that a repository must hold to take the manifest: config and layers,
// except those that may not be distributed.
func (m Manifest) Blobs() []Descriptor {
	if m.IsIndex() {
		return nil
	}
	need := []Descriptor{m.Config}
	for _, d := range m.Layers {
		if !d.nondistributable() {
			need = append(need, d)
		}
	}
	return need
}

// Refers returns the digests of Blobs. Nothing that a repository was not seen to hold may be in it, as it makes blobs
// visible: neither the children of an index nor layers that may not be distributed are.
func (m Manifest) Refers() []identity.Digest {
	var out []identity.Digest
	for _, d := range m.Blobs() {
		out = append(out, d.Digest)
	}
	return out
}

// Lists returns the digests of the manifests that an index lists.
func (m Manifest) Lists() (out []identity.Digest) {
	for _, d := range m.Children {
		out = append(out, d.Digest)
	}
	return out
}

// Name is the file name that the descriptor gives its blob, unchecked; empty if there is none or there are two.
func (d Descriptor) Name() string {
	name, _ := api.LayerName(d.Annotations)
	return name
}

func (d Descriptor) nondistributable() bool {
	return strings.HasPrefix(d.MediaType, "application/vnd.oci.image.layer.nondistributable.v1.tar") ||
		d.MediaType == mediaTypeDockerForeign
}

// The limits of what a manifest is made of. Nothing that a model is described with comes near: a manifest of
// api.MaxManifestBytes has as many annotations only if they have 64 bytes each, and as many members only if those have
// 16. Without them it could take twenty times its size in memory.
const (
	MaxAnnotations = 1 << 16 // of the manifest and of its descriptors together
	MaxMembers     = 1 << 18 // of all JSON objects together
)

// Parse reads a manifest that was sent with a content type, which may be empty if the manifest names its own. Every
// error is api.ErrManifestInvalid.
func Parse(contentType string, body []byte) (Manifest, error) {
	return parsed(parse(contentType, body, MaxAnnotations, MaxMembers))
}

// ParseTaken is Parse for a manifest that was taken before, perhaps when there were no limits.
func ParseTaken(contentType string, body []byte) (Manifest, error) {
	return parsed(parse(contentType, body, 0, 0))
}

func parsed(m Manifest, err error) (Manifest, error) {
	if err != nil {
		return Manifest{}, api.Errorf(api.CodeManifestInvalid, "manifest: %v", err)
	}
	return m, nil
}

// document is a manifest as it stands in the text.
type document struct {
	version                 uint64
	mediaType, artifactType string
	config, subject         *Descriptor
	layers, manifests       []Descriptor
	annotations             map[string]string
	hasLayers, hasManifests bool
	notes, maxNotes         int // annotations so far, and at most; 0: any number
}

func parse(contentType string, body []byte, maxNotes, maxMembers int) (Manifest, error) {
	doc := document{maxNotes: maxNotes}
	err := strictjson.Read(body, func(r *strictjson.Reader) error {
		r.Limit(maxMembers)
		return r.Object(func(name string) error { return doc.member(r, name) })
	})
	if err != nil {
		return Manifest{}, err
	}
	m := Manifest{ArtifactType: doc.artifactType, Annotations: doc.annotations}
	if m.MediaType, err = mediaType(contentType, doc.mediaType); err != nil {
		return m, err
	}
	if doc.subject != nil {
		m.Subject = doc.subject.Digest
	}
	switch {
	case doc.version != 2:
		return m, fmt.Errorf("schemaVersion is %d, want 2", doc.version)
	case m.IsIndex() && (doc.config != nil || doc.hasLayers):
		return m, errors.New("an index has no config and no layers")
	case m.IsIndex():
		m.Children = doc.manifests
		return m, nil
	case doc.hasManifests:
		return m, errors.New("an image manifest has no manifests")
	case doc.config == nil:
		return m, errors.New("config is missing")
	}
	m.Config, m.Layers, m.named = *doc.config, doc.layers, &named{layers: doc.layers}
	return m, nil
}

// member reads one member. Null is taken as absent; members that are not known here may hold anything.
func (doc *document) member(r *strictjson.Reader, name string) (err error) {
	if r.Kind() == strictjson.Null {
		return r.Skip()
	}
	switch name {
	case "schemaVersion":
		doc.version, err = r.Uint64()
	case "mediaType":
		doc.mediaType, err = r.String()
	case "artifactType":
		doc.artifactType, err = r.String()
	case "config":
		doc.config, err = doc.descriptor(r)
	case "subject":
		doc.subject, err = doc.descriptor(r)
	case "layers":
		doc.hasLayers = true
		doc.layers, err = doc.descriptors(r)
	case "manifests":
		doc.hasManifests = true
		doc.manifests, err = doc.descriptors(r)
	case "annotations":
		doc.annotations, err = doc.readAnnotations(r)
	default:
		err = r.Skip()
	}
	return err
}

// mediaType brings the content type of the request and the media type in the document together.
func mediaType(contentType, own string) (string, error) {
	sent := own
	if contentType != "" {
		t, _, err := mime.ParseMediaType(contentType)
		if err != nil {
			return "", fmt.Errorf("content type %.80q: %w", contentType, err)
		}
		sent = t
	}
	switch {
	case own != "" && own != sent:
		return "", fmt.Errorf("sent as %.80q, but its mediaType is %.80q", sent, own)
	case sent == "":
		return "", errors.New("neither a content type nor a mediaType says what it is")
	}
	switch sent {
	case v1.MediaTypeImageManifest, v1.MediaTypeImageIndex, mediaTypeDockerManifest, mediaTypeDockerList:
		return sent, nil
	}
	return "", fmt.Errorf("media type %.80q is not taken: want an OCI or Docker image manifest or index", sent)
}

func (doc *document) descriptors(r *strictjson.Reader) (out []Descriptor, err error) {
	err = r.Array(func(int) error {
		d, err := doc.descriptor(r)
		if err != nil {
			return err
		}
		out = append(out, *d)
		return nil
	})
	return out, err
}

func (doc *document) descriptor(r *strictjson.Reader) (*Descriptor, error) {
	var d Descriptor
	var digest string
	hasSize := false
	at := r.Offset()
	err := r.Object(func(name string) (err error) {
		switch name {
		case "mediaType":
			d.MediaType, err = r.String()
		case "digest":
			digest, err = r.String()
		case "size":
			hasSize = true
			d.Size, err = size(r)
		case "annotations":
			if r.Kind() == strictjson.Null {
				return r.Skip()
			}
			d.Annotations, err = doc.readAnnotations(r)
		default:
			err = r.Skip()
		}
		return err
	})
	if err != nil {
		return nil, err
	}
	if d.MediaType == "" || !hasSize {
		return nil, r.Fail(at, "descriptor", "descriptor without mediaType or size")
	}
	if d.Digest, err = identity.ParseDigest(digest); err != nil {
		return nil, r.Fail(at, "descriptor", "%v", err)
	}
	if d.Digest.IsZero() {
		return nil, r.Fail(at, "descriptor", "digest %s stands for no content", digest)
	}
	return &d, nil
}

func size(r *strictjson.Reader) (int64, error) {
	at := r.Offset()
	n, err := r.Uint64()
	if err == nil && n > math.MaxInt64 {
		err = r.Fail(at, "descriptor", "size %d is too large", n)
	}
	return int64(n), err
}

func (doc *document) readAnnotations(r *strictjson.Reader) (map[string]string, error) {
	out := map[string]string{}
	err := r.Object(func(name string) (err error) {
		if doc.notes++; doc.maxNotes > 0 && doc.notes > doc.maxNotes {
			return r.Fail(r.Offset(), "annotations", "more than %d annotations in all", doc.maxNotes)
		}
		out[name], err = r.String()
		return err
	})
	return out, err
}
