// Package made reads what an artifact says about the base that it was made from: of a folder, or of an artifact in a
// registry, of which only the small documents are fetched. It also finds that base in a registry, and describes the
// base at hand that an artifact is to be compared with.
//
// What is read is checked: documents against the files that they name and against each other, every claim about the
// base against every other one.
package made

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
)

// ErrNotMade: what was named is not made from a base, or not of the kind that was asked for.
var ErrNotMade = errors.New("not such an artifact")

// ErrDocuments: an eval or a receipt is not one plain document.
var ErrDocuments = errors.New("it is not one plain document")

// Artifact is one that was made from a base, as far as it says so itself. It is not changed once it is made.
type Artifact struct {
	Kind      api.Kind
	Name      string // what it calls itself: a label. Empty: nothing
	Reference string // or the path, where it was read from a disk
	Registry  string // that holds it; empty: it was read from a disk
	Record    resume.Made
	Legacy    bool            // a Kiln record without the full manifest of its base
	Disputed  string          // why bind statements, which alone name its base, decide nothing; empty: they agree, or are not needed
	Conflict  string          // that its subject or a statement names another base than it does; empty: none
	Checked   string          // one sentence on how its files were compared with its documents
	Weights   identity.Digest // of an adapter: of the file of its weights; zero: not known
	// Checkpoint is the manifest of a checkpoint; nil for every other kind.
	Checkpoint *documents.Checkpoint

	manifest *documents.AdapterManifest // of an adapter; nil: there is none
	receipt  *documents.Receipt         // of an adapter; nil: there is none
	rows     documents.Outcomes         // of an eval; zero: it is none of rows
	file     string                     // of these rows; empty: there are none
}

// Binding is the strongest claim about the base.
func (a Artifact) Binding() documents.Binding { return a.Record.Binding }

const (
	checkedHere = "every file was read and hashed here, and the documents fit them"
	checkedFar  = "no file but the documents was read: they were compared with the digests that the registry keeps"
)

// Open reads the artifact that a text names: a folder or a file of the kind, else a reference. Where nothing of the
// name is on the disk and it is no reference either, the error is a *fs.PathError. A broken rule is an *artifact.Error,
// a *documents.Error or a *safetensors.Error; an artifact of another kind is ErrNotMade.
func Open(ctx context.Context, kind api.Kind, text string, dial transfer.Dial, w transfer.Watch) (Artifact, error) {
	_, missing := os.Stat(text)
	if missing == nil {
		return OpenPath(ctx, kind, text, w)
	}
	if _, is, _ := transfer.ParseAggregate(text); is {
		return Artifact{}, fmt.Errorf("%.200q is a digest, and an artifact is named by host/repository@sha256:…", text)
	}
	ref, err := client.ParseReference(text)
	if err != nil {
		if errors.Is(missing, fs.ErrNotExist) {
			err = fmt.Errorf("%w; as a reference: %w", missing, err)
		}
		return Artifact{}, err
	}
	c, err := dial(ref.Host, true)
	if err != nil {
		return Artifact{}, err
	}
	defer c.Close()
	plan, err := transfer.Resolve(ctx, c, ref)
	if err != nil {
		return Artifact{}, err
	}
	if plan.Kind != kind {
		return Artifact{}, fmt.Errorf("%s is %s, no %s: %w", plan.Reference(), Named(plan.Kind), kind, ErrNotMade)
	}
	return Read(ctx, c, plan)
}

// Named is a kind for people.
func Named(k api.Kind) string {
	switch k {
	case "":
		return "of no known kind"
	case api.KindAdapter, api.KindEval:
		return "an " + string(k)
	}
	return "a " + string(k)
}

// OpenPath is Open for a folder or a file. All of it is read.
func OpenPath(ctx context.Context, kind api.Kind, path string, w transfer.Watch) (Artifact, error) {
	read, err := artifact.Read(ctx, kind, path, artifact.Options{Legacy: true, Watch: w})
	if err != nil {
		return Artifact{}, err
	}
	a := Artifact{Kind: kind, Name: read.Name, Reference: path, Legacy: read.Legacy, Checked: checkedHere}
	text := func(name string, _ int64) ([]byte, error) { return read.Text(name), nil }
	if err := a.parse(read.Names(), text); err != nil {
		return Artifact{}, err
	}
	if read.Base.Evidence != documents.EvidenceNone {
		a.Record.Binding = read.Base
	}
	a.rows = read.Rows
	a.inFile()
	a.Weights = read.Digest(a.weightsFile())
	return a, nil
}

// Read reads the documents of an artifact in a registry, and what its manifest says beside them.
func Read(ctx context.Context, c *client.Client, plan transfer.Plan) (Artifact, error) {
	a := Artifact{Kind: plan.Kind, Reference: plan.Reference(), Registry: plan.Registry, Checked: checkedFar}
	names := make([]string, 0, len(plan.Files))
	for _, f := range plan.Files {
		names = append(names, f.Name)
	}
	p := packed{plan}
	if one := plan.Kind == api.KindEval || plan.Kind == api.KindReceipt; one && len(plan.Encoded) > 0 {
		return Artifact{}, fmt.Errorf("%s: %w: of %.300q the media type says that they are encoded", plan.Reference(),
			ErrDocuments, plan.Encoded)
	}
	err := a.parse(names, func(name string, limit int64) ([]byte, error) { return plan.Document(ctx, c, name, limit) })
	if err == nil {
		err = p.check(&a)
	}
	if err == nil {
		err = p.claims(ctx, c, &a)
	}
	if err != nil {
		return Artifact{}, fmt.Errorf("%s: %w", plan.Reference(), err)
	}
	for _, f := range plan.Files {
		if f.Name == a.weightsFile() {
			a.Weights = f.Digest
		}
	}
	return a, nil
}

// weightsFile names the file of an adapter's weights; empty: it is no adapter.
func (a Artifact) weightsFile() string {
	switch {
	case a.Kind != api.KindAdapter:
		return ""
	case a.manifest != nil:
		return a.manifest.Files.Model
	}
	return documents.AdapterWeightsFile
}

// Told is what the registry says about the base of an artifact in it, of which no document is read: what it found when
// the artifact was pushed, and what statements say. Nil: the registry does not say it.
func Told(ctx context.Context, c *client.Client, plan transfer.Plan) (*Artifact, error) {
	x, err := told(ctx, c, plan)
	switch {
	case err != nil:
		return nil, fmt.Errorf("what %s was made from: %w", plan.Reference(), err)
	case x == nil:
		return nil, nil
	}
	a := Artifact{Kind: plan.Kind, Name: x.Name, Reference: plan.Reference(), Registry: plan.Registry,
		Disputed: Disputed(*x), Conflict: Conflict(*x)}
	b := documents.Binding{Evidence: documents.Evidence(cmp.Or(x.Binding.Evidence, api.EvidenceNone)),
		Aggregate: x.Binding.Aggregate}
	where := x.Binding.Source
	if x.Facts != nil {
		a.Legacy, where = x.Facts.Legacy, cmp.Or(where, x.Facts.Source)
	}
	kind, path, _ := strings.Cut(where, " ")
	b.Kind, b.Path = documents.Kind(kind), path
	a.Record.Binding = b
	if plan.Kind == api.KindStatement && b.Aggregate.IsZero() {
		return nil, nil // it is about something else
	}
	return &a, nil
}

// get returns a document of at most limit bytes.
type get func(name string, limit int64) ([]byte, error)

// parse reads the documents of an artifact whose files have these names.
func (a *Artifact) parse(names []string, text get) error {
	switch a.Kind {
	case api.KindAdapter:
		return a.parseAdapter(names, text)
	case api.KindReceipt:
		return a.parseReceipt(names, text)
	case api.KindCheckpoint:
		return a.parseCheckpoint(text)
	case api.KindEval:
		return a.parseEval(names, text)
	}
	return fmt.Errorf("%s: %w", Named(a.Kind), ErrNotMade)
}

func (a *Artifact) parseAdapter(names []string, text get) error {
	receipt := documents.ReceiptFile
	var m documents.AdapterManifest // zero: there is none
	if slices.Contains(names, documents.AdapterManifestFile) {
		b, err := text(documents.AdapterManifestFile, documents.MaxDocument)
		if err != nil {
			return err
		}
		if m, err = documents.ParseAdapterManifest(b); err != nil {
			return err
		}
		a.manifest, receipt = &m, cmp.Or(m.Files.Receipt, receipt)
		a.Name = m.Name
	}
	if slices.Contains(names, receipt) {
		r, err := parseReceipt(receipt, text)
		if err != nil {
			return err
		}
		a.receipt, a.Name = &r, cmp.Or(a.Name, r.Name)
	}
	a.Record = resume.MadeAdapter(m, a.receipt)
	a.Legacy = (a.manifest != nil || a.receipt != nil) && a.Binding().Evidence != documents.EvidenceDocument
	return nil
}

func parseReceipt(name string, text get) (documents.Receipt, error) {
	b, err := text(name, documents.MaxDocument)
	if err != nil {
		return documents.Receipt{}, err
	}
	return documents.ParseReceipt(b)
}

func (a *Artifact) parseReceipt(names []string, text get) error {
	name, err := a.document(names, ".json")
	if err != nil {
		return err
	}
	r, err := parseReceipt(name, text)
	if err != nil {
		return err
	}
	a.Record, a.Name = resume.MadeAdapter(documents.AdapterManifest{}, &r), r.Name
	a.Legacy = a.Binding().Evidence != documents.EvidenceDocument
	return nil
}

func (a *Artifact) parseCheckpoint(text get) error {
	b, err := text(documents.CheckpointFile, documents.MaxDocument)
	if err != nil {
		return err
	}
	c, err := documents.ParseCheckpoint(b)
	if err != nil {
		return err
	}
	a.Checkpoint, a.Name = &c, c.Adapter
	a.Record = resume.Made{Binding: c.Base(), Identities: c.Identities()}
	a.Legacy = a.Binding().Evidence != documents.EvidenceDocument
	return nil
}

// parseEval reads an eval job or result, or outcome rows. Each has at most documents.MaxEval bytes.
func (a *Artifact) parseEval(names []string, text get) error {
	const rows = ".jsonl"
	name, err := a.document(names, ".json", rows)
	if err != nil {
		return err
	}
	b, err := text(name, documents.MaxEval)
	if err != nil {
		return err
	}
	if stem, ok := strings.CutSuffix(name, rows); ok {
		a.Name, a.file = stem, name
		return a.parseRows(b)
	}
	e, err := documents.ParseEval(b)
	if err != nil {
		return err
	}
	var run *documents.Run
	if len(e.Runs) == 1 {
		run = &e.Runs[0]
	}
	a.Record, a.Name = resume.MadeEval(e, run), e.ID
	a.Legacy = a.Binding().Evidence != documents.EvidenceDocument
	return nil
}

// document is the name of the one document of an artifact that is one, among its files, those in folders included.
func (a *Artifact) document(names []string, exts ...string) (string, error) {
	var found []string
	for _, name := range names {
		if slices.Contains(exts, path.Ext(name)) {
			found = append(found, name)
		}
	}
	if len(found) != 1 {
		return "", fmt.Errorf("%w: %s is one, and this has %d: %.300q", ErrDocuments, Named(a.Kind), len(found), found)
	}
	return found[0], nil
}

// parseRows reads outcome rows. Those of a folder were read before, and are not kept: of them there is no text.
func (a *Artifact) parseRows(text []byte) error {
	a.Record.Binding = documents.Binding{Evidence: documents.EvidenceNone, Kind: documents.KindOutcomes, Path: "$"}
	if text == nil && a.Checked == checkedHere {
		return nil
	}
	rows, err := documents.ParseOutcomes(text)
	if err != nil {
		return err
	}
	a.Legacy = rows.Unbound > 0
	if b, named := rows.Of(identity.Aggregate{}); named {
		a.Record.Binding, a.rows = b, rows
	}
	a.inFile()
	return nil
}

// inFile says of a binding that rows make in which file they are, as the registry does.
func (a *Artifact) inFile() {
	if b := &a.Record.Binding; b.Kind == documents.KindOutcomes && a.file != "" {
		b.Kind = documents.Kind(a.file)
	}
}

// Of is a, with the binding to that base where it has outcome rows of several and that is one of them.
func (a Artifact) Of(base identity.Aggregate) Artifact {
	if b, named := a.rows.Of(base); named && b.Aggregate == base {
		a.Record.Binding = b
		a.inFile()
	}
	return a
}

// Aggregate is the base that a says it was made from; zero: it does not record one.
func (a Artifact) Aggregate() identity.Aggregate { return a.Binding().Aggregate }

// Bases are those that its outcome rows name, in the order of their first rows; none where it is no file of rows.
func (a Artifact) Bases() []documents.Binding { return a.rows.Bases() }
