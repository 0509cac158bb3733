package classify

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
)

const indexName = safetensors.IndexName

// Blobs is what classification reads of blobs. The bytes of a blob are at most the first nine, or, for a shard index
// and a document, the whole of it.
type Blobs interface {
	Open(ctx context.Context, d identity.Digest, off, n int64) (io.ReadCloser, error)
}

// Artifact is what a manifest turned out to be.
type Artifact struct {
	Kind      api.Kind           // empty: none that this project knows
	State     api.ContentState   // how far the base shards are known
	Shards    identity.Manifest  // of a base whose state is direct; zero otherwise
	Packaging identity.Digest    // of a base: over the names and digests of the files beside the shards
	Claim     identity.Aggregate // what the manifest's annotation says about the base; zero: nothing
	Base      identity.Aggregate // of the base that the artifact is, or was made from; zero: not known
	Evidence  api.Evidence       // for that, unless it is the base
	Facts     api.Facts          // what the documents inside say
}

// Bases are those from which an artifact was made beside Base, by the same evidence: those of outcome rows.
func (a Artifact) Bases() (others []identity.Aggregate) {
	if e := a.Facts.Eval; e != nil {
		for _, b := range e.Bases {
			if b.Aggregate != a.Base {
				others = append(others, b.Aggregate)
			}
		}
	}
	return others
}

// beside leaves out of claims about the base those behind the first that name one of several bases which the artifact has
// rows of: such a claim agrees, and says less.
func (a Artifact) beside(first claim, others ...claim) []claim {
	if e := a.Facts.Eval; e != nil && len(e.Bases) > 0 {
		others = slices.DeleteFunc(others, func(c claim) bool {
			return slices.ContainsFunc(e.Bases, func(b api.EvalBase) bool { return b.Aggregate == c.base })
		})
	}
	return append([]claim{first}, others...)
}

// Classify says what an image manifest is. For an index the answer is an artifact of no kind, and nothing binds what is
// of no kind to a base. A manifest that contradicts itself, or what its blobs hold, is api.ErrManifestInvalid; every
// other error is one of reading blobs.
func Classify(ctx context.Context, blobs Blobs, m Manifest) (Artifact, error) {
	a := Artifact{State: api.ContentNone, Evidence: api.EvidenceNone}
	var err error
	if s, ok := m.Annotations[api.AnnotationAggregate]; ok {
		if a.Claim, err = identity.ParseAggregate(s); err != nil {
			return a, api.Errorf(api.CodeManifestInvalid, "annotation %s: %v", api.AnnotationAggregate, err)
		}
		if a.Claim.IsZero() {
			return a, api.Errorf(api.CodeManifestInvalid, "annotation %s: %s is no aggregate: leave it out where the "+
				"base is not known", api.AnnotationAggregate, s)
		}
	}
	files, err := filesOf(m)
	if err != nil || m.IsIndex() {
		return a, err
	}
	if err := files.checkPacked(); err != nil {
		return a, err
	}
	if a.Kind, err = kindOf(m, files); err != nil {
		return a, err
	}
	switch a.Kind {
	case api.KindEval, api.KindReceipt, api.KindStatement:
		if err := files.checkSole(a.Kind, m.Layers); err != nil {
			return a, err
		}
	}
	if readers[a.Kind] != nil {
		return a, a.readDocuments(ctx, blobs, m, files)
	}
	if err := a.selectShards(ctx, blobs, m, files); err != nil || a.Kind != api.KindBase {
		return a, err
	}
	a.Base = a.Shards.Aggregate
	return a, a.checkBase()
}

// kindOf is the kind that the manifest says it is of, else the one that its files show; a base shows only later.
func kindOf(m Manifest, all files) (api.Kind, error) {
	k, err := declaredKind(m)
	if err != nil || k != "" {
		return k, err
	}
	if k = all.guess(); k == api.KindReceipt && all.checkSole(k, m.Layers) != nil {
		k = "" // nobody says that it is one, so it need not be
	}
	return k, nil
}

// checkBase refuses a base that is not what it says it is.
func (a Artifact) checkBase() error {
	switch {
	case a.Kind != api.KindBase || a.State == api.ContentPending:
		return nil
	case a.State == api.ContentNone:
		return api.Errorf(api.CodeManifestInvalid, "the manifest says that it is a base, but holds no safetensors shard")
	case a.Claim.IsZero() || a.State == api.ContentDirect && a.Claim == a.Shards.Aggregate:
		return nil
	}
	derived := "none: the shard set is " + string(a.State)
	if a.State == api.ContentDirect {
		derived = a.Shards.Aggregate.String()
	}
	return Conflict(a.Claim.String(), derived)
}

// Conflict is the refusal of a manifest whose claim about its base is not what the registry finds.
func Conflict(claimed, derived string) error {
	return disagree(api.CodeAggregateConflict, claimed, "annotation "+api.AnnotationAggregate, derived, "the shards")
}

// ownTypes are the artifact types that say the kind.
var ownTypes = map[string]api.Kind{
	api.ArtifactTypeAdapter:    api.KindAdapter,
	api.ArtifactTypeCheckpoint: api.KindCheckpoint,
	api.ArtifactTypeEval:       api.KindEval,
	api.ArtifactTypeReceipt:    api.KindReceipt,
	api.ArtifactTypeStatement:  api.KindStatement,
}

// declaredKind is the kind that the manifest says it is of: by artifact type or by annotation, which must agree.
func declaredKind(m Manifest) (api.Kind, error) {
	byType := ownTypes[m.ArtifactType]
	said, ok := m.Annotations[api.AnnotationKind]
	if !ok {
		return byType, nil
	}
	k := api.Kind(said)
	if !k.Known() {
		return "", api.Errorf(api.CodeManifestInvalid, "annotation %s: %.80q is no kind", api.AnnotationKind, said)
	}
	if byType != "" && byType != k {
		return "", api.Errorf(api.CodeManifestInvalid, "artifact type %s is of kind %s, but annotation %s says %s",
			m.ArtifactType, byType, api.AnnotationKind, k)
	}
	return k, nil
}

// file is a layer with its name.
type file struct {
	Descriptor
	name string
	at   int  // among the layers
	raw  bool // the blob is the file, byte for byte
}

// files are the named layers of a manifest, by name.
type files map[string]file

// TextSize returns the size in bytes of the texts that Classify may read and hold together: of a shard index, or of up to
// four documents; 0 if there is none.
func (m Manifest) TextSize() (size int64) {
	all, err := filesOf(m)
	if err != nil || m.IsIndex() {
		return 0
	}
	kind, err := kindOf(m, all)
	if err != nil {
		return 0
	}
	texts, limit := all.texts(kind)
	var largest [4]int64 // an adapter has so many: its manifest, config, receipt, and a checkpoint manifest beside them
	for _, f := range texts {
		if f.Size <= limit && f.Size > largest[0] { // larger ones are not read
			largest[0] = f.Size
			slices.Sort(largest[:])
		}
	}
	for _, n := range largest {
		size += n
	}
	return size
}

// named are the named layers of a manifest, found when somebody first asks for them.
type named struct {
	once   sync.Once
	layers []Descriptor
	files  files
	err    error
}

// filesOf returns the named layers, which nobody may change. A name that could be misused, or that two layers share,
// refuses the manifest.
func filesOf(m Manifest) (files, error) {
	n := m.named
	if n == nil || len(n.layers) != len(m.Layers) || len(m.Layers) > 0 && &n.layers[0] != &m.Layers[0] {
		return findFiles(m.Layers)
	}
	n.once.Do(func() { n.files, n.err = findFiles(n.layers) })
	return n.files, n.err
}

func findFiles(layers []Descriptor) (files, error) {
	out := make(files, len(layers))
	for i, d := range layers {
		name, err := api.LayerName(d.Annotations)
		if err != nil {
			return nil, api.Errorf(api.CodeManifestInvalid, "layers[%d]: %v", i, err)
		}
		if name == "" {
			continue
		}
		if _, twice := out[name]; twice {
			return nil, api.Errorf(api.CodeManifestInvalid, "layers[%d]: file name %q occurs twice", i, name)
		}
		out[name] = file{d, name, i, isRaw(d, name)}
	}
	return out, nil
}

// isRaw says whether the layer's blob is the file itself. Clients that push single files label them as plain tar
// layers, so that type alone can't tell; a name, and no note to unpack, can.
func isRaw(d Descriptor, name string) bool {
	mediaType := essence(d.MediaType)
	switch {
	case !d.plain():
		return false
	case mediaType == v1.MediaTypeImageLayer:
		return name != ""
	case strings.HasSuffix(mediaType, ".raw"):
		return true
	}
	switch mediaType {
	case "application/octet-stream", "application/vnd.docker.ai.safetensors",
		"application/vnd.cncf.model.weight.v1.safetensors":
		return true
	}
	return false
}

// isArchive says whether the layer may hold files that the registry has not looked at.
func isArchive(d Descriptor) bool {
	return strings.Contains(essence(d.MediaType), ".tar") || d.Annotations[api.AnnotationOrasUnpack] == "true"
}

func (f files) hasAdapter() bool {
	_, config := f["adapter_config.json"]
	_, weights := f["adapter_model.safetensors"]
	return config || weights
}

// selectShards derives the shard set as the loader would choose it, and the kind if it is still open.
func (a *Artifact) selectShards(ctx context.Context, blobs Blobs, m Manifest, all files) error {
	chosen, err := choose(ctx, blobs, all, len(m.Layers))
	switch {
	case err != nil:
		return err
	case chosen.state == api.ContentNone:
		if slices.ContainsFunc(m.Layers, func(d Descriptor) bool {
			return isArchive(d) && !isRaw(d, d.Name())
		}) {
			a.State = api.ContentPending
		}
		return nil
	}
	a.Kind, a.State = api.KindBase, chosen.state
	a.Packaging, a.Facts.Packed = packaging(m.Layers, chosen.layers), packed(m.Layers)
	if a.State != api.ContentDirect {
		return nil
	}
	if a.Shards, err = identity.New(chosen.shards); err != nil {
		return api.Errorf(api.CodeManifestInvalid, "shards: %v", err)
	}
	return nil
}

// choice is the outcome of a selection: none, or a set of files that is direct, pending or incomplete.
type choice struct {
	state  api.ContentState
	shards []identity.Shard
	layers []bool // by number: it is one of the shards
}

// entries returns the files at the top in the order of the so many layers, which as a rule is that of their names.
func (f files) entries(layers int) []safetensors.Entry {
	all := make([]safetensors.Entry, layers)
	for name, d := range f {
		if !strings.Contains(name, "/") {
			all[d.at] = safetensors.Entry{Name: name, Mode: safetensors.Regular, Size: d.Size}
		}
	}
	return slices.DeleteFunc(all, func(e safetensors.Entry) bool { return e.Name == "" })
}

func choose(ctx context.Context, blobs Blobs, all files, layers int) (choice, error) {
	var failed error // of reading, which says nothing about the content
	sel, err := safetensors.Choose(all.entries(layers), func() ([]byte, error) {
		b, err := readIndex(ctx, blobs, all)
		failed = err
		return b, err
	})
	var refused *safetensors.Error
	switch {
	case failed != nil:
		return choice{}, failed
	case errors.As(err, &refused) && refused.Code == safetensors.CodeNoShards:
		return choice{state: api.ContentNone}, nil
	case errors.As(err, &refused):
		return choice{state: api.ContentIncomplete, layers: make([]bool, layers)}, nil
	case err != nil:
		return choice{}, err
	}
	c := choice{api.ContentDirect, make([]identity.Shard, 0, len(sel.Shards)), make([]bool, layers)}
	for _, name := range sel.Shards {
		f := all[name]
		c.shards = append(c.shards, identity.Shard{Filename: name, Size: uint64(f.Size), Digest: f.Digest})
		c.layers[f.at] = true
		ok := false
		if f.raw {
			if ok, err = looksRight(ctx, blobs, f); err != nil {
				return choice{}, err
			}
		}
		switch {
		case ok || c.state == api.ContentIncomplete:
		case f.nondistributable():
			c.state = api.ContentIncomplete
		case !f.raw || isArchive(f.Descriptor): // nobody has looked into it yet
			c.state = api.ContentPending
		default:
			c.state = api.ContentIncomplete
		}
	}
	return c, nil
}

// readIndex reads the shard index. One that is too large, or in an archive, is read as empty: it is no index then.
func readIndex(ctx context.Context, blobs Blobs, all files) ([]byte, error) {
	f, ok := all[indexName]
	if !ok || !f.raw || f.Size > api.MaxIndexDocumentBytes {
		return nil, nil
	}
	r, err := blobs.Open(ctx, f.Digest, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b, err := io.ReadAll(io.LimitReader(r, api.MaxIndexDocumentBytes+1))
	if err != nil {
		return nil, fmt.Errorf("read shard index: %w", err)
	}
	return b, nil
}

// looksRight says whether a blob begins as a safetensors file, and not as a mislabelled archive or a file of zeros does.
// Unless that was seen when it came, it reads it.
func looksRight(ctx context.Context, blobs Blobs, f file) (bool, error) {
	if f.Size <= headLen {
		return false, nil
	}
	if s, ok := blobs.(seen); ok && s.Safetensors(f.Digest) {
		return true, nil
	}
	r, err := blobs.Open(ctx, f.Digest, 0, headLen)
	if err != nil {
		return false, err
	}
	defer r.Close()
	var head Head
	switch head.n, err = io.ReadFull(r, head.b[:]); err {
	case nil:
	case io.EOF, io.ErrUnexpectedEOF: // the blob has become shorter than its descriptor, which was checked, says
		return false, nil
	default:
		return false, fmt.Errorf("read the head of %s: %w", f.name, err)
	}
	return head.isSafetensors(f.Size), nil
}

// packaging hashes the names and digests of the files beside the shards, which are layers. The shard index is no such
// file: it only repeats how the shards are called. Of a layer that is no file as it is, the type counts, too: whoever
// packs a file makes another packaging, and whoever adds what has no name.
func packaging(layers []Descriptor, shards []bool) identity.Digest {
	var lines []string
	for i, d := range layers {
		name := d.Name()
		switch {
		case shards[i], name == indexName, name == "" && d.MediaType == v1.MediaTypeEmptyJSON:
		case name == "", !d.plain():
			lines = append(lines, name+"\x00"+d.Digest.String()+"\x00"+essence(d.MediaType)+"\n")
		default:
			lines = append(lines, name+"\x00"+d.Digest.String()+"\n")
		}
	}
	slices.Sort(lines)
	return identity.Sum([]byte("kiln.packaging.v1\x00" + strings.Join(lines, "")))
}

// packed returns the first layers that are no files as they are: by name, without one by their place.
func packed(layers []Descriptor) (names []string) {
	for i, d := range layers {
		name := d.Name()
		switch {
		case len(names) == maxPacked || name == "" && d.MediaType == v1.MediaTypeEmptyJSON:
		case name == "":
			names = append(names, fmt.Sprintf("layers[%d]", i))
		case !d.plain():
			names = append(names, label(name))
		}
	}
	return names
}
