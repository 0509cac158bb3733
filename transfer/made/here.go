package made

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/api/client"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// Here is the base at hand that an artifact is compared with. The zero Here means that there is none.
type Here struct {
	Name       string // as it was given
	Registry   string // that was named with it; empty: none was
	Base       resume.Base
	Identities documents.Identities
	Provenance *documents.Provenance // of the server that runs it; nil: only the digest in Identities is known, if that
}

// Aggregate is that of the base; zero: it is not known.
func (h Here) Aggregate() identity.Aggregate {
	if a := h.Base.Manifest.Aggregate; !a.IsZero() {
		return a
	}
	return h.Base.Summary.Aggregate
}

// OpenHere finds out what base a text names: a folder, which is hashed, a file with a shard manifest, an aggregate, a
// reference, or the address of a server, of which the health answer is read and, where that is enabled, its debug state.
// A server without a base identity is a Here whose base is absent. The errors are those of transfer.OpenSide.
func OpenHere(ctx context.Context, text string, dial transfer.Dial, w transfer.Watch) (Here, error) {
	name := healthOf(text)
	side, err := transfer.OpenSide(ctx, name, dial, folder.Options{AnyDType: true}, w)
	if isAddress(name) && errors.Is(err, transfer.ErrNoIdentity) {
		return Here{Name: text, Base: resume.Base{Absent: true}}, nil
	}
	if err != nil {
		return Here{}, err
	}
	defer side.Close()
	h := Here{Name: text, Registry: side.Registry, Base: resume.Base{Summary: side.Summary}}
	if side.Manifest != nil {
		h.Base.Manifest = *side.Manifest
	}
	h.Identities.Provenance = side.Provenance
	if isAddress(name) {
		err = h.learn(ctx, name, dial)
	}
	return h, err
}

// OpenHeld is OpenHere for an aggregate, as a registry holds it in one repository or, if repo is empty, in any: with the
// names of its shards. Packagings that differ in other files do not matter; if they differ in those names too and names
// says that they are asked about, the error is a *transfer.PackagingsError. The others are those of
// transfer.ResolveAggregate.
func OpenHeld(
	ctx context.Context, a identity.Aggregate, registry, repo string, names bool, dial transfer.Dial,
) (Here, error) {
	c, err := dial(registry, true)
	if err != nil {
		return Here{}, err
	}
	defer c.Close()
	plan, err := transfer.ResolveAggregate(ctx, c, a, repo)
	if several, ok := errors.AsType[*transfer.PackagingsError](err); ok {
		if newest, alike := several.Shards(); alike || !names {
			plan, err = newest, nil
		}
	}
	if err != nil {
		return Here{}, err
	}
	return Here{Name: plan.Reference(), Registry: registry, Base: resume.Base{Summary: plan.Base.Summary(),
		Manifest: plan.Base}}, nil
}

// learn asks a server for the full manifest and the provenance behind its health answer. Most do not give them.
func (h *Here) learn(ctx context.Context, health string, dial transfer.Dial) error {
	u, err := url.Parse(health)
	if err != nil {
		return err
	}
	c, err := dial(u.Host, false)
	if err != nil {
		return err
	}
	defer c.Close()
	u.Path = strings.TrimSuffix(strings.TrimSuffix(u.Path, "/health"), "/v1") + "/v1/debug/model-state"
	state, err := c.ModelState(ctx, u.String())
	if refused := (*client.StatusError)(nil); errors.As(err, &refused) || errors.Is(err, client.ErrNotBlob) {
		return nil
	}
	if err == nil && state.Manifest != nil && state.Manifest.Aggregate != h.Aggregate() {
		err = fmt.Errorf("%s holds base %s, and its health answer says %s: it can't be told which", u, state.Manifest.Aggregate,
			h.Aggregate())
	}
	if err == nil && state.Manifest != nil && state.Manifest.Summary() != h.Base.Summary {
		err = fmt.Errorf("%s holds a base of %d shards with %d bytes, and its health answer says %d with %d: one of them is wrong",
			u, len(state.Manifest.Shards), state.Manifest.TotalSize, h.Base.Summary.ShardCount, h.Base.Summary.TotalSize)
	}
	if err != nil || state.Manifest == nil {
		return err
	}
	h.Base.Manifest = *state.Manifest
	return h.Run(state.Provenance)
}

// Run adds the execution provenance of what runs the base: a kiln.execution-provenance.v1, or nil. The error is a
// *documents.Error.
func (h *Here) Run(provenance []byte) (err error) {
	if provenance == nil {
		return nil
	}
	if h.Provenance, err = documents.ParseProvenance(provenance); err == nil {
		h.Identities = h.Provenance.Identities()
	}
	return err
}

func isAddress(text string) bool {
	return strings.HasPrefix(text, "http://") || strings.HasPrefix(text, "https://")
}

// healthOf completes the address of a server that was named without a path.
func healthOf(text string) string {
	u, err := url.Parse(text)
	if err != nil || !isAddress(text) {
		return text
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/health"
	}
	return u.String()
}

// Contradicts says whether the base at hand calls itself by the aggregate of a base that is known, and yet has another
// count or size of shards: such a server is wrong about what it runs.
func (h Here) Contradicts(is identity.Summary) bool {
	s := h.Base.Summary
	if len(h.Base.Manifest.Shards) > 0 {
		s = h.Base.Manifest.Summary()
	}
	return s.Aggregate == is.Aggregate && s.ShardCount != 0 && is.ShardCount != 0 &&
		(s.ShardCount != is.ShardCount || s.TotalSize != is.TotalSize)
}

// Compare says whether an artifact was made from the base at hand. Where statements about its base disagree, that can't
// be told.
func Compare(a Artifact, h Here) (out resume.Answer) {
	now := resume.Here{Base: h.Base, Identities: h.Identities}
	a = a.Of(h.Aggregate())
	if a.Kind == api.KindEval {
		a.Record.Rows, a.Record.Unbound = a.rows.Rows, a.rows.Unbound
		out = resume.EvalUsed(a.Record, now)
	} else {
		out = resume.AdapterTrained(a.Record, now)
	}
	if h.Base.Absent && out.Verdict == resume.CannotTell && !a.Aggregate().IsZero() {
		out.Reason = fmt.Sprintf("the artifact's base is %s, and the server says that it has no base identity", a.Aggregate())
	}
	if a.Disputed != "" {
		out.Verdict, out.Reason = resume.CannotTell, "the artifact does not record its base, and "+a.Disputed
		out.Evidence = documents.EvidenceAsserted
	}
	return out
}
