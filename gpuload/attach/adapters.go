package attach

import (
	"context"
	"net/http"

	"github.com/kiln-registry/kiln-registry/identity"
)

// MaxFile is the longest document of an adapter that is kept, in bytes.
const MaxFile = 1 << 20

// LoadRequest is the body that asks for an adapter.
type LoadRequest struct {
	Adapter string `json:"adapter"` // digest of its manifest, reference, absolute path of a folder, or name
}

// Loaded is the answer: which adapter it is.
type Loaded struct {
	LoadedAdapter
	Before     bool   `json:"before"` // it was loaded already
	Generation uint64 `json:"generation"`
}

// Adapters lists what is loaded on a base.
func (c Client) Adapters(ctx context.Context, a identity.Aggregate) (list []LoadedAdapter, err error) {
	var body struct{ Adapters []LoadedAdapter }
	err = c.Of(a).Do(ctx, http.MethodGet, PathAdapters(a), nil, &body)
	return body.Adapters, err
}

// Load has the holder of a base load an adapter, and returns when it can be attached to. It is named as LoadRequest
// says. The context ends the load, unless others wait for it too.
func (c Client) Load(ctx context.Context, a identity.Aggregate, adapter string) (l Loaded, err error) {
	return l, c.Of(a).Do(ctx, http.MethodPost, PathAdapters(a), LoadRequest{adapter}, &l)
}

// Unload has the holder free an adapter that nobody has attached: CodeAdapterInUse otherwise.
func (c Client) Unload(ctx context.Context, a identity.Aggregate, d identity.Digest) error {
	return c.Of(a).Do(ctx, http.MethodDelete, PathAdapter(a, d), nil, nil)
}

// AdapterHeader is Header for a shard of an adapter, which d is the digest of the manifest of.
func (c Client) AdapterHeader(ctx context.Context, a identity.Aggregate, d, shard identity.Digest) ([]byte, error) {
	return c.Of(a).ask(ctx, http.MethodGet, PathAdapterHeader(a, d, shard), nil, MaxHeader)
}

// AdapterFile returns a document of an adapter that is loaded, such as adapter_config.json. The holder has checked its
// digest.
func (c Client) AdapterFile(ctx context.Context, a identity.Aggregate, d identity.Digest, name string) ([]byte, error) {
	return c.Of(a).ask(ctx, http.MethodGet, PathAdapterFile(a, d, name), nil, MaxFile)
}
