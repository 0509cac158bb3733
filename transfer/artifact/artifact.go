// Package artifact reads what was made from a base model: an adapter, a training checkpoint, a receipt or an eval. It
// checks what the documents in it say against its files, against each other and against the base that somebody names
// for it, and makes it an artifact of a registry. It also makes statements about such artifacts, and stamps the
// documents of other trainers with the base.
//
// Nothing is sent before everything was checked. Only Stamp changes anything on disk, and whole or not at all.
package artifact

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// maxUploads is how many blobs are sent at a time, as for a base.
const maxUploads = 4

// Options says how an artifact is read. The zero value is ready to use.
type Options struct {
	Base        Base // that somebody names for it; zero: none
	Legacy      bool // take a Kiln record that lacks the full manifest of its base
	FollowLinks bool // read the files behind links; never for a checkpoint, of which Kiln wants files of its own
	Watch       transfer.Watch
}

// Warning is a condition under which an artifact is taken but should be looked at.
type Warning struct {
	Code    string
	Message string // on one line
}

// Artifact is one whose documents fit its files and each other. It is safe for concurrent use.
type Artifact struct {
	Kind     api.Kind
	Name     string             // what it calls itself: a label. Empty: nothing
	Base     documents.Binding  // the strongest claim about its base; Evidence none where there is none
	BaseText string             // base_model_name_or_path: a name, which binds nothing
	Legacy   bool               // a Kiln record without the full manifest of its base
	Rows     documents.Outcomes // of an eval that is a file of them; zero: it is none
	Warnings []Warning
	folder   *folder.Folder
	parts    []part
	subject  transfer.Subject
	said     *documents.Statement // nil: it is no statement
}

// part is one file of an artifact.
type part struct {
	name   string      // in the artifact
	kind   folder.Kind // in the manifest
	file   folder.File
	text   []byte          // of a document, which was read as a whole; nil: the file is read again to be sent
	digest identity.Digest // zero until it was hashed
}

// draft is an artifact whose documents were read.
type draft struct {
	Artifact
	claims []documents.Binding // of its documents
	kiln   bool                // one of them is a Kiln record, which should hold the full manifest of the base
	hint   string              // what to do where none does
	// check says whether the digests of the files, by name, are those that the documents give. It may add warnings.
	check func(sums map[string]identity.Digest) error
}

// readers read the documents of an artifact, by its kind.
var readers = map[api.Kind]func(path string, o Options) (*draft, error){
	api.KindAdapter:    readAdapter,
	api.KindCheckpoint: readCheckpoint,
	api.KindReceipt:    readReceipt,
	api.KindEval:       readEval,
}

// Read reads the artifact of a kind at a path, a folder or one file, and checks it. Each of its bytes is hashed once. A
// rule that is broken is an *Error, a *documents.Error or a *safetensors.Error; what is of another kind is a
// *folder.KindError; a file that can't be read is a *fs.PathError, and one that changes meanwhile is folder.ErrChanged.
func Read(ctx context.Context, kind api.Kind, path string, o Options) (*Artifact, error) {
	read, ok := readers[kind]
	if !ok {
		return nil, fmt.Errorf("artifacts of kind %q are not read from a path", kind)
	}
	d, err := read(path, o)
	if err != nil {
		return nil, cmp.Or(folder.CheckKind(path, kind), err)
	}
	d.Kind = kind
	for _, p := range d.parts {
		if err := api.CheckFilePath(p.name); err != nil {
			return nil, &Error{Code: CodeFileName, Msg: err.Error(), Hint: "rename the file"}
		}
	}
	if err := d.bind(o); err != nil {
		return nil, err
	}
	if err := d.hash(ctx, o.Watch); err != nil {
		return nil, err
	}
	sums := map[string]identity.Digest{}
	for _, p := range d.parts {
		sums[p.name] = p.digest
	}
	if err := d.check(sums); err != nil {
		return nil, err
	}
	return &d.Artifact, nil
}

// Text returns the document of that name as it was read; nil: there is none, or it was not read as a whole.
func (a *Artifact) Text(name string) []byte {
	for _, p := range a.parts {
		if p.name == name {
			return p.text
		}
	}
	return nil
}

// Digest returns that of the file of a name; zero: there is none.
func (a *Artifact) Digest(name string) (d identity.Digest) {
	for _, p := range a.parts {
		if p.name == name {
			d = p.digest
		}
	}
	return d
}

// Names returns the names of the files, in the order in which the manifest lists them.
func (a *Artifact) Names() (names []string) {
	for _, p := range a.parts {
		names = append(names, p.name)
	}
	return names
}

// bind finds the strongest claim about the base. Two that disagree refuse the artifact.
func (d *draft) bind(o Options) error {
	best, err := documents.Join(append(d.claims, o.Base.claim())...)
	if err != nil {
		return err
	}
	d.Base, d.subject = best, o.Base.Subject
	d.Legacy = d.kiln && best.Evidence != documents.EvidenceDocument
	if d.Legacy && !o.Legacy {
		return &Error{Code: CodeLegacy, Hint: d.hint, Msg: lacking(d.claims[0])}
	}
	return nil
}

// lacking says what a Kiln record lacks whose claim is no full manifest.
func lacking(claim documents.Binding) string {
	if claim.Evidence == documents.EvidenceAggregateOnly {
		return fmt.Sprintf("the %s names its base by aggregate alone, at %s", claim.Kind, claim.Path)
	}
	return fmt.Sprintf("%s: no full manifest of the base, which belongs at %s", claim.Kind, claim.Path)
}

// hash hashes what was not read as a whole, several files at a time, the largest first.
func (d *draft) hash(ctx context.Context, w transfer.Watch) error {
	d.hashTexts()
	var parts []*part
	for i := range d.parts {
		if p := &d.parts[i]; p.digest.IsZero() {
			parts = append(parts, p)
		}
	}
	slices.SortStableFunc(parts, func(p, q *part) int { return cmp.Compare(q.file.Size, p.file.Size) })
	files := make([]folder.File, len(parts))
	for i, p := range parts {
		files[i] = p.file
		p.tell(w, transfer.Planned, 0)
	}
	return d.folder.HashAll(ctx, files, folder.Hashing{
		Moved: func(i int, n int64) { parts[i].tell(w, transfer.Moved, n) },
		Done: func(i int, h folder.Hashed) {
			parts[i].digest = h.Digest
			parts[i].tell(w, transfer.Done, parts[i].file.Size)
		},
	})
}

// tell says how the hashing of a file goes.
func (p *part) tell(w transfer.Watch, s transfer.Step, n int64) {
	if w != nil {
		w(transfer.Event{Step: s, Phase: transfer.PhaseHash, File: p.name, Bytes: n, Total: p.file.Size})
	}
}

// hashTexts hashes what was read as a whole.
func (a *Artifact) hashTexts() {
	for i := range a.parts {
		if p := &a.parts[i]; p.text != nil {
			p.digest = identity.Sum(p.text)
		}
	}
}

// Pushed is what a push has made.
type Pushed struct {
	Kind      api.Kind        `json:"kind"`
	Name      string          `json:"name,omitempty"` // a label
	Base      Claim           `json:"base"`
	Legacy    bool            `json:"legacy,omitempty"`
	Digest    identity.Digest `json:"digest"` // of the manifest
	Reference string          `json:"reference"`
	Files     int             `json:"files"`
	Sent      int64           `json:"sent_bytes"`            // of blobs; what the registry had already is not sent
	Before    bool            `json:"said_before,omitempty"` // a statement that was there: nothing was pushed
	// Counts is, of a bind statement, what the registry makes of all of them where that is not what this one says. The
	// text is a stranger's.
	Counts string `json:"counts,omitempty"`
}

// Claim is what an artifact says about its base, and where it says so.
type Claim struct {
	Aggregate identity.Aggregate `json:"aggregate_sha256,omitzero"` // zero: nothing
	Evidence  documents.Evidence `json:"evidence"`
	Source    string             `json:"source,omitempty"`
	Held      *bool              `json:"held,omitempty"` // by that registry, for this caller; nil: it does not say
	Note      string             `json:"note,omitempty"` // for people
}

// types are the artifact types of the kinds.
var types = map[api.Kind]string{
	api.KindAdapter:    api.ArtifactTypeAdapter,
	api.KindCheckpoint: api.ArtifactTypeCheckpoint,
	api.KindReceipt:    api.ArtifactTypeReceipt,
	api.KindEval:       api.ArtifactTypeEval,
	api.KindStatement:  api.ArtifactTypeStatement,
}

// Push makes a an artifact of a registry, under the tag of ref or, where it has none, by digest alone. The same bytes
// under the same names, with the same base named for them, give the same manifest. Blobs that the registry has are not
// sent, and an upload that was broken off goes on where it stopped. When this returns nil, everything is durable in the
// registry. The errors are those of client.Client, and folder.ErrChanged where a file changed since it was read: then
// no manifest was put.
func (a *Artifact) Push(ctx context.Context, c *client.Client, ref client.Reference, w transfer.Watch) (
	p Pushed, err error,
) {
	u := transfer.NewUploader(c, ref.Repo, w)
	if err := a.send(ctx, u); err != nil {
		return p, err
	}
	p = Pushed{Kind: a.Kind, Name: a.Name, Base: a.claim(), Legacy: a.Legacy, Files: len(a.parts)}
	p.Digest, p.Reference, err = u.Put(ctx, a.manifest(), ref.Tag)
	p.Sent = u.Sent()
	if err == nil {
		p.Base.ask(ctx, c)
	}
	return p, err
}

// Manifest returns the digest that the manifest of a gets when it is pushed. It asks no registry.
func (a *Artifact) Manifest() (identity.Digest, error) { return a.manifest().Digest() }

// Before is what Push returns for a statement that is there already.
func (a *Artifact) Before(ctx context.Context, c *client.Client, at client.Reference) Pushed {
	p := Pushed{Kind: a.Kind, Name: a.Name, Base: a.claim(), Digest: at.Digest, Reference: at.String(),
		Files: len(a.parts), Before: true}
	p.Base.ask(ctx, c)
	return p
}

// ask learns whether a registry holds the base.
func (b *Claim) ask(ctx context.Context, c *client.Client) {
	if b.Aggregate.IsZero() {
		return
	}
	if held, known := Held(ctx, c, b.Aggregate); known {
		b.Held = &held
	}
}

// send uploads the files, each distinct content once.
func (a *Artifact) send(ctx context.Context, u *transfer.Uploader) error {
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(maxUploads)
	taken := map[identity.Digest]bool{}
	smaller := func(p, q part) int { return cmp.Compare(p.size(), q.size()) }
	for _, p := range slices.SortedFunc(slices.Values(a.parts), smaller) {
		if taken[p.digest] {
			continue
		}
		taken[p.digest] = true
		g.Go(func() error {
			return u.Send(ctx, transfer.Blob{Name: p.name, Digest: p.digest, Size: p.size(), Source: a.source(p)})
		})
	}
	return g.Wait()
}

func (p part) size() int64 {
	if p.text != nil {
		return int64(len(p.text))
	}
	return p.file.Size
}

func (a *Artifact) source(p part) transfer.Source {
	if p.text != nil {
		return transfer.Bytes(p.text)
	}
	return transfer.OnDisk{Folder: a.folder, File: p.file}
}

// manifest names the base in an annotation only where it rests on more than a bare aggregate in a document, as readers
// take an annotation for somebody's word.
func (a *Artifact) manifest() transfer.Artifact {
	m := transfer.Artifact{
		Type:        types[a.Kind],
		Model:       a.Kind == api.KindAdapter || a.Kind == api.KindCheckpoint,
		Subject:     a.subject,
		Annotations: map[string]string{api.AnnotationKind: string(a.Kind)},
	}
	if e := a.Base.Evidence; e == documents.EvidenceDocument || e == documents.EvidenceAsserted {
		m.Annotations[api.AnnotationAggregate] = a.Base.Aggregate.String()
	}
	for _, p := range a.parts {
		m.Layers = append(m.Layers, transfer.Layer{Name: p.name, Kind: p.kind, Digest: p.digest, Size: p.size()})
	}
	return m
}

func (a *Artifact) claim() Claim {
	c := Claim{Aggregate: a.Base.Aggregate, Evidence: a.Base.Evidence}
	switch {
	case c.Evidence != documents.EvidenceNone:
		c.Source = a.Base.Where()
		if n := len(a.Rows.Shards); n > 1 {
			c.Note = fmt.Sprintf("the first of %d bases that its rows name", n)
		}
	case a.BaseText != "":
		c.Note = "base_model_name_or_path is a name and binds nothing"
	}
	return c
}

// Error says why an artifact is refused, where no document is at fault.
type Error struct {
	Code  string
	Names []string // of files or folders at fault, where there can be several
	Msg   string   // on one line
	Hint  string   // what to do about it
}

// Error gives the fault and the code.
func (e *Error) Error() string { return e.Msg + " (" + e.Code + ")" }

// Codes of Error.
const (
	CodeNoConfig      = "missing_adapter_config"
	CodeNoWeights     = "missing_adapter_weights"
	CodeNoTensors     = "no_lora_tensors"
	CodeSeveral       = "several_adapters"
	CodeNotRegular    = "not_a_regular_file"
	CodeFileName      = "file_name"
	CodeTooManyFiles  = "too_many_files"
	CodeTooLarge      = "file_too_large"
	CodeLegacy        = "no_base_manifest" // a Kiln record without the full manifest of its base
	CodeNoBase        = "not_a_base"       // what was named as a base is none
	CodeOtherDocument = "other_document"   // the file is no document of the kind that was asked for
	CodeOtherBase     = "other_base"       // it is stamped with another base
	CodeOtherFiles    = "other_files"      // its manifest describes other files
	CodeReceiptNamed  = "receipt_named"    // an adapter manifest names the bytes of the receipt
	CodeSameBase      = "same_base"        // a base is not derived from itself
	CodeIsBase        = "is_a_base"        // what a base was named for is one
	CodeIsStatement   = "is_a_statement"   // what a base was named for is one
	CodePath          = "path"             // a path is no name of a base where that is looked for in a registry
	CodeManifest      = "manifest_digest"  // what was given as an aggregate is the digest of a manifest
	CodeOtherName     = "other_name"       // what is stamped has another name than the one to stamp it with
)

// document reads the file of a document, at most limit bytes.
func document(f *folder.Folder, file folder.File, limit int64) ([]byte, error) {
	b, err := f.Document(file, limit)
	if errors.Is(err, folder.ErrTooLarge) {
		hint := "no tool writes one this large: check that it is the right file"
		return nil, &Error{Code: CodeTooLarge, Msg: err.Error(), Hint: hint}
	}
	return b, err
}

func sortedNames[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
