package resident

import (
	"context"
	"errors"
	"io"
	"net/http"

	"github.com/kiln-registry/kiln-registry/gpuload"
	"github.com/kiln-registry/kiln-registry/gpuload/adapters"
	"github.com/kiln-registry/kiln-registry/gpuload/attach"
	"github.com/kiln-registry/kiln-registry/identity"
	"github.com/kiln-registry/kiln-registry/internal/strictjson"
)

// maxRequest bounds the body that names an adapter, in bytes.
const maxRequest = 64 << 10

// adapterRoutes adds the routes of adapters. base is the pattern of the path of the base.
func (s *Server) adapterRoutes(base string, all map[string]route) {
	const one = "/adapters/{digest}"
	for pattern, f := range map[string]route{
		"GET " + base + "/adapters":                     s.listAdapters,
		"POST " + base + "/adapters":                    s.loadAdapter,
		"GET " + base + one:                             s.adapter,
		"DELETE " + base + one:                          s.unloadAdapter,
		"GET " + base + one + "/files/{name...}":        s.adapterFile,
		"GET " + base + one + "/shards/{sha256}/header": s.adapterHeader,
	} {
		all[pattern] = func(w http.ResponseWriter, r *http.Request, h *Held) error { return refusedAdapter(f(w, r, h)) }
	}
}

// adapterCodes are the codes of what adapters.Set refuses.
var adapterCodes = []struct {
	err  error
	code string
}{
	{adapters.ErrClosed, attach.CodeDraining},
	{adapters.ErrName, attach.CodeBadRequest},
	{adapters.ErrUnknown, attach.CodeAdapterUnknown},
	{adapters.ErrSeveral, attach.CodeAdapterAmbiguous},
	{adapters.ErrOtherBase, attach.CodeAdapterOtherBase},
	{adapters.ErrInUse, attach.CodeAdapterInUse},
	{adapters.ErrNoRoom, attach.CodeNoMemory},
	{adapters.ErrRefused, attach.CodeAdapterRefused},
	{adapters.ErrRegistry, attach.CodeAdapterRegistry},
}

// refusedAdapter gives an error of adapters.Set its code.
func refusedAdapter(err error) error {
	for _, x := range adapterCodes {
		if errors.Is(err, x.err) {
			return attach.Refuse(x.code, "%v", err)
		}
	}
	return err
}

func (s *Server) listAdapters(w http.ResponseWriter, _ *http.Request, h *Held) error {
	write(w, http.StatusOK, struct {
		Adapters   []attach.LoadedAdapter `json:"adapters"`
		Generation uint64                 `json:"generation"`
	}{h.adapters(), h.generation()})
	return nil
}

// loadAdapter answers 201 when it was not loaded before.
func (s *Server) loadAdapter(w http.ResponseWriter, r *http.Request, h *Held) error {
	name, err := adapterName(w, r)
	if err != nil {
		return attach.Refuse(attach.CodeBadRequest, "the body: %v", err)
	}
	set, err := h.set()
	if err != nil {
		return err
	}
	if e := s.damaged.Load(); e != nil {
		return e
	}
	a, before, err := set.Load(r.Context(), name)
	if err != nil {
		return err
	}
	status := http.StatusCreated
	if before {
		status = http.StatusOK
	}
	write(w, status, attach.Loaded{LoadedAdapter: wire(a), Before: before, Generation: set.Generation()})
	return nil
}

// adapterName reads a body that names an adapter.
func adapterName(w http.ResponseWriter, r *http.Request) (name string, err error) {
	text, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxRequest))
	if err != nil {
		return "", err
	}
	return name, strictjson.Read(text, func(r *strictjson.Reader) error {
		return r.Struct(strictjson.Field{Name: "adapter", Read: func() (err error) {
			name, err = r.String()
			return err
		}})
	})
}

// set returns the adapters, which a model need not take.
func (h *Held) set() (*adapters.Set, error) {
	if h.Adapters == nil {
		return nil, attach.Refuse(attach.CodeAdapterUnknown, "no adapters are taken here")
	}
	return h.Adapters, nil
}

// named returns the adapters and the one that the path names.
func (h *Held) named(r *http.Request) (set *adapters.Set, d identity.Digest, err error) {
	if d, err = identity.ParseDigest(r.PathValue("digest")); err != nil {
		return nil, d, attach.Refuse(attach.CodeBadRequest, "an adapter is named by the digest of its manifest here: %v", err)
	}
	set, err = h.set()
	return set, d, err
}

// adapter answers with the document of an adapter, or makes the connection a lease of it.
func (s *Server) adapter(w http.ResponseWriter, r *http.Request, h *Held) error {
	set, d, err := h.named(r)
	if err != nil {
		return err
	}
	a, weights, err := set.Show(d)
	if err != nil {
		return err
	}
	it := attachable{lease: func() ([]gpuload.Handle, func(), error) {
		l, err := set.Attach(d)
		if err != nil {
			return nil, nil, err
		}
		return l.Handles, l.Release, nil
	}}
	it.document, err = describe(weights, a.Base, &attach.Adapter{Digest: d, Name: a.Name}, a.LoadedAt)
	if errors.Is(err, gpuload.ErrState) {
		return attach.Refuse(attach.CodeAdapterUnknown, "adapter %s is being unloaded", d)
	}
	if err != nil {
		return err
	}
	return s.attach(w, r, &it)
}

func (s *Server) unloadAdapter(w http.ResponseWriter, r *http.Request, h *Held) error {
	set, d, err := h.named(r)
	if err == nil {
		err = set.Unload(d)
	}
	if err != nil {
		return err
	}
	write(w, http.StatusOK, struct {
		Generation uint64 `json:"generation"`
	}{set.Generation()})
	return nil
}

// adapterFile answers with a document that is kept beside the weights.
func (s *Server) adapterFile(w http.ResponseWriter, r *http.Request, h *Held) error {
	set, d, err := h.named(r)
	if err != nil {
		return err
	}
	text, err := set.Text(d, r.PathValue("name"))
	if err != nil {
		return err
	}
	writeBytes(w, "application/octet-stream", http.StatusOK, text)
	return nil
}

// adapterHeader answers with the bytes of an adapter's shard that are not in its memory.
func (s *Server) adapterHeader(w http.ResponseWriter, r *http.Request, h *Held) error {
	set, d, err := h.named(r)
	if err != nil {
		return err
	}
	_, weights, err := set.Show(d)
	if err != nil {
		return err
	}
	return header(w, r, weights)
}

// wire is an adapter as answers have it.
func wire(a adapters.Adapter) attach.LoadedAdapter {
	l := attach.LoadedAdapter{
		Adapter: attach.Adapter{Digest: a.Digest, Name: a.Name}, From: a.From, Evidence: string(a.Evidence),
		StatedAt: a.StatedAt, Bytes: a.Bytes, Files: []attach.AdapterFile{}, Leases: a.Leases, Loaded: a.LoadedAt,
	}
	for _, f := range a.Files {
		l.Files = append(l.Files, attach.AdapterFile(f))
	}
	return l
}

// adapters lists what is loaded on the base.
func (h *Held) adapters() []attach.LoadedAdapter {
	list := []attach.LoadedAdapter{}
	if h.Adapters != nil {
		for _, a := range h.Adapters.List() {
			list = append(list, wire(a))
		}
	}
	return list
}

// generation counts from 1 what came to the base and went.
func (h *Held) generation() uint64 {
	if h.Adapters == nil {
		return 1
	}
	return h.Adapters.Generation()
}

// wait returns the generation when it is above after, or ctx has ended.
func (h *Held) wait(ctx context.Context, after uint64) uint64 {
	if h.Adapters != nil {
		return h.Adapters.Wait(ctx, after)
	}
	if after >= h.generation() {
		<-ctx.Done()
	}
	return h.generation()
}

// auditAdapters reads back what is loaded on the base. ErrState, when that is about to go.
func (h *Held) auditAdapters(ctx context.Context) error {
	if h.Adapters == nil {
		return nil
	}
	err := h.Adapters.Audit(ctx)
	if errors.Is(err, adapters.ErrClosed) {
		return gpuload.ErrState
	}
	return err
}

// closeAdapters frees what is loaded on the base, when nobody has it attached or ctx ends.
func (h *Held) closeAdapters(ctx context.Context) error {
	if h.Adapters == nil {
		return nil
	}
	return h.Adapters.Close(ctx)
}
