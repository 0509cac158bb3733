package artifact

import (
	"context"
	"encoding/json"
	"fmt"
	"os"

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

// Learn asks a registry for the full manifest of a base of which only the aggregate is known. api.ErrAggregateUnknown;
// an *Error if b is no base.
func (b *Base) Learn(ctx context.Context, registry string, dial transfer.Dial) error {
	if b.Aggregate.IsZero() {
		return &Error{Code: CodeNoBase, Msg: b.Name + " is no base", Hint: "name the folder or the reference of a base"}
	}
	if b.Manifest != nil {
		return nil
	}
	c, err := dial(registry, true)
	if err != nil {
		return err
	}
	defer c.Close()
	m, err := c.BaseManifest(ctx, b.Aggregate)
	if err != nil {
		return fmt.Errorf("shards of base %s: %w", b.Aggregate, err)
	}
	b.Manifest = &m
	return nil
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
	Name        string            // as it was asked for
	Annotations map[string]string // what the manifest says; nothing of it was checked here
}

// FindManifest asks a registry for the manifest that a tag or a digest of a repository names. api.ErrManifestUnknown.
func FindManifest(ctx context.Context, c *client.Client, ref client.Reference) (f Found, err error) {
	var m client.Manifest
	err = c.Retry(ctx, ref.String(), func() (err error) {
		m, err = c.Manifest(ctx, ref.Repo, ref.Name())
		return err
	})
	var says struct {
		Annotations map[string]string `json:"annotations"`
	}
	if err == nil {
		err = json.Unmarshal(m.Bytes, &says)
	}
	if err != nil {
		return f, fmt.Errorf("find %s: %w", ref, err)
	}
	return Found{
		Subject: transfer.Subject{MediaType: m.MediaType, Digest: m.Digest, Size: int64(len(m.Bytes))},
		Name:    ref.String(), Annotations: says.Annotations,
	}, nil
}
