package made

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

// How claims beside the documents show in messages.
const (
	kindAnnotation documents.Kind = "manifest annotation"
	kindSubject    documents.Kind = "manifest"
)

// packed is an artifact as a registry holds it.
type packed struct{ transfer.Plan }

// check compares the documents with the digests of the files beside them. The registry vouches for those.
func (p packed) check(a *Artifact) error {
	switch {
	case a.Checkpoint != nil:
		return a.Checkpoint.CheckFiles(p.entries())
	case a.Kind != api.KindAdapter:
		return nil
	}
	sums := map[string]identity.Digest{}
	for _, f := range p.Files {
		sums[f.Name] = f.Digest
	}
	if a.manifest != nil {
		if err := a.manifest.CheckFiles(sums); err != nil {
			return err
		}
	}
	if a.receipt == nil {
		return nil
	}
	m := a.manifest
	if m == nil {
		m = &documents.AdapterManifest{Weights: sums[documents.AdapterWeightsFile]}
	}
	return m.CheckReceipt(*a.receipt)
}

// entries are the files as a checkpoint folder would hold them.
func (p packed) entries() (entries []documents.Entry) {
	for _, f := range p.Files {
		entries = append(entries, documents.Entry{Path: f.Name, Links: 1, Size: uint64(f.Size), Digest: f.Digest})
	}
	return entries
}

// claims joins what the manifest says about the base with what the documents say. Two that differ are a
// *documents.Error. A subject of another base is none of these: it may have come later, and what the artifact says itself
// stands, as it does in the registry. Nor is a bind statement that was there first.
func (p packed) claims(ctx context.Context, c *client.Client, a *Artifact) (err error) {
	all := []documents.Binding{a.Binding()}
	if p.Claim != "" {
		said, err := identity.ParseAggregate(p.Claim)
		if err != nil {
			return fmt.Errorf("annotation %s: %w", api.AnnotationAggregate, err)
		}
		all = append(all, documents.Binding{
			Evidence: documents.EvidenceAsserted, Aggregate: said, Kind: kindAnnotation, Path: api.AnnotationAggregate,
		})
	}
	subject, err := p.subject(ctx, c)
	if err != nil {
		return err
	}
	own := all[len(all)-1]
	if own.Aggregate.IsZero() {
		own = all[0]
	}
	if a.Of(subject.Aggregate).differs(own, subject) {
		a.Conflict = fmt.Sprintf("its subject %s is of base %s, but %s says %s", p.Subject, subject.Aggregate, own.Where(),
			own.Aggregate)
	} else {
		all = append(all, subject)
	}
	if len(a.rows.Shards) > 1 { // who claims one of several bases agrees, and says less
		all = slices.DeleteFunc(all[1:], func(b documents.Binding) bool { return a.Of(b.Aggregate).Aggregate() == b.Aggregate })
		all = append(all, a.Binding())
	}
	best, err := documents.Join(all...)
	if err != nil {
		return err
	}
	x, err := told(ctx, c, p.Plan)
	switch own := !best.Aggregate.IsZero(); {
	case err != nil && (!own || client.Temporary(err) || ctx.Err() != nil):
		return fmt.Errorf("statements about %s: %w", p.Reference(), err)
	case err != nil || x == nil: // what answers keeps no lineage, and the artifact says its base itself
	case own:
		a.Conflict = cmp.Or(a.Conflict, Conflict(*x))
	default:
		best, a.Disputed = stated(*x)
	}
	if !best.Aggregate.IsZero() { // else the place where the document could have said it stays
		a.Record.Binding = best
	}
	return nil
}

// differs says whether a subject is of another base than the artifact says itself, in none of its outcome rows.
func (a Artifact) differs(own, subject documents.Binding) bool {
	is := subject.Aggregate
	return !is.IsZero() && !own.Aggregate.IsZero() && is != own.Aggregate && is != a.Aggregate()
}

// told is what the registry that holds an artifact says about it. Nil: it keeps no lineage.
func told(ctx context.Context, c *client.Client, plan transfer.Plan) (*api.Artifact, error) {
	var l api.Lineage
	err := c.Retry(ctx, plan.Reference(), func() (err error) {
		l, err = c.Lineage(ctx, plan.Manifest, plan.Repository, "", 1)
		return err
	})
	var answered *client.StatusError
	switch {
	case errors.As(err, &answered), errors.Is(err, client.ErrNotBlob):
		return nil, nil
	case err != nil:
		return nil, err
	}
	return &l.Artifact, nil
}

// stated is what bind statements say about the base of an artifact that does not say it itself. Where they disagree, none
// of them counts, and disputed says so.
func stated(x api.Artifact) (b documents.Binding, disputed string) {
	is := x.Binding
	if is.Evidence != api.EvidenceAsserted || is.Source == "" {
		return b, ""
	}
	if disputed = Disputed(x); disputed != "" {
		return b, disputed
	}
	_, digest, _ := strings.Cut(is.Source, " ")
	return documents.Binding{
		Evidence: documents.EvidenceAsserted, Aggregate: is.Aggregate, Kind: documents.KindStatement, Path: digest,
	}, ""
}

// Conflict says what contradicts the base that an artifact names itself, as its registry found it: its subject, or a
// bind statement that counts. What the artifact says stands. Empty: nothing does. The text is a stranger's.
func Conflict(x api.Artifact) string {
	if x.Facts == nil || x.Facts.Conflict == nil {
		return ""
	}
	c := x.Facts.Conflict
	return fmt.Sprintf("its %s is of base %s, but %s says %s", c.DerivedAt, c.Derived, c.ClaimedAt, c.Claimed)
}

// Disputed says why the bind statements about an artifact that records no base decide nothing: those that count name
// several. A row of a listing says only how many. Empty: there is no such dispute. The text is a stranger's.
func Disputed(x api.Artifact) string {
	several := max(x.Bases, len(x.Bindings)) > 1
	switch stated := x.Binding.Source != ""; {
	case !several || !stated: // outcome rows of several bases are of all of them
		return ""
	case len(x.Bindings) == 0:
		return fmt.Sprintf("bind statements disagree about its base: they name %d", x.Bases)
	}
	var says []string
	for _, b := range x.Bindings {
		says = append(says, fmt.Sprintf("%s says %s", b.Source, b.Aggregate))
	}
	if x.MoreBindings {
		return "the newest bind statements disagree about its base: " + strings.Join(says, ", ") + "; older ones do not count"
	}
	return "bind statements disagree about its base: " + strings.Join(says, ", ")
}

// subject is what the manifest says about the base by referring to one. A subject that is not there, or is no base,
// says nothing.
func (p packed) subject(ctx context.Context, c *client.Client) (b documents.Binding, err error) {
	if p.Subject.IsZero() {
		return b, nil
	}
	base, err := transfer.Resolve(ctx, c, client.Reference{Host: p.Registry, Repo: p.Repository, Digest: p.Subject})
	switch {
	case errors.Is(err, api.ErrManifestUnknown), errors.Is(err, transfer.ErrArtifact):
		return b, nil
	case err != nil:
		return b, err
	case base.NoBase != nil:
		return b, nil
	}
	return documents.Binding{
		Evidence: documents.EvidenceAsserted, Aggregate: base.Aggregate, Kind: kindSubject,
		Path: "subject " + p.Subject.String(),
	}, nil
}

// CheckFolder checks a checkpoint folder that was just pulled by Kiln's rules, those about links among them. Its files
// were hashed as they came, so they are not read again. A broken rule is a *documents.Error.
func CheckFolder(dir string, r staging.Record) error {
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	entries, err := listing(dir, r)
	if err != nil {
		return err
	}
	mode := documents.Directory
	if !info.IsDir() {
		mode = documents.Special
	}
	if err := documents.CheckCheckpointFolder(filepath.Base(dir), mode, entries); err != nil {
		return err
	}
	b, err := os.ReadFile(filepath.Join(dir, documents.CheckpointFile))
	if err != nil {
		return err
	}
	c, err := documents.ParseCheckpoint(b)
	if err != nil {
		return err
	}
	return c.CheckFiles(entries)
}

// maxEntries bounds what is listed of a checkpoint folder: 64 files, and the folders that they can lie in.
const maxEntries = 4096

// listing lists a folder; digests are those of the record.
func listing(dir string, r staging.Record) ([]documents.Entry, error) {
	_, found, err := folder.List(dir, true, maxEntries, folder.Options{})
	if err != nil {
		return nil, err
	}
	sums := map[string]identity.Digest{}
	for _, f := range r.Files {
		sums[f.Name] = f.Digest
	}
	modes := map[safetensors.Mode]documents.Mode{
		safetensors.Regular: documents.Regular, safetensors.Dir: documents.Directory,
		safetensors.Symlink: documents.Symlink, safetensors.Other: documents.Special,
	}
	entries := make([]documents.Entry, 0, len(found))
	for _, m := range found {
		entries = append(entries, documents.Entry{
			Path: m.Name, Mode: modes[m.Mode], Links: m.Names, Size: uint64(m.Size), Digest: sums[m.Name],
		})
	}
	return entries, nil
}
