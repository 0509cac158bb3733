package classify

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"slices"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
)

// ErrDamaged: a blob of the store is not what its digest says.
var ErrDamaged = errors.New("blob is damaged")

// rowsExt is the extension of a file of outcome rows.
const rowsExt = ".jsonl"

// claim is what one place says about the base of an artifact.
type claim struct {
	evidence api.Evidence
	base     identity.Aggregate // zero: nothing
	at       string             // where it stands
}

// evidences are the kinds of evidence, weakest first.
var evidences = []api.Evidence{
	"", api.EvidenceNone, api.EvidenceAggregateOnly, api.EvidenceAsserted, api.EvidenceDocument, api.EvidenceSigned,
}

// stronger says whether a claims more than b.
func stronger(a, b api.Evidence) bool { return slices.Index(evidences, a) > slices.Index(evidences, b) }

// said is what a document in a file says about the base.
func said(file string, b documents.Binding) claim {
	return claim{api.Evidence(b.Evidence), b.Aggregate, file + " " + b.Path}
}

// annotated is what the annotation of a manifest says about the base.
func annotated(base identity.Aggregate) claim {
	c := claim{api.EvidenceNone, base, "annotation " + api.AnnotationAggregate}
	if !base.IsZero() {
		c.evidence = api.EvidenceAsserted
	}
	return c
}

// strongest returns the claim that the binding rests on. Two that name different bases refuse the manifest.
func strongest(claims ...claim) (best claim, err error) {
	best.evidence = api.EvidenceNone
	for _, c := range claims {
		if !c.base.IsZero() && !best.base.IsZero() && c.base != best.base {
			return best, disagree(api.CodeAggregateConflict, c.base.String(), c.at, best.base.String(), best.at)
		}
		if stronger(c.evidence, best.evidence) {
			best = c
		}
	}
	return best, nil
}

// disagree refuses a manifest of which two places say different things.
func disagree(why api.Code, claimed, claimedAt, other, otherAt string) error {
	return api.Errorf(api.CodeManifestInvalid, "%s: %s, but %s: %s", claimedAt, claimed, otherAt, other).With(api.Conflict{
		Reason: why, Claimed: claimed, ClaimedAt: claimedAt, Derived: other, DerivedAt: otherAt,
	})
}

// Disagree refuses a manifest of which one place claims another base than a second one.
func Disagree(at string, claimed identity.Aggregate, otherAt string, other identity.Aggregate) error {
	return disagree(api.CodeAggregateConflict, claimed.String(), at, other.String(), otherAt)
}

// read reads the whole of a document. What comes is what the descriptor says, or an error.
func read(ctx context.Context, blobs Blobs, f file, limit int64) ([]byte, error) {
	if f.Size > limit {
		return nil, tooLarge(f, limit)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	r, err := blobs.Open(ctx, f.Digest, 0, -1)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	b := make([]byte, f.Size)
	if _, err = io.ReadFull(r, b); errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) && f.Size > 0 {
		return nil, fmt.Errorf("read %s: %w: %s is shorter than %d bytes", f.name, ErrDamaged, f.Digest, f.Size)
	} else if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read %s: %w", f.name, err)
	}
	if sum := identity.Sum(b); sum != f.Digest {
		return nil, fmt.Errorf("read %s: %w: %s is %s now", f.name, ErrDamaged, f.Digest, sum)
	}
	return b, nil
}

func tooLarge(f file, limit int64) error {
	return api.Errorf(api.CodeManifestInvalid, "%s has %d bytes, at most %d are read of such a document", f.name, f.Size,
		limit).With(api.BadDocument{Reason: api.CodeDocumentInvalid, File: f.name, Rule: documents.RuleInputSize})
}

// readAs reads a document from its file. One that breaks a rule of its format refuses the manifest.
func readAs[T any](m *made, f file, limit int64, parse func([]byte) (T, error)) (v T, err error) {
	text, err := read(m.ctx, m.blobs, f, limit)
	if err != nil {
		return v, err
	}
	m.seen[f.name] = true
	v, err = parse(text)
	return v, refused(f.name, err)
}

// refused turns the error of a reader of documents into the refusal of the manifest. The document is the file.
func refused(name string, err error) error {
	e, ok := errors.AsType[*documents.Error](err)
	switch {
	case !ok:
		return err
	case e.Said != "":
		why := api.CodeDocumentConflict
		if e.Rule == documents.RuleBaseConflict {
			why = api.CodeAggregateConflict
		}
		return disagree(why, e.Said, name+" "+e.Path, e.Other, e.OtherAt)
	}
	return api.Errorf(api.CodeManifestInvalid, "%s: %v", name, e).With(api.BadDocument{
		Reason: api.CodeDocumentInvalid, File: name, Path: e.Path, Rule: e.Rule,
	})
}

// plain says whether the blob of a named layer may be the file itself, byte for byte: whatever its type says, as long as
// that is no archive and no compression. Clients call single documents what they like, and oras any file a tar.
func (d Descriptor) plain() bool {
	switch {
	case d.nondistributable(), d.Annotations[api.AnnotationOrasUnpack] == "true",
		strings.HasPrefix(essence(d.MediaType), "application/vnd.kitops."):
		return false
	}
	return d.MediaType == v1.MediaTypeImageLayer || !api.Encoded(d.MediaType)
}

// essence is a media type as it is compared: in lower case, without parameters.
func essence(mediaType string) string {
	t, _, _ := strings.Cut(mediaType, ";")
	return strings.ToLower(strings.TrimSpace(t))
}

// checkPlain refuses a file whose layer says that it is packed, or is elsewhere. A file that is not there passes.
func (f files) checkPlain(name string) error {
	d, ok := f[name]
	if !ok || d.plain() {
		return nil
	}
	return api.Errorf(api.CodeManifestInvalid, "layers[%d]: %s is of media type %.120q, by which it can't be read: push it "+
		"as it is, as application/octet-stream", d.at, name, d.MediaType).With(
		api.BadDocument{Reason: api.CodeDocumentInvalid, File: name, Rule: documents.RuleFileKind})
}

// checkSole refuses an artifact of a kind that is one document if it has others, in folders as well, or a layer that
// can't be read: clients would find another document than is found here, or none.
func (f files) checkSole(kind api.Kind, layers []Descriptor) error {
	var texts []string
	for i, d := range layers {
		name := d.Name()
		switch {
		case d.MediaType == v1.MediaTypeEmptyJSON:
			continue
		case name == "":
			return api.Errorf(api.CodeManifestInvalid, "layers[%d]: a file of an artifact of kind %s has a name, and this "+
				"one of media type %.120q has none", i, kind, d.MediaType)
		case slices.Contains([]string{".json", rowsExt}, path.Ext(name)):
			texts = append(texts, name)
		}
		if err := f.checkPlain(name); err != nil {
			return err
		}
	}
	if len(texts) < 2 {
		return nil // that there is one is found by its reader
	}
	slices.Sort(texts)
	return api.Errorf(api.CodeManifestInvalid, "an artifact of kind %s is one document, and this has %d: %.300q", kind,
		len(texts), texts).With(api.BadDocument{Reason: api.CodeDocumentInvalid, Rule: documents.RuleFileExtra})
}

// checkPacked refuses a document under a name of Kiln's whose layer says that it is packed, or is elsewhere: clients take
// a layer with a name as the file itself, and would find another artifact than is found here.
func (f files) checkPacked() error {
	for _, name := range []string{
		documents.AdapterManifestFile, documents.AdapterConfigFile, documents.CheckpointFile, documents.ReceiptFile,
	} {
		if err := f.checkPlain(name); err != nil {
			return err
		}
	}
	return nil
}

// document returns the file of a document that stands at the top.
func (f files) document(name string) (file, bool) {
	d, ok := f[name]
	return d, ok && d.plain()
}

// ending returns the plain files at the top whose name has one of the extensions, by name.
func (f files) ending(exts ...string) (found []file) {
	for name, d := range f {
		if slices.Contains(exts, path.Ext(name)) && !strings.Contains(name, "/") && d.plain() {
			found = append(found, d)
		}
	}
	slices.SortFunc(found, func(a, b file) int { return strings.Compare(a.name, b.name) })
	return found
}

// sums returns the digests of the plain files by name.
func (f files) sums() map[string]identity.Digest {
	out := map[string]identity.Digest{}
	for name, d := range f {
		if d.plain() {
			out[name] = d.Digest
		}
	}
	return out
}

// one returns the one document of an artifact that says that it is of a kind.
func (f files) one(kind api.Kind, exts ...string) (file, error) {
	found := f.ending(exts...)
	if len(found) == 1 {
		return found[0], nil
	}
	var names []string
	for _, d := range found {
		names = append(names, d.name)
	}
	return file{}, api.Errorf(api.CodeManifestInvalid, "an artifact of kind %s is one document %s at the top, and this "+
		"has %d: %.300q", kind, strings.Join(exts, " or "), len(found), names).With(
		api.BadDocument{Reason: api.CodeDocumentInvalid, Rule: documents.RuleFileMissing})
}

// needed returns the document of that name, which an artifact of the kind must have.
func (f files) needed(kind api.Kind, name string) (file, error) {
	if d, ok := f.document(name); ok {
		return d, nil
	}
	return file{}, api.Errorf(api.CodeManifestInvalid, "an artifact of kind %s has a file %s at the top, and this has "+
		"none", kind, name).With(api.BadDocument{Reason: api.CodeDocumentInvalid, File: name, Rule: documents.RuleFileMissing})
}

// guess returns the kind of an artifact that does not say it, if its documents do.
func (f files) guess() api.Kind {
	_, checkpoint := f.document(documents.CheckpointFile)
	switch {
	case checkpoint:
		return api.KindCheckpoint
	case f.hasAdapter():
		return api.KindAdapter
	}
	texts := f.ending(".json", rowsExt)
	if len(texts) == 1 && texts[0].name == documents.ReceiptFile && len(f.ending(identity.Extension)) == 0 {
		return api.KindReceipt
	}
	return ""
}

// texts returns the files that classification may read as a text, up to limit bytes of each.
func (f files) texts(kind api.Kind) (found []file, limit int64) {
	switch kind {
	case api.KindAdapter: // whose manifest may call its other documents as it likes, but for weights
		for _, d := range f {
			if !strings.Contains(d.name, "/") && d.plain() && !isWeights(d.name) {
				found = append(found, d)
			}
		}
		return found, documents.MaxDocument
	case api.KindCheckpoint, api.KindReceipt:
		for _, name := range []string{documents.CheckpointFile, documents.ReceiptFile, documents.AdapterManifestFile} {
			found = append(found, f[name])
		}
		return found, documents.MaxDocument
	case api.KindStatement:
		return f.ending(".json"), documents.MaxDocument
	case api.KindEval:
		return f.ending(".json", rowsExt), documents.MaxEval
	}
	return []file{f[indexName]}, api.MaxIndexDocumentBytes
}

// isWeights says whether a file is called as weights are: such a file is never read as a document.
func isWeights(name string) bool { return path.Ext(name) == identity.Extension }

// made is an artifact whose documents are being read.
type made struct {
	*Artifact
	ctx    context.Context
	blobs  Blobs
	files  files
	layers []Descriptor
	claims []claim
	docs   Documents
	seen   map[string]bool // the documents that were read, by file name
	kiln   bool            // it has a Kiln record, which should hold the full manifest of its base
}

func newMade(ctx context.Context, blobs Blobs, m Manifest, all files, a *Artifact) *made {
	return &made{Artifact: a, ctx: ctx, blobs: blobs, files: all, layers: m.Layers, seen: map[string]bool{}}
}

// readers read the documents of an artifact, by its kind.
var readers = map[api.Kind]func(*made) error{
	api.KindAdapter:    (*made).adapter,
	api.KindCheckpoint: (*made).checkpoint,
	api.KindReceipt:    (*made).receipt,
	api.KindEval:       (*made).eval,
	api.KindStatement:  (*made).statement,
}

// Documents are those of an artifact. Each is nil if the artifact has none.
type Documents struct {
	Adapter    *documents.AdapterManifest
	Receipt    *documents.Receipt
	Checkpoint *documents.Checkpoint
	Eval       *documents.Eval
	Outcomes   *documents.Outcomes
}

// Shards returns the full manifest of a base that the documents hold, the zero one if they hold none.
func (d Documents) Shards(base identity.Aggregate) identity.Manifest {
	var all []documents.Binding
	if d.Adapter != nil {
		all = append(all, d.Adapter.Base())
	}
	if d.Receipt != nil {
		all = append(all, d.Receipt.Base())
	}
	if d.Checkpoint != nil {
		all = append(all, d.Checkpoint.Base())
	}
	if d.Eval != nil {
		all = append(all, d.Eval.Base())
	}
	if d.Outcomes != nil {
		all = append(all, d.Outcomes.Bases()...)
	}
	for _, b := range all {
		if b.Manifest.Aggregate == base {
			return b.Manifest
		}
	}
	return identity.Manifest{}
}

// Read reads the documents of an artifact again. The errors are those of Classify.
func Read(ctx context.Context, blobs Blobs, m Manifest) (Documents, error) {
	all, err := filesOf(m)
	if err != nil || m.IsIndex() {
		return Documents{}, err
	}
	kind, err := kindOf(m, all)
	if err != nil || readers[kind] == nil {
		return Documents{}, err
	}
	made := newMade(ctx, blobs, m, all, &Artifact{Kind: kind})
	err = readers[kind](made)
	return made.docs, err
}

// readDocuments reads what the documents of an artifact say, and compares it with the files and with each other.
func (a *Artifact) readDocuments(ctx context.Context, blobs Blobs, m Manifest, all files) error {
	made := newMade(ctx, blobs, m, all, a)
	if err := readers[a.Kind](made); err != nil {
		return err
	}
	if err := made.others(); err != nil {
		return err
	}
	claims := append(made.claims, annotated(a.Claim)) // what the artifact's own document says comes first
	best, err := strongest(a.beside(claims[0], claims[1:]...)...)
	if err != nil {
		return err
	}
	a.Base, a.Evidence = best.base, best.evidence
	a.Facts.Legacy = a.Facts.Legacy || made.kiln && best.evidence != api.EvidenceDocument
	if !best.base.IsZero() {
		a.Facts.Source = best.at
	}
	a.Facts = bounded(a.Facts)
	return nil
}
