package made

import (
	"context"
	"errors"
	"net/url"
	"strings"

	"github.com/kiln-registry/kiln-registry/api"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/identity/documents"
	"github.com/kiln-registry/kiln-registry/identity/resume"
	"github.com/kiln-registry/kiln-registry/transfer"
	"github.com/kiln-registry/kiln-registry/transfer/folder"
)

// Here is the base at hand that an artifact is compared with. The zero Here means that there is none.
type Here struct {
	Name       string // as it was given
	Base       resume.Base
	Identities documents.Identities
}

// Aggregate is that of the base; zero: it is not known.
func (h Here) Aggregate() identity.Aggregate {
	if a := h.Base.Manifest.Aggregate; !a.IsZero() {
		return a
	}
	return h.Base.Summary.Aggregate
}

// OpenHere finds out what base a text names: a folder, which is hashed, a file with a shard manifest, an aggregate, a
// reference, or the address of a server, of which the health answer is read. A server without a base identity is a Here
// whose base is absent. The errors are those of transfer.OpenSide.
func OpenHere(ctx context.Context, text string, dial transfer.Dial, w transfer.Watch) (Here, error) {
	name := healthOf(text)
	side, err := transfer.OpenSide(ctx, name, dial, folder.Options{AnyDType: true}, w)
	if name != text && errors.Is(err, transfer.ErrNoIdentity) {
		return Here{Name: text, Base: resume.Base{Absent: true}}, nil
	}
	if err != nil {
		return Here{}, err
	}
	defer side.Close()
	h := Here{Name: text, Base: resume.Base{Summary: side.Summary}}
	if side.Manifest != nil {
		h.Base.Manifest = *side.Manifest
	}
	return h, nil
}

// healthOf completes the address of a server that was named without a path.
func healthOf(text string) string {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" {
		return text
	}
	if strings.Trim(u.Path, "/") == "" {
		u.Path = "/health"
	}
	return u.String()
}

// Compare says whether an artifact was made from the base at hand.
func Compare(a Artifact, h Here) resume.Answer {
	now := resume.Here{Base: h.Base, Identities: h.Identities}
	if a.Kind == api.KindEval {
		return resume.EvalUsed(a.Record, now)
	}
	return resume.AdapterTrained(a.Record, now)
}
