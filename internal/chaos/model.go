package main

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"maps"
	"math/rand/v2"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/index"
)

// blob is the content of a blob that can be made again: a safetensors file of one tensor, from a seed.
type blob struct {
	seed   uint64
	size   int // of the tensor, bytes
	digest identity.Digest
	length int64 // of the whole, bytes
}

func newBlob(seed uint64, size int) blob {
	b := blob{seed: seed, size: size}
	whole := b.bytes()
	b.digest, b.length = identity.Sum(whole), int64(len(whole))
	return b
}

func (b blob) bytes() []byte {
	if b.size < 0 {
		return []byte("{}")
	}
	head := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, b.size, b.size)
	whole := make([]byte, 8+len(head)+b.size)
	binary.LittleEndian.PutUint64(whole, uint64(len(head)))
	copy(whole[8:], head)
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], b.seed)
	rand.NewChaCha8(seed).Read(whole[8+len(head):])
	return whole
}

// empty is the config of every manifest, which all clients push everywhere.
var empty = newBlob(0, -1)

// The media types of manifests.
const (
	imageType = "application/vnd.oci.image.manifest.v1+json"
	indexType = "application/vnd.oci.image.index.v1+json"
)

// manifest is a manifest that a client made.
type manifest struct {
	repo      string
	digest    identity.Digest
	mediaType string
	body      []byte
	base      identity.Aggregate // zero: it is no base
	subject   identity.Digest
}

// descriptor is one of a manifest.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      identity.Digest   `json:"digest"`
	Size        int64             `json:"size"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

// document is an image manifest, or an index if it has Manifests.
type document struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	ArtifactType  string            `json:"artifactType,omitempty"`
	Config        *descriptor       `json:"config,omitempty"`
	Layers        []descriptor      `json:"layers,omitempty"`
	Manifests     []descriptor      `json:"manifests,omitempty"`
	Subject       *descriptor       `json:"subject,omitempty"`
	Annotations   map[string]string `json:"annotations"`
}

func (d document) manifest(repo string) (m manifest, err error) {
	d.SchemaVersion, d.MediaType = 2, imageType
	if len(d.Manifests) > 0 {
		d.MediaType = indexType
	} else {
		d.Config = &descriptor{MediaType: "application/vnd.oci.empty.v1+json", Digest: empty.digest, Size: empty.length}
	}
	m = manifest{repo: repo, mediaType: d.MediaType}
	if m.body, err = json.Marshal(d); err != nil {
		return m, err
	}
	m.digest = identity.Sum(m.body)
	if d.Subject != nil {
		m.subject = d.Subject.Digest
	}
	return m, nil
}

func (m manifest) descriptor() *descriptor {
	return &descriptor{MediaType: m.mediaType, Digest: m.digest, Size: int64(len(m.body))}
}

// baseOf makes the manifest of a base of shards. Nobody else makes one of that digest.
func baseOf(repo, mark string, shards []blob) (manifest, error) {
	d := document{ArtifactType: api.ArtifactTypeBase, Annotations: map[string]string{"mark": mark}}
	var set []identity.Shard
	for i, b := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		d.Layers = append(d.Layers, descriptor{api.MediaTypeWeight, b.digest, b.length,
			map[string]string{api.AnnotationFilepath: name, "org.opencontainers.image.title": name}})
		set = append(set, identity.Shard{Filename: name, Size: uint64(b.length), Digest: b.digest})
	}
	m, err := d.manifest(repo)
	if err != nil {
		return m, err
	}
	sum, err := identity.New(set)
	m.base = sum.Aggregate
	return m, err
}

// key is a name of a repository: a tag, or a manifest's digest in text form.
type key struct{ repo, name string }

// names is what names point to.
type names map[key]identity.Digest

// change is a change of some names, made whole or not at all. A zero digest takes a name away.
type change map[key]identity.Digest

func (n names) apply(c change) {
	for k, d := range c {
		if d.IsZero() {
			delete(n, k)
		} else {
			n[k] = d
		}
	}
}

// is says whether the names that c changes are as c makes them.
func (n names) is(c change) bool {
	for k, d := range c {
		if n[k] != d {
			return false
		}
	}
	return true
}

// namesOf is what an export says.
func namesOf(rows []index.Row) names {
	n := names{}
	for _, r := range rows {
		if r.Type == "tag" {
			n[key{r.Repository, r.Tag}] = r.Digest
		} else {
			n[key{r.Repository, r.Digest.String()}] = r.Digest
		}
	}
	return n
}

// place is a blob in a repository.
type place struct {
	repo   string
	digest identity.Digest
}

// session is an upload that a client began.
type session struct {
	repo, at string // at is its URL on the server, which stays the same
	blob     blob
	acked    int64 // bytes that the server said it has
	sent     int64 // bytes that it may have
	ending   bool  // it was asked to end, and there was no answer
	commits  bool  // as a blob
	refused  bool  // as the server failed
	unsure   bool  // where it is has to be asked
}

// ledger is what one client was told by a registry. Names and manifests in it are this client's own: no other changes
// them.
type ledger struct {
	names     names
	doubts    []change // asked for, and not known whether they were made
	manifests map[identity.Digest]manifest
	blobs     map[place]blob // held
	maybe     map[place]blob // asked to be held, or to be held no more
	gone      map[place]bool // held no more
	sessions  []*session
}

func newLedger() ledger {
	return ledger{
		names: names{}, manifests: map[identity.Digest]manifest{},
		blobs: map[place]blob{}, maybe: map[place]blob{}, gone: map[place]bool{},
	}
}

// made notes a change that was acknowledged. It is later than every one in doubt that is about the same names.
func (l *ledger) made(c change) {
	l.names.apply(c)
	for _, d := range l.doubts {
		maps.DeleteFunc(d, func(k key, _ identity.Digest) bool {
			_, ok := c[k]
			return ok
		})
	}
}

// settle compares what names point to with what was acknowledged, and takes it for acknowledged from then on where that
// was in doubt: what was once seen must stay. It returns what should be otherwise.
func (l *ledger) settle(seen names) (wrong []string) {
	asked := map[key]int{}
	for _, d := range l.doubts {
		for k := range d {
			asked[k]++
		}
	}
	for _, d := range l.doubts {
		alone := true
		for k := range d {
			alone = alone && asked[k] == 1
		}
		if alone && !seen.is(d) && !seen.is(l.before(d)) {
			wrong = append(wrong, fmt.Sprintf("half of a change is there: %v", d))
		}
	}
	for _, d := range l.doubts {
		for k, v := range d {
			if seen[k] == v {
				l.names.apply(change{k: v})
			}
		}
	}
	l.doubts = nil
	return wrong
}

// before is what the names that c changes were acknowledged to be.
func (l *ledger) before(c change) change {
	was := change{}
	for k := range c {
		was[k] = l.names[k]
	}
	return was
}

// held notes that a blob is in a repository.
func (l *ledger) held(repo string, b blob) {
	p := place{repo, b.digest}
	delete(l.gone, p)
	delete(l.maybe, p)
	l.blobs[p] = b
}

// forget notes that the index was made anew: what only it knew is gone.
func (l *ledger) forget() {
	clear(l.blobs)
	clear(l.gone)
	clear(l.maybe)
	l.sessions = nil
}

// mark makes a text that no other manifest has.
func mark(id int, n uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %d", id, n))
	return fmt.Sprintf("%d-%d-%x", id, n, sum[:4])
}
