package adapters

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/remote"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/safetensors"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/artifact"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
	"github.com/kiln-registry/kiln-registry/transfer/made"
)

const (
	findPage  = 100  // artifacts asked for at a time
	maxNamed  = 8    // adapters of one name that are listed where several have it
	maxLabel  = 1024 // bytes of a name
	maxListed = 100  // pages of a listing
)

// named is what a text names. One member is set.
type named struct {
	bare   identity.Digest
	ref    client.Reference
	folder string
	label  string
}

// digest is that of the manifest, where the text holds it.
func (n named) digest() identity.Digest {
	if n.bare.IsZero() {
		return n.ref.Digest
	}
	return n.bare
}

// parse reads a text by its form alone.
func parse(text string) (n named, err error) {
	switch {
	case filepath.IsAbs(text):
		return named{folder: filepath.Clean(text)}, nil
	case strings.HasPrefix(text, "sha256:"):
		if n.bare, err = identity.ParseDigest(text); err == nil && n.bare.IsZero() {
			err = errors.New("no manifest has a digest of zeros")
		}
	case strings.HasPrefix(text, "."):
		err = errors.New("a folder is named by its absolute path")
	case strings.Contains(text, "/"):
		n.ref, err = client.ParseReference(text)
		if err == nil && n.ref.Name() == "" {
			err = errors.New("it has neither a tag nor a digest")
		}
	case text == "" || len(text) > maxLabel:
		err = fmt.Errorf("a name has 1 to %d bytes", maxLabel)
	default:
		n.label = text
	}
	if err != nil {
		return n, fmt.Errorf("%.300q %w: %w", text, ErrName, err)
	}
	return n, nil
}

// found is an adapter that may be loaded: what it states about its base was checked, its bytes were not.
type found struct {
	Adapter
	weights identity.Shard
	// read returns the documents of Files.
	read func(ctx context.Context) (map[string][]byte, error)
	// source opens where the weights are read from; m is of them alone.
	source func(m identity.Manifest) (src gpuload.Source, done func() error, err error)
	close  func() error // to be called once
	// otherwise is the reason of an error that has no other.
	otherwise error
}

// reason gives an error of reading f the reason by which callers tell it.
func (f *found) reason(err error) error { return reason(err, f.otherwise) }

// reason gives an error that others made one of ours; where none is known, otherwise, unless that is nil.
func reason(err, otherwise error) error {
	if err == nil {
		return nil
	}
	if known(err) {
		return err
	}
	document, is := errors.AsType[*documents.Error](err)
	switch {
	case is && document.Rule == documents.RuleBaseConflict:
		return fmt.Errorf("%w: %w", ErrOtherBase, err)
	case errors.Is(err, api.ErrManifestUnknown), errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w: %w", ErrUnknown, err)
	case is, broken(err):
		return fmt.Errorf("%w: %w", ErrRefused, err)
	case otherwise == nil:
		return err
	}
	return fmt.Errorf("%w: %w", otherwise, err)
}

// known says whether an error has a reason.
func known(err error) bool {
	for _, one := range []error{
		ErrName, ErrUnknown, ErrSeveral, ErrOtherBase, ErrRefused, ErrRegistry, ErrNoRoom, ErrClosed, errAlone,
		gpuload.ErrDevice, context.Canceled, context.DeadlineExceeded,
	} {
		if errors.Is(err, one) {
			return true
		}
	}
	return false
}

// broken says whether an error is about the files of an adapter.
func broken(err error) bool {
	if _, is := errors.AsType[*safetensors.Error](err); is {
		return true
	}
	if _, is := errors.AsType[*artifact.Error](err); is {
		return true
	}
	if _, is := errors.AsType[*transfer.MismatchError](err); is {
		return true
	}
	if _, is := errors.AsType[*folder.KindError](err); is {
		return true
	}
	return errors.Is(err, gpuload.ErrMismatch) || errors.Is(err, gpuload.ErrChanged) ||
		errors.Is(err, transfer.ErrArtifact) || errors.Is(err, folder.ErrChanged)
}

// resolve finds what was named and checks what it states about its base.
func (s *Set) resolve(ctx context.Context, n named) (f *found, err error) {
	if n.folder != "" {
		f, err = s.onDisk(ctx, n.folder)
		return f, reason(err, ErrRefused)
	}
	host := n.ref.Host
	if host == "" {
		host = s.o.Registry
	}
	if host == "" {
		return nil, fmt.Errorf("%w: no registry is known that could be asked; give a reference, host/repository@digest",
			ErrName)
	}
	c, err := s.o.Dial(host, true)
	if err != nil {
		return nil, reason(err, ErrRegistry)
	}
	if f, err = s.far(ctx, c, n); err != nil {
		c.Close()
		return nil, reason(err, ErrRegistry)
	}
	return f, nil
}

// far finds an adapter in a registry.
func (s *Set) far(ctx context.Context, c *client.Client, n named) (*found, error) {
	ref, label := n.ref, n.label
	var err error
	switch {
	case !n.bare.IsZero():
		ref, err = s.byDigest(ctx, c, n.bare)
	case label != "":
		ref, err = s.byName(ctx, c, label)
	}
	if err != nil {
		return nil, err
	}
	plan, err := transfer.Resolve(ctx, c, ref)
	if err != nil {
		return nil, err
	}
	if plan.Kind != api.KindAdapter {
		return nil, fmt.Errorf("%w: %s is %s, no adapter", ErrRefused, plan.Reference(), made.Named(plan.Kind))
	}
	a, err := made.Read(ctx, c, plan)
	if err != nil {
		return nil, err
	}
	if err := s.bound(a); err != nil {
		return nil, err
	}
	return s.packed(ctx, c, plan, a)
}

// bound refuses what does not state the base that is held, and what somebody contradicts.
func (s *Set) bound(a made.Artifact) error {
	for _, says := range []string{a.Disputed, a.Conflict} {
		if says != "" {
			return fmt.Errorf("%w: %s: %s", ErrOtherBase, a.Reference, says)
		}
	}
	return s.states(a.Reference, a.Binding())
}

// states refuses a binding to anything but the base that is held.
func (s *Set) states(from string, b documents.Binding) error {
	switch {
	case b.Aggregate.IsZero():
		return fmt.Errorf("%w: %s states no base; kiln-push bind says which one it was made from", ErrOtherBase, from)
	case b.Aggregate != s.o.Base:
		return fmt.Errorf("%w: %s was made from %s (%s: %s), and %s is held", ErrOtherBase, from, b.Aggregate, b.Evidence,
			b.Where(), s.o.Base)
	case b.Evidence != documents.EvidenceDocument && b.Evidence != documents.EvidenceAsserted:
		return fmt.Errorf("%w: that %s was made from it rests on %s alone", ErrOtherBase, from, b.Evidence)
	}
	return nil
}

// byDigest asks the registry in which repository a manifest is.
func (s *Set) byDigest(ctx context.Context, c *client.Client, d identity.Digest) (client.Reference, error) {
	var l api.Lineage
	err := c.Retry(ctx, d.String(), func() (err error) {
		l, err = c.Lineage(ctx, d, "", "", 1)
		return err
	})
	return client.Reference{Host: c.Host(), Repo: l.Artifact.Repository, Digest: d}, err
}

// byName asks the registry for the one adapter of that name which was made from the base.
func (s *Set) byName(ctx context.Context, c *client.Client, name string) (ref client.Reference, err error) {
	var all []client.Reference
	after := ""
	for page := 0; page == 0 || after != ""; page++ {
		if page == maxListed {
			return ref, fmt.Errorf("%w: a listing of more than %d pages; name it by its digest", ErrRegistry, maxListed)
		}
		var list api.ArtifactList
		err = c.Retry(ctx, name, func() (err error) {
			filter := client.Filter{Kind: api.KindAdapter, Name: name}
			list, err = c.Made(ctx, s.o.Base, filter, after, findPage)
			return err
		})
		if err != nil {
			return ref, err
		}
		for _, x := range list.Artifacts {
			r := client.Reference{Host: c.Host(), Repo: x.Repository, Digest: x.Digest}
			same := func(r client.Reference) bool { return r.Digest == x.Digest }
			if x.Name == name && x.Kind == api.KindAdapter && !slices.ContainsFunc(all, same) {
				all = append(all, r)
			}
		}
		after = list.Next
	}
	switch len(all) {
	case 0:
		return ref, fmt.Errorf("%w: %s has none that calls itself %.200q and was made from %s", ErrUnknown, c.Host(), name,
			s.o.Base)
	case 1:
		return all[0], nil
	}
	return ref, severalError(name, all)
}

// severalError names the adapters, so that the caller can choose.
func severalError(name string, all []client.Reference) error {
	var refs []string
	for _, r := range all[:min(len(all), maxNamed)] {
		refs = append(refs, r.String())
	}
	more := ""
	if len(all) > maxNamed {
		more = fmt.Sprintf(" and %d more", len(all)-maxNamed)
	}
	return fmt.Errorf("%w: %d are called %.200q: %s%s; name one by its digest", ErrSeveral, len(all), name,
		strings.Join(refs, ", "), more)
}

// filesOf names the files that a loader reads.
func filesOf(manifest []byte) (documents.AdapterFiles, error) {
	if manifest == nil {
		return documents.AdapterFiles{Model: documents.AdapterWeightsFile, Config: documents.AdapterConfigFile}, nil
	}
	m, err := documents.ParseAdapterManifest(manifest)
	return m.Files, err
}

// packed is an adapter of a registry.
func (s *Set) packed(ctx context.Context, c *client.Client, plan transfer.Plan, a made.Artifact) (*found, error) {
	f := &found{otherwise: ErrRegistry, close: func() error { c.Close(); return nil }}
	f.Adapter = s.adapter(plan.Manifest, a.Name, plan.Reference(), a.Binding())
	var manifest []byte
	var err error
	if plan.Has(documents.AdapterManifestFile) {
		if manifest, err = plan.Document(ctx, c, documents.AdapterManifestFile, MaxFile); err != nil {
			return nil, err
		}
	}
	names, err := filesOf(manifest)
	if err != nil {
		return nil, err
	}
	for _, x := range plan.Files {
		switch x.Name {
		case names.Model:
			f.weights = identity.Shard{Filename: x.Name, Size: uint64(x.Size), Digest: x.Digest}
		case names.Config, documents.AdapterManifestFile:
			f.keep(File{x.Name, x.Size, x.Digest})
		}
	}
	if err := f.whole(names); err != nil {
		return nil, err
	}
	f.read = func(ctx context.Context) (map[string][]byte, error) {
		texts := map[string][]byte{}
		for _, x := range f.Files {
			text := manifest
			if x.Name != documents.AdapterManifestFile {
				if text, err = plan.Document(ctx, c, x.Name, MaxFile); err != nil {
					return nil, f.reason(err)
				}
			}
			texts[x.Name] = text
		}
		return texts, nil
	}
	f.source = func(m identity.Manifest) (gpuload.Source, func() error, error) {
		return remote.New(c, plan.Repository, m), func() error { return nil }, nil
	}
	return f, nil
}

func (s *Set) adapter(d identity.Digest, name, from string, b documents.Binding) Adapter {
	return Adapter{Digest: d, Name: name, From: from, Base: b.Aggregate, Evidence: b.Evidence, StatedAt: b.Where(),
		Files: []File{}}
}

// keep adds a document.
func (f *found) keep(x File) {
	f.Files = append(f.Files, x)
	f.Bytes += x.Size
}

// whole refuses an adapter that lacks a file which a loader reads, or of which a document is too large.
func (f *found) whole(names documents.AdapterFiles) error {
	if f.weights.Filename == "" {
		return fmt.Errorf("%w: %s holds no %s", ErrRefused, f.From, names.Model)
	}
	if !slices.ContainsFunc(f.Files, func(x File) bool { return x.Name == names.Config }) {
		return fmt.Errorf("%w: %s holds no %s", ErrRefused, f.From, names.Config)
	}
	for _, x := range f.Files {
		if x.Size > MaxFile {
			return fmt.Errorf("%w: %s of %s has %d bytes, more than %d", ErrRefused, x.Name, f.From, x.Size, MaxFile)
		}
	}
	f.Bytes += int64(f.weights.Size)
	return nil
}

// onDisk is an adapter in a folder. Its files are read to learn its digest, and its weights again as they are loaded,
// when they must have the same bytes.
func (s *Set) onDisk(ctx context.Context, dir string) (*found, error) {
	a, err := artifact.Read(ctx, api.KindAdapter, dir, artifact.Options{Legacy: true})
	if err != nil {
		return nil, err
	}
	if err := s.states(dir, a.Base); err != nil {
		return nil, err
	}
	digest, err := a.Manifest()
	if err != nil {
		return nil, err
	}
	f := &found{otherwise: ErrRefused, close: func() error { return nil }}
	f.Adapter = s.adapter(digest, a.Name, dir, a.Base)
	names, err := filesOf(a.Text(documents.AdapterManifestFile))
	if err != nil {
		return nil, err
	}
	texts := map[string][]byte{}
	for _, name := range []string{names.Config, documents.AdapterManifestFile} {
		if text := a.Text(name); text != nil {
			texts[name] = text
			f.keep(File{name, int64(len(text)), a.Digest(name)})
		}
	}
	info, err := os.Lstat(filepath.Join(dir, names.Model))
	if err != nil {
		return nil, err
	}
	f.weights = identity.Shard{Filename: names.Model, Size: uint64(info.Size()), Digest: a.Digest(names.Model)}
	f.read = func(context.Context) (map[string][]byte, error) { return texts, nil }
	f.source = func(identity.Manifest) (gpuload.Source, func() error, error) {
		src, err := gpuload.OpenDir(dir, false, nil)
		if err != nil {
			return nil, nil, f.reason(err)
		}
		return src, src.Close, nil
	}
	return f, f.whole(names)
}
