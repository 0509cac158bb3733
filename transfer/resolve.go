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
	"regexp"
	"slices"
	"strings"

	v1 "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer/staging"
)

const indexName = "model.safetensors.index.json"

// ErrArtifact: a manifest can't be pulled as a folder of files, or what it says breaks a rule.
var ErrArtifact = errors.New("artifact can't be pulled")

// ErrNoTag: a reference names neither a tag nor a digest.
var ErrNoTag = errors.New("names neither a tag nor a digest")

// Plan is one artifact of a registry, resolved once: its digest, and the files that it holds.
type Plan struct {
	staging.Record
	Kind    api.Kind          // as its manifest says or its file names show; empty: none that this project knows
	Base    identity.Manifest // of its shards, as the descriptors say; zero: it has no base identity
	NoBase  error             // why Base is zero; else nil
	Claim   string            // what its annotation says about its base, unchecked; empty: nothing
	Subject identity.Digest   // the manifest that it refers to; zero: none
	Encoded []string          // files whose media type says that they are packed in some way: they are as they are
	Passed  error             // why others of the same base were passed over, the first of them; nil: none was
	whole   *Plan             // of all files, where this one is of some; else nil
}

// Bytes returns the size of all files.
func (p Plan) Bytes() (n int64) {
	for _, f := range p.Files {
		n += f.Size
	}
	return n
}

// Reference returns the text form that names exactly this artifact.
func (p Plan) Reference() string {
	return client.Reference{Host: p.Registry, Repo: p.Repository, Tag: p.Tag, Digest: p.Manifest}.String()
}

// Resolve finds out which manifest a reference names, now and once, and reads it. ErrNoTag, ErrArtifact,
// api.ErrManifestUnknown.
func Resolve(ctx context.Context, c *client.Client, ref client.Reference) (Plan, error) {
	if ref.Name() == "" {
		return Plan{}, fmt.Errorf("reference %s: %w", ref, ErrNoTag)
	}
	var m client.Manifest
	err := c.Retry(ctx, ref.String(), func() (err error) {
		m, err = c.Manifest(ctx, ref.Repo, ref.Name())
		return err
	})
	if err != nil {
		return Plan{}, fmt.Errorf("resolve %s: %w", ref, err)
	}
	p := Plan{Record: staging.Record{Registry: ref.Host, Repository: ref.Repo, Tag: ref.Tag, Manifest: m.Digest}}
	doc, err := readManifest(m)
	if err == nil {
		p.Files, p.Encoded, err = filesOf(doc)
	}
	if err == nil {
		err = p.describe(ctx, c, doc)
	}
	if err != nil {
		return Plan{}, fmt.Errorf("manifest %s of %s: %w", m.Digest, ref.Repo, err)
	}
	return p, nil
}

// describe fills in what an artifact is.
func (p *Plan) describe(ctx context.Context, c *client.Client, doc v1.Manifest) (err error) {
	p.Claim = doc.Annotations[api.AnnotationAggregate]
	if doc.Subject != nil {
		if p.Subject, err = identity.ParseDigest(string(doc.Subject.Digest)); err != nil {
			return fmt.Errorf("%w: its subject: %w", ErrArtifact, err)
		}
	}
	if p.NoBase = notBase(doc); p.NoBase == nil {
		if err = p.identify(ctx, c); err != nil {
			return err
		}
	}
	p.Kind = p.kind(doc)
	return nil
}

// types are the artifact types that say the kind.
var types = map[string]api.Kind{
	api.ArtifactTypeAdapter: api.KindAdapter, api.ArtifactTypeCheckpoint: api.KindCheckpoint,
	api.ArtifactTypeEval: api.KindEval, api.ArtifactTypeReceipt: api.KindReceipt,
	api.ArtifactTypeStatement: api.KindStatement,
}

// kind is the kind that the manifest says, else the one that the file names show: tools that do not know of kinds push
// adapters, checkpoints and receipts too.
func (p *Plan) kind(doc v1.Manifest) api.Kind {
	switch said := api.Kind(doc.Annotations[api.AnnotationKind]); {
	case said.Known():
		return said
	case types[doc.ArtifactType] != "":
		return types[doc.ArtifactType]
	case p.Has("adapter_config.json"), p.Has("adapter_model.safetensors"):
		return api.KindAdapter
	case p.Has("checkpoint_manifest.json"):
		return api.KindCheckpoint
	case p.NoBase == nil:
		return api.KindBase
	case len(p.Files) == 1 && p.Has("train_receipt.json"):
		return api.KindReceipt
	}
	return ""
}

// Has says whether the artifact holds a file of that name.
func (p Plan) Has(name string) bool {
	return slices.ContainsFunc(p.Files, func(f staging.File) bool { return f.Name == name })
}

// Document fetches a file of at most limit bytes and checks its digest. ErrArtifact, if there is none or it is larger.
func (p Plan) Document(ctx context.Context, c *client.Client, name string, limit int64) ([]byte, error) {
	i := slices.IndexFunc(p.Files, func(f staging.File) bool { return f.Name == name })
	if i < 0 {
		return nil, fmt.Errorf("%w: it holds no %s", ErrArtifact, name)
	}
	return small(ctx, c, p.Repository, p.Files[i], limit)
}

// identify selects the shards among the files and takes their identity from the descriptors. Only the index document is
// read, if there is one.
func (p *Plan) identify(ctx context.Context, c *client.Client) error {
	var names []safetensors.Entry
	byName := map[string]staging.File{}
	for _, f := range p.Files {
		byName[f.Name] = f
		if !strings.Contains(f.Name, "/") {
			names = append(names, safetensors.Entry{Name: f.Name, Mode: safetensors.Regular, Size: f.Size})
		}
	}
	var fetchErr error
	sel, err := safetensors.Select(names, func() (b []byte, err error) {
		b, fetchErr = small(ctx, c, p.Repository, byName[indexName], api.MaxIndexDocumentBytes)
		return b, fetchErr
	})
	if fetchErr != nil {
		return fetchErr
	}
	if err != nil {
		p.NoBase = err
		return nil
	}
	shards := make([]identity.Shard, 0, len(sel.Shards))
	for _, name := range sel.Shards {
		f := byName[name]
		shards = append(shards, identity.Shard{Filename: name, Size: uint64(f.Size), Digest: f.Digest})
	}
	if p.Base, err = identity.New(shards); err != nil {
		p.Base, p.NoBase = identity.Manifest{}, err
	}
	p.Aggregate = p.Base.Aggregate
	return nil
}

// small fetches a blob that fits memory.
func small(ctx context.Context, c *client.Client, repo string, f staging.File, limit int64) (b []byte, err error) {
	if f.Size > limit {
		return nil, fmt.Errorf("%w: %s has %d bytes, more than %d", ErrArtifact, f.Name, f.Size, limit)
	}
	if f.Size == 0 {
		return nil, nil
	}
	err = c.Retry(ctx, f.Name, func() error {
		rc, err := c.Blob(ctx, repo, f.Digest, 0, f.Size, f.Size)
		if err != nil {
			return err
		}
		defer rc.Close()
		b, err = io.ReadAll(rc)
		return err
	})
	if err == nil && identity.Sum(b) != f.Digest {
		err = &MismatchError{Name: f.Name, Size: f.Size, Want: f.Digest, Got: identity.Sum(b)}
	}
	return b, err
}

func readManifest(m client.Manifest) (v1.Manifest, error) {
	var doc struct {
		v1.Manifest
		Manifests []json.RawMessage `json:"manifests"`
	}
	if err := json.Unmarshal(m.Bytes, &doc); err != nil {
		return doc.Manifest, fmt.Errorf("%w: %w", ErrArtifact, err)
	}
	if doc.Manifests != nil {
		return doc.Manifest, fmt.Errorf("%w: it is an index of %d manifests; name one of them by its digest", ErrArtifact,
			len(doc.Manifests))
	}
	return doc.Manifest, nil
}

// notBase says why an artifact is no base, if it says so itself: shards in it are then not base weights.
func notBase(doc v1.Manifest) error {
	if k := api.Kind(doc.Annotations[api.AnnotationKind]); k != "" && k != api.KindBase {
		return fmt.Errorf("the artifact is of kind %q", k)
	}
	if types[doc.ArtifactType] != "" {
		return fmt.Errorf("the artifact is of type %q", doc.ArtifactType)
	}
	return nil
}

// filesOf reads the layers of a manifest as files, in ascending order of name. encoded names those of a type for that.
func filesOf(doc v1.Manifest) (files []staging.File, encoded []string, err error) {
	var total int64
	for i, l := range doc.Layers {
		if l.MediaType == v1.MediaTypeEmptyJSON {
			continue
		}
		f, err := fileOf(l)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: layer %d: %w", ErrArtifact, i, err)
		}
		if total > math.MaxInt64-f.Size {
			return nil, nil, fmt.Errorf("%w: the sizes of its layers add up to more than %d bytes", ErrArtifact,
				int64(math.MaxInt64))
		}
		total += f.Size
		files = append(files, f)
		if l.MediaType != v1.MediaTypeImageLayer && api.Encoded(l.MediaType) {
			encoded = append(encoded, f.Name)
		}
	}
	if len(files) == 0 {
		return nil, nil, fmt.Errorf("%w: it holds no files", ErrArtifact)
	}
	slices.SortFunc(files, func(a, b staging.File) int { return cmp.Compare(a.Name, b.Name) })
	return files, encoded, unambiguous(files)
}

func fileOf(l v1.Descriptor) (f staging.File, err error) {
	f.Size = l.Size
	if f.Digest, err = identity.ParseDigest(string(l.Digest)); err != nil {
		return f, err
	}
	if f.Size < 0 {
		return f, fmt.Errorf("%d bytes", f.Size)
	}
	if f.Name, err = api.LayerName(l.Annotations); err != nil {
		return f, err
	}
	if why := packed(l, f.Name); why != "" {
		return f, fmt.Errorf("%s; only layers that are one raw file each can be pulled", why)
	}
	return f, nil
}

// packed says why a layer is an archive and not a file, or returns nothing. oras labels raw files as tar and marks the
// folders that it packed. A type of an encoding alone, as application/gzip, may be that of a file that is one.
func packed(l v1.Descriptor, name string) string {
	t := strings.ToLower(l.MediaType)
	_, suffix, _ := strings.Cut(t, "+")
	switch {
	case l.Annotations[api.AnnotationOrasUnpack] == "true":
		return fmt.Sprintf("%q is a packed folder", name)
	case suffix != "" && api.Encoded(suffix), strings.HasSuffix(t, ".gzip"):
		return fmt.Sprintf("type %s is compressed", l.MediaType)
	case strings.HasPrefix(t, "application/vnd.kitops."):
		return fmt.Sprintf("type %s is an archive", l.MediaType)
	case strings.HasSuffix(t, ".tar") && (t != v1.MediaTypeImageLayer || name == ""):
		return fmt.Sprintf("type %s is a tar archive", l.MediaType)
	case name == "":
		return fmt.Sprintf("type %s names no file", l.MediaType)
	}
	return ""
}

// unambiguous refuses sorted files that can't lie in one folder.
func unambiguous(files []staging.File) error {
	folders := map[string]bool{}
	for _, f := range files {
		for i, c := range f.Name {
			if c == '/' {
				folders[f.Name[:i]] = true
			}
		}
	}
	for i, f := range files {
		if i > 0 && f.Name == files[i-1].Name {
			return fmt.Errorf("%w: two files are called %q", ErrArtifact, f.Name)
		}
		if folders[f.Name] {
			return fmt.Errorf("%w: %q is a file and a folder", ErrArtifact, f.Name)
		}
	}
	return nil
}

const (
	maxCompared = 8  // packagings that are told apart
	maxTried    = 64 // manifests of one base that are fetched for that, those that can't be pulled among them
)

// PackagingsError says that one base comes in several packagings, and how they differ. It lists at most a few of them.
type PackagingsError struct {
	Aggregate   identity.Aggregate
	Plans       []Plan // one of each packaging
	More        int    // packagings that are not listed
	Differences []FileDifference
}

// FileDifference is a file that is not the same in all packagings. Digests goes with PackagingsError.Plans; a zero
// digest means that the packaging lacks the file.
type FileDifference struct {
	Name    string
	Digests []identity.Digest
}

// Error names the files.
func (e *PackagingsError) Error() string {
	var names []string
	for _, d := range e.Differences {
		names = append(names, d.Name)
	}
	text := fmt.Sprintf("base %s comes in %d packagings", e.Aggregate, len(e.Plans)+e.More)
	if len(names) == 0 {
		return text + ", more than are compared"
	}
	return text + " that differ in " + strings.Join(names, ", ")
}

// Shards returns the newest of the packagings, for who asks about nothing but the shards. alike says that all of them
// call those the same; where some are not listed, it is not known.
func (e *PackagingsError) Shards() (newest Plan, alike bool) {
	newest, alike = e.Plans[0], e.More == 0
	for _, p := range e.Plans {
		alike = alike && slices.Equal(p.Base.Shards, newest.Base.Shards)
	}
	return newest, alike
}

// ResolveAggregate finds an artifact that holds the base with an aggregate: the newest one that the caller may pull, in
// one repository or, if repo is empty, in any; repo may also name one artifact, as repository:tag or repository@digest.
// What can't be pulled is passed over, as long as there is another. Where the choice would decide about more than
// weights, it is a *PackagingsError. A base that is not there is api.ErrAggregateUnknown, and *ElsewhereError if other
// repositories hold it; an artifact of another base is ErrArtifact.
func ResolveAggregate(ctx context.Context, c *client.Client, a identity.Aggregate, repo string) (Plan, error) {
	if strings.ContainsAny(repo, ":@") {
		name, ref, err := api.ParseReference(repo)
		if err != nil {
			return Plan{}, err
		}
		return resolveHeld(ctx, c, a, client.Reference{Host: c.Host(), Repo: name, Tag: ref.Tag, Digest: ref.Digest})
	}
	all, err := packagings(ctx, c, a, repo)
	if err != nil {
		return Plan{}, fmt.Errorf("resolve base %s: %w", a, err)
	}
	if len(all) == 0 {
		return Plan{}, elsewhere(ctx, c, a, repo)
	}
	plans, more, err := firstOf(ctx, c, a, all)
	if err != nil {
		return Plan{}, err
	}
	return Choose(a, plans, more)
}

// CheckPlace refuses what is neither a repository nor, as repository:tag or repository@digest, an artifact in one.
func CheckPlace(repo string) error {
	if !strings.ContainsAny(repo, ":@") {
		return api.CheckRepo(repo)
	}
	_, _, err := api.ParseReference(repo)
	return err
}

// Passable says whether an error of ResolveHeld is about that one manifest: another one of the same base may do.
func Passable(err error) bool {
	return errors.Is(err, ErrArtifact) || errors.Is(err, api.ErrManifestUnknown)
}

// firstOf returns the newest plan of each packaging, of those that can be pulled. more is how many packagings were not
// looked at, those that are packed left out.
func firstOf(ctx context.Context, c *client.Client, a identity.Aggregate, all []dressed) (
	plans []Plan, more int, err error,
) {
	var passed error
	tried := 0
	for i, d := range all {
		if len(plans) == maxCompared || tried >= maxTried {
			more = len(slices.DeleteFunc(slices.Clone(all[i:]), func(d dressed) bool { return d.packed }))
			break
		}
		for _, h := range d.held {
			tried++
			p, err := ResolveHeld(ctx, c, a, h)
			if err == nil {
				plans = append(plans, p)
				break
			}
			if !Passable(err) {
				return nil, 0, err
			}
			if passed == nil {
				passed = err
			}
		}
	}
	if len(plans) == 0 {
		return nil, 0, passed
	}
	plans[0].Passed = passed
	return plans, more, nil
}

// Choose returns the first of several plans of one base, of which more are not listed. Where the choice would decide
// about more than how the shards are called, it is a *PackagingsError.
func Choose(a identity.Aggregate, plans []Plan, more int) (Plan, error) {
	e := &PackagingsError{Aggregate: a, Plans: plans, More: more}
	if e.Differences = differences(plans); len(e.Differences) > 0 || more > 0 {
		return Plan{}, e
	}
	return plans[0], nil
}

// MaxElsewhere is how many repositories an ElsewhereError names.
const MaxElsewhere = 5

// ElsewhereError: a base is not in the repository that was named, but in others. It is an api.ErrAggregateUnknown.
type ElsewhereError struct {
	Aggregate    identity.Aggregate
	Repo         string
	Repositories []string // that hold it; more than MaxElsewhere of them are not named
}

// Error names some of the repositories.
func (e *ElsewhereError) Error() string {
	held, more := e.Repositories, ""
	if len(held) > MaxElsewhere {
		held, more = held[:MaxElsewhere], " and more"
	}
	return fmt.Sprintf("base %s is not in repository %q; it is in %s%s", e.Aggregate, e.Repo, strings.Join(held, ", "), more)
}

// Unwrap returns api.ErrAggregateUnknown.
func (e *ElsewhereError) Unwrap() error { return api.ErrAggregateUnknown }

// elsewhere is the error for a base that repo lacks.
func elsewhere(ctx context.Context, c *client.Client, a identity.Aggregate, repo string) error {
	e := &ElsewhereError{Aggregate: a, Repo: repo}
	for page, err := range c.BasePages(ctx, a) {
		if err != nil {
			return fmt.Errorf("resolve base %s: %w", a, err)
		}
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				if !slices.Contains(e.Repositories, h.Repository) {
					e.Repositories = append(e.Repositories, h.Repository)
				}
			}
		}
		if len(e.Repositories) > MaxElsewhere {
			break
		}
	}
	if len(e.Repositories) == 0 {
		return fmt.Errorf("resolve base %s in repository %q: %w", a, repo, api.ErrAggregateUnknown)
	}
	return e
}

// AggregateError: a text is meant as an aggregate and is spelled in another way.
type AggregateError struct {
	Given string
	Meant identity.Aggregate // zero: can't be told
}

// Error says how an aggregate is spelled.
func (e *AggregateError) Error() string {
	if a, err := identity.ParseAggregate(e.Given); err == nil {
		return fmt.Sprintf("%s stands for no base", a)
	}
	return fmt.Sprintf("%.200q is no aggregate, which is sha256: and 64 lowercase hex digits", e.Given)
}

// Hint says what was most likely meant.
func (e *AggregateError) Hint() string {
	if e.Meant.IsZero() {
		return "kiln-push identify DIR prints the aggregate of a folder"
	}
	return "write it as " + e.Meant.String()
}

// digestLike matches what looks like a digest of some kind: with the name of a hash in front, or of the right length.
var digestLike = regexp.MustCompile(`^(?i)(sha-?[0-9]+:[^/]*|[0-9a-f]{64})$`)

// ParseAggregate reads an aggregate. is says whether the text is meant as one; if it is not spelled as one, or is that of
// no base, all zeros, err is an *AggregateError.
func ParseAggregate(s string) (a identity.Aggregate, is bool, err error) {
	if !digestLike.MatchString(s) {
		return a, false, nil
	}
	if a, err = identity.ParseAggregate(s); err == nil && !a.IsZero() {
		return a, true, nil
	}
	e := &AggregateError{Given: s}
	hex := strings.TrimPrefix(strings.TrimPrefix(strings.ToLower(s), "sha256:"), "sha-256:")
	e.Meant, _ = identity.ParseAggregate("sha256:" + hex) // zero where that is none either
	return identity.Aggregate{}, true, e
}

// dressed are the newest manifests of one packaging, newest first.
type dressed struct {
	packed bool // the registry says that they can't be pulled into a folder as they are
	held   []api.Held
}

// packagings returns the packagings of a base, newest first; those that are packed come last.
func packagings(ctx context.Context, c *client.Client, a identity.Aggregate, repo string) ([]dressed, error) {
	all := map[identity.Digest]dressed{}
	for page, err := range c.BasePages(ctx, a) {
		if err != nil {
			return nil, err
		}
		for _, p := range page.Packagings {
			d := all[p.ID]
			d.packed = d.packed || len(p.Packed) > 0
			for _, h := range p.Manifests {
				if repo == "" || h.Repository == repo {
					d.held = append(d.held, h)
				}
			}
			if len(d.held) > 0 {
				slices.SortFunc(d.held, newer)
				d.held = d.held[:min(len(d.held), maxTried)]
				all[p.ID] = d
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b dressed) int {
		if a.packed != b.packed {
			return map[bool]int{true: 1, false: -1}[a.packed]
		}
		return newer(a.held[0], b.held[0])
	}), nil
}

// newer orders manifests by when the registry took them, the newest first.
func newer(a, b api.Held) int {
	return cmp.Or(b.Created.Compare(a.Created), cmp.Compare(a.Repository, b.Repository), a.Digest.Compare(b.Digest))
}

// ResolveHeld reads a manifest that the registry lists for a base. ErrArtifact, if it does not hold that base.
func ResolveHeld(ctx context.Context, c *client.Client, a identity.Aggregate, h api.Held) (Plan, error) {
	return resolveHeld(ctx, c, a, client.Reference{Host: c.Host(), Repo: h.Repository, Digest: h.Digest})
}

func resolveHeld(ctx context.Context, c *client.Client, a identity.Aggregate, ref client.Reference) (Plan, error) {
	p, err := Resolve(ctx, c, ref)
	if err != nil {
		return Plan{}, err
	}
	switch {
	case p.Aggregate.IsZero():
		return Plan{}, fmt.Errorf("%w: %s is asked for as base %s, and is none: %w", ErrArtifact, p.Reference(), a, p.NoBase)
	case p.Aggregate != a:
		return Plan{}, fmt.Errorf("%w: %s is asked for as base %s, and its layers say %s", ErrArtifact, p.Reference(), a,
			p.Aggregate)
	}
	return p, nil
}
