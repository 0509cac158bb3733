package rig

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

// Blob is the content of a blob that can be made again: a safetensors file of one tensor, from a seed.
type Blob struct {
	seed   uint64
	Size   int // of the tensor, bytes; negative: it is an empty JSON object instead
	Digest identity.Digest
	Length int64 // of the whole, bytes
}

// newBlob makes a blob. The same seed and size make the same one.
func newBlob(seed uint64, size int) Blob {
	b := Blob{seed: seed, Size: size}
	whole := b.Bytes()
	b.Digest, b.Length = identity.Sum(whole), int64(len(whole))
	return b
}

// Bytes makes the content.
func (b Blob) Bytes() []byte {
	if b.Size < 0 {
		return []byte("{}")
	}
	head := fmt.Sprintf(`{"w":{"dtype":"U8","shape":[%d],"data_offsets":[0,%d]}}`, b.Size, b.Size)
	whole := make([]byte, 8+len(head)+b.Size)
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

// Manifest is a manifest that a client made.
type Manifest struct {
	Repo      string
	Digest    identity.Digest
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

// manifest makes the bytes of a document for a repository.
func (d document) manifest(repo string) (m Manifest, err error) {
	d.SchemaVersion, d.MediaType = 2, imageType
	if len(d.Manifests) > 0 {
		d.MediaType = indexType
	} else {
		d.Config = &descriptor{MediaType: "application/vnd.oci.empty.v1+json", Digest: empty.Digest, Size: empty.Length}
	}
	m = Manifest{Repo: repo, mediaType: d.MediaType}
	if m.body, err = json.Marshal(d); err != nil {
		return m, err
	}
	m.Digest = identity.Sum(m.body)
	if d.Subject != nil {
		m.subject = d.Subject.Digest
	}
	return m, nil
}

// descriptor is how another manifest refers to it.
func (m Manifest) descriptor() *descriptor {
	return &descriptor{MediaType: m.mediaType, Digest: m.Digest, Size: int64(len(m.body))}
}

// baseOf makes the manifest of a base of shards. Nobody else makes one of that digest.
func baseOf(repo, mark string, shards []Blob) (Manifest, error) {
	d := document{ArtifactType: api.ArtifactTypeBase, Annotations: map[string]string{"mark": mark}}
	var set []identity.Shard
	for i, b := range shards {
		name := fmt.Sprintf("model-%05d-of-%05d.safetensors", i+1, len(shards))
		d.Layers = append(d.Layers, descriptor{api.MediaTypeWeight, b.Digest, b.Length,
			map[string]string{api.AnnotationFilepath: name, "org.opencontainers.image.title": name}})
		set = append(set, identity.Shard{Filename: name, Size: uint64(b.Length), Digest: b.Digest})
	}
	m, err := d.manifest(repo)
	if err != nil {
		return m, err
	}
	sum, err := identity.New(set)
	m.base = sum.Aggregate
	return m, err
}

// Key is a name of a repository: a tag, or a manifest's digest in text form.
type Key struct{ Repo, Name string }

// Names is what names point to.
type Names map[Key]identity.Digest

// Change is a change of some names, made whole or not at all. A zero digest takes a name away.
type Change map[Key]identity.Digest

func (n Names) apply(c Change) {
	for k, d := range c {
		if d.IsZero() {
			delete(n, k)
		} else {
			n[k] = d
		}
	}
}

// is says whether the names that c changes are as c makes them.
func (n Names) is(c Change) bool {
	for k, d := range c {
		if n[k] != d {
			return false
		}
	}
	return true
}

// namesOf is what an export says.
func namesOf(rows []index.Row) Names {
	n := Names{}
	for _, r := range rows {
		if r.Type == "tag" {
			n[Key{r.Repository, r.Tag}] = r.Digest
		} else {
			n[Key{r.Repository, r.Digest.String()}] = r.Digest
		}
	}
	return n
}

// Place is a blob in a repository.
type Place struct {
	Repo   string
	Digest identity.Digest
}

// Session is an upload that a client began.
type Session struct {
	Repo   string
	At     string // its URL on the server, which stays the same
	Blob   Blob
	Acked  int64 // bytes that the server said it has
	Sent   int64 // bytes that it may have
	Ending bool  // it was asked to end, and there was no good answer

	commits bool // it was asked to end as a blob
	refused bool // the answer was that the server failed
	unsure  bool // where it is has to be asked
}

// Ledger is what one client was told by a registry. Names and manifests in it are this client's own: no other changes
// them.
type Ledger struct {
	Names    Names
	Blobs    map[Place]Blob // held
	Sessions []*Session     // open

	doubts    []Change // asked for, and not known whether they were made
	manifests map[identity.Digest]Manifest
	maybe     map[Place]Blob // asked to be held, or to be held no more
	gone      map[Place]bool // held no more
}

func newLedger() Ledger {
	return Ledger{
		Names: Names{}, manifests: map[identity.Digest]Manifest{},
		Blobs: map[Place]Blob{}, maybe: map[Place]Blob{}, gone: map[Place]bool{},
	}
}

// made notes a change that was acknowledged. It is later than every one in doubt that is about the same names.
func (l *Ledger) made(c Change) {
	l.Names.apply(c)
	for _, d := range l.doubts {
		maps.DeleteFunc(d, func(k Key, _ identity.Digest) bool {
			_, ok := c[k]
			return ok
		})
	}
}

// moving returns the changes in doubt that move names of c elsewhere: where such a change was made, a delete of what the
// name was known to point to leaves it alone.
func (l *Ledger) moving(c Change) (moved []Change) {
	for _, d := range l.doubts {
		for k, to := range d {
			if _, ok := c[k]; ok && to != l.Names[k] {
				moved = append(moved, Change{k: to})
			}
		}
	}
	return moved
}

// settle compares what names point to with what was acknowledged, and takes it for acknowledged from then on where that
// was in doubt: what was once seen must stay. It returns what should be otherwise.
func (l *Ledger) settle(seen Names) (wrong []string) {
	asked := map[Key]int{}
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
				l.Names.apply(Change{k: v})
			}
		}
	}
	l.doubts = nil
	return wrong
}

// before is what the names that c changes were acknowledged to be.
func (l *Ledger) before(c Change) Change {
	was := Change{}
	for k := range c {
		was[k] = l.Names[k]
	}
	return was
}

// held notes that a blob is in a repository.
func (l *Ledger) held(repo string, b Blob) {
	p := Place{repo, b.Digest}
	delete(l.gone, p)
	delete(l.maybe, p)
	l.Blobs[p] = b
}

// Forget notes that the index was made anew: what only it knew is gone.
func (l *Ledger) Forget() {
	clear(l.Blobs)
	clear(l.gone)
	clear(l.maybe)
	l.Sessions = nil
}

// mark makes a text that no other manifest has.
func mark(id int, n uint64) string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%d %d", id, n))
	return fmt.Sprintf("%d-%d-%x", id, n, sum[:4])
}
