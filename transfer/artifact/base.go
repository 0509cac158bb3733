package artifact

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// Base is a base model that somebody names. The zero Base is none.
type Base struct {
	Aggregate identity.Aggregate
	Manifest  *identity.Manifest // nil: only the aggregate is known
	Subject   transfer.Subject   // the manifest that was named; zero: none was
	Name      string             // as it was given
	Ref       client.Reference   // zero: it was not given as one
	Kind      api.Kind           // of what Ref names; empty: not known
}

// option is how a base that was named shows in messages.
const option documents.Kind = "option"

// claim is what naming b says about an artifact.
func (b Base) claim() documents.Binding {
	if b.Aggregate.IsZero() {
		return documents.Binding{Evidence: documents.EvidenceNone}
	}
	claim := documents.Binding{Evidence: documents.EvidenceAsserted, Aggregate: b.Aggregate, Kind: option, Path: "--base"}
	if b.Ref.Repo != "" {
		claim.Path += " " + b.Name
	}
	return claim
}

// FindBase finds the base that a text names: an aggregate, which need not be held anywhere, or a reference to a base in
// a registry, which then becomes the subject of what is pushed. A reference to what is no base is an *Error; the other
// errors are those of transfer.Resolve and, for a misspelt aggregate, *transfer.AggregateError.
func FindBase(ctx context.Context, text string, dial transfer.Dial) (Base, error) {
	if a, is, err := transfer.ParseAggregate(text); is {
		return Base{Aggregate: a, Name: text}, err
	}
	b, noBase, err := findReference(ctx, text, dial)
	if _, stat := os.Stat(text); err != nil && stat == nil {
		msg := fmt.Sprintf("%.200q is on this disk: a base is named here by its REF or its aggregate", text)
		return b, &Error{Code: CodePath, Msg: msg, Hint: "kiln-push identify DIR prints the aggregate of a folder"}
	}
	if err == nil && noBase != nil {
		err = &Error{Code: CodeNoBase, Msg: fmt.Sprintf("%s is no base: %v", text, noBase),
			Hint: "name the base model, or give its aggregate (sha256:…)"}
	}
	return b, err
}

// FindModel finds the model that a text names: as FindBase does, and also in a directory, which is hashed, or in a file
// with a shard manifest. A reference may be to what is no base: then the aggregate is zero, and the subject names it.
func FindModel(ctx context.Context, text string, dial transfer.Dial, o folder.Options, w transfer.Watch) (Base, error) {
	if _, err := os.Stat(text); err == nil {
		side, err := transfer.OpenSide(ctx, text, dial, o, w)
		if err != nil {
			return Base{}, err
		}
		defer side.Close()
		return Base{Aggregate: side.Summary.Aggregate, Manifest: side.Manifest, Name: text}, nil
	}
	if a, is, err := transfer.ParseAggregate(text); is {
		return Base{Aggregate: a, Name: text}, err
	}
	if _, err := client.ParseReference(text); err != nil {
		return Base{}, fmt.Errorf("%.200q is no folder, file or aggregate, and as a reference: %w", text, err)
	}
	b, _, err := findReference(ctx, text, dial)
	return b, err
}

// Check refuses an aggregate that stands for nothing but a manifest of c's registry: its digest was taken for the
// aggregate of the base. Another registry, and what is not known there, is no error.
func (b Base) Check(ctx context.Context, c *client.Client) error {
	if b.Aggregate.IsZero() || b.Manifest != nil {
		return nil
	}
	if held, known := Held(ctx, c, b.Aggregate); held || !known {
		return nil
	}
	l, err := c.Lineage(ctx, identity.Digest(b.Aggregate), "", "", 1)
	if err != nil {
		return nil // which is what most often is: it is no manifest
	}
	e := &Error{Code: CodeManifest, Hint: "kiln-push identify DIR prints the aggregate of a folder", Msg: fmt.Sprintf(
		"%s is the digest of a manifest of %s in %s, not the aggregate of a base", b.Aggregate, named(l.Artifact.Kind),
		l.Artifact.Repository)}
	if l.Artifact.Kind != api.KindBase {
		return e
	}
	ref := client.Reference{Host: c.Host(), Repo: l.Artifact.Repository, Digest: l.Artifact.Digest}
	if plan, err := transfer.Resolve(ctx, c, ref); err == nil && !plan.Aggregate.IsZero() {
		e.Hint = "the aggregate of that base is " + plan.Aggregate.String()
	}
	return e
}

// named is a kind for people.
func named(k api.Kind) string {
	switch k {
	case "":
		return "an artifact"
	case api.KindAdapter, api.KindEval:
		return "an " + string(k)
	}
	return "a " + string(k)
}

// Held says whether a registry holds a base of that aggregate that the caller may pull. It is not known where the
// registry does not say: another than one of this project.
func Held(ctx context.Context, c *client.Client, a identity.Aggregate) (held, known bool) {
	_, err := c.BasePage(ctx, a, "", 1)
	var answered *api.Error
	switch {
	case err == nil:
		return true, true
	case errors.Is(err, api.ErrAggregateUnknown) && errors.As(err, &answered) && answered.Message != "": // in its own words
		return false, true
	}
	return false, false
}

// maxRepos is how many repositories Locate looks for.
const maxRepos = 8

// Locate looks in a registry for the repositories that hold b, of which it names the first few. Where it is one, b is
// from then on what that holds. The errors are those of client.Client.
func (b *Base) Locate(ctx context.Context, c *client.Client) (repos []string, err error) {
	var newest api.Held
	for page, err := range c.BasePages(ctx, b.Aggregate) {
		if errors.Is(err, api.ErrAggregateUnknown) {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		for _, p := range page.Packagings {
			for _, h := range p.Manifests {
				if newest.Digest.IsZero() || h.Created.After(newest.Created) {
					newest = h
				}
				if !slices.Contains(repos, h.Repository) {
					repos = append(repos, h.Repository)
				}
			}
		}
		if len(repos) >= maxRepos {
			break
		}
	}
	if len(repos) != 1 {
		return repos, nil
	}
	b.Ref = client.Reference{Host: c.Host(), Repo: newest.Repository, Digest: newest.Digest}
	f, err := FindManifest(ctx, c, b.Ref)
	b.Subject = f.Subject
	return repos, err
}

// Learn asks a registry for the full manifest of a base of which only the aggregate is known, with the file names that it
// has in one repository, or as one artifact there, or, if that is empty, in its newest packaging. several says that
// packagings there call its files by other names, or may; the newest is taken. api.ErrAggregateUnknown; an *Error if b is
// no base.
func (b *Base) Learn(ctx context.Context, registry, repo string, dial transfer.Dial) (several bool, err error) {
	if b.Aggregate.IsZero() {
		return false, &Error{Code: CodeNoBase, Msg: b.Name + " is no base", Hint: "name the folder or the reference of a base"}
	}
	if b.Manifest != nil {
		return false, nil
	}
	c, err := dial(registry, true)
	if err != nil {
		return false, err
	}
	defer c.Close()
	var m identity.Manifest
	if repo == "" {
		m, err = c.BaseManifest(ctx, b.Aggregate)
		several = true
	} else {
		var plan transfer.Plan
		plan, err = transfer.ResolveAggregate(ctx, c, b.Aggregate, repo)
		if e, ok := errors.AsType[*transfer.PackagingsError](err); ok {
			newest, alike := e.Shards()
			plan, several, err = newest, !alike, nil
		}
		m = plan.Base
	}
	if err != nil {
		return false, fmt.Errorf("shards of base %s: %w", b.Aggregate, err)
	}
	b.Manifest = &m
	return several, nil
}

// findReference finds what a reference names, and says why that is no base, if it is none.
func findReference(ctx context.Context, text string, dial transfer.Dial) (b Base, noBase, err error) {
	ref, err := client.ParseReference(text)
	if err != nil {
		return b, nil, err
	}
	c, err := dial(ref.Host, true)
	if err != nil {
		return b, nil, err
	}
	defer c.Close()
	plan, err := transfer.Resolve(ctx, c, ref)
	if err != nil {
		return b, nil, err
	}
	b = Base{Aggregate: plan.Aggregate, Name: text, Ref: ref, Kind: plan.Kind}
	if plan.NoBase == nil {
		b.Manifest = &plan.Base
	}
	f, err := FindManifest(ctx, c, client.Reference{Host: ref.Host, Repo: ref.Repo, Digest: plan.Manifest})
	b.Subject = f.Subject
	return b, plan.NoBase, err
}

// Found is a manifest that a registry holds.
type Found struct {
	transfer.Subject
	Name         string            // as it was asked for
	Annotations  map[string]string // what the manifest says; nothing of it was checked here
	ArtifactType string            // likewise
}

// FindManifest asks a registry for the manifest that a tag or a digest of a repository names. api.ErrManifestUnknown.
func FindManifest(ctx context.Context, c *client.Client, ref client.Reference) (f Found, err error) {
	var m client.Manifest
	err = c.Retry(ctx, ref.String(), func() (err error) {
		m, err = c.Manifest(ctx, ref.Repo, ref.Name())
		return err
	})
	var says struct {
		Annotations  map[string]string `json:"annotations"`
		ArtifactType string            `json:"artifactType"`
	}
	if err == nil {
		err = json.Unmarshal(m.Bytes, &says)
	}
	if err != nil {
		return f, fmt.Errorf("find %s: %w", ref, err)
	}
	return Found{
		Subject: transfer.Subject{MediaType: m.MediaType, Digest: m.Digest, Size: int64(len(m.Bytes))},
		Name:    ref.String(), Annotations: says.Annotations, ArtifactType: says.ArtifactType,
	}, nil
}
